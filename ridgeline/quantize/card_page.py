"""quality.html beside the weights: the card with plots, by slice, by position and by layer. No torch."""

from __future__ import annotations

import re
from typing import Any

from ridgeline.quant.quality_card import summary_line
from ridgeline.report import web_page
from ridgeline.report.plots import Series, axis, plot, plot_grid

_LAYER = re.compile(r"\.(\d+)\.(.+)$")


def page(card: dict[str, Any]) -> str:
    quality = card["quality"]
    notes = [web_page.paragraph(f"Note: {note}", "quiet") for note in card["notes"]]
    lead = [web_page.paragraph(summary_line(card), "lead"), *notes]
    slices = [
        {"slice": name, "tokens": row["tokens"], "perplexity before": f"{row['reference_perplexity']:.2f}",
         "after": f"{row['perplexity']:.2f}", "KL mean": f"{row['kl']:.4f}", "KL P99": f"{row['kl_p99']:.3f}",
         "top-1 flips": f"{1 - row['top1']:.1%}"}
        for name, row in quality["slices"].items()
    ]
    return web_page.page(f"{card['model']}: what quantisation cost", lead, [
        ("By kind of text", [web_page.table(slices)]),
        ("Where", [plot_grid([*_by_position(quality["by_position"]), *_by_layer(card.get("errors") or {})])]),
        ("The worst tenth of the passages", [web_page.table([
            {"slice": row["slice"], "KL": f"{row['kl']:.3f}", "top-1 flips": f"{1 - row['top1']:.0%}", "begins": row["begins"]}
            for row in quality["worst_decile"].get("passages", ())])]),
        ("Needles found", [_needles(card)]),
        ("Formats", [web_page.table(card["linears"]),
                     web_page.paragraph("Not quantised: " + "; ".join(card["not_quantised"]) + ".")]),
        ("How it was made", [web_page.facts({"recipe": card["recipe"]["name"], "seed": card["seed"],
                                             "calibration": card.get("calibration"), "size": card["size"],
                                             "speed": card.get("speed"), "time": card.get("time"),
                                             "machine": card.get("machine"), "versions": card["versions"]})]),
    ])


def _by_position(rows: list[dict[str, Any]]) -> list[str]:
    points = [((row["from"] + row["to"]) / 2, row["kl"]) for row in rows]
    if not points:
        return []
    return [plot("KL by position in the passage", [Series("KL", points, "line+dots")],
                 axis("token", [x for x, _ in points], log=True), axis("nats", [y for _, y in points]))]


def _by_layer(errors: dict[str, float]) -> list[str]:
    """One line for each kind of linear."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for module, error in errors.items():
        if found := _LAYER.search(module):
            kinds.setdefault(found[2].rpartition(".")[2], []).append((int(found[1]), error))
    if not kinds:
        return []
    every = [point for points in kinds.values() for point in points]
    return [plot("Error of the weights by layer", [Series(kind, sorted(points), "line") for kind, points in kinds.items()],
                 axis("layer", [x for x, _ in every]), axis("share of the weights' size", [y for _, y in every]))]


def _needles(card: dict[str, Any]) -> str:
    found = card["quality"].get("needle")
    if not found:
        return ""
    return web_page.table([
        {"tokens": cell["length"], "depth": f"{cell['depth']:.0%}", "found": f"{cell['found']:.0%}",
         "picked among others": f"{cell['picked']:.0%}"} for cell in found["cells"]
    ])

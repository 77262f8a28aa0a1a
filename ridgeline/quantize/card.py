"""The card of a quantised model: its limits, its pages, and what `ridgeline plan` takes from it. No torch.

quant/quality_card.py finds a card beside weights and says whether it belongs to them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.quant.quality_card import CARD, CardFound, summary_line
from ridgeline.user_files import read_json

PAGE, PLOTS = "QUALITY.md", "quality.html"


# Name -> the figure of a slice, smaller is better.
LIMITS: dict[str, Callable[[dict[str, Any]], float]] = {
    "kl": lambda row: row["kl"], "kl_p99": lambda row: row["kl_p99"], "flips": lambda row: 1 - row["top1"],
    "ppl": lambda row: row["perplexity"] / row["reference_perplexity"] - 1,
}


def parse_limits(words: str) -> dict[str, float]:
    """From words like kl:0.02,flips:1%,ppl:5%."""
    limits = {}
    for word in words.split(","):
        name, _, number = word.strip().partition(":")
        try:
            value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
        except ValueError:
            value = math.nan
        if name not in LIMITS or not value >= 0:
            raise ConfigError(f"{word!r} is no limit of quality; write name:limit, such as kl:0.02 or flips:1%, with one of "
                              f"{', '.join(LIMITS)}")
        limits[name] = value
    return limits


class LimitsMissed(ConfigError):
    """An output was measured, and is worse than was asked for: another try with the same limits finds the same."""


def require_quality(found: CardFound | None, limits: dict[str, float], model: str) -> None:
    """The worst slice decides, as with gates of `ridgeline eval`. NaN never passes."""
    if found is None or not found.matches:
        why = "it has no card" if found is None else found.line
        raise ConfigError(f"--require-quality: {model}: {why}; `ridgeline quantize` makes one")
    require_limits(found.card, limits, f"--require-quality: {model}")


def require_limits(card: dict[str, Any], limits: dict[str, float], where: str) -> None:
    for name, limit in limits.items():
        for part, row in card["quality"]["slices"].items():
            value = LIMITS[name](row)
            if not value <= limit:
                raise LimitsMissed(f"{where}: {name} of the slice {part} is {value:.4g}, the limit is {limit:g}")


# A format's name on a card -> as `ridgeline plan` calls it.
PLANNED = {
    "e4m3-row": "fp8", "e4m3-128x128": "fp8-block", "int8-row": "int8", "uint4": "int4", "e2m1-32": "mxfp4", "e2m1-16": "fp4",
    "bf16 2:4": "2:4",
}


@dataclass(frozen=True, slots=True)
class PlannedCard:
    """What `ridgeline plan` takes from a card."""

    model: str
    format: str                      # as `ridgeline plan` calls it
    kl: float
    flips: float
    decode_tok_s: float | None       # of one request, on …
    machine: str


def planned_card(file: Path) -> PlannedCard:
    try:
        card = read_json(file, "a card of ridgeline quantize")
        names = {str(row["format"]).partition(",")[0] for row in card["linears"]}
        formats = {PLANNED.get(name) or PLANNED.get(name.partition("-")[0]) for name in names}
        every, machine = card["quality"]["all"], card.get("machine") or {}
        speed = ((card.get("speed") or {}).get("after") or {}).get("decode_tok_s")
        kl, flips, model = float(every["kl"]), 1 - float(every["top1"]), str(card["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no card of ridgeline quantize ({type(error).__name__})") from None
    format = formats.pop() if len(formats) == 1 else None
    if format is None:
        raise ConfigError(f"{file}: a card of {' and '.join(sorted(names))} is of no one format that plan knows")
    where = str(machine.get("gpu") or machine.get("cpu") or machine.get("system") or "")
    return PlannedCard(model, format, kl, flips, speed, where)


def page(card: dict[str, Any]) -> str:
    """QUALITY.md"""
    quality, sizes, recipe = card["quality"], card["size"], card["recipe"]
    lines = [
        f"# {card['model']}", "", summary_line(card), "",
        f"Made by `ridgeline quantize` {card['versions']['ridgeline']} from {card['input']['model']} with the recipe "
        f"`{recipe['name']}`, seed {card['seed']}{_limits_words(card.get('limits'))}.", "",
        "| | before | after |", "|---|---|---|",
        f"| weights, bytes | {sizes['plain_bytes']:,} in {card['input']['dtype']} | {sizes['output_bytes']:,} |",
        f"| input file, bytes | {sizes['input_bytes']:,} | |", *_speed_rows(card.get("speed")), "",
        "| slice | tokens | perplexity before | after | KL mean | KL P99 | top-1 flips |", "|---|---|---|---|---|---|---|",
    ]
    for name, row in [*quality["slices"].items(), ("**all**", quality["all"])]:
        figures = f"{row['reference_perplexity']:.3f} | {row['perplexity']:.3f} | {row['kl']:.4g} | {row['kl_p99']:.4g}"
        lines.append(f"| {name} | {row['tokens']:,} | {figures} | {1 - row['top1']:.2%} |")
    worst = quality["worst_decile"]
    lines += ["", "Perplexity: smaller is better. KL: how far the probabilities of the next token moved, in nats; 0 is the same. "
              "Top-1 flips: positions whose most likely token is another one."]
    lines += ["", f"Worst tenth of the passages: KL {worst['kl']:.4g}.", ""]
    if needle := quality.get("needle"):
        lines += [f"Needles: {needle['found']:.0%} of {needle['trials']} numbers hidden in long texts were found, "
                  f"{needle['picked']:.0%} were picked among others.", ""]
    lines += ["| linears | format | which means | method |", "|---|---|---|---|"]
    lines += [f"| {row['count']} {row['modules']} | {row['format']} | {format_words(row['format'])} | {row['method']} |"
              for row in card["linears"]]
    lines += ["", "Not quantised: " + "; ".join(card["not_quantised"]) + "."]
    if card.get("calibration"):
        used = card["calibration"]
        lines += ["", f"Calibrated with {used['tokens']:,} tokens of {used['text']} ({used['fingerprint']})."]
    lines += _time_lines(card.get("time"))
    lines += ["", *(f"Note: {note}" for note in card["notes"]), "", "Versions: " + ", ".join(
        f"{name} {version}" for name, version in card["versions"].items()) + ".", ""]
    lines += ["| file | SHA-256 |", "|---|---|"]
    lines += [f"| input: {name} | `{value}` |" for name, value in card["input"]["sha256"].items()]
    lines += [f"| {name} | `{value}` |" for name, value in card["output"]["sha256"].items()]
    return "\n".join(lines) + "\n"


GRIDS = {"uint4": "4-bit integers", "int8": "8-bit integers", "e4m3": "8-bit floats", "e2m1": "4-bit floats"}


def format_words(name: str) -> str:
    """Of a format's name on a card; empty for one that has no such words."""
    format, _, kind = name.partition(", ")
    grid, _, block = format.partition("-")
    if grid not in GRIDS:
        return "half of the weights are zero" if format.endswith("2:4") else ""
    shared = "each output" if block == "row" else f"each block of {block}" if "x" in block else f"{block} inputs" if block else ""
    return GRIDS[grid] + (f", a scale for {shared}" if shared else "") + (" and a zero point" if kind == "asymmetric" else "")


def limits_said(limits: dict[str, float] | None) -> str:
    """Of every slice; `bytes` is of the weights."""
    return ", ".join(f"{value / 1e6:,.1f} MB of weights" if name == "bytes" else f"{name} ≤ {value:g}"
                     for name, value in (limits or {}).items())


def _limits_words(limits: dict[str, float] | None) -> str:
    return f", limits (of every slice): {limits_said(limits)}" if limits else ""


def _speed_rows(speed: dict[str, Any] | None) -> list[str]:
    """One request on the machine that made the card."""
    if not speed:
        return []
    rows = []
    for name, words in (("prefill_tok_s", "prompt"), ("decode_tok_s", "answer")):
        before, after = (f"{speed[part][name]:,.0f}" if part in speed else "" for part in ("before", "after"))
        rows.append(f"| one request here, {words}, tokens/s | {before} | {after} |")
    return rows


def _time_lines(times: dict[str, Any] | None) -> list[str]:
    if not times:
        return []
    said = f"Quantising took {times['quantise']['wall_s']:.0f} s, the card {times['card']['wall_s']:.0f} s"
    if predicted := times.get("predicted"):
        said += f" (predicted: {predicted['quantise']['wall_s']:.0f} s and {predicted['card']['wall_s']:.0f} s)"
    threads = "1 thread" if times["cores"] == 1 else f"{times['cores']} threads"
    return ["", f"{said}, on {threads} at a load of {times['load']} (processes that want a core)."]


def write_card(card: dict[str, Any], folder: Path, plots: str = "") -> None:
    """`plots`: the page of card_page.py."""
    if plots:
        (folder / PLOTS).write_text(plots, encoding="utf-8")
    (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page(card), encoding="utf-8")

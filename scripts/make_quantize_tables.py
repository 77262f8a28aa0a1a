"""Writes the tables of docs/quantize.md from cards and studies: `python scripts/make_quantize_tables.py --write`.

Cards are in benchmarks/cards, studies in benchmarks/studies. A table stands between two comments; everything else on the page is
written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "quantize.md"
CARDS = ROOT / "benchmarks" / "cards"
STUDIES = ROOT / "benchmarks" / "studies"


def _cards(prefix: str) -> list[tuple[Path, dict[str, Any]]]:
    """By KL, the smallest first."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in CARDS.glob(f"{prefix}-*.json")]
    return sorted(found, key=lambda each: (each[1]["quality"]["all"]["kl"], each[0].name))


def cards(prefix: str) -> str:
    lines = [
        "| recipe | weights, MB | KL mean | KL P99 | top-1 flips | perplexity | of the text | of many languages | card |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = _cards(prefix)
    if not found:
        return "\n".join(lines)
    first = found[0][1]
    slices, dtype = first["quality"]["slices"], first["input"]["dtype"]
    lines.append(
        f"| as shipped | {first['size']['plain_bytes'] / 1e6:,.0f} in {dtype} | | | | "
        f"{first['quality']['all']['reference_perplexity']:.2f} | {slices['text']['reference_perplexity']:.2f} | "
        f"{slices['multilingual']['reference_perplexity']:.1f} | |"
    )
    for path, card in found:
        every, slices = card["quality"]["all"], card["quality"]["slices"]
        group = next((rule["group"] for rule in card["recipe"]["rules"] if rule["group"]), None)
        words = f"`{card['recipe']['name']}`" + (f", groups of {group}" if group and card["recipe"]["name"] != "auto" else "")
        lines.append(
            f"| {words} | {card['size']['output_bytes'] / 1e6:,.0f} | {every['kl']:.3f} | {every['kl_p99']:.2f} | "
            f"{1 - every['top1']:.1%} | {every['perplexity']:.2f} | {slices['text']['perplexity']:.2f} | "
            f"{slices['multilingual']['perplexity']:.1f} | [card](../{path.relative_to(ROOT)}) |"
        )
    return "\n".join(lines)


def compressor() -> str:
    lines = [
        "| model | method | perplexity | llm-compressor's | ratio | equal words (8 codes) | CPU s here | llm-compressor's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((STUDIES / "llm_compressor").glob("*.json")):
        study = json.loads(path.read_text(encoding="utf-8"))
        part = "" if study["layers"] == "all" else f", {study['layers']} layers"
        lines.append(f"| {study['model']}{part} | none | {study['plain_ppl']:.3f} | {study['plain_ppl']:.3f} | | | | |")
        for method, row in study["methods"].items():
            codes = row["equal"]["weight_packed"]
            lines.append(
                f"| | {method} | {row['ours_ppl']:.3f} | {row['theirs_ppl']:.3f} | {row['ratio']:.4f} | "
                f"{codes['equal'] / max(codes['of'], 1):.1%} | {row['ours_cpu_s']:.0f} | {row['theirs_cpu_s']:.0f} |"
            )
    return "\n".join(lines)


def times() -> str:
    """CPU seconds of the runs that made the cards, and the GPU's study."""
    lines = ["| run | quantising: predicted | measured | card: predicted | measured |", "|---|---|---|---|---|"]
    for prefix in ("smollm2-135m", "qwen2.5-coder-1.5b"):
        for path, card in _cards(prefix):
            spent = card.get("time") or {}
            if "predicted" in spent:
                predicted = spent["predicted"]
                lines.append(f"| {path.stem}, CPU s | {predicted['quantise']['cpu_s']:.0f} | {spent['quantise']['cpu_s']:.0f} | "
                             f"{predicted['card']['cpu_s']:.0f} | {spent['card']['cpu_s']:.0f} |")
    speeds = STUDIES / "quantize_speed"
    on_gpu = speeds / "result.json" if (speeds / "result.json").is_file() else speeds / "before.json"
    for file, unit in ((speeds / "cpu-1.5b.json", "CPU s"), (on_gpu, "s")):
        study = json.loads(file.read_text(encoding="utf-8"))
        for recipe, row in study["recipes"].items():
            where = f"{study['layers']} of {study['whole_layers']} layers of {study['shape'].upper()} shapes"
            where += f" on {study['machine']}" if unit == "s" else ""
            names = ("predicted_s", "measured_s") if unit == "s" else ("predicted_cpu_s", "cpu_s")
            predicted, measured = (row[name] for name in names)
            lines.append(f"| {recipe}, {where}, {unit} | {predicted:.1f} | {measured:.1f} | | |")
    return "\n".join(lines)


TABLES = {
    "embedded": lambda: cards("smollm2-135m"), "qwen": lambda: cards("qwen2.5-coder-1.5b"), "llm-compressor": compressor,
    "times": times,
}


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        head, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        text = f"{head}{begin}{table()}\n{end}{tail}" if begin else text
    return text


def main() -> int:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    current = PAGE.read_text(encoding="utf-8") == page()
    print("docs/quantize.md is current" if current else "docs/quantize.md is out of date: run with --write")
    return int(not current)


if __name__ == "__main__":
    sys.exit(main())

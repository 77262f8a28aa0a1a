"""Writes the tables of docs/quantize.md from cards and studies: `python scripts/make_quantize_tables.py --write`.

Cards are in benchmarks/cards, studies in benchmarks/studies. A table stands between two comments; everything else on the page is
written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generated_page import with_tables, write_or_compare

from ridgeline.quantize.card import limits_said

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "quantize.md"
CARDS = ROOT / "benchmarks" / "cards"
STUDIES = ROOT / "benchmarks" / "studies"
AUTO = "auto"
MODELS = {"smollm2-135m": "embedded model", "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B"}      # prefix of cards -> in words
NEEDS = {
    "the least error": "w8a16",
    "other engines with int8 kernels; text like yours to calibrate with": "w8a8-smooth",
    "a GPU with fp8 units, many requests at once, no text to calibrate with": "fp8",
    "the least memory, or the fastest answer to one request; text like yours to calibrate with": "int4-gptq",
    "the same, but you serve many languages or kinds of text": "int4-awq",
    "4 bits without any text": "nvfp4",
    "to see in a minute what 4 bits do": "int4-rtn",
    "a limit of error or of bytes, and the best that meets it": AUTO,
}
ALIKE = 0.05                         # how much smaller than auto's a rival's output may be
HEADERS = 0.002                      # how much larger: names of tensors and the like


def _cards(prefix: str) -> list[tuple[Path, dict[str, Any]]]:
    """By KL, the smallest first."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in CARDS.glob(f"{prefix}-*.json")]
    return sorted(found, key=lambda each: (each[1]["quality"]["all"]["kl"], each[0].name))


def cards(prefix: str) -> str:
    """Cards that read the same tokens stand together, after the figures of the input on these."""
    lines = [
        "| recipe | weights, MB | KL mean | KL P99 | top-1 flips | perplexity | of the text | of many languages | card |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for same in _same_tokens(prefix):
        lines += [_shipped(same[0][1]), *(_card_line(path, card) for path, card in same)]
    return "\n".join(lines)


def _same_tokens(prefix: str) -> list[list[tuple[Path, dict[str, Any]]]]:
    """Cards that read the same tokens, those that read the most first."""
    found: dict[tuple[int, str], list[tuple[Path, dict[str, Any]]]] = {}
    for path, card in _cards(prefix):
        found.setdefault((-card["quality"]["all"]["tokens"], str(card["quality"]["texts"])), []).append((path, card))
    return [found[key] for key in sorted(found)]


def _shipped(card: dict[str, Any]) -> str:
    every, slices = card["quality"]["all"], card["quality"]["slices"]
    where = (card.get("machine") or {}).get("gpu") or "CPU"
    text, many = (slices[name]["reference_perplexity"] for name in ("text", "multilingual"))
    return (f"| as shipped, {every['tokens']:,} tokens, {where} | {card['size']['plain_bytes'] / 1e6:,.0f} in "
            f"{card['input']['dtype']} | | | | {every['reference_perplexity']:.2f} | {text:.2f} | {many:.1f} | |")


def _card_line(path: Path, card: dict[str, Any]) -> str:
    every, slices = card["quality"]["all"], card["quality"]["slices"]
    return (f"| {_recipe(card)} | {card['size']['output_bytes'] / 1e6:,.0f} | {every['kl']:.3f} | {every['kl_p99']:.2f} | "
            f"{1 - every['top1']:.1%} | {every['perplexity']:.2f} | {slices['text']['perplexity']:.2f} | "
            f"{slices['multilingual']['perplexity']:.1f} | {_link(path, card)} |")


def _link(path: Path, card: dict[str, Any]) -> str:
    """With a mark where the code that made the card is no commit of this repository."""
    return f"[card](../{path.relative_to(ROOT)})" + ("" if card["machine"].get("in_history", True) else " †")


def needs() -> str:
    """Which recipe for which need: size and error of the cards of both models; of those that read other tokens, none. Of several
    cards of a recipe, the smallest output's; of auto, where that is no other recipe's output."""
    found: dict[str, dict[str, Any]] = {}
    for prefix in MODELS:
        largest_first = sorted((card for _, card in _same_tokens(prefix)[0]), key=lambda card: -card["size"]["output_bytes"])
        uniform = [card["output"] for card in largest_first if card["recipe"]["name"] != AUTO]
        found[prefix] = {card["recipe"]["name"]: card for card in largest_first
                         if card["recipe"]["name"] != AUTO or card["output"] not in uniform}
    lines = ["| need | recipe | " + " | ".join(f"{words}: size, KL, flips" for words in MODELS.values()) + " |",
             "|---|---|" + "---|" * len(MODELS)]
    for need, recipe in NEEDS.items():
        cells = [need, f"`{recipe}`"]
        for prefix in MODELS:
            card = found[prefix].get(recipe)
            cells.append("" if card is None else f"{card['size']['output_bytes'] / card['size']['plain_bytes']:.0%}, "
                         f"{card['quality']['all']['kl']:.3f}, {1 - card['quality']['all']['top1']:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _recipe(card: dict[str, Any]) -> str:
    """In words, as it was given."""
    name, rules = card["recipe"]["name"], card["recipe"]["rules"]
    if name == AUTO:
        return f"`{name}`, {limits_said(card['limits'])}"
    group = next((rule["group"] for rule in rules if rule["group"]), None)
    return f"`{name}`" + (f", groups of {group}" if group else "")


def same_size(prefix: str) -> list[tuple[tuple[Path, dict[str, Any]], list[tuple[Path, dict[str, Any]]]]]:
    """Each card of auto with those of uniform recipes that read the same tokens, and whose output is as large or a little
    smaller; the smallest first."""
    def size(each: tuple[Path, dict[str, Any]]) -> int:
        return int(each[1]["size"]["output_bytes"])

    found = []
    for same in _same_tokens(prefix):
        uniform = sorted((each for each in same if each[1]["recipe"]["name"] != AUTO), key=size)
        found += [(each, [other for other in uniform if -ALIKE <= size(other) / size(each) - 1 <= HEADERS]) for each in same
                  if each[1]["recipe"]["name"] == AUTO]
    return sorted(found, key=lambda pair: size(pair[0]))


def auto(prefix: str) -> str:
    lines = ["| recipe | weights, MB | formats | KL mean | worst slice | top-1 flips | perplexity | card |",
             "|---|---|---|---|---|---|---|---|"]
    for mine, others in same_size(prefix):
        for path, card in (mine, *others):
            every, megabytes = card["quality"]["all"], card["size"]["output_bytes"] / 1e6
            formats = ", ".join(f"{row['count']} {row['format']} ({row['method']})" for row in card["linears"])
            worst = max(row["kl"] for row in card["quality"]["slices"].values())
            lines.append(f"| {_recipe(card)} | {megabytes:.1f} | {formats} | {every['kl']:.3f} | {worst:.3f} | "
                         f"{1 - every['top1']:.1%} | {every['perplexity']:.2f} | {_link(path, card)} |")
    return "\n".join(lines)


def compressor() -> str:
    """Seconds are CPU time, but of a GPU those on the clock."""
    lines = [
        "| model | method | perplexity | llm-compressor's | ratio | equal words (8 codes) | s here | llm-compressor's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((STUDIES / "llm_compressor").glob("*.json")):
        study = json.loads(path.read_text(encoding="utf-8"))
        if "methods" not in study:                       # of codes alone
            continue
        where = f", {study['gpu']}" if study.get("gpu") else ", CPU"
        lines.append(f"| {study['model']}{where} | none | {study['plain_ppl']:.3f} | {study['plain_ppl']:.3f} | | | | |")
        for method, row in study["methods"].items():
            codes, layers = row["equal"]["weight_packed"], row.get("layers", study["layers"])
            here, there = (row.get(f"{maker}_cpu_s", row.get(f"{maker}_s")) for maker in ("ours", "theirs"))
            part = ("" if layers == "all" else f", {layers} layers") + (" †" if "theirs_commit" in row else "")
            lines.append(
                f"| | {method}{part} | {row['ours_ppl']:.3f} | {row['theirs_ppl']:.3f} | {row['ratio']:.4f} | "
                f"{codes['equal'] / max(codes['of'], 1):.1%} | {here:.0f} | {there:.0f} |"
            )
    return "\n".join(lines)


def times() -> str:
    """CPU seconds of the runs that made the cards, and the GPU's study."""
    lines = ["| run | quantising: predicted | measured | card: predicted | measured |", "|---|---|---|---|---|"]
    for prefix in MODELS:
        for path, card in _cards(prefix):
            spent = card.get("time") or {}
            if "predicted" in spent:
                predicted, on_gpu = spent["predicted"], spent["device"] == "cuda"
                unit, words = ("wall_s", f" on {card['machine']['gpu']}, s") if on_gpu else ("cpu_s", ", CPU s")
                lines.append(f"| {path.stem}{words} | {predicted['quantise'][unit]:.0f} | {spent['quantise'][unit]:.0f} | "
                             f"{predicted['card'][unit]:.0f} | {spent['card'][unit]:.0f} |")
    for study in speeds():
        for recipe, row in study["recipes"].items():
            where = f"{study['layers']} of {study['whole_layers']} layers of {study['shape'].upper()} shapes"
            where += f" on {study['machine']}, s" if on_a_gpu(study) else ", CPU s"
            names = ("predicted_s", "measured_s") if on_a_gpu(study) else ("predicted_cpu_s", "cpu_s")
            predicted, measured = (row[name] for name in names)
            lines.append(f"| {recipe}, {where} | {predicted:.1f} | {measured:.1f} | | |")
    return "\n".join(lines)


def speeds() -> list[dict[str, Any]]:
    """Records of quantize_speed/run.py; the one of on_a_gpu.py holds its own under "shapes"."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((STUDIES / "quantize_speed").glob("*.json"))]
    return [study for study in (each.get("shapes", each) for each in found) if study]


def on_a_gpu(study: dict[str, Any]) -> bool:
    """Codes of two devices are compared where there is a GPU."""
    return "same_codes" in study


TABLES = {
    "needs": needs, "embedded": lambda: cards("smollm2-135m"), "auto": lambda: auto("smollm2-135m"),
    "qwen": lambda: cards("qwen2.5-coder-1.5b"), "llm-compressor": compressor, "times": times,
}


def page() -> str:
    return with_tables(PAGE, TABLES)


if __name__ == "__main__":
    sys.exit(write_or_compare(PAGE, page()))

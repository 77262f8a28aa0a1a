"""The card of a quantised model: quality.json and QUALITY.md beside its weights, and whether it belongs to them. No torch.

A card holds the SHA-256 of every weight file and of config.json. With other weights it is no card.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.process import integrity, platform

CARD, PAGE, PLOTS = "quality.json", "QUALITY.md", "quality.html"


@dataclass(frozen=True, slots=True)
class CardFound:
    """What lies beside a model's weights."""

    line: str                        # for people
    matches: bool
    card: dict[str, Any]


def hashes(files: list[Path]) -> dict[str, str]:
    return {file.name: integrity.sha256_of(file) for file in files}


def output_files(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.safetensors")), folder / "config.json"]


def find_card(model: Path) -> CardFound | None:
    """None: there is no card. Large files are hashed once; what was found is remembered (process/integrity.py)."""
    file = model / CARD
    if not model.is_dir() or not file.is_file():
        return None
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        expected = card["output"]["sha256"]
        line = summary_line(card)
        present = {each.name for each in output_files(model)}
        wrong = sorted(present ^ set(expected)) or [name for name in expected if not _has(model / name, expected[name])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return CardFound(f"{CARD} cannot be read ({type(error).__name__}): it is ignored", False, {})
    if wrong:
        return CardFound(f"{CARD} does not belong to these weights ({wrong[0]} has another hash): it is ignored", False, card)
    return CardFound(line, True, card)


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
                raise ConfigError(f"{where}: {name} of the slice {part} is {value:.4g}, the limit is {limit:g}")


# A format's name on a card -> as `ridgeline plan` calls it.
PLANNED = {
    "e4m3-row": "fp8", "e4m3-128x128": "fp8-block", "int8-row": "int8", "uint4": "int4", "e2m1-32": "mxfp4", "e2m1-16": "fp4",
    "bf16 2:4": "2:4",
}


def planned_kl(file: Path) -> tuple[str, float]:
    """(format as `ridgeline plan` calls it, mean KL) of a card."""
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        names = {str(row["format"]).partition(",")[0] for row in card["linears"]}
        formats = {PLANNED.get(name) or PLANNED.get(name.partition("-")[0]) for name in names}
        kl = float(card["quality"]["all"]["kl"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no card of ridgeline quantize ({type(error).__name__})") from None
    format = formats.pop() if len(formats) == 1 else None
    if format is None:
        raise ConfigError(f"{file}: a card of {' and '.join(sorted(names))} is of no one format that plan knows")
    return format, kl


def _has(file: Path, expected: str) -> bool:
    return integrity.has_hash(file, expected, _remembered(file.parent))


def _remembered(model: Path) -> Path:
    """A folder for each model: files of two models have the same names."""
    folder = platform.cache_dir() / "cards" / hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def summary_line(card: dict[str, Any]) -> str:
    found, sizes = card["quality"]["all"], card["size"]
    return (
        f"{card['recipe']['name']}: KL {found['kl']:.3g} (P99 {found['kl_p99']:.3g}), top-1 flips {1 - found['top1']:.1%}, "
        f"perplexity {found['reference_perplexity']:.2f} → {found['perplexity']:.2f}, "
        f"{sizes['plain_bytes'] / 1e9:.2f} → {sizes['output_bytes'] / 1e9:.2f} GB"
    )


def page(card: dict[str, Any]) -> str:
    """QUALITY.md"""
    quality, sizes, recipe = card["quality"], card["size"], card["recipe"]
    lines = [
        f"# {card['model']}", "", summary_line(card), "",
        f"Made by `ridgeline quantize` {card['versions']['ridgeline']} from {card['input']['model']} with the recipe "
        f"`{recipe['name']}`, seed {card['seed']}.", "",
        "| | before | after |", "|---|---|---|",
        f"| weights, bytes | {sizes['plain_bytes']:,} in {card['input']['dtype']} | {sizes['output_bytes']:,} |",
        f"| input file, bytes | {sizes['input_bytes']:,} | |", "",
        "| slice | tokens | perplexity before | after | KL mean | KL P99 | top-1 flips |", "|---|---|---|---|---|---|---|",
    ]
    for name, row in [*quality["slices"].items(), ("**all**", quality["all"])]:
        figures = f"{row['reference_perplexity']:.3f} | {row['perplexity']:.3f} | {row['kl']:.4g} | {row['kl_p99']:.4g}"
        lines.append(f"| {name} | {row['tokens']:,} | {figures} | {1 - row['top1']:.2%} |")
    worst = quality["worst_decile"]
    lines += ["", f"Worst tenth of the passages: KL {worst['kl']:.4g}.", ""]
    lines += ["| linears | format | method |", "|---|---|---|"]
    lines += [f"| {row['count']} {row['modules']} | {row['format']} | {row['method']} |" for row in card["linears"]]
    lines += ["", "Not quantised: " + "; ".join(card["not_quantised"]) + "."]
    if card.get("calibration"):
        used = card["calibration"]
        lines += ["", f"Calibrated with {used['tokens']:,} tokens of {used['text']} ({used['fingerprint']})."]
    lines += ["", *(f"Note: {note}" for note in card["notes"]), "", "Versions: " + ", ".join(
        f"{name} {version}" for name, version in card["versions"].items()) + ".", ""]
    lines += ["| file | SHA-256 |", "|---|---|"]
    lines += [f"| input: {name} | `{value}` |" for name, value in card["input"]["sha256"].items()]
    lines += [f"| {name} | `{value}` |" for name, value in card["output"]["sha256"].items()]
    return "\n".join(lines) + "\n"


def write_card(card: dict[str, Any], folder: Path, plots: str = "") -> None:
    """`plots`: the page of card_page.py."""
    if plots:
        (folder / PLOTS).write_text(plots, encoding="utf-8")
    (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page(card), encoding="utf-8")

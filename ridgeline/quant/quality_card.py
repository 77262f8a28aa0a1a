"""Finds the quality card beside a quantised model's weights: its summary line, and whether it belongs to these weights. No torch.

A card holds the SHA-256 of every weight file and of config.json. With other weights it is no card. quantize/card.py writes it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError, ModelError
from ridgeline.model_files import require_file
from ridgeline.process import integrity, platform

CARD = "quality.json"


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
        require_file(file)
        card = json.loads(file.read_text(encoding="utf-8"))
        expected = card["output"]["sha256"]
        line = summary_line(card)
        present = {each.name for each in output_files(model)}
        wrong = sorted(present ^ set(expected)) or [name for name in expected if not _has(model / name, expected[name])]
    except (OSError, ModelError, ValueError, ArithmeticError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return CardFound(f"{CARD} cannot be read ({type(error).__name__}): it is ignored", False, {})
    if wrong:
        return CardFound(f"{CARD} does not belong to these weights ({wrong[0]} has another hash): it is ignored", False, card)
    return CardFound(line, True, card)


def _has(file: Path, expected: str) -> bool:
    try:
        folder = _remembered(file.parent)
    except (OSError, ConfigError):                       # no cache, or a full one: they are hashed at every start
        return integrity.sha256_of(file) == expected
    return integrity.has_hash(file, expected, folder)


def _remembered(model: Path) -> Path:
    """A folder for each model: files of two models have the same names."""
    folder = platform.cache_dir() / "cards" / hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def with_card(quality: str, line: str) -> str:
    """A record's quality with the line of the card beside the weights, where there is one."""
    return f"{quality}; weights: {line}" if line else quality


def summary_line(card: dict[str, Any]) -> str:
    found, sizes = card["quality"]["all"], card["size"]
    return (
        f"{card['recipe']['name']}: KL {found['kl']:.3g} (P99 {found['kl_p99']:.3g}), top-1 flips {1 - found['top1']:.1%}, "
        f"perplexity {found['reference_perplexity']:.2f} → {found['perplexity']:.2f}, "
        f"{sizes['plain_bytes'] / 1e9:.2f} → {sizes['output_bytes'] / 1e9:.2f} GB"
    )

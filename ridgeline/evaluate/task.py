"""The options of an evaluation. No torch: the command line reads them before anything computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.evaluate.slices import SLICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    text: str = ""                   # a file; empty: pydoc_data.topics
    slices: tuple[str, ...] = tuple(SLICES)
    slice_files: dict[str, str] = field(default_factory=dict)    # name -> a file of the user's
    context: int = 512               # tokens of a passage
    overlap: int = 0                 # of those, how many at its beginning do not count
    tokens: int = 2048               # that count, in each slice
    needle: tuple[int, ...] = ()     # lengths of the haystacks; none: no needles
    choices: str = ""                # a JSONL file
    seed: int = 0
    speed: bool = False              # beside a reference: how fast both are


def check_save_path(path: str) -> None:
    if path and not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: its directory does not exist")

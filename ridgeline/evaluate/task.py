"""The options of an evaluation. No torch: the command line reads them before anything computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.early_check import checked_model
from ridgeline.errors import ConfigError
from ridgeline.evaluate.slices import SLICES
from ridgeline.evaluate.texts import DEFAULT_TEXT, default_text, read_questions, read_text
from ridgeline.process import embedded

REFERENCE_MAGIC = b"RIDGELINE-LOGITS 1\n"           # how a file of a reference's logits begins
# Options that the reference takes over from the model under test: none that may change its answers.
_SHARED = ("device", "tokenizer", "seed", "load_format")


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
    if path and Path(path).is_dir():
        raise ConfigError(f"{path} cannot be written: it is a directory")


def slice_texts(task: Task) -> dict[str, str]:
    """By slice; the default text, or the user's, is the first."""
    unknown = [name for name in task.slices if name not in SLICES]
    if unknown:
        raise ConfigError(f"there is no slice {unknown[0]!r}; there are {', '.join(SLICES)}")
    texts = {DEFAULT_TEXT: read_text(task.text) if task.text else default_text()}
    texts |= {name: SLICES[name](task.seed) for name in task.slices}
    return texts | {name: read_text(path) for name, path in task.slice_files.items()}


def is_reference_file(path: str | Path) -> bool:
    try:
        if not Path(path).is_file():                     # the call would wait for a FIFO's writer
            return False
        with Path(path).open("rb") as file:
            return file.read(len(REFERENCE_MAGIC)) == REFERENCE_MAGIC
    except OSError:
        return False


def reference_options(given: str, own: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine options of a reference that is a model."""
    taken = {name: options[name] for name in _SHARED if name in options}
    return {**taken, **own, "model": "" if given == embedded.SHORT_NAME else given}


def check_inputs(options: Mapping[str, Any], task: Task, reference: str, own: Mapping[str, Any]) -> None:
    """Read everything that is small: a file or a model that is not there is told before torch is imported."""
    model = checked_model(EngineConfig.of(**options))
    longest = options.get("max_model_len") or model.max_position_embeddings
    for length in task.needle:
        if length > longest:
            raise ConfigError(f"--needle {length} is more than this model's context of {longest} tokens")
    slice_texts(task)
    if task.choices:
        read_questions(task.choices)
    if reference and not is_reference_file(reference):
        checked_model(EngineConfig.of(**reference_options(reference, own, options)))

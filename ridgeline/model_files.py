"""Reads a small file of a model: its settings in JSON, its tokenizer, its templates.

A directory from elsewhere must not fill the memory or wait for ever: only regular files are read, up to a bound. Every failure is
a ModelError of one line, and expressions that may take long are known by their looks. Files that the user names are read by
`user_files`, weights by `models/weights.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.errors import ModelError, RidgelineError

MOST_BYTES = 64 << 20                # JSON becomes objects of up to thirty times its size. Gemma's tokenizer.json has 33 MB
MOST_VALUES = 1 << 23                # of one: 20 million empty lists took a minute. 262,144 tokens and their merges are 2 million
MAX_DEPTH = 64                       # of objects and lists in a config; those of models have less than ten
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")   # half of a pair, in JSON
_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[\d,]+\}|.", re.DOTALL)


class ServedFiles:
    """A model's settings and weights as they are when it is served first. `find`: where they are, which may change by itself: a
    name of the Hugging Face hub means its newest revision here. Revisions link to the files that they have in common."""

    def __init__(self, find: Callable[[], Path]) -> None:
        self._find = find
        self._first = self._seen()

    def changed(self) -> str:
        """Why an engine that starts now would have another model; empty if it would not, or if its files cannot be looked at:
        the engine says why."""
        now = self._seen()
        if now is None or self._first is None or now[1] == self._first[1]:
            return ""
        return f"the model's files in {now[0]} were changed after it was loaded; start the server again to serve them"

    def _seen(self) -> tuple[Path, dict[str, tuple[Path, int, int]]] | None:
        try:
            path = self._find()
            weights = [each for kind in ("safetensors", "gguf") for each in path.glob(f"*.{kind}")]
            files = [path / "config.json", *weights] if path.is_dir() else [path]
            return path, {file.name: _identity(file.resolve(strict=True)) for file in files}
        except (OSError, RuntimeError, RidgelineError):  # RuntimeError: links in a circle
            return None


def _identity(file: Path) -> tuple[Path, int, int]:
    status = file.stat()
    return file, status.st_size, status.st_mtime_ns


def require_file(file: Path) -> None:
    """ModelError for a pipe or a device, which opening or reading could wait for for ever, and for one that is too large. A file
    that is not there passes."""
    if not file.exists():
        return
    if not file.is_file():
        raise ModelError(f"{file}: not a regular file")
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ModelError(f"{file}: {size:,} bytes are more than such a file may have ({MOST_BYTES:,})")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a config: other code compares, copies and prints it."""
    content = _read(file)
    if _is_deep(content):
        raise ModelError(f"{file} is nested more than {MAX_DEPTH} deep")
    return content


def read_settings(file: Path) -> dict[str, Any]:
    """The JSON object in a file that a model may lack: of its tokenizer, or its index; empty without it."""
    return _read(file) if file.exists() else {}


def _read(file: Path) -> dict[str, Any]:
    require_file(file)
    try:
        content = file.read_bytes()
        values = sum(map(content.count, (b",", b"[", b"{")))
        if values > MOST_VALUES:
            raise ModelError(f"{file}: more than {MOST_VALUES:,} values")
        value = json.loads(content.decode("utf-8-sig"))  # of bytes, json takes halves of pairs, and UTF-16
        if _SURROGATE.search(content):                   # half a pair is no character, and no text that a tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _is_deep(content: Any) -> bool:
    """Whether what compares, copies or prints it could run out of stack."""
    level = [content]
    for _ in range(MAX_DEPTH):
        inside = [each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer)]
        level = [each for each in inside if isinstance(each, (dict, list))]
    return bool(level)


def num_repeats(pattern: str) -> int:
    return sum(map(_is_repeat, _PATTERN_PARTS.findall(pattern)))


def repeats_ways(pattern: str) -> bool:
    """Whether an expression repeats a group with repeats or alternatives: a text without a match may be tried in very many
    ways, and take minutes."""
    closed, groups = False, [False]                      # the last part closed a group with repeats or alternatives
    for part in _PATTERN_PARTS.findall(pattern):
        if _is_repeat(part) and closed:
            return True
        groups[-1] |= part == "|" or (_is_repeat(part) and (part[0] != "{" or "," in part))      # {3} is one way
        closed = False
        if part == "(":
            groups.append(False)
        elif part == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1] |= closed
    return False


def _is_repeat(part: str) -> bool:
    return part in ("*", "+") or part.startswith("{")

"""The text that is evaluated: passages of a known length, the same ones for the same seed.

By default it is the reference text that CPython carries as `pydoc_data.topics`: half a megabyte of English about a
programming language, on every machine. It differs a little between versions of Python, so a result names a hash of it.
"""

from __future__ import annotations

import hashlib
import json
import random
import stat
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from ridgeline import user_files
from ridgeline.errors import ConfigError, shown_path
from ridgeline.text.tokenizer import Tokenizer

DEFAULT_TEXT = "text"                # the slice of the default text, or of the user's file


@dataclass(frozen=True, slots=True)
class Passage:
    slice: str
    number: int                      # which passage of its slice
    tokens: list[int]
    first: int                       # the first token that counts; those before it are only read


def default_text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


# A pipe (/dev/stdin, <(…)) can be read once, and a command checks its texts before it uses them: by device and inode.
_from_pipes: dict[tuple[int, int], str] = {}


def _content(path: str | Path) -> str:
    """Of a file as it is now; of a pipe what it held when it was first read."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISREG(found.st_mode):
        return user_files.read_text(path)
    key = found.st_dev, found.st_ino
    if key not in _from_pipes:
        _from_pipes[key] = user_files.read_text(path)
    return _from_pipes[key]


def read_text(path: str | Path) -> str:
    text = _content(path)
    if not text.strip():
        raise ConfigError(f"{path} holds no text")
    return text


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    choices: tuple[str, ...]
    answer: int                      # index of the right one


def read_questions(path: str | Path) -> list[Question]:
    lines = _content(path).splitlines()
    questions = [_question(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f"{path} holds no questions")
    return questions


def _question(where: str, line: str) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not JSON") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a JSON object")
    text, choices, answer = (record.get(name) for name in ("question", "choices", "answer"))
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where}: question must be a text")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise ConfigError(f"{where}: choices must be a list of two texts or more")
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ConfigError(f"{where}: answer must be one of the choices, or an index from 0 to {len(choices) - 1}")
    return Question(text, tuple(choices), answer)


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def passages(
    name: str, text: str, tokenizer: Tokenizer, *, context: int, overlap: int, tokens: int, seed: int
) -> list[Passage]:
    """Passages of at most `context` tokens, `tokens` of which count in all; which ones the seed decides.

    A passage begins `context - overlap` tokens after the one before it, and its first `overlap` tokens do not count: the
    others then have at least that much before them. A text that is too short gives the passages that it has.
    """
    start = tokenizer.prefix_ids
    body = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    room = context - len(start)
    if room < 2 or not 0 <= overlap < room - 1:
        raise ConfigError(f"a context of {context} tokens with an overlap of {overlap} leaves nothing to judge")
    stride = room - overlap
    begins = [place for place in range(0, len(body), stride) if len(body) - place > max(1, overlap)]
    if not begins:
        raise ConfigError(f"{name} has {len(body)} tokens: too few for an overlap of {overlap}")
    full = [place for place in begins if len(body) - place >= room] or begins    # without a shorter last one, if possible
    wanted = max(1, -(-tokens // stride))
    if len(full) < wanted:
        chosen = begins
    else:
        chosen = sorted(random.Random(f"passages-{name}-{seed}").sample(full, wanted))
    return [
        Passage(name, number, start + body[place : place + room], len(start) + overlap or 1)
        for number, place in enumerate(chosen)
    ]

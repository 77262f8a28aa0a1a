"""Makes prompts: conversations of one or several turns, with given numbers of tokens.

    random        prompts of random words; lengths fixed or sampled from a distribution
    prefix        the same, after one of some shared prefixes
    multi_turn    several turns each; every turn sends the whole conversation so far, including the server's own answers
    custom        a JSONL file: "prompt" (text or token ids), "messages", or "input_length" alone, with "output_tokens"
                  and, for a replay, "timestamp"; "hash_ids" says which blocks of the prompt are shared with others

A prompt's length in tokens is as exact as the `Words` it is made of: words counted by the server's tokenizer or a local one,
or words that are assumed to be one token each.
"""

from __future__ import annotations

import functools
import json
import math
import pydoc_data.topics
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.user_files import read_text

FEWEST_WORDS = 16                    # that make prompts which differ
HASHED_BLOCK = 512                   # tokens that one of a trace's hash_ids stands for
_SPECS = "256, uniform:LOW:HIGH, normal:MEAN:DEVIATION[:LOW:HIGH], lognormal:MU:SIGMA[:LOW:HIGH], exponential:MEAN[:LOW:HIGH]"


# ── lengths ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Length:
    """A number that is sampled for each request: tokens, turns, or seconds."""

    kind: str
    values: tuple[float, ...]
    low: float = 1
    high: float = math.inf

    def draw(self, rng: random.Random) -> float:
        if self.kind == "uniform":
            value = rng.uniform(*self.values)
        elif self.kind == "normal":
            value = rng.normalvariate(*self.values)
        elif self.kind == "lognormal":
            value = rng.lognormvariate(*self.values)
        elif self.kind == "exponential":
            value = rng.expovariate(1 / self.values[0])
        else:
            value = self.values[0]
        return min(self.high, max(self.low, value))

    def tokens(self, rng: random.Random) -> int:
        if self.kind == "uniform":                       # both ends as often as what lies between
            return rng.randint(round(self.values[0]), round(self.values[1]))
        return round(self.draw(rng))

    def widened(self, ratio: float) -> Length:
        """Uniform in [(1 − ratio) · length, (1 + ratio) · length], as vLLM's --random-range-ratio means it."""
        if not 0 <= ratio < 1:
            raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {ratio:g}")
        if ratio == 0:
            return self
        if self.kind != "fixed":
            raise ConfigError("--random-range-ratio widens a fixed length; a distribution has its own width")
        low, high = (round((1 + sign * ratio) * self.values[0], 6) for sign in (-1, 1))
        return Length("uniform", (max(1.0, math.floor(low)), math.ceil(high)))


_COUNTS = {"uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}


def parse_length(text: str, least: float = 1) -> Length:
    kind, *rest = text.split(":")
    try:
        if kind not in _COUNTS:
            if rest or not float(text) >= least:
                raise ValueError
            return Length("fixed", (float(text),), least)
        numbers = [float(number) for number in rest]
        own, limits = tuple(numbers[: _COUNTS[kind]]), numbers[_COUNTS[kind] :]
        if len(own) != _COUNTS[kind] or len(limits) not in (0, 2) or not all(math.isfinite(number) for number in numbers):
            raise ValueError
        low, high = limits or (least, math.inf)
        if low < least or high < low or (kind == "uniform" and not least <= own[0] <= own[1]):
            raise ValueError
        if kind != "uniform" and own[-1] <= 0:           # a deviation, or the mean of an exponential
            raise ValueError
    except ValueError:
        raise ConfigError(f"{text!r} is not a length; use {_SPECS}, and at least {least:g}") from None
    return Length(kind, own, low, high)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def common_words(count: int = 1500) -> list[str]:
    """Frequent words of the text that every CPython brings, most frequent first."""
    text = " ".join(pydoc_data.topics.topics.values())
    counted = Counter(re.findall(r"(?<=\s)[a-z]{3,9}(?=\s)", text))
    return [word for word, _ in counted.most_common(count)]


@dataclass(slots=True)
class Words:
    """Words with the token ids that each has inside a text; without ids, a word is taken for one token."""

    words: list[str]
    ids: dict[str, list[int]] = field(default_factory=dict)
    source: str = "one token per word, by assumption"
    _by_size: dict[int, list[str]] = field(init=False, repr=False, default_factory=dict)     # by number of tokens

    def __post_init__(self) -> None:
        by_size: dict[int, list[str]] = {}
        for word in self.words:
            by_size.setdefault(len(self.ids[word]) if self.ids else 1, []).append(word)
        self._by_size = dict(sorted(by_size.items()))

    @property
    def exact(self) -> bool:
        return bool(self.ids)

    def draw(self, tokens: int, rng: random.Random) -> list[str]:
        """Words of that many tokens in all; fewer by less than the shortest word where it cannot be met."""
        size, shortest = next(iter(self._by_size.items()))
        if size == 1:                                    # the usual case, and the fast one
            return rng.choices(shortest, k=tokens)
        chosen: list[str] = []
        while tokens >= size:
            fitting = [words for cost, words in self._by_size.items() if cost <= tokens]
            word = rng.choice(rng.choice(fitting))
            tokens -= len(self.ids[word])
            chosen.append(word)
        return chosen

    def text(self, words: list[str]) -> str:
        """Every word behind a blank, so that it has the tokens that were counted for it."""
        return "".join(" " + word for word in words)

    def tokens(self, words: list[str]) -> list[int]:
        return [token for word in words for token in self.ids[word]]


def match_tokens(words: list[str], ids: list[int], pieces: list[str]) -> dict[str, list[int]]:
    """The tokens of `" " + " ".join(words)` by word: a word begins where a token begins with a blank."""
    groups: list[list[int]] = []
    spelled: list[str] = []
    for token, piece in zip(ids, pieces, strict=True):
        plain = piece.replace("Ġ", " ").replace("▁", " ")
        if plain.startswith(" "):
            groups.append([])
            spelled.append("")
        if groups:                                       # before the first blank stand special tokens
            groups[-1].append(token)
            spelled[-1] += plain.strip()
    return {word: group for word, group, spelt in zip(words, groups, spelled, strict=False) if word == spelt}


def known_words(found: dict[str, list[int]], source: str) -> Words:
    """Words of one token each, if there are enough: any length can then be met exactly."""
    if len(found) < FEWEST_WORDS:
        raise ConfigError("the tokenizer's tokens could not be matched with words")
    single = [word for word, group in found.items() if len(group) == 1]
    kept = single if len(single) >= FEWEST_WORDS else list(found)
    return Words(kept, {word: found[word] for word in kept}, source)


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Turn:
    """What the user says, and how long the answer shall be. A file may give messages or token ids in place of text."""

    text: str = ""
    tokens_out: int = 16
    think: float = 0.0               # seconds between the answer before and this
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None


@dataclass(slots=True)
class Conversation:
    turns: list[Turn]
    at: float | None = None          # a trace's time, in seconds


@dataclass(slots=True)
class PromptSource:
    """Makes conversations. The same seed gives the same ones."""

    words: Words
    tokens_in: Length
    tokens_out: Length
    prefix_len: int = 0              # tokens that prompts begin with
    num_prefixes: int = 1
    turns: Length = field(default_factory=lambda: Length("fixed", (1.0,)))
    think: Length = field(default_factory=lambda: Length("fixed", (0.0,), 0.0))
    as_ids: bool = False             # token ids in place of text
    rows: list[dict[str, Any]] = field(default_factory=list)     # of a file

    def conversations(self, seed: str) -> Iterator[Conversation]:
        """Without end, but for a file: that is as long as it is."""
        rng = random.Random(seed)
        if self.rows:
            for row in self.rows:
                yield self._of_row(row, rng)
            return
        # Shared beginnings do not change with the seed of a run: they are what a warm server has seen.
        prefixes = [self.words.draw(self.prefix_len, random.Random(f"prefix-{n}")) for n in range(self.num_prefixes)]
        while True:
            turns = []
            for number in range(max(1, self.turns.tokens(rng))):
                words = self.words.draw(self.tokens_in.tokens(rng), rng)
                if number == 0 and self.prefix_len:
                    words = rng.choice(prefixes) + words
                turn = self._turn(words, self.tokens_out.tokens(rng))
                turn.think = self.think.draw(rng) if number else 0.0
                turns.append(turn)
            yield Conversation(turns)

    def _turn(self, words: list[str], tokens_out: int) -> Turn:
        if self.as_ids:
            return Turn(ids=self.words.tokens(words), tokens_out=tokens_out)
        return Turn(self.words.text(words), tokens_out)

    def _of_row(self, row: dict[str, Any], rng: random.Random) -> Conversation:
        tokens_out = row["output_tokens"] if row["output_tokens"] is not None else self.tokens_out.tokens(rng)
        if row["messages"] is not None:
            turn = Turn(messages=row["messages"], tokens_out=tokens_out)
        elif isinstance(row["prompt"], list):
            turn = Turn(ids=row["prompt"], tokens_out=tokens_out)
        elif row["prompt"] is not None:
            turn = Turn(row["prompt"], tokens_out)
        else:
            turn = self._turn(self._hashed(row["input_length"], row["hash_ids"], rng), tokens_out)
        return Conversation([turn], row["timestamp"])

    def _hashed(self, length: int, hash_ids: list[int], rng: random.Random) -> list[str]:
        """Words of that many tokens; blocks with the same id have the same words."""
        words: list[str] = []
        for number in hash_ids:
            block = min(HASHED_BLOCK, length)
            words += self.words.draw(block, random.Random(f"block-{number}"))
            length -= block
        return words + self.words.draw(max(0, length), rng)


def read_rows(path: str, unit: float = 1.0) -> list[dict[str, Any]]:
    """A file's lines, checked, each with all fields; times in seconds from the first one on."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            try:
                rows.append(_checked_row(json.loads(line), unit))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error.msg} at character {error.pos + 1}") from None
            except RecursionError:
                raise ConfigError(f"{path}, line {number} is not JSON: its values are nested too deeply") from None
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    timed = [row["timestamp"] for row in rows if row["timestamp"] is not None]
    if timed:
        if len(timed) != len(rows):
            raise ConfigError(f"{path}: either every line needs a timestamp, or none may have one")
        rows.sort(key=lambda row: row["timestamp"])
        for row in rows:
            row["timestamp"] -= min(timed)
    return rows


def _check_prompt(prompt: Any, messages: Any, length: Any) -> None:
    if sum(given is not None for given in (prompt, messages, length)) != 1:
        raise ValueError("exactly one of prompt, messages and input_length is needed")
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if prompt is not None and not (isinstance(prompt, str) or ids):
        raise ValueError("prompt must be a text or a list of token ids")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise ValueError("messages must be a list of objects")


def _check_count(name: str, value: Any) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be a number above 0")


def _checked_row(row: Any, unit: float) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError("a line must be an object")
    prompt, messages, length = row.get("prompt"), row.get("messages"), row.get("input_length")
    _check_prompt(prompt, messages, length)
    names = ("output_tokens", "output_length", "max_tokens")
    tokens_out = next((row[name] for name in names if row.get(name) is not None), None)
    when = row.get("timestamp")
    _check_count("output_tokens", tokens_out)
    _check_count("input_length", length)
    if when is not None and (type(when) not in (int, float) or not math.isfinite(when)):
        raise ValueError("timestamp must be a number")
    return {
        "prompt": prompt, "messages": messages, "input_length": length, "hash_ids": row.get("hash_ids") or [],
        "output_tokens": tokens_out, "timestamp": None if when is None else when * unit,
    }

"""Keeps text that is spelt like a special token from becoming that token in a chat prompt.

A chat template marks turns with special tokens, and the rendered text is tokenised with them. A user who writes `<|im_end|>` in a
message could otherwise end the turn and begin a system message. So before rendering, every such spelling in the data is
replaced by a random number, and becomes ordinary characters again when the prompt is tokenised. `<think>` and `</think>` are left
alone: they begin no turn, and templates look for them.

This file only handles strings; the tokenizer knows which tokens are special and turns text into ids.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ridgeline.errors import BadRequest

_DIGITS = 38                         # of a nonce: digits alone, which no template escapes or writes in capitals
_LEFT_ALONE = frozenset({"<think>", "</think>"})

T = TypeVar("T")


class Special:
    """The special tokens of a vocabulary, as they are spelt."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Longest first: where one begins like another, the longer is meant.
        self.texts = sorted({text for text in texts if text} - _LEFT_ALONE, key=lambda text: (-len(text), text))
        self._starts = tuple({text[:2] for text in self.texts})
        self._pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None

    def are_in(self, value: Any) -> bool:
        """Whether any string in JSON-like data contains one of them. Uses a stack: nesting costs no recursion."""
        pattern, starts, stack = self._pattern, self._starts, [value]
        while stack and pattern is not None:
            value = stack.pop()
            if isinstance(value, str):
                if any(start in value for start in starts) and pattern.search(value) is not None:
                    return True
            elif isinstance(value, Mapping):
                stack += value
                stack += value.values()
            elif isinstance(value, list | tuple):
                stack += value
        return False

    def quoted(self) -> Quoted:
        return Quoted(self.texts, self._pattern)


class Quoted:
    """For one conversation: hides spellings of special tokens in its data, and finds them again in the rendered text."""

    def __init__(self, texts: list[str], pattern: re.Pattern[str] | None) -> None:
        self._texts = texts
        self._pattern = pattern
        self._places = {text: place for place, text in enumerate(texts)}
        self._nonce = "".join(str(secrets.randbelow(10)) for _ in range(_DIGITS))
        self._width = len(str(len(texts)))

    def hide(self, value: T) -> T:
        """The same data, without them."""
        try:
            hidden: T = self._hidden(value)
        except RecursionError:
            raise BadRequest("the messages or tools are nested too deep") from None
        return hidden

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._number, value) if self._pattern is not None else value
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(each) for key, each in value.items()}
        return [self._hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def _number(self, match: re.Match[str]) -> str:
        return f"{self._nonce}{self._places[match.group()]:0{self._width}d}"

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """(text, whether it was hidden: spelt like a special token, but ordinary text), in order."""
        first, *rest = text.split(self._nonce)
        if first:
            yield first, False
        for each in rest:
            yield self._texts[int(each[: self._width])], True
            if len(each) > self._width:
                yield each[self._width :], False

    def shown(self, text: str) -> str:
        """The text with the hidden spellings put back."""
        return "".join(part for part, _ in self.parts(text))

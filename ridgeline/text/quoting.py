"""Text of special tokens inside a conversation: data, and never the tokens themselves.

A chat template marks turns with special tokens, and its text is read with them. Whoever could write `<|im_end|>` into a message
and have it read as that token could end their own turn and begin a system's. So before a template is rendered, what is spelt like
a special token in any of its data is replaced by a number that nobody can guess, and comes back as ordinary characters when
the prompt is tokenised. The marks of reasoning are left alone: they begin nobody's turn, and templates look for them.

Knows strings; which tokens are special, and how text becomes ids, is the tokenizer's.
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
        """Whether any text in plain data has one of them. A stack of our own: depth costs no recursion."""
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
    """One conversation's: hides what is spelt like them in data, and finds it again in the text that was made of the data."""

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
        """(text, whether it is spelt like a special token and is none), in order."""
        first, *rest = text.split(self._nonce)
        if first:
            yield first, False
        for each in rest:
            yield self._texts[int(each[: self._width])], True
            if len(each) > self._width:
                yield each[self._width :], False

    def shown(self, text: str) -> str:
        """The text as it is meant."""
        return "".join(part for part, _ in self.parts(text))

"""Log-probabilities as callers read them, kept as numbers: of a prompt's tokens, and of an answer's as it grows.

As objects a position is a dict, with a Logprob and a text for each alternative; as numbers it takes eight bytes for each. So it
is made when it is read, and not kept. Texts are made with it. Knows no engines and no formats.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, overload

import numpy as np

from ridgeline.messages import Logprobs

BYTES_PER_CHUNK = 1024               # of the arrays of a few positions, beside their numbers


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAt = dict[int, Logprob]      # the token at one position, and the most likely tokens there
Word = Callable[[int], str | None]   # a token's text, where there is a tokenizer
Position = TypeVar("Position", LogprobsAt, LogprobsAt | None)


class Positions(Sequence[Position]):
    """A list whose items are made when they are read. A copy, a sum and a pickle of it are plain lists."""

    __slots__ = ()

    @abstractmethod
    def _made(self, place: int) -> Position: ...

    @overload
    def __getitem__(self, place: int) -> Position: ...

    @overload
    def __getitem__(self, place: slice) -> list[Position]: ...

    def __getitem__(self, place: int | slice) -> Position | list[Position]:
        if isinstance(place, slice):
            return [self._made(each) for each in range(*place.indices(len(self)))]
        return self._made(range(len(self))[place])       # IndexError, and negative places

    def __iter__(self) -> Iterator[Position]:
        return map(self._made, range(len(self)))

    def __add__(self, others: Iterable[Position]) -> list[Position]:
        return list(chain(self, others))

    def __radd__(self, others: Iterable[Position]) -> list[Position]:
        return list(chain(others, self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class PromptLogprobs(Positions[LogprobsAt | None]):
    """Of a prompt's tokens; the first has none. A long prompt has hundreds of thousands, and they arrive in the event loop."""

    __slots__ = ("_known", "_word")

    def __init__(self, known: Logprobs, word: Word) -> None:
        self._known = known                              # of the positions after the first
        self._word = word

    def __len__(self) -> int:
        return 1 + len(self._known.token_ids)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self._known.top_ids, self._known.top_logprobs, *_of_tokens(self._known)))

    def _made(self, place: int) -> LogprobsAt | None:
        if place == 0:
            return None
        token, logprob, rank = (each[place - 1].item() for each in _of_tokens(self._known))
        top_ids, top_logprobs = self._known.top_ids[place - 1].tolist(), self._known.top_logprobs[place - 1].tolist()
        return _position(token, logprob, rank, top_ids, top_logprobs, self._word, False)


class TokenLogprobs(Positions[LogprobsAt]):
    """Of an answer's tokens, or of those that are new in it."""

    __slots__ = ("_ids", "_listed", "_logprobs", "_ranks", "_top_ids", "_top_logprobs", "_width", "_word")

    def __init__(self, word: Word, listed: bool = False) -> None:
        """`listed`: the tokens beside the sampled one are those that the request lists; they have no rank."""
        self._word = word
        self._listed = listed
        self._width = 0                                  # alternatives at each position
        self._ids, self._ranks, self._top_ids = array("i"), array("i"), array("i")
        self._logprobs, self._top_logprobs = array("f"), array("f")

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_CHUNK + sum(each.itemsize * len(each) for each in self._arrays)

    def add(self, known: Logprobs, count: int) -> float:
        """The first `count` positions of `known`; returns the sum of their tokens' log-probabilities."""
        self._width = known.top_ids.shape[1]
        of_top = known.top_ids, known.top_logprobs
        for kept, new in zip(self._arrays, (*_of_tokens(known), *of_top), strict=True):
            kept.frombytes(new[:count].astype(kept.typecode, copy=False).tobytes())
        return float(sum(known.logprobs[:count].tolist()))

    def extend(self, other: TokenLogprobs) -> None:
        self._width = other._width if other else self._width
        for kept, new in zip(self._arrays, other._arrays, strict=True):
            kept.extend(new)

    def copy(self) -> TokenLogprobs:
        made = self.empty()
        made.extend(self)
        return made

    def empty(self) -> TokenLogprobs:
        """Of the same answer."""
        return TokenLogprobs(self._word, self._listed)

    def clear(self) -> None:
        for each in self._arrays:
            del each[:]

    @property
    def _arrays(self) -> tuple[array[Any], ...]:
        return self._ids, self._logprobs, self._ranks, self._top_ids, self._top_logprobs

    def _made(self, place: int) -> LogprobsAt:
        tops = slice(place * self._width, (place + 1) * self._width)
        of_token = self._ids[place], self._logprobs[place], self._ranks[place]
        return _position(*of_token, self._top_ids[tops], self._top_logprobs[tops], self._word, self._listed)


def _of_tokens(known: Logprobs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return known.token_ids, known.logprobs, known.ranks


def _position(
    token: int, logprob: float, rank: int, top_ids: Sequence[int], top_logprobs: Sequence[float], word: Word, listed: bool
) -> LogprobsAt:
    at = {
        top: Logprob(value, None if listed else place, word(top))
        for place, (top, value) in enumerate(zip(top_ids, top_logprobs, strict=True), 1)
    }
    at[token] = Logprob(logprob, rank, word(token))
    return at

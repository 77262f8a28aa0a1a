"""Finds where the end of a text occurred before: hash chains over its n-grams.

    heads[hash of the last n tokens]  ─▶  the newest position after such an n-gram
    previous[position]                ─▶  the next older one with the same hash

Adding a token takes constant time. A search looks at a bounded number of candidates, newest first, and takes the longest match.
A token costs 8 to 16 bytes. A dictionary of n-grams would cost ten times as much, and a suffix automaton more than that.
"""

from __future__ import annotations

from array import array

import numpy as np

_FACTOR = 0x9E3779B1                 # of a multiplicative hash
_CANDIDATES = 24                     # that a search looks at: text that repeats one token has as many as it has tokens
_FIRST_SIZE = 64
SEPARATOR = -1                       # between texts of one log; no token equals it


def index_size(positions: int) -> int:
    """Places of the heads of an index over that many positions. It depends on nothing else: whenever an index grew, and
    whatever keeps it (ngram_table.py), the same hashes collide, so a search that looks at few candidates looks at the same."""
    return max(_FIRST_SIZE, 1 << (positions - 1).bit_length())


class GramIndex:
    """Over `tokens`, which only grows. catch_up() indexes what is new, so that a row without drafts costs nothing."""

    __slots__ = ("_heads", "_mask", "_n", "_previous", "tokens")

    def __init__(self, tokens: array[int], n: int) -> None:
        self.tokens = tokens
        self._n = n                                      # fewest tokens that a match has
        self._previous = array("i", [0] * min(len(tokens) + 1, n))     # by position; nothing ends before position n
        self._resize(index_size(len(tokens) + 1))

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self._heads) + len(self._previous) + len(self.tokens))

    @property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """As the native search reads it (ops/cpu/src/grams.c): valid until a text is added."""
        return *self.tokens.buffer_info(), self._heads.buffer_info()[0], self._mask, self._previous.buffer_info()[0]

    def catch_up(self) -> None:
        """Index what was added to the tokens."""
        first, count = len(self._previous), len(self.tokens) + 1
        if count > len(self._heads):
            self._resize(index_size(count))
        elif count - first > _FIRST_SIZE:
            self._add_many(first)
        else:
            for position in range(first, count):
                self._add(position)

    def _add(self, position: int) -> None:
        """A position comes after the tokens before it: 0 is the beginning of the text."""
        if position < self._n:
            self._previous.append(0)
            return
        place = self._place(self.tokens, position)
        self._previous.append(self._heads[place])
        self._heads[place] = position

    def _place(self, tokens: array[int], position: int) -> int:
        """Where the heads have the n tokens before a position."""
        value = 0
        for token in tokens[position - self._n : position]:
            value = (value * _FACTOR + token + 2) & 0xFFFFFFFF
        return (value ^ value >> 15) & self._mask

    def _resize(self, size: int) -> None:
        self._heads = array("i", bytes(4 * size))
        self._mask = size - 1
        self._previous = array("i", bytes(4 * min(len(self.tokens) + 1, self._n)))
        self._add_many(self._n)

    def _add_many(self, first: int) -> None:
        """Positions from `first` on, all at once: a prompt of thousands of tokens in a fraction of a millisecond."""
        count = len(self.tokens) + 1 - first
        if count <= 0:
            return
        tokens = np.frombuffer(self.tokens, np.int32)
        value = np.zeros(count, np.uint64)
        for offset in range(self._n):
            start = first - self._n + offset
            value = (value * np.uint64(_FACTOR) + (tokens[start : start + count] + 2).astype(np.uint64)) & np.uint64(0xFFFFFFFF)
        places = ((value ^ value >> np.uint64(15)) & np.uint64(self._mask)).astype(np.int64)
        heads = np.frombuffer(self._heads, np.int32)     # writable, as the array is
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        fresh = np.ones(count, bool)                     # the first of its place among the new ones
        fresh[1:] = ordered[1:] != ordered[:-1]
        previous = np.empty(count, np.int32)
        previous[order[1:]] = order[:-1] + first
        previous[order[fresh]] = heads[ordered[fresh]]
        last = np.append(fresh[1:], True)
        heads[ordered[last]] = order[last] + first
        self._previous.frombytes(previous.tobytes())

    def candidates(self, tail: array[int], longest: int) -> list[tuple[int, int]]:
        """(position, matched tokens) of places where the text before the position ends as `tail` does; newest first.

        At most `longest` tokens are compared. The end of the text itself is no match: nothing follows it.
        """
        end = len(tail)
        if end < self._n:
            return []
        tokens, previous, found = self.tokens, self._previous, []
        position = self._heads[self._place(tail, end)]
        size = len(tokens)
        for _ in range(_CANDIDATES):
            if not position:
                break
            if position < size:
                most, matched = min(longest, position, end), 0
                while matched < most and tokens[position - 1 - matched] == tail[end - 1 - matched]:
                    matched += 1
                if matched >= self._n:
                    found.append((position, matched))
                    if matched == longest:
                        break
            position = previous[position]
        return found

    def longest_match(self, tail: array[int], longest: int) -> tuple[int, int]:
        """The position after the longest match, the newest of equals, and how many tokens match; (0, 0): there is none."""
        return max(self.candidates(tail, longest), key=_matched, default=(0, 0))

    def follow(self, position: int, count: int) -> list[int]:
        """The tokens from a position on. Where the text ends it repeats what was just copied: text that runs in circles is
        continued by its circle."""
        tokens = self.tokens[position : position + count].tolist()
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        if len(tokens) < count:
            period = len(self.tokens) - position
            tokens = (tokens * -(-count // period))[:count]
        return tokens


def _matched(candidate: tuple[int, int]) -> int:
    return candidate[1]

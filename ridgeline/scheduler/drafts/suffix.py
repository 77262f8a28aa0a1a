"""Proposes what earlier answers said after the same tokens: agents and templates say the same again and again.

Answers that have ended are kept in a log for each cache salt, so that the speed of one client's answers tells nothing about
another's where salts keep them apart. A log is two halves: the newer one is filled, and takes the older one's place when it
is full. So memory is bounded, and the oldest answers go first.

With the native library one call serves all rows of a step (ops/cpu/src/grams.c), with the same answers.

Among the places where the longest match ends, the continuation is chosen token by token by the majority, the newest of equals.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict

import numpy as np

from ridgeline.scheduler.drafts.gram_index import SEPARATOR, GramIndex
from ridgeline.scheduler.drafts.offer import Native, Offer, Paths, RowByRow, addresses, as_paths, grade
from ridgeline.scheduler.sequence import Sequence

_FEWEST = 3                          # tokens that must match: any text has pairs that occur somewhere
_LONGEST = 24                        # that are compared
_TOKEN_BYTES = 16                    # of a token in a log with its index, at most
_VOTERS = 8
_SALTS = 256                         # that have a log: an empty one takes half a kilobyte


class AnswerLog:
    """The newest answers of one cache salt, at most `most` tokens."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._newer = GramIndex(array("i"), _FEWEST)
        self._older = GramIndex(array("i"), _FEWEST)

    def __len__(self) -> int:
        return len(self._newer.tokens) + len(self._older.tokens)

    @property
    def num_bytes(self) -> int:
        return self._newer.num_bytes + self._older.num_bytes

    def add(self, answer: array[int]) -> None:
        answer = answer[: self._half - 1]
        if len(self._newer.tokens) + len(answer) + 1 > self._half:
            self._older, self._newer = self._newer, GramIndex(array("i"), _FEWEST)
        self._newer.tokens.extend(answer)
        self._newer.tokens.append(SEPARATOR)
        self._newer.catch_up()

    @property
    def addresses(self) -> list[tuple[int, ...]]:
        return [half.addresses for half in (self._newer, self._older)]

    def continuation(self, tail: array[int], most: int) -> tuple[list[int], int]:
        """What followed the longest match of the tail, and how many tokens matched."""
        found = [(matched, index, position) for index in (self._newer, self._older)
                 for position, matched in index.candidates(tail, _LONGEST)]
        longest = max((matched for matched, _, _ in found), default=0)
        paths = [index.tokens[place : place + most] for matched, index, place in found if matched == longest][:_VOTERS]
        tokens: list[int] = []
        while paths and len(tokens) < most:
            depth = len(tokens)
            votes = Counter(path[depth] for path in paths if depth < len(path))
            if not votes or (chosen := votes.most_common(1)[0][0]) == SEPARATOR:     # the first counted of equals: the newest
                break
            tokens.append(chosen)
            paths = [path for path in paths if depth < len(path) and path[depth] == chosen]
        return tokens, longest


class Suffix(RowByRow):
    name = "suffix"

    def __init__(self, most_bytes: int, native: Native | None = None) -> None:
        self._native = native                                    # the library's suffix_drafts; None: row by row
        self._most = max(2, most_bytes // _TOKEN_BYTES)          # tokens of all logs together
        self._logs: OrderedDict[str, AnswerLog] = OrderedDict()  # by salt, the one used last at the end

    @property
    def num_bytes(self) -> int:
        return sum(log.num_bytes for log in self._logs.values())

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        log = self._logs.get(sequence.request.cache_salt)
        if log is None:
            return None
        tokens, matched = log.continuation(sequence.tokens[-_LONGEST:], most)
        return Offer(tokens, grade(matched)) if tokens else None

    def propose_all(self, sequences: list[Sequence], most: np.ndarray) -> Paths | None:
        width = int(most.max(initial=0))
        if self._native is None or not self._logs or width <= 0:
            return super().propose_all(sequences, most) if self._logs else None
        salts = [sequence.request.cache_salt for sequence in sequences]
        drafts = np.full((len(sequences), width), -1, np.int32)
        ends, matched = np.zeros((2, len(sequences)), np.int64)
        texts = addresses(sequences)
        for salt in dict.fromkeys(salts):
            log = self._logs.get(salt)
            if log is not None:
                own = np.array([each == salt for each in salts])
                halves, wanted = np.array(log.addresses, np.int64), np.where(own, most, 0)
                found, length = np.empty((2, len(sequences)), np.int64)
                self._native(
                    halves.ctypes.data, texts.ctypes.data, wanted.ctypes.data, drafts.ctypes.data, found.ctypes.data,
                    length.ctypes.data, len(sequences), width, _FEWEST, _LONGEST, _VOTERS,
                )
                ends[own], matched[own] = found[own], length[own]
        return as_paths(drafts, ends, matched)

    def ended(self, sequence: Sequence) -> None:
        """Remember an answer. A sequence that only waits again is not over."""
        answer = sequence.tokens[sequence.num_prompt :]
        if not sequence.finished or len(answer) <= _FEWEST:
            return
        salt = sequence.request.cache_salt
        log = self._logs.get(salt)
        if log is None:
            log = self._logs[salt] = AnswerLog(self._most)
        log.add(answer)
        self._logs.move_to_end(salt)
        while len(self._logs) > _SALTS or (len(self._logs) > 1 and sum(map(len, self._logs.values())) > self._most):
            self._logs.popitem(last=False)

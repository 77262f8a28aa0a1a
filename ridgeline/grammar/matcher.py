"""A matcher follows one answer through its grammar, and masks say what each of a batch of answers may say next.

A matcher's state is on the host and follows from the answer's tokens alone, so preemption does not touch it. One that
fails says so and stays failed; nobody else's is touched.

What beside the grammar decides over an answer's end is settled here, in the mask: `ignore_eos` and `min_tokens` keep end
tokens out for as long as the grammar leaves anything else to say. An answer whose grammar is complete ends whatever they
ask: there is nothing valid to add.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher

from ridgeline.grammar.interface import LibraryMatcher
from ridgeline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.grammar.xgrammar_backend import BatchFiller, XGrammarMatcher

Room = Callable[[tuple[int, int], type[np.int32]], np.ndarray]
_ALONE = 4                           # so few rows are done one after the other: less than waking threads for them
_MAX_THREADS = 12                    # at most three quarters of the cores; to wake more takes longer than they save
_SAMPLED = 32                        # every so many words of a mask have one bit looked at, to see how much it allows
_FAILED = "the grammar of structured_outputs failed on this answer: "
SLOW_SECONDS = 0.25                  # a mask that takes longer holds everybody up: its request fails


class Matcher:
    """One answer's place in its grammar."""

    __slots__ = ("__weakref__", "_early", "_late", "_matcher", "_min_tokens", "_num_tokens", "dear", "error", "family")

    def __init__(self, compiled: LibraryMatcher, params: SamplingParams, end_ids: Sequence[int]) -> None:
        self._matcher = compiled.deep_copy()
        self.family = id(compiled)                       # copies of the same one share a lock inside the library
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        # The ids that are held back before min_tokens, and behind: (word of the mask, bit).
        self._early = _bits({*end_ids, *params.stop_token_ids}) if params.min_tokens else []
        self._late = _bits(end_ids) if params.ignore_eos else []
        self.dear = False                                # its next mask may take many times as long as others'
        self.error = ""                                  # why it can say nothing more of this answer

    def accept(self, token: int) -> bool:
        """The answer goes on with this token. False: it may not, and `error` says why."""
        if not self.error:
            self._num_tokens += 1
            try:
                if not self._matcher.consume_token(token):
                    self.fail(self._matcher.get_error())
            except Exception as error:                   # whatever the library does, it is this answer's fault alone
                self.fail(str(error))
        return not self.error

    @property
    def ended(self) -> bool:
        """The grammar is complete: nothing but an end token could follow."""
        return not self.error and bool(self._matcher.is_stopped())

    def fail(self, reason: str) -> None:
        self.error = _FAILED + " ".join(reason.replace("<non-verbose/>", "").split())[:200]

    def hold_back(self, masks: np.ndarray, row: int) -> None:
        """Take out of its mask the ends that are not wanted yet, if that leaves anything.

        Few masks allow an end, and this is on the path of every token: one that allows none is only looked at.
        """
        bits = self._early if self._num_tokens < self._min_tokens else self._late
        held = [(word, bit) for word, bit in bits if masks.item(row, word) & bit]
        if held:
            mask = masks[row].view(np.uint32)
            for word, bit in held:
                mask[word] &= ~np.uint32(bit)
            if not mask.any():
                for word, bit in held:
                    mask[word] |= np.uint32(bit)


def _bits(ids: Iterable[int]) -> list[tuple[int, int]]:
    return [(token >> 5, 1 << (token & 31)) for token in sorted(ids)]


def num_threads() -> int:
    """That fill masks at once."""
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) * 3 // 4))


def evenly(wanted: Sequence[tuple[int, Matcher]]) -> list[tuple[int, Matcher]]:
    """In an order in which equal stretches take equally long.

    Threads take stretches of the list. Matchers of one family share a lock, so they stay together; families with dear masks
    stand beside families without.
    """
    families: dict[int, list[tuple[int, Matcher]]] = {}
    for row in wanted:
        families.setdefault(row[1].family, []).append(row)
    ordered = sorted(families.values(), key=lambda rows: sum(matcher.dear for _, matcher in rows))
    half = len(ordered) // 2
    pairs = itertools.zip_longest(reversed(ordered[half:]), ordered[:half], fillvalue=())
    return [row for dear, cheap in pairs for row in (*dear, *cheap)]


class Masks:
    """Fills the masks of a step: int32 [rows, ceil(vocab / 32)], id 32 w + b at bit b of word w."""

    def __init__(self, vocab_size: int, threads: int | None = None, room: Room = np.empty) -> None:
        self.seconds = 0.0                               # spent on them, and …
        self.filled = 0                                  # … how many there were
        self._words = -(-vocab_size // 32)
        self._room = room                                # makes the buffer: where the device can read it, if it must
        self._buffer = np.empty((0, self._words), np.int32)
        self._threads = num_threads() if threads is None else threads
        self._executor: LLExecutor | None = None
        self._others: BatchFiller | None = None          # for matchers of the other library, once there are some
        self._look_for_slow = False

    def fill(self, wanted: Sequence[tuple[int, Matcher]], num_rows: int) -> np.ndarray:
        """`wanted` are (row of the mask, matcher); the other rows, and those of matchers that fail, allow everything.

        What it returns is valid until the next call.
        """
        if len(self._buffer) < num_rows:
            self._buffer = self._room((max(num_rows, 2 * len(self._buffer)), self._words), np.int32)
        masks = self._buffer[:num_rows]
        if len(wanted) < num_rows:
            masks.fill(-1)
        started = time.perf_counter()
        if len(wanted) <= _ALONE or self._threads <= 1 or self._look_for_slow:
            self._one_by_one(wanted, masks)
        else:
            self._at_once(wanted, masks)
        # What allows some of everything has been looked for in most of the vocabulary: in texts of bounded length, near
        # their end. The next one will be, too.
        sampled = masks[:, ::_SAMPLED] & 1
        num_allowed, most = sampled.sum(axis=1), sampled.shape[1]
        dear = ((num_allowed > 0.05 * most) & (num_allowed < 0.97 * most)).tolist()
        for row, matcher in wanted:
            if not matcher.error and matcher._matcher.is_error():
                matcher.fail(matcher._matcher.get_error())
            if matcher.error:
                masks[row] = -1
            else:
                matcher.dear = dear[row]
                matcher.hold_back(masks, row)
        spent = time.perf_counter() - started
        self._look_for_slow = spent > SLOW_SECONDS       # together they were slow: next time, see who it is
        self.seconds += spent
        self.filled += len(wanted)
        return masks

    def _one_by_one(self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray) -> None:
        for row, matcher in wanted:
            started = time.perf_counter()
            try:
                matcher._matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
            except Exception as error:
                matcher.fail(str(error))
            if time.perf_counter() - started > SLOW_SECONDS:
                matcher.fail(f"a mask took more than {SLOW_SECONDS} s; use a simpler grammar")

    def _fill_others(self, listed: list[tuple[XGrammarMatcher, int]], masks: np.ndarray) -> None:
        if self._others is None:
            from ridgeline.grammar.xgrammar_backend import BatchFiller

            self._others = BatchFiller(self._threads)
        self._others.fill(listed, masks)

    def _at_once(self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray) -> None:
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        listed = [(matcher._matcher, row) for row, matcher in evenly(wanted)]
        guided = [(library, row) for library, row in listed if isinstance(library, LLMatcher)]
        others: Any = [each for each in listed if not isinstance(each[0], LLMatcher)] if len(guided) < len(listed) else []
        try:
            if guided:
                self._executor.unsafe_compute_mask_ptr(guided, masks.ctypes.data, 4 * self._words, len(masks))
            if others:
                self._fill_others(others, masks)
        except Exception:                                # it does not say whose fault it is
            self._one_by_one(wanted, masks)

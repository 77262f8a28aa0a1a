"""A matcher follows one answer through its grammar, and masks say what each of a batch of answers may say next.

A matcher's state is on the host and follows from the answer's tokens alone, so preemption does not touch it. One that
fails says so and stays failed; nobody else's is touched.

What beside the grammar decides over an answer's end is settled here, in the mask: `ignore_eos` and `min_tokens` keep end
tokens out for as long as the grammar leaves anything else to say. An answer whose grammar is complete ends whatever they
ask: there is nothing valid to add.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

from ridgeline.sampling_params import SamplingParams

_ALONE = 4                           # so few rows are done one after the other: less than waking threads for them
_MAX_THREADS = 8                     # at most half the cores; where those are few, threads would only wait for each other
_FAILED = "the grammar of structured_outputs failed on this answer: "
SLOW_SECONDS = 0.25                  # a mask that takes longer holds everybody up: its request fails


class Matcher:
    """One answer's place in its grammar."""

    __slots__ = ("_early", "_late", "_matcher", "_min_tokens", "_num_tokens", "error")

    def __init__(self, compiled: LLMatcher, params: SamplingParams, end_ids: Sequence[int]) -> None:
        self._matcher = compiled.deep_copy()
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        # The ids that are held back before min_tokens, and behind.
        self._early = np.array(sorted({*end_ids, *params.stop_token_ids}), np.int64)
        self._late = np.array(end_ids if params.ignore_eos else [], np.int64)
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

    def hold_back(self, mask: np.ndarray) -> None:
        """Take out of its mask (uint32 words) the ends that are not wanted yet, if that leaves anything."""
        ids = self._early if self._num_tokens < self._min_tokens else self._late
        if len(ids):
            left = mask.copy()
            np.bitwise_and.at(left, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
            if left.any():
                mask[:] = left


class Masks:
    """Fills the masks of a step: int32 [rows, ceil(vocab / 32)], id 32 w + b at bit b of word w."""

    def __init__(self, vocab_size: int, threads: int | None = None) -> None:
        self.seconds = 0.0                               # spent on them, and …
        self.filled = 0                                  # … how many there were
        self._words = -(-vocab_size // 32)
        self._buffer = np.empty((0, self._words), np.int32)
        self._threads = min(_MAX_THREADS, (os.cpu_count() or 1) // 2) if threads is None else threads
        self._executor: LLExecutor | None = None
        self._look_for_slow = False

    def fill(self, wanted: Sequence[tuple[int, Matcher]], num_rows: int) -> np.ndarray:
        """`wanted` are (row of the mask, matcher); the other rows, and those of matchers that fail, allow everything.

        What it returns is valid until the next call.
        """
        if len(self._buffer) < num_rows:
            self._buffer = np.empty((num_rows, self._words), np.int32)
        masks = self._buffer[:num_rows]
        masks.fill(-1)
        started = time.perf_counter()
        if len(wanted) <= _ALONE or self._threads <= 1 or self._look_for_slow:
            self._one_by_one(wanted, masks)
        else:
            self._at_once(wanted, masks)
        for row, matcher in wanted:
            if not matcher.error and matcher._matcher.is_error():
                matcher.fail(matcher._matcher.get_error())
            if matcher.error:
                masks[row] = -1
            else:
                matcher.hold_back(masks[row].view(np.uint32))
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

    def _at_once(self, wanted: Sequence[tuple[int, Matcher]], masks: np.ndarray) -> None:
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        listed = [(matcher._matcher, row) for row, matcher in wanted]
        try:
            self._executor.unsafe_compute_mask_ptr(listed, masks.ctypes.data, 4 * self._words, len(masks))
        except Exception:                                # it does not say whose fault it is
            self._one_by_one(wanted, masks)

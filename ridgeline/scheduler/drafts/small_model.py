"""The host's side of a draft model: it offers drafts that the device makes, and knows what they cost.

    seconds of w drafts  =  w · t(rows)  +  what it has to catch up, spread over the tokens that the answer may still get

t, the time of one pass of the draft model, is the median of what was measured. How many tokens a row has to catch up, in which
no drafts were made for it, is known here roughly: the device finds some of them in the prefix cache.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from ridgeline.draft_options import DRAFT_MODEL
from ridgeline.scheduler.drafts.offer import Offer
from ridgeline.scheduler.drafts.shape_times import ShapeTimes
from ridgeline.scheduler.sequence import Sequence

_REMEMBERED = 7                      # passes of each size, whose median counts
_HOPE = 0.5                          # of the model's time, where nothing was measured: a first try finds out
_BELIEVED = 3                        # measured proposals from which on it is believed that no number of drafts could pay …
_RETRY_STEPS = 5000                  # … for so many steps
_CATCH_UP = 1 / 16                   # of a pass: a token that is caught up, before any was measured
_LONGEST_ANSWER = 256                # tokens over which catching up is spread at most: most answers end before their limit


class SmallModel:
    """A Proposer. `limit`: the longest sequence that the draft model can read. `seconds`: of a pass by its tokens, roughly."""

    name = DRAFT_MODEL

    def __init__(self, limit: int, seconds: Callable[[int], float], most: int) -> None:
        self._limit, self._model, self._most = limit, seconds, most
        self._passes: dict[int, deque[float]] = {}       # seconds, by rows (bits of their number)
        self._catch_up: deque[float] = deque(maxlen=_REMEMBERED)         # seconds of a token
        self._seen: dict[Sequence, int] = {}             # tokens that had draft KV when drafts were made last
        self._tried = 0                                  # the step in which it was believed to pay
        self.resting = False                             # it has nothing to offer in this step

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        """None for rows with a grammar, too: masks are filled on the host, which does not know these drafts."""
        if self.resting or sequence.matcher is not None or len(sequence.tokens) + most >= self._limit:
            return None
        return Offer(self.name, [-1] * most, on_device=True)

    def ended(self, sequence: Sequence) -> None:
        self._seen.pop(sequence, None)

    # -- time ----------------------------------------------------------------------------------------------------------

    def pass_seconds(self, rows: int) -> float:
        measured = self._passes.get(rows.bit_length())
        return sorted(measured)[len(measured) // 2] if measured else _HOPE * self._model(rows)

    def took(self, rows: int, width: int, seconds: float, caught_up: int, catch_up_seconds: float) -> None:
        """Proposals of a step have come back: `width` passes, of which the first is a part of catching up, if there was that."""
        passes = width - (caught_up > 0)
        if passes > 0:
            self._passes.setdefault(rows.bit_length(), deque(maxlen=_REMEMBERED)).append(seconds / passes)
        if caught_up > 0:
            self._catch_up.append(catch_up_seconds / caught_up)

    def drafted(self, sequence: Sequence) -> None:
        self._seen[sequence] = len(sequence.tokens)

    def could_pay(self, rows: int, keys: int, times: ShapeTimes, step: int, gain: float) -> bool:
        """Would any number of drafts pay if all were right?"""
        if len(self._passes.get(rows.bit_length(), ())) < _BELIEVED or step - self._tried >= _RETRY_STEPS:
            self._tried = step
            return True
        own, least = self.pass_seconds(rows), gain / times.seconds(rows, keys)
        pays = any(
            (1 + width) / (times.seconds(rows * (1 + width), keys) + width * own) > least for width in range(1, self._most + 1)
        )
        if pays:
            self._tried = step
        return pays

    def costs(self, rows: int, sequences: list[Sequence | None], order: np.ndarray, positions: int) -> np.ndarray:
        """float [N]: seconds for the first 1, 2, … of the drafts in this order. A draft is offer · positions + position; of each
        offer its sequence, None: another proposer's."""
        offers, place = np.divmod(order, positions)
        own = np.array([sequence is not None for sequence in sequences])
        catch_up = np.array([0.0 if sequence is None else self._catching_up(sequence, rows) for sequence in sequences])
        deepest = np.maximum.accumulate(np.where(own[offers], place + 1, 0))
        return np.asarray(deepest * self.pass_seconds(rows) + np.cumsum(np.where(place == 0, catch_up[offers], 0.0)))

    def _catching_up(self, sequence: Sequence, rows: int) -> float:
        """Its share of a step."""
        missing = len(sequence.tokens) - self._seen.get(sequence, 0) - 1
        if missing <= self._most:
            return 0.0
        each = sorted(self._catch_up)[len(self._catch_up) // 2] if self._catch_up else _CATCH_UP * self.pass_seconds(rows)
        left = min(sequence.limit - len(sequence.tokens), _LONGEST_ANSWER)
        return missing * each / max(1, math.ceil(left / 2))

"""The host's side of a draft model: it offers drafts that the device makes, and knows what they cost.

    seconds of w drafts  =  w · t(rows)  +  what it has to catch up, spread over the steps that the answer may still get

t, the time of one pass of the draft model, is the median of what was measured. With more rows than were measured a pass takes no
less than with fewer: where that is too much even if all drafts were right, it is not tried. How many tokens a row has to catch
up, in which no drafts were made for it, is known here roughly: the device finds some of them in the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from ridgeline.draft_options import DRAFT_MODEL, MOST_DRAFTS
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts.offer import Offer, RowByRow
from ridgeline.scheduler.drafts.shape_times import ShapeTimes
from ridgeline.scheduler.sequence import Sequence

_REMEMBERED = 7                      # passes of each size, whose median counts
_HOPE = 0.5                          # of the model's time, where nothing was measured: a first try finds out
_CHUNK = 256                         # tokens of a pass that catches up, where none was measured
_REPAID = 32                         # steps over which catching up is spread at most: then it must have paid
_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, MOST_DRAFTS)
_GAIN = 1.01                         # drafts must promise this much more than none
_BELIEVED = 3                        # measured proposals from which on it is believed that no number of drafts could pay …
_RETRY_STEPS = 5000                  # … for this number of steps
_FIRST_TRIES, _BETWEEN = 6, 8        # until so many are measured, it is tried; and steps between these tries
_PROBED = 4                          # drafts of a probe
_SHARE, _CREDIT = 0.01, 1000         # a probe takes this share of the time since the last one; the first have a credit of steps


class SmallModel(RowByRow):
    """A Proposer. `limit`: the longest sequence that the draft model can read. `seconds`: of a pass by its tokens, roughly."""

    name = DRAFT_MODEL

    def __init__(self, limit: int, seconds: Callable[[int], float], most: int) -> None:
        self._limit, self._model, self._most = limit, seconds, most
        self._passes: dict[int, deque[float]] = {}       # seconds, by rows (bits of their number)
        self._catch_up: deque[float] = deque(maxlen=_REMEMBERED)         # seconds of a token
        self._seen: dict[Sequence, int] = {}             # tokens that had draft KV when drafts were made last
        self._believed = 0                               # the step in which it was last believed that it could pay
        self._tries, self._tried = 0, -_BETWEEN          # while little is measured: how often, and in which step the last time
        self.resting = False                             # it has nothing to offer in this step …
        self._only: Sequence | None = None               # … or something for one row alone

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        """None for rows with a grammar, too: masks are filled on the host, which does not know these drafts."""
        if self.resting or not self._reads(sequence, most) or self._only not in (None, sequence):
            return None
        return Offer([-1] * most)

    def _reads(self, sequence: Sequence, most: int) -> bool:
        return sequence.matcher is None and len(sequence.tokens) + most < self._limit

    def ended(self, sequence: Sequence) -> None:
        self._seen.pop(sequence, None)

    # -- time ----------------------------------------------------------------------------------------------------------

    def pass_seconds(self, rows: int) -> float:
        measured = self._passes.get(rows.bit_length())
        return _median(measured) if measured else max(_HOPE * self._model(rows), self._least_seconds(rows))

    def _least_seconds(self, rows: int) -> float:
        """Of a pass, by what was measured of as many rows or fewer; 0: nothing."""
        bits = rows.bit_length()
        return max((_median(each) for own, each in self._passes.items() if own <= bits and len(each) >= _BELIEVED), default=0.0)

    def took(self, rows: int, width: int, seconds: float, caught_up: int, catch_up_seconds: float) -> None:
        """Proposals of a step have come back: `width` passes, of which the first is a part of catching up, if there was that."""
        passes = width - (caught_up > 0)
        if passes > 0:
            self._passes.setdefault(rows.bit_length(), deque(maxlen=_REMEMBERED)).append(seconds / passes)
        if caught_up > 0:
            self._catch_up.append(catch_up_seconds / caught_up)

    def drafted(self, sequence: Sequence) -> None:
        self._seen[sequence] = len(sequence.tokens)

    def look(self, rows: DecodingRows, times: ShapeTimes, step: int, since: int, probing: bool) -> bool:
        """Before it is asked: is it to rest, or to serve one row only? True: it is to be tried now, although it may not pay.
        `since`: steps since there were drafts."""
        count, self._only = len(rows.sequences), None
        unknown = len(self._passes.get(count.bit_length(), ())) < _BELIEVED
        own = self._least_seconds(count) if unknown else self.pass_seconds(count)        # what is hoped for is no evidence
        believed = own > 0 and step - self._believed < _RETRY_STEPS
        self.resting = believed and not self._could_pay(count, rows.keys, times, own)
        if self.resting:
            return False
        self._believed = step
        curious = unknown and self._tries < _FIRST_TRIES and step - self._tried >= _BETWEEN
        if probing or curious:                           # what a probe costs most is catching up: with one row, the shortest
            readable = [each for each in rows.sequences if self._reads(each, self._most)]
            self._only = min(readable, key=self._missing, default=None)
            self.resting = self._only is None or not self._can_afford(
                self._only, times.seconds(count, rows.keys) * (since + _CREDIT * curious)
            )
        if not curious or self.resting:
            return False
        self._tries, self._tried = self._tries + 1, step
        return True

    def _could_pay(self, rows: int, keys: int, times: ShapeTimes, own: float) -> bool:
        """Would any number of drafts pay if all were right? `own`: seconds of a pass."""
        off = times.seconds(rows, keys)
        return any(
            times.drafted(rows, rows * each, each, keys) + (each - 1) * own < each * off / _GAIN         # queries of a row
            for each in range(2, 2 + min(self._most, times.most_queries(rows) - 1))
        )

    def _can_afford(self, sequence: Sequence, seconds: float) -> bool:
        took = self._missing(sequence) * self._token_seconds() + _PROBED * self.pass_seconds(1)
        return took <= _SHARE * seconds

    def choices(
        self, rows: int, sequences: list[Sequence | None], order: np.ndarray, positions: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Drafts in this order, but its own only up to some depth, for which all rows pay together; and float [N], seconds for
        the first 1, 2, … of them. A draft is offer · positions + position; of each offer its sequence, None: another's."""
        offers, place = np.divmod(order, positions)
        own = np.array([sequence is not None for sequence in sequences])[offers]
        catch_up = np.array([0.0 if sequence is None else self._catching_up(sequence) for sequence in sequences])[offers]
        begins, each = own & (place == 0), self.pass_seconds(rows)
        for depth in (0, *_DEPTHS):
            some = ~own | (place < depth)
            passes = np.maximum.accumulate(np.where(own, place + 1, 0)[some])
            yield order[some], passes * each + np.cumsum(np.where(begins, catch_up, 0.0)[some])
            if some.all():
                return

    def must_read(self, sequences: list[Sequence | None]) -> bool:
        """Has it to catch up with one of these rows, beyond what a pass of drafts does?"""
        return any(sequence is not None and self._catching_up(sequence) > 0 for sequence in sequences)

    def _catching_up(self, sequence: Sequence) -> float:
        """Its share of a step."""
        missing = self._missing(sequence)
        steps = min(max(1, (sequence.limit - len(sequence.tokens)) // 2), _REPAID)
        return missing * self._token_seconds() / steps if missing > self._most else 0.0

    def _missing(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self._seen.get(sequence, 0) - 1

    def _token_seconds(self) -> float:
        """Of a token that is caught up."""
        return _median(self._catch_up) if self._catch_up else self._model(_CHUNK) / _CHUNK


def _median(seconds: deque[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]

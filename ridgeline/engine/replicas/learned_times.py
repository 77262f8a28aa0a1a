"""How long a replica takes, learned from its answers: two straight lines, fitted with the newest answers counting most.

    seconds until the first token = c + p · uncached prompt tokens        once the requests before it have theirs
    seconds of a decode step      = a + b · requests that run

Knows numbers only: no clock, no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 0.97                        # weight of the past at each observation: the last 33 answers decide
RENEWED = 3.0                        # answers that the first one counts as, where what was learned before is old
FLAT = 1e-3                          # relative variance of x below which a slope cannot be seen


@dataclass(slots=True)
class Line:
    """y = intercept + slope · x, neither below 0. Without a visible slope, y is proportional to x or constant."""

    is_proportional: bool
    is_old: bool = False             # the next observation replaces all before it
    weight: float = 0.0
    x: float = 0.0                   # decayed sums
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.weight > 0 and not self.is_old

    def observe(self, x: float, y: float) -> None:
        past, count = (0.0, RENEWED) if self.is_old else (MEMORY, 1.0)
        self.is_old = False
        self.weight = self.weight * past + count
        self.x = self.x * past + count * x
        self.y = self.y * past + count * y
        self.xx = self.xx * past + count * x * x
        self.xy = self.xy * past + count * x * y

    def fitted(self) -> tuple[float, float]:
        """(intercept, slope)."""
        x, y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - x * x
        slope = (self.xy / self.weight - x * y) / variance if variance > FLAT * x * x else -1.0
        if slope < 0:
            return (0.0, self.xy / self.xx) if self.is_proportional and self.xx else (y, 0.0)
        if y < slope * x:
            return 0.0, self.xy / self.xx
        return y - slope * x, slope


@dataclass(frozen=True, slots=True)
class Pace:
    """The coefficients that a prediction uses. The defaults serve until any replica has answered."""

    prefill_fixed: float = 0.01      # c
    prefill_token: float = 1e-4      # p
    step_fixed: float = 0.01         # a
    step_row: float = 1e-4           # b

    def prefill(self, tokens: float) -> float:
        return self.prefill_fixed + self.prefill_token * tokens

    def step(self, rows: float) -> float:
        return self.step_fixed + self.step_row * rows


class LearnedTimes:
    """Of one replica."""

    def __init__(self) -> None:
        self.prefill = Line(is_proportional=True)
        # A step mostly reads weights. If it counted as proportional to its rows, a replica that has only run one request at a
        # time would look too slow for two, and never show otherwise.
        self.decode = Line(is_proportional=False)

    def grow_old(self) -> None:
        """Others were chosen for so long that it may be another by now: until it has answered, it is taken to be as they are."""
        self.prefill.is_old = self.decode.is_old = True

    def pace(self, otherwise: Pace, is_tried: bool = False) -> Pace:
        """`is_tried`: one request there is to tell whether it is as others now; meanwhile what is old counts."""
        prefill, decode = (line.is_known or (is_tried and line.weight > 0) for line in (self.prefill, self.decode))
        fixed, token = self.prefill.fitted() if prefill else (otherwise.prefill_fixed, otherwise.prefill_token)
        base, row = self.decode.fitted() if decode else (otherwise.step_fixed, otherwise.step_row)
        return Pace(fixed, token, base, row)


def mean_pace(all_times: Iterable[LearnedTimes]) -> Pace:
    """For a replica that has not answered yet: as the others."""
    known = list(all_times)
    prefills = [each.prefill.fitted() for each in known if each.prefill.is_known]
    decodes = [each.decode.fitted() for each in known if each.decode.is_known]
    usual = Pace()
    fixed, token = _means(prefills) if prefills else (usual.prefill_fixed, usual.prefill_token)
    base, row = _means(decodes) if decodes else (usual.step_fixed, usual.step_row)
    return Pace(fixed, token, base, row)


def _means(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(first for first, _ in pairs) / len(pairs), sum(second for _, second in pairs) / len(pairs)

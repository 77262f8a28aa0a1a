"""How long a replica takes, learned from its answers: two straight lines, fitted with the newest answers counting most.

    seconds until the first token = c + p · uncached prompt tokens        once the requests before it have theirs
    seconds of a decode step      = a + b · requests that run

Knows numbers only: no clock, no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 0.97                        # weight of the past at each observation: the last 33 answers decide
FLAT = 1e-3                          # relative variance of x below which a slope cannot be seen


@dataclass(slots=True)
class Line:
    """y = intercept + slope · x, neither below 0. Without a visible slope, y is proportional to x or constant."""

    is_proportional: bool
    weight: float = 0.0
    x: float = 0.0                   # decayed sums
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, x: float, y: float) -> None:
        self.weight = self.weight * MEMORY + 1
        self.x = self.x * MEMORY + x
        self.y = self.y * MEMORY + y
        self.xx = self.xx * MEMORY + x * x
        self.xy = self.xy * MEMORY + x * y

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

    def pace(self, otherwise: Pace) -> Pace:
        fixed, token = self.prefill.fitted() if self.prefill.weight else (otherwise.prefill_fixed, otherwise.prefill_token)
        base, row = self.decode.fitted() if self.decode.weight else (otherwise.step_fixed, otherwise.step_row)
        return Pace(fixed, token, base, row)


def mean_pace(all_times: Iterable[LearnedTimes]) -> Pace:
    """For a replica that has not answered yet: as the others."""
    known = list(all_times)
    prefills = [each.prefill.fitted() for each in known if each.prefill.weight]
    decodes = [each.decode.fitted() for each in known if each.decode.weight]
    usual = Pace()
    fixed, token = _means(prefills) if prefills else (usual.prefill_fixed, usual.prefill_token)
    base, row = _means(decodes) if decodes else (usual.step_fixed, usual.step_row)
    return Pace(fixed, token, base, row)


def _means(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(first for first, _ in pairs) / len(pairs), sum(second for _, second in pairs) / len(pairs)

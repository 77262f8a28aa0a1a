"""Arrival processes: the times at which requests are sent, in seconds from the start of a run.

Every open-loop process is a sequence of gaps with mean 1, mapped through the integral of the rate:

    gaps      exponential (Poisson), gamma with shape `burstiness` (below 1 burstier, above 1 steadier), or all equal
    rate      constant, or rising from one value to another, linearly or exponentially, while the requests arrive
    trace     the times themselves, from a file

The names are those of `vllm bench serve`: a Poisson process is burstiness 1; equal gaps are burstiness infinity.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes from one value to another over all requests."""

    start: float                     # requests per second
    end: float
    strategy: str = "linear"         # or "exponential"

    def duration(self, count: int) -> float:
        """Seconds in which `count` requests are due on average."""
        if self.strategy == "linear" or self.start == self.end:
            return 2 * count / (self.start + self.end)
        return count * math.log(self.end / self.start) / (self.end - self.start)

    def time_of(self, arrived: float, duration: float) -> float:
        """The time by which `count` requests have arrived on average: the inverse of the rate's integral."""
        if self.start == self.end:
            return arrived / self.start
        if self.strategy == "linear":
            slope = (self.end - self.start) / duration
            inside = self.start**2 + 2 * slope * arrived
            # A ramp that falls to nothing never brings more than its whole: those come at its end.
            return (math.sqrt(inside) - self.start) / slope if inside > 0 else duration
        growth = math.log(self.end / self.start) / duration
        inside = 1 + growth * arrived / self.start
        return math.log(inside) / growth if inside > 0 else duration


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An open-loop process. A rate of infinity sends everything at once."""

    rate: float = math.inf           # requests per second
    burstiness: float = 1.0
    ramp: Ramp | None = None
    trace: Sequence[float] = ()      # seconds; the rate and the gaps are then the trace's own

    @property
    def name(self) -> str:
        if self.trace:
            return "trace"
        if self.ramp is not None:
            return f"{self.ramp.strategy} ramp"
        if math.isinf(self.rate):
            return "all at once"
        return "poisson" if self.burstiness == 1 else "constant" if math.isinf(self.burstiness) else "gamma"

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """When the first `count` requests are due."""
        if self.trace:
            yield from sorted(self.trace)[:count]
            return
        if self.ramp is None and math.isinf(self.rate):
            yield from [0.0] * count
            return
        duration = self.ramp.duration(count) if self.ramp is not None else 0.0
        arrived = 0.0
        for number in range(count):
            if number:                                   # the first one opens the run
                arrived += self._gap(rng)
            yield self.ramp.time_of(arrived, duration) if self.ramp is not None else arrived / self.rate

    def _gap(self, rng: random.Random) -> float:
        if math.isinf(self.burstiness):
            return 1.0
        if self.burstiness == 1:
            return rng.expovariate(1.0)
        return rng.gammavariate(self.burstiness, 1 / self.burstiness)


def checked(rate: float, burstiness: float, ramp: Ramp | None, trace: Sequence[float]) -> Arrivals:
    """An arrival process, or a ConfigError that says what would be one."""
    if not rate > 0:
        raise ConfigError(f"--request-rate must be above 0 (inf: all at once), got {rate:g}")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0 (1: Poisson, inf: equal gaps), got {burstiness:g}")
    if ramp is not None:
        if trace:
            raise ConfigError("a trace has its own times: leave --ramp-up-strategy out")
        if not (0 < ramp.start < math.inf and 0 < ramp.end < math.inf):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps must be above 0")
    if any(time < 0 for time in trace):
        raise ConfigError("a trace's times must not be negative")
    return Arrivals(rate, burstiness, ramp, tuple(trace))

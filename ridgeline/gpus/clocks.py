"""A GPU's power and clocks over a stretch of time: sums of samples that only grow, and what their difference says.

All ranks wait for the slowest, so of several GPUs a sample is that of the one whose clock is lowered most. Samples in which the
GPU has nothing to do are left out: its clock is low then because it may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ridgeline.gpus.nvml import Reading

REASONS = {
    0x1: "idle", 0x2: "applications clocks", 0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake", 0x100: "display clocks",
}
_IDLE, _POWER, _SLOWDOWN, _HEAT = 0x1, 0x4 | 0x80, 0x8, 0x20 | 0x40
SUMS = (
    "samples", "watts", "limit_w", "most_limit_w", "sm_mhz", "max_sm_mhz", "temperature_c", "power_capped", "heat_capped",
)
POWER, TEMPERATURE = "power", "temperature"
MOSTLY = 0.5                         # of the samples: a reason that is active in fewer does not limit the clock of the whole
LOWERED = 0.95                       # of the highest clock: above, the reason costs less than anything else does


def sample(readings: Sequence[Reading]) -> list[float] | None:
    """One sample in the order of SUMS; None if the GPUs are idle, or do not say what is needed."""
    rows = [row for row in map(_row, readings) if row is not None]
    return min(rows, key=lambda row: row[4] / row[5]) if rows else None


def _row(reading: Reading) -> list[float] | None:
    watts, limit, clock, highest, reasons = (
        reading.watts, reading.limit_w, reading.sm_mhz, reading.max_sm_mhz, reading.reasons
    )
    if watts is None or not limit or clock is None or not highest or reasons is None or reasons & _IDLE:
        return None
    # Heat and a power brake have bits of their own beside that of the hardware's slowdown. What is left of it is a protection
    # against too much power at once (NVML: "Fast Trigger").
    hot = bool(reasons & _HEAT)
    capped = bool(reasons & _POWER) or (bool(reasons & _SLOWDOWN) and not hot)
    return [
        1.0, watts, limit, reading.most_limit_w or 0.0, clock, highest, reading.temperature_c or 0.0,
        float(capped), float(hot),
    ]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Means over a stretch of time."""

    samples: int
    watts: float
    limit_w: float
    most_limit_w: float              # the highest limit that the board takes; 0: not known
    sm_mhz: float
    max_sm_mhz: float
    temperature_c: float             # 0: not known
    power_capped: float              # share of the samples in which power lowered the clock …
    heat_capped: float               # … and in which temperature did

    @classmethod
    def of(cls, sums: Sequence[float]) -> Clocks | None:
        """Of sums, or of the difference of two; None without a sample."""
        if len(sums) != len(SUMS) or sums[0] < 1:
            return None
        samples = sums[0]
        return cls(int(samples), *(each / samples for each in sums[1:]))

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Clocks | None:
        """Of what `shown` gave; None without it. ValueError, LookupError or TypeError for anything else that a file may say."""
        if not said:
            return None
        numbers = {each.name: float(said[each.name]) for each in fields(cls)}
        if not all(map(math.isfinite, numbers.values())) or numbers["max_sm_mhz"] <= 0:
            raise ValueError("clocks of a GPU must be numbers above 0")
        return cls(int(numbers.pop("samples")), **numbers)

    @property
    def limited_by(self) -> str:
        """POWER or TEMPERATURE, if one of them lowers the clock most of the time; else nothing."""
        share, reason = max((self.power_capped, POWER), (self.heat_capped, TEMPERATURE))
        return reason if share >= MOSTLY and self.sm_mhz <= LOWERED * self.max_sm_mhz else ""

    @property
    def lost(self) -> float:
        """The share of the highest clock that is missing."""
        return max(0.0, 1 - self.sm_mhz / self.max_sm_mhz)

    @property
    def line(self) -> str:
        heat = f", {self.temperature_c:.0f} °C" if self.limited_by == TEMPERATURE and self.temperature_c else ""
        return f"{self.watts:,.0f} of {self.limit_w:,.0f} W, SM clock {self.sm_mhz:,.0f} of {self.max_sm_mhz:,.0f} MHz{heat}"


def shown(clocks: Clocks | None) -> dict[str, Any]:
    """For a record or an answer; empty where nothing is known."""
    return {} if clocks is None else asdict(clocks) | {"limited_by": clocks.limited_by, "line": clocks.line}

"""Samples GPUs in a thread of its own: sums for the engine's verdict, and a log for the record of a measurement.

NVML's calls release Python's lock while they ask the driver, so a step only meets the moments between them. Without a GPU, or
without the driver's library, there is no thread after the first look, and nothing is reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ridgeline.gpus.clocks import REASONS, SUMS, Clocks, sample
from ridgeline.gpus.nvml import Nvml, Reading, open_nvml

ENGINE_SECONDS = 1.0                 # between two samples of a running engine: ten in the verdict's window
LOG_SECONDS = 0.2                    # … and of a measurement, which may be short
_LAST_SECONDS = 1.0                  # that the end waits for a driver that does not answer
# Names in records, by those of a reading.
FIELDS = {
    "sm_mhz": "sm_clock_mhz", "memory_mhz": "memory_clock_mhz", "watts": "power_w", "temperature_c": "temperature_c",
    "memory_used_mib": "memory_used_mib",
}

Take = Callable[[float, list[Reading]], None]
Opens = Callable[[], Nvml | None]
Ranges = Sequence[tuple[float, float]]


class Sampler:
    """Reads the GPUs `which`, by index or UUID, and hands the readings to `take` with the time of `time.time()`."""

    def __init__(self, which: Sequence[str], take: Take, period: float, opens: Opens = open_nvml) -> None:
        self._which, self._take, self._period, self._opens = list(which), take, period, opens
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._which:
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        nvml = self._opens()                             # here, because it may take a second
        if nvml is None:
            return
        handles = nvml.handles(self._which)
        while handles and not self._end.is_set():
            self._take(time.time(), [nvml.read(handle) for handle in handles])
            self._end.wait(self._period)
        nvml.close()


class GpuSums:
    """The sums of a running engine's GPUs, in the order of clocks.SUMS."""

    def __init__(self, which: Sequence[str], opens: Opens = open_nvml) -> None:
        self._sums = [0.0] * len(SUMS)
        self._sampler = Sampler(which, self._add, ENGINE_SECONDS, opens)
        self._sampler.start()

    def _add(self, when: float, readings: list[Reading]) -> None:
        one = sample(readings)
        if one is not None:                              # replaced at once: the engine's thread reads it meanwhile
            self._sums = [total + each for total, each in zip(self._sums, one, strict=True)]

    def values(self) -> list[float]:
        """Empty without a sample."""
        sums = self._sums
        return sums if sums[0] else []

    def close(self) -> None:
        self._sampler.stop()


class GpuLog:
    """`with GpuLog(which) as log: …; log.between(begin, end)`, with times of `time.time()`."""

    def __init__(self, which: Sequence[str], opens: Opens = open_nvml) -> None:
        self._devices = len(which)
        self._samples: list[tuple[float, list[Reading]]] = []
        self._sampler = Sampler(which, lambda when, readings: self._samples.append((when, readings)), LOG_SECONDS, opens)

    def __enter__(self) -> GpuLog:
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampler.stop()

    def between(self, *ranges: tuple[float, float]) -> dict[str, Any]:
        """Of these ranges of time (`summary`); empty without a GPU."""
        return summary(self._within(ranges), self._devices) if self._samples else {}

    def clocks(self, *ranges: tuple[float, float]) -> Clocks | None:
        return clocks(self._within(ranges))

    def _within(self, ranges: Ranges) -> list[list[Reading]]:
        return [readings for when, readings in self._samples if any(begin <= when <= end for begin, end in ranges)]


def clocks(samples: Sequence[Sequence[Reading]]) -> Clocks | None:
    counted = [one for one in map(sample, samples) if one is not None]
    return Clocks.of([sum(each) for each in zip(*counted, strict=True)])


def summary(samples: Sequence[Sequence[Reading]], devices: int = 1) -> dict[str, Any]:
    """Lowest and highest of each value, every reason for a lower clock that was seen, and means while there was work, of the
    device whose clock was lowest. `power_mean_w` is of all devices."""
    readings = [reading for each in samples for reading in each]
    if not readings:
        return {"samples": 0}
    seen, active = {}, 0
    for field, name in FIELDS.items():
        values = [value for reading in readings if (value := getattr(reading, field)) is not None]
        if values:
            seen[name] = [min(values), max(values)]
    for reading in readings:
        active |= reading.reasons or 0
    power = [reading.watts for reading in readings if reading.watts is not None]
    found = clocks(samples)
    return {
        "samples": len(readings), **seen,
        **({"power_mean_w": devices * sum(power) / len(power)} if power else {}),
        "throttle_reasons": [name for bit, name in REASONS.items() if active & bit and name != "idle"],
        **({} if found is None else {
            "busy_power_w": found.watts, "power_limit_w": found.limit_w, "sm_clock_mean_mhz": found.sm_mhz,
            "max_sm_clock_mhz": found.max_sm_mhz,
            "power_capped": found.power_capped, "heat_capped": found.heat_capped, "limited_by": found.limited_by,
        }),
    }

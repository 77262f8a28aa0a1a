"""Logs the machine during a measurement: GPUs through NVML, CPU clocks, temperature and energy through /sys.

    with Watch() as watch: …; watch.between(begin, end)      # times of time.time()

Values that a machine does not report are left out. Virtual machines mostly report nothing about their cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ridgeline.gpus.clocks import Clocks
from ridgeline.gpus.gpu_log import GpuLog
from ridgeline.gpus.nvml import visible

PERIOD = 0.5                         # seconds between two samples of the cores
SYSTEM = Path("/sys")


class Watch:
    """GPUs: those that are named, by index or UUID; None: all that can be seen from here."""

    def __init__(self, gpus: Sequence[str] | None = None, system: Path = SYSTEM) -> None:
        self._gpu_log = GpuLog(visible() if gpus is None else gpus)
        self._cores = CoreLog(system)

    def __enter__(self) -> Watch:
        self._gpu_log.__enter__()
        self._cores.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cores.stop()
        self._gpu_log.__exit__(kind, value, trace)

    def between(self, begin: float, end: float) -> dict[str, Any]:
        found = {"gpu": self._gpu_log.between((begin, end)), "cpu": self._cores.between(begin, end)}
        return {name: values for name, values in found.items() if values}

    def gpu(self, *ranges: tuple[float, float]) -> dict[str, Any]:
        """The GPUs in several ranges of time together; empty without one."""
        return self._gpu_log.between(*ranges)

    def clocks(self, *ranges: tuple[float, float]) -> Clocks | None:
        """Means of the GPU whose clock was lowered most."""
        return self._gpu_log.clocks(*ranges)

    def watts(self, begin: float, end: float) -> float | None:
        """Mean power of the GPUs, or without a GPU of the CPU packages; None if neither reports it."""
        found = self.between(begin, end)
        if "power_mean_w" in found.get("gpu", {}):
            return float(found["gpu"]["power_mean_w"])
        power = found.get("cpu", {}).get("power_mean_w")
        return None if power is None else float(power)


class CoreLog:
    """A thread that reads a few files of /sys twice a second."""

    def __init__(self, system: Path = SYSTEM) -> None:
        cores = system / "devices/system/cpu"
        self._clocks = _readable(cores, "cpu[0-9]*/cpufreq/scaling_cur_freq")        # kHz
        self._throttles = _readable(cores, "cpu[0-9]*/thermal_throttle/*_throttle_count")
        self._energies = _readable(system / "class/powercap", "intel-rapl:[0-9]*/energy_uj")
        self._samples: list[tuple[float, list[int], int, list[int]]] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._clocks or self._throttles or self._energies:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self.sample()

    def sample(self) -> None:
        throttled = sum(_numbers(self._throttles))
        self._samples.append((time.time(), _numbers(self._clocks), throttled, _numbers(self._energies)))

    def _watch(self) -> None:
        while not self._end.is_set():
            self.sample()
            self._end.wait(PERIOD)

    def between(self, begin: float, end: float) -> dict[str, Any]:
        inside = [sample for sample in self._samples if begin - PERIOD <= sample[0] <= end + PERIOD]
        if len(inside) < 2:
            return {}
        found: dict[str, Any] = {}
        clocks = [clock / 1e3 for _, values, _, _ in inside for clock in values]
        if clocks:
            found["clock_mhz"] = [min(clocks), max(clocks)]
        if self._throttles:
            found["throttle_events"] = inside[-1][2] - inside[0][2]
        spent = [after - before for before, after in zip(inside[0][3], inside[-1][3], strict=False)]
        if spent and min(spent) >= 0:                    # a counter that went round says nothing
            seconds = inside[-1][0] - inside[0][0]
            found["power_mean_w"] = sum(spent) / 1e6 / max(seconds, 1e-9)
        return found


def _readable(folder: Path, pattern: str) -> list[Path]:
    """Files that this user may read: energy is mostly root's."""
    return [path for path in sorted(folder.glob(pattern)) if _number(path) is not None]


def _numbers(paths: list[Path]) -> list[int]:
    return [number for number in map(_number, paths) if number is not None]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def throttled(found: dict[str, Any]) -> list[str]:
    """Every reason that something was slowed down."""
    reasons = list(found.get("gpu", {}).get("throttle_reasons", []))
    events = found.get("cpu", {}).get("throttle_events", 0)
    return reasons + ([f"{events} thermal throttle events of the processor"] if events else [])


def limited(log: Mapping[str, Any]) -> str:
    """What lowered the GPU's clock most of the time, with figures; empty: nothing did, or nothing is known."""
    if not log.get("limited_by"):
        return ""
    return (
        f"{log['limited_by']} binds: {log['busy_power_w']:,.0f} of {log['power_limit_w']:,.0f} W, "
        f"SM clock {log['sm_clock_mean_mhz']:,.0f} of {log['max_sm_clock_mhz']:,.0f} MHz"
    )

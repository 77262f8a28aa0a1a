"""Reads power, clocks, temperature and throttle reasons of NVIDIA GPUs through NVML, a library that comes with the driver.

A value that the driver does not know, or that a container may not read, is None. Without the library there is no reader. Does not
import torch, because the load generator uses this too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2                  # NVML's kinds of clocks
_TEXT = 96                           # bytes of the longest name
# Two names of the same function: drivers have the newer one, the older one, or both.
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU at one moment."""

    watts: float | None = None       # on recent GPUs a mean over the last second
    limit_w: float | None = None     # enforced
    most_limit_w: float | None = None    # the highest limit that the board takes
    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    memory_used_mib: float | None = None
    reasons: int | None = None       # for a lower clock, as bits (clocks.REASONS)


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """Of a library that is open."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._fixed: dict[int | None, tuple[float | None, float | None]] = {}    # by handle: what is asked for once

    def handles(self, which: Sequence[str]) -> list[ctypes.c_void_p]:
        """GPUs by index or by UUID; one that is unknown is left out."""
        found = []
        for name in which:
            handle = ctypes.c_void_p()
            index = name.isdigit()
            function = "nvmlDeviceGetHandleByIndex_v2" if index else "nvmlDeviceGetHandleByUUID"
            if self._call(function, int(name) if index else name.encode(), ctypes.byref(handle)):
                found.append(handle)
        return found

    def count(self) -> int:
        return int(self._number("nvmlDeviceGetCount_v2") or 0)

    def read(self, gpu: ctypes.c_void_p) -> Reading:
        number, memory = self._number, _MemoryInfo()
        if gpu.value not in self._fixed:
            self._fixed[gpu.value] = self._most_power(gpu), number("nvmlDeviceGetMaxClockInfo", gpu, _SM)
        most_limit, max_clock = self._fixed[gpu.value]
        has_memory = self._call("nvmlDeviceGetMemoryInfo", gpu, ctypes.byref(memory))
        reasons = (number(name, gpu, kind=ctypes.c_ulonglong) for name in _REASONS)
        return Reading(
            watts=_thousandths(number("nvmlDeviceGetPowerUsage", gpu)),
            limit_w=_thousandths(number("nvmlDeviceGetEnforcedPowerLimit", gpu)),
            most_limit_w=most_limit, sm_mhz=number("nvmlDeviceGetClockInfo", gpu, _SM), max_sm_mhz=max_clock,
            memory_mhz=number("nvmlDeviceGetClockInfo", gpu, _MEMORY),
            temperature_c=number("nvmlDeviceGetTemperature", gpu, 0),
            memory_used_mib=memory.used / 2**20 if has_memory else None,
            reasons=next((each for each in reasons if each is not None), None),
        )

    def _most_power(self, gpu: ctypes.c_void_p) -> float | None:
        lowest, highest = ctypes.c_uint(), ctypes.c_uint()
        found = self._call("nvmlDeviceGetPowerManagementLimitConstraints", gpu, ctypes.byref(lowest), ctypes.byref(highest))
        return highest.value / 1e3 if found else None

    def facts(self, gpu: ctypes.c_void_p) -> dict[str, str]:
        """What does not change during a measurement, for its record."""
        limit = self._number("nvmlDeviceGetEnforcedPowerLimit", gpu)
        persistence = self._number("nvmlDeviceGetPersistenceMode", gpu)
        found = {
            "name": self._text("nvmlDeviceGetName", gpu), "driver": self._text("nvmlSystemGetDriverVersion"),
            "power_limit_w": None if limit is None else f"{limit / 1e3:.2f}",
            "max_sm_clock_mhz": self._number("nvmlDeviceGetMaxClockInfo", gpu, _SM),
            "max_memory_clock_mhz": self._number("nvmlDeviceGetMaxClockInfo", gpu, _MEMORY),
            "persistence": None if persistence is None else "Enabled" if persistence else "Disabled",
        }
        return {name: str(value) for name, value in found.items() if value is not None}

    def close(self) -> None:
        self._call("nvmlShutdown")

    def _call(self, name: str, *given: Any) -> bool:
        """Did it work? An older driver lacks some of the functions."""
        function = getattr(self._library, name, None)
        return function is not None and function(*given) == 0

    def _number(self, name: str, *given: Any, kind: Callable[[], Any] = ctypes.c_uint) -> int | None:
        value = kind()
        return int(value.value) if self._call(name, *given, ctypes.byref(value)) else None

    def _text(self, name: str, *given: Any) -> str | None:
        room = ctypes.create_string_buffer(_TEXT)
        return room.value.decode(errors="replace") if self._call(name, *given, room, _TEXT) else None


def open_nvml(load: Callable[[str], Any] = ctypes.CDLL) -> Nvml | None:
    """None: there is no driver, or it does not answer."""
    try:
        library = load(LIBRARY)
    except OSError:
        return None
    return Nvml(library) if getattr(library, "nvmlInit_v2", lambda: 1)() == 0 else None


def visible(load: Callable[[str], Any] = ctypes.CDLL) -> list[str]:
    """The GPUs of this machine that a server started like this process would see, by index or by UUID."""
    nvml = open_nvml(load)
    if nvml is None:
        return []
    count = nvml.count()
    nvml.close()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index in range(count)]


def facts(which: Sequence[str], load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, str]:
    """The first GPU's name and limits; empty without one."""
    nvml = open_nvml(load) if which else None
    if nvml is None:
        return {}
    found = [nvml.facts(handle) for handle in nvml.handles(which[:1])]
    nvml.close()
    return found[0] if found else {}


def _thousandths(value: int | None) -> float | None:
    return None if value is None else value / 1e3

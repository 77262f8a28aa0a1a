"""A machine's peak rates, and the file that caches them. runner/start/measure_peaks.py measures them.

The file is for one device, driver and torch version; a change of any of them means a new measurement. Peaks are the best values
ever measured, so a measurement beside other programs does no lasting harm.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ridgeline.errors import ConfigError
from ridgeline.process import platform
from ridgeline.roofline.step_cost import Peaks

DATA_SHEET = "data sheet"            # value of `measured` for peaks that were not measured


@dataclass(frozen=True, slots=True)
class MachinePeaks:
    device: str                      # the device's name, as its maker calls it
    read_bytes_s: float
    flops_s: dict[str, float]        # by dtype
    launch_s: float                  # the least time of any kernel
    measured: str                    # when, and with which torch
    host_launch_s: float = 0.0       # host time to launch a kernel without a CUDA graph; 0: not known
    driver: str = ""
    torch: str = ""

    def rate(self, dtype: str) -> float:
        return self.flops_s.get(dtype, self.flops_s["float32"])

    def peaks(self, dtype: str) -> Peaks:
        return Peaks(self.read_bytes_s, self.rate(dtype))

    def best(self, other: MachinePeaks) -> MachinePeaks:
        """The better of each rate; date and name are those of `other`, the newer."""
        rates = {dtype: max(self.flops_s.get(dtype, 0.0), rate) for dtype, rate in other.flops_s.items()}
        return MachinePeaks(
            other.device, max(self.read_bytes_s, other.read_bytes_s), self.flops_s | rates,
            min(self.launch_s, other.launch_s), other.measured,
            min(self.host_launch_s, other.host_launch_s) or other.host_launch_s,
            other.driver, other.torch,
        )


@dataclass(frozen=True, slots=True)
class MachineKey:
    """What a measurement holds for."""

    device: str
    driver: str
    torch: str

    @property
    def file(self) -> str:
        words = (re.sub(r"[^A-Za-z0-9.]+", "-", word) for word in (self.device, self.driver, f"torch{self.torch}") if word)
        return f"peaks-{'-'.join(words)}.json"


def cached_peaks(key: MachineKey) -> MachinePeaks | None:
    """None: never measured, or the file was cut short or is another version's."""
    try:
        return MachinePeaks(**json.loads((platform.cache_dir() / key.file).read_text()))
    except (OSError, ValueError, TypeError, ConfigError):
        return None


def remember(key: MachineKey, peaks: MachinePeaks) -> None:
    """In one piece: another process may read it now."""
    path = platform.cache_dir() / key.file
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(peaks), indent=1) + "\n")
    draft.replace(path)


def from_data_sheet(device: str, read_bytes_s: float, flops_s: Mapping[str, float]) -> MachinePeaks:
    """Peaks from the data sheet, until they are measured."""
    return MachinePeaks(device, read_bytes_s, dict(flops_s), 0.0, DATA_SHEET)

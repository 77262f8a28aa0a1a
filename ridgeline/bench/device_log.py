"""What the GPU did while something was measured: clocks, power, temperature, and why it was slowed down.

nvidia-smi writes a line five times a second into a file, in a process of its own, so that the measured one is not
disturbed; afterwards a range of time is summed up. Without a GPU or without nvidia-smi there is nothing to tell.
"""

from __future__ import annotations

import datetime
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

PERIOD_MS = 200
# Two names of the same field: drivers have the newer one, the older one, or both.
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
FIELDS = {
    "clocks.sm": "sm_clock_mhz", "clocks.mem": "memory_clock_mhz", "power.draw": "power_w",
    "temperature.gpu": "temperature_c", "memory.used": "memory_used_mib",
}  # fmt: skip
REASONS = {
    0x1: "idle", 0x2: "applications clocks", 0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip


def gpu_facts() -> dict[str, Any]:
    """The GPU's name and limits; empty without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
    }  # fmt: skip
    names = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem", "persistence_mode")
    line = _query(names)
    if line is not None:
        facts |= dict(zip(("driver", "power_limit_w", "max_sm_clock_mhz", "max_memory_clock_mhz", "persistence"), line,
                          strict=True))  # fmt: skip
    return facts


class DeviceLog:
    """`with DeviceLog() as log: …; log.between(begin, end)`, with times of `time.time()`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="ridgeline-gpu-")
        self._file = Path(self._directory.name) / "log.csv"

    def __enter__(self) -> DeviceLog:
        if torch.cuda.is_available() and shutil.which("nvidia-smi"):
            reason = next((name for name in REASON_FIELDS if _query((name,)) is not None), None)
            if reason is not None:
                with self._file.open("wb") as target:
                    self._process = subprocess.Popen(
                        [*_command(("timestamp", *FIELDS, reason)), "-lms", str(PERIOD_MS)],
                        stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.DEVNULL, start_new_session=True,
                    )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._directory.cleanup()

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Lowest and highest of each value in that time, and every reason for a lower clock that was seen."""
        if self._process is None or not self._file.exists():
            return {}
        return summary(self._file.read_text(errors="replace"), begin, end)


def summary(text: str, begin: float, end: float) -> dict[str, Any]:
    """Of lines as nvidia-smi writes them; a line that is not complete yet is left out."""
    values: dict[str, list[float]] = {name: [] for name in FIELDS.values()}
    reasons, samples = 0, 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) + 2:
            continue
        try:
            when = datetime.datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            active = int(cells[-1], 16)
        except ValueError:
            continue
        if not begin <= when <= end:
            continue
        samples += 1
        reasons |= active
        for name, cell in zip(FIELDS.values(), cells[1:-1], strict=True):
            if cell.replace(".", "", 1).isdigit():
                values[name].append(float(cell))
    if not samples:
        return {"samples": 0}
    known = [name for bit, name in REASONS.items() if reasons & bit]
    return {
        "samples": samples,
        **{name: [min(found), max(found)] for name, found in values.items() if found},
        "throttle_reasons": [name for name in known if name != "idle"],
    }


def _command(names: tuple[str, ...]) -> list[str]:
    device = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    which = ["-i", device if device.startswith("GPU-") else f"GPU-{device}"] if device else []
    return ["nvidia-smi", *which, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]


def _query(names: tuple[str, ...]) -> list[str] | None:
    """One line of these values; None where there is no nvidia-smi or it does not know one of the names."""
    if not shutil.which("nvidia-smi"):
        return None
    try:
        done = subprocess.run(_command(names), capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return None
    cells = [cell.strip() for cell in done.stdout.strip().split(",")]
    return cells if done.returncode == 0 and len(cells) == len(names) else None

"""Logs a GPU's clocks, power, temperature and throttle reasons through nvidia-smi, five times a second.

nvidia-smi runs in its own process and writes to a file, so that it does not disturb the measurement; a range of time is
summarised afterwards. Empty without nvidia-smi. Does not import torch, because the load generator uses this too.
"""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PERIOD_MS = 200
# Two names of the same field: drivers have the newer one, the older one, or both.
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
FIELDS = {
    "clocks.sm": "sm_clock_mhz", "clocks.mem": "memory_clock_mhz", "power.draw": "power_w",
    "temperature.gpu": "temperature_c", "memory.used": "memory_used_mib",
}
FACTS = {
    "name": "name", "driver_version": "driver", "power.limit": "power_limit_w", "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.max.mem": "max_memory_clock_mhz", "persistence_mode": "persistence",
}
REASONS = {
    0x1: "idle", 0x2: "applications clocks", 0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake", 0x100: "display clocks",
}


def visible() -> list[str]:
    """The GPUs of this machine that a server started like this process would see, by what nvidia-smi calls them."""
    if not shutil.which("nvidia-smi"):
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    done = _run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"])
    return done.split() if done else []


def facts(which: Sequence[str]) -> dict[str, str]:
    """The first GPU's name and limits; empty without one."""
    line = query(tuple(FACTS), which[:1]) if which else None
    return dict(zip(FACTS.values(), line, strict=True)) if line is not None else {}


class SmiLog:
    """`with SmiLog(which) as log: …; log.between(begin, end)`, with times of `time.time()`."""

    def __init__(self, which: Sequence[str]) -> None:
        self._which = list(which)
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="ridgeline-gpu-")
        self._file = Path(self._directory.name) / "log.csv"

    def __enter__(self) -> SmiLog:
        if self._which and shutil.which("nvidia-smi"):
            reason = next((name for name in REASON_FIELDS if query((name,), self._which[:1]) is not None), None)
            if reason is not None:
                with self._file.open("wb") as target:
                    self._process = subprocess.Popen(
                        [*command(("timestamp", *FIELDS, reason), self._which), "-lms", str(PERIOD_MS)],
                        stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.DEVNULL, start_new_session=True,
                    )
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
        return summary(self._file.read_text(errors="replace"), begin, end, len(self._which))


def summary(text: str, begin: float, end: float, devices: int = 1) -> dict[str, Any]:
    """Of lines as nvidia-smi writes them; a line that is not complete yet is left out. Mean power is of all devices."""
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
    power = values["power_w"]
    return {
        "samples": samples,
        **{name: [min(found), max(found)] for name, found in values.items() if found},
        **({"power_mean_w": devices * sum(power) / len(power)} if power else {}),
        "throttle_reasons": [name for name in known if name != "idle"],
    }


def command(names: Sequence[str], which: Sequence[str]) -> list[str]:
    chosen = ["-i", ",".join(which)] if which else []
    return ["nvidia-smi", *chosen, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]


def query(names: Sequence[str], which: Sequence[str]) -> list[str] | None:
    """One line of these values; None where there is no nvidia-smi or it does not know one of the names."""
    if not shutil.which("nvidia-smi"):
        return None
    cells = [cell.strip() for cell in (_run(command(names, which)) or "").strip().split(",")]
    return cells if len(cells) == len(names) and any(cells) else None


def _run(words: list[str]) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout if done.returncode == 0 else None

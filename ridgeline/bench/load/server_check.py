"""Processor time of a measured server on this machine: of its front end, which listens, and of the processes behind it.

A front end is one thread: near a whole core it is what limits the server, whatever the engine could do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ridgeline.bench.lab.peak_memory import PROC, server_processes


class ServerCheck:
    """`with ServerCheck(port) as check: …; check.figures(tokens)`; port None: the server's machine is another."""

    def __init__(self, port: int | None, proc: Path = PROC) -> None:
        self._proc = proc
        self._groups = server_processes(port, proc) if port is not None else (set[int](), set[int]())
        self._spent = [0.0, 0.0]
        self._wall = 0.0

    def __enter__(self) -> ServerCheck:
        self._wall, self._spent = time.perf_counter(), self._seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spent = [after - before for before, after in zip(self._spent, self._seconds(), strict=True)]
        self._wall = time.perf_counter() - self._wall

    def figures(self, tokens: int) -> dict[str, Any]:
        """Shares are of one core; empty where the server's processes cannot be seen."""
        if not self._groups[0]:
            return {}
        front, engine = self._spent
        found = {"front_end_cpu_share": front / self._wall, "engine_cpu_share": engine / self._wall}
        if tokens:
            found |= {"front_end_cpu_us_per_token": 1e6 * front / tokens, "engine_cpu_us_per_token": 1e6 * engine / tokens}
        return found

    def _seconds(self) -> list[float]:
        return [sum(cpu_seconds(pid, self._proc) for pid in group) for group in self._groups]


def line(found: dict[str, Any]) -> str:
    """For people."""
    per_token = found.get("front_end_cpu_us_per_token")
    each = f", {per_token:.1f} µs per token" if per_token is not None else ""
    return (f"server: its front end used {found['front_end_cpu_share']:.0%} of a core{each}; "
            f"the engine's processes {found['engine_cpu_share']:.0%}")


def cpu_seconds(pid: int, proc: Path = PROC) -> float:
    """User and system time so far; 0 of a process that is gone."""
    try:
        cells = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK")

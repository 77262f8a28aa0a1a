"""Checks that the load generator itself is not the bottleneck: how late its event loop was, and its CPU time.

A task that sleeps for 10 ms measures by how much it wakes too late. If that, the lateness of sends or the CPU time is too high,
the figures describe the client and not the server, and the record says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ridgeline.bench.load.latency import Outcome, quantile

PERIOD = 0.01                        # seconds between two looks at the loop
MOST_LAG = 0.010                     # seconds, at P99: a token that waits as long is visibly late
MOST_CPU = 0.85                      # of one core: a loop that is busier has no time to be punctual


class ClientCheck:
    """`async with ClientCheck() as check: …; check.figures(outcomes)`."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._wall = self._cpu = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClientCheck:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        self._wall, self._cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(PERIOD)
            self._lags.append(max(0.0, time.perf_counter() - before - PERIOD))

    def figures(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        lags = sorted(self._lags) or [0.0]
        late = sorted(max(0.0, outcome.due - outcome.intended) for outcome in outcomes) or [0.0]
        found: dict[str, Any] = {
            "loop_lag_ms": {"p50": 1e3 * quantile(lags, 0.5), "p99": 1e3 * quantile(lags, 0.99), "max": 1e3 * lags[-1]},
            "send_lag_ms": {"p50": 1e3 * quantile(late, 0.5), "p99": 1e3 * quantile(late, 0.99), "max": 1e3 * late[-1]},
            "cpu_share": self._cpu / max(self._wall, 1e-9),
        }
        if tokens := sum(outcome.tokens_out for outcome in outcomes):
            found["cpu_us_per_token"] = 1e6 * self._cpu / tokens
        found["reasons"] = reasons(found)
        found["is_bottleneck"] = bool(found["reasons"])
        return found


def reasons(found: dict[str, Any]) -> list[str]:
    """Why the client is the bottleneck; nothing when it is not."""
    said = []
    if found["cpu_share"] > MOST_CPU:
        said.append(f"it used {found['cpu_share']:.0%} of a core (limit {MOST_CPU:.0%})")
    if found["loop_lag_ms"]["p99"] > MOST_LAG * 1e3:
        said.append(f"its loop was {found['loop_lag_ms']['p99']:.1f} ms late at P99 (limit {MOST_LAG * 1e3:.0f} ms)")
    if found["send_lag_ms"]["p99"] > MOST_LAG * 1e3:
        said.append(f"it sent {found['send_lag_ms']['p99']:.1f} ms late at P99 (limit {MOST_LAG * 1e3:.0f} ms)")
    return said


def verdict(found: dict[str, Any]) -> str:
    """One line for people."""
    if found["is_bottleneck"]:
        return f"THE CLIENT WAS THE BOTTLENECK: {'; '.join(found['reasons'])}. Run it on another machine, or ask for less."
    return (
        f"client: not the bottleneck (loop {found['loop_lag_ms']['p99']:.1f} ms late at P99, sending "
        f"{found['send_lag_ms']['p99']:.1f} ms, {found['cpu_share']:.0%} of a core)"
    )

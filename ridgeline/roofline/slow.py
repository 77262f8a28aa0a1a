"""The slowest steps of a run and their causes, which are those that a running engine counts (ridgeline/metrics)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.metrics import Step, slow_cause

SLOWEST = 0.01                       # of the steps


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step, from the end of the one before it, or from when there was work, to its end."""

    at: float                        # when it ended, from the start of the run
    seconds: float
    device: float
    phase: str
    tokens: int
    rows: int
    between: float = 0.0             # before the step began
    collecting: float = 0.0          # garbage collection
    prompt_tokens: int = 0
    preemptions: int = 0
    compiled: int = 0                # kernels
    recorded: int = 0                # CUDA graphs captured
    allocated: int = 0               # allocations from the driver
    lost: float = 0.0                # seconds without a CPU for this process

    @property
    def kept(self) -> float:
        """The share of the time in which this process had a CPU."""
        return 1 - min(0.95, self.lost / self.seconds) if self.seconds else 1.0

    @property
    def host(self) -> float:
        """Seconds in which the device was idle."""
        return max(0.0, self.seconds - self.device)


def cause_of(step: StepTimes, median: float) -> str:
    return slow_cause(Step(
        step.seconds, step.between, step.collecting, step.tokens, step.prompt_tokens, step.preemptions, step.compiled,
        step.recorded, device=step.device, waiting=step.lost, allocated=step.allocated,
    ), median)


def slowest(steps: Sequence[StepTimes]) -> dict[str, Any]:
    """The slowest 1 % of the steps (at least one): their share of the time, and their causes."""
    if not steps:
        return {"count": 0, "share_of_time": 0.0, "median_ms": 0.0, "causes": {}, "steps": []}
    median = statistics.median(step.seconds for step in steps)
    numbered = sorted(enumerate(steps), key=lambda each: -each[1].seconds)[: max(1, math.ceil(SLOWEST * len(steps)))]
    whole = sum(step.seconds for step in steps)
    rows = [
        {
            "step": number, "at_s": step.at, "ms": step.seconds * 1e3, "times_median": step.seconds / median if median else 0.0,
            "phase": step.phase, "tokens": step.tokens, "rows": step.rows, "cause": cause_of(step, median),
        }
        for number, step in numbered
    ]
    return {
        "count": len(rows), "share_of_time": sum(step.seconds for _, step in numbered) / whole if whole else 0.0,
        "median_ms": median * 1e3, "causes": dict(Counter(row["cause"] for row in rows).most_common()), "steps": rows,
    }

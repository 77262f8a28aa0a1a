"""The slowest steps and why: what was measured in a step comes before what is only likely. Numbers only.

The causes of ridgeline/metrics, which a running engine counts, and two that only somebody who watches every step can see:
memory asked of the driver, and a processor that others had.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.metrics import Step, StepWatch

ALLOCATION, PROCESSOR_TAKEN = "allocation", "processor_taken"
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
    collecting: float = 0.0          # garbage
    prompt_tokens: int = 0
    preemptions: int = 0
    compiled: int = 0                # kernels
    recorded: int = 0                # graphs
    allocated: int = 0               # times that the driver was asked for memory
    lost: float = 0.0                # in which no processor was given to this process

    @property
    def kept(self) -> float:
        """The part of its time in which this process had a processor."""
        return 1 - min(0.95, self.lost / self.seconds) if self.seconds else 1.0

    @property
    def host(self) -> float:
        """In which the device had nothing to do."""
        return max(0.0, self.seconds - self.device)


def cause_of(step: StepTimes, median: float) -> str:
    watch = StepWatch()
    watch.median = median
    found = watch.cause(Step(
        step.seconds, step.between, step.collecting, step.tokens, step.prompt_tokens, step.preemptions, step.compiled,
        step.recorded,
    ))
    if found in ("between_steps", "preemption", "prompt_tokens", "unknown"):
        if step.allocated:
            return ALLOCATION
        if step.lost > (step.seconds - median) / 2:
            return PROCESSOR_TAKEN
    return found


def slowest(steps: Sequence[StepTimes], share: float = SLOWEST) -> dict[str, Any]:
    """The slowest hundredth, one step at least: what they take, and their causes."""
    if not steps:
        return {"count": 0, "share_of_time": 0.0, "median_ms": 0.0, "causes": {}, "steps": []}
    median = statistics.median(step.seconds for step in steps)
    numbered = sorted(enumerate(steps), key=lambda each: -each[1].seconds)[: max(1, math.ceil(share * len(steps)))]
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

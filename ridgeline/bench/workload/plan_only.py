"""An executor that answers every plan at once, to run the scheduler without a model: for `bench host` and what-if."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from ridgeline.messages import StepPlan, StepResult, Want


class PlanOnly:
    """An executor that answers every plan at once, with arbitrary tokens."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        for row in plan.removed.tolist():
            self._lengths.pop(row, None)
        for added in plan.added:
            self._lengths[added.row] = added.num_computed
        self._plans.append(plan)

    def sample(self, masks: Any = None) -> None:
        """Does nothing: tokens are arbitrary."""

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        lengths = []
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            self._lengths[row] = self._lengths.get(row, 0) + count
            lengths.append(self._lengths[row])
        samples = (plan.want & np.int8(Want.TOKEN)) != 0
        return StepResult(
            plan.step, np.zeros((len(plan.rows), 1), np.int32), samples.astype(np.int32), np.array(lengths, np.int32),
            useful=plan.total_tokens - plan.recomputed, recomputed=plan.recomputed,
        )

    def prepare(self) -> bool:
        return False

    def start_over(self) -> bool:
        return False                                     # nothing here runs out of memory

    def close(self) -> None:
        """Nothing to close."""

"""What the replay tests save of a run: each step as a runner receives it, and the live rows at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.messages import RowAdded, StepPlan
from ridgeline.scheduler.running import row_added
from ridgeline.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class RecordedStep:
    """Everything a runner receives in one step. Saved and replayed on another runner, it gives the same tokens again."""

    plan: StepPlan
    masks: np.ndarray | None = None  # int32 [rows that sample, words]: what grammars allowed; None in a step without any


@dataclass(slots=True)
class Snapshot:
    """The live rows while no step is in flight: enough to recompute them on a fresh runner, which has no KV.

    Each row's `num_computed` says how far it had come. The runner is given the row with 0 there, computes that many
    tokens, and can then obey the plans that followed. Tables hold null behind a window: to recompute a row from its start
    these entries need blocks, any that no row has; later plans never touch them again. What the prefix cache alone still
    held is not here: plans with a hit on it can be replayed only from the first plan on.
    """

    step: int                        # the last plan before it
    rows: list[RowAdded]


def snapshot_of(scheduler: Scheduler) -> Snapshot:
    assert not scheduler._flights, "values in flight are the device's"
    table = scheduler._running.rows
    return Snapshot(scheduler._step, [row_added(sequence, int(table.computed[sequence.row])) for sequence in table.running()])

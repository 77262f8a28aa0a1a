"""The scheduler's records: its limits, its counters, and what it remembers of the plans it made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ridgeline.messages import BlockOp, RowAdded
from ridgeline.scheduler.sequence import Sequence


@dataclass(slots=True)
class SchedulerLimits:
    max_rows: int                    # sequences that run at once
    max_step_tokens: int             # token budget of a step
    max_model_len: int
    chunked_prefill: bool = True
    max_waiting_steps: int = 10_000  # after that many steps a waiting request goes ahead of every priority
    enough_rows: int | None = None   # batch size beyond which a row gets no cheaper; None: unknown


@dataclass(slots=True)
class SchedulerCounters:
    steps: int = 0
    computed_tokens: int = 0         # planned; the next five are what steps reported, once they were taken in
    useful_tokens: int = 0
    wasted_tokens: int = 0           # computed twice because of preemptions
    padded_tokens: int = 0           # computed to fill up a captured shape
    rejected_tokens: int = 0         # computed in vain, as drafts
    prompt_tokens: int = 0           # of rows that computed more than one
    chunks: int = 0                  # partial prefills
    joins: int = 0                   # sequences admitted in the place of one that had left, while others were running
    preemptions: int = 0
    out_of_memory: int = 0           # steps that did not fit into memory, and were forgotten
    late_tokens: int = 0             # sampled after a stop, dropped
    finished: int = 0
    held_slots: int = 0              # KV slots held, and of these the ones in use, summed over steps: paging's waste
    used_slots: int = 0


@dataclass(slots=True)
class InFlight:
    """What update() needs to remember of a plan."""

    step: int
    rows: np.ndarray
    ends: np.ndarray                 # computed tokens of each row once the step is done
    sampled: np.ndarray              # bool: the row samples
    sequences: list[Sequence]
    num_decodes: int                 # rows that compute one token …
    num_prompt_tokens: int           # … and what the others compute together
    num_pairs: int                   # (query, key) pairs of those
    constrained: list[tuple[int, Sequence]]              # (which of the rows that sample, its sequence) with a grammar


@dataclass(slots=True)
class Steady:
    """What a plan in which every row decodes has in common with the next, as long as the same rows run."""

    rows: np.ndarray                 # as Rows.ranked() has them
    plan_rows: np.ndarray            # the plan's rows, tokens and Want flags
    num_tokens: np.ndarray
    want: np.ndarray
    sequences: list[Sequence]
    constrained: list[tuple[int, Sequence]]


@dataclass(slots=True)
class Delta:
    """How the device's rows change with the next plan."""

    removed: list[int] = field(default_factory=list)
    added: list[RowAdded] = field(default_factory=list)
    appended: list[tuple[int, int, int, int]] = field(default_factory=list)
    block_ops: list[BlockOp] = field(default_factory=list)

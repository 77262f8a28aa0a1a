"""Maps the parts of a step in a trace to the cost model's ops: their FLOPs, bytes and floors, as arrays over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.messages import StepPlan, StepResult, Want
from ridgeline.roofline.facts import PartFacts
from ridgeline.roofline.step_cost import OPS
from ridgeline.roofline.trace import COSTS_OF, Work
from ridgeline.roofline.vectorised import ManyCosts, StepCosts

_EVERY_HIDDEN = np.int8(Want.PROMPT_LOGPROBS | Want.HIDDEN | Want.HIDDEN_SUM)
PARTS = tuple(COSTS_OF)
COLUMNS = {part: [OPS.index(name) for name in names] for part, names in COSTS_OF.items()}        # of the cost model's ops


@dataclass(slots=True)
class StepRows:
    """The rows of steps as the cost model needs them: arrays over all rows of all steps."""

    counts: list[int] = field(default_factory=list)      # rows of each step
    new: list[np.ndarray] = field(default_factory=list)
    wants: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)

    def add(self, plan: StepPlan, result: StepResult) -> None:
        self.counts.append(len(plan.rows))
        self.new.append(plan.num_tokens)
        self.wants.append(plan.want)
        self.lengths.append(result.lengths)
        self.shared.append(result.shared)
        self.experts.append(result.experts)

    def costs(self, model: StepCosts) -> ManyCosts:
        counts = np.array(self.counts)
        wants = np.concatenate(self.wants)
        starts = np.cumsum(counts) - counts
        return model.of(
            counts, np.concatenate(self.new), np.concatenate(self.lengths).astype(np.int32),
            wants & np.int8(Want.TOKEN), np.array(self.shared),
            every_hidden=np.bitwise_or.reduceat(wants, starts) & _EVERY_HIDDEN != 0, experts=np.array(self.experts),
        )


def floors(
    costs: ManyCosts, read_bytes_s: float, flops_s: float | np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By part and step, seconds at the roof: of memory-bound ops, and of compute-bound ones. `flops_s`: of all ops, or by op."""
    computing, reading = costs["flops"] / flops_s, costs.bytes / read_bytes_s
    computes = computing > reading
    on_compute, on_reading = np.where(computes, computing, 0.0), np.where(computes, 0.0, reading)
    return {part: (on_reading[:, columns].sum(1), on_compute[:, columns].sum(1)) for part, columns in COLUMNS.items()}


def part_costs(
    costs: ManyCosts, read_bytes_s: float, flops_s: float | np.ndarray, seen: Mapping[str, np.ndarray] | None = None
) -> dict[str, PartFacts]:
    """By part, the sums over all these steps, without times, which a trace gives. `seen`: by part, the steps in which it has
    kernels of its own; a part fused into another part's kernel moves nothing itself."""
    found = {}
    roofs = floors(costs, read_bytes_s, flops_s)
    for part, columns in COLUMNS.items():
        counted = np.ones(len(costs.tokens), bool) if seen is None else seen[part]
        reads, computes = (float(values[counted].sum()) for values in roofs[part])
        found[part] = PartFacts(
            0.0, int(costs["calls"][counted][:, columns].sum()), reads + computes,
            float(costs["flops"][counted][:, columns].sum()), float(costs.bytes[counted][:, columns].sum()), computes,
        )
    return found


def steps_with(work: Sequence[Work], steps: int) -> dict[str, np.ndarray]:
    """By part, the steps in which a trace has kernels of it."""
    found = {part: np.zeros(steps, bool) for part in PARTS}
    for each in work:
        if each.part in found and 0 <= each.step < steps:
            found[each.part][each.step] = True
    return found

"""Which format each linear gets under a budget: the fewest bytes whose predicted cost fits. No torch.

Costs of linears add up (a first-order picture, corrected by what the card measures). So this is a knapsack, solved exactly on a
grid of costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def steps_of(units: int) -> int:
    """Of the budget. Each unit may lose one, so many units need more of them."""
    return max(2000, 150 * units)


def allocate(sizes: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float) -> list[int] | None:
    """For every unit the number of its option: least sum of sizes with a sum of costs within the budget. None: nothing fits.

    Costs are rounded up to a step of the budget, so the result never exceeds it.
    """
    last = steps_of(len(sizes))
    best = np.zeros(last + 1)                            # bytes of the units so far, by the steps that they may cost
    choices = []
    for unit_sizes, unit_costs in zip(sizes, costs, strict=True):
        steps = [_steps(cost, budget, last) for cost in unit_costs]
        found, chosen = np.full(last + 1, np.inf), np.zeros(last + 1, dtype=np.int64)
        # Of two with the same size, the one that costs less.
        for option in sorted(range(len(steps)), key=unit_costs.__getitem__):
            step = steps[option]
            if step > last:
                continue
            tried = np.full(last + 1, np.inf)
            tried[step:] = best[: last + 1 - step] + unit_sizes[option]
            better = tried < found
            found[better], chosen[better] = tried[better], option
        best = found
        choices.append((chosen, steps))
    if not np.isfinite(best[last]):
        return None
    left, picked = last, []
    for chosen, steps in reversed(choices):
        picked.append(int(chosen[left]))
        left -= steps[picked[-1]]
    return picked[::-1]


def _steps(cost: float, budget: float, last: int) -> int:
    if cost <= 0:
        return 0
    return last + 1 if budget <= 0 else int(min(np.ceil(cost / budget * last - 1e-9), last + 1))

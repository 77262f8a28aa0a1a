"""Steps that repeat: what native code plans and takes in for all rows equals what the scheduler's own code does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from host_simulation import SETUPS, Simulation, run_random

from ridgeline.messages import StepPlan, StepResult
from ridgeline.ops.cpu import native
from ridgeline.scheduler.decodes import Decodes
from ridgeline.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C compiler")
CASES = [(name, depth, alpha) for name in SETUPS for depth in range(3) for alpha in (None, 0.5, 0.9)]
Plans = list[tuple[object, ...]]


def written(plan: StepPlan) -> tuple[object, ...]:
    arrays = (plan.rows, plan.num_tokens, plan.want, plan.removed, plan.appended, plan.width, plan.drafts, plan.drafts_from)
    listed = [None if each is None else (each.dtype, each.tolist()) for each in arrays]
    return plan.step, *listed, [added.row for added in plan.added], plan.recomputed


def traffic(monkeypatch: pytest.MonkeyPatch, is_native: bool, place: int, seed: int = 0) -> tuple[Simulation, Plans, set[str]]:
    """A run of random requests, its plans, and what native code did in it."""
    name, depth, alpha = CASES[place]
    plans: list[StepPlan] = []
    called: set[str] = set()
    for function in ("again", "lay_drafts", "book", "take_in"):
        def noted(self: Decodes, *args: object, _own: object = getattr(Decodes, function), _name: str = function) -> object:
            found = _own(self, *args)                                    # type: ignore[operator]
            called.update({_name} if found is not None else ())
            return found

        monkeypatch.setattr(Decodes, function, noted)

    def planned(self: Scheduler, _own: object = Scheduler.schedule) -> StepPlan:
        plans.append(plan := _own(self))                                 # type: ignore[operator]
        return plan                                                      # type: ignore[no-any-return]

    monkeypatch.setattr(Scheduler, "schedule", planned)
    simulation = run_random(replace(SETUPS[name], depth=depth, alpha=alpha, native=is_native), seed=seed or place)
    monkeypatch.undo()
    return simulation, [written(plan) for plan in plans], called


@pytest.mark.parametrize("place", [
    pytest.param(place, marks=() if place % 13 == 0 else pytest.mark.slow) for place in range(len(CASES))
])
def test_plans_and_answers_are_the_same(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a short run of drafted answers no step may repeat: then there is another run."""
    done: set[str] = set()
    for seed in range(place, place + 4 * len(CASES), len(CASES)):
        if not {"again", "book"} <= done:
            done |= same_natively(monkeypatch, place, seed)
    assert {"again", "book"} <= done


def same_natively(monkeypatch: pytest.MonkeyPatch, place: int, seed: int) -> set[str]:
    own, own_plans, nothing = traffic(monkeypatch, False, place, seed)
    fast, plans, called = traffic(monkeypatch, True, place, seed)
    assert not nothing and plans == own_plans
    assert fast.answers == own.answers and fast.ends == own.ends and repr(fast.deltas) == repr(own.deltas)
    assert fast.scheduler.counters == own.scheduler.counters
    ours, theirs = fast.scheduler._running.rows, own.scheduler._running.rows
    for name in ("known", "computed", "num_blocks", "committed", "stay", "num_held", "num_used"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    return called


def test_drafts_are_planned_and_taken_in_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    place = next(place for place, (_, depth, alpha) in enumerate(CASES) if depth == 1 and alpha == 0.9)
    assert traffic(monkeypatch, True, place)[2] == {"again", "lay_drafts", "book", "take_in"}


@pytest.mark.parametrize("wrong", ["one token more", "a length", "no token"])
def test_a_result_that_was_not_planned_is_refused(wrong: str) -> None:
    name = next(iter(SETUPS))
    simulation = Simulation(replace(SETUPS[name], native=True))
    simulation.ask("a", [1, 2, 5], 9, ignore_eos=True)
    for _ in range(3):
        simulation.step()
    plan = simulation.scheduler.schedule()
    assert plan.total_tokens == 1
    ends = simulation.scheduler._running.rows.computed[plan.rows].astype(np.int32)
    tokens, counts = np.array([[7, 7]], np.int32), np.ones(1, np.int32)
    counts += {"one token more": 1, "a length": 0, "no token": -1}[wrong]
    known = simulation.scheduler._running.rows.known.copy()
    with pytest.raises(AssertionError, match="something else than was planned"):
        simulation.scheduler.update(StepResult(plan.step, tokens, counts, ends + (wrong == "a length")))
    np.testing.assert_array_equal(simulation.scheduler._running.rows.known, known)

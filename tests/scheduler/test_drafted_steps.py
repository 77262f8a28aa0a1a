"""Steps with drafts: bounds while they are in flight, corrections when results arrive, and nothing of a rejected draft is left.

Random traffic runs through the simulation, which checks every slot, block, reference and answer (host_simulation.py). Answers
must be those without drafts, whatever the drafter says.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from dial_drafter import DialDrafter
from fake_runner import following
from host_simulation import SETUPS, VOCAB, Setup, Simulation, run_random
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.messages import StepResult, TokenDeltas
from ridgeline.scheduler.bookkeeping import DraftPlan
from ridgeline.scheduler.draft_slots import waits_for_tokens
from ridgeline.scheduler.drafting import DecodingRows, Drafter, Drafts
from ridgeline.scheduler.sequence import Sequence

ROOMY = Setup(num_blocks=60, max_step_tokens=40)


def dial(simulation: Simulation) -> DialDrafter:
    drafter = simulation.scheduler.drafter
    assert isinstance(drafter, DialDrafter)
    return drafter


def with_drafts(setup: Setup, width: int, alpha: float = 1.0) -> Simulation:
    """Every row gets this many drafts, as often as it may."""
    simulation = Simulation(setup)
    simulation.scheduler.drafter = DialDrafter(
        lambda sequence, count: following(sequence.tokens.tolist(), count), VOCAB, alpha, width=width
    )
    return simulation


@pytest.mark.parametrize(("name", "depth"), [
    # Every setup on every commit, with and without a step in flight by turns; all depths in the slow tests.
    pytest.param(name, depth, marks=() if place % 2 == depth else pytest.mark.slow)
    for place, name in enumerate(SETUPS) for depth in range(3)
])
def test_random_traffic_with_drafts(name: str, depth: int) -> None:
    accepted = 0
    for seed, alpha in enumerate((0.5, 0.9)):
        simulation = run_random(replace(SETUPS[name], depth=depth, alpha=alpha), seed)
        assert dial(simulation).planned or SETUPS[name].max_step_tokens < 4
        accepted += dial(simulation).accepted
    assert accepted or SETUPS[name].max_step_tokens < 4


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**16), name=st.sampled_from(sorted(SETUPS)), depth=st.integers(0, 1), alpha=st.floats(0, 1),
)
def test_any_acceptance(seed: int, name: str, depth: int, alpha: float) -> None:
    run_random(replace(SETUPS[name], depth=depth, alpha=alpha), seed, num_requests=6)


def test_accepted_drafts_save_steps() -> None:
    plain, fast = Simulation(ROOMY), with_drafts(ROOMY, 4)
    for simulation in (plain, fast):
        simulation.ask("a", [1, 2, 3], 20, ignore_eos=True)
        simulation.drain()
    assert plain.answers == fast.answers
    assert plain.steps == 20 and fast.steps == 1 + 4     # a prompt, then five tokens a step; the last has four
    assert fast.scheduler.counters.rejected_tokens == 0 and dial(fast).accepted == 15


def test_rejected_drafts_are_counted() -> None:
    simulation = with_drafts(ROOMY, 3, alpha=0.0)
    simulation.ask("a", [1, 2, 3], 6, ignore_eos=True)
    simulation.drain()
    counters = simulation.scheduler.counters
    assert dial(simulation).accepted == 0 and counters.rejected_tokens == dial(simulation).proposed == 3 + 3 + 2 + 1
    assert counters.useful_tokens == 3 + 5


def test_rows_with_and_without_drafts_take_turns_and_nothing_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with drafts come last in a plan. The next plan begins with what was written down of the rows in their own order."""
    plain, mixed = Simulation(ROOMY), with_drafts(ROOMY, 3)
    ask = dial(mixed).plan

    def some(rows: DecodingRows) -> Drafts | None:
        rows.most[mixed.steps % 3 :: 3] = 0
        return ask(rows)

    monkeypatch.setattr(dial(mixed), "plan", some)
    write, written = mixed.scheduler._write, list[int]()
    monkeypatch.setattr(mixed.scheduler, "_write", lambda rows, *rest: (written.append(len(rows)), write(rows, *rest))[1])
    for simulation in (plain, mixed):
        for name in "abcd":
            simulation.ask(name, [ord(name) % 7, 2, 3], 24, ignore_eos=True)
    for _ in range(3):
        mixed.step()
    before = len(written)
    orders = {tuple(mixed.step().rows.tolist()) for _ in range(4)}
    assert len(orders) > 1 and len(written) == before
    for simulation in (plain, mixed):
        simulation.drain()
    assert plain.answers == mixed.answers


class Watched(array):                # type: ignore[type-arg]
    """Tokens that know how long the parts were that were copied of them."""

    longest = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice):
            Watched.longest = max(Watched.longest, len(found))
        return found


def test_a_block_that_drafts_fill_costs_no_copy_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an answer of n tokens would cost n² / block_size copies. Also where tokens come with more than themselves."""
    simulation = with_drafts(ROOMY, 4)
    simulation.ask("a", [1, 2, 3, 4] * 8, 40, ignore_eos=True)
    simulation.ask("b", [5, 6, 7, 8] * 8, 40, ignore_eos=True, logprobs=1)
    simulation.step()
    monkeypatch.setattr(Watched, "longest", 0)
    for name in "ab":
        (sequence,) = simulation.scheduler.answers.live.of(name)
        sequence.tokens = Watched("i", sequence.tokens)
    simulation.drain()
    assert 0 < Watched.longest <= ROOMY.block_size


def test_masks_of_a_step_are_asked_for_anew_only_if_its_answers_have_changed() -> None:
    def answer(tokens: list[int]) -> Any:
        return SimpleNamespace(tokens=array("i", tokens), matcher=object(), finished=False, stop_ids=frozenset([9]))

    first, second = answer([1, 2]), answer([3])
    # The first has one token in flight when the drafts are made. The second may end at its second draft.
    plan = DraftPlan(np.array([1, 3], np.int32), np.array([[5, 6, -1], [7, 9, 8]], np.int32), np.array([1, 1], np.int32), 6)
    flight = cast(Any, SimpleNamespace(sampled=np.ones(2, bool), constrained=[(0, first), (1, second)]))
    found = plan.constrained(flight)
    assert found.matchers == [(0, first.matcher), (2, second.matcher)] and found.guesses == {0: [6], 2: [7]}
    assert plan.constrained(flight) is found
    second.finished = True
    assert plan.constrained(flight).matchers == found.matchers[:1] and plan.constrained(flight).guesses == {0: [6]}
    first.tokens.append(6)
    assert plan.constrained(flight).guesses == {0: []}


@pytest.mark.parametrize(("rows", "decodes", "grammars", "waits"), [
    (1, 1, 1, True), (2, 2, 2, True), (2, 2, 1, False), (3, 3, 3, False), (2, 1, 2, True), (60, 0, 1, False), (60, 2, 2, False),
])
def test_only_few_rows_wait_for_grammars(rows: int, decodes: int, grammars: int, waits: bool) -> None:
    """Rows with prompts count: a wave of prompts does not wait for the first token of one among them."""
    constrained = [(place, None) for place in range(grammars)]
    newest: Any = SimpleNamespace(rows=np.arange(rows), num_decodes=decodes, constrained=constrained, drafts=None)
    patient, hasty = (cast(Drafter, SimpleNamespace(waits=each)) for each in (True, False))
    assert waits_for_tokens(patient, deque([newest])) == waits
    assert not waits_for_tokens(hasty, deque([newest]))
    newest.drafts = SimpleNamespace(goes_on=False)       # its rows may be shorter, and the next token depends on them
    assert waits_for_tokens(hasty, deque([newest]))


def test_only_typical_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that captures a graph, or that has none yet, says nothing of later ones."""
    simulation, timed = with_drafts(ROOMY, 2), list[int]()
    update = simulation.scheduler.update

    def every_other(result: StepResult) -> TokenDeltas:
        result.typical = result.step % 2 == 0
        return update(result)

    monkeypatch.setattr(simulation.scheduler, "update", every_other)
    monkeypatch.setattr(dial(simulation), "timed", lambda tokens, *rest: timed.append(tokens))
    simulation.ask("a", [1, 2, 3], 20, ignore_eos=True)
    simulation.drain()
    assert len(timed) == simulation.steps // 2 and set(timed) <= {1, 2, 3}


@pytest.mark.parametrize(("device", "wall", "counted"), [(0.001, 0.004, 0.0035), (0.005, 0.004, 0.0045), (0.0, 0.004, -0.0005)])
def test_host_time_that_a_step_does_not_hide_counts(
    monkeypatch: pytest.MonkeyPatch, device: float, wall: float, counted: float
) -> None:
    """32 rows of a 1.5B model took 1.7 ms a step without drafts, and the host 3 ms with them. A draft model's time is apart."""
    simulation, timed = with_drafts(ROOMY, 2), list[float]()
    update = simulation.scheduler.update

    def measured(result: StepResult) -> TokenDeltas:
        result.device_seconds, result.wall_seconds, result.draft_seconds = device, wall, 0.0005
        return update(result)

    monkeypatch.setattr(simulation.scheduler, "update", measured)
    monkeypatch.setattr(dial(simulation), "timed", lambda *given: timed.append(given[4]))
    simulation.ask("a", [1, 2, 3], 8, ignore_eos=True)
    simulation.drain()
    assert timed and timed == pytest.approx([counted] * len(timed))


def test_a_stop_inside_an_accepted_run() -> None:
    """What follows the stop is dropped, and counted as late."""
    answer = following([5, 6, 7], 12)
    stop = answer[3]
    simulation = with_drafts(ROOMY, 6)
    simulation.ask("a", [5, 6, 7], 12, ignore_eos=True, stop_token_ids=[stop], logprobs=1)
    simulation.drain()
    assert simulation.answers["a", 0] == answer[: answer.index(stop) + 1] and simulation.ends["a", 0] == "stop"
    assert simulation.scheduler.counters.late_tokens > 0
    for delta in simulation.deltas:                      # a log-probability for each token that is said, and for no other
        assert [each.token_ids.tolist() for each in delta.logprobs] == [[token] for token in delta.token_ids]


def test_the_limit_is_met_exactly() -> None:
    simulation = with_drafts(replace(ROOMY, depth=1), MOST_DRAFTS)
    simulation.ask("a", [5, 6, 7], 9, ignore_eos=True)
    simulation.drain()
    assert len(simulation.answers["a", 0]) == 9 and simulation.ends["a", 0] == "length"
    assert simulation.scheduler.counters.late_tokens == 0


def test_drafts_do_not_hold_up_prompts() -> None:
    """They take what is left of the token budget."""
    simulation = with_drafts(replace(ROOMY, max_step_tokens=10), 5)
    simulation.ask("a", [1, 2, 3], 20, ignore_eos=True)
    simulation.step()
    simulation.ask("b", list(range(30)), 3, ignore_eos=True)
    plan = simulation.step()
    assert plan.width is None and sorted(plan.num_tokens.tolist()) == [1, 9]
    simulation.drain()


def test_a_drafter_is_told_of_prompts_beside_its_rows() -> None:
    told: list[tuple[int, int]] = []

    class Told(DialDrafter):
        def plan(self, rows: DecodingRows) -> Drafts | None:
            told.append((rows.num_prompts, rows.num_tokens))
            return super().plan(rows)

    simulation = Simulation(ROOMY)
    simulation.scheduler.drafter = Told(lambda sequence, count: following(sequence.tokens.tolist(), count), VOCAB, 1.0, width=2)
    simulation.ask("a", [1, 2, 3], 20, ignore_eos=True)
    simulation.step()
    simulation.ask("b", [4, 5, 6, 7], 9, ignore_eos=True)
    simulation.ask("c", [7, 8, 9], 9, ignore_eos=True)
    for _ in range(2):
        simulation.step()
    assert told == [(2, 8), (0, 3)]
    simulation.drain()


def test_plans_put_rows_of_a_kind_together() -> None:
    simulation = with_drafts(ROOMY, 2)
    simulation.ask("a", [1, 2, 3], 2, ignore_eos=True)   # one token is left after its prompt: no room for a draft
    simulation.ask("b", [4, 5], 20, ignore_eos=True)
    simulation.step()
    simulation.ask("c", [7, 8, 9], 5, ignore_eos=True)
    plan = simulation.step()
    assert plan.num_tokens.tolist() == [1, 3, 3] and plan.width is not None and plan.width.tolist() == [0, 2, 0]
    simulation.drain()


def test_an_inactive_drafter_costs_nothing() -> None:
    """Plans are the very same objects again, as they are without a drafter."""

    class Asleep(DialDrafter):
        active = False

    simulation = Simulation(ROOMY)
    simulation.scheduler.drafter = Asleep(lambda *_: [], VOCAB, 1.0)
    simulation.ask("a", [1, 2, 3], 9, ignore_eos=True)
    plans = [simulation.step() for _ in range(5)]
    assert plans[2].rows is plans[3].rows is plans[4].rows and plans[4].width is None and plans[4].drafts is None
    assert simulation.scheduler._flights == type(simulation.scheduler._flights)()


def test_a_drafter_that_rests_is_asked_for_nothing() -> None:
    class Rests(DialDrafter):
        will_look = False

        def awake(self) -> bool:
            return False

        def slept(self, rows: int) -> bool:
            told.append(rows)
            return True

    told: list[int] = []
    simulation = Simulation(ROOMY)
    simulation.scheduler.drafter = rests = Rests(lambda *_: [], VOCAB, 1.0)
    rests.timed = None                                   # type: ignore[assignment, method-assign]
    for name in "ab":
        simulation.ask(name, [1, 2, 3, ord(name)], 9, ignore_eos=True)
    plans = [simulation.step() for _ in range(5)]
    assert plans[3].rows is plans[4].rows and set(told) == {2}
    assert simulation.scheduler._steady is not None and simulation.scheduler._steady.most_drafts is None
    simulation.drain()


def test_drafts_preempt_no_sequence() -> None:
    """Two rows fill the pool: drafts shrink to the blocks that are there."""
    simulation = with_drafts(Setup(num_blocks=13, max_model_len=48, max_step_tokens=40), 6, alpha=0.0)
    for name in "ab":
        simulation.ask(name, [1, 2, 3, ord(name)], 20, ignore_eos=True)
    simulation.drain()
    assert simulation.scheduler.counters.preemptions <= 1        # as without drafts: both need 2 × 6 blocks


def test_a_drafter_that_overspends_is_an_error() -> None:
    class Greedy(DialDrafter):
        def plan(self, rows: DecodingRows) -> Drafts | None:
            return Drafts(np.asarray(rows.most + 1, np.int32), None)

    simulation = Simulation(ROOMY)
    simulation.scheduler.drafter = Greedy(lambda *_: [], VOCAB, 1.0)
    simulation.ask("a", [1, 2, 3], 9)
    simulation.step()
    with pytest.raises(AssertionError, match="more drafts than it may"):
        simulation.step()


@pytest.mark.parametrize(("field", "by"), [("num_new", 9), ("num_new", -9), ("lengths", 1)])
def test_a_result_that_does_not_fit_its_drafts_is_an_error(field: str, by: int) -> None:
    simulation = with_drafts(ROOMY, 2)
    simulation.ask("a", [1, 2, 3], 9, ignore_eos=True)
    simulation.step()
    simulation.runner.submit(simulation.scheduler.schedule())
    simulation.runner.sample()
    result = simulation.runner.collect()
    setattr(result, field, getattr(result, field) + by)
    with pytest.raises(AssertionError, match="something else than was planned"):
        simulation.scheduler.update(result)


def test_a_result_with_more_than_was_planned_is_an_error() -> None:
    simulation = with_drafts(ROOMY, 2)
    simulation.ask("a", [1, 2, 3], 9, ignore_eos=True)
    simulation.step()
    simulation.runner.submit(simulation.scheduler.schedule())
    simulation.runner.sample()
    result = simulation.runner.collect()
    result.num_new, result.lengths = result.num_new + 1, result.lengths + 1
    with pytest.raises(AssertionError, match="something else than was planned"):
        simulation.scheduler.update(result)


def test_a_preempted_sequence_waits_for_its_drafts() -> None:
    """Its tokens in flight count when they arrive, and what it lost is no more than it had."""
    simulation = with_drafts(replace(ROOMY, depth=1), 4, alpha=0.6)
    simulation.ask("a", [1, 2, 3], 20, ignore_eos=True)
    for _ in range(3):
        simulation.step()
    scheduler = simulation.scheduler
    (sequence,) = scheduler._running.rows.running()
    scheduler._preempt(sequence)
    simulation.drain()
    assert scheduler.counters.preemptions == 1
    assert scheduler.counters.wasted_tokens <= len(sequence.tokens)


def test_the_drafter_learns_how_answers_end() -> None:
    simulation = with_drafts(ROOMY, 2)
    simulation.ask("a", [1, 2, 3], 5, ignore_eos=True)
    simulation.ask("b", [1, 2, 4], 5, ignore_eos=True)
    simulation.step()
    simulation.abort("b")
    simulation.drain()
    assert len(dial(simulation).ended_with) == 2 and [1, 2, 3, *simulation.answers["a", 0]] in dial(simulation).ended_with


def test_pooled_requests_have_no_drafts() -> None:
    request = Simulation(ROOMY)
    request.ask("a", [1, 2, 3], 1, pooling="mean")
    (sequence,) = request.scheduler.answers.live.of("a")
    assert isinstance(sequence, Sequence) and sequence.most_drafts == 0

"""Prompts share a step: the rule itself, what it promises to each request, and how long a short one waits beside a long one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fake_runner import FakeRunner
from host_simulation import SETUPS, VOCAB, Setup, Simulation, run_random
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.messages import StepPlan, StepResult, Want
from ridgeline.scheduler.fairness import Prompt, first_cut, share
from ridgeline.scheduler.step_time import FEWEST, MeasuredStepTime, NoTimeModel, StepTimeModel

ROOMY = Setup(num_blocks=400, max_rows=64, max_step_tokens=16, max_model_len=200, eos=frozenset())


def prompt(length: int, start: int = 0) -> list[int]:
    """Different starts have no token in common at the same place."""
    return [(start * 7 + place) % VOCAB for place in range(length)]


class Noted(Simulation):
    """Remembers which request a step computed for."""

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        self.last = self.scheduler._flights[-1].sequences if len(plan.rows) else []

    def tokens(self) -> dict[str, int]:
        plan = self.step()
        return {each.request.request_id: tokens for each, tokens in zip(self.last, plan.num_tokens.tolist(), strict=True)}


# -- the rule ----------------------------------------------------------------------------------------------------------


def prompts_of(*rests: int) -> list[Prompt]:
    return [Prompt(0, order, rest) for order, rest in enumerate(rests)]


@pytest.mark.parametrize(("rests", "budget", "expected"), [
    ((300, 8000, 7000, 10, 500), 2000, [300, 1190, 0, 10, 500]),         # the module's own picture
    ((8000, 10), 2000, [1990, 10]),
    ((10, 8000), 2000, [10, 1990]),
    ((8000, 4001), 2000, [2000, 0]),                                     # not short enough to alternate with
    ((8000, 4000), 2000, [1000, 1000]),
    ((8000, 900, 300, 300), 1000, [500, 0, 300, 200]),                   # the shortest first, equals by rank
    ((700, 300), 2000, [700, 300]),                                      # enough for all
    ((5, 1), 1, [1, 0]),                                                 # nothing to lend
])
def test_who_computes_how_much(rests: tuple[int, ...], budget: int, expected: list[int]) -> None:
    assert share(prompts_of(*rests), budget) == expected


def test_a_less_important_prompt_overtakes_nothing() -> None:
    assert share([Prompt(0, 1, 8000), Prompt(1, 0, 10)], 2000) == [2000, 0]


lengths = st.integers(1, 400)


@given(st.lists(st.tuples(st.integers(0, 2), lengths), min_size=1, max_size=12), st.integers(1, 600))
def test_the_rule_for_any_prompts(drawn: list[tuple[int, int]], budget: int) -> None:
    prompts = sorted(Prompt(priority, order, rest) for order, (priority, rest) in enumerate(drawn))
    given_tokens = share(prompts, budget)
    total = sum(each.rest for each in prompts)
    assert all(0 <= tokens <= each.rest for tokens, each in zip(given_tokens, prompts, strict=True))
    assert sum(given_tokens) == min(budget, total), "nothing is left over while a prompt wants it, and nothing overspent"
    place = first_cut(prompts, budget)
    if place is None:
        return
    before = sum(each.rest for each in prompts[:place])
    assert given_tokens[:place] == [each.rest for each in prompts[:place]], "all that fit before it are finished"
    assert given_tokens[place] >= (budget - before) / 2, "the one that is cut keeps half"
    for each, tokens in list(zip(prompts, given_tokens, strict=True))[place + 1 :]:
        assert not tokens or (each.priority == prompts[place].priority and 2 * each.rest <= prompts[place].rest)


@given(st.integers(1, 20), lengths, st.integers(1, 600), st.integers(0, 399))
def test_prompts_of_one_length_are_computed_in_order(count: int, length: int, budget: int, done: int) -> None:
    """Also when the first of them has begun."""
    rests = [max(1, length - done)] + [length] * (count - 1)
    in_order, left = [], budget
    for rest in rests:
        in_order.append(min(rest, left))
        left -= in_order[-1]
    assert share(prompts_of(*rests), budget) == in_order


# -- what it promises to requests --------------------------------------------------------------------------------------


def test_a_short_prompt_joins_beside_a_running_long_one() -> None:
    simulation = Noted(ROOMY)
    simulation.ask("long", prompt(160), 2)
    assert simulation.tokens() == {"long": 16}
    simulation.ask("short", prompt(3, 1), 2)
    assert simulation.tokens() == {"short": 3, "long": 13}
    assert simulation.tokens() == {"short": 1, "long": 15}
    simulation.drain()


def test_many_long_prompts_keep_no_short_one_out() -> None:
    simulation = Noted(ROOMY)
    for number in range(6):
        simulation.ask(f"long{number}", prompt(120, number), 2)
    simulation.step()
    simulation.ask("short", prompt(3, 9), 1)
    assert simulation.tokens() == {"short": 3, "long0": 13}
    simulation.drain()


def test_a_stream_of_short_prompts_makes_a_long_one_twice_as_long_at_most() -> None:
    simulation = Noted(replace(ROOMY, prefix_caching=False))
    simulation.ask("long", prompt(160), 1)
    while ("long", 0) in simulation.open:
        for number in range(4):
            simulation.ask(f"{simulation.steps}-{number}", prompt(6, simulation.steps + number), 1)
        assert simulation.tokens().get("long", 0) >= 8
    assert simulation.scheduler.counters.steps <= 20
    assert len(simulation.answers) - 1 > len(simulation.open) > 0, "some of them were served meanwhile, and more was asked for"
    simulation.drain()


def test_an_embedding_is_a_prompt_like_any_other() -> None:
    simulation = Noted(ROOMY)
    simulation.ask("long", prompt(160), 2)
    simulation.step()
    simulation.ask("embedding", prompt(2, 1), 1, pooling="last")
    assert simulation.tokens() == {"embedding": 2, "long": 14}
    simulation.drain()


def test_what_the_prefix_cache_holds_does_not_count() -> None:
    """A prompt of 44 tokens of which 40 are cached is shorter than one of 8, also if it began to wait before that."""
    simulation = Noted(replace(ROOMY, max_step_tokens=24))
    simulation.ask("first", prompt(44), 30)
    simulation.step()
    simulation.step()
    simulation.ask("long", prompt(150, 1), 2)
    simulation.step()
    simulation.ask("eight", prompt(8, 2), 2)
    simulation.ask("cached", prompt(40) + prompt(4, 3), 2)
    assert simulation.tokens() == {"first": 1, "cached": 4, "eight": 7, "long": 12}
    simulation.drain()


def test_a_prompt_that_became_short_while_it_waited() -> None:
    """Two long prompts with one beginning and a third between them: the second goes on where the first has computed."""
    simulation = Noted(replace(ROOMY, max_rows=8))
    simulation.ask("a", prompt(60), 1)
    simulation.ask("between", prompt(100, 1), 1)
    simulation.ask("like a", prompt(56) + prompt(4, 3), 1)
    order = []
    while simulation.scheduler.has_work:
        order += [name for name in simulation.tokens() if name not in order]
    assert order.index("like a") < 3 and simulation.scheduler.counters.steps < 20
    ends = [name for delta in simulation.deltas if (name := delta.request_id)]
    assert ends == ["a", "like a", "between"]
    simulation.check_end()


def test_a_more_important_prompt_goes_before_a_running_one() -> None:
    simulation = Noted(ROOMY)
    simulation.ask("usual", prompt(160), 1, priority=1)
    simulation.step()
    simulation.ask("important", prompt(100, 1), 1, priority=0)
    simulation.ask("less", prompt(2, 2), 1, priority=2)
    assert simulation.tokens() == {"important": 16}
    ends = []
    while simulation.scheduler.has_work:
        simulation.step()
    ends = [delta.request_id for delta in simulation.deltas]
    assert ends == ["important", "usual", "less"]
    simulation.check_end()


def test_a_running_prompt_grows_old_behind_important_ones() -> None:
    """It has a row, so the waiting queue does not know of it: still it is not held up for ever."""
    simulation = Noted(replace(ROOMY, max_waiting_steps=20, prefix_caching=False))
    simulation.ask("usual", prompt(60), 1, priority=1)
    simulation.step()
    number = 0
    while ("usual", 0) in simulation.open:
        number += 1
        simulation.ask(f"important{number}", prompt(16, number), 1, priority=0)
        simulation.step()
        assert simulation.scheduler.counters.steps < 20 + 10
    assert simulation.scheduler.counters.steps > 20, "nothing held it up: the test shows nothing"
    simulation.drain()


def test_the_first_in_line_is_not_overtaken_while_blocks_are_short() -> None:
    simulation = Noted(Setup(num_blocks=13, eos=frozenset()))
    simulation.ask("runs", prompt(24, 1), 8)
    simulation.step()
    simulation.ask("large", prompt(40, 2), 4)
    simulation.ask("small", prompt(2, 3), 4)
    assert "small" not in simulation.tokens()
    simulation.drain()


def test_prompts_computed_whole_are_not_overtaken() -> None:
    simulation = Noted(replace(ROOMY, chunked_prefill=False, max_step_tokens=48, max_model_len=48))
    simulation.ask("a", prompt(40), 2)
    simulation.ask("b", prompt(40, 1), 2)
    simulation.ask("c", prompt(2, 2), 2)
    assert simulation.tokens() == {"a": 40}
    simulation.drain()


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 90)), min_size=1, max_size=14), st.integers(2, 24), st.integers(0, 2),
)
@settings(max_examples=15, deadline=None)
def test_no_prompt_starves(asked: list[tuple[int, int]], budget: int, depth: int) -> None:
    """Each step gives at least half of its tokens to the prompts that came first and are not done. So a prompt takes no more
    steps than twice the tokens of all that came before it and its own need, whatever comes later. Answers and budgets are
    checked by the simulation."""
    setup = replace(ROOMY, max_step_tokens=budget, max_rows=16, depth=depth, prefix_caching=False)
    simulation = Simulation(setup)
    arrivals = deque(sorted((step, number, length) for number, (step, length) in enumerate(asked)))
    before, done = 0, {}
    limits: dict[str, int] = {}
    while arrivals or simulation.scheduler.has_work:
        while arrivals and arrivals[0][0] <= simulation.steps:
            _, number, length = arrivals.popleft()
            before += length
            limits[str(number)] = simulation.steps + math.ceil(before / math.ceil(budget / 2)) + depth
            simulation.ask(str(number), prompt(length, number), 1)
        simulation.step()
        for delta in simulation.deltas[len(done):]:
            done[delta.request_id] = simulation.steps
            assert simulation.steps <= limits[delta.request_id], f"{delta.request_id} waited too long"
    simulation.check_end()


@given(st.integers(1, 12), st.integers(1, 40), st.integers(4, 40), st.integers(1, 6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_equal_prompts_are_planned_as_without_fairness(count: int, length: int, budget: int, answer: int, offline: bool) -> None:
    plans = []
    for fair in (True, False):
        simulation = Simulation(replace(ROOMY, max_step_tokens=budget, max_rows=8))
        for number in range(count):
            simulation.ask(str(number), prompt(length, number), answer)
        if offline:
            simulation.scheduler.begin_with_longest()
        elif not fair:
            simulation.scheduler._joining.fair = False
        plans.append([])
        while simulation.scheduler.has_work:
            plan = simulation.step()
            plans[-1].append((plan.rows.tolist(), plan.num_tokens.tolist()))
    assert plans[0] == plans[1]


def test_offline_no_prompt_is_overtaken() -> None:
    simulation = Noted(ROOMY)
    simulation.ask("long", prompt(100), 9)
    simulation.ask("short", prompt(3, 1), 2)
    simulation.scheduler.begin_with_longest()
    assert simulation.tokens() == {"long": 16}
    simulation.drain()


def test_overtaking_costs_no_preemptions() -> None:
    """Pools that hold little more than one request: as many tokens are computed twice as in plain order, within a tenth."""
    wasted = []
    for fair in (True, False):
        runs = []
        for name in ("tight", "no_prefix_cache"):
            for seed in range(5):
                simulation = Simulation(SETUPS[name])
                simulation.scheduler._joining.fair = fair
                runs.append(run_random(SETUPS[name], seed, aborts=0.0, simulation=simulation).scheduler.counters)
        wasted.append(sum(counters.wasted_tokens for counters in runs) / sum(counters.computed_tokens for counters in runs))
    assert wasted[0] <= 1.1 * wasted[1] > 0


# -- in simulated time -------------------------------------------------------------------------------------------------

TARGET = 0.080
Law = Callable[[int, int, int], float]


SCORED_SECONDS = 2.5e-3              # of a prompt token whose log-probabilities are wanted


def gpu_law(num_decodes: int, num_prompt_tokens: int, num_pairs: int) -> float:
    """Seconds of a step, like an 8B model on an H200: 5 ms for reading the weights, 25 µs a token, 1.5 ns for a key it sees."""
    return 0.005 + 25e-6 * num_prompt_tokens + 1.5e-9 * num_pairs


def cpu_law(num_decodes: int, num_prompt_tokens: int, num_pairs: int) -> float:
    """3.5 ms a token: 285 tokens per second."""
    return 0.040 + 3.5e-3 * num_prompt_tokens + 40e-9 * num_pairs


class TimedRunner(FakeRunner):
    """A clock that only the device moves: steps run one after another."""

    def __init__(self, simulation: Simulation, law: Law) -> None:
        super().__init__(simulation.groups, simulation.setup.num_blocks, VOCAB)
        self.clock = 0.0
        self._law = law
        self._ends: deque[tuple[float, float]] = deque()

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        rows = [(self.rows[row].length, count) for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)]
        several = [(end, count) for end, count in rows if count > 1]
        pairs = sum(count * (end - count) + count * count // 2 for end, count in several)
        scored = int(plan.num_tokens[(plan.want & np.int8(Want.PROMPT_LOGPROBS)) != 0].sum())
        seconds = self._law(len(rows) - len(several), sum(count for _, count in several), pairs) + SCORED_SECONDS * scored
        begin = max(self.clock, self._ends[-1][0]) if self._ends else self.clock
        self._ends.append((begin + seconds, seconds))

    def collect(self) -> StepResult:
        end, seconds = self._ends.popleft()
        self.clock = max(self.clock, end)
        return replace(super().collect(), device_seconds=seconds)


def timed(law: Law, model: StepTimeModel, depth: int, budget: int) -> Simulation:
    """With a model of step times that has seen some prompts."""
    simulation = Simulation(Setup(
        num_blocks=1600, block_size=16, max_rows=16, max_step_tokens=budget, max_model_len=8200, depth=depth, eos=frozenset(),
        prefix_caching=False,
    ))
    simulation.runner = TimedRunner(simulation, law)
    simulation.scheduler._joining.time_model = model
    for number in range(3):
        simulation.ask(f"warm{number}", prompt(600, number), 2)
        simulation.drain()
    return simulation


def seconds_until(simulation: Simulation, name: str, since: float) -> float:
    while not any(delta.request_id == name for delta in simulation.deltas):
        simulation.step()
    return simulation.runner.clock - since


def alone(law: Law, model: StepTimeModel, depth: int, budget: int, length: int) -> float:
    simulation = timed(law, model, depth, budget)
    since = simulation.runner.clock
    simulation.ask("alone", prompt(length, 5), 1)
    return seconds_until(simulation, "alone", since)


def test_a_stream_beside_prompt_log_probabilities() -> None:
    """A token with its log-probabilities takes a hundred times as long as one without, as in a small model with a large
    vocabulary: from the first chunk on, a step is at most twice its target."""
    simulation = timed(gpu_law, MeasuredStepTime(TARGET, alike=25e-6 / 1.5e-9), 0, 8448)
    simulation.ask("stream", prompt(10, 3), 400)
    for _ in range(3):
        simulation.step()
    simulation.ask("scored", prompt(1500, 4), 1, prompt_logprobs=0)
    gaps, last = [], simulation.runner.clock
    while not any(delta.request_id == "scored" for delta in simulation.deltas):
        simulation.step()
        gaps.append(simulation.runner.clock - last)
        last = simulation.runner.clock
    assert max(gaps) <= 2 * TARGET
    assert sum(gaps) <= 1.5 * 1500 * (SCORED_SECONDS + 25e-6), "and not much longer than it takes alone"


GPU, CPU = (gpu_law, TARGET, FEWEST["cuda"], 8448), (cpu_law, 0.5, FEWEST["cpu"], 512)


@pytest.mark.parametrize(("device", "steps_before", "depth"), [
    *((GPU, steps_before, depth) for steps_before in (0, 1, 2) for depth in (0, 1)), (CPU, 1, 0),
])
def test_a_short_prompt_beside_a_long_one(device: tuple[Law, float, int, int], steps_before: int, depth: int) -> None:
    """10 tokens that arrive just after a step was planned, beside 8,000: at most three step times beyond their own. The long
    prompt loses at most a tenth against having the engine and every step to itself."""
    law, target, fewest, budget = device

    def model() -> MeasuredStepTime:
        return MeasuredStepTime(target, alike=25e-6 / 1.5e-9 if law is gpu_law else 3.5e-3 / 40e-9, fewest=fewest)

    own, whole = alone(law, model(), depth, budget, 10), alone(law, NoTimeModel(), depth, budget, 8000)
    simulation = timed(law, model(), depth, budget)
    began = simulation.runner.clock
    simulation.ask("long", prompt(8000, 5), 4)
    for _ in range(steps_before):
        simulation.step()
    since = simulation.runner.clock
    simulation.step()                                        # planned a moment before the short one arrives
    simulation.ask("short", prompt(10, 6), 1)
    assert seconds_until(simulation, "short", since) <= 3 * target + own
    assert seconds_until(simulation, "long", began) <= 1.1 * whole


@pytest.mark.parametrize("busy_for", [2, 20])
def test_a_short_prompt_on_a_cpu_that_other_programs_use(busy_for: int) -> None:
    """They have taken two thirds of the cores since two steps, or twenty. It waits no longer than on a quiet machine."""
    target, slower = 0.5, 1.0

    def law(num_decodes: int, num_prompt_tokens: int, num_pairs: int) -> float:
        return slower * cpu_law(num_decodes, num_prompt_tokens, num_pairs)

    simulation = timed(law, MeasuredStepTime(target, 3.5e-3 / 40e-9, FEWEST["cpu"]), 0, 512)
    simulation.ask("long", prompt(8000, 5), 1)
    for _ in range(12):
        simulation.step()
    slower = 3.0
    for _ in range(busy_for):
        simulation.step()
    since = simulation.runner.clock
    simulation.step()                                        # planned a moment before the short one arrives
    simulation.ask("short", prompt(10, 6), 1)
    assert seconds_until(simulation, "short", since) <= 3 * target + law(0, 10, 50)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_of_short_prompts_beside_many_long_ones(depth: int) -> None:
    """Every one of them has its first token within the bar, while four long prompts are computed."""
    simulation = timed(gpu_law, MeasuredStepTime(TARGET, alike=25e-6 / 1.5e-9), depth, 8448)
    own = alone(gpu_law, MeasuredStepTime(TARGET), depth, 8448, 10)
    for number in range(4):
        simulation.ask(f"long{number}", prompt(3000 + 500 * number, number), 1)
    since: dict[str, float] = {}
    took: dict[str, float] = {}
    seen = len(simulation.deltas)
    while any(name.startswith("long") for name, _ in simulation.open):
        now = simulation.runner.clock
        simulation.step()
        name = f"short{len(since)}"
        since[name] = now
        simulation.ask(name, prompt(10, 50 + len(since)), 1)
        for delta in simulation.deltas[seen:]:
            if delta.request_id in since:
                took[delta.request_id] = simulation.runner.clock - since[delta.request_id]
        seen = len(simulation.deltas)
    assert len(took) > 3 and max(took.values()) <= 3 * TARGET + own


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps_before", [0, 1, 7, 14])
def test_a_short_prompt_waits_three_steps_and_costs_a_long_one_a_tenth_of_its_steps(depth: int, steps_before: int) -> None:
    """In steps of 512 tokens, whatever a step takes: 10 tokens beside 8,000."""
    setup = replace(ROOMY, max_step_tokens=512, max_model_len=8192, num_blocks=4096, depth=depth, prefix_caching=False)

    def steps_until(simulation: Simulation, name: str) -> int:
        began = simulation.steps
        while not any(delta.request_id == name for delta in simulation.deltas):
            simulation.step()
        return simulation.steps - began

    whole = Simulation(setup)
    whole.ask("long", prompt(8000, 5), 1)
    alone_steps = steps_until(whole, "long")
    simulation = Simulation(setup)
    simulation.ask("long", prompt(8000, 5), 1)
    for _ in range(steps_before):
        simulation.step()
    simulation.ask("short", prompt(10, 6), 1)
    assert steps_until(simulation, "short") <= 3
    steps_until(simulation, "long")
    assert simulation.steps <= 1.1 * alone_steps

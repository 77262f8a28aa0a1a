"""The scheduler: exact numbers for each rule, then everything at once against FakeRunner."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, expected_answer
from host_simulation import SETUPS, VOCAB, Setup, Simulation, random_request, run_random
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from replay_cases import snapshot_of

from ridgeline.errors import BadRequest
from ridgeline.messages import Request, StepPlan, Want
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.policy import AGED_PRIORITY
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.scheduler.sequence import Sequence
from ridgeline.scheduler.step_time import FEWEST, MeasuredStepTime, NoTimeModel, keys_like_a_token

ROOMY = Setup(num_blocks=200, eos=frozenset())           # nothing runs short; every answer has its full length
TIGHT = replace(ROOMY, num_blocks=13)                    # 12 blocks of 4 tokens: one longest request


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that begin differently for different starts."""
    return [(start * 7 + place) % VOCAB for place in range(length)]


def numbers(plan: StepPlan) -> list[int]:
    return plan.num_tokens.tolist()


def sequence_of(simulation: Simulation, name: str, index: int = 0) -> Sequence:
    return next(each for each in simulation.scheduler.answers.live.of(name) if each.index == index)


def running(simulation: Simulation) -> list[str]:
    """Who runs, the most important first."""
    return [sequence.request.request_id for sequence in simulation.scheduler._running.rows.running()]


class Chunks:
    """A time model that allows so many tokens of prompt, less the decodes beside them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def prompt_tokens(self, num_decodes: int, position: int, budget: int) -> int:
        return self.size - num_decodes

    def scored_tokens(self, num_decodes: int, budget: int) -> int:
        return budget

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, num_pairs: int, seconds: float, num_scored: int = 0
    ) -> None:
        """It knows already."""


# -- one rule ----------------------------------------------------------------------------------------------------------


def test_the_longest_begin_first_and_equals_in_their_order() -> None:
    simulation = Simulation(Setup(num_blocks=80))
    for name, length, priority in (("a", 3, 0), ("b", 9, 0), ("c", 3, 0), ("d", 9, 0), ("e", 20, 1)):
        simulation.ask(name, prompt(2, ord(name)), length, priority=priority)
    simulation.scheduler.begin_with_longest()
    simulation.step()
    assert running(simulation) == ["b", "d", "a", "c", "e"], "a priority comes before that"
    simulation.drain()


def test_with_the_longest_first_a_batch_takes_fewer_steps_and_answers_the_same() -> None:
    """The prompts take four steps; the longest answer, asked for last, is begun three steps earlier."""
    lengths, steps, answers = [2, 2, 2, 12], [], []
    for longest_first in (False, True):
        simulation = Simulation(Setup(max_step_tokens=8, eos=frozenset()))
        for place, length in enumerate(lengths):
            simulation.ask(str(place), prompt(7, place), length)
        if longest_first:
            simulation.scheduler.begin_with_longest()
        simulation.drain()
        steps.append(simulation.steps)
        answers.append(simulation.answers)
    assert steps[1] < steps[0] and answers[0] == answers[1]


def test_the_order_is_kept_where_not_all_fit() -> None:
    """Two with one prefix, asked for together, stay together: between them others might evict it."""
    simulation = Simulation(Setup())
    for name, length in (("a", 3), ("b", 40), ("c", 40), ("d", 40), ("e", 40)):
        simulation.ask(name, prompt(2, ord(name)), length)
    simulation.scheduler.begin_with_longest()
    simulation.step()
    assert running(simulation)[0] == "a"
    simulation.drain()


LEVELLED = Setup(num_blocks=400, max_rows=64, max_step_tokens=256, enough_rows=8, eos=frozenset())


def test_short_answers_are_kept_to_run_beside_the_longest() -> None:
    """One answer of 40 tokens and 70 of 4 are 320 tokens: with eight rows all of them end together."""
    thin, answers = [], []
    for setup in (replace(LEVELLED, enough_rows=None), LEVELLED):
        simulation = Simulation(setup)
        for place in range(71):
            simulation.ask(str(place), prompt(2, place), 40 if place == 50 else 4)
        simulation.scheduler.begin_with_longest()
        decodes = []
        while simulation.scheduler.has_work:
            decodes.append(len(simulation.step().rows))
            if setup.enough_rows and simulation.scheduler.num_waiting:
                assert len(running(simulation)) <= 8
        assert len(decodes) == 40, "as many steps as the longest answer has tokens"
        simulation.check_end()
        thin.append(sum(rows < 4 for rows in decodes))
        answers.append(simulation.answers)
    assert answers[0] == answers[1] and thin[0] > 30 and thin[1] < 4


def test_rows_below_a_level_are_filled_together() -> None:
    """A sixteenth of 32 rows is two; the last may come alone. No two answers are equally long."""
    simulation = Simulation(replace(LEVELLED, enough_rows=30, max_model_len=70, num_blocks=1000))
    for place in range(58):
        simulation.ask(str(place), prompt(2, place), 5 + place)
    simulation.scheduler.begin_with_longest()
    joined = []
    while simulation.scheduler.num_waiting:
        joined.append(len(simulation.step().added))
    assert joined[0] == 32 and sum(joined) == 58 and 1 not in joined[:-1]
    simulation.drain()


def test_a_level_ends_with_those_it_was_made_for() -> None:
    simulation = Simulation(LEVELLED)
    for place in range(12):
        simulation.ask(str(place), prompt(2, place), 3 + place)
    simulation.scheduler.begin_with_longest()
    simulation.drain()
    for place in range(20, 40):
        simulation.ask(str(place), prompt(2, place), 3)
    simulation.step()
    assert len(running(simulation)) == 20
    simulation.drain()


@pytest.mark.parametrize("known", [{"stop": ["x"]}, {"stop_token_ids": [5]}, {"priority": 1}, {}])
def test_only_known_lengths_of_equals_are_levelled(known: dict[str, Any]) -> None:
    """One of them may end early, or comes after all others: it could be the longest of all."""
    simulation = Simulation(LEVELLED)
    for place in range(31):
        simulation.ask(str(place), prompt(2, place), 40 if place == 0 else 4, **(known if place == 9 else {}))
    simulation.scheduler.begin_with_longest()
    assert simulation.scheduler.level == (None if known else 8)


def test_equal_answers_all_run_at_once() -> None:
    simulation = Simulation(LEVELLED)
    for place in range(40):
        simulation.ask(str(place), prompt(2, place), 6)
    simulation.scheduler.begin_with_longest()
    simulation.step()
    assert len(running(simulation)) == 40
    simulation.drain()


def test_a_long_prompt_comes_in_chunks() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(40), 3)
    plans = [simulation.step() for _ in range(5)]
    assert [numbers(plan) for plan in plans] == [[16], [16], [8], [1], [1]]
    assert [plan.want.tolist() for plan in plans] == [[0], [0], [Want.TOKEN], [Want.TOKEN], [Want.TOKEN]]
    assert simulation.scheduler.counters.chunks == 2
    simulation.drain()
    assert simulation.scheduler.counters.computed_tokens == 42, "the last token needs no KV"


def test_decodes_go_before_prompts_and_share_the_budget() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(4), 20)
    simulation.step()
    simulation.ask("b", prompt(40, 1), 2)
    simulation.ask("c", prompt(3, 2), 9)
    assert numbers(simulation.step()) == [1, 3, 12], "c is much shorter than b, which gets what a and c leave"
    assert numbers(simulation.step()) == [1, 1, 14]
    assert numbers(simulation.step()) == [1, 1, 14]
    simulation.drain()


def test_without_chunks_a_prompt_is_one_step_or_waits() -> None:
    simulation = Simulation(replace(ROOMY, chunked_prefill=False, max_step_tokens=47))
    simulation.ask("a", prompt(30), 3)
    simulation.ask("b", prompt(18, 1), 3)
    assert numbers(simulation.step()) == [30] and numbers(simulation.step()) == [1, 18]
    simulation.drain()
    assert simulation.scheduler.counters.chunks == 0


def test_the_time_model_sizes_chunks() -> None:
    simulation = Simulation(ROOMY)
    simulation.scheduler._joining.time_model = Chunks(5)
    simulation.ask("a", prompt(9), 5)
    simulation.ask("b", prompt(7, 1), 5)
    assert numbers(simulation.step()) == [5]
    assert numbers(simulation.step()) == [4, 1], "all prompts together take what one may take"
    assert numbers(simulation.step()) == [1, 4]
    assert numbers(simulation.step()) == [1, 2]
    assert numbers(simulation.step()) == [1, 1]
    simulation.drain()


def test_measured_steps_keep_to_their_time() -> None:
    model = MeasuredStepTime(0.050)
    assert model.prompt_tokens(8, 0, 8192) == 512, "nothing is known yet: a small step shows it"
    for _ in range(20):
        model.observe(8, 0, 0, 0.010)
        model.observe(8, 2000, 2000 * 1000, 0.010 + 2000 * 20e-6)
    assert model.prompt_tokens(8, 0, 8192) == 1984       # 40 ms at 20 µs a token, in whole tiles
    assert model.prompt_tokens(0, 0, 8192) == 2496, "a prompt alone as well: the next request may come any moment"
    model.observe(8, 0, 0, 3.0)
    model.observe(8, 2000, 2000 * 1000, 3.0)
    assert model.prompt_tokens(8, 0, 8192) == 1984, "one step that was held up does not count"
    for _ in range(40):
        model.observe(8, 0, 0, 0.060)
    assert model.prompt_tokens(8, 0, 8192) == 576, "prompts always get a share"


def test_chunks_shrink_at_once_when_another_program_takes_the_cores() -> None:
    """3.5 ms a token, three times as much beside it. Two slow steps are enough. One is not, nor are two fast ones."""
    model = MeasuredStepTime(0.5, fewest=32)

    def step(slower: float) -> int:
        tokens = model.prompt_tokens(0, 0, 512)
        model.observe(0, tokens, 0, slower * 3.5e-3 * tokens)
        return tokens

    assert [step(1.0) for _ in range(15)] == [64] + [128] * 14
    assert [step(slower) for slower in (3.0, 1.0, 1.0, 1.0)] == [128] * 4
    assert [step(3.0) for _ in range(4)] == [128, 128, 32, 32]
    assert [step(3.0) for _ in range(11)] == [32] * 11
    assert [step(1.0) for _ in range(9)] == [32] * 8 + [128]
    for _ in range(20):
        model.observe(8, 0, 0, 0.2)
    assert model.prompt_tokens(8, 0, 512) == 64, "300 ms are left"
    for _ in range(2):
        model.observe(8, 0, 0, 0.4)
    assert model.prompt_tokens(8, 0, 512) == 32, "decodes as well"


def test_two_slow_decodes_do_not_shrink_all_chunks_of_the_prompts_behind_them() -> None:
    """Where prompts follow prompts, no step without one shows that decodes are fast again."""
    model = MeasuredStepTime(0.08)

    def step() -> int:
        tokens = model.prompt_tokens(128, 0, 8192)
        model.observe(128, tokens, 0, 0.015 + 20e-6 * tokens)
        return tokens

    def decode(*times: float) -> None:
        for seconds in times:
            model.observe(128, 0, 0, seconds)

    decode(*[0.015] * 15)
    assert [step() for _ in range(3)] == [512, 3200, 3200]
    decode(0.09, 0.09)
    assert [step() for _ in range(5)] == [960] * 3 + [3200] * 2
    decode(0.09)
    assert step() == 960, "what is new is believed again"


def test_small_steps_grow_again() -> None:
    """A step has 40 ms that no token adds to, so a token of a small step seems dear. The next step is larger nevertheless, until
    the target is met: 64 tokens seem to take 3.6 ms each, and 131 fit."""
    model = MeasuredStepTime(0.5, fewest=32)
    taken = []
    for _ in range(40):
        tokens = model.prompt_tokens(0, 0, 512)
        taken.append(tokens)
        model.observe(0, tokens, 0, 0.040 + 3.4e-3 * tokens)
    assert taken[0] == 64 and taken[-1] == 128 and taken == sorted(taken)


def test_tokens_with_log_probabilities_are_learned_apart() -> None:
    """20 µs a prompt token, 1 ms where its log-probabilities are wanted."""
    model = MeasuredStepTime(0.050)
    assert model.scored_tokens(8, 8192) == 32, "nothing is known yet"
    for _ in range(20):
        model.observe(8, 0, 0, 0.010)
        model.observe(8, 2000, 0, 0.010 + 2000 * 20e-6)
    for _ in range(5):
        model.observe(8, 516, 0, 0.010 + 500 * 20e-6 + 16 * 1e-3, num_scored=16)
        model.observe(8, 1, 0, 0.040, num_scored=1)      # the end of a prompt tells little
    assert model.scored_tokens(8, 8192) == 40
    assert model.scored_tokens(8, 30) == 30
    assert model.prompt_tokens(8, 0, 8192) == 1984, "other prompts are not cut shorter for them"
    assert NoTimeModel().scored_tokens(8, 300) == 300


def test_as_many_tokens_with_log_probabilities_as_others_are_always_allowed_on_a_cpu() -> None:
    """8 ms a token, 2 ms more for its log-probabilities, and 40 ms a step: alone 0.1 s would be for six of them, 15 ms each."""
    model = MeasuredStepTime(0.5, fewest=FEWEST["cpu"])
    for _ in range(20):
        assert model.scored_tokens(0, 512) == FEWEST["cpu"]
        model.observe(0, 32, 0, 0.040 + 10e-3 * 32, num_scored=32)


@pytest.mark.parametrize("in_time", [16, 4096])              # prompt tokens: a step of these simulations has 16 at most
def test_prompts_with_log_probabilities_are_cut_by_what_they_cost(in_time: int) -> None:
    class Dear(Chunks):
        def scored_tokens(self, num_decodes: int, budget: int) -> int:
            return 4

    simulation = Simulation(replace(ROOMY, prefix_caching=False))
    simulation.scheduler._joining.time_model = Dear(in_time)
    simulation.ask("a", prompt(10), 5, prompt_logprobs=0)
    assert numbers(simulation.step()) == [4]
    simulation.ask("b", prompt(2, 1), 5)
    assert numbers(simulation.step()) == [3, 2], "the prompt without them is short, and has its part of the step"
    simulation.drain()


def test_steps_that_take_no_time_have_no_limit() -> None:
    model = MeasuredStepTime(0.050)
    model.observe(0, 600, 600 * 300, 0.0)
    assert model.prompt_tokens(4, 0, 8192) == 8192


def test_the_middle_of_a_long_prompt_is_cut_shorter() -> None:
    """Learned from short prompts alone, steps keep to their time at every position: attention has its share of a token."""
    products, per_key = 20e-6, 1e-9                         # seconds of a token, and of a key it attends to

    def seconds(position: int, tokens: int) -> float:
        return tokens * products + tokens * (position + tokens / 2) * per_key

    model = MeasuredStepTime(0.050, alike=products / per_key)
    for length in (500, 1000, 2000):
        model.observe(8, length, length * length // 2, seconds(0, length))
    cuts = {position: model.prompt_tokens(8, position, 8192) for position in (0, 2_000, 20_000, 100_000)}
    for position, tokens in cuts.items():
        assert tokens % 64 == 0 and seconds(position, tokens) <= 0.050 < seconds(position, tokens + 64)
    assert cuts[0] > cuts[2_000] > cuts[20_000] > 2 * cuts[100_000] > 512


def test_a_running_prompt_says_where_it_goes_on() -> None:
    asked, seen = [], []

    class Notes(Chunks):
        def prompt_tokens(self, num_decodes: int, position: int, budget: int) -> int:
            asked.append(position)
            return super().prompt_tokens(num_decodes, position, budget)

        def observe(
            self, num_decodes: int, num_prompt_tokens: int, num_pairs: int, seconds: float, num_scored: int = 0
        ) -> None:
            seen.append((num_prompt_tokens, num_pairs))

    simulation = Simulation(ROOMY)
    simulation.scheduler._joining.time_model = Notes(4)
    simulation.ask("a", prompt(10), 2)
    simulation.drain()
    assert asked[:3] == [0, 4, 8]
    assert seen[:4] == [(4, 8), (4, 24), (2, 18), (0, 0)]


def test_a_prompt_that_goes_on_from_a_long_hit_is_cut_by_where_it_goes_on() -> None:
    class Heavy(Chunks):
        """Behind position 0 a token weighs four."""

        def prompt_tokens(self, num_decodes: int, position: int, budget: int) -> int:
            return self.size // (4 if position else 1)

    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(24), 40)
    for _ in range(3):
        simulation.step()
    simulation.scheduler._joining.time_model = Heavy(16)
    simulation.ask("b", prompt(24) + prompt(20, 1), 2)
    simulation.ask("c", prompt(12, 2), 2)
    assert numbers(simulation.step()) == [1, 4], "all of the time, and nothing is left for c"
    assert numbers(simulation.step()) == [1, 4]
    simulation.scheduler._joining.time_model = Heavy(64)
    assert numbers(simulation.step()) == [1, 12, 3], "what is left of the 16 tokens of a step"
    simulation.drain()


def test_many_that_go_on_from_a_long_hit_share_the_time_of_one() -> None:
    """Twenty requests behind the same 8,192 cached tokens, in a step that has room for 64 tokens there."""
    class Heavy(Chunks):
        def prompt_tokens(self, num_decodes: int, position: int, budget: int) -> int:
            return 64 if position else 1024

    simulation = Simulation(replace(ROOMY, num_blocks=400, max_rows=32, max_step_tokens=1024, max_model_len=200))
    simulation.ask("a", prompt(40), 60)
    for _ in range(3):
        simulation.step()
    simulation.scheduler._joining.time_model = Heavy(1024)
    for number in range(20):
        simulation.ask(f"b{number}", prompt(40) + prompt(10, number + 1), 2)
    taken = numbers(simulation.step())
    assert taken[0] == 1 and 55 <= sum(taken[1:]) <= 64
    simulation.drain()


def test_keys_that_weigh_as_much_as_a_token() -> None:
    """An 8B model: 14 GFLOP of products a token, half a MFLOP for every key."""
    matrices = [(32, 6144, 4096), (32, 4096, 4096), (32, 2 * 14336, 4096), (32, 4096, 14336), (1, 128256, 4096)]
    assert 15_000 < keys_like_a_token(matrices, 32, 32, 128) < 20_000
    assert keys_like_a_token(matrices, 0, 32, 128) == math.inf, "only windows: no prompt is long"


def test_rows_are_a_budget_too() -> None:
    simulation = Simulation(replace(ROOMY, max_rows=2))
    for name in "abc":
        simulation.ask(name, prompt(2, ord(name)), 4)
    assert len(simulation.step().rows) == 2 and simulation.scheduler.num_waiting == 1
    simulation.drain()


def test_log_probabilities_come_with_their_tokens() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(20), 3, logprobs=2, prompt_logprobs=1)
    first, second = simulation.step(), simulation.step()
    assert first.want.tolist() == [Want.PROMPT_LOGPROBS]
    assert second.want.tolist() == [Want.PROMPT_LOGPROBS | Want.TOKEN | Want.LOGPROBS]
    assert simulation.step().want.tolist() == [Want.TOKEN | Want.LOGPROBS]
    simulation.drain()
    assert [delta.logprobs[0].token_ids.tolist() for delta in simulation.deltas] == [
        delta.token_ids for delta in simulation.deltas
    ]
    assert simulation.prompt_logprobs["a", 0] == prompt(20)[1:]


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_a_prefix_hit_is_just_a_larger_start() -> None:
    """10 tokens in blocks of 4: two whole blocks are found, the partial one is computed again."""
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(10), 2)
    simulation.drain()
    simulation.ask("b", prompt(10), 2)
    plan = simulation.step()
    assert numbers(plan) == [2] and plan.added[0].num_computed == 8
    simulation.drain()
    assert {delta.num_cached_tokens for delta in simulation.deltas if delta.request_id == "b"} == {8}
    assert simulation.manager.counters.hit_tokens == 8


def test_a_hit_never_covers_the_last_token() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(8), 2)
    simulation.drain()
    simulation.ask("b", prompt(8), 2)
    assert numbers(simulation.step()) == [4]
    simulation.drain()


def test_answers_are_found_as_well_as_prompts() -> None:
    """The next turn of a conversation: prompt and answer of the last one, and something new."""
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(10), 9)
    simulation.drain()
    turn = prompt(10) + simulation.answers["a", 0] + [1, 2]
    simulation.ask("b", turn, 2)
    assert numbers(simulation.step()) == [21 - 16], "18 computed tokens of the first turn are four whole blocks"
    simulation.drain()


@pytest.mark.parametrize("depth", [0, 1])
def test_salts_separate_requests(depth: int) -> None:
    simulation = Simulation(replace(ROOMY, depth=depth))
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "")):
        simulation.ask(name, prompt(12), 2, cache_salt=salt)
        simulation.drain()
    cached = {delta.request_id: delta.num_cached_tokens for delta in simulation.deltas}
    assert cached == {"a": 0, "b": 0, "c": 8, "d": 0}


def test_prompt_logprobs_need_every_position() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(12), 2)
    simulation.drain()
    simulation.ask("b", prompt(12), 2, prompt_logprobs=0)
    assert numbers(simulation.step()) == [12]
    simulation.drain()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_n_answers_share_the_prompt(prefix_caching: bool, depth: int) -> None:
    """Prompt of 10 in blocks of 4: two shared blocks, and one of its own for each of three answers, which begins as a copy of the
    first answer's: they compute the last token of the prompt, to sample from it, and nothing else."""
    simulation = Simulation(replace(ROOMY, prefix_caching=prefix_caching, depth=depth))
    simulation.ask("a", prompt(10), 3, n=3)
    assert numbers(simulation.step()) == [10], "the others wait for the prompt"
    plan = simulation.step()
    assert numbers(plan) == [1, 1, 1] and [added.num_computed for added in plan.added] == [9, 9]
    source = sequence_of(simulation, "a").blocks
    assert source is not None and {op.source for op in plan.block_ops} == {source.tables[0][2]}
    assert [op.target for op in plan.block_ops] == [added.block_ids[0][2] for added in plan.added]
    assert simulation.manager.counters.copied_blocks == 2
    assert simulation.most_held == 2 + 3
    simulation.drain()
    counters = simulation.manager.counters
    assert counters.forked_blocks + counters.hit_tokens // 4 == 4
    assert {key: len(answer) for key, answer in simulation.answers.items()} == {("a", index): 3 for index in range(3)}


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_only_the_first_of_n_answers_computes_prompt_logprobs(prefix_caching: bool) -> None:
    simulation = Simulation(replace(ROOMY, prefix_caching=prefix_caching))
    simulation.ask("a", prompt(10), 3, n=3, prompt_logprobs=0)
    simulation.step()
    plan = simulation.step()
    assert numbers(plan) == [1, 1, 1], "the others share or copy what is computed"
    simulation.drain()
    assert simulation.prompt_logprobs == {("a", 0): prompt(10)[1:]}


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_shared_prompts_are_not_cached_prompts(prefix_caching: bool) -> None:
    """What the n answers share was not in the cache when the request came."""
    simulation = Simulation(replace(ROOMY, prefix_caching=prefix_caching))
    for name in "ab":
        simulation.ask(name, prompt(10), 3, n=3)
        simulation.drain()
    cached = {(delta.request_id, delta.index): delta.num_cached_tokens for delta in simulation.deltas}
    found = 8 if prefix_caching else 0
    assert cached == {("a", index): 0 for index in range(3)} | {("b", index): found * (index == 0) for index in range(3)}


def test_n_answers_outlive_the_first() -> None:
    """The leader is aborted before its prompt is done: the others compute it themselves."""
    simulation = Simulation(replace(ROOMY, prefix_caching=False))
    simulation.ask("a", prompt(30), 3, n=3)
    simulation.step()
    simulation.abort("a", 0)
    simulation.drain()
    assert [simulation.ends["a", index] for index in range(3)] == ["abort", "length", "length"]


def test_noise_keys() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(3), n=2, seed=5)
    simulation.ask("b", prompt(4), n=2, seed=5)
    simulation.ask("c", prompt(3), n=2)
    simulation.ask("d", prompt(3))
    keys = {name: [each.seed for each in simulation.scheduler.answers.live.of(name)] for name in "abcd"}
    assert keys["a"] == keys["b"], "a seed is a seed, whatever else was asked before"
    every = keys["a"] + keys["c"] + keys["d"]
    assert len(set(every)) == 5 and all(0 <= key < 2**64 for key in every)


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_blocks_behind_a_window_are_freed_although_others_looked_for_a_prefix(depth: int) -> None:
    """A request that is let in has the blocks of the step being planned published: before those of earlier steps are done."""
    simulation = Simulation(replace(ROOMY, windows=(None, 6), depth=depth))
    simulation.ask("long", prompt(30), max_tokens=9)
    simulation.step()
    simulation.ask("other", prompt(6, start=3))
    for _ in range(1 + depth):
        simulation.step()
    blocks = sequence_of(simulation, "long").blocks
    assert blocks is not None and blocks.freed == [0, (30 - 6 + 1) // 4]
    simulation.drain()


def test_what_a_step_in_flight_computes_is_not_found_once_nobody_will_look_at_it() -> None:
    simulation = Simulation(replace(ROOMY, depth=1))
    simulation.ask("long", prompt(30))
    simulation.step()
    simulation.ask("other", prompt(6, start=3))
    simulation.step()                                    # the first 16 tokens are taken in, the others in flight
    tokens = sequence_of(simulation, "long").tokens
    assert simulation.manager.lookup(tokens, "", 29).num_tokens == 28
    simulation.abort("long")
    assert simulation.manager.lookup(tokens, "", 29).num_tokens == 16
    simulation.drain()


def test_a_window_bounds_what_a_sequence_holds() -> None:
    setup = replace(ROOMY, windows=(6,), max_model_len=200, max_step_tokens=8)
    simulation = Simulation(setup)
    simulation.ask("a", prompt(60), 100)
    simulation.drain()
    assert simulation.manager.counters.window_freed == 159 // 4 - 2, "all blocks but those in sight at the end"
    assert simulation.most_held <= simulation.manager.blocks_for(160, 8) == 5


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_smallest_pool_that_fits_is_enough(depth: int) -> None:
    """What falls behind a window comes back late with steps in flight: the only sequence waits, and is not preempted."""
    blocks = Simulation(replace(ROOMY, windows=(5,))).manager.blocks_for(48, 16)
    simulation = Simulation(replace(ROOMY, windows=(5,), num_blocks=blocks + 1, depth=depth, prefix_caching=False))
    simulation.ask("a", prompt(40), 8)
    simulation.drain(bound=60)
    assert simulation.scheduler.counters.preemptions == 0 and simulation.scheduler.counters.computed_tokens == 47


def test_a_pool_too_small_for_one_sequence_is_an_error() -> None:
    simulation = Simulation(replace(ROOMY, num_blocks=5))
    simulation.ask("a", prompt(10), 20)
    with pytest.raises(AssertionError, match="the KV pool is too small for one sequence"):
        simulation.drain()


# -- running short -----------------------------------------------------------------------------------------------------


def test_the_cheapest_running_sequence_is_preempted() -> None:
    """Three of one block each run out of 12 blocks; b has computed most and c least when the first has to go."""
    simulation = Simulation(replace(TIGHT, prefix_caching=False))
    simulation.ask("a", prompt(4, 1), 40)
    simulation.step()
    simulation.ask("b", prompt(14, 2), 30)
    simulation.step()
    simulation.ask("c", prompt(6, 3), 30)
    while not simulation.scheduler.counters.preemptions:
        simulation.step()
    assert running(simulation) == ["a", "b"]
    victim = sequence_of(simulation, "c")
    assert victim.blocks is None and victim.prefill.lost_tokens == len(victim.tokens) - 1
    assert simulation.scheduler.counters.wasted_tokens == 0, "it is counted when it is computed again"
    simulation.drain()
    counters = simulation.scheduler.counters
    assert counters.wasted_tokens > 0 and counters.useful_tokens == 43 + 43 + 35, "every token is new once"


def test_what_is_still_cached_is_not_wasted() -> None:
    """A victim whose blocks survive in the prefix cache computes only the rest again."""
    simulation = Simulation(TIGHT)
    simulation.ask("a", prompt(24, 1), 20)
    simulation.step()
    simulation.step()
    simulation.ask("b", prompt(12, 2), 20)
    while not simulation.scheduler.counters.preemptions:
        simulation.step()
    simulation.abort("a")
    lost = sequence_of(simulation, "b").prefill.lost_tokens
    plan = simulation.step()
    kept = plan.added[0].num_computed
    assert kept >= 8 and simulation.scheduler.counters.wasted_tokens == lost - kept
    simulation.drain()


def test_a_victim_that_frees_nothing_is_passed_over() -> None:
    """Answers that share all their blocks give none back: somebody else has to go, though it costs more."""
    simulation = Simulation(replace(ROOMY, prefix_caching=False))
    simulation.ask("a", prompt(16, 1), 4)
    simulation.ask("b", prompt(9, 2), 4)
    simulation.ask("c", prompt(6, 3), 4)
    for _ in range(3):
        simulation.step()
    scheduler = simulation.scheduler
    asking, cheap = sequence_of(simulation, "a"), sequence_of(simulation, "c")
    assert scheduler._running.victim(asking) is cheap
    for table in cheap.blocks.tables:                    # type: ignore[union-attr]
        for block in table:
            simulation.manager.pool.hold([block])
    assert scheduler._running.victim(asking) is sequence_of(simulation, "b")
    cheap.turn.priority = 5                              # the least important asks, and only the more important could give
    assert scheduler._running.victim(cheap) is cheap


def test_nobody_is_preempted_for_somebody_less_important() -> None:
    simulation = Simulation(replace(TIGHT, prefix_caching=False))
    simulation.ask("low", prompt(4, 1), 40, priority=1)
    simulation.step()
    simulation.ask("high", prompt(4, 2), 40, priority=0)
    while not simulation.scheduler.counters.preemptions:
        simulation.step()
    assert running(simulation) == ["high"]
    simulation.drain()


def test_admission_leaves_room_for_those_who_run() -> None:
    """Answers that end within the block of their own that admission leaves them never cost a preemption."""
    simulation = Simulation(replace(ROOMY, num_blocks=30, max_rows=20, max_step_tokens=32))
    rng = random.Random(3)
    for number in range(40):
        simulation.ask(f"r{number}", [rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))], 5)
    simulation.drain()
    assert simulation.scheduler.counters.preemptions == 0 and simulation.most_held > 20


@pytest.mark.parametrize(("fits", "depth"), [(4, 1), *(pytest.param(fits, 0, marks=pytest.mark.slow) for fits in (2, 8))])
def test_admission_does_not_thrash(fits: int, depth: int) -> None:
    """24 requests whose answers nobody can foresee, a pool that holds `fits` whole ones: optimism must pay.

    It does when the work is done in fewer steps than by running only as many as fit, with few preemptions per request.
    """
    setup = replace(
        ROOMY, num_blocks=1 + fits * 20, max_rows=32, max_step_tokens=64, max_model_len=80, depth=depth, prefix_caching=False
    )
    steps = {}
    for max_rows in (32, fits):
        simulation = Simulation(replace(setup, max_rows=max_rows))
        rng = random.Random(1)
        for number in range(24):
            simulation.ask(f"r{number}", [rng.randrange(VOCAB) for _ in range(16)], 64)
        simulation.drain()
        steps[max_rows] = simulation.scheduler.counters.steps
        if max_rows == 32:
            counters = simulation.scheduler.counters
            assert 0 < counters.preemptions <= 2 * 24
            assert counters.wasted_tokens <= 0.45 * counters.computed_tokens
        else:
            assert simulation.scheduler.counters.preemptions == 0
    assert steps[32] < steps[fits]


# -- priorities, age ---------------------------------------------------------------------------------------------------


def test_priority_then_arrival() -> None:
    simulation = Simulation(replace(ROOMY, max_rows=1))
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        simulation.ask(name, prompt(2, ord(name)), 2, priority=priority)
    order = []
    while simulation.scheduler.has_work:
        simulation.step()
        order += [name for name in running(simulation) if name not in order]
    assert order == ["d", "b", "c", "a"]


def test_priorities_can_be_off() -> None:
    simulation = Simulation(replace(ROOMY, max_rows=1))
    scheduler = simulation.scheduler
    simulation.scheduler = Scheduler(scheduler.limits, simulation.manager, use_priorities=False)
    simulation.ask("a", prompt(2), 3, priority=5)
    simulation.ask("b", prompt(2, 1), 3, priority=0)
    simulation.step()
    assert running(simulation) == ["a"]
    simulation.drain()


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    """A small request that would fit waits behind a large one that does not: otherwise the large one might wait forever."""
    simulation = Simulation(TIGHT)
    simulation.ask("a", prompt(24, 1), 4)
    simulation.step()
    simulation.ask("large", prompt(40, 2), 4)
    simulation.ask("small", prompt(2, 3), 4)
    simulation.step()
    assert running(simulation) == ["a"] and simulation.manager.num_free >= 4
    simulation.drain()


@pytest.mark.reliability("P-04")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_of_important_requests_starves_no_other(depth: int) -> None:
    """More important requests arrive than can be served; the old one waits its bound, and for those who run to end."""
    patience = 60
    setup = replace(ROOMY, num_blocks=20, max_rows=3, max_waiting_steps=patience, depth=depth)
    simulation = Simulation(setup)
    rng = random.Random(0)
    number = 0
    for name in ("first", "second", "third"):
        simulation.ask(name, prompt(8, ord(name[0])), 6)
    simulation.ask("old", prompt(20, 1), 20, priority=9)
    while ("old", 0) in simulation.open:
        if simulation.scheduler.num_waiting < 20:
            number += 1
            simulation.ask(f"new{number}", [rng.randrange(VOCAB) for _ in range(rng.randint(4, 20))], 6)
        simulation.step()
        # Once it is first in line nobody joins before it. The three that run are done within two steps of prompt and
        # six of answer each, even one after the other; then it has the pool to itself for its own two and twenty.
        assert simulation.scheduler.counters.steps <= patience + 3 * (2 + 6) + (2 + 20)
    assert simulation.scheduler.counters.steps > patience, "it was never held back: the test shows nothing"
    simulation.drain()


def test_preemption_makes_nobody_younger() -> None:
    """A prompt that is preempted again and again before it is done still comes of age: its wait counts from its arrival.

    Three important answers leave it one token per step, and outgrow the pool after 16 steps of its 20.
    """
    patience = 100
    simulation = Simulation(
        replace(ROOMY, num_blocks=20, max_rows=4, max_step_tokens=4, max_waiting_steps=patience, prefix_caching=False)
    )
    number = 0
    while not number or ("old", 0) in simulation.open:
        while sum(name.startswith("new") for name, _ in simulation.open) < 3:
            number += 1
            simulation.ask(f"new{number}", [number], 24)
        if number == 3 and not simulation.steps:
            simulation.ask("old", prompt(20, 1), 4, priority=9)
        simulation.step()
        # Once it is old enough: the rest of one last spell of waiting, its prompt, its answer.
        assert simulation.scheduler.counters.steps < patience + 25 + 20 + 4
    assert simulation.scheduler.counters.preemptions > 2 and simulation.scheduler.counters.steps > patience
    simulation.drain()


@pytest.mark.reliability("P-04")
def test_an_aged_request_is_ahead_of_every_priority() -> None:
    simulation = Simulation(replace(ROOMY, max_rows=1, max_waiting_steps=5))
    simulation.ask("a", prompt(2), 10)
    simulation.ask("old", prompt(2, 1), 2, priority=100)
    for _ in range(9):
        simulation.step()
    simulation.ask("urgent", prompt(2, 2), 2, priority=-100)
    old = sequence_of(simulation, "old")
    simulation.step()
    simulation.step()
    assert running(simulation) == ["old"] and old.turn.priority == AGED_PRIORITY
    simulation.drain()


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_waiting_running_and_in_flight(depth: int) -> None:
    simulation = Simulation(replace(ROOMY, max_rows=2, depth=depth))
    for name in "abc":
        simulation.ask(name, prompt(6, ord(name)), 12)
    simulation.step()
    simulation.abort("c")                                # waiting
    simulation.abort("a")                                # running, and in flight with depth
    assert simulation.scheduler.num_running == 1 and simulation.scheduler.num_waiting == 0
    simulation.abort("c")                                # again: unknown by now
    assert not simulation.scheduler.abort("nobody")
    if depth:
        assert simulation.manager.pool.num_releasing == 2, "a's blocks wait for the step in flight"
    simulation.drain()
    assert simulation.ends == {("a", 0): "abort", ("b", 0): "length", ("c", 0): "abort"}


def test_aborted_requests_leave_the_queue() -> None:
    """Clients that come and go while one request has the only row: memory is bounded by those who still wait."""
    simulation = Simulation(replace(ROOMY, max_rows=1))
    simulation.ask("runs", prompt(5), 40, ignore_eos=True)
    simulation.step()
    simulation.ask("waits", prompt(5, 9), 2)
    for number in range(200):
        simulation.ask(f"gone{number}", prompt(5, 20), 2)
        simulation.abort(f"gone{number}")
        assert len(simulation.scheduler._waiting.heap) <= 2 and simulation.scheduler.num_waiting == 1
    for number in range(50):
        simulation.ask(f"later{number}", prompt(5, 20), 2)
    for number in range(50):
        simulation.abort(f"later{number}")
    assert len(simulation.scheduler._waiting.heap) <= 2
    simulation.drain()
    assert simulation.ends["waits", 0] == "length"


def test_abort_one_of_n() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(6), 12, n=3)
    for _ in range(3):
        simulation.step()
    simulation.abort("a", 1)
    assert simulation.scheduler.num_running == 2
    simulation.drain()
    assert [simulation.ends["a", index] for index in range(3)] == ["length", "abort", "length"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_of_a_preempted_request(depth: int) -> None:
    simulation = Simulation(replace(TIGHT, depth=depth))
    simulation.ask("a", prompt(20, 1), 20)
    simulation.ask("b", prompt(8, 2), 30)
    while not simulation.scheduler.counters.preemptions:
        simulation.step()
    simulation.abort("b")
    simulation.drain()


def test_a_stop_token_ends_an_answer() -> None:
    answer = expected_answer(prompt(5), 20)
    eos, own = answer[3], answer[1]
    simulation = Simulation(replace(ROOMY, eos=frozenset({eos})))
    simulation.ask("eos", prompt(5), 20)
    simulation.ask("own", prompt(5), 20, stop_token_ids=[own])
    simulation.ask("ignored", prompt(5), 6, ignore_eos=True)
    simulation.drain()
    ends = {delta.request_id: (delta.finish_reason, delta.stop_reason) for delta in simulation.deltas if delta.finish_reason}
    assert ends == {"eos": ("stop", None), "own": ("stop", own), "ignored": ("length", None)}
    assert simulation.answers["eos", 0] == answer[:4] and simulation.answers["own", 0] == answer[:2]


@pytest.mark.parametrize("max_tokens", [None, 100, 7, 1])
def test_an_answer_ends_at_its_limit(max_tokens: int | None) -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(40), max_tokens)          # type: ignore[arg-type]
    simulation.drain()
    assert len(simulation.answers["a", 0]) == min(8, max_tokens or 8) and simulation.ends["a", 0] == "length"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_sampled_after_a_stop_are_dropped(depth: int) -> None:
    stop = expected_answer(prompt(5), 20)[3]
    simulation = Simulation(replace(ROOMY, depth=depth))
    simulation.ask("a", prompt(5), 20, stop_token_ids=[stop])
    simulation.drain()
    assert simulation.scheduler.counters.late_tokens == depth
    simulation.ask("b", prompt(5, 1), 4)                 # a length is known in advance: nothing is computed beyond it
    simulation.drain()
    assert simulation.scheduler.counters.late_tokens == depth


@pytest.mark.reliability("R-07")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_failed_row_fails_alone(depth: int) -> None:
    """The other one is untouched, and nothing of the failed one is found again, not even its first chunk."""
    answer, other = expected_answer(prompt(20), 20), expected_answer(prompt(20, 1), 20)
    bad = next(token for token in answer[2:] if token not in other and token not in answer[:2])
    simulation = Simulation(replace(ROOMY, depth=depth, fail_tokens=(bad,), max_step_tokens=24))
    simulation.ask("bad", prompt(20), 20)
    simulation.ask("good", prompt(20, 1), 20)
    simulation.drain()
    assert simulation.ends == {("bad", 0): "error", ("good", 0): "length"}
    assert simulation.answers["bad", 0] == answer[: answer.index(bad)]
    assert [delta.error for delta in simulation.deltas if delta.finish_reason == "error"] == ["planted"]
    simulation.ask("again", prompt(20), 1)
    simulation.drain()
    assert simulation.deltas[-1].num_cached_tokens == 0


def test_an_impossible_request_is_refused_and_disturbs_nobody() -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(5), 5)
    for tokens, message in (([], "the prompt is empty"), (prompt(48), "48 tokens, which leaves no room")):
        with pytest.raises(BadRequest, match=message):
            simulation.scheduler.add(Request("b", tokens, SamplingParams()))
    with pytest.raises(BadRequest, match="'a' is already running"):
        simulation.scheduler.add(Request("a", [1], SamplingParams()))
    simulation.drain()
    simulation.ask("a", prompt(5), 5)                    # the id is free again
    simulation.drain()


# -- steps in flight ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_planning_ahead_costs_no_steps(depth: int) -> None:
    simulation = Simulation(replace(ROOMY, depth=depth))
    simulation.ask("a", prompt(5), 10)
    simulation.drain()
    assert simulation.scheduler.counters.steps == 10


def test_a_result_out_of_order_is_an_error() -> None:
    simulation = Simulation(replace(ROOMY, depth=2))
    simulation.ask("a", prompt(5), 10)
    simulation.step()
    simulation.step()
    simulation.runner.collect()
    with pytest.raises(AssertionError, match="result of step 2 arrived, step 1 is the oldest"):
        simulation.scheduler.update(simulation.runner.collect())


@pytest.mark.parametrize("field", ["lengths", "num_new"])
def test_a_result_that_does_not_fit_its_plan_is_an_error(field: str) -> None:
    simulation = Simulation(ROOMY)
    simulation.ask("a", prompt(5), 3)
    simulation.runner.submit(simulation.scheduler.schedule())
    simulation.runner.sample()
    result = simulation.runner.collect()
    setattr(result, field, getattr(result, field) + 1)
    with pytest.raises(AssertionError, match="step 1 computed or sampled something else than was planned"):
        simulation.scheduler.update(result)


def test_an_idle_plan_is_not_booked() -> None:
    simulation = Simulation(ROOMY)
    plan = simulation.scheduler.schedule()
    assert plan.total_tokens == 0 and simulation.scheduler.num_in_flight == 0 and not simulation.scheduler.has_work
    simulation.ask("a", prompt(2), 1)
    assert simulation.step().step == 1, "numbers are not spent on it"


def test_a_step_of_an_earlier_stay_commits_nothing() -> None:
    """Preempted in the middle of its prompt and back while an old chunk is in flight: that chunk's blocks are gone."""
    simulation = Simulation(replace(ROOMY, depth=2, max_step_tokens=8))
    simulation.ask("a", prompt(30, 1), 2, prompt_logprobs=0)
    for _ in range(2):
        plan = simulation.scheduler.schedule()
        simulation.runner.submit(plan)
        simulation.runner.sample()
    scheduler = simulation.scheduler
    scheduler._preempt(sequence_of(simulation, "a"))
    scheduler.limits.max_step_tokens = 4
    simulation.step()                                    # back in the same row; collects the first old chunk
    simulation.check_index()
    again = sequence_of(simulation, "a")
    assert again.row >= 0 and again.blocks is not None
    scheduler._running.publish()                         # as the next plan would begin
    assert again.blocks.committed == 4 // simulation.setup.block_size
    simulation.drain()                                   # and its prompt log-probabilities come whole, once
    assert scheduler.counters.preemptions == 1 and scheduler.counters.wasted_tokens == 16


@pytest.mark.parametrize("leave", ["abort", "preempt"])
def test_blocks_of_a_step_that_may_have_failed_are_not_found(leave: str) -> None:
    """Whoever leaves while its prompt is being computed takes what was published of it along."""
    simulation = Simulation(replace(ROOMY, max_step_tokens=32, depth=1))
    simulation.ask("a", prompt(20, 1), 3)
    plan = simulation.scheduler.schedule()
    simulation.scheduler._running.publish()              # as somebody else's arrival would make it
    assert len(simulation.manager.cache) == 5
    if leave == "abort":
        simulation.scheduler.abort("a")
    else:
        simulation.scheduler._preempt(sequence_of(simulation, "a"))
    assert len(plan.rows) == 1 and not simulation.manager.cache._owner


def test_answers_wait_until_their_prompt_is_computed() -> None:
    """The n answers share the first one's blocks whole: the last of a chunk may be half full."""
    simulation = Simulation(replace(ROOMY, prefix_caching=False, max_step_tokens=10))
    simulation.ask("a", prompt(17, 1), 3, n=2)
    simulation.ask("b", prompt(9, 2), 3)
    assert simulation.step().num_tokens.tolist() == [10]
    simulation.scheduler.limits.max_step_tokens = 16
    assert simulation.step().num_tokens.tolist() == [7, 9]       # the leader's rest, and b before the second answer
    simulation.drain()


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    """Blocks can be shared from the moment a step that computes them is planned, by that very step."""
    simulation = Simulation(replace(ROOMY, max_step_tokens=200, max_rows=8))
    stem = prompt(40, 1)
    for name in "abcd":
        simulation.ask(name, [*stem, *prompt(3, ord(name))], 3)
    plan = simulation.step()
    block = simulation.setup.block_size
    assert plan.num_tokens.tolist() == [43] + [43 - 40 // block * block] * 3
    simulation.drain()
    assert simulation.manager.counters.hit_tokens == 3 * (40 // block * block)


def test_nobody_sees_what_another_row_of_single_tokens_writes() -> None:
    """In blocks of one token even a single one fills a block. Where every row computes one, a kernel writes and attends in
    one go, so that block is for later steps."""
    simulation = Simulation(replace(ROOMY, block_size=1))
    stem = prompt(8, 1)
    simulation.ask("a", stem[:5], 1)
    simulation.step()
    for length in (6, 7, 8):
        simulation.ask(str(length), stem[:length], 6)
    assert numbers(simulation.step()) == [1, 2, 1], "6 is alone with its token; 8 may have those of 7, which has two"
    simulation.drain()


def test_a_preempted_sequence_waits_for_its_promised_token() -> None:
    simulation = Simulation(replace(ROOMY, depth=2))
    simulation.ask("a", prompt(5), 12)
    simulation.ask("b", prompt(5, 1), 12)
    for _ in range(4):
        simulation.step()
    victim = sequence_of(simulation, "b")
    simulation.scheduler._preempt(victim)
    assert victim.num_promised == 2
    for promised in (1, 0):
        simulation.step()
        assert (victim.num_promised, victim.row) == (promised, -1)
    simulation.step()
    assert victim.row >= 0
    simulation.drain()


def test_answers_wait_for_a_preempted_leader() -> None:
    """Both are preempted; the prompt comes back in chunks, and is shared when it is whole."""
    simulation = Simulation(replace(ROOMY, prefix_caching=False))
    simulation.ask("a", prompt(30), 16, n=2)
    for _ in range(8):
        simulation.step()
    for index in (1, 0):
        simulation.scheduler._preempt(sequence_of(simulation, "a", index))
    forked = simulation.manager.counters.forked_blocks
    assert [len(simulation.step().rows) for _ in range(3)] == [1, 1, 1]
    simulation.drain()
    assert simulation.manager.counters.forked_blocks == forked + 7


@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_logprobs_survive_a_preemption_in_the_prompt(depth: int) -> None:
    simulation = Simulation(replace(ROOMY, depth=depth, max_step_tokens=8))
    simulation.ask("a", prompt(30), 4, prompt_logprobs=0)
    for _ in range(3):
        simulation.step()
    simulation.scheduler._preempt(sequence_of(simulation, "a"))
    simulation.drain()
    assert simulation.prompt_logprobs["a", 0] == prompt(30)[1:]


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_prompt_logprobs_leave_with_a_token_in_flight_at_a_preemption(max_tokens: int) -> None:
    """That token may be the last, and then nothing is computed again."""
    simulation = Simulation(replace(ROOMY, depth=2, max_step_tokens=8))
    simulation.ask("a", prompt(30), max_tokens, prompt_logprobs=0)
    for _ in range(4):
        simulation.step()
    assert sequence_of(simulation, "a").prefill.done and simulation.scheduler.num_in_flight == 2
    simulation.scheduler._preempt(sequence_of(simulation, "a"))
    simulation.drain()
    assert simulation.prompt_logprobs["a", 0] == prompt(30)[1:]


# -- the off versions --------------------------------------------------------------------------------------------------


def test_a_static_batch_ends_whole_before_the_next() -> None:
    simulation = Simulation(replace(ROOMY, static=True, max_rows=2))
    for name, length in (("a", 2), ("b", 8), ("c", 3), ("d", 3)):
        simulation.ask(name, prompt(3, ord(name)), length)
    batches = []
    while simulation.scheduler.has_work:
        simulation.step()
        if running(simulation) not in batches and running(simulation):
            batches.append(running(simulation))
    simulation.check_end()
    assert batches == [["a", "b"], ["b"], ["c", "d"]] and simulation.scheduler.counters.joins == 0


def test_a_static_batch_fills_while_prompts_take_several_steps() -> None:
    """Budget 16: three prompts of 14 need three steps. Nobody joins once one has left, or who came after it was full."""
    simulation = Simulation(replace(ROOMY, static=True, max_rows=3, max_step_tokens=16, prefix_caching=False))
    for name, length in (("a", 6), ("b", 6), ("c", 6), ("d", 1)):
        simulation.ask(name, prompt(14, ord(name)), length)
    for _ in range(3):
        simulation.step()
    assert running(simulation) == ["a", "b", "c"]
    simulation.drain()
    assert simulation.scheduler.counters.joins == 0
    short = Simulation(replace(ROOMY, static=True, max_rows=3, max_step_tokens=16, prefix_caching=False))
    for name, length in (("a", 1), ("b", 6), ("c", 6)):
        short.ask(name, prompt(14, ord(name)), length)
    short.step()
    short.step()
    assert running(short) == ["b"], "a has left, so c does not take its place"
    short.drain()
    assert short.scheduler.counters.joins == 0


def test_all_n_answers_are_in_one_static_batch() -> None:
    simulation = Simulation(replace(ROOMY, static=True, max_rows=4))
    simulation.ask("a", prompt(10), 8, n=3)
    simulation.ask("b", prompt(5, 40), 8)
    simulation.step()
    simulation.step()
    assert sorted(running(simulation)) == ["a", "a", "a", "b"]
    simulation.drain()
    assert simulation.scheduler.counters.joins == 0


def test_contiguous_reservations_limit_who_runs() -> None:
    """A slab is 12 blocks for the longest request; 40 blocks are three slabs, whatever the requests need."""
    simulation = Simulation(replace(ROOMY, num_blocks=40, contiguous=True, prefix_caching=False))
    for name in "abcde":
        simulation.ask(name, prompt(3, ord(name)), 4)
    assert len(simulation.step().rows) == 3
    assert all(table.tolist() == list(range(table[0], table[0] + 12)) for table in _tables(simulation))
    simulation.drain()
    counters = simulation.scheduler.counters
    paged = Simulation(replace(ROOMY, num_blocks=40, prefix_caching=False))
    for name in "abcde":
        paged.ask(name, prompt(3, ord(name)), 4)
    paged.drain()
    assert counters.used_slots / counters.held_slots < 0.2
    assert paged.scheduler.counters.used_slots / paged.scheduler.counters.held_slots > 0.5


def _tables(simulation: Simulation) -> Iterator[np.ndarray]:
    for added in snapshot_of(simulation.scheduler).rows:
        yield from added.block_ids


def test_a_snapshot_is_enough_to_go_on_elsewhere() -> None:
    """A fresh device that computes the snapshot's rows again samples the same next tokens."""
    simulation = Simulation(ROOMY)
    for name in "abc":
        simulation.ask(name, prompt(5 + ord(name) % 3, ord(name)), 12, seed=ord(name))
    for _ in range(5):
        simulation.step()
    snapshot = snapshot_of(simulation.scheduler)
    assert [row.num_computed for row in snapshot.rows] == [len(row.token_ids) - 1 for row in snapshot.rows]
    assert snapshot.step == 5 and [row.seed for row in snapshot.rows] == [ord(name) for name in "abc"]
    fresh = FakeRunner(simulation.groups, simulation.setup.num_blocks)
    none = np.zeros(0, np.int32)
    rows = np.array([row.row for row in snapshot.rows], np.int32)
    lengths = np.array([len(row.token_ids) for row in snapshot.rows], np.int32)
    wants = np.full(len(rows), Want.TOKEN, np.int8)
    appended = [                                         # the newest token has no block yet if it begins one
        (0, row.row, len(row.block_ids[0]), 100 + row.row)
        for row in snapshot.rows
        if len(row.token_ids) > 4 * len(row.block_ids[0])
    ]
    added = [replace(row, num_computed=0) for row in snapshot.rows]
    fresh.submit(StepPlan(1, none, added, np.array(appended, np.int32).reshape(-1, 4), rows, lengths, wants))
    fresh.sample()
    told = {name: len(simulation.answers[name, 0]) for name in "abc"}
    assert fresh.collect().tokens[:, 0].tolist() == [simulation.expected((name, 0))[0][told[name]] for name in "abc"]


# -- everything at once ------------------------------------------------------------------------------------------------


@pytest.mark.reliability("P-02", "P-14")
@pytest.mark.parametrize("seeds", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETUPS)
def test_random_traffic(name: str, seeds: int) -> None:
    """Safety and answers are checked at every step by the simulation; here also that the setup was put to the test."""
    setup = SETUPS[name]
    runs = [run_random(replace(setup, depth=depth), seed) for depth in range(3) for seed in range(depth, depth + seeds)]
    preemptions = sum(run.scheduler.counters.preemptions for run in runs)
    assert setup.contiguous == (preemptions == 0) or name in ("all_windows", "few_tokens"), f"{preemptions} preemptions"
    if setup.prefix_caching:
        assert sum(run.manager.counters.hit_tokens for run in runs) > 0
    if not setup.contiguous and any(setup.windows):
        assert sum(run.manager.counters.window_freed for run in runs) > 0


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts and steps in the order hypothesis likes least."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), depth=st.integers(0, 2))
    def set_up(self, name: str, depth: int) -> None:
        self.simulation = Simulation(replace(SETUPS[name], depth=depth))
        self.count = 0

    @precondition(lambda self: self.count < 10)
    @rule(seed=st.integers(0, 10_000))
    def arrive(self, seed: int) -> None:
        self.count += 1
        stems = [prompt(24), prompt(14, 3)]
        self.simulation.add(random_request(random.Random(seed), f"r{self.count}", self.simulation.setup, stems))

    @precondition(lambda self: self.simulation.open)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        name, index = data.draw(st.sampled_from(sorted(self.simulation.open)))
        self.simulation.abort(name, None if whole else index)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestScheduler = pytest.mark.reliability("P-02")(SchedulerMachine.TestCase)
TestScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


def _interleavings(num_events: int, requests: int) -> Iterator[tuple[str, ...]]:
    """All sequences of arrivals (in order), aborts of requests that arrived, and steps."""

    def extend(events: tuple[str, ...], arrived: int, aborted: frozenset[int]) -> Iterator[tuple[str, ...]]:
        if len(events) == num_events:
            yield events
            return
        yield from extend((*events, "step"), arrived, aborted)
        if arrived < requests:
            yield from extend((*events, "arrive"), arrived + 1, aborted)
        for number in range(arrived):
            if number not in aborted:
                yield from extend((*events, f"abort {number}"), arrived, aborted | {number})

    yield from extend(("arrive",), 1, frozenset())


@pytest.mark.reliability("P-03")
@pytest.mark.parametrize(("depth", "num_events", "orders"), [
    (1, 7, 568), *(pytest.param(depth, 8, 1_254, marks=pytest.mark.slow) for depth in (0, 1)),
])
def test_all_interleavings_of_three_requests(depth: int, num_events: int, orders: int) -> None:
    """Small scope, whole: every order of so many events on five blocks, where two requests do not fit at once."""
    setup = Setup(
        num_blocks=6, block_size=2, max_rows=2, max_step_tokens=4, max_model_len=10, depth=depth, eos=frozenset()
    )
    asked = [(prompt(3, 1), 6, 0, 1), (prompt(3, 1) + [9, 9], 4, 1, 2), (prompt(6, 5), 3, 0, 1)]
    traces = preemptions = hits = 0
    for events in _interleavings(num_events, len(asked)):
        simulation = Simulation(setup)
        arrived = 0
        for event in events:
            if event == "step":
                simulation.step()
            elif event == "arrive":
                tokens, max_tokens, priority, n = asked[arrived]
                simulation.ask(str(arrived), tokens, max_tokens, priority=priority, n=n)
                arrived += 1
            else:
                simulation.abort(event.split()[1])
        simulation.drain(bound=80)
        traces += 1
        preemptions += simulation.scheduler.counters.preemptions
        hits += simulation.manager.counters.hit_tokens
    assert traces == orders and preemptions > orders / 5 and hits > orders / 5

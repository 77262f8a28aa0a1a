"""The model-based tests of the host half at their bars: the same machines and the same simulation as per commit, for longer.
[P-01, P-02, P-03]"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.stateful import RuleBasedStateMachine
from test_block_pool import PoolMachine
from test_kv_manager import ManagerMachine
from test_scheduler import SETUPS, Setup, Simulation, _interleavings, prompt, run_random

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# -- P-01: 200 runs of 5,000 operations --------------------------------------------------------------------------------


class Drawn:
    """Stands in for st.data(). hypothesis ends a run when it has drawn 8 KiB, some hundred operations; here each draw has
    as much as it likes. Nothing is shrunk: per commit the same machines run under hypothesis itself."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return ConjectureData(random=self.rng).draw(strategy)

    def arguments(self, rule: Any) -> dict[str, Any]:
        return {name: self if name == "data" else self.draw(each) for name, each in rule.arguments.items()}


def long_run(machine: RuleBasedStateMachine, rng: random.Random, operations: int) -> Counter[str]:
    """Operations that are possible, at random; each run prefers other ones, so that some run full and others empty."""
    drawn = Drawn(rng)
    done = Counter[str]()
    for rule in machine._initialize_rules_to_run:
        rule.function(machine, **drawn.arguments(rule))
    weights = {rule.function.__name__: rng.choice([1, 2, 4]) for rule in machine.rules}
    for _ in range(operations):
        possible = [rule for rule in machine.rules if all(condition(machine) for condition in rule.preconditions)]
        (rule,) = rng.choices(possible, [weights[each.function.__name__] for each in possible])
        rule.function(machine, **drawn.arguments(rule))
        done[rule.function.__name__] += 1
        for invariant in machine.invariants:
            invariant.function(machine)
    machine.teardown()
    return done


@pytest.mark.reliability("P-01b")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("machine", [PoolMachine, ManagerMachine])
def test_blocks_against_a_naive_model(machine: type[RuleBasedStateMachine], part: int) -> None:
    """[P-01] Four times 50 runs of 5,000 operations; the model is compared after each."""
    done = Counter[str]()
    for run in range(50):
        done += long_run(machine(), random.Random(f"{machine.__name__}-{part}-{run}"), 5_000)
    assert sum(done.values()) == 50 * 5_000
    assert min(done[rule.function.__name__] for rule in machine().rules) > 5_000, done


# -- P-02: 2,000 traces ------------------------------------------------------------------------------------------------


@pytest.mark.reliability("P-02b")
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_traces_of_traffic(part: int) -> None:
    """The simulation checks budgets, double scheduling, lost requests, answers and that each ends in time, at every step."""
    seeds = -(-500 // (3 * len(SETUPS)))
    traces = 0
    for setup in SETUPS.values():
        for depth in range(3):
            for seed in range(seeds):
                run_random(replace(setup, depth=depth), 10_000 * (1 + part) + seed)
                traces += 1
    assert traces >= 500


# -- P-03: all of a small scope ----------------------------------------------------------------------------------------

PARTS = 4


@pytest.mark.reliability("P-03b")
@pytest.mark.parametrize("part", range(PARTS))
def test_all_interleavings_of_eighteen_events(part: int) -> None:
    """[P-03] Three requests of six events each, on four blocks, planned a step ahead as the engine does: 135,219 traces."""
    setup = Setup(num_blocks=5, block_size=2, max_rows=2, max_step_tokens=4, max_model_len=8, depth=1, eos=frozenset())
    asked = [(prompt(3, 1), 5, 0, 1), ([*prompt(3, 1), 9], 4, 1, 2), (prompt(5, 5), 3, 0, 1)]
    assert interleaved(setup, asked, 18, part) == len(range(part, 135_219, PARTS))


@pytest.mark.reliability("P-03b")
@pytest.mark.parametrize("depth", [0, 1])
def test_all_interleavings_of_twelve_events(depth: int) -> None:
    """[P-03] Five blocks and longer answers, planned ahead or not: 13,608 traces each."""
    setup = Setup(
        num_blocks=6, block_size=2, max_rows=2, max_step_tokens=4, max_model_len=10, depth=depth, eos=frozenset()
    )
    asked = [(prompt(3, 1), 6, 0, 1), (prompt(3, 1) + [9, 9], 4, 1, 2), (prompt(6, 5), 3, 0, 1)]
    assert sum(interleaved(setup, asked, 12, part) for part in range(PARTS)) == 13_608


def interleaved(setup: Setup, asked: list[tuple[list[int], int, int, int]], num_events: int, part: int) -> int:
    """Every PARTS-th of all interleavings, from number `part` on; how many there were."""
    traces = preemptions = hits = 0
    for number, events in enumerate(_interleavings(num_events, len(asked))):
        if number % PARTS != part:
            continue
        simulation, arrived = Simulation(setup), 0
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
    assert preemptions > traces // 10 and hits > traces // 10, "so little happened that it proves nothing"
    return traces

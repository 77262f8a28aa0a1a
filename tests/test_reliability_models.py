"""The model-based tests of the host half at their bars: the same machines and the same simulation as per commit, for longer.
[P-01, P-02, P-03]"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from test_block_pool import PoolMachine
from test_kv_manager import ManagerMachine
from test_scheduler import SETUPS, Setup, Simulation, _interleavings, prompt, run_random

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.mark.parametrize("machine", [PoolMachine, ManagerMachine])
def test_blocks_against_a_naive_model(machine: type) -> None:
    run_state_machine_as_test(       # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=200, stateful_step_count=150, deadline=None, derandomize=True)
    )


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


@pytest.mark.parametrize("depth", [0, 1])
def test_all_interleavings_of_twelve_events(depth: int) -> None:
    setup = Setup(
        num_blocks=6, block_size=2, max_rows=2, max_step_tokens=4, max_model_len=10, depth=depth, eos=frozenset()
    )
    asked = [(prompt(3, 1), 6, 0, 1), (prompt(3, 1) + [9, 9], 4, 1, 2), (prompt(6, 5), 3, 0, 1)]
    traces = 0
    for events in _interleavings(12, len(asked)):
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
    assert traces == 13_608

"""The rule: what is predicted, what is learned from answers, which replica is chosen. All clocks are the test's."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ridgeline.engine.replicas.fleet_report import FEWEST
from ridgeline.engine.replicas.learned_times import Line, Pace
from ridgeline.engine.replicas.policies import PASSED_SECONDS, Choice
from ridgeline.engine.replicas.replica_load import FEW, Habits, ReplicaLoad, Ticket, Usage
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt
from ridgeline.route.prompt_text import prompt_of
from ridgeline.route.simulation.simulated_fleet import Machine, SimulatedFleet
from ridgeline.route.simulation.simulated_traffic import conversations, shared_prefixes

PACE = Pace(0.0, 0.001, 0.01, 0.002)


def fleet(policy: str, count: int) -> Choice:
    habits = Habits(bytes_per_token=4.0, output_tokens=100.0)
    return Choice(policy, [ReplicaLoad(habits) for _ in range(count)])


def prompt(name: str, tokens: int, streams: bool = True) -> RoutedPrompt:
    return prompt_of({"prompt": (name * 4 * tokens)[: 4 * tokens], "stream": streams})


def taught(load: ReplicaLoad, pace: Pace) -> None:
    for number in range(60):
        load.times.prefill.observe(100.0 * (number % 7), pace.prefill(100.0 * (number % 7)))
        load.times.decode.observe(number % 5, pace.step(number % 5))


def test_an_answer_in_one_piece_leaves_nothing_of_its_prompt() -> None:
    """It was held until it should have begun by the prediction: minutes for a long one, and a megabyte and a half of each."""
    load = fleet("predicted", 1).loads[0]
    texts = [prompt("x", 1000, streams=False) for _ in range(500)]
    held = [sys.getrefcount(each) for each in texts]
    for number in range(len(texts)):
        load.leave(load.send(texts[number], float(number), Pace(1e6, 0.0, 0.0, 0.0)))
    assert [sys.getrefcount(each) for each in texts] == held
    assert not load.waiting and not load.running and len(load.silent) <= FEW + 2
    first = load.send(texts[0], 1e5, Pace(5.0, 0.0, 0.0, 0.0))
    load.predict(texts[0], 1e9, PACE)
    assert list(load.running.values()) == [first] and not load.silent


@pytest.mark.parametrize("odd", [(10, 25), (3_000_000, 300)], ids=["hi", "a picture"])
def test_the_length_of_prompts_is_learned_from_those_that_have_one(odd: tuple[int, int]) -> None:
    """Of a picture's bytes few tokens are made, and of a greeting more than it has letters: long texts were misjudged tenfold."""
    habits = Habits()
    for number in range(400):
        size, tokens = (12_000, 3_000) if number % 4 == 0 else odd
        habits.observe(RoutedPrompt(b"x", 0, [], num_unkept=size - 1), Usage(tokens, 10))
    assert 3.5 < habits.bytes_per_token < 8.0


def test_a_line_is_learned_and_follows_a_change() -> None:
    line = Line(is_proportional=True)
    for number in range(100):
        line.observe(10 * (number % 9), 0.01 + 2e-4 * 10 * (number % 9))
    assert line.fitted() == pytest.approx((0.01, 2e-4))
    for number in range(300):
        line.observe(10 * (number % 9), 0.05 + 1e-3 * 10 * (number % 9))
    assert line.fitted() == pytest.approx((0.05, 1e-3), rel=0.02)


@pytest.mark.parametrize("points", [[(5, 1.0)], [(5, 1.0), (5, 1.0)], [(1, 3.0), (9, 1.0)], [(0, 2.0)], [(10, 0.0), (20, 5.0)]])
def test_a_line_never_predicts_less_than_nothing(points: list[tuple[float, float]]) -> None:
    for proportional in (True, False):
        line = Line(proportional)
        for x, y in points:
            line.observe(x, y)
        assert min(line.fitted()) >= 0


def test_a_replica_that_ran_one_request_at_a_time_may_get_a_second() -> None:
    """No slope is visible then: prompts cost by the token, and a second row is taken to be free."""
    load = fleet("predicted", 1).loads[0]
    for _ in range(5):
        load.times.decode.observe(1, 0.006)
        load.times.prefill.observe(1000, 0.03)
    pace = load.times.pace(Pace())
    assert pace.step(2) == pytest.approx(0.006) and pace.prefill(2000) == pytest.approx(0.06)


def test_the_equation() -> None:
    load = fleet("predicted", 1).loads[0]
    taught(load, PACE)
    waiting = load.send(prompt("a", 1000), 0.0, PACE)
    running = [load.send(prompt(each, 100), 0.0, PACE) for each in "bc"]
    for ticket in running:
        load.first_token(ticket, 0.0)
    predicted = load.predict(prompt("d", 500), 0.25, PACE)
    assert waiting.predicted.uncached == pytest.approx(1000)
    assert predicted.wait == pytest.approx(1.0 - 0.25, rel=1e-3)         # 1000 tokens, a quarter of a second of them done
    assert predicted.prefill == pytest.approx(0.5, rel=1e-3)
    assert predicted.decode == pytest.approx(100 * (0.01 + 0.002 * 4), rel=1e-3)
    assert predicted.effect == pytest.approx(3 * 0.5 + 3 * 100 * 0.002, rel=1e-3)      # the one that waits counts, too
    busy = load.predict(prompt("d", 500), 0.25, PACE, coming=4.0)
    assert busy.effect == pytest.approx(predicted.effect + 4 * 0.5, rel=1e-3)          # so do those that will come
    again = load.predict(prompt("a", 1000), 0.25, PACE)
    assert again.cached == pytest.approx(1000, abs=32) and again.prefill < 0.05


def test_a_choice_does_not_look_at_every_request_that_waits() -> None:
    """A thousand texts may be sent at once: the work for each must not grow with those before it."""

    class Counted(dict[int, Ticket]):
        looked = 0

        def values(self) -> Any:
            for each in super().values():
                Counted.looked += 1
                yield each

    choice = fleet("predicted", 2)
    for load in choice.loads:
        load.waiting = Counted()
    for number in range(200):
        one = prompt(chr(ord("a") + number % 26), 100, streams=number % 2 == 0)
        choice.send(choice.choose(one, 0.0, range(2)), one, 0.0)
    assert sum(load.pending for load in choice.loads) == 200 and Counted.looked < 10 * 200


def test_what_waits_is_counted_until_it_begins_or_leaves() -> None:
    load = fleet("predicted", 1).loads[0]
    taught(load, PACE)
    tickets = [load.send(prompt(each, 1000, streams=each != "b"), 0.0, PACE) for each in "abc"]
    assert load.predict(prompt("d", 10), 0.0, PACE).wait == pytest.approx(3.0, rel=1e-3)
    load.first_token(tickets[0], 1.0)
    assert load.predict(prompt("d", 10), 1.0, PACE).wait == pytest.approx(2.0, rel=1e-3)
    load.leave(tickets[2])
    assert load.predict(prompt("d", 10), 1.0, PACE).wait == pytest.approx(1.0, rel=1e-3)
    assert load.predict(prompt("d", 10), 9.0, PACE).wait == 0.0 and len(load.running) == 2     # "b" was predicted to begin
    load.leave(tickets[1])
    assert (load.waiting_tokens, load.pending) == (0.0, 1)


def test_a_busy_fleet_does_not_compute_a_prefix_again_because_a_replica_is_free_for_a_moment() -> None:
    def chosen(others: int) -> int:
        choice = fleet("predicted", 4)
        for load in choice.loads:
            taught(load, PACE)
        choice.loads[0].send(prompt("a", 2000), 0.0, PACE)
        for number in range(4 * others):                     # the last replica has nothing to do
            choice.loads[number % 3].send(prompt(chr(ord("b") + number), 500), 0.0, PACE)
        return choice.choose(prompt("a", 2000), 1.9, range(4))

    assert chosen(0) == 0 and chosen(1) == 0 and chosen(4) == 0


def test_the_cached_prefix_attracts_until_the_queue_costs_more() -> None:
    choice = fleet("predicted", 2)
    for load in choice.loads:
        taught(load, PACE)
    long = prompt("x", 2000)
    home = choice.choose(long, 0.0, [0, 1])
    ticket = choice.send(home, long, 0.0)
    choice.loads[home].first_token(ticket, 2.0)
    choice.loads[home].finish(ticket, 3.0, Usage(2000, 100, 0))
    assert [choice.choose(long, 4.0, [0, 1]) for _ in range(4)] == [home] * 4
    assert {choice.choose(prompt("new", 50), 4.0, [0, 1]) for _ in range(4)} == {0, 1}       # no prefix: equal ones take turns
    for name in "abc":                                                   # three prompts of 2 s each wait there
        choice.send(home, prompt(name, 2000), 4.0)
    assert choice.choose(long, 4.0, [0, 1]) == 1 - home
    assert choice.choose(long, 4.0, [home]) == home                      # the other one is down


def test_a_slower_replica_gets_less() -> None:
    choice = fleet("predicted", 2)
    taught(choice.loads[0], PACE)
    taught(choice.loads[1], Pace(0.0, 0.004, 0.04, 0.008))
    taken = [0, 0]
    for number in range(20):
        chosen = choice.choose(prompt(str(number), 300), 0.0, [0, 1])
        choice.send(chosen, prompt(str(number), 300), 0.0)
        taken[chosen] += 1
    assert taken[0] > 2 * taken[1] > 0


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_replica_that_stood_still_once_is_used_again(is_slow: bool) -> None:
    """By the times of that moment it was slow, and nothing showed otherwise: it got no request until others were full."""
    choice, now, taken = fleet("predicted", 2), 0.0, [list[int](), list[int]()]
    taught(choice.loads[0], Pace(0.0, 0.05, 0.5, 0.02))
    taught(choice.loads[1], PACE)
    for number in range(400):
        asked = prompt(str(number), 100)
        now += 0.5
        chosen = choice.choose(asked, now, [0, 1])
        taken[chosen].append(number)
        ticket, pace = choice.send(chosen, asked, now), Pace(0.0, 0.05, 0.5, 0.02) if is_slow and chosen == 0 else PACE
        choice.loads[chosen].first_token(ticket, now + pace.prefill(100.0))
        choice.loads[chosen].finish(ticket, now + pace.prefill(100.0) + 9 * pace.step(1), Usage(100, 10, 0))
    passed = int(PASSED_SECONDS / 0.5)
    assert passed <= taken[0][0] <= passed + 1
    if is_slow:                                              # one in so many tells whether it is still
        assert len(taken[0]) == len(range(passed, 400, passed + 1))
    else:
        assert len([each for each in taken[0] if each < 2 * passed]) > 0.4 * passed
    assert choice.loads[0].times.decode.weight >= FEWEST     # /fleet can compare it


def test_one_request_finds_out_whether_a_replica_is_still_slow() -> None:
    """Until its answer was complete the replica was taken to be like the others, and got a share of all requests."""
    choice = fleet("predicted", 2)
    taught(choice.loads[0], Pace(0.0, 0.05, 0.5, 0.02))
    taught(choice.loads[1], PACE)
    chosen, open = [], list[Ticket]()
    for number in range(200):                                # of the slow one none is complete within these 20 s
        asked, now = prompt(str(number), 100), PASSED_SECONDS + 0.1 * number
        chosen.append(choice.choose(asked, now, [0, 1]))
        ticket = choice.send(chosen[-1], asked, now)
        open += [ticket] * chosen[-1]
        if len(open) > 4:
            choice.loads[1].leave(open.pop(0))
    assert chosen.count(0) == 1


def test_the_other_policies() -> None:
    turns, fewest = fleet("round-robin", 3), fleet("least-pending", 3)
    some = prompt("x", 100)
    chosen = [turns.choose(some, 0.0, [0, 1, 2]) for _ in range(6)]
    assert chosen[:3] == chosen[3:] and set(chosen) == {0, 1, 2}
    for _ in range(6):
        fewest.send(fewest.choose(some, 0.0, [0, 1, 2]), some, 0.0)
    assert [load.pending for load in fewest.loads] == [2, 2, 2]


def test_times_are_learned_from_answers() -> None:
    """One request at a time on a replica whose times are known: the coefficients are found."""
    load, now = fleet("predicted", 1).loads[0], 0.0
    for number in range(80):
        tokens = 100 + 50 * (number % 5)
        ticket = load.send(prompt(chr(97 + number % 26) + str(number), tokens), now, Pace())
        load.first_token(ticket, now + 0.02 + 0.001 * tokens)
        now += 0.02 + 0.001 * tokens + 9 * 0.03
        load.finish(ticket, now, Usage(tokens, 10, 0))
    pace = load.times.pace(Pace())
    assert (pace.prefill_fixed, pace.prefill_token) == pytest.approx((0.02, 0.001), rel=1e-3)
    assert pace.step(1) == pytest.approx(0.03, rel=1e-3)


def test_a_failed_request_teaches_nothing_and_leaves() -> None:
    load = fleet("predicted", 1).loads[0]
    ticket = load.send(prompt("x", 100), 0.0, PACE)
    load.leave(ticket)
    load.first_token(ticket, 50.0)
    assert load.pending == 0 and not load.times.prefill.weight


def test_an_answer_in_one_piece_runs_when_its_prefill_should_be_over() -> None:
    load = fleet("predicted", 1).loads[0]
    taught(load, PACE)
    ticket = load.send(prompt("x", 1000, streams=False), 0.0, PACE)
    assert load.predict(prompt("y", 10), 0.5, PACE).wait == pytest.approx(0.5, rel=1e-3)
    later = load.predict(prompt("y", 10), 1.5, PACE)
    assert later.wait == 0.0 and len(load.running) == 1 and later.effect > 0
    weight = load.times.prefill.weight
    load.finish(ticket, 3.0, Usage(1000, 100, 0))
    assert load.pending == 0 and load.times.prefill.weight == weight         # when its first token came is not known


@pytest.mark.parametrize("most", [-1, 0, True, 2.5, "9", None])
def test_an_odd_limit_of_the_answer_is_none(most: object) -> None:
    assert prompt_of({"prompt": "x", "max_tokens": most}).most_output is None


def test_an_evicting_replica_corrects_its_tree() -> None:
    load = fleet("predicted", 1).loads[0]
    prompts = [prompt(f"{number}~", 2000) for number in range(8)]
    for number, each in enumerate(prompts):
        ticket = load.send(each, float(number), PACE)
        load.finish(ticket, number + 0.5, Usage(2000, 10, 0))
    assert load.predict(prompts[0], 10.0, PACE).cached == pytest.approx(2000, abs=40)
    ticket = load.send(prompts[3], 10.0, PACE)
    load.finish(ticket, 11.0, Usage(2000, 10, 0))                        # cached_tokens: 0
    assert load.corrections == 1
    assert [load.predict(each, 12.0, PACE).cached > 1900 for each in prompts] == [False] * 3 + [True] * 5
    ticket = load.send(prompts[5], 12.0, PACE)
    load.finish(ticket, 13.0, Usage(2000, 10, 1900))                     # a little less than predicted is no eviction
    assert load.corrections == 1


@pytest.fixture(scope="module")
def talked() -> dict[str, SimulatedFleet]:
    done = {}
    for policy in ("predicted", "least-pending"):
        done[policy] = SimulatedFleet(policy, [Machine()] * 4)
        done[policy].run(conversations(1, 50, 7, system=800, question=200, answer=30))
    return done


def cached(simulated: SimulatedFleet) -> float:
    return sum(each.cached for each in simulated.done) / sum(each.cached_by_one for each in simulated.done)


def late(simulated: SimulatedFleet) -> float:
    times = sorted(each.first - each.arrives for each in simulated.done)
    return times[int(len(times) * 0.99)]


def test_conversations_keep_their_cache(talked: dict[str, SimulatedFleet]) -> None:
    """Simulated: of the cached tokens that one big cache would have, at least 95 %."""
    assert all(len(each.done) == 350 for each in talked.values())
    assert cached(talked["predicted"]) >= 0.95
    assert cached(talked["least-pending"]) < 0.85


def test_first_tokens_are_not_later_than_with_the_fewest_requests(talked: dict[str, SimulatedFleet]) -> None:
    assert late(talked["predicted"]) <= late(talked["least-pending"])


def test_small_caches_are_learned() -> None:
    """Documents for three caches on four replicas: the tree must not promise what was evicted long ago."""
    simulated = SimulatedFleet("predicted", [Machine(blocks=600)] * 4)
    simulated.run(shared_prefixes(1, 30, 300, document=1000, answer=8, rate=4.0))
    assert all(len(load.tree) * 2 <= 2 * 600 + 512 for load in simulated.loads)
    assert sum(load.corrections for load in simulated.loads) > 0

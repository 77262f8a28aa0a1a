"""The controller on a dial: simulated steps with a staircase of times, and drafts that are right with a given chance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from draft_dial import CONTEXT, Dial, best_rate, expected_rate, make_sequence

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts.acceptance import Acceptance, RowRecords, Source, survival
from ridgeline.scheduler.drafts.controller import PROBE_EVERY, Controller
from ridgeline.scheduler.drafts.forced import Forced
from ridgeline.scheduler.drafts.offer import EVIDENCE, Offer, RowByRow
from ridgeline.scheduler.drafts.shape_times import PLAIN, Pace, ShapeTimes
from ridgeline.scheduler.drafts.watch import Watch
from ridgeline.scheduler.drafts.worth import Worth
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, GraphShapes, most_queries

GRAPHS = GraphShapes(256, 8192, MOST_VERIFIED)


def on_a_gpu(rows: int, tokens: int, queries: int, context: int) -> float:
    """About an 8B model on an H200: reading weights first, then compute; not monotone, as measured. Attention is free."""
    graph = GRAPHS.fit(rows, 0, 0) if queries == 1 else GRAPHS.fit_drafts(rows, tokens, queries)
    assert graph is not None
    size = graph.draft_tokens or graph.decodes
    seconds = 3.9e-3 + 2e-6 * size + 12e-6 * max(0, size - 64)
    return 0.93 * seconds if 128 < size < 400 and size % 48 == 0 else seconds


# Milliseconds of a step but its attention, by tokens, with and without drafts; attention for each key that a row has; and the
# share of that which graphs for more than 4 queries of a row add. From the steps of the dial on an H200 at 65d17a21.
DRAFTED = ([4, 16, 96, 128, 256, 384, 512], [4.0, 4.35, 5.3, 5.36, 7.49, 10.36, 13.1])
PLAIN_STEPS = ([1, 8, 32, 64, 128, 256], [3.79, 3.95, 4.21, 4.55, 4.99, 7.3])
KEY_MS, WIDE = 3.3e-5, {1: 0.0, 4: 0.0, 8: 0.27, 16: 0.58}


def as_measured(rows: int, tokens: int, queries: int, context: int) -> float:
    """Llama 3.1 8B on an H200: graphs for wide rows take longer for as many tokens."""
    graph = GRAPHS.fit(rows, 0, 0) if queries == 1 else GRAPHS.fit_drafts(rows, tokens, queries)
    assert graph is not None
    size, table = (graph.draft_tokens, DRAFTED) if queries > 1 else (graph.decodes, PLAIN_STEPS)
    return 1e-3 * (float(np.interp(size, *table)) + rows * context * KEY_MS * (1 + WIDE[graph.queries]))


def size_of(rows: int, tokens: int, queries: int) -> int:
    """Tokens that the step is padded to."""
    graph = GRAPHS.fit(rows, 0, 0) if queries == 1 else GRAPHS.fit_drafts(rows, tokens, queries)
    assert graph is not None
    return graph.draft_tokens or graph.decodes


def flat(rows: int, tokens: int, queries: int, context: int) -> float:
    """Tokens are nearly free."""
    return 5e-3 + 1e-6 * size_of(rows, tokens, queries) + 3e-8 * rows * context


def steep(rows: int, tokens: int, queries: int, context: int) -> float:
    """Each token costs a hundredth of a step from the first on."""
    return 2e-3 + 20e-6 * size_of(rows, tokens, queries) + 1e-8 * rows * context


def cliffs(rows: int, tokens: int, queries: int, context: int) -> float:
    """A step up at 65, at 129 and at 257 tokens."""
    size = size_of(rows, tokens, queries)
    return 3e-3 + 0.5e-3 * (size > 64) + 2.5e-3 * (size > 128) + 4e-3 * (size > 256) + 2e-8 * rows * context


def on_a_cpu(rows: int, tokens: int, queries: int, context: int) -> float:
    """Compute counts from the second token on: 8 tokens take 3.3 steps of one."""
    return 10e-3 * (1 + 0.33 * (tokens - 1))


def careful(tokens: int, keys: int) -> float:
    """A model of step times that is wrong by a third, and overrates what tokens cost."""
    return max(3.0e-3, 20e-6 * tokens) + 2e-8 * keys


def bold(tokens: int, keys: int) -> float:
    """One that thinks drafts are free."""
    return 3.0e-3 + 2e-8 * keys


ALPHAS = (0.0, 0.3, 0.6, 0.9)


@pytest.mark.parametrize("rows", [1, 32, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (8, 64, 128, 256))])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_close_to_the_best_fixed_width_and_never_below_off(rows: int, alpha: float) -> None:
    run = Dial(rows, alpha, on_a_gpu, careful, GRAPHS).run(300)
    assert run.rate >= 0.97 * best_rate(rows, alpha, on_a_gpu)
    assert run.rate >= 0.98 * expected_rate(rows, alpha, 0, on_a_gpu)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("model", [careful, bold])
@pytest.mark.parametrize(("seconds", "context"), [(on_a_gpu, CONTEXT), (as_measured, CONTEXT), (as_measured, 8192)])
def test_every_cell(rows: int, model: object, seconds: object, context: int) -> None:
    for alpha in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        run = Dial(rows, alpha, seconds, model, GRAPHS, context).run(600)    # type: ignore[arg-type]
        assert run.rate >= 0.97 * best_rate(rows, alpha, seconds, context), alpha        # type: ignore[arg-type]
        assert run.rate >= 0.98 * expected_rate(rows, alpha, 0, seconds, context), alpha     # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [flat, steep, cliffs])
@pytest.mark.parametrize("rows", [8, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (64, 256))])
def test_on_other_staircases_too(rows: int, seconds: object) -> None:
    run = Dial(rows, 0.8, seconds, careful, GRAPHS).run(300)     # type: ignore[arg-type]
    assert run.rate >= 0.97 * best_rate(rows, 0.8, seconds)      # type: ignore[arg-type]


class Spells:
    """Times as measured, but slower for a while, as of a GPU whose clock falls: all steps from `first` on, `length` of them."""

    def __init__(self, first: int, length: int) -> None:
        self._slow, self._step = range(first, first + length), 0

    def __call__(self, rows: int, tokens: int, queries: int, context: int) -> float:
        self._step += 1
        return as_measured(rows, tokens, queries, context) * (1.25 if self._step in self._slow else 1.0)


class ManySpells:
    """Slower for ten steps now and then; `drafted`: only steps with drafts are."""

    def __init__(self, seed: int, drafted: bool) -> None:
        self._random, self._left, self._drafted = np.random.default_rng(seed), 0, drafted

    def __call__(self, rows: int, tokens: int, queries: int, context: int) -> float:
        self._left = self._left - 1 if self._left else 10 * (self._random.random() < 1 / 60)
        slow = self._left and (queries > 1 or not self._drafted)
        return as_measured(rows, tokens, queries, context) * (1.28 if slow else 1.0) * self._random.normal(1, 0.01)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(("rows", "alpha"), [
    (64, 0.3), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((128, 0.6), (256, 0.6), (256, 0.3))),
])
def test_spells_that_come_again_and_again_cost_little(rows: int, alpha: float, drafted: bool) -> None:
    """What drafts took in a spell is not believed for long: before, up to 13 in a hundred were lost."""
    run = Dial(rows, alpha, ManySpells(0, drafted), careful, GRAPHS).run(60)
    tokens, time = run.tokens, run.time
    run.run(400)
    longer = 1 + 0.28 * 10 / 70
    off = expected_rate(rows, alpha, 0, as_measured) / (1 if drafted else longer)
    assert (run.tokens - tokens) / (run.time - time) >= 0.95 * max(off, best_rate(rows, alpha, as_measured) / longer)


@pytest.mark.parametrize("alpha", [0.3, 0.6])
@pytest.mark.parametrize("first", [30, *(pytest.param(first, marks=pytest.mark.slow) for first in range(40, 200, 20))])
def test_a_slow_spell_is_forgotten(first: int, alpha: float) -> None:
    """What some shapes took meanwhile is not held against them, nor for them against steps without drafts."""
    run = Dial(256, alpha, Spells(first, 12), careful, GRAPHS).run(450)
    tokens, time = run.tokens, run.time
    run.run(250)
    rate = (run.tokens - tokens) / (run.time - time)
    assert rate >= 0.97 * best_rate(256, alpha, as_measured)
    assert rate >= 0.98 * expected_rate(256, alpha, 0, as_measured)


@pytest.mark.parametrize("alpha", [0.6, 0.8])
def test_rows_with_many_drafts_are_not_paid_for_by_all(alpha: float) -> None:
    """With 64 rows and their drafts equally good, a few rows with a fourth draft would make the whole step slower."""
    run = Dial(64, alpha, as_measured, careful, GRAPHS).run(150)
    assert run.rate >= 0.97 * best_rate(64, alpha, as_measured) and run.widest <= 3


@pytest.mark.parametrize("alpha", [0.0, 0.8, *(pytest.param(alpha, marks=pytest.mark.slow) for alpha in (0.2, 0.95))])
@pytest.mark.parametrize("rows", [1, 8])
def test_on_a_cpu_too(rows: int, alpha: float) -> None:
    run = Dial(rows, alpha, on_a_cpu, bold, None).run(600)
    assert run.rate >= 0.97 * best_rate(rows, alpha, on_a_cpu)
    assert run.rate >= 0.98 * expected_rate(rows, alpha, 0, on_a_cpu)


def test_probes_are_rare_while_drafts_do_not_pay() -> None:
    run = Dial(4, 0.0, on_a_cpu, bold, None).run(300)
    before, steps = run.drafted, 5 * PROBE_EVERY
    run.run(steps)
    assert 1 <= run.drafted - before <= steps // PROBE_EVERY
    assert run.controller.counters.probes >= run.drafted - before


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_where_the_search_costs_more_than_drafts_gain_it_rests(alpha: float) -> None:
    """A small model, whose steps do not hide what the host does: to look for drafts takes a fifth of a step."""
    def small(rows: int, tokens: int, queries: int, context: int) -> float:
        return 0.3 * as_measured(rows, tokens, queries, context)

    off = expected_rate(32, alpha, 0, small)
    run = Dial(32, alpha, small, careful, GRAPHS, search=0.2 * small(32, 32, 1, CONTEXT)).run(600)
    assert run.rate >= 0.96 * off
    tokens, time = run.tokens, run.time
    run.alpha = 0.9                                      # drafts begin to pay: it is noticed
    run.run(600)
    assert (run.tokens - tokens) / (run.time - time) >= 1.2 * off


def test_few_rows_are_looked_at_while_no_drafts_could_pay() -> None:
    """In one step of four, sixteen rows at most: what they would have had is compared with what comes."""
    run = Dial(64, 0.0, on_a_cpu, bold, None).run(300)
    before, drafted = run.proposer.asked, run.drafted
    run.run(100)
    assert 0 < run.proposer.asked - before <= 16 * 26 + 64 and run.drafted - drafted <= 1


def test_it_looks_less_often_where_there_is_nothing_to_find() -> None:
    class Silent(Scripted):
        def propose(self, sequence: Sequence, most: int) -> Offer | None:
            return Offer([1] * most, 3) if speaks else None

    speaks, controller, rows = False, Controller([Silent()], Pace(ShapeTimes(bold)), 4), asked([make_sequence()])
    controller.timed(1, 1, 1, rows.keys, 3e-3, 0)
    looked = [controller.awake() and controller.plan(rows) is None for _ in range(200)]
    assert all(looked[:8]) and 10 < sum(looked[:100]) < 50 and sum(looked[100:]) <= 30
    speaks = True
    found = [controller.awake() and controller.plan(rows) is not None for _ in range(30)]
    assert sum(found) >= 20 and all(found[10:])          # a few steps late, and then in every step


def test_it_notices_when_drafts_begin_to_pay() -> None:
    run = Dial(1, 0.0, on_a_cpu, bold, None).run(500)
    run.alpha = 0.95
    run.run(PROBE_EVERY // 4)                            # no probe is needed for it: what was not drafted is compared, too
    assert sum(width > 0 for width in run.widths[-20:]) >= 15


def test_a_row_that_begins_to_copy_is_noticed_among_others() -> None:
    """All rows were given up."""
    alphas = [0.0] * 8
    run = Dial(8, alphas, as_measured, careful, GRAPHS).run(300)
    alphas[0] = 0.95
    run.run(PROBE_EVERY // 2)
    assert sum(width > 0 for width in run.of_first[-50:]) >= 40


def test_what_is_watched_counts_once_and_behind_the_tokens_in_flight() -> None:
    watch, rows = Watch(), [make_sequence(number) for number in range(4)]
    for number, row in enumerate(rows):
        watch.keep(row, pending=number % 2, tokens=[5, 6, 7, 8, 9, 9, 9], source=2, slot=10 + number)
    assert watch.seen() is None and watch.places(rows, 0) == []
    rows[0].tokens.extend([5, 6, 1])                     # two right, none in flight
    rows[1].tokens.extend([5, 6, 1])                     # the first of these was in flight
    rows[2].tokens.extend([5, 6])                        # more is to come
    watch.drafted(np.array([13, 14]))                    # the last: a step with drafts counts it
    seen = watch.seen()
    assert seen is not None and seen.sequences == rows[:2]
    assert seen.width.tolist() == [4, 4] and seen.accepted.tolist() == [2, 1]
    assert watch.seen() is None and watch.watches(rows[2]) and watch.places(rows, 0) == [0, 1, 3]
    assert watch.promising() is None                     # five drafts are too few
    rows[2].tokens.extend([7, 8])
    assert watch.seen() is not None and not watch.watches(rows[2])
    found = watch.promising()
    assert found is not None and found[0] == 2 and 0.7 < found[2] / found[1] < 0.85


def test_a_step_with_drafts_begins_to_watch_few_rows() -> None:
    controller = Controller([Scripted()], Pace(ShapeTimes(bold)), 4)
    rows = asked([make_sequence(each) for each in range(12)], room=2)
    controller.timed(12, 12, 1, rows.keys, 3e-3, 0)
    for room in (12, 8):                                 # that is left: ten rows have no drafts
        planned = controller.plan(rows)
        assert planned is not None and int(planned.width.sum()) == 2 and controller._search.watch.room == room


class _Repeats(RowByRow):
    """Offers the same for every row."""

    name = "ngram"

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        return Offer([7] * most)

    def ended(self, sequence: Sequence) -> None:
        """It knows no sequence."""


def test_what_is_watched_counts_for_the_proposer_that_said_it() -> None:
    """Also behind one that is not watched: a row's n-grams were counted as what predictions say, and those not at all."""
    controller = Controller([Forced(), _Repeats()], Pace(ShapeTimes(lambda tokens, keys: 1e-3 * tokens)), 4)
    controller._watch_some(asked([make_sequence(number) for number in range(4)]))
    guesses = controller._search.watch._open.values()
    assert [controller._sources.listed[guess.source].name for guess in guesses] == ["ngram"] * 4


def test_every_row_of_a_large_batch_is_watched_in_its_turn() -> None:
    """No row has drafts, for which there is no time. Each guess is found wrong in the next step."""
    rows = [make_sequence(number) for number in range(100)]
    controller = Controller([_Repeats()], Pace(ShapeTimes(lambda tokens, keys: 1e-3 * tokens)), 4)
    watched: set[Sequence] = set()
    asked = DecodingRows(rows, np.full(100, 4), np.zeros(100, np.int64), 400, 100, 1000)
    offers = controller._offers(asked, [0])
    assert offers is not None
    for _ in range(200):
        controller._step += 1
        controller._watch_others(asked, offers, np.zeros(100, np.int64))
        now = set(controller._search.watch._open)
        assert len(now) == 16
        watched |= now
        for row in now:
            row.tokens.append(8)
        assert controller._search.watch.seen() is not None
    assert len(watched) == 100


def test_drafts_go_to_the_rows_whose_drafts_survive() -> None:
    run = Dial(8, 0.9, on_a_gpu, careful, GRAPHS).run(50)
    good, bad = run.sequences[0], run.sequences[1]
    records = run.controller._records
    source = run.controller._sources.number(0, np.array([2, 2]), np.zeros(2, np.int64))
    for _ in range(30):
        records.send(records.slots([good, bad]), source, np.array([4.0, 4.0]))
        run.controller.observe([good, bad], np.array([4, 4]), np.array([4, 0]), 0.0)
    planned = run.controller.plan(asked(run.sequences))
    assert planned is not None and planned.width[0] > planned.width[1]


def asked(sequences: list[Sequence], most: int = MOST_DRAFTS, pending: int = 0, room: int = 10**6) -> DecodingRows:
    count = len(sequences)
    constrained = [place for place, sequence in enumerate(sequences) if sequence.matcher is not None]
    return DecodingRows(sequences, np.full(count, most), np.full(count, pending), room, count, CONTEXT * count, constrained)


@pytest.mark.parametrize("late", [1, 2, 4])
def test_steps_without_drafts_are_measured_where_results_come_late(late: int) -> None:
    """As in a pipeline of so many stages: its steps are planned ahead."""
    controller, rows = Controller([Scripted()], Pace(ShapeTimes(bold)), 4, stages=late), asked([make_sequence()], room=4)
    controller.timed(1, 1, 1, rows.keys, 3e-3, 0)
    taken, measured = controller.times.observe, []
    controller.times.observe = lambda *step: measured.append(step[2]) or taken(*step)    # type: ignore[method-assign]
    widths: list[int] = []
    for _ in range(700):
        planned = controller.plan(rows) if controller.awake() else None
        widths.append(0 if planned is None else int(planned.width.sum()))
        if len(widths) > late:
            width = widths[-1 - late]
            controller.timed(1, 1 + width, 1 + width, rows.keys, 3e-3 * (1 + width), 0)
            if width:
                controller.observe(rows.sequences, np.array([width]), np.array([width]), 3e-3)
    assert measured.count(1) >= 2 and len(measured) > measured.count(1)


@pytest.mark.parametrize(("graphs", "prompt", "drafted"), [
    (GRAPHS, 0, True), (GRAPHS, 300, False), (GRAPHS, 6000, True), (None, 300, True),
])
def test_no_drafts_beside_a_prompt_that_a_graph_holds(graphs: GraphShapes | None, prompt: int, drafted: bool) -> None:
    """There are no graphs of drafts and prompts. A prompt that is too long for one keeps the device busy anyway."""
    controller = Controller([Scripted()], Pace(ShapeTimes(bold, graphs)), 4)
    rows = asked([make_sequence(each) for each in range(8)])
    controller.timed(8, 8, 1, rows.keys, 3e-3, 0)
    for _ in range(8):                                   # the first ones measure steps without drafts
        assert controller.plan(rows) is not None or controller._search.off_left < 3
    beside = replace(rows, num_prompts=bool(prompt), num_tokens=8 + prompt)
    assert (controller.plan(beside) is not None) == drafted
    assert controller.plan(rows) is not None


class Scripted(RowByRow):
    """Offers the numbers from 100 on."""

    name = "scripted"

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        return Offer(list(range(100, 100 + most)), 3)

    def ended(self, sequence: Sequence) -> None:
        """It knows no sequence."""


def fixed(most: int = MOST_DRAFTS) -> Controller:
    return Controller([Scripted()], Pace(ShapeTimes(bold)), most, adaptive=False)


def test_paths_reach_behind_the_tokens_in_flight() -> None:
    planned = fixed(3).plan(asked([make_sequence()], pending=2))
    assert planned is not None and planned.tokens is not None
    assert planned.width.tolist() == [3] and planned.tokens.tolist() == [[100, 101, 102, 103, 104]]


def test_limits_of_rows_and_of_the_step_hold() -> None:
    planned = fixed().plan(asked([make_sequence(number) for number in range(4)], most=5, room=12))
    assert planned is not None and planned.width.tolist() == [5, 5, 2, 0]
    assert fixed().plan(asked([make_sequence()], most=0)) is None
    assert fixed().plan(asked([make_sequence()], room=0)) is None


def test_a_bound_on_all_drafts_holds_for_the_adaptive_controller() -> None:
    controller = Controller([Scripted()], Pace(ShapeTimes(bold, GRAPHS)), MOST_DRAFTS)
    rows = asked([make_sequence(number) for number in range(4)], most=5, room=7)
    for _ in range(5):
        controller.timed(4, 4, 1, rows.keys, 3e-3, 0)
        planned = controller.plan(rows)
    assert planned is not None and 0 < int(planned.width.sum()) <= 7 and int(planned.width.max()) <= 5


def test_the_better_of_two_proposers_is_taken() -> None:
    class Worse(Scripted):
        name = "worse"

        def propose(self, sequence: Sequence, most: int) -> Offer | None:
            return Offer([1] * most, 0)

    planned = Controller([Worse(), Scripted()], Pace(ShapeTimes(bold)), 2, adaptive=False).plan(asked([make_sequence()]))
    assert planned is not None and planned.tokens is not None and planned.tokens.tolist() == [[100, 101]]


class _Forces:
    """A grammar that leaves two tokens. It is not asked whether it allows them."""

    def forced(self, most: int) -> list[int]:
        return [100, 101][:most]


def _with_grammar(waited: bool, count: int = 1) -> DecodingRows:
    sequences = [make_sequence(number) for number in range(count)]
    for sequence in sequences:
        sequence.matcher = _Forces()                     # type: ignore[assignment]
    rows = asked(sequences)
    rows.waited = waited
    return rows


@pytest.mark.parametrize("overlap", [1.0, 4.0])
def test_steps_wait_for_what_a_grammar_forces_while_that_pays(overlap: float) -> None:
    """A step that waited takes 2 ms and brings three tokens. Without, each token takes 1 ms, or a quarter."""
    controller = Controller([Forced()], Pace(ShapeTimes(bold, GRAPHS), True), 4)
    off, waited, drafted = 1e-3 / overlap, 0, 0
    for _ in range(400):
        waits = controller.waits
        rows = _with_grammar(waits)
        planned = controller.plan(rows) if controller.awake() else None
        width = 0 if planned is None or not waits else int(planned.width[0])
        controller.timed(1, 1 + width, 1 + width, rows.keys, 2e-3 if waits else off, 0, waits)
        if width:
            controller.observe(rows.sequences, np.array([width]), np.array([width]), 2e-3)
        waited, drafted = waited + waits, drafted + (width == 2)
    assert drafted <= waited
    assert drafted > 350 if overlap == 1 else waited < 80
    assert controller.pace.ahead.seconds(1, _with_grammar(False).keys) == pytest.approx(off)     # not of steps that waited


def test_what_one_row_gains_does_not_excuse_what_four_lose() -> None:
    """Milliseconds as of a 1.5B model on an H200: a step that waited takes 2.6 with one row and 2.95 with four, and 1.14 and 1.3
    without. A grammar forces two tokens after each: one row says three in a step, and of four only two have drafts."""
    controller = Controller([Forced()], Pace(ShapeTimes(bold, GRAPHS), True), 4)
    waited = {1: 0, 4: 0}
    for turn in range(1600):
        count = 4 if turn % 100 < 50 else 1              # three of four have ended
        waits = controller.waits
        rows = _with_grammar(waits, count)
        planned = controller.plan(rows) if controller.awake() else None
        width = rows.most * 0 if planned is None or not waits else planned.width.astype(np.int64)
        width[2:] = 0
        seconds = {1: 2.6e-3, 4: 2.95e-3}[count] if waits else {1: 1.14e-3, 4: 1.3e-3}[count]
        total, had = int(width.sum()), np.flatnonzero(width)
        controller.timed(count, count + total, 1 + int(width.max()), rows.keys, seconds, 0, waits)
        if total:
            controller.observe([rows.sequences[place] for place in had.tolist()], width[had], width[had], seconds)
        waited[count] += waits
    assert waited[1] > 700 and waited[4] < 400


def test_a_search_that_loses_rests_so_long_that_little_is_lost() -> None:
    worth, lost = Worth(), [0.0]
    for _ in range(6000):
        worth.passed(8)
        resting = worth.rests
        if not resting:
            worth.count(8, 1.4, 1.0, 1.0)
        lost.append(lost[-1] + 0.4 * (not resting))
    assert lost[200] < 5 and lost[1000] < 0.015 * 1000 and lost[6000] - lost[1000] < 0.011 * 5000


def test_what_a_step_without_drafts_took_needs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    times = ShapeTimes(bold, GRAPHS)
    for seconds in (3e-3, 4e-3, 5e-3):
        times.observe(8, 8, 1, CONTEXT, seconds)
    from_table = float(times.table(1, CONTEXT).seconds[GRAPHS.decodes.index(8)])
    monkeypatch.setattr(times, "table", None)
    assert times.seconds(8, CONTEXT) == times.seconds(7, CONTEXT) == from_table == 4e-3


def test_times_are_not_asked_for_in_the_middle_of_a_rest() -> None:
    """What steps take is known again when it ends, and it lasts as long as if all were asked for."""
    listed: list[list[bool]] = []
    for asks in (True, False):
        worth, slept, rests = Worth(), [], []
        for _ in range(400):
            slept.append(not asks and worth.slept(8))
            if not slept[-1]:
                worth.passed(8)
            rests.append(worth.rests)
            if not worth.rests:
                worth.count(8, 1.4, 1.0, 1.0)
        listed.append(rests)
    assert listed[0] == listed[1] and not worth.slept(1)
    ends = [place for place in range(8, 400) if rests[place - 1] and not rests[place]]
    assert ends and not any(any(slept[end - 7 : end + 1]) for end in ends)
    assert sum(slept) > 200


@pytest.mark.parametrize("right", [True, False])
def test_without_overlap_forced_tokens_are_weighed_as_all_others(right: bool) -> None:
    """On a CPU every step is planned once all tokens have arrived: none has waited for a grammar. Each token takes as long."""
    controller, tried = Controller([Forced()], Pace(ShapeTimes(lambda tokens, keys: 1e-3 * (1 + 0.8 * tokens))), 4), 0
    for _ in range(200):
        rows = _with_grammar(waited=True)
        planned = controller.plan(rows) if controller.awake() else None
        width = 0 if planned is None else int(planned.width[0])
        accepted = width if right else 0
        controller.timed(1, 1 + width, 1 + width, rows.keys, 1e-3 * (1.8 + 0.8 * width), width - accepted, True)
        if width:
            controller.observe(rows.sequences, np.array([width]), np.array([accepted]), 1e-3)
        tried += width
    assert tried > 100 if right else tried < 20


@pytest.mark.parametrize(("proposer", "compared"), [(Forced(), False), (Scripted(), True)])
def test_what_grammars_force_is_not_compared_where_it_is_not_drafted(proposer: Forced | Scripted, compared: bool) -> None:
    """It is right anyway."""
    controller = Controller([proposer], Pace(ShapeTimes(bold)), 4)
    plain = asked([make_sequence(each) for each in range(3)])
    rows = _with_grammar(waited=False, count=3) if isinstance(proposer, Forced) else plain
    rows.room = 1
    for _ in range(5):                                   # the first ones measure steps without drafts
        controller.timed(3, 3, 1, rows.keys, 3e-3, 0)
        planned = controller.plan(rows)
    assert planned is not None and int(planned.width.sum()) == 1
    assert (controller._search.watch.room < 16) == compared


def test_only_grammars_are_waited_for() -> None:
    controllers = [Controller([each], Pace(ShapeTimes(bold, GRAPHS), True), 4) for each in (Scripted(), Forced(), Forced())]
    controllers[2].active = False
    assert [each.waits for each in controllers] == [False, True, False]


def test_a_grammar_cuts_what_it_refuses() -> None:
    class OnlyTwo:
        def allowed(self, tokens: list[int]) -> int:
            return 2

    sequence = make_sequence()
    sequence.matcher = OnlyTwo()                         # type: ignore[assignment]
    planned = fixed().plan(asked([sequence]))
    assert planned is not None and planned.width.tolist() == [2]


def test_drafts_that_never_ran_are_forgotten() -> None:
    controller, sequence = fixed(), make_sequence()
    for _ in range(3):
        controller.plan(asked([sequence], most=3))       # blocks were short: no step came back
    records = controller._records
    assert records.waiting[records.slots([sequence])].tolist() == [1]


def test_counters_and_positions() -> None:
    controller, sequences = fixed(), [make_sequence(0), make_sequence(1)]
    controller.plan(asked(sequences, most=3))
    controller.observe(sequences, np.array([3, 3]), np.array([3, 1]), 0.01)
    counters = controller.counters
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (2, 6, 4)
    assert counters.accepted_per_position[:4].tolist() == [2, 1, 1, 0]


def test_a_sequence_that_ended_is_forgotten() -> None:
    controller, sequence = fixed(), make_sequence()
    controller.plan(asked([sequence], most=3))
    controller.ended(sequence)
    controller.observe([sequence], np.array([3]), np.array([1]), 0.01)   # of a step that was in flight
    assert not len(controller._records)


def test_rates_are_conditional_and_positions_learn_from_those_before() -> None:
    acceptance, source = Acceptance(4), Source("ngram", 1, False)
    for _ in range(200):
        acceptance.count(source, np.array([2, 1, 0, 0]), np.array([1, 1, 0, 0]))     # two drafts each: all accepted, and none
    rates = acceptance.rates(source)
    assert rates[0] == pytest.approx(0.5, abs=0.02) and rates[1] == pytest.approx(1.0, abs=0.05)
    assert rates[2] == rates[3] == pytest.approx(rates[1])


def test_a_row_counts_beside_its_proposer() -> None:
    rates, records = np.full((1, 3), 0.5), RowRecords(EVIDENCE)
    slot, evidence, length = records.slots([make_sequence()]), np.array([1]), np.array([2])
    for step in range(40):
        records.count(slot, evidence, np.array([3]), np.array([0]), step)
    own = survival(rates, *records.fade(slot, evidence, 40), length)
    assert own[0, 0] < 0.25 and own[0, 2] == 0.0
    other = survival(rates, *records.fade(slot, np.array([3]), 40), length)      # much else speaks for these drafts
    assert other[0, 0] == pytest.approx(0.5)
    again = survival(rates, *records.fade(slot, evidence, 40 + 5000), length)    # without drafts for long: as good as a new row
    assert again[0, 0] == pytest.approx(0.5, abs=0.01)


def test_a_row_whose_first_drafts_are_wrong_is_given_up_soon() -> None:
    """Though the same proposer was right four times of five in other rows."""
    rates, none = np.full((1, 3), 0.8), np.array([0.0])
    chances = [float(survival(rates, np.array([tried]), none, np.array([3]))[0, 0]) for tried in (0.0, 1.0, 2.0, 4.0)]
    assert chances[0] == pytest.approx(0.8) and chances[3] < 0.3 and chances == sorted(chances, reverse=True)
    as_expected = survival(rates, np.array([10.0]), np.array([8.0]), np.array([3]))
    assert float(as_expected[0, 0]) == pytest.approx(0.8)


def test_rows_that_differ_by_chance_alone_are_taken_for_equal() -> None:
    """And those that differ by more are told apart, by as few counts as before."""
    rng, rows, tried = np.random.default_rng(0), 256, np.full(256, 20.0)
    rates, length = np.full((rows, 2), 0.8), np.full(rows, 2)
    alike = survival(rates, tried, rng.binomial(20, 0.8, rows).astype(float), length)
    differing = survival(rates, tried, np.where(np.arange(rows) % 2, 20.0, 12.0), length)
    one = survival(rates[:1], tried[:1], np.array([12.0]), length[:1])
    assert alike[:, 0].std() < 0.03 and differing[:, 0].std() > 0.1
    assert float(differing[0, 0]) == pytest.approx(float(one[0, 0]), abs=0.05)


def test_records_are_kept_apart_and_used_again() -> None:
    records, sequences = RowRecords(EVIDENCE), [make_sequence(number) for number in range(200)]
    slots = records.slots(sequences)
    assert sorted(slots.tolist()) == sorted(set(slots.tolist())) and len(records) == 200
    records.send(slots, np.arange(200), np.arange(200) / 10)
    records.send(slots[:2], np.array([7, 8]), np.array([1.0, 2.0]))
    source, expected = records.arrive(slots)
    assert source.tolist() == list(range(200)) and expected[3] == pytest.approx(0.3)
    assert records.waiting[slots[:3]].tolist() == [1, 1, 0] and records.arrive(slots[:2])[0].tolist() == [7, 8]
    records.forget(sequences[5])
    assert records.known([sequences[5]]).tolist() == [-1]
    assert records.slots([make_sequence(999)]).tolist() == [int(slots[5])] and records.tried[slots[5]].sum() == 0


def test_times_are_kept_as_measured() -> None:
    times = ShapeTimes(careful, GraphShapes(8, 8, 8))
    for seconds in (5.0, 1.0, 1.1, 0.9, 1.0):            # one slow step does not count
        times.observe(3, 3, 1, 100, seconds)
    assert times.seconds(3, 100) == times.seconds(4, 100) == 1.0
    assert times.measured(4, 100) and not times.measured(8, 100) and not times.measured(4, 1000)


def test_steps_without_drafts_are_not_guessed_from_those_with_some() -> None:
    """Not even where there were none for long: a row that copies has drafts in hundreds of steps."""
    times = ShapeTimes(careful, GRAPHS)
    times.observe(1, 1, 1, CONTEXT, 3.8e-3)
    for _ in range(300):
        times.observe(1, 16, 16, CONTEXT, 4.4e-3)
    assert times.seconds(1, CONTEXT) == 3.8e-3


@pytest.mark.parametrize("seed", range(4))
def test_bad_luck_does_not_end_drafts_that_gain_much(seed: int) -> None:
    """Four wrong steps in a row did, for 350 steps: those without drafts were believed to take less than half of their time."""
    run = Dial(1, 0.9, as_measured, careful, GRAPHS)
    run.rng.seed(seed)
    run.run(50)
    before = len(run.widths)
    run.run(450)
    assert sum(width > 0 for width in run.widths[before:]) >= 0.95 * 450


@pytest.mark.parametrize("rows", [128, 256])
def test_first_steps_that_are_slow_do_not_make_drafts_pay_for_long(rows: int) -> None:
    """As those of a fresh process are. What steps without drafts took then was believed for 500 steps."""
    passed = 0

    def slow_at_first(rows: int, tokens: int, queries: int, context: int) -> float:
        nonlocal passed
        passed += 1
        return as_measured(rows, tokens, queries, context) * (2.6 if passed <= 3 else 1)

    run = Dial(rows, 0.3, slow_at_first, careful, GRAPHS)
    run.run(3)
    run.tokens = run.time = 0.0
    assert run.run(400).rate >= 0.98 * expected_rate(rows, 0.3, 0, as_measured)


def test_steps_without_drafts_are_doubted_again_after_doubts_in_vain() -> None:
    """After six in vain there was none any more."""
    slow = 2.0

    def times(rows: int, tokens: int, queries: int, context: int) -> float:
        return as_measured(rows, tokens, queries, context) * (slow if queries == 1 else 1.0)

    run = Dial(8, 0.9, times, careful, GRAPHS)
    run.run(1500)
    slow = 1.0
    run.run(1000)
    slow, count = 2.0, len(run.widths)
    while run.controller._search.off_left or 0 not in run.widths[count:]:
        run.run(1)
    slow, count = 1.0, len(run.widths)
    run.run(32)
    assert 0 in run.widths[count + 8 :]


def test_times_are_told_for_the_keys_of_the_step() -> None:
    """Where many requests end at once, steps with drafts and without are both told for what is left."""
    times = ShapeTimes(careful, GRAPHS)
    for _ in range(3):
        times.observe(64, 64, 1, 510_000, 20e-3)
        times.observe(64, 256, 4, 510_000, 30e-3)
    fewer = 2e-8 * (510_000 - 300_000)
    for keys, seconds in ((510_000, 30e-3), (300_000, 30e-3 - fewer), (510_000, 30e-3)):
        assert times.drafted(64, 256, 4, keys) == pytest.approx(seconds)
        assert np.frombuffer(times.tables([4], keys).seconds)[times.table(4, keys).sizes == 256] == pytest.approx(seconds)
        assert times.seconds(64, keys) == pytest.approx(seconds - 10e-3)


def test_steps_that_grow_slower_with_their_contexts() -> None:
    """Requests that begin together: the sizes that ran when contexts were short must not seem faster than those that run now."""
    rows, alpha, run = 128, 0.6, Dial(128, 0.6, as_measured, careful, GRAPHS)
    gained = possible = 0.0
    for block in range(5):
        for sequence in run.sequences:
            run.controller.ended(sequence)
        run.sequences = [make_sequence(1000 * block + number) for number in range(rows)]
        for run.context in range(448, 832, 4):
            before, began = run.tokens, run.time
            run.run(1)
            if block >= 2:
                gained += run.tokens - before
                possible += (run.time - began) * best_rate(rows, alpha, as_measured, run.context)
    assert gained >= 0.985 * possible


def test_times_of_other_contexts_are_scaled_by_the_model() -> None:
    times = ShapeTimes(lambda tokens, keys: 1.0 + keys / 1000, GraphShapes(2, 8, 8))
    times.observe(1, 1, 1, 1000, 4.0)
    assert 4.0 < times.seconds(1, 4000) < 16.0


def test_graphs_for_wide_rows_have_their_own_times() -> None:
    times = ShapeTimes(careful, GRAPHS)
    times.observe(64, 64, 1, 10_000, 5e-3)
    assert times.bounds(64, most_queries(64)) == [4, 8] and times.bounds(8, 3) == [4] and times.bounds(256, 4) == [4]
    for _ in range(3):
        times.observe(64, 250, 8, 10_000, 12e-3)
    narrow, wide = (times.table(bound, 10_000) for bound in (4, 8))
    place = narrow.sizes.tolist().index(256)
    assert wide.seconds[place] == 12e-3 and wide.sure[place] and narrow.seconds[place] < 12e-3 and not narrow.sure[place]
    for _ in range(3):
        times.observe(64, 256, 4, 10_000, 9e-3)
    assert times.table(4, 10_000).seconds[place] == 9e-3 and times.table(8, 10_000).seconds[place] == 12e-3
    assert times.table(PLAIN, 10_000).seconds[times.table(PLAIN, 10_000).sizes == 64].tolist() == [pytest.approx(5e-3)]


def test_a_first_step_that_was_slow_by_chance_is_not_believed_for_ever() -> None:
    """Else the best shape might never be tried again."""
    seen: dict[tuple[int, int], int] = {}

    def slow_at_first(rows: int, tokens: int, queries: int, context: int) -> float:
        graph = GRAPHS.fit_drafts(rows, tokens, queries) if queries > 1 else None
        key = (graph.draft_tokens, graph.queries) if graph is not None else (0, 1)
        seen[key] = seen.get(key, 0) + 1
        return as_measured(rows, tokens, queries, context) * (2 if seen[key] == 1 else 1)

    run = Dial(64, 0.8, slow_at_first, careful, GRAPHS).run(300)
    run.tokens = run.time = 0.0
    assert run.run(200).rate >= 0.97 * best_rate(64, 0.8, as_measured)

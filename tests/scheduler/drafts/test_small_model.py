"""The controller with a draft model, in simulated steps: a draft costs a pass of it, and what it has not seen costs more."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from draft_dial import CONTEXT, expected_gain, make_sequence
from test_controller import GRAPHS, bold, on_a_cpu, on_a_gpu

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.messages import StepResult
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import Offer, RowByRow
from ridgeline.scheduler.drafts.shape_times import Pace, ShapeTimes
from ridgeline.scheduler.drafts.small_model import SmallModel
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import MOST_VERIFIED

NONE = np.zeros(0, np.int32)


class Engine:
    """Rows that decode for ever. A pass of the draft model takes `own` seconds, a token that it catches up `each`; its drafts are
    right with chance `alpha`."""

    def __init__(self, rows: int, alpha: float, own: float, each: float, cpu: bool = False) -> None:
        self.alpha, self.own, self.each = alpha, own, each
        self.seconds = on_a_cpu if cpu else on_a_gpu
        self.small = SmallModel(10**9, lambda rows: 3e-3, MOST_DRAFTS)
        self.controller = Controller([self.small], Pace(ShapeTimes(bold, None if cpu else GRAPHS)), MOST_DRAFTS)
        self.sequences = [make_sequence(number, range(1, CONTEXT)) for number in range(rows)]
        for sequence in self.sequences:
            sequence.limit = 10**9
        self.seen = [0] * rows
        self.rng = random.Random(rows)
        self.tokens, self.time, self.drafted = 0.0, 0.0, 0

    def run(self, steps: int) -> Engine:
        for _ in range(steps):
            self._step()
        return self

    def _step(self) -> None:
        count = len(self.sequences)
        most = min(MOST_DRAFTS, self.controller.times.most_queries(count) - 1)
        planned = self.controller.plan(DecodingRows(
            self.sequences, np.full(count, most), np.zeros(count, np.int64), MOST_VERIFIED - count, count, CONTEXT * count
        ))
        width = np.zeros(count, np.int64) if planned is None else planned.width
        accepted = np.array([self._accepted(own) for own in width.tolist()])
        total = count + int(width.sum())
        queries = 1 + int(width.max())
        seconds = self.seconds(count, total, queries, CONTEXT)
        self.controller.timed(count, total, queries, CONTEXT * count, seconds, int((width - accepted).sum()))
        had = np.flatnonzero(width)
        if len(had):
            assert planned is not None and planned.tokens is None and planned.on_device is not None
            result = StepResult(0, NONE, NONE, NONE)
            missing = [len(self.sequences[place].tokens) - self.seen[place] - 1 for place in had.tolist()]
            result.caught_up = sum(missing) if max(missing) > MOST_DRAFTS else 0
            result.catch_up_seconds = result.caught_up * self.each
            result.draft_seconds = (int(width.max()) - (result.caught_up > 0)) * self.own
            seconds += result.draft_seconds + result.catch_up_seconds
            self.controller.observe([self.sequences[place] for place in had.tolist()], width[had], accepted[had], seconds)
            self.controller.proposed(len(had), int(width.max()), result)
        for place, sequence in enumerate(self.sequences):
            if width[place]:
                self.seen[place] = len(sequence.tokens)
            sequence.tokens.extend([5] * (1 + int(accepted[place])))
        self.tokens += count + sum(expected_gain(self.alpha, own) for own in width.tolist())
        self.time += seconds
        self.drafted += planned is not None

    def _accepted(self, width: int) -> int:
        kept = 0
        while kept < width and self.rng.random() < self.alpha:
            kept += 1
        return kept

    def expected(self, width: int) -> float:
        """Tokens a second with always so many drafts."""
        rows = len(self.sequences)
        step = self.seconds(rows, rows * (1 + width), 1 + width, CONTEXT)
        return rows * (1 + expected_gain(self.alpha, width)) / (step + width * self.own)


def off(rows: int, cpu: bool) -> float:
    """Seconds of a step without drafts."""
    return (on_a_cpu if cpu else on_a_gpu)(rows, rows, 1, CONTEXT)


QUICK = {                            # every value of everything; 16 rows: a try for all of them would read all their texts
    (16, 0.0, 0.4, False),
    (1, 0.0, 0.4, False), (1, 0.5, 0.4, False), (1, 0.9, 1.0, False),
    (1, 0.0, 1.0, True), (1, 0.5, 0.1, True), (1, 0.9, 0.1, True),
}


@pytest.mark.parametrize(("rows", "alpha", "own", "cpu"), [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product((1, 16), (0.0, 0.5, 0.9), (0.1, 0.4, 1.0), (False, True))
])
def test_close_to_the_best_fixed_width_and_never_below_off(rows: int, alpha: float, own: float, cpu: bool) -> None:
    """`own`: a pass of the draft model, as a share of a step. What it learns in the first steps is not counted. Where drafts gain
    little, that may not be found out: a probe may have the draft model catch up with a whole text."""
    step = off(rows, cpu)
    engine = Engine(rows, alpha, own * step, own * off(1, cpu) / 5 if cpu else own * step / 200, cpu).run(100)
    engine.tokens, engine.time = 0.0, 0.0
    rate = engine.run(600).tokens / engine.time
    assert rate >= 0.98 * engine.expected(0)
    best = max(engine.expected(width) for width in range(MOST_DRAFTS + 1))
    assert rate >= (0.98 if best > 1.3 * engine.expected(0) else 0.9) * best


def test_a_draft_model_that_cannot_pay_is_not_asked_again() -> None:
    engine = Engine(1, 1.0, off(1, True), 1e-4, cpu=True).run(300)
    before = engine.drafted
    assert 1 <= before <= 20
    assert engine.run(2000).drafted == before


def grown(own: float, first: int, then: int) -> tuple[int, Engine]:
    """Steps with drafts after `first` rows have become `then`. `own`: a pass, as a share of a step of the first rows."""
    engine = Engine(then, 0.5, own * off(first, False), own * off(first, False) / 200)
    every, engine.sequences = engine.sequences, engine.sequences[:first]
    before = engine.run(120).drafted
    assert before, "nothing was measured"
    engine.sequences, engine.tokens, engine.time = every, 0.0, 0.0
    return engine.run(300).drafted - before, engine


@pytest.mark.parametrize(("first", "then"), [(1, 64), (1, 128), (1, 256)])
def test_a_draft_model_is_not_tried_where_more_rows_make_it_a_sure_loss(first: int, then: int) -> None:
    """A pass takes as long as two steps of the first rows, and with more rows no less: drafts would not pay if all were right."""
    drafted, engine = grown(2.0, first, then)
    assert drafted == 0 and engine.tokens / engine.time == pytest.approx(engine.expected(0))


def test_more_rows_are_no_reason_not_to_try_one_that_could_pay() -> None:
    drafted, _ = grown(0.1, 1, 64)
    assert drafted > 0


def test_probes_in_vain_become_rare() -> None:
    engine = Engine(1, 0.0, 0.1 * off(1, True), 1e-4, cpu=True).run(500)
    before = engine.drafted
    assert engine.run(6000).drafted - before <= 8


def test_a_short_answer_is_not_worth_a_long_text() -> None:
    """The draft model would have to catch up with it first."""
    engine = Engine(1, 0.9, 0.2 * off(1, False), 0.2 * off(1, False), cpu=False).run(50)
    assert engine.drafted > 20
    sequence = make_sequence(9, range(1, CONTEXT))
    planned = {}
    for limit in (CONTEXT + 20, CONTEXT + 10**6):
        sequence.limit, engine.controller._last_off = limit, engine.controller._step
        asked = DecodingRows([sequence], np.full(1, 10), np.zeros(1, np.int64), 10**6, 1, CONTEXT)
        planned[limit] = engine.controller.plan(asked)
    assert planned[CONTEXT + 20] is None and planned[CONTEXT + 10**6] is not None


class Free(RowByRow):
    """Offers three drafts that cost nothing."""

    name = "free"

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        return Offer([4, 5, 6][:most])

    def ended(self, sequence: Sequence) -> None:
        """It knows no sequence."""


@pytest.mark.parametrize("own", [0.05, 0.9])
def test_free_drafts_go_before_ones_that_cost_time(own: float) -> None:
    """More of a draft model's may survive: they are taken where its passes are short."""
    small = SmallModel(10**9, lambda rows: 2 * own * 3e-3, MOST_DRAFTS)
    controller = Controller([Free(), small], Pace(ShapeTimes(bold)), MOST_DRAFTS, adaptive=False)
    sequences = [make_sequence(number) for number in range(2)]
    planned = controller.plan(DecodingRows(sequences, np.full(2, 9), np.zeros(2, np.int64), 10**6, 2, CONTEXT))
    assert planned is not None
    if own < 0.5:
        assert planned.tokens is None and planned.width.tolist() == [9, 9]
    else:
        assert planned.on_device is None and planned.width.tolist() == [3, 3]


def test_each_proposer_has_its_own_record_of_a_row() -> None:
    """Text that happens to repeat itself, and goes on differently, says nothing about a draft model."""
    small = SmallModel(10**9, lambda rows: 1e-4, MOST_DRAFTS)
    controller = Controller([Free(), small], Pace(ShapeTimes(bold)), MOST_DRAFTS)
    rows = DecodingRows([make_sequence()], np.full(1, 9), np.zeros(1, np.int64), 10**6, 1, CONTEXT)
    free, made = (controller._sources.number(number, np.zeros(1, np.int64), np.zeros(1, np.int64)) for number in (0, 1))
    records = controller._records
    slots = records.slots(rows.sequences)
    for _ in range(30):
        records.send(slots, free, np.ones(1))
        controller.observe(rows.sequences, np.array([3]), np.array([0]), 0.0)
    assert records.fade(slots, free >> 1, controller._step)[0] > 3 and records.fade(slots, made >> 1, controller._step)[0] == 0


def test_rows_with_a_grammar_and_too_long_ones_have_no_offer() -> None:
    small, sequence = SmallModel(20, lambda rows: 1.0, 5), make_sequence(0, range(1, 11))
    assert small.propose(sequence, 5) is not None and small.propose(sequence, 10) is None
    sequence.matcher = object()                          # type: ignore[assignment]
    assert small.propose(sequence, 5) is None

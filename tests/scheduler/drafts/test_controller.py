"""The controller on a dial: simulated steps with a staircase of times, and drafts that are right with a given chance."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
from draft_dial import CONTEXT, Dial, expected_rate, make_sequence

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts.acceptance import Acceptance, RowRecord, Source, survival
from ridgeline.scheduler.drafts.controller import PROBE_EVERY, Controller
from ridgeline.scheduler.drafts.offer import Offer
from ridgeline.scheduler.drafts.shape_times import ShapeTimes
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import decode_sizes

SIZES = decode_sizes(4096)


def on_a_gpu(tokens: int) -> float:
    """About an 8B model on an H200: reading weights first, then compute; not monotone, as measured."""
    size = SIZES[bisect.bisect_left(SIZES, tokens)]
    seconds = 3.9e-3 + 2e-6 * size + 12e-6 * max(0, size - 64)
    return 0.93 * seconds if 128 < size < 400 and size % 48 == 0 else seconds


def on_a_cpu(tokens: int) -> float:
    """Compute counts from the second token on: 8 tokens take 3.3 steps of one."""
    return 10e-3 * (1 + 0.33 * (tokens - 1))


def careful(tokens: int, keys: int) -> float:
    """A model of step times that is wrong by a third, and overrates what tokens cost."""
    return max(3.0e-3, 20e-6 * tokens)


def bold(tokens: int, keys: int) -> float:
    """One that thinks drafts are free."""
    return 3.0e-3


ALPHAS = (0.0, 0.3, 0.6, 0.9)


@pytest.mark.parametrize("rows", [1, 8, 32, pytest.param(64, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow),
                                  pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_close_to_the_best_fixed_width_and_never_below_off(rows: int, alpha: float) -> None:
    run = Dial(rows, alpha, on_a_gpu, careful, SIZES).run(300)
    rate = run.tokens / run.time
    assert rate >= 0.97 * max(expected_rate(rows, alpha, width, on_a_gpu) for width in range(MOST_DRAFTS + 1))
    assert rate >= 0.98 * expected_rate(rows, alpha, 0, on_a_gpu)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("model", [careful, bold])
def test_every_cell(rows: int, model: object) -> None:
    for alpha in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        run = Dial(rows, alpha, on_a_gpu, model, SIZES).run(600)     # type: ignore[arg-type]
        rate = run.tokens / run.time
        assert rate >= 0.97 * max(expected_rate(rows, alpha, width, on_a_gpu) for width in range(MOST_DRAFTS + 1)), alpha
        assert rate >= 0.98 * expected_rate(rows, alpha, 0, on_a_gpu), alpha


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.8, 0.95])
@pytest.mark.parametrize("rows", [1, 8])
def test_on_a_cpu_too(rows: int, alpha: float) -> None:
    run = Dial(rows, alpha, on_a_cpu, bold, []).run(600)
    rate = run.tokens / run.time
    assert rate >= 0.97 * max(expected_rate(rows, alpha, width, on_a_cpu) for width in range(MOST_DRAFTS + 1))
    assert rate >= 0.98 * expected_rate(rows, alpha, 0, on_a_cpu)


def test_probes_are_rare_while_drafts_do_not_pay() -> None:
    run = Dial(4, 0.0, on_a_cpu, bold, []).run(300)
    before, steps = run.drafted, 5 * PROBE_EVERY
    run.run(steps)
    assert 1 <= run.drafted - before <= steps // PROBE_EVERY
    assert run.controller.counters.probes >= run.drafted - before


def test_no_proposer_is_asked_while_no_drafts_could_pay() -> None:
    run = Dial(4, 0.0, on_a_cpu, bold, []).run(300)
    before = run.proposer.asked
    run.run(100)
    assert run.proposer.asked - before <= 4 * (1 + 100 // PROBE_EVERY)


def test_it_notices_when_drafts_begin_to_pay() -> None:
    run = Dial(1, 0.0, on_a_cpu, bold, []).run(500)
    run.alpha = 0.95
    run.run(3 * PROBE_EVERY)
    assert sum(width > 0 for width in run.widths[-100:]) >= 90


def test_drafts_go_to_the_rows_whose_drafts_survive() -> None:
    run = Dial(8, 0.9, on_a_gpu, careful, SIZES).run(50)
    good, bad = run.sequences[0], run.sequences[1]
    for _ in range(30):
        for sequence in (good, bad):
            run.controller._records[sequence].waiting.append((Source("dial", 2, False), 4.0))
        run.controller.observe([good, bad], np.array([4, 4]), np.array([4, 0]), 0.0)
    planned = run.controller.plan(asked(run.sequences))
    assert planned is not None and planned.width[0] > planned.width[1]


def asked(sequences: list[Sequence], most: int = MOST_DRAFTS, pending: int = 0, room: int = 10**6) -> DecodingRows:
    count = len(sequences)
    return DecodingRows(sequences, np.full(count, most), np.full(count, pending), room, count, CONTEXT * count)


class Scripted:
    """Offers the numbers from 100 on."""

    name = "scripted"

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        return Offer(self.name, list(range(100, 100 + most)), 3)

    def ended(self, sequence: Sequence) -> None:
        """It knows no sequence."""


def fixed(most: int = MOST_DRAFTS) -> Controller:
    return Controller([Scripted()], ShapeTimes(bold), most, adaptive=False)


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
    controller = Controller([Scripted()], ShapeTimes(bold, SIZES), MOST_DRAFTS)
    rows = asked([make_sequence(number) for number in range(4)], most=5, room=7)
    for _ in range(5):
        controller.timed(4, rows.keys, 3e-3)
        planned = controller.plan(rows)
    assert planned is not None and 0 < int(planned.width.sum()) <= 7 and int(planned.width.max()) <= 5


def test_the_better_of_two_proposers_is_taken() -> None:
    class Worse(Scripted):
        name = "worse"

        def propose(self, sequence: Sequence, most: int) -> Offer | None:
            return Offer(self.name, [1] * most, 0)

    planned = Controller([Worse(), Scripted()], ShapeTimes(bold), 2, adaptive=False).plan(asked([make_sequence()]))
    assert planned is not None and planned.tokens is not None and planned.tokens.tolist() == [[100, 101]]


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
    assert len(controller._records[sequence].waiting) == 1


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
    assert not controller._records


def test_rates_are_conditional_and_positions_learn_from_those_before() -> None:
    acceptance, source = Acceptance(4), Source("ngram", 1, False)
    for _ in range(200):
        acceptance.count(source, np.array([2, 2]), np.array([2, 0]))
    rates = acceptance.rates(source)
    assert rates[0] == pytest.approx(0.5, abs=0.02) and rates[1] == pytest.approx(1.0, abs=0.05)
    assert rates[2] == rates[3] == pytest.approx(rates[1])


def test_a_row_counts_beside_its_proposer() -> None:
    rates = np.full((1, 3), 0.5)
    record = RowRecord()
    for step in range(40):
        record.count(3, 0, step)
    own = survival(rates, np.array([record.tried]), np.array([record.accepted]), np.array([2.0]))
    assert own[0, 0] < 0.25 and own[0, 2] == 0.0
    record.fade(40 + 2000)                               # without drafts for long: it is as good as a new row
    again = survival(rates, np.array([record.tried]), np.array([record.accepted]), np.array([2.0]))
    assert again[0, 0] == pytest.approx(0.5, abs=0.01)


def test_times_are_kept_as_measured() -> None:
    times = ShapeTimes(careful, [1, 2, 4, 8])
    for seconds in (5.0, 1.0, 1.1, 0.9, 1.0):            # one slow step does not count
        times.observe(3, 100, seconds)
    assert times.seconds(3, 100) == times.seconds(4, 100) == 1.0
    assert times.measured(4, 100) and not times.measured(8, 100) and not times.measured(4, 1000)


def test_times_of_other_contexts_are_scaled_by_the_model() -> None:
    times = ShapeTimes(lambda tokens, keys: 1.0 + keys / 1000, [1, 2])
    times.observe(1, 1000, 4.0)
    assert 4.0 < times.seconds(1, 4000) < 16.0

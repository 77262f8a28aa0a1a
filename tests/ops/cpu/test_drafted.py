"""What native code does for all rows of a step with drafts equals its definition in numpy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.bench.workload.host_drafts import Dial
from ridgeline.draft_options import DRAFT_MODEL, MOST_DRAFTS
from ridgeline.messages import Request, StepPlan
from ridgeline.ops.cpu import native
from ridgeline.runner.row_tables import Guesses, RowTables, spread_reference
from ridgeline.runner.verify import Planned, Positions, drafted_tokens, lay_out_guesses, take_back
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafting import DecodingRows
from ridgeline.scheduler.drafts.acceptance import Acceptance, RowRecords, Sources, survival
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import Paths
from ridgeline.scheduler.drafts.shape_times import Pace, ShapeTimes
from ridgeline.scheduler.drafts.weighing import Weighing, best_of_each_row
from ridgeline.scheduler.sequence import Sequence, Turn
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, GraphShapes

MAX_ROWS = 12
pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C compiler")


def equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name


def drafted_plan(rng: np.random.Generator, lengths: np.ndarray) -> tuple[StepPlan, np.ndarray]:
    """Decodes without drafts, then with drafts, then prompts, of which not all sample; the places of rows that do."""
    count = int(rng.integers(1, MAX_ROWS))
    rows = rng.permutation(MAX_ROWS)[:count].astype(np.int32)
    kind = np.sort(rng.integers(0, 3, count))
    kind[-1] = max(kind[-1], 1)
    kind[0] = min(kind[0], 1)                            # one row with drafts at least
    width = np.where(kind == 1, rng.integers(1, 5, count), 0).astype(np.int32)
    if not width.any():
        width[0] = 2
        kind[0] = 1
    own = np.where(kind == 2, rng.integers(2, 9, count), 1)
    samples = (kind < 2) | (rng.random(count) < 0.5)
    reach = int(width.max()) + int(rng.integers(0, 4))
    drafts = rng.integers(-1, 99, (count, reach)).astype(np.int32)
    start = (lengths[rows] + 1 - rng.integers(0, 5, count)).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    plan = StepPlan(
        1, nothing, [], nothing.reshape(0, 4), rows, (own + width).astype(np.int32), samples.astype(np.int8),
        width=width, drafts=drafts, drafts_from=start,
    )
    return plan, np.flatnonzero(samples)


def row_tables(rng: np.random.Generator, groups: int = 1, block_size: int = 16) -> RowTables:
    tables = RowTables(groups, block_size, MAX_ROWS, 128, torch.device("cpu"))
    assert tables.native is not None
    tables.length[:MAX_ROWS] = rng.integers(5, 60, MAX_ROWS)
    tables.num_given[:MAX_ROWS] = tables.length[:MAX_ROWS] + rng.integers(-2, 2, MAX_ROWS)
    tables.blocks[:, :MAX_ROWS] = rng.integers(1, 999, tables.blocks[:, :MAX_ROWS].shape)
    return tables


@pytest.mark.parametrize("seed", range(60))
def test_guesses_are_laid_out_as_in_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = row_tables(rng)
    plan, places = drafted_plan(rng, tables.length)
    guesses, positions = lay_out_guesses(plan, places, tables)
    expected = Guesses.of(plan, tables.length[plan.rows])
    equal(guesses, expected)
    equal(positions, Positions.of(plan, places, expected))


@pytest.mark.parametrize("is_native", [True, False])
def test_drafts_of_a_position_that_a_row_has_not_reached_are_refused(is_native: bool) -> None:
    rng = np.random.default_rng(0)
    tables = row_tables(rng)
    plan, places = drafted_plan(rng, tables.length)
    assert plan.drafts_from is not None and plan.width is not None
    place = int(np.flatnonzero(plan.width)[0])
    plan.drafts_from[place] += 9
    tables.native = tables.native if is_native else None
    with pytest.raises(AssertionError, match=f"row {plan.rows[place]}: "):
        lay_out_guesses(plan, places, tables)


@pytest.mark.parametrize("seed", range(60))
def test_the_integers_of_a_batch_are_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = row_tables(rng, int(rng.integers(1, 4)), int(rng.choice([4, 16])))
    plan, _ = drafted_plan(rng, tables.length)
    assert plan.width is not None
    rows, counts = plan.rows.astype(np.int64), plan.num_tokens.astype(np.int64)
    decodes, guesses = int((counts - plan.width == 1).sum()), Guesses.of(plan, tables.length[rows])
    if seed % 3 == 0:                                    # no drafts
        counts, guesses = counts - plan.width, None
    if seed % 2:                                         # padding behind the decodes: rows with a token, or without
        rows, counts = rows[:decodes], counts[:decodes]
        rows, counts = np.append(rows, [MAX_ROWS] * 3), np.append(counts, [seed % 3 == 0] * 3)
        decodes += 3
    total = int(counts.sum()) + seed % 5
    native_found = tables.spread(rows, counts, decodes, total, guesses)
    equal(native_found, spread_reference(tables, rows, counts, decodes, total, guesses))


@pytest.mark.parametrize("rows", [[], [MAX_ROWS], [0, 1]])
def test_a_batch_without_tokens_is_that_of_numpy(rows: list[int]) -> None:
    tables = row_tables(np.random.default_rng(0), 2)
    given = np.array(rows, np.int64), np.zeros(len(rows), np.int64), len(rows), 0, None
    equal(tables.spread(*given), spread_reference(tables, *given))


def test_a_position_beyond_the_tables_is_refused() -> None:
    tables = RowTables(1, 16, MAX_ROWS, 32, torch.device("cpu"))
    tables.length[0] = 31                                # the table itself is wider, see RowTables
    with pytest.raises(AssertionError, match="more tokens than its table"):
        tables.spread(np.array([0]), np.array([2]), 1, 2, None)


def sequences(count: int) -> list[Sequence]:
    made = [Request(f"r{number}", [1, 2, 3], SamplingParams()) for number in range(count)]
    return [Sequence(request, 0, Turn(0, number, 0), 10**9, 0, frozenset()) for number, request in enumerate(made)]


@pytest.mark.parametrize("seed", range(20))
def test_outcomes_are_counted_as_in_numpy(seed: int) -> None:
    rng, rows, kinds = np.random.default_rng(seed), sequences(100), 8        # more rows than there are slots at first
    both = RowRecords(kinds, native.library()), RowRecords(kinds)
    slots, _ = (records.slots(rows) for records in both)
    for step in range(0, 12_000, 300 if seed % 2 else 1200):                 # up to steps after which all has faded
        sent = rng.permutation(slots)[:60]
        source, expected = rng.integers(0, 2 * kinds, len(sent)), rng.random(len(sent)) * (rng.random(len(sent)) < 0.8)
        told = np.append(rng.permutation(slots)[:50], -1)                    # some have none in flight; one has ended
        width = rng.integers(1, MOST_DRAFTS + 1, len(told)).astype(np.int32)
        accepted = rng.integers(0, width + 1)
        for records in both:
            records.send(sent, source, expected)
        one, other = (records.outcome(told, width, accepted, step) for records in both)
        equal(one, other)
        for name in ("tried", "accepted"):
            np.testing.assert_allclose(getattr(both[0], name), getattr(both[1], name), rtol=1e-12)
        for name in ("waiting", "_source", "_expected", "_step"):
            np.testing.assert_array_equal(getattr(both[0], name), getattr(both[1], name))


@pytest.mark.parametrize("seed", range(20))
def test_chances_are_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    offers, positions = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    rates = rng.random((1 if seed % 3 else offers, positions))
    tried = rng.random(offers) * 20 * (rng.random(offers) < 0.7) * (seed != 4)           # also of rows of which nothing is known
    accepted, lengths = tried * rng.random(offers), rng.integers(1, positions + 1, offers)
    found = survival(rates, tried, accepted, lengths, native.library())
    np.testing.assert_allclose(found, survival(rates, tried, accepted, lengths), rtol=1e-12)


def offers_of(rng: np.random.Generator, rows: list[Sequence]) -> tuple[DecodingRows, np.ndarray, Paths, np.ndarray]:
    """Of two proposers, so that a row may have two; some of them with tokens in flight."""
    count = len(rows)
    places = np.sort(rng.choice(np.repeat(np.arange(count), 2), int(rng.integers(1, 2 * count)), replace=False))
    allowed, pending = rng.integers(1, MOST_DRAFTS + 1, count), rng.integers(0, 3, count)
    ends = pending[places] + rng.integers(1, 9, len(places))
    paths = Paths(places, np.full((len(places), int(ends.max())), 7, np.int32), ends, rng.integers(0, 4, len(places)))
    source = 2 * (paths.evidence + 4 * rng.integers(0, 2, len(places))) + (pending[places] > 0)
    return DecodingRows(rows, allowed, pending, 200, count, 640 * count), allowed, paths, source


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_offers_are_weighed_and_sent_as_in_numpy(seed: int, adaptive: bool) -> None:
    rng, rows, sources = np.random.default_rng(seed), sequences(40), Sources(("ngram", DRAFT_MODEL))
    both = []
    for library in (native.library(), None):
        records = RowRecords(sources.kinds, library)
        both.append((records, Weighing(records, sources, Acceptance(MOST_DRAFTS), library, adaptive)))
    for step in range(20):
        asked, allowed, paths, source = offers_of(rng, rows)
        found = [weighing.weigh(asked, allowed, paths, source, step) for _, weighing in both]
        for name in ("length", "source", "slots", "tried", "accepted", "chances"):
            one, other = (getattr(each, name) for each in found)
            np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=name)
            assert one.dtype == other.dtype, name
        chosen = [best_of_each_row(each, 0.1) for each in found]
        np.testing.assert_array_equal(chosen[0].places, chosen[1].places)
        width = np.zeros(len(rows), np.int64)
        width[chosen[0].places] = rng.integers(0, chosen[0].length + 1)
        width[chosen[0].places[0]] = 1
        drafted = width.nonzero()[0]
        accepted = rng.integers(0, width[drafted] + 1)
        for (records, weighing), own in zip(both, chosen, strict=True):
            weighing.send(own, width, adaptive)
            if step % 3:                                 # else the next step is planned before: more are in flight
                records.outcome(records.known([rows[place] for place in drafted.tolist()]), width[drafted], accepted, step)
        for name in ("tried", "accepted", "_expected", "waiting", "_source", "_step"):
            one, other = (getattr(records, name) for records, _ in both)
            np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", range(40))
def test_the_best_drafts_are_those_of_numpy(seed: int) -> None:
    rng, rows = np.random.default_rng(seed), sequences(int(np.random.default_rng(seed).integers(1, 60)))
    times = ShapeTimes(lambda tokens, keys: 3e-3 + 1e-5 * tokens, GraphShapes(64, 8192, MOST_VERIFIED) if seed % 3 else None)
    for _ in range(30):                                  # times go up and down
        rows_then, queries = int(rng.integers(1, 64)), int(rng.integers(1, 5))
        times.observe(rows_then, min(512, rows_then * queries), queries, 640, 1e-3 * (1 + float(rng.random())))
    controller = Controller([Dial()], Pace(times), MOST_DRAFTS, native=native.library())
    controller._step = 32 * int(seed % 2)                # curious or not
    asked, allowed, paths, source = offers_of(rng, rows)
    asked.room = int(rng.integers(1, 200))
    offers = best_of_each_row(controller._weighing.weigh(asked, allowed, paths, source % 8, 1), 0.0)
    chances = -np.sort(-rng.random(offers.chances.shape) ** (1 + seed % 4), axis=1)
    offers.chances = np.round(chances, 1 + seed % 3)     # some are equal
    offers.chances *= np.arange(offers.chances.shape[1]) < offers.length[:, None]
    chosen = controller._best(offers.chances, controller._honesty.share, asked)
    expected = np.bincount(offers.places[chosen // offers.chances.shape[1]], minlength=len(rows))
    np.testing.assert_array_equal(controller._best_widths(offers, asked), expected)


class Said:
    """What a sampler counts of each row."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = np.zeros(len(numbers), [("seed", np.int64), ("index", np.int64)])
        self.numbers["index"] = numbers
        index = self.numbers["index"]
        self.said_at = index.ctypes.data, index.strides[0]

    def said_ahead(self, rows: np.ndarray, counts: np.ndarray) -> None:
        self.numbers["index"][rows] += counts


@pytest.mark.parametrize("seed", range(40))
def test_what_a_step_brings_is_laid_out_as_in_numpy(seed: int) -> None:
    found = []
    for is_native in (True, False):
        rng = np.random.default_rng(seed)
        tables = row_tables(rng)
        tables.native = tables.native if is_native else None
        plan, places = drafted_plan(rng, tables.length)
        _, positions = lay_out_guesses(plan, places, tables)
        stays = tables.stay[plan.rows]
        tables.stay += rng.random(MAX_ROWS) < 0.2        # other sequences have got these rows meanwhile
        accepted = rng.integers(0, positions.width + 1)
        ahead = None if seed % 3 == 0 else rng.random(len(places)) < 0.7
        planned = Planned(places, positions, stays, rng.integers(50, 99, len(plan.rows)).astype(np.int32), ahead)
        later = [(rng.permutation(MAX_ROWS)[:5].astype(np.int32), np.full(5, 90, np.int32)) for _ in range(seed % 3)]
        said, tokens = Said(np.arange(100, 100 + MAX_ROWS)), rng.integers(0, 999, positions.count)
        failed, counts = rng.random(positions.count) < 0.1, np.zeros(len(plan.rows), np.int32)
        counts[places] = 1
        take_back(tables, said, planned, accepted, later)                # type: ignore[arg-type]
        laid = drafted_tokens(tables.native, planned, accepted, tokens, failed, counts)
        found.append([tables.length, said.numbers["index"], planned.lengths, *(lengths for _, lengths in later), *laid])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


def test_the_controller_chooses_the_same_with_and_without_native_code() -> None:
    rows, rng = sequences(24), np.random.default_rng(0)
    times = [ShapeTimes(lambda tokens, keys: 3e-3 + 2e-8 * keys) for _ in range(2)]
    libraries = native.library(), None
    both = [Controller([Dial()], Pace(each), MOST_DRAFTS, native=found) for each, found in zip(times, libraries, strict=True)]
    seen, chances = set(), rng.random(len(rows))
    for _ in range(400):
        asked = DecodingRows(rows, np.full(24, 8), np.zeros(24, np.int64), 200, 24, 24 * 640)
        widths = [np.zeros(24, np.int64) if (found := each.plan(asked)) is None else found.width for each in both]
        assert widths[0].tolist() == widths[1].tolist()
        drafted = np.flatnonzero(widths[0])
        accepted = np.minimum(rng.geometric(1 - chances[drafted] + 1e-9) - 1, widths[0][drafted])
        total = 24 + int(widths[0].sum())
        for each in both:
            each.timed(24, total, 1 + int(widths[0].max()), 24 * 640, 3e-3 + 3e-5 * total,
                       total - 24 - int(accepted.sum()))
            if len(drafted):
                each.observe([rows[place] for place in drafted.tolist()], widths[0][drafted], accepted, 0.0)
        seen.add(tuple(widths[0].tolist()))
    assert len(seen) > 20

"""What native code does for all rows of a step with drafts equals its definition in numpy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.messages import StepPlan
from ridgeline.ops.cpu import native
from ridgeline.runner.row_tables import Guesses, RowTables, spread_reference
from ridgeline.runner.verify import Positions, lay_out_guesses

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


@pytest.mark.parametrize("seed", range(60))
def test_guesses_are_laid_out_as_in_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 60, MAX_ROWS)
    plan, places = drafted_plan(rng, lengths)
    guesses, positions = lay_out_guesses(plan, places, lengths[plan.rows])
    expected = Guesses.of(plan, lengths[plan.rows])
    equal(guesses, expected)
    equal(positions, Positions.of(plan, places, expected))


def test_drafts_of_a_position_that_a_row_has_not_reached_are_refused() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, MAX_ROWS)
    plan, places = drafted_plan(rng, lengths)
    assert plan.drafts_from is not None and plan.width is not None
    place = int(np.flatnonzero(plan.width)[0])
    plan.drafts_from[place] += 9
    with pytest.raises(AssertionError, match=f"row {plan.rows[place]}: "):
        lay_out_guesses(plan, places, lengths[plan.rows])


@pytest.mark.parametrize("seed", range(60))
def test_the_integers_of_a_batch_are_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, block_size = int(rng.integers(1, 4)), int(rng.choice([4, 16]))
    tables = RowTables(groups, block_size, MAX_ROWS, 128, torch.device("cpu"))
    tables.length[:MAX_ROWS] = rng.integers(5, 60, MAX_ROWS)
    tables.num_given[:MAX_ROWS] = tables.length[:MAX_ROWS] + rng.integers(-2, 2, MAX_ROWS)
    tables.blocks[:, :MAX_ROWS] = rng.integers(1, 999, tables.blocks[:, :MAX_ROWS].shape)
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


def test_a_position_beyond_the_tables_is_refused() -> None:
    tables = RowTables(1, 16, MAX_ROWS, 32, torch.device("cpu"))
    tables.length[0] = 31
    with pytest.raises(AssertionError, match="more tokens than its table"):
        tables.spread(np.array([0]), np.array([2]), 1, 2, None)

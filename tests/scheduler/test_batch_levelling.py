"""How many rows of a batch run at once: numbers alone. What the scheduler does with them is in test_scheduler.py."""

from __future__ import annotations

import pytest

from ridgeline.sizes import batch_levelling


@pytest.mark.parametrize(
    ("answers", "enough", "rows"),
    [
        ([40] + [4] * 70, 8, 8),                         # 320 tokens in 40 steps
        ([40] + [4] * 30, 8, 8),                         # 160 in 40: four would do, but eight cost no more a row …
        ([40] + [4] * 30, 9, 12),                        # … and steps of nine are filled up to twelve
        ([40] * 3 + [4] * 200, 8, 24),                   # 920 in 40
        ([6] * 40, 8, None),                             # all end together as it is
        ([40] + [4] * 7, 8, None),                       # not more than eight
        ([40] * 60 + [4] * 90, 8, None),                 # 69 are more than there are rows
        ([40] + [4] * 70, None, None),                   # a machine that nobody knows
        ([], 8, None),
        ([*range(21, 31)] * 2, 16, None),                # nearly alike: the last four would run when all others have ended
        ([*range(21, 31)] * 2 + [90], 16, 16),           # not so beside a longer one
    ],
)
def test_so_many_rows_that_all_end_together(answers: list[int], enough: int | None, rows: int | None) -> None:
    assert batch_levelling.level_rows(answers, enough, 64) == rows


def test_places_are_filled_several_at_a_time() -> None:
    level = batch_levelling.Level(32)
    assert level.places(0, 100) == 32
    level.begun(20, full=False)                          # the step had no tokens for more
    assert level.places(20, 80) == 12
    level.begun(32, full=False)
    assert [level.places(running, 68) for running in (32, 31)] == [0, 0]
    assert level.places(30, 68) == 2
    level.begun(31, full=True)                           # nor had the cache blocks
    assert level.places(31, 67) == 0 and level.places(31, 1) == 1

"""Split-KV shares: every key is read once, by CTAs with about equally much to read."""

from __future__ import annotations

import heapq
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.ops.attention.split_kv import (
    FIXED_SHARES,
    LEAST_OF_FEW,
    LEAST_SHARE,
    MOST_SHARES,
    SHARE_COST,
    SINGLE_SHARES,
    Shares,
    most_items,
    share_out,
)
from ridgeline.ops.cpu import native

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = 66                        # CTAs: four on each of 132 SMs, eight KV heads


def spans(shares: Shares, lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, first key, one past the last) of every item, as the kernel computes them."""
    found = []
    for item, row in enumerate(shares.item_row.tolist()):
        if row >= 0:
            share = item - int(shares.first_item[row])
            begin = share * int(shares.size[row])
            found.append((row, begin, min(begin + int(shares.size[row]), int(lengths[row]))))
    return found


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=300), st.integers(1, 200), st.booleans())
def test_every_key_is_read_once(lengths: list[int], programs: int, fixed: bool) -> None:
    array = np.array(lengths, np.int32)
    shares = share_out(array, programs, fixed)
    assert len(shares.item_row) == (len(lengths) * FIXED_SHARES if fixed else most_items(len(lengths), programs))
    next_key = dict.fromkeys(range(len(lengths)), 0)
    seen = set()
    for row, begin, end in spans(shares, array):
        assert begin == next_key[row] and (end > begin or lengths[row] == 0)
        next_key[row] = end
        seen.add(row)
    assert [next_key[row] for row in range(len(lengths))] == lengths and len(seen) == len(lengths)
    counts = np.bincount(shares.item_row[shares.item_row >= 0])
    assert counts.max() <= (FIXED_SHARES if fixed else MOST_SHARES)


LENGTHS = st.one_of(
    st.lists(st.integers(0, 20_000), min_size=3, max_size=300),
    st.integers(3, 600).flatmap(lambda rows: st.integers(1, 9000).flatmap(       # alike: several cuts are compared
        lambda length: st.lists(st.integers(length, length + length // 4), min_size=rows, max_size=rows)
    )),
)


@pytest.mark.skipif(native.library() is None, reason="no compiler")
@given(LENGTHS, st.integers(1, 200))
@example([0, 0, 0], 66)
@example([131_072] * 40 + [131_071], 66)
def test_one_native_call_shares_out_as_numpy_does(lengths: list[int], programs: int) -> None:
    array = np.array(lengths, np.int32)
    ours, theirs = share_out(array, programs), share_out(array, programs, native=native.library())
    for name in ("item_row", "first_item", "size"):
        expected, found = getattr(ours, name), getattr(theirs, name)
        assert found.dtype == expected.dtype and np.array_equal(found, expected), name


def test_equal_rows_are_not_cut_for_nothing() -> None:
    for rows in (66, 128, 500):
        lengths = np.full(rows, 640, np.int32) + np.arange(rows, dtype=np.int32) % 200
        assert (share_out(lengths, PROGRAMS).item_row >= 0).sum() == rows


def end(items: list[int], programs: int) -> int:
    """When the last item ends, in keys, if each goes to the CTA that is free first."""
    free = [0] * programs
    for keys in items:
        heapq.heapreplace(free, free[0] + keys + SHARE_COST)
    return max(free)


@pytest.mark.parametrize("rows", [12, 17, 24, 34, 40, 69, 80, 96])
def test_rows_of_one_length_end_together(rows: int) -> None:
    """One more row than CTAs would take twice as long if each row were one share."""
    lengths = np.full(rows, 2000, np.int32)
    cut = end([last - first for _, first, last in spans(share_out(lengths, PROGRAMS), lengths)], PROGRAMS)
    assert cut < 1.55 * lengths.sum() / PROGRAMS
    if rows > PROGRAMS:
        assert cut < 0.85 * end(lengths.tolist(), PROGRAMS)


def test_rows_are_cut_where_it_was_faster() -> None:
    """Rows and lengths that were measured both ways on one H200: times are test data (tests/golden/decode_shares.json)."""
    measured = json.loads((ROOT / "tests/golden/decode_shares.json").read_text())["shares"]
    judged = 0
    for name, (whole, cut, _) in measured.items():
        if " x " not in name or abs(whole / cut - 1) < 0.03:
            continue
        rows, keys = map(int, name.split(" x "))
        lengths = np.full(rows, keys, np.int32)
        items = int((share_out(lengths, PROGRAMS).item_row >= 0).sum())
        plain = len(spans_of_even_shares(lengths))
        assert (items != plain) == (cut < whole), name
        judged += 1
    assert judged > 15


def spans_of_even_shares(lengths: np.ndarray) -> list[int]:
    """The shares of the rule for uneven rows: as many for each as come closest to what every CTA would get."""
    even = max(LEAST_SHARE, lengths.sum() / max(len(lengths), min(SINGLE_SHARES * len(lengths), PROGRAMS)))
    return [row for row, length in enumerate(lengths) for _ in range(max(1, int(np.rint(length / even))))]


def test_a_list_has_room_for_no_more_than_pays() -> None:
    """A CTA without work is not free: 128 rows, full waves as they are, have none but those for rounding."""
    expected = {64: 66 + 32, 69: 3 * 69 + 34, 128: 128 + 64, 1000: 1000 + 500}
    assert {rows: most_items(rows, PROGRAMS) for rows in expected} == expected


def test_one_row_is_read_by_many_programs() -> None:
    shares = share_out(np.array([8192], np.int32), PROGRAMS)
    assert (shares.item_row >= 0).sum() == SINGLE_SHARES
    short = share_out(np.array([200], np.int32), PROGRAMS)
    assert int(short.size[0]) == LEAST_OF_FEW
    assert (share_out(np.full(8, 100, np.int32), PROGRAMS).item_row >= 0).sum() <= 8 * 2     # of LEAST_SHARE keys


@pytest.mark.parametrize("rows", [17, 45, 109, 225])
def test_no_program_has_far_more_than_its_part(rows: int) -> None:
    """Lengths as answers of very different lengths leave them; without cutting the longest row would be 4 to 10 parts."""
    rng = np.random.default_rng(rows)
    lengths = np.clip(rng.lognormal(6.4, 0.7, rows), 50, 3000).astype(np.int32)
    items = spans(share_out(lengths, PROGRAMS), lengths)
    even = max(LEAST_SHARE, lengths.sum() / max(rows, PROGRAMS))
    assert max(end - begin for _, begin, end in items) <= 1.5 * even + 32
    assert lengths.max() > 2 * even


def test_long_rows_come_first() -> None:
    lengths = np.array([100, 5000, 30, 900], np.int32)
    order = share_out(lengths, PROGRAMS).item_row
    order = order[order >= 0]
    assert list(dict.fromkeys(order.tolist())) == [1, 3, 0, 2]


def test_fixed_shares_depend_on_the_row_alone() -> None:
    alone = share_out(np.array([3000], np.int32), PROGRAMS, fixed=True)
    among = share_out(np.array([10, 3000, 20_000], np.int32), PROGRAMS, fixed=True)
    assert alone.size[0] == among.size[1]

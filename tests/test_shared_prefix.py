"""Rows that begin with the same blocks are found, and what is said of them is true of their tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.runner import shared_prefix
from ridgeline.runner.shared_prefix import NoSharedPrefixes, SharedPrefixes, Tiles

BLOCK, TILE = 4, 3


@pytest.fixture(autouse=True)
def any_saving_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 1)


def tables_of(stems: list[list[int]], lengths: list[int]) -> np.ndarray:
    """Row r begins with its stem of blocks; whatever else it has is its own."""
    table = np.zeros((len(lengths) + 1, 32), np.int32)
    fresh = 1000
    for row, (stem, length) in enumerate(zip(stems, lengths, strict=True)):
        for index in range(-(-(length + 1) // BLOCK)):
            fresh += 1
            table[row, index] = stem[index] if index < len(stem) else fresh
    return table


def check(tiles: Tiles, table: np.ndarray, rows: np.ndarray, length: np.ndarray) -> None:
    seen: set[int] = set()
    for row, tokens, first, count in zip(tiles.row, tiles.length, tiles.first, tiles.count, strict=True):
        places = tiles.members[first : first + count]
        assert count <= TILE and not seen & set(places.tolist())
        seen |= set(places.tolist())
        for place in places.tolist():
            blocks = tokens // BLOCK
            assert tiles.prefix_len[place] == tokens and 0 < tokens <= length[place] and tokens % BLOCK == 0
            assert (table[rows[place], :blocks] == table[row, :blocks]).all()
    assert seen == set(np.nonzero(tiles.prefix_len)[0].tolist())


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_what_is_found_is_shared(data: st.DataObject) -> None:
    stems = [list(range(10 * kind + 1, 10 * kind + 9)) for kind in range(1, 4)]
    chosen = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(1, 60)), min_size=1, max_size=14))
    own = [stems[kind][:blocks] for kind, blocks, _ in chosen]
    length = np.array([tokens for _, _, tokens in chosen])
    table = tables_of(own, length.tolist())
    rows = np.array(data.draw(st.permutations(range(len(chosen)))))
    tiles = SharedPrefixes(BLOCK, TILE).find(table, rows, length[rows], len(rows) + 2)
    if tiles is not None:
        assert len(tiles.members) == len(rows) + 2
        check(tiles, table, rows, length[rows])


def test_two_groups_and_a_stranger() -> None:
    stems = [[1, 2, 3, 4]] * 5 + [[7, 8]] * 2 + [[9]]
    length = np.array([30, 22, 17, 40, 18, 9, 12, 20])
    table, rows = tables_of(stems, length.tolist()), np.arange(8)
    tiles = SharedPrefixes(BLOCK, TILE).find(table, rows, length, 8)
    assert tiles is not None
    assert tiles.prefix_len.tolist() == [16, 16, 16, 16, 16, 8, 8, 0]
    assert tiles.length[:4].tolist() == [16, 16, 8, 0] and tiles.count[:4].tolist() == [3, 2, 2, 0]
    check(tiles, table, rows, length)


def test_one_row_that_shares_little_does_not_spoil_it_for_the_others() -> None:
    stems = [[1, 2, 3, 4, 5, 6, 7, 8]] * 5 + [[1]]
    length = np.full(6, 40)
    tiles = SharedPrefixes(BLOCK, TILE).find(tables_of(stems, length.tolist()), np.arange(6), length, 6)
    assert tiles is not None and tiles.prefix_len.tolist() == [32] * 5 + [0]


def test_a_search_is_remembered_until_a_row_changes() -> None:
    length = np.full(4, 20)
    table, rows = tables_of([[1, 2, 3]] * 4, length.tolist()), np.arange(4)
    finder = SharedPrefixes(BLOCK, TILE)
    first = finder.find(table, rows, length, 4)
    table[2, 1] = 99
    assert finder.find(table, rows, length + 1, 4) is first, "rows only grow"
    finder.forget()
    again = finder.find(table, rows, length + 1, 4)
    assert again is not None and again.prefix_len.tolist() == [12, 12, 0, 12]
    assert finder.steps == 3


def test_little_to_save_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    length = np.full(4, 20)
    table, rows = tables_of([[1, 2, 3]] * 4, length.tolist()), np.arange(4)
    assert NoSharedPrefixes().find(table, rows, length, 4) is None
    monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 3 * 12 + 1)
    assert SharedPrefixes(BLOCK, TILE).find(table, rows, length, 4) is None

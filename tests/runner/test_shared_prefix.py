"""Rows that begin with the same blocks are found, and what is said of them is true of their tables."""

from __future__ import annotations

import time

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
    monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 2)


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


def test_documents_behind_the_same_first_lines() -> None:
    """A template's head is everybody's. One who has only that, and is longer than all, spoils it for nobody."""
    head, one, other = [1, 2], [*range(10, 16)], [*range(20, 26)]
    stems = [head + one] * 4 + [head + other] * 5 + [head] * 3
    length = np.array([36, 40, 44, 50, 34, 37, 40, 60, 41, 70, 80, 90])
    table, rows = tables_of(stems, length.tolist()), np.arange(12)
    tiles = SharedPrefixes(BLOCK, TILE).find(table, rows, length, 12)
    assert tiles is not None and tiles.prefix_len.tolist() == [32] * 9 + [8] * 3
    check(tiles, table, rows, length)
    alone = np.array([3, 9, 10])                         # nobody to share a document with
    tiles = SharedPrefixes(BLOCK, TILE).find(table, alone, length[alone], 3)
    assert tiles is not None and tiles.prefix_len.tolist() == [8] * 3


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)), min_size=2, max_size=7))
def test_groups_save_more_than_any_one_group(ways: list[tuple[int, int, int, int]]) -> None:
    """And nearly what the best of all ways to put rows into groups would; a group shares what its members have in common."""
    stems = [[1 + a, 10 + 4 * a + b, 100 + 16 * a + 4 * b + c][:blocks] for a, b, c, blocks in ways]
    length = np.array([len(stem) * BLOCK + 1 for stem in stems])
    table, rows = tables_of(stems, length.tolist()), np.arange(len(stems))

    def common(members: list[int]) -> int:
        shared = 0
        while shared < min(length[member] // BLOCK for member in members):
            if len({int(table[member, shared]) for member in members}) > 1:
                break
            shared += 1
        return shared

    def best(rest: list[int]) -> int:
        if not rest:
            return 0
        first, others = rest[0], rest[1:]
        found = 0
        for chosen in range(2 ** len(others)):
            group = [first] + [each for place, each in enumerate(others) if chosen >> place & 1]
            left = [each for place, each in enumerate(others) if not chosen >> place & 1]
            found = max(found, (len(group) - 1) * common(group) + best(left))
        return found

    tiles = SharedPrefixes(BLOCK, 16).find(table, rows, length, len(rows))
    saved = 0 if tiles is None else tiles.saved // BLOCK
    subsets = ([row for row in rows.tolist() if chosen >> row & 1] for chosen in range(1, 2 ** len(rows)))
    assert max((len(each) - 1) * common(each) for each in subsets) <= saved <= best(rows.tolist()) <= saved * 4 // 3


def test_groups_for_which_there_are_no_tiles_are_joined() -> None:
    """Thirty-two pairs behind 63 blocks that all share: ten tiles hold ten pairs, or all rows."""
    table = np.zeros((64, 160), np.int32)
    table[:, :63] = np.arange(1, 64)
    table[:, 63:133] = 1000 + np.arange(70) + 100 * (np.arange(64) // 2)[:, None]
    table[:, 133:] = 10_000 + np.arange(27) + 100 * np.arange(64)[:, None]
    length = np.full(64, 140 * 16)
    tiles = SharedPrefixes(16, 32).find(table, np.arange(64), length, 64)
    assert tiles is not None and set(tiles.prefix_len.tolist()) == {63 * 16}


def test_blocks_that_nobody_shared_on_purpose_are_not_read_for_each_other() -> None:
    """A later block in common, behind different ones: no cache gives that out, and it is not believed."""
    length = np.full(3, 40)
    table, rows = tables_of([[1, 2, 3, 4, 5, 6, 7, 8]] * 3, length.tolist()), np.arange(3)
    table[1, 2] = 999
    tiles = SharedPrefixes(BLOCK, TILE).find(table, rows, length, 3)
    assert tiles is not None
    check(tiles, table, rows, length)


@pytest.mark.slow
def test_long_prefixes_of_many_rows_are_found_in_little_time() -> None:
    """512 rows of 100,000 tokens: it is done again whenever a request comes or goes."""
    table = np.zeros((512, 6250), np.int32)
    table[:] = np.arange(1, 6251)
    table[:, 6000:] += np.arange(512)[:, None] * 7000
    length = np.full(512, 100_000)
    finder, rows = SharedPrefixes(16, 8), np.arange(512)
    taken = []
    for _ in range(5):
        finder.forget()
        begin = time.process_time()
        tiles = finder.find(table, rows, length, 512)
        taken.append(time.process_time() - begin)
    assert tiles is not None and tiles.prefix_len.min() == 96_000
    assert min(taken) < 0.015


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


def test_few_rows_share_what_more_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five, two and two that begin alike: those five have a prefix of their own, the four only what everybody has."""
    monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 3)
    stems = [[1, 2, 3, 4]] * 5 + [[1, 7, 8]] * 2 + [[1, 9, 10]] * 2
    length = np.full(9, 20)
    table, rows = tables_of(stems, length.tolist()), np.arange(9)
    tiles = SharedPrefixes(BLOCK, TILE).find(table, rows, length, 9)
    assert tiles is not None and tiles.prefix_len.tolist() == [16] * 5 + [4] * 4
    check(tiles, table, rows, length)
    assert SharedPrefixes(BLOCK, TILE).find(table, rows[5:7], length[5:7], 2) is None

"""Finds decoding rows that begin with the same KV blocks, so that attention can read those once for all of them.

The prefix cache gives requests with a common prefix the same blocks; here they are found again in the block tables. The search
runs when the rows of the batch change, not every step: rows only grow, and what they grow by is their own.

Switched off, or where too little would be saved, nothing is found. The block tables are complete either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Tokens that are not read again, summed over the rows, from which a kernel more per layer pays.
FEWEST_SAVED = 32_768
# Rows that share a prefix, from which reading it once pays: for fewer the device's cache does as well, and the kernel reads it no
# faster for few than for many. A step of an 8B model with 128 rows in groups that share 2,000 tokens, off / on: groups of 4 rows
# 0.94, of 8 1.16, of 16 1.47.
FEWEST_ROWS = 6
MOST_LEVELS = 16                     # of prefixes that go on in different ways behind another one
SPARE_TILES = 8                      # more than one large group needs: each of several groups may end in a half-full tile


@dataclass(slots=True)
class Tiles:
    """Rows by prefix, cut into tiles, as ops/attention/attention_arguments.py:SharedPrefix wants them; int32 arrays."""

    row: np.ndarray                  # [N]: a row of the table that has the prefix
    length: np.ndarray               # [N]: its tokens; 0 where the tile is unused
    first: np.ndarray                # [N]: where the tile's members begin
    count: np.ndarray                # [N]: how many they are
    members: np.ndarray              # [R]: places in the batch
    prefix_len: np.ndarray           # [R]: by place

    @property
    def saved(self) -> int:
        """KV positions that are read once for a tile and not for each of its members."""
        return int((np.maximum(self.count - 1, 0) * self.length).sum())

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.row, self.length, self.first, self.count, self.members, self.prefix_len


class SharedPrefixes:
    def __init__(self, block_size: int, tile_rows: int) -> None:
        self._block_size, self._tile_rows = block_size, tile_rows
        self._seen = (b"", 0)        # the rows and the padding that `_found` is for
        self._found: Tiles | None = None
        self.steps = 0               # in which something was shared
        self.saved = 0               # tokens that the newest step did not read again

    def forget(self) -> None:
        """A row has other blocks than before."""
        self._seen = (b"", 0)

    def find(self, table: np.ndarray, rows: np.ndarray, length: np.ndarray, padded: int) -> Tiles | None:
        """Of rows [n] with tables [max_rows, blocks] and `length` tokens in the cache; room for `padded` places."""
        asked = (rows.tobytes(), padded)
        if asked != self._seen:
            self._seen, self._found = asked, self._search(table, rows, length, padded)
            self.saved = 0 if self._found is None else self._found.saved
        self.steps += self._found is not None
        return self._found

    def _search(self, table: np.ndarray, rows: np.ndarray, length: np.ndarray, padded: int) -> Tiles | None:
        if len(rows) < 2 or len(rows) * int(length.max(initial=0)) < FEWEST_SAVED:
            return None
        full = length // self._block_size                    # blocks of the past: this step's token is not shared
        found, most = None, FEWEST_SAVED - 1
        for levels in (MOST_LEVELS, 1, 0):                   # coarser groups, where there are not tiles for all of them
            saved, groups = self._split(table, rows, full, np.arange(len(rows)), 0, levels)
            if saved * self._block_size <= most:
                break
            tiles = self._tiles([(self._checked(table, rows, places, shared), shared) for places, shared in groups], rows, padded)
            read = [tiles.prefix_len[places] for places, _ in groups]
            saved = sum(max(int(np.count_nonzero(each)) - 1, 0) * int(each.max()) for each in read)
            if saved > most:
                found, most = tiles, saved
            if all(each.all() for each in read):
                break                                        # no row was left out
        return found

    def _split(
        self, table: np.ndarray, rows: np.ndarray, full: np.ndarray, places: np.ndarray, known: int, levels: int
    ) -> tuple[int, list[tuple[np.ndarray, int]]]:
        """(blocks that are not read again, [(places, blocks they share)]) of rows that share `known` blocks at least.

        As one group, or as one for each way in which they go on behind what all of them share, and one for rows that go on
        alone or as too few: the one that saves more. All requests share a chat template's first lines, few share a document.
        """
        shared = self._common(table, rows, full, places, known)
        whole = (len(places) - 1) * shared if len(places) >= FEWEST_ROWS else 0
        goes_on = full[places] > shared
        if levels == 0 or not goes_on.any():
            return whole, [(places, shared)] if whole else []
        on = places[goes_on]
        _, kind, count = np.unique(table[rows[on], shared], return_inverse=True, return_counts=True)
        alone = np.concatenate([places[~goes_on], on[count[kind] < FEWEST_ROWS]])
        enough = shared and len(alone) >= FEWEST_ROWS
        saved, groups = (len(alone) - 1) * shared if enough else 0, [(alone, shared)] if enough else []
        for which in np.nonzero(count >= FEWEST_ROWS)[0].tolist():
            theirs, found = self._split(table, rows, full, on[kind == which], shared + 1, levels - 1)
            saved += theirs
            groups += found
        return (saved, groups) if saved > whole else (whole, [(places, shared)] if whole else [])

    def _common(self, table: np.ndarray, rows: np.ndarray, full: np.ndarray, places: np.ndarray, known: int) -> int:
        """Leading blocks that all these rows share, by binary search: rows that share a block share all before it."""
        own, low, high = rows[places], known, int(full[places].min())
        while low < high:
            middle = (low + high) // 2
            column = table[own, middle]
            low, high = (middle + 1, high) if (column == column[0]).all() else (low, middle)
        return low

    @staticmethod
    def _checked(table: np.ndarray, rows: np.ndarray, places: np.ndarray, shared: int) -> np.ndarray:
        """The places whose first blocks are those of the first row: all, if the prefix cache gave these blocks out."""
        own = rows[places].tolist()
        first = table[own[0], :shared].tobytes()
        return places[[table[row, :shared].tobytes() == first for row in own]]

    def _tiles(self, groups: list[tuple[np.ndarray, int]], rows: np.ndarray, padded: int) -> Tiles:
        num_tiles = -(-padded // self._tile_rows) + SPARE_TILES
        columns = np.zeros((4, num_tiles), np.int32)
        members, prefix_len = np.zeros((2, padded), np.int32)
        tile = used = 0
        for places, shared in sorted(groups, key=lambda group: (1 - len(group[0])) * group[1]):
            if len(places) < 2:
                continue
            tokens = shared * self._block_size
            for start in range(0, len(places), self._tile_rows):
                own = places[start : start + self._tile_rows]
                if tile == num_tiles:
                    break
                columns[:, tile] = rows[own[0]], tokens, used, len(own)
                members[used : used + len(own)] = own
                prefix_len[own] = tokens
                used += len(own)
                tile += 1
        row, length, first, count = columns
        return Tiles(row, length, first, count, members, prefix_len)


class NoSharedPrefixes(SharedPrefixes):
    """The off version."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def find(self, table: np.ndarray, rows: np.ndarray, length: np.ndarray, padded: int) -> Tiles | None:
        return None

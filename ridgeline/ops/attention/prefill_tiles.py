"""Cuts the queries of prompts into tiles: the work list of the persistent CTAs of prefill attention (kernel_prefill_hopper.py).

A tile of queries is made of (token, head of the group) pairs. CTAs take tiles in the order of the list. The longest come
first, so the last ones to start are short.

This is numpy on the host, computed during the step before. The length of the list depends only on the shape of the step, as a
captured CUDA graph needs it.
"""

from __future__ import annotations

import numpy as np

TILE_PAIRS = 128                     # queries of a tile: 64 for each of two warpgroups, the rows of one wgmma instruction
TILE_KEYS = 128
CLASSES = 4                          # of lengths in the list of tiles, for each doubling


def tile_tokens(group: int) -> int:
    """Tokens of a tile, for `group` query heads per KV head."""
    return TILE_PAIRS // rounded(group)


def most_tiles(tokens: int, rows: int, group: int) -> int:
    """Upper bound for `rows` rows that have `tokens` tokens together."""
    return tokens // tile_tokens(group) + rows


def cut_queries(
    query_start: np.ndarray, kv_len: np.ndarray, table_rows: np.ndarray, group: int, size: int | None = None
) -> np.ndarray:
    """int32 [N, 4], per tile: its first token, tokens of the row from there on, that token's position, row of the table.

    For rows with the borders `query_start` [R + 1], `kv_len` positions each, at `table_rows`. `size`: length of the
    list, filled up with tiles of no tokens. Longest first, but tiles of one row with similar lengths stay neighbours: the second
    one then finds the K and V of the row in L2.
    """
    step = tile_tokens(group)
    if len(kv_len) == 1:                                 # no need to sort; part of TTFT
        count = int(query_start[1] - query_start[0])
        begin = np.arange(0, count, step)[::-1]
        tiles = np.zeros((len(begin) if size is None else size, 4), np.int32)
        first, left, position, row = tiles[: len(begin)].T
        first[:], left[:], row[:] = begin + query_start[0], count - begin, table_rows[0]
        position[:] = begin + (int(kv_len[0]) - count)
        return tiles
    queries = np.diff(query_start).astype(np.int64)
    counts = -(-queries // step)
    row = np.repeat(np.arange(len(queries)), counts)
    before = np.cumsum(counts) - counts
    begin = (np.arange(len(row)) - before[row]) * step
    position = (kv_len - queries)[row] + begin
    walked = (position + np.minimum(queries[row] - begin, step) - 1) // TILE_KEYS + 1
    length = (CLASSES * np.log2(walked)).astype(np.int64)
    order = np.lexsort((-position, row, -length))
    tiles = np.zeros((len(row) if size is None else size, 4), np.int32)
    columns = (query_start[:-1][row] + begin, queries[row] - begin, position, table_rows[row])
    tiles[: len(row)] = np.stack(columns, axis=1)[order]
    return tiles


def rounded(group: int) -> int:
    """Up to a power of two."""
    return 1 << (group - 1).bit_length()

"""Chooses the GEMMs of 81 to 128 rows (fp8: 65 to 128) that gemm_wide.py computes, and their tiles, in plain Python.

The rules come from chains of layers of an 8B model on an H200, checked on 1B and 70B models. With a gate, tiles of nearly 128
pairs read x half as often as tiles of 128 outputs. Tiles of 256 outputs gain where there are several waves of them (the head),
unless the last wave is half empty. Tiles of 128 outputs with split-K gain where inputs are many and every SM is busy (the down
projection). cuBLAS computes the rest: it is faster for q, k and v, and with more than 128 rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ridgeline.ops.linear.select import MULTIPROCESSORS

FEWEST_WIDE_ROWS, MOST_WIDE_ROWS = 81, 128
FEWEST_FP8_ROWS = 65
FEWEST_INPUTS = 2048
FEWEST_PAIRS = 96                    # of a tile: narrower ones read x too often
FULL = 0.92                          # share of the waves' CTAs that must be busy
LONG = 3                             # with split-K: times as many inputs as outputs


@dataclass(frozen=True, slots=True)
class WidePlan:
    tile: int                        # weight rows that a tile has room for
    step: int                        # that it has: outputs, or with a gate both halves of its pairs
    splits: int                      # split-K: a power of two
    stages: int                      # blocks of weights in the ring
    row_stages: int                  # blocks of x in the ring

    def shared_bytes(self) -> int:
        """What the blocks of 64 inputs take."""
        return (self.stages * self.tile + self.row_stages * 128) * 64 * 2


@functools.cache
def wide_plan(rows: int, outputs: int, inputs: int, gated: bool = False) -> WidePlan | None:
    """With a gate, `outputs` counts the pairs. None: another kernel's."""
    if not FEWEST_WIDE_ROWS <= rows <= MOST_WIDE_ROWS or inputs < FEWEST_INPUTS or inputs % 8:
        return None
    if gated:
        return _pairs_plan(outputs)
    if outputs >= 256 * MULTIPROCESSORS:
        return WidePlan(256, 256, 1, 4, 5) if _fullness(-(-outputs // 256)) >= FULL else None
    for splits in (2, 4):
        programs = -(-outputs // 128) * splits
        if programs <= MULTIPROCESSORS and _fullness(programs) >= FULL and inputs >= LONG * outputs:
            return WidePlan(128, 128, splits, 7, 7)
    return None


def _pairs_plan(pairs: int) -> WidePlan | None:
    """As many pairs in each tile as fill the waves, nearly 128."""
    rounds = -(-pairs // (128 * MULTIPROCESSORS))
    each = -(-pairs // (rounds * MULTIPROCESSORS * 16)) * 16
    return WidePlan(256, 2 * each, 1, 4, 5) if each >= FEWEST_PAIRS else None


@functools.cache
def fp8_wide_plan(rows: int, outputs: int, inputs: int, gated: bool = False) -> WidePlan | None:
    """For 8-bit codes and 65 to 128 rows. With a gate as for 16 bits, else tiles of 128 outputs: as many splits as can run at
    once; cuBLAS has none, and takes 1.6 times as long behind the gate."""
    if not FEWEST_FP8_ROWS <= rows <= MOST_WIDE_ROWS or inputs < FEWEST_INPUTS or inputs % 16:
        return None
    if gated:
        return _pairs_plan(outputs)
    tiles = -(-outputs // 128)
    splits = next((each for each in (4, 2) if tiles * each <= MULTIPROCESSORS), 1)
    return WidePlan(128, 128, splits, *((7, 7) if splits > 1 else (6, 7)))


def _fullness(programs: int) -> float:
    rounds = -(-programs // MULTIPROCESSORS)
    return programs / (rounds * MULTIPROCESSORS)

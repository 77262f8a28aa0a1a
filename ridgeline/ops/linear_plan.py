"""Which kernel multiplies how many rows by which matrix: a rule in plain Python, derived from measurements on an H200."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """One row: ops/gemv.py."""

    block: int                       # weight rows that a program multiplies at a time; pairs of rows with a gate
    warps: int
    programs: int                    # per multiprocessor; each walks over several blocks


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """A few rows: ops/small_gemm.py. The weight is the left side of the product where `weight_left`: then a tile of few
    rows of x still fills the matrix unit, whose left side has 64 rows."""

    block_rows: int                  # rows of x in a tile: all of them
    block_outputs: int               # of each half, with a gate
    block_inputs: int
    splits: int                      # of the inputs
    warps: int
    stages: int                      # blocks of inputs that are on their way at a time
    weight_left: bool = True
    descriptors: bool = False        # tiles are fetched by the copy engine
    step: int = 0                    # outputs from a tile to the next, fewer than it has room for; 0: as many
    ahead: int = 0                   # inputs whose weights are fetched before the predecessor's result is waited for


Plan = GemvPlan | GemmPlan | None    # None: the library

MOST_ROWS = 128                      # from here on the library's kernels win
MOST_GEMV_INPUTS = 16384             # that a program holds in registers


@functools.cache
def plan(rows: int, outputs: int, inputs: int, gated: bool) -> Plan:
    """For 16 bit numbers. With a gate, `outputs` counts the pairs."""
    if rows > MOST_ROWS or inputs % 16 or outputs < 64 or inputs < 64:
        return None
    if rows == 1 and inputs <= MOST_GEMV_INPUTS:
        return GemvPlan(2 if gated else 4, 8, 4)
    return None


def invariant_plan(rows: int, outputs: int, inputs: int) -> GemmPlan:
    """For invariant_gemm.py: parts and blocks of inputs depend on the matrix alone, the tile on the rows as well."""
    splits = 1
    while outputs // 128 * splits < 66 and inputs // (2 * splits) >= 512:
        splits *= 2
    if rows <= 128:
        block_rows = next(size for size in (16, 32, 64, 128) if rows <= size)
        return GemmPlan(block_rows, 128, 64, splits, 8 if block_rows == 128 else 4, 4, True, True, ahead=256)
    return GemmPlan(128, 128 if splits > 1 else 256, 64, splits, 8, 3, False, True)

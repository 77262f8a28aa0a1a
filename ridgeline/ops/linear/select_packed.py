"""Chooses the kernel and its tiles for packed 4-bit weights by rows and shape, in plain Python."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedGemvPlan:
    """One to eight rows: ops/linear/packed_gemv.py."""

    rows: int                        # of x in shared memory: 1 or 8
    groups: int                      # strips of 16 outputs that a CTA multiplies at a time
    warps: int                       # that share the inputs of a strip
    programs: int                    # CTAs per SM
    registers: int | None = None     # most of a thread, to have room for the CTAs

    def shared_bytes(self, inputs: int) -> int:
        """Shared memory that x takes in one CTA."""
        return -(-inputs // (512 * self.warps)) * 512 * self.warps * self.rows * 2


@dataclass(frozen=True, slots=True)
class PackedGemmPlan:
    """More rows: ops/linear/packed_gemm.py."""

    block_rows: int                  # rows of x in a tile
    parts: int                       # groups of warps with a program of their own: 1 or 2
    warps: int                       # of each part, with 16 outputs each
    halves: int                      # how often a warp has 16 outputs: 1 or 2
    tiles: int                       # times 64 inputs in a block: 2, 4 or 8
    stages: int                      # blocks of x in the ring
    splits: int                      # split-K
    step: int                        # strips of 16 outputs in a tile, at most parts * warps * halves
    programs: int = 1                # CTAs per SM

    def shared_bytes(self) -> int:
        """Shared memory that the ring of one CTA takes."""
        return self.tiles * 64 * self.block_rows * 2 * self.stages

    def registers(self) -> int:
        """Of each thread, before the loading warp gives most of its own away. Its warp counts as four."""
        return 65536 // (32 * (self.parts * self.warps + 4) * self.programs) // 8 * 8


MULTIPROCESSORS = 132                # SMs of an H200, for which the rules were made
MOST_GEMV_ROWS = 8
MOST_GEMV_BYTES = 96 * 1024          # of x in the shared memory of a CTA
MOST_ROWS = 384                      # beyond them expanding the weight and cuBLAS are faster
# By rows of x in a tile: parts, warps, halves, tiles, stages, where the inputs are split and where they are not.
_SPLIT = {
    8: (1, 8, 1, 8, 8), 16: (1, 8, 1, 8, 8), 32: (1, 8, 1, 8, 5), 64: (2, 4, 1, 4, 5), 128: (2, 4, 1, 2, 6),
}
_WHOLE = {**_SPLIT, 64: (2, 4, 2, 2, 8), 128: (2, 4, 2, 2, 6)}


@functools.cache
def packed_plan(rows: int, outputs: int, inputs: int) -> PackedGemvPlan | PackedGemmPlan | None:
    """`outputs` are those stored: gates and partners. None: expand the weight and call cuBLAS."""
    if not 1 <= rows <= MOST_ROWS:
        return None
    strips = -(-outputs // 16)
    few = strips <= 2 * MULTIPROCESSORS
    if rows == 1 and inputs * 2 <= MOST_GEMV_BYTES:
        # Two CTAs with eight warps each where a strip is all that a CTA has, or where it is long.
        if few or inputs > 4096:
            return PackedGemvPlan(1, 1, 8, 2)
        return PackedGemvPlan(1, 2, 4, 2) if strips <= 4 * MULTIPROCESSORS else PackedGemvPlan(1, 1, 4, 4)
    if rows <= MOST_GEMV_ROWS and not few and inputs * 16 <= MOST_GEMV_BYTES:
        return PackedGemvPlan(8, 2, 8, 1) if strips <= 4 * MULTIPROCESSORS else PackedGemvPlan(8, 2, 4, 2)
    return _gemm_plan(rows, strips, -(-inputs // 512))


def _gemm_plan(rows: int, strips: int, runs: int) -> PackedGemmPlan:
    block_rows = next((size for size in (8, 16, 32, 64) if rows <= size), 128)
    row_blocks = -(-rows // block_rows)
    parts, warps, halves, tiles, stages = _SPLIT[block_rows]
    programs = -(-strips // (parts * warps * halves)) * row_blocks
    splits = next((each for each in (8, 4, 2) if programs * each <= MULTIPROCESSORS and runs >= each), 1)
    if programs > MULTIPROCESSORS:
        parts, warps, halves, tiles, stages = _WHOLE[block_rows]
        programs = -(-strips // (parts * warps * halves)) * row_blocks
    most = parts * warps * halves
    rounds = -(-programs * splits // MULTIPROCESSORS)
    step = min(most, max(4, -(-strips * row_blocks * splits // (rounds * MULTIPROCESSORS))))
    return PackedGemmPlan(block_rows, parts, warps, halves, tiles, stages, splits, step)

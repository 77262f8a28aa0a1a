"""Chooses the kernel and its tiles for packed weights of 4 to 6 bits by rows and shape, in plain Python.

The rules come from benchmarks/studies/int4_linears on an H200, with the matrices of an 8B model (gguf.json). At 64 rows these
kernels have 1.49 times the speed of cuBLAS with 16-bit weights (int4) or 1.28 (Q4_K_M), at 128 rows 1.08 and 0.95, at 256 rows
0.78 and 0.72. Expanding a weight and cuBLAS together are slower still, up to MOST_ROWS.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PackedGemvPlan:
    """One row: ops/packed/packed_gemv.py."""

    groups: int                      # strips of 16 outputs that a CTA multiplies at a time
    warps: int                       # that share the inputs of a strip
    programs: int                    # CTAs per SM

    def shared_bytes(self, inputs: int) -> int:
        """Shared memory that x takes in one CTA."""
        return -(-inputs // (512 * self.warps)) * 512 * self.warps * 2

    def registers(self) -> int:
        """Of a thread at most, so that all CTAs of an SM fit."""
        return min(255, 65536 // (32 * self.programs * self.groups * self.warps))


@dataclass(frozen=True, slots=True)
class PackedGemmPlan:
    """More rows: ops/packed/packed_gemm.py."""

    block_rows: int                  # rows of x in a tile
    parts: int                       # groups of warps with a program of their own: 1 or 2
    warps: int                       # of each part, with 16 outputs each
    halves: int                      # how often a warp has 16 outputs: 1 or 2
    tiles: int                       # times 64 inputs in a block: 2, 4 or 8
    stages: int                      # blocks of x in the ring
    splits: int                      # split-K
    step: int                        # strips of 16 outputs in a tile, at most parts * warps * halves
    programs: int = 1                # CTAs per SM
    together: bool = False           # both parts have all outputs of a tile, and each a half of the inputs

    def __post_init__(self) -> None:
        # A part waits for a slot by the parity of its fill. If the other part had the slot last and TMA has not completed that
        # fill yet, the parity is that of the fill before it: the wait ends at once, and the part reads what is being written.
        if self.together and self.stages % (8 // self.tiles):
            raise ValueError(f"a ring of {self.stages} blocks, {8 // self.tiles} in a run: its slots change between the parts")

    def shared_bytes(self) -> int:
        """Shared memory that the ring of one CTA takes, and the sums that a part hands over."""
        sums = self.warps * 16 * self.block_rows * 4 if self.together else 0
        return self.tiles * 64 * self.block_rows * 2 * self.stages + sums

    def registers(self) -> int:
        """Of each thread, before the loading warp gives most of its own away. Its warp counts as four."""
        return 65536 // (32 * (self.parts * self.warps + 4) * self.programs) // 8 * 8


MULTIPROCESSORS = 132                # SMs of an H200, for which the rules were made
MOST_GEMV_INPUTS = 48 * 1024         # that two CTAs hold in shared memory
MOST_ROWS = 768                      # beyond them, expanding the weight and cuBLAS are faster
LONG = 8192                          # inputs: wide tiles with split inputs gain where the rows make several blocks
# By rows of x in a tile: parts, warps, halves, tiles, stages, CTAs per SM. First where all tiles can run at once, with split
# inputs; then where they cannot.
_FEW_TILES = {
    8: (1, 8, 1, 8, 8, 1), 16: (1, 8, 1, 8, 8, 1), 32: (1, 8, 1, 8, 5, 1), 64: (2, 4, 1, 4, 5, 1), 128: (2, 4, 1, 2, 6, 1),
}
_MANY_TILES = {
    8: (1, 8, 1, 4, 8, 2), 16: (1, 8, 1, 4, 8, 2), 32: (1, 8, 1, 4, 5, 2), 64: (2, 4, 2, 2, 8, 1), 128: (2, 4, 2, 2, 6, 1),
}
_SOME_TILES = (1, 4, 1, 4, 6, 3)     # up to 16 rows, more than two strips and up to four for an SM
# Both parts with all outputs of a tile of four strips, by rows of x in it: tiles, stages.
_TOGETHER = {32: (4, 8), 64: (4, 6), 128: (2, 4)}


@functools.cache
def packed_plan(rows: int, outputs: int, inputs: int, high: bool = False) -> PackedGemvPlan | PackedGemmPlan | None:
    """`outputs` are those stored: gates and partners. `high`: codes have more than four bits. None: expand the weight and call
    cuBLAS."""
    if not 1 <= rows <= MOST_ROWS:
        return None
    strips = -(-outputs // 16)
    some = 2 * MULTIPROCESSORS < strips <= 4 * MULTIPROCESSORS
    if rows == 1 and inputs <= MOST_GEMV_INPUTS:
        # Two CTAs with eight warps each where a strip is all that a CTA has, or where it is long.
        if strips <= 2 * MULTIPROCESSORS or inputs > 4096:
            return PackedGemvPlan(1, 8, 2)
        if some:
            # q, k and v of Q4_K and Q6_K: 8.3 us instead of 11.6. Of Q4_K alone: 7.4 instead of 6.9.
            return PackedGemvPlan(1, 4, 3) if high else PackedGemvPlan(2, 4, 2)
        return PackedGemvPlan(1, 4, 4)
    together = _together_plan(rows, strips, inputs)
    if together is not None:
        return together
    block_rows = next((size for size in (8, 16, 32, 64) if rows <= size), 128)
    row_blocks, runs = -(-rows // block_rows), -(-inputs // 512)
    shape = _FEW_TILES[block_rows]
    if rows <= 16 and some and inputs < LONG:
        shape = _SOME_TILES
    elif _tiles(shape, strips) * row_blocks > MULTIPROCESSORS or (row_blocks > 1 and inputs > LONG):
        shape = _MANY_TILES[block_rows]
    return _gemm_plan(shape, block_rows, row_blocks, strips, runs)


@functools.cache
def byte_plan(rows: int, outputs: int, inputs: int) -> PackedGemvPlan | PackedGemmPlan | None:
    """Of 8-bit codes (byte_weight.py): as of fewer bits, but blocks of few rows have half of the inputs, so that codes take as
    many registers, and as many bytes are in flight."""
    found = packed_plan(rows, outputs, inputs, True)
    if isinstance(found, PackedGemmPlan) and found.parts == 1:
        return replace(found, tiles=found.tiles // 2, stages=8)
    return found


def _together_plan(rows: int, strips: int, inputs: int) -> PackedGemmPlan | None:
    """Where a CTA for every tile makes one round that keeps more than half of the SMs busy. Sums of split inputs go through
    memory, so a tile with fewer rows comes before a split. More rows and fewer inputs were not measured."""
    if not 16 < rows <= 256 or inputs < 4096:
        return None
    for block_rows, (tiles, stages) in _TOGETHER.items():
        if rows <= block_rows // 2 or (block_rows == 32 and rows > 32):
            continue
        items = -(-strips // 4) * -(-rows // block_rows)
        splits = 2 if 2 * items <= MULTIPROCESSORS else 1
        if MULTIPROCESSORS < 2 * items * splits <= 2 * MULTIPROCESSORS:
            return PackedGemmPlan(block_rows, 2, 4, 1, tiles, stages, splits, 4, 1, together=True)
    return None


def _tiles(shape: tuple[int, ...], strips: int) -> int:
    return -(-strips // (shape[0] * shape[1] * shape[2]))


def _gemm_plan(shape: tuple[int, ...], block_rows: int, row_blocks: int, strips: int, runs: int) -> PackedGemmPlan:
    """As many splits as can run at once, and tiles that leave no SM idle in the last round."""
    parts, warps, halves, tiles, stages, programs = shape
    items, slots = _tiles(shape, strips) * row_blocks, MULTIPROCESSORS * programs
    splits = next((each for each in (8, 4, 2) if items * each <= slots and runs >= each), 1)
    rounds = -(-items * splits // slots)
    step = min(parts * warps * halves, max(3, -(-strips * row_blocks * splits // (rounds * slots))))
    return PackedGemmPlan(block_rows, parts, warps, halves, tiles, stages, splits, step, programs)

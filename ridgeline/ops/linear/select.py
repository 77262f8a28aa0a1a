"""Chooses the kernel of a linear by rows and shape, in plain Python. 16-bit weights unless a function says otherwise.

The rules come from sweeps on an H200 over the matrices of an 8B model, checked on those of 1B to 70B models:

- One row: persistent CTAs that prefetch as much weight as shared memory holds. This keeps HBM busy while the kernel waits (PDL).
- Up to 32 rows, and from 48 to 64 without a gate: the same with tensor cores, for matrices that take long enough to read.
- Up to 64 rows: tiles of 64 outputs, cut so that every SM gets the same share in one wave.
- More rows: the tiles would read x too often. cuBLAS shares x among the CTAs of a cluster and is faster, unless the gated
  activation can be fused. From 81 to 128 rows select_wide.py comes first.

Measured and slower at 128 rows: split-K with the partial sums added by the norm behind the GEMM. The GEMM is as fast as cuBLAS
(4 splits with tiles of 128 outputs; 8 with tiles of 256 are slower), but the norm takes 2 us longer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

MULTIPROCESSORS = 132                # SMs of an H200, for which the rules were made; they serve other devices well enough


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """One row: ops/linear/gemv.py."""

    block: int                       # weight rows that a CTA multiplies at a time; pairs of rows with a gate
    warps: int
    programs: int                    # CTAs per SM; each walks over several blocks


@dataclass(frozen=True, slots=True)
class RingPlan:
    """One row: ops/linear/gemv_ring.py."""

    block: int                       # weight rows (pairs with a gate) of one stage of the ring
    warps: int
    programs: int                    # CTAs per SM
    stages: int                      # blocks in the ring

    def shared_bytes(self, padded_inputs: int, gated: bool, weight_bytes: int = 2) -> int:
        """Shared memory of an SM that the rings of all its CTAs take."""
        return self.programs * self.stages * self.block * padded_inputs * weight_bytes * (2 if gated else 1)


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """A few rows: ops/linear/gemm_small.py."""

    block_rows: int                  # rows of x in a tile
    block_outputs: int               # of each half, with a gate
    block_inputs: int
    warps: int
    stages: int                      # blocks of inputs in flight
    splits: int = 1                  # split-K
    step: int = 0                    # outputs from one tile to the next, at most block_outputs; 0: block_outputs

    def shared_bytes(self, gated: bool) -> int:
        """Shared memory of the blocks in flight, 16-bit elements."""
        width = self.block_rows + self.block_outputs * (2 if gated else 1)
        return width * self.block_inputs * 2 * self.stages


@dataclass(frozen=True, slots=True)
class RingGemmPlan:
    """A few rows: ops/linear/gemm_ring.py."""

    block_rows: int                  # rows of x, all in one tile
    block_outputs: int               # of each half, with a gate
    block_inputs: int
    warps: int
    stages: int                      # blocks of weights in the ring
    x_stages: int                    # blocks of x in the ring
    programs: int                    # CTAs per SM
    splits: int                      # split-K
    step: int                        # outputs from one tile to the next, at most block_outputs

    def shared_bytes(self, gated: bool, element_bytes: int = 2) -> int:
        """Shared memory that the rings of one CTA take; x and the weight have equally wide elements."""
        width = self.x_stages * self.block_rows + self.stages * self.block_outputs * (2 if gated else 1)
        return width * self.block_inputs * element_bytes


@dataclass(frozen=True, slots=True)
class OneRowPlan:
    """One row and 8-bit codes: ops/linear/fp8_one_row.py."""

    block_outputs: int               # of each half, with a gate
    block_inputs: int
    warps: int
    stages: int                      # blocks of weights in the ring
    splits: int                      # split-K
    step: int                        # outputs from one tile to the next, at most block_outputs
    part_inputs: int                 # inputs of a part, whose codes are held
    whole: bool                      # every CTA can load the whole row; otherwise the row's largest magnitude must be known

    def shared_bytes(self, gated: bool) -> int:
        return self.stages * self.block_outputs * self.block_inputs * (2 if gated else 1) + 8 * self.part_inputs


Plan = GemvPlan | GemmPlan | None    # None: cuBLAS

MOST_ROWS = 128
MOST_PLAIN_ROWS = 64                 # without a gate
MOST_GEMV_INPUTS = 16384             # that a CTA holds in registers
FEWEST_OUTPUTS, FEWEST_INPUTS = 64, 256
FEWEST_SPLIT_INPUTS = 512
HEAD_OUTPUTS = 256 * MULTIPROCESSORS # and more: many waves of tiles in any case
SPLIT_UNIT = 256                     # parts begin at its multiples, whatever the block of inputs


@functools.cache
def plan(rows: int, outputs: int, inputs: int, gated: bool = False) -> Plan:
    """With a gate, `outputs` counts the pairs."""
    if rows < 1 or inputs % 16 or inputs < FEWEST_INPUTS or outputs < FEWEST_OUTPUTS:
        return None
    if rows == 1 and inputs <= MOST_GEMV_INPUTS:
        return _gemv_plan(inputs, gated)
    if rows > (MOST_ROWS if gated else MOST_PLAIN_ROWS):
        return None
    return _gated_plan(rows, outputs) if gated else _plain_plan(rows, outputs, inputs)


def _gemv_plan(inputs: int, gated: bool) -> GemvPlan:
    """32 to 64 weights in flight per thread, and 16 to 64 warps on an SM."""
    if gated:
        warps = 4 if inputs <= 4096 else 8 if inputs <= 8192 else 16
        return GemvPlan(1, warps, 16 if warps == 4 else 32 // warps)
    warps = 4 if inputs <= 2048 else 8 if inputs <= 4096 else 16
    return GemvPlan(4 if inputs <= 2048 else 2, warps, min(4, 32 // warps))


# By the inputs, rounded up to a power of two, and whether there is a gate. All use 192 KiB of an SM's shared memory, about the
# most that fits: less is slower, and so are two CTAs of six stages instead of three of four. Not measured: 16384 with a gate.
_RINGS = {
    (4096, False): RingPlan(2, 8, 3, 4), (4096, True): RingPlan(1, 4, 3, 4),
    (8192, False): RingPlan(1, 8, 2, 6), (8192, True): RingPlan(1, 8, 2, 3),
    (16384, False): RingPlan(1, 16, 2, 3), (16384, True): RingPlan(1, 16, 1, 3),
}


# Smaller matrices gain nothing: the largest of a 1B model (33 MB) is read in 8 us, and its step was slower with rings than
# without. With 2,560 inputs (a 4B model) rings gain.
FEWEST_RING_INPUTS, FEWEST_RING_OUTPUTS = 2560, 2560
# One row, 4,096 inputs, no gate: O of Qwen3-30B-A3B, behind an attention that leaves memory idle, takes 3.6 us instead of 6.1.
FEWEST_RING_OUTPUTS_OF_4096 = 2048


def _worth_a_ring(outputs: int, inputs: int) -> bool:
    return inputs >= FEWEST_RING_INPUTS and outputs >= FEWEST_RING_OUTPUTS


@functools.cache
def ring_plan(outputs: int, inputs: int, gated: bool = False, weight_bytes: int = 2) -> RingPlan | None:
    """For one row that `plan` has given a GemvPlan, on devices with the shared memory for it; None: that plan stands."""
    short = inputs == 4096 and outputs >= FEWEST_RING_OUTPUTS_OF_4096 and not gated
    if not short and not _worth_a_ring(outputs, inputs):
        return None
    plan = _RINGS.get((1 << (inputs - 1).bit_length(), gated))
    # Narrower weights: the same bytes in flight, so more rows at a time.
    return plan and replace(plan, block=plan.block * 2 // weight_bytes)


# By the rows of x in a tile and whether there is a gate: outputs (pairs, with a gate), inputs, warps, CTAs per SM, blocks of
# weights, blocks of x. About as many blocks of x as of weights: x is requested after the PDL wait, when the weights are there
# already, so the GEMM runs as fast as x arrives.
_RING_GEMMS = {
    (8, False): (64, 256, 4, 1, 6, 6), (8, True): (64, 128, 4, 2, 3, 4),
    (16, False): (64, 256, 4, 1, 5, 6), (16, True): (64, 128, 4, 2, 3, 4),
    (32, False): (64, 256, 4, 1, 4, 5), (32, True): (128, 128, 8, 1, 3, 4),
    (64, False): (64, 128, 4, 1, 7, 7),
}
# With a gate, where those tiles would be less than three quarters full: the ring would hold empty rows.
_NARROW_RING_GEMMS = {8: (64, 128, 4, 1, 6, 8), 16: (64, 128, 4, 1, 6, 6), 32: (64, 128, 4, 1, 5, 6)}
# At 40 rows gemm_small.py is as fast or faster in most models; at 48 and 64 the ring is in all.
FEWEST_RING_ROWS_OF_64 = 48


@functools.cache
def fp8_ring_gemm_plan(rows: int, outputs: int, inputs: int) -> RingGemmPlan | None:
    """For e4m3 codes on both sides: the same bytes in flight as with 16-bit numbers. None: cuBLAS multiplies."""
    block_rows = next((size for size in (8, 16, 32, 64) if rows <= size), 0)
    shape = _RING_GEMMS.get((block_rows, False))
    if shape is None or not _worth_a_ring(outputs, inputs):
        return None
    splits = even_splits(outputs, inputs)
    block_outputs, block_inputs, warps, programs, stages, x_stages = shape
    if inputs % (2 * block_inputs):
        return None
    step = _ring_step(shape, outputs, splits)
    return RingGemmPlan(block_rows, block_outputs, 2 * block_inputs, warps, stages, x_stages, programs, splits, step)


MOST_WHOLE_INPUTS = 8192             # of a row that a CTA of 128 threads holds in registers
MOST_PART_INPUTS = 8192              # whose codes leave room for four blocks of weights
MOST_PEAKS = 1024                    # tiles of a linear with a gate


@functools.cache
def one_row_plan(outputs: int, inputs: int, gated: bool, shared: int) -> OneRowPlan | None:
    """For one row times 8-bit codes, with `shared` bytes for the rings. With a gate, `outputs` counts the pairs."""
    if not _worth_a_ring(outputs, inputs):
        return None
    splits = 1 if gated else even_splits(outputs, inputs)
    block_inputs = 256 if gated else 512
    if inputs % (splits * block_inputs) or inputs // splits > MOST_PART_INPUTS:
        return None
    stages = min(6, (shared - 8 * (inputs // splits)) // (64 * 512))
    step = even_step(outputs, 64, MULTIPROCESSORS // splits)
    whole = inputs <= MOST_WHOLE_INPUTS
    if stages < 3 or (gated and (-(-outputs // step) > MOST_PEAKS or not whole)):
        return None
    return OneRowPlan(64, block_inputs, 4, stages, splits, step, inputs // splits, whole)


@functools.cache
def ring_gemm_plan(rows: int, outputs: int, inputs: int, gated: bool = False) -> RingGemmPlan | None:
    """For rows that `plan` has given a GemmPlan, on devices with the shared memory for it; None: that plan stands."""
    block_rows = next((size for size in (8, 16, 32, 64) if rows <= size), 0)
    shape = _RING_GEMMS.get((block_rows, gated))
    if shape is None or 32 < rows < FEWEST_RING_ROWS_OF_64 or not _worth_a_ring(outputs, inputs) or outputs >= HEAD_OUTPUTS:
        return None
    splits = 1 if gated else even_splits(outputs, inputs)
    step = _ring_step(shape, outputs, splits)
    if gated and 4 * step < 3 * shape[0]:
        shape = _NARROW_RING_GEMMS[block_rows]
        step = _ring_step(shape, outputs, splits)
    block_outputs, block_inputs, warps, programs, stages, x_stages = shape
    if inputs % block_inputs:
        return None
    return RingGemmPlan(block_rows, block_outputs, block_inputs, warps, stages, x_stages, programs, splits, step)


def _ring_step(shape: tuple[int, ...], outputs: int, splits: int) -> int:
    return even_step(outputs, shape[0], shape[3] * MULTIPROCESSORS // splits)


def _block_rows(rows: int) -> int:
    return next(size for size in (16, 32, 64, 128) if rows <= size)


def _gated_plan(rows: int, outputs: int) -> GemmPlan | None:
    block_rows = _block_rows(rows)
    if block_rows == 128:
        step = even_step(outputs, 128, MULTIPROCESSORS)
        # Narrow tiles read x too often.
        return GemmPlan(128, 128, 64, 8, 4, step=step) if step >= 96 else None
    block_inputs, stages = {16: (128, 3), 32: (64, 5), 64: (64, 4)}[block_rows]
    step = even_step(outputs, 64, 2 * MULTIPROCESSORS)
    if step < 48:                    # too few outputs for two tiles per SM: one, with twice the depth
        step, stages = even_step(outputs, 64, MULTIPROCESSORS), 2 * stages
    return GemmPlan(block_rows, 64, block_inputs, 4, stages, step=step)


def _plain_plan(rows: int, outputs: int, inputs: int) -> GemmPlan:
    block_rows = _block_rows(rows)
    if outputs >= HEAD_OUTPUTS:
        block_inputs, stages = {16: (128, 3), 32: (128, 3), 64: (64, 4)}[block_rows]
        return GemmPlan(block_rows, 128, block_inputs, 4, stages)
    block_inputs, stages = {16: (256, 5), 32: (256, 4), 64: (128, 6)}[block_rows]
    splits = even_splits(outputs, inputs)
    return GemmPlan(
        block_rows, 64, block_inputs, 4, stages, splits, even_step(outputs, 64, MULTIPROCESSORS // splits)
    )


def even_splits(outputs: int, inputs: int) -> int:
    """Split-K factor with which tiles of about 64 outputs give every SM one; depends on the matrix, not on the rows."""
    splits = 1
    while (
        splits < 8
        and even_step(outputs, 64, MULTIPROCESSORS // splits) < 40
        and inputs // (2 * splits) >= FEWEST_SPLIT_INPUTS
    ):
        splits *= 2
    return splits


def even_step(outputs: int, block: int, slots: int) -> int:
    """Outputs per tile such that the last wave of tiles is as full as the others: a multiple of 8, at most `block`."""
    rounds = -(-outputs // (block * slots))
    share = -(-outputs // (rounds * slots))
    return min(block, -(-share // 8) * 8)


def split_inputs(inputs: int, splits: int, unit: int = SPLIT_UNIT) -> int:
    """Inputs of each part but the last: a multiple of `unit`."""
    return -(-inputs // (splits * unit)) * unit


def invariant_plan(rows: int, outputs: int, inputs: int) -> GemmPlan:
    """For gemm_invariant.py: the parts depend on the matrix alone, the tile on the rows as well."""
    splits = even_splits(outputs, inputs)
    if rows <= MOST_PLAIN_ROWS:
        few = _plain_plan(rows, outputs, inputs)
        return few if few.splits == splits else GemmPlan(few.block_rows, 64, 64, 4, 4, splits)
    if rows <= MOST_ROWS:
        return GemmPlan(128, 128, 64, 8, 6, splits)
    return GemmPlan(128, 128 if splits > 1 else 256, 64, 8, 4, splits)

"""GEMM for a few rows as in gemm_small.py, with the weight streamed through a ring in shared memory.

As in gemv_ring.py, a CTA fills its ring with weights before the PDL wait. wgmma reads the ring directly, the weight as its left
operand; TMA loads the rows of x. Tiles, split-K and the addition of its parts are gemm_small.py's.

Written in Gluon, which the interpreter does not support; there, and on devices without wgmma or with less shared memory,
gemm_small.py runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import (
    async_copy,
    compile_time,
    copy,
    described,
    fence_async_shared,
    fetch,
    gl,
    group_barrier,
    mbarrier,
    tiles_of,
    wait_for_kernel_before,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two
from ridgeline.ops.linear.gemm_small import arrivals
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.linear.select import SPLIT_UNIT, RingGemmPlan, split_inputs
from ridgeline.ops.registry import gluon_kernel


@compile_time
def pair_layout(rows, outputs, warps):  # type: ignore[no-untyped-def]
    """Of [outputs, rows / 2]: as the GEMM leaves its sums, when neighbouring columns have been added."""
    registers = [[8, 0]] + [[0, 4 << bit] for bit in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << bit, 0] for bit in range(warps.bit_length() - 1)], [], [outputs, rows // 2]
    )


@gluon_kernel()
def copy_weight(  # type: ignore[no-untyped-def]
    weight_ptr, ring, slot, unit, units, chunks, first, outputs, step, weight_stride, line, place, GATE: gl.constexpr
):
    """Request a block of weights, with a gate its partner too; zeros behind the last one."""
    HALVES: gl.constexpr = 1 if GATE == 0 else 2
    output = (gl.program_id(0) + unit // chunks * gl.num_programs(0)) * step
    source = weight_ptr + output.to(gl.int64) * weight_stride + (first + unit % chunks * ring.shape[2])
    there = ((line < gl.minimum(outputs - output, step)) & (unit < units))[:, None]
    copy(ring.index(HALVES * slot), source + place, mask=there, eviction_policy="evict_first")
    if GATE != 0:
        source += outputs.to(gl.int64) * weight_stride
        copy(ring.index(HALVES * slot + 1), source + place, mask=there, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon_kernel()
def _fetch_x(x_tiles, x_ring, filled, slot, unit, units, chunks, first):  # type: ignore[no-untyped-def]
    column = first + unit % chunks * x_ring.shape[2]
    mbarrier.expect(filled.index(slot), x_tiles.block_type.nbytes, pred=unit < units)
    fetch(x_tiles, [0, column], filled.index(slot), x_ring.index(slot), pred=unit < units)


@gluon_kernel()
def _multiply_line(weights, rows, sums, LINE: gl.constexpr):  # type: ignore[no-untyped-def]
    """128 inputs of a block of e4m3 codes, summed from zero."""
    left = weights.slice(LINE * 128, 128, dim=1)
    right = rows.slice(LINE * 128, 128, dim=1).permute((1, 0))
    return warpgroup_mma(left, right, sums, use_acc=False, is_async=True)


@gluon_kernel()
def line_scales(scale_ptr, output, outputs, column, scale_stride, BLOCK_SCALED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of 128 inputs from `column` on, which every BLOCK_SCALED outputs share."""
    at = scale_ptr + output // BLOCK_SCALED * scale_stride + column // 128
    return gl.load(at, mask=output < outputs, other=0.0)


@gluon_kernel()
def _block_scales(  # type: ignore[no-untyped-def]
    scale_ptr, output, outputs, column, scale_stride, BLOCK_INPUTS: gl.constexpr, BLOCK_SCALED: gl.constexpr
):
    """Of the two or four lines of a block."""
    one = line_scales(scale_ptr, output, outputs, column, scale_stride, BLOCK_SCALED)
    two = line_scales(scale_ptr, output, outputs, column + 128, scale_stride, BLOCK_SCALED)
    three = one
    four = two
    if BLOCK_INPUTS > 256:
        three = line_scales(scale_ptr, output, outputs, column + 256, scale_stride, BLOCK_SCALED)
        four = line_scales(scale_ptr, output, outputs, column + 384, scale_stride, BLOCK_SCALED)
    return one, two, three, four


@gluon_kernel()
def no_scales(output):  # type: ignore[no-untyped-def]
    ones = (output * 0 + 1).to(gl.float32)
    return ones, ones, ones, ones


@gluon_kernel()
def _added(sums, other, second, third, fourth, scales, BLOCK_SCALED: gl.constexpr):  # type: ignore[no-untyped-def]
    if BLOCK_SCALED > 0:
        sums += (other * scales[0] + second * scales[1]) + (third * scales[2] + fourth * scales[3])
    else:
        sums += (other + second) + (third + fourth)
    return sums


@gluon_kernel(do_not_specialize=["rows", "outputs", "tiles", "step", "splits"])
def _ring_gemm_kernel(  # type: ignore[no-untyped-def]
    x_tiles, weight_ptr, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
    rows, inputs, outputs, tiles, step, splits, weight_stride, part_inputs, scale_stride,
    BLOCK_ROWS: gl.constexpr, BLOCK_OUTPUTS: gl.constexpr, BLOCK_INPUTS: gl.constexpr, STAGES: gl.constexpr,
    X_STAGES: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, SCALED: gl.constexpr, BLOCK_SCALED: gl.constexpr,
    PAIRED: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """CTA (first tile, split); tiles are assigned round-robin, and the ring continues from one tile to the next.

    Tiles and parts are as in gemm_small.py; BLOCK_INPUTS divides the inputs of every part. SCALED: x and weight are 8-bit codes,
    int8 or e4m3, with a scale for each row of x and each output (no gate). Sums of int8 products are exact. Tensor cores truncate
    sums of e4m3 products to about 11 bits, so every 128 inputs have sums of their own, added in float32; with BLOCK_SCALED they
    have a scale for that many outputs. PAIRED: every two rows of x are the coarse and the fine codes of one row (fp8_rows.py).
    """
    HALVES: gl.constexpr = 1 if GATE == 0 else 2
    LINES: gl.constexpr = SCALED and weight_ptr.dtype.element_ty != gl.int8
    SUMS: gl.constexpr = gl.int32 if weight_ptr.dtype.element_ty == gl.int8 else gl.float32
    SIZE: gl.constexpr = BLOCK_OUTPUTS * BLOCK_ROWS
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    VECTOR: gl.constexpr = 128 // dtype.primitive_bitwidth
    ACROSS: gl.constexpr = BLOCK_INPUTS // VECTOR if BLOCK_INPUTS < 32 * VECTOR else 32
    copied: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_ROWS, 256 // dtype.primitive_bitwidth])
    program = gl.program_id(0)
    split = gl.program_id(1)
    first = split * part_inputs
    chunks = (gl.minimum(first + part_inputs, inputs) - first) // BLOCK_INPUTS
    units = (tiles - program + gl.num_programs(0) - 1) // gl.num_programs(0) * chunks
    line = gl.arange(0, BLOCK_OUTPUTS, gl.SliceLayout(1, copied))
    place = line[:, None] * weight_stride + gl.arange(0, BLOCK_INPUTS, gl.SliceLayout(0, copied))[None, :]
    ring = gl.allocate_shared_memory(dtype, [HALVES * STAGES, BLOCK_OUTPUTS, BLOCK_INPUTS], x_tiles.layout)
    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES, BLOCK_ROWS, BLOCK_INPUTS], x_tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES - 1):
        copy_weight(
            weight_ptr, ring, stage, stage, units, chunks, first, outputs, step, weight_stride, line, place, GATE
        )
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(filled.index(stage), count=1)
    wait_for_kernel_before(DEPENDENT)
    for stage in gl.static_range(X_STAGES - 1):
        _fetch_x(x_tiles, x_ring, filled, stage, stage, units, chunks, first)
    row = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, layout))[None, :]
    place_of_output = gl.arange(0, BLOCK_OUTPUTS, gl.SliceLayout(1, layout))[:, None]
    slot = 0
    free = STAGES - 1
    x_slot = 0
    x_free = X_STAGES - 1
    phase = 0
    for begin in range(0, units, chunks):
        tile = program + begin // chunks * gl.num_programs(0)
        sums = gl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], SUMS, layout)
        other = sums
        second = sums
        third = sums
        fourth = sums
        output = tile * step + place_of_output
        scales = no_scales(output)
        for unit in range(begin, begin + chunks):
            async_copy.wait_group(STAGES - 2)
            mbarrier.wait(filled.index(x_slot), phase)
            if LINES:                                                # the block before this one
                other, second, third, fourth = warpgroup_mma_wait(0, deps=(other, second, third, fourth))
                sums = _added(sums, other, second, third, fourth, scales, BLOCK_SCALED)
            elif GATE == 0:
                sums = warpgroup_mma_wait(0, deps=(sums,))
            else:
                sums, other = warpgroup_mma_wait(0, deps=(sums, other))
            fence_async_shared()
            group_barrier()                              # all threads' copies have arrived, and the unit before is multiplied
            x = x_ring.index(x_slot).permute((1, 0))
            if LINES:
                other = _multiply_line(ring.index(slot), x_ring.index(x_slot), other, 0)
                second = _multiply_line(ring.index(slot), x_ring.index(x_slot), second, 1)
                if BLOCK_INPUTS > 256:
                    third = _multiply_line(ring.index(slot), x_ring.index(x_slot), third, 2)
                    fourth = _multiply_line(ring.index(slot), x_ring.index(x_slot), fourth, 3)
                other, second, third, fourth = warpgroup_mma_wait(4, deps=(other, second, third, fourth))
                if BLOCK_SCALED > 0:
                    column = first + unit % chunks * BLOCK_INPUTS
                    scales = _block_scales(scale_ptr, output, outputs, column, scale_stride, BLOCK_INPUTS, BLOCK_SCALED)
            elif GATE == 0:
                sums = warpgroup_mma(ring.index(slot), x, sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=(sums,))
            else:
                sums = warpgroup_mma(ring.index(2 * slot), x, sums, is_async=True)
                other = warpgroup_mma(ring.index(2 * slot + 1), x, other, is_async=True)
                sums, other = warpgroup_mma_wait(2, deps=(sums, other))
            copy_weight(
                weight_ptr, ring, free, unit + (STAGES - 1), units, chunks, first, outputs, step, weight_stride, line,
                place, GATE,
            )
            _fetch_x(x_tiles, x_ring, filled, x_free, unit + (X_STAGES - 1), units, chunks, first)
            free = slot
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            x_free = x_slot
            phase = gl.where(x_slot == X_STAGES - 1, phase ^ 1, phase)
            x_slot = gl.where(x_slot == X_STAGES - 1, 0, x_slot + 1)
        if LINES:
            other, second, third, fourth = warpgroup_mma_wait(0, deps=(other, second, third, fourth))
            sums = _added(sums, other, second, third, fourth, scales, BLOCK_SCALED)
        elif GATE == 0:
            sums = warpgroup_mma_wait(0, deps=(sums,)).to(gl.float32)
            other = sums
        else:
            sums, other = warpgroup_mma_wait(0, deps=(sums, other))
        written_rows = rows
        if splits > 1:
            at = place_of_output * BLOCK_ROWS + row
            parts = part_ptr + tile * (splits * HALVES * SIZE)
            mine = parts + split * (HALVES * SIZE)
            gl.store(mine + at, sums)
            if GATE != 0:
                gl.store(mine + SIZE + at, other)
            group_barrier()                              # every thread's part is written before the arrival is
            arrived = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
            # The last CTA of a tile adds all parts; the others add and write nothing.
            terms = gl.where(arrived == splits - 1, splits, 0)
            sums = gl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], gl.float32, layout)
            other = sums
            for term in range(terms):
                sums += gl.load(parts + term * (HALVES * SIZE) + at, cache_modifier=".cg")
                if GATE != 0:
                    other += gl.load(parts + term * (HALVES * SIZE) + SIZE + at, cache_modifier=".cg")
            if terms > 0:
                gl.store(arrived_ptr + tile, 0)
            written_rows = gl.where(terms > 0, rows, 0)
        end = gl.minimum((tile + 1) * step, outputs)
        if SCALED:
            if BLOCK_SCALED == 0:
                sums *= gl.load(scale_ptr + output, mask=output < end, other=0.0)
            sums *= gl.load(x_scale_ptr + row, mask=row < rows, other=0.0)
        if PAIRED:
            halved: gl.constexpr = pair_layout(BLOCK_ROWS, BLOCK_OUTPUTS, WARPS)
            coarse, fine = sums.reshape([BLOCK_OUTPUTS, BLOCK_ROWS // 2, 2]).split()
            sums = gl.convert_layout(coarse + fine, halved)
            token = gl.arange(0, BLOCK_ROWS // 2, gl.SliceLayout(0, halved))[None, :]
            output = tile * step + gl.arange(0, BLOCK_OUTPUTS, gl.SliceLayout(1, halved))[:, None]
            written_rows = written_rows // 2
        else:
            token = row
        if BIAS:
            sums += gl.load(bias_ptr + output, mask=output < end, other=0.0).to(gl.float32)
        if GATE != 0:
            if BIAS:
                other += gl.load(bias_ptr + outputs + output, mask=output < end, other=0.0).to(gl.float32)
            sums = activated(sums, GATE) * other
        wanted = (output < end) & (token < written_rows)
        gl.store(out_ptr + token.to(gl.int64) * outputs + output, sums.to(out_ptr.dtype.element_ty), mask=wanted)
    async_copy.wait_group(0)


def ring_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: RingGemmPlan, *, gate: str | None = None,
    scales: tuple[Tensor, Tensor] | None = None, paired: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:
    """x [rows, inputs] -> [rows, outputs], of x's dtype or `dtype`. The rows of x and the weight lie at multiples of 16 bytes.

    16-bit numbers, or 8-bit codes with `scales`: float32, of the rows of x and of the outputs, or of blocks of outputs and
    128 inputs. `paired`: every two rows of x are the coarse and the fine codes of one row.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    out = torch.empty((rows // 2 if paired else rows, outputs), dtype=dtype or x.dtype, device=x.device)
    tiles, part_inputs = cdiv(outputs, plan.step), split_inputs(inputs, plan.splits, max(SPLIT_UNIT, plan.block_inputs))
    splits = cdiv(inputs, part_inputs)            # fewer than asked for where the last ones would be empty
    size = tiles * splits * (1 if gate is None else 2) * plan.block_outputs * plan.block_rows if splits > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    x_tiles = described(
        x, (rows, inputs), x.stride(), (plan.block_rows, plan.block_inputs), tiles_of(128, 8 * x.element_size(), 2)
    )
    programs = min(tiles, max(1, plan.programs * multiprocessors(x.device) // splits))
    x_scale, scale = scales or (out, out)
    blocks = scales is not None and scale.dim() == 2
    _ring_gemm_kernel[programs, splits](
        x_tiles, weight, x_scale, scale, out if bias is None else bias, out, parts, arrivals(x.device),
        rows, inputs, outputs, tiles, plan.step, splits, weight.stride(0), part_inputs, scale.stride(0) if blocks else 0,
        BLOCK_ROWS=plan.block_rows, BLOCK_OUTPUTS=plan.block_outputs, BLOCK_INPUTS=plan.block_inputs, STAGES=plan.stages,
        X_STAGES=plan.x_stages, GATE=GATES[gate], BIAS=bias is not None, SCALED=scales is not None,
        BLOCK_SCALED=power_of_two(cdiv(outputs, len(scale))) if blocks else 0,   # the last block may be smaller
        PAIRED=paired, WARPS=plan.warps, num_warps=plan.warps, **dependent_launch(x.device),
    )
    return out

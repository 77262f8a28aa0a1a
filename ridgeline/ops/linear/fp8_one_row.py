"""One row times an 8-bit weight: gemm_ring.py for a row that every CTA norms and quantises itself.

A kernel that quantises the row first takes 2 to 3 us in which HBM is idle once the rings are full, four times a layer. Here each
CTA loads the whole row after the PDL wait (8 KB from L2), norms it, and writes its coarse and fine codes (fp8_rows.py) into
shared memory as the right operand of wgmma. With a gate, the epilogue writes the gated activation and the largest magnitude
of each tile: the linear that follows takes its scale from those and loads only its own part of the row.

Written in Gluon, which the interpreter does not support; there, and on other devices, fp8_rows.py and gemm_ring.py run.
"""

# Tuples grow while a kernel is compiled.
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.hopper import (
    async_copy,
    fence_async_shared,
    gl,
    group_barrier,
    wait_for_kernel_before,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two
from ridgeline.ops.linear.gemm_ring import copy_weight, line_scales, no_scales, pair_layout
from ridgeline.ops.linear.gemm_small import arrivals
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.linear.select import MOST_PEAKS, OneRowPlan
from ridgeline.ops.registry import gluon_kernel


class OneRow(NamedTuple):
    """A gated activation [1, inputs] and the largest magnitudes of its tiles, for the linear that follows."""

    x: Tensor
    peaks: Tensor


@gluon_kernel()
def _sum_and_largest(total, largest, other_total, other_largest):  # type: ignore[no-untyped-def]
    return total + other_total, gl.maximum(largest, other_largest)


@gluon_kernel()
def _row(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, peak_ptr, new_residual_ptr, inputs, first, eps, norm_offset, peaks, column,
    CHUNKS: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, PEAKS: gl.constexpr, MOST: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """The row's blocks of inputs, multiplied by the norm's weight, and its largest magnitude; with PEAKS from `first` on."""
    BLOCK: gl.constexpr = column.shape[0]
    weights = ()
    if NORM:
        for chunk in gl.static_range(CHUNKS):
            weights = weights + (gl.load(norm_ptr + chunk * BLOCK + column),)
    wait_for_kernel_before(DEPENDENT)
    loaded = ()
    added = ()
    for chunk in gl.static_range(CHUNKS):                # all are requested before the first is used or anything is written
        loaded = loaded + (gl.load(x_ptr + first + chunk * BLOCK + column),)
        if RESIDUAL:
            added = added + (gl.load(residual_ptr + chunk * BLOCK + column),)
    values = ()
    largest = (column * 0).to(gl.float32)
    squares = largest
    for chunk in gl.static_range(CHUNKS):
        x = loaded[chunk].to(gl.float32)
        if RESIDUAL:
            # Rounded to the tensor's dtype: the norm is that of the residual which later layers will read.
            rounded = (x + added[chunk].to(gl.float32)).to(new_residual_ptr.dtype.element_ty)
            mine = (gl.program_id(0) == chunk % gl.num_programs(0)) & (gl.program_id(1) == 0)
            gl.store(new_residual_ptr + chunk * BLOCK + column, rounded, mask=mine & (column >= 0))
            x = rounded.to(gl.float32)
        if NORM:
            squares += x * x
            x *= weights[chunk].to(gl.float32) + norm_offset
        if not PEAKS:
            largest = gl.maximum(largest, gl.abs(x))
        values = values + (x,)
    factor = 1.0
    if PEAKS:
        number = gl.arange(0, MOST, gl.BlockedLayout([MOST // (32 * WARPS)], [32], [WARPS], [0]))
        peak = gl.max(gl.load(peak_ptr + number, mask=number < peaks, other=0.0), axis=0)
    elif NORM:
        total, peak = gl.reduce((squares, largest), 0, _sum_and_largest)
        factor = gl.rsqrt(total / inputs + eps)
        peak *= factor
    else:
        peak = gl.max(largest, axis=0)
    return values, factor, peak


@gluon_kernel()
def _place_codes(  # type: ignore[no-untyped-def]
    values, rows, first, part_inputs, share, row, CHUNKS: gl.constexpr, INTEGERS: gl.constexpr, PART: gl.constexpr
):
    """Coarse codes as the first, fine ones as the second of eight rows in shared memory; zeros as the others."""
    LARGEST: gl.constexpr = 127.0 if INTEGERS else 448.0
    FINER: gl.constexpr = 254.0 if INTEGERS else 16.0
    BLOCK: gl.constexpr = rows.shape[2]
    for chunk in gl.static_range(CHUNKS):
        shares = gl.minimum(gl.maximum(values[chunk] * share, -LARGEST), LARGEST)
        if INTEGERS:
            coarse = gl.floor(shares + 0.5)
            fine = gl.floor((shares - coarse) * FINER + 0.5)
        else:
            coarse = shares.to(rows.dtype).to(gl.float32)
            fine = (shares - coarse) * FINER
        both = gl.where(row == 0, coarse[None, :], gl.where(row == 1, fine[None, :], 0.0)).to(rows.dtype)
        if PART:                                         # nothing but this CTA's part was loaded
            rows.index(chunk).store(both)
        else:
            mine = chunk * BLOCK - first
            if (mine >= 0) & (mine < part_inputs):
                rows.index(mine // BLOCK).store(both)


@gluon_kernel()
def _scales(  # type: ignore[no-untyped-def]
    scale_ptr, output, outputs, column, scale_stride, GATE: gl.constexpr, BLOCK_SCALED: gl.constexpr
):
    """Of the four lines of a block: of one weight, or two of each half."""
    one = line_scales(scale_ptr, output, outputs, column, scale_stride, BLOCK_SCALED)
    two = line_scales(scale_ptr, output, outputs, column + 128, scale_stride, BLOCK_SCALED)
    if GATE != 0:
        three = line_scales(scale_ptr, output + outputs, 2 * outputs, column, scale_stride, BLOCK_SCALED)
        four = line_scales(scale_ptr, output + outputs, 2 * outputs, column + 128, scale_stride, BLOCK_SCALED)
    else:
        three = line_scales(scale_ptr, output, outputs, column + 256, scale_stride, BLOCK_SCALED)
        four = line_scales(scale_ptr, output, outputs, column + 384, scale_stride, BLOCK_SCALED)
    return one, two, three, four


@gluon_kernel()
def _line(weights, x, sums, LINE: gl.constexpr):  # type: ignore[no-untyped-def]
    """128 inputs, summed from zero."""
    right = x.slice(LINE * 128, 128, dim=1).permute((1, 0))
    return warpgroup_mma(weights.slice(LINE * 128, 128, dim=1), right, sums, use_acc=False, is_async=True)


@gluon_kernel()
def _started(ring, slot, x, first, second, third, fourth, GATE: gl.constexpr, LINES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The products of a block: of four lines, or of two lines of each half; of int8 codes added to `first` and `third`."""
    if LINES:
        if GATE != 0:
            first = _line(ring.index(2 * slot), x, first, 0)
            second = _line(ring.index(2 * slot), x, second, 1)
            third = _line(ring.index(2 * slot + 1), x, third, 0)
            fourth = _line(ring.index(2 * slot + 1), x, fourth, 1)
        else:
            first = _line(ring.index(slot), x, first, 0)
            second = _line(ring.index(slot), x, second, 1)
            third = _line(ring.index(slot), x, third, 2)
            fourth = _line(ring.index(slot), x, fourth, 3)
    elif GATE != 0:
        first = warpgroup_mma(ring.index(2 * slot), x.permute((1, 0)), first, is_async=True)
        third = warpgroup_mma(ring.index(2 * slot + 1), x.permute((1, 0)), third, is_async=True)
    else:
        first = warpgroup_mma(ring.index(slot), x.permute((1, 0)), first, is_async=True)
    return warpgroup_mma_wait(4, deps=(first, second, third, fourth))


@gluon_kernel()
def _added(sums, other, first, second, third, fourth, scales, GATE: gl.constexpr, BLOCK_SCALED: gl.constexpr):  # type: ignore[no-untyped-def]
    if BLOCK_SCALED > 0:
        first *= scales[0]
        second *= scales[1]
        third *= scales[2]
        fourth *= scales[3]
    if GATE != 0:
        sums += first + second
        other += third + fourth
    else:
        sums += (first + second) + (third + fourth)
    return sums, other


@gluon_kernel()
def _paired(sums, of_row, BLOCK_OUTPUTS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """[outputs, 8] -> [outputs, 4]: coarse plus fine; the first column is the row's."""
    coarse, fine = (sums * of_row).reshape([BLOCK_OUTPUTS, 4, 2]).split()
    return gl.convert_layout(coarse + fine, pair_layout(8, BLOCK_OUTPUTS, WARPS))


@gluon_kernel()
def _of_outputs(pointer, output, wanted, THERE: gl.constexpr, OTHERWISE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of the outputs [outputs, 4], or the same one for all."""
    if THERE:
        found = gl.load(pointer + output, mask=wanted, other=0.0).to(gl.float32)
    else:
        found = wanted.to(gl.float32) * 0.0 + OTHERWISE
    return found


@gluon_kernel(do_not_specialize=["outputs", "tiles", "step", "splits", "peaks"])
def _one_row_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, peak_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, new_residual_ptr, new_peak_ptr,
    part_ptr, arrived_ptr, inputs, outputs, tiles, step, splits, weight_stride, part_inputs, scale_stride, eps, norm_offset,
    peaks,
    BLOCK_OUTPUTS: gl.constexpr, BLOCK_INPUTS: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr,
    PART_CHUNKS: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, PEAKS: gl.constexpr, MOST: gl.constexpr,
    GATE: gl.constexpr, BIAS: gl.constexpr, BLOCK_SCALED: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """CTA (first tile, split), as in gemm_ring.py. CHUNKS: blocks of inputs that a CTA loads, PART_CHUNKS: that it multiplies."""
    HALVES: gl.constexpr = 1 if GATE == 0 else 2
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    LINES: gl.constexpr = dtype != gl.int8
    SUMS: gl.constexpr = gl.float32 if LINES else gl.int32
    ACROSS: gl.constexpr = BLOCK_INPUTS // 16 if BLOCK_INPUTS < 512 else 32
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 32])
    halved: gl.constexpr = pair_layout(8, BLOCK_OUTPUTS, WARPS)
    placed: gl.constexpr = gl.BlockedLayout([8, BLOCK_INPUTS // (32 * WARPS)], [1, 32], [1, WARPS], [1, 0])
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    program = gl.program_id(0)
    split = gl.program_id(1)
    first = split * part_inputs
    chunks = (gl.minimum(first + part_inputs, inputs) - first) // BLOCK_INPUTS
    units = (tiles - program + gl.num_programs(0) - 1) // gl.num_programs(0) * chunks
    line = gl.arange(0, BLOCK_OUTPUTS, gl.SliceLayout(1, copied))
    place = line[:, None] * weight_stride + gl.arange(0, BLOCK_INPUTS, gl.SliceLayout(0, copied))[None, :]
    ring = gl.allocate_shared_memory(dtype, [HALVES * STAGES, BLOCK_OUTPUTS, BLOCK_INPUTS], tiled)
    rows = gl.allocate_shared_memory(dtype, [PART_CHUNKS, 8, BLOCK_INPUTS], tiled)
    for stage in gl.static_range(STAGES - 1):
        copy_weight(
            weight_ptr, ring, stage, stage, units, chunks, first, outputs, step, weight_stride, line, place, GATE
        )
    column = gl.arange(0, BLOCK_INPUTS, gl.SliceLayout(0, placed))
    values, factor, peak = _row(
        x_ptr, residual_ptr, norm_ptr, peak_ptr, new_residual_ptr, inputs, first if PEAKS else 0, eps, norm_offset, peaks,
        column, CHUNKS, NORM, RESIDUAL, PEAKS, MOST, WARPS, DEPENDENT,
    )
    scale = gl.maximum(peak / (448.0 if LINES else 127.0), 7.888609052210118e-31)
    _place_codes(
        values, rows, first, part_inputs, factor / scale, gl.arange(0, 8, gl.SliceLayout(1, placed))[:, None], CHUNKS,
        not LINES, PART_CHUNKS == CHUNKS,
    )
    row = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    of_row = gl.where(row == 0, scale, gl.where(row == 1, scale / (16.0 if LINES else 254.0), 0.0))
    place_of_output = gl.arange(0, BLOCK_OUTPUTS, gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, 4, gl.SliceLayout(0, halved))[None, :]
    place_of_result = gl.arange(0, BLOCK_OUTPUTS, gl.SliceLayout(1, halved))[:, None]
    slot = 0
    free = STAGES - 1
    for begin in range(0, units, chunks):
        tile = program + begin // chunks * gl.num_programs(0)
        output = tile * step + place_of_output
        sums = gl.zeros([BLOCK_OUTPUTS, 8], gl.float32, layout)
        other = sums
        one = gl.zeros([BLOCK_OUTPUTS, 8], SUMS, layout)
        two = one
        three = one
        four = one
        scales = no_scales(output)
        result_output = tile * step + place_of_result
        wanted = (result_output < gl.minimum((tile + 1) * step, outputs)) & (token == 0)
        # Requested before the products: they are needed as soon as those end.
        weight_scale = _of_outputs(scale_ptr, result_output, wanted, BLOCK_SCALED == 0, 1.0)
        added = _of_outputs(bias_ptr, result_output, wanted, BIAS, 0.0)
        up_scale = _of_outputs(scale_ptr + outputs, result_output, wanted, BLOCK_SCALED == 0 and GATE != 0, 1.0)
        up_added = _of_outputs(bias_ptr + outputs, result_output, wanted, BIAS and GATE != 0, 0.0)
        for unit in range(begin, begin + chunks):
            async_copy.wait_group(STAGES - 2)
            one, two, three, four = warpgroup_mma_wait(0, deps=(one, two, three, four))         # the block before this one
            if LINES:
                sums, other = _added(sums, other, one, two, three, four, scales, GATE, BLOCK_SCALED)
            fence_async_shared()
            group_barrier()                              # all threads' copies have arrived, and the unit before is multiplied
            one, two, three, four = _started(ring, slot, rows.index(unit - begin), one, two, three, four, GATE, LINES)
            if BLOCK_SCALED > 0:
                at = first + (unit - begin) * BLOCK_INPUTS
                scales = _scales(scale_ptr, output, outputs, at, scale_stride, GATE, BLOCK_SCALED)
            copy_weight(
                weight_ptr, ring, free, unit + (STAGES - 1), units, chunks, first, outputs, step, weight_stride, line,
                place, GATE,
            )
            free = slot
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        one, two, three, four = warpgroup_mma_wait(0, deps=(one, two, three, four))
        if LINES:
            sums, other = _added(sums, other, one, two, three, four, scales, GATE, BLOCK_SCALED)
        else:
            sums = one.to(gl.float32)
            other = three.to(gl.float32)
        result = _paired(sums, of_row, BLOCK_OUTPUTS, WARPS)
        if splits > 1:
            parts = part_ptr + tile * (splits * BLOCK_OUTPUTS) + place_of_result + 0 * token
            gl.store(parts + split * BLOCK_OUTPUTS, result, mask=wanted)
            group_barrier()                              # every thread's part is written before the arrival is
            arrived = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
            # The last CTA of a tile adds all parts, in their order; the others add and write nothing.
            terms = gl.where(arrived == splits - 1, splits, 0)
            result = gl.zeros([BLOCK_OUTPUTS, 4], gl.float32, halved)
            for term in range(terms):
                result += gl.load(parts + term * BLOCK_OUTPUTS, mask=wanted, other=0.0, cache_modifier=".cg")
            if terms > 0:
                gl.store(arrived_ptr + tile, 0)
            wanted = wanted & (terms > 0)
        result = result * weight_scale + added
        if GATE != 0:
            up = _paired(other, of_row, BLOCK_OUTPUTS, WARPS) * up_scale + up_added
            result = activated(result, GATE) * up
        written = result.to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + result_output + 0 * token, written, mask=wanted)
        if GATE != 0:
            seen = gl.where(wanted, gl.abs(written.to(gl.float32)), 0.0)
            gl.store(new_peak_ptr + tile, gl.max(gl.max(seen, axis=1), axis=0))
    async_copy.wait_group(0)


def one_row_gemm(
    x: Tensor | OneRow, weight: Tensor, scale: Tensor, bias: Tensor | None, plan: OneRowPlan, *, norm: Tensor | None = None,
    eps: float = 0.0, norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], x + residual (x itself without one), and with a gate the tiles' largest magnitudes.

    The weight has 8-bit codes, `scale` is float32: of the outputs, or of blocks of outputs and 128 inputs.
    """
    known = isinstance(x, OneRow)
    peaks = x.peaks if isinstance(x, OneRow) else None
    x = x.x if isinstance(x, OneRow) else x
    inputs = x.shape[1]
    outputs = len(weight) if gate is None else len(weight) // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    stream = x if residual is None else torch.empty_like(x)
    tiles = cdiv(outputs, plan.step)
    made = torch.empty(tiles, dtype=torch.float32, device=x.device) if gate else out
    part_inputs, splits = plan.part_inputs, plan.splits
    parts = torch.empty(tiles * splits * plan.block_outputs, dtype=torch.float32, device=x.device) if splits > 1 else out
    programs = min(tiles, max(1, multiprocessors(x.device) // splits))
    blocks = scale.dim() == 2
    part_chunks = part_inputs // plan.block_inputs
    _one_row_gemm_kernel[programs, splits](
        x, x if residual is None else residual, x if norm is None else norm, out if peaks is None else peaks, weight, scale,
        out if bias is None else bias, out, stream, made, parts, arrivals(x.device), inputs, outputs, tiles, plan.step, splits,
        weight.stride(0), part_inputs, scale.stride(0) if blocks else 0, eps, norm_offset, 0 if peaks is None else len(peaks),
        BLOCK_OUTPUTS=plan.block_outputs, BLOCK_INPUTS=plan.block_inputs, STAGES=plan.stages,
        CHUNKS=part_chunks if known else inputs // plan.block_inputs, PART_CHUNKS=part_chunks, NORM=norm is not None,
        RESIDUAL=residual is not None, PEAKS=known, MOST=MOST_PEAKS, GATE=GATES[gate], BIAS=bias is not None,
        BLOCK_SCALED=power_of_two(cdiv(len(weight), len(scale))) if blocks else 0, WARPS=plan.warps,
        num_warps=plan.warps, **dependent_launch(x.device),
    )
    return out, stream, made

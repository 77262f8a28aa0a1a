"""GEMV for one row as in gemv.py, with the weight streamed through a ring in shared memory (cp.async).

Weights that a CTA requests before its PDL wait keep HBM busy while the kernel before it still runs, above all during attention.
Registers hold 64 KiB of weights in flight per SM, shared memory three times that. Every thread copies what it multiplies
itself, so a thread waits only for its own copies. The sums are gemv.py's, in the same order.

Written in Gluon, which the interpreter does not support; there, and on devices with less shared memory, gemv.py runs. Measured
and slower: prefetching into L2, by this kernel or by those before it (L2 is hardly faster to read than HBM), and e4m3 weights
(`scale`): benchmarks/studies/fp8_linears times them, the engine takes gemm_ring.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import async_copy, copy, gl, wait_for_kernel_before
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two
from ridgeline.ops.linear.gemv import activated, one_row
from ridgeline.ops.linear.select import RingPlan
from ridgeline.ops.registry import gluon_kernel


@gluon_kernel()
def _copy_rows(  # type: ignore[no-untyped-def]
    weight_ptr, ring, slot, block, outputs, weight_stride, row, filled, place, GATE: gl.constexpr
):
    """Request a block of weight rows, with a gate the partner rows too; nothing behind the last row."""
    HALVES: gl.constexpr = 1 if GATE == 0 else 2
    source = weight_ptr + block.to(gl.int64) * weight_stride
    there = (block + row < outputs)[:, None] & filled[None, :]
    copy(ring.index(HALVES * slot), source + place, mask=there, eviction_policy="evict_first")
    if GATE != 0:
        source += outputs.to(gl.int64) * weight_stride
        copy(ring.index(HALVES * slot + 1), source + place, mask=there, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon_kernel()
def _as_floats(weight, SCALED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights as float32; with SCALED they are e4m3 codes that lie in the ring as bytes."""
    if SCALED:
        weight = weight.to(gl.float8e4nv, bitcast=True)
    return weight.to(gl.float32)


@gluon_kernel(do_not_specialize=["outputs"])
def _ring_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, new_residual_ptr,
    inputs, outputs, weight_stride, eps, norm_offset,
    BLOCK: gl.constexpr, BLOCK_INPUTS: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, SCALED: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Blocks of outputs are assigned to the CTAs round-robin. With a gate, weight row `outputs + i` is the partner of row i.

    EVEN: rows fill BLOCK_INPUTS. Where they do not, the rest of the ring is zeroed once and stays zero.
    """
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [1, 32], [1, WARPS], [1, 0])
    HALVES: gl.constexpr = 1 if GATE == 0 else 2
    program = gl.program_id(0)
    column = gl.arange(0, BLOCK_INPUTS, gl.SliceLayout(0, layout))
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    filled = column < inputs
    place = row[:, None] * weight_stride + column[None, :]
    step = gl.num_programs(0) * BLOCK
    first = program * BLOCK
    ring = gl.allocate_shared_memory(
        dtype, [HALVES * STAGES, BLOCK, BLOCK_INPUTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    if not EVEN:
        for stage in gl.static_range(HALVES * STAGES):
            ring.index(stage).store(gl.full([BLOCK, BLOCK_INPUTS], 0, dtype, layout))
    for stage in gl.static_range(STAGES - 1):
        _copy_rows(weight_ptr, ring, stage, first + stage * step, outputs, weight_stride, row, filled, place, GATE)
    if NORM:
        scale = gl.load(norm_ptr + column, mask=filled, other=0.0).to(gl.float32) + norm_offset
    wait_for_kernel_before(DEPENDENT)
    x = gl.load(x_ptr + column, mask=filled, other=0.0).to(gl.float32)
    if RESIDUAL:
        x += gl.load(residual_ptr + column, mask=filled, other=0.0).to(gl.float32)
        # Rounded to the tensor's dtype: the norm is that of the residual which later layers will read.
        rounded = x.to(new_residual_ptr.dtype.element_ty)
        gl.store(new_residual_ptr + column, rounded, mask=column + program * BLOCK_INPUTS < inputs)
        x = rounded.to(gl.float32)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(x * x, axis=0) / inputs + eps)
        x = x * scale
    slot = 0
    free = STAGES - 1
    for block in range(first, outputs, step):
        following = block + (STAGES - 1) * step
        _copy_rows(weight_ptr, ring, free, following, outputs, weight_stride, row, filled, place, GATE)
        async_copy.wait_group(STAGES - 1)
        output = block + row
        weight = ring.index(HALVES * slot).load(layout)
        sums = gl.sum(_as_floats(weight, SCALED) * x[None, :], axis=1) * factor
        if SCALED:
            sums *= gl.load(scale_ptr + output, mask=output < outputs, other=0.0)
        if BIAS:
            sums += gl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(gl.float32)
        if GATE != 0:
            up = ring.index(HALVES * slot + 1).load(layout)
            other = gl.sum(_as_floats(up, SCALED) * x[None, :], axis=1) * factor
            if SCALED:
                other *= gl.load(scale_ptr + outputs + output, mask=output < outputs, other=0.0)
            if BIAS:
                other += gl.load(bias_ptr + outputs + output, mask=output < outputs, other=0.0).to(gl.float32)
            sums = activated(sums, GATE) * other
        gl.store(out_ptr + output, sums.to(out_ptr.dtype.element_ty), mask=output < outputs)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        free = gl.where(free == STAGES - 1, 0, free + 1)
    async_copy.wait_group(0)


def ring_gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: RingPlan, *, norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], and x + residual (x itself without one). The weight is contiguous: 16-bit numbers, or
    e4m3 codes with a float32 scale for each output. x is not quantised."""
    if scale is not None:
        weight = weight.view(torch.uint8)
    out, new_residual, arguments, constants = one_row(x, weight, bias, norm, eps, norm_offset, residual, gate)
    arguments = (*arguments[:4], out if scale is None else scale, *arguments[4:])
    block_inputs = power_of_two(x.shape[1])
    programs = min(cdiv(out.shape[1], plan.block), plan.programs * multiprocessors(x.device))
    _ring_gemv_kernel[(programs,)](
        *arguments, BLOCK=plan.block, BLOCK_INPUTS=block_inputs, STAGES=plan.stages, EVEN=block_inputs == x.shape[1],
        SCALED=scale is not None, WARPS=plan.warps, num_warps=plan.warps, **constants, **dependent_launch(x.device),
    )
    return out, new_residual

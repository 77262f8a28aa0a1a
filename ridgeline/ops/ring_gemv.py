"""One row times a weight matrix as in gemv.py, with the weight coming through a ring in shared memory.

What a kernel has asked for before it waits for the one before it is what the memory works on meanwhile: between two
products and, above all, while attention computes. Registers hold 64 KiB of a multiprocessor's weights on their way, shared
memory three times that. Every thread copies what it will multiply itself, so that nobody waits for anybody but its own
copies. The sums are gemv.py's, in the same order.

Written in Gluon, which the interpreter does not know; there, and on devices with less shared memory, gemv.py multiplies.
Prefetching into the second level cache instead, by this kernel or by those before it, was measured and loses: what has been
prefetched is hardly faster to read than the memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ridgeline.ops.gemv import GATES
from ridgeline.ops.launch import dependent_launch, multiprocessors, shared_memory
from ridgeline.ops.linear_plan import RingPlan, ring_plan
from ridgeline.ops.registry import HAS_TRITON, TRITON_INTERPRETED, gluon_kernel, triton

if HAS_TRITON and not TRITON_INTERPRETED:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    # The name changed between the versions of Triton in use, 3.6 and later.
    copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
else:
    gl = async_copy = copy = None


@gluon_kernel(do_not_specialize=["outputs"])
def _ring_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, new_residual_ptr,
    inputs, outputs, weight_stride, eps, norm_offset,
    BLOCK: gl.constexpr, BLOCK_INPUTS: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Blocks of outputs are dealt out to the programs in turn. With a gate, weight row `outputs + i` is i's partner.

    EVEN: rows fill BLOCK_INPUTS. Where they do not, what lies behind them in the ring is zero and stays so.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    HALVES: gl.constexpr = 1 if GATE == 0 else 2
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    program = gl.program_id(0)
    column = gl.arange(0, BLOCK_INPUTS, gl.SliceLayout(0, layout))
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    filled = column < inputs
    place = row[:, None] * weight_stride + column[None, :]
    partner = outputs.to(gl.int64) * weight_stride
    step = gl.num_programs(0) * BLOCK
    first = program * BLOCK
    ring = gl.allocate_shared_memory(
        dtype, [HALVES * STAGES, BLOCK, BLOCK_INPUTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    if not EVEN:
        for stage in gl.static_range(HALVES * STAGES):
            ring.index(stage).store(gl.full([BLOCK, BLOCK_INPUTS], 0, dtype, layout))
    for stage in gl.static_range(STAGES - 1):
        block = first + stage * step
        source = weight_ptr + block.to(gl.int64) * weight_stride
        there = (block + row < outputs)[:, None] & filled[None, :]
        copy(ring.index(HALVES * stage), source + place, mask=there, eviction_policy="evict_first")
        if GATE != 0:
            copy(ring.index(HALVES * stage + 1), source + partner + place, mask=there, eviction_policy="evict_first")
        async_copy.commit_group()
    if NORM:
        scale = gl.load(norm_ptr + column, mask=filled, other=0.0).to(gl.float32) + norm_offset
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )
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
        source = weight_ptr + following.to(gl.int64) * weight_stride
        there = (following + row < outputs)[:, None] & filled[None, :]
        copy(ring.index(HALVES * free), source + place, mask=there, eviction_policy="evict_first")
        if GATE != 0:
            copy(ring.index(HALVES * free + 1), source + partner + place, mask=there, eviction_policy="evict_first")
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        output = block + row
        weight = ring.index(HALVES * slot).load(layout)
        sums = gl.sum(weight.to(gl.float32) * x[None, :], axis=1) * factor
        if BIAS:
            sums += gl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(gl.float32)
        if GATE != 0:
            up = ring.index(HALVES * slot + 1).load(layout)
            other = gl.sum(up.to(gl.float32) * x[None, :], axis=1) * factor
            if BIAS:
                other += gl.load(bias_ptr + outputs + output, mask=output < outputs, other=0.0).to(gl.float32)
            if GATE == 1:
                sums = sums / (1.0 + gl.exp(-sums))
            elif GATE == 2:                              # 1 + tanh(z) is 2 sigmoid(2 z)
                sums = sums / (1.0 + gl.exp(-1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)))
            else:
                sums = 0.5 * sums * (1.0 + gl.erf(sums * 0.7071067811865476))
            sums *= other
        gl.store(out_ptr + output, sums.to(out_ptr.dtype.element_ty), mask=output < outputs)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        free = gl.where(free == STAGES - 1, 0, free + 1)
    async_copy.wait_group(0)


RESERVED = 2048                      # bytes of shared memory that a program needs beside its ring: for sums, and the driver's


@functools.cache
def ring_for(outputs: int, inputs: int, gated: bool, device: torch.device) -> RingPlan | None:
    """The plan where this kernel is to multiply; None: gemv.py's."""
    if not HAS_TRITON or TRITON_INTERPRETED or device.type != "cuda":
        return None
    plan = ring_plan(outputs, inputs, gated)
    if plan is None:
        return None
    needed = plan.shared_bytes(triton.next_power_of_2(inputs), gated) + plan.programs * RESERVED
    return plan if needed <= shared_memory(device) else None


def ring_gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: RingPlan, *, norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], and x + residual (x itself without one). 16 bit numbers, the weight contiguous."""
    inputs = x.shape[1]
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(x)
    block_inputs = triton.next_power_of_2(inputs)
    programs = min(triton.cdiv(outputs, plan.block), plan.programs * multiprocessors(x.device))
    _ring_gemv_kernel[(programs,)](
        x, x if residual is None else residual, weight if norm is None else norm, weight, weight if bias is None else bias,
        out, new_residual, inputs, outputs, weight.stride(0), eps, norm_offset,
        BLOCK=plan.block, BLOCK_INPUTS=block_inputs, STAGES=plan.stages, EVEN=block_inputs == inputs,
        NORM=norm is not None, RESIDUAL=residual is not None, GATE=GATES[gate], BIAS=bias is not None, WARPS=plan.warps,
        num_warps=plan.warps, **dependent_launch(x.device),
    )  # fmt: skip
    return out, new_residual

"""GEMV for one row, fused with the norm before it and the gated activation behind it.

Only reading the weight takes time, so the kernel never stops reading: a CTA keeps the whole row of x in registers and streams
blocks of weight rows, and requests the first block before the PDL wait. Several CTAs share an SM: one reads while another
multiplies. The norm needs no pass of its own: its scale is a factor of the whole row and is applied to the sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two
from ridgeline.ops.linear.select import GemvPlan
from ridgeline.ops.registry import tl, triton_kernel

GATES = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}


@triton_kernel()
def activated(gate, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation in a GEMM's epilogue, on float32 sums; used by Gluon kernels, too."""
    if GATE == 1:
        gate = gate / (1.0 + tl.exp(-gate))
    elif GATE == 2:                                      # 1 + tanh(z) is 2 sigmoid(2 z)
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return gate


@triton_kernel(do_not_specialize=["outputs"])
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, new_residual_ptr,
    inputs, outputs, weight_stride, eps, norm_offset,
    BLOCK: tl.constexpr, BLOCK_INPUTS: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Blocks of outputs are assigned to the CTAs round-robin. With a gate, weight row `outputs + i` is the partner of row i.

    ONTO: the result is added to what is in `out`.
    EVEN: every block and every row is full, so that no load needs a mask.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_INPUTS)
    row = tl.arange(0, BLOCK)
    filled = column < inputs
    place = row[:, None].to(tl.int64) * weight_stride + column[None, :]
    partner = outputs.to(tl.int64) * weight_stride
    step = tl.num_programs(0) * BLOCK
    first = program * BLOCK
    start = weight_ptr + first.to(tl.int64) * weight_stride
    inside = filled[None, :] & (first + row < outputs)[:, None]
    if EVEN:
        weight = tl.load(start + place, eviction_policy="evict_first")
    else:
        weight = tl.load(start + place, mask=inside, other=0.0, eviction_policy="evict_first")
    up = weight
    if GATE != 0:
        if EVEN:
            up = tl.load(start + partner + place, eviction_policy="evict_first")
        else:
            up = tl.load(start + partner + place, mask=inside, other=0.0, eviction_policy="evict_first")
    if NORM:
        scale = tl.load(norm_ptr + column, mask=filled, other=0.0).to(tl.float32) + norm_offset
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + column, mask=filled, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + column, mask=filled, other=0.0).to(tl.float32)
        # Rounded to the tensor's dtype: the norm is that of the residual which later layers will read.
        rounded = x.to(new_residual_ptr.dtype.element_ty)
        only_first = column + program * BLOCK_INPUTS < inputs
        tl.store(new_residual_ptr + column, rounded, mask=only_first)
        x = rounded.to(tl.float32)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / inputs + eps)
        x = x * scale
    for block in range(first, outputs, step):
        # Requested as early as registers allow.
        following = block + step
        source = weight_ptr + following.to(tl.int64) * weight_stride
        there = (following + row < outputs)[:, None]
        if not EVEN:
            there = there & filled[None, :]
        next_weight = tl.load(source + place, mask=there, other=0.0, eviction_policy="evict_first")
        next_up = next_weight
        if GATE != 0:
            next_up = tl.load(source + partner + place, mask=there, other=0.0, eviction_policy="evict_first")
        output = block + row
        sums = tl.sum(weight.to(tl.float32) * x[None, :], axis=1) * factor
        if BIAS:
            sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)
        if GATE != 0:
            other = tl.sum(up.to(tl.float32) * x[None, :], axis=1) * factor
            if BIAS:
                other += tl.load(bias_ptr + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)
            sums = activated(sums, GATE) * other
        if ONTO:
            sums += tl.load(out_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)
        tl.store(out_ptr + output, sums.to(out_ptr.dtype.element_ty), mask=output < outputs)
        weight = next_weight
        up = next_up


def one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, norm_offset: float,
    residual: Tensor | None, gate: str | None, onto: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Any, ...], dict[str, Any]]:
    """(result, x + residual, arguments, constants) for the launch of this kernel, or of gemv_ring.py's."""
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if onto is None else onto
    new_residual = x if residual is None else torch.empty_like(x)
    arguments = (
        x, x if residual is None else residual, weight if norm is None else norm, weight, weight if bias is None else bias,
        out, new_residual, x.shape[1], outputs, weight.stride(0), eps, norm_offset,
    )
    constants = {"NORM": norm is not None, "RESIDUAL": residual is not None, "GATE": GATES[gate], "BIAS": bias is not None}
    return out, new_residual, arguments, constants


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemvPlan, *, norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None, onto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], and x + residual (x itself without one). `onto` is added to, in place."""
    out, new_residual, arguments, constants = one_row(x, weight, bias, norm, eps, norm_offset, residual, gate, onto)
    block_inputs = power_of_two(x.shape[1])
    even = block_inputs == x.shape[1] and out.shape[1] % plan.block == 0
    programs = min(cdiv(out.shape[1], plan.block), plan.programs * multiprocessors(x.device))
    _gemv_kernel[(programs,)](
        *arguments, BLOCK=plan.block, BLOCK_INPUTS=block_inputs, EVEN=even, ONTO=onto is not None, num_warps=plan.warps,
        **constants, **dependent_launch(x.device),
    )
    return out, new_residual

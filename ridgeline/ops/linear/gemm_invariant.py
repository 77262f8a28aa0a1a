"""Batch-invariant GEMM for deterministic mode: a row's result does not depend on the other rows.

Every sum runs over the inputs in order, in as many parts as the matrix's shape gives, and the parts are added in order. Few rows
compute the parts in parallel (gemm_small.py), many rows one after the other (here); the tile of a row changes no addition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.launch import cdiv, dependent_launch
from ridgeline.ops.linear.gemm_small import small_gemm
from ridgeline.ops.linear.select import MOST_ROWS, GemmPlan, invariant_plan, split_inputs
from ridgeline.ops.registry import HAS_TRITON, TRITON_INTERPRETED, tl, triton_kernel

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


@triton_kernel(do_not_specialize=["rows", "outputs"])
def _invariant_gemm_kernel(  # type: ignore[no-untyped-def]
    x_tiles, weight_tiles, bias_ptr, out_ptr, rows, inputs, outputs, part_inputs,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """Tiles in groups of GROUP blocks of rows, so that CTAs which run together read the same weights."""
    number = tl.program_id(0)
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    output_blocks = tl.cdiv(outputs, BLOCK_OUTPUTS)
    group = number // (GROUP * output_blocks)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    within = number % (GROUP * output_blocks)
    first_row = (group * GROUP + within % height) * BLOCK_ROWS
    first_output = within // height * BLOCK_OUTPUTS
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for split in range(SPLITS):
        part = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
        for start in range(split * part_inputs, tl.minimum((split + 1) * part_inputs, inputs), BLOCK_INPUTS):
            x = x_tiles.load([first_row, start])
            weight = weight_tiles.load([first_output, start])
            if UPCAST:
                x = x.to(tl.float32)
                weight = weight.to(tl.float32)
            part = tl.dot(x, weight.T, part, input_precision="ieee")
        sums += part
    row = (first_row + tl.arange(0, BLOCK_ROWS))[:, None]
    output = (first_output + tl.arange(0, BLOCK_OUTPUTS))[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)
    wanted = (row < rows) & (output < outputs)
    tl.store(out_ptr + row.to(tl.int64) * outputs + output, sums.to(out_ptr.dtype.element_ty), mask=wanted)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs], weight [outputs, inputs], bias [outputs] -> x weight^T + bias, [T, outputs]; inputs % 16 == 0"""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    plan = invariant_plan(rows, outputs, inputs)
    return small_gemm(x, weight, bias, plan) if rows <= MOST_ROWS else _one_after_the_other(x, weight, bias, plan)


def _one_after_the_other(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> Tensor:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    part_inputs = split_inputs(inputs, plan.splits)
    _invariant_gemm_kernel[(cdiv(rows, plan.block_rows) * cdiv(outputs, plan.block_outputs),)](
        TensorDescriptor.from_tensor(x, [plan.block_rows, plan.block_inputs]),
        TensorDescriptor.from_tensor(weight, [plan.block_outputs, plan.block_inputs]),
        weight if bias is None else bias, out, rows, inputs, outputs, part_inputs,
        BLOCK_ROWS=plan.block_rows, BLOCK_OUTPUTS=plan.block_outputs, BLOCK_INPUTS=plan.block_inputs,
        SPLITS=cdiv(inputs, part_inputs), GROUP=8, BIAS=bias is not None, UPCAST=TRITON_INTERPRETED,
        num_warps=plan.warps, num_stages=plan.stages, **dependent_launch(x.device),
    )
    return out

"""Products of int8 codes for many rows: a GEMM whose epilogue multiplies the exact sums by their scales, and for devices without
TMA cuBLAS with one more kernel for the scales. cuBLAS alone takes longer on an H200 than with 16-bit numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors
from ridgeline.ops.linear.gemm_gated import described
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel

BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES = 128, (256, 128), 128, 3
HALF_GAIN = 0.75                     # of the time with wide tiles: with more, narrow ones lose by reading x twice as often
NEIGHBOURS = 8                       # blocks of rows that go through the outputs together
FEWEST_ROWS = 17                     # that torch._int_mm takes


@triton_kernel(do_not_specialize=["rows"])
def _integer_gemm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, x_scale_ptr, scale_ptr, bias_ptr, rows, outputs, inputs,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BIAS: tl.constexpr, UPCAST: tl.constexpr,
):
    """x [rows, inputs], weight [outputs, inputs] and out [rows, outputs] are TMA descriptors; tiles as in gemm_gated.py."""
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    output_blocks = tl.cdiv(outputs, BLOCK_OUTPUTS)
    for tile in tl.range(tl.program_id(0), row_blocks * output_blocks, tl.num_programs(0), flatten=True):
        band = tile // (NEIGHBOURS * output_blocks)
        height = tl.minimum(row_blocks - band * NEIGHBOURS, NEIGHBOURS)
        place = tile % (NEIGHBOURS * output_blocks)
        row = (band * NEIGHBOURS + place % height) * BLOCK_ROWS
        output = place // height * BLOCK_OUTPUTS
        sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32 if UPCAST else tl.int32)
        for start in range(0, inputs, BLOCK_INPUTS):
            left = x.load([row, start])
            right = weight.load([output, start])
            if UPCAST:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            sums = tl.dot(left, right.T, sums, out_dtype=sums.dtype)
        token = row + tl.arange(0, BLOCK_ROWS)
        column = output + tl.arange(0, BLOCK_OUTPUTS)
        result = sums.to(tl.float32) * tl.load(x_scale_ptr + token, mask=token < rows, other=0.0)[:, None]
        result *= tl.load(scale_ptr + column, mask=column < outputs, other=0.0)[None, :]
        if BIAS:
            result += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
        out.store([row, output], result.to(out.dtype))


def block_outputs(rows: int, outputs: int, sms: int) -> int:
    """Outputs of a tile. Where wide tiles leave many SMs without one, as down has for 512 rows (64 tiles), narrow ones."""
    wide, narrow = BLOCK_OUTPUTS
    rounds = [cdiv(cdiv(rows, BLOCK_ROWS) * cdiv(outputs, size), sms) * size for size in BLOCK_OUTPUTS]
    return narrow if rounds[1] < HALF_GAIN * rounds[0] else wide


def integer_gemm(
    codes: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """codes [T, inputs] and weight [outputs, inputs], int8, with a scale for each row -> [T, outputs]"""
    (rows, inputs), outputs = codes.shape, len(weight)
    out = torch.empty((rows, outputs), dtype=dtype, device=codes.device)
    sms = multiprocessors(codes.device)
    block = block_outputs(rows, outputs, sms)
    programs = min(cdiv(rows, BLOCK_ROWS) * cdiv(outputs, block), sms)
    _integer_gemm_kernel[programs,](
        described(codes, BLOCK_ROWS, BLOCK_INPUTS), described(weight, block, BLOCK_INPUTS),
        described(out, BLOCK_ROWS, block), x_scale, scale, out if bias is None else bias, rows, outputs, inputs,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_OUTPUTS=block, BLOCK_INPUTS=BLOCK_INPUTS, NEIGHBOURS=NEIGHBOURS,
        BIAS=bias is not None, UPCAST=TRITON_INTERPRETED,                # the interpreter's narrow dot products are wrong
        num_warps=8, num_stages=STAGES,
    )
    return out


@triton_kernel(do_not_specialize=["rows"])
def _scale_sums_kernel(  # type: ignore[no-untyped-def]
    sum_ptr, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, rows, outputs,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (row, block of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    scale = tl.load(scale_ptr + output, mask=inside, other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.load(sum_ptr + row * outputs + output, mask=inside, other=0).to(tl.float32)
    sums = sums * scale * tl.load(x_scale_ptr + row)
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + output, sums.to(out_ptr.dtype.element_ty), mask=inside)


def integer_product(
    codes: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`integer_gemm` through cuBLAS. The sums of as many rows as half the inputs lie in memory at a time: they take what the
    weight would take in 16 bits."""
    rows, (outputs, inputs) = len(codes), weight.shape
    out = torch.empty((rows, outputs), dtype=dtype, device=codes.device)
    step = max(inputs // 2, FEWEST_ROWS)
    for first in range(0, rows, step):
        part = codes[first : first + step]
        count = len(part)
        if count < FEWEST_ROWS:
            part = F.pad(part, (0, 0, 0, FEWEST_ROWS - count))
        sums = torch._int_mm(part, weight.t())
        _scale_sums_kernel[count, cdiv(outputs, 1024)](
            sums, x_scale[first:], scale, out if bias is None else bias, out[first:], count, outputs, BLOCK=1024,
            BIAS=bias is not None, num_warps=4, **dependent_launch(codes.device),
        )
    return out

"""Products of int8 codes through cuBLAS: exact integer sums, and one more kernel that multiplies them by the scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.launch import cdiv, dependent_launch
from ridgeline.ops.registry import tl, triton_kernel

FEWEST_ROWS = 17                     # that torch._int_mm takes


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
    """codes [T, inputs] and weight [outputs, inputs], int8, with a scale for each row -> [T, outputs]. The sums of as many rows
    as half the inputs lie in memory at a time: they take what the weight would take in 16 bits."""
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

"""The product with a weight matrix as it is stored, [outputs, inputs]. Packed and quantised weights are quant/'s business."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.costs import LINEAR_CASES, linear_cost
from ridgeline.ops import native
from ridgeline.ops.registry import Implementation, Op, Tolerance

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs], weight [outputs, inputs], bias [outputs] -> x weight^T + bias, [T, outputs]"""
    return F.linear(x, weight, bias)


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def linear_native(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One row is nothing but reading the weight, which needs no library; several are torch's."""
    if x.shape[0] != 1 or x.stride(1) != 1 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype)
    native.library().ridgeline_linear_row(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), inputs, outputs
    )
    return out


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, inputs: int, outputs: int, bias: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight = random(outputs, inputs) * inputs**-0.5
    return (random(tokens, inputs), weight.to(dtype), random(outputs) if bias else None), {}


linear = Op(
    "linear",
    linear_reference,
    kernels=[Implementation("native", linear_native, native.supports)],
    cases=LINEAR_CASES,
    cost=lambda *, bias, element_bytes, **sizes: linear_cost(
        weight_bytes=element_bytes, element_bytes=element_bytes, **sizes
    ),
    inputs=_inputs,
    # A sum of up to 1,536 products with a standard deviation of 1: its rounding grows with the root of the length.
    tolerance={
        "float32": Tolerance(1e-6, 5e-6),
        "bfloat16": Tolerance(2**-7, 2**-7),
        "float16": Tolerance(2**-10, 2**-10),
    },
)

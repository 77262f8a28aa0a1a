"""The linear with a quantised weight, in any format, alone and behind a norm, with or without a gate.

The definition expands the weight and multiplies. On a GPU, few rows are multiplied by the codes directly (codes_gemv.py one row,
with the norm and the gate, in the formats that it knows), and for many rows the weight is expanded into a buffer, by which the
library multiplies. Faster kernels of single formats come before this op.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation import gated_activation, gated_activation_reference
from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import choose
from ridgeline.ops.quantised.codes import BITS, TABLES, packed_codes, table
from ridgeline.ops.quantised.codes_gemv import codes_gemv, codes_gemv_for
from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.quantised.quantised_kernels import expand_triton, few_rows_triton, whole_groups
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.ops.rms_norm import rms_norm, rms_norm_reference
from ridgeline.sizes.quantised_costs import (
    NORMED_QUANTISED_LINEAR_CASES,
    QUANTISED_LINEAR_CASES,
    normed_quantised_linear_cost,
    quantised_linear_cost,
)


def quantised_linear_reference(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] -> x expand(weight)^T + bias, [T, outputs]"""
    return F.linear(x, expand(weight, x.dtype), bias)


def normed_quantised_linear_reference(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: QuantisedWeight, bias: Tensor | None = None,
    *, norm_offset: float = 0.0, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(the linear of rms_norm(x + residual), x + residual); with a gate, its gated activation. Without a residual, x is the
    whole residual stream."""
    normed, stream = rms_norm_reference(
        x, norm, eps, residual=torch.zeros_like(x) if residual is None else residual, weight_offset=norm_offset
    )
    out = quantised_linear_reference(normed, weight, bias)
    return (out if gate is None else gated_activation_reference(out, gate)), stream


def prepare(weight: QuantisedWeight) -> None:
    """Makes what is shared before the first CUDA graph: memory allocated during a capture belongs to that graph."""
    if weight.grid in TABLES:
        table(weight.grid, weight.weight.device, torch.float32)


@cache
def _has_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def quantised_linear_triton(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    if not len(x):
        return x.new_empty((0, len(weight.weight)))
    if torch.float8_e4m3fn in (weight.weight.dtype, weight.scale.dtype) and not _has_fp8(x.device):
        return quantised_linear_reference(x, weight, bias)               # Triton has no e4m3 on older GPUs
    plan = codes_gemv_for(x, weight, False)
    if plan is not None:
        return codes_gemv(x, weight, bias, plan)[0]
    if weight.order is not None:                         # x is read in the order of the codes
        x, weight = x.index_select(1, weight.order), weight._replace(order=None)
    format = "groups" if whole_groups(weight) else "other"
    if choose(format, len(x), len(weight.weight), weight.inputs, False, device_facts(x.device)).kernel == "few_rows":
        return few_rows_triton(x if x.stride(1) == 1 else x.contiguous(), weight, bias)
    return F.linear(x, expand_triton(weight, x.dtype), bias)


def normed_quantised_linear_triton(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: QuantisedWeight, bias: Tensor | None = None,
    *, norm_offset: float = 0.0, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    plan = codes_gemv_for(x, weight, gate is not None)
    if plan is not None:
        return codes_gemv(x, weight, bias, plan, norm=norm, eps=eps, norm_offset=norm_offset, residual=residual, gate=gate)
    if residual is None:
        normed, stream = rms_norm(x, norm, eps, weight_offset=norm_offset), x
    else:
        normed, stream = rms_norm(x, norm, eps, residual=residual, weight_offset=norm_offset)
    out = quantised_linear_triton(normed, weight, bias)
    return (out if gate is None else gated_activation(out, gate)), stream


def _supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, inputs: int, outputs: int, bias: bool, grid: str,
    block: tuple[int, int], zero: str | None = None, outer: bool = False, reordered: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if grid == "e4m3":
        codes = (random(outputs, inputs) * 100).to(torch.float8_e4m3fn)
    elif grid == "int8":
        codes = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    else:
        most = 3 if grid == "ternary" else 1 << BITS[grid]
        codes = torch.randint(most, (outputs, inputs), generator=generator, dtype=torch.uint8)
    packed, high = packed_codes(grid, codes)
    size = inputs**-0.5 / {"e4m3": 100, "int8": 74, "uint4": 4.6, "e2m1": 2.9, "q5": 9.2, "q6": 18.5}.get(grid, 0.7)
    shape = (-(-outputs // block[0]), -(-inputs // block[1])) if block[1] else (-(-outputs // block[0]),)
    scale = (torch.rand(shape, generator=generator) + 0.5) * size
    found: dict[str, Any] = {"high": high}
    if outer:
        scale = (scale / size).to(torch.float8_e4m3fn if grid == "e2m1" else torch.float16)
        found["outer"] = torch.full((outputs,), size)
    if zero == "code":
        found["zero"] = torch.randint(5, 11, shape, generator=generator).to(scale.dtype)
    if zero == "offset":
        found["offset"] = (random(*shape) * (1 if outer else size)).to(scale.dtype)
        found["offset_outer"] = found.get("outer")
    if reordered:
        found["order"] = torch.randperm(inputs, generator=generator).to(torch.int32)
    found = {name: None if tensor is None else tensor.to(device) for name, tensor in found.items()}
    weight = QuantisedWeight(grid, inputs, packed.to(device), scale.to(device), block, **found)
    added = random(outputs).to(device, dtype) if bias else None
    return (random(tokens, inputs).to(device, dtype), weight, added), {}


quantised_linear = Op(
    "quantised_linear",
    quantised_linear_reference,
    kernels=[Implementation("triton", quantised_linear_triton, _supports)],
    cases=QUANTISED_LINEAR_CASES,
    cost=quantised_linear_cost,
    inputs=_inputs,
    # Sums of size 1; the weight is rounded to x's dtype, as in the definition, but computed in another order before that.
    tolerance={"float32": Tolerance(1e-6, 1e-5), "bfloat16": Tolerance(2**-7, 2**-6), "float16": Tolerance(2**-10, 2**-9)},
)


def _normed_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, inputs: int, outputs: int, grid: str,
    block: tuple[int, int], residual: bool, gate: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rows = outputs if gate is None else 2 * outputs
    (x, weight, _), _ = _inputs(
        generator, dtype, device, tokens=tokens, inputs=inputs, outputs=rows, bias=False, grid=grid, block=block
    )
    stream = torch.randn(tokens, inputs, generator=generator).to(device, dtype) if residual else None
    return (x, stream, torch.randn(inputs, generator=generator).to(device, dtype), 1e-5, weight), {"gate": gate}


normed_quantised_linear = Op(
    "normed_quantised_linear",
    normed_quantised_linear_reference,
    kernels=[Implementation("triton", normed_quantised_linear_triton, _supports)],
    cases=NORMED_QUANTISED_LINEAR_CASES,
    cost=normed_quantised_linear_cost,
    inputs=_normed_inputs,
    # The norm of a rounded sum, a product as above, and with a gate the product of two such.
    tolerance={"float32": Tolerance(4e-6, 2e-5), "bfloat16": Tolerance(2**-6, 2**-4), "float16": Tolerance(2**-9, 2**-7)},
)

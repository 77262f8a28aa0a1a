"""The linear with a quantised weight, in any format.

The definition expands the weight and multiplies. On a GPU, few rows are multiplied by the codes directly, and for many rows the
weight is expanded into a buffer, by which the library multiplies. Faster kernels of single formats come before this op.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import choose
from ridgeline.ops.quantised.codes import BITS, TABLES, packed_codes, table
from ridgeline.ops.quantised.codes_gemv import codes_gemv, codes_gemv_for
from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.quantised.quantised_kernels import expand_triton, few_rows_triton
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.sizes.quantised_costs import QUANTISED_LINEAR_CASES, quantised_linear_cost


def quantised_linear_reference(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] -> x expand(weight)^T + bias, [T, outputs]"""
    return F.linear(x, expand(weight, x.dtype), bias)


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
    if choose("other", len(x), len(weight.weight), weight.inputs, False, device_facts(x.device)).kernel == "few_rows":
        return few_rows_triton(x if x.stride(1) == 1 else x.contiguous(), weight, bias)
    return F.linear(x, expand_triton(weight, x.dtype), bias)


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

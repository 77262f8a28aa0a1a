"""The linear with packed weights of 4 to 8 bits (packed_weight.py, block_weight.py, byte_weight.py), alone and behind a norm,
with or without a gate.

Kernels: packed_gemv.py and byte_gemv.py (one row), packed_gemm.py (up to 768 rows), else the weight is expanded
(packed_expand.py) and cuBLAS multiplies. ops/kernel_table.py chooses. x is never quantised.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation import gated_activation, gated_activation_reference
from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import Choice, choose
from ridgeline.ops.packed.block_weight import packed_numbers
from ridgeline.ops.packed.byte_gemv import byte_gemv
from ridgeline.ops.packed.packed_expand import expand
from ridgeline.ops.packed.packed_gemm import packed_gemm
from ridgeline.ops.packed.packed_gemv import packed_gemv
from ridgeline.ops.packed.packed_sizes import BYTES, STRIP, strips_at_once
from ridgeline.ops.packed.packed_weight import PackedWeight, byte_scales, of_strips, pack, quantised, some_strips
from ridgeline.ops.registry import Implementation, Op, Site, Tolerance
from ridgeline.ops.rms_norm import rms_norm, rms_norm_reference
from ridgeline.sizes.packed_costs import (
    NORMED_PACKED_LINEAR_CASES,
    PACKED_LINEAR_CASES,
    normed_packed_linear_cost,
    packed_linear_cost,
)

NARROW = (torch.bfloat16, torch.float16)
EXPAND = Choice("expand", True, False)
ONE_ROW = {"packed_gemv": packed_gemv, "byte_gemv": byte_gemv}

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def packed_linear_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] -> x w^T + bias, [T, outputs], with the weight as numbers"""
    return F.linear(x, packed_numbers(weight, x.dtype), bias)


def normed_packed_linear_reference(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None,
    *, norm_offset: float = 0.0, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(the linear of rms_norm(x + residual), x + residual); with a gate, its gated activation. Without a residual, x is the
    whole residual stream."""
    normed, stream = rms_norm_reference(
        x, norm, eps, residual=torch.zeros_like(x) if residual is None else residual, weight_offset=norm_offset
    )
    out = packed_linear_reference(normed, weight, bias)
    return (out if gate is None else gated_activation_reference(out, gate)), stream


# ── GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chosen(x: Tensor, weight: PackedWeight, gated: bool) -> Choice:
    """Kernels read rows at multiples of 16 bytes; they know e2m1 in bfloat16 only, zeros that are codes, and gates and partners
    that alternate where there is a gate."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    known = x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and weight.kind != "e2m1")
    if not (aligned and known and weight.whole_zeros and weight.gated == gated and weight.inputs % 8 == 0 and len(x)):
        return EXPAND
    outputs = weight.outputs // 2 if gated else weight.outputs
    format = "8-bit" if weight.form == BYTES else "4-bit" if weight.high is None else "6-bit"
    return choose(format, len(x), outputs, weight.inputs, gated, device_facts(x.device))


def multiplied(x: Tensor, weight: PackedWeight, bias: Tensor | None, gate: str | None) -> Tensor:
    """The linear of rows that are normed already, with its gated activation."""
    kernel, plan, _ = _chosen(x, weight, gate is not None)
    if kernel in ONE_ROW:
        return ONE_ROW[kernel](x, weight, bias, plan, gate=gate)[0]
    if kernel == "packed_gemm":
        return packed_gemm(x, weight, bias, plan, gate=gate)
    return _by_expanding(x, weight, bias, gate)


def _by_expanding(x: Tensor, weight: PackedWeight, bias: Tensor | None, gate: str | None) -> Tensor:
    """By numbers in memory, of a large weight in parts. The gated activation of a whole one is written over the gates."""
    strips, at_once = len(weight.codes), strips_at_once(weight.outputs, weight.inputs)
    pairs = weight.outputs // 2
    if gate is not None and (at_once >= strips or not weight.gated):
        both = _by_expanding(x, weight, bias, None)
        return gated_activation(both, gate, out=both[:, :pairs])
    if at_once >= strips:
        return F.linear(x, expand(weight, x.dtype), bias)
    out = x.new_empty((len(x), weight.outputs if gate is None else pairs))
    for first in range(0, strips, at_once):
        part = some_strips(weight, first, at_once)
        numbers, added = expand(part, x.dtype), of_strips(weight, bias, first, part.outputs)
        start, half = first * STRIP // (2 if weight.gated else 1), part.outputs // 2
        if gate is not None:
            gated_activation(F.linear(x, numbers, added), gate, out=out[:, start : start + half])
        elif not weight.gated:
            _product_into(out[:, start : start + part.outputs], x, numbers, added)
        else:
            for place, own in ((start, slice(0, half)), (pairs + start, slice(half, None))):
                _product_into(out[:, place : place + half], x, numbers[own], None if added is None else added[own])
    return out


def _product_into(out: Tensor, x: Tensor, numbers: Tensor, bias: Tensor | None) -> None:
    """cuBLAS writes to columns of a larger matrix."""
    if bias is None:
        torch.mm(x, numbers.t(), out=out)
    else:
        torch.addmm(bias, x, numbers.t(), out=out)


def packed_linear_gpu(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return multiplied(x, weight, bias, None)


def normed_packed_linear_gpu(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None,
    *, norm_offset: float = 0.0, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    kernel, plan, _ = _chosen(x, weight, gate is not None)
    if kernel in ONE_ROW:
        gemv = ONE_ROW[kernel]
        return gemv(x, weight, bias, plan, norm=norm, eps=eps, norm_offset=norm_offset, residual=residual, gate=gate)
    if residual is None:
        normed, stream = rms_norm(x, norm, eps, weight_offset=norm_offset), x
    else:
        normed, stream = rms_norm(x, norm, eps, residual=residual, weight_offset=norm_offset)
    return multiplied(normed, weight, bias, gate), stream


def _supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in NARROW


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _weight(
    generator: torch.Generator, device: str, outputs: int, inputs: int, group: int, kind: str, zero: bool, gated: bool
) -> PackedWeight:
    codes, scale = quantised(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5, group, kind)
    zeros = torch.randint(6, 11, scale.shape, generator=generator).to(device, scale.dtype) if zero else None
    if kind == "e2m1":
        scale = byte_scales(scale, group)
    return pack(codes.to(device), scale.to(device), zeros, kind=kind, gated=gated)


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, inputs: int, outputs: int, group: int, kind: str, zero: bool, bias: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(tokens, inputs, generator=generator).to(device, dtype)
    added = torch.randn(outputs, generator=generator).to(device, dtype) if bias else None
    return (x, _weight(generator, device, outputs, inputs, group, kind, zero, False), added), {}


def _normed_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, inputs: int, outputs: int, group: int, residual: bool, gate: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows = outputs if gate is None else 2 * outputs
    weight = _weight(generator, device, rows, inputs, group, "uint4", False, gate is not None)
    stream = random(tokens, inputs) if residual else None
    return (random(tokens, inputs), stream, random(inputs), 1e-5, weight), {"gate": gate}


packed_linear = Op(
    "packed_linear", packed_linear_reference, kernels=[Implementation("triton", packed_linear_gpu, _supports)],
    cases=PACKED_LINEAR_CASES, cost=packed_linear_cost, inputs=_inputs,
    # Sums of products with a standard deviation of 1; the 16-bit weight is rounded once.
    tolerance={"float32": Tolerance(1e-6, 1e-5), "bfloat16": Tolerance(2**-7, 2**-6), "float16": Tolerance(2**-10, 2**-9)},
)
normed_packed_linear = Op(
    "normed_packed_linear", normed_packed_linear_reference,
    kernels=[Implementation("triton", normed_packed_linear_gpu, _supports)], cases=NORMED_PACKED_LINEAR_CASES,
    cost=normed_packed_linear_cost, inputs=_normed_inputs,
    # The norm of a rounded sum, a product as above, and with a gate the product of two such.
    tolerance={"float32": Tolerance(4e-6, 2e-5), "bfloat16": Tolerance(2**-6, 2**-4), "float16": Tolerance(2**-9, 2**-7)},
)

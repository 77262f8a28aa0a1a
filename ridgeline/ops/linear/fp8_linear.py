"""The linear with 8-bit weights, alone and behind a norm: e4m3 or int8 codes with a float32 scale for each output, or e4m3 codes
with a scale for each block of 128 outputs and 128 inputs.

The definition multiplies by the expanded weight. The kernels also quantise x, to codes of the same kind: one row in the kernel
that multiplies it (fp8_one_row.py), more rows before. There and where the ring GEMM runs, up to PAIRED_ROWS rows get coarse and
fine codes, which keep what a bf16 number has; otherwise a row has one code per number and one scale, as is usual for fp8 and int8
checkpoints. One row of a small matrix stays as it is (ops/quantised/codes_gemv.py). ops/kernel_table.py chooses the kernel;
cuBLAS serves every other shape. With blocks it takes x with a scale for each 128 inputs, or the expanded weight and x as it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import Choice, choose
from ridgeline.ops.linear.fp8_one_row import OneRow, one_row_gemm
from ridgeline.ops.linear.fp8_rows import fp8_groups, fp8_rows, fp8_rows_reference, gated_fp8_rows, normed_fp8_rows
from ridgeline.ops.linear.gemm_ring import ring_gemm
from ridgeline.ops.linear.gemm_wide import wide_gemm
from ridgeline.ops.linear.integer_product import integer_gemm, integer_product
from ridgeline.ops.linear.select import OneRowPlan
from ridgeline.ops.packed.select_packed import PackedGemvPlan
from ridgeline.ops.quantised.codes_gemv import codes_gemv, codes_gemv_for
from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.quantised.quantised_kernels import expand_triton
from ridgeline.ops.registry import Implementation, Op, Site, Tolerance, kernels_are_used
from ridgeline.ops.rms_norm import rms_norm, rms_norm_reference
from ridgeline.sizes.fp8_costs import FP8_LINEAR_CASES, NORMED_FP8_LINEAR_CASES, fp8_linear_cost, normed_fp8_linear_cost

PAIRED_ROWS = 4                      # a tile of 8 rows has room for two rows of codes for each
BLOCK = 128                          # outputs and inputs with one scale


class Fp8Rows(NamedTuple):
    """Rows that are quantised already, by the kernel that made them."""

    codes: Tensor
    scale: Tensor
    paired: bool
    dtype: torch.dtype               # of what comes of them


# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _described(weight: Tensor, scale: Tensor) -> QuantisedWeight:
    grid = "int8" if weight.dtype == torch.int8 else "e4m3"
    if scale.dim() == 1:
        return QuantisedWeight(grid, weight.shape[1], weight, scale, (1, 0))
    return QuantisedWeight(grid, weight.shape[1], weight, scale, (1 if len(scale) == len(weight) else BLOCK, BLOCK))


def expanded(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [outputs, inputs], scales [outputs] or of blocks -> the weight as numbers"""
    return expand(_described(weight, scale), dtype)


def fp8_linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs], 8-bit weight [outputs, inputs], float32 scale [outputs] or of blocks -> x (scale weight)^T + bias"""
    return F.linear(x, expanded(weight, scale, x.dtype), bias)


def normed_fp8_linear_reference(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None = None,
    *, norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(the linear of rms_norm(x + residual), x + residual)"""
    normed, stream = rms_norm_reference(
        x, norm, eps, residual=torch.zeros_like(x) if residual is None else residual, weight_offset=norm_offset
    )
    return fp8_linear_reference(normed, weight, scale, bias), stream


# ── GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _format(weight: Tensor, scale: Tensor) -> str:
    if scale.dim() == 1:
        return "int8-row" if weight.dtype == torch.int8 else "fp8-row"
    return "fp8-block" if len(scale) < len(weight) else "fp8-block-cut"


def _choice(rows: int, weight: Tensor, scale: Tensor, gated: bool = False) -> Choice:
    outputs, inputs = weight.shape
    return choose(
        _format(weight, scale), rows, outputs // 2 if gated else outputs, inputs, gated, device_facts(weight.device)
    )


@cache
def _has_units(device: torch.device, codes: torch.dtype) -> bool:
    """Tensor cores for products of such codes."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= ((8, 0) if codes == torch.int8 else (8, 9))


def multiplies(weight: Tensor) -> bool:
    """Whether 8-bit kernels can multiply by this weight. cuBLAS, TMA and 16-byte loads need multiples of 16."""
    outputs, inputs = weight.shape
    aligned = outputs % 16 == 0 and inputs % 16 == 0 and weight.data_ptr() % 16 == 0 and weight.is_contiguous()
    return aligned and _has_units(weight.device, weight.dtype)


def _suits(x: Tensor, weight: Tensor) -> bool:
    return len(x) > 0 and x.stride(1) == 1 and multiplies(weight)


def _has_kernels(x: Tensor, weight: Tensor) -> bool:
    """For what ops do not choose by themselves: quantised rows, and linears with a gate."""
    return _supports(Site(x.device.type, x.dtype, x.shape[1])) and kernels_are_used() and _suits(x, weight)


def _takes_codes(rows: int, weight: Tensor, scale: Tensor) -> bool:
    """cuBLAS has no product with scales for blocks of the weight and one for each row of x; one row of a small matrix stays as it
    is."""
    return _choice(rows, weight, scale).kernel not in ("expand", "scaled_mm_blocks", "codes_gemv")


def _pairs(x: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Whether this many rows keep coarse and fine codes."""
    return len(x) <= PAIRED_ROWS and _choice(2 * len(x), weight, scale).kernel == "ring_gemm"


def _one_row_plan(x: Tensor, weight: Tensor, scale: Tensor, *, gated: bool = False, known: bool = False) -> OneRowPlan | None:
    """Of the kernel that quantises a single row itself. `known`: so is the row's largest magnitude."""
    if len(x) != 1:
        return None
    outputs, inputs = weight.shape
    pairs = outputs // 2 if gated else outputs
    found = choose(_format(weight, scale), 1, pairs, inputs, gated, device_facts(weight.device))
    return found.plan if found.kernel == "one_row_gemm" and (known or found.plan.whole) else None


def _codes_plan(x: Tensor, weight: QuantisedWeight, *, gated: bool = False) -> PackedGemvPlan | None:
    """Of the kernel that multiplies a single row as it is: where no other keeps the memory busy."""
    if _choice(len(x), weight.weight, weight.scale, gated).kernel != "codes_gemv":
        return None
    return codes_gemv_for(x, weight, gated)


def multiplied(rows: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The GEMM of quantised rows."""
    (kernel, plan, _), scales = _choice(len(rows.codes), weight, scale), (rows.scale, scale)
    if kernel == "ring_gemm":
        return ring_gemm(rows.codes, weight, bias, plan, scales=scales, paired=rows.paired, dtype=rows.dtype)
    if kernel == "wide_gemm":
        return wide_gemm(rows.codes, weight, bias, plan, scales=scales, dtype=rows.dtype)
    if kernel == "integer_gemm":
        return integer_gemm(rows.codes, weight, *scales, bias, rows.dtype)
    if kernel == "int_mm":
        return integer_product(rows.codes, weight, *scales, bias, rows.dtype)
    # Without fast accumulation: with it, a sum of 14,336 equal terms is 10 % too small.
    return torch._scaled_mm(
        rows.codes, weight.t(), rows.scale[:, None], scale[None, :], bias=bias, out_dtype=rows.dtype, use_fast_accum=False
    )


def gated_rows(x: Tensor, gate: str, weight: Tensor, scale: Tensor) -> Fp8Rows | None:
    """The gated activation of x [T, 2 I] as quantised rows for that weight; None: this device has no kernel for them."""
    if not _has_kernels(x, weight):
        return None
    if not _takes_codes(len(x), weight, scale):
        return None
    paired = _pairs(x, weight, scale)
    return Fp8Rows(*gated_fp8_rows(x, gate, paired, weight.dtype), paired, x.dtype)


def gated_one_row(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None,
    gate: str, following: tuple[Tensor, Tensor], *, norm_offset: float = 0.0,
) -> tuple[OneRow, Tensor] | None:
    """(the gated activation of a single normed row, x + residual), for the weight and scale that follow; None: no kernel."""
    if not _has_kernels(x, weight):
        return None
    plan = _one_row_plan(x, weight, scale, gated=True)
    if plan is None or not multiplies(following[0]) or _one_row_plan(x, *following, known=True) is None:
        return None
    out, stream, peaks = one_row_gemm(
        x, weight, scale, bias, plan, norm=norm, eps=eps, norm_offset=norm_offset, residual=residual, gate=gate
    )
    return OneRow(out, peaks), stream


def gated_linear(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None,
    gate: str, *, norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor] | None:
    """(the gated activation of the linear of normed rows, x + residual) where one GEMM has both; None: no such kernel."""
    if not _has_kernels(x, weight):
        return None
    described = _described(weight, scale)
    plan = _codes_plan(x, described, gated=True)
    if plan is not None:
        return codes_gemv(
            x, described, bias, plan, norm=norm, eps=eps, norm_offset=norm_offset, residual=residual, gate=gate
        )
    kernel, plan, _ = _choice(len(x), weight, scale, gated=True)
    if kernel != "gated_wide_gemm":
        return None
    codes, x_scale, stream = normed_fp8_rows(x, residual, norm, eps, norm_offset=norm_offset, codes=weight.dtype)
    return wide_gemm(codes, weight, bias, plan, gate=gate, scales=(x_scale, scale), dtype=x.dtype), stream


def multiplied_row(row: OneRow, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of what `gated_one_row` made."""
    plan = _one_row_plan(row.x, weight, scale, known=True)
    assert plan is not None
    return one_row_gemm(row, weight, scale, bias, plan)[0]


def fp8_linear_gpu(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _suits(x, weight):
        return fp8_linear_reference(x, weight, scale, bias)
    plan = _one_row_plan(x, weight, scale)
    if plan is not None:
        return one_row_gemm(x, weight, scale, bias, plan)[0]
    described = _described(weight, scale)
    codes_plan = _codes_plan(x, described)
    if codes_plan is not None:
        return codes_gemv(x, described, bias, codes_plan)[0]
    if not _takes_codes(len(x), weight, scale):
        return _blocks_product(x, weight, scale, bias)
    paired = _pairs(x, weight, scale)
    return multiplied(Fp8Rows(*fp8_rows(x, paired, weight.dtype), paired, x.dtype), weight, scale, bias)


def _blocks_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    if _choice(len(x), weight, scale).kernel != "scaled_mm_blocks" or x.dtype != torch.bfloat16:
        return F.linear(x, expand_triton(_described(weight, scale), x.dtype), bias)
    codes, x_scale = fp8_groups(x)
    out = torch._scaled_mm(codes, weight.t(), x_scale, scale.t(), out_dtype=x.dtype)[: len(x)]
    return out if bias is None else out + bias


def normed_fp8_linear_gpu(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None = None,
    *, norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if not _suits(x, weight):
        return normed_fp8_linear_reference(x, residual, norm, eps, weight, scale, bias, norm_offset=norm_offset)
    plan = _one_row_plan(x, weight, scale)
    described = _described(weight, scale)
    codes_plan = _codes_plan(x, described) if plan is None else None
    if plan is not None:
        out, stream, _ = one_row_gemm(
            x, weight, scale, bias, plan, norm=norm, eps=eps, norm_offset=norm_offset, residual=residual
        )
    elif codes_plan is not None:
        out, stream = codes_gemv(
            x, described, bias, codes_plan, norm=norm, eps=eps, norm_offset=norm_offset, residual=residual
        )
    elif _takes_codes(len(x), weight, scale):
        paired = _pairs(x, weight, scale)
        codes, x_scale, stream = normed_fp8_rows(
            x, residual, norm, eps, norm_offset=norm_offset, paired=paired, codes=weight.dtype
        )
        out = multiplied(Fp8Rows(codes, x_scale, paired, x.dtype), weight, scale, bias)
    else:
        if residual is None:
            normed, stream = rms_norm(x, norm, eps, weight_offset=norm_offset), x
        else:
            normed, stream = rms_norm(x, norm, eps, residual=residual, weight_offset=norm_offset)
        out = fp8_linear_gpu(normed, weight, scale, bias)
    return out, stream


def _supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in (torch.bfloat16, torch.float16)


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _weight(generator: torch.Generator, device: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    codes, scale = fp8_rows_reference(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
    return codes.to(device), scale.to(device)


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, inputs: int, outputs: int, bias: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(tokens, inputs, generator=generator).to(device, dtype)
    added = torch.randn(outputs, generator=generator).to(device, dtype) if bias else None
    return (x, *_weight(generator, device, outputs, inputs), added), {}


def _normed_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, inputs: int, outputs: int, residual: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    stream = random(tokens, inputs) if residual else None
    return (random(tokens, inputs), stream, random(inputs), 1e-5, *_weight(generator, device, outputs, inputs)), {}


# Kernels that quantise x to e4m3 err by its rounding: a sum of inputs with errors of 2^-4 at most, uniform, has a standard
# deviation of 0.027 of the sum's own. Sums have a deviation of 1 here; the bound is six deviations of the error.
_TOLERANCE = {"float32": Tolerance(1e-6, 1e-5), "bfloat16": Tolerance(2**-7, 0.17), "float16": Tolerance(2**-7, 0.17)}

fp8_linear = Op(
    "fp8_linear", fp8_linear_reference, kernels=[Implementation("triton", fp8_linear_gpu, _supports)], cases=FP8_LINEAR_CASES,
    cost=fp8_linear_cost, inputs=_inputs, tolerance=_TOLERANCE,
)
normed_fp8_linear = Op(
    "normed_fp8_linear", normed_fp8_linear_reference, kernels=[Implementation("triton", normed_fp8_linear_gpu, _supports)],
    cases=NORMED_FP8_LINEAR_CASES, cost=normed_fp8_linear_cost, inputs=_normed_inputs,
    tolerance=_TOLERANCE,
)

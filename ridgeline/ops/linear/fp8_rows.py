"""Rows of activations as 8-bit codes: quantised alone, with the norm before them, or with the gated activation before them.

A row has one float32 scale, its largest magnitude / 448 for e4m3 codes and / 127 for int8 codes, so that the largest number
becomes the largest code. Quantising is part of the kernel that makes the row, because a pass of its own would read and write the
row once more.

`paired` gives every row two rows of codes: coarse ones, and fine ones for what rounding left, with a scale 16 times (int8: 254
times) smaller. Together they have the eight bits of a bf16 number. A GEMM of few rows has room for both in one tile, and reads no
more weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.launch import dependent_launch, power_of_two
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.registry import (
    TRITON_DTYPES,
    TRITON_INTERPRETED,
    Implementation,
    Op,
    Site,
    Tolerance,
    tl,
    triton_kernel,
)
from ridgeline.ops.rms_norm import rms_norm_reference
from ridgeline.sizes.fp8_costs import (
    GATED_FP8_CASES,
    NORMED_FP8_CASES,
    ROW_FP8_CASES,
    gated_fp8_cost,
    normed_fp8_cost,
    row_fp8_cost,
)

CODES = torch.float8_e4m3fn
LARGEST = 448.0
# By the codes: the largest one, and how much finer the fine codes are. e4m3 rounds by a sixteenth at most, int8 by half a code.
MOST = {torch.float8_e4m3fn: LARGEST, torch.int8: 127.0}
FINER = {torch.float8_e4m3fn: 16.0, torch.int8: 254.0}
SMALLEST_SCALE = 2.0**-100           # of a row of zeros: any scale is right, but 0 is not

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fp8_rows_reference(x: Tensor, paired: bool = False, codes: torch.dtype = CODES) -> tuple[Tensor, Tensor]:
    """x [T, width] -> (e4m3 or int8 codes [T, width], float32 scales [T]); codes * scales is x up to rounding.

    Paired: [2 T, width] and [2 T], the coarse and the fine codes of a row one after the other; their sum is x.
    """
    largest, finer = MOST[codes], FINER[codes]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(dim=-1) / largest).clamp_min(SMALLEST_SCALE).float()
    shares = (wide / scale[:, None]).clamp(-largest, largest)
    coarse = _coded(shares, codes)
    if not paired:
        return coarse, scale
    fine = _coded((shares - coarse.to(shares.dtype)) * finer, codes)
    both = torch.stack((coarse.view(torch.uint8), fine.view(torch.uint8)), 1).flatten(0, 1).view(codes)
    return both, torch.stack((scale, scale / finer), 1).flatten()


def _coded(shares: Tensor, codes: torch.dtype) -> Tensor:
    return ((shares + 0.5).floor() if codes == torch.int8 else shares).to(codes)


def normed_fp8_rows_reference(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, *, norm_offset: float = 0.0, paired: bool = False,
    codes: torch.dtype = CODES,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes and scales of rms_norm(x + residual), x + residual). The norm is not rounded before it is quantised."""
    stream = x if residual is None else x + residual
    wide = stream.to(torch.promote_types(x.dtype, torch.float32))
    normed = rms_norm_reference(wide, norm, eps, weight_offset=norm_offset)
    assert isinstance(normed, Tensor)
    return (*fp8_rows_reference(normed, paired, codes), stream)


def gated_fp8_rows_reference(
    x: Tensor, gate: str, paired: bool = False, codes: torch.dtype = CODES
) -> tuple[Tensor, Tensor]:
    """x [T, 2 I] -> codes and scales of act(x[:, :I]) * x[:, I:]"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return fp8_rows_reference(gated_activation_reference(wide, gate), paired, codes)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _store_row(  # type: ignore[no-untyped-def]
    values, code_ptr, scale_ptr, row, column, WIDTH: tl.constexpr, PAIRED: tl.constexpr, AS_FLOATS: tl.constexpr
):
    INTEGERS: tl.constexpr = code_ptr.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = 127.0 if INTEGERS else 448.0
    FINER: tl.constexpr = 254.0 if INTEGERS else 16.0
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / LARGEST, 7.888609052210118e-31)
    shares = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
    if PAIRED:
        row = 2 * row
    inside = column < WIDTH
    if INTEGERS:
        whole = tl.floor(shares + 0.5)
        tl.store(code_ptr + row * WIDTH + column, whole.to(tl.int8), mask=inside)
        if PAIRED:
            fine = tl.floor((shares - whole) * FINER + 0.5)
            tl.store(code_ptr + (row + 1) * WIDTH + column, fine.to(tl.int8), mask=inside)
    elif AS_FLOATS:
        tl.store(code_ptr + row * WIDTH + column, shares, mask=inside)
    else:
        codes = shares.to(tl.float8e4nv)
        tl.store(code_ptr + row * WIDTH + column, codes, mask=inside)
        if PAIRED:
            fine = (shares - codes.to(tl.float32)) * FINER
            tl.store(code_ptr + (row + 1) * WIDTH + column, fine.to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale)
    if PAIRED:
        tl.store(scale_ptr + row + 1, scale / FINER)


@triton_kernel()
def _fp8_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr, AS_FLOATS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    _store_row(x, code_ptr, scale_ptr, row, column, WIDTH, PAIRED, AS_FLOATS)


@triton_kernel(do_not_specialize=["rows"])
def _fp8_groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, stride, rows, GROUPS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (row, BLOCK groups of 128): a scale for each group. Scales of one group lie side by side."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (group < GROUPS)[:, None]
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) / 448.0, 7.888609052210118e-31)
    shares = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    tl.store(code_ptr + row * (GROUPS * 128) + place, shares.to(code_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + group.to(tl.int64) * rows + row, scale, mask=group < GROUPS)


@triton_kernel()
def _normed_fp8_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, new_residual_ptr, x_stride, residual_stride, eps, norm_offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PAIRED: tl.constexpr, AS_FLOATS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row per program; codes and new_residual are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32) + norm_offset
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # Rounded first: the norm is that of the residual which later layers will read.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + row * WIDTH + column, x, mask=inside)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
    _store_row(x, code_ptr, scale_ptr, row, column, WIDTH, PAIRED, AS_FLOATS)


@triton_kernel()
def _gated_fp8_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, PAIRED: tl.constexpr, AS_FLOATS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    _store_row(activated(gate, GATE) * up, code_ptr, scale_ptr, row, column, WIDTH, PAIRED, AS_FLOATS)


def _room(x: Tensor, width: int, paired: bool, kind: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Codes, scales, and what all three launches have in common."""
    rows = 2 * len(x) if paired else len(x)
    # The interpreter has no e4m3: it writes what would be rounded to coarse codes, and torch rounds.
    as_floats = TRITON_INTERPRETED and kind == CODES
    codes = torch.empty((rows, width), dtype=torch.float32 if as_floats else kind, device=x.device)
    block = power_of_two(width)
    shared = {
        "WIDTH": width, "BLOCK": block, "PAIRED": paired, "AS_FLOATS": as_floats,
        "num_warps": min(max(block // 512, 1), 16), **dependent_launch(x.device),
    }
    return codes, torch.empty(rows, dtype=torch.float32, device=x.device), shared


def _rounded(codes: Tensor, paired: bool) -> Tensor:
    """What the interpreter left to torch."""
    if not TRITON_INTERPRETED or codes.dtype == torch.int8:
        return codes
    if paired:
        codes[1::2] = (codes[::2] - codes[::2].to(CODES).float()) * FINER[CODES]
    return codes.to(CODES)


def fp8_rows_triton(x: Tensor, paired: bool = False, codes: torch.dtype = CODES) -> tuple[Tensor, Tensor]:
    made, scale, shared = _room(x, x.shape[1], paired, codes)
    if len(x):
        _fp8_rows_kernel[len(x),](x, made, scale, x.stride(0), **shared)
    return _rounded(made, paired), scale


def fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, inputs] -> e4m3 codes and scales [T, inputs / 128] as cuBLAS wants them: T a multiple of 4, and the scales of one
    group side by side. Rows that fill it up are not written: what they give is cut off."""
    rows, groups = len(x), x.shape[1] // 128
    padded = -(-rows // 4) * 4
    codes = torch.empty((padded, x.shape[1]), dtype=torch.float32 if TRITON_INTERPRETED else CODES, device=x.device)
    scale = torch.empty((groups, padded), dtype=torch.float32, device=x.device)
    _fp8_groups_kernel[rows, -(-groups // 16)](
        x, codes, scale, x.stride(0), padded, GROUPS=groups, BLOCK=16, num_warps=4, **dependent_launch(x.device)
    )
    return codes.to(CODES), scale.t()


def normed_fp8_rows_triton(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, *, norm_offset: float = 0.0, paired: bool = False,
    codes: torch.dtype = CODES,
) -> tuple[Tensor, Tensor, Tensor]:
    made, scale, shared = _room(x, x.shape[1], paired, codes)
    stream = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    added = x if residual is None else residual
    if len(x):
        _normed_fp8_rows_kernel[len(x),](
            x, added, norm, made, scale, stream, x.stride(0), added.stride(0), eps, norm_offset,
            HAS_RESIDUAL=residual is not None, **shared,
        )
    return _rounded(made, paired), scale, stream


def gated_fp8_rows_triton(
    x: Tensor, gate: str, paired: bool = False, codes: torch.dtype = CODES
) -> tuple[Tensor, Tensor]:
    made, scale, shared = _room(x, x.shape[1] // 2, paired, codes)
    if len(x):
        _gated_fp8_rows_kernel[len(x),](x, made, scale, x.stride(0), GATE=GATES[gate], **shared)
    return _rounded(made, paired), scale


def _supports(site: Site) -> bool:
    # One program holds a whole row in registers.
    return site.device == "cuda" and site.dtype in TRITON_DTYPES and site.width <= 32768


def _supports_halves(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES and site.width <= 2 * 32768


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, width: int, paired: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(tokens, width, generator=generator).mul_(3).to(device, dtype), paired), {}


def _normed_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, width: int, residual: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    stream = random(tokens, width) if residual else None
    return (random(tokens, width), stream, random(width), 1e-5), {"norm_offset": 1.0 if residual else 0.0}


def _gated_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, intermediate: int, kind: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(tokens, 2 * intermediate, generator=generator).mul_(2).to(device, dtype), kind), {}


# A code may land on its neighbour where float32 and float64 round to different sides: e4m3 has three bits behind the point, and
# 2^-9 is its smallest step. Scales and the stream are held to the same bound; tests/models/test_fp8.py checks loading exactly.
_TOLERANCE = {dtype: Tolerance(2**-3, 2**-9) for dtype in ("float32", "bfloat16", "float16")}

fp8_rows = Op(
    "fp8_rows", fp8_rows_reference, kernels=[Implementation("triton", fp8_rows_triton, _supports)], cases=ROW_FP8_CASES,
    cost=row_fp8_cost, inputs=_inputs, tolerance=_TOLERANCE,
)
normed_fp8_rows = Op(
    "normed_fp8_rows", normed_fp8_rows_reference, kernels=[Implementation("triton", normed_fp8_rows_triton, _supports)],
    cases=NORMED_FP8_CASES, cost=normed_fp8_cost, inputs=_normed_inputs, tolerance=_TOLERANCE,
)
gated_fp8_rows = Op(
    "gated_fp8_rows", gated_fp8_rows_reference, kernels=[Implementation("triton", gated_fp8_rows_triton, _supports_halves)],
    cases=GATED_FP8_CASES, cost=gated_fp8_cost, inputs=_gated_inputs, tolerance=_TOLERANCE,
)

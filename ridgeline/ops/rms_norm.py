"""RMS norm over the last dimension, with the residual addition that stands before it in every layer.

Knows nothing of models: Gemma's "1 + weight" is the argument `weight_offset`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.sizes.op_costs import RMS_NORM_CASES, rms_norm_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """x / rms(x) * (weight + weight_offset), in float32 at least. x [..., D], weight [D].

    With a residual, x + residual is normalised instead, and returned beside the result as the new residual.
    """
    if residual is not None:
        x = x + residual
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(dtype)
    if weight_offset:
        weight = weight + weight_offset
    # torch's composite beats every spelling in single ops up to 32 rows, where a call's cost is its number of ops.
    out = torch.rms_norm(x.to(dtype), weight.shape, weight, eps).to(x.dtype)
    return out if residual is None else (out, x)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel(do_not_specialize=["rows"])
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    rows, x_stride, residual_stride, eps, weight_offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BLOCK_ROWS rows per CTA; out and new_residual are contiguous."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32) + weight_offset
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # Rounded to the tensor's dtype first: the norm is that of the residual which later layers will read.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + row * WIDTH + column, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + column, (x * scale[:, None] * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is None:
        added, new_residual = rows, out                  # never touched
    else:
        added = residual.reshape(-1, width)
        if added.stride(-1) != 1:
            added = added.contiguous()
        new_residual = torch.empty_like(out)
    if rows.shape[0]:
        block = power_of_two(width)
        block_rows = max(1, 512 // block)                # a warp takes 16 bytes a thread; narrow rows share one
        _rms_norm_kernel[(cdiv(rows.shape[0], block_rows),)](
            rows, added, weight, out, new_residual, rows.shape[0], rows.stride(0), added.stride(0), eps, weight_offset,
            WIDTH=width, BLOCK=block, BLOCK_ROWS=block_rows, HAS_RESIDUAL=residual is not None,
            num_warps=min(max(block // 512, 1), 16), **dependent_launch(x.device),
        )
    return out if residual is None else (out, new_residual)


def _triton_supports(site: Site) -> bool:
    # One CTA holds a whole row in registers.
    return site.device == "cuda" and site.dtype in TRITON_DTYPES and site.width <= 16384


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def rms_norm_native(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    width, dims = x.shape[-1], x.dim()
    if dims > 3 or x.stride(-1) != 1 or not (residual is None or residual.is_contiguous()):
        return rms_norm_reference(x, weight, eps, residual=residual, weight_offset=weight_offset)
    out = torch.empty(x.shape, dtype=x.dtype)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype)
    tokens, heads = (x.shape[0] if dims > 1 else 1), (x.shape[1] if dims == 3 else 1)
    native.library().rms_norm(
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
        None if total is None else total.data_ptr(), tokens, heads, width, x.stride(0), x.stride(1) if dims == 3 else 0,
        eps, weight_offset,
    )
    return out if total is None else (out, total)


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, width: int, residual: bool,
    weight_offset: float = 0.0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    kwargs: dict[str, Any] = {"residual": random(tokens, width)} if residual else {}
    if weight_offset:
        kwargs["weight_offset"] = weight_offset
    return (random(tokens, width), random(width), 1e-5), kwargs


rms_norm = Op(
    "rms_norm",
    rms_norm_reference,
    kernels=[
        Implementation("triton", rms_norm_triton, _triton_supports),
        Implementation("native", rms_norm_native, native.supports),
    ],
    cases=RMS_NORM_CASES,
    cost=rms_norm_cost,
    inputs=_inputs,
    # Narrow dtypes round the sum and the result, and the rms of rounded sums is off as much: three times half a unit.
    # float32: the same, and the sum of the squares.
    tolerance={
        "float32": Tolerance(2e-6, 1e-7),
        "bfloat16": Tolerance(3 * 2**-8, 1e-7),
        "float16": Tolerance(3 * 2**-11, 1e-7),
    },
)

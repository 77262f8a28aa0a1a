"""The gated activation of the MLP: act(gate) * up, both halves of one fused linear's output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.sizes.op_costs import GATED_ACTIVATION_CASES, gated_activation_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def gated_activation_reference(x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """x [..., 2 I] -> act(x[..., :I]) * x[..., I:]; kind is "silu", "gelu_tanh", "gelu" or "relu2". `out` [T, I]: where to write
    it; the gates in x may be that place."""
    if out is not None:
        return out.copy_(gated_activation_reference(x, kind))
    gate, up = x.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate).mul_(up)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if kind == "gelu":
        return F.gelu(gate).mul_(up)
    if kind == "relu2":
        return F.relu(gate).square_().mul_(up)
    raise ValueError(f"gated activation {kind!r} is unknown; silu, gelu_tanh, gelu and relu2 are there")


def plain_activation(x: Tensor, kind: str) -> Tensor:
    """The activation of an MLP without a gate: torch's own kernels, in place where they can be."""
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x).square_()
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.gelu(x) if kind == "gelu" else F.silu(x)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BLOCK = 1024                         # columns per CTA
KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton_kernel()
def _gated_activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, stride, out_stride, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One CTA: a block of columns of one token."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate * tl.sigmoid(gate)
    elif KIND == 1:                                      # 1 + tanh(z) is 2 sigmoid(2 z)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out_ptr + row * out_stride + column, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation_triton(x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    if kind not in KINDS:
        return gated_activation_reference(x, kind, out)  # relu2, or one that is not there
    width = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out_stride = width if out is None else out.stride(0)
    if out is None:
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    tokens = rows.shape[0]
    if tokens:
        block = min(BLOCK, power_of_two(width))
        _gated_activation_kernel[(cdiv(width, block) * tokens,)](
            rows, out, rows.stride(0), out_stride, WIDTH=width, KIND=KINDS[kind], BLOCK=block,
            num_warps=4, **dependent_launch(x.device),
        )
    return out


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────

def gated_activation_native(x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    if kind not in KINDS or x.dim() != 2 or x.stride(1) != 1 or out is not None:
        return gated_activation_reference(x, kind, out)
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype)
    native.library().gated_activation(x.data_ptr(), out.data_ptr(), tokens, width, x.stride(0), KINDS[kind])
    return out


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, intermediate: int, kind: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(tokens, 2 * intermediate, generator=generator).mul_(2).to(device, dtype), kind), {}


gated_activation = Op(
    "gated_activation",
    gated_activation_reference,
    kernels=[
        Implementation("triton", gated_activation_triton, _triton_supports),
        Implementation("native", gated_activation_native, native.supports),
    ],
    cases=GATED_ACTIVATION_CASES,
    cost=gated_activation_cost,
    inputs=_inputs,
    # The activation and the product are rounded once each. In float32 1 + tanh(g) and 1 + erf(g) cancel for a
    # negative gate: that error is 2^-24 of |gate * up|, which stays below 64.
    tolerance={
        "float32": Tolerance(1e-6, 4e-6),
        "bfloat16": Tolerance(2**-7, 2**-17),
        "float16": Tolerance(2**-10, 2**-17),
    },
)

"""The gated activation of the MLP: act(gate) * up, both halves of one fused linear's output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.costs import GATED_ACTIVATION_CASES, gated_activation_cost
from ridgeline.ops import native
from ridgeline.ops.registry import Implementation, Op, Tolerance

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def gated_activation_reference(x: Tensor, kind: str) -> Tensor:
    """x [..., 2 I] -> act(x[..., :I]) * x[..., I:]; kind is "silu", "gelu_tanh" or "gelu"."""
    gate, up = x.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate).mul_(up)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if kind == "gelu":
        return F.gelu(gate).mul_(up)
    raise ValueError(f"gated activation {kind!r} is unknown; silu, gelu_tanh and gelu are there")


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_KINDS = {"silu": 0, "gelu_tanh": 1}


def gated_activation_native(x: Tensor, kind: str) -> Tensor:
    if kind not in _KINDS or x.dim() != 2 or x.stride(1) != 1:
        return gated_activation_reference(x, kind)
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype)
    native.library().ridgeline_gated_activation(x.data_ptr(), out.data_ptr(), tokens, width, x.stride(0), _KINDS[kind])
    return out


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, intermediate: int, kind: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(tokens, 2 * intermediate, generator=generator).mul_(2).to(device, dtype), kind), {}


gated_activation = Op(
    "gated_activation",
    gated_activation_reference,
    kernels=[Implementation("native", gated_activation_native, native.supports)],
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

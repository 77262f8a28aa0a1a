"""The ops at the vocabulary's two ends: rows of the embedding, and the soft cap of logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.registry import Implementation, Op, Tolerance
from ridgeline.sizes.op_costs import EMBEDDING_CASES, SOFT_CAP_CASES, embedding_cost, soft_cap_cost

# ── definitions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def embedding_reference(weight: Tensor, tokens: Tensor, scale: float | None = None) -> Tensor:
    """Rows of weight [V, D] by tokens int64 [T], times the scale -> [T, D]"""
    x = F.embedding(tokens, weight)
    return x if scale is None else x * scale


def soft_cap_reference(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in place."""
    return logits.div_(cap).tanh_().mul_(cap)


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def embedding_native(weight: Tensor, tokens: Tensor, scale: float | None = None) -> Tensor:
    out = torch.empty((len(tokens), weight.shape[1]), dtype=weight.dtype)
    native.library().embedding(
        tokens.data_ptr(), weight.data_ptr(), out.data_ptr(), *out.shape, 1.0 if scale is None else scale
    )
    return out


def soft_cap_native(logits: Tensor, cap: float) -> Tensor:
    if not logits.is_contiguous():
        return soft_cap_reference(logits, cap)
    native.library().soft_cap(logits.data_ptr(), *logits.shape, cap)
    return logits


# ── declarations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _embedding_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, tokens: int, vocab: int, width: int, scale: float | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = torch.randn((vocab, width), generator=generator).to(device, dtype)
    return (weight, torch.randint(vocab, (tokens,), generator=generator).to(device), scale), {}


def _soft_cap_inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, rows: int, vocab: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn((rows, vocab), generator=generator).mul_(40).to(device, dtype), 30.0), {}


embedding = Op(
    "embedding",
    embedding_reference,
    kernels=[Implementation("native", embedding_native, native.supports)],
    cases=EMBEDDING_CASES,
    cost=embedding_cost,
    inputs=_embedding_inputs,
    tolerance={"float32": Tolerance(2**-24, 0), "bfloat16": Tolerance(2**-8, 0), "float16": Tolerance(2**-11, 0)},
)

soft_cap = Op(
    "soft_cap",
    soft_cap_reference,
    kernels=[Implementation("native", soft_cap_native, native.supports)],
    cases=SOFT_CAP_CASES,
    cost=soft_cap_cost,
    inputs=_soft_cap_inputs,
    # A tangent below 1 that is known to a few units, times the cap. Narrow dtypes round three times.
    tolerance={
        "float32": Tolerance(2**-21, 2**-21),
        "bfloat16": Tolerance(3 * 2**-8, 2**-7),
        "float16": Tolerance(3 * 2**-11, 2**-10),
    },
)

"""Rotary position embedding of queries and keys, the two halves of a head being the two coordinates (NeoX style).

How the table of cosines and sines is scaled (llama3, yarn, linear) is the caller's business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.registry import Op, Tolerance
from ridgeline.sizes.op_costs import ROTARY_CASES, rotary_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rotary_reference(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, KH, D], positions [T], cos_sin [max_position, 2, rotary_dim / 2] -> rotated q, k.

    Beyond rotary_dim a head stays as it is. Computed in the wider dtype of the heads and the table.
    """
    half = cos_sin.shape[-1]
    cos, sin = cos_sin.index_select(0, positions).split(1, dim=1)        # [T, 1, half] each
    # Queries and keys as one tensor: the count of torch calls is what this costs in decode.
    heads = torch.cat((q, k), dim=1)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    parts = [(first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)]
    if 2 * half < heads.shape[-1]:
        parts.append(heads[..., 2 * half :])
    rotated_q, rotated_k = torch.cat(parts, dim=-1).to(q.dtype).split((q.shape[1], k.shape[1]), dim=1)
    return rotated_q, rotated_k


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    max_position = tokens + 5
    angles = torch.rand(max_position, rotary_dim // 2, generator=generator) * 100
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(device, torch.promote_types(dtype, torch.float32))
    positions = torch.randint(max_position, (tokens,), generator=generator).to(device)
    return (random(tokens, heads, head_dim), random(tokens, kv_heads, head_dim), positions, table), {}


rotary = Op(
    "rotary",
    rotary_reference,
    cases=ROTARY_CASES,
    cost=rotary_cost,
    inputs=_inputs,
    # Two products and a sum of values below 5 in float32, then half a unit of the tensor's dtype.
    tolerance={
        "float32": Tolerance(2**-22, 2**-20),
        "bfloat16": Tolerance(2**-8, 2**-20),
        "float16": Tolerance(2**-11, 2**-20),
    },
)

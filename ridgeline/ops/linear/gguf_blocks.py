"""The linear with weights packed as a GGUF file stores them: blocks of 32 with their scales (CPU).

The weights are exactly the stored ones and the arithmetic is float32; only bytes are saved. A decode step on a CPU is bound by
reading weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.registry import Implementation, Op, Tolerance
from ridgeline.sizes.op_costs import BLOCK_LINEAR_CASES, block_linear_cost

BLOCK = 32
KINDS = {"Q4_1": 0, "Q8_0": 1}       # numbered as in native.c
BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def block_linear_reference(x: Tensor, blocks: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs], blocks uint8 [outputs, inputs / 32 * block bytes] -> x w^T + bias, [T, outputs]"""
    return F.linear(x, expanded(blocks, kind).to(x.dtype), bias)


def expanded(blocks: Tensor, kind: str) -> Tensor:
    """float32 [outputs, inputs]. Q4_1: scale, least, then the low halves of 16 bytes and their high halves."""
    parts = blocks.view(blocks.shape[0], -1, BLOCK_BYTES[kind])
    scale = parts[..., :2].contiguous().view(torch.float16).float()
    if kind == "Q8_0":
        return (parts[..., 2:].contiguous().view(torch.int8).float() * scale).flatten(1)
    least = parts[..., 2:4].contiguous().view(torch.float16).float()
    halves = torch.cat((parts[..., 4:] & 15, parts[..., 4:] >> 4), dim=-1)
    return (halves.float() * scale + least).flatten(1)


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def block_linear_native(x: Tensor, blocks: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    (tokens, inputs), outputs = x.shape, blocks.shape[0]
    out = torch.empty((tokens, outputs), dtype=x.dtype)
    native.library().block_linear(
        x.data_ptr(), blocks.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), tokens, inputs,
        outputs, KINDS[kind],
    )
    return out


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, inputs: int, outputs: int, kind: str, bias: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = (outputs, inputs // BLOCK, BLOCK_BYTES[kind])
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    scales = 1 if kind == "Q8_0" else 2
    size = inputs**-0.5 / (64 if kind == "Q8_0" else 8)
    blocks[..., : 2 * scales] = (random(*shape[:2], scales) * size).half().view(torch.uint8)
    x = random(tokens, inputs).to(device, dtype)
    return (x, blocks.flatten(1).to(device), kind, random(outputs).to(device, dtype) if bias else None), {}


block_linear = Op(
    "block_linear",
    block_linear_reference,
    kernels=[Implementation("native", block_linear_native, native.supports)],
    cases=BLOCK_LINEAR_CASES,
    cost=block_linear_cost,
    inputs=_inputs,
    # A sum of up to 1,536 products of size 1: its rounding grows with the root of the length.
    tolerance={"float32": Tolerance(1e-6, 1e-5)},
)

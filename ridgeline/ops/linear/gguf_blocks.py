"""The linear with weights that stay packed on a CPU: GGUF's blocks, codes with scales for groups, 16-bit numbers.

A decode step on a CPU is bound by reading weights, so they are multiplied as they are stored (ops/cpu/matrix.py). Activations are
float32, or integers: of every 16 the largest becomes 127, and products are sums of integers. With float32 activations the result
is that of the stored numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.cpu.matrix import BLOCKS, INTEGERS, NUMBERS, Matrix, Part
from ridgeline.ops.registry import Implementation, Op, Tolerance
from ridgeline.sizes.op_costs import BLOCK_BYTES, BLOCK_LINEAR_CASES, block_linear_cost

GROUP = 16                           # activations that share a scale; as SHARE in tiles.h

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def block_linear_reference(x: Tensor, matrix: Matrix, bias: Tensor | None = None, integers: bool = False) -> Tensor:
    """x [T, inputs] -> x w^T + bias, [T, outputs]; `integers`: x is rounded to 8 bits where the codes of w are integers"""
    rounded_x = rounded(x) if integers else x
    weights = matrix.numbers().to(x.dtype).split([part.rows for part in matrix.parts])
    parts = [
        F.linear(rounded_x if part.kind in INTEGERS else x, weight)
        for part, weight in zip(matrix.parts, weights, strict=True)
    ]
    out = torch.cat(parts, dim=1)
    return out if bias is None else out + bias


def rounded(x: Tensor) -> Tensor:
    """x as the 8-bit codes of each 16 say it. The codes are those of float32 numbers, whatever x's dtype. A scale's last two
    bits are 0: kernels need its product with a small number to be exact."""
    inputs = x.shape[-1]
    blocks = F.pad(x.float(), (0, -inputs % GROUP)).unflatten(-1, (-1, GROUP))
    scale = ((blocks.abs().amax(-1, keepdim=True) / 127).view(torch.int32) & ~3).view(torch.float32)
    codes = (blocks.double() * torch.where(scale > 0, 1 / scale, 0)).round()     # of the exact product
    return (codes.to(x.dtype) * scale.to(x.dtype)).flatten(-2)[..., :inputs]


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def block_linear_native(x: Tensor, matrix: Matrix, bias: Tensor | None = None, integers: bool = False) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens = x.shape[0]
    out = torch.empty((tokens, matrix.outputs), dtype=torch.float32)
    native.library().packed_linear(
        matrix.address, len(matrix.parts), x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), tokens,
        matrix.inputs, matrix.outputs, x.stride(0), integers,
    )
    return out


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


_SPREAD = {"INT4": 10, "INT8": 74, "E4M3": 150, "E2M1": 3, "NF4": 0.6}      # of random codes


def random_part(generator: torch.Generator, kind: str, outputs: int, inputs: int, group: int = 32) -> Part:
    """Weights of a size that keeps sums near 1."""
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size = inputs**-0.5
    part = Part(kind, outputs, inputs, group // 32)
    if kind in NUMBERS.values():
        dtype = next(dtype for dtype, name in NUMBERS.items() if name == kind)
        part.put_numbers((random(outputs, inputs) * size).to(dtype))
    elif kind in BLOCKS:
        part.put_blocks(random_blocks(generator, kind, outputs, inputs))
    else:
        values = 256 if kind in ("INT8", "E4M3") else 16
        codes = torch.randint(values, (outputs, inputs), generator=generator, dtype=torch.uint8)
        if kind == "E4M3":
            codes = torch.where(codes & 127 == 127, 0, codes)            # its NaN
        groups = -(-inputs // group)
        scale = (torch.rand(outputs, groups, generator=generator) + 0.5) * size / _SPREAD[kind]
        part.put_codes(codes, scale, random(outputs, groups) * size / 2 if kind == "INT4" else None)
    return part


def random_blocks(generator: torch.Generator, kind: str, outputs: int, inputs: int) -> Tensor:
    """uint8 [outputs, bytes], as a GGUF file stores them"""
    each, size = (256 if kind.endswith("_K") else 32), inputs**-0.5
    blocks = torch.randint(256, (outputs, inputs // each, BLOCK_BYTES[kind]), generator=generator, dtype=torch.uint8)
    for place, scale in _scale_places(kind).items():
        numbers = torch.randn(outputs, inputs // each, 1, generator=generator) * size * scale
        blocks[..., place : place + 2] = numbers.half().view(torch.uint8)
    return blocks.flatten(1)


def _scale_places(kind: str) -> dict[int, float]:
    """Where a block has float16 numbers, and how large random codes want them."""
    if kind == "Q6_K":
        return {208: 1 / 1400}
    first = {"Q8_0": 1 / 74, "Q4_K": 1 / 320, "Q5_K": 1 / 640}.get(kind, 1 / 20 if kind.startswith("Q5") else 1 / 10)
    return {0: first, 2: 1 / 74 if kind.endswith("_K") else 0.5} if kind.endswith(("_1", "_K")) else {0: first}


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, inputs: int, outputs: int, kind: str, bias: bool, integers: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    matrix = Matrix([random_part(generator, kind, outputs, inputs)])
    x = torch.randn(tokens, inputs, generator=generator).to(device, dtype)
    added = torch.randn(outputs, generator=generator).to(device, dtype) if bias else None
    return (x, matrix, added, integers), {}


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

"""Codes of quantised weights in bytes: packing, unpacking, and the numbers that codes stand for.

The layout is the same for every checkpoint: codes of neighbouring inputs share a byte, the first input in its lowest bits. A
code of 5 or 6 bits has its four low bits in one plane and the rest in another. Nothing here knows scales.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# e2m1 by code: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# NF4 (QLoRA): means of sixteen equally likely parts of a normal distribution, scaled to [-1, 1], with an exact 0.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
TABLES = {"e2m1": E2M1, "nf4": NF4}
BITS = {"uint4": 4, "e2m1": 4, "nf4": 4, "ternary": 2, "q5": 5, "q6": 6}


def packed_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n] below 2^bits (bits 1, 2 or 4) -> uint8 [..., n * bits / 8], the first code in the lowest bits"""
    each = 8 // bits
    parts = codes.unflatten(-1, (-1, each))
    packed = parts[..., 0].clone()
    for place in range(1, each):
        packed |= parts[..., place] << (bits * place)
    return packed


def unpacked_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `packed_bits`."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)


def packed_codes(grid: str, codes: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes [outputs, inputs] as (the bytes of `weight`, those of `high`)."""
    bits = BITS.get(grid, 8)
    if bits == 8:
        return codes.contiguous(), None
    if bits in (5, 6):
        return packed_bits(codes & 15, 4), packed_bits(codes >> 4, bits - 4)
    return packed_bits(codes, bits), None


def unpacked_codes(grid: str, weight: Tensor, high: Tensor | None) -> Tensor:
    """uint8 codes [outputs, inputs]; of e4m3 and int8 the stored tensor itself."""
    bits = BITS.get(grid, 8)
    if bits == 8:
        return weight
    if high is not None:
        return unpacked_bits(weight, 4) | (unpacked_bits(high, bits - 4) << 4)
    return unpacked_bits(weight, bits)


@cache
def table(grid: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(TABLES[grid], dtype=torch.float32, device=device).to(dtype)


def code_numbers(grid: str, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes stand for before scales and zero points."""
    if grid in TABLES:
        return table(grid, codes.device, dtype)[codes.int()]
    return codes.to(dtype)


def e8m0_numbers(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of MX formats: powers of two, stored as exponent + 127. Made from bits, because a power may round."""
    bits = exponents.to(torch.int32)
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32).to(dtype)

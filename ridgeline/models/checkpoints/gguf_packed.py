"""GGUF's packed types as canonical formats: the same codes and scales in another order, so that a GPU can keep them packed.

Types that are not here (Q2_K, Q3_K, IQ4_NL, IQ4_XS) are expanded when they are read. `gguf_types.py` defines what the
numbers are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.models.checkpoints.recipe import Recipe
from ridgeline.models.gguf_types import TENSOR_TYPE_BY_NAME
from ridgeline.ops.quantised.codes import packed_codes, unpacked_bits
from ridgeline.quant.format import HIGH, OFFSET, OFFSET_OUTER, OUTER, SCALE, WEIGHT

Canonical = dict[str, Tensor]


def packed_gguf(recipe: Recipe, data: Tensor) -> Canonical:
    """bytes [outputs, row bytes] -> canonical tensors"""
    type = recipe.variant
    blocks = data.view(len(data), -1, TENSOR_TYPE_BY_NAME[type].block_bytes)
    fields = _fields(type, blocks)
    codes = _CODES[type](fields)
    weight, high = packed_codes(recipe.format.grid, codes.flatten(1))
    found = {WEIGHT: weight} | ({} if high is None else {HIGH: high})
    if type in ("Q4_K", "Q5_K"):
        scales, offsets = _six_bits(fields["scales"])
        return found | {
            SCALE: scales.flatten(1), OFFSET: offsets.flatten(1), OUTER: _half(fields["scale"]),
            OFFSET_OUTER: -_half(fields["offset"]),      # these types subtract it
        }
    if type == "Q6_K":
        return found | {SCALE: fields["scales"].contiguous().view(torch.int8).flatten(1), OUTER: _half(fields["scale"])}
    if type == "MXFP4":
        return found | {SCALE: fields["scale"].flatten(1)}
    found[SCALE] = _half(fields["scale"])
    if "offset" in fields:
        found[OFFSET] = _half(fields["offset"])
    return found


def _fields(type: str, blocks: Tensor) -> dict[str, Tensor]:
    """Bytes of each field of the type's record, [outputs, blocks, bytes]"""
    layout = TENSOR_TYPE_BY_NAME[type].layout
    assert layout.fields is not None
    return {name: blocks[..., entry[1] : entry[1] + entry[0].itemsize] for name, entry in layout.fields.items()}


def _half(field: Tensor) -> Tensor:
    return field.contiguous().view(torch.float16).flatten(1)


def _halves(field: Tensor, each: int) -> Tensor:
    """Of every `each` bytes, first the low halves and then the high ones."""
    parts = field.unflatten(-1, (-1, each))
    return torch.cat((parts & 15, parts >> 4), dim=-1).flatten(-2)


def _layers(field: Tensor, bits: int) -> Tensor:
    """Of every 32 bytes, first the lowest `bits` bits of each, then the next."""
    parts = field.unflatten(-1, (-1, 32))
    mask = (1 << bits) - 1
    return torch.cat([(parts >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)


def _fifth(fields: dict[str, Tensor]) -> Tensor:
    return _halves(fields["quants"], 16) | (unpacked_bits(fields["fifth_bits"], 1) << 4)


def _six_bits(field: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight offsets of six bits in 12 bytes."""
    first, second, third = field[..., :4], field[..., 4:8], field[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales, offsets


def _trits(field: Tensor, count: int) -> Tensor:
    """Digits of base 3, the first the most significant: a byte is its number of five digits times 256 / 243, rounded up."""
    powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.int32, device=field.device)
    return ((((field.int()[..., None, :] * powers[:, None]) & 255) * 3) >> 8).to(torch.uint8).flatten(-2)


def _tq1(fields: dict[str, Tensor]) -> Tensor:
    quants = fields["quants"]                            # 32 bytes of 160 digits, 16 bytes of 80, and 4 bytes of 16
    return torch.cat((_trits(quants[..., :32], 5), _trits(quants[..., 32:48], 5), _trits(fields["last"], 4)), dim=-1)


_CODES = {
    "Q4_0": lambda fields: _halves(fields["quants"], 16),
    "Q4_1": lambda fields: _halves(fields["quants"], 16),
    "Q5_0": _fifth,
    "Q5_1": _fifth,
    "Q8_0": lambda fields: fields["quants"].contiguous().view(torch.int8),
    "Q4_K": lambda fields: _halves(fields["quants"], 32),
    "Q5_K": lambda fields: _halves(fields["quants"], 32) | (_layers(fields["fifth_bits"], 1) << 4),
    "Q6_K": lambda fields: _halves(fields["quants"], 64) | (_layers(fields["high_pairs"], 2) << 4),
    "MXFP4": lambda fields: _halves(fields["quants"], 16),
    "TQ1_0": _tq1,
    "TQ2_0": lambda fields: _layers(fields["quants"], 2),
}

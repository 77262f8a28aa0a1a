"""GGUF's weights of 4 to 6 bits in the packed layout (packed_weight.py): the same codes and scales in another order.

Number: code * scale + offset, or (code - middle) * scale. Of K types scales and offsets are bytes, and two float16 numbers
multiply those of 256 inputs; the layout keeps these as they are, so nothing is rounded before a kernel multiplies.

    codes   the four low bits, as in packed_weight.py
    high    int32 [strips, inputs / 128, 32, 4]: two more bits of q5 and q6 codes (q5 leaves one unused). A lane's word has those
            of two of its words of codes: two bytes each, of even and of odd inputs
    scale   `byte`: int32 [strips, inputs / 512, 4, 32], a word for 32 inputs of outputs r and r + 8, with 128 added to each byte:
            scale, scale, offset, offset in groups of 32; in groups of 16 the scales of the first and of the last 16 inputs
            `pair`: as in packed_weight.py
    zero    offsets where the words of scales do not have them, in the form of scales
    blocks  int32 [strips, inputs / 512, 32], float16 of outputs r and r + 8: lanes t of four have the multiplier of scales and
            that of offsets (else of scales again) for the first 256 inputs, then for the last
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.packed.byte_weight import stored_bytes
from ridgeline.ops.packed.packed_asm import HIGH_PLACES
from ridgeline.ops.packed.packed_sizes import BITS_ABOVE, BLOCK, BYTES, RUN, STRIP, TILE
from ridgeline.ops.packed.packed_weight import (
    STRIPS_AT_ONCE,
    PackedWeight,
    _from_pairs,
    _from_words,
    _padded,
    _pairs,
    _words,
    expanded,
    strip_order,
)
from ridgeline.ops.quantised.codes import packed_bits, unpacked_bits
from ridgeline.ops.quantised.expand import QuantisedWeight, expand


def block_form(weight: QuantisedWeight) -> str | None:
    """How scales are stored: `byte` or `pair`, with `+offset`; None: not one of these formats."""
    scale, offset, outer = weight.scale, weight.offset, weight.outer
    if weight.grid not in BITS_ABOVE or weight.e8m0 or weight.zero is not None or weight.inputs % 32:
        return None
    added = "" if offset is None else "+offset"
    if outer is None:
        alike = offset is None or offset.dtype == scale.dtype
        known = weight.block == (1, 32) and scale.dtype in (torch.float16, torch.bfloat16) and alike
        return "pair" + added if known and (weight.grid != "uint4" or offset is not None) else None
    whole = weight.outer_block == (1, BLOCK) and outer.dtype == torch.float16 and weight.inputs % BLOCK == 0
    known = scale.dtype in (torch.int8, torch.uint8) and (offset is None) == (weight.offset_outer is None)
    group = weight.block == (1, 16) or (weight.block == (1, 32) and offset is not None)
    return "byte" + added if whole and known and group else None


def pack_blocks(weight: QuantisedWeight, gated: bool = False) -> PackedWeight:
    """Of a weight that has a form. The bytes of unsigned scales are below 128: six bits."""
    form = block_form(weight)
    assert form is not None and weight.order is None
    outputs, inputs, device = len(weight.weight), weight.inputs, weight.weight.device
    order = strip_order(outputs, gated).to(device)
    strips, tiles = len(order) // STRIP, -(-inputs // RUN) * RUN // TILE
    codes = torch.empty((strips, tiles, 32, 4), dtype=torch.int32, device=device)
    high = torch.empty((strips, tiles // 2, 32, 4), dtype=torch.int32, device=device) if weight.high is not None else None
    for first in range(0, strips, STRIPS_AT_ONCE):
        here = order[first * STRIP : (first + STRIPS_AT_ONCE) * STRIP]
        codes[first : first + STRIPS_AT_ONCE] = _words(_padded(weight.weight, here, tiles * TILE // 2), "uint4")
        if high is not None:
            each = BITS_ABOVE[weight.grid]
            high[first : first + STRIPS_AT_ONCE] = _high_words(_padded(weight.high, here, tiles * TILE * each // 8), each)
    group, blocks, zero = weight.block[1], None, None
    if form.startswith("pair"):
        runs = tiles * TILE // group
        scale = _pairs(_padded(weight.scale, order, runs), group)
        zero = None if weight.offset is None else _pairs(_padded(weight.offset, order, runs), group)
    else:
        offset, outer, offset_outer = weight.offset, weight.outer, weight.offset_outer
        assert outer is not None
        quads = [weight.scale] if offset is None or group == 16 else [weight.scale, offset]
        scale = _quads(quads, order, tiles)
        zero = _quads([offset], order, tiles) if offset is not None and group == 16 else None
        blocks = _block_words(outer, outer if offset_outer is None else offset_outer, order, tiles)
    dtype = weight.scale.dtype if blocks is None else torch.float16
    return PackedWeight(
        weight.grid, group, outputs, inputs, gated, codes, scale, zero, True, dtype, None, high, blocks, form
    )


def stored_blocks(weight: PackedWeight) -> QuantisedWeight:
    """The inverse of `pack_blocks`; bytes are signed."""
    order = strip_order(weight.outputs, weight.gated).to(weight.device)
    place = torch.empty(len(order), dtype=torch.int64, device=weight.device)
    place[order] = torch.arange(len(order), device=weight.device)
    rows, groups = place[: weight.outputs], weight.inputs // weight.group
    codes = _from_words(weight.codes, "uint4")[rows, : weight.inputs // 2]
    high = None
    if weight.high is not None:
        high = packed_bits(_from_high(weight.high)[rows, : weight.inputs], BITS_ABOVE[weight.kind])
    found: dict[str, Tensor | None] = {}
    if weight.blocks is None:
        scale = _from_pairs(weight.scale, weight.scale_dtype)[rows, :groups]
        if weight.zero is not None:
            found["offset"] = _from_pairs(weight.zero, weight.scale_dtype)[rows, :groups]
    else:
        two = _from_quads(weight.scale)[rows, : weight.inputs // 32]
        multipliers = _from_pairs(weight.blocks[:, :, None], torch.float16).view(len(order), -1, 2)
        multipliers = multipliers[rows, : weight.inputs // BLOCK]
        scale = two[..., 0] if weight.group == 32 else two.flatten(1)
        if weight.form == "byte+offset":
            own = None if weight.zero is None else _from_quads(weight.zero)[rows, : weight.inputs // 32].flatten(1)
            found["offset"] = two[..., 1] if own is None else own
            found["offset_outer"] = multipliers[..., 1]
        found["outer"] = multipliers[..., 0]
    return QuantisedWeight(
        weight.kind, weight.inputs, codes, scale, (1, weight.group), high,
        outer_block=(1, 0) if weight.blocks is None else (1, BLOCK), **found,  # type: ignore[arg-type]
    )


def packed_numbers(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Any packed weight as numbers, [outputs, inputs]."""
    if not weight.form:
        return expanded(weight, dtype)
    return expand(stored_bytes(weight) if weight.form == BYTES else stored_blocks(weight), dtype)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _high_words(high: Tensor, bits: int) -> Tensor:
    """bytes [16 strips, columns] -> words [strips, inputs / 128, 32, 4]"""
    values = unpacked_bits(high, bits)
    strips, tiles = len(values) // STRIP, values.shape[1] // TILE
    # strip, upper half of the outputs, r, tile, word, upper half of 16 inputs, t, odd input
    parts = values.view(strips, 2, 8, tiles, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 7, 5, 1).reshape(strips, tiles, 32, 4, 2, 4)
    found = torch.zeros(parts.shape[:-1], dtype=torch.uint8, device=high.device)
    for number, at in enumerate(HIGH_PLACES):
        found |= parts[..., number] << at
    pairs = found.view(strips, tiles // 2, 2, 32, 8).transpose(2, 3).contiguous()
    return pairs.view(torch.int32).view(strips, tiles // 2, 32, 4)


def _from_high(words: Tensor) -> Tensor:
    """Two bits of every code, [16 strips, inputs]"""
    strips, pairs = words.shape[:2]
    found = words.contiguous().view(torch.uint8).view(strips, pairs, 32, 2, 4, 2).transpose(2, 3)
    found = found.reshape(strips, 2 * pairs, 8, 4, 4, 2)
    parts = torch.stack([found >> at & 3 for at in HIGH_PLACES], -1).view(strips, 2 * pairs, 8, 4, 4, 2, 2, 2)
    # strip, tile, r, t, word, odd input, upper half of 16 inputs, upper half of the outputs
    return parts.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(strips * STRIP, 2 * pairs * TILE)


def _quads(values: list[Tensor], order: Tensor, tiles: int) -> Tensor:
    """Bytes of 16 inputs, or scales and offsets of 32 -> words [strips, inputs / 512, 4, 32]"""
    columns, strips = tiles * 2, len(order) // STRIP
    if len(values) == 2:
        signed = torch.stack([each.view(torch.int8) for each in values], -1).flatten(1)
    else:
        signed = values[0].view(torch.int8)
    biased = (_padded(signed, order, 2 * columns).to(torch.int16) + 128).to(torch.uint8)
    parts = biased.view(strips, 2, 8, -1, 4, 4, 2).permute(0, 3, 5, 2, 4, 6, 1).flatten(-2)
    return parts.contiguous().view(torch.int32).view(strips, -1, 4, 32)


def _from_quads(words: Tensor) -> Tensor:
    """Signed bytes [16 strips, inputs / 32, 2]"""
    strips, runs = words.shape[:2]
    parts = words.contiguous().view(torch.uint8).view(strips, runs, 4, 8, 4, 2, 2).permute(0, 6, 3, 1, 4, 2, 5)
    return (parts.reshape(strips * STRIP, -1, 2).to(torch.int16) - 128).to(torch.int8)


def _block_words(first: Tensor, second: Tensor, order: Tensor, tiles: int) -> Tensor:
    both = torch.stack((first, second), -1).flatten(1)
    return _pairs(_padded(both, order, tiles // 2), 128)[:, :, 0].contiguous()

"""8-bit codes with 16-bit scales in the packed layout (packed_weight.py): Q8_0, and int8 whose rows of x stay in 16 bits.

Number: code * scale. Where each output has one scale, that is `outer`, as float32 number, and all others are 1.

    codes   int32 [strips, inputs / 64, 32, 4]: of output r, a word for every 16 inputs. Lane 4 r + t has the inputs 2 t, 2 t + 1,
            2 t + 8 and 2 t + 9, one byte each, with 128 added
    high    the same of output r + 8; with a gate these are the partners
    scale   as in packed_weight.py

Two planes, because both then lie as the codes of four bits do: a lane loads 16 bytes and has half of its operands of four
instructions. A code of 128 is padding; what is beyond a row's last group has scales of zero, too.
"""

from __future__ import annotations

import torch

from ridgeline.ops.packed.packed_sizes import BYTES, GROUPS, RUN, STRIP, TILE, packs, packs_rows
from ridgeline.ops.packed.packed_weight import (
    STRIPS_AT_ONCE,
    PackedWeight,
    _from_pairs,
    _padded,
    _pairs,
    scale_dtype,
    strip_order,
)
from ridgeline.ops.quantised.expand import QuantisedWeight


def holds_bytes(weight: QuantisedWeight, gated: bool = False) -> bool:
    """Whether the layout keeps every number of this weight."""
    others = (weight.zero, weight.offset, weight.outer)
    if weight.grid != "int8" or weight.e8m0 or weight.block[0] != 1 or any(each is not None for each in others):
        return False
    outputs, inputs, group, scale = len(weight.weight), weight.inputs, weight.block[1], weight.scale
    if not group:
        return packs_rows(outputs, inputs, gated)
    return packs(outputs, inputs, group, gated) and torch.equal(scale.to(scale_dtype(scale)).to(scale.dtype), scale)


def pack_bytes(weight: QuantisedWeight, gated: bool = False) -> PackedWeight:
    """Of a weight that the layout holds. Its order of inputs is the caller's matter."""
    outputs, inputs, device = len(weight.weight), weight.inputs, weight.weight.device
    group, scale, outer = weight.block[1], weight.scale, None
    if not group:
        outer, group = scale.float().clone(), GROUPS[-1]
        scale = torch.ones((outputs, -(-inputs // group)), dtype=torch.bfloat16, device=device)
    if group not in GROUPS:
        scale, group = scale.repeat_interleave(group // GROUPS[-1], 1), GROUPS[-1]
    order = strip_order(outputs, gated).to(device)
    strips, tiles = len(order) // STRIP, -(-inputs // RUN) * RUN // TILE
    low, high = (torch.empty((strips, tiles, 32, 4), dtype=torch.int32, device=device) for _ in range(2))
    for first in range(0, strips, STRIPS_AT_ONCE):
        here = slice(first, first + STRIPS_AT_ONCE)
        padded = _padded(weight.weight, order[first * STRIP : (first + STRIPS_AT_ONCE) * STRIP], tiles * TILE)
        # strip, upper half of the outputs, r, tile, word, upper half of 16 inputs, t, odd input
        parts = (padded.view(torch.uint8) ^ 128).view(-1, 2, 8, tiles, 4, 2, 4, 2).permute(1, 0, 3, 2, 6, 4, 5, 7)
        low[here], high[here] = (parts[half].flatten(-2).contiguous().view(torch.int32).view(-1, tiles, 32, 4) for half in (0, 1))
    dtype = scale_dtype(scale)
    pairs = _pairs(_padded(scale.to(dtype), order, tiles * TILE // group), group)
    return PackedWeight("int8", group, outputs, inputs, gated, low, pairs, None, True, dtype, outer, high, form=BYTES)


def stored_bytes(weight: PackedWeight) -> QuantisedWeight:
    """The inverse of `pack_bytes`: a scale for each group, and the factor of each output as the outer one."""
    order = strip_order(weight.outputs, weight.gated).to(weight.device)
    place = torch.empty(len(order), dtype=torch.int64, device=weight.device)
    place[order] = torch.arange(len(order), device=weight.device)
    assert weight.high is not None
    strips, tiles = weight.codes.shape[:2]
    both = torch.stack((weight.codes, weight.high)).view(torch.uint8).view(2, strips, tiles, 8, 4, 4, 2, 2)
    codes = both.permute(1, 0, 3, 2, 5, 6, 4, 7).reshape(strips * STRIP, tiles * TILE)
    codes = (codes[place[: weight.outputs], : weight.inputs] ^ 128).view(torch.int8)
    scale = _from_pairs(weight.scale, weight.scale_dtype)[place[: weight.outputs], : -(-weight.inputs // weight.group)]
    return QuantisedWeight("int8", weight.inputs, codes, scale, (1, weight.group), outer=weight.outer)

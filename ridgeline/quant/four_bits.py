"""4-bit weights as kernels for them take them: codes, one number as scale and one as zero for each group, whatever is stored.

A scheme's `finish` hands this to the packing of such kernels (ops/packed). Scales that are bytes (E8M0, e4m3) stay as they are.
Scales of two levels are multiplied out, exactly in float32; an offset becomes the code that means 0, which is rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.quantised.codes import e8m0_numbers
from ridgeline.ops.quantised.expand import QuantisedWeight, spread

GRIDS = ("uint4", "e2m1")


class FourBits(NamedTuple):
    kind: str                        # of GRIDS
    codes: Tensor                    # uint8 [outputs, inputs / 2], the even input in the low half
    scale: Tensor                    # [outputs, groups]; uint8: exponents of E8M0
    zero: Tensor | None              # [outputs, groups], the code that means 0; None: 8 for uint4, nothing for e2m1
    outer: Tensor | None             # float32 [outputs], a second factor
    order: Tensor | None             # the input of every column


def four_bits(weight: QuantisedWeight) -> FourBits | None:
    """None: not a format of 4-bit codes with scales for each output."""
    if weight.grid not in GRIDS or weight.block[0] != 1:
        return None
    scale, outer = weight.scale, weight.outer
    if scale.dim() == 1:
        scale = scale[:, None]
    offset = weight.offset
    if offset is not None or (outer is not None and weight.outer_block[1]):      # numbers that others multiply or divide
        scale = e8m0_numbers(scale, torch.float32) if weight.e8m0 else scale.float()
    if outer is not None and weight.outer_block[1]:
        scale, offset = _product(weight, scale, outer), _product(weight, offset, weight.offset_outer)
        outer = None
    zero, codes = weight.zero, weight.weight
    if offset is not None:
        codes, scale, zero = _zeros(weight, scale.float(), offset.float().view(scale.shape))
    if zero is not None and zero.dim() == 1:
        zero = zero[:, None]
    return FourBits(weight.grid, codes, scale, zero, outer, weight.order)


def _zeros(weight: QuantisedWeight, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, zero) of numbers code * scale + offset. A group without a scale is its offset: code 0, and -1 means 0."""
    flat = scale == 0
    if not bool(flat.any()):
        return weight.weight, scale, -offset / scale
    there = spread(flat, (1, weight.inputs // scale.shape[1] // 2), tuple(weight.weight.shape))
    codes = torch.where(there, 0, weight.weight)
    return codes, torch.where(flat, offset, scale), torch.where(flat, -1.0, -offset / torch.where(flat, 1.0, scale))


def _product(weight: QuantisedWeight, inner: Tensor | None, outer: Tensor | None) -> Tensor | None:
    """Scales of groups times those of their blocks, in float32."""
    if inner is None or outer is None:
        return inner
    each = weight.outer_block[1] // weight.block[1]
    return inner.float() * spread(outer.float(), (1, each), tuple(inner.shape))

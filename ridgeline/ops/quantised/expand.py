"""A quantised weight as numbers: the definition of every weight format.

    number = (code - zero) * scale            zero: stored, or the grid's own middle
    number = code * scale + offset

Scale and offset may have outer scales. Blocks of inputs count from the first input, or with `order` from the first of the
sorted inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.quantised.codes import code_numbers, e8m0_numbers, unpacked_codes

MIDDLE = {"uint4": 8.0, "q5": 16.0, "q6": 32.0, "ternary": 1.0}          # the code that means 0, where none is stored


class QuantisedWeight(NamedTuple):
    """The canonical tensors of one linear. `block` and `outer_block`: (outputs, inputs) that share a scale; 0 inputs: rows."""

    grid: str
    inputs: int
    weight: Tensor
    scale: Tensor
    block: tuple[int, int]
    high: Tensor | None = None
    zero: Tensor | None = None
    offset: Tensor | None = None
    outer: Tensor | None = None
    offset_outer: Tensor | None = None
    outer_block: tuple[int, int] = (1, 0)
    e8m0: bool = False               # scales are exponents
    order: Tensor | None = None      # input number of every column


def expand(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] in this dtype, computed in float32 or wider and rounded once"""
    wide = torch.promote_types(dtype, torch.float32)
    codes = unpacked_codes(weight.grid, weight.weight, weight.high)
    shape = (codes.shape[0], weight.inputs)
    numbers = code_numbers(weight.grid, codes, wide)
    scale = _scales(weight, weight.scale, weight.outer, wide, shape)
    if weight.offset is not None:
        numbers = numbers * scale + _scales(weight, weight.offset, weight.offset_outer, wide, shape)
    else:
        if weight.zero is not None:
            numbers = numbers - spread(weight.zero.to(wide), weight.block, shape)
        elif weight.grid in MIDDLE:
            numbers = numbers - MIDDLE[weight.grid]
        numbers = numbers * scale
    if weight.order is not None:
        numbers = torch.empty_like(numbers).index_copy_(1, weight.order.long(), numbers)
    return numbers.to(dtype)


def _scales(
    weight: QuantisedWeight, values: Tensor, outer: Tensor | None, dtype: torch.dtype, shape: tuple[int, int]
) -> Tensor:
    scale = e8m0_numbers(values, dtype) if weight.e8m0 else values.to(dtype)
    scale = spread(scale, weight.block, shape)
    return scale if outer is None else scale * spread(outer.to(dtype), weight.outer_block, shape)


def spread(values: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Values of blocks, repeated so that they broadcast over [outputs, inputs]. The last block may be incomplete."""
    rows, columns = block
    if not columns:
        values = values[:, None]
    elif columns > 1:
        values = values.repeat_interleave(columns, dim=1)[:, : shape[1]]
    return values.repeat_interleave(rows, dim=0)[: shape[0]] if rows > 1 else values

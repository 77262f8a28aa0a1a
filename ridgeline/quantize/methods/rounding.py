"""A matrix to codes by rounding to nearest, as compressed-tensors defines scales and zero points.

Integers: the range of the codes is the range of the block's values, 0 included. Symmetric: the largest magnitude is half of that
range, so 4 bits divide it by 7.5, and the largest positive value is cut to 7. quant/quantise.py, which rounds while a model
loads, never cuts. The scale is rounded to the dtype in which it is stored before codes are computed with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.ops.linear.fp8_rows import CODES, LARGEST
from ridgeline.ops.quantised.codes import packed_codes
from ridgeline.ops.quantised.expand import expand, spread
from ridgeline.quant.format import OUTER, SCALE, WEIGHT, ZERO, WeightFormat
from ridgeline.quant.quantise import LARGEST_CODE, block_maxima, e2m1_codes, quantised
from ridgeline.quant.quantised import quantised_weight
from ridgeline.quantize.recipes import keeps_outliers, per_tensor

HALF_RANGE = {"int8": 127.5, "uint4": 7.5, "e4m3": LARGEST}
LEAST = {"int8": -128, "uint4": -8}
Rounded = dict[str, Tensor]          # the format's tensors by name


def rounded(values: Tensor, format: WeightFormat, largest: float | None = None) -> Rounded:
    """values [outputs, inputs] -> codes, scales and perhaps zero points. `largest`: magnitude of all linears that share NVFP4's
    second scale."""
    if format.grid == "e2m1" and format.scales is not None and format.scales.outer is not None:
        return _nvfp4(values.float(), format, largest)
    if format.grid == "e2m1":
        return quantised(values, format)
    wide = values.float()
    scale, zero = grid_of(wide, format)
    return with_grid(wide, format, scale, zero)


def _nvfp4(values: Tensor, format: WeightFormat, largest: float | None) -> Rounded:
    """The second scale makes the largest scale of a block the largest number of 8 bits."""
    assert format.scales is not None
    block, shape = format.scales.block, (values.shape[0], values.shape[1])
    top = float(values.abs().amax()) if largest is None else largest
    outer = _inverse(torch.tensor(LARGEST * LARGEST_CODE["e2m1"] / top if top else 1.0)).to(values.device)
    scale = (over(block_maxima(values.abs(), block), LARGEST_CODE["e2m1"]) / outer).clamp(max=LARGEST).to(CODES)
    any_scale = torch.tensor(0.125, dtype=CODES, device=scale.device)
    scale = torch.where(scale.float() == 0, any_scale, scale)            # a block of zeros: any scale gives them
    weight, _ = packed_codes("e2m1", e2m1_codes(values / spread(scale.float() * outer, block, shape)))
    return {WEIGHT: weight, SCALE: scale, OUTER: outer.expand(shape[0]).contiguous()}


def _inverse(number: Tensor) -> Tensor:
    """1 / number, moved until the inverse of the inverse is exact: files hold the one, kernels read the other."""
    while 1 / (1 / number) != number:
        number = torch.nextafter(number, torch.tensor(torch.inf))
    return 1 / number


def over(values: Tensor, number: float) -> Tensor:
    """values / number, the same on every device: on a GPU torch multiplies by 1 / number where that is a Python number."""
    return values / values.new_tensor(number)


def grid_of(values: Tensor, format: WeightFormat) -> tuple[Tensor, Tensor | None]:
    """(scales in the dtype in which they are stored, zero points as signed codes) of a block's values."""
    assert format.scales is not None
    stored = getattr(torch, format.scales.dtype)
    if format.scales.zero is None:
        zero, maxima = None, block_maxima(values.abs(), format.scales.block)
        wide = maxima * (1.0 / 127.0) if keeps_outliers(format) else over(maxima, HALF_RANGE[format.grid])
        if per_tensor(format):
            wide = wide.amax().expand_as(wide).contiguous()
    else:
        least = -block_maxima((-values).clamp_min(0), format.scales.block)
        wide = over(block_maxima(values.clamp_min(0), format.scales.block) - least, 2 * HALF_RANGE[format.grid])
    scale = wide.to(stored)
    # A block of zeros, or of numbers too small for the dtype: any scale gives zeros. One that is not subnormal, so that no
    # kernel flushes it.
    scale = torch.where(scale == 0, torch.tensor(torch.finfo(stored).eps, dtype=stored, device=scale.device), scale)
    if not bool(scale.isfinite().all()):
        raise ModelError(f"its values are too large for scales in {format.scales.dtype}")
    if format.scales.zero is not None:
        low = LEAST[format.grid]
        zero = (low - least / scale.float()).round().clamp(low, -1 - low)
    return scale, zero


def with_grid(values: Tensor, format: WeightFormat, scale: Tensor, zero: Tensor | None) -> Rounded:
    assert format.scales is not None
    block, shape = format.scales.block, (values.shape[0], values.shape[1])
    shares = values / spread(scale.float(), block, shape)
    if format.grid == "e4m3":
        return {WEIGHT: shares.clamp(-LARGEST, LARGEST).to(CODES), SCALE: scale}
    low = LEAST[format.grid]
    moved = shares.round() if zero is None else (shares + spread(zero, block, shape)).round()
    codes = moved.clamp(low, -1 - low)
    if format.grid == "int8":
        return {WEIGHT: codes.to(torch.int8), SCALE: scale}
    weight, _ = packed_codes("uint4", (codes - low).to(torch.uint8))
    found = {WEIGHT: weight, SCALE: scale}
    return found if zero is None else found | {ZERO: (zero - low).to(scale.dtype)}


def expanded(tensors: Rounded, format: WeightFormat, inputs: int) -> Tensor:
    """The numbers that the codes mean, in float32."""
    return expand(quantised_weight(format, inputs, tensors), torch.float32)


def as_rounded(values: Tensor, format: WeightFormat) -> Tensor:
    """expanded(rounded(values)), but for integers without packing codes: searches ask for it many times."""
    wide = values.float()
    outputs, inputs = wide.shape
    rows, group = (0, 0) if format.scales is None else format.scales.block
    if format.grid not in LEAST or rows != 1 or inputs % (group or inputs):
        return expanded(rounded(values, format), format, inputs)
    scale, zero = grid_of(wide, format)
    step, low = scale.float().view(outputs, -1, 1), LEAST[format.grid]
    shares = wide.view(outputs, -1, group or inputs) / step
    if zero is None:
        codes = shares.round_().clamp_(low, -1 - low)
    else:
        middle = zero.view(outputs, -1, 1)
        codes = shares.add_(middle).round_().clamp_(low, -1 - low).sub_(middle)
    return codes.mul_(step).view(outputs, inputs)

"""Numbers to codes by rounding to nearest: what `quantization=` makes of a 16-bit checkpoint while it loads.

Every scale is chosen so that the largest magnitude of its block becomes the largest code. The result is the canonical tensors of
format.py, by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.linear.fp8_rows import CODES, LARGEST, SMALLEST_SCALE, fp8_rows_reference
from ridgeline.ops.quantised.codes import E2M1, e8m0_numbers, packed_codes
from ridgeline.ops.quantised.expand import spread
from ridgeline.quant.format import SCALE, WEIGHT, WeightFormat

LARGEST_CODE = {"int8": 127.0, "uint4": 7.0, "e2m1": 6.0}


def quantised(values: Tensor, format: WeightFormat) -> dict[str, Tensor]:
    """values [outputs, inputs] -> the format's tensors, for formats of format.MADE"""
    assert format.scales is not None
    block = format.scales.block
    if format.grid == "e4m3" and block == (1, 0):
        codes, scale = fp8_rows_reference(values)
        return {WEIGHT: codes, SCALE: scale}
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    largest = block_maxima(wide.abs(), block)
    if format.grid == "e4m3":
        scale = (largest / LARGEST).clamp_min(SMALLEST_SCALE).float()
        codes = (wide / spread(scale, block, tuple(wide.shape))).clamp(-LARGEST, LARGEST).to(CODES)
        return {WEIGHT: codes, SCALE: scale}
    if format.grid == "e2m1":
        # The exponent of the largest, less that of the largest code (4 to 6): values up to 1.5 * 4 are not cut off.
        exponent = (torch.frexp(largest)[1] - 1 - 2 + 127).clamp(0, 254).to(torch.uint8)
        shares = wide / spread(e8m0_numbers(exponent, wide.dtype), block, tuple(wide.shape))
        weight, _ = packed_codes("e2m1", e2m1_codes(shares))
        return {WEIGHT: weight, SCALE: exponent}
    top = LARGEST_CODE[format.grid]
    stored = getattr(torch, format.scales.dtype)
    scale = (largest / top).clamp_min(torch.finfo(stored).tiny).to(stored)
    shares = wide / spread(scale.to(wide.dtype), block, tuple(wide.shape))
    if format.grid == "int8":
        return {WEIGHT: shares.round().clamp(-top, top).to(torch.int8), SCALE: scale}
    weight, _ = packed_codes("uint4", (shares.round() + 8).clamp(0, 15).to(torch.uint8))
    return {WEIGHT: weight, SCALE: scale}


def block_maxima(values: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest of each block; the last blocks may be incomplete."""
    rows, columns = block
    if not columns:
        return values.amax(dim=1)
    missing = (-values.shape[0] % rows, -values.shape[1] % columns)
    padded = torch.nn.functional.pad(values, (0, missing[1], 0, missing[0]))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))


def e2m1_codes(values: Tensor) -> Tensor:
    """The nearest of e2m1's numbers, ties to even codes, as IEEE rounds; larger ones become 6."""
    levels = torch.tensor(E2M1[:8], dtype=values.dtype, device=values.device)
    middles = (levels[1:] + levels[:-1]) / 2
    sizes = values.abs()
    # A number on the middle between codes c and c + 1 goes to the even one: up if c is odd.
    codes = torch.bucketize(sizes, middles)                              # middles below the number
    on_middle = (codes < 7) & (sizes == middles[codes.clamp_max(6)]) & (codes % 2 == 1)
    codes = codes + on_middle
    return (codes + 8 * (torch.signbit(values) & (codes > 0))).to(torch.uint8)

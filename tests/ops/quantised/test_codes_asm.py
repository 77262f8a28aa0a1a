"""The PTX of the GEMV for stored codes, run by a warp that is not there (ptx_warp.py), against the definition."""

from __future__ import annotations

import numpy as np
import ptx_warp
import pytest
import torch
from test_codes_gemv import random_weight

from ridgeline.ops.quantised.codes_asm import byte_products
from ridgeline.ops.quantised.expand import expand

LANE = np.arange(32)


def words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int32).numpy().astype(np.int64).astype(np.uint32)


@pytest.mark.parametrize("form", ["fp8-row", "fp8-block", "int8-row", "int8-group"])
def test_products_of_bytes(form: str) -> None:
    """16 outputs and 256 inputs, 64 at a time, as the kernel hands them over."""
    weight, scales = random_weight(form, 16, 256, "cpu"), "row" if form.endswith("row") else "block"
    codes, x = words(weight.weight), torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = words(x.view(4, 4, 16))                       # [tile, lane of four, word]
    scale = weight.scale.numpy()
    sums = [np.zeros(32, np.uint32)] * 4
    for tile in range(4):
        operands = {4 + number: each for number, each in enumerate(sums)}
        for output in (0, 1):
            row = LANE // 4 + 8 * output
            operands |= {8 + 4 * output + word: codes[row, tile * 16 + LANE % 4 * 4 + word] for word in range(4)}
            if scales == "block":
                operands[24 + 4 * output] = scale[row // weight.block[0], tile // 2].view(np.uint32)
        operands |= {16 + word: rows[tile, LANE % 4, word] for word in range(8)}
        found = ptx_warp.run(byte_products(weight.grid, "bf16", scales), operands)
        sums = [found[number] for number in range(4)]
    # The row of x is in all eight columns; lane 4 r has output r in its first register, and r + 8 in its third.
    results = np.concatenate([sums[number].view(np.float32)[::4] for number in (0, 2)])
    assert all((sums[number] == np.repeat(sums[number][::4], 4)).all() for number in range(4))
    if scales == "row":                                  # multiplied at the end, by the kernel
        weight = weight._replace(scale=torch.ones_like(weight.scale))
    wanted = (expand(weight, torch.float64) @ x.double()).numpy()
    assert np.abs(results - wanted).max() < 2e-6 * np.abs(wanted).max() + 1e-6

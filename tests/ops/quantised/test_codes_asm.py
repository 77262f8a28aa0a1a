"""The PTX of the GEMV for stored codes, run by a warp that is not there (ptx_warp.py), against the definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import ptx_warp
import pytest
import torch
from test_codes_gemv import random_weight

from ridgeline.ops.quantised.codes_asm import (
    HIGH_WORDS,
    NIBBLE_SCALES,
    NIBBLES,
    byte_products,
    collected,
    nibble_products,
)
from ridgeline.ops.quantised.codes_gemv import _pointers, _scales
from ridgeline.ops.quantised.expand import QuantisedWeight, expand

LANE = np.arange(32)
FORMATS = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q4_K and Q6_K")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.int64).astype(np.uint32)


def total(text: str, operands: dict[int, np.ndarray]) -> np.ndarray:
    """The 16 outputs that a warp has after these products, columns added."""
    found = ptx_warp.run(text, operands)
    found = ptx_warp.run(collected(), {4 + number: found[number] for number in range(4)})
    sums = [found[number].view(np.float32) for number in (0, 2)]
    assert all((each.reshape(8, 4) == each.reshape(8, 4)[:, :1]).all() for each in sums)     # in every column
    return np.concatenate([each[::4] for each in sums])


def x_words(x: torch.Tensor, order: list[int]) -> np.ndarray:
    """Inputs of a lane in this order, two in a word: [words, 4 lanes]"""
    words = x[:, order].contiguous().view(torch.int32)
    return numbers(words).T


def alike(operands: dict[int, np.ndarray], at: int, read: Callable[[np.ndarray], np.ndarray]) -> int:
    """Words of outputs r, then of outputs r + 8."""
    for output in (0, 1):
        operands[at + 4 * output] = read(LANE // 4 + 8 * output)
    return at + 8


def nibble_operands(weight: QuantisedWeight, x: torch.Tensor, scales: str, tile: int) -> dict[int, np.ndarray]:
    """As the kernel hands them over for 128 of 256 inputs."""
    codes, high, scale, offset, outer, offset_outer = (numbers(each) for each in _pointers(weight, scales))
    operands = {number: np.zeros(32, np.uint32) for number in range(8)}
    for output in (0, 1):
        for word in range(4):
            operands[8 + 4 * output + word] = codes[LANE // 4 + 8 * output, tile * 16 + LANE % 4 * 4 + word]
    order = [8 * word + number + half for word in range(4) for number in range(4) for half in (0, 4)]
    row = x_words(x.view(2, 4, 32)[tile], order)
    operands |= {16 + word: row[word][LANE % 4] for word in range(16)}
    operands[32] = np.where(LANE // 4 == LANE % 4, 0xFFFFFFFF, 0).astype(np.uint32)
    at, each = 36, HIGH_WORDS[weight.grid]
    for word in range(each):
        at = alike(operands, at, lambda row, word=word: high[row, tile * 4 * each + LANE % 4 * each + word])
    small, whole = NIBBLE_SCALES[scales]
    for tensor in (scale, offset)[:small]:
        at = alike(operands, at, lambda row, tensor=tensor: tensor[row, tile * 2 + LANE % 2])
    for tensor in (outer, offset_outer)[:whole]:
        at = alike(operands, at, lambda row, tensor=tensor: tensor[row, 0])
    return operands


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_codes_of_4_to_6_bits(name: str, dtype: str) -> None:
    weight = random_weight(name, 16, 256, "cpu")
    scales = _scales(weight)
    assert scales is not None and weight.grid in NIBBLES
    x = torch.randn(256).to(DTYPES[dtype])
    found = np.zeros(16, np.float32)
    for tile in (0, 1):
        found = found + total(nibble_products(weight.grid, dtype, scales, "f16"), nibble_operands(weight, x, scales, tile))
    wanted = (expand(weight, torch.float64) @ x.double()).numpy()
    assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max()


def test_products_of_bytes_with_groups() -> None:
    weight = random_weight("Q8_0", 16, 64, "cpu")
    codes, _, scale, *_ = (numbers(each) for each in _pointers(weight, "group"))
    x = torch.randn(64).bfloat16()
    operands = {number: np.zeros(32, np.uint32) for number in range(8)}
    row = x_words(x.view(4, 16), list(range(16)))
    for word in range(4):
        for output in (0, 1):
            operands[8 + 4 * output + word] = codes[LANE // 4 + 8 * output, LANE % 4 * 4 + word]
    operands |= {16 + word: row[word][LANE % 4] for word in range(8)}
    alike(operands, 24, lambda row: scale[row, 0])
    operands[32] = np.where(LANE // 4 == LANE % 4 // 2, 0xFFFFFFFF, 0).astype(np.uint32)
    found = total(byte_products("int8", "bf16", "group", "f16"), operands)
    wanted = (expand(weight, torch.float64) @ x.double()).numpy()
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max() + 1e-6

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
    group_scaled,
    nibble_products,
    nibble_scaled,
)
from ridgeline.ops.quantised.codes_gemv import _halves, _pointers, _scales
from ridgeline.ops.quantised.expand import QuantisedWeight, expand

LANE = np.arange(32)
FORMATS = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q4_K and Q6_K")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.int64).astype(np.uint32)


def total(sums: list[np.ndarray]) -> np.ndarray:
    """The 16 outputs that a warp has, columns added."""
    found = ptx_warp.run(collected(), {4 + number: each for number, each in enumerate(sums)})
    rows = [found[number].view(np.float32) for number in (0, 2)]
    assert all((each.reshape(8, 4) == each.reshape(8, 4)[:, :1]).all() for each in rows)     # in every column
    return np.concatenate([each[::4] for each in rows])


def result(text: str, operands: dict[int, np.ndarray]) -> list[np.ndarray]:
    found = ptx_warp.run(text, operands)
    return [found[number] for number in range(4)]


def four(at: int, words: list[np.ndarray]) -> dict[int, np.ndarray]:
    return {at + number: each for number, each in enumerate(words)}


def x_words(x: torch.Tensor, order: list[int]) -> np.ndarray:
    """Inputs of a lane in this order, two in a word: [words, 4 lanes]"""
    words = x[:, order].contiguous().view(torch.int32)
    return numbers(words).T


def alike(operands: dict[int, np.ndarray], at: int, read: Callable[[np.ndarray], np.ndarray]) -> int:
    """Words of outputs r, then of outputs r + 8."""
    for output in (0, 1):
        operands[at + 4 * output] = read(LANE // 4 + 8 * output)
    return at + 8


def nibble_operands(weight: QuantisedWeight, x: torch.Tensor, tile: int, words: range) -> dict[int, np.ndarray]:
    """As the kernel hands them over for these words of 128 of 256 inputs."""
    codes, high, *_ = (numbers(each) for each in _pointers(weight, str(_scales(weight))))
    operands = {number: np.full(32, 0x7FC00000, np.uint32) for number in range(8)}           # NaN: nothing is added to
    for output in (0, 1):
        for word in range(4):
            operands[8 + 4 * output + word] = codes[LANE // 4 + 8 * output, tile * 16 + LANE % 4 * 4 + word]
    operands[16] = np.where(LANE // 4 == 4 * tile + LANE % 4, 0xFFFFFFFF, 0).astype(np.uint32)
    order = [8 * word + number + half for word in words for number in range(4) for half in (0, 4)]
    row = x_words(x.view(2, 4, 32)[tile], order)
    operands |= {20 + word: row[word][LANE % 4] for word in range(4 * len(words))}
    at, each = 20 + 4 * len(words), HIGH_WORDS[weight.grid]
    for word in range(each):
        at = alike(operands, at, lambda row, word=word: high[row, tile * 4 * each + LANE % 4 * each + word])
    return operands


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_codes_of_4_to_6_bits(name: str, dtype: str) -> None:
    weight = random_weight(name, 16, 256, "cpu")
    scales = _scales(weight)
    assert scales is not None and weight.grid in NIBBLES
    _, _, *tensors = (numbers(each) for each in _pointers(weight, scales))
    small, whole = NIBBLE_SCALES[scales]
    x = torch.randn(256).to(DTYPES[dtype])
    halves = _halves(scales)
    each = x.float().view(8, halves, 32 // halves).sum(2).numpy().view(np.uint32)            # of the inputs of a group
    sums = [np.zeros(32, np.uint32)] * 4
    for half in range(halves):
        words = range(4 // halves * half, 4 // halves * (half + 1))
        chains = [
            result(nibble_products(weight.grid, dtype, words[0], len(words)), nibble_operands(weight, x, tile, words))
            for tile in (0, 1)
        ]
        columns = [each[LANE % 4 * 2 + column, half] for column in (0, 1)]
        operands = four(4, sums) | four(8, chains[0]) | four(12, chains[1]) | four(16, columns * 2)
        at = 20
        for tensor in tensors[:small]:
            at = alike(operands, at, lambda row, tensor=tensor: tensor[row, LANE % 4])
        for tensor in tensors[2 : 2 + whole]:
            at = alike(operands, at, lambda row, tensor=tensor: tensor[row, 0])
        sums = result(nibble_scaled(weight.grid, dtype, scales, "f16", half), operands)
    found = total(sums)
    wanted = (expand(weight, torch.float64) @ x.double()).numpy()
    assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max()


def test_products_of_bytes_with_groups() -> None:
    weight = random_weight("Q8_0", 16, 256, "cpu")
    codes, _, scale, *_ = (numbers(each) for each in _pointers(weight, "group"))
    x = torch.randn(256).bfloat16()
    zeros = [np.zeros(32, np.uint32)] * 4
    chains = [zeros, zeros]
    for tile in range(4):
        operands = four(4, chains[tile % 2])
        row = x_words(x.view(4, 4, 16)[tile], list(range(16)))
        for word in range(4):
            for output in (0, 1):
                operands[8 + 4 * output + word] = codes[LANE // 4 + 8 * output, tile * 16 + LANE % 4 * 4 + word]
        operands |= {16 + word: row[word][LANE % 4] for word in range(8)}
        operands[24] = np.where(LANE // 4 == 2 * tile + LANE % 4 // 2, 0xFFFFFFFF, 0).astype(np.uint32)
        chains[tile % 2] = result(byte_products("int8", "bf16", "group", tile < 2), operands)
    operands = four(4, zeros) | four(8, chains[0]) | four(12, chains[1])
    alike(operands, 16, lambda row: scale[row, LANE % 4])
    found = total(result(group_scaled("f16"), operands))
    wanted = (expand(weight, torch.float64) @ x.double()).numpy()
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max() + 1e-6

"""The PTX of the GEMV for stored codes, run by a warp that is not there (ptx_warp.py), against the definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import ptx_warp
import torch
from test_codes_gemv import random_weight

from ridgeline.ops.quantised.codes_asm import byte_products, collected, group_scaled
from ridgeline.ops.quantised.codes_gemv import _pointers
from ridgeline.ops.quantised.expand import expand

LANE = np.arange(32)


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


def test_products_of_bytes_with_groups() -> None:
    weight = random_weight("Q8_0", 16, 256, "cpu")
    codes, scale = (numbers(each) for each in _pointers(weight, "group"))
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

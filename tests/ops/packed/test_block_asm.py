"""The PTX for GGUF's weights in the packed layout, run by a warp that is not there (ptx_warp.py), against the definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import ptx_warp
import pytest
import torch
from quantised_models import BLOCK_FORMATS, random_blocks

from ridgeline.ops.packed.block_asm import (
    block_operands,
    block_products,
    byte_text,
    pair_text,
    zero_words,
)
from ridgeline.ops.packed.block_weight import pack_blocks, packed_numbers
from ridgeline.ops.packed.packed_asm import code_step, factors, products, restored, scale_pairs, sum_span, x_factor
from ridgeline.ops.packed.packed_weight import PackedWeight, byte_scales, expanded, pack, quantised, scale_numbers

LANE = np.arange(32)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
ERRORS = {"bf16": 0.006, "f16": 0.0008}


def words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.int64).astype(np.uint32)


def scale_words(weight: PackedWeight) -> np.ndarray:
    """Of 512 inputs, as products take them: of scales that are bytes, what packed_gemv.widened makes."""
    scale = words(weight.scale[0, 0])
    name = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}.get(weight.scale_dtype)
    if name is None:
        return scale
    pairs = [ptx_warp.run(scale_pairs(name), {2: word}) for word in scale]
    return np.stack([each[half] for each in pairs for half in (0, 1)])


def product_operands(weight: PackedWeight, x: torch.Tensor, block: int, dtype: str) -> dict[int, np.ndarray]:
    """As packed_gemv.py hands over 128 of 512 inputs."""
    codes, scale = words(weight.codes[0]), scale_words(weight)
    operands = {number: np.zeros(32, np.uint32) for number in range(8)}
    larger = x * x_factor(dtype)
    pairs = words(larger.view(-1, 2).contiguous().view(torch.int32)[:, 0]).reshape(-1, 8)    # 16 inputs
    for step in range(8):
        operands[8 + step] = codes[2 * block + step // 4, :, step % 4]
        for half in (0, 1):
            operands[16 + 2 * step + half] = pairs[8 * block + step][LANE % 4 + 4 * half]
    at = 32
    has_zeros = zero_words(weight.form, weight.group) if weight.form else weight.zero is not None
    tensors = [scale] + ([words(weight.zero[0, 0])] if has_zeros else [])        # type: ignore[index]
    for tensor in tensors:
        operands |= {at + 4 * part: tensor[part] for part in range(len(tensor))}
        at += 4 * len(tensor)
    if weight.blocks is not None:
        operands[at] = words(weight.blocks[0, 0])
        at += 4
    if weight.high is not None:
        operands |= {at + number: words(weight.high[0, block])[:, number] for number in range(4)}
        at += 4
    span = sum_span(weight.kind, weight.group)
    if span:
        sign = 1 if weight.form.endswith("offset") else -1
        sums = x[128 * block : 128 * block + 128].double().view(-1, span).sum(1) * sign * code_step(weight.kind, dtype)
        operands |= {at + number: np.full(32, sums[number], np.float32).view(np.uint32) for number in range(len(sums))}
    return operands


def one_row(weight: PackedWeight, x: torch.Tensor, dtype: str, text: Callable[[int], str]) -> np.ndarray:
    """16 outputs by the instructions `text(block)`."""
    sums = np.zeros(16)
    for block in range(4):
        found = ptx_warp.run(text(block), product_operands(weight, x, block, dtype))
        for half in (0, 1):
            column = found[2 * half].view(np.float32).reshape(8, 4)
            assert (column == column[:, :1]).all()                               # x is in every column
            sums[8 * half : 8 * half + 8] += column[:, 0].astype(np.float64) * restored(weight.kind, dtype, bool(half))
    return sums


def assert_near(found: np.ndarray, numbers: torch.Tensor, x: torch.Tensor, error: float) -> None:
    wanted = (numbers @ x.double()).numpy()
    assert np.linalg.norm(found - wanted) < error * np.linalg.norm(wanted)


def random_x(dtype: str, mean: float = 0.0) -> torch.Tensor:
    return (torch.randn(512, generator=torch.Generator().manual_seed(1)) + mean).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_one_row(name: str, dtype: str) -> None:
    """Nothing is rounded to 16 bits, so also not with x far from zero."""
    weight = pack_blocks(random_blocks(name, 16, 512))
    for mean in (0.0, 3.0):
        x = random_x(dtype, mean)
        found = one_row(
            weight, x, dtype, lambda block: block_products(weight.kind, weight.form, weight.group, dtype, "f16", block)
        )
        assert_near(found, packed_numbers(weight, torch.float64), x, 1e-5)


@pytest.mark.parametrize(
    ("kind", "group", "dtype", "zeros"),
    [("uint4", group, dtype, zeros) for group in (16, 32, 64, 128) for dtype in DTYPES for zeros in (False, True)]
    + [("e2m1", 16, "bf16", False), ("e2m1", 32, "bf16", False)],
)
def test_one_row_of_four_bits(kind: str, group: int, dtype: str, zeros: bool) -> None:
    torch.manual_seed(2)
    codes, scale = quantised(torch.randn(16, 512), group, kind)
    weight = pack(codes, scale.to(DTYPES[dtype]), torch.randint(16, scale.shape).half() if zeros else None, kind=kind)
    x = random_x(dtype, 1.0)
    found = one_row(weight, x, dtype, lambda block: products(kind, weight.group, dtype, dtype, zeros, block))
    assert_near(found, expanded(weight, torch.float64), x, 1e-5)


@pytest.mark.parametrize(("group", "scale_dtype"), [(16, "e4m3"), (32, "e8m0"), (64, "e8m0")])
def test_scales_as_bytes_give_the_bits_of_scales_in_16_bits(group: int, scale_dtype: str) -> None:
    """One row: every sum. Many rows: every factor of every group, with the smallest scales of the format among them."""
    torch.manual_seed(3)
    codes, scale = quantised(torch.randn(16, 512), group, "e2m1")
    stored = byte_scales(scale, group)
    stored.view(torch.uint8)[:, 0] = torch.arange(16)
    narrow, wide = (pack(codes, each, kind="e2m1") for each in (stored, scale_numbers(stored)))
    assert narrow.scale.nbytes * 2 == wide.scale.nbytes and wide.scale_dtype == torch.bfloat16
    x = random_x("bf16", 1.0)
    found, wanted = (
        one_row(weight, x, "bf16", lambda block, name=name: products("e2m1", group, "bf16", name, False, block))  # type: ignore[misc]
        for weight, name in ((narrow, scale_dtype), (wide, "bf16"))
    )
    assert (found == wanted).all() and np.abs(found).min() > 0
    for block in range(4):
        for one, other in zip(scale_words(narrow), scale_words(wide), strict=True):
            mine, others = (
                ptx_warp.run(factors("bf16", name), {2: word, 3: np.full(32, block, np.uint32)})
                for word, name in ((one, scale_dtype), (other, "bf16"))
            )
            assert (mine[0] == others[0]).all() and (mine[1] == others[1]).all()


@pytest.mark.parametrize("name", ["e8m0", "e4m3"])
def test_every_byte_becomes_its_number(name: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(-1, 2)
    stored = every if name == "e8m0" else every.view(torch.float8_e4m3fn)
    dtype = torch.bfloat16 if name == "e8m0" else torch.float16
    wanted = scale_numbers(stored).to(dtype)
    for first in range(0, 128, 64):                      # two of a lane's four bytes, 32 lanes
        found = ptx_warp.run(scale_pairs(name), {2: words(every[first : first + 64].reshape(32, 4).view(torch.int32)[:, 0])})
        for half in (0, 1):
            numbers = torch.from_numpy(found[half].astype(np.uint32).view(np.int16).reshape(32, 2).copy()).view(dtype)
            torch.testing.assert_close(numbers, wanted[first + half : first + 64 : 2], rtol=0, atol=0, equal_nan=True)
    assert wanted.view(torch.int16).flatten()[0] == (0x0040 if name == "e8m0" else 0)    # 2^-127


def test_numbers_of_one_row_stay_within_float32() -> None:
    """The smallest code times x as large or small as activations are, in a sum that keeps its bits."""
    for kind, dtype in [("uint4", "bf16"), ("e2m1", "bf16"), ("uint4", "f16"), ("q6", "f16"), ("q6", "bf16")]:
        step = code_step(kind, dtype)
        assert 65504.0 * x_factor(dtype) < torch.finfo(DTYPES[dtype]).max * 1.01
        assert 2.0**-20 * step > 2.0**24 * torch.finfo(torch.float32).tiny and 1e6 * restored(kind, dtype, False) < 3e38


def left_operand(weight: PackedWeight, tile: int, dtype: str) -> np.ndarray:
    """[16, 64] as block_operand.py makes it of one of the eight tiles of 512 inputs."""
    lane_block = np.full(32, tile // 2, np.uint32)
    scale, part = words(weight.scale[0, 0]), tile % 2 * 2
    out = np.zeros((16, 64))
    for word in range(4):
        number, half = part + word // 2, word % 2
        if weight.blocks is None:
            q = ptx_warp.run(pair_text(dtype, "f16"), {2: scale[number], 3: lane_block})
            scales, offsets = (q[0], q[1]), None
            if weight.zero is not None:
                p = ptx_warp.run(pair_text(dtype, "f16"), {2: words(weight.zero[0, 0])[number], 3: lane_block})
                offsets = (p[0], p[1])
        else:
            blocks, second = words(weight.blocks[0, 0]), int(weight.group == 32)
            q = ptx_warp.run(byte_text(dtype, 0, second), {4: scale[number], 5: blocks, 6: lane_block})
            first = 0 if weight.group == 32 else 2 * half
            scales, offsets = (q[first], q[first + 1]), (q[2], q[3]) if weight.group == 32 else None
            if weight.zero is not None:
                p = ptx_warp.run(byte_text(dtype, 1, 1), {4: words(weight.zero[0, 0])[number], 5: blocks, 6: lane_block})
                offsets = (p[first], p[first + 1])
        operands = [words(weight.codes[0])[tile, :, word], *scales, *(offsets or ())]
        if weight.high is not None:
            operands += [words(weight.high[0, tile // 2])[:, 2 * (tile % 2) + word // 2]]
            operands += [np.full(32, 0x4342 if word % 2 else 0x4140, np.uint32)]
        found = ptx_warp.run(
            block_operands(weight.kind, dtype, offsets is not None), {8 + at: each for at, each in enumerate(operands)}
        )
        for number in range(8):
            bits = found[number].astype(np.uint16)
            values = bits.view(np.float16) if dtype == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)
            pair, odd = divmod(number, 2)
            out[LANE // 4 + 8 * (pair % 2), 16 * word + 8 * (pair // 2) + 2 * (LANE % 4) + odd] = values
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_many_rows(name: str, dtype: str) -> None:
    weight = pack_blocks(random_blocks(name, 16, 512))
    wanted = packed_numbers(weight, torch.float64).numpy()
    for tile in (0, 3, 6):
        part = wanted[:, 64 * tile : 64 * tile + 64]
        error = np.abs(left_operand(weight, tile, dtype) - part)
        assert np.linalg.norm(error) < ERRORS[dtype] * np.linalg.norm(part)

"""The packed layout of 4-bit weights: nothing is lost, and each lane has the operands that `mma` wants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.ops.packed.packed_sizes import packs
from ridgeline.ops.packed.packed_weight import (
    E2M1,
    byte_scales,
    expanded,
    pack,
    quantised,
    scale_numbers,
    strip_order,
    unpack,
)


def random_weight(
    seed: int, outputs: int, inputs: int, group: int, zero: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scale = torch.rand(outputs, inputs // group, generator=generator).to(torch.bfloat16)
    zeros = torch.randint(16, scale.shape, generator=generator).to(torch.bfloat16) if zero else None
    return codes, scale, zeros


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 99), st.integers(1, 5), st.integers(1, 6), st.sampled_from([16, 32, 64, 128]), st.booleans(), st.booleans(),
    st.sampled_from(["uint4", "e2m1"]),
)
def test_unpacking_gives_back_what_was_packed(
    seed: int, eights: int, groups: int, group: int, gated: bool, zero: bool, kind: str
) -> None:
    outputs = 16 * eights if gated else 8 * eights - seed % 3
    codes, scale, zeros = random_weight(seed, outputs, group * groups, group, zero and kind == "uint4")
    back = unpack(pack(codes, scale, zeros, kind=kind, gated=gated))
    assert torch.equal(back[0], codes) and torch.equal(back[1], scale)
    assert (back[2] is None) if zeros is None else torch.equal(back[2], zeros)


def test_a_scale_for_a_whole_row_becomes_one_for_each_128_inputs() -> None:
    codes, scale, _ = random_weight(3, 16, 640, 640)
    packed = pack(codes, scale)
    assert packed.group == 128
    assert torch.equal(unpack(packed)[1], scale.expand(-1, 5))
    assert packs(16, 640, 640) and not packs(16, 600, 600) and not packs(24, 128, 128, gated=True)


def test_wide_scales_keep_their_value_where_16_bits_can() -> None:
    codes, scale, _ = random_weight(4, 16, 128, 64)
    assert pack(codes, scale.float()).scale_dtype == torch.bfloat16
    assert pack(codes, scale.float() + 2**-9).scale_dtype == torch.float16


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("group", "dtype", "bits"), [
        (16, torch.float8_e4m3fn, 4.5), (32, torch.float8_e4m3fn, 4.25), (32, torch.uint8, 4.25), (64, torch.uint8, 4.125),
    ]
)
def test_scales_that_are_bytes_stay_bytes(group: int, dtype: torch.dtype, bits: float, gated: bool) -> None:
    codes, _, _ = random_weight(7, 48, 1024, group)
    scale = torch.randint(0, 255, (48, 1024 // group), generator=torch.Generator().manual_seed(8), dtype=torch.uint8)
    scale[0, :2] = torch.tensor([0, 255])
    packed = pack(codes, scale.view(dtype), kind="e2m1", gated=gated)
    wide = pack(codes, scale_numbers(scale.view(dtype)), kind="e2m1")
    assert packed.scale_dtype == dtype and packed.nbytes * 8 == bits * 48 * 1024
    assert torch.equal(unpack(packed)[1].view(torch.uint8), scale)
    torch.testing.assert_close(expanded(packed, torch.float64), expanded(wide, torch.float64), rtol=0, atol=0, equal_nan=True)
    short = pack(codes[:20, :96], scale.view(dtype)[:20, : 192 // group], kind="e2m1")   # padded outputs and inputs
    assert torch.equal(unpack(short)[1].view(torch.uint8), scale[:20, : 192 // group])


def test_bytes_that_the_kernels_do_not_know_become_16_bits() -> None:
    codes, _, _ = random_weight(9, 16, 512, 128)
    for kind, groups in (("e2m1", 4), ("uint4", 16), ("e2m1", 1)):
        scale = torch.randint(100, 140, (16, groups), dtype=torch.uint8)
        packed = pack(codes, scale, kind=kind)
        assert packed.scale_dtype == torch.bfloat16
        assert torch.equal(expanded(packed, torch.float64), expanded(pack(codes, scale_numbers(scale), kind=kind), torch.float64))


def test_the_bytes_of_a_lane_are_those_of_its_outputs() -> None:
    codes, scale, _ = random_weight(10, 16, 1024, 16)
    stored = byte_scales(scale, 16).view(torch.uint8)
    packed = pack(codes, stored.view(torch.float8_e4m3fn), kind="e2m1")
    words = packed.scale.view(torch.uint8).view(1, 2, 4, 32, 4)
    for run, part, lane in ((0, 0, 0), (1, 3, 31), (0, 1, 14)):
        group, row = run * 32 + (lane % 4) * 8 + 2 * part, lane // 4
        wanted = [stored[row + 8 * upper, group + after] for after in (0, 1) for upper in (0, 1)]
        assert words[0, run, part, lane].tolist() == wanted


def lane_operands(word: int, kind: str) -> list[tuple[float, float]]:
    """The four pairs of numbers that the kernels' instructions make of a word."""
    pairs = []
    for number in range(4):
        if kind == "uint4":
            part = word >> 4 * number & 0x000F000F
            pairs.append(((part & 0xFFFF) - 8.0, (part >> 16) - 8.0))
            continue
        if number < 3:
            part = word << 3 * number & 0x81C081C0
        else:
            part = word << 1 & 0x80008000 | word >> 5 & 0x01000100 | word >> 4 & 0x00C000C0
        halves = torch.tensor([part & 0xFFFF, part >> 16 & 0xFFFF], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
        pairs.append(tuple((halves.double() * 2.0**126).tolist()))
    return pairs


@pytest.mark.parametrize("kind", ["uint4", "e2m1"])
@pytest.mark.parametrize("gated", [False, True])
def test_every_lane_has_the_operands_of_mma(kind: str, gated: bool) -> None:
    """The order of m16n8k16's left operand is that of the PTX manual."""
    codes, scale, _ = random_weight(5, 32, 128, 32)
    packed = pack(codes, torch.ones_like(scale), kind=kind, gated=gated)
    numbers = expanded(packed, torch.float64)[strip_order(32, gated)]
    for strip, tile, lane, step in ((0, 0, 0, 0), (1, 1, 31, 3), (0, 1, 13, 2), (1, 0, 22, 1)):
        row, column = 16 * strip + lane // 4, 64 * tile + 16 * step + 2 * (lane % 4)
        wanted = [
            tuple(numbers[row + 8 * half, column + right : column + right + 2].tolist()) for right in (0, 8) for half in (0, 1)
        ]
        assert lane_operands(int(packed.codes[strip, tile, lane, step]) & 0xFFFFFFFF, kind) == wanted


def test_the_scales_of_a_lane_are_those_of_its_outputs() -> None:
    codes, scale, _ = random_weight(6, 16, 1024, 64)
    packed = pack(codes, scale)
    words = packed.scale.view(torch.bfloat16).view(1, 2, 2, 32, 2)
    for run, part, lane in ((0, 0, 0), (1, 1, 31), (0, 1, 14)):
        group = run * 8 + (lane % 4) * 2 + part
        assert words[0, run, part, lane].tolist() == [scale[lane // 4, group], scale[lane // 4 + 8, group]]


def test_quantising_takes_the_nearest_code() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    for kind, step in (("uint4", 0.51), ("e2m1", 1.01)):
        codes, scale = quantised(weight, 32, kind)
        error = (expanded(pack(codes, scale, kind=kind), torch.float32) - weight).abs().view(16, 8, 32)
        assert (error <= step * scale.float()[..., None]).all()
    assert E2M1[-1] == 6.0

"""Packed weights (packed_weight.py, block_weight.py, byte_weight.py) as 16-bit numbers in memory, for cuBLAS: for many rows, and
where no other kernel runs.

A program makes 16 outputs x 512 inputs. A lane loads the word of two neighbouring inputs, and stores eight numbers side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.packed.block_asm import MIDDLES
from ridgeline.ops.packed.block_weight import packed_numbers
from ridgeline.ops.packed.packed_sizes import BYTES
from ridgeline.ops.packed.packed_weight import BYTE_SCALES, PackedWeight
from ridgeline.ops.registry import tl, triton_kernel


@triton_kernel()
def _half(words, upper, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lower or upper 16 bits as float32."""
    bits = (words >> (16 * upper)) & 0xFFFF
    if HALF:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton_kernel()
def _scale_byte(words, number, E8M0: tl.constexpr):  # type: ignore[no-untyped-def]
    """A scale that is a byte, as float32."""
    byte = (words >> (8 * number)) & 255
    if E8M0:
        return tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    exponent = (byte >> 3) & 15
    size = (((exponent + 120) << 23) | ((byte & 7) << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, (byte & 7).to(tl.float32) * 0.001953125, size)        # subnormal: steps of 2^-9
    size = tl.where((byte & 127) == 127, float("nan"), size)
    return tl.where(byte > 127, -size, size)


@triton_kernel()
def _value(part, number, zero, E2M1: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code of pair `number` in 16 bits, as a number without its scale."""
    if not E2M1:
        return ((part >> (4 * number)) & 15).to(tl.float32) - zero
    last = number == 3
    sign = (part >> tl.where(last, 14, 15 - 3 * number)) & 1
    high = (part >> tl.where(last, 13, 8 - 3 * number)) & 1
    low = (part >> tl.where(last, 11, 7 - 3 * number)) & 1
    odd = ((part >> tl.where(last, 10, 6 - 3 * number)) & 1).to(tl.float32)
    power = tl.where(high == 1, tl.where(low == 1, 4.0, 2.0), 1.0)
    size = tl.where((high | low) == 1, (1.0 + 0.5 * odd) * power, 0.5 * odd)
    return tl.where(sign == 1, -size, size)


@triton_kernel()
def _write(  # type: ignore[no-untyped-def]
    numbers, outer_ptr, out_ptr, strip, run, outputs, inputs, OUTER: tl.constexpr, GATED: tl.constexpr
):
    """[16, 64, 4, 2] numbers: 16 outputs x 512 inputs."""
    row = tl.arange(0, 16)
    if GATED:                                            # eight gates and their partners
        output = strip * 8 + row % 8 + row // 8 * (outputs // 2)
        there = strip * 8 + row % 8 < outputs // 2
    else:
        output = strip * 16 + row
        there = output < outputs
    numbers = tl.reshape(numbers, (16, 512))
    if OUTER:
        numbers *= tl.load(outer_ptr + output, mask=there, other=0.0)[:, None]
    column = run * 512 + tl.arange(0, 512)
    target = out_ptr + output.to(tl.int64)[:, None] * inputs + column[None, :]
    tl.store(target, numbers.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < inputs)[None, :])


@triton_kernel()
def _byte(words, number):  # type: ignore[no-untyped-def]
    """A signed byte, stored with 128 added."""
    return (((words >> (8 * number)) & 255) - 128).to(tl.float32)


@triton_kernel(do_not_specialize=["outputs", "runs"])
def _expand_blocks_for_gemm_kernel(  # type: ignore[no-untyped-def]
    code_ptr, high_ptr, scale_ptr, zero_ptr, block_ptr, out_ptr, outputs, inputs, runs,
    GROUP: tl.constexpr, HALF: tl.constexpr, BYTE: tl.constexpr, ZEROS: tl.constexpr, OFFSET: tl.constexpr, HIGH: tl.constexpr,
    MIDDLE: tl.constexpr, GATED: tl.constexpr,
):
    """As `_expand_for_gemm_kernel`, of GGUF's formats (block_weight.py)."""
    run = tl.program_id(0)
    strip = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, 16)[:, None, None]
    eight = tl.arange(0, 64)[None, :, None]              # eight inputs each
    pair = tl.arange(0, 4)[None, None, :]
    upper = line // 8
    lane = line % 8 * 4 + pair
    number = eight % 2 * 2 + upper
    block = strip * runs + run
    word = tl.load(code_ptr + block * 1024 + eight // 8 * 128 + lane * 4 + eight % 8 // 2)
    even = (word >> (4 * number)) & 15
    odd = (word >> (4 * number + 16)) & 15
    if HIGH:                                             # of two tiles: eight words of codes share four
        above = tl.load(high_ptr + block * 512 + eight // 16 * 128 + lane * 4 + eight % 16 // 4)
        at = eight % 4 // 2 * 16 + tl.where(number % 2 == 0, 4 + number, number - 1)     # HIGH_PLACES
        even |= ((above >> at) & 3) << 4
        odd |= ((above >> (at + 8)) & 3) << 4
    scale_at = block * 128 + eight % 16 // 4 * 32 + line % 8 * 4 + eight // 16
    scales = tl.load(scale_ptr + scale_at)
    offset = 0.0
    if BYTE:
        multiplier_at = block_ptr + block * 32 + line % 8 * 4 + eight // 32 * 2
        multiplier = _half(tl.load(multiplier_at), upper, True)
        half = 0 if GROUP == 32 else eight % 4 // 2 * 2
        scale = _byte(scales, half + upper) * multiplier
        if OFFSET:
            added = _half(tl.load(multiplier_at + 1), upper, True)
            if ZEROS:
                offset = _byte(tl.load(zero_ptr + scale_at), half + upper) * added
            else:
                offset = _byte(scales, 2 + upper) * added
    else:
        scale = _half(scales, upper, HALF)
        if OFFSET:
            offset = _half(tl.load(zero_ptr + scale_at), upper, HALF)
    numbers = tl.join((even - MIDDLE).to(tl.float32) * scale + offset, (odd - MIDDLE).to(tl.float32) * scale + offset)
    _write(numbers, out_ptr, out_ptr, strip, run, outputs, inputs, False, GATED)


@triton_kernel(do_not_specialize=["outputs", "runs"])
def _expand_for_gemm_kernel(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, outer_ptr, out_ptr, outputs, inputs, runs,
    GROUP: tl.constexpr, HALF: tl.constexpr, BYTE: tl.constexpr, E8M0: tl.constexpr, ZEROS: tl.constexpr, E2M1: tl.constexpr,
    OUTER: tl.constexpr, GATED: tl.constexpr,
):
    """Program (run of 512 inputs, strip)."""
    EACH: tl.constexpr = 128 // GROUP
    run = tl.program_id(0)
    strip = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, 16)[:, None, None]
    eight = tl.arange(0, 64)[None, :, None]              # eight inputs each
    pair = tl.arange(0, 4)[None, None, :]
    upper = line // 8
    lane = line % 8 * 4 + pair
    number = eight % 2 * 2 + upper
    block = strip * runs + run
    word = tl.load(code_ptr + block * 1024 + eight // 8 * 128 + lane * 4 + eight % 8 // 2)
    scale_lane = line % 8 * 4 + eight // 16
    group = eight * 8 % 128 // GROUP
    scale_at = block * (EACH * 32) + group * 32 + scale_lane
    if BYTE:                                             # words of two groups
        words = tl.load(scale_ptr + block * (EACH // 2 * 32) + group // 2 * 32 + scale_lane)
        scale = _scale_byte(words, group % 2 * 2 + upper, E8M0)
    else:
        scale = _half(tl.load(scale_ptr + scale_at), upper, HALF)
    zero = 8.0
    if ZEROS:
        zero = _half(tl.load(zero_ptr + scale_at), upper, True)
    even = _value(word & 0xFFFF, number, zero, E2M1) * scale
    odd = _value((word >> 16) & 0xFFFF, number, zero, E2M1) * scale
    _write(tl.join(even, odd), outer_ptr, out_ptr, strip, run, outputs, inputs, OUTER, GATED)


@triton_kernel(do_not_specialize=["outputs", "runs"])
def _expand_bytes_for_gemm_kernel(  # type: ignore[no-untyped-def]
    code_ptr, high_ptr, scale_ptr, outer_ptr, out_ptr, outputs, inputs, runs,
    GROUP: tl.constexpr, HALF: tl.constexpr, OUTER: tl.constexpr, GATED: tl.constexpr,
):
    """As `_expand_for_gemm_kernel`, of 8-bit codes (byte_weight.py)."""
    EACH: tl.constexpr = 128 // GROUP
    run = tl.program_id(0)
    strip = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, 16)[:, None, None]
    eight = tl.arange(0, 64)[None, :, None]              # eight inputs each
    pair = tl.arange(0, 4)[None, None, :]
    upper = line // 8
    block = strip * runs + run
    at = block * 1024 + eight // 8 * 128 + (line % 8 * 4 + pair) * 4 + eight % 8 // 2
    word = tl.load(code_ptr + at, mask=upper == 0, other=0) | tl.load(high_ptr + at, mask=upper == 1, other=0)
    scale_at = block * (EACH * 32) + eight * 8 % 128 // GROUP * 32 + line % 8 * 4 + eight // 16
    scale = _half(tl.load(scale_ptr + scale_at), upper, HALF)
    even = _byte(word, eight % 2 * 2) * scale
    odd = _byte(word, eight % 2 * 2 + 1) * scale
    _write(tl.join(even, odd), outer_ptr, out_ptr, strip, run, outputs, inputs, OUTER, GATED)


def expand(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]; what `expanded` gives, at the speed of memory. The next weight may be expanded over it."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return packed_numbers(weight, dtype)
    if weight.room is None:
        out = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=weight.device)
    else:
        out = weight.room.numbers(weight.outputs, weight.inputs, dtype, weight.device)
    strips, tiles = weight.codes.shape[:2]
    if weight.form == BYTES:
        _expand_bytes_for_gemm_kernel[tiles // 8, strips](
            weight.codes, weight.high, weight.scale, weight.scale if weight.outer is None else weight.outer, out,
            weight.outputs, weight.inputs, tiles // 8, GROUP=weight.group, HALF=weight.scale_dtype == torch.float16,
            OUTER=weight.outer is not None, GATED=weight.gated, num_warps=4,
        )
        return out
    if weight.form:
        others = (weight.high, weight.scale, weight.zero, weight.blocks)
        offset = weight.form.endswith("offset")
        _expand_blocks_for_gemm_kernel[tiles // 8, strips](
            weight.codes, *(weight.codes if each is None else each for each in others), out, weight.outputs, weight.inputs,
            tiles // 8, GROUP=weight.group, HALF=weight.scale_dtype == torch.float16, BYTE=weight.blocks is not None,
            ZEROS=weight.zero is not None, OFFSET=offset, HIGH=weight.high is not None,
            MIDDLE=0 if offset else MIDDLES[weight.kind], GATED=weight.gated, num_warps=4,
        )
        return out
    _expand_for_gemm_kernel[tiles // 8, strips](
        weight.codes, weight.scale, weight.scale if weight.zero is None else weight.zero,
        weight.scale if weight.outer is None else weight.outer, out, weight.outputs, weight.inputs, tiles // 8,
        GROUP=weight.group, HALF=weight.scale_dtype == torch.float16, BYTE=weight.scale_dtype in BYTE_SCALES,
        E8M0=weight.scale_dtype == torch.uint8, ZEROS=weight.zero is not None, E2M1=weight.kind == "e2m1",
        OUTER=weight.outer is not None, GATED=weight.gated, num_warps=4,
    )
    return out

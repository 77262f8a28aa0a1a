"""4-bit weights in the order in which tensor cores take their left operand, one layout for any number of rows.

Canonical form: codes uint8 [outputs, inputs / 2], the even input in the low half of a byte; a scale for each output and group of
inputs (uint8: the exponents of E8M0); for uint4 codes a zero of the same shape, or None for 8.

    uint4   w = scale (code - zero)          e2m1   w = scale * value, values 0 0.5 1 1.5 2 3 4 6 and their negatives

Packed form: a strip is 16 outputs. `codes` int32 [strips, inputs / 64, 32, 4]: the 16 bytes of a lane are its left operands
of four `mma` instructions of 16 inputs, one word each (mma.sync m16n8k16 and wgmma agree on this order). Lane 4 r + t has the
outputs r and r + 8 and the inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of every 16. A strip's words follow each other along the
inputs, so a CTA reads long runs. `scale` and `zero` int32 [strips, inputs / 512, 128 / group, 32]: a word has the values of
outputs r and r + 8, and lane t of four has those of the t-th 128 inputs. Scales that a checkpoint has as bytes (MXFP4's E8M0,
NVFP4's e4m3) stay bytes, [strips, inputs / 512, 128 / group / 2, 32]: a word has those of two neighbouring groups, of outputs
r and r + 8 each. Kernels make 16-bit numbers of them in registers, exactly.

With a gate, a strip has eight gates and their eight partners: a lane holds both, and the activation needs no exchange.
Inputs are padded to a multiple of 512 and outputs to 16, with codes and bits of zero. E8M0 has no zero: it is the codes, and x
beyond the inputs, that make padding nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.ops.packed.expand_room import ExpandRoom
from ridgeline.ops.packed.packed_sizes import GROUPS, RUN, STRIP, TILE, keeps_bytes, packs
from ridgeline.ops.quantised.codes import e8m0_numbers

STRIPS_AT_ONCE = 1024                # that are packed at a time: what is made meanwhile takes some 2 bytes for each code
KINDS = ("uint4", "e2m1")
BYTE_SCALES = {torch.uint8: "e8m0", torch.float8_e4m3fn: "float8_e4m3fn"}     # dtypes of scales that may stay bytes
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# e2m1: where the four bits (sign, two of the exponent, one of the mantissa) of each of four codes lie in 16 bits. Codes 0 to 2
# come to their place in a bf16 number by one shift each, the last one in three parts.
E2M1_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    kind: str
    group: int
    outputs: int                     # as stored: with a gate, gates and partners
    inputs: int
    gated: bool
    codes: Tensor                    # int32 [strips, inputs / 64, 32, 4]
    scale: Tensor                    # int32 [strips, inputs / 512, 128 / group, 32]: two 16-bit numbers each. Bytes: half as many
    zero: Tensor | None              # as scale, float16
    whole_zeros: bool                # zeros are codes, and no numbers between them
    scale_dtype: torch.dtype         # bfloat16 or float16; of bytes float8_e4m3fn, or uint8: E8M0
    outer: Tensor | None             # float32 [outputs]: a second factor, of NVFP4
    high: Tensor | None = None       # bits above four, block_weight.py; a second plane of bytes, byte_weight.py
    blocks: Tensor | None = None     # what multiplies the scales of 256 inputs, block_weight.py
    form: str = ""                   # of GGUF's scales and offsets, block_weight.py; BYTES
    room: ExpandRoom | None = None   # where it is expanded; None: into memory of its own

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scale, self.zero, self.outer, self.high, self.blocks)
        return sum(each.nbytes for each in tensors if each is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device


def pack(
    codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, kind: str = "uint4", gated: bool = False,
    outer: Tensor | None = None, matrices: int = 1,
) -> PackedWeight:
    """From the canonical form. Bytes stay bytes (`keeps_bytes`). Other scales are kept in 16 bits: bfloat16 and float16 as they
    are, others as bfloat16 where that changes none of them, else as float16. `matrices`: the rows are those of several, each a
    whole number of strips, and so are the strips; the sizes are those of one."""
    outputs, inputs = codes.shape[0] // matrices, 2 * codes.shape[1]
    group = inputs // scale.shape[1]
    if kind not in KINDS or not packs(outputs, inputs, group, gated) or (zero is not None and kind != "uint4"):
        raise ValueError(f"no packed form for {kind} codes of {outputs} x {inputs} with groups of {group}")
    if group not in GROUPS:
        repeats = group // 128
        scale = scale.repeat_interleave(repeats, 1)
        zero = None if zero is None else zero.repeat_interleave(repeats, 1)
        group = 128
    is_byte = keeps_bytes(kind, BYTE_SCALES.get(scale.dtype, ""), group)
    if not is_byte:
        scale = scale_numbers(scale)
    dtype = scale.dtype if is_byte else scale_dtype(scale)
    order = strip_order(outputs, gated).to(codes.device)
    if matrices > 1:
        order = (order + outputs * torch.arange(matrices, device=codes.device)[:, None]).flatten()
    strips = len(order) // STRIP
    tiles = -(-inputs // RUN) * RUN // TILE
    packed = torch.empty((strips, tiles, 32, 4), dtype=torch.int32, device=codes.device)
    for first in range(0, strips, STRIPS_AT_ONCE):
        here = order[first * STRIP : (first + STRIPS_AT_ONCE) * STRIP]
        packed[first : first + STRIPS_AT_ONCE] = _words(_padded(codes, here, tiles * TILE // 2), kind)
    runs = tiles * TILE // group
    if is_byte:
        pairs = _byte_words(_padded(scale.view(torch.uint8), order, runs), group)
    else:
        pairs = _pairs(_padded(scale.to(dtype), order, runs), group)
    zeros = None if zero is None else _pairs(_padded(zero.to(torch.float16), order, runs), group)
    whole = zero is None or torch.equal(zero, zero.round())
    return PackedWeight(kind, group, outputs, inputs, gated, packed, pairs, zeros, whole, dtype, outer)


def repeated(weight: PackedWeight, outputs: int) -> PackedWeight:
    """The first strip of a weight as all of `outputs`, without memory for the others: for launches that are only collected."""
    strips = -(-outputs // STRIP)

    def again(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:1].expand(strips, *tensor.shape[1:])

    codes, scale = again(weight.codes), again(weight.scale)
    assert codes is not None and scale is not None
    return replace(
        weight, outputs=outputs, codes=codes, scale=scale, zero=again(weight.zero), high=again(weight.high),
        blocks=again(weight.blocks), outer=None if weight.outer is None else weight.outer[:1].expand(outputs), whole_zeros=True,
    )


def some_strips(weight: PackedWeight, first: int, count: int) -> PackedWeight:
    """As a weight: `count` strips, or what is left. With a gate, these are some gates and their partners."""
    strips = slice(first, first + count)

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[strips]

    outputs = min(weight.outputs, strips.stop * STRIP) - first * STRIP
    return replace(
        weight, outputs=outputs, codes=weight.codes[strips], scale=weight.scale[strips], zero=part(weight.zero),
        high=part(weight.high), blocks=part(weight.blocks), outer=of_strips(weight, weight.outer, first, outputs),
    )


def of_strips(weight: PackedWeight, values: Tensor | None, first: int, outputs: int) -> Tensor | None:
    """Of values for every output, those of `some_strips`."""
    if values is None:
        return None
    if not weight.gated:
        return values[first * STRIP : first * STRIP + outputs]
    start, pairs = first * STRIP // 2, outputs // 2
    return values.view(2, -1)[:, start : start + pairs].flatten()


def unpack(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero) in the canonical form."""
    order = strip_order(weight.outputs, weight.gated).to(weight.device)
    place = torch.empty(len(order), dtype=torch.int64, device=weight.device)
    place[order] = torch.arange(len(order), device=weight.device)
    rows = place[: weight.outputs]
    codes = _from_words(weight.codes, weight.kind)[rows, : weight.inputs // 2]
    runs = weight.inputs // weight.group
    zero = None if weight.zero is None else _from_pairs(weight.zero, torch.float16)[rows, :runs]
    if weight.scale_dtype in BYTE_SCALES:
        return codes, _from_byte_words(weight.scale)[rows, :runs].contiguous().view(weight.scale_dtype), zero
    return codes, _from_pairs(weight.scale, weight.scale_dtype)[rows, :runs], zero


def expanded(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight as numbers, [outputs, inputs]."""
    wide = torch.promote_types(dtype, torch.float32)
    codes, scale, zero = unpack(weight)
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    if weight.kind == "e2m1":
        table = torch.tensor(E2M1 + tuple(-each for each in E2M1), dtype=wide, device=weight.device)
        values = table[numbers.long()]
    else:
        less = 8.0 if zero is None else zero.to(wide).repeat_interleave(weight.group, 1)
        values = numbers.to(wide) - less
    values = values * scale_numbers(scale).to(wide).repeat_interleave(weight.group, 1)
    if weight.outer is not None:
        values = values * weight.outer.to(wide)[:, None]
    return values.to(dtype)


def strip_order(outputs: int, gated: bool) -> Tensor:
    """Which output lies where in the strips; numbers beyond the outputs are padding. With a gate, eight gates and their
    eight partners in turn."""
    padded = -(-outputs // STRIP) * STRIP
    if not gated:
        return torch.arange(padded)
    return torch.arange(outputs).view(2, -1, 8).transpose(0, 1).flatten()


def scale_numbers(scale: Tensor) -> Tensor:
    """Scales that are bytes as bfloat16 numbers, which holds all of them; others as they are."""
    if scale.dtype == torch.uint8:
        return e8m0_numbers(scale, torch.float32).to(torch.bfloat16)
    return scale.to(torch.bfloat16) if scale.dtype in BYTE_SCALES else scale


def scale_dtype(scale: Tensor) -> torch.dtype:
    if scale.dtype in (torch.bfloat16, torch.float16):
        return scale.dtype
    return torch.bfloat16 if torch.equal(scale.to(torch.bfloat16).to(scale.dtype), scale) else torch.float16


def _padded(values: Tensor, order: Tensor, columns: int) -> Tensor:
    """Rows in that order, and zeros beyond the last row and column."""
    out = torch.zeros((len(order), columns), dtype=values.dtype, device=values.device)
    there = order < len(values)
    out[there, : values.shape[1]] = values[order[there]]
    return out


def _words(codes: Tensor, kind: str) -> Tensor:
    """bytes [16 strips, columns] -> words [strips, tiles, 32, 4]"""
    strips, tiles = len(codes) // STRIP, codes.shape[1] * 2 // TILE
    # strip, upper half of the outputs, r, tile, word, upper half of 16 inputs, t: a byte has the pair of inputs
    parts = codes.view(strips, 2, 8, tiles, 4, 2, 4).permute(0, 3, 2, 6, 4, 5, 1).reshape(strips, tiles, 32, 4, 4)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for number, table in enumerate(_word_tables(kind, codes.device)):
        words |= table.index_select(0, parts[..., number].flatten().int()).view(words.shape)
    return words


@functools.cache
def _word_tables(kind: str, device: torch.device) -> tuple[Tensor, ...]:
    """For each byte of a word, what each of its 256 values puts into the word."""
    with torch.inference_mode(False):                    # kept, so that it can be used everywhere
        byte = torch.arange(256)
        words = (_placed(byte & 15, number, kind) | _placed(byte >> 4, number, kind) << 16 for number in range(4))
        return tuple(torch.where(each >= 2**31, each - 2**32, each).to(torch.int32).to(device) for each in words)


def _placed(values: Tensor, number: int, kind: str) -> Tensor:
    if kind == "uint4":
        return values << 4 * number
    return sum(((values >> (3 - bit) & 1) << place for bit, place in enumerate(E2M1_PLACES[number])), values & 0)


def _bits(words: Tensor, number: int, half: int, kind: str) -> Tensor:
    part = words >> 16 * half
    if kind == "uint4":
        return part >> 4 * number & 15
    return sum(((part >> place & 1) << (3 - bit) for bit, place in enumerate(E2M1_PLACES[number])), part & 0)


def _from_words(words: Tensor, kind: str) -> Tensor:
    strips, tiles = words.shape[:2]
    wide = words.long()
    pairs = [_bits(wide, number, 0, kind) | _bits(wide, number, 1, kind) << 4 for number in range(4)]
    parts = torch.stack(pairs, -1).to(torch.uint8).view(strips, tiles, 8, 4, 4, 2, 2)
    return parts.permute(0, 6, 2, 1, 4, 5, 3).reshape(strips * STRIP, tiles * TILE // 2)


def _pairs(values: Tensor, group: int) -> Tensor:
    """[16 strips, columns] 16 bits wide -> words [strips, inputs / 512, 128 / group, 32]"""
    strips, each = len(values) // STRIP, 128 // group
    parts = values.view(strips, 2, 8, -1, 4, each).permute(0, 3, 5, 2, 4, 1).contiguous()
    return parts.view(torch.int32).view(strips, -1, each, 32)


def _from_pairs(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_pairs`."""
    strips, blocks, each, _ = words.shape
    parts = words.contiguous().view(dtype).view(strips, blocks, each, 8, 4, 2)
    return parts.permute(0, 5, 3, 1, 4, 2).reshape(strips * STRIP, -1)


def _byte_words(values: Tensor, group: int) -> Tensor:
    """bytes [16 strips, columns] -> words [strips, inputs / 512, 128 / group / 2, 32]"""
    strips, each = len(values) // STRIP, 128 // group // 2
    # strip, upper half of the outputs, r, 512 inputs, t, two groups, which of both
    parts = values.view(strips, 2, 8, -1, 4, each, 2).permute(0, 3, 5, 2, 4, 6, 1).flatten(-2)
    return parts.contiguous().view(torch.int32).view(strips, -1, each, 32)


def _from_byte_words(words: Tensor) -> Tensor:
    strips, blocks, each, _ = words.shape
    parts = words.contiguous().view(torch.uint8).view(strips, blocks, each, 8, 4, 2, 2)
    return parts.permute(0, 6, 3, 1, 4, 2, 5).reshape(strips * STRIP, -1)


def byte_scales(scale: Tensor, group: int) -> Tensor:
    """Scales as e2m1's formats have them, rounded: E8M0 for groups of 32, e4m3 for 16. For tests and studies."""
    if group == 16:
        return scale.to(torch.float8_e4m3fn)
    return (scale.float().log2().round() + 127).clamp(0, 254).to(torch.uint8)


def quantised(weight: Tensor, group: int = 128, kind: str = "uint4") -> tuple[Tensor, Tensor]:
    """Codes and scales of a 16-bit weight, each group by its largest magnitude: for tests and studies."""
    outputs, inputs = weight.shape
    parts = weight.float().view(outputs, -1, group)
    largest = parts.abs().amax(-1).clamp_min(1e-30)
    scale = (largest / (7.0 if kind == "uint4" else 6.0)).to(torch.bfloat16)
    shares = parts / scale.float()[..., None]
    if kind == "uint4":
        numbers = (shares.round() + 8).clamp(0, 15).to(torch.uint8).view(outputs, inputs)
    else:
        edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
        numbers = torch.bucketize(shares.abs(), edges).to(torch.uint8) | (shares < 0).to(torch.uint8) << 3
        numbers = numbers.view(outputs, inputs)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, scale



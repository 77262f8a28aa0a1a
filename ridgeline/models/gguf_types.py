"""The tensor types of GGUF files: how a block of weights is packed, and how it becomes float32.

A tensor is a run of equal blocks, each with its scale (and offset) and its packed weights. A type is the layout of that
block as a numpy record, and a function that expands many blocks at once. The order of the float32 operations is part of
the definition: two readers of the same file get the same bits. This file knows nothing about files, names or shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[Any]               # records of the type's layout, one per block
Floats = npt.NDArray[np.float32]        # [blocks, block_size], written by the expansion
Bytes = npt.NDArray[np.uint8]

# Temporaries of an expansion are a few arrays of this many weights, small enough to stay in the cache.
WEIGHTS_PER_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorType:
    name: str
    block_size: int                                # weights per block
    layout: np.dtype[Any]                          # one packed block
    expand: Callable[[Blocks, Floats], None]

    @property
    def block_bytes(self) -> int:
        return self.layout.itemsize

    def dequantise(self, packed: Bytes, out: Floats) -> None:
        """Expand flat packed bytes into `out`, a C-contiguous float32 array of as many weights."""
        blocks = packed.view(self.layout)
        rows = out.reshape(len(blocks), self.block_size)
        step = max(1, WEIGHTS_PER_CHUNK // self.block_size)
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite scale is the file's own business
            for start in range(0, len(blocks), step):
                self.expand(blocks[start : start + step], rows[start : start + step])


def _column(values: npt.NDArray[Any]) -> Floats:
    """One float32 per block, to be spread over the block's weights."""
    return values.astype(np.float32)[:, None]


# --- plain numbers ---


def _expand_float(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks


def _expand_bf16(blocks: Blocks, out: Floats) -> None:
    np.left_shift(blocks[:, None], 16, out=out.view(np.uint32), dtype=np.uint32)


# --- blocks of 32: one scale, and an offset in the types that end in _1 ---


def _nibbles(packed: Bytes, out: npt.NDArray[Any]) -> None:
    """Low halves of the bytes are the first half of the weights, high halves the second."""
    half = packed.shape[-1]
    out[..., :half] = packed & 15
    out[..., half:] = packed >> 4


def _five_bits(blocks: Blocks) -> Bytes:
    weights = np.empty((len(blocks), 32), np.uint8)
    _nibbles(blocks["quants"], weights)
    weights |= np.unpackbits(blocks["fifth_bits"], axis=1, bitorder="little") << 4
    return weights


def _expand_q4_0(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks["quants"], out)
    out -= 8
    out *= _column(blocks["scale"])


def _expand_q4_1(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks["quants"], out)
    out *= _column(blocks["scale"])
    out += _column(blocks["offset"])


def _expand_q5_0(blocks: Blocks, out: Floats) -> None:
    out[...] = _five_bits(blocks)
    out -= 16
    out *= _column(blocks["scale"])


def _expand_q5_1(blocks: Blocks, out: Floats) -> None:
    out[...] = _five_bits(blocks)
    out *= _column(blocks["scale"])
    out += _column(blocks["offset"])


def _expand_q8_0(blocks: Blocks, out: Floats) -> None:
    out[...] = blocks["quants"]
    out *= _column(blocks["scale"])


# Sixteen levels spaced for weights that are roughly normal, instead of evenly.
_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _expand_iq4_nl(blocks: Blocks, out: Floats) -> None:
    quants = blocks["quants"]
    out[:, :16] = _IQ4_LEVELS[quants & 15]
    out[:, 16:] = _IQ4_LEVELS[quants >> 4]
    out *= _column(blocks["scale"])


# --- K types: blocks of 256 in 8 or 16 groups, whose small integer scales share one float scale ---


def _two_bits(packed: Bytes) -> Bytes:
    """[n, 64] bytes as [n, 8, 32] weights: each half of 32 bytes holds four layers of two bits."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 8, 32)


def _expand_groups(quants: npt.NDArray[Any], scales: Floats, offsets: Floats | None, out: Floats) -> None:
    """weight = quant * scale - offset, with one scale and offset per group: scales are [n, groups]."""
    grouped = out.reshape(*scales.shape, -1)
    grouped[...] = quants.reshape(grouped.shape)
    grouped *= scales[..., None]
    if offsets is not None:
        grouped -= offsets[..., None]


def _expand_q2_k(blocks: Blocks, out: Floats) -> None:
    scales = _column(blocks["scale"]) * (blocks["scales"] & 15)
    offsets = _column(blocks["offset"]) * (blocks["scales"] >> 4)
    _expand_groups(_two_bits(blocks["quants"]), scales, offsets, out)


def _expand_q3_k(blocks: Blocks, out: Floats) -> None:
    packed = blocks["scales"]                      # sixteen 6-bit scales: 8 bytes of low halves, 4 bytes of high pairs
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    pairs = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scales = (low | (pairs.reshape(-1, 16) << 4)).astype(np.int8) - 32
    group = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks["third_bits"][:, None, :] >> group) & 1
    quants = (_two_bits(blocks["quants"]) | (high << 2)).astype(np.int8) - 4
    _expand_groups(quants, _column(blocks["scale"]) * scales, None, out)


def _six_bit_scales(blocks: Blocks) -> tuple[Floats, Floats]:
    """Q4_K and Q5_K: eight scales and eight offsets of six bits each in 12 bytes."""
    first, second, third = blocks["scales"][:, :4], blocks["scales"][:, 4:8], blocks["scales"][:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return _column(blocks["scale"]) * scales, _column(blocks["offset"]) * offsets


def _expand_q4_k(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks["quants"].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    scales, offsets = _six_bit_scales(blocks)
    grouped = out.reshape(-1, 8, 32)
    grouped *= scales[..., None]
    grouped -= offsets[..., None]


def _expand_q5_k(blocks: Blocks, out: Floats) -> None:
    quants = np.empty((len(blocks), 4, 64), np.uint8)
    _nibbles(blocks["quants"].reshape(-1, 4, 32), quants)
    quants = quants.reshape(-1, 8, 32)
    group = np.arange(8, dtype=np.uint8)[:, None]
    quants |= ((blocks["fifth_bits"][:, None, :] >> group) & 1) << 4
    _expand_groups(quants, *_six_bit_scales(blocks), out)


def _expand_q6_k(blocks: Blocks, out: Floats) -> None:
    quants = np.empty((len(blocks), 2, 128), np.uint8)
    _nibbles(blocks["quants"].reshape(-1, 2, 64), quants)
    quants = quants.reshape(-1, 8, 32)
    quants |= _two_bits(blocks["high_pairs"]) << 4
    _expand_groups(quants.view(np.int8) - 32, _column(blocks["scale"]) * blocks["scales"], None, out)


def _expand_iq4_xs(blocks: Blocks, out: Floats) -> None:
    """IQ4_NL's levels in eight groups of 32; scales of six bits, the low four in bytes and the high two in one word."""
    low = np.stack((blocks["scales"] & 15, blocks["scales"] >> 4), -1).reshape(-1, 8)
    high = (blocks["high_pairs"][:, None] >> (2 * np.arange(8, dtype=np.uint16))) & 3
    scales = (low | (high << 4)).astype(np.int8) - 32
    quants = blocks["quants"].reshape(-1, 8, 16)
    grouped = out.reshape(-1, 8, 32)
    grouped[..., :16] = _IQ4_LEVELS[quants & 15]
    grouped[..., 16:] = _IQ4_LEVELS[quants >> 4]
    grouped *= (_column(blocks["scale"]) * scales)[..., None]


# --- ternary: blocks of 256, each weight -1, 0 or 1 times one scale ---


def _digits(packed: Bytes, count: int) -> Bytes:
    """[n, bytes] as [n, count * bytes]: the first digits of base 3 of all bytes, then the second. A byte is its number of five
    digits times 256 / 243, rounded up, so that multiplying by 3 brings a digit into the bits above."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    shifted = packed[:, None, :] * powers                # modulo 256
    digits: Bytes = ((shifted.astype(np.uint16) * 3) >> 8).astype(np.uint8)
    return digits.reshape(len(packed), -1)


def _expand_tq1_0(blocks: Blocks, out: Floats) -> None:
    quants = blocks["quants"]
    out[:, :160], out[:, 160:240] = _digits(quants[:, :32], 5), _digits(quants[:, 32:], 5)
    out[:, 240:] = _digits(blocks["last"], 4)
    out -= 1
    out *= _column(blocks["scale"])


def _expand_tq2_0(blocks: Blocks, out: Floats) -> None:
    out[...] = _two_bits(blocks["quants"]).reshape(-1, 256)
    out -= 1
    out *= _column(blocks["scale"])


# --- MXFP4: 32 numbers of four bits and the exponent of their scale ---

# e2m1, doubled; the scale is halved for it.
_E2M1_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _expand_mxfp4(blocks: Blocks, out: Floats) -> None:
    quants = blocks["quants"]
    out[:, :16] = _E2M1_LEVELS[quants & 15]
    out[:, 16:] = _E2M1_LEVELS[quants >> 4]
    out *= np.ldexp(np.float32(0.5), blocks["scale"].astype(np.int32) - 127)[:, None]


def _layout(**fields: str) -> np.dtype[Any]:
    return np.dtype(list(fields.items()))


# By the number that GGUF files carry.
TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, np.dtype("<f4"), _expand_float),
    1: TensorType("F16", 1, np.dtype("<f2"), _expand_float),
    2: TensorType("Q4_0", 32, _layout(scale="<f2", quants="16u1"), _expand_q4_0),
    3: TensorType("Q4_1", 32, _layout(scale="<f2", offset="<f2", quants="16u1"), _expand_q4_1),
    6: TensorType("Q5_0", 32, _layout(scale="<f2", fifth_bits="4u1", quants="16u1"), _expand_q5_0),
    7: TensorType("Q5_1", 32, _layout(scale="<f2", offset="<f2", fifth_bits="4u1", quants="16u1"), _expand_q5_1),
    8: TensorType("Q8_0", 32, _layout(scale="<f2", quants="32i1"), _expand_q8_0),
    10: TensorType("Q2_K", 256, _layout(scales="16u1", quants="64u1", scale="<f2", offset="<f2"), _expand_q2_k),
    11: TensorType(
        "Q3_K", 256, _layout(third_bits="32u1", quants="64u1", scales="12u1", scale="<f2"), _expand_q3_k
    ),
    12: TensorType("Q4_K", 256, _layout(scale="<f2", offset="<f2", scales="12u1", quants="128u1"), _expand_q4_k),
    13: TensorType(
        "Q5_K", 256, _layout(scale="<f2", offset="<f2", scales="12u1", fifth_bits="32u1", quants="128u1"), _expand_q5_k
    ),
    14: TensorType("Q6_K", 256, _layout(quants="128u1", high_pairs="64u1", scales="16i1", scale="<f2"), _expand_q6_k),
    20: TensorType("IQ4_NL", 32, _layout(scale="<f2", quants="16u1"), _expand_iq4_nl),
    23: TensorType("IQ4_XS", 256, _layout(scale="<f2", high_pairs="<u2", scales="4u1", quants="128u1"), _expand_iq4_xs),
    28: TensorType("F64", 1, np.dtype("<f8"), _expand_float),
    30: TensorType("BF16", 1, np.dtype("<u2"), _expand_bf16),
    34: TensorType("TQ1_0", 256, _layout(quants="48u1", last="4u1", scale="<f2"), _expand_tq1_0),
    35: TensorType("TQ2_0", 256, _layout(quants="64u1", scale="<f2"), _expand_tq2_0),
    39: TensorType("MXFP4", 32, _layout(scale="u1", quants="16u1"), _expand_mxfp4),
}
TENSOR_TYPE_BY_NAME: dict[str, TensorType] = {kind.name: kind for kind in TENSOR_TYPES.values()}

# Known by name only, so that a refusal can say what the file holds.
OTHER_TYPE_NAMES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M",
    40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}

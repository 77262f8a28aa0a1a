"""Vectors as bytes in the number formats that vLLM's embeddings have: float32, float16, bfloat16 and two of 8 bits.

numpy has no format of 8 bits and no bfloat16, so their rounding is here: to the nearest, ties to even, as torch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np

EmbedType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ByteOrder = Literal["native", "big", "little"]

# Exponent bits, mantissa bits, the code of the largest finite number, and of anything beyond it (e4m3 has no infinity).
_E4M3, _E5M2 = (4, 3, 126, 126), (5, 2, 123, 124)
_NOT_A_NUMBER = 127


def vector_bytes(vector: np.ndarray, kind: EmbedType, order: ByteOrder) -> bytes:
    with np.errstate(over="ignore"):
        written = _CONVERTED[kind](vector.astype(np.float32))
    swapped = order != "native" and order != sys.byteorder
    return (written.byteswap() if swapped else written).tobytes()


def _bfloat16(vector: np.ndarray) -> np.ndarray:
    bits = vector.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@cache
def _values(format: tuple[int, int, int, int]) -> np.ndarray:
    """The numbers that the codes from 0 to the largest stand for."""
    exponent_bits, mantissa_bits, largest, _ = format
    codes = np.arange(largest + 1)
    exponents, mantissas = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissas / (1 << mantissa_bits)
    return np.where(exponents == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponents - bias))


def _eight_bits(format: tuple[int, int, int, int]) -> Callable[[np.ndarray], np.ndarray]:
    def converted(vector: np.ndarray) -> np.ndarray:
        values, largest = _values(format), format[2]
        between = (values[1:] + values[:-1]) / 2
        size = np.abs(vector.astype(np.float64))
        codes = np.searchsorted(between, size, side="left")
        tie = (codes < largest) & (size == between[np.minimum(codes, largest - 1)])
        codes += tie & (codes % 2 == 1)
        beyond = values[-1] + (values[-1] - values[-2]) / 2
        codes = np.where(np.isnan(size), _NOT_A_NUMBER, np.where(size >= beyond, format[3], codes))
        return (codes | (np.signbit(vector).astype(np.int64) << 7)).astype(np.uint8)

    return converted


_CONVERTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda vector: vector,
    "float16": lambda vector: vector.astype(np.float16),
    "bfloat16": _bfloat16,
    "fp8_e4m3": _eight_bits(_E4M3),
    "fp8_e5m2": _eight_bits(_E5M2),
}

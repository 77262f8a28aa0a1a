"""Number formats of weights and of the KV cache: bytes per element with their scales, and the format of matrix products.

Weights in a narrow format are stored and read in it. Matrix products run in it only if the chip supports it and the activations
have it too (fp8, int8); int4 weights are converted on the way (W4A16), so they save bytes but no FLOPs.

A format's loss is given as its signal-to-noise ratio on normally distributed numbers, in decibels: the same for every model, and
only a hint. `ridgeline eval` measures a model's real loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ridgeline.ops.kernel_table import MOST_CODE_ROWS
from ridgeline.quant.format import GRIDS, MADE
from ridgeline.sizes.hardware import Device
from ridgeline.sizes.kv_format import parse

GROUP = 128                          # weights that share a scale, in int4
SPARSE_INDEX_BITS = 2                # of every kept value, in 2:4 sparsity


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    bits: float                      # per element
    scale_bits: float = 0.0          # of scales and zeros, per element
    computes: bool = True            # do products run in it, where it is native?

    @property
    def bytes(self) -> float:
        return (self.bits + self.scale_bits) / 8


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The codes of a checkpoint, kept as the device lays them out: bytes of a weight with its scales."""

    format: str                      # of WEIGHT_FORMATS, the one that they are nearest to
    linears: float                   # of the layers
    head: float
    experts: float
    expert_format: str = ""          # of WEIGHT_FORMATS; empty: as the linears
    narrow_rows: bool = False        # rows of x become codes as well, so that products have the rate of the format


def _made(name: str, computes: bool) -> Format:
    """What the option `quantization` makes: with the true bytes of its scales."""
    bits = GRIDS[MADE[name].grid][0]
    return Format(name, bits, 8 * MADE[name].bytes_each() - bits, computes)


WEIGHT_FORMATS = {
    each.name: each
    for each in (
        Format("float32", 32), Format("bfloat16", 16), Format("float16", 16),
        Format("fp8", 8),                                # a scale per output: nothing, per element
        _made("fp8-block", False),
        Format("int8", 8),
        Format("int4", 4, (16 + 4) / GROUP, computes=False),     # a scale and a zero for every group
        _made("mxfp4", False),
        Format("fp4", 4, 8 / 16),                        # a scale of 8 bits for 16 numbers
    )
}
KV_FORMATS = ("auto", "fp8", "int8", "int4")


def weight_bytes(format: str, sparse: bool = False) -> float:
    """Bytes per weight. With 2:4 sparsity half of the values are kept, each with its place."""
    found = WEIGHT_FORMATS[format]
    if not sparse:
        return found.bytes
    return (found.bits / 2 + SPARSE_INDEX_BITS / 2 + found.scale_bits) / 8


def kv_bytes(format: str, dtype: str, head_dim: int, scales: bool = True) -> float:
    """Bytes per element of K and V; narrow ones bring a float32 scale per token and head, as the engine's cache."""
    if "=" in format:                                    # keys and values apart
        return sum(kv_bytes(each, dtype, head_dim, scales) for each in parse(format)) / 2
    if format == "auto":
        return WEIGHT_FORMATS[dtype].bytes
    return WEIGHT_FORMATS[format].bits / 8 + (4 / head_dim if scales else 0.0)


def compute_format(device: Device, weights: str, dtype: str) -> str:
    """The format of matrix products: the weights' own if native, otherwise the activations', or the chip's wide one. A CPU has
    a rate for packed weights once its native kernels were measured."""
    found = WEIGHT_FORMATS[weights]
    if weights == "fp8-block" and device.hopper:         # elsewhere each product expands them
        return "fp8"
    if weights in device.flops and (found.computes or device.kind == "cpu"):     # a CPU's activations become integers, too
        return weights
    return dtype if dtype in device.flops else device.wide


def support(device: Device) -> dict[str, str]:
    """By format: native, or what it is emulated with."""
    told = {}
    for name in WEIGHT_FORMATS:
        if compute_format(device, name, device.wide) == name:
            told[name] = "native"
        else:
            told[name] = f"stored, computed in {compute_format(device, name, device.wide)}"
    return told


# ── what a format loses ──────────────────────────────────────────────────────────────────────────────────────────────


def _float_step(mantissa: int, lowest_exponent: int) -> Callable[[np.ndarray], np.ndarray]:
    def rounded(values: np.ndarray) -> np.ndarray:
        exponents = np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-30))), lowest_exponent)
        step = 2.0 ** (exponents - mantissa)
        return np.round(values / step) * step

    return rounded


def _integer(bits: int, group: int) -> Callable[[np.ndarray], np.ndarray]:
    """Symmetric, scaled to the largest of a group: of n normal numbers that is about √(2 ln 2n)."""
    most = math.sqrt(2 * math.log(2 * group))

    def rounded(values: np.ndarray) -> np.ndarray:
        step = most / (2 ** (bits - 1) - 1)
        return np.clip(np.round(values / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step

    return rounded


def _fp4(values: np.ndarray) -> np.ndarray:
    """e2m1: 0, ½, 1, 1½, 2, 3, 4, 6, scaled to the largest of 16 numbers."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * math.sqrt(2 * math.log(32)) / 6
    found: np.ndarray = np.sign(values) * levels[np.abs(np.abs(values)[:, None] - levels).argmin(1)]
    return found


def _mxfp4(values: np.ndarray) -> np.ndarray:
    """e2m1, scaled by a power of two: on average the largest of a block fills three quarters of the range."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * math.sqrt(2 * math.log(64)) / 4.5
    found: np.ndarray = np.sign(values) * levels[np.abs(np.abs(values)[:, None] - levels).argmin(1)]
    return found


_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": _float_step(7, -126), "float16": _float_step(10, -14), "float32": _float_step(23, -126),
    "fp8": _float_step(3, -12),                          # e4m3, scaled so that the largest of a row fills the range
    "fp8-block": _float_step(3, -12), "mxfp4": _mxfp4,
    "int8": _integer(8, 4096), "int4": _integer(4, GROUP), "fp4": _fp4,
}


def signal_to_noise(format: str) -> float:
    """Decibels: 10 log₁₀ of the variance of normal numbers over that of their rounding errors."""
    values = np.linspace(-6, 6, 40_001)
    density = np.exp(-values * values / 2)
    error = _ROUNDINGS[format](values) - values
    return float(10 * math.log10((density * values**2).sum() / (density * error**2).sum()))


# ── what kernels of narrow formats keep of a GPU's speed ─────────────────────────────────────────────────────────────

# The share of the reading speed of bf16 weights that kernels of narrow ones keep at a few rows, beyond a call's own time. From
# one request of the records in benchmarks/h200: fp8 and int4 between 8B and 70B, and those of 4 bits nearer to the newest records
# than to older ones in history, whose kernels were slower. Blocks of a GGUF file have more scales and planes to unpack (Q4_K_M).
READ = {"fp8": 0.90, "fp8-block": 0.85, "int8": 0.87, "mxfp4": 0.70}
NARROW_READ, BLOCKS_READ = 0.82, 0.69
# The share of twice the matrix rate that layers of 8-bit weights keep with many rows, quantisation included: from the first
# tokens of 128 prompts in their records.
EIGHT_BIT_COMPUTE = {"fp8": 0.83, "fp8-block": 0.76, "int8": 0.86}
# The share of the rate of attention over prompts that an int8 KV cache leaves: another kernel reads it (its record, 16 x 8,192).
INT8_KV_COMPUTE = 0.22
# Codes that are multiplied by x of 16 bits, by their bits: the share of the bf16 rate of many rows that layers keep (4 bits:
# benchmarks/studies/int4_linears, the 3.6 TFLOP of 32 layers with 256 rows in 8.03 ms, 446 of 700 TFLOP/s; 8 bits: 128 requests
# of the record of Q8_0), and the most rows that are multiplied like that.
CODE_COMPUTE, CODE_ROWS = {4: 0.64, 8: 0.55}, 768
# With more rows codes become numbers in memory first: bytes that are moved for each weight, at the share of the bandwidth that
# this reaches. Products of 4 bits with as many rows hide reading the numbers again; those of 8 bits (Q8_0) do not.
EXPANDED = {4: 2.516, 8: 4.0}
EXPANDS = 0.7


def code_rows(weights: str) -> int:
    """The most rows that are multiplied by codes beside x of 16 bits. Those of fp8 are not packed."""
    return MOST_CODE_ROWS if weights.startswith("fp8") else CODE_ROWS


def kv_factors(kv: str, narrow_read: float, narrow_compute: float) -> tuple[float, float]:
    """On the speed at which attention reads and computes, by the format of the KV cache ("auto": as wide as the model) and what a
    narrow one leaves."""
    if kv == "auto":
        return 1.0, 1.0
    return narrow_read, INT8_KV_COMPUTE if "int8" in kv else narrow_compute

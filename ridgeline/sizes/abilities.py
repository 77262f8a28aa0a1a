"""Formats of weights and KV that this engine makes or keeps, as data: what they take, what they lose, how fast their kernels are.

The verdict, `diagnose` and `plan` recommend nothing else, and of these only what has kernels on the device
(quant/gpu_layout.served, models/checkpoints/quantisation_check.made_formats): on a GPU all speeds are those of Hopper.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Names of matrix rates in measurements, where data sheets have others.
SHEET_NAMES = {"float8_e4m3fn": "fp8"}
# Devices that one engine divides a model among, by kind: 8 GPUs of a machine, on 8 machines. Their tokens are those of one device
# (tests/models/test_mesh.py, tests/runner/test_gpu_ranks.py); their speed is not measured, and `plan` says so.
MOST_RANKS = {"cuda": 64, "cpu": 8}
QUALITY_MODEL = "SmolLM2-135M"       # with which losses were measured: small, so larger ones lose less


@dataclass(frozen=True, slots=True)
class NarrowFormat:
    name: str                        # value of the option
    option: str
    element_bytes: float             # scales included
    kl: float                        # nats per token that it cost …
    record: str                      # … in this record of benchmarks/
    kinds: tuple[str, ...] = ("cuda",)                   # of devices that it is faster on

    @property
    def flag(self) -> str:
        return f"--{self.option.replace('_', '-')} {self.name}"

    @property
    def bits(self) -> int:
        return round(8 * self.element_bytes)

    @property
    def trade_off(self) -> str:
        return f"quality: KL {self.kl:.2g} with {QUALITY_MODEL} (docs/precision.md); yours: `ridgeline eval`"


# Of formats with the same bits the first that a device and a model have is recommended. int8's loss is that of a card, which
# rounds activations as a GPU does; so does the H200's record of fp8.
WEIGHT_FORMATS = (
    NarrowFormat("fp8", "quantization", 1.0, 0.0313, "h200/eval-fp8-weights.json"),
    NarrowFormat("int8", "quantization", 1.0, 0.0389, "cards/smollm2-135m-w8a8.json", ("cuda", "cpu")),
    NarrowFormat("fp8-block", "quantization", 1 + 4 / 128**2, 0.0182, "cpu/eval-fp8-block-weights.json"),
    NarrowFormat("int4", "quantization", (4 + 16 / 128) / 8, 0.4905, "cpu/eval-int4-weights.json", ("cuda", "cpu")),
    NarrowFormat("mxfp4", "quantization", (4 + 8 / 32) / 8, 0.5496, "cpu/eval-mxfp4-weights.json"),
)
KV_FORMATS = (
    NarrowFormat("fp8", "kv_cache_dtype", 1.0, 0.0060, "h200/eval-fp8-kv.json"),
    NarrowFormat("int8", "kv_cache_dtype", 1.0, 0.0046, "cpu/eval-int8-kv.json"),
)
BY_FLAG = {each.flag: each for each in (*WEIGHT_FORMATS, *KV_FORMATS)}


def faster_kv(kind: str, fp8: bool) -> tuple[str, ...]:
    """Formats of the KV cache with kernels on such a device. `fp8`: it converts these numbers itself."""
    return tuple(each.name for each in KV_FORMATS if kind in each.kinds and (fp8 or each.name != "fp8"))


def distinct(formats: Iterable[NarrowFormat]) -> list[NarrowFormat]:
    """Those worth recommending: of several for one option with the same bits, the first."""
    found: dict[tuple[str, int], NarrowFormat] = {}
    for each in formats:
        found.setdefault((each.option, each.bits), each)
    return list(found.values())


WORTH_ITS_LOSS = 1.02                # times as fast: formats that gain less are not worth their loss
UNTIMED = " (by the data sheet: not timed on this kind of GPU)"
# What a narrower format would bring, by its option as it is typed: (rows, time of its part of a step over what it is now).
Factors = Mapping[str, Sequence[tuple[float, float]]]


def factor_at(points: Sequence[tuple[float, float]], rows: float) -> float:
    """Between two numbers of rows, by their logarithm; beyond the last as there."""
    place = bisect_left(points, rows, key=lambda point: point[0])
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (low, first), (high, second) = points[place - 1], points[place]
    return first + (second - first) * math.log(rows / low) / math.log(high / low)


def packed_width(bits: float) -> str:
    """The width that a CPU's products with packed weights are measured at, by the bits of a weight; empty: they are numbers."""
    return "int4" if bits < 6.5 else "int8" if bits < 12 else ""

"""What every op has to compute and to move, counted exactly from shapes, in plain Python.

Plan, CLI, scheduler and benchmarks read these numbers without torch; the op files import the same cases and costs, so
that the correctness test, the micro-benchmark and the roofline speak of the same thing. Nothing here knows how fast a
machine is, or which kernel runs.

Conventions: one multiply-add is two FLOPs; an exponential, a division and a comparison are one each. Bytes are the
traffic a perfect kernel needs: every input read once, every output written once, nothing kept between ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
INDEX_BYTES = 8                      # slots, positions, token ids: int64 on the device
BLOCK_ID_BYTES = 4                   # block tables and lengths: int32


def dtype_bytes(dtype: str) -> int:
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Cost:
    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)

    @property
    def intensity(self) -> float:
        """FLOPs per byte: the abscissa of the roofline."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A named set of sizes at which an op is checked and timed."""

    name: str
    sizes: Mapping[str, Any]
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")

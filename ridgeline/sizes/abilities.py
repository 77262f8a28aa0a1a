"""What this engine can change on a device today, as data: the verdict, `diagnose` and `plan` recommend nothing else.

A new weight or KV format is one line here, once the engine runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Names of matrix rates in measurements, where data sheets have others.
SHEET_NAMES = {"float8_e4m3fn": "fp8"}
# By --quantization, where products of layers have another dtype than the engine: as measurements name it.
_MATRIX_DTYPES = {"fp8": "float8_e4m3fn", "fp8-block": "float8_e4m3fn", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class NarrowFormat:
    name: str                        # value of the option
    option: str
    element_bytes: float             # scales included
    native: str                      # rate that the device must have; empty: any device of these kinds
    kinds: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")    # of the engine, beside which it works

    @property
    def flag(self) -> str:
        return f"--{self.option.replace('_', '-')} {self.name}"

    @property
    def matrix_dtype(self) -> str:
        """That matrix products are computed in; empty: as without it."""
        return _MATRIX_DTYPES.get(self.name, "") if self.option == "quantization" else ""


WEIGHT_FORMATS = (
    NarrowFormat("fp8", "quantization", 1.0, "fp8", dtypes=("bfloat16",)),
)
# Devices that one engine divides a model among, by kind: 8 GPUs of a machine, on 8 machines. Their tokens are those of one device
# (tests/models/test_mesh.py, tests/runner/test_gpu_ranks.py); their speed is not measured, and `plan` says so.
MOST_RANKS = {"cuda": 64, "cpu": 8}
KV_FORMATS = (
    NarrowFormat("fp8", "kv_cache_dtype", 1.0, "fp8"),
    NarrowFormat("int8", "kv_cache_dtype", 1.0, ""),
)


def available(
    formats: Iterable[NarrowFormat], kind: str, native: Iterable[str], dtype: str = "bfloat16"
) -> tuple[NarrowFormat, ...]:
    """Those that an engine with this dtype can use on such a device. `native`: names of its matrix rates."""
    known = {SHEET_NAMES.get(name, name) for name in native}
    return tuple(
        each for each in formats if kind in each.kinds and dtype in each.dtypes and (not each.native or each.native in known)
    )


def distinct(formats: Iterable[NarrowFormat]) -> list[NarrowFormat]:
    """Those worth recommending: of several for one option with the same bytes, the first."""
    found: dict[tuple[str, float], NarrowFormat] = {}
    for each in formats:
        found.setdefault((each.option, each.element_bytes), each)
    return list(found.values())


def packed_width(bits: float) -> str:
    """The width that a CPU's products with packed weights are measured at, by the bits of a weight; empty: they are numbers."""
    return "int4" if bits < 6.5 else "int8" if bits < 12 else ""


def matrix_dtype(quantization: str, kind: str, dtype: str) -> str:
    """What the matrix products of layers are computed in."""
    return _MATRIX_DTYPES.get(quantization, dtype) if kind == "cuda" else dtype

"""Weight formats as data: the grid of the codes, their scales, and the tensors in which a linear keeps them. No torch, so that
memory is known before anything loads.

A weight is (code - zero) * scale, or code * scale + offset. `expand` in codes.py is that definition in torch. A checkpoint's
dialect (models/checkpoints/) converts to these formats exactly; kernels know nothing else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ridgeline.errors import ConfigError

# Bits of a code, and the code that means zero where a format stores none.
GRIDS: dict[str, tuple[int, int]] = {
    "bf16": (16, 0), "e4m3": (8, 0), "int8": (8, 0), "uint4": (4, 8), "e2m1": (4, 0), "nf4": (4, 0), "ternary": (2, 1),
    "q5": (5, 16), "q6": (6, 32),
}
INTEGERS = ("ternary", "uint4", "q5", "q6", "int8")                      # from narrow to wide
BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "e8m0": 1,
}
# Standard deviation of random codes: what dummy scales must undo.
SPREAD = {"e4m3": 100.0, "int8": 74.0, "uint4": 4.6, "e2m1": 2.9, "nf4": 0.55, "ternary": 0.9, "q5": 9.2, "q6": 18.5}


@dataclass(frozen=True, slots=True)
class Scales:
    """One scale for each block of (outputs, inputs); 0 inputs: for whole rows."""

    block: tuple[int, int]
    dtype: str = "float32"           # of BYTES; e8m0 and small integers are kept in a byte
    zero: str | None = None          # "code": a zero point is subtracted from the code; "offset": a number is added
    outer: Scales | None = None      # multiplies these scales (and offsets): NVFP4's second scale, the super-blocks of K types


@dataclass(frozen=True, slots=True)
class Activation:
    """How a checkpoint was meant to quantise x. Kernels may keep more of x, never less."""

    kind: str                        # fp8, int8, fp4
    per: str = "token"               # token, tensor, group
    static: bool = False             # the checkpoint has scales for x
    outliers: float | None = None    # LLM.int8(): columns of x with larger values stay in 16 bits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter of a quantised linear: which outputs and inputs one element serves."""

    name: str
    dtype: str                       # of BYTES
    outputs: int = 1
    inputs: int = 1                  # 0: one for the whole row

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        if self.name == ORDER:
            return (1, inputs)
        rows = -(-outputs // self.outputs)
        return (rows, -(-inputs // self.inputs)) if self.inputs else (rows,)

    def nbytes(self, outputs: int, inputs: int) -> int:
        return math.prod(self.shape(outputs, inputs)) * BYTES[self.dtype]


WEIGHT, HIGH, SCALE, ZERO, OFFSET, OUTER, OFFSET_OUTER, ORDER = (
    "weight", "high", "scale", "zero", "offset", "outer", "offset_outer", "order"
)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    grid: str                        # of GRIDS
    scales: Scales | None = None
    activation: Activation | None = None
    reordered: bool = False          # the inputs are sorted by group: x is read through `order`
    sparse: str | None = None        # "2:4": made so that half of the values are zero; kept dense

    @property
    def name(self) -> str:
        """As records and logs call it: uint4-32, fp8-row, fp8-128x128."""
        if self.scales is None:
            return self.grid + (f" {self.sparse}" if self.sparse else "")
        outputs, inputs = self.scales.block
        block = "row" if not inputs else str(inputs) if outputs == 1 else f"{outputs}x{inputs}"
        return f"{self.grid}-{block}" + (f" {self.sparse}" if self.sparse else "")

    def tensors(self) -> tuple[TensorSpec, ...]:
        if self.scales is None:
            raise ValueError("a format without scales is the model's own dtype")
        bits = GRIDS[self.grid][0]
        code = {"e4m3": "float8_e4m3fn", "int8": "int8"}.get(self.grid, "uint8")
        found = [TensorSpec(WEIGHT, code, 1, 8 // min(bits, 8) if bits != 5 and bits != 6 else 2)]
        if bits in (5, 6):                               # a plane of nibbles and a plane of the bits above
            found.append(TensorSpec(HIGH, "uint8", 1, 8 // (bits - 4)))
        scales, outer = self.scales, self.scales.outer
        found.append(TensorSpec(SCALE, scales.dtype, *scales.block))
        if scales.zero is not None:
            found.append(TensorSpec(ZERO if scales.zero == "code" else OFFSET, scales.dtype, *scales.block))
        if outer is not None:
            found.append(TensorSpec(OUTER, outer.dtype, *outer.block))
            if scales.zero == "offset":
                found.append(TensorSpec(OFFSET_OUTER, outer.dtype, *outer.block))
        if self.reordered:
            found.append(TensorSpec(ORDER, "int32"))
        return tuple(found)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Of one matrix with everything that belongs to it."""
        return sum(tensor.nbytes(outputs, inputs) for tensor in self.tensors())

    def bytes_each(self) -> float:
        """Bytes of a weight of a large matrix, its scales included."""
        return self.nbytes(4096, 4096) / 4096**2

    def fitted(self, outputs: Iterable[int], inputs: int, share: int) -> WeightFormat:
        """The format of a linear with parts of these numbers of outputs and `share` of all inputs: blocks of several outputs
        end where a part ends, and blocks of inputs where a shard ends, or scales are repeated for smaller blocks."""
        if self.scales is None:
            return self
        parts = list(outputs)

        def fit(scales: Scales) -> Scales:
            rows, columns = scales.block
            rows = rows if all(part % rows == 0 for part in parts) else 1
            columns = columns if share == inputs or columns == 0 else math.gcd(columns, share)
            return replace(scales, block=(rows, columns), outer=None if scales.outer is None else fit(scales.outer))

        step = max((tensor.inputs for tensor in self.tensors() if tensor.name in (WEIGHT, HIGH)), default=1)
        if inputs % step or share % step:
            raise ConfigError(
                f"{self.name} weights need inputs in multiples of {step}, here are {inputs}"
                + (f" in shards of {share}" if share != inputs else "")
            )
        return replace(self, scales=fit(self.scales))


def per_row(format: WeightFormat) -> WeightFormat:
    """With the scales of every output written out, as a source hands them over."""
    def rows(scales: Scales) -> Scales:
        return replace(scales, block=(1, scales.block[1]), outer=None if scales.outer is None else rows(scales.outer))

    return format if format.scales is None else replace(format, scales=rows(format.scales))


def common(formats: Iterable[WeightFormat | None]) -> WeightFormat | None:
    """The one format in which the parts of a fused linear can be kept without a change of their numbers; None: only numbers.

    Integer grids are nested in each other: the widest holds all, with groups that all can share and with offsets. GGUF's K types
    keep their small scales, and those without offsets have their scales for them, times what means 0.
    """
    given = list(formats)
    found = [replace(format, activation=None) if format is not None else None for format in given]
    if all(format == found[0] for format in found):
        return _alike([format for format in given if format is not None and format.scales is not None])
    if any(
        format is None or format.scales is None or format.grid not in INTEGERS or format.reordered
        or format.scales.block[0] != 1 for format in found
    ):
        return None
    kept = [format for format in found if format is not None and format.scales is not None]
    grid = max((format.grid for format in kept), key=INTEGERS.index)
    return WeightFormat(grid, _common_scales([format.scales for format in kept if format.scales is not None]))


def _alike(formats: list[WeightFormat]) -> WeightFormat | None:
    """Of parts that differ in their activations at most: x is quantised only where no part needs all of it."""
    if not formats:
        return None
    return next((format for format in formats if format.activation is None), formats[0])


def _common_scales(scales: list[Scales]) -> Scales:
    """Of groups of inputs that all can share."""
    group, outer = math.gcd(*(each.block[1] for each in scales)), scales[0].outer
    if outer is not None and all(each.outer == outer and each.dtype in ("uint8", "int8") for each in scales):
        signed = any(each.dtype == "int8" for each in scales)                    # those of Q4_K and Q5_K are below 64
        return Scales((1, group), "int8" if signed else "uint8", "offset", outer)
    return Scales((1, group), "float32", "offset")


FP8_ROW = WeightFormat("e4m3", Scales((1, 0)), Activation("fp8"))
FP8_BLOCK = WeightFormat("e4m3", Scales((128, 128)), Activation("fp8", "group"))
INT8_ROW = WeightFormat("int8", Scales((1, 0)), Activation("int8"))
MXFP4 = WeightFormat("e2m1", Scales((1, 32), "e8m0"))


def uint4(group: int, dtype: str = "float16", zero: str | None = None) -> WeightFormat:
    return WeightFormat("uint4", Scales((1, group), dtype, zero))


# What the option `quantization` can make of a 16-bit checkpoint while it loads.
MADE = {"fp8": FP8_ROW, "fp8-block": FP8_BLOCK, "int8": INT8_ROW, "int4": uint4(128, "bfloat16"), "mxfp4": MXFP4}
GROUPS = (128, 64, 32)               # of int4: the largest that divides the inputs


def made_format(name: str, inputs: int, share: int) -> WeightFormat | None:
    """The format that `quantization=name` gives a linear; None where its inputs do not divide into groups: it keeps its dtype."""
    format = MADE[name]
    if name == "int4":
        group = next((size for size in GROUPS if inputs % size == 0 and share % size == 0), None)
        return None if group is None else uint4(group, "bfloat16")
    if name == "mxfp4" and (inputs % 32 or share % 32):
        return None
    return format


def is_fp8_rows(format: WeightFormat) -> bool:
    """e4m3 codes with a scale for each output, beside rows of x in e4m3."""
    return format.grid == "e4m3" and format.scales == FP8_ROW.scales and quantises_rows(format)


def quantises_rows(format: WeightFormat) -> bool:
    """The formats of ops/linear/fp8_linear.py, whose kernels quantise rows of x, too. Not where the checkpoint was made for x in
    16 bits; int8 only where it means int8: e4m3 keeps more of a row with outliers."""
    scales, activation = format.scales, format.activation
    if scales is None or format.sparse is not None or format.reordered or scales.zero is not None or scales.outer is not None:
        return False
    if format.grid == "int8":
        return scales == INT8_ROW.scales and activation is not None and activation.kind == "int8" and activation.outliers is None
    blocks = scales.block == FP8_BLOCK.scales.block and scales.dtype in ("float32", "bfloat16")  # type: ignore[union-attr]
    return format.grid == "e4m3" and activation is not None and (scales == FP8_ROW.scales or blocks)


def quantization_rules(option: str, method: str = "") -> Mapping[str, str]:
    """The option `quantization` as {pattern: format}: one name; "pattern=format" pairs between commas; or a JSON object. The
    first pattern that is found in a linear's path counts. `method`: of a quantised checkpoint; its name asks for nothing."""
    if option in ("none", "") or option.lower().replace("_", "-") == method:
        return {}
    if option.startswith("{"):
        try:
            given = json.loads(option)
        except ValueError:
            given = None
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given.values()):
            raise ConfigError(f"quantization must be a JSON object of patterns and formats, got {option[:80]!r}")
    else:
        given = {pattern: name for pattern, _, name in (part.strip().rpartition("=") for part in option.split(","))}
    for pattern, name in given.items():
        if name not in (*MADE, "none"):
            stored = f"; leave the option out to use the checkpoint's own format, {method}" if method else ""
            raise ConfigError(
                f"quantization {name!r} is not known; formats: none, {', '.join(MADE)}; or pattern=format pairs such as "
                f"mlp=int4,attention=fp8{stored}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"quantization: {pattern!r} is no regular expression: {error}") from None
    return given

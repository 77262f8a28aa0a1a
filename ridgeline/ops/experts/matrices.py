"""The matrices of a layer's experts in any form that the op `experts` takes; an expert is the first index of every tensor.

    Tensor             numbers, [experts, outputs, inputs]
    QuantisedWeight    codes with scales as a checkpoint has them (ops/quantised/expand.py): the grids of GRIDS
    PackedWeight       4-bit codes in the order in which tensor cores take them (packed_matrices.py), for Hopper GPUs
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ridgeline.ops.experts.packed_matrices import each_expanded
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.registry import TRITON_INTERPRETED

Matrices: TypeAlias = Tensor | QuantisedWeight | PackedWeight
GRIDS = {"e2m1": 4, "uint4": 4, "e4m3": 8}               # bits of a code
ROW = 1 << 20                        # more inputs than a row has: a scale for whole rows


class Codes(NamedTuple):
    """What the kernels of tiles and of few tokens are told about a matrix: numbers are the grid ""."""

    grid: str
    bits: int
    group: int                       # inputs of a scale
    scale_rows: int                  # outputs of a scale
    weight: Tensor
    scale: Tensor | None
    zero: Tensor | None

    def tensors(self, other: Tensor, multiplied: bool) -> tuple[Tensor, Tensor, Tensor]:
        """`other` where there is none. `multiplied`: codes of 8 bits as tensor cores take them, not as bytes."""
        weight = loadable(self.weight.view(torch.float8_e4m3fn)) if multiplied else self.weight
        return weight, other if self.scale is None else self.scale, other if self.zero is None else self.zero

    def constants(self) -> dict[str, Any]:
        return {"GRID": self.grid, "GROUP": self.group, "SCALE_ROWS": self.scale_rows, "ZEROS": self.zero is not None}


def loadable(codes: Tensor) -> Tensor:
    """e4m3 codes for a kernel: the interpreter has no such numbers."""
    return codes.float() if TRITON_INTERPRETED else codes


def as_codes(matrices: Tensor | QuantisedWeight) -> Codes:
    if isinstance(matrices, Tensor):
        return Codes("", 16, 0, 1, matrices, None, None)
    rows, inputs = matrices.block
    codes = matrices.weight.view(torch.uint8) if matrices.grid == "e4m3" else matrices.weight
    return Codes(matrices.grid, GRIDS[matrices.grid], inputs or ROW, rows, codes, matrices.scale, matrices.zero)


def numbers(matrices: Matrices, dtype: torch.dtype) -> Tensor:
    """[experts, outputs, inputs]"""
    if isinstance(matrices, Tensor):
        return matrices
    if isinstance(matrices, PackedWeight):
        return each_expanded(matrices, dtype)
    return torch.stack([
        expand(matrices._replace(
            weight=matrices.weight[expert], scale=matrices.scale[expert],
            zero=None if matrices.zero is None else matrices.zero[expert],
        ), dtype)
        for expert in range(len(matrices.weight))
    ])

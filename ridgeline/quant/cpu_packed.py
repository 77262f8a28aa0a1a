"""Weights that stay packed on a CPU: a linear keeps the blocks of its GGUF file, laid out for the native kernels, and no numbers.

Numbers that a file does not pack (and those of every other checkpoint) are kept in float32, as by `PackedFloat32`. A linear with
parts of both has one matrix with parts of both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard
from ridgeline.ops.cpu import native
from ridgeline.ops.cpu.matrix import Matrix, Part
from ridgeline.ops.linear.gguf_blocks import block_linear
from ridgeline.ops.registry import kernels_are_used
from ridgeline.quant.layout import fewest_outputs
from ridgeline.quant.piece import Piece
from ridgeline.quant.scheme import PackedFloat32, Scheme, bias_piece, plain_bias, unquantised_scheme


class Kept:
    """The parts of a matrix while they load: packed ones and plain ones."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.packed: dict[str, Part] = {}
        self.plain: dict[str, Tensor] = {}

    def piece(self, part: str, rows: int) -> Piece:
        # The loader wants a target of the right shape; nothing is written to it.
        target = torch.zeros(1).expand(rows, self.inputs)
        return Piece(
            (rows, self.inputs), (slice(None), slice(None)), target, (0.0, self.inputs**-0.5), self._take_packed(part),
            lambda values: self.plain.update({part: values.to(torch.float32, copy=True)}),
        )

    def _take_packed(self, part: str) -> Callable[[Tensor, str], bool]:
        def take(rows: Tensor, packing: str) -> bool:
            made = self.packed[part] = Part(packing, rows.shape[0], self.inputs)
            made.put_blocks(rows)
            return made.is_finite()

        return take

    def result(self, parts: list[str]) -> Matrix | Tensor:
        """What was loaded: a matrix, or numbers if no part is packed."""
        if not self.packed:
            return self.plain[parts[0]] if len(parts) == 1 else torch.cat([self.plain[part] for part in parts])
        for part, values in self.plain.items():
            self.packed[part] = made = Part("F32", len(values), self.inputs)
            made.put_numbers(values)
        return Matrix([self.packed[part] for part in parts])


class CpuPacked(PackedFloat32):
    """`integers`: activations are rounded to 8 bits where the weight is packed."""

    keeps_blocks = True

    def __init__(self, fewest_outputs: int, integers: bool) -> None:
        super().__init__(fewest_outputs)
        self.integers = integers

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        linear.matrix = None
        if not linear.keeps:
            super().create(linear, rows, columns, bias, padded, dtype, device)
            return
        linear.kept = Kept(columns)
        linear.weight = None
        linear.bias = plain_bias(rows, bias, padded, dtype, device)

    def pieces(self, linear: nn.Module, part: str, rows: Shard, first: int) -> dict[str, Piece]:
        if not linear.keeps:
            return super().pieces(linear, part, rows, first)
        return bias_piece(linear, rows, first) | {"weight": linear.kept.piece(part, rows.size)}

    def numbers(self, linear: nn.Module) -> Tensor:
        return super().numbers(linear) if linear.matrix is None else linear.matrix.numbers()

    def finish(self, linear: nn.Module) -> None:
        kept = getattr(linear, "kept", None)
        if kept is not None:
            linear.kept = None
            self.take(linear, kept.result(list(linear.rows)))
        if getattr(linear, "matrix", None) is None:
            linear.matrix = None
            super().finish(linear)

    @staticmethod
    def take(linear: nn.Module, weight: Matrix | Tensor) -> None:
        if isinstance(weight, Matrix):
            linear.matrix = weight
        else:
            linear.weight = nn.Parameter(weight, requires_grad=False)

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        if linear.matrix is None:
            return super().apply(linear, x, batch)
        return block_linear(x, linear.matrix, linear.bias, self.integers)

    def extra_bytes(self, linear: nn.Module) -> int:
        if linear.matrix is None:
            return super().extra_bytes(linear)
        return 0 if linear.shares else linear.matrix.nbytes

    def read_bytes(self, linear: nn.Module, rows: int) -> int:
        return super().read_bytes(linear, rows) if linear.matrix is None else linear.matrix.nbytes


def plain_scheme(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False, cpu_activations: str = "int8"
) -> Scheme:
    """The scheme of linears without a weight format of their own. With `kernels=reference` it is the float32 one everywhere."""
    cpu = device.type == "cpu" and dtype == torch.float32 and PackedFloat32.available()
    if cpu and kernels_are_used() and native.library() is not None:
        return CpuPacked(fewest_outputs(), cpu_activations == "int8")
    return unquantised_scheme(device, dtype, deterministic)

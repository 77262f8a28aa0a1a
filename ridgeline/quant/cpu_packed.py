"""Weights on a CPU with the native kernels: as wide as their checkpoint stores them, and no other copy.

Blocks of a GGUF file and 16-bit numbers go into tiles (ops/cpu/matrix.py) as they load. Codes with scales (int8, uint4, ternary;
from a checkpoint, or made while loading) go there once their linear is whole. Formats that tiles do not hold are expanded to
float32. A linear whose numbers are all float32 keeps them as `PackedFloat32` does; one with other parts, too, is one matrix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard
from ridgeline.ops.cpu import native
from ridgeline.ops.cpu.matrix import NUMBERS, Matrix, Part
from ridgeline.ops.linear.gguf_blocks import block_linear
from ridgeline.ops.quantised.codes import e8m0_numbers, unpacked_codes
from ridgeline.ops.quantised.expand import MIDDLE, QuantisedWeight, spread
from ridgeline.ops.registry import kernels_are_used
from ridgeline.process.platform import return_freed_memory
from ridgeline.quant.layout import fewest_outputs, tile_kind
from ridgeline.quant.piece import Piece
from ridgeline.quant.scheme import PackedFloat32, Scheme, bias_piece, plain_bias, unquantised_scheme

logger = logging.getLogger(__name__)


class Kept:
    """The parts of a matrix while they load. `stored`: the dtype in which the checkpoint's numbers are expected."""

    def __init__(self, inputs: int, stored: torch.dtype = torch.float32) -> None:
        self.inputs, self.stored = inputs, stored
        self.packed: dict[str, Part] = {}
        self.plain: dict[str, Tensor] = {}

    def piece(self, part: str, rows: int) -> Piece:
        # The loader wants a target of the right shape; nothing is written to it.
        target = torch.zeros(1, dtype=self.stored).expand(rows, self.inputs)
        return Piece(
            (rows, self.inputs), (slice(None), slice(None)), target, (0.0, self.inputs**-0.5), self._take_packed(part),
            lambda values: self._take_numbers(part, values),
        )

    def _take_packed(self, part: str) -> Callable[[Tensor, str], bool]:
        def take(rows: Tensor, packing: str) -> bool:
            made = self.packed[part] = Part(packing, rows.shape[0], self.inputs)
            made.put_blocks(rows)
            return made.is_finite()

        return take

    def _take_numbers(self, part: str, values: Tensor) -> None:
        if values.dtype in (torch.float16, torch.bfloat16):
            self.packed[part] = _numbers_part(values)
        else:
            self.plain[part] = values.to(torch.float32, copy=True)

    def result(self, parts: list[str]) -> Matrix | Tensor:
        """What was loaded: a matrix, or numbers if all are float32."""
        if not self.packed:
            return self.plain[parts[0]] if len(parts) == 1 else torch.cat([self.plain[part] for part in parts])
        self.packed |= {part: _numbers_part(values) for part, values in self.plain.items()}
        return Matrix([self.packed[part] for part in parts])


def _numbers_part(values: Tensor) -> Part:
    part = Part(NUMBERS[values.dtype], *values.shape)
    part.put_numbers(values)
    return part


def codes_part(weight: QuantisedWeight) -> Part | None:
    """Codes with scales, in tiles; None: tiles do not hold such codes."""
    found = tile_kind(weight.grid, weight.block, weight.inputs)
    if found is None or weight.outer_block[0] != 1:
        return None
    kind, span = found
    outputs, groups = weight.weight.shape[0], -(-weight.inputs // (32 * span))
    codes = unpacked_codes(weight.grid, weight.weight, weight.high)
    scale, offset = (
        None if inner is None else _of_groups(weight, inner, outer, outputs, groups)
        for inner, outer in ((weight.scale, weight.outer), (weight.offset, weight.offset_outer))
    )
    assert scale is not None
    if kind != "INT4":
        if offset is not None or weight.zero is not None:
            return None
        if kind == "E4M3" and bool((codes.view(torch.uint8) & 127 == 127).any()):
            logger.warning("an fp8 matrix [%d, %d] has NaN codes: it is expanded to float32, which takes %d MiB "
                           "more than was counted", outputs, weight.inputs, 3 * outputs * weight.inputs >> 20)
            return None
    elif offset is None:
        zero = weight.zero.float().view(outputs, groups) if weight.zero is not None else MIDDLE[weight.grid]
        offset = -zero * scale
    part = Part(kind, outputs, weight.inputs, span)
    part.put_codes(codes.view(torch.uint8), scale, offset)
    return part


def _of_groups(weight: QuantisedWeight, inner: Tensor, outer: Tensor | None, outputs: int, groups: int) -> Tensor:
    """Scales or offsets, their outer scales multiplied out: float32 [outputs, groups]"""
    values = e8m0_numbers(inner, torch.float32) if weight.e8m0 else inner.float()
    values = values.view(-1, groups).repeat_interleave(weight.block[0], dim=0)[:outputs]
    if outer is None:
        return values
    each = weight.outer_block[1] // weight.block[1] if weight.outer_block[1] else 0
    return values * spread(outer.float(), (1, each), (outputs, groups))


class CpuPacked(PackedFloat32):
    """`integers`: activations are rounded to 8 bits where the weight is packed."""

    keeps_blocks = True

    def __init__(self, fewest_outputs: int, integers: bool, stored: torch.dtype = torch.float32) -> None:
        super().__init__(fewest_outputs)
        self.integers, self.stored = integers, stored

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        linear.matrix = None
        if not linear.keeps:
            super().create(linear, rows, columns, bias, padded, dtype, device)
            return
        linear.kept = Kept(columns, self.stored)
        linear.weight = None
        linear.bias = plain_bias(rows, bias, padded, dtype, device)

    def pieces(self, linear: nn.Module, part: str, rows: Shard, first: int) -> dict[str, Piece]:
        if not linear.keeps:
            return super().pieces(linear, part, rows, first)
        return bias_piece(linear, rows, first) | {"weight": linear.kept.piece(part, rows.size)}

    def numbers(self, linear: nn.Module) -> Tensor:
        if linear.matrix is None:
            return super().numbers(linear)
        found, order = linear.matrix.numbers(), getattr(linear, "order", None)
        return found if order is None else torch.empty_like(found).index_copy_(1, order.long(), found)

    def finish(self, linear: nn.Module) -> None:
        kept = getattr(linear, "kept", None)
        if kept is not None:
            linear.kept = None
            self.take(linear, kept.result(list(linear.rows)))
            if kept.plain:                               # copied: malloc would keep half as much again as the model has
                kept.plain.clear()
                return_freed_memory()
        if getattr(linear, "matrix", None) is None:
            linear.matrix = None
            super().finish(linear)

    @staticmethod
    def take(linear: nn.Module, weight: Matrix | Tensor) -> None:
        if isinstance(weight, Matrix):
            linear.matrix = weight
        else:
            linear.weight = nn.Parameter(weight, requires_grad=False)

    def take_codes(self, linear: nn.Module, weight: QuantisedWeight) -> bool:
        part = codes_part(weight)
        if part is None:
            return False
        linear.weight, linear.matrix = None, Matrix([part])
        return True

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        if linear.matrix is None:
            return super().apply(linear, x, batch)
        order = getattr(linear, "order", None)
        return block_linear(x if order is None else x.index_select(1, order), linear.matrix, linear.bias, self.integers)

    def extra_bytes(self, linear: nn.Module) -> int:
        if linear.matrix is None:
            return super().extra_bytes(linear)
        return 0 if linear.shares else linear.matrix.nbytes

    def read_bytes(self, linear: nn.Module, rows: int) -> int:
        return super().read_bytes(linear, rows) if linear.matrix is None else linear.matrix.nbytes


def plain_scheme(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False, cpu_activations: str = "int8", stored: str = "float32"
) -> Scheme:
    """The scheme of linears without a weight format of their own; `stored`: the dtype of the checkpoint's numbers. With
    `kernels=reference` it is the float32 one everywhere."""
    cpu = device.type == "cpu" and dtype == torch.float32 and PackedFloat32.available()
    if cpu and kernels_are_used() and native.library() is not None:
        return CpuPacked(fewest_outputs(), cpu_activations == "int8", getattr(torch, stored, torch.float32))
    return unquantised_scheme(device, dtype, deterministic)

"""8-bit weights by which x is multiplied in 8 bits, too: e4m3 or int8 codes with a float32 scale for each output, or e4m3 codes
with a scale for each block of 128 by 128; from a checkpoint, or made while a 16-bit one loads.

On a GPU with tensor cores for them a linear keeps the codes, and ops/linear/fp8_linear.py multiplies by them. On an older GPU,
and for a shape that is no multiple of 16, they stay too, and each product expands them (quantised.py). A CPU multiplies by
the codes, too (cpu_packed.py), e4m3 with float32 activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.ops.activation import gated_activation
from ridgeline.ops.linear import gemm_small, gemm_wide
from ridgeline.ops.linear.fp8_linear import (
    BLOCK,
    Fp8Rows,
    expanded,
    fp8_linear,
    gated_linear,
    gated_one_row,
    gated_rows,
    multiplied,
    multiplied_row,
    multiplies,
    normed_fp8_linear,
)
from ridgeline.ops.linear.fp8_one_row import OneRow
from ridgeline.quant.format import FP8_ROW, WeightFormat
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Norm, Scheme


class Fp8(Quantised):
    def __init__(self, plain: Scheme, made: bool = True, format: WeightFormat = FP8_ROW) -> None:
        """`plain` serves the expanded weight where codes gain nothing."""
        super().__init__(format, plain, made)

    def finish(self, linear: nn.Module) -> None:
        # A shard may end inside a block: it has smaller ones.
        if linear.format.scales.block[1] in (0, BLOCK) and multiplies(linear.weight):
            linear.scale.data = linear.scale.data.float()            # blocks may have scales in 16 bits
            gemm_small.prepare(linear.weight.device)
            gemm_wide.prepare(linear.weight.device)
        else:
            linear.scheme = Quantised(self.format, self.plain, self.made)
            linear.scheme.finish(linear)

    def numbers(self, linear: nn.Module) -> Tensor:
        if linear.scale.dim() == 2:
            return super().numbers(linear)
        return expanded(linear.weight, linear.scale, torch.promote_types(linear.dtype, torch.float32))

    def apply(self, linear: nn.Module, x: Tensor | Fp8Rows | OneRow, batch: object) -> Tensor:
        if isinstance(x, OneRow):
            return multiplied_row(x, linear.weight, linear.scale, linear.bias)
        if isinstance(x, Fp8Rows):
            return multiplied(x, linear.weight, linear.scale, linear.bias)
        return fp8_linear(x, linear.weight, linear.scale, linear.bias)

    def apply_normed(
        self, linear: nn.Module, x: Tensor, residual: Tensor | None, norm: Norm, batch: object, gate: str | None = None,
        following: nn.Module | None = None,
    ) -> tuple[Any, Tensor]:
        """The gated activation is quantised by the kernel that computes it, where the linear that follows wants codes."""
        next_codes = following if following is not None and isinstance(following.scheme, Fp8) else None
        if gate is not None and next_codes is not None:
            made = gated_one_row(
                x, residual, norm.weight, norm.eps, linear.weight, linear.scale, linear.bias, gate,
                (next_codes.weight, next_codes.scale), norm_offset=norm.offset,
            )
            if made is not None:
                return made
        if gate is not None:
            together = gated_linear(
                x, residual, norm.weight, norm.eps, linear.weight, linear.scale, linear.bias, gate, norm_offset=norm.offset
            )
            if together is not None:
                return together
        out, stream = normed_fp8_linear(
            x, residual, norm.weight, norm.eps, linear.weight, linear.scale, linear.bias, norm_offset=norm.offset
        )
        if gate is None:
            return out, stream
        rows = None if next_codes is None else gated_rows(out, gate, next_codes.weight, next_codes.scale)
        return (gated_activation(out, gate) if rows is None else rows), stream

    def read_bytes(self, linear: nn.Module, rows: int) -> int:
        return linear.weight.nbytes + linear.scale.nbytes

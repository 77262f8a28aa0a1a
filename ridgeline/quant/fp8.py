"""fp8 weights: e4m3 codes with a float32 scale for each output, made while a 16-bit checkpoint loads.

On a GPU with fp8 tensor cores a linear keeps the codes, and ops/linear/fp8_linear.py multiplies by them. Elsewhere (a CPU,
an older GPU, a shape that is no multiple of 16) no kernel gains from them: the weight is expanded once, after loading, so
that the same numbers are computed at the usual speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.ops.activation import gated_activation
from ridgeline.ops.linear import gemm_small, gemm_wide
from ridgeline.ops.linear.fp8_linear import (
    Fp8Rows,
    expanded,
    fp8_linear,
    gated_rows,
    multiplied,
    multiplies,
    normed_fp8_linear,
)
from ridgeline.ops.linear.fp8_rows import CODES, fp8_rows_reference
from ridgeline.quant.scheme import Composed, Norm, Scheme

ROWS_AT_ONCE = 2**24                 # elements that are quantised at a time: their float32 copies take some 200 MB


class Fp8(Composed):
    keeps_blocks = False

    def __init__(self, plain: Scheme) -> None:
        """`plain` serves the expanded weight where codes gain nothing."""
        self.plain = plain

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        new = torch.zeros if padded else torch.empty
        linear.weight = nn.Parameter(new(rows, columns, dtype=torch.uint8, device=device).view(CODES), requires_grad=False)
        linear.scale = nn.Parameter(torch.ones(rows, dtype=torch.float32, device=device), requires_grad=False)
        linear.bias = nn.Parameter(new(rows, dtype=dtype, device=device), requires_grad=False) if bias else None
        linear.dtype = dtype

    def store(self, linear: nn.Module, rows: slice, columns: int) -> Callable[[Tensor], None]:
        """Quantises rows of the checkpoint's weight into their place."""

        def quantise(values: Tensor) -> None:
            if not values.numel():                       # a rank that holds padding alone
                return
            step = max(1, ROWS_AT_ONCE // columns)
            for first in range(0, len(values), step):
                part = values[first : first + step].to(linear.weight.device)
                codes, scale = fp8_rows_reference(part)
                here = slice(rows.start + first, rows.start + first + len(part))
                linear.weight.data[here, :columns].copy_(codes)
                linear.scale.data[here].copy_(scale)

        return quantise

    def finish(self, linear: nn.Module) -> None:
        if multiplies(linear.weight):
            gemm_small.prepare(linear.weight.device)
            gemm_wide.prepare(linear.weight.device)
            return
        linear.weight = nn.Parameter(self.numbers(linear).to(linear.dtype), requires_grad=False)
        del linear.scale
        linear.scheme = self.plain
        self.plain.finish(linear)

    def numbers(self, linear: nn.Module) -> Tensor:
        return expanded(linear.weight, linear.scale, torch.promote_types(linear.dtype, torch.float32))

    def apply(self, linear: nn.Module, x: Tensor | Fp8Rows, batch: object) -> Tensor:
        if isinstance(x, Fp8Rows):
            return multiplied(x, linear.weight, linear.scale, linear.bias)
        return fp8_linear(x, linear.weight, linear.scale, linear.bias)

    def apply_normed(
        self, linear: nn.Module, x: Tensor, residual: Tensor | None, norm: Norm, batch: object, gate: str | None = None,
        following: nn.Module | None = None,
    ) -> tuple[Any, Tensor]:
        """The gated activation is quantised by the kernel that computes it, where the linear that follows wants codes."""
        out, stream = normed_fp8_linear(
            x, residual, norm.weight, norm.eps, linear.weight, linear.scale, linear.bias, norm_offset=norm.offset
        )
        if gate is None:
            return out, stream
        rows = None
        if following is not None and isinstance(following.scheme, Fp8):
            rows = gated_rows(out, gate, following.weight)
        return (gated_activation(out, gate) if rows is None else rows), stream

    def extra_bytes(self, linear: nn.Module) -> int:
        return 0

    def read_bytes(self, linear: nn.Module, rows: int) -> int:
        return linear.weight.nbytes + linear.scale.nbytes


def layer_scheme(quantization: str, plain: Scheme) -> Scheme:
    """The scheme of the layers' linears; the head keeps `plain`."""
    return Fp8(plain) if quantization == "fp8" else plain

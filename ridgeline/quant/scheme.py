"""How a linear keeps its weight and multiplies by it. Each linear has a scheme object; layers never ask which.

    create   registers the parameters on the linear: zeros where `padded`, else empty
    finish   after loading: whatever layout the product wants
    apply    the product; `batch` is there for schemes that depend on the step's rows

A scheme knows one matrix on one device. It knows neither shards nor checkpoints.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scheme(Protocol):
    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...

    def finish(self, linear: nn.Module) -> None: ...

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor: ...


class Unquantised:
    """The weight as it is, [rows, columns]."""

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        new = torch.zeros if padded else torch.empty
        linear.weight = nn.Parameter(new(rows, columns, dtype=dtype, device=device), requires_grad=False)
        linear.bias = nn.Parameter(new(rows, dtype=dtype, device=device), requires_grad=False) if bias else None

    def finish(self, linear: nn.Module) -> None:
        pass

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

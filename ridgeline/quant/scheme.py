"""How a linear keeps its weight and multiplies by it. Each linear has a scheme object; layers never ask which.

    create        registers the parameters on the linear: zeros where `padded`, else empty
    finish        after loading: whatever layout the product wants
    apply         the product; `batch` is there for schemes that depend on the step's rows
    extra_bytes   what the linear occupies after `finish` beside its parameters

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

    def extra_bytes(self, linear: nn.Module) -> int: ...


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

    def extra_bytes(self, linear: nn.Module) -> int:
        return 0


class PackedFloat32(Unquantised):
    """float32 on the CPU: the weight as it is for one row or two, and a second copy in oneDNN's blocked layout for more.

    The plain layout streams at memory speed where each weight is used once or twice; from four rows on the blocked one
    takes 0.6 to 0.9 of its time (SmolLM2's shapes, x86-64 and Arm). Either alone would lose at one end, so both are kept.
    """

    FEWEST_ROWS = 3                  # that go through the blocked layout
    TYPICAL_ROWS = 16                # that the blocked layout is chosen for

    @staticmethod
    def available() -> bool:
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")

    def finish(self, linear: nn.Module) -> None:
        linear.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), self.TYPICAL_ROWS)

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        if x.shape[0] < self.FEWEST_ROWS:
            return F.linear(x, linear.weight, linear.bias)
        return torch.ops.mkldnn._linear_pointwise(x, linear.packed, linear.bias, "none", [], "")

    def extra_bytes(self, linear: nn.Module) -> int:
        return linear.packed.numel() * linear.packed.element_size()


def unquantised_scheme(device: torch.device, dtype: torch.dtype) -> Scheme:
    """The scheme for weights that keep their dtype, by what the device is good at."""
    if device.type == "cpu" and dtype == torch.float32 and PackedFloat32.available():
        return PackedFloat32()
    return Unquantised()

"""Norms with their weights. They can add the residual as well, so layers pass (x, residual) on.

A linear fuses an RMS norm into its kernel. The others are computed before it: layer norms, and the absence of a norm, which is an
object here so that no layer asks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.distributed.comm import Axis
from ridgeline.distributed.sharding import Shard
from ridgeline.ops.rms_norm import rms_norm
from ridgeline.quant.piece import Piece


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, offset: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def pieces(self) -> dict[str, Piece]:
        return {"weight:": Piece(tuple(self.weight.shape), (slice(None),), self.weight.data, (1.0 - self.offset, 0.1))}

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, weight_offset=self.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)"""
        return rms_norm(x, self.weight, self.eps, residual=residual, weight_offset=self.offset)


class TimesNorm(RMSNorm):
    """Its result is multiplied by a number, behind a linear (HyperCLOVA X)."""

    def __init__(self, size: int, eps: float, factor: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, 0.0, dtype, device)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class BareNorm(RMSNorm):
    """Without weights of its own: ones, which no checkpoint has."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, 0.0, dtype, device)
        del self.weight
        self.register_buffer("weight", torch.ones(size, dtype=dtype, device=device), persistent=False)

    def pieces(self) -> dict[str, Piece]:
        return {}


class LayerNorm(nn.Module):
    """Subtracts the mean as well; with or without a bias."""

    def __init__(
        self, size: int, eps: float, offset: float, dtype: torch.dtype, device: torch.device, bias: bool
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False) if bias else None

    def pieces(self) -> dict[str, Piece]:
        shape = tuple(self.weight.shape)
        found = {"weight:": Piece(shape, (slice(None),), self.weight.data, (1.0 - self.offset, 0.1))}
        if self.bias is not None:
            found["bias:"] = Piece(shape, (slice(None),), self.bias.data, (0.0, 0.02))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """In float32 at least: the weight's offset would be lost in 16 bits."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        if self.offset:
            weight = weight + self.offset
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight, bias, self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return self(stream), stream


class BareLayerNorm(LayerNorm):
    """Without weights of its own."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, 0.0, dtype, device, bias=False)
        del self.weight
        self.register_buffer("weight", torch.ones(size, dtype=dtype, device=device), persistent=False)

    def pieces(self) -> dict[str, Piece]:
        return {}


class NoNorm(nn.Module):
    """Before a linear that reads the residual stream itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return stream, stream


class Times(nn.Module):
    """In the place of a norm behind a linear: its output times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class WideNorm(nn.Module):
    """An RMS norm over all heads of q or of k together, which the ranks divide among them."""

    def __init__(
        self, shard: Shard, copies: int, eps: float, comm: Axis, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`copies`: of each element, on how many ranks it is."""
        super().__init__()
        self.shard, self.copies, self.eps, self.comm = shard, copies, eps, comm
        new = torch.zeros if shard.filled < shard.size else torch.empty
        self.weight = nn.Parameter(new(shard.size, dtype=dtype, device=device), requires_grad=False)

    def pieces(self) -> dict[str, Piece]:
        shard = self.shard
        kept, target = (slice(shard.start, shard.stop),), self.weight.data[: shard.filled]
        return {"weight:": Piece((shard.total,), kept, target, (1.0, 0.1))}

    def forward(self, x: Tensor) -> Tensor:
        if self.comm.size == 1:
            return rms_norm(x.contiguous(), self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.comm.all_reduce(wide.square().sum(-1, keepdim=True)) / (self.copies * self.shard.total)
        return (wide * torch.rsqrt(squares + self.eps) * self.weight).to(x.dtype)

"""RMS norm with its weight. It can add the residual as well, so layers pass (x, residual) on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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

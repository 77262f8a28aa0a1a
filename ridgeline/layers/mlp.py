"""The MLP of a layer, from the residual stream to what is added to it: down(activation(gate(x)) * up(x)), or without a gate.

Every MLP takes (x, residual) and gives (x, residual), norms included, so that a layer does not know which kind it has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.distributed.sharding import even_shard, whole
from ridgeline.layers.batch import Batch
from ridgeline.layers.linear import AnyNorm, GateUpLinear, Linear, Placement, RowLinear
from ridgeline.ops.activation import gated_activation, plain_activation
from ridgeline.quant.piece import Piece


class GatedMLP(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate: int, activation: str, bias: bool, place: Placement, inner_eps: float | None = None,
    ) -> None:
        """With `inner_eps`, what `down` multiplies by has a norm."""
        super().__init__()
        self.activation = activation
        self.gate_up = GateUpLinear(hidden_size, intermediate, bias, place.inside("gate_up"))
        self.down = RowLinear(self.gate_up.rows["gate"], hidden_size, bias, place.inside("down"), inner_eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, norm: AnyNorm, post_norm: nn.Module | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x is to be added to the residual; with residual None, x is the whole stream. The result has the same form."""
        if self.down.inner is None:
            out, stream = self.gate_up.normed_gated(x, residual, norm, self.activation, batch, self.down)
        else:
            out, stream = self.gate_up.normed(x, residual, norm, batch)
            out = gated_activation(out, self.activation)
        return self.down.behind(stream, out, post_norm, batch)

    def of_normed(self, x: Tensor, batch: Batch) -> Tensor:
        """Of rows that are normed already: for layers whose attention reads the same rows."""
        return self.down(gated_activation(self.gate_up(x, batch), self.activation), batch)


class XIELU(nn.Module):
    """An activation with two learned numbers: a parabola for positive x, an exponential for the others. Whole on every rank."""

    BETA, EPS = 0.5, -1e-6           # constants of every model that has it

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (
            nn.Parameter(torch.empty(1, dtype=place.dtype, device=place.device), requires_grad=False) for _ in range(2)
        )

    def pieces(self) -> dict[str, Piece]:
        found = {"alpha_p:": self.alpha_p, "alpha_n:": self.alpha_n}
        return {name: Piece((1,), (slice(None),), parameter.data, (0.2, 0.1)) for name, parameter in found.items()}

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        positive, negative = F.softplus(self.alpha_p.to(wide.dtype)), self.BETA + F.softplus(self.alpha_n.to(wide.dtype))
        below = (torch.expm1(wide.clamp(max=self.EPS)) - wide) * negative
        return (torch.where(wide > 0, positive * wide * wide, below) + self.BETA * wide).to(x.dtype)


class PlainMLP(nn.Module):
    """down(activation(up(x)))"""

    def __init__(self, hidden_size: int, intermediate: int, activation: str, bias: bool, place: Placement) -> None:
        super().__init__()
        self.activation = activation
        self.xielu = XIELU(place) if activation == "xielu" else None
        shard = even_shard(intermediate, place.comm.rank, place.comm.size)
        self.up = Linear({"": shard}, whole(hidden_size), bias, place.inside("up"))
        self.down = RowLinear(shard, hidden_size, bias, place.inside("down"))

    def forward(
        self, x: Tensor, residual: Tensor | None, norm: AnyNorm, post_norm: nn.Module | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        out, stream = self.up.normed(x, residual, norm, batch)
        return self.down.behind(stream, self.activated(out), post_norm, batch)

    def of_normed(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down(self.activated(self.up(x, batch)), batch)

    def activated(self, x: Tensor) -> Tensor:
        return plain_activation(x, self.activation) if self.xielu is None else self.xielu(x)

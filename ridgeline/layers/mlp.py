"""The gated MLP: down(activation(gate(x)) * up(x)), where x is the normed residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.layers.batch import Batch
from ridgeline.layers.linear import GateUpLinear, Placement, RowLinear
from ridgeline.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate: int, activation: str, bias: bool, place: Placement) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = GateUpLinear(hidden_size, intermediate, bias, place.inside("gate_up"))
        self.down = RowLinear(self.gate_up.rows["gate"], hidden_size, bias, place.inside("down"))

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm, batch: Batch) -> tuple[Tensor, Tensor]:
        """(activation(gate) * up of norm(x + residual), x + residual): everything but the down projection."""
        return self.gate_up.normed_gated(x, residual, norm, self.activation, batch, self.down)

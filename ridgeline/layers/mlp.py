"""The gated MLP: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.layers.batch import Batch
from ridgeline.layers.linear import GateUpLinear, Placement, RowLinear
from ridgeline.ops.activation import gated_activation


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate: int, activation: str, bias: bool, place: Placement) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = GateUpLinear(hidden_size, intermediate, bias, place)
        self.down = RowLinear(self.gate_up.rows["gate"], hidden_size, bias, place)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down(gated_activation(self.gate_up(x, batch), self.activation), batch)

"""How a forward pass is launched. Eager is the off version; recorded graphs will be the other one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ridgeline.layers.batch import Batch
from ridgeline.models.decoder import Decoder


class Forward(Protocol):
    def run(self, batch: Batch) -> Tensor:
        """The hidden state of every token of the batch: [T, hidden]."""


class EagerForward:
    def __init__(self, model: Decoder, kv: list[tuple[Tensor, Tensor]]) -> None:
        self._model, self._kv = model, kv

    def run(self, batch: Batch) -> Tensor:
        hidden: Tensor = self._model(batch, self._kv)
        return hidden

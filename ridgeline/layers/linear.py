"""Linear layers that know their shard. A column linear divides its outputs among the ranks, a row linear its inputs.

Fused projections are column linears with several parts, each divided on its own. The shard comes from the mesh's tensor
axis; layers above this file do no rank arithmetic. The linear's scheme decides how a weight is stored and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ridgeline.distributed.comm import ALONE, Axis
from ridgeline.distributed.sharding import Shard, even_shard, head_shards, whole
from ridgeline.layers.batch import Batch
from ridgeline.layers.norm import LayerNorm, NoNorm, RMSNorm, WideNorm
from ridgeline.ops.activation import gated_activation
from ridgeline.ops.cpu.matrix import Matrix
from ridgeline.quant.piece import Piece
from ridgeline.quant.scheme import Scheme

AnyNorm = RMSNorm | LayerNorm | NoNorm


@dataclass(frozen=True, slots=True)
class Placement:
    """What every layer needs to make its parameters."""

    comm: Axis                       # the tensor axis: ranks that have a part of every layer
    schemes: Callable[[str], Scheme]                     # of a linear, by its path in the decoder
    dtype: torch.dtype
    device: torch.device
    path: str = ""
    context: Axis = ALONE            # ranks that divide the KV cache by positions; alone: by heads, as the tensor axis does
    experts: Axis = ALONE            # ranks that divide the experts among them; alone: every rank has a part of each expert

    def inside(self, name: str) -> Placement:
        """For what is inside the layer of that name."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)


def normed_rows(x: Tensor, residual: Tensor | None, norm: AnyNorm) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual)"""
    return (norm(x), x) if residual is None else norm.add(x, residual)


class SharedWeight(Protocol):
    """An embedding, to a tied head."""

    weight: nn.Parameter | None
    matrix: Matrix | None


class Linear(nn.Module):
    """x [T, columns] → [T, rows], for this rank's rows and columns. `rows` lists the fused parts in order."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    matrix: Matrix | None            # of a scheme that keeps packed weights

    def __init__(
        self, rows: Mapping[str, Shard], columns: Shard, bias: bool, place: Placement,
        shared: SharedWeight | None = None,
    ) -> None:
        """`shared` is another layer whose weight to multiply by; that layer loads it."""
        super().__init__()
        self.scheme = place.schemes(place.path)
        self.keeps = self.scheme.keeps_blocks and place.comm.size == 1
        self.rows = rows
        self.columns = columns
        self.shared = (shared,)                          # in a tuple: it is no module of this one
        if shared is not None:
            self.weight, self.bias, self.matrix = shared.weight, None, None
            return
        padded = any(shard.filled < shard.size for shard in (*rows.values(), columns))
        self.scheme.create(
            self, sum(shard.size for shard in rows.values()), columns.size, bias, padded, place.dtype, place.device
        )

    def pieces(self) -> dict[str, Piece]:
        """By "parameter:part"; the part is empty where there is only one."""
        pieces: dict[str, Piece] = {}
        if self.shares:
            return pieces
        first = 0
        for part, rows in self.rows.items():
            found = self.scheme.pieces(self, part, rows, first)
            pieces |= {f"{parameter}:{part}": piece for parameter, piece in found.items()}
            first += rows.size
        return pieces

    @property
    def shares(self) -> bool:
        return self.shared[0] is not None

    @property
    def size(self) -> int:
        """Weights of this rank, padding included."""
        return sum(shard.size for shard in self.rows.values()) * self.columns.size

    def finish(self) -> None:
        shared = self.shared[0]
        if shared is not None:                           # which is finished by now
            self.weight, self.matrix = shared.weight, shared.matrix
        self.scheme.finish(self)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        return self.scheme.apply(self, x, batch)

    def normed(
        self, x: Tensor, residual: Tensor | None, norm: AnyNorm, batch: Batch | None
    ) -> tuple[Tensor, Tensor]:
        """(the linear of norm(x + residual), x + residual). Without a residual, x is the whole residual stream."""
        if not isinstance(norm, RMSNorm):
            rows, stream = normed_rows(x, residual, norm)
            return self(rows, batch), stream
        return self.scheme.apply_normed(self, x, residual, norm, batch)


class GateUpLinear(Linear):
    """gate and up, one after the other."""

    def __init__(self, inputs: int, intermediate: int, bias: bool, place: Placement) -> None:
        shard = even_shard(intermediate, place.comm.rank, place.comm.size)
        super().__init__({"gate": shard, "up": shard}, whole(inputs), bias, place)

    def normed_gated(
        self, x: Tensor, residual: Tensor | None, norm: AnyNorm, activation: str, batch: Batch | None, following: Linear
    ) -> tuple[Tensor, Tensor]:
        """(activation(gate) * up of norm(x + residual), x + residual); the first in the form that `following` takes"""
        if not isinstance(norm, RMSNorm):
            out, stream = self.normed(x, residual, norm, batch)
            return gated_activation(out, activation), stream
        return self.scheme.apply_normed(self, x, residual, norm, batch, activation, following)


class QKVLinear(Linear):
    """q, k and v, one after the other; whole heads, and KV heads repeated where there are fewer of them than ranks."""

    def __init__(
        self, inputs: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool, place: Placement
    ) -> None:
        heads, kv_heads = head_shards(num_heads, num_kv_heads, place.comm.rank, place.comm.size)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        q, kv = heads.scaled(head_dim), kv_heads.scaled(head_dim)
        super().__init__({"q": q, "k": kv, "v": kv}, whole(inputs), bias, place)


class RowLinear(Linear):
    """Inputs divided among the ranks, outputs summed over them."""

    def __init__(self, inputs: Shard, outputs: int, bias: bool, place: Placement, inner_eps: float | None = None) -> None:
        """With `inner_eps`, its input has a norm."""
        super().__init__({"": whole(outputs)}, inputs, bias, place)
        self.comm = place.comm
        self.inner = None if inner_eps is None else WideNorm(inputs, 1, inner_eps, place.comm, place.dtype, place.device)

    def finish(self) -> None:
        if self.bias is not None and self.comm.rank > 0:
            self.bias.zero_()        # the sum over ranks must count it once
        super().finish()

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        return self.comm.all_reduce(self.scheme.apply(self, self._normed(x), batch))

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.inner is None else self.inner(x)

    def onto(self, residual: Tensor, x: Tensor, batch: Batch | None) -> tuple[Tensor, Tensor | None]:
        """(the linear's result, the residual to add it to), or (their sum, None) where one kernel computes it.

        That kernel writes the sum over the residual.
        """
        if self.comm.size == 1 and self.scheme.adds(self, x):
            return self.scheme.apply_onto(self, residual, self._normed(x)), None
        return self(x, batch), residual

    def behind(
        self, residual: Tensor, x: Tensor, post_norm: nn.Module | None, batch: Batch | None
    ) -> tuple[Tensor, Tensor | None]:
        """(x, residual) after this linear and its norm; (stream, None) where it has added its output to the residual already."""
        if post_norm is None:
            return self.onto(residual, x, batch)
        return post_norm(self(x, batch)), residual

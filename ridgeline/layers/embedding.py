"""The vocabulary's two ends: embedding and head, each divided among the ranks by rows of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import even_shard, whole
from ridgeline.layers.batch import Batch
from ridgeline.layers.linear import Linear, Placement
from ridgeline.ops.cpu.matrix import Matrix
from ridgeline.ops.sampling.divided_logits import Division
from ridgeline.ops.vocabulary_ends import embedding
from ridgeline.quant.cpu_packed import CpuPacked, Kept
from ridgeline.quant.piece import Piece


class VocabEmbedding(nn.Module):
    """tokens [T] → [T, hidden], on every rank. Where the scheme keeps packed weights, it is packed, too."""

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, place: Placement) -> None:
        super().__init__()
        self.comm, self.hidden_size = place.comm, hidden_size
        self.shard = even_shard(vocab_size, place.comm.rank, place.comm.size)
        self.matrix: Matrix | None = None
        self.kept: Kept | None = None
        scheme = place.schemes("embed")
        if isinstance(scheme, CpuPacked) and place.comm.size == 1:
            self.kept, self.weight = Kept(hidden_size, scheme.stored), None
        else:
            new = torch.zeros if self.shard.filled < self.shard.size else torch.empty
            self.weight = nn.Parameter(
                new(self.shard.size, hidden_size, dtype=place.dtype, device=place.device), requires_grad=False
            )
        # Rounded to the weights' dtype, as in training.
        self.scale = None if scale == 1.0 else torch.tensor(scale, dtype=place.dtype).item()

    def pieces(self) -> dict[str, Piece]:
        shard, hidden = self.shard, self.hidden_size
        if self.weight is None:
            assert self.kept is not None
            return {"weight:": self.kept.piece("", shard.total)}
        kept = (slice(shard.start, shard.stop), slice(None))
        return {"weight:": Piece((shard.total, hidden), kept, self.weight.data[: shard.filled], (0.0, hidden**-0.5))}

    def finish(self) -> None:
        if self.kept is None:
            return
        loaded, self.kept = self.kept.result([""]), None
        if isinstance(loaded, Matrix):
            self.matrix = loaded
        else:
            self.weight = nn.Parameter(loaded, requires_grad=False)

    @property
    def extra_bytes(self) -> int:
        """Memory beside the parameter."""
        return 0 if self.matrix is None else self.matrix.nbytes

    def forward(self, tokens: Tensor) -> Tensor:
        if self.matrix is not None:
            return self.matrix.rows(tokens, 1.0 if self.scale is None else self.scale)
        if self.comm.size == 1:
            return embedding(self.weight, tokens, self.scale)
        local = tokens - self.shard.start
        mine = (local >= 0) & (local < self.shard.filled)
        x = self.comm.all_reduce(embedding(self.weight, local * mine) * mine.unsqueeze(-1))
        return x if self.scale is None else x * self.scale


class PositionEmbedding(nn.Module):
    """Adds the row of every token's position; whole on every rank."""

    def __init__(self, positions: int, first: int, hidden_size: int, place: Placement) -> None:
        """`first`: the row of position 0."""
        super().__init__()
        self.first = first
        shape = (first + positions, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=place.dtype, device=place.device), requires_grad=False)

    def pieces(self) -> dict[str, Piece]:
        return {"weight:": Piece(tuple(self.weight.shape), (slice(None),), self.weight.data, (0.0, 0.02))}

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.weight[self.first :].index_select(0, positions)


class LMHead(Linear):
    """rows [S, hidden] → logits [S, vocabulary] on every rank. May share the embedding's weight."""

    def __init__(
        self, vocab_size: int, hidden_size: int, tied: VocabEmbedding | None, place: Placement, bias: bool = False
    ) -> None:
        shard = even_shard(vocab_size, place.comm.rank, place.comm.size)
        super().__init__({"": shard}, whole(hidden_size), bias, place, tied)
        self.comm, self.shard = place.comm, shard
        self.division = Division(shard.start, shard.size, shard.total, place.comm.size, place.comm.all_gather)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        logits = self.comm.all_gather(super().forward(x, batch))
        return logits[:, : self.shard.total]

    def here(self, x: Tensor) -> Tensor:
        """Of this rank's ids alone, [S, ids]; they begin at `shard.start`."""
        return super().forward(x, None)[:, : self.shard.filled]

"""The vocabulary's two ends: embedding and head, each divided among the ranks by rows of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import even_shard, whole
from ridgeline.layers.batch import Batch
from ridgeline.layers.linear import Linear, Placement
from ridgeline.ops.vocabulary import embedding
from ridgeline.quant.piece import Piece
from ridgeline.quant.scheme import keep_into


class VocabEmbedding(nn.Module):
    """tokens [T] → [T, hidden], on every rank."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, place: Placement) -> None:
        super().__init__()
        self.comm = place.comm
        self.shard = even_shard(vocab_size, place.comm.rank, place.comm.size)
        new = torch.zeros if self.shard.filled < self.shard.size else torch.empty
        self.weight = nn.Parameter(
            new(self.shard.size, hidden_size, dtype=place.dtype, device=place.device), requires_grad=False
        )
        self.stored: dict[str, tuple[Tensor, str]] | None = None     # packed rows for the scheme of a tied head
        # Rounded to the weights' dtype, as in training.
        self.scale = None if scale == 1.0 else torch.tensor(scale, dtype=place.dtype).item()

    def pieces(self) -> dict[str, Piece]:
        shard, hidden = self.shard, self.weight.shape[1]
        kept = (slice(shard.start, shard.stop), slice(None))
        keep_packed = keep_into(self.stored, "") if self.stored is not None else None
        target = self.weight.data[: shard.filled]
        return {"weight:": Piece((shard.total, hidden), kept, target, (0.0, hidden**-0.5), keep_packed)}

    def forward(self, tokens: Tensor) -> Tensor:
        if self.comm.size == 1:
            return embedding(self.weight, tokens, self.scale)
        local = tokens - self.shard.start
        mine = (local >= 0) & (local < self.shard.filled)
        x = self.comm.all_reduce(embedding(self.weight, local * mine) * mine.unsqueeze(-1))
        return x if self.scale is None else x * self.scale


class LMHead(Linear):
    """rows [S, hidden] → logits [S, vocabulary] on every rank. May share the embedding's weight."""

    def __init__(self, embed: VocabEmbedding, tied: bool, place: Placement) -> None:
        shard, hidden_size = embed.shard, embed.weight.shape[1]
        super().__init__({"": shard}, whole(hidden_size), False, place, shared=embed.weight if tied else None)
        self.comm = place.comm
        self.vocab_size = shard.total
        if tied and self.keeps:
            embed.stored = self.stored

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        logits = self.comm.all_gather(super().forward(x, batch))
        return logits[:, : self.vocab_size]

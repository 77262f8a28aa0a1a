"""Attention of ranks that divide the KV cache by positions, not by heads: each keeps every KV head of its share of a context.

The linears stay divided by heads, as tensor parallelism has them. Before attention the ranks exchange queries (and new keys and
values, of which each rank keeps its own positions), behind it the partial results: every rank gets those of its own heads and
adds them up. A KV head is thus stored once, also where ranks are more than KV heads, or where all heads share one latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.distributed.comm import Axis
from ridgeline.layers.attention import Attention, AttentionSpec
from ridgeline.layers.batch import Batch
from ridgeline.layers.kv import LayerKV
from ridgeline.layers.latent_layer import LatentAttention, LatentSizes
from ridgeline.layers.linear import Placement
from ridgeline.layers.norm import RMSNorm
from ridgeline.ops.attention.kv_write import kv_write
from ridgeline.ops.attention.partial_attention import merged, partial_attention, slots_here
from ridgeline.ops.attention.qkv_write import rotary_write
from ridgeline.ops.latent.latent_write import latent_write


def attend(
    axis: Axis, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, group: int, sinks: Tensor | None = None,
    *, scale: float, window: int | None = None, softcap: float | None = None,
) -> Tensor:
    """Queries [T, H, D] of this rank's heads over the whole context → [T, H, DV]."""
    heads = q.shape[1]
    everyone = axis.all_gather(q.flatten(1)).unflatten(-1, (axis.size * heads, -1))
    found = batch.groups[group]
    out, total = partial_attention(
        everyone, k_pages, v_pages, found.block_table, batch.query_start_host or batch.query_start.tolist(),
        batch.kv_len_host or batch.kv_len.tolist(), rank=axis.rank, ranks=axis.size, scale=scale, window=window,
        softcap=softcap, table_rows=batch.table_rows,
    )
    both = torch.cat((out, total.unsqueeze(-1)), dim=-1).unflatten(1, (axis.size, heads)).transpose(0, 1)
    parts = axis.all_to_all(both)                        # [ranks, T, H, DV + 1]: of this rank's heads, from every rank
    return merged(parts[..., :-1], parts[..., -1], sinks).to(q.dtype)


class ContextAttention(Attention):
    """The ranks that divide the context are those that divide the heads."""

    def __init__(
        self, spec: AttentionSpec, norms: tuple[RMSNorm, RMSNorm] | None, place: Placement, wide_eps: float | None = None
    ) -> None:
        super().__init__(spec, norms, place, wide_eps)
        self.axis = place.context

    def forward(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        return self.read(self.write(qkv, batch, kv), batch, kv)

    def write(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        spec, axis, kv_heads = self.spec, self.axis, self.qkv.num_kv_heads
        fresh = qkv.new_empty((2, len(qkv), 1, kv_heads, spec.head_dim))     # pages of one token each
        q = rotary_write(
            self._prepared(qkv, batch), batch.positions, torch.arange(len(qkv), device=qkv.device), spec.rotation, fresh[0],
            fresh[1], heads=self.qkv.num_heads, kv_heads=kv_heads, **self._norms(),
        )
        everyone = axis.all_gather(fresh.transpose(0, 1).flatten(1)).unflatten(-1, (axis.size, 2, kv_heads, spec.head_dim))
        copies = max(1, axis.size // spec.num_kv_heads)                      # ranks that have computed the same KV head
        k, v = everyone[:, ::copies].transpose(1, 2).flatten(2, 3).unbind(1)
        slots = slots_here(batch.groups[spec.group].slots, kv.k.shape[1], axis.rank, axis.size)
        kv_write(k.to(kv.k.dtype).contiguous(), v.to(kv.v.dtype).contiguous(), kv.k, kv.v, slots)
        return q

    def read(self, q: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        spec = self.spec
        return attend(
            self.axis, self._late(q), kv.k, kv.v, batch, spec.group, None if self.sinks is None else self.sinks.weight,
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
        ).flatten(1)


class ContextLatentAttention(LatentAttention):
    """Every rank computes the same latents and keeps its own; queries are absorbed, so that attention reads latents alone."""

    def __init__(self, spec: AttentionSpec, sizes: LatentSizes, place: Placement) -> None:
        super().__init__(spec, sizes, place)
        self.axis = place.context

    def forward(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        return self.read(self.write(qkv, batch, kv), batch, kv)

    def write(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        sizes, spec = self.sizes, self.spec
        q, latent = self._parts(qkv, batch)
        slots = slots_here(batch.groups[spec.group].slots, kv.k.shape[1], self.axis.rank, self.axis.size)
        return latent_write(
            q, latent, self.kv_norm.weight, batch.positions, slots, spec.rotation, kv.k, eps=sizes.eps,
            interleaved=sizes.interleaved,
        )

    def read(self, q: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        spec, sizes = self.spec, self.sizes
        down, up = self._kv_up.split((sizes.nope, sizes.value), dim=1)       # [heads, nope or value, rank]
        narrow, turned = q.split((sizes.nope, sizes.rope), dim=-1)
        absorbed = torch.cat((torch.einsum("thn,hnr->thr", narrow, down), turned), dim=-1)
        out = attend(self.axis, absorbed, kv.k, kv.k[..., : sizes.kv_rank], batch, spec.group, scale=spec.scale)
        return torch.einsum("thr,hvr->thv", out, up).flatten(1)

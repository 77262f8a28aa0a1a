"""Latent attention (MLA) over the paged KV cache: one compressed vector per token, which every head reads.

Each rank keeps the whole latent and divides the heads: the linears that compress are on every rank, those that widen are
divided. What differs between few and many queries is decided below, in the op.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard, head_shards, whole
from ridgeline.layers.attention import AttentionSpec
from ridgeline.layers.batch import Batch
from ridgeline.layers.kv import LayerKV
from ridgeline.layers.linear import Linear, Placement, RowLinear
from ridgeline.layers.norm import RMSNorm
from ridgeline.ops.latent.fused_latent import joined, latent_decode
from ridgeline.ops.latent.latent_attention import latent_attention
from ridgeline.ops.latent.latent_write import latent_write
from ridgeline.quant.scheme import Unquantised


@dataclass(frozen=True, slots=True)
class LatentSizes:
    query_rank: int                  # 0: queries are not compressed
    kv_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool
    eps: float                       # of the norms on compressed vectors


class LatentAttention(nn.Module):
    def __init__(self, spec: AttentionSpec, sizes: LatentSizes, place: Placement) -> None:
        super().__init__()
        self.spec, self.sizes = spec, sizes
        heads, _ = head_shards(spec.num_heads, 1, place.comm.rank, place.comm.size)
        self.num_heads = heads.size
        queries = heads.scaled(sizes.nope + sizes.rope)
        first = {"q_down": whole(sizes.query_rank)} if sizes.query_rank else {"q": queries}
        rows: dict[str, Shard] = {**first, "kv_down": whole(sizes.kv_rank + sizes.rope)}
        self.qkv = Linear(rows, whole(spec.hidden_size), spec.qkv_bias, place.inside("qkv"))
        self.q_norm: RMSNorm | None = None
        self.q_up: Linear | None = None
        if sizes.query_rank:
            self.q_norm = RMSNorm(sizes.query_rank, sizes.eps, 0.0, place.dtype, place.device)
            self.q_up = Linear({"": queries}, whole(sizes.query_rank), False, place.inside("q_up"))
        self.kv_norm = RMSNorm(sizes.kv_rank, sizes.eps, 0.0, place.dtype, place.device)
        # Multiplied by in two parts, by heads: plain numbers, whatever the other linears are.
        plain = replace(place.inside("kv_up"), schemes=lambda path: Unquantised())
        self.kv_up = Linear({"": heads.scaled(sizes.nope + sizes.value)}, whole(sizes.kv_rank), False, plain)
        self.output = RowLinear(heads.scaled(sizes.value), spec.hidden_size, spec.output_bias, place.inside("output"))

    def forward(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        """From the projection to the attention output [T, heads * value]; writes the latents to the cache."""
        if batch.work is None or not joined(batch.work, len(batch.kv_len), len(qkv)):
            return self.read(self.write(qkv, batch, kv), batch, kv)
        sizes, spec = self.sizes, self.spec
        group = batch.groups[spec.group]
        q, latent = self._parts(qkv, batch)
        out = latent_decode(
            q, latent, self.kv_norm.weight, batch.positions, group.slots, spec.rotation, kv.k, self._kv_up, group.block_table,
            batch.query_start, batch.kv_len, eps=sizes.eps, interleaved=sizes.interleaved, scale=spec.scale, nope=sizes.nope,
            cache_scale=kv.k_scale, query_start_host=batch.query_start_host, kv_len_host=batch.kv_len_host,
            table_rows=batch.table_rows, work=batch.work, shares=group.shares, workspace=batch.workspace,
        )
        return out.flatten(1)

    def _parts(self, qkv: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(queries [T, heads, nope + rope], latents with the shared key [T, rank + rope])"""
        width = self.sizes.kv_rank + self.sizes.rope
        q, latent = qkv[:, :-width], qkv[:, -width:]
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q), batch)
        if self.spec.temperature is not None:            # before the rotation, which it does not change
            q = (q * self.spec.temperature.index_select(0, batch.positions)[:, None]).to(q.dtype)
        return q.unflatten(-1, (self.num_heads, -1)), latent

    @property
    def _kv_up(self) -> Tensor:
        """[heads, nope + value, rank]"""
        assert self.kv_up.weight is not None             # its scheme keeps numbers
        return self.kv_up.weight.view(self.num_heads, self.sizes.nope + self.sizes.value, self.sizes.kv_rank)

    def write(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        """From the projection [T, queries (compressed or not) + latent]: writes the latents to the cache, returns q
        [T, heads, nope + rope], rotated."""
        sizes, spec = self.sizes, self.spec
        q, latent = self._parts(qkv, batch)
        return latent_write(
            q, latent, self.kv_norm.weight, batch.positions,
            batch.groups[spec.group].slots, spec.rotation, kv.k, eps=sizes.eps, interleaved=sizes.interleaved,
            cache_scale=kv.k_scale,
        )

    def read(self, q: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        """The attention output of the queries over the cache, [T, heads * value]"""
        spec, sizes = self.spec, self.sizes
        group = batch.groups[spec.group]
        out = latent_attention(
            q, kv.k, self._kv_up, group.block_table, batch.query_start, batch.kv_len,
            query_start_host=batch.query_start_host, kv_len_host=batch.kv_len_host, scale=spec.scale, nope=sizes.nope,
            slots=group.slots, table_rows=batch.table_rows, work=batch.work, shares=group.shares, workspace=batch.workspace,
            cache_scale=kv.k_scale,
        )
        return out.flatten(1)

"""Attention over the paged KV cache: project, norm, rotate, write K and V, attend, project back.

One path for prefill chunks and decode: the batch says which token has which position. What differs between layers
(window, rope, KV group) is fixed when the layer is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.distributed.sharding import Shard
from ridgeline.layers.batch import Batch
from ridgeline.layers.kv import LayerKV
from ridgeline.layers.linear import Placement, QKVLinear, RowLinear
from ridgeline.layers.norm import RMSNorm, WideNorm
from ridgeline.ops.attention.fused_decode import decode_attention, joined
from ridgeline.ops.attention.paged_attention import paged_attention
from ridgeline.ops.attention.qkv_write import rotary_write
from ridgeline.quant.piece import Piece


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """One layer's attention, in numbers."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    scale: float
    softcap: float | None
    window: int | None               # negative: chunks of that many positions
    group: int                       # the layer's KV group: which block table and slots of the batch it uses
    rotation: Tensor                 # the table of its rope, shared between layers
    sinks: bool = False              # every head has a score without a value, beside those of the keys
    temperature: Tensor | None = None    # [positions]: multiplies the queries of each position
    late_norms: bool = False         # the norms of q and k come behind the rotation
    clip: float | None = None        # limits q, k and v
    inner_eps: float | None = None   # the input of the output matrix has a norm


class Sinks(nn.Module):
    """One number for every query head of this rank."""

    def __init__(self, rows: Shard, head_dim: int, place: Placement) -> None:
        super().__init__()
        self.rows, self.head_dim = rows, head_dim
        dtype = torch.promote_types(place.dtype, torch.float32)
        self.weight = nn.Parameter(torch.zeros(rows.size // head_dim, dtype=dtype, device=place.device), requires_grad=False)

    def pieces(self) -> dict[str, Piece]:
        total, start, stop = (each // self.head_dim for each in (self.rows.total, self.rows.start, self.rows.stop))
        return {"weight:": Piece((total,), (slice(start, stop),), self.weight.data[: stop - start], (0.0, 1.0))}


class Attention(nn.Module):
    def __init__(
        self, spec: AttentionSpec, norms: tuple[RMSNorm, RMSNorm] | None, place: Placement, wide_eps: float | None = None
    ) -> None:
        """`norms` are for q and k, on each head; with `wide_eps`, they have one norm each over all heads."""
        super().__init__()
        self.spec = spec
        self.qkv = QKVLinear(
            spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qkv_bias,
            place.inside("qkv"),
        )
        self.output = RowLinear(self.qkv.rows["q"], spec.hidden_size, spec.output_bias, place.inside("output"), spec.inner_eps)
        self.q_norm: RMSNorm | WideNorm | None
        self.k_norm: RMSNorm | WideNorm | None
        self.q_norm, self.k_norm = norms or (None, None)
        if wide_eps is not None:
            comm, copies = place.comm, max(1, place.comm.size // spec.num_kv_heads)
            self.q_norm = WideNorm(self.qkv.rows["q"], 1, wide_eps, comm, place.dtype, place.device)
            self.k_norm = WideNorm(self.qkv.rows["k"], copies, wide_eps, comm, place.dtype, place.device)

        if spec.late_norms:
            self.register_buffer("ones", torch.ones(spec.head_dim, dtype=place.dtype, device=place.device), persistent=False)
        self.sinks = Sinks(self.qkv.rows["q"], spec.head_dim, place) if spec.sinks else None

    @property
    def num_heads(self) -> int:
        """On this rank."""
        return self.qkv.num_heads

    def forward(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        """From the projection [T, (heads + 2 KV heads) * dim] to the attention output [T, heads * dim]; writes K and V to the
        cache."""
        spec = self.spec
        group = batch.groups[spec.group]
        if batch.work is None or spec.late_norms or not joined(batch.work, len(qkv), group.prefix):
            return self.read(self.write(qkv, batch, kv), batch, kv)
        qkv = self._prepared(qkv, batch)
        out = decode_attention(
            qkv, batch.positions, group.slots, spec.rotation, kv.k, kv.v, group.block_table, batch.query_start,
            batch.kv_len, heads=self.qkv.num_heads, kv_heads=self.qkv.num_kv_heads,
            query_start_host=batch.query_start_host, kv_len_host=batch.kv_len_host,
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
            table_rows=batch.table_rows, work=batch.work, shares=group.shares, workspace=batch.workspace,
            k_scale=kv.k_scale, v_scale=kv.v_scale, sinks=None if self.sinks is None else self.sinks.weight, **self._norms(),
        )
        return out.flatten(1)

    def _norms(self) -> dict[str, Any]:
        if not isinstance(self.q_norm, RMSNorm) or not isinstance(self.k_norm, RMSNorm):
            return {}
        weights = (self.ones, self.ones) if self.spec.late_norms else (self.q_norm.weight, self.k_norm.weight)
        return {"q_norm": weights[0], "k_norm": weights[1], "eps": self.q_norm.eps, "norm_offset": self.q_norm.offset}

    def _late(self, q: Tensor) -> Tensor:
        """Norms behind the rotation: it changes no length, so dividing by the length comes before it as elsewhere. The weights
        of both norms multiply the queries, which gives the same scores, and keys are kept without them."""
        if not self.spec.late_norms or self.q_norm is None or self.k_norm is None:
            return q
        wide = torch.promote_types(q.dtype, torch.float32)
        return (q.to(wide) * (self.q_norm.weight.to(wide) * self.k_norm.weight)).to(q.dtype)

    def _prepared(self, qkv: Tensor, batch: Batch) -> Tensor:
        """What changes the projection before anything else reads it: its limit, norms over all heads, and the queries'
        temperature."""
        if self.spec.clip is not None:
            qkv = qkv.clamp(-self.spec.clip, self.spec.clip)
        qkv = self._wide_normed(qkv)
        if self.spec.temperature is not None:
            size = self.qkv.rows["q"].size
            queries = qkv[:, :size] * self.spec.temperature.index_select(0, batch.positions)[:, None]
            qkv = torch.cat((queries.to(qkv.dtype), qkv[:, size:]), dim=-1)
        return qkv

    def _wide_normed(self, qkv: Tensor) -> Tensor:
        if not isinstance(self.q_norm, WideNorm) or not isinstance(self.k_norm, WideNorm):
            return qkv
        queries, keys = self.qkv.rows["q"].size, self.qkv.rows["k"].size
        q, k, v = qkv.split((queries, keys, keys), dim=-1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)

    def write(self, qkv: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        """From the projection [T, (heads + 2 KV heads) * dim]: writes K and V to the cache, returns q [T, heads, dim]."""
        spec = self.spec
        return rotary_write(
            self._prepared(qkv, batch), batch.positions, batch.groups[spec.group].slots, spec.rotation, kv.k, kv.v,
            heads=self.qkv.num_heads, kv_heads=self.qkv.num_kv_heads, k_scale=kv.k_scale, v_scale=kv.v_scale,
            **self._norms(),
        )

    def read(self, q: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        """The attention output of the queries over the cache, [T, heads * dim]"""
        spec = self.spec
        group = batch.groups[spec.group]
        out = paged_attention(
            self._late(q), kv.k, kv.v, group.block_table, batch.query_start, batch.kv_len,
            query_start_host=batch.query_start_host, kv_len_host=batch.kv_len_host,
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
            table_rows=batch.table_rows, work=batch.work, prefix=group.prefix, shares=group.shares,
            query_tiles=batch.query_tiles, workspace=batch.workspace,
            k_scale=kv.k_scale, v_scale=kv.v_scale, sinks=None if self.sinks is None else self.sinks.weight,
            **({"own_kernel": batch.own_kernel} if batch.own_kernel else {}),
        )
        return out.flatten(1)

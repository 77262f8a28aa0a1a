"""Attention over the paged KV cache: project, norm, rotate, write K and V, attend, project back.

One path for prefill chunks, decode and draft verification: the batch says which token sits where. Everything that
differs between layers (window, rope, group) is fixed when the layer is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ridgeline.layers.batch import Batch
from ridgeline.layers.linear import Placement, QKVLinear, RowLinear
from ridgeline.layers.norm import RMSNorm
from ridgeline.ops.kv_write import kv_write
from ridgeline.ops.paged_attention import paged_attention
from ridgeline.ops.rotary import rotary


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
    window: int | None
    group: int                       # the layer's KV group: which block table and slots of the batch it uses
    rotation: Tensor                 # the table of its rope, shared between layers


class Attention(nn.Module):
    def __init__(self, spec: AttentionSpec, norms: tuple[RMSNorm, RMSNorm] | None, place: Placement) -> None:
        """`norms` are for q and k, on each head."""
        super().__init__()
        self.spec = spec
        self.qkv = QKVLinear(
            spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qkv_bias, place
        )
        self.output = RowLinear(self.qkv.rows["q"], spec.hidden_size, spec.output_bias, place)
        self.q_norm: RMSNorm | None
        self.k_norm: RMSNorm | None
        self.q_norm, self.k_norm = norms or (None, None)
        self.heads = (self.qkv.num_heads, self.qkv.num_kv_heads, self.qkv.num_kv_heads)

    def forward(self, x: Tensor, batch: Batch, kv: tuple[Tensor, Tensor]) -> Tensor:
        spec = self.spec
        group = batch.groups[spec.group]
        k_cache, v_cache = kv
        num_tokens = x.shape[0]
        q, k, v = self.qkv(x, batch).view(num_tokens, -1, spec.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotary(q, k, batch.positions, spec.rotation)
        kv_write(k, v, k_cache, v_cache, group.slots)
        out = paged_attention(
            q, k_cache, v_cache, group.block_table, batch.query_start, batch.kv_len,
            query_start_host=batch.query_start_host, kv_len_host=batch.kv_len_host,
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
        )
        return self.output(out.flatten(1), batch)

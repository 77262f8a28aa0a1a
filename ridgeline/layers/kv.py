"""One layer's pages of the KV cache, as attention reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.ops.attention.paged_attention import KVFormat


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    k: Tensor                        # [blocks, block_size, kv_heads, head_dim]
    v: Tensor
    format: KVFormat | None = None   # of a cache narrower than the activations, with its scales
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

"""One layer's pages of the KV cache, as attention reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    k: Tensor                        # [blocks, block_size, kv_heads, head_dim]
    v: Tensor
    k_scale: Tensor | None = None    # float32 [blocks, block_size, kv_heads] of quantised keys; calibrated: with strides of 0
    v_scale: Tensor | None = None

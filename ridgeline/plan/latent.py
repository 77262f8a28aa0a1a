"""The cost of multi-head latent attention (MLA, DeepSeek), for planning: one compressed vector per token and layer in the cache.

    cache     kv_rank + rope elements a token and layer, whatever the number of heads; every rank keeps all of it
    decodes   compute against the latent itself: 2 (2 · kv_rank + rope) FLOPs per head, query and key
    prompts   expand K and V first (part of the matrix products) and then need 2 (nope + rope + value)

The cost model counts a dense decoder whose heads are `value` wide; here its K, V and attention are replaced by the latent's. The
expansion of earlier chunks of a long prompt is not counted. The engine does not run such models yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import ModelError
from ridgeline.roofline.step_cost import DecoderShape, OpCost, StepCost, StepCounts

FEW_QUERIES = 16                     # of a row: up to here attention computes against the latent itself
_SOFTMAX = 5                         # FLOPs per pair beside the products, as sizes/op_costs.py counts them


@dataclass(frozen=True, slots=True)
class Latent:
    kv_rank: int
    rope: int                        # rotated elements: of every query head, and of the one key that all heads share
    nope: int                        # elements of a head that are not rotated
    value: int                       # of a head
    query_rank: int = 0              # 0: queries are not compressed

    @property
    def width(self) -> int:
        """Elements in the cache, per token and layer."""
        return self.kv_rank + self.rope

    def down(self, hidden: int) -> int:
        """Elements of a layer's matrices that compress: every rank has them."""
        return hidden * (self.query_rank + self.width)

    def up(self, hidden: int, heads: int) -> int:
        """… and of those that widen, which have heads to divide."""
        queries = (self.query_rank or hidden) * heads * (self.nope + self.rope)
        return queries + self.kv_rank * heads * (self.nope + self.value)

    def parameters(self, hidden: int, heads: int) -> int:
        """Of a layer's attention, with its output and the norms between the two steps."""
        return self.down(hidden) + self.up(hidden, heads) + heads * self.value * hidden + self.query_rank + self.kv_rank

    def cost(self, cost: StepCost, shape: DecoderShape, counts: StepCounts) -> StepCost:
        """A dense decoder's step with this attention. The output projection is the dense one's: its heads are as wide."""
        layers, tokens, heads, size = shape.layers, counts.tokens, shape.heads, shape.activation_bytes
        elements = self.down(shape.hidden) + self.up(shape.hidden, heads)
        between = shape.hidden + 2 * (self.query_rank + self.width) + heads * (2 * self.nope + self.rope + self.value)
        kernels = 4 if self.query_rank else 3            # down, queries up, and K and V of the latent
        products = OpCost(
            kernels * layers, 2 * layers * tokens * elements, round(layers * elements * shape.weight_bytes), 0, 0,
            layers * tokens * between * size,
        )
        near = 2 * (2 * self.kv_rank + self.rope) + _SOFTMAX
        wide = 2 * (self.nope + self.rope + self.value) + _SOFTMAX
        few, many = counts.few_pairs, counts.full.pairs - counts.few_pairs
        pairs = (layers - 1) * (few * near + many * wide) + counts.last.pairs * near
        keys = (layers - 1) * (counts.full.keys - counts.shared) + max(0, counts.last.keys - counts.shared)
        behind = (layers - 1) * tokens + counts.last_tokens
        attention = OpCost(
            layers - 1 + bool(counts.last_tokens), heads * pairs, 0, round(keys * self.width * shape.kv_bytes), 0,
            behind * heads * (self.nope + self.rope + self.value) * size,
        )
        turned = cost.ops["rotary_write"]
        write = OpCost(turned.calls, turned.flops, 0, 0, round(layers * tokens * self.width * shape.kv_bytes),
                       2 * layers * tokens * (heads + 1) * self.rope * size)
        return StepCost(
            {**cost.ops, "qkv": products, "attention": attention, "rotary_write": write}, cost.collectives, cost.collective_bytes
        )


def read_latent(raw: Mapping[str, Any], name: str) -> Latent | None:
    """From the fields of a config.json, as DeepSeek spells them; None: K and V of every head are kept."""
    if not raw.get("kv_lora_rank"):
        return None
    sizes: dict[str, int] = {}
    for each in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        size = raw.get(each)
        if not isinstance(size, int) or size < 1:
            raise ModelError(f"{name}: latent attention needs {each}, got {size!r}")
        sizes[each] = size
    return Latent(
        sizes["kv_lora_rank"], sizes["qk_rope_head_dim"], sizes["qk_nope_head_dim"], sizes["v_head_dim"],
        query_rank=raw.get("q_lora_rank") or 0,
    )

"""Multi-head latent attention (MLA, DeepSeek) as facts: sizes, and how a config.json or a GGUF file spells them.

One compressed vector per token and layer is kept, whatever the number of heads: `kv_rank` elements that a matrix widens to
every head's key and value, and `rope` rotated elements that are a part of every head's key. Queries may be compressed too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.errors import ModelError
from ridgeline.models.config_fields import MAX_HEAD_DIM, MAX_HIDDEN, Fields

# Of the norms between the two steps of a compression. Not a field of config.json: every implementation has it as a constant.
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Latent:
    kv_rank: int
    rope: int                        # rotated elements: of every query head, and of the one key that all heads share
    nope: int                        # elements of a head that are not rotated
    value: int                       # of a head
    query_rank: int = 0              # 0: queries are not compressed
    interleaved: bool = True         # elements that rotate together lie side by side, not half of `rope` apart

    @property
    def width(self) -> int:
        """Elements in the cache, per token and layer."""
        return self.kv_rank + self.rope

    @property
    def head(self) -> int:
        """Elements of a head's query."""
        return self.nope + self.rope

    def linears(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's matrices but for the output; `kv_up` is multiplied by in two parts, per head."""
        queries = heads * self.head
        found = {"qkv": ((self.query_rank or queries) + self.width, hidden)}
        if self.query_rank:
            found["q_up"] = (queries, self.query_rank)
        return found | {"kv_up": (heads * (self.nope + self.value), self.kv_rank)}

    def down(self, hidden: int) -> int:
        """Elements of a layer's matrices that compress: every rank has them."""
        return hidden * (self.query_rank + self.width)

    def up(self, hidden: int, heads: int) -> int:
        """… and of those that widen, which have heads to divide."""
        queries = (self.query_rank or hidden) * heads * self.head
        return queries + self.kv_rank * heads * (self.nope + self.value)

    def parameters(self, hidden: int, heads: int) -> int:
        """Of a layer's attention, with its output and the norms between the two steps."""
        return self.down(hidden) + self.up(hidden, heads) + heads * self.value * hidden + self.query_rank + self.kv_rank


def read_latent(fields: Fields, interleaved: bool) -> Latent:
    """From a config.json, as DeepSeek spells it. `interleaved`: where it does not say."""
    for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        if fields.get(name) is None:
            raise ModelError(f"{fields.where}: latent attention needs {name}, got None")
    rope = fields.integer("qk_rope_head_dim", maximum=MAX_HEAD_DIM)
    if rope % 2:
        raise ModelError(f"{fields.where}: qk_rope_head_dim must be even, got {rope}")
    rank = fields.integer("q_lora_rank", maximum=MAX_HIDDEN) if fields.get("q_lora_rank") else 0
    if fields.flag("attention_bias") and not rank:
        raise ModelError(f"{fields.where}: attention_bias with latent attention needs q_lora_rank: without it the bias is "
                         "not supported")
    return Latent(
        fields.integer("kv_lora_rank", maximum=MAX_HIDDEN), rope, fields.integer("qk_nope_head_dim", maximum=MAX_HEAD_DIM),
        fields.integer("v_head_dim", maximum=MAX_HEAD_DIM), rank, fields.flag("rope_interleave", interleaved),
    )


def gguf_latent(fields: Fields, interleaved: bool, key: Callable[[str], str]) -> Latent:
    """From a GGUF file's metadata. Newer files have the sizes of a head under names of their own, and those of the latent under
    the usual ones; older files have those of a head there."""

    plain = fields.integer(key("embedding_length")) // fields.integer(key("attention.head_count"))

    def of_head(name: str) -> int:
        usual = key(f"attention.{name}_length")
        return fields.integer(usual + "_mla" if fields.get(usual + "_mla") else usual, plain, maximum=MAX_HEAD_DIM)

    rope, head = fields.integer(key("rope.dimension_count"), maximum=MAX_HEAD_DIM), of_head("key")
    if rope % 2 or rope >= head:
        raise ModelError(f"{fields.where}: {key('rope.dimension_count')} must be even and less than {head}, got {rope}")
    rank = fields.integer(key("attention.q_lora_rank"), 0, minimum=0, maximum=MAX_HIDDEN)
    kv_rank = fields.integer(key("attention.kv_lora_rank"), maximum=MAX_HIDDEN)
    return Latent(kv_rank, rope, head - rope, of_head("value"), rank, interleaved)

"""What the cost of a step depends on: a model's shape with the precision of its tensors (DecoderShape), and the sums over the
step's rows (StepCounts). step_cost.py counts with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ridgeline.distributed.sharding import even_shard, head_shards
from ridgeline.models.expert_config import Experts
from ridgeline.models.latent_config import Latent
from ridgeline.models.model_config import ModelConfig
from ridgeline.sizes.kv_format import KVFormat
from ridgeline.sizes.latent_costs import FEW_QUERIES
from ridgeline.sizes.op_costs import DTYPE_BYTES, Attended, Rows, kv_bytes

MLP = ("gate_up", "down")


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder, as far as its cost goes. Bytes per element may be fractions (packed formats with
    their scales)."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    weight_bytes: float = 2.0        # per element of the layers' linears …
    kv_bytes: float = 2.0            # … of the cache: the mean of K and V, scales included, and of the layers without a window
    window_kv_bytes: float | None = None                 # … of those with one; None: the same
    activation_bytes: int = 2        # … of everything between ops, norms and biases
    window: int | None = None        # of `window_layers` layers; the others see everything
    window_layers: int = 0
    block_size: int = 16
    head_bytes: float | None = None  # per element of the head; as the linears'
    embedding_bytes: float | None = None                 # as the head's
    rotary_dim: int | None = None    # the whole head
    activation: str = "silu"
    softcap: float | None = None     # of attention scores
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    last_windowed: bool = False      # has the last layer a window?
    ranks: int = 1                   # this is the share of one of them
    latent: Latent | None = None     # latent attention: `head_dim` is that of queries
    gated: bool = True               # the MLP has a gate
    norms: int = 2                   # of a layer, before attention and MLP
    experts: Experts | None = None   # in the place of most MLPs; `intermediate` is the width of the others
    expert_bytes: float | None = None                    # per element of the experts; as the linears'

    @property
    def linear_weights(self) -> int:
        """Elements of the layers' matrices; embedding, head and experts are not among them."""
        dense = sum(inputs * outputs for inputs, outputs, _ in self.linears.values())
        dense += sum(inputs * outputs for inputs, outputs in self.latent_linears)
        return self.layers * dense + sum(
            count * inputs * outputs for name in MLP for count, _, inputs, outputs, _ in self.mlps(name)
        )

    @property
    def active_weights(self) -> int:
        """Elements of the layers' matrices that one token computes with, its experts among them."""
        experts = self.experts
        mixed = 0 if experts is None else (self.layers - experts.dense_layers) * experts.used * 3 * self.hidden * experts.width
        return self.linear_weights + mixed

    @property
    def expert_size(self) -> float:
        """Bytes of one expert."""
        if self.experts is None:
            return 0.0
        each = self.weight_bytes if self.expert_bytes is None else self.expert_bytes
        width, bias = self.experts.width, self.experts.bias
        return 3 * self.hidden * width * each + (2 * width + self.hidden) * self.activation_bytes * bias

    def expected_reads(self, tokens: int, last: int) -> float:
        """Experts of all layers that a step reads, if routing is even; `last`: tokens that go on in the last layer."""
        if self.experts is None:
            return 0.0
        mixed = self.layers - self.experts.dense_layers
        is_last = self.layers - 1 not in self.experts.dense
        return (mixed - is_last) * self.experts.visited(tokens) + is_last * self.experts.visited(last)

    @property
    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Inputs, outputs and bias of the linears that every layer has: those of attention."""
        latent, value = self.latent, self.head_dim
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        if latent is not None:
            outputs, value = (latent.query_rank or self.heads * latent.head) + latent.width, latent.value
        return {
            "qkv": (self.hidden, outputs, self.qkv_bias),
            "output": (self.heads * value, self.hidden, self.output_bias),
        }

    def mlps(self, name: str) -> list[tuple[int, bool, int, int, bool]]:
        """Of "gate_up" or "down": layers that have such a linear, whether the last is among them, inputs, outputs, bias. A router
        and the gate of a shared expert count with gate_up."""
        hidden, experts = self.hidden, self.experts

        def linears(width: int, count: int, last: bool, bias: bool) -> list[tuple[int, bool, int, int, bool]]:
            size = (hidden, (1 + self.gated) * width) if name == "gate_up" else (width, hidden)
            return [(count, last, *size, bias)] if count and width else []

        if experts is None:
            return linears(self.intermediate, self.layers, True, self.mlp_bias)
        mixed, last = self.layers - experts.dense_layers, self.layers - 1 not in experts.dense
        found = linears(self.intermediate, experts.dense_layers, not last, self.mlp_bias)
        found += linears(experts.shared, mixed, last, False)
        if name == "gate_up":
            found.append((mixed, last, hidden, experts.count, experts.router_bias))
            found += [(mixed, last, hidden, 1, False)] * experts.shared_gate
        return found

    @property
    def latent_linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of what widens: queries, and last keys and values, which are always plain numbers."""
        latent = self.latent
        if latent is None:
            return []
        queries = [(latent.query_rank, self.heads * latent.head)] if latent.query_rank else []
        return [*queries, (latent.kv_rank, self.heads * (latent.nope + latent.value))]

    @property
    def head_element_bytes(self) -> float:
        return self.weight_bytes if self.head_bytes is None else self.head_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        if self.latent is not None:
            return round(self.layers * self.latent.width * self.kv_bytes)
        return kv_bytes(
            tokens=1, layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, element_bytes=self.mean_kv_bytes
        )

    def kv_bytes_of(self, window: int | None) -> float:
        """Of layers with this window."""
        return self.kv_bytes if window is None or self.window_kv_bytes is None else self.window_kv_bytes

    @property
    def mean_kv_bytes(self) -> float:
        """Of all layers."""
        windowed = 0.0 if self.window_kv_bytes is None else self.window_kv_bytes - self.kv_bytes
        return self.kv_bytes + windowed * self.window_layers / self.layers

    def shard(self, ranks: int) -> DecoderShape:
        """One rank's share under tensor parallelism, the fullest where it does not divide."""
        query, key_value = head_shards(self.heads, self.kv_heads, 0, ranks)
        return replace(
            self, heads=query.size, kv_heads=key_value.size, ranks=self.ranks * ranks,
            experts=sharded(self.experts, ranks),
            intermediate=even_shard(self.intermediate, 0, ranks).size, vocab=even_shard(self.vocab, 0, ranks).size,
        )


def sharded(experts: Experts | None, ranks: int) -> Experts | None:
    """One rank's share, as of DecoderShape.shard."""
    if experts is None:
        return None
    width, shared, dense = (even_shard(each, 0, ranks).size for each in (experts.width, experts.shared, experts.dense_width))
    return replace(experts, width=width, shared=shared, dense_width=dense)


def kv_element_bytes(kv_dtype: str, head_dim: int) -> float:
    """Keys and values of one byte bring a float32 scale per token and head."""
    return 1 + 4 / head_dim if kv_dtype not in DTYPE_BYTES else DTYPE_BYTES[kv_dtype]


def decoder_shape(
    model: ModelConfig, dtype: str, bytes_per_weight: float | None = None, kv: KVFormat | None = None,
    block_size: int = 16, head_bytes: float | None = None, expert_bytes: float | None = None,
) -> DecoderShape:
    """A model as the cost model sees it; weights in `dtype` unless said otherwise."""
    size = DTYPE_BYTES[dtype]
    kv, width = kv or KVFormat(dtype, dtype), model.head_dim if model.latent is None else model.latent.width
    full, windowed = ([layer for layer, window in enumerate(model.windows) if (window is None) == seen] for seen in (True, False))
    windows = [window for window in model.windows if window is not None]
    return DecoderShape(
        hidden=model.hidden_size, intermediate=model.intermediate_size, heads=model.num_heads,
        kv_heads=model.num_kv_heads, head_dim=model.head_dim, layers=model.num_layers, vocab=model.vocab_size,
        weight_bytes=size if bytes_per_weight is None else bytes_per_weight,
        kv_bytes=kv.mean_bytes(full or windowed, width), window_kv_bytes=kv.mean_bytes(windowed, width) if windowed else None,
        activation_bytes=size, latent=model.latent,
        window=windows[0] if windows else None, window_layers=len(windows), block_size=block_size,
        head_bytes=head_bytes, embedding_bytes=size, rotary_dim=model.ropes[0].dim, activation=model.activation,
        softcap=model.attention_softcap, qk_norm=model.qk_norm, post_norms=model.post_norms, qkv_bias=model.qkv_bias,
        output_bias=model.output_bias, mlp_bias=model.mlp_bias, last_windowed=model.windows[-1] is not None,
        gated=model.gated, norms=1 if model.parallel else 2 * model.pre_norms, experts=model.experts,
        expert_bytes=None if model.experts is None else size if expert_bytes is None else expert_bytes,
    )


# ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The sums over a step's rows that its cost depends on."""

    tokens: int = 0
    logits: int = 0                  # tokens that have logits
    last_tokens: int = 0             # tokens that go on behind the last layer's attention: those, or all
    full: Attended = field(default_factory=Attended)     # in a layer that sees everything
    windowed: Attended = field(default_factory=Attended)
    last: Attended = field(default_factory=Attended)     # in the last layer
    shared: int = 0                  # KV positions that need not be read again, in layers without a window
    few_pairs: int = field(default=0, compare=False)         # of `full`, those of rows with few queries (latent attention)
    # What only planning asks: requests that begin in this step, and their tokens.
    admitted: int = field(default=0, compare=False)
    admitted_tokens: int = field(default=0, compare=False)
    cached_tokens: int = field(default=0, compare=False)     # of these, in the prefix cache already

    @property
    def rows(self) -> int:
        return self.full.rows


def step_counts(
    shape: DecoderShape, rows: Rows, logits: Sequence[int] | None = None, shared: int = 0, every_hidden: bool = False
) -> StepCounts:
    """`logits`: per row, how many of its last tokens have them; by default one. `shared`: KV positions of a prefix that
    several rows have and attention reads once, counted for each row but the first. `every_hidden`: every token's hidden state
    is needed, so the last layer computes them all."""
    last_rows = [(count, kv_len) for count, (_, kv_len) in zip(
        (1,) * len(rows) if logits is None else logits, rows, strict=True
    )]
    num_logits = sum(count for count, _ in last_rows)
    last_rows = list(rows) if every_hidden else [row for row in last_rows if row[0]]
    tokens = sum(query_len for query_len, _ in rows)
    return StepCounts(
        tokens, num_logits, sum(count for count, _ in last_rows),
        Attended.of(rows, None, shape.block_size),
        Attended.of(rows, shape.window, shape.block_size) if shape.window_layers else Attended(),
        Attended.of(last_rows, shape.window if shape.last_windowed else None, shape.block_size),
        shared,
        Attended.of([row for row in rows if row[0] <= FEW_QUERIES], None, shape.block_size).pairs if shape.latent else 0,
    )

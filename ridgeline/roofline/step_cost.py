"""Counts exactly what one step of a decoder has to compute and to move, op by op.

    a model's shape and the precision of its tensors (DecoderShape)
    the step: per row, tokens computed now and KV length including them; how many of them have logits
    → FLOPs, and bytes of weights, of KV read and written and of activations, op by op (StepCost)

Every number is the sum of the ops' own declarations in sizes/op_costs.py, called as models/decoder.py calls the ops. After its
attention the last layer computes only the tokens that have logits, as there. Planning, benchmarks and the running engine count
with the same functions (the engine many steps at once, in vectorised.py). Only `Peaks` knows a machine's speed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.distributed.sharding import even_shard, head_shards
from ridgeline.models.expert_config import Experts
from ridgeline.models.latent_config import Latent
from ridgeline.models.model_config import ModelConfig
from ridgeline.roofline.op_terms import OpCost as OpCost
from ridgeline.roofline.op_terms import activations, each_token, in_layers, mixtures, norms
from ridgeline.sizes.kv_format import KVFormat
from ridgeline.sizes.latent_costs import FEW_QUERIES, near_flops, wide_flops
from ridgeline.sizes.op_costs import (
    DTYPE_BYTES,
    INDEX_BYTES,
    Attended,
    Cost,
    Rows,
    kv_bytes,
    linear_cost,
    paged_attention_cost,
    rotary_write_cost,
)
from ridgeline.sizes.sampling_costs import greedy_cost

LINEARS = ("qkv", "output", "gate_up", "down")
MLP = ("gate_up", "down")
OPS = ("embedding", "norms", *LINEARS, "rotary_write", "attention", "activation", "experts", "head", "sample")
# What benchmarks show: the linears of the layers in one line.
PARTS = {op: "linears" if op in LINEARS else op for op in OPS}


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
        experts = self.experts
        if experts is not None:
            width, shared, dense = (
                even_shard(each, 0, ranks).size for each in (experts.width, experts.shared, experts.dense_width)
            )
            experts = replace(experts, width=width, shared=shared, dense_width=dense)
        return replace(
            self, heads=query.size, kv_heads=key_value.size, ranks=self.ranks * ranks, experts=experts,
            intermediate=even_shard(self.intermediate, 0, ranks).size, vocab=even_shard(self.vocab, 0, ranks).size,
        )


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


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step, op by op, and what its ranks say to each other."""

    ops: Mapping[str, OpCost]
    collectives: int = 0             # all-reduces and the gathering of logits; 0 on one rank
    collective_bytes: int = 0        # of their results on one rank

    @property
    def total(self) -> OpCost:
        return sum(self.ops.values(), OpCost())

    @property
    def flops(self) -> int:
        return self.total.flops

    @property
    def bytes(self) -> int:
        return self.total.bytes

    @property
    def linear_flops(self) -> int:
        """Experts are linears too."""
        return sum(self.ops[name].flops for name in (*LINEARS, "experts"))

    @property
    def attention_flops(self) -> int:
        return self.ops["attention"].flops

    @property
    def head_flops(self) -> int:
        return self.ops["head"].flops

    @property
    def matrix_flops(self) -> int:
        """FLOPs of the matrix units: linears, attention and head, without norms, rotation and sampling."""
        return self.linear_flops + self.attention_flops + self.head_flops


def step_cost(
    shape: DecoderShape, rows: Rows, logits: Sequence[int] | None = None, shared: int = 0, every_hidden: bool = False
) -> StepCost:
    """The cost of one forward pass and of choosing its tokens; arguments as of `step_counts`."""
    return cost_of(shape, step_counts(shape, rows, logits, shared, every_hidden))


@functools.lru_cache(maxsize=4096)       # planning counts the steps of a few decoders, thousands of times
def _linear_costs(inputs: int, outputs: int, bias: bool, weight_bytes: float, element_bytes: int) -> tuple[Cost, Cost]:
    """Of no token, and of one."""
    none, one = (
        linear_cost(
            tokens=count, inputs=inputs, outputs=outputs, bias=bias, weight_bytes=weight_bytes, element_bytes=element_bytes
        ) for count in (0, 1)
    )
    return none, one


def cost_of(shape: DecoderShape, counts: StepCounts, experts_read: float | None = None) -> StepCost:
    """`experts_read`: of all layers together, where it is known; by default what even routing would read."""
    size, layers = shape.activation_bytes, shape.layers
    tokens, last, logits = counts.tokens, counts.last_tokens, counts.logits
    behind = bool(last)                                  # without logits the last layer ends once K and V are written

    def linear(calls: int, times: int, inputs: int, outputs: int, bias: bool, weight_bytes: float) -> OpCost:
        return each_token(calls, times, *_linear_costs(inputs, outputs, bias, weight_bytes, size))

    def matrix(name: str) -> OpCost:
        calls, times = (layers, layers * tokens) if name == "qkv" else in_layers(counts, layers, True)
        return linear(calls, times, *shape.linears[name], shape.weight_bytes)

    def mlp(name: str) -> OpCost:
        return sum(
            (linear(*in_layers(counts, count, has_last), inputs, outputs, bias, shape.weight_bytes)
             for count, has_last, inputs, outputs, bias in shape.mlps(name)),
            OpCost(),
        )

    def attention(attended: Attended, window: int | None, shared: int) -> OpCost:
        each = shape.kv_bytes_of(window)
        if shared:
            attended = replace(attended, keys=attended.keys - shared)
        cost = paged_attention_cost(
            rows=attended, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            block_size=shape.block_size, window=window, softcap=shape.softcap, element_bytes=size,
            kv_element_bytes=each,
        )
        read = kv_bytes(
            tokens=attended.keys, layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, element_bytes=each,
        )
        return OpCost(1, cost.flops, 0, read, 0, cost.bytes - read)

    def times(op: OpCost, count: int) -> OpCost:
        return OpCost(
            count * op.calls, count * op.flops, count * op.weights, count * op.kv_read, count * op.kv_written,
            count * op.activations,
        )

    windowed = shape.window_layers - shape.last_windowed
    attend = times(attention(counts.full, None, counts.shared), layers - 1 - windowed)
    if windowed:
        attend += times(attention(counts.windowed, shape.window, 0), windowed)
    if behind:
        window, shared = (shape.window, 0) if shape.last_windowed else (None, counts.shared)
        attend += attention(counts.last, window, shared)

    def rotary(count: int) -> Cost:
        return rotary_write_cost(
            tokens=count, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            rotary_dim=shape.head_dim if shape.rotary_dim is None else shape.rotary_dim, block_size=shape.block_size,
            norm=shape.qk_norm, element_bytes=size, kv_element_bytes=shape.mean_kv_bytes,
        )

    written = kv_bytes(
        tokens=1, layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, element_bytes=shape.mean_kv_bytes
    )
    turn = each_token(layers, layers * tokens, Cost(), rotary(1), written)
    if shape.qk_norm:
        qk = layers * 2 * shape.head_dim * size
        turn = replace(turn, weights=qk)
    row = round(shape.hidden * (shape.head_element_bytes if shape.embedding_bytes is None else shape.embedding_bytes))
    choice = greedy_cost(rows=logits, vocab=shape.vocab, element_bytes=size)
    collectives = (2 * layers + 1 + bool(logits)) if shape.ranks > 1 else 0
    spoken = tokens * (2 * layers - 1) + 2 * last        # the embedding, two in each layer
    return StepCost(
        {
            "embedding": OpCost(1, 0, tokens * row, 0, 0, tokens * (shape.hidden * size + INDEX_BYTES)),
            "norms": norms(shape, counts),
            **{name: matrix(name) for name in ("qkv", "output")},
            **{name: mlp(name) for name in MLP},
            "rotary_write": turn,
            "attention": attend,
            "activation": activations(shape, counts),
            "experts": mixtures(shape, counts, experts_read),
            "head": linear(bool(logits), logits, shape.hidden, shape.vocab, False, shape.head_element_bytes),
            "sample": OpCost(bool(logits), choice.flops, 0, 0, 0, choice.bytes),
        } | ({} if shape.latent is None else latent_ops(shape, counts, shape.latent, matrix("qkv"))),
        collectives,
        (spoken * shape.hidden + logits * shape.vocab * shape.ranks) * size if shape.ranks > 1 else 0,
    )


def latent_ops(shape: DecoderShape, counts: StepCounts, latent: Latent, down: OpCost) -> dict[str, OpCost]:
    """What is there in place of a dense decoder's projections (`down` is what compresses), rotation and attention.

    Keys and values are widened once for each token, or queries and results instead, which costs as much. What a later chunk of
    a prompt computes against the latents of earlier ones is counted as if they were widened, and widening them again is not.
    """
    layers, tokens, heads, size = shape.layers, counts.tokens, shape.heads, shape.activation_bytes
    projections = down
    for place, (inputs, outputs) in enumerate(reversed(shape.latent_linears)):
        stored = size if place == 0 else shape.weight_bytes
        projections += OpCost(
            layers, 2 * layers * tokens * inputs * outputs, round(layers * inputs * outputs * stored), 0, 0,
            layers * tokens * (inputs + outputs) * size,
        )
    few, many = counts.few_pairs, counts.full.pairs - counts.few_pairs
    near, wide = near_flops(latent.kv_rank, latent.rope), wide_flops(latent.nope, latent.rope, latent.value)
    pairs = (layers - 1) * (few * near + many * wide) + counts.last.pairs * near
    keys = (layers - 1) * (counts.full.keys - counts.shared)
    keys += counts.last.keys - counts.shared if counts.last_tokens else 0
    behind = (layers - 1) * tokens + counts.last_tokens
    turned = 3 * (heads + 1) * latent.rope + 4 * latent.kv_rank + 3
    moved = 2 * heads * latent.rope + latent.width
    return {
        "qkv": projections,
        "attention": OpCost(
            layers - 1 + bool(counts.last_tokens), heads * pairs, 0, round(keys * latent.width * shape.kv_bytes), 0,
            behind * heads * (latent.head + latent.value) * size,
        ),
        "rotary_write": OpCost(
            layers, layers * tokens * turned, layers * latent.kv_rank * size, 0,
            round(layers * tokens * latent.width * shape.kv_bytes),
            layers * tokens * (moved * size + latent.rope * max(size, 4) + 2 * INDEX_BYTES),
        ),
    }


# ── the machine, and what follows from both ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes and FLOPs per second of a device: as measured, or as its data sheet says."""

    read_bytes_s: float
    flops_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which an op is compute-bound (the ridge point)."""
        return self.flops_s / self.read_bytes_s

    def seconds(self, cost: Cost) -> float:
        return max(cost.bytes / self.read_bytes_s, cost.flops / self.flops_s)

    def floor(self, step: StepCost) -> dict[str, float]:
        """Least seconds by op: every op at its own roof, without overlap."""
        return {name: self.seconds(op.cost) for name, op in step.ops.items()}


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Expected tokens of a verification step with k drafts, each accepted with probability α if those before it are:
    1 + α + … + αᵏ = (1 − αᵏ⁺¹) / (1 − α)."""
    if acceptance >= 1.0:
        return float(drafts + 1)
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)

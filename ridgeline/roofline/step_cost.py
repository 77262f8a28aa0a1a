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
from dataclasses import dataclass, replace

from ridgeline.models.latent_config import Latent
from ridgeline.roofline.decoder_shape import MLP, DecoderShape, StepCounts, step_counts
from ridgeline.roofline.op_terms import OpCost as OpCost
from ridgeline.roofline.op_terms import activations, each_token, in_layers, mixtures, norms
from ridgeline.sizes.latent_costs import near_flops, wide_flops
from ridgeline.sizes.op_costs import (
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
OPS = ("embedding", "norms", *LINEARS, "rotary_write", "attention", "activation", "experts", "head", "sample")
# What benchmarks show: the linears of the layers in one line.
PARTS = {op: "linears" if op in LINEARS else op for op in OPS}


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

"""The cost of a mixture of experts, for planning: weights in total, weights per token, weights read per step.

    every token uses `used` of the layer's `count` experts, and the shared ones
    a step of b tokens reads every expert that any token uses: count · (1 − (1 − used/count)^b), if routing is even

The cost model counts a dense decoder whose MLP is one expert; here that MLP is replaced by the mixture. The engine does not
run such models yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import ModelError
from ridgeline.roofline.step_cost import DecoderShape, OpCost, StepCost, StepCounts

_MLP = ("gate_up", "down")


@dataclass(frozen=True, slots=True)
class Experts:
    """`ModelConfig.intermediate_size` is the width of one of them."""

    count: int
    used: int
    width: int = 1                   # of one expert; the widths below are in the same unit
    shared: int = 0                  # width of what every token visits beside them
    dense_layers: int = 0            # the first ones, which have a plain MLP …
    dense_width: int = 0             # … of this width

    def visited(self, tokens: float) -> float:
        """Experts of a layer that some token of a step uses, if routing is independent and even."""
        return self.count * (1 - (1 - self.used / self.count) ** tokens)

    @property
    def widest(self) -> int:
        """Columns that a token's activations have at once."""
        return max(self.used * self.width + self.shared, self.dense_width)

    def stored(self, layers: int) -> int:
        """Width of all MLPs together."""
        return (layers - self.dense_layers) * (self.count * self.width + self.shared) + self.dense_layers * self.dense_width

    def active(self, layers: int) -> int:
        """Of them, what one token computes with."""
        return (layers - self.dense_layers) * (self.used * self.width + self.shared) + self.dense_layers * self.dense_width

    def cost(self, cost: StepCost, shape: DecoderShape, counts: StepCounts) -> StepCost:
        """The MLPs of a dense decoder with one expert's width, as those of the mixture; the router is part of them."""
        layers, tokens, last = shape.layers, counts.tokens, counts.last_tokens
        behind = bool(last)                              # of the last layer only those tokens go on
        mixed = layers - self.dense_layers - 1           # layers with experts, but for the last
        visits = mixed * tokens + last                   # of tokens to layers with experts …
        plain = self.dense_layers * tokens               # … and to others
        beside = self.shared / self.width
        dense = self.dense_width / self.width
        factor = (visits * (self.used + beside) + plain * dense) / max(1, visits + plain)
        # Padding to a graph's shape is not routed.
        visited, at_last = self.visited(counts.full.queries), self.visited(min(last, counts.last.queries))
        read = mixed * (visited + beside) + behind * (at_last + beside) + self.dense_layers * dense
        ops = dict(cost.ops)
        for name in (*_MLP, "activation"):
            op = ops[name]
            ops[name] = OpCost(
                op.calls, round(op.flops * factor), round(op.weights * read / max(1, op.calls)), op.kv_read, op.kv_written,
                round(op.activations * factor),
            )
        router = shape.hidden * self.count
        ops["gate_up"] += OpCost(mixed + behind, 2 * visits * router, round((mixed + behind) * router * shape.activation_bytes))
        return StepCost(ops, cost.collectives, cost.collective_bytes)


def _dense_layers(raw: Mapping[str, Any], layers: int) -> int:
    every = raw.get("decoder_sparse_step") or raw.get("moe_layer_freq") or 1
    first = raw.get("first_k_dense_replace") or 0
    named = raw.get("mlp_only_layers") or ()
    return sum(layer < first or layer in named or (layer + 1) % every > 0 for layer in range(layers))


def read_experts(raw: Mapping[str, Any], name: str) -> Experts | None:
    """From the fields of a config.json, as Mixtral, Qwen, DeepSeek and gpt-oss spell them; None: a dense model."""
    count = raw.get("n_routed_experts") or raw.get("num_local_experts") or raw.get("num_experts")
    if not count:
        return None
    used = raw.get("num_experts_per_tok") or raw.get("experts_per_token")
    layers = raw.get("num_hidden_layers")
    if not (isinstance(count, int) and isinstance(used, int) and isinstance(layers, int)) or not 0 < used <= count:
        raise ModelError(f"{name}: num_experts_per_tok {used!r} of {count!r} experts in {layers!r} layers cannot be")
    whole = raw.get("intermediate_size") or 0
    width = raw.get("moe_intermediate_size") or whole
    shared = raw.get("shared_expert_intermediate_size") or (raw.get("n_shared_experts") or 0) * width
    dense = _dense_layers(raw, layers)
    if width < 1 or dense >= layers:
        raise ModelError(f"{name}: experts of width {width!r} in {layers - dense} of {layers} layers cannot be")
    return Experts(count, used, width, shared, dense, whole if dense else 0)

"""The facts of a mixture of experts: how many there are, how a token chooses among them, and which layers have them. No torch.

The decoder, the memory ledger, the live roofline and `plan` read the same object.

    every token uses `used` of the layer's `count` experts, and the shared ones
    a step of b tokens reads every expert that any token uses: count · (1 − (1 − used/count)^b), if routing is even
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.errors import ModelError, shown
from ridgeline.models.config_fields import MAX_EXPERTS, MAX_INTERMEDIATE, Fields
from ridgeline.models.family import ExpertRule


@dataclass(frozen=True, slots=True)
class Routing:
    """From the router's logits to weights of the chosen experts."""

    score: str = "softmax"           # of the logits: "softmax" over all experts, "sigmoid" of each
    normalise: bool = False          # weights of the chosen ones sum to 1
    choice_bias: bool = False        # added to the scores for the choice alone
    groups: int = 1                  # experts are chosen among those of …
    top_groups: int = 1              # … so many of these groups
    group_score: str = "best"        # a group's score: of its best expert, or the sum of its "best two"
    scale: float = 1.0               # of the weights
    jitter: float = 0.0              # an expert's weight is its share among those with logits this near (ops/experts/route.py)


@dataclass(frozen=True, slots=True)
class Experts:
    count: int
    used: int                        # by each token
    width: int = 1                   # of one expert; the widths below are in the same unit
    shared: int = 0                  # width of what every token visits beside them
    dense: tuple[int, ...] = ()      # layers that have a plain MLP …
    dense_width: int = 0             # … of this width
    routing: Routing = Routing()
    shared_gate: bool = False        # the shared expert's output is multiplied by the sigmoid of one more logit
    router_bias: bool = False
    bias: bool = False               # of the experts' linears
    zipf: float = 0.0                # of dummy weights whose routers prefer few experts: standard deviation of their logits
    limit: float | None = None       # gate and up are clamped to it (gpt-oss) …
    alpha: float = 1.702             # … and the gate is g · sigmoid(alpha · g), times up + 1
    scales_input: bool = False       # the weight of an expert multiplies its input, not its result

    def visited(self, tokens: float) -> float:
        """Experts of a layer that some token of a step uses, if routing is independent, and even but for `zipf`."""
        if self.zipf:
            return sum(1 - (1 - chance) ** tokens for chance in _zipf_chances(self.count, self.used, self.zipf))
        return self.count * (1 - (1 - self.used / self.count) ** tokens)

    @property
    def dense_layers(self) -> int:
        return len(self.dense)

    def stored(self, layers: int) -> int:
        """Width of all MLPs together."""
        return (layers - self.dense_layers) * (self.count * self.width + self.shared) + self.dense_layers * self.dense_width

    def active(self, layers: int) -> int:
        """Of them, what one token computes with."""
        return (layers - self.dense_layers) * (self.used * self.width + self.shared) + self.dense_layers * self.dense_width


@functools.lru_cache
def _zipf_chances(count: int, used: int, spread: float) -> tuple[float, ...]:
    """Of each expert to be among the `used` ones with the highest logits: normal ones around -log(1 + place), as in
    layers/mixture.py. Logits above one level, which `used` of them pass in the mean, stand for the highest."""
    def above(level: float) -> tuple[float, ...]:
        return tuple(0.5 * math.erfc((level + math.log1p(place)) / (spread * math.sqrt(2))) for place in range(count))

    low, high = -20.0 - math.log1p(count), 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(above(middle)) > used else (low, middle)
    return above(low)


COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def read_experts(fields: Fields, rule: ExpertRule, layers: int) -> Experts | None:
    """From config.json, as Mixtral, Qwen, OLMoE, Granite, DeepSeek and gpt-oss spell it. None: every layer has a plain MLP."""
    dense = _dense_layers(fields, layers)
    said = [fields.raw[name] for name in COUNTS if fields.raw.get(name) is not None]     # a family's default is not asked for
    has_none = bool(said) and not any(said)
    return None if has_none or len(dense) == layers else _mixture(fields, rule, dense)


def _mixture(fields: Fields, rule: ExpertRule, dense: tuple[int, ...]) -> Experts:
    def first_of(*names: str, default: int | None = None) -> int:
        for name in names:
            if fields.get(name):
                return fields.integer(name, maximum=MAX_INTERMEDIATE)
        if default is None:
            raise ModelError(f"{fields.where}: {' or '.join(names)} is missing or 0")
        return default

    count = first_of(*COUNTS)
    used = first_of("num_experts_per_tok", "experts_per_token", "moe_k", "num_experts_per_token")
    if used > count or count > MAX_EXPERTS:
        raise ModelError(f"{fields.where}: num_experts_per_tok {used} of {count} experts cannot be")
    if rule.scales_input and used != 1:
        raise ModelError(f"{fields.where}: num_experts_per_tok {used} is not supported for inputs with weights; supported: 1")
    whole = first_of("intermediate_size", default=0)
    width = first_of("moe_intermediate_size", default=whole)
    shared_count = first_of("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", default=0)
    shared = first_of("shared_expert_intermediate_size", "shared_intermediate_size", default=shared_count * width)
    for name, given in {"moe_intermediate_size": width, "intermediate_size": whole or not dense}.items():
        if not given:
            raise ModelError(f"{fields.where}: {name} is missing")
    # A field of our own, for benchmarks: a checkpoint would lack the bias. Dummy weights have a standard deviation of 0.02.
    zipf = 0.02 * math.sqrt(first_of("hidden_size")) if fields.get("dummy_routing") == "zipf" else 0.0
    return Experts(
        count, used, width, shared, dense, whole if dense else 0, _routing(fields, rule, count, used),
        rule.shared_gate and shared > 0, rule.router_bias or zipf > 0, rule.bias, zipf,
        fields.number("swiglu_limit", 7.0) if rule.clamped else None, fields.number("swiglu_alpha", 1.702), rule.scales_input,
    )


# By GGUF's number; the third is the softmax of the chosen ones alone, which is what normalised weights are.
GGUF_SCORES = {1: "softmax", 2: "sigmoid", 3: "softmax"}
# (groups, best groups) of DeepSeek-V2 and of V3 by their experts: files of before 2025-07 do not say them. Files of other
# architectures that do not say them have none: GLM-4.5 has 160 experts too.
GGUF_GROUPS = {160: (8, 3), 256: (8, 4)}


def gguf_score(fields: Fields, key: Callable[[str], str]) -> str | None:
    """How a file's experts are scored; "": it does not say; None: there are no experts."""
    if not fields.get(key("expert_count"), 0):
        return None
    number = fields.integer(key("expert_gating_func"), 0, minimum=0)
    if number and number not in GGUF_SCORES:
        raise ModelError(f"{fields.where}: {key('expert_gating_func')} {shown(number)} is not supported; supported: 1 (softmax), "
                         "2 (sigmoid)")
    return GGUF_SCORES[number] if number else ""


def gguf_experts(fields: Fields, rule: ExpertRule, layers: int, key: Callable[[str], str]) -> Experts | None:
    """From a GGUF file's metadata. None: every layer has a plain MLP."""
    count, used = fields.integer(key("expert_count"), maximum=MAX_EXPERTS), fields.integer(key("expert_used_count"))
    whole = fields.integer(key("feed_forward_length"), maximum=MAX_INTERMEDIATE)
    width = fields.integer(key("expert_feed_forward_length"), whole, maximum=MAX_INTERMEDIATE)
    shared = fields.integer(key("expert_shared_count"), 0, minimum=0, maximum=MAX_EXPERTS) * width
    shared = fields.integer(key("expert_shared_feed_forward_length"), shared, minimum=0, maximum=MAX_INTERMEDIATE)
    first = fields.integer(key("leading_dense_block_count"), 0, minimum=0)
    step = fields.integer(key("interleave_moe_layer_step"), 1)           # ERNIE's
    dense = tuple(layer for layer in range(layers) if layer < first or (layer + 1) % step)
    if len(dense) == layers:
        return None
    if used > count:
        raise ModelError(f"{fields.where}: {key('expert_used_count')} {used} of {count} experts cannot be")
    return Experts(
        count, used, width, shared, dense, whole if dense else 0, _gguf_routing(fields, rule, count, key),
        rule.shared_gate and shared > 0, rule.router_bias, rule.bias,
        limit=7.0 if rule.clamped else None,             # gpt-oss', which the file does not say
    )


def _gguf_routing(fields: Fields, rule: ExpertRule, count: int, key: Callable[[str], str]) -> Routing:
    unsaid = GGUF_GROUPS if rule.groups and fields.get("general.architecture") == "deepseek2" else {}
    groups, top = unsaid.get(count, (1, 1))
    if rule.groups and fields.get(key("expert_group_count")):
        groups, top = fields.integer(key("expert_group_count")), fields.integer(key("expert_group_used_count"), 1)
    if count % groups or top > groups:
        raise ModelError(f"{fields.where}: {top} of {groups} groups of {count} experts cannot be")
    normalise = rule.normalise if rule.normalise is not None else fields.flag(key("expert_weights_norm"), rule.usually_normalised)
    scale = fields.get(key("expert_weights_scale")) if rule.scaled else None
    return Routing(
        rule.score, normalise, rule.choice_bias, groups, top if groups > 1 else 1, rule.group_score,
        fields.number(key("expert_weights_scale")) if scale else 1.0,        # 0 stands for none
    )


def _listed_dense(fields: Fields, layers: int) -> tuple[int, ...] | None:
    """None: the config does not list what each layer has."""
    mixed = fields.get("moe_layers")
    if isinstance(mixed, list) and mixed:                # Llama-4's own list, which counts
        return tuple(layer for layer in range(layers) if layer not in mixed)
    kinds = fields.get("mlp_layer_types")                # as transformers 5 writes it
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise ModelError(f"{fields.where}: mlp_layer_types must list {layers} times dense or sparse, got {shown(kinds)}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    listed = _listed_dense(fields, layers)
    if listed is not None:
        return listed
    every = fields.get("decoder_sparse_step") or fields.get("moe_layer_freq") or 1
    first = fields.get("first_k_dense_replace") or 0
    named = fields.get("mlp_only_layers") or ()
    last = fields.get("moe_layer_end_index", -1)         # ERNIE's
    if not all(isinstance(each, int) for each in (every, first, last)) or not isinstance(named, (list, tuple)):
        raise ModelError(f"{fields.where}: layers with experts must be said by numbers, got {shown((every, first, named))}")
    last = layers - 1 if last == -1 else last
    return tuple(layer for layer in range(layers) if not first <= layer <= last or layer in named or (layer + 1) % every)


def _routing(fields: Fields, rule: ExpertRule, count: int, used: int) -> Routing:
    groups, top = 1, 1
    if rule.groups and fields.get("topk_method") != "greedy":
        groups, top = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if count % groups or top > groups:
        raise ModelError(f"{fields.where}: {top} of {groups} groups of {count} experts cannot be")
    if groups > 1 and used > count // groups * top:
        raise ModelError(f"{fields.where}: num_experts_per_tok {used} is more than the experts of topk_group {top} groups")
    normalise = rule.normalise if rule.normalise is not None else fields.flag("norm_topk_prob")
    return Routing(
        rule.score, normalise, rule.choice_bias, groups, top if groups > 1 else 1, rule.group_score,
        fields.number("routed_scaling_factor", 1.0) if rule.scaled else 1.0,
        fields.number("router_jitter_noise", 0.01) if rule.mixer else 0.0,
    )

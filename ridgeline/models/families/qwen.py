"""Qwen2 and 2.5 (biases on q, k, v), and Qwen3 (norms on q and k). Their upper layers may have a sliding window. Both have
mixtures of experts; Qwen2's has a shared expert behind a gate. Like Qwen3's are those of Mellum 2 (windows, with a rope of their
own) and Flint (windows, no rope in the other layers, attention sinks, sigmoid scores and a shared expert)."""

from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.models.config_fields import MAX_LAYERS
from ridgeline.models.family import (
    EXPERT_NAMES,
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    LLAMA_NAMES,
    QK_NORM_NAMES,
    UNUSED_TENSORS,
    ExpertRule,
    Family,
)

WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "MiMoForCausalLM"),
    ignored=(*UNUSED_TENSORS, r"model\.mtp_layers\..*"),          # MiMo's, for drafts
    gguf="qwen2",
    gguf_also=("qwen2vl",),
    qkv_bias=True,
    spelled={"attention_out_bias": ""},
    window="upper",
    defaults=WINDOWS,
)

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf="qwen3",
    gguf_also=("qwen3vl",),
    qk_norm=True,
    window="upper",
    defaults=WINDOWS | {"head_dim": 128},
    names=LLAMA_NAMES | QK_NORM_NAMES,
)

SHARED_NAMES = {
    "model.layers.{}.mlp.shared_expert.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_expert.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_expert.down_proj": "layers.{}.mlp.shared.down",
}

QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    gguf="qwen2moe",
    spelled={"attention_out_bias": "", "attention_bias": "qkv_bias"},
    experts=ExpertRule(shared_gate=True),
    only={"use_sliding_window": False},
    defaults={"qkv_bias": True},
    names=LLAMA_NAMES | EXPERT_NAMES | SHARED_NAMES | {"model.layers.{}.mlp.shared_expert_gate": "layers.{}.mlp.shared_gate"},
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    gguf="qwen3moe",
    gguf_also=("qwen3vlmoe",),
    qk_norm=True,
    experts=ExpertRule(usually_normalised=True),
    only={"use_sliding_window": False},
    names=LLAMA_NAMES | QK_NORM_NAMES | EXPERT_NAMES,
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)

def _listed(sees_all: Callable[[int, int], bool]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A config with the list of its layers, where it has none: `sees_all` of a layer's number and of their count."""
    def reworded(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        count = raw.get("num_hidden_layers")
        if raw.get("layer_types") is not None or not isinstance(count, int) or count > MAX_LAYERS:
            return raw
        kinds = ["full_attention" if sees_all(layer, count) else "sliding_attention" for layer in range(count)]
        return {**raw, "layer_types": kinds}

    return reworded


MELLUM = Family(
    name="mellum",
    architectures=("MellumForCausalLM",),
    qk_norm=True,
    window="all",                    # that are listed with one
    reworded=_listed(lambda layer, count: True),
    local_rope=True,
    experts=ExpertRule(),
    defaults={"head_dim": 128, "sliding_window": 1024, "rope_theta": 500_000.0, "norm_topk_prob": True},
    names=LLAMA_NAMES | QK_NORM_NAMES | EXPERT_NAMES,
    ignored=(*UNUSED_TENSORS, r"mtp\..*"),               # a layer that predicts the token after next
)


FLINT = Family(
    name="flint",
    architectures=("FlintForCausalLM",),
    qk_norm=True,
    sinks=True,
    window="all",
    nope="full",
    experts=ExpertRule(score="sigmoid"),
    reworded=_listed(lambda layer, count: layer < 2 or layer % 4 == 1 or layer == count - 1),
    defaults={"head_dim": 128, "sliding_window": 513, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "mlp_only_layers": [0, 1]},
    names=LLAMA_NAMES | QK_NORM_NAMES | EXPERT_NAMES | SHARED_NAMES | {
        "model.layers.{}.self_attn.softmax_offset": "layers.{}.attention.sinks.weight",
    },
)

"""Qwen2 and 2.5 (biases on q, k, v), and Qwen3 (norms on q and k). Their upper layers may have a sliding window. Both have
mixtures of experts; Qwen2's has a shared expert behind a gate."""

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

QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    gguf="qwen2moe",
    spelled={"attention_out_bias": "", "attention_bias": "qkv_bias"},
    experts=ExpertRule(shared_gate=True),
    only={"use_sliding_window": False},
    defaults={"qkv_bias": True},
    names=LLAMA_NAMES | EXPERT_NAMES | {
        "model.layers.{}.mlp.shared_expert_gate": "layers.{}.mlp.shared_gate",
        "model.layers.{}.mlp.shared_expert.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
        "model.layers.{}.mlp.shared_expert.up_proj": "layers.{}.mlp.shared.gate_up:up",
        "model.layers.{}.mlp.shared_expert.down_proj": "layers.{}.mlp.shared.down",
    },
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

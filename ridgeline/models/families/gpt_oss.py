"""gpt-oss: attention sinks, a window on every second layer, and experts with biases and a clamped activation. Its experts are
stored in MXFP4, all of a layer in one tensor, gate and up by turns."""

from ridgeline.models.family import (
    FUSED_EXPERTS,
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    GGUF_NORM_BEHIND,
    LLAMA_NAMES,
    ExpertRule,
    Family,
    FusedExperts,
)

_EXPERTS = r"(model\.layers\.\d+\.mlp\.experts)\."

GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    gguf="gpt-oss",
    sinks=True,
    window="pattern",
    full_every=2,
    experts=ExpertRule(normalise=True, router_bias=True, bias=True, clamped=True),
    defaults={
        "attention_bias": True, "sliding_window": 128, "head_dim": 64, "rope_theta": 150_000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    },
    names=LLAMA_NAMES | {
        "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks.weight",
        "model.layers.{}.mlp.router": "layers.{}.mlp.router",
        "model.layers.{}.mlp.experts.{}.gate_up_proj": "layers.{}.mlp.experts.{}.gate_up:gate+up",
        "model.layers.{}.mlp.experts.{}.down_proj": "layers.{}.mlp.experts.{}.down",
        # As llm-compressor saves them: a linear for each expert, gate and up apart.
        "model.layers.{}.mlp.experts.{}.gate_proj": "layers.{}.mlp.experts.{}.gate_up:gate",
        "model.layers.{}.mlp.experts.{}.up_proj": "layers.{}.mlp.experts.{}.gate_up:up",
    },
    fused_experts=(
        FusedExperts(_EXPERTS + "gate_up_proj", r"\1.{}.gate_up_proj.weight", transposed=True, paired=True),
        FusedExperts(_EXPERTS + "down_proj", r"\1.{}.down_proj.weight", transposed=True),
        FusedExperts(_EXPERTS + "gate_up_proj_(blocks|scales)", r"\1.{}.gate_up_proj_\2", paired=True),
        FusedExperts(_EXPERTS + "down_proj_(blocks|scales)", r"\1.{}.down_proj_\2"),
        FusedExperts(_EXPERTS + "gate_up_proj_bias", r"\1.{}.gate_up_proj.bias", paired=True),
        FusedExperts(_EXPERTS + "down_proj_bias", r"\1.{}.down_proj.bias"),
        *FUSED_EXPERTS[1:],
    ),
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES | GGUF_NORM_BEHIND,
)

"""Llama 4 (Scout, Maverick), the text decoder: layers with a rope attend in chunks and have bare norms on q and k; every fourth
layer has no rope and sees everything. One expert for each token, whose weight multiplies its input, beside a shared one."""

from ridgeline.models.family import (
    LLAMA_NAMES,
    ROPE_TENSORS,
    TEXT_PREFIXES,
    VISION_TENSORS,
    ExpertRule,
    Family,
    FusedExperts,
)

_MLP = "model.layers.{}.feed_forward"
LLAMA4_NAMES = {name: target for name, target in LLAMA_NAMES.items() if ".mlp." not in name} | {
    f"{_MLP}.gate_proj": "layers.{}.mlp.gate_up:gate",
    f"{_MLP}.up_proj": "layers.{}.mlp.gate_up:up",
    f"{_MLP}.down_proj": "layers.{}.mlp.down",
    f"{_MLP}.router": "layers.{}.mlp.router",
    f"{_MLP}.shared_expert.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    f"{_MLP}.shared_expert.up_proj": "layers.{}.mlp.shared.gate_up:up",
    f"{_MLP}.shared_expert.down_proj": "layers.{}.mlp.shared.down",
    f"{_MLP}.experts.{{}}.gate_up_proj": "layers.{}.mlp.experts.{}.gate_up:gate+up",
    f"{_MLP}.experts.{{}}.down_proj": "layers.{}.mlp.experts.{}.down",
}

LLAMA4 = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    interleaved=True,
    nope="listed",
    window="chunks",
    temperature="nope",
    bare_qk_norm=True,
    experts=ExpertRule(score="sigmoid", normalise=False, scales_input=True),
    spelled={
        "intermediate_size": "intermediate_size_mlp", "moe_intermediate_size": "intermediate_size",
        "shared_expert_intermediate_size": "intermediate_size", "decoder_sparse_step": "interleave_moe_layer_step",
    },
    defaults={
        "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "head_dim": 128, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1, "rope_theta": 500_000.0,
        "vocab_size": 202_048, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    },
    names=LLAMA4_NAMES,
    prefixes=TEXT_PREFIXES,
    fused_experts=(
        FusedExperts(
            r"((?:language_model\.)?model\.(?:language_model\.)?layers\.\d+\.feed_forward\.experts)\.(gate_up_proj|down_proj)",
            r"\1.{}.\2.weight", transposed=True,
        ),
    ),
    ignored=(*ROPE_TENSORS, *VISION_TENSORS),
)

"""Llama 2 and 3, everything that is Llama by another name (SmolLM2, TinyLlama, Mistral as GGUF), and its near relatives: SmolLM3
(layers without a rope), CWM (windows), InternLM 2 (other names), MiniCPM (multipliers), Seed-OSS, Helium, Arcee and Apertus (no
gate), BitNet (norms before every output matrix). The text decoder of Llama 4 (Scout, Maverick)."""

from ridgeline.models.family import (
    GGUF_NAMES,
    GGUF_NORM_BEHIND,
    LLAMA_NAMES,
    QK_NORM_NAMES,
    UNUSED_TENSORS,
    ExpertRule,
    Family,
    FusedExperts,
)

# MLPs without a gate.
PLAIN_MLP_NAMES = {name: target for name, target in LLAMA_NAMES.items() if ".mlp." not in name} | {
    "model.layers.{}.mlp.up_proj": "layers.{}.mlp.up",
    "model.layers.{}.mlp.down_proj": "layers.{}.mlp.down",
}
GGUF_PLAIN_MLP_NAMES = {name: target for name, target in GGUF_NAMES.items() if "ffn_gate" not in name} | {
    "blk.{}.ffn_up": "layers.{}.mlp.up",
}

LLAMA = Family(
    name="llama",
    architectures=(
        "LlamaForCausalLM", "LLaMAForCausalLM", "InternLM3ForCausalLM", "AquilaForCausalLM", "XverseForCausalLM", "YiForCausalLM",
        "IQuestCoderForCausalLM",
    ),
    only={"clip_qkv": None},                             # of IQuest's own code; no checkpoint of it has a limit
    gguf="llama",
    gguf_permuted=True,
)

SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    gguf="smollm3",
    gguf_permuted=True,
    tied=True,
    nope="listed",
    only={"use_sliding_window": False},
    defaults={"rope_theta": 2_000_000.0},
)

INTERNLM2 = Family(
    name="internlm2",
    architectures=("InternLM2ForCausalLM",),
    gguf="internlm2",
    gguf_permuted=True,
    spelled={"attention_bias": "bias", "attention_out_bias": "bias", "mlp_bias": ""},
    defaults={"rope_theta": 10_000.0},
    names={
        "model.tok_embeddings": "embed",
        "model.layers.{}.attention_norm": "layers.{}.attention_norm",
        "model.layers.{}.attention.wqkv": "layers.{}.attention.qkv:q+k+v",
        "model.layers.{}.attention.wo": "layers.{}.attention.output",
        "model.layers.{}.ffn_norm": "layers.{}.mlp_norm",
        "model.layers.{}.feed_forward.w1": "layers.{}.mlp.gate_up:gate",
        "model.layers.{}.feed_forward.w3": "layers.{}.mlp.gate_up:up",
        "model.layers.{}.feed_forward.w2": "layers.{}.mlp.down",
        "model.norm": "norm",
        "output": "head",
    },
    by_head=r"model\.layers\.\d+\.attention\.wqkv\.(weight|bias)",
)

# MiniCPM 1, 2 and 4, without the sparse attention of long contexts that MiniCPM 4 can have.
MINICPM = Family(
    name="minicpm",
    architectures=("MiniCPMForCausalLM",),
    gguf="minicpm",
    gguf_permuted=True,
    tied=True,
    depth_scale=True,
    longrope=True,
    only={"sparse_config": None},
    defaults={"rms_norm_eps": 1e-6, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
)

SEED_OSS = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    gguf="seed_oss",
    spelled={"attention_out_bias": "attention_out_bias"},
    defaults={"attention_bias": True, "attention_out_bias": False, "head_dim": 128},
    gguf_names=GGUF_NAMES | GGUF_NORM_BEHIND,
)

HELIUM = Family(
    name="helium",
    architectures=("HeliumForCausalLM",),
    interleaved=True,
    spelled={"attention_out_bias": ""},
    defaults={"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0},
)

ARCEE = Family(
    name="arcee",
    architectures=("ArceeForCausalLM",),
    gguf="arcee",
    gguf_permuted=True,
    activation="relu2",
    gated=False,
    names=PLAIN_MLP_NAMES,
    gguf_names=GGUF_PLAIN_MLP_NAMES,
)

CWM = Family(
    name="cwm",
    architectures=("CwmForCausalLM",),
    window="pattern",
    full_every=4,
    full_first=True,
    spelled={"attention_bias": "", "attention_out_bias": ""},
    defaults={
        "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192, "rope_theta": 1_000_000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
)

APERTUS = Family(
    name="apertus",
    architectures=("ApertusForCausalLM",),
    activation="xielu",
    qk_norm=True,
    gated=False,
    defaults={
        "rope_theta": 12_000_000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    names={name: target for name, target in PLAIN_MLP_NAMES.items() if "layernorm" not in name} | QK_NORM_NAMES | {
        "model.layers.{}.attention_layernorm": "layers.{}.attention_norm",
        "model.layers.{}.feedforward_layernorm": "layers.{}.mlp_norm",
        "model.layers.{}.mlp.act_fn.alpha_p": "layers.{}.mlp.xielu.alpha_p",
        "model.layers.{}.mlp.act_fn.alpha_n": "layers.{}.mlp.xielu.alpha_n",
    },
    ignored=(*UNUSED_TENSORS, r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)"),    # constants of the activation
)

# b1.58: its matrices are ternary (quantization_config), or 16 bits wide in checkpoints for training.
BITNET = Family(
    name="bitnet",
    architectures=("BitNetForCausalLM",),
    activation="relu2",
    inner_norms=True,
    defaults={"rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
    names=LLAMA_NAMES | {
        "model.layers.{}.self_attn.attn_sub_norm": "layers.{}.attention.output.inner",
        "model.layers.{}.mlp.ffn_sub_norm": "layers.{}.mlp.down.inner",
    },
)

# Layers with a rope attend in chunks and have bare norms on q and k; every fourth layer has no rope and sees everything. Each
# token has one expert, whose weight multiplies its input, beside a shared one.
_LLAMA4_MLP = "model.layers.{}.feed_forward"
LLAMA4_NAMES = {name: target for name, target in LLAMA_NAMES.items() if ".mlp." not in name} | {
    f"{_LLAMA4_MLP}.gate_proj": "layers.{}.mlp.gate_up:gate",
    f"{_LLAMA4_MLP}.up_proj": "layers.{}.mlp.gate_up:up",
    f"{_LLAMA4_MLP}.down_proj": "layers.{}.mlp.down",
    f"{_LLAMA4_MLP}.router": "layers.{}.mlp.router",
    f"{_LLAMA4_MLP}.shared_expert.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    f"{_LLAMA4_MLP}.shared_expert.up_proj": "layers.{}.mlp.shared.gate_up:up",
    f"{_LLAMA4_MLP}.shared_expert.down_proj": "layers.{}.mlp.shared.down",
    f"{_LLAMA4_MLP}.experts.{{}}.gate_up_proj": "layers.{}.mlp.experts.{}.gate_up:gate+up",
    f"{_LLAMA4_MLP}.experts.{{}}.down_proj": "layers.{}.mlp.experts.{}.down",
}

LLAMA4 = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM",),
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
    fused_experts=(
        FusedExperts(
            r"(model\.layers\.\d+\.feed_forward\.experts)\.(gate_up_proj|down_proj)", r"\1.{}.\2.weight", transposed=True,
        ),
    ),
)

"""DeepSeek-V2, V2-Lite, V3 and R1, and those that have their layout (Kimi-K2, Moonlight, GLM-4.7-Flash, and MiniCPM3
without experts): latent attention, shared experts beside the chosen ones, plain MLPs in the first layers. V3 chooses by sigmoid
scores with a bias, among the best groups; so does dots.llm1, whose attention is Qwen3's."""

from ridgeline.models.family import (
    EXPERT_NAMES,
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    LLAMA_NAMES,
    NEXT_TOKEN_LAYER,
    QK_NORM_NAMES,
    UNUSED_TENSORS,
    ExpertRule,
    Family,
    without,
)

LATENT_NAMES = {name: target for name, target in LLAMA_NAMES.items() if ".qkv" not in target} | {
    "model.layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
    "model.layers.{}.self_attn.q_a_proj": "layers.{}.attention.qkv:q_down",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa": "layers.{}.attention.qkv:kv_down",
    "model.layers.{}.self_attn.q_a_layernorm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.kv_a_layernorm": "layers.{}.attention.kv_norm",
    "model.layers.{}.self_attn.q_b_proj": "layers.{}.attention.q_up",
    "model.layers.{}.self_attn.kv_b_proj": "layers.{}.attention.kv_up",
}

GGUF_LATENT_NAMES = {name: target for name, target in GGUF_NAMES.items() if ".attention." not in target} | {
    "blk.{}.attn_q": "layers.{}.attention.qkv:q",
    "blk.{}.attn_q_a": "layers.{}.attention.qkv:q_down",
    "blk.{}.attn_kv_a_mqa": "layers.{}.attention.qkv:kv_down",
    "blk.{}.attn_q_a_norm": "layers.{}.attention.q_norm",
    "blk.{}.attn_kv_a_norm": "layers.{}.attention.kv_norm",
    "blk.{}.attn_q_b": "layers.{}.attention.q_up",
    "blk.{}.attn_kv_b": "layers.{}.attention.kv_up",     # newer files have it in two parts (regrouped.py)
    "blk.{}.attn_output": "layers.{}.attention.output",
}

DEEPSEEK_V3_EXPERTS = ExpertRule(score="sigmoid", choice_bias=True, groups=True, group_score="best two", scaled=True)

SHARED_EXPERT_NAMES = {
    "model.layers.{}.mlp.shared_experts.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_experts.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_experts.down_proj": "layers.{}.mlp.shared.down",
}
DEEPSEEK_EXPERT_NAMES = EXPERT_NAMES | SHARED_EXPERT_NAMES

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    gguf="deepseek2",
    latent=True,
    interleaved=True,
    experts=ExpertRule(groups=True, scaled=True),
    reworded=without("rope_interleave"),                 # a field of DeepSeek-V3 and its kin
    # DeepSeek's own code then leaves out the scale of the weights; transformers leaves out the sum.
    only={"norm_topk_prob": False},
    defaults={"rms_norm_eps": 1e-6},
    names=LATENT_NAMES | DEEPSEEK_EXPERT_NAMES,
    gguf_names=GGUF_LATENT_NAMES | GGUF_EXPERT_NAMES,
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    gguf="deepseek2",
    latent=True,
    interleaved=True,
    experts=DEEPSEEK_V3_EXPERTS,
    defaults={
        "rms_norm_eps": 1e-6, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3,
    },
    names=LATENT_NAMES | DEEPSEEK_EXPERT_NAMES,
    gguf_names=GGUF_LATENT_NAMES | GGUF_EXPERT_NAMES,
    ignored=(*UNUSED_TENSORS, NEXT_TOKEN_LAYER),           # MTP, for drafts
)

# GLM-4.7-Flash
GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    latent=True,
    interleaved=True,
    experts=DEEPSEEK_V3_EXPERTS,
    defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
    names=LATENT_NAMES | DEEPSEEK_EXPERT_NAMES,
    ignored=(*UNUSED_TENSORS, NEXT_TOKEN_LAYER),
)

# Dense, its rope in halves.
MINICPM3 = Family(
    name="minicpm3",
    architectures=("MiniCPM3ForCausalLM",),
    gguf="minicpm3",
    tied=True,
    depth_scale=True,
    latent=True,
    longrope=True,
    reworded=without("rope_interleave"),
    defaults={"rms_norm_eps": 1e-5, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
    names=LATENT_NAMES,
    gguf_names=GGUF_LATENT_NAMES,
)

# DeepSeek-V3's attention with the MLP of Llama.
YOUTU = Family(
    name="youtu",
    architectures=("YoutuForCausalLM",),
    gguf="deepseek2",                # without experts
    tied=True,
    latent=True,
    interleaved=True,
    defaults={"rms_norm_eps": 1e-6},
    names=LATENT_NAMES,
    gguf_names=GGUF_LATENT_NAMES,
)

DOTS1 = Family(
    name="dots1",
    architectures=("Dots1ForCausalLM",),
    gguf="dots1",
    qk_norm=True,
    window="upper",
    experts=DEEPSEEK_V3_EXPERTS,
    defaults={"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62, "rms_norm_eps": 1e-6},
    names=LLAMA_NAMES | QK_NORM_NAMES | DEEPSEEK_EXPERT_NAMES,
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)

"""Hunyuan (dense and A13B): norms of q and k behind the rotation. The mixture has one shared expert. Hunyuan 3: norms before
it, and DeepSeek-V3's choice of experts without groups."""

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
)

LATE_NORM_NAMES = {
    "model.layers.{}.self_attn.query_layernorm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.key_layernorm": "layers.{}.attention.k_norm",
}

SHARED_NAMES = {
    "model.layers.{}.mlp.shared_mlp.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_mlp.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_mlp.down_proj": "layers.{}.mlp.shared.down",
}

HUNYUAN = Family(
    name="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    gguf="hunyuan-dense",
    qk_norm=True,
    late_qk_norm=True,
    alpha_rope=True,
    defaults={"rms_norm_eps": 1e-5},
    names=LLAMA_NAMES | LATE_NORM_NAMES,
)

HUNYUAN_MOE = Family(
    name="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    gguf="hunyuan-moe",
    qk_norm=True,
    late_qk_norm=True,
    alpha_rope=True,
    experts=ExpertRule(normalise=True),
    spelled={"num_experts_per_tok": "moe_topk", "moe_intermediate_size": "intermediate_size",
             "shared_expert_intermediate_size": "intermediate_size"},
    defaults={"rms_norm_eps": 1e-5},
    names=LLAMA_NAMES | LATE_NORM_NAMES | {name: target for name, target in EXPERT_NAMES.items() if ".mlp.gate" not in name} | {
        "model.layers.{}.mlp.gate.wg": "layers.{}.mlp.router",
    } | SHARED_NAMES,
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)

HUNYUAN_3 = Family(
    name="hy_v3",
    architectures=("HYV3ForCausalLM",),
    qk_norm=True,
    experts=ExpertRule(score="sigmoid", normalise=True, choice_bias=True, scaled=True),
    spelled={"routed_scaling_factor": "router_scaling_factor"},
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "first_k_dense_replace": 1,
              "router_scaling_factor": 2.826, "num_shared_experts": 1},
    names=LLAMA_NAMES | QK_NORM_NAMES | EXPERT_NAMES | SHARED_NAMES | {
        "model.layers.{}.mlp.router.gate": "layers.{}.mlp.router",
        "model.layers.{}.mlp.expert_bias": "layers.{}.mlp.router.e_score_correction_bias",
    },
    ignored=(*UNUSED_TENSORS, NEXT_TOKEN_LAYER),
)

"""Hunyuan (dense and A13B): norms of q and k behind the rotation. The mixture has one shared expert."""

from ridgeline.models.family import EXPERT_NAMES, GGUF_EXPERT_NAMES, GGUF_NAMES, LLAMA_NAMES, ExpertRule, Family

LATE_NORM_NAMES = {
    "model.layers.{}.self_attn.query_layernorm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.key_layernorm": "layers.{}.attention.k_norm",
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
        "model.layers.{}.mlp.shared_mlp.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
        "model.layers.{}.mlp.shared_mlp.up_proj": "layers.{}.mlp.shared.gate_up:up",
        "model.layers.{}.mlp.shared_mlp.down_proj": "layers.{}.mlp.shared.down",
    },
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)

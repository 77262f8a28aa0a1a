"""GLM-4: half of each head is rotated, in pairs that lie side by side; gate and up are fused. The 0414 models have norms behind
attention and MLP as well. GLM-4.5 and 4.6 are mixtures that choose as DeepSeek-V3 does."""

from ridgeline.models.families.deepseek import DEEPSEEK_EXPERT_NAMES, DEEPSEEK_V3_EXPERTS
from ridgeline.models.family import (
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    GGUF_NORM_BEHIND,
    LLAMA_NAMES,
    NEXT_TOKEN_LAYER,
    QK_NORM_NAMES,
    UNUSED_TENSORS,
    Family,
)

GLM_NAMES = {name: target for name, target in LLAMA_NAMES.items() if "gate_proj" not in name and "up_proj" not in name} | {
    "model.layers.{}.mlp.gate_up_proj": "layers.{}.mlp.gate_up:gate+up",
}
GGUF_GLM_NAMES = {name: target for name, target in GGUF_NAMES.items() if "ffn_gate" not in name} | {
    "blk.{}.ffn_up": "layers.{}.mlp.gate_up:gate+up",
}
GLM_DEFAULTS = {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
NO_OUTPUT_BIAS = {"attention_out_bias": ""}

GLM = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    gguf="chatglm",
    gguf_permuted=True,
    partial_rotary=True,
    interleaved=True,
    spelled=NO_OUTPUT_BIAS,
    defaults=GLM_DEFAULTS,
    names=GLM_NAMES,
    gguf_names=GGUF_GLM_NAMES,
)

GLM4 = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    gguf="glm4",
    gguf_permuted=True,
    post_norms=True,
    partial_rotary=True,
    interleaved=True,
    spelled=NO_OUTPUT_BIAS,
    defaults=GLM_DEFAULTS,
    names=GLM_NAMES | {
        "model.layers.{}.post_self_attn_layernorm": "layers.{}.post_attention_norm",
        "model.layers.{}.post_mlp_layernorm": "layers.{}.post_mlp_norm",
    },
    gguf_names=GGUF_GLM_NAMES,
    ignored=(*UNUSED_TENSORS, NEXT_TOKEN_LAYER),
)

GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    gguf="glm4moe",
    qk_norm=True,                    # where use_qk_norm says so
    partial_rotary=True,
    experts=DEEPSEEK_V3_EXPERTS,
    spelled=NO_OUTPUT_BIAS,
    defaults={"partial_rotary_factor": 0.5, "norm_topk_prob": True, "use_qk_norm": False, "first_k_dense_replace": 1},
    names=LLAMA_NAMES | QK_NORM_NAMES | DEEPSEEK_EXPERT_NAMES,
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES | GGUF_NORM_BEHIND,
    ignored=(*UNUSED_TENSORS, NEXT_TOKEN_LAYER),
)

# Solar Open: the mixture of GLM-4.5 in every layer, with the attention of Llama.
SOLAR_OPEN = Family(
    name="solar_open",
    architectures=("SolarOpenForCausalLM",),
    experts=DEEPSEEK_V3_EXPERTS,
    spelled=NO_OUTPUT_BIAS,
    defaults={
        "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "norm_topk_prob": True, "n_shared_experts": 1,
    },
    names=LLAMA_NAMES | DEEPSEEK_EXPERT_NAMES,
)

"""DeepSeek-V2, V2-Lite, V3 and R1, and those that have their layout (Kimi-K2, Moonlight): latent attention."""

from ridgeline.models.family import LLAMA_NAMES, ROPE_TENSORS, Family

LATENT_NAMES = {name: target for name, target in LLAMA_NAMES.items() if ".qkv" not in target} | {
    "model.layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
    "model.layers.{}.self_attn.q_a_proj": "layers.{}.attention.qkv:q_down",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa": "layers.{}.attention.qkv:kv_down",
    "model.layers.{}.self_attn.q_a_layernorm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.kv_a_layernorm": "layers.{}.attention.kv_norm",
    "model.layers.{}.self_attn.q_b_proj": "layers.{}.attention.q_up",
    "model.layers.{}.self_attn.kv_b_proj": "layers.{}.attention.kv_up",
}

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    latent=True,
    interleaved=True,
    defaults={"rms_norm_eps": 1e-6},
    names=LATENT_NAMES,
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    latent=True,
    interleaved=True,
    next_token_layers=True,
    defaults={"rms_norm_eps": 1e-6},
    names=LATENT_NAMES,
    ignored=ROPE_TENSORS,
)

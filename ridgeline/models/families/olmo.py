"""OLMo: layer norms without weights, limits on q, k and v. OLMo-2 and OLMo-3: norms only behind attention and MLP, and norms over
all heads of q and of k. OLMo-3 has windows. OLMoE: norms before them, and a mixture of experts. FlexOlmo: norms behind one."""

from ridgeline.models.family import (
    EXPERT_NAMES,
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    LLAMA_NAMES,
    QK_NORM_NAMES,
    ExpertRule,
    Family,
    without,
)

BEHIND_NAMES = {name: target for name, target in LLAMA_NAMES.items() if "input_layernorm" not in name} | {
    "model.layers.{}.post_attention_layernorm": "layers.{}.post_attention_norm",
    "model.layers.{}.post_feedforward_layernorm": "layers.{}.post_mlp_norm",
}

OLMO = Family(
    name="olmo",
    architectures=("OlmoForCausalLM",),
    gguf="olmo",
    gguf_permuted=True,
    norm="bare layer",
    clipped=True,
    spelled={"mlp_bias": ""},
    reworded=without("rms_norm_eps"),
    defaults={"rms_norm_eps": 1e-5},
    names={name: target for name, target in LLAMA_NAMES.items() if "norm" not in name},
)

OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    gguf="olmo2",
    wide_qk_norm=True,
    pre_norms=False,
    post_norms=True,
    names=BEHIND_NAMES | QK_NORM_NAMES,
)

OLMO3 = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    gguf="olmo2",                    # with a window
    wide_qk_norm=True,
    pre_norms=False,
    post_norms=True,
    window="pattern",
    full_every=4,
    local_rope=True,
    spelled={"rope_local_base_freq": "rope_theta"},      # the two differ in how they are stretched alone
    defaults={"sliding_window": 4096, "rope_theta": 500_000.0},
    names=BEHIND_NAMES | QK_NORM_NAMES,
)

OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    gguf="olmoe",
    wide_qk_norm=True,
    experts=ExpertRule(),
    only={"clip_qkv": None},
    names=LLAMA_NAMES | QK_NORM_NAMES | EXPERT_NAMES,
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)

FLEX_OLMO = Family(
    name="flex_olmo",
    architectures=("FlexOlmoForCausalLM",),
    wide_qk_norm=True,
    pre_norms=False,
    post_norms=True,
    experts=ExpertRule(),
    spelled={"mlp_bias": ""},
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 500_000.0},
    names=BEHIND_NAMES | QK_NORM_NAMES | EXPERT_NAMES,
)

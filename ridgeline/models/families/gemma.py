"""Gemma, with scaled embeddings and norms with an offset. Gemma-2 and the text part of Gemma-3: norms before and after each half
of a layer, windows on most layers. Gemma-2 caps its scores and logits; Gemma-3 has q/k norms and a rope of its own for layers
with a window.
"""

from dataclasses import replace

from ridgeline.models.family import LLAMA_NAMES, QK_NORM_NAMES, Family

# Here "post_attention_layernorm" is what its name says; in Llama it is the norm before the MLP.
SANDWICH_NAMES = {
    "model.layers.{}.post_attention_layernorm": "layers.{}.post_attention_norm",
    "model.layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.post_feedforward_layernorm": "layers.{}.post_mlp_norm",
}

GEMMA = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    gguf="gemma",
    activation="gelu_tanh",
    legacy_act="gelu",
    tied=True,
    norm_offset=1.0,
    scale_embeddings=True,
    defaults={"head_dim": 256, "rms_norm_eps": 1e-6},
)

GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    gguf="gemma2",
    activation="gelu_tanh",
    tied=True,
    post_norms=True,
    norm_offset=1.0,
    scale_embeddings=True,
    query_pre_attn_scalar=True,
    softcaps=True,
    window="pattern",
    full_every=2,
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
    },
    names=LLAMA_NAMES | SANDWICH_NAMES,
)

# Gemma-2 with the norms of Llama.
VAULT_GEMMA = replace(
    GEMMA2,
    name="vaultgemma",
    architectures=("VaultGemmaForCausalLM",),
    gguf="",
    post_norms=False,
    names={name: target for name, target in LLAMA_NAMES.items() if "post_attention" not in name} | {
        "model.layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm",
    },
)

GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    gguf="gemma3",
    activation="gelu_tanh",
    tied=True,
    qk_norm=True,
    post_norms=True,
    norm_offset=1.0,
    scale_embeddings=True,
    query_pre_attn_scalar=True,
    softcaps=True,                   # of logits alone, and only where a config asks for it
    spelled={"attn_logit_softcapping": ""},
    window="pattern",
    full_every=6,
    local_rope=True,
    # Checkpoints with a vision tower leave out most fields of `text_config`.
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    names=LLAMA_NAMES | QK_NORM_NAMES | SANDWICH_NAMES,
)

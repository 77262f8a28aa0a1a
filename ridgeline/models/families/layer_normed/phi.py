"""Phi-1, 1.5 and 2: attention and MLP side by side, biases everywhere, the head's included, and heads rotated in part.
Phi-3.5-MoE: a mixture with a choice of its own (SparseMixer)."""

from ridgeline.models.families.llama import GGUF_PLAIN_MLP_NAMES
from ridgeline.models.families.mistral import SPARSE_MOE_NAMES
from ridgeline.models.family import LLAMA_NAMES, ExpertRule, Family, saved_alone

PHI = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    gguf="phi2",
    activation="gelu_tanh",
    norm="layer+bias",
    parallel=True,
    gated=False,
    partial_rotary=True,
    spelled={"rms_norm_eps": "layer_norm_eps"},
    only={"qk_layernorm": False},
    defaults={
        "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": True, "mlp_bias": True, "lm_head_bias": True,
    },
    names={
        "model.embed_tokens": "embed",
        "model.layers.{}.input_layernorm": "layers.{}.attention_norm",
        "model.layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
        "model.layers.{}.self_attn.k_proj": "layers.{}.attention.qkv:k",
        "model.layers.{}.self_attn.v_proj": "layers.{}.attention.qkv:v",
        "model.layers.{}.self_attn.dense": "layers.{}.attention.output",
        "model.layers.{}.mlp.fc1": "layers.{}.mlp.up",
        "model.layers.{}.mlp.fc2": "layers.{}.mlp.down",
        "model.final_layernorm": "norm",
        "lm_head": "head",
    },
    prefixes=saved_alone("model", "final_layernorm"),
    gguf_names=GGUF_PLAIN_MLP_NAMES,
)

PHIMOE = Family(
    name="phimoe",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    norm="layer+bias",
    longrope=True,
    window="all",
    experts=ExpertRule(normalise=False, mixer=True),
    only={"num_experts_per_tok": 2},
    defaults={"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
    names=LLAMA_NAMES | SPARSE_MOE_NAMES,
)

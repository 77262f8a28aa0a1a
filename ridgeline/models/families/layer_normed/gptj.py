"""GPT-J: attention and MLP side by side behind one norm, heads rotated in part by neighbours, a head with a bias. CodeGen: the
same, with q, v and k of every fourth of the heads together."""

from dataclasses import replace

from ridgeline.models.family import UNUSED_TENSORS, Family, saved_alone, without

GPTJ = Family(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    activation="gelu_tanh",
    norm="layer+bias",
    parallel=True,
    gated=False,
    partial_rotary=True,
    interleaved=True,
    spelled={
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function", "num_key_value_heads": "", "attention_bias": "", "attention_out_bias": "",
    },
    reworded=without("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),      # it is rotary_dim and 10,000
    defaults={"layer_norm_epsilon": 1e-5, "rotary_dim": 64, "mlp_bias": True, "lm_head_bias": True},
    names={
        "transformer.wte": "embed",
        "transformer.h.{}.ln_1": "layers.{}.attention_norm",
        "transformer.h.{}.attn.q_proj": "layers.{}.attention.qkv:q",
        "transformer.h.{}.attn.k_proj": "layers.{}.attention.qkv:k",
        "transformer.h.{}.attn.v_proj": "layers.{}.attention.qkv:v",
        "transformer.h.{}.attn.out_proj": "layers.{}.attention.output",
        "transformer.h.{}.mlp.fc_in": "layers.{}.mlp.up",
        "transformer.h.{}.mlp.fc_out": "layers.{}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    prefixes=saved_alone("transformer", "wte", "h", "ln_f"),
    ignored=(*UNUSED_TENSORS, r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),       # masks
)

CODEGEN = replace(
    GPTJ,
    name="codegen",
    architectures=("CodeGenForCausalLM",),
    names={name: target for name, target in GPTJ.names.items() if ".qkv:" not in target} | {
        "transformer.h.{}.attn.qkv_proj": "layers.{}.attention.qkv:q+k+v",
    },
    by_head=r"transformer\.h\.\d+\.attn\.qkv_proj\.weight",
    head_groups=4,
    ignored=(*GPTJ.ignored, r"transformer\.h\.\d+\.attn\.causal_mask"),
)

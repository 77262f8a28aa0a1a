"""OPT: learned positions whose table begins two rows late, biases everywhere, an MLP without a gate and with a ReLU."""

from ridgeline.models.family import Family, without

OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    activation="relu",
    tied=True,
    norm="layer+bias",
    gated=False,
    nope="all",
    learned_positions=True,
    first_position=2,
    spelled={"intermediate_size": "ffn_dim", "hidden_act": "activation_function", "num_key_value_heads": "",
             "attention_bias": "enable_bias", "attention_out_bias": "enable_bias", "mlp_bias": "enable_bias"},
    only={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    reworded=without("rms_norm_eps"),
    defaults={"rms_norm_eps": 1e-5, "enable_bias": True},
    names={
        "model.decoder.embed_tokens": "embed",
        "model.decoder.embed_positions": "positions",
        "model.decoder.layers.{}.self_attn_layer_norm": "layers.{}.attention_norm",
        "model.decoder.layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
        "model.decoder.layers.{}.self_attn.k_proj": "layers.{}.attention.qkv:k",
        "model.decoder.layers.{}.self_attn.v_proj": "layers.{}.attention.qkv:v",
        "model.decoder.layers.{}.self_attn.out_proj": "layers.{}.attention.output",
        "model.decoder.layers.{}.final_layer_norm": "layers.{}.mlp_norm",
        "model.decoder.layers.{}.fc1": "layers.{}.mlp.up",
        "model.decoder.layers.{}.fc2": "layers.{}.mlp.down",
        "model.decoder.final_layer_norm": "norm",
        "lm_head": "head",
    },
    prefixes={"decoder.": "model.decoder."},             # of older checkpoints
)

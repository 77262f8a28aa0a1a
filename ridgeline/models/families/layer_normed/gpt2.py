"""GPT-2: learned positions, biases everywhere, an MLP without a gate. Its matrices are stored as [inputs, outputs]. StarCoder
(GPT-BigCode): the same with one head of keys and values, and matrices as elsewhere."""

from dataclasses import replace

from ridgeline.models.families.llama import GGUF_PLAIN_MLP_NAMES
from ridgeline.models.family import Family

GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    gguf="gpt2",
    activation="gelu_tanh",
    tied=True,
    norm="layer+bias",
    gated=False,
    nope="all",
    learned_positions=True,
    spelled={
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function", "num_key_value_heads": "",
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    defaults={"layer_norm_epsilon": 1e-5, "attention_bias": True, "mlp_bias": True},
    names={
        "transformer.wte": "embed",
        "transformer.wpe": "positions",
        "transformer.h.{}.ln_1": "layers.{}.attention_norm",
        "transformer.h.{}.attn.c_attn": "layers.{}.attention.qkv:q+k+v",
        "transformer.h.{}.attn.c_proj": "layers.{}.attention.output",
        "transformer.h.{}.ln_2": "layers.{}.mlp_norm",
        "transformer.h.{}.mlp.c_fc": "layers.{}.mlp.up",
        "transformer.h.{}.mlp.c_proj": "layers.{}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    gguf_names=GGUF_PLAIN_MLP_NAMES | {"position_embd": "positions"},
    # OpenAI's own checkpoints leave the first part of the names out.
    prefixes={"wte.": "transformer.wte.", "wpe.": "transformer.wpe.", "h.": "transformer.h.", "ln_f.": "transformer.ln_f."},
    transposed=r"(transformer\.)?h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),    # masks
)

GPT_BIGCODE = replace(
    GPT2,
    name="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    gguf="starcoder",
    only={**GPT2.only, "multi_query": True},
    spelled={**GPT2.spelled, "num_key_value_heads": "num_key_value_heads"},
    defaults={**GPT2.defaults, "num_key_value_heads": 1},
    transposed="",
)

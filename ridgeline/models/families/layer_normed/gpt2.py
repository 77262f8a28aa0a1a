"""GPT-2: learned positions, biases everywhere, an MLP without a gate. Its matrices are stored as [inputs, outputs]. StarCoder
(GPT-BigCode): the same with one head of keys and values, and matrices as elsewhere. GPT-Neo: windows on every second layer, and
scores that are not scaled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.errors import ModelError, shown
from ridgeline.models.config_fields import MAX_LAYERS
from ridgeline.models.families.llama import GGUF_PLAIN_MLP_NAMES
from ridgeline.models.family import Family, saved_alone

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
    prefixes=saved_alone("transformer", "wte", "wpe", "h", "ln_f"),
    transposed=r"transformer\.h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight",
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),    # masks
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


_NEO_KINDS = {"global": "full_attention", "local": "sliding_attention"}


def neo_reworded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`attention_types` lists, in pairs of kinds and how often they repeat, what each layer is."""
    layers = raw.get("attention_layers") or _repeated(raw.get("attention_types") or [])
    if not isinstance(layers, list) or not all(isinstance(kind, str) and kind in _NEO_KINDS for kind in layers):
        raise ModelError(f"config.json: attention_layers must list {' or '.join(_NEO_KINDS)} for each layer, got {shown(layers)}")
    return {**raw, "layer_types": [_NEO_KINDS[kind] for kind in layers], "query_pre_attn_scalar": 1}


def _repeated(types: Any) -> list[Any]:
    layers: list[Any] = []
    for pair in types if isinstance(types, list) else [types]:
        match pair:
            case [list() as kinds, int() as times] if 0 <= times <= MAX_LAYERS:
                layers += kinds * times
            case _:
                raise ModelError("config.json: attention_types must list pairs of kinds and how often they repeat, such as "
                                 f'[[["global", "local"], 12]], got {types!r:.80}')
    return layers


_NEO_ATTENTION = "transformer.h.{}.attn.attention"
GPT_NEO = replace(
    GPT2,
    name="gpt_neo",
    architectures=("GPTNeoForCausalLM",),
    gguf="",
    window="pattern",
    query_pre_attn_scalar=True,
    reworded=neo_reworded,
    spelled={
        "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function", "sliding_window": "window_size", "num_key_value_heads": "",
        "attention_out_bias": "attention_out_bias",
    },
    only={},
    defaults={"layer_norm_epsilon": 1e-5, "window_size": 256, "attention_out_bias": True, "mlp_bias": True},
    names={name: target for name, target in GPT2.names.items() if ".attention." not in target} | {
        f"{_NEO_ATTENTION}.q_proj": "layers.{}.attention.qkv:q",
        f"{_NEO_ATTENTION}.k_proj": "layers.{}.attention.qkv:k",
        f"{_NEO_ATTENTION}.v_proj": "layers.{}.attention.qkv:v",
        f"{_NEO_ATTENTION}.out_proj": "layers.{}.attention.output",
    },
    transposed="",
    ignored=(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",),        # masks
)

"""Falcon (1 and 2): attention and MLP side by side behind one norm (7B, 11B) or behind one each (40B, 180B), one head of keys and
values or a few, and q, k and v of each KV head together. Falcon 3 is Llama; those with ALiBi (falcon-rw) are refused."""

from collections.abc import Mapping
from typing import Any

from ridgeline.models.families.llama import GGUF_PLAIN_MLP_NAMES
from ridgeline.models.family import Family, saved_alone


def reworded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """How many KV heads and norms there are follows from several fields; older files have names of their own for some."""
    old = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"}
    found = {**raw, **{name: raw.get(name, raw.get(former)) for name, former in old.items()}}
    new = found.get("new_decoder_architecture")
    if new is None:                  # as 40B's first files, whose own code had only the new layout
        new = raw.get("n_head_kv") is not None and "multi_query" not in raw
    heads = found["num_kv_heads"] or found["num_attention_heads"]
    if not new and found.get("multi_query", True):
        heads = 1                    # whatever num_kv_heads says
    norms = found.get("num_ln_in_parallel_attn") or (2 if new else 1)
    hidden = found.get("hidden_size")
    wide = found.get("ffn_hidden_size") or (4 * hidden if isinstance(hidden, int) else None)
    return {**found, "num_kv_heads": heads, "num_ln_in_parallel_attn": norms, "ffn_hidden_size": wide}


FALCON = Family(
    name="falcon",
    architectures=("FalconForCausalLM", "RWForCausalLM"),
    gguf="falcon",
    activation="gelu",
    tied=True,
    norm="layer+bias",
    parallel=True,
    own_mlp_norm=True,
    gated=False,
    spelled={
        "rms_norm_eps": "layer_norm_epsilon", "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation", "use_parallel_residual": "parallel_attn", "attention_bias": "bias", "mlp_bias": "bias",
        "attention_out_bias": "bias",
    },
    reworded=reworded,
    only={"alibi": False},
    defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048},
    names={
        "transformer.word_embeddings": "embed",
        "transformer.h.{}.input_layernorm": "layers.{}.attention_norm",
        "transformer.h.{}.ln_attn": "layers.{}.attention_norm",
        "transformer.h.{}.self_attention.query_key_value": "layers.{}.attention.qkv:q+k+v",
        "transformer.h.{}.self_attention.dense": "layers.{}.attention.output",
        "transformer.h.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "transformer.h.{}.ln_mlp": "layers.{}.mlp_norm",
        "transformer.h.{}.mlp.dense_h_to_4h": "layers.{}.mlp.up",
        "transformer.h.{}.mlp.dense_4h_to_h": "layers.{}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    gguf_names=GGUF_PLAIN_MLP_NAMES,
    prefixes=saved_alone("transformer", "word_embeddings", "h", "ln_f"),
    by_head=r"transformer\.h\.\d+\.self_attention\.query_key_value\.(weight|bias)",
)

"""GPT-NeoX (Pythia, and others that were made with it): attention and MLP side by side, each behind its own norm; heads are
rotated in part. Checkpoints have q, k and v of each head together."""

from ridgeline.models.families.llama import GGUF_PLAIN_MLP_NAMES
from ridgeline.models.family import UNUSED_TENSORS, Family, saved_alone

GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    gguf="gptneox",
    activation="gelu",
    norm="layer+bias",
    parallel=True,
    own_mlp_norm=True,
    gated=False,
    partial_rotary=True,
    spelled={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct",
             "num_key_value_heads": ""},
    defaults={"layer_norm_eps": 1e-5, "rotary_pct": 0.25, "attention_bias": True, "mlp_bias": True},
    names={
        "gpt_neox.embed_in": "embed",
        "gpt_neox.layers.{}.input_layernorm": "layers.{}.attention_norm",
        "gpt_neox.layers.{}.attention.query_key_value": "layers.{}.attention.qkv:q+k+v",
        "gpt_neox.layers.{}.attention.dense": "layers.{}.attention.output",
        "gpt_neox.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "gpt_neox.layers.{}.mlp.dense_h_to_4h": "layers.{}.mlp.up",
        "gpt_neox.layers.{}.mlp.dense_4h_to_h": "layers.{}.mlp.down",
        "gpt_neox.final_layer_norm": "norm",
        "embed_out": "head",
    },
    gguf_names=GGUF_PLAIN_MLP_NAMES,
    prefixes=saved_alone("gpt_neox", "embed_in", "layers", "final_layer_norm"),
    by_head=r"gpt_neox\.layers\.\d+\.attention\.query_key_value\.(weight|bias)",
    # Masks that old versions of transformers saved.
    ignored=(*UNUSED_TENSORS, r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)"),
)

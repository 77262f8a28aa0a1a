"""Phi-3 and Phi-4-mini: q, k, v and gate, up are fused in the checkpoint, heads may be rotated in part, longrope."""

from ridgeline.models.family import GGUF_NAMES, LLAMA_NAMES, Family

PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    gguf="phi3",
    partial_rotary=True,
    longrope=True,
    window="all",
    defaults={"original_max_position_embeddings": 4096},
    names=LLAMA_NAMES | {
        "model.layers.{}.self_attn.qkv_proj": "layers.{}.attention.qkv:q+k+v",
        "model.layers.{}.mlp.gate_up_proj": "layers.{}.mlp.gate_up:gate+up",
    },
    gguf_names=GGUF_NAMES | {"blk.{}.ffn_up": "layers.{}.mlp.gate_up:gate+up"},
)

"""Phi-3 and Phi-4-mini: q, k, v and gate, up are fused in the checkpoint, heads may be rotated in part, longrope. The language
models of Phi-4-multimodal and Phi-3-vision are the same; text does not go through their adapters."""

from dataclasses import replace

from ridgeline.models.family import GGUF_NAMES, LLAMA_NAMES, UNUSED_TENSORS, Family

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

PHI4_MULTIMODAL = replace(
    PHI3,
    name="phi4_multimodal",
    architectures=("Phi4MultimodalForCausalLM", "Phi4MMForCausalLM", "Phi3VForCausalLM"),
    gguf="",
    # The matrices beside adapters.
    names={**PHI3.names, **{f"{name}.base_layer": target for name, target in PHI3.names.items() if "_proj" in name}},
    ignored=(*UNUSED_TENSORS, r"model\.(embed_tokens_extend|vision_embed_tokens)\..*", r"model\.layers\..*\.lora_[AB]\..*"),
)

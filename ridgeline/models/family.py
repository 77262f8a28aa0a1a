"""What a model family declares: the ways it differs from Llama, and how its checkpoints name things.

There is one decoder. A family is data: flags with Llama's behaviour as their default, and two name maps. It holds no
sizes (those are a checkpoint's own, see `model_config.py`), no code and no torch.

A name map goes from the checkpoint's module name to ours, both with `{}` for the layer. `:part` says which part of a
fused parameter the tensor is, `:a+b` that it holds several parts, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# How transformers names the modules of Llama; most families follow.
LLAMA_NAMES = {
    "model.embed_tokens": "embed",
    "model.layers.{}.input_layernorm": "layers.{}.attention_norm",
    "model.layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
    "model.layers.{}.self_attn.k_proj": "layers.{}.attention.qkv:k",
    "model.layers.{}.self_attn.v_proj": "layers.{}.attention.qkv:v",
    "model.layers.{}.self_attn.o_proj": "layers.{}.attention.output",
    "model.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.mlp.gate_proj": "layers.{}.mlp.gate_up:gate",
    "model.layers.{}.mlp.up_proj": "layers.{}.mlp.gate_up:up",
    "model.layers.{}.mlp.down_proj": "layers.{}.mlp.down",
    "model.norm": "norm",
    "lm_head": "head",
}

QK_NORM_NAMES = {
    "model.layers.{}.self_attn.q_norm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.attention.k_norm",
}

# GGUF has one vocabulary of names for all families.
GGUF_NAMES = {
    "token_embd": "embed",
    "blk.{}.attn_norm": "layers.{}.attention_norm",
    "blk.{}.attn_q": "layers.{}.attention.qkv:q",
    "blk.{}.attn_k": "layers.{}.attention.qkv:k",
    "blk.{}.attn_v": "layers.{}.attention.qkv:v",
    "blk.{}.attn_qkv": "layers.{}.attention.qkv:q+k+v",
    "blk.{}.attn_q_norm": "layers.{}.attention.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.attention.k_norm",
    "blk.{}.attn_output": "layers.{}.attention.output",
    "blk.{}.post_attention_norm": "layers.{}.post_attention_norm",
    "blk.{}.ffn_norm": "layers.{}.mlp_norm",
    "blk.{}.ffn_gate": "layers.{}.mlp.gate_up:gate",
    "blk.{}.ffn_up": "layers.{}.mlp.gate_up:up",
    "blk.{}.ffn_down": "layers.{}.mlp.down",
    "blk.{}.post_ffw_norm": "layers.{}.post_mlp_norm",
    "output_norm": "norm",
    "output": "head",
}

# Rope frequencies come from the config.
ROPE_TENSORS = (r".*\.rotary_emb\.inv_freq", r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight")


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    architectures: tuple[str, ...]   # `architectures` of config.json
    gguf: str = ""                   # `general.architecture` of a GGUF file

    activation: str = "silu"         # of the gate, where the checkpoint does not say
    tied: bool = False               # the head is the embedding, where the checkpoint does not say
    qkv_bias: bool = False           # q, k and v have biases whatever the checkpoint says
    qk_norm: bool = False            # an RMS norm on every head of q and k, before the rotation
    post_norms: bool = False         # norms also after attention and after the MLP
    norm_offset: float = 0.0         # norms multiply by weight + offset
    scale_embeddings: bool = False   # embeddings are multiplied by sqrt(hidden_size)
    query_pre_attn_scalar: bool = False  # this field, not head_dim, scales the attention scores
    softcaps: bool = False           # tanh caps on attention scores and on logits
    partial_rotary: bool = False     # only the first part of a head is rotated
    longrope: bool = False           # rope type "longrope"
    window: str = "none"             # which layers slide: "none", "all", "upper" (Qwen), "pattern" (Gemma)
    full_every: int = 0              # with "pattern": every n-th layer sees everything
    local_rope: bool = False         # layers with a window have a rope of their own
    latent: bool = False             # attention over one compressed vector per token (latent_config.py)
    interleaved: bool = False        # dimensions that rotate together lie side by side, where the checkpoint does not say
    next_token_layers: bool = False  # layers behind the last are for drafts (MTP): they stay in the file

    # What transformers assumes where config.json is silent, other than its usual defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES, hash=False, repr=False)
    gguf_names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES, hash=False, repr=False)
    gguf_permuted: bool = False      # GGUF stores the q and k rows of this family interleaved
    # Beginnings of names in a checkpoint that also has other modalities, and what they stand for.
    prefixes: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    ignored: tuple[str, ...] = ROPE_TENSORS  # patterns of checkpoint tensors that are not loaded

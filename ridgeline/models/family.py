"""What a model family declares: the ways it differs from Llama, and how its checkpoints name things.

There is one decoder. A family is data: flags with Llama's behaviour as their default, and two name maps. It holds no
sizes (those are a checkpoint's own, see `model_config.py`), no code and no torch.

A name map goes from the checkpoint's module name to ours, both with `{}` for the layer and, of experts, a second one for the
expert. `:part` says which part of a fused parameter the tensor is, `:a+b` that it holds several parts, one after the other. A
tensor that is no parameter of a module has its whole name there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    "blk.{}.attn_sinks": "layers.{}.attention.sinks",
    "blk.{}.post_attention_norm": "layers.{}.post_attention_norm",
    "blk.{}.ffn_norm": "layers.{}.mlp_norm",
    "blk.{}.ffn_gate": "layers.{}.mlp.gate_up:gate",
    "blk.{}.ffn_up": "layers.{}.mlp.gate_up:up",
    "blk.{}.ffn_down": "layers.{}.mlp.down",
    "blk.{}.post_ffw_norm": "layers.{}.post_mlp_norm",
    "output_norm": "norm",
    "output": "head",
}

# llama.cpp calls the norm before the MLP by what it comes behind, in some families.
GGUF_NORM_BEHIND = {"blk.{}.post_attention_norm": "layers.{}.mlp_norm"}
# Where attention and MLP stand side by side and each has a norm (Falcon 40B, 180B), the second one is attention's.
GGUF_SECOND_NORM = {"blk.{}.attn_norm": "layers.{}.mlp_norm", "blk.{}.attn_norm_2": "layers.{}.attention_norm"}

# Rope frequencies come from the config. Some checkpoints of a language model alone still have what it saw with.
UNUSED_TENSORS = (
    r".*\.rotary_emb\.inv_freq", r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight",
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*",
)

# Beginnings of names, and what they stand for: of a language model from inside another, or saved without its head's class …
PREFIXES = {
    "language_model.": "", "model.language_model.": "model.",
    "layers.": "model.layers.", "embed_tokens.": "model.embed_tokens.", "norm.": "model.norm.",
}


def saved_alone(base: str, *modules: str) -> dict[str, str]:
    """PREFIXES of a family whose class without a head leaves `base` out of these modules' names."""
    return PREFIXES | {f"{module}.": f"{base}.{module}." for module in modules}


# … and of checkpoints that also see images, or hear: their language model is served, the rest is left in the file.
TEXT_PREFIXES = {
    "language_model.model.model.": "model.",             # as transformers 5 saves those that hear
    "language_model.": "", "model.language_model.": "model.", "model.text_model.": "model.", "llm.": "",
    "thinker.model.": "model.", "thinker.lm_head.": "lm_head.",
}
_TEXT = (r"(language_model|model\.(language_model|text_model|layers|embed_tokens|norm)|llm|lm_head|output"
         r"|thinker\.(model|lm_head))\.")
NOT_TEXT = rf"(?!{_TEXT}).*"

# A layer behind the last one that predicts the token after next (MTP): a draft head, which is not used yet.
NEXT_TOKEN_LAYER = r"(model\.layers|blk)\.{num_layers}\..*"

# Of the experts: `{}` a second time, for the expert's number.
EXPERT_NAMES = {
    "model.layers.{}.mlp.gate": "layers.{}.mlp.router",
    "model.layers.{}.mlp.experts.{}.gate_proj": "layers.{}.mlp.experts.{}.gate_up:gate",
    "model.layers.{}.mlp.experts.{}.up_proj": "layers.{}.mlp.experts.{}.gate_up:up",
    "model.layers.{}.mlp.experts.{}.down_proj": "layers.{}.mlp.experts.{}.down",
    # Where all experts lie in one tensor (`FUSED_EXPERTS`).
    "model.layers.{}.mlp.experts.{}.gate_up_proj": "layers.{}.mlp.experts.{}.gate_up:gate+up",
}
GGUF_EXPERT_NAMES = {
    "blk.{}.ffn_gate_inp": "layers.{}.mlp.router",
    "blk.{}.experts.{}.ffn_gate_exps": "layers.{}.mlp.experts.{}.gate_up:gate",
    "blk.{}.experts.{}.ffn_up_exps": "layers.{}.mlp.experts.{}.gate_up:up",
    "blk.{}.experts.{}.ffn_down_exps": "layers.{}.mlp.experts.{}.down",
    "blk.{}.ffn_gate_inp_shexp": "layers.{}.mlp.shared_gate",
    "blk.{}.ffn_gate_shexp": "layers.{}.mlp.shared.gate_up:gate",
    "blk.{}.ffn_up_shexp": "layers.{}.mlp.shared.gate_up:up",
    "blk.{}.ffn_down_shexp": "layers.{}.mlp.shared.down",
    "blk.{}.exp_probs_b.bias": "layers.{}.mlp.router.e_score_correction_bias",
}


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A tensor [experts, …] with the same parameter of all experts, and what each is called when they are taken apart."""

    pattern: str                     # of the tensor's name; its groups fill `name`, where `{}` is the expert
    name: str
    transposed: bool = False         # [inputs, outputs]
    either: bool = False             # … or not: one of the two is the hidden size
    paired: bool = False             # its outputs are gate, up, gate, up …


GGUF_STACKED = FusedExperts(r"(blk\.\d+)\.(ffn_\w+_exps)\.(weight|bias)", r"\1.experts.{}.\2.\3")
# As transformers 5 and llama.cpp write them.
FUSED_EXPERTS = (
    FusedExperts(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)", r"\1.{}.\2.weight"),
    GGUF_STACKED,
)


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """How a family's tokens choose experts, and what its experts are."""

    score: str = "softmax"           # of the router's logits: "softmax" over all experts, or "sigmoid" of each
    normalise: bool | None = None    # weights of the chosen ones sum to 1; None: norm_topk_prob says it
    usually_normalised: bool = False     # … where a GGUF file does not say it either
    choice_bias: bool = False        # a bias of the scores, for the choice alone
    groups: bool = False             # choose among the experts of the best groups only
    group_score: str = "best"        # a group's score is its best expert's, or the sum of its "best two"
    scaled: bool = False             # weights are multiplied by routed_scaling_factor
    shared_gate: bool = False        # the shared expert has a gate of one logit
    router_bias: bool = False
    bias: bool = False               # of the experts' linears
    clamped: bool = False            # gate and up are clamped, as in gpt-oss
    scales_input: bool = False       # the weight of an expert multiplies its input, not its result
    mixer: bool = False              # weights among experts with logits near the best one's (router_jitter_noise says how near)


def without(*names: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A `reworded` that takes away fields which a family does not have, and which are nothing to transformers."""
    return lambda raw: {name: value for name, value in raw.items() if name not in names}


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    architectures: tuple[str, ...]   # `architectures` of config.json
    gguf: str = ""                   # `general.architecture` of a GGUF file …
    gguf_also: tuple[str, ...] = ()  # … and other names of the same: checkpoints that also see images have their own

    activation: str = "silu"         # of the gate, where the checkpoint does not say
    legacy_act: str = ""             # a `hidden_act` that stands in old files of this family, and means `activation`
    tied: bool = False               # the head is the embedding, where the checkpoint does not say
    qkv_bias: bool = False           # q, k and v have biases whatever the checkpoint says
    qk_norm: bool = False            # an RMS norm on every head of q and k, before the rotation
    late_qk_norm: bool = False       # … behind it
    wide_qk_norm: bool = False       # … or one over all heads of q, and one over all of k
    norm: str = "rms"                # "rms", "layer" (subtracts the mean too), "layer+bias", "bare layer" (without weights)
    pre_norms: bool = True           # norms before attention and before the MLP
    post_norms: bool = False         # norms also after attention and after the MLP
    inner_norms: bool = False        # norms also before the output matrix of attention and of the MLP
    norm_offset: float = 0.0         # norms multiply by weight + offset
    parallel: bool = False           # attention and MLP read the same normed rows, and both are added
    own_mlp_norm: bool = False       # … of which the MLP has a norm of its own
    gated: bool = True               # the MLP has a gate
    scale_embeddings: bool = False   # embeddings are multiplied by sqrt(hidden_size)
    multipliers: bool = False        # Granite's fields: of embeddings, of each addition to the stream, of scores, of logits
    depth_scale: bool = False        # MiniCPM's: scale_emb, scale_depth / sqrt(layers), hidden_size / dim_model_base
    logit_scale: bool = False        # this field multiplies the logits
    query_pre_attn_scalar: bool = False  # this field, not head_dim, scales the attention scores
    sinks: bool = False              # every head has a score without a value, beside those of the keys
    softcaps: bool = False           # tanh caps on attention scores and on logits
    partial_rotary: bool = False     # only the first part of a head is rotated
    interleaved: bool = False        # dimensions that rotate together lie side by side in the checkpoint
    longrope: bool = False           # rope type "longrope"
    alpha_rope: bool = False         # dynamic rope with an `alpha` that stretches every length
    # Layers without a rope: "none", "listed" (no_rope_layers), "full" (those without a window), "hybrid" (the same, where the
    # config has a window at all), "all".
    nope: str = "none"
    learned_positions: bool = False  # every position has an embedding, which is added to the token's …
    first_position: int = 0          # … and the first of them is this row of the table
    clipped: bool = False            # clip_qkv, where the config has one, limits q, k and v
    window: str = "none"             # which layers slide: "none", "all", "upper" (Qwen), "pattern" (Gemma); "chunks": see below
    full_every: int = 0              # with "pattern": every n-th layer sees everything, the last of n layers …
    full_first: bool = False         # … or the first
    # With "chunks", layers with a rope see their own chunk of attention_chunk_size positions.
    temperature: str = "none"        # queries grow with their position: "nope" (those of layers without a rope), "all"
    bare_qk_norm: bool = False       # an RMS norm without weights on every head of q and k, in layers with a rope
    local_rope: bool = False         # layers with a window have a rope of their own
    latent: bool = False             # attention over one compressed vector per token (latent_config.py)
    experts: ExpertRule | None = None    # a mixture of experts

    # What transformers assumes where config.json is silent, other than its usual defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    # Our name of a field (Llama's) -> the family's; "" where it has none and the field means nothing.
    spelled: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    # config.json in Llama's words, where other names of fields (`spelled`) are not enough.
    reworded: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = field(default=None, hash=False, repr=False)
    # Fields that would change the model and that this engine does not compute, with the one value that changes nothing.
    only: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES, hash=False, repr=False)
    gguf_names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES, hash=False, repr=False)
    gguf_permuted: bool = False      # GGUF stores the q and k rows of this family interleaved
    # Beginnings of names in a checkpoint that also has other modalities, and what they stand for. All patterns below are of names
    # with such a beginning replaced; only `not_text` is of the names as stored.
    prefixes: Mapping[str, str] = field(default_factory=lambda: PREFIXES, hash=False, repr=False)
    fused_experts: tuple[FusedExperts, ...] = FUSED_EXPERTS
    transposed: str = ""             # pattern of tensors that are stored as [inputs, outputs]
    by_head: str = ""                # pattern of tensors whose rows are q, k and v of the first KV head, then of the second …
    head_groups: int = 0             # … or in this many groups, each with its queries, values and keys
    not_text: str = ""               # pattern of the tensors of other modalities
    ignored: tuple[str, ...] = UNUSED_TENSORS  # patterns of checkpoint tensors that are not loaded; {num_layers} is filled in

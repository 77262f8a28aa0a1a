"""A model as plain facts: one frozen ModelConfig, from a Hugging Face config.json or a GGUF file's metadata.

Reads the spellings of transformers 4 and 5, checks every field, and says which family the model belongs to. Loads no
weights and needs no torch. Code inside a model directory is never run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ridgeline.distributed.sharding import head_shards
from ridgeline.errors import ModelError
from ridgeline.model_files import read_json
from ridgeline.models.checkpoints.gguf_formats import PackedMatrix, gguf_quantisation, packed_matrices
from ridgeline.models.checkpoints.quantisation import other_dtypes, read_quantisation, safetensors_headers
from ridgeline.models.checkpoints.recipe import Quantisation
from ridgeline.models.config_fields import (
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    Fields,
    check_gguf_only,
    check_heads,
    check_only,
    read_activation,
    read_dtype,
    read_head_dim,
    read_intermediate,
)
from ridgeline.models.end_tokens import directory_eos_token, gguf_end_tokens, hf_end_tokens, language_model
from ridgeline.models.expert_config import Experts, gguf_experts, gguf_score, read_experts
from ridgeline.models.families.all_families import declared_family, gguf_family, is_headless, stores_head
from ridgeline.models.family import GGUF_SECOND_NORM, Family
from ridgeline.models.gguf import GGUFFile, GGUFTensor
from ridgeline.models.latent_config import Latent, gguf_latent, read_latent
from ridgeline.models.layer_patterns import (
    Temperature,
    gguf_layers,
    gguf_ropes,
    gguf_score_scale,
    gguf_temperature,
    gguf_windows,
    hf_ropes,
    hf_windows,
    read_temperature,
    windows_that_hide,
)
from ridgeline.models.multipliers import gguf_epsilon, gguf_multipliers, gguf_softcaps, read_multipliers, read_softcaps
from ridgeline.models.rope import Rope, yarn_score_scale
from ridgeline.process.log import get_logger
from ridgeline.sizes.kv_spec import KVGroupSpec, group_layers

logger = get_logger("models")

# The 27B models of Gemma scale scores by hidden_size / heads; GGUF does not say so, their depth does.
GGUF_QUERY_SCALE_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}
CLAMP = "attention.clamp_kqv"                            # of q, k and v, in GGUF


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int     # the longest context the model was made for
    rms_norm_eps: float
    dtype: str                       # of the checkpoint, one of op_costs.DTYPE_BYTES
    eos_token_ids: tuple[int, ...]   # any of them ends an answer

    tied: bool                       # the head is the embedding
    activation: str                  # of the gate: silu, gelu, gelu_tanh
    qkv_bias: bool
    output_bias: bool                # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    post_norms: bool
    norm_offset: float
    embedding_scale: float
    attention_scale: float           # of the scores, before any cap
    attention_softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]  # per layer; None sees everything
    ropes: tuple[Rope, ...]          # per layer
    late_qk_norm: bool = False       # norms of q and k behind the rotation
    wide_qk_norm: bool = False       # norms of q and of k over all heads together
    norm: str = "rms"                # "rms", "layer", "layer+bias", "bare layer" (without weights)
    pre_norms: bool = True
    parallel: bool = False           # attention and MLP read the same rows …
    own_mlp_norm: bool = False       # … normed by each on its own
    gated: bool = True               # the MLP has a gate
    sinks: bool = False              # every head has a score without a value
    residual_scale: float = 1.0      # of what attention and MLP add to the stream
    logit_scale: float = 1.0
    interleaved: bool = False        # the checkpoint has dimensions that rotate together side by side
    experts: Experts | None = None   # a mixture in the place of most MLPs; `intermediate_size` is that of the others
    packed: tuple[PackedMatrix, ...] = ()                # of a GGUF file, as a CPU keeps them
    quantisation: Quantisation | None = None             # of the checkpoint's own weights
    stored: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)    # dtypes of tensors that are not of `dtype`
    chunked: bool = False            # windows are chunks: a query sees what of its chunk is before it
    temperature: Temperature | None = None               # queries grow with their position
    bare_qk_norm: bool = False       # norms without weights on q and k, in layers with a rope
    latent: Latent | None = None     # latent attention: one KV head, and `head_dim` is that of queries
    head_bias: bool = False
    learned_positions: bool = False  # an embedding for every position …
    first_position: int = 0          # … after this many rows that are not used
    qkv_clip: float | None = None    # limits q, k and v
    inner_norms: bool = False        # norms before the output matrices of attention and MLP
    headless: bool = False           # gives vectors alone: the checkpoint has no head, and the embedding stands in its place

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """(count, outputs, inputs) of the linears, fused as in the decoder, experts included; the last is the head."""
        return self._matrices(0 if self.experts is None else self.experts.count)

    @property
    def token_matrices(self) -> list[tuple[int, int, int]]:
        """The same, of the experts only those that one token visits."""
        return self._matrices(0 if self.experts is None else self.experts.used)

    def _matrices(self, visited: int) -> list[tuple[int, int, int]]:
        hidden, experts = self.hidden_size, self.experts
        found = [
            *((self.num_layers, outputs, inputs) for outputs, inputs in self.attention_matrices.values()),
            (self.num_layers, hidden, self.num_heads * self.value_dim),
            (self.num_plain, (1 + self.gated) * self.intermediate_size, hidden),
            (self.num_plain, hidden, self.intermediate_size),
        ]
        if experts is not None:
            mixed = self.num_layers - self.num_plain
            found += [(mixed, experts.count, hidden)] + [(mixed, 1, hidden)] * experts.shared_gate
            found += [(mixed, 2 * experts.shared, hidden), (mixed, hidden, experts.shared)] * bool(experts.shared)
            found += [(mixed * visited, 2 * experts.width, hidden), (mixed * visited, hidden, experts.width)]
        return [*found, (1, self.vocab_size, hidden)]

    @property
    def num_plain(self) -> int:
        """Layers with a plain MLP."""
        return self.num_layers if self.experts is None else self.experts.dense_layers

    @property
    def mlp_elements(self) -> int:
        """Numbers that the MLP of one token keeps at once: gate, up and their product; with experts, for each of those that it
        visits the product and the result."""
        plain = 3 * self.intermediate_size if self.num_plain else 0
        experts = self.experts
        if experts is None:
            return plain
        return max(plain, experts.used * (experts.width + self.hidden_size) + 3 * experts.shared + self.hidden_size)

    @property
    def value_dim(self) -> int:
        """Of a head."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's linears before its attention."""
        if self.latent is not None:
            return self.latent.linears(self.hidden_size, self.num_heads)
        return {"qkv": ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim, self.hidden_size)}

    @property
    def num_parameters(self) -> int:
        """Weights and biases, the embedding counted once if the head shares it."""
        each = self.hidden_size * {"layer+bias": 2, "bare layer": 0}.get(self.norm, 1)
        norms = each * self.norms_per_layer + 2 * self.head_dim * self.qk_norm
        norms += (self.num_heads + self.num_kv_heads) * self.head_dim * self.wide_qk_norm + self.num_heads * self.sinks
        if self.latent is not None:
            norms += self.latent.kv_rank + self.latent.query_rank
        norms += (self.num_heads * self.head_dim + self.intermediate_size) * self.inner_norms
        biases = self.attention_matrices["qkv"][0] * self.qkv_bias
        wide = (1 + self.gated) * self.intermediate_size
        biases += self.hidden_size * self.output_bias
        beside = self.num_plain * (wide + self.hidden_size) * self.mlp_bias + self._expert_biases
        embedding = 0 if self.tied else self.vocab_size * self.hidden_size
        matrices = sum(count * outputs * inputs for count, outputs, inputs in self.matrices)
        beside += 2 * self.num_plain * (self.activation == "xielu")
        embedding += self.vocab_size * self.head_bias
        embedding += (self.max_position_embeddings + self.first_position) * self.hidden_size * self.learned_positions
        return matrices + embedding + self.num_layers * (norms + biases) + beside + each

    @property
    def _expert_biases(self) -> int:
        experts = self.experts
        if experts is None:
            return 0
        of_layer = experts.count * (experts.router_bias + experts.routing.choice_bias)
        of_layer += experts.count * (2 * experts.width + self.hidden_size) * experts.bias
        return (self.num_layers - self.num_plain) * of_layer

    @property
    def norms_per_layer(self) -> int:
        """Of the hidden size."""
        return 1 + self.own_mlp_norm if self.parallel else 2 * self.pre_norms + 2 * self.post_norms


@functools.cache                         # once: a start reads the config several times
def _warn_of_adapter(path: Path) -> None:
    logger.warning("%s also has a LoRA adapter, which is not applied: merge it first, if answers should be its own", path)


def load_model_config(path: str | Path) -> ModelConfig:
    """From a directory with config.json or a .gguf file."""
    path = Path(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model: give a directory with config.json or a .gguf file")
        with GGUFFile(path) as file:
            return gguf_model_config(file, path.name)
    if not path.is_dir():
        raise ModelError(f"model {path} does not exist: give a directory with config.json or a .gguf file")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ModelError(
            f"{path} is a LoRA adapter, not a model: merge it into its base model first (peft: merge_and_unload, then "
            "save_pretrained), and give the merged directory"
        )
    if not (path / "config.json").is_file():
        ggufs = sorted(each.name for each in path.glob("*.gguf"))
        hint = f"give the file {ggufs[0]}" if ggufs else "give a Hugging Face model directory or a .gguf file"
        if (path / "params.json").is_file():
            hint = "params.json is its makers' own format; give the model's Hugging Face directory"
        raise ModelError(f"{path} has no config.json: {hint}")
    if (path / "adapter_config.json").is_file():
        _warn_of_adapter(path)
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    return hf_model_config(
        raw, read_json(generation) if generation.is_file() else {}, eos_token=directory_eos_token(path), directory=path
    )


def kv_groups(config: ModelConfig, block_size: int, tp_size: int = 1, context_size: int = 1) -> list[KVGroupSpec]:
    """The KV cache's groups, the same on all ranks. `context_size` ranks divide positions, with `block_size` of a block each."""
    here = head_shards(config.num_heads, config.num_kv_heads, 0, tp_size)[1].size
    heads = here if context_size == 1 else here * min(config.num_kv_heads, tp_size)
    key, value = (config.head_dim, 0) if config.latent is None else (config.latent.width, config.latent.kv_rank)
    size, groups = block_size * context_size, group_layers(list(config.windows))
    return [KVGroupSpec(layers, window, size, heads, key, value, context_size) for window, layers in groups]


def checkpoint_dtype(config: ModelConfig) -> str:
    """In which a GPU computes a checkpoint, unless another is asked for."""
    narrow = config.quantisation is not None and config.quantisation.method != "gguf"      # kernels of codes compute in bfloat16
    return config.dtype if config.dtype in ("bfloat16", "float16") and not narrow else "bfloat16"


def layer_groups(config: ModelConfig) -> list[int]:
    """For each layer, the index of its group in `kv_groups`."""
    place = [0] * config.num_layers
    for index, (_, layers) in enumerate(group_layers(list(config.windows))):
        for layer in layers:
            place[layer] = index
    return place


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def hf_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], family: Family | None = None, where: str = "config.json",
    eos_token: int | None = None, directory: Path | None = None,
) -> ModelConfig:
    """From config.json, generation_config.json and the id of the tokenizer's eos_token. `family` overrides the declared one;
    `directory`: where the weights are."""
    text = language_model(raw)
    family = family or declared_family(raw, text, where)
    if "auto_map" in raw:
        logger.warning("%s names its own Python code (auto_map), which is never run; the built-in %s is used", where, family.name)
    ends = hf_end_tokens(raw, generation, eos_token)
    if text is not None:
        raw = {**raw, **text}         # the language model's fields, above those it shares with other modalities
    if family.reworded is not None:
        raw = family.reworded(raw)
    fields = Fields(where, raw, family.defaults, {"attention_out_bias": "attention_bias", **family.spelled})
    check_only(fields, family)
    for checked in (fields, Fields("generation_config.json", generation, {})):
        checked.ids("eos_token_id")

    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    latent = read_latent(fields, family.interleaved) if family.latent else None
    num_kv_heads = 1 if latent is not None else fields.integer("num_key_value_heads", num_heads, maximum=MAX_HEADS)
    hidden_size = fields.integer("hidden_size", maximum=MAX_HIDDEN)
    head_dim = latent.head if latent is not None else read_head_dim(fields, "head_dim", "hidden_size", hidden_size, num_heads)
    check_heads(where, num_heads, num_kv_heads)
    windows = hf_windows(fields, family, num_layers)
    max_position = fields.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    rotated = head_dim if latent is None else latent.rope
    ropes, max_position = hf_ropes(fields, family, rotated, max_position, windows)
    windows = windows_that_hide(windows, max_position)
    experts = read_experts(fields, family.experts, num_layers) if family.experts is not None else None
    headers = {} if directory is None else safetensors_headers(directory)
    head = _head(fields, family, headers, text is not None)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=experts.dense_width if experts else read_intermediate(fields, hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps"),
        dtype=read_dtype(fields),
        eos_token_ids=ends,
        activation=read_activation(fields, family),
        norm_offset=family.norm_offset,
        **read_softcaps(fields, family),
        windows=windows,
        ropes=ropes,
        interleaved=family.interleaved and latent is None,       # latents are rotated as they are
        experts=experts,
        quantisation=read_quantisation(raw, where, directory, headers),
        stored=other_dtypes(headers, read_dtype(fields)),
        latent=latent,
        **head, **_scales(fields, family, hidden_size, head_dim), **_layout(family) | _biases(fields, family, head["headless"]),
    )


def _head(fields: Fields, family: Family, stored: Mapping[str, str], inside: bool) -> dict[str, Any]:
    """`stored`: the checkpoint's tensors. They say it where the config does not, and of a language model `inside` another, where
    two configs may disagree."""
    said, tied = fields.raw.get("tie_word_embeddings") is not None, fields.flag("tie_word_embeddings", family.tied)
    if not tied and is_headless(fields.raw.get("architectures"), family, stored):
        return {"headless": True, "tied": True}
    if stored and (inside if said else not tied):
        tied = not stores_head(family, stored)
    return {"headless": False, "tied": tied}


def _biases(fields: Fields, family: Family, headless: bool) -> dict[str, Any]:
    if fields.flag("lm_head_bias") and fields.flag("tie_word_embeddings", family.tied):
        raise ModelError(f"{fields.where}: lm_head_bias of a head that is the embedding (tie_word_embeddings) is not supported")
    return {
        "qkv_bias": fields.flag("attention_bias") or family.qkv_bias,
        "output_bias": fields.flag("attention_out_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
        "head_bias": fields.flag("lm_head_bias") and not headless,
        "qkv_clip": fields.number("clip_qkv") if family.clipped and fields.get("clip_qkv") is not None else None,
        "parallel": family.parallel and fields.flag("use_parallel_residual", True),
        "own_mlp_norm": family.own_mlp_norm and fields.integer("num_ln_in_parallel_attn", 2) == 2,       # Falcon's
        "qk_norm": family.qk_norm and fields.flag("use_qk_norm", True),
        "post_norms": family.post_norms and fields.flag("use_post_norm", True),
        "bare_qk_norm": family.bare_qk_norm and fields.flag("use_qk_norm", True),
    }


def _scales(fields: Fields, family: Family, hidden_size: int, head_dim: int) -> dict[str, Any]:
    times = read_multipliers(fields, family)
    scalar = fields.number("query_pre_attn_scalar") if family.query_pre_attn_scalar else head_dim
    attention = times.attention or scalar**-0.5
    return {
        "embedding_scale": math.sqrt(hidden_size) if family.scale_embeddings else times.embedding,
        "attention_scale": attention * yarn_score_scale(fields.raw, fields.where) if family.latent else attention,
        "residual_scale": times.residual,
        "temperature": read_temperature(fields, family),
        "logit_scale": fields.number("logit_scale") if family.logit_scale else 1 / times.logits,
    }


def _layout(family: Family) -> dict[str, Any]:
    """What a family alone says of its layers."""
    names = ("post_norms", "late_qk_norm", "wide_qk_norm", "norm", "pre_norms", "parallel", "own_mlp_norm", "gated",
             "sinks", "learned_positions", "first_position", "inner_norms")
    return {name: getattr(family, name) for name in names} | {"chunked": family.window == "chunks"}


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def _gguf_embedding(file: GGUFFile, where: str) -> GGUFTensor:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{where}: tensor token_embd.weight is missing or not a matrix")
    return embedding


def gguf_model_config(file: GGUFFile, where: str) -> ModelConfig:
    """From a GGUF file's metadata and, where that is silent, from the tensors that the file has."""
    architecture = file.metadata.get("general.architecture")
    fields = Fields(where, file.metadata, {})

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    windowed = bool(fields.get(key("attention.sliding_window")))
    family = _with_second_norm(gguf_family(architecture, gguf_score(fields, key), windowed, where), file)

    has = file.tensors.__contains__
    check_gguf_only(fields, key)
    num_layers = gguf_layers(fields, key)
    num_heads = fields.integer(key("attention.head_count"), maximum=MAX_HEADS)
    latent = gguf_latent(fields, family.interleaved, key) if family.latent else None
    num_kv_heads = 1 if latent is not None else fields.integer(key("attention.head_count_kv"), num_heads, maximum=MAX_HEADS)
    hidden_size = fields.integer(key("embedding_length"), maximum=MAX_HIDDEN)
    head_dim = latent.head if latent is not None else read_head_dim(
        fields, key("attention.key_length"), key("embedding_length"), hidden_size, num_heads)
    check_heads(where, num_heads, num_kv_heads)
    embedding = _gguf_embedding(file, where)
    windows = gguf_windows(fields, family, num_layers, key)
    max_position = fields.integer(key("context_length"), maximum=MAX_POSITIONS)
    experts = gguf_experts(fields, family.experts, num_layers, key) if family.experts is not None else None
    return ModelConfig(
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=experts.dense_width if experts else fields.integer(
            key("feed_forward_length"), maximum=MAX_INTERMEDIATE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=gguf_epsilon(fields, family, key),
        dtype="bfloat16" if embedding.type == "BF16" else "float32" if embedding.type == "F32" else "float16",
        eos_token_ids=gguf_end_tokens(file.metadata, embedding.shape[0]),
        tied=not has("output.weight"),
        activation=family.activation,
        qkv_bias=has("blk.0.attn_q.bias") or has("blk.0.attn_qkv.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_down.bias"),
        qk_norm=family.qk_norm and has("blk.0.attn_q_norm.weight"),      # GLM-4.5 has them in some sizes
        norm_offset=0.0,              # the converter has added it to the weights
        head_bias=has("output.bias"),
        qkv_clip=fields.number(key(CLAMP)) if family.clipped and fields.get(key(CLAMP)) else None,
        **gguf_softcaps(fields, family, key),
        windows=windows_that_hide(windows, max_position),
        ropes=gguf_ropes(file, fields, family, head_dim if latent is None else latent.rope, max_position, windows, key),
        interleaved=family.gguf_permuted and fields.get(key("rope.dimension_sections")) is None,     # with images: in halves
        experts=experts,
        packed=packed_matrices(file, family),
        quantisation=gguf_quantisation(file),
        latent=latent,
        **_gguf_scales(fields, family, key, hidden_size, num_heads, head_dim, num_layers),
        **_layout(family) | _gguf_beside(family, fields.flag(key("use_parallel_residual"), True), has("blk.0.ffn_norm.weight")),
    )


def _with_second_norm(family: Family, file: GGUFFile) -> Family:
    if not family.own_mlp_norm or "blk.0.attn_norm_2.weight" not in file.tensors:
        return family
    return replace(family, gguf_names={**family.gguf_names, **GGUF_SECOND_NORM})


def _gguf_beside(family: Family, beside: bool, mlp_norm: bool) -> dict[str, bool]:
    """Whether attention and MLP are side by side. Files of families with one norm for both say it by the lack of the other."""
    own = family.own_mlp_norm and (mlp_norm or GGUF_SECOND_NORM.items() <= family.gguf_names.items())
    return {"own_mlp_norm": own, "parallel": family.parallel and (beside if own else not mlp_norm)}


def _gguf_scales(
    fields: Fields, family: Family, key: Callable[[str], str], hidden_size: int, num_heads: int, head_dim: int, num_layers: int,
) -> dict[str, Any]:
    times = gguf_multipliers(fields, family, key)
    by_hidden = family.query_pre_attn_scalar and (family.name, num_layers) in GGUF_QUERY_SCALE_BY_HIDDEN
    scale = (hidden_size / num_heads if by_hidden else head_dim) ** -0.5 * gguf_score_scale(fields, family, key)
    return {
        "embedding_scale": math.sqrt(hidden_size) if family.scale_embeddings else times.embedding,
        "attention_scale": times.attention or scale, "residual_scale": times.residual, "logit_scale": 1 / times.logits,
        "temperature": gguf_temperature(fields, family, key),
    }

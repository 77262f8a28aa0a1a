"""A model as plain facts: one frozen ModelConfig, from a Hugging Face config.json or a GGUF file's metadata.

Reads the spellings of transformers 4 and 5, checks every field, and says which family the model belongs to. Loads no
weights and needs no torch. Code inside a model directory is never run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.distributed.sharding import head_shards
from ridgeline.errors import ModelError
from ridgeline.models.checkpoints.gguf_formats import gguf_quantisation
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.checkpoints.quantisation import read_quantisation
from ridgeline.models.checkpoints.recipe import Quantisation
from ridgeline.models.config_fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    Fields,
)
from ridgeline.models.end_tokens import directory_eos_token, gguf_end_tokens, hf_end_tokens
from ridgeline.models.family import Family
from ridgeline.models.gemma import GEMMA2, GEMMA3
from ridgeline.models.gguf import GGUFFile, GGUFTensor
from ridgeline.models.layer_patterns import gguf_ropes, gguf_windows, hf_ropes, hf_windows, windows_that_hide
from ridgeline.models.llama import LLAMA
from ridgeline.models.mistral import MISTRAL
from ridgeline.models.phi3 import PHI3
from ridgeline.models.qwen import QWEN2, QWEN3
from ridgeline.models.rope import Rope
from ridgeline.process.log import get_logger
from ridgeline.quant.layout import STORED_KINDS, fewest_outputs, matrix_bytes
from ridgeline.sizes.kv_spec import KVGroupSpec, group_layers
from ridgeline.sizes.op_costs import DTYPE_BYTES

logger = get_logger("models")

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
# The 27B models of Gemma scale scores by hidden_size / heads; GGUF does not say so, their depth does.
GGUF_QUERY_SCALE_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix that a CPU keeps packed."""

    outputs: int
    inputs: int
    is_linear: bool                  # and not only an embedding
    nbytes: int

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs


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
    packed: tuple[PackedMatrix, ...] = ()                # of a GGUF file, those that stay packed on a CPU
    quantisation: Quantisation | None = None             # of the checkpoint's own weights

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """(count, outputs, inputs) of the linears, fused as in the decoder; the last is the head."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (self.num_layers, queries + 2 * keys, self.hidden_size),
            (self.num_layers, self.hidden_size, queries),
            (self.num_layers, 2 * self.intermediate_size, self.hidden_size),
            (self.num_layers, self.hidden_size, self.intermediate_size),
            (1, self.vocab_size, self.hidden_size),
        ]

    @property
    def num_parameters(self) -> int:
        """Weights and biases, the embedding counted once if the head shares it."""
        norms = self.hidden_size * (4 if self.post_norms else 2) + 2 * self.head_dim * self.qk_norm
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        biases += self.hidden_size * self.output_bias + (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embedding = 0 if self.tied else self.vocab_size * self.hidden_size
        matrices = sum(count * outputs * inputs for count, outputs, inputs in self.matrices)
        return matrices + embedding + self.num_layers * (norms + biases) + self.hidden_size


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
        raise ModelError(f"{path} has no config.json: {hint}")
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    return hf_model_config(
        raw, read_json(generation) if generation.is_file() else {}, eos_token=directory_eos_token(path), directory=path
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def kv_groups(config: ModelConfig, block_size: int, tp_size: int = 1) -> list[KVGroupSpec]:
    """The KV cache's groups on one rank. Shards are padded to equal size, so all ranks have the same groups."""
    kv = head_shards(config.num_heads, config.num_kv_heads, 0, tp_size)[1]
    return [
        KVGroupSpec(layers, window, block_size, kv.size, config.head_dim)
        for window, layers in group_layers(list(config.windows))
    ]


def weight_bytes(config: ModelConfig, dtype: str, device: str, tp_size: int = 1, quantization: str = "none") -> int:
    """Bytes of the weights on one rank, second layouts included, without the padding of uneven shards.

    Packed matrices are taken to stay packed also where the native kernels cannot be built.
    """
    numbers, blocks = config.num_parameters, 0
    if device == "cpu" and dtype == "float32":
        numbers += sum(
            count * outputs * inputs for count, outputs, inputs in config.matrices
            if outputs // tp_size >= fewest_outputs()
        )
        if tp_size == 1:                                 # shards are expanded
            numbers -= sum(
                matrix.weights * (2 if matrix.is_linear and matrix.outputs >= fewest_outputs() else 1) for matrix in config.packed
            )
            blocks = sum(matrix.nbytes for matrix in config.packed)
    total = numbers * DTYPE_BYTES[dtype]
    total //= tp_size
    if device == "cuda":
        for shape, format in LinearFormats(config, quantization, device, tp_size).shapes():
            plain = shape.outputs * shape.share * DTYPE_BYTES[dtype]
            total += format.nbytes(shape.outputs, shape.share) - plain
    return total + blocks


def layer_groups(config: ModelConfig) -> list[int]:
    """For each layer, the index of its group in `kv_groups`."""
    place = [0] * config.num_layers
    for index, (_, layers) in enumerate(group_layers(list(config.windows))):
        for layer in layers:
            place[layer] = index
    return place


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def family_of(architecture: object, known: Callable[[Family], Sequence[str]], where: str) -> Family:
    for family in FAMILIES:
        if architecture in known(family):
            return family
    supported = ", ".join(name for family in FAMILIES for name in known(family))
    raise ModelError(f"{where}: architecture {architecture!r} is not supported; supported: {supported}")


def hf_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], family: Family | None = None, where: str = "config.json",
    eos_token: int | None = None, directory: Path | None = None,
) -> ModelConfig:
    """From config.json, generation_config.json and the id of the tokenizer's eos_token. `family` overrides the declared one;
    `directory`: where the weights are."""
    declared = _declared_family(raw, where)
    family = family or declared
    if "auto_map" in raw:
        logger.warning("%s names code of its own (auto_map): it is ignored, %s is built in", where, family.name)
    ends = hf_end_tokens(raw, generation, eos_token)
    text = raw.get("text_config")
    if isinstance(text, dict):
        raw = {**raw, **text}         # the language model's fields, above those it shares with other modalities
    fields = Fields(where, raw, family.defaults)
    for checked in (fields, Fields("generation_config.json", generation, {})):
        checked.ids("eos_token_id")

    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, maximum=MAX_HEADS)
    hidden_size = fields.integer("hidden_size", maximum=MAX_HIDDEN)
    head_dim = _head_dim(fields, "head_dim", "hidden_size", hidden_size, num_heads)
    _check_heads(where, num_heads, num_kv_heads)
    windows = hf_windows(fields, family, num_layers)
    max_position = fields.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    ropes, max_position = hf_ropes(fields, family, head_dim, max_position, windows)
    windows = windows_that_hide(windows, max_position)

    scalar = fields.number("query_pre_attn_scalar") if family.query_pre_attn_scalar else head_dim
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_INTERMEDIATE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps"),
        dtype=_dtype(fields),
        eos_token_ids=ends,
        tied=fields.flag("tie_word_embeddings", family.tied),
        activation=_activation(fields, family),
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        norm_offset=family.norm_offset,
        embedding_scale=math.sqrt(hidden_size) if family.scale_embeddings else 1.0,
        attention_scale=scalar**-0.5,
        attention_softcap=_softcap(fields, family, "attn_logit_softcapping"),
        final_softcap=_softcap(fields, family, "final_logit_softcapping"),
        windows=windows,
        ropes=ropes,
        quantisation=read_quantisation(raw, where, directory),
    )


def _declared_family(raw: Mapping[str, Any], where: str) -> Family:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"{where}: architectures is missing")
    family = family_of(architectures[0], lambda each: each.architectures, where)
    return family


def _activation(fields: Fields, family: Family) -> str:
    activation = fields.get("hidden_activation") or fields.get("hidden_act") or family.activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ModelError(f"{fields.where}: hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _check_heads(where: str, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelError(f"{where}: {num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")


def _head_dim(fields: Fields, name: str, hidden_name: str, hidden_size: int, num_heads: int) -> int:
    if fields.get(name) is None and hidden_size % num_heads:
        raise ModelError(f"{fields.where}: {hidden_name} {hidden_size} is not a multiple of {num_heads} heads, and no "
                         f"{name} is given")
    return fields.integer(name, hidden_size // num_heads, maximum=MAX_HEAD_DIM)


def _dtype(fields: Fields) -> str:
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{fields.where}: dtype {dtype!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return dtype


def _softcap(fields: Fields, family: Family, name: str) -> float | None:
    if not family.softcaps or (name in fields.raw and fields.raw[name] is None):
        return None
    return fields.number(name)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_model_config(file: GGUFFile, where: str) -> ModelConfig:
    """From a GGUF file's metadata and, where that is silent, from the tensors that the file has."""
    architecture = file.metadata.get("general.architecture")
    family = family_of(architecture, lambda each: (each.gguf,) if each.gguf else (), where)
    fields = Fields(where, file.metadata, {})

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if fields.get(key("expert_count"), 0):
        raise ModelError(f"{where}: {key('expert_count')} {fields.get(key('expert_count'))}: mixtures of experts are not "
                         "supported")
    def has(tensor: str) -> bool:
        return tensor in file.tensors

    num_layers = fields.integer(key("block_count"), maximum=MAX_LAYERS)
    num_heads = fields.integer(key("attention.head_count"), maximum=MAX_HEADS)
    num_kv_heads = fields.integer(key("attention.head_count_kv"), num_heads, maximum=MAX_HEADS)
    hidden_size = fields.integer(key("embedding_length"), maximum=MAX_HIDDEN)
    head_dim = _head_dim(fields, key("attention.key_length"), key("embedding_length"), hidden_size, num_heads)
    _check_heads(where, num_heads, num_kv_heads)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{where}: tensor token_embd.weight is missing or not a matrix")
    windows = gguf_windows(fields, family, num_layers, key)
    max_position = fields.integer(key("context_length"), maximum=MAX_POSITIONS)
    scale = head_dim**-0.5
    if family.query_pre_attn_scalar and (family.name, num_layers) in GGUF_QUERY_SCALE_BY_HIDDEN:
        scale = (hidden_size / num_heads) ** -0.5
    softcaps = (fields.number(key("attn_logit_softcapping"), 50.0), fields.number(key("final_logit_softcapping"), 30.0))
    return ModelConfig(
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer(key("feed_forward_length"), maximum=MAX_INTERMEDIATE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number(key("attention.layer_norm_rms_epsilon")),
        dtype="bfloat16" if embedding.type == "BF16" else "float32" if embedding.type == "F32" else "float16",
        eos_token_ids=gguf_end_tokens(file.metadata),
        tied=not has("output.weight"),
        activation=family.activation,
        qkv_bias=has("blk.0.attn_q.bias") or has("blk.0.attn_qkv.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_down.bias"),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        norm_offset=0.0,              # the converter has added it to the weights
        embedding_scale=math.sqrt(hidden_size) if family.scale_embeddings else 1.0,
        attention_scale=scale,
        attention_softcap=softcaps[0] if family.softcaps else None,
        final_softcap=softcaps[1] if family.softcaps else None,
        windows=windows_that_hide(windows, max_position),
        ropes=gguf_ropes(file, fields, family, head_dim, max_position, windows, key),     # by the file's windows
        packed=_packed_matrices(file, family),
        quantisation=gguf_quantisation(file),
    )


def _packed_matrices(file: GGUFFile, family: Family) -> tuple[PackedMatrix, ...]:
    """Of linears with a packed part, and of the embedding. A tied head is the embedding."""
    found: dict[str, list[GGUFTensor]] = {}
    tied = "output.weight" not in file.tensors
    for name, tensor in file.tensors.items():
        module, _, parameter = name.rpartition(".")
        target = family.gguf_names.get(re.sub(r"\.\d+\.", ".{}.", module, count=1), "").partition(":")[0]
        if target and parameter == "weight" and len(tensor.shape) == 2:
            layer = re.search(r"\.\d+\.", module)
            found.setdefault(target + (layer[0] if layer else ""), []).append(tensor)
    return tuple(
        PackedMatrix(
            sum(part.shape[0] for part in parts), parts[0].shape[1], target != "embed" or tied,
            sum(matrix_bytes(part.type if part.type in STORED_KINDS else "F32", *part.shape) for part in parts),
        )
        for target, parts in found.items() if any(part.type in STORED_KINDS for part in parts)
    )

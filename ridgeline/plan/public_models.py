"""Public models by name: the fields of their config.json that size and speed depend on.

"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.model_files import read_json
from ridgeline.models.checkpoints.linear_formats import (
    HEAD,
    LinearFormats,
    LinearShape,
    cpu_weight_bytes,
    expert_matrices,
)
from ridgeline.models.checkpoints.linear_formats import linears as all_linears
from ridgeline.models.checkpoints.quantisation import read_quantisation
from ridgeline.models.expert_config import Experts
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import ModelConfig, hf_model_config, load_model_config
from ridgeline.ops.kernel_table import DeviceFacts
from ridgeline.plan.precision import StoredWeights
from ridgeline.process import embedded
from ridgeline.process.hub_cache import find_cached, hub_name
from ridgeline.quant.format import WeightFormat, quantises_rows
from ridgeline.quant.layout import stored_kind
from ridgeline.sizes.abilities import packed_width
from ridgeline.sizes.op_costs import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    config: ModelConfig
    expert_format: str = ""          # in which the checkpoint has its experts, where its other weights are wide

    @property
    def experts(self) -> Experts | None:
        return self.config.experts

    @property
    def linear_parameters(self) -> int:
        """Elements of the layers' matrices, all experts included."""
        return sum(count * outputs * inputs for count, outputs, inputs in self.config.matrices[:-1])

    @property
    def parameters(self) -> int:
        return self.config.num_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses; in a mixture, only its experts."""
        experts = self.config.experts
        return self.parameters - (self.expert_parameters(experts.count - experts.used) if experts is not None else 0)

    def expert_parameters(self, count: int) -> int:
        """Of `count` experts of every layer that has some."""
        experts, config = self.config.experts, self.config
        if experts is None:
            return 0
        each = 3 * config.hidden_size * experts.width + (2 * experts.width + config.hidden_size) * experts.bias
        return (config.num_layers - config.num_plain) * count * each

    @property
    def on_every_rank(self) -> int:
        """Parameters that tensor parallelism does not divide, beside norms: what compresses, and what chooses experts."""
        config, experts = self.config, self.config.experts
        down = config.latent.down(config.hidden_size) if config.latent is not None else 0
        routers = (config.num_layers - config.num_plain) * config.hidden_size * experts.count if experts is not None else 0
        return config.num_layers * down + routers

    @property
    def kv_elements(self) -> int:
        """Of one token in the cache, all layers together."""
        config = self.config
        if config.latent is not None:
            return config.num_layers * config.latent.width
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim

    @property
    def kv_scaled(self) -> int:
        """Elements that share a scale in a narrow cache: one token's head, or its whole latent."""
        return self.config.latent.width if self.config.latent is not None else self.config.head_dim


def _config(architecture: str, kind: str, sizes: tuple[int, ...], vocab: int, context: int, **more: Any
            ) -> dict[str, Any]:
    """`sizes`: hidden, intermediate, layers, heads, KV heads."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    return {
        "architectures": [f"{architecture}ForCausalLM"], "model_type": kind, "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": context, "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 0, **more,
    }


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    return _config("Llama", "llama", sizes, 128256, 131072, **more)


def _mistral(sizes: tuple[int, ...], vocab: int, context: int, **more: Any) -> dict[str, Any]:
    return _config("Mistral", "mistral", sizes, vocab, context, sliding_window=None, **more)


def _mixtral(sizes: tuple[int, ...], vocab: int, context: int) -> dict[str, Any]:
    return _config("Mixtral", "mixtral", sizes, vocab, context, sliding_window=None, num_local_experts=8, num_experts_per_tok=2)


def _qwen3(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _config("Qwen3", "qwen3", sizes, 151936, 40960, head_dim=128, tie_word_embeddings=tied)


def _qwen3_moe(*sizes: int, expert: int) -> dict[str, Any]:
    return _config("Qwen3Moe", "qwen3_moe", sizes, 151936, 40960, head_dim=128, num_experts=128, num_experts_per_tok=8,
                   moe_intermediate_size=expert)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return _config("GptOss", "gpt_oss", (2880, 2880, layers, 64, 8), 201088, 131072, head_dim=64, num_local_experts=experts,
                   num_experts_per_tok=4, sliding_window=128, layer_types=kinds, attention_bias=True,
                   quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [
                       "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]})


def _deepseek(version: str, sizes: tuple[int, ...], vocab: int, **more: Any) -> dict[str, Any]:
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _config(f"Deepseek{version}", f"deepseek_{version.lower()}", sizes, vocab, 163840, **latent | more)


def _qwen2(*sizes: int, vocab: int = 152064, tied: bool = False) -> dict[str, Any]:
    return _config("Qwen2", "qwen2", sizes, vocab, 131072, tie_word_embeddings=tied)


def _gemma2(*sizes: int, head_dim: int, scalar: int) -> dict[str, Any]:
    return _config(
        "Gemma2", "gemma2", sizes, 256000, 8192, head_dim=head_dim, query_pre_attn_scalar=scalar, sliding_window=4096,
        tie_word_embeddings=True, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )


def _gemma3(*sizes: int, head_dim: int, scalar: int, window: int = 1024, context: int = 131072) -> dict[str, Any]:
    return _config(
        "Gemma3", "gemma3_text", sizes, 262208 if context > 40000 else 262144, context, head_dim=head_dim,
        query_pre_attn_scalar=scalar, sliding_window=window, sliding_window_pattern=6, tie_word_embeddings=True,
    )


_FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_DEEPSEEK_V3 = _deepseek("V3", (7168, 18432, 61, 128, 128), 129280, n_routed_experts=256, n_shared_experts=1,
                         num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
                         quantization_config=_FP8_BLOCKS)
_QWEN_1_5B = _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 4, expert=768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 4, expert=1536),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True),
    "qwen2.5-1.5b": _QWEN_1_5B,
    "qwen2.5-coder-1.5b": _QWEN_1_5B,
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8),
    "mistral-7b": _mistral((4096, 14336, 32, 32, 8), 32768, 32768),
    "mistral-nemo-12b": _mistral((5120, 14336, 40, 32, 8), 131072, 131072, head_dim=128),
    "mistral-small-24b": _mistral((5120, 32768, 40, 32, 8), 131072, 32768, head_dim=128),
    "mistral-large-123b": _mistral((12288, 28672, 88, 96, 8), 32768, 131072),
    "mixtral-8x7b": _mixtral((4096, 14336, 32, 32, 8), 32000, 32768),
    "mixtral-8x22b": _mixtral((6144, 16384, 56, 48, 8), 32768, 65536),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v2-lite": _deepseek("V2", (2048, 10944, 27, 16, 16), 102400, q_lora_rank=None, n_routed_experts=64,
                                  n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1),
    "deepseek-v2": _deepseek("V2", (5120, 12288, 60, 128, 128), 102400, n_routed_experts=160, n_shared_experts=2,
                             num_experts_per_tok=6, moe_intermediate_size=1536, first_k_dense_replace=1),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": _deepseek("V3", (7168, 18432, 61, 64, 64), 163840, max_position_embeddings=131072, n_routed_experts=384,
                         n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=1,
                         quantization_config=_FP8_BLOCKS),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, head_dim=256, scalar=256),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, head_dim=256, scalar=256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128, scalar=144),
    "gemma-3-1b": _gemma3(1152, 6912, 26, 4, 1, head_dim=256, scalar=256, window=512, context=32768),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4, head_dim=256, scalar=256),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, head_dim=256, scalar=256),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, head_dim=128, scalar=168),
    "phi-4-14b": _config("Phi3", "phi3", (5120, 17920, 40, 40, 10), 100352, 16384),
    "smollm2-135m": _config("Llama", "llama", (576, 1536, 30, 9, 3), 49152, 8192, tie_word_embeddings=True),
}


def find_model(name: str, as_stored: bool = False) -> PlannedModel:
    """A name of the table, `embedded`, a config.json, a directory with one, or a .gguf file. `as_stored`: weights are in the
    formats of a directory's checkpoint, or of the published one; otherwise formats are chosen apart from the model."""
    path = _place(name)
    label = path.resolve().name if path == Path(name) else name.rpartition("/")[2]
    if as_stored and path.is_dir():
        return PlannedModel(label, load_model_config(path))
    if path.is_file() and path.suffix == ".json":
        return _from_json(path.resolve().parent.name or path.stem, read_json(path), str(path))
    if (path / "config.json").is_file():
        return _from_json(label, read_json(path / "config.json"), str(path / "config.json"))
    if path.exists():
        return PlannedModel(path.name, load_model_config(path))
    if known := _known_name(name):
        raw = CONFIGS[known]
        published = as_stored and "quantization_config" in raw
        return PlannedModel(known, hf_model_config(raw, {}, where=known)) if published else _from_json(known, raw)
    close = difflib.get_close_matches(name.lower(), CONFIGS, 3, 0.4) or list(CONFIGS)
    raise ConfigError(f"{name} is neither a config.json, a model directory or file, nor one of the names: "
                      f"{embedded.SHORT_NAME}, {', '.join(close)} …")


def _known_name(name: str) -> str:
    """Of the table; empty: none."""
    wanted = _plain(name)
    return next((known for known in CONFIGS if wanted == _plain(known)), "")


def _place(name: str) -> Path:
    """Where a model lies: at its path, or a hub's name in the local cache. A name of the table lies nowhere."""
    path = Path(name)
    if path.exists():
        return path
    if name == embedded.SHORT_NAME:
        return embedded.require()
    hub = hub_name(name)
    return (find_cached(hub) if hub is not None else None) or path


def packed_format(name: str) -> str | None:
    """Of a quantised checkpoint or a .gguf file, the format that reads of its matrices are nearest to; None where they are wide.
    A CPU multiplies most of a file's packings as they are stored; the others are expanded when they are loaded."""
    path = _place(name)
    if (path / "config.json").is_file():
        return _checkpoint_format(read_json(path / "config.json"), path)
    if not path.exists():
        return published_format(name)
    if path.suffix != ".gguf" or not path.is_file():
        return None
    with GGUFFile(path) as file:
        matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
        numbers = sum(math.prod(tensor.shape) for tensor in matrices)
        read = sum(
            tensor.nbytes if stored_kind(tensor.type) != "F32" else 4 * math.prod(tensor.shape) for tensor in matrices
        )
    bits = 8 * read / max(1, numbers)
    return packed_width(bits) or None


def published_format(name: str) -> str | None:
    """In which a model of the table is published; None: in 16 bits, or it is no model of the table."""
    known = "" if _place(name).exists() else _known_name(name)
    return _checkpoint_format(CONFIGS[known]) if known else None


def cpu_weights(model: PlannedModel, format: str) -> StoredWeights | None:
    """What a CPU keeps of a packed file or a quantised checkpoint, whose matrices are nearest to `format`; None: its weights are
    numbers, or formats are chosen apart from it."""
    each = _cpu_bytes(model)
    return None if each is None else StoredWeights(format, each, each, each)


@functools.lru_cache(64)                 # asked again for every format and goal
def gpu_weights(
    model: PlannedModel, dtype: str, ranks: int, kernels: DeviceFacts, quantization: str = "none"
) -> StoredWeights | None:
    """What a GPU with these facts keeps of a packed file or a quantised checkpoint, or of what the option `quantization`
    makes while it loads, by the formats and layouts of its loader; None: its weights are numbers, or formats are chosen apart."""
    config, wide = model.config, float(DTYPE_BYTES[dtype])
    if config.quantisation is None and quantization == "none":
        return None
    formats = LinearFormats(config, quantization, "cuda", ranks, dtype)
    kept = {shape.path: format for shape, format in itertools.chain(formats.shapes(), formats.experts())}

    def each(shapes: list[LinearShape], stored: bool = False) -> float:
        """Bytes of a weight, as they are held, or in the file."""
        numbers = held = 0.0
        for shape in shapes:
            size, format = shape.outputs * shape.share, kept.get(shape.path)
            numbers += shape.count * size
            held += shape.count * (
                size * wide if format is None else
                format.nbytes(shape.outputs, shape.share) if stored else shape.nbytes(format, kernels, dtype)
            )
        return held / numbers if numbers else wide

    layers, experts = list(all_linears(config, ranks)), list(expert_matrices(config, ranks))
    head = [layers.pop()] if layers[-1].path == HEAD else []
    of_layers = [kept[shape.path] for shape in layers if shape.path in kept]
    return StoredWeights(
        _nearest(of_layers, each(layers, stored=True)) or dtype, each(layers), each(head), each(experts),
        _nearest([kept[shape.path] for shape in experts if shape.path in kept], each(experts, stored=True)) or dtype,
        narrow_rows=bool(of_layers) and all(map(quantises_rows, of_layers)),
    )


def _nearest(kept: list[WeightFormat], each: float) -> str:
    """Of WEIGHT_FORMATS, by the grid where all have one that it knows, otherwise by the bytes of a weight; empty: most are
    numbers."""
    width, grids = packed_width(8 * each), {format.grid for format in kept}
    blocks = any(format.scales is not None and format.scales.block[0] > 1 for format in kept)
    named = {"e2m1": "mxfp4", "e4m3": "fp8-block" if blocks else "fp8"}
    return named.get(grids.pop(), width) if width and len(grids) == 1 else width


def _cpu_bytes(model: PlannedModel) -> float | None:
    """Of a weight, the head included, as a CPU keeps it."""
    config = model.config
    if config.packed:
        return sum(each.nbytes for each in config.packed) / sum(each.weights for each in config.packed)
    if config.quantisation is None:
        return None
    unread = 0 if config.tied else config.vocab_size * config.hidden_size        # the embedding: a step reads a few of its rows
    width = 2 if config.dtype in ("bfloat16", "float16") else 4
    return (cpu_weight_bytes(config, 1, "none") - unread * width) / (config.num_parameters - unread)


def _checkpoint_format(raw: dict[str, Any], directory: Path | None = None) -> str | None:
    """Of the first layer's MLP; None: its weights are numbers."""
    quantisation = read_quantisation(raw, "config.json", directory)
    recipe = None if quantisation is None else quantisation.recipe("model.layers.0.mlp.down_proj")
    if recipe is None or recipe.format.scales is None:
        return None
    named = {"e4m3": "fp8-block" if recipe.format.scales.block[0] > 1 else "fp8", "int8": "int8", "e2m1": "mxfp4"}
    return named.get(recipe.format.grid, "int4")


def _from_json(name: str, raw: dict[str, Any], where: str = "") -> PlannedModel:
    """As the engine reads it. Formats are chosen here, and no size depends on them: but MXFP4 is of experts alone."""
    config = hf_model_config({**raw, "quantization_config": None}, {}, where=where or name)
    stored = raw.get("quantization_config")
    experts_alone = isinstance(stored, dict) and stored.get("quant_method") == "mxfp4" and config.experts is not None
    return PlannedModel(name, config, "mxfp4" if experts_alone else "")


def table_name(label: str) -> str:
    """The name of the table that a file's or a record's name contains, the longest of several; empty: none."""
    fits = [name for name in CONFIGS if _plain(name) in _plain(label)]
    return max(fits, key=lambda name: len(_plain(name)), default="")


def is_same_model(model: PlannedModel, served: str, known_as: str = "") -> bool:
    """Does a server's model name mean this model? `known_as`: the name that its operator gave it. Names of the table may have
    words around them (Meta-Llama-3.1-8B-Instruct-FP8); the longest match counts."""
    if known_as:
        return served == known_as
    return _plain(table_name(served) or served) == _plain(model.name)


# What names have around the model's own: "Meta-", "-Instruct", "-it-0324", "-v0.3", the active parameters of a mixture ("-A22B").
_AROUND = re.compile(r"^meta-|(-(instruct|chat|it|hf))?(-\d{4}|-v0\.\d)?$|-a\d+b(?=$|-(instruct|chat|it|hf|\d{4}))")


def _plain(name: str) -> str:
    return "".join(character for character in _AROUND.sub("", name.lower().rpartition("/")[2]) if character.isalnum())

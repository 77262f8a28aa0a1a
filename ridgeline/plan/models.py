"""Public models by name: what their config.json says, as far as size and speed depend on it. Facts, no weights.

A mixture of experts has more than a dense decoder can say: how many experts there are and how many a token visits. It is
described here by `Experts`, and planned; the engine itself does not run such models yet.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError, ModelError
from ridgeline.models.config import ModelConfig, hf_model_config, load_model_config, read_json


@dataclass(frozen=True, slots=True)
class Experts:
    """In every layer, `count` MLPs of which a token visits `used`; `ModelConfig.intermediate_size` is one expert's."""

    count: int
    used: int

    def visited(self, tokens: int) -> float:
        """Experts that some token of a step visits, if they choose independently and evenly."""
        return self.count * (1 - (1 - self.used / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    config: ModelConfig
    experts: Experts | None = None

    @property
    def linear_parameters(self) -> int:
        """Elements of the layers' matrices, all experts included."""
        *layers, _ = self.config.matrices
        return sum(count * outputs * inputs for count, outputs, inputs in layers) + self._further_experts

    @property
    def _further_experts(self) -> int:
        if self.experts is None:
            return 0
        config = self.config
        router = config.num_layers * config.hidden_size * self.experts.count
        return (self.experts.count - 1) * config.num_layers * 3 * config.hidden_size * config.intermediate_size + router

    @property
    def parameters(self) -> int:
        return self.config.num_parameters + self._further_experts

    @property
    def active_parameters(self) -> int:
        """Those that one token has to do with: of a mixture, the experts that it visits."""
        if self.experts is None:
            return self.parameters
        config = self.config
        expert = config.num_layers * 3 * config.hidden_size * config.intermediate_size
        return self.parameters - (self.experts.count - self.experts.used) * expert


def _config(architecture: str, kind: str, sizes: tuple[int, ...], vocab: int, context: int, **more: Any
            ) -> dict[str, Any]:  # fmt: skip
    """`sizes`: hidden, intermediate, layers, heads, KV heads."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    return {
        "architectures": [f"{architecture}ForCausalLM"], "model_type": kind, "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": context, "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 0, **more,
    }  # fmt: skip


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    return _config("Llama", "llama", sizes, 128256, 131072, **more)


def _mistral(sizes: tuple[int, ...], vocab: int, context: int, **more: Any) -> dict[str, Any]:
    return _config("Mistral", "mistral", sizes, vocab, context, sliding_window=None, **more)


def _qwen3(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _config("Qwen3", "qwen3", sizes, 151936, 40960, head_dim=128, tie_word_embeddings=tied)


def _qwen2(*sizes: int, vocab: int = 152064, tied: bool = False) -> dict[str, Any]:
    return _config("Qwen2", "qwen2", sizes, vocab, 131072, tie_word_embeddings=tied)


def _gemma2(*sizes: int, head_dim: int, scalar: int) -> dict[str, Any]:
    return _config(
        "Gemma2", "gemma2", sizes, 256000, 8192, head_dim=head_dim, query_pre_attn_scalar=scalar, sliding_window=4096,
        tie_word_embeddings=True, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )  # fmt: skip


def _gemma3(*sizes: int, head_dim: int, scalar: int, window: int = 1024, context: int = 131072) -> dict[str, Any]:
    return _config(
        "Gemma3", "gemma3_text", sizes, 262208 if context > 40000 else 262144, context, head_dim=head_dim,
        query_pre_attn_scalar=scalar, sliding_window=window, sliding_window_pattern=6, tie_word_embeddings=True,
    )  # fmt: skip


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
    "qwen3-30b-a3b": _qwen3(2048, 768, 48, 32, 4),
    "qwen3-235b-a22b": _qwen3(4096, 1536, 94, 64, 4),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8),
    "mistral-7b": _mistral((4096, 14336, 32, 32, 8), 32768, 32768),
    "mistral-nemo-12b": _mistral((5120, 14336, 40, 32, 8), 131072, 131072, head_dim=128),
    "mistral-small-24b": _mistral((5120, 32768, 40, 32, 8), 131072, 32768, head_dim=128),
    "mistral-large-123b": _mistral((12288, 28672, 88, 96, 8), 32768, 131072),
    "mixtral-8x7b": _mistral((4096, 14336, 32, 32, 8), 32000, 32768),
    "mixtral-8x22b": _mistral((6144, 16384, 56, 48, 8), 32768, 65536),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, head_dim=256, scalar=256),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, head_dim=256, scalar=256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128, scalar=144),
    "gemma-3-1b": _gemma3(1152, 6912, 26, 4, 1, head_dim=256, scalar=256, window=512, context=32768),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4, head_dim=256, scalar=256),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, head_dim=256, scalar=256),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, head_dim=128, scalar=168),
    "phi-4-14b": _config("Phi3", "phi3", (5120, 17920, 40, 40, 10), 100352, 16384),
    "smollm2-135m": _config("Llama", "llama", (576, 1536, 30, 9, 3), 49152, 8192, tie_word_embeddings=True),
}  # fmt: skip
EXPERTS = {
    "mixtral-8x7b": Experts(8, 2), "mixtral-8x22b": Experts(8, 2), "qwen3-30b-a3b": Experts(128, 8),
    "qwen3-235b-a22b": Experts(128, 8),
}  # fmt: skip
# Latent attention keeps one compressed vector per token and has matrices of its own: no dense decoder describes it.
NOT_DESCRIBED = {"deepseek-v2": "multi-head latent attention", "deepseek-v3": "multi-head latent attention",
                 "deepseek-r1": "multi-head latent attention"}


def find_model(name: str) -> PlannedModel:
    """A name of the table, a config.json, a directory with one, or a .gguf file."""
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return _from_json(path.parent.name or path.stem, read_json(path))
    if (path / "config.json").is_file():
        return _from_json(path.resolve().name, read_json(path / "config.json"))
    if path.exists():
        return PlannedModel(path.name, load_model_config(path))
    wanted = _plain(name)
    for known, raw in CONFIGS.items():
        if wanted == _plain(known):
            return PlannedModel(known, hf_model_config(raw, {}, where=known), EXPERTS.get(known))
    for known, reason in NOT_DESCRIBED.items():
        if wanted.startswith(_plain(known)):
            raise ModelError(f"{known} has {reason}, which this engine's model description cannot express")
    close = difflib.get_close_matches(name.lower(), CONFIGS, 3, 0.4) or list(CONFIGS)
    raise ConfigError(f"{name} is neither a config.json, a model directory or file, nor one of the names: "
                      f"{', '.join(close)} …")


def _from_json(name: str, raw: dict[str, Any]) -> PlannedModel:
    """Fields of a mixture of experts are read as Mixtral and Qwen spell them; the rest as the engine reads it."""
    count = raw.get("num_local_experts") or raw.get("num_experts")
    if not count:
        raw = {**raw, "quantization_config": None}       # sizes do not depend on it: formats are chosen here
        return PlannedModel(name, hf_model_config(raw, {}))
    used = raw.get("num_experts_per_tok")
    if not isinstance(count, int) or not isinstance(used, int) or not 0 < used <= count:
        raise ModelError(f"{name}: num_experts_per_tok {used!r} of {count!r} experts cannot be")
    if raw.get("kv_lora_rank") or raw.get("first_k_dense_replace") or raw.get("shared_expert_intermediate_size"):
        raise ModelError(f"{name}: latent attention, dense layers beside experts and shared experts are not described")
    dense = {"MixtralForCausalLM": "MistralForCausalLM", "Qwen3MoeForCausalLM": "Qwen3ForCausalLM",
             "Qwen2MoeForCausalLM": "Qwen2ForCausalLM"}
    architecture = (raw.get("architectures") or [""])[0]
    if architecture not in dense:
        raise ModelError(f"{name}: architecture {json.dumps(architecture)} is not described; known are {', '.join(dense)}")
    raw = {**raw, "architectures": [dense[architecture]], "quantization_config": None}
    raw["intermediate_size"] = raw.get("moe_intermediate_size") or raw["intermediate_size"]
    return PlannedModel(name, hf_model_config(raw, {}), Experts(count, used))


def _plain(name: str) -> str:
    return "".join(character for character in name.lower().rpartition("/")[2] if character.isalnum()).removesuffix("instruct")

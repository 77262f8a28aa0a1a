"""Mistral: Llama with a sliding window on every layer; Ministral: on some. Ministral 3: queries that grow with their position.
Mixtral: a mixture of experts. Mistral 4: DeepSeek's latents and experts, and queries as in Ministral 3."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.models.families.deepseek import DEEPSEEK_EXPERT_NAMES, LATENT_NAMES
from ridgeline.models.family import (
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    LLAMA_NAMES,
    ExpertRule,
    Family,
)

SPARSE_MOE_NAMES = {
    "model.layers.{}.block_sparse_moe.gate": "layers.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.experts.{}.w1": "layers.{}.mlp.experts.{}.gate_up:gate",
    "model.layers.{}.block_sparse_moe.experts.{}.w3": "layers.{}.mlp.experts.{}.gate_up:up",
    "model.layers.{}.block_sparse_moe.experts.{}.w2": "layers.{}.mlp.experts.{}.down",
    # As llm-compressor 0.14 saves them: transformers 5 has these names in memory.
    "model.layers.{}.block_sparse_moe.experts.{}.gate_proj": "layers.{}.mlp.experts.{}.gate_up:gate",
    "model.layers.{}.block_sparse_moe.experts.{}.up_proj": "layers.{}.mlp.experts.{}.gate_up:up",
    "model.layers.{}.block_sparse_moe.experts.{}.down_proj": "layers.{}.mlp.experts.{}.down",
}


def _stretched(factor: float, original: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A config with the family's usual rope, where it has none."""
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return lambda raw: raw if raw.get("rope_parameters") or raw.get("rope_scaling") else {**raw, "rope_parameters": rope}


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    window="all",
    defaults={"sliding_window": 4096},
)

MINISTRAL = replace(MISTRAL, name="ministral", architectures=("MinistralForCausalLM",))       # lists the layers with a window

MINISTRAL3 = Family(
    name="ministral3",
    architectures=("Ministral3ForCausalLM",),
    gguf="mistral3",
    gguf_permuted=True,
    temperature="all",
    reworded=_stretched(16.0, 16_384),
    window="all",
    defaults={"head_dim": 128, "rope_theta": 1_000_000.0},
)

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    gguf="llama",                    # with experts
    gguf_permuted=True,
    window="all",
    experts=ExpertRule(normalise=True),
    defaults={"rope_theta": 1_000_000.0},
    names=LLAMA_NAMES | SPARSE_MOE_NAMES,
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)

MISTRAL4 = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM",),
    latent=True,
    interleaved=True,
    temperature="all",
    reworded=_stretched(128.0, 8192),
    experts=ExpertRule(groups=True, group_score="best two", scaled=True),
    defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": True},
    names=LATENT_NAMES | DEEPSEEK_EXPERT_NAMES,
)

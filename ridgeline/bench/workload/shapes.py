"""Shapes of public models by name: the sizes in their config.json, used with dummy weights. Fewer layers are possible.

Random routers choose experts evenly, the worst case of a mixture. Names that end with -zipf give every layer's router a bias, so
that few experts get most of the tokens. Names that end with a mix of GGUF types are files of these types (gguf_shapes.py).
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from ridgeline.bench.gguf_shapes import MIXES, write_gguf_shape
from ridgeline.process.cold.temporary_folder import temporary_folder

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128009,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 151643,
    "eos_token_id": 151645, "attention_bias": False,
}

DENSE: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3.2-1b": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True, "rope_scaling": _LLAMA["rope_scaling"] | {"factor": 32.0},
    },
    "qwen3-8b": _QWEN3 | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "llama-3.1-70b": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3_MOE,
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 100000, "eos_token_id": 100001,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096},
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 150000.0,
        "sliding_window": 128, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ]},
        "eos_token_id": 200002, "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
    },
}
MIXTURES["gpt-oss-120b"] = MIXTURES["gpt-oss-20b"] | {"num_hidden_layers": 36, "num_local_experts": 128}
# As their makers' checkpoints say it.
CODED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b-nvfp4": DENSE["llama-3.1-8b"] | {
        "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"],
        },
    },
    "qwen3-30b-a3b-fp8": _QWEN3_MOE | {
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    },
    "qwen3-30b-a3b-awq": _QWEN3_MOE | {
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    },
}
GGUF_SHAPES = {f"llama-3.1-8b-{mix}": DENSE["llama-3.1-8b"] for mix in MIXES}
ZIPF_SHAPES = {f"{name}-zipf": config | {"dummy_routing": "zipf"} for name, config in MIXTURES.items()}
SHAPES = DENSE | CODED | MIXTURES | ZIPF_SHAPES | GGUF_SHAPES


_folder = functools.cache(functools.partial(temporary_folder, "ridgeline-shape-"))


def write_shape(name: str, layers: int | None = None, plain: bool = False, **changes: Any) -> Path:
    """A directory with the shape's config.json, or a GGUF file, gone when this process ends. `plain`: the same model in a
    directory, without codes. A GGUF file here does not say how positions are scaled, so neither does its plain model."""
    config = SHAPES[name] | changes
    if plain:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        config |= {"rope_scaling": None} if name in GGUF_SHAPES else {}
    if layers is not None:
        config["num_hidden_layers"] = layers
    directory = Path(tempfile.mkdtemp(dir=_folder()))
    path = directory / (name if layers is None else f"{name}-{layers}-layers")
    if name in GGUF_SHAPES and not plain:
        return write_gguf_shape(path.with_name(f"{path.name}.gguf"), config, next(mix for mix in MIXES if name.endswith(mix)))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path

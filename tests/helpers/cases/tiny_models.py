"""Tiny random checkpoints of every family, made with transformers, and a bare driver that runs our decoder on them.

The weights are drawn so that nothing hides: logits spread by more than 1, norm weights differ from 1, biases from 0, and
attention scores are large enough for caps, windows and rotations to matter.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.layers.kv import LayerKV
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import ModelConfig, kv_groups, load_model_config
from ridgeline.models.weights import load_weights

VOCAB = 131                          # odd, so that sharding it needs padding
WINDOW = 7                           # not a multiple of the block size
ORIGINAL_CONTEXT = 24
MAX_POSITION = 96

BASE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITION, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}
EAGER_EXPERTS = {"experts_implementation": "eager"}      # the others compute in 32 bits at most
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": ORIGINAL_CONTEXT}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "beta_fast": 4.0, "beta_slow": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e3, "factor": 3.0}
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e2, "alpha": 50.0, "factor": 1.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.2, 3.9]}
PLAIN = {"rope_type": "default", "rope_theta": 1e3}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
          "v_head_dim": 10}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
DEEPSEEK_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20,
                    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
GEMMA_ROPES = {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
               "sliding_attention": {"rope_type": "default", "rope_theta": 1e2}}

# name: (the class of transformers without its suffix, what differs from BASE)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-bias": ("Llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True,
                             "num_key_value_heads": 1}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "num_key_value_heads": 4, "head_dim": 8}),
    "smollm2": ("Llama", {"rope_parameters": PLAIN, "hidden_size": 72, "num_attention_heads": 9,
                          "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "ministral3": ("Ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.4}, "sliding_window": WINDOW,
                                  "head_dim": 16}),
    "mistral": ("Mistral", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN, "use_sliding_window": True, "sliding_window": WINDOW,
                        "max_window_layers": 1}),
    "qwen2.5-yarn": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": PLAIN, "head_dim": 16}),
    "qwen3-window": ("Qwen3", {"rope_parameters": PLAIN, "head_dim": 16, "attention_bias": True,
                               "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "phi3": ("Phi3", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "sliding_window": WINDOW}),
    "phi3-long": ("Phi3", {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
                           "original_max_position_embeddings": ORIGINAL_CONTEXT}),
    "gemma2": ("Gemma2", {"rope_parameters": PLAIN, "head_dim": 16, "query_pre_attn_scalar": 24,
                          "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"rope_parameters": GEMMA_ROPES, "head_dim": 16, "query_pre_attn_scalar": 24,
                          "sliding_window": WINDOW, "num_hidden_layers": 7, "final_logit_softcapping": 3.0}),
    "deepseek_v2": ("DeepseekV2", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": DEEPSEEK_YARN, "attention_bias": True,
                                                               "topk_method": "group_limited_greedy"}),
    "deepseek_v2-lite": ("DeepseekV2", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": PLAIN, "q_lora_rank": None,
                                                                    "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3-halves": ("DeepseekV3", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": PLAIN, "rope_interleave": False}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | DEEPSEEK_EXPERTS | {"rope_parameters": PLAIN}),
    "minicpm3": ("MiniCPM3", LATENT | {"rope_parameters": YARN, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 32}),
    "minicpm3-long": ("MiniCPM3", LATENT | {
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": ORIGINAL_CONTEXT},
    }),
    "smollm3": ("SmolLM3", {"rope_parameters": PLAIN, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "seed_oss": ("SeedOss", {"rope_parameters": PLAIN, "head_dim": 16, "attention_bias": True, "attention_dropout": 0.0}),
    "ernie4_5": ("Ernie4_5", {"rope_parameters": PLAIN, "head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"rope_parameters": PLAIN, "head_dim": 16, "moe_num_experts": 8, "moe_k": 3,
                                      "moe_intermediate_size": 20, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    "helium": ("Helium", {"rope_parameters": PLAIN, "head_dim": 12, "attention_bias": True}),
    "gemma": ("Gemma", {"rope_parameters": PLAIN, "head_dim": 16}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"rope_parameters": NTK_ALPHA, "head_dim": 16, "attention_bias": True}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"rope_parameters": NTK_ALPHA, "head_dim": 16, "num_experts": 6, "moe_topk": 2,
                                        "intermediate_size": 20}),
    "arcee": ("Arcee", {"rope_parameters": YARN, "mlp_bias": True}),
    "olmo2": ("Olmo2", {"rope_parameters": PLAIN}),
    "olmo3": ("Olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}, "num_hidden_layers": 5,
                        "sliding_window": WINDOW}),
    "granite": ("Granite", {"rope_parameters": PLAIN, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
                            "attention_multiplier": 0.2, "logits_scaling": 0.5, "tie_word_embeddings": True}),
    "glm": ("Glm", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16}),
    "glm4": ("Glm4", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16}),
    "cohere": ("Cohere", {"rope_parameters": PLAIN, "logit_scale": 0.8}),
    "cohere2": ("Cohere2", {"rope_parameters": PLAIN, "logit_scale": 0.8, "sliding_window": WINDOW, "num_hidden_layers": 5}),
    "starcoder2": ("Starcoder2", {"rope_parameters": PLAIN, "sliding_window": WINDOW}),
    "exaone4": ("Exaone4", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "num_hidden_layers": 5}),
    "nemotron": ("Nemotron", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3, "dtype": "float64"}),
    "stablelm": ("StableLm", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "use_qkv_bias": True,
                              "use_parallel_residual": True}),
    "stablelm-in-turn": ("StableLm", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "phi": ("Phi", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION}),
    "phimoe": ("Phimoe", {
        # transformers takes the short factors for every context: the same twice.
        "rope_parameters": LONGROPE | {name: [1.0, 1.1, 1.3, 1.7, 2.2, 3.9] for name in ("short_factor", "long_factor")} | {
            "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": ORIGINAL_CONTEXT,
        },
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "attention_bias": True, "lm_head_bias": True,
        "router_jitter_noise": 0.2, "sliding_window": WINDOW,
    }),
    "mixtral": ("Mixtral", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "num_local_experts": 5,
                            "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {"rope_parameters": PLAIN, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
                               "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {"rope_parameters": PLAIN, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
                               "moe_intermediate_size": 20, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "olmoe": ("Olmoe", {"rope_parameters": PLAIN, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "granitemoe": ("GraniteMoe", {"rope_parameters": PLAIN, "num_local_experts": 6, "num_experts_per_tok": 2,
                                  "intermediate_size": 20, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
                                  "attention_multiplier": 0.2, "logits_scaling": 0.5, "tie_word_embeddings": True}),
    "granitemoeshared": ("GraniteMoeShared", {
        "rope_parameters": PLAIN, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20,
        "shared_intermediate_size": 28, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
        "logits_scaling": 0.5, "tie_word_embeddings": True,
    }),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        "rope_parameters": PLAIN, "num_local_experts": 0, "shared_intermediate_size": 80, "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope", "mamba_n_heads": 4, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.2, "logits_scaling": 0.5,
    }),
    "dots1": ("Dots1", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "max_window_layers": 2, "attention_bias": True,
                        "norm_topk_prob": True} | DEEPSEEK_EXPERTS),
    "minimax_m2": ("MiniMaxM2", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16,
                                 "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "glm4_moe": ("Glm4Moe", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "head_dim": 16, "use_qk_norm": True,
                             "attention_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                             "topk_group": 2, "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
                             "routed_scaling_factor": 1.7}),
    "llama4": ("Llama4", {"rope_parameters": LLAMA3, "head_dim": 16, "attention_chunk_size": WINDOW, "floor_scale": 8,
                          "attn_scale": 0.3, "num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size": 20,
                          "intermediate_size_mlp": 36, "num_hidden_layers": 5, "moe_layers": [0, 1, 3, 4],
                          "no_rope_layers": [1, 0, 1, 0, 1]}),
    "gpt_oss": ("GptOss", {"rope_parameters": YARN | {"truncate": False}, "head_dim": 16, "num_local_experts": 6,
                           "num_experts_per_tok": 2, "intermediate_size": 20, "sliding_window": WINDOW, "swiglu_limit": 1.5}),
    "ministral": ("Ministral", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "head_dim": 16}),
    "cwm": ("Cwm", {"rope_parameters": LLAMA3, "sliding_window": WINDOW, "head_dim": 16, "num_hidden_layers": 5}),
    "vaultgemma": ("VaultGemma", {"rope_parameters": PLAIN, "head_dim": 16, "query_pre_attn_scalar": 24,
                                  "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "youtu": ("Youtu", LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "olmo": ("Olmo", {"rope_parameters": PLAIN, "clip_qkv": 1.5}),
    "flex_olmo": ("FlexOlmo", {"rope_parameters": PLAIN, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "solar_open": ("SolarOpen", {"rope_parameters": PLAIN, "head_dim": 16, "attention_bias": True, "n_routed_experts": 8,
                                 "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 20,
                                 "n_shared_experts": 2, "routed_scaling_factor": 1.7}),
    "exaone_moe": ("ExaoneMoe", {"rope_parameters": PLAIN, "sliding_window": WINDOW, "num_hidden_layers": 5, "num_experts": 8,
                                 "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_shared_experts": 2, "n_group": 4,
                                 "topk_group": 2, "routed_scaling_factor": 1.7}),
    "gptj": ("GPTJ", {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION, "rotary_dim": 6}),
    "opt": ("OPT", {"ffn_dim": 80}),
    "gpt_bigcode": ("GPTBigCode", {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION,
                                   "num_key_value_heads": 1}),
    # Under names that transformers does not have (RENAMED).
    "internlm2": ("Llama", {"rope_parameters": PLAIN, "head_dim": 12}),
    "exaone": ("Llama", {"rope_parameters": LLAMA3}),
    "minicpm": ("Granite", {"rope_parameters": LONGROPE | {
                                "original_max_position_embeddings": ORIGINAL_CONTEXT,
                                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 3.9], "long_factor": [1.0, 2.2, 3.9, 4.1, 5.0, 7.0],
                            }, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 12**-0.5,
                            "logits_scaling": 0.5, "tie_word_embeddings": True}),
}
# A new checkpoint comes to the end of this list, so that the seeds of all others stay: tests that need a guess to be right, or
# experts to be shared, depend on their weights.
LATER = (
    "ernie4_5_moe", "helium", "gemma", "hunyuan_v1_dense", "hunyuan_v1_moe", "granitemoeshared", "granitemoehybrid", "dots1",
    "minimax_m2", "apertus", "stablelm", "stablelm-in-turn", "phi", "gpt_neox", "gpt2", "phimoe",
    "ministral", "cwm", "vaultgemma", "youtu",
    "olmo", "flex_olmo", "solar_open", "exaone_moe", "gptj", "opt", "gpt_bigcode", "internlm2", "exaone", "minicpm",
)
SEEDS = {name: seed for seed, name in enumerate((*sorted(CHECKPOINTS.keys() - set(LATER)), *LATER))}
# Fields that config.json of these families leaves to the class, and that the family declares.
LEFT_OUT = {
    "gemma": ("tie_word_embeddings", "hidden_act"), "gemma2": ("tie_word_embeddings", "hidden_activation"),
    "vaultgemma": ("tie_word_embeddings", "hidden_activation"), "youtu": ("tie_word_embeddings",),
    "gemma3_text": ("tie_word_embeddings", "hidden_activation"), "smollm3": ("tie_word_embeddings",),
    "ernie4_5": ("tie_word_embeddings",), "ernie4_5_moe": ("tie_word_embeddings",), "arcee": ("hidden_act",),
    "cohere": ("tie_word_embeddings",), "cohere2": ("tie_word_embeddings",), "starcoder2": ("tie_word_embeddings", "hidden_act"),
    "nemotron": ("hidden_act",), "apertus": ("hidden_act",), "phi": ("hidden_act",), "gpt_neox": ("hidden_act",),
    "gpt2": ("activation_function", "tie_word_embeddings"), "minicpm3": ("tie_word_embeddings",),
    "exaone4": ("sliding_window_pattern",), "exaone_moe": ("sliding_window_pattern", "mlp_layer_types"),
    "gptj": ("activation_function",), "opt": ("activation_function", "tie_word_embeddings"),
    "gpt_bigcode": ("activation_function", "tie_word_embeddings", "num_key_value_heads"),
}


# ---- families that transformers does not have ------------------------------------------------------------------------
#
# Checkpoints of a class that computes the same, under the names of the family's own: the config.json and the tensors of a tiny
# checkpoint that is saved already are changed, and the model that made it stays the oracle.

Config = dict[str, Any]


@dataclass(frozen=True)
class Renamed:
    architecture: str
    config: Callable[[Config], Config]
    tensors: Callable[[dict[str, Tensor], Config], dict[str, Tensor]]


def renamed(path: Path, rule: Renamed) -> None:
    raw = json.loads((path / "config.json").read_text())
    tensors = rule.tensors(load_file(path / "model.safetensors"), raw)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    renamed_config(path, rule)


def renamed_config(path: Path, rule: Renamed) -> None:
    raw = json.loads((path / "config.json").read_text())
    kind = rule.architecture.removesuffix("ForCausalLM").lower()
    changed = rule.config(raw) | {"architectures": [rule.architecture], "model_type": kind}
    (path / "config.json").write_text(json.dumps(changed))


def _with_names(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def _without(raw: Config, *names: str) -> Config:
    return {name: value for name, value in raw.items() if name not in names}


def _internlm2(tensors: dict[str, Tensor], raw: Config) -> dict[str, Tensor]:
    """Of each KV head: its queries, its key, its value."""
    dim, kv_heads = raw["head_dim"], raw["num_key_value_heads"]
    found = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        q, k, v = (found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv")
        heads = [each.unflatten(0, (kv_heads, -1, dim)) for each in (q, k, v)]
        found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(heads, dim=1).flatten(0, 2)
    return _with_names(found, {
        "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
    })


def _exaone(tensors: dict[str, Tensor], raw: Config) -> dict[str, Tensor]:
    return _with_names(tensors, {
        "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "down_proj": "c_proj",
    })


def _exaone_config(raw: Config) -> Config:
    more = {"num_layers": raw["num_hidden_layers"], "layer_norm_epsilon": raw["rms_norm_eps"], "activation_function": "silu"}
    return _without(raw, "num_hidden_layers", "rms_norm_eps", "hidden_act") | more


def _minicpm_config(raw: Config) -> Config:
    """Granite's multipliers as depth and width say them."""
    more = {"scale_emb": raw["embedding_multiplier"], "scale_depth": raw["residual_multiplier"] * raw["num_hidden_layers"] ** 0.5,
            "dim_model_base": raw["hidden_size"] / raw["logits_scaling"]}
    multipliers = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
    return _without(raw, *multipliers, "tie_word_embeddings") | more


RENAMED = {
    "internlm2": Renamed("InternLM2ForCausalLM", lambda raw: raw | {"bias": False}, _internlm2),
    "exaone": Renamed("ExaoneForCausalLM", _exaone_config, _exaone),
    "minicpm": Renamed("MiniCPMForCausalLM", _minicpm_config, lambda tensors, raw: tensors),
}


# ---- making and loading ----------------------------------------------------------------------------------------------


def save_checkpoint(name: str, path: Path, *, spelling: int = 5, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write checkpoint `name` into the directory `path`, with config.json as transformers 4 or 5 spells it. Made once by a
    process, and copied for each test, which may change its files."""
    key = repr((name, spelling, dtype, sorted(overrides.items())))
    if key not in _saved:
        made = Path(_folder().name, str(len(_saved)))
        _saved[key] = write_checkpoint(build_model(name, dtype, **overrides), name, made, spelling)
    return Path(shutil.copytree(_saved[key], path, dirs_exist_ok=True))


_saved: dict[str, Path] = {}         # by what was asked for
_folder = functools.cache(functools.partial(tempfile.TemporaryDirectory, prefix="ridgeline-tiny-"))      # ends with the process


def write_checkpoint(model: Any, name: str, path: Path, spelling: int) -> Path:
    model.save_pretrained(path)
    if spelling == 4:
        config_file = path / "config.json"
        config_file.write_text(json.dumps(as_version_4(json.loads(config_file.read_text()))))
    if name in RENAMED:
        renamed(path, RENAMED[name])
    return path


def declared(name: str) -> str:
    """`architectures` of a checkpoint."""
    return RENAMED[name].architecture if name in RENAMED else architecture(CHECKPOINTS[name][0])


def architecture(kind: str) -> str:
    """The class of transformers, of a kind in CHECKPOINTS."""
    return "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"


def save_config(name: str, path: Path) -> Path:
    """Only the config.json of checkpoint `name`."""
    config = build_config(name)
    config.architectures = [architecture(CHECKPOINTS[name][0])]
    config.save_pretrained(path)
    if name in RENAMED:
        renamed_config(path, RENAMED[name])
    return path


def build_config(name: str, **overrides: Any) -> Any:
    import transformers  # takes seconds: only for the tests that need it

    kind, differences = CHECKPOINTS[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Llama4") else f"{kind}Config")
    eager = EAGER_EXPERTS if any("expert" in name for name in differences) else {}
    return config_class(**BASE | eager | differences | overrides)


def build_model(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """The transformers model itself, with weights that depend only on the name."""
    import transformers

    kind, differences = CHECKPOINTS[name]
    config = build_config(name, **overrides)
    model = getattr(transformers, architecture(kind))(config).eval().to(dtype)
    if "swiglu_limit" in differences:                    # before transformers 5.18 its model has 7.0, whatever the config says
        for layer in model.model.layers:
            layer.mlp.experts.limit = config.swiglu_limit
    randomise(model, seed=SEEDS[name], norm_mean=0.0 if kind.startswith(("Gemma", "VaultGemma", "Nemotron")) else 1.0)
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, norm_mean: float) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor, mean: float, deviation: float) -> None:
        like.copy_(torch.randn(like.shape, generator=generator, dtype=torch.float64) * deviation + mean)

    for name, parameter in model.named_parameters():
        if "norm" in name or ".ln_" in name:
            noise(parameter, norm_mean, 0.3)
        elif name.endswith("bias"):
            noise(parameter, 0.0, 0.5)
        elif any(each in name for each in ("embed_tokens", "embed_in", "embed_positions", "wte", "wpe", "lm_head", "embed_out")):
            noise(parameter, 0.0, 0.4)
        else:
            noise(parameter, 0.0, 1.5 * parameter.shape[-1] ** -0.5)
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):     # which some classes have as a parameter
            noise(tensor, 0.0, 0.2)


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same facts as transformers 4 wrote them, and nothing that it left to its classes' defaults."""
    rope = config.pop("rope_parameters", None) or {"rope_theta": 10_000.0, "rope_type": "default"}
    local = rope.get("sliding_attention")
    rope = dict(rope.get("full_attention", rope))
    if local is not None:
        config["rope_local_base_freq"] = local["rope_theta"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "gpt_neox":
        config["rotary_emb_base"], config["rotary_pct"] = config.pop("rope_theta"), config.pop("partial_rotary_factor")
    if config["model_type"] == "phi3":
        rope.pop("original_max_position_embeddings", None)
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if config.get("rope_interleave"):
        del config["rope_interleave"]
    config.pop("layer_types", None)
    config.pop("_sliding_window_pattern", None)
    for name in LEFT_OUT.get(config["model_type"], ()):
        del config[name]
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.50.0"
    return config


def load(path: Path, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None,
         comm: Communicator | None = None, max_model_len: int = MAX_POSITION) -> Decoder:
    """Our decoder with the checkpoint's weights; `config` in place of the checkpoint's own to try a change."""
    config = config or load_model_config(path)
    model = Decoder(config, comm or Communicator(), dtype, "cpu", max_model_len)
    load_weights(model, path, config)
    return model


@dataclass
class PagedSequences:
    """Sequences driven through a decoder with a KV cache of scattered blocks: no scheduler, no sampler."""

    model: Decoder
    block_size: int = 4
    num_blocks: int = 64
    tp_size: int = 1
    context_size: int = 1

    def __post_init__(self) -> None:
        dtype = self.model.norm.weight.dtype
        self.specs = kv_groups(self.model.config, self.block_size, self.tp_size, self.context_size)
        self.block_size *= self.context_size
        found: dict[int, LayerKV] = {}
        for spec in self.specs:
            shape = (self.num_blocks, spec.tokens_here, spec.num_kv_heads, spec.head_dim)
            for layer in spec.layers:
                # NaN: a read of a slot that was never written shows.
                pages = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(spec.vectors)]
                found[layer] = LayerKV(pages[0], pages[-1][..., : spec.value_dim])
        self.kv = [found[layer] for layer in self.model.numbers_here]
        generator = torch.Generator().manual_seed(0)
        self.free = [torch.randperm(self.num_blocks - 1, generator=generator).add(1).tolist() for _ in self.specs]
        self.tables: dict[int, list[list[int]]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, tokens: dict[int, list[int]]) -> dict[int, Tensor]:
        """Feed each sequence some tokens; returns the logits after every one of them, [tokens, vocabulary]. On a stage but
        the last: what it has sent on."""
        starts = [self.lengths.get(sequence, 0) for sequence in tokens]
        counts = [len(each) for each in tokens.values()]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        groups = []
        for group, free in enumerate(self.free):
            tables = []
            for sequence, end in zip(tokens, ends, strict=True):
                table = self.tables.setdefault(sequence, [[] for _ in self.specs])[group]
                while len(table) * self.block_size < end:
                    table.append(free.pop())
                tables.append(table)
            width = max(len(table) for table in tables)
            block_table = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
            slots = torch.cat([
                block_table[row, where // self.block_size] * self.block_size + where % self.block_size
                for row, where in enumerate(positions)
            ])
            groups.append(GroupBatch(slots.long(), block_table))
        query_start = [0, *torch.tensor(counts).cumsum(0).tolist()]
        batch = Batch(
            tokens=torch.tensor([token for each in tokens.values() for token in each]),
            positions=torch.cat(positions),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            kv_len=torch.tensor(ends, dtype=torch.int32),
            query_start_host=query_start,
            kv_len_host=ends,
            groups=groups,
            logits_index=torch.arange(sum(counts)),
            sample_rows=torch.arange(sum(counts)),
            picks=np.arange(sum(counts)),
            device_picks=torch.arange(sum(counts)),
        )
        logits = self.model(batch, self.kv)[batch.logits_index]
        if self.model.stage.last:
            logits = self.model.logits(logits)
        self.lengths.update(zip(tokens, ends, strict=True))
        return dict(zip(tokens, logits.split(counts), strict=True))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def teacher_forced_logits(model: Decoder, tokens: list[int], prefill: int, tp_size: int = 1, context_size: int = 1) -> Tensor:
    """Logits after every token: one prefill, then one step per token."""
    sequences = PagedSequences(model, tp_size=tp_size, context_size=context_size)
    logits = [sequences.step({0: tokens[:prefill]})[0]]
    logits += [sequences.step({0: [token]})[0] for token in tokens[prefill:]]
    return torch.cat(logits)

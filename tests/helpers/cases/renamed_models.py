"""Families that transformers does not have: checkpoints of a class that computes the same, under the names of the family's own.

Each changes the config.json and the tensors of a tiny checkpoint that is saved already; the model that made it stays the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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

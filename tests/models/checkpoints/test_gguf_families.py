"""GGUF files of families whose files differ from their checkpoints in more than names: written as llama.cpp's converter writes
them, and the same model as the checkpoint of transformers. Files that are close to a family, and are not it, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_writer import Typed, write_gguf
from safetensors.torch import load_file, save_file
from test_weights import WEIGHTS, logits_of, save_gguf
from tiny_configs import ORIGINAL_CONTEXT, WINDOW
from tiny_models import save_checkpoint

from ridgeline.errors import ModelError
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config
from ridgeline.models.weights import deinterleaved

PLAIN = {"rope_type": "default", "rope_theta": 1e3}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": ORIGINAL_CONTEXT}
MINISTRAL_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}

# A checkpoint, what of it differs, the architecture of its file, and metadata beside the usual.
FILES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "glm4": ("glm4", {}, "glm4", {}),
    "chatglm": ("glm", {}, "chatglm", {}),
    "chatglm-fused": ("glm", {}, "chatglm", {}),         # of the checkpoints before transformers knew them
    "falcon": ("falcon-7b", {}, "falcon", {}),
    "falcon-11b": ("falcon-11b", {}, "falcon", {}),
    "falcon-40b": ("falcon", {}, "falcon", {}),
    "jais2": ("jais2", {}, "jais2", {}),
    "exaone4": ("exaone4", {}, "exaone4", {"attention.sliding_window_pattern": [True, True, True, False, True]}),
    "exaone4-usual-layers": ("exaone4", {}, "exaone4", {}),
    "exaone4-1.2b": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}, "exaone4", {}),
    "olmo3": ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}, "olmo2",
              YARN_KEYS | {"attention.sliding_window_pattern": [True, True, True, False, True]}),
    "olmo3-every-third": ("olmo3", {
        "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_hidden_layers": 6,
    }, "olmo2", {"attention.sliding_window_pattern": 3}),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL_YARN, "sliding_window": None}, "mistral3", YARN_KEYS | {
        "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.4,
    }),
    "mistral-small": ("mistral", {"sliding_window": None}, "mistral3", {}),
    "gptneox": ("gpt_neox", {}, "gptneox", {"use_parallel_residual": True}),
    "gptneox-in-turn": ("gpt_neox", {"use_parallel_residual": False}, "gptneox", {"use_parallel_residual": False}),
    "olmo": ("olmo", {}, "olmo", {"attention.clamp_kqv": 1.5}),
    "internlm2": ("internlm2", {}, "internlm2", {}),
    "exaone": ("exaone", {"rope_parameters": PLAIN}, "exaone", {}),
    "minicpm": ("minicpm", {"rope_parameters": PLAIN}, "minicpm", {
        "embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 0.5,
    }),
    "minicpm-old": ("minicpm", {
        "rope_parameters": PLAIN, "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 3**0.5, "logits_scaling": 48 / 256,
    }, "minicpm", {}),
    "starcoder": ("gpt_bigcode", {}, "starcoder", {}),
    "qwen3vl": ("qwen3", {}, "qwen3vl", {"rope.dimension_sections": [4, 2, 2, 0]}),
    "granitehybrid": ("granitemoehybrid", {}, "granitehybrid", {
        "embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 0.5, "expert_count": 0,
        "attention.head_count_kv": [2, 2, 2],
    }),
}


PERMUTED = ("granitehybrid", "olmo", "minicpm", "internlm2")


def taken_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """InternLM 2: queries, keys and values of each KV head as three tensors, under the names of Llama."""
    found = {}
    names = {"tok_embeddings": "embed_tokens", "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
             "feed_forward.w2": "mlp.down_proj"}
    for name, tensor in tensors.items():
        if "attention.wqkv" in name:
            heads = tensor.unflatten(0, (2, -1, 12))
            for part, rows in {"q": heads[:, :-2], "k": heads[:, -2:-1], "v": heads[:, -1:]}.items():
                found[name.replace("attention.wqkv", f"self_attn.{part}_proj")] = rows.flatten(0, 2).contiguous()
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found["lm_head.weight" if name == "output.weight" else name] = tensor
    return found


def by_part(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Falcon: all queries, then all keys, then all values."""
    heads = tensor.unflatten(0, (kv_heads, -1, 12))
    return torch.cat((heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)))


def as_files_have_it(directory: Path, architecture: str) -> None:
    """Changes to the tensors that the converter makes beside their names."""
    found = {}
    for name, tensor in taken_apart(load_file(directory / WEIGHTS)).items():
        if architecture == "gptneox":
            if "query_key_value" in name:        # all queries, then all keys, then all values
                tensor = tensor.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()
            name = name.replace("gpt_neox.layers", "model.layers").replace("gpt_neox.embed_in", "model.embed_tokens")
            name = name.replace("gpt_neox.final_layer_norm", "model.norm").replace("embed_out", "lm_head")
            name = name.replace("attention.query_key_value", "self_attn.qkv_proj").replace("attention.dense", "self_attn.o_proj")
            name = name.replace("dense_h_to_4h", "up_proj").replace("dense_4h_to_h", "down_proj")
        if architecture == "falcon":
            if "query_key_value" in name:
                tensor = by_part(tensor, 2 if tensor.shape[0] == 96 else 1)
            name = name.replace("transformer.h", "model.layers").replace("self_attention.query_key_value", "self_attn.qkv_proj")
            name = name.replace("transformer.word_embeddings", "model.embed_tokens").replace("self_attention", "self_attn")
            name = name.replace("dense_h_to_4h", "up_proj").replace("dense_4h_to_h", "down_proj")
        name = name.replace("transformer.h.", "model.layers.") if architecture == "exaone" else name
        name = name.replace("attn.attention.out_proj", "self_attn.o_proj").replace("attn.attention", "self_attn")
        name = name.replace("c_fc_0", "gate_proj").replace("c_fc_1", "up_proj")
        name = name.replace("mlp.c_proj", "mlp.down_proj") if architecture == "exaone" else name
        if architecture in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.reshape(-1, 2, 6, 48).swapaxes(1, 2).reshape(tensor.shape)
        if "shared_mlp.input_linear" in name:
            gate, up = tensor.chunk(2)
            found[name.replace("shared_mlp.input_linear", "mlp.gate_proj")] = gate.contiguous()
            name, tensor = name.replace("shared_mlp.input_linear", "mlp.up_proj"), up.contiguous()
        found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
    save_file(found, directory / WEIGHTS)


def fuse(directory: Path) -> None:
    """q, k and v as one tensor."""
    tensors = load_file(directory / WEIGHTS)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    save_file(tensors, directory / WEIGHTS)


def written(directory: Path, architecture: str, metadata: dict[str, Any]) -> Path:
    """The file of a checkpoint, whose tensors are changed as the converter does."""
    as_files_have_it(directory, architecture)
    return save_gguf(directory, architecture, metadata, {})


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_the_same_model(name: str, tmp_path: Path) -> None:
    checkpoint, overrides, architecture, metadata = FILES[name]
    directory = save_checkpoint(checkpoint, tmp_path, **overrides)
    config = load_model_config(directory)
    expected = logits_of(directory, torch.float64)
    noise = float((logits_of(directory) - expected).abs().max())
    if name == "chatglm-fused":
        fuse(directory)
    path = written(directory, architecture, metadata)
    read = load_model_config(path)
    assert (read.num_parameters, read.windows, read.tied) == (config.num_parameters, config.windows, config.tied)
    assert float((logits_of(path, torch.float64) - expected).abs().max()) <= 4 * noise
    assert float((logits_of(path) - expected).abs().max()) <= 4 * noise


def test_a_glm_that_also_sees_images_has_its_rows_in_halves(tmp_path: Path) -> None:
    directory = save_checkpoint("glm4", tmp_path)
    expected = logits_of(directory)
    tensors = load_file(directory / WEIGHTS)
    save_file({
        name: deinterleaved(tensor, 16, 8).contiguous() if ".q_proj" in name or ".k_proj" in name else tensor
        for name, tensor in tensors.items()
    }, directory / WEIGHTS)
    path = save_gguf(directory, "glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, {})
    assert float((logits_of(path) - expected).abs().max()) < 1e-3


def test_a_layer_that_predicts_the_token_after_next_is_left_in_the_file(tmp_path: Path) -> None:
    directory = save_checkpoint("glm4", tmp_path)
    expected = logits_of(directory)
    more = {"blk.3.nextn.eh_proj.weight": np.ones((48, 96), np.float32), "blk.3.attn_norm.weight": np.ones(48, np.float32)}
    path = save_gguf(directory, "glm4", {"block_count": 4, "nextn_predict_layers": 1}, more)
    assert load_model_config(path).num_layers == 3
    assert float((logits_of(path) - expected).abs().max()) < 1e-3


def changed(path: Path, **changes: Any) -> Path:
    """The same file with other metadata of its architecture; None leaves a key out. Tensors are not kept."""
    with GGUFFile(path) as file:
        kind = file.metadata["general.architecture"]
        keys = {f"{kind}.{name.replace('__', '.')}": value for name, value in changes.items()}
        metadata = {name: value for name, value in (file.metadata | keys).items() if value is not None}
        return write_gguf(path.with_name("changed.gguf"), metadata, {"token_embd.weight": np.zeros((8, 48), np.float32)})


def test_files_that_are_close_to_a_family_are_refused(tmp_path: Path) -> None:
    path = written(save_checkpoint("granitemoehybrid", tmp_path), "granitehybrid", FILES["granitehybrid"][3])
    with pytest.raises(ModelError, match=r"layers without attention \(a state-space hybrid\) are not supported: .* 0 for 2 of 3"):
        load_model_config(changed(path, attention__head_count_kv=[0, 2, 0]))
    with pytest.raises(ModelError, match=r"granitehybrid with experts is not supported"):
        load_model_config(changed(path, expert_count=8, expert_used_count=2))
    with pytest.raises(ModelError, match=r"nextn_predict_layers must be at most 2, got 3"):
        load_model_config(changed(path, nextn_predict_layers=3))
    path = save_gguf(save_checkpoint("exaone4", tmp_path), "exaone4", {}, {})
    assert WINDOW in load_model_config(path).windows
    with pytest.raises(ModelError, match=r"sliding_window_pattern must list 5 times true or false"):
        load_model_config(changed(path, attention__sliding_window_pattern=Typed("int32", [1, 0, 2, 1, 1])))

"""Checkpoints as they lie on hubs: other beginnings of names, masks among the weights, and what cannot be taken apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.errors import ModelError
from ridgeline.models.model_config import hf_model_config

TOKENS = random_tokens(8)


def logits(path: Path) -> torch.Tensor:
    return teacher_forced_logits(load(path, torch.float64), TOKENS, 6)


@pytest.mark.parametrize(("name", "beginning", "mask"), [
    ("gpt2", "transformer.", "h.{}.attn.bias"), ("gpt_neox", "", "gpt_neox.layers.{}.attention.masked_bias"),
    ("codegen", "", "transformer.h.{}.attn.causal_mask"), ("gpt_neo", "", "transformer.h.{}.attn.attention.bias"),
    ("ernie4_5_moe", "", "model.mtp_linear_proj.{}.weight"), ("apertus", "", "model.layers.{}.self_attn.rotary_emb.inv_freq"),
])
def test_names_of_hubs_are_known(name: str, beginning: str, mask: str, tmp_path: Path) -> None:
    path = save_checkpoint(name, tmp_path)
    expected, file = logits(path), path / "model.safetensors"
    tensors = {key.removeprefix(beginning): value for key, value in load_file(file).items()}
    for kind in (torch.float32, torch.bool, torch.uint8):            # as masks are kept
        save_file(tensors | {mask.format(layer): torch.zeros(1, 1, dtype=kind) for layer in range(3)}, file)
        assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(("name", "architecture", "further"), [
    ("llama-yarn", "InternLM3ForCausalLM", ()), ("qwen2.5-yarn", "MiMoForCausalLM", ("model.mtp_layers.0.input_proj.weight",)),
])
def test_other_names_of_a_family_are_known(name: str, architecture: str, further: tuple[str, ...], tmp_path: Path) -> None:
    path = save_checkpoint(name, tmp_path)
    expected, file = logits(path), path / "model.safetensors"
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture], "model_type": "other"}))
    save_file(load_file(file) | {key: torch.zeros(1, 1) for key in further}, file)
    assert torch.equal(logits(path), expected)


def test_codes_that_would_have_to_be_reordered_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint("gpt_neox", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True,
    }}))
    with pytest.raises(ModelError, match="quantised checkpoints of gpt_neox are not supported: give one in 16 or 32 bits"):
        load(path)


def test_a_long_and_a_short_scale_must_agree() -> None:
    raw = {"architectures": ["PhiMoEForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16,
           "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "num_local_experts": 4,
           "num_experts_per_tok": 2}
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64,
               "short_mscale": 1.2, "long_mscale": 1.2}
    config = hf_model_config(raw | {"rope_scaling": scaling}, {})
    assert config.ropes[0].scale == 1.2 and config.ropes[0].long_divisors == (2.0,) * 4
    with pytest.raises(ModelError, match=r"short_mscale 1\.2 and long_mscale 1\.3 must be the same"):
        hf_model_config(raw | {"rope_scaling": scaling | {"long_mscale": 1.3}}, {})

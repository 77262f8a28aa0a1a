"""config.json as strangers write it: every spelling of a rope, and fields left out, mean what they mean to transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tiny_configs import CHECKPOINTS
from tiny_models import RENAMED, save_config

from ridgeline.errors import ModelError
from ridgeline.models.config_fields import ACTIVATIONS
from ridgeline.models.families.all_families import FAMILIES, TEXT_TYPES, _refusal
from ridgeline.models.model_config import ModelConfig, hf_model_config
from ridgeline.sizes.op_costs import ACTIVATION_FLOPS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 1,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
ROPES: dict[str, dict[str, Any]] = {
    "none": {}, "theta": {"rope_theta": 500_000}, "null": {"rope_scaling": None, "rope_parameters": None},
    "empty": {"rope_scaling": {}},
    "version 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "version 5, the older key": {"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 2e4}},
    "version 5, theta outside": {"rope_theta": 3e4, "rope_parameters": LINEAR, "rope_scaling": None},
    "both": {"rope_parameters": LINEAR, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "both, the newer plain": {
        "rope_theta": 3e4, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}, "rope_scaling": YARN,
    },
    "linear": {"rope_scaling": {"type": "linear", "factor": 3}}, "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN}, "yarn, no original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, original outside": {"original_max_position_embeddings": 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, no factor": {"rope_scaling": YARN | {"factor": None}},
    "yarn, another factor": {"rope_scaling": YARN | {"factor": 8.0}},
    "yarn, mscale": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}},
    "yarn, half an mscale": {"rope_scaling": YARN | {"mscale": 0.707}},
    "yarn, attention factor": {"rope_scaling": YARN | {"attention_factor": 0.8}},
    "yarn, betas": {"rope_scaling": YARN | {"beta_fast": 64, "beta_slow": 2, "truncate": False}},
    "yarn, betas of null": {"rope_scaling": YARN | {"beta_fast": None, "beta_slow": None}},
    "llama3": {"rope_scaling": LLAMA3 | {"type": "llama3", "original_max_position_embeddings": 1024}},
    "llama3, no original": {"rope_scaling": LLAMA3},
}


@pytest.mark.parametrize("name", ROPES)
def test_a_rope_is_what_transformers_makes_of_it(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # seconds, which collecting need not take

    raw = LLAMA | ROPES[name]
    config = hf_model_config(raw, {})
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(copy.deepcopy(raw)))
    ours = torch.tensor(config.ropes[0].frequencies(config.max_position_embeddings))
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-5, atol=0)
    assert config.ropes[0].scale == pytest.approx(theirs.attention_scaling)


EPSILONS = {"cohere": "layer_norm_eps", "cohere2": "layer_norm_eps", "phi": "layer_norm_eps", "stablelm": "layer_norm_eps",
            "gpt_neox": "layer_norm_eps", "nemotron": "norm_eps", "starcoder2": "norm_epsilon", "gpt2": "layer_norm_epsilon",
            "gptj": "layer_norm_epsilon", "gpt_bigcode": "layer_norm_epsilon", "falcon": "layer_norm_epsilon",
            "jais2": "layer_norm_eps", "gpt_neo": "layer_norm_epsilon", "codegen": "layer_norm_epsilon"}
CONSTANT = {"olmo": 1e-5, "opt": 1e-5}                   # epsilons that no field says
# Of fields that would show in the shapes of tensors, loading is the judge.
LEFT_OUT = ("rope_parameters", "tie_word_embeddings", "hidden_act", "hidden_activation", "activation_function", "activation",
            "norm_topk_prob",
            "routed_scaling_factor", "sliding_window", "layer_types", "rms_norm_eps", *set(EPSILONS.values()))


def of_transformers(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Facts that no shape of a tensor would contradict."""
    kind = CHECKPOINTS[name][0]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Llama4") else f"{kind}Config")
    config = config_class.from_dict(copy.deepcopy(raw))
    activation = next(found for field in ("hidden_activation", "hidden_act", "activation_function", "activation")
                      if (found := getattr(config, field, None)) is not None)
    facts = {
        "epsilon": CONSTANT.get(config.model_type) or getattr(config, EPSILONS.get(config.model_type, "rms_norm_eps")),
        "tied": bool(config.tie_word_embeddings),
        "activation": ACTIVATIONS[activation],
    }
    rope = getattr(config, "rope_parameters", None)
    if rope and not config.model_type.startswith("hunyuan"):         # whose theta grows with alpha
        facts["theta"] = rope.get("full_attention", rope)["rope_theta"]
        facts["stretched"] = rope.get("full_attention", rope)["rope_type"] not in ("default", "dynamic")
    if hasattr(config, "norm_topk_prob"):
        facts["normalise"] = bool(config.norm_topk_prob)
    if hasattr(config, "routed_scaling_factor"):
        facts["scale"] = config.routed_scaling_factor
    return facts


def of_ours(config: ModelConfig) -> dict[str, Any]:
    full = [rope for rope, window in zip(config.ropes, config.windows, strict=True) if rope.turns and window is None]
    if config.family.local_rope and not any(config.windows):
        full = []                    # a window that hides nothing leaves the layer its own rope
    turned = full or [rope for rope in config.ropes if rope.turns] or [config.ropes[0]]
    facts: dict[str, Any] = {"epsilon": config.rms_norm_eps, "tied": config.tied, "activation": config.activation}
    if full or not config.family.local_rope:
        facts["theta"] = turned[-1].theta
        facts["stretched"] = bool(turned[-1].divisors)
    if config.experts is not None:
        facts |= {"normalise": config.experts.routing.normalise, "scale": config.experts.routing.scale}
    return facts


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name not in RENAMED])
def test_a_missing_field_means_what_it_means_to_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    raw = json.loads((save_config(name, tmp_path) / "config.json").read_text())
    compared = 0
    raw.pop("time_step_limit", None)                     # of state-space layers, which transformers cannot read back
    for field in raw.keys() & set(LEFT_OUT):
        less = {each: value for each, value in raw.items() if each != field}
        try:
            ours = of_ours(hf_model_config(less, {}))
        except ModelError:
            continue
        try:
            theirs = of_transformers(name, less)
        except (KeyError, TypeError, ValueError, StrictDataclassError):  # transformers cannot do without it
            continue
        for fact, value in theirs.items():
            if fact in ours:
                assert ours[fact] == pytest.approx(value), f"{fact} without {field}"
                compared += 1
    assert compared


def test_an_architecture_that_is_missing_is_known_by_the_type() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "architectures"} | {"model_type": "llama"}
    assert hf_model_config(raw, {}) == hf_model_config(LLAMA, {})
    with pytest.raises(ModelError, match="architectures is missing, and model_type 'lamma' is not known"):
        hf_model_config(raw | {"model_type": "lamma"}, {})
    with pytest.raises(ModelError, match=r"model_type 'mamba' is not supported \(a state-space model"):
        hf_model_config(raw | {"model_type": "mamba"}, {})
    inside = {"model_type": "paligemma", "text_config": LLAMA | {"model_type": "gemma"}}
    with pytest.raises(ModelError, match=r"model_type 'paligemma' is not supported \(a prompt whose tokens see each other\)"):
        hf_model_config(inside, {})
    assert [name for name in (*TEXT_TYPES, *(family.name for family in FAMILIES)) if _refusal(name)] == []


NEO = {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "vocab_size": 64, "hidden_size": 48, "num_layers": 4,
       "num_heads": 4, "max_position_embeddings": 64, "window_size": 8}


@pytest.mark.parametrize(("given", "message"), [
    ({"attention_types": 5}, "attention_types must list pairs of kinds and how often they repeat"),
    ({"attention_types": [["global", 2]]}, "attention_types must list pairs"),
    ({"attention_types": [[["global"], "2"]]}, "attention_types must list pairs"),
    ({"attention_types": [[["global"], 10**12]]}, "attention_types must list pairs"),
    ({"attention_types": [[[["global"]], 4]]}, "attention_layers must list global or local for each layer"),
    ({"attention_layers": 5}, "attention_layers must list global or local"),
    ({"attention_layers": ["global"] * 3}, "layer_types"),
])
def test_kinds_of_layers_that_cannot_be_read(given: dict[str, Any], message: str) -> None:
    assert hf_model_config(NEO | {"attention_types": [[["global", "local"], 2]]}, {}).windows == (None, 8, None, 8)
    with pytest.raises(ModelError, match=message):
        hf_model_config(NEO | given, {})


def test_the_first_files_of_falcon_40b_have_the_new_layout() -> None:
    raw = {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "vocab_size": 64, "hidden_size": 64, "n_layer": 2,
           "n_head": 16, "alibi": False, "bias": False, "parallel_attn": True}
    large = hf_model_config(raw | {"n_head_kv": 8}, {})
    assert large.num_kv_heads == 8 and large.own_mlp_norm
    small = hf_model_config(raw | {"multi_query": True}, {})
    assert small.num_kv_heads == 1 and not small.own_mlp_norm


def test_a_list_of_equal_numbers_is_that_number() -> None:
    """Hunyuan-A13B lists the experts of every layer."""
    raw = LLAMA | {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 8, "moe_topk": [2, 2]}
    found = hf_model_config(raw, {}).experts
    assert found is not None and found.used == 2 and found.shared == 96
    with pytest.raises(ModelError, match=r"moe_topk must be an integer of at least 1, got \[2, 4\]"):
        hf_model_config(raw | {"moe_topk": [2, 4]}, {})


def test_layers_of_experts_are_listed_in_three_ways() -> None:
    raw = LLAMA | {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16,
                   "num_hidden_layers": 5}
    for change, dense in (
        ({"moe_layer_start_index": 2, "moe_layer_end_index": -1}, (0, 1)), ({"moe_layer_end_index": 3}, (0, 4)),
        ({"moe_layer_interval": 2}, (0, 2, 4)), ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}, (0, 1)),
    ):
        found = hf_model_config(raw | change, {}).experts
        assert found is not None and found.dense == dense
    with pytest.raises(ModelError, match="mlp_layer_types must list 5 times dense or sparse"):
        hf_model_config(raw | {"mlp_layer_types": ["dense"]}, {})


@pytest.mark.parametrize(("architecture", "name"), [
    ("MixtralForCausalLM", "num_local_experts"), ("OlmoeForCausalLM", "num_experts"),
    ("Ernie4_5_MoeForCausalLM", "moe_num_experts"), ("Glm4MoeForCausalLM", "n_routed_experts"),
    ("Llama4ForCausalLM", "num_experts"),                # its default is 16
])
def test_no_experts_is_a_plain_mlp_in_every_layer(architecture: str, name: str) -> None:
    config = hf_model_config(LLAMA | {"architectures": [architecture], name: 0, "num_key_value_heads": 2, "head_dim": 32,
                                      "intermediate_size_mlp": 96}, {})
    assert config.experts is None and config.intermediate_size == 96


def test_a_legacy_name_of_an_activation_means_the_familys() -> None:
    """Gemma's first files say gelu, and were trained with its tanh form."""
    gemma = LLAMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 32}
    for given in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}):
        theirs = transformers.GemmaConfig(**{key: value for key, value in (gemma | given).items() if key != "architectures"})
        assert hf_model_config(gemma | given, {}).activation == ACTIVATIONS[theirs.hidden_act] == "gelu_tanh"
    assert hf_model_config(gemma | {"hidden_activation": "silu"}, {}).activation == "silu"
    assert hf_model_config(LLAMA | {"hidden_act": "gelu"}, {}).activation == "gelu"


def test_every_activation_has_a_cost() -> None:
    assert {*ACTIVATIONS.values()} == {*ACTIVATION_FLOPS}

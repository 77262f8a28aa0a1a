"""ModelConfig from config.json and GGUF metadata: what is wrong is named in one line, before any weight is read."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import write_gguf

from ridgeline.errors import ConfigError, ModelError
from ridgeline.models.families.all_families import FAMILIES, WITH_MORE
from ridgeline.models.model_config import hf_model_config, kv_groups, load_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "bfloat16",
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.attention.head_count": 4,
    "llama.embedding_length": 64, "llama.feed_forward_length": 96, "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def test_alpha_of_a_dynamic_rope_is_hunyuans_alone() -> None:
    """As in transformers, where other families' dynamic rope has a factor beyond the model's own context and no alpha."""
    given = LLAMA | {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
    plain = hf_model_config(given, {})
    assert {rope.theta for rope in plain.ropes} == {1e4}
    hunyuan = hf_model_config(given | {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}, {})
    dim = hunyuan.head_dim
    assert {rope.theta for rope in hunyuan.ropes} == {1e4 * 1000.0 ** (dim / (dim - 2))}


def test_defaults_of_an_old_llama() -> None:
    config = hf_model_config(LLAMA, {})
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, "bfloat16")
    assert config.ropes[0].theta == 10_000.0 and config.attention_scale == 0.25
    assert config.eos_token_ids == (2,) and not config.tied


def test_end_tokens_of_both_files_are_joined() -> None:
    assert hf_model_config(LLAMA, {"eos_token_id": [7, 2, 9]}).eos_token_ids == (2, 7, 9)
    assert hf_model_config(without(LLAMA, "eos_token_id"), {}).eos_token_ids == ()


def test_yarn_stretches_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert hf_model_config(LLAMA | {"rope_scaling": scaling}, {}).max_position_embeddings == 1024


@pytest.mark.parametrize(("change", "message"), [
    ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not supported (a state-space model, or a "
                                              "hybrid with one); supported: LlamaForCausalLM, MistralForCausalLM, "),
    ({"architectures": []}, "architectures is missing, and model_type None is not known"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"vocab_size": "many"}, "vocab_size must be an integer of at least 1, got 'many'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
    ({"num_attention_heads": True}, "num_attention_heads must be an integer of at least 1, got True"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads evenly"),
    ({"hidden_size": 66}, "hidden_size 66 is not a multiple of 4 heads, and no head_dim is given"),
    ({"head_dim": 1_000_000_000}, "head_dim must be at most 16384, got 1000000000"),
    ({"hidden_size": 2**30, "num_attention_heads": 1}, "hidden_size must be at most"),
    ({"vocab_size": 2**31 - 1}, "vocab_size must be at most"),
    ({"intermediate_size": 2**31 - 1}, "intermediate_size must be at most"),
    ({"num_attention_heads": 2**31 - 1}, "num_attention_heads must be at most"),
    ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings must be at most"),
    ({"eos_token_id": 10**30}, "eos_token_id must be a token id"),
    ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "yarn stretches the context to "),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "its rope cannot be computed from these numbers"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": []}}, "positive number as attention_factor, got []"),
    ({"head_dim": 15}, "15 rotated dimensions of a head of 15: must be even"),
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
    ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type 'ntk' is not supported; supported: default, "),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type \"['yarn']\" is not supported; supported: default, "),
    ({"layer_types": ["mamba", "attention"]}, "layer type 'mamba' is not supported; supported: full_attention"),
    ({"layers_block_type": ["attention", "linear_attention"]}, "layer type 'linear_attention' is not supported"),
    ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; supported: silu, "),    # with a gate
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list, got 'LlamaForCausalLM'"),
    ({"architectures": ["Qwen3NextForCausalLM"]}, "'Qwen3NextForCausalLM' is not supported (layers of linear attention); "),
    ({"architectures": ["BambaForCausalLM"]}, "'BambaForCausalLM' is not supported (a state-space model, or a hybrid with "),
    ({"architectures": ["MixtralForCausalLM"]}, "n_routed_experts or num_local_experts or num_experts or moe_num_experts is "),
    ({"architectures": ["GPT2LMHeadModel"], "n_positions": 64, "n_layer": 2, "n_head": 2}, "n_embd is missing"),
    ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
    ({"rope_scaling": {"type": "linear"}}, "linear rope needs a positive number as factor, got None"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "llama3 rope needs a positive number as low_freq_factor"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for llama"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu, "),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    ({"torch_dtype": "int8"}, "dtype 'int8' is not supported; supported: float32, "),
    ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got '</s>'"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported; supported: "
                                                            "compressed-tensors, awq, gptq"),
])
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        hf_model_config(LLAMA | change, {})
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "message"), [
    ({"layer_types": ["full_attention"]}, "layer_types must list 2 layers, got ['full_attention']"),
    ({"layer_types": ["full_attention", "chunked"]}, "layer type 'chunked' is not supported; supported: full_attention"),
    ({"sliding_window": 0}, "sliding_window must be an integer of at least 1, got 0"),
    ({"sliding_window": -4}, "sliding_window must be an integer of at least 1, got -4"),
])
def test_a_wrong_window_is_named(change: dict[str, Any], message: str) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    with pytest.raises(ModelError, match=r"^config\.json: ") as caught:
        hf_model_config(mistral | change, {})
    assert message in str(caught.value)


def test_a_window_of_null_is_no_window() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
    assert hf_model_config(mistral, {}).windows == (4096, 4096)
    assert hf_model_config(mistral | {"sliding_window": None}, {}).windows == (None, None)
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}
    assert hf_model_config(qwen, {}).windows == (None, None)
    assert hf_model_config(qwen | {"use_sliding_window": True}, {}).windows == (None, 8)


def test_longrope_needs_its_factors() -> None:
    phi = LLAMA | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su", "short_factor": [1.0] * 8}}
    with pytest.raises(ModelError, match="longrope needs 8 positive numbers as long_factor, got None"):
        hf_model_config(phi, {})
    phi["rope_scaling"]["long_factor"] = [1.0] * 7
    with pytest.raises(ModelError, match="longrope needs 8 positive numbers as long_factor, got 7"):
        hf_model_config(phi, {})


def test_code_in_the_checkpoint_is_ignored_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("ridgeline.models"), "handle", records.append)
    hf_model_config(LLAMA | {"auto_map": {"AutoModel": "evil.Model"}}, {})
    assert ["auto_map" in record.getMessage() for record in records] == [True]


@pytest.mark.parametrize(("content", "message"), [
    ("{", "config.json is not valid JSON"),
    ("[]", "config.json must hold a JSON object, got list"),
])
def test_a_broken_config_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        load_model_config(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist: give a directory with config\.json or a \.gguf file$"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"^model some/name does not exist: give a directory"):
        load_model_config("some/name")
    with pytest.raises(ModelError, match=r"^model some/file\.gguf does not exist: give a directory"):
        load_model_config("some/file.gguf")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"model\.bin is not a model: give"):
        load_model_config(tmp_path / "model.bin")
    with pytest.raises(ModelError, match=r"has no config\.json: give a Hugging Face model directory"):
        load_model_config(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ModelError, match=r"is a LoRA adapter, not a model: merge it"):
        load_model_config(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelError, match=r"has no config\.json: give the file some\.gguf$"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    assert load_model_config(tmp_path).eos_token_ids == (2, 3)


def test_an_adapter_beside_a_model_is_not_applied_and_the_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("ridgeline.models"), "handle", records.append)
    load_model_config(tmp_path)
    assert not records
    (tmp_path / "adapter_config.json").touch()
    for _ in range(2):                                   # as a start does
        load_model_config(tmp_path)
    assert ["also has a LoRA adapter, which is not applied" in record.getMessage() for record in records] == [True]


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf(tmp_path: Path, metadata: dict[str, Any], **tensors: np.ndarray) -> Path:
    embedding = {"token_embd.weight": np.zeros((128, 64), np.float32)}
    return write_gguf(tmp_path / "m.gguf", metadata, embedding | {name.replace("__", "."): t for name, t in tensors.items()})


def test_gguf_says_what_config_json_says(tmp_path: Path) -> None:
    ours = load_model_config(gguf(tmp_path, GGUF | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}))
    assert ours.eos_token_ids == (2, 5) and ours.tied
    theirs = hf_model_config(LLAMA, {})
    same = ("family", "vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ropes", "windows")
    assert all(getattr(ours, fact) == getattr(theirs, fact) for fact in same)


@pytest.mark.parametrize(("change", "message"), [
    ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported (a state-space model, or a hybrid with one); "),
    ({"general.architecture": "falcon-h1"}, "'falcon-h1' is not supported (a state-space model, or a hybrid with one); "),
    ({"general.architecture": "jais"}, "'jais' is not supported (positions as biases of the scores (ALiBi)); "),
    ({"general.architecture": "jais2"}, "jais2.block_count is missing"),
    ({"general.architecture": "nothing"}, "'nothing' is not supported (no family is declared for it); supported: llama, "),
    ({"general.architecture": "apertus"}, "(its GGUF files are not read yet; its Hugging Face directory is); "),
    ({"llama.block_count": 0}, "llama.block_count must be an integer of at least 1, got 0"),
    ({"llama.attention.head_count": 5}, "llama.embedding_length 64 is not a multiple of 5 heads"),
    ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3 KV heads evenly"),
    ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
    ({"llama.rope.dimension_count": 17}, "llama.rope.dimension_count must be even and at most 16, got 17"),
    ({"llama.rope.scaling.type": "ntk"}, "llama.rope.scaling.type 'ntk' is not supported; supported: none, linear, "),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
    ({"llama.attention.causal": False}, "llama.attention.causal False is not supported; supported: True"),
    ({"llama.attention.max_alibi_bias": 8.0}, "llama.attention.max_alibi_bias 8.0 is not supported; supported: 0.0"),
    ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor 0.5 is not supported; supported: 1.0"),
    ({"llama.rope.scaling.yarn_attn_factor": 0.5}, "llama.rope.scaling.yarn_attn_factor 0.5 is not supported; supported: 1"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0, "llama.rope.scaling.yarn_attn_factor": 1.5},
     "llama.rope.scaling.yarn_attn_factor 1.5 is not supported; supported: 1 or 1.20794"),
])
def test_a_wrong_gguf_field_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model_config(gguf(tmp_path, GGUF | change))
    assert str(caught.value).startswith("m.gguf: ") and message in str(caught.value)


@pytest.mark.parametrize("given", [
    {}, {"yarn_attn_factor": 1.0}, {"yarn_attn_factor": 1.2079441547393799}, {"attn_factor": 1.0},
    {"attn_factor": 1.2079441547393799},
], ids=str)
def test_a_yarn_factor_that_says_what_is_usual_is_read(given: dict[str, Any], tmp_path: Path) -> None:
    """As llama.cpp's converter writes it for OLMo 3, in 32 bits, now and formerly, and for models without one."""
    fields = {"type": "yarn", "factor": 8.0} | given
    scaling = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
    ropes = load_model_config(gguf(tmp_path, GGUF | scaling)).ropes
    assert [rope.scale for rope in ropes] == pytest.approx([1.2079441541679836] * len(ropes), rel=1e-12)


def test_missing_gguf_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.gguf: llama\.context_length is missing$"):
        load_model_config(gguf(tmp_path, without(GGUF, "llama.context_length")))
    with pytest.raises(ModelError, match=r"m\.gguf: tensor rope_freqs\.weight must hold 8 positive numbers$"):
        load_model_config(gguf(tmp_path, GGUF, rope_freqs__weight=np.ones(7, np.float32)))
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight is missing or not a matrix$"):
        load_model_config(write_gguf(tmp_path / "m.gguf", GGUF, {"x": np.zeros(4, np.float32)}))


# ---- sharding arithmetic, and what this module must not import -------------------------------------------------------


def test_kv_heads_per_rank() -> None:
    config = hf_model_config(LLAMA | {"num_key_value_heads": 2}, {})
    assert [kv_groups(config, 16, ranks)[0].num_kv_heads for ranks in (1, 2, 4)] == [2, 1, 1]
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not fit 2 KV heads: use at most 2, or a multiple"):
        kv_groups(config, 16, 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size 8 is more than the model's 4 attention heads"):
        kv_groups(config, 16, 8)


def test_family_names_are_unique() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.architectures)]
    assert len(names) == len(set(names)) and not set(names) & set(WITH_MORE)


def test_the_type_of_the_language_model_chooses_between_families() -> None:
    both = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": LLAMA | {"model_type": "mistral"}}
    both["text_config"]["num_key_value_heads"] = 4
    assert hf_model_config(both, {}).family.name == "mistral"
    scaling = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    text = LLAMA | {"model_type": "ministral3", "rope_parameters": scaling}
    found = hf_model_config(both | {"text_config": text}, {})
    assert found.family.name == "ministral3" and found.temperature is not None and found.temperature.every == 64


def test_a_language_model_inside_may_leave_the_usual_sizes_out() -> None:
    """As Llava 1.5 does."""
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064,
            "rms_norm_eps": 1e-5}
    config = hf_model_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": text}, {})
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.num_kv_heads) == (32, 4096, 11_008, 32)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (32_064, 4096, 1e-5)
    with pytest.raises(ModelError, match="num_hidden_layers is missing"):
        hf_model_config(text, {})


@pytest.mark.parametrize("inside", [
    lambda text: {"architectures": ["InternVLChatModel"], "llm_config": text},
    lambda text: {"architectures": ["Qwen2_5OmniModel"], "thinker_config": {"text_config": text}},
])
def test_a_language_model_is_found_where_its_config_lies(inside: Callable[[Any], dict[str, Any]]) -> None:
    text = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "eos_token_id": 7}
    config = hf_model_config(inside(text), {})
    assert config.family.name == "qwen2" and config.hidden_size == text["hidden_size"] and config.eos_token_ids == (7,)
    with pytest.raises(ModelError, match=r"the language model 'MambaForCausalLM' of \w+ is not supported \(a state-space model"):
        hf_model_config(inside(text | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}), {})


def test_positions_of_images_are_those_of_text() -> None:
    """Qwen2.5-VL rotates by three positions, which are the same one for text."""
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    raw = LLAMA | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    assert hf_model_config(raw | {"rope_scaling": scaling}, {}).ropes == hf_model_config(raw, {}).ropes


def test_no_torch() -> None:
    probe = "import sys, ridgeline.models.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_a_window_as_long_as_the_context_is_none() -> None:
    """Phi-4-mini says 262,144 of a context of 131,072: its layers see everything, and are computed like others that do."""
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert hf_model_config(mistral | {"sliding_window": 255}, {}).windows == (255, 255)
    for window in (256, 262_144):
        assert hf_model_config(mistral | {"sliding_window": window}, {}).windows == (None, None)

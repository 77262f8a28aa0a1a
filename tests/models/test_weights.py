"""Loading: files that are whole give the same model however they are stored; files that are not give one clear line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import import_path
from gguf_writer import write_gguf
from safetensors.torch import load_file, save_file
from tiny_configs import CHECKPOINTS, ORIGINAL_CONTEXT
from tiny_models import build_model, load, random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.errors import ModelError
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.rope import llama3_divisors
from ridgeline.models.weights import load_weights, open_checkpoint

TOKENS = random_tokens(24)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_checkpoint("llama", tmp_path / "llama")


def logits_of(path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return teacher_forced_logits(load(path, dtype), TOKENS, 20)


def rewrite(path: Path, **changes: Tensor | None) -> None:
    """Change tensors of a checkpoint (`__` stands for a dot); None removes one."""
    tensors = load_file(path / WEIGHTS)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path / WEIGHTS)


def change_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


# ---- whole checkpoints -----------------------------------------------------------------------------------------------


def test_sharded_files_are_the_same_model(llama: Path, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(tmp_path / "sharded"), logits_of(llama))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_parameter_is_filled(name: str, tmp_path: Path) -> None:
    path = save_checkpoint(name, tmp_path)
    config = load_model_config(path)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    seen = []
    load_weights(model, path, config, progress=lambda done, total: seen.append((done, total)))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters
    total = 4 * config.num_parameters
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_half_precision_files_are_converted(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    assert load_model_config(path).dtype == "bfloat16"
    model = load(path)
    stored = load_file(path / WEIGHTS)
    qkv = torch.cat([stored[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    linear = model.layers[1].attention.qkv
    assert torch.equal(linear.scheme.numbers(linear), qkv.float())


def test_known_surplus_tensors_are_ignored(llama: Path, tmp_path: Path) -> None:
    before = logits_of(llama)
    rewrite(llama, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))
    assert torch.equal(logits_of(llama), before)

    tied = save_checkpoint("smollm2", tmp_path / "tied")
    before = logits_of(tied)
    rewrite(tied, lm_head__weight=load_file(tied / WEIGHTS)["model.embed_tokens.weight"].clone())
    assert torch.equal(logits_of(tied), before)


@pytest.mark.parametrize(("name", "architecture"), [
    ("gemma3", "Gemma3ForConditionalGeneration"), ("llama4", "Llama4ForConditionalGeneration"),
    ("mistral", "Mistral3ForConditionalGeneration"), ("ministral3", "Mistral3ForConditionalGeneration"),
    ("qwen3", "Qwen3VLForConditionalGeneration"), ("llama", "LlavaForConditionalGeneration"),
    ("qwen3_moe", "Qwen3OmniMoeThinkerForConditionalGeneration"), ("cohere2", "AyaVisionForConditionalGeneration"),
    ("deepseek_v3", "KimiK25ForConditionalGeneration"), ("internlm2", "InternVLChatModel"),
])
def test_the_language_model_of_a_multimodal_checkpoint(name: str, architecture: str, tmp_path: Path) -> None:
    """Both orders of prefixes that such checkpoints have had; the vision tower is left in the file."""
    path = save_checkpoint(name, tmp_path / "text")
    before = logits_of(path)
    text = json.loads((path / "config.json").read_text())
    tensors = load_file(path / WEIGHTS)
    vision = {"vision_tower.encoder.weight": torch.ones(3), "multi_modal_projector.weight": torch.ones(3)}
    renamings = {
        "older": {name: f"language_model.{name}" for name in tensors},
        "newer": {name: name.replace("model.", "model.language_model.", 1) for name in tensors},
    }
    for style, renamed in renamings.items():
        both = tmp_path / style
        both.mkdir()
        prefix = "" if style == "older" else "model."
        save_file({renamed[name]: tensor for name, tensor in tensors.items()}
                  | {prefix + name: tensor for name, tensor in vision.items()}, both / WEIGHTS)
        (both / "config.json").write_text(json.dumps(
            {"architectures": [architecture], "text_config": text, "vision_config": {}}
        ))
        assert torch.equal(logits_of(both), before)


# ---- GGUF ------------------------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm", "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "model.final_layernorm": "output_norm", "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm",     # Falcon 40B's
}


def save_gguf(directory: Path, architecture: str, rope: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A checkpoint of transformers as the converter of llama.cpp writes it."""
    config = load_model_config(directory)
    metadata: dict[str, Any] = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in {
        "block_count": config.num_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon" if config.norm != "rms" else "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.ropes[-1].theta,
        "rope.dimension_count": config.ropes[0].dim,
        **{key: value for key, value in {
            "attention.sliding_window": max(window or 0 for window in config.windows),
            "attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.final_softcap,
        }.items() if value},
        **rope,
    }.items()} | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    read = load_file(directory / WEIGHTS)
    stored = dict(tensors)
    for name, tensor in read.items():
        module, _, parameter = name.rpartition(".")
        layer = ""
        if module.startswith(("model.layers.", "transformer.h.")):
            _, _, layer, module = module.split(".", 3)
            layer = f"blk.{layer}."
        target = GGUF_NAMES[module]
        if architecture in ("gemma2", "gemma3", "olmo2", "seed_oss", "exaone4") and module == "post_attention_layernorm":
            target = "post_attention_norm"
        if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and "norm" in module and parameter == "weight":
            tensor = tensor + 1
        if architecture == "gpt2" and len(tensor.shape) == 2 and layer:
            tensor = tensor.T.contiguous()
        if architecture in ("llama", "arcee", "granite", "smollm3", "mistral3") and target in ("attn_q", "attn_k"):
            # Rows of one head: first half, second half -> pairs.
            tensor = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        stored[f"{layer}{target}.{parameter}"] = tensor.numpy()
    return write_gguf(directory / "model.gguf", metadata, stored)


@pytest.mark.parametrize(("name", "architecture", "rope"), [
    ("llama", "llama", {}),
    ("llama-bias", "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
    ("smollm2", "llama", {}),
    ("qwen2.5-yarn", "qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                               "rope.scaling.original_context_length": ORIGINAL_CONTEXT}),
    ("qwen3", "qwen3", {}),
    ("phi3", "phi3", {}),
    ("phi3-long", "phi3", {"rope.scaling.type": "longrope"}),
    ("gemma2", "gemma2", {}),
    ("gemma3", "gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base_swa": 100.0}),
    ("olmo2", "olmo2", {}),
    ("arcee", "arcee", {}),
    ("starcoder2", "starcoder2", {}),
    ("nemotron", "nemotron", {}),
    ("gemma", "gemma", {}),
    ("smollm3", "smollm3", {}),
    ("seed_oss", "seed_oss", {}),
    ("ernie4_5", "ernie4_5", {}),
    ("granite", "granite", {"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 0.5}),
    ("cohere", "command-r", {"logit_scale": 0.8}),
    ("cohere2", "cohere2", {"logit_scale": 0.8}),
    ("hunyuan_v1_dense", "hunyuan-dense", {}),
    ("stablelm", "stablelm", {"use_parallel_residual": True}),
    ("stablelm-in-turn", "stablelm", {"use_parallel_residual": False}),
    ("stablelm-in-turn", "stablelm", {"use_parallel_residual": True}),       # converters write it for files of both kinds
    ("phi", "phi2", {}),
    ("gpt2", "gpt2", {}),
])
def test_gguf_is_the_same_model(name: str, architecture: str, rope: dict[str, Any], tmp_path: Path) -> None:
    # GGUF has no field for the scale of the scores, nor for yarn's two bounds: take what it implies.
    overrides: dict[str, Any] = {"query_pre_attn_scalar": 16} if name.startswith("gemma") else {}
    if "yarn" in name:
        overrides["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0,
                                        "original_max_position_embeddings": ORIGINAL_CONTEXT}
    if name == "arcee":
        overrides["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e3}
    if name == "smollm3":            # files do not list layers without a rope
        overrides |= {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}
    if name == "gemma3":             # the last layer must be a full one to give its theta
        overrides["num_hidden_layers"] = 6
    directory = save_checkpoint(name, tmp_path, **overrides)
    config = load_model_config(directory)
    tensors: dict[str, np.ndarray] = {}
    full = config.ropes[-1]
    if name == "llama":
        tensors["rope_freqs.weight"] = np.array(
            llama3_divisors(5e3, 12, 8.0, 1.0, 4.0, ORIGINAL_CONTEXT), np.float32)
    if name == "phi3-long":
        tensors["rope_factors_short.weight"] = np.array(full.divisors, np.float32)
        tensors["rope_factors_long.weight"] = np.array(full.long_divisors, np.float32)
        rope |= {"rope.scaling.attn_factor": full.scale, "rope.scaling.original_context_length": ORIGINAL_CONTEXT}
    path = save_gguf(directory, architecture, rope, tensors)
    read = load_model_config(path)
    assert (read.num_parameters, read.windows, read.tied) == (config.num_parameters, config.windows, config.tied)
    assert read.eos_token_ids == (2,)

    expected = logits_of(directory, torch.float64)
    noise = float((logits_of(directory) - expected).abs().max())
    # The file's numbers (rope divisors, epsilon, 1 + norm weight) are rounded to float32; the rest is exact.
    assert float((logits_of(path, torch.float64) - expected).abs().max()) <= 4 * noise
    assert float((logits_of(path) - expected).abs().max()) <= 4 * noise


def test_gguf_query_rows_are_put_in_order(tmp_path: Path) -> None:
    directory = save_checkpoint("smollm2", tmp_path)
    path = save_gguf(directory, "llama", {}, {})
    assert torch.equal(load(path).layers[2].attention.qkv.weight, load(directory).layers[2].attention.qkv.weight)


def test_gguf_missing_tensor(tmp_path: Path) -> None:
    directory = save_checkpoint("smollm2", tmp_path)
    rewrite(directory, model__layers__1__mlp__up_proj__weight=None)
    path = save_gguf(directory, "llama", {}, {})
    with pytest.raises(ModelError, match=r"lacks: blk\.1\.ffn_up\.weight$"):
        load(path)


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------


def test_missing_tensors_are_named(llama: Path) -> None:
    rewrite(llama, model__norm__weight=None)
    with pytest.raises(ModelError, match=r"^config\.json asks for tensors that the checkpoint lacks: model\.norm\.weight$"):
        load(llama)


def test_missing_head_is_named(llama: Path) -> None:
    rewrite(llama, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"lacks: lm_head\.weight\. Without a head"):
        load(llama)


def test_too_few_layers_are_named_in_part(llama: Path) -> None:
    change_config(llama, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"lacks: model\.layers\.3\..* and 14 more tensors$"):
        load(llama)


def test_unknown_tensors_are_named(llama: Path) -> None:
    rewrite(llama, model__layers__0__self_attn__q_proj__bias=torch.zeros(48), surprise=torch.zeros(1))
    with pytest.raises(ModelError, match=r"does not know: model\.layers\.0\.self_attn\.q_proj\.bias, surprise$"):
        load(llama)


def test_layers_beyond_the_config_are_named(llama: Path) -> None:
    change_config(llama, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"the model of config\.json does not know: model\.layers\.2\..* and 5 more tensors$"):
        load(llama)


def test_a_wrong_shape_is_named(llama: Path) -> None:
    change_config(llama, intermediate_size=96)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor model\.layers\.0\.mlp\.\w+\.weight has shape "
                                         r"\[\d+, \d+\], config\.json asks for \[\d+, \d+\]$"):
        load(llama)


def test_a_wrong_fused_shape_is_named(tmp_path: Path) -> None:
    path = save_checkpoint("phi3", tmp_path)
    change_config(path, num_key_value_heads=4)
    with pytest.raises(ModelError, match=r"qkv_proj\.weight has shape \[96, 48\], config\.json asks for \[144, 48\]$"):
        load(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(llama: Path, bad: float) -> None:
    up = load_file(llama / WEIGHTS)["model.layers.1.mlp.up_proj.weight"]
    up[7, 3] = bad
    rewrite(llama, model__layers__1__mlp__up_proj__weight=up)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight holds "
                                         r"values that are not finite in float32$"):
        load(llama)


def test_values_too_large_for_the_dtype_are_named(llama: Path) -> None:
    rewrite(llama, model__norm__weight=torch.full((48,), 1e6))
    load(llama)
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds values that are not finite in float16$"):
        load(llama, torch.float16)


@pytest.mark.reliability("S-10b")
@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_file_is_named(llama: Path, kept: int) -> None:
    content = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(content[:kept])
    with pytest.raises(ModelError, match=r"^model\.safetensors is damaged or not a safetensors file: .+") as caught:
        load(llama)
    assert "\n" not in str(caught.value)


def test_a_truncated_gguf_is_named(tmp_path: Path) -> None:
    path = save_gguf(save_checkpoint("smollm2", tmp_path), "llama", {}, {})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        load(path)


def test_integer_weights_are_refused(llama: Path) -> None:
    rewrite(llama, model__norm__weight=torch.ones(48, dtype=torch.int32))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight has dtype I32; supported: F64, F32, F16, BF16$"):
        load(llama)


def test_no_weights(llama: Path) -> None:
    (llama / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"has no weights: no model\.safetensors and no model\.safetensors\.index"):
        load(llama)
    (llama / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"found pytorch_model\.bin, which is not supported: save the model as safe"):
        load(llama)


@pytest.mark.reliability("S-10b")
def test_damaged_shards(tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / INDEX).read_text())

    content = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"{shards[1].name} is not there, but {INDEX} names it$"):
        load(tmp_path)
    os.mkfifo(shards[1])
    with pytest.raises(ModelError, match=rf"{shards[1].name} is no regular file$"):
        load(tmp_path)
    shards[1].unlink()
    shards[1].write_bytes(content)

    index["weight_map"]["ghost.weight"] = shards[0].name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"lists tensors that their files do not hold: ghost.weight \({shards[0].name}"):
        load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ModelError, match=r"weight_map must map tensor names to files$|surrogates not allowed$"):
        load(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ModelError, match=r"is not valid JSON"):
        load(tmp_path)

    del index["weight_map"]["ghost.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    twice = {**load_file(shards[0]), **dict(list(load_file(shards[1]).items())[:1])}
    save_file(twice, shards[0])
    with pytest.raises(ModelError, match=rf"^tensor \S+ is in both {shards[0].name} and {shards[1].name}$"):
        load(tmp_path)


def test_two_names_for_one_parameter(tmp_path: Path) -> None:
    path = save_checkpoint("gemma3", tmp_path)
    rewrite(path, language_model__model__norm__weight=torch.ones(48))
    with pytest.raises(ModelError, match=r"are the same parameter$"):
        load(path)


@pytest.mark.parametrize("count", ["99999999999", "9" * 17])
def test_the_count_in_a_files_name_is_not_counted_up_to(llama: Path, count: str) -> None:
    (llama / WEIGHTS).rename(llama / f"model-00001-of-{count}.safetensors")
    with pytest.raises(ModelError, match=f"lacks {int(count) - 1} of {count} weight files: the first is number 2$"):
        load(llama)


@pytest.mark.parametrize("name", ["a" * 5_000, "a\0b", "a\nb", "\ud800", 7, None, []])
def test_an_index_names_files_that_a_system_can_have(llama: Path, name: object) -> None:
    (llama / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match=r"weight_map must map tensor names to files$|surrogates not allowed$"):
        load(llama)


@pytest.mark.parametrize("dtype", [[], {}, ["F32"], None, 7, True, "F" * 5_000])
def test_a_dtype_that_is_none_is_told_in_one_line(llama: Path, dtype: object) -> None:
    data = (llama / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"]["dtype"] = dtype
    made = json.dumps(header).encode()
    (llama / WEIGHTS).write_bytes(len(made).to_bytes(8, "little") + made + data[8 + size :])
    with pytest.raises(ModelError, match=r"^model\.safetensors is damaged") as raised:
        load(llama)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_becomes_shorter_while_it_is_read_is_told(kind: str, llama: Path, tmp_path: Path) -> None:
    """To read a mapped file behind its end kills a process: SIGBUS."""
    file, path = llama / WEIGHTS, llama
    if kind == "gguf":
        tensors = {name: (np.zeros(shape, np.float32)) for name, shape in (("a", (4, 8)), ("b", (4, 8)))}
        file = path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    with open_checkpoint(path) as source:
        first, *_, last = source.tensors
        source.read(first, None)
        os.truncate(file, 64)
        with pytest.raises(ModelError, match=rf"^{file.name} had [\d,]+ bytes when it was opened, and has 64 now: it was"):
            source.read(last, None)


def test_an_index_cannot_leave_its_directory(llama: Path) -> None:
    (llama / INDEX).write_text(json.dumps({"weight_map": {"a": "../../outside.safetensors"}}))
    with pytest.raises(ModelError, match=r"outside\.safetensors is not there"):
        load(llama)


# ---- dummy weights and memory ----------------------------------------------------------------------------------------


def dummy(path: Path, seed: int = 0) -> Decoder:
    config = load_model_config(path)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
    load_weights(model, path, config, "dummy", seed=seed)
    return model


@pytest.mark.parametrize("name", ["llama-bias", "gemma3", "qwen3"])
def test_dummy_weights_need_only_a_config_and_keep_activations_sane(name: str, tmp_path: Path) -> None:
    path = save_checkpoint(name, tmp_path)
    (path / WEIGHTS).unlink()
    logits = teacher_forced_logits(dummy(path), TOKENS, 20)
    assert 0.2 < float(logits.std()) < 5
    assert torch.equal(teacher_forced_logits(dummy(path), TOKENS, 20), logits)
    assert not torch.equal(teacher_forced_logits(dummy(path, seed=1), TOKENS, 20), logits)
    assert all(float(numbers.std()) > 0 for numbers in dummy(path).numbers().values())


def test_unknown_load_format(llama: Path) -> None:
    config = load_model_config(llama)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
    with pytest.raises(ModelError, match=r"^load_format must be one of auto, dummy, got 'pickle'$"):
        load_weights(model, llama, config, "pickle")


MEASURE = """
import sys, torch
from pathlib import Path
from ridgeline.distributed.comm import Communicator
from ridgeline.models.model_config import load_model_config
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import load_weights

def resident():
    # Anonymous memory: pages of the mapped checkpoint are the file's, and given back when someone needs them.
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024

path = Path(sys.argv[1])
config = load_model_config(path)
torch.empty(1).normal_()
before, peak = resident(), 0

def watch(done, total):
    global peak
    peak = max(peak, resident())

model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
load_weights(model, path, config, progress=watch)
peak = max(peak, resident())
print((peak - before) / model.weight_bytes)
"""


@pytest.mark.parametrize("stored", ["safetensors", pytest.param("gguf", marks=pytest.mark.slow)])
def test_peak_memory_is_what_the_weights_occupy(stored: str, tmp_path: Path, run_script: Any) -> None:
    path = save_checkpoint("smollm2", tmp_path, hidden_size=576, intermediate_size=1536, num_hidden_layers=8, vocab_size=5000)
    if stored == "gguf":
        path = save_gguf(path, "llama", {}, {})
    program = tmp_path / "measure.py"
    program.write_text(MEASURE)
    result = run_script([sys.executable, str(program), str(path)], timeout=120, env=os.environ | {"PYTHONPATH": import_path()})
    assert result.returncode == 0, result.stderr[-3000:]
    assert 0.95 < float(result.stdout) < 1.15

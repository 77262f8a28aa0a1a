"""Checkpoints as they lie on hubs: other beginnings of names, masks among the weights, and what cannot be taken apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.errors import ModelError
from ridgeline.models.checkpoints.quantisation import safetensors_headers
from ridgeline.models.families.all_families import FAMILIES
from ridgeline.models.model_config import hf_model_config, load_model_config
from ridgeline.quantize.plain_model import PlainModel

TOKENS = random_tokens(8)


def logits(path: Path) -> torch.Tensor:
    return teacher_forced_logits(load(path, torch.float64), TOKENS, 6)


@pytest.mark.parametrize(("name", "beginning", "mask"), [
    ("gpt2", "transformer.", "h.{}.attn.bias"), ("gpt_neox", "gpt_neox.", "gpt_neox.layers.{}.attention.masked_bias"),
    ("codegen", "transformer.", "transformer.h.{}.attn.causal_mask"),
    ("gpt_neo", "transformer.", "transformer.h.{}.attn.attention.bias"),
    ("falcon", "transformer.", "transformer.h.{}.self_attention.rotary_emb.inv_freq"),
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
    ("llama-yarn", "InternLM3ForCausalLM", ()), ("llama", "XverseForCausalLM", ()), ("llama", "YiForCausalLM", ()),
    ("llama", "IQuestCoderForCausalLM", ()),
    ("qwen2.5-yarn", "MiMoForCausalLM", ("model.mtp_layers.0.input_proj.weight",)),
])
def test_other_names_of_a_family_are_known(name: str, architecture: str, further: tuple[str, ...], tmp_path: Path) -> None:
    path = save_checkpoint(name, tmp_path)
    expected, file = logits(path), path / "model.safetensors"
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture], "model_type": "other"}))
    save_file(load_file(file) | {key: torch.zeros(1, 1) for key in further}, file)
    assert torch.equal(logits(path), expected)


def test_text_does_not_go_through_the_adapters_of_a_model_that_sees(tmp_path: Path) -> None:
    """As Phi-4-multimodal lies on the hub: the matrices beside adapters for images and sound."""
    path = save_checkpoint("phi4_multimodal", tmp_path)
    expected, file = logits(path), path / "model.safetensors"
    tensors = {name.replace("_proj.weight", "_proj.base_layer.weight") if "model.layers." in name else name: tensor
               for name, tensor in load_file(file).items()}
    assert any("base_layer" in name for name in tensors)
    adapter = {f"model.layers.0.self_attn.o_proj.lora_{part}.vision.weight": torch.ones(2, 2) for part in "AB"}
    save_file(tensors | adapter, file)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}))
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


def split(path: Path, *files: str) -> None:
    """The weights of a checkpoint in several files."""
    whole = path / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    for place, file in enumerate(files):
        save_file({name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % len(files) == place},
                  path / file)


@pytest.mark.parametrize("files", [
    ("gptq_model-4bit-128g.safetensors",), ("model-00001-of-00001.safetensors",),
    ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
])
def test_files_without_an_index(files: tuple[str, ...], tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path)
    expected = logits(path)
    split(path, *files)
    save_file({"output.weight": torch.ones(2)}, path / "consolidated.safetensors")       # the same in its makers' own format
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(("files", "message"), [
    (("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"), "lacks 1 of 3 weight files: the first is number"),
    (("model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"), "lacks 1 of 2 weight files: the first is number"),
    (("a.safetensors", "b.safetensors"), "has 2 weight files and no model.safetensors.index.json"),
    (("consolidated.safetensors",), "consolidated.safetensors has its makers' own names"),
    (("adapter_model.safetensors",), "has no weights: no model.safetensors and no model.safetensors.index.json"),
])
def test_files_that_do_not_make_a_model(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path)
    split(path, *files)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_a_model_saved_without_the_class_of_its_head(tmp_path: Path) -> None:
    path = save_checkpoint("smollm2", tmp_path)
    expected, file = logits(path), path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("name", "architecture"), [("smollm2", "LlamaModel"), ("gpt2", "GPT2Model"), ("gemma3", "Gemma3TextModel")],
)
def test_a_class_without_a_head_is_served_if_its_embedding_is_the_head(name: str, architecture: str, tmp_path: Path) -> None:
    path = save_checkpoint(name, tmp_path)
    expected, config = logits(path), path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [architecture]}))
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(("architecture", "head", "message"), [
    ("MistralForCausalLM", {"score.weight": (1, 48)}, "lacks: lm_head.weight. Without a head of a language model it"),
    ("MistralForSequenceClassification", {"score.weight": (1, 48)}, r"not supported \(its head gives scores for whole texts"),
    ("Qwen2ForProcessRewardModel", {"score.0.weight": (1, 48)}, r"not supported \(its head gives rewards, not text\)"),
    ("UnknownForSequenceClassification", {"score.weight": (1, 48)}, "no family is declared for it"),
])
def test_another_head_than_a_language_models_is_named(
    architecture: str, head: dict[str, tuple[int, int]], message: str, tmp_path: Path,
) -> None:
    path = save_checkpoint("mistral", tmp_path)
    config, file = path / "config.json", path / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [architecture]}))
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("lm_head")}
    save_file(tensors | {name: torch.zeros(shape) for name, shape in head.items()}, file)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_a_config_that_does_not_say_whether_the_head_is_the_embedding(tmp_path: Path) -> None:
    """The files say it."""
    for name in ("smollm2", "llama"):
        path = save_checkpoint(name, tmp_path / name)
        expected = logits(path)
        raw = json.loads((path / "config.json").read_text())
        assert raw.pop("tie_word_embeddings") == (name == "smollm2")
        (path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(raw).encode())      # and an editor's mark at its start
        assert torch.equal(logits(path), expected)


def test_formats_of_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no config\.json: params\.json is its makers' own format"):
        load_model_config(tmp_path)


# ── inside another model, and without the first part of the names ────────────────────────────────────────────────────

WRAPPERS = {"language_model.": "LlavaNextForConditionalGeneration", "llm.": "InternVLChatModel"}
# Of families whose patterns take tensors apart, turn or leave them: a tiny checkpoint each.
WRAPPED = {
    "falcon": "falcon-11b", "gpt_neox": "gpt_neox", "codegen": "codegen", "internlm2": "internlm2", "gpt2": "gpt2",
    "gpt_oss": "gpt_oss", "granitemoe": "granitemoe", "glm4_moe": "glm4_moe", "qwen3_moe": "qwen3_moe",
    "ernie4_5_moe": "ernie4_5_moe",
}
LEFT = {"gpt_neox": "gpt_neox.layers.0.attention.masked_bias", "glm4_moe": "model.layers.{}.eh_proj.weight",
        "ernie4_5_moe": "model.mtp_linear_proj.0.weight"}


def renamed(path: Path, begins: str, begin: str) -> None:
    file = path / "model.safetensors"
    tensors = {begin + name.removeprefix(begins) if name.startswith(begins) else name: tensor
               for name, tensor in load_file(file).items()}
    save_file(tensors, file)


def test_every_family_that_reorders_is_tried_inside() -> None:
    turning = {family.name for family in FAMILIES if family.by_head or family.transposed}
    assert turning <= set(WRAPPED)


@pytest.mark.parametrize(("family", "prefix"), [*((family, "language_model.") for family in WRAPPED), ("internlm2", "llm.")])
def test_tensors_inside_another_model_are_regrouped(family: str, prefix: str, tmp_path: Path) -> None:
    path = save_checkpoint(WRAPPED[family], tmp_path)
    expected, file = logits(path), path / "model.safetensors"
    raw = json.loads((path / "config.json").read_text())
    if family in LEFT:
        unused = LEFT[family].format(raw["num_hidden_layers"])
        save_file(load_file(file) | {unused: torch.zeros(1, 1)}, file)
    renamed(path, "", prefix)
    (path / "config.json").write_text(json.dumps(
        {"architectures": [WRAPPERS[prefix]], "text_config": raw | {"model_type": family}, "vision_config": {}}))
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(("name", "begins", "begin"), [
    ("falcon", "", "language_model."), ("gpt_neox", "", "language_model."), ("codegen", "", "language_model."),
    ("gpt_oss", "model.", ""), ("granitemoe", "model.", ""),
])
def test_tensors_with_other_beginnings_are_regrouped(name: str, begins: str, begin: str, tmp_path: Path) -> None:
    path = save_checkpoint(name, tmp_path)
    expected = logits(path)
    renamed(path, begins, begin)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize("begin", ["", "language_model.model."])
def test_fused_experts_with_other_beginnings(begin: str, tmp_path: Path) -> None:
    path = save_checkpoint("qwen3_moe", tmp_path)
    expected, file = logits(path), path / "model.safetensors"
    tensors, fused = load_file(file), {}
    for experts in {name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        count = sum(name.startswith(experts) for name in tensors) // 3
        gate, up, down = (torch.stack([tensors.pop(f"{experts}.{expert}.{part}_proj.weight") for expert in range(count)])
                          for part in ("gate", "up", "down"))
        fused |= {f"{experts}.gate_up_proj": torch.cat((gate, up), 1), f"{experts}.down_proj": down}
    assert fused and not any(".experts." in name for name in tensors)
    save_file(tensors | fused, file)
    renamed(path, "model.", begin)
    assert torch.equal(logits(path), expected)
    with pytest.raises(ModelError, match="holds all experts of a layer, which this command cannot quantise yet"):
        PlainModel(path)


def test_metadata_may_be_null(tmp_path: Path) -> None:
    """The library reads it. All dtypes of such a file were unknown."""
    path = save_checkpoint("llama", tmp_path)
    found = safetensors_headers(path)
    data = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps({**json.loads(data[8 : 8 + size]), "__metadata__": None}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    load(path)
    assert safetensors_headers(path) == found and found


def test_a_pipe_among_the_weights_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it would wait for its writer."""
    path = save_checkpoint("llama", tmp_path)
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(path)
    monkeypatch.setattr(Path, "open", lambda *_arguments: pytest.fail("a pipe was opened"))
    assert safetensors_headers(path) == {}

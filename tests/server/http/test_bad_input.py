"""Bad input, a row each: one clear line that names the fault and what would work; other requests are not affected."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_writer import write_gguf
from safetensors.torch import load_file, save_file
from tiny_configs import VOCAB
from tiny_models import save_checkpoint

from ridgeline.engine.llm import LLM
from ridgeline.errors import BadRequest, ConfigError, ModelError, RidgelineError
from ridgeline.models import decoder
from ridgeline.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "num_gpu_blocks_override": 60, "block_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("bad_input"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, **OPTIONS)


def one_line(error: RidgelineError, *names: str) -> None:
    text = str(error)
    assert "\n" not in text and 10 < len(text) < 400, text
    for name in names:
        assert re.search(name, text), f"{name!r} is not in {text!r}"


# -- models ------------------------------------------------------------------------------------------------------------


def missing(path: Path) -> Path:
    return path / "nowhere"


def truncated_safetensors(path: Path) -> Path:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return path


def truncated_gguf(path: Path) -> Path:
    file = write_gguf(path / "cut.gguf", {"general.architecture": "llama"}, {"token_embd.weight": torch.ones(64, 32).numpy()})
    file.write_bytes(file.read_bytes()[:-4096])
    return file


def unknown_architecture(path: Path) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    return path


def wrong_shape(path: Path) -> Path:
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:, :-3].contiguous()}, file)
    return path


def missing_tensor(path: Path) -> Path:
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file)
    return path


def not_json(path: Path) -> Path:
    (path / "config.json").write_text("{")
    return path


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (missing, ["nowhere", "does not exist", r"config\.json"]),
        (truncated_safetensors, [r"model\.safetensors"]),
        (truncated_gguf, [r"cut\.gguf", r"token_embd\.weight", "bytes"]),
        (unknown_architecture, ["Mamba", "Llama", "Qwen3"]),
        (wrong_shape, [r"model\.layers\.1\.mlp\.down_proj\.weight", "80", "77"]),
        (missing_tensor, ["q_proj|qkv"]),
        (not_json, [r"config\.json", "JSON"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_model(
    spoil: Callable[[Path], Path], names: list[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "model")
    with pytest.raises(ModelError) as caught:
        LLM(spoil(Path(copy)), **OPTIONS)
    one_line(caught.value, *names)


# -- settings: found before anything is loaded --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_modle_len": 64}, ["max_modle_len", "max_model_len"]),
        ({"dtype": "int3"}, ["dtype", "float32"]),
        ({"block_size": 0}, ["block_size", "at least 1"]),
        ({"max_model_len": "long"}, ["max_model_len", "int"]),
        ({"max_model_len": 100_000}, ["max_model_len", "100000", "96"]),
        ({"num_gpu_blocks_override": 5, "max_model_len": 64}, ["max_model_len 64", "17", "largest .* is 16"]),
        ({"kv_cache_memory_bytes": 4096, "num_gpu_blocks_override": None}, ["KV blocks", "GiB"]),
        ({"kv_cache_memory_bytes": 4096}, ["num_gpu_blocks_override", "kv_cache_memory_bytes"]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, ["max_num_batched_tokens", "max_model_len"]),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size", "3"]),
        ({"device": "cuda"}, ["cuda", "cpu"]),
    ],
)
def test_setting(options: dict[str, Any], names: list[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was made before the setting was checked")

    monkeypatch.setattr(decoder.Decoder, "__init__", loaded)
    with pytest.raises(ConfigError) as caught:
        LLM(checkpoint, **OPTIONS | options)
    one_line(caught.value, *names)


# -- requests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "names"),
    [
        ([], {}, ["prompt", "empty"]),
        ({"prompt_token_ids": []}, {}, ["prompt", "empty"]),
        ([5] * 64, {}, ["64 tokens", "max_model_len"]),
        ([5, VOCAB], {}, ["prompt_token_ids", str(VOCAB), f"0 to {VOCAB - 1}"]),
        ([5, -1], {}, ["prompt_token_ids", "-1"]),
        (["a", "b"], {}, ["tokenizer"]),
        ({"prompts": "x"}, {}, ["prompt_token_ids", "prompts"]),
        ([5], {"max_tokens": 0}, ["max_tokens", "0"]),
        ([5], {"max_tokens": -3}, ["max_tokens", "-3"]),
        ([5], {"temperature": -0.1}, ["temperature", "-0.1"]),
        ([5], {"temperature": float("nan")}, ["temperature", "nan"]),
        ([5], {"top_p": -0.5}, ["top_p"]),
        ([5], {"n": 0}, ["n "]),
        ([5], {"stop_token_ids": [VOCAB]}, ["stop_token_ids", str(VOCAB)]),
        ([5], {"allowed_token_ids": [-2]}, ["allowed_token_ids", "-2"]),
        ([5], {"logit_bias": {VOCAB + 7: 1.0}}, ["logit_bias", str(VOCAB + 7)]),
        ([5], {"stop": ["x"]}, ["stop", "tokenizer"]),
    ],
)
def test_request(prompt: Any, params: dict[str, Any], names: list[str], llm: LLM) -> None:
    """The bad request fails alone: its neighbour, already running, answers as if it had never come."""
    good = [[9, 8, 7]]
    expected = llm.generate(good, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0].outputs[0].token_ids
    running, state = llm._processor.request(good[0], SamplingParams(temperature=0, max_tokens=6), "running")
    llm.core.add(running)
    first = llm.core.step()
    with pytest.raises(BadRequest) as caught:
        llm.generate(prompt if prompt == ["a", "b"] else [prompt], SamplingParams(**params), use_tqdm=False)
    one_line(caught.value, *names)
    for delta in first:
        state.take(delta)
    llm._drain({"running": state}, lambda done, total: None)
    assert state.output.outputs[0].token_ids == expected
    assert not llm.core.has_work
    llm.core.scheduler.manager.pool.check()


def test_one_bad_prompt_among_many_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(BadRequest):
        llm.generate([[1, 2], [3, VOCAB], [4]], SamplingParams(), use_tqdm=False)
    assert not llm.core.has_work

"""Where the sampling defaults of a model come from, and who overrides whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import write_gguf

from ridgeline import LLM
from ridgeline.config import EngineConfig
from ridgeline.engine.client.sampling_defaults import LLAMA_CPP, SamplingDefaults, load_sampling_defaults
from ridgeline.errors import ConfigError, ModelError


def defaults(model: Path, **options: Any) -> SamplingDefaults:
    return load_sampling_defaults(EngineConfig.of(**options).model, model)


def gguf(tmp_path: Path, **metadata: Any) -> Path:
    return write_gguf(tmp_path / "m.gguf", {f"general.{name}": value for name, value in metadata.items()}, {})


def test_a_directory_has_its_generation_config(tmp_path: Path) -> None:
    assert defaults(tmp_path) == SamplingDefaults({}, "none")
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "x": 1}))
    found = defaults(tmp_path)
    assert found.fields == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert str(found) == "temperature 0.6, top_k 20, max_tokens 9 (generation_config.json)"


def test_a_gguf_without_any_has_those_of_llama_cpp(tmp_path: Path) -> None:
    found = defaults(gguf(tmp_path, name="x"))
    assert found.fields == LLAMA_CPP == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert "llama.cpp's" in str(found)


def test_a_gguf_may_have_its_own(tmp_path: Path) -> None:
    found = defaults(gguf(tmp_path, **{"sampling.temp": 0.5, "sampling.penalty_repeat": 1.5}))
    assert found.fields == LLAMA_CPP | {"temperature": 0.5, "repetition_penalty": 1.5} and found.source == "the GGUF file"


def test_smollm2_has_those_of_its_card(tmp_path: Path) -> None:
    assert defaults(gguf(tmp_path, basename="SmolLM2")).fields == {"temperature": 0.2, "top_p": 0.9}


def test_neutral_as_in_vllm(tmp_path: Path) -> None:
    found = defaults(gguf(tmp_path, name="x"), generation_config="vllm")
    assert not found.fields and str(found) == "temperature 1.0 (--generation-config vllm)"


def test_another_directory_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.7}')
    model = gguf(tmp_path, name="x")
    found = defaults(model, generation_config=str(tmp_path), override_generation_config={"top_p": 0.5, "max_new_tokens": 4})
    assert found.fields == {"temperature": 0.6, "top_p": 0.5, "max_tokens": 4}


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"generation_config": "/nowhere"}, ConfigError, "must be auto, vllm, or a directory"),
        ({"override_generation_config": "hot"}, ConfigError, "must be a JSON object, got 'hot'"),
        ({"override_generation_config": "[1]"}, ConfigError, "must be a JSON object"),
        ({"override_generation_config": {"temprature": 1}}, ConfigError, "no field 'temprature'; it takes max_new_tokens"),
        ({"override_generation_config": {"temperature": -1}}, ConfigError, "override_generation_config: temperature must be"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], kind: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=says.replace("[", r"\[")):
        defaults(tmp_path, **options)


def test_a_wrong_value_in_a_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.gguf: temperature must be"):
        defaults(gguf(tmp_path, **{"sampling.temp": -3.0}))


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(("activations", "country", "capital", "fewest"), [
    ("int8", "Germany", "Berlin", 6),                    # the default, and the example that a server prints when it is ready
    ("float32", "France", "Paris", 3),
])
def test_the_embedded_model_knows_capitals(activations: str, country: str, capital: str, fewest: int) -> None:
    """Six seeds, no temperature given: at 1.0 none of them says Paris.

    The two best first tokens of that answer are nearly equal, so with int8 activations the order of additions decides, which
    differs between processors: float32 says it with 60 % of seeds."""
    llm = LLM(max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64, cpu_activations=activations)
    try:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p) == (0.2, 0.9)
        asked = [{"role": "user", "content": f"What is the capital of {country}?"}]
        each = [params.clone() for _ in range(6)]
        for seed, one in enumerate(each, 1):
            one.seed = seed
        answers = llm.chat([asked] * 6, each, use_tqdm=False)
        assert sum(capital in answer.outputs[0].text for answer in answers) >= fewest
    finally:
        llm.close()

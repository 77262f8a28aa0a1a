"""Options by name: what is taken, what is refused and in which words."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.config import EngineConfig, declared_options
from ridgeline.errors import ConfigError
from ridgeline.known_options.option_table import KNOWN
from ridgeline.process import embedded
from ridgeline.resolve import model_path
from ridgeline.server.options import ServerOptions

DECLARED = [declared for declared, _, _ in declared_options()]


def test_none_means_the_default_for_every_option() -> None:
    assert EngineConfig.of(**{declared.name: None for declared in DECLARED}) == EngineConfig()
    engine = {declared.name for declared in DECLARED}
    foreign = [name for name, known in KNOWN.items() if known.kind != "same" or known.says in engine]
    assert EngineConfig.of(**dict.fromkeys(foreign)) == EngineConfig()


def test_flat_options_come_back() -> None:
    given = {"max_model_len": 100, "block_size": 32, "enable_prefix_caching": False, "dtype": "bfloat16"}
    config = EngineConfig.of(**given)
    assert config.flat() == given and EngineConfig.of(**config.flat()) == config


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("auto", "auto"),
        (torch.bfloat16, "bfloat16"), (torch.float32, "float32"),
    ],
)
def test_spellings_of_dtype(given: Any, meant: str) -> None:
    assert EngineConfig.of(dtype=given).model.dtype == meant


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs_backend": "xgrammar"}, {"guided_decoding_backend": "xgrammar"},
        {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": False}},
        {"structured_outputs_config": '{"backend": "xgrammar"}'},
    ],
)
def test_spellings_of_the_grammar_library(given: dict[str, Any]) -> None:
    assert EngineConfig.of(**given).flat() == {"structured_outputs_backend": "xgrammar"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("xgrammar", "structured_outputs_config must be a JSON object"), ([1], "must be an object"),
        ({"disable_any_whitespace": True}, "structured_outputs_config.disable_any_whitespace is not supported"),
        ({"backend": "outlines"}, "structured_outputs_backend must be one of auto, guidance, llguidance, xgrammar"),
    ],
)
def test_what_the_grammar_library_cannot_be_told(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        EngineConfig.of(structured_outputs_config=given)


@pytest.mark.parametrize(
    ("given", "meant"), [("4k", 4000), ("4K", 4096), ("25.6k", 25600), (4096, 4096), ("4096", 4096), ("auto", None), (-1, None)]
)
def test_spellings_of_a_length(given: Any, meant: int | None) -> None:
    assert EngineConfig.of(max_model_len=given).model.max_model_len == meant


@pytest.mark.parametrize("given", ["1.5", "k", "", "4 k", "1.0001k", "infk"])
def test_what_is_no_length(given: str) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be of type int"):
        EngineConfig.of(max_model_len=given)


def test_overrides_may_be_a_dict() -> None:
    assert EngineConfig.of(override_generation_config={"top_p": 0.5}).flat() == {"override_generation_config": '{"top_p": 0.5}'}


def test_paths_may_be_paths() -> None:
    assert EngineConfig.of(model=Path("a"), tokenizer=Path("b/c")).flat() == {"model": "a", "tokenizer": "b/c"}


def test_a_model_whose_path_is_no_text_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine could not say which model it has, and no answer could name it."""
    monkeypatch.setattr(embedded, "require", lambda: tmp_path / "caf\udce9" / "m.gguf")
    with pytest.raises(ConfigError, match=r"model '.*caf\\udce9/m.gguf' is not text in this locale"):
        model_path(EngineConfig())


def test_a_name_has_one_meaning() -> None:
    own = {declared.name for declared, _, _ in declared_options()} | {each.name for each, _, _ in declared_options(ServerOptions)}
    assert not own & KNOWN.keys()


def test_options_of_vllm_that_ask_for_nothing_are_taken() -> None:
    for name, known in KNOWN.items():
        for value in known.neutral:
            assert EngineConfig.of(**{name: value}) == EngineConfig()
    assert EngineConfig.of(swap_space=4, disable_log_stats=True, compilation_config=3) == EngineConfig()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trust_remote_code": True}, "trust_remote_code=True .* runs code from model directories"),
        ({"quantization": 8}, "quantization must be of type str"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype .int3. is unknown; known: auto, fp8, int8"),
        ({"kv_cache_dtype": "k=int8,q=fp8"}, "kv_cache_dtype .k=int8,q=fp8. is not understood"),
        ({"revision": "main"}, "revision='main' .*ridgeline pull NAME --revision"),
        ({"download_dir": "/tmp"}, "download_dir='/tmp' .* local directory"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2 .* decode_context_parallel_size"),
        ({"enable_lora": True}, "enable_lora=True"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4"),
        ({"distributed_executor_backend": "external"}, "distributed_executor_backend must be one of mp, ray"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode='mistral'"),
        ({"tensor_parallel_sise": 2}, "unknown option 'tensor_parallel_sise'; did you mean 'tensor_parallel_size'"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization must be at least 0.01"),
        ({"block_size": True}, "block_size must be of type int"),
        ({"max_num_seqs": 10**20}, "max_num_seqs must be at most 4611686018427387904, got 100000000000000000000"),
        ({"model": 5}, "model must be of type str"),
        ({"model": Path("/m/caf\udce9")}, "model '/m/caf.*' is not text in this locale: set a UTF-8 one"),
        ({"dtype": torch.int8}, "dtype must be one of .*'int8'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_anything_else_is_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        EngineConfig.of(**options)
    assert "\n" not in str(caught.value)

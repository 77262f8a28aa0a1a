"""A mistake on the command line is told before torch is imported, an engine started or a weight read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.cli.config_options import OptionParser, add_model
from ridgeline.config import EngineConfig
from ridgeline.early_check import checked_model
from ridgeline.engine.client.processor import Processor
from ridgeline.errors import ConfigError
from ridgeline.runner.worker import device_facts

# Runs commands in one fresh interpreter in which no child process can be started.
COMMANDS = """
import io, json, subprocess, sys
from contextlib import redirect_stderr

def no_child(*args, **kwargs):
    raise AssertionError("a child process was started")

subprocess.Popen.__init__ = no_child
from ridgeline.__main__ import main
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with redirect_stderr(said):
        code = main(words)
    print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
"""


def test_mistakes_are_told_without_torch_and_without_an_engine(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model"))
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"prompt": "a"}\n')
    out, missing = str(tmp_path / "out.jsonl"), str(tmp_path / "missing")
    cases = [
        (["serve", model, "--port", "0", "--device", "cpu", "--max-model-len", "100000"], "the largest is"),
        (["serve", model, "--port", "0", "--device", "cpu", "--quantization", "int3"], "'int3' is not known"),
        (["serve", model, "--port", "0", "--speculative-config", "foo"], "unknown method 'foo'"),
        (["generate", missing, out, "--model", model], "No such file"),
        (["generate", str(asked), out, "--model", model, "--device", "cpu", "--quantization", "int3"], "'int3' is not known"),
        (["eval", model, "--reference", missing], "does not exist"),
        (["eval", model, "--reference", model, "--reference-set", "dtype=half-a-byte"], "must be one of"),
        (["eval", model, "--choices", missing], "cannot be read"),
        (["eval", model, "--slices", "poems"], "no slice 'poems'"),
        (["eval", model, "--save-reference", str(tmp_path)], "it is a directory"),
        (["eval", model, "--needle", "100000"], "this model's context"),
        (["eval", model, "--overlap", "512"], "must be from 0"),
        (["quantize", model, "--recipe", "fp8", "--out", str(tmp_path)], "exists already"),
        (["quantize", model, "--recipe", "fp8", "--out", missing, "--max-flips", "few"],
         "--max-flips must be a number of at least 0, such as 5%, got 'few'"),
        (["quantize", model, "--recipe", "int4-gptq", "--out", missing, "--calibration", missing], "cannot be read"),
        (["quantize", model, "--recipe", "fp8-static", "--out", missing, "--calibration-tokens", "512"],
         "--calibration-tokens must be at least 1024, got 512"),
        (["diagnose", missing], "does not exist"),
        (["diagnose", model, "--device", "cpu", "--input-len", "100000"], "the largest is"),
        (["diagnose", "--shape", "foo"], "unknown shape 'foo'"),
        (["bench", "soak", model, "--set", "foo=1"], "not an engine option"),
        (["bench", "ops", "--op", "matmul"], "invalid choice: 'matmul'"),
        (["bench", "ops", "--samples", "1"], "gives no median"),
        (["bench", "kernel", missing, "--op", "rms_norm"], "there is no file"),
        (["bench", "studies", missing], "does not exist"),
        (["bench", "studies", "--set", "foo=1"], "not an engine option"),
        (["bench", "studies", "--requests", "0"], "must be above 0"),
        (["bench", "loop", missing], "does not exist"),
        (["bench", "loop", model, "--shape", "llama-3.1-8b"], "leave MODEL out"),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([words for words, _ in cases])], capture_output=True, text=True, check=False
    )
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(told) == len(cases), ran.stderr
    for (words, reason), (code, said, with_torch) in zip(cases, told, strict=True):
        assert code == 2 and reason in said and said.count("\n") == 1 and not with_torch, (words, code, said, with_torch)
    assert not Path(out).exists()


def test_a_chat_template_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"chat_template is not valid \(line 1\)"):
        Processor.load(EngineConfig.of(model=str(path), chat_template="{{ messages[0]").model, path)
    with pytest.raises(ConfigError, match="nested too deeply"):
        Processor.load(EngineConfig.of(model=str(path), chat_template="{{" + "(" * 5000 + "1" + ")" * 5000 + "}}").model, path)


def test_what_only_a_gpu_knows_is_left_to_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_model(tmp_path))
    impossible = EngineConfig.of(model=path, kv_cache_memory_bytes=1, device="cuda")
    monkeypatch.setattr("ridgeline.early_check.has_driver", lambda: True)
    assert checked_model(impossible).num_layers == 2
    monkeypatch.setattr("ridgeline.early_check.has_driver", lambda: False)
    with pytest.raises(ConfigError, match="no NVIDIA driver was found"):
        checked_model(impossible)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        device_facts(impossible)
    with pytest.raises(ConfigError, match="KV"):
        checked_model(EngineConfig.of(model=path, kv_cache_memory_bytes=1))


def test_an_empty_model_is_no_missing_one(capsys: pytest.CaptureFixture[str]) -> None:
    """As of `ridgeline serve "$MODEL"` with a variable that is not set: it would be the embedded model without a word."""
    parser = OptionParser(prog="ridgeline serve")
    add_model(parser)
    assert parser.parse_args([]).model == "" and parser.parse_args(["a"]).model == "a"
    assert main(["serve", ""]) == 2 and "argument MODEL: it is empty" in capsys.readouterr().err

"""The study of a server under load (benchmarks/studies/serve): its loads, its tokenizer, and all of it with a tiny model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ridgeline.bench.load import serve_options, server_check
from ridgeline.bench.load.prompts import common_words
from ridgeline.bench.workload.shapes import SHAPES
from ridgeline.errors import ConfigError
from ridgeline.text.tokenizer import Tokenizer

FILE = Path(__file__).parents[3] / "benchmarks/studies/serve/run.py"
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 6000, "bos_token_id": 1000, "eos_token_id": 1009}


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_study", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_load_is_one_that_the_command_takes(study: ModuleType) -> None:
    """Options are checked as `bench serve` does it, before a GPU waits for them."""
    parser = argparse.ArgumentParser()
    serve_options.add_arguments(parser)
    loads = study.loads(1000, [16.0, 32.0], 12.0)
    plans = {load.name: serve_options.plan(parser.parse_args(["http://127.0.0.1:1", *load.words])) for load in loads}
    assert list(plans) == ["1000-first", "1000-second", "rate-16", "rate-32", "at-once", "closed"]
    assert [plan.count() for plan in plans.values()] == [1000, 1000, 192, 384, 1000, 128]
    assert plans["1000-first"].args.seed != plans["1000-second"].args.seed
    assert [setting.concurrency for setting in plans["closed"].settings] == [16, 64]
    assert loads[0].file("x") == "serve-x-1000-first.json" and loads[-1].file("x") == "serve-x.json"


def test_the_tokenizer_has_a_word_for_every_id(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "llama-3.1-8b", SHAPES["llama-3.1-8b"] | TINY)
    tokenizer = Tokenizer.load(study.write_model("llama-3.1-8b"))
    assert tokenizer.vocab_size == TINY["vocab_size"] and tokenizer.eos_token_id == TINY["eos_token_id"]
    words = common_words()
    assert len(tokenizer.encode(" " + " ".join(words))) == len(words)            # one token each
    texts = [tokenizer.token_bytes(token) for token in range(256, TINY["vocab_size"])]
    assert all(texts) and len(set(texts)) == len(texts)


def test_processor_time_is_told_by_front_end_and_engine(tmp_path: Path) -> None:
    ticks = 100 / server_check.os.sysconf("SC_CLK_TCK")

    def write(pid: int, parent: int, user: int, system: int) -> None:
        (tmp_path / f"{pid}").mkdir(exist_ok=True)
        (tmp_path / f"{pid}/status").write_text(f"Name: x\nPPid:\t{parent}\n")
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a (b) c) S {parent} {'0 ' * 9} {user} {system} 0 0")

    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text("head\n 0: 0100007F:1F40 00000000:0000 0A 0 0 0 0 0 777\n")
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        write(pid, parent, 5, 5)
    (tmp_path / "10/fd").mkdir()
    (tmp_path / "10/fd/3").symlink_to("socket:[777]")
    with server_check.ServerCheck(8000, tmp_path) as check:
        write(10, 1, 65, 45)
        write(11, 10, 25, 5)
        write(12, 11, 15, 5)
        write(20, 1, 500, 500)                               # not the server's
    found = check.figures(1000)
    assert found["front_end_cpu_us_per_token"] == pytest.approx(1000 * ticks)
    assert found["engine_cpu_us_per_token"] == pytest.approx(300 * ticks)
    assert found["front_end_cpu_share"] / found["engine_cpu_share"] == pytest.approx(100 / 30)
    assert "of a core, " in server_check.line(found) and check.figures(0).keys() < found.keys()
    with server_check.ServerCheck(None, tmp_path) as other:
        pass
    assert other.figures(1000) == {}


@pytest.mark.slow
def test_all_of_it_with_a_tiny_model(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way, as on a GPU: start-up, a record for each load, the table, and a server that is gone afterwards."""
    monkeypatch.setitem(SHAPES, "llama-3.1-8b", SHAPES["llama-3.1-8b"] | TINY)
    words = ["--requests", "2", "--rates", "20", "--rate-seconds", "0.1", "--only", "2-first", "rate-20", "closed"]
    assert study.main(["--directory", str(tmp_path), *words, "--", "--max-num-seqs", "4"]) == 0
    start = json.loads((tmp_path / "startup-served-llama-3.1-8b.json").read_text())
    assert 0 < start["figures"]["ready_s"] < start["figures"]["first_answer_s"]
    assert start["workload"]["options"][-2:] == ["--max-num-seqs", "4"]
    for name, points in (("-2-first", 1), ("-rate-20", 1), ("", 2)):
        made = json.loads((tmp_path / f"serve-llama-3.1-8b{name}.json").read_text())
        assert made["workload"]["model"] == "llama-3.1-8b" and made["workload"]["prompt_lengths_by"] == "server tokenizer"
        assert len(made["figures"]["points"]) == points
        for point in made["figures"]["points"]:
            found = point["figures"]
            assert found["completed"] == 2 and found["server"]["front_end_cpu_us_per_token"] > 0
            assert found["client"]["send_lag_ms"]["p99"] >= 0
    assert "closed, 64 users" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_left_out(study: ModuleType, tmp_path: Path) -> None:
    load = study.loads(2, [1.0], 1.0)[0]
    assert study.measure(load, "http://127.0.0.1:1", tmp_path / "x.json", 0.0) == study.LEFT_OUT
    with pytest.raises(SystemExit, match="no such load: never"):
        study.main(["--directory", str(tmp_path), "--only", "never"])


def test_the_address_may_be_given_as_vllm_does() -> None:
    parser = argparse.ArgumentParser()
    serve_options.add_arguments(parser)
    for words in (["http://127.0.0.1:1"], ["--base-url", "http://127.0.0.1:1"], ["--url", "http://127.0.0.1:1"]):
        assert serve_options.plan(parser.parse_args(words)).args.url == "http://127.0.0.1:1"
    assert serve_options.plan(parser.parse_args(["--host", "h", "--port", "9"])).args.url == "http://h:9"
    assert serve_options.plan(parser.parse_args(["--host", "h"])).args.url == "http://h:8000"
    for words in (["--percentile-metrics", "ttft,tpot"], ["--save-result"], ["--top-p=0.9"]):
        with pytest.raises(ConfigError, match=f"^{words[0].partition('=')[0]} is not an option here: "):
            parser.parse_args(["http://127.0.0.1:1", *words])
    with pytest.raises(ConfigError, match="and --host or --port are two addresses"):
        serve_options.plan(parser.parse_args(["http://127.0.0.1:1", "--port", "2"]))
    with pytest.raises(ConfigError, match="give the address of a server: ridgeline bench serve http"):
        serve_options.plan(parser.parse_args([]))
    with pytest.raises(ConfigError, match="are two addresses; give one"):
        serve_options.plan(parser.parse_args(["http://127.0.0.1:1", "--base-url", "http://127.0.0.1:2"]))

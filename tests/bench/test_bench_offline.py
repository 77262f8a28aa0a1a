"""`bench offline` on a tiny model: lists are gone through, figures have their spread, and what else was asked for is there."""

from __future__ import annotations

import csv
import ctypes
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.bench import offline
from ridgeline.bench.lab.machine_log import Watch
from ridgeline.bench.peers import first_tokens
from ridgeline.bench.peers.peer_llama_cpp import LlamaCppPeer
from ridgeline.bench.workload import workloads
from ridgeline.bench.workload.workloads import Preset
from ridgeline.errors import ConfigError

SIZES = ["--input-len", "12", "--output-len", "4", "--repeats", "2", "--load-format", "dummy"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offline, "read_bandwidth", lambda: 1e10)
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def test_every_combination_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write_model(tmp_path / "tiny"), tmp_path / "offline.json"
    lists = ["--requests", "1", "3", "--set", "max_num_seqs=2", "max_num_seqs=4", "num_gpu_blocks_override=200"]
    more = ["--price", "3.6", "--sustain", "0.001", "--format", "csv", "--out", str(out)]
    assert main(["bench", "offline", str(model), *lists, *SIZES, *more]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["workload"], row["max_num_seqs"]) for row in rows] == [
        ("1x12+4", "2"), ("3x12+4", "2"), ("1x12+4", "4"), ("3x12+4", "4"),
    ]
    made = json.loads(out.read_text())
    found = made["figures"]["3x12+4, max_num_seqs=4"]["ridgeline"]
    assert set(found["decode_tok_s"]) == {"median", "p10", "p90"}
    assert found["cost"]["usd_per_m_output_tokens"] == pytest.approx(1e6 * 0.001 / found["output_tok_s"]["median"])
    assert found["sustain"]["figures"]["output_tok_s"]["stretches"] >= 5 and "minutes" in found["sustain"]["verdict"]
    assert made["quality"] == "exact" and made["peak_memory"]["process_bytes"] > 0 and made["workload"]["warm_ups"] == 1


def test_a_row_says_that_power_binds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = {"samples": 9, "busy_power_w": 692.0, "power_limit_w": 700.0, "sm_clock_mean_mhz": 1275.0, "max_sm_clock_mhz": 1980.0,
           "limited_by": "power"}
    words = ["bench", "offline", str(write_model(tmp_path / "tiny")), "--requests", "1", *SIZES]
    for found, said in (({}, False), (log, True), (log | {"limited_by": ""}, False)):
        monkeypatch.setattr(Watch, "gpu", lambda self, *ranges, found=found: found)
        assert main(words) == 0
        assert ("power binds: 692 of 700 W, SM clock 1,275 of 1,980 MHz" in capsys.readouterr().out) == said


def test_presets_take_lists_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.GPU_PRESETS, "latency_b1", Preset("latency_b1", 1, 24, 6))
    model = write_model(tmp_path / "tiny")
    words = ["--preset", "latency_b1", "--load-format", "dummy", "--directory", str(tmp_path), "--price", "2"]
    lists = ["--set", "max_num_seqs=2", "max_num_seqs=4", "device=cpu"]
    assert main(["bench", "offline", str(model), *words, *lists, "--out", str(tmp_path / "x")]) == 2
    assert "--out holds one record" in capsys.readouterr().err
    assert main(["bench", "offline", str(model), *words, *lists, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    records = sorted(path.name for path in tmp_path.glob("offline-*.json"))
    assert len(rows) == 2 and records == [
        "offline-auto-max_num_seqs=2-device=cpu.json", "offline-auto-max_num_seqs=4-device=cpu.json",
    ]
    row = json.loads((tmp_path / records[0]).read_text())["figures"]["rows"]["latency_b1"]
    assert row["p10"]["decode_tok_s"] <= row["median"]["decode_tok_s"] <= row["p90"]["decode_tok_s"]
    assert row["cost"]["usd_per_m_all_tokens"] > 0 and row["watts"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "1"], "--repeats 1 gives no median"), (["--repeats", "0"], "--repeats 0 gives no median"),
        (["--requests", "0"], "must be above 0"), (["--requests", "1", "--workload", "latency"], "leave --workload out"),
        (["--shape", "qwen3-8b"], "needs a --preset"), (["--preset", "prefix", "--repeats", "1"], "gives no median"),
    ],
)
def test_what_gives_no_figure_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", *words]) == 2 and message in capsys.readouterr().err


class FakeLlama:
    """llama-cpp-python's interface, as far as the benchmark uses it: the next token is the last one plus one."""

    __version__ = "1.2.3"
    llama_log_callback = staticmethod(lambda function: function)

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int, int]]] = []
        self.sizes: list[tuple[int, int, int]] = []

    def llama_log_set(self, *_: Any) -> None: ...
    def llama_backend_init(self) -> None: ...
    def llama_memory_clear(self, *_: Any) -> None: ...
    def llama_model_default_params(self) -> Any: return SimpleNamespace()
    def llama_model_load_from_file(self, path: bytes, _: Any) -> bytes: return path
    def llama_model_get_vocab(self, model: bytes) -> bytes: return model
    def llama_vocab_n_tokens(self, _: bytes) -> int: return 16
    def llama_model_size(self, _: bytes) -> int: return 50
    def llama_model_n_params(self, _: bytes) -> int: return 100
    def llama_print_system_info(self) -> bytes: return b"AVX = 1"
    def llama_get_memory(self, context: Any) -> Any: return context
    def llama_context_default_params(self) -> Any: return SimpleNamespace(n_ubatch=512, type_k=1)

    def llama_init_from_model(self, model: bytes, parameters: Any) -> Any:
        self.sizes.append((parameters.n_ctx, parameters.n_seq_max, parameters.n_threads))
        return parameters

    def llama_batch_init(self, room: int, _: int, __: int) -> Any:
        kinds = {"token": ctypes.c_int32, "pos": ctypes.c_int32, "n_seq_id": ctypes.c_int32, "logits": ctypes.c_int8}
        fields = {name: ctypes.cast((kind * room)(), ctypes.POINTER(kind)) for name, kind in kinds.items()}
        return SimpleNamespace(**fields, seq_id=[[0] for _ in range(room)], n_tokens=0)

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.batch = batch
        self.steps.append([(batch.seq_id[i][0], batch.pos[i], batch.token[i]) for i in range(batch.n_tokens)])
        return 0

    def llama_get_logits_ith(self, context: Any, place: int) -> Any:
        assert self.batch.logits[place] and self.batch.n_seq_id[place] == 1
        logits = [0.0] * 16
        logits[self.batch.token[place] + 1] = 1.0
        return ctypes.cast((ctypes.c_float * 16)(*logits), ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_gets_a_sequence_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)  # type: ignore[arg-type]
    contender = LlamaCppPeer(Path("model.gguf"), threads=3)
    times = contender.run([[1, 2], [5, 6, 7]], 3)
    assert len(times) == 3 and times[0] == times[1] <= times[2]
    assert fake.steps == [
        [(0, 0, 1), (0, 1, 2), (1, 0, 5), (1, 1, 6), (1, 2, 7)], [(0, 2, 3), (1, 3, 8)], [(0, 3, 4), (1, 4, 9)],
    ]
    contender.run([[1, 2], [5, 6, 7]], 3)
    assert fake.sizes == [(512, 2, 3)]                   # one context, made before the clock starts
    assert contender.bytes_per_weight(1) == 0.5
    assert contender.facts() == {
        "llama-cpp-python": "1.2.3", "system_info": "AVX = 1", "threads": 3, "n_ubatch": 512, "type_k": 1,
    }


def test_what_llama_cpp_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs a \.gguf file"):
        LlamaCppPeer(tmp_path, threads=1)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        LlamaCppPeer(Path("model.gguf"), threads=1)


def test_starts_alternate_and_the_first_of_each_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(name: str, path: Path, threads: int) -> float:
        started.append(name)
        return 100.0 if len(started) <= 2 else 2.0 if name == "ridgeline" else 3.0

    monkeypatch.setattr(first_tokens, "_start", start)
    found = first_tokens.compare(Path("model.gguf"), 2, repeats=3)
    assert started == ["ridgeline", "llama.cpp"] * 4 and found["ratio"] == 1.5
    assert first_tokens.line(found) == "start to first token: ridgeline 2.00 s, llama.cpp 3.00 s"

"""`bench offline` on a tiny model: lists are gone through, figures have their spread, and what else was asked for is there."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.bench import offline
from ridgeline.bench.workload import workloads
from ridgeline.bench.workload.workloads import Preset

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

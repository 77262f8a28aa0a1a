"""`bench comm`: the line through measured times, and a record that `plan` reads as a link."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.__main__ import main
from ridgeline.bench import collectives
from ridgeline.bench.collectives import SIZES, check, default_sizes, explained, label, line, sent
from ridgeline.distributed.time_collectives import ONE_SHOT
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.plan.records import read_link
from ridgeline.sizes.hardware import Link


def test_the_line_is_found_again() -> None:
    sizes = [4.0**power for power in range(5, 13)]
    latency, bandwidth = line(sizes, [8e-6 + size / 3e9 for size in sizes])
    assert latency == pytest.approx(8e-6) and bandwidth == pytest.approx(3e9)


def test_no_latency_is_negative() -> None:
    """Times that grow faster than sizes: a cache that overflows."""
    latency, bandwidth = line([1e3, 1e6, 1e7], [1e-7, 1e-3, 2e-2])
    assert latency == 0.0 and bandwidth is not None and 0 < bandwidth < float("inf")


def test_times_that_do_not_grow_give_no_bandwidth(tmp_path: Path) -> None:
    """JSON has no infinity."""
    assert line([1e3, 1e6], [5e-3, 5e-3 - 1e-6])[1] is None
    path = tmp_path / "comm.json"
    path.write_text(json.dumps({"figures": {"all_reduce": {"latency_us": 5.0, "gigabytes_per_s": None}}}))
    with pytest.raises(ConfigError, match="larger --sizes"):
        read_link(str(path), "all_reduce")


def test_bytes_that_a_rank_sends() -> None:
    assert [sent(name, 800, 4) for name in ("all_reduce", "all_gather", "all_to_all", "broadcast", "send")] == [
        1200, 600, 600, 800, 800
    ]
    assert [label(size) for size in (512, 1024, 4 * 2**20)] == ["512 B", "1 KiB", "4 MiB"]


def test_two_ranks_are_measured_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "comm.json"
    main(["bench", "comm", "--sizes", "1024", "4096", "--repeats", "1", "--in-a-row", "1", "--out", str(path)])
    made = json.loads(path.read_text())
    assert set(made["figures"]) == {"all_reduce", "all_gather", "all_to_all", "broadcast", "send"}
    assert all(set(each["seconds"]) == {"1024", "4096"} for each in made["figures"].values())
    said = capsys.readouterr().out
    assert made["workload"]["ranks"] == 2 and "all_to_all" in said and "They say nothing about links between GPUs" in said
    assert said.startswith("2 ranks on the CPU, over gloo; each time is of one call") and "| bandwidth, GB/s |" in said
    made["figures"]["all_reduce"] |= {"latency_us": 50.0, "gigabytes_per_s": 2.0}
    del made["figures"]["send"]
    path.write_text(json.dumps(made))
    assert read_link(str(path), "all_reduce") == read_link(str(path), "send") == Link(2e9, 50e-6)
    main(["plan", "llama-3.1-8b", "--gpu", "H100", "--tp", "2", "--most", "2", "--json"])
    known = json.loads(capsys.readouterr().out)
    main(["plan", "llama-3.1-8b", "--gpu", "H100", "--tp", "2", "--most", "2", "--json", "--comm", str(path)])
    slower = json.loads(capsys.readouterr().out)
    assert known != slower


def test_what_is_not_measured_is_said() -> None:
    def notes(ranks: int, gpus: int, *found: str, bandwidth: float | None = 1.0) -> str:
        figures = {name: {"gigabytes_per_s": bandwidth} for name in ("all_reduce", *found)}
        return " ".join(explained(argparse.Namespace(ranks=ranks), figures, gpus)[1:])

    assert notes(2, 2, ONE_SHOT, "send") == ""
    assert notes(2, 1, "send").startswith("2 ranks share 1 GPU and talk through sockets")
    assert "Not measured: the one-shot all-reduce" in notes(2, 2, "send")
    assert "one-shot" not in notes(4, 0) and "(--ranks 2)" in notes(4, 0)
    assert notes(2, 2, ONE_SHOT, "send", bandwidth=None).startswith("No bandwidth")


@pytest.mark.parametrize(("words", "says"), [
    (["--ranks", "1"], "--ranks must be at least 2"), (["--sizes", "4096", "1001"], "multiples of 8, got \\[1001\\]"),
    (["--repeats", "0"], "--repeats must be at least 1, got 0"), (["--in-a-row", "0"], "--in-a-row must be at least 1, got 0"),
    (["--device", "cuda"], "--device cuda needs a GPU"),
])
def test_what_cannot_be_measured(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        raise SystemExit(main(["bench", "comm", *words]))
    assert says.replace("\\", "") in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8])
def test_default_sizes_can_be_divided_among_any_ranks(ranks: int) -> None:
    args = argparse.Namespace(ranks=ranks, repeats=1, in_a_row=1, device="cpu", sizes=default_sizes(ranks))
    check(args)
    assert all(size <= found < size + 4 * ranks for size, found in zip(SIZES, args.sizes, strict=True))
    assert ranks not in (2, 8) or args.sizes == SIZES


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it in vain."""
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, settings: str, stdout: Any) -> subprocess.Popen[bytes]:
        does = "raise SystemExit(7)" if json.loads(settings)["rank"] == 1 else "import time; time.sleep(600)"
        started.append(subprocess.Popen([sys.executable, "-c", does], stdout=stdout))
        return started[-1]

    monkeypatch.setattr(collectives, "start_child", start)
    with pytest.raises(EngineDead, match="rank 1 ended with code 7"):
        collectives.measured(argparse.Namespace(ranks=3, repeats=1, in_a_row=1, device="cpu", sizes=[24, 48]))
    assert all(child.returncode is not None for child in started)


def test_another_record_is_no_link(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"figures": {"tok_s": 3}}')
    with pytest.raises(ConfigError, match="no record of `ridgeline bench comm`"):
        read_link(str(path), "all_reduce")

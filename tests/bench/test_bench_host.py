"""`bench host`: what is measured without a model and without a GPU, and that rows are packed as the runner packs them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ridgeline.__main__ import main
from ridgeline.bench import host
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.bench.workload.host_engine import StepClock
from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.errors import ConfigError
from ridgeline.plan.fit import host_constants
from ridgeline.sizes.graph_shapes import Shape


def test_a_machine_without_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """As one is that has a GPU and nothing else: steps are measured, text is not."""
    monkeypatch.setattr(host.embedded, "find", lambda: None)
    out = tmp_path / "host.json"
    assert main(["bench", "host", "--running", "3", "--drafts", "4:2", "--steps", "100", "--out", str(out)]) == 0
    made = json.loads(out.read_text())
    drafted = {"drafts_4_by_0", "drafts_4_by_2"}
    assert set(made["figures"]) == {"running_3", *drafted, *host.ADMITTED} and made["workload"]["device"] in ("cpu", "cuda")
    assert all(made["figures"]["running_3"][name]["median"] > 0 for name in ("plan_ms", "pack_ms", "update_ms", "report_ms"))
    assert all(made["figures"][name]["plan_ms"]["median"] > 0 for name in host.ADMITTED)
    assert all(made["figures"][name]["steps"] == 100 and made["figures"][name]["host_ms"]["median"] > 0 for name in drafted)
    assert "text was not measured" in capsys.readouterr().out


@pytest.mark.slow                                        # it compares times: beside other tests chance decides
def test_what_is_cached_is_planned_sooner(tmp_path: Path) -> None:
    assert main(["bench", "host", "--running", "3", "--steps", "100", "--drafts", "--out", str(tmp_path / "host.json")]) == 0
    figures = json.loads((tmp_path / "host.json").read_text())["figures"]
    long, cached = (figures[name]["plan_ms"]["median"] for name in ("admitting_2048", "admitting_2048_cached"))
    assert long > cached > figures["admitting_64"]["plan_ms"]["median"] / 4 > 0


@pytest.mark.parametrize("words", [["--steps", "99"], ["--steps", "990"], ["--running", "0"]])
def test_too_few_steps_or_rows_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", *words]) == 2 and "--steps must be between 100 and 980" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["256", "0:1", "256:4", "512:1", "4:16", "a:1"])
def test_drafts_that_no_step_has_are_refused(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--drafts", said]) == 2 and f"got {said}" in capsys.readouterr().err


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_steps_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    """What the host does in a step, by call, is (on a quiet machine) all of it but the wait for the device; and the calls are
    the core's own again."""
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", SHAPES["llama-3.2-1b"] | TINY)
    monkeypatch.setattr(host.embedded, "find", lambda: None)
    out = tmp_path / "host.json"
    words = ["--shape", "llama-3.2-1b", "--running", "1", "3", "--drafts", "--steps", "100", "--out", str(out)]
    assert main(["bench", "host", *words]) == 0
    made = json.loads(out.read_text())
    assert made["workload"] | {"model": "llama-3.2-1b", "layers": 1, "running": [1, 3]} == made["workload"]
    for name in ("running_1", "running_3"):
        times = {part: value["median"] for part, value in made["figures"][name].items() if part != "steps"}
        calls = sum(times[f"{call}_ms"] for call in ("plan", "pack", "sample", "update", "record"))
        assert calls > 0 and 0 < times["host_ms"] <= times["step_ms"]
        assert not quiet or 0.5 * times["host_ms"] < calls < 1.2 * times["host_ms"]
        assert made["figures"][name]["steps"] == 100
    assert "1 running: " in capsys.readouterr().out
    if made["workload"]["device"] == "cpu":              # such steps compute on the host: they say nothing of a GPU's
        with pytest.raises(ConfigError, match="compute on the host"):
            host_constants(out)
    made["workload"]["device"] = "cuda"
    out.write_text(json.dumps(made))
    found = host_constants(out)
    assert found["host_s"] + 3 * found["host_row_s"] == pytest.approx(made["figures"]["running_3"]["host_ms"]["median"] / 1e3)


def test_the_clock_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(str(write_shape("llama-3.2-1b", **TINY)), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=2,
                    max_model_len=64, num_gpu_blocks_override=20)
    core = engine.core
    before = [dict(vars(owner)) for owner in (core, core.scheduler, core.executor, core.recorder)]
    clock = StepClock(engine, 2)
    with clock.watching():
        engine.serve([([5, 6, 7], 9)] * 2)
    assert clock.steps and all(step["host"] <= step["step"] for step in clock.steps)
    after = [vars(owner) for owner in (core, core.scheduler, core.executor, core.recorder)]
    assert [set(names) for names in before] == [set(names) for names in after]
    assert not any(isinstance(value, functools.partial) for names in after for value in names.values())
    engine.close()


def test_layers_want_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--layers", "2"]) == 2 and "--layers needs --shape" in capsys.readouterr().err


class Rows:
    """Notes what is asked of it; rows that decode again can be advanced."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def apply(self, plan: Any) -> None:
        pass

    def advance(self) -> object:
        self.asked.append("advance")
        return object()

    def pack(self, plan: Any, shape: Shape | None) -> None:
        self.asked.append(shape)


def test_rows_that_go_on_are_only_advanced() -> None:
    def plan(rows: list[int], tokens: list[int], added: tuple[int, ...] = ()) -> Any:
        counts = np.array(tokens)
        return SimpleNamespace(rows=np.array(rows), num_tokens=counts, want=np.ones(len(rows)), added=added,
                               total_tokens=int(counts.sum()))

    rows = Rows()
    packer = host._Packer(rows, Shape(2))  # type: ignore[arg-type]
    for made in (plan([0, 1], [9, 9], (0, 1)), plan([0, 1], [1, 1]), plan([0, 1], [1, 1]), plan([0], [1]), plan([0], [1], (0,))):
        packer.pack(made)
    assert rows.asked == [None, Shape(2), "advance", Shape(2), Shape(2)]

"""`bench host`: what is measured without a model and without a GPU, and that rows are packed as the runner packs them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ridgeline.__main__ import main
from ridgeline.bench import host
from ridgeline.graph_shapes import Shape


def test_a_machine_without_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """As one is that has a GPU and nothing else: steps are measured, text is not."""
    monkeypatch.setattr(host.embedded, "find", lambda: None)
    out = tmp_path / "host.json"
    assert main(["bench", "host", "--running", "3", "--steps", "100", "--out", str(out)]) == 0
    made = json.loads(out.read_text())
    assert set(made["figures"]) == {"running_3", *host.ADMITTED} and made["workload"]["device"] in ("cpu", "cuda")
    assert all(made["figures"]["running_3"][name]["median"] > 0 for name in ("plan_ms", "pack_ms", "update_ms", "report_ms"))
    assert all(made["figures"][name]["plan_ms"]["median"] > 0 for name in host.ADMITTED)
    assert "text was not measured" in capsys.readouterr().out


@pytest.mark.slow                                        # it compares times: beside other tests chance decides
def test_what_is_cached_is_planned_sooner(tmp_path: Path) -> None:
    assert main(["bench", "host", "--running", "3", "--steps", "100", "--out", str(tmp_path / "host.json")]) == 0
    figures = json.loads((tmp_path / "host.json").read_text())["figures"]
    long, cached = (figures[name]["plan_ms"]["median"] for name in ("admitting_2048", "admitting_2048_cached"))
    assert long > cached > figures["admitting_64"]["plan_ms"]["median"] / 4 > 0


@pytest.mark.parametrize("words", [["--steps", "99"], ["--steps", "990"], ["--running", "0"]])
def test_too_few_steps_or_rows_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", *words]) == 2 and "--steps must be between 100 and 980" in capsys.readouterr().err


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
                               total_tokens=int(counts.sum()))  # fmt: skip

    rows = Rows()
    packer = host._Packer(rows, Shape(2))  # type: ignore[arg-type]
    for made in (plan([0, 1], [9, 9], (0, 1)), plan([0, 1], [1, 1]), plan([0, 1], [1, 1]), plan([0], [1]), plan([0], [1], (0,))):
        packer.pack(made)
    assert rows.asked == [None, Shape(2), "advance", Shape(2), Shape(2)]

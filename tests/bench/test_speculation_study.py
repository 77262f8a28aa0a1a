"""The studies of speculation (benchmarks/studies/speculation). run.py: its cells, their order, and that it goes on; real_text.py:
its requests, figures and time limit."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ridgeline.bench.workload.shapes import SHAPES

FOLDER = Path(__file__).parents[2] / "benchmarks/studies/speculation"
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"speculation_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return loaded("run")


@pytest.fixture(scope="module")
def real_text() -> ModuleType:
    return loaded("real_text")


def asked(**given: Any) -> Namespace:
    return Namespace(**dict.fromkeys(("batch", "alpha", "context", "width", "cells")) | given)


def test_what_says_most_comes_first(study: ModuleType) -> None:
    keys = study.wanted(asked())
    assert keys[:2] == [study.Key(64, 640, 0.8, "auto"), study.Key(64, 640, 0.8, "3")]
    assert [key.context for key in keys] == sorted(key.context for key in keys) and len(keys) == len(set(keys))
    cells = {(key.batch, key.context, key.alpha) for key in keys if key.width == "auto"}
    assert cells == {(batch, context, alpha) for batch in study.BATCHES for context in (640, 8192) for alpha in study.ALPHAS}
    fixed = {(key.batch, key.context, key.alpha) for key in keys if key.width != "auto"}
    assert fixed == {cell for cell in cells if cell[2] > 0}


def test_what_is_named_is_measured_and_nothing_that_no_step_has(study: ModuleType) -> None:
    keys = study.wanted(asked(batch=[64, 256], alpha=[0.5], context=[100], width=[1, 3, 9]))
    assert [(key.batch, key.width) for key in keys] == [(64, "1"), (64, "3"), (64, "auto"), (256, "1"), (256, "auto")]
    keys = study.wanted(asked(cells=["8:11", "8:auto"], alpha=[0.8], context=[640]))
    assert keys == [study.Key(8, 640, 0.8, "11"), study.Key(8, 640, 0.8, "auto")]


def test_the_controller_is_judged_by_the_best_width_beside_it(study: ModuleType) -> None:
    def row(width: str, speedup: float, alpha: float = 0.8) -> dict[str, Any]:
        return {"batch": 64, "context": 640, "alpha": alpha, "width": width, "speedup": speedup}

    cells = [row("auto", 1.71), row("3", 1.92), row("1", 1.5), row("auto", 0.99, 0.0), row("auto", 0.97, 0.3), row("1", 0.9, 0.3)]
    judged = study.controller(cells)
    assert [each["holds"] for each in judged] == [False, True, False]
    assert judged[0]["of_best"] == pytest.approx(1.71 / 1.92) and judged[1]["of_best"] is None
    assert judged[2]["of_best"] == pytest.approx(0.97)           # off is a width, too


def test_it_ends_in_time_goes_on_and_refuses_other_records(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", SHAPES["llama-3.2-1b"] | TINY)
    out = tmp_path / "cells.json"

    def run(*words: str) -> list[dict[str, Any]]:
        words = ("--shape", "llama-3.2-1b", "--alpha", "0.8", "--context", "24", "--output", "8", "--pairs", "1", *words)
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), *words])
        study.main()
        return list(json.loads(out.read_text())["figures"]["cells"]) if out.exists() else []

    assert run("--cells", "2:1", "--seconds", "0") == []
    first = run("--cells", "2:1")
    assert [(cell["batch"], cell["width"], cell["pairs"]) for cell in first] == [(2, "1", 1)] and first[0]["agreement"] > 0
    both = run("--cells", "2:1", "2:auto")
    assert both[0] == first[0] and both[1]["width"] == "auto"    # the first was not measured again
    judged = json.loads(out.read_text())["figures"]["controller"]
    assert len(judged) == 1 and judged[0]["of_best"] > 0
    assert run("--cells", "2:1") == both and "all cells are in" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="another workload"):
        run("--cells", "2:1", "--output", "9")


@pytest.mark.parametrize("part", ["ops", pytest.param("", marks=pytest.mark.slow)], ids=["of one folder", "of the package"])
def test_every_request_of_a_case_is_another_one(part: str, real_text: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_text, "PACKAGE", real_text.PACKAGE / part)
    found = real_text.pieces()
    monkeypatch.setattr(real_text, "pieces", lambda: found)                  # parsed once
    for case in real_text.cases(160, True):
        asks = [case.ask(number) for number in range(72)]
        assert len({ask.content for ask in asks}) == len(asks), case.name
        assert ("edit" in case.name) == bool(asks[0].earlier)
    edit = real_text.cases(160, False)[0].ask(3)
    code = edit.params.prediction.removeprefix("```python\n").removesuffix("\n```")
    assert code in edit.content and code in edit.earlier and real_text.NEW_NAME not in code      # the piece as it was


def test_a_piece_of_code_has_a_name_that_occurs_often(real_text: ModuleType) -> None:
    body = "\n".join(f"    total = total + {number}" for number in range(16))
    short = "def g(total):\n    return total + total + total\n"
    assert list(real_text._pieces(f"def f(total):\n{body}\n\n\n{short}")) == [(f"def f(total):\n{body}", "total")]


def test_figures_are_ratios_of_neighbours(real_text: ModuleType) -> None:
    def block(each: float, answers: list[list[int]]) -> Any:
        return real_text.Block(each, each, 2 * each, answers, 16)

    case = SimpleNamespace(name="case", proposers=("ngram",))
    pairs = [{False: block(0.2, [[1, 2, 3, 4]]), True: block(0.1, [[1, 2, 3, 4]])},
             {False: block(0.9, [[1, 2, 3, 4]]), True: block(0.3, [[1, 2, 9]])}]
    found = real_text._figures(case, 1, pairs)
    assert found["ratios"] == pytest.approx([2.0, 3.0]) and found["speed"] == pytest.approx(2.5)
    assert found["equal"] == 6 / 8 and found["cached_on"] == found["cached_off"] == 32
    row = found | {"drafts": 5, "accepted": 4}
    assert "2.50x" in real_text.table([row]) and "case" in real_text.table([row])


def test_no_block_begins_that_would_end_too_late(real_text: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(real_text.time, "monotonic", lambda: now)
    made = real_text.Study.__new__(real_text.Study)
    made._end, made._longest = 110.0, 4.0
    assert not made._too_late(2) and made._too_late(3)

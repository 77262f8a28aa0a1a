"""The studies of speculation (benchmarks/studies/speculation). run.py: its cells, their order, and that it goes on; real_text.py:
its requests, figures and time limit; block_parts.py: where it says the time of a block goes."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
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


@pytest.fixture(scope="module")
def block_parts() -> ModuleType:
    sys.path.insert(0, str(FOLDER))                      # as of a script that is run: it imports its neighbour
    try:
        return loaded("block_parts")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def host_of_text() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return loaded("host_of_text")
    finally:
        sys.path.remove(str(FOLDER))


def asked(**given: Any) -> Namespace:
    return Namespace(**dict.fromkeys(("batch", "alpha", "context", "width", "cells")) | given)


def test_what_says_most_comes_first(study: ModuleType) -> None:
    keys = study.wanted(asked())
    assert keys[:2] == [study.Key(256, 640, 0.3, "auto"), study.Key(256, 640, 0.3, "1")]
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


def test_rounds_end_early_only_where_the_controller_holds_both_bars_in_all_of_them(study: ModuleType) -> None:
    def blocks(*seconds: float) -> list[Any]:
        return [study.Block({}, seconds=each, tokens=1) for each in seconds]

    off = blocks(1.0, 1.0)
    assert study._clear(off, {"auto": blocks(0.50, 0.50), "3": blocks(0.49, 0.49), "1": blocks(0.4, 2.0)})
    assert not study._clear(off, {"auto": blocks(0.50, 0.52), "3": blocks(0.49, 0.49)})       # 0.94 of the best
    assert not study._clear(off, {"auto": blocks(1.00, 1.03), "1": blocks(1.20, 1.20)})       # 0.97 of off
    assert study._clear(off, {"3": blocks(1.2, 1.2)})


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


@pytest.mark.parametrize(("kind", "tokens", "width"), [
    ("decode", [1, 1], None), ("prompts", [9, 5], None), ("mixed", [1, 5], None), ("drafts", [1, 4], [0, 3]),
    ("drafts+prompts", [4, 9], [3, 0]), ("decode", [1, 1], [0, 0]),
])
def test_the_kind_of_a_step(kind: str, tokens: list[int], width: list[int] | None, block_parts: ModuleType) -> None:
    plan = SimpleNamespace(num_tokens=np.array(tokens), width=None if width is None else np.array(width))
    assert block_parts.kind_of(plan) == kind


def test_parts_of_a_block_are_exclusive_and_sum_to_its_time(block_parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(block_parts.time, "perf_counter", lambda: now)
    watch = block_parts.Stopwatch(False)
    plan = SimpleNamespace(num_tokens=np.array([1, 4]), width=np.array([0, 3]), rows=np.arange(2), total_tokens=5)
    result = SimpleNamespace(num_new=np.array([1, 3]), replayed=True, typical=True, rejected=1)
    pack, run = watch.timed("pack", lambda: spend(2)), watch.marked("forward", lambda: spend(4))
    collect = watch.collected(lambda: watch.timed("wait", lambda: spend(16))() or result)

    def submit(_: object) -> None:
        spend(1)
        pack()
        run()
        spend(1)

    spend(8)
    watch.submitted(submit)(plan)
    assert collect() is result
    spend(32)
    watch.close(block_parts.Step("end"))
    found = block_parts.summed(watch.steps)
    assert found["begin"]["parts_ms"] == {"front end": 8e3} and found["end"]["parts_ms"] == {"front end": 32e3}
    assert found["drafts"]["parts_ms"] == {"pack": 2e3, "forward": 4e3, "submit": 2e3, "wait": 16e3}
    assert found["seconds"] == now == 64 and found["drafts"]["ms"] == 24e3 and found["drafts"]["busy_ms"] == 4e3
    assert [found["drafts"][name] for name in ("drafts", "accepted", "said", "graphs")] == [3, 2, 4, 1]
    assert found["drafts"]["launch_ms"] == 4e3
    assert "drafts" in block_parts.page("edit", found) and "pack 2000.00" in block_parts.page("edit", found)


def test_a_launch_counts_for_the_kind_of_its_own_step(block_parts: ModuleType) -> None:
    """With overlap it lies in the interval of the step before: a capture beside a prompt looked like one with drafts."""
    now = [0.0]
    watch = block_parts.Stopwatch(False, lambda: now[0])
    result = SimpleNamespace(num_new=np.array([1, 1]), replayed=True, typical=True, rejected=0)

    def step(tokens: list[int], width: list[int] | None, seconds: float) -> None:
        def run() -> None:
            now[0] += seconds

        drafts, launched = None if width is None else np.array(width), watch.marked("forward", run)
        plan = SimpleNamespace(num_tokens=np.array(tokens), width=drafts, rows=np.arange(2), total_tokens=sum(tokens))
        watch.submitted(lambda _: launched())(plan)

    step([1, 4], [0, 3], 1.0)
    step([1, 30], None, 25.0)
    collect = watch.collected(lambda: result)
    collect()
    collect()
    watch.close(block_parts.Step("end"))
    found = block_parts.summed(watch.steps)
    assert found["drafts"]["parts_ms"]["forward"] == 26e3 and "forward" not in found["mixed"]["parts_ms"]
    assert (found["drafts"]["launch_ms"], found["mixed"]["launch_ms"]) == (1e3, 25e3)


def test_what_was_watched_is_as_it_was_before(block_parts: ModuleType) -> None:
    class Owner:
        def step(self) -> int:
            return 1

    owner = Owner()
    owner.step = own = lambda: 2                                             # type: ignore[method-assign]
    block_parts._put_back(owner, "step", own)
    assert owner.step() == 2
    block_parts._put_back(owner, "step", None)
    assert owner.step() == 1


def test_the_stand_in_says_what_was_asked_for(host_of_text: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real_text = host_of_text.real_text
    monkeypatch.setattr(real_text, "PACKAGE", real_text.PACKAGE / "scheduler")
    made = {case.name: case.ask(3) for case in real_text.cases(160, False)}
    edit = made["edit, prediction"]
    name, code = edit.content.split("`")[1], edit.params.prediction
    assert host_of_text.answer_to(edit, False) == code.replace(name, real_text.NEW_NAME) != code
    assert host_of_text.answer_to(edit, True).replace("# checked\n", "") == code
    products = json.loads(host_of_text.answer_to(made["JSON schema"], False))["products"]
    assert len(products) == 4 and all(each["category"] in ("electronics", "furniture", "clothing") for each in products)
    assert all(list(each) == list(real_text.PRODUCT["properties"]) for each in products)
    assert "class Account3" in host_of_text.answer_to(made["copied code"], False)
    assert host_of_text.answer_to(made["free text"], False)

"""The study of a long prompt beside decodes: gaps fall into the right phase, and cutting the prompt makes them shorter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.bench.workload import long_prompt
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.bench.workload.long_prompt import SERVED, WHOLE, Sizes, Timed

TINY = Sizes(decodes=3, tokens_in=8, prompt=400, before=5, after=3)


def test_a_gap_belongs_to_the_prompt_when_it_overlaps_it() -> None:
    timed = Timed([[0.0, 1.0, 2.0, 3.5, 5.0, 6.0]], full=1.0, handed_in=2.5, first_token=5.0, steps=2)
    assert timed.gaps() == {"before": [1.0], "during": [1.5, 1.5], "after": [1.0]}       # the first came before all decoded
    found = long_prompt.summary([timed, timed])
    assert found["gap_ms"]["during"] == {"p50": 1500.0, "p99": 1500.0, "max": 1500.0, "tokens": 4}
    assert found["first_token_s"] == [2.5, 2.5] and found["longest_gap_ms"] == [1500.0, 1500.0]


def test_everybody_decodes_in_every_step_of_a_run(tmp_path: Path) -> None:
    engine = Engine(
        str(write_model(tmp_path / "tiny")), load_format="dummy", device="cpu", max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=512,
    )
    timed = long_prompt.run(engine, TINY, seed=1)
    assert not engine.core.has_work
    gaps = timed.gaps()
    assert len(gaps["before"]) == 3 * TINY.before and len(gaps["after"]) == 3 * TINY.after
    assert timed.steps == 7 and len(gaps["during"]) == 3 * timed.steps                   # 61 tokens of the prompt a step


@pytest.mark.slow                     # on every commit the two above: a run's steps and phases, and what is made of its times
def test_the_study_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step time that leaves room for the least only: more steps, each shorter."""
    model, out = write_model(tmp_path / "tiny"), tmp_path / "long-prompt.json"
    options = ["load_format=dummy", "device=cpu", "max_num_batched_tokens=512", "step_time_ms=0.001"]
    words = ["--study", "long-prompt", "--prompt", "500", "--decodes", "2", "--set", *options, "--out", str(out)]
    assert main(["bench", "studies", str(model), *words]) == 0
    made = json.loads(out.read_text())
    found = made["figures"]["long-prompt"]
    assert made["benchmark"] == "studies" and made["commit"] is not None
    assert found[SERVED]["step_time_ms"] == pytest.approx(0.001) and found[WHOLE]["step_time_ms"] == 0
    assert min(found[SERVED]["steps_of_the_prompt"]) == 16 and set(found[WHOLE]["steps_of_the_prompt"]) == {1}
    for mode in (SERVED, WHOLE):
        gaps = found[mode]["gap_ms"]
        assert all(0 < gaps[phase]["p50"] <= gaps[phase]["p99"] <= gaps[phase]["max"] for phase in long_prompt.PHASES)
        assert found[mode]["first_token_alone_s"] > 0
    assert "whole_budget" in capsys.readouterr().out

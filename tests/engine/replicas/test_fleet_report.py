"""What several engines cost against one, and which of them is slow although it answers."""

from __future__ import annotations

import pytest

from ridgeline.engine.replicas.fleet_report import FleetRow, report
from ridgeline.engine.replicas.learned_times import LearnedTimes


def row(name: str, tokens_s: float | None = None, state: str = "ok") -> FleetRow:
    return FleetRow(name, state, 2, 0, tokens_s, 0.5, 0.9, 0.1, None, None)


def times(step: float, token: float = 0.001, answers: int = 5) -> LearnedTimes:
    found = LearnedTimes()
    for number in range(answers):
        found.decode.observe(1 + number % 2, step)
        found.prefill.observe(100 + number, token * (100 + number))
    return found


def test_the_scaling_tax_is_what_is_missing_to_as_many_of_the_best() -> None:
    made = report("engines", "predicted", [row("a", 100.0), row("b", 80.0), row("c", None)], [times(0.01)] * 3)
    assert (made.tokens_s, made.best_tokens_s) == (180.0, 100.0) and made.scaling_tax == pytest.approx(0.1)
    assert report("engines", "", [row("a", 100.0)], [times(0.01)]).scaling_tax is None


def test_slow_engines_are_named_by_how_slow_they_are() -> None:
    rows = [row(name) for name in "abcd"]
    made = report("engines", "predicted", rows, [times(0.01), times(0.011), times(0.014), times(0.05)])
    assert [each.verdict for each in made.rows] == ["", "", "straggler", "gray failure"]
    assert made.rows[3].slowness == pytest.approx(0.05 / 0.011, rel=0.01)
    assert len(made.notes) == 2 and made.notes[1].startswith("d is 4.5 times as slow")


def test_slow_prompts_count_too_and_two_engines_suffice() -> None:
    made = report("servers", "predicted", [row("a"), row("b")], [times(0.01), times(0.01, token=0.003)])
    assert [each.verdict for each in made.rows] == ["", "gray failure"]


def test_few_answers_say_nothing_and_a_lost_engine_is_no_gray_failure() -> None:
    few = report("engines", "predicted", [row("a"), row("b")], [times(0.01), times(0.05, answers=2)])
    assert [each.slowness for each in few.rows] == [None, None]
    lost = report("engines", "predicted", [row("a"), row("b", state="stalled")], [times(0.01), times(0.05)])
    assert lost.rows[1].verdict == "straggler" and lost.notes == ["b gets no requests: stalled"]

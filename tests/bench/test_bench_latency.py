"""The arithmetic of the load generator: percentiles, goodput and rates are exact, by numbers that can be counted by hand."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.bench.load import client_check, latency
from ridgeline.bench.load.latency import Outcome, Slo, parse_slo
from ridgeline.bench.load.target import Answer
from ridgeline.errors import ConfigError
from ridgeline.report.plots import axis, distribution


def answered(intended: float, sent: float, first: float, gap: float = 0.01, tokens: int = 5) -> Outcome:
    """Sent so long after it was intended, first token so long after that; all times in seconds."""
    events = [intended + sent + first + number * gap for number in range(tokens)]
    return Outcome(
        intended, due=intended, sent=intended + sent, ended=events[-1] + 0.001, events=array("d", events), tokens_in=7,
        tokens_out=tokens,
    )


def test_percentiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).lognormal(size=357)
    found = latency.spread(values.tolist())
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(1e3 * np.percentile(values, percent), rel=1e-12)
    assert found["max"] == 1e3 * values.max() and latency.spread([]) == {}


def test_latencies_count_from_the_intended_time_and_from_sending() -> None:
    """Request n is sent n tenths of a second late and has its first token 50 ms later."""
    outcomes = [answered(float(number), number / 10, 0.05) for number in range(11)]
    found = latency.figures(outcomes, None)
    assert found["ttft_ms"]["p50"] == pytest.approx(550) and found["ttft_ms"]["max"] == pytest.approx(1050)
    assert found["from_send"]["ttft_ms"]["max"] == pytest.approx(50)
    assert found["e2el_ms"]["p50"] == pytest.approx(590) and found["from_send"]["e2el_ms"]["p50"] == pytest.approx(90)
    assert found["tpot_ms"]["p99"] == pytest.approx(10) and found["itl_ms"]["p99"] == pytest.approx(10)


@pytest.mark.parametrize("events", [
    # The role; a text; a token without one; a text; the end.
    [{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "a"}}, {"delta": {"content": ""}},
     {"delta": {"content": "b"}}, {"delta": {}, "finish_reason": "length"}],
    [{"delta": {"role": "assistant"}}, {"delta": {"reasoning_content": "a"}}, {"delta": {}}, {"delta": {"content": "b"}},
     {"delta": {}, "finish_reason": "length"}],
])
def test_what_a_reader_sees_is_counted_apart(events: list[dict[str, Any]]) -> None:
    outcome = Outcome(1.0)
    answer = Answer(outcome, 100.0, keep_text=False)
    for number, choice in enumerate(events):
        answer.event(json.dumps({"choices": [choice]}).encode(), 101.5 + number * (number + 1) / 20)     # 0, 0.1, 0.3, 0.6, 1 s
    assert list(outcome.events) == pytest.approx([1.6, 1.8, 2.1]) and list(outcome.shown) == pytest.approx([1.6, 2.1])
    seen = latency.figures([replace(outcome, tokens_out=3)], None)["as_seen"]
    assert seen["first_chunk_ms"]["max"] == pytest.approx(500) and seen["first_text_ms"]["max"] == pytest.approx(600)
    assert seen["text_gap_ms"]["max"] == pytest.approx(500)


def test_completions_without_a_text_are_tokens_too() -> None:
    outcome = Outcome(0.0)
    answer = Answer(outcome, 0.0, keep_text=False)
    for when, choice in enumerate([{"text": ""}, {"text": "a"}, {"text": "", "finish_reason": "length"}], 1):
        answer.event(json.dumps({"choices": [choice]}).encode(), float(when))
    assert list(outcome.events) == [1.0, 2.0] and list(outcome.shown) == [2.0] and outcome.first_chunk == 1.0


def test_a_token_that_ends_an_answer_has_no_text_and_takes_time() -> None:
    """Two tokens by the server's count, one of them seen: the other came with the word that the answer stops."""
    outcome = replace(answered(0.0, 0.0, 0.1, tokens=1), tokens_out=2, stopped=0.13)
    assert outcome.tpot == pytest.approx(0.03) and outcome.e2el() == pytest.approx(0.13) and outcome.gaps() == []
    early = replace(outcome, stopped=0.0)                # a server that does not say
    assert early.tpot == 0.0 and early.e2el() == pytest.approx(0.1)


def test_throughput_and_goodput_are_counted() -> None:
    """Ten a second for ten seconds; every fourth one is slow, three fail."""
    outcomes = [answered(number / 10, 0.0, 0.4 if number % 4 == 0 else 0.1) for number in range(100)]
    for number in (1, 2, 3):
        error = "http 500" if number < 3 else "timeout"
        outcomes[number] = Outcome(number / 10, sent=number / 10, ended=number / 10 + 0.2, error=error)
    found = latency.figures(outcomes, parse_slo(["ttft:200,tpot:50"]))
    duration = max(outcome.ended for outcome in outcomes)
    assert found["duration_s"] == duration and found["requests"] == 100
    assert found["completed"] == 97 and found["failed"] == 3 and found["errors"] == {"http 500": 2, "timeout": 1}
    assert found["request_goodput"] == 72 / duration and found["slo_attainment"] == 0.72
    assert found["request_throughput"] == 97 / duration
    assert found["output_throughput"] == 97 * 5 / duration and found["input_throughput"] == 97 * 7 / duration
    assert found["total_token_throughput"] == pytest.approx(97 * 12 / duration) and found["tokens_per_event"] == 1.0
    rows = latency.timeline(outcomes, 10)
    assert sum(row["request_throughput"] for row in rows) * duration / 10 == pytest.approx(97)
    assert sum(row["output_throughput"] for row in rows) * duration / 10 == pytest.approx(97 * 5)


def test_how_many_were_under_way_at_once() -> None:
    times = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (2.5, 5.0), (2.6, 2.7)]
    assert latency.most_concurrent([Outcome(sent, sent=sent, ended=ended) for sent, ended in times]) == 4


def test_nothing_answered_gives_figures_all_the_same() -> None:
    found = latency.figures([Outcome(0.0, sent=0.0, ended=1.0, error="timeout")], parse_slo(["ttft:1"]))
    assert found["ttft_ms"] == {} and found["request_goodput"] == 0 and latency.timeline([]) == []
    assert latency.figures([], None)["requests"] == 0


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        (["ttft:500,tpot:50"], {"ttft": 0.5, "tpot": 0.05}), (["ttft:500", "tpot:50"], {"ttft": 0.5, "tpot": 0.05}),
        (["E2E:1e4"], {"e2el": 10.0}), (["itl:2.5"], {"itl": 0.0025}),
    ],
)
def test_objectives(words: list[str], limits: dict[str, float]) -> None:
    found = parse_slo(words)
    assert found is not None and dict(found.limits) == pytest.approx(limits) and parse_slo([]) is None
    assert parse_slo([str(found)]) == found


@pytest.mark.parametrize("word", ["ttft", "ttft:", "speed:5", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:5,ttft:6", "e2e:5,e2el:6"])
def test_wrong_objectives_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an objective|given twice"):
        parse_slo([word])


def test_every_objective_has_to_be_met() -> None:
    outcome = answered(1.0, 0.2, 0.3, gap=0.1, tokens=4)                 # TTFT 0.5, TPOT 0.1, E2EL 0.8
    assert Slo((("ttft", 0.51), ("tpot", 0.11), ("e2el", 0.81), ("itl", 0.11))).met(outcome)
    for name, limit in (("ttft", 0.49), ("tpot", 0.09), ("e2el", 0.79), ("itl", 0.09)):
        assert not Slo(((name, limit),)).met(outcome)
    assert not Slo((("ttft", 9.0),)).met(Outcome(0.0, error="timeout"))
    assert Slo((("tpot", 0.001),)).met(answered(0.0, 0.0, 0.1, tokens=1))    # one token has no time per further token


def test_a_growing_queue_shows() -> None:
    """A server that answers eight of the ten requests that come in a second, and one that answers all."""
    behind = [answered(number / 10, 0.0, number / 8 - number / 10 + 0.1) for number in range(200)]
    assert latency.backlog_growth(behind) == pytest.approx(0.2, abs=0.01)
    keeping = [answered(number / 10, 0.0, 0.1) for number in range(200)]
    assert latency.backlog_growth(keeping) == pytest.approx(0, abs=0.01)
    assert latency.backlog_growth([answered(number / 10, 0.0, 15.0) for number in range(200)]) is None       # too short to tell
    assert latency.backlog_growth(keeping[:5]) is None
    burst = [answered(4.0 + number / 1000, 0.0, 30.0) for number in range(40)]
    late = [*(answered(number / 10, 0.0, 0.1) for number in range(41)), *burst, answered(6.0, 0.0, 0.1)]
    assert latency.backlog_growth(late) == 1.0                           # more than all of them cannot pile up
    thirteen = [*(answered(number / 4, 0.0, 0.05) for number in range(7)),
                *(answered(2.0 + number / 100, 0.0, 1.5) for number in range(5)), answered(3.0, 0.0, 0.1)]
    assert latency.backlog_growth(thirteen) is None                      # all were answered, and so few say nothing
    few = [answered(begin, 0.0, 0.6) for begin in (0.0, 0.5, 1.0, 1.9, 2.3, 2.6, 2.9, 3.4, 3.5, 3.6, 3.9, 4.5)]
    assert latency.backlog_growth(few) is None                           # twelve that came by chance say nothing


def lags(**changes: float) -> dict[str, Any]:
    found = {"loop_lag_ms": {"p99": 1.0}, "send_lag_ms": {"p99": 1.0}, "cpu_share": 0.5}
    for name, value in changes.items():
        found[name] = value if name == "cpu_share" else {"p99": value}
    return found


@pytest.mark.parametrize(
    ("change", "said"), [("cpu_share", "of a core"), ("loop_lag_ms", "its loop"), ("send_lag_ms", "it sent")]
)
def test_a_client_that_is_too_slow_says_so(change: str, said: str) -> None:
    assert client_check.reasons(lags()) == []
    [reason] = client_check.reasons(lags(**{change: 0.95 if change == "cpu_share" else 25.0}))
    assert said in reason
    found = lags() | {"reasons": [reason], "is_bottleneck": True}
    assert client_check.verdict(found).startswith("THE CLIENT WAS THE BOTTLENECK")


def test_axes_have_round_ticks_that_hold_every_value() -> None:
    for values in ([0.3, 7.2], [1000.0, 98765.0], [5.0], [], [0.0], [-3.0, 4.0]):
        found = axis("x", values)
        assert 2 <= len(found.ticks) <= 8 and all(found.low <= value <= found.high * (1 + 1e-9) for value in values)
        logarithmic = axis("x", values, log=True)
        assert all(logarithmic.low <= value <= logarithmic.high for value in values if value > 0)
    assert distribution([3.0, 1.0, 2.0, 2.0]) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    assert len(distribution([float(number) for number in range(5000)])) == 300

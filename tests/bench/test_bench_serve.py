"""`bench serve` against a server whose delays are scripted: the figures are those of the script.

Nothing is reported earlier than the server wrote it down. How much later is another matter: in slow tests, which want a quiet
machine, by LATE, which is what it needs to hand a read or a write to the right thread, and by what the client's own check says
it was late. Counts, errors and goodput are exact: limits lie far from the delays.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fake_openai
import pytest
from fake_openai import FakeServer, Script
from served_model import ServerProcess, write_model

from ridgeline.__main__ import main
from ridgeline.bench import serve
from ridgeline.bench.load.client_check import ClientCheck
from ridgeline.bench.load.http_client import EventStream, HttpClient, HttpFailure
from ridgeline.bench.load.latency import quantile

LATE = 0.020                         # seconds


def bench(server: FakeServer, folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """The record of a run."""
    out = folder / "serve.json"
    assert main(["bench", "serve", server.url, "--num-warmups", "1", "--input-len", "6", "--out", str(out), *words]) == code
    return json.loads(out.read_text()) if out.exists() else {}


def figures(made: dict[str, Any]) -> dict[str, Any]:
    return made["figures"]["points"][0]["figures"]


Late = Callable[[dict[str, Any]], float]


@pytest.fixture(params=["any machine", pytest.param("quiet machine", marks=pytest.mark.slow)])
def late(request: pytest.FixtureRequest) -> Late:
    """By how many seconds a latency may be longer than the server's: the client's own lateness, in sending and in reading."""
    if request.param == "any machine":
        return lambda found: math.inf
    return lambda found: LATE + (found["client"]["loop_lag_ms"]["max"] + found["client"]["send_lag_ms"]["max"]) / 1e3


def scripted(server: FakeServer, count: int) -> list[Any]:
    """The timed requests: the last ones."""
    return server.seen[-count:]


# -- latencies ---------------------------------------------------------------------------------------------------------


def test_percentiles_are_those_of_the_script(tmp_path: Path, late: Late) -> None:
    rng = random.Random(0)
    firsts = [rng.uniform(0.01, 0.3) for _ in range(80)]
    with FakeServer(lambda number, body: Script(firsts[number % 80], [0.01] * 4)) as server:
        found = figures(bench(server, tmp_path, "--request-rate", "60", "--num-prompts", "50"))
        seen = scripted(server, 50)
    first = sorted(each.written[0] - each.came for each in seen)
    whole = sorted(each.written[-1] - each.came for each in seen)
    for name, written in (("ttft_ms", first), ("e2el_ms", whole)):
        for percent in (50, 90, 95, 99):
            least = quantile(written, percent / 100)
            assert least - 1e-3 <= found[name][f"p{percent}"] / 1e3 <= least + late(found)
    gaps = sorted((each.written[-1] - each.written[0]) / 4 for each in seen)
    assert found["tpot_ms"]["p50"] == pytest.approx(1e3 * quantile(gaps, 0.5), abs=1e3 * late(found) / 4)
    assert found["completed"] == 50 and found["total_output_tokens"] == 250 and found["total_input_tokens"] == 300


@pytest.mark.parametrize("backend", ["completions", "chat"])
def test_answers_that_end_by_themselves_take_until_they_say_so(tmp_path: Path, backend: str, late: Late) -> None:
    """One token with text, and 50 ms later the one that ends the answer: 50 ms for a further token, and not nothing."""
    with FakeServer(lambda number, body: Script(0.01, stops_after=0.05)) as server:
        found = figures(bench(server, tmp_path, "--num-prompts", "5", "--max-concurrency", "1", "--backend", backend))
    assert found["total_output_tokens"] == 10
    assert found["e2el_ms"]["p50"] >= 59
    least = 49 if late(found) < math.inf else 0.1        # where the first token was read late, the rest took less
    assert least <= found["tpot_ms"]["p50"] <= 50 + 1e3 * late(found)
    assert found["e2el_ms"]["p50"] == pytest.approx(found["ttft_ms"]["p50"] + 50, abs=1e3 * late(found))


@pytest.mark.slow                                        # an answer that is late because the machine is busy would count as late
def test_goodput_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every fifth answer begins late, every seventh comes too slowly, and two of forty fail."""

    def script(number: int, body: dict[str, Any]) -> Script:
        number -= 2                                      # the first question and the warm-up
        if number in (3, 8):
            return Script(status=500)
        return Script(1.5 if number % 5 == 0 else 0.01, [0.5 if number % 7 == 0 else 0.002] * 3)

    with FakeServer(script) as server:
        made = bench(server, tmp_path, "--request-rate", "40", "--burstiness", "inf", "--num-prompts", "40",
                     "--goodput", "ttft:1000", "tpot:350")
    found = figures(made)
    good = sum(number % 5 != 0 and number % 7 != 0 and number not in (3, 8) for number in range(40))
    assert found["slo_attainment"] == good / 40
    assert found["request_goodput"] == pytest.approx(good / found["duration_s"])
    assert found["errors"] == {"http 500": 2} and found["failed"] == 2 and found["completed"] == 38
    assert made["workload"]["slo"] == "ttft:1000,tpot:350"
    assert "best goodput under ttft:1000,tpot:350" in capsys.readouterr().out


def test_a_stall_is_felt_by_everyone_who_wanted_something_meanwhile(tmp_path: Path, late: Late) -> None:
    """One connection at a time: from sending, only one request saw the stall. From the intended time, all that it delayed."""
    with FakeServer(lambda number, body: Script(0.8 if number == 2 + 15 else 0.001)) as server:      # due after 0.3 s
        found = figures(bench(server, tmp_path, "--request-rate", "50", "--burstiness", "inf", "--num-prompts", "80",
                              "--max-concurrency", "1"))
    from_send, intended = found["from_send"]["ttft_ms"], found["ttft_ms"]
    assert from_send["max"] > 700                        # the one that was under way, and no other
    assert from_send["p90"] < max(350, 1e3 * late(found))
    # Half of the requests are due during the stall; their delays go evenly from nothing to all of it: 640 ms at P90.
    assert 600 < intended["p90"] <= 640 + 4e3 * late(found) and intended["p99"] > 700
    assert found["most_concurrent"] == 1


def test_an_open_loop_does_not_wait_and_a_closed_one_does(tmp_path: Path) -> None:
    with FakeServer(lambda number, body: Script(0.4)) as server:
        opened = figures(bench(server, tmp_path, "--num-prompts", "12"))
        closed_record = bench(server, tmp_path, "--num-prompts", "12", "--max-concurrency", "3")
        closed = figures(closed_record)
    assert opened["most_concurrent"] > 3
    assert closed["most_concurrent"] == 3 and closed["duration_s"] >= 4 * 0.4
    assert closed_record["figures"]["points"][0]["process"] == "closed loop"


def test_a_trace_is_replayed_at_its_times(tmp_path: Path, late: Late) -> None:
    rows = [{"prompt": f"p{number}", "output_tokens": number + 1, "timestamp": 100 + when}
            for number, when in enumerate((0.0, 0.8, 0.1, 0.4))]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with FakeServer(lambda number, body: Script()) as server:
        made = bench(server, tmp_path, "--dataset-path", str(path), "--trace-speed", "2", "--save-detailed")
        seen = scripted(server, 4)
    assert [each.body["prompt"] for each in seen] == ["p0", "p2", "p3", "p1"]
    assert [each.body["max_tokens"] for each in seen] == [1, 3, 4, 2] and "ignore_eos" not in seen[0].body
    detailed = made["figures"]["points"][0]["detailed"]
    assert detailed["intended_s"] == pytest.approx([0.0, 0.05, 0.2, 0.4])
    for sent, due in zip(detailed["sent_s"], detailed["intended_s"], strict=True):
        assert due <= sent + 1e-6 <= due + late(figures(made))


def test_a_run_of_a_given_time(tmp_path: Path, late: Late) -> None:
    with FakeServer(lambda number, body: Script(0.01)) as server:
        steady = bench(server, tmp_path, "--request-rate", "30", "--burstiness", "inf", "--duration", "0.5")
        closed = bench(server, tmp_path, "--max-concurrency", "2", "--duration", "0.4")
        ramp = bench(server, tmp_path, "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "5", "--ramp-up-end-rps", "45",
                     "--duration", "1")
    assert figures(steady)["requests"] == 15 and 0.3 < figures(closed)["duration_s"] < 0.4 + 0.1 + 3 * late(figures(closed))
    assert 10 <= figures(ramp)["requests"] <= 50 and ramp["figures"]["points"][0]["process"] == "linear ramp"
    assert ramp["figures"]["points"][0]["setting"]["request_rate"] == "5 to 45"


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_a_conversation_brings_the_servers_own_answers(tmp_path: Path) -> None:
    with FakeServer(lambda number, body: Script(gaps=[0.0])) as server:
        made = bench(server, tmp_path, "--dataset-name", "multi_turn", "--turns", "3", "--num-prompts", "2", "--max-concurrency",
                     "1", "--think-time", "0.05")
        seen = scripted(server, 6)
    assert made["workload"]["endpoint"] == "/v1/chat/completions" and figures(made)["completed"] == 6
    for number, each in enumerate(seen):
        roles = [message["role"] for message in each.body["messages"]]
        assert roles == ["user", "assistant"] * (number % 3) + ["user"]
        assert all(message["content"] == " word word" for message in each.body["messages"][1::2])
        if number % 3:
            assert each.body["messages"][: 2 * (number % 3) - 1] == seen[number - 1].body["messages"]
            assert each.came - seen[number - 1].written[-1] >= 0.05


def test_a_key_headers_and_further_fields_are_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: Script(), key="secret") as server:
        words = ["--num-prompts", "2", "--header", "x-user=me", "--extra-body", '{"top_k": 5, "temperature": 0.5}']
        made = bench(server, tmp_path, "--api-key", "secret", *words)
        seen = server.seen[-1]
        assert seen.body["top_k"] == 5 and seen.body["temperature"] == 0.5 and seen.headers["x-user"] == "me"
        assert "secret" not in json.dumps(made)
        bench(server, tmp_path, "--api-key", "wrong", code=2)
        assert "the server requires a key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("refuses", "tokenizes", "counted", "tokens"),
    [
        ((), False, "usage", 6), (("ignore_eos",), False, "usage", 6), (("stream_options",), False, "token ids", 6),
        (("stream_options", "return_token_ids"), True, "server tokenizer", 6),
        (("stream_options", "return_token_ids", "ignore_eos"), False, "events", 2),
    ],
)
def test_tokens_are_counted_by_what_the_server_offers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refuses: tuple[str, ...], tokenizes: bool, counted: str, tokens: int,
    late: Late,
) -> None:
    with FakeServer(lambda number, body: Script(gaps=[0.1], tokens_per_event=3), refuses=refuses, tokenizes=tokenizes) as server:
        made = bench(server, tmp_path, "--num-prompts", "3", "--price", "1")
        assert not set(refuses) & set(server.seen[-1].body)
    assert made["workload"]["tokens_counted_by"] == counted and figures(made)["total_output_tokens"] == 3 * tokens
    near = 0.5 if late(figures(made)) < math.inf else math.inf
    assert figures(made)["tpot_ms"]["p50"] == pytest.approx(100 / (tokens - 1), rel=near)
    assert f"tokens counted by: {counted} ({'exact' if tokens == 6 else 'an assumption'}" in capsys.readouterr().out
    if "stream_options" in refuses:                      # nobody counted the prompts: unknown, and not nothing
        assert figures(made)["total_input_tokens"] is None and figures(made)["total_token_throughput"] is None
        assert set(figures(made)["cost"]) == {"usd_per_hour", "usd_per_m_output_tokens"}
    assert made["workload"]["prompt_lengths_by"] == ("server tokenizer" if tokenizes else "one token per word, by assumption")


def test_the_offered_rate_is_that_of_the_gaps(tmp_path: Path) -> None:
    with FakeServer(lambda number, body: Script()) as server:
        words = ("--num-prompts", "11", "--request-rate", "50", "--burstiness", "inf")
        assert figures(bench(server, tmp_path, *words))["offered_rate"] == pytest.approx(50, rel=1e-9)


def test_the_role_of_a_chat_is_no_token(tmp_path: Path) -> None:
    """It is written at once; the first token comes later."""
    with FakeServer(lambda number, body: Script(0.2)) as server:
        found = figures(bench(server, tmp_path, "--backend", "openai-chat", "--num-prompts", "3"))
    assert found["ttft_ms"]["p50"] >= 199 and found["tokens_per_event"] == 1.0


def test_prompts_as_token_ids(tmp_path: Path) -> None:
    with FakeServer(lambda number, body: Script(), tokenizes=True) as server:
        bench(server, tmp_path, "--num-prompts", "2", "--prompt-format", "ids", "--dataset-name", "prefix", "--prefix-len", "10")
        prompts = [each.body["prompt"] for each in scripted(server, 2)]
    assert all(len(prompt) == 16 and all(type(token) is int for token in prompt) for prompt in prompts)
    assert prompts[0][:10] == prompts[1][:10] and prompts[0][10:] != prompts[1][10:]


def test_prompts_that_the_server_has_seen_are_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: Script(), cached=3) as server:
        found = figures(bench(server, tmp_path, "--num-prompts", "4"))
        assert found["cached_input_tokens"] == 12 and "50% of the prompt tokens came from" in capsys.readouterr().out
        bench(server, tmp_path, "--num-prompts", "4", "--dataset-name", "prefix", "--prefix-len", "3", "--seed", "5")
        assert "of the prompt tokens came from" not in capsys.readouterr().out           # that is what was asked for


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_errors_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [
        Script(status=429), Script(error="broken"), Script(hang_up=True), Script(600.0), Script(0.01), Script(status=503),
    ]
    with FakeServer(lambda number, body: kinds[(number - 2) % 6] if number >= 2 else Script()) as server:
        found = figures(bench(server, tmp_path, "--num-prompts", "6", "--max-concurrency", "1", "--timeout", "3", code=1))
    assert found["errors"] == {"http 429": 1, "error event": 1, "cut short": 1, "timeout": 1, "http 503": 1}
    assert found["completed"] == 1 and found["failed"] == 5
    said = capsys.readouterr()
    assert "http 429: as scripted" in said.out.replace('{"error": {"message": "', "").replace('"}}', "")
    assert "83% of the requests failed: latencies and throughput are those of the others" in said.out


def test_a_run_in_which_too_many_requests_fail_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six of ten, of which the record and the table still tell; one of ten is allowed, and more where it is asked for."""

    def failing(count: int) -> FakeServer:
        return FakeServer(lambda number, body: Script(status=503 if 2 <= number < 2 + count else 200))

    words = ("--num-prompts", "10", "--max-concurrency", "2")
    with failing(6) as server:
        found = figures(bench(server, tmp_path, *words, code=1))
    said = capsys.readouterr()
    assert found["failed"] == 6 and found["completed"] == 4 and "| 60% " in said.out
    assert said.err.count("\n") == 1 and "60% of the requests failed (6 of 10, with " in said.err
    assert "the first error: http 503" in said.err and "--max-failed 10%" in said.err
    for count, more, code in ((6, ("--max-failed", "60%"), 0), (6, ("--max-failed", "0.5", "--format", "json"), 1), (1, (), 0)):
        with failing(count) as server:
            bench(server, tmp_path, *words, *more, code=code)
    with FakeServer(lambda number, body: Script()) as server:
        bench(server, tmp_path, *words, "--max-failed", "many", code=2)
    assert "--max-failed must be a share such as 3%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-warmups", "0"], "without warm-up"), (["--slo", "speed:3"], "is not an objective"),
        (["--dataset-name", "custom"], "need each other"), (["--dataset-name", "prefix"], "needs --prefix-len"),
        (["--duration", "3"], "need --request-rate"), (["--duration", "3", "--num-prompts", "2"], "say when a run ends"),
        (["--sustain", "3", "--num-prompts", "2"], "say when a run ends"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"), (["--extra-body", "[]"], "must be a JSON object"),
        (["--header", "x"], "is not a header"), (["--prompt-format", "ids", "--backend", "chat"], "needs completions"),
        (["--input-len", "few"], "is not a length"), (["--request-rate", "0"], "above 0"), (["--repeats", "0"], "above 0"),
        (["--price", "-1"], "above 0 dollars"), (["--sustain", "0"], "above 0 minutes"),
    ],
)
def test_wrong_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:9", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_interrupted_sweep_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = serve._point

    async def point(asked: Any, target: Any, setting: Any, number: int, watch: Any) -> Any:
        if number == 2:
            raise asyncio.CancelledError                 # what Ctrl-C does to the run
        return await whole(asked, target, setting, number, watch)

    monkeypatch.setattr(serve, "_point", point)
    with FakeServer(lambda number, body: Script()) as server:
        made = bench(server, tmp_path, "--max-concurrency", "1", "2", "3", "4", "--num-prompts", "4")
    assert [point["setting"]["max_concurrency"] for point in made["figures"]["points"]] == [1, 2]
    assert "interrupted: 2 of 4 settings were measured" in capsys.readouterr().err


def test_a_trace_takes_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "x", "timestamp": 1}')
    assert main(["bench", "serve", "http://127.0.0.1:9", "--dataset-path", str(path), "--request-rate", "5"]) == 2
    assert "a trace has its own times" in capsys.readouterr().err


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://127.0.0.1:9", "http://a..b:9"):
        assert main(["bench", "serve", url]) == 1 and f"no server answers at {url}: " in capsys.readouterr().err
    for url in ("http://x:y", "http://[::1", "http://x:99999"):
        assert main(["bench", "serve", url]) == 2 and "invalid host or port" in capsys.readouterr().err
    assert main(["bench", "serve", "ftp://x"]) == 2 and "is not the address of a server" in capsys.readouterr().err


def test_a_server_that_fails_in_the_warm_up_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: Script(status=500 if number else 200)) as server:
        bench(server, tmp_path, code=1)
    assert "every warm-up request failed (http 500)" in capsys.readouterr().err


def test_a_blocked_loop_is_noticed() -> None:
    async def watch(block: float) -> dict[str, Any]:
        async with ClientCheck() as check:
            for _ in range(10):
                await asyncio.sleep(0.02)
                time.sleep(block)
        return check.figures([])

    busy = asyncio.run(watch(0.06))
    assert busy["is_bottleneck"] and busy["loop_lag_ms"]["max"] > 40 and "its loop was" in busy["reasons"][0]


# -- what comes out ----------------------------------------------------------------------------------------------------


class Outside(HTMLParser):
    """Collects whatever a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fetching = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}
        self.found += [f"{tag} {name}" for name, _ in attrs if name in fetching or name.startswith("on")]
        if tag in ("script", "link", "iframe", "object", "embed", "img", "base"):
            self.found.append(tag)


def test_a_sweep_a_page_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    with FakeServer(lambda number, body: Script(0.01, [0.005] * 3)) as server:
        made = bench(server, tmp_path, "--request-rate", "30", "60", "--num-prompts", "12", "--slo", "ttft:5000",
                     "--html", str(page),
                     "--repeats", "2", "--price", "3.6", "--save-detailed", "--model", "<b>fake</b>")
    points = made["figures"]["points"]
    assert [point["setting"]["request_rate"] for point in points] == [30.0, 60.0]
    for point in points:
        found = point["figures"]
        assert point["runs"] == 2 and set(found["ttft_ms"]["p99"]) == {"median", "p10", "p90"}
        dollars = 3.6 / 3600 * found["duration_s"]["median"] / 48 * 1e6
        assert found["cost"]["usd_per_m_output_tokens"]["median"] == pytest.approx(dollars)
        assert len(point["detailed"]["sent_s"]) == 12 and len(point["detailed"]["itls_ms"][0]) == 3
    best = max(points, key=lambda point: point["figures"]["request_goodput"]["median"])     # which one is the machine's affair
    assert made["figures"]["best_goodput"]["setting"] == best["setting"]
    assert made["quality"].startswith("unknown") and made["peak_memory"]["client"]["process_bytes"] > 0
    assert made["peak_memory"]["server_bytes"] > 0                      # this process: the server is a thread of it
    text = page.read_text()
    outside = Outside()
    outside.feed(text)
    assert outside.found == [] and not re.search(r"@import|url\(|https?://(?!127\.0\.0\.1)", text)
    assert text.count("<figure") == 3 + 2 * 4 and "prefers-color-scheme: dark" in text and "<b>fake" not in text
    assert "SLO TTFT 5000 ms" in text and "{'" not in text and "fields: ignore eos" in text
    assert "Rate and goodput" in text and "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S).lower().split()


def test_the_first_pass_comes_before_the_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is slow at first: its first requests are a figure of their own, and no part of the others."""
    with FakeServer(lambda number, body: Script(0.3 if number < 9 else 0.0, tokens_per_event=1 if number < 9 else 2)) as server:
        made = bench(server, tmp_path, "--num-prompts", "8", "--num-warmups", "2", "--first-pass")
        assert len(server.seen) >= 18
    point = made["figures"]["points"][0]
    assert point["first_pass"]["completed"] == point["figures"]["completed"] == 8
    assert point["first_pass"]["ttft_ms"]["p50"] >= 300
    assert point["first_pass"]["total_output_tokens"] == 8 and point["figures"]["total_output_tokens"] == 16
    assert "first pass: " in capsys.readouterr().out


@pytest.mark.parametrize("form", ["csv", "json"])
def test_other_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    with FakeServer(lambda number, body: Script(0.01)) as server:
        made = bench(server, tmp_path, "--num-prompts", "3", "--format", form)
    text = capsys.readouterr().out
    if form == "json":
        assert json.loads(text) == made
    else:
        head, line = text.splitlines()
        assert dict(zip(head.split(","), line.split(","), strict=True))["done"] == "3"


@pytest.mark.slow
def test_sustained_load_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: Script(0.005 + number * 0.0004)) as server:
        made = bench(server, tmp_path, "--sustain", "0.03", "--max-concurrency", "4")
    found = made["figures"]["points"][0]["sustain"]
    assert found["figures"]["ttft_ms"]["drift"] > 1 and "ttft_ms +" in found["verdict"]          # it gets slower and slower
    assert found["verdict"] in capsys.readouterr().out


# -- the client --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["\n\n", "\r\n\r\n"])
def test_events_may_be_cut_anywhere(ending: str) -> None:
    stream = ending.join(['data: {"a": 1}', ": a comment", "event: x\ndata: {}".replace("\n", ending[: len(ending) // 2]),
                          "data:[DONE]", ""]).encode()
    for size in (1, 2, 3, 7, 1000):
        found: list[bytes] = []
        sink = EventStream(lambda data, when, found=found: found.append(data))  # type: ignore[misc]
        for start in range(0, len(stream), size):
            sink(stream[start : start + size], 0.0)
        assert found == [b'{"a": 1}', b"{}", b"[DONE]"]


def test_connections_are_kept_and_a_closed_one_is_replaced() -> None:
    async def use(url: str) -> tuple[int, int]:
        client = HttpClient(url)
        for _ in range(3):
            assert (await client.get("/v1/models")).status == 200
        kept = client.opened
        client._idle[0].close()                          # as a server does that is tired of waiting
        await asyncio.sleep(0.05)
        assert (await client.get("/v1/models")).json()["data"]
        opened = client.opened
        client.close()
        return kept, opened

    with FakeServer(lambda number, body: Script()) as server:
        assert asyncio.run(use(server.url)) == (1, 2)

    async def alone() -> None:
        with pytest.raises(HttpFailure, match=r".+") as failed:
            await HttpClient("http://127.0.0.1:9").get("/")
        assert failed.value.kind == "no connection"

    asyncio.run(alone())


@pytest.mark.slow
def test_the_client_costs_little(tmp_path: Path) -> None:
    """Five thousand tokens a second would take it less than a core, also where it shares the machine."""
    child = subprocess.Popen(
        [sys.executable, str(Path(fake_openai.__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdin is not None
        url, out = child.stdout.readline().strip(), tmp_path / "serve.json"
        words = ["--max-concurrency", "24", "--num-prompts", "24", "--num-warmups", "1", "--input-len", "6", "--out", str(out)]
        # In a process of its own, as users have it: among all that pytest has loaded, garbage takes longer than the work.
        subprocess.run([sys.executable, "-m", "ridgeline", "bench", "serve", url, *words], check=True, timeout=120)
        child.stdin.close()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    found = figures(json.loads(out.read_text()))
    assert found["total_output_tokens"] == 2400 and found["client"]["cpu_us_per_token"] < 200


# -- a real server -----------------------------------------------------------------------------------------------------


def test_ridgelines_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "tiny")
    out = tmp_path / "serve.json"
    with ServerProcess(str(model), "--load-format", "dummy", "--max-num-seqs", "8", "--max-model-len", "512") as server:
        words = ["--max-concurrency", "1", "4", "--num-prompts", "8", "--input-len", "40", "--output-len", "12"]
        assert main(["bench", "serve", f"{server.url}/v1", *words, "--slo", "ttft:60000", "--out", str(out)]) == 0
        chat = ["--dataset-name", "multi_turn", "--turns", "2", "--num-prompts", "2", "--input-len", "20", "--output-len", "5"]
        assert main(["bench", "serve", server.url, *chat, "--out", str(tmp_path / "chat.json")]) == 0
    made = json.loads(out.read_text())
    assert made["quality"] == "exact" and made["workload"]["tokens_counted_by"] == "usage"
    assert made["workload"]["prompt_lengths_by"] == "server tokenizer" and made["peak_memory"]["server_bytes"] > 2**27
    for point in made["figures"]["points"]:
        found = point["figures"]
        assert found["completed"] == 8 and found["total_output_tokens"] == 8 * 12 and found["slo_attainment"] == 1.0
        assert 8 * 38 <= found["total_input_tokens"] <= 8 * 42           # bytes are tokens here: within a word
    talked = figures(json.loads((tmp_path / "chat.json").read_text()))
    assert talked["completed"] == 4 and talked["total_output_tokens"] == 20


@pytest.mark.real_model
@pytest.mark.slow
def test_the_embedded_model(embedded_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    with ServerProcess("--max-num-seqs", "8", "--max-model-len", "1024") as server:
        words = ["--request-rate", "2", "--num-prompts", "8", "--input-len", "100", "--output-len", "16", "--num-warmups", "2"]
        assert main(["bench", "serve", server.url, *words, "--html", str(tmp_path / "page.html"), "--out", str(out)]) == 0
    found = figures(json.loads(out.read_text()))
    assert found["completed"] == 8 and found["total_output_tokens"] == 128
    assert found["total_input_tokens"] == 800                            # every word is one token of this vocabulary


def test_a_goodput_of_nothing_is_not_called_best() -> None:
    best = {"setting": {"request_rate": 0.5, "max_concurrency": None}, "request_goodput": 0.0}
    assert serve.goodput_line(best, "ttft:1") == "no request met ttft:1: goodput is 0 at every setting"
    best["request_goodput"] = 0.25
    assert serve.goodput_line(best, "ttft:1") == "best goodput under ttft:1: 0.25 requests/s at request_rate 0.5"

"""Metrics: names that dashboards rely on, numbers that agree with what happened, and what observing costs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_runner import FakeRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from served_model import ServerProcess, wait_until, write_model
from test_end_tokens import directory
from test_model_config import LLAMA

from ridgeline import metrics
from ridgeline.config import EngineConfig
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.live_switches import Switches
from ridgeline.engine.core.stats import StatsKeeper
from ridgeline.engine.ipc import FROM_ENGINE, Stats
from ridgeline.errors import BadRequest
from ridgeline.messages import Request, StepPlan
from ridgeline.metrics import MANY_FAULTS, EngineStats, Histogram, ServingMetrics, Step, StepWatch
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.observe.prometheus import families, timings, written

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics.txt"
ROOT = Path(__file__).parents[3]
COMMON = {"model_name": 'a "model"\\', "engine": "0"}


def samples(text: str) -> dict[str, float]:
    """By name and further labels: `name{cause=late}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in COMMON}
            written_out = ",".join(f"{name}={value}" for name, value in labels.items())
            found[f"{sample.name}{{{written_out}}}" if labels else sample.name] = sample.value
    return found


# -- names -------------------------------------------------------------------------------------------------------------


def golden() -> list[tuple[str, str, list[str]]]:
    return [(name, kind, labels) for name, kind, *labels in map(str.split, GOLDEN.read_text().splitlines())]


def test_names_types_and_labels_are_those_that_dashboards_know() -> None:
    """A change here breaks dashboards and alerts: it needs a line in docs/metrics.md and in the release notes."""
    made = []
    for family in families(AsyncLLM()):
        labels = list(family.samples[0][0])
        values = [",".join(each[label] for each, _ in family.samples) for label in labels]
        several = len(family.samples) > 1
        words = [f"{label}={value}" if several else label for label, value in zip(labels, values, strict=True)]
        made.append((family.name + ("_total" if family.kind == "counter" else ""), family.kind, words))
    assert made == golden()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_the_text_is_read_by_prometheus_own_parsers(openmetrics: bool) -> None:
    parse = openmetrics_families if openmetrics else text_string_to_metric_families
    made = families(AsyncLLM())
    made[9].samples[0][1].observe(0.0031)                # type: ignore[union-attr]
    parsed = list(parse(written(made, COMMON, openmetrics)))
    # Both parsers call a counter's family by its name without _total.
    assert [(each.name, each.type) for each in parsed] == [(family.name, family.kind) for family in made]
    for family in parsed:
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert {name: sample.labels[name] for name in COMMON} == COMMON
    buckets = {sample.labels.get("le"): sample.value for sample in parsed[9].samples}
    assert (buckets["0.003"], buckets["0.004"], buckets["+Inf"]) == (0, 1, 1)


def test_buckets_tell_one_millisecond_from_ten_and_include_vllms() -> None:
    for bounds in (metrics.STEP_SECONDS, metrics.FIRST_TOKEN_SECONDS, metrics.REQUEST_SECONDS):
        assert list(bounds) == sorted(set(bounds))
        assert sum(0.001 <= bound <= 0.01 for bound in bounds) >= 6
    assert {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80} <= {
        *metrics.STEP_SECONDS
    }
    assert {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680} <= {
        *metrics.REQUEST_SECONDS
    }


def test_every_metric_is_documented_and_every_panel_asks_for_one_that_exists() -> None:
    names = {name for name, _, _ in golden()}
    before = {family.name for family in families(AsyncLLM())}
    drafted = {f"{family.name}_total" for family in families(AsyncLLM(speculative_config="auto")) if family.name not in before}
    assert drafted and all("spec_decode" in name or "draft" in name for name in drafted)     # only where speculation is on
    names |= drafted
    described = (ROOT / "docs" / "metrics.md").read_text()
    assert not [name for name in names if f"`{name}`" not in described]
    known = names | {f"{name}_{part}" for name, kind, _ in golden() if kind == "histogram" for part in ("bucket", "sum", "count")}
    board = json.loads((ROOT / "docs" / "grafana" / "ridgeline.json").read_text())
    asked = {name for panel in board["panels"] for target in panel.get("targets", [])
             for name in re.findall(r"(?:vllm|ridgeline):\w+", target["expr"])}
    assert len(board["panels"]) > 12 and asked and not asked - known
    alerts = set(re.findall(r"(?:vllm|ridgeline):\w+", described))
    assert not {name for name in alerts if name not in known and not name.endswith("_")}


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_histograms_bounds_are_inclusive() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum, histogram.count) == ([2, 2, 1], 14.0, 5)


def test_a_requests_times(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, now = ServingMetrics(), 1000.0
    monkeypatch.setattr("ridgeline.metrics.time", SimpleNamespace(monotonic=lambda: now))
    times = serving.sent(num_prompt=7, num_answers=2, arrived=now - 1.0)
    times.sent = now - 0.9
    serving.started(times, now - 0.5)
    serving.started(times, now - 0.1)                    # back after a preemption: the first time counts
    for index in (0, 1):
        serving.took(times, index, 1, now - 0.4)
    for step in range(1, 4):
        serving.took(times, 0, 1, now - 0.4 + 0.1 * step)
    serving.answered(times, 0, "length")
    serving.answered(times, 1, "stop")
    assert (serving.prompt_tokens, serving.generation_tokens) == (7, 5)
    assert serving.finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}
    assert times.queue == pytest.approx(0.4) and times.prefill() == pytest.approx(0.1)
    assert serving.queue.sum == pytest.approx(0.8) and serving.prefill.sum == pytest.approx(0.2)
    assert serving.decode.sum == pytest.approx(0.3) and serving.inference.sum == pytest.approx(0.5)
    assert serving.inter_token.count == 3 and serving.inter_token.sum == pytest.approx(0.3)
    assert serving.per_output_token.count == 1 and serving.per_output_token.sum == pytest.approx(0.1)
    assert serving.first_token.count == 2 and 2.0 <= serving.first_token.sum < 2.5
    assert serving.e2e.count == 2 and serving.request_generation_tokens.sum == 5


@pytest.mark.parametrize("error", [False, True])
def test_a_request_that_ends_early_is_counted_once(error: bool) -> None:
    serving = ServingMetrics()
    times = serving.sent(3, 2)
    serving.left(times, 2, error)
    assert serving.finished["error" if error else "abort"] == 2 and serving.aborted == (0 if error else 1)
    assert serving.first_token.count == serving.queue.count == 0


def test_counters_go_on_when_another_engine_starts() -> None:
    serving = ServingMetrics()
    for steps in (5, 3, 2):
        serving.engine_started()
        watch = StepWatch()
        for _ in range(steps):
            watch.observe(step(0.002))
        serving.engine = EngineStats(
            1, 2, 3, {"steps": steps}, {"unknown": 1}, watch.seconds.counts, watch.seconds.sum, watch.tokens.counts,
            watch.tokens.sum,
        )
    assert (serving.counter("steps"), serving.counter("late"), serving.slow_steps("unknown")) == (10, 0, 3)
    assert serving.step_seconds.count == 10 and serving.step_seconds.sum == pytest.approx(0.020)
    assert serving.step_tokens.sum == 100


# -- slow steps --------------------------------------------------------------------------------------------------------


def step(seconds: float, **facts: Any) -> Step:
    given = {"between": 0.0, "collecting": 0.0, "tokens": 10, "prompt_tokens": 0, "preemptions": 0, "compiled": 0, "recorded": 0}
    return Step(seconds=seconds, **(given | facts))      # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"collecting": 0.03, "prompt_tokens": 9}, "garbage_collection"),
        ({"collecting": 0.001, "prompt_tokens": 9}, "prompt_tokens"),
        ({"compiled": 1, "recorded": 1}, "kernel_compile"),
        ({"recorded": 1, "prompt_tokens": 9}, "graph_recording"),
        ({"between": 0.03}, "between_steps"),
        ({"preemptions": 2, "prompt_tokens": 9}, "preemption"),
        ({"allocated": 1, "prompt_tokens": 9}, "allocation"),
        ({"faults": MANY_FAULTS}, "allocation"),
        ({"faults": MANY_FAULTS - 1, "prompt_tokens": 9}, "prompt_tokens"),
        ({"faults": 50, "read_faults": 3}, "disk_reads"),
        ({"waiting": 0.03, "between": 0.03}, "processor_taken"),
        ({"waiting": 0.003, "prompt_tokens": 9}, "prompt_tokens"),
        ({"between": 0.03, "added": 12}, "new_requests"),
        ({"between": 0.003, "added": 12, "computing": 0.03}, "host_work"),
        ({"is_first": True, "prompt_tokens": 9}, "first_of_its_kind"),
        ({"device": 0.035, "computing": 0.035}, "device"),
        ({"device": 0.002, "computing": 0.03}, "host_work"),
        ({"device": 0.002, "computing": 0.002}, "unknown"),
    ],
)
def test_why_a_step_was_slow(facts: dict[str, Any], cause: str) -> None:
    watch = StepWatch()
    assert watch.observe(step(0.04, **facts)) == ""      # nothing is known to compare it with
    for _ in range(40):
        assert watch.observe(step(0.004)) == ""
    assert watch.observe(step(0.011, **facts)) == ""     # less than three times the median
    assert watch.observe(step(0.04, **facts)) == cause
    assert watch.slow == {cause: 1} and watch.seconds.count == 43


class SlowRunner(FakeRunner):
    """A device without arithmetic that takes a millisecond of its own clock, and now and then much longer."""

    slow: frozenset[int] = frozenset()
    now = 100.0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if plan.step in self.slow:
            metrics.HAPPENED["kernel_compile"] += 1
        self.now += 0.03 if plan.step in self.slow else 0.001

    def close(self) -> None:
        pass


def core(folder: Path, slow: frozenset[int] = frozenset(), **options: Any) -> EngineCore:
    given = {"num_gpu_blocks_override": 200, "max_num_seqs": 4} | options
    config = resolve(
        EngineConfig.of(model=str(directory(folder, config=LLAMA)), **given), DeviceFacts("cpu", 2**28, ("float32",))
    )
    runner = SlowRunner(config.groups, config.num_blocks)
    runner.slow = slow
    return EngineCore(config, runner)


def drive(engine: EngineCore, keeper: StatsKeeper) -> list[EngineStats]:
    """As the engine's loop does, by the device's clock."""
    reports, device = [], engine.executor
    assert isinstance(device, SlowRunner)
    while engine.has_work:
        began = device.now
        engine.step()
        keeper.stepped(began, device.now)
        if keeper.due(device.now):
            reports.append(keeper.report(device.now))
    return reports


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_reports_what_it_did(tmp_path: Path, overlap: bool) -> None:
    engine = core(tmp_path, frozenset({90, 95, 99}), async_scheduling=overlap)
    keeper = StatsKeeper(engine)
    for name in "abcdef":                                # two of them have to wait
        engine.add(Request(name, [5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True)))
    reports = drive(engine, keeper)
    keeper.close()
    seconds = engine.executor.now - SlowRunner.now
    last = FROM_ENGINE.decode(FROM_ENGINE.encode(Stats(reports[-1])))
    assert isinstance(last, Stats)
    stats = last.stats
    assert len(reports) <= seconds / 0.1 + 2             # ten times a second, and once at the end
    assert reports[0].running == 4 and reports[0].waiting == 2
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, engine.scheduler.manager.num_free)
    counters = stats.counters
    assert counters["steps"] == sum(stats.step_seconds) == sum(stats.step_tokens) >= 120
    assert stats.step_tokens_sum == counters["useful"] + counters["recomputation"]
    assert counters["prompt_tokens"] == 6 * 3 and counters["held_slots"] > counters["used_slots"] > 0
    assert stats.step_seconds_sum == pytest.approx(seconds, rel=0.25)
    assert stats.slow_steps.get("kernel_compile", 0) >= 3


def test_slow_steps_are_logged_once_a_second_and_once_a_minute_for_a_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("ridgeline.engine.core.stats.logger.info", lambda text, *values: lines.append(text % values))
    engine = core(tmp_path)
    keeper = StatsKeeper(engine)
    now = 100.0
    causes = iter(["processor_taken"] * 4 + ["disk_reads", "processor_taken", "disk_reads"])
    monkeypatch.setattr(keeper.watch, "observe", lambda step: next(causes) if step.seconds > 0.01 else None)
    for seconds in [0.002] * 40 + [0.02, 0.5, 2.0, 0.02, 0.03, 70.0, 0.04]:
        engine.scheduler.counters.useful_tokens += 4
        keeper.stepped(now, now + seconds)
        now += seconds
    keeper.close()
    assert [re.findall(r"\b(?:cause|ms|tokens|gc_ms|unlogged)=\S+", line) for line in lines] == [
        ["cause=processor_taken", "ms=20.0", "tokens=4", "gc_ms=0.0", "unlogged=0"],
        ["cause=disk_reads", "ms=30.0", "tokens=4", "gc_ms=0.0", "unlogged=3"],
        ["cause=processor_taken", "ms=70000.0", "tokens=4", "gc_ms=0.0", "unlogged=0"],
    ]


def test_slow_steps_that_prompts_explain_are_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first prompt is one: they are counted, and no line is written."""
    lines: list[str] = []
    monkeypatch.setattr("ridgeline.engine.core.stats.logger.info", lambda text, *values: lines.append(text % values))
    engine = core(tmp_path)
    keeper = StatsKeeper(engine)
    now = 100.0
    for seconds, prompt_tokens in [(0.002, 0)] * 40 + [(0.2, 7), (0.2, 7), (0.2, 300)]:
        engine.scheduler.counters.useful_tokens += 4
        engine.scheduler.counters.prompt_tokens += prompt_tokens
        keeper.stepped(now, now + seconds)
        now += seconds
    keeper.close()
    assert not lines and keeper.watch.slow == {"first_of_its_kind": 2, "prompt_tokens": 1}


def test_time_without_work_belongs_to_no_step(tmp_path: Path) -> None:
    engine = core(tmp_path)
    keeper = StatsKeeper(engine)
    for name in "ab":
        engine.add(Request(name, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)))
        drive(engine, keeper)
        keeper.idle()
        engine.executor.now += 10.0
    keeper.close()
    assert keeper.watch.seconds.sum < 0.2


def test_a_request_starts_once(tmp_path: Path) -> None:
    engine = core(tmp_path, max_num_seqs=2)
    for name in "abc":
        engine.add(Request(name, [5, 6, 7], SamplingParams(n=1, max_tokens=5, ignore_eos=True)))
    started = []
    while engine.has_work:
        engine.step()
        started.append(engine.scheduler.started)
    assert started[0] == ["a", "b"] and sorted(name for names in started for name in names) == ["a", "b", "c"]


def test_a_request_may_do_without_prefix_caching(tmp_path: Path) -> None:
    engine = core(tmp_path)
    prompt = list(range(3, 43))
    cached = []
    for name, allowed in (("a", True), ("b", True), ("c", False), ("d", True)):
        engine.add(Request(name, prompt, SamplingParams(max_tokens=2, ignore_eos=True), prefix_caching=allowed))
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        cached.append(deltas[0].num_cached_tokens)
    assert cached == [0, 32, 0, 32]


@pytest.mark.parametrize("technique", ["prefix caching", "continuous batching", "overlap"])
def test_a_live_engine_without_a_technique_says_the_same(tmp_path: Path, technique: str) -> None:
    """And does without it: requests come while it is switched off, and on again, in the middle of their answers."""

    def answers(*switched: int) -> tuple[dict[str, list[int]], list[int], list[int], int]:
        engine = core(tmp_path, async_scheduling=True)
        switches = Switches(engine)
        assert technique in switches.active
        said: dict[str, list[int]] = {}
        in_flight, cached, joined, before = [], [], 0, 0
        for number in range(60):
            deltas = []
            if number in switched:
                deltas = switches.set(technique, technique not in switches.active)
            if number % 5 == 0 and number < 30:
                prompt = [7] * 32 + [number]
                engine.add(Request(str(number), prompt, SamplingParams(max_tokens=12 + number % 7, ignore_eos=True)))
            deltas += engine.step()
            in_flight.append(engine.scheduler.num_in_flight)
            running = engine.scheduler.num_running
            joined += number >= 8 and running > before > 0   # a request joined the running ones
            before = running
            for delta in deltas:
                if delta.request_id not in said:
                    cached.append(delta.num_cached_tokens)
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
        while engine.has_work:
            for delta in engine.step():
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert engine.scheduler.manager.num_free == engine.config.num_blocks - 1
        return said, in_flight, cached, joined

    on, off, again = answers(), answers(8), answers(8, 22)
    assert on[0] == off[0] == again[0] and len(on[0]) == 6
    if technique == "overlap":
        assert max(off[1][8:]) == 0 and max(again[1][22:]) == 1 == max(on[1][8:])
    if technique == "continuous batching":
        assert off[3] == 0 < on[3]
    if technique == "prefix caching":
        assert on[2][1:] == [32] * 5 and off[2][2:] == [0] * 4 and again[2][-1] == 32


def test_what_cannot_be_switched_is_said(tmp_path: Path) -> None:
    switches = Switches(core(tmp_path, enable_prefix_caching=False))
    with pytest.raises(BadRequest, match="prefix caching cannot be switched: the engine was started without it"):
        switches.set("prefix caching", True)
    with pytest.raises(BadRequest, match="'paged KV' cannot be switched on a running engine; prefix caching, continuous"):
        switches.set("paged KV", False)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_observing_costs(tmp_path: Path) -> None:
    """At most 2 µs for a token in the front end and 20 µs for a step in the engine. Best of several: others run here too."""
    serving = ServingMetrics()
    times = serving.sent(10, 1)
    serving.took(times, 0, 1, 1.0)
    took, at = serving.took, 1.0

    def tokens() -> float:
        began = time.thread_time()
        for _ in range(10_000):
            took(times, 0, 1, at + 0.005)
        return (time.thread_time() - began) / 10_000

    engine = core(tmp_path)
    keeper = StatsKeeper(engine)
    counters = engine.scheduler.counters

    def steps() -> float:
        began = time.thread_time()
        for number in range(2_000):
            counters.useful_tokens += 4
            keeper.stepped(number * 0.01, number * 0.01 + 0.005)
            keeper.due(0.0)
        return (time.thread_time() - began) / 2_000

    per_token, per_step = min(tokens() for _ in range(7)), min(steps() for _ in range(7))
    keeper.close()
    print(f"{per_token * 1e6:.2f} µs a token, {per_step * 1e6:.2f} µs a step")
    assert per_token <= 2e-6 and per_step <= 20e-6


def test_prometheus_client_is_no_part_of_the_server() -> None:
    code = "import ridgeline.server.app, sys; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- a server ----------------------------------------------------------------------------------------------------------

ENDLESS = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    model = write_model(folder / "tiny")
    options = ("--load-format", "dummy", "--num-gpu-blocks-override", "600", "--max-num-seqs", "2",
               "--admin-socket", str(folder / "admin"), "--access-log", str(folder / "log"))
    with ServerProcess(str(model), *options) as made:
        yield made.url


def scrape(url: str) -> dict[str, float]:
    return samples(httpx.get(f"{url}/metrics").raise_for_status().text)


def complete(url: str, **body: Any) -> dict[str, Any]:
    given = {"prompt": list(range(40)), "max_tokens": 8, "temperature": 0, "ignore_eos": True} | body
    reply = httpx.post(f"{url}/v1/completions", json=given, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_the_numbers_are_those_of_what_was_asked(server: str) -> None:
    wait_until(lambda: scrape(server)["vllm:num_requests_running"] == 0)
    before = scrape(server)
    for _ in range(2):
        complete(server, prompt=[9] * 40, n=2)
    after = before

    def grown(name: str) -> float:
        return after[name] - before[name]

    def has_reported() -> bool:
        """The engine's last word about it: both prompts, and nothing runs."""
        nonlocal after
        after = scrape(server)
        idle = after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
        return idle and grown("vllm:prefix_cache_queries_total") >= 80

    wait_until(has_reported)

    assert grown("vllm:prompt_tokens_total") == 80 and grown("vllm:generation_tokens_total") == 32
    assert grown("vllm:request_success_total{finished_reason=length}") == 4
    assert grown("vllm:prefix_cache_queries_total") >= 80 and grown("vllm:prefix_cache_hits_total") >= 32
    for name, count in {"time_to_first_token_seconds": 4, "inter_token_latency_seconds": 28, "e2e_request_latency_seconds": 4,
                        "request_queue_time_seconds": 4, "request_prefill_time_seconds": 4, "request_generation_tokens": 4,
                        "request_time_per_output_token_seconds": 4}.items():
        assert grown(f"vllm:{name}_count") == count, name
    assert grown("vllm:request_generation_tokens_sum") == 32
    assert grown("ridgeline:step_seconds_count") == grown("vllm:iteration_tokens_total_count") > 0
    inside = sum(grown(f"vllm:{name}_sum") for name in (
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"))
    assert 0 < inside <= grown("vllm:e2e_request_latency_seconds_sum")
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
    assert after["ridgeline:engine_up"] == 1


def sent(url: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody has read yet."""
    host, port = url.removeprefix("http://").split(":")
    connection, content = socket.create_connection((host, int(port)), timeout=60), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.reliability("B-09")
def test_what_runs_and_waits_is_seen_and_who_leaves_is_counted(server: str) -> None:
    before = scrape(server)
    body = {"prompt": [5] * 100, "stream": True, "temperature": 0} | ENDLESS
    with httpx.Client(timeout=60) as client:
        streams = [client.stream("POST", f"{server}/v1/completions", json=body) for _ in range(2)]
        lines = [each.__enter__().iter_lines() for each in streams]
        for each_line in lines:
            next(each_line)
        with sent(server, body | {"n": 3, "prompt": [6] * 50}):          # it gets no row, and so no first word
            wait_until(lambda: scrape(server)["vllm:num_requests_waiting"] == 3)
            wait_until(lambda: scrape(server)["vllm:kv_cache_usage_perc"] > 0.02)
            busy, load = scrape(server), httpx.get(f"{server}/load").json()
            assert busy["vllm:num_requests_running"] == 2
            assert busy["ridgeline:queued_prompt_tokens"] == load["queued_tokens"] == 50
            assert (load["server_load"], load["running"], load["waiting"]) == (3, 2, 3)
        wait_until(lambda: scrape(server)["vllm:num_requests_waiting"] == 0)
        for each in streams:
            each.__exit__(None, None, None)
    wait_until(lambda: scrape(server)["vllm:num_requests_running"] == 0)
    after = scrape(server)
    assert after["ridgeline:requests_aborted_total"] - before["ridgeline:requests_aborted_total"] == 3
    aborted = "vllm:request_success_total{finished_reason=abort}"
    assert after[aborted] - before[aborted] == 5
    assert httpx.get(f"{server}/load").json() == {
        "server_load": 0, "running": 0, "waiting": 0, "queued_tokens": 0, "predicted_wait": 0.0
    }


def test_formats(server: str) -> None:
    plain = httpx.get(f"{server}/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    asked = httpx.get(f"{server}/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert asked.headers["content-type"].startswith("application/openmetrics-text") and asked.text.endswith("# EOF\n")
    assert len(list(openmetrics_families(asked.text))) == len(golden())


TIMES = ("queue", "prefill", "first_token", "decode", "total")


def test_timings_come_when_asked_for(server: str) -> None:
    assert "timings" not in complete(server)
    told = complete(server, return_timings=True, max_tokens=20)["timings"]
    assert all(told[name] >= 0 for name in TIMES) and told["decode"] > 0
    assert told["total"] >= told["queue"] + told["prefill"] and told["total"] >= told["decode"]
    assert told["tokens_per_second"] == pytest.approx(19 / told["decode"], rel=0.01)
    assert "prefix caching" in told["techniques"] and "CUDA graphs" not in told["techniques"]
    assert told["cached_tokens"] == 32                   # the first of these requests left them there
    headers = {"x-ridgeline-timings": "true"}
    body = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server}/v1/completions", json=body, headers=headers) as reply:
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and ["timings" in json.loads(event) for event in events[-3:-1]] == [False, True]


def test_a_request_without_prefix_caching(server: str) -> None:
    prompt = [77] * 64
    complete(server, prompt=prompt)
    off = complete(server, prompt=prompt, techniques={"prefix_caching": False}, return_timings=True)["timings"]
    on = complete(server, prompt=prompt, techniques={"prefix_caching": True}, return_timings=True)["timings"]
    assert (off["cached_tokens"], on["cached_tokens"]) == (0, 48)
    assert "prefix caching" not in off["techniques"] and "prefix caching" in on["techniques"]
    refused = httpx.post(f"{server}/v1/completions", json={"prompt": "a", "techniques": {"overlap": False}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "techniques.overlap cannot be switched by a request; prefix_caching can"


def test_the_access_log_has_the_timings(server: str, folder: Path) -> None:
    def lines() -> list[Any]:
        whole = (folder / "log").read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, whole) if "prompt_tokens" in line]

    before = len(lines())
    complete(server, prompt=[88] * 40, techniques={"prefix_caching": False})
    wait_until(lambda: len(lines()) > before)            # written behind the answer; a health check's line may follow it
    line = lines()[-1]
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (40, 8, ["length"])
    assert line["timings"]["decode"] > 0 and "prefix caching" not in line["timings"]["techniques"]
    assert "88" not in json.dumps(line["timings"]["techniques"])


def ask(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "ridgeline", "admin", str(folder / "admin"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_a_technique_is_switched_on_the_live_server(server: str, folder: Path) -> None:
    assert stat.S_IMODE((folder / "admin").stat().st_mode) == 0o600
    prompt = [99] * 64
    first = complete(server, prompt=prompt)
    code, answer, _ = ask(folder, "switch", "prefix caching", "off")
    assert code == 0 and "prefix caching" not in answer["techniques"] and "paged KV" in answer["techniques"]
    second = complete(server, prompt=prompt, return_timings=True)
    assert second["timings"]["cached_tokens"] == 0 and "prefix caching" not in second["timings"]["techniques"]
    assert second["choices"] == first["choices"]
    assert "prefix caching" in ask(folder, "switch", "prefix caching", "on")[1]["techniques"]
    assert complete(server, prompt=prompt, return_timings=True)["timings"]["cached_tokens"] == 48
    assert ask(folder, "load")[1]["server_load"] == 0
    code, _, error = ask(folder, "switch", "overlap", "off")
    assert (code, error) == (2, "ridgeline: error: overlap cannot be switched: the engine was started without it\n")
    assert ask(folder, "switch")[0] == 2
    code, _, error = ask(folder / "nowhere", "load")
    assert code == 2 and error.startswith("ridgeline: error: no server answers at") and error.count("\n") == 1


def test_the_admin_socket_takes_any_line(server: str, folder: Path) -> None:
    for line, says in ((b"{", "truncated"), (b'{"command": "stop"}', "command must be one of techniques, switch, load"),
                       (b'{"command": 1}', "Expected `str`"), (b"\xff\xfe", ""), (b"[" * 3000, ""), (b'{"command": "\xff"}', ""),
                       (b'{"command": "profile", "steps": 0}', ">= 1"),
                       (b'{"command": "profile", "steps": 1' + b"0" * 30 + b"}", "")):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(folder / "admin"))
            link.sendall(line + b"\n")
            assert says in json.loads(link.makefile().readline())["error"]
    with socket.socket(socket.AF_UNIX) as link:          # a line without end is cut off
        link.connect(str(folder / "admin"))
        link.sendall(b"x" * 100_000)
        assert link.recv(1) == b""
    assert ask(folder, "techniques")[0] == 0


def test_counters_outlive_the_engine(tmp_path: Path) -> None:
    async def use() -> tuple[list[dict[str, float]], list[int]]:
        options = {"load_format": "dummy", "num_gpu_blocks_override": 100, "max_num_seqs": 2}
        llm = AsyncLLM(write_model(tmp_path / "tiny"), supervision=Supervision(max_restarts=1), **options)
        seen, tokens = [], []
        async with llm:
            await llm.switch("prefix caching", False)
            for killed in (False, True):
                stream = await llm.stream([[1, 2, 3]], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
                if killed:
                    async for _ in stream:               # its first tokens are here; it goes on in the next engine
                        break
                    assert llm._engine.process is not None
                    os.kill(llm._engine.process.pid, signal.SIGKILL)
                outputs = await stream.complete()
                tokens.append(len(outputs[0].outputs[0].token_ids))
                least = 31 if killed else 30
                async with asyncio.timeout(60):          # the engine's last report
                    while (told := samples(written(families(llm), COMMON)))["vllm:iteration_tokens_total_count"] < least:
                        await asyncio.sleep(0.01)
                seen.append(told)
                assert llm.ready is not None and "prefix caching" not in llm.ready.techniques    # the next engine, too
        return seen, tokens

    (before, after), tokens = asyncio.run(use())
    assert tokens == [30, 30]
    assert (before["ridgeline:engine_restarts_total"], after["ridgeline:engine_restarts_total"]) == (0, 1)
    assert after["vllm:generation_tokens_total"] == 60 and after["vllm:prompt_tokens_total"] == 6
    assert after["vllm:request_success_total{finished_reason=length}"] == 2
    # What the second engine did comes on top of what the first had reported.
    assert after["ridgeline:steps_total"] > before["ridgeline:steps_total"] >= 30
    assert after["vllm:iteration_tokens_total_count"] == after["ridgeline:step_seconds_count"] > 30


def test_timings_of_nothing() -> None:
    assert timings(AsyncLLM(), []).tokens_per_second is None

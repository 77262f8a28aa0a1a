"""`ridgeline diagnose`: a workload in process, a server from outside, what a change would gain, and slow steps' causes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served_model import ServerProcess, write_model
from trace_cases import PLANTED
from verdict_cases import CAPPED

from ridgeline.__main__ import main
from ridgeline.bench.lab.table import as_markdown
from ridgeline.bench.load.latency import parse_slo
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.config import EngineConfig
from ridgeline.diagnose import as_text, diagnosis
from ridgeline.diagnose.attach import all_steps, application, attach, histogram, part_below, quantile, read_samples
from ridgeline.diagnose.diagnosis import WARM_UP, run_load, warm_up, whole_window, with_seen_launches
from ridgeline.diagnose.driven_run import Load, drive
from ridgeline.diagnose.tuning_loop import Scenario, follow, quality_of_all, table_row
from ridgeline.diagnose.what_if import Speeds, WhatIf, cases, emptied, measured_speeds, planned_log
from ridgeline.engine.core.profile import LiveProfile, StepProfiler
from ridgeline.errors import ConfigError
from ridgeline.gpus.clocks import shown
from ridgeline.metrics import SLOW_CAUSES
from ridgeline.ops import registry
from ridgeline.plan.prediction import fitted
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.drill import steps_section
from ridgeline.roofline.facts import Facts
from ridgeline.roofline.parts import PARTS, floors
from ridgeline.roofline.slow import StepTimes, cause_of, slowest
from ridgeline.roofline.trace import KNOWN, read_trace
from ridgeline.roofline.vectorised import StepCosts
from ridgeline.roofline.verdict import Setting, Window, judge
from ridgeline.runner.start.measure_peaks import machine_peaks
from ridgeline.runner.worker import device_facts

OPTIONS = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "dtype": "float32"}
WORDS = ["--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), hidden_size=64)


# -- slow steps --------------------------------------------------------------------------------------------------------


STEP = StepTimes(1.0, 0.1, 0.09, "decode", 8, 8)


@pytest.mark.parametrize(("changes", "cause"), [
    ({"collecting": 0.08}, "garbage_collection"), ({"compiled": 1}, "kernel_compile"), ({"recorded": 2}, "graph_recording"),
    ({"allocated": 1}, "allocation"), ({"lost": 0.08}, "processor_taken"), ({"between": 0.07}, "between_steps"),
    ({"preemptions": 1}, "preemption"), ({"prompt_tokens": 100}, "prompt_tokens"), ({}, "device"), ({"device": 0.01}, "unknown"),
    ({"collecting": 0.08, "lost": 0.08, "allocated": 1}, "garbage_collection"),
    ({"lost": 0.01, "prompt_tokens": 9}, "prompt_tokens"),
])
def test_slow_steps_have_a_cause(changes: dict[str, Any], cause: str) -> None:
    assert cause_of(replace(STEP, **changes), 0.01) == cause
    assert cause in SLOW_CAUSES


def test_the_slowest_hundredth() -> None:
    steps = [replace(STEP, seconds=0.01, device=0.008)] * 297 + [replace(STEP, compiled=1), replace(STEP, recorded=1), STEP]
    found = slowest(steps)
    assert found["count"] == 3 and found["causes"] == {"kernel_compile": 1, "graph_recording": 1, "device": 1}
    assert found["share_of_time"] == pytest.approx(0.3 / (0.3 + 2.97)) and found["median_ms"] == 10
    assert [row["step"] for row in found["steps"]] == [297, 298, 299]
    section = steps_section(steps)
    assert section["host"] == pytest.approx(297 * 0.002 + 3 * 0.01) and section["phases"]["decode"]["steps"] == 300
    assert slowest([])["count"] == 0


# -- what a change would gain ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"max_num_seqs": 2}, {"batching": "static", "max_num_seqs": 2}, {"max_num_batched_tokens": 32},
    {"num_gpu_blocks_override": 10, "max_num_seqs": 4, "max_model_len": 64},
], ids=str)
def test_planning_alone_gives_the_steps_of_the_engine(model: Path, options: dict[str, Any]) -> None:
    """The law that predictions stand on: row by row the same steps, though nothing is computed."""
    load = Load(6, 40, 24, shared=32, shortest=4)
    engine = Engine(str(model), **OPTIONS | {"enable_prefix_caching": True} | options)
    peaks = machine_peaks("cpu")
    real, planned = run_load(engine, load, peaks, "").log.rows, planned_log(engine.config, load).rows
    preempted = engine.core.scheduler.counters.preemptions
    engine.close()
    assert real.counts == planned.counts
    for name in ("new", "wants", "lengths"):
        for mine, theirs in zip(getattr(real, name), getattr(planned, name), strict=True):
            assert np.array_equal(mine, theirs), name
    assert bool(preempted) == ("num_gpu_blocks_override" in options)


SHAPE = DecoderShape(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=30, vocab=49152,
                     weight_bytes=4, kv_bytes=4, activation_bytes=4)


def test_speeds_are_found_again() -> None:
    """Own times made of known speeds give those speeds, and price the steps at what they took."""
    steps = StepCosts(SHAPE)
    new = np.array([200] + [1] * 40, np.int32)
    costs = steps.of(np.ones(41, int), new, 200 + np.arange(41, dtype=np.int32), np.ones(41, np.int8), np.zeros(41, int),
                     np.zeros(41, bool))
    known = Speeds(20e9, 1e11, {"norms": 1e-3}, dict.fromkeys(PARTS, 2.0), dict.fromkeys(PARTS, 1.5), 0.002, 0.001)
    own = {
        part: known.least.get(part, 0.0) + reads * 2.0 + computes * (1.5 if part == "linears and head" else 2.0)
        for part, (reads, computes) in floors(costs, 20e9, 1e11).items()
    }
    device = np.sum(list(own.values()), axis=0) + 0.002
    found = measured_speeds(costs, own, device.tolist(), [0.001] * 41, 20e9, 1e11, False)
    assert found.reading["linears and head"] == pytest.approx(2.0)
    assert found.computing["linears and head"] == pytest.approx(1.5, rel=0.02)        # the head of a prompt only reads
    assert found.least["norms"] == pytest.approx(1e-3, rel=0.01) and found.reading["norms"] == pytest.approx(2.0, rel=0.01)
    assert found.beside == pytest.approx(0.002) and found.host == 0.001
    assert found.price(costs) == pytest.approx(device.sum() + 41 * 0.001, rel=0.02)


def test_a_few_large_steps_say_how_time_grows_where_small_ones_have_the_part_inside_another() -> None:
    """Norms that a product's kernel does for few rows: their price is that of the steps in which they are kernels."""
    steps = StepCosts(SHAPE)
    rows = np.array([1] * 6 + [16] * 8 + [8000] * 4, np.int32)
    count = len(rows)
    costs = steps.of(np.ones(count, int), rows, rows, np.ones(count, np.int8), np.zeros(count, int), np.zeros(count, bool))
    reads, computes = floors(costs, 20e9, 1e11)["norms"]
    own = {"norms": np.where(rows == 1, 0.0, np.where(rows == 16, 10.0, 0.5) * (reads + computes))}
    found = measured_speeds(costs, own, own["norms"].tolist(), [0.0] * count, 20e9, 1e11, False)
    assert found.reading["norms"] == pytest.approx(0.5) and found.least["norms"] == 0.0
    assert 0.5 * (reads + computes).sum() == pytest.approx(own["norms"].sum(), rel=0.1)


def what_if(model: Path, load: Load, **options: Any) -> WhatIf:
    """On a machine on which the weights are all that counts."""
    config = EngineConfig.of(model=str(model), **OPTIONS | options)
    return WhatIf(resolve(config, device_facts(config)), load, Speeds(1e9, 1e15, {}, {}, {}, 0.0, 0.0), None)


def gains(made: WhatIf, preemptions: int = 0) -> dict[str, float]:
    return {each.key: each.gain for each in made.changes(preemptions)}


def test_rows_share_the_weights(model: Path) -> None:
    """Eight requests one by one, or all at once: weights are read once a step, and that is nearly all there is."""
    one = what_if(model, Load(8, 1, 30), max_num_seqs=1, block_size=16)
    [change] = [each for each in one.changes(0) if each.key == "rows"]
    assert change.options == {"max_num_seqs": 8} and 4 < change.gain < 8
    # As many as there are already: there is nothing to change.
    assert "rows" not in gains(what_if(model, Load(8, 1, 30), max_num_seqs=8))
    few = what_if(model, Load(8, 1, 30, concurrency=2), max_num_seqs=8)
    [change] = [each for each in few.changes(0) if each.key == "rows"]
    assert "requests at once" in change.what and not change.options


def test_caching_gains_where_prompts_begin_alike(model: Path) -> None:
    compute_bound = Speeds(1e15, 1e6, {}, {}, {}, 0.0, 0.0)
    alike = replace(what_if(model, Load(6, 96, 2, shared=80), enable_prefix_caching=False), speeds=compute_bound)
    apart = replace(what_if(model, Load(6, 96, 2), enable_prefix_caching=False), speeds=compute_bound)
    # Of 6 x 96 tokens, all but the first 80 of five requests.
    assert gains(alike)["prefix"] == pytest.approx(6 * 96 / (6 * 96 - 5 * 80), rel=0.15)
    assert gains(apart)["prefix"] == pytest.approx(1.0)


def test_static_batches_and_small_caches_are_priced(model: Path) -> None:
    static = what_if(model, Load(12, 8, 60, shortest=4), batching="static", max_num_seqs=4)
    assert gains(static)["continuous"] > 1.2
    tight = what_if(model, Load(8, 60, 60), num_gpu_blocks_override=12, max_num_seqs=8, max_model_len=128)
    found = gains(tight, preemptions=3)
    assert found["blocks"] > 1.2 and "admission" in found


def test_recorded_graphs_leave_a_launch_for_every_kernel(model: Path) -> None:
    config = what_if(model, Load(1, 8, 8), enforce_eager=True).config
    on_gpu = replace(config, device="cuda")
    [graphs] = [case for case in cases(on_gpu, Load(1, 8, 8), 0) if case.key == "graphs"]
    speeds = Speeds(1e9, 1e15, {}, {}, {}, 24e-3, 0.0, recorded=0.24e-3)
    assert graphs.speeds(speeds).beside == 0.24e-3 and graphs.speeds(replace(speeds, beside=1e-4)).beside == 1e-4


def test_narrow_pages_are_read_as_fast_as_their_kernels_do(model: Path) -> None:
    """Half of the bytes are no half of the time where a kernel widens them: a gain is promised only as far as it is known."""
    config = what_if(model, Load(1, 8, 8)).config
    on_gpu = replace(config, device="cuda", dtype="bfloat16", narrower=("--quantization fp8", "--kv-cache-dtype fp8"))
    [kv8] = [case for case in cases(on_gpu, Load(1, 8, 8), 0) if case.key == "--kv-cache-dtype fp8"]
    assert not any("fp8" in case.what for case in cases(replace(on_gpu, narrower=()), Load(1, 8, 8), 0)), "an A100 has none"
    slow = kv8.speeds(Speeds(1e9, 1e15, {}, {"attention": 1.5}, {}, 0.0, 0.0))
    assert slow.reading["attention"] == pytest.approx(1.5 / fitted().narrow_kv_read)
    assert slow.computing["attention"] == pytest.approx(1 / fitted().narrow_kv_compute)


def test_a_window_is_without_what_others_took_and_never_above_its_roof(model: Path) -> None:
    engine = Engine(str(model), **OPTIONS)
    run = run_load(engine, Load(2, 8, 8), machine_peaks("cpu"), "")
    engine.close()
    for sums in run.log.sums.values():
        sums.on_compute, sums.on_weights, sums.on_kv, sums.on_activations = 30 * sums.device, 10 * sums.device, 0.0, 0.0
    run.log.times[:] = [replace(step, lost=0.75 * step.seconds) for step in run.log.times]
    window, whole = whole_window(run), sum(sums.seconds for sums in run.log.sums.values())
    assert window.busy == pytest.approx(whole / 4) and window.roof == pytest.approx(window.device)
    assert window.on_compute == pytest.approx(3 * window.on_weights)


def test_gaps_between_kernels_are_launching() -> None:
    """Steps at an eighth of their roof: in the trace, four fifths of the time lie between kernels, whatever was predicted."""
    window = Window(2.8, 2.8, 2.7, on_weights=0.33, launch=0.2, running=1, steps=96)
    assert judge(window, Setting(graphs=False)).term == "implementation"
    found = judge(with_seen_launches(window, Facts("cuda", 2.5, 96, 0.4, {}, launch=2.0)), Setting(graphs=False))
    assert found.term == "launch" and found.share == pytest.approx(0.8) and "CUDA graphs" in found.changes[0].what
    small = Facts("cuda", 2.5, 96, 2.4, {}, launch=0.01)
    assert judge(with_seen_launches(window, small), Setting(graphs=False)).term == "implementation"
    assert with_seen_launches(window, Facts("cpu", 2.5, 96, 0.4, {}, launch=2.0)) == window      # ops on a CPU are not launched


# -- in process ------------------------------------------------------------------------------------------------------


def test_a_workload_is_diagnosed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("trace", "out")} | {"html": tmp_path / "page.html"}
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    asked = ["--num-prompts", "4", "--input-len", "24", "--output-len", "12", "--max-num-seqs", "1", "--slo", "ttft:1e5,tpot:1e5"]
    assert main(["diagnose", str(model), *WORDS, *asked, *words]) == 0
    page = capsys.readouterr().out
    titles = re.findall(r"── (.*?) ──", page)
    assert titles == [
        "application", "steps", "ops and kernels", "patterns in the trace", "verdict",
        "what to change, largest predicted gain first", "what no setting changes: work on the engine's code",
    ]
    assert "100% met it" in page and "the profiler's own cost" in page
    made = json.loads(files["out"].read_text())
    tree = made["figures"]
    assert made["quality"] == "exact" and made["workload"]["tokens_in"] == 24
    assert tree["application"]["total_output_tokens"] == 48 and tree["application"]["slo_attainment"] == 1
    assert tree["steps"]["count"] == 48 and set(tree["steps"]["phases"]) == {"prefill", "decode"}
    assert tree["ops"]["steps"] == tree["profiler"]["steps"] == 48
    parts = {row["part"]: row for row in tree["ops"]["parts"]}
    # Two layers of four products and the head; the last layer of a prompt goes on with one token.
    assert parts["linears and head"]["calls_per_step"] == 9 and parts["attention"]["calls_per_step"] == 2
    assert all(parts[name]["floor_ms_per_step"] > 0 for name in ("linears and head", "attention", "norms"))
    rows = next(each for each in tree["remedies"] if each["options"])
    assert rows["options"] == {"max_num_seqs": 4} and rows["gain"] > 1.1 and rows["trade_off"]
    html = files["html"].read_text()
    assert "<svg" in html and "Steps under the roof" in html and not re.search(r"(src|href)=|<script|@import|https?:", html)
    # The trace is one that we read ourselves, and marks have gone.
    assert main(["diagnose", "--from-trace", str(files["trace"]), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["figures"]["ops"]
    assert again["steps"] == 48 and {row["part"] for row in again["parts"]} >= {"linears and head", "attention", "norms"}
    known = json.loads(files["trace"].read_text())["ridgeline"]
    assert len(known["kept"]) == 48 and known["profiler_s"] >= 0
    assert again["gaps"] == pytest.approx(tree["ops"]["gaps"])           # the profiler's cost is off in both
    assert registry._mark is None


def test_marks_leave_the_engine_as_it_was(model: Path) -> None:
    engine = Engine(str(model), **OPTIONS)
    core, load = engine.core, Load(2, 8, 4)
    before = dict(vars(core.executor)), dict(vars(core.scheduler))
    asked = load.asked(256)
    with StepProfiler(core) as profiler:
        drive(core, asked, 2, "p", profiler.step)
    names = {event["name"] for event in profiler.document()["traceEvents"]}
    assert {"step", "phase:schedule", "phase:launch", "phase:update", "op:paged_attention"} <= names
    assert before[0] == vars(core.executor) and "schedule" not in vars(core.scheduler)
    engine.close()


def test_a_running_engine_profiles_some_of_its_steps(model: Path) -> None:
    """Between others, in the middle of its work; then it goes on as before."""
    engine = Engine(str(model), **OPTIONS)
    core = engine.core
    core.recorder.use(machine_peaks("cpu"))
    for prompt, _ in Load(2, 8, 40).asked(256):
        engine.submit(prompt, 40)
    for _ in range(20):
        core.step()
    live = LiveProfile(core, 8)
    while not live.is_over:
        live.step()
    found = live.finish()
    path = Path(found.trace)
    steps = read_trace(json.loads(path.read_text())).steps
    assert len(steps) == 8 and path.parent.stat().st_mode & 0o77 == 0
    # Eight decode steps of two rows in two layers of four products, and the head.
    assert found.costs["linears and head"]["calls"] == 8 * 9 and found.costs["attention"]["floor"] > 0
    while core.has_work:
        core.step()
    assert registry._mark is None and "took" not in vars(core.recorder)
    nothing = LiveProfile(core, 8).finish()
    assert "nothing to do" in nothing.refused and not nothing.trace
    engine.close()
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("fault", ["folder", "file"])
def test_a_trace_that_cannot_be_written_costs_no_engine(
    fault: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of temporary files has gone, or is full: torch then leaves a part of the file, and says nothing."""
    engine = Engine(str(model), **OPTIONS)
    core = engine.core
    engine.submit([1, 2, 3], 8)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone" if fault == "folder" else tmp_path))
    monkeypatch.setattr(StepProfiler, "write", lambda self, path: path.with_suffix(".json.tmp").write_text("{"))
    live = LiveProfile(core, 2)
    while not live.is_over:
        live.step()
    found = live.finish()
    assert "the trace cannot be written" in found.refused and not found.trace
    assert not list(tmp_path.iterdir())
    while core.has_work:
        core.step()
    engine.close()


def test_a_run_that_is_cut_short_leaves_nothing_behind(model: Path) -> None:
    engine = Engine(str(model), **OPTIONS)
    outcomes = drive(engine.core, Load(4, 8, 50).asked(256), 4, "cut", most_steps=5)
    assert not engine.core.has_work and all(outcome.tokens_out < 10 for outcome in outcomes)
    assert all(outcome.tokens_out == 4 for outcome in drive(engine.core, WARM_UP.asked(256), 1, "next"))
    engine.close()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_changed_engine_has_the_memory_of_this_one(model: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine that is diagnosed in it, there is no room on the device for another one."""
    made = what_if(model, Load(8, 1, 30), max_num_seqs=1, block_size=16)
    own = sum(made.config.memory.values())
    total = 20 * own
    crowded = DeviceFacts("cpu", 1, ("float32",)) if device == "cpu" else DeviceFacts("cuda", total, ("float32",), 0, 1)
    found = emptied(crowded, made.config)
    assert (found.memory, found.free) == ((own + 1, 0) if device == "cpu" else (total, own + 1))
    # 1 MiB is not enough for eight rows; with the memory of this engine, which has one, it is.
    monkeypatch.setattr("ridgeline.diagnose.what_if.device_facts", lambda config: DeviceFacts("cpu", 2**20, ("float32",)))
    changed = EngineConfig.of(model=str(model), **OPTIONS | {"max_num_seqs": 8, "block_size": 16})
    with pytest.raises(ConfigError, match="the largest that fits"):
        resolve(changed, DeviceFacts("cpu", 2**20, ("float32",)))
    assert gains(made)["rows"] > 4


def test_one_round_of_the_loop(model: Path) -> None:
    scenario = Scenario("rows", "one row", Load(4, 16, 12), OPTIONS | {"max_num_seqs": 1})
    found = follow(str(model), scenario, 2)
    assert found["change"]["options"] == {"max_num_seqs": 4} and found["predicted_gain"] > 1.1
    assert found["achieved_gain_processor"]["median"] > 1.1 and found["achieved_gain"]["median"] > 0
    assert found["before"]["steps"] > 2 * found["after"]["steps"] and found["quality"] == "exact"
    assert found["workload"]["model"] == found["workload"]["options"]["model"] == model.name     # no path of this machine


def test_a_loop_that_finds_nothing_to_change_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.diagnose.diagnosis.ranked", lambda *given: [])
    found = follow(str(model), Scenario("fine", "nothing", Load(2, 8, 4), OPTIONS), 2)
    assert found["change"] is None and "achieved_gain" not in found and found["quality"] == "exact"
    assert "| none (no engine option) |" in as_markdown([table_row("fine", found)])


def test_the_quality_of_a_loop_is_that_of_all_its_engines(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ridgeline.diagnose.tuning_loop.quality_of", lambda config: "fp8 KV" if config.max_num_seqs == 4 else "exact"
    )
    found = follow(str(model), Scenario("rows", "one row", Load(4, 16, 12), OPTIONS | {"max_num_seqs": 1}), 2)
    assert found["quality"] == "fp8 KV"                  # of the engine that was recommended
    assert quality_of_all({"a": {"quality": "exact"}, "b": found, "c": {"quality": "fp8 KV, other"}}) == "fp8 KV, other"
    assert quality_of_all({"a": {"quality": "exact"}}) == "exact"


def test_a_gpu_goes_through_the_load_before_it_is_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its steps need is compiled and recorded then."""
    engine = Engine(str(model), **OPTIONS)
    sent: list[int] = []
    monkeypatch.setattr("ridgeline.diagnose.diagnosis.drive", lambda core, asked, *more: sent.append(len(asked)))
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(engine.core, "config", replace(engine.config, device=device))
        warm_up(engine, Load(5, 16, 2))
    assert sent == [WARM_UP.prompts, 5]
    engine.close()


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_the_documents_figures_are_those_of_the_record(machine: str) -> None:
    root = Path(__file__).resolve().parents[2]
    made = json.loads((root / f"benchmarks/{machine}/diagnose-loop.json").read_text())
    rows = [table_row(name, found) for name, found in made["figures"].items()]
    assert len(rows) >= 3 and as_markdown(rows) in (root / "docs/diagnose.md").read_text()
    assert sum(found["change"] is not None for found in made["figures"].values()) >= 3       # predicted against achieved


@pytest.mark.parametrize(("words", "message"), [
    (["--num-prompts", "0"], "--num-prompts must be at least 1"), (["--shared-prefix", "128"], "--shared-prefix must be below"),
    (["--shape", "nothing"], "unknown shape"), (["--slo", "speed:3"], "not an objective"),
    (["--html", "/nowhere/at/all"], "no such directory"), (["http://127.0.0.1:1", "--seconds", "1"], "no server answers"),
    (["http://127.0.0.1:1", "--seconds", "500"], "--seconds must be"),
    (["--tensor-parallel-size", "2"], "in one process"),
])
def test_wrong_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# -- from outside ----------------------------------------------------------------------------------------------------


def buckets(name: str, counts: dict[str, int]) -> str:
    return "\n".join(f'{name}_bucket{{model_name="m",engine="0",le="{bound}"}} {count}' for bound, count in counts.items())


def metrics(times: int) -> str:
    """So many times: ten requests, 100 tokens each; TTFT 4 up to 0.1 s and 6 up to 0.2; TPOT 9 up to 0.02, one up to 0.04."""
    return "\n".join([
        "# HELP vllm:request_success_total Answers.",
        f'vllm:request_success_total{{model_name="m",engine="0",finished_reason="length"}} {10 * times}',
        f'vllm:generation_tokens_total{{model_name="m",engine="0"}} {1000 * times}',
        f'vllm:prompt_tokens_total{{model_name="m",engine="0"}} {500 * times}',
        buckets("vllm:time_to_first_token_seconds", {"0.1": 4 * times, "0.2": 10 * times, "+Inf": 10 * times}),
        buckets("vllm:request_time_per_output_token_seconds", {"0.02": 9 * times, "0.04": 10 * times, "+Inf": 10 * times}),
        f'ridgeline:slow_steps_total{{model_name="m",engine="0",cause="preemption"}} {3 * times}',
        'ridgeline:slow_steps_total{model_name="m",engine="0",cause="unknown"} 0',
        f'vllm:num_preemptions_total{{model_name="m",engine="0"}} {2 * times}', "",
    ])


def roofline() -> dict[str, Any]:
    fields = ["at", "phase", "tokens", "rows", "flops", "bytes", "seconds", "device", "compute", "memory"]
    steps = [[0.9 - 0.01 * number, 1, 4, 4, 1e9, 1e8, 0.01, 0.008, 0.001, 0.005] for number in range(50)]
    return {
        "model": "m", "machine": {"device": "a GPU", "read_bytes_s": 1e11, "flops_s": 1e13},
        "utilisation": {"mfu": 0.1}, "batch": {"running": 4},
        "phases": {"decode": {"mfu": 0.1, "hfu": 0.1, "mbu": 0.6}},
        "points": {"fields": fields, "phases": ["prefill", "decode", "mixed"], "values": steps},
        "verdict": {
            "term": "weight_bandwidth", "share": 0.6, "headroom": 1.7, "why": "reading the weights takes 60 % of the time",
            "changes": [{"what": "8-bit weights", "gain": 1.4, "trade_off": "quality: `ridgeline eval`"}],
            "parts": {"weight_bandwidth": 6.0, "host": 1.0},
        },
    }


class Canned(BaseHTTPRequestHandler):
    asked = 0
    key = ""

    def do_GET(self) -> None:
        if self.key and self.headers.get("authorization") != f"Bearer {self.key}":
            self.send_error(401)
            return
        if self.path == "/metrics":
            type(self).asked += 1
            body = metrics(1 + type(self).asked)
        elif self.path.startswith("/roofline?seconds="):
            body = json.dumps(roofline())
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def canned() -> Iterator[tuple[str, type[Canned]]]:
    handler = type("Handler", (Canned,), {"asked": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()


def test_a_server_is_watched(canned: tuple[str, type[Canned]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = canned
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    assert main(["diagnose", url, "--seconds", "1", "--slo", "ttft:150,tpot:20", "--trace", str(trace), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "bound by weight_bandwidth" in shown and "8-bit weights: 1.40×" in shown and "preemption 3" in shown
    # 7 of 10 had their first token within 150 ms, 9 had 20 ms a token: 6 to 7 of them had both.
    assert "between 60% and 70% met it" in shown and "10 requests answered" in shown
    steps = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "decode step"]
    assert len(steps) == 50 and "Every step" in page.read_text()


def test_a_server_at_its_power_limit_is_told(
    canned: tuple[str, type[Canned]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = roofline()
    said["verdict"] |= {"term": "power", "why": f"power binds: {CAPPED.line}"}
    monkeypatch.setitem(globals(), "roofline", lambda: said | {"gpu": shown(CAPPED)})
    assert main(["diagnose", canned[0], "--seconds", "1"]) == 0
    text = capsys.readouterr().out
    assert "bound by power: power binds: 692 of 700 W" in text and "GPU: 692 of 700 W, SM clock 1,275 of 1,980 MHz" in text


IMPOSSIBLE = [
    {"watts": 3}, dict.fromkeys(shown(CAPPED), "x"), [1], shown(CAPPED) | {"max_sm_mhz": 0}, shown(CAPPED) | {"watts": "nan"},
]


@pytest.mark.parametrize("gpu", IMPOSSIBLE)
def test_clocks_that_are_none_are_one_line(
    gpu: Any, canned: tuple[str, type[Canned]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = roofline() | {"gpu": gpu}
    monkeypatch.setitem(globals(), "roofline", lambda: said)
    assert main(["diagnose", canned[0], "--seconds", "1"]) != 0
    assert "does not answer as a Ridgeline server does" in capsys.readouterr().err


def test_a_trace_keeps_the_clocks_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(each for each in PLANTED if each.expected == "power lowers the clock")
    plain = case.builders[0].document()
    for name, document in (("plain", plain), ("capped", plain | {KNOWN: {"gpu": shown(CAPPED)}})):
        (tmp_path / name).write_text(json.dumps(document))
        assert main(["diagnose", "--from-trace", str(tmp_path / name)]) == 0
        assert ("power lowers the clock: 692 of 700 W" in capsys.readouterr().out) == (name == "capped")


@pytest.mark.parametrize("gpu", IMPOSSIBLE)
def test_a_trace_with_clocks_that_are_none_is_refused_in_one_line(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(each for each in PLANTED if each.expected == "power lowers the clock")
    (tmp_path / "trace").write_text(json.dumps(case.builders[0].document() | {KNOWN: {"gpu": gpu}}))
    assert main(["diagnose", "--from-trace", str(tmp_path / "trace")]) != 0
    assert "is not a Chrome trace" in capsys.readouterr().err


def test_a_run_on_a_gpu_has_its_clocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the first run, whose steps are judged."""
    monkeypatch.setattr(diagnosis.GpuLog, "clocks", lambda self, *ranges: CAPPED)
    engine = Engine(str(model), **OPTIONS)
    found = diagnosis.diagnose(engine, Load(prompts=2, tokens_in=16, tokens_out=4), None)
    assert found.tree["gpu"] == shown(CAPPED) == found.trace[KNOWN]["gpu"]
    assert CAPPED.line in found.tree["verdict"]["why"]
    engine.close()


def test_a_step_that_two_looks_saw_counts_once() -> None:
    def step(start: float, seconds: float) -> dict[str, Any]:
        return {"start": start, "seconds": seconds, "device": seconds / 2, "tokens": 4}

    first, later = [step(0.1, 0.011), step(0.2, 0.012)], [step(0.2004, 0.012), step(0.3, 0.013)]
    assert [each["seconds"] for each in all_steps([first, later])] == [0.011, 0.012, 0.013]


def test_counters_become_figures() -> None:
    before, after = read_samples(metrics(1)), read_samples(metrics(2))
    grown = {name: value - before[name] for name, value in after.items()}
    found = application(grown, 2.0, parse_slo(["ttft:150"]))
    assert found["completed"] == 10 and found["output_throughput"] == 500 and found["preemptions"] == 2
    assert found["ttft_ms"]["p50"] == pytest.approx(100 + 100 / 6) and found["tpot_ms"]["p90"] == pytest.approx(20)
    assert found["slo_attainment_range"] == pytest.approx([0.7, 0.7])
    assert found["request_goodput_range"] == pytest.approx([3.5, 3.5])
    first = histogram(grown, "vllm:time_to_first_token_seconds")
    assert part_below(first, 0.05) == pytest.approx(0.2) and part_below(first, 9) == 1
    assert quantile([], 0.5) is None and quantile([(1.0, 0.0)], 0.5) is None
    assert quantile([(1.0, 2), (float("inf"), 4)], 0.9) == 1.0


def test_a_server_that_wants_a_key_or_is_no_server_of_ours(canned: tuple[str, type[Canned]]) -> None:
    url, handler = canned
    handler.key = "secret"
    with pytest.raises(ConfigError, match="--api-key"):
        attach(url, 1, None)
    assert attach(url + "/v1/", 1, None, "secret").model == "m"
    with pytest.raises(ConfigError, match="not a Ridgeline server"):
        attach(url + "/elsewhere", 1, None, "secret")


@pytest.mark.parametrize("sent", [b"", b"[" * 100_000, b"[]", b'{"machine": 5}', b"\xff"])
def test_what_is_no_answer_of_ours_is_one_line(
    sent: bytes, canned: tuple[str, type[Canned]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = canned
    monkeypatch.setattr("ridgeline.diagnose.attach._MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="answers with more than"):
        attach(url, 1, None)
    monkeypatch.setattr("ridgeline.diagnose.attach._get", lambda url, path, key: b"" if path == "/metrics" else sent)
    with pytest.raises(ConfigError, match="does not answer as a Ridgeline server does"):
        attach(url, 1, None)


@pytest.mark.slow
def test_our_own_server_is_watched(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    socket = str(tmp_path / "admin")
    with ServerProcess(str(model), "--load-format", "dummy", "--admin-socket", socket) as server:
        body = {"model": "m", "prompt": "a b c", "max_tokens": 4000, "ignore_eos": True}
        served = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        sender = threading.Thread(target=lambda: [
            httpx.post(f"{server.url}/v1/completions", json=body | {"model": served}, timeout=60) for _ in range(8)
        ])
        sender.start()
        assert main(["diagnose", server.url, "--seconds", "3", "--json", "--admin-socket", socket, "--profile-steps", "16"]) == 0
        sender.join()
    tree = json.loads(capsys.readouterr().out)["figures"]
    assert tree["steps"]["count"] > 50 and tree["application"]["output_throughput"] > 0 and tree["verdict"]["term"]
    parts = {row["part"]: row for row in tree["ops"]["parts"]}
    assert tree["profiler"]["steps"] == 16 and parts["linears and head"]["calls_per_step"] == 9


def test_an_idle_server_has_no_headroom_to_speak_of() -> None:
    idle = {"term": "idle", "share": 1.0, "headroom": 1.0, "why": "no steps: there were no requests"}
    assert as_text._verdict(idle) == "idle: no steps: there were no requests; send requests while diagnose watches"
    assert "headroom: 1.7×" in as_text._verdict(idle | {"term": "host", "headroom": 1.7})

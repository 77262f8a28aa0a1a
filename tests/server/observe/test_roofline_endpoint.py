"""Recorded steps: what they cost against the cost model, their windows, what recording costs, and GET /roofline."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from served_model import ServerProcess, wait_until, write_model
from verdict_cases import LLAMA_8B, decode

from ridgeline import metrics
from ridgeline.distributed.comm import Communicator, ProcessAxis
from ridgeline.distributed.meet import meet
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.core.stats import RooflineReporter
from ridgeline.engine.llm import LLM
from ridgeline.errors import BadRequest
from ridgeline.gpus.gpu_log import GpuSums
from ridgeline.gpus.nvml import Reading
from ridgeline.messages import StepPlan, StepResult, Want
from ridgeline.metrics import RooflineStats
from ridgeline.roofline import steps as steps_file
from ridgeline.roofline.live import FrontEndLoad, LiveRoofline, LiveView, Rates, Utilisation, window_of
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.roofline.step_cost import OPS, Peaks, step_cost
from ridgeline.roofline.steps import PHASES, POINT, REMEMBERED, SUMS, PhaseSums, StepRecorder
from ridgeline.roofline.verdict import TERMS, Setting, judge
from ridgeline.runner.start import measure_peaks
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.observe import roofline_endpoint
from ridgeline.server.observe.prometheus import families
from ridgeline.server.observe.roofline_endpoint import HISTORY, RooflineReply, chosen, document, window_seconds
from ridgeline.sizes.mesh_shape import MeshShape

H200 = MachinePeaks("NVIDIA H200", 4.38e12, {"bfloat16": 793e12, "float32": 50e12}, 1e-6, "then", 5e-6)
RATES = Rates(4.38e12, 793e12)
NONE = np.zeros(0, np.int32)


def plan(rows: list[tuple[int, int]], logits: list[int] | None = None, want: int = 0) -> StepPlan:
    wanted = np.array([want | (Want.TOKEN if has else 0) for has in logits or [1] * len(rows)], np.int8)
    places, new = np.arange(len(rows), dtype=np.int32), np.array([count for count, _ in rows], np.int32)
    return StepPlan(1, NONE, [], NONE.reshape(0, 4), places, new, wanted)


def result(rows: list[tuple[int, int]], seconds: float, **more: Any) -> StepResult:
    lengths = np.array([kv for _, kv in rows], np.int32)
    return StepResult(1, np.zeros((len(rows), 1), np.int32), np.ones(len(rows), np.int32), lengths,
                      device_seconds=seconds, **more)


@contextmanager
def clock() -> Iterator[list[float]]:
    """The recorder's clock: it goes on when it is told to."""
    now = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_file, "time", SimpleNamespace(monotonic=lambda: now[0]))
        yield now


def recorder(*steps: tuple[list[tuple[int, int]], float, dict[str, Any]]) -> StepRecorder:
    made = StepRecorder(LLAMA_8B, "bfloat16")
    made.use(H200)
    with clock() as now:
        for number, (rows, seconds, more) in enumerate(steps):
            made.planned(plan(rows, more.pop("logits", None)))
            now[0] += max(0.002, seconds)
            made.took(result(rows, seconds, **more), 3, number < len(steps) - 1)
    made.fold()
    return made


# -- the recorder ------------------------------------------------------------------------------------------------------


def test_a_step_is_recorded_with_what_it_costs() -> None:
    rows = decode(4, 1000)
    made = recorder((rows, 0.001, {}))
    sums, cost, best = made.sums["decode"], step_cost(LLAMA_8B, rows), Peaks(4.38e12, 793e12)
    assert (sums.steps, sums.rows, sums.tokens, sums.sampled) == (1, 4, 4, 4)
    assert sums.flops == cost.matrix_flops
    assert (sums.weights, sums.kv_read, sums.kv_written) == (cost.total.weights, cost.total.kv_read, cost.total.kv_written)
    assert sums.activations == cost.total.activations
    assert sums.compute == pytest.approx(cost.matrix_flops / 793e12) and sums.memory == pytest.approx(cost.bytes / 4.38e12)
    roof = sums.on_compute + sums.on_weights + sums.on_kv + sums.on_activations
    assert roof == pytest.approx(sum(best.floor(cost).values()))
    assert sums.device == 0.001 and sums.seconds == pytest.approx(0.002) and sums.queued == pytest.approx(3 * sums.seconds)
    [point] = made.points
    assert dict(zip(POINT, point, strict=True))["flops"] == cost.matrix_flops and len(point) == len(POINT)


def test_steps_are_told_apart_by_phase() -> None:
    made = recorder(
        (decode(2, 50), 0.001, {}), ([(64, 64)], 0.001, {}), ([(1, 9), (32, 32)], 0.001, {}), (decode(1, 7), 0.001, {}),
        ([(64, 128)], 0.001, {"logits": [0]}),
    )
    assert [made.sums[phase].steps for phase in PHASES] == [2, 2, 1]
    assert made.sums["prefill"].sampled == 1 and made.sums["prefill"].tokens == 128


def test_launching_costs_the_host_unless_it_is_a_graph() -> None:
    eager, graph = (recorder((decode(1, 50), 0.001, {"replayed": each})).sums["decode"] for each in (False, True))
    assert eager.launch == pytest.approx(5 * graph.launch) and graph.replayed == 1 and eager.replayed == 0


def test_what_was_shared_is_not_read_again() -> None:
    apart, shared = (recorder((decode(8, 2100), 0.001, {"shared": each})).sums["decode"] for each in (0, 7 * 2000))
    assert apart.kv_read - shared.kv_read == 7 * 2000 * 131_072


def test_what_is_computed_for_nothing_is_between_mfu_and_hfu() -> None:
    rows = [(100, 100)]
    made = recorder((rows, 0.010, {"useful": 75, "recomputed": 25, "padded": 28}))
    used = Utilisation.of(made.sums["prefill"], RATES)
    flops, padding = step_cost(LLAMA_8B, rows).matrix_flops, 28 * 2 * LLAMA_8B.linear_weights
    assert used.hfu / used.mfu == pytest.approx((flops + padding) / (0.75 * flops))
    assert used.recomputation == pytest.approx(0.25 * flops / (flops + padding))
    assert used.padding == pytest.approx(padding / (flops + padding)) and used.rejected == 0
    assert 1 - used.padding - used.recomputation == pytest.approx(used.mfu / used.hfu)


def test_what_ranks_wait_for_each_other_is_told_apart(tmp_path: Path) -> None:
    mesh = meet(MeshShape(), 0, tmp_path / "store")
    try:
        axis = ProcessAxis([0], 0)
        axis.all_reduce(torch.ones(4))
        once = axis.waited
        axis.broadcast(torch.ones(4))
        assert 0 < once < Communicator(axis).waited and Communicator().waited == 0
    finally:
        mesh.close()
    made = recorder((decode(4, 1000), 0.010, {"communication": 0.006}))
    window = window_of(1.0, made.sums["decode"])
    assert window.communication == 0.006
    assert judge(replace(window, seconds=0.01, busy=0.01), Setting(ranks=2)).term == "communication"


def test_a_step_with_drafts_is_a_decode_and_rejected_ones_are_waste() -> None:
    """Two rows decode, one of them with three drafts of which one is accepted: five positions, three tokens of answers."""
    made = StepRecorder(LLAMA_8B, "bfloat16")
    rows = [(1, 100), (4, 103)]
    asked = plan(rows)
    asked.width = np.array([0, 3], np.int32)
    found = result([(1, 100), (4, 101)], 0.001, rejected=2)      # 99 tokens, then its newest and one draft
    found.num_new = np.array([1, 2], np.int32)
    made.planned(asked)
    made.took(found, 0, False)
    made.fold()
    sums, cost = made.sums["decode"], step_cost(LLAMA_8B, rows, [1, 4])
    assert (sums.steps, sums.rows, sums.tokens, sums.sampled, sums.rejected) == (1, 2, 5, 3, 2)
    assert sums.flops == cost.matrix_flops and sums.kv_read == cost.total.kv_read
    assert sums.rejected_flops == pytest.approx(sums.flops * 2 / 5)


def test_time_without_work_belongs_to_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(steps_file, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = StepRecorder(LLAMA_8B, "bfloat16")
    for goes_on in (True, False, True, False):
        made.planned(plan(decode(1, 9)))
        now[0] += 0.01
        made.took(result(decode(1, 9), 0.0), 0, goes_on)
        if not goes_on:
            now[0] += 1.0
    made.fold()
    assert made.sums["decode"].steps == 4 and made.sums["decode"].seconds == pytest.approx(0.04)


def test_steps_in_flight_and_a_ring_that_is_bounded() -> None:
    made = StepRecorder(LLAMA_8B, "bfloat16")
    made.planned(plan(decode(1, 9)))
    for _ in range(3 * REMEMBERED):
        made.planned(plan(decode(1, 9)))
        made.took(result(decode(1, 9), 0.0), 0, True)
    assert len(made._notes) < REMEMBERED and len(made.points) <= REMEMBERED
    made.fold()
    assert made.num_points == made.sums["decode"].steps == 3 * REMEMBERED


def test_new_peaks_begin_anew_and_a_step_that_beats_them_is_told() -> None:
    made = recorder((decode(1, 1000), 0.010, {}))
    assert not made.beaten
    made.use(MachinePeaks("NVIDIA H200", 1e9, {"float32": 1e9}, 1e-6, "now"))
    assert made.sums["decode"].steps == 0 and not made.points
    made.planned(plan(decode(1, 1000)))
    made.took(result(decode(1, 1000), 0.010), 0, False)
    made.fold()
    assert made.beaten


def test_a_host_that_was_late_beats_nothing() -> None:
    """It took the step before in late, and so sees only a part of a step that took 4 ms on the device."""
    made = StepRecorder(LLAMA_8B, "bfloat16")
    made.use(H200)
    with clock() as now:
        made.planned(plan(decode(1, 1000)))
        now[0] += 5e-6
        made.took(result(decode(1, 1000), 0.004), 0, False)
    made.fold()
    assert made.sums["decode"].device < 0.002 and not made.beaten


@pytest.mark.slow
def test_what_recording_costs() -> None:
    """A few microseconds a step, with a report every 100 steps; best of several: others run here too."""
    made = StepRecorder(LLAMA_8B, "bfloat16")
    made.use(H200)
    rows = decode(256, 700)
    planned, got = plan(rows), result(rows, 0.004)

    def noting() -> float:
        began = time.perf_counter()
        for _ in range(200):
            made.planned(planned)
            made.took(got, 0, True)
        return (time.perf_counter() - began) / 200

    def folding() -> float:
        for _ in range(100):
            made.planned(planned)
            made.took(got, 0, True)
        began = time.perf_counter()
        made.fold()
        return (time.perf_counter() - began) / 100

    note = min(noting() for _ in range(7))
    made.fold()
    fold = min(folding() for _ in range(15))
    print(f"{note * 1e6:.1f} µs on the way of a step, {fold * 1e6:.1f} µs when it is reported")
    assert note <= 5e-6 and fold <= 20e-6


def test_an_engine_records_every_step(tmp_path: Path) -> None:
    """The tokens that steps computed are those that were asked for, and their KV lengths are right."""
    llm = LLM(write_model(tmp_path / "tiny"), load_format="dummy", num_gpu_blocks_override=100, max_num_seqs=4)
    prompts = [{"prompt_token_ids": [count] * count} for count in (40, 7, 19)]
    llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    made = llm.core.recorder
    made.fold()
    total = sum(made.sums[phase].tokens for phase in PHASES)
    assert total == 40 + 7 + 19 + 3 * 5 and sum(made.sums[phase].sampled for phase in PHASES) == 18
    # Decodes: three sequences, five steps each, from one more position than the prompt has.
    read = sum(count + each for count in (40, 7, 19) for each in range(1, 6)) * made.shape.kv_bytes_per_token
    assert made.sums["decode"].kv_read == read
    assert all(0 < each.device <= each.seconds for each in made.sums.values() if each.steps)


@pytest.mark.parametrize("given", ["²", "-1", "1", "", "9" * 5000, "0x0", "nan"])
def test_an_engine_that_does_not_exist_is_the_clients_mistake(given: str) -> None:
    llm: Any = SimpleNamespace(engines=["only"])
    with pytest.raises(BadRequest, match="engine must be a number from 0 to 0"):
        chosen(llm, given)
    assert chosen(llm, None) == chosen(llm, "0") == "only"


def test_the_engine_measures_when_it_is_quiet_reports_and_writes_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(measure_peaks.MATRIX, "cpu", 32)
    monkeypatch.setitem(measure_peaks.BUFFER, "cpu", 2**16)
    llm = LLM(write_model(tmp_path / "tiny"), load_format="dummy", num_gpu_blocks_override=100, max_num_seqs=4)
    reporter, now = RooflineReporter(llm.core), time.monotonic()
    assert llm.core.recorder.peaks is None and not reporter.measure(now)                 # it has just begun
    first = reporter.report(now)
    assert first is not None and first.read_bytes_s == 0 and len(first.held) == 99
    while reporter.measure(now + 5):
        pass
    assert llm.core.recorder.peaks is not None
    prompt = [{"prompt_token_ids": [5] * 40}]
    llm.generate(prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    second = reporter.report(now + 6)
    assert second is not None and second.read_bytes_s > 0 and len(second.points) == 9 and max(second.cached) == 100
    assert not reporter.measure(now + 6.5) and second.weight_bytes == 4 and second.kv_bytes == 2
    caplog.set_level("INFO", "ridgeline")
    llm.generate(prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    third = reporter.report(now + 70)
    assert third is not None and len(third.points) == 9
    assert not any(each.startswith("roofline: ") for each in caplog.messages), "it had hardly anything to do"
    load = llm.core.recorder.sums["decode"]
    for second in range(80, 140, 10):                                    # as if it had worked for a minute: one line
        load.steps, load.seconds, load.device = load.steps + 9, load.seconds + 10, load.device + 9
        reporter.report(now + second)
    [line] = [each for each in caplog.messages if each.startswith("roofline: ")]
    assert " rows, " in line and "bound by " in line


# -- windows -----------------------------------------------------------------------------------------------------------


def sums(steps: float, seconds: float, **more: float) -> dict[str, list[float]]:
    return {"decode": PhaseSums(steps=steps, seconds=seconds, device=seconds, **more).values()}


def test_a_window_is_a_difference() -> None:
    live = LiveRoofline()
    for second in range(30):
        live.take(100.0 + second, sums(10 * second, 0.9 * second, sampled=50 * second, weights=3e12 * second))
    found = live.look(129.0, RATES, Setting())
    assert found.total.steps == 100 and found.seconds == pytest.approx(10.0) and found.window.busy == pytest.approx(9.0)
    assert found.total.sampled_s == pytest.approx(500 / 9) and found.total.mbu == pytest.approx(3e13 / 9 / 4.38e12)
    assert live.look(129.0, RATES, Setting(), seconds=20).total.steps == 200
    assert live.look(150.0, RATES, Setting()).verdict.term == "idle"      # nothing was heard for long
    history = live.history(RATES)
    assert len(history) == 29 and len(history[0]) == len(HISTORY)
    assert history[-1][1] == pytest.approx(50) and history[-1][5] == pytest.approx(0.9)


def test_a_page_that_asks_again_costs_one_more_row_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 120 rows took tens of milliseconds of the event loop each time. Other peaks change all of them."""
    live, counted, judged = LiveRoofline(), 0, Utilisation.of

    def of(each: PhaseSums, rates: Rates) -> Utilisation:
        nonlocal counted
        counted += 1
        return judged(each, rates)

    monkeypatch.setattr(Utilisation, "of", of)
    for second in range(30):
        live.take(100.0 + second, sums(10 * second, 0.9 * second, sampled=50 * second, weights=1e12 * second))
    before = live.history(RATES)
    live.take(130.0, sums(300, 27.0, sampled=1500, weights=3e13))
    counted = 0
    assert live.history(RATES)[:-1] == before and counted == 1
    faster = live.history(replace(RATES, read_bytes_s=2 * RATES.read_bytes_s))
    assert counted == 31 and faster[0][4] == pytest.approx(before[0][4] / 2)


def test_overhead_and_kernels_below_their_roof_are_two_things() -> None:
    """The page's verdict says "no overhead explains it": its step time must not call the same seconds overhead."""
    live = LiveRoofline()
    for second in range(5):
        values = PhaseSums(steps=second, seconds=second, device=0.9 * second, on_weights=0.2 * second, on_compute=0.1 * second)
        live.take(100.0 + second, {"decode": values.values()})
    found = live.look(104.0, RATES, Setting())
    assert found.verdict.term == "implementation"
    assert found.split == pytest.approx({"compute": 0.1, "memory": 0.2, "kernels": 0.6, "overhead": 0.1, "others": 0.0})
    row = dict(zip(HISTORY, live.history(RATES)[-1], strict=True))
    assert (row["compute"], row["memory"], row["overhead"]) == pytest.approx((0.1, 0.2, 0.1))


def test_a_window_begins_with_the_work() -> None:
    live = LiveRoofline()
    live.take(100.0, sums(1, 0.01))
    for second in range(3):
        live.take(160.0 + second, sums(1 + 10 * second, 0.01 + second, on_weights=0.9 * second))
    found = live.look(162.0, RATES, Setting())
    assert found.verdict.term == "weight_bandwidth" and found.seconds == pytest.approx(2.0)


def test_another_engine_counts_from_nothing() -> None:
    live = LiveRoofline()
    live.take(100.0, sums(1000, 50.0))
    live.take(101.0, sums(1010, 51.0))
    live.take(102.0, sums(5, 0.5))
    assert live.look(102.0, RATES, Setting()).total.steps == 5


def test_a_view_keeps_what_was_not_said_again() -> None:
    view = LiveView()
    view.take(1.0, RooflineStats(sums(1, 0.1), [[1.0] * len(POINT)], held=[50], cached=[10], measured="a", flops_s={"x": 2.0}))
    view.take(2.0, RooflineStats(sums(2, 0.2), [[2.0] * len(POINT)], measured="a"))
    assert (view.stats.held, view.stats.cached, len(view.points)) == ([50], [10], 2)
    view.take(3.0, RooflineStats(sums(3, 0.3), measured="b"))
    assert not view.points                                               # those were predicted with other peaks
    assert len(view.stats.phases["decode"]) == len(SUMS)


def test_the_line_in_the_log() -> None:
    live = LiveRoofline()
    for second in range(12):
        live.take(100.0 + second, sums(10 * second, second, rows=40 * second, sampled=40 * second, tokens=40 * second,
                                       weights=3.4e12 * second, flops=6e13 * second, on_weights=0.78 * second))
    line = live.look(111.0, RATES, Setting()).line()
    assert line == (
        "roofline: 40 tok/s, 0 prompt tok/s, 4.0 rows, 0.0 waiting; MFU 7.6%, MBU 77.6%; bound by weight_bandwidth (78%), "
        "headroom 1.3x; next: more requests in a step: they share each read of the weights"
    )


CAPPED, FREE = [1, 692, 700, 700, 1275, 1980, 61, 1, 0], [1, 546, 700, 700, 1980, 1980, 43, 0, 0]      # a sample of a GPU


def gpu(samples: int, one: list[int]) -> list[float]:
    return [float(samples * each) for each in one]


def test_a_window_has_the_clocks_of_its_own_seconds() -> None:
    """The GPU was free for 20 seconds, and then at its power limit: the last ten say power, all of them do not."""
    live, total = LiveRoofline(), np.zeros(len(CAPPED))
    for second in range(31):
        live.take(100.0 + second, sums(10 * second, second, on_weights=0.8 * second), total.tolist())
        total += gpu(2, FREE if second < 20 else CAPPED)
    now, long = live.look(130.0, RATES, Setting()), live.look(130.0, RATES, Setting(), seconds=30)
    assert now.window.clocks is not None and (now.window.clocks.samples, now.window.clocks.sm_mhz) == (20, 1275)
    assert now.verdict.term == "power" and now.verdict.share == pytest.approx(0.2)
    assert "; power: 692 of 700 W, SM clock 1,275 of 1,980 MHz; next: " in now.line() and "bound by power (20%)" in now.line()
    assert now.split["kernels"] == pytest.approx(0.2) and sum(now.split.values()) == pytest.approx(1)
    assert long.window.clocks is not None and long.window.clocks.samples == 60 and long.verdict.term == "weight_bandwidth"


def test_clocks_before_the_first_report_belong_to_no_window() -> None:
    """An engine has loaded weights for minutes, and a new engine counts from nothing."""
    live = LiveRoofline()
    live.take(100.0, sums(10, 1.0), gpu(500, FREE))
    assert live.look(100.0, RATES, Setting()).window.clocks is None
    live.take(101.0, sums(20, 2.0), gpu(502, FREE))
    found = live.look(101.0, RATES, Setting()).window.clocks
    assert found is not None and found.samples == 2
    live.take(102.0, sums(1, 0.1), gpu(3, CAPPED))
    assert live.look(102.0, RATES, Setting()).window.clocks is None


def test_the_engine_reports_what_another_thread_has_sampled(tmp_path: Path) -> None:
    llm = LLM(write_model(tmp_path / "tiny"), load_format="dummy", num_gpu_blocks_override=100, max_num_seqs=4)
    reporter = RooflineReporter(llm.core)
    first = reporter.report(100.0)
    assert first is not None and first.gpu == [], "a CPU has none"
    asked = list[int]()

    class Slow(GpuSums):
        def _add(self, when: float, readings: list[Reading]) -> None:
            asked.append(threading.get_ident())
            super()._add(when, readings)

    reader = SimpleNamespace(
        handles=lambda which: [0], close=lambda: None,
        read=lambda handle: Reading(watts=692.0, limit_w=700.0, sm_mhz=1275, max_sm_mhz=1980, reasons=0x4),
    )
    reporter._gpus = Slow(["0"], lambda: reader)         # type: ignore[assignment, return-value]
    wait_until(lambda: bool(asked))
    reporter.close()
    second = reporter.report(101.0)
    assert second is not None and second.gpu[1] == 692 * second.gpu[0] > 0 and threading.get_ident() not in asked


def test_the_clocks_are_in_the_answer_and_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, now = AsyncLLM(), 1000.0
    monkeypatch.setattr(roofline_endpoint, "time", SimpleNamespace(monotonic=lambda: now))
    for second in range(12):
        now += 1
        llm.roofline.take(now, RooflineStats(sums(10 * second, second, on_weights=0.8 * second), gpu=gpu(2 * second + 1, CAPPED)))
    found = document(llm, "tiny", "ok")
    assert found.gpu["line"] == "692 of 700 W, SM clock 1,275 of 1,980 MHz" and found.gpu["limited_by"] == "power"
    assert found.verdict["term"] == "power" and msgspec.json.decode(msgspec.json.encode(found), type=RooflineReply)
    said = {family.name.removeprefix("ridgeline:gpu_"): [value for _, value in family.samples] for family in families(llm)}
    assert (said["power_watts"], said["power_limit_watts"], said["sm_clock_hertz"]) == ([692.0], [700.0], [1275e6])
    assert said["clock_limited_share"] == [1.0, 0.0]


@pytest.mark.parametrize(("roof", "shown"), [(0.02, "headroom 50.0x"), (0.0004, "headroom over 100x")])
def test_the_line_has_no_absurd_headroom(roof: float, shown: str) -> None:
    """An engine that stood still in a step, nearly without work, had a headroom of thousands."""
    live = LiveRoofline()
    for second in range(12):
        live.take(100.0 + second, sums(second, second, rows=second, sampled=second, tokens=second, weights=4e10 * second,
                                       on_weights=roof * second))
    line = live.look(111.0, RATES, Setting()).line()
    assert f"{shown};" in line or line.endswith(shown), line


def test_no_share_is_above_the_whole() -> None:
    """Peaks that were measured beside other programs are beaten: then they are doubtful, and no figure is printed with them."""
    live = LiveRoofline()
    for second in range(12):
        live.take(100.0 + second, sums(10 * second, second, rows=40 * second, sampled=40 * second, tokens=40 * second,
                                       weights=5.8e12 * second, flops=6e13 * second, on_weights=1.3 * second))
    found = live.look(111.0, RATES, Setting())
    assert found.total.mbu == 1.0 and found.total.is_doubtful and found.verdict.share <= 1
    line = found.line()
    assert "peaks doubtful" in line and "MBU" not in line and "%" not in line and "next" not in line
    assert max(row[4] for row in live.history(RATES)) <= 1


def test_products_of_narrow_weights_count_at_their_own_rate() -> None:
    """Linears in fp8 at twice the rate, attention and head at that of bfloat16; all at the latter if fp8 was not measured."""
    peaks = MachinePeaks("x", 4e12, {"float32": 50e12, "bfloat16": 800e12, "float8_e4m3fn": 1600e12}, 1e-6, "now")
    wide, narrow = (StepRecorder(LLAMA_8B, "bfloat16", linear_dtype=dtype) for dtype in ("", "float8_e4m3fn"))
    rates = dict(zip(OPS, narrow.rates(peaks).tolist(), strict=True))
    assert rates["gate_up"] == 1600e12 and rates["attention"] == rates["head"] == 800e12
    assert set(wide.rates(peaks)) == {800e12}
    unmeasured = MachinePeaks("x", 4e12, {"float32": 50e12, "bfloat16": 800e12}, 1e-6, "now")
    assert set(narrow.rates(unmeasured)) == {800e12}
    cpu = MachinePeaks("x", 2e10, {"float32": 1e11, "int4": 3e11}, 1e-6, "now")  # the blocks of a file: the head is packed, too
    packed = dict(zip(OPS, StepRecorder(LLAMA_8B, "float32", linear_dtype="int4").rates(cpu).tolist(), strict=True))
    assert packed["gate_up"] == packed["head"] == 3e11 and packed["attention"] == 1e11


def test_a_front_end_says_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = [0.0]
    load = FrontEndLoad(lambda: spent[0])
    monkeypatch.setitem(metrics.SPENT, "tokenising", 0.0)
    assert load.shares(100.0, 10.0) == (0.0, 0.0), "nothing was seen yet"
    for second in range(1, 21):
        spent[0] += 0.9
        metrics.SPENT["tokenising"] += 0.6
        load.sample(100.0 + second)
    loop, tokenising = load.shares(120.0, 10.0)
    assert loop == pytest.approx(0.9) and tokenising == pytest.approx(0.6)
    live = LiveRoofline()
    for second in range(21):
        live.take(100.0 + second, sums(10 * second, 0.3 * second))
    assert live.look(120.0, RATES, Setting()).verdict.term == "idle"
    assert live.look(120.0, RATES, Setting(), front_end=load).verdict.term == "tokeniser"


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with ServerProcess(str(model), "--load-format", "dummy", "--num-gpu-blocks-override", "600") as made:
        yield made.url


def ask(url: str, **query: Any) -> dict[str, Any]:
    reply = httpx.get(f"{url}/roofline", params=query)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    msgspec.json.decode(reply.content, type=RooflineReply)
    return dict(reply.json())


def test_the_roofline_of_a_server(server: str) -> None:
    wait_until(lambda: ask(server)["machine"]["read_bytes_s"] > 0, 60)   # measured in a quiet moment, or remembered
    body = {"prompt": list(range(40)), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        assert httpx.post(f"{server}/v1/completions", json=body, timeout=60).status_code == 200
    # The second prompt is cached. The longest window that is remembered: a busy machine may take more than the usual 10 s.
    wait_until(lambda: ask(server, seconds=120)["utilisation"]["steps"] >= 118)
    found = ask(server, seconds=120)
    assert found["model"] == "tiny" and found["state"] == "ok"
    machine, used = found["machine"], found["utilisation"]
    assert machine["dtype"] == "float32" and machine["ridge"] == pytest.approx(machine["flops_s"] / machine["read_bytes_s"])
    assert used["steps"] == sum(each["steps"] for each in found["phases"].values())
    assert 0 < used["mfu"] <= used["hfu"] < 1 and 0 < used["mbu"] < 1 and used["flops_per_byte"] > 0
    assert sum(found["split"].values()) == pytest.approx(1)
    verdict = found["verdict"]
    assert verdict["term"] in TERMS and verdict["why"]
    assert verdict["next"] == (verdict["changes"][0]["what"] if verdict["changes"] else "")
    points, history = found["points"], found["history"]
    assert points["fields"] == list(POINT) and points["phases"] == list(PHASES) and len(points["values"]) >= 118
    assert all(len(row) == len(POINT) and row[0] >= 0 for row in points["values"])
    assert history["fields"] == list(HISTORY) and all(len(row) == len(HISTORY) for row in history["values"])
    kv = found["kv"]
    assert kv["blocks"] == 599 and len(kv["held"]) == len(kv["cached"]) == 480 and max(kv["cached"]) == 100
    assert found["latency"]["first_token"]["count"] == found["latency"]["per_output_token"]["count"] == 2
    assert found["prefix"]["rate"] > 0 and found["batch"]["running"] == 0


@pytest.mark.parametrize("given", ["0", "121", "x", "nan", "-1"])
def test_a_window_that_is_not_remembered_is_refused(server: str, given: str) -> None:
    reply = httpx.get(f"{server}/roofline", params={"seconds": given})
    assert reply.status_code == 400 and "seconds must be a number from 1 to 120" in reply.json()["error"]["message"]


def test_metrics_agree_with_the_roofline(server: str) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    bound, lines = list[str](), list[str]()

    def told() -> bool:
        """The engine reports ten times a second, and of the last seconds: asked again, in case this process was late."""
        assert httpx.post(f"{server}/v1/completions", json=body, timeout=60).status_code == 200
        lines[:] = httpx.get(f"{server}/metrics").text.splitlines()
        bound[:] = [line for line in lines if line.startswith("ridgeline:bound{") and line.endswith(" 1")]
        return bool(bound) and any(line.startswith("ridgeline:mbu{") and not line.endswith(" 0") for line in lines)

    wait_until(told)
    assert len(bound) == 1
    [mbu] = [float(line.split()[-1]) for line in lines if line.startswith("ridgeline:mbu{")]
    assert 0 < mbu < 1
    shares = [float(line.split()[-1]) for line in lines if line.startswith("ridgeline:step_time_share{")]
    assert len(shares) == 5 and sum(shares) == pytest.approx(1)


def test_a_server_that_is_still_loading_has_a_roofline() -> None:
    found = document(AsyncLLM(), "tiny", "loading", quality="int4: KL 0.1")
    assert found.quality == "int4: KL 0.1"
    assert found.state == "loading" and found.utilisation["steps"] == 0 and found.verdict["term"] == "idle"
    assert found.machine["read_bytes_s"] == 0 and found.machine["ridge"] is None and found.kv["held"] == []
    assert msgspec.json.decode(msgspec.json.encode(found), type=RooflineReply)


def test_the_data_sheet_stands_beside_what_was_measured() -> None:
    llm = AsyncLLM()
    llm.roofline.take(1.0, RooflineStats(sums(1, 0.1), device="NVIDIA H200", dtype="bfloat16", read_bytes_s=4.38e12,
                                         flops_s={"bfloat16": 793e12, "float8_e4m3fn": 1443e12}, measured="now"))
    machine = document(llm, "tiny", "ok").machine
    assert machine["ridge"] == pytest.approx(181.05, abs=0.01) and machine["flops_s"] == 793e12
    sheet = machine["data_sheet"]
    assert sheet["name"] == "H200" and sheet["read_bytes_s"] == 4.8e12 and round(sheet["ridge"]) == 206
    assert sheet["all_flops_s"]["float8_e4m3fn"] == pytest.approx(1979e12, rel=0.01)


def test_the_query_of_a_window() -> None:
    assert window_seconds(None) == 10.0 and window_seconds("60") == 60.0 and json.dumps(window_seconds("1")) == "1.0"

"""Diagnoses a workload in this process: run, profile, run again, judge. For `ridgeline diagnose MODEL` and `bench loop`.

    warm-up → as it is → the same steps under the profiler → as it is

All three runs have the same steps (all requests arrive at the start, answers have fixed lengths), so the profiler's own cost
is the median of their ratios. Figures come from the first run; the profile only splits them into parts.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.bench.load.latency import Outcome, Slo, figures
from ridgeline.bench.workload.bench_engine import Engine, quality_of
from ridgeline.diagnose.driven_run import Load, StepLog, drive
from ridgeline.diagnose.what_if import Speeds, WhatIf, measured_speeds
from ridgeline.engine.core.profile import StepProfiler
from ridgeline.engine.core.what_helps import factors, linear_share, untimed
from ridgeline.gpus.clocks import Clocks, shown
from ridgeline.gpus.gpu_log import GpuLog
from ridgeline.roofline import drill
from ridgeline.roofline.facts import Facts, facts_of
from ridgeline.roofline.live import window_of
from ridgeline.roofline.parts import PARTS, part_costs, steps_with
from ridgeline.roofline.patterns import find_patterns
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.roofline.remedies import ranked
from ridgeline.roofline.slow import StepTimes
from ridgeline.roofline.steps import PHASES, PhaseSums
from ridgeline.roofline.trace import KNOWN, Trace, own_times, read_trace
from ridgeline.roofline.vectorised import ManyCosts, StepCosts
from ridgeline.roofline.verdict import Setting, Window, judge
from ridgeline.runner.start.gpu_names import gpu_names
from ridgeline.runner.start.measure_peaks import machine_peaks
from ridgeline.sizes.kv_spec import common_block_size

PROFILED_STEPS = 96                  # most steps under the profiler
WARM_UP = Load(prompts=2, tokens_in=24, tokens_out=4, seed=99)
Progress = Callable[[str], None]


@dataclass(slots=True)
class Run:
    """One pass over a load."""

    outcomes: list[Outcome]
    log: StepLog
    seconds: float
    processor: float                 # CPU seconds of this process
    clocks: Clocks | None = None     # of the GPU


@dataclass(slots=True)
class Diagnosed:
    """The result: the tree to show, the trace, and the requests for a page's plots."""

    tree: dict[str, Any]
    trace: dict[str, Any]
    outcomes: list[Outcome]
    points: list[dict[str, Any]]     # every step


def run_load(engine: Engine, load: Load, peaks: MachinePeaks, salt: str) -> Run:
    """Runs the load with every step timed and nothing profiled."""
    gpus = gpu_names() if engine.config.device == "cuda" else []
    with GpuLog(gpus) as gpu, StepLog(engine.core, engine.model.weight_reads) as log:
        log.use(peaks)
        begin, start, on_processor = time.time(), time.perf_counter(), time.process_time()
        outcomes = drive(engine.core, load.asked(engine.config.model.vocab_size), load.at_once, salt)
        seconds, on_processor = time.perf_counter() - start, time.process_time() - on_processor
        log.fold()
    return Run(outcomes, log, seconds, on_processor, gpu.clocks((begin, begin + seconds)))


def warm_up(engine: Engine, load: Load) -> None:
    """On a GPU the whole load, which compiles the kernels and captures the graphs of its steps; on a CPU a small one."""
    first = load if engine.config.device == "cuda" else WARM_UP
    drive(engine.core, first.asked(engine.config.model.vocab_size), first.at_once, "warm")
    engine.settle()


def diagnose(engine: Engine, load: Load, slo: Slo | None, progress: Progress = lambda text: None) -> Diagnosed:
    """The whole diagnosis; the engine must have no other requests."""
    config = engine.config
    peaks = machine_peaks(config.device)
    progress("warming up")
    warm_up(engine, load)
    progress("running the workload")
    before = run_load(engine, load, peaks, "a")
    if before.log.beaten:                                # steps beat the peaks, which were measured on a busier machine
        progress("measuring the machine again")
        peaks = machine_peaks(config.device, again=True)
        before = run_load(engine, load, peaks, "a2")
    preemptions = sum(step.preemptions for step in before.log.times)
    wasted = sum(sums.recomputed for sums in before.log.sums.values())
    progress("profiling the same steps")
    profiled, document = profiled_run(engine, load)
    progress("running it again")
    after = run_load(engine, load, peaks, "b")
    trace = read_trace(document)
    overhead = profiler_overhead(before.log, profiled, after.log)
    spent, kept = profiler_seconds(before.log, profiled, overhead), [step.kept for step in profiled.times]
    document[KNOWN] = {"profiler_s": spent, "kept": kept, "gpu": shown(before.clocks)}      # for a later `diagnose --from-trace`
    kv_usage = _kv_usage(engine, before.log)
    steps = len(profiled.times)
    model = StepCosts(before.log.shape, engine.model.weight_reads)
    costs = profiled.rows.costs(model)
    rates = peaks.read_bytes_s, before.log.rates(peaks)
    setting = setting_of(engine, before, kv_usage, preemptions, peaks)
    tokens = sum(step.tokens for step in before.log.times)
    facts = facts_of(
        [trace], part_costs(costs, *rates, steps_with(trace.work, steps)), spent, kept,
        flops_s=float(rates[1].max()), read_bytes_s=rates[0], preemptions=preemptions,
        recomputed=wasted / max(1, tokens), kv_usage=kv_usage, rows=_mean_rows(before.log), lost=1 - kept_part(before.log),
        faster=setting.faster, untimed=setting.untimed, linear_share=setting.linear_share, clocks=before.clocks,
    )
    findings = find_patterns(facts)
    window = with_seen_launches(whole_window(before), facts)
    verdict = judge(window, setting)
    recorded = facts.kernels / max(1, facts.steps) * peaks.launch_s      # in a CUDA graph: kernel after kernel, without the host
    speeds = speeds_of(before.log, profiled, costs, trace, rates, config.depth > 0, recorded)
    progress("planning what could be changed")
    what_if = WhatIf(config, load, speeds, engine.model.weight_reads)
    planned = what_if.changes(preemptions)
    remedies = ranked(verdict, findings, planned, made_already(engine))
    measured = sum(own_seconds(step) for step in before.log.times)
    tree = {
        "application": figures(before.outcomes, slo) | {"slo": str(slo) if slo else None, "preemptions": preemptions},
        "steps": drill.steps_section(before.log.times, before.log.sums),
        "ops": drill.ops_section(facts),
        "patterns": drill.patterns_section(findings),
        "verdict": drill.verdict_section(verdict),
        "remedies": drill.remedies_section(remedies),
        "profiler": {"steps": steps, "overhead": overhead},
        "model_of_time": _time_model(what_if, measured),
        "machine": {
            "read_bytes_s": rates[0], "flops_s": float(rates[1].max()), "device": peaks.device, "load": os.getloadavg()[0],
        }, "gpu": shown(before.clocks),
        "runs_s": [before.seconds, after.seconds], "processor_s": [before.processor, after.processor],
    }
    return Diagnosed(tree, document, before.outcomes, step_points(before.log, model))


def _time_model(what_if: WhatIf, measured: float) -> dict[str, Any]:
    speeds = what_if.speeds
    return {
        "predicted_s": what_if.seconds, "measured_s": measured, "error": what_if.seconds / measured - 1,
        "least_s": dict(speeds.least), "reading": dict(speeds.reading), "computing": dict(speeds.computing),
        "beside_s": speeds.beside, "host_s": speeds.host,
    }


def workload_of(engine: Engine, load: Load) -> dict[str, Any]:
    """For the record. The model's path on this machine stays out of it."""
    config = engine.config
    name = config.model_path.name
    return {"model": name, "dtype": config.dtype, "device": config.device, **dataclasses.asdict(load),
            "options": config.options.flat() | {"model": name}, "quality": quality_of(config)}


# ── the profile ──────────────────────────────────────────────────────────────────────────────────────────────────────


def profiled_run(engine: Engine, load: Load) -> tuple[StepLog, dict[str, Any]]:
    """Profiles the first steps of the load and aborts the rest."""
    asked = load.asked(engine.config.model.vocab_size)
    with StepLog(engine.core, engine.model.weight_reads) as log, StepProfiler(engine.core) as profiler:
        drive(engine.core, asked, load.at_once, "p", profiler.step, PROFILED_STEPS)
    return log, profiler.document()


def profiler_overhead(before: StepLog, profiled: StepLog, after: StepLog) -> float:
    """Median of how much longer the same step took under the profiler."""
    pairs = zip(profiled.times, before.times, after.times, strict=False)
    ratios = [2 * own_seconds(step) / (own_seconds(one) + own_seconds(other)) for step, one, other in pairs]
    return statistics.median(ratios) - 1 if ratios else 0.0


def own_seconds(step: StepTimes) -> float:
    """Without what other programs took."""
    return step.seconds * step.kept


def kept_part(log: StepLog) -> float:
    whole = sum(step.seconds for step in log.times)
    return sum(own_seconds(step) for step in log.times) / whole if whole else 1.0


def profiler_seconds(plain: StepLog, profiled: StepLog, overhead: float) -> float:
    """What the profiler added to all its steps."""
    return max(0.0, overhead) * sum(own_seconds(step) for step in plain.times[: len(profiled.times)])


def speeds_of(
    plain: StepLog, profiled: StepLog, costs: ManyCosts, trace: Trace, rates: tuple[float, np.ndarray], overlap: bool,
    recorded: float = 0.0,
) -> Speeds:
    """The parts' own times from the profiled run, which its marks do not lengthen; the step times from the plain run."""
    steps = len(profiled.times)
    own = {part: np.zeros(steps) for part in PARTS}
    for work, seconds in zip(trace.work, own_times(trace.work), strict=True):
        if work.part in own and 0 <= work.step < steps:
            own[work.part][work.step] += seconds * 1e-6 * profiled.times[work.step].kept
    times = plain.times[:steps]
    device = [min(step.device, step.seconds) * step.kept for step in times]
    return measured_speeds(costs, own, device, [step.host * step.kept for step in times], *rates, overlap, recorded)


def step_points(log: StepLog, model: StepCosts) -> list[dict[str, Any]]:
    """Every step of a run, for plots."""
    if not log.times:
        return []
    costs = log.rows.costs(model)
    matrix = costs["flops"].sum(1)
    moved = costs.bytes.sum(1)
    return [
        {"start": step.at - step.seconds, "seconds": step.seconds, "device": step.device, "phase": step.phase,
         "tokens": step.tokens, "rows": step.rows, "flops": float(flops), "bytes": float(moves)}
        for step, flops, moves in zip(log.times, matrix, moved, strict=True)
    ]


# ── the verdict ──────────────────────────────────────────────────────────────────────────────────────────────────────


def whole_window(run: Run) -> Window:
    """The run as the verdict sees it, without the time that other programs had the CPU. Where steps were faster than the
    measured peaks allow (other programs slowed the measurement down), the steps themselves are the roof."""
    total = PhaseSums()
    for phase in PHASES:
        total.add(np.array(run.log.sums[phase].values()))
    kept = kept_part(run.log)
    window = window_of(run.seconds, total)
    window = replace(window, seconds=window.seconds * kept, busy=window.busy * kept, device=window.device * kept)
    faster = max(1.0, window.roof / window.device) if window.device else 1.0
    return replace(
        window, on_compute=window.on_compute / faster, on_weights=window.on_weights / faster, on_kv=window.on_kv / faster,
        on_activations=window.on_activations / faster, clocks=run.clocks,
    )


def with_seen_launches(window: Window, facts: Facts) -> Window:
    """On a GPU the trace shows the gaps between a step's kernels; without a trace, launch time is only predicted."""
    if facts.device != "cuda" or not facts.seconds:
        return window
    return replace(window, launch=max(window.launch, window.roof + facts.launch / facts.seconds * window.busy))


def setting_of(engine: Engine, run: Run, kv_usage: float, preemptions: int, peaks: MachinePeaks) -> Setting:
    config = engine.config
    return Setting(
        device=config.device, max_rows=config.max_num_seqs, kv_usage=kv_usage, preemptions=preemptions,
        graphs=config.graphs, overlap=config.depth > 0,
        prefix_caching=config.prefix_caching, ranks=config.options.parallel.num_ranks, faster=factors(config, peaks),
        untimed=untimed(config, peaks), linear_share=linear_share(run.log.shape),
        speculation=engine.core.scheduler.drafter.active,
    )


def made_already(engine: Engine) -> set[str]:
    """Keys of changes that this engine's settings already include."""
    config = engine.config
    made = {"graphs": config.graphs, "overlap": config.depth > 0, "kernels": config.options.model.kernels == "auto"}
    return {key for key, is_made in made.items() if is_made}


def _mean_rows(log: StepLog) -> float:
    return statistics.fmean(step.rows for step in log.times) if log.times else 0.0


def _kv_usage(engine: Engine, log: StepLog) -> float:
    """Mean share of the KV blocks that sequences held in a step, from the lengths of its rows."""
    size, blocks = common_block_size(engine.config.groups), max(1, engine.config.num_blocks - 1)
    held: Sequence[int] = [int((-(-lengths // size)).sum()) for lengths in log.rows.lengths] or [0]
    return min(1.0, statistics.fmean(held) / blocks)

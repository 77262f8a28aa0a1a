"""`ridgeline bench idle`: traces decode steps on the GPU: every kernel, and the time in which none ran.

Some steps of a steady decode are traced (CUPTI, through torch's profiler) and read back from the trace:

    busy      the union of the intervals in which a kernel, a copy or a fill ran
    own       the part of a kernel's interval after the end of all that began before it: a kernel that is launched early
              (PDL) and waits for the one before it is not charged for waiting; the own times sum to busy
    idle      1 − busy / span, the span from the first interval's start to the last one's end
    between   the idle time between the last kernel of a step and the first of the next

A launch belongs to the host's step during which it was made. Tracing costs time, so the same steps are also timed without it:
kernel times come from the trace, the step's time from the untraced steps, and idle time is given against that step as well.
`--trace FILE` reads an existing trace.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline.bench.lab.device_log import device_kind, gpu_facts
from ridgeline.bench.lab.record import finish, percentiles, record
from ridgeline.bench.lab.sweep import parse_options
from ridgeline.bench.workload.bench_engine import Engine, quality_of
from ridgeline.bench.workload.floors import step_floor
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.linear_formats import expert_bytes
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.step_cost import Peaks
from ridgeline.roofline.trace import DEVICE_WORK, LAUNCHES, Work, own_times, part_of
from ridgeline.runner.start.measure_peaks import machine_peaks
from ridgeline.user_files import read_json

BAR = 0.02                           # idle share between steps that is allowed
WARM_STEPS = 12                      # before anything is timed: compiles kernels, captures graphs
_FLOOR_PARTS = {
    "attention": ("attention",), "norms": ("norms",), "rotary and kv_write": ("rotary_write",),
    "activation": ("activation",), "linears and head": ("linears", "head"), "sampling": ("sample",),
}


def run(args: argparse.Namespace) -> None:
    if args.trace:
        trace = read_json(args.trace, "a Chrome trace")
        print(text(analyse(device_work(trace), args.steps), args.top))
        return
    if not torch.cuda.is_available():
        raise ConfigError("bench idle needs a GPU, and torch finds none here; --trace FILE reads a trace made elsewhere")
    options: dict[str, Any] = {"dtype": args.dtype, "max_model_len": 2 * args.context + 2 * args.steps + WARM_STEPS + 64}
    if args.shape:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    options |= parse_options(args.set)
    model = str(write_shape(args.shape, args.layers)) if args.shape else args.model
    peaks = machine_peaks(device_kind(options))          # before the engine takes the memory
    engine = Engine(model, **options)
    figures: dict[str, Any] = {}
    for batch in args.batch:
        found = profile_decode(engine, batch, args.context, args.steps, args.keep_trace)
        config = engine.config
        shape = decoder_shape(
            config.model, config.dtype, engine.bytes_per_weight(batch), config.kv_format,
            expert_bytes=expert_bytes(config.model, config.options.model.quantization, config.device, dtype=config.dtype),
        )
        context = args.context + args.steps // 2
        rates = Peaks(peaks.read_bytes_s, peaks.rate(engine.config.dtype))
        floor, _ = step_floor(shape, [(1, context)] * batch, rates)
        found["floor_ms"] = {name: seconds * 1e3 for name, seconds in floor.items()}
        print(f"batch {batch}, context {args.context}, {args.steps} steps of {engine.config.model_path.name}")
        print(text(found, args.top), flush=True)
        figures[f"batch_{batch}"] = found
    config = engine.config
    engine.close()
    setting = {
        "model": config.model_path.name, "dtype": config.dtype, "context": args.context,
        "steps": args.steps, "batch": args.batch, "options": options,
    }
    finish(record("idle", setting, figures, quality_of(config), gpu_facts()), args)


# ── making a trace ───────────────────────────────────────────────────────────────────────────────────────────────────


def profile_decode(
    engine: Engine, batch: int, context: int, steps: int, keep: str | None = None, salt: str = ""
) -> dict[str, Any]:
    """Bring `batch` requests to `context` tokens, then time some decode steps, and trace as many more."""
    core = engine.core
    rng = random.Random(f"idle-{batch}-{context}")
    vocab = engine.config.model.vocab_size
    length = max(1, context - WARM_STEPS - steps)
    # The first requests already decode while the last ones prefill.
    filling = -(-batch * length // max(1, engine.config.max_num_batched_tokens - batch))
    needed = WARM_STEPS + 2 * steps + filling + 16
    waiting = {
        engine.submit([rng.randrange(vocab) for _ in range(length)], needed, salt) for _ in range(batch)
    }
    while waiting:                                       # until every prompt is in the cache
        waiting -= {delta.request_id for delta in core.step()}
    for _ in range(WARM_STEPS):
        core.step()
    plain = _step_times(engine, steps)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(keep or directory) / f"decode-batch-{batch}-context-{context}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        begins = _traced(engine, steps, path)
        trace = json.loads(path.read_text())
    while core.has_work:
        core.step()
    found = analyse(device_work(trace, begins), steps)
    found["step_ms"] = plain * 1e3                       # without a trace
    found["idle_share_untraced"] = max(0.0, 1 - found["busy_us_per_step"] / 1e3 / found["step_ms"])
    return found


def _step_times(engine: Engine, steps: int) -> float:
    """Seconds per decode step, without a trace."""
    _synchronise(engine)
    start = time.perf_counter()
    for _ in range(steps):
        engine.core.step()
    _synchronise(engine)
    return (time.perf_counter() - start) / steps


def _traced(engine: Engine, steps: int, path: Path) -> list[int]:
    """Write the trace of `steps` steps; returns when each began on the host, in nanoseconds of the wall clock."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    begins: list[int] = []
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        _synchronise(engine)
        for _ in range(steps):
            begins.append(time.time_ns())
            engine.core.step()
        _synchronise(engine)
    profiler.export_chrome_trace(str(path))
    return begins


def _synchronise(engine: Engine) -> None:
    if engine.config.device == "cuda":
        torch.cuda.synchronize()


# ── reading a trace ──────────────────────────────────────────────────────────────────────────────────────────────────


def device_work(trace: dict[str, Any], begins: Sequence[int] = ()) -> list[Work]:
    """What the device did, in order. With the host's times at which steps began, also which step it belongs to."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    borders = [(begin - base) / 1e3 for begin in begins]
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launched: dict[int, float] = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        if event.get("cat") not in DEVICE_WORK:
            continue
        start = float(event["ts"])
        when = launched.get(event.get("args", {}).get("correlation", -1))
        step = bisect.bisect_right(borders, when) - 1 if when is not None and borders else -1
        found.append(Work(event["name"], start, start + float(event["dur"]), step))
    return sorted(found, key=lambda work: work.start)


def analyse(work: Sequence[Work], steps: int) -> dict[str, Any]:
    """Busy and idle time, launches and the time of every kernel."""
    if not work:
        raise ConfigError("the trace holds no device kernels")
    span = max(each.end for each in work) - work[0].start
    between, reached, last_step = 0.0, work[0].start, work[0].step
    kernels: dict[str, list[tuple[float, float]]] = {}   # own time, and the whole interval
    for each, own in zip(work, own_times(work), strict=True):    # in order of their begin
        gap = each.start - reached
        if gap > 0 and each.step != last_step:
            between += gap
        kernels.setdefault(each.name, []).append((own, each.end - each.start))
        reached = max(reached, each.end)
        last_step = max(last_step, each.step)
    busy = sum(own for times in kernels.values() for own, _ in times)
    table: list[dict[str, Any]] = [
        {
            "name": name, "part": part_of(name), "count": len(times), "per_step": len(times) / steps,
            "own_us": sum(own for own, _ in times), "median_own_us": percentiles([own for own, _ in times])["median"],
            "median_us": percentiles([whole for _, whole in times])["median"], "share": sum(own for own, _ in times) / busy,
        }
        for name, times in kernels.items()
    ]
    parts: dict[str, float] = {}
    for row in table:
        parts[row["part"]] = parts.get(row["part"], 0.0) + row["own_us"] / steps
    known = {each.step for each in work} - {-1}
    return {
        "steps": steps, "span_us": span, "busy_us_per_step": busy / steps, "idle_share": 1 - busy / span,
        "idle_between_steps_share": between / span if known else None, "steps_seen": len(known),
        "launches_per_step": len(work) / steps, "us_per_step_by_part": parts,
        "kernels": sorted(table, key=lambda row: -row["own_us"]),
    }


def text(found: dict[str, Any], top: int) -> str:
    """The analysis as a page."""
    between = found["idle_between_steps_share"]
    lines = [
        f"  {found['launches_per_step']:.1f} launches a step, busy {found['busy_us_per_step']:,.0f} µs a step",
        f"  idle {found['idle_share']:.2%} of the traced time; between steps "
        + ("unknown" if between is None else f"{between:.2%} (bar {BAR:.0%}: {'met' if between <= BAR else 'MISSED'})"),
        *([f"  a step takes {found['step_ms'] * 1e3:,.0f} µs untraced: idle {found['idle_share_untraced']:.2%} of that"]
          if "step_ms" in found else []),
        "",
        "  own µs a step by part" + (", and its floor" if "floor_ms" in found else ""),
    ]
    floors = found.get("floor_ms", {})
    for part, spent in sorted(found["us_per_step_by_part"].items(), key=lambda item: -item[1]):
        floor = sum(floors.get(name, 0.0) for name in _FLOOR_PARTS.get(part, ())) * 1e3
        against = f"  floor {floor:10,.1f}  {floor / spent:4.0%}" if floor and spent else ""
        lines.append(f"    {part:20s} {spent:10,.1f}{against}")
    if floors:
        whole = sum(floors.values()) * 1e3
        busy, step = found["busy_us_per_step"], found["step_ms"] * 1e3
        shares = f"{whole / busy:4.0%} of busy, {whole / step:4.0%} of the step"
        lines.append(f"    {'all':20s} {busy:10,.1f}  floor {whole:10,.1f}  {shares}")
    lines += ["", f"  {'count/step':>10s} {'own µs/step':>12s} {'own µs':>9s} {'whole µs':>9s} {'share':>6s}  kernel"]
    for row in found["kernels"][:top]:
        name = row["name"] if len(row["name"]) <= 110 else row["name"][:107] + "..."
        lines.append(
            f"  {row['per_step']:10.1f} {row['own_us'] / found['steps']:12,.1f} {row['median_own_us']:9.2f} "
            f"{row['median_us']:9.2f} {row['share']:6.1%}  {name}"
        )
    rest = found["kernels"][top:]
    if rest:
        own, share = sum(row["own_us"] for row in rest) / found["steps"], sum(row["share"] for row in rest)
        lines.append(f"  {sum(row['per_step'] for row in rest):10.1f} {own:12,.1f} {'':19s} {share:6.1%}  {len(rest)} more")
    return "\n".join(lines)

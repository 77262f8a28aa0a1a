"""`ridgeline bench host`: measures the host's time per step and per token.

Times scheduling a decode step, packing it (apply and pack), processing its result (update) and counting it for the roofline, at
several numbers of running requests; the cost of a new request; and the speed of tokenising and detokenising. No model runs: on
a machine with a GPU, rows are packed for it as the runner does. Steps with drafts are measured in processor time, beside steps
of as many rows without (host_drafts.py). With `--shape NAME` the steps are those of a real engine, including launches
(host_engine.py); `plan --fit --host` needs such a record of a GPU machine.
"""

from __future__ import annotations

import argparse
import functools
import pydoc_data.topics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.bench.lab.device_log import device_kind, gpu_facts
from ridgeline.bench.lab.record import finish, percentiles, record
from ridgeline.bench.workload.host_drafts import CALLS, drafted_steps
from ridgeline.bench.workload.host_engine import engine_steps
from ridgeline.bench.workload.plan_only import PlanOnly
from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.cache.manager import KVManager
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.errors import ConfigError
from ridgeline.messages import Request, StepPlan, StepResult
from ridgeline.ops.cpu import native
from ridgeline.process import embedded
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.roofline.steps import StepRecorder
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.scheduler import Scheduler, SchedulerLimits
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, Shape, most_queries
from ridgeline.sizes.kv_spec import KVGroupSpec
from ridgeline.text.detokenizer import TextStream
from ridgeline.text.tokenizer import Tokenizer

BLOCK_SIZE, PROMPT, ANSWER = 16, 100, 1000
REPORT_STEPS = 100                   # half a second of steps of 5 ms
# Tokens of a new request's prompt; are all but the last in the prefix cache?
ADMITTED = {"admitting_64": (64, False), "admitting_2048": (2048, False), "admitting_2048_cached": (2048, True)}
_WARM_STEPS = 10                     # not counted
RECORDED = DecoderShape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256)


def run(args: argparse.Namespace) -> None:
    running = args.running or ([1, 128] if args.shape else [256, 1024])
    steps = args.steps if args.steps is not None else 200 if args.shape else 600
    _check(running, steps, args)
    drafted = [_rows_and_drafts(each) for each in args.drafts]
    device = device_kind({})
    figures = engine_steps(args.shape, args.layers, running, steps) if args.shape else mocked_steps(running, steps, device)
    for name, times in figures.items():
        print(_line(name, times))
    for name, times in with_drafts(drafted, steps, device).items():
        figures[name] = times
        print(_drafted_line(name, times))
    for name, times in admissions(device).items():
        figures[name] = times
        print(f"  {name.replace('_', ' ')}: {times['add_ms']['median']:.3f} ms to add a request, "
              f"{times['plan_ms']['median']:.3f} ms to schedule it first")
    if (model := embedded.find()) is None:
        print("  text was not measured: it needs the embedded model's tokenizer; run `ridgeline pull`")
    else:
        figures["text"] = text = text_rates(model)
        print(
            f"  tokenise {text['encode_tokens_per_s']:,.0f} tokens/s   "
            f"detokenise, streamed {text['stream_tokens_per_s']:,.0f} tokens/s"
        )
    workload = {"running": running, "steps": steps, "prompt": PROMPT, "device": device, "drafts": args.drafts}
    if args.shape:
        workload |= {"model": args.shape, "layers": args.layers or SHAPES[args.shape]["num_hidden_layers"]}
    finish(record("host", workload, figures, gpu=gpu_facts() or None), args)


def _check(running: list[int], steps: int, args: argparse.Namespace) -> None:
    if steps < REPORT_STEPS or steps > ANSWER - 2 * _WARM_STEPS or min(running) < 1:
        raise ConfigError(f"--steps must be between {REPORT_STEPS} and {ANSWER - 2 * _WARM_STEPS}, and --running above 0; got "
                          f"{steps} and {', '.join(map(str, running))}")
    if args.layers is not None and not args.shape:
        raise ConfigError("--layers needs --shape NAME")


def _line(name: str, times: dict[str, Any]) -> str:
    middle = {part: times[f"{part}_ms"]["median"] for part in ("plan", "pack", "update", "record", "host")}
    said = f"{name.removeprefix('running_'):>6} running: {middle['host']:.3f} ms a step = plan {middle['plan']:.3f} + pack "
    if "sample_ms" in times:                             # of an engine
        return said + (f"and launch {middle['pack']:.3f} + sample {times['sample_ms']['median']:.3f} + update "
                       f"{middle['update']:.3f} + record {middle['record']:.4f}; waits {times['collect_ms']['median']:.3f} "
                       f"for the device, in {times['step_ms']['median']:.3f}")
    return said + (f"{middle['pack']:.3f} + update {middle['update']:.3f} + record {middle['record']:.4f}, and "
                   f"{times['report_ms']['median']:.4f} for the report ({times['record_share']:.1%})")


def _rows_and_drafts(said: str) -> tuple[int, int]:
    rows, _, each = said.partition(":")
    if not (rows.isdigit() and each.isdigit() and int(rows) >= 1 and 1 <= int(each) < most_queries(int(rows))
            and int(rows) * (1 + int(each)) <= MOST_VERIFIED):
        raise ConfigError(f"--drafts takes ROWS:EACH, at most {MOST_VERIFIED} tokens together and {most_queries(1) - 1} drafts "
                          f"of a row (fewer of many rows); got {said}")
    return int(rows), int(each)


def with_drafts(drafted: list[tuple[int, int]], steps: int, device: str) -> dict[str, Any]:
    """Steps with drafts, each beside steps of as many rows without: `drafts_256_by_1`, `drafts_256_by_0`."""
    return {f"drafts_{rows}_by_{each}": drafted_steps(rows, each, steps, device)
            for rows, width in drafted for each in dict.fromkeys((0, width))}


def _drafted_line(name: str, times: dict[str, Any]) -> str:
    said = ", ".join(f"{part} {times[f'{part}_ms']['median']:.3f}" for part in CALLS)
    _, rows, _, each = name.split("_")
    took = times["host_ms"]
    return (f"{rows:>6} running, {each} drafts each: {took['median']:.3f} ms of processor time a step ({took['least']:.3f} at "
            f"least): {said}; the message to the front end {times['tell_ms']['median']:.3f}")


def mocked_steps(running: list[int], steps: int, device: str) -> dict[str, Any]:
    return {f"running_{count}": host_step(count, steps, device) for count in running}


def host_step(running: int, steps: int, device: str = "cpu") -> dict[str, Any]:
    """Times of a steady decode step with that many rows, in milliseconds."""
    groups = [KVGroupSpec((0,), None, BLOCK_SIZE, RECORDED.kv_heads, RECORDED.head_dim)]
    blocks = running * -(-(PROMPT + ANSWER) // BLOCK_SIZE) + 1
    limits = SchedulerLimits(max_rows=running, max_step_tokens=running * PROMPT, max_model_len=PROMPT + ANSWER)
    scheduler = Scheduler(limits, KVManager(groups, blocks), native=native.if_built())
    on_gpu = device == "cuda"
    rows = DeviceRows(
        groups, running, limits.max_model_len, limits.max_step_tokens, int(on_gpu), torch.device(device), RECORDED.heads
    )
    packer = _Packer(rows, Shape(running) if on_gpu else None)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    for number in range(running):
        # Different lengths, so that block borders do not fall on the same step for all.
        prompt = rng.integers(0, 1000, PROMPT - number % BLOCK_SIZE).tolist()
        scheduler.add(Request(str(number), prompt, params))
    recorder = StepRecorder(RECORDED, "bfloat16")
    recorder.use(MachinePeaks("any", 1e12, {"float32": 1e14, "bfloat16": 1e14}, 1e-6, ""))
    plan_ms, pack_ms, update_ms, record_ms, report_ms = [], [], [], [], []
    for number in range(steps + _WARM_STEPS):
        plan, planned = _timed(scheduler.schedule)
        _, packed = _timed(functools.partial(packer.pack, plan))
        result = _result(plan, rows)
        _, updated = _timed(functools.partial(scheduler.update, result))
        _, recorded = _timed(functools.partial(_record, recorder, plan, result))
        if number % REPORT_STEPS == _WARM_STEPS - 1:
            report_ms.append(_timed(recorder.fold)[1] / REPORT_STEPS)
        if number >= _WARM_STEPS:
            record_ms.append(recorded)
            plan_ms.append(planned)
            pack_ms.append(packed)
            update_ms.append(updated)
    together = [plan + pack for plan, pack in zip(plan_ms, pack_ms, strict=True)]
    times: dict[str, Any] = {
        "plan_ms": percentiles(plan_ms),
        "pack_ms": percentiles(pack_ms),
        "plan_and_pack_ms": percentiles(together),
        "update_ms": percentiles(update_ms),
        "record_ms": percentiles(record_ms),
        "report_ms": percentiles(report_ms[1:]),         # per step
        "host_ms": percentiles([sum(each) for each in zip(together, update_ms, record_ms, strict=True)]),
    }
    recording, step = (
        sum(times[name]["median"] for name in names)
        for names in (("record_ms", "report_ms"), ("plan_and_pack_ms", "update_ms"))
    )
    return times | {"record_share": recording / step}


class _Packs(PlanOnly):
    """Answers every plan at once, but packs it for the device first, as the runner does."""

    def __init__(self, rows: DeviceRows) -> None:
        super().__init__()
        self._rows = rows

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self._rows.apply(plan)
        self._rows.pack(plan, None)


def admissions(device: str = "cpu", requests: int = 64, repeats: int = 9) -> dict[str, dict[str, Any]]:
    """By prompt, milliseconds of a new request: to add it to the core, and of its first step, in which its prompt is looked up
    in the prefix cache, gets blocks and is packed. The kinds take turns, so that all see the same machine."""
    found: dict[str, dict[str, list[float]]] = {name: {"add_ms": [], "plan_ms": []} for name in ADMITTED}
    rng = np.random.default_rng(0)
    longest = max(length for length, _ in ADMITTED.values())
    options = EngineConfig.of(
        model=str(write_shape("llama-3.1-8b")), skip_tokenizer_init=True, max_model_len=longest + ANSWER,
        max_num_seqs=requests + 1, max_num_batched_tokens=(requests + 1) * longest, enable_prefix_caching=True, step_time_ms=0.0,
    )
    config = replace(resolve(options, DeviceFacts("cuda", 10**12, ("bfloat16",))), depth=0)
    for repeat in range(repeats + 1):                    # the first warms up
        for name, (length, cached) in ADMITTED.items():
            rows = DeviceRows(config.groups, config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens,
                              int(device == "cuda"), torch.device(device), RECORDED.heads)
            core = EngineCore(config, _Packs(rows))
            shared = rng.integers(0, 100_000, length).tolist()
            _add_all(core, [shared])
            core.step()
            prompts = [shared if cached else rng.integers(0, 100_000, length).tolist() for _ in range(requests)]
            asked = [[*prompt[:-1], number] for number, prompt in enumerate(prompts)]
            _, added = _timed(functools.partial(_add_all, core, asked))
            _, planned = _timed(core.step)
            core.close()
            if repeat:
                found[name]["add_ms"].append(added / requests)
                found[name]["plan_ms"].append(planned / requests)
    return {name: {part: percentiles(values) for part, values in times.items()} for name, times in found.items()}


def _add_all(core: EngineCore, prompts: list[list[int]]) -> None:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=ANSWER // 2, ignore_eos=True)
        core.add(Request(f"{len(prompts)}-{number}", prompt, params, cache_salt="admission"))


def _record(recorder: StepRecorder, plan: StepPlan, result: StepResult) -> None:
    recorder.planned(plan)
    recorder.took(result, 0, True)


class _Packer:
    """Packs as the runner does: a step that repeats the one before only advances what changes (DeviceRows.advance)."""

    def __init__(self, rows: DeviceRows, shape: Shape | None) -> None:
        self._rows = rows
        self._shape = shape                              # of decode steps
        self._key: tuple[bytes, ...] = ()

    @torch.inference_mode()
    def pack(self, plan: StepPlan) -> None:
        rows, before = self._rows, self._key
        rows.apply(plan)
        self._key = (plan.rows.tobytes(), plan.num_tokens.tobytes(), plan.want.tobytes())
        if before != self._key or plan.added or rows.advance() is None:
            rows.pack(plan, self._shape if plan.total_tokens == len(plan.rows) else None)


def _result(plan: StepPlan, rows: DeviceRows) -> StepResult:
    ones = np.ones(len(plan.rows), np.int32)
    return StepResult(plan.step, ones.reshape(-1, 1) * 7, ones, rows.length[plan.rows])


def text_rates(model: Path) -> dict[str, float]:
    tokenizer = Tokenizer.load(model)
    text = "".join(pydoc_data.topics.topics.values())
    lines = [line for line in text.splitlines() if line.strip()]
    encoded, encode_ms = _timed(lambda: [tokenizer.encode(line) for line in lines])
    tokens = [token for line in encoded for token in line]
    stream = TextStream(tokenizer)
    _, stream_ms = _timed(lambda: [stream.feed([token]) for token in tokens])
    return {
        "characters": float(len(text)),
        "tokens": float(len(tokens)),
        "encode_tokens_per_s": len(tokens) / encode_ms * 1e3,
        "stream_tokens_per_s": len(tokens) / stream_ms * 1e3,
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    value = call()
    return value, (time.perf_counter() - start) * 1e3

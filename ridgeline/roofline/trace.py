"""Reads a profiler's trace as plain intervals: device work, host work, memory, and steps.

Reads Chrome traces as torch's profiler writes them, one file per rank. On a GPU the device's work is its kernels, copies and
fills; on a CPU it is the ops, which the profiling code marks as `op:NAME`, and torch's own ops outside of them. Steps are marked
`step`, and the phases of the engine's loop `phase:NAME`. Times are microseconds of the trace's clock.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.gpus.clocks import Clocks

STEP, PHASE, OP = "step", "phase:", "op:"                # marks of the profiling code
KNOWN = "ridgeline"                  # key of our own fields in a trace: the profiler's cost, the share of CPU time, the clocks
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
MARKS = ("user_annotation", "cpu_op")
_COLLECTIVE = re.compile(
    r"one_shot_sum|nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_kernel", re.IGNORECASE
)
_ALLOCATES = re.compile(r"^(cuda|hip|cu)(Host)?(Mem)?(Malloc|Free|Alloc)", re.IGNORECASE)
_WAITS = re.compile(r"Synchronize$|^cudaMemcpy$|^cuMemcpy(Dto|Hto)[HD](_v2)?$")
# Which part of a step a kernel belongs to, by its name; the first that fits.
PARTS = (
    ("communication", _COLLECTIVE.pattern),
    ("experts", r"_experts_|^packed_few_|^few_bytes_|_gather_pairs_"),
    ("attention", r"attention|attn|flash|fmha|^(decode|one_row|prefill|prefix|prompt|latent_(decode|older|prompt))_kernel"),
    ("linears and head", r"gemm|gemv|fp8_rows|_fp8_groups|_scale_sums|_expand_|_few_rows_|^latent_(absorb|widen|merge)"),
    ("sampling", r"sampl|argmax|topk|top_k|softmax|logprob|sort|^_(best|race|select|finish|mask|scan|accept|late)_kernel"),
    ("norms", r"norm"),
    ("rotary and kv_write", r"rotary|rope|kv_write|latent_write|write_kv|reshape_and_cache"),
    ("activation", r"activation|silu|gelu|gated"),
    ("linears and head", r"nvjet|cutlass|cublas|linear|splitk|matmul|xmma|dot_kernel"),
    ("copies", r"memcpy|memset|copy_kernel|fill"),
)
# The same for our own ops, where they are marked.
OP_PARTS = {
    "linear": "linears and head", "normed_linear": "linears and head", "block_linear": "linears and head",
    "rms_norm": "norms", "gated_activation": "activation", "rotary": "rotary and kv_write",
    "kv_write": "rotary and kv_write", "rotary_write": "rotary and kv_write", "paged_attention": "attention",
    "decode_attention": "attention", "greedy": "sampling", "sample": "sampling", "apply_mask": "sampling",
    "logprobs": "sampling", "experts": "experts", "route_experts": "experts", "latent_write": "rotary and kv_write",
    "latent_attention": "attention", "latent_decode": "attention",
}
# And for torch's, where nothing is marked around them.
_TORCH_PARTS = (
    ("linears and head", r"aten::(linear|mm|addmm|matmul|bmm)|mkldnn"), ("attention", r"scaled_dot_product"),
    ("embedding", r"aten::embedding"), ("copies", r"aten::(copy_|to|_to_copy|index_copy_|index_select|cat)$"),
)
# Of the cost model's ops, those that a part of a trace stands for.
COSTS_OF = {
    "attention": ("attention",), "norms": ("norms",), "rotary and kv_write": ("rotary_write",),
    "activation": ("activation",), "linears and head": ("qkv", "output", "gate_up", "down", "head"), "sampling": ("sample",),
    "embedding": ("embedding",), "experts": ("experts",),
}
_HOLDS_OTHERS = ("decode_attention", "latent_decode")     # ops that may call others: those count, not they


@dataclass(frozen=True, slots=True)
class Work:
    """Something the device did."""

    name: str
    start: float
    end: float
    step: int = -1                   # number of the step that launched it, if that is known
    part: str = ""

    @property
    def is_collective(self) -> bool:
        return self.part == "communication"


@dataclass(frozen=True, slots=True)
class Span:
    """Something the host did."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Memory:
    at: float
    bytes: int                       # taken, or below zero given back
    total: int                       # in use afterwards


@dataclass(slots=True)
class Trace:
    """Of one rank; everything in order of its begin."""

    device: str = "cuda"             # whose work it is
    rank: int = 0
    work: list[Work] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    phases: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)      # calls that block until the device is done
    allocations: list[Span] = field(default_factory=list)        # calls that ask the driver for memory, or give it back
    memory: list[Memory] = field(default_factory=list)
    profiler: float = 0.0            # seconds that profiling took of these steps, if the trace says so …
    kept: list[float] = field(default_factory=list)      # … and the share of each step in which the process had a CPU
    clocks: Clocks | None = None     # of the GPU in these steps, if the trace says so


def read_trace(document: Mapping[str, Any]) -> Trace:
    """From the JSON of a Chrome trace."""
    events = sorted(
        (event for event in document.get("traceEvents", ()) if event.get("ph") == "X"),
        key=lambda event: (float(event["ts"]), -float(event.get("dur", 0))),
    )
    on_gpu = any(event.get("cat") in DEVICE_WORK for event in events)
    found = Trace("cuda" if on_gpu else "cpu", int(document.get("distributedInfo", {}).get("rank", 0)))
    launched: dict[int, float] = {}
    for event in events:
        category, name = event.get("cat"), event["name"]
        span = Span(name, float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        if category in LAUNCHES:
            launched[event.get("args", {}).get("correlation", -1)] = span.start
            if _WAITS.search(name):
                found.waits.append(span)
            elif _ALLOCATES.search(name):
                found.allocations.append(span)
        elif category in MARKS and name == STEP:
            found.steps.append(span)
        elif category in MARKS and name.startswith(PHASE):
            found.phases.append(Span(name.removeprefix(PHASE), span.start, span.end))
    found.steps = _launching(found)
    borders = [step.start for step in found.steps]
    work = _kernels(events, launched, borders) if on_gpu else _marked_ops(events, borders)
    found.work = sorted(work, key=lambda each: each.start)
    found.memory = list(_memory(document.get("traceEvents", ())))
    known = document.get(KNOWN, {})
    found.clocks = Clocks.read(known.get("gpu") or {})
    found.profiler, found.kept = float(known.get("profiler_s", 0.0)), [float(part) for part in known.get("kept", ())]
    return found


def _launching(trace: Trace) -> list[Span]:
    """The steps in which something was launched. In others the loop only processed results, and the step recorder does not
    count those. All steps, if phases are not marked."""
    launches = [phase.start for phase in trace.phases if phase.name == "launch"]
    if not launches:
        return trace.steps
    return [step for step in trace.steps
            if bisect.bisect_left(launches, step.start) < bisect.bisect_right(launches, step.end)]


def _kernels(events: Iterable[Mapping[str, Any]], launched: Mapping[int, float], borders: Sequence[float]) -> Iterator[Work]:
    """A launch belongs to the step of the host during which it was made."""
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            start = float(event["ts"])
            when = launched.get(event.get("args", {}).get("correlation", -1))
            step = bisect.bisect_right(borders, when) - 1 if when is not None and borders else -1
            yield Work(event["name"], start, start + float(event.get("dur", 0)), step, part_of(event["name"]))


def _marked_ops(events: Iterable[Mapping[str, Any]], borders: Sequence[float]) -> Iterator[Work]:
    """Marked ops, and torch's own where none is marked. Of what lies inside something else only the outermost counts."""
    until = float("-inf")                                # the end of what was counted last
    for event in events:
        name = event["name"]
        if event.get("cat") not in MARKS or name == STEP or name.startswith(PHASE):
            continue
        own = name.removeprefix(OP)
        start = float(event["ts"])
        end = start + float(event.get("dur", 0))
        if start < until or own in _HOLDS_OTHERS:
            continue
        until = end
        part = OP_PARTS.get(own, "") or next((part for part, names in _TORCH_PARTS if re.search(names, own)), "other")
        yield Work(own, start, end, bisect.bisect_right(borders, start) - 1 if borders else -1, part)


def _memory(events: Iterable[Mapping[str, Any]]) -> Iterator[Memory]:
    """What the profiler says of torch's allocator, where it was asked to (profile_memory)."""
    for event in events:
        if event.get("name") == "[memory]":
            args = event.get("args", {})
            total = args.get("Total Allocated", args.get("Total Reserved"))
            if total is not None:
                yield Memory(float(event["ts"]), int(args.get("Bytes", 0)), int(total))


@functools.lru_cache(maxsize=4096)       # a trace has the same few hundred names, in every step again
def part_of(name: str) -> str:
    """Of a kernel."""
    return next((part for part, pattern in PARTS if re.search(pattern, name, re.IGNORECASE)), "other")


def own_times(work: Sequence[Work]) -> list[float]:
    """Of each interval, the part after the end of all that began before it; the sum is the time in which any ran."""
    found, reached = [], float("-inf")
    for each in work:
        found.append(max(0.0, each.end - max(reached, each.start)))
        reached = max(reached, each.end)
    return found


def trace_of_steps(points: Sequence[Mapping[str, Any]], counters: Mapping[str, str]) -> dict[str, Any]:
    """A Chrome trace of steps that were only counted, not profiled: each an interval in its phase's line.

    `points` have `start`, `seconds`, `device` and `phase`, in seconds; `counters` are their further numbers to draw, by
    title.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "engine"}}]
    lines = {phase: number for number, phase in enumerate(dict.fromkeys(point["phase"] for point in points))}
    for phase, number in lines.items():
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": f"{phase} steps"}})
    for point in points:
        place = {"pid": 0, "tid": lines[point["phase"]]}
        start, seconds, device = point["start"] * 1e6, point["seconds"] * 1e6, point["device"] * 1e6
        rest = {name: value for name, value in point.items() if name not in ("start", "phase")}
        host = max(0.0, seconds - device)                # the device ends where the step does
        slice = {"ph": "X", "cat": "step", **place}
        events.append(slice | {"name": f"{point['phase']} step", "ts": start, "dur": seconds, "args": rest})
        events.append(slice | {"name": "on the device", "ts": start + host, "dur": seconds - host})
        events += [
            {"ph": "C", "pid": 0, "name": title, "ts": start, "args": {title: point[name]}} for name, title in counters.items()
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}

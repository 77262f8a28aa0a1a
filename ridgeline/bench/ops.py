"""`ridgeline bench ops`: times every operation × implementation × case × dtype against the machine's roofline.

The cases are the ops' own timed cases, or on a GPU those of `op_cases.py` with the sizes of an 8B model; by default only the
implementations that an engine would use there. Several copies of the inputs are used in turn, so that caches do not stand in
for memory. On a GPU kernels are compiled first, in parallel, and the calls are captured in a CUDA graph where possible, so that
launch time does not count. Linears use the engine's kernel table (ops/kernel_table.py) and are compared with cuBLAS; paged
attention is compared with torch's attention over contiguous keys and values of the same sizes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ridgeline.ops
from ridgeline.bench.lab import sustain, table
from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.kernel_bands import kernel_rows
from ridgeline.bench.lab.launched import kernel_facts, launched_kernels
from ridgeline.bench.lab.machine_log import Watch
from ridgeline.bench.lab.record import percentiles, record, write
from ridgeline.bench.workload.op_cases import CONTIGUOUS, GPU_CASES, Beside, beside, make_inputs
from ridgeline.errors import ConfigError
from ridgeline.ops.compile_ahead import CompileAhead
from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.registry import REGISTRY, Implementation, Op, Site
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.runner.start.gpu_names import gpu_names
from ridgeline.runner.start.measure_peaks import machine_peaks
from ridgeline.sizes.op_costs import Case, Cost

MOST_COPIES = 32                     # of an op's inputs
MOST_BYTES = 4 * 2**30               # of all copies together
SAMPLE_SECONDS = {"cuda": 1e-3, "cpu": 5e-3}   # a sample holds as many calls as fill this time
HOLD_SECONDS = 0.5                   # that what computes is repeated for, until a GPU has found the clocks its power allows
DEFINITION = "reference"             # what an implementation is called that only defines the op


@dataclass(slots=True)
class Row:
    op: str
    implementation: str
    case: str
    dtype: str
    microseconds: dict[str, float] = field(default_factory=dict)     # median, p10, p90
    bytes: int = 0                   # that a perfect kernel moves …
    flops: int = 0                   # … and computes
    gb_s: float = 0.0
    tflop_s: float = 0.0
    intensity: float = 0.0           # FLOPs per byte
    regime: str = ""                 # what bounds it on this machine: memory, compute, or a launch's own time
    roofline: float = 0.0            # share of what the machine allows
    timed_by: str = ""               # graph, events, clock
    held_us: float | None = None     # a call's time at the end of half a second of such calls, where a GPU computes
    kernels: list[dict[str, Any]] = field(default_factory=list)      # registers, spills and shared memory of each
    error: str = ""
    sustain: dict[str, Any] = field(default_factory=dict)            # how its time changed over minutes

    def cells(self) -> dict[str, str]:
        """The row as text, by column."""
        found = {"op": self.op, "implementation": self.implementation, "case": self.case, "dtype": self.dtype}
        if self.error:
            return found | {"µs": self.error}
        times = self.microseconds
        largest = {key: max((kernel[key] for kernel in self.kernels), default="") for key in ("registers", "spills", "shared")}
        return found | {
            "µs": f"{times['median']:.2f}", "P10–P90": f"{times['p10']:.2f}–{times['p90']:.2f}",
            "MB": f"{self.bytes / 1e6:.3g}", "GFLOP": f"{self.flops / 1e9:.3g}", "GB/s": f"{self.gb_s:.1f}",
            "TFLOP/s": f"{self.tflop_s:.3f}", "FLOP/B": f"{self.intensity:.1f}",
            "regime": self.regime, "roofline": f"{self.roofline:.0%}", "by": self.timed_by,
            "held µs": "" if self.held_us is None else f"{self.held_us:.1f}",
            **{key: str(value) for key, value in largest.items()},
        }


def device_of(asked: str | None) -> str:
    """The device that is measured: as asked for, else the GPU if there is one."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch finds no GPU here; use --device cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> None:
    args.device = device_of(args.device)
    if args.table:
        facts = device_facts(torch.device("cuda")) if torch.cuda.is_available() else H200
        print(table.rendered(kernel_rows(facts), args.format, {}))
        return
    peaks = machine_peaks(args.device, args.peaks_again)
    rows = []
    for row in measure_all(args, peaks):
        rows.append(row)
        if args.format == "md":
            print(_progress(row), flush=True)
    if not rows:
        raise ConfigError("no timed case matches --case, --dtype and --implementation; leave them out to measure all")
    if args.sustain is not None:
        sustain_rows([row for row in rows if not row.error], args, peaks)
    setting = {"device": args.device, "samples": args.samples, "peaks": _fields(peaks)}
    made = record("ops", setting, {"rows": [_fields(row) for row in rows]}, gpu=gpu_facts() if args.device == "cuda" else None)
    if args.out:
        write(made, Path(args.out))
    print(f"\n{rendered(rows, peaks)}" if args.format == "md" else table.rendered(cells(rows), args.format, made))


def sustain_rows(rows: list[Row], args: argparse.Namespace, peaks: MachinePeaks) -> None:
    """Each row again, for minutes."""
    with Watch(gpu_names() if args.device == "cuda" else []) as watch:
        for row in rows:
            case = next(case for case in cases(REGISTRY[row.op], args.device) if case.name == row.case)
            again = functools.partial(
                measure_case, REGISTRY[row.op], case, row.dtype, args.device, peaks, args.samples, [row.implementation]
            )
            row.sustain = sustain.repeat(functools.partial(_median_of, again), args.sustain, watch)
            print(f"{row.op} {row.implementation} {row.case} {row.dtype}: {row.sustain['verdict']}", file=sys.stderr)


def _median_of(measured: Callable[[], Iterator[Row]]) -> dict[str, float]:
    return {"microseconds": next(measured()).microseconds["median"]}


def all_ops() -> dict[str, Op[Any, Any]]:
    for module in pkgutil.walk_packages(ridgeline.ops.__path__, "ridgeline.ops."):
        importlib.import_module(module.name)
    return REGISTRY


def measure_all(args: argparse.Namespace, peaks: MachinePeaks) -> Iterator[Row]:
    chosen = [
        (op, case, dtype)
        for op in (REGISTRY[name] for name in args.op or engine_ops(args.device))
        for case in cases(op, args.device)
        if not args.case or any(word in case.name for word in args.case)
        for dtype in dtypes(case, args.device, args.dtype)
    ]
    compile_kernels(chosen, args.device, args.implementation)
    for op, case, dtype in chosen:
        yield from measure_case(op, case, dtype, args.device, peaks, args.samples, args.implementation)


def engine_ops(device: str) -> list[str]:
    """On a GPU those that have a kernel there: in place of the others an engine runs one of these."""
    return [
        name for name, op in sorted(REGISTRY.items())
        if device != "cuda" or any(each.name == "triton" for each in op.implementations)
    ]


def compile_kernels(chosen: list[tuple[Op[Any, Any], Case, str]], device: str, only: Iterable[str] | None) -> None:
    """All that the cases will launch, many at a time: one after the other they would take longer than what is measured."""
    with CompileAhead(torch.device(device)) as ahead:
        if not ahead.active:
            return
        with torch.inference_mode(), ahead.collecting():
            for op, case, dtype in chosen:
                try:
                    for run in runs_of(op, case, dtype, device, only):
                        run.function(*run.args, **run.kwargs)
                except (RuntimeError, AssertionError, TypeError, ValueError, KeyError):
                    continue                             # the timed run reports the error
        ahead.finish()


def cases(op: Op[Any, Any], device: str) -> list[Case]:
    timed = [case for case in op.cases if case.timed]
    if device != "cuda" or not timed or op.name not in GPU_CASES:
        return timed
    return [
        Case(name, {**timed[0].sizes, **sizes}, dtypes=timed[0].dtypes, timed=True)
        for name, sizes in GPU_CASES[op.name].items()
    ]


def dtypes(case: Case, device: str, asked: Iterable[str] | None) -> list[str]:
    """Those asked for that the case knows; by default one: the narrow one on a GPU, float32 on a CPU."""
    if asked:
        return [dtype for dtype in asked if dtype in case.dtypes]
    wanted = ("bfloat16", "float32") if device == "cuda" else ("float32", "bfloat16")
    return [dtype for dtype in wanted if dtype in case.dtypes][:1]


def measure_case(
    op: Op[Any, Any], case: Case, dtype: str, device: str, peaks: MachinePeaks, samples: int,
    only: Iterable[str] | None = None,
) -> Iterator[Row]:
    """A row per implementation that can run it."""
    try:
        runs = runs_of(op, case, dtype, device, only)
    except (TypeError, KeyError) as error:               # the op's sizes have changed, and its GPU cases have not
        yield Row(op.name, "", case.name, dtype, error=f"no inputs: {error}")
        return
    for run in runs:
        row = Row(op.name, run.name, case.name, dtype)
        try:
            _measure(row, run, device, samples)
            _rate(row, run.cost or op.case_cost(case, dtype), dtype, peaks)
            if row.regime == "compute" and row.timed_by == "graph":
                row.held_us = held(run, device) * 1e6
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            row.error = f"failed: {' '.join(str(error).split())[:100]}"
        yield row


def runs_of(op: Op[Any, Any], case: Case, dtype: str, device: str, only: Iterable[str] | None) -> list[Beside]:
    """Implementations and what stands beside them, with their inputs: those asked for; else all, but on a GPU no definition
    where there is a kernel."""
    args, kwargs = make_inputs(op, case, getattr(torch, dtype), device)
    able = [each for each in op.implementations if supported(each, args)]
    if only is None and device == "cuda" and len(able) > 1:
        able = [each for each in able if each.name != DEFINITION]
    runs = [Beside(each.name, each.function, args, kwargs) for each in able]
    runs += beside(op, case, getattr(torch, dtype), args)
    return [run for run in runs if only is None or run.name in only]


def supported(implementation: Implementation, args: tuple[Any, ...]) -> bool:
    first = args[0]
    return implementation.supports(Site(first.device.type, first.dtype, first.shape[-1]))


# ── timing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _measure(row: Row, run: Beside, device: str, samples: int) -> None:
    with torch.inference_mode():
        with launched_kernels() as kernels:
            run.function(*run.args, **run.kwargs)
        row.kernels = kernel_facts(kernels)
        seconds, row.timed_by = time_calls(run.function, _copies(run.args, run.kwargs, device), device, samples)
    row.microseconds = {name: value * 1e6 for name, value in percentiles(seconds).items()}


def _rate(row: Row, cost: Cost, dtype: str, peaks: MachinePeaks) -> None:
    seconds = row.microseconds["median"] / 1e6
    row.bytes, row.flops = cost.bytes, cost.flops
    memory, compute = cost.bytes / peaks.read_bytes_s, cost.flops / peaks.rate(dtype)
    row.gb_s, row.tflop_s = cost.bytes / seconds / 1e9, cost.flops / seconds / 1e12
    row.intensity = cost.flops / cost.bytes
    row.roofline = max(memory, compute) / seconds
    row.regime = "launch" if max(memory, compute) < peaks.launch_s else "memory" if memory >= compute else "compute"


Call = tuple[tuple[Any, ...], dict[str, Any]]


def time_calls(
    function: Callable[..., Any], copies: list[Call], device: str, samples: int
) -> tuple[list[float], str]:
    """Seconds per call, a number for each sample, and what they were taken by. The copies are used in turn."""
    if device == "cpu":
        return _clock(function, copies, samples), "clock"
    if _capturable(function, *copies[0]):
        return _graph(function, copies, samples), "graph"
    return _events(function, copies, samples), "events"


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> list[Call]:
    """The inputs several times over, until they are larger than the last cache."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 2**26
    count = min(MOST_COPIES, max(1, MOST_BYTES // max(1, size)), -(-3 * cache // max(1, size)))

    def cloned(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    more = [
        (tuple(cloned(value) for value in args), {name: cloned(value) for name, value in kwargs.items()})
        for _ in range(count - 1)
    ]
    return [(args, kwargs), *more]


def _capturable(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call never makes the host wait: only such a call can be captured in a CUDA graph."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(*args, **kwargs)
        return True
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def held(run: Beside, device: str) -> float:
    """Seconds per call once the GPU has been at it for a while: bursts of a millisecond end before its clocks fall."""
    with torch.inference_mode():
        stream, graph, calls = _recorded(run.function, _copies(run.args, run.kwargs, device))
        with torch.cuda.stream(stream):
            begin, found = time.perf_counter(), 0.0
            while time.perf_counter() - begin < HOLD_SECONDS:
                found = min(_event_times(lambda: [graph.replay() for _ in range(20)], 1)) / 20
        torch.cuda.synchronize()
    return found / calls


def _graph(function: Callable[..., Any], copies: list[Call], samples: int) -> list[float]:
    """Seconds per call of a captured sequence of calls."""
    stream, graph, calls = _recorded(function, copies)
    with torch.cuda.stream(stream):
        graph.replay()
        times = _event_times(graph.replay, samples)
    torch.cuda.synchronize()
    return [seconds / calls for seconds in times]


def _recorded(function: Callable[..., Any], copies: list[Call]) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph, int]:
    """A CUDA graph with enough calls to fill a sample's time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(*copies[0][0], **copies[0][1])
        once = min(_event_times(lambda: function(*copies[0][0], **copies[0][1]), 3))
        calls = max(1, min(256, int(SAMPLE_SECONDS["cuda"] / max(once, 1e-7))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(calls):
                args, kwargs = copies[number % len(copies)]
                function(*args, **kwargs)
    return stream, graph, calls


def _events(function: Callable[..., Any], copies: list[Call], samples: int) -> list[float]:
    turn = iter(range(10**9))

    def call() -> None:
        args, kwargs = copies[next(turn) % len(copies)]
        function(*args, **kwargs)

    call()
    return _event_times(call, samples)


def _event_times(call: Callable[[], Any], samples: int) -> list[float]:
    found = []
    for _ in range(samples):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        found.append(before.elapsed_time(after) / 1e3)
    return found


def _clock(function: Callable[..., Any], copies: list[Call], samples: int) -> list[float]:
    def timed(calls: int) -> float:
        start = time.perf_counter()
        for number in range(calls):
            args, kwargs = copies[number % len(copies)]
            function(*args, **kwargs)
        return (time.perf_counter() - start) / calls

    once = min(timed(1) for _ in range(3))
    calls = max(1, min(1000, int(SAMPLE_SECONDS["cpu"] / max(once, 1e-7))))
    return [timed(calls) for _ in range(samples)]


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


COLUMNS = (
    "op", "implementation", "case", "dtype", "µs", "P10–P90", "MB", "GFLOP", "GB/s", "TFLOP/s", "FLOP/B", "regime", "roofline",
    "held µs", "by", "registers", "spills", "shared",
)


def cells(rows: list[Row]) -> list[dict[str, str]]:
    return [{column: row.cells().get(column, "") for column in COLUMNS} for row in rows]


def rendered(rows: list[Row], peaks: MachinePeaks) -> str:
    """A markdown table, what it is measured against, and paged against contiguous attention."""
    lines = [table.as_markdown(cells(rows))]
    rates = ", ".join(f"{dtype} {rate / 1e12:.2f} TFLOP/s" for dtype, rate in peaks.flops_s.items())
    lines += ["", f"{peaks.device}: reads {peaks.read_bytes_s / 1e9:,.0f} GB/s, {rates} (measured {peaks.measured})"]
    lines += [f"paged / contiguous attention, {name}: {ratio:.2f}" for name, ratio in paged_ratios(rows).items()]
    return "\n".join(lines)


def paged_ratios(rows: list[Row]) -> dict[str, float]:
    """Per case and implementation: time over torch's time on contiguous tensors."""
    timed = [row for row in rows if row.op == "paged_attention" and not row.error]
    flat = {(row.case, row.dtype): row.microseconds["median"] for row in timed if row.implementation == CONTIGUOUS}
    return {
        f"{row.implementation} {row.case} {row.dtype}": row.microseconds["median"] / flat[row.case, row.dtype]
        for row in timed
        if row.implementation != CONTIGUOUS and (row.case, row.dtype) in flat
    }


def _progress(row: Row) -> str:
    what = f"{row.op} {row.implementation} {row.case} {row.dtype}"
    if row.error:
        return f"{what}: {row.error}"
    return f"{what}: {row.microseconds['median']:.2f} µs, {row.roofline:.0%} of the roofline"


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}

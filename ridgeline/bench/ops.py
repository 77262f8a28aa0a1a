"""`ridgeline bench ops`: every operation × implementation × case × dtype, against the roofline of this machine.

The cases are the ops' own timed ones; on a GPU those of `GPU_CASES` in their place, with the sizes of an 8B model. Inputs
are made several times over and used in turn, so that a cache does not stand in for memory. On a GPU the calls are
recorded in a CUDA graph where that is possible, so that the time is the device's and not the launching host's. Beside
paged attention stands torch's own attention over contiguous keys and values of the same sizes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ridgeline.ops
from ridgeline.bench import sustain, table
from ridgeline.bench.device_log import gpu_facts, torch_gpus
from ridgeline.bench.peaks import MachinePeaks, machine_peaks
from ridgeline.bench.record import percentiles, record, write
from ridgeline.bench.sweep import check_runs
from ridgeline.bench.watch import Watch
from ridgeline.costs import DTYPE_BYTES, Case
from ridgeline.errors import ConfigError
from ridgeline.ops.registry import HAS_TRITON, REGISTRY, TRITON_INTERPRETED, Implementation, Op, Site

SAMPLES = 21
MOST_COPIES = 32                     # of an op's inputs
MOST_BYTES = 4 * 2**30               # of all copies together
SAMPLE_SECONDS = {"cuda": 1e-3, "cpu": 5e-3}   # a sample holds as many calls as fill this time
CONTIGUOUS = "contiguous"            # the implementation column of torch's attention over contiguous tensors

_HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_MATRICES = {
    "qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096), "head": (4096, 128256),
}  # fmt: skip


def _rows(*rows: tuple[int, int]) -> dict[str, Any]:
    return {"rows": rows, "block_size": 16, "window": None, "softcap": None, **_HEADS}


def _narrow(sizes: dict[str, Any]) -> dict[str, Any]:
    """The same over pages in fp8, as the engine has them: a scale for each token and head."""
    return sizes | {"kv_format": ("float8_e4m3fn", "token") * 2}


_ATTENTION = {
    "decode-1x640": _rows((1, 640)),
    "decode-1x8192": _rows((1, 8192)),
    "decode-16x8192": _rows(*[(1, 8192)] * 16),
    "decode-128x640": _rows(*[(1, 640)] * 128),
    "prefill-1x512": _rows((512, 512)),
    "prefill-16x512": _rows(*[(512, 512)] * 16),
    "prefill-1x8192": _rows((8192, 8192)),
    "chunk-2048-of-16384": _rows((2048, 16384)),
}
_FUSED = {
    f"rows-{batch}x{length}": _rows(*[(1, length)] * batch) | {"rotary_dim": 128}
    for batch, length in ((1, 640), (1, 8192), (16, 8192), (128, 640))
}
# Sizes of Llama-3.1-8B by op; each is laid over the op's own first timed case, which brings what is not named here.
GPU_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "rms_norm": {f"tokens-{n}": {"tokens": n, "width": 4096, "residual": True} for n in (1, 128, 8192)},
    "rotary": {f"tokens-{n}": {"tokens": n, "rotary_dim": 128, **_HEADS} for n in (1, 128, 8192)},
    "gated_activation": {f"tokens-{n}": {"tokens": n, "intermediate": 14336} for n in (1, 128, 8192)},
    "kv_write": {f"tokens-{n}": {"tokens": n, "kv_heads": 8, "head_dim": 128, "block_size": 16} for n in (1, 128, 8192)},
    # What `plan --fit --ops` compares, here and in decode_attention: the same rows over wide pages and over narrow ones.
    "paged_attention": _ATTENTION | {f"fp8-{name}": _narrow(sizes) for name, sizes in _ATTENTION.items()} | {
        "shared-64x2000+64": _rows(*[(1, 2064)] * 64) | {"shared": ((tuple(range(64)), 2000),)},
    },
    "decode_attention": _FUSED | {f"fp8-{name}": _narrow(sizes) for name, sizes in _FUSED.items()},
    "linear": {
        f"{name}-{tokens}": {"tokens": tokens, "inputs": inputs, "outputs": outputs, "bias": False}
        for tokens in (1, 8, 32, 128, 256)
        for name, (inputs, outputs) in _MATRICES.items()
    } | {"gate_up-8192": {"tokens": 8192, "inputs": 4096, "outputs": 28672, "bias": False}},
    "normed_linear": {
        f"{name}-{tokens}": {"tokens": tokens, "inputs": 4096, "outputs": outputs, "gate": gate}
        for tokens in (1, 8)
        for name, outputs, gate in (("qkv", 6144, None), ("gate_up", 14336, "silu"))
    },
    "rotary_write": {
        f"tokens-{n}": {"tokens": n, "rotary_dim": 128, "block_size": 16, **_HEADS} for n in (1, 128, 8192)
    },
    "logprobs": {f"rows-{n}": {"rows": n, "vocab": 128256} for n in (1, 128)},
    "greedy": {f"rows-{n}": {"rows": n, "vocab": 128256} for n in (1, 128)},
    "apply_mask": {f"rows-{n}": {"rows": n, "vocab": 128256} for n in (1, 128)},
    "sample": {
        f"{kind}-{n}": {"rows": n, "vocab": 128256, "kind": kind}
        for kind in ("greedy", "random", "filtered")
        for n in (1, 128)
    },
}  # fmt: skip


@dataclass(slots=True)
class Row:
    op: str
    implementation: str
    case: str
    dtype: str
    microseconds: dict[str, float] = field(default_factory=dict)     # median, p10, p90
    gb_s: float = 0.0
    tflop_s: float = 0.0
    intensity: float = 0.0           # FLOPs per byte
    regime: str = ""                 # what bounds it on this machine: memory, compute, or a launch's own time
    roofline: float = 0.0            # share of what the machine allows
    timed_by: str = ""               # graph, events, clock
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
            "GB/s": f"{self.gb_s:.1f}", "TFLOP/s": f"{self.tflop_s:.3f}", "FLOP/B": f"{self.intensity:.1f}",
            "regime": self.regime, "roofline": f"{self.roofline:.0%}", "by": self.timed_by,
            **{key: str(value) for key, value in largest.items()},
        }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = sorted(all_ops())
    parser.add_argument("--op", nargs="+", choices=names, default=names)
    parser.add_argument("--implementation", nargs="+", help="only these, such as triton reference contiguous")
    parser.add_argument("--case", nargs="+", help="only cases whose name holds one of these words")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPE_BYTES), help="default: the one this device is fast in")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--peaks-again", action="store_true", help="measure this machine's peaks anew")
    sustain.add_arguments(parser)
    table.add_format(parser)
    parser.add_argument("--out", help="also write the record, as JSON, to this file")


def run(args: argparse.Namespace) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no GPU here; use --device cpu")
    check_runs(args.samples, 1, "--samples")             # every timing makes calls that do not count before it
    sustain.check(args.sustain)
    peaks = machine_peaks(args.device, args.peaks_again)
    rows = []
    for row in measure_all(args, peaks):
        rows.append(row)
        if args.format == "md":
            print(_progress(row), flush=True)
    if not rows:
        raise ConfigError("no timed case is as --case, --dtype and --implementation say; without them all are measured")
    if args.sustain is not None:
        sustain_rows([row for row in rows if not row.error], args, peaks)
    setting = {"device": args.device, "samples": args.samples, "peaks": _fields(peaks)}
    made = record("ops", setting, {"rows": [_fields(row) for row in rows]}, gpu=gpu_facts() if args.device == "cuda" else None)
    if args.out:
        write(made, Path(args.out))
    print(f"\n{rendered(rows, peaks)}" if args.format == "md" else table.rendered(cells(rows), args.format, made))


def sustain_rows(rows: list[Row], args: argparse.Namespace, peaks: MachinePeaks) -> None:
    """Each row again, for minutes."""
    with Watch(torch_gpus() if args.device == "cuda" else []) as watch:
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
    for module in pkgutil.iter_modules(ridgeline.ops.__path__):
        importlib.import_module(f"ridgeline.ops.{module.name}")
    return REGISTRY


def measure_all(args: argparse.Namespace, peaks: MachinePeaks) -> Iterator[Row]:
    for name in args.op:
        op = REGISTRY[name]
        for case in cases(op, args.device):
            if args.case and not any(word in case.name for word in args.case):
                continue
            for dtype in dtypes(case, args.device, args.dtype):
                yield from measure_case(op, case, dtype, args.device, peaks, args.samples, args.implementation)


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
) -> Iterator[Row]:  # fmt: skip
    """A row per implementation that can run it."""
    try:
        args, kwargs = make_inputs(op, case, getattr(torch, dtype), device)
    except (TypeError, KeyError) as error:               # the op's sizes have changed, and its GPU cases have not
        yield Row(op.name, "", case.name, dtype, error=f"no inputs: {error}")
        return
    runs: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (implementation.name, implementation.function, args, kwargs)
        for implementation in op.implementations
        if supported(implementation, args)
    ]
    contiguous = contiguous_attention(case, getattr(torch, dtype), device) if op.name == "paged_attention" else None
    if contiguous is not None:
        runs.append((CONTIGUOUS, *contiguous))
    for name, function, its_args, its_kwargs in runs:
        if only and name not in only:
            continue
        row = Row(op.name, name, case.name, dtype)
        try:
            _measure(row, function, its_args, its_kwargs, device, samples)
            _rate(row, op.case_cost(case, dtype), dtype, peaks)
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            row.error = f"failed: {' '.join(str(error).split())[:100]}"
        yield row


def make_inputs(op: Op[Any, Any], case: Case, dtype: torch.dtype, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's own inputs. Large matrices are drawn on the device itself; tables of rows are built on the host."""
    generator = torch.Generator().manual_seed(len(case.name))
    if device == "cuda" and not isinstance(case.sizes.get("rows"), tuple):
        try:
            with torch.device(device):
                return op.inputs(torch.Generator(device).manual_seed(len(case.name)), dtype, device, **case.sizes)
        except (RuntimeError, TypeError):
            pass                                         # something in it is made for the host
    return op.inputs(generator, dtype, device, **case.sizes)


def supported(implementation: Implementation, args: tuple[Any, ...]) -> bool:
    first = args[0]
    return implementation.supports(Site(first.device.type, first.dtype, first.shape[-1]))


def contiguous_attention(case: Case, dtype: torch.dtype, device: str) -> Any:
    """torch's attention over contiguous keys and values: (function, args, kwargs); None where rows differ in shape."""
    sizes = case.sizes
    shapes = set(sizes["rows"])
    if len(shapes) != 1 or any(sizes.get(name) for name in ("window", "softcap", "shared", "kv_format")):
        return None
    queries, keys = next(iter(shapes))
    if queries not in (1, keys):
        return None                                      # a chunk: torch's causal mask would begin at the wrong corner

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(len(sizes["rows"]), heads, tokens, sizes["head_dim"], device=device).to(dtype)

    args = (random(sizes["heads"], queries), random(sizes["kv_heads"], keys), random(sizes["kv_heads"], keys))
    grouped = sizes["heads"] != sizes["kv_heads"]
    return F.scaled_dot_product_attention, args, {"is_causal": queries > 1, "enable_gqa": grouped}


# ── timing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _measure(
    row: Row, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str, samples: int
) -> None:
    with torch.inference_mode():
        with launched_kernels() as kernels:
            function(*args, **kwargs)
        row.kernels = kernel_facts(kernels)
        seconds, row.timed_by = time_calls(function, _copies(args, kwargs, device), device, samples)
    row.microseconds = {name: value * 1e6 for name, value in percentiles(seconds).items()}


def _rate(row: Row, cost: Any, dtype: str, peaks: MachinePeaks) -> None:
    seconds = row.microseconds["median"] / 1e6
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
    """Whether a call never makes the host wait: only such a call can be recorded in a graph."""
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


def _graph(function: Callable[..., Any], copies: list[Call], samples: int) -> list[float]:
    """Seconds per call of a recorded sequence of calls."""
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
        graph.replay()
        times = _event_times(graph.replay, samples)
    torch.cuda.synchronize()
    return [seconds / calls for seconds in times]


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


# ── what the compiler made ───────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def launched_kernels() -> Iterator[list[tuple[str, int]]]:
    """Name and handle of every Triton kernel that is launched inside."""
    found: list[tuple[str, int]] = []
    hooks = None
    if HAS_TRITON and not TRITON_INTERPRETED:
        triton: Any = importlib.import_module("triton")
        hooks = getattr(getattr(getattr(triton, "knobs", None), "runtime", None), "launch_enter_hook", None)

    def note(metadata: Any) -> None:
        data = metadata.get()
        found.append((data.get("name", ""), data.get("function", 0)))

    if hooks is None or not hasattr(hooks, "add"):
        yield found
        return
    hooks.add(note)
    try:
        yield found
    finally:
        hooks.remove(note)


def kernel_facts(launched: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Registers, spills and shared memory of these kernels, as the loaded binaries have them."""
    if not launched:
        return []
    wanted = {handle for _, handle in launched}
    found: dict[int, dict[str, Any]] = {}
    for kernel in _compiled():
        handle = getattr(kernel, "function", None)
        if handle in wanted:
            found[handle] = {
                "name": kernel.metadata.name, "registers": kernel.n_regs, "spills": kernel.n_spills,
                "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages,
            }  # fmt: skip
    return list(found.values())


def _compiled() -> Iterator[Any]:
    """Every compiled kernel of the op modules."""
    for module in pkgutil.iter_modules(ridgeline.ops.__path__):
        for value in vars(importlib.import_module(f"ridgeline.ops.{module.name}")).values():
            for cache in getattr(value, "device_caches", {}).values():
                yield from cache[0].values()


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


COLUMNS = (
    "op", "implementation", "case", "dtype", "µs", "P10–P90", "GB/s", "TFLOP/s", "FLOP/B", "regime", "roofline", "by",
    "registers", "spills", "shared",
)  # fmt: skip


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

"""One row through the layers of a mixture on one GPU: the chosen kernels and variants of them, in turn.

    python benchmarks/studies/experts_one_row/run.py --out result.json [--seconds 180] [--layers 12] [--context 640]

1. Every variant of attention and experts is checked against its definition in float32, at the models' true sizes.
2. For every variant a CUDA graph is captured: all layers of a model without embedding and head, each with weights of its own, so
   that a replay reads far more than the L2 holds. Graphs are replayed in turn until the time is up. A figure is a median.
3. Each graph is traced once: own times of its kernels (bench/idle.py).

PREDICTED has microseconds of a layer, written down before the first run. Without a GPU, TRITON_INTERPRET=1 checks tiny sizes.
result.json was made at commit 889a7807. Its "chosen" of Qwen3 is "attention in two kernels" here, and the kernels of the variants
that are not here have been deleted (README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from ridgeline.bench.idle import analyse, device_work
from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import percentiles, record, write
from ridgeline.ops import kernel_table
from ridgeline.ops.attention import fused_decode, kernel_one_row
from ridgeline.ops.attention.attention_arguments import AttentionWork, device_shares, latent_shares
from ridgeline.ops.attention.fused_decode import decode_attention, decode_attention_reference, decode_attention_triton
from ridgeline.ops.attention.kernel_one_row import OneRow
from ridgeline.ops.experts import few_tokens, router
from ridgeline.ops.experts.experts_op import experts, experts_reference
from ridgeline.ops.experts.few_tokens import Few
from ridgeline.ops.latent.fused_latent import latent_decode, latent_decode_reference, latent_decode_triton
from ridgeline.ops.linear import select
from ridgeline.ops.linear.linear_op import linear_triton, normed_linear_triton
from ridgeline.ops.linear.select import GemvPlan
from ridgeline.ops.registry import TRITON_INTERPRETED, set_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
MOST_ERROR = 0.02                    # bfloat16 rounds weights, x and what lies between the products
BLOCK_SIZE = 16
Patch = tuple[Any, str, Any]

QWEN3, DEEPSEEK = "qwen3-30b-a3b", "deepseek-v2-lite"
SIZES: dict[str, dict[str, Any]] = {
    QWEN3: {"hidden": 2048, "width": 768, "experts": 128, "used": 8, "shared": 0, "normalise": True,
            "attention": {"heads": 32, "kv_heads": 4, "head_dim": 128, "rotary_dim": 128, "norm": True,
                          "window": None, "softcap": None}},
    DEEPSEEK: {"hidden": 2048, "width": 1408, "experts": 64, "used": 6, "shared": 2816, "normalise": False,
               "attention": {"heads": 16, "nope": 128, "rope": 64, "value": 128, "rank": 512, "interleaved": True}},
}
TINY: dict[str, dict[str, Any]] = {
    QWEN3: {"hidden": 64, "width": 24, "experts": 8, "used": 3, "shared": 0, "normalise": True,
            "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16, "rotary_dim": 16, "norm": True,
                          "window": None, "softcap": None}},
    DEEPSEEK: {"hidden": 64, "width": 24, "experts": 8, "used": 3, "shared": 48, "normalise": False,
               "attention": {"heads": 4, "nope": 16, "rope": 8, "value": 16, "rank": 32, "interleaved": True}},
}
TWO_KERNELS: Patch = (fused_decode, "suits_one_row", lambda *_: False)
THREE_CTAS: Patch = (select, "_gemv_plan", lambda inputs, gated: GemvPlan(4, 4, 3))
EIGHT_WARPS: Patch = (kernel_one_row, "one_row_tiles", lambda *_: OneRow(64, 8, 2, 104))
UP_OF_FOUR: Patch = (few_tokens, "few_up", lambda *_: Few(4, 2048, 4))
UP_IN_TWO_STEPS: Patch = (few_tokens, "few_up", lambda *_: Few(2, 1024, 2))
ROUTER_OF_FOUR: Patch = (router, "_OUTPUTS", 4)
ROUTER_OF_ONE: Patch = (router, "_OUTPUTS", 1)
VARIANTS: dict[str, dict[str, list[Patch]]] = {          # the first is always timed
    QWEN3: {
        "attention in two kernels": [TWO_KERNELS],
        "attention of one row": [],
        "attention of one row, QKV on 3 CTAs": [THREE_CTAS],
        "attention of one row, 8 warps, QKV on 3 CTAs": [EIGHT_WARPS, THREE_CTAS],
        "up of 4 outputs": [TWO_KERNELS, UP_OF_FOUR],
        "up in 2 steps": [TWO_KERNELS, UP_IN_TWO_STEPS],
        "router, 4 experts a CTA": [TWO_KERNELS, ROUTER_OF_FOUR],
        "router, 1 expert a CTA": [TWO_KERNELS, ROUTER_OF_ONE],
    },
    DEEPSEEK: {"chosen": [], "up of 4 outputs": [UP_OF_FOUR], "up in 2 steps": [UP_IN_TWO_STEPS]},
}
PREDICTED: dict[str, dict[str, float]] = {               # us of a layer; the first from the records before
    QWEN3: {
        "attention in two kernels": 50.3, "attention of one row": 44.8, "attention of one row, QKV on 3 CTAs": 44.8,
        "attention of one row, 8 warps, QKV on 3 CTAs": 44.6, "up of 4 outputs": 50.3, "up in 2 steps": 50.3,
        "router, 4 experts a CTA": 50.4, "router, 1 expert a CTA": 50.2,
    },
    DEEPSEEK: {"chosen": 67.7, "up of 4 outputs": 67.7, "up in 2 steps": 67.7},
}


@contextlib.contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """With these in place of what the kernels' rules say. Rules remember: forgotten before and after."""
    with contextlib.ExitStack() as stack:
        for target, attribute, value in patches:
            stack.enter_context(mock.patch.object(target, attribute, value))
        for cached in (kernel_table._chosen, select.plan, select.ring_plan):
            cached.cache_clear()
        yield
    for cached in (kernel_table._chosen, select.plan, select.ring_plan):
        cached.cache_clear()


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def wider(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.float() if given.dtype == DTYPE else given
    return tuple(map(wider, given)) if isinstance(given, tuple) else given


def attention_inputs(name: str, length: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sizes = SIZES[name]["attention"]
    op, device = (decode_attention if name == QWEN3 else latent_decode), torch.device(DEVICE)
    args, kwargs = op.inputs(
        torch.Generator().manual_seed(seed), DTYPE, DEVICE, rows=((1, length),), block_size=BLOCK_SIZE, **sizes
    )
    shares = (device_shares([length], sizes["kv_heads"], None, None, False, device) if name == QWEN3
              else latent_shares([length], sizes["heads"], device))
    return args, kwargs | {"shares": shares, "work": AttentionWork(1, 0)}


def fresh(args: tuple[Any, ...]) -> list[Any]:
    """Inputs of a second call: caches are written."""
    return [each.clone() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]


def check_attention(name: str, length: int) -> float:
    args, kwargs = attention_inputs(name, length, length)
    mine, theirs = fresh(args), list(wider(tuple(fresh(args))))
    found = chosen_attention(name, kwargs["work"])(*mine, **kwargs)
    wide = {key: wider(value) for key, value in kwargs.items() if key not in ("shares", "work", "workspace")}
    set_kernels("reference")                             # of the ops that a definition calls
    wanted = (decode_attention_reference if name == QWEN3 else latent_decode_reference)(*theirs, **wide)
    set_kernels("auto")
    caches = slice(4, 6) if name == QWEN3 else slice(6, 7)
    written = [error(ours.nan_to_num(), cache.nan_to_num()) for ours, cache in zip(mine[caches], theirs[caches], strict=True)]
    return max(error(found, wanted), *written)


def chosen_attention(name: str, work: AttentionWork) -> Callable[..., Tensor]:
    """As layers/attention.py: one op, or the two of its definition."""
    if name == DEEPSEEK:
        return latent_decode_triton
    return decode_attention_triton if fused_decode.joined(work, 1, None) else decode_attention_reference


def check_experts(name: str) -> float:
    sizes = SIZES[name]
    case = {"tokens": 1, "spread": 0, "bias": False, "kind": "silu", "limit": None,
            **{key: sizes[key] for key in ("hidden", "width", "experts", "used", "shared")}}
    args, kwargs = experts.inputs(torch.Generator().manual_seed(1), DTYPE, DEVICE, **case)
    kernel = next(each.function for each in experts.implementations if each.name == "triton")
    return error(kernel(*args, **kwargs), experts_reference(*wider(args), **{key: wider(value) for key, value in kwargs.items()}))


def checked(name: str, variant: str, patches: list[Patch], lengths: list[int]) -> dict[str, float]:
    with patched(patches):
        found = {f"attention, {length} keys": check_attention(name, length) for length in lengths}
        found["experts"] = check_experts(name)
    for what, relative in found.items():
        if not relative < MOST_ERROR:
            raise ValueError(f"{name}, {variant}: {what} differs by {relative:.2e}")
    return found


# ── the layers ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Layer:
    """Weights and KV of one layer."""

    def __init__(self, name: str, context: int, seed: int) -> None:
        sizes, self.name = SIZES[name], name
        hidden, width, count = sizes["hidden"], sizes["width"], sizes["experts"]
        self.args, self.kwargs = attention_inputs(name, context, seed)
        first = self.args[0]
        projected = first.shape[-1] if name == QWEN3 else first.shape[1] * first.shape[2] + self.args[1].shape[-1]
        attended = sizes["attention"]["heads"] * sizes["attention"].get("head_dim", sizes["attention"].get("value"))
        self.norms = [1 + normal(hidden, scale=0.1) for _ in range(2)]
        self.qkv, self.output = normal(projected, hidden), normal(hidden, attended)
        self.router = normal(count, hidden)
        self.gate_up, self.down = normal(count, 2 * width, hidden), normal(count, hidden, width)
        shared = sizes["shared"]
        self.shared = (normal(2 * shared, hidden), normal(hidden, shared)) if shared else None
        self.reads = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def attended(self, qkv: Tensor) -> Tensor:
        if self.name == DEEPSEEK:
            heads, latent = self.args[0].shape[1], self.args[1].shape[-1]
            q = qkv[:, :-latent].unflatten(-1, (heads, -1))
            return latent_decode_triton(q, qkv[:, -latent:], *self.args[2:], **self.kwargs).flatten(1)
        return chosen_attention(self.name, self.kwargs["work"])(qkv, *self.args[1:], **self.kwargs).flatten(1)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        sizes = SIZES[self.name]
        qkv, stream = normed_linear_triton(x, residual, self.norms[0], 1e-6, self.qkv)
        out = linear_triton(self.attended(qkv), self.output)
        rows, stream, chosen, shares = router.normed_route_rows_triton(
            out, stream, self.norms[1], 1e-6, self.router, None, sizes["used"], normalise=sizes["normalise"]
        )
        kernel = next(each.function for each in experts.implementations if each.name == "triton")
        return kernel(rows, self.gate_up, self.down, chosen, shares, "silu", reads=self.reads, shared=self.shared), stream


def normal(*shape: int, scale: float | None = None) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(0, shape[-1] ** -0.5 if scale is None else scale)


def run_layers(layers: list[Layer], start: Tensor, x: Tensor) -> Tensor:
    x.copy_(start)                                       # a chain begins with a kernel without PDL
    residual = None
    for layer in layers:
        x, residual = layer.forward(x, residual)
    return x


def captured(layers: list[Layer], patches: list[Patch]) -> Callable[[], None]:
    start = normal(1, SIZES[layers[0].name]["hidden"], scale=1.0)
    x = torch.empty_like(start)
    with patched(patches):
        if DEVICE == "cpu":
            run_layers(layers, start, x)
            return lambda: None
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                out = run_layers(layers, start, x)
        torch.cuda.synchronize()
        if not bool(torch.isfinite(out).all()):
            raise ValueError("the layers' result is not finite")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run_layers(layers, start, x)
    return graph.replay


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def timed(replay: Callable[[], None], count: int = 10) -> float:
    """Microseconds of a replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def traced(replay: Callable[[], None], layers: int, count: int = 5) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(count):
                replay()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(f"{folder}/trace.json")
        found = analyse(device_work(json.loads(Path(f"{folder}/trace.json").read_text())), count)
    return [{"name": each["name"][:60], "per_step": each["per_step"], "own_us": each["median_own_us"],
             "layer_us": each["own_us"] / count / layers} for each in found["kernels"]]


def measured(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    begun = time.monotonic()
    layers = [Layer(name, args.context, seed) for seed in range(args.layers)]
    lengths = [args.context, 65, 1] if DEVICE == "cpu" else [args.context, 513, 3000, 64, 1]
    runs: dict[str, dict[str, Any]] = {}
    graphs: dict[str, Callable[[], None]] = {}
    for variant, patches in VARIANTS[name].items():
        found = runs[variant] = {"predicted_us": PREDICTED[name][variant]}
        if graphs and time.monotonic() - begun > 0.75 * seconds:
            found["error"] = "no time was left"
            continue
        try:
            found["checks"] = checked(name, variant, patches, lengths)
            graphs[variant] = captured(layers, patches)
            if DEVICE == "cuda":
                graphs[variant]()
                torch.cuda.synchronize()
        except Exception as failure:
            graphs.pop(variant, None)
            found["error"] = f"{type(failure).__name__}: {failure}"[:300]
        print(f"{name}, {variant}: {found.get('error', 'right')}, {time.monotonic() - begun:.0f} s", flush=True)
    if DEVICE == "cpu":
        return runs
    for variant, replay in graphs.items():
        runs[variant]["kernels"] = traced(replay, args.layers)
    times: dict[str, list[float]] = {variant: [] for variant in graphs}
    rounds = 0
    while rounds < 5 or (time.monotonic() - begun < seconds and rounds < 60):
        for variant, replay in graphs.items():           # in turn: a clock that changes meets them all
            times[variant].append(timed(replay) / args.layers)
        rounds += 1
    for variant, spent in times.items():
        runs[variant]["layer_us"] = percentiles(spent)
    return runs


def show(name: str, runs: dict[str, Any]) -> None:
    print(f"{name}: us a layer (10 % and 90 % of the rounds), predicted, own times by kernel")
    for variant, found in runs.items():
        if "layer_us" not in found:
            print(f"  {variant:46s} {found.get('error', 'checked')}")
            continue
        spent = found["layer_us"]
        kernels = ", ".join(f"{each['name'].strip('_')[:22]} {each['layer_us']:.1f}"
                            for each in found["kernels"] if each["layer_us"] > 0.3)
        print(f"  {variant:46s} {spent['median']:6.2f} ({spent['p10']:.2f} to {spent['p90']:.2f})  {found['predicted_us']:5.1f}  "
              f"{kernels}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(SIZES), choices=sorted(SIZES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--seconds", type=float, default=180.0, help="for all shapes together")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if DEVICE == "cpu":
        if not TRITON_INTERPRETED:
            raise SystemExit("this needs a GPU, or TRITON_INTERPRET=1 to check the kernels at tiny sizes")
        SIZES.update(TINY)
        args.layers, args.context = 1, 70
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    begun = time.monotonic()
    for place, name in enumerate(args.shape):
        left = args.seconds - (time.monotonic() - begun)
        figures[name] = measured(name, args, left / (len(args.shape) - place))
        if args.out is not None:
            workload = {"layers": args.layers, "context": args.context, "dtype": "bfloat16", "variants": list(VARIANTS[name])}
            write(record("experts_one_row", workload, figures, "exact", gpu_facts() if DEVICE == "cuda" else None), args.out)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    for name, runs in figures.items():
        show(name, runs)


if __name__ == "__main__":
    main()

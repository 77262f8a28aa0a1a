"""4-bit linears on one GPU: errors against float64, microseconds by rows and plan, and the linears of whole layers in a graph.

    python benchmarks/studies/int4_linears/run.py --out result.json

Matrices of Llama-3.1-8B. Weights rotate through more memory than the L2 cache holds. `chain` is all linears of LAYERS layers
with their norms and activations, without attention, scaled to 32 layers: what a decode step spends outside of attention, the
head and sampling. Every variant compiles in a process of its own first, and every check has a time limit: a kernel that hangs
ends its own process only. Predictions, written before the first run, are in PREDICTED.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.graph_times import graph_microseconds
from ridgeline.bench.lab.record import commit
from ridgeline.ops.linear.fp8_linear import fp8_linear, gated_rows, multiplied, normed_fp8_linear
from ridgeline.ops.linear.fp8_rows import fp8_rows_reference
from ridgeline.ops.linear.linear_op import linear, normed_linear
from ridgeline.ops.packed import packed_linear as packed_op
from ridgeline.ops.packed.packed_expand import expand
from ridgeline.ops.packed.packed_gemm import packed_gemm
from ridgeline.ops.packed.packed_gemv import packed_gemv
from ridgeline.ops.packed.packed_linear import packed_linear, packed_linear_gpu
from ridgeline.ops.packed.packed_weight import PackedWeight, byte_scales, expanded, pack, quantised
from ridgeline.ops.packed.select_packed import PackedGemmPlan, PackedGemvPlan
from ridgeline.ops.rms_norm import rms_norm, rms_norm_reference

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 6
SHARED = 232_448 - 1024
BANDWIDTH = 4.38e12
PREDICTED = {
    "gemv, 1 row": "qkv 4.6, o 3.7, gate_up 15.5, down 8.6 us (bytes alone 3.0, 2.0, 13.8, 6.9); the chain 1.25 ms of 32 "
    "layers, 2.7 times as fast as bf16's 3.37",
    "gemv, 8 rows": "gate_up 16.5 us: x's operands are read from shared memory by all lanes",
    "gemm, 16 rows": "qkv 6, o 5, gate_up 19, down 10.5 us; chain 1.65 ms, 2.2 times bf16's 3.6",
    "gemm, 64 rows": "qkv 8, o 7, gate_up 30, down 16 us; chain 2.5 ms, 1.6 times bf16's 4.04",
    "gemm, 128 rows": "qkv 13, o 10, gate_up 52, down 27 us; chain 3.8 ms, 1.14 times bf16's 4.33",
    "gemm, 256 rows": "gate_up 100, down 52, qkv 24, o 18 us against bf16 92, 50, 22, 18: chain 0.93",
    "second version, codes in registers": "gemv: qkv 6, o 5, gate_up 17.5, down 10 us. gemm: 16 rows gate_up 20, down 12; 64 "
    "rows gate_up 32; 128 rows gate_up 55, down 32 us (the first version, with rings: 9.0, 7.1, 22.9, 15.5; 39, 22; 67, 43)",
    "third version": "gemv: the sums of a strip added by hand instead of by gl.sum, which the second version's times by number "
    "of warps say takes 0.2 us for each warp: gate_up 16.5, qkv 5.6, o 5, down 11 us. gemm: loops that fit into the instruction "
    "cache, and a sixth fewer instructions: 16 rows gate_up 24, 64 rows 38, 128 rows 55, 256 rows 105 us",
    "fourth version": "two or three CTAs on an SM for few rows of gemm, so that one unpacks while another waits: 16 rows gate_up "
    "31.5 -> 26, down 16.7 -> 14 us",
    "expand": "a layer's 218 M weights: 112 MB read, 436 MB written, 130 us, and cuBLAS after it",
}
# What lost, from earlier runs of this study on the same kind of card: microseconds of the best plan, qkv, o, gate_up, down.
EARLIER = {
    "bf16, the same runs": {"1": [13.6, 10.2, 54.8, 28.8], "16": [15.2, 12.0, 57.6, 30.8], "128": [17.5, 14.5, 66.5, 37.3]},
    "codes through a ring in shared memory (cp.async), sums of a strip by gl.sum": {
        "1": [9.0, 7.1, 22.9, 15.5], "16": [14.8, 10.5, 39.2, 22.3], "128": [28.3, 23.2, 66.9, 43.3]},
    "codes in registers, sums of a strip by gl.sum, gemm's run of 512 inputs unrolled": {
        "1": [8.0, 6.6, 21.7, 15.0], "16": [10.8, 7.9, 32.8, 19.1], "128": [24.8, 21.3, 61.2, 40.4]},
    "codes in registers, sums added by hand, gemm's loop of 128 to 512 inputs": {
        "1": [6.5, 5.4, 18.7, 12.0], "16": [11.3, 8.2, 31.5, 16.7], "128": [26.4, 22.2, 57.3, 43.6]},
}
Row = dict[str, float]


# ── plans to compare ─────────────────────────────────────────────────────────────────────────────────────────────────


def gemv_plans(outputs: int, inputs: int, rows: int) -> dict[str, PackedGemvPlan]:
    """One row: groups of warps, warps of each, CTAs per SM."""
    shapes = ((1, 4, 4), (2, 4, 2), (1, 8, 2), (4, 4, 1), (2, 8, 1)) if rows == 1 else ()
    return {f"{groups} x {warps} warps, {programs} CTAs": PackedGemvPlan(groups, warps, programs)
            for groups, warps, programs in shapes}


SHAPES = {                           # by rows: parts, warps, halves, tiles, stages, CTAs per SM
    8: [(1, 8, 1, 8, 8, 1), (1, 8, 1, 4, 8, 2), (1, 4, 1, 4, 6, 3)],
    16: [(1, 8, 1, 8, 8, 1), (1, 8, 1, 4, 8, 2), (1, 4, 1, 4, 6, 3)],
    32: [(1, 8, 1, 8, 5, 1), (1, 8, 1, 4, 5, 2)],
    64: [(2, 4, 1, 4, 5, 1), (2, 4, 2, 2, 8, 1), (1, 8, 1, 2, 5, 2)],
    128: [(2, 4, 1, 2, 6, 1), (2, 4, 2, 2, 6, 1)],
}


def gemm_plans(outputs: int, inputs: int, rows: int) -> dict[str, PackedGemmPlan]:
    """As many splits as can run at once."""
    made = {}
    block_rows = next((size for size in (8, 16, 32, 64) if rows <= size), 128)
    row_blocks, strips, runs = -(-rows // block_rows), -(-outputs // 16), -(-inputs // 512)
    for parts, warps, halves, blocks, stages, programs in SHAPES[block_rows]:
        most, slots = parts * warps * halves, 132 * programs
        tiles = -(-strips // most)
        splits = next((each for each in (8, 4, 2) if tiles * row_blocks * each <= slots and runs >= each), 1)
        rounds = -(-tiles * row_blocks * splits // slots)
        step = min(most, max(3, -(-strips * row_blocks * splits // (rounds * slots))))
        label = f"{parts} x {warps} warps, {halves} halves, {64 * blocks} inputs, {programs} CTAs, {splits} splits, step {step}"
        made[label] = PackedGemmPlan(block_rows, parts, warps, halves, blocks, stages, splits, step, programs)
    return made


# ── checks, each in a process of its own ─────────────────────────────────────────────────────────────────────────────


def random_packed(
    outputs: int, inputs: int, group: int, kind: str, zero: bool, gated: bool, outer: bool = False, dtype: Any = torch.bfloat16
) -> PackedWeight:
    codes = torch.randint(256, (outputs, inputs // 2), device="cuda", dtype=torch.uint8)
    scale = ((torch.rand(outputs, inputs // group, device="cuda") + 0.5) * inputs**-0.5 / 4).to(dtype)
    zeros = torch.randint(16, scale.shape, device="cuda").to(dtype) if zero else None
    more = torch.rand(outputs, device="cuda") + 0.5 if outer else None
    return pack(codes, scale, zeros, kind=kind, gated=gated, outer=more)


CHECKS: list[dict[str, Any]] = [
    {"shape": (6144, 4096)}, {"shape": (4096, 14336)}, {"shape": (4096, 4096), "group": 32, "kind": "e2m1"},
    {"shape": (28672, 4096), "gate": "silu", "norm": True}, {"shape": (1000, 1088), "group": 64, "bias": True, "zero": True},
    {"shape": (512, 2560), "group": 16, "kind": "e2m1", "outer": True}, {"shape": (2048, 2048), "dtype": "float16", "zero": True},
    {"shape": (2048, 1536), "group": 32, "zero": True, "gate": "gelu_tanh", "bias": True, "outer": True},
]


def check(number: int, rows: int, engine: str) -> Row:
    """Every plan of one case: the error by Frobenius norms, and whether all outputs were written."""
    case = CHECKS[number]
    (outputs, inputs), group, gate = case["shape"], case.get("group", 128), case.get("gate")
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    torch.manual_seed(number)
    weight = random_packed(
        outputs, inputs, group, case.get("kind", "uint4"), case.get("zero", False), gate is not None, case.get("outer", False),
        dtype,
    )
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    bias = torch.randn(outputs, device="cuda").to(dtype) if case.get("bias") else None
    wide = expanded(weight, torch.float64)
    normed: Any = x.double()
    norm = residual = None
    if case.get("norm") and rows == 1 and engine == "gemv":
        norm, residual = torch.rand(inputs, device="cuda").to(dtype), torch.randn(rows, inputs, device="cuda").to(dtype)
        normed = rms_norm_reference((x + residual).double(), norm.double(), 1e-5)
    exact = F.linear(normed, wide, None if bias is None else bias.double())
    if gate is not None:
        left, right = exact.chunk(2, 1)
        exact = (F.silu(left) if gate == "silu" else F.gelu(left, approximate="tanh")) * right
    found = {}
    if engine == "op":
        out = packed_linear_gpu(x, weight, bias) if gate is None else _gated_op(x, weight, bias, gate)
        return {"op": float((out.double() - exact).norm() / exact.norm())}
    plans: dict[str, Any] = (gemv_plans if engine == "gemv" else gemm_plans)(outputs, inputs, rows)
    for name, plan in list(plans.items())[:: max(1, len(plans) - 1)]:
        for _ in range(2):                               # the second call finds the counters of the first
            torch.full((1 << 22,), float("nan"), device="cuda")          # what `empty` may get next
            if engine == "gemv":
                out = packed_gemv(x, weight, bias, plan, gate=gate, norm=norm, eps=1e-5, residual=residual)[0]
            else:
                out = packed_gemm(x, weight, bias, plan, gate=gate)
        found[name] = float((out.double() - exact).norm() / exact.norm())
    return found


def _gated_op(x: Tensor, weight: PackedWeight, bias: Tensor | None, gate: str) -> Tensor:
    """Through the op: its part behind the norm."""
    return packed_op.multiplied(x, weight, bias, gate)


def in_process(arguments: list[str], limit: float) -> Any:
    command = [sys.executable, __file__, *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:.0f} s"}
    if run.returncode:
        return {"failed": run.stderr[-1500:]}
    return json.loads(run.stdout.splitlines()[-1])


def checks(limit: float, wanted: list[str]) -> dict[str, Any]:
    tasks = [(number, rows, "op") for rows in (1, 5, 16, 30, 50, 200, 900) for number in range(len(CHECKS))]
    tasks += [(number, 1, "gemv") for number in range(len(CHECKS))]
    tasks += [(number, rows, "gemm") for rows in (7, 16, 50, 200) for number in range(len(CHECKS))]
    tasks = [task for task in tasks if not wanted or f"{task[2]} {task[1]}" in wanted]
    with ThreadPoolExecutor(14) as pool:
        found = pool.map(lambda task: in_process(["--check", *map(str, task)], limit), tasks)
    return {f"{engine} {rows} {CHECKS[number]}": each for (number, rows, engine), each in zip(tasks, found, strict=True)}


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def timed(work: Callable[[int], Any], copies: int) -> float:
    return graph_microseconds(work, copies, warm_ups=2, runs=9)


class Weights:
    """LAYERS layers of one model, as bf16 numbers, e4m3 codes and packed codes with groups of 128."""

    def __init__(self, fp8: bool = False) -> None:
        generator = torch.Generator("cuda").manual_seed(7)
        self.plain: dict[str, list[Tensor]] = {name: [] for name in MATRICES}
        self.fp8: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in MATRICES}
        self.packed: dict[str, list[PackedWeight]] = {name: [] for name in MATRICES}
        for _ in range(LAYERS):
            for name, (outputs, inputs) in MATRICES.items():
                weight = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16)
                weight.normal_(0, inputs**-0.5, generator=generator)
                self.plain[name].append(weight)
                if fp8:
                    self.fp8[name].append(fp8_rows_reference(weight))
                self.packed[name].append(pack(*quantised(weight), gated=name == "gate_up"))
        self.norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)


def gate_of(name: str) -> str | None:
    return "silu" if name == "gate_up" else None


def one_matrix(weights: Weights, name: str, rows: int) -> Row:
    outputs, inputs = MATRICES[name]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    plain, packed = weights.plain[name], weights.packed[name]
    row = {"bf16": timed(lambda i: linear(x, plain[i % LAYERS]), LAYERS),
           "bytes_floor": packed[0].nbytes / BANDWIDTH * 1e6}
    if rows <= 8:
        for label, plan in gemv_plans(outputs, inputs, rows).items():
            row[f"gemv {label}"] = timed(
                lambda i, plan=plan: packed_gemv(x, packed[i % LAYERS], None, plan, gate=gate_of(name)), LAYERS)
    if rows >= 128:
        row["expand"] = timed(lambda i: expand(packed[i % LAYERS], torch.bfloat16), LAYERS)
        row["expand and cuBLAS"] = timed(lambda i: F.linear(x, expand(packed[i % LAYERS], torch.bfloat16)), LAYERS)
    if rows >= 2:
        for label, wide in gemm_plans(outputs, inputs, rows).items():
            row[f"gemm {label}"] = timed(
                lambda i, wide=wide: packed_gemm(x, packed[i % LAYERS], None, wide, gate=gate_of(name)), LAYERS)
    return row


def matrices(rows: int) -> dict[str, Row]:
    weights = Weights(fp8=True)
    found = {f"{name} {rows}": one_matrix(weights, name, rows) for name in MATRICES}
    return found | {f"chain {rows}": chain(weights, rows, found)}


def best(row: Row, name: str, rows: int) -> PackedGemvPlan | PackedGemmPlan:
    label = min((value, label) for label, value in row.items() if label.startswith(("gemv", "gemm")))[1]
    plans: dict[str, Any] = (gemv_plans if label.startswith("gemv") else gemm_plans)(*MATRICES[name], rows)
    return plans[label[5:]]


def chain(weights: Weights, rows: int, found: dict[str, Row]) -> Row:
    """Milliseconds of 32 layers' linears, each with the best plan of its own."""
    x, attended = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    plans = {name: best(found[f"{name} {rows}"], name, rows) for name in MATRICES}

    def packed(x: Tensor, i: int, name: str, **norm: Any) -> tuple[Tensor, Tensor]:
        plan, weight = plans[name], weights.packed[name][i % LAYERS]
        if isinstance(plan, PackedGemvPlan):
            return packed_gemv(x, weight, None, plan, gate=gate_of(name), **norm)
        return packed_gemm(x, weight, None, plan, gate=gate_of(name)), x

    def normed(x: Tensor, residual: Tensor, i: int, name: str) -> tuple[Tensor, Tensor]:
        if rows == 1:
            return packed(x, i, name, norm=weights.norm, eps=1e-5, residual=residual)
        out, stream = rms_norm(x, weights.norm, 1e-5, residual=residual)
        return packed(out, i, name)[0], stream

    def layer(i: int) -> Tensor:
        _, stream = normed(x, attended, i, "qkv")
        out, _ = packed(attended, i, "o")
        out, stream = normed(out, stream, i, "gate_up")
        return packed(out, i, "down")[0]

    def by_rule(i: int) -> Tensor:
        each = {name: tensors[i % LAYERS] for name, tensors in weights.packed.items()}
        _, stream = packed_op.normed_packed_linear(x, attended, weights.norm, 1e-5, each["qkv"])
        out = packed_linear(attended, each["o"])
        out, stream = packed_op.normed_packed_linear(out, stream, weights.norm, 1e-5, each["gate_up"], gate="silu")
        return packed_linear(out, each["down"])

    row = {"bf16": timed(lambda i: plain_layer(weights, i, x, attended), LAYERS) * 32e-3,
           "fp8": timed(lambda i: fp8_layer(weights, i, x, attended), LAYERS) * 32e-3,
           "int4, best plans": timed(layer, LAYERS) * 32e-3, "int4, the op": timed(by_rule, LAYERS) * 32e-3}
    if rows == 1:
        row |= e2m1_chains(weights, by_rule)
    return row | {"ratio": row["bf16"] / min(row["int4, best plans"], row["int4, the op"])}


def e2m1_chains(weights: Weights, by_rule: Callable[[int], Tensor]) -> Row:
    """Scales in 16 bits and as bytes, in turn three times: the best of each, milliseconds of 32 layers."""
    found: Row = {}
    for _ in range(3):
        for group in (32, 16):
            for stored in (False, True):
                weights.packed = {name: [] for name in MATRICES}                 # frees the last one's memory
                for name, tensors in weights.plain.items():
                    for each in tensors:
                        codes, scale = quantised(each, group, "e2m1")
                        scale = byte_scales(scale, group) if stored else scale
                        weights.packed[name].append(pack(codes, scale, kind="e2m1", gated=name == "gate_up"))
                label = f"e2m1, groups of {group}, {'scales as bytes, ' if stored else ''}the op"
                found[label] = min(found.get(label, 1e9), timed(by_rule, LAYERS) * 32e-3)
    return found


def plain_layer(weights: Weights, i: int, x: Tensor, attended: Tensor) -> Tensor:
    each = {name: tensors[i % LAYERS] for name, tensors in weights.plain.items()}
    _, stream = normed_linear(x, attended, weights.norm, 1e-5, each["qkv"])
    out = linear(attended, each["o"])
    out, stream = normed_linear(out, stream, weights.norm, 1e-5, each["gate_up"], gate="silu")
    return linear(out, each["down"])


def fp8_layer(weights: Weights, i: int, x: Tensor, attended: Tensor) -> Tensor:
    each = {name: pairs[i % LAYERS] for name, pairs in weights.fp8.items()}
    _, stream = normed_fp8_linear(x, attended, weights.norm, 1e-5, *each["qkv"])
    out = fp8_linear(attended, *each["o"])
    out, stream = normed_fp8_linear(out, stream, weights.norm, 1e-5, *each["gate_up"])
    rows = gated_rows(out, "silu", each["down"][0])
    assert rows is not None
    return multiplied(rows, *each["down"])


def summary(row: Row) -> str:
    if "ratio" in row:
        return str({label: round(value, 3) for label, value in row.items()})
    first = sorted((value, label) for label, value in row.items() if label.startswith(("gemv", "gemm")))
    more = "".join(f"{label} {row[label]:.1f} " for label in ("expand", "expand and cuBLAS") if label in row)
    return f"bf16 {row['bf16']:.1f} floor {row['bytes_floor']:.1f} {more}" + "; ".join(
        f"{value:.1f} {label}" for value, label in first[:3]
    )


def compile_one(name: str, rows: int) -> None:
    """Launch every variant of a matrix once, so that the cache has it."""
    outputs, inputs = MATRICES[name]
    weight = random_packed(outputs, inputs, 128, "uint4", False, name == "gate_up")
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    for plan in gemv_plans(outputs, inputs, rows).values() if rows <= 8 else ():
        packed_gemv(x, weight, None, plan, gate=gate_of(name))
    for wide in gemm_plans(outputs, inputs, rows).values() if rows >= 2 else ():
        packed_gemm(x, weight, None, wide, gate=gate_of(name))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("result.json")))
    parser.add_argument("--parts", nargs="*", default=["checks", "matrices", "chain"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--checks", nargs="*", default=[])
    parser.add_argument("--check", nargs=3)
    parser.add_argument("--compile", nargs=2)
    parser.add_argument("--time", type=int)
    parser.add_argument("--limit", type=float, default=100)
    args = parser.parse_args()
    if args.check:
        print(json.dumps(check(int(args.check[0]), int(args.check[1]), args.check[2])))
        return
    if args.compile:
        compile_one(args.compile[0], int(args.compile[1]))
        print("{}")
        return
    if args.time:
        print(json.dumps(matrices(args.time)))
        return
    began = time.time()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gpu": gpu_facts(), "commit": commit(),
        "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__}, "predicted": PREDICTED,
        "earlier": EARLIER,
    }

    def write() -> None:
        result["seconds"] = time.time() - began
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")

    if "checks" in args.parts:
        result["errors"] = checks(args.limit, args.checks)
        write()
        for key, row in result["errors"].items():
            worst = row if "failed" in row else {"worst": max(row.values(), default=None), "plans": len(row)}
            print(f"{time.time() - began:.0f} s", key, str(worst)[-700:], flush=True)
    if "matrices" in args.parts:
        with ThreadPoolExecutor(14) as pool:
            made = list(pool.map(lambda each: in_process(["--compile", each[0], str(each[1])], args.limit),
                                 [(name, rows) for rows in args.rows for name in MATRICES]))
        print(f"compiled after {time.time() - began:.0f} s", [str(each)[-300:] for each in made if each], flush=True)
        result["microseconds"] = {}
        for rows in args.rows:
            result["microseconds"] |= in_process(["--time", str(rows)], args.limit)
            write()
            for key, row in result["microseconds"].items():
                if key.endswith(f" {rows}") or key == "failed":
                    print(f"{time.time() - began:.0f} s", key, row if key == "failed" else summary(row), flush=True)


if __name__ == "__main__":
    main()

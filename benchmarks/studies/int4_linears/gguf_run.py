"""GGUF's formats in the packed layout on one GPU, and plans for many rows: errors against float64, microseconds by rows.

    python benchmarks/studies/int4_linears/gguf_run.py --out gguf.json
    python benchmarks/studies/int4_linears/gguf_run.py --sums gguf.json    # of the plans that the rules choose now; needs no GPU
    python benchmarks/studies/int4_linears/gguf_run.py --forms Q8_0 W8A16 --out q8.json

Matrices of Llama-3.1-8B as Q4_K_M stores them, float16: Q4_K; Q6_K; q, k and v kept together as `Q4_K and Q6_K`; int4 with groups
of 128 in bfloat16 beside them. With --forms all of them as Q8_0, or as int8 with groups of 128 in bfloat16 (W8A16).
Columns: 16 bits (`linear`), the kernels of codes as stored (ops/quantised), the packed op, and
its plans whose parts share a tile's outputs (`together`). First every kernel is compiled and checked against float64, in
processes with a time limit; only kernels that are right are timed. `step` adds up the linears of 32 layers and the head.
Predictions, written before the first run, are in PREDICTED. One row as stored was a GEMV that left after commit c561c038; now
each weight is expanded.
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
from ridgeline.models.checkpoints.gguf_formats import FORMATS
from ridgeline.ops.linear import gemm_small, gemm_wide
from ridgeline.ops.linear.linear_op import linear
from ridgeline.ops.packed.block_weight import pack_blocks, packed_numbers
from ridgeline.ops.packed.byte_gemv import byte_gemv
from ridgeline.ops.packed.byte_weight import pack_bytes
from ridgeline.ops.packed.packed_gemm import packed_gemm
from ridgeline.ops.packed.packed_gemv import packed_gemv
from ridgeline.ops.packed.packed_linear import multiplied
from ridgeline.ops.packed.packed_sizes import BYTES
from ridgeline.ops.packed.packed_weight import PackedWeight, pack, quantised
from ridgeline.ops.packed.select_packed import MULTIPROCESSORS, PackedGemmPlan, PackedGemvPlan, _gemm_plan, packed_plan
from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.quantised.quantised_linear import quantised_linear_triton
from ridgeline.quant.format import SPREAD, common
from ridgeline.quant.quantised import quantised_weight, torch_dtype

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}
CASES = (
    ("qkv", "Q4_K"), ("qkv", "Q4_K and Q6_K"), ("o", "Q4_K"), ("gate_up", "Q4_K"), ("down", "Q4_K"), ("down", "Q6_K"),
    ("head", "Q6_K"), ("qkv", "int4"), ("o", "int4"), ("gate_up", "int4"), ("down", "int4"),
)
BYTE_CASES = tuple((matrix, form) for form in ("Q8_0", "W8A16") for matrix in SHAPES)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
AGAIN = 300                                              # runs that must give the same bits: a race shows in one of many
WIDE_RANGE = ("int4", "W8A16")                           # forms that are timed in bfloat16
WORST = {"float16": 0.0012, "bfloat16": 0.006}           # errors by Frobenius norms
PREDICTED = {
    "bytes": "Q4_K 4.625 bits a weight as before, Q6_K 6.625 (6.5625 as stored), q, k and v with a Q6_K part 7.125",
    "Q4_K, 1 row": "607 instructions for 512 inputs of 16 outputs, int4 with groups of 128 439: gate_up 21.5 us (int4 18.5), qkv "
    "7.5, o 6.2, down 14; a step of Q4_K_M 2.69 -> 2.25 ms, 372 -> 445 tok/s",
    "Q4_K, 8 rows": "the packed GEMM: qkv 9.5, o 8, gate_up 29, down 17.5 us, a half of the bf16 linears; before it each weight "
    "was expanded (165 us for gate_up)",
    "Q4_K, 32 rows": "qkv 14, o 11, gate_up 34, down 22 us: 1.4 times bf16",
    "Q4_K, 128 rows": "as int4 with the same plans, +8 % for scales of 32: chain 5.4 ms; with the plans of `together` 3.9 ms: "
    "8,600 -> 14,500 (with the old plans) or 17,000 tok/s",
    "together": "128 rows: no sums in memory, which 4 splits write and read (16.8 MB for o). o 22 -> 11, qkv 26.6 -> 14, down "
    "43.8 -> 24 us; gate_up no gain. int4 chain 5.1 -> 3.7 ms: 1.17 times bf16. 64 rows: o 13.6 -> 9, qkv 16.4 -> 12, down 25.7 "
    "-> 17 us",
}
PREDICTED_BYTES = {
    "Q8_0, 1 row": "gate_up 31 us, qkv 8, o 6, down 17.5, head 137: 2.15 ms for a step (the GEMV of codes as stored 2.28 in the "
    "engine, with norms); 392 -> 410 tok/s",
    "2 and 8 rows": "qkv 10, o 7.7, gate_up 33, down 20.5, head 148 us: 2.43 ms, 1.55 times 16 bits; before, each weight was "
    "expanded",
    "16 rows": "2.5 ms, 1.54 times 16 bits", "32 rows": "2.8 ms, 1.43 times", "64 rows": "3.23 ms, 1.32 times",
    "128 rows": "gate_up 60, qkv 21, o 13, down 40, head 262 us: 4.55 ms, 1.02 times; 8,690 -> 16,500 tok/s in the engine",
    "256 rows": "8.1 ms, 0.77 times", "W8A16": "as Q8_0, 3 % faster up to 16 rows: fewer bytes and instructions for scales",
}
Row = dict[str, Any]


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def stored(name: str, outputs: int, inputs: int) -> QuantisedWeight:
    """Random codes; scales and offsets of files' sizes: the mean is 0."""
    if name == "W8A16":
        codes = torch.randint(-128, 128, (outputs, inputs), device="cuda", dtype=torch.int8)
        scale = (torch.rand(outputs, inputs // 128, device="cuda") + 0.5) * inputs**-0.5 / SPREAD["int8"]
        return QuantisedWeight("int8", inputs, codes, scale.bfloat16(), (1, 128))
    format = common([FORMATS[each] for each in name.split(" and ")])
    assert format is not None
    size, tensors = inputs**-0.5 / SPREAD[format.grid] / 32, {}
    for spec in format.tensors():
        shape, dtype = spec.shape(outputs, inputs), torch_dtype(spec.dtype)
        if spec.name in ("weight", "high"):
            tensors[spec.name] = torch.randint(256, shape, device="cuda", dtype=torch.uint8).view(dtype)
        elif not dtype.is_floating_point:
            tensors[spec.name] = torch.randint(16, 64, shape, device="cuda", dtype=torch.uint8).view(dtype)
        else:
            factor = -7.5 if spec.name == "offset_outer" else 1.0
            tensors[spec.name] = ((torch.rand(shape, device="cuda") + 0.5) * size * factor).to(dtype)
    return quantised_weight(format, inputs, tensors)


class Weight:
    """One matrix in all its forms."""

    def __init__(self, matrix: str, form: str, plain: bool = False, most: int = 1 << 20) -> None:
        outputs, inputs = min(SHAPES[matrix][0], most), SHAPES[matrix][1]
        self.dtype = torch.bfloat16 if form in WIDE_RANGE else torch.float16
        self.gate = "silu" if matrix == "gate_up" else None
        self.codes: QuantisedWeight | None = None
        if form == "int4":
            numbers = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
            self.packed: PackedWeight = pack(*quantised(numbers), gated=self.gate is not None)
        else:
            self.codes = stored(form, outputs, inputs)
            packing = pack_bytes if self.codes.grid == "int8" else pack_blocks
            self.packed = packing(self.codes, self.gate is not None)
        self.plain = torch.randn(outputs, inputs, device="cuda", dtype=self.dtype) if plain else None


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gemv_plans(is_byte: bool = False) -> dict[str, PackedGemvPlan]:
    sizes = ((1, 4, 3), (1, 8, 2), *(((1, 4, 4), (2, 4, 2)) if is_byte else ()))
    return {f"gemv {g} x {w} warps, {p} CTAs": PackedGemvPlan(g, w, p) for g, w, p in sizes}


def gemm_plans(outputs: int, rows: int) -> dict[str, PackedGemmPlan]:
    """Plans that the rules do not have: parts that share outputs, by rows in a tile, and halves with fewer rows in a tile."""
    strips, made = -(-outputs // 16), {}
    sizes = {32: (32,), 64: (32, 64), 128: (64, 128), 256: (64, 128)}.get(rows, ())
    for block_rows in sizes:
        tiles, stages = {32: (4, 8), 64: (4, 6), 128: (2, 4)}[block_rows]
        items = -(-strips // 4) * -(-rows // block_rows)
        for splits in (1, 2):
            if splits == 1 or 2 * items <= MULTIPROCESSORS:
                made[f"together {block_rows} rows, {splits} splits"] = PackedGemmPlan(
                    block_rows, 2, 4, 1, tiles, stages, splits, 4, 1, True
                )
    if rows >= 128 and strips > 1024:
        step = 14 if strips % 14 == 0 else 16
        made["halves, 64 rows"] = PackedGemmPlan(64, 2, 4, 2, 2, 8, 1, step, 1)
    return made


def byte_gemm_plans(outputs: int, inputs: int, rows: int) -> dict[str, PackedGemmPlan]:
    """Plans for 8-bit codes beside the rules: by rows in a tile, what a CTA is made of (`_FEW_TILES` in select_packed.py)."""
    strips, made = -(-outputs // 16), {}
    few = [(1, 8, 1, 2, 8, 2), (1, 8, 1, 4, 8, 1), (1, 4, 1, 2, 6, 3), (1, 4, 1, 4, 6, 2)]
    some = [(2, 4, 1, 4, 6, 1), (2, 4, 2, 2, 8, 1), (2, 4, 1, 2, 8, 1)]
    many = [(2, 4, 1, 2, 6, 1), (2, 4, 2, 2, 6, 1), (2, 4, 1, 4, 3, 1)]
    shapes: dict[int, list[tuple[int, ...]]] = {8: few, 16: few, 32: few, 64: some, 128: many}
    for block_rows in sorted({next((size for size in shapes if rows <= size), 128), 64 if rows >= 128 else 0} - {0}):
        for shape in shapes[block_rows]:
            plan = _gemm_plan(shape, block_rows, -(-rows // block_rows), strips, -(-inputs // 512))
            label = f"{block_rows} rows, {shape[0]} x {shape[1]} warps x {shape[2]}, {shape[3]} tiles, {shape[5]} CTAs"
            made[f"{label}, {plan.splits} splits"] = plan
    return made


def variants(weight: Weight, rows: int, x: Tensor) -> dict[str, Callable[[Weight], Tensor]]:
    """By name: the packed op and plans beside its rules."""
    found: dict[str, Callable[[Weight], Tensor]] = {"packed": lambda each: multiplied(x, each.packed, None, each.gate)}
    outputs, inputs, is_byte = weight.packed.outputs, weight.packed.inputs, weight.packed.form == BYTES
    if rows == 1:
        for label, plan in gemv_plans(is_byte).items():
            if not is_byte:
                found[label] = lambda each, plan=plan: packed_gemv(x, each.packed, None, plan, gate=each.gate)[0]
                continue
            for ahead in (4, 6, 8):
                found[f"{label}, {ahead} tiles ahead"] = lambda each, plan=plan, ahead=ahead: byte_gemv(
                    x, each.packed, None, plan, gate=each.gate, ahead=ahead)[0]
        return found
    for label, wide in (gemm_plans(outputs, rows) | (byte_gemm_plans(outputs, inputs, rows) if is_byte else {})).items():
        found[label] = lambda each, wide=wide: packed_gemm(x, each.packed, None, wide, gate=each.gate)
    return found


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(matrix: str, form: str, all_rows: list[int]) -> None:
    """Compiles every variant and prints the errors of all outputs, a line each; and that the layout kept every number."""
    torch.manual_seed(1)
    weight = Weight(matrix, form, most=32768)            # float64 has no room for a head
    numbers = packed_numbers(weight.packed, torch.float32)
    if weight.codes is not None:
        assert torch.equal(numbers, expand(weight.codes, torch.float32)), "the layout changed a number"
    part = slice(0, 4096)
    for rows in all_rows:
        x = torch.randn(rows, SHAPES[matrix][1], device="cuda", dtype=weight.dtype)
        if weight.gate is None:
            exact = x.double() @ numbers[part].double().T
        else:
            left, right = (x.double() @ numbers[first : first + 4096].double().T for first in (0, len(numbers) // 2))
            exact = F.silu(left) * right
        for label, work in variants(weight, rows, x).items():
            for _ in range(2):                           # the second call finds the counters of the first
                torch.full((1 << 22,), float("nan"), device="cuda")      # what `empty` may get next
                out = work(weight)
            torch.cuda.synchronize()
            error: float | str = float((out[:, part].double() - exact).norm() / exact.norm())
            if not bool(out.isfinite().all()):
                error = "not finite"
            elif not all(torch.equal(work(weight), out) for _ in range(AGAIN)):
                error = "another run gave other numbers"
            print(json.dumps([rows, label, error]), flush=True)


def in_process(arguments: list[str], limit: float) -> tuple[list[list[Any]], str]:
    """(what was printed, what went wrong)"""
    try:
        run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=limit)
        printed, wrong = run.stdout, run.stderr[-1500:] if run.returncode else ""
    except subprocess.TimeoutExpired as late:
        printed, wrong = (late.stdout or b"").decode(), f"not done after {limit:.0f} s"
    return [json.loads(line) for line in printed.splitlines() if line.startswith("[")], wrong


def tasks(cases: tuple[tuple[str, str], ...], rows: list[int]) -> list[tuple[str, str, list[int]]]:
    """Rows 2 to 8 run one kernel. int4 has a study of its own: here only plans for many rows are new."""
    wanted = [8 if each in (2, 4) else each for each in rows]
    few, many = sorted({each for each in wanted if each < 64}), sorted({each for each in wanted if each >= 64})
    found = [(*case, many) for case in cases] + [(*case, few) for case in cases if case[1] != "int4"]
    return [task for task in found if task[2]]


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def times(matrix: str, form: str, rows: list[int], right: dict[int, set[str]]) -> dict[int, Row]:
    """Microseconds, weights from memory: copies take more than the L2 cache holds."""
    weights = [Weight(matrix, form, plain=form != "Q4_K and Q6_K")]
    copies = -(-160_000_000 // weights[0].packed.nbytes)
    weights += [Weight(matrix, form, plain=form != "Q4_K and Q6_K") for _ in range(copies - 1)]
    found: dict[int, Row] = {}
    for count in rows:
        x = torch.randn(count, SHAPES[matrix][1], device="cuda", dtype=weights[0].dtype)

        def timed(work: Callable[[Weight], Any]) -> float:
            return graph_microseconds(lambda i: work(weights[i % copies]), max(copies, 2), warm_ups=1, runs=5)

        row: Row = {"floor": weights[0].packed.nbytes / 4.38e12 * 1e6}
        if weights[0].plain is not None:
            row["16 bits"] = timed(lambda each, x=x: linear(x, each.plain))
        if weights[0].codes is not None:
            row["as stored"] = timed(lambda each, x=x: quantised_linear_triton(x, each.codes))
        for label, work in variants(weights[0], count, x).items():
            if label in right.get(8 if count in (2, 4) else count, set()):
                row[label] = timed(work)
        found[count] = row
    return found


def step(found: dict[str, dict[int, Row]], rows: int) -> Row:
    """Milliseconds of the linears of 32 layers, half of them with Q6_K in v and down, and of the head; and of int4's layers."""
    def total(pick: Callable[[Row], float], halves: tuple[tuple[str, ...], ...], head: str = "") -> float | None:
        try:
            layers = sum(pick(found[name][rows]) for half in halves for name in half) * 32 / len(halves)
            return (layers + (pick(found[head][rows]) if head else 0.0)) / 1000
        except KeyError:
            return None

    usual = ("qkv Q4_K", "o Q4_K", "gate_up Q4_K", "down Q4_K")
    more = ("qkv Q4_K and Q6_K", "o Q4_K", "gate_up Q4_K", "down Q6_K")
    others = ("floor", "16 bits", "as stored")
    picks: dict[str, Callable[[Row], float]] = {
        "as stored": lambda row: row["as stored"], "packed": lambda row: row["packed"],
        "best": lambda row: min(value for label, value in row.items() if label not in others),
    }
    out: Row = {f"Q4_K_M {name}": total(pick, (usual, more), "head Q6_K") for name, pick in picks.items()}
    out["16 bits"] = total(lambda row: row["16 bits"], (usual,), "head Q6_K")
    four = tuple(f"{name} int4" for name in ("qkv", "o", "gate_up", "down"))
    out |= {f"int4 layers {name}": total(pick, (four,)) for name, pick in list(picks.items())[1:]}
    out["16-bit layers"] = total(lambda row: row["16 bits"], (usual,))
    for form in ("Q8_0", "W8A16"):
        layers = (tuple(f"{name} {form}" for name in ("qkv", "o", "gate_up", "down")),)
        out |= {f"{form} {name}": total(pick, layers, f"head {form}") for name, pick in picks.items()}
        out[f"16 bits, beside {form}"] = total(lambda row: row["16 bits"], layers, f"head {form}")
    return {name: value for name, value in out.items() if value is not None}


def chosen(case: str, rows: int) -> str:
    """The column of the plan that the rules choose now. `packed`: the same plan as when the record was made."""
    matrix, _, form = case.partition(" ")
    plan = packed_plan(rows, *SHAPES[matrix], "Q6_K" in form)
    if isinstance(plan, PackedGemmPlan) and plan.together:
        return f"together {plan.block_rows} rows, {plan.splits} splits"
    return next((label for label, each in gemv_plans().items() if each == plan and each.programs == 3), "packed")


def print_sums(path: str) -> None:
    found = {
        case: {int(rows): row | {"packed": row[chosen(case, int(rows))]} for rows, row in by_rows.items()}
        for case, by_rows in json.loads(Path(path).read_text())["microseconds"].items()
    }
    for rows in ROWS:
        print(rows, {name: round(value, 3) for name, value in step(found, rows).items() if name.endswith("packed")})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("gguf.json")))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--check", nargs="*")
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--sums")
    parser.add_argument("--forms", nargs="*", default=sorted({form for _, form in CASES}))
    args = parser.parse_args()
    if args.sums:
        print_sums(args.sums)
        return
    if args.check:
        gemm_small.prepare(torch.device("cuda", 0))
        check(args.check[0], args.check[1], [int(each) for each in args.check[2:]])
        return
    began = time.time()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gpu": gpu_facts(), "commit": commit(),
        "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__},
        "predicted": PREDICTED | PREDICTED_BYTES,
    }

    def write() -> None:
        result["seconds"] = time.time() - began
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")

    cases = tuple(case for case in (*CASES, *BYTE_CASES) if case[1] in args.forms)
    work = tasks(cases, args.rows)
    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda task: in_process(["--check", task[0], task[1], *map(str, task[2])], args.limit), work))
    result["errors"] = {}
    right: dict[tuple[str, str], dict[int, set[str]]] = {case: {} for case in cases}
    for (matrix, form, _), (lines, wrong) in zip(work, done, strict=True):
        if wrong:
            print("FAILED", matrix, form, wrong, flush=True)
        for rows, label, error in lines:
            result["errors"].setdefault(f"{matrix} {form} {rows}", {})[label] = error
            if isinstance(error, float) and error < WORST["bfloat16" if form in WIDE_RANGE else "float16"]:
                right[matrix, form].setdefault(rows, set()).add(label)
            else:
                print("WRONG", matrix, form, rows, label, error, flush=True)
    write()
    print(f"checked {sum(map(len, result['errors'].values()))} kernels after {time.time() - began:.0f} s", flush=True)
    gemm_small.prepare(torch.device("cuda", 0))
    gemm_wide.prepare(torch.device("cuda", 0))
    timed: dict[str, dict[int, Row]] = {}
    for matrix, form in cases:
        rows = [each for each in args.rows if each >= 64 or form != "int4"]
        timed[f"{matrix} {form}"] = times(matrix, form, rows, right[matrix, form])
        result["microseconds"] = timed
        write()
        for count, row in timed[f"{matrix} {form}"].items():
            said = ", ".join(f"{label} {value:.1f}" for label, value in row.items())
            print(f"{time.time() - began:.0f} s {matrix} {form} {count}: {said}", flush=True)
    result["step_ms"] = {rows: step(timed, rows) for rows in args.rows}
    write()
    for rows, row in result["step_ms"].items():
        print(rows, {name: round(value, 3) for name, value in row.items()}, flush=True)


if __name__ == "__main__":
    main()

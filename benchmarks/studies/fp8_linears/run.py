"""fp8 linears on one GPU: errors against float64, microseconds by rows, and the linears of whole layers in a CUDA graph.

    python benchmarks/studies/fp8_linears/run.py --out result.json

Matrices of Llama-3.1-8B. Weights rotate through more memory than the L2 cache holds. `chain` is all linears of LAYERS layers
with their norms, activations and quantisation, without attention, scaled to 32 layers: what a decode step spends outside of
attention, the head and sampling. Predictions, written before the first run, are in PREDICTED.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.graph_times import graph_microseconds
from ridgeline.bench.lab.record import commit
from ridgeline.ops.linear.fp8_rows import fp8_rows, fp8_rows_reference, gated_fp8_rows, normed_fp8_rows
from ridgeline.ops.linear.gemm_ring import ring_gemm
from ridgeline.ops.linear.gemm_wide import wide_gemm
from ridgeline.ops.linear.gemv_ring import ring_gemv
from ridgeline.ops.linear.linear_op import linear, normed_linear
from ridgeline.ops.linear.select import RingGemmPlan, RingPlan, even_step, fp8_ring_gemm_plan, ring_plan
from ridgeline.ops.linear.select_wide import WidePlan

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 6
BANDWIDTH = 4.38e12
ROWS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096, 8192]
PREDICTED = {
    "cublas_fp8": "75-85 % of 1,443 TFLOP/s from 1,024 rows on; below 64 rows less than half of the bandwidth",
    "ring_fp8": "0.55-0.6 of the bf16 time at 2 to 64 rows",
    "gemv_fp8": "chain of one row 1.75 ms of 32 layers in bf16 3.4 ms: 0.52 of the time (bytes halve, 0.2 ms of launches stay)",
    "paired": "two rows of codes for one row of x: as fast as two rows, error of bf16 activations (0.002) instead of 0.03",
    "two CTAs": "chain of one row 2.14 -> 2.0 ms: the next kernel's weights come while this one ends",
    "wide_fp8": "128 rows: qkv 10, o 8, down 20 us (cuBLAS 14.7, 14.4, 37.7); chain 3.73 -> 2.6 ms",
}


def timed(work: Callable[[int], Any], copies: int) -> float:
    return graph_microseconds(work, copies, warm_ups=3, runs=12)


class Weights:
    """LAYERS layers of one model, as bf16 numbers and as e4m3 codes with scales for each output."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(7)
        self.plain: dict[str, list[Tensor]] = {name: [] for name in MATRICES}
        self.codes: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in MATRICES}
        for _ in range(LAYERS):
            for name, (outputs, inputs) in MATRICES.items():
                weight = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16)
                weight.normal_(0, inputs**-0.5, generator=generator)
                self.plain[name].append(weight)
                self.codes[name].append(fp8_rows_reference(weight))
        self.norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)


def scaled_mm(codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, fast: bool = False) -> Tensor:
    return torch._scaled_mm(codes, weight.t(), x_scale[:, None], scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=fast)


def multiplied(codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The ring where it has a plan, else cuBLAS."""
    plan = fp8_ring_gemm_plan(len(codes), *weight.shape)
    return scaled_mm(codes, x_scale, weight, scale) if plan is None else ring(codes, x_scale, weight, scale, plan)


def errors(weights: Weights) -> dict[str, Any]:
    """|out - exact| / |exact| by Frobenius norms; exact: float64 of the same codes and scales."""
    found: dict[str, Any] = {}

    def error(out: Tensor, exact: Tensor) -> float:
        return float((out.double() - exact).norm() / exact.norm())

    for name, (_outputs, inputs) in MATRICES.items():
        codes, scale = weights.codes[name][0]
        wide = codes.double() * scale[:, None].double()
        for rows in (1, 2, 8, 13, 32, 40, 64, 128, 200):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            x_codes, x_scale = fp8_rows(x)
            reference_codes, reference_scale = fp8_rows_reference(x)
            row = {"codes_differ": float((x_codes.view(torch.uint8) != reference_codes.view(torch.uint8)).float().mean()),
                   "scale": float((x_scale / reference_scale - 1).abs().max())}
            exact = (x_codes.double() * x_scale[:, None].double()) @ wide.t()
            if rows == 1:
                for gate in (None, *(("silu",) if name == "gate_up" else ())):
                    plan = ring_plan(codes.shape[0] // (1 if gate is None else 2), inputs, gate is not None, 1)
                    assert plan is not None
                    out = ring_gemv(x, codes, None, plan, scale=scale, gate=gate)[0]
                    true = x.double() @ wide.t()
                    if gate:
                        half = true.shape[1] // 2
                        true = torch.nn.functional.silu(true[:, :half]) * true[:, half:]
                    row[f"gemv {gate or ''}".strip()] = error(out, true)
            elif fp8_ring_gemm_plan(rows, *codes.shape) is not None:
                row["ring"] = error(multiplied(x_codes, x_scale, codes, scale), exact)
            if rows <= 32:
                plan = fp8_ring_gemm_plan(2 * rows, *codes.shape)
                assert plan is not None
                pairs, pair_scale = fp8_rows(x, True)
                out = ring_gemm(pairs, codes, None, plan, scales=(pair_scale, scale), paired=True, dtype=torch.bfloat16)
                row["paired, against x itself"] = error(out, x.double() @ wide.t())
                if rows > 1:
                    row["ring, against x itself"] = error(multiplied(x_codes, x_scale, codes, scale), x.double() @ wide.t())
            if 32 < rows <= 128:
                for label, each in wide_variants(*codes.shape).items():
                    row[f"wide {label}"] = error(wide_fp8(x_codes, x_scale, codes, scale, each), exact)
            row["cublas"] = error(scaled_mm(x_codes, x_scale, codes, scale), exact) if rows > 1 else None
            found[f"{name} {rows}"] = row
    ones = torch.full((16, 14336), 448.0, device="cuda").to(torch.float8_e4m3fn)     # what quantising makes of equal numbers
    weight = torch.full((4096, 14336), 1.125, device="cuda").to(torch.float8_e4m3fn)
    unit, units = torch.ones(16, device="cuda"), torch.ones(4096, device="cuda")
    true = 14336 * 448 * 1.125
    found["14,336 equal terms"] = {
        "ring": float(multiplied(ones, unit, weight, units).float().mean() / true - 1),
        "wide": float(wide_fp8(ones, unit, weight, units, WidePlan(128, 128, 4, 7, 7)).float().mean() / true - 1),
        "cublas": float(scaled_mm(ones, unit, weight, units).float().mean() / true - 1),
        "cublas fast accumulation": float(scaled_mm(ones, unit, weight, units, True).float().mean() / true - 1),
    }
    return found


def matrices(weights: Weights, sizes: list[int]) -> dict[str, Any]:
    return {f"{name} {rows}": one_matrix(weights, name, rows) for rows in sizes for name in MATRICES}


def one_matrix(weights: Weights, name: str, rows: int) -> dict[str, float]:
    outputs, inputs = MATRICES[name]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    codes, scale = fp8_rows(x)
    plain, fp8 = weights.plain[name], weights.codes[name]
    row = {"bf16": timed(lambda i: linear(x, plain[i % LAYERS]), LAYERS)}
    if rows > 1:
        row["cublas_fp8"] = timed(lambda i: scaled_mm(codes, scale, *fp8[i % LAYERS]), LAYERS)
        row["cublas_fp8_fast"] = timed(lambda i: scaled_mm(codes, scale, *fp8[i % LAYERS], True), LAYERS)
        if 128 < rows < 512 and rows % 256:
            row["cublas_fp8_padded"] = timed(lambda i: scaled_mm(*padded(codes, scale), *fp8[i % LAYERS])[:rows], LAYERS)
        for label, each in ring_variants(rows, outputs, inputs).items():
            row[f"ring_fp8 {label}"] = timed(lambda i, each=each: ring(codes, scale, *fp8[i % LAYERS], each), LAYERS)
        for label, wide in (wide_variants(outputs, inputs) if 32 < rows <= 128 else {}).items():
            row[f"wide_fp8 {label}"] = timed(lambda i, wide=wide: wide_fp8(codes, scale, *fp8[i % LAYERS], wide), LAYERS)
    else:
        plan = ring_plan(outputs, inputs, False, 1)
        assert plan is not None
        for label, one in variants(plan).items():
            row[f"gemv_fp8 {label}"] = timed(
                lambda i, one=one: ring_gemv(x, fp8[i % LAYERS][0], None, one, scale=fp8[i % LAYERS][1]), LAYERS)
    return row | {"bytes_floor": outputs * inputs / BANDWIDTH * 1e6}


def padded(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As if the buffers had room for a multiple of 256 rows."""
    more = -len(codes) % 256
    return torch.cat((codes, codes[:more])), torch.cat((scale, scale[:more]))


def wide_fp8(codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, plan: WidePlan) -> Tensor:
    return wide_gemm(codes, weight, None, plan, scales=(x_scale, scale), dtype=torch.bfloat16)


def ring(codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, plan: RingGemmPlan) -> Tensor:
    return ring_gemm(codes, weight, None, plan, scales=(x_scale, scale), dtype=torch.bfloat16)


def ring_variants(rows: int, outputs: int, inputs: int) -> dict[str, RingGemmPlan]:
    """The plan of the rule, and others with the same bytes in flight in more CTAs or more stages."""
    plan = fp8_ring_gemm_plan(rows, outputs, inputs)
    return {} if plan is None else {"rule": plan, **{name: change(plan, outputs, inputs) for name, change in CHANGES.items()}}


def two_ctas(plan: RingGemmPlan, outputs: int, inputs: int) -> RingGemmPlan:
    """Two CTAs on an SM: one still multiplies while the other one's weights come, also those of the next kernel."""
    splits = 2 * plan.splits if outputs < 8192 else 1
    half = replace(plan, programs=2, stages=max(2, plan.stages // 2), x_stages=max(2, plan.x_stages // 2), splits=splits)
    return replace(half, step=even_step(outputs, plan.block_outputs, 264 // splits))


def shorter(plan: RingGemmPlan, outputs: int, inputs: int) -> RingGemmPlan:
    return replace(plan, block_inputs=plan.block_inputs // 2, stages=2 * plan.stages, x_stages=2 * plan.x_stages)


def unsplit(plan: RingGemmPlan, outputs: int, inputs: int) -> RingGemmPlan:
    return replace(plan, splits=1, step=even_step(outputs, plan.block_outputs, 132))


Change = Callable[[RingGemmPlan, int, int], RingGemmPlan]
CHANGES: dict[str, Change] = {"two CTAs": two_ctas, "shorter": shorter, "unsplit": unsplit}


def wide_variants(outputs: int, inputs: int) -> dict[str, WidePlan]:
    """Tiles of 128 outputs; with split inputs all CTAs must run at once."""
    tiles = -(-outputs // 128)
    made = {f"{splits} splits": WidePlan(128, 128, splits, 7, 7) for splits in (2, 4, 8) if tiles * splits <= 132}
    return {"1 split": WidePlan(128, 128, 1, 6, 7), **made}


def variants(plan: RingPlan) -> dict[str, RingPlan]:
    """The same bytes in flight, as more rows or as more stages."""
    made = {"rows": plan}
    if plan.block % 2 == 0:
        made["stages"] = RingPlan(plan.block // 2, plan.warps, plan.programs, plan.stages * 2)
    if plan.warps >= 8:
        made["half the warps"] = RingPlan(plan.block, plan.warps // 2, plan.programs, plan.stages)
    return made


def chain(weights: Weights, sizes: list[int]) -> dict[str, Any]:
    """Milliseconds of 32 layers' linears."""
    return {str(rows): one_chain(weights, rows) for rows in sizes}


def one_chain(weights: Weights, rows: int) -> dict[str, float]:
    x, attended = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    row = {"bf16": timed(lambda i: plain_layer(weights, i, x, attended), LAYERS) * 32e-3}
    if rows == 1:
        row["gemv"] = timed(lambda i: gemv_layer(weights, i, x, attended), LAYERS) * 32e-3
    for label, multiply in multipliers(rows).items():
        paired = label.startswith("paired")
        row[label] = timed(lambda i, m=multiply, p=paired: fp8_layer(weights, i, x, attended, m, p), LAYERS) * 32e-3
    return row | {"ratio": row["bf16"] / min(value for label, value in row.items() if label != "bf16")}


Multiply = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def multipliers(rows: int) -> dict[str, Multiply]:
    """How the GEMMs of a layer may be made."""

    def ringed(change: Change | None, paired: bool) -> Multiply:
        def multiply(codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            plan = fp8_ring_gemm_plan(len(codes), *weight.shape)
            assert plan is not None
            chosen = plan if change is None else change(plan, *weight.shape)
            return ring_gemm(codes, weight, None, chosen, scales=(x_scale, scale), paired=paired, dtype=torch.bfloat16)

        return multiply

    def widened(codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        found = wide_variants(*weight.shape)
        return wide_fp8(codes, x_scale, weight, scale, list(found.values())[-1])

    def mixed(codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return (scaled_mm if weight.shape[0] > 8192 else widened)(codes, x_scale, weight, scale)

    made: dict[str, Multiply] = {"cublas": scaled_mm} if rows > 4 else {}
    if rows <= 64:
        for label, change in {"ring": None, **CHANGES}.items():
            made[label] = ringed(change, False)
            if rows <= 16:
                made[f"paired {label}"] = ringed(change, True)
    if 32 < rows <= 128:
        made |= {"wide": widened, "wide and cublas": mixed}
    return made


def plain_layer(weights: Weights, i: int, x: Tensor, attended: Tensor) -> Tensor:
    each = {name: tensors[i % LAYERS] for name, tensors in weights.plain.items()}
    _, stream = normed_linear(x, attended, weights.norm, 1e-5, each["qkv"])
    out = linear(attended, each["o"])
    out, stream = normed_linear(out, stream, weights.norm, 1e-5, each["gate_up"], gate="silu")
    return linear(out, each["down"])


def gemv_layer(weights: Weights, i: int, x: Tensor, attended: Tensor) -> Tensor:
    each = {name: pairs[i % LAYERS] for name, pairs in weights.codes.items()}

    def one(x: Tensor, name: str, **more: Any) -> tuple[Tensor, Tensor]:
        codes, scale = each[name]
        gated = "gate" in more
        plan = ring_plan(codes.shape[0] // (2 if gated else 1), codes.shape[1], gated, 1)
        assert plan is not None
        return ring_gemv(x, codes, None, plan, scale=scale, **more)

    _, stream = one(x, "qkv", norm=weights.norm, eps=1e-5, residual=attended)
    out, _ = one(attended, "o")
    out, stream = one(out, "gate_up", norm=weights.norm, eps=1e-5, residual=stream, gate="silu")
    return one(out, "down")[0]


def fp8_layer(weights: Weights, i: int, x: Tensor, attended: Tensor, multiply: Multiply, paired: bool) -> Tensor:
    each = {name: pairs[i % LAYERS] for name, pairs in weights.codes.items()}
    codes, scale, stream = normed_fp8_rows(x, attended, weights.norm, 1e-5, paired=paired)
    multiply(codes, scale, *each["qkv"])
    out = multiply(*fp8_rows(attended, paired), *each["o"])
    codes, scale, stream = normed_fp8_rows(out, stream, weights.norm, 1e-5, paired=paired)
    return multiply(*gated_fp8_rows(multiply(codes, scale, *each["gate_up"]), "silu", paired), *each["down"])


def facts(predicted: dict[str, str]) -> dict[str, Any]:
    """How a record of this study begins."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gpu": gpu_facts(), "commit": commit(),
        "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__}, "predicted": predicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("result.json")))
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    args = parser.parse_args()
    began = time.time()
    weights = Weights()
    torch.cuda.synchronize()
    result = facts(PREDICTED)
    for name, part in (("errors", lambda: errors(weights)), ("chain_ms_of_32_layers", lambda: chain(weights, args.rows)),
                       ("microseconds", lambda: matrices(weights, args.rows))):
        result[name] = part()
        result["seconds"] = time.time() - began
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
        for key, row in result[name].items():
            shown = {label: None if value is None else float(f"{value:.4g}") for label, value in row.items()}
            print(name[:6], key, shown, flush=True)


if __name__ == "__main__":
    main()

"""fp8 linears of 65 to 128 rows: the gate inside the GEMM of gate and up, and tiles that fill the waves of q, k and v.

    python benchmarks/studies/fp8_linears/wide.py --out wide.json

As run.py: matrices of Llama-3.1-8B, weights from memory, microseconds of single linears, and milliseconds of 32 layers' linears
with norms, activations and quantisation in a CUDA graph. `before` is the path without the gate. PREDICTED was written before the
first run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run import LAYERS, MATRICES, Weights, facts, timed
from torch import Tensor

from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.linear.fp8_rows import fp8_rows, gated_fp8_rows, normed_fp8_rows
from ridgeline.ops.linear.gemm_wide import wide_gemm
from ridgeline.ops.linear.select_wide import WidePlan, fp8_wide_plan

PREDICTED = {
    "gate_up, gated": "37.4 -> 31 us: one wave of 128 tiles, not two of 224; x is read half as often",
    "gated rows": "6.7 -> 4 us: half of the numbers are read",
    "qkv, step 96": "14.3 -> 13 us: 128 CTAs instead of 96",
    "chain": "128 rows: 3.20 -> 2.9 ms of 32 layers",
}
Linear = tuple[Tensor, Tensor]


def multiplied(codes: Tensor, x_scale: Tensor, weight: Linear, plan: WidePlan | None, gate: str | None = None) -> Tensor:
    assert plan is not None
    return wide_gemm(codes, weight[0], None, plan, gate=gate, scales=(x_scale, weight[1]), dtype=torch.bfloat16)


def plans(rows: int, filled: bool, gated: bool) -> dict[str, WidePlan | None]:
    found = {name: fp8_wide_plan(rows, *shape) for name, shape in MATRICES.items()}
    found["qkv"] = WidePlan(128, 96 if filled else 128, 2, 7, 7)
    if gated:
        found["gate_up"] = fp8_wide_plan(rows, MATRICES["gate_up"][0] // 2, MATRICES["gate_up"][1], True)
    return found


def layer(weights: Weights, i: int, x: Tensor, attended: Tensor, each: dict[str, WidePlan | None], gated: bool) -> Tensor:
    weight = {name: pairs[i % LAYERS] for name, pairs in weights.codes.items()}
    codes, scale, stream = normed_fp8_rows(x, attended, weights.norm, 1e-5)
    multiplied(codes, scale, weight["qkv"], each["qkv"])
    out = multiplied(*fp8_rows(attended), weight["o"], each["o"])
    codes, scale, stream = normed_fp8_rows(out, stream, weights.norm, 1e-5)
    out = multiplied(codes, scale, weight["gate_up"], each["gate_up"], "silu" if gated else None)
    return multiplied(*(fp8_rows(out) if gated else gated_fp8_rows(out, "silu")), weight["down"], each["down"])


CASES = {"before": (False, False), "gated": (False, True), "gated, filled": (True, True)}


def chain(weights: Weights, rows: int, turns: int) -> dict[str, list[float]]:
    """In turn, so that no variant has the cool card."""
    x, attended = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        for case, (filled, gated) in CASES.items():
            each = plans(rows, filled, gated)
            work = lambda i, each=each, gated=gated: layer(weights, i, x, attended, each, gated)  # noqa: E731
            found.setdefault(case, []).append(timed(work, LAYERS) * 32e-3)
    return found


def single(weights: Weights, rows: int) -> dict[str, float]:
    narrow, wide = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (4096, 28672))
    half = wide[:, :14336].contiguous()
    codes, scale = fp8_rows(narrow)

    def product(name: str, plan: WidePlan | None, gate: str | None = None) -> Callable[[int], Tensor]:
        return lambda i: multiplied(codes, scale, weights.codes[name][i % LAYERS], plan, gate)

    before, after = plans(rows, False, False), plans(rows, True, True)
    work: dict[str, Callable[[int], Any]] = {
        "qkv": product("qkv", before["qkv"]), "qkv, step 96": product("qkv", after["qkv"]), "o": product("o", before["o"]),
        "gate_up": product("gate_up", before["gate_up"]), "gate_up, gated": product("gate_up", after["gate_up"], "silu"),
        "gated rows": lambda i: gated_fp8_rows(wide, "silu"), "rows of 14,336": lambda i: fp8_rows(half),
        "rows of 4,096": lambda i: fp8_rows(narrow),
        "normed rows": lambda i: normed_fp8_rows(narrow, narrow, weights.norm, 1e-5),
    }
    return {name: timed(each, LAYERS) for name, each in work.items()}


def errors(weights: Weights, rows: int) -> dict[str, float]:
    """|out - exact| / |exact| by Frobenius norms; exact: float64 of the same codes and scales."""
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    codes, scale = fp8_rows(x)
    found = {}
    for name, gate in (("gate_up", "silu"), ("qkv", None)):
        weight = weights.codes[name][0]
        exact = (codes.double() * scale[:, None].double()) @ (weight[0].double() * weight[1][:, None].double()).t()
        exact = exact if gate is None else gated_activation_reference(exact, gate)
        out = multiplied(codes, scale, weight, plans(rows, True, True)[name], gate)
        found[name] = float((out.double() - exact).norm() / exact.norm())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("wide.json")))
    parser.add_argument("--rows", type=int, nargs="*", default=[72, 96, 128])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    weights = Weights()
    torch.cuda.synchronize()
    result = facts(PREDICTED)
    for name, part in (
        ("errors", lambda rows: errors(weights, rows)), ("chain_ms_of_32_layers", lambda rows: chain(weights, rows, args.turns)),
        ("microseconds", lambda rows: single(weights, rows)),
    ):
        result[name] = {str(rows): part(rows) for rows in args.rows}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(result[name]), flush=True)


if __name__ == "__main__":
    main()

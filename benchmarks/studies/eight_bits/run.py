"""8-bit linears on one GPU: microseconds by rows in bf16, with fp8 rows, fp8 blocks and int8, quantisation of the rows included.

    python benchmarks/studies/eight_bits/run.py > rows.txt

Matrices of Llama-3.1-8B. Weights rotate through more memory than the L2 cache holds; calls are captured in a CUDA graph. The last
two columns are cuBLAS alone, with rows that are quantised already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.nn.functional as F

from ridgeline.bench.lab.graph_times import graph_microseconds
from ridgeline.ops.linear.fp8_linear import fp8_linear_gpu
from ridgeline.ops.linear.fp8_rows import fp8_groups, fp8_rows

MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 8, 16, 64, 128, 256, 512, 2048)


def timed(call: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    return graph_microseconds(lambda number: call(weights[number]), len(weights), 2, 5)


def columns(x: torch.Tensor, wide: list[torch.Tensor], fp8: list[torch.Tensor], int8: list[torch.Tensor]) -> list[float]:
    outputs, inputs = wide[0].shape
    scale = torch.rand(outputs, device="cuda") + 0.5
    blocks = torch.rand(outputs // 128, inputs // 128, device="cuda") + 0.5
    found = [
        timed(lambda weight: F.linear(x, weight), wide), timed(lambda weight: fp8_linear_gpu(x, weight, scale), fp8),
        timed(lambda weight: fp8_linear_gpu(x, weight, blocks), fp8),
        timed(lambda weight: fp8_linear_gpu(x, weight, scale), int8),
    ]
    if len(x) >= 128:
        codes, groups = fp8_groups(x)
        integers, _ = fp8_rows(x, False, torch.int8)
        found.append(timed(lambda w: torch._scaled_mm(codes, w.t(), groups, blocks.t(), out_dtype=torch.bfloat16), fp8))
        found.append(timed(lambda weight: torch._int_mm(integers, weight.t()), int8))
    return found


def main() -> None:
    print("outputs inputs rows | bf16 fp8-row fp8-block int8 | cuBLAS: fp8 blocks, int8")
    for outputs, inputs in MATRICES:
        copies = max(2, 300_000_000 // (outputs * inputs))
        wide = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        fp8 = [(each * 60).clamp(-448, 448).to(torch.float8_e4m3fn) for each in wide]
        int8 = [(each * 30).clamp(-127, 127).to(torch.int8) for each in wide]
        for rows in ROWS:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            times = " ".join(f"{each:.1f}" for each in columns(x, wide, fp8, int8))
            print(outputs, inputs, rows, "|", times, flush=True)


if __name__ == "__main__":
    main()

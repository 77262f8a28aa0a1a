"""Times cuBLAS's GEMMs with Llama-3.1-8B's matrices by the number of rows, in CUDA graphs over rotating weights.

    python benchmarks/studies/gemm_by_rows/run.py 128 144 160 …      # on a GPU; prints JSON: microseconds by rows and matrix

graph_shapes.LARGE_SIZES was chosen from it. `result.json` holds one run, with its machine and versions added.
"""

from __future__ import annotations

import json
import statistics
import sys

import torch

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}
POOL = 3 * 2**29                     # elements that weights are taken from, more than any cache holds


def microseconds(pool: torch.Tensor, rows: int, outputs: int, inputs: int) -> float:
    size = outputs * inputs
    weights = [pool[i * size : (i + 1) * size].view(outputs, inputs) for i in range(max(2, min(12, len(pool) // size)))]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mm(x, weights[0].t(), out=out)
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                torch.mm(x, weight.t(), out=out)
    graph.replay()
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(weights) * 1e3)
    return statistics.median(times)


def main(sizes: list[int]) -> None:
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    print(json.dumps({rows: {name: microseconds(pool, rows, *shape) for name, shape in MATRICES.items()} for rows in sizes}))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])

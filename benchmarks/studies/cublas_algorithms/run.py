"""Is cuBLAS's own choice of algorithm the best one? Llama-3.1-8B's matrices, alone and in layers at the power limit.

    python benchmarks/studies/cublas_algorithms/run.py 256 512 640 992 8192       # rows; on a GPU; prints JSON

For each GEMM every algorithm that cuBLASLt proposes is timed in a burst. Then layers of four GEMMs are repeated for long enough
that the card is at its power limit: with torch's choice, and with the fastest algorithms of the bursts. `result.json` is a run
of an earlier form of this script, with the same method and other names of fields.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
POOL = 3 * 2**29                     # elements that weights are taken from, more than any cache holds
ALGORITHMS = 64                      # asked for; cuBLASLt proposes eight or so
SUSTAINED_S = 0.7                    # the second half of it counts
BF16, FLOAT32, COMPUTE_FLOAT32 = 14, 0, 68               # cudaDataType, cublasComputeType_t
TRANSPOSE_A, MAX_WORKSPACE = 3, 1                        # attributes of a product and of a preference


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("rest", c_int * 4)]


class Library:
    def __init__(self) -> None:
        # torch has loaded it.
        self._functions = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
        self.handle = c_void_p()
        self.call("Create", byref(self.handle))
        self.workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._functions, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name} answered {status}")

    def layout(self, inner: int, outer: int) -> c_void_p:
        made = c_void_p()
        self.call("MatrixLayoutCreate", byref(made), c_int(BF16), c_uint64(inner), c_uint64(outer), c_int64(inner))
        return made


class Product:
    """x [rows, inputs] times weight [outputs, inputs] transposed; cuBLAS is column-major."""

    def __init__(self, library: Library, rows: int, outputs: int, inputs: int) -> None:
        self._library, self._description, preference, count = library, c_void_p(), c_void_p(), c_int()
        library.call("MatmulDescCreate", byref(self._description), c_int(COMPUTE_FLOAT32), c_int(FLOAT32))
        library.call("MatmulDescSetAttribute", self._description, c_int(TRANSPOSE_A), byref(c_int32(1)), c_size_t(4))
        self._weight, self._x = library.layout(inputs, outputs), library.layout(inputs, rows)
        self._out = library.layout(outputs, rows)
        library.call("MatmulPreferenceCreate", byref(preference))
        size = c_size_t(library.workspace.numel())
        library.call("MatmulPreferenceSetAttribute", preference, c_int(MAX_WORKSPACE), byref(size), c_size_t(8))
        proposals = (Proposal * ALGORITHMS)()
        library.call(
            "MatmulAlgoGetHeuristic", library.handle, self._description, self._weight, self._x, self._out, self._out, preference,
            c_int(ALGORITHMS), proposals, byref(count),
        )
        self.proposals = list(proposals)[: count.value]

    def run(self, place: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        one, zero, library = c_float(1.0), c_float(0.0), self._library
        operands = [c_void_p(each.data_ptr()) for each in (weight, x, out, library.workspace)]
        library.call(
            "Matmul", library.handle, self._description, byref(one), operands[0], self._weight, operands[1], self._x, byref(zero),
            operands[2], self._out, operands[2], self._out, byref(self.proposals[place].algorithm), operands[3],
            c_size_t(library.workspace.numel()), c_void_p(torch.cuda.current_stream().cuda_stream),
        )


class Matrix:
    """One of the four matrices, with operands and its GEMM."""

    def __init__(self, library: Library, pool: torch.Tensor, rows: int, outputs: int, inputs: int) -> None:
        size = outputs * inputs
        self.weights = [pool[i * size : (i + 1) * size].view(outputs, inputs) for i in range(min(12, len(pool) // size))]
        self.x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
        self.product = Product(library, rows, outputs, inputs)
        self.repeats = max(4, min(24, int(2e12 / (rows * size))))

    def torch(self, turn: int) -> None:
        torch.mm(self.x, self.weights[turn % len(self.weights)].t(), out=self.out)

    def algorithm(self, place: int) -> Callable[[int], None]:
        return lambda turn: self.product.run(place, self.x, self.weights[turn % len(self.weights)], self.out)

    def burst(self, multiply: Callable[[int], None]) -> float:
        """Microseconds, the median of five bursts."""
        times = []
        for _ in range(6):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for turn in range(self.repeats):
                multiply(turn)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / self.repeats * 1e3)
        return statistics.median(times[1:])


def sustained(products: list[Callable[[int], None]]) -> float:
    """Microseconds of a layer of GEMMs at the power limit."""
    layers, graph, stream = 8, torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for multiply in products:
            multiply(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for turn in range(layers):
                for multiply in products:
                    multiply(turn)
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < SUSTAINED_S:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / layers * 1e3)
    return statistics.median(times[len(times) // 2 :])


def main(sizes: list[int]) -> None:
    library = Library()
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    figures: dict[str, dict[str, Any]] = {}
    for rows in sizes:
        matrices = {name: Matrix(library, pool, rows, *shape) for name, shape in MATRICES.items()}
        figures[str(rows)] = row = {}
        best = {}
        for name, matrix in matrices.items():
            times = [matrix.burst(matrix.algorithm(place)) for place in range(len(matrix.product.proposals))]
            best[name] = times.index(min(times))
            row[name] = {"torch": matrix.burst(matrix.torch), "first": times[0], "best": min(times), "proposals": len(times)}
        kinds = {
            "torch": [matrix.torch for matrix in matrices.values()],
            "first": [matrix.algorithm(0) for matrix in matrices.values()],
            "best": [matrix.algorithm(best[name]) for name, matrix in matrices.items()],
        }
        row["sustained layer"] = {kind: [] for kind in kinds}
        for _ in range(2):
            for kind, products in kinds.items():
                row["sustained layer"][kind].append(sustained(products))
        print(f"{rows} rows: {json.dumps(row)}", file=sys.stderr, flush=True)
    print(json.dumps({"unit": "microseconds", "figures": figures}))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])

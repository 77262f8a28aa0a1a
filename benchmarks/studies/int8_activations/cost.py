"""What one build of the CPU kernels costs beside another: the products of a step of the embedded model, in turn in one process.

    python benchmarks/studies/int8_activations/cost.py BEFORE.native AFTER.native --rows 1 8 512 --out cost.json

A build is a file that `ridgeline build` names. Random weights have the shapes and kinds of the model's, each layer its own, so
that a step reads as many bytes. One thread; processor time of it; the least of some walks, and the median of the ratios of
neighbouring walks, which a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from ridgeline.bench.lab.record import record, write  # noqa: E402
from ridgeline.ops.cpu import native  # noqa: E402
from ridgeline.ops.cpu.matrix import Matrix  # noqa: E402
from ridgeline.ops.linear.gguf_blocks import random_part  # noqa: E402

LAYERS, LAYER, HEAD = 30, ((576, 960), (576, 576), (576, 3072), (1536, 576)), (576, 49152)      # SmolLM2-135M: inputs, outputs
WALKS = {1: 24, 8: 12}               # by rows; 3 of more


def matrices(kind: str, head: str) -> list[Matrix]:
    generator = torch.Generator().manual_seed(0)
    layer = [Matrix([random_part(generator, kind, outputs, inputs)]) for inputs, outputs in LAYER]
    copies = [_copy(each) for _ in range(LAYERS - 1) for each in layer]
    return [*layer, *copies, Matrix([random_part(generator, head, *HEAD[::-1])])]


def _copy(matrix: Matrix) -> Matrix:
    part = type(matrix.parts[0])(matrix.parts[0].kind, matrix.outputs, matrix.inputs)
    part.data.copy_(matrix.parts[0].data)
    return Matrix([part])


def seconds(library: Any, weights: list[Matrix], rows: int) -> float:
    """Of one step. A prompt needs the head for its last row alone."""
    x = {each.inputs: torch.randn(rows, each.inputs) for each in weights}
    out = torch.empty(max(rows * LAYER[2][1], min(rows, 8) * HEAD[1]))
    began = time.thread_time()
    for each in weights:
        tokens = rows if rows <= 8 or each.outputs < HEAD[1] else 1
        library.packed_linear(each.address, 1, x[each.inputs].data_ptr(), None, out.data_ptr(), tokens, each.inputs, each.outputs,
                              each.inputs, True)
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", type=Path, nargs=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512])
    parser.add_argument("--levels", nargs="+", default=[native.level()])
    parser.add_argument("--kinds", nargs=2, default=["Q4_1", "Q8_0"], help="of the layers and of the head")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = matrices(*args.kinds)
    figures: dict[str, Any] = {}
    for level in args.levels:
        before, after = (native.load(build, level) for build in args.builds)
        for rows in args.rows:
            seconds(before, weights, min(rows, 8)), seconds(after, weights, min(rows, 8))
            pairs = [(seconds(before, weights, rows), seconds(after, weights, rows)) for _ in range(WALKS.get(rows, 3))]
            least = [min(each) for each in zip(*pairs, strict=True)]
            ratio = statistics.median(new / old for old, new in pairs)
            figures[f"{level}, {rows} rows"] = {"before_s": least[0], "after_s": least[1], "median_ratio": ratio}
            print(f"{level:7s} {rows:4d} rows: {least[0] * 1e3:8.2f} -> {least[1] * 1e3:8.2f} ms, {least[1] / least[0]:.3f}x; "
                  f"median of ratios {ratio:.3f}x", flush=True)
    setting = {"kinds": args.kinds, "walks": WALKS, "threads": 1}
    write(record("int8_activations_cost", setting, figures), Path(args.out))


if __name__ == "__main__":
    main()

"""Run the small cases of the Triton kernels once, for a checker that watches every access: see sanitize_kernels.py.

    python scripts/run_op_cases.py [OP ...]      # without names: every op that has a Triton kernel
    python scripts/run_op_cases.py --list        # those ops
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ridgeline.bench.ops import all_ops, supported
from ridgeline.costs import Case
from ridgeline.ops.registry import Op


def with_kernels() -> dict[str, Op]:
    ops = sorted(all_ops().items())
    return {name: op for name, op in ops if any("triton" in each.name for each in op.implementations)}


def run(op: Op, case: Case, dtype: str, device: str = "cuda") -> int:
    """How many implementations ran it."""
    ran = 0
    for implementation in op.implementations:
        args, kwargs = op.inputs(torch.Generator().manual_seed(0), getattr(torch, dtype), device, **case.sizes)
        if "triton" in implementation.name and supported(implementation, args):
            implementation.function(*args, **kwargs)
            ran += 1
    if device == "cuda":
        torch.cuda.synchronize()
    return ran


def main(names: list[str]) -> None:
    ops = with_kernels()
    if names == ["--list"]:
        print(*ops)
        return
    for name in names or ops:
        ran = sum(
            run(ops[name], case, dtype)
            for case in ops[name].cases
            if not case.timed
            for dtype in case.dtypes
            if dtype != "float64"
        )
        print(f"{name}: {ran} runs")


if __name__ == "__main__":
    main(sys.argv[1:])

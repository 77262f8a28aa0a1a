"""Run the small cases of the Triton kernels once, under compute-sanitizer: see sanitize_kernels.py.

    python scripts/run_op_cases.py [NAME ...]    # an op, some of its cases (op:1/4: every fourth from the second on), or a
                                                 # case or fault (fault:memcheck) of kernel_cases.py; without names: all
    python scripts/run_op_cases.py --list        # the ops that have Triton kernels, with how many runs, and the other cases

Ends with the names of the kernels that ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernel_cases import CASES, FAULTS

from ridgeline.bench.ops import all_ops, supported
from ridgeline.ops.registry import HAS_TRITON, TRITON_INTERPRETED, Op, triton
from ridgeline.sizes.op_costs import Case


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
        print(*(f"{name}:{len(_runs(op))}" for name, op in ops.items()), *CASES)
        return
    loaded: set[str] = set()
    if HAS_TRITON and not TRITON_INTERPRETED:
        triton.knobs.runtime.kernel_load_end_hook.add(lambda module, function, name, *rest: loaded.add(name))
    for each in names or [*ops, *CASES]:
        name, _, part = each.partition(":")
        if name == "fault":
            FAULTS[part]("cuda")
        elif name in CASES:
            CASES[name]("cuda")
        else:
            first, _, parts = (part or "0/1").partition("/")
            for case, dtype in _runs(ops[name])[int(first) :: int(parts)]:
                run(ops[name], case, dtype)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"{each}: done")
    print("kernels:", *sorted(loaded))


def _runs(op: Op) -> list[tuple[Case, str]]:
    return [(case, dtype) for case in op.cases if not case.timed for dtype in case.dtypes if dtype != "float64"]


if __name__ == "__main__":
    main(sys.argv[1:])

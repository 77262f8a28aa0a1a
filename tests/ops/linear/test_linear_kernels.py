"""The kernels behind linear, at every kind of plan: odd sizes, splits, gates, and results into poisoned memory.

On a machine without a GPU they run in Triton's interpreter, in a second process.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.linear import gemm_small as small_gemm_file
from ridgeline.ops.linear import gemv as gemv_file
from ridgeline.ops.linear.gemm_invariant import invariant_linear
from ridgeline.ops.linear.gemm_small import small_gemm
from ridgeline.ops.linear.gemv import gemv
from ridgeline.ops.linear.linear_op import linear_onto
from ridgeline.ops.linear.select import GemmPlan, GemvPlan, even_splits
from ridgeline.ops.registry import TRITON_INTERPRETED

pytestmark = pytest.mark.reliability("P-13")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
runs_kernels = pytest.mark.skipif(not (CUDA or TRITON_INTERPRETED), reason="runs in the interpreter's process")
NARROW = [torch.float32, torch.bfloat16]
# Half a unit for the result, and the same for every rounded input: twice that where the interpreter cuts.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if CUDA else 2**-6}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that whatever is not written, or read before it is, shows."""
    empty = torch.empty

    def full_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    for module in (gemv_file, small_gemm_file):
        monkeypatch.setattr(module.torch, "empty", full_of_nan)
    if not CUDA:
        monkeypatch.setattr(gemv_file, "multiprocessors", lambda device: 4)      # few programs walk soon


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def assert_near(out: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


# More blocks than programs: each walks. In the interpreter there are four programs, and each case has one type.
WALKS = [
    (dtype, *case) for number, dtype in enumerate(NARROW)
    for which, case in enumerate((
        (300 if CUDA else 20, 32, 2, 1, None, False, False), (301 if CUDA else 21, 16, 2, 1, "silu", True, True),
    ))
    if CUDA or which == number
]


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "block", "programs", "gate", "bias", "residual"),
    [
        *((dtype, *case) for dtype in NARROW for case in (
            (8, 64, 2, 1, None, False, True),            # every block and row full
            (7, 80, 2, 1, None, True, True),
            (5, 48, 4, 8, "gelu", False, True),
            (1, 16, 1, 8, "gelu_tanh", True, False),
        )),
        *WALKS,
    ],
)
def test_gemv(
    dtype: torch.dtype, outputs: int, inputs: int, block: int, programs: int, gate: str | None, bias: bool, residual: bool
) -> None:
    rows = outputs if gate is None else 2 * outputs
    x, weight = random(1, inputs, dtype=dtype), random(rows, inputs, dtype=dtype, scale=inputs**-0.5)
    norm, stream = random(inputs, dtype=dtype), random(2, inputs, dtype=dtype)[1:] if residual else None
    added = random(rows, dtype=dtype) if bias else None
    plan = GemvPlan(block, 4, programs)
    total = x if stream is None else x + stream
    normed = F.rms_norm(total.double(), (inputs,), norm.double() + 1, 1e-5)

    def exact(row: Tensor) -> Tensor:
        out = F.linear(row.double(), weight.double(), None if added is None else added.double())
        return out if gate is None else gated_activation_reference(out, gate)

    out, new = gemv(x, weight, added, plan, norm=norm, eps=1e-5, norm_offset=1.0, residual=stream, gate=gate)
    assert_near(out, exact(normed), dtype)
    assert_near(new, total.double(), dtype)
    out, same = gemv(x, weight, added, plan, gate=gate)
    assert_near(out, exact(x), dtype)
    assert same is x
    before = random(1, outputs, dtype=dtype)
    onto = before.clone()
    assert gemv(x, weight, added, plan, gate=gate, onto=onto)[0] is onto
    assert_near(onto, before.double() + exact(x), dtype)


@runs_kernels
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "splits", "step", "gate", "bias"),
    [
        (16, 32, 64, 1, 0, None, False),                 # every tile full
        (3, 40, 592, 3, 0, None, True),
        (19, 24, 528, 2, 0, "silu", True),               # two blocks of rows
        (5, 33, 272, 4, 12, "gelu", False),              # fewer parts than asked for, and tiles that are not filled
        (2, 20, 80, 1, 8, "gelu_tanh", False),
    ],
)
def test_small_gemm(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, splits: int, step: int, gate: str | None, bias: bool
) -> None:
    both = outputs if gate is None else 2 * outputs
    wide = random(rows, inputs + 16, dtype=dtype)
    x, weight = wide[:, :inputs], random(both, inputs, dtype=dtype, scale=inputs**-0.5)      # a strided view, as heads are
    added = random(both, dtype=dtype) if bias else None
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    exact = exact if gate is None else gated_activation_reference(exact, gate)
    plan = GemmPlan(16, 16, 64, 4, 2, splits, step)
    first = small_gemm(x, weight, added, plan, gate=gate)
    assert_near(first, exact, dtype)
    assert torch.equal(small_gemm(x, weight, added, plan, gate=gate), first)     # counters are as they were


@runs_kernels
@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_is_added_to_what_is_there(rows: int) -> None:
    x, weight = random(rows, 256, dtype=torch.bfloat16), random(70, 256, dtype=torch.bfloat16, scale=1 / 16)
    before = random(rows, 70, dtype=torch.bfloat16)
    onto = before.clone()
    assert linear_onto(onto, x, weight) is onto
    assert_near(onto, before.double() + F.linear(x.double(), weight.double()), torch.bfloat16)


@runs_kernels
@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(70, 1040, 2), (67, 80, 1)])
def test_invariant_rows_do_not_depend_on_each_other(outputs: int, inputs: int, parts: int) -> None:
    assert even_splits(outputs, inputs) == parts
    x, bias = random(150, inputs, dtype=torch.bfloat16), random(outputs, dtype=torch.bfloat16)
    weight = random(outputs, inputs, dtype=torch.bfloat16, scale=inputs**-0.5)
    many = invariant_linear(x, weight, bias)             # more rows than are multiplied side by side
    assert_near(many, F.linear(x.double(), weight.double(), bias.double()), torch.bfloat16)
    for rows in (1, 20, 50, 100):
        few = invariant_linear(x[:rows], weight, bias)
        if CUDA:
            assert torch.equal(few, many[:rows])
        else:                                            # the interpreter's products have an order of their own
            assert_near(few, many[:rows].double(), torch.bfloat16)


@pytest.mark.skipif(CUDA or TRITON_INTERPRETED, reason="the kernels run in this process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter(run_interpreted: Any) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = run_interpreted(command)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "24 passed" in run.stdout, run.stdout[-500:]

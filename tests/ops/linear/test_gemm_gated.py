"""Many rows through gate, up and activation in one kernel: odd sizes in the interpreter, real ones on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.kernel_table import GATED_SHARED, H200, choose
from ridgeline.ops.linear import gemm_gated
from ridgeline.ops.registry import TRITON_INTERPRETED

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def error(rows: int, outputs: int, inputs: int, gate: str, dtype: torch.dtype, device: str) -> float:
    """The largest, in units of the dtype's rounding at the result's own size."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
    weight = (torch.randn(2 * outputs, inputs, generator=generator) * inputs**-0.5).to(device, dtype)
    both = x.double() @ weight.double().t()
    exact: Tensor = ACTIVATIONS[gate](both[:, :outputs]) * both[:, outputs:]
    found = gemm_gated.gated_gemm(x, weight, gate).double()
    return float(((found - exact).abs() / (exact.abs() + 0.05)).max()) / torch.finfo(dtype).eps


def check_odd_sizes() -> None:
    for number, gate in enumerate(ACTIVATIONS):          # no size is a multiple of its block, and programs take turns
        for dtype in (torch.bfloat16, torch.float16):
            assert error(200 + number, 264, 136, gate, dtype, "cpu") < 1.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own test is below")
def test_in_the_interpreter(run_interpreted: Any) -> None:
    """In a process of its own: the interpreter is chosen before anything is imported."""
    if TRITON_INTERPRETED:
        check_odd_sizes()
        return
    pytest.importorskip("triton")
    run = run_interpreted([sys.executable, __file__])
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("gate", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(gate: str, dtype: torch.dtype) -> None:
    for rows, outputs, inputs in ((4096, 4096, 1024), (4337, 4168, 520)):
        assert error(rows, outputs, inputs, gate, dtype, "cuda") < 4


def test_it_is_for_many_rows() -> None:
    def kernel(rows: int, pairs: int, inputs: int) -> str:
        return choose("16-bit", rows, pairs, inputs, True, H200).kernel

    assert kernel(4096, 4096, 64) == kernel(640, 14336, 4096) == "gated_gemm"
    assert kernel(512, 4096, 64) == kernel(4096, 2048, 64) == kernel(4096, 4096, 8192) == "library"
    assert kernel(4096, 4100, 64) == kernel(4096, 4096, 60) == "library", "rows at multiples of 16 bytes"
    assert choose("16-bit", 4096, 4096, 64, False, H200).kernel == "library"
    assert choose("16-bit", 4096, 4096, 64, True, H200._replace(hopper=False)).kernel == "library"
    needed = (gemm_gated.BLOCK_ROWS + 2 * gemm_gated.BLOCK_OUTPUTS) * gemm_gated.BLOCK_INPUTS * 2 * gemm_gated.STAGES
    assert needed + gemm_gated.BLOCK_ROWS * gemm_gated.BLOCK_OUTPUTS * 2 == GATED_SHARED


def test_rows_at_odd_places_are_left_to_the_library() -> None:
    """The copy engine reads and writes rows that begin at multiples of 16 bytes, and refuses others."""
    x, weight = torch.zeros(4096, 64, dtype=torch.bfloat16), torch.zeros(2 * 4104, 64, dtype=torch.bfloat16)
    assert gemm_gated.suits(x, weight, None)
    assert not gemm_gated.suits(x, weight, torch.zeros(8192, dtype=torch.bfloat16))
    assert not gemm_gated.suits(x[:, :60], weight[:, :60], None)
    assert not gemm_gated.suits(x, torch.zeros(2 * 4104 * 64 + 1, dtype=torch.bfloat16)[1:].view(-1, 64), None)


if __name__ == "__main__":
    gemm_gated.multiprocessors = lambda device: 3
    check_odd_sizes()

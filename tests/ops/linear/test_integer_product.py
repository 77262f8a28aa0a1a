"""int8 products of many rows, and rows in groups of 128: in Triton's interpreter against float64, and compiled for sm_90."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.ops.kernel_table import INTEGER_SHARED
from ridgeline.ops.linear import integer_product
from ridgeline.ops.linear.fp8_rows import fp8_groups, fp8_rows_reference
from ridgeline.ops.registry import TRITON_INTERPRETED

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def check() -> None:
    generator = torch.Generator().manual_seed(1)
    codes, x_scale = fp8_rows_reference(torch.randn(150, 144, generator=generator), codes=torch.int8)
    weight, scale = fp8_rows_reference(torch.randn(272, 144, generator=generator), codes=torch.int8)
    bias = torch.randn(272, generator=generator)
    exact = (codes.double() @ weight.double().T) * x_scale.double()[:, None] * scale.double() + bias.double()
    for function in (integer_product.integer_gemm, integer_product.integer_product):
        for rows in (5, 150):
            found = function(codes[:rows], weight, x_scale[:rows], scale, bias, torch.float32)
            torch.testing.assert_close(found.double(), exact[:rows], rtol=1e-6, atol=1e-5)
    x = torch.randn(6, 512, generator=generator)
    codes, groups = fp8_groups(x)
    assert codes.shape == (8, 512) and groups.shape == (8, 4) and groups.stride() == (1, 8)
    numbers = codes[:6].double().unflatten(1, (4, 128)) * groups[:6].double()[..., None]
    torch.testing.assert_close(numbers.flatten(1), x.double(), rtol=2**-4, atol=1e-4)
    assert torch.equal(groups[:6], x.unflatten(1, (4, 128)).abs().amax(2) / 448)


@needs_triton
@pytest.mark.skipif(TRITON_INTERPRETED, reason="runs in this process")
def test_in_the_interpreter(run_interpreted: Any) -> None:
    run = run_interpreted([sys.executable, __file__])
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize(("rows", "outputs", "block"), [
    (512, 4096, 128), (256, 4096, 128), (512, 6144, 256), (512, 28672, 256), (8192, 4096, 256), (128, 4096, 128),
])
def test_tiles_leave_few_sms_idle(rows: int, outputs: int, block: int) -> None:
    """A prompt of 512 tokens has 64 wide tiles of down, half as many as an H200 has SMs."""
    assert integer_product.block_outputs(rows, outputs, 132) == block


@needs_triton
@pytest.mark.skipif(TRITON_INTERPRETED, reason="no compiler")
@pytest.mark.parametrize("outputs", [
    integer_product.BLOCK_OUTPUTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in integer_product.BLOCK_OUTPUTS[1:])
])
def test_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: int) -> None:
    from test_triton_compile import compiled_for_h100, stack_bytes  # not where this file runs alone

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(integer_product, "tl", integer_product.tl)
    rows, inputs = integer_product.BLOCK_ROWS, integer_product.BLOCK_INPUTS
    types = dict.fromkeys(("rows", "outputs", "inputs"), "i32") | {
        "x": f"tensordesc<i8[{rows}, {inputs}]>", "weight": f"tensordesc<i8[{outputs}, {inputs}]>",
        "out": f"tensordesc<bf16[{rows}, {outputs}]>", "x_scale_ptr": "*fp32", "scale_ptr": "*fp32", "bias_ptr": "*bf16",
    }
    constants = {
        "BLOCK_ROWS": rows, "BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs, "NEIGHBOURS": 8, "BIAS": True, "UPCAST": False,
    }
    made = compiled_for_h100(
        integer_product, "_integer_gemm_kernel", types, constants, aligned=("outputs", "inputs"), num_warps=8,
        num_stages=integer_product.STAGES,
    )
    assert "s32.s8.s8" in made.asm["ptx"] and made.metadata.shared <= INTEGER_SHARED
    assert stack_bytes(made.asm["cubin"], tmp_path) == 0


if __name__ == "__main__":
    check()

"""The kernels for weights in any format compile for sm_90; few rows are multiplied by tensor cores without spilled registers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_compile import compiled_for_h100, stack_bytes

from ridgeline.ops.quantised import quantised_kernels
from ridgeline.ops.quantised.quantised_linear import quantised_linear
from ridgeline.ops.registry import TRITON_INTERPRETED

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None or TRITON_INTERPRETED, reason="no compiler")
NAMES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
POINTERS = ("weight_ptr", "high_ptr", "table_ptr", "scale_ptr", "zero_ptr", "outer_ptr", "offset_outer_ptr")
COUNTS = ("rows", "outputs", "inputs", "x_row", "weight_row", "high_row", "scale_row", "outer_row")


@pytest.mark.parametrize(("name", "rows"), [
    ("odd-fp8-block", 16), ("q6", 16), ("uint4-offset", 0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("uint4-zero", 64), ("nvfp4", 32))),
])
def test_for_an_h200(name: str, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """0 rows: the kernel that expands."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name_of in ("_scales", "_numbers"):              # compiled already where there is a GPU
        function = getattr(quantised_kernels, name_of)
        if not isinstance(function, triton.JITFunction):
            monkeypatch.setattr(quantised_kernels, name_of, triton.jit(function))
    monkeypatch.setattr(quantised_kernels, "tl", quantised_kernels.tl)
    case = next(case for case in quantised_linear.cases if case.name == name)
    (_, weight, _), _ = quantised_linear.inputs(torch.Generator(), torch.bfloat16, "cpu", **case.sizes)
    pointers, _, constants = quantised_kernels._arguments(weight)
    types = {pointer: NAMES[tensor.dtype] for pointer, tensor in zip(POINTERS, pointers, strict=True)}
    types |= dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "*bf16") | dict.fromkeys(COUNTS, "i32")
    tiles: dict[str, Any] = {"TILE_O": 8, "TILE_I": 256} if not rows else {
        "TILE_ROWS": rows, "TILE_O": quantised_kernels.TILE_OUTPUTS, "TILE_I": quantised_kernels.tile_inputs(rows),
        "BIAS": True, "UPCAST": False,
    }
    kernel = "_few_rows_kernel" if rows else "_expand_kernel"
    made = compiled_for_h100(
        quantised_kernels, kernel, types, constants | tiles, aligned=("weight_ptr", "weight_row", "inputs"), num_warps=4,
        num_stages=2,
    )
    assert ("mma" in made.asm["ptx"]) == bool(rows)
    assert stack_bytes(made.asm["cubin"], tmp_path) == 0

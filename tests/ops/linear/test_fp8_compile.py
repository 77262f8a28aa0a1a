"""The GEMM kernels with 8-bit operands, compiled for sm_90: the right instructions, no spilled registers, the planned memory."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ridgeline.ops import registry
from ridgeline.ops.kernel_table import RING_GEMM_RESERVED
from ridgeline.ops.linear import fp8_one_row, gemm_ring, gemm_wide
from ridgeline.ops.linear.select import MOST_PEAKS, fp8_ring_gemm_plan, one_row_plan
from ridgeline.ops.linear.select_wide import fp8_wide_plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None or registry.TRITON_INTERPRETED, reason="no compiler")
SHARED = 232_448                     # bytes of an H200's SM that one CTA may have
COUNTS = ("rows", "inputs", "outputs", "tiles", "step", "splits", "weight_stride", "part_inputs", "scale_stride")
TYPES = {"row": "fp8e4nv", "block": "fp8e4nv", "int8": "i8"}


def ring_source(module: Any, codes: str, rows: int, paired: bool) -> tuple[Any, dict[str, Any], dict[str, str], int]:
    plan = fp8_ring_gemm_plan(rows, 4096, 4096)
    assert plan is not None
    constants = {
        "BLOCK_ROWS": plan.block_rows, "BLOCK_OUTPUTS": plan.block_outputs, "BLOCK_INPUTS": plan.block_inputs,
        "STAGES": plan.stages, "X_STAGES": plan.x_stages, "GATE": 0, "BIAS": paired, "SCALED": True, "PAIRED": paired,
        "BLOCK_SCALED": 128 if codes == "block" else 0, "WARPS": plan.warps, "DEPENDENT": True,
    }
    types = dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16") | {
        "part_ptr": "*fp32", "arrived_ptr": "*i32", "x_scale_ptr": "*fp32", "scale_ptr": "*fp32",
        "weight_ptr": f"*{TYPES[codes]}",
        "x_tiles": f"tensordesc<{TYPES[codes]}[{plan.block_rows}, {plan.block_inputs}],{module.tiles_of(128, 8, 2)!r}>",
    } | dict.fromkeys(COUNTS, "i32")
    return module._ring_gemm_kernel, constants, types, plan.warps


def wide_source(module: Any, codes: str, outputs: int, inputs: int) -> tuple[Any, dict[str, Any], dict[str, str], int]:
    """More outputs than inputs: pairs of gate and up."""
    gated = outputs > inputs and codes != "block"
    plan = fp8_wide_plan(128, outputs, inputs, gated)
    assert plan is not None
    flat, cube = (module.gl.NVMMASharedLayout(128, 8, rank=rank) for rank in (2, 3))
    box = f"[2, {module.BOX // 2}, 128],{cube!r}" if gated else f"[{module.BOX}, 128],{flat!r}"
    constants = {
        "TILE": plan.tile, "STEP": plan.step, "BOX": module.BOX, "SPLITS": plan.splits, "STAGES": plan.stages,
        "ROW_STAGES": plan.row_stages, "RUN": module.RUN, "MOST_TILES": module.MOST_TILES, "GATE": int(gated), "BIAS": False,
        "SCALED": True, "BLOCK_SCALED": 128 if codes == "block" else 0, "DEPENDENT": True,
    }
    split = plan.splits > 1
    types = {
        "x": f"tensordesc<{TYPES[codes]}[64, 128],{flat!r}>",
        "weight": f"tensordesc<{TYPES[codes]}{box}>",
        "x_scale_ptr": "*fp32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16",
        "part_ptr": "*fp32" if split else "*bf16", "arrived_ptr": "*i32" if split else "*bf16",
    } | dict.fromkeys(("items", "blocks", "rows", "outputs", "scale_stride"), "i32")
    return module.wide_gemm_kernel, constants, types, 4


def one_row_source(module: Any, codes: str, outputs: int, inputs: int) -> tuple[Any, dict[str, Any], dict[str, str], int]:
    """Pairs of gate and up behind a norm, or the linear that follows them."""
    gated = outputs > inputs
    plan = one_row_plan(outputs, inputs, gated, SHARED - RING_GEMM_RESERVED)
    assert plan is not None
    part = plan.part_inputs // plan.block_inputs
    constants = {
        "BLOCK_OUTPUTS": plan.block_outputs, "BLOCK_INPUTS": plan.block_inputs, "STAGES": plan.stages, "CHUNKS": part,
        "PART_CHUNKS": part, "NORM": gated, "RESIDUAL": gated, "PEAKS": not gated, "MOST": MOST_PEAKS, "GATE": int(gated),
        "BIAS": False, "BLOCK_SCALED": 128 if codes == "block" else 0, "WARPS": plan.warps, "DEPENDENT": True,
    }
    types = dict.fromkeys(("x_ptr", "residual_ptr", "norm_ptr", "bias_ptr", "out_ptr", "new_residual_ptr"), "*bf16")
    types |= dict.fromkeys(("scale_ptr", "peak_ptr", "new_peak_ptr", "part_ptr"), "*fp32")
    types |= {"weight_ptr": f"*{TYPES[codes]}", "arrived_ptr": "*i32", "eps": "fp32", "norm_offset": "fp32"}
    types |= dict.fromkeys((*COUNTS[1:], "peaks"), "i32")
    return module._one_row_gemm_kernel, constants, types, plan.warps


def compiled(kind: str, codes: str, first: int, second: int) -> dict[str, Any]:
    """In a process of its own, where the op files believe in a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    for name in ("hopper", "linear.gemv"):
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    if kind == "ring":
        kernel, constants, types, warps = ring_source(importlib.reload(gemm_ring), codes, first, bool(second))
    elif kind == "one":
        importlib.reload(gemm_ring)
        kernel, constants, types, warps = one_row_source(importlib.reload(fp8_one_row), codes, first, second)
    else:
        kernel, constants, types, warps = wide_source(importlib.reload(gemm_wide), codes, first, second)
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in types if name.endswith("_ptr") or name in ("inputs", "weight_stride", "part_inputs")]
    source = GluonASTSource(
        kernel, {name: types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "launch_pdl": True} | ({"maxnreg": gemm_wide.REGISTERS} if kind == "wide" else {})
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(result.asm["cubin"])
        binary.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        code = subprocess.run([tool, "-c", binary.name], capture_output=True, text=True, check=True).stdout
    return {
        "shared": result.metadata.shared, "spills": len(re.findall(r"\b(STL|LDL)\b", code)),
        "mma": len(re.findall("[QI]GMMA", code)),
        "products": sorted(set(re.findall(r"wgmma\.mma_async\.\S+", result.asm["ptx"]))),
    }


@pytest.mark.parametrize(
    ("kind", "codes", "first", "second"),
    [
        # On every commit the wide kernel with sums of integers and the kernel of one row with sums by blocks; the ring's by
        # test_gemm_ring.py. Scales of rows take the path of integers, with e4m3 products.
        ("wide", "int8", 4096, 14336), ("one", "block", 14336, 4096), pytest.param("ring", "block", 8, 1, marks=pytest.mark.slow),
        *(pytest.param("one", codes, 4096, 14336, marks=pytest.mark.slow) for codes in TYPES),
        *(pytest.param("one", codes, 14336, 4096, marks=pytest.mark.slow) for codes in ("row", "int8")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("ring", "int8", 8, 1), ("wide", "block", 4096, 14336)]),
        *(pytest.param("ring", codes, rows, 0, marks=pytest.mark.slow) for rows in (16, 32, 64) for codes in TYPES),
        pytest.param("wide", "block", 28672, 4096, marks=pytest.mark.slow),
        *(pytest.param("wide", codes, 14336, 4096, marks=pytest.mark.slow) for codes in ("row", "int8")),
        pytest.param("ring", "row", 8, 1, marks=pytest.mark.slow),
        pytest.param("wide", "row", 4096, 14336, marks=pytest.mark.slow),
    ],
)
def test_the_8_bit_kernel_compiles(tmp_path: Path, run_script: Any, kind: str, codes: str, first: int, second: int) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, __file__, kind, codes, str(first), str(second)]
    run = run_script(command, timeout=280, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["shared"] + 1024 <= SHARED and found["spills"] == 0 and found["mma"] > 0
    assert all(("s8.s8" if codes == "int8" else "e4m3.e4m3") in each for each in found["products"]) and found["products"]


if __name__ == "__main__":
    print(json.dumps(compiled(*sys.argv[1:3], *map(int, sys.argv[3:]))))

"""The kernels for packed 4-bit weights, compiled for sm_90: tensor cores, no spilled registers in loops, the planned memory."""

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
from ridgeline.ops.kernel_table import PACKED_RESERVED
from ridgeline.ops.packed import byte_gemv, packed_gemm, packed_gemv
from ridgeline.ops.packed.packed_sizes import BYTES
from ridgeline.ops.packed.select_packed import PackedGemmPlan, PackedGemvPlan, byte_plan, packed_plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None or registry.TRITON_INTERPRETED, reason="no compiler")
FILES = ("packed_asm", "block_asm", "byte_asm", "block_operand", "packed_gemv", "byte_gemv", "packed_gemm")
WORDS = dict.fromkeys(("code_ptr", "scale_ptr", "zero_ptr", "high_ptr", "block_ptr", "arrived_ptr"), "*i32")
WORDS |= {"outer_ptr": "*fp32", "part_ptr": "*fp32"}
FORMATS = {
    "plain": {"KIND": "uint4", "GROUP": 128, "ZEROS": False, "OUTER": False, "DTYPE": "bf16", "SCALE_DTYPE": "bf16"},
    "zeros": {"KIND": "uint4", "GROUP": 32, "ZEROS": True, "OUTER": False, "DTYPE": "f16", "SCALE_DTYPE": "f16"},
    "of 16": {"KIND": "uint4", "GROUP": 16, "ZEROS": True, "OUTER": False, "DTYPE": "bf16", "SCALE_DTYPE": "bf16"},
    "mxfp4": {"KIND": "e2m1", "GROUP": 32, "ZEROS": False, "OUTER": False, "DTYPE": "bf16", "SCALE_DTYPE": "e8m0"},
    "nvfp4": {"KIND": "e2m1", "GROUP": 16, "ZEROS": False, "OUTER": True, "DTYPE": "bf16", "SCALE_DTYPE": "e4m3"},
    "e2m1 of 32": {"KIND": "e2m1", "GROUP": 32, "ZEROS": False, "OUTER": False, "DTYPE": "bf16", "SCALE_DTYPE": "bf16"},
    "e2m1 of 16": {"KIND": "e2m1", "GROUP": 16, "ZEROS": False, "OUTER": True, "DTYPE": "bf16", "SCALE_DTYPE": "bf16"},
    **{
        name: {"KIND": kind, "FORM": form, "GROUP": group, "ZEROS": zeros, "OUTER": False, "DTYPE": "f16", "SCALE_DTYPE": "f16"}
        for name, (kind, form, group, zeros) in {
            "Q4_1": ("uint4", "pair+offset", 32, True), "Q4_K": ("uint4", "byte+offset", 32, False),
            "Q6_K": ("q6", "byte", 16, False), "Q4_K+Q6_K": ("q6", "byte+offset", 16, True), "Q8_0": ("int8", BYTES, 32, False),
        }.items()
    },
    "W8A16": {"KIND": "int8", "FORM": BYTES, "GROUP": 128, "ZEROS": False, "OUTER": True, "DTYPE": "bf16", "SCALE_DTYPE": "bf16"},
    "Q8_0 in bf16": {
        "KIND": "int8", "FORM": BYTES, "GROUP": 32, "ZEROS": False, "OUTER": False, "DTYPE": "bf16", "SCALE_DTYPE": "f16",
    },
}
FORMATS = {name: {"FORM": ""} | form for name, form in FORMATS.items()}
# Of one row: instructions for a product of 16 inputs, a word of codes. They were 12.8, 18.4, 22.2, 18.0 and 25.7 while codes were
# made numbers of a usual size first.
MOST_EACH = {"plain": 8.5, "mxfp4": 15.0, "nvfp4": 18.0, "Q4_K": 14.5, "Q6_K": 23.5, "Q8_0": 11.5, "W8A16": 9.5}


def gemv_source(plan: PackedGemvPlan, runs: int, gate: int, form: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, str]]:
    constants = form | {
        "RUNS": runs, "NORM": True, "RESIDUAL": True, "GATE": gate, "BIAS": True, "GROUPS": plan.groups, "WARPS": plan.warps,
        "DEPENDENT": True,
    }
    numbers = dict.fromkeys(("x_ptr", "residual_ptr", "norm_ptr", "bias_ptr", "out_ptr", "new_residual_ptr"), "*bf16")
    if form["DTYPE"] == "f16":
        numbers = dict.fromkeys(numbers, "*fp16")
    counts = dict.fromkeys(("inputs", "outputs", "strips"), "i32")
    if form["KIND"] == "int8":
        constants = {name: value for name, value in constants.items() if name not in ("KIND", "FORM", "ZEROS")}
        constants["AHEAD"] = byte_gemv.AHEAD
        return byte_gemv._byte_gemv_kernel, constants, numbers | counts | {"eps": "fp32", "norm_offset": "fp32"}
    return packed_gemv._packed_gemv_kernel, constants, numbers | counts | {"eps": "fp32", "norm_offset": "fp32"}


def gemm_source(plan: PackedGemmPlan, gate: int, form: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, str]]:
    constants = form | {
        "BLOCK_ROWS": plan.block_rows, "TILES": plan.tiles, "PARTS": plan.parts, "TOGETHER": plan.together,
        "HALVES": plan.halves, "STAGES": plan.stages, "GATE": gate, "BIAS": True, "WARPS": plan.warps, "DEPENDENT": True,
    }
    element = "bf16" if form["DTYPE"] == "bf16" else "fp16"
    layout = packed_gemm.gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    counts = dict.fromkeys(("items", "row_blocks", "splits", "runs", "part_runs", "strips", "step", "rows", "outputs"), "i32")
    return packed_gemm.packed_gemm_kernel, constants, counts | {
        "x": f"tensordesc<{element}[{plan.block_rows}, {plan.tiles * 64}],{layout!r}>", "bias_ptr": f"*{element}",
        "out_ptr": f"*{element}",
    }


def compiled(rows: int, outputs: int, inputs: int, gate: int, form: str) -> dict[str, Any]:
    """In a process of its own, where the op files believe in a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    for name in ("hopper", "linear.gemv", *(f"packed.{name}" for name in FILES)):
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    plan = packed_plan(rows, outputs, inputs, FORMATS[form]["KIND"] in ("q5", "q6"))
    if FORMATS[form]["KIND"] == "int8":
        plan = byte_plan(rows, outputs, inputs)
    assert plan is not None
    if isinstance(plan, PackedGemvPlan):
        kernel, constants, types = gemv_source(plan, -(-inputs // 512), gate, FORMATS[form])
        planned, options = plan.shared_bytes(inputs), {"num_warps": plan.groups * plan.warps, "maxnreg": plan.registers()}
    else:
        kernel, constants, types = gemm_source(plan, gate, FORMATS[form])
        planned, options = plan.shared_bytes(), {"num_warps": plan.warps, "maxnreg": plan.registers()}
    types = WORDS | types | dict.fromkeys(constants, "constexpr")
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name == "inputs"]
    source = GluonASTSource(
        kernel, {name: types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, "launch_pdl": True})
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(result.asm["cubin"])
        binary.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        code = subprocess.run([tool, "-c", binary.name], capture_output=True, text=True, check=True).stdout
    instructions = [line for line in code.splitlines() if re.match(r"\s+/\*[0-9a-f]{4}\*/", line)]
    products = [number for number, line in enumerate(instructions) if re.search(r"\bHGMMA|\bHMMA", line)]
    spills = [number for number, line in enumerate(instructions) if re.search(r"\b(STL|LDL)\b", line)]
    return {
        "shared": result.metadata.shared - planned, "products": len(products), "wgmma": "HGMMA" in code,
        "each": (products[-1] - products[0] + 1) / len(products),                # instructions for a product, and the product
        # Registers of the epilogue may be spilled; between products they may not.
        "spills": sum(products[0] < spill < products[len(products) // 2 - 1] for spill in spills),
    }


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gate", "form"),
    [
        (1, 28672, 4096, 1, "plain"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            (1, 4096, 14336, 0, "mxfp4"), (1, 6144, 4096, 0, "nvfp4"), (1, 28672, 4096, 1, "e2m1 of 32"),
            (64, 4096, 4096, 0, "e2m1 of 16"),
            (1, 4096, 1088, 0, "zeros"), (1, 4096, 4096, 0, "of 16"),
            (16, 28672, 4096, 1, "plain"),
            (8, 6144, 4096, 0, "zeros"), (30, 4096, 4096, 0, "mxfp4"), (64, 28672, 4096, 1, "nvfp4"),
            (64, 4096, 14336, 0, "plain"),
            (128, 4096, 4096, 0, "zeros"), (128, 28672, 4096, 1, "plain"),
            (1, 28672, 4096, 1, "Q4_K"), (1, 4096, 4096, 0, "Q4_1"),
            (1, 4096, 14336, 0, "Q6_K"), (16, 28672, 4096, 1, "Q4_K"), (8, 6144, 4096, 0, "Q4_K+Q6_K"),
            (128, 4096, 14336, 0, "Q6_K"), (1, 6144, 4096, 0, "Q4_K+Q6_K"), (32, 4096, 4096, 0, "Q4_K"),
            (128, 6144, 4096, 0, "Q4_K+Q6_K"), (64, 2048, 2048, 0, "Q4_K"),
            (1, 28672, 4096, 1, "Q8_0"), (1, 6144, 4096, 0, "Q8_0"), (1, 4096, 14336, 0, "W8A16"), (8, 6144, 4096, 0, "Q8_0"),
            (16, 4096, 4096, 0, "Q8_0"), (32, 28672, 4096, 1, "Q8_0"), (32, 4096, 14336, 0, "Q8_0 in bf16"),
            (64, 28672, 4096, 1, "W8A16"), (128, 4096, 14336, 0, "Q8_0"), (128, 28672, 4096, 1, "Q8_0"),
        ]),
    ],
)
def test_the_kernel_compiles(tmp_path: Path, run_script: Any, rows: int, outputs: int, inputs: int, gate: int, form: str) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, __file__, *map(str, (rows, outputs, inputs, gate, form))]
    run = run_script(command, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    few = 2 if rows == 1 and form == "Q6_K" else 0       # of 128 registers; the loop has 850 instructions
    assert 0 <= found["shared"] <= PACKED_RESERVED and found["spills"] <= few and found["products"] > 0
    assert found["wgmma"] == (rows > 1)
    assert rows > 1 or found["each"] <= MOST_EACH.get(form, 100)


if __name__ == "__main__":
    print(json.dumps(compiled(*map(int, sys.argv[1:5]), sys.argv[5])))

"""The GEMV for codes as they are stored, compiled for sm_90: tensor cores, no spilled registers, the planned memory."""

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
from ridgeline.ops.packed.select_packed import PackedGemvPlan, packed_plan
from ridgeline.ops.quantised import codes_gemv

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None or registry.TRITON_INTERPRETED, reason="no compiler")
FORMS = {
    "fp8-row": ("e4m3", "row"), "fp8-block": ("e4m3", "block"), "int8-row": ("int8", "row"), "int8-block": ("int8", "block"),
    "fp8-row in float16": ("e4m3", "row"),
}
PRODUCTS = 16                        # of 256 inputs
NUMBERS = ("x_ptr", "residual_ptr", "norm_ptr", "bias_ptr", "out_ptr", "new_residual_ptr")


def compiled(form: str, outputs: int, inputs: int, gate: int, norm: bool) -> dict[str, Any]:
    """In a process of its own, where the op files believe in a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    names = ("hopper", "linear.gemv", "packed.packed_asm", "packed.packed_gemv", "quantised.codes_asm", "quantised.codes_gemv")
    for name in names:
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    plan = packed_plan(1, outputs, inputs)
    assert isinstance(plan, PackedGemvPlan)
    (kind, scales), short = FORMS[form], form.endswith("float16")
    constants = {
        "RUNS": inputs // 256, "KIND": kind, "DTYPE": "f16" if short else "bf16", "SCALES": scales, "BLOCK": 128,
        "NORM": norm, "RESIDUAL": norm, "GATE": gate, "BIAS": True, "GROUPS": plan.groups, "WARPS": plan.warps, "DEPENDENT": True,
    }
    types = dict.fromkeys(NUMBERS, "*fp16" if short else "*bf16")
    types |= {"code_ptr": "*i32", "scale_ptr": "*fp32", "outer_ptr": "*fp32"}
    types |= dict.fromkeys(("inputs", "outputs", "strips", "scale_stride"), "i32") | {"eps": "fp32", "norm_offset": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    kernel = codes_gemv._codes_gemv_kernel
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name == "inputs"]
    source = GluonASTSource(
        kernel, {name: types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": plan.groups * plan.warps, "maxnreg": plan.registers(), "launch_pdl": True}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(result.asm["cubin"])
        binary.flush()
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        code = subprocess.run([tools / "nvdisasm", "-c", binary.name], capture_output=True, text=True, check=True).stdout
        command = [tools / "cuobjdump", "-res-usage", binary.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "shared": result.metadata.shared - -(-inputs // (256 * plan.warps)) * 512 * plan.warps,
        "products": len(re.findall(r"\bHMMA", code)), "spills": len(re.findall(r"\b(STL|LDL)\b", code)),
        "wide_loads": len(re.findall(r"LDG\.E\.\S*128", code)), "warps": plan.programs * plan.groups * plan.warps,
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]), "instructions": code.count(";"),
    }


@pytest.mark.parametrize(
    ("form", "outputs", "inputs", "gate"),
    [
        ("fp8-block", 28672, 4096, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            ("int8-block", 4096, 14336, 0), ("fp8-row", 6144, 4096, 0), ("int8-row", 4096, 4096, 0),
            ("fp8-row in float16", 6144, 4096, 0),
        ]),
    ],
)
def test_the_gemv_compiles(tmp_path: Path, run_script: Any, form: str, outputs: int, inputs: int, gate: int) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    norm = inputs < 14336                                # the inputs of a down projection have none
    command = [sys.executable, __file__, *map(str, (form, outputs, inputs, gate, int(norm)))]
    run = run_script(command, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert 0 <= found["shared"] <= PACKED_RESERVED and found["spills"] == 0 and found["wide_loads"] >= 8
    assert found["products"] == PRODUCTS and found["registers"] * 32 * found["warps"] <= 65536


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1], *map(int, sys.argv[2:]))))

"""Products of 81 to 128 rows: which of them the kernel of wide tiles makes, what the compiler makes of it, what it computes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops import kernel_table, registry
from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.hopper import is_hopper
from ridgeline.ops.kernel_table import LIBRARY, WIDE_PART_SCRATCH, WIDE_SCRATCH, Choice, DeviceFacts
from ridgeline.ops.linear import gemm_wide
from ridgeline.ops.linear import linear_op as linear_file
from ridgeline.ops.linear.select import MULTIPROCESSORS
from ridgeline.ops.linear.select_wide import WidePlan, wide_plan

H200 = 232_448                       # bytes of shared memory that a program may have

# ── the rule ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SHAPES = [                           # outputs (pairs with a gate), inputs, gated
    (14336, 4096, True), (12288, 4096, True), (28672, 8192, True), (8192, 2048, True), (4096, 14336, False),
    (4096, 4096, False), (6144, 4096, False), (8192, 8192, False), (8192, 28672, False), (128256, 4096, False),
    (151936, 4096, False), (512, 512, False),
]


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SHAPES)
def test_every_plan_fits(outputs: int, inputs: int, gated: bool) -> None:
    """Rings fit into shared memory; parts of a tile are shares of it; programs that wait for each other run at once."""
    assert wide_plan(80, outputs, inputs, gated) is None and wide_plan(129, outputs, inputs, gated) is None
    plan = wide_plan(100, outputs, inputs, gated)
    if plan is None:
        return
    scratch = WIDE_SCRATCH if plan.splits == 1 else WIDE_PART_SCRATCH
    assert plan.shared_bytes() + scratch <= H200
    assert plan.step <= plan.tile and plan.step % gemm_wide.BOX == 0 and plan.tile in (128, 256)
    assert min(plan.stages, plan.row_stages) >= 2 * gemm_wide.RUN        # one run in use, one on its way
    tiles = -(-outputs // (plan.step // 2 if gated else plan.step))
    if plan.splits > 1:
        assert not gated and tiles * plan.splits <= MULTIPROCESSORS and tiles <= gemm_wide.MOST_TILES
        assert plan.splits & (plan.splits - 1) == 0
        assert -(-inputs // (64 * gemm_wide.RUN)) >= plan.splits         # no part is empty
    else:
        assert tiles / (-(-tiles // MULTIPROCESSORS) * MULTIPROCESSORS) > 0.9


def test_the_rule() -> None:
    """As measured on an H200: the gated product, the one behind it and the head are ours; q, k, v and o are the library's."""
    assert wide_plan(128, 14336, 4096, True) == WidePlan(256, 224, 1, 4, 5)
    assert wide_plan(128, 4096, 14336) == WidePlan(128, 128, 4, 7, 7)
    assert wide_plan(128, 128256, 4096) == WidePlan(256, 256, 1, 4, 5)
    assert wide_plan(128, 6144, 4096) is None and wide_plan(128, 4096, 4096) is None and wide_plan(128, 8192, 8192) is None
    assert wide_plan(128, 151936, 4096) is None          # the last round of tiles would be half empty
    assert wide_plan(128, 8192, 2048, True) is None      # tiles of 64 pairs: the rows would be read too often
    assert wide_plan(128, 8192, 28672) == WidePlan(128, 128, 2, 7, 7)


def test_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in range at multiples of 16 bytes, and a weight that is; the gated product asks with its pairs."""
    calls: list[tuple[int, str | None]] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, plan: WidePlan, *, gate: str | None = None) -> Tensor:
        calls.append((len(x), gate))
        return F.linear(x, weight if gate is None else weight[: len(weight) // 2], bias)

    def choose(format: str, rows: int, outputs: int, inputs: int, gated: bool, device: DeviceFacts) -> Choice:
        taken = 81 <= rows <= 128 and outputs == 128 and device.hopper
        return Choice("wide_gemm", WidePlan(256, 256, 1, 4, 5), False) if taken else LIBRARY

    monkeypatch.setitem(linear_file.SEVERAL, "wide_gemm", multiply)
    monkeypatch.setattr(linear_file, "choose", choose)
    h200 = kernel_table.H200
    monkeypatch.setattr(linear_file, "device_facts", lambda device, aligned: h200._replace(gluon=aligned, hopper=aligned))
    monkeypatch.setattr(linear_file, "rms_norm", linear_file.rms_norm_reference)
    room = torch.zeros(256 * 64 + 8, dtype=torch.bfloat16)
    weight, shifted = room[: 256 * 64].view(256, 64), room[1 : 256 * 64 + 1].view(256, 64)
    norm = torch.ones(64, dtype=torch.bfloat16)

    def rows(count: int) -> Tensor:
        return torch.zeros(count, 64, dtype=torch.bfloat16)

    linear_file.linear_triton(rows(81), weight[:128])
    linear_file.normed_linear_triton(rows(128), rows(128), norm, 1e-5, weight, gate="silu")
    assert calls == [(81, None), (128, "silu")]
    linear_file.linear_triton(rows(80), weight[:128])
    linear_file.linear_triton(rows(129), weight[:128])
    linear_file.linear_triton(rows(100), weight)                         # the rule says no
    linear_file.linear_triton(rows(100), shifted[:128])                  # where the copy engine cannot read
    linear_file.linear_triton(torch.zeros(100, 68, dtype=torch.bfloat16)[:, :64], weight[:128])
    assert len(calls) == 2


# ── the kernel, compiled ─────────────────────────────────────────────────────────────────────────────────────────────


def compiled(outputs: int, inputs: int, gate: int) -> dict[str, Any]:
    """What the compiler makes of the kernel for sm_90. In a process of its own, where the op files believe in a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    for name in ("hopper", "linear.gemv"):
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    module = importlib.reload(gemm_wide)
    kernel, plan = module.wide_gemm_kernel, wide_plan(128, outputs, inputs, gate > 0)
    assert plan is not None
    flat, cube = (module.gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3))
    constants = {
        "TILE": plan.tile, "STEP": plan.step, "BOX": module.BOX, "SPLITS": plan.splits, "STAGES": plan.stages,
        "ROW_STAGES": plan.row_stages, "RUN": module.RUN, "MOST_TILES": module.MOST_TILES, "GATE": gate, "BIAS": False,
        "SCALED": False, "BLOCK_SCALED": 0, "DEPENDENT": True,
    }
    weight = f"bf16[{module.BOX}, 64],{flat!r}" if gate == 0 else f"bf16[2, {module.BOX // 2}, 64],{cube!r}"
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr") | {
        "x": f"tensordesc<bf16[64, 64],{flat!r}>", "weight": f"tensordesc<{weight}>", "bias_ptr": "*bf16", "out_ptr": "*bf16",
        "part_ptr": "*fp32", "arrived_ptr": "*i32", "x_scale_ptr": "*bf16", "scale_ptr": "*bf16",
    }
    aligned = [name for name in types if name.endswith("_ptr") or name == "outputs"]
    source = GluonASTSource(
        kernel, types, {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "maxnreg": module.REGISTERS, "launch_pdl": True}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(result.asm["cubin"])
        binary.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        code = subprocess.run([tool, "-c", binary.name], capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"HGMMA|WARPGROUP\.DEPBAR|UTMALDG|ACQBULK|PREEXIT|STL|LDL", code)
    return {"shared": result.metadata.shared, "instructions": instructions}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or registry.TRITON_INTERPRETED, reason="no compiler")
@pytest.mark.parametrize(
    ("outputs", "inputs", "gate"),
    [
        (4096, 14336, 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((14336, 4096, 1), (128256, 4096, 0))),
    ],
)
def test_the_kernel_compiles(tmp_path: Path, run_script: Any, outputs: int, inputs: int, gate: int) -> None:
    """Sums in registers, one wait per block, and only the warp that asks for rows waits for the kernel before."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, __file__, str(outputs), str(inputs), str(gate)]
    run = run_script(command, timeout=280, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    plan = wide_plan(128, outputs, inputs, gate > 0)
    assert plan is not None
    scratch = WIDE_SCRATCH if plan.splits == 1 else WIDE_PART_SCRATCH
    assert plan.shared_bytes() <= found["shared"] <= plan.shared_bytes() + scratch
    counts = Counter(found["instructions"])
    assert counts["HGMMA"] == 8 and counts["WARPGROUP.DEPBAR"] == 2      # four products of 16 inputs for each group
    assert counts["STL"] == counts["LDL"] == 0           # nothing is spilt
    assert counts["ACQBULK"] == counts["PREEXIT"] == 1
    boxes = plan.step // gemm_wide.BOX * gemm_wide.RUN
    assert counts["UTMALDG"] == boxes + 2 * gemm_wide.RUN


# ── the kernel, on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(
    not torch.cuda.is_available() or not is_hopper(torch.device("cuda")),
    reason="no such GPU",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [65, 96, 128])
@pytest.mark.parametrize(
    ("plan", "outputs", "inputs", "gate", "bias"),
    [
        (WidePlan(256, 224, 1, 4, 5), 14336, 4096, "silu", False), (WidePlan(256, 192, 1, 4, 5), 1000, 2056, "gelu", True),
        (WidePlan(128, 128, 4, 7, 7), 4096, 14336, None, False), (WidePlan(128, 128, 2, 7, 7), 1000, 2056, None, True),
        (WidePlan(256, 256, 1, 4, 5), 40008, 2048, None, True),
    ],
)
def test_wide_gemm(
    dtype: torch.dtype, rows: int, plan: WidePlan, outputs: int, inputs: int, gate: str | None, bias: bool
) -> None:
    """As close as one rounding, whatever lies beyond rows, outputs and inputs; and the same bits every time."""

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to("cuda", dtype)

    count = outputs if gate is None else 2 * outputs
    x, weight, added = random(rows, inputs), random(count, inputs, scale=inputs**-0.5), random(count) if bias else None
    torch.cuda.synchronize()                             # the kernel asks for weights before it waits
    out = gemm_wide.wide_gemm(x, weight, added, plan, gate=gate)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    exact = exact if gate is None else gated_activation_reference(exact, gate)
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-11
    torch.testing.assert_close(out.double(), exact, rtol=unit, atol=4e-3 if gate else 2e-3)
    for _ in range(3):
        assert torch.equal(gemm_wide.wide_gemm(x, weight, added, plan, gate=gate), out)


if __name__ == "__main__":
    print(json.dumps(compiled(*map(int, sys.argv[1:]))))

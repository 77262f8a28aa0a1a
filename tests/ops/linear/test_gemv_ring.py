"""The one-row product through a ring in shared memory: when it is chosen, what the compiler makes of it, and on a GPU that
it adds what gemv.py adds."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops import hopper, kernel_table, registry
from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.kernel_table import DeviceFacts
from ridgeline.ops.linear import gemv_ring
from ridgeline.ops.linear import linear_op as linear_file
from ridgeline.ops.linear.gemv import gemv
from ridgeline.ops.linear.select import GemvPlan, ring_plan

H200 = 232_448                       # bytes of shared memory for a program, and about as many of a multiprocessor
A100 = 166_912
OUTPUTS = 4096

# ── which kernel ─────────────────────────────────────────────────────────────────────────────────────────────────────


def facts_of_an_h200(device: torch.device, aligned: bool = True) -> DeviceFacts:
    return kernel_table.H200._replace(gluon=aligned, hopper=aligned)


def chosen(inputs: int, gated: bool, shared: int) -> object:
    """As on a GPU with that much shared memory."""
    found = kernel_table.choose("16-bit", 1, OUTPUTS, inputs, gated, kernel_table.H200._replace(shared=shared))
    return found.plan if found.kernel == "ring_gemv" else None


@pytest.mark.parametrize("gated", [False, True])
def test_the_ring_is_for_devices_it_fits(gated: bool) -> None:
    for inputs in (3072, 4096, 5120, 8192, 14336, 16384):
        assert chosen(inputs, gated, H200) == ring_plan(OUTPUTS, inputs, gated) is not None
        assert chosen(inputs, gated, A100) is None
    assert chosen(2048, gated, H200) is None            # nothing to gain
    assert ring_plan(2048, 8192, gated) is None


def test_no_ring_without_a_gpu() -> None:
    found = kernel_table.choose("16-bit", 1, OUTPUTS, 4096, False, hopper.device_facts(torch.device("cpu")))
    assert found.kernel == "gemv"


def test_one_row_goes_where_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    def called(name: str) -> Any:
        return lambda x, weight, bias, plan, **rest: calls.append((name, plan)) or (x, x)

    monkeypatch.setitem(linear_file.ONE_ROW, "gemv", called("gemv"))
    monkeypatch.setitem(linear_file.ONE_ROW, "ring_gemv", called("ring"))
    monkeypatch.setattr(linear_file, "device_facts", facts_of_an_h200)
    x, norm = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    room = torch.zeros(5120 * 4096 + 8, dtype=torch.bfloat16)
    weight, shifted = room[:-8].view(5120, 4096), room[1:-7].view(5120, 4096)
    linear_file.linear_triton(x, weight)
    linear_file.normed_linear_triton(x, x, norm, 1e-5, weight, gate="silu")
    linear_file.linear_triton(x, shifted)                # copies are of 16 bytes
    linear_file.linear_triton(torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(64, 512, dtype=torch.bfloat16))
    assert [name for name, _ in calls] == ["ring", "ring", "gemv", "gemv"]
    assert [plan for _, plan in calls[:2]] == [ring_plan(5120, 4096), ring_plan(2560, 4096, True)]


# ── the kernel, compiled ─────────────────────────────────────────────────────────────────────────────────────────────


def compiled(inputs: int, gate: int) -> dict[str, Any]:
    """What the compiler makes of the kernel for sm_90. In a process of its own, where the op files believe in a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    for name in ("hopper", "linear.gemv"):
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    kernel = importlib.reload(gemv_ring)._ring_gemv_kernel
    plan, padded = ring_plan(OUTPUTS, inputs, gate > 0), 1 << (inputs - 1).bit_length()
    assert plan is not None
    constants = {
        "BLOCK": plan.block, "BLOCK_INPUTS": padded, "STAGES": plan.stages, "EVEN": padded == inputs, "NORM": gate > 0,
        "RESIDUAL": gate > 0, "GATE": gate, "BIAS": gate == 3, "SCALED": False, "WARPS": plan.warps, "DEPENDENT": True,
    }
    types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")} | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("inputs", "outputs", "weight_stride"), "i32") | {"eps": "fp32", "norm_offset": "fp32"}
    aligned = [name for name in types if name.endswith("_ptr") or name in ("inputs", "weight_stride")]
    source = GluonASTSource(
        kernel, {name: types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": plan.warps, "launch_pdl": True}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared": result.metadata.shared, "ptx": result.asm["ptx"]}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or registry.TRITON_INTERPRETED, reason="no compiler")
@pytest.mark.parametrize(
    ("inputs", "gate"),
    [(4096, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((14336, 0), (8192, 0), (5120, 2), (4096, 3)))],
)
def test_the_kernel_compiles(tmp_path: Path, run_script: Any, inputs: int, gate: int) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    run = run_script([sys.executable, __file__, str(inputs), str(gate)], timeout=200, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    plan, padded = ring_plan(OUTPUTS, inputs, gate > 0), 1 << (inputs - 1).bit_length()
    assert plan is not None
    ring = plan.shared_bytes(padded, gate > 0) // plan.programs
    assert ring <= found["shared"] <= ring + kernel_table.RING_GEMV_RESERVED - 1024           # the driver takes 1024 of each
    assert plan.programs * (found["shared"] + 1024) <= H200
    before, after = found["ptx"].split("griddepcontrol.wait")
    copies = plan.block * padded // (8 * 32 * plan.warps) * (2 if gate else 1)   # of 16 bytes, per stage and thread
    assert before.count("cp.async.cg.shared.global") == (plan.stages - 1) * copies
    assert after.count("cp.async.cg.shared.global") == copies
    assert "cp.async.ca" not in found["ptx"]


# ── the kernel, on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(
    not torch.cuda.is_available() or not hopper.HAS_GLUON,
    reason="no such GPU",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs", "gate", "bias", "residual"),
    [
        (6144, 4096, None, False, True), (4096, 14336, None, False, False), (14336, 4096, "silu", False, True),
        (3001, 4096, None, True, True), (77, 6144, "gelu", True, False), (1536, 5120, "gelu_tanh", False, True),
        (2048, 8192, None, False, False), (300, 8192, "silu", True, True), (64, 16384, "silu", False, True),
    ],
)
def test_ring_gemv(
    dtype: torch.dtype, outputs: int, inputs: int, gate: str | None, bias: bool, residual: bool
) -> None:
    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to("cuda", dtype)

    rows = outputs if gate is None else 2 * outputs
    x, weight, norm = random(1, inputs), random(rows, inputs, scale=inputs**-0.5), random(inputs)
    stream, added = random(2, inputs)[1:] if residual else None, random(rows) if bias else None
    plan = kernel_table.choose("16-bit", 1, OUTPUTS, inputs, gate is not None, hopper.device_facts(x.device)).plan
    assert plan is not None
    neighbours = {"norm": norm, "eps": 1e-5, "norm_offset": 1.0, "residual": stream, "gate": gate}
    torch.cuda.synchronize()                             # the kernels ask for weights before they wait
    out, new = gemv_ring.ring_gemv(x, weight, added, plan, **neighbours)
    same, same_new = gemv(x, weight, added, GemvPlan(plan.block, plan.warps, plan.programs), **neighbours)
    assert torch.equal(new, same_new) and torch.equal(out, same)     # no addition in another order
    total = x if stream is None else x + stream
    exact = F.linear(
        F.rms_norm(total.double(), (inputs,), norm.double() + 1, 1e-5), weight.double(),
        None if added is None else added.double(),
    )
    exact = exact if gate is None else gated_activation_reference(exact, gate)
    torch.testing.assert_close(out.double(), exact, rtol=2**-6, atol=2**-6)


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), int(sys.argv[2]))))

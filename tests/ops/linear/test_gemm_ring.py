"""A few rows through a ring in shared memory: when it is chosen, what the compiler makes of it, and on a GPU that it is
right."""

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
from ridgeline.ops.linear import gemm_ring, select
from ridgeline.ops.linear import linear_op as linear_file
from ridgeline.ops.linear.select import ring_gemm_plan

H200 = 232_448                       # bytes of shared memory for a program, and about as many of a multiprocessor
A100 = 166_912
HAS_TRITON = importlib.util.find_spec("triton") is not None

# ── which kernel ─────────────────────────────────────────────────────────────────────────────────────────────────────


def facts_of_an_h200(device: torch.device, aligned: bool = True) -> DeviceFacts:
    return kernel_table.H200._replace(gluon=aligned, hopper=aligned)


def chosen(rows: int, gated: bool, shared: int, hopper: bool = True) -> object:
    """As on a GPU with that much shared memory."""
    facts = kernel_table.H200._replace(shared=shared, hopper=hopper)
    found = kernel_table.choose("16-bit", rows, 4096, 4096, gated, facts)
    return found.plan if found.kernel == "ring_gemm" else None


@pytest.mark.parametrize("gated", [False, True])
def test_the_ring_is_for_devices_it_fits(gated: bool) -> None:
    for rows in (2, 16, 32) if gated else (2, 16, 32, 64):
        assert chosen(rows, gated, H200) == ring_gemm_plan(rows, 4096, 4096, gated)
        assert chosen(rows, gated, A100) is None
        assert chosen(rows, gated, H200, False) is None              # another matrix unit
    assert chosen(4, gated, H200) is not None


def test_no_ring_without_a_gpu() -> None:
    found = kernel_table.choose("16-bit", 16, 4096, 4096, False, hopper.device_facts(torch.device("cpu")))
    assert found.kernel == "small_gemm"


def test_a_few_rows_go_where_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    def called(name: str) -> Any:
        return lambda x, weight, bias, plan, **rest: calls.append((name, plan)) or x

    monkeypatch.setitem(linear_file.SEVERAL, "small_gemm", called("small"))
    monkeypatch.setitem(linear_file.SEVERAL, "ring_gemm", called("ring"))
    monkeypatch.setattr(linear_file, "device_facts", facts_of_an_h200)
    x, norm = torch.zeros(4, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    room = torch.zeros(5120 * 4096 + 8, dtype=torch.bfloat16)
    weight, shifted = room[:-8].view(5120, 4096), room[1:-7].view(5120, 4096)
    linear_file.linear_triton(x, weight)
    linear_file.normed_linear_triton(x, x, norm, 1e-5, weight, gate="silu")
    linear_file.linear_triton(x, shifted)                # copies are of 16 bytes
    linear_file.linear_triton(x[:, :2048], weight[:2560, :2048].contiguous())            # nothing to gain
    assert [name for name, _ in calls] == ["ring", "ring", "small", "small"]
    assert [plan for _, plan in calls[:2]] == [ring_gemm_plan(4, 5120, 4096), ring_gemm_plan(4, 2560, 4096, True)]


# ── the kernel, compiled ─────────────────────────────────────────────────────────────────────────────────────────────


def compiled_plan(rows: int, gate: int) -> Any:
    """Every row of the plan's tables, with the last gate its narrow tiles."""
    return ring_gemm_plan(rows, 14336 if gate in (1, 2) else 4096, 4096, gate > 0)


def compiled(rows: int, gate: int) -> dict[str, Any]:
    """What the compiler makes of the kernel for sm_90. In a process of its own, where the op files believe in a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonASTSource

    registry.HAS_TRITON, registry.gluon, registry.triton, registry.tl = True, gluon, triton, triton.language
    for name in ("hopper", "linear.gemv"):
        importlib.reload(importlib.import_module(f"ridgeline.ops.{name}"))
    module = importlib.reload(gemm_ring)
    kernel, plan = module._ring_gemm_kernel, compiled_plan(rows, gate)
    assert plan is not None
    constants = {
        "BLOCK_ROWS": plan.block_rows, "BLOCK_OUTPUTS": plan.block_outputs, "BLOCK_INPUTS": plan.block_inputs,
        "STAGES": plan.stages, "X_STAGES": plan.x_stages, "GATE": gate, "BIAS": gate == 3, "SCALED": False,
        "BLOCK_SCALED": 0, "PAIRED": False, "WARPS": plan.warps, "DEPENDENT": True,
    }
    types = dict.fromkeys(("weight_ptr", "x_scale_ptr", "scale_ptr", "bias_ptr", "out_ptr"), "*bf16")
    types |= {"part_ptr": "*fp32", "arrived_ptr": "*i32"}
    counts = ("rows", "inputs", "outputs", "tiles", "step", "splits", "weight_stride", "part_inputs", "scale_stride")
    types |= dict.fromkeys(counts, "i32") | dict.fromkeys(constants, "constexpr")
    types["x_tiles"] = f"tensordesc<bf16[{plan.block_rows}, {plan.block_inputs}],{module.tiles_of(128, 16, 2)!r}>"
    aligned = [name for name in types if name.endswith("_ptr") or name in ("inputs", "weight_stride", "part_inputs")]
    source = GluonASTSource(
        kernel, {name: types[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": plan.warps, "launch_pdl": True}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared": result.metadata.shared, "ptx": result.asm["ptx"]}


@pytest.mark.skipif(not HAS_TRITON or registry.TRITON_INTERPRETED, reason="no compiler")
@pytest.mark.parametrize(
    ("rows", "gate"),
    [(4, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((16, 0), (16, 1), (32, 2), (32, 0), (8, 3), (64, 0)))],
)
def test_the_kernel_compiles(tmp_path: Path, run_script: Any, rows: int, gate: int) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    run = run_script([sys.executable, __file__, str(rows), str(gate)], timeout=200, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    plan = compiled_plan(rows, gate)
    assert plan is not None
    rings = plan.shared_bytes(gate > 0)
    assert rings <= found["shared"] <= rings + kernel_table.RING_GEMM_RESERVED - 1024         # the driver takes 1024 of each
    before, after = found["ptx"].split("griddepcontrol.wait")
    copies = plan.block_outputs * plan.block_inputs // (8 * 32 * plan.warps) * (2 if gate else 1)    # per block and thread
    assert before.count("cp.async.cg.shared.global") == (plan.stages - 1) * copies       # the ring, before the wait
    assert after.count("cp.async.cg.shared.global") == copies
    assert "cp.async.bulk.tensor" not in before          # x, which the kernel before it writes
    assert after.count("cp.async.bulk.tensor") == plan.x_stages
    assert f"wgmma.mma_async.sync.aligned.m64n{plan.block_rows}k16" in after
    assert "st.global" not in before and "ld.local" not in found["ptx"]


# ── the kernel, on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(
    not torch.cuda.is_available() or not hopper.is_hopper(torch.device("cuda")),
    reason="no such GPU",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gate", "bias"),
    [
        (2, 6144, 4096, None, False), (16, 4096, 14336, None, False), (32, 14336, 4096, "silu", False),
        (5, 3001, 2048, None, True), (8, 77, 1536, "gelu", True), (13, 33000, 512, "gelu_tanh", False),
        (13, 70, 8192, None, False), (32, 20000, 512, None, True), (3, 29000, 256, "silu", True),
        (50, 3001, 2048, None, True), (64, 3584, 3584, None, False), (1, 3584, 18944, None, False),
    ],
)
def test_ring_gemm(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, outputs: int, inputs: int, gate: str | None, bias: bool
) -> None:
    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to("cuda", dtype)

    both = outputs if gate is None else 2 * outputs
    x, weight = random(rows, inputs + 16)[:, :inputs], random(both, inputs, scale=inputs**-0.5)
    added = random(both) if bias else None
    for border in ("FEWEST_RING_INPUTS", "FEWEST_RING_OUTPUTS"):     # smaller matrices would be right too
        monkeypatch.setattr(select, border, 1)
    plan = ring_gemm_plan.__wrapped__(rows, outputs, inputs, gate is not None)
    assert plan is not None
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    exact = exact if gate is None else gated_activation_reference(exact, gate)
    torch.cuda.synchronize()                             # the kernel asks for weights before it waits
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    out = gemm_ring.ring_gemm(x, weight, added, plan, gate=gate)
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-7)
    assert torch.equal(gemm_ring.ring_gemm(x, weight, added, plan, gate=gate), out)  # counters are as they were


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]), int(sys.argv[2]))))

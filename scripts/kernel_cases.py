"""Small cases of kernels that the cases of the ops do not reach, since these kernels are selected for large GEMMs and steps.

Each case launches its kernel directly, with the rings and tiles of the selection rules, but with few rows and outputs, so that
compute-sanitizer finishes in seconds. Some run as on a GPU with one or two SMs, so that a CTA walks over several tiles: every
slot of a ring is then filled, used and filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.attention import attention_launch, kernel_prefill_hopper, paged_attention
from ridgeline.ops.linear import gemm_gated, gemm_invariant, gemm_ring, gemm_small, gemm_wide, gemv, gemv_ring
from ridgeline.ops.linear.gemm_wide import gl
from ridgeline.ops.linear.select import GemmPlan, GemvPlan, plan, ring_gemm_plan, ring_plan
from ridgeline.ops.linear.select_wide import WidePlan
from ridgeline.ops.registry import gluon_kernel, tl, triton_kernel


@contextmanager
def only(count: int, module: ModuleType) -> Iterator[None]:
    """Launch the kernel of this module as for a GPU with `count` SMs."""
    known = module.multiprocessors
    module.multiprocessors = lambda device: count  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.multiprocessors = known  # type: ignore[attr-defined]


def _product(
    device: str, rows: int, outputs: int, inputs: int, gate: str | None, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows + outputs + inputs)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).to(device)

    weights = outputs if gate is None else 2 * outputs
    made = random(rows, inputs), random(weights, inputs, scale=inputs**-0.5), random(weights) if bias else None
    if device == "cuda":
        torch.cuda.synchronize()                         # kernels load weights before they wait (PDL)
    return made


def _check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
    exact = F.linear(x.cpu().double(), weight.cpu().double(), None if bias is None else bias.cpu().double())
    exact = exact if gate is None else gated_activation_reference(exact, gate)
    torch.testing.assert_close(out.cpu().double(), exact, rtol=2**-6, atol=2**-6)


# ── one row ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _one_row(device: str, multiply: Callable[..., tuple[Tensor, Tensor]], chosen: Any, outputs: int, inputs: int,
             gate: str | None, bias: bool) -> None:
    x, weight, added = _product(device, 1, outputs, inputs, gate, bias)
    norm, stream = torch.ones_like(x[0]), torch.ones_like(x)
    out, total = multiply(x, weight, added, chosen, norm=norm, eps=1e-5, residual=stream, gate=gate)
    normed = F.rms_norm(total.cpu().double(), (inputs,), eps=1e-5)
    _check(out, normed, weight, added, gate)


def run_gemv(device: str) -> None:
    with only(1, gemv):
        _one_row(device, gemv.gemv, GemvPlan(2, 4, 3), 37, 512, None, True)
        _one_row(device, gemv.gemv, GemvPlan(1, 4, 2), 7, 592, "silu", False)


def run_ring_gemv(device: str) -> None:
    with only(1, gemv_ring):
        _one_row(device, gemv_ring.ring_gemv, ring_plan(4096, 4096), 37, 4096, None, True)
        _one_row(device, gemv_ring.ring_gemv, ring_plan(4096, 5120, True), 13, 5120, "gelu", True)


# ── a few rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(device: str, multiply: Callable[..., Tensor], chosen: Any, rows: int, outputs: int, inputs: int,
          gate: str | None, bias: bool) -> None:
    x, weight, added = _product(device, rows, outputs, inputs, gate, bias)
    _check(multiply(x, weight, added, chosen, gate=gate), x, weight, added, gate)


def run_small_gemm(device: str) -> None:
    _rows(device, gemm_small.small_gemm, GemmPlan(16, 16, 64, 4, 2, 2, 0), 19, 24, 528, "silu", True)
    _rows(device, gemm_small.small_gemm, GemmPlan(16, 16, 64, 4, 2, 4, 12), 5, 33, 272, "gelu", False)
    _rows(device, gemm_small.small_gemm, plan(20, 128, 1024), 20, 128, 1024, None, True)
    _rows(device, gemm_small.small_gemm, plan(3, 100, 1024, True), 3, 100, 1024, "gelu_tanh", False)


def run_invariant_gemm(device: str) -> None:
    for rows in (3, 150):
        x, weight, added = _product(device, rows, 70, 1040, None, True)
        _check(gemm_invariant.invariant_linear(x, weight, added), x, weight, added, None)


def run_ring_gemm(device: str) -> None:
    with only(2, gemm_ring):                             # split-K in two parts: one CTA each, three tiles
        _rows(device, gemm_ring.ring_gemm, ring_gemm_plan(5, 4096, 4096), 5, 150, 4096, None, True)
        _rows(device, gemm_ring.ring_gemm, ring_gemm_plan(50, 4096, 4096), 50, 150, 4096, None, False)
    with only(1, gemm_ring):                             # tiles of two CTAs, wide ones and narrow ones
        _rows(device, gemm_ring.ring_gemm, ring_gemm_plan(5, 14336, 4096, True), 5, 250, 1024, "gelu_tanh", True)
        _rows(device, gemm_ring.ring_gemm, ring_gemm_plan(20, 14336, 4096, True), 20, 250, 1024, "silu", False)
        _rows(device, gemm_ring.ring_gemm, ring_gemm_plan(20, 8192, 4096, True), 20, 150, 1024, "gelu", False)


# ── many rows ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_wide_gemm(device: str) -> None:
    with only(1, gemm_wide):
        _rows(device, gemm_wide.wide_gemm, WidePlan(256, 224, 1, 4, 5), 100, 130, 600, "silu", True)
        _rows(device, gemm_wide.wide_gemm, WidePlan(256, 256, 1, 4, 5), 100, 300, 600, None, True)
    _rows(device, gemm_wide.wide_gemm, WidePlan(128, 128, 4, 7, 7), 100, 200, 2048, None, True)  # parts wait for each other


def run_gated_gemm(device: str) -> None:
    with only(1, gemm_gated):
        x, weight, _ = _product(device, 200, 136, 392, "silu", False)
        _check(gemm_gated.gated_gemm(x, weight, "silu"), x, weight, None, "silu")


def run_prompt_attention(device: str) -> None:
    """Rows of one and of two tiles of keys, the last page full or not."""
    args, options = paged_attention.paged_attention.inputs(
        torch.Generator().manual_seed(5), torch.bfloat16, device, rows=((40, 168), (65, 128)), heads=8, kv_heads=2,
        head_dim=64, block_size=16, window=None, softcap=None,
    )
    with only(2, kernel_prefill_hopper):
        out = attention_launch.paged_attention_triton(*args, **options)
    assert not out.cpu().isnan().any()                   # hidden slots hold NaN


CASES: dict[str, Callable[[str], None]] = {
    "gemv": run_gemv, "small_gemm": run_small_gemm, "invariant_gemm": run_invariant_gemm, "ring_gemv": run_ring_gemv,
    "ring_gemm": run_ring_gemm, "wide_gemm": run_wide_gemm, "gated_gemm": run_gated_gemm,
    "prompt_attention": run_prompt_attention,
}


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A checker that finds nothing may have seen nothing: it has to find these.


@triton_kernel()
def _read_beyond_kernel(x_ptr, out_ptr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, tl.load(x_ptr + 100))


@gluon_kernel()
def _put(memory, number: gl.constexpr):  # type: ignore[no-untyped-def]
    # Four numbers of a thread, which are stored plainly: where warps stored matrices, racecheck has found nothing.
    memory.store(gl.full([512], number, gl.int32, gl.BlockedLayout([4], [32], [4], [0])))


@gluon_kernel()
def _both_write_kernel(out_ptr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    memory = gl.allocate_shared_memory(gl.int32, [512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(_put, (memory, 1)), (_put, (memory, 2))], [4], [24])
    gl.store(out_ptr + gl.arange(0, 512, layout), memory.load(layout))


def run_beyond(device: str) -> None:
    """Reads the number after a tensor's last one."""
    _read_beyond_kernel[(1,)](torch.ones(100, device=device), torch.empty(1, device=device))


def run_race(device: str) -> None:
    """Two groups of warps write to the same shared memory, and neither waits."""
    _both_write_kernel[(1,)](torch.empty(512, dtype=torch.int32, device=device), num_warps=4)


FAULTS: dict[str, Callable[[str], None]] = {"memcheck": run_beyond, "racecheck": run_race}

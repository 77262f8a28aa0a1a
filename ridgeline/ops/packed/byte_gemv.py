"""GEMV for one row with packed 8-bit codes (byte_weight.py), fused with the norm before it and the gate behind it.

As packed_gemv.py, whose parts it uses. A lane requests the next codes as soon as those of 64 inputs are multiplied, AHEAD times
64 inputs ahead: a second set of registers, as for four bits, would not fit. Codes are multiplied as they are (byte_asm.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import gl, group_barrier, viewed, wait_for_kernel_before
from ridgeline.ops.launch import dependent_launch, multiprocessors
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed import packed_gemv
from ridgeline.ops.packed.byte_asm import byte_product_registers, byte_products, tile_scales
from ridgeline.ops.packed.packed_asm import restored, sum_span
from ridgeline.ops.packed.packed_gemv import NAMES
from ridgeline.ops.packed.packed_sizes import RUN
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.packed.select_packed import PackedGemvPlan
from ridgeline.ops.registry import gluon_kernel, triton

AHEAD = 4
_finish = packed_gemv._finish
_load_line = packed_gemv._load_line
_place_rows = packed_gemv._place_rows
_plain_shared = packed_gemv._plain_shared
_word_layout = packed_gemv._word_layout
_x_operand = packed_gemv._x_operand
_x_sums = packed_gemv._x_sums
sum_shape = packed_gemv.sum_shape
summed = packed_gemv.summed


@gluon_kernel()
def _place(unit, strips, layout: gl.constexpr, RUNS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(run of a CTA's unit, counted from the first strip; which runs of the warps follow it; whether they are there; lanes)"""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None][:, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, :][:, None, :]
    strip = (gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)) * GROUPS
    before = unit % ROUNDS * WARPS
    there = (before + warp < RUNS) & (group + lane >= 0)
    if GROUPS > 1:
        group = gl.minimum(group, strips - 1 - strip)
    run = warp
    if RUNS % WARPS != 0:
        run = gl.minimum(warp, RUNS - 1 - before)
    return strip.to(gl.int64) * RUNS + before, group * RUNS + run, there, lane


@gluon_kernel()
def _load_tile(  # type: ignore[no-untyped-def]
    code_ptr, high_ptr, unit, strips, layout: gl.constexpr, TILE: gl.constexpr, RUNS: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Request 64 inputs of each warp: codes of outputs r and of r + 8. What is not there has scales of zero and some codes that
    are."""
    start, run, _there, lane = _place(unit, strips, layout, RUNS, GROUPS, WARPS)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, :][:, None, :][:, :, None, :]
    at = (run * 1024 + TILE * 128 + lane * 4)[:, :, :, None] + word
    return (
        gl.load(code_ptr + start * 1024 + at, eviction_policy="evict_first"),
        gl.load(high_ptr + start * 1024 + at, eviction_policy="evict_first"),
    )


@gluon_kernel()
def _load_scales(  # type: ignore[no-untyped-def]
    scale_ptr, unit, strips, layout: gl.constexpr, RUNS: gl.constexpr, EACH: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Request the words of scales of 512 inputs of each warp."""
    start, run, there, lane = _place(unit, strips, layout, RUNS, GROUPS, WARPS)
    lines = start * (EACH * 32) + (run * (EACH * 32) + lane)
    loaded = ()
    for part in gl.static_range(EACH):
        loaded = loaded + (_load_line(scale_ptr + lines + part * 32, there, RUNS % WARPS != 0),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _multiply_tile(  # type: ignore[no-untyped-def]
    sums, low, high, scales, x_words, x_sums, first, layout: gl.constexpr, TILE: gl.constexpr, GROUP: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """64 inputs of each warp. TILE: which of 512."""
    text: gl.constexpr = byte_products(GROUP, DTYPE, SCALE_DTYPE, TILE)
    constraints: gl.constexpr = byte_product_registers(GROUP)
    WORDS: gl.constexpr = tile_scales(GROUP)
    AT: gl.constexpr = TILE % 2 * WORDS if GROUP < 128 else 0
    operands = (sums, low, high)
    for number in gl.static_range(2):
        operands = operands + (_x_operand(x_words, first + TILE * 2 + number, layout, GROUPS, WARPS),)  # type: ignore[assignment]
    for number in gl.static_range(WORDS):
        operands = operands + (scales[AT + number][:, :, :, None].broadcast_to([GROUPS, WARPS, 32, 4]),)  # type: ignore[assignment]
    operands = operands + x_sums
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon_kernel(do_not_specialize=["outputs", "strips"])
def _byte_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, high_ptr, scale_ptr, outer_ptr, bias_ptr, out_ptr, new_residual_ptr,
    inputs, outputs, strips, eps, norm_offset,
    RUNS: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr, AHEAD: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """GROUPS strips at a time are assigned to the CTAs round-robin; WARPS warps have one of them. RUNS: how often the inputs
    have 512. AHEAD: times 64 inputs whose codes are in flight or in registers."""
    layout: gl.constexpr = _word_layout(GROUPS, WARPS)
    EACH: gl.constexpr = 128 // GROUP
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    program = gl.program_id(0)
    blocks = (strips + GROUPS - 1) // GROUPS
    units = (blocks - program + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    codes = ()
    for tile in gl.static_range(AHEAD):
        codes = codes + _load_tile(code_ptr, high_ptr, 0, strips, layout, tile, RUNS, GROUPS, WARPS)
    following = _load_scales(scale_ptr, 0, strips, layout, RUNS, EACH, GROUPS, WARPS)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 8, 2, WARPS, 4, 2, 2, 2], _plain_shared(7))
    SPAN: gl.constexpr = sum_span("int8", GROUP)
    x_total = gl.allocate_shared_memory(gl.float32, sum_shape(ROUNDS, WARPS, SPAN), _plain_shared(4))
    wait_for_kernel_before(DEPENDENT)
    factor = _place_rows(
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, x_total, inputs, eps, norm_offset, ROUNDS, "int8", "", GROUP,
        DTYPE, NORM, RESIDUAL, GROUPS, WARPS,
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 16, 1, WARPS, 1, 4, 4], _plain_shared(5))
    totals = summed(x_total, ROUNDS, WARPS, SPAN)
    parts = gl.allocate_shared_memory(gl.float32, [2, GROUPS, WARPS, 32, 2], _plain_shared(5))
    for begin in range(0, units, ROUNDS):
        sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)
        for unit in range(begin, begin + ROUNDS):
            scales, at = following, (unit - begin) * 16
            if unit + 1 < units:
                following = _load_scales(scale_ptr, unit + 1, strips, layout, RUNS, EACH, GROUPS, WARPS)
            for tile in gl.static_range(8):
                if tile % 2 == 0:
                    x_sums = _x_sums(totals, at // 4 + tile // 2, layout, SPAN, GROUPS, WARPS)
                low, high = codes[0], codes[1]  # type: ignore[misc]
                sums = _multiply_tile(
                    sums, low, high, scales, x_words, x_sums, at, layout, tile, GROUP, DTYPE, SCALE_DTYPE, GROUPS, WARPS
                )
                if tile + AHEAD < 8:
                    low, high = _load_tile(code_ptr, high_ptr, unit, strips, layout, tile + AHEAD, RUNS, GROUPS, WARPS)
                elif unit + 1 < units:
                    low, high = _load_tile(code_ptr, high_ptr, unit + 1, strips, layout, tile + AHEAD - 8, RUNS, GROUPS, WARPS)
                codes = codes[2:] + (low, high)  # type: ignore[assignment]
        strip = (program + begin // ROUNDS * gl.num_programs(0)) * GROUPS
        whole = factor * restored("int8", DTYPE, False)
        _finish(sums, parts, whole, whole, outer_ptr, bias_ptr, out_ptr, strip, strips, outputs, GATE, BIAS, OUTER, GROUPS, WARPS)


def byte_gemv(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, plan: PackedGemvPlan, *, norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None, ahead: int = AHEAD,
) -> tuple[Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], and x + residual (x itself without one). A weight whose gates and partners alternate
    needs a gate."""
    outputs = weight.outputs if gate is None else weight.outputs // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(x)
    strips = weight.codes.shape[0]
    programs = min(triton.cdiv(strips, plan.groups), plan.programs * multiprocessors(x.device))
    _byte_gemv_kernel[(programs,)](
        x, x if residual is None else residual, x if norm is None else norm, weight.codes, weight.high, weight.scale,
        weight.scale if weight.outer is None else weight.outer, x if bias is None else bias, out, new_residual, x.shape[1],
        outputs, strips, eps, norm_offset,
        RUNS=weight.codes.shape[1] * 64 // RUN, GROUP=weight.group, DTYPE=NAMES[x.dtype],
        SCALE_DTYPE=NAMES[weight.scale_dtype], NORM=norm is not None, RESIDUAL=residual is not None, GATE=GATES[gate],
        BIAS=bias is not None, OUTER=weight.outer is not None, GROUPS=plan.groups, WARPS=plan.warps,
        AHEAD=ahead, num_warps=plan.groups * plan.warps, maxnreg=plan.registers(), **dependent_launch(x.device),
    )
    return out, new_residual

"""GEMV for one row with 8-bit codes as they are stored, [outputs, inputs]: int8 or e4m3, fused with the norm before it and the
gate behind it.

As in ops/packed/packed_gemv.py the warps of a CTA share the inputs of a strip of 16 outputs, and mma.sync multiplies with the
weight as its left operand. A product may take its inputs in any order, if weight and x agree: a lane loads 16 bytes of
neighbouring codes of output r (and of r + 8), and each instruction takes four of them, so that no packed copy is needed. x stays
in 16 bits. Scales multiply float32 sums: of each output at the end (`row`), or of 128 inputs (`block`). On Hopper most formats
are packed anew (ops/packed) or meet x in 8 bits (ops/linear/fp8_linear.py). Left to this kernel are matrices that are too small
for the kernels of these, e4m3 that was stored with 2:4 sparsity, and scales that 16 bits do not hold or that several outputs
share.

Not faster than quantising the row and gemm_ring.py, which formats that mean x in 8 bits keep: q, k and v of an 8B model took 9.6
us with the norm (ring and norm 9.1), and a step with fp8 blocks 3.1 ms. Written in Gluon, which the interpreter does not support;
there, and on other devices than Hopper, other kernels run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.hopper import device_facts, gl, group_barrier, viewed, wait_for_kernel_before
from ridgeline.ops.kernel_table import CODES_RUN, choose
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed import packed_gemv
from ridgeline.ops.packed.packed_gemv import NAMES
from ridgeline.ops.packed.select_packed import PackedGemvPlan
from ridgeline.ops.quantised.codes_asm import byte_products, byte_registers
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.ops.registry import gluon_kernel

_finish = packed_gemv._finish
_plain_shared = packed_gemv._plain_shared
_word_layout = packed_gemv._word_layout
_x_operand = packed_gemv._x_operand
norm_factor = packed_gemv.norm_factor

# ── the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel()
def _load_unit(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, unit, strips, outputs, scale_stride, layout: gl.constexpr, RUNS: gl.constexpr, SCALES: gl.constexpr,
    BLOCK: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """Request 256 inputs for each warp: tensors of codes, of outputs r and r + 8 by turns, then of their scales. What is not
    there is read from where something is: x is zero beyond the inputs, and results beyond the outputs are not written."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None][:, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, :][:, None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, :][:, None, :][:, :, None, :]
    strip = (gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)) * GROUPS + group
    run = gl.minimum(unit % ROUNDS * WARPS + warp, RUNS - 1)
    STRIP: gl.constexpr = 8 if GATED else 16
    low = gl.minimum(strip * STRIP + lane // 4, outputs - 1) + run * 0   # [GROUPS, WARPS, 32]
    if GATED:
        high = low + outputs
    else:
        high = gl.minimum(strip * STRIP + lane // 4 + 8, outputs - 1) + run * 0
    line = run + lane * 0
    column = (line * 64 + lane % 4 * 4)[:, :, :, None] + word
    loaded = ()
    for tile in gl.static_range(4):
        for output in gl.static_range(2):
            row = low if output == 0 else high
            source = code_ptr + (row.to(gl.int64) * (RUNS * 64))[:, :, :, None] + (column + tile * 16)
            loaded = loaded + (gl.load(source, eviction_policy="evict_first"),)  # type: ignore[assignment]
    if SCALES == "block":
        for part in gl.static_range(2):
            for output in gl.static_range(2):
                row = low if output == 0 else high
                loaded = loaded + (gl.load(scale_ptr + (row // BLOCK * scale_stride + (line * 2 + part))),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _alike(words, GROUPS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    return words[:, :, :, None].broadcast_to([GROUPS, WARPS, 32, 4])


@gluon_kernel()
def _multiply_bytes(  # type: ignore[no-untyped-def]
    sums, loaded, x_words, first, layout: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr,
    GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """256 inputs of each warp, 64 at a time."""
    TEXT: gl.constexpr = byte_products(KIND, DTYPE, SCALES)
    REGISTERS: gl.constexpr = byte_registers(SCALES)
    for tile in gl.static_range(4):
        operands = (sums, loaded[2 * tile], loaded[2 * tile + 1])
        for part in gl.static_range(2):
            operands = operands + (_x_operand(x_words, first + tile * 2 + part, layout, GROUPS, WARPS),)  # type: ignore[assignment]
        if SCALES == "block":
            for output in gl.static_range(2):
                operands = operands + (_alike(loaded[8 + tile // 2 * 2 + output], GROUPS, WARPS),)  # type: ignore[assignment]
        sums = gl.inline_asm_elementwise(TEXT, REGISTERS, operands, dtype=gl.float32, is_pure=False, pack=4)
    return sums


@gluon_kernel()
def _place_row(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, inputs, eps, norm_offset, ROUNDS: gl.constexpr, DTYPE: gl.constexpr,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """x into shared memory, 16 bytes of a lane after the other: [tile, part of its inputs, warp, lane of four, 8]. Returns the
    norm's factor, which multiplies the sums; float16 x are multiplied by it first, as in packed_gemv.py."""
    CHUNK: gl.constexpr = 256 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [GROUPS * WARPS], [0])
    FIRST: gl.constexpr = NORM and DTYPE == "f16"
    before = 1.0
    if FIRST:
        before = norm_factor(x_ptr, residual_ptr, inputs, eps, layout, CHUNK, ROUNDS, RESIDUAL)
    squares = gl.zeros([CHUNK], gl.float32, layout)
    for part in gl.static_range(ROUNDS):
        column = part * CHUNK + gl.arange(0, CHUNK, layout)
        filled = column < inputs
        x = gl.load(x_ptr + column, mask=filled, other=0.0)
        if NORM:
            x = x.to(gl.float32)
            if RESIDUAL:
                x += gl.load(residual_ptr + column, mask=filled, other=0.0).to(gl.float32)
                # Rounded to the tensor's dtype: the norm is that of the residual which later layers will read.
                rounded = x.to(new_residual_ptr.dtype.element_ty)
                gl.store(new_residual_ptr + column, rounded, mask=filled & (gl.program_id(0) == 0))
                x = rounded.to(gl.float32)
            squares += x * x
            x *= gl.load(norm_ptr + column, mask=filled, other=0.0).to(gl.float32) + norm_offset
            if FIRST:
                x *= before
        x = x.to(x_ptr.dtype.element_ty)
        memory.index(part).store(x.reshape([WARPS, 4, 4, 2, 8]).permute([1, 3, 0, 2, 4]))
    factor = 1.0
    if NORM and not FIRST:
        factor = gl.rsqrt(gl.sum(squares, axis=0) / inputs + eps)
    return factor


@gluon_kernel(do_not_specialize=["outputs", "strips"])
def _codes_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, outer_ptr, bias_ptr, out_ptr, new_residual_ptr, inputs, outputs, strips,
    scale_stride, eps, norm_offset,
    RUNS: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr, BLOCK: gl.constexpr,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    GROUPS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """GROUPS strips at a time are assigned to the CTAs round-robin; WARPS warps have one of them. RUNS: how often the inputs
    have 256. With a gate, a strip is eight gates and their partners, weight rows `outputs` further on."""
    layout: gl.constexpr = _word_layout(GROUPS, WARPS)
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    program = gl.program_id(0)
    blocks = (strips + GROUPS - 1) // GROUPS
    units = (blocks - program + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    following = _load_unit(
        code_ptr, scale_ptr, 0, strips, outputs, scale_stride, layout, RUNS, SCALES, BLOCK, GATE != 0, GROUPS, WARPS
    )
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 4, 2, WARPS, 4, 8], _plain_shared(5))
    wait_for_kernel_before(DEPENDENT)
    factor = _place_row(
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, inputs, eps, norm_offset, ROUNDS, DTYPE, NORM, RESIDUAL, GROUPS,
        WARPS,
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 8, 1, WARPS, 1, 4, 4], _plain_shared(5))
    parts = gl.allocate_shared_memory(gl.float32, [2, GROUPS, WARPS, 32, 2], _plain_shared(5))
    for begin in range(0, units, ROUNDS):
        sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)
        for unit in range(begin, begin + ROUNDS):
            loaded = following
            if unit + 1 < units:
                following = _load_unit(
                    code_ptr, scale_ptr, unit + 1, strips, outputs, scale_stride, layout, RUNS, SCALES, BLOCK, GATE != 0, GROUPS,
                    WARPS,
                )
            sums = _multiply_bytes(
                sums, loaded, x_words, (unit - begin) * 8, layout, KIND, DTYPE, SCALES, GROUPS, WARPS
            )
        strip = (program + begin // ROUNDS * gl.num_programs(0)) * GROUPS
        _finish(
            sums, parts, factor, factor, outer_ptr, bias_ptr, out_ptr, strip, strips, outputs, GATE, BIAS, SCALES == "row",
            GROUPS, WARPS,
        )


# ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _scales(weight: QuantisedWeight) -> str | None:
    """How the kernel finds this weight's scales; None: it does not know them."""
    if weight.e8m0 or any(each is not None for each in (weight.order, weight.zero, weight.offset, weight.outer)):
        return None
    if weight.grid not in ("int8", "e4m3"):
        return None
    if weight.scale.dtype != torch.float32:
        return None
    return "row" if weight.block == (1, 0) else "block" if weight.block[1] == 128 else None


def codes_gemv_for(x: Tensor, weight: QuantisedWeight, gated: bool) -> PackedGemvPlan | None:
    """The plan where this kernel multiplies."""
    if len(x) != 1 or x.stride(1) != 1 or x.data_ptr() % 16:
        return None
    if x.dtype != torch.bfloat16 and not (x.dtype == torch.float16 and weight.grid != "e4m3"):
        return None
    scales = _scales(weight)
    if scales is None or weight.weight.data_ptr() % 16 or not weight.weight.is_contiguous():
        return None
    outputs = len(weight.weight) // 2 if gated else len(weight.weight)
    kernel, plan, _ = choose("codes", 1, outputs, weight.inputs, gated, device_facts(x.device))
    return plan if kernel == "codes_gemv" else None


def codes_gemv(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, plan: PackedGemvPlan, *, norm: Tensor | None = None,
    eps: float = 0.0, norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], and x + residual (x itself without one)."""
    scales: Any = _scales(weight)
    stored = len(weight.weight)
    outputs = stored if gate is None else stored // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(x)
    strips = cdiv(outputs, 16 if gate is None else 8)
    programs = min(cdiv(strips, plan.groups), plan.programs * multiprocessors(x.device))
    _codes_gemv_kernel[(programs,)](
        x, x if residual is None else residual, x if norm is None else norm, weight.weight.view(torch.int32), weight.scale,
        weight.scale, x if bias is None else bias, out, new_residual, x.shape[1], outputs, strips,
        weight.scale.stride(0) if scales == "block" else 0, eps, norm_offset,
        RUNS=x.shape[1] // CODES_RUN, KIND=weight.grid, DTYPE=NAMES[x.dtype], SCALES=scales, BLOCK=weight.block[0],
        NORM=norm is not None, RESIDUAL=residual is not None, GATE=GATES[gate], BIAS=bias is not None,
        GROUPS=plan.groups, WARPS=plan.warps, num_warps=plan.groups * plan.warps, maxnreg=plan.registers(),
        **dependent_launch(x.device),
    )
    return out, new_residual

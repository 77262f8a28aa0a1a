"""GEMV for one row with 8-bit codes as they are stored, [outputs, inputs]: int8 or e4m3, fused with the norm before it and the
gate behind it.

As in ops/packed/packed_gemv.py the warps of a CTA share the inputs of a strip of 16 outputs, and mma.sync multiplies with the
weight as its left operand. A product may take its inputs in any order, if weight and x agree: lane 4 r + t loads 16 neighbouring
codes of output r (and of r + 8), and four instructions take four of them each, so that no packed copy is needed. x stays in 16
bits. Scales multiply float32 sums: of each output at the end (`row`), or of 128 inputs (`block`), or of groups of 32 (`group`),
where the product of 64 inputs is made twice, each time with half of x masked out.

Not faster than quantising the row and gemm_ring.py, which formats that mean x in 8 bits keep: q, k and v of an 8B model took 9.6
us with the norm (ring and norm 9.1), and a step with fp8 blocks 3.1 ms. Written in Gluon, which the interpreter does not support;
there, and on other devices than Hopper, other kernels run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.hopper import compile_time, device_facts, gl, group_barrier, viewed, wait_for_kernel_before
from ridgeline.ops.kernel_table import CODES_RUN, choose
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed import packed_gemv
from ridgeline.ops.packed.packed_gemv import NAMES
from ridgeline.ops.packed.select_packed import PackedGemvPlan
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.ops.registry import gluon_kernel

_finish = packed_gemv._finish
_plain_shared = packed_gemv._plain_shared
_word_layout = packed_gemv._word_layout
_x_operand = packed_gemv._x_operand

# ── the instructions ─────────────────────────────────────────────────────────────────────────────────────────────────


@compile_time
def _pair(word: str, out: str, upper: bool, kind: str, dtype: str) -> list[str]:
    """Two neighbouring codes of a word as 16-bit numbers. int8: 128 + its low seven bits less 128 + its sign bit, both put
    together by bits (1024 in fp16). e4m3: a bf16 number whose exponent is 120 too small."""
    if kind == "int8":
        base = 0x43004300 if dtype == "bf16" else 0x64006400
        return [
            f"prmt.b32 t0, {word}, 0, {'0x4342' if upper else '0x4140'};",
            f"lop3.b32 t1, t0, 0x007f007f, {base}, 0xea;", f"lop3.b32 t2, t0, 0x00800080, {base}, 0xea;",
            f"sub.{dtype}x2 {out}, t1, t2;",
        ]
    return [
        f"prmt.b32 t0, {word}, 0, {'0x3424' if upper else '0x1404'};", "shr.u32 t1, t0, 4;", "and.b32 t1, t1, 0x07f007f0;",
        "lop3.b32 t1, t0, 0x80008000, t1, 0xea;", f"mul.bf16x2 {out}, t1, scale;",
    ]


@compile_time
def products(kind: str, dtype: str, scales: str, scale_dtype: str) -> str:
    """16 outputs x 64 inputs of one warp, added to `sums`.

    Operands, four registers each: out sums; in sums, codes of outputs r, codes of outputs r + 8, x of the first and of the last
    eight of a lane's 16 inputs, then the scales of outputs r and of outputs r + 8: none for `row`, a number for `block`, for
    `group` the word of two 16-bit numbers, of the first and of the last 32 inputs.
    """
    halves = 2 if scales == "group" else 1
    lines = [
        ".reg .b32 t<3>; .reg .b32 scale; .reg .b32 a<4>; .reg .b32 b<2>; .reg .b32 lane; .reg .pred low; .reg .b16 h<2>;",
        ".reg .f32 d<4>; .reg .f32 e<4>; .reg .f32 y<4>; mov.b32 scale, 0x7b807b80;",
    ]
    if halves == 2:
        lines += ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 2;", "setp.eq.u32 low, lane, 0;"]
    for step in range(4):
        for number in range(4):                          # outputs r, r + 8; then the upper two codes of both
            lines += _pair(f"${8 + 4 * (number % 2) + step}", f"a{number}", number >= 2, kind, dtype)
        right = (f"${16 + 2 * step}", f"${17 + 2 * step}")
        for half, sums in enumerate("de"[:halves]):
            taken = right
            if halves == 2:                              # lanes 0 and 1 of four have the first 32 inputs
                one, other = (right, ("0", "0")) if half == 0 else (("0", "0"), right)
                lines += [f"selp.b32 b{number}, {one[number]}, {other[number]}, low;" for number in (0, 1)]
                taken = ("b0", "b1")
            names, zeros = ", ".join(f"{sums}{number}" for number in range(4)), "{0f00000000, 0f00000000, 0f00000000, 0f00000000}"
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
                f"{{{names}}}, {{a0, a1, a2, a3}}, {{{taken[0]}, {taken[1]}}}, {zeros if step == 0 else f'{{{names}}}'};"
            )
    lines += _scaled(scales, scale_dtype)
    return "{ " + " ".join(lines) + " }"


@compile_time
def _scaled(scales: str, scale_dtype: str) -> list[str]:
    """The sums of 64 inputs times their scales, added to what was there."""
    sums = [f"${4 + number}" for number in range(4)]
    lines = []
    if scales == "row":
        lines += [f"add.f32 d{number}, d{number}, {sums[number]};" for number in range(4)]
    elif scales == "block":
        lines += [f"fma.rn.f32 d{number}, d{number}, ${24 + 4 * (number // 2)}, {sums[number]};" for number in range(4)]
    else:
        for half in range(2):                            # outputs r, r + 8
            word, low, high = f"${24 + 4 * half}", f"y{2 * half}", f"y{2 * half + 1}"
            if scale_dtype == "bf16":
                lines += [f"shl.b32 t0, {word}, 16;", f"mov.b32 {low}, t0;"]
                lines += [f"and.b32 t0, {word}, 0xffff0000;", f"mov.b32 {high}, t0;"]
            else:
                lines += [f"mov.b32 {{h0, h1}}, {word};", f"cvt.f32.f16 {low}, h0;", f"cvt.f32.f16 {high}, h1;"]
        for number in range(4):
            first, last = f"y{number // 2 * 2}", f"y{number // 2 * 2 + 1}"
            lines += [f"fma.rn.f32 d{number}, d{number}, {first}, {sums[number]};"]
            lines += [f"fma.rn.f32 d{number}, e{number}, {last}, d{number};"]
    return lines + [f"mov.f32 ${number}, d{number};" for number in range(4)]      # all operands are read by now


@compile_time
def product_registers(scales: str) -> str:
    """The constraints of `products`."""
    words = {"row": [], "block": ["f"] * 8, "group": ["r"] * 8}[scales]
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 16 + words)


# ── the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel()
def _load_unit(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, unit, strips, outputs, scale_stride, layout: gl.constexpr, RUNS: gl.constexpr, SCALES: gl.constexpr,
    BLOCK: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """Request 256 inputs for each warp: eight tensors of codes, of outputs r and r + 8 by turns, and of their scales. What is not
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
    low = gl.minimum(strip * STRIP + lane // 4, outputs - 1)             # [GROUPS, 1, 32]
    if GATED:
        high = low + outputs
    else:
        high = gl.minimum(strip * STRIP + lane // 4 + 8, outputs - 1)
    column = (run * 64 + lane % 4 * 4)[:, :, :, None] + word             # words of four codes
    loaded = ()
    for tile in gl.static_range(4):
        for output in gl.static_range(2):
            row = low if output == 0 else high
            source = code_ptr + ((row + run * 0).to(gl.int64) * (RUNS * 64))[:, :, :, None] + (column + tile * 16)
            loaded = loaded + (gl.load(source, eviction_policy="evict_first"),)  # type: ignore[assignment]
    if SCALES == "block":
        for part in gl.static_range(2):
            for output in gl.static_range(2):
                row = low if output == 0 else high
                at = (row + run * 0) // BLOCK * scale_stride + (run * 2 + part)
                loaded = loaded + (gl.load(scale_ptr + at),)  # type: ignore[assignment]
    if SCALES == "group":
        for part in gl.static_range(4):
            for output in gl.static_range(2):
                row = low if output == 0 else high
                at = (row + run * 0) * (RUNS * 4) + (run * 4 + part)     # words of two scales
                loaded = loaded + (gl.load(scale_ptr + at),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _multiply_tile(  # type: ignore[no-untyped-def]
    sums, loaded, x_words, first, layout: gl.constexpr, TILE: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr,
    SCALES: gl.constexpr, SCALE_DTYPE: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """64 inputs of each warp."""
    text: gl.constexpr = products(KIND, DTYPE, SCALES, SCALE_DTYPE)
    constraints: gl.constexpr = product_registers(SCALES)
    operands = (sums, loaded[2 * TILE], loaded[2 * TILE + 1])
    for part in gl.static_range(2):
        operands = operands + (_x_operand(x_words, first + part, layout, GROUPS, WARPS),)  # type: ignore[assignment]
    if SCALES != "row":
        AT: gl.constexpr = 8 + (TILE // 2 * 2 if SCALES == "block" else TILE * 2)
        for output in gl.static_range(2):
            words = loaded[AT + output][:, :, :, None].broadcast_to([GROUPS, WARPS, 32, 4])
            operands = operands + (words,)  # type: ignore[assignment]
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon_kernel()
def _place_row(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, inputs, eps, norm_offset,
    ROUNDS: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """x into shared memory: [tile, half of 16 inputs, warp, lane of four, 8]; returns the norm's factor, which multiplies the
    sums."""
    CHUNK: gl.constexpr = 256 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [GROUPS * WARPS], [0])
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
        x = x.to(x_ptr.dtype.element_ty).reshape([WARPS, 4, 4, 2, 8]).permute([1, 3, 0, 2, 4])
        memory.index(part).store(x)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(squares, axis=0) / inputs + eps)
    return factor


@gluon_kernel(do_not_specialize=["outputs", "strips"])
def _codes_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, outer_ptr, bias_ptr, out_ptr, new_residual_ptr,
    inputs, outputs, strips, scale_stride, eps, norm_offset,
    RUNS: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    BLOCK: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
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
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, inputs, eps, norm_offset, ROUNDS, NORM, RESIDUAL, GROUPS, WARPS
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
            for tile in gl.static_range(4):
                sums = _multiply_tile(
                    sums, loaded, x_words, (unit - begin) * 8 + tile * 2, layout, tile, KIND, DTYPE, SCALES, SCALE_DTYPE, GROUPS,
                    WARPS,
                )
        strip = (program + begin // ROUNDS * gl.num_programs(0)) * GROUPS
        _finish(
            sums, parts, factor, outer_ptr, bias_ptr, out_ptr, strip, strips, outputs, GATE, BIAS, SCALES == "row", GROUPS, WARPS
        )


# ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _scales(weight: QuantisedWeight) -> str | None:
    """How the kernel finds this weight's scales; None: it does not know them."""
    known = weight.grid in ("int8", "e4m3") and not weight.e8m0 and weight.order is None
    if not known or any(each is not None for each in (weight.zero, weight.offset, weight.outer)):
        return None
    if weight.block == (1, 0):
        return "row" if weight.scale.dtype == torch.float32 else None
    if weight.block[1] == 128:
        return "block" if weight.scale.dtype == torch.float32 else None
    return "group" if weight.block == (1, 32) and weight.scale.dtype in NAMES else None


def codes_gemv_for(x: Tensor, weight: QuantisedWeight, gated: bool) -> PackedGemvPlan | None:
    """The plan where this kernel multiplies."""
    if len(x) != 1 or x.stride(1) != 1 or x.data_ptr() % 16 or weight.weight.data_ptr() % 16 or not weight.weight.is_contiguous():
        return None
    if x.dtype != torch.bfloat16 and not (x.dtype == torch.float16 and weight.grid == "int8"):
        return None
    if _scales(weight) is None:
        return None
    outputs = len(weight.weight) // 2 if gated else len(weight.weight)
    kernel, plan, _ = choose("8-bit", 1, outputs, weight.inputs, gated, device_facts(x.device))
    return plan if kernel == "codes_gemv" else None


def fitted(plan: PackedGemvPlan, scales: str) -> PackedGemvPlan:
    """Scales of groups of 32 take more registers than two CTAs of an SM have."""
    return replace(plan, programs=1) if scales == "group" else plan


def codes_gemv(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, plan: PackedGemvPlan, *, norm: Tensor | None = None,
    eps: float = 0.0, norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], and x + residual (x itself without one)."""
    codes, scale = weight.weight.view(torch.int32), weight.scale
    scales: Any = _scales(weight)
    plan = fitted(plan, scales)
    outputs = len(codes) if gate is None else len(codes) // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(x)
    strips = cdiv(outputs, 16 if gate is None else 8)
    programs = min(cdiv(strips, plan.groups), plan.programs * multiprocessors(x.device))
    _codes_gemv_kernel[(programs,)](
        x, x if residual is None else residual, x if norm is None else norm, codes,
        scale.view(torch.int32) if scales == "group" else scale, scale, x if bias is None else bias, out, new_residual,
        x.shape[1], outputs, strips, scale.stride(0) if scales == "block" else 0, eps, norm_offset,
        RUNS=x.shape[1] // CODES_RUN, KIND=weight.grid, DTYPE=NAMES[x.dtype], SCALES=scales,
        SCALE_DTYPE=NAMES.get(scale.dtype, "f32"), BLOCK=weight.block[0], NORM=norm is not None, RESIDUAL=residual is not None,
        GATE=GATES[gate], BIAS=bias is not None, GROUPS=plan.groups, WARPS=plan.warps, num_warps=plan.groups * plan.warps,
        maxnreg=plan.registers(), **dependent_launch(x.device),
    )
    return out, new_residual

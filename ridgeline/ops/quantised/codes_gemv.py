"""GEMV for one row with codes as they are stored, [outputs, inputs], fused with the norm before it and the gate behind it: int8
and e4m3, and the GGUF formats with codes of 4 to 6 bits.

As in ops/packed/packed_gemv.py the warps of a CTA share the inputs of a strip of 16 outputs, and mma.sync multiplies with the
weight as its left operand. A product may take its inputs in any order, if weight and x agree: a lane loads 16 bytes of
neighbouring codes of output r (and of r + 8), and each instruction takes four of them, so that no packed copy is needed. x stays
in 16 bits. Scales multiply float32 sums: of each output at the end (`row`), of 128 inputs (`block`), or of groups of 16 or 32
(codes_asm.py).

Not faster than quantising the row and gemm_ring.py, which formats that mean x in 8 bits keep: q, k and v of an 8B model took 9.6
us with the norm (ring and norm 9.1), and a step with fp8 blocks 3.1 ms. Written in Gluon, which the interpreter does not support;
there, and on other devices than Hopper, other kernels run.
"""

from __future__ import annotations

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
from ridgeline.ops.quantised.codes_asm import (
    HIGH_WORDS,
    NIBBLE_SCALES,
    NIBBLES,
    byte_products,
    byte_registers,
    collected,
    group_scaled,
    nibble_products,
    nibble_registers,
    nibble_scaled,
    scaled_registers,
)
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.ops.registry import gluon_kernel

_finish = packed_gemv._finish
_plain_shared = packed_gemv._plain_shared
_word_layout = packed_gemv._word_layout
_x_operand = packed_gemv._x_operand

# ── the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


@compile_time
def _is_nibbles(kind):  # type: ignore[no-untyped-def]
    return kind in NIBBLES


@compile_time
def _counts(kind, scales):  # type: ignore[no-untyped-def]
    """(words of upper bits of an output's codes in a lane; words of its scales)"""
    if kind not in NIBBLES:
        return 0, int(scales == "group")
    return HIGH_WORDS[kind], sum(NIBBLE_SCALES[scales])


@compile_time
def _has_offsets(scales):  # type: ignore[no-untyped-def]
    return scales.endswith("offset")


@compile_time
def _has_outer(scales):  # type: ignore[no-untyped-def]
    return scales.startswith("super")


@compile_time
def _halves(scales):  # type: ignore[no-untyped-def]
    """Parts of a group of 32 inputs with a scale of their own."""
    return 2 if scales.startswith("super16") else 1


@compile_time
def _pair_layout(groups, warps):  # type: ignore[no-untyped-def]
    """Of [groups, warps, 8, 4, 2]: lanes as in `_x_layout`, two columns of the product each."""
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    inner = [[0, 1 << bit, 0, 0, 0] for bit in range(warps.bit_length() - 1)]
    outer = [[1 << bit, 0, 0, 0, 0] for bit in range(groups.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 0, 0, 1]], lanes, inner + outer, [], [groups, warps, 8, 4, 2])


@gluon_kernel()
def _load_pairs(pointers, low, high, row: gl.constexpr, column):  # type: ignore[no-untyped-def]
    """Words of outputs r and r + 8."""
    return (
        gl.load(pointers + (low.to(gl.int64) * row + column)).to(gl.int32),
        gl.load(pointers + (high.to(gl.int64) * row + column)).to(gl.int32),
    )


@gluon_kernel()
def _load_unit(  # type: ignore[no-untyped-def]
    code_ptr, high_ptr, scale_ptr, offset_ptr, super_ptr, super_offset_ptr, unit, strips, outputs, scale_stride,
    layout: gl.constexpr, RUNS: gl.constexpr, KIND: gl.constexpr, SCALES: gl.constexpr, BLOCK: gl.constexpr,
    GATED: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """Request 256 inputs for each warp: tensors of codes, of outputs r and r + 8 by turns, then of their upper bits, and of their
    scales. What is not there is read from where something is: x is zero beyond the inputs, and results beyond the outputs are
    not written."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    NIBBLE: gl.constexpr = _is_nibbles(KIND)
    TILES: gl.constexpr = 2 if NIBBLE else 4
    HIGH: gl.constexpr = _counts(KIND, SCALES)[0]
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
    column = (line * (16 * TILES) + lane % 4 * 4)[:, :, :, None] + word
    loaded = ()
    for tile in gl.static_range(TILES):
        for output in gl.static_range(2):
            row = low if output == 0 else high
            source = code_ptr + (row.to(gl.int64) * (RUNS * 16 * TILES))[:, :, :, None] + (column + tile * 16)
            loaded = loaded + (gl.load(source, eviction_policy="evict_first"),)  # type: ignore[assignment]
    if SCALES == "block":
        for part in gl.static_range(2):
            for output in gl.static_range(2):
                row = low if output == 0 else high
                loaded = loaded + (gl.load(scale_ptr + (row // BLOCK * scale_stride + (line * 2 + part))),)  # type: ignore[assignment]
    for part in gl.static_range(2 if NIBBLE else 0):
        for number in gl.static_range(HIGH):
            place = line * (8 * HIGH) + part * (4 * HIGH) + lane % 4 * HIGH + number
            loaded = loaded + _load_pairs(high_ptr, low, high, RUNS * 8 * HIGH, place)  # type: ignore[assignment]
    if NIBBLE or SCALES == "group":                      # a lane has two of the product's eight columns, one for each group
        at = line * 4 + lane % 4
        loaded = loaded + _load_pairs(scale_ptr, low, high, RUNS * 4, at)  # type: ignore[assignment]
        if _has_offsets(SCALES):
            loaded = loaded + _load_pairs(offset_ptr, low, high, RUNS * 4, at)  # type: ignore[assignment]
        if _has_outer(SCALES):
            loaded = loaded + _load_pairs(super_ptr, low, high, RUNS, line)  # type: ignore[assignment]
            if _has_offsets(SCALES):
                loaded = loaded + _load_pairs(super_offset_ptr, low, high, RUNS, line)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _alike(words, GROUPS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    return words[:, :, :, None].broadcast_to([GROUPS, WARPS, 32, 4])


@gluon_kernel()
def _added(text: gl.constexpr, constraints: gl.constexpr, operands):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon_kernel()
def _multiply_bytes(  # type: ignore[no-untyped-def]
    sums, loaded, x_words, lane, first, layout: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr,
    SCALE_DTYPE: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """256 inputs of each warp, 64 at a time."""
    chains = (sums, sums)
    for tile in gl.static_range(4):
        operands = (chains[0], loaded[2 * tile], loaded[2 * tile + 1])
        for part in gl.static_range(2):
            operands = operands + (_x_operand(x_words, first + tile * 2 + part, layout, GROUPS, WARPS),)  # type: ignore[assignment]
        if SCALES == "block":
            for output in gl.static_range(2):
                operands = operands + (_alike(loaded[8 + tile // 2 * 2 + output], GROUPS, WARPS),)  # type: ignore[assignment]
        if SCALES == "group":                            # a group of 32 is in two lanes of four
            mask = -(lane // 4 == tile * 2 + lane % 4 // 2).to(gl.int32)
            operands = operands + (_alike(mask, GROUPS, WARPS),)  # type: ignore[assignment]
        result = _added(byte_products(KIND, DTYPE, SCALES, tile < 2), byte_registers(SCALES), operands)
        chains = (chains[1] if SCALES == "group" else result, result)
    if SCALES == "group":
        scaled = (sums, chains[0], chains[1], _alike(loaded[8], GROUPS, WARPS), _alike(loaded[9], GROUPS, WARPS))
        sums = _added(group_scaled(SCALE_DTYPE), scaled_registers(1), scaled)
    else:
        sums = chains[0]
    return sums


@gluon_kernel()
def _multiply_nibbles(  # type: ignore[no-untyped-def]
    sums, loaded, x_words, x_sums, lane, first, layout: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr,
    SCALES: gl.constexpr, SCALE_DTYPE: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """256 inputs of each warp in two tiles. Both have a part of the product's columns and a chain of their own."""
    HIGH: gl.constexpr = _counts(KIND, SCALES)[0]
    WORDS: gl.constexpr = _counts(KIND, SCALES)[1]
    HALVES: gl.constexpr = _halves(SCALES)
    EACH: gl.constexpr = 4 // HALVES                     # words of codes with a scale of their own
    for half in gl.static_range(HALVES):
        chains = ()
        for tile in gl.static_range(2):
            mask = -(lane // 4 == tile * 4 + lane % 4).to(gl.int32)
            operands = (sums, loaded[2 * tile], loaded[2 * tile + 1], _alike(mask, GROUPS, WARPS))
            for number in gl.static_range(EACH):
                at = first + tile * 4 + half * EACH + number
                operands = operands + (_x_operand(x_words, at, layout, GROUPS, WARPS),)  # type: ignore[assignment]
            for number in gl.static_range(2 * HIGH):
                operands = operands + (_alike(loaded[4 + tile * 2 * HIGH + number], GROUPS, WARPS),)  # type: ignore[assignment]
            result = _added(nibble_products(KIND, DTYPE, half * EACH, EACH), nibble_registers(KIND, EACH), operands)
            chains = chains + (result,)  # type: ignore[assignment]
        pair = x_sums.index(first // 8 * HALVES + half).load(_pair_layout(GROUPS, WARPS))
        pair = pair.broadcast_to([GROUPS, WARPS, 8, 4, 2]).reshape([GROUPS, WARPS, 32, 1, 2])
        pair = pair.broadcast_to([GROUPS, WARPS, 32, 2, 2]).reshape([GROUPS, WARPS, 32, 4])
        operands = (sums, chains[0], chains[1], gl.convert_layout(pair, layout, assert_trivial=True))  # type: ignore[misc]
        for number in gl.static_range(2 * WORDS):
            operands = operands + (_alike(loaded[4 + 4 * HIGH + number], GROUPS, WARPS),)  # type: ignore[assignment]
        sums = _added(nibble_scaled(KIND, DTYPE, SCALES, SCALE_DTYPE, half), scaled_registers(WORDS, True), operands)
    return sums


@gluon_kernel()
def _place_row(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, x_sums, inputs, eps, norm_offset, ROUNDS: gl.constexpr,
    NIBBLE: gl.constexpr, HALVES: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """x into shared memory, 16 bytes of a lane after the other: [tile, part of its inputs, warp, lane of four, 8]. Words of 4-bit
    codes give inputs j and j + 4 in pairs; with them, the sums of the inputs of each group. Returns the norm's factor, which
    multiplies the sums."""
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
        x = x.to(x_ptr.dtype.element_ty)
        if NIBBLE:
            memory.index(part).store(x.reshape([WARPS, 2, 4, 4, 2, 4]).permute([1, 3, 0, 2, 5, 4]))
            each = gl.sum(x.to(gl.float32).reshape([WARPS, 8, HALVES, 32 // HALVES]), axis=3)
            x_sums.index(part).store(each.permute([2, 0, 1]))
        else:
            memory.index(part).store(x.reshape([WARPS, 4, 4, 2, 8]).permute([1, 3, 0, 2, 4]))
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(squares, axis=0) / inputs + eps)
    return factor


@compile_time
def _x_shape(nibbles, rounds, warps):  # type: ignore[no-untyped-def]
    return [rounds, 2, 4, warps, 4, 4, 2] if nibbles else [rounds, 4, 2, warps, 4, 8]


@gluon_kernel(do_not_specialize=["outputs", "strips"])
def _codes_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, high_ptr, scale_ptr, offset_ptr, super_ptr, super_offset_ptr, outer_ptr, bias_ptr,
    out_ptr, new_residual_ptr, inputs, outputs, strips, scale_stride, eps, norm_offset,
    RUNS: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    BLOCK: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    GROUPS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """GROUPS strips at a time are assigned to the CTAs round-robin; WARPS warps have one of them. RUNS: how often the inputs
    have 256. With a gate, a strip is eight gates and their partners, weight rows `outputs` further on."""
    layout: gl.constexpr = _word_layout(GROUPS, WARPS)
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    NIBBLE: gl.constexpr = _is_nibbles(KIND)
    program = gl.program_id(0)
    blocks = (strips + GROUPS - 1) // GROUPS
    units = (blocks - program + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    following = _load_unit(
        code_ptr, high_ptr, scale_ptr, offset_ptr, super_ptr, super_offset_ptr, 0, strips, outputs, scale_stride, layout, RUNS,
        KIND, SCALES, BLOCK, GATE != 0, GROUPS, WARPS,
    )
    SHAPE: gl.constexpr = _x_shape(NIBBLE, ROUNDS, WARPS)
    HALVES: gl.constexpr = _halves(SCALES)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, SHAPE, _plain_shared(6 if NIBBLE else 5))
    x_sums = memory
    if NIBBLE:
        x_sums = gl.allocate_shared_memory(gl.float32, [ROUNDS, HALVES, WARPS, 8], _plain_shared(3))
    wait_for_kernel_before(DEPENDENT)
    factor = _place_row(
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, x_sums, inputs, eps, norm_offset, ROUNDS, NIBBLE, HALVES, NORM,
        RESIDUAL, GROUPS, WARPS,
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 8, 1, WARPS, 1, 4, 4], _plain_shared(5))
    if NIBBLE:
        x_sums = viewed(x_sums, gl.float32, [ROUNDS * HALVES, 1, WARPS, 1, 4, 2], _plain_shared(5))
    parts = gl.allocate_shared_memory(gl.float32, [2, GROUPS, WARPS, 32, 2], _plain_shared(5))
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, :][:, None, :].broadcast_to([GROUPS, WARPS, 32])
    for begin in range(0, units, ROUNDS):
        sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)
        for unit in range(begin, begin + ROUNDS):
            loaded = following
            if unit + 1 < units:
                following = _load_unit(
                    code_ptr, high_ptr, scale_ptr, offset_ptr, super_ptr, super_offset_ptr, unit + 1, strips, outputs,
                    scale_stride, layout, RUNS, KIND, SCALES, BLOCK, GATE != 0, GROUPS, WARPS,
                )
            if NIBBLE:
                sums = _multiply_nibbles(
                    sums, loaded, x_words, x_sums, lane, (unit - begin) * 8, layout, KIND, DTYPE, SCALES, SCALE_DTYPE, GROUPS,
                    WARPS,
                )
            else:
                sums = _multiply_bytes(
                    sums, loaded, x_words, lane, (unit - begin) * 8, layout, KIND, DTYPE, SCALES, SCALE_DTYPE, GROUPS, WARPS
                )
        if NIBBLE or SCALES == "group":
            TEXT: gl.constexpr = collected()
            sums = gl.inline_asm_elementwise(TEXT, "=f,=f,=f,=f,f,f,f,f", (sums,), dtype=gl.float32, is_pure=False, pack=4)
        strip = (program + begin // ROUNDS * gl.num_programs(0)) * GROUPS
        _finish(
            sums, parts, factor, outer_ptr, bias_ptr, out_ptr, strip, strips, outputs, GATE, BIAS, SCALES == "row", GROUPS, WARPS
        )


# ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _scales(weight: QuantisedWeight) -> str | None:
    """How the kernel finds this weight's scales; None: it does not know them."""
    if weight.e8m0 or weight.order is not None or weight.zero is not None:
        return None
    if weight.grid in NIBBLES:
        return _nibble_scales(weight)
    if weight.grid not in ("int8", "e4m3") or weight.offset is not None or weight.outer is not None:
        return None
    if weight.block == (1, 0):
        return "row" if weight.scale.dtype == torch.float32 else None
    if weight.block[1] == 128:
        return "block" if weight.scale.dtype == torch.float32 else None
    return "group" if weight.block == (1, 32) and weight.scale.dtype in NAMES else None


def _nibble_scales(weight: QuantisedWeight) -> str | None:
    scale, offset, outer = weight.scale, weight.offset, weight.outer
    if outer is None:
        alike = offset is None or offset.dtype == scale.dtype
        known = weight.block == (1, 32) and scale.dtype in NAMES and alike
        return None if not known else "half" if offset is None else "half+offset"
    if weight.outer_block != (1, 256) or outer.dtype != torch.float16:
        return None
    if weight.block == (1, 16) and scale.dtype == torch.int8 and offset is None:
        return "super16"
    if offset is None or weight.offset_outer is None or offset.dtype != scale.dtype:
        return None
    known = {((1, 32), torch.uint8): "super+offset", ((1, 16), torch.int8): "super16+offset"}
    return known.get((weight.block, scale.dtype))


def codes_gemv_for(x: Tensor, weight: QuantisedWeight, gated: bool) -> PackedGemvPlan | None:
    """The plan where this kernel multiplies."""
    if len(x) != 1 or x.stride(1) != 1 or x.data_ptr() % 16:
        return None
    if x.dtype != torch.bfloat16 and not (x.dtype == torch.float16 and weight.grid != "e4m3"):
        return None
    scales = _scales(weight)
    tensors = [weight.weight, weight.high, weight.offset, weight.outer, weight.offset_outer]
    if scales not in ("row", "block"):
        tensors.append(weight.scale)
    if scales is None or any(each is not None and (each.data_ptr() % 16 or not each.is_contiguous()) for each in tensors):
        return None
    outputs = len(weight.weight) // 2 if gated else len(weight.weight)
    kernel, plan, _ = choose("codes", 1, outputs, weight.inputs, gated, device_facts(x.device))
    return plan if kernel == "codes_gemv" else None


def _pointers(weight: QuantisedWeight, scales: str) -> tuple[Tensor, ...]:
    """Codes, upper bits, scales, offsets and their outer scales as the kernel reads them; the codes where there are none."""
    codes = weight.weight.view(torch.int32)
    if weight.grid not in NIBBLES:
        scale = weight.scale.view(torch.int32) if scales == "group" else weight.scale
        return codes, codes, scale, codes, codes, codes
    small = torch.int16 if scales == "super+offset" else torch.int32
    given = ((weight.high, torch.int32), (weight.scale, small), (weight.offset, small), (weight.outer, torch.int16),
             (weight.offset_outer, torch.int16))
    return codes, *(codes if tensor is None else tensor.view(dtype) for tensor, dtype in given)


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
        x, x if residual is None else residual, x if norm is None else norm, *_pointers(weight, scales), weight.scale,
        x if bias is None else bias, out, new_residual, x.shape[1], outputs, strips,
        weight.scale.stride(0) if scales == "block" else 0, eps, norm_offset,
        RUNS=x.shape[1] // CODES_RUN, KIND=weight.grid, DTYPE=NAMES[x.dtype], SCALES=scales,
        SCALE_DTYPE=NAMES.get(weight.scale.dtype, "f32"), BLOCK=weight.block[0], NORM=norm is not None,
        RESIDUAL=residual is not None, GATE=GATES[gate], BIAS=bias is not None, GROUPS=plan.groups, WARPS=plan.warps,
        num_warps=plan.groups * plan.warps, maxnreg=plan.registers(), **dependent_launch(x.device),
    )
    return out, new_residual

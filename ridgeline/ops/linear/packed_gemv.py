"""GEMV for one to eight rows with packed 4-bit weights (packed_weight.py), fused with the norm before it and the gate behind it.

As in gemv_ring.py, every thread copies what it multiplies itself, through a ring in shared memory that is full before the PDL
wait. The warps of a CTA share the inputs, 512 at a time, and all have the same strip of 16 outputs; mma.sync multiplies, with
the weight as its left operand. x lies in shared memory in the order of the right operand. Scales multiply the sums of their
group in float32, so codes are never rounded.

Written in Gluon, which the interpreter does not support; there, and on other devices than Hopper, packed_linear.py expands the
weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import async_copy, compile_time, copy, gl, group_barrier, viewed, wait_for_kernel_before
from ridgeline.ops.launch import dependent_launch, multiprocessors
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.linear.packed_asm import product_registers, products
from ridgeline.ops.linear.packed_weight import RUN, PackedWeight
from ridgeline.ops.linear.select_packed import PackedGemvPlan
from ridgeline.ops.registry import gluon_kernel, triton


@compile_time
def _word_layout(warps):  # type: ignore[no-untyped-def]
    """Of [warps, 32, 4]: a lane has four words, its 16 bytes of a tile."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], [[0, 1 << bit, 0] for bit in range(5)],
        [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)], [], [warps, 32, 4],
    )


@compile_time
def _unit_layout(strips, warps):  # type: ignore[no-untyped-def]
    """Of [strips, 8, warps, 32, 4]: the words of all tiles."""
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return gl.DistributedLinearLayout(
        registers + [[1 << bit, 0, 0, 0, 0] for bit in range(strips.bit_length() - 1)],
        [[0, 0, 0, 1 << bit, 0] for bit in range(5)], [[0, 0, 1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)], [],
        [strips, 8, warps, 32, 4],
    )


@compile_time
def _line_layout(strips, each, warps):  # type: ignore[no-untyped-def]
    """Of [strips, groups of 128 inputs, warps, 32, 1]: the words of the scales."""
    registers = [[0, 1 << bit, 0, 0, 0] for bit in range(each.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers + [[1 << bit, 0, 0, 0, 0] for bit in range(strips.bit_length() - 1)],
        [[0, 0, 0, 1 << bit, 0] for bit in range(5)], [[0, 0, 1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)], [],
        [strips, each, warps, 32, 1],
    )


@compile_time
def _x_layout(warps):  # type: ignore[no-untyped-def]
    """Of [warps, rows, 4, 4]: the same lanes; a row of x for every four of them."""
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]], lanes, [[1 << bit, 0, 0, 0] for bit in range(warps.bit_length() - 1)], [],
        [warps, 8, 4, 4],
    )


@compile_time
def _plain_shared(rank):  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@gluon_kernel()
def _copy_unit(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, ring, scales, zeros, slot, unit, units, strips,
    RUNS: gl.constexpr, STRIPS: gl.constexpr, EACH: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):
    """Request 512 inputs for each warp, of STRIPS strips; nothing beyond the last. One copy for all: the compiler puts a
    barrier between copies into the same memory."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    layout: gl.constexpr = _unit_layout(STRIPS, WARPS)
    lines: gl.constexpr = _line_layout(STRIPS, EACH, WARPS)
    first = (gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)) * STRIPS
    before = unit % ROUNDS * WARPS
    start = first.to(gl.int64) * RUNS + before
    left = gl.where(unit < units, strips - first, 0)
    strip, tile, warp, lane, word = _places(layout, STRIPS, 8, WARPS, 4)
    place = strip * (RUNS * 1024) + warp * 1024 + tile * 128 + lane * 4 + word
    there = (before + warp < RUNS) & (strip < left)
    copy(ring.index(slot), code_ptr + start * 1024 + place, mask=there, eviction_policy="evict_first")
    strip, part, warp, lane, word = _places(lines, STRIPS, EACH, WARPS, 1)
    place = (strip * RUNS + warp) * (EACH * 32) + part * 32 + lane + word
    there = (before + warp < RUNS) & (strip < left)
    copy(scales.index(slot), scale_ptr + start * (EACH * 32) + place, mask=there)
    if ZEROS:
        copy(zeros.index(slot), zero_ptr + start * (EACH * 32) + place, mask=there)
    async_copy.commit_group()


@gluon_kernel()
def _places(layout: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr, E: gl.constexpr):  # type: ignore[no-untyped-def]
    """The five indices of a tensor [A, B, C, 32, E]."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    d = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout)))))
    e = gl.arange(0, E, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))))
    return (
        a[:, None][:, :, None][:, :, :, None][:, :, :, :, None], b[None, :][:, :, None][:, :, :, None][:, :, :, :, None],
        c[None, :][:, None, :][:, :, :, None][:, :, :, :, None], d[None, :][:, None, :][:, :, None, :][:, :, :, :, None],
        e[None, :][:, None, :][:, :, None, :][:, :, :, None, :],
    )


@gluon_kernel()
def _scale_words(line, layout: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    return line.load(gl.SliceLayout(2, layout))[:, :, None].broadcast_to([WARPS, 32, 4])


@gluon_kernel()
def _multiply_strip(  # type: ignore[no-untyped-def]
    sums, codes, scales, zeros, at, x, layout: gl.constexpr, BLOCK: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):
    """128 inputs of each warp."""
    EACH: gl.constexpr = 128 // GROUP
    text: gl.constexpr = products(KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS, BLOCK)
    constraints: gl.constexpr = product_registers(GROUP, ZEROS)
    operands = (sums, codes.index(8 * at + 2 * BLOCK).load(layout), codes.index(8 * at + 2 * BLOCK + 1).load(layout)) + x
    for part in gl.static_range(EACH):
        operands = operands + (_scale_words(scales.index(EACH * at + part), layout, WARPS),)
    if ZEROS:
        for part in gl.static_range(EACH):
            operands = operands + (_scale_words(zeros.index(EACH * at + part), layout, WARPS),)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon_kernel()
def _x_operand(rows, at, layout: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    x = rows.index(at).load(_x_layout(WARPS))
    return gl.convert_layout(x.broadcast_to([WARPS, 8, 4, 4]).reshape([WARPS, 32, 4]), layout, assert_trivial=True)


@gluon_kernel()
def _place_rows(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, rows, inputs, x_stride, eps, norm_offset,
    ROUNDS: gl.constexpr, ROWS: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, WARPS: gl.constexpr,
):
    """x into shared memory, in the order of the right operand; returns the norm's factor, which multiplies the sums."""
    CHUNK: gl.constexpr = 512 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    squares = gl.zeros([ROWS, CHUNK], gl.float32, layout)
    for part in gl.static_range(ROUNDS):
        column = part * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
        filled = (column < inputs) & (row < rows)
        x = gl.load(x_ptr + row * x_stride + column, mask=filled, other=0.0)
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
        x = x.to(x_ptr.dtype.element_ty).reshape([ROWS, WARPS, 8, 2, 2, 2, 4, 2]).permute([2, 3, 1, 0, 6, 4, 5, 7])
        memory.index(part).store(x)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.sum(squares, axis=1), axis=0) / inputs + eps)
    return factor


@gluon_kernel()
def _finish(  # type: ignore[no-untyped-def]
    sums, factor, outer_ptr, bias_ptr, out_ptr, strip, rows, outputs, layout: gl.constexpr,
    GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr,
):
    """Add the warps' parts and write 16 outputs, with a gate 8."""
    total = gl.sum(sums, axis=0) * factor                                # [32, 4]
    flat: gl.constexpr = gl.SliceLayout(0, layout)
    lane = gl.arange(0, 32, gl.SliceLayout(1, flat))[:, None]
    place = gl.arange(0, 4, gl.SliceLayout(0, flat))[None, :]
    if GATE == 0:
        output = strip * 16 + lane // 4 + place // 2 * 8
        live = output < outputs
        source = output
    else:
        output = strip * 8 + lane // 4
        live = (output < outputs) & (place < 4)
        source = output + place // 2 * outputs
    if OUTER:
        total *= gl.load(outer_ptr + source, mask=live, other=0.0)
    if BIAS:
        total += gl.load(bias_ptr + source, mask=live, other=0.0).to(gl.float32)
    if GATE == 0:
        row = lane % 4 * 2 + place % 2
        gl.store(out_ptr + row * outputs + output, total.to(out_ptr.dtype.element_ty), mask=live & (row < rows))
    else:
        gates, partners = total.reshape([32, 2, 2]).permute([0, 2, 1]).split()
        result = activated(gates, GATE) * partners                       # [32, 2]
        half: gl.constexpr = result.type.layout
        lane = gl.arange(0, 32, gl.SliceLayout(1, half))[:, None]
        row = lane % 4 * 2 + gl.arange(0, 2, gl.SliceLayout(0, half))[None, :]
        output = strip * 8 + lane // 4
        wanted = (output < outputs) & (row < rows)
        gl.store(out_ptr + row * outputs + output, result.to(out_ptr.dtype.element_ty), mask=wanted)


@gluon_kernel(do_not_specialize=["rows", "outputs", "strips"])
def _packed_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, new_residual_ptr,
    rows, inputs, outputs, strips, x_stride, eps, norm_offset,
    RUNS: gl.constexpr, STRIPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """STRIPS (1 or 2) strips at a time are assigned to the CTAs round-robin. RUNS: how often the inputs have 512.

    ROWS: 1 or 8 rows of x in shared memory. One row is read by all lanes, and every column of the product is the same.
    """
    layout: gl.constexpr = _word_layout(WARPS)
    EACH: gl.constexpr = 128 // GROUP
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    program = gl.program_id(0)
    blocks = (strips + STRIPS - 1) // STRIPS
    units = (blocks - program + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, STRIPS, 8, WARPS, 32, 4], _plain_shared(5))
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, STRIPS, EACH, WARPS, 32, 1], _plain_shared(5))
    zeros = scales
    if ZEROS:
        zeros = gl.allocate_shared_memory(gl.int32, [STAGES, STRIPS, EACH, WARPS, 32, 1], _plain_shared(5))
    if RUNS % WARPS != 0:                                # what is never copied may be anything: as a scale, even NaN
        nothing = gl.full([STRIPS, EACH, WARPS, 32, 1], 0, gl.int32, _line_layout(STRIPS, EACH, WARPS))
        for stage in gl.static_range(STAGES):
            scales.index(stage).store(nothing)
            if ZEROS:
                zeros.index(stage).store(nothing)
    for stage in gl.static_range(STAGES - 1):
        _copy_unit(
            code_ptr, scale_ptr, zero_ptr, ring, scales, zeros, stage, stage, units, strips, RUNS, STRIPS, EACH, ZEROS, WARPS
        )
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 8, 2, WARPS, ROWS, 4, 2, 2, 2], _plain_shared(8))
    wait_for_kernel_before(DEPENDENT)
    factor = _place_rows(
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, rows, inputs, x_stride, eps, norm_offset, ROUNDS, ROWS, NORM,
        RESIDUAL, WARPS,
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 16, WARPS, ROWS, 4, 4], _plain_shared(4))
    code_words = viewed(ring, gl.int32, [STAGES * STRIPS * 8, WARPS, 32, 4], _plain_shared(3))
    scale_words = viewed(scales, gl.int32, [STAGES * STRIPS * EACH, WARPS, 32], _plain_shared(2))
    zero_words = viewed(zeros, gl.int32, [STAGES * STRIPS * EACH, WARPS, 32], _plain_shared(2))
    slot = 0
    free = STAGES - 1
    for begin in range(0, units, ROUNDS):
        sums = gl.zeros([WARPS, 32, 4], gl.float32, layout)
        other = sums
        for unit in range(begin, begin + ROUNDS):
            _copy_unit(
                code_ptr, scale_ptr, zero_ptr, ring, scales, zeros, free, unit + (STAGES - 1), units, strips, RUNS, STRIPS,
                EACH, ZEROS, WARPS,
            )
            async_copy.wait_group(STAGES - 1)
            for block in gl.static_range(4):
                first = (unit - begin) * 16 + block * 4
                x = (
                    _x_operand(x_words, first, layout, WARPS), _x_operand(x_words, first + 1, layout, WARPS),
                    _x_operand(x_words, first + 2, layout, WARPS), _x_operand(x_words, first + 3, layout, WARPS),
                )
                sums = _multiply_strip(
                    sums, code_words, scale_words, zero_words, slot * STRIPS, x, layout, block, KIND, GROUP, DTYPE, SCALE_DTYPE,
                    ZEROS, WARPS,
                )
                if STRIPS == 2:
                    other = _multiply_strip(
                        other, code_words, scale_words, zero_words, slot * STRIPS + 1, x, layout, block, KIND, GROUP, DTYPE,
                        SCALE_DTYPE, ZEROS, WARPS,
                    )
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            free = gl.where(free == STAGES - 1, 0, free + 1)
        strip = (program + begin // ROUNDS * gl.num_programs(0)) * STRIPS
        _finish(sums, factor, outer_ptr, bias_ptr, out_ptr, strip, rows, outputs, layout, GATE, BIAS, OUTER)
        if STRIPS == 2:
            _finish(other, factor, outer_ptr, bias_ptr, out_ptr, strip + 1, rows, outputs, layout, GATE, BIAS, OUTER)
    async_copy.wait_group(0)


NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def packed_gemv(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, plan: PackedGemvPlan, *, norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1 to 8, inputs] -> out [rows, outputs], and x + residual (x itself without one). One row may have a norm before it.
    A weight whose gates and partners alternate needs a gate."""
    rows, inputs = x.shape
    outputs = weight.outputs if gate is None else weight.outputs // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(x)
    strips = weight.codes.shape[0]
    programs = min(triton.cdiv(strips, plan.strips), plan.programs * multiprocessors(x.device))
    _packed_gemv_kernel[(programs,)](
        x, x if residual is None else residual, x if norm is None else norm, weight.codes, weight.scale,
        weight.scale if weight.zero is None else weight.zero, weight.scale if weight.outer is None else weight.outer,
        x if bias is None else bias, out, new_residual, rows, inputs, outputs, strips, x.stride(0), eps, norm_offset,
        RUNS=weight.codes.shape[1] * 64 // RUN, STRIPS=plan.strips, STAGES=plan.stages, ROWS=plan.rows, KIND=weight.kind,
        GROUP=weight.group, DTYPE=NAMES[x.dtype], SCALE_DTYPE=NAMES[weight.scale_dtype], ZEROS=weight.zero is not None,
        NORM=norm is not None, RESIDUAL=residual is not None, GATE=GATES[gate], BIAS=bias is not None,
        OUTER=weight.outer is not None, WARPS=plan.warps, num_warps=plan.warps, **dependent_launch(x.device),
    )
    return out, new_residual

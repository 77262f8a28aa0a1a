"""GEMV for one to eight rows with packed 4-bit weights (packed_weight.py), fused with the norm before it and the gate behind it.

The warps of a CTA share the inputs of a strip of 16 outputs, 512 at a time; mma.sync multiplies, with the weight as its left
operand. Codes go straight into the registers of the lane that multiplies them, one unit ahead, the first before the PDL wait:
with four bits a weight, 20 warps have 80 KB of an SM in flight, and many warps are what hides the latency of unpacking. A ring
in shared memory as in gemv_ring.py was slower: it left room for 12 warps, and each unit cost two barriers. x lies in shared
memory in the order of the right operand. Scales multiply the sums of their group in float32, so codes are never rounded.

Written in Gluon, which the interpreter does not support; there, and on other devices than Hopper, packed_linear.py expands the
weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import compile_time, gl, group_barrier, viewed, wait_for_kernel_before
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
def _load_unit(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, unit, units, layout: gl.constexpr,
    RUNS: gl.constexpr, EACH: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):
    """Request 512 inputs for each warp: eight tensors of codes, the words of their scales, and of their zeros."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, flat))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    strip = gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)
    before = unit % ROUNDS * WARPS
    start = strip.to(gl.int64) * RUNS + before
    codes = code_ptr + start * 1024 + ((warp * 1024 + lane * 4)[:, :, None] + word)
    lines = start * (EACH * 32) + (warp * (EACH * 32) + lane)
    there = (warp >= 0) & (lane >= 0) & (unit < units)
    if RUNS % WARPS != 0:
        there = there & (before + warp < RUNS)
    loaded = ()
    for tile in gl.static_range(8):
        loaded = loaded + (gl.load(codes + tile * 128, mask=there[:, :, None], eviction_policy="evict_first"),)
    for part in gl.static_range(EACH):
        loaded = loaded + (gl.load(scale_ptr + lines + part * 32, mask=there, other=0),)
    if ZEROS:
        for part in gl.static_range(EACH):
            loaded = loaded + (gl.load(zero_ptr + lines + part * 32, mask=there, other=0),)
    return loaded


@gluon_kernel()
def _multiply_block(  # type: ignore[no-untyped-def]
    sums, loaded, x_words, first, layout: gl.constexpr, BLOCK: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):
    """128 inputs of each warp."""
    WORDS: gl.constexpr = 128 // GROUP * (2 if ZEROS else 1)
    text: gl.constexpr = products(KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS, BLOCK)
    constraints: gl.constexpr = product_registers(GROUP, ZEROS)
    operands = (sums, loaded[2 * BLOCK], loaded[2 * BLOCK + 1])
    for part in gl.static_range(4):
        operands = operands + (_x_operand(x_words, first + part, layout, WARPS),)
    for part in gl.static_range(WORDS):
        operands = operands + (loaded[8 + part][:, :, None].broadcast_to([WARPS, 32, 4]),)
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
    RUNS: gl.constexpr, ROWS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr,
    SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, GATE: gl.constexpr,
    BIAS: gl.constexpr, OUTER: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Strips are assigned to the CTAs round-robin. RUNS: how often the inputs have 512.

    ROWS: 1 or 8 rows of x in shared memory. One row is read by all lanes, and every column of the product is the same.
    """
    layout: gl.constexpr = _word_layout(WARPS)
    EACH: gl.constexpr = 128 // GROUP
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    program = gl.program_id(0)
    units = (strips - program + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    following = _load_unit(code_ptr, scale_ptr, zero_ptr, 0, units, layout, RUNS, EACH, ZEROS, WARPS)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 8, 2, WARPS, ROWS, 4, 2, 2, 2], _plain_shared(8))
    wait_for_kernel_before(DEPENDENT)
    factor = _place_rows(
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, rows, inputs, x_stride, eps, norm_offset, ROUNDS, ROWS, NORM,
        RESIDUAL, WARPS,
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 16, WARPS, ROWS, 4, 4], _plain_shared(4))
    for begin in range(0, units, ROUNDS):
        sums = gl.zeros([WARPS, 32, 4], gl.float32, layout)
        for unit in range(begin, begin + ROUNDS):
            loaded = following
            following = _load_unit(code_ptr, scale_ptr, zero_ptr, unit + 1, units, layout, RUNS, EACH, ZEROS, WARPS)
            for block in gl.static_range(4):
                sums = _multiply_block(
                    sums, loaded, x_words, (unit - begin) * 16 + block * 4, layout, block, KIND, GROUP, DTYPE, SCALE_DTYPE,
                    ZEROS, WARPS,
                )
        strip = program + begin // ROUNDS * gl.num_programs(0)
        _finish(sums, factor, outer_ptr, bias_ptr, out_ptr, strip, rows, outputs, layout, GATE, BIAS, OUTER)


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
    programs = min(strips, plan.programs * multiprocessors(x.device))
    _packed_gemv_kernel[(programs,)](
        x, x if residual is None else residual, x if norm is None else norm, weight.codes, weight.scale,
        weight.scale if weight.zero is None else weight.zero, weight.scale if weight.outer is None else weight.outer,
        x if bias is None else bias, out, new_residual, rows, inputs, outputs, strips, x.stride(0), eps, norm_offset,
        RUNS=weight.codes.shape[1] * 64 // RUN, ROWS=plan.rows, KIND=weight.kind, GROUP=weight.group, DTYPE=NAMES[x.dtype], SCALE_DTYPE=NAMES[weight.scale_dtype], ZEROS=weight.zero is not None,
        NORM=norm is not None, RESIDUAL=residual is not None, GATE=GATES[gate], BIAS=bias is not None,
        OUTER=weight.outer is not None, WARPS=plan.warps, num_warps=plan.warps, **dependent_launch(x.device),
    )
    return out, new_residual

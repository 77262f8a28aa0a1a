"""GEMV for one row with packed 4-bit weights (packed_weight.py), fused with the norm before it and the gate behind it.

The warps of a CTA share the inputs of a strip of 16 outputs, 512 at a time; mma.sync multiplies, with the weight as its left
operand. Codes go straight into the registers of the lane that multiplies them, one unit ahead, the first before the PDL wait:
with four bits a weight, 20 warps have 80 KB of an SM in flight, and many warps are what hides the latency of unpacking. A ring
in shared memory as in gemv_ring.py was slower: it left room for 12 warps, and each unit cost two barriers. x lies in shared
memory in the order of the right operand; all columns of the product are the same. Codes are multiplied as they lie in their words
(packed_asm.py). Scales multiply the sums of their group in float32, so codes are never rounded; what a code of zero means
multiplies the sums of x, which lie beside x. Eight rows in the eight columns were no faster than packed_gemm.py.

Written in Gluon, which the interpreter does not support; there, and on other devices than Hopper, packed_linear.py expands the
weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import compile_time, gl, group_barrier, viewed, wait_for_kernel_before
from ridgeline.ops.launch import dependent_launch, multiprocessors
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.packed.block_asm import block_product_registers, block_products, has_high, zero_words
from ridgeline.ops.packed.block_operand import has_offset, is_byte
from ridgeline.ops.packed.packed_asm import (
    code_step,
    is_byte_scale,
    product_registers,
    products,
    restored,
    scale_pairs,
    scale_words,
    sum_span,
    x_factor,
)
from ridgeline.ops.packed.packed_sizes import RUN
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.packed.select_packed import PackedGemvPlan
from ridgeline.ops.registry import gluon_kernel, triton


@compile_time
def _word_layout(groups, warps):  # type: ignore[no-untyped-def]
    """Of [groups, warps, 32, 4]: a lane has four words, its 16 bytes of a tile."""
    inner = [[0, 1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]], [[0, 0, 1 << bit, 0] for bit in range(5)],
        inner + [[1 << bit, 0, 0, 0] for bit in range(groups.bit_length() - 1)], [], [groups, warps, 32, 4],
    )


@compile_time
def _x_layout(groups, warps):  # type: ignore[no-untyped-def]
    """Of [groups, warps, 8, 4, 4]: the same lanes; eight times the same row of x."""
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    inner = [[0, 1 << bit, 0, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]], lanes, inner + [[1 << bit, 0, 0, 0, 0] for bit in range(groups.bit_length() - 1)], [],
        [groups, warps, 8, 4, 4],
    )


@compile_time
def _sum_layout(groups, warps):  # type: ignore[no-untyped-def]
    """Of [groups, warps, 64]: the parts of one sum in one lane, one group after the other."""
    registers = [[0, 1 << bit, 0] for bit in range(warps.bit_length() - 1)]
    places = [[0, 0, 1 << bit] for bit in range(6)] + [[1 << bit, 0, 0] for bit in range(groups.bit_length() - 1)]
    threads = 5 + (groups * warps).bit_length() - 1
    places += [[0, 0, 0]] * (threads - len(places))      # the rest of the threads have the same
    return gl.DistributedLinearLayout(
        registers + places[threads:], places[:5], places[5:threads], [], [groups, warps, 64]
    )


@compile_time
def _plain_shared(rank):  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@gluon_kernel()
def _load_unit(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, unit, strips, layout: gl.constexpr,
    RUNS: gl.constexpr, EACH: gl.constexpr, ZEROS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """Request 512 inputs for each warp: eight tensors of codes, the words of their scales, and of their zeros. What is not
    there has scales of zero and some codes that are: a mask would cost an instruction for every register."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None][:, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, :][:, None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, :][:, None, :][:, :, None, :]
    strip = (gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)) * GROUPS
    before = unit % ROUNDS * WARPS
    start = strip.to(gl.int64) * RUNS + before
    if GROUPS > 1:
        group = gl.minimum(group, strips - 1 - strip)
    run = warp
    if RUNS % WARPS != 0:
        run = gl.minimum(warp, RUNS - 1 - before)
    run = group * RUNS + run
    codes = code_ptr + start * 1024 + ((run * 1024 + lane * 4)[:, :, :, None] + word)
    lines = start * (EACH * 32) + (run * (EACH * 32) + lane)
    there = (before + warp < RUNS) & (group + lane >= 0)
    loaded = ()
    for tile in gl.static_range(8):
        loaded = loaded + (gl.load(codes + tile * 128, eviction_policy="evict_first"),)  # type: ignore[assignment]
    for part in gl.static_range(EACH):
        loaded = loaded + (_load_line(scale_ptr + lines + part * 32, there, RUNS % WARPS != 0),)  # type: ignore[assignment]
    if ZEROS:
        for part in gl.static_range(EACH):
            loaded = loaded + (_load_line(zero_ptr + lines + part * 32, there, RUNS % WARPS != 0),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _load_blocks(  # type: ignore[no-untyped-def]
    high_ptr, block_ptr, unit, strips, layout: gl.constexpr,
    RUNS: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """As `_load_unit`: what only GGUF's formats have (block_weight.py), the word of the multipliers and the upper bits."""
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    flat: gl.constexpr = gl.SliceLayout(3, layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None][:, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :][:, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, :][:, None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, :][:, None, :][:, :, None, :]
    strip = (gl.program_id(0) + unit // ROUNDS * gl.num_programs(0)) * GROUPS
    before = unit % ROUNDS * WARPS
    start = strip.to(gl.int64) * RUNS + before
    there = (before + warp < RUNS) & (group + lane >= 0)
    if GROUPS > 1:
        group = gl.minimum(group, strips - 1 - strip)
    run = group * RUNS + gl.minimum(warp, RUNS - 1 - before)
    loaded = ()
    if is_byte(FORM):
        loaded = loaded + (_load_line(block_ptr + start * 32 + (run * 32 + lane), there, RUNS % WARPS != 0),)  # type: ignore[assignment]
    if has_high(KIND):
        source = high_ptr + start * 512 + ((run * 512 + lane * 4)[:, :, :, None] + word)
        for part in gl.static_range(4):
            loaded = loaded + (gl.load(source + part * 128, eviction_policy="evict_first"),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _load_line(source, there, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    if MASKED:
        words = gl.load(source, mask=there, other=0)
    else:
        words = gl.load(source)
    return words


@gluon_kernel()
def widened(words, FIRST: gl.constexpr, COUNT: gl.constexpr, SCALE_DTYPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """COUNT tensors of scales behind FIRST others: those of bytes as words of two 16-bit numbers, twice as many. A lane does this
    with its own words, once for 512 inputs; afterwards four lanes read each word."""
    wide = words
    if is_byte_scale(SCALE_DTYPE):
        text: gl.constexpr = scale_pairs(SCALE_DTYPE)
        wide = ()
        for part in gl.static_range(FIRST):
            wide = wide + (words[part],)
        for part in gl.static_range(COUNT):
            low, high = gl.inline_asm_elementwise(
                text, "=r,=r,r", (words[FIRST + part],), dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )
            wide = wide + (low, high)
    return wide


@gluon_kernel()
def _multiply_block(  # type: ignore[no-untyped-def]
    sums, loaded, x_words, totals, first, layout: gl.constexpr, BLOCK: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """128 inputs of each warp."""
    WORDS: gl.constexpr = 128 // GROUP * (2 if ZEROS else 1)
    text: gl.constexpr = products(KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS, BLOCK)
    constraints: gl.constexpr = product_registers(KIND, GROUP, ZEROS)
    operands = (sums, loaded[2 * BLOCK], loaded[2 * BLOCK + 1])
    for part in gl.static_range(4):
        operands = operands + (_x_operand(x_words, first + part, layout, GROUPS, WARPS),)  # type: ignore[assignment]
    for part in gl.static_range(WORDS):
        operands = operands + (loaded[8 + part][:, :, :, None].broadcast_to([GROUPS, WARPS, 32, 4]),)  # type: ignore[assignment]
    operands = operands + _x_sums(totals, first // 4, layout, sum_span(KIND, GROUP), GROUPS, WARPS)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon_kernel()
def _multiply_gguf(  # type: ignore[no-untyped-def]
    sums, loaded, above, x_words, totals, first, layout: gl.constexpr, BLOCK: gl.constexpr, KIND: gl.constexpr,
    FORM: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """128 inputs of each warp, in GGUF's formats."""
    WORDS: gl.constexpr = 8 if zero_words(FORM, GROUP) else 4
    BYTE: gl.constexpr = is_byte(FORM)
    text: gl.constexpr = block_products(KIND, FORM, GROUP, DTYPE, SCALE_DTYPE, BLOCK)
    constraints: gl.constexpr = block_product_registers(KIND, FORM, GROUP)
    operands = (sums, loaded[2 * BLOCK], loaded[2 * BLOCK + 1])
    for part in gl.static_range(4):
        operands = operands + (_x_operand(x_words, first + part, layout, GROUPS, WARPS),)  # type: ignore[assignment]
    for part in gl.static_range(WORDS):
        operands = operands + (loaded[8 + part][:, :, :, None].broadcast_to([GROUPS, WARPS, 32, 4]),)  # type: ignore[assignment]
    if BYTE:
        operands = operands + (above[0][:, :, :, None].broadcast_to([GROUPS, WARPS, 32, 4]),)  # type: ignore[assignment]
    if has_high(KIND):
        operands = operands + (above[BLOCK + (1 if BYTE else 0)],)  # type: ignore[assignment]
    operands = operands + _x_sums(totals, first // 4, layout, sum_span(KIND, GROUP), GROUPS, WARPS)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=False, pack=4)


@gluon_kernel()
def _x_operand(x_words, at, layout: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    x = x_words.index(at).load(_x_layout(GROUPS, WARPS)).broadcast_to([GROUPS, WARPS, 8, 4, 4])
    return gl.convert_layout(x.reshape([GROUPS, WARPS, 32, 4]), layout, assert_trivial=True)


@gluon_kernel()
def _x_sums(  # type: ignore[no-untyped-def]
    totals, at, layout: gl.constexpr, SPAN: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr
):
    """Of the `at`-th 128 inputs, as operands of four registers."""
    operands = ()
    if SPAN > 0:
        PARTS: gl.constexpr = 32 // SPAN
        for part in gl.static_range(PARTS):
            found = totals.index(at * PARTS + part).load(layout).broadcast_to([GROUPS, WARPS, 32, 4])
            operands = operands + (found,)  # type: ignore[assignment]
    return operands


@compile_time
def sum_shape(rounds, warps, span):  # type: ignore[no-untyped-def]
    """Of the sums of x in shared memory."""
    return [rounds, 4, max(1, 32 // max(span, 1)), warps, 4] if span else [1, 1, 1, 1, 1]


@gluon_kernel()
def summed(totals, rounds: gl.constexpr, warps: gl.constexpr, span: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of x, by 128 inputs and operand."""
    SHAPE: gl.constexpr = sum_shape(rounds, warps, span)
    return viewed(totals, gl.float32, [SHAPE[0] * SHAPE[1] * SHAPE[2], 1, SHAPE[3], 1, SHAPE[4]], _plain_shared(4))


@gluon_kernel()
def place_x(  # type: ignore[no-untyped-def]
    x, memory, totals, part: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Chunk `part` of x into shared memory, in the order of the right operand, and its sums beside it."""
    SPAN: gl.constexpr = sum_span(KIND, GROUP)
    x = (x.to(gl.float32) * x_factor(DTYPE)).to(memory.dtype)
    memory.index(part).store(x.reshape([WARPS, 8, 2, 2, 2, 4, 2]).permute([1, 2, 0, 5, 3, 4, 6]))
    if SPAN > 0:
        STEP: gl.constexpr = code_step(KIND, DTYPE) * (1.0 if has_offset(FORM) else -1.0)
        # Two factors: their product is too small for a float32 number.
        sums = gl.sum(x.to(gl.float32).reshape([512 * WARPS // SPAN, SPAN]), axis=1) * (1.0 / x_factor(DTYPE)) * STEP
        totals.index(part).store(sums.reshape([WARPS, 4, 32 // SPAN, 4]).permute([1, 2, 0, 3]))


@gluon_kernel()
def norm_factor(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, inputs, eps, layout: gl.constexpr, CHUNK: gl.constexpr, ROUNDS: gl.constexpr, RESIDUAL: gl.constexpr
):
    """The norm's factor before x is placed, which reads x a second time."""
    squares = gl.zeros([CHUNK], gl.float32, layout)
    for part in gl.static_range(ROUNDS):
        column = part * CHUNK + gl.arange(0, CHUNK, layout)
        x = gl.load(x_ptr + column, mask=column < inputs, other=0.0).to(gl.float32)
        if RESIDUAL:
            x += gl.load(residual_ptr + column, mask=column < inputs, other=0.0).to(gl.float32)
            x = x.to(x_ptr.dtype.element_ty).to(gl.float32)
        squares += x * x
    return gl.rsqrt(gl.sum(squares, axis=0) / inputs + eps)


@gluon_kernel()
def _place_rows(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, totals, inputs, eps, norm_offset,
    ROUNDS: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """x into shared memory; returns the norm's factor, which multiplies the sums. x times the norm's weight alone may be more
    than float16 holds: there the factor multiplies it first."""
    CHUNK: gl.constexpr = 512 * WARPS
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
        place_x(x, memory, totals, part, KIND, FORM, GROUP, DTYPE, WARPS)
    factor = 1.0
    if NORM and not FIRST:
        factor = gl.rsqrt(gl.sum(squares, axis=0) / inputs + eps)
    return factor


@gluon_kernel()
def _finish(  # type: ignore[no-untyped-def]
    sums, memory, factor, other_factor, outer_ptr, bias_ptr, out_ptr, strip, strips, outputs,
    GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):
    """Add the warps' parts and write 16 outputs of each group, with a gate 8. By hand: with `gl.sum` this took longer than
    the products. A lane adds what is of outputs r, and what is of r + 8, which has a factor of its own: with a gate, the gate and
    its partner."""
    memory.store(sums.reshape([GROUPS, WARPS, 32, 2, 2]).permute([3, 0, 1, 2, 4]))
    group_barrier()
    layout: gl.constexpr = _sum_layout(GROUPS, WARPS)
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    halves = viewed(memory, gl.float32, [2, GROUPS, WARPS, 64], _plain_shared(3))
    low = gl.sum(halves.index(0).load(layout), axis=1) * factor          # [GROUPS, 64]: eight columns of each output
    high = gl.sum(halves.index(1).load(layout), axis=1) * other_factor
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, flat))[:, None]
    place = gl.arange(0, 64, gl.SliceLayout(0, flat))[None, :]
    if GATE == 0:
        output = (strip + group) * 16 + place // 8
        other = output + 8
    else:
        output = (strip + group) * 8 + place // 8
        other = output + outputs
    most = outputs if GATE == 0 else 2 * outputs
    there = (strip + group < strips) & (output < outputs) & (place % 8 == 0)
    if OUTER:
        low *= gl.load(outer_ptr + output, mask=there, other=0.0)
        high *= gl.load(outer_ptr + other, mask=there & (other < most), other=0.0)
    if BIAS:
        low += gl.load(bias_ptr + output, mask=there, other=0.0).to(gl.float32)
        high += gl.load(bias_ptr + other, mask=there & (other < most), other=0.0).to(gl.float32)
    if GATE == 0:
        gl.store(out_ptr + other, high.to(out_ptr.dtype.element_ty), mask=there & (other < outputs))
    else:
        low = activated(low, GATE) * high
    gl.store(out_ptr + output, low.to(out_ptr.dtype.element_ty), mask=there)


@gluon_kernel(do_not_specialize=["outputs", "strips"])
def _packed_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, code_ptr, scale_ptr, zero_ptr, high_ptr, block_ptr, outer_ptr, bias_ptr, out_ptr,
    new_residual_ptr, inputs, outputs, strips, eps, norm_offset,
    RUNS: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr,
    SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, GATE: gl.constexpr,
    BIAS: gl.constexpr, OUTER: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """GROUPS strips at a time are assigned to the CTAs round-robin; WARPS warps have one of them. RUNS: how often the inputs
    have 512."""
    layout: gl.constexpr = _word_layout(GROUPS, WARPS)
    EACH: gl.constexpr = 4 if is_byte(FORM) else scale_words(GROUP, SCALE_DTYPE)
    ROUNDS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    program = gl.program_id(0)
    blocks = (strips + GROUPS - 1) // GROUPS
    units = (blocks - program + gl.num_programs(0) - 1) // gl.num_programs(0) * ROUNDS
    following = _load_unit(code_ptr, scale_ptr, zero_ptr, 0, strips, layout, RUNS, EACH, ZEROS, GROUPS, WARPS)
    above_following = _load_blocks(high_ptr, block_ptr, 0, strips, layout, RUNS, KIND, FORM, GROUPS, WARPS)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROUNDS, 8, 2, WARPS, 4, 2, 2, 2], _plain_shared(7))
    SPAN: gl.constexpr = sum_span(KIND, GROUP)
    x_sums = gl.allocate_shared_memory(gl.float32, sum_shape(ROUNDS, WARPS, SPAN), _plain_shared(4))
    wait_for_kernel_before(DEPENDENT)
    factor = _place_rows(
        x_ptr, residual_ptr, norm_ptr, new_residual_ptr, memory, x_sums, inputs, eps, norm_offset, ROUNDS, KIND, FORM, GROUP,
        DTYPE, NORM, RESIDUAL, GROUPS, WARPS,
    )
    group_barrier()
    x_words = viewed(memory, gl.int32, [ROUNDS * 16, 1, WARPS, 1, 4, 4], _plain_shared(5))
    totals = summed(x_sums, ROUNDS, WARPS, SPAN)
    parts = gl.allocate_shared_memory(gl.float32, [2, GROUPS, WARPS, 32, 2], _plain_shared(5))
    sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)
    # One loop over all units. With a loop for every strip the compiler copied the registers of the next codes, and so waited for
    # them, before a strip's outputs were written: 1.77 ms a step of an 8B model in int4 instead of 1.67.
    for unit in range(units):
        loaded, above = following, above_following
        if unit + 1 < units:
            following = _load_unit(code_ptr, scale_ptr, zero_ptr, unit + 1, strips, layout, RUNS, EACH, ZEROS, GROUPS, WARPS)
            above_following = _load_blocks(high_ptr, block_ptr, unit + 1, strips, layout, RUNS, KIND, FORM, GROUPS, WARPS)
        loaded = widened(loaded, 8, EACH, SCALE_DTYPE)                   # waits for them: behind the next unit's requests
        for block in gl.static_range(4):
            at = unit % ROUNDS * 16 + block * 4
            if FORM == "":
                sums = _multiply_block(
                    sums, loaded, x_words, totals, at, layout, block, KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS, GROUPS, WARPS
                )
            else:
                sums = _multiply_gguf(
                    sums, loaded, above, x_words, totals, at, layout, block, KIND, FORM, GROUP, DTYPE, SCALE_DTYPE, GROUPS, WARPS
                )
        if (unit + 1) % ROUNDS == 0:
            strip = (program + unit // ROUNDS * gl.num_programs(0)) * GROUPS
            _finish(
                sums, parts, factor * restored(KIND, DTYPE, False), factor * restored(KIND, DTYPE, True), outer_ptr, bias_ptr,
                out_ptr, strip, strips, outputs, GATE, BIAS, OUTER, GROUPS, WARPS,
            )
            sums = gl.zeros([GROUPS, WARPS, 32, 4], gl.float32, layout)


NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
SCALE_NAMES = NAMES | {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}


def packed_gemv(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, plan: PackedGemvPlan, *, norm: Tensor | None = None, eps: float = 0.0,
    norm_offset: float = 0.0, residual: Tensor | None = None, gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, inputs] -> out [1, outputs], and x + residual (x itself without one). A weight whose gates and partners alternate
    needs a gate."""
    outputs = weight.outputs if gate is None else weight.outputs // 2
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(x)
    strips = weight.codes.shape[0]
    programs = min(triton.cdiv(strips, plan.groups), plan.programs * multiprocessors(x.device))
    _packed_gemv_kernel[(programs,)](
        x, x if residual is None else residual, x if norm is None else norm, weight.codes, weight.scale,
        weight.scale if weight.zero is None else weight.zero, weight.codes if weight.high is None else weight.high,
        weight.codes if weight.blocks is None else weight.blocks, weight.scale if weight.outer is None else weight.outer,
        x if bias is None else bias, out, new_residual, x.shape[1], outputs, strips, eps, norm_offset,
        RUNS=weight.codes.shape[1] * 64 // RUN, KIND=weight.kind, FORM=weight.form, GROUP=weight.group,
        DTYPE=NAMES[x.dtype], SCALE_DTYPE=SCALE_NAMES[weight.scale_dtype], ZEROS=weight.zero is not None, NORM=norm is not None,
        RESIDUAL=residual is not None, GATE=GATES[gate], BIAS=bias is not None, OUTER=weight.outer is not None,
        GROUPS=plan.groups, WARPS=plan.warps, num_warps=plan.groups * plan.warps, maxnreg=plan.registers(),
        **dependent_launch(x.device),
    )
    return out, new_residual

"""GEMM with packed 4-bit weights (packed_weight.py) for a few rows to many: persistent, warp-specialised CTAs.

Two warpgroups have outputs of their own. Each copies the codes it multiplies into a ring of its own (cp.async), which is full
before x is there; makes 16-bit numbers of them in registers, which wgmma takes as its left operand; and multiplies by the rows
of x that a warp loads by TMA after the PDL wait. While one warpgroup unpacks, the other one's products run. Numbers are the
expanded weight's: rounded once, after the scale.

Where there are too few tiles, the inputs are split (split-K); the CTA that arrives last at a tile adds the parts, always in
the same order. Written in Gluon, which the interpreter does not support; there, and on other devices than Hopper,
packed_linear.py expands the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import (
    TensorDescriptor,
    async_copy,
    compile_time,
    copy,
    fetch,
    gl,
    group_barrier,
    mbarrier,
    ring_barriers,
    viewed,
    wait_for_kernel_before,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ridgeline.ops.launch import dependent_launch, multiprocessors
from ridgeline.ops.linear.gemm_small import arrivals
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.linear.packed_asm import factors, operand_registers, operands, subtrahends
from ridgeline.ops.linear.packed_gemv import NAMES
from ridgeline.ops.linear.packed_weight import RUN, PackedWeight
from ridgeline.ops.linear.select_packed import PackedGemmPlan
from ridgeline.ops.registry import gluon_kernel, triton

REGISTERS = 168                      # of each of 384 threads, before the loading warp gives most of its own away


@compile_time
def _half_layout():  # type: ignore[no-untyped-def]
    """Of [4, 32, 8]: a lane's 16 bytes as elements of 16 bits."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 1 << bit, 0] for bit in range(5)], [[1, 0, 0], [2, 0, 0]], [], [4, 32, 8]
    )


@compile_time
def _unit_layout(halves, tiles):  # type: ignore[no-untyped-def]
    """Of [halves, tiles, 4, 32, 4]: the words of a unit."""
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]] + [[0, 1 << bit, 0, 0, 0] for bit in range(tiles.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers + [[1 << bit, 0, 0, 0, 0] for bit in range(halves.bit_length() - 1)],
        [[0, 0, 0, 1 << bit, 0] for bit in range(5)], [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0]], [], [halves, tiles, 4, 32, 4],
    )


@compile_time
def _plain_shared(rank):  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@gluon_kernel()
def _item(item, row_blocks, splits):  # type: ignore[no-untyped-def]
    """(tile, block of rows, split): CTAs that run together share the codes."""
    return item // splits // row_blocks, item // splits % row_blocks, item % splits


@gluon_kernel()
def _fetch_rows(  # type: ignore[no-untyped-def]
    x, ring, full, empty, items, row_blocks, splits, part_runs,
    BLOCK_ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """One warp: the rows' inputs of all items, once the kernel before this one has written them."""
    wait_for_kernel_before(DEPENDENT)
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, row_block, split = _item(item, row_blocks, splits)
        first = split * part_runs * 512
        for column in range(first, first + part_runs * 512, BLOCK):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), x.block_type.nbytes)
            fetch(x, [row_block * BLOCK_ROWS, column], full.index(slot), ring.index(slot))
            count += 1


@gluon_kernel()
def _copy_unit(  # type: ignore[no-untyped-def]
    code_ptr, ring, slot, unit, per_item, items, row_blocks, splits, part_runs, strips, step,
    GROUP_NUMBER: gl.constexpr, RUNS: gl.constexpr, HALVES: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
):
    """Request BLOCK inputs of this warpgroup's outputs; nothing beyond the last."""
    layout: gl.constexpr = _unit_layout(HALVES, TILES)
    half = gl.arange(0, HALVES, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    half = half[:, None][:, :, None][:, :, :, None][:, :, :, :, None]
    number = gl.arange(0, TILES, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    number = number[None, :][:, :, None][:, :, :, None][:, :, :, :, None]
    warp = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    warp = warp[None, :][:, None, :][:, :, :, None][:, :, :, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout)))))
    lane = lane[None, :][:, None, :][:, :, None, :][:, :, :, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))))
    word = word[None, :][:, None, :][:, :, None, :][:, :, :, None, :]
    item = gl.program_id(0) + unit // per_item * gl.num_programs(0)
    tile, row_block, split = _item(item, row_blocks, splits)
    first_tile = split * part_runs * 8 + unit % per_item * TILES
    place = (GROUP_NUMBER * HALVES + half) * 4 + warp
    start = (tile * step).to(gl.int64) * (RUNS * 1024) + first_tile * 128
    there = (place < step) & (tile * step + place < strips) & (item < items) & (first_tile + number < RUNS * 8)
    source = code_ptr + start + (place * (RUNS * 1024) + number * 128 + lane * 4 + word)
    copy(ring.index(GROUP_NUMBER * STAGES + slot), source, mask=there)
    async_copy.commit_group()


@gluon_kernel()
def _load_words(  # type: ignore[no-untyped-def]
    ptr, run_number, runs_per_item, items, row_blocks, splits, part_runs, strips, step,
    GROUP_NUMBER: gl.constexpr, RUNS: gl.constexpr, HALVES: gl.constexpr, EACH: gl.constexpr,
):
    """The words of scales or zeros of 512 inputs: a tensor [4, 32] for each half and group of 128."""
    flat: gl.constexpr = gl.SliceLayout(2, _half_layout())
    item = gl.program_id(0) + run_number // runs_per_item * gl.num_programs(0)
    tile, row_block, split = _item(item, row_blocks, splits)
    run = split * part_runs + run_number % runs_per_item
    warp = gl.arange(0, 4, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, flat))[None, :]
    words = ()
    for half in gl.static_range(HALVES):
        place = (GROUP_NUMBER * HALVES + half) * 4 + warp
        there = (place < step) & (tile * step + place < strips) & (item < items) & (run < RUNS) & (lane < 32)
        line = ((tile * step).to(gl.int64) * RUNS + run) * (EACH * 32)
        for part in gl.static_range(EACH):
            words = words + (gl.load(ptr + line + (place * (RUNS * EACH * 32) + part * 32 + lane), mask=there, other=0),)
    return words


@gluon_kernel()
def _spread(words, text: gl.constexpr, TILE: gl.constexpr, HALF: gl.constexpr, EACH: gl.constexpr):  # type: ignore[no-untyped-def]
    """The factors (or subtrahends) of a tile's words: two tensors [4, 32, 8], of outputs r and r + 8."""
    layout: gl.constexpr = _half_layout()
    WIDE: gl.constexpr = 1 if EACH <= 2 else EACH // 2                   # groups in a tile
    START: gl.constexpr = HALF * EACH + (TILE % 2 * (EACH // 2) if EACH > 1 else 0)
    low, high = _pair(words[START], text)
    if WIDE == 2:
        next_low, next_high = _pair(words[START + 1], text)
        low, high = gl.join(low, next_low), gl.join(high, next_high)     # [4, 32, 2]
    elif WIDE == 4:
        b_low, b_high = _pair(words[START + 1], text)
        c_low, c_high = _pair(words[START + 2], text)
        d_low, d_high = _pair(words[START + 3], text)
        low = gl.join(gl.join(low, c_low), gl.join(b_low, d_low))        # the last index counts fastest
        high = gl.join(gl.join(high, c_high), gl.join(b_high, d_high))
    low = low.reshape([4, 32, WIDE, 1]).broadcast_to([4, 32, WIDE, 8 // WIDE]).reshape([4, 32, 8])
    high = high.reshape([4, 32, WIDE, 1]).broadcast_to([4, 32, WIDE, 8 // WIDE]).reshape([4, 32, 8])
    return gl.convert_layout(low, layout, assert_trivial=True), gl.convert_layout(high, layout, assert_trivial=True)


@gluon_kernel()
def _pair(words, text: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(text, "=r,=r,r", (words,), dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon_kernel()
def _left_operand(  # type: ignore[no-untyped-def]
    codes, scales, zeros, layout: gl.constexpr, TILE: gl.constexpr, HALF: gl.constexpr, EACH: gl.constexpr, KIND: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr,
):
    """64 outputs x 64 inputs as numbers. TILE: which 64 of 512 inputs."""
    half: gl.constexpr = _half_layout()
    arguments = (codes.load(half),) + _spread(scales, factors(DTYPE, SCALE_DTYPE, TILE // 2), TILE, HALF, EACH)
    if ZEROS:
        arguments = arguments + _spread(zeros, subtrahends(DTYPE, TILE // 2), TILE, HALF, EACH)
    text: gl.constexpr = operands(KIND, DTYPE, ZEROS)
    constraints: gl.constexpr = operand_registers(ZEROS)
    if DTYPE == "bf16":
        a, b, c, d = gl.inline_asm_elementwise(
            text, constraints, arguments, dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            text, constraints, arguments, dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2
        )
    # warp, r, t, 16 inputs, odd input, upper eight inputs, upper eight outputs
    numbers = gl.join(gl.join(a, c), gl.join(b, d)).reshape([4, 8, 4, 4, 2, 2, 2])
    numbers = numbers.permute([0, 6, 1, 3, 5, 2, 4]).reshape([64, 64])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon_kernel()
def _finish(  # type: ignore[no-untyped-def]
    sums, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, tile, row_block, row_blocks, split, splits, rows, outputs,
    strips, step, layout: gl.constexpr, PLACE: gl.constexpr, PLACES: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr,
):
    """Write 64 outputs of one tile, with a gate 32; with split-K the CTA that arrives last does. PLACE: which 64 of the tile."""
    SIZE: gl.constexpr = 64 * BLOCK_ROWS
    line = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, layout))[None, :]
    written_rows = rows
    if splits > 1:
        number = (tile * row_blocks + row_block) * PLACES + PLACE
        parts = part_ptr + number.to(gl.int64) * (splits * SIZE)
        at = line * BLOCK_ROWS + column
        gl.store(parts + split * SIZE + at, sums)
        group_barrier()                                  # every thread's part is written before the arrival is
        arrived = gl.atomic_add(arrived_ptr + number, 1, sem="acq_rel")
        terms = gl.where(arrived == splits - 1, splits, 0)
        sums = gl.zeros([64, BLOCK_ROWS], gl.float32, layout)
        for term in range(terms):
            sums += gl.load(parts + term * SIZE + at, cache_modifier=".cg")
        if terms > 0:
            gl.store(arrived_ptr + number, 0)
        written_rows = gl.where(terms > 0, rows, 0)
    strip = tile * step + PLACE * 4 + line // 16
    there = (PLACE * 4 + line // 16 < step) & (strip < strips)
    if GATE == 0:
        output = strip * 16 + line % 16
    else:
        output = strip * 8 + line % 8 + line % 16 // 8 * outputs         # of the gates, then of their partners
        there = there & (strip * 8 + line % 8 < outputs)
    if OUTER:
        sums *= gl.load(outer_ptr + output, mask=there, other=0.0)
    if BIAS:
        sums += gl.load(bias_ptr + output, mask=there, other=0.0).to(gl.float32)
    if GATE == 0:
        row = row_block * BLOCK_ROWS + column
        wanted = there & (output < outputs) & (row < written_rows)
        gl.store(out_ptr + row.to(gl.int64) * outputs + output, sums.to(out_ptr.dtype.element_ty), mask=wanted)
    else:
        gates, partners = sums.reshape([4, 2, 8, BLOCK_ROWS]).permute([0, 2, 3, 1]).split()
        result = activated(gates, GATE) * partners                       # [4, 8, rows]
        short: gl.constexpr = result.type.layout
        warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, short)))[:, None][:, :, None]
        line = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, short)))[None, :][:, :, None]
        row = row_block * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, gl.SliceLayout(1, short)))[None, :][:, None, :]
        strip = tile * step + PLACE * 4 + warp
        output = strip * 8 + line
        wanted = (PLACE * 4 + warp < step) & (strip < strips) & (output < outputs) & (row < written_rows)
        gl.store(out_ptr + row.to(gl.int64) * outputs + output, result.to(out_ptr.dtype.element_ty), mask=wanted)


@gluon_kernel()
def _multiply(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, ring, x_ring, full, empty,
    items, row_blocks, splits, part_runs, strips, step, rows, outputs,
    GROUP_NUMBER: gl.constexpr, RUNS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, X_STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr,
    SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr,
):
    """Four warps: 64 or 128 outputs of every tile."""
    TILES: gl.constexpr = BLOCK // 64
    UNITS: gl.constexpr = 512 // BLOCK
    EACH: gl.constexpr = 128 // GROUP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_ROWS, 16])
    codes = viewed(ring, gl.int16, [2 * STAGES * HALVES * TILES, 4, 32, 8], _plain_shared(3))
    per_item = part_runs * UNITS
    for stage in gl.static_range(STAGES - 1):
        _copy_unit(
            code_ptr, ring, stage, stage, per_item, items, row_blocks, splits, part_runs, strips, step, GROUP_NUMBER, RUNS,
            HALVES, TILES, STAGES,
        )
    next_scales = _load_words(
        scale_ptr, 0, part_runs, items, row_blocks, splits, part_runs, strips, step, GROUP_NUMBER, RUNS, HALVES, EACH
    )
    next_zeros = next_scales
    if ZEROS:
        next_zeros = _load_words(
            zero_ptr, 0, part_runs, items, row_blocks, splits, part_runs, strips, step, GROUP_NUMBER, RUNS, HALVES, EACH
        )
    unit = 0
    run_number = 0
    slot = 0
    free = STAGES - 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sums = gl.zeros([64, BLOCK_ROWS], gl.float32, layout)
        other = sums
        for run in range(part_runs):
            scales = next_scales
            zeros = next_zeros
            run_number += 1
            next_scales = _load_words(
                scale_ptr, run_number, part_runs, items, row_blocks, splits, part_runs, strips, step, GROUP_NUMBER, RUNS,
                HALVES, EACH,
            )
            if ZEROS:
                next_zeros = _load_words(
                    zero_ptr, run_number, part_runs, items, row_blocks, splits, part_runs, strips, step, GROUP_NUMBER, RUNS,
                    HALVES, EACH,
                )
            else:
                next_zeros = next_scales
            for part in gl.static_range(UNITS):
                _copy_unit(
                    code_ptr, ring, free, unit + (STAGES - 1), per_item, items, row_blocks, splits, part_runs, strips, step,
                    GROUP_NUMBER, RUNS, HALVES, TILES, STAGES,
                )
                async_copy.wait_group(STAGES - 1)
                at = (GROUP_NUMBER * STAGES + slot) * (HALVES * TILES)
                x_slot = unit % X_STAGES
                x = x_ring.index(x_slot)
                left = _left_operand(
                    codes.index(at), scales, zeros, layout, part * TILES, 0, EACH, KIND, DTYPE, SCALE_DTYPE, ZEROS
                )
                mbarrier.wait(full.index(x_slot), (unit // X_STAGES) & 1)
                for tile in gl.static_range(TILES):
                    right = x.slice(tile * 64, 64, dim=1).permute((1, 0))
                    sums = warpgroup_mma(left, right, sums, is_async=True)
                    if HALVES == 2:
                        second = _left_operand(
                            codes.index(at + TILES + tile), scales, zeros, layout, part * TILES + tile, 1, EACH, KIND, DTYPE,
                            SCALE_DTYPE, ZEROS,
                        )
                        sums, left = warpgroup_mma_wait(0, deps=(sums, left))
                        other = warpgroup_mma(second, right, other, is_async=True)
                    if tile + 1 < TILES:
                        following = _left_operand(
                            codes.index(at + tile + 1), scales, zeros, layout, part * TILES + tile + 1, 0, EACH, KIND, DTYPE,
                            SCALE_DTYPE, ZEROS,
                        )
                    else:
                        following = left
                    if HALVES == 2:
                        other, second = warpgroup_mma_wait(0, deps=(other, second))
                    else:
                        sums, left = warpgroup_mma_wait(0, deps=(sums, left))
                    left = following
                mbarrier.arrive(empty.index(x_slot), count=1)
                unit += 1
                slot = gl.where(slot == STAGES - 1, 0, slot + 1)
                free = gl.where(free == STAGES - 1, 0, free + 1)
        tile, row_block, split = _item(item, row_blocks, splits)
        _finish(
            sums, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, tile, row_block, row_blocks, split, splits, rows, outputs,
            strips, step, layout, GROUP_NUMBER * HALVES, 2 * HALVES, BLOCK_ROWS, GATE, BIAS, OUTER,
        )
        if HALVES == 2:
            _finish(
                other, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, tile, row_block, row_blocks, split, splits, rows,
                outputs, strips, step, layout, GROUP_NUMBER * HALVES + 1, 2 * HALVES, BLOCK_ROWS, GATE, BIAS, OUTER,
            )
    async_copy.wait_group(0)


@gluon_kernel(do_not_specialize=["items", "row_blocks", "splits", "part_runs", "strips", "step", "rows", "outputs"])
def packed_gemm_kernel(  # type: ignore[no-untyped-def]
    x, code_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
    items, row_blocks, splits, part_runs, strips, step, rows, outputs,
    RUNS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    X_STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    ZEROS: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [rows, inputs] is a TMA descriptor, which fills in zeros beyond it. An item is one split of one tile of one block of
    rows. A tile has `step` strips of 16 outputs, at most 8 HALVES."""
    TILES: gl.constexpr = BLOCK // 64
    ring = gl.allocate_shared_memory(gl.int32, [2 * STAGES, HALVES, TILES, 4, 32, 4], _plain_shared(5))
    x_ring = gl.allocate_shared_memory(x.dtype, [X_STAGES, BLOCK_ROWS, BLOCK], x.layout)
    full, empty = ring_barriers(X_STAGES, 2)
    gl.warp_specialize([
        (_multiply, (
            code_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, ring, x_ring, full, empty,
            items, row_blocks, splits, part_runs, strips, step, rows, outputs, 0, RUNS, BLOCK_ROWS, BLOCK, HALVES, STAGES,
            X_STAGES, KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS, GATE, BIAS, OUTER,
        )),
        (_multiply, (
            code_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, ring, x_ring, full, empty,
            items, row_blocks, splits, part_runs, strips, step, rows, outputs, 1, RUNS, BLOCK_ROWS, BLOCK, HALVES, STAGES,
            X_STAGES, KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS, GATE, BIAS, OUTER,
        )),
        (_fetch_rows, (
            x, x_ring, full, empty, items, row_blocks, splits, part_runs, BLOCK_ROWS, BLOCK, X_STAGES, DEPENDENT,
        )),
    ], [4, 1], [232, 40])


def packed_gemm(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, plan: PackedGemmPlan, *, gate: str | None = None
) -> Tensor:
    """x [rows, inputs] -> [rows, outputs]. The rows of x lie at multiples of 16 bytes. A weight whose gates and partners
    alternate needs a gate."""
    rows, inputs = x.shape
    outputs = weight.outputs if gate is None else weight.outputs // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    strips, runs = weight.codes.shape[0], weight.codes.shape[1] * 64 // RUN
    tiles, row_blocks = triton.cdiv(strips, plan.step), triton.cdiv(rows, plan.block_rows)
    part_runs = triton.cdiv(runs, plan.splits)
    splits = triton.cdiv(runs, part_runs)                # fewer than asked for where the last ones would be empty
    items = tiles * row_blocks * splits
    places = 2 * plan.halves
    size = items * places * 64 * plan.block_rows if splits > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    described = TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [plan.block_rows, plan.block], layout)
    packed_gemm_kernel[min(items, multiprocessors(x.device)),](
        described, weight.codes, weight.scale, weight.scale if weight.zero is None else weight.zero,
        weight.scale if weight.outer is None else weight.outer, x if bias is None else bias, out, parts, arrivals(x.device),
        items, row_blocks, splits, part_runs, strips, plan.step, rows, outputs,
        RUNS=runs, BLOCK_ROWS=plan.block_rows, BLOCK=plan.block, HALVES=plan.halves, STAGES=plan.stages,
        X_STAGES=plan.x_stages, KIND=weight.kind, GROUP=weight.group, DTYPE=NAMES[x.dtype],
        SCALE_DTYPE=NAMES[weight.scale_dtype], ZEROS=weight.zero is not None, GATE=GATES[gate], BIAS=bias is not None,
        OUTER=weight.outer is not None, num_warps=4, maxnreg=REGISTERS, **dependent_launch(x.device),
    )
    return out

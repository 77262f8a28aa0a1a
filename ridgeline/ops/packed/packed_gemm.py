"""GEMM with packed 4-bit weights (packed_weight.py) for a few rows to many: persistent, warp-specialised CTAs.

Codes go straight into the registers of the lane that unpacks them, a block ahead, the first before x is there; wgmma takes the
16-bit numbers made of them from registers, as its left operand, and the rows of x from a ring that one warp fills by TMA after
the PDL wait. The next 64 inputs are unpacked while the products of the last 64 run. With many rows two warpgroups have outputs
of their own and unpack in turn; with few rows all warps run the same code. Numbers are the expanded weight's: rounded once,
after the scale.

Where there are too few tiles, the inputs are split (split-K); the CTA that arrives last at a tile adds the parts, always in
the same order. Written in Gluon, which the interpreter does not support; there, and on other devices than Hopper,
packed_linear.py expands the weight. Slower: codes through a ring in shared memory (docs/lab/int4-kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.hopper import (
    TensorDescriptor,
    compile_time,
    fetch,
    gl,
    group_barrier,
    mbarrier,
    ring_barriers,
    wait_for_kernel_before,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ridgeline.ops.launch import dependent_launch, multiprocessors
from ridgeline.ops.linear.gemm_small import arrivals
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.packed.block_asm import has_high
from ridgeline.ops.packed.block_operand import block_operand, is_byte, unpacked
from ridgeline.ops.packed.byte_asm import byte_factors, byte_operand_registers, byte_operands, enlarged
from ridgeline.ops.packed.packed_asm import factors, operand_registers, operands, scale_words, subtrahends
from ridgeline.ops.packed.packed_gemv import NAMES, SCALE_NAMES, widened
from ridgeline.ops.packed.packed_sizes import RUN
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.packed.select_packed import PackedGemmPlan
from ridgeline.ops.registry import gluon_kernel, triton


@compile_time
def _word_layout(warps):  # type: ignore[no-untyped-def]
    """Of [warps, 32, 4]: a lane's four words of a tile."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], [[0, 1 << bit, 0] for bit in range(5)],
        [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)], [], [warps, 32, 4],
    )


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
        _tile, row_block, split = _item(item, row_blocks, splits)
        first = split * part_runs * 512
        for column in range(first, first + part_runs * 512, BLOCK):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), x.block_type.nbytes)
            fetch(x, [row_block * BLOCK_ROWS, column], full.index(slot), ring.index(slot))
            count += 1


@gluon_kernel()
def _origin(item, items, row_blocks, splits, part_runs, step, strips, runs):  # type: ignore[no-untyped-def]
    """(first run of an item, counted from the first strip of its tile in memory; its number among the strip's runs; how many
    strips follow the first). Of the last item, where there is no such item."""
    tile, _row_block, split = _item(gl.minimum(item, items - 1), row_blocks, splits)
    return (tile * step).to(gl.int64) * runs + split * part_runs, split * part_runs, strips - 1 - tile * step


@gluon_kernel()
def _load_codes(  # type: ignore[no-untyped-def]
    code_ptr, start, room, PART: gl.constexpr, runs, TILES: gl.constexpr, HALVES: gl.constexpr,
    WARPS: gl.constexpr, RUN_WORDS: gl.constexpr = 1024,
):
    """Request a block: a tensor [WARPS, 32, 4] for each half and tile. What is not there has scales of zero and some codes
    that are: a mask would cost an instruction for every register. RUN_WORDS: words of a strip's 512 inputs."""
    layout: gl.constexpr = _word_layout(WARPS)
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, flat))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    loaded = ()
    for half in gl.static_range(HALVES):
        place = gl.minimum((PART * HALVES + half) * WARPS + warp, room)
        source = code_ptr + start + ((place * (runs * RUN_WORDS) + lane * 4)[:, :, None] + word)
        for tile in gl.static_range(TILES):
            loaded = loaded + (gl.load(source + tile * 128),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _load_words(  # type: ignore[no-untyped-def]
    ptr, start, left, room, step,
    PART: gl.constexpr, runs, HALVES: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):
    """Request the words of scales or zeros of 512 inputs: a tensor [WARPS, 32] for each half and group of 128. `left`: how many
    runs the strip has from here on."""
    flat: gl.constexpr = gl.SliceLayout(2, _word_layout(WARPS))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, flat))[None, :]
    words = ()
    for half in gl.static_range(HALVES):
        place = (PART * HALVES + half) * WARPS + warp
        there = (place < step) & (place <= room) & (left > 0) & (lane >= 0)
        for part in gl.static_range(EACH):
            source = ptr + start * (EACH * 32) + (place * (runs * EACH * 32) + part * 32 + lane)
            words = words + (gl.load(source, mask=there, other=0),)  # type: ignore[assignment]
    return words


@gluon_kernel()
def _spread(  # type: ignore[no-untyped-def]
    words, block, text: gl.constexpr, TILE: gl.constexpr, HALF: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr
):
    """The factors (or subtrahends) of a tile's words: two tensors [WARPS, 32, 4], of outputs r and r + 8."""
    layout: gl.constexpr = _word_layout(WARPS)
    WIDE: gl.constexpr = 1 if EACH <= 2 else EACH // 2                   # groups in a tile
    START: gl.constexpr = HALF * EACH + (TILE % 2 * (EACH // 2) if EACH > 1 else 0)
    low, high = _pair(words[START], block, text)
    if WIDE == 2:
        next_low, next_high = _pair(words[START + 1], block, text)
        low, high = gl.join(low, next_low), gl.join(high, next_high)     # [WARPS, 32, 2]
    elif WIDE == 4:
        b_low, b_high = _pair(words[START + 1], block, text)
        c_low, c_high = _pair(words[START + 2], block, text)
        d_low, d_high = _pair(words[START + 3], block, text)
        low = gl.join(gl.join(low, c_low), gl.join(b_low, d_low))        # the last index counts fastest
        high = gl.join(gl.join(high, c_high), gl.join(b_high, d_high))
    low = low.reshape([WARPS, 32, WIDE, 1]).broadcast_to([WARPS, 32, WIDE, 4 // WIDE]).reshape([WARPS, 32, 4])
    high = high.reshape([WARPS, 32, WIDE, 1]).broadcast_to([WARPS, 32, WIDE, 4 // WIDE]).reshape([WARPS, 32, 4])
    return gl.convert_layout(low, layout, assert_trivial=True), gl.convert_layout(high, layout, assert_trivial=True)


@gluon_kernel()
def _pair(words, block, text: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(text, "=r,=r,r,r", (words, block), dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon_kernel()
def _left_operand(  # type: ignore[no-untyped-def]
    codes, scales, zeros, block, layout: gl.constexpr, TILE: gl.constexpr, HALF: gl.constexpr, EACH: gl.constexpr,
    KIND: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):
    """16 WARPS outputs x 64 inputs as numbers. Which 64 of 512 inputs: 2 `block` + TILE."""
    arguments = (codes,) + _spread(scales, block + TILE // 2, factors(DTYPE, SCALE_DTYPE), TILE, HALF, EACH, WARPS)
    if ZEROS:
        arguments = arguments + _spread(zeros, block + TILE // 2, subtrahends(DTYPE), TILE, HALF, EACH, WARPS)
    text: gl.constexpr = operands(KIND, DTYPE, ZEROS)
    constraints: gl.constexpr = operand_registers(ZEROS)
    return unpacked(text, constraints, arguments, layout, DTYPE, WARPS)


@gluon_kernel()
def _load_high(  # type: ignore[no-untyped-def]
    high_ptr, start, room, PART: gl.constexpr, runs, TILES: gl.constexpr, HALVES: gl.constexpr,
    KIND: gl.constexpr, WARPS: gl.constexpr,
):
    """Request the upper bits of a block of codes that begins at word `start`: half as many words. Of bytes: the other plane."""
    loaded = ()
    if KIND == "int8":
        loaded = _load_codes(high_ptr, start, room, PART, runs, TILES, HALVES, WARPS)
    elif has_high(KIND):
        loaded = _load_codes(high_ptr, start // 2, room, PART, runs, TILES // 2, HALVES, WARPS, 512)
    return loaded


@gluon_kernel()
def _operand(  # type: ignore[no-untyped-def]
    codes, high, scales, zeros, multipliers, block, layout: gl.constexpr, TILE: gl.constexpr, HALF: gl.constexpr,
    TILES: gl.constexpr, EACH: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr,
    SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr,
):
    """The left operand of one tile of a block."""
    mine = codes[HALF * TILES + TILE]
    if KIND == "int8":
        text: gl.constexpr = byte_operands(DTYPE)
        constraints: gl.constexpr = byte_operand_registers()
        scale_text: gl.constexpr = byte_factors(DTYPE, SCALE_DTYPE)
        arguments = (mine, high[HALF * TILES + TILE]) + _spread(scales, block + TILE // 2, scale_text, TILE, HALF, EACH, WARPS)
        result = unpacked(text, constraints, arguments, layout, DTYPE, WARPS)
    elif FORM == "":
        result = _left_operand(mine, scales, zeros, block, layout, TILE, HALF, EACH, KIND, DTYPE, SCALE_DTYPE, ZEROS, WARPS)
    else:
        above = mine
        if has_high(KIND):
            above = high[HALF * (TILES // 2) + TILE // 2]
        result = block_operand(
            mine, above, scales, zeros, multipliers, block, layout, _word_layout(WARPS), TILE, HALF, KIND, FORM, GROUP, DTYPE,
            SCALE_DTYPE, WARPS,
        )
    return result


@gluon_kernel()
def _add_parts(sums, memory, written, taken, number, layout: gl.constexpr, PART: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of part 0, with those of part 1 added. `number`: how many items this CTA has finished."""
    if PART == 1:
        mbarrier.wait(taken, (number & 1) ^ 1)
        memory.store(sums)
        mbarrier.arrive(written, count=1)
    else:
        mbarrier.wait(written, number & 1)
        sums += memory.load(layout)
        mbarrier.arrive(taken, count=1)
    return sums


@gluon_kernel()
def _finish(  # type: ignore[no-untyped-def]
    sums, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, tile, row_block, row_blocks, split, splits, rows, outputs,
    strips, step, layout: gl.constexpr, PLACE: gl.constexpr, PLACES: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr, WARPS: gl.constexpr,
):
    """Write WARPS strips of one tile; with split-K the CTA that arrives last does. PLACE: which of the PLACES of the tile."""
    SIZE: gl.constexpr = 16 * WARPS * BLOCK_ROWS
    line = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, layout))[:, None]
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
        sums = gl.zeros([16 * WARPS, BLOCK_ROWS], gl.float32, layout)
        for term in range(terms):
            sums += gl.load(parts + term * SIZE + at, cache_modifier=".cg")
        if terms > 0:
            gl.store(arrived_ptr + number, 0)
        written_rows = gl.where(terms > 0, rows, 0)
    strip = tile * step + PLACE * WARPS + line // 16
    there = (PLACE * WARPS + line // 16 < step) & (strip < strips)
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
        gates, partners = sums.reshape([WARPS, 2, 8, BLOCK_ROWS]).permute([0, 2, 3, 1]).split()
        result = activated(gates, GATE) * partners                       # [WARPS, 8, rows]
        short: gl.constexpr = result.type.layout
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, short)))[:, None][:, :, None]
        line = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, short)))[None, :][:, :, None]
        row = row_block * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, gl.SliceLayout(1, short)))[None, :][:, None, :]
        strip = tile * step + PLACE * WARPS + warp
        output = strip * 8 + line
        wanted = (PLACE * WARPS + warp < step) & (strip < strips) & (output < outputs) & (row < written_rows)
        gl.store(out_ptr + row.to(gl.int64) * outputs + output, result.to(out_ptr.dtype.element_ty), mask=wanted)


@gluon_kernel()
def _multiply(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, high_ptr, block_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, x_ring, full, empty,
    memory, written, taken, items, row_blocks, splits, runs, part_runs, strips, step, rows, outputs,
    PART: gl.constexpr, PARTS: gl.constexpr, TOGETHER: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    TILES: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, ZEROS: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    OUTER: gl.constexpr, WARPS: gl.constexpr,
):
    """WARPS warps: 16 WARPS HALVES outputs of every tile, or with TOGETHER a half of every run's inputs."""
    ALL: gl.constexpr = 8 // TILES                       # blocks in a run of 512 inputs
    BLOCKS: gl.constexpr = ALL // 2 if TOGETHER else ALL
    FIRST: gl.constexpr = PART * BLOCKS if TOGETHER else 0
    PLACE: gl.constexpr = 0 if TOGETHER else PART
    EACH: gl.constexpr = 4 if is_byte(FORM) else 128 // GROUP
    SCALES: gl.constexpr = 4 if is_byte(FORM) else scale_words(GROUP, SCALE_DTYPE)
    AT: gl.constexpr = FIRST * TILES * 128               # the first words of codes in a run
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_ROWS, 16])
    first = gl.program_id(0)
    ahead, number_ahead, room_ahead = _origin(first, items, row_blocks, splits, part_runs, step, strips, runs)
    next_codes = _load_codes(code_ptr, ahead * 1024 + AT, room_ahead, PLACE, runs, TILES, HALVES, WARPS)
    next_high = _load_high(high_ptr, ahead * 1024 + AT, room_ahead, PLACE, runs, TILES, HALVES, KIND, WARPS)
    left_ahead = runs - number_ahead
    next_scales = _load_words(scale_ptr, ahead, left_ahead, room_ahead, step, PLACE, runs, HALVES, SCALES, WARPS)
    next_zeros = next_scales
    if ZEROS:
        next_zeros = _load_words(zero_ptr, ahead, left_ahead, room_ahead, step, PLACE, runs, HALVES, EACH, WARPS)
    next_multipliers = next_scales
    if is_byte(FORM):
        next_multipliers = _load_words(block_ptr, ahead, left_ahead, room_ahead, step, PLACE, runs, HALVES, 1, WARPS)
    count, finished = FIRST, 0
    for item in range(first, items, gl.num_programs(0)):
        origin, number, room = ahead, number_ahead, room_ahead
        following_item = item + gl.num_programs(0)
        ahead, number_ahead, room_ahead = _origin(following_item, items, row_blocks, splits, part_runs, step, strips, runs)
        sums = gl.zeros([16 * WARPS, BLOCK_ROWS], gl.float32, layout)
        other = sums
        for run in range(part_runs):
            last = run == part_runs - 1
            # Beyond the last run of a strip the same codes again, with scales of zero.
            here = origin + gl.minimum(run, runs - 1 - number)
            next_run = gl.where(last, ahead, origin + gl.minimum(run + 1, runs - 1 - number))
            remaining = gl.where(last, runs - number_ahead, runs - number - run - 1)
            next_room = gl.where(last, room_ahead, room)
            scales, zeros, multipliers = next_scales, next_zeros, next_multipliers
            next_scales = _load_words(scale_ptr, next_run, remaining, next_room, step, PLACE, runs, HALVES, SCALES, WARPS)
            scales = widened(scales, 0, HALVES * SCALES, SCALE_DTYPE)
            next_zeros = next_scales
            if ZEROS:
                next_zeros = _load_words(zero_ptr, next_run, remaining, next_room, step, PLACE, runs, HALVES, EACH, WARPS)
            next_multipliers = next_scales
            if is_byte(FORM):
                next_multipliers = _load_words(block_ptr, next_run, remaining, next_room, step, PLACE, runs, HALVES, 1, WARPS)
            for block in range(BLOCKS):                  # a loop, since the unrolled code did not fit into the cache
                codes, high = next_codes, next_high
                end = block == BLOCKS - 1
                start = gl.where(end, next_run * 1024, here * 1024 + (block + 1) * (TILES * 128)) + AT
                code_room = gl.where(end, next_room, room)
                next_codes = _load_codes(code_ptr, start, code_room, PLACE, runs, TILES, HALVES, WARPS)
                next_high = _load_high(high_ptr, start, code_room, PLACE, runs, TILES, HALVES, KIND, WARPS)
                part = (FIRST + block) * (TILES // 2)
                slot = count % STAGES
                x = x_ring.index(slot)
                left = _operand(
                    codes, high, scales, zeros, multipliers, part, layout, 0, 0, TILES, EACH, KIND, FORM, GROUP, DTYPE,
                    SCALE_DTYPE, ZEROS, WARPS,
                )
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                for tile in gl.static_range(TILES):
                    right = x.slice(tile * 64, 64, dim=1).permute((1, 0))
                    sums = warpgroup_mma(left, right, sums, is_async=True)
                    if HALVES == 2:
                        second = _operand(
                            codes, high, scales, zeros, multipliers, part, layout, tile, 1, TILES, EACH, KIND, FORM, GROUP,
                            DTYPE, SCALE_DTYPE, ZEROS, WARPS,
                        )
                        sums, left = warpgroup_mma_wait(0, deps=(sums, left))
                        other = warpgroup_mma(second, right, other, is_async=True)
                    following = left
                    if tile + 1 < TILES:
                        following = _operand(
                            codes, high, scales, zeros, multipliers, part, layout, tile + 1, 0, TILES, EACH, KIND, FORM, GROUP,
                            DTYPE, SCALE_DTYPE, ZEROS, WARPS,
                        )
                    if HALVES == 2:
                        other, second = warpgroup_mma_wait(0, deps=(other, second))
                    else:
                        sums, left = warpgroup_mma_wait(0, deps=(sums, left))
                    left = following
                mbarrier.arrive(empty.index(slot), count=1)
                count += 1
            count += ALL - BLOCKS
        tile, row_block, split = _item(item, row_blocks, splits)
        if enlarged(KIND, DTYPE) != 1.0:
            sums *= enlarged(KIND, DTYPE)
            other *= enlarged(KIND, DTYPE)
        if TOGETHER:
            sums = _add_parts(sums, memory, written, taken, finished, layout, PART)
        if PART == 0 or not TOGETHER:
            _finish(
                sums, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, tile, row_block, row_blocks, split, splits, rows,
                outputs, strips, step, layout, PLACE * HALVES, (1 if TOGETHER else PARTS) * HALVES, BLOCK_ROWS, GATE, BIAS,
                OUTER, WARPS,
            )
        if HALVES == 2:
            _finish(
                other, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, tile, row_block, row_blocks, split, splits, rows,
                outputs, strips, step, layout, PLACE * HALVES + 1, PARTS * HALVES, BLOCK_ROWS, GATE, BIAS, OUTER, WARPS,
            )
        finished += 1


@gluon_kernel(do_not_specialize=["items", "row_blocks", "splits", "runs", "part_runs", "strips", "step", "rows", "outputs"])
def packed_gemm_kernel(  # type: ignore[no-untyped-def]
    x, code_ptr, scale_ptr, zero_ptr, high_ptr, block_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
    items, row_blocks, splits, runs, part_runs, strips, step, rows, outputs,
    BLOCK_ROWS: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, TOGETHER: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    ZEROS: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, OUTER: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """x [rows, inputs] is a TMA descriptor, which fills in zeros beyond it. An item is one split of one tile of one block of
    rows. A tile has `step` strips of 16 outputs, at most PARTS HALVES WARPS. Blocks have TILES times 64 inputs. TOGETHER: both
    parts have the outputs of a tile, at most WARPS strips, and each a half of the inputs."""
    BLOCK: gl.constexpr = TILES * 64
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, BLOCK], x.layout)
    full, empty = ring_barriers(STAGES, 1 if TOGETHER else PARTS)
    memory, written, taken = full, full, full
    if TOGETHER:
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        memory = gl.allocate_shared_memory(gl.float32, [16 * WARPS, BLOCK_ROWS], swizzled)
        written = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(written, count=1)
        mbarrier.init(taken, count=1)
    if PARTS == 2:
        gl.warp_specialize([
            (_multiply, (
                code_ptr, scale_ptr, zero_ptr, high_ptr, block_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, x_ring,
                full, empty, memory, written, taken, items, row_blocks, splits, runs, part_runs, strips, step, rows, outputs,
                0, PARTS, TOGETHER, BLOCK_ROWS, TILES, HALVES, STAGES, KIND, FORM, GROUP, DTYPE, SCALE_DTYPE, ZEROS, GATE, BIAS,
                OUTER, WARPS,
            )),
            (_multiply, (
                code_ptr, scale_ptr, zero_ptr, high_ptr, block_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, x_ring,
                full, empty, memory, written, taken, items, row_blocks, splits, runs, part_runs, strips, step, rows, outputs,
                1, PARTS, TOGETHER, BLOCK_ROWS, TILES, HALVES, STAGES, KIND, FORM, GROUP, DTYPE, SCALE_DTYPE, ZEROS, GATE, BIAS,
                OUTER, WARPS,
            )),
            (_fetch_rows, (
                x, x_ring, full, empty, items, row_blocks, splits, part_runs, BLOCK_ROWS, BLOCK, STAGES, DEPENDENT,
            )),
        ], [WARPS, 1], [232, 40])
    else:
        gl.warp_specialize([
            (_multiply, (
                code_ptr, scale_ptr, zero_ptr, high_ptr, block_ptr, outer_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, x_ring,
                full, empty, memory, written, taken, items, row_blocks, splits, runs, part_runs, strips, step, rows, outputs,
                0, PARTS, TOGETHER, BLOCK_ROWS, TILES, HALVES, STAGES, KIND, FORM, GROUP, DTYPE, SCALE_DTYPE, ZEROS, GATE, BIAS,
                OUTER, WARPS,
            )),
            (_fetch_rows, (
                x, x_ring, full, empty, items, row_blocks, splits, part_runs, BLOCK_ROWS, BLOCK, STAGES, DEPENDENT,
            )),
        ], [1], [40])


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
    places = plan.halves * (1 if plan.together else plan.parts)
    size = items * places * plan.warps * 16 * plan.block_rows if splits > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    described = TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [plan.block_rows, plan.tiles * 64], layout)
    packed_gemm_kernel[min(items, plan.programs * multiprocessors(x.device)),](
        described, weight.codes, weight.scale, weight.scale if weight.zero is None else weight.zero,
        weight.codes if weight.high is None else weight.high, weight.codes if weight.blocks is None else weight.blocks,
        weight.scale if weight.outer is None else weight.outer, x if bias is None else bias, out, parts, arrivals(x.device),
        items, row_blocks, splits, runs, part_runs, strips, plan.step, rows, outputs,
        BLOCK_ROWS=plan.block_rows, TILES=plan.tiles, PARTS=plan.parts, TOGETHER=plan.together,
        HALVES=plan.halves, STAGES=plan.stages, KIND=weight.kind, FORM=weight.form, GROUP=weight.group, DTYPE=NAMES[x.dtype],
        SCALE_DTYPE=SCALE_NAMES[weight.scale_dtype],
        ZEROS=weight.zero is not None, GATE=GATES[gate], BIAS=bias is not None, OUTER=weight.outer is not None,
        WARPS=plan.warps, num_warps=plan.warps, maxnreg=plan.registers(), **dependent_launch(x.device),
    )
    return out

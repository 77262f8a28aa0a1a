"""The products of experts with packed 4-bit weights (ops/packed/packed_weight.py, one matrix for each expert) on a Hopper GPU: a
grouped GEMM over the list of tiles of expert_tiles.py, with the loop of ops/packed/packed_gemm.py.

    gather  rows of x by expert: TMA reads tiles of neighbours
    up      rows times an expert's gates and their partners; the activation follows in the same registers
    down    activated rows times the expert's down projection; each result goes to its pair's place
    sum     as in expert_products.py

A tile of rows that is not full reads the rows of the next expert too, and writes none of them. Written in Gluon: the interpreter
and other devices take the tiles of expert_products.py, with codes as a checkpoint has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.expert_tiles import sorted_pairs, tile_at
from ridgeline.ops.hopper import (
    described,
    fetch,
    gl,
    mbarrier,
    ring_barriers,
    tiles_of,
    wait_for_kernel_before,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed.packed_asm import scale_words
from ridgeline.ops.packed.packed_gemm import _left_operand, _load_codes, _load_words
from ridgeline.ops.packed.packed_gemv import NAMES, SCALE_NAMES, widened
from ridgeline.ops.packed.packed_sizes import RUN
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.packed.select_packed import PackedGemmPlan
from ridgeline.ops.registry import gluon_kernel, tl, triton_kernel


@gluon_kernel()
def _fetch_rows(  # type: ignore[no-untyped-def]
    x, tiles_ptr, ring, full, empty, most, blocks,
    RUNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, NEIGHBOURS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """One warp: the rows' inputs of all items, once the kernel before this one has written them."""
    wait_for_kernel_before(DEPENDENT)
    number = gl.load(tiles_ptr + 3 * most)
    count = 0
    for item in range(gl.program_id(0), number * blocks, gl.num_programs(0)):
        _expert, place, _stop, _block = tile_at(tiles_ptr, item, number, blocks, NEIGHBOURS)
        for column in range(0, RUNS * 512, BLOCK):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), x.block_type.nbytes)
            fetch(x, [place, column], full.index(slot), ring.index(slot))
            count += 1


@gluon_kernel()
def _origin(  # type: ignore[no-untyped-def]
    tiles_ptr, item, number, blocks, strips, step, RUNS: gl.constexpr, NEIGHBOURS: gl.constexpr
):
    """(first run of an item among all experts' runs, how many strips of its expert follow the first). Of the last item, where
    there is no such item."""
    known = gl.maximum(gl.minimum(item, number * blocks - 1), 0)
    expert, _place, _stop, block = tile_at(tiles_ptr, known, gl.maximum(number, 1), blocks, NEIGHBOURS)
    strip = gl.maximum(expert, 0).to(gl.int64) * strips + block * step
    return strip * RUNS, strips - 1 - block * step


@gluon_kernel()
def _finish(  # type: ignore[no-untyped-def]
    sums, bias_ptr, out_ptr, order_ptr, expert, place, stop, block, strips, step, outputs, limit, alpha,
    layout: gl.constexpr, PLACE: gl.constexpr, BLOCK_ROWS: gl.constexpr, GATE: gl.constexpr, CLAMPED: gl.constexpr,
    BIAS: gl.constexpr, WARPS: gl.constexpr,
):
    """Write WARPS strips of one tile, the PLACE-th of its block of outputs."""
    line = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, layout))[:, None]
    number = PLACE * WARPS + line // 16
    strip = block * step + number
    there = (number < step) & (strip < strips)
    if GATE == 0:
        output = strip * 16 + line % 16
        if BIAS:
            sums += gl.load(bias_ptr + expert * outputs + output, mask=there & (output < outputs), other=0.0).to(gl.float32)
        at = place + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, layout))[None, :]
        pair = gl.load(order_ptr + at, mask=at < stop, other=0).to(gl.int64)
        wanted = there & (output < outputs) & (at < stop)
        gl.store(out_ptr + pair * outputs + output, sums.to(out_ptr.dtype.element_ty), mask=wanted)
    else:
        if BIAS:
            source = bias_ptr + expert * 2 * outputs + strip * 8 + line % 8 + line % 16 // 8 * outputs
            sums += gl.load(source, mask=there & (strip * 8 + line % 8 < outputs), other=0.0).to(gl.float32)
        gates, partners = sums.reshape([WARPS, 2, 8, BLOCK_ROWS]).permute([0, 2, 3, 1]).split()
        result = gated_sums(gates, partners, limit, alpha, GATE, CLAMPED)                # [WARPS, 8, rows]
        short: gl.constexpr = result.type.layout
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, short)))[:, None][:, :, None]
        eighth = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, short)))[None, :][:, :, None]
        row = place + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, gl.SliceLayout(1, short)))[None, :][:, None, :]
        among = PLACE * WARPS + warp
        output = (block * step + among) * 8 + eighth
        wanted = (among < step) & (block * step + among < strips) & (output < outputs) & (row < stop)
        gl.store(out_ptr + row.to(gl.int64) * outputs + output, result.to(out_ptr.dtype.element_ty), mask=wanted)


@gluon_kernel()
def _multiply(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, x_ring, full, empty,
    most, blocks, strips, step, outputs, limit, alpha,
    PART: gl.constexpr, RUNS: gl.constexpr, BLOCK_ROWS: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    ZEROS: gl.constexpr, GATE: gl.constexpr, CLAMPED: gl.constexpr, BIAS: gl.constexpr, NEIGHBOURS: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """WARPS warps: 16 WARPS HALVES outputs of every item."""
    BLOCKS: gl.constexpr = 8 // TILES                    # in a run of 512 inputs
    EACH: gl.constexpr = 128 // GROUP
    SCALES: gl.constexpr = scale_words(GROUP, SCALE_DTYPE)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_ROWS, 16])
    wait_for_kernel_before(DEPENDENT)
    tiles = gl.load(tiles_ptr + 3 * most)
    first = gl.program_id(0)
    ahead, room_ahead = _origin(tiles_ptr, first, tiles, blocks, strips, step, RUNS, NEIGHBOURS)
    next_codes = _load_codes(code_ptr, ahead * 1024, room_ahead, PART, RUNS, TILES, HALVES, WARPS)
    next_scales = _load_words(scale_ptr, ahead, 1, room_ahead, step, PART, RUNS, HALVES, SCALES, WARPS)
    next_zeros = next_scales
    if ZEROS:
        next_zeros = _load_words(zero_ptr, ahead, 1, room_ahead, step, PART, RUNS, HALVES, EACH, WARPS)
    count = 0
    for item in range(first, tiles * blocks, gl.num_programs(0)):
        origin, room = ahead, room_ahead
        ahead, room_ahead = _origin(
            tiles_ptr, item + gl.num_programs(0), tiles, blocks, strips, step, RUNS, NEIGHBOURS
        )
        sums = gl.zeros([16 * WARPS, BLOCK_ROWS], gl.float32, layout)
        other = sums
        for run in range(RUNS):
            last = run == RUNS - 1
            here = origin + run
            next_run = gl.where(last, ahead, here + 1)
            next_room = gl.where(last, room_ahead, room)
            scales = next_scales
            zeros = next_zeros
            next_scales = _load_words(scale_ptr, next_run, 1, next_room, step, PART, RUNS, HALVES, SCALES, WARPS)
            scales = widened(scales, 0, HALVES * SCALES, SCALE_DTYPE)
            if ZEROS:
                next_zeros = _load_words(zero_ptr, next_run, 1, next_room, step, PART, RUNS, HALVES, EACH, WARPS)
            else:
                next_zeros = next_scales
            for block in range(BLOCKS):
                codes = next_codes
                end = block == BLOCKS - 1
                start = gl.where(end, next_run * 1024, here * 1024 + (block + 1) * (TILES * 128))
                next_codes = _load_codes(
                    code_ptr, start, gl.where(end, next_room, room), PART, RUNS, TILES, HALVES, WARPS
                )
                part = block * (TILES // 2)
                slot = count % STAGES
                x = x_ring.index(slot)
                left = _left_operand(
                    codes[0], scales, zeros, part, layout, 0, 0, EACH, KIND, DTYPE, SCALE_DTYPE, ZEROS, WARPS
                )
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                for tile in gl.static_range(TILES):
                    right = x.slice(tile * 64, 64, dim=1).permute((1, 0))
                    sums = warpgroup_mma(left, right, sums, is_async=True)
                    if HALVES == 2:
                        second = _left_operand(
                            codes[TILES + tile], scales, zeros, part, layout, tile, 1, EACH, KIND, DTYPE, SCALE_DTYPE, ZEROS,
                            WARPS,
                        )
                        sums, left = warpgroup_mma_wait(0, deps=(sums, left))
                        other = warpgroup_mma(second, right, other, is_async=True)
                    following = left
                    if tile + 1 < TILES:
                        following = _left_operand(
                            codes[tile + 1], scales, zeros, part, layout, tile + 1, 0, EACH, KIND, DTYPE, SCALE_DTYPE, ZEROS,
                            WARPS,
                        )
                    if HALVES == 2:
                        other, second = warpgroup_mma_wait(0, deps=(other, second))
                    else:
                        sums, left = warpgroup_mma_wait(0, deps=(sums, left))
                    left = following
                mbarrier.arrive(empty.index(slot), count=1)
                count += 1
        expert, place, stop, outer = tile_at(tiles_ptr, item, tiles, blocks, NEIGHBOURS)
        _finish(
            sums, bias_ptr, out_ptr, order_ptr, expert, place, stop, outer, strips, step, outputs, limit, alpha, layout,
            PART * HALVES, BLOCK_ROWS, GATE, CLAMPED, BIAS, WARPS,
        )
        if HALVES == 2:
            _finish(
                other, bias_ptr, out_ptr, order_ptr, expert, place, stop, outer, strips, step, outputs, limit, alpha, layout,
                PART * HALVES + 1, BLOCK_ROWS, GATE, CLAMPED, BIAS, WARPS,
            )


@gluon_kernel(do_not_specialize=["most", "blocks", "strips", "step", "outputs"])
def packed_experts_kernel(  # type: ignore[no-untyped-def]
    x, code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, most, blocks, strips, step, outputs, limit, alpha,
    RUNS: gl.constexpr, BLOCK_ROWS: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr,
    ZEROS: gl.constexpr, GATE: gl.constexpr, CLAMPED: gl.constexpr, BIAS: gl.constexpr, NEIGHBOURS: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [pairs by expert, inputs] is a TMA descriptor, which fills in zeros beyond it. An item is a block of `step` strips of an
    expert and a tile of BLOCK_ROWS pairs. With a gate out is [pairs by expert, outputs], else [pairs, outputs]."""
    BLOCK: gl.constexpr = TILES * 64
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, BLOCK], x.layout)
    full, empty = ring_barriers(STAGES, PARTS)
    if PARTS == 2:
        gl.warp_specialize([
            (_multiply, (
                code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, x_ring, full, empty, most, blocks, strips,
                step, outputs, limit, alpha, 0, RUNS, BLOCK_ROWS, TILES, HALVES, STAGES, KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS,
                GATE, CLAMPED, BIAS, NEIGHBOURS, WARPS, DEPENDENT,
            )),
            (_multiply, (
                code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, x_ring, full, empty, most, blocks, strips,
                step, outputs, limit, alpha, 1, RUNS, BLOCK_ROWS, TILES, HALVES, STAGES, KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS,
                GATE, CLAMPED, BIAS, NEIGHBOURS, WARPS, DEPENDENT,
            )),
            (_fetch_rows, (x, tiles_ptr, x_ring, full, empty, most, blocks, RUNS, BLOCK, STAGES, NEIGHBOURS, DEPENDENT)),
        ], [WARPS, 1], [232, 40])
    else:
        gl.warp_specialize([
            (_multiply, (
                code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, x_ring, full, empty, most, blocks, strips,
                step, outputs, limit, alpha, 0, RUNS, BLOCK_ROWS, TILES, HALVES, STAGES, KIND, GROUP, DTYPE, SCALE_DTYPE, ZEROS,
                GATE, CLAMPED, BIAS, NEIGHBOURS, WARPS, DEPENDENT,
            )),
            (_fetch_rows, (x, tiles_ptr, x_ring, full, empty, most, blocks, RUNS, BLOCK, STAGES, NEIGHBOURS, DEPENDENT)),
        ], [1], [40])


@triton_kernel()
def _gather_pairs_kernel(  # type: ignore[no-untyped-def]
    x_ptr, order_ptr, out_ptr, stride, WIDTH: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA: a block of columns of one pair's row of x, to the pair's place among those sorted by expert."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    at = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.load(order_ptr + at) // USED).to(tl.int64)
    row = tl.load(x_ptr + token * stride + column, mask=column < WIDTH, other=0.0)
    tl.store(out_ptr + at * WIDTH + column, row, mask=column < WIDTH)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# By rows of a tile: parts, warps, halves, tiles, stages, CTAs per SM (benchmarks/studies/experts).
_SHAPES = {16: (1, 8, 1, 4, 8, 2), 32: (1, 8, 1, 4, 5, 2), 64: (1, 8, 1, 2, 6, 2), 128: (2, 4, 2, 2, 6, 1)}


def packed_tile_for(pairs: int, experts: int) -> PackedGemmPlan:
    """Room for more than the mean of pairs of an expert: one with two tiles is unpacked twice."""
    mean = pairs / min(pairs, experts)
    rows = 16 if mean <= 3 else 32 if mean <= 20 else 64 if mean <= 96 else 128
    parts, warps, halves, tiles, stages, programs = _SHAPES[rows]
    return PackedGemmPlan(rows, parts, warps, halves, tiles, stages, 1, parts * warps * halves, programs)


def _product(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, order: Tensor, tiles: Tensor, plan: PackedGemmPlan,
    kind: str | None, limit: float | None, alpha: float,
) -> None:
    """x [pairs by expert, inputs], into `out`."""
    pairs, inputs = x.shape
    strips = weight.codes.shape[1]
    blocks, most = cdiv(strips, plan.step), len(tiles) - 1
    source = described(x, (pairs, inputs), (inputs, 1), (plan.block_rows, plan.tiles * 64), tiles_of(128, 16, 2))
    packed_experts_kernel[min(most * blocks, plan.programs * multiprocessors(x.device)),](
        source, weight.codes, weight.scale, weight.scale if weight.zero is None else weight.zero, x if bias is None else bias,
        out, order, tiles, most, blocks, strips, plan.step, out.shape[1], float(limit or 0.0), float(alpha),
        RUNS=weight.codes.shape[2] * 64 // RUN, BLOCK_ROWS=plan.block_rows, TILES=plan.tiles, PARTS=plan.parts,
        HALVES=plan.halves, STAGES=plan.stages, KIND=weight.kind, GROUP=weight.group, DTYPE=NAMES[x.dtype],
        SCALE_DTYPE=SCALE_NAMES[weight.scale_dtype], ZEROS=weight.zero is not None, GATE=GATES[kind], CLAMPED=limit is not None,
        BIAS=bias is not None, NEIGHBOURS=8 if plan.block_rows == 128 else 1, WARPS=plan.warps, num_warps=plan.warps,
        maxnreg=plan.registers(), **dependent_launch(x.device),
    )


def packed_pairs(
    x: Tensor, gate_up: PackedWeight, down: PackedWeight, chosen: Tensor, kind: str, biases: tuple[Tensor | None, Tensor | None],
    limit: float | None, alpha: float, reads: Tensor | None, elsewhere: bool,
) -> Tensor:
    """[pairs, hidden]: each pair's result; zeros for those whose expert is elsewhere."""
    count, hidden = len(down.codes), x.shape[1]
    pairs, used = chosen.numel(), chosen.shape[1]
    plan = packed_tile_for(pairs, count)
    order, tiles = sorted_pairs(chosen, count, plan.block_rows, reads, elsewhere)
    rows = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    block = min(1024, power_of_two(hidden))
    _gather_pairs_kernel[pairs * cdiv(hidden, block),](
        x, order, rows, x.stride(0), WIDTH=hidden, USED=used, BLOCK=block, num_warps=4, **dependent_launch(x.device)
    )
    inner = torch.empty((pairs, down.inputs), dtype=x.dtype, device=x.device)
    _product(rows, gate_up, biases[0], inner, order, tiles, plan, kind, limit, alpha)
    results = rows.zero_() if elsewhere else rows        # the gathered rows have been read
    _product(inner, down, biases[1], results, order, tiles, plan, None, None, 0.0)
    return results

"""GEMM for 81 to 128 rows (fp8: 65 to 128): persistent, warp-specialised CTAs whose weight ring is full before x is there.

One warp loads weights by TMA without any wait, so the ring fills while the kernel before this one still runs. Another warp
does the PDL wait and loads the rows of x. Two warpgroups multiply 64 rows each by the same weights. Tiles are wide in
outputs, because every tile reads all of x again. Where there are too few tiles, the inputs are split (split-K): every CTA of
a tile writes its part, waits for the others, and adds its share of the outputs, always in the same order.

Written in Gluon, which the interpreter does not support; there, and on other devices, cuBLAS runs. What was measured, and what
was slower: docs/lab/kernels.md.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ridgeline.ops.hopper import (
    HAS_GLUON,
    described,
    fetch,
    gl,
    group_barrier,
    is_hopper,
    mbarrier,
    ring_barriers,
    tiles_of,
    viewed,
    wait_for_kernel_before,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.linear.select_wide import WidePlan
from ridgeline.ops.registry import gluon_kernel, triton

if HAS_GLUON:

    @triton.constexpr_function
    def _line_layout(width):  # type: ignore[no-untyped-def]
        """Of 64 rows: wgmma's accumulator layout, but with eight neighbours of a row in one lane."""
        registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 1 << bit] for bit in range(5, width.bit_length() - 1)]
        lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])

# Neighbouring blocks of the same weight rows are requested together. One at a time is slower, and so are four: too many stages
# of a ring of five then wait for each other.
RUN = 2
BOX = 32                             # weight rows of one TMA load; with a gate 16 pairs
MOST_TILES = 128                     # with split-K: two arrival counters each, for every number of splits
REGISTERS = 168                      # of each of 384 threads, before the loading warps give most of theirs away


# ── the warps that fetch ─────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel()
def _runs(item, blocks, SPLITS: gl.constexpr, RUN: gl.constexpr):  # type: ignore[no-untyped-def]
    """How many runs of blocks an item has. The splits of a tile take runs in turn, so that they read neighbouring memory."""
    return (gl.cdiv(blocks, RUN) - item % SPLITS + SPLITS - 1) // SPLITS


@gluon_kernel()
def _fetch_weights(  # type: ignore[no-untyped-def]
    weight, ring, full, empty, items, blocks,
    PAIRS: gl.constexpr, STEP: gl.constexpr, BOX: gl.constexpr, PLACES: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, RUN: gl.constexpr, LINE: gl.constexpr,
):
    """One warp: weights of all items. With PAIRS a box has BOX / 2 gates and their partners."""
    cube: gl.constexpr = gl.NVMMASharedLayout(128, 1024 // LINE, rank=3)
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = item // SPLITS
        for number in range(_runs(item, blocks, SPLITS, RUN)):
            block = (number * SPLITS + item % SPLITS) * RUN
            for part in gl.static_range(RUN):
                slot = (count + part) % STAGES
                mbarrier.wait(empty.index(slot), (((count + part) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), STEP * 128)
            for box in gl.static_range(STEP // BOX):
                for part in gl.static_range(RUN):
                    slot = (count + part) % STAGES
                    place = ring.index(slot * PLACES + box)
                    column = (block + part) * LINE
                    if PAIRS:
                        target = viewed(place, weight.dtype, [2, BOX // 2, LINE], cube)
                        fetch(weight, [0, tile * (STEP // 2) + box * (BOX // 2), column], full.index(slot), target)
                    else:
                        fetch(weight, [tile * STEP + box * BOX, column], full.index(slot), place)
            count += RUN


@gluon_kernel()
def _fetch_rows(  # type: ignore[no-untyped-def]
    x, ring, full, empty, items, blocks, SPLITS: gl.constexpr, STAGES: gl.constexpr, RUN: gl.constexpr,
    LINE: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """One warp: the rows' inputs of all items, once the kernel before this one has written them."""
    wait_for_kernel_before(DEPENDENT)
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for number in range(_runs(item, blocks, SPLITS, RUN)):
            block = (number * SPLITS + item % SPLITS) * RUN
            for part in gl.static_range(RUN):
                slot = (count + part) % STAGES
                mbarrier.wait(empty.index(slot), (((count + part) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), 2 * 64 * 128)
                for half in gl.static_range(2):
                    fetch(x, [half * 64, (block + part) * LINE], full.index(slot), ring.index(slot * 2 + half))
            count += RUN


# ── the warps that compute ───────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel()
def _write(  # type: ignore[no-untyped-def]
    sums, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, tile, rows, outputs,
    FIRST: gl.constexpr, STEP: gl.constexpr, SKIPPED: gl.constexpr, BOX: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    SCALED: gl.constexpr, BLOCK_SCALED: gl.constexpr, LINE: gl.constexpr,
):
    """Epilogue of one warpgroup's tile, or of the part of it behind SKIPPED weight rows. Lanes exchange results until each has
    eight neighbours of a row, so that whole sectors are written."""
    EACH: gl.constexpr = 1 if GATE == 0 else 2           # weight rows of an output
    WIDTH: gl.constexpr = sums.shape[1] // EACH
    MOST: gl.constexpr = (STEP - SKIPPED) // EACH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, LINE // 4])
    begin = tile * (STEP // EACH) + SKIPPED // EACH
    place = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    output = begin + place
    live = (place < MOST) & (output < outputs)
    if GATE == 0:
        result = sums
    else:
        gates, partners = sums.reshape([64, 2 * WIDTH // BOX, 2, BOX // 2]).permute([0, 1, 3, 2]).split()
        result = gl.convert_layout(gates.reshape([64, WIDTH]), layout)
        other = gl.convert_layout(partners.reshape([64, WIDTH]), layout)
    if SCALED:                                           # with scales of blocks there is no gate
        token = FIRST + gl.arange(0, 64, gl.SliceLayout(1, layout))
        row_scale = gl.load(x_scale_ptr + token, mask=token < rows, other=0.0)[:, None]
        if BLOCK_SCALED == 0:
            result *= gl.load(scale_ptr + output, mask=live, other=0.0)[None, :]
        result *= row_scale
        if GATE != 0:
            other *= gl.load(scale_ptr + (outputs + output), mask=live, other=0.0)[None, :]
            other *= row_scale
    if BIAS:
        result += gl.load(bias_ptr + output, mask=live, other=0.0).to(gl.float32)[None, :]
    if GATE != 0:
        if BIAS:
            other += gl.load(bias_ptr + outputs + output, mask=live, other=0.0).to(gl.float32)[None, :]
        result = activated(result, GATE) * other
    lines: gl.constexpr = _line_layout(WIDTH)
    row = FIRST + gl.arange(0, 64, gl.SliceLayout(1, lines))
    place = gl.arange(0, WIDTH, gl.SliceLayout(0, lines))
    output = begin + place
    wanted = (row < rows)[:, None] & ((place < MOST) & (output < outputs))[None, :]
    target = out_ptr + row[:, None] * outputs + output[None, :]          # 128 rows: 32 bits are enough
    gl.store(target, gl.convert_layout(result.to(out_ptr.dtype.element_ty), lines), mask=wanted)


@gluon_kernel()
def _add_parts(  # type: ignore[no-untyped-def]
    sums, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, tile, split, rows, outputs,
    FIRST: gl.constexpr, STEP: gl.constexpr, SPLITS: gl.constexpr, MOST_TILES: gl.constexpr, BIAS: gl.constexpr,
    SCALED: gl.constexpr, BLOCK_SCALED: gl.constexpr, LINE: gl.constexpr,
):
    """Epilogue with split-K: write the part, wait for the others, add a share of the outputs.

    All CTAs run at once, so waiting is safe. A part lies in memory as [outputs / 8, rows, 8]: the lanes' values side by side.
    Counters keep counting from launch to launch.
    """
    TILE: gl.constexpr = sums.shape[1]
    SHARE: gl.constexpr = TILE // SPLITS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, LINE // 4])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    parts = part_ptr + ((tile * 2 + FIRST // 64) * SPLITS).to(gl.int64) * (64 * TILE)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    gl.store(parts + split * (64 * TILE) + (column // 8 * 512 + column % 8)[None, :] + row[:, None] * 8, sums)
    group_barrier()                                      # every thread's part is written before the arrival is
    counter = arrived_ptr + (SPLITS * MOST_TILES + tile) * 2 + FIRST // 64
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    all_there = (before & -SPLITS) + SPLITS
    seen = before + 1
    while seen - all_there < 0:
        seen = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    group_barrier()
    row = gl.arange(0, 64, gl.SliceLayout(1, wide))
    column = split * SHARE + gl.arange(0, SHARE, gl.SliceLayout(0, wide))
    source = parts + (column // 8 * 512 + column % 8)[None, :] + row[:, None] * 8
    total = gl.load(source, cache_modifier=".cg")
    for other in gl.static_range(1, SPLITS):
        total += gl.load(source + other * (64 * TILE), cache_modifier=".cg")
    output = tile * STEP + column
    live = (column < STEP) & (output < outputs)
    if SCALED:
        if BLOCK_SCALED == 0:
            total *= gl.load(scale_ptr + output, mask=live, other=0.0)[None, :]
        total *= gl.load(x_scale_ptr + FIRST + row, mask=FIRST + row < rows, other=0.0)[:, None]
    if BIAS:
        total += gl.load(bias_ptr + output, mask=live, other=0.0).to(gl.float32)[None, :]
    target = out_ptr + (FIRST + row)[:, None] * outputs + output[None, :]
    gl.store(target, total.to(out_ptr.dtype.element_ty), mask=(FIRST + row < rows)[:, None] & live[None, :])


@gluon_kernel()
def _multiply(  # type: ignore[no-untyped-def]
    ring, row_ring, full, empty, row_full, row_empty, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
    items, blocks, rows, outputs, scale_stride,
    FIRST: gl.constexpr, TILE: gl.constexpr, STEP: gl.constexpr, BOX: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, RUN: gl.constexpr, MOST_TILES: gl.constexpr, GATE: gl.constexpr,
    BIAS: gl.constexpr, SCALED: gl.constexpr, BLOCK_SCALED: gl.constexpr, LINE: gl.constexpr,
):
    """Four warps: rows FIRST to FIRST + 64 of every item.

    SCALED: 8-bit codes. The tensor cores truncate sums of e4m3 products to about 11 bits, so the products of a block are summed
    on their own, and these sums are added in float32; with BLOCK_SCALED each is multiplied by the scale of its block first. Sums
    of int8 products are exact. Registers have no room for two sums of 256 weight rows, and the compiler no product of int8 codes
    with them: such a tile has HALVES.
    """
    LINES: gl.constexpr = SCALED and ring.dtype != gl.int8
    HALVES: gl.constexpr = 2 if SCALED and TILE == 256 else 1
    WIDTH: gl.constexpr = TILE // HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, LINE // 4])
    weights = viewed(ring, ring.dtype, [STAGES * HALVES, WIDTH, LINE], gl.NVMMASharedLayout(128, 1024 // LINE, rank=2))
    count = 0
    sums = gl.zeros([64, WIDTH], gl.int32 if ring.dtype == gl.int8 else gl.float32, layout)
    part = sums
    rest = sums                                          # of the second half
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for block in range(_runs(item, blocks, SPLITS, RUN) * RUN):
            slot = count % STAGES
            row_slot = count % ROW_STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            mbarrier.wait(row_full.index(row_slot), (count // ROW_STAGES) & 1)
            left = row_ring.index(row_slot * 2 + FIRST // 64)
            right = weights.index(slot * HALVES).permute([1, 0])
            # Waiting at once frees the blocks a turn earlier; the other warpgroup keeps the tensor cores busy meanwhile.
            if LINES:
                if BLOCK_SCALED > 0:
                    line = (block // RUN * SPLITS + item % SPLITS) * RUN + block % RUN
                    scale = gl.load(
                        scale_ptr + item // SPLITS * STEP // BLOCK_SCALED * scale_stride + line, mask=line < blocks, other=0.0
                    )
                running = warpgroup_mma(left, right, part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[running])
                if HALVES == 2:
                    sums += part
                    right = weights.index(slot * 2 + 1).permute([1, 0])
                    running = warpgroup_mma(left, right, part, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, deps=[running])
            else:
                running = warpgroup_mma(left, right, sums, use_acc=block > 0, is_async=True)
                if HALVES == 2:
                    right = weights.index(slot * 2 + 1).permute([1, 0])
                    second = warpgroup_mma(left, right, rest, use_acc=block > 0, is_async=True)
                    sums, rest = warpgroup_mma_wait(0, deps=[running, second])
                else:
                    sums = warpgroup_mma_wait(0, deps=[running])
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(row_empty.index(row_slot), count=1)
            count += 1
            if LINES:
                if HALVES == 2:
                    rest += part
                elif BLOCK_SCALED > 0:
                    sums += part * scale
                else:
                    sums += part
        if SPLITS > 1:
            _add_parts(
                sums.to(gl.float32), x_scale_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, item // SPLITS,
                item % SPLITS, rows, outputs, FIRST, STEP, SPLITS, MOST_TILES, BIAS, SCALED, BLOCK_SCALED, LINE,
            )
        else:
            _write(
                sums.to(gl.float32), x_scale_ptr, scale_ptr, bias_ptr, out_ptr, item, rows, outputs, FIRST, STEP, 0, BOX, GATE,
                BIAS, SCALED, BLOCK_SCALED, LINE,
            )
            if HALVES == 2:
                _write(
                    rest.to(gl.float32), x_scale_ptr, scale_ptr, bias_ptr, out_ptr, item, rows, outputs, FIRST, STEP, WIDTH, BOX,
                    GATE, BIAS, SCALED, BLOCK_SCALED, LINE,
                )
        if LINES:
            sums = gl.zeros([64, WIDTH], gl.float32, layout)
            rest = sums


# ── the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


@gluon_kernel(do_not_specialize=["items", "blocks", "rows"])
def wide_gemm_kernel(  # type: ignore[no-untyped-def]
    x, weight, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, items, blocks, rows, outputs, scale_stride,
    TILE: gl.constexpr, STEP: gl.constexpr, BOX: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr, RUN: gl.constexpr, MOST_TILES: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    SCALED: gl.constexpr, BLOCK_SCALED: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [rows, inputs] and weight [outputs, inputs] or [2, outputs, inputs] are TMA descriptors; TMA fills in zeros beyond them.
    An item is one split of one tile; with split-K every CTA has at most one. Rows of the ring beyond STEP are not used, and
    neither are their sums."""
    LINE: gl.constexpr = 128 if SCALED else 64           # inputs in 128 bytes: the pattern in which tensor cores read
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 1024 // LINE, rank=2)
    ring = gl.allocate_shared_memory(x.dtype, [STAGES * (TILE // BOX), BOX, LINE], flat)
    row_ring = gl.allocate_shared_memory(x.dtype, [ROW_STAGES * 2, 64, LINE], flat)
    full, empty = ring_barriers(STAGES, 2)
    row_full, row_empty = ring_barriers(ROW_STAGES, 2)
    gl.warp_specialize([
        (_multiply, (
            ring, row_ring, full, empty, row_full, row_empty, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
            items, blocks, rows, outputs, scale_stride, 0, TILE, STEP, BOX, SPLITS, STAGES, ROW_STAGES, RUN, MOST_TILES, GATE,
            BIAS, SCALED, BLOCK_SCALED, LINE,
        )),
        (_multiply, (
            ring, row_ring, full, empty, row_full, row_empty, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
            items, blocks, rows, outputs, scale_stride, 64, TILE, STEP, BOX, SPLITS, STAGES, ROW_STAGES, RUN, MOST_TILES, GATE,
            BIAS, SCALED, BLOCK_SCALED, LINE,
        )),
        (_fetch_weights, (
            weight, ring, full, empty, items, blocks, GATE != 0, STEP, BOX, TILE // BOX, SPLITS, STAGES, RUN, LINE,
        )),
        (_fetch_rows, (x, row_ring, row_full, row_empty, items, blocks, SPLITS, ROW_STAGES, RUN, LINE, DEPENDENT)),
    ], [4, 1, 1], [232, 40, 40])


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters of the splits that have ever arrived. Only one stream may use them."""
    return torch.zeros(2 * 9 * MOST_TILES, dtype=torch.int32, device=device)


def prepare(device: torch.device) -> None:
    """Allocates the counters before the first CUDA graph: memory allocated during a capture belongs to that graph."""
    if HAS_GLUON and is_hopper(device):
        _arrivals(device)


def wide_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: WidePlan, *, gate: str | None = None,
    scales: tuple[Tensor, Tensor] | None = None, dtype: torch.dtype | None = None,
) -> Tensor:
    """x [rows, inputs] -> [rows, outputs], of x's dtype or `dtype`. 16-bit numbers, or 8-bit codes with `scales`: float32, of the
    rows of x and of the outputs, or without a gate of blocks of 128 outputs and 128 inputs. e4m3 codes with scales of blocks have
    tiles of 128."""
    rows, inputs = x.shape
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    tiles = cdiv(outputs, plan.step if gate is None else plan.step // 2)
    parts = arrived = out
    if plan.splits > 1:
        parts = torch.empty(tiles * plan.splits * 128 * plan.tile, dtype=torch.float32, device=x.device)
        arrived = _arrivals(x.device)
    bits, line = 8 * x.element_size(), 128 // x.element_size()
    flat = tiles_of(128, bits, 2)
    if gate is None:
        weights = described(weight, (outputs, inputs), (inputs, 1), (BOX, line), flat)
    else:
        strides = (outputs * inputs, inputs, 1)
        weights = described(weight, (2, outputs, inputs), strides, (2, BOX // 2, line), tiles_of(128, bits, 3))
    items = tiles * plan.splits
    x_scale, scale = scales or (out, out)
    blocks = scales is not None and scale.dim() == 2
    wide_gemm_kernel[min(items, multiprocessors(x.device)),](
        described(x, (rows, inputs), (x.stride(0), 1), (64, line), flat), weights, x_scale, scale,
        out if bias is None else bias, out, parts, arrived, items, cdiv(inputs, line), rows, outputs,
        scale.stride(0) if blocks else 0,
        TILE=plan.tile, STEP=plan.step, BOX=BOX, SPLITS=plan.splits, STAGES=plan.stages, ROW_STAGES=plan.row_stages, RUN=RUN,
        MOST_TILES=MOST_TILES, GATE=GATES[gate], BIAS=bias is not None, SCALED=scales is not None,
        BLOCK_SCALED=128 if blocks else 0,
        num_warps=4, maxnreg=REGISTERS, **dependent_launch(x.device),
    )
    return out

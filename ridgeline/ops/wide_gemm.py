"""65 to 256 rows times a weight matrix: a ring of weights that is full before the rows are there.

A program stays on its multiprocessor. One warp asks for weights and waits for nobody: what fits into its ring is on its way
while the kernel before this one still runs. Another warp waits for that kernel and asks for rows; two groups of four warps
multiply, each its half of the rows, by the same weights. A tile is wide in outputs, since every tile reads all rows again.
Where outputs alone make too few tiles, inputs are split: every program of a tile writes its part, and when all are there adds
up one share of the tile, always in the same order.

Written in Gluon, which the interpreter does not know; there, and on other devices, others multiply (linear_plan.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.ops.attention_tma import HAS_GLUON
from ridgeline.ops.gemv import GATES
from ridgeline.ops.launch import dependent_launch, multiprocessors, shared_memory
from ridgeline.ops.registry import gluon_kernel, triton

if HAS_GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ridgeline.ops.attention_tma import fetch, group_barrier, viewed
else:
    gl = mbarrier = None

BLOCK_INPUTS = 64                    # 128 bytes of a row: the pattern in which tensor cores read shared memory
MOST_ROWS = 256
MOST_COUNTERS = 256                  # for each number of splits
REGISTERS = 168                      # of each of 384 threads, before those that only ask give most of theirs away


@dataclass(frozen=True, slots=True)
class WidePlan:
    tile: int                        # weight rows of a tile: 256 for up to 128 rows, 128 for more
    step: int                        # of them in use: outputs, or with a gate pairs times two
    box: int                         # weight rows that one instruction of the copy engine brings
    splits: int                      # of the inputs
    stages: int                      # blocks of weights on their way
    row_stages: int                  # blocks of rows on their way
    turn: int = 0                    # blocks of inputs by which a tile begins later than the tile before it
    run: int = 1                     # blocks of inputs that are asked for together
    lines: bool = True               # room for exchanging results between lanes
    late: bool = False               # the next kernel may start when all rows have been asked for, not before


if HAS_GLUON:

    @triton.constexpr_function
    def _line_layout(rows, width):  # type: ignore[no-untyped-def]
        """As the product leaves its sums, but eight neighbours of a row in one lane."""
        registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
        registers += [[0, 1 << bit] for bit in range(5, width.bit_length() - 1)]
        registers += [[1 << bit, 0] for bit in range(6, rows.bit_length() - 1)]
        lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, width])


@gluon_kernel()
def _span(item, blocks, SPLITS: gl.constexpr, TURN: gl.constexpr, RUN: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of an item: its tile, its first run of RUN blocks of inputs, how many runs it has, and with which of them it begins:
    programs that run at the same time do not all ask for the same rows' inputs. Parts of a tile have runs in turn, so that
    what they read at the same time lies together."""
    split = item % SPLITS
    tile = item // SPLITS
    runs = (gl.cdiv(blocks, RUN) - split + SPLITS - 1) // SPLITS
    return tile, split, runs, (tile * TURN) % runs


@gluon_kernel()
def _fetch_weights(  # type: ignore[no-untyped-def]
    weight, ring, full, empty, items, blocks,
    PAIRS: gl.constexpr, STEP: gl.constexpr, BOX: gl.constexpr, PLACES: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, TURN: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """One warp: weights of all items. With PAIRS a box has BOX / 2 gates and their partners. A run's boxes of the same
    weight rows are asked for together: the memory likes long rows."""
    BOXES: gl.constexpr = STEP // BOX
    cube: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, split, runs, turn = _span(item, blocks, SPLITS, TURN, RUN)
        for number in range(runs):
            block = ((number + turn) % runs * SPLITS + split) * RUN
            for part in gl.static_range(RUN):
                slot = (count + part) % STAGES
                mbarrier.wait(empty.index(slot), (((count + part) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), STEP * 64 * 2)
            for box in gl.static_range(BOXES):
                for part in gl.static_range(RUN):
                    slot = (count + part) % STAGES
                    place = ring.index(slot * PLACES + box)
                    column = (block + part) * 64
                    if PAIRS:
                        target = viewed(place, weight.dtype, [2, BOX // 2, 64], cube)
                        fetch(weight, [0, tile * (STEP // 2) + box * (BOX // 2), column], full.index(slot), target)
                    else:
                        fetch(weight, [tile * STEP + box * BOX, column], full.index(slot), place)
            count += RUN


@gluon_kernel()
def _fetch_rows(  # type: ignore[no-untyped-def]
    x, ring, full, empty, items, blocks,
    ROW_BOXES: gl.constexpr, PLACES: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
    TURN: gl.constexpr, RUN: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One warp: the rows' inputs of all items, 64 rows at a time, once the kernel before this one has written them."""
    if DEPENDENT:
        if not LATE:
            gl.inline_asm_elementwise(
                "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _tile, split, runs, turn = _span(item, blocks, SPLITS, TURN, RUN)
        for number in range(runs):
            block = ((number + turn) % runs * SPLITS + split) * RUN
            for part in gl.static_range(RUN):
                slot = (count + part) % STAGES
                mbarrier.wait(empty.index(slot), (((count + part) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), ROW_BOXES * 64 * 64 * 2)
                for box in gl.static_range(ROW_BOXES):
                    fetch(x, [box * 64, (block + part) * 64], full.index(slot), ring.index(slot * PLACES + box))
            count += RUN
    if DEPENDENT:
        if LATE:
            gl.inline_asm_elementwise(
                "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip


@gluon_kernel()
def _activated(sums, other, GATE: gl.constexpr):  # type: ignore[no-untyped-def]
    if GATE == 1:
        sums = sums / (1.0 + gl.exp(-sums))
    elif GATE == 2:                                      # 1 + tanh(z) is 2 sigmoid(2 z)
        sums = sums / (1.0 + gl.exp(-1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)))
    else:
        sums = 0.5 * sums * (1.0 + gl.erf(sums * 0.7071067811865476))
    return sums * other


@gluon_kernel()
def _write(  # type: ignore[no-untyped-def]
    result, out_ptr, first_output, width, rows, outputs, FIRST: gl.constexpr, LINES: gl.constexpr, plain: gl.constexpr
):  # fmt: skip
    """Sums of one group as whole sectors: lanes exchange what they hold until each has eight neighbours of a row."""
    ROWS: gl.constexpr = result.shape[0]
    WIDTH: gl.constexpr = result.shape[1]
    layout: gl.constexpr = _line_layout(ROWS, WIDTH) if LINES else plain
    row = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    own = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    narrow = gl.convert_layout(result.to(out_ptr.dtype.element_ty), layout)
    target = out_ptr + row.to(gl.int64)[:, None] * outputs + (first_output + own)[None, :]
    gl.store(target, narrow, mask=(row < rows)[:, None] & ((own < width) & (first_output + own < outputs))[None, :])


@gluon_kernel()
def _add_parts(  # type: ignore[no-untyped-def]
    sums, part_ptr, arrived_ptr, bias_ptr, out_ptr, tile, split, rows, outputs,
    FIRST: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, STEP: gl.constexpr, SPLITS: gl.constexpr,
    TALL: gl.constexpr, BIAS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """This group's rows of a tile whose inputs are split: written, waited for, and a share of the outputs added up."""
    SHARE: gl.constexpr = TILE // SPLITS                 # outputs that a program adds up
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (SHARE // 4), SHARE // 4], [4, 1], [1, 0])
    row = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    parts = part_ptr + tile.to(gl.int64) * (SPLITS * TALL * TILE)
    gl.store(parts + (split * TALL + row)[:, None] * TILE + column[None, :], sums)
    group_barrier()
    counter = arrived_ptr + SPLITS * 256 + tile * 2 + gl.where(FIRST > 0, 1, 0)
    seen = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    wanted_count = (seen & -SPLITS) + SPLITS             # counters go on from launch to launch, and around
    seen += 1
    while seen - wanted_count < 0:
        seen = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    group_barrier()
    own_row = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    own = split * SHARE + gl.arange(0, SHARE, gl.SliceLayout(0, wide))
    place = own_row[:, None] * TILE + own[None, :]
    total = gl.load(parts + place, cache_modifier=".cg")
    for other in gl.static_range(1, SPLITS):
        total += gl.load(parts + other * TALL * TILE + place, cache_modifier=".cg")
    output = tile * STEP + own
    live = (own < STEP) & (output < outputs)
    if BIAS:
        total += gl.load(bias_ptr + output, mask=live, other=0.0).to(gl.float32)[None, :]
    target = out_ptr + own_row.to(gl.int64)[:, None] * outputs + output[None, :]
    gl.store(target, total.to(out_ptr.dtype.element_ty), mask=(own_row < rows)[:, None] & live[None, :])


@gluon_kernel()
def _multiply(  # type: ignore[no-untyped-def]
    ring, row_ring, full, empty, row_full, row_empty, out_ptr, bias_ptr, part_ptr, arrived_ptr, items, blocks, rows, outputs,
    FIRST: gl.constexpr, ROWS: gl.constexpr, TALL: gl.constexpr, TILE: gl.constexpr, STEP: gl.constexpr, BOX: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    TURN: gl.constexpr, RUN: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """Four warps: rows FIRST to FIRST + ROWS of every item."""
    dtype: gl.constexpr = ring.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    weights = viewed(ring, dtype, [STAGES, TILE, 64], flat)
    ROOM: gl.constexpr = 128 if TALL == 128 else 256
    lines = viewed(row_ring, dtype, [ROW_STAGES * ROOM // ROWS, ROWS, 64], flat)
    count = 0
    sums = gl.zeros([ROWS, TILE], gl.float32, layout)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, _split, runs, _turn = _span(item, blocks, SPLITS, TURN, RUN)
        for block in range(runs * RUN):
            slot = count % STAGES
            row_slot = count % ROW_STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            mbarrier.wait(row_full.index(row_slot), (count // ROW_STAGES) & 1)
            left = lines.index((row_slot * ROOM + FIRST) // ROWS)
            running = warpgroup_mma(left, weights.index(slot).permute([1, 0]), sums, use_acc=block > 0, is_async=True)
            # Waiting at once frees the blocks a turn earlier; meanwhile the other group multiplies.
            sums = warpgroup_mma_wait(0, deps=[running])
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(row_empty.index(row_slot), count=1)
            count += 1
        if SPLITS > 1:
            _add_parts(
                sums, part_ptr, arrived_ptr, bias_ptr, out_ptr, tile, item % SPLITS, rows, outputs, FIRST, ROWS, TILE, STEP,
                SPLITS, TALL, BIAS, layout,
            )  # fmt: skip
        else:
            if GATE != 0:
                WIDTH: gl.constexpr = TILE // 2
                half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
                gates, partners = sums.reshape([ROWS, TILE // BOX, 2, BOX // 2]).permute([0, 1, 3, 2]).split()
                result = gl.convert_layout(gates.reshape([ROWS, WIDTH]), half)
                other = gl.convert_layout(partners.reshape([ROWS, WIDTH]), half)
                own = gl.arange(0, WIDTH, gl.SliceLayout(0, half))
                output = tile * (STEP // 2) + own
                live = (own < STEP // 2) & (output < outputs)
                if BIAS:
                    result += gl.load(bias_ptr + output, mask=live, other=0.0).to(gl.float32)[None, :]
                    other += gl.load(bias_ptr + outputs + output, mask=live, other=0.0).to(gl.float32)[None, :]
                _write(_activated(result, other, GATE), out_ptr, tile * (STEP // 2), STEP // 2, rows, outputs, FIRST, LINES, half)
            else:
                own = gl.arange(0, TILE, gl.SliceLayout(0, layout))
                output = tile * STEP + own
                live = (own < STEP) & (output < outputs)
                result = sums
                if BIAS:
                    result += gl.load(bias_ptr + output, mask=live, other=0.0).to(gl.float32)[None, :]
                _write(result, out_ptr, tile * STEP, STEP, rows, outputs, FIRST, LINES, layout)


@gluon_kernel(do_not_specialize=["items", "blocks", "rows"])
def wide_gemm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out_ptr, bias_ptr, part_ptr, arrived_ptr, items, blocks, rows, outputs,
    TALL: gl.constexpr, UPPER: gl.constexpr, TILE: gl.constexpr, STEP: gl.constexpr, BOX: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, LATE: gl.constexpr,
    TURN: gl.constexpr, RUN: gl.constexpr, LINES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """x [rows, inputs] and weight [outputs, inputs] or [2, outputs, inputs] are descriptors of the copy engine, which fills
    in zeros beyond them. The first group has UPPER of TALL rows, the second the others. An item is one part of one tile.
    What lies in the ring beyond STEP is nobody's, and so are the sums with it."""
    dtype: gl.constexpr = x.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(dtype, [STAGES * (TILE // BOX), BOX, 64], flat)
    PLACES: gl.constexpr = 2 if TALL == 128 else 4       # of 64 rows; a group's 128 begin at a multiple of 128
    row_ring = gl.allocate_shared_memory(dtype, [ROW_STAGES * PLACES, 64, 64], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    row_full = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], barrier)
    row_empty = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(ROW_STAGES):
        mbarrier.init(row_full.index(i), count=1)
        mbarrier.init(row_empty.index(i), count=2)
    gl.warp_specialize([
        (_multiply, (
            ring, row_ring, full, empty, row_full, row_empty, out_ptr, bias_ptr, part_ptr, arrived_ptr, items, blocks, rows,
            outputs, 0, UPPER, TALL, TILE, STEP, BOX, SPLITS, STAGES, ROW_STAGES, GATE, BIAS, TURN, RUN, LINES,
        )),
        (_multiply, (
            ring, row_ring, full, empty, row_full, row_empty, out_ptr, bias_ptr, part_ptr, arrived_ptr, items, blocks, rows,
            outputs, UPPER, TALL - UPPER, TALL, TILE, STEP, BOX, SPLITS, STAGES, ROW_STAGES, GATE, BIAS, TURN, RUN, LINES,
        )),
        (_fetch_weights, (
            weight, ring, full, empty, items, blocks, GATE != 0, STEP, BOX, TILE // BOX, SPLITS, STAGES, TURN, RUN,
        )),
        (_fetch_rows, (
            x, row_ring, row_full, row_empty, items, blocks, TALL // 64, PLACES, SPLITS, ROW_STAGES, LATE, TURN, RUN, DEPENDENT,
        )),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters that every launch leaves at zero. One stream at a time may use them."""
    return torch.zeros(9 * MOST_COUNTERS, dtype=torch.int32, device=device)


def wide_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, plan: WidePlan, *, gate: str | None = None) -> Tensor:
    """x [rows, inputs] -> [rows, outputs]"""
    rows, inputs = x.shape
    flat, cube = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(128, 16, rank=3)
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    step = plan.step if gate is None else plan.step // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tall = 64 * -(-rows // 64)
    tiles = -(-outputs // step)
    items = tiles * plan.splits
    parts = arrived = out
    if plan.splits > 1:
        parts = torch.empty(items * tall * plan.tile, dtype=torch.float32, device=x.device)
        arrived = _arrivals(x.device)
    if gate is None:
        described = TensorDescriptor(weight, [outputs, inputs], [inputs, 1], [plan.box, 64], flat)
    else:
        described = TensorDescriptor(
            weight, [2, outputs, inputs], [outputs * inputs, inputs, 1], [2, plan.box // 2, 64], cube
        )
    wide_gemm_kernel[min(items, multiprocessors(x.device)),](
        TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [64, 64], flat), described, out,
        out if bias is None else bias, parts, arrived, items, -(-inputs // BLOCK_INPUTS), rows, outputs,
        TALL=tall, UPPER=64 if tall == 128 else 128, TILE=plan.tile, STEP=plan.step, BOX=plan.box, SPLITS=plan.splits,
        STAGES=plan.stages, ROW_STAGES=plan.row_stages, GATE=GATES[gate], BIAS=bias is not None, LATE=plan.late, TURN=plan.turn, RUN=plan.run, LINES=plan.lines,
        num_warps=4, maxnreg=REGISTERS, **dependent_launch(x.device),
    )  # fmt: skip
    return out

"""GEMM for a few rows, fused with the gated activation behind it: a tile covers all rows of x, so every weight is read once.

Where the outputs alone make too few tiles to keep every SM reading, the inputs are split, too (split-K); the CTA that
arrives last
at a tile adds the parts, always in the same order. The weight is the left operand: the tensor cores' left side has 64 rows, so
few rows of x still fill them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ridgeline.ops.launch import cdiv, dependent_launch
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.linear.select import GemmPlan, split_inputs
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel

MOST_TILES = 4096                    # with split-K: one arrival counter each
AHEAD = 256                          # inputs whose weights are prefetched into L2 before the PDL wait


@triton_kernel(do_not_specialize=["rows", "outputs"])
def _small_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
    rows, inputs, outputs, x_stride, weight_stride, part_inputs,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, SPLITS: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr, EVEN_INPUTS: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    AHEAD: tl.constexpr, DEPENDENT: tl.constexpr, UPCAST: tl.constexpr,
):
    """CTA (tile, block of rows, split). Tiles begin STEP outputs apart, which may be fewer than BLOCK_OUTPUTS.

    `part_ptr`: float32, a tile after the other, its splits together. EVEN: no tile is cut off, in either direction.
    """
    tile = tl.program_id(0)
    row_block = tl.program_id(1)
    split = tl.program_id(2)
    output = tile * STEP + tl.arange(0, BLOCK_OUTPUTS)
    end = tl.minimum((tile + 1) * STEP, outputs)
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_INPUTS)
    first = split * part_inputs
    last = tl.minimum(first + part_inputs, inputs)
    weight_row = weight_ptr + output.to(tl.int64) * weight_stride
    partner = outputs.to(tl.int64) * weight_stride       # with a gate: from a gate's weights to its partner's
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        # Into L2, a line of 64 numbers at a time: HBM is busy during the wait.
        line = first + tl.arange(0, AHEAD // 64) * 64
        ahead = weight_ptr + tl.minimum(output, end - 1).to(tl.int64)[:, None] * weight_stride
        ahead += tl.where(line < last, line, first)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ahead], dtype=tl.int32, is_pure=False, pack=1
        )
        if GATE != 0:
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ahead + partner], dtype=tl.int32, is_pure=False,
                pack=1,
            )
        tl.extra.cuda.gdc_wait()
    x_row = x_ptr + row.to(tl.int64) * x_stride
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    other = sums
    for start in range(first, last, BLOCK_INPUTS):
        here = start + column
        source = weight_row[:, None] + here[None, :]
        if EVEN_INPUTS:
            known = (row < rows)[:, None]
            inside = (output < end)[:, None]
        else:
            known = (row < rows)[:, None] & (here < last)[None, :]
            inside = (output < end)[:, None] & (here < last)[None, :]
        x = tl.load(x_row[:, None] + here[None, :], mask=known, other=0.0)
        if EVEN:
            weight = tl.load(source, eviction_policy="evict_first")
        else:
            weight = tl.load(source, mask=inside, other=0.0, eviction_policy="evict_first")
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(weight, x.T, sums, input_precision="ieee")
        if GATE != 0:
            if EVEN:
                up = tl.load(source + partner, eviction_policy="evict_first")
            else:
                up = tl.load(source + partner, mask=inside, other=0.0, eviction_policy="evict_first")
            if UPCAST:
                up = up.to(tl.float32)
            other = tl.dot(up, x.T, other, input_precision="ieee")
    written_rows = rows
    if SPLITS > 1:
        SIZE: tl.constexpr = BLOCK_OUTPUTS * BLOCK_ROWS
        HALVES: tl.constexpr = 1 if GATE == 0 else 2
        number = tile * tl.num_programs(1) + row_block
        place = tl.arange(0, BLOCK_OUTPUTS)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        parts = part_ptr + number.to(tl.int64) * (SPLITS * HALVES * SIZE)
        mine = parts + split * (HALVES * SIZE)
        tl.store(mine + place, sums)
        if GATE != 0:
            tl.store(mine + SIZE + place, other)
        tl.debug_barrier()                               # every thread's part is written before the arrival is
        arrived = tl.atomic_add(arrived_ptr + number, 1, sem="acq_rel")
        # The last CTA of a tile adds all parts; the others add and write nothing.
        terms = tl.where(arrived == SPLITS - 1, SPLITS, 0)
        sums = tl.zeros_like(sums)
        other = sums
        for term in range(terms):
            sums += tl.load(parts + term * (HALVES * SIZE) + place, cache_modifier=".cg")
            if GATE != 0:
                other += tl.load(parts + term * (HALVES * SIZE) + SIZE + place, cache_modifier=".cg")
        if terms > 0:
            tl.store(arrived_ptr + number, 0)
        written_rows = tl.where(terms > 0, rows, 0)
    output_ = output[:, None]
    row_ = row[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + output_, mask=output_ < end, other=0.0).to(tl.float32)
    if GATE != 0:
        if BIAS:
            other += tl.load(bias_ptr + outputs + output_, mask=output_ < end, other=0.0).to(tl.float32)
        sums = activated(sums, GATE) * other
    wanted = (output_ < end) & (row_ < written_rows)
    tl.store(out_ptr + row_.to(tl.int64) * outputs + output_, sums.to(out_ptr.dtype.element_ty), mask=wanted)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """Arrival counters, which every launch leaves at zero. Only one stream may use them."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def prepare(device: torch.device) -> None:
    """Allocates the counters before the first CUDA graph: memory allocated during a capture belongs to that graph."""
    if device.type == "cuda":
        arrivals(device)


def small_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, *, gate: str | None = None) -> Tensor:
    """x [rows, inputs] -> [rows, outputs]"""
    rows, inputs = x.shape
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    step = plan.step or plan.block_outputs
    tiles, row_blocks = cdiv(outputs, step), cdiv(rows, plan.block_rows)
    part_inputs = split_inputs(inputs, plan.splits)
    splits = cdiv(inputs, part_inputs)            # fewer than asked for where the last ones would be empty
    parts = arrived = out
    if splits > 1:
        halves = 1 if gate is None else 2
        size = tiles * row_blocks * splits * halves * plan.block_outputs * plan.block_rows
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device)
    even_inputs = inputs % plan.block_inputs == 0
    _small_gemm_kernel[tiles, row_blocks, splits](
        x, weight, weight if bias is None else bias, out, parts, arrived,
        rows, inputs, outputs, x.stride(0), weight.stride(0), part_inputs,
        BLOCK_ROWS=plan.block_rows, BLOCK_OUTPUTS=plan.block_outputs, BLOCK_INPUTS=plan.block_inputs, SPLITS=splits,
        STEP=step, EVEN=even_inputs and step == plan.block_outputs and outputs % step == 0, EVEN_INPUTS=even_inputs,
        GATE=GATES[gate], BIAS=bias is not None, AHEAD=AHEAD,
        UPCAST=TRITON_INTERPRETED,       # the interpreter's narrow dot products are wrong
        num_warps=plan.warps, num_stages=plan.stages, **dependent_launch(x.device),
    )
    return out

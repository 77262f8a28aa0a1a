"""The experts of a mixture on a GPU: two grouped products over a list of tiles (expert_tiles.py), and the weighted sum.

    up      rows of x, gathered by token, times an expert's gate and up; the activation follows in the same registers
    down    activated rows times the expert's down projection; each result goes to its pair's place
    sum     of each token's pairs, in their order, in float32

Experts that no token has chosen have no tile, so their weights are not read. With few pairs per expert a tile has 16 rows and few
outputs: the weights are streamed by as many CTAs as there are. With many, CTAs are persistent, and neighbours share rows or
weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.experts import few_codes
from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.expert_tiles import sorted_pairs
from ridgeline.ops.experts.few_tokens import experts_few, serves
from ridgeline.ops.experts.mxfp4 import GROUP, expanded_codes
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two, shared_memory
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel


class Tile(NamedTuple):
    rows: int                        # pairs
    outputs: int
    inputs: int                      # of a step
    warps: int
    stages: int
    neighbours: int                  # tiles of rows that go through the outputs together


@triton_kernel()
def _tile_at(tiles_ptr, item, num_tiles, blocks, NEIGHBOURS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first place, place behind the last, block of outputs) of a work item. NEIGHBOURS tiles go through the blocks
    together."""
    band = item // (NEIGHBOURS * blocks)
    height = tl.minimum(num_tiles - band * NEIGHBOURS, NEIGHBOURS)
    place = item % (NEIGHBOURS * blocks)
    tile = tiles_ptr + 3 * (band * NEIGHBOURS + place % height)
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), place // height


@triton_kernel()
def _scales_at(  # type: ignore[no-untyped-def]
    scale_ptr, row, start, kept, INPUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):
    """Of a block of codes [BLOCK, STEP / 2] the scales [BLOCK, STEP / GROUP]."""
    group = start // GROUP + tl.arange(0, STEP // GROUP)
    return tl.load(
        scale_ptr + row[:, None] * (INPUTS // GROUP) + group[None, :], mask=kept[:, None] & (group < INPUTS // GROUP)[None, :],
        other=0,
    )


@triton_kernel()
def _weights_at(  # type: ignore[no-untyped-def]
    weight_ptr, row, start, kept, scale, INPUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):
    """A block of weights [BLOCK, STEP] as numbers. GROUP: they are e2m1 codes, with a scale for each GROUP inputs; 0: numbers."""
    if GROUP == 0:
        column = start + tl.arange(0, STEP)
        weights = tl.load(
            weight_ptr + row[:, None] * INPUTS + column[None, :], mask=kept[:, None] & (column < INPUTS)[None, :], other=0.0
        )
        if UPCAST:
            weights = weights.to(tl.float32)
    else:
        group = start // GROUP + tl.arange(0, STEP // GROUP)
        place = (group * (GROUP // 2))[None, :, None] + tl.arange(0, GROUP // 2)[None, None, :]
        inside = kept[:, None, None] & (group < INPUTS // GROUP)[None, :, None]
        codes = tl.load(weight_ptr + row[:, None, None] * (INPUTS // 2) + place, mask=inside, other=0)
        weights = expanded_codes(codes, scale, UPCAST)
    return weights


@triton_kernel(do_not_specialize=["num_tiles"])
def _experts_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles, stride, limit, alpha,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, USED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, NEIGHBOURS: tl.constexpr, UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [T, INPUTS], weight [experts, 2 OUTPUTS, INPUTS] -> out [pairs by expert, OUTPUTS]"""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        expert, first, stop, block = _tile_at(tiles_ptr, item, num_tiles, blocks, NEIGHBOURS)
        if expert >= 0:
            at = first + tl.arange(0, ROWS)
            token = tl.load(order_ptr + at, mask=at < stop, other=0) // USED
            output = block * BLOCK + tl.arange(0, BLOCK)
            kept = output < OUTPUTS
            row = expert.to(tl.int64) * 2 * OUTPUTS + output
            column = tl.arange(0, STEP)
            rows = x_ptr + token.to(tl.int64)[:, None] * stride + column[None, :]
            gate = tl.zeros((BLOCK, ROWS), tl.float32)
            up = tl.zeros((BLOCK, ROWS), tl.float32)
            gate_scale = 0
            up_scale = 0
            if GROUP:                                    # requested one step ahead: copies to shared memory have 4 bytes at least
                gate_scale = _scales_at(scale_ptr, row, 0, kept, INPUTS, STEP, GROUP)
                up_scale = _scales_at(scale_ptr, row + OUTPUTS, 0, kept, INPUTS, STEP, GROUP)
            for start in range(0, INPUTS, STEP):
                next_gate, next_up = gate_scale, up_scale
                if GROUP:
                    next_gate = _scales_at(scale_ptr, row, start + STEP, kept, INPUTS, STEP, GROUP)
                    next_up = _scales_at(scale_ptr, row + OUTPUTS, start + STEP, kept, INPUTS, STEP, GROUP)
                there = (at < stop)[:, None] & (start + column < INPUTS)[None, :]
                right = tl.trans(tl.load(rows + start, mask=there, other=0.0))
                if UPCAST:
                    right = right.to(tl.float32)
                left = _weights_at(weight_ptr, row, start, kept, gate_scale, INPUTS, STEP, GROUP, UPCAST)
                gate = tl.dot(left, right, gate, input_precision="ieee")
                left = _weights_at(weight_ptr, row + OUTPUTS, start, kept, up_scale, INPUTS, STEP, GROUP, UPCAST)
                up = tl.dot(left, right, up, input_precision="ieee")
                gate_scale, up_scale = next_gate, next_up
            if BIAS:
                biases = bias_ptr + row
                gate += tl.load(biases, mask=kept, other=0.0).to(tl.float32)[:, None]
                up += tl.load(biases + OUTPUTS, mask=kept, other=0.0).to(tl.float32)[:, None]
            result = gated_sums(gate, up, limit, alpha, GATE, CLAMPED).to(out_ptr.dtype.element_ty)
            out = out_ptr + at.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
            tl.store(out, tl.trans(result), mask=(at < stop)[:, None] & kept[None, :])


@triton_kernel(do_not_specialize=["num_tiles"])
def _experts_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, NEIGHBOURS: tl.constexpr, UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [pairs by expert, INPUTS], weight [experts, OUTPUTS, INPUTS] -> out [pairs, OUTPUTS]"""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        expert, first, stop, block = _tile_at(tiles_ptr, item, num_tiles, blocks, NEIGHBOURS)
        if expert >= 0:
            at = first + tl.arange(0, ROWS)
            output = block * BLOCK + tl.arange(0, BLOCK)
            kept = output < OUTPUTS
            row = expert.to(tl.int64) * OUTPUTS + output
            column = tl.arange(0, STEP)
            rows = x_ptr + at.to(tl.int64)[:, None] * INPUTS + column[None, :]
            sums = tl.zeros((BLOCK, ROWS), tl.float32)
            scale = 0
            if GROUP:
                scale = _scales_at(scale_ptr, row, 0, kept, INPUTS, STEP, GROUP)
            for start in range(0, INPUTS, STEP):
                following = scale
                if GROUP:
                    following = _scales_at(scale_ptr, row, start + STEP, kept, INPUTS, STEP, GROUP)
                there = (at < stop)[:, None] & (start + column < INPUTS)[None, :]
                right = tl.trans(tl.load(rows + start, mask=there, other=0.0))
                if UPCAST:
                    right = right.to(tl.float32)
                left = _weights_at(weight_ptr, row, start, kept, scale, INPUTS, STEP, GROUP, UPCAST)
                sums = tl.dot(left, right, sums, input_precision="ieee")
                scale = following
            if BIAS:
                sums += tl.load(bias_ptr + row, mask=kept, other=0.0).to(tl.float32)[:, None]
            pair = tl.load(order_ptr + at, mask=at < stop, other=0).to(tl.int64)
            out = out_ptr + pair[:, None] * OUTPUTS + output[None, :]
            tl.store(out, tl.trans(sums.to(out_ptr.dtype.element_ty)), mask=(at < stop)[:, None] & kept[None, :])


@triton_kernel()
def _sum_experts_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, WIDTH: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA: a block of columns of one token. The order of the sum is that of the token's experts."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(USED):
        pair = token * USED + place
        weight = tl.load(weight_ptr + pair).to(tl.float32)
        total += weight * tl.load(x_ptr + pair * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tile_for(pairs: int, experts: int, gated: bool, itemsize: int = 2, shared: int = 232_448) -> Tile:
    """The measured tile, with as many stages as fit the shared memory of a CTA."""
    tile = _measured_tile(pairs, experts, gated)
    stage = (tile.rows + tile.outputs * (1 + gated)) * tile.inputs * itemsize
    return tile._replace(stages=max(1, min(tile.stages, shared // stage)))


def _measured_tile(pairs: int, experts: int, gated: bool) -> Tile:
    """By pairs per visited expert, measured on an H200: weights stream at 92 to 94 % of its bandwidth. A tile has room for more
    than their mean: an expert with two tiles is read twice."""
    per_expert = pairs / min(pairs, experts)
    if per_expert <= 9:
        return Tile(16, 64, 128, 4, 3 if gated else 4, 1)
    if per_expert <= 20:
        return Tile(32, 64, 64, 4, 6 if gated else 4, 1)
    if per_expert <= 96:
        return Tile(64, 64, 64, 4, 6, 1)
    return Tile(128, 128, 64, 8, 3, 8) if gated else Tile(128, 256, 64, 8, 3, 8)


def code_tile_for(pairs: int, experts: int, gated: bool) -> Tile:
    """Of 4-bit codes: unpacking takes the time, not the memory."""
    per_expert = pairs / min(pairs, experts)
    rows = 16 if per_expert <= 9 else 32 if per_expert <= 20 else 64
    return Tile(rows, 64, 64, 4, 4, 1 if rows < 64 else 2)


def experts_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, kind: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float | None = None, alpha: float = 1.702,
    reads: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, elsewhere: bool = False,
) -> Tensor:
    """With `scales`, gate_up and down are MXFP4 codes."""
    count, hidden = down.shape[:2]
    width = gate_up.shape[1] // 2
    tokens, used = chosen.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    if serves(tokens, used, count) and not elsewhere and (scales is None or few_codes.runs(x, hidden)):
        few = (chosen, weights, out, kind, (gate_up_bias, down_bias), limit, alpha, reads)
        if scales is None:
            return experts_few(x, gate_up, down, *few)
        return few_codes.experts_few_codes(x, gate_up, down, scales, *few)
    pairs = tokens * used
    up, back = (
        code_tile_for(pairs, count, gated) if scales is not None
        else tile_for(pairs, count, gated, x.element_size(), shared_memory(x.device)) for gated in (True, False)
    )
    order, tiles = sorted_pairs(chosen, count, up.rows, reads, elsewhere)
    number = len(tiles)
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    # Of experts that are elsewhere no tile writes the result.
    results = (torch.zeros if elsewhere else torch.empty)((pairs, hidden), dtype=x.dtype, device=x.device)
    dependent = dependent_launch(x.device)
    given = {"GROUP": 0 if scales is None else GROUP, "UPCAST": TRITON_INTERPRETED, **dependent}
    bits, (up_scale, down_scale) = (16, (chosen, chosen)) if scales is None else (4, scales)
    programs = _programs(x.device, number * cdiv(width, up.outputs), up, True, bits)
    _experts_up_kernel[programs,](
        x, gate_up, up_scale, x if gate_up_bias is None else gate_up_bias, inner, order, tiles, number, x.stride(0),
        float(limit or 0.0), float(alpha), INPUTS=hidden, OUTPUTS=width, USED=used, GATE=GATES[kind],
        BIAS=gate_up_bias is not None, CLAMPED=limit is not None, ROWS=up.rows, BLOCK=up.outputs, STEP=_step(up, hidden),
        NEIGHBOURS=up.neighbours, num_warps=up.warps, num_stages=up.stages, **given,
    )
    programs = _programs(x.device, number * cdiv(hidden, back.outputs), back, False, bits)
    _experts_down_kernel[programs,](
        inner, down, down_scale, x if down_bias is None else down_bias, results, order, tiles, number, INPUTS=width,
        OUTPUTS=hidden, BIAS=down_bias is not None, ROWS=back.rows, BLOCK=back.outputs, STEP=_step(back, width),
        NEIGHBOURS=back.neighbours, num_warps=back.warps, num_stages=back.stages, **given,
    )
    block = min(1024, power_of_two(hidden))
    _sum_experts_kernel[tokens * cdiv(hidden, block),](
        results, weights, out, WIDTH=hidden, USED=used, BLOCK=block, num_warps=4, **dependent,
    )
    return out


def _step(tile: Tile, inputs: int) -> int:
    return max(32, min(tile.inputs, power_of_two(inputs)))


def _programs(device: torch.device, items: int, tile: Tile, gated: bool, bits: int) -> int:
    """CTAs: as many as fit at once, and no more than there are work items. `bits` of a weight."""
    stage = (16 * tile.rows + bits * tile.outputs * (1 + gated)) * tile.inputs // 8
    each = max(1, min(8, shared_memory(device) // (tile.stages * stage + 1024)))
    return min(items, multiprocessors(device) * each)

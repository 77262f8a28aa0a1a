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

from ridgeline.ops.experts.expert_tiles import sorted_pairs
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel


class Tile(NamedTuple):
    rows: int                        # pairs
    outputs: int
    inputs: int                      # of a step
    warps: int
    stages: int
    neighbours: int                  # tiles of rows that go through the outputs together


@triton_kernel(do_not_specialize=["num_tiles"])
def _experts_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles, stride, limit, alpha,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, USED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, NEIGHBOURS: tl.constexpr,
    UPCAST: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """x [T, INPUTS], weight [experts, 2 OUTPUTS, INPUTS] -> out [pairs by expert, OUTPUTS]"""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        band = item // (NEIGHBOURS * blocks)
        height = tl.minimum(num_tiles - band * NEIGHBOURS, NEIGHBOURS)
        place = item % (NEIGHBOURS * blocks)
        tile = tiles_ptr + 3 * (band * NEIGHBOURS + place % height)
        expert = tl.load(tile)
        if expert >= 0:
            first, stop = tl.load(tile + 1), tl.load(tile + 2)
            at = first + tl.arange(0, ROWS)
            token = tl.load(order_ptr + at, mask=at < stop, other=0) // USED
            output = place // height * BLOCK + tl.arange(0, BLOCK)
            column = tl.arange(0, STEP)
            rows = x_ptr + token.to(tl.int64)[:, None] * stride + column[None, :]
            gates = weight_ptr + (expert.to(tl.int64) * 2 * OUTPUTS + output)[:, None] * INPUTS + column[None, :]
            gate = tl.zeros((ROWS, BLOCK), tl.float32)
            up = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, INPUTS, STEP):
                inside = start + column[None, :] < INPUTS
                left = tl.load(rows + start, mask=(at < stop)[:, None] & inside, other=0.0)
                kept = (output < OUTPUTS)[:, None] & inside
                right = tl.load(gates + start, mask=kept, other=0.0)
                partner = tl.load(gates + OUTPUTS * INPUTS + start, mask=kept, other=0.0)
                if UPCAST:
                    left, right, partner = left.to(tl.float32), right.to(tl.float32), partner.to(tl.float32)
                gate = tl.dot(left, tl.trans(right), gate, input_precision="ieee")
                up = tl.dot(left, tl.trans(partner), up, input_precision="ieee")
            if BIAS:
                biases = bias_ptr + expert * 2 * OUTPUTS + output
                gate += tl.load(biases, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
                up += tl.load(biases + OUTPUTS, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
            if CLAMPED:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
                gate = gate / (1.0 + tl.exp(-alpha * gate))
            else:
                gate = activated(gate, GATE)
            out = out_ptr + at.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
            tl.store(out, (gate * up).to(out_ptr.dtype.element_ty), mask=(at < stop)[:, None] & (output < OUTPUTS)[None, :])


@triton_kernel(do_not_specialize=["num_tiles"])
def _experts_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, NEIGHBOURS: tl.constexpr, UPCAST: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """x [pairs by expert, INPUTS], weight [experts, OUTPUTS, INPUTS] -> out [pairs, OUTPUTS]"""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        band = item // (NEIGHBOURS * blocks)
        height = tl.minimum(num_tiles - band * NEIGHBOURS, NEIGHBOURS)
        place = item % (NEIGHBOURS * blocks)
        tile = tiles_ptr + 3 * (band * NEIGHBOURS + place % height)
        expert = tl.load(tile)
        if expert >= 0:
            first, stop = tl.load(tile + 1), tl.load(tile + 2)
            at = first + tl.arange(0, ROWS)
            output = place // height * BLOCK + tl.arange(0, BLOCK)
            column = tl.arange(0, STEP)
            rows = x_ptr + at.to(tl.int64)[:, None] * INPUTS + column[None, :]
            weights = weight_ptr + (expert.to(tl.int64) * OUTPUTS + output)[:, None] * INPUTS + column[None, :]
            sums = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, INPUTS, STEP):
                inside = start + column[None, :] < INPUTS
                left = tl.load(rows + start, mask=(at < stop)[:, None] & inside, other=0.0)
                right = tl.load(weights + start, mask=(output < OUTPUTS)[:, None] & inside, other=0.0)
                if UPCAST:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
            if BIAS:
                sums += tl.load(bias_ptr + expert * OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
            pair = tl.load(order_ptr + at, mask=at < stop, other=0).to(tl.int64)
            out = out_ptr + pair[:, None] * OUTPUTS + output[None, :]
            tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=(at < stop)[:, None] & (output < OUTPUTS)[None, :])


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


def tile_for(pairs: int, experts: int, gated: bool) -> Tile:
    """By pairs per visited expert. Not measured yet: from what the dense GEMMs of this engine need on an H200."""
    per_expert = pairs / min(pairs, experts)
    if per_expert <= 16:
        return Tile(16, 32 if gated else 64, 128, 4, 4, 1)
    if per_expert <= 32:
        return Tile(32, 64, 128 if not gated else 64, 4, 4, 1)
    if per_expert <= 96:
        return Tile(64, 64 if gated else 128, 64, 4, 4, 4)
    return Tile(128, 64 if gated else 128, 64, 8, 4, 8)


def experts_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, kind: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float | None = None, alpha: float = 1.702,
    reads: Tensor | None = None, elsewhere: bool = False,
) -> Tensor:
    count, hidden, width = down.shape
    tokens, used = chosen.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    pairs = tokens * used
    up, back = tile_for(pairs, count, True), tile_for(pairs, count, False)
    order, tiles = sorted_pairs(chosen, count, up.rows, reads, elsewhere)
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    # Of experts that are elsewhere no tile writes the result.
    results = (torch.zeros if elsewhere else torch.empty)((pairs, hidden), dtype=x.dtype, device=x.device)
    dependent = dependent_launch(x.device)
    programs = _programs(x.device, len(tiles) * cdiv(width, up.outputs), up)
    _experts_up_kernel[programs,](
        x, gate_up, x if gate_up_bias is None else gate_up_bias, inner, order, tiles, len(tiles), x.stride(0),
        float(limit or 0.0), float(alpha), INPUTS=hidden, OUTPUTS=width, USED=used, GATE=GATES[kind],
        BIAS=gate_up_bias is not None, CLAMPED=limit is not None, ROWS=up.rows, BLOCK=up.outputs,
        STEP=min(up.inputs, power_of_two(hidden)), NEIGHBOURS=up.neighbours, UPCAST=TRITON_INTERPRETED,
        num_warps=up.warps, num_stages=up.stages, **dependent,
    )
    programs = _programs(x.device, len(tiles) * cdiv(hidden, back.outputs), back)
    _experts_down_kernel[programs,](
        inner, down, x if down_bias is None else down_bias, results, order, tiles, len(tiles), INPUTS=width, OUTPUTS=hidden,
        BIAS=down_bias is not None, ROWS=back.rows, BLOCK=back.outputs, STEP=max(16, min(back.inputs, power_of_two(width))),
        NEIGHBOURS=back.neighbours, UPCAST=TRITON_INTERPRETED, num_warps=back.warps, num_stages=back.stages,
        **dependent,
    )
    block = min(1024, power_of_two(hidden))
    _sum_experts_kernel[tokens * cdiv(hidden, block),](
        results, weights, out, WIDTH=hidden, USED=used, BLOCK=block, num_warps=4, **dependent,
    )
    return out


def _programs(device: torch.device, items: int, tile: Tile) -> int:
    """CTAs: few rows as many as fit at once, for each streams weights; many rows one for each SM, or two small ones."""
    most = multiprocessors(device) * (8 if tile.rows == 16 else 2 if tile.rows < 128 else 1)
    return min(items, most)

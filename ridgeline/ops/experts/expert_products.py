"""The experts of a mixture on a GPU: two grouped products over a list of tiles (expert_tiles.py), and the weighted sum.

    up      rows of x, gathered by token, times an expert's gate and up; the activation follows in the same registers
    down    activated rows times the expert's down projection; each result goes to its pair's place
    sum     of each token's pairs, in their order, in float32

Experts that no token has chosen have no tile, so their weights are not read. With few pairs per expert a tile has 16 rows and few
outputs: the weights are streamed by as many CTAs as there are. With many, CTAs are persistent, and neighbours share rows or
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation import gated_activation
from ridgeline.ops.experts.expert_codes import byte_codes, expanded_codes, integer_codes
from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.expert_tiles import sorted_pairs, tile_at
from ridgeline.ops.experts.few_bytes import experts_few_bytes, serves_bytes
from ridgeline.ops.experts.few_tokens import experts_few, serves, shared_parts
from ridgeline.ops.experts.matrices import Codes, Matrices, as_codes, loadable, numbers
from ridgeline.ops.experts.packed_few import experts_few_packed, serves_packed
from ridgeline.ops.experts.packed_matrices import multiplies_packed
from ridgeline.ops.experts.packed_products import packed_pairs
from ridgeline.ops.hopper import is_hopper
from ridgeline.ops.launch import cdiv, dependent_launch, multiprocessors, power_of_two, shared_memory
from ridgeline.ops.linear.fp8_rows import fp8_rows_triton
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel


class Tile(NamedTuple):
    rows: int                        # pairs
    outputs: int
    inputs: int                      # of a step
    warps: int
    stages: int
    neighbours: int                  # tiles of rows that go through the outputs together


@triton_kernel()
def _scales_at(  # type: ignore[no-untyped-def]
    scale_ptr, row, start, kept, INPUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
):
    """The scales (or zeros) of a block of weights: [BLOCK, groups of a step]."""
    SPAN: tl.constexpr = STEP if GROUP > STEP else GROUP
    groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    group = (start + tl.arange(0, STEP // SPAN) * SPAN) // GROUP
    place = scale_ptr + (row // SCALE_ROWS)[:, None] * groups + group[None, :]
    return tl.load(place, mask=kept[:, None] & (group < groups)[None, :], other=0)


@triton_kernel()
def _weights_at(  # type: ignore[no-untyped-def]
    weight_ptr, row, start, kept, scale, zero, INPUTS: tl.constexpr, STEP: tl.constexpr, GRID: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr, UPCAST: tl.constexpr,
):
    """A block of weights [BLOCK, STEP] as numbers, for rows of codes as codes. Those of the grid e4m3 lack their scale, which
    multiplies the sums."""
    if GRID == "" or GRID == "e4m3":
        column = start + tl.arange(0, STEP)
        weights = tl.load(
            weight_ptr + row[:, None] * INPUTS + column[None, :], mask=kept[:, None] & (column < INPUTS)[None, :], other=0.0
        )
        if GRID == "e4m3" and PARTS == 0:
            weights = byte_codes(weights, UPCAST)
        elif UPCAST:
            weights = weights.to(tl.float32)
    else:
        SPAN: tl.constexpr = STEP if GROUP > STEP else GROUP
        group = start // SPAN + tl.arange(0, STEP // SPAN)
        place = (group * (SPAN // 2))[None, :, None] + tl.arange(0, SPAN // 2)[None, None, :]
        inside = kept[:, None, None] & (group * SPAN < INPUTS)[None, :, None]
        codes = tl.load(weight_ptr + row[:, None, None] * (INPUTS // 2) + place, mask=inside, other=0)
        if GRID == "e2m1":
            weights = expanded_codes(codes, scale, UPCAST)
        else:
            weights = integer_codes(codes, scale, zero, ZEROS, UPCAST)
    return weights


@triton_kernel()
def _product(sums, left, right, fine, scale, GRID: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + left right; with e4m3 codes their products are multiplied by the scale of a step, [BLOCK, 1]. `fine`: with PARTS 2
    the codes of what rounding left of `right`, 16 times as large."""
    if GRID == "e4m3":
        if PARTS == 2:
            both = tl.dot(left, fine, input_precision="ieee") * 0.0625
            both = tl.dot(left, right, both, input_precision="ieee")
        else:
            both = tl.dot(left, right, input_precision="ieee")
        sums += both * scale
    else:
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton_kernel(do_not_specialize=["num_tiles"])
def _experts_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles, stride, limit, alpha,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, USED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, GRID: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, NEIGHBOURS: tl.constexpr,
    UPCAST: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """x [T, INPUTS], weight [experts, 2 OUTPUTS, INPUTS] -> out [pairs by expert, OUTPUTS]. PARTS: 0, or how many rows of codes
    each row of x became."""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    EACH: tl.constexpr = PARTS if PARTS > 0 else 1
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        expert, first, stop, block = tile_at(tiles_ptr, item, num_tiles, blocks, NEIGHBOURS)
        if expert >= 0:
            at = first + tl.arange(0, ROWS)
            line = (tl.load(order_ptr + at, mask=at < stop, other=0) // USED).to(tl.int64) * EACH
            output = block * BLOCK + tl.arange(0, BLOCK)
            kept = output < OUTPUTS
            row = expert.to(tl.int64) * 2 * OUTPUTS + output
            column = tl.arange(0, STEP)
            rows = x_ptr + line[:, None] * stride + column[None, :]
            gate = tl.zeros((BLOCK, ROWS), tl.float32)
            up = tl.zeros((BLOCK, ROWS), tl.float32)
            gate_scale, up_scale = 0, 0
            if GRID != "":                               # requested one step ahead: copies to shared memory have 4 bytes at least
                gate_scale = _scales_at(scale_ptr, row, 0, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
                up_scale = _scales_at(scale_ptr, row + OUTPUTS, 0, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
            for start in range(0, INPUTS, STEP):
                next_gate, next_up = gate_scale, up_scale
                gate_zero, up_zero = 0, 0                # not before the loop: a variable that it carries keeps its type
                if GRID != "":
                    next_gate = _scales_at(scale_ptr, row, start + STEP, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
                    next_up = _scales_at(scale_ptr, row + OUTPUTS, start + STEP, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
                if ZEROS:
                    gate_zero = _scales_at(zero_ptr, row, start, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
                    up_zero = _scales_at(zero_ptr, row + OUTPUTS, start, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
                there = (at < stop)[:, None] & (start + column < INPUTS)[None, :]
                right = tl.trans(tl.load(rows + start, mask=there, other=0.0))
                fine = right
                if PARTS == 2:
                    fine = tl.trans(tl.load(rows + stride + start, mask=there, other=0.0))
                if UPCAST:
                    right, fine = right.to(tl.float32), fine.to(tl.float32)
                left = _weights_at(
                    weight_ptr, row, start, kept, gate_scale, gate_zero, INPUTS, STEP, GRID, GROUP, ZEROS, PARTS, UPCAST
                )
                gate = _product(gate, left, right, fine, gate_scale, GRID, PARTS)
                left = _weights_at(
                    weight_ptr, row + OUTPUTS, start, kept, up_scale, up_zero, INPUTS, STEP, GRID, GROUP, ZEROS, PARTS, UPCAST
                )
                up = _product(up, left, right, fine, up_scale, GRID, PARTS)
                gate_scale, up_scale = next_gate, next_up
            if PARTS > 0:
                row_scale = tl.load(x_scale_ptr + line, mask=at < stop, other=0.0)[None, :]
                gate *= row_scale
                up *= row_scale
            if BIAS:
                biases = bias_ptr + row
                gate += tl.load(biases, mask=kept, other=0.0).to(tl.float32)[:, None]
                up += tl.load(biases + OUTPUTS, mask=kept, other=0.0).to(tl.float32)[:, None]
            result = gated_sums(gate, up, limit, alpha, GATE, CLAMPED).to(out_ptr.dtype.element_ty)
            out = out_ptr + at.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
            tl.store(out, tl.trans(result), mask=(at < stop)[:, None] & kept[None, :])


@triton_kernel(do_not_specialize=["num_tiles"])
def _experts_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, GRID: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, NEIGHBOURS: tl.constexpr, UPCAST: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """x [pairs by expert, INPUTS], weight [experts, OUTPUTS, INPUTS] -> out [pairs, OUTPUTS]"""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    EACH: tl.constexpr = PARTS if PARTS > 0 else 1
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for item in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        expert, first, stop, block = tile_at(tiles_ptr, item, num_tiles, blocks, NEIGHBOURS)
        if expert >= 0:
            at = first + tl.arange(0, ROWS)
            output = block * BLOCK + tl.arange(0, BLOCK)
            kept = output < OUTPUTS
            row = expert.to(tl.int64) * OUTPUTS + output
            column = tl.arange(0, STEP)
            line = at.to(tl.int64) * EACH
            rows = x_ptr + line[:, None] * INPUTS + column[None, :]
            sums = tl.zeros((BLOCK, ROWS), tl.float32)
            scale = 0
            if GRID != "":
                scale = _scales_at(scale_ptr, row, 0, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
            for start in range(0, INPUTS, STEP):
                following, zero = scale, 0
                if GRID != "":
                    following = _scales_at(scale_ptr, row, start + STEP, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
                if ZEROS:
                    zero = _scales_at(zero_ptr, row, start, kept, INPUTS, STEP, GROUP, SCALE_ROWS)
                there = (at < stop)[:, None] & (start + column < INPUTS)[None, :]
                right = tl.trans(tl.load(rows + start, mask=there, other=0.0))
                fine = right
                if PARTS == 2:
                    fine = tl.trans(tl.load(rows + INPUTS + start, mask=there, other=0.0))
                if UPCAST:
                    right, fine = right.to(tl.float32), fine.to(tl.float32)
                left = _weights_at(weight_ptr, row, start, kept, scale, zero, INPUTS, STEP, GRID, GROUP, ZEROS, PARTS, UPCAST)
                sums = _product(sums, left, right, fine, scale, GRID, PARTS)
                scale = following
            if PARTS > 0:
                sums *= tl.load(x_scale_ptr + line, mask=at < stop, other=0.0)[None, :]
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


INVARIANT_PAIRS = 16                 # of an expert: whose tiles deterministic mode takes for any number of tokens


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


def byte_tile_for(pairs: int, experts: int, gated: bool) -> Tile:
    """Of 8-bit codes. Tiles of 32 outputs are multiplied by mma.sync, which takes codes from shared memory four at a time; wgmma
    takes two."""
    per_expert = pairs / min(pairs, experts)
    if per_expert <= 9:
        return Tile(16, 32, 128, 2, 4, 1)
    if per_expert <= 20:
        return Tile(32, 32, 128, 2, 4, 1)
    if per_expert <= 96:
        return Tile(64, 64, 64, 4, 6, 1)
    return Tile(128, 128, 64, 8, 3, 8)


def row_codes(x: Tensor, gate_up: Codes, down: Codes) -> int:
    """How many rows of e4m3 codes a row of x becomes, for tensor cores that multiply codes by codes: coarse and fine ones, which
    keep what a bfloat16 number has. 0: x stays as it is."""
    whole = gate_up.weight.shape[2] % 16 == 0 and down.weight.shape[2] % 16 == 0
    hopper = TRITON_INTERPRETED or is_hopper(x.device)
    return 2 if gate_up.grid == down.grid == "e4m3" and whole and hopper else 0


def row_code_tile_for(pairs: int, experts: int, gated: bool) -> Tile:
    """Of 8-bit codes and rows of codes."""
    per_expert = pairs / min(pairs, experts)
    if per_expert <= 4:
        return Tile(16, 64, 128, 4, 3 if gated else 4, 1)
    if per_expert <= 20:
        return Tile(16 if per_expert <= 9 else 32, 128, 128, 8, 4, 1)
    return Tile(64, 128, 128, 8, 3, 1 if per_expert <= 96 else 8)


def experts_triton(
    x: Tensor, gate_up: Matrices, down: Matrices, chosen: Tensor, weights: Tensor, kind: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float | None = None, alpha: float = 1.702,
    reads: Tensor | None = None, elsewhere: bool = False, shared: tuple[Tensor, Tensor] | None = None, invariant: bool = False,
) -> Tensor:
    if shared is not None:
        assert gate_up_bias is None and down_bias is None and limit is None
        return _with_shared(x, gate_up, down, chosen, weights, kind, alpha, reads, elsewhere, shared)
    tokens, used = chosen.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not tokens:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    biases = gate_up_bias, down_bias
    if isinstance(gate_up, PackedWeight):
        assert isinstance(down, PackedWeight)
        if not multiplies_packed(x.dtype, x.device):
            gate_up, down = numbers(gate_up, x.dtype), numbers(down, x.dtype)
        elif serves(tokens, used, len(down.codes)) and not elsewhere and serves_packed(down, used):
            return experts_few_packed(x, gate_up, down, chosen, weights, out, kind, biases, limit, alpha, reads)
        else:
            results = packed_pairs(x, gate_up, down, chosen, kind, biases, limit, alpha, reads, elsewhere)
            return _summed(results, weights, out)
    assert not isinstance(gate_up, PackedWeight) and not isinstance(down, PackedWeight)
    up, back = as_codes(gate_up), as_codes(down)
    few = _few_kernel(up, back, x)
    if few is not None and serves(tokens, used, len(back.weight)) and not elsewhere and not invariant:
        return few(x, up, back, chosen, weights, out, kind, biases, limit, alpha, reads)
    results = _tile_products(x, up, back, chosen, kind, biases, limit, alpha, reads, elsewhere, invariant)
    return _summed(results, weights, out)


def _few_kernel(gate_up: Codes, down: Codes, x: Tensor) -> Callable[..., Tensor] | None:
    if gate_up.grid == "":
        return experts_few
    return experts_few_bytes if serves_bytes(gate_up, down, x) else None


def _with_shared(
    x: Tensor, gate_up: Matrices, down: Matrices, chosen: Tensor, weights: Tensor, kind: str, alpha: float,
    reads: Tensor | None, elsewhere: bool, shared: tuple[Tensor, Tensor],
) -> Tensor:
    """In the kernels of few tokens where they take it, else one after the other. Such experts have no biases and no limit."""
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and len(x) and not elsewhere:
        if serves(chosen.shape[0], chosen.shape[1], len(down)) and shared_parts(gate_up, down, shared):
            rows = x if x.stride(-1) == 1 else x.contiguous()
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            up, back = as_codes(gate_up), as_codes(down)
            return experts_few(rows, up, back, chosen, weights, out, kind, (None, None), None, alpha, reads, shared)
    out = experts_triton(x, gate_up, down, chosen, weights, kind, None, None, None, alpha, reads, elsewhere)
    return out.add_(F.linear(gated_activation(F.linear(x, shared[0]), kind), shared[1]))


def _tile_products(
    x: Tensor, gate_up: Codes, down: Codes, chosen: Tensor, kind: str, biases: tuple[Tensor | None, Tensor | None],
    limit: float | None, alpha: float, reads: Tensor | None, elsewhere: bool, invariant: bool,
) -> Tensor:
    """[pairs, hidden]: each pair's result; zeros for those whose expert is elsewhere."""
    count, hidden = down.weight.shape[:2]
    width, used, pairs = gate_up.weight.shape[1] // 2, chosen.shape[1], chosen.numel()
    shown = INVARIANT_PAIRS * count if invariant else pairs
    parts = row_codes(x, gate_up, down)
    up, back = (_tile_of(down.bits, shown, count, gated, x, parts) for gated in (True, False))
    order, tiles = sorted_pairs(chosen, count, up.rows, reads, elsewhere)
    number = len(tiles) - 1
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    # Of experts that are elsewhere no tile writes the result.
    results = (torch.zeros if elsewhere else torch.empty)((pairs, hidden), dtype=x.dtype, device=x.device)
    given = {"PARTS": parts, "UPCAST": TRITON_INTERPRETED, **dependent_launch(x.device)}
    programs = _programs(x.device, number * cdiv(width, up.outputs), up, True, down.bits)
    rows, row_scale = _rows_of(x, parts)
    _experts_up_kernel[programs,](
        rows, row_scale, *gate_up.tensors(chosen, parts > 0), x if biases[0] is None else biases[0], inner, order, tiles, number,
        rows.stride(0), float(limit or 0.0), float(alpha), INPUTS=hidden, OUTPUTS=width, USED=used, GATE=GATES[kind],
        BIAS=biases[0] is not None, CLAMPED=limit is not None, ROWS=up.rows, BLOCK=up.outputs, STEP=_step(up, hidden),
        NEIGHBOURS=up.neighbours, num_warps=up.warps, num_stages=up.stages, **gate_up.constants(), **given,
    )
    programs = _programs(x.device, number * cdiv(hidden, back.outputs), back, False, down.bits)
    rows, row_scale = _rows_of(inner, parts)
    _experts_down_kernel[programs,](
        rows, row_scale, *down.tensors(chosen, parts > 0), x if biases[1] is None else biases[1], results, order, tiles, number,
        INPUTS=width, OUTPUTS=hidden, BIAS=biases[1] is not None, ROWS=back.rows, BLOCK=back.outputs, STEP=_step(back, width),
        NEIGHBOURS=back.neighbours, num_warps=back.warps, num_stages=back.stages, **down.constants(), **given,
    )
    return results


def _rows_of(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """x as the kernels read it, and the scales of its codes."""
    if not parts:
        return x, x
    codes, scale = fp8_rows_triton(x, parts == 2)
    return loadable(codes), scale


def _tile_of(bits: int, pairs: int, experts: int, gated: bool, x: Tensor, parts: int) -> Tile:
    if parts:
        return row_code_tile_for(pairs, experts, gated)
    if bits <= 8:
        return (code_tile_for if bits == 4 else byte_tile_for)(pairs, experts, gated)
    return tile_for(pairs, experts, gated, x.element_size(), shared_memory(x.device))


def _summed(results: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """The pairs' results, added by token."""
    (tokens, hidden), used = out.shape, weights.shape[1]
    block = min(1024, power_of_two(hidden))
    _sum_experts_kernel[tokens * cdiv(hidden, block),](
        results, weights, out, WIDTH=hidden, USED=used, BLOCK=block, num_warps=4, **dependent_launch(out.device),
    )
    return out


def _step(tile: Tile, inputs: int) -> int:
    return max(32, min(tile.inputs, power_of_two(inputs)))


def _programs(device: torch.device, items: int, tile: Tile, gated: bool, bits: int) -> int:
    """CTAs: as many as fit at once, and no more than there are work items. `bits` of a weight."""
    stage = (16 * tile.rows + bits * tile.outputs * (1 + gated)) * tile.inputs // 8
    each = max(1, min(8, shared_memory(device) // (tile.stages * stage + 1024)))
    return min(items, multiprocessors(device) * each)

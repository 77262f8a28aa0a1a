"""As few_tokens.py, with e4m3 codes as a checkpoint has them, and scales for blocks of them or for their rows.

A warp reads 128 inputs of some outputs at a time: eight lanes have 16 neighbouring codes each. All codes of a part of a row are
requested at once, a part ahead. A code becomes a float32 number by its bits, in four instructions with its product: conversion
instructions take several times as long. Sums are multiplied by the scale of 128 inputs before the next ones are added.

    up      a CTA: some outputs of one pair's expert; the warps share its inputs
    down    a CTA: some outputs of one token; the warps share the inputs of all its experts

Written in Gluon, for Hopper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.few_tokens import MOST_TOKENS
from ridgeline.ops.experts.matrices import Codes
from ridgeline.ops.experts.packed_few import _visited, _wait_first
from ridgeline.ops.hopper import HAS_GLUON, compile_time, gl, is_hopper
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.packed.packed_gemv import NAMES
from ridgeline.ops.registry import gluon_kernel

SPAN = 128                           # inputs that a warp reads at once


class FewBytes(NamedTuple):
    lines: int                       # outputs of a lane; a CTA has four times as many
    groups: int                      # times 128 inputs of a part
    warps: int


@compile_time
def _half():  # type: ignore[no-untyped-def]
    """Half of the power that the numbers of codes lack is in x, half in the result: products keep their size."""
    return 2.0**60


@compile_time
def _layout(lines, warps):  # type: ignore[no-untyped-def]
    """Of [warps, outputs, words of 128 inputs]."""
    return gl.BlockedLayout([1, lines, 4], [1, 4, 8], [warps, 1, 1], [2, 1, 0])


@gluon_kernel()
def _load_part(  # type: ignore[no-untyped-def]
    word_ptr, scale_ptr, row, there, group, layout: gl.constexpr, INPUTS: gl.constexpr, GROUP: gl.constexpr,
    SCALE_ROWS: gl.constexpr, GROUPS: gl.constexpr,
):
    """Request GROUPS times 128 inputs of rows [warps, outputs], from group [warps, 1] on: tensors of words, then of scales."""
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]
    ALL: gl.constexpr = (INPUTS + GROUP - 1) // GROUP
    loaded = ()
    for number in gl.static_range(GROUPS):
        column = ((group + number) * 32)[:, :, None] + word
        kept = there[:, :, None] & (column < INPUTS // 4)
        source = word_ptr + (row * (INPUTS // 4))[:, :, None] + column
        loaded = loaded + (gl.load(source, mask=kept, other=0, eviction_policy="evict_first"),)  # type: ignore[assignment]
    for number in gl.static_range(GROUPS):
        at = (group + number) * 128 // GROUP
        loaded = loaded + (gl.load(scale_ptr + row // SCALE_ROWS * ALL + at, mask=there & (at < ALL), other=0.0),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _number(bits, DTYPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The lowest 16 bits of words as float32, times 2^60."""
    NUMBER: gl.constexpr = gl.bfloat16 if DTYPE == "bf16" else gl.float16
    return bits.to(gl.int16).to(NUMBER, bitcast=True).to(gl.float32) * _half()


@gluon_kernel()
def _load_x(  # type: ignore[no-untyped-def]
    x_ptr, there, group, layout: gl.constexpr, INPUTS: gl.constexpr, GROUPS: gl.constexpr,
):
    """The inputs of a part, of rows that begin at x_ptr [warps, 1]: four numbers of 16 bits in a word."""
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :]
    loaded = ()
    for number in gl.static_range(GROUPS):
        column = (group + number) * 32 + word
        loaded = loaded + (gl.load(x_ptr + column, mask=there & (column < INPUTS // 4), other=0),)  # type: ignore[assignment]
    return loaded


@gluon_kernel()
def _multiply(  # type: ignore[no-untyped-def]
    total, loaded, x, DTYPE: gl.constexpr, GROUPS: gl.constexpr
):
    """total [warps, outputs, 32] + the products of a part, times what is left of the power that the codes lack."""
    for number in gl.static_range(GROUPS):
        words = loaded[number]
        sums = gl.zeros_like(total)
        for place in gl.static_range(4):
            code = (((words << (24 - 8 * place)) >> 4) & -0x78100000).to(gl.float32, bitcast=True)
            sums += code * _number(x[number] >> (16 * place), DTYPE)[:, None, :]
        total += sums * loaded[GROUPS + number][:, :, None]
    return total


@gluon_kernel(do_not_specialize=["pairs", "stride"])
def few_bytes_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, word_ptr, scale_ptr, bias_ptr, out_ptr, chosen_ptr, reads_ptr, pairs, stride, limit, alpha,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, USED: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    CLAMPED: gl.constexpr, READS: gl.constexpr, PAIRS: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr,
    DTYPE: gl.constexpr, LINES: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [T, INPUTS / 4 words], words [experts, 2 OUTPUTS, INPUTS / 4] -> out [T, USED, OUTPUTS]"""
    layout: gl.constexpr = _layout(LINES, WARPS)
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    BLOCK: gl.constexpr = 4 * LINES
    BLOCKS: gl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    PARTS: gl.constexpr = (INPUTS + 128 * GROUPS - 1) // (128 * GROUPS)
    ROUNDS: gl.constexpr = (PARTS + WARPS - 1) // WARPS
    pair = gl.program_id(0) // BLOCKS
    output = gl.program_id(0) % BLOCKS * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, flat))[None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(1, layout)))[:, None]
    _wait_first(DEPENDENT)                               # first: down may read what the routing wrote
    row = gl.load(chosen_ptr + pair).to(gl.int64) * 2 * OUTPUTS + output + warp * 0
    there = (output < OUTPUTS) & (warp >= 0)
    gates = _load_part(word_ptr, scale_ptr, row, there, warp * GROUPS, layout, INPUTS, GROUP, SCALE_ROWS, GROUPS)
    ups = _load_part(word_ptr, scale_ptr, row + OUTPUTS, there, warp * GROUPS, layout, INPUTS, GROUP, SCALE_ROWS, GROUPS)
    if READS:
        if gl.program_id(0) == 0:
            _visited(chosen_ptr, reads_ptr, pairs, PAIRS, WARPS)
    source = x_ptr + (pair // USED).to(gl.int64) * stride
    gate = gl.zeros([WARPS, BLOCK, 32], gl.float32, layout)
    up = gl.zeros([WARPS, BLOCK, 32], gl.float32, layout)
    for turn in gl.static_range(ROUNDS):
        x = _load_x(source, lane >= 0, (turn * WARPS + lane) * GROUPS, layout, INPUTS, GROUPS)
        next_gates, next_ups = gates, ups
        if turn + 1 < ROUNDS:
            group = ((turn + 1) * WARPS + warp) * GROUPS
            next_gates = _load_part(word_ptr, scale_ptr, row, there, group, layout, INPUTS, GROUP, SCALE_ROWS, GROUPS)
            next_ups = _load_part(word_ptr, scale_ptr, row + OUTPUTS, there, group, layout, INPUTS, GROUP, SCALE_ROWS, GROUPS)
        gate = _multiply(gate, gates, x, DTYPE, GROUPS)
        up = _multiply(up, ups, x, DTYPE, GROUPS)
        gates, ups = next_gates, next_ups
    gate_sum = gl.sum(gl.sum(gate, axis=2), axis=0) * _half()
    up_sum = gl.sum(gl.sum(up, axis=2), axis=0) * _half()
    place = gl.program_id(0) % BLOCKS * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, flat))
    if BIAS:
        biases = bias_ptr + gl.load(chosen_ptr + pair) * 2 * OUTPUTS + place
        gate_sum += gl.load(biases, mask=place < OUTPUTS, other=0.0).to(gl.float32)
        up_sum += gl.load(biases + OUTPUTS, mask=place < OUTPUTS, other=0.0).to(gl.float32)
    result = gated_sums(gate_sum, up_sum, limit, alpha, GATE, CLAMPED)
    gl.store(out_ptr + pair.to(gl.int64) * OUTPUTS + place, result.to(out_ptr.dtype.element_ty), mask=place < OUTPUTS)


@gluon_kernel()
def _down_part(  # type: ignore[no-untyped-def]
    word_ptr, scale_ptr, chosen_ptr, output, unit, layout: gl.constexpr, USED: gl.constexpr, INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr,
):
    """The codes of units [warps, 1]: a part of the row of one of the token's experts. From L2: the routing wrote which."""
    expert = gl.load(chosen_ptr + gl.minimum(unit // PARTS, USED - 1), cache_modifier=".cg").to(gl.int64)
    there = (output < OUTPUTS) & (unit < USED * PARTS)
    group = unit % PARTS * GROUPS
    return _load_part(
        word_ptr, scale_ptr, expert * OUTPUTS + output, there, group, layout, INPUTS, GROUP, SCALE_ROWS, GROUPS
    )


@gluon_kernel()
def few_bytes_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, word_ptr, scale_ptr, bias_ptr, share_ptr, out_ptr, chosen_ptr,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, USED: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr,
    SCALE_ROWS: gl.constexpr, DTYPE: gl.constexpr, LINES: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """x [T, USED, INPUTS / 4 words], words [experts, OUTPUTS, INPUTS / 4], shares [T, USED] -> out [T, OUTPUTS]"""
    layout: gl.constexpr = _layout(LINES, WARPS)
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    BLOCK: gl.constexpr = 4 * LINES
    BLOCKS: gl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    PARTS: gl.constexpr = (INPUTS + 128 * GROUPS - 1) // (128 * GROUPS)
    ROUNDS: gl.constexpr = (USED * PARTS + WARPS - 1) // WARPS
    token = gl.program_id(0) // BLOCKS
    output = gl.program_id(0) % BLOCKS * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, flat))[None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(1, layout)))[:, None]
    experts, shares = chosen_ptr + token * USED, share_ptr + token * USED
    loaded = _down_part(
        word_ptr, scale_ptr, experts, output, warp, layout, USED, INPUTS, OUTPUTS, GROUP, SCALE_ROWS, PARTS, GROUPS
    )
    _wait_first(DEPENDENT)
    total = gl.zeros([WARPS, BLOCK, 32], gl.float32, layout)
    for turn in gl.static_range(ROUNDS):
        following = loaded
        if turn + 1 < ROUNDS:
            following = _down_part(
                word_ptr, scale_ptr, experts, output, (turn + 1) * WARPS + warp, layout, USED, INPUTS, OUTPUTS, GROUP, SCALE_ROWS,
                PARTS, GROUPS,
            )
        unit = turn * WARPS + lane
        place = gl.minimum(unit // PARTS, USED - 1)
        source = x_ptr + (token * USED + place) * (INPUTS // 4)
        x = _load_x(source, unit < USED * PARTS, unit % PARTS * GROUPS, layout, INPUTS, GROUPS)
        share = gl.load(shares + gl.minimum((turn * WARPS + warp) // PARTS, USED - 1)).to(gl.float32)
        sums = _multiply(gl.zeros_like(total), loaded, x, DTYPE, GROUPS)
        total += sums * share[:, :, None]
        loaded = following
    result = gl.sum(gl.sum(total, axis=2), axis=0) * _half()
    place = gl.program_id(0) % BLOCKS * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, flat))
    if BIAS:
        for number in gl.static_range(USED):
            biases = bias_ptr + gl.load(experts + number) * OUTPUTS + place
            share = gl.load(shares + number).to(gl.float32)
            result += share * gl.load(biases, mask=place < OUTPUTS, other=0.0).to(gl.float32)
    target = out_ptr + token.to(gl.int64) * OUTPUTS + place
    gl.store(target, result.to(out_ptr.dtype.element_ty), mask=place < OUTPUTS)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


UP = FewBytes(1, 4, 4)


def down_tile(width: int, tokens: int) -> FewBytes:
    groups = cdiv(width, SPAN)
    return FewBytes(2 if tokens == 1 else 4, cdiv(groups, cdiv(groups, 3)), 8)


def serves_bytes(gate_up: Codes, down: Codes, x: Tensor) -> bool:
    """Whole words in a row, and a scale for 128 inputs at least."""
    return HAS_GLUON and is_hopper(x.device) and x.dtype in NAMES and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0 and all(
        matrix.grid == "e4m3" and matrix.weight.shape[2] % 16 == 0 and matrix.group % SPAN == 0 for matrix in (gate_up, down)
    )


def experts_few_bytes(
    x: Tensor, gate_up: Codes, down: Codes, chosen: Tensor, weights: Tensor, out: Tensor, kind: str,
    biases: tuple[Tensor | None, Tensor | None], limit: float | None, alpha: float, reads: Tensor | None,
) -> Tensor:
    """As experts_triton, into `out`."""
    hidden, width = down.weight.shape[1:]
    tokens, used = chosen.shape
    inner = torch.empty((tokens * used, width), dtype=x.dtype, device=x.device)
    up, back = UP, down_tile(width, tokens)
    given = {"USED": used, "DTYPE": NAMES[x.dtype], **dependent_launch(x.device)}
    few_bytes_up_kernel[len(inner) * cdiv(width, 4 * up.lines),](
        x.view(torch.int64), gate_up.weight.view(torch.int32), gate_up.scale, x if biases[0] is None else biases[0], inner,
        chosen, chosen if reads is None else reads, tokens * used, x.stride(0) // 4, float(limit or 0.0), float(alpha),
        INPUTS=hidden, OUTPUTS=width, GATE=GATES[kind], BIAS=biases[0] is not None, CLAMPED=limit is not None,
        READS=reads is not None, PAIRS=power_of_two(MOST_TOKENS * used), GROUP=gate_up.group, SCALE_ROWS=gate_up.scale_rows,
        LINES=up.lines, GROUPS=up.groups, WARPS=up.warps, num_warps=up.warps, **given,
    )
    few_bytes_down_kernel[tokens * cdiv(hidden, 4 * back.lines),](
        inner.view(torch.int64), down.weight.view(torch.int32), down.scale, x if biases[1] is None else biases[1], weights, out,
        chosen, INPUTS=width, OUTPUTS=hidden, BIAS=biases[1] is not None, GROUP=down.group, SCALE_ROWS=down.scale_rows,
        LINES=back.lines, GROUPS=back.groups, WARPS=back.warps, num_warps=back.warps, **given,
    )
    return out

"""The experts of a few tokens on a GPU: every pair of a token and an expert is a GEMV. No pairs are sorted.

    up      a CTA: some outputs of one pair's expert, gate and up; the activation follows in the same registers
    down    a CTA: some outputs of one token, from all of its experts in their order, so that nothing is left to sum

Only reading the weights takes time. Up may read nothing of them before it knows the experts. Down knows them when it starts: up
lets it start (PDL) after the routing is complete, so down requests its first weights while up still runs.

Two tokens with the same expert read its weights twice, the second time mostly from L2. `serves` says where that is rare.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.matrices import Codes
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.registry import tl, triton_kernel

MOST_TOKENS = 8
REREAD = 1.15                        # reads of weights, for each expert that is visited


class Few(NamedTuple):
    outputs: int                     # of a CTA
    inputs: int                      # of a step
    warps: int


@triton_kernel()
def _weights_of(  # type: ignore[no-untyped-def]
    weight_ptr, first, start, column, output, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, EVEN: tl.constexpr,
):
    """A block of a matrix whose first output is row `first` of the tensor; zeros beyond its ends."""
    place = weight_ptr + (first + output)[:, None] * INPUTS + (start + column)[None, :]
    if EVEN:
        return tl.load(place, eviction_policy="evict_first")
    inside = (output < OUTPUTS)[:, None] & (start + column < INPUTS)[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton_kernel(do_not_specialize=["pairs"])
def _experts_few_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, shared_ptr, bias_ptr, out_ptr, chosen_ptr, reads_ptr, pairs, stride, limit, alpha,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, USED: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, CLAMPED: tl.constexpr, READS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [T, INPUTS], weight [experts, 2 OUTPUTS, INPUTS] -> out [T, USED + SHARED, OUTPUTS]. The shared expert is SHARED times as
    wide as others: [2 SHARED OUTPUTS, INPUTS]."""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = INPUTS % STEP == 0 and OUTPUTS % BLOCK == 0
    pair = tl.program_id(0) // blocks
    output = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, STEP)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()            # behind the wait: down may read what the routing wrote
    token, place = pair // (USED + SHARED), pair % (USED + SHARED)
    first = tl.load(chosen_ptr + token * USED + tl.minimum(place, USED - 1)) * 2 * OUTPUTS
    base, partner = weight_ptr, OUTPUTS                  # rows from a gate to its partner
    if SHARED > 0:
        partner = tl.where(place < USED, OUTPUTS, SHARED * OUTPUTS)
        if place >= USED:
            base = shared_ptr
            first = (place - USED).to(tl.int64) * OUTPUTS
    row = x_ptr + token.to(tl.int64) * stride + column
    gates = _weights_of(base, first, 0, column, output, INPUTS, OUTPUTS, EVEN)
    ups = _weights_of(base, first + partner, 0, column, output, INPUTS, OUTPUTS, EVEN)
    if READS:
        if tl.program_id(0) == 0:
            visited_experts(chosen_ptr, reads_ptr, pairs, PAIRS)
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, INPUTS - STEP, STEP):
        next_gates = _weights_of(base, first, start + STEP, column, output, INPUTS, OUTPUTS, EVEN)
        next_ups = _weights_of(base, first + partner, start + STEP, column, output, INPUTS, OUTPUTS, EVEN)
        x = tl.load(row + start).to(tl.float32)
        gate += tl.sum(gates.to(tl.float32) * x[None, :], 1)
        up += tl.sum(ups.to(tl.float32) * x[None, :], 1)
        gates, ups = next_gates, next_ups
    last: tl.constexpr = (INPUTS - 1) // STEP * STEP
    x = tl.load(row + last, mask=column < INPUTS - last, other=0.0).to(tl.float32)
    gate += tl.sum(gates.to(tl.float32) * x[None, :], 1)
    up += tl.sum(ups.to(tl.float32) * x[None, :], 1)
    if BIAS:
        biases = bias_ptr + first + output
        gate += tl.load(biases, mask=output < OUTPUTS, other=0.0).to(tl.float32)
        up += tl.load(biases + OUTPUTS, mask=output < OUTPUTS, other=0.0).to(tl.float32)
    result = gated_sums(gate, up, limit, alpha, GATE, CLAMPED)
    out = out_ptr + pair.to(tl.int64) * OUTPUTS + output
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


@triton_kernel()
def visited_experts(chosen_ptr, reads_ptr, pairs, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many experts there are among the pairs: those that are the first of their expert."""
    pair = tl.arange(0, PAIRS)
    experts = tl.load(chosen_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    equal = (experts[:, None] == experts[None, :]) & (pair[:, None] > pair[None, :])
    again = tl.sum(equal.to(tl.int32), 1)
    tl.store(reads_ptr, tl.sum(((again == 0) & (pair < pairs)).to(tl.int32)))


@triton_kernel()
def _down_row(  # type: ignore[no-untyped-def]
    chosen_ptr, token, step, USED: tl.constexpr, SHARED: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr,
):
    """The first row of a step's expert; 0 in the shared one. From L2: the routing wrote it a moment ago."""
    place = tl.minimum(step // CHUNKS, USED - 1)
    first = tl.load(chosen_ptr + token * USED + place, cache_modifier=".cg") * OUTPUTS
    if SHARED > 0:
        first = tl.where(step < USED * CHUNKS, first, 0)
    return first


@triton_kernel()
def _down_block(  # type: ignore[no-untyped-def]
    weight_ptr, shared_ptr, first, step, column, output, USED: tl.constexpr, SHARED: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr,
):
    """The block of weights of a token's step, from the rows that begin at `first`; behind the last step nothing is read."""
    place = step // CHUNKS
    start = step % CHUNKS * STEP
    base, apart = weight_ptr, 1
    if SHARED > 0:
        apart = tl.where(place < USED, 1, SHARED)
        if place >= USED:
            base = shared_ptr + (place - USED) * INPUTS
    inside = (output < OUTPUTS)[:, None] & (start + column < tl.where(place < USED + SHARED, INPUTS, 0))[None, :]
    source = base + ((first + output) * apart)[:, None] * INPUTS + (start + column)[None, :]
    return tl.load(source, mask=inside, other=0.0, eviction_policy="evict_first")


@triton_kernel()
def _down_input(  # type: ignore[no-untyped-def]
    x_ptr, share_ptr, token, step, column, USED: tl.constexpr, SHARED: tl.constexpr, INPUTS: tl.constexpr, CHUNKS: tl.constexpr,
    STEP: tl.constexpr,
):
    """A step's part of the activated row, and the expert's share in the token."""
    place = tl.minimum(step // CHUNKS, USED + SHARED - 1)
    start = step % CHUNKS * STEP
    x = tl.load(x_ptr + (token * (USED + SHARED) + place) * INPUTS + start + column, mask=start + column < INPUTS, other=0.0)
    share = tl.load(share_ptr + token * USED + tl.minimum(place, USED - 1)).to(tl.float32)
    if SHARED > 0:
        share = tl.where(place < USED, share, 1.0)
    return x, share


@triton_kernel()
def _experts_few_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, shared_ptr, bias_ptr, share_ptr, out_ptr, chosen_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, USED: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """x [T, USED + SHARED, INPUTS], weight [experts, OUTPUTS, INPUTS], shares [T, USED] -> out [T, OUTPUTS]. The shared expert is
    [OUTPUTS, SHARED INPUTS].

    The blocks of the next two steps are on their way while one is multiplied. Where a step takes a whole row, it waits for
    nothing else (AHEAD): its x and its share are requested one step before, and its expert one step before its block. With
    several steps for a row, a loop that carries less is faster: the compiler unrolls it."""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    CHUNKS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    AHEAD: tl.constexpr = CHUNKS == 1
    token = (tl.program_id(0) // blocks).to(tl.int64)
    output = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, STEP)
    first = _down_row(chosen_ptr, token, 0, USED, SHARED, OUTPUTS, CHUNKS)
    second = _down_row(chosen_ptr, token, 1, USED, SHARED, OUTPUTS, CHUNKS)
    if AHEAD:
        third = _down_row(chosen_ptr, token, 2, USED, SHARED, OUTPUTS, CHUNKS)
    weights = _down_block(weight_ptr, shared_ptr, first, 0, column, output, USED, SHARED, INPUTS, OUTPUTS, CHUNKS, STEP)
    following = _down_block(weight_ptr, shared_ptr, second, 1, column, output, USED, SHARED, INPUTS, OUTPUTS, CHUNKS, STEP)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD:
        x, share = _down_input(x_ptr, share_ptr, token, 0, column, USED, SHARED, INPUTS, CHUNKS, STEP)
    sums = tl.zeros((BLOCK, STEP), tl.float32)
    biases = tl.zeros((BLOCK,), tl.float32)
    for step in range((USED + SHARED) * CHUNKS):
        if not AHEAD:
            third = _down_row(chosen_ptr, token, step + 2, USED, SHARED, OUTPUTS, CHUNKS)
            x, share = _down_input(x_ptr, share_ptr, token, step, column, USED, SHARED, INPUTS, CHUNKS, STEP)
        later = _down_block(
            weight_ptr, shared_ptr, third, step + 2, column, output, USED, SHARED, INPUTS, OUTPUTS, CHUNKS, STEP
        )
        if AHEAD:
            fourth = _down_row(chosen_ptr, token, step + 3, USED, SHARED, OUTPUTS, CHUNKS)
            next_x, next_share = _down_input(x_ptr, share_ptr, token, step + 1, column, USED, SHARED, INPUTS, CHUNKS, STEP)
        sums += weights.to(tl.float32) * (share * x.to(tl.float32))[None, :]
        if BIAS:
            bias = tl.load(bias_ptr + first + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
            biases += tl.where((step % CHUNKS == 0) & (step < USED * CHUNKS), share, 0.0) * bias
        weights, following = following, later
        first, second = second, third
        if AHEAD:
            third, x, share = fourth, next_x, next_share
    result = tl.sum(sums, 1) + biases
    tl.store(out_ptr + token * OUTPUTS + output, result.to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def serves(tokens: int, used: int, experts: int) -> bool:
    """Few tokens, and few experts that two of them share, if routing is even."""
    visited = experts * (1 - (1 - used / experts) ** tokens)
    return tokens <= MOST_TOKENS and tokens * used <= REREAD * visited


def few_up(width: int, hidden: int) -> Few:
    return Few(2, _step(hidden), 2) if hidden <= 2048 else Few(4, _step(hidden), 4)


def few_down(width: int, hidden: int) -> Few:
    return Few(8, _step(width), 8) if width <= 2048 else Few(4, _step(width), 4)


def _step(inputs: int) -> int:
    """Inputs of a step: a whole row where it is short, else a power of two that leaves few lanes idle at the end."""
    if inputs <= 1024:
        return max(16, power_of_two(inputs))
    return next((size for size in (2048, 1024, 512) if cdiv(inputs, size) * size <= 1.1 * inputs), 512)


def shared_parts(gate_up: Tensor, down: Tensor, shared: tuple[Tensor, Tensor]) -> int:
    """How many experts wide the shared one is, if the kernels take it as so many more; else 0."""
    width, wide = down.shape[2], shared[1].shape[1]
    whole = shared[0].dtype == gate_up.dtype and wide % width == 0
    return wide // width if whole and shared[0].is_contiguous() and shared[1].is_contiguous() else 0


def experts_few(
    x: Tensor, gate_up: Codes, down: Codes, chosen: Tensor, weights: Tensor, out: Tensor, kind: str,
    biases: tuple[Tensor | None, Tensor | None], limit: float | None, alpha: float, reads: Tensor | None,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As experts_triton, into `out`. `shared`: as `shared_parts` allows it."""
    hidden, width = down.weight.shape[1:]
    tokens, used = chosen.shape
    parts = 0 if shared is None else shared[1].shape[1] // width
    inner = torch.empty((tokens * (used + parts), width), dtype=x.dtype, device=x.device)
    wide, back_wide = (chosen, chosen) if shared is None else shared
    up, back = few_up(width, hidden), few_down(width, hidden)
    given = {"USED": used, "SHARED": parts, **dependent_launch(x.device)}
    _experts_few_up_kernel[len(inner) * cdiv(width, up.outputs),](
        x, gate_up.weight, wide, x if biases[0] is None else biases[0], inner, chosen,
        chosen if reads is None else reads, tokens * used, x.stride(0), float(limit or 0.0), float(alpha), INPUTS=hidden,
        OUTPUTS=width, GATE=GATES[kind], BIAS=biases[0] is not None, CLAMPED=limit is not None, READS=reads is not None,
        PAIRS=power_of_two(MOST_TOKENS * used), BLOCK=up.outputs, STEP=up.inputs, num_warps=up.warps, **given,
    )
    _experts_few_down_kernel[tokens * cdiv(hidden, back.outputs),](
        inner, down.weight, back_wide, x if biases[1] is None else biases[1], weights, out, chosen, INPUTS=width,
        OUTPUTS=hidden, BIAS=biases[1] is not None, BLOCK=back.outputs, STEP=back.inputs, num_warps=back.warps, **given,
    )
    return out

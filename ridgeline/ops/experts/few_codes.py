"""As few_tokens.py, with MXFP4 codes (mxfp4.py): every pair of a token and an expert is a GEMV.

A thread has the 32 codes of a group, 16 bytes, and the same inputs of x. Codes become float32 numbers by bits alone, 2^126 times
too small: x is multiplied by 2^64 before, and a group's sum by its scale and the rest of the power. So a weight takes about five
instructions, which is what limits these kernels: at the memory's speed an SM has 3.4. Tensor cores would need no conversion to
float32, but Triton moves their operands through shared memory: that took three times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.few_tokens import MOST_TOKENS, Few, visited_experts
from ridgeline.ops.experts.mxfp4 import placed_codes
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.registry import tl, triton_kernel


@triton_kernel()
def _block_of(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, first, start, output, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):
    """(codes [BLOCK, groups, 16], scales [BLOCK, groups]) of a matrix whose first output is row `first`; zeros beyond it."""
    group = start // 32 + tl.arange(0, STEP // 32)
    row = first + output
    inside = (output < OUTPUTS)[:, None] & (group < INPUTS // 32)[None, :]
    place = (group * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
    codes = tl.load(
        code_ptr + (row * (INPUTS // 2))[:, None, None] + place, mask=inside[:, :, None], other=0, eviction_policy="evict_first"
    )
    scales = tl.load(scale_ptr + (row * (INPUTS // 32))[:, None] + group[None, :], mask=inside, other=0)
    return codes, scales


@triton_kernel()
def _rows_of(x_ptr, start, INPUTS: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Even and odd inputs of x, [groups, 16] each, times 2^64."""
    column = start + tl.arange(0, STEP)
    x = tl.load(x_ptr + column, mask=column < INPUTS, other=0.0).to(tl.float32) * 1.8446744073709552e19
    return tl.split(x.reshape((STEP // 32, 16, 2)))


@triton_kernel()
def _products(codes, scales, even, odd):  # type: ignore[no-untyped-def]
    """[BLOCK, groups]: the sums of groups."""
    bits = placed_codes(codes)
    low = (bits << 16).to(tl.float32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    factor = ((scales.to(tl.int32) + 62) << 23).to(tl.float32, bitcast=True)     # 2^(scale - 127), times 2^(126 - 64)
    return tl.sum(low * even[None, :, :] + high * odd[None, :, :], 2) * factor


@triton_kernel(do_not_specialize=["pairs"])
def _experts_codes_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, bias_ptr, out_ptr, chosen_ptr, reads_ptr, pairs, stride, limit, alpha,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, USED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, READS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [T, INPUTS], codes [experts, 2 OUTPUTS, INPUTS / 2] -> out [pairs, OUTPUTS]"""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    pair = tl.program_id(0) // blocks
    output = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()            # behind the wait: down may read what the routing wrote
    first = tl.load(chosen_ptr + pair) * 2 * OUTPUTS
    row = x_ptr + (pair // USED).to(tl.int64) * stride
    gates, gate_scales = _block_of(code_ptr, scale_ptr, first, 0, output, INPUTS, OUTPUTS, STEP)
    ups, up_scales = _block_of(code_ptr, scale_ptr, first + OUTPUTS, 0, output, INPUTS, OUTPUTS, STEP)
    if READS:
        if tl.program_id(0) == 0:
            visited_experts(chosen_ptr, reads_ptr, pairs, PAIRS)
    gate = tl.zeros((BLOCK, STEP // 32), tl.float32)
    up = tl.zeros((BLOCK, STEP // 32), tl.float32)
    for start in range(0, INPUTS, STEP):
        later = start + STEP
        next_gates, next_gate_scales = _block_of(code_ptr, scale_ptr, first, later, output, INPUTS, OUTPUTS, STEP)
        next_ups, next_up_scales = _block_of(code_ptr, scale_ptr, first + OUTPUTS, later, output, INPUTS, OUTPUTS, STEP)
        even, odd = _rows_of(row, start, INPUTS, STEP)
        gate += _products(gates, gate_scales, even, odd)
        up += _products(ups, up_scales, even, odd)
        gates, gate_scales, ups, up_scales = next_gates, next_gate_scales, next_ups, next_up_scales
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if BIAS:
        biases = bias_ptr + first + output
        gate_sum += tl.load(biases, mask=output < OUTPUTS, other=0.0).to(tl.float32)
        up_sum += tl.load(biases + OUTPUTS, mask=output < OUTPUTS, other=0.0).to(tl.float32)
    result = gated_sums(gate_sum, up_sum, limit, alpha, GATE, CLAMPED)
    out = out_ptr + pair.to(tl.int64) * OUTPUTS + output
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


@triton_kernel()
def _codes_at(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, chosen_ptr, token, step, output, USED: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The block of a token's step; of the last step again where there are no more."""
    chunks: tl.constexpr = (INPUTS + STEP - 1) // STEP
    known = tl.minimum(step, USED * chunks - 1)
    expert = tl.load(chosen_ptr + token * USED + known // chunks, cache_modifier=".cg")
    return _block_of(code_ptr, scale_ptr, expert * OUTPUTS, known % chunks * STEP, output, INPUTS, OUTPUTS, STEP)


@triton_kernel()
def _experts_codes_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, bias_ptr, share_ptr, out_ptr, chosen_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, USED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """x [pairs, INPUTS], codes [experts, OUTPUTS, INPUTS / 2], shares [pairs] -> out [T, OUTPUTS]"""
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    chunks: tl.constexpr = (INPUTS + STEP - 1) // STEP
    token = (tl.program_id(0) // blocks).to(tl.int64)
    output = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    codes, scales = _codes_at(code_ptr, scale_ptr, chosen_ptr, token, 0, output, USED, INPUTS, OUTPUTS, STEP)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((BLOCK, STEP // 32), tl.float32)
    biases = tl.zeros((BLOCK,), tl.float32)
    for step in range(USED * chunks):
        later, later_scales = _codes_at(
            code_ptr, scale_ptr, chosen_ptr, token, step + 1, output, USED, INPUTS, OUTPUTS, STEP
        )
        pair = token * USED + step // chunks
        start = step % chunks * STEP
        share = tl.load(share_ptr + pair).to(tl.float32)
        even, odd = _rows_of(x_ptr + pair * INPUTS, start, INPUTS, STEP)
        sums += share * _products(codes, scales, even, odd)
        if BIAS:
            expert = tl.load(chosen_ptr + pair)
            bias = tl.load(bias_ptr + expert * OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
            biases += tl.where(start == 0, share, 0.0) * bias
        codes, scales = later, later_scales
    result = tl.sum(sums, 1) + biases
    tl.store(out_ptr + token * OUTPUTS + output, result.to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def codes_up(width: int, hidden: int) -> Few:
    return Few(8, _step(hidden), 4)


def codes_down(width: int, hidden: int) -> Few:
    return Few(4, _step(width), 4)


def _step(inputs: int) -> int:
    return max(32, min(1024, power_of_two(inputs)))


def experts_few_codes(
    x: Tensor, gate_up: Tensor, down: Tensor, scales: tuple[Tensor, Tensor], chosen: Tensor, weights: Tensor, out: Tensor,
    kind: str, biases: tuple[Tensor | None, Tensor | None], limit: float | None, alpha: float, reads: Tensor | None,
) -> Tensor:
    """As experts_triton, into `out`."""
    hidden, width = down.shape[1], 2 * down.shape[2]
    tokens, used = chosen.shape
    pairs = tokens * used
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    dependent = dependent_launch(x.device)
    up, back = codes_up(width, hidden), codes_down(width, hidden)
    _experts_codes_up_kernel[pairs * cdiv(width, up.outputs),](
        x, gate_up, scales[0], x if biases[0] is None else biases[0], inner, chosen, chosen if reads is None else reads, pairs,
        x.stride(0), float(limit or 0.0), float(alpha), INPUTS=hidden, OUTPUTS=width, USED=used, GATE=GATES[kind],
        BIAS=biases[0] is not None, CLAMPED=limit is not None, READS=reads is not None, PAIRS=power_of_two(MOST_TOKENS * used),
        BLOCK=up.outputs, STEP=up.inputs, num_warps=up.warps, **dependent,
    )
    _experts_codes_down_kernel[tokens * cdiv(hidden, back.outputs),](
        inner, down, scales[1], x if biases[1] is None else biases[1], weights, out, chosen, INPUTS=width, OUTPUTS=hidden,
        USED=used, BIAS=biases[1] is not None, BLOCK=back.outputs, STEP=back.inputs, num_warps=back.warps, **dependent,
    )
    return out

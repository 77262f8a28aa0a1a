"""As few_tokens.py, with MXFP4 codes (mxfp4.py): every pair of a token and an expert is a GEMV.

A thread has the 32 codes of a group, 16 bytes, and the same inputs of x. Codes become float32 numbers by bits alone, 2^126 times
too small: x is multiplied by 2^64 before, and a group's sum by its scale and the rest of the power. So a weight takes seven to
ten instructions, which is what limits these kernels: at the memory's speed an SM has 3.4. On an H200, with the matrices of
gpt-oss-20b, one token takes 46 us, 26 % of the bandwidth; with 16-bit weights it takes 61 us.

Written in Gluon, because Triton's choice of layouts moves x, scales and sums through shared memory in every step. The
interpreter and other devices take the tiles of expert_products.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.few_tokens import MOST_TOKENS, Few
from ridgeline.ops.experts.mxfp4 import placed_codes
from ridgeline.ops.hopper import HAS_GLUON, compile_time, gl
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.registry import gluon_kernel

STEP = 1024                          # inputs: a group for each lane of a warp


@compile_time
def _layout(warps):  # type: ignore[no-untyped-def]
    """Of [outputs, 32 groups, 16 bytes]: a warp reads 512 bytes of a row."""
    return gl.BlockedLayout([1, 1, 16], [1, 32, 1], [warps, 1, 1], [2, 1, 0])


@gluon_kernel()
def _wait_first(DEPENDENT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before, then let the next one start: it may read what was complete before this one began."""
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon_kernel()
def _block_of(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, first, start, output, layout: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr,
):
    """(codes [BLOCK, 32, 16], scales [BLOCK, 32]) of a matrix whose first output is row `first`; zeros beyond its ends."""
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    group = start // 32 + gl.arange(0, 32, gl.SliceLayout(0, flat))
    byte = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    row = (first + output)[:, None]
    inside = (output < OUTPUTS)[:, None] & (group < INPUTS // 32)[None, :]
    place = row * (INPUTS // 2) + (group * 16)[None, :]
    codes = gl.load(
        code_ptr + place[:, :, None] + byte, mask=inside[:, :, None] & (byte >= 0), other=0, eviction_policy="evict_first"
    )
    return codes, gl.load(scale_ptr + row * (INPUTS // 32) + group[None, :], mask=inside, other=0)


@gluon_kernel()
def _rows_of(x_ptr, start, layout: gl.constexpr, INPUTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Even and odd inputs of x, [32, 16] each, times 2^64; x_ptr points to pairs of bfloat16 numbers."""
    words: gl.constexpr = gl.SliceLayout(0, layout)
    group = start // 32 + gl.arange(0, 32, gl.SliceLayout(1, words))[:, None]
    place = group * 16 + gl.arange(0, 16, gl.SliceLayout(0, words))[None, :]
    pairs = gl.load(x_ptr + place, mask=place < INPUTS // 2, other=0)
    even = (pairs << 16).to(gl.float32, bitcast=True) * 1.8446744073709552e19
    odd = (pairs & -65536).to(gl.float32, bitcast=True) * 1.8446744073709552e19
    return even, odd


@gluon_kernel()
def _products(codes, scales, even, odd):  # type: ignore[no-untyped-def]
    """[BLOCK, 32]: the sums of groups."""
    bits = placed_codes(codes)
    low = (bits << 16).to(gl.float32, bitcast=True)
    high = (bits & -65536).to(gl.float32, bitcast=True)
    factor = ((scales.to(gl.int32) + 62) << 23).to(gl.float32, bitcast=True)     # 2^(scale - 127), times 2^(126 - 64)
    return gl.sum(low * even[None, :, :] + high * odd[None, :, :], axis=2) * factor


@gluon_kernel()
def _visited(chosen_ptr, reads_ptr, pairs, PAIRS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """As few_tokens.py's visited_experts."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    row, column = gl.arange(0, PAIRS, gl.SliceLayout(1, layout)), gl.arange(0, PAIRS, gl.SliceLayout(0, layout))
    mine = gl.load(chosen_ptr + row, mask=row < pairs, other=-1)[:, None]
    other = gl.load(chosen_ptr + column, mask=column < pairs, other=-1)[None, :]
    again = gl.sum(((mine == other) & (row[:, None] > column[None, :])).to(gl.int32), axis=1)
    gl.store(reads_ptr, gl.sum(((again == 0) & (row < pairs)).to(gl.int32), axis=0))


@gluon_kernel(do_not_specialize=["pairs"])
def _experts_codes_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, bias_ptr, out_ptr, chosen_ptr, reads_ptr, pairs, stride, limit, alpha,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, USED: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    CLAMPED: gl.constexpr, READS: gl.constexpr, PAIRS: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """x [T, INPUTS / 2 pairs], codes [experts, 2 OUTPUTS, INPUTS / 2] -> out [pairs, OUTPUTS]"""
    layout: gl.constexpr = _layout(WARPS)
    blocks: gl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    pair = gl.program_id(0) // blocks
    output = gl.program_id(0) % blocks * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, flat))
    _wait_first(DEPENDENT)
    first = gl.load(chosen_ptr + pair) * 2 * OUTPUTS
    row = x_ptr + (pair // USED).to(gl.int64) * stride
    gates, gate_scales = _block_of(code_ptr, scale_ptr, first, 0, output, layout, INPUTS, OUTPUTS)
    ups, up_scales = _block_of(code_ptr, scale_ptr, first + OUTPUTS, 0, output, layout, INPUTS, OUTPUTS)
    if READS:
        if gl.program_id(0) == 0:
            _visited(chosen_ptr, reads_ptr, pairs, PAIRS, WARPS)
    gate = gl.zeros([BLOCK, 32], gl.float32, flat)
    up = gl.zeros([BLOCK, 32], gl.float32, flat)
    for start in range(0, INPUTS, 1024):
        later = start + 1024
        next_gates, next_gate_scales = _block_of(code_ptr, scale_ptr, first, later, output, layout, INPUTS, OUTPUTS)
        next_ups, next_up_scales = _block_of(code_ptr, scale_ptr, first + OUTPUTS, later, output, layout, INPUTS, OUTPUTS)
        even, odd = _rows_of(row, start, layout, INPUTS)
        gate += _products(gates, gate_scales, even, odd)
        up += _products(ups, up_scales, even, odd)
        gates, gate_scales, ups, up_scales = next_gates, next_gate_scales, next_ups, next_up_scales
    gate_sum, up_sum = gl.sum(gate, axis=1), gl.sum(up, axis=1)
    if BIAS:
        biases = bias_ptr + first + output
        gate_sum += gl.load(biases, mask=output < OUTPUTS, other=0.0).to(gl.float32)
        up_sum += gl.load(biases + OUTPUTS, mask=output < OUTPUTS, other=0.0).to(gl.float32)
    result = gated_sums(gate_sum, up_sum, limit, alpha, GATE, CLAMPED)
    out = out_ptr + pair.to(gl.int64) * OUTPUTS + output
    gl.store(out, result.to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


@gluon_kernel()
def _codes_at(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, chosen_ptr, token, step, output, layout: gl.constexpr, USED: gl.constexpr, INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
):
    """The block of a token's step; of the last step again where there are no more."""
    chunks: gl.constexpr = (INPUTS + 1023) // 1024
    known = gl.minimum(step, USED * chunks - 1)
    expert = gl.load(chosen_ptr + token * USED + known // chunks, cache_modifier=".cg")
    return _block_of(code_ptr, scale_ptr, expert * OUTPUTS, known % chunks * 1024, output, layout, INPUTS, OUTPUTS)


@gluon_kernel()
def _experts_codes_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, bias_ptr, share_ptr, out_ptr, chosen_ptr,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, USED: gl.constexpr, BIAS: gl.constexpr, BLOCK: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [pairs, INPUTS / 2 pairs of numbers], codes [experts, OUTPUTS, INPUTS / 2], shares [pairs] -> out [T, OUTPUTS]"""
    layout: gl.constexpr = _layout(WARPS)
    blocks: gl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    chunks: gl.constexpr = (INPUTS + 1023) // 1024
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    token = (gl.program_id(0) // blocks).to(gl.int64)
    output = gl.program_id(0) % blocks * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, flat))
    codes, scales = _codes_at(code_ptr, scale_ptr, chosen_ptr, token, 0, output, layout, USED, INPUTS, OUTPUTS)
    later, later_scales = _codes_at(code_ptr, scale_ptr, chosen_ptr, token, 1, output, layout, USED, INPUTS, OUTPUTS)
    _wait_first(DEPENDENT)
    sums = gl.zeros([BLOCK, 32], gl.float32, flat)
    biases = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, flat))
    for step in range(USED * chunks):
        last, last_scales = _codes_at(
            code_ptr, scale_ptr, chosen_ptr, token, step + 2, output, layout, USED, INPUTS, OUTPUTS
        )
        pair = token * USED + step // chunks
        start = step % chunks * 1024
        share = gl.load(share_ptr + pair).to(gl.float32)
        even, odd = _rows_of(x_ptr + pair * (INPUTS // 2), start, layout, INPUTS)
        sums += share * _products(codes, scales, even, odd)
        if BIAS:
            expert = gl.load(chosen_ptr + pair)
            bias = gl.load(bias_ptr + expert * OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(gl.float32)
            biases += gl.where(start == 0, share, 0.0) * bias
        codes, scales, later, later_scales = later, later_scales, last, last_scales
    result = gl.sum(sums, axis=1) + biases
    gl.store(out_ptr + token * OUTPUTS + output, result.to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def runs(x: Tensor, hidden: int) -> bool:
    """Rows of x are read as pairs of numbers."""
    aligned = x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0 and hidden % 2 == 0
    return HAS_GLUON and x.is_cuda and x.dtype == torch.bfloat16 and aligned


def codes_up() -> Few:
    return Few(8, STEP, 4)


def codes_down() -> Few:
    return Few(8, STEP, 8)


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
    up, back = codes_up(), codes_down()
    _experts_codes_up_kernel[pairs * cdiv(width, up.outputs),](
        x.view(torch.int32), gate_up, scales[0], x if biases[0] is None else biases[0], inner, chosen,
        chosen if reads is None else reads, pairs, x.stride(0) // 2, float(limit or 0.0), float(alpha), INPUTS=hidden,
        OUTPUTS=width, USED=used, GATE=GATES[kind], BIAS=biases[0] is not None, CLAMPED=limit is not None,
        READS=reads is not None, PAIRS=power_of_two(MOST_TOKENS * used), BLOCK=up.outputs, WARPS=up.warps, num_warps=up.warps,
        **dependent,
    )
    _experts_codes_down_kernel[tokens * cdiv(hidden, back.outputs),](
        inner.view(torch.int32), down, scales[1], x if biases[1] is None else biases[1], weights, out, chosen, INPUTS=width,
        OUTPUTS=hidden, USED=used, BIAS=biases[1] is not None, BLOCK=back.outputs, WARPS=back.warps, num_warps=back.warps,
        **dependent,
    )
    return out

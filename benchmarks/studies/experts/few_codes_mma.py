"""As few_tokens.py, with MXFP4 codes (mxfp4.py): every pair of a token and an expert is a GEMV, on tensor cores.

A warp has a strip of 16 outputs, and multiplies 128 inputs at a time by eight `mma.sync` of 16 inputs. Which inputs these are is
free, as long as the codes and x agree: lane 4 r + t has the 32 codes of its group t of outputs r and r + 8, 16 bytes each as they
lie in memory, and the same inputs of x. So nothing moves between lanes, and a group's scale is a factor of a lane's own numbers.
Of a word, code i of its lower and code i of its upper half become one operand, so that one shift moves both.

    up      a strip is eight gates and their partners, so a lane has both; a CTA has one strip for each warp
    down    the warps of a CTA have the experts of one token for one strip, and their sums are added in that order

All eight columns of the product are the same row of x. Written in Gluon; the interpreter and other devices take the tiles of
expert_products.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_gate import gated_sums
from ridgeline.ops.experts.few_tokens import MOST_TOKENS
from ridgeline.ops.hopper import HAS_GLUON, compile_time, gl
from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.linear.gemv import GATES
from ridgeline.ops.registry import gluon_kernel

WARPS = 4                            # of a CTA of up, with a strip each


@compile_time
def _lanes(warps):  # type: ignore[no-untyped-def]
    """Of [warps, 32, 4]: a lane has four words."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [warps, 1, 1], [2, 1, 0])


@compile_time
def _mma_text() -> str:
    """128 inputs of a warp's 16 outputs. Operands, four registers each: out sums; in sums, the codes of outputs r and of r + 8, x
    (16 words in order), and two factors of which the first register counts."""
    lines = [".reg .b32 a<4>; .reg .b32 b<2>; .reg .b32 t<2>; .reg .f32 s<4>;"]
    lines += [f"mov.f32 s{number}, ${4 + number};" for number in range(4)]
    for word in range(4):                                # eight codes of each output, two products
        for half in range(2):
            for part in range(2):                        # nibbles 2 half + part
                nibble = 2 * half + part
                for row in range(2):
                    source, target = f"${8 + 4 * row + word}", f"a{row + 2 * part}"
                    up, across = 12 - 4 * nibble, 6 - 4 * nibble
                    lines.append(f"shl.b32 t0, {source}, {up};" if up else f"mov.b32 t0, {source};")
                    lines.append(f"{'shl.b32' if across > 0 else 'shr.u32'} t1, {source}, {abs(across)};")
                    lines.append("and.b32 t1, t1, 0x01c001c0;")
                    lines.append(f"lop3.b32 {target}, t0, 0x80008000, t1, 0xea;")
                    lines.append(f"mul.bf16x2 {target}, {target}, ${32 + 4 * row};")
                # x of input i of the word and of i + 4: the words of x have the inputs 2 j and 2 j + 1.
                low, high = f"${16 + 4 * word + nibble // 2}", f"${16 + 4 * word + 2 + nibble // 2}"
                lines.append(f"prmt.b32 b{part}, {low}, {high}, {'0x7632' if nibble % 2 else '0x5410'};")
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {s0, s1, s2, s3}, {a0, a1, a2, a3}, {b0, b1}, "
                "{s0, s1, s2, s3};"
            )
    lines += [f"mov.f32 ${number}, s{number};" for number in range(4)]
    return "{ " + " ".join(lines) + " }"


@compile_time
def _mma_registers() -> str:
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * (8 + 16 + 8))


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
def _load_block(code_ptr, scale_ptr, low, high, kept, block, lane, word, INPUTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """128 inputs of the rows `low` and `high` [warps, 32] of the matrix, where `kept`: codes [warps, 32, 4] and scales; zeros
    beyond the inputs."""
    group = block * 4 + lane % 4
    inside = kept & (group < INPUTS // 32)
    whole = inside[:, :, None] & (word >= 0)
    first = code_ptr + (low * (INPUTS // 8) + group * 4)[:, :, None] + word
    second = code_ptr + (high * (INPUTS // 8) + group * 4)[:, :, None] + word
    return (
        gl.load(first, mask=whole, other=0, eviction_policy="evict_first"),
        gl.load(second, mask=whole, other=0, eviction_policy="evict_first"),
        gl.load(scale_ptr + low * (INPUTS // 32) + group, mask=inside, other=0),
        gl.load(scale_ptr + high * (INPUTS // 32) + group, mask=inside, other=0),
    )


@gluon_kernel()
def _factor(scale, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """2^126 times the scale, twice in a word."""
    exponent = gl.minimum(scale.to(gl.int32), 128) + 126
    return ((exponent << 7) | (exponent << 23))[:, :, None].broadcast_to([WARPS, 32, 4])


@gluon_kernel()
def _multiply(sums, loaded, x_ptr, block, lane, word, INPUTS: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """x_ptr [warps, 1]: the row of x of each warp, as pairs of bfloat16 numbers."""
    text: gl.constexpr = _mma_text()
    constraints: gl.constexpr = _mma_registers()
    group = block * 4 + lane % 4
    inside = (group < INPUTS // 32)[:, :, None] & (word >= 0)
    place = (x_ptr + group * 16)[:, :, None] + word
    operands = (sums, loaded[0], loaded[1])
    for part in gl.static_range(4):
        operands = operands + (gl.load(place + 4 * part, mask=inside, other=0),)  # type: ignore[assignment]
    operands = operands + (_factor(loaded[2], WARPS), _factor(loaded[3], WARPS))  # type: ignore[assignment]
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=True, pack=4)


@gluon_kernel()
def _strip(  # type: ignore[no-untyped-def]
    code_ptr, scale_ptr, x_ptr, low, high, kept, lane, word, first, INPUTS: gl.constexpr, WARPS: gl.constexpr
):
    """(sums of the outputs `low`, of `high`), [warps, 32] each: lanes with t = 0 have them. `first`: its first blocks."""
    layout: gl.constexpr = _lanes(WARPS)
    BLOCKS: gl.constexpr = (INPUTS + 127) // 128
    now, second, third, fourth = first
    sums = gl.zeros([WARPS, 32, 4], gl.float32, layout)
    for block in range(BLOCKS):
        later = _load_block(code_ptr, scale_ptr, low, high, kept, block + 4, lane, word, INPUTS)
        sums = _multiply(sums, now, x_ptr, block, lane, word, INPUTS, WARPS)
        now, second, third, fourth = second, third, fourth, later
    columns, _ = sums.reshape([WARPS, 32, 2, 2]).split()
    return columns.split()


@gluon_kernel()
def _first_blocks(code_ptr, scale_ptr, low, high, kept, lane, word, INPUTS: gl.constexpr):  # type: ignore[no-untyped-def]
    return (
        _load_block(code_ptr, scale_ptr, low, high, kept, 0, lane, word, INPUTS),
        _load_block(code_ptr, scale_ptr, low, high, kept, 1, lane, word, INPUTS),
        _load_block(code_ptr, scale_ptr, low, high, kept, 2, lane, word, INPUTS),
        _load_block(code_ptr, scale_ptr, low, high, kept, 3, lane, word, INPUTS),
    )


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
    CLAMPED: gl.constexpr, READS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [T, INPUTS], codes [experts, 2 OUTPUTS, INPUTS / 8 words] -> out [pairs, OUTPUTS]"""
    flat: gl.constexpr = gl.SliceLayout(2, _lanes(WARPS))
    blocks: gl.constexpr = (OUTPUTS + 8 * WARPS - 1) // (8 * WARPS)
    pair = gl.program_id(0) // blocks
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, flat))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _lanes(WARPS))))[None, :][:, None, :]
    output = (gl.program_id(0) % blocks * WARPS + warp) * 8 + lane // 4
    kept = output < OUTPUTS
    _wait_first(DEPENDENT)
    row = gl.load(chosen_ptr + pair) * 2 * OUTPUTS + output
    first = _first_blocks(code_ptr, scale_ptr, row, row + OUTPUTS, kept, lane, word, INPUTS)
    if READS:
        if gl.program_id(0) == 0:
            _visited(chosen_ptr, reads_ptr, pairs, PAIRS, WARPS)
    rows = x_ptr + (pair // USED).to(gl.int64) * stride + 0 * warp
    gate, up = _strip(code_ptr, scale_ptr, rows, row, row + OUTPUTS, kept, lane, word, first, INPUTS, WARPS)
    gate, up = gl.convert_layout(gate, flat), gl.convert_layout(up, flat)
    if BIAS:
        gate += gl.load(bias_ptr + row, mask=kept, other=0.0).to(gl.float32)
        up += gl.load(bias_ptr + row + OUTPUTS, mask=kept, other=0.0).to(gl.float32)
    result = gated_sums(gate, up, limit, alpha, GATE, CLAMPED)
    out = out_ptr + pair.to(gl.int64) * OUTPUTS + output
    gl.store(out, result.to(out_ptr.dtype.element_ty), mask=kept & (lane % 4 == 0))


@gluon_kernel()
def _experts_codes_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, code_ptr, scale_ptr, bias_ptr, share_ptr, out_ptr, chosen_ptr,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, USED: gl.constexpr, BIAS: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """x [pairs, INPUTS], codes [experts, OUTPUTS, INPUTS / 8 words], shares [pairs] -> out [T, OUTPUTS]"""
    flat: gl.constexpr = gl.SliceLayout(2, _lanes(WARPS))
    strips: gl.constexpr = (OUTPUTS + 15) // 16
    token = (gl.program_id(0) // strips).to(gl.int64)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, flat))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, flat))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _lanes(WARPS))))[None, :][:, None, :]
    pair = token * USED + gl.minimum(warp, USED - 1)
    expert = gl.load(chosen_ptr + pair, cache_modifier=".cg")
    output = gl.program_id(0) % strips * 16 + lane // 4
    low = expert * OUTPUTS + output
    high = low + 8                                       # OUTPUTS are whole strips
    kept = (warp < USED) & (output < OUTPUTS)
    first = _first_blocks(code_ptr, scale_ptr, low, high, kept, lane, word, INPUTS)
    _wait_first(DEPENDENT)
    share = gl.where(warp < USED, gl.load(share_ptr + pair).to(gl.float32), 0.0)
    rows = x_ptr + pair * (INPUTS // 2)
    upper, lower = _strip(code_ptr, scale_ptr, rows, low, high, kept, lane, word, first, INPUTS, WARPS)
    upper, lower = gl.convert_layout(upper, flat), gl.convert_layout(lower, flat)
    if BIAS:
        upper += gl.load(bias_ptr + low, mask=kept, other=0.0).to(gl.float32)
        lower += gl.load(bias_ptr + high, mask=kept, other=0.0).to(gl.float32)
    upper, lower = gl.sum(upper * share, axis=0), gl.sum(lower * share, axis=0)
    place = gl.arange(0, 32, gl.SliceLayout(0, flat))
    out = out_ptr + token * OUTPUTS + gl.program_id(0) % strips * 16 + place // 4
    gl.store(out, upper.to(out_ptr.dtype.element_ty), mask=place % 4 == 0)
    gl.store(out + 8, lower.to(out_ptr.dtype.element_ty), mask=place % 4 == 0)


# ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def runs(x: Tensor, hidden: int) -> bool:
    """Rows of x are read as pairs of numbers, and down has whole strips of 16 outputs."""
    aligned = x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0 and hidden % 16 == 0
    return HAS_GLUON and x.is_cuda and x.dtype == torch.bfloat16 and aligned


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
    _experts_codes_up_kernel[pairs * cdiv(width, 8 * WARPS),](
        x.view(torch.int32), gate_up.view(torch.int32), scales[0], x if biases[0] is None else biases[0], inner, chosen,
        chosen if reads is None else reads, pairs, x.stride(0) // 2, float(limit or 0.0), float(alpha), INPUTS=hidden,
        OUTPUTS=width, USED=used, GATE=GATES[kind], BIAS=biases[0] is not None, CLAMPED=limit is not None,
        READS=reads is not None, PAIRS=power_of_two(MOST_TOKENS * used), WARPS=WARPS, num_warps=WARPS, **dependent,
    )
    warps = power_of_two(used)
    _experts_codes_down_kernel[tokens * cdiv(hidden, 16),](
        inner.view(torch.int32), down.view(torch.int32), scales[1], x if biases[1] is None else biases[1], weights, out, chosen,
        INPUTS=width, OUTPUTS=hidden, USED=used, BIAS=biases[1] is not None, WARPS=warps, num_warps=warps, **dependent,
    )
    return out

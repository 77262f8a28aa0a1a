"""GGUF's packed weights (block_weight.py) as wgmma's left operand, for packed_gemm.py: 64 inputs of each warp's 16 outputs."""

from __future__ import annotations

from ridgeline.ops.hopper import compile_time, gl
from ridgeline.ops.packed.block_asm import (
    block_operand_registers,
    block_operands,
    byte_text,
    has_high,
    pair_text,
    zero_words,
)
from ridgeline.ops.registry import gluon_kernel


@compile_time
def is_byte(form):  # type: ignore[no-untyped-def]
    return form.startswith("byte")


@compile_time
def has_offset(form):  # type: ignore[no-untyped-def]
    return form.endswith("offset")


@gluon_kernel()
def _pair(word, block, text: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(text, "=r,=r,r,r", (word, block), dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon_kernel()
def _quad(word, multipliers, block, text: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(
        text, "=r,=r,=r,=r,r,r,r", (word, multipliers, block), dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
        pack=1,
    )


@gluon_kernel()
def _by_32(first, second, layout: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Values of two groups of 32 inputs for the four words of a tile, [WARPS, 32, 4]"""
    both = gl.join(first, second).reshape([WARPS, 32, 2, 1]).broadcast_to([WARPS, 32, 2, 2]).reshape([WARPS, 32, 4])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon_kernel()
def _by_16(a, b, c, d, layout: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Values of four groups of 16 inputs: the last index counts fastest."""
    four = gl.join(gl.join(a, c), gl.join(b, d)).reshape([WARPS, 32, 4])
    return gl.convert_layout(four, layout, assert_trivial=True)


@gluon_kernel()
def _factors(  # type: ignore[no-untyped-def]
    scales, zeros, multipliers, block, words: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, START: gl.constexpr,
    DTYPE: gl.constexpr, SCALE_DTYPE: gl.constexpr, WARPS: gl.constexpr,
):
    """The scales of outputs r and r + 8 for each word of a tile; then their offsets, where there are any."""
    if not is_byte(FORM):
        a, b = _pair(scales[START], block, pair_text(DTYPE, SCALE_DTYPE))
        c, d = _pair(scales[START + 1], block, pair_text(DTYPE, SCALE_DTYPE))
        found = (_by_32(a, c, words, WARPS), _by_32(b, d, words, WARPS))
        if zero_words(FORM, GROUP):
            e, f = _pair(zeros[START], block, pair_text(DTYPE, SCALE_DTYPE))
            g, h = _pair(zeros[START + 1], block, pair_text(DTYPE, SCALE_DTYPE))
            found = found + (_by_32(e, g, words, WARPS), _by_32(f, h, words, WARPS))  # type: ignore[assignment]
    elif GROUP == 32:
        a, b, c, d = _quad(scales[START], multipliers, block, byte_text(DTYPE, 0, 1))
        e, f, g, h = _quad(scales[START + 1], multipliers, block, byte_text(DTYPE, 0, 1))
        found = (_by_32(a, e, words, WARPS), _by_32(b, f, words, WARPS))
        found = found + (_by_32(c, g, words, WARPS), _by_32(d, h, words, WARPS))  # type: ignore[assignment]
    else:
        a, b, c, d = _quad(scales[START], multipliers, block, byte_text(DTYPE, 0, 0))
        e, f, g, h = _quad(scales[START + 1], multipliers, block, byte_text(DTYPE, 0, 0))
        found = (_by_16(a, c, e, g, words, WARPS), _by_16(b, d, f, h, words, WARPS))
        if zero_words(FORM, GROUP):
            a, b, c, d = _quad(zeros[START], multipliers, block, byte_text(DTYPE, 1, 1))
            e, f, g, h = _quad(zeros[START + 1], multipliers, block, byte_text(DTYPE, 1, 1))
            found = found + (_by_16(a, c, e, g, words, WARPS), _by_16(b, d, f, h, words, WARPS))  # type: ignore[assignment]
    return found


@gluon_kernel()
def _upper_bits(high, words: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """For each word of a tile, the word with its upper bits and the selector of its half: from the words of two tiles."""
    first, second = high.reshape([WARPS, 32, 2, 2]).permute([0, 1, 3, 2]).split()        # of the even tile, of the odd one
    if TILE % 2 == 0:
        mine = first
    else:
        mine = second
    mine = mine.reshape([WARPS, 32, 2, 1]).broadcast_to([WARPS, 32, 2, 2]).reshape([WARPS, 32, 4])
    mine = gl.convert_layout(mine, words, assert_trivial=True)
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, words)))[None, :][:, None, :]
    return mine, number % 2 * 0x0202 + 0x4140 + mine * 0


@gluon_kernel()
def unpacked(  # type: ignore[no-untyped-def]
    text: gl.constexpr, constraints: gl.constexpr, arguments, layout: gl.constexpr, DTYPE: gl.constexpr, WARPS: gl.constexpr
):
    """16 WARPS outputs x 64 inputs as the left operand of wgmma: what the instructions `text` make of a lane's words."""
    if DTYPE == "bf16":
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            text, constraints, arguments, is_pure=True, pack=1,
            dtype=(
                gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16
            ),
        )
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            text, constraints, arguments, is_pure=True, pack=1,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        )
    # warp, r, t, 16 inputs, odd input, upper eight inputs, upper eight outputs
    numbers = gl.join(gl.join(gl.join(a, b), gl.join(e, f)), gl.join(gl.join(c, d), gl.join(g, h)))
    numbers = numbers.reshape([WARPS, 8, 4, 4, 2, 2, 2]).permute([0, 6, 1, 3, 5, 2, 4]).reshape([16 * WARPS, 64])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon_kernel()
def block_operand(  # type: ignore[no-untyped-def]
    codes, high, scales, zeros, multipliers, block, layout: gl.constexpr, words: gl.constexpr, TILE: gl.constexpr,
    HALF: gl.constexpr, KIND: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr,
    SCALE_DTYPE: gl.constexpr, WARPS: gl.constexpr,
):
    """As `_left_operand` of packed_gemm.py. `words`: the layout of the codes."""
    START: gl.constexpr = HALF * 4 + TILE % 2 * 2
    OFFSET: gl.constexpr = has_offset(FORM)
    arguments = (codes,) + _factors(
        scales, zeros, multipliers[HALF], block + TILE // 2, words, FORM, GROUP, START, DTYPE, SCALE_DTYPE, WARPS
    )
    if has_high(KIND):
        arguments = arguments + _upper_bits(high, words, TILE, WARPS)
    text: gl.constexpr = block_operands(KIND, DTYPE, OFFSET)
    constraints: gl.constexpr = block_operand_registers(KIND, OFFSET)
    return unpacked(text, constraints, arguments, layout, DTYPE, WARPS)

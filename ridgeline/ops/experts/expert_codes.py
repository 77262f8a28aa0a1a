"""Codes of experts' weights as numbers, in the registers of the kernels that multiply tiles of them.

    e2m1     MXFP4: two codes in a byte (the even input in its low half), and an exponent for each 32 inputs, 2^(scale - 127)
    uint4    two codes in a byte, (code - zero) * scale, zero 8 or stored, for groups of inputs
    e4m3     a code in a byte; scales for blocks of weights multiply the sums

The bits of an e2m1 code are put into a bfloat16 number: sign, exponent and mantissa keep their order, and 2^126 makes the value
of the subnormal number that results. That factor and the scale are one multiplication. It is exact for scales up to
LARGEST_SCALE; `fits` looks for larger ones, which no checkpoint is known to have.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.ops.registry import tl, triton_kernel

LARGEST_SCALE = 128


def fits(scale: Tensor) -> bool:
    return not scale.numel() or int(scale.max()) <= LARGEST_SCALE


@triton_kernel()
def placed_codes(codes):  # type: ignore[no-untyped-def]
    """Both codes of a byte as bfloat16 numbers, 2^126 times too small, in the halves of an int32: exponents and mantissas to bits
    6 to 8 of a half, signs to bit 15."""
    pair = codes.to(tl.int32)
    return ((pair * 0x40040) & 0x01C001C0) | ((pair * 0x1001000) & -0x7FFF8000)


@triton_kernel()
def expanded_codes(codes, scale, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """codes [BLOCK, groups, 16], scale [BLOCK, groups] -> bfloat16 [BLOCK, 32 groups]; with UPCAST (the interpreter) float32."""
    BLOCK: tl.constexpr = codes.shape[0]
    INPUTS: tl.constexpr = codes.shape[1] * codes.shape[2] * 2
    bits = placed_codes(codes)
    exponent = tl.minimum(scale.to(tl.int32), 128) + 126
    if UPCAST:
        factor = tl.exp2((exponent - 127).to(tl.float32))[:, :, None]
        low = (bits << 16).to(tl.float32, bitcast=True) * factor
        high = (bits & -65536).to(tl.float32, bitcast=True) * factor
    else:
        factor = ((exponent << 7) | (exponent << 23))[:, :, None].broadcast_to(codes.shape)
        words = tl.inline_asm_elementwise(               # minus zero is added: a product alone needs sm_90
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r", [bits, factor], tl.int32,
            is_pure=True, pack=1,
        )
        low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high).reshape((BLOCK, INPUTS))


@triton_kernel()
def integer_codes(codes, scale, zero, ZEROS: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint4 codes [BLOCK, groups, bytes], scale and zero [BLOCK, groups] -> bfloat16 [BLOCK, inputs], rounded once."""
    BLOCK: tl.constexpr = codes.shape[0]
    INPUTS: tl.constexpr = codes.shape[1] * codes.shape[2] * 2
    less = 8.0
    if ZEROS:
        less = zero.to(tl.float32)[:, :, None]
    factor = scale.to(tl.float32)[:, :, None]
    pair = codes.to(tl.int32)
    low = ((pair & 15).to(tl.float32) - less) * factor
    high = ((pair >> 4).to(tl.float32) - less) * factor
    numbers = tl.join(low, high).reshape((BLOCK, INPUTS))
    if not UPCAST:
        numbers = numbers.to(tl.bfloat16)
    return numbers


@triton_kernel()
def byte_codes(codes, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 codes, uint8 -> bfloat16; with UPCAST float32. Four codes at a time, two in a word: sign, exponent and mantissa to
    their places in a bfloat16 number, which is 2^120 times too small. Conversion instructions take several times as long."""
    if UPCAST:
        wide = codes.to(tl.int8, bitcast=True).to(tl.int32)
        numbers = ((wide << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, zero, factor; mov.b32 zero, 0x80008000; mov.b32 factor, 0x7b807b80;
            prmt.b32 low, $2, 0, 0x9180; prmt.b32 high, $2, 0, 0xb3a2; shl.b32 low, low, 4; shl.b32 high, high, 4;
            and.b32 low, low, 0x87f087f0; and.b32 high, high, 0x87f087f0;
            fma.rn.bf16x2 $0, low, factor, zero; fma.rn.bf16x2 $1, high, factor, zero; }""",
            "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4,
        )
    return numbers

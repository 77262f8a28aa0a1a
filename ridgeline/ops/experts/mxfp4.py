"""MXFP4 weights of experts: e2m1 codes, two in a byte (the even input in its low half), and an exponent for each 32 inputs.

    codes uint8 [..., outputs, inputs / 2]          scale uint8 [..., outputs, inputs / 32], e8m0: 2^(scale - 127)

Kernels put a code's bits into a bfloat16 number: sign, exponent and mantissa keep their order, and 2^126 makes the value of the
subnormal number that results. That factor and the scale are one multiplication. It is exact for scales up to LARGEST_SCALE;
`fits` looks for larger ones, which no checkpoint is known to have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.quantised.codes import E2M1, e8m0_numbers
from ridgeline.ops.registry import tl, triton_kernel

GROUP = 32
LARGEST_SCALE = 128


def fits(scale: Tensor) -> bool:
    return not scale.numel() or int(scale.max()) <= LARGEST_SCALE


def expanded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights as numbers, [..., outputs, inputs]."""
    table = torch.tensor(E2M1, dtype=dtype, device=codes.device)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
    return (values.unflatten(-1, (-1, GROUP)) * e8m0_numbers(scale, dtype).unsqueeze(-1)).flatten(-2)


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

"""GEMM of gate and up for many rows (prefill), fused with the gated activation.

cuBLAS is as fast, but it writes both halves, and another kernel reads them again. Here a tile holds an output's gate and its
partner in the same registers, so only the activated result is written. One TMA load brings the rows of both halves as
one operand. CTAs are persistent; tiles that run at the same time share rows of x or of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.direct_launch import kept_descriptor
from ridgeline.ops.launch import cdiv, multiprocessors
from ridgeline.ops.linear.gemv import GATES, activated
from ridgeline.ops.registry import TRITON_INTERPRETED, tl, triton_kernel

# With fewer rows the last wave of tiles is so empty that cuBLAS is faster, whose tiles come in more sizes. With more inputs the
# activation costs little beside the GEMM.
BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS = 128, 128, 64
STAGES = 4                           # blocks of inputs in flight
NEIGHBOURS = 8                       # blocks of rows that go through the outputs together


@triton_kernel(do_not_specialize=["rows"])
def _gated_gemm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, rows, outputs, inputs,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, NEIGHBOURS: tl.constexpr,
    PROGRAMS: tl.constexpr, GATE: tl.constexpr, UPCAST: tl.constexpr,
):
    """x [rows, inputs], weight [2, outputs, inputs] and out [rows, outputs] are TMA descriptors.

    TMA reads zeros outside of them, and writes nothing there.
    """
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    output_blocks = tl.cdiv(outputs, BLOCK_OUTPUTS)
    for tile in tl.range(tl.program_id(0), row_blocks * output_blocks, PROGRAMS, flatten=True):
        band = tile // (NEIGHBOURS * output_blocks)
        height = tl.minimum(row_blocks - band * NEIGHBOURS, NEIGHBOURS)
        place = tile % (NEIGHBOURS * output_blocks)
        row = (band * NEIGHBOURS + place % height) * BLOCK_ROWS
        output = place // height * BLOCK_OUTPUTS
        sums = tl.zeros((BLOCK_ROWS, 2 * BLOCK_OUTPUTS), tl.float32)
        for start in range(0, inputs, BLOCK_INPUTS):
            left = x.load([row, start])
            right = weight.load([0, output, start]).reshape(2 * BLOCK_OUTPUTS, BLOCK_INPUTS)
            if UPCAST:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            sums = tl.dot(left, right.T, sums)
        gate, up = sums.reshape(BLOCK_ROWS, 2, BLOCK_OUTPUTS).permute(0, 2, 1).split()
        out.store([row, output], (activated(gate, GATE) * up).to(out.dtype))


def suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this kernel takes a call that the kernel table gives it: TMA needs rows at multiples of 16 bytes."""
    return bias is None and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x, weight))


def gated_gemm(x: Tensor, weight: Tensor, gate: str) -> Tensor:
    """x [rows, inputs], weight [2 * outputs, inputs] -> [rows, outputs]"""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiles = cdiv(rows, BLOCK_ROWS) * cdiv(outputs, BLOCK_OUTPUTS)
    programs = min(tiles, multiprocessors(x.device))
    _gated_gemm_kernel[programs,](
        described(x, BLOCK_ROWS, BLOCK_INPUTS), described(weight.view(2, outputs, inputs), 2, BLOCK_OUTPUTS, BLOCK_INPUTS),
        described(out, BLOCK_ROWS, BLOCK_OUTPUTS), rows, outputs, inputs,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_OUTPUTS=BLOCK_OUTPUTS, BLOCK_INPUTS=BLOCK_INPUTS, NEIGHBOURS=NEIGHBOURS,
        PROGRAMS=programs, GATE=GATES[gate], UPCAST=TRITON_INTERPRETED,     # the interpreter's narrow dot products are wrong
        num_warps=8, num_stages=STAGES,
    )
    return out


def described(tensor: Tensor, *block: int) -> Any:
    """The TMA descriptor of a tensor, for tiles of a block."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # not where there is no triton

    if TRITON_INTERPRETED:                               # it reads the tensor itself
        return TensorDescriptor.from_tensor(tensor, list(block))
    return kept_descriptor(TensorDescriptor, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), block)

"""The down product of a few tokens' experts with all of a CTA's weights on their way to shared memory at once (cp.async).

As few_tokens.py: a CTA has some outputs of one token, from all of its experts in their order. There a CTA holds three blocks of
weights in registers, and asks for the next while it multiplies. Here it asks for all before the PDL wait, so that memory does not
idle between the up product and this one. Every thread copies what it multiplies itself, so a thread waits only for its own
copies.

Written in Gluon, which the interpreter does not support. For 16-bit numbers without biases.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.ops.hopper import async_copy, copy, gl, wait_for_kernel_before
from ridgeline.ops.launch import cdiv, dependent_launch
from ridgeline.ops.registry import gluon_kernel


class Staged(NamedTuple):
    """A warp copies 256 inputs of an output at once."""

    outputs: int                     # of a CTA
    inputs: int                      # of a block: 256 for each of the warps that share an output

    @property
    def warps(self) -> int:
        return self.outputs * self.inputs // 256

    def shared_bytes(self, experts: int, width: int) -> int:
        """Shared memory of a CTA, for all experts of a token."""
        return experts * self.outputs * cdiv(width, self.inputs) * self.inputs * 2


@gluon_kernel()
def _x_block(x_ptr, column, block, INPUTS: gl.constexpr, STEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """A block of a token's activated rows, counted through all of its experts."""
    CHUNKS: gl.constexpr = (INPUTS + STEP - 1) // STEP
    at = block % CHUNKS * STEP + column
    return gl.load(x_ptr + block // CHUNKS * INPUTS + at, mask=at < INPUTS, other=0.0)


@gluon_kernel()
def _staged_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, shared_ptr, share_ptr, out_ptr, chosen_ptr,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, USED: gl.constexpr, SHARED: gl.constexpr, BLOCK: gl.constexpr,
    STEP: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [T, USED + SHARED, INPUTS], weight [experts, OUTPUTS, INPUTS], shares [T, USED] -> out [T, OUTPUTS]. The shared expert is
    [OUTPUTS, SHARED INPUTS]."""
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [BLOCK, STEP // 256], [1, 0])
    CHUNKS: gl.constexpr = (INPUTS + STEP - 1) // STEP
    PLACES: gl.constexpr = USED + SHARED
    BLOCKS: gl.constexpr = OUTPUTS // BLOCK
    token = (gl.program_id(0) // BLOCKS).to(gl.int64)
    column = gl.arange(0, STEP, gl.SliceLayout(0, layout))
    row = gl.program_id(0) % BLOCKS * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    staged = gl.allocate_shared_memory(dtype, [PLACES * CHUNKS, BLOCK, STEP], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for place in gl.static_range(PLACES):
        # The routing has ended when this kernel starts: the up product lets it start after its own wait.
        if place < USED:
            first = gl.load(chosen_ptr + token * USED + place, cache_modifier=".cg") * OUTPUTS
            source = weight_ptr + (first + row)[:, None] * INPUTS
        else:
            source = shared_ptr + row.to(gl.int64)[:, None] * (SHARED * INPUTS) + (place - USED) * INPUTS
        for chunk in gl.static_range(CHUNKS):
            at = chunk * STEP + column
            there = (at < INPUTS)[None, :] & (row >= 0)[:, None]
            memory = staged.index(place * CHUNKS + chunk)
            if (chunk + 1) * STEP > INPUTS:              # what is not copied is multiplied by zero, and must be a number
                memory.store(gl.full([BLOCK, STEP], 0, dtype, layout))
            copy(memory, source + at[None, :], mask=there, eviction_policy="evict_first")
        async_copy.commit_group()
    wait_for_kernel_before(DEPENDENT)
    shares = (gl.load(share_ptr + token * USED).to(gl.float32),)         # all requests before the first use
    for place in gl.static_range(1, USED):
        shares = shares + (gl.load(share_ptr + token * USED + place).to(gl.float32),)  # type: ignore[assignment]
    rows = (_x_block(x_ptr + token * PLACES * INPUTS, column, 0, INPUTS, STEP),)
    for block in gl.static_range(1, PLACES * CHUNKS):
        rows = rows + (_x_block(x_ptr + token * PLACES * INPUTS, column, block, INPUTS, STEP),)  # type: ignore[assignment]
    sums = gl.full([BLOCK, STEP], 0.0, gl.float32, layout)
    for place in gl.static_range(PLACES):
        async_copy.wait_group(PLACES - 1 - place)
        for chunk in gl.static_range(CHUNKS):
            x = rows[place * CHUNKS + chunk].to(gl.float32)
            if place < USED:
                x *= shares[place]
            sums += staged.index(place * CHUNKS + chunk).load(layout).to(gl.float32) * x[None, :]
    gl.store(out_ptr + token * OUTPUTS + row, gl.sum(sums, axis=1).to(out_ptr.dtype.element_ty))


def staged_down(
    x: Tensor, down: Tensor, shared: Tensor | None, chosen: Tensor, weights: Tensor, out: Tensor, plan: Staged, parts: int
) -> None:
    """x [T * (used + parts), width] -> out [T, hidden]. `shared`: the shared expert's matrix, `parts` experts wide."""
    hidden, width = down.shape[1:]
    tokens, used = chosen.shape
    _staged_down_kernel[tokens * (hidden // plan.outputs),](
        x, down, down if shared is None else shared, weights, out, chosen, INPUTS=width, OUTPUTS=hidden, USED=used, SHARED=parts,
        BLOCK=plan.outputs, STEP=plan.inputs, num_warps=plan.warps, **dependent_launch(x.device),
    )

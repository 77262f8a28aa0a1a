"""The sum of small tensors over ranks whose GPUs read each other's memory, in one kernel: a one-shot all-reduce.

Every rank has a buffer that all ranks have mapped. A CTA writes its part of x into its own rank's buffer, tells the same CTA of
every rank, waits for all of them, reads the part from every buffer and adds it up in float32 in the order of ranks. So every
rank computes the same bits. NCCL's ring takes 2 (ranks - 1) steps where this takes one.

    bytes of a buffer:   [slot 0 | slot 1 | flags: a row of ranks for each CTA | calls: one number for each CTA]

Calls of a CTA are numbered, and even ones use the other slot than odd ones. No rank waits at the end: the next call writes into
the other slot, and the call after that one begins only when all ranks have begun the next one, so have read this one. Numbers are
in the buffer and not arguments, so a CUDA graph can be replayed. All calls of a rank must be on one stream, in the same order on
all ranks.

This file knows addresses and no processes: distributed/one_shot_choice.py shares the memory and chooses.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.ops.launch import cdiv, power_of_two
from ridgeline.ops.registry import TRITON_DTYPES, tl, triton_kernel
from ridgeline.sizes.mesh_shape import ONE_SHOT_CHUNK, ONE_SHOT_CTAS, ONE_SHOT_MOST

DTYPES = TRITON_DTYPES
_WARPS = 4
# A poll takes half a microsecond or more, so this is ten minutes. A kernel that waits longer fails: its engine ends with an error
# then. Ranks that are known to be lost are given up long before (distributed/one_shot.py).
_MOST_POLLS = 2**30


@triton_kernel()
def _one_shot_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, base_ptr, size, rank, most_polls,
    RANKS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CTAS: tl.constexpr,
):
    """One CTA: BLOCK numbers, CHUNK bytes. base_ptr [RANKS]: the buffers' addresses as int64."""
    SLOT: tl.constexpr = CTAS * CHUNK
    cta = tl.program_id(0)
    own = tl.load(base_ptr + rank)
    calls = (own + 2 * SLOT + CTAS * RANKS * 8).to(tl.pointer_type(tl.int64))
    call = tl.load(calls + cta) + 1
    part = call % 2 * SLOT + cta * CHUNK
    at = tl.arange(0, BLOCK)
    index = cta * BLOCK + at
    inside = index < size
    here = tl.multiple_of((own + part).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    tl.store(here + at, tl.load(x_ptr + index, mask=inside), mask=inside)
    tl.debug_barrier()                                   # every thread's numbers are written before the flags are

    place = tl.arange(0, PLACES)
    is_rank = place < RANKS
    flags = 2 * SLOT + cta * RANKS * 8
    theirs = (tl.load(base_ptr + place, mask=is_rank, other=0) + flags + rank * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_max(theirs, call, mask=is_rank, sem="release", scope="sys")     # a flag that was let go stays so
    mine = (own + flags).to(tl.pointer_type(tl.int64)) + place
    behind = 1
    polls = 0
    while behind > 0:
        heard = tl.atomic_add(mine, 0, mask=is_rank, sem="acquire", scope="sys")
        behind = tl.sum((is_rank & (heard < call)).to(tl.int32))
        polls += 1
        if polls > most_polls:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()                                   # no thread reads before the flags were seen

    for other in tl.static_range(RANKS):
        there = tl.multiple_of((tl.load(base_ptr + other) + part).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
        numbers = tl.load(there + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if other == 0:
            total = numbers
        else:
            total += numbers
    tl.store(x_ptr + index, total.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(calls + cta, call)


def one_shot_sum(x: Tensor, bases: Tensor, rank: int) -> Tensor:
    """x becomes the sum over ranks. `bases` [ranks]: the addresses of their buffers in this process; `rank`: this one."""
    assert x.is_contiguous() and x.dtype in DTYPES and 0 < x.numel() * x.element_size() <= ONE_SHOT_MOST
    block, ranks = ONE_SHOT_CHUNK // x.element_size(), len(bases)
    _one_shot_sum_kernel[(cdiv(x.numel(), block),)](
        x, bases, x.numel(), rank, _MOST_POLLS, RANKS=ranks, PLACES=power_of_two(ranks), BLOCK=block, CHUNK=ONE_SHOT_CHUNK,
        CTAS=ONE_SHOT_CTAS, num_warps=_WARPS,
    )
    return x

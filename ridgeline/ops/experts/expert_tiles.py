"""Pairs of a token and one of its experts, sorted by expert, and the list of tiles that a grouped product works through.

Both are made on the device, with sizes that the host knows: the list has room for the most tiles that there can be, and its end
is marked. So nothing waits for the device, and a CUDA graph can hold it. Pairs of one expert keep their order.

    pair     token * used + place
    order    int32 [pairs]: pairs, sorted by expert
    tiles    int32 [most tiles + 1, 3]: expert (−1: no tile), first place in `order`, place behind the last. In the last row: how
             many tiles there are
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.launch import cdiv, dependent_launch, power_of_two
from ridgeline.ops.registry import tl, triton_kernel

MOST_PAIRS = 4096                    # that are compared with each other; more are sorted by torch's kernels
_PAIRS = 32                          # that a CTA places
_CHUNK = 256                         # pairs that they are compared with at once


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles of `rows` pairs: one that is not full for each expert that can be visited, and full ones."""
    visited = min(pairs, experts)
    return visited + (pairs - visited) // rows


def sorted_pairs(
    chosen: Tensor, experts: int, rows: int, reads: Tensor | None = None, elsewhere: bool = False
) -> tuple[Tensor, Tensor]:
    """chosen int64 [T, used] -> order, tiles; `reads` int32 [1] gets the number of experts that have any. `elsewhere`: pairs may
    have a number behind the last expert; they come last, and have no tile."""
    pairs = chosen.numel()
    device = chosen.device
    if pairs > MOST_PAIRS or elsewhere:
        return _sorted_by_torch(chosen.flatten(), experts, rows, reads)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    most = most_tiles(pairs, experts, rows)
    tiles = torch.empty((most + 1, 3), dtype=torch.int32, device=device)
    if pairs:
        _sort_experts_kernel[1 + cdiv(pairs, _PAIRS),](
            chosen, order, tiles, order if reads is None else reads, pairs, most, READS=reads is not None,
            BLOCK=power_of_two(experts), PAIRS=_PAIRS, CHUNK=_CHUNK, ROWS=rows,
            TILES=power_of_two(most_tiles(MOST_PAIRS, experts, rows)), num_warps=8,          # one variant for any number of pairs
            **dependent_launch(device),
        )
    return order, tiles


def _sorted_by_torch(flat: Tensor, experts: int, rows: int, reads: Tensor | None = None) -> tuple[Tensor, Tensor]:
    order = flat.argsort(stable=True)
    numbers = torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(flat[order], numbers, right=True)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    if reads is not None:
        reads.copy_((ends > starts).sum())
    counts = (ends - starts + rows - 1) // rows
    last = counts.cumsum(0)
    places = torch.arange(most_tiles(len(flat), experts, rows), device=flat.device)
    expert = torch.searchsorted(last, places, right=True)
    known = expert.clamp(max=experts - 1)
    first = starts[known] + (places - (last - counts)[known]) * rows
    stop = torch.minimum(first + rows, ends[known])
    tiles = torch.stack((torch.where(expert < experts, expert, -1), first, stop), dim=1)
    return order.int(), torch.cat((tiles, last[-1:].expand(1, 3))).int()


@triton_kernel()
def tile_at(tiles_ptr, item, num_tiles, blocks, NEIGHBOURS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first place, place behind the last, block of outputs) of a work item. NEIGHBOURS tiles go through the blocks
    together."""
    band = item // (NEIGHBOURS * blocks)
    height = tl.minimum(num_tiles - band * NEIGHBOURS, NEIGHBOURS)
    place = item % (NEIGHBOURS * blocks)
    tile = tiles_ptr + 3 * (band * NEIGHBOURS + place % height)
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), place // height


@triton_kernel(do_not_specialize=["pairs", "num_tiles"])
def _sort_experts_kernel(  # type: ignore[no-untyped-def]
    chosen_ptr, order_ptr, tiles_ptr, reads_ptr, pairs, num_tiles, READS: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """CTA 0 writes the tiles. Each other CTA gives PAIRS pairs their places: a pair's is the number of pairs before it, those
    of experts before its own and the earlier ones of its own."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.arange(0, CHUNK)
    if tl.program_id(0) == 0:
        _write_tiles(chosen_ptr, tiles_ptr, reads_ptr, pairs, num_tiles, chunk, READS, BLOCK, ROWS, TILES)
    else:
        pair = (tl.program_id(0) - 1) * PAIRS + tl.arange(0, PAIRS)
        mine = tl.load(chosen_ptr + pair, mask=pair < pairs, other=0).to(tl.int32) * pairs + pair
        place = tl.zeros((PAIRS,), tl.int32)
        for start in range(0, pairs, CHUNK):
            other = start + chunk
            theirs = tl.load(chosen_ptr + other, mask=other < pairs, other=BLOCK).to(tl.int32) * pairs + other
            place += tl.sum((theirs[None, :] < mine[:, None]).to(tl.int32), 1)
        tl.store(order_ptr + place, pair, mask=pair < pairs)


@triton_kernel()
def _write_tiles(  # type: ignore[no-untyped-def]
    chosen_ptr, tiles_ptr, reads_ptr, pairs, num_tiles, chunk, READS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """One CTA: counts of all experts, and their tiles."""
    expert = tl.arange(0, BLOCK)
    tile = tl.arange(0, TILES)
    tl.store(tiles_ptr + 3 * tile, tl.full((TILES,), -1, tl.int32), mask=tile < num_tiles)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, chunk.shape[0]):
        theirs = tl.load(chosen_ptr + start + chunk, mask=start + chunk < pairs, other=-1).to(tl.int32)
        counts += tl.sum((theirs[:, None] == expert[None, :]).to(tl.int32), 0)
    starts = tl.cumsum(counts, 0) - counts
    if READS:
        tl.store(reads_ptr, tl.sum((counts > 0).to(tl.int32)))
    tl.debug_barrier()                                   # the marks of the end come first
    needed = (counts + ROWS - 1) // ROWS
    at = tl.cumsum(needed, 0) - needed
    tl.store(tiles_ptr + 3 * num_tiles, tl.sum(needed))
    for number in range(tl.max(needed)):
        has = number < needed
        first = starts + number * ROWS
        place = tiles_ptr + 3 * (at + number)
        tl.store(place, expert, mask=has)
        tl.store(place + 1, first, mask=has)
        tl.store(place + 2, tl.minimum(first + ROWS, starts + counts), mask=has)

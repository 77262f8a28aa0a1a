"""Takes back what a step was packed too far: positions, slots, lengths, guesses of rows that are shorter than the host assumed.

One launch in the place of a dozen: it stands between the copy of a step's integers and its CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.launch import cdiv
from ridgeline.ops.registry import Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.sizes.sampling_costs import LATE_CASES, late_cost

# ── definition ────────────────────────────────────────────────────────────────────────────────────────────────────


def late_positions_reference(
    surplus: Tensor, token_rows: Tensor, positions: Tensor, slots: list[Tensor], tables: list[Tensor], block_size: int,
    kv_len: Tensor, rows: Tensor, tokens: Tensor, where: Tensor | None, path: Tensor | None, at: Tensor | None,
    guesses: Tensor | None,
) -> None:
    """`surplus`: by engine row, how much shorter it is. By token [T]: its row, position, and slots in the groups, whose block
    `tables` are [rows, blocks]. `kv_len` [R] of the batch's `rows`. `where` [G]: the tokens that are guesses, which `path` has at
    the places `at` of rows as long as was assumed; -1 there: none, and the token is any one. `guesses` [G]: as they truly are.
    """
    shorter = surplus.index_select(0, token_rows)
    positions.sub_(shorter)
    index, offset = positions // block_size, positions % block_size
    for table, own in zip(tables, slots, strict=True):
        own.copy_(table[token_rows, index] * block_size + offset)
    kv_len.sub_(surplus.index_select(0, rows).to(kv_len.dtype))
    if where is not None and path is not None and at is not None and guesses is not None:
        torch.index_select(path, 0, at - shorter.index_select(0, where), out=guesses)
        tokens.index_copy_(0, where, guesses.clamp(min=0))


# ── Triton ────────────────────────────────────────────────────────────────────────────────────────────────────────

TILE = 128


@triton_kernel(do_not_specialize=["num_tokens", "num_rows", "num_guesses", "table_stride"])
def _late_kernel(  # type: ignore[no-untyped-def]
    surplus_ptr, token_rows_ptr, positions_ptr, slots_ptr, table_ptr, table_stride, kv_len_ptr, rows_ptr, tokens_ptr, where_ptr,
    path_ptr, at_ptr, guesses_ptr, num_tokens, num_rows, num_guesses,
    BLOCK_SIZE: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
):
    """One CTA: a tile of tokens, or of rows, or of guesses, in this order. LAST: of the launches for all groups; only it changes
    what the others read."""
    program = tl.program_id(0)
    token_tiles = tl.cdiv(num_tokens, TILE)
    row_tiles = tl.cdiv(num_rows, TILE)
    lane = tl.arange(0, TILE)
    if program < token_tiles:
        token = program * TILE + lane
        there = token < num_tokens
        row = tl.load(token_rows_ptr + token, mask=there, other=0)
        position = tl.load(positions_ptr + token, mask=there, other=0) - tl.load(surplus_ptr + row, mask=there, other=0)
        block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        tl.store(slots_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=there)
        if LAST:
            tl.store(positions_ptr + token, position, mask=there)
    elif program < token_tiles + row_tiles:
        if LAST:
            place = (program - token_tiles) * TILE + lane
            listed = place < num_rows
            batch_row = tl.load(rows_ptr + place, mask=listed, other=0)
            length = tl.load(kv_len_ptr + place, mask=listed, other=0)
            shorter = tl.load(surplus_ptr + batch_row, mask=listed, other=0).to(tl.int32)
            tl.store(kv_len_ptr + place, length - shorter, mask=listed)
    elif LAST:
        number = (program - token_tiles - row_tiles) * TILE + lane
        known = number < num_guesses
        guessed = tl.load(where_ptr + number, mask=known, other=0)
        owner = tl.load(token_rows_ptr + guessed, mask=known, other=0)
        source = tl.load(at_ptr + number, mask=known, other=0) - tl.load(surplus_ptr + owner, mask=known, other=0)
        guess = tl.load(path_ptr + source, mask=known, other=0)
        tl.store(guesses_ptr + number, guess, mask=known)
        tl.store(tokens_ptr + guessed, tl.maximum(guess, 0), mask=known)


def late_positions_on_gpu(
    surplus: Tensor, token_rows: Tensor, positions: Tensor, slots: list[Tensor], tables: list[Tensor], block_size: int,
    kv_len: Tensor, rows: Tensor, tokens: Tensor, where: Tensor | None, path: Tensor | None, at: Tensor | None,
    guesses: Tensor | None,
) -> None:
    unused, count = positions, 0 if where is None else len(where)
    programs = cdiv(len(positions), TILE) + cdiv(len(rows), TILE) + cdiv(count, TILE)
    for group, (table, own) in enumerate(zip(tables, slots, strict=True)):
        _late_kernel[(programs,)](
            surplus, token_rows, positions, own, table, table.stride(0), kv_len, rows, tokens,
            *(unused if each is None else each for each in (where, path, at, guesses)), len(positions), len(rows), count,
            BLOCK_SIZE=block_size, LAST=group == len(tables) - 1, TILE=TILE, num_warps=4,
        )


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda"


# ── declaration ───────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, widths: tuple[int, ...], groups: int, block_size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rows with 1 + width tokens, of which the last few of the step before were rejected; -1: padding, with one token."""
    num_rows = len(widths)
    drawn = torch.randint(0, 4, (num_rows + 1,), generator=generator)
    width = torch.tensor(widths)
    live = width >= 0
    rows = torch.where(live, torch.arange(num_rows), num_rows)
    surplus = torch.where(torch.arange(num_rows + 1) < num_rows, drawn, 0)
    start = torch.randint(5, 40, (num_rows,), generator=generator) * live
    counts = width.clamp(min=0) + 1
    token_rows = torch.repeat_interleave(rows, counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    offset = torch.arange(len(token_rows)) - first
    positions = torch.repeat_interleave(start, counts) + offset
    where = (offset > 0).nonzero()[:, 0]
    longest = int(counts.max()) + 4
    path = torch.randint(-1, 99, (num_rows * longest,), generator=generator)
    at = token_rows[where] * longest + 3 + offset[where]
    tables = [torch.randint(1, 99, (num_rows + 1, 64), dtype=torch.int32, generator=generator) for _ in range(groups)]
    slots = [torch.full((len(positions),), -1) for _ in range(groups)]
    kv_len = ((start + counts) * live).to(torch.int32)
    tokens = torch.randint(0, 99, (len(positions),), generator=generator)

    def there(value: Any) -> Any:
        return [there(each) for each in value] if isinstance(value, list) else value.to(device)

    arguments = (surplus, token_rows, positions, slots, tables), (kv_len, rows.to(torch.int32), tokens, where, path, at)
    return (*map(there, arguments[0]), block_size, *map(there, arguments[1]), torch.empty_like(there(where))), {}


late_positions = Op(
    "late_positions",
    late_positions_reference,
    kernels=[Implementation("triton", late_positions_on_gpu, _triton_supports)],
    cases=LATE_CASES,
    cost=late_cost,
    inputs=_inputs,
    tolerance={dtype: Tolerance(0, 0) for dtype in ("float32", "bfloat16", "float16")},
)

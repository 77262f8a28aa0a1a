"""Log-probabilities of chosen tokens, their ranks, and the k best alternatives.

Order everywhere: larger logit first, and among equal ones the lowest id first. Sampling is another file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.launch import cdiv, power_of_two
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.ops.sampling.sample_kernels import ordered_key, ordered_value
from ridgeline.sizes.sampling_costs import LOGPROBS_CASES, logprobs_cost

CHUNK_ELEMENTS = 1 << 21             # logits per chunk: bounds the scratch memory of a long prompt
CACHED_ELEMENTS = 1 << 16            # logits whose exponentials are summed at once: their float64 copy stays in the CPU cache

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def logprobs_reference(logits: Tensor, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [S, V], tokens [S] -> logprobs [S], ranks [S] (1 = first), top_ids [S, k], top_logprobs [S, k]."""
    rows, vocab = logits.shape
    chunk = max(1, CHUNK_ELEMENTS // vocab)
    parts = [
        _chunk_logprobs(logits[start : start + chunk], tokens[start : start + chunk], min(top_k, vocab))
        for start in range(0, max(rows, 1), chunk)
    ]
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, ranks, top_ids, top_logprobs


def _chunk_logprobs(logits: Tensor, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    index = tokens.long().unsqueeze(1)
    chosen = logits.gather(1, index)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    # Ranks compare logits: two of them may round to the same log-probability.
    before = (logits == chosen).logical_and_(ids < index.int()).logical_or_(logits > chosen)
    top_ids = _top_ids(logits, top_k)
    total = _log_sum_exp(logits)
    return (
        (chosen - total).to(logits.dtype).squeeze(1),
        before.sum(dim=1) + 1,
        top_ids,
        (logits.gather(1, top_ids) - total).to(logits.dtype),
    )


def _log_sum_exp(logits: Tensor) -> Tensor:
    """float64 [S, 1]. Each exponential is in the logits' dtype, their sum is not: torch.log_softmax adds float32 in as many
    lanes as a vector register has, and with the four of NEON a vocabulary of 49,152 is off by 2e-5."""
    size = max(1, (CACHED_ELEMENTS if logits.is_cpu else logits.numel()) // logits.shape[1])
    parts = []
    for part in logits.split(size):
        best = part.amax(dim=1, keepdim=True)
        parts.append((part - best).exp_().double().sum(dim=1, keepdim=True).log_().add_(best))
    return torch.cat(parts)


def _top_ids(logits: Tensor, top_k: int) -> Tensor:
    """Ids of the k largest logits in order. torch.topk leaves open which of several equal ones it takes."""
    if top_k == 0 or logits.shape[0] == 0:
        return torch.empty(logits.shape[0], top_k, dtype=torch.int64, device=logits.device)
    infinity = float("inf")
    logits = logits.nan_to_num(nan=-infinity, posinf=infinity, neginf=-infinity)     # topk calls NaN the largest
    values, ids = logits.topk(min(top_k + 1, logits.shape[1]), dim=-1)
    ids = ids[:, :top_k]
    open_rows = (values[:, top_k - 1] == values[:, -1]).nonzero()[:, 0] if values.shape[1] > top_k else ()
    if len(open_rows):                                   # rare: the last place is open between equal logits
        ids[open_rows] = _first_largest(logits[open_rows], values[open_rows, -1:], top_k)
    ids = ids.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _first_largest(logits: Tensor, smallest: Tensor, top_k: int) -> Tensor:
    """Ids of everything above `smallest`, filled up to k with the lowest ids of what equals it."""
    larger, equal = logits > smallest, logits == smallest
    room = top_k - larger.sum(dim=1, keepdim=True)
    taken = larger | (equal & (equal.cumsum(dim=1) <= room))
    return taken.nonzero()[:, 1].view(-1, top_k)


# ── native ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def logprobs_native(logits: Tensor, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A row is read from the CPU cache, where the definition makes a dozen passes over all rows."""
    rows, vocab = logits.shape
    top_k = min(top_k, vocab)
    if logits.stride(1) != 1 or top_k > native.MOST_TOP:
        return logprobs_reference(logits, tokens, top_k)
    tokens = tokens.long().contiguous()
    ranks, top_ids = torch.empty(rows, dtype=torch.int64), torch.empty(rows, top_k, dtype=torch.int64)
    found = torch.empty(rows), ranks, top_ids, torch.empty(rows, top_k)
    native.library().logprobs(
        logits.data_ptr(), tokens.data_ptr(), *(each.data_ptr() for each in found), rows, vocab, logits.stride(0), top_k
    )
    return found


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────

TILE = 8192                          # ids per CTA
GROUP = 64                           # ids whose largest is kept: the k best are found among those
NOTHING = -0x80000000                # below the key of -inf


@triton_kernel()
def _scan_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, vocab, tokens_ptr, group_best_ptr, tile_best_ptr, tile_sum_ptr, tile_before_ptr,
    TILE: tl.constexpr, GROUP: tl.constexpr, NOTHING: tl.constexpr,
):
    """One CTA, one tile of one row: the largest key of every group, the sum of exponentials, and how many logits rank before the
    token's."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    logits_ptr += row * stride
    groups: tl.constexpr = TILE // GROUP
    group = tile * groups + tl.arange(0, groups)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    key = tl.where(ids < vocab, ordered_key(tl.where(x == x, x, float("-inf"))), NOTHING)
    tl.store(group_best_ptr + row * (tl.num_programs(0) * groups) + group, tl.max(key, axis=1))
    best = tl.max(tl.max(x, axis=1), axis=0)
    origin = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.sum(tl.exp(x - origin), axis=1), axis=0)
    token = tl.load(tokens_ptr + row)
    chosen = tl.load(logits_ptr + token).to(tl.float32)
    before = (x > chosen) | ((x == chosen) & (ids < token) & (ids < vocab))
    place = row * tl.num_programs(0) + tile
    tl.store(tile_best_ptr + place, best)
    tl.store(tile_sum_ptr + place, total)
    tl.store(tile_before_ptr + place, tl.sum(tl.sum(before.to(tl.int32), axis=1), axis=0))


@triton_kernel(do_not_specialize=["top_k"])
def _logprobs_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, vocab, tokens_ptr, group_best_ptr, tile_best_ptr, tile_sum_ptr, tile_before_ptr,
    logprobs_ptr, ranks_ptr, top_ids_ptr, top_logprobs_ptr, top_k,
    TILES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, NOTHING: tl.constexpr,
    TILES_ROUND: tl.constexpr, GROUPS_ROUND: tl.constexpr,
):
    """One CTA per row. The next best id is in the first group with the largest key; that group's key then becomes the largest of
    its remaining ids."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    tile = tl.arange(0, TILES_ROUND)
    place = row * TILES + tile
    tile_best = tl.load(tile_best_ptr + place, mask=tile < TILES, other=float("-inf"))
    best = tl.max(tile_best, axis=0)
    share = tl.where(tile_best == float("-inf"), 0.0, tl.exp(tile_best - best))
    total = tl.log(tl.sum(tl.load(tile_sum_ptr + place, mask=tile < TILES, other=0.0) * share, axis=0))
    token = tl.load(tokens_ptr + row)
    tl.store(logprobs_ptr + row, tl.load(logits_ptr + token).to(tl.float32) - best - total)
    rank = tl.sum(tl.load(tile_before_ptr + place, mask=tile < TILES, other=0), axis=0) + 1
    tl.store(ranks_ptr + row, rank.to(tl.int64))

    group = tl.arange(0, GROUPS_ROUND)
    group_best = tl.load(group_best_ptr + row * GROUPS + group, mask=group < GROUPS, other=NOTHING)
    last_key = tl.full([], 0x7FFFFFFF, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    for number in range(top_k):
        largest = tl.max(group_best, axis=0)
        which = tl.min(tl.where(group_best == largest, group, GROUPS_ROUND), axis=0)
        ids = which * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        key = ordered_key(tl.where(x == x, x, float("-inf")))
        left = (ids < vocab) & ((key < last_key) | ((key == last_key) & (ids > last_id)))
        last_id = tl.min(tl.where(left & (key == largest), ids, 0x7FFFFFFF), axis=0)
        last_key = largest
        left = left & ((key < last_key) | (ids > last_id))
        group_best = tl.where(group == which, tl.max(tl.where(left, key, NOTHING), axis=0), group_best)
        tl.store(top_ids_ptr + row * top_k + number, last_id.to(tl.int64))
        tl.store(top_logprobs_ptr + row * top_k + number, ordered_value(last_key) - best - total)


def logprobs_triton(logits: Tensor, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without host synchronisation."""
    rows, vocab = logits.shape
    top_k = min(top_k, vocab)
    if logits.stride(1) != 1:
        logits = logits.contiguous()

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    logprobs, ranks = empty(torch.float32, rows), empty(torch.int64, rows)
    top_ids, top_logprobs = empty(torch.int64, rows, top_k), empty(torch.float32, rows, top_k)
    if rows == 0:
        return logprobs, ranks, top_ids, top_logprobs
    tile = min(TILE, max(GROUP, power_of_two(vocab)))
    tiles = cdiv(vocab, tile)
    groups = tiles * (tile // GROUP)
    found = (
        empty(torch.int32, rows, groups), empty(torch.float32, rows, tiles), empty(torch.float32, rows, tiles),
        empty(torch.int32, rows, tiles),
    )
    _scan_kernel[(tiles, rows)](
        logits, logits.stride(0), vocab, tokens, *found, TILE=tile, GROUP=GROUP, NOTHING=NOTHING, num_warps=8
    )
    _logprobs_kernel[(rows,)](
        logits, logits.stride(0), vocab, tokens, *found, logprobs, ranks, top_ids, top_logprobs, top_k,
        TILES=tiles, GROUPS=groups, GROUP=GROUP, NOTHING=NOTHING, TILES_ROUND=power_of_two(tiles),
        GROUPS_ROUND=power_of_two(groups), num_warps=4,
    )
    return logprobs, ranks, top_ids, top_logprobs


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, rows: int, vocab: int, top_k: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Quarters: many logits are equal, so that the order among equals is tested too.
    logits = torch.randn(rows, vocab, generator=generator).mul_(12).round_().div_(4).to(device, dtype)
    tokens = torch.randint(vocab, (rows,), generator=generator).to(device)
    return (logits, tokens, top_k), {}


logprobs = Op(
    "logprobs",
    logprobs_reference,
    kernels=[
        Implementation("triton", logprobs_triton, _triton_supports),
        Implementation("native", logprobs_native, native.supports),
    ],
    cases=LOGPROBS_CASES,
    cost=logprobs_cost,
    inputs=_inputs,
    # A sum of 49,152 exponentials in float32, and the rounding of log-probabilities around 20.
    tolerance={"float32": Tolerance(1e-6, 4e-6)},
)

"""Which drafts a step accepts: those equal to the token that was chosen at their position, up to the first that is not.

Where rows take the model's best token, it is part of a step's CUDA graph; else it runs behind the sampler (runner/verify.py).
Nothing waits for the host: the newest token of each row, and the number of rejected drafts by which it is shorter than the host
assumes, are ready for the next step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.launch import power_of_two
from ridgeline.ops.registry import Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.sizes.sampling_costs import ACCEPT_CASES, accept_cost

# ── definition ────────────────────────────────────────────────────────────────────────────────────────────────────


def accept_reference(
    surplus: Tensor, last_token: Tensor, tokens: Tensor, sampled: Tensor, failed: Tensor, index: Tensor, start: Tensor,
    rows: Tensor, accepted: Tensor, longest: int,
) -> None:
    """`sampled`, `failed` [S]: the token chosen at each position, whether there is none; `index` [S]: which of the `tokens` [T]
    each follows. Row n of `rows` [N] has the positions start[n] up to start[n + 1], at most `longest`, one behind the other:
    the token behind a position is the draft for it. `accepted` [N]: how many are right.

    By engine row: `last_token`, the token behind those; `surplus`, the rejected drafts, 0 of rows that have no positions.
    """
    surplus.zero_()
    start = start.long()
    count = start[1:] - start[:-1]
    offset = torch.arange(longest, device=tokens.device)
    place = (start[:-1, None] + torch.minimum(offset, (count[:, None] - 1).clamp(min=0))).clamp(max=len(sampled) - 1)
    draft = tokens[(index[place] + 1).clamp(max=len(tokens) - 1)]
    right = (sampled[place] == draft) & ~failed[place] & (offset < count[:, None] - 1)
    accepted.copy_(right.long().cumprod(1).sum(1))
    where = rows.long()
    newest = sampled[(start[:-1] + accepted).clamp(max=len(sampled) - 1)]
    last_token[where] = torch.where(count > 0, newest, last_token[where])
    surplus[where] = (count - 1 - accepted).clamp(min=0)


# ── Triton ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def _accept_kernel(  # type: ignore[no-untyped-def]
    surplus_ptr, last_token_ptr, tokens_ptr, sampled_ptr, failed_ptr, index_ptr, start_ptr, rows_ptr, accepted_ptr,
    LONGEST: tl.constexpr,
):
    """One CTA: one row."""
    place = tl.program_id(0)
    first = tl.load(start_ptr + place)
    count = tl.load(start_ptr + place + 1) - first
    lane = tl.arange(0, LONGEST)
    there, is_draft = lane < count, lane < count - 1
    sampled = tl.load(sampled_ptr + first + lane, mask=there, other=0)
    failed = tl.load(failed_ptr + first + lane, mask=there, other=0)
    token = tl.load(index_ptr + first, mask=count > 0, other=0)
    draft = tl.load(tokens_ptr + token + 1 + lane, mask=is_draft, other=0)
    right = is_draft & (sampled == draft) & (failed == 0)
    accepted = tl.min(tl.where(right, LONGEST, lane), axis=0)            # the last position of a row has no draft
    tl.store(accepted_ptr + place, accepted.to(tl.int64))
    if count > 0:
        row = tl.load(rows_ptr + place)
        tl.store(last_token_ptr + row, tl.sum(tl.where(lane == accepted, sampled, 0), axis=0))
        tl.store(surplus_ptr + row, (count - 1 - accepted).to(tl.int64))


def accept_on_gpu(
    surplus: Tensor, last_token: Tensor, tokens: Tensor, sampled: Tensor, failed: Tensor, index: Tensor, start: Tensor,
    rows: Tensor, accepted: Tensor, longest: int,
) -> None:
    surplus.zero_()
    _accept_kernel[(len(rows),)](
        surplus, last_token, tokens, sampled, failed.view(torch.uint8), index, start, rows, accepted,
        LONGEST=power_of_two(longest), num_warps=1,
    )


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda"


# ── declaration ───────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, widths: tuple[int, ...], padding: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rows with 1 + width positions; -1: a row without any. Three of four drafts are right, and the third position failed."""
    counts = torch.tensor(widths) + 1
    start = torch.zeros(len(widths) + 1, dtype=torch.int32)
    start[1:] = counts.cumsum(0)
    total = int(counts.sum()) + padding
    index = torch.arange(total)
    tokens = torch.randint(0, 9, (total + 1,), generator=generator)
    right = torch.rand(total, generator=generator) < 0.75
    sampled = torch.where(right, tokens[1:], tokens[1:] + 1)
    failed = torch.zeros(total, dtype=torch.bool)
    failed[2:3] = True
    rows = torch.randperm(len(widths) + 2, generator=generator)[: len(widths)].to(torch.int32)
    by_row = [torch.full((len(widths) + 2,), 5), torch.full((len(widths) + 2,), -1)]
    arguments = (*by_row, tokens, sampled, failed, index, start, rows, torch.full((len(widths),), -1))
    return (*(argument.to(device) for argument in arguments), max(widths) + 1), {}


accept = Op(
    "accept",
    accept_reference,
    kernels=[Implementation("triton", accept_on_gpu, _triton_supports)],
    cases=ACCEPT_CASES,
    cost=accept_cost,
    inputs=_inputs,
    tolerance={dtype: Tolerance(0, 0) for dtype in ("float32", "bfloat16", "float16")},
)

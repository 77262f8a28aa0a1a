"""Log-probabilities of chosen tokens, their ranks, and the k best alternatives.

Order everywhere: larger logit first, and among equal ones the lowest id first. Sampling is another file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.costs import LOGPROBS_CASES, logprobs_cost
from ridgeline.ops.registry import Op, Tolerance

CHUNK_ELEMENTS = 1 << 21             # logits handled at once: a long prompt must not need memory by the gigabyte

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
    all_logprobs = logits.log_softmax(dim=-1)
    index = tokens.long().unsqueeze(1)
    chosen = logits.gather(1, index)
    ids = torch.arange(logits.shape[1], device=logits.device)
    # Ranks compare logits: two of them may round to the same log-probability.
    before = (logits > chosen) | ((logits == chosen) & (ids < index))
    top_ids = _top_ids(logits, top_k)
    return (
        all_logprobs.gather(1, index).squeeze(1),
        before.sum(dim=1) + 1,
        top_ids,
        all_logprobs.gather(1, top_ids),
    )


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
    cases=LOGPROBS_CASES,
    cost=logprobs_cost,
    inputs=_inputs,
    # A sum of 49,152 exponentials in float32, and the rounding of log-probabilities around 20.
    tolerance={"float32": Tolerance(1e-6, 4e-6)},
)

"""Tokens of rows whose logits are divided among ranks by ids: each rank says which of its own ids can be chosen, and no others
travel.

    greedy                              the best id of each rank
    temperature alone                   the winner of each rank's part of the race, with the best of all as its measure
    temperature, top_k ≤ MOST_LISTED    the top_k best of each rank; min_p and top_p choose among the top_k best of all

All others need every logit: what sums over all ids (top_p and typical_p alone) would be rounded in other places, min_p alone
leaves any number of ids, and rows that edit their logits or want log-probabilities look at all of them.

Logits of candidates are put where they would be among all, with -inf between them, and sampled by sample.py: equal numbers, the
same noise, so the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops.sampling.greedy import greedy as choose_greedy
from ridgeline.ops.sampling.noise import to_device
from ridgeline.ops.sampling.sample import sample

MOST_LISTED = 128                    # ids of a rank that travel for a row with top_k
# Bytes of all logits from which on candidates travel instead, by kind of device. Between GPUs fewer arrive in one piece at once,
# while candidates take a dozen small kernels and for some rows a second exchange. Assumed, not measured.
LEAST_BYTES = {"cuda": 1 << 20, "cpu": 0}


@dataclass(frozen=True, slots=True)
class Division:
    """Which ids are here. Every rank has `room` places; ids are in order, and only the last places may be empty."""

    first: int
    room: int
    vocab: int
    ranks: int
    gather: Callable[[Tensor], Tensor]   # every rank's tensor, joined along the last dimension in rank order

    def all(self, here: Tensor) -> Tensor:
        """Logits [S, vocab] from each rank's own."""
        padded = torch.nn.functional.pad(here, (0, self.room - here.shape[1]))
        return self.gather(padded)[:, : self.vocab]

    def pairs(self, here: Tensor) -> Tensor:
        """[S, n, 2] on each rank becomes [S, ranks · n, 2]."""
        return self.gather(here.flatten(1)).unflatten(1, (-1, 2))


def best_here(logits: Tensor, first: int, failed: Tensor) -> Tensor:
    """[S, 2]: the largest of these logits and its id, which is `first` plus its column; NaN where a row has no finite one.
    `failed` is scratch."""
    wide = _wide(logits)
    if not logits.shape[1]:                                              # more ranks than ids
        return torch.tensor([-torch.inf, 0.0], dtype=wide, device=logits.device).repeat(len(logits), 1)
    # Zeros: while launches are only collected (ops/compile_ahead.py), they are read as columns.
    column = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    choose_greedy(logits, column, failed)
    value = logits.gather(1, column[:, None])[:, 0].to(wide).masked_fill_(failed, torch.nan)
    return torch.stack((value, (column + first).to(wide)), dim=-1)


def elect(best: Tensor, tokens: Tensor, failed: Tensor) -> None:
    """Of every rank's best [S, ranks, 2], the largest into `tokens`; the first of equals, as among one rank's ids."""
    rank = best[..., 0].argmax(dim=-1)                                   # a NaN counts as the largest
    value, token = best.gather(1, rank[:, None, None].expand(-1, 1, 2))[:, 0].unbind(-1)
    torch.logical_not(value.isfinite(), out=failed)
    tokens.copy_(token.nan_to_num_(0.0)).masked_fill_(failed, 0)


def largest_here(logits: Tensor, first: int, count: int) -> Tensor:
    """[S, 2 · count, 2]: at least the `count` largest of these logits with their ids. Of equal ones the lowest ids are among
    them; empty places have -inf."""
    rows, width = logits.shape
    found = torch.zeros((rows, 2 * count, 2), dtype=_wide(logits), device=logits.device)
    found[..., 0] = -torch.inf
    if not width:
        return found
    count = min(count, width)
    largest = logits.topk(count, dim=1)
    lowest = largest.values[:, -1:]                      # torch chooses among those equal to it as it likes
    found[:, :count, 0] = torch.where(largest.values > lowest, largest.values.to(found.dtype), -torch.inf)
    found[:, :count, 1] = (largest.indices + first).to(found.dtype)
    backwards = torch.arange(width, 0, -1, dtype=torch.int32, device=logits.device)
    equal = torch.where(logits == lowest, backwards, 0).topk(count, dim=1).values
    found[:, count : 2 * count, 0] = torch.where(equal > 0, lowest.to(found.dtype), -torch.inf)
    found[:, count : 2 * count, 1] = (first + (width - equal) * (equal > 0)).to(found.dtype)
    return found


def enough(here: Tensor, how: np.ndarray, needs_all: np.ndarray, ids: Division, late: Tensor | None = None) -> Tensor:
    """Logits [S, vocab] of which each row samples what it would of all; where `needs_all`, they are all. `how` and `late`: as
    sample() gets them. Every rank calls this with the same rows."""
    random = how["temperature"] > 0
    filtered = (how["top_k"] > 0) | (how["top_p"] < 1) | (how["min_p"] > 0) | (how["typical_p"] < 1)
    listed = (how["top_k"] > 0) & (how["top_k"] <= MOST_LISTED) & (how["typical_p"] == 1)
    needs_all = needs_all | (random & filtered & ~listed)
    few = here.element_size() * len(here) * ids.vocab < LEAST_BYTES[here.device.type]
    if few or needs_all.all():
        return ids.all(here)
    found = torch.full((len(here), ids.vocab), -torch.inf, dtype=here.dtype, device=here.device)
    said = best_here(here, ids.first, torch.empty(len(here), dtype=torch.bool, device=here.device))[:, None]
    listed &= random & ~needs_all
    if listed.any():
        most = min(int(how["top_k"][listed].max()), ids.room)
        said = torch.cat((said, largest_here(here, ids.first, most)), dim=1)
    _put(found, ids.pairs(said))
    raced = np.flatnonzero(random & ~filtered & ~needs_all)
    if len(raced):
        place = to_device(raced, here.device)
        own = found.index_select(0, place)               # with the best of all, to which every weight is relative
        own[:, ids.first : ids.first + here.shape[1]] = here.index_select(0, place)
        winner, _ = sample(own, how[raced], late=None if late is None else late.index_select(0, place))
        winner.clamp_(0, ids.vocab - 1)                  # while launches are only collected, it can be anything
        pair = torch.stack((own.gather(1, winner[:, None])[:, 0].to(_wide(here)), winner.to(_wide(here))), dim=-1)
        own = found.index_select(0, place)
        _put(own, ids.pairs(pair[:, None]))
        found.index_copy_(0, place, own)
    if needs_all.any():
        place = to_device(np.flatnonzero(needs_all), here.device)
        found.index_copy_(0, place, ids.all(here.index_select(0, place)))
    return found


def _put(found: Tensor, pairs: Tensor) -> None:
    """A NaN stays one: the row fails. The same id may come twice, with the same number."""
    value, token = pairs.unbind(-1)
    found.scatter_reduce_(1, token.to(torch.int64), value.to(found.dtype), "amax")


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)              # holds every id exactly: below 2**24

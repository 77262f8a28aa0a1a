"""2:4 sparsity: of four weights in a row two become zero.

    magnitude: the smallest |w|        wanda: the smallest |w| · |x|        sparsegpt: the two that cost least, and the inputs
    behind them make up for the error, as in GPTQ
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.quantize.methods.gptq_rounding import BLOCK, InverseFactor


def two_of_four(scores: Tensor) -> Tensor:
    """[outputs, inputs] -> which weights stay: in every four the two with the largest scores."""
    fours = scores.unflatten(1, (-1, 4))
    places = fours.argsort(dim=2, descending=True, stable=True)[:, :, :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(2, places, True).flatten(1)


def magnitude_sparse(values: Tensor) -> Tensor:
    return values * two_of_four(values.float().abs())


def wanda_sparse(values: Tensor, moments: Tensor) -> Tensor:
    return values * two_of_four(values.float().abs() * moments.diagonal().sqrt())


def sparsegpt_sparse(values: Tensor, factor: InverseFactor) -> Tensor:
    """`factor`: in the inputs' own order, so that fours stay together."""
    left = values.float().masked_fill(factor.unseen, 0.0)
    inputs = left.shape[1]
    for first in range(0, inputs, BLOCK):
        end = min(first + BLOCK, inputs)
        here, errors = left[:, first:end], torch.empty(len(left), end - first, device=left.device)
        upper = factor.upper[first:end, first:end]
        costs = upper.diagonal()
        for place in range(end - first):
            if place % 4 == 0:
                kept = two_of_four((here[:, place : place + 4] / costs[place : place + 4]).abs())
            column = here[:, place].clone()
            number = column * kept[:, place % 4]
            errors[:, place] = (column - number) / costs[place]
            here[:, place:] -= errors[:, place : place + 1] * upper[place, place:]
            here[:, place] = number
        left[:, end:] -= errors @ factor.upper[first:end, end:]
    return left

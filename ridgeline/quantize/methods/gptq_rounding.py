"""GPTQ: rounds the inputs of a matrix one after the other, and lets those that follow make up for each error.

    minimise |W x − Ŵ x|² over the calibration's inputs x, whose second moments are the Hessian H = Σ x xᵀ

Inputs with the largest moments come first (static activation order): scales are those of the plain groups, computed before, so
that the result needs no order when it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.ops.quantised.expand import spread
from ridgeline.quant.format import WeightFormat
from ridgeline.quantize.methods.rounding import LEAST, Rounded, grid_of, with_grid

DAMPING = 0.01                       # of the mean moment, added to all: an input that was hardly seen changes nothing much
BLOCK = 128                          # inputs whose errors are gathered before they reach the inputs behind them
SOLVED = 512                         # a triangular matrix of this size is inverted at once
_MORE_DAMPING = (1, 10, 100)         # times DAMPING, until the Hessian can be inverted


class InverseFactor:
    """Of one Hessian, for all matrices that read the same inputs: the upper Cholesky factor of its inverse, in GPTQ's order
    or in the inputs' own."""

    def __init__(self, hessian: Tensor, ordered: bool = True) -> None:
        moments = hessian.diagonal().clone()
        self.unseen = moments == 0
        moments[self.unseen] = 1.0
        self.order = (torch.argsort(moments, descending=True, stable=True) if ordered
                      else torch.arange(len(moments), device=moments.device))
        arranged = hessian.clone()
        arranged.diagonal().copy_(moments)
        arranged = arranged[self.order][:, self.order]
        mean = moments.mean()
        for times in _MORE_DAMPING:
            damped = arranged.clone()
            damped.diagonal().add_(times * DAMPING * mean)
            # H = R Rᵀ with R upper: the Cholesky factor of H in reverse order, reversed. Then H⁻¹ = (R⁻¹)ᵀ R⁻¹, and R⁻¹ is the
            # factor: half the work of inverting H and factoring the inverse.
            lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
            # Some LAPACKs, OpenBLAS on aarch64 for one, factor what is not finite and report no failure.
            if not int(failed) and bool(lower.isfinite().all()):
                self.upper = _inverse_upper(lower.flip(0, 1))
                return
        raise ModelError("the calibration's inputs have no invertible Hessian: are activations finite?")


def _inverse_upper(matrix: Tensor) -> Tensor:
    """Of an upper triangular matrix, by halves: ((A, B), (0, C)) becomes ((A⁻¹, −A⁻¹ B C⁻¹), (0, C⁻¹))."""
    size = len(matrix)
    if size <= SOLVED:
        return torch.linalg.solve_triangular(matrix, torch.eye(size, device=matrix.device, dtype=matrix.dtype), upper=True)
    half = size // 2
    first, last = _inverse_upper(matrix[:half, :half]), _inverse_upper(matrix[half:, half:])
    found = torch.zeros_like(matrix)
    found[:half, :half], found[half:, half:] = first, last
    found[:half, half:] = -(first @ matrix[:half, half:] @ last)
    return found


def gptq_rounded(values: Tensor, factor: InverseFactor, format: WeightFormat) -> Rounded:
    """values [outputs, inputs] -> the format's tensors, for integer grids"""
    assert format.scales is not None
    wide = values.float()
    shape = (wide.shape[0], wide.shape[1])
    scale, zero = grid_of(wide, format)
    scales = spread(scale.float(), format.scales.block, shape).expand(shape)[:, factor.order]
    zeros = None if zero is None else spread(zero, format.scales.block, shape).expand(shape)[:, factor.order]
    left = wide.masked_fill(factor.unseen, 0.0)[:, factor.order]
    found = torch.empty_like(left)
    low = LEAST[format.grid]
    for first in range(0, shape[1], BLOCK):
        end = min(first + BLOCK, shape[1])
        here, errors = left[:, first:end], torch.empty(shape[0], end - first, device=left.device)
        upper = factor.upper[first:end, first:end]
        for place in range(end - first):
            column, step = here[:, place], scales[:, first + place]
            middle = 0.0 if zeros is None else zeros[:, first + place]
            number = ((column / step + middle).round().clamp(low, -1 - low) - middle) * step
            errors[:, place] = (column - number) / upper[place, place]
            here[:, place:] -= errors[:, place : place + 1] * upper[place, place:]
            found[:, first + place] = number
        left[:, end:] -= errors @ factor.upper[first:end, end:]
    numbers = torch.empty_like(found).index_copy_(1, factor.order, found)
    return with_grid(numbers, format, scale, zero)       # they lie on the grid already

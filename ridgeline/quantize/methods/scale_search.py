"""The scales that AWQ and SmoothQuant move into weights, and AWQ's clipping: found by trying, on a sample of a linear's inputs.

    AWQ:          s = mean|x|^a, or mean|x|^a / size(w)^(1 − a)     least |x Wᵀ − (x / s) Q(W s)ᵀ|²
    SmoothQuant:  s = max|x|^a / max|w|^(1 − a)                     the same, with x / s rounded to 8 bits for each token

s = 1 is tried as well, so that neither is worse on the sample than rounding to nearest.

Another device, or another number of threads, sums in another order, and what was observed differs in its last bits. Activations
that are rounded make a jump of that. So SmoothQuant's s is rounded to steps of 2^(1/4), and a candidate must be better by more
than such jumps: the same file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ridgeline.quant.format import WeightFormat
from ridgeline.quant.quantise import block_maxima
from ridgeline.quantize.calibration import Inputs
from ridgeline.quantize.methods.folding import Fold
from ridgeline.quantize.methods.rounding import as_rounded, over

STRENGTHS = tuple(step / 10 for step in range(1, 11))
SHRINKS = tuple(1 - step / 20 for step in range(1, 11))                  # of the largest magnitude of a group
SMALLEST = 1e-4
STEPS = (1.0, 2**0.25, 2**0.5, 2**0.75)                                  # of a scale within a power of two
BETTER = 1 - 1e-4                                                        # of the least error so far
Weights = Sequence[tuple[Tensor, WeightFormat]]                          # of the linears that read the same inputs


def awq_scales(fold: Fold, weights: Weights, inputs: Inputs) -> Tensor:
    """One for each row that writes the inputs."""
    mean = fold.narrow(inputs.mean).clamp_min(SMALLEST)
    size = fold.narrow(torch.stack([_sizes(values, format) for values, format in weights]).mean(0)).clamp_min(SMALLEST)

    def candidates() -> Iterator[Tensor]:
        for strength in STRENGTHS:
            yield mean.pow(strength)
            yield mean.pow(strength) / size.pow(1 - strength)

    return _best(fold, candidates(), weights, inputs.sample, rounds_x=False)


def smooth_scales(fold: Fold, weights: Weights, inputs: Inputs) -> Tensor:
    largest = fold.narrow(inputs.largest).clamp_min(SMALLEST)
    top = fold.narrow(torch.stack([values.float().abs().amax(0) for values, _ in weights]).amax(0)).clamp_min(SMALLEST)
    tried = (largest.pow(strength) / top.pow(1 - strength) for strength in STRENGTHS)
    return _best(fold, tried, weights, inputs.sample, rounds_x=True)


def _best(fold: Fold, tried: Iterator[Tensor], weights: Weights, sample: Tensor, rounds_x: bool) -> Tensor:
    wide = [(values.float(), format) for values, format in weights]
    expected = [sample @ values.t() for values, _ in wide]
    best, least = torch.ones_like(fold.narrow(sample[0])), torch.tensor(torch.inf)
    for number, candidate in enumerate((best, *tried)):
        scales = candidate / (candidate.amax() * candidate.amin()).sqrt() if number else candidate
        scales = in_steps(scales) if rounds_x else scales
        each = fold.wide(scales)
        x = sample / each
        x = int8_tokens(x) if rounds_x else x
        error = torch.stack([
            (x @ as_rounded(values * each, format).t() - product).pow(2).sum()
            for (values, format), product in zip(wide, expected, strict=True)
        ]).sum()
        if error < least * (BETTER if rounds_x else 1):
            best, least = scales, error
    return best


def in_steps(scales: Tensor) -> Tensor:
    """The nearest power of 2^(1/4), from a table: exp2 itself differs between devices."""
    steps = (scales.log2() * len(STEPS)).round().long()
    table = torch.tensor(STEPS, device=scales.device)
    return torch.ldexp(table[steps % len(STEPS)], steps.div(len(STEPS), rounding_mode="floor"))


def _sizes(values: Tensor, format: WeightFormat) -> Tensor:
    """Of each input's weights, as a share of the largest of their group."""
    assert format.scales is not None
    sizes = values.float().abs()
    largest = block_maxima(sizes, format.scales.block)
    group = format.scales.block[1] or values.shape[1]
    return (sizes / largest.view(len(values), -1).repeat_interleave(group, 1).clamp_min(1e-12)).mean(0)


def int8_tokens(x: Tensor) -> Tensor:
    """x with every token rounded to 255 levels, as W8A8 kernels read it."""
    step = over(x.abs().amax(1, keepdim=True), 127.0).clamp_min(1e-12)
    return (x / step).round() * step


def clipped(values: Tensor, format: WeightFormat, sample: Tensor) -> Tensor:
    """The weights with the largest magnitudes of each group cut off where that makes the group's products nearer."""
    assert format.scales is not None
    outputs, inputs = values.shape
    group = format.scales.block[1] or inputs
    parts = values.float().view(outputs, -1, group)
    x = sample.view(len(sample), -1, group).transpose(0, 1)
    moments = x.transpose(1, 2) @ x                                      # [groups, group, group]
    low, high = parts.amin(2, keepdim=True).clamp_max(0), parts.amax(2, keepdim=True).clamp_min(0)
    if format.scales.zero is None:
        high = torch.maximum(high, -low)
        low = -high
    best, least = parts, torch.full((outputs, parts.shape[1]), torch.inf, device=parts.device)
    for shrink in (1.0, *SHRINKS):
        cut = parts.clamp(low * shrink, high * shrink)
        error = (as_rounded(cut.view(outputs, inputs), format).view_as(parts) - parts).transpose(0, 1)
        loss = ((error @ moments) * error).sum(2).t()
        better = loss < least
        best, least = torch.where(better[:, :, None], cut, best), torch.where(better, loss, least)
    return best.reshape(outputs, inputs)

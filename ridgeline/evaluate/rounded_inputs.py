"""Activations rounded as a checkpoint asks for, where this device's kernels keep them: a card made on a CPU then holds the whole
error of W8A8, not only that of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.layers.linear import Linear
from ridgeline.quant.format import Activation
from ridgeline.quant.scheme import Composed, Scheme

LARGEST = {"fp8": 448.0, "int8": 127.0}
GROUP = 128                          # inputs that share a scale, where a checkpoint says "group"
SMALLEST = 1e-12


def rounded(x: Tensor, activation: Activation) -> Tensor:
    """x [tokens, inputs] as kernels of W8A8 read it. The engine keeps no static scales: a tensor's own range is taken."""
    if activation.kind not in LARGEST:
        return x
    wide, width = x.float(), x.shape[1]
    if activation.per == "group":
        wide = torch.nn.functional.pad(wide, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    sizes = wide.abs()
    if activation.outliers is not None:                  # such columns stay as they are
        kept = sizes.amax(0) > activation.outliers
        sizes = sizes.masked_fill(kept, 0.0)
    top = sizes.amax() if activation.per == "tensor" else sizes.amax(-1, keepdim=True)
    step = (top / LARGEST[activation.kind]).clamp_min(SMALLEST)
    shares = (wide / step).clamp(-LARGEST[activation.kind], LARGEST[activation.kind])
    shares = shares.to(torch.float8_e4m3fn).float() if activation.kind == "fp8" else shares.round()
    found = shares * step
    if activation.outliers is not None:
        found = torch.where(kept, wide, found)
    return found.reshape(x.shape[0], -1)[:, :width].to(x.dtype)


class RoundedInputs(Composed):
    """Any scheme, with its inputs rounded first."""

    def __init__(self, inner: Scheme, activation: Activation) -> None:
        self.inner, self.activation = inner, activation

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        return self.inner.apply(linear, rounded(x, self.activation), batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def round_inputs(model: nn.Module, activations: Mapping[str, Activation]) -> int:
    """Of linears by their path in the model. Returns how many there are."""
    count = 0
    for path, module in model.named_modules():
        activation = activations.get(path)
        if isinstance(module, Linear) and activation is not None and activation.kind in LARGEST:
            module.scheme = RoundedInputs(module.scheme, activation)
            count += 1
    return count

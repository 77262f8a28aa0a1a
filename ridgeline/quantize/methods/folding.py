"""Scales that move from the inputs of a linear into what writes these inputs, so that the product stays the same:

    W x = (W · s) (x / s)        x / s comes from the norm before, or from the rows of v or up, divided by s

AWQ and SmoothQuant choose s (scale_search.py). Nothing is computed at run time: the numbers in the checkpoint change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.models.model_config import ModelConfig
from ridgeline.quantize.calibration import Calibration, Inputs, Rows

SAME = 1e-3                          # how far a layer's output may move, as a share of its size


@dataclass(frozen=True, slots=True)
class Fold:
    """The inputs of one linear, and what writes them."""

    linear: str                      # its path in a decoder of one layer
    readers: tuple[str, ...]         # its weights in the checkpoint
    norm: str = ""                   # the norm's weight, or
    rows: tuple[Rows, ...] = ()      # rows of weights and biases
    repeats: int = 1                 # inputs that one of these rows writes: heads that share a v
    head: int = 1                    # size of such a head

    def narrow(self, values: Tensor) -> Tensor:
        """One number for each row that writes, of a number for each input: the largest."""
        return values.view(-1, self.repeats, self.head).amax(1).flatten() if self.repeats > 1 else values

    def wide(self, scales: Tensor) -> Tensor:
        """For each input."""
        if self.repeats == 1:
            return scales
        return scales.view(-1, 1, self.head).expand(-1, self.repeats, -1).flatten()


def folds(config: ModelConfig, places: dict[str, Rows]) -> list[Fold]:
    """Of a layer: `places` are its tensors by piece (Calibration.rows)."""
    def path(name: str) -> str:
        return f"layers.0.{name}"

    def readers(linear: str, parts: tuple[str, ...]) -> tuple[str, ...]:
        found = [places.get(path(f"{linear}.weight:{part}")) for part in parts]
        return tuple(dict.fromkeys(rows.name for rows in found if rows is not None))

    def writers(*names: str) -> tuple[Rows, ...]:
        return tuple(places[path(name)] for name in names if path(name) in places)

    found = []
    for linear, parts, norm in (("attention.qkv", ("q", "k", "v"), "attention_norm"),
                                ("mlp.gate_up", ("gate", "up"), "mlp_norm")):
        its, rows = readers(linear, parts), writers(f"{norm}.weight:")
        if its and rows:
            found.append(Fold(path(linear), its, norm=rows[0].name))
    value = writers("attention.qkv.weight:v", "attention.qkv.bias:v")
    if value and (its := readers("attention.output", ("",))):
        found.append(Fold(path("attention.output"), its, rows=value, repeats=config.num_heads // config.num_kv_heads,
                          head=config.head_dim))
    up = writers("mlp.gate_up.weight:up", "mlp.gate_up.bias:up")
    if up and (its := readers("mlp.down", ("",))):
        found.append(Fold(path("mlp.down"), its, rows=up))
    return found


def apply(fold: Fold, scales: Tensor, values: dict[str, Tensor], norm_offset: float) -> Tensor:
    """Moves `scales` (one for each row that writes) in `values`, the layer's tensors. Returns what x is divided by in the end:
    a norm's weight is rounded to its dtype, and the readers are multiplied by what that gave."""
    if fold.norm:
        weight = values[fold.norm]
        old = weight.float() + norm_offset
        values[fold.norm] = (old / scales - norm_offset).to(weight.dtype)
        new = values[fold.norm].float() + norm_offset
        scales = torch.where(new != 0, old / new, scales)
        scales = torch.where(old != 0, scales, torch.ones_like(scales))
    for rows in fold.rows:
        tensor = values[rows.name].float().clone()
        part = tensor[rows.first : rows.end]
        part.div_(scales if part.dim() == 1 else scales[:, None])
        values[rows.name] = tensor
    wide = fold.wide(scales)
    for name in fold.readers:
        values[name] = values[name].float() * wide
    return wide


def fold_layer(
    calibration: Calibration, values: dict[str, Tensor], chosen: list[tuple[Fold, Tensor]], observed: dict[str, Inputs]
) -> None:
    """Applies all folds of a layer, to its tensors and to what was observed; an error where the layer is another one then."""
    before = calibration.output(values)
    for fold, scales in chosen:
        wide = apply(fold, scales, values, calibration.model.config.norm_offset)
        observed[fold.linear] = observed[fold.linear].divided(wide)
    moved = (calibration.output(values) - before).pow(2).mean().sqrt()
    if not moved <= SAME * before.pow(2).mean().sqrt():
        raise ModelError("scales cannot be moved between the linears of this family: use gptq or rtn")

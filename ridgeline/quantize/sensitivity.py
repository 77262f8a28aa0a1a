"""What each linear's rounding costs alone: KL of the model's next-token distribution, with only that linear at 4 bits.

Every linear has hidden states of its own, which leave the plain ones at its layer. All of them pass through the layers together,
so that one layer is in memory at a time and every layer is read once:

    layer 0   plain ─┬─ qkv of 0 rounded ───────────▶ …
                     └─ down of 0 rounded ──────────▶ …
    layer 1   plain ─┬─ qkv of 1 rounded ───────────▶ …      head: KL of each against plain

Other formats of the linear cost in proportion to the squared error of its products: KL is of second order in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import Renamer, model_pieces
from ridgeline.process.progress import progress_bar
from ridgeline.quant.format import WeightFormat
from ridgeline.quant.scheme import Unquantised
from ridgeline.quantize.calibration import CONTEXT, Calibration
from ridgeline.quantize.ct_writer import Linear, stored_bytes
from ridgeline.quantize.methods.rounding import expanded, rounded
from ridgeline.quantize.plain_model import OUTSIDE, PlainModel

PLAIN_BYTES = 2                      # of a weight that is not quantised
CHUNK = 256                          # positions whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class Unit:
    """Linears that are one matrix in the engine: they get one format."""

    modules: tuple[str, ...]
    sizes: tuple[float, ...]         # bytes of each option
    costs: tuple[float, ...]         # predicted KL of each option; the last option leaves the linears as they are: 0


@torch.inference_mode()
def measure(model: PlainModel, options: Sequence[Sequence[Linear]], passages: list[list[int]], show: bool) -> list[Unit]:
    """`options`: for every format the model's linears; the first is the coarsest, whose KL is measured."""
    run = Calibration(model, passages)
    run.begin()
    by_fused: dict[str, list[tuple[Linear, ...]]] = {}
    for same in zip(*options, strict=True):
        if same[0].layer is not None:
            by_fused.setdefault(same[0].fused, []).append(same)
    streams: list[tuple[str, list[Tensor]]] = []
    errors: dict[str, list[float]] = {}
    with progress_bar("what each linear costs", wanted=show) as tick:
        for layer in range(model.config.num_layers):
            tick(layer, model.config.num_layers)
            values = {name: model.read(name) for name in model.names(layer)}
            observed = run.observe(values)
            streams = [(fused, run.through(group)) for fused, group in streams]
            for fused, linears in by_fused.items():
                if linears[0][0].layer == layer:
                    moments = observed[run.linear_of(linears[0][0].weight)].moments
                    assert moments is not None
                    errors[fused] = _errors(linears, values, moments)
                    changed = {same[0].weight: _numbers(values[same[0].weight], same[0]) for same in linears}
                    streams.append((fused, run.through(run.streams, values | changed)))
            run.move_on(values)
        tick(model.config.num_layers, model.config.num_layers)
    costs = divergences(_head(model), run.streams, [group for _, group in streams], show)
    return [_unit(by_fused[fused], errors[fused], cost) for (fused, _), cost in zip(streams, costs, strict=True)]


def _numbers(values: Tensor, linear: Linear) -> Tensor:
    if linear.format is None:
        return values
    return expanded(rounded(values, linear.format), linear.format, linear.inputs)


def _errors(linears: list[tuple[Linear, ...]], values: dict[str, Tensor], moments: Tensor) -> list[float]:
    """Of each option: the squared error of the products with what was observed."""
    found = []
    for option in range(len(linears[0])):
        total = 0.0
        for same in linears:
            numbers = values[same[option].weight]
            error = _numbers(numbers, same[option]).float() - numbers.float()
            total += float(((error @ moments) * error).sum())
        found.append(total)
    return found


def _unit(linears: list[tuple[Linear, ...]], errors: list[float], cost: float) -> Unit:
    def size(linear: Linear) -> float:
        return stored_bytes(linear if linear.format is not None else replace(linear, format=WeightFormat("bf16")))

    sizes = [sum(size(same[option]) for same in linears) for option in range(len(errors))]
    costs = [cost * error / errors[0] if errors[0] else 0.0 for error in errors]
    return Unit(tuple(same[0].module for same in linears), tuple(sizes), tuple(costs))


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _head(model: PlainModel) -> Decoder:
    """The model without layers."""
    config = model.config
    config = replace(config, num_layers=1, windows=config.windows[:1], ropes=config.ropes[:1], quantisation=None)
    scheme = Unquantised()
    decoder = Decoder(config, Communicator(), torch.float32, "cpu", CONTEXT, lambda path: scheme)
    pieces, renamer = model_pieces(decoder), Renamer(model.config, gguf=False)
    for name in model.names(OUTSIDE):
        for target in renamer.pieces_of(name) or ():
            if not re.match(r"layers\.", target):
                pieces[target].target.copy_(model.read(name))
    return decoder


def divergences(head: Decoder, plain: list[Tensor], changed: list[list[Tensor]], show: bool) -> list[float]:
    """Of each of the changed: mean KL over all positions. The plain logits of a few positions are computed once for all."""
    def logs(states: Tensor) -> Tensor:
        return head.logits(head.norm(states)).log_softmax(-1)

    totals, done, count = [0.0] * len(changed), 0, sum(map(len, plain))
    with progress_bar("what each linear costs: answers", wanted=show) as tick:
        for place, before in enumerate(plain):
            for first in range(0, len(before), CHUNK):
                old = logs(before[first : first + CHUNK])
                shares = old.exp()
                for number, streams in enumerate(changed):
                    totals[number] += float((shares * (old - logs(streams[place][first : first + CHUNK]))).sum())
                done += len(old)
                tick(done, count)
    return [max(total / count, 0.0) for total in totals]

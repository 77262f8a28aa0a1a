"""What formats cost, without writing an output: KL of the model's next-token distribution, layer by layer.

Every choice of formats has hidden states of its own, which leave the plain ones at the first layer that it changes. All of them
pass through the layers together, so that one layer is in memory at a time and every layer is read once:

    layer 0   plain ─┬─ qkv of 0 rounded ───────────▶ …
                     ├─ down of 0 rounded ──────────▶ …
                     └─ all of 0 in NVFP4 ──────────▶ all of 1 in NVFP4 ─▶ …
    layer 1   plain ─┬─ qkv of 1 rounded ───────────▶ …      head: KL of each against plain

One linear alone is measured in one format. Its other formats cost in proportion to the squared error of its products, and all
costs of a format are scaled so that they add up to what the whole model in that format costs.

Text that methods read (AWQ, GPTQ) and text that is judged are two: what a method gains on its own text only is no gain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.errors import ModelError
from ridgeline.evaluate import rounded_inputs
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import Renamer, model_pieces
from ridgeline.process.progress import progress_bar
from ridgeline.quant.format import Activation, WeightFormat
from ridgeline.quant.scheme import Unquantised
from ridgeline.quantize.blocks import QKV
from ridgeline.quantize.calibration import CONTEXT, Calibration, Inputs, exact_kernels
from ridgeline.quantize.ct_writer import Linear, stored_bytes
from ridgeline.quantize.methods.folding import Fold, fold_layer, folds
from ridgeline.quantize.methods.gptq_rounding import InverseFactor, gptq_rounded
from ridgeline.quantize.methods.rounding import as_rounded, expanded, rounded
from ridgeline.quantize.methods.scale_search import awq_scales, clipped
from ridgeline.quantize.plain_model import OUTSIDE, PlainModel

PLAIN_BYTES = 2                      # of a weight that is not quantised
CHUNK = 256                          # positions whose logits are in memory at a time
TRIED_SCALE = 0.5                    # power of the inputs' size, to see whether scales can be moved

Group = tuple[Linear, ...]           # linears that are one matrix in the engine


@dataclass(frozen=True, slots=True)
class Unit:
    """Linears that are one matrix in the engine: they get one format."""

    modules: tuple[str, ...]
    sizes: tuple[float, ...]         # bytes of each option
    costs: tuple[float, ...]         # predicted KL of each option; the last option leaves the linears as they are: 0


@dataclass(frozen=True, slots=True)
class Texts:
    read: list[list[int]]            # passages that methods calibrate with
    judged: list[list[int]]          # passages on which KL of whole models is measured, and
    alone: list[list[int]]           # of one linear alone: it is read once for each


class Measure:
    """KL of choices of formats. The scales that AWQ finds are kept for the next pass."""

    def __init__(self, model: PlainModel, texts: Texts, show: bool, device: str = "cpu") -> None:
        self._model, self._texts, self._show, self._device = model, texts, show, device
        self._scales: dict[str, Tensor] = {}

    @torch.inference_mode()
    def units(self, options: Sequence[Sequence[Linear]]) -> tuple[list[Unit], list[float]]:
        """`options`: for every format the model's linears; the first is the coarsest, whose KL is measured for each linear
        alone; the last leaves them as they are. Also returns the KL of the whole model in each of the others."""
        groups = [_by_fused(linears) for linears in options]
        formats = groups[:-1]
        alone = Calibration(self._model, self._texts.alone, self._device)
        alone.begin()
        judged = Calibration(self._model, self._texts.judged, self._device)
        streams: dict[str, list[Tensor]] = {}            # of a linear alone, by its fused name
        whole: list[list[Tensor]] = []                   # of each option
        errors: dict[str, list[float]] = {}
        for layer, values, seen, numbers in self._layers(judged, "what each linear costs"):
            alone.use(values)
            streams = {fused: alone.through(group) for fused, group in streams.items()}
            changed = [dict(values) for _ in options[:-1]]
            for fused in (name for name, group in groups[0].items() if group[0].layer == layer):
                each = [numbers(of[fused]) for of in formats]
                x = seen[judged.linear_of(groups[0][fused][0].weight)].sample
                wrong = [_error(new, values, x, of[fused][0].format) for new, of in zip(each, formats, strict=True)]
                errors[fused] = [*wrong, 0.0]
                streams[fused] = alone.through(alone.streams, values | each[0])
                changed = [old | new for old, new in zip(changed, each, strict=True)]
            whole = whole or [judged.streams] * len(changed)
            whole = [judged.through(stream, new, _rounds(of, layer)) for stream, new, of in
                     zip(whole, changed, formats, strict=True)]
            alone.move_on(values)
        head = _head(self._model, self._device)
        costs = divergences(head, alone.streams, list(streams.values()), self._show, self._device)
        uniform = divergences(head, judged.streams, whole, self._show, self._device)
        return [_unit([of[fused] for of in groups], errors[fused], cost)
                for fused, cost in zip(streams, costs, strict=True)], uniform

    @torch.inference_mode()
    def recipes(self, recipes: Sequence[Sequence[Linear]]) -> list[float]:
        """KL of the whole model by each recipe; a recipe is all of the model's linears."""
        groups = [_by_fused(linears) for linears in recipes]
        judged = Calibration(self._model, self._texts.judged, self._device)
        whole: list[list[Tensor]] = []
        for layer, values, _, numbers in self._layers(judged, "formats together"):
            known: dict[tuple[str, object, str], dict[str, Tensor]] = {}
            whole = whole or [judged.streams] * len(groups)
            for place, of in enumerate(groups):
                changed = dict(values)
                for fused, group in of.items():
                    if group[0].layer == layer:
                        key = (fused, group[0].format, group[0].method)
                        if key not in known:
                            known[key] = numbers(group)
                        changed |= known[key]
                whole[place] = judged.through(whole[place], changed, _rounds(of, layer))
        return divergences(_head(self._model, self._device), judged.streams, whole, self._show, self._device)

    def _layers(self, judged: Calibration, words: str) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Inputs], _Numbers]]:
        """Of each layer its tensors, what the judged text shows its linears, and what methods make of them. The plain hidden
        states move on after it."""
        read, count = Calibration(self._model, self._texts.read, self._device), self._model.config.num_layers
        read.begin()
        judged.begin()
        with progress_bar(words, wanted=self._show) as tick:
            for layer in range(count):
                tick(layer, count)
                values = {name: self._model.read(name).to(self._device) for name in self._model.names(layer)}
                yield layer, values, judged.observe(values, moments=False), _Numbers(read, values, self._scales)
                judged.move_on(values)
                read.move_on(values)
            tick(count, count)

    @torch.inference_mode()
    def moves_scales(self) -> bool:
        """AWQ can move scales between the linears of this family: tried on the first layer."""
        read = Calibration(self._model, self._texts.read[:1], self._device)
        read.begin()
        values = {name: self._model.read(name).to(self._device) for name in self._model.names(0)}
        observed = read.observe(values, moments=False)
        chosen = []
        for fold in folds(self._model.config, read.rows(values)):
            mean = fold.narrow(observed[fold.linear].mean).clamp_min(1e-4).pow(TRIED_SCALE)
            chosen.append((fold, mean / (mean.amax() * mean.amin()).sqrt()))
        try:
            fold_layer(read, values, chosen, observed)
        except ModelError:
            return False
        return bool(chosen)


class _Numbers:
    """What methods make of a layer's linears, as numbers that multiply the inputs as they are: scales that AWQ moves are moved
    back. So linears can be changed one by one."""

    def __init__(self, read: Calibration, values: Mapping[str, Tensor], scales: dict[str, Tensor]) -> None:
        self._read, self._values, self._scales = read, values, scales
        self._observed: dict[str, Inputs] | None = None
        self._factors: dict[str, InverseFactor] = {}

    def __call__(self, linears: Group) -> dict[str, Tensor]:
        top = max(float(self._values[linear.weight].abs().amax()) for linear in linears)
        return {linear.weight: self._one(linear, linears, top) for linear in linears}

    def _one(self, linear: Linear, linears: Group, top: float) -> Tensor:
        values, format = self._values[linear.weight], linear.format
        if format is None:
            return values
        if linear.method == "gptq":
            return expanded(gptq_rounded(values, self._factor(linear), format), format, linear.inputs)
        if linear.method != "awq" and format.grid == "e2m1":             # NVFP4's second scale is one for the fused matrix
            return expanded(rounded(values, format, top), format, linear.inputs)
        if linear.method != "awq":
            return as_rounded(values, format)
        scales, sample = self._awq(linears), self._inputs(linear).sample
        moved = values.float() * scales
        if not linear.fused.endswith(QKV):
            moved = clipped(moved, format, sample / scales)
        return as_rounded(moved, format) / scales

    def _inputs(self, linear: Linear) -> Inputs:
        if self._observed is None:
            self._observed = self._read.observe(self._values)
        return self._observed[self._read.linear_of(linear.weight)]

    def _factor(self, linear: Linear) -> InverseFactor:
        moments = self._inputs(linear).moments
        assert moments is not None
        if linear.fused not in self._factors:
            self._factors[linear.fused] = InverseFactor(moments)
        return self._factors[linear.fused]

    def _awq(self, linears: Group) -> Tensor:
        """By the first format that asks: scales of others are nearly the same."""
        fused = linears[0].fused
        if fused not in self._scales:
            inputs = self._inputs(linears[0])
            fold = self._fold(linears)
            weights = [(self._values[linear.weight], linear.format) for linear in linears if linear.format is not None]
            self._scales[fused] = torch.ones_like(inputs.mean) if fold is None else fold.wide(awq_scales(fold, weights, inputs))
        return self._scales[fused]

    def _fold(self, linears: Group) -> Fold | None:
        """None: scales cannot be moved, as where one of the readers is kept."""
        if any(linear.format is None for linear in linears):
            return None
        found = folds(self._read.model.config, self._read.rows(self._values))
        return next((fold for fold in found if set(fold.readers) == {linear.weight for linear in linears}), None)


def _by_fused(linears: Sequence[Linear]) -> dict[str, Group]:
    found: dict[str, Group] = {}
    for linear in linears:
        if linear.layer is not None:
            found[linear.fused] = (*found.get(linear.fused, ()), linear)
    return found


def _rounds(groups: Mapping[str, Group], layer: int) -> dict[str, Activation]:
    """How linears of a layer round what they read, by the names of their weights."""
    return {linear.weight: linear.format.activation for group in groups.values() for linear in group
            if linear.layer == layer and linear.format is not None and linear.format.activation is not None}


def _error(numbers: Mapping[str, Tensor], values: Mapping[str, Tensor], x: Tensor, format: WeightFormat | None) -> float:
    """The squared error of the products with what was observed; a format may round that, too."""
    read = x if format is None or format.activation is None else rounded_inputs.rounded(x, format.activation)
    return sum(float((read @ new.float().t() - x @ values[name].float().t()).square().sum()) for name, new in numbers.items())


def _unit(options: list[Group], errors: list[float], cost: float) -> Unit:
    def size(linear: Linear) -> float:
        return stored_bytes(linear if linear.format is not None else replace(linear, format=WeightFormat("bf16")))

    costs = [cost * error / errors[0] if errors[0] else 0.0 for error in errors]
    return Unit(tuple(linear.module for linear in options[0]), tuple(sum(map(size, group)) for group in options), tuple(costs))


def added_up(units: list[Unit], uniform: Sequence[float]) -> list[Unit]:
    """Costs scaled, so that those of each format add up to what the whole model in it costs."""
    sums = [sum(unit.costs[option] for unit in units) for option in range(len(uniform))]
    factors = [*(kl / total if total > 0 else 1.0 for kl, total in zip(uniform, sums, strict=True)), 1.0]
    return [replace(unit, costs=tuple(cost * factor for cost, factor in zip(unit.costs, factors, strict=True))) for unit in units]


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _head(model: PlainModel, device: str) -> Decoder:
    """The model without layers."""
    config = model.config
    config = replace(config, num_layers=1, windows=config.windows[:1], ropes=config.ropes[:1], quantisation=None)
    scheme = Unquantised()
    decoder = Decoder(config, Communicator(), torch.float32, device, CONTEXT, lambda path: scheme)
    pieces, renamer = model_pieces(decoder), Renamer(model.config, gguf=False)
    for name in model.names(OUTSIDE):
        for target in renamer.pieces_of(name) or ():
            if not re.match(r"layers\.", target):
                pieces[target].target.copy_(model.read(name))
    return decoder


def divergences(
    head: Decoder, plain: list[Tensor], changed: list[list[Tensor]], show: bool, device: str = "cpu"
) -> list[float]:
    """Of each of the changed: mean KL over all positions. The plain logits of a few positions are computed once for all."""
    def logs(states: Tensor) -> Tensor:
        return head.logits(head.norm(states)).log_softmax(-1)

    totals, done, count = [0.0] * len(changed), 0, sum(map(len, plain))
    with exact_kernels(device), progress_bar("answers", wanted=show) as tick:
        for place, before in enumerate(plain):
            for first in range(0, len(before), CHUNK):
                old = logs(before[first : first + CHUNK])
                shares = old.exp()
                for number, streams in enumerate(changed):
                    totals[number] += float((shares * (old - logs(streams[place][first : first + CHUNK]))).sum())
                done += len(old)
                tick(done, count)
    return [max(total / count, 0.0) for total in totals]

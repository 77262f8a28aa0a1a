"""Predicts how long a run will take: every kind of work is timed on a small part of the first layer that is quantised, and
scaled to the whole model."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.evaluate import rounded_inputs
from ridgeline.evaluate.divergence import Divergence
from ridgeline.evaluate.needle import DEPTHS, TRIALS
from ridgeline.evaluate.speed import ANSWER, PROMPT, TIMES
from ridgeline.evaluate.task import Task
from ridgeline.models.checkpoints.linear_formats import EXPERTS
from ridgeline.quant.format import WeightFormat
from ridgeline.quantize.calibration import CONTEXT, SAMPLE, Calibration
from ridgeline.quantize.ct_writer import Linear
from ridgeline.quantize.methods.gptq_rounding import BLOCK, InverseFactor, gptq_rounded
from ridgeline.quantize.methods.rounding import as_rounded, expanded, rounded
from ridgeline.quantize.methods.scale_search import SHRINKS, STRENGTHS
from ridgeline.quantize.methods.sparse24 import magnitude_sparse, sparsegpt_sparse
from ridgeline.quantize.plain_model import OUTSIDE, PlainModel
from ridgeline.quantize.recipes import READ_TEXT

ROWS = 256                           # of a matrix, that are rounded to see how long it takes; on a GPU all of them, and
CACHED = 1 << 22                     # weights at least: fewer would stay in a CPU's caches, where rounding is quicker
TOKENS = 512                         # that run through that layer
INPUTS = 2048                        # of the Hessian that is gathered and factored
MOMENTS = ("gptq", "wanda", "sparsegpt")
SEARCHES = {"awq": 1 + 2 * len(STRENGTHS), "smoothquant": 1 + len(STRENGTHS)}        # scales that are tried
CLIPS = {"awq": 1 + len(SHRINKS), "smoothquant": 0}
WRITTEN = 32 << 20                   # bytes that are written to see how fast the disk is
DECODED = 6                          # tokens of a prompt that take as long as one of an answer: its weights are read for it alone
ANSWERS = len(DEPTHS) * TRIALS       # to find needles, for each length
NEEDLES = ANSWERS * 5                # sequences for each length: an answer, and four numbers to pick from
JUDGED = 64                          # positions whose logits are compared to see how long it takes


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds on the clock, and of all cores together: the second does not depend on what else the machine does."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def __mul__(self, times: float) -> Spent:
        return Spent(self.wall * times, self.cpu * times)

    def as_data(self) -> dict[str, float]:
        return {"wall_s": round(self.wall, 1), "cpu_s": round(self.cpu, 1)}


class Watch:
    """Time since it was made, or since the last `lap`."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> Spent:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Spent(time.perf_counter(), time.process_time())

    def lap(self) -> Spent:
        now = self._now()
        found, self._begun = now + self._begun * -1, now
        return found


# An engine's start on a GPU: packed weights are copied, kernels were compiled before. The first start on a machine also compiles,
# which takes twenty seconds more (benchmarks/studies/quantize_speed/on_a_gpu.json). On a CPU a start is reading weights.
STARTED = {"cuda": Spent(4.0, 4.0)}
Timed = Callable[[Callable[[], Any]], Spent]


def timed(work: Callable[[], Any]) -> Spent:
    """Of the second time: the first also pays for memory and compilation."""
    work()
    watch = Watch()
    work()
    return watch.lap()


@dataclass(slots=True)
class Forecast:
    quantise: Spent
    card: Spent
    parts: dict[str, Spent] = field(default_factory=dict)    # of `quantise`

    def words(self) -> str:
        total = (self.quantise + self.card).wall
        card = f", the card {_minutes(self.card.wall)}" if self.card.wall else ""
        return f"this takes about {_minutes(total)}: quantising {_minutes(self.quantise.wall)}{card}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


@torch.inference_mode()
def forecast(
    model: PlainModel, linears: list[Linear], calibration: Calibration | None, task: Task | None, output_bytes: int,
    folder: Path, device: str = "cpu", timer: Timed = timed,
) -> Forecast:
    """`folder`: where the output is made. `timer`: a test's own."""
    layers = model.config.num_layers
    changed = sorted({linear.layer for linear in linears if linear.layer is not None and linear.format is not None})
    counts = Counter(linear.layer for linear in linears if linear.format is not None)
    first = max(changed, key=lambda layer: counts[layer]) if changed else 0      # not one that is kept, nor one without experts
    names = model.names(first)
    values: dict[str, Tensor] = {}

    def read() -> None:
        values.update({name: model.read(name).to(device) for name in names})

    mine = [linear for linear in linears if linear.layer == first and linear.format is not None]
    reading = timer(read)
    outside = sum(torch.Size(model.shape(name)).numel() for name in model.names(OUTSIDE))
    inside = max(sum(value.numel() for value in values.values()), 1)
    parts = {"read": reading * (layers + outside / inside), "write": _writing(folder, timer) * output_bytes}
    per_token, probe = Spent(), Calibration(model, [[0] * (TOKENS // 2)] * 2, device)
    probe.layer = first
    if calibration is not None or task is not None:
        per_token = _forward(model, probe, values, timer) * (1 / TOKENS)
    if calibration is not None:
        parts |= _calibrated(mine, calibration, per_token, layers, len(changed), device, timer)
    share = counts.total() / max(len(mine), 1)           # some layers may be kept
    parts["round"] = _all_rounding(mine, values, timer) * (share if mine else 0)
    total = sum(parts.values(), Spent())
    return Forecast(total, _card(model, task, per_token, _inputs(mine, timer, device), reading, timer, device), parts)


def _writing(folder: Path, timer: Timed) -> Spent:
    """Of a byte."""
    file, content = folder / "probe.writing", bytes(WRITTEN)

    def write() -> None:
        with file.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())

    try:
        return timer(write) * (1 / WRITTEN)
    except OSError:                                      # no room: what needs it says so
        return Spent()
    finally:
        file.unlink(missing_ok=True)


def _forward(model: PlainModel, probe: Calibration, values: dict[str, Tensor], timer: Timed) -> Spent:
    probe.streams = [torch.randn(TOKENS, model.config.hidden_size, device=probe.device)]
    probe.through(probe.streams, values)
    return timer(lambda: probe.through(probe.streams))


def _calibrated(
    linears: list[Linear], calibration: Calibration, per_token: Spent, layers: int, changed: int, device: str, timer: Timed
) -> dict[str, Spent]:
    """`changed`: layers that are quantised. Text runs through all of them."""
    tokens = sum(len(sequence) for group in calibration.groups for sequence in group)
    methods = {linear.method for linear in linears}
    passes = 1.0 + bool(methods & set(READ_TEXT))
    if methods & set(SEARCHES):
        passes += 2 * len(calibration.groups[0]) * CONTEXT / tokens
    found = {"forward": per_token * (passes * tokens * layers)}
    # Linears that read the same inputs share a Hessian: one for each fused matrix. A token visits few of the experts.
    experts = calibration.model.config.experts
    visited = 1.0 if experts is None else experts.used / experts.count
    sizes = {linear.fused: linear.inputs for linear in linears if linear.method in MOMENTS}
    for size in set(sizes.values()):
        small, those = min(size, INPUTS), [fused for fused, inputs in sizes.items() if inputs == size]
        count, reads = len(those), sum(visited if EXPERTS in fused else 1.0 for fused in those)
        x, sums = torch.randn(TOKENS, small, device=device), torch.zeros(small, small, device=device)
        gathered = timer(lambda x=x, sums=sums: sums.addmm_(x.t(), x))   # type: ignore[misc]
        hessian = x.t() @ x + torch.eye(small, device=device)
        factored = Spent() if methods == {"wanda"} else timer(lambda hessian=hessian: InverseFactor(hessian))   # type: ignore[misc]
        grown = size / small
        found["hessian"] = found.get("hessian", Spent()) + gathered * (grown**2 * tokens / TOKENS * reads * changed)
        found["factor"] = found.get("factor", Spent()) + factored * (grown**3 * count * changed)
    return found


def _all_rounding(linears: list[Linear], values: dict[str, Tensor], timer: Timed) -> Spent:
    """Of a layer. One of each kind is tried: experts are many."""
    alike: dict[object, list[Linear]] = {}
    for linear in linears:
        alike.setdefault((linear.inputs, linear.outputs, linear.format, linear.method), []).append(linear)
    return sum((_rounding(same[0], values[same[0].weight], timer) * len(same) for same in alike.values()), Spent())


def _rounding(linear: Linear, values: Tensor, timer: Timed) -> Spent:
    """Of one linear."""
    format = linear.format
    assert format is not None
    if linear.method in ("gptq", "sparsegpt"):
        return _by_columns(linear, values, timer)
    part = values if values.is_cuda else values[: max(ROWS, CACHED // linear.inputs)]
    times = len(values) / len(part)
    compared = timer(lambda: (part.float() - part).norm() / part.float().norm()) * times     # the error, for the card
    if linear.method in ("magnitude", "wanda"):
        return timer(lambda: magnitude_sparse(part)) * times + compared
    once = timer(lambda: expanded(rounded(part, format), format, linear.inputs)) * times
    if linear.method not in SEARCHES:
        return once + compared
    x = torch.randn(SAMPLE, linear.inputs, device=values.device)
    product = timer(lambda: x @ part.float().t()) * times
    tried = timer(lambda: as_rounded(part, format)) * times
    return once + tried * (SEARCHES[linear.method] + CLIPS[linear.method]) + product * (1 + SEARCHES[linear.method])


def _by_columns(linear: Linear, values: Tensor, timer: Timed) -> Spent:
    """A block of inputs, and the product that carries its errors to those behind it."""
    format = linear.format
    assert format is not None
    part = values[:, :BLOCK]
    size = part.shape[1]
    factor = InverseFactor(torch.eye(size, device=values.device), ordered=linear.method == "gptq")

    def once() -> None:
        if linear.method == "sparsegpt":
            sparsegpt_sparse(part, factor)
        else:
            gptq_rounded(part, factor, _fitting(format, size))

    errors = torch.randn(len(values), size, device=values.device)
    behind = torch.randn(size, max(linear.inputs // 2, 1), device=values.device)
    return (timer(once) + timer(lambda: errors @ behind)) * (linear.inputs / size)


def _fitting(format: WeightFormat, inputs: int) -> WeightFormat:
    assert format.scales is not None
    if format.scales.block[1] <= inputs:
        return format
    return replace(format, scales=replace(format.scales, block=(1, inputs)))


def _inputs(linears: list[Linear], timer: Timed, device: str) -> Spent:
    """Rounding a token's activations in a layer, where that is not done by kernels (evaluate/rounded_inputs.py)."""
    found = Spent()
    kinds = {linear.fused: (linear.format.activation, linear.inputs) for linear in linears
             if linear.format is not None and linear.format.activation is not None and device == "cpu"}
    for activation, inputs in kinds.values():
        x = torch.randn(ROWS, inputs)
        found += timer(lambda x=x, activation=activation: rounded_inputs.rounded(x, activation)) * (1 / ROWS)  # type: ignore[misc]
    return found


def _card(
    model: PlainModel, task: Task | None, per_token: Spent, rounding: Spent, reading: Spent, timer: Timed, device: str
) -> Spent:
    """Two models read all slices, one finds needles; both are loaded."""
    if task is None:
        return Spent()
    layers = model.config.num_layers
    compared = (1 + len(task.slices) + len(task.slice_files)) * task.tokens
    hay, picked = (sum(task.needle) * count for count in (NEEDLES, NEEDLES - ANSWERS))
    read = 2 * compared + hay
    if task.speed:
        read += 2 * (1 + 2 * TIMES) * PROMPT + 2 * TIMES * ANSWER * DECODED
    product, logarithms, judged = _answers(model, timer, device)
    whole = per_token * (read * layers) + STARTED.get(device, reading * layers) * 2 + rounding * ((compared + hay) * layers)
    # A position that is scored has its logits computed twice: by the engine, for the prompt's own figures, and for the card.
    whole += (product * 2 + logarithms) * (2 * compared + picked)
    return whole + judged * (compared + picked / 2)


def _answers(model: PlainModel, timer: Timed, device: str) -> tuple[Spent, Spent, Spent]:
    """Of a position: its logits, their logarithms, and comparing those of two models."""
    size, hidden = model.config.vocab_size, model.config.hidden_size
    head, x = torch.randn(size // 16, hidden, device=device), torch.randn(ROWS, hidden, device=device)
    product = timer(lambda: x @ head.t()) * (16 / ROWS)
    logits, found = torch.randn(JUDGED, size, device=device), Divergence([[0] * (JUDGED + 1)])
    return (product, timer(lambda: logits.log_softmax(-1)) * (1 / JUDGED),
            timer(lambda: found.keep(0, 0, logits, logits)) * (1 / JUDGED))

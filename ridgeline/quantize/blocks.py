"""The weights of an output, block by block: read, rounded, written. With GPTQ a layer is also run, so that the next one reads
what the quantised layer gives."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.process.progress import progress_bar
from ridgeline.quantize.calibration import Calibration
from ridgeline.quantize.ct_writer import Linear, stored_bytes, stored_tensors
from ridgeline.quantize.gptq_rounding import InverseFactor, gptq_rounded
from ridgeline.quantize.plain_model import OUTSIDE, PlainModel
from ridgeline.quantize.rounding import Rounded, expanded, rounded
from ridgeline.quantize.workspace import Workspace

STREAM = "calibration.stream"        # hidden states before the next layer; gone when the output is complete


def write_blocks(
    model: PlainModel, linears: list[Linear], space: Workspace, calibration: Calibration | None, show: bool
) -> None:
    by_name = {linear.weight: linear for linear in linears if linear.format is not None}
    left = [place for place in range(space.blocks) if not space.is_done(place)]
    if calibration is not None and any(model.blocks[place] != OUTSIDE for place in left):
        if not calibration.load(space.folder / STREAM):
            calibration.begin()
        # The layer at which the hidden states stand is made again: they cannot move on without its codes.
        left = [place for place in range(space.blocks) if place in left or model.blocks[place] >= calibration.layer]
    space.require_room(sum(block_bytes(model, by_name, model.blocks[place]) for place in left))
    with progress_bar(f"quantising {model.path.name}", wanted=show) as tick:
        for place in left:
            tick(place, space.blocks)
            block = model.blocks[place]
            space.write(place, _block(model, by_name, block, calibration))
            if calibration is not None and block != OUTSIDE:
                calibration.save(space.folder / STREAM)
        tick(space.blocks, space.blocks)
    (space.folder / STREAM).unlink(missing_ok=True)


@torch.inference_mode()
def _block(
    model: PlainModel, by_name: dict[str, Linear], block: int, calibration: Calibration | None
) -> dict[str, Tensor]:
    values = {name: model.read(name) for name in model.names(block)}
    runs = calibration if block != OUTSIDE else None
    rounding = _Rounding(runs, values if any(
        by_name[name].method == "gptq" for name in values if name in by_name) else {})
    found: dict[str, Tensor] = {}
    for name in list(values):
        linear = by_name.get(name)
        if linear is None:
            found[name] = values[name]
            continue
        assert linear.format is not None
        try:
            codes = rounding(linear, values[name])
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        found |= stored_tensors(linear, codes)
        if runs is not None:
            values[name] = expanded(codes, linear.format, linear.inputs)
    if runs is not None:
        runs.move_on(values)
    return {name: tensor.contiguous() for name, tensor in found.items()}


class _Rounding:
    """By each linear's method. Linears that read the same inputs share a Hessian and its factor."""

    def __init__(self, calibration: Calibration | None, values: dict[str, Tensor]) -> None:
        self._calibration = calibration
        self._moments = calibration.moments(values) if calibration is not None and values else {}
        self._factors: dict[str, InverseFactor] = {}

    def __call__(self, linear: Linear, values: Tensor) -> Rounded:
        assert linear.format is not None
        if linear.method != "gptq" or self._calibration is None:
            return rounded(values, linear.format)
        path = self._calibration.linear_of(linear.weight)
        if path not in self._factors:
            self._factors[path] = InverseFactor(self._moments.pop(path))
        return gptq_rounded(values, self._factors[path], linear.format)


def block_bytes(model: PlainModel, by_name: dict[str, Linear], block: int) -> int:
    """Of a block in the output."""
    names = model.names(block)
    plain = model.plain_bytes([name for name in names if name not in by_name])
    return plain + sum(stored_bytes(by_name[name]) for name in names if name in by_name)

"""The weights of an output, block by block: read, rounded, written. Methods that read text also run the layer, so that
the next one reads what the quantised layer gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.ops.linear.fp8_rows import LARGEST
from ridgeline.process.progress import progress_bar
from ridgeline.quant.format import SCALE, WEIGHT
from ridgeline.quantize.calibration import Calibration, Inputs
from ridgeline.quantize.ct_writer import INPUT_SCALE, Linear, stored_bytes, stored_tensors
from ridgeline.quantize.methods.folding import Fold, fold_layer, folds
from ridgeline.quantize.methods.gptq_rounding import InverseFactor, gptq_rounded
from ridgeline.quantize.methods.rounding import HALF_RANGE, Rounded, expanded, over, rounded
from ridgeline.quantize.methods.scale_search import awq_scales, clipped, smooth_scales
from ridgeline.quantize.methods.sparse24 import magnitude_sparse, sparsegpt_sparse, wanda_sparse
from ridgeline.quantize.plain_model import OUTSIDE, PlainModel
from ridgeline.quantize.recipes import READ_TEXT
from ridgeline.quantize.workspace import Workspace

QKV = "attention.qkv.weight"
SMALLEST = 1e-6                      # magnitude that a static scale is made for
STREAM = "calibration.stream"        # hidden states before the next layer; gone when the output is complete


def write_blocks(
    model: PlainModel, linears: list[Linear], space: Workspace, calibration: Calibration | None, show: bool, kv: str = "",
    device: str = "cpu",
) -> None:
    """`kv`: the format of the KV cache to calibrate scales for."""
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
            tensors, errors = _block(model, by_name, block, calibration, device)
            if kv and calibration is not None and block != OUTSIDE:
                tensors |= _kv_scales(calibration, linears, block, kv)
            space.add_errors(errors)
            space.write(place, tensors)
            if calibration is not None and block != OUTSIDE:
                calibration.save(space.folder / STREAM)
        tick(space.blocks, space.blocks)
    (space.folder / STREAM).unlink(missing_ok=True)


@torch.inference_mode()
def _block(
    model: PlainModel, by_name: dict[str, Linear], block: int, calibration: Calibration | None, device: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What is written, and by module the error of its weights as a share of their size."""
    values = {name: model.read(name).to(device) for name in model.names(block)}
    dtypes = {name: tensor.dtype for name, tensor in values.items()}
    runs = calibration if block != OUTSIDE else None
    mine = {name: by_name[name] for name in values if name in by_name}
    rounding = _Rounding(runs, mine, values)
    found: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for name in list(values):
        linear = by_name.get(name)
        if linear is None:
            found[name] = values[name] = values[name].to(dtypes[name])
            continue
        assert linear.format is not None
        try:
            codes = rounding(linear, values[name])
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        found |= stored_tensors(linear, codes)
        numbers = expanded(codes, linear.format, linear.inputs) if linear.quantised else codes[WEIGHT]
        wide = values[name].float()
        errors[linear.module] = float((numbers.float() - wide).norm() / wide.norm().clamp_min(1e-30))
        if runs is not None:
            values[name] = numbers
    if runs is not None:
        runs.move_on(values)
    return {name: tensor.contiguous().cpu() for name, tensor in found.items()}, errors


def _kv_scales(calibration: Calibration, linears: list[Linear], layer: int, kv: str) -> dict[str, Tensor]:
    """One number for the keys of a layer and one for its values, also where its linears are kept: readers want all or none.
    Of what the written weights give: AWQ and SmoothQuant move scales out of v."""
    attention = next(linear for linear in linears if linear.layer == layer and linear.fused.endswith(QKV))
    path, dtype = attention.module.rpartition(".")[0], getattr(torch, attention.dtype)
    largest = LARGEST if kv == "fp8" else 127.0
    return {f"{path}.{name}_scale": torch.tensor([max(top, SMALLEST) / largest], dtype=dtype)
            for name, top in zip("kv", calibration.largest_kv, strict=True)}


class _Rounding:
    """By each linear's method. Linears that read the same inputs share what was observed of them."""

    def __init__(self, calibration: Calibration | None, linears: dict[str, Linear], values: dict[str, Tensor]) -> None:
        """`values`: of all tensors of the block. Methods that move scales change them."""
        self._calibration, self._observed = calibration, dict[str, Inputs]()
        self._factors: dict[tuple[str, bool], InverseFactor] = {}
        self._largest: dict[str, float] = {}
        methods = {linear.method for linear in linears.values()}
        if calibration is not None and methods & set(READ_TEXT):
            self._observed = calibration.observe(values, moments=bool(methods & {"gptq", "wanda", "sparsegpt"}))
            chosen = list(_chosen_scales(calibration, linears, values, self._observed))
            if chosen:
                fold_layer(calibration, values, chosen, self._observed)
        for name, linear in linears.items():             # of NVFP4, whose second scale a fused matrix shares
            top = float(values[name].abs().amax())
            self._largest[linear.fused] = max(self._largest.get(linear.fused, 0.0), top)

    def __call__(self, linear: Linear, values: Tensor) -> Rounded:
        assert linear.format is not None
        if linear.method == "magnitude":
            return {WEIGHT: magnitude_sparse(values)}
        if linear.method not in READ_TEXT or self._calibration is None:
            return rounded(values, linear.format, self._largest[linear.fused])
        path = self._calibration.linear_of(linear.weight)
        inputs = self._observed.get(path)
        if inputs is None:
            return self._without_text(linear, values)
        if linear.method == "static":
            codes = rounded(values, linear.format)
            top = over(inputs.largest.amax().clamp_min(SMALLEST), HALF_RANGE[linear.format.grid])
            return codes | {INPUT_SCALE: top.to(codes[SCALE].dtype)[None]}
        if linear.method == "wanda":
            assert inputs.moments is not None
            return {WEIGHT: wanda_sparse(values, inputs.moments)}
        if linear.method == "sparsegpt":
            return {WEIGHT: sparsegpt_sparse(values, self._factor(path, ordered=False)).to(values.dtype)}
        if linear.method == "gptq":
            return gptq_rounded(values, self._factor(path, ordered=True), linear.format)
        if linear.method == "awq" and not linear.fused.endswith(QKV):     # scores need large q and k
            values = clipped(values, linear.format, inputs.sample)
        return rounded(values, linear.format)

    def _without_text(self, linear: Linear, values: Tensor) -> Rounded:
        """An expert that no token of the text has chosen."""
        assert linear.format is not None
        if linear.method == "static":
            raise ModelError("no token of the calibration text reaches this expert: give more --calibration-tokens")
        return rounded(values, linear.format) if linear.quantised else {WEIGHT: magnitude_sparse(values)}

    def _factor(self, path: str, ordered: bool) -> InverseFactor:
        if (path, ordered) not in self._factors:
            moments = self._observed[path].moments
            assert moments is not None
            self._factors[path, ordered] = InverseFactor(moments, ordered)
        return self._factors[path, ordered]


def _chosen_scales(
    calibration: Calibration, linears: dict[str, Linear], values: dict[str, Tensor], observed: dict[str, Inputs]
) -> Iterator[tuple[Fold, Tensor]]:
    """Where all linears that read the same inputs are quantised by a method that moves scales."""
    search = {"awq": awq_scales, "smoothquant": smooth_scales}
    for fold in folds(calibration.model.config, calibration.rows(values)):
        readers = [linears.get(name) for name in fold.readers]
        methods = {linear.method if linear is not None else "" for linear in readers}
        if len(methods) == 1 and (method := methods.pop()) in search:
            weights = [(values[linear.weight], linear.format) for linear in readers if linear and linear.format]
            yield fold, search[method](fold, weights, observed[fold.linear])


def block_bytes(model: PlainModel, by_name: dict[str, Linear], block: int) -> int:
    """Of a block in the output."""
    names = model.names(block)
    plain = model.plain_bytes([name for name in names if name not in by_name])
    return plain + sum(stored_bytes(by_name[name]) for name in names if name in by_name)

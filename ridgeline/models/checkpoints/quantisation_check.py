"""What resolve says about quantised weights before anything loads: refusals, reasons, the memory of products. No torch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.linear_formats import HEAD, LinearFormats, LinearShape, expert_matrices, linears
from ridgeline.models.model_config import ModelConfig
from ridgeline.models.stages import first_layers
from ridgeline.ops.kernel_table import H200, DeviceFacts, bands
from ridgeline.ops.linear.select import FEWEST_RING_INPUTS
from ridgeline.ops.packed.packed_sizes import expanded_elements
from ridgeline.ops.packed.select_packed import MOST_ROWS
from ridgeline.quant.format import WeightFormat, is_fp8_rows, quantises_rows
from ridgeline.quant.gpu_layout import GENERAL, LIBRARY, STORED, may_stay, served
from ridgeline.quant.layout import format_kind
from ridgeline.sizes.abilities import WEIGHT_FORMATS, packed_width


@dataclass(frozen=True, slots=True)
class QuantisedMemory:
    codes: bool = False              # rows are quantised too: their codes lie beside them
    scratch: int = 0                 # elements of the largest weight that a product expands; int8: integer sums in its place
    room: int = 0                    # … of packed ones, which have a place of their own (ops/packed/expand_room.py)


@functools.lru_cache(64)                 # `plan` asks again for every batch, format and goal
def quantised_memory(
    model: ModelConfig, quantization: str, device: str, ranks: int, facts: DeviceFacts = H200, dtype: str = "bfloat16"
) -> QuantisedMemory:
    """`facts`: of the GPU's kernels. What may be packed or stay as stored counts as both."""
    if device != "cuda":
        return QuantisedMemory()
    found = list(LinearFormats(model, quantization, device, ranks).shapes())
    expanded = [(shape, format) for shape, format in found if _expands(shape.outputs, shape.share, format, facts)]
    packed = [shape for shape, format in expanded if shape.layout(format, facts) != STORED]
    stored = [shape for shape, format in expanded if shape.layout(format, facts) == STORED or may_stay(format, dtype)]
    return QuantisedMemory(
        any(quantises_rows(format) for _, format in found),
        max((shape.outputs * shape.share for shape in stored), default=0),
        max((expanded_elements(shape.outputs, shape.share) for shape in packed), default=0),
    )


def _expands(outputs: int, inputs: int, format: WeightFormat, facts: DeviceFacts) -> bool:
    """Whether some number of rows is multiplied by the expanded weight, or by way of sums as large (quant/fp8.py)."""
    integers = format.grid == "int8"
    if not quantises_rows(format) or not (facts.fp8 or integers) or outputs % 16 or inputs % 16:
        return True
    scales = format.scales
    assert scales is not None
    cut = "fp8-block" if scales.block[0] > 1 else "fp8-block-cut"
    name = "int8-row" if integers else "fp8-row" if not scales.block[1] else cut
    return any(kernel in ("expand", "int_mm") for _, _, kernel in bands(name, outputs, inputs, False, facts))


def check_quantization(
    model: ModelConfig, quantization: str, device: str, dtype: str, ranks: int, deterministic: bool, reasons: dict[str, str],
    facts: DeviceFacts = H200,
) -> None:
    """ConfigError for what cannot work; a reason for what is slower than it looks. `facts`: of the GPU's kernels."""
    formats = LinearFormats(model, quantization, device, ranks, dtype)
    stored = model.quantisation
    if not formats.rules and (stored is None or (stored.method == "gguf" and device == "cpu")):
        return
    _check_patterns(formats)
    name = f"{quantization} as asked" if formats.rules else f"{stored.method if stored else ''} checkpoint"
    if device == "cpu":
        reasons["quantization"] = f"{name}: {_on_a_cpu(formats, dtype)}"
        return
    kept = [format for _, format in formats.shapes()]
    if deterministic and any(True for _ in formats.experts()):
        _refuse(kept, name, quantization if formats.rules else "", dtype, deterministic)
    if not kept:
        return
    _refuse(kept, name, quantization if formats.rules else "", dtype, deterministic)
    speed = _speed(kept, _slow(formats, facts), model.hidden_size, dtype, facts)
    said = "; ".join(filter(None, (speed, _wide_inputs(kept, dtype))))
    if said:
        reasons["quantization"] = f"{name}: {said}"


def _check_patterns(formats: LinearFormats) -> None:
    """A pattern that is in no path would change nothing, and look as if it had."""
    paths = [shape.path for shape in (*linears(formats.config), *expert_matrices(formats.config))]
    for pattern in formats.rules:
        if any(re.search(pattern, path) for path in paths):
            continue
        if re.search(pattern, HEAD):
            raise ConfigError(f"quantization: {pattern!r} is the head, which shares its weight with the embedding in this model "
                              "and keeps its dtype; leave the pattern out")
        inside = sorted({re.sub(r"^layers\.\d+\.", "", path) for path in paths})
        raise ConfigError(f"quantization: {pattern!r} is in no path of a linear; paths are layers.N.NAME with the names "
                          f"{', '.join(inside)}")


def _on_a_cpu(formats: LinearFormats, dtype: str) -> str:
    found = list(formats.shapes())
    in_tiles = {format.name for shape, format in found if dtype == "float32" and format_kind(format, shape.share) is not None}
    if in_tiles:
        return f"kept as {', '.join(sorted(in_tiles))}, and multiplied as stored"
    again = "again, nothing is saved" if formats.rules else f"to {dtype}: memory is that of a {dtype} model"
    return f"a CPU expands the weights {again}"


def _by_general_kernels(shape: LinearShape, format: WeightFormat, facts: DeviceFacts) -> bool:
    """Also of a format with kernels, where they do not know this shape: it stays as stored."""
    if served(format, facts) == GENERAL:
        return True
    return not quantises_rows(format) and shape.layout(format, facts) == STORED


def _slow(formats: LinearFormats, facts: DeviceFacts) -> set[str]:
    return {format.name for shape, format in formats.shapes() if _by_general_kernels(shape, format, facts)}


def _speed(kept: list[WeightFormat], slow: set[str], hidden_size: int, dtype: str, facts: DeviceFacts) -> str:
    """Where these formats are slower than they look. `slow`: by general kernels."""
    by = {format.name: served(format, facts) for format in kept}
    if slow:
        return (
            f"kept packed as {', '.join(sorted(slow))}, which saves memory; this GPU has no kernels of their own for these "
            "formats and shapes, and steps of more than one row may expand each weight first: they may be slower than in "
            f"{dtype}, with few rows by far"
        )
    if LIBRARY in by.values():
        return f"multiplied by cuBLAS, at twice the rate of {dtype}; decode has not been timed on this kind of GPU"
    if all(format.grid == "int8" and not quantises_rows(format) for format in kept):
        return (
            f"kept in 8 bits; decode is faster than in {dtype} with few rows, and with 128 rows, and in prompts, slower; steps "
            f"of more than {MOST_ROWS} rows expand each weight first"
        )
    if not any(quantises_rows(format) for format in kept):
        most = 8 if any(format.grid == "int8" for format in kept) else 6
        return (
            f"kept in 4 to {most} bits; decode is faster than in {dtype} up to about 100 rows; beyond, and in prompts, slower: "
            "use fp8 where batches are large"
        )
    if hidden_size < FEWEST_RING_INPUTS:
        return (
            f"linears with fewer than {FEWEST_RING_INPUTS} inputs have a decode kernel of their own for one row; "
            f"steps of several rows may be slower than in {dtype}"
        )
    return ""


def _wide_inputs(kept: list[WeightFormat], dtype: str) -> str:
    """Where a checkpoint was made for narrower activations than kernels read."""
    kinds = sorted({format.activation.kind for format in kept if format.activation is not None and not quantises_rows(format)})
    if not kinds:
        return ""
    return f"activations stay in {dtype}, though the checkpoint was made for {' and '.join(kinds)} ones"


# ── what to recommend ────────────────────────────────────────────────────────────────────────────────────────────────


def made_formats(
    model: ModelConfig, device: str, dtype: str, ranks: int = 1, deterministic: bool = False, facts: DeviceFacts = H200
) -> dict[str, bool]:
    """The values of `quantization` that resolve takes and that narrow this model's weights. True: steps are faster at some number
    of rows, because kernels on this device are made for it; otherwise it saves memory."""
    few, found = first_layers(model), {}
    for each in WEIGHT_FORMATS:
        try:
            check_quantization(few, each.name, device, dtype, ranks, deterministic, {}, facts)
        except ConfigError:
            continue
        formats = LinearFormats(few, each.name, device, ranks, dtype)
        kept = list(formats.experts() if model.experts is not None else formats.shapes())        # experts are most of the weights
        if device == "cpu":
            kept = [(shape, format) for shape, format in kept if dtype == "float32" and format_kind(format, shape.share)]
        if kept:
            found[each.name] = device in each.kinds and _is_faster(model, [format for _, format in kept], device, facts)
    return found


def is_untimed(model: ModelConfig, quantization: str, device: str, dtype: str, ranks: int, facts: DeviceFacts) -> bool:
    """Faster by the GPU's data sheet alone: a library multiplies, and no step was timed on this kind of GPU."""
    if device != "cuda":
        return False
    kept = LinearFormats(first_layers(model), quantization, device, ranks, dtype).shapes()
    return any(served(format, facts) == LIBRARY for _, format in kept)


def _is_faster(model: ModelConfig, kept: list[WeightFormat], device: str, facts: DeviceFacts) -> bool:
    if device == "cpu":
        return True
    if model.experts is not None:
        return facts.hopper
    small = model.hidden_size < FEWEST_RING_INPUTS and any(quantises_rows(format) for format in kept)
    return not small and not any(served(format, facts) == GENERAL for format in kept)


def product_dtype(
    model: ModelConfig, quantization: str, device: str, dtype: str, ranks: int, facts: DeviceFacts, integers: bool = True
) -> str:
    """What most products of a layer are computed in, as measured rates name it: with a checkpoint's own formats, or with those
    that are made. `integers`: on a CPU, activations become integers, too."""
    if (device == "cpu" and not integers) or (model.quantisation is None and quantization == "none"):
        return dtype
    formats = LinearFormats(model, quantization, device, ranks, dtype)
    kept = {shape.path: format for shape, format in formats.shapes()}
    shares: dict[str, int] = {}
    for shape in (*linears(model, ranks), *expert_matrices(model, ranks)):       # experts: 16 bits, or 8 bits twice
        format = kept.get(shape.path)
        computed = "" if format is None or shape.path == HEAD else _computed(format, shape.share, device, facts)
        shares[computed] = shares.get(computed, 0) + shape.count * shape.outputs * shape.share
    if device == "cpu" and model.packed and not formats.rules:       # the blocks of a GGUF file are no format of a linear
        found = packed_width(8 * sum(each.nbytes for each in model.packed) / sum(each.weights for each in model.packed))
        return found or dtype
    return max(shares, key=lambda name: shares[name]) or dtype


def _computed(format: WeightFormat, inputs: int, device: str, facts: DeviceFacts) -> str:
    """Empty: codes become numbers of the engine's dtype."""
    if device == "cpu":
        return {"INT8": "int8", "INT4": "int4"}.get((format_kind(format, inputs) or ("", 0))[0], "")
    if not quantises_rows(format):
        return ""
    return "int8" if format.grid == "int8" else "float8_e4m3fn" if served(format, facts) != GENERAL else ""


def _refuse(kept: list[WeightFormat], name: str, quantization: str, dtype: str, deterministic: bool) -> None:
    if deterministic:
        what = quantization or name.removesuffix(" checkpoint")
        instead = "leave quantization out" if quantization else "use a checkpoint that is not quantised"
        raise ConfigError(f"deterministic has no kernels for {what} weights; {instead}")
    if any(is_fp8_rows(format) for format in kept) and dtype != "bfloat16":
        what = f"quantization {quantization}" if quantization else f"{name}: fp8"
        raise ConfigError(f"{what} has no kernels for {dtype}; use dtype bfloat16")

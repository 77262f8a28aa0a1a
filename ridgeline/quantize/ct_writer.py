"""Codes and scales as compressed-tensors stores them, and the quantization_config that says so.

The inverse of models/checkpoints/compressed_tensors.py: what is written here, that file reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.ops.quantised.codes import packed_bits
from ridgeline.quant.format import BYTES, OUTER, SCALE, WEIGHT, ZERO, Activation, WeightFormat
from ridgeline.quantize.recipes import HEAD, keeps_outliers, packs_bytes, per_tensor

STORAGE = {"e4m3": "float-quantized", "int8": "int-quantized", "uint4": "pack-quantized"}
INPUT_SCALE = "input_scale"          # beside a format's tensors: one number for all activations
BITS = {"e4m3": (8, "float"), "int8": (8, "int"), "uint4": (4, "int"), "e2m1": (4, "float")}


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear of the checkpoint, and what becomes of it."""

    module: str                      # as the checkpoint names it
    outputs: int
    inputs: int
    layer: int | None                # None: the head
    format: WeightFormat | None      # None: it keeps the model's dtype
    method: str = ""
    reason: str = ""                 # why it is not quantised
    fused: str = ""                  # linears with the same word are one matrix in the engine
    dtype: str = "float16"           # of the model

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    @property
    def quantised(self) -> bool:
        """It has codes: 2:4 sparsity alone leaves numbers."""
        return self.format is not None and self.format.scales is not None


def storage(format: WeightFormat) -> str:
    """The name of the layout."""
    assert format.scales is not None
    if format.grid == "e2m1":
        return "mxfp4-pack-quantized" if format.scales.outer is None else "nvfp4-pack-quantized"
    return STORAGE["uint4" if packs_bytes(format) else format.grid]


def stored_tensors(linear: Linear, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By full name. Scales of whole rows are [outputs, 1] there; NVFP4's second scale is one number, which divides."""
    assert linear.format is not None
    weight, name = tensors[WEIGHT], linear.module
    if linear.format.scales is None:
        return {f"{name}.weight": weight}
    scale = tensors[SCALE]
    if linear.format.grid == "e2m1":
        outer = {f"{name}.weight_global_scale": 1 / tensors[OUTER][:1]} if OUTER in tensors else {}
        return {f"{name}.weight_packed": weight, f"{name}.weight_scale": scale} | outer
    if keeps_outliers(linear.format):                    # as bitsandbytes stores it: the largest magnitude of each row
        return {f"{name}.weight": weight, f"{name}.SCB": _row_maxima(scale), f"{name}.weight_format": torch.tensor(0).byte()}
    if per_tensor(linear.format):
        return {f"{name}.weight": weight, f"{name}.weight_scale": scale[:1], f"{name}.input_scale": tensors[INPUT_SCALE]}
    scale = scale[:, None] if scale.dim() == 1 else scale
    if packs_bytes(linear.format):                       # from 0, which is the least
        weight = weight.view(torch.uint8) ^ 128
    elif linear.format.grid != "uint4":
        return {f"{name}.weight": weight, f"{name}.weight_scale": scale}
    found = {
        f"{name}.weight_packed": weight.contiguous().view(torch.int32), f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor([linear.outputs, linear.inputs]),
    }
    if ZERO in tensors:                                  # packed along the outputs
        zero = torch.nn.functional.pad(tensors[ZERO].to(torch.uint8), (0, 0, 0, -linear.outputs % 8))
        words = packed_bits(zero.t().contiguous(), 4).view(torch.int32)
        found[f"{name}.weight_zero_point"] = words.t().contiguous()
    return found


def _row_maxima(scale: Tensor) -> Tensor:
    """127 scales, moved by one step where readers, who multiply by 1 / 127, would get another scale."""
    found = scale.float() * 127
    for end in (torch.inf, -torch.inf):
        other = torch.nextafter(found, torch.full_like(found, end))
        right = found * (1.0 / 127.0) == scale
        found = torch.where(right | (other * (1.0 / 127.0) != scale), found, other)
    return found


def stored_bytes(linear: Linear) -> int:
    """Of what `stored_tensors` writes."""
    assert linear.format is not None
    shape = (linear.outputs, linear.inputs)
    if linear.format.scales is None:
        return linear.outputs * linear.inputs * BYTES[linear.dtype]
    if per_tensor(linear.format):
        return linear.outputs * linear.inputs + 2 * BYTES[linear.format.scales.dtype]
    found = sum(spec.nbytes(*shape) for spec in linear.format.tensors() if spec.name not in (ZERO, OUTER))
    found += keeps_outliers(linear.format)               # weight_format
    found += 4 * (linear.format.scales.outer is not None)
    if linear.format.grid == "uint4" or packs_bytes(linear.format):
        found += 2 * 8                                   # weight_shape
        for spec in linear.format.tensors():
            if spec.name == ZERO:
                outputs, groups = spec.shape(*shape)
                found += -(-outputs // 8) * 4 * groups
    return found


# The most tensors that `stored_tensors` makes of a linear, and what a file's header has around a name and a shape: offsets have
# up to twelve digits.
_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
_AROUND = len('"":{"dtype":"F8_E4M3","shape":[],"data_offsets":[,]},') + 2 * 12
_BESIDE = 8 + len('{"__metadata__":{"format":"pt"}}') + 8        # the header's length, and what pads it


def header_bytes(shapes: Mapping[str, Sequence[int]], modules: Collection[str]) -> int:
    """At most, of a file with these tensors by name; those of `modules` may become codes of any format."""
    found = _BESIDE
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        names = [f"{module}.{suffix}" for suffix in _SUFFIXES] if module in modules else [name]
        found += sum(_AROUND + len(each) + len(str(list(shape))) for each in names)
    return found


# ── config.json ──────────────────────────────────────────────────────────────────────────────────────────────────────


def quantization_config(linears: Sequence[Linear], others: bool, version: str, kv: str = "") -> dict[str, Any] | None:
    """`others`: the checkpoint has linears besides these, of another modality. None: all keep the model's dtype (2:4). `kv`: the
    format of the KV cache that the checkpoint has scales for."""
    by_format: dict[WeightFormat, list[str]] = {}
    for linear in linears:
        if linear.quantised:
            assert linear.format is not None
            by_format.setdefault(linear.format, []).append(linear.module)
    _check_kv(by_format, kv)
    if not by_format:
        return None
    kept = _kept(linears)
    if any(keeps_outliers(format) for format in by_format):
        return {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": kept}
    one = len(by_format) == 1 and not others
    storages = {storage(format) for format in by_format}
    groups = {}
    for number, (format, modules) in enumerate(by_format.items()):
        rest = [linear.module for linear in linears if linear.module not in set(modules)]
        targets = ["Linear"] if one else modules if others else _patterns(modules, rest)
        groups[f"group_{number}"] = _group(format, targets)
    return {
        "quant_method": "compressed-tensors", "format": storages.pop() if len(storages) == 1 else "mixed-precision",
        "quantization_status": "compressed", "ignore": kept, "config_groups": groups, "kv_cache_scheme": _kv_scheme(kv),
        "global_compression_ratio": None, "version": version,
    }


def _kept(linears: Sequence[Linear]) -> list[str]:
    """Names of linears without codes. A tied head has no tensor, and is a Linear elsewhere."""
    tied = all(linear.layer is not None for linear in linears)
    return [linear.module for linear in linears if not linear.quantised] + [HEAD] * tied


def _check_kv(formats: Collection[WeightFormat], kv: str) -> None:
    """Before anything is written."""
    if kv and not formats:
        raise ConfigError("scales of the KV cache are stored with quantised weights: choose another recipe")
    if any(keeps_outliers(format) for format in formats) and (len(formats) > 1 or kv):
        raise ConfigError("llm-int8 is stored as bitsandbytes does, which has no other format beside it and no KV scales")


def _kv_scheme(kv: str) -> dict[str, Any] | None:
    if not kv:
        return None
    return {"num_bits": 8, "type": "float" if kv == "fp8" else "int", "strategy": "tensor", "symmetric": True, "dynamic": False,
            "group_size": None, "block_structure": None, "actorder": None, "observer": "minmax"}


def _patterns(modules: Sequence[str], rest: Sequence[str]) -> list[str]:
    """One pattern for each last name, where it finds several modules and no others; else the names."""
    last: dict[str, list[str]] = {}
    for module in modules:
        last.setdefault(module.rpartition(".")[2], []).append(module)
    taken = {module.rpartition(".")[2] for module in rest}
    found: list[str] = []
    for name, its in last.items():
        found += its if name in taken or len(its) == 1 else [rf"re:.*\.{re.escape(name)}$"]
    return found


def _group(format: WeightFormat, targets: list[str]) -> dict[str, Any]:
    assert format.scales is not None
    bits, kind = BITS[format.grid]
    rows, columns = format.scales.block
    weights: dict[str, Any] = {
        "num_bits": bits, "type": kind, "symmetric": format.scales.zero is None, "dynamic": False, "actorder": None,
        "strategy": "tensor" if per_tensor(format) else "channel" if not columns else "group" if rows == 1 else "block",
        "group_size": columns if columns and rows == 1 else None, "block_structure": [rows, columns] if rows > 1 else None,
        "observer": "minmax",
    }
    if format.grid == "e2m1" and format.scales.outer is None:
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": None}
    if format.scales.outer is not None:
        weights |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None}
    return {"targets": targets, "weights": weights, "input_activations": _inputs(format.activation), "output_activations": None,
            "format": storage(format)}


def _inputs(activation: Activation | None) -> dict[str, Any] | None:
    if activation is None:
        return None
    return {
        "num_bits": 8, "type": "float" if activation.kind == "fp8" else "int", "symmetric": True,
        "dynamic": not activation.static, "strategy": activation.per, "group_size": 128 if activation.per == "group" else None,
        "block_structure": None, "actorder": None, "observer": "minmax" if activation.static else None,
    }

"""The weight formats of GGUF's types: which of them can be kept packed, and as what. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ridgeline.models.checkpoints.recipe import Quantisation, Recipe
from ridgeline.models.family import GGUF_STACKED, Family
from ridgeline.models.gguf import GGUFFile, GGUFTensor
from ridgeline.quant.format import Scales, WeightFormat
from ridgeline.quant.layout import matrix_bytes, plain_bytes, stored_kind

_SUPER = Scales((1, 256), "float16")                     # scales of K types: small integers times one number for 256 weights

FORMATS: dict[str, WeightFormat] = {
    "Q4_0": WeightFormat("uint4", Scales((1, 32), "float16")),
    "Q4_1": WeightFormat("uint4", Scales((1, 32), "float16", "offset")),
    "Q5_0": WeightFormat("q5", Scales((1, 32), "float16")),
    "Q5_1": WeightFormat("q5", Scales((1, 32), "float16", "offset")),
    "Q8_0": WeightFormat("int8", Scales((1, 32), "float16")),
    "Q4_K": WeightFormat("uint4", Scales((1, 32), "uint8", "offset", _SUPER)),
    "Q5_K": WeightFormat("q5", Scales((1, 32), "uint8", "offset", _SUPER)),
    "Q6_K": WeightFormat("q6", Scales((1, 16), "int8", outer=_SUPER)),
    "TQ1_0": WeightFormat("ternary", Scales((1, 256), "float16")),
    "TQ2_0": WeightFormat("ternary", Scales((1, 256), "float16")),
    "MXFP4": WeightFormat("e2m1", Scales((1, 32), "e8m0")),
}
RECIPES = {
    type: Recipe(format, "gguf", (("codes", (".weight",)),), variant=type) for type, format in FORMATS.items()
}


def gguf_quantisation(file: GGUFFile) -> Quantisation | None:
    """None: no linear is packed. Experts have names of their own, as when their tensors are taken apart (regrouped.py)."""
    found: dict[str, Recipe] = {}
    for name, tensor in file.tensors.items():
        if tensor.type not in RECIPES or not name.endswith(".weight") or name.startswith("token_embd"):
            continue
        stacked = re.fullmatch(GGUF_STACKED.pattern, name)
        names = [name] if stacked is None else [
            stacked.expand(GGUF_STACKED.name).format(expert) for expert in range(tensor.shape[0])
        ]
        found |= dict.fromkeys((each.removesuffix(".weight") for each in names), RECIPES[tensor.type])
    return Quantisation("gguf", (), by_name=found) if found else None


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix as a CPU keeps it."""

    weights: int
    nbytes: int


def packed_matrices(file: GGUFFile, family: Family) -> tuple[PackedMatrix, ...]:
    """Of the linears and the embedding. A tied head is the embedding."""
    found: dict[str, list[GGUFTensor]] = {}
    tied = "output.weight" not in file.tensors
    for name, tensor in file.tensors.items():
        module, _, parameter = name.rpartition(".")
        target = family.gguf_names.get(re.sub(r"\.\d+\.", ".{}.", module, count=1), "").partition(":")[0]
        if target.endswith(".shared_gate") and len(tensor.shape) == 1:       # a matrix of one row, once it is loaded
            tensor = replace(tensor, shape=(1, *tensor.shape))
        # What widens latents is multiplied by in two parts: plain numbers, and no linear.
        if target and parameter == "weight" and len(tensor.shape) == 2 and not target.endswith(".kv_up"):
            layer = re.search(r"\.\d+\.", module)
            found.setdefault(target + (layer[0] if layer else ""), []).append(tensor)
    return tuple(_kept(parts, target != "embed" or tied) for target, parts in found.items())


def _kept(parts: list[GGUFTensor], is_linear: bool) -> PackedMatrix:
    kinds = [stored_kind(part.type) for part in parts]
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if set(kinds) == {"F32"}:
        return PackedMatrix(outputs * inputs, plain_bytes(outputs, inputs, is_linear))
    return PackedMatrix(outputs * inputs, sum(matrix_bytes(kind, *part.shape) for kind, part in zip(kinds, parts, strict=True)))

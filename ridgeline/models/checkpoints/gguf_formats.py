"""The weight formats of GGUF's types: which of them can be kept packed, and as what. No torch."""

from __future__ import annotations

from ridgeline.models.checkpoints.recipe import Quantisation, Recipe
from ridgeline.models.gguf import GGUFFile
from ridgeline.quant.format import Scales, WeightFormat

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
    """None: no linear is packed."""
    found = {
        name.removesuffix(".weight"): RECIPES[tensor.type] for name, tensor in file.tensors.items()
        if tensor.type in RECIPES and name.endswith(".weight") and not name.startswith("token_embd")
    }
    return Quantisation("gguf", (), by_name=found) if found else None

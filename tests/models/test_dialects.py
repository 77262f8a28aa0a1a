"""Dialects of quantised checkpoints: their tensors become the canonical ones exactly, and expand to what their own packages say.

tests/golden/quantised.safetensors has matrices that compressed-tensors, bitsandbytes and transformers stored and expanded
(make_quantised.py beside it). AWQ, GPTQ, ModelOpt and 2:4 are written here by hand, from codes that are known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ridgeline.models.checkpoints.canonical import canonical, matrix_shape
from ridgeline.models.checkpoints.quantisation import read_quantisation
from ridgeline.models.checkpoints.recipe import Recipe
from ridgeline.ops.quantised.expand import expand
from ridgeline.quant.format import per_row
from ridgeline.quant.quantised import quantised_weight

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised.safetensors"
MODULE = "model.layers.0.mlp.up_proj"


def golden() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """case -> (its quantization_config, its tensors by ending)"""
    with safe_open(GOLDEN, framework="pt") as file:
        found: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
            name: (json.loads(config), {}) for name, config in file.metadata().items() if name != "made_by"
        }
        for key in file.keys():
            name, _, ending = key.partition("/")
            found[name][1][ending] = file.get_tensor(key)
    return found


CASES = golden()


def recipe_of(config: dict[str, Any], module: str = MODULE) -> Recipe:
    quantisation = read_quantisation({"quantization_config": config}, "config.json")
    assert quantisation is not None
    recipe = quantisation.recipe(module)
    assert recipe is not None
    return recipe


def by_role(recipe: Recipe, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """From a module's endings to roles; every tensor must have one, or be known as unused."""
    found = {}
    for name, tensor in tensors.items():
        role = recipe.endings[name if name.startswith("_") else f".{name}"]
        if role:
            found[role] = tensor
    return found


def numbers(recipe: Recipe, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    roles = by_role(recipe, tensors)
    outputs, inputs = matrix_shape(recipe, {role: tuple(tensor.shape) for role, tensor in roles.items()}, roles.__getitem__)
    found = canonical(recipe, roles)
    written = per_row(recipe.format)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        spec.name: spec.shape(outputs, inputs) for spec in written.tensors()
    }
    return expand(quantised_weight(written, inputs, found), dtype)


@pytest.mark.parametrize("name", CASES)
def test_expanded_as_its_own_package_expands(name: str) -> None:
    config, tensors = CASES[name]
    expected = tensors.pop("expected") if "expected" in tensors else torch.empty(0)
    found = numbers(recipe_of(config), tensors, expected.dtype)
    tensors["expected"] = expected
    if name in ("ct-nvfp4", "bnb-int8"):                 # they divide and multiply in another order: the last bit may differ
        torch.testing.assert_close(found, expected, rtol=2**-7 if expected.dtype == torch.bfloat16 else 2e-7, atol=0)
    else:
        assert torch.equal(found, expected)

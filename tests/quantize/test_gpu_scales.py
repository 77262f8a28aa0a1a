"""Round to nearest gives the same codes and scales on a GPU as on a CPU, also where numbers lie between two codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.quantize.methods.rounding import over, rounded
from ridgeline.quantize.recipes import RECIPES


def test_a_scale_is_the_nearest_number() -> None:
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    assert torch.equal(over(values, 7.5), (values.double() / 7.5).float())
    assert not torch.equal(values * (1 / 7.5), over(values, 7.5)), "which is what a GPU makes of values / 7.5"


class Strict(torch.Tensor):
    """A GPU's torch divides such a number through its inverse."""

    def __truediv__(self, other: Any) -> Any:
        assert isinstance(other, torch.Tensor)
        return super().__truediv__(other)


@pytest.mark.parametrize("recipe", ["int4-rtn", "w8a8", "w8a16", "fp8", "nvfp4"])
def test_scales_are_never_divided_by_a_python_number(recipe: str) -> None:
    values = torch.rand(8, 256, generator=torch.Generator().manual_seed(0)).as_subclass(Strict)
    assert rounded(values, RECIPES[recipe][0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["int4-rtn", "w8a8", "w8a16", "fp8", "nvfp4"])
def test_codes_and_scales_are_those_of_a_cpu(recipe: str) -> None:
    format = RECIPES[recipe][0]
    steps = torch.randint(-15, 16, (64, 256), generator=torch.Generator().manual_seed(0))
    values = steps / 2 * 0.013                           # many ties
    here, there = rounded(values, format), rounded(values.cuda(), format)
    assert all(torch.equal(here[name].view(torch.uint8), there[name].cpu().view(torch.uint8)) for name in here)

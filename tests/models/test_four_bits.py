"""What 4-bit kernels are given says the same as the formats: within the rounding of a zero point."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.quantised.quantised_linear import quantised_linear
from ridgeline.quant.four_bits import GRIDS, four_bits

CASES = [case for case in quantised_linear.cases if case.sizes["grid"] in GRIDS]


def blocks_of_two_levels() -> QuantisedWeight:
    """As Q4_K has them."""
    generator = torch.Generator().manual_seed(0)
    scale, offset = (torch.randint(64, (8, 16), generator=generator, dtype=torch.uint8) for _ in range(2))
    outer = torch.rand(8, 2, generator=generator).half()
    codes = torch.randint(256, (8, 256), generator=generator, dtype=torch.uint8)
    return QuantisedWeight(
        "uint4", 512, codes, scale, (1, 32), offset=offset, outer=outer, offset_outer=-outer, outer_block=(1, 256)
    )


@pytest.mark.parametrize("name", [*(case.name for case in CASES), "two-levels"])
def test_the_same_numbers(name: str) -> None:
    if name == "two-levels":
        weight = blocks_of_two_levels()
    else:
        case = next(case for case in CASES if case.name == name)
        (_, weight, _), _ = quantised_linear.inputs(torch.Generator().manual_seed(1), torch.float32, "cpu", **case.sizes)
    found = four_bits(weight)
    assert found is not None and found.scale.dim() == 2
    group = weight.inputs // found.scale.shape[1]
    again = QuantisedWeight(
        found.kind, weight.inputs, found.codes, found.scale, (1, group), zero=found.zero, outer=found.outer, order=found.order,
        e8m0=found.scale.dtype == torch.uint8,
    )
    expected = expand(weight, torch.float32)
    torch.testing.assert_close(expand(again, torch.float32), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_other_grids_have_none() -> None:
    case = next(case for case in quantised_linear.cases if case.name == "q6")
    (_, weight, _), _ = quantised_linear.inputs(torch.Generator(), torch.float32, "cpu", **case.sizes)
    assert four_bits(weight) is None

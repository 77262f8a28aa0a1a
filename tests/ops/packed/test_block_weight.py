"""GGUF's weights in the packed layout: no number changes, and on a GPU the kernels multiply by them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quantised_models import BLOCK_FORMATS, random_blocks

from ridgeline.ops.hopper import HAS_GLUON, is_hopper
from ridgeline.ops.packed.block_weight import block_form, pack_blocks, packed_numbers
from ridgeline.ops.packed.packed_expand import expand as expand_packed
from ridgeline.ops.packed.packed_linear import multiplied, normed_packed_linear_gpu, packed_linear
from ridgeline.ops.quantised.expand import expand
from ridgeline.ops.rms_norm import rms_norm_reference

HOPPER = torch.cuda.is_available() and HAS_GLUON and is_hopper(torch.device("cuda", 0))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_packing_keeps_every_number(name: str, gated: bool) -> None:
    """With padded outputs and inputs, and a file's extreme scales."""
    weight = random_blocks(name, 32 if gated else 24, 768)
    if weight.scale.dtype == torch.int8:
        weight.scale[0, :2] = torch.tensor([-128, 127], dtype=torch.int8)
    packed = pack_blocks(weight, gated)
    assert torch.equal(packed_numbers(packed, torch.float64), expand(weight, torch.float64))
    x = torch.randn(3, 768, dtype=torch.float64)
    torch.testing.assert_close(packed_linear(x, packed), x @ expand(weight, torch.float64).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "bits"), [("Q4_1", 5), ("Q4_K", 4.625), ("Q6_K", 6.625), ("Q4_K and Q6_K", 7.125)])
def test_bytes(name: str, bits: float) -> None:
    assert pack_blocks(random_blocks(name, 32, 1024)).nbytes * 8 == bits * 32 * 1024


def test_other_formats_have_no_form() -> None:
    weight = random_blocks("Q4_K", 16, 512)
    assert block_form(weight) == "byte+offset" and block_form(weight._replace(outer_block=(1, 128))) is None
    assert block_form(weight._replace(zero=weight.scale)) is None and block_form(weight._replace(grid="int8")) is None
    assert block_form(weight._replace(offset=None, offset_outer=None)) is None


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("rows", [1, 5, 16, 30, 50, 128, 200, 800])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_kernels_match_float64(name: str, rows: int) -> None:
    torch.manual_seed(rows)
    for dtype, worst in ((torch.float16, 0.0015), (torch.bfloat16, 0.01)):
        for gate, (outputs, inputs) in ((None, (1000, 2048)), (None, (256, 768)), ("silu", (512, 1536))):
            packed = pack_blocks(random_blocks(name, outputs, inputs, "cuda"), gate is not None)
            numbers = packed_numbers(packed, torch.float64)
            assert torch.equal(expand_packed(packed, torch.float32), packed_numbers(packed, torch.float32))
            x, residual = (torch.randn(rows, inputs, device="cuda").to(dtype) for _ in range(2))
            norm, bias = torch.rand(inputs, device="cuda").to(dtype), torch.randn(outputs, device="cuda").to(dtype)
            for _ in range(2):                           # split sums leave counters behind
                found = (multiplied(x, packed, bias, gate), x.double())
                normed = normed_packed_linear_gpu(x, residual, norm, 1e-5, packed, bias, gate=gate)[0]
                for out, read in (found, (normed, rms_norm_reference((x + residual).double(), norm.double(), 1e-5))):
                    wanted = F.linear(read, numbers, bias.double())
                    if gate is not None:
                        left, right = wanted.chunk(2, 1)
                        wanted = F.silu(left) * right
                    assert float((out.double() - wanted).norm() / wanted.norm()) < worst

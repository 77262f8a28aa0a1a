"""The GEMV for codes as they are stored against float64, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ridgeline.ops.quantised.codes_gemv import codes_gemv, codes_gemv_for
from ridgeline.ops.quantised.expand import QuantisedWeight, expand

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FORMS = {
    "fp8-row": ("e4m3", (1, 0)), "fp8-block": ("e4m3", (128, 128)),
    "int8-row": ("int8", (1, 0)), "int8-group": ("int8", (1, 128)),
}


def random_weight(form: str, outputs: int, inputs: int, device: str) -> QuantisedWeight:
    grid, block = FORMS[form]
    generator = torch.Generator(device).manual_seed(outputs + inputs)
    if grid == "int8":
        codes = torch.randint(-128, 128, (outputs, inputs), device=device, generator=generator, dtype=torch.int8)
    else:
        codes = (torch.randn(outputs, inputs, device=device, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes[:, ::7] = (codes[:, ::7].float() / 30000).to(torch.float8_e4m3fn)          # numbers below the smallest normal one
    shape = (-(-outputs // block[0]), inputs // block[1]) if block[1] else (outputs,)
    scale = (torch.rand(shape, device=device, generator=generator) + 0.5) * inputs**-0.5 / 80
    return QuantisedWeight(grid, inputs, codes, scale, block)


@GPU
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("outputs", "inputs", "gate"), [
    (4096, 4096, None), (6144, 4096, None), (28672, 4096, "silu"), (4096, 14336, None), (1040, 2560, None),
    (2592, 768, "gelu_tanh"),
])
def test_gpu_one_row_is_the_definition(form: str, outputs: int, inputs: int, gate: str | None) -> None:
    weight = random_weight(form, outputs, inputs, "cuda")
    x, residual, bias = (torch.randn(1, size, device="cuda").bfloat16() for size in (inputs, inputs, outputs))
    norm = (torch.rand(inputs, device="cuda") + 0.5).bfloat16()
    plan = codes_gemv_for(x, weight, gate is not None)
    assert plan is not None
    numbers = expand(weight, torch.float64)
    if gate is None:
        out, stream = codes_gemv(x, weight, bias, plan)
        wanted = F.linear(x.double(), numbers, bias.double())
        assert stream is x
        assert (out.double() - wanted).norm() / wanted.norm() < 0.004
    out, stream = codes_gemv(x, weight, bias, plan, norm=norm, eps=1e-5, residual=residual, gate=gate)
    total = (x + residual).double()
    normed = total * torch.rsqrt(total.square().mean() + 1e-5) * norm.double()
    wanted = F.linear(normed, numbers, bias.double())
    if gate is not None:
        first, second = wanted.chunk(2, 1)
        wanted = (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second
    assert torch.equal(stream, x + residual)
    assert (out.double() - wanted).norm() / wanted.norm() < 0.008

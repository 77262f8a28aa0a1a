"""On a GPU: in deterministic mode the experts of a token, and what they give, do not depend on the other tokens of the step; and
codes for which there are no tensor cores."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.experts import expert_products
from ridgeline.ops.experts.expert_products import experts_triton
from ridgeline.ops.experts.experts_op import experts_reference
from ridgeline.ops.experts.router import normed_route_rows_triton
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.ops.registry import TRITON_INTERPRETED

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA and not TRITON_INTERPRETED, reason="no GPU, and not in the interpreter")
HIDDEN, WIDTH, EXPERTS, USED = (256, 192, 16, 4) if CUDA else (32, 16, 4, 2)
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


def test_a_token_alone_and_among_others_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = 300 if CUDA else 20

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(DEVICE, DTYPE)

    x, residual, norm = 3 * draw(tokens, HIDDEN), draw(tokens, HIDDEN), 1 + draw(HIDDEN)
    router, gate_up, down = draw(EXPERTS, HIDDEN), draw(EXPERTS, 2 * WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)

    def run(part: slice) -> list[torch.Tensor]:
        rows, stream, chosen, weights = normed_route_rows_triton(
            x[part], residual[part], norm, 1e-5, router, None, USED, invariant=True, normalise=True
        )
        return [stream, chosen, weights, experts_triton(rows, gate_up, down, chosen, weights, invariant=True)]

    together = run(slice(None))
    for part in (slice(0, 1), slice(3, 12), slice(tokens - 2, tokens)):
        for alone, among in zip(run(part), together, strict=True):
            assert torch.equal(alone, among[part])


def test_codes_where_tensor_cores_do_not_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On older GPUs e4m3 codes become numbers by their bits, subnormal ones and zeros of both signs included."""
    monkeypatch.setattr(expert_products, "row_codes", lambda *_: 0)
    generator = torch.Generator().manual_seed(1)

    def codes(outputs: int, inputs: int) -> QuantisedWeight:
        bits = torch.randint(0, 256, (EXPERTS, outputs, inputs), generator=generator, dtype=torch.uint8)
        bits[bits & 127 == 127] = 0                      # not a number
        scale = (torch.rand((EXPERTS, outputs), generator=generator) + 0.5) * inputs**-0.5 / 100
        return QuantisedWeight("e4m3", inputs, bits.view(torch.float8_e4m3fn).to(DEVICE), scale.to(DEVICE), (1, 0))

    gate_up, down = codes(2 * WIDTH, HIDDEN), codes(HIDDEN, WIDTH)
    x = torch.randn((20, HIDDEN), generator=generator).to(DEVICE, DTYPE)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:USED] for _ in range(20)]).to(DEVICE)
    weights = torch.rand((20, USED), generator=generator).to(DEVICE)
    found = experts_triton(x, gate_up, down, chosen, weights).float()
    wanted = experts_reference(x.float(), gate_up, down, chosen, weights)
    assert float((found - wanted).norm() / wanted.norm()) < (1e-2 if CUDA else 1e-5)

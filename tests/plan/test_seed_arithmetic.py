"""The figures that the project began with, each from the functions that plan, count and size here."""

from __future__ import annotations

import pytest

from ridgeline.plan.capacity import textbook
from ridgeline.plan.operation import Traffic, operate
from ridgeline.plan.prediction import Constants, Setup
from ridgeline.plan.public_models import find_model
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.sizes.hardware import DEVICES, described
from ridgeline.sizes.op_costs import kv_bytes, linear_cost

LLAMA_70B = find_model("llama-3.1-70b")


@pytest.mark.parametrize(("requests", "tokens", "expected"), [
    (1, 8_192, 2.684e9),                 # one of 8K
    (8, 128_000, 0.336e12),              # eight of 128K
    (32, 4_096, 42.9e9),                 # 32 of 4K
])
def test_kv_of_a_70b_model(requests: int, tokens: int, expected: float) -> None:
    shape = decoder_shape(LLAMA_70B.config, "bfloat16")
    counted = kv_bytes(tokens=requests * tokens, layers=80, kv_heads=8, head_dim=128, element_bytes=2)
    planned = textbook(Setup(model=LLAMA_70B, device=DEVICES["H100"]), tokens).kv_per_request
    assert counted == requests * tokens * shape.kv_bytes_per_token == requests * planned
    assert counted == pytest.approx(expected, rel=2e-3)


def test_weights_of_8_bits_double_the_tokens_of_one_request() -> None:
    """7e9 parameters of 16 bits are 14 GB; 336 GB/s read them 24 times a second, and half of them 48 times."""
    card = described(None, bandwidth=336, memory=24, tflops=100, fp8_tflops=200)
    setup = Setup(model=find_model("qwen2.5-7b"), device=card)
    assert textbook(setup, 1024, 7e9).tok_s == pytest.approx(24)
    for narrow in ("fp8", "int8"):
        assert textbook(Setup(model=setup.model, device=card, weights=narrow), 1024, 7e9).tok_s == pytest.approx(48)


def test_a_product_of_4096() -> None:
    cost = linear_cost(tokens=4096, inputs=4096, outputs=4096, weight_bytes=2, element_bytes=2)
    assert cost.flops == pytest.approx(137.4e9, rel=1e-3) and cost.bytes == pytest.approx(100.7e6, rel=1e-3)
    assert int(cost.flops / cost.bytes) == 1365


@pytest.mark.parametrize(("users", "seconds", "tok_s"), [(64, 0.120, 533), (4, 0.085, 47)])
def test_tokens_of_a_batch_by_its_step(users: int, seconds: float, tok_s: int) -> None:
    """A machine whose every step takes this long, and on which prompts cost nothing."""
    step_alone = Constants(1, 1, 1, 0, 0, 0, 1, 1, 0, 0, step_s=seconds, launch_s=0)
    card = described(None, bandwidth=1e12, memory=1e6, tflops=1e12, fp8_tflops=None)
    point = operate(Setup(model=LLAMA_70B, device=card, constants=step_alone), users, Traffic(16, 256))
    assert point.tpot == pytest.approx(seconds, rel=1e-3) and int(point.tok_s + 0.5) == tok_s

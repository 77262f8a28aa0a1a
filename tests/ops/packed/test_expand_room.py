"""Packed weights as numbers in memory: in one place for all linears, and large ones part by part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quantised_models import random_blocks

from ridgeline.ops.activation import gated_activation, gated_activation_reference
from ridgeline.ops.hopper import HAS_GLUON, is_hopper
from ridgeline.ops.packed import packed_sizes
from ridgeline.ops.packed.block_weight import pack_blocks, packed_numbers
from ridgeline.ops.packed.expand_room import ExpandRoom
from ridgeline.ops.packed.packed_expand import expand
from ridgeline.ops.packed.packed_linear import _by_expanding, multiplied
from ridgeline.ops.packed.packed_sizes import MOST_EXPANDED, expanded_elements, strips_at_once
from ridgeline.ops.packed.packed_weight import PackedWeight, pack, quantised

HOPPER = torch.cuda.is_available() and HAS_GLUON and is_hopper(torch.device("cuda", 0))


def weight_of(kind: str, outputs: int, inputs: int, gated: bool, device: str = "cpu") -> PackedWeight:
    if kind in ("Q4_K", "Q6_K", "Q5_0"):
        return pack_blocks(random_blocks(kind, outputs, inputs), gated)
    codes, scale = quantised(torch.randn(outputs, inputs) * inputs**-0.5, 32, kind)
    outer = (torch.rand(outputs) + 0.5).to(device) if kind == "e2m1" else None
    return pack(codes.to(device), scale.to(device), kind=kind, gated=gated, outer=outer)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "outputs"), [("uint4", 560), ("e2m1", 1024), ("Q4_K", 528), ("Q6_K", 544), ("uint4", 1000)])
def test_parts_give_what_the_whole_weight_gives(
    kind: str, outputs: int, gated: bool, gate: str | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gated and outputs % 16:
        pytest.skip("gates and partners share strips")
    torch.manual_seed(0)
    weight = weight_of(kind, outputs, 512, gated)
    x = torch.randn(5, 512, dtype=torch.float64)
    added = torch.randn(outputs, dtype=torch.float64) if bias else None
    whole = F.linear(x, packed_numbers(weight, torch.float64), added)
    wanted = whole if gate is None else gated_activation_reference(whole, gate)
    torch.testing.assert_close(_by_expanding(x, weight, added, gate), wanted, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(packed_sizes, "MOST_EXPANDED", 200 * 512)
    assert 0 < strips_at_once(outputs, 512) < len(weight.codes)
    torch.testing.assert_close(_by_expanding(x, weight, added, gate), wanted, rtol=1e-12, atol=1e-12)


def test_parts_are_alike_wide_and_bounded() -> None:
    """gate and up of a 70B model, the head of an 8B model, and matrices that are expanded whole."""
    for outputs, inputs, parts in ((57344, 8192, 2), (128256, 4096, 2), (128256, 8192, 4), (8192, 28672, 1), (28672, 4096, 1)):
        each = strips_at_once(outputs, inputs) * 16
        assert -(-outputs // each) == parts and expanded_elements(outputs, inputs) == each * inputs <= MOST_EXPANDED
        assert parts == 1 or (each % 256 == 0 and each >= 16384)
    assert expanded_elements(37, 512) == 37 * 512        # strips are padded, numbers are not


def test_weights_are_expanded_at_the_same_place() -> None:
    room = ExpandRoom()
    cpu = torch.device("cpu")
    for size in (64, 256, 128):
        room.need(size)
    room.reserve(cpu)                                    # kernels of a CPU expand nothing
    assert room.needed == 256 and room._memory is None
    room._memory = torch.empty(room.needed, dtype=torch.uint8)
    first, second = room.numbers(8, 16, torch.bfloat16, cpu), room.numbers(4, 8, torch.float16, cpu)
    assert first.shape == (8, 16) and second.shape == (4, 8) and first.data_ptr() == second.data_ptr()
    other = room.numbers(9, 16, torch.bfloat16, cpu)     # larger than foreseen
    assert other.shape == (9, 16) and other.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2"])
def test_a_gated_activation_may_be_written_over_its_gates(kind: str) -> None:
    x = torch.randn(3, 32, dtype=torch.float64)
    wanted = gated_activation(x, kind)
    columns = torch.zeros(3, 40, dtype=torch.float64)
    gated_activation(x, kind, out=columns[:, 8:24])
    assert torch.equal(columns[:, 8:24], wanted) and not columns[:, :8].any() and not columns[:, 24:].any()
    out = gated_activation(x, kind, out=x[:, :16])
    assert out.data_ptr() == x.data_ptr() and torch.equal(out, wanted)


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("kind", ["uint4", "e2m1"])
def test_parts_and_a_shared_place_on_a_gpu(kind: str, gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = weight_of(kind, 8192, 2048, gate is not None, "cuda")
    x, bias = (torch.randn(*size, device="cuda").bfloat16() for size in ((900, 2048), (8192,)))
    whole = multiplied(x, weight, bias, gate)
    room = ExpandRoom()
    monkeypatch.setattr(packed_sizes, "MOST_EXPANDED", 3000 * 2048)
    room.need(2 * expanded_elements(8192, 2048))
    room.reserve(torch.device("cuda", 0))
    placed = PackedWeight(**{name: getattr(weight, name) for name in PackedWeight.__slots__} | {"room": room})
    out = multiplied(x, placed, bias, gate)
    assert float((out.float() - whole.float()).norm() / whole.float().norm()) < 0.005
    before = torch.cuda.memory_allocated()
    numbers = expand(placed, torch.bfloat16)             # larger than the place: it has memory of its own
    assert torch.cuda.memory_allocated() > before and numbers.shape == (8192, 2048)

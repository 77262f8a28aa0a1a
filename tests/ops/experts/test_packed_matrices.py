"""Packed 4-bit experts hold the numbers of the codes that they are made of, in as many bytes as the ledger says."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.experts.experts_op import experts
from ridgeline.ops.experts.matrices import numbers
from ridgeline.ops.experts.packed_matrices import each_expanded, pack_experts, placeholder
from ridgeline.ops.hopper import HAS_GLUON, is_hopper
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.packed.packed_weight import PackedWeight, scale_numbers
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.quant.format import MXFP4, uint4
from ridgeline.quant.gpu_layout import gpu_bytes

HOPPER = torch.cuda.is_available() and HAS_GLUON and is_hopper(torch.device("cuda", 0))
GENERATOR = torch.Generator().manual_seed(0)
SHAPES = [(32, 64, True), (48, 576, False), (96, 160, True)]


def drawn(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape, generator=GENERATOR, dtype=torch.uint8)


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SHAPES)
def test_mxfp4_experts_keep_their_numbers(outputs: int, inputs: int, gated: bool) -> None:
    codes, scale = drawn(256, 3, outputs, inputs // 2), 115 + drawn(10, 3, outputs, inputs // 32)
    packed = pack_experts(codes, scale, kind="e2m1", gated=gated)
    wanted = numbers(QuantisedWeight("e2m1", inputs, codes, scale, (1, 32), e8m0=True), torch.float32)
    assert torch.equal(each_expanded(packed, torch.float32), wanted)
    check_sizes(packed, 3 * gpu_bytes(MXFP4, outputs, inputs, gated, H200), torch.uint8)


@pytest.mark.parametrize("zeros", [False, True])
def test_int4_experts_keep_their_numbers(zeros: bool) -> None:
    codes, scale = drawn(256, 2, 48, 64), torch.rand(2, 48, 4, generator=GENERATOR).half()
    zero = drawn(16, 2, 48, 4).half() if zeros else None
    packed = pack_experts(codes, scale, zero, kind="uint4", gated=True)
    values = torch.stack((codes & 15, codes >> 4), -1).flatten(2).float()
    less = torch.full_like(scale, 8.0) if zero is None else zero
    wanted = (values - less.float().repeat_interleave(32, 2)) * scale.float().repeat_interleave(32, 2)
    assert torch.equal(each_expanded(packed, torch.float32), wanted) and packed.whole_zeros
    check_sizes(packed, 2 * gpu_bytes(uint4(32, "float16", "code" if zeros else None), 48, 128, True, H200), torch.float16)


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SHAPES)
def test_experts_are_packed_where_they_lie(outputs: int, inputs: int, gated: bool) -> None:
    """A segment of the allocator that codes have left may have a small tensor in its last bytes, and is lost then: gpt-oss-120b
    took 14 GiB more than was predicted."""
    codes, scale = drawn(256, 5, outputs, inputs // 2), 115 + drawn(10, 5, outputs, inputs // 32)
    apart = pack_experts(codes, scale, kind="e2m1", gated=gated)
    rooms = {name: torch.empty(getattr(apart, name).nbytes + 3, dtype=torch.uint8) for name in ("codes", "scale")}
    inside = {name: rooms[name][: stored.nbytes].view(stored.shape) for name, stored in (("codes", codes), ("scale", scale))}
    inside["codes"].copy_(codes)
    inside["scale"].copy_(scale)
    packed = pack_experts(inside["codes"], inside["scale"], kind="e2m1", gated=gated, rooms=rooms)
    for name, room in rooms.items():
        assert torch.equal(getattr(packed, name), getattr(apart, name)) and getattr(packed, name).data_ptr() == room.data_ptr()


@pytest.mark.parametrize("narrow", [False, True])
def test_scales_of_32_bits_have_one_dtype_for_all_experts(narrow: bool) -> None:
    """bfloat16 holds those of the last expert, which is packed first, but not those of the others. They fit into their memory, or
    into new memory where that is too small."""
    codes, scale = drawn(256, 300, 32, 128), torch.rand(300, 32, 8, generator=GENERATOR).half().float()
    scale[1:] = scale[1:].bfloat16()
    room = scale.clone().view(-1).view(torch.uint8)
    given = room.view(torch.float32).view(scale.shape)
    packed = pack_experts(codes, given, kind="uint4", gated=True, rooms={"scale": room[:8] if narrow else room})
    assert (packed.scale.data_ptr() == room.data_ptr()) != narrow
    values = torch.stack((codes & 15, codes >> 4), -1).flatten(2).float() - 8
    assert torch.equal(each_expanded(packed, torch.float32), values * scale.repeat_interleave(32, 2))


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 3, 8, 40, 300, 2000])
def test_scales_as_bytes_give_the_same_bits(tokens: int) -> None:
    """As the same scales in 16 bits; widths as gpt-oss has them, 2880, so that runs of 512 inputs are not full."""
    torch.manual_seed(tokens)
    count, used, hidden, width = 8, 4, 2880, 2880
    both: list[list[PackedWeight]] = [[], []]
    for outputs, inputs, gated in ((2 * width, hidden, True), (hidden, width, False)):
        codes = torch.randint(256, (count, outputs, inputs // 2), device="cuda", dtype=torch.uint8)
        scale = torch.randint(115, 121, (count, outputs, inputs // 32), device="cuda", dtype=torch.uint8)
        scale[:, 5, :4] = torch.arange(4, device="cuda")
        for place, stored in enumerate((scale, scale_numbers(scale))):
            both[place].append(pack_experts(codes, stored, kind="e2m1", gated=gated))
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    chosen = torch.rand(tokens, count, device="cuda").topk(used, 1).indices
    shares = torch.rand(tokens, used, device="cuda")
    found, wanted = (experts(x, *matrices, chosen, shares, "silu") for matrices in both)
    assert both[0][0].scale.nbytes * 2 == both[1][0].scale.nbytes
    assert torch.equal(found, wanted) and bool(found.isfinite().all()) and float(found.abs().max()) > 0


def check_sizes(packed: PackedWeight, nbytes: int, stored: torch.dtype) -> None:
    assert packed.nbytes == nbytes
    empty = placeholder(
        len(packed.codes), packed.outputs, packed.inputs, packed.group, packed.kind, packed.gated, packed.zero is not None,
        torch.device("cpu"), stored,
    )
    assert (empty.codes.shape, empty.scale.shape) == (packed.codes.shape, packed.scale.shape)
    assert empty.scale_dtype == packed.scale_dtype       # a constant of the kernels that are compiled ahead
    assert (empty.zero is None) == (packed.zero is None)

"""The matrices of a layer's experts as packed 4-bit weights (ops/packed/packed_weight.py): a PackedWeight whose tensors have an
expert as their first index, while its sizes are those of one expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from ridgeline.ops.hopper import HAS_GLUON, is_hopper
from ridgeline.ops.packed.packed_sizes import RUN, STRIP, TILE, keeps_bytes, packs
from ridgeline.ops.packed.packed_weight import BYTE_SCALES, PackedWeight, expanded, pack

_TENSORS = ("codes", "scale", "zero", "outer")


def multiplies_packed(dtype: torch.dtype, device: torch.device) -> bool:
    return HAS_GLUON and is_hopper(device) and dtype == torch.bfloat16


def packs_experts(gate_up: tuple[int, int], down: tuple[int, int], group: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels multiply by such experts: (outputs, inputs) of both matrices."""
    aligned = gate_up[1] % 8 == 0 and down[1] % 8 == 0   # rows that TMA reads begin at multiples of 16 bytes
    return multiplies_packed(dtype, device) and aligned and packs(*gate_up, group, gated=True) and packs(*down, group)


def pack_experts(codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, kind: str, gated: bool) -> PackedWeight:
    """codes [experts, outputs, inputs / 2], scale and zero [experts, outputs, groups], numbers in 16 bits or scales as bytes."""
    made: PackedWeight | None = None
    whole = True
    for expert in range(len(codes)):
        one = pack(codes[expert], scale[expert], None if zero is None else zero[expert], kind=kind, gated=gated)
        if made is None:
            made = replace(one, **{
                name: tensor.new_empty((len(codes), *tensor.shape)) for name, tensor in _tensors(one).items()
            })
        for name, tensor in _tensors(one).items():
            getattr(made, name)[expert] = tensor
        whole = whole and one.whole_zeros
    assert made is not None
    return replace(made, whole_zeros=whole)


def placeholder(
    experts: int, outputs: int, inputs: int, group: int, kind: str, gated: bool, zeros: bool, device: torch.device,
    dtype: torch.dtype,
) -> PackedWeight:
    """What `pack_experts` would give, without memory: for launches that are only collected. `dtype`: of the scales as stored."""
    strips, tiles = -(-outputs // STRIP), -(-inputs // RUN) * RUN // TILE
    word = torch.zeros(1, dtype=torch.int32, device=device)
    is_byte = keeps_bytes(kind, BYTE_SCALES.get(dtype, ""), group)
    zero = word.expand(experts, strips, tiles * TILE // RUN, 128 // group, 32)
    scale = word.expand(experts, strips, tiles * TILE // RUN, 128 // group // 2, 32) if is_byte else zero
    return PackedWeight(
        kind, group, outputs, inputs, gated, word.expand(experts, strips, tiles, 32, 4), scale, zero if zeros else None, True,
        dtype if is_byte or dtype == torch.float16 else torch.bfloat16, None,
    )


def each_expanded(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers, [experts, outputs, inputs]."""
    return torch.stack([expanded(one, dtype) for one in _each(weight)])


def _each(weight: PackedWeight) -> Iterator[PackedWeight]:
    for expert in range(len(weight.codes)):
        yield replace(weight, **{name: tensor[expert] for name, tensor in _tensors(weight).items()})


def _tensors(weight: PackedWeight) -> dict[str, Tensor]:
    found = {field.name: getattr(weight, field.name) for field in fields(weight) if field.name in _TENSORS}
    return {name: tensor for name, tensor in found.items() if tensor is not None}

"""The matrices of a layer's experts as packed 4-bit weights (ops/packed/packed_weight.py): a PackedWeight whose tensors have an
expert as their first index, while its sizes are those of one expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from ridgeline.ops.hopper import HAS_GLUON, is_hopper
from ridgeline.ops.packed.packed_sizes import RUN, STRIP, TILE, keeps_bytes, packs
from ridgeline.ops.packed.packed_weight import BYTE_SCALES, STRIPS_AT_ONCE, PackedWeight, expanded, pack, scale_dtype

_TENSORS = ("codes", "scale", "zero", "outer")


def multiplies_packed(dtype: torch.dtype, device: torch.device) -> bool:
    return HAS_GLUON and is_hopper(device) and dtype == torch.bfloat16


def packs_experts(gate_up: tuple[int, int], down: tuple[int, int], group: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels multiply by such experts: (outputs, inputs) of both matrices."""
    aligned = gate_up[1] % 8 == 0 and down[1] % 8 == 0   # rows that TMA reads begin at multiples of 16 bytes
    return multiplies_packed(dtype, device) and aligned and packs(*gate_up, group, gated=True) and packs(*down, group)


def pack_experts(
    codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, kind: str, gated: bool, rooms: dict[str, Tensor] | None = None
) -> PackedWeight:
    """codes [experts, outputs, inputs / 2], scale and zero [experts, outputs, groups], numbers in 16 bits or scales as bytes.

    `rooms`: by name ("codes", "scale", "zero") the memory that the tensors given lie in, at its beginning, as bytes. What fits is
    packed into it. Packed tensors are larger, so the last expert comes first: it is written behind all that is still to be
    read."""
    if scale.dtype == torch.float32:
        scale = scale.to(scale_dtype(scale))             # one for all experts
    made: PackedWeight | None = None
    whole = True
    read = {"codes": codes, "scale": scale, "zero": zero}
    outputs = codes.shape[1]
    at_once = max(1, STRIPS_AT_ONCE * STRIP // outputs) if outputs % STRIP == 0 else 1
    for stop in range(len(codes), 0, -at_once):
        some = slice(max(0, stop - at_once), stop)
        rows = (None if tensor is None else tensor[some].flatten(0, 1) for tensor in read.values())
        packed = pack(*rows, kind=kind, gated=gated, matrices=stop - some.start)
        new = {name: tensor.view(stop - some.start, -1, *tensor.shape[1:]) for name, tensor in _tensors(packed).items()}
        if made is None:
            made = replace(packed, **{
                name: _place(tensor, read.get(name), len(codes), (rooms or {}).get(name)) for name, tensor in new.items()
            })
        for name, tensor in new.items():
            getattr(made, name)[some] = tensor
        whole = whole and packed.whole_zeros
    assert made is not None
    return replace(made, whole_zeros=whole)


def _place(packed: Tensor, read: Tensor | None, experts: int, room: Tensor | None) -> Tensor:
    """For all experts, of which `packed` has some: in `room` where it fits and overwrites no expert that is read later."""
    each = packed[0].nbytes
    if room is None or read is None or read[0].nbytes > each or experts * each > room.nbytes:
        return packed.new_empty((experts, *packed.shape[1:]))
    return room[: experts * each].view(packed.dtype).view(experts, *packed.shape[1:])


def packed_bytes(weight: PackedWeight) -> dict[str, int]:
    """Of a placeholder's tensors, by name."""
    return {name: tensor.numel() * tensor.itemsize for name, tensor in _tensors(weight).items()}


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

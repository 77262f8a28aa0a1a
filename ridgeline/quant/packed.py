"""The scheme of 4-bit weights, of GGUF's 5 and 6 bits, and of int8 beside x of 16 bits, on a Hopper GPU: after loading, codes and
scales are laid out as the kernels of ops/packed want.

Formats that the layout does not hold exactly (scales of more than 16 bits, zeros between two codes, groups it does not know) stay
with `Quantised`, and so do all formats on other devices, and scales that the kernels' 16-bit numbers would lose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.ops.activation import gated_activation
from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import H200, DeviceFacts
from ridgeline.ops.linear import gemm_small
from ridgeline.ops.packed.block_weight import pack_blocks, packed_numbers
from ridgeline.ops.packed.byte_weight import holds_bytes, pack_bytes
from ridgeline.ops.packed.expand_room import ExpandRoom
from ridgeline.ops.packed.packed_linear import NARROW, normed_packed_linear, packed_linear
from ridgeline.ops.packed.packed_sizes import STRIP, expanded_elements, packs
from ridgeline.ops.packed.packed_weight import BYTE_SCALES, PackedWeight, pack, repeated
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.quant.format import ORDER, WeightFormat
from ridgeline.quant.four_bits import FourBits, four_bits
from ridgeline.quant.gpu_layout import BLOCKS, EIGHT_BITS, FOUR_BITS, STORED, gpu_layout, has_kernels, may_pack
from ridgeline.quant.quantised import TENSORS, Quantised
from ridgeline.quant.scheme import Norm, Scheme

ALIGNED = 256                        # bytes: where a tensor begins that shares the memory of another
MOST_BYTE_SCALE = 2.0**18            # times 2^109, and what rounding adds


class Packed(Quantised):
    def __init__(
        self, format: WeightFormat, plain: Scheme, made: bool = False, keeps: bool | None = None, room: ExpandRoom | None = None
    ) -> None:
        """`room`: that of the model."""
        super().__init__(format, plain, made, keeps)
        self.room = ExpandRoom() if room is None else room

    def create(
        self, linear: nn.Module, rows: int, columns: int, bias: bool, padded: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().create(linear, rows, columns, bias, padded, dtype, device)
        linear.packed, linear.is_loaded, linear.was_tried = None, False, False

    def finish(self, linear: nn.Module) -> None:
        linear.packed, linear.is_loaded = None, True
        super().finish(linear)
        if linear.scheme is not self:                    # expanded
            return
        order = linear.quantised.order
        packed = self._packed(linear, linear.quantised)
        if packed is not None:
            linear.packed = self._with_room(linear, _in_place(packed, linear.quantised))
            self._forget(linear)
            for name, tensor in _tensors(linear.packed, order).items():
                setattr(linear, name, nn.Parameter(tensor, requires_grad=False))
            gemm_small.prepare(linear.weight.device)

    def _with_room(self, linear: nn.Module, packed: PackedWeight) -> PackedWeight:
        """Where the codes decided that it is packed, the ledger has counted its expansion as a part of steps: it has no room. Of
        other dtypes the definition expands it."""
        layout = gpu_layout(linear.format, len(linear.weight), linear.columns.size, _paired(linear), _facts(linear))
        if layout == STORED or linear.dtype not in NARROW:
            return packed
        self.room.need(expanded_elements(packed.outputs, packed.inputs) * linear.dtype.itemsize)
        return replace(packed, room=self.room)

    def _packed(self, linear: nn.Module, weight: QuantisedWeight) -> PackedWeight | None:
        """`weight`: the linear's, or some of its outputs. None: the linear keeps its format's tensors."""
        format, outputs, facts, paired = linear.format, len(linear.weight), _facts(linear), _paired(linear)
        if linear.is_loaded and not in_range(weight, linear.dtype):
            return None
        found = gpu_layout(format, outputs, weight.inputs, paired, facts)
        decides = linear.is_loaded and has_kernels(facts) and may_pack(format)
        gated = paired and weight.order is None and outputs % STRIP == 0
        if found == BLOCKS:
            return pack_blocks(weight, gated)
        if format.grid == "int8":
            return pack_bytes(weight, gated) if found == EIGHT_BITS or (decides and holds_bytes(weight, gated)) else None
        if found == FOUR_BITS or decides:
            four = four_bits(weight)
            if four is not None and (not linear.is_loaded or _holds(four, gated)):
                return pack(four.codes, four.scale, four.zero, kind=four.kind, gated=gated, outer=four.outer)
        return None

    def _is_packed(self, linear: nn.Module) -> bool:
        """While kernels are collected, before the weights are loaded, one strip stands for all: it takes no memory. A whole
        weight would lie among what loading takes meanwhile, and keep its segments with the allocator: 1.6 GB of a 70B model
        (benchmarks/studies/memory_of_steps)."""
        if not (linear.is_loaded or linear.was_tried) and linear.weight.device.type == "cuda":
            linear.was_tried = True
            outputs, weight = len(linear.weight), linear.quantised
            tensors = {name: getattr(weight, name) for name in TENSORS if name != ORDER}
            made = self._packed(linear, weight._replace(**{
                name: None if tensor is None else tensor[:STRIP] for name, tensor in tensors.items()
            }))
            linear.packed = None if made is None else self._with_room(linear, repeated(made, outputs))
        return linear.packed is not None

    def numbers(self, linear: nn.Module) -> Tensor:
        packed = getattr(linear, "packed", None)
        if packed is None:
            return super().numbers(linear)
        found = packed_numbers(packed, torch.promote_types(linear.dtype, torch.float32))
        order = getattr(linear, "order", None)
        return found if order is None else torch.empty_like(found).index_copy_(1, order.long(), found)

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        if not self._is_packed(linear):
            return super().apply(linear, x, batch)
        order = getattr(linear, "order", None)
        return packed_linear(x if order is None else x.index_select(1, order), linear.packed, linear.bias)

    def apply_normed(
        self, linear: nn.Module, x: Tensor, residual: Tensor | None, norm: Norm, batch: object, gate: str | None = None,
        following: nn.Module | None = None,
    ) -> tuple[Any, Tensor]:
        if not self._is_packed(linear) or getattr(linear, "order", None) is not None:
            return super().apply_normed(linear, x, residual, norm, batch, gate, following)
        packed = linear.packed
        out, stream = normed_packed_linear(
            x, residual, norm.weight, norm.eps, packed, linear.bias, norm_offset=norm.offset, gate=gate if packed.gated else None
        )
        return (out if gate is None or packed.gated else gated_activation(out, gate)), stream


def _facts(linear: nn.Module) -> DeviceFacts:
    """A CPU keeps codes only to compute what a GPU would."""
    return device_facts(linear.weight.device) if linear.weight.device.type == "cuda" else H200


def _paired(linear: nn.Module) -> bool:
    return set(linear.rows) == {"gate", "up"}


def stayed(model: nn.Module) -> list[str]:
    """Of a loaded model, the linears that have a layout of ops/packed and stay as stored, because their scales decided it."""
    return [
        name for name, linear in model.named_modules()
        if isinstance(getattr(linear, "scheme", None), Packed) and linear.packed is None and STORED != gpu_layout(
            linear.format, len(linear.weight), linear.columns.size, _paired(linear), _facts(linear)
        )
    ]


def in_range(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether the kernels of several rows, whose weights are 16-bit numbers, lose none of the scales of groups. Rounded to
    float16 they differ by no more than float16 rounds the output's largest; bfloat16 holds those of 8 bits 2^109 times as large
    (byte_asm.py). A scale of a whole output multiplies sums in float32."""
    is_byte = weight.grid == "int8"
    if weight.scale.dtype not in (torch.bfloat16, torch.float32) or (is_byte and not weight.block[1]):
        return True
    if dtype == torch.bfloat16:
        return not is_byte or bool((weight.scale.abs() < MOST_BYTE_SCALE).all())
    scale = weight.scale.float().flatten(1) if weight.scale.dim() > 1 else weight.scale.float()[:, None]
    lost = (scale - scale.half().float()).abs()          # inf where one is too large
    return dtype != torch.float16 or bool((lost <= 2**-11 * scale.abs().amax(1, keepdim=True)).all())


def _holds(four: FourBits, gated: bool) -> bool:
    """Whether the layout keeps these numbers as they are."""
    outputs, inputs = four.codes.shape[0], 2 * four.codes.shape[1]
    if inputs % four.scale.shape[1] or not packs(outputs, inputs, inputs // four.scale.shape[1], gated):
        return False
    exact = four.scale.dtype in BYTE_SCALES or any(_exact(four.scale, dtype) for dtype in (torch.bfloat16, torch.float16))
    zero = None if four.zero is None else four.zero.float()
    if zero is None or not exact:
        return exact
    # The kernels subtract 128 + zero, which 16 bits hold up to 256.
    return four.kind == "uint4" and torch.equal(zero, zero.round()) and bool((zero.abs() < 128).all())


def _exact(values: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(dtype).to(values.dtype), values)


def _in_place(packed: PackedWeight, stored: QuantisedWeight) -> PackedWeight:
    """With its tensors in the memory of those that it was made of. Packing has taken other memory beside it: a tensor that stays
    there keeps a whole segment, the rest of which lies idle. Where not all of them fit, all stay: the old memory is free as a
    whole then."""
    found = {name: getattr(packed, name) for name in ("codes", "high", "scale", "zero", "blocks", "outer")}
    old = [getattr(stored, name) for name in TENSORS if name != ORDER and getattr(stored, name) is not None]
    addresses = {each.data_ptr() for each in old}
    there = {each.data_ptr() for each in found.values() if each is not None} & addresses     # NVFP4's outer scales are as stored
    made = {name: each for name, each in found.items() if each is not None and each.data_ptr() not in there}
    left, places = sorted(made, key=lambda name: -made[name].nbytes), {}
    for memory in sorted((each for each in old if each.data_ptr() not in there), key=lambda each: -each.nbytes):
        room = memory.view(-1).view(torch.uint8)
        for name in list(left):
            size = made[name].nbytes
            if size <= len(room):
                places[name], room = room[:size], room[-(-size // ALIGNED) * ALIGNED :]
                left.remove(name)
    if left:
        return packed
    return replace(packed, **{
        name: place.view(made[name].dtype).view(made[name].shape).copy_(made[name]) for name, place in places.items()
    })


def _tensors(packed: PackedWeight, order: Tensor | None) -> dict[str, Tensor]:
    """By the names of a format's parameters, so that memory and reads are counted as before."""
    found = {
        "weight": packed.codes, "scale": packed.scale, "zero": packed.zero, "high": packed.high, "order": order,
        "outer": packed.blocks if packed.outer is None else packed.outer,
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}

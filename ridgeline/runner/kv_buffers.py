"""The memory of the KV cache. This file alone decides how pages lie in it.

The cache has a fixed number of layer *slots*; a group's i-th layer uses slot i, whatever group it is in. A block id therefore
means the same pages in every group, and one pool of ids serves them all. Where all layers of a slot are of one kind (geometry
and dtypes), all its keys lie together, then all its values, and their scales. Where they differ, a block's page is as large as
the largest layer needs, widest numbers first. A latent group has no values: they are a view of its keys. Memory starts as zeros,
so that old data of other processes is never visible.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.kv import LayerKV
from ridgeline.messages import BlockOp
from ridgeline.ops.sampling.noise import to_device
from ridgeline.sizes.kv_format import KVFormat
from ridgeline.sizes.kv_spec import Area, KVGroupSpec, Slot, slots_of


@dataclass(frozen=True, slots=True, eq=False)
class _Bank:
    """The memory of slots that are laid out alike."""

    slots: list[int]                 # ascending
    memory: dict[str, Tensor]        # uint8 [slots, blocks, bytes] by area; of slots with layers of several kinds: one, ""


class KVBuffers:
    def __init__(self, groups: list[KVGroupSpec], num_blocks: int, format: KVFormat, device: torch.device) -> None:
        self._groups, self._format, self._blocks = groups, format, num_blocks
        alike: dict[Slot, list[int]] = {}
        for number, slot in enumerate(slots_of(groups, format)):
            alike.setdefault(slot, []).append(number)
        self._banks = []
        for slot, numbers in alike.items():
            parts = {area.name: area.bytes for area in slot.areas} or {"": slot.bytes}
            self._banks.append(_Bank(numbers, {
                name: _zeros((len(numbers), num_blocks, size), device) for name, size in parts.items()
            }))
        self._calibrated = torch.tensor(format.scales, dtype=torch.float32, device=device)   # [layers, K and V]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for bank in self._banks for memory in bank.memory.values())

    def layers(self) -> list[LayerKV]:
        """Each layer's pages, in the order of the layers."""
        made = {
            layer: self._layer(group, slot, layer) for group in self._groups for slot, layer in enumerate(group.layers)
        }
        return [made[layer] for layer in sorted(made)]

    def _layer(self, group: KVGroupSpec, slot: int, layer: int) -> LayerKV:
        bank = next(bank for bank in self._banks if slot in bank.slots)
        place, start = bank.slots.index(slot), 0
        found: dict[str, Tensor] = {}
        for area in _widest_first(group.areas(self._format, layer)):
            if "" in bank.memory:
                stored = bank.memory[""][place][:, start : start + area.bytes]
                start += area.bytes
            else:
                stored = bank.memory[area.name][place]
            shape = (group.tokens_here, group.num_kv_heads) + (() if area.name.endswith("_scale") else (group.head_dim,))
            found[area.name] = stored.view(getattr(torch, area.dtype)).unflatten(-1, shape)
        if self._format.scales and layer not in self._format.wide_layers:
            for name, scale in zip("kv", self._calibrated[layer], strict=True):
                found[f"{name}_scale"] = scale.repeat(group.num_kv_heads).expand(self._blocks, group.block_size, -1)
        if group.latent_value:
            found |= {name.replace("k", "v", 1): pages for name, pages in found.items()}
        return LayerKV(found["k"], found["v"][..., : group.value_dim], found.get("k_scale"), found.get("v_scale"))

    def run(self, block_ops: list[BlockOp]) -> None:
        """All of them at once: every source is read before any target is written."""
        for op in block_ops:
            if op.kind != "copy":
                raise AssertionError(f"unknown block operation {op.kind!r}")
        for number, group in enumerate(self._groups):
            pairs = [(op.source, op.target) for op in block_ops if op.group == number]
            if not pairs:
                continue
            sources, targets = to_device(np.array(pairs, np.int64).T, self._calibrated.device)
            for bank in self._banks:
                used = sum(slot < len(group.layers) for slot in bank.slots)
                for memory in bank.memory.values():
                    memory[:used].index_copy_(1, targets, memory[:used].index_select(1, sources))


def _widest_first(areas: tuple[Area, ...]) -> list[Area]:
    """So that each begins at a multiple of its numbers' size."""
    return sorted(areas, key=lambda area: -getattr(torch, area.dtype).itemsize)


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Bytes of zero. On the CPU fresh pages of the system, which are resident once they are written to; torch would write
    gigabytes of zeros at start-up. Small pages: the first token writes to every layer, and would take 2 MB of each as numpy's
    huge ones."""
    size = math.prod(shape)
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)

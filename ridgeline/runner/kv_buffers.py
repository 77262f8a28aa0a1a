"""The memory of the KV cache. This file alone decides how pages lie in it.

One buffer holds a fixed number of layer *slots*; a group's i-th layer uses slot i, whatever group it is in. A block id
therefore means the same pages in every group, and one pool of ids serves them all. Where all groups have one geometry, all
keys of a slot lie together, and then all its values. Where they differ, a block's page is as large as the largest group
needs, keys first and values behind them. A latent group has no values: they are a view of its keys. Buffers start as zeros,
so that old data of other processes is never visible.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.kv import LayerKV
from ridgeline.messages import BlockOp
from ridgeline.ops.sampling.noise import to_device
from ridgeline.sizes.kv_spec import KVGroupSpec


class KVBuffers:
    def __init__(self, groups: list[KVGroupSpec], num_blocks: int, kv_dtype: torch.dtype, device: torch.device) -> None:
        """A `kv_dtype` of one byte has a float32 scale for each token and head, of keys and of values."""
        self._groups = groups
        num_slots = max(len(group.layers) for group in groups)
        together = len({group.geometry for group in groups}) == 1
        # Areas of a slot, each with a page per block: keys and values, or both in one.
        areas = max(group.vectors for group in groups) if together else 1
        heads = max(group.vectors * group.block_size * group.num_kv_heads for group in groups) // areas
        elements = max(group.vectors * group.block_size * group.num_kv_heads * group.head_dim for group in groups) // areas
        self._pages = _zeros((num_slots, areas, num_blocks, elements), kv_dtype, device)
        self._scales = None
        if kv_dtype.itemsize == 1:
            self._scales = _zeros((num_slots, areas, num_blocks, heads), torch.float32, device)

    def layers(self) -> list[LayerKV]:
        """Each layer's pages, in the order of the layers."""
        made = {
            layer: self._layer(group, slot) for group in self._groups for slot, layer in enumerate(group.layers)
        }
        return [made[layer] for layer in sorted(made)]

    def _layer(self, group: KVGroupSpec, slot: int) -> LayerKV:
        token = (group.block_size, group.num_kv_heads)
        k, v = _key_value(self._pages[slot], (*token, group.head_dim), group.vectors)
        v = v[..., : group.value_dim]
        if self._scales is None:
            return LayerKV(k, v)
        return LayerKV(k, v, *_key_value(self._scales[slot], token, group.vectors))

    def run(self, block_ops: list[BlockOp]) -> None:
        """All of them at once: every source is read before any target is written."""
        for op in block_ops:
            if op.kind != "copy":
                raise AssertionError(f"unknown block operation {op.kind!r}")
        for number, group in enumerate(self._groups):
            pairs = [(op.source, op.target) for op in block_ops if op.group == number]
            if pairs:
                sources, targets = to_device(np.array(pairs, np.int64).T, self._pages.device)
                for memory in (self._pages, self._scales):
                    if memory is not None:
                        used = memory[: len(group.layers)].view(torch.uint8)
                        used.index_copy_(2, targets, used.index_select(2, sources))


def _key_value(areas: Tensor, shape: tuple[int, ...], vectors: int) -> tuple[Tensor, Tensor]:
    """Pages [areas, blocks, *] as keys and values [blocks, *shape]; a single vector is both."""
    size = math.prod(shape)
    second = areas[-1][:, (vectors - 1) * size * (len(areas) == 1) :]
    return areas[0][:, :size].unflatten(-1, shape), second[:, :size].unflatten(-1, shape)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU through numpy, which takes fresh pages from the system as they are first touched; torch would
    write gigabytes of zeros at start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)

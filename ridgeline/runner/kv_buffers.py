"""The memory of the KV cache. This file alone decides how pages lie in it.

One buffer holds a fixed number of layer *slots*; a group's i-th layer uses slot i, whatever group it is in. A block id
therefore means the same pages in every group, and one pool of ids serves them all. Buffers start as zeros, so that
old data of other processes is never visible.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.kv import LayerKV
from ridgeline.messages import BlockOp
from ridgeline.sizes.kv_spec import KVGroupSpec


class KVBuffers:
    def __init__(self, groups: list[KVGroupSpec], num_blocks: int, kv_dtype: torch.dtype, device: torch.device) -> None:
        """A `kv_dtype` of one byte has a float32 scale for each token and head, of keys and of values."""
        spec = groups[0]
        num_slots = max(len(group.layers) for group in groups)
        shape = (num_slots, 2, num_blocks, spec.block_size, spec.num_kv_heads)
        self._pages = _zeros((*shape, spec.head_dim), kv_dtype, device)
        self._scales = _zeros(shape, torch.float32, device) if kv_dtype.itemsize == 1 else None
        self._slots = {layer: slot for group in groups for slot, layer in enumerate(group.layers)}

    def layers(self) -> list[LayerKV]:
        """Each layer's pages, in the order of the layers."""
        return [self._layer(self._slots[layer]) for layer in sorted(self._slots)]

    def _layer(self, slot: int) -> LayerKV:
        k, v = self._pages[slot]
        if self._scales is None:
            return LayerKV(k, v)
        k_scale, v_scale = self._scales[slot]
        return LayerKV(k, v, k_scale, v_scale)

    def run(self, block_ops: list[BlockOp]) -> None:
        for op in block_ops:
            if op.kind != "copy":
                raise AssertionError(f"unknown block operation {op.kind!r}")
            for memory in (self._pages, self._scales):
                if memory is not None:
                    memory[:, :, op.target] = memory[:, :, op.source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU through numpy, which takes fresh pages from the system as they are first touched; torch would
    write gigabytes of zeros at start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)

"""The shape of the KV cache: a list of groups, known to both halves of the engine.

A group is a set of layers whose KV lives and dies together: full attention keeps everything, a sliding window frees
what lies behind it, latent attention keeps one vector per token that is key and value at once. Every group has the same
number of layer slots per page (some may stay unused) and a slot is as large as the largest of its layers needs, so one pool of
page ids serves them all. A second model (a draft) has groups of its own and pages under the same ids and tables: its bytes
are added to those of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.sizes.kv_format import KVFormat, element_bytes
from ridgeline.sizes.op_costs import SCALE_BYTES

PAGE_ALIGNMENT = 16                  # of pages that layers of several kinds share: kernels load 16 bytes at once


@dataclass(frozen=True, slots=True)
class Area:
    """A part of a layer's page: k, v, k_scale or v_scale."""

    name: str
    dtype: str
    bytes: int                       # of one block


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    layers: tuple[int, ...]          # the model's layers in this group; their place here is their slot in the page
    window: int | None               # sliding window in tokens; None = full attention
    block_size: int                  # tokens per block
    num_kv_heads: int                # on this rank
    head_dim: int                    # elements of a key
    latent_value: int = 0            # > 0: this many first elements of a key are its value, and no other values are stored
    ranks: int = 1                   # that divide a block's tokens among them; each has all KV heads of its own

    @property
    def tokens_here(self) -> int:
        """Of a block, on one rank."""
        return self.block_size // self.ranks

    @property
    def kind(self) -> str:
        if self.latent_value:
            return "latent"
        return "full" if self.window is None else "window"

    @property
    def value_dim(self) -> int:
        return self.latent_value or self.head_dim

    @property
    def vectors(self) -> int:
        """Vectors of a token and KV head: key and value, or one that is both."""
        return 1 if self.latent_value else 2

    @property
    def geometry(self) -> tuple[int, int, int]:
        """Groups that agree in it can have their pages in the same places of one buffer."""
        return self.num_kv_heads, self.head_dim, self.latent_value

    def areas(self, format: KVFormat, layer: int) -> tuple[Area, ...]:
        """What one block of one layer holds: scales of keys and values, keys, values; a latent is both."""
        k, v = format.of_layer(layer)
        parts, heads = (("k", k), ("v", v))[: self.vectors], self.tokens_here * self.num_kv_heads
        scaled = [name for name, dtype in parts if format.scale_bytes(dtype)]
        scales = tuple(Area(f"{name}_scale", "float32", heads * SCALE_BYTES) for name in scaled)
        return scales + tuple(Area(name, dtype, heads * self.head_dim * element_bytes(dtype)) for name, dtype in parts)


def common_block_size(groups: list[KVGroupSpec]) -> int:
    """Tokens per block, the same in all groups: a sequence's tables have one length."""
    (size,) = {group.block_size for group in groups}
    return size


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer slot of a block: where its layers have their pages."""

    bytes: int                       # of one block
    areas: tuple[Area, ...]          # of all its layers, each with memory of its own; empty: they differ, and share a page


def groups_here(groups: list[KVGroupSpec], layers: range) -> list[KVGroupSpec]:
    """The same groups with those of their layers that a pipeline's stage has; some may have none."""
    return [replace(group, layers=tuple(layer for layer in group.layers if layer in layers)) for group in groups]


def slots_of(groups: list[KVGroupSpec], format: KVFormat) -> list[Slot]:
    """Every group can use every page, so in each slot the largest layer counts."""
    found = []
    for slot in range(max(len(group.layers) for group in groups)):
        layers = [(group, group.layers[slot]) for group in groups if slot < len(group.layers)]
        areas = [group.areas(format, layer) for group, layer in layers]
        size = max(sum(area.bytes for area in each) for each in areas)
        if len({(each, group.geometry) for each, (group, _) in zip(areas, layers, strict=True)}) == 1:
            found.append(Slot(size, areas[0]))
        else:
            found.append(Slot(-(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT, ()))
    return found


def page_bytes(groups: list[KVGroupSpec], format: KVFormat) -> int:
    """Of one block in all layer slots."""
    return sum(slot.bytes for slot in slots_of(groups, format))


def group_layers(windows: list[int | None]) -> list[tuple[int | None, tuple[int, ...]]]:
    """Split layers by window into groups no larger than the rarest kind: pages are then shared without much waste.

    26 layers of which 4 are global give one group of 4 global layers and six groups of at most 4 local ones.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    return [
        (window, tuple(layers[start : start + size]))
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]


def group_blocks(group: KVGroupSpec, num_tokens: int, max_chunk: int) -> int:
    """Most blocks of one group that a sequence, computed in chunks of at most `max_chunk`, holds at once."""
    blocks = -(-num_tokens // group.block_size)
    if group.window is None:
        return blocks
    # Behind the window nothing is kept, but blocks are freed only when one fills up: there are the window's, as of the
    # first slot of the block being filled, and the chunk's, which may start at the last slot of that block.
    window_blocks = -(-(group.window - 1) // group.block_size)
    chunk_blocks = 1 - (-(max_chunk - 1) // group.block_size)
    return min(blocks, window_blocks + chunk_blocks)


def blocks_for(groups: list[KVGroupSpec], num_tokens: int, max_chunk: int) -> int:
    """Most blocks that one sequence of that many tokens, computed in chunks of at most `max_chunk`, holds at once."""
    return sum(group_blocks(group, num_tokens, max_chunk) for group in groups)

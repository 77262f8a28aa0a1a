"""The shape of the KV cache: a list of groups, known to both halves of the engine.

A group is a set of layers whose KV lives and dies together: full attention keeps everything, a sliding window frees
what lies behind it, latent attention keeps one vector per token that is key and value at once. Every group has the same
number of layer slots per page (some may stay unused) and a page is as large as the largest group needs, so one pool of
page ids serves them all. A second model (a draft) has groups of its own and pages under the same ids and tables: its bytes
are added to those of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    layers: tuple[int, ...]          # the model's layers in this group; their place here is their slot in the page
    window: int | None               # sliding window in tokens; None = full attention
    block_size: int                  # tokens per block
    num_kv_heads: int                # on this rank
    head_dim: int                    # elements of a key
    latent_value: int = 0            # > 0: this many first elements of a key are its value, and no other values are stored

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

    def layer_bytes(self, element_size: int) -> int:
        """Bytes of one block in one layer; elements of one byte have a float32 scale per vector."""
        vector = self.head_dim * element_size + (4 if element_size == 1 else 0)
        return self.vectors * self.block_size * self.num_kv_heads * vector


def common_block_size(groups: list[KVGroupSpec]) -> int:
    """Tokens per block, the same in all groups: a sequence's tables have one length."""
    (size,) = {group.block_size for group in groups}
    return size


def page_bytes(groups: list[KVGroupSpec], element_size: int) -> int:
    """Bytes of one block in all layer slots. Every group can use every page, so the largest one counts."""
    return max(len(group.layers) for group in groups) * max(group.layer_bytes(element_size) for group in groups)


def groups_here(groups: list[KVGroupSpec], layers: range) -> list[KVGroupSpec]:
    """The same groups with those of their layers that a pipeline's stage has; some may have none."""
    return [replace(group, layers=tuple(layer for layer in group.layers if layer in layers)) for group in groups]


def cache_dtype(asked: str, dtype: str, device: str, kernels: str = "auto") -> str:
    """What the cache stores, by `kv_cache_dtype`. auto is the activations' dtype, but float16 on a CPU that computes in float32:
    half the bytes per token, which the native kernels widen as they read. `kernels=reference` is exact."""
    if asked == "fp8":
        return "float8_e4m3fn"
    if asked != "auto":
        return asked
    return "float16" if (device, dtype, kernels) == ("cpu", "float32", "auto") else dtype


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

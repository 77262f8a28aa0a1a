"""Which part of each dimension a rank keeps. Pure arithmetic: no torch, no processes.

Where a dimension does not divide evenly, shards are padded with zeros to equal size. Padding changes no result, and takes no
longer than the fullest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank keeps `total[start:stop]` in `size` places; the last places may be padding."""

    total: int
    start: int
    stop: int
    size: int

    @property
    def filled(self) -> int:
        return self.stop - self.start

    def scaled(self, width: int) -> Shard:
        """The same shard with `width` rows per item: from heads to rows."""
        return Shard(self.total * width, self.start * width, self.stop * width, self.size * width)


def whole(total: int) -> Shard:
    return Shard(total, 0, total, total)


def even_shard(total: int, rank: int, size: int) -> Shard:
    share = -(-total // size)
    start = min(rank * share, total)
    return Shard(total, start, min(start + share, total), share)


def head_shards(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[Shard, Shard]:
    """Query heads and KV heads of a rank. Query heads stay with the KV head they read.

    With fewer KV heads than ranks, several ranks keep the same KV head and divide its query heads.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        kv = even_shard(num_kv_heads, rank, size)
        return kv.scaled(group), kv
    if size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {size} does not fit {num_kv_heads} KV heads: use at most {num_kv_heads}, "
            f"or a multiple of {num_kv_heads}"
        )
    copies = size // num_kv_heads
    if copies > group:
        raise ConfigError(f"tensor_parallel_size {size} is more than the model's {num_heads} attention heads")
    owner = rank // copies
    within = even_shard(group, rank % copies, copies)
    first = owner * group
    return (
        Shard(num_heads, first + within.start, first + within.stop, within.size),
        Shard(num_kv_heads, owner, owner + 1, 1),
    )

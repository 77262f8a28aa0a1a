"""The KV manager: which blocks each sequence has, in every KV group, and what can be shared.

A sequence has one block table per group, all of the same length. Window groups hold null where a block lies behind the
window. All methods that can run out of blocks change nothing when they do. Row numbers, steps and budgets are the
scheduler's business; this file knows only tokens and blocks.

    tokens   0 ........ 15 | 16 ....... 31 | 32 ....... 47 | 48 .. 52
    table         7               9               4            12        grown to 53 tokens
                  └── committed (full and computed: findable by others) ──┘    the last block is private
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.cache.block_pool import NULL_BLOCK, BlockPool, SlabPool
from ridgeline.cache.prefix_cache import Node, NoPrefixCache, PrefixCache
from ridgeline.messages import BlockOp
from ridgeline.sizes.kv_spec import KVGroupSpec, blocks_for, common_block_size, group_blocks


@dataclass(slots=True, eq=False)
class Hit:
    """A prefix whose KV exists: whole blocks, one table per group (null behind a window), and maybe a part of one more, which
    the sequence gets as a copy."""

    num_tokens: int
    tables: list[list[int]]
    node: Node | None                # where the sequence stands in the prefix tree; None = cannot be indexed further
    asked_tokens: int = 0            # how many tokens lookup() was given; 0 = from fork()
    copied: list[int] = field(default_factory=list)      # per group: the block whose first tokens are copied behind the others


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    tables: list[list[int]]          # [group][logical block] -> block id
    node: Node | None
    committed: int = 0               # logical blocks that were offered to the prefix cache
    freed: list[int] = field(default_factory=list)               # per group: logical blocks freed behind the window

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])


@dataclass(slots=True)
class CacheCounters:
    """What sequences found when they started; a lookup for a sequence that has to wait is not counted."""

    lookups: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    forked_blocks: int = 0
    copied_blocks: int = 0
    window_freed: int = 0
    evicted: int = 0


class KVManager:
    def __init__(
        self,
        groups: list[KVGroupSpec],
        num_blocks: int,
        *,
        prefix_caching: bool = True,
        contiguous_tokens: int | None = None,
    ) -> None:
        """`contiguous_tokens`: reserve one contiguous run for that many tokens per request (paging off)."""
        self.groups = groups
        self.block_size = common_block_size(groups)
        self.counters = CacheCounters()
        self._windows = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        self.cache: PrefixCache = PrefixCache(len(groups)) if prefix_caching else NoPrefixCache()
        self._slab = -(-contiguous_tokens // self.block_size) if contiguous_tokens else 0
        self.pool = SlabPool(num_blocks, self._slab) if self._slab else BlockPool(num_blocks, self._evicted)

    def _evicted(self, block: int) -> None:
        self.counters.evicted += 1
        self.cache.evict(block)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks a sequence of that many tokens holds at once."""
        if self._slab:
            return self._slab * len(self.groups)
        return blocks_for(self.groups, num_tokens, max_chunk)

    def blocks_beyond(self, hit: Hit, num_tokens: int, max_chunk: int) -> int:
        """Most blocks that a sequence of that many tokens takes out of the pool when it starts from this hit."""
        if self._slab:
            return self._slab * len(self.groups)
        total = -(-num_tokens // self.block_size)
        taken = 0
        for group, table in zip(self.groups, hit.tables, strict=True):
            shared = [block for block in table if block]
            taken += min(total - len(table), group_blocks(group, num_tokens, max_chunk) - len(shared))
            taken += self.pool.num_unheld(shared)
        return taken

    @property
    def grows(self) -> bool:
        """Do sequences take blocks as they go? Not with contiguous reservations."""
        return not self._slab

    @property
    def num_free(self) -> int:
        return self.pool.num_allocatable

    # -- sharing -------------------------------------------------------------------------------------------------------

    def lookup(self, tokens: array[int], salt: str, limit: int) -> Hit:
        """The longest cached prefix of at most `limit` tokens that is valid in every group."""
        root = self.cache.root(salt)
        path = self.cache.walk(root, tokens, limit, self.block_size)
        columns = [child.blocks for child in path]
        length = self._valid_length(columns)
        hit = self._hit(columns[:length], path[length - 1] if length else root)
        hit.asked_tokens = len(tokens)
        return hit

    def fork(self, source: SequenceBlocks, salt: str, limit: int) -> Hit:
        """The same, from the blocks of a running sequence with the same prompt (the n answers of one request)."""
        count = min(limit // self.block_size, source.num_blocks) if self.grows else 0    # a reservation is not shared
        columns = [[table[index] for table in source.tables] for index in range(count)]
        length = self._valid_length(columns)
        return self._hit(columns[:length], self.cache.root(salt) if length == 0 else None)

    def add_copy(self, hit: Hit, source: SequenceBlocks, computed: int) -> None:
        """Behind the hit's whole blocks, the part of one more that a running sequence with the same prompt has: `computed` tokens
        of the prompt have their KV from the steps before this one. The new sequence gets a copy, to write on in it."""
        place, more = hit.num_tokens // self.block_size, computed - hit.num_tokens
        if self.grows and 0 < more < self.block_size and place < source.num_blocks:
            copied = [table[place] for table in source.tables]
            if all(copied):
                hit.num_tokens, hit.copied = computed, copied

    def copies(self, hit: Hit, blocks: SequenceBlocks) -> list[BlockOp]:
        """What the device has to copy before a sequence that started from this hit computes."""
        place = hit.num_tokens // self.block_size
        return [
            BlockOp("copy", group, source, blocks.tables[group][place]) for group, source in enumerate(hit.copied)
        ]

    def _valid_length(self, columns: Sequence[Sequence[int]]) -> int:
        """How many leading blocks can be used: all present in full groups, the last window's worth in window groups."""
        if not self._windows:
            tables = zip(*columns, strict=True)                  # searched by C: a prompt may have thousands of blocks
            return min((table.index(NULL_BLOCK) if NULL_BLOCK in table else len(table) for table in tables), default=0)
        windows = dict(self._windows)
        run = [0] * len(self.groups)                             # present blocks in a row that end here
        best = 0
        for index, blocks in enumerate(columns):
            usable = True
            for group, block in enumerate(blocks):
                run[group] = run[group] + 1 if block else 0
                window = windows.get(group)
                if window is None:
                    if not block:
                        return best
                    continue
                # The next query, at position (index + 1) * block_size, sees window - 1 positions before its own.
                needed = min(index + 1, -(-(window - 1) // self.block_size))
                usable &= run[group] >= needed
            if usable:
                best = index + 1
        return best

    def _hit(self, columns: Sequence[Sequence[int]], node: Node | None) -> Hit:
        tables = [list(table) for table in zip(*columns, strict=True)] if columns else [[] for _ in self.groups]
        for group, window in self._windows:
            needed = -(-(window - 1) // self.block_size)
            behind = max(0, len(tables[group]) - needed)
            tables[group][:behind] = [NULL_BLOCK] * behind
        return Hit(len(columns) * self.block_size, tables, node)

    # -- life of a sequence --------------------------------------------------------------------------------------------

    def start(self, hit: Hit, num_tokens: int) -> SequenceBlocks | None:
        """Take the hit's blocks and enough new ones for `num_tokens`; None when the pool has too few."""
        new = self._slab or -(-num_tokens // self.block_size) - hit.num_tokens // self.block_size
        shared = [block for table in hit.tables for block in table if block]
        unheld = self.pool.num_unheld(shared)
        if self.pool.num_allocatable < new * len(self.groups) + unheld:
            return None
        self.pool.hold(shared)                                   # first: what is held cannot be evicted below
        blocks = SequenceBlocks([list(table) for table in hit.tables], hit.node, hit.num_tokens // self.block_size)
        blocks.freed = [0] * len(self.groups)
        for group, _ in self._windows:
            blocks.freed[group] = sum(1 for block in blocks.tables[group] if not block)
        if hit.node is not None:
            hit.node.users += 1
        self.grow(blocks, num_tokens)
        self._count(hit)
        return blocks

    def _count(self, hit: Hit) -> None:
        counters = self.counters
        counters.copied_blocks += len(hit.copied)
        if hit.asked_tokens:
            counters.lookups += 1
            counters.asked_tokens += hit.asked_tokens
            counters.hit_tokens += hit.num_tokens
        else:
            counters.forked_blocks += hit.num_tokens // self.block_size * len(self.groups)

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> list[tuple[int, int, int]] | None:
        """Blocks for `num_tokens` in all: the new (group, index, block) entries, or None when the pool has too few."""
        first = blocks.num_blocks
        missing = -(-num_tokens // self.block_size) - first
        if missing <= 0:
            return []
        if self._slab:
            if first:
                raise AssertionError("a contiguous reservation never grows")
            missing = self._slab
            if self.pool.num_allocatable < missing * len(self.groups):
                return None
            taken = [block for _ in self.groups for block in self.pool.allocate(missing) or []]
        else:
            allocated = self.pool.allocate(missing * len(self.groups))
            if allocated is None:
                return None
            taken = allocated
        entries = []
        for group, table in enumerate(blocks.tables):
            for offset in range(missing):
                block = taken[group * missing + offset]
                table.append(block)
                entries.append((group, first + offset, block))
        return entries

    def grow_each(self, sequences: Sequence[SequenceBlocks]) -> list[int] | None:
        """One block more for each of them, in every group: as grow() one after the other. The blocks, sequence by sequence; None:
        the pool has too few, or sequences do not grow."""
        groups = len(self.groups)
        taken = None if self._slab else self.pool.allocate(len(sequences) * groups)
        if taken is not None:
            for group in range(groups):
                for blocks, block in zip(sequences, taken[group::groups], strict=True):
                    blocks.tables[group].append(block)
        return taken

    def commit(self, blocks: SequenceBlocks, tokens: array[int], num_computed: int) -> None:
        """The first `num_computed` tokens are known and computed: make full blocks findable, free behind windows."""
        self.publish(blocks, tokens, num_computed)
        for group, window in self._windows:
            self._slide(blocks, group, num_computed - window + 1)

    def publish(self, blocks: SequenceBlocks, tokens: array[int], num_computed: int) -> None:
        """Make full blocks findable as soon as a step that computes their tokens is planned.

        A sequence that finds them computes in that step or a later one, and every layer writes the keys and values of a whole
        step before it attends: so requests that arrive together share a prefix which none of them has computed yet. Steps
        in which every row computes one token are the exception: blocks that those fill are committed when they have run.
        """
        first, size = blocks.committed, self.block_size
        full = num_computed // size
        if full <= first:
            return
        blocks.committed, standing, cache = full, blocks.node, self.cache
        for index in range(first, full):
            if standing is None:
                break
            content = tokens[index * size : index * size + size].tobytes()
            node, taken = cache.insert(standing, content, [table[index] for table in blocks.tables])
            self.pool.index(taken)
            if node is None:
                cache.leave(standing)
            else:
                cache.stand_on(node, standing)
            blocks.node = standing = node

    def _slide(self, blocks: SequenceBlocks, group: int, first_visible: int) -> None:
        """Release the blocks that lie wholly before `first_visible`, the earliest position the next query can see."""
        if self._slab:
            return                                               # a reservation is kept whole
        behind = min(first_visible // self.block_size, blocks.num_blocks)
        table, done = blocks.tables[group], blocks.freed[group]
        if behind > done:
            self.pool.release([block for block in table[done:behind] if block])
            table[done:behind] = [NULL_BLOCK] * (behind - done)
            blocks.freed[group] = behind
            self.counters.window_freed += behind - done

    def free(self, blocks: SequenceBlocks) -> None:
        """Give everything back. Later blocks are reused before earlier ones: a shorter prefix stays useful longer."""
        if blocks.node is not None:
            self.cache.leave(blocks.node)
            blocks.node = None
        for table in blocks.tables:
            self.pool.release([block for block in reversed(table) if block])
            table.clear()

    def distrust(self, blocks: SequenceBlocks, first: int = 0) -> None:
        """The contents of these blocks, from the first-th on, are in doubt: un-index them. Sequences that share them go on."""
        for table in blocks.tables:
            for block in table[first:]:
                if self.pool.unindex(block):
                    self.cache.evict(block)

    def forget_prefixes(self) -> bool:
        """Drop everything from the prefix cache. False, and nothing is dropped, while a sequence has blocks."""
        return self.pool.forget_cached()

    def exclusive_blocks(self, blocks: SequenceBlocks) -> int:
        """Blocks only this sequence holds: what a preemption would give back."""
        return sum(1 for table in blocks.tables for block in table if block and self.pool.references(block) == 1)

"""The pool of KV blocks: reference counts, and the order in which unheld blocks are reused.

A block is *free* (nothing in it), *held* (reference count > 0) or *cached* (count 0, but its contents are still indexed
by the prefix cache; the least recently released is reused first). Block 0 is null: padding writes there, no sequence owns it.

A block that a step in flight may still touch must not be reused. So a release is dated with the last step submitted,
and takes effect when that step is retired; with nothing in flight that is at once.

    allocate ─▶ held ─ release ─▶ (in flight until its step retires) ─▶ free, or cached ─ evicted by allocate ─▶ held
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np

NULL_BLOCK = 0
FREE, CACHED, HELD, SHARED = range(4)                            # states of a block; SHARED: several hold it


class BlockPool:
    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = array("i", bytes(4 * num_blocks))
        self._counts = np.frombuffer(self._references, np.int32)      # the same memory, for many blocks at once
        self._free = list(range(num_blocks - 1, 0, -1))          # a stack: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()     # unheld but indexed, oldest first
        self._indexed: set[int] = set()                          # blocks the prefix cache can find
        self._in_flight: deque[tuple[int, list[int]]] = deque()  # (step, blocks released while it was the newest)
        self._submitted = self._retired = 0

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def num_allocatable(self) -> int:
        """Blocks that allocate() can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_releasing(self) -> int:
        """Blocks that will (mostly) become allocatable when the steps in flight retire."""
        return sum(len(blocks) for _, blocks in self._in_flight)

    def references(self, block: int) -> int:
        return self._references[block]

    def num_unheld(self, blocks: list[int]) -> int:
        """How many of these have no reference: they are allocatable."""
        return len(blocks) - int(np.count_nonzero(self._counts[blocks]))

    def states(self) -> np.ndarray:
        """uint8 [num_blocks - 1]: what each block but the null one is now, for a picture."""
        found = np.minimum(self._counts, 2).astype(np.uint8)
        found[found > 0] += HELD - 1
        found[np.fromiter(self._cached, np.int32, len(self._cached))] = CACHED
        return found[1:]

    # -- life of a block -----------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None when there are not that many."""
        if count > self.num_allocatable:
            return None
        if count <= len(self._free):
            blocks = self._free[: -count - 1 : -1]
            del self._free[len(self._free) - count :]
            for block in blocks:
                self._references[block] = 1
            return blocks
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._indexed.discard(block)
                self._on_evict(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """One more reference to each of these held or cached blocks."""
        places = np.array(blocks, np.intp)
        for block in places[self._counts[places] == 0].tolist():
            del self._cached[block]
        self._counts[places] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference to each; they are reused in the order given once no step in flight can touch them."""
        if self._retired < self._submitted:
            if not self._in_flight or self._in_flight[-1][0] != self._submitted:
                self._in_flight.append((self._submitted, []))
            self._in_flight[-1][1].extend(blocks)
        else:
            self._drop(blocks)

    def index(self, blocks: list[int]) -> None:
        """The prefix cache can find these blocks from now on: keep their contents after the last reference goes."""
        self._indexed.update(blocks)

    def unindex(self, block: int) -> bool:
        """The contents of this held block must not be found again. False: the prefix cache cannot find it anyway."""
        known = block in self._indexed
        self._indexed.discard(block)
        return known

    def forget_cached(self) -> bool:
        """Free what is only cached, as if it were evicted. False, and nothing is done, while a block is held."""
        if any(self._references):
            return False
        while self._cached:
            block, _ = self._cached.popitem()            # the newest first: children before their parents
            self._indexed.discard(block)
            self._on_evict(block)
            self._free.append(block)
        return True

    def _drop(self, blocks: list[int]) -> None:
        for block in self._unheld_now(blocks):
            if block in self._indexed:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _unheld_now(self, blocks: list[int]) -> list[int]:
        """Drops one reference to each of these; which have none left, in the order in which the last one went."""
        places = np.array(blocks, np.intp)
        np.subtract.at(self._counts, places, 1)          # several sequences may give back the same block in one step
        left = self._counts[places]
        if (left < 0).any():
            raise AssertionError(f"block {blocks[int(left.argmin())]} released twice")
        return [*dict.fromkeys(places[left == 0][::-1].tolist())][::-1]

    # -- steps in flight -----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Is there a step that was submitted and has not retired?"""
        return self._retired < self._submitted

    def submitted(self, step: int) -> None:
        self._submitted = step

    def retired(self, step: int) -> None:
        self._retired = step
        while self._in_flight and self._in_flight[0][0] <= step:
            self._drop(self._in_flight.popleft()[1])

    def check(self) -> None:
        """Every block is in exactly one place; raises AssertionError otherwise. Linear: for tests and debugging."""
        free, cached = set(self._free), set(self._cached)
        held = set((np.flatnonzero(self._counts[1:] > 0) + 1).tolist())
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached and not free & held and not cached & held, "a block is in two places"
        assert len(free) + len(cached) + len(held) == self.num_blocks - 1, "a block is lost"
        assert cached <= self._indexed and not free & self._indexed, "index and lists disagree"
        assert self._references[NULL_BLOCK] == 0, "the null block has an owner"


class SlabPool(BlockPool):
    """The off version of paging: every request gets one contiguous run of `slab` blocks, enough for the longest answer.

    allocate() takes whole slabs only. Nothing is ever indexed, so a slab comes back whole.
    """

    def __init__(self, num_blocks: int, slab: int) -> None:
        super().__init__(num_blocks, on_evict=lambda block: None)
        self._slab = slab
        self._free_slabs = list(range(1, num_blocks - slab + 1, slab))[::-1]
        self._slab_left: dict[int, int] = {}                     # first block of a slab -> blocks not yet back

    @property
    def num_allocatable(self) -> int:
        return len(self._free_slabs) * self._slab

    def allocate(self, count: int) -> list[int] | None:
        if count != self._slab:
            raise AssertionError(f"a slab is {self._slab} blocks, {count} were asked for")
        if not self._free_slabs:
            return None
        first = self._free_slabs.pop()
        self._slab_left[first] = self._slab
        blocks = list(range(first, first + self._slab))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _drop(self, blocks: list[int]) -> None:
        for block in self._unheld_now(blocks):
            first = block - (block - 1) % self._slab
            self._slab_left[first] -= 1
            if self._slab_left[first] == 0:
                del self._slab_left[first]
                self._free_slabs.append(first)

    def check(self) -> None:
        held = set((np.flatnonzero(self._counts[1:] > 0) + 1).tolist())
        assert sum(self._slab_left.values()) == len(held), "a slab is lost"
        assert not any(block - (block - 1) % self._slab in self._free_slabs for block in held), "a held slab is free"

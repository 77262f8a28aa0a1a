"""The block pool against a model so naive that it cannot be wrong: who holds what, and in which order it comes back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ridgeline.cache.block_pool import NULL_BLOCK, BlockPool, SlabPool

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """Every call on the pool is repeated on plain lists; then everything countable is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, self.evicted.append)
        self.held = Counter[int]()                       # references that callers may still release
        self.pending: list[tuple[int, list[int]]] = []   # releases that wait for a step
        self.free = set(range(1, NUM_BLOCKS))
        self.cached: list[int] = []                      # oldest release first
        self.indexed: set[int] = set()
        self.submitted = self.retired = 0

    def _references(self, block: int) -> int:
        return self.held[block] + sum(blocks.count(block) for _, blocks in self.pending)

    def _apply(self, blocks: list[int]) -> None:
        """A release takes effect; `held` no longer has it."""
        for place, block in enumerate(blocks):
            if not self._references(block) and block not in blocks[place + 1 :]:
                if block in self.indexed:
                    self.cached.append(block)
                else:
                    self.free.add(block)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > len(self.free) + len(self.cached):
            assert blocks is None
            return
        from_free = min(count, len(self.free))
        assert blocks is not None and len(set(blocks)) == count
        assert set(blocks[:from_free]) <= self.free, "free blocks go before cached ones"
        gone, self.cached = self.cached[: count - from_free], self.cached[count - from_free :]
        assert blocks[from_free:] == gone == self.evicted, "the least recently released is evicted first"
        self.evicted.clear()
        self.indexed -= set(gone)
        self.free -= set(blocks)
        self.held.update(blocks)

    @precondition(lambda self: self.cached or +self.held)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.cached, *(+self.held)})))
        self.pool.hold([block])
        if block in self.cached:
            self.cached.remove(block)
        self.held[block] += 1

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held.elements())), min_size=1, max_size=6, unique=True))
        self.pool.release(list(blocks))
        self.held -= Counter(blocks)
        if self.retired < self.submitted:
            self.pending.append((self.submitted, blocks))
        else:
            self._apply(blocks)

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.held)))
        self.pool.index([block])
        self.indexed.add(block)

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def unindex(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.held)))
        assert self.pool.unindex(block) == (block in self.indexed)
        self.indexed.discard(block)

    @precondition(lambda self: self.submitted - self.retired < 3)
    @rule()
    def submit(self) -> None:
        self.submitted += 1
        self.pool.submitted(self.submitted)

    @precondition(lambda self: self.retired < self.submitted)
    @rule()
    def retire(self) -> None:
        self.retired += 1
        self.pool.retired(self.retired)
        while self.pending and self.pending[0][0] <= self.retired:
            self._apply(self.pending.pop(0)[1])

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert not self.evicted, "only allocate() evicts"
        assert [self.pool.references(block) for block in range(NUM_BLOCKS)] == [
            self._references(block) for block in range(NUM_BLOCKS)
        ]
        assert self.pool.num_allocatable == len(self.free) + len(self.cached)
        assert self.pool.num_releasing == sum(len(blocks) for _, blocks in self.pending)
        assert set(self.pool._free) == self.free and list(self.pool._cached) == self.cached
        assert self.pool._indexed == self.indexed

    def teardown(self) -> None:
        self.pool.release(list(self.held.elements()))
        self.pool.retired(self.submitted)
        self.pool.check()
        assert self.pool.num_allocatable == NUM_BLOCKS - 1 and not self.pool.num_releasing, "a block leaked"


TestPool = pytest.mark.reliability("P-01")(PoolMachine.TestCase)
TestPool.settings = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True)


class SlabMachine(RuleBasedStateMachine):
    """Whole slabs out, single blocks back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(12, 3)                      # blocks 1..9 are three slabs; 10 and 11 fit nowhere
        self.out: dict[int, set[int]] = {}               # first block -> blocks not released
        self.pending: list[tuple[int, list[int]]] = []
        self.step = self.retired = 0

    def _still_out(self) -> set[int]:
        return {first for first, blocks in self.out.items() if blocks} | {
            block - (block - 1) % 3 for _, blocks in self.pending for block in blocks
        }

    @rule()
    def allocate(self) -> None:
        blocks = self.pool.allocate(3)
        if len(self._still_out()) == 3:
            assert blocks is None
        else:
            assert blocks is not None
            first = blocks[0]
            assert blocks == [first, first + 1, first + 2] and first in (1, 4, 7) and first not in self._still_out()
            self.out[first] = set(blocks)

    @precondition(lambda self: any(self.out.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(block for blocks in self.out.values() for block in blocks)
        blocks = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
        self.pool.release(list(blocks))
        for left in self.out.values():
            left -= set(blocks)
        if self.retired < self.step:
            self.pending.append((self.step, blocks))

    @rule()
    def submit(self) -> None:
        self.step += 1
        self.pool.submitted(self.step)

    @precondition(lambda self: self.retired < self.step)
    @rule()
    def retire(self) -> None:
        self.retired += 1
        self.pool.retired(self.retired)
        self.pending = [entry for entry in self.pending if entry[0] > self.retired]

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_allocatable == 3 * (3 - len(self._still_out()))


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)


def _pool(num_blocks: int = 5) -> BlockPool:
    return BlockPool(num_blocks, lambda block: None)


def test_the_null_block_is_never_handed_out() -> None:
    blocks = _pool(5).allocate(4)
    assert blocks is not None and NULL_BLOCK not in blocks and sorted(blocks) == [1, 2, 3, 4]


def test_a_refused_allocation_changes_nothing() -> None:
    pool = _pool(5)
    assert pool.allocate(5) is None and pool.num_allocatable == 4
    pool.check()


@pytest.mark.parametrize("pool", [_pool(4), SlabPool(4, 3)])
def test_a_second_release_is_an_error(pool: BlockPool) -> None:
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks[:1])


def test_a_free_block_cannot_be_held() -> None:
    with pytest.raises(KeyError):
        _pool().hold([1])


def test_a_release_waits_for_the_newest_step_in_flight() -> None:
    pool = _pool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.submitted(1)
    pool.submitted(2)
    pool.release(blocks)
    pool.retired(1)
    assert pool.allocate(1) is None and pool.num_releasing == 2
    pool.retired(2)
    assert pool.num_releasing == 0 and pool.allocate(2) is not None


def test_check_notices_damage() -> None:
    """check() guards every other test: it has to see a lost, a doubled and a misfiled block."""
    lost, doubled, misfiled, owned = (_pool() for _ in range(4))
    lost._free.pop()
    doubled._free[0] = doubled._free[1]
    misfiled._indexed.add(1)
    owned._references[NULL_BLOCK] = 1
    for pool in (lost, doubled, misfiled, owned):
        with pytest.raises(AssertionError):
            pool.check()


def test_a_slab_is_taken_whole() -> None:
    with pytest.raises(AssertionError, match="a slab is 3 blocks"):
        SlabPool(7, 3).allocate(2)

"""The KV manager against a naive model that remembers, for every block, which tokens' KV it holds.

The model has a memory (what each slot of each block was last written with) and a plain dictionary of what was committed.
It knows nothing of trees, hashes, reference counts or LRU lists: a hit must be exactly as long as a search of the
dictionary says, and every slot the sequence can see must hold its own tokens, written under its own salt.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import pytest
from host_simulation import check_index, node_path
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ridgeline.cache.manager import Hit, KVManager, SequenceBlocks
from ridgeline.cache.prefix_cache import Node
from ridgeline.sizes.kv_spec import KVGroupSpec, blocks_for, group_layers

SIZE = 2
NUM_BLOCKS = 14
SHAPES: list[tuple[int | None, ...]] = [(None,), (3,), (None, 4), (1, None), (5, 2)]


def groups_of(windows: tuple[int | None, ...], size: int = SIZE) -> list[KVGroupSpec]:
    return [KVGroupSpec((layer,), window, size, 1, 8) for layer, window in enumerate(windows)]


@dataclass(eq=False)
class Live:
    """A sequence as the model sees it."""

    blocks: SequenceBlocks
    tokens: array[int]
    salt: str
    computed: int
    indexable: bool                                      # its new blocks can be found: not after a fork


class ManagerMachine(RuleBasedStateMachine):
    @initialize(windows=st.sampled_from(SHAPES))
    def set_up(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.manager = KVManager(groups_of(windows), NUM_BLOCKS)
        self.memory: dict[int, tuple[int, str, tuple[int, ...]]] = {}    # slot -> group, salt, tokens up to it
        self.findable: dict[tuple[int, str, tuple[int, ...]], int] = {}  # group, salt, whole blocks -> block
        self.live: list[Live] = []
        self.step = self.retired = 0

    # -- the model -----------------------------------------------------------------------------------------------------

    def _present(self, group: int, salt: str, tokens: array[int], count: int) -> int:
        """The block that holds the KV of block number `count` (from 1) of these tokens, if it can be found."""
        return self.findable.get((group, salt, tuple(tokens[: count * SIZE])), 0)

    def _longest(self, salt: str, tokens: array[int], limit: int) -> int:
        """Tokens of the longest prefix whose visible blocks can all be found."""
        for count in range(limit // SIZE, 0, -1):
            visible = [
                (group, number)
                for group, window in enumerate(self.windows)
                for number in range(1, count + 1)
                if window is None or number * SIZE > count * SIZE - window + 1   # its last slot is in sight
            ]
            if all(self._present(group, salt, tokens, number) for group, number in visible):
                return count * SIZE
        return 0

    def _check_visible(self, live: Live) -> None:
        """Everything the next query sees is there, and is its own."""
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, live.computed - window + 1)
            for position in range(first, live.computed):
                block = live.blocks.tables[group][position // SIZE]
                assert block, f"position {position} was freed too early"
                assert self.memory[block * SIZE + position % SIZE] == (
                    group, live.salt, tuple(live.tokens[: position + 1])
                ), f"position {position} of group {group} is somebody else's"

    def _forget_overwritten(self, blocks: list[int]) -> None:
        """Blocks that were handed out hold nothing any more."""
        gone = set(blocks)
        self.findable = {key: block for key, block in self.findable.items() if block not in gone}

    def _enter(self, hit: Hit, tokens: array[int], salt: str, room: int, indexable: bool) -> None:
        before = self._state()
        blocks = self.manager.start(hit, min(len(tokens), hit.num_tokens + room))
        if blocks is None:
            assert self._state() == before, "a refused start changed something"
            return
        assert all(len(table) * SIZE >= min(len(tokens), hit.num_tokens + room) for table in blocks.tables)
        new = [block for table in blocks.tables for block in table[hit.num_tokens // SIZE :]]
        self._forget_overwritten(new)
        self.live.append(Live(blocks, tokens, salt, hit.num_tokens, indexable))
        self._check_visible(self.live[-1])

    def _state(self) -> tuple[object, ...]:
        pool = self.manager.pool
        return list(pool._references), list(pool._free), list(pool._cached), sorted(pool._indexed), pool.num_releasing

    # -- the rules -----------------------------------------------------------------------------------------------------

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "", "s"]),
        room=st.integers(1, 6),
    )
    def start(self, tokens: list[int], salt: str, room: int) -> None:
        values = array("i", tokens)
        hit = self.manager.lookup(values, salt, len(values) - 1)
        assert hit.num_tokens == self._longest(salt, values, len(values) - 1)
        self._enter(hit, values, salt, room, indexable=True)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), room=st.integers(1, 4))
    def fork(self, data: st.DataObject, room: int) -> None:
        """Another answer from the same prompt: what the source has computed is shared, up to a block border."""
        source = data.draw(st.sampled_from(self.live))
        hit = self.manager.fork(source.blocks, source.salt, min(source.computed, len(source.tokens) - 1))
        assert hit.num_tokens % SIZE == 0 and hit.num_tokens < len(source.tokens)
        if all(window is None for window in self.windows):
            assert hit.num_tokens == min(source.computed, len(source.tokens) - 1) // SIZE * SIZE
        self._enter(hit, array("i", source.tokens), source.salt, room, indexable=not hit.num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5), more=st.integers(0, 1))
    def compute(self, data: st.DataObject, count: int, more: int) -> None:
        """Grow, write KV, commit, and learn another token if all are computed: one step of one sequence."""
        live = data.draw(st.sampled_from(self.live))
        end = min(live.computed + count, len(live.tokens))
        before = self._state()
        entries = self.manager.grow(live.blocks, end)
        if entries is None:
            assert self._state() == before, "a refused growth changed something"
            return
        assert entries == [
            (group, index, table[index])
            for group, table in enumerate(live.blocks.tables)
            for index in range(len(table) - len(entries) // len(self.windows), len(table))
        ]
        self._forget_overwritten([block for _, _, block in entries])
        self._check_visible(live)
        for position in range(live.computed, end):
            for group, table in enumerate(live.blocks.tables):
                block = table[position // SIZE]
                assert self.manager.pool.references(block) == 1, "a shared block is written to"
                self.memory[block * SIZE + position % SIZE] = (group, live.salt, tuple(live.tokens[: position + 1]))
        tables = [list(table) for table in live.blocks.tables]
        done, live.computed = live.computed // SIZE, end
        self.manager.commit(live.blocks, live.tokens, end)
        for number in range(done + 1, end // SIZE + 1):
            for group, table in enumerate(tables):
                if live.indexable:
                    self.findable.setdefault((group, live.salt, tuple(live.tokens[: number * SIZE])), table[number - 1])
        self._check_visible(live)
        if end == len(live.tokens) and len(live.tokens) < 16:
            live.tokens.append(more)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        self.manager.free(live.blocks)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        """A failure: nothing this sequence holds may be found again."""
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        self._forget_overwritten([block for table in live.blocks.tables for block in table])
        self.manager.distrust(live.blocks)
        self.manager.free(live.blocks)

    @precondition(lambda self: self.step - self.retired < 2)
    @rule()
    def submit(self) -> None:
        self.step += 1
        self.manager.pool.submitted(self.step)

    @precondition(lambda self: self.retired < self.step)
    @rule()
    def retire(self) -> None:
        self.retired += 1
        self.manager.pool.retired(self.retired)

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        pool = self.manager.pool
        pool.check()
        check_index(self.manager, [live.blocks for live in self.live])
        for block, node in self.manager.cache._owner.items():
            group, (salt, tokens) = node.blocks.index(block), node_path(node)
            assert self.findable[group, salt, tuple(tokens)] == block, "a block is indexed that should not be found"
        references = [0] * NUM_BLOCKS
        for table in (table for live in self.live for table in live.blocks.tables):
            for block in table:
                references[block] += bool(block)
        for _, blocks in pool._in_flight:
            for block in blocks:
                references[block] += 1
        assert [pool.references(block) for block in range(NUM_BLOCKS)] == references

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for live in self.live:
                self.manager.free(live.blocks)
            self.manager.pool.retired(self.step)
            self.manager.pool.check()
            assert self.manager.num_free == NUM_BLOCKS - 1, "a block leaked"
            everything = self.manager.pool.allocate(NUM_BLOCKS - 1)
            assert everything is not None and len(self.manager.cache) == 0, "a node outlived its blocks"


TestManager = pytest.mark.reliability("P-01")(ManagerMachine.TestCase)
TestManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


# -- exact numbers -----------------------------------------------------------------------------------------------------


def run_through(manager: KVManager, tokens: list[int], chunk: int = 1_000, salt: str = "") -> tuple[SequenceBlocks, int]:
    """A sequence from lookup to its last token; also the most blocks it held at once."""
    values = array("i", tokens)
    hit = manager.lookup(values, salt, len(values) - 1)
    computed, most = hit.num_tokens, 0
    blocks = manager.start(hit, min(len(values), computed + chunk))
    assert blocks is not None
    while computed < len(values):
        end = min(len(values), computed + chunk)
        assert manager.grow(blocks, end) is not None
        most = max(most, sum(1 for table in blocks.tables for block in table if block))
        manager.commit(blocks, values, end)
        computed = end
    return blocks, most


def test_a_hit_is_whole_blocks_and_leaves_the_last_token() -> None:
    manager = KVManager(groups_of((None,), 4), 20)
    blocks, _ = run_through(manager, list(range(12)))
    table = list(blocks.tables[0])
    manager.free(blocks)
    for length, found in ((13, 12), (12, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        hit = manager.lookup(array("i", range(length)), "", length - 1)
        assert (hit.num_tokens, hit.tables) == (found, [table[: found // 4]])
    assert manager.lookup(array("i", [*range(8), 99, 99, 99, 99, 0]), "", 12).num_tokens == 8
    assert manager.lookup(array("i", range(12)), "other", 11).num_tokens == 0


def test_only_started_sequences_count_as_lookups() -> None:
    manager = KVManager(groups_of((None,), 4), 20)
    run_through(manager, list(range(9)))
    for _ in range(3):
        hit = manager.lookup(array("i", range(10)), "", 9)
    assert manager.start(hit, 10) is not None
    counters = manager.counters
    assert (counters.lookups, counters.asked_tokens, counters.hit_tokens) == (2, 19, 8)


def test_later_blocks_are_evicted_before_earlier_ones() -> None:
    """A shorter prefix stays useful longer."""
    manager = KVManager(groups_of((None,), 4), 5)
    blocks, _ = run_through(manager, list(range(16)))
    manager.free(blocks)
    for left in (12, 8, 4, 0):
        assert manager.pool.allocate(1) is not None
        assert manager.lookup(array("i", range(16)), "", 16).num_tokens == left
    assert manager.counters.evicted == 4


def test_a_hit_holds_its_blocks_before_it_allocates() -> None:
    """Otherwise it could evict what it is about to use."""
    manager = KVManager(groups_of((None,), 4), 5)
    blocks, _ = run_through(manager, list(range(16)))
    manager.free(blocks)
    started = manager.start(manager.lookup(array("i", range(16)), "", 8), 16)
    assert started is not None and len(set(started.tables[0])) == 4
    assert manager.lookup(array("i", range(16)), "", 16).num_tokens == 8


def test_a_fork_gets_a_copy_of_what_a_block_holds_in_part() -> None:
    manager = KVManager(groups_of((None, 40), 4), 20, prefix_caching=False)
    source, _ = run_through(manager, list(range(10)))
    hit = manager.fork(source, "", 9)
    manager.add_copy(hit, source, 9)
    forked = manager.start(hit, 10)
    assert hit.num_tokens == 9 and forked is not None
    assert [(op.kind, op.group, op.source, op.target) for op in manager.copies(hit, forked)] == [
        ("copy", group, source.tables[group][2], forked.tables[group][2]) for group in range(2)
    ]
    assert forked.committed == 2 and manager.counters.copied_blocks == 2


def test_a_whole_block_or_one_that_is_not_there_is_not_copied() -> None:
    manager = KVManager(groups_of((None,), 4), 20, prefix_caching=False)
    source, _ = run_through(manager, list(range(10)))
    for limit, computed in ((9, 8), (9, 4), (8, 8)):     # nothing beyond the shared blocks; less than they hold
        hit = manager.fork(source, "", limit)
        manager.add_copy(hit, source, computed)
        assert hit.num_tokens == 8 and not hit.copied
    contiguous = KVManager(groups_of((None,), 4), 40, prefix_caching=False, contiguous_tokens=12)
    kept, _ = run_through(contiguous, list(range(10)))
    hit = contiguous.fork(kept, "", 9)
    contiguous.add_copy(hit, kept, 3)
    assert hit.num_tokens == 0 and not hit.copied        # a reservation is written from its first token on


def test_a_fork_shares_whole_blocks_only() -> None:
    """The block at the end of the prompt is computed again: two answers will write different tokens into it."""
    manager = KVManager(groups_of((None,), 4), 20, prefix_caching=False)
    values = array("i", range(10))
    source, _ = run_through(manager, list(values))
    hit = manager.fork(source, "", 9)
    forked = manager.start(hit, 10)
    assert hit.num_tokens == 8 and forked is not None
    assert forked.tables[0][:2] == source.tables[0][:2] and forked.tables[0][2] != source.tables[0][2]
    assert manager.counters.forked_blocks == 2 and manager.exclusive_blocks(forked) == 1
    manager.free(source)
    assert manager.exclusive_blocks(forked) == 3
    manager.free(forked)
    assert manager.num_free == 19


def test_a_window_frees_what_lies_behind_it() -> None:
    """Window 6, blocks of 4: after 20 tokens the next query sees 15..19, so blocks 0 to 2 are gone and 3 is not."""
    manager = KVManager(groups_of((None, 6), 4), 40)
    blocks, _ = run_through(manager, list(range(20)), chunk=4)
    assert [bool(block) for block in blocks.tables[1]] == [False] * 3 + [True] * 2
    assert all(blocks.tables[0]) and manager.counters.window_freed == 3


def test_a_hit_behind_a_window_needs_only_what_is_in_sight() -> None:
    manager = KVManager(groups_of((6,), 4), 40)
    blocks, _ = run_through(manager, list(range(20)))
    manager.free(blocks)
    hit = manager.lookup(array("i", range(30)), "", 29)
    assert hit.num_tokens == 20 and [bool(block) for block in hit.tables[0]] == [False] * 3 + [True] * 2
    nodes = [_node(manager, depth) for depth in range(6)]
    for gone in (1, 2, 3):                               # out of sight: they may go
        manager.cache.evict(nodes[gone].blocks[0])
    assert manager.lookup(array("i", range(30)), "", 29).num_tokens == 20
    manager.cache.evict(nodes[4].blocks[0])              # its last slot is in sight
    assert manager.lookup(array("i", range(30)), "", 29).num_tokens == 0


def _bytes(index: int) -> bytes:
    return array("i", range(index * 4, index * 4 + 4)).tobytes()


def _node(manager: KVManager, depth: int) -> Node:
    node = manager.cache.root("")
    for index in range(depth):
        found = manager.cache.find(node, _bytes(index))
        assert found is not None
        node = found
    return node


def test_distrusted_blocks_are_out_of_the_cache() -> None:
    manager = KVManager(groups_of((None,), 4), 20)
    blocks, _ = run_through(manager, list(range(12)))
    sharing = manager.start(manager.lookup(array("i", range(12)), "", 8), 12)
    assert sharing is not None
    manager.distrust(blocks)
    manager.free(blocks)
    assert manager.lookup(array("i", range(12)), "", 12).num_tokens == 0
    assert all(manager.pool.references(block) == 1 for block in sharing.tables[0]), "whoever shares them keeps them"
    manager.free(sharing)
    assert manager.num_free == 19 and len(manager.cache) == 0


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("budget", [1, 2, 5, 18])
def test_blocks_for_is_the_most_a_sequence_ever_holds(size: int, window: int, budget: int) -> None:
    """Whatever the chunks: never more than promised, and for some chunks exactly that."""
    rng, tokens = random.Random(0), list(range(70))
    most = 0
    for attempt in range(40):
        manager = KVManager(groups_of((window,), size), 80, prefix_caching=False)
        blocks = manager.start(manager.lookup(array("i", tokens), "", 0), 0)
        assert blocks is not None
        computed = 0
        while computed < len(tokens):
            small = attempt % 2 and computed % size != size - 1     # creep to the last slot of a block, then leap
            end = min(len(tokens), computed + (1 if small else rng.randint(1, budget) if attempt > 1 else budget))
            assert manager.grow(blocks, end) is not None
            most = max(most, sum(1 for block in blocks.tables[0] if block))
            if end // size > blocks.committed:                       # the scheduler commits when a block is full
                manager.commit(blocks, array("i", tokens), end)
            computed = end
    assert most == blocks_for(groups_of((window,), size), len(tokens), budget)


def test_blocks_beyond_a_hit() -> None:
    """30 tokens are 8 blocks per group; the hit covers 5, of which the window group keeps the last 2."""
    manager = KVManager(groups_of((None, 6), 4), 60)
    blocks, _ = run_through(manager, list(range(20)))
    hit = manager.lookup(array("i", range(30)), "", 29)
    assert hit.num_tokens == 20 and manager.blocks_beyond(hit, 30, 16) == 3 + 3
    assert manager.blocks_beyond(hit, 30, 2) == 3 + 2, "the window slides: 4 blocks at once, 2 of them are shared"
    manager.free(blocks)
    assert manager.blocks_beyond(hit, 30, 16) == 3 + 3 + 5 + 2, "what nobody holds comes out of the pool, too"


def test_a_contiguous_reservation_is_one_run_per_group() -> None:
    manager = KVManager(groups_of((None, 6), 4), 41, prefix_caching=False, contiguous_tokens=40)
    assert not manager.grows and manager.blocks_for(3, 16) == 20
    blocks, _ = run_through(manager, list(range(30)))
    for table in blocks.tables:
        assert table == list(range(table[0], table[0] + 10)), "a window frees nothing of a reservation"
    assert manager.fork(blocks, "", 29).num_tokens == 0
    second, _ = run_through(manager, list(range(3)))
    assert manager.start(manager.lookup(array("i", [1]), "", 0), 1) is None and manager.num_free == 0
    manager.free(blocks)
    manager.free(second)
    assert manager.num_free == 40


def test_layers_are_grouped_by_window_into_equal_pages() -> None:
    windows: list[int | None] = [None if layer % 6 == 5 else 512 for layer in range(26)]
    grouped = group_layers(windows)
    assert sorted(layer for _, layers in grouped for layer in layers) == list(range(26))
    assert [len(layers) for window, layers in grouped if window is None] == [4]
    assert [len(layers) for window, layers in grouped if window] == [4, 4, 4, 4, 4, 2]
    assert group_layers([None] * 5) == [(None, (0, 1, 2, 3, 4))]

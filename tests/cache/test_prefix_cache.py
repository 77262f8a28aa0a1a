"""The prefix tree alone: what is found, what is kept, and that a hash collision is a miss and never a wrong block."""

from __future__ import annotations

import gc
import hashlib
import random
from array import array

import pytest
from host_simulation import check_index

from ridgeline.cache.manager import KVManager
from ridgeline.cache.prefix_cache import Node, NoPrefixCache, PrefixCache
from ridgeline.sizes.kv_spec import KVGroupSpec


def _chain(cache: PrefixCache, blocks: list[bytes], first_id: int, salt: str = "") -> list[Node]:
    """Insert a path of blocks with consecutive ids, one group."""
    nodes, parent = [], cache.root(salt)
    for offset, tokens in enumerate(blocks):
        node, taken = cache.insert(parent, tokens, [first_id + offset])
        assert node is not None and taken == [first_id + offset]
        nodes.append(node)
        parent = node
    return nodes


def test_a_path_is_found_block_by_block() -> None:
    cache = PrefixCache(1)
    nodes = _chain(cache, [b"aa", b"bb"], 1)
    found = cache.find(cache.root(""), b"aa")
    assert found is nodes[0] and cache.find(found, b"bb") is nodes[1]
    assert cache.find(found, b"aa") is None and cache.find(cache.root(""), b"bb") is None


def test_a_node_is_one_object_for_the_collector() -> None:
    """It looks through all of them while everybody waits."""
    cache = PrefixCache(2)
    gc.collect()
    before, parent = len(gc.get_objects()), cache.root("")
    for number in range(1000):
        node, _ = cache.insert(parent, number.to_bytes(4, "little"), [2 * number + 1, 2 * number + 2])
        assert node is not None
        parent = node
    gc.collect()
    assert len(gc.get_objects()) - before < 1100


def test_equal_tokens_below_different_parents_are_different_blocks() -> None:
    cache = PrefixCache(1)
    first = _chain(cache, [b"aa", b"xx"], 1)
    second = _chain(cache, [b"bb", b"xx"], 3)
    assert first[1] is not second[1] and first[1].blocks == (2,) and second[1].blocks == (4,)


def test_salts_share_nothing() -> None:
    cache = PrefixCache(1)
    _chain(cache, [b"aa"], 1, salt="alice")
    assert cache.find(cache.root("bob"), b"aa") is None and cache.find(cache.root(""), b"aa") is None
    assert cache.find(cache.root("alice"), b"aa") is not None


def test_the_first_to_commit_keeps_its_block() -> None:
    cache = PrefixCache(2)
    node, taken = cache.insert(cache.root(""), b"aa", [1, 0])
    again, more = cache.insert(cache.root(""), b"aa", [3, 4])
    assert again is node and taken == [1] and more == [4], "only what was missing is taken"
    assert node is not None and node.blocks == (1, 4)


def test_an_evicted_block_leaves_a_hole_that_can_be_filled_again() -> None:
    cache = PrefixCache(1)
    nodes = _chain(cache, [b"aa", b"bb"], 1)
    cache.evict(1)
    assert cache.find(cache.root(""), b"aa") is nodes[0] and nodes[0].blocks == (0,), "its child still hangs on it"
    assert cache.insert(cache.root(""), b"aa", [7]) == (nodes[0], [7])


def test_nodes_go_when_nobody_needs_them() -> None:
    cache = PrefixCache(1)
    _chain(cache, [b"aa", b"bb", b"cc"], 1)
    for block in (1, 2):
        cache.evict(block)
        assert len(cache) == 3
    cache.evict(3)
    assert len(cache) == 0 and not cache._owner


def test_a_node_somebody_stands_on_stays_without_blocks() -> None:
    cache = PrefixCache(1)
    root = cache.root("")
    (node,) = _chain(cache, [b"aa"], 1)
    root.users += 1
    cache.stand_on(node, instead_of=root)
    cache.evict(1)
    assert cache.insert(node, b"bb", [5])[1] == [5] and cache.find(cache.root(""), b"aa") is node
    cache.leave(node)
    cache.evict(5)
    assert len(cache) == 0


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_a_remembered_path_changes_nothing(windows: tuple[int | None, ...]) -> None:
    """walk() finds what block by block is found, while sequences come and go and the pool evicts."""
    rng = random.Random(0)
    manager = KVManager([KVGroupSpec((layer,), window, 2, 1, 8) for layer, window in enumerate(windows)], 20 * len(windows))
    stems = [[rng.randrange(2) for _ in range(12)] for _ in range(2)]
    remembered = 0
    for _ in range(1500):
        stem = rng.choice(stems)
        tokens = array("i", stem[: rng.randrange(2, 13)] + [rng.randrange(2) for _ in range(rng.randrange(6))])
        limit = rng.randrange(len(tokens) + 1)
        root = node = manager.cache.root("")
        plain = []
        for start in range(0, limit - 1, 2):
            child = manager.cache.find(node, tokens[start : start + 2].tobytes())
            if child is None:
                break
            plain.append(child)
            node = child
        remembered += len(plain) > 1 and plain[0].newest is not None
        found = manager.cache.walk(root, tokens, limit, 2)
        assert len(found) == len(plain) and all(a is b for a, b in zip(found, plain, strict=True))
        if rng.random() < 0.3:
            blocks = manager.start(manager.lookup(tokens, "", len(tokens) - 1), len(tokens))
            assert blocks is not None
            manager.commit(blocks, tokens, len(tokens))
            manager.free(blocks)
    assert remembered > 300 and manager.counters.evicted > 100, "both are put to the test"


def test_a_node_that_goes_leaves_no_garbage() -> None:
    """Where the collector rests during steps, what is dropped has to go by itself."""
    def nodes() -> int:
        return sum(type(each) is Node for each in gc.get_objects())

    gc.collect()
    before = nodes()
    cache = PrefixCache(1)
    tokens = array("i", range(8))
    _chain(cache, [tokens[start : start + 2].tobytes() for start in range(0, 8, 2)], 1)
    assert cache.walk(cache.root(""), tokens, 8, 2)[0].newest is not None
    gc.disable()
    try:
        for block in (4, 3, 2, 1):
            cache.evict(block)
        assert len(cache) == 0 and nodes() == before
    finally:
        gc.enable()


def test_keys_are_secret_to_the_process() -> None:
    """Otherwise somebody who may choose prompts could compute collisions at home."""
    assert PrefixCache(1).root("").key != PrefixCache(1).root("").key


def test_off_finds_and_keeps_nothing() -> None:
    cache = NoPrefixCache()
    assert cache.insert(cache.root(""), b"aa", [1]) == (None, [])
    assert cache.find(cache.root(""), b"aa") is None and len(cache) == 0


@pytest.mark.reliability("S-07")
@pytest.mark.parametrize("bits", [0, 8])
def test_forced_hash_collisions_never_reuse_a_wrong_block(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 bits most lookups collide with something, among them roots of different salts; with 0 bits all do."""

    def weak(parent: int, tokens: bytes) -> int:
        return hashlib.blake2b(str(parent % 2**64).encode() + tokens, digest_size=1).digest()[0] & (2**bits - 1)

    monkeypatch.setattr(PrefixCache, "_key", staticmethod(weak))
    size, rng = 4, random.Random(bits)
    manager = KVManager([KVGroupSpec((0,), None, size, 1, 8)], 400)
    contents: dict[int, tuple[str, tuple[int, ...]]] = {}            # block -> salt and all tokens up to its end
    wrong = hits = collisions = 0
    for _ in range(10_000):
        salt = str(rng.randrange(300)) if rng.random() < 0.3 else ""
        tokens = array("i", [rng.randrange(3) for _ in range(rng.randrange(1, 30))])
        hit = manager.lookup(tokens, salt, len(tokens) - 1)
        hits += hit.num_tokens // size
        for index, block in enumerate(hit.tables[0]):
            wrong += contents[block] != (salt, tuple(tokens[: (index + 1) * size]))
        blocks = manager.start(hit, len(tokens))
        assert blocks is not None
        for index in range(hit.num_tokens // size, len(tokens) // size):
            contents[blocks.tables[0][index]] = (salt, tuple(tokens[: (index + 1) * size]))
        manager.commit(blocks, tokens, len(tokens))
        collisions += blocks.node is None
        manager.free(blocks)
    assert wrong == 0
    assert collisions > 1_000, "the weak hash did not collide: the test shows nothing"
    assert hits > (1_000 if bits else 20), "nothing was reused: the test shows nothing"
    manager.pool.check()
    check_index(manager, [])
    assert manager.num_free == 399

"""The approximate prefix tree: what it finds, how it forgets, how it corrects itself."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from ridgeline.engine.replicas.prefix_tree import (
    CHUNK,
    FEWEST_NODES,
    MOST_BYTES,
    MOST_CHAIN,
    NUM_SHORT,
    PrefixTree,
    bytes_of,
    chain_of,
    nodes_of,
    prompt_chain,
)
from ridgeline.route.prompt_text import prompt_of, with_answer


def text(seed: int, chunks: int) -> bytes:
    return random.Random(seed).randbytes(chunks * CHUNK)


def test_a_prompt_is_found_as_far_as_it_is_the_same() -> None:
    tree = PrefixTree()
    first = text(1, 10)
    tree.add(chain_of(first))
    assert tree.match(chain_of(first + text(2, 3))) == 10
    assert tree.match(chain_of(first[: 4 * CHUNK] + text(3, 6))) == 4
    assert tree.match(chain_of(b"x" + first)) == 0
    assert tree.match(chain_of(first, root=7)) == 0              # another model or cache salt


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    tree = PrefixTree(100)
    old, kept = chain_of(text(1, 40)), chain_of(text(2, 40))
    tree.add(old)
    tree.add(kept)
    for seed in range(3, 200):
        tree.add(chain_of(text(seed, 5)))
        tree.add(kept)
        assert len(tree) <= 100
    assert tree.match(old) == 0 and tree.match(kept) == 40
    tree.add(chain_of(text(999, 150)))                           # larger than the tree
    assert len(tree) == 100 and tree.match(chain_of(text(999, 150))) == 100      # its beginning stays


class Counted(OrderedDict[int, int]):
    looked = 0

    def __contains__(self, node: object) -> bool:
        Counted.looked += 1
        return super().__contains__(node)

    def __getitem__(self, node: int) -> int:
        Counted.looked += 1
        return super().__getitem__(node)


def test_a_long_prompt_is_looked_up_by_halves() -> None:
    """Each of its chunks was looked up in every replica's tree, twice: tens of milliseconds of the event loop."""
    tree = PrefixTree()
    tree._used = Counted()
    long = chain_of(text(1, MOST_CHAIN))
    for known in (0, 1, 17, MOST_CHAIN - 1, MOST_CHAIN):
        if known:
            tree.add(long[:known])
        Counted.looked = 0
        assert tree.match(long) == known
        assert 0 < Counted.looked <= MOST_CHAIN.bit_length()
    Counted.looked = 0
    assert tree.add(long).runs == [(0, 5 - 1)] and Counted.looked <= 3 * MOST_CHAIN.bit_length()


def test_what_is_found_by_halves_is_what_a_look_at_each_chunk_finds() -> None:
    """Prompts that share beginnings, in a tree that forgets and is corrected."""
    rng, tree = random.Random(5), PrefixTree(60)
    texts = [text(seed, 40) for seed in range(4)]
    for _ in range(3000):
        one = chain_of(rng.choice(texts)[: CHUNK * rng.randrange(41)] + text(rng.randrange(6), rng.randrange(30)))
        known = next((place for place, node in enumerate(one) if node not in tree._used), len(one))
        uses = [tree._used[node] for node in one[:known]]
        hit = tree.add(one)
        assert hit.nodes == known and [hit.last_use(place) for place in range(known)] == uses
        if rng.random() < 0.2:
            tree.correct(hit, rng.randrange(known + 1))


def test_a_prompt_of_any_size_has_a_bounded_chain() -> None:
    longest = bytes(MOST_BYTES + 100 * CHUNK)
    assert len(prompt_chain(longest, 0)) == MOST_CHAIN
    # A simulated replica's cache has blocks of one size, also of the 900 KB in which a prompt's chunks are longer.
    assert len(chain_of(longest, 0, 64)) == len(longest) // 64


def test_what_the_replica_lost_is_dropped_with_all_that_is_older() -> None:
    tree = PrefixTree()
    chains = [chain_of(text(seed, 400)) for seed in range(5)]
    for chain in chains:
        tree.add(chain)
    hit = tree.add(chains[2])
    assert hit.nodes == 400
    assert tree.correct(hit, 0)                                  # the replica had nothing of it
    assert [tree.match(chain) for chain in chains] == [0, 0, 400, 400, 400]
    assert tree.limit == 1200                                    # what is left is what the replica holds
    tree.add(chain_of(text(9, 400)))
    assert tree.match(chains[3]) == 0                            # the oldest one now


def test_a_confirmed_hit_lets_a_shrunken_tree_grow_again() -> None:
    tree = PrefixTree(10_000)
    chain = chain_of(text(1, 800))
    tree.add(chain)
    tree.correct(tree.add(chain), 0)
    assert tree.limit == 800
    assert not tree.correct(tree.add(chain), 800)
    assert tree.limit == 900
    for _ in range(200):
        tree.correct(tree.add(chain), 800)
    assert tree.limit == 10_000


def test_a_prompt_that_is_still_being_computed_corrects_nothing() -> None:
    tree = PrefixTree()
    others, chain = chain_of(text(1, 300)), chain_of(text(2, 300))
    tree.add(others)
    tree.add(chain)
    hit = tree.add(chain, settled=2)                             # the second prompt has no first token yet
    assert not tree.correct(hit, 0) and tree.match(others) == 300


def test_corrections_never_make_the_tree_useless() -> None:
    tree = PrefixTree()
    chain = chain_of(text(1, 3))
    tree.add(chain)
    tree.correct(tree.add(chain), 0)
    assert tree.limit == FEWEST_NODES


def test_chunks_are_longer_far_behind() -> None:
    for nodes in (0, 1, NUM_SHORT - 1, NUM_SHORT, NUM_SHORT + 1, MOST_CHAIN):
        size = bytes_of(nodes)
        assert nodes_of(size) == nodes and nodes_of(size + CHUNK - 1) == nodes and (not nodes or nodes_of(size - 1) == nodes - 1)
        assert len(prompt_chain(bytes(size), 1)) == nodes
    assert bytes_of(MOST_CHAIN) == MOST_BYTES and len(prompt_chain(bytes(2 * MOST_BYTES), 1)) == MOST_CHAIN


@pytest.mark.parametrize("size", [1_000, NUM_SHORT * CHUNK - 1_000, NUM_SHORT * CHUNK + 5_000])
def test_the_next_turn_of_a_conversation_finds_prompt_and_answer(size: int) -> None:
    system = {"role": "system", "content": "s" * size}
    turn = [system, {"role": "user", "content": "u" * 700}]
    answer = "a" * 900
    first = prompt_of({"model": "m", "messages": turn})
    tree = PrefixTree()
    tree.add(first.chain)
    following = [*turn, {"role": "assistant", "content": answer}, {"role": "user", "content": "more" * 100}]
    second = prompt_of({"model": "m", "messages": following})
    assert tree.match(second.chain) == nodes_of(len(first.text))
    whole = with_answer(first, answer)
    assert whole == prompt_chain(first.text + b"\x1eassistant\x1f" + answer.encode(), first.root)
    tree.extend(whole)
    assert tree.match(second.chain) == nodes_of(len(first.text) + len("?assistant?") + 900)


def test_tools_parts_and_token_ids_are_prompts_too() -> None:
    message = {"role": "user", "content": "hi"}
    plain = prompt_of({"messages": [message]}).text
    assert prompt_of({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}).text == plain
    assert prompt_of({"messages": [message], "tools": [{"type": "function"}]}).text.endswith(plain)
    assert prompt_of({"messages": [message], "system": "be brief"}).text.endswith(plain)
    assert len(prompt_of({"prompt": list(range(100))}).text) == 400
    assert prompt_of({"prompt": ["a", "b"]}).text == b"ab"
    ids = [-1, 2**70]                                            # no token ids
    for odd in ({"messages": 3}, {"messages": [3, None]}, {"prompt": {"a": 1}}, {}, {"prompt": ids}, {"prompt": "\ud800"}):
        assert prompt_of(odd).text is not None

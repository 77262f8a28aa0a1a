"""The approximate prefix tree: what it finds, how it forgets, how it corrects itself."""

from __future__ import annotations

import random

from ridgeline.engine.replicas.prefix_tree import CHUNK, FEWEST_NODES, MOST_CHAIN, PrefixTree, chain_of
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


def test_a_prompt_of_any_size_has_a_bounded_chain() -> None:
    assert len(chain_of(bytes(CHUNK * (MOST_CHAIN + 100)))) == MOST_CHAIN


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


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    system = {"role": "system", "content": "s" * 1000}
    turn = [system, {"role": "user", "content": "u" * 700}]
    answer = "a" * 900
    first = prompt_of({"model": "m", "messages": turn})
    tree = PrefixTree()
    tree.add(first.chain)
    following = [*turn, {"role": "assistant", "content": answer}, {"role": "user", "content": "more" * 100}]
    second = prompt_of({"model": "m", "messages": following})
    assert tree.match(second.chain) == len(first.text) // CHUNK
    tree.extend(with_answer(first, answer))
    assert tree.match(second.chain) == (len(first.text) + len("?assistant?") + 900) // CHUNK


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

"""The prefix cache: a tree of full blocks, each found by a hash of (parent, its tokens).

          root(salt)
           ├─ [t0 … t15] ─ [t16 … t31] ─ …        a node is one block of tokens; `blocks` holds its KV, one id per group
           └─ [u0 … u15] ─ …

A key is Python's own hash of the parent's key and the token ids; a root's, of a secret of this cache and the salt. It only says
where to look: token ids, parents and salts are compared on every hit. So a collision is a miss, never a wrong answer, and
requests with different salts share nothing. Eviction is the pool's business: it calls evict() when it reuses a block.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, eq=False)
class Node:
    """There are as many as the cache has blocks, and now and then Python's collector looks through all of them: so a node is one
    object for it, which leaves tuples of numbers out. Lists it does not, nor tuples with a node in them."""

    key: int
    parent: Node | None
    tokens: bytes                                    # a root has its salt here
    blocks: tuple[int, ...]                          # one per group; 0 where the block is gone or was never kept
    users: int = 0                                   # children, and sequences whose newest full block this is
    newest: tuple[array[int], list[Node]] | None = None      # of a first block: the path last walked from it, see walk()


class PrefixCache:
    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._secret = int.from_bytes(os.urandom(8), "little")
        self._nodes: dict[int, Node] = {}
        self._owner: dict[int, Node] = {}              # block -> its node

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, salt: str) -> Node:
        """The parent of first blocks. Roots are not stored: equal salts give equal roots."""
        name = salt.encode()
        return Node(self._key(self._secret, name), None, name, ())

    def find(self, parent: Node, tokens: bytes) -> Node | None:
        node = self._nodes.get(self._key(parent.key, tokens))
        return node if node is not None and node.tokens == tokens and self._same(node.parent, parent) else None

    def walk(self, root: Node, tokens: array[int], limit: int, size: int) -> list[Node]:
        """The nodes of the longest known prefix of at most `limit` tokens, in blocks of `size`.

        Most requests with a common prefix share it with the request before them. So every first block remembers the path that
        was last walked from it: comparing all its tokens at once takes a tenth of the time of hashing block by block.
        """
        first = self.find(root, tokens[:size].tobytes()) if limit >= size else None
        if first is None:
            return []
        path = [first, *_in_common(first.newest, tokens, limit, size)]
        remembered = len(path)
        for start in range(remembered * size, limit - size + 1, size):
            child = self.find(path[-1], tokens[start : start + size].tobytes())
            if child is None:
                break
            path.append(child)
        if len(path) > remembered:
            first.newest = (tokens[: len(path) * size], path[1:])        # without the first: it would hold itself
        return path

    def insert(self, parent: Node, tokens: bytes, blocks: list[int]) -> tuple[Node | None, list[int]]:
        """Make these blocks findable. Returns the node and the blocks that were taken into the index.

        A node that is there already keeps its blocks and only gains those it lacks. None means a hash collision: this
        branch of the tree cannot grow here.
        """
        key, owner = self._key(parent.key, tokens), self._owner
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, tokens, ())
            parent.users += 1
            kept = [0] * self._num_groups
        elif node.tokens != tokens or not self._same(node.parent, parent):
            return None, []
        else:
            kept = [*node.blocks]
        taken = []
        for group, block in enumerate(blocks):
            if block and not kept[group] and block not in owner:
                kept[group] = block
                owner[block] = node
                taken.append(block)
        node.blocks = (*kept,)
        return node, taken

    def stand_on(self, node: Node, instead_of: Node) -> None:
        """A sequence moves on to `node`, which stays in the tree, blocks or not: what comes next hangs below it."""
        node.users += 1
        instead_of.users -= 1
        if not instead_of.users:
            self._prune(instead_of)

    def leave(self, node: Node) -> None:
        node.users -= 1
        if not node.users:
            self._prune(node)

    def evict(self, block: int) -> None:
        """The pool reuses this block: it holds something else from now on."""
        node = self._owner.pop(block)
        node.blocks = tuple(0 if each == block else each for each in node.blocks)
        if not any(node.blocks):
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Drop a node without blocks once nothing needs it, and its ancestors likewise.

        A node that is only passed through stays: behind a sliding window the early blocks go first, and the later ones
        are still worth finding.
        """
        walk: Node | None = node
        while walk is not None and walk.parent is not None and not walk.users and not any(walk.blocks):
            if self._nodes.get(walk.key) is not walk:
                return
            del self._nodes[walk.key]
            walk.newest = None                           # whose nodes hold on to this one
            walk.parent.users -= 1
            walk = walk.parent

    @staticmethod
    def _same(a: Node | None, b: Node) -> bool:
        """Nodes are compared by identity, which no collision can fake; roots are made anew each time, so by salt."""
        return a is b or (a is not None and a.parent is None and b.parent is None and a.tokens == b.tokens)

    @staticmethod
    def _key(parent: int, tokens: bytes) -> int:
        """Python's hash of bytes is a SipHash keyed by a secret of the process, unless PYTHONHASHSEED names one: even then all
        that somebody can do who computes collisions is to make a prefix that he knows a miss."""
        return hash((parent, tokens))


def _in_common(newest: tuple[array[int], list[Node]] | None, tokens: array[int], limit: int, size: int) -> list[Node]:
    """The nodes behind the first that both paths have. Only one without blocks can have left the tree meanwhile."""
    if newest is None:
        return []
    length = min(len(newest[0]), limit)
    differ = np.frombuffer(newest[0], np.int32, length) != np.frombuffer(tokens, np.int32, length)
    same = int(differ.argmax()) if differ.any() else length
    nodes = newest[1][: same // size - 1]
    if not nodes:
        return []
    columns, gone = [node.blocks for node in nodes], (0,) * len(nodes[0].blocks)
    return nodes[: columns.index(gone)] if gone in columns else nodes


class NoPrefixCache(PrefixCache):
    """The off version: finds nothing, keeps nothing."""

    def __init__(self) -> None:
        super().__init__(0)

    def find(self, parent: Node, tokens: bytes) -> Node | None:
        return None

    def insert(self, parent: Node, tokens: bytes, blocks: list[int]) -> tuple[Node | None, list[int]]:
        return None, []

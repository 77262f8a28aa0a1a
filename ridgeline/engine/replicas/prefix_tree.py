"""What a replica's prefix cache probably holds: an approximate prefix tree with a bounded number of nodes.

A prompt is cut into chunks of CHUNK bytes. A node is a chunk together with all chunks before it, known by one hash, so the tree
is a table of hashes. A node is never used without those before it, and is removed before them: how far a prompt is known is found
by halves, with 11 probes of 1,920 chunks. Bytes, not tokens: the router has no tokenizer. Far behind, chunks are longer: all
of a prompt are noted with each request, on the event loop.

The tree is a guess. `correct` compares it with the cached tokens that an answer reports. Replicas evict what was used least
recently. So when a node is missing there, everything used before that node is missing too, and the nodes that are left are as
many as the cache holds.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

CHUNK = 128                          # bytes, about two KV blocks of 16 tokens
LONG_CHUNK = 1024                    # bytes of those behind the first ones
NUM_SHORT = 1024                     # first ones: 128 KB
MOST_BYTES = 2**20                   # of one prompt that are hashed; what follows counts as not cached
MOST_CHAIN = NUM_SHORT + (MOST_BYTES - NUM_SHORT * CHUNK) // LONG_CHUNK
MOST_NODES = 200_000                 # per replica: 25 MB of prompts or more, in about 30 MB of memory
FEWEST_NODES = 256                   # a correction never shrinks the limit below this
GROWTH = 8                           # each confirmed hit raises a shrunken limit by this part of its nodes

Chain = Sequence[int]                # the hashes of a prompt's chunks, each of its chunk and all before it


def chain_of(text: bytes, root: int = 0, size: int = CHUNK, most: int = sys.maxsize) -> list[int]:
    """Only whole chunks, `most` of them: a part of one would not be found again when the conversation grows. `root`: the node
    before them."""
    chain, last = [], root
    for start in range(0, min(len(text) - size + 1, most * size), size):
        last = hash((last, text[start : start + size]))
        chain.append(last)
    return chain


def prompt_chain(text: bytes, root: int, known: int = 0) -> list[int]:
    """The nodes of a prompt, behind its first `known` ones, of which `root` is the last."""
    chain = chain_of(text, root, CHUNK, max(0, NUM_SHORT - known))
    if known + len(chain) < NUM_SHORT:
        return chain
    rest = text[len(chain) * CHUNK :]
    return chain + chain_of(rest, chain[-1] if chain else root, LONG_CHUNK, MOST_CHAIN - max(NUM_SHORT, known))


def bytes_of(nodes: int) -> int:
    """Of a prompt, in its first nodes."""
    return nodes * CHUNK if nodes <= NUM_SHORT else NUM_SHORT * CHUNK + (nodes - NUM_SHORT) * LONG_CHUNK


def nodes_of(num_bytes: float) -> int:
    """The whole nodes in the first bytes of a prompt."""
    short = min(NUM_SHORT, int(num_bytes // CHUNK))
    return short + int(max(0.0, num_bytes - NUM_SHORT * CHUNK) // LONG_CHUNK)


@dataclass(slots=True)
class Hit:
    """What the tree knew of a prompt before the prompt was added to it."""

    nodes: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)    # (first node, when it and those behind it were last used)
    settled: int = 0                 # prompts sent before this number had been computed

    def last_use(self, node: int) -> int:
        return next(when for first, when in reversed(self.runs) if first <= node)


class PrefixTree:
    def __init__(self, most: int = MOST_NODES) -> None:
        self.limit = most            # how many nodes are kept: learned, at most `most`
        self._most = most
        self._used: OrderedDict[int, int] = OrderedDict()        # node -> when it was last used; the oldest first
        self._now = 0                # counts prompts

    def __len__(self) -> int:
        return len(self._used)

    @property
    def now(self) -> int:
        return self._now

    def match(self, chain: Chain) -> int:
        """How many of the prompt's nodes are known, from its beginning."""
        used = self._used
        return bisect_left(range(len(chain)), True, key=lambda place: chain[place] not in used)

    def add(self, chain: Chain, settled: int | None = None) -> Hit:
        """The prompt goes to this replica now. `settled`: as in Hit; None: all prompts before have been computed."""
        used, hit, place = self._used, Hit(self.match(chain)), 0
        while place < hit.nodes:                         # no node was used later than the one before it
            when = used[chain[place]]
            hit.runs.append((place, when))
            place = bisect_right(range(hit.nodes), -when, place, key=lambda later: -used[chain[later]])
        self._now += 1
        hit.settled = self._now if settled is None else settled
        self._touch(chain)
        return hit

    def extend(self, chain: Chain) -> None:
        """The answer's tokens are cached as well; `chain` is of prompt and answer."""
        self._touch(chain)

    def _touch(self, chain: Chain) -> None:
        used = self._used
        for node in reversed(chain):                     # the end first, so that it is also evicted first
            used[node] = self._now
            used.move_to_end(node)
        while len(used) > self.limit:
            used.popitem(last=False)

    def correct(self, hit: Hit, cached: int) -> bool:
        """The replica had `cached` nodes of the prompt. Returns whether older nodes were dropped for that."""
        if not hit.nodes:
            return False
        if cached >= hit.nodes:
            self.limit = min(self._most, self.limit + (hit.nodes + GROWTH - 1) // GROWTH)
            return False
        lost = hit.last_use(cached)
        if lost >= hit.settled:                          # its prompt was still being computed: nothing was evicted
            return False
        used = self._used
        while used and next(iter(used.values())) <= lost:
            used.popitem(last=False)
        self.limit = min(self._most, max(len(used), FEWEST_NODES))
        return True

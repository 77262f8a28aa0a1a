"""A fleet of simulated replicas under a policy: no sockets, no clock but its own. For tests and benchmarks/studies/router.

A simulated replica runs steps as an engine does: up to `budget` prompt tokens of the oldest requests and one token of every
running answer, in `fixed + row · rows + token · prompt tokens` seconds. Its prefix cache has blocks of 16 tokens and evicts the
least recently used. A second cache as large as all of them together sees the same requests: what one big cache would have had.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ridgeline.engine.replicas.policies import Choice
from ridgeline.engine.replicas.prefix_tree import PrefixTree, chain_of
from ridgeline.engine.replicas.replica_load import Habits, ReplicaLoad, Ticket, Usage
from ridgeline.route.prompt_text import prompt_of, with_answer

TOKEN_BYTES = 4
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Machine:
    """The default is about a 135M model on a few CPU cores; the study says which numbers it uses."""

    fixed: float = 0.01              # seconds of a step
    row: float = 0.0005              # more for each answer in it
    token: float = 0.0005            # more for each prompt token in it
    budget: int = 512                # prompt tokens in a step
    rows: int = 32                   # answers that run at once
    blocks: int = 4096               # of the prefix cache


@dataclass(eq=False)
class SimulatedRequest:
    messages: list[dict[str, str]]
    answer: str                      # what the replica will say
    arrives: float
    then: Callable[[float], SimulatedRequest | None] = lambda now: None      # the next turn, when this one has ended
    # filled in by the simulation
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    cached: int = 0
    cached_by_one: int = 0           # by one big cache
    computed: int = 0
    produced: int = 0
    blocks: list[int] = field(default_factory=list)
    ticket: Ticket | None = None

    @property
    def output(self) -> int:
        return max(1, len(self.answer) // TOKEN_BYTES)


class BlockCache:
    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, blocks: list[int]) -> int:
        return next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def use(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class SimulatedReplica:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cache = BlockCache(machine.blocks)
        self.queue: deque[SimulatedRequest] = deque()
        self.prefilling: list[SimulatedRequest] = []
        self.running: list[SimulatedRequest] = []
        self.busy = False

    def begin(self, one: BlockCache) -> float:
        """Plans a step; returns its seconds, 0 when there is nothing to do."""
        machine, left = self.machine, self.machine.budget
        while self.queue and len(self.prefilling) + len(self.running) < machine.rows:
            request = self.queue.popleft()
            most = (request.tokens - 1) // BLOCK_TOKENS  # the last token is always computed
            request.cached = min(most, self.cache.cached(request.blocks)) * BLOCK_TOKENS
            request.cached_by_one = min(most, one.cached(request.blocks)) * BLOCK_TOKENS
            request.computed = request.cached
            self.cache.use(request.blocks[: request.cached // BLOCK_TOKENS])
            self.prefilling.append(request)
        rows = len(self.running)
        for request in self.prefilling:
            tokens = min(left, request.tokens - request.computed)
            request.computed += tokens
            left -= tokens
        self.busy = bool(rows or self.prefilling)
        return machine.fixed + machine.row * rows + machine.token * (machine.budget - left) if self.busy else 0.0


class SimulatedFleet:
    def __init__(self, policy: str, machines: list[Machine]) -> None:
        habits = Habits()
        self.replicas = [SimulatedReplica(machine) for machine in machines]
        self.loads = [ReplicaLoad(habits, PrefixTree()) for _ in machines]
        self.choice = Choice(policy, self.loads)
        self.one = BlockCache(sum(machine.blocks for machine in machines))
        self.done: list[SimulatedRequest] = []
        self._events: list[tuple[float, int, SimulatedRequest | int]] = []
        self._count = itertools.count()

    def run(self, requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
        for request in requests:
            self._at(request.arrives, request)
        while self._events:
            now, _, what = heapq.heappop(self._events)
            if isinstance(what, SimulatedRequest):
                self._arrive(what, now)
            else:
                self._end_step(what, now)
        return self.done

    def _at(self, when: float, what: SimulatedRequest | int) -> None:
        heapq.heappush(self._events, (when, next(self._count), what))

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        prompt = prompt_of({"messages": request.messages, "stream": True})
        request.blocks = chain_of(prompt.text, 0, BLOCK_TOKENS * TOKEN_BYTES)
        request.tokens = max(1, len(prompt.text) // TOKEN_BYTES)
        number = self.choice.choose(prompt, now, range(len(self.loads)))
        request.ticket = self.choice.send(number, prompt, now)
        self.replicas[number].queue.append(request)
        if not self.replicas[number].busy:
            self._at(now + self.replicas[number].begin(self.one), number)

    def _end_step(self, number: int, now: float) -> None:
        replica, load = self.replicas[number], self.loads[number]
        whole = [request for request in replica.prefilling if request.computed >= request.tokens]
        for request in replica.running:
            request.produced += 1
        for request in whole:
            replica.prefilling.remove(request)
            replica.running.append(request)
            replica.cache.use(request.blocks)
            self.one.use(request.blocks)
            request.first, request.produced = now, 1
            assert request.ticket is not None
            load.first_token(request.ticket, now)
        for request in [each for each in replica.running if each.produced >= each.output]:
            replica.running.remove(request)
            self._finish(request, replica, load, now)
        seconds = replica.begin(self.one)
        if seconds:
            self._at(now + seconds, number)

    def _finish(self, request: SimulatedRequest, replica: SimulatedReplica, load: ReplicaLoad, now: float) -> None:
        request.ended = now
        assert request.ticket is not None
        said = request.ticket.prompt.text + b"\x1eassistant\x1f" + request.answer.encode()
        blocks = chain_of(said, 0, BLOCK_TOKENS * TOKEN_BYTES)
        replica.cache.use(blocks)
        self.one.use(blocks)
        usage = Usage(request.tokens, request.produced, request.cached)
        load.finish(request.ticket, now, usage, with_answer(request.ticket.prompt, request.answer))
        request.ticket = None
        self.done.append(request)
        following = request.then(now)
        if following is not None:
            self._at(following.arrives, following)

"""The host half driven against FakeRunner: one object that runs requests through a scheduler and checks everything.

It steps as engine.core does (plan, submit, sample; collect the oldest once more than `depth` are in flight), and after
every step asserts what must hold whatever the requests do: budgets, every block in exactly one place, every reference
explained, the index true to the KV in memory, nobody lost, the most important running sequence left alone. Answers are
compared with `expected_answer`. It knows no hypothesis: seeds, state machines and planted bugs all drive this one class.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from dial_drafter import DialDrafter
from fake_runner import FakeRunner, expected_answer, following, stamp

from ridgeline.cache.manager import KVManager, SequenceBlocks
from ridgeline.cache.prefix_cache import Node
from ridgeline.messages import Request, StepPlan, TokenDelta
from ridgeline.ops.cpu import native
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.policy import StaticBatching
from ridgeline.scheduler.scheduler import Scheduler, SchedulerLimits
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.kv_spec import KVGroupSpec

VOCAB = 64


@dataclass(frozen=True)
class Setup:
    """One configuration of the host half. The pool must hold one request of max_model_len tokens."""

    windows: tuple[int | None, ...] = (None,)
    block_size: int = 4
    num_blocks: int = 40
    max_rows: int = 6
    max_step_tokens: int = 16
    max_model_len: int = 48
    depth: int = 0
    prefix_caching: bool = True
    contiguous: bool = False
    static: bool = False
    chunked_prefill: bool = True
    max_waiting_steps: int = 10_000
    enough_rows: int | None = None
    eos: frozenset[int] = frozenset({3})
    fail_tokens: tuple[int, ...] = ()
    alpha: float | None = None                           # chance that a draft is right; None: no drafts
    native: bool = False                                 # steps that repeat are planned and taken in by native code


class Simulation:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.groups = [KVGroupSpec((layer,), window, setup.block_size, 1, 8) for layer, window in enumerate(setup.windows)]
        self.manager = KVManager(
            self.groups,
            setup.num_blocks,
            prefix_caching=setup.prefix_caching,
            contiguous_tokens=setup.max_model_len if setup.contiguous else None,
        )
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_rows=setup.max_rows,
                max_step_tokens=setup.max_step_tokens,
                max_model_len=setup.max_model_len,
                chunked_prefill=setup.chunked_prefill,
                max_waiting_steps=setup.max_waiting_steps,
                enough_rows=setup.enough_rows,
            ),
            self.manager,
            setup.eos,
            admission=StaticBatching() if setup.static else None,
            native=native.library() if setup.native else None,
        )
        if setup.alpha is not None:
            self.scheduler.drafter = DialDrafter(
                lambda sequence, count: following(sequence.tokens.tolist(), count), VOCAB, setup.alpha
            )
        self.runner = FakeRunner(self.groups, setup.num_blocks, VOCAB, setup.fail_tokens)
        self.requests: dict[str, Request] = {}
        self.open: set[tuple[str, int]] = set()                  # answers that are still owed
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}               # finish reasons; "abort" for the aborted
        self.deltas: list[TokenDelta] = []
        self.prompt_logprobs: dict[tuple[str, int], list[int]] = {}
        self.steps = 0                                           # calls of step(), planned or idle
        self.most_held = 0                                       # blocks held at once, at most
        self._salts: dict[int, str] = {}                         # block -> salt of whoever it was allocated for

    # -- what happens to it --------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        for index in range(request.params.n):
            key = (request.request_id, index)
            self.open.add(key)
            self.answers[key] = []

    def ask(self, name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> None:
        """add(), with the fields of Request and SamplingParams told apart by name."""
        params = {key: fields.pop(key) for key in list(fields) if key not in ("priority", "cache_salt")}
        self.add(Request(name, prompt, SamplingParams(max_tokens=max_tokens, **params), **fields))  # type: ignore[arg-type]

    def abort(self, name: str, index: int | None = None) -> None:
        hit = {key for key in self.open if key[0] == name and index in (None, key[1])}
        assert self.scheduler.abort(name, index) == bool(hit), f"abort({name}, {index}) answered wrongly"
        self.open -= hit
        self.ends.update(dict.fromkeys(hit, "abort"))
        self.check()

    def step(self) -> StepPlan:
        """engine.core.EngineCore.step, with everything checked."""
        self.steps += 1
        scheduler = self.scheduler
        before = scheduler._running.rows.running()
        preemptions = scheduler.counters.preemptions
        plan = scheduler.schedule()
        if before:
            assert before[0].row >= 0, "the most important running sequence was preempted"
        assert sum(sequence.row < 0 for sequence in before) == scheduler.counters.preemptions - preemptions
        self._check_plan(plan)
        if len(plan.rows):
            self.runner.submit(plan)
            self.runner.sample()
        if scheduler.num_in_flight > self.setup.depth or (not len(plan.rows) and scheduler.num_in_flight):
            self._take(scheduler.update(self.runner.collect()))
        self.check()
        return plan

    def drain(self, bound: int = 2_000) -> None:
        """Run until nothing is left to do; everybody must end within `bound` steps."""
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"still at work after {bound} steps"
        self.check_end()

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert plan.total_tokens <= limits.max_step_tokens, "the token budget was overspent"
        assert len(plan.rows) <= limits.max_rows and self.scheduler.num_running <= limits.max_rows
        assert (plan.num_tokens > 0).all(), "a row was scheduled for nothing"
        for row in plan.rows.tolist():
            sequence = self.scheduler._running.rows.sequences[row]
            assert sequence is not None and self.scheduler._running.rows.computed[row] < sequence.limit, "computed past its limit"
        for _, row, _, block in plan.appended.tolist():
            sequence = self.scheduler._running.rows.sequences[row]
            assert sequence is not None
            self._salts[block] = sequence.request.cache_salt
        for added in plan.added:
            sequence = self.scheduler._running.rows.sequences[added.row]
            assert sequence is not None, "a row was added for nobody"
            salt, shared = sequence.request.cache_salt, added.num_computed // self.setup.block_size
            for table in added.block_ids:
                for index, block in enumerate(table.tolist()):
                    if index >= shared:
                        self._salts[block] = salt
                    assert block == 0 or self._salts[block] == salt, f"block {block} crossed from one salt to another"
            if sequence.num_prompt == len(sequence.tokens):
                assert added.num_computed < sequence.num_prompt, "nothing is left to sample from"

    def _take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key in self.open, f"news of {key}, which has ended"
            self.deltas.append(delta)
            self.answers[key] += delta.token_ids
            if delta.prompt_logprobs is not None:
                assert key not in self.prompt_logprobs, f"the prompt log-probabilities of {key} came twice"
                self.prompt_logprobs[key] = delta.prompt_logprobs.token_ids.tolist()
            if delta.finish_reason:
                self.open.discard(key)
                self.ends[key] = delta.finish_reason

    def check(self) -> None:
        """Everything that holds between any two events."""
        self.manager.pool.check()
        self._check_sequences()
        self._check_references()
        if self.setup.prefix_caching and not self.setup.contiguous:
            check_index(self.manager, [sequence.blocks for sequence in self._running() if sequence.blocks])

    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self.scheduler._running.rows.sequences if sequence is not None]

    def _check_sequences(self) -> None:
        """Every answer that is owed is running or waiting, once; those that have ended do not pile up in the queue."""
        ended = sum(sequence.finished for _, sequence in self.scheduler._waiting.heap)
        assert ended == len(self.scheduler._waiting.heap) - self.scheduler.num_waiting
        assert 2 * ended <= len(self.scheduler._waiting.heap)
        places = Counter((sequence.request.request_id, sequence.index) for sequence in self._running())
        for _, sequence in self.scheduler._waiting.heap:
            if not sequence.finished:
                assert sequence.row == -1 and sequence.blocks is None, "a waiting sequence holds something"
                places[sequence.request.request_id, sequence.index] += 1
        assert places == Counter(self.open), "a request is lost, or runs twice"

    def _check_references(self) -> None:
        """Every reference to a block is a place in somebody's table, or a release that waits for a step in flight."""
        pool, held = self.manager.pool, Counter[int]()
        for sequence in self._running():
            assert sequence.blocks is not None
            for table in sequence.blocks.tables:
                held.update(block for block in table if block)
            if self.setup.depth == 0 and self.manager.grows:
                own = sum(1 for table in sequence.blocks.tables for block in table if block)
                most = self.manager.blocks_for(sequence.blocks.num_blocks * self.setup.block_size, self.setup.max_step_tokens)
                assert own <= most, f"a sequence holds {own} blocks, blocks_for() promised at most {most}"
        self.most_held = max(self.most_held, len(held))
        for _, blocks in pool._in_flight:
            held.update(blocks)
        references = {block: count for block, count in enumerate(pool._references) if count}
        wrong = {block for block, _ in references.items() ^ held.items()}
        assert not wrong, f"blocks {wrong} have references that nothing explains"

    def check_index(self) -> None:
        """What the prefix cache would hand out is what the memory holds."""
        size = self.setup.block_size
        for node in self.manager.cache._nodes.values():
            _, prefix = node_path(node)
            value, stamps = 0, []
            for token in prefix:
                value = stamp(value, token)
                stamps.append(value)
            for group, block in enumerate(node.blocks):
                if block:
                    held = [self.runner.slots.get(block * size + offset) for offset in range(size)]
                    assert held == [(group, each) for each in stamps[-size:]], f"block {block} is indexed wrongly"

    def check_end(self) -> None:
        """After the last request: the pool is whole, every answer is right."""
        self.check()
        self.check_index()
        pool = self.manager.pool
        if self.setup.contiguous:
            slab = -(-self.setup.max_model_len // self.setup.block_size)
            assert pool.num_allocatable == (self.setup.num_blocks - 1) // slab * slab, "a slab leaked"
        else:
            assert pool.num_allocatable == self.setup.num_blocks - 1 and not pool.num_releasing, "a block leaked"
        assert not self.open and not self.scheduler.num_running and not self.scheduler.num_waiting
        counters = self.scheduler.counters
        assert counters.computed_tokens == counters.useful_tokens + counters.wasted_tokens + counters.rejected_tokens
        assert self.scheduler._running.rows.num_used == 0, "used slots are counted that are gone"
        assert counters.preemptions or not counters.wasted_tokens
        for key, answer in self.answers.items():
            expected, reason = self.expected(key)
            if self.ends[key] == "abort":
                assert answer == expected[: len(answer)], f"{key} was aborted, but wrong before that"
            else:
                assert (answer, self.ends[key]) == (expected, reason), f"{key} has a wrong answer"
                asked = self.requests[key[0]].params.prompt_logprobs is not None and key[1] == 0
                assert asked or key not in self.prompt_logprobs
                if asked and reason != "error":
                    assert self.prompt_logprobs.get(key, []) == self.requests[key[0]].prompt_token_ids[1:]

    def expected(self, key: tuple[str, int]) -> tuple[list[int], str]:
        """The tokens and the finish reason of an answer that is left alone."""
        request = self.requests[key[0]]
        room = self.setup.max_model_len - len(request.prompt_token_ids)
        limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        stop_ids = frozenset(request.params.stop_token_ids) | (frozenset() if request.params.ignore_eos else self.setup.eos)
        answer = expected_answer(request.prompt_token_ids, limit, stop_ids, VOCAB)
        for place, token in enumerate(answer):
            if token in self.setup.fail_tokens:
                return answer[:place], "error"
        return answer, "stop" if answer[-1] in stop_ids else "length"


def node_path(node: Node) -> tuple[str, list[int]]:
    """The salt, and the tokens from the root to this node, itself included."""
    parts: list[bytes] = []
    while node.parent is not None:
        parts.append(node.tokens)
        node = node.parent
    return node.tokens.decode(), memoryview(b"".join(reversed(parts))).cast("i").tolist()


def check_index(manager: KVManager, holders: list[SequenceBlocks]) -> None:
    """Index, tree and pool agree: nodes and their blocks, blocks and their nodes, users and who uses."""
    cache, pool = manager.cache, manager.pool
    assert set(cache._owner) == pool._indexed, "the pool and the index disagree about what is indexed"
    for block, node in cache._owner.items():
        assert node.blocks.count(block) == 1 and cache._nodes.get(node.key) is node, f"block {block} has no node"
    users = Counter(id(node.parent) for node in cache._nodes.values())
    users.update(id(blocks.node) for blocks in holders if blocks.node)
    for key, node in cache._nodes.items():
        assert node.key == key and node.parent is not None
        assert node.users == users[id(node)], "a node counts users it does not have"
        assert node.users or any(node.blocks), "a node nobody needs was kept"
        assert node.parent.parent is None or cache._nodes.get(node.parent.key) is node.parent, "a node lost its parent"
        for block in node.blocks:
            assert not block or cache._owner[block] is node, f"block {block} is indexed twice"


# -- random traffic ----------------------------------------------------------------------------------------------------


def random_request(rng: random.Random, name: str, setup: Setup, stems: list[list[int]]) -> Request:
    """Prompts share stems, so that there are prefix hits; a few ask for everything that is rare."""
    stem = rng.choice(stems)
    prompt = stem[: rng.randrange(len(stem) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 10))]
    prompt = prompt[: setup.max_model_len - 1]
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([None, 1, 2, 5, 9, 14, 20]),
        stop_token_ids=rng.choice([[], [], [7, 9]]),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, None, None, 1]),
        prompt_logprobs=rng.choice([None] * 6 + [0]),
    )
    return Request(name, prompt, params, priority=rng.choice([0, 0, 0, 1, -1]), cache_salt=rng.choice(["", "", "a"]))


def run_random(
    setup: Setup, seed: int, num_requests: int = 12, aborts: float = 0.04, simulation: Simulation | None = None
) -> Simulation:
    """A random trace to its end: arrivals in bursts, aborts at any moment."""
    rng = random.Random(seed)
    simulation = simulation or Simulation(setup)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(4, 28))] for _ in range(2)]
    left = num_requests
    while left or simulation.scheduler.has_work:
        while left and rng.random() < 0.4:
            left -= 1
            simulation.add(random_request(rng, f"r{left}", setup, stems))
        if simulation.open and rng.random() < aborts and simulation.steps < 6 * num_requests:   # aborts would end the stuck
            name, index = rng.choice(sorted(simulation.open))
            simulation.abort(name, index if rng.random() < 0.4 else None)
        simulation.step()
        assert simulation.steps < 40 * num_requests, "somebody never ends"
    simulation.check_end()
    return simulation


# Every shape of the host half; pools hold little more than one longest request, so that blocks run short.
SETUPS = {
    "plain": Setup(num_blocks=18),
    "tight": Setup(num_blocks=13),
    "windows": Setup(windows=(None, 6), num_blocks=24),
    "tight_windows": Setup(windows=(None, 6), num_blocks=20),
    "all_windows": Setup(windows=(5,), num_blocks=9, max_step_tokens=18),
    "narrow_windows": Setup(windows=(None, 9, 2), num_blocks=26, max_step_tokens=10),
    "no_prefix_cache": Setup(num_blocks=16, prefix_caching=False),
    "contiguous": Setup(num_blocks=40, prefix_caching=False, contiguous=True),
    "contiguous_windows": Setup(windows=(None, 6), num_blocks=50, prefix_caching=False, contiguous=True),
    "static": Setup(num_blocks=18, static=True),
    "unchunked": Setup(num_blocks=16, chunked_prefill=False, max_step_tokens=48),
    "few_tokens": Setup(num_blocks=16, max_step_tokens=3, max_rows=5),
    "impatient": Setup(num_blocks=16, max_waiting_steps=12, max_rows=3),
    "failures": Setup(num_blocks=18, fail_tokens=(11, 12)),
    "one_token_blocks": Setup(num_blocks=54, block_size=1),
}

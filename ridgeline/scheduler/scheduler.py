"""The scheduler: one rule, no phases.

A sequence has known tokens and computed tokens. Each step hands tokens to sequences until the token budget is spent;
a sequence whose computed tokens catch up with its known ones samples the next. Chunked prefill, prefix hits, decode and
resumption after preemption are all just numbers in that rule.

    schedule()  ─▶ StepPlan          rows that run, then sequences that join
    update()    ◀─ StepResult        token values, stops, full blocks; ─▶ TokenDelta for whoever asked

Plans may be made while earlier ones are still in flight: `known` grows when a sample is planned, its value arrives with
the result. So a stop is noticed one step late at most, and the extra token is dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.cache.manager import Hit, KVManager, SequenceBlocks
from ridgeline.errors import PROMPT, BadRequest
from ridgeline.messages import Logprobs, Request, RowAdded, Snapshot, StepPlan, StepResult, TokenDelta, Want
from ridgeline.scheduler.policy import (
    AGED_PRIORITY,
    Admission,
    ContinuousBatching,
    rank,
)
from ridgeline.scheduler.row_table import Rows
from ridgeline.scheduler.sequence import Sequence
from ridgeline.scheduler.step_time import NoTimeModel, StepTimeModel
from ridgeline.sizes.batch_levelling import level_rows

if TYPE_CHECKING:
    from ridgeline.grammar.matcher import Matcher

_SAMPLED = np.int8(Want.TOKEN | Want.LOGPROBS | Want.HIDDEN)     # what comes with the last known token
_PROMPT = np.int8(Want.PROMPT_LOGPROBS | Want.HIDDEN_SUM)        # what comes with every prompt token
_NONE = np.zeros(0, np.int32)
_NO_BLOCKS = _NONE.reshape(0, 4)
_NOTHING: tuple = (_NONE, [], _NO_BLOCKS, _NONE, _NONE, _NONE.astype(np.int8))


@dataclass(slots=True)
class SchedulerLimits:
    max_rows: int                    # sequences that run at once
    max_step_tokens: int             # token budget of a step
    max_model_len: int
    chunked_prefill: bool = True
    max_waiting_steps: int = 10_000  # after that many steps a waiting request goes ahead of every priority
    enough_rows: int | None = None   # with more than so many a row costs no less; None: nobody knows


@dataclass(slots=True)
class SchedulerCounters:
    steps: int = 0
    computed_tokens: int = 0         # planned; what follows is what steps reported, once they were taken in
    useful_tokens: int = 0
    wasted_tokens: int = 0           # computed twice because of preemptions
    padded_tokens: int = 0           # computed to fill up a recorded shape
    rejected_tokens: int = 0         # computed in vain, as drafts
    prompt_tokens: int = 0           # of rows that computed more than one; like the four above, of steps taken in
    chunks: int = 0                  # partial prefills
    joins: int = 0                   # sequences admitted in the place of one that had left, while others were running
    preemptions: int = 0
    out_of_memory: int = 0           # steps that did not fit into memory, and were forgotten
    late_tokens: int = 0             # sampled after a stop, dropped
    finished: int = 0
    held_slots: int = 0              # KV slots held, and of these the ones in use, summed over steps: paging's waste
    used_slots: int = 0


@dataclass(slots=True)
class _InFlight:
    """What update() needs to remember of a plan."""

    step: int
    rows: np.ndarray
    ends: np.ndarray                 # computed tokens of each row once the step is done
    sampled: np.ndarray              # bool: the row samples
    sequences: list[Sequence]
    num_decodes: int                 # rows that compute one token …
    num_prompt_tokens: int           # … and what the others compute together
    num_pairs: int                   # keys that those attend to, all together
    constrained: list[tuple[int, Sequence]]              # (which of the rows that sample, its sequence) with a grammar


@dataclass(slots=True)
class _Steady:
    """What a plan in which every row decodes has in common with the next, as long as the same rows run."""

    rows: np.ndarray                 # as Rows.ranked() has them
    plan_rows: np.ndarray            # the plan's rows, tokens and wishes
    num_tokens: np.ndarray
    want: np.ndarray
    sequences: list[Sequence]
    constrained: list[tuple[int, Sequence]]


@dataclass(slots=True)
class _Delta:
    """What the next plan has to tell the device beside the work itself."""

    removed: list[int] = field(default_factory=list)
    added: list[RowAdded] = field(default_factory=list)
    appended: list[tuple[int, int, int, int]] = field(default_factory=list)


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        manager: KVManager,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        admission: Admission | None = None,
        time_model: StepTimeModel | None = None,
        use_priorities: bool = True,
        seed: int = 0,
    ) -> None:
        self.limits = limits
        self.manager = manager
        self.counters = SchedulerCounters()
        self.started: list[str] = []                                     # requests whose first stay began with the newest plan
        self._eos = eos_token_ids
        self.admission: Admission = admission or ContinuousBatching()
        self.finds_prefixes = True
        self.step_tokens: int | None = None                              # fewer than the limit, for a while after memory ran out
        self._time_model = time_model or NoTimeModel()
        self.level: int | None = None                                    # rows at once, see begin_with_longest()
        self._use_priorities = use_priorities
        self._seed = seed
        self._rows = Rows(limits.max_rows)
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []       # a heap by rank
        self._num_gone = 0                                               # of these, the ones that have ended
        self._vacated = False                                            # has anybody left since rows were empty?
        self._live: dict[str, list[Sequence]] = {}                       # request id -> its unfinished answers
        self._flights: deque[_InFlight] = deque()
        self._delta = _Delta()
        self._steady: _Steady | None = None                              # of the newest plan
        self._unpublished: list[tuple[Sequence, SequenceBlocks, int]] = []       # and known tokens once the step has run
        self._step = 0
        self._arrivals = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. It has been checked by whoever made it; here only what the engine itself cannot do fails."""
        params, num_prompt = request.params, len(request.prompt_token_ids)
        if request.request_id in self._live:
            raise BadRequest(f"request id {request.request_id!r} is already running")
        if num_prompt == 0:
            raise BadRequest("the prompt is empty; it needs at least one token", field=PROMPT)
        if num_prompt >= self.limits.max_model_len:
            raise BadRequest(
                f"the prompt has {num_prompt} tokens, which leaves no room for an answer: "
                f"max_model_len is {self.limits.max_model_len}", field=PROMPT,
            )
        limit = self.limits.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, num_prompt + params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        sequences: list[Sequence] = []
        resumed = request.resumed
        if resumed is not None and not _can_resume(resumed, params.n, limit - num_prompt):
            raise BadRequest("resumed must hold unfinished answers of this request, at least one")
        for index in range(params.n):
            self._arrivals += 1
            if resumed is not None and index not in resumed:
                continue                                         # it had ended
            sequence = Sequence(request, index, self._arrivals, limit, self._noise_key(request, index), stop_ids)
            if resumed is not None:
                self._resume(sequence, resumed[index], any(resumed.values()) or 0 not in resumed)
            sequence.priority = request.priority if self._use_priorities else 0
            sequence.leader = sequences[0] if sequences else None
            sequence.arrived_at = self._step
            sequences.append(sequence)
            heapq.heappush(self._waiting, (rank(sequence), sequence))
        self._live[request.request_id] = sequences

    def begin_with_longest(self) -> None:
        """Of those who wait, let the ones that may answer longest begin first, priorities aside: for requests that are all there
        and wait for each other. Answers do not change by it.

        Such a run ends with the longest answer, alone in its last steps, which take nearly as long as full ones. Begun first, it
        is as many steps ahead as the other prompts take; and short answers are kept to run beside it, if nothing but their length
        ends them (sizes/batch_levelling.py). Not where not all of them fit into the KV cache at once: who is far
        from whoever shares its
        prefix might find that evicted.
        """
        waiting = [sequence for _, sequence in self._waiting if not sequence.finished]
        level = None
        blocks = sum(self.manager.blocks_for(sequence.limit, self.limits.max_step_tokens) for sequence in waiting)
        if blocks <= self.manager.num_free:
            if all(_length_is_known(sequence) and sequence.priority == waiting[0].priority for sequence in waiting):
                answers = [sequence.limit - sequence.num_prompt for sequence in waiting]
                level = level_rows(answers, self.limits.enough_rows, self.limits.max_rows)
            self._reorder(waiting)
        self.level = self.admission.use_level(level)

    def _reorder(self, waiting: list[Sequence]) -> None:
        """The longest answers first, equals in their order."""
        orders = sorted(sequence.order for sequence in waiting)
        waiting.sort(key=lambda sequence: (sequence.num_prompt - sequence.limit, sequence.order))
        for sequence, order in zip(waiting, orders, strict=True):
            sequence.order = order
        self._waiting = [(rank(sequence), sequence) for _, sequence in self._waiting]
        heapq.heapify(self._waiting)

    def _resume(self, sequence: Sequence, produced: list[int], begun: bool) -> None:
        """It goes on where an earlier engine stopped, as after a preemption: what it knew is computed again."""
        sequence.tokens.extend(produced)
        sequence.lost_tokens = len(sequence.tokens) - 1 if begun else 0
        sequence.prompt_logprobs_sent = begun                    # they came with the first token

    def _noise_key(self, request: Request, index: int) -> int:
        """Equal seeds give equal noise; the n answers of one request differ; without a seed every request differs."""
        seed = request.params.seed
        base = seed if seed is not None else self._seed * 0x9E3779B97F4A7C15 + self._arrivals * 0xD1B54A32D192ED03
        return (base + index * 0xBF58476D1CE4E5B9) % 2**64

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Forget a request, or one of its answers, at once. False when it is not here (finished, or never was)."""
        sequences = self._live.get(request_id, [])
        wanted = [sequence for sequence in sequences if index is None or sequence.index == index]
        for sequence in wanted:
            self._end(sequence)
        return bool(wanted)

    def set_matchers(self, request: Request, matchers: Mapping[int, Matcher]) -> None:
        """The grammar of a request is there, with a matcher for each answer. No error when the request has gone."""
        for sequence in self._live.get(request.request_id, []):
            if sequence.request is request:              # and not a later one of the same name
                sequence.matcher = matchers[sequence.index]

    def fail_request(self, request: Request, reason: str) -> list[TokenDelta]:
        """It cannot run; its answers end with an error."""
        sequences = [each for each in self._live.get(request.request_id, []) if each.request is request]
        return [self.fail(sequence, reason) for sequence in sequences]

    def fail(self, sequence: Sequence, reason: str) -> TokenDelta:
        """One answer ends with an error that does not cast doubt on its KV. Its token in flight will be dropped."""
        self._end(sequence)
        return TokenDelta(sequence.request.request_id, sequence.index, [], finish_reason="error", error=reason)

    @property
    def num_constrained(self) -> int:
        """Rows with a grammar that sample in the newest step in flight."""
        return len(self._flights[-1].constrained)

    def constrained(self) -> tuple[list[tuple[int, Matcher]], int]:
        """Of the rows that sample in the newest step, those with a grammar whose answer goes on; and how many sample."""
        flight = self._flights[-1]
        listed = [(place, sequence.matcher) for place, sequence in flight.constrained if not sequence.finished]
        return [(place, matcher) for place, matcher in listed if matcher is not None], int(flight.sampled.sum())

    def said(self, result: StepResult) -> list[tuple[Matcher, int]]:
        """What answers with a grammar go on with after the oldest step in flight: update() will tell their matchers."""
        flight = self._flights[0]
        if not flight.constrained or result.failed:
            return []
        tokens = result.tokens[flight.sampled, 0].tolist()
        return [
            (sequence.matcher, tokens[place]) for place, sequence in flight.constrained
            if sequence.matcher is not None and not sequence.finished and tokens[place] not in sequence.stop_ids
        ]  # fmt: skip

    def fail_constrained(self) -> list[TokenDelta]:
        """End those of them whose matcher has failed meanwhile."""
        listed = [sequence for _, sequence in self._flights[-1].constrained if not sequence.finished]
        return [self.fail(each, each.matcher.error) for each in listed if each.matcher is not None and each.matcher.error]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) - self._num_gone

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        return bool(self._live) or bool(self._flights)

    def snapshot(self) -> Snapshot:
        """The running rows, as a fresh device needs them; see Snapshot."""
        if self._flights:
            raise AssertionError("a snapshot needs every step taken in: values in flight are the device's")
        computed = self._rows.computed
        return Snapshot(
            self._step, [self._row_added(sequence, int(computed[sequence.row])) for sequence in self._rows.running()]
        )

    # -- planning ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. Without rows there is nothing to do now, or everything waits for steps in flight.

        Such a plan is not booked: it brings no result, and what it would tell the device goes with the next one.
        """
        self.started = []
        self._publish_all()
        rows, tokens, budget, short = self._give_to_running()
        places = self.admission.places(len(self._rows), self.num_waiting) if self._waiting and not short else 0
        if budget > 0 and places > 0:
            joined, joined_tokens = self._admit(budget, int(np.count_nonzero(tokens == 1)), places)
            if joined:
                rows = np.concatenate([rows, np.array(joined, np.int64)])
                tokens = np.concatenate([tokens, np.array(joined_tokens, np.int64)])
        if not len(rows):
            return StepPlan(self._step, *_NOTHING)
        return self._plan(rows, tokens)

    def _give_to_running(self) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """Tokens for the rows that run: decodes first, then prefill chunks, by rank, until the budget is spent.

        Also what is left of the budget, and whether blocks ran short: then nobody new may join.
        """
        table, size = self._rows, self.manager.block_size
        rows = table.ranked()
        if not len(rows):
            return rows, rows, self._budget(0, self.num_waiting, 0), False
        need = table.known[rows] - table.computed[rows]
        # A row at its limit has all it may have; its last token needs no KV.
        ready = (need > 0) & (table.known[rows] < table.limit[rows])
        if not ready.all():
            rows, need = rows[ready], need[ready]
        prefill = need > 1
        num_prefill = int(np.count_nonzero(prefill))
        num_decodes = len(rows) - num_prefill
        position = int(table.computed[rows[np.argmax(prefill)]]) if num_prefill else 0
        tokens, budget = need, self._budget(num_decodes, num_prefill + self.num_waiting, position)
        whole = num_prefill == 0 and num_decodes <= budget
        if not whole:
            order = np.argsort(prefill, kind="stable")
            rows, need = rows[order], need[order]
            before = np.cumsum(need) - need
            tokens = np.minimum(need, np.maximum(0, budget - before))

        preemptions = self.counters.preemptions
        short = False
        for place in np.nonzero(table.computed[rows] + tokens > table.num_blocks[rows] * size)[0].tolist():
            sequence = table.sequences[rows[place]]
            if sequence is None:                                 # preempted a moment ago, for somebody before it
                continue
            if not self._grow(sequence, int(table.computed[sequence.row] + tokens[place])):
                tokens[place] = 0
                short = True
        if self.counters.preemptions > preemptions:
            short = True
            alive = np.array([table.sequences[row] is not None for row in rows.tolist()], bool)
            rows, tokens = rows[alive], tokens[alive]
        if short or not whole:
            some = tokens > 0
            rows, tokens = rows[some], tokens[some]
            for place in np.nonzero(tokens > 1)[0].tolist():
                self._publish(int(rows[place]), int(tokens[place]))
        return rows, tokens, budget - int(tokens.sum()), short

    def _budget(self, num_decodes: int, num_prompts: int, position: int) -> int:
        """Tokens of a step in which so many decode: all it may have, or as many prompt tokens as the time allows, the first of
        them at that position of its prompt."""
        most = min(self.limits.max_step_tokens, self.step_tokens or self.limits.max_step_tokens)
        return min(most, num_decodes + max(1, self._time_model.prompt_tokens(num_decodes, num_prompts, position, most)))

    def _publish(self, row: int, num_tokens: int) -> None:
        """The row computes so many prompt tokens in the step being planned: what gets full can be shared at once.

        At once is before anybody looks for it. The step itself does not wait for that. Not for a row with one token: where
        all rows have one, a kernel writes and attends in one go, and nobody may see what another row has just written.
        """
        sequence = self._rows.sequences[row]
        assert sequence is not None and sequence.blocks is not None
        end = int(self._rows.computed[row]) + num_tokens
        self._unpublished.append((sequence, sequence.blocks, min(end, len(sequence.tokens))))

    def _publish_all(self) -> None:
        for sequence, blocks, num_tokens in self._unpublished:
            if sequence.blocks is blocks:                        # it has them still
                self.manager.publish(blocks, sequence.tokens, num_tokens)
        self._unpublished.clear()

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for a running sequence, at somebody's expense if need be. False: it waits, or was preempted itself."""
        blocks, row = sequence.blocks, sequence.row
        assert blocks is not None
        while (entries := self.manager.grow(blocks, num_tokens)) is None:
            if self.manager.pool.num_releasing:
                return False                                     # room is on its way; take nobody else's
            victim = self._victim(sequence)
            if victim is None:
                if not self._flights:
                    raise AssertionError("the KV pool is too small for one sequence")
                return False                                     # a step in flight will free what falls behind a window
            self._preempt(victim)
            if victim is sequence:
                return False
        self._delta.appended.extend((group, row, index, block) for group, index, block in entries)
        self._rows.hold(row, blocks.num_blocks)
        return True

    def _victim(self, asking: Sequence) -> Sequence | None:
        """Whose blocks to take: never the most important running sequence, never one more important than who asks.

        Among the rest the least important priority, then the cheapest to recompute. None: only who asks is left.
        """
        running = self._rows.running()
        candidates = [sequence for sequence in running[1:] if sequence.priority >= asking.priority]
        candidates.sort(key=lambda each: (-each.priority, int(self._rows.computed[each.row]), -each.order))
        for sequence in candidates:
            if sequence.blocks is not None and self.manager.exclusive_blocks(sequence.blocks):
                return sequence
        return candidates[0] if candidates else None             # all share: several have to go before a block is free

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's row and blocks; it waits, and computes its known tokens again."""
        self.counters.preemptions += 1
        sequence.lost_tokens = max(sequence.lost_tokens, int(self._rows.computed[sequence.row]))
        sequence.prompt_done = False
        sequence.prompt_logprobs = []                            # they will be computed again, too
        sequence.hidden = None
        self._leave_row(sequence)
        heapq.heappush(self._waiting, (rank(sequence), sequence))

    def _admit(self, budget: int, num_decodes: int, places: int) -> tuple[list[int], list[int]]:
        """Let waiting sequences join, by rank, while rows, blocks and budget last. Unready ones are passed over."""
        self._promote_aged()
        table, manager = self._rows, self.manager
        num_running = len(table)
        self._vacated &= num_running > 0
        full = False
        rows: list[int] = []
        tokens: list[int] = []
        unready: list[tuple[tuple[int, int], Sequence]] = []
        promised = self._promised(table.ranked())
        room = budget
        while self._waiting and budget > 0 and len(rows) < places and not table.full:
            entry = self._waiting[0]
            sequence = entry[1]
            if sequence.finished:
                heapq.heappop(self._waiting)
                self._num_gone -= 1
                continue
            if not sequence.ready:
                unready.append(heapq.heappop(self._waiting))
                continue
            known = len(sequence.tokens)
            self._publish_all()
            hit = self._hit(sequence)
            rest = known - hit.num_tokens
            most = budget
            if hit.num_tokens and self.limits.chunked_prefill:   # it goes on where tokens weigh more
                prompts = num_running - num_decodes + len(rows) + self.num_waiting
                fits = self._time_model.prompt_tokens(num_decodes, prompts, hit.num_tokens, room)
                most = max(1, min(budget, fits * budget // room))        # its share of what is left
            count = min(rest, most) if self.limits.chunked_prefill else rest
            if count > budget:
                break                                            # whoever is next waits; nobody overtakes
            blocks = manager.start(hit, hit.num_tokens + count) if self._has_room(hit, known, promised) else None
            if blocks is None:
                full = True
                break
            heapq.heappop(self._waiting)
            self.counters.joins += self._vacated
            sequence.blocks = blocks
            sequence.admitted_at = self._step
            row = table.add(sequence, self._want(sequence), known, hit.num_tokens)
            table.hold(row, blocks.num_blocks)
            promised += self._promised(np.array([row]))
            table.committed[row] = blocks.committed
            if sequence.lost_tokens == 0 and sequence.leader is None:
                sequence.num_cached = hit.num_tokens
                self.started.append(sequence.request.request_id)
            self._delta.added.append(self._row_added(sequence, hit.num_tokens))
            if count > 1:                                        # as of rows that run, see _publish
                self._publish(row, count)
            rows.append(row)
            tokens.append(count)
            budget -= -(-count * budget // most)
        for entry in unready:
            heapq.heappush(self._waiting, entry)
        self._tidy_queue()
        self.admission.admitted(len(table), full or table.full or not self.num_waiting)
        return rows, tokens

    def _promote_aged(self) -> None:
        """A request that waited too long goes first: a stream of more important ones must not starve it."""
        deadline = self._step - self.limits.max_waiting_steps
        if deadline <= 0:
            return
        aged = [sequence for _, sequence in self._waiting if sequence.arrived_at <= deadline]
        aged = [sequence for sequence in aged if sequence.priority != AGED_PRIORITY and not sequence.finished]
        if aged:
            for sequence in aged:
                sequence.priority = AGED_PRIORITY
            self._waiting = [(rank(sequence), sequence) for _, sequence in self._waiting]
            heapq.heapify(self._waiting)

    def _hit(self, sequence: Sequence) -> Hit:
        """What need not be computed: the last known token always is, to have logits to sample from."""
        salt, limit = sequence.request.cache_salt, len(sequence.tokens) - 1
        if self._want(sequence) & _PROMPT:
            limit = 0                                            # every prompt position needs its logits or hidden state
        hit = self.manager.lookup(sequence.tokens, salt, limit if self.finds_prefixes and sequence.request.prefix_caching else 0)
        leader = sequence.leader
        if leader is not None and leader.blocks is not None:
            forked = self.manager.fork(leader.blocks, salt, min(limit, leader.num_prompt))
            if forked.num_tokens > hit.num_tokens:
                return forked
        return hit

    def _promised(self, rows: np.ndarray) -> int:
        """Blocks that these rows will take to finish their prompts and go on for one."""
        table, manager = self._rows, self.manager
        if not manager.grows:
            return 0
        missing = -(-table.known[rows] // manager.block_size) - table.num_blocks[rows]
        return (int(np.maximum(missing, 0).sum()) + len(rows)) * len(manager.groups)

    def _has_room(self, hit: Hit, known: int, promised: int) -> bool:
        """Room for all its known tokens, and for what is promised to those that run.

        Admitting on less would only preempt somebody a few steps later.
        """
        return self.manager.num_free >= self.manager.blocks_beyond(hit, known, self.limits.max_step_tokens) + promised

    def _want(self, sequence: Sequence) -> int:
        params = sequence.request.params
        want = int(Want.TOKEN)
        if params.logprobs is not None:
            want |= Want.LOGPROBS
        # The n answers have one prompt: the first tells of it.
        if params.prompt_logprobs is not None and sequence.leader is None and not sequence.prompt_logprobs_sent:
            want |= Want.PROMPT_LOGPROBS
        if params.pooling is not None:
            want |= Want.HIDDEN if params.pooling == "last" else Want.HIDDEN_SUM
        return want

    def _row_added(self, sequence: Sequence, num_computed: int) -> RowAdded:
        assert sequence.blocks is not None
        return RowAdded(
            row=sequence.row,
            token_ids=np.frombuffer(sequence.tokens.tobytes(), np.int32),
            num_prompt=sequence.num_prompt,
            num_computed=num_computed,
            block_ids=[np.array(table, np.int32) for table in sequence.blocks.tables],
            params=sequence.request.params,
            seed=sequence.seed,
            bad_words_token_ids=sequence.request.bad_words_token_ids,
        )

    def _plan(self, rows: np.ndarray, tokens: np.ndarray) -> StepPlan:
        """Book the step as done, so that the next can be planned, and write it down as a delta."""
        table, delta = self._rows, self._delta
        self._step += 1
        total = int(tokens.sum())
        starts = table.computed[rows]
        ends = starts + tokens
        sampled = ends == table.known[rows]
        num_sampled = int(np.count_nonzero(sampled))
        recomputed, steady = 0, self._steady
        if steady is None or steady.rows is not rows or not total == len(rows) == num_sampled:
            asked, of_prompt = table.want[rows], starts < table.num_prompt[rows]
            want = (asked & _SAMPLED) * sampled | (asked & _PROMPT) * of_prompt
            sequences = [sequence for row in rows.tolist() if (sequence := table.sequences[row]) is not None]
            again = np.minimum(ends, table.lost[rows]) - starts
            recomputed = int(again[again > 0].sum())
            chosen = [sequence for sequence, samples in zip(sequences, sampled.tolist(), strict=True) if samples]
            for sequence in chosen:
                sequence.prompt_done = True
            steady = _Steady(
                rows, rows.astype(np.int32), tokens.astype(np.int32), want, sequences,
                [(place, sequence) for place, sequence in enumerate(chosen) if sequence.matcher is not None],
            )
            # Rows that decode now decode from now on: they have their prompts, and what they had lost.
            decode = total == num_sampled == len(rows) and not recomputed and not of_prompt.any()
            self._steady = steady if decode else None
        else:
            chosen = steady.sequences
        for sequence in chosen:
            sequence.num_promised += 1
        table.computed[rows] = ends
        table.known[rows[sampled]] += 1
        plan = StepPlan(
            step=self._step,
            removed=np.array(delta.removed, np.int32) if delta.removed else _NONE,
            added=delta.added,
            appended=np.array(delta.appended, np.int32) if delta.appended else _NO_BLOCKS,
            rows=steady.plan_rows,
            num_tokens=steady.num_tokens,
            want=steady.want,
            recomputed=recomputed,
        )
        self._delta = _Delta()
        num_decodes = int(np.count_nonzero(tokens == 1))
        num_pairs = int(((starts + ends) * tokens)[tokens > 1].sum()) // 2 if total > num_decodes else 0
        self._flights.append(_InFlight(
            self._step, rows, ends, sampled, steady.sequences, num_decodes, total - num_decodes, num_pairs,
            steady.constrained,
        ))
        self.manager.pool.submitted(self._step)
        table.num_used += total
        counters = self.counters
        counters.steps += 1
        counters.chunks += len(rows) - num_sampled
        counters.computed_tokens += total
        counters.held_slots += table.num_held * self.manager.block_size
        counters.used_slots += table.num_used
        return plan

    def start_over(self) -> list[Sequence]:
        """The newest step could not be launched: forget it. All others have been taken in. Whoever runs waits again, as after a
        preemption; the device, too, forgets its rows. Returns the sequences that step was for."""
        (flight,) = self._flights
        for sequence, samples in zip(flight.sequences, flight.sampled.tolist(), strict=True):
            sequence.num_promised -= samples
        for sequence in self._rows.running():                    # with the step in flight: what it was to compute is distrusted
            self._preempt(sequence)
        self._flights.clear()
        self.manager.pool.retired(flight.step)
        self._delta, self._steady = _Delta(), None
        self.counters.out_of_memory += 1
        return [sequence for sequence in flight.sequences if not sequence.finished]

    # -- results -------------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[TokenDelta]:
        """Take in the oldest step in flight: token values, stops, full blocks."""
        flight = self._flights.popleft()
        if flight.step != result.step:
            raise AssertionError(f"result of step {result.step} arrived, step {flight.step} is the oldest in flight")
        # A draft may bring more or fewer tokens than planned some day; until then the device did what it was told.
        if not (np.array_equal(result.lengths, flight.ends) and np.array_equal(result.num_new, flight.sampled)):
            raise AssertionError(f"step {flight.step} computed or sampled something else than was planned")
        self.counters.useful_tokens += result.useful
        self.counters.wasted_tokens += result.recomputed
        self.counters.padded_tokens += result.padded
        self.counters.rejected_tokens += result.rejected
        self.counters.prompt_tokens += flight.num_prompt_tokens
        self._time_model.observe(flight.num_decodes, flight.num_prompt_tokens, flight.num_pairs, result.device_seconds)
        self.manager.pool.retired(flight.step)
        self._commit(flight, result.failed)
        deltas: list[TokenDelta] = []
        values = result.tokens[:, 0].tolist() if result.tokens.size else [0] * len(flight.sequences)
        more = bool(result.failed or result.prompt_logprobs or result.hidden or result.logprobs)
        for place, (sequence, token, samples) in enumerate(
            zip(flight.sequences, values, flight.sampled.tolist(), strict=True)
        ):
            if sequence.finished:
                self.counters.late_tokens += samples
                continue
            if more:
                if place in result.failed:
                    deltas.append(self._fail(sequence, result.failed[place]))
                    continue
                if place in result.prompt_logprobs and _still_there(sequence, flight):
                    sequence.prompt_logprobs.append(result.prompt_logprobs[place])
                if place in result.hidden and _still_there(sequence, flight):
                    chunk = result.hidden[place]
                    sequence.hidden = chunk if sequence.hidden is None else sequence.hidden + chunk
            if not samples:
                continue
            sequence.tokens.append(token)
            sequence.num_promised -= 1
            # By place: twice as fast as by name, and a step has a thousand of them.
            delta = TokenDelta(sequence.request.request_id, sequence.index, [token], [], None, None, None, sequence.num_cached)
            if more and place in result.logprobs:
                delta.logprobs.append(result.logprobs[place])
            if sequence.prompt_logprobs:
                delta.prompt_logprobs = _joined(sequence.prompt_logprobs)
                sequence.prompt_logprobs = []
                sequence.prompt_logprobs_sent = True
            if sequence.hidden is not None:
                mean = sequence.request.params.pooling == "mean"
                delta.hidden = sequence.hidden / np.float32(sequence.num_prompt) if mean else sequence.hidden
                sequence.hidden = None
            if token in sequence.stop_ids:
                delta.finish_reason = "stop"
                delta.stop_reason = token if token in sequence.request.params.stop_token_ids else None
            elif sequence.matcher is not None and not sequence.matcher.accept(token):
                deltas.append(self.fail(sequence, sequence.matcher.error))
                continue
            elif sequence.matcher is not None and sequence.matcher.ended:
                delta.finish_reason, delta.grammar_ended = "stop", True
            elif len(sequence.tokens) >= sequence.limit:
                delta.finish_reason = "length"
            if delta.finish_reason:
                self.counters.finished += 1
                self._end(sequence)
            deltas.append(delta)
        return deltas

    def _commit(self, flight: _InFlight, failed: dict[int, str]) -> None:
        """Blocks that became full are offered to the prefix cache; those behind a window are freed."""
        table = self._rows
        full = flight.ends // self.manager.block_size
        for place in np.nonzero(full > table.committed[flight.rows])[0].tolist():
            sequence = flight.sequences[place]
            if _still_there(sequence, flight) and sequence.blocks is not None and place not in failed:
                self.manager.commit(sequence.blocks, sequence.tokens, int(flight.ends[place]))
                table.committed[sequence.row] = full[place]      # not what was published for steps still in flight

    def _fail(self, sequence: Sequence, reason: str) -> TokenDelta:
        if sequence.blocks is not None:
            self.manager.distrust(sequence.blocks)
        self._end(sequence)
        return TokenDelta(
            sequence.request.request_id, sequence.index, [], finish_reason="error", error=reason
        )

    def _end(self, sequence: Sequence) -> None:
        """Finished, aborted or failed: forget it. Its blocks go once no step in flight can touch them."""
        sequence.finished = True
        if sequence.row >= 0:
            self._leave_row(sequence)
            self._vacated = True
        else:
            self._num_gone += 1
            self._tidy_queue()
        live = self._live[sequence.request.request_id]
        live.remove(sequence)
        if not live:
            del self._live[sequence.request.request_id]

    def _tidy_queue(self) -> None:
        """Entries whose sequence has ended are at most half of the queue: the work is paid for by those that go."""
        if 2 * self._num_gone > len(self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[1].finished]
            heapq.heapify(self._waiting)
            self._num_gone = 0

    def _leave_row(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        if self._flights:
            # Published when their step was planned; whether it went well nobody will look at once the sequence is gone.
            self.manager.distrust(sequence.blocks, int(self._rows.committed[sequence.row]))
        self.manager.free(sequence.blocks)
        sequence.blocks = None
        row = self._rows.remove(sequence)
        self._delta.removed.append(row)
        self._delta.appended = [entry for entry in self._delta.appended if entry[1] != row]


def _can_resume(resumed: dict[int, list[int]], n: int, most: int) -> bool:
    return bool(resumed) and all(0 <= index < n and len(produced) < most for index, produced in resumed.items())


def _length_is_known(sequence: Sequence) -> bool:
    """Will it answer with all the tokens it may?"""
    params = sequence.request.params
    return not (sequence.stop_ids or params.stop or params.structured_outputs)


def _still_there(sequence: Sequence, flight: _InFlight) -> bool:
    """Does it still have the row and the blocks which that step worked on? Not after a preemption, even if it is back."""
    return sequence.row >= 0 and sequence.admitted_at < flight.step


def _joined(chunks: list[Logprobs]) -> Logprobs:
    """The prompt's log-probabilities, whole again."""
    names = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
    return Logprobs(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names))

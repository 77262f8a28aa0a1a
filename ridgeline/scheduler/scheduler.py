"""The scheduler: one rule, no phases.

A sequence has known tokens and computed tokens. Each step hands tokens to sequences until the token budget is spent;
a sequence whose computed tokens catch up with its known ones samples the next. Chunked prefill, prefix hits, decode and
resumption after preemption are all just numbers in that rule.

    schedule()  ─▶ StepPlan          rows that run, then sequences that join
    update()    ◀─ StepResult        token values, stops, full blocks; ─▶ TokenDeltas for requests

Plans may be made while earlier ones are still in flight: `known` grows when a sample is planned, its value arrives with
the result. So a stop is noticed one step late at most, and the extra token is dropped. With drafts, `known` and `computed`
grow by the most that the step may bring, and shrink to the truth with its result.

Waiting sequences are in `waiting_queue`, rows and blocks of running ones in `running`, requests become sequences in
`live_requests`, and results become answers in `answers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.cache.manager import KVManager
from ridgeline.messages import Request, StepPlan, StepResult, TokenDelta, TokenDeltas
from ridgeline.scheduler.answers import Answers
from ridgeline.scheduler.bookkeeping import Delta, DraftPlan, InFlight, SchedulerCounters, SchedulerLimits, Steady
from ridgeline.scheduler.decodes import Again, Decodes
from ridgeline.scheduler.draft_slots import Asking, give_again, give_drafts, note_wanted, tell_time, waits_for_tokens
from ridgeline.scheduler.drafting import Drafter, NoDrafter
from ridgeline.scheduler.joining import Joined, Joining
from ridgeline.scheduler.live_requests import LiveRequests
from ridgeline.scheduler.policy import Admission, ContinuousBatching
from ridgeline.scheduler.running import NO_BLOCKS, NONE, ON_PROMPT, ON_SAMPLED, SCORED, Running
from ridgeline.scheduler.sequence import Sequence
from ridgeline.scheduler.step_time import NoTimeModel, StepTimeModel
from ridgeline.scheduler.waiting_queue import WaitingQueue
from ridgeline.sizes.batch_levelling import level_rows

if TYPE_CHECKING:
    from ridgeline.grammar.matcher import Matcher
    from ridgeline.scheduler.bookkeeping import Masked

_Ahead = list[tuple[Sequence, int]]      # waiting sequences and tokens kept for them
_NOTHING: tuple = (NONE, [], NO_BLOCKS, NONE, NONE, NONE.astype(np.int8))


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
        drafter: Drafter | None = None,
        native: Any = None,
    ) -> None:
        """`native`: see Decodes."""
        self.limits = limits
        self.manager = manager
        self.counters = SchedulerCounters()
        self.started: list[str] = []                         # requests whose first stay in a row began with the newest plan
        self.admission: Admission = admission or ContinuousBatching()
        self.step_tokens: int | None = None                  # fewer than the limit, for a while after memory ran out
        self.level: int | None = None                        # rows at once, see begin_with_longest()
        self._waiting = WaitingQueue()
        self._running = Running(manager, limits.max_rows)
        self._decodes = Decodes(native, self._running.rows, manager.block_size)
        self.answers = Answers(
            LiveRequests(eos_token_ids, use_priorities, seed), self._waiting, self._running, manager, self.counters,
            drafter or NoDrafter(), self._decodes,
        )
        self._joining = Joining(
            limits, manager, self._running, self._waiting, time_model or NoTimeModel(), self.counters
        )
        self._flights: deque[InFlight] = deque()
        self._steady: Steady | None = None                   # of the newest plan
        self._step = 0

    @property
    def drafter(self) -> Drafter:
        return self.answers.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        """From the next step on."""
        self.answers.drafter = drafter

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        for sequence in self.answers.live.add(request, self.limits.max_model_len, self._step):
            self._waiting.push(sequence)

    def begin_with_longest(self) -> None:
        """For requests that are all there and wait for each other: start those with the longest answers first, priorities aside.
        Answers do not change by it.

        Such a run ends with the longest answer, alone in its last steps, which take nearly as long as full ones. If it starts
        first, it is ahead by the steps that the other prompts take. Short answers are held back to run beside it, if only their
        length ends them (sizes/batch_levelling.py). The order is left alone if the KV cache cannot hold all requests at once:
        requests with a common prefix would then run far apart, and the prefix might be evicted in between. Either way no prompt
        is overtaken by a shorter one from now on (fairness.py).
        """
        waiting = self._waiting.sequences()
        level = None
        blocks = sum(self.manager.blocks_for(sequence.limit, self.limits.max_step_tokens) for sequence in waiting)
        if blocks <= self.manager.num_free:
            if all(each.length_is_known and each.turn.priority == waiting[0].turn.priority for each in waiting):
                answers = [sequence.limit - sequence.num_prompt for sequence in waiting]
                level = level_rows(answers, self.limits.enough_rows, self.limits.max_rows)
            self._waiting.longest_first()
        self._joining.fair = False
        self.level = self.admission.use_level(level)

    def use_prefix_cache(self, use: bool) -> None:
        """From now on. What it holds stays."""
        self._joining.finds_prefixes = use

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Forget a request, or one of its answers, at once. False when it is not here (finished, or never was)."""
        wanted = [sequence for sequence in self.answers.live.of(request_id) if index is None or sequence.index == index]
        for sequence in wanted:
            self.answers.end(sequence)
        return bool(wanted)

    def set_matchers(self, request: Request, matchers: Mapping[int, Matcher]) -> None:
        """The grammar of a request is compiled: a matcher for each answer. No error if the request has ended."""
        for sequence in self.answers.live.same(request):
            self.answers.set_matcher(sequence, matchers[sequence.index])

    def fail_request(self, request: Request, reason: str) -> list[TokenDelta]:
        """It cannot run; its answers end with an error."""
        return [self.fail(sequence, reason) for sequence in self.answers.live.same(request)]

    def fail(self, sequence: Sequence, reason: str, bad_request: bool = False) -> TokenDelta:
        """One answer ends with an error that does not cast doubt on its KV. Its token in flight will be dropped."""
        return self.answers.fail(sequence, reason, bad_request)

    @property
    def num_constrained(self) -> int:
        """Rows with a grammar that sample in the newest step in flight."""
        return len(self._flights[-1].constrained)

    def constrained(self) -> Masked:
        """Of the rows that sample in the newest step, those with a grammar whose answer goes on."""
        return self._flights[-1].matchers()

    def said(self, result: StepResult) -> list[tuple[Matcher, int]]:
        """The newest token of each answer with a grammar, from the oldest step in flight; update() feeds it to the matcher."""
        return self._flights[0].said(result)

    def masked(self, left_out: Set[Matcher]) -> list[TokenDelta]:
        """The masks of the newest step are filled, but these."""
        return self.answers.masked(self._flights[-1], left_out)

    @property
    def num_arrived(self) -> int:
        """Sequences so far."""
        return self.answers.live.num_arrived

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running.rows)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def waits_for_drafts(self) -> bool:
        return bool(self._flights) and waits_for_tokens(self.drafter, self._flights)

    @property
    def begins_answers(self) -> bool:
        """The oldest step in flight has prompts."""
        return self._flights[0].num_prompt_tokens > 0

    @property
    def has_work(self) -> bool:
        return bool(self.answers.live) or bool(self._flights)

    # -- planning ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. Without rows there is nothing to do now, or everything waits for steps in flight.

        Such a plan is not booked: it has no result, and its delta goes with the next one.
        """
        self.started = []
        self._running.publish()
        again = self._decode_again()
        rows, tokens, budget, ahead = self._give_to_running() if again is None else again.given
        num_running = len(rows)
        places = 0 if ahead is None else self._places
        if budget > 0 and places > 0:
            joined = Joined(self._step, self._num_decodes(rows), places, budget, budget)
            self._waiting.promote_aged(self._step - self.limits.max_waiting_steps)
            full = self._joining.admit(joined, ahead or [])
            self.started = joined.started
            self.admission.admitted(self.num_running, full or self._running.rows.full or not self.num_waiting)
            if joined.rows:
                again = None
                rows = np.concatenate([rows, np.array(joined.rows, np.int64)])
                tokens = np.concatenate([tokens, np.array(joined.tokens, np.int64)])
        if not len(rows):
            return StepPlan(self._step, *_NOTHING)
        drafts = None
        if self.drafter.active and self.drafter.awake():
            room = self._most_tokens - (len(rows) if again is not None else int(tokens.sum()))
            asking = Asking(self.drafter, self._running, self.manager, self._decodes, room, not self._flights)
            if again is not None:
                return self._plan_again(again.steady, give_again(asking, again))
            rows, tokens, drafts = give_drafts(asking, self._steady, rows, tokens, num_running)
        return self._plan(rows, tokens, drafts) if again is None else self._plan_again(again.steady, None)

    def _decode_again(self) -> Again | None:
        """The rows of the newest plan, if they all decode again, and what each may have; None: it takes another look."""
        rows, steady = self._running.rows.ranked(), self._steady
        if self._decodes.native is None or steady is None or steady.rows is not rows:
            return None
        if self.limits.stages > 1 or self._running.rows.answers.num_waiting:
            return None
        if steady.most_drafts is None and self.drafter.active and self.drafter.will_look:
            note_wanted(self._running.rows, steady)
        budget, again = self._budget(len(rows), 0) - len(rows), self._decodes.again(steady)
        if again is None or budget < 0 or not self._running.grow_each(rows, again.lacking):
            return None
        again.given = rows, steady.ones, budget, []
        return again

    def _plan_again(self, steady: Steady, drafts: DraftPlan | None) -> StepPlan:
        """_plan() for rows that all decode, as in the newest plan."""
        if drafts is not None and drafts.order is not None:
            steady = steady.in_order(drafts.order[0])
        width = None if drafts is None else drafts.width
        ends, stays, total = self._decodes.book(steady, width)
        self._step += 1
        plan = self._running.take_plan(self._step, steady, None if width is None else width + np.int32(1))
        if drafts is not None:
            drafts.num_positions, drafts.goes_on = total, steady.goes_on
            plan.width, plan.drafts, plan.drafts_from = drafts.width, drafts.tokens, drafts.start
        alone, rows = not self._flights, steady.rows
        self._flights.append(InFlight(self._step, rows, stays, ends, steady.sampled, steady, len(ends), 0, 0, drafts, 0, alone))
        self._count(total)
        return plan

    def _give_to_running(self) -> tuple[np.ndarray, np.ndarray, int, _Ahead | None]:
        """Tokens for the rows that run: decodes first, then prompts, until the budget is spent.

        Also what is left of the budget, and the waiting sequences it is kept for; None: blocks ran short, so none may join.
        """
        table = self._running.rows
        rows = table.ranked()
        if not len(rows):
            return rows, rows, self._budget(0, 0), []
        need = table.known[rows] - table.computed[rows]
        # A row at its limit has all it may have; its last token needs no KV.
        ready = (need > 0) & (table.known[rows] < table.limit[rows]) & ~table.answers.waits[rows]
        if self.limits.stages > 1:
            ready &= InFlight.free_rows(self._flights, rows, need, self.limits)
        if np.count_nonzero(ready) < len(rows):
            rows, need = rows[ready], need[ready]
        prefill = need > 1
        num_prefill = int(np.count_nonzero(prefill))
        num_decodes = len(rows) - num_prefill
        position = int(table.computed[rows[prefill]].max()) if num_prefill else 0
        tokens, budget = need, self._budget(num_decodes, position)
        whole = num_prefill == 0 and num_decodes <= budget
        ahead: _Ahead = []
        if not whole:
            order = np.argsort(prefill, kind="stable")
            rows, need = rows[order], need[order]
            cost = need * self._weight(rows, need)
            before = np.cumsum(cost) - cost
            given = np.minimum(cost, np.maximum(0, budget - before))
            if self._joining.fair and num_decodes < budget < before[-1] + cost[-1]:
                self._running.promote_aged(self._step - self.limits.max_waiting_steps)
                given[num_decodes:], ahead = self._joining.share(
                    rows[num_decodes:], cost[num_decodes:], budget - num_decodes, self._places
                )
            tokens = np.maximum(given * need // cost, given > 0)

        short = self._grow_rows(rows, tokens)
        if short:
            alive = np.array([table.sequences[row] is not None for row in rows.tolist()], bool)
            rows, tokens = rows[alive], tokens[alive]
        if short or not whole:
            some = tokens > 0
            rows, tokens = rows[some], tokens[some]
            for place in np.nonzero(tokens > 1)[0].tolist():     # of prompts: no row has drafts yet
                self._running.publish_later(int(rows[place]), int(tokens[place]))
        spent = int(tokens.sum()) if whole else int((tokens * self._weight(rows, tokens)).sum())
        return rows, tokens, budget - spent, None if short else ahead

    def _weight(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """int [R]: what one of these tokens counts as, where a row computes more than one."""
        return np.where((self._running.rows.want[rows] & SCORED).astype(bool) & (tokens > 1), self._joining.scored_weight, 1)

    def _grow_rows(self, rows: np.ndarray, tokens: np.ndarray) -> bool:
        """Blocks for these tokens; rows that must wait get none. True: blocks ran short, or sequences were preempted for them."""
        table, preemptions, short = self._running.rows, self.counters.preemptions, False
        ends = table.computed[rows] + tokens
        full = self._running.grow(rows, ends)
        for place, row, end in zip(full.tolist(), rows[full].tolist(), ends[full].tolist(), strict=True):
            sequence = table.sequences[row]
            if sequence is None:                                 # preempted a moment ago, for a row before it
                continue
            if not self._grow(sequence, end):
                tokens[place] = 0
                short = True
        return short or self.counters.preemptions > preemptions

    def _budget(self, num_decodes: int, position: int) -> int:
        """Token budget of a step: the limit, or the decodes and as many prompt tokens as the step time allows. `position`: the
        last one at which a prompt goes on."""
        most = self._most_tokens
        for_prompts = max(1, self._joining.time_model.prompt_tokens(num_decodes, position, most))
        budget = min(most, num_decodes + for_prompts)
        self._joining.weigh(num_decodes, max(1, budget - num_decodes))
        return budget

    @property
    def _places(self) -> int:
        return self.admission.places(self.num_running, self.num_waiting) if self._waiting else 0

    @property
    def _most_tokens(self) -> int:
        return min(self.limits.max_step_tokens, self.step_tokens or self.limits.max_step_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for a running sequence; others are preempted if there are too few. False: it waits, or was preempted itself."""
        blocks, row = sequence.blocks, sequence.row
        assert blocks is not None
        while (entries := self.manager.grow(blocks, num_tokens)) is None:
            if self.manager.pool.num_releasing:
                return False                                     # blocks will be released: preempt no sequence for them
            victim = self._running.victim(sequence)
            if victim is None:
                if not self._flights:
                    raise AssertionError("the KV pool is too small for one sequence")
                return False                                     # a step in flight will free what falls behind a window
            self._preempt(victim)
            if victim is sequence:
                return False
        self._running.append(row, blocks, entries)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's row and blocks; it waits, and computes its known tokens again."""
        self.counters.preemptions += 1
        sequence.num_promised = sum(flight.samples(sequence.row, self._running.rows.stay) for flight in self._flights)
        sequence.prefill.restart(int(self._running.rows.computed[sequence.row]), sequence.num_promised > 0)
        self._running.leave(sequence)
        self._waiting.push(sequence)

    def _num_decodes(self, rows: np.ndarray) -> int:
        """Rows that go on from their newest token. The others compute prompts."""
        table = self._running.rows
        return int(np.count_nonzero(table.known[rows] - table.computed[rows] == 1))

    def _plan(self, rows: np.ndarray, tokens: np.ndarray, drafts: DraftPlan | None) -> StepPlan:
        """Book the step as done, so that the next can be planned, and write it down as a delta."""
        table = self._running.rows
        self._step += 1
        total = int(tokens.sum())
        starts = table.computed[rows]
        ends = starts + tokens
        decodes = table.known[rows] - starts == 1
        sampled = ends >= table.known[rows]
        num_sampled = int(np.count_nonzero(sampled))
        recomputed, steady = 0, self._steady
        own = tokens if drafts is None else tokens - drafts.width
        if drafts is not None and drafts.order is not None:      # what is written down of rows is in their own order
            order, before = drafts.order
            if steady is None or steady.rows is not before:
                back = order.argsort()
                steady, recomputed = self._write(before, own[back], starts[back], ends[back], sampled[back])
            steady = steady.in_order(order)
        elif steady is None or steady.rows is not rows or num_sampled < len(rows) or (total > len(rows) and drafts is None):
            steady, recomputed = self._write(rows, own, starts, ends, sampled)
        table.computed[rows] = ends
        table.known[rows[sampled]] += 1
        if drafts is not None:
            table.known[rows] += drafts.width
            drafts.num_positions = num_sampled + int(drafts.width.sum())
            drafts.goes_on = bool(table.answers.goes_on[rows[sampled]].all())
        plan = self._running.take_plan(self._step, steady, None if drafts is None else tokens.astype(np.int32), recomputed)
        if drafts is not None:
            plan.width, plan.drafts, plan.drafts_from = drafts.width, drafts.tokens, drafts.start
        self._book(rows, tokens, starts, ends, sampled, decodes, steady, drafts)
        self.counters.chunks += len(rows) - num_sampled
        return plan

    def _write(
        self, rows: np.ndarray, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray, sampled: np.ndarray
    ) -> tuple[Steady, int]:
        """A plan's arrays and sequences, and how many of its tokens are computed again. `tokens`: without drafts."""
        table = self._running.rows
        asked, of_prompt = table.want[rows], starts < table.num_prompt[rows]
        want = (asked & ON_SAMPLED) * sampled | (asked & ON_PROMPT) * of_prompt
        sequences = [sequence for row in rows.tolist() if (sequence := table.sequences[row]) is not None]
        again = np.minimum(ends, table.lost[rows]) - starts
        recomputed = int(again[again > 0].sum())
        chosen = [sequence for sequence, samples in zip(sequences, sampled.tolist(), strict=True) if samples]
        for sequence in chosen:
            sequence.prefill.done = True
        steady = Steady(
            rows, rows.astype(np.int32), tokens.astype(np.int32), want, sequences,
            [(place, sequence) for place, sequence in enumerate(chosen) if sequence.matcher is not None], sampled,
        )
        # Rows that decode now decode from now on: they have their prompts, and what they had lost.
        decode = int(tokens.sum()) == len(chosen) == len(rows) and not recomputed and not of_prompt.any()
        self._steady = steady if decode else None
        return steady, recomputed

    def _book(
        self, rows: np.ndarray, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray, sampled: np.ndarray,
        decodes: np.ndarray, steady: Steady, drafts: DraftPlan | None,
    ) -> None:
        """What update() needs to know of the step, and the counters."""
        total, num_decodes = int(tokens.sum()), int(np.count_nonzero(decodes))
        decode_tokens = num_decodes if drafts is None else int(tokens[decodes].sum())
        num_pairs = num_scored = 0
        if total > decode_tokens:
            num_pairs = int(((starts + ends) * tokens)[~decodes].sum()) // 2
            num_scored = int(tokens[(steady.want & SCORED).astype(bool)].sum())
        self._flights.append(InFlight(
            self._step, rows, self._running.rows.stay[rows], ends, sampled, steady, num_decodes, total - decode_tokens,
            num_pairs, drafts, num_scored, not self._flights,
        ))
        self._count(total)

    def _count(self, total: int) -> None:
        """The step that was just planned, and its tokens."""
        self.manager.pool.submitted(self._step)
        table, counters = self._running.rows, self.counters
        table.num_used += total
        counters.steps += 1
        counters.computed_tokens += total
        counters.held_slots += table.num_held * self.manager.block_size
        counters.used_slots += table.num_used

    def start_over(self) -> list[Sequence]:
        """The newest step could not be launched: forget it. All others have been taken in. Running sequences wait again, as after
        a preemption, and the device forgets its rows. Returns the sequences of that step."""
        (flight,) = self._flights
        for sequence in self._running.rows.running():            # with the step in flight: what it was to compute is distrusted
            self._preempt(sequence)
        for sequence in flight.sequences:
            sequence.num_promised = 0
            sequence.prefill.restart(0)
        self.answers.note_outgrown(flight)                       # perhaps in this step, which masked() did not hear of
        self._flights.clear()
        self.manager.pool.retired(flight.step)
        self._running.delta, self._steady = Delta(), None
        self.counters.out_of_memory += 1
        return [sequence for sequence in flight.sequences if not sequence.finished]

    # -- results -------------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> TokenDeltas:
        """Take in the oldest step in flight: token values, stops, full blocks."""
        flight = self._flights.popleft()
        taken = self.answers.take_at_once(flight, result, self._flights)
        surplus = flight.check(result) if taken is None else None
        counters = self.counters
        counters.useful_tokens += result.useful
        counters.wasted_tokens += result.recomputed
        counters.padded_tokens += result.padded
        counters.rejected_tokens += result.rejected
        counters.prompt_tokens += flight.num_prompt_tokens
        proposing = result.draft_seconds + result.catch_up_seconds
        seconds = result.device_seconds - proposing      # of the model itself
        self._joining.time_model.observe(
            flight.num_decodes, flight.num_prompt_tokens, flight.num_pairs, seconds, flight.num_scored
        )
        self.manager.pool.retired(flight.step)
        drafter = self.drafter
        if drafter.active and not flight.num_prompt_tokens and result.typical and not drafter.slept(flight.num_decodes):
            tell_time(drafter, flight, result, seconds, proposing)
        if taken is not None:
            return self.answers.tell(flight, result, taken)
        if flight.drafts is not None and surplus is not None:
            self.answers.settle(flight, flight.drafts, surplus, result, self._flights)
        return self.answers.take_in(flight, result)

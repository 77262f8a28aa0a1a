"""Lets waiting sequences join the batch: they get a row, blocks and tokens of the step that is being planned.

They join by rank, and shorter ones may go ahead of a prompt that is cut (fairness.py). Where blocks are short the first
in line is not overtaken: otherwise small sequences would take the room of a large one for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import numpy as np

from ridgeline.cache.manager import Hit, KVManager
from ridgeline.messages import Want
from ridgeline.scheduler import fairness
from ridgeline.scheduler.bookkeeping import SchedulerCounters, SchedulerLimits
from ridgeline.scheduler.policy import rank
from ridgeline.scheduler.running import Running, wanted
from ridgeline.scheduler.sequence import Sequence
from ridgeline.scheduler.step_time import StepTimeModel
from ridgeline.scheduler.waiting_queue import WaitingQueue

_LOOKS = 8                           # waiting prompts that are looked up in the prefix cache per step, to see how short they are


@dataclass(slots=True)
class Joined:
    """The sequences that join in one step."""

    step: int                        # that was planned last
    num_decodes: int
    places: int                      # most that may join
    room: int                        # token budget when the first joined …
    budget: int                      # … and what is left of it
    promised: int = 0                # blocks that running sequences will take
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    started: list[str] = field(default_factory=list)             # requests whose first stay in a row begins


class Joining:
    def __init__(
        self, limits: SchedulerLimits, manager: KVManager, running: Running, waiting: WaitingQueue, time_model: StepTimeModel,
        counters: SchedulerCounters,
    ) -> None:
        self.fair = limits.chunked_prefill               # a prompt that is computed whole cannot lend a part of a step
        self.finds_prefixes = True
        self.time_model = time_model
        self.scored_weight = 1                           # prompt tokens that a token with log-probabilities counts as, this step
        self._limits = limits
        self._manager = manager
        self._running = running
        self._waiting = waiting
        self._counters = counters
        self._looked = 0                                 # prompts looked up, so that each has its turn

    def admit(self, joined: Joined, ahead: Several[tuple[Sequence, int]]) -> bool:
        """Let sequences join while rows, blocks and budget last; True: blocks ran short. `ahead` go first, with at most that
        many tokens each. Unready ones are passed over."""
        waiting, running = self._waiting, self._running
        running.vacated &= len(running.rows) > 0
        joined.promised = running.promised(running.rows.ranked())
        self._join_ahead(joined, ahead)
        unready: list[Sequence] = []
        full = False
        while self._goes_on(joined) and (sequence := waiting.first()) is not None:
            if not sequence.ready:
                unready.append(waiting.pop())
                continue
            hit = self._hit(sequence)
            cut = self._prompt(sequence, hit.num_tokens)
            others = min(joined.places - len(joined.rows), self._limits.max_rows - len(running.rows)) - 1
            if self.fair and cut.rest > joined.budget and (shorter := self.go_ahead(cut, others)):
                shares = fairness.share([cut, *(prompt for _, prompt in shorter)], joined.budget)
                self._join_ahead(joined, [(each, tokens) for (each, _), tokens in zip(shorter, shares[1:], strict=True)])
                hit = self._hit(sequence)                        # blocks of the first may have been reused
            spent = self._join(joined, sequence, hit, joined.budget) if self._goes_on(joined) else 0
            if not spent:
                full = spent is None
                break
        for sequence in unready:
            waiting.push(sequence)
        waiting.tidy()
        return full

    def share(
        self, rows: np.ndarray, need: np.ndarray, budget: int, places: int
    ) -> tuple[list[int], list[tuple[Sequence, int]]]:
        """Running prompts cannot all be finished: tokens for each (fairness.py), and for waiting sequences that go ahead."""
        turns = [sequence.turn for row in rows.tolist() if (sequence := self._running.rows.sequences[row]) is not None]
        prompts = [fairness.Prompt(turn.priority, turn.order, rest) for turn, rest in zip(turns, need.tolist(), strict=True)]
        running = sorted(prompts)
        cut = fairness.first_cut(running, budget)
        assert cut is not None
        waiting = self.go_ahead(running[cut], places)
        ranked = sorted([*running, *(prompt for _, prompt in waiting)])
        tokens = dict(zip(ranked, fairness.share(ranked, budget), strict=True))
        return [tokens[prompt] for prompt in prompts], [(each, tokens[prompt]) for each, prompt in waiting if tokens[prompt]]

    def go_ahead(self, cut: fairness.Prompt, places: int) -> list[tuple[Sequence, fairness.Prompt]]:
        """Waiting sequences that may compute before a prompt that is cut, by rank; none where the first in line has no room."""
        table = self._running.rows
        places = min(places, self._limits.max_rows - len(table))
        waiting = [sequence for sequence in self._waiting.sequences() if sequence.ready] if self.fair and places > 0 else []
        if not waiting:
            return []
        first = min(waiting, key=rank)
        promised = self._running.promised(table.ranked())
        if not self._has_room(self._hit(first), len(first.tokens), promised):
            return []
        self._look_up([sequence for sequence in waiting if not fairness.overtakes(self._prompt(sequence), cut)])
        short = [(prompt, sequence) for sequence in waiting if fairness.overtakes(prompt := self._prompt(sequence), cut)]
        short = heapq.nsmallest(places, short, key=lambda each: (each[0].priority, each[0].rest, each[0].order))
        found: list[tuple[Sequence, fairness.Prompt]] = []
        for _, sequence in short:
            hit = self._hit(sequence)
            if not self._has_room(hit, len(sequence.tokens), promised):
                break
            promised += self._needed(hit, len(sequence.tokens)) + len(self._manager.groups)
            if fairness.overtakes(prompt := self._prompt(sequence, hit.num_tokens), cut):
                found.append((sequence, prompt))
        return sorted(found, key=lambda each: each[1][:2])

    def _look_up(self, long: list[Sequence]) -> None:
        """Some of the long prompts, in turn: the prefix cache may hold most of one by now."""
        for sequence in heapq.nsmallest(_LOOKS, long, key=lambda each: each.prefill.looked_up):
            self._looked += 1
            sequence.prefill.looked_up = self._looked
            sequence.prefill.found = self._hit(sequence).num_tokens

    def _goes_on(self, joined: Joined) -> bool:
        return joined.budget > 0 and len(joined.rows) < joined.places and not self._running.rows.full

    def _hit(self, sequence: Sequence) -> Hit:
        self._running.publish()
        return self._running.hit(sequence, self.finds_prefixes)

    def _join_ahead(self, joined: Joined, ahead: Several[tuple[Sequence, int]]) -> None:
        for sequence, tokens in ahead:
            if tokens and self._goes_on(joined):
                self._join(joined, sequence, self._hit(sequence), min(tokens, joined.budget))

    def _join(self, joined: Joined, sequence: Sequence, hit: Hit, allowed: int) -> int | None:
        """It joins with at most that many tokens of the budget; returns how many it takes. 0: too few for a whole prompt; None:
        too few blocks."""
        running, chunked = self._running, self._limits.chunked_prefill
        rest = len(sequence.tokens) - hit.num_tokens
        most = allowed
        if hit.num_tokens and chunked:                           # it goes on where tokens weigh more
            fits = self.time_model.prompt_tokens(joined.num_decodes, hit.num_tokens, joined.room)
            most = max(1, min(allowed, fits * allowed // joined.room))   # its share of what is left
        most = max(1, most // self._weight(sequence))
        count = min(rest, most) if chunked else rest
        if count > allowed:
            return 0
        has_room = self._has_room(hit, len(sequence.tokens), joined.promised)
        blocks = self._manager.start(hit, hit.num_tokens + count) if has_room else None
        if blocks is None:
            return None
        self._waiting.remove(sequence)
        self._counters.joins += running.vacated
        row = running.join(sequence, hit, blocks, joined.step)
        joined.promised += running.promised(np.array([row]))
        if sequence.prefill.lost_tokens == 0 and sequence.leader is None:
            sequence.prefill.num_cached = hit.num_tokens
            joined.started.append(sequence.request.request_id)
        if count > 1:                                            # as of rows that run, see publish_later
            running.publish_later(row, count)
        joined.rows.append(row)
        joined.tokens.append(count)
        spent = -(-count * allowed // most)
        joined.budget -= spent
        return spent

    def _has_room(self, hit: Hit, known: int, promised: int) -> bool:
        """Room for all its known tokens, and for the blocks promised to running sequences.

        With less, a running sequence would have to be preempted a few steps later.
        """
        return self._manager.num_free >= self._needed(hit, known) + promised

    def _needed(self, hit: Hit, known: int) -> int:
        return self._manager.blocks_beyond(hit, known, self._limits.max_step_tokens)

    def weigh(self, num_decodes: int, budget: int) -> None:
        """What a token with prompt log-probabilities counts as, in a step with that budget for prompts."""
        if self._limits.chunked_prefill:                 # a prompt that is computed whole is computed whatever it costs
            self.scored_weight = max(1, -(-budget // max(1, self.time_model.scored_tokens(num_decodes, budget))))

    def _weight(self, sequence: Sequence) -> int:
        return self.scored_weight if wanted(sequence) & Want.PROMPT_LOGPROBS else 1

    def _prompt(self, sequence: Sequence, num_cached: int | None = None) -> fairness.Prompt:
        """By what the prefix cache held when it was last asked, unless that is given."""
        found = sequence.prefill.found if num_cached is None else num_cached
        rest = (len(sequence.tokens) - found) * self._weight(sequence)
        return fairness.Prompt(sequence.turn.priority, sequence.turn.order, rest)

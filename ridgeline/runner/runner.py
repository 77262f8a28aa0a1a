"""The runner executes StepPlans: submit() launches the forward pass, sample() picks tokens, collect() brings them to the host.

Forward and sampling are two calls, so that masks for step N can be made from token N-1 while forward N runs. Several
steps may be between submit and collect; only collect waits for the device. The runner knows rows, never requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.layers.batch import Batch
from ridgeline.messages import StepPlan, StepResult, Want
from ridgeline.metrics import HAPPENED
from ridgeline.models.decoder import Decoder
from ridgeline.ops.sampling.divided_logits import enough
from ridgeline.ops.sampling.logprobs import logprobs as token_logprobs
from ridgeline.ops.sampling.noise import to_device
from ridgeline.runner.device_rows import EVERY_HIDDEN, TOKEN, DeviceRows
from ridgeline.runner.forward import Computed, Forward
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.runner.proposers.draft_model import NoDraftModel, Spent
from ridgeline.runner.row_tables import Guesses
from ridgeline.runner.sampler import Prepared, Sampler
from ridgeline.runner.to_host import Fetched, Landing, as_logprobs, logprobs_of, pooled, send_beside
from ridgeline.runner.verify import (
    Planned,
    Positions,
    drafted_tokens,
    lay_out_guesses,
    take_back,
    verify,
    verify_straight,
)
from ridgeline.sizes.graph_shapes import Shape
from ridgeline.sizes.sampling_costs import PROMPT_LOGPROB_ROWS

_LOGPROBS = np.int8(Want.LOGPROBS)
_NOTHING = Computed(None, None)
_NO_PLACES = np.zeros(0, np.int64)
_BROKEN = "the model produced no finite logits for this request"
_NONE_LEFT = (
    "the request leaves no token to choose: what its grammar, allowed_token_ids, bad_words, logit_bias, penalties and min_tokens "
    "allow has nothing in common here"
)


@dataclass(slots=True)
class _Work:
    """What a plan's rows do; the same object for all steps in which they do the same."""

    key: tuple[bytes, bytes, bytes]
    shape: Shape | None              # what the step is filled up to
    places: np.ndarray               # places in the batch that sample …
    rows: np.ndarray                 # … and their rows
    num_new: np.ndarray              # int32: one for each of these places, none for the others
    of_prompts: bool                 # is more wanted than tokens and their log-probabilities?
    greedy: bool                     # do all rows want the best token, and nothing else?
    prepared: Prepared | None = None # how they choose in the newest of these steps
    positions: Positions | None = None   # that are sampled, in a step with drafts
    guesses: Guesses | None = None       # of such a step


@dataclass(slots=True)
class _Step:
    """A step between submit and collect."""

    plan: StepPlan
    work: _Work
    batch: Batch
    computed: Computed
    lengths: np.ndarray              # tokens of each row in the cache once the step is done
    landing: Landing
    shared: int                      # KV positions that are read once for several rows
    replayed: bool
    own_time: bool                   # no CUDA graph was captured meanwhile, and it will run like this again: see Forward.passing
    stays: np.ndarray                # see DeviceRows.stays
    spent: Spent                     # on the draft model
    waited: float                    # seconds for other ranks: at its begin so far, later its own
    prepared: Prepared | None = None # how its rows choose, where that is done before their masks are there
    prompt_logprobs: dict[int, Fetched] = field(default_factory=dict)
    hidden: dict[int, Fetched] = field(default_factory=dict)
    experts: Fetched | None = None   # of a mixture: experts that each layer read
    sampled: Fetched | None = None   # tokens, and which rows failed, where they are not the landing's greedy ones
    drafted: Planned | None = None   # with drafts
    settled: bool = False            # with drafts: rows know how many were accepted
    asked: list[tuple[int, int]] = field(default_factory=list)       # places that want log-probabilities, and how many
    logprobs: Fetched | None = None  # of those
    listed: list[np.ndarray] = field(default_factory=list)       # tokens that each of them lists …
    listed_logprobs: Fetched | None = None                       # … and their log-probabilities; None: none lists any
    new: _New | None = None          # what it brings, once it has been waited for


class Runner:
    drafter = NoDraftModel()         # a draft model, where there is one

    def __init__(
        self,
        model: Decoder,
        forward: Forward,
        rows: DeviceRows,
        sampler: Sampler,
        buffers: KVBuffers,
        comm: Communicator,
    ) -> None:
        self.model = model
        self.forward = forward
        self.rows = rows
        self._sampler = sampler
        self._buffers = buffers
        self._comm = comm
        self.memory: dict[str, int] = {}                 # measured bytes on a GPU, by part of the ledger
        self.rehearse: Callable[[], bool] = lambda: False    # captures one more graph; False: none is left (graph_warmup.py)
        self._steps: deque[_Step] = deque()
        self._work: _Work | None = None                  # of the newest step
        # On a CPU a step has run when it is launched, so its accepted drafts are known when the next one is packed.
        self.knows_at_once = rows.device.type == "cpu"
        self._landings = [Landing(rows.max_rows, rows.device) for _ in range(rows.depth + 1)]    # that no step uses
        self._num_logprobs: dict[int, int] = {}          # row -> alternatives wanted per sampled token
        self._listed_tokens: dict[int, np.ndarray] = {}  # row -> tokens whose log-probability it wants, whatever their rank
        self._num_prompt_logprobs: dict[int, int] = {}

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        if len(self._steps) > self.rows.depth:
            raise AssertionError(f"step {plan.step} is submitted while {len(self._steps)} are in flight")
        waited, replays, captured = self._comm.waited, self.forward.replays, HAPPENED["graph_recording"]
        self._hear_before(plan)
        landing = self._landings.pop() if self._landings else Landing(self.rows.max_rows, self.rows.device)
        landing.start()
        self.rows.late.behind = self._has_unknown_lengths()
        self._settle_rows(plan.rows)
        self._apply(plan)
        plan = self.drafter.complete(plan)
        key = (plan.rows.tobytes(), plan.num_tokens.tobytes(), plan.want.tobytes())
        work, again = self._work, self._repeats(plan, key)
        if work is None or not again:
            work = self._work = self._work_of(plan, key)
        starts = self.rows.length[plan.rows] if work.of_prompts else None
        batch = (self.rows.advance() if again else None) or self.rows.pack(plan, work.shape, work.guesses)
        work.greedy = work.greedy or self._is_greedy(plan, work.rows)
        computed = self.forward.run(batch, work.greedy)
        lengths = self.rows.length[plan.rows].astype(np.int32)
        step = _Step(
            plan, work, batch, computed, lengths, landing, self.rows.shared(batch), self.forward.replays > replays,
            HAPPENED["graph_recording"] == captured and not self.forward.passing, self.rows.stays(plan.rows),
            self.drafter.spent(), waited,
        )
        if self.model.expert_reads is not None:
            step.experts = Fetched(self.model.expert_reads)
        if computed.logits is not None and work.positions is None:
            step.prepared = work.prepared = self._sampler.prepare_early(work.rows, work.prepared)
        if starts is not None and computed.hidden is not None:
            step.prompt_logprobs = self._prompt_logprobs(plan, starts, computed.hidden)
            step.hidden = pooled(plan, starts, self.rows.num_prompt, computed.hidden)
        self._steps.append(step)

    def _repeats(self, plan: StepPlan, key: tuple[bytes, bytes, bytes]) -> bool:
        """Do the newest step's rows do the same again? While a larger graph stands in, each step asks for its own."""
        work = self._work
        if work is None or work.key != key or plan.added or self.forward.stood_in:
            return False
        return plan.width is None and work.positions is None

    def _hear_before(self, plan: StepPlan) -> None:
        """A draft model goes on from what the steps in flight say: if it is to propose for this plan, they are waited for."""
        if self.drafter.wanted(plan):
            for step in self._steps:
                self._hear(step)

    def _has_unknown_lengths(self, newest: _Step | None = None) -> bool:
        """Does the host not know yet what a step in flight before `newest` accepted? It is one step: `depth` is 0 or 1. In a
        pipeline more are in flight, but none has a row of the next one (InFlight.free_rows)."""
        if self.model.stage.count > 1:
            return False
        return any(step.work.positions is not None and not step.settled for step in self._steps if step is not newest)

    def _settle_rows(self, rows: np.ndarray) -> None:
        """In a pipeline a row comes again when rank 0 has its result. Another rank of the last stage may collect that later."""
        if self.model.stage.count == 1 or not self.model.stage.last:
            return
        for step in self._steps:
            positions = step.work.positions
            if positions is not None and not step.settled and np.isin(positions.rows, rows).any():
                step.landing.wait()                      # rank 0 has its own copy of the result; this one's may be on its way
                self._settle(step, positions)

    def _work_of(self, plan: StepPlan, key: tuple[bytes, bytes, bytes]) -> _Work:
        before = self._work
        if before is not None and before.key[2] == key[2]:       # the same is wanted of as many rows
            places, num_new, of_prompts = before.places, before.num_new, before.of_prompts
        else:
            samples = plan.want & TOKEN
            places, num_new = samples.nonzero()[0], samples.astype(np.int32)
            of_prompts = bool(np.count_nonzero(plan.want & EVERY_HIDDEN))
        rows = plan.rows[places]
        greedy = self._is_greedy(plan, rows)
        work = _Work(key, self.forward.shape(plan, greedy), places, rows, num_new, of_prompts, greedy)
        if plan.width is not None:
            work.guesses, work.positions = lay_out_guesses(plan, places, self.rows.tables)
        return work

    def said(self, rows: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """On a stage before the last one: what these rows have sampled there, to go on from, and how long they are without the
        drafts that were rejected."""
        device = self.rows.device
        self.rows.settle(rows, self.rows.length[rows] - lengths)
        self.rows.last_token.index_copy_(0, to_device(rows.astype(np.int64), device), to_device(tokens.astype(np.int64), device))

    def remove(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self._sampler.remove_row(row)
            self._num_logprobs.pop(row, None)
            self._listed_tokens.pop(row, None)
            self._num_prompt_logprobs.pop(row, None)

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster. False: nothing is left to do."""
        return self.forward.prepare() or self.rehearse()

    def start_over(self) -> bool:
        """Forget every row, and the step that could not be launched; those before it have been collected. Rows that go on are
        added again. Unused memory goes back to the device."""
        self._steps.clear()
        self._work = None
        self.drafter.start_over()
        self.remove(np.arange(self.rows.max_rows))
        if self.rows.device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def _apply(self, plan: StepPlan) -> None:
        self.remove(plan.removed)
        for added in plan.added:
            self._sampler.add_row(added.row, added)
            if added.params.logprobs is not None:
                self._num_logprobs[added.row] = added.params.logprobs
            if added.params.logprob_token_ids is not None:
                self._listed_tokens[added.row] = np.array(added.params.logprob_token_ids, np.int64)
            if added.params.prompt_logprobs is not None:
                self._num_prompt_logprobs[added.row] = added.params.prompt_logprobs
        self.rows.apply(plan)
        self._buffers.run(plan.block_ops)
        self.drafter.apply(plan)

    def _is_greedy(self, plan: StepPlan, rows: np.ndarray) -> bool:
        """Do all rows want the best token, and nothing else? Then the forward pass chooses it, every rank for itself: all have
        the same logits, to the last bit."""
        return not np.count_nonzero(plan.want & _LOGPROBS) and self._sampler.all_greedy(rows)

    def _prompt_logprobs(self, plan: StepPlan, starts: np.ndarray, hidden: Tensor) -> dict[int, Fetched]:
        """Position p says how likely prompt token p + 1 was; the last prompt position belongs to the answer."""
        found: dict[int, Fetched] = {}
        first = np.cumsum(plan.num_tokens) - plan.num_tokens
        for place in np.nonzero(plan.want & np.int8(Want.PROMPT_LOGPROBS))[0].tolist():
            row, start = int(plan.rows[place]), int(starts[place])
            end = min(start + int(plan.num_tokens[place]), int(self.rows.num_prompt[row]) - 1)
            if end <= start:
                continue
            targets = to_device(self.rows.given[row][start + 1 : end + 1].astype(np.int64), hidden.device)
            states = hidden[int(first[place]) : int(first[place]) + end - start]
            chunks = [
                token_logprobs(self.model.logits(part), wanted, self._num_prompt_logprobs[row])
                for part, wanted in zip(
                    states.split(PROMPT_LOGPROB_ROWS), targets.split(PROMPT_LOGPROB_ROWS), strict=True
                )
            ]
            found[place] = Fetched(targets, *(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        return found

    @torch.inference_mode()
    def sample(self, masks: np.ndarray | None = None) -> None:
        """Sample the newest submitted step, on the last stage. Its first rank decides, and all of its ranks get the tokens.

        `masks` are what grammars allow, for each row that samples; see Sampler.sample. A step with such rows is never a
        greedy one: the sampler counts them among those that change their logits.
        """
        step = self._steps[-1]
        computed, batch, rows = step.computed, step.batch, step.work.rows
        if computed.greedy is not None:
            step.landing.fetch(computed.greedy, len(batch.logits_index))
            if step.work.positions is None:
                self._sampler.said_greedily(rows)
            else:
                self._sent(step, step.work.positions, None)
        elif len(rows) and computed.logits is not None:
            logits, sample_rows = batch.picked(computed.logits, batch.sample_rows)
            allowed = None if masks is None else send_beside(masks, logits.device)
            # Where the step before was taken in between submit and now, the sampler's numbers are the true ones already.
            behind = self.rows.late.behind and (step.prepared is not None or self._has_unknown_lengths(step))
            late = self.rows.late.surplus.index_select(0, sample_rows) if behind else None
            if self._comm.tensor.size > 1:
                logits = self._enough(step, logits, late)
            if step.work.positions is not None:
                self._verify(step, step.work.positions, logits, allowed, late)
            else:
                tokens = self._choose(step, logits, sample_rows, allowed, late)
                self._fetch_logprobs(step, rows, logits, tokens)
        step.landing.stop()
        step.waited = self._comm.waited - step.waited
        step.computed = _NOTHING                         # it may hold much memory

    def _choose(self, step: _Step, logits: Tensor, places: Tensor, masks: Tensor | None, late: Tensor | None) -> Tensor:
        """A token of each row, which is its newest from now on and on its way to the host."""
        rows, last_token = step.work.rows, self.rows.last_token
        ready = step.prepared or self._sampler.prepare(rows)
        if ready.straight and (late is None or ready.lasting) and self._comm.tensor.size == 1:
            chosen, tokens, failed, _ = step.landing.room(len(rows))
            self._sampler.sample_into(logits, ready, masks, (tokens, failed), places, last_token)
            step.landing.fetch(chosen, len(rows))
            return tokens
        sampled = self._sampler.sample(logits, rows, masks, ready, late)
        tokens = self._comm.tensor.broadcast(sampled.tokens)
        last_token.index_copy_(0, places, tokens)
        step.sampled = Fetched(*(each for each in (tokens, sampled.failed, sampled.none_left) if each is not None))
        return tokens

    def _enough(self, step: _Step, here: Tensor, late: Tensor | None) -> Tensor:
        """Logits of all ids, from those of each rank; where a row needs only some of them, the others are -inf."""
        assert self.model.head is not None
        rows, offsets = step.work.rows, np.zeros(len(step.work.rows), np.int64)
        if step.work.positions is not None:
            rows, offsets = step.work.positions.each()
        how = self._sampler.choices(rows, offsets) if step.prepared is None else step.prepared.how
        needs_all = self._sampler.edits(rows) | np.isin(rows, list(self._num_logprobs))
        return enough(here, how, needs_all, self.model.head.division, late)

    def _verify(
        self, step: _Step, positions: Positions, logits: Tensor, masks: Tensor | None, late: Tensor | None
    ) -> None:
        """Sample every position of a step with drafts, and go on behind those that are accepted."""
        tokens, at_once = None, None
        if self._comm.tensor.size == 1:
            tokens = verify_straight(self._sampler, logits, positions, masks, late, step.batch, step.landing, self.rows)
        if tokens is None:
            positions.late = self.rows.late.guesses
            found = verify(self._sampler, logits, positions, masks, self._comm.tensor.broadcast, late)
            tokens, at_once, rows = found.tokens, found.at_once, to_device(positions.rows, logits.device)
            self.rows.last_token.index_copy_(0, rows, found.newest)
            step.sampled = Fetched(tokens, found.failed, found.none_left, found.accepted)
            if not self.knows_at_once:
                self.rows.late.follow(rows, to_device(positions.width, logits.device) - found.accepted)
        self._fetch_logprobs(step, np.repeat(positions.rows, 1 + positions.width), logits, tokens)
        self._sent(step, positions, at_once)

    def _sent(self, step: _Step, positions: Positions, at_once: np.ndarray | None) -> None:
        """A step with drafts is on its way. Where it has run already, the next is packed for rows of their true length."""
        step.drafted = Planned(step.work.places, positions, step.stays, step.lengths, at_once)
        rows, width = positions.rows, positions.width
        if at_once is not None:
            rows, width = rows[at_once], width[at_once]
        self._sampler.said_ahead(rows, 1 + width)
        if self.knows_at_once:
            self._settle(step, positions)

    def _settle(self, step: _Step, positions: Positions) -> list[np.ndarray]:
        """Rows are as long as was accepted. Returns what was found."""
        assert step.drafted is not None
        found = self._found(step)
        if not step.settled:
            step.settled = True
            # Planned for rows of the largest length.
            later = [(each.plan.rows, each.lengths) for each in self._steps if each.plan.step > step.plan.step]
            take_back(self.rows.tables, self._sampler, step.drafted, found[3], later)
        return found

    def _found(self, step: _Step) -> list[np.ndarray]:
        """Of a step with drafts: tokens, failures and reasons (none: the model's) by position, and accepted drafts by row that
        sampled."""
        if step.sampled is not None:
            return step.sampled.arrays()
        tokens, broken = step.landing.chosen()
        return [tokens, broken, broken[:0], step.landing.accepted(len(step.work.rows))]

    def _fetch_logprobs(self, step: _Step, rows: np.ndarray, logits: Tensor, tokens: Tensor) -> None:
        """For the rows that asked, all at once, with the largest number of alternatives that any of them wants."""
        wanted = self._num_logprobs
        asked = [index for index, row in enumerate(rows.tolist()) if row in wanted] if wanted else []
        if asked:
            places = step.work.places
            if step.work.positions is not None:
                places = np.repeat(places, 1 + step.work.positions.width)
            step.asked = [(int(places[index]), wanted[int(rows[index])]) for index in asked]
            most = max(count for _, count in step.asked)
            if len(asked) < len(rows):                   # an index that torch makes itself would have the host wait
                chosen = to_device(np.array(asked), logits.device)
                logits, tokens = logits.index_select(0, chosen), tokens.index_select(0, chosen)
            found = token_logprobs(logits, tokens, most)
            step.logprobs = Fetched(tokens, *found)
            if self._listed_tokens:
                self._fetch_listed(step, [int(rows[index]) for index in asked], logits, tokens, found[0])

    def _fetch_listed(self, step: _Step, rows: list[int], logits: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """The log-probabilities of the tokens that rows list. The sampled token's tells what the softmax divides by."""
        empty = np.zeros(0, np.int64)
        step.listed = [self._listed_tokens.get(row, empty) for row in rows]
        ids = np.zeros((len(rows), max(map(len, step.listed))), np.int64)
        for place, each in enumerate(step.listed):
            ids[place, : len(each)] = each
        total = logits.gather(1, tokens[:, None].long()).float() - logprobs[:, None]
        step.listed_logprobs = Fetched(logits.gather(1, to_device(ids, logits.device)).float() - total)

    def collect(self) -> StepResult:
        """The oldest step's result."""
        step = self._steps.popleft()
        plan, computed_tokens, spent = step.plan, step.plan.total_tokens, step.spent
        new, device_seconds = self._hear(step), step.landing.wait()
        self._landings.append(step.landing)
        return StepResult(
            step=plan.step,
            tokens=new.tokens,
            num_new=new.counts,
            lengths=step.lengths,
            logprobs=logprobs_of(step.asked, step.logprobs, step.listed, step.listed_logprobs),
            prompt_logprobs={place: as_logprobs(fetched) for place, fetched in step.prompt_logprobs.items()},
            hidden={place: fetched.arrays()[0] for place, fetched in step.hidden.items()},
            failed=new.failed,
            overconstrained=new.overconstrained,
            useful=computed_tokens - plan.recomputed - new.rejected,
            recomputed=plan.recomputed,
            padded=len(step.batch.tokens) - computed_tokens,
            rejected=new.rejected,
            device_seconds=device_seconds,
            draft_seconds=spent.draft_seconds,
            catch_up_seconds=spent.catch_up_seconds,
            caught_up=spent.caught_up,
            typical=step.own_time and (step.replayed or step.work.shape is None),
            shared=step.shared,
            experts=0 if step.experts is None else int(step.experts.arrays()[0].sum()),
            replayed=step.replayed,
            communication=step.waited,
        )

    def _hear(self, step: _Step) -> _New:
        """The step's new tokens, once it has run. The draft model gets them, except of rows that hold another sequence by now."""
        if step.new is not None:
            return step.new
        step.landing.wait()
        plan = step.plan
        new = step.new = _New(np.full((len(plan.rows), 1), -1, np.int32), step.work.num_new)
        if not self.model.stage.last:
            pass                                         # only the last stage has the sampled tokens
        elif step.work.positions is not None:
            new = step.new = self._verified(step, step.work.positions)
        elif len(step.work.places):
            self._take_tokens(step, new)
        if self.drafter.active:
            there = np.flatnonzero(step.stays == self.rows.stays(plan.rows))
            self.drafter.heard(plan.rows[there].astype(np.int64), new.tokens[there], new.counts[there])
        return new

    def _take_tokens(self, step: _Step, new: _New) -> None:
        """One token of each row that samples."""
        places = step.work.places
        if step.sampled is None:
            values, broken = step.landing.chosen()
            if len(values) > len(places):                # the others are padding, or not wanted
                values, broken = values[step.batch.picks], broken[step.batch.picks]
        else:
            values, broken, *none_left = step.sampled.arrays()
            new.overconstrained = places[none_left[0]].tolist() if none_left else []
        new.tokens[places, 0] = values
        new.failed = dict.fromkeys(places[broken].tolist(), _BROKEN) | dict.fromkeys(new.overconstrained, _NONE_LEFT)

    def _verified(self, step: _Step, positions: Positions) -> _New:
        """The accepted drafts of each row, and the token after them."""
        tokens, broken, none_left, accepted = self._settle(step, positions)
        assert step.drafted is not None
        said, counts, has_failed = drafted_tokens(
            self.rows.tables.native, step.drafted, accepted, tokens, broken, step.work.num_new
        )
        new = _New(said, counts)
        new.rejected = positions.count - len(positions.rows) - int(accepted.sum())
        places, last = step.work.places, positions.first + accepted if has_failed else _NO_PLACES
        for number in broken[last].nonzero()[0].tolist():
            place, none = int(places[number]), len(none_left) > 0 and bool(none_left[last[number]])
            new.failed[place] = _NONE_LEFT if none else _BROKEN
            new.overconstrained += [place] * none
            new.counts[place] -= bool(positions.width[number])           # what came before it counts
        return new


@dataclass(slots=True)
class _New:
    """What a step brings, by place."""

    tokens: np.ndarray
    counts: np.ndarray
    failed: dict[int, str] = field(default_factory=dict)
    overconstrained: list[int] = field(default_factory=list)
    rejected: int = 0

"""A draft model: a second, smaller model that proposes the next tokens of rows, one after the other.

Its rule for KV is simple: before it proposes for a row, it computes every token of the row that it has not seen (draft_cache.py
knows which). Mostly that is one token or two, those accepted last; after a prompt, a prefix hit or steps without drafts it is
more. So its drafts depend on the row's tokens alone, whatever happened before. It chooses as the row does, with the row's
temperature and noise, except that it knows no penalties, masks or bad words.

It has rows and a forward pass of its own, of the same kind as the model's, and runs between the model's steps. The tokens of rows
are on the host here; the drafts are brought there, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.layers.batch import Batch
from ridgeline.messages import StepPlan, Want
from ridgeline.models.decoder import Decoder
from ridgeline.ops.sampling.noise import to_device
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.runner.forward import Forward
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.runner.proposers.draft_cache import DraftCache
from ridgeline.runner.sampler import Sampler

STAGED = MOST_DRAFTS + 1             # steps of it that may be on their way at once
_FEW = 2                             # tokens of a row that are computed before each proposal: those accepted last
CALM_PROPOSALS = 16                  # after these, steps that were made smaller when memory ran out may be twice as large
_NONE = np.zeros(0, np.int32)
_NO_BLOCKS = _NONE.reshape(0, 4)


@dataclass(slots=True)
class Spent:
    """On proposals of a step; see StepResult."""

    draft_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    caught_up: int = 0


@dataclass(slots=True)
class Budget:
    """Most tokens of a step, fewer for a while after memory ran out."""

    most: int
    least: int
    saved: int = 0                   # how often they were halved
    calm: int = 0                    # proposals that went well since

    @property
    def tokens(self) -> int:
        return max(self.least, self.most >> self.saved)

    def ran_out(self) -> None:
        self.saved, self.calm = self.saved + (self.tokens > self.least), 0

    def went_well(self) -> None:
        """Memory that ran out once may be free again."""
        self.calm += self.saved > 0
        if self.calm >= CALM_PROPOSALS:
            self.saved, self.calm = self.saved - 1, 0


class NoDraftModel:
    """The off version."""

    active = False

    def apply(self, plan: StepPlan) -> None:
        """It has no rows."""

    def wanted(self, plan: StepPlan) -> bool:
        return False

    def complete(self, plan: StepPlan) -> StepPlan:
        return plan

    def heard(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """It listens to none."""

    def start_over(self) -> None:
        """It remembers nothing."""

    def release(self) -> None:
        """It holds no CUDA graphs."""

    def warm_up(self) -> None:
        """It has no kernels."""

    def spent(self) -> Spent:
        return Spent()


class DraftModel(NoDraftModel):
    active = True

    def __init__(
        self, model: Decoder, forward: Forward, rows: DeviceRows, sampler: Sampler, buffers: KVBuffers, cache: DraftCache,
        group: int, vocab: int, budget: int, broadcast: Callable[[Tensor], Tensor],
    ) -> None:
        """`rows`: its own; `sampler`: the model's. `group`: the model's, whose tables it uses. `vocab`: ids of the model.
        `budget`: most tokens of a step. `broadcast`: what the first rank has chosen, to all."""
        self.model = model
        self._forward, self._rows, self._sampler, self._buffers, self._cache = forward, rows, sampler, buffers, cache
        self._group, self._vocab, self._broadcast = group, vocab, broadcast
        self._budget = Budget(max(budget, rows.max_rows), rows.max_rows)
        max_len = rows.tables.blocks.shape[2] * rows.block_size
        self._tokens = np.zeros((rows.max_rows, max_len + MOST_DRAFTS + 1), np.int32)    # of each row; pages that are used
        self._known = np.zeros(rows.max_rows, np.int64)  # how many of them
        # By row: drafts whose KV it has computed behind the known tokens, until the row says the same or something else.
        self._guessed = np.full((rows.max_rows, MOST_DRAFTS), -1, np.int64)
        self._spent = Spent()

    def apply(self, plan: StepPlan) -> None:
        """Rows and blocks as the model's are, every group with the tables of that one."""
        if not (plan.added or len(plan.appended) or plan.block_ops):
            return
        self._cache.apply(plan)
        groups = self._rows.tables.num_groups
        for added in plan.added:
            self._tokens[added.row, : len(added.token_ids)] = np.minimum(added.token_ids, self.model.config.vocab_size - 1)
            self._known[added.row] = len(added.token_ids)
            self._guessed[added.row] = -1
        same = [replace(added, block_ids=[added.block_ids[self._group]] * groups) for added in plan.added]
        own = plan.appended[plan.appended[:, 0] == self._group]
        appended = np.tile(own, (groups, 1))
        appended[:, 0] = np.repeat(np.arange(groups), len(own))
        self._rows.apply(StepPlan(plan.step, plan.removed, same, appended, _NONE, _NONE, _NONE.astype(np.int8)))
        self._buffers.run([replace(op, group=0) for op in plan.block_ops if op.group == self._group])

    def heard(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """These rows have said tokens: the first `counts` of each row of `tokens`."""
        columns = np.arange(tokens.shape[1])
        said = columns < counts[:, None]
        guessed = self._guessed[rows, : tokens.shape[1]]
        if guessed.shape[1] < tokens.shape[1]:
            guessed = np.pad(guessed, ((0, 0), (0, 1)), constant_values=-1)
        right = np.cumprod((guessed == tokens) & said, axis=1).sum(1)
        behind = self._guessed[rows, 0] >= 0             # its drafts were computed for this step
        self._cache.computed(rows[behind], (self._known[rows] + right)[behind])
        self._guessed[rows[counts > 0]] = -1
        places = self._known[rows][:, None] + columns
        own = np.broadcast_to(rows[:, None], places.shape)
        self._tokens[own[said], places[said]] = np.minimum(tokens[said], self.model.config.vocab_size - 1)
        self._known[rows] += counts

    def start_over(self) -> None:
        """It may have been a step of it that was too large: its steps are smaller for a while."""
        self._guessed[:] = -1
        self._budget.ran_out()

    def warm_up(self) -> None:
        """Proposals for one row and for all, before any sequence has a block: their KV goes to block 0. Kernels are compiled."""
        for count in (1, self._rows.max_rows):
            rows = np.arange(count)
            for _ in range(2):                           # what a graph's first capture could not load is captured then
                self._known[rows] = _FEW + 1
                self._cache.forget(rows)
                self._propose(rows, np.full(count, 3))
        self._known[:], self._guessed[:] = 0, -1
        self.spent()

    def release(self) -> None:
        self._forward.release()

    def spent(self) -> Spent:
        found, self._spent = self._spent, Spent()
        return found

    def wanted(self, plan: StepPlan) -> bool:
        return plan.width is not None and bool(_device_rows(plan).any())

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts that the device is to make. All tokens of its rows are known."""
        if not self.wanted(plan):
            return plan
        assert plan.width is not None and plan.drafts_from is not None
        places = np.flatnonzero(_device_rows(plan))
        rows, width = plan.rows[places].astype(np.int64), plan.width[places].astype(np.int64)
        found = self._propose(rows, width)
        given = np.full((len(plan.rows), 0), -1, np.int32) if plan.drafts is None else plan.drafts
        drafts = np.full((len(plan.rows), max(given.shape[1], found.shape[1])), -1, np.int32)
        drafts[:, : given.shape[1]] = given
        drafts[places] = -1
        drafts[places, : found.shape[1]] = found
        start = plan.drafts_from.copy()
        start[places] = self._known[rows]
        return replace(plan, drafts=drafts, drafts_from=start)

    def _propose(self, rows: np.ndarray, width: np.ndarray) -> np.ndarray:
        """int64 [R, W]: drafts of each row, behind its known tokens; -1 beyond its width."""
        order = np.argsort(-width, kind="stable")        # rows that want more drafts go on while the others have left
        rows, width = rows[order], width[order]
        known, tables = self._known[rows], self._rows.tables
        for row, count in zip(rows.tolist(), known.tolist(), strict=True):
            tables.given[row], tables.num_given[row] = self._tokens[row, :count], count
        begin = time.perf_counter()
        tokens = [self._catch_up(rows, known)]
        if self._spent.caught_up:
            self._wait()
            self._spent.catch_up_seconds = time.perf_counter() - begin
        for number in range(1, int(width.max())):
            live = rows[width > number]
            again = number > 1 and len(live) == len(tokens[-1])
            tokens.append(self._step(live, np.ones(len(live), np.int64), number, again))
        found = np.full((len(rows), int(width.max())), -1, np.int64)
        for number, each in enumerate(tokens):
            found[: len(each), number] = each.cpu().numpy()
        self._spent.draft_seconds = time.perf_counter() - begin - self._spent.catch_up_seconds
        computed = np.arange(found.shape[1]) < width[:, None] - 1        # the KV of a row's last draft is not
        self._guessed[rows, : found.shape[1]] = np.where(computed, found, -1)
        self._guessed[rows, found.shape[1] :] = -1
        found[found >= self._vocab] = -1
        self._budget.went_well()
        return found[np.argsort(order)]

    def _catch_up(self, rows: np.ndarray, known: np.ndarray) -> Tensor:
        """All known tokens that it has not seen, in steps of at most the budget; the first draft of each row. What rows share is
        computed by one of them."""
        tables, more = self._rows.tables, 0
        while True:
            tables.length[rows] = done = self._cache.lengths(rows, known)
            rest = known - 1 - done                      # the last token of each row comes with the step that samples
            behind = np.flatnonzero(rest)
            alone = behind[np.sort(np.unique(self._cache.next_blocks(rows[behind]), return_index=True)[1])]
            if len(alone) == len(behind) and int(rest.sum()) + len(rows) <= self._budget.tokens:
                break
            counts = np.zeros_like(rest)
            counts[alone] = np.minimum(rest[alone], np.maximum(0, self._budget.tokens - (np.cumsum(rest[alone]) - rest[alone])))
            some = np.flatnonzero(counts)
            self._step(rows[some], counts[some], None)
            self._wait()                                 # what is staged for it is used again
            self._cache.computed(rows[some], (done + counts)[some])
            more += int(counts.sum())
        self._spent.caught_up = more + (int(rest.sum()) if rest.max() >= _FEW else 0)
        tokens = self._step(rows, rest + 1, 0)
        self._cache.computed(rows, known)
        return tokens

    def _step(self, rows: np.ndarray, counts: np.ndarray, number: int | None, again: bool = False) -> Tensor:
        """A step of the draft model; the newest tokens of its rows, which are draft `number` of each; None: they choose none.
        They stay on the device, where the next step reads them. `again`: it follows one of the same rows, with a token each."""
        order = np.argsort(counts > 1, kind="stable")    # rows with one token come first
        ordered, samples = rows[order], number is not None
        greedy = samples and self._sampler.all_greedy(ordered)
        batch = self._rows.advance() if again else None
        if batch is None:
            want = np.full(len(rows), Want.TOKEN if samples else Want.NOTHING, np.int8)
            plan = StepPlan(0, _NONE, [], _NO_BLOCKS, ordered.astype(np.int32), counts[order].astype(np.int32), want)
            batch = self._rows.pack(plan, self._forward.shape(plan, greedy))
        computed = self._forward.run(batch, greedy)
        if number is not None and computed.logits is not None:
            self._choose(batch, computed.logits, ordered, number)
        return self._rows.last_token.index_select(0, to_device(rows, self._rows.device))

    def _choose(self, batch: Batch, logits: Tensor, rows: np.ndarray, number: int) -> None:
        """With the noise that the model's own token at that position is sampled with."""
        head, sample_rows = self.model.head, batch.sample_rows
        if head is not None and head.division.ranks > 1:
            logits = head.division.all(logits)           # a rank has a part of the vocabulary
        logits, sample_rows = batch.picked(logits, sample_rows)
        if logits.shape[1] > self._vocab:                # embeddings are padded differently
            logits = logits[:, : self._vocab].contiguous()
        elif logits.shape[1] < self._vocab:
            lowest = torch.finfo(logits.dtype).min
            logits = torch.nn.functional.pad(logits, (0, self._vocab - logits.shape[1]), value=lowest)
        sampled = self._sampler.sample_ahead(logits, rows, np.full(len(rows), number))
        self._rows.last_token.index_copy_(0, sample_rows, self._broadcast(sampled.tokens))

    def _wait(self) -> None:
        if self._rows.device.type == "cuda":
            torch.cuda.current_stream(self._rows.device).synchronize()


def _device_rows(plan: StepPlan) -> np.ndarray:
    """bool [R]: rows whose drafts the device makes."""
    assert plan.width is not None and plan.drafts_from is not None
    return (plan.width > 0) & ((plan.drafts_from < 0) | (plan.drafts is None))

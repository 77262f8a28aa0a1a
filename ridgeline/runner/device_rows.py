"""How a plan becomes a Batch: every row's tokens, positions, slots and lengths, in one buffer for the device.

A plan's tokens are packed with numpy, and only joining rows, rows in prefill and rows with drafts are looped over. The newest
token of a row stays on the device: a decode needs no token value from the host.

If a step decodes the same rows as the last one (`advance`), only lengths, positions and slots are sent. The state of rows is in
row_tables.py, how attention is divided in attention_schedule.py.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.batch import Batch, GroupBatch, Runs
from ridgeline.messages import StepPlan, Want
from ridgeline.ops.attention.attention_arguments import OwnKernel
from ridgeline.ops.attention.split_kv import DeviceShares
from ridgeline.ops.sampling.noise import to_device
from ridgeline.runner.attention_schedule import AttentionSchedule
from ridgeline.runner.row_tables import Guesses, LateLengths, RowTables, Spread
from ridgeline.runner.shared_prefix import SharedPrefixes
from ridgeline.runner.staging import Staging
from ridgeline.sizes.graph_shapes import Shape, decode_sizes, most_queries
from ridgeline.sizes.kv_spec import KVGroupSpec, common_block_size

TOKEN = np.int8(Want.TOKEN)
EVERY_HIDDEN = np.int8(Want.PROMPT_LOGPROBS | Want.HIDDEN | Want.HIDDEN_SUM)     # what needs all tokens after the last layer


@dataclass(slots=True)
class _Layout:
    """A plan's rows as the batch has them, padding included."""

    rows: np.ndarray                 # [R]
    counts: np.ndarray               # [R]: tokens of each; none for padding after the decodes
    live: np.ndarray | slice         # which of the rows are the plan's
    sampled: np.ndarray | slice      # which of the rows have logits
    picks: np.ndarray                # which of those logits the plan wants, in its order
    num_decodes: int                 # leading rows that go on from their newest token
    num_tokens: int                  # padding included
    longest: int                     # bound of the tokens of a later row
    width: np.ndarray | None = None  # [R]: drafts of each; None: no row has any
    queries: int = 1                 # bound of the tokens of a decode


@dataclass(slots=True)
class _Numbers:
    """A layout's integers."""

    spread: Spread
    logits: np.ndarray               # tokens that have logits
    sampled: np.ndarray              # and their rows
    alone: np.ndarray                # places of single tokens from the host, which are the newest of their rows
    own_kernel: tuple[OwnKernel, ...] = ()


@dataclass(slots=True)
class _Steady:
    """A step in which every row went on from what it had sampled, as the device has it."""

    batch: Batch
    rows: np.ndarray                 # [R], padding included …
    live: np.ndarray                 # … and without
    shares_left: int                 # further steps for which the work of attention is shared out
    end: int                         # of what is staged for it


def leading_decodes(plan: StepPlan) -> int:
    """How many leading rows compute one token, drafts not counted."""
    own = plan.num_tokens if plan.width is None else plan.num_tokens - plan.width
    longer = own != 1
    return int(longer.argmax()) if np.count_nonzero(longer) else len(own)


class DeviceRows:
    def __init__(
        self, groups: list[KVGroupSpec], max_rows: int, max_model_len: int, max_step_tokens: int, depth: int,
        device: torch.device, heads: int = 1, shared_prefixes: bool = False, deterministic: bool = False, drafts: bool = False,
    ) -> None:
        self.depth = depth                               # steps that may be in flight when another is packed
        self.max_rows = max_rows                         # also the number of the row for padding
        self.device = device
        self.tables = RowTables(len(groups), common_block_size(groups), max_rows, max_model_len, device)
        self.schedule = AttentionSchedule(groups, max_rows, device, heads, shared_prefixes, deterministic, drafts)
        self.late = LateLengths(self.tables, device)
        self.last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._prompts: dict[Shape, Batch] = {}           # of single prompts: by shape, all tensors are the same
        self._steady: _Steady | None = None              # the newest step, if every row decoded in it
        self._sizes = decode_sizes(max_rows)
        self._pads = device.type != "cpu" and not deterministic      # sampled rows beside prompts: see _launched
        self._ones = torch.arange(max_rows + 1, dtype=torch.int32, device=device)    # borders of rows with a query each
        most = max(max_step_tokens, max_rows)
        self._arange = np.arange(most + 1, dtype=np.int64)
        # Per token: id, position and a slot in each group; with drafts, whether it is a newest one, and logits and their row.
        # Per row: eleven numbers at most. Changes of the tables: place and value. And the ends of arrays.
        num_bytes = 8 * (most * (2 + 3 * drafts + len(groups)) + 11 * (max_rows + 1))
        num_bytes += self.schedule.num_bytes(max_rows, max_step_tokens)
        # Behind drafts in flight: per token its row, a place and a guess's place, and of each row what may be guessed.
        num_bytes += drafts * 8 * (3 * most + max_rows * (2 * most_queries(1) + 1))
        self._staging = Staging(
            num_bytes + 12 * self.tables.most_changes + 16 * (24 + len(groups)), depth + 1, device
        )

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def length(self) -> np.ndarray:
        return self.tables.length

    @property
    def given(self) -> list[np.ndarray]:
        return self.tables.given

    @property
    def num_prompt(self) -> np.ndarray:
        return self.tables.num_prompt

    @property
    def prefixes(self) -> list[SharedPrefixes]:
        return self.schedule.prefixes

    def apply(self, plan: StepPlan) -> None:
        self.tables.apply(plan)
        if plan.added:
            self.schedule.forget()
            if self.late.behind:
                self.late.joined(to_device(np.array([added.row for added in plan.added]), self.device))

    def settle(self, rows: np.ndarray, rejected: np.ndarray) -> None:
        """Shorten each row by its rejected drafts: its next token overwrites the first of them."""
        self.tables.length[rows] -= rejected

    def stays(self, rows: np.ndarray) -> np.ndarray:
        """Numbers that change when a row gets another sequence."""
        return self.tables.stay[rows]

    # -- the batch -----------------------------------------------------------------------------------------------------

    def pack(self, plan: StepPlan, shape: Shape | None = None, guesses: Guesses | None = None) -> Batch:
        """`shape`: the CUDA graph's shape to pad to. With it every row gets logits, because a graph cannot skip rows.
        `guesses`: those of the plan, if it has drafts."""
        single = shape is not None and (shape.decodes, shape.prompts) == (0, 1) and bool(plan.want[0] & TOKEN)
        if shape is not None and single and shape in self._prompts:
            return self._pack_prompt(plan, shape)
        layout = self._layout(plan, shape)
        if plan.width is not None and guesses is None:
            guesses = Guesses.of(plan, self.length[plan.rows])
        numbers = self._numbers(layout, guesses)
        batch, last_end = self._put(plan, layout, numbers, shape, guesses)
        on_cpu = self.device.type == "cpu"
        self._steady = None
        # On a CPU a batch is where the host writes the next one, unless the two may be in flight at once.
        stays = not (on_cpu and self.depth) and not len(numbers.alone)
        if stays and layout.num_decodes == len(layout.rows) and layout.width is None:
            self._steady = _Steady(batch, layout.rows, layout.rows[layout.live], self.schedule.growth, last_end)
        if shape is not None and single and batch.sampled is not None and not on_cpu:
            self._prompts[shape] = batch
        return batch

    def _numbers(self, layout: _Layout, guesses: Guesses | None) -> _Numbers:
        tables, rows, counts = self.tables, layout.rows, layout.counts
        spread = tables.spread(rows, counts, layout.num_decodes, layout.num_tokens, guesses)
        given = (tables.length[rows] < tables.num_given[rows]).nonzero()[0] if spread.given else self._arange[:0]
        for place in given.tolist():                     # the others go on with what they sampled: see Batch.last_rows
            end = int(spread.ends[place])
            known = tables.given[rows[place]][end - int(counts[place]) : end]
            first = int(spread.query_start[place])
            spread.tokens[first : first + len(known)] = known
        alone = given[given < layout.num_decodes]        # single tokens from the host are the newest of their rows
        if len(given) - len(alone) < np.count_nonzero(counts[layout.num_decodes :]):
            raise AssertionError("a row that goes on from what it sampled comes before all that compute several tokens")
        if layout.width is not None and isinstance(layout.sampled, slice):       # a graph's: all tokens have logits
            return _Numbers(spread, self._arange[: layout.num_tokens], spread.token_rows, alone)
        last, sampled = np.maximum(spread.query_start[1:].astype(np.int64) - 1, 0)[layout.sampled], rows[layout.sampled]
        if layout.width is None:
            return _Numbers(spread, last, sampled, alone, self._own_kernel(layout, spread))
        own = 1 + layout.width[layout.sampled]           # every position of a row with drafts gets logits
        last = np.repeat(last + 1 - np.cumsum(own), own) + self._arange[: int(own.sum())]
        return _Numbers(spread, last, np.repeat(sampled, own), alone)

    def _put(
        self, plan: StepPlan, layout: _Layout, numbers: _Numbers, shape: Shape | None, guesses: Guesses | None
    ) -> tuple[Batch, int]:
        """Everything to the device, in one copy. A graph reads it at the places where the first step of its shape had it. Also:
        where what a graph reads ends."""
        rows, spread, kv_len, num_decodes = layout.rows, numbers.spread, numbers.spread.kv_len, layout.num_decodes
        on_cpu, tables, schedule, staging = self.device.type == "cpu", self.tables, self.schedule, self._staging
        goes_on = self._goes_on(plan, layout, numbers)
        staging.begin()
        changes = tables.changes(staging)
        places, lengths, slots = self._put_moving(spread.positions, kv_len, spread.slots)
        decoding = schedule.put_decodes(staging, tables, rows, kv_len, num_decodes, layout.queries)
        tokens, borders, logits = staging.put(spread.tokens), staging.put(spread.query_start), staging.put(numbers.logits)
        sample_rows, table_rows = staging.put(numbers.sampled), staging.put(rows.astype(np.int32))
        newest = None if layout.width is None else staging.put(spread.newest)
        runs = None if newest is None else self._runs(layout, borders, table_rows)
        last_rows = staging.put(rows[:num_decodes]) if num_decodes and newest is None else None
        query_tiles = schedule.put_tiles(staging, rows, spread.query_start, kv_len, num_decodes, shape)
        own = [(lengths, table_rows)]
        if goes_on is not None:
            last_kv_len, last_table_rows = staging.put(kv_len[goes_on]), staging.put(rows[goes_on].astype(np.int32))
            own.append((last_kv_len, last_table_rows))
            last_shares = schedule.put_shares(staging, kv_len[goes_on])
        picks = staging.put(layout.picks)                # from here on sizes vary: nothing a graph reads
        alone = numbers.alone
        single = staging.put(rows[alone]), staging.put(spread.tokens[spread.query_start[alone]])
        end, late = staging.used, self.late.put(staging, spread, guesses)
        written = tables.put_changes(staging, changes)
        staging.send()

        tables.write(*written)
        if len(alone):
            self.last_token.index_copy_(0, *single)
        tables.length[rows[layout.live]] = spread.ends[layout.live]
        self.late.correct(late, places, slots, tokens, own)
        older = shape is not None or bool((spread.ends - layout.counts)[num_decodes:].any())
        batch = Batch(
            tokens=tokens,
            positions=places,
            query_start=borders,
            kv_len=lengths,
            # Not of decodes alone: their batch may be used again, when lengths are others (`advance`).
            query_start_host=spread.query_start.tolist() if on_cpu and goes_on is not None else None,
            kv_len_host=(lengths if late else spread.ends).tolist() if on_cpu and goes_on is not None else None,
            groups=[GroupBatch(each, table, *how) for each, table, how in zip(slots, tables.groups, decoding, strict=True)],
            logits_index=logits,
            sample_rows=sample_rows,
            picks=layout.picks,
            device_picks=picks,
            last_rows=last_rows,
            newest=newest, runs=runs,
            table_rows=table_rows,
            query_tiles=query_tiles,
            own_kernel=numbers.own_kernel,
            work=schedule.work(num_decodes, layout.longest, layout.queries, older),
            workspace=schedule.workspace,
        )
        if goes_on is not None:
            batch.sampled = self._last_tokens(batch, goes_on, last_kv_len, last_table_rows, last_shares)
        return batch, end

    def _own_kernel(self, layout: _Layout, spread: Spread) -> tuple[OwnKernel, ...]:
        if self.device.type != "cpu":
            return ()
        prompt, ends = self.tables.num_prompt[layout.rows], spread.ends
        starts, decodes = ends - layout.counts, self._arange[: len(ends)] < layout.num_decodes
        found, real = [], layout.rows < self.max_rows    # the others are padding
        for place in np.flatnonzero(np.where(decodes, starts < prompt, ends > prompt) & real).tolist():
            of_prompt, start = bool(decodes[place]), int(starts[place])
            position = start if of_prompt else max(start, int(prompt[place]))
            first = int(spread.query_start[place]) + position - start
            found.append(OwnKernel(first, int(ends[place]) - position, int(layout.rows[place]), position, of_prompt))
        return tuple(found)

    def _runs(self, layout: _Layout, borders: Tensor, rows: Tensor) -> Runs:
        """In a graph all tokens have logits, so that they are the rows' own."""
        assert layout.width is not None
        if isinstance(layout.sampled, slice):
            return Runs(borders, rows, layout.queries)
        start = np.zeros(len(layout.sampled) + 1, np.int32)
        start[1:] = np.cumsum(1 + layout.width[layout.sampled])
        put = self._staging.put
        return Runs(put(start), put(layout.rows[layout.sampled].astype(np.int32)), layout.queries)

    def _pack_prompt(self, plan: StepPlan, shape: Shape) -> Batch:
        """pack() for a single prompt that fits into a shape which the device has seen: the same numbers, at the same places, in
        a third of the time. It is on the way to the first token of a lone request."""
        tables, schedule = self.tables, self.schedule
        row, count, padded = int(plan.rows[0]), int(plan.num_tokens[0]), shape.prompt_tokens
        start = int(tables.length[row])
        end = start + count
        rows, table_rows = np.array([row], np.int64), np.array([row], np.int32)
        query_start, kv_len = np.array([0, count], np.int32), np.array([end], np.int32)
        tokens, positions = np.zeros((2, padded), np.int64)
        tokens[:count], positions[:count] = tables.given[row][start:end], np.arange(start, end)
        slots = np.zeros((tables.num_groups, padded), np.int64)
        slots[:, :count] = tables.slots(row, positions[:count])
        staging = self._staging
        staging.begin()
        changes = tables.changes(staging)
        self._put_moving(positions, kv_len, slots)
        for values in (tokens, query_start, self._arange[count - 1 : count], rows, table_rows):
            staging.put(values)
        schedule.put_tiles(staging, rows, query_start, kv_len, 0, shape)
        staging.put(kv_len)
        staging.put(table_rows)
        schedule.put_shares(staging, kv_len)
        staging.put(self._arange[:1])
        written = tables.put_changes(staging, changes)
        staging.send()
        tables.write(*written)
        tables.length[row] = end
        self._steady = None
        return self._prompts[shape]

    def advance(self) -> Batch | None:
        """Reuse the last batch, one token later, if the same rows decode again. None: the step must be packed."""
        steady, staging, tables = self._steady, self._staging, self.tables
        if steady is None:
            return None
        num_rows = len(steady.live)
        positions = tables.length[steady.rows]
        kv_len = (positions + 1).astype(np.int32)
        kv_len[num_rows:] = 0
        slots = tables.slots(steady.rows, positions)
        staging.begin()
        changes = tables.changes(staging)
        self._put_moving(positions, kv_len, slots)
        steady.shares_left -= 1
        if steady.shares_left < 0:
            self.schedule.put_decodes(staging, tables, steady.rows, kv_len, len(steady.rows))
            steady.shares_left = self.schedule.growth
        staging.send()
        if changes is not None:
            staging.skip_to(steady.end)
            written = tables.put_changes(staging, changes)
            staging.send()
            tables.write(*written)
        tables.length[steady.live] = kv_len[:num_rows]
        return steady.batch

    def shared(self, batch: Batch) -> int:
        """KV positions that this (the newest) step reads once for several rows, in each layer without a window."""
        return self.schedule.shared(batch)

    def _put_moving(
        self, positions: np.ndarray, kv_len: np.ndarray, slots: Iterable[np.ndarray]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What no step has in common with the one before it. First of all, so that it can be sent alone."""
        put = self._staging.put
        return put(positions), put(kv_len), [put(each) for each in slots]

    def _layout(self, plan: StepPlan, shape: Shape | None) -> _Layout:
        """Decodes, then prompts, each filled up to the shape."""
        rows, counts = plan.rows.astype(np.int64), plan.num_tokens.astype(np.int64)
        num_decodes = leading_decodes(plan)
        wanted = (plan.want & TOKEN).nonzero()[0]
        longest = int(counts[num_decodes:].max(initial=0))
        if shape is None:
            alone = self._pads and plan.width is None and not (plan.want & EVERY_HIDDEN).any()
            layout = self._launched(rows, counts, wanted, num_decodes, longest, alone)
            if plan.width is not None:
                layout.width, layout.queries = plan.width.astype(np.int64), 1 + int(plan.width.max())
                layout.picks = self._arange[: len(wanted) + int(layout.width[wanted].sum())]
            return layout
        num_rows = shape.decodes + shape.prompts
        if plan.width is not None and num_rows == len(rows):             # nothing is filled up but tokens
            width = plan.width.astype(np.int64)
            picks = self._arange[: len(wanted) + int(width[wanted].sum())]
            return _Layout(
                rows, counts, slice(0, num_rows), slice(0, num_rows), picks, shape.decodes, shape.draft_tokens, 0, width,
                shape.queries,
            )
        full_rows, full_counts = np.full(num_rows, self.max_rows), np.zeros(num_rows, np.int64)
        places = self._arange[: len(rows)].copy()
        places[num_decodes:] += shape.decodes - num_decodes
        full_counts[: shape.decodes] = shape.draft_tokens == 0
        full_rows[places], full_counts[places] = rows, counts
        if plan.width is not None:
            width = np.zeros(num_rows, np.int64)
            width[places] = plan.width
            # Rows that do not sample, prompts of which one token is computed, come last.
            picks = self._arange[: len(wanted) + int(plan.width[wanted].sum())]
            return _Layout(
                full_rows, full_counts, places, slice(0, num_rows), picks, shape.decodes, shape.draft_tokens, 0, width,
                shape.queries,
            )
        return _Layout(
            full_rows, full_counts, places, slice(0, num_rows), places[wanted], shape.decodes,
            shape.decodes + shape.prompt_tokens, shape.prompt_tokens,
        )

    def _launched(
        self, rows: np.ndarray, counts: np.ndarray, wanted: np.ndarray, num_decodes: int, longest: int, alone: bool
    ) -> _Layout:
        """A step without a graph. Where wanted rows go through the last layer's GEMMs `alone`, beside prompts, they are padded,
        with a row without tokens, to a number for which decodes are captured. Other numbers may need cuBLAS kernels that were
        not launched before, and loading those stalls the device."""
        num_rows, num_tokens = len(rows), int(counts.sum())
        live, picks = slice(0, num_rows), self._arange[: len(wanted)]
        missing = self._sizes[bisect.bisect_left(self._sizes, len(wanted))] - len(wanted) if len(wanted) else 0
        if alone and missing and num_decodes < num_rows:
            rows, counts = np.append(rows, self.max_rows), np.append(counts, 0)
            wanted = np.append(wanted, np.full(missing, num_rows))
        return _Layout(rows, counts, live, wanted, picks, num_decodes, num_tokens, longest)

    def _goes_on(self, plan: StepPlan, layout: _Layout, numbers: _Numbers) -> np.ndarray | None:
        """The rows with which the last layer goes on; None: with every token. So it is with deterministic results, which may not
        depend on other rows of the batch: these may want all hidden states."""
        if layout.num_decodes == len(layout.rows) and not numbers.own_kernel:
            return None
        if self.schedule.deterministic or layout.width is not None or (plan.want & EVERY_HIDDEN).any():
            return None
        return self._arange[: len(layout.rows)][layout.sampled]

    def _last_tokens(
        self, batch: Batch, places: np.ndarray, kv_len: Tensor, table_rows: Tensor, shares: list[DeviceShares | None]
    ) -> Batch:
        """The same step with one query per row, its last token: attention of the last layer needs no other."""
        count, lengths = len(places), batch.kv_len_host
        if lengths is not None:
            return replace(
                batch,
                query_start=self._ones[: count + 1],
                kv_len=kv_len,
                query_start_host=list(range(count + 1)),
                kv_len_host=[lengths[place] for place in places.tolist()],
                groups=[GroupBatch(each.slots, each.block_table) for each in batch.groups],
                table_rows=table_rows,
                query_tiles=None,
                own_kernel=(),
            )
        return replace(
            batch,
            query_start=self._ones[: count + 1],
            kv_len=kv_len,
            groups=[
                GroupBatch(each.slots, each.block_table, shares=share)
                for each, share in zip(batch.groups, shares, strict=True)
            ],
            table_rows=table_rows,
            query_tiles=None,
            work=self.schedule.work(count, 0),
        )

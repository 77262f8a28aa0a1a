"""Verification of drafts: the model's own token is sampled at every position, and drafts are accepted while they are equal to it.

Noise is a function of (seed, output index, token id). So the tokens are those that steps without drafts would have sampled, for
every temperature, penalty, grammar and drafter.

Positions of rows that sample from the model's logits are sampled all at once, and so are those of rows with a grammar: its masks
were made along the drafts, and behind a wrong one nothing counts. A row that edits its logits otherwise (penalties, bad words,
min_tokens) goes position by position: what it may say next depends on what it has said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.layers.batch import Batch
from ridgeline.messages import StepPlan
from ridgeline.ops.sampling.accept import accept
from ridgeline.ops.sampling.noise import to_device
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.runner.row_tables import Guesses, RowTables, too_early
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.to_host import Landing

Broadcast = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Positions:
    """The positions that a step samples at, row after row."""

    rows: np.ndarray                 # [R]: rows that sample
    width: np.ndarray                # [R]: drafts of each
    guesses: np.ndarray              # int64 [R, W + 1]; -1: none; the last column ends every run
    first: np.ndarray                # [R]: the first position of each
    count: int
    entries: np.ndarray              # [G]: where the table has each guess …
    late: Tensor | None = None       # … and [G], what it truly is, where only the device knows that

    @classmethod
    def of(cls, plan: StepPlan, places: np.ndarray, guesses: Guesses) -> Positions:
        """`places`: rows of the plan that sample."""
        assert plan.width is not None
        width = plan.width[places].astype(np.int64)
        table = np.full((len(places), int(width.max(initial=0)) + 1), -1, np.int64)
        number = np.zeros(len(plan.rows), np.int64)
        number[places] = np.arange(len(places))
        entries = number[guesses.number] * table.shape[1] + guesses.offset
        table.ravel()[entries] = guesses.tokens
        own = 1 + width
        ends = own.cumsum()
        count = int(ends[-1]) if len(ends) else 0
        return cls(plan.rows[places].astype(np.int64), width, table, ends - own, count, entries)

    def each(self) -> tuple[np.ndarray, np.ndarray]:
        """The row of each position, and how many of that row come before it."""
        own = 1 + self.width
        return np.repeat(self.rows, own), np.arange(self.count) - np.repeat(self.first, own)


def lay_out_guesses(plan: StepPlan, places: np.ndarray, tables: RowTables) -> tuple[Guesses, Positions]:
    """Guesses.of and Positions.of in one native call. `places`: rows of the plan that sample."""
    lengths = tables.length[plan.rows]
    if tables.native is None:
        return _laid_out(plan, places, lengths)
    assert plan.width is not None and plan.drafts is not None and plan.drafts_from is not None
    rows, reach = plan.drafts.shape
    total, most, count = int(plan.width.sum()), int(plan.width.max()), len(places)
    room, own_rows = rows * (reach + most + 1), plan.rows.astype(np.int64)
    samples = b"\1" * rows
    if count < rows:
        chosen = np.zeros(rows, np.int8)
        chosen[places] = 1
        samples, own_rows = chosen.tobytes(), own_rows[places]
    out = np.empty(5 * total + count * (most + 3) + room, np.int64)
    said = [each.astype(np.int32, copy=False).tobytes() for each in (plan.width, plan.drafts_from, plan.drafts)]
    longest = tables.native.lay_out_guesses(
        *said, lengths.tobytes(), samples, out.ctypes.data, rows, reach, total, count, most, room
    )
    if longest < 0:
        raise too_early(plan, -1 - longest)
    if not longest:                                      # rows are far ahead of what their paths say
        return _laid_out(plan, places, lengths)
    number, offset, at, tokens, entries = out[: 5 * total].reshape(5, total)
    own, first = out[5 * total : 5 * total + 2 * count].reshape(2, count)
    begin = 5 * total + 2 * count
    end = begin + count * (most + 1)
    table, path = out[begin:end].reshape(count, most + 1), out[end : end + longest * np.count_nonzero(plan.width)]
    positions = Positions(own_rows, own, table, first, total + count, entries)
    return Guesses(number, offset, path, at, tokens), positions


def _laid_out(plan: StepPlan, places: np.ndarray, lengths: np.ndarray) -> tuple[Guesses, Positions]:
    guesses = Guesses.of(plan, lengths)
    return guesses, Positions.of(plan, places, guesses)


@dataclass(slots=True)
class Planned:
    """A step in flight, as far as its drafts are concerned."""

    places: np.ndarray               # int64: of the plan's rows, those that sample
    positions: Positions
    stays: np.ndarray                # int64: see DeviceRows.stays
    lengths: np.ndarray              # int32: tokens of each row in the cache once it is done
    at_once: np.ndarray | None       # bool: of the rows that sample, those whose tokens the sampler has counted ahead; None: all


def take_back(
    tables: RowTables, sampler: Sampler, planned: Planned, accepted: np.ndarray, later: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Rows are as long as was accepted, but those that another sequence has got meanwhile. `later`: rows and lengths of steps
    that were packed for rows of the largest length."""
    positions, places, ahead = planned.positions, planned.places, planned.at_once
    if tables.native is not None and len(later) < 2:
        stay, length, room = tables.settling
        behind = (None, None) if not later else (later[0][0].tobytes(), later[0][1].ctypes.data)
        tables.native.settle_drafts(
            places.tobytes(), positions.rows.tobytes(), positions.width.tobytes(), accepted.tobytes(), planned.stays.tobytes(),
            b"\1" * len(places) if ahead is None else ahead.tobytes(), stay, length, sampler.said_at[0],
            planned.lengths.ctypes.data, *behind, room.address, len(places), len(tables.stay), sampler.said_at[1],
            0 if not later else len(later[0][0]),
        )
        return
    rejected = positions.width - accepted
    planned.lengths[places] -= rejected.astype(np.int32)
    there = planned.stays[places] == tables.stay[positions.rows]
    told = there if ahead is None else there & ahead
    tables.length[positions.rows[there]] -= rejected[there]
    sampler.said_ahead(positions.rows[told], -rejected[told])
    too_many = np.zeros(len(tables.stay), np.int32)
    too_many[positions.rows[there]] = rejected[there]
    for rows, lengths in later:
        lengths -= too_many[rows]


def drafted_tokens(
    native: Any, planned: Planned, accepted: np.ndarray, tokens: np.ndarray, failed: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bool]:
    """By row of the plan: its tokens, -1 behind them, and how many; and whether a row's last one failed. `counts`: of rows that
    do not sample; of each row `accepted` drafts count, and the token behind them."""
    positions, places, rows = planned.positions, planned.places, len(counts)
    across = 1 + int(positions.width.max())
    if native is not None:
        room = np.empty(rows * (1 + across), np.int32)
        broken = native.drafted_tokens(
            places.tobytes(), positions.first.tobytes(), accepted.tobytes(), tokens.tobytes(), failed.tobytes(), counts.tobytes(),
            room.ctypes.data, rows, len(places), across,
        )
        return room[rows:].reshape(rows, across), room[:rows], broken > 0
    found = np.full((rows, across), -1, np.int32)
    columns = np.arange(across)
    said = tokens[np.minimum(positions.first[:, None] + columns, positions.count - 1)]
    said[columns > accepted[:, None]] = -1
    found[places] = said
    numbers = counts.copy()
    numbers[places] = accepted + 1
    return found, numbers, bool(failed[positions.first + accepted].any())


@dataclass(slots=True)
class Verified:
    tokens: Tensor                   # int64 [S], by position
    failed: Tensor                   # bool [S]
    none_left: Tensor                # bool [S]
    accepted: Tensor                 # int64 [R]: drafts; the token after them is the row's newest, and may have failed
    newest: Tensor                   # int64 [R]
    at_once: np.ndarray              # bool [R]: rows that were sampled by `sample_ahead`


def verify_straight(
    sampler: Sampler, logits: Tensor, positions: Positions, masks: Tensor | None, late: Tensor | None, batch: Batch,
    landing: Landing, rows: DeviceRows,
) -> Tensor | None:
    """verify() in three launches, of rows that choose from the model's logits, or under a mask alone: with a small model a launch
    takes the host as long as a layer takes the device, and all of them come after the masks. Rows go on behind what was accepted,
    and it is on its way to the host. Returns the tokens by position; None: some row needs more, and nothing was done."""
    runs, count = batch.runs, len(positions.rows)
    straight = ~sampler.edits(positions.rows)
    if masks is not None:
        straight |= sampler.only_masked(positions.rows)
    if runs is None or not straight.all():
        return None
    whole, tokens, failed, accepted = landing.room(positions.count, count)
    if not sampler.draw_ahead(logits, *positions.each(), late, masks, (tokens, failed)):
        return None
    accept(
        rows.late.surplus, rows.last_token, batch.tokens, tokens, failed, batch.logits_index[: positions.count],
        runs.start[: count + 1], runs.rows[:count], accepted, runs.longest,
    )
    landing.fetch(whole, positions.count)
    return tokens


def verify(
    sampler: Sampler, logits: Tensor, positions: Positions, masks: Tensor | None, broadcast: Broadcast,
    late: Tensor | None = None,
) -> Verified:
    """`logits` [S, V]; `masks` [S, words]: what grammars allow at each position; `late`: see Sampler.sample. Only the first rank
    has masks, and ranks must broadcast the same: so how a row is sampled does not depend on them."""
    device = logits.device
    tokens = torch.zeros(positions.count, dtype=torch.int64, device=device)      # behind a rejected draft any valid id
    failed, none_left = torch.zeros((2, positions.count), dtype=torch.bool, device=device)
    masked = sampler.only_masked(positions.rows)
    found = Verified(tokens, failed, none_left, tokens, tokens, masked | ~sampler.edits(positions.rows))
    _at_once(sampler, logits, positions, found, broadcast, late, masks if masked.any() else None)
    if not found.at_once.all():
        if positions.late is not None:                   # the host's are those of rows as long as was assumed
            np.put(positions.guesses, positions.entries, positions.late.cpu().numpy())
        _one_by_one(sampler, logits, positions, found, masks, broadcast)
    # As a table: a row's positions from its first on. Columns beyond them repeat its last, whose guess is none.
    columns = np.minimum(np.arange(positions.guesses.shape[1]), positions.width[:, None])
    table = to_device(positions.first[:, None] + columns, device)
    guesses = to_device(positions.guesses, device)
    if positions.late is not None:
        guesses.view(-1).index_copy_(0, to_device(positions.entries, device), positions.late)
    equal = (tokens[table] == guesses) & ~failed[table]
    found.accepted = equal.to(torch.int64).cumprod(1).sum(1)
    found.newest = tokens[table.gather(1, found.accepted[:, None])[:, 0]]
    return found


def _at_once(
    sampler: Sampler, logits: Tensor, positions: Positions, found: Verified, broadcast: Broadcast, late: Tensor | None,
    masks: Tensor | None,
) -> None:
    places = np.flatnonzero(found.at_once)
    if not len(places):
        return
    own = 1 + positions.width[places]
    offsets = np.arange(int(own.sum())) - np.repeat(np.cumsum(own) - own, own)
    where = np.repeat(positions.first[places], own) + offsets
    rows = np.repeat(positions.rows[places], own)
    if len(where) == positions.count:
        sampled = sampler.sample_ahead(logits, rows, offsets, late, masks)
        found.tokens.copy_(broadcast(sampled.tokens))
        found.failed.copy_(sampled.failed)
        if sampled.none_left is not None:
            found.none_left.copy_(sampled.none_left)
        return
    index = to_device(where, logits.device)
    late, masks = (None if each is None else each.index_select(0, index) for each in (late, masks))
    sampled = sampler.sample_ahead(logits.index_select(0, index), rows, offsets, late, masks)
    found.tokens.index_copy_(0, index, broadcast(sampled.tokens))
    found.failed.index_copy_(0, index, sampled.failed)
    if sampled.none_left is not None:
        found.none_left.index_copy_(0, index, sampled.none_left)


def _one_by_one(
    sampler: Sampler, logits: Tensor, positions: Positions, found: Verified, masks: Tensor | None, broadcast: Broadcast
) -> None:
    """Exactly the steps that there would be without drafts, for as long as the drafts are right. The host waits for each."""
    places = np.flatnonzero(~found.at_once)
    for offset in range(positions.guesses.shape[1]):
        where = positions.first[places] + offset
        index = to_device(where, logits.device)
        allowed = None if masks is None else masks.index_select(0, index)
        sampled = sampler.sample(logits.index_select(0, index), positions.rows[places], allowed)
        tokens = broadcast(sampled.tokens)
        found.tokens.index_copy_(0, index, tokens)
        found.failed.index_copy_(0, index, sampled.failed)
        if sampled.none_left is not None:
            found.none_left.index_copy_(0, index, sampled.none_left)
        right = (tokens.cpu().numpy() == positions.guesses[places, offset]) & ~sampled.failed.cpu().numpy()
        places = places[right]
        if not len(places):
            return

"""Gives drafts to rows of the step being planned: asks the drafter, and finds blocks for what it wants.

Drafts take what is left: of the token budget after decodes, prompts and joining sequences, and of the blocks without preempting
any sequence. A row whose blocks do not suffice gets fewer drafts.
"""

from __future__ import annotations

import numpy as np

from ridgeline.cache.manager import KVManager
from ridgeline.messages import Want
from ridgeline.scheduler.bookkeeping import DraftPlan
from ridgeline.scheduler.drafting import DecodingRows, Drafter, Drafts
from ridgeline.scheduler.running import Running
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, most_queries

_PROMPT_LOGPROBS = np.int8(Want.PROMPT_LOGPROBS)
_Planned = tuple[np.ndarray, np.ndarray, DraftPlan | None]


def give_drafts(
    drafter: Drafter, running: Running, manager: KVManager, rows: np.ndarray, tokens: np.ndarray, num_running: int, room: int
) -> _Planned:
    """Rows and tokens of the plan with drafts, and the drafts. `num_running`: the first of them have not just joined."""
    table = running.rows
    old = rows[:num_running]
    decodes = (table.known[old] - table.computed[old] == 1) & (table.computed[old] >= table.num_prompt[old])
    places = np.flatnonzero(decodes & (tokens[:num_running] == 1))
    decoding = rows if len(places) == len(rows) else rows[places]
    known, computed = table.known[decoding], table.computed[decoding]
    sequences = [sequence for row in decoding.tolist() if (sequence := table.sequences[row]) is not None]
    allowed = np.array([sequence.most_drafts for sequence in sequences], np.int64)
    most = np.minimum(table.limit[decoding] - known - 1, allowed)
    room = min(room, MOST_VERIFIED - len(rows))
    if room <= 0 or not (most > 0).any():
        return rows, tokens, None
    for place in np.flatnonzero(table.want[decoding] & _PROMPT_LOGPROBS).tolist():
        # A preemption loses them while they are in flight. With drafts the answer might end before they are computed again.
        most[place] *= sequences[place].prefill.logprobs_sent
    arrived = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    asked = DecodingRows(
        sequences, np.clip(most, 0, most_queries(len(rows)) - 1), known - arrived, room, int(tokens.sum()), int(computed.sum()),
    )
    found = drafter.plan(asked)
    if found is None:
        return rows, tokens, None
    _check(found, asked)
    width = np.zeros(len(rows), np.int32)
    width[places] = _with_blocks(running, manager, decoding, found.width)
    if not width.any():
        return rows, tokens, None
    start = arrived if found.on_device is None else np.where(found.on_device, -1, arrived)
    return _ordered(rows, tokens, width, places, start, found.tokens, table.known[rows] - table.computed[rows] > 1)


def _check(found: Drafts, asked: DecodingRows) -> None:
    if (found.width < 0).any() or (found.width > asked.most).any() or int(found.width.sum()) > asked.room:
        raise AssertionError("the drafter plans more drafts than it may")


def _with_blocks(running: Running, manager: KVManager, rows: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Widths for which the rows have blocks now."""
    table, size = running.rows, manager.block_size
    width = width.copy()
    for place in np.flatnonzero(table.computed[rows] + 1 + width > table.num_blocks[rows] * size).tolist():
        row = int(rows[place])
        sequence, computed = table.sequences[row], int(table.computed[row])
        assert sequence is not None and sequence.blocks is not None
        entries = manager.grow(sequence.blocks, computed + 1 + int(width[place])) if width[place] else []
        if entries is None:
            width[place] = max(0, int(table.num_blocks[row]) * size - computed - 1)
        else:
            running.delta.appended.extend((group, row, index, block) for group, index, block in entries)
            table.hold(row, sequence.blocks.num_blocks)
    return width


def _ordered(
    rows: np.ndarray, tokens: np.ndarray, width: np.ndarray, places: np.ndarray, begin: np.ndarray,
    guesses: np.ndarray | None, prompts: np.ndarray,
) -> _Planned:
    """Decodes without drafts first, then those with drafts, then prompts: so kernels find rows of a kind together. Rows that are
    in that order stay the same array: what was written down of them can be used again."""
    start = np.zeros(len(rows), np.int32)
    start[places] = begin
    path = None
    if guesses is not None:
        path = np.full((len(rows), guesses.shape[1]), -1, np.int32)
        path[places] = guesses
    kinds = np.where(prompts, 2, width > 0)
    if (kinds[1:] >= kinds[:-1]).all():
        return rows, tokens + width, DraftPlan(width, path, start)
    order = np.argsort(kinds, kind="stable")
    plan = DraftPlan(width[order], None if path is None else path[order], start[order])
    return rows[order], (tokens + width)[order], plan

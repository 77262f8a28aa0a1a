"""Gives drafts to rows of the step being planned: asks the drafter, and finds KV blocks for its drafts.

Drafts take what is left: of the token budget after decodes, prompts and joining sequences, and of the blocks without preempting
any sequence. A row whose blocks do not suffice gets fewer drafts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ridgeline.cache.manager import KVManager
from ridgeline.messages import StepResult, Want
from ridgeline.scheduler.bookkeeping import DraftPlan, InFlight, Steady
from ridgeline.scheduler.decodes import Again, Decodes
from ridgeline.scheduler.drafting import DecodingRows, Drafter, Drafts
from ridgeline.scheduler.row_table import Rows
from ridgeline.scheduler.running import Running
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, most_queries

_PROMPT_LOGPROBS = np.int8(Want.PROMPT_LOGPROBS)
# With more rows more steps have drafts, but of fewer of their rows. By the steps measured of a 1.5B model, waiting gains a fifth
# with one row and nothing with four.
_FEW_ROWS = 2
_Planned = tuple[np.ndarray, np.ndarray, DraftPlan | None]


@dataclass(slots=True)
class Asking:
    """The drafter, and what is left for drafts in this step."""

    drafter: Drafter
    running: Running
    manager: KVManager
    decodes: Decodes
    room: int                        # tokens
    waited: bool                     # no step is in flight


def give_drafts(
    asking: Asking, steady: Steady | None, rows: np.ndarray, tokens: np.ndarray, num_running: int,
) -> _Planned:
    """Rows and tokens of the plan with drafts, and the drafts. `num_running`: the first of them have not just joined.
    `steady`: of the plan before; if it has these very rows, all of them decode."""
    running, manager = asking.running, asking.manager
    table = running.rows
    room = min(asking.room, MOST_VERIFIED - len(rows))
    if room <= 0:
        return rows, tokens, None
    places: np.ndarray | None = None                     # None: all
    if steady is None or steady.rows is not rows:
        old = rows[:num_running]
        decodes = (table.known[old] - table.computed[old] == 1) & (table.computed[old] >= table.num_prompt[old])
        places = np.flatnonzero(decodes & (tokens[:num_running] == 1))
    decoding = rows if places is None else rows[places]
    sequences, allowed, with_grammar = _wanted(table, steady if places is None else None, decoding)
    known = table.known[decoding]
    most = np.minimum(np.minimum(table.limit[decoding] - known - 1, allowed), most_queries(len(rows)) - 1)
    most = np.maximum(most, 0, out=most)
    if not np.count_nonzero(most):
        return rows, tokens, None
    for place in (table.want[decoding] & _PROMPT_LOGPROBS).nonzero()[0].tolist():
        # A preemption loses them while they are in flight. With drafts the answer might end before they are computed again.
        most[place] *= sequences[place].prefill.logprobs_sent
    arrived = table.answers.arrived[decoding]
    keys = int(table.computed[decoding].sum())
    prompts = len(rows) - len(decoding)
    asked = DecodingRows(sequences, most, known - arrived, room, int(tokens.sum()), keys, with_grammar, prompts, asking.waited)
    found = asking.drafter.plan(asked)
    if found is None:
        return rows, tokens, None
    _check(found, asked)
    width = _with_blocks(running, manager, decoding, found.width)
    start = arrived if found.on_device is None else np.where(found.on_device, -1, arrived)
    if places is None:
        return _ordered(rows, tokens, DraftPlan(width, found.tokens, start.astype(np.int32)), None)
    plan = _spread(len(rows), places, width, start, found.tokens)
    return _ordered(rows, tokens, plan, table.known[rows] - table.computed[rows] > 1)


def give_again(asking: Asking, again: Again) -> DraftPlan | None:
    """give_drafts() for rows that all decode, as in the plan before."""
    steady, running = again.steady, asking.running
    room = min(asking.room, MOST_VERIFIED - len(steady.rows))
    if room <= 0 or not np.count_nonzero(again.most):
        return None
    for place in steady.scored:
        again.most[place] *= steady.sequences[place].prefill.logprobs_sent
    found = asking.drafter.plan(DecodingRows(
        steady.sequences, again.most, again.pending, room, len(steady.rows), again.keys, steady.with_grammar,
        waited=asking.waited,
    ))
    if found is None:
        return None
    width, laid = found.width, asking.decodes.lay_drafts(again, found.width, room)
    start = again.arrived if found.on_device is None else np.where(found.on_device, -1, again.arrived)
    if laid.lacking is None or not running.grow_each(steady.rows, laid.lacking):
        width = _with_blocks(running, asking.manager, steady.rows, width)
    elif laid.in_order and laid.drafted:
        return DraftPlan(width, found.tokens, start.astype(np.int32))
    return _ordered(steady.rows, steady.ones, DraftPlan(width, found.tokens, start.astype(np.int32)), None)[2]


def note_wanted(table: Rows, steady: Steady) -> None:
    """What drafts of these rows depend on beside their lengths."""
    _wanted(table, steady, steady.rows)
    steady.goes_on = bool(table.answers.goes_on[steady.rows].all())
    steady.scored = (table.want[steady.rows] & _PROMPT_LOGPROBS).nonzero()[0].tolist()


def waits_for_tokens(drafter: Drafter, flights: deque[InFlight]) -> bool:
    """Must the host know the tokens in flight before it plans the next step? Yes, if their rows may be shorter than that plan
    assumes, and the next token depends on them (penalties, grammars): otherwise a device that knows lengths before the host does
    goes on. Yes, too, if the drafter waits for what grammars force, and the newest step has few rows, most of them with one."""
    newest = flights[-1]
    few = len(newest.rows) <= _FEW_ROWS and 2 * len(newest.constrained) > len(newest.rows)
    return (few and drafter.waits) or any(flight.drafts is not None and not flight.drafts.goes_on for flight in flights)


def tell_time(drafter: Drafter, flight: InFlight, result: StepResult, seconds: float, proposing: float) -> None:
    """Of a step without prompts: `seconds` of the model itself, and `proposing` of a draft model."""
    queries = 1 if flight.drafts is None else 1 + int(flight.drafts.width.max())
    # With drafts the host has more to do, which a small model does not hide.
    spent = max(seconds, result.wall_seconds - proposing) if seconds > 0 else seconds
    keys, rejected = int(flight.ends.sum()), result.rejected
    drafter.timed(flight.num_decodes, flight.num_tokens, queries, keys, spent, rejected, flight.waited)


def _wanted(table: Rows, steady: Steady | None, rows: np.ndarray) -> tuple[list[Sequence], np.ndarray, list[int]]:
    """The sequences of these rows, how many drafts each may have by its request, and the places of those with a grammar.
    `steady`: has these rows."""
    if steady is not None and steady.most_drafts is not None:
        return steady.sequences, steady.most_drafts, steady.with_grammar
    sequences = [sequence for row in rows.tolist() if (sequence := table.sequences[row]) is not None]
    allowed = np.array([sequence.most_drafts for sequence in sequences], np.int64)
    with_grammar = [place for place, sequence in enumerate(sequences) if sequence.matcher is not None]
    if steady is not None:
        steady.most_drafts, steady.with_grammar = allowed, with_grammar
    return sequences, allowed, with_grammar


def _check(found: Drafts, asked: DecodingRows) -> None:
    if int(found.width.min()) < 0 or np.count_nonzero(found.width > asked.most) or int(found.width.sum()) > asked.room:
        raise AssertionError("the drafter plans more drafts than it may")


def _with_blocks(running: Running, manager: KVManager, rows: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Widths for which the rows have blocks now."""
    table, size = running.rows, manager.block_size
    ends = table.computed[rows] + 1 + width
    short = running.grow(rows, ends)
    if len(short):
        width = width.copy()
    for place, row, end in zip(short.tolist(), rows[short].tolist(), ends[short].tolist(), strict=True):
        sequence = table.sequences[row]
        assert sequence is not None and sequence.blocks is not None
        if (entries := manager.grow(sequence.blocks, end)) is None:
            width[place] = max(0, int(table.num_blocks[row]) * size - int(table.computed[row]) - 1)
        else:
            running.append(row, sequence.blocks, entries)
    return width


def _spread(count: int, places: np.ndarray, width: np.ndarray, start: np.ndarray, guesses: np.ndarray | None) -> DraftPlan:
    """From the rows that decode to all."""
    plan = DraftPlan(np.zeros(count, np.int32), None, np.zeros(count, np.int32))
    plan.width[places], plan.start[places] = width, start
    if guesses is not None:
        plan.tokens = np.full((count, guesses.shape[1]), -1, np.int32)
        plan.tokens[places] = guesses
    return plan


def _ordered(rows: np.ndarray, tokens: np.ndarray, plan: DraftPlan, prompts: np.ndarray | None) -> _Planned:
    """Decodes without drafts first, then those with drafts, then prompts: so kernels find rows of a kind together. Rows that are
    in that order stay the same array: what was written down of them can be used again."""
    kinds = plan.width > 0
    drafted = np.count_nonzero(kinds)
    if not drafted:
        return rows, tokens, None
    if prompts is not None:
        kinds = np.where(prompts, 2, kinds)
    if (prompts is None and drafted == len(rows)) or not np.count_nonzero(kinds[1:] < kinds[:-1]):
        return rows, tokens + plan.width, plan
    order = np.argsort(kinds, kind="stable")
    ordered = DraftPlan(plan.width[order], None if plan.tokens is None else plan.tokens[order], plan.start[order])
    if prompts is None or not np.count_nonzero(prompts):
        ordered.order = order, rows
    return rows[order], (tokens + plan.width)[order], ordered

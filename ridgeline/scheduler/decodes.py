"""Steps in which the same rows decode again: planned and taken in by a few native calls (ops/cpu/src/decodes.c).

Nearly all steps are such. What is done for each of their rows is little; in numpy it is some hundred calls, which take longer
than the rows do. The engine hands the library over, as this half knows no kernels. Where there is none, and for all other
steps, the scheduler's own code does the same: it is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.messages import StepResult
from ridgeline.native_room import NativeRoom
from ridgeline.scheduler.bookkeeping import InFlight, Steady
from ridgeline.scheduler.row_table import Rows
from ridgeline.sizes.graph_shapes import most_queries

_HEAD = 4                            # numbers before those by place


@dataclass(slots=True)
class Again:
    """All rows of the newest plan have one token to compute, below their limits."""

    steady: Steady
    keys: int                        # tokens that have their KV, of all rows
    most: np.ndarray                 # int64: drafts that each row may have
    pending: np.ndarray              # int64: tokens in flight
    arrived: np.ndarray              # int64
    lacking: np.ndarray              # places of rows that need a block for their token
    given: tuple[np.ndarray, np.ndarray, int, list[Any]] = field(init=False)     # as Scheduler._give_to_running() has it


@dataclass(slots=True)
class LaidDrafts:
    """What a step's drafts come to."""

    drafted: int                     # rows that have some
    total: int                       # drafts
    in_order: bool                   # rows without drafts come first
    lacking: np.ndarray | None       # places of rows that need a block for them; None: one of them needs several


@dataclass(slots=True)
class Taken:
    """A result, whose rows are as it says."""

    others: np.ndarray               # places of rows that have more to tell than their tokens
    full: np.ndarray                 # places of the rows that have no more to tell, with full blocks
    counts: np.ndarray               # int32: tokens of each of the rows that have no more to tell …
    tokens: np.ndarray               # int32: … and these, behind each other
    unused: int                      # planned tokens that rows still there were not to have


class Decodes:
    def __init__(self, native: Any, table: Rows, block_size: int) -> None:
        """`native`: the library; None: all is done by the scheduler's own code."""
        self.native = native
        self._block_size = block_size
        self._answers = table.answers
        columns = table.answers.columns
        self._max_rows = columns.shape[1]
        self._columns, self._simple = columns.ctypes.data, table.answers.simple.ctypes.data
        self._room = NativeRoom(_HEAD + 8 * self._max_rows)
        self._scratch = NativeRoom(2 * self._max_rows)

    def again(self, steady: Steady) -> Again | None:
        """None: the step is to be planned as any other."""
        count, allowed = len(steady.rows), steady.most_drafts
        lacking = self.native.decode_again(
            steady.raw, self._columns, bytes(8 * count) if allowed is None else allowed.tobytes(), self._room.address, count,
            self._max_rows, most_queries(count) - 1, self._block_size,
        )
        if lacking < 0:
            return None
        found = self._room.copy(1 + 3 * count + lacking)
        drafts, pending, arrived = found[1 : 1 + 3 * count].reshape(3, count)
        return Again(steady, int(found[0]), drafts, pending, arrived, found[1 + 3 * count :])

    def lay_drafts(self, again: Again, width: np.ndarray, room: int) -> LaidDrafts:
        count = len(width)
        number = self.native.lay_drafts(
            again.steady.raw, self._columns, _int32(width), again.most.tobytes(), self._room.address, count, self._max_rows,
            room, self._block_size,
        )
        if number == -2:
            raise AssertionError("the drafter plans more drafts than it may")
        drafted, total, in_order = self._room.numbers[:3].tolist()
        return LaidDrafts(drafted, total, bool(in_order), None if number < 0 else self._room.copy(number, 3))

    def book(self, steady: Steady, width: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, int]:
        """The rows are planned: where each ends, its stay, and the tokens of all. `width`: int32, drafts of each."""
        count = len(steady.rows)
        total = self.native.book_decodes(
            steady.raw, self._columns, None if width is None else _int32(width), self._room.address, count, self._max_rows
        )
        ends, stays = self._room.copy(2 * count).reshape(2, count)
        return ends, stays, total

    def take_in(self, flight: InFlight, result: StepResult, later: InFlight | None) -> Taken | None:
        """A step in which all rows sampled, and none had more to tell than tokens: rows are as long as it says, and so is the
        step that was planned meanwhile. None: that is not what was planned."""
        width = None if flight.drafts is None else _int32(flight.drafts.width)
        tokens, count = result.tokens, len(flight.rows)
        behind = (None, None, None) if later is None else (later.steady.raw, later.stays.tobytes(), later.ends.ctypes.data)
        if self._room.size < (needed := _HEAD + 3 * count + tokens.size):
            self._room = NativeRoom(needed)
        done = self.native.take_in_decodes(
            flight.steady.raw, flight.stays.tobytes(), flight.ends.tobytes(), width, _int32(tokens), _int32(result.num_new),
            _int32(result.lengths), self._columns, self._simple, self._answers.ending.ctypes.data, *behind, self._room.address,
            self._scratch.address, count, tokens.shape[1], self._max_rows, len(self._answers.ending),
            0 if later is None else len(later.rows), self._block_size,
        )
        if done < 0:
            return None
        quick, said, full, unused = self._room.numbers[:_HEAD].tolist()
        lists = self._room.copy(count + full, _HEAD)
        counts = self._room.numbers[_HEAD + 2 * count :].view(np.int32)
        return Taken(
            lists[: count - quick], lists[count:], counts[:quick].copy(), counts[count : count + said].copy(), unused
        )


def _int32(array: np.ndarray) -> bytes:
    return array.astype(np.int32, copy=False).tobytes()

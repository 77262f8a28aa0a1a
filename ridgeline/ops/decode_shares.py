"""How the keys of decoding rows are shared out among programs: long rows in several shares, short ones in one.

Reading keys and values is all a decode's attention does, so every program should have about equally much to read, whoever's
it is. A share is what each would get if all keys of the step were dealt out evenly; a row has as many of them as come
closest to its length, all of one size. Rows of about the same length are therefore never cut for nothing, and one long row
among many short ones is read by many programs. Long rows come first in the list: what is left at the end is short.

Plain numbers, computed while the step before runs. The lists have one length for a number of rows, whatever the lengths, as
a recorded graph needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

LEAST_SHARE = 64                     # keys that are worth a program,
LEAST_OF_FEW, FEW_ROWS = 32, 2       # and while so few rows leave most of the chip idle
SHARE_UNIT = 32                      # shares are multiples of it: whole tiles
MOST_SHARES = 64                     # of a row
SINGLE_SHARES = 16                   # of a row that is alone: what more would read faster, the merge would lose
FIXED_SHARES, LEAST_FIXED_SHARE = 8, 512     # in deterministic mode: by the row's own length alone


@dataclass(frozen=True, slots=True)
class Shares:
    """One item is one share of one row. A row's items follow each other; those of nobody have row -1."""

    item_row: np.ndarray             # int32 [items]
    first_item: np.ndarray           # int32 [rows]
    size: np.ndarray                 # int32 [rows]: keys of each share but the last


@dataclass(frozen=True, slots=True, eq=False)
class DeviceShares:
    """The same, where the kernel reads it."""

    item_row: Tensor
    first_item: Tensor
    size: Tensor


def programs_at_once(multiprocessors: int, kv_heads: int) -> int:
    """For each KV head: four on every multiprocessor are enough to keep the memory busy."""
    return max(1, 4 * multiprocessors // kv_heads)


def wanted_shares(rows: int, programs: int) -> int:
    """How many shares all rows together should have, when `programs` can run at once (for each KV head)."""
    return max(rows, min(SINGLE_SHARES * rows, programs))


def most_items(rows: int, programs: int) -> int:
    """As many as are wanted, and some for rounding: programs without work are not free. One row needs none of those."""
    return wanted_shares(rows, programs) + rows // 2


def num_items(rows: int, programs: int, fixed: bool) -> int:
    """The length of the list."""
    return rows * FIXED_SHARES if fixed else most_items(rows, programs)


def share_out(lengths: np.ndarray, programs: int, fixed: bool = False) -> Shares:
    """`lengths`: keys that each row reads for itself; 0 for padding, which has an item too, to write its zeros."""
    rows = len(lengths)
    if rows == 1 and not fixed:
        return _one_row(int(lengths[0]), programs)
    if fixed:
        shares = np.clip(lengths // LEAST_FIXED_SHARE, 1, FIXED_SHARES)
    else:
        even = max(LEAST_OF_FEW if rows <= FEW_ROWS else LEAST_SHARE, int(lengths.sum()) / wanted_shares(rows, programs))
        if rows <= FEW_ROWS:                             # of one size, however long they are
            even = -(-int(np.ceil(even)) // SHARE_UNIT) * SHARE_UNIT
            shares = np.maximum(-(-lengths // even), 1)
        else:
            shares = _rounded(lengths, even)
            while shares.sum() > most_items(rows, programs):     # many are shorter than a share: it was not a fair one
                even *= 1.1
                shares = _rounded(lengths, even)
    size = np.maximum(-(-lengths // (shares * SHARE_UNIT)) * SHARE_UNIT, SHARE_UNIT)
    shares = np.maximum(-(-lengths // size), 1)          # whole tiles may have made the last ones empty
    longest_first = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(shares[longest_first])
    first_item = np.empty(rows, np.int32)
    first_item[longest_first] = ends - shares[longest_first]
    item_row = np.full(num_items(rows, programs, fixed), -1, np.int32)
    item_row[: int(ends[-1]) if rows else 0] = np.repeat(longest_first, shares[longest_first])
    return Shares(item_row, first_item, size.astype(np.int32))


def _one_row(length: int, programs: int) -> Shares:
    """The same, without arrays: this is on the way to the first token."""
    even = max(LEAST_OF_FEW, -(-length // wanted_shares(1, programs)))
    even = -(-even // SHARE_UNIT) * SHARE_UNIT
    count = max(1, -(-length // even))
    size = max(SHARE_UNIT, -(-length // (count * SHARE_UNIT)) * SHARE_UNIT)
    count = max(1, -(-length // size))
    items = [0] * count + [-1] * (most_items(1, programs) - count)
    return Shares(np.array(items, np.int32), np.zeros(1, np.int32), np.array([size], np.int32))


def _rounded(lengths: np.ndarray, even: float) -> np.ndarray:
    return np.clip(np.rint(lengths / even), 1, MOST_SHARES).astype(np.int64)

"""How the keys of decoding rows are shared out among programs: long rows in several shares, short ones in one.

Reading keys and values is all a decode's attention does, so every program should have about equally much to read, and all of
them should end together. A share is what each would get if all keys of the step were dealt out evenly; a row has as many of
them as come closest to its length, all of one size. Long rows come first in the list: what is left at the end is short.

Rows that are about as long as each other have no short ones for the end: a few more than run at once, and those few run alone
while the rest of the chip has nothing to do. 69 rows of 2,000 keys took 198 us, and take 158 cut in three. So of rows alike
several cuts are compared by when their last round would end; each share also has a beginning of its own to pay for. A last
round that is not so empty is left alone where shares would be short: 96 rows of 640 keys were 5 % slower when cut.

Plain numbers, computed while the step before runs, and kept for as many steps as a share has room for. The lists have one
length for a number of rows, whatever the lengths, as a recorded graph needs it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from torch import Tensor

LEAST_SHARE = 64                     # keys that are worth a program,
LEAST_OF_FEW, FEW_ROWS = 32, 2       # and while so few rows leave most of the chip idle
SHARE_UNIT = 32                      # shares are multiples of it: whole tiles
MOST_SHARES = 64                     # of a row
SINGLE_SHARES = 16                   # of a row that is alone: what more would read faster, the merge would lose
ROUNDS_APART = 4                     # beyond so many rounds of programs, it matters little how full the last one is
ALIKE = 1.5                          # times as long as the mean, at most
CLEARLY = 0.89                       # of the time: when it ends is only estimated
NEARLY_EMPTY, LONG_SHARE = 0.3, 480  # a last round; keys of a share that is worth cutting for a fuller one
SHARE_COST = 60                      # keys that could be read in the time that a share takes besides
LONGEST_LIST = 1280                  # for full rounds: with it, no more memory is needed than 1,024 rows need in any case
TYPICAL_LENGTH, CLOSE = 2048, 1.06   # what the lists' lengths are chosen for: as few shares as come this close to the best
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
    """How many shares a few rows together should have, when `programs` can run at once (for each KV head)."""
    return max(rows, min(SINGLE_SHARES * rows, programs))


@functools.cache
def most_items(rows: int, programs: int) -> int:
    """As many as rows of one length are best cut into, and some for others: programs without work are not free."""
    if rows <= FEW_ROWS or rows > ROUNDS_APART * programs:
        return wanted_shares(rows, programs) + rows // 2
    ends = {
        count: -(-rows * count // programs) * (TYPICAL_LENGTH / count + SHARE_COST) for count in range(1, SINGLE_SHARES + 1)
    }
    best = next(count for count, end in ends.items() if end <= CLOSE * min(ends.values()))
    plain = wanted_shares(rows, programs)
    pays = ends[best] < CLEARLY * ends[max(1, round(plain / rows))]
    return max(plain + rows // 2, min(LONGEST_LIST, rows * best + rows // 2) if pays else 0)


def num_items(rows: int, programs: int, fixed: bool) -> int:
    """The length of the list."""
    return rows * FIXED_SHARES if fixed else most_items(rows, programs)


def share_out(lengths: np.ndarray, programs: int, fixed: bool = False) -> Shares:
    """`lengths`: keys that each row reads for itself; 0 for padding, which has an item too, to write its zeros."""
    rows = len(lengths)
    if rows == 1 and not fixed:
        return _one_row(int(lengths[0]), programs)
    shares = np.clip(lengths // LEAST_FIXED_SHARE, 1, FIXED_SHARES) if fixed else _cut(lengths, programs)
    size = _sizes(lengths, shares)
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


def _cut(lengths: np.ndarray, programs: int) -> np.ndarray:
    """int64 [rows]: into how many shares each row is cut."""
    rows, total = len(lengths), int(lengths.sum())
    if rows <= FEW_ROWS:                                 # of one size, however long they are
        even = max(LEAST_OF_FEW, total / wanted_shares(rows, programs))
        even = -(-int(np.ceil(even)) // SHARE_UNIT) * SHARE_UNIT
        return np.maximum(-(-lengths // even), 1)
    most = most_items(rows, programs)
    plain = _dealt(lengths, total / wanted_shares(rows, programs), most)
    if rows > ROUNDS_APART * programs or int(lengths.max()) * rows > ALIKE * total:
        return plain
    limits = [min(most, rounds * programs) for rounds in range(-(-rows // programs), -(-most // programs) + 1)]
    full = min((_dealt(lengths, total / limit, limit) for limit in limits), key=lambda cut: _end(lengths, cut, programs))
    last = int(plain.sum() - 1) % programs + 1
    if last > NEARLY_EMPTY * programs and total < LONG_SHARE * int(full.sum()):
        return plain
    return full if _end(lengths, full, programs) < CLEARLY * _end(lengths, plain, programs) else plain


def _dealt(lengths: np.ndarray, even: float, limit: int) -> np.ndarray:
    """As many shares for each row as come closest to its length in even ones, all rows together no more than `limit`."""
    even = max(LEAST_SHARE, even)
    while (shares := np.clip(np.rint(lengths / even), 1, MOST_SHARES).astype(np.int64)).sum() > limit:
        even *= 1.1
    return shares


def _end(lengths: np.ndarray, shares: np.ndarray, programs: int) -> int:
    """When the last round of programs ends, in keys."""
    sizes = -np.sort(-np.repeat(_sizes(lengths, shares), shares))[::programs]
    return int(sizes.sum()) + SHARE_COST * len(sizes)


def _sizes(lengths: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return np.maximum(-(-lengths // (shares * SHARE_UNIT)) * SHARE_UNIT, SHARE_UNIT)

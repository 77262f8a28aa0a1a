"""Split-KV: cuts the keys of decode rows into shares, one CTA per share and KV head; long rows get several, short ones one.

Decode attention is bound by reading K and V. So every CTA should read about as much as the others, and all should end together.
The even share is (keys of the step) / (CTAs). A row gets as many equal shares as come closest to its length. Long rows come
first in the list, so the last CTAs to start are short.

Rows of equal length have no short rows to fill the last wave: a few CTAs more than fit at once run alone on an idle GPU. 69
rows of 2,000 keys took 198 us, and take 158 cut in three. For such rows several cuts are compared by the estimated end of
their last wave, with a fixed cost per share. A last wave that is fairly full is left alone if shares would be short: 96 rows
of 640 keys were 5 % slower when cut.

It is computed on the host during the step before, and kept for as many steps as a share has room for; with drafts it is computed
for every step. The numpy here is the definition, and one native call (ops/cpu/src/shares.c) does the same where the library is
there. The length of the lists depends only on the number of rows, as a captured CUDA graph needs it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

LEAST_SHARE = 64                     # keys that are worth a CTA,
LEAST_OF_FEW, FEW_ROWS = 32, 2       # the same for few rows, which leave most SMs idle
SHARE_UNIT = 32                      # shares are multiples of it: whole tiles of keys
MOST_SHARES = 64                     # of a row
SINGLE_SHARES = 16                   # of a single row: with more, the merge costs what reading gains
ROUNDS_APART = 4                     # waves of CTAs beyond which it matters little how full the last one is
ALIKE = 1.5                          # rows count as equally long up to this multiple of the mean length
CLEARLY = 0.89                       # of the time: the end is only an estimate, so a gain must be clear
NEARLY_EMPTY, LONG_SHARE = 0.3, 480  # fill of a last wave; keys of a share that is worth cutting for a fuller one
SHARE_COST = 60                      # fixed cost of a share, in keys
LONGEST_LIST = 1280                  # for full waves: needs no more workspace than 1,024 rows need in any case
TYPICAL_LENGTH, CLOSE = 2048, 1.06   # list lengths are chosen for this row length: the fewest shares this close to the best
FIXED_SHARES, LEAST_FIXED_SHARE = 8, 512     # deterministic mode: the cut depends on the row's own length alone


@dataclass(frozen=True, slots=True)
class Shares:
    """One item is one share of one row. A row's items follow each other. Unused items have row -1."""

    item_row: np.ndarray             # int32 [items]
    first_item: np.ndarray           # int32 [rows]
    size: np.ndarray                 # int32 [rows]: keys of each share but the last


@dataclass(frozen=True, slots=True, eq=False)
class DeviceShares:
    """`Shares` on the device."""

    item_row: Tensor
    first_item: Tensor
    size: Tensor


def programs_at_once(multiprocessors: int, kv_heads: int) -> int:
    """CTAs for each KV head that run at once: four per SM are enough to saturate memory."""
    return max(1, 4 * multiprocessors // kv_heads)


def wanted_shares(rows: int, programs: int) -> int:
    """How many shares a few rows together should have, when `programs` CTAs per KV head run at once."""
    return max(rows, min(SINGLE_SHARES * rows, programs))


@functools.cache
def most_items(rows: int, programs: int) -> int:
    """As many as rows of equal length are best cut into, and some more for uneven ones: CTAs without work are not free."""
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


def share_out(lengths: np.ndarray, programs: int, fixed: bool = False, native: Any = None) -> Shares:
    """`lengths`: keys that each row reads for itself; 0 for padding, which has an item too, to write its zeros. `native`: the
    library; None: all is done here."""
    rows = len(lengths)
    if rows == 1 and not fixed:
        return _one_row(int(lengths[0]), programs)
    if native is not None and rows > FEW_ROWS and not fixed:
        items = most_items(rows, programs)
        out = np.empty(items + 2 * rows, np.int32)
        given = lengths.astype(np.int32).tobytes()       # copied: an address takes longer to ask for
        if native.share_out(given, out.ctypes.data, rows, programs, wanted_shares(rows, programs), items) == 0:
            return Shares(out[:items], out[items : items + rows], out[items + rows :])
    shares = np.clip(lengths // LEAST_FIXED_SHARE, 1, FIXED_SHARES) if fixed else _cut(lengths, programs)
    size = _sizes(lengths, shares)
    shares = np.maximum(-(-lengths // size), 1)          # rounding to whole tiles may leave the last shares empty
    longest_first = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(shares[longest_first])
    first_item = np.empty(rows, np.int32)
    first_item[longest_first] = ends - shares[longest_first]
    item_row = np.full(num_items(rows, programs, fixed), -1, np.int32)
    item_row[: int(ends[-1]) if rows else 0] = np.repeat(longest_first, shares[longest_first])
    return Shares(item_row, first_item, size.astype(np.int32))


def _one_row(length: int, programs: int) -> Shares:
    """`share_out` of one row, without arrays: this is part of TTFT."""
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
    """Per row the number of shares of `even` keys that comes closest to its length; together no more than `limit`."""
    even = max(LEAST_SHARE, even)
    while (shares := np.clip(np.rint(lengths / even), 1, MOST_SHARES).astype(np.int64)).sum() > limit:
        even *= 1.1
    return shares


def _end(lengths: np.ndarray, shares: np.ndarray, programs: int) -> int:
    """Estimated end of the last wave of CTAs, in keys."""
    sizes = -np.sort(-np.repeat(_sizes(lengths, shares), shares))[::programs]
    return int(sizes.sum()) + SHARE_COST * len(sizes)


def _sizes(lengths: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return np.maximum(-(-lengths // (shares * SHARE_UNIT)) * SHARE_UNIT, SHARE_UNIT)

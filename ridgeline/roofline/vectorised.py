"""step_cost.py vectorised over many steps, so that a running engine can count them in a few microseconds per step.

A step's cost is an affine function of sums over its rows (tokens, logits, pairs, keys, blocks …). The coefficients come from
calling step_cost.py, one sum at a time; then any number of steps is one small matrix product. Exact: every number is an integer
below 2⁵³. Only the experts that a step reads are no such function: they are counted on the device, or expected of even routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ridgeline.roofline.decoder_shape import DecoderShape, StepCounts
from ridgeline.roofline.step_cost import LINEARS, OPS, OpCost, cost_of
from ridgeline.sizes.latent_costs import FEW_QUERIES
from ridgeline.sizes.op_costs import Attended

TERMS = tuple(each.name for each in fields(OpCost))
_HEAD, _EXPERTS = OPS.index("head"), OPS.index("experts")
_LINEARS = [OPS.index(name) for name in LINEARS]


@dataclass(frozen=True, slots=True)
class _Sums:
    """What the cost depends on, per step, as arrays or as numbers. The last two are 0 or 1."""

    tokens: np.ndarray
    rows: np.ndarray
    logits: np.ndarray
    last_tokens: np.ndarray          # that go on behind the last layer's attention …
    last_rows: np.ndarray            # … and the rows they are in
    full: tuple[np.ndarray, ...]     # pairs, keys, blocks in a layer without a window …
    windowed: tuple[np.ndarray, ...] # … with one …
    last: tuple[np.ndarray, ...]     # … and in the last
    shared: np.ndarray
    few: np.ndarray                  # of the pairs without a window, those of rows with few queries
    goes_on: np.ndarray              # is there a token behind the last layer's attention?
    has_logits: np.ndarray

    def matrix(self) -> np.ndarray:
        """[steps, sums], float64."""
        columns = (
            self.tokens, self.rows, self.logits, self.last_tokens, self.last_rows, *self.full, *self.windowed, *self.last,
            self.shared, self.few, self.goes_on, self.has_logits,
        )
        made = np.empty((_NUM_SUMS, len(self.tokens)))
        for place, column in enumerate(columns):
            made[place] = column
        return made.T


_NUM_SUMS = 18
_LAST_TOKENS, _LOGITS, _GOES_ON, _HAS_LOGITS = 3, 2, 16, 17


@dataclass(frozen=True, slots=True)
class ManyCosts:
    """Per step (rows) and op (columns, in the order of OPS)."""

    columns: tuple[np.ndarray, ...]  # in the order of OpCost's fields
    tokens: np.ndarray
    logits: np.ndarray
    rows: np.ndarray

    def __getitem__(self, term: str) -> np.ndarray:
        return self.columns[TERMS.index(term)]

    @property
    def bytes(self) -> np.ndarray:
        return self["weights"] + self["kv_read"] + self["kv_written"] + self["activations"]


class StepCosts:
    def __init__(self, shape: DecoderShape, read_bytes: Callable[[int], tuple[int, int]] | None = None) -> None:
        """`read_bytes(rows)`: bytes that GEMMs with this number of rows read of all layers' linears and of the head, if they
        do not follow from the shape or depend on the rows."""
        self.shape = shape
        self._read_bytes = read_bytes
        self._known: dict[int, tuple[float, float]] = {}         # rows -> as multiples of what the shape says
        self._constant = _outputs(shape, StepCounts())
        self._goes_on = _outputs(shape, _counts([int(index == _LAST_TOKENS) for index in range(_NUM_SUMS)]))
        self._coefficients = np.zeros((_NUM_SUMS, len(self._constant)))
        for index in range(_NUM_SUMS):
            self._coefficients[index] = self._coefficient(index)

    def of(
        self, counts: np.ndarray, new: np.ndarray, kv_len: np.ndarray, logits: np.ndarray, shared: np.ndarray,
        every_hidden: np.ndarray, experts: np.ndarray | None = None,
    ) -> ManyCosts:
        """Per step: its number of rows, KV positions read once for several rows, whether every hidden state is needed, and
        experts that it read, if that was counted (0: it was not). Per row, all steps concatenated: its tokens, its KV length with
        these, and how many of the last have logits."""
        sums = self._sums(new, kv_len, logits, counts, shared, every_hidden)
        found = self._constant + sums.matrix() @ self._coefficients
        columns = np.split(found, len(TERMS), axis=1)
        if self.shape.experts is not None:
            columns[TERMS.index("weights")][:, _EXPERTS] = self._expert_bytes(sums, experts)
        if self._read_bytes is not None:
            self._reweigh(columns[TERMS.index("weights")], sums)
        return ManyCosts(tuple(columns), sums.tokens, sums.logits, counts)

    def _expert_bytes(self, sums: _Sums, counted: np.ndarray | None) -> np.ndarray:
        expected = np.array([
            self.shape.expected_reads(tokens, last)
            for tokens, last in zip(sums.tokens.tolist(), sums.last_tokens.tolist(), strict=True)
        ])
        read = expected if counted is None else np.where(counted > 0, counted, expected)
        return np.round(read * self.shape.expert_size)

    @property
    def weight_bytes(self) -> float:
        """Per element of the linears, in a step of one row."""
        return self.shape.weight_bytes * (1.0 if self._read_bytes is None else self._multiples(1)[0])

    def _reweigh(self, weights: np.ndarray, sums: _Sums) -> None:
        linears = np.array([self._multiples(count)[0] for count in sums.tokens.tolist()])
        weights[:, _LINEARS] *= linears[:, None]
        weights[:, _HEAD] *= [self._multiples(count)[1] for count in sums.logits.tolist()]

    def _multiples(self, rows: int) -> tuple[float, float]:
        rows = min(max(rows, 1), 256)                    # no scheme changes its kernel above that
        if rows not in self._known:
            assert self._read_bytes is not None
            linears, head = self._read_bytes(rows)
            shape = self.shape
            self._known[rows] = (
                linears / (shape.linear_weights * shape.weight_bytes),
                head / (shape.hidden * shape.vocab * shape.head_element_bytes),
            )
        return self._known[rows]

    def _sums(
        self, new: np.ndarray, kv: np.ndarray, logits: np.ndarray, counts: np.ndarray, shared: np.ndarray,
        every_hidden: np.ndarray,
    ) -> _Sums:
        shape = self.shape
        starts = np.cumsum(counts) - counts

        def total(values: np.ndarray) -> np.ndarray:
            return np.add.reduceat(values, starts)

        none = np.zeros(len(counts), np.int64)
        if len(new) == int(new.sum()) == int(np.count_nonzero(logits)) and not shape.window_layers:
            keys = total(kv)                             # decodes: one token each
            full = kv - 1
            seen = keys, keys, total(np.floor_divide(full, np.int32(shape.block_size), out=full)) + counts
            some = counts > 0
            return _Sums(
                counts, counts, counts, counts, counts, seen, (none, none, none), seen, shared, keys, some, some
            )
        new, kv, logits = new.astype(np.int64), kv.astype(np.int64), logits.astype(np.int64)
        last = np.where(np.repeat(every_hidden, counts), new, logits) if every_hidden.any() else logits

        def attended(queries: np.ndarray, window: int | None) -> tuple[np.ndarray, ...]:
            return tuple(total(each) for each in _attended(queries, kv, window, shape.block_size))

        num_logits, goes_on = total(logits), total(last)
        few = attended(np.where(new <= FEW_QUERIES, new, 0), None)[0] if shape.latent is not None else none
        return _Sums(
            total(new), counts, num_logits, goes_on, total((last > 0).astype(np.int64)), attended(new, None),
            attended(new, shape.window) if shape.window_layers else (none, none, none),
            attended(last, shape.window if shape.last_windowed else None), shared, few, goes_on > 0, num_logits > 0,
        )

    def _coefficient(self, index: int) -> np.ndarray:
        """How much one more of this sum costs."""

        def at(**values: int) -> np.ndarray:
            vector = [0] * _NUM_SUMS
            for name, value in values.items():
                vector[int(name[1:])] = value
            return _outputs(self.shape, _counts(vector))

        if index == _GOES_ON:                            # what is there as soon as one token goes on
            return 2 * self._goes_on - at(**{f"_{_LAST_TOKENS}": 2}) - self._constant
        if index == _HAS_LOGITS:
            return 2 * at(**{f"_{_LOGITS}": 1}) - at(**{f"_{_LOGITS}": 2}) - self._constant
        if index in (_LAST_TOKENS, _LOGITS):
            return at(**{f"_{index}": 2}) - at(**{f"_{index}": 1})
        # Sums of the last layer count only where something goes on, so one token does, in both.
        return at(**{f"_{index}": 1, f"_{_LAST_TOKENS}": 1}) - self._goes_on


def _attended(new: np.ndarray, kv: np.ndarray, window: int | None, block_size: int) -> tuple[np.ndarray, ...]:
    """Attended.of, row by row: pairs, keys, blocks."""
    first = kv - new + 1
    pairs, keys = new * (first + kv) // 2, kv
    if window is not None:
        growing = np.clip(window - first, 0, new)        # queries that still see everything before them
        cut = growing * (2 * first + growing - 1) // 2 + (new - growing) * window
        pairs = np.where(window >= kv, pairs, cut)
        keys = np.minimum(kv, new + window - 1)
    keys = np.where(new > 0, keys, 0)
    blocks = np.where(keys > 0, (kv - 1) // block_size - (kv - keys) // block_size + 1, 0)
    return pairs, keys, blocks


def _counts(vector: Sequence[int]) -> StepCounts:
    tokens, rows, logits, last_tokens, last_rows, *rest = vector
    full, windowed, last, shared, few = rest[0:3], rest[3:6], rest[6:9], rest[9], rest[10]
    return StepCounts(
        tokens, logits, last_tokens, Attended(rows, tokens, *full), Attended(rows, tokens, *windowed),
        Attended(last_rows, last_tokens, *last), shared, few,
    )


def _outputs(shape: DecoderShape, counts: StepCounts) -> np.ndarray:
    """[terms · ops], a term's ops side by side."""
    ops = cost_of(shape, counts, experts_read=0.0).ops
    return np.array([getattr(ops[name], term) for term in TERMS for name in OPS], np.float64)

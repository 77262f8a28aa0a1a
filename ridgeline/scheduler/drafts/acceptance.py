"""How likely drafts are to be accepted: counted, by proposer and position, and for each row.

A rate is conditional: of the drafts whose predecessors were all accepted, the share that was accepted too. So the chance that
draft j of a row survives is the product of the first j rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ridgeline.draft_options import DRAFT_MODEL

# What is believed before anything was counted, and how many counts that is worth.
_PRIORS = {"grammar": (0.9, 0.9, 0.9, 0.9), "prediction": (0.6, 0.7, 0.8, 0.9), DRAFT_MODEL: (0.7, 0.7, 0.7, 0.7)}
_BY_EVIDENCE = (0.4, 0.5, 0.65, 0.8)
_PRIOR_WEIGHT = 2.0
_POSITION_WEIGHT = 8.0               # a position is believed to be like the one before it
_REMEMBERED = 500.0                  # counts of a position; then the old ones count half
_ROW_WEIGHT = 12.0                   # counts of the proposer that a row's own are weighed against
_ROW_KEEPS = 0.95                    # of a row's counts with each drafted step …
_ROW_FADES = 0.995                   # … and with each step without drafts: a row that was given up is tried again


class Source(NamedTuple):
    """Drafts that are counted together."""

    name: str                        # of the proposer
    evidence: int                    # its grade
    late: bool                       # proposed while tokens were in flight, so that the path had to guess them, too


@dataclass(slots=True)
class _Counts:
    tried: np.ndarray                # by position
    accepted: np.ndarray
    rates: np.ndarray | None = None  # from these; None: not calculated yet


@dataclass(slots=True)
class RowRecord:
    """What a row's drafts came to lately."""

    tried: float = 0.0
    accepted: float = 0.0
    step: int = 0                    # when it was last counted
    # Its drafts in flight, the oldest first: where they are from, and how many are expected to survive.
    waiting: list[tuple[Source, float]] = field(default_factory=list)

    def count(self, width: int, accepted: int, step: int) -> None:
        if step != self.step:
            self.fade(step)
        self.tried = self.tried * _ROW_KEEPS + min(width, accepted + 1)
        self.accepted = self.accepted * _ROW_KEEPS + accepted

    def fade(self, step: int) -> None:
        kept = _ROW_FADES ** (step - self.step)
        self.tried *= kept
        self.accepted *= kept
        self.step = step


class Acceptance:
    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._counts: dict[Source, _Counts] = {}

    def count(self, source: Source, width: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts of some rows have come back: how many each had, and how many of them were accepted."""
        counts = self._of(source)
        counts.tried += beyond(np.minimum(width, accepted + 1), self._positions)
        counts.accepted += beyond(accepted, self._positions)
        counts.rates = None

    def rates(self, source: Source) -> np.ndarray:
        """float [positions]: the chance of each draft, given that those before it are accepted."""
        counts = self._of(source)
        if counts.rates is None:
            full = counts.tried > _REMEMBERED
            counts.tried[full] /= 2
            counts.accepted[full] /= 2
            counts.rates = self._calculated(source, counts)
        return counts.rates

    @property
    def best(self) -> float:
        """The largest first rate of any source that is known: no row's drafts promise more."""
        return max((float(self.rates(source)[0]) for source in self._counts), default=1.0)

    def _of(self, source: Source) -> _Counts:
        counts = self._counts.get(source)
        if counts is None:
            counts = self._counts[source] = _Counts(np.zeros(self._positions), np.zeros(self._positions))
        return counts

    def _calculated(self, source: Source, counts: _Counts) -> np.ndarray:
        rate, weight = _PRIORS.get(source.name, _BY_EVIDENCE)[source.evidence], _PRIOR_WEIGHT
        rates = []
        for tried, accepted in zip(counts.tried.tolist(), counts.accepted.tolist(), strict=True):
            rate = (accepted + weight * rate) / (tried + weight)
            weight = _POSITION_WEIGHT
            rates.append(rate)
        return np.array(rates)


def survival(rates: np.ndarray, tried: np.ndarray, accepted: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float [offers, positions]: the chance that each draft is accepted, 0 beyond an offer's length. A proposer's rates, each
    offer's in its row, are weighed against what the row's own drafts came to."""
    mixed = (accepted[:, None] + _ROW_WEIGHT * rates) / (tried[:, None] + _ROW_WEIGHT)
    return np.asarray(np.cumprod(mixed, axis=1) * (np.arange(rates.shape[1]) < lengths[:, None]))


def beyond(values: np.ndarray, positions: int) -> np.ndarray:
    """By position: how many of the values are larger."""
    return np.asarray(len(values) - np.cumsum(np.bincount(values, minlength=positions + 1))[:positions])

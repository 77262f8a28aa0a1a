"""What a proposer offers for one row: a chain of drafts, and how likely they are.

A proposer never decides how many drafts are verified: the controller does (drafting.py), from counted acceptances. And it never
changes an answer: a draft counts only where it equals the token that the model samples at its position.

A draft model proposes on the device: its offer has no tokens yet, only how many they may be.

The controller asks a proposer once per step, for all rows, and gets arrays. Most proposers look at one row after the other.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ridgeline.scheduler.sequence import Sequence

Native = Callable[..., None]         # a function of the native library, which the engine hands over: this half knows no kernels
FORCED = "grammar"                   # the proposer of what grammars force
EVIDENCE = 4                         # grades of evidence, the last the strongest
_GRADES = (3, 5, 9)                  # matched tokens from which on the evidence is of grade 1, 2, 3


@dataclass(slots=True)
class Offer:
    """Drafts for the positions after the row's last known token."""

    tokens: list[int]                # -1, where the device makes them
    evidence: int = 0                # grade, below EVIDENCE: acceptances are counted apart for each


@dataclass(slots=True)
class Paths:
    """Offers for several rows."""

    places: np.ndarray               # int64 [N], ascending: of these rows
    tokens: np.ndarray               # int32 [N, P]; -1 behind the end
    ends: np.ndarray                 # int64 [N]: how many
    evidence: np.ndarray             # int64 [N]

    def of(self, chosen: np.ndarray) -> Paths:
        return Paths(self.places[chosen], self.tokens[chosen], self.ends[chosen], self.evidence[chosen])


class Proposer(Protocol):
    name: str

    def propose_all(self, sequences: list[Sequence], most: np.ndarray) -> Paths | None:
        """For each row at most that many drafts, where it has something to say; None: for no row. Values of a sequence that have
        not arrived yet are drafts, too."""

    def ended(self, sequence: Sequence) -> None:
        """The sequence is over, or waits again: forget its state."""


class RowByRow(ABC):
    """A proposer that is asked for one row after the other."""

    name: str

    @abstractmethod
    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        """At most that many drafts; None: it has nothing to say here."""

    def propose_all(self, sequences: list[Sequence], most: np.ndarray) -> Paths | None:
        places: list[int] = []
        offers: list[Offer] = []
        for place, (sequence, count) in enumerate(zip(sequences, most.tolist(), strict=True)):
            if count > 0 and (offer := self.propose(sequence, count)) is not None:
                places.append(place)
                offers.append(offer)
        if not places:
            return None
        ends = np.array([len(offer.tokens) for offer in offers])
        tokens = np.fromiter(itertools.chain.from_iterable([offer.tokens for offer in offers]), np.int32, int(ends.sum()))
        return Paths(np.array(places), as_rows(tokens, ends), ends, np.array([offer.evidence for offer in offers]))


def as_rows(flat: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int32 [rows, most of a row]: the flat numbers, `ends` of them in each row; -1 behind them."""
    reach = int(ends.max())
    if len(flat) == len(ends) * reach:
        return flat.reshape(len(ends), reach)
    found = np.full((len(ends), reach), -1, np.int32)
    found[np.arange(reach) < ends[:, None]] = flat
    return found


def addresses(sequences: list[Sequence]) -> np.ndarray:
    """int64 [rows, 2]: where each row's tokens are, and how many. They move when they grow: this holds for one call."""
    found = itertools.chain.from_iterable([sequence.tokens.buffer_info() for sequence in sequences])
    return np.fromiter(found, np.int64, 2 * len(sequences)).reshape(-1, 2)


def as_paths(drafts: np.ndarray, ends: np.ndarray, matched: np.ndarray) -> Paths | None:
    """Drafts of all rows, as a native function has left them: int32 [rows, most], `ends` of them in each row, which followed
    `matched` tokens."""
    places = np.flatnonzero(ends)
    if not len(places):
        return None
    reach = int(ends.max())
    if len(places) == len(ends):
        return Paths(places, drafts[:, :reach], ends, grades(matched))
    return Paths(places, drafts[places, :reach], ends[places], grades(matched[places]))


def grade(matched: int) -> int:
    """Evidence by the number of matched tokens."""
    return bisect.bisect_right(_GRADES, matched)


def grades(matched: np.ndarray) -> np.ndarray:
    """The same of several."""
    return np.searchsorted(_GRADES, matched, side="right")

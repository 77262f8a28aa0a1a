"""What a proposer offers for one row: a chain of drafts, and how much speaks for them.

A proposer never decides how many drafts are verified: the controller does (drafting.py), from counted acceptances. And it never
changes an answer: a draft counts only where it equals the token that the model samples at its position.

A draft model proposes on the device: its offer has no tokens yet, only how many they may be.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Protocol

from ridgeline.scheduler.sequence import Sequence

EVIDENCE = 4                         # grades of evidence, the last the strongest
_GRADES = (3, 5, 9)                  # matched tokens from which on the evidence is of grade 1, 2, 3


@dataclass(slots=True)
class Offer:
    """Drafts for the positions after the row's last known token."""

    source: str                      # the proposer's name
    tokens: list[int]
    evidence: int = 0                # grade, below EVIDENCE: acceptances are counted apart for each
    on_device: bool = False          # the device makes them: their tokens are -1 here


class Proposer(Protocol):
    name: str

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        """At most that many drafts; None: it has nothing to say here. Called when all values of the sequence have arrived."""

    def ended(self, sequence: Sequence) -> None:
        """The sequence is over, or waits again: forget its state."""


def grade(matched: int) -> int:
    """Evidence by the number of matched tokens."""
    return bisect.bisect_right(_GRADES, matched)

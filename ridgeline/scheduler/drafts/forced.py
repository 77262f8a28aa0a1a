"""Proposes tokens that a grammar forces: the keys and punctuation of a JSON schema leave only one text.

The matcher knows that text (llguidance). The model could still spell it with other tokens, which the grammar allows too: so these
are drafts as all others, and verified.
"""

from __future__ import annotations

from ridgeline.scheduler.drafts.offer import EVIDENCE, FORCED, Offer, RowByRow
from ridgeline.scheduler.sequence import Sequence


class Forced(RowByRow):
    name = FORCED

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        matcher = sequence.matcher
        tokens = matcher.forced(most) if matcher is not None else []
        return Offer(tokens, EVIDENCE - 1) if tokens else None

    def ended(self, sequence: Sequence) -> None:
        """The matcher is the sequence's own."""

"""Offers that were not verified, kept until the tokens that came say whether they were right: evidence that costs no step.

While drafts do not pay, or a row was given up, nothing would be learned from steps. But what a proposer would have said can be
compared with what the model then said. A few rows are watched at a time, so the host's work stays small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.scheduler.sequence import Sequence

_MOST = 16                           # rows that are watched at once
BESIDE = 4                           # that a step with drafts begins to watch: its own say enough of what drafts are worth
_DEEP = 4                            # drafts of each that are compared
_KEEPS = 0.9                         # of the counts of a source with each comparison: what came lately counts
_FEWEST = 6.0                        # counted drafts from which on a source's rate is believed


@dataclass(slots=True)
class _Guess:
    """What would have been drafted for a row."""

    sequence: Sequence
    begin: int                       # tokens of the sequence then
    pending: int                     # of `tokens`, the first are what steps in flight were to bring
    tokens: list[int]
    source: int
    slot: int                        # of the row's record


@dataclass(slots=True)
class Seen:
    """Guesses whose tokens have come, one row each."""

    sequences: list[Sequence]
    source: np.ndarray
    width: np.ndarray                # drafts that they would have been …
    accepted: np.ndarray             # … and how many of them would have been accepted


class Watch:
    def __init__(self) -> None:
        self._open: dict[Sequence, _Guess] = {}
        self._counts: dict[int, tuple[float, float]] = {}        # by source: drafts compared, and right, lately

    @property
    def room(self) -> int:
        return _MOST - len(self._open)

    def places(self, sequences: list[Sequence], step: int) -> list[int]:
        """Rows that may be watched from this step on; others in another step."""
        count = len(sequences)
        turned = ((place + step) % count for place in range(min(count, 2 * _MOST)))
        return [place for place in turned if sequences[place] not in self._open][: self.room]

    def watches(self, sequence: Sequence) -> bool:
        return sequence in self._open

    def keep(self, sequence: Sequence, pending: int, tokens: list[int], source: int, slot: int) -> None:
        """Of a row that is not watched."""
        self._open[sequence] = _Guess(sequence, len(sequence.tokens), pending, tokens[: pending + _DEEP], source, slot)

    def ended(self, sequence: Sequence) -> None:
        self._open.pop(sequence, None)

    def drafted(self, slots: np.ndarray) -> None:
        """Rows with these records have drafts: a step counts them."""
        if self._open:
            drafted = {*slots.tolist()}
            for guess in [guess for guess in self._open.values() if guess.slot in drafted]:
                del self._open[guess.sequence]

    def seen(self) -> Seen | None:
        """What has become of guesses, each once; None: nothing yet."""
        found = []
        for guess in self._open.values():
            came = guess.sequence.tokens[guess.begin : guess.begin + len(guess.tokens)].tolist()
            if came == guess.tokens[: len(came)]:
                right = len(came)
                if right < len(guess.tokens):
                    continue
            else:
                right = 0
                while came[right] == guess.tokens[right]:
                    right += 1
            found.append((guess, max(0, right - guess.pending)))
        if not found:
            return None
        for guess, _ in found:
            del self._open[guess.sequence]
        width = np.array([len(guess.tokens) - guess.pending for guess, _ in found])
        accepted = np.array([right for _, right in found])
        for (guess, _), own, right in zip(found, width.tolist(), accepted.tolist(), strict=True):
            tried, kept = self._counts.get(guess.source, (0.0, 0.0))
            self._counts[guess.source] = _KEEPS * tried + min(own, right + 1), _KEEPS * kept + right
        return Seen([guess.sequence for guess, _ in found], np.array([guess.source for guess, _ in found]), width, accepted)

    def promising(self) -> tuple[int, float, float] | None:
        """The source whose drafts were right most often lately: its number, drafts compared, and right."""
        believed = [(right / tried, source) for source, (tried, right) in self._counts.items() if tried >= _FEWEST]
        if not believed:
            return None
        source = max(believed)[1]
        return source, *self._counts[source]

    def forget(self, source: int) -> None:
        self._counts.pop(source, None)

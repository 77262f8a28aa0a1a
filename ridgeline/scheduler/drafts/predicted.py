"""Proposes the text that the client expects, OpenAI's `prediction`: an edited file is mostly the file as it was.

It follows the prediction from its beginning. Where the answer leaves it, it goes on where the answer's last tokens occur in the
prediction, the nearest place behind the one before first.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from ridgeline.scheduler.drafts.gram_index import GramIndex
from ridgeline.scheduler.drafts.offer import EVIDENCE, Offer, Paths, RowByRow, grade
from ridgeline.scheduler.sequence import Sequence

_FEWEST = 2                          # tokens that must match to find the place again
_LONGEST = 16                        # that are compared


@dataclass(slots=True)
class _State:
    index: GramIndex
    known: int                       # tokens of the sequence that were looked at
    position: int = 0                # in the prediction: where it goes on
    lost: bool = False               # the answer has left the prediction
    matched: int = _LONGEST          # tokens before that place that are equal; at the beginning nothing speaks against it


class Predicted(RowByRow):
    name = "prediction"

    def __init__(self) -> None:
        self._states: dict[Sequence, _State] = {}        # until ended()

    def propose_all(self, sequences: list[Sequence], most: np.ndarray) -> Paths | None:
        """Mostly no request has a prediction."""
        if not any(sequence.request.predicted_token_ids for sequence in sequences):
            return None
        return super().propose_all(sequences, most)

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        predicted = sequence.request.predicted_token_ids
        if not predicted:
            return None
        state = self._states.get(sequence)
        if state is None:
            # After a preemption or a restart the answer's tokens are read again from the first.
            index = GramIndex(array("i", predicted), _FEWEST)
            index.catch_up()
            state = self._states[sequence] = _State(index, sequence.num_prompt)
        self._follow(state, sequence)
        if state.lost or state.position >= len(predicted):
            return None
        tokens = state.index.tokens[state.position : state.position + most].tolist()
        return Offer(tokens, min(EVIDENCE - 1, grade(state.matched)))

    def ended(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    @staticmethod
    def _follow(state: _State, sequence: Sequence) -> None:
        """Walk along with the tokens that have arrived since."""
        text, tokens = state.index.tokens, sequence.tokens
        new = tokens[state.known :]
        if not state.lost and text[state.position : state.position + len(new)] == new:       # all at once: mostly it is so
            state.position, state.matched, state.known = state.position + len(new), state.matched + len(new), len(tokens)
            return
        for at in range(state.known, len(tokens)):
            if not state.lost and state.position < len(text) and text[state.position] == tokens[at]:
                state.position += 1
                state.matched += 1
                continue
            tail = tokens[max(sequence.num_prompt, at + 1 - _LONGEST) : at + 1]
            position, matched = _nearest(state.index.candidates(tail, _LONGEST), state.position)
            state.lost = not position
            if position:
                state.position, state.matched = position, matched
        state.known = len(tokens)


def _nearest(candidates: list[tuple[int, int]], position: int) -> tuple[int, int]:
    """The longest match; of equals the one that skips least, and a place further back only if there is no other."""
    return min(candidates, key=lambda each: (-each[1], each[0] < position, abs(each[0] - position)), default=(0, 0))

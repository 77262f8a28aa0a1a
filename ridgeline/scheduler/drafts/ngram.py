"""Proposes what followed the last few tokens when the row had them before: prompt and answer are the text (prompt lookup).

It helps where answers copy: edits of code, summaries, extraction, answers from documents. A row costs an index of 8 to 16 bytes
for each of its tokens, made when the first draft is asked for.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ridgeline.scheduler.drafts.gram_index import GramIndex
from ridgeline.scheduler.drafts.offer import Offer, RowByRow, grade
from ridgeline.scheduler.sequence import Sequence


@dataclass(slots=True)
class _State:
    index: GramIndex
    position: int = 0                # where the text goes on as the answer does; 0: unknown
    matched: int = 0                 # tokens before it that are equal
    known: int = 0                   # tokens of the sequence when that was found


class Ngram(RowByRow):
    """`fewest`, `longest`: tokens that must match, and that are compared (vLLM's prompt_lookup_min and prompt_lookup_max)."""

    name = "ngram"

    def __init__(self, fewest: int, longest: int) -> None:
        self._fewest = fewest
        self._longest = longest
        self._states: dict[Sequence, _State] = {}        # until ended()

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        state = self._states.get(sequence)
        tokens = sequence.tokens
        if state is None:
            state = self._states[sequence] = _State(GramIndex(tokens, self._fewest))
        if not self._goes_on(state, tokens):
            state.index.catch_up()
            state.position, state.matched = state.index.longest_match(tokens[-self._longest :], self._longest)
        state.known = len(tokens)
        if not state.position:
            return None
        return Offer(state.index.follow(state.position, most), grade(state.matched))

    def ended(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def _goes_on(self, state: _State, tokens: array[int]) -> bool:
        """The answer went on as the text did at the last match: then that is still the longest, and no search is needed."""
        position, new = state.position, len(tokens) - state.known
        if not position or state.matched + new < self._longest or tokens[position : position + new] != tokens[state.known :]:
            return False
        state.position += new
        state.matched += new
        return True

"""Outputs: the log-probabilities of a long prompt are made when they are read, not when they arrive."""

from __future__ import annotations

import pytest

from ridgeline.engine.client.outputs import Logprob, LogprobsAt, PromptLogprobs


def test_positions_are_made_when_they_are_read() -> None:
    made: list[int] = []

    def at(place: int) -> LogprobsAt:
        made.append(place)
        return {place: Logprob(-1.0, 1, "a")}

    known = PromptLogprobs(1000, at)
    assert len(known) == 1001 and known[0] is None and made == []
    assert known[1] == {0: Logprob(-1.0, 1, "a")} and known[-1] == {999: Logprob(-1.0, 1, "a")}
    assert known[:2] == [None, {0: Logprob(-1.0, 1, "a")}]
    assert made == [0, 999, 0]
    assert known == list(known) and len(list(known)) == 1001
    with pytest.raises(IndexError):
        known[1001]

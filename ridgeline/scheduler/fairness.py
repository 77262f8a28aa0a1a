"""Shares a step's prompt tokens between prompts: old ones first, but a short one does not wait for all of a long one.

Prompts are served by rank: priority, then arrival. Where the tokens of a step do not suffice, one prompt is cut: it computes a
part now, and goes on in the next step. It lends up to half of that part to prompts of its priority behind it that have at
most half as many tokens left, the shortest first:

    tokens left, by rank     300   8,000   7,000   10   500           a step of 2,000 prompt tokens
    they compute             300   1,190       0   10   500           the second is cut: it lends 510 of its 1,700

"Left" are the tokens that are neither computed nor in the prefix cache. No prompt starves: those before it by rank come to an
end, and a prompt that is cut keeps half of what it would have. Prompts of about the same length never overtake each
other: alternating would make the first later and the second no earlier.

Offline all requests wait for each other, so none is overtaken (Scheduler.begin_with_longest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LENT = 2                             # of what a cut prompt would compute, one part in two is lent at most …
SHORTER = 2                          # … to prompts with at most one part in two of its tokens left


class Prompt(NamedTuple):
    """An unfinished prompt, running or waiting."""

    priority: int
    order: int
    rest: int                        # tokens to compute


def overtakes(prompt: Prompt, cut: Prompt) -> bool:
    """May it compute before a prompt that is cut?"""
    if prompt[:2] < cut[:2]:
        return True                                      # by rank
    return prompt.priority == cut.priority and SHORTER * prompt.rest <= cut.rest


def first_cut(prompts: Sequence[Prompt], budget: int) -> int | None:
    """Which of these prompts, by rank, is the first that a step cannot finish; None: it finishes all."""
    for place, prompt in enumerate(prompts):
        if prompt.rest > budget:
            return place
        budget -= prompt.rest
    return None


def share(prompts: Sequence[Prompt], budget: int) -> list[int]:
    """Tokens for each of these prompts, which are sorted by rank."""
    place = first_cut(prompts, budget)
    if place is None:
        return [prompt.rest for prompt in prompts]
    given = [prompt.rest for prompt in prompts[:place]] + [0] * (len(prompts) - place)
    left = budget - sum(given)
    lent = left // LENT
    behind = [number for number in range(place + 1, len(prompts)) if overtakes(prompts[number], prompts[place])]
    for number in sorted(behind, key=lambda number: (prompts[number].rest, number)):
        given[number] = min(prompts[number].rest, lent)
        lent -= given[number]
    given[place] = budget - sum(given)
    return given

"""Long-context retrieval: one sentence with a number is hidden in a long text, and the model is asked for the number.

For every length and depth there are some trials, each with its own city, number and passage of text, all from the seed. Two
figures: `found`, the greedy answer begins with the number; and `picked`, the number has a higher probability than three others
that the text does not contain. `picked` still distinguishes models where none reaches `found`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.errors import ConfigError
from ridgeline.evaluate.perplexity import TokenScores
from ridgeline.evaluate.scoring import Scorer, Tick
from ridgeline.text.tokenizer import Tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)         # of the needle: 0 is the beginning of the text
TRIALS = 2                                   # for each length and depth
_OTHERS = 3                                  # numbers that the right one is compared with
_CITIES = ("Lisbon", "Bergen", "Nairobi", "Kraków", "Osaka", "Cusco", "Dakar", "Tartu", "Adelaide", "Izmir")


@dataclass(frozen=True, slots=True)
class Trial:
    length: int
    depth: float
    prompt: list[int]                # ends where the number has to come
    number: str
    others: tuple[str, ...]


def trials(
    tokenizer: Tokenizer, text: str, lengths: Sequence[int], seed: int, depths: Sequence[float] = DEPTHS,
    count: int = TRIALS, advice: str = "give a longer --text",
) -> list[Trial]:
    """`advice`: for a text that is too short, in words of the command that was given."""
    body = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    made = []
    for length in lengths:
        for depth in depths:
            for trial in range(count):
                rng = random.Random(f"needle-{seed}-{length}-{depth}-{trial}")
                made.append(_trial(tokenizer, body, length, depth, rng, advice))
    return made


def _trial(tokenizer: Tokenizer, body: list[int], length: int, depth: float, rng: random.Random, advice: str) -> Trial:
    city = rng.choice(_CITIES)
    number, *others = (str(value) for value in rng.sample(range(10_000, 100_000), 1 + _OTHERS))

    def tokens(words: str) -> list[int]:
        return tokenizer.encode(words, add_special_tokens=False, parse_special=False)

    start = tokenizer.prefix_ids
    needle = tokens(f"\nThe secret number of {city} is {number}.\n")
    question = tokens(f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is")
    room = length - len(start) - len(needle) - len(question)
    if room < 0:
        least = length - room
        raise ConfigError(f"a needle cannot be hidden in {length} tokens; the least is {least}")
    if room > len(body):
        raise ConfigError(f"the text has {len(body)} tokens, a haystack of {length} needs {room}; {advice}")
    begin = rng.randrange(len(body) - room + 1)
    hay = body[begin : begin + room]
    place = round(depth * room)
    return Trial(length, depth, start + hay[:place] + needle + hay[place:] + question, number, tuple(others))


def longest(made: Sequence[Trial], tokenizer: Tokenizer) -> int:
    """Tokens of the longest sequence that `run` will compute."""
    return max(len(trial.prompt) + len(_answer(tokenizer, each)) + 2 for trial in made for each in _numbers(trial))


def _numbers(trial: Trial) -> tuple[str, ...]:
    return (trial.number, *trial.others)


def _answer(tokenizer: Tokenizer, number: str) -> list[int]:
    return tokenizer.encode(f" {number}", add_special_tokens=False)


def run(scorer: Scorer, tokenizer: Tokenizer, made: Sequence[Trial], tick: Tick | None = None) -> dict[str, Any]:
    answers = scorer.generate(
        [trial.prompt for trial in made], max(len(_answer(tokenizer, trial.number)) for trial in made) + 2, tick
    )
    found = [
        tokenizer.decode(answer, True).strip().startswith(trial.number)
        for trial, answer in zip(made, answers, strict=True)
    ]
    sequences = [trial.prompt + _answer(tokenizer, number) for trial in made for number in _numbers(trial)]
    scores = TokenScores(sequences)
    scorer.score(sequences, scores.take, tick)
    totals = [
        float(scores.logprobs[place][len(trial.prompt) - 1 :].sum())
        for place, trial in enumerate(trial for trial in made for _ in _numbers(trial))
    ]
    each = 1 + _OTHERS
    picked = [int(np.argmax(totals[place * each : (place + 1) * each])) == 0 for place in range(len(made))]
    cells = sorted({(trial.length, trial.depth) for trial in made})

    def share(hits: Sequence[bool], cell: tuple[int, float]) -> float:
        return float(np.mean([hit for hit, trial in zip(hits, made, strict=True) if (trial.length, trial.depth) == cell]))

    return {
        "found": float(np.mean(found)), "picked": float(np.mean(picked)), "trials": len(made),
        "cells": [
            {"length": cell[0], "depth": cell[1], "found": share(found, cell), "picked": share(picked, cell)}
            for cell in cells
        ],
    }

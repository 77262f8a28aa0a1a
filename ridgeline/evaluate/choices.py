"""Multiple choice by log-likelihood: of several endings, the model picks the one with the highest log-probability.

A line of the JSONL file is {"question": text, "choices": [text, …], "answer": index or text}. Two ways to pick: by the sum
of the ending's log-probabilities (`accuracy`), and by the sum divided by the ending's bytes (`accuracy_by_byte`), which is
fair to long endings. Nothing is generated, so the figure has no sampling noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.evaluate.perplexity import TokenScores
from ridgeline.evaluate.scoring import Scores, Tick
from ridgeline.evaluate.texts import Question
from ridgeline.text.tokenizer import Tokenizer


def endings(tokenizer: Tokenizer, question: Question) -> list[tuple[list[int], int]]:
    """For every choice: the tokens of question and ending together, and how many of them belong to the question.

    Both are tokenised as one text, as the model would see it; a token across the border counts as ending.
    """
    stem, found = tokenizer.encode(question.text), []
    for choice in question.choices:
        gap = "" if question.text[-1].isspace() or choice[0].isspace() else " "
        whole = tokenizer.encode(question.text + gap + choice)
        shared = 0
        while shared < min(len(stem), len(whole) - 1) and stem[shared] == whole[shared]:
            shared += 1
        found.append((whole, max(1, shared)))
    return found


def longest(tokenizer: Tokenizer, questions: Sequence[Question]) -> int:
    return max(len(tokens) for question in questions for tokens, _ in endings(tokenizer, question))


def run(
    scores: Scores, tokenizer: Tokenizer, questions: Sequence[Question], tick: Tick | None = None
) -> dict[str, Any]:
    listed = [ending for question in questions for ending in endings(tokenizer, question)]
    found = TokenScores([tokens for tokens, _ in listed])
    scores.score([tokens for tokens, _ in listed], found.take, tick)
    totals = [float(found.logprobs[place][first - 1 :].sum()) for place, (_, first) in enumerate(listed)]
    by_sum, by_byte, begin = [], [], 0
    for question in questions:
        sums = np.array(totals[begin : begin + len(question.choices)])
        begin += len(question.choices)
        sizes = np.array([len(choice.encode()) for choice in question.choices])
        by_sum.append(int(sums.argmax()))
        by_byte.append(int((sums / sizes).argmax()))
    right = np.array([question.answer for question in questions])
    accuracy = float((np.array(by_sum) == right).mean())
    return {
        "questions": len(questions), "accuracy": accuracy, "accuracy_by_byte": float((np.array(by_byte) == right).mean()),
        "error": float(np.sqrt(accuracy * (1 - accuracy) / len(questions))),
        "chance": float(np.mean([1 / len(question.choices) for question in questions])), "picked": by_sum,
    }

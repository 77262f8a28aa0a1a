"""Multiple choice by log-likelihood: of several endings, the model picks the one with the highest log-probability.

A line of the JSONL file is {"question": text, "choices": [text, …], "answer": index or text}. Two ways to pick: by the sum
of the ending's log-probabilities (`accuracy`), and by the sum divided by the ending's bytes (`accuracy_by_byte`), which is
fair to long endings. Nothing is generated, so the figure has no sampling noise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import ConfigError
from ridgeline.evaluate.perplexity import TokenScores
from ridgeline.evaluate.scoring import Scores, Tick
from ridgeline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    choices: tuple[str, ...]
    answer: int                      # index of the right one


def read_questions(path: str | Path) -> list[Question]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    questions = [_question(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f"{path} holds no questions")
    return questions


def _question(where: str, line: str) -> Question:
    try:
        record = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where} is not JSON") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a JSON object")
    text, choices, answer = (record.get(name) for name in ("question", "choices", "answer"))
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where}: question must be a text")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise ConfigError(f"{where}: choices must be a list of two texts or more")
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ConfigError(f"{where}: answer must be one of the choices, or an index from 0 to {len(choices) - 1}")
    return Question(text, tuple(choices), answer)


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

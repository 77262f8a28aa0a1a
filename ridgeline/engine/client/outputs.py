"""What a caller gets back. Names and fields follow vLLM's offline API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.engine.token_logprobs import LogprobsAt, PromptLogprobs, TokenLogprobs
from ridgeline.metrics import RequestTimes

BYTES_PER_TOKEN = 64                 # of a list of token ids, with where they begin in a text: two numbers and their places


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None                             # stop, length, abort, error
    stop_reason: int | str | None = None                         # the stop string or token; what went wrong
    text_offsets: list[int] = field(default_factory=list)        # where in the text each token begins
    lora_request: Any = None                                     # always None: there are no adapters
    accepted_prediction_tokens: int = 0                          # of SamplingParams.prediction, those that were drafts …
    rejected_prediction_tokens: int = 0                          # … and were the answer's own tokens, or were not

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: Sequence[LogprobsAt | None] | None = None
    num_cached_tokens: int = 0
    hidden: np.ndarray | None = None                             # the prompt as a vector, with SamplingParams.pooling
    metrics: RequestTimes | None = None                          # set by AsyncLLM only; LLM measures nothing per request
    lora_request: Any = None


def bytes_of(output: RequestOutput) -> int:
    """About how much memory an output takes."""
    prompt = BYTES_PER_TOKEN * len(output.prompt_token_ids) + (output.hidden.nbytes if output.hidden is not None else 0)
    known = output.prompt_logprobs.num_bytes if isinstance(output.prompt_logprobs, PromptLogprobs) else 0
    return prompt + known + sum(map(bytes_of_answer, output.outputs))


def bytes_of_answer(answer: CompletionOutput | AnswerDelta) -> int:
    known = 0 if answer.logprobs is None else answer.logprobs.num_bytes
    return len(answer.text) + BYTES_PER_TOKEN * len(answer.token_ids) + known


def predicted_tokens(outputs: Iterable[RequestOutput]) -> tuple[int, int]:
    """Tokens of predictions that were drafts: accepted, and rejected."""
    answers = [answer for output in outputs for answer in output.outputs]
    return sum(each.accepted_prediction_tokens for each in answers), sum(each.rejected_prediction_tokens for each in answers)


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ScoringOutput:
    """The likelihood of a second text after a first one: the sum of its tokens' log-probabilities."""

    score: float
    num_tokens: int


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt as a vector, or as a score."""

    request_id: str
    outputs: EmbeddingOutput | ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class AnswerDelta:
    """What is new in one answer: the unit of streaming."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] = field(default_factory=list)        # where in the answer's text each new token begins


def add_text(to: CompletionOutput | AnswerDelta, new: str) -> None:
    text, to.text = to.text, ""                          # no other reference: Python adds in place, and does not copy a long text
    text += new
    to.text = text

"""What a caller gets back. Names and fields follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.metrics import RequestTimes


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAt = dict[int, Logprob]      # the token at one position, and the most likely tokens there


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAt] | None = None
    finish_reason: str | None = None                             # stop, length, abort, error
    stop_reason: int | str | None = None                         # the stop string or token; what went wrong
    text_offsets: list[int] = field(default_factory=list)        # where in the text each token begins
    lora_request: Any = None                                     # always None: there are no adapters

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
    prompt_logprobs: list[LogprobsAt | None] | None = None
    num_cached_tokens: int = 0
    hidden: np.ndarray | None = None                             # the prompt as a vector, with SamplingParams.pooling
    metrics: RequestTimes | None = None                          # set by AsyncLLM only; LLM measures nothing per request
    lora_request: Any = None


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
    logprobs: list[LogprobsAt] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] = field(default_factory=list)        # where in the answer's text each new token begins

"""How many tokens a request has taken, as chat and completions tell it: at the end, or in every event of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ridgeline.engine.client.outputs import CompletionOutput, RequestOutput, predicted_tokens


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput], reasoning: int = 0) -> Usage:
        outputs = list(outputs)
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        details = CompletionTokensDetails(reasoning, 0, *predicted_tokens(outputs))
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


class RunningUsage:
    """The usage of a stream after each of its events. Only the answer that the event is about is counted again: a request may
    have thousands."""

    def __init__(self) -> None:
        self._sent = 0                                   # tokens of all choices in events so far; more may have arrived
        self._prompt_tokens: int | None = None           # of all prompts
        self._cached: dict[int, int] = {}                # of each prompt …
        self._num_cached = 0                             # … and of all
        self._known: dict[int, tuple[int, int, int]] = {}        # of each choice: reasoning, accepted and rejected drafts …
        self._sums = [0, 0, 0]                           # … and of all

    def add_tokens(self, count: int) -> None:
        self._sent += count

    def after(
        self, outputs: Sequence[RequestOutput], prompt: int, index: int, answer: CompletionOutput, reasoning: int
    ) -> Usage:
        """After an event of the choice `index`, an answer to the prompt with that number."""
        if self._prompt_tokens is None:
            self._prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        cached = outputs[prompt].num_cached_tokens
        self._num_cached += cached - self._cached.get(prompt, 0)
        self._cached[prompt] = cached
        before = self._known.get(index, (0, 0, 0))
        new = self._known[index] = reasoning, answer.accepted_prediction_tokens, answer.rejected_prediction_tokens
        self._sums = [total - old + now for total, old, now in zip(self._sums, before, new, strict=True)]
        reasoned, accepted, rejected = self._sums
        details = CompletionTokensDetails(reasoned, 0, accepted, rejected)
        total = self._prompt_tokens + self._sent
        return Usage(self._prompt_tokens, self._sent, total, PromptTokensDetails(self._num_cached), details)

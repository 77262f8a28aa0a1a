"""`/v1/completions`: a text to continue. Requests and answers as types; see server/api/generation for what chat has too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.engine.token_logprobs import LogprobsAt, TokenLogprobs
from ridgeline.errors import BadRequest, Unsupported
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import (
    GenerationRequest,
    Integer,
    Writer,
    ranked,
)
from ridgeline.server.api.prompt_parts import (
    BYTES_PER_VALUE,
    encode,
    encoded_alone,
    finite,
    items_of,
    num_prompt_logprobs,
    one_list,
)
from ridgeline.server.api.usage import Usage
from ridgeline.text.detokenizer import TextStream
from ridgeline.text.tokenizer import Tokenizer


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | Integer | list[Integer]]
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise BadRequest(f"best_of must be at least n, which is {self.n or 1}; got {self.best_of}", field="best_of")
        if self.chooses and self.stream:
            message = "best_of above n cannot be streamed: the best answers are known only when all have ended"
            raise BadRequest(message, field="best_of")

        if self.prompt_only and self.logprob_token_ids:
            raise BadRequest("logprob_token_ids concerns an answer's tokens, and max_tokens is 0", field="logprob_token_ids")

    @property
    def chooses(self) -> bool:
        """Whether more answers are made than are returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def prompt_only(self) -> bool:
        """Evaluations ask only for the prompt's own log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        most = self.max_tokens if self.max_tokens is not None else defaults.get("max_tokens", 16)
        more: dict[str, Any] = {"n": self.best_of} if self.chooses else {}
        logprobs = 0 if self.chooses and self.logprobs is None else self.logprobs
        try:
            params = self.sampling(1 if self.prompt_only else most, logprobs, defaults, **more)
        except BadRequest as error:
            raise error.renamed("n", "best_of") if self.chooses and error.field == "n" else error from None
        if self.echo and self.logprobs is not None:
            params.prompt_logprobs = max(self.logprobs, params.prompt_logprobs or 0)
        params.structured_outputs = self.structured()
        return params

    def prompts(self) -> list[str | list[int]]:
        """A text, token ids, or a list of either."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if kinds not in ({str}, {list}):
            message = "prompt must be a text, a list of texts, a list of token ids or a list of such lists"
            raise BadRequest(message, field="prompt")
        return self.prompt  # type: ignore[return-value]


# Tokens for filling in the middle: before the text, between it and the suffix, and at the end.
_MIDDLE = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def middle_marks(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """The tokens around a gap; Unsupported if the model has none."""
    for marks in _MIDDLE:
        first, second, third = map(tokenizer.token_id, marks)
        if first is not None and second is not None and third is not None:
            return first, second, third
    message = "suffix needs a model with tokens for filling in the middle, which this one does not have; leave it out"
    raise Unsupported(message, field="suffix")


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: Any = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class CompletionWriter(Writer):
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, *args: Any) -> None:
        super().__init__(request, *args)
        self._echo = bool(request.echo)
        self._most = request.n or 1
        self._wants_logprobs = request.logprobs is not None
        self._prompt_only = request.prompt_only

    def prompt_bytes(self, output: RequestOutput) -> int:
        size = super().prompt_bytes(output)
        if self._echo:
            size += len(self._prompt_text(output))
            if self._wants_logprobs:
                size += BYTES_PER_VALUE * num_prompt_logprobs(output)
        return size

    def _chunks(self, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        if self._prompt_only:
            return [self._choice(output, index, output.outputs[delta.index])] if delta.finish_reason else []
        text = delta.text
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs(output, delta.token_ids, delta.logprobs, delta.text_offsets)
        first = index not in self._begun
        if self._echo and first:
            text = self._prompt_text(output) + text
            logprobs = self._with_prompt(output, logprobs)
        self._begun.add(index)
        chunk = CompletionChoice(index, text, logprobs, delta.finish_reason)
        if delta.finish_reason:
            chunk.stop_reason = delta.stop_reason
        if self._wants_token_ids:
            chunk.token_ids = delta.token_ids
        if first:
            self._add_prompt(chunk, output)
        return [chunk]

    def _text_choice(self, index: int, text: str) -> CompletionChoice | None:
        return None if self._prompt_only else CompletionChoice(index, text)

    def _returned(self, output: RequestOutput) -> list[CompletionOutput]:
        """With best_of, the answers with the highest mean log-probability."""
        if len(output.outputs) <= self._most:
            return output.outputs
        best = sorted(output.outputs, key=lambda each: -(each.cumulative_logprob or 0.0) / max(1, len(each.token_ids)))
        return best[: self._most]

    def _choice(self, output: RequestOutput, index: int, answer: CompletionOutput) -> CompletionChoice:
        text, logprobs, finish, stop = answer.text, None, answer.finish_reason, answer.stop_reason
        if answer.logprobs is not None and self._wants_logprobs:
            logprobs = self._logprobs(output, answer.token_ids, answer.logprobs, answer.text_offsets)
        if self._prompt_only:
            text, logprobs, finish, stop = "", logprobs and CompletionLogprobs(), "length", None
        if self._echo:
            text = self._prompt_text(output) + text
            logprobs = self._with_prompt(output, logprobs)
        choice = CompletionChoice(index, text, logprobs, finish, stop, None, None, None)     # null unless asked for, as in vLLM
        if self._wants_token_ids:
            choice.token_ids = [] if self._prompt_only else answer.token_ids
        self._add_prompt(choice, output)
        return choice

    def _add_prompt(self, choice: CompletionChoice, output: RequestOutput) -> None:
        if self._repeated.has_logprobs:
            choice.prompt_logprobs = self._prompt_logprobs(output)
        if self._wants_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids

    def _usage_of(self, outputs: list[RequestOutput]) -> Usage:
        return self._shown(super()._usage_of(outputs))

    def _usage_so_far(self, outputs: list[RequestOutput], prompt: int, index: int, delta: AnswerDelta) -> Usage:
        return self._shown(super()._usage_so_far(outputs, prompt, index, delta))

    def _shown(self, usage: Usage) -> Usage:
        if self._prompt_only:                            # one token is made all the same
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _logprobs(
        self, output: RequestOutput, token_ids: list[int], logprobs: TokenLogprobs, offsets: list[int]
    ) -> CompletionLogprobs:
        shift = len(self._prompt_text(output)) if self._echo else 0
        known = CompletionLogprobs([self._text(token) for token in token_ids], [], [], [offset + shift for offset in offsets])
        for token, at in zip(token_ids, logprobs, strict=True):      # one after the other: a position is made when it is read
            known.token_logprobs.append(finite(at[token].logprob))
            known.top_logprobs.append(self._top(token, at))
        return known

    def _with_prompt(self, output: RequestOutput, answer: CompletionLogprobs | None) -> CompletionLogprobs | None:
        """The prompt's tokens before the answer's. The first token has no probability."""
        if answer is None or output.prompt_logprobs is None:
            return answer
        before = self._repeated.once(output, "logprobs", lambda: self._of_prompt(output))
        after: tuple[list[Any], ...] = (answer.tokens, answer.token_logprobs, answer.top_logprobs, answer.text_offset)
        return CompletionLogprobs(*(one_list(known, items_of(new)) for known, new in zip(before, after, strict=True)))

    def _of_prompt(self, output: RequestOutput) -> tuple[bytes, bytes, bytes, bytes]:
        """The items of the lists of CompletionLogprobs, for the prompt."""
        tokens, known = output.prompt_token_ids, output.prompt_logprobs or ()
        offsets = [0] * len(tokens)
        if self._tokenizer is not None:
            text = TextStream(self._tokenizer, at_start=True)
            text.feed(tokens)
            offsets = text.text_offsets
        values: list[bytes] = []
        tops: list[bytes] = []
        for token, at in zip(tokens, known, strict=True):
            values.append(encode(None if at is None else finite(at[token].logprob)))
            tops.append(encode(None if at is None else self._top(token, at)))
        return items_of(map(self._text, tokens)), b",".join(values), b",".join(tops), items_of(offsets)

    def _top(self, token: int, at: LogprobsAt) -> dict[str, float]:
        """The most likely tokens and the sampled one; of tokens with the same text the more likely."""
        top: dict[str, float] = {}
        for each, value in [*ranked(at, self._params.logprobs or 0), (token, finite(at[token].logprob))]:
            top.setdefault(self._text(each), value)
        return encoded_alone(top)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is None and self._tokenizer is not None:
            output.prompt = self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
        return output.prompt or ""

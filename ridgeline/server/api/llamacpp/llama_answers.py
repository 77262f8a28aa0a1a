"""Answers of llama.cpp's own /completion: whole, or as events whose last one has the counts and times.

Structs in, bytes out; no ASGI.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.engine.token_logprobs import TokenLogprobs
from ridgeline.metrics import RequestTimes
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import ranked
from ridgeline.server.api.llamacpp.llama_requests import LlamaRequest
from ridgeline.server.api.openai.completions import CompletionWriter
from ridgeline.server.api.prompt_parts import encode, encoded_alone, finite


class LlamaTimings(msgspec.Struct):
    """Milliseconds. `prompt_n` are the prompt's tokens that were computed, `cache_n` those that were not."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, output: RequestOutput, answer: CompletionOutput) -> LlamaTimings:
        times: RequestTimes | None = output.metrics
        cached = output.num_cached_tokens
        prompt, made = len(output.prompt_token_ids) - cached, len(answer.token_ids)
        prompt_ms = 1e3 * times.prefill(answer.index) if times is not None else 0.0
        made_ms = 1e3 * times.decode(answer.index) if times is not None else 0.0
        return cls(cached, prompt, *_rates(prompt, prompt_ms), made, *_rates(made - 1, made_ms))     # from the first token on


def _rates(count: int, milliseconds: float) -> tuple[float, float, float]:
    each = milliseconds / count if count > 0 else 0.0
    return round(milliseconds, 3), round(each, 3), round(1e3 / each, 3) if each else 0.0


class LlamaReply(msgspec.Struct, kw_only=True):
    # Each may be missing, as the document says: the request chooses by response_fields.
    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    id_slot: int = -1
    stop: bool | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET
    # In a whole answer and a stream's last event only.
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET


class LlamaWriter(CompletionWriter):
    def __init__(self, asked: LlamaRequest, longest: int, request: Any, *args: Any) -> None:
        """`longest`: the context length."""
        super().__init__(request, *args)
        self._asked = asked
        self._longest = longest
        self._settings_bytes = len(encode(settings(self._params, longest)))     # stop strings and a grammar
        self._silent = asked.limit == 0                  # one token is made all the same, and not shown

    def prompt_bytes(self, output: RequestOutput) -> int:
        return super().prompt_bytes(output) + len(self._prompt_text(output)) + self._settings_bytes

    def bytes_of_prompts(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> int:
        """The last event of each choice has its prompt."""
        ended = {prompt for prompt, delta in batch if delta.finish_reason}
        return max((self.prompt_bytes(outputs[prompt]) for prompt in ended), default=0)

    def events(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> list[bytes]:
        made = []
        for place, delta in batch:
            output, index = outputs[place], place * self._params.n + delta.index
            if delta.token_ids and not self._silent:
                reply = self._part(output, index, delta.text, delta.token_ids, delta.logprobs, output.outputs[delta.index])
                made.append(encode(reply))
            if delta.finish_reason:
                made.append(encode(self._last(output, index, output.outputs[delta.index], "")))
        return made

    def last_events(self, outputs: list[RequestOutput]) -> list[bytes]:
        return []

    def body(self, outputs: list[RequestOutput]) -> bytes:
        made: list[Any] = []
        for output in outputs:
            for answer in output.outputs:
                text = "" if self._silent else answer.text
                reply = self._last(output, len(made), answer, text)
                if answer.logprobs is not None and not self._silent:
                    reply.completion_probabilities = self._probabilities(answer.token_ids, answer.logprobs)
                reply.tokens = answer.token_ids if self._asked.return_tokens and not self._silent else []
                made.append(self._chosen(reply))
        return encode(made if self._asked.many else made[0])

    def _part(
        self, output: RequestOutput, index: int, text: str, tokens: list[int], logprobs: TokenLogprobs | None,
        answer: CompletionOutput,
    ) -> LlamaReply:
        reply = LlamaReply(
            index=index, content=text, tokens=tokens, stop=False, tokens_predicted=len(answer.token_ids),
            tokens_evaluated=len(output.prompt_token_ids),
        )
        if logprobs:
            reply.completion_probabilities = self._probabilities(tokens, logprobs)
        if self._asked.timings_per_token:
            reply.timings = LlamaTimings.of(output, answer)
        return reply

    def _last(self, output: RequestOutput, index: int, answer: CompletionOutput, text: str) -> LlamaReply:
        reply = self._part(output, index, text, [], None, answer)
        word = answer.stop_reason if isinstance(answer.stop_reason, str) else ""
        reply.stop = True
        reply.tokens_predicted = 0 if self._silent else len(answer.token_ids)
        reply.model, reply.prompt = self._model, self._prompt_text(output)
        reply.generation_settings = settings(self._params, self._longest)
        reply.has_new_line, reply.truncated = "\n" in answer.text, False
        reply.stop_type = "limit" if answer.finish_reason == "length" or self._silent else "word" if word else "eos"
        reply.stopping_word, reply.tokens_cached = word, output.num_cached_tokens
        reply.timings = LlamaTimings.of(output, answer)
        return reply

    def _probabilities(self, tokens: list[int], logprobs: TokenLogprobs) -> list[dict[str, Any]]:
        count = self._params.logprobs or 0

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "token": self._text(token), "bytes": self._bytes(token) or [], "logprob": logprob}

        return [
            entry(token, finite(at[token].logprob)) | {"top_logprobs": [entry(*each) for each in ranked(at, count)]}
            for token, at in zip(tokens, logprobs, strict=True)
        ]

    def _chosen(self, reply: LlamaReply) -> Any:
        """Only the fields that the request lists; `a/b` is the field b of a, under that name."""
        if not self._asked.response_fields:
            return encoded_alone(reply)
        plain = msgspec.to_builtins(reply)
        made: dict[str, Any] = {}
        for path in self._asked.response_fields:
            value: Any = plain
            for name in path.split("/"):
                value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
            if value is not UNSET:
                made[path] = value
        return encoded_alone(made)


def settings(params: SamplingParams, longest: int) -> dict[str, Any]:
    """How an answer is sampled, by llama.cpp's names."""
    most = -1 if params.max_tokens is None else params.max_tokens
    grammar = params.structured_outputs
    return {
        "n_ctx": longest, "n_predict": most, "max_tokens": most, "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
        "typical_p": params.typical_p, "repeat_penalty": params.repetition_penalty, "repeat_last_n": -1,
        "presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty, "mirostat": 0,
        "stop": params.stop, "ignore_eos": params.ignore_eos, "n_probs": params.logprobs or 0,
        "grammar": grammar.grammar or "" if grammar is not None else "", "n_keep": 0, "n_discard": 0, "lora": [],
    }

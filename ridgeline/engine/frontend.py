"""Between people and the core: prompts become Requests of token ids, TokenDeltas become text.

Used by LLM in the engine's own process and by AsyncLLM across a socket. No torch; nothing here waits or schedules.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ridgeline.config import ModelOptions
from ridgeline.engine.outputs import AnswerDelta, CompletionOutput, Logprob, LogprobsAt, RequestOutput
from ridgeline.engine.text import TextStream
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, ConfigError, RequestError
from ridgeline.messages import Logprobs, Request, TokenDelta
from ridgeline.sampling_params import SamplingParams

Prompt = str | dict[str, Any] | Sequence[int]


class Frontend:
    """Makes requests. `tokenizer` is None when the caller works on token ids only."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._numbers = itertools.count()

    @classmethod
    def load(cls, options: ModelOptions, model: Path) -> Frontend:
        """With the tokenizer and the chat template that the options ask for; by default the model's own."""
        if options.skip_tokenizer_init:
            return cls(None)
        tokenizer = Tokenizer.load(Path(options.tokenizer) if options.tokenizer else model)
        if options.chat_template:
            try:
                tokenizer.chat_template = Path(options.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat_template {options.chat_template} cannot be read: {error}") from None
        return cls(tokenizer)

    def new_id(self) -> str:
        return str(next(self._numbers))

    def prompt_tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`."""
        if isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
                known = "`prompt` or `prompt_token_ids`, and perhaps `cache_salt`"
                raise BadRequest(f"a prompt as a dict holds {known}; got {sorted(prompt)}")
            text = prompt.get("prompt")
            tokens = prompt.get("prompt_token_ids")
            return (text, list(tokens)) if tokens is not None else self.prompt_tokens(text or "")
        if isinstance(prompt, str):
            if not prompt:
                raise BadRequest("the prompt is empty; it needs at least one token")
            return prompt, self._require_tokenizer("a text prompt").encode(prompt)
        return None, list(prompt)

    def request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0,
        cache_salt: str = "",
    ) -> tuple[Request, RequestState]:  # fmt: skip
        text, tokens = self.prompt_tokens(prompt)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise BadRequest("prompt_token_ids must be integers")
        if isinstance(prompt, dict):
            cache_salt = str(prompt.get("cache_salt") or cache_salt)
        if params.stop:
            self._require_tokenizer("stop")
        request = Request(
            request_id=request_id or self.new_id(),
            prompt_token_ids=tokens,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            bad_words_token_ids=self._bad_words(params.bad_words),
        )
        return request, RequestState(request, text, self.tokenizer)

    def chat_tokens(self, messages: list[dict[str, Any]], **template: Any) -> list[int]:
        """A conversation through the model's chat template."""
        tokens = self._require_tokenizer("chat").apply_chat_template(messages, tokenize=True, **template)
        return list(tokens)

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """A word reads differently at the start of a text and after a space; both are bad."""
        if not words:
            return []
        tokenizer = self._require_tokenizer("bad_words")
        variants = [space + word.lstrip() for word in words for space in ("", " ")]
        encoded = [tokenizer.encode(variant, add_special_tokens=False) for variant in variants]
        return [list(unique) for unique in dict.fromkeys(tuple(tokens) for tokens in encoded if tokens)]

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise BadRequest(f"{what} needs a tokenizer, and skip_tokenizer_init is set; give token ids instead")
        return self.tokenizer


class RequestState:
    """One request's answers as they grow."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._params = params
        self._tokenizer = tokenizer
        self._streams = [
            TextStream.for_params(tokenizer, params) if tokenizer and params.detokenize else None
            for _ in range(params.n)
        ]
        answers = [
            CompletionOutput(index, logprobs=None if params.logprobs is None else []) for index in range(params.n)
        ]
        self.output = RequestOutput(request.request_id, prompt, request.prompt_token_ids, answers)

    def take(self, delta: TokenDelta) -> tuple[AnswerDelta, bool]:
        """(what is new, whether the core must be told to stop this answer: a stop string was found here).

        An error of this request alone is raised.
        """
        if delta.finish_reason == "error":
            raise RequestError(delta.error)
        answer, stream = self.output.outputs[delta.index], self._streams[delta.index]
        self.output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *self._readable(delta.prompt_logprobs)]
        token_ids, text, finish, reason = delta.token_ids, "", delta.finish_reason, delta.stop_reason
        offsets: list[int] = []
        stop_here = False
        if stream is not None:
            before = stream.num_tokens
            text = stream.feed(token_ids, ends_with_stop_token=finish == "stop")
            if finish and stream.stopped_by is None:
                text += stream.finish()
            token_ids = token_ids[: max(0, stream.num_tokens - before)]
            offsets = stream.text_offsets[before:]
            if stream.stopped_by is not None:
                stop_here = finish is None
                finish, reason = "stop", stream.stopped_by
        new_logprobs = None
        if answer.logprobs is not None:
            new_logprobs = [at for chunk in delta.logprobs for at in self._readable(chunk)][: len(token_ids)]
            answer.logprobs.extend(new_logprobs)
            chosen = sum(at[token].logprob for at, token in zip(new_logprobs, token_ids, strict=True))
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + chosen
        answer.text += text
        answer.token_ids.extend(token_ids)
        answer.text_offsets.extend(offsets)
        answer.finish_reason, answer.stop_reason = finish, reason
        self.output.finished = all(each.finished() for each in self.output.outputs)
        return AnswerDelta(delta.index, text, token_ids, new_logprobs, finish, reason, offsets), stop_here

    def _readable(self, logprobs: Logprobs) -> list[LogprobsAt]:
        positions = []
        for place, token in enumerate(logprobs.token_ids.tolist()):
            at = {
                int(top): Logprob(float(value), rank, self._word(int(top)))
                for rank, (top, value) in enumerate(
                    zip(logprobs.top_ids[place], logprobs.top_logprobs[place], strict=True), 1
                )
            }
            at[token] = Logprob(float(logprobs.logprobs[place]), int(logprobs.ranks[place]), self._word(token))
            positions.append(at)
        return positions

    def _word(self, token: int) -> str | None:
        return self._tokenizer.token_text(token) if self._tokenizer else None

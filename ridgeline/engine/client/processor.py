"""The text side of the engine: prompts become Requests of token ids, TokenDeltas become text.

Used by LLM in the engine's own process and by AsyncLLM across a socket. No torch, no waiting, no scheduling.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from ridgeline.config import ModelOptions
from ridgeline.draft_options import draft_options
from ridgeline.engine.client.grammar_check import GrammarChecker
from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput, add_text
from ridgeline.engine.client.sampling_defaults import SamplingDefaults, load_sampling_defaults
from ridgeline.engine.token_logprobs import PromptLogprobs, TokenLogprobs, Word
from ridgeline.errors import PROMPT, BadRequest, ConfigError, RequestError, Unsupported, shown
from ridgeline.messages import Request, TokenDelta
from ridgeline.process.hub_cache import locate
from ridgeline.sampling_params import SamplingParams, is_unicode, plain_token_ids
from ridgeline.text.chat_template import check_template
from ridgeline.text.detokenizer import TextStream
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.user_files import read_text

MAX_TEMPLATE = 2**20                 # bytes of a chat template in a file
MAX_PRIORITY = 2**31 - 1             # either way
MAX_SALT_CHARACTERS = 1_024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")         # of a chat's messages


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]             # only repeated in the output
    cache_salt: NotRequired[str]


class Beside(NamedTuple):
    """What a request's parameters hold as tokens. All prompts with these parameters share it."""

    bad_words: list[list[int]]
    predicted: list[int]


Prompt = str | Mapping[str, Any] | Sequence[int]         # a mapping is a TextPrompt or a TokensPrompt


class Processor:
    """Makes requests. `tokenizer` is None when the caller works on token ids only.

    `sampling_defaults` are the fields of SamplingParams that the model sets where a request does not.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, sampling_defaults: SamplingDefaults | None = None, backend: str = "auto"
    ) -> None:
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.grammars = GrammarChecker(tokenizer, backend) if tokenizer is not None else None
        pieces = tokenizer.token_pieces() if tokenizer is not None else []
        self.longest_piece = max(map(len, pieces), default=0)            # bytes of the vocabulary's longest token
        self.predicts = False                            # does the engine use predictions? Else they are not tokenised
        self._numbers = itertools.count()

    @classmethod
    def load(cls, options: ModelOptions, model: Path, speculative_config: str = "") -> Processor:
        """With the tokenizer and the chat template that the options ask for; by default the model's own."""
        drafts = draft_options(speculative_config)
        defaults = load_sampling_defaults(options, model)
        template = _template(options.chat_template) if options.chat_template else ""
        if options.skip_tokenizer_init:
            made = cls(None, defaults)
        else:
            tokenizer = Tokenizer.load(locate(options.tokenizer) if options.tokenizer else model)
            if options.chat_template:
                tokenizer.chat_template = template
            made = cls(tokenizer, defaults, options.structured_outputs_backend)
        made.predicts = "prediction" in drafts.methods
        return made

    def default_params(self) -> SamplingParams:
        """For a request that brings none of its own."""
        return SamplingParams(**self.sampling_defaults)

    def new_id(self) -> str:
        return str(next(self._numbers))

    def prompt_tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`."""
        if isinstance(prompt, Mapping):
            given = {name for name in prompt if prompt[name] is not None}
            if given - {"prompt", "prompt_token_ids", "cache_salt"} or not {"prompt", "prompt_token_ids"} & given:
                known = "`prompt` or `prompt_token_ids`, and perhaps `cache_salt`"
                raise BadRequest(f"a prompt as a dict holds {known}; got {shown(sorted(map(str, prompt)))}")
            text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise BadRequest(f"prompt must be a text, got {shown(text)}", field="prompt")
            return (text, _token_ids(tokens)) if tokens is not None else self.prompt_tokens(text or "")
        if isinstance(prompt, str):
            if not prompt:
                raise BadRequest("the prompt is empty; it needs at least one token", field=PROMPT)
            return prompt, self._require_tokenizer("a text prompt").encode(prompt)
        return None, _token_ids(prompt)

    def request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0,
        cache_salt: str = "", beside: Beside | None = None,
    ) -> tuple[Request, RequestState]:
        """BadRequest for anything wrong with it, except what only the engine can check: vocabulary and context length.
        `beside`: of the same parameters, where other prompts have them, too."""
        if not isinstance(params, SamplingParams):
            raise BadRequest(f"sampling_params must be SamplingParams, got {shown(params)}")
        text, tokens = self.prompt_tokens(prompt)
        if params.truncate_prompt_tokens is not None:
            most = params.truncate_prompt_tokens
            tokens = tokens[:most] if params.truncation_side == "right" else tokens[-most:]
        if isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt") or cache_salt
        check_salt(cache_salt)
        if params.stop:
            self._require_tokenizer("stop", "stop")
        if params.structured_outputs is not None:
            if not self._require_tokenizer("structured_outputs", "structured_outputs").decodes_alone:
                message = "structured_outputs needs tokens with a text of their own, which this model's tokenizer does not have"
                raise Unsupported(message, field="structured_outputs")
            assert self.grammars is not None
            self.grammars.check(params.structured_outputs)
        bad_words, predicted = self.beside(params) if beside is None else beside
        request = Request(
            request_id=request_id or self.new_id(),
            prompt_token_ids=tokens,
            params=params,
            priority=_priority(priority),
            cache_salt=cache_salt,
            bad_words_token_ids=bad_words,
            predicted_token_ids=predicted,
        )
        if params.prediction is not None:
            request.params = replace(params, prediction=None)    # its tokens are sent, not its text
        return request, RequestState(request, text, self.tokenizer)

    def requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priorities: Sequence[int]
    ) -> list[tuple[Request, RequestState]]:
        """request() of each. Texts of prompts and of predictions are tokenised at once, on all cores."""
        made = list(prompts)
        different = {id(each): each for each in params if isinstance(each, SamplingParams)}
        found: dict[int, list[int]] = {}
        if self.tokenizer is not None:
            texts = {place: each for place, each in enumerate(prompts) if isinstance(each, str) and each}
            for place, ids in zip(texts, self.tokenizer.encode_batch([*texts.values()]), strict=True):
                made[place] = {"prompt": texts[place], "prompt_token_ids": ids}
            guessed = {
                name: each.prediction for name, each in different.items()
                if self.predicts and isinstance(each.prediction, str) and each.prediction
            }
            encoded = self.tokenizer.encode_batch([*guessed.values()], add_special_tokens=False)
            found = dict(zip(guessed, encoded, strict=True))
        beside = {name: self.beside(each, found.get(name)) for name, each in different.items()}
        return [
            self.request(prompt, each, priority=priority, beside=beside.get(id(each)))
            for prompt, each, priority in zip(made, params, priorities, strict=True)
        ]

    def beside(self, params: SamplingParams, predicted: list[int] | None = None) -> Beside:
        """`predicted`: the tokens of the prediction, where they are known."""
        return Beside(self._bad_words(params.bad_words), self._predicted(params) if predicted is None else predicted)

    def chat_prompts(self, conversations: Sequence[list[dict[str, Any]]], **template: Any) -> list[list[int]]:
        """chat_tokens() of each, tokenised at once, on all cores."""
        return self._require_tokenizer("chat").chat_prompts(conversations, **template)

    def chat_tokens(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **template: Any
    ) -> list[int]:
        """A conversation through the model's chat template; by default the model's next message begins."""
        return self._require_tokenizer("chat").apply_chat_template(
            messages, tokenize=True, add_generation_prompt=add_generation_prompt, **template
        )

    def _predicted(self, params: SamplingParams) -> list[int]:
        if not self.predicts or not params.prediction:
            return []
        if not isinstance(params.prediction, str):
            return params.prediction
        return self._require_tokenizer("prediction", "prediction").encode(params.prediction, add_special_tokens=False)

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """A word has different tokens at the start of a text and after a space; both are banned."""
        if not words:
            return []
        tokenizer = self._require_tokenizer("bad_words", "bad_words")
        variants = [space + word.lstrip() for word in words for space in ("", " ")]
        encoded = [tokenizer.encode(variant, add_special_tokens=False) for variant in variants]
        return [list(unique) for unique in dict.fromkeys(tuple(tokens) for tokens in encoded if tokens)]

    def _require_tokenizer(self, what: str, field: str = "") -> Tokenizer:
        if self.tokenizer is None:
            message = f"{what} needs a tokenizer, and skip_tokenizer_init is set; give token ids instead"
            raise BadRequest(message, field=field)
        return self.tokenizer


def second_begins(first: Sequence[int], both: Sequence[int]) -> int:
    """Where the tokens of a second text begin, of two that were tokenised as one: a token across the border is the second's.
    At least 1, since the very first token has no likelihood."""
    differ = (at for at, (one, other) in enumerate(zip(first, both, strict=False)) if one != other)
    begin = next(differ, min(len(first), len(both)))
    if not first or begin == len(both):
        raise BadRequest("both texts must have at least one token", field="text_1")
    if len(both) == 1:
        raise BadRequest("both texts are a single token together, which has no likelihood: no token is before it", field="text_1")
    return max(1, begin)


def _template(given: str) -> str:
    """A chat template: the text itself, as vLLM takes it, or the file with it."""
    text = given if "{%" in given or "{{" in given or "\n" in given else _read(given)
    check_template(text)
    return text


def _read(given: str) -> str:
    try:
        return read_text(given, MAX_TEMPLATE, "chat_template")
    except ConfigError as error:
        raise ConfigError(f"{error}; give a file, or the template itself") from None


def _token_ids(given: Any) -> list[int]:
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise BadRequest(f"a prompt must be a text, a list of token ids or a dict of either; got {shown(given)}")
    if len(given) and isinstance(given[0], str):
        raise BadRequest("a prompt must be one text, got a list of texts; give each by itself", field=PROMPT)
    if len(given) and isinstance(given[0], dict):
        message = "a prompt must be a text or token ids, got a conversation; LLM.chat and AsyncLLM.chat_tokens take messages"
        raise BadRequest(message, field=PROMPT)
    return plain_token_ids(PROMPT, given)


def _priority(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or abs(given) > MAX_PRIORITY:
        message = f"priority must be an integer between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {shown(given)}"
        raise BadRequest(message, field="priority")
    return given


def check_salt(given: Any) -> None:
    if not isinstance(given, str) or len(given) > MAX_SALT_CHARACTERS or not is_unicode(given):
        message = f"cache_salt must be a text of at most {MAX_SALT_CHARACTERS} characters, got {shown(given)}"
        raise BadRequest(message, field="cache_salt")


class RequestState:
    """One request's answers as they grow."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._params = params
        self._streams: list[TextStream] | None = None
        if tokenizer is not None and params.detokenize:
            self._streams = TextStream.for_answers(tokenizer, params)
        self._word: Word = _no_text if tokenizer is None else tokenizer.token_text
        answers = [CompletionOutput(index, logprobs=self._no_logprobs()) for index in range(params.n)]
        for answer, stream in zip(answers, self._streams or (), strict=False):
            answer.text_offsets = stream.text_offsets    # the same list: a stream has those of the answer's tokens
        # Its answers are text that no stop string ends: tokens that come alone may go the short way, more().
        self.is_plain = params.logprobs is None and self._streams is not None and all(each.is_plain for each in self._streams)
        self.output = RequestOutput(request.request_id, prompt, request.prompt_token_ids, answers)
        if params.prompt_logprobs is not None and len(request.prompt_token_ids) == 1:
            self.output.prompt_logprobs = [None]         # the first token has no logprob

    def more(self, index: int, token_ids: list[int], num_cached: int) -> AnswerDelta:
        """take() where the answer is plain and goes on, and there is nothing to tell but its tokens: the usual case."""
        assert self._streams is not None
        before = self._streams[index].num_tokens
        text = self.keep(index, token_ids, num_cached)
        return AnswerDelta(index, text, token_ids, None, None, None, self._streams[index].text_offsets[before:])

    def keep(self, index: int, token_ids: list[int], num_cached: int) -> str:
        """more(), where only the answer counts and not what is new of it."""
        assert self._streams is not None
        answer = self.output.outputs[index]
        if index == 0:                                   # the others reuse what the first has computed
            self.output.num_cached_tokens = num_cached
        text = self._streams[index].more(token_ids)
        add_text(answer, text)
        answer.token_ids.extend(token_ids)
        return text

    def take(self, delta: TokenDelta) -> tuple[AnswerDelta, bool]:
        """(what is new, whether the engine must stop this answer because a stop string was found here).

        An error of this answer alone is raised; the answer then has the finish_reason "error" and the cause as stop_reason.
        """
        answer = self.output.outputs[delta.index]
        stream = self._streams[delta.index] if self._streams is not None else None
        if delta.finish_reason == "error":
            self._end(answer, "error", delta.error)
            raise BadRequest(delta.error) if delta.bad_request else RequestError(delta.error)
        if delta.predicted != (0, 0):                    # not with every delta
            answer.accepted_prediction_tokens, answer.rejected_prediction_tokens = delta.predicted
        if delta.index == 0:                             # the others reuse what the first has computed
            self.output.num_cached_tokens = delta.num_cached_tokens
        if delta.hidden is not None:
            self.output.hidden = delta.hidden
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = PromptLogprobs(delta.prompt_logprobs, self._word)
        token_ids, text, finish, reason = delta.token_ids, "", delta.finish_reason, delta.stop_reason
        offsets: list[int] = []
        stop_here = False
        if stream is not None:
            before = stream.num_tokens
            text = stream.feed(token_ids, ends_with_stop_token=finish == "stop" and not delta.grammar_ended)
            if finish and stream.stopped_by is None:
                text += stream.finish()
            token_ids = token_ids[: max(0, stream.num_tokens - before)]
            offsets = stream.text_offsets[before:]
            if stream.stopped_by is not None:
                stop_here = finish is None
                finish, reason = "stop", stream.stopped_by
        new_logprobs = self._take_logprobs(answer, delta, token_ids)
        add_text(answer, text)
        answer.token_ids.extend(token_ids)
        if finish is not None:
            self._end(answer, finish, reason)
        return AnswerDelta(delta.index, text, token_ids, new_logprobs, finish, reason, offsets), stop_here

    def _take_logprobs(self, answer: CompletionOutput, delta: TokenDelta, token_ids: list[int]) -> TokenLogprobs | None:
        if answer.logprobs is None:
            return None
        new, chosen = answer.logprobs.empty(), 0.0
        for chunk in delta.logprobs:
            chosen += new.add(chunk, len(token_ids) - len(new))
        answer.logprobs.extend(new)
        answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + chosen
        return new

    def _no_logprobs(self) -> TokenLogprobs | None:
        params = self._params
        return None if params.logprobs is None else TokenLogprobs(self._word, params.logprob_token_ids is not None)

    def _end(self, answer: CompletionOutput, finish: str | None, reason: int | str | None) -> None:
        answer.finish_reason, answer.stop_reason = finish, reason
        self.output.finished = all(each.finished() for each in self.output.outputs)


def _no_text(token: int) -> None:
    """Without a tokenizer."""

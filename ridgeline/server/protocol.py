"""The OpenAI API as types: what may be asked, and how answers are written.

Field names are OpenAI's, and vLLM's where OpenAI has none. A field that is not declared here is refused by name; so is
one that is known but would need something this server does not do. Hints that cannot change an answer are taken and left
alone. No ASGI, no sockets: structs in, structs and bytes out.
"""

from __future__ import annotations

import difflib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.engine.outputs import AnswerDelta, CompletionOutput, LogprobsAt, RequestOutput
from ridgeline.engine.text import TextStream
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, Unsupported
from ridgeline.sampling_params import SamplingParams

LOWEST_LOGPROB = -9999.0             # JSON has no infinity
DONE = b"[DONE]"

# Whether the model has a token id is the engine's to say; what is larger than this could not even be sent there.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_encode = msgspec.json.Encoder().encode
T = TypeVar("T", bound="GenerationRequest")


# -- what may be asked -------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. None means the default, as if the field were not there."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Integer] | None = None
    logit_bias: dict[Integer, float] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Integer | None = None
    cache_salt: str | None = None

    # Hints: they cannot change an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    # Known to clients, not done here; NEUTRAL has the values of each that ask for nothing and are let through.
    response_format: Any = None
    structured_outputs: Any = None
    lora_request: Any = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "lora_request": (),
    }

    def check(self) -> None:
        """Refuse what is understood and not done."""
        for name, neutral in self.NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise Unsupported(f"{name} is not supported by this server; leave it out")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise Unsupported("prompt_logprobs cannot be streamed; set stream to false")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """What the request says, and the model's defaults for the rest."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(**dict(defaults) | given | {"max_tokens": max_tokens, "logprobs": logprobs})


_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "min_tokens", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias",
    "ignore_eos", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip


ROLES = ("system", "developer", "user", "assistant")


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Clients send an assistant's message back as they got it, with these empty.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None

    def plain(self, where: str) -> dict[str, Any]:
        """As the chat template wants it. `developer` is the newer name of `system`."""
        if self.role not in ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}; got {self.role[:40]!r}")
        for name in ("refusal", "annotations", "audio", "function_call", "tool_calls"):
            if getattr(self, name):
                raise Unsupported(f"{where}.{name} is not supported by this server; leave it out")
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        for name in ("name", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None

    parallel_tool_calls: Any = None                      # a hint too, where there are no tools
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.NEUTRAL | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),                 # they ask for nothing where there are no tools
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "chat_template": (),
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Without a limit of its own or the model's, an answer may be as long as the context."""
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise BadRequest("max_tokens and max_completion_tokens differ; give one")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true")
        most = limits.pop() if limits else defaults.get("max_tokens")
        return self.sampling(most, (self.top_logprobs or 0) if self.logprobs else None, defaults)

    def conversation(self) -> list[dict[str, Any]]:
        if not self.messages:
            raise BadRequest("messages must be a list with at least one message")
        return [message.plain(f"messages[{place}]") for place, message in enumerate(self.messages)]

    def template(self) -> dict[str, Any]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | Integer | list[Integer]]
    logprobs: int | None = None
    echo: bool | None = None

    best_of: Any = None
    suffix: Any = None
    use_beam_search: Any = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.NEUTRAL | {
        "best_of": (1,),
        "suffix": ("",),
        "use_beam_search": (False,),
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        most = self.max_tokens if self.max_tokens is not None else defaults.get("max_tokens", 16)
        params = self.sampling(most, self.logprobs, defaults)
        if self.echo and self.logprobs is not None:
            params.prompt_logprobs = max(self.logprobs, params.prompt_logprobs or 0)
        return params

    def prompts(self) -> list[str | list[int]]:
        """A text, token ids, or a list of either."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if kinds not in ({str}, {list}):
            raise BadRequest("prompt must be a text, a list of texts, a list of token ids or a list of such lists")
        return self.prompt  # type: ignore[return-value]


_decoders = {kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest)}
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]{0,200})`")
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")


def parse(kind: type[T], body: bytes) -> T:
    """The request, checked; BadRequest or Unsupported in words that name the field."""
    try:
        request: Any = _decoders[kind].decode(body)      # type: ignore[index]
    except msgspec.ValidationError as error:
        raise BadRequest(_readable(str(error), kind)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    request.check()
    return request  # type: ignore[no-any-return]


def _readable(message: str, kind: type[GenerationRequest]) -> str:
    """msgspec's words, with the field first: `temperature: expected ..., got ...`."""
    place = _PLACE.search(message)
    where = place.group(1) if place else ""
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        name = unknown.group(1)
        close = difflib.get_close_matches(name, kind.__struct_fields__, 1) if not where else []
        inside = f" in {where}" if where else ""
        return f"unknown field {name!r}{inside}" + (f"; did you mean {close[0]!r}?" if close else "")
    words = _PLACE.sub("", message).replace("`", "")
    return f"{where}: {words[0].lower()}{words[1:]}" if where else words


def param_of(message: str) -> str | None:
    """The field an error is about, for `error.param`: our messages begin with it, or quote an unknown one first."""
    first = re.match(r"(?:unknown field ')?([a-z_]+)", message)
    if first is None or (first.group(1) not in _FIELDS and not message.startswith("unknown field ")):
        return None
    return _FIELDS.get(first.group(1), first.group(1))


_FIELDS = {name: name for name in (*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__)}
_FIELDS["prompt_token_ids"] = "prompt"                   # as the engine calls it


# -- how answers are written -------------------------------------------------------------------------------------------


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Usage:
        outputs = list(outputs)
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return cls(prompt, completion, prompt + completion, CachedTokens(cached))


class Reply(msgspec.Struct):
    """A whole answer or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Any = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: Any = UNSET


class Writer(ABC):
    """Writes the answers to one HTTP request: `events` for a stream, `body` for the whole. One per request."""

    object = ""
    chunk_object = ""

    def __init__(
        self, request: GenerationRequest, params: SamplingParams, request_id: str, model: str, tokenizer: Tokenizer | None
    ) -> None:
        self._params = params
        self._id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._usage = request.include_usage              # at the end of a stream
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._begun: set[int] = set()                    # choices of which something was sent

    def events(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> list[bytes]:
        """Everything that is new, an event each; an answer's tokens without visible text wait for the next."""
        events = []
        for prompt, delta in batch:
            for choice in self._chunks(outputs[prompt], prompt * self._params.n + delta.index, delta):
                reply = Reply(self._id, self.chunk_object, self._created, self._model, [choice])
                if self._usage:
                    reply.usage = None
                events.append(_encode(reply))
        return events

    def last_events(self, outputs: list[RequestOutput]) -> list[bytes]:
        if not self._usage:
            return [DONE]
        usage = Usage.of(outputs)
        return [_encode(Reply(self._id, self.chunk_object, self._created, self._model, [], usage)), DONE]

    def body(self, outputs: list[RequestOutput]) -> bytes:
        choices = [
            self._choice(output, prompt * self._params.n + answer.index, answer)
            for prompt, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return _encode(Reply(self._id, self.object, self._created, self._model, choices, Usage.of(outputs)))

    @abstractmethod
    def _chunks(self, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        """The choices that tell of this delta, an event each."""

    @abstractmethod
    def _choice(self, output: RequestOutput, index: int, answer: CompletionOutput) -> Any:
        """One whole answer."""

    def _text(self, token: int) -> str:
        return self._tokenizer.token_text(token) if self._tokenizer else f"token_id:{token}"

    def _bytes(self, token: int) -> list[int] | None:
        return list(self._tokenizer.token_bytes(token)) if self._tokenizer else None


class ChatWriter(Writer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _chunks(self, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        chunks: list[Any] = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        if delta.text or delta.finish_reason or delta.logprobs:
            chunk = ChatChunkChoice(index, ChatDelta(content=delta.text or None), finish_reason=delta.finish_reason)
            if delta.logprobs is not None:
                chunk.logprobs = self._logprobs(delta.token_ids, delta.logprobs)
            if delta.finish_reason:
                chunk.stop_reason = delta.stop_reason
            chunks.append(chunk)
        return chunks

    def _choice(self, output: RequestOutput, index: int, answer: CompletionOutput) -> ChatChoice:
        logprobs = None if answer.logprobs is None else self._logprobs(answer.token_ids, answer.logprobs)
        choice = ChatChoice(index, AssistantMessage(answer.text), logprobs, answer.finish_reason, answer.stop_reason)
        if self._wants_prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs(output)
        return choice

    def _logprobs(self, token_ids: list[int], logprobs: list[LogprobsAt]) -> ChatLogprobs:
        content = []
        for token, at in zip(token_ids, logprobs, strict=True):
            ranked = _ranked(at, self._params.logprobs or 0)
            top = [TopLogprob(self._text(each), value, self._bytes(each)) for each, value in ranked]
            content.append(TokenLogprob(self._text(token), _finite(at[token].logprob), self._bytes(token), top))
        return ChatLogprobs(content)


class CompletionWriter(Writer):
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, *args: Any) -> None:
        super().__init__(request, *args)
        self._echo = bool(request.echo)

    def _chunks(self, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        text = delta.text
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs(output, delta.token_ids, delta.logprobs, delta.text_offsets)
        if self._echo and index not in self._begun:
            self._begun.add(index)
            text = self._prompt_text(output) + text
            logprobs = self._with_prompt(output, logprobs)
        if not (text or delta.finish_reason or delta.logprobs):
            return []
        chunk = CompletionChoice(index, text, logprobs, delta.finish_reason)
        if delta.finish_reason:
            chunk.stop_reason = delta.stop_reason
        return [chunk]

    def _choice(self, output: RequestOutput, index: int, answer: CompletionOutput) -> CompletionChoice:
        text, logprobs = answer.text, None
        if answer.logprobs is not None:
            logprobs = self._logprobs(output, answer.token_ids, answer.logprobs, answer.text_offsets)
        if self._echo:
            text = self._prompt_text(output) + text
            logprobs = self._with_prompt(output, logprobs)
        choice = CompletionChoice(index, text, logprobs, answer.finish_reason, answer.stop_reason)
        if self._wants_prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs(output)
        return choice

    def _logprobs(
        self, output: RequestOutput, token_ids: list[int], logprobs: list[LogprobsAt], offsets: list[int]
    ) -> CompletionLogprobs:
        shift = len(self._prompt_text(output)) if self._echo else 0
        return CompletionLogprobs(
            tokens=[self._text(token) for token in token_ids],
            token_logprobs=[_finite(at[token].logprob) for token, at in zip(token_ids, logprobs, strict=True)],
            top_logprobs=[self._top(token, at) for token, at in zip(token_ids, logprobs, strict=True)],
            text_offset=[offset + shift for offset in offsets],
        )

    def _with_prompt(self, output: RequestOutput, answer: CompletionLogprobs | None) -> CompletionLogprobs | None:
        """The prompt's tokens in front of the answer's. The first has no probability: nothing came before it."""
        if answer is None or output.prompt_logprobs is None:
            return answer
        tokens, known = output.prompt_token_ids, output.prompt_logprobs
        offsets = [0] * len(tokens)
        if self._tokenizer is not None:
            text = TextStream(self._tokenizer, at_start=True)
            text.feed(tokens)
            offsets = text.text_offsets
        return CompletionLogprobs(
            tokens=[self._text(token) for token in tokens] + answer.tokens,
            token_logprobs=[
                None if at is None else _finite(at[token].logprob) for token, at in zip(tokens, known, strict=True)
            ]
            + answer.token_logprobs,
            top_logprobs=[None if at is None else self._top(token, at) for token, at in zip(tokens, known, strict=True)]
            + answer.top_logprobs,
            text_offset=offsets + answer.text_offset,
        )

    def _top(self, token: int, at: LogprobsAt) -> dict[str, float]:
        """The most likely tokens and the one that came; of tokens that read alike the likelier."""
        top: dict[str, float] = {}
        for each, value in [*_ranked(at, self._params.logprobs or 0), (token, _finite(at[token].logprob))]:
            top.setdefault(self._text(each), value)
        return top

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is None and self._tokenizer is not None:
            output.prompt = self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
        return output.prompt or ""


def _ranked(at: LogprobsAt, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens at a position, likeliest first."""
    ranked = sorted((logprob.rank or 0, token) for token, logprob in at.items())
    return [(token, _finite(at[token].logprob)) for rank, token in ranked if rank <= count]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """As vLLM writes them: per position a map from token id to its log-probability, rank and text."""
    if output.prompt_logprobs is None:
        return None

    def written(at: LogprobsAt) -> dict[str, Any]:
        return {
            str(token): {"logprob": _finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in at.items()
        }

    return [None if at is None else written(at) for at in output.prompt_logprobs]


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "ridgeline"

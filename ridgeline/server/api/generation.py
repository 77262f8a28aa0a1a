"""What chat and completions share: the fields of a request, and how an answer is written.

Field names are OpenAI's, or vLLM's where OpenAI has none. A field that is not declared is refused by name; so is a known one that
is not supported. Fields that cannot change an answer are accepted and ignored. No ASGI, no sockets: structs in, structs and bytes
out.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.engine.client.long_work import checkpoint
from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.engine.client.processor import check_salt
from ridgeline.engine.client.request_context import MAX_TTFT_MS
from ridgeline.engine.token_logprobs import LogprobsAt
from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from ridgeline.server.api.other_names import GRAMMARS, OtherNames
from ridgeline.server.api.prompt_parts import (
    BYTES_PER_ID,
    BYTES_PER_VALUE,
    PromptParts,
    encode,
    encoded_alone,
    finite,
    num_prompt_logprobs,
    prompt_logprobs,
)
from ridgeline.server.api.request_checks import forget, refuse
from ridgeline.server.api.response_format import asked_format
from ridgeline.server.api.usage import RunningUsage, Usage
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.version import __version__

DONE = b"[DONE]"
MARK = "\x00text\x00"                # stands for an event's text; nothing after it contains it
PADDING = 64                         # with include_obfuscation, events are padded to multiples of this length

# The engine checks token ids against the vocabulary; larger numbers than these could not be sent to it.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Deadline = Annotated[float, msgspec.Meta(gt=0, le=MAX_TTFT_MS)]  # milliseconds



# -- requests ----------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(OtherNames, forbid_unknown_fields=True, kw_only=True):
    """The fields of both endpoints. None means the default, as if the field were missing."""

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
    logprob_token_ids: list[Integer] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    ttft_deadline_ms: Deadline | None = None
    return_timings: bool | None = None
    speculative: bool | int | None = None                # false: no drafts for this request; a number: at most that many a step
    techniques: dict[str, bool] | None = None            # switched for this request only; see server/observe/prometheus

    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None          # the older names of structured_outputs' fields
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Hints: they cannot change an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    guided_decoding_backend: Any = None
    request_id: Any = None               # answers have ids of their own; X-Request-Id is echoed
    session_id: Any = None
    stream_interval: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None

    # Known to clients, not supported here.
    lora_request: Any = None
    thinking_token_budget: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    guided_whitespace_pattern: Any = None

    HINTS: ClassVar[tuple[str, ...]] = (
        *OtherNames.HINTS,
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "guided_decoding_backend", "request_id", "session_id", "stream_interval",
        "mm_processor_kwargs", "media_io_kwargs",
    )
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = OtherNames.REFUSED | {       # with values that change nothing: accepted
        "thinking_token_budget": (), "kv_transfer_params": ({},), "vllm_xargs": ({},),
        "lora_request": (), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
        "guided_whitespace_pattern": (),
    }

    def check(self) -> None:
        """Refuse fields that are known and not supported."""
        refuse(self, self.REFUSED)
        forget(self, self.HINTS)
        self.take_other_names(self)
        check_salt(self.cache_salt or "")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", field="stream_options")
        if self.prompt_logprobs == EVERY:
            message = f"prompt_logprobs {EVERY}, every token of the vocabulary, is not supported; at most {MAX_LOGPROBS} are"
            raise Unsupported(message, field="prompt_logprobs")
        if self.logprob_token_ids and getattr(self, "logprobs", None) in (None, False):
            raise BadRequest("logprob_token_ids needs logprobs", field="logprob_token_ids")

    @property
    def length_field(self) -> str:
        """The field that limits the answer's length; empty if none is set."""
        return "" if self.max_tokens is None else "max_tokens"

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any], **other: Any
    ) -> SamplingParams:
        """The request's parameters, and the model's defaults for the rest. The caller adds the grammar."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.truncate_prompt_tokens not in (None, FIT):
            given["truncate_prompt_tokens"] = self.truncate_prompt_tokens
        given |= {"max_tokens": max_tokens, "logprobs": logprobs}
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = list(dict.fromkeys(self.allowed_token_ids))     # a client may send one a million times
        try:
            return SamplingParams(**dict(defaults) | given | other)
        except BadRequest as error:
            if error.field != "max_tokens" or not self.length_field:
                raise
            raise error.renamed("max_tokens", self.length_field) from None

    def structured(self) -> StructuredOutputs | None:
        """The answer's grammar, by whichever field the request sets it."""
        asked: dict[str, dict[str, Any]] = {}
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs
        for name, kind in GRAMMARS.items():
            value = getattr(self, name)
            # Clients for old and new vLLM (guidance's) send a grammar under both names.
            if value is not None and asked.get("structured_outputs") != {kind: value}:
                asked[name] = {kind: value}
        if (form := asked_format(self.response_format)) is not None:
            asked["response_format"] = form
        if not asked:
            return None
        if len(asked) > 1:
            message = f"{' and '.join(asked)} each say what the answer must look like; give one of them"
            raise BadRequest(message, field=next(iter(asked)))
        (name, fields), = asked.items()
        known = StructuredOutputs.__dataclass_fields__
        for field in fields:
            if field not in known:
                message = f"structured_outputs has no field {shown(field)}; it has {', '.join(known)}"
                raise BadRequest(message, field="structured_outputs")
        return structured_outputs(name, **fields)

    def forget_params(self) -> None:
        """Free what the sampling parameters hold. Which field has set the grammar stays known."""
        self.stop = self.stop_token_ids = self.bad_words = self.logit_bias = None
        self.allowed_token_ids = self.logprob_token_ids = None
        for name in GRAMMARS:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, type(value)())
        if self.structured_outputs is not None:
            self.structured_outputs = {}
        if self.response_format is not None:
            sets_one = self.response_format.get("type") != "text"
            self.response_format = {"type": "json_object"} if sets_one else None

    @contextmanager
    def naming_its_grammar(self) -> Iterator[None]:
        """The engine calls every grammar structured_outputs; errors name the field that this request has."""
        try:
            yield
        except BadRequest as error:
            if not error.field.startswith("structured_outputs.") or self.structured_outputs is not None:
                raise
            name = next((name for name in GRAMMARS if getattr(self, name) is not None), "tools")
            if asked_format(self.response_format) is not None:
                name = "response_format"
            raise error.renamed(error.field, name) from None


EVERY = -1                           # as prompt_logprobs
FIT = -1                             # as truncate_prompt_tokens: cut the prompt to fit the context

_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "min_tokens", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias",
    "ignore_eos", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "truncation_side", "logprob_token_ids", "speculative",
)


def structured_outputs(name: str, **fields: Any) -> StructuredOutputs:
    """Errors call the field by the `name` it has in the request."""
    try:
        return StructuredOutputs(**fields)
    except BadRequest as error:
        if name == "structured_outputs" or not error.field.startswith("structured_outputs."):
            raise
        raise error.renamed(error.field, name) from None


# -- answers -----------------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct):
    """A whole answer or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = f"ridgeline-{__version__}"
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: Any = UNSET         # in chat; completions have them in their choices
    obfuscation: str | UnsetType = UNSET


class Writer(ABC):
    """Writes the answers to one HTTP request: `events` for a stream, `body` for the whole. One per request."""

    object = ""
    chunk_object = ""
    one_prompt = False               # else each choice has the tokens of its own prompt
    bytes_per_character = 1          # of an answer's text: what a character takes, as bytes of JSON that take as long

    def __init__(
        self, request: GenerationRequest, params: SamplingParams, request_id: str, model: str, tokenizer: Tokenizer | None
    ) -> None:
        self._params = params
        self._id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        options = request.stream_options or StreamOptions()
        self._usage = bool(options.include_usage)        # at the end of a stream
        self._usage_always = bool(options.continuous_usage_stats)
        self._obfuscate = bool(options.include_obfuscation)
        self._wants_token_ids = bool(request.return_token_ids)
        self._names_tokens_by_id = tokenizer is None or bool(request.return_tokens_as_token_ids)
        self._frames: dict[int, tuple[bytes, bytes]] = {}        # by choice: the bytes before and after an event's text
        self._so_far = RunningUsage()
        self._begun: set[int] = set()                    # choices with an event
        self._sent = False                               # any event
        self._repeated = PromptParts(request.prompt_logprobs is not None)

    def prompt_bytes(self, output: RequestOutput) -> int:
        """About how many bytes of its prompt each choice has, with the time that they take."""
        values = num_prompt_logprobs(output) if self._repeated.has_logprobs else 0
        ids = len(output.prompt_token_ids) if self._wants_token_ids else 0
        return BYTES_PER_VALUE * values + BYTES_PER_ID * ids

    def bytes_of_text(self, some: CompletionOutput | AnswerDelta) -> int:
        """About how many bytes of JSON the text and the token ids of an answer, or of a part of it, are worth in time."""
        return self.bytes_per_character * len(some.text) + BYTES_PER_ID * len(some.token_ids) * self._wants_token_ids

    def bytes_of_prompts(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> int:
        """prompt_bytes() of the longest that the events of a batch have: the first event of each choice has them. The choices of
        a prompt come one after the other, and it is written once."""
        count = self._params.n
        if len(self._begun) == count * len(outputs):     # the usual case; this is asked for every token
            return 0
        new = {prompt for prompt, delta in batch if prompt * count + delta.index not in self._begun}
        return max((self.prompt_bytes(outputs[prompt]) for prompt in new), default=0)

    def events(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> list[bytes]:
        """An event for each delta, also for tokens without visible text (half a character, a special token, what may begin a stop
        string): clients see that the answer goes on, as with vLLM."""
        events = []
        for prompt, delta in batch:
            index = prompt * self._params.n + delta.index
            self._so_far.add_tokens(len(delta.token_ids))
            frame = self._frames.get(index)
            if frame is not None and delta.finish_reason is None and delta.logprobs is None:
                events.append(frame[0] + encode(delta.text) + frame[1])
                continue
            for choice in self._chunks(outputs[prompt], index, delta):
                reply = self._reply([choice])
                if self._usage_always:
                    reply.usage = self._usage_so_far(outputs, prompt, index, delta)
                elif self._usage:
                    reply.usage = None
                if not self._sent:
                    self._sent = True
                    self._add_prompt_tokens(reply, outputs)
                events.append(self._event(reply))
            if frame is None and index in self._begun and not self._each_differs:
                self._keep_frame(index)
        if len(self._begun) == len(outputs) * self._params.n:
            self._repeated.forget()
        return events

    @property
    def _each_differs(self) -> bool:
        """Whether events differ in more than their text."""
        return self._usage_always or self._obfuscate or self._wants_token_ids

    def _keep_frame(self, index: int) -> None:
        """Most events of a choice differ only in their text: the rest is encoded once."""
        choice = self._text_choice(index, MARK)
        if choice is not None:
            reply = self._reply([choice])
            if self._usage:
                reply.usage = None
            before, _, after = self._event(reply).rpartition(encode(MARK))
            self._frames[index] = before, after

    def last_events(self, outputs: list[RequestOutput]) -> Iterable[bytes]:
        if not self._usage:
            return [DONE]
        reply = self._reply([])
        reply.usage = self._usage_of(outputs)
        return [self._event(reply), DONE]

    def last_bytes(self, outputs: list[RequestOutput]) -> int:
        """About how many bytes each of last_events() has, if they have all of the answer again."""
        return 0

    def force_usage(self) -> None:
        """Every event has the usage so far, although the request did not ask for it."""
        self._usage = self._usage_always = True

    def body(self, outputs: list[RequestOutput]) -> bytes:
        listed = [(output, answer) for output in outputs for answer in self._returned(output)]
        choices = []
        for index, (output, answer) in enumerate(listed):
            checkpoint()
            choices.append(encoded_alone(self._choice(output, index, answer)))       # each alone: all may repeat a long prompt
        reply = Reply(self._id, self.object, self._created, self._model, choices, self._usage_of(outputs))
        if self.one_prompt:
            reply.prompt_token_ids = reply.prompt_logprobs = None    # vLLM's clients read them, whether asked for or not
        self._add_prompt_tokens(reply, outputs)
        self._repeated.forget()
        return encode(reply)

    def _returned(self, output: RequestOutput) -> list[CompletionOutput]:
        """The answers to a prompt that the reply contains."""
        return output.outputs

    def _reply(self, choices: list[Any]) -> Reply:
        return Reply(self._id, self.chunk_object, self._created, self._model, choices)

    def _event(self, reply: Reply) -> bytes:
        event = encode(reply)
        if not self._obfuscate:
            return event
        reply.obfuscation = secrets.token_hex(PADDING)[: 1 + -(len(event) + len(',"obfuscation":"x"')) % PADDING]
        return encode(reply)

    def _add_prompt_tokens(self, reply: Reply, outputs: list[RequestOutput]) -> None:
        """The prompt's tokens, in a complete answer or a stream's first event."""
        if self._wants_token_ids and self.one_prompt:
            reply.prompt_token_ids = outputs[0].prompt_token_ids

    def _prompt_logprobs(self, output: RequestOutput) -> Any:
        return self._repeated.once(output, "prompt_logprobs", lambda: prompt_logprobs(output))

    def _usage_of(self, outputs: list[RequestOutput]) -> Usage:
        return Usage.of(outputs)

    def _usage_so_far(self, outputs: list[RequestOutput], prompt: int, index: int, delta: AnswerDelta) -> Usage:
        """After this delta, of the choice `index`. Not counted anew over all answers: each of them has an event in each step."""
        answer = outputs[prompt].outputs[delta.index]
        return self._so_far.after(outputs, prompt, index, answer, self._reasoning_tokens_of(index, answer))

    def _reasoning_tokens_of(self, index: int, answer: CompletionOutput) -> int:
        return 0

    @abstractmethod
    def _chunks(self, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        """The choices for this delta, one event each."""

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> Any:
        """The choice of an event that has only text; None if events have more."""

    @abstractmethod
    def _choice(self, output: RequestOutput, index: int, answer: CompletionOutput) -> Any:
        """One complete answer."""

    def _text(self, token: int) -> str:
        if self._tokenizer is None or self._names_tokens_by_id:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _bytes(self, token: int) -> list[int] | None:
        return list(self._tokenizer.token_bytes(token)) if self._tokenizer else None


def goes_on(batch: list[tuple[int, AnswerDelta]]) -> bool:
    """Whether more will come. Tokens without text are then a sign to a client that nothing else is sent to."""
    return all(delta.finish_reason is None for _, delta in batch)


def ranked(at: LogprobsAt, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens at a position, the most likely first. Where a request lists tokens, these and the sampled
    one; they have no rank."""
    if any(each.rank is None for each in at.values()):
        return sorted(((token, finite(each.logprob)) for token, each in at.items()), key=lambda each: -each[1])
    places = sorted((logprob.rank or 0, token) for token, logprob in at.items())
    return [(token, finite(at[token].logprob)) for rank, token in places if rank <= count]

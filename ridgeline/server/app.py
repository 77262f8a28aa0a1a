"""The endpoints: OpenAI's, Anthropic's and vLLM's over an AsyncLLM.

    body ─ protocol.parse ─▶ SamplingParams + prompts ─ llm.stream ─▶ AnswerStream ─ protocol.Writer ─▶ JSON or events

Every request runs under a watch for its client: whoever hangs up has its request aborted, streaming or not. No torch,
no pydantic. Limits on what a connection may cost are below, in server/http/connection_limits; the process around it
is server/lifecycle.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.engine.client.answer_stream import AnswerStream, Batch
from ridgeline.engine.client.processor import Prompt
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest, RidgelineError
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api import anthropic, openapi, responses_answer
from ridgeline.server.api.completions import middle_marks
from ridgeline.server.api.dialects import ANTHROPIC, CHAT, RESPONSES, Dialect
from ridgeline.server.api.embeddings import EmbeddingReply, EmbeddingRequest, EmbeddingUsage
from ridgeline.server.api.generation import FIT
from ridgeline.server.api.responses_continued import Continued, recalled_bytes
from ridgeline.server.api.responses_continued import routes as stored_routes
from ridgeline.server.api.score import score
from ridgeline.server.api.tokenize import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
)
from ridgeline.server.http.body import LONG_BODY, away_if_long, parse_body
from ridgeline.server.http.error_bodies import anthropic_body, is_anthropic
from ridgeline.server.http.failures import describe, http_error
from ridgeline.server.http.gate import caller_of
from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.stream import (
    DIRECT,
    ClientGone,
    EventStream,
    Headers,
    Receive,
    Send,
    read_body,
    send_json,
    while_connected,
)
from ridgeline.server.observe import dashboard, prometheus, roofline_endpoint
from ridgeline.server.parse.tool_prompt import in_plain_text, mended, tells_of_tools
from ridgeline.server.parse.tools import needs_plain_text, reading
from ridgeline.server.protocol import (
    ChatRequest,
    ChatWriter,
    CompletionRequest,
    CompletionWriter,
    GenerationRequest,
    ModelCard,
    Writer,
    parse,
)
from ridgeline.server.server_errors import WrongMediaType
from ridgeline.server.service import Service
from ridgeline.version import __version__

EVENTS_AT_ONCE = 4                   # that are written before their client is asked whether it keeps up


@dataclass(slots=True)
class Job:
    """A request that was understood: what to run, and how to write it down."""

    request: GenerationRequest
    params: SamplingParams
    prompts: list[Prompt]
    writer: Writer
    headers: Headers


async def prompt_tokens(service: Service, request: ChatRequest) -> list[int]:
    """A chat's prompt, by the model's own template. What that has no word for, the messages say."""
    messages, given = request.conversation(), request.template()
    tokenizer = service.tokenizer
    if tokenizer is not None and (given["tools"] or any(map(tells_of_tools, messages))):
        templates = "\n".join(tokenizer.chat_templates.values())
        if needs_plain_text(service.options.tool_call_parser, templates):
            tools, given["tools"] = given["tools"] or [], None
            messages = await asyncio.to_thread(in_plain_text, messages, tools, templates)    # some clients bring 100 kB
        elif any(message.get("tool_calls") for message in messages):
            messages = await asyncio.to_thread(mended, messages)
    return await service.llm.chat_tokens(messages, **given)


async def chat_job(
    service: Service, request: ChatRequest, params: SamplingParams, prefix: str, writer: Callable[..., ChatWriter]
) -> Job:
    """What every dialect of chat runs."""
    read = reading(request.tool_use(), params, service.options, service.tokenizer)
    tokens = await prompt_tokens(service, request)
    fit(service, request, params)
    if service.tokenizer is not None:
        read.follow(tokens, params, service.tokenizer)
    request_id = f"{prefix}{secrets.token_hex(12)}"
    made = writer(request, params, request_id, service.name, service.tokenizer, read)
    return Job(request, params, [tokens], made, [(b"x-request-id", request_id.encode())])


def checked_params(service: Service, request: ChatRequest | CompletionRequest) -> SamplingParams:
    """What the request asks for; an error if it may not."""
    service.check(request)
    with request.naming_its_grammar():
        return request.params(service.llm.sampling_defaults)


async def prepare_chat(service: Service, caller: Caller, body: bytes) -> Job:
    def work() -> tuple[ChatRequest, SamplingParams]:
        request = parse(ChatRequest, body)
        return request, checked_params(service, request)

    request, params = await away_if_long(len(body), work)
    return await chat_job(service, request, params, "chatcmpl-", ChatWriter)


async def prepare_completion(service: Service, caller: Caller, body: bytes) -> Job:
    def work() -> tuple[CompletionRequest, SamplingParams]:
        request = parse(CompletionRequest, body)
        return request, checked_params(service, request)

    request, params = await away_if_long(len(body), work)
    request_id = f"cmpl-{secrets.token_hex(12)}"
    writer = CompletionWriter(request, params, request_id, service.name, service.tokenizer)
    prompts: list[Prompt] = list(request.prompts())
    if request.suffix:
        prompts = [await around_gap(service, each, request.suffix) for each in prompts]
    elif request.add_special_tokens is False:
        prompts = [
            {"prompt": each, "prompt_token_ids": await service.llm.text_tokens(each, False)} if isinstance(each, str) else each
            for each in prompts
        ]
    fit(service, request, params)
    return Job(request, params, prompts, writer, [(b"x-request-id", request_id.encode())])


async def around_gap(service: Service, prompt: Prompt, suffix: str) -> Prompt:
    """A prompt whose answer is what stands between it and `suffix`."""
    if not isinstance(prompt, str):
        raise BadRequest("suffix needs a prompt of text", field="suffix")
    begin, hole, end = middle_marks(service.llm.get_tokenizer())
    before, behind = await service.llm.text_tokens(prompt, False), await service.llm.text_tokens(suffix, False)
    return {"prompt": prompt, "prompt_token_ids": [begin, *before, hole, *behind, end]}


def fit(service: Service, request: GenerationRequest, params: SamplingParams) -> None:
    """truncate_prompt_tokens -1: as many of the prompt's last tokens as leave room for the answer that is asked for."""
    if request.truncate_prompt_tokens == FIT:
        assert service.llm.ready is not None
        params.truncate_prompt_tokens = max(1, service.llm.ready.max_model_len - (params.max_tokens or 1))


class ChatLike(Protocol):
    def chat(self) -> dict[str, Any]:
        """The same as a chat request, as plain data."""


def as_chat(service: Service, asked: ChatLike) -> tuple[ChatRequest, SamplingParams]:
    """A request in another dialect as one of chat, checked like one that came as such."""
    try:
        plain = msgspec.json.encode(asked.chat())
    except (OverflowError, RecursionError):
        raise BadRequest("the body holds numbers of more than 64 bits, or is nested too deep") from None
    request = parse(ChatRequest, plain)
    return request, checked_params(service, request)


async def prepare_messages(service: Service, caller: Caller, body: bytes) -> Job:
    def work() -> tuple[anthropic.MessagesRequest, ChatRequest, SamplingParams]:
        asked = parse_body(anthropic.MessagesRequest, body)
        return asked, *as_chat(service, asked)

    asked, request, params = await away_if_long(len(body), work)
    return await chat_job(service, request, params, "msg_", partial(anthropic.MessagesWriter, asked))


async def count_tokens(service: Service, caller: Caller, body: bytes) -> anthropic.TokenCount:
    def work() -> ChatRequest:
        return as_chat(service, parse_body(anthropic.CountRequest, body))[0]

    request = await away_if_long(len(body), work)
    return anthropic.TokenCount(len(await prompt_tokens(service, request)))


async def response_chat(service: Service, caller: Caller, body: bytes) -> tuple[Continued, ChatRequest, SamplingParams]:
    """A request of the Responses API as one of chat. A short one may go on from a long conversation."""
    asked = await away_if_long(len(body), lambda: parse_body(responses_answer.ResponsesRequest, body))
    key = caller.key

    def work() -> tuple[Continued, ChatRequest, SamplingParams]:
        continued = Continued(asked, service.stored, key)
        return continued, *as_chat(service, continued)

    size = len(body)
    if size <= LONG_BODY:
        size += recalled_bytes(asked, service.stored, key)
    return await away_if_long(size, work)


async def prepare_response(service: Service, caller: Caller, body: bytes) -> Job:
    continued, request, params = await response_chat(service, caller, body)
    writer = partial(responses_answer.ResponsesWriter, continued.asked, continued.keep)
    return await chat_job(service, request, params, "resp_", writer)


async def count_input(service: Service, caller: Caller, body: bytes) -> responses_answer.InputTokens:
    _, request, _ = await response_chat(service, caller, body)
    return responses_answer.InputTokens(len(await prompt_tokens(service, request)))


async def tokenize(service: Service, caller: Caller, body: bytes) -> TokenizeReply:
    def work() -> tuple[TokenizeRequest, ChatRequest | None]:
        request = parse_body(TokenizeRequest, body)
        if request.model is not None:
            service.check_name(request.model)
        return request, as_chat(service, request)[0] if request.messages is not None else None

    request, chat = await away_if_long(len(body), work)
    if chat is not None:
        tokens = await prompt_tokens(service, chat)
    else:
        tokens = await service.llm.text_tokens(request.prompt or "", request.add_special_tokens is not False)
    assert service.llm.ready is not None
    longest, tokenizer = service.llm.ready.max_model_len, service.llm.get_tokenizer()
    return TokenizeReply.of(tokens, longest, tokenizer, bool(request.return_token_strs))


async def detokenize(service: Service, caller: Caller, body: bytes) -> DetokenizeReply:
    def work() -> DetokenizeReply:
        request = parse_body(DetokenizeRequest, body)
        if request.model is not None:
            service.check_name(request.model)
        return DetokenizeReply.of(request.tokens, service.llm.get_tokenizer())

    return await away_if_long(len(body), work)


async def embed(service: Service, caller: Caller, body: bytes) -> EmbeddingReply:
    def work() -> tuple[EmbeddingRequest, SamplingParams]:
        request = parse_body(EmbeddingRequest, body)
        service.check_routing(request.model, request.priority)
        assert service.llm.ready is not None
        return request, request.params(service.llm.ready.max_model_len)

    request, params = await away_if_long(len(body), work)
    prompts: list[Prompt] = list(request.prompts())
    if request.add_special_tokens is False:
        prompts = [await plain_tokens(service, each) for each in prompts]
    reply = EmbeddingReply([], service.name, EmbeddingUsage(0, 0))
    # Clients send a thousand texts and more at once. Half of the room at a time leaves the other half to others.
    most = max(1, service.slots.limit // 2)
    for begin in range(0, len(prompts), most):
        part = prompts[begin : begin + most]
        with service.slots.taking(len(part), already=1):
            stream = await service.llm.stream(
                part, params, priority=request.priority or 0, cache_salt=request.cache_salt or "", arrived=prometheus.arrived(),
                caller=caller,
            )
            try:
                outputs = await stream.complete()
            finally:
                stream.close()
        await asyncio.to_thread(reply.add, outputs, request)     # thousands of numbers each
    return reply


async def plain_tokens(service: Service, prompt: Prompt) -> Prompt:
    """A text as the tokens that it is, and no others."""
    await asyncio.sleep(0)                               # streams go on between two of thousands
    return await service.llm.text_tokens(prompt, False) if isinstance(prompt, str) else prompt


class Endpoint(ABC):
    """A POST with a JSON body, as a raw ASGI application: the watch over its client, and its errors."""

    def __init__(self, service: Service, dialect: Dialect = CHAT, prompt_field: str | None = None) -> None:
        """`prompt_field`: what the prompt is called in the body, where one field has all of it."""
        self._service = service
        self._dialect = dialect
        self._prompt_field = prompt_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._service.require_ready()
            with self._service.slots.taking(1):          # before a byte of the body is looked at
                check_media_type(scope)
                body = await read_body(receive)
                prometheus.note_arrival(scope)
                self._service.tracing.note(scope)
                await while_connected(receive, self._answer(scope, body, send))
        except ClientGone:
            pass
        except Exception as error:
            status, body, headers = describe(error, self._prompt_field, self._dialect.names)
            await send_json(send, status, self._dialect.error(status, body), headers)

    @abstractmethod
    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None: ...


class Question(Endpoint):
    """An endpoint whose whole answer is one struct."""

    def __init__(
        self, service: Service, answer: Callable[[Service, Caller, bytes], Awaitable[Any]], dialect: Dialect = CHAT,
        prompt_field: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(service, dialect, prompt_field)
        self._make = answer

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        await send_json(send, 200, msgspec.json.encode(await self._make(self._service, caller_of(scope), body)))


class Generation(Endpoint):
    """An endpoint that generates."""

    def __init__(
        self, service: Service, prepare: Callable[[Service, Caller, bytes], Awaitable[Job]], dialect: Dialect = CHAT,
        prompt_field: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(service, dialect, prompt_field)
        self._prepare = prepare

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        with self._service.tracing.request():
            await self._generate(scope, body, send)

    async def _generate(self, scope: Scope, body: bytes, send: Send) -> None:
        caller = caller_of(scope)
        job = await self._prepare(self._service, caller, body)
        caller = prometheus.switched(self._service.llm, caller, job.request.techniques)
        caller = caller.expecting_first_token(job.request.ttft_deadline_ms)
        count = len(job.prompts) * job.params.n
        with self._service.slots.taking(count, already=1):
            with job.request.naming_its_grammar():
                stream = await self._service.llm.stream(
                    job.prompts, job.params, priority=job.request.priority or 0, cache_salt=job.request.cache_salt or "",
                    arrived=prometheus.arrived(), must_fit="" if self._dialect.clips else job.request.length_field,
                    caller=caller,
                )
            try:
                if job.request.stream:
                    events = EventStream(send, job.headers, self._dialect.framed, scope.get(DIRECT))
                    await self._send_events(stream, job, events)
                else:
                    body = job.writer.body(await stream.complete())
                    if prometheus.wants_timings(job.request.return_timings):
                        body = prometheus.with_timings(body, self._service.llm, stream.outputs)
                    await send_json(send, 200, body, job.headers)
            finally:
                prometheus.note_in_log(self._service.llm, stream.outputs)
                self._service.tracing.ran(job.headers[0][1].decode(), job.params, stream.outputs)
                stream.close()
                stream.error = None                      # which knows this frame: no cycle is left to the garbage collector

    async def _send_events(self, stream: AnswerStream, job: Job, events: EventStream) -> None:
        """Nothing is sent before the first news: until then a failure still has a status of its own.

        Whatever comes after it is written as it comes, in the same moment. Only what a client is too slow for wakes this
        task, and the end.
        """
        timed = prometheus.wants_timings(job.request.return_timings) and not self._dialect.framed

        def written(batch: Batch) -> list[bytes]:
            new = job.writer.events(stream.outputs, batch)
            if new and timed and all(output.finished for output in stream.outputs):
                new[-1] = prometheus.with_timings(new[-1], self._service.llm, stream.outputs)
            return new

        def deliver(batch: Batch) -> bool:
            if not events.is_free:
                return False
            if new := written(batch):
                events.write_now(new)
            return True

        stream.deliver_to(deliver)
        try:
            async for batch in stream:
                # A slow client's deltas wait as such, which is short; only a few at a time become events.
                for place in range(0, len(batch), EVENTS_AT_ONCE):
                    if new := written(batch[place : place + EVENTS_AT_ONCE]):
                        await events.write(new)
            await events.write(job.writer.last_events(stream.outputs))
        except Exception as error:
            if not events.started:
                raise
            status, body, _ = describe(error, names=self._dialect.names)
            await events.write([self._dialect.error_event(job.writer, status, body)])
        await events.end()


def check_media_type(scope: Scope) -> None:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if kind.split(b";")[0].strip().lower() != b"application/json":
        raise WrongMediaType("the body must be JSON and say so: Content-Type: application/json")
    if any(name == b"content-encoding" and value.strip().lower() != b"identity" for name, value in scope["headers"]):
        raise WrongMediaType("the body must not be compressed: Content-Encoding is not supported")


def make_app(service: Service) -> Starlette:
    llm = service.llm

    async def health(request: Request) -> Response:
        blocks = llm.ready.num_blocks if llm.ready else 0
        counts = {"requests": llm.num_open, "running": llm.running, "free_blocks": llm.free_blocks, "num_blocks": blocks}
        return json_response({"status": service.state, **counts}, 200 if service.state == "ok" else 503)

    async def live(request: Request) -> Response:
        return json_response({"status": "ok"})           # this process answers; what its engine does is health's to say

    async def ping(request: Request) -> Response:
        return Response(status_code=200 if service.state == "ok" else 503)

    async def document(request: Request) -> Response:
        return json_response(openapi.document())

    async def metrics_page(request: Request) -> Response:
        return prometheus.metrics_response(llm, service.name, request)

    async def load(request: Request) -> Response:
        return json_response(prometheus.load(llm))

    async def where(request: Request) -> Response:
        seconds = roofline_endpoint.window_seconds(request.query_params.get("seconds"))
        return json_response(roofline_endpoint.document(llm, service.name, service.state, seconds))

    async def page(request: Request) -> Response:
        return dashboard.page()

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    def card(name: str = service.name) -> ModelCard:
        service.require_ready()
        assert llm.ready is not None
        return ModelCard(name, service.created, llm.ready.max_model_len, llm.config.model.model or service.name)

    async def models(request: Request) -> Response:
        if is_for_anthropic(request):
            return json_response(anthropic.ModelList.of([anthropic_card(name) for name in service.names]))
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_name(name)
        return json_response(anthropic_card(name) if is_for_anthropic(request) else card(name))

    def anthropic_card(name: str) -> anthropic.ModelInfo:
        mine = card(name)
        return anthropic.ModelInfo.of(mine.id, mine.created, mine.max_model_len)

    async def tokenizer_info(request: Request) -> Response:
        longest = card().max_model_len
        return json_response(TokenizerInfo.of(llm.get_tokenizer(), longest))

    async def failed(request: Request, error: Exception) -> Response:
        status, body, headers = describe(error)
        body = anthropic_body(status, body) if is_for_anthropic(request) else body
        response = Response(body, status, media_type="application/json")
        response.raw_headers.extend(headers)
        return response

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Generation(service, prepare_chat, prompt_field="messages"), methods=["POST"]),
            Route("/v1/completions", Generation(service, prepare_completion, prompt_field="prompt"), methods=["POST"]),
            Route("/v1/messages", Generation(service, prepare_messages, ANTHROPIC), methods=["POST"]),
            Route("/v1/messages/count_tokens", Question(service, count_tokens, ANTHROPIC), methods=["POST"]),
            Route("/v1/responses", Generation(service, prepare_response, RESPONSES, "input"), methods=["POST"]),
            Route("/v1/responses/input_tokens", Question(service, count_input, RESPONSES, "input"), methods=["POST"]),
            *stored_routes(service),
            Route("/v1/embeddings", Question(service, embed, prompt_field="input"), methods=["POST"]),
            Route("/v1/score", Question(service, score), methods=["POST"]),
            Route("/tokenize", Question(service, tokenize), methods=["POST"]),
            Route("/detokenize", Question(service, detokenize), methods=["POST"]),
            Route("/tokenizer_info", tokenizer_info),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/health/ready", health),
            Route("/health/live", live),
            Route("/ping", ping, methods=["GET", "POST"]),
            Route("/openapi.json", document),
            Route("/version", version),
            Route("/metrics", metrics_page),
            Route("/load", load),
            Route("/roofline", where),
            Route("/dashboard", page),
        ],
        exception_handlers={HTTPException: http_error, RidgelineError: failed},
    )
    app.router.redirect_slashes = False
    return app


def is_for_anthropic(request: Request) -> bool:
    return is_anthropic(request.scope["path"], request.scope["headers"])


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")

"""The HTTP server: OpenAI's endpoints over an AsyncLLM, and the life of the process around them.

    body ─ protocol.parse ─▶ SamplingParams + prompts ─ llm.stream ─▶ AnswerStream ─ protocol.Writer ─▶ JSON or events

Every request runs under a watch for its client: whoever hangs up has its request aborted, streaming or not. No torch,
no pydantic; limits on what a connection may cost are below, in server/limits.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import math
import random
import resource
import secrets
import signal
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline import embedded
from ridgeline.engine.answer_stream import AnswerStream, Batch
from ridgeline.engine.async_llm import AsyncLLM
from ridgeline.engine.caller import expect_first_token
from ridgeline.engine.frontend import Prompt
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, ConfigError, Overloaded, RequestError, RidgelineError, TimedOut, Unsupported
from ridgeline.log import get_logger
from ridgeline.sampling_params import SamplingParams
from ridgeline.server import admin, anthropic, dashboard, metrics, openapi, responses, roofline
from ridgeline.server.body import parse_body
from ridgeline.server.embeddings import EmbeddingReply, EmbeddingRequest
from ridgeline.server.error_bodies import anthropic_body, body_for, error_body
from ridgeline.server.gate import Gate
from ridgeline.server.generation import FIT
from ridgeline.server.hosts import HostGuard, Scope
from ridgeline.server.keys import Keys
from ridgeline.server.limits import ServerOptions, Slots, limited_protocol
from ridgeline.server.protocol import (
    ChatRequest,
    ChatWriter,
    CompletionRequest,
    CompletionWriter,
    GenerationRequest,
    ModelCard,
    Writer,
    param_of,
    parse,
)
from ridgeline.server.stream import (
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
from ridgeline.server.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from ridgeline.server.tools import reading
from ridgeline.server.tracing import NoTracing, start_tracing
from ridgeline.version import __version__

try:
    import uvloop
except ImportError:                  # optional: asyncio's own loop does the same, slower
    uvloop = None  # type: ignore[assignment]

logger = get_logger("server")

LONG_BODY = 64 * 1024                # bytes; a longer body is parsed and checked away from the event loop
KEEP_ALIVE_SECONDS = 30
GOODBYE_SECONDS = 1.0                # for the last words to clients whose requests are cut short
STOPPED = "the engine has stopped"
NOT_READY = {
    "stopping": "the server is stopping",
    "loading": "the engine is not ready",
    "stalled": "the engine does not answer",
    "restarting": "the engine is being started again",
    "dead": STOPPED,
}
EVENTS_AT_ONCE = 4                   # that are written before their client is asked whether it keeps up
LARGE_BLOCK = 512 * 1024             # bytes
_M_MMAP_THRESHOLD = -3               # of malloc.h
COLLECT_AFTER = 50_000               # objects made and not freed, before the youngest are looked through for garbage
DEAD_SECONDS = 2.0                   # how long health answers 503 after the engine's death, before the server leaves


class Unavailable(RidgelineError):
    """The server takes no requests now, and says why in words meant for clients (HTTP 503)."""


class ModelNotFound(RequestError):
    """A request for a model that is not served here (HTTP 404)."""


class WrongMediaType(RequestError):
    """A body that does not say it is JSON (HTTP 415). Browsers cannot send JSON to a foreign site unasked."""


@dataclass(slots=True)
class Service:
    """What the endpoints share."""

    llm: AsyncLLM
    options: ServerOptions
    name: str                        # of the model
    keys: Keys = field(default_factory=Keys)
    slots: Slots = field(default_factory=Slots)
    tracing: NoTracing = field(default_factory=NoTracing)
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, request: GenerationRequest) -> None:
        """What the request's type alone cannot know."""
        self.check_routing(request.model, request.priority)

    def check_routing(self, model: str | None, priority: int | None) -> None:
        if model is not None:
            self.check_name(model)
        if priority and self.llm.config.scheduler.scheduling_policy != "priority":
            raise BadRequest("priority needs a server started with --scheduling-policy priority")

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ModelNotFound(f"the model {name[:200]!r} is not served here; {self.name!r} is")

    def open(self) -> None:
        """The engine is ready: requests are taken from now on."""
        assert self.llm.ready is not None
        self.slots.predicted_wait = self.llm.predicted_wait
        self.llm.max_queued_tokens = self.options.max_queued_tokens
        self.slots.limit = self.options.max_queued_requests or 4 * self.llm.ready.max_num_seqs

    @property
    def state(self) -> str:
        """ok; or why no requests are taken: stopping, loading, stalled, restarting or dead."""
        if self.stopping:
            return "stopping"
        return self.llm.state if self.slots.limit else "loading"

    def require_ready(self) -> None:
        state = self.state
        if state != "ok":
            raise Unavailable(NOT_READY[state])

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.llm.config.model.skip_tokenizer_init else self.llm.get_tokenizer()


def model_name(llm: AsyncLLM, options: ServerOptions) -> str:
    path = Path(llm.config.model.model)
    own = embedded.NAME if not llm.config.model.model else path.stem if path.suffix == ".gguf" else path.resolve().name
    return options.served_model_name or own


# -- errors ------------------------------------------------------------------------------------------------------------


def describe(error: Exception) -> tuple[int, bytes, Headers]:
    """(status, body, headers). What clients read is our own words; the rest goes to the log, under a number."""
    retry = [(b"retry-after", retry_after(error))]
    message = str(error)
    match error:
        case ModelNotFound():
            return 404, error_body(message, "invalid_request_error", "model", "model_not_found"), []
        case WrongMediaType():
            return 415, error_body(message, "invalid_request_error"), []
        case Overloaded():
            return 429, error_body(message, "overloaded_error", code="overloaded"), retry
        case TimedOut():
            return 504, error_body(message, "timeout_error", code="request_timeout"), []
        case BadRequest() | Unsupported():
            return 400, error_body(message, "invalid_request_error", param_of(message)), []
        case RequestError():
            return 500, error_body(message, "server_error"), []
        case RidgelineError():
            # Why an engine died is the operator's to know: its words may quote a path, or another client's request.
            told = message if isinstance(error, Unavailable) else STOPPED
            return 503, error_body(told, "service_unavailable_error", code="engine_not_available"), retry
    number = secrets.token_hex(4)
    logger.error("error %s in a request", number, exc_info=error)
    return 500, error_body(f"internal error {number}; the server's log has its cause", "server_error"), []


def retry_after(error: Exception) -> bytes:
    """Whole seconds, from 1 to 60: the predicted wait, or a few; spread, so that not all come back at once."""
    wait = error.retry_after if isinstance(error, Overloaded) else None
    seconds = random.uniform(1, 5) if wait is None else wait * random.uniform(1.0, 1.25)
    return str(min(60, max(1, math.ceil(seconds)))).encode()


async def http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path'][:200]} does not exist here"
    body = error_body(message, "invalid_request_error", code="not_found")
    body = body_for(request.scope["path"], error.status_code, body)
    return Response(body, error.status_code, media_type="application/json", headers=error.headers)


# -- endpoints ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Job:
    """A request that was understood: what to run, and how to write it down."""

    request: GenerationRequest
    params: SamplingParams
    prompts: list[Prompt]
    writer: Writer
    headers: Headers


class Dialect:
    """How an endpoint tells errors and events, where it is not OpenAI's way for chat."""

    framed = False                   # the writer's events are whole, with a name each

    def error(self, status: int, body: bytes) -> bytes:
        """The body of an error, from what `describe` wrote."""
        return body

    def error_event(self, writer: Any, status: int, body: bytes) -> bytes:
        """The same as the last event of a stream."""
        return body


class NamedEvents(Dialect):
    framed = True

    def error_event(self, writer: Any, status: int, body: bytes) -> bytes:
        return bytes(writer.error_event(status, body))


class AnthropicDialect(NamedEvents):
    def error(self, status: int, body: bytes) -> bytes:
        return anthropic_body(status, body)


CHAT, RESPONSES, ANTHROPIC = Dialect(), NamedEvents(), AnthropicDialect()

T = TypeVar("T")


async def away_if_long(body: bytes, work: Callable[[], T]) -> T:
    """Do `work`, which reads `body`; a long one away from the event loop."""
    return await asyncio.to_thread(work) if len(body) > LONG_BODY else work()


async def chat_job(
    service: Service, request: ChatRequest, params: SamplingParams, prefix: str, writer: Callable[..., ChatWriter]
) -> Job:
    """What every dialect of chat runs."""
    read = reading(request.tool_use(), params, service.options, service.tokenizer)
    tokens = await service.llm.chat_tokens(request.conversation(), **request.template())
    fit(service, request, params)
    if service.tokenizer is not None:
        read.follow(tokens, params, service.tokenizer)
    request_id = f"{prefix}{secrets.token_hex(12)}"
    made = writer(request, params, request_id, service.name, service.tokenizer, read)
    return Job(request, params, [tokens], made, [(b"x-request-id", request_id.encode())])


async def prepare_chat(service: Service, body: bytes) -> Job:
    def work() -> tuple[ChatRequest, SamplingParams]:
        request = parse(ChatRequest, body)
        service.check(request)
        return request, request.params(service.llm.sampling_defaults)

    request, params = await away_if_long(body, work)
    return await chat_job(service, request, params, "chatcmpl-", ChatWriter)


async def prepare_completion(service: Service, body: bytes) -> Job:
    def work() -> tuple[CompletionRequest, SamplingParams]:
        request = parse(CompletionRequest, body)
        service.check(request)
        return request, request.params(service.llm.sampling_defaults)

    request, params = await away_if_long(body, work)
    request_id = f"cmpl-{secrets.token_hex(12)}"
    writer = CompletionWriter(request, params, request_id, service.name, service.tokenizer)
    prompts: list[Prompt] = list(request.prompts())
    if request.add_special_tokens is False:
        prompts = [
            {"prompt": each, "prompt_token_ids": await service.llm.text_tokens(each, False)} if isinstance(each, str) else each
            for each in prompts
        ]
    fit(service, request, params)
    return Job(request, params, prompts, writer, [(b"x-request-id", request_id.encode())])


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
    service.check(request)
    return request, request.params(service.llm.sampling_defaults)


async def prepare_messages(service: Service, body: bytes) -> Job:
    def work() -> tuple[ChatRequest, SamplingParams]:
        return as_chat(service, parse_body(anthropic.MessagesRequest, body))

    request, params = await away_if_long(body, work)
    return await chat_job(service, request, params, "msg_", anthropic.MessagesWriter)


async def count_tokens(service: Service, body: bytes) -> anthropic.TokenCount:
    def work() -> ChatRequest:
        return as_chat(service, parse_body(anthropic.CountRequest, body))[0]

    request = await away_if_long(body, work)
    return anthropic.TokenCount(len(await service.llm.chat_tokens(request.conversation(), **request.template())))


async def prepare_response(service: Service, body: bytes) -> Job:
    def work() -> tuple[responses.ResponsesRequest, ChatRequest, SamplingParams]:
        asked = parse_body(responses.ResponsesRequest, body)
        return asked, *as_chat(service, asked)

    asked, request, params = await away_if_long(body, work)
    return await chat_job(service, request, params, "resp_", partial(responses.ResponsesWriter, asked))


async def tokenize(service: Service, body: bytes) -> TokenizeReply:
    def work() -> tuple[TokenizeRequest, ChatRequest | None]:
        request = parse_body(TokenizeRequest, body)
        if request.model is not None:
            service.check_name(request.model)
        return request, as_chat(service, request)[0] if request.messages is not None else None

    request, chat = await away_if_long(body, work)
    if chat is not None:
        tokens = await service.llm.chat_tokens(chat.conversation(), **chat.template())
    else:
        tokens = await service.llm.text_tokens(request.prompt or "", request.add_special_tokens is not False)
    assert service.llm.ready is not None
    longest, tokenizer = service.llm.ready.max_model_len, service.llm.get_tokenizer()
    return TokenizeReply.of(tokens, longest, tokenizer, bool(request.return_token_strs))


async def detokenize(service: Service, body: bytes) -> DetokenizeReply:
    def work() -> DetokenizeReply:
        request = parse_body(DetokenizeRequest, body)
        if request.model is not None:
            service.check_name(request.model)
        return DetokenizeReply.of(request.tokens, service.llm.get_tokenizer())

    return await away_if_long(body, work)


async def embed(service: Service, body: bytes) -> EmbeddingReply:
    def work() -> tuple[EmbeddingRequest, SamplingParams]:
        request = parse_body(EmbeddingRequest, body)
        service.check_routing(request.model, request.priority)
        return request, request.params()

    request, params = await away_if_long(body, work)
    prompts: list[Prompt] = list(request.prompts())
    with service.slots.taking(len(prompts), already=1):
        stream = await service.llm.stream(
            prompts, params, priority=request.priority or 0, cache_salt=request.cache_salt or "", arrived=metrics.arrived()
        )
        try:
            return EmbeddingReply.of(await stream.complete(), service.name, request.encoding_format)
        finally:
            stream.close()


class Endpoint(ABC):
    """A POST with a JSON body, as a raw ASGI application: the watch over its client, and its errors."""

    def __init__(self, service: Service, dialect: Dialect = CHAT) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._service.require_ready()
            with self._service.slots.taking(1):          # before a byte of the body is looked at
                check_media_type(scope)
                body = await read_body(receive)
                metrics.note_arrival(scope)
                self._service.tracing.note(scope)
                await while_connected(receive, self._answer(scope, body, send))
        except ClientGone:
            pass
        except Exception as error:
            status, told, headers = describe(error)
            await send_json(send, status, self._dialect.error(status, told), headers)

    @abstractmethod
    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None: ...


class Question(Endpoint):
    """An endpoint whose whole answer is one struct."""

    def __init__(
        self, service: Service, answer: Callable[[Service, bytes], Awaitable[Any]], dialect: Dialect = CHAT
    ) -> None:
        super().__init__(service, dialect)
        self._make = answer

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        await send_json(send, 200, msgspec.json.encode(await self._make(self._service, body)))


class Generation(Endpoint):
    """An endpoint that generates."""

    def __init__(
        self, service: Service, prepare: Callable[[Service, bytes], Awaitable[Job]], dialect: Dialect = CHAT
    ) -> None:
        super().__init__(service, dialect)
        self._prepare = prepare

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        with self._service.tracing.request():
            await self._generate(scope, body, send)

    async def _generate(self, scope: Scope, body: bytes, send: Send) -> None:
        job = await self._prepare(self._service, body)
        metrics.switch(self._service.llm, job.request.techniques)
        expect_first_token(job.request.ttft_deadline_ms)
        count = len(job.prompts) * job.params.n
        with self._service.slots.taking(count, already=1):
            stream = await self._service.llm.stream(
                job.prompts, job.params, priority=job.request.priority or 0, cache_salt=job.request.cache_salt or "",
                arrived=metrics.arrived(),
            )  # fmt: skip
            try:
                if job.request.stream:
                    events = EventStream(send, job.headers, self._dialect.framed, scope.get(DIRECT))
                    await self._send_events(stream, job, events)
                else:
                    body = job.writer.body(await stream.complete())
                    if metrics.wants_timings(job.request.return_timings):
                        body = metrics.with_timings(body, self._service.llm, stream.outputs)
                    await send_json(send, 200, body, job.headers)
            finally:
                metrics.note_in_log(self._service.llm, stream.outputs)
                self._service.tracing.ran(job.headers[0][1].decode(), job.params, stream.outputs)
                stream.close()
                stream.error = None                      # which knows this frame: no cycle is left to the garbage collector

    async def _send_events(self, stream: AnswerStream, job: Job, events: EventStream) -> None:
        """Nothing is sent before the first news: until then a failure still has a status of its own.

        Whatever comes after it is written as it comes, in the same moment. Only what a client is too slow for wakes this
        task, and the end.
        """
        timed = metrics.wants_timings(job.request.return_timings) and not self._dialect.framed

        def written(batch: Batch) -> list[bytes]:
            new = job.writer.events(stream.outputs, batch)
            if new and timed and all(output.finished for output in stream.outputs):
                new[-1] = metrics.with_timings(new[-1], self._service.llm, stream.outputs)
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
            status, body, _ = describe(error)
            await events.write([self._dialect.error_event(job.writer, status, body)])
        await events.end()


def check_media_type(scope: Scope) -> None:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if kind.split(b";")[0].strip().lower() != b"application/json":
        raise WrongMediaType("the body must be JSON and say so: Content-Type: application/json")


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

    async def prometheus(request: Request) -> Response:
        return metrics.metrics_response(llm, service.name, request)

    async def load(request: Request) -> Response:
        return json_response(metrics.load(llm))

    async def where(request: Request) -> Response:
        seconds = roofline.window_seconds(request.query_params.get("seconds"))
        return json_response(roofline.document(llm, service.name, service.state, seconds))

    async def page(request: Request) -> Response:
        return dashboard.page()

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    def card() -> ModelCard:
        service.require_ready()
        assert llm.ready is not None
        return ModelCard(service.name, service.created, llm.ready.max_model_len)

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        service.check_name(request.path_params["name"])
        return json_response(card())

    async def failed(request: Request, error: Exception) -> Response:
        status, body, headers = describe(error)
        response = Response(body, status, media_type="application/json")
        response.raw_headers.extend(headers)
        return response

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Generation(service, prepare_chat), methods=["POST"]),
            Route("/v1/completions", Generation(service, prepare_completion), methods=["POST"]),
            Route("/v1/messages", Generation(service, prepare_messages, ANTHROPIC), methods=["POST"]),
            Route("/v1/messages/count_tokens", Question(service, count_tokens, ANTHROPIC), methods=["POST"]),
            Route("/v1/responses", Generation(service, prepare_response, RESPONSES), methods=["POST"]),
            Route("/v1/embeddings", Question(service, embed), methods=["POST"]),
            Route("/tokenize", Question(service, tokenize), methods=["POST"]),
            Route("/detokenize", Question(service, detokenize), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/health/ready", health),
            Route("/health/live", live),
            Route("/ping", ping, methods=["GET", "POST"]),
            Route("/openapi.json", document),
            Route("/version", version),
            Route("/metrics", prometheus),
            Route("/load", load),
            Route("/roofline", where),
            Route("/dashboard", page),
        ],
        exception_handlers={HTTPException: http_error, RidgelineError: failed},
    )
    app.router.redirect_slashes = False
    return app


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


# -- the process -------------------------------------------------------------------------------------------------------


def bind(options: ServerOptions) -> socket.socket:
    """The listening socket, taken before anything is loaded; ConfigError when it cannot be had."""
    host, port = options.host, options.port
    if port > 65535:                                     # some libraries would take it modulo 65536
        raise ConfigError(f"port must be between 0 and 65535, got {port}")
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "is in use; choose another with --port" if taken else f"cannot be used: {error.strerror}"
        raise ConfigError(f"port {port} on {host} {reason}") from None
    listener.setblocking(False)
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn, with our way to stop: let running requests finish for a while, then tell them, then end the engine."""

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            Gate(HostGuard(make_app(service), service.options), service.options, service.keys),
            http=limited_protocol(service.options),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=service.options.ssl_certfile or None,
            ssl_keyfile=service.options.ssl_keyfile or None,
        )
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.stopping = True                    # before anything else: who asks for health looks elsewhere now
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stopping = True
        drained = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        await drained

    async def _drain(self) -> None:
        slots, deadline = self._service.slots, time.monotonic() + self._service.options.drain_timeout
        if slots.taken and self._service.llm.is_alive:
            logger.info("waiting for %d answers to finish; Ctrl-C again stops at once", slots.taken)
            while slots.taken and self._service.llm.is_alive and time.monotonic() < deadline and not self.force_exit:
                await asyncio.sleep(0.05)
        await self._service.llm.shutdown()               # whoever still waits is told now
        deadline = time.monotonic() + GOODBYE_SECONDS
        while slots.taken and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):
            connection.transport.abort()                 # it does not even read its error


async def serve(
    service: Service,
    listener: socket.socket,
    on_loading: Callable[[int, int], None],
    on_ready: Callable[[Service, str], None],
) -> None:
    """Answer on `listener` from now on (503 until the engine is ready), until told to stop. Raises why it cannot go on."""
    llm, server = service.llm, HttpServer(service)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ours from now until the process ends. uvicorn sets the same while it serves and then puts back what was there;
        # it raises again only the signals that its own handle_exit, which ours replaces, has noted.
        signal.signal(number, server.handle_exit)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(llm.start(on_loading))
    try:
        await asyncio.wait({http, starting}, return_when=asyncio.FIRST_COMPLETED)
        if http.done() or server.should_exit:            # told to stop while loading
            return await http
        starting.result()
        service.open()
        collect_rarely()
        on_ready(service, address_of(listener, "https" if service.options.ssl_certfile else "http"))
        died = asyncio.create_task(llm.died())
        await asyncio.wait({http, died}, return_when=asyncio.FIRST_COMPLETED)
        if http.done() or server.should_exit:            # told to stop, and so was the engine
            return await http
        logger.error("%s", died.result())
        await asyncio.sleep(DEAD_SECONDS)
        raise died.result()
    finally:
        server.should_exit = True
        starting.cancel()
        await asyncio.wait({http, starting})
        await llm.shutdown()


def collect_rarely() -> None:
    """What the server is made of will never be garbage, and open streams are long-lived: looking through all of it for
    cycles, which Python does after every 700 objects, takes a third of the time that a token costs here."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


def address_of(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_certificate(options: ServerOptions) -> None:
    """Before anything is loaded."""
    if bool(options.ssl_certfile) != bool(options.ssl_keyfile):
        raise ConfigError("ssl_certfile and ssl_keyfile need each other; give both, or none")
    if options.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_certfile and ssl_keyfile cannot be used: {error}") from None


def run(
    llm: AsyncLLM,
    options: ServerOptions,
    on_loading: Callable[[int, int], None],
    on_ready: Callable[[Service, str], None],
    keys: Keys | None = None,
) -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    check_certificate(options)
    name = model_name(llm, options)
    tracing = start_tracing(options.otlp_traces_endpoint, name)
    listener = bind(options)
    raise_file_limit(options.max_connections)
    give_back_large_blocks()
    service = Service(llm, options, name, keys or Keys(), tracing=tracing)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
            runner.run(admin.beside(llm, options.admin_socket, serve(service, listener, on_loading, on_ready)))
    finally:
        tracing.close()


def give_back_large_blocks() -> None:
    """glibc serves large blocks from the system and gives them back, until it has seen one freed: from then on blocks up to
    that size stay with the process. A threshold that is set once does not move, so a body of 16 MB leaves nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)        # other C libraries have none, and no such habit
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


def raise_file_limit(connections: int) -> None:
    """A connection is a file; the usual soft limit of 1,024 leaves no room for anything else."""
    wanted = 2 * connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))

"""The HTTP server: OpenAI's endpoints over an AsyncLLM, and the life of the process around them.

    body ─ protocol.parse ─▶ SamplingParams + prompts ─ llm.stream ─▶ AnswerStream ─ protocol.Writer ─▶ JSON or events

Every request runs under a watch for its client: whoever hangs up has its request aborted, streaming or not. No torch,
no pydantic; limits on what a connection may cost are below, in server/limits.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import resource
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline import embedded
from ridgeline.engine.async_llm import AnswerStream, AsyncLLM
from ridgeline.engine.frontend import Prompt
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, ConfigError, Overloaded, RequestError, RidgelineError, Unsupported
from ridgeline.log import get_logger
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.hosts import HostGuard
from ridgeline.server.limits import ServerOptions, Slots, error_body, limited_protocol
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
    ClientGone,
    EventStream,
    Headers,
    Receive,
    Send,
    read_body,
    send_json,
    while_connected,
)
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
    slots: Slots = field(default_factory=Slots)
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, request: GenerationRequest) -> None:
        """What the request's type alone cannot know."""
        if request.model is not None:
            self.check_name(request.model)
        if request.priority and self.llm.config.scheduler.scheduling_policy != "priority":
            raise BadRequest("priority needs a server started with --scheduling-policy priority")

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ModelNotFound(f"the model {name[:200]!r} is not served here; {self.name!r} is")

    def open(self) -> None:
        """The engine is ready: requests are taken from now on."""
        assert self.llm.ready is not None
        self.slots.limit = self.options.max_queued_requests or 4 * self.llm.ready.max_num_seqs

    @property
    def state(self) -> str:
        if self.stopping:
            return "stopping"
        if not self.slots.limit:
            return "loading"
        return "ok" if self.llm.is_alive else "dead"

    def require_ready(self) -> None:
        if self.state != "ok":
            raise Unavailable(
                {"stopping": "the server is stopping", "loading": "the engine is not ready", "dead": STOPPED}[self.state]
            )

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
    retry = [(b"retry-after", str(random.randint(1, 5)).encode())]
    message = str(error)
    match error:
        case ModelNotFound():
            return 404, error_body(message, "invalid_request_error", "model", "model_not_found"), []
        case WrongMediaType():
            return 415, error_body(message, "invalid_request_error"), []
        case Overloaded():
            return 429, error_body(message, "overloaded_error", code="overloaded"), retry
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


async def http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path'][:200]} does not exist here"
    body = error_body(message, "invalid_request_error", code="not_found")
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


T = TypeVar("T", ChatRequest, CompletionRequest)


async def understand(service: Service, kind: type[T], body: bytes) -> tuple[T, SamplingParams]:
    """The request and how it wants to be sampled, both checked."""

    def work() -> tuple[T, SamplingParams]:
        request = parse(kind, body)
        service.check(request)
        return request, request.params(service.llm.sampling_defaults)

    return await asyncio.to_thread(work) if len(body) > LONG_BODY else work()


async def prepare_chat(service: Service, body: bytes) -> Job:
    request, params = await understand(service, ChatRequest, body)
    tokens = await service.llm.chat_tokens(request.conversation(), **request.template())
    request_id = f"chatcmpl-{secrets.token_hex(12)}"
    writer = ChatWriter(request, params, request_id, service.name, service.tokenizer)
    return Job(request, params, [tokens], writer, [(b"x-request-id", request_id.encode())])


async def prepare_completion(service: Service, body: bytes) -> Job:
    request, params = await understand(service, CompletionRequest, body)
    request_id = f"cmpl-{secrets.token_hex(12)}"
    writer = CompletionWriter(request, params, request_id, service.name, service.tokenizer)
    return Job(request, params, list(request.prompts()), writer, [(b"x-request-id", request_id.encode())])


class Generation:
    """An endpoint that generates, as a raw ASGI application."""

    def __init__(self, service: Service, prepare: Callable[[Service, bytes], Awaitable[Job]]) -> None:
        self._service = service
        self._prepare = prepare

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            self._service.require_ready()
            with self._service.slots.taking(1):          # before a byte of the body is looked at
                check_media_type(scope)
                body = await read_body(receive)
                await while_connected(receive, self._answer(body, send))
        except ClientGone:
            pass
        except Exception as error:
            await send_json(send, *describe(error))

    async def _answer(self, body: bytes, send: Send) -> None:
        job = await self._prepare(self._service, body)
        count = len(job.prompts) * job.params.n
        with self._service.slots.taking(count, already=1):
            stream = await self._service.llm.stream(
                job.prompts, job.params, priority=job.request.priority or 0, cache_salt=job.request.cache_salt or ""
            )
            try:
                if job.request.stream:
                    await send_events(stream, job, send)
                else:
                    await send_json(send, 200, job.writer.body(await stream.complete()), job.headers)
            finally:
                stream.close()


async def send_events(stream: AnswerStream, job: Job, send: Send) -> None:
    """Nothing is sent before the first news: until then a failure still has a status of its own."""
    events = EventStream(send, job.headers)
    try:
        async for batch in stream:
            if new := job.writer.events(stream.outputs, batch):
                await events.write(new)
        await events.write(job.writer.last_events(stream.outputs))
    except Exception as error:
        if not events.started:
            raise
        _, body, _ = describe(error)
        await events.write([body])
    await events.end()


def check_media_type(scope: MutableMapping[str, Any]) -> None:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if kind.split(b";")[0].strip().lower() != b"application/json":
        raise WrongMediaType("the body must be JSON and say so: Content-Type: application/json")


def make_app(service: Service) -> Starlette:
    llm = service.llm

    async def health(request: Request) -> Response:
        blocks = llm.ready.num_blocks if llm.ready else 0
        counts = {"requests": llm.num_open, "running": llm.running, "free_blocks": llm.free_blocks, "num_blocks": blocks}
        return json_response({"status": service.state, **counts}, 200 if service.state == "ok" else 503)

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
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/version", version),
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
            HostGuard(make_app(service), service.options),
            http=limited_protocol(service.options),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
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
        on_ready(service, address_of(listener))
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


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    llm: AsyncLLM,
    options: ServerOptions,
    on_loading: Callable[[int, int], None],
    on_ready: Callable[[Service, str], None],
) -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    listener = bind(options)
    raise_file_limit(options.max_connections)
    service = Service(llm, options, model_name(llm, options))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        runner.run(serve(service, listener, on_loading, on_ready))


def raise_file_limit(connections: int) -> None:
    """A connection is a file; the usual soft limit of 1,024 leaves no room for anything else."""
    wanted = 2 * connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))

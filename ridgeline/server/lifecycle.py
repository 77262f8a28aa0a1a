"""The server's process: it binds its port, answers while the engine loads, and shuts down in order.

Runs server/app in uvicorn with a shutdown of our own, signals, TLS, and the system limits that thousands of connections need.
Knows no endpoints.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.long_work import num_done
from ridgeline.errors import ConfigError
from ridgeline.process import spare_files
from ridgeline.process.log import get_logger
from ridgeline.server.app import make_app
from ridgeline.server.body_process import settings_of
from ridgeline.server.body_work import RESULTS
from ridgeline.server.event_loop import new_event_loop
from ridgeline.server.give_back import MemoryKeeper, collect_rarely, give_back_large_blocks
from ridgeline.server.http.accepting import Acceptor
from ridgeline.server.http.connection_limits import LINGERING, PROBES_BEYOND, limited_protocol
from ridgeline.server.http.error_bodies import all_in_use, refusal
from ridgeline.server.http.gate import Gate
from ridgeline.server.http.hosts import HostGuard
from ridgeline.server.http.idle_connections import make_room
from ridgeline.server.http.keys import Keys
from ridgeline.server.http.root_path import RootPath
from ridgeline.server.last_exit import LastExit
from ridgeline.server.long_bodies import LongBodies
from ridgeline.server.observe import admin
from ridgeline.server.observe.health import HealthChecks
from ridgeline.server.observe.tracing import start_tracing
from ridgeline.server.options import ServerOptions
from ridgeline.server.service import Service, model_name

logger = get_logger("server")

KEEP_ALIVE_SECONDS = 30
BACKLOG = 2048                       # connections that may wait to be accepted
# Bytes that the system takes for a client and cannot send yet. It would take megabytes, and the next only when a third of them is
# read: a client that reads a megabyte a second would look like one that pauses for a second (server/unread.py).
SYSTEM_UNSENT = 128 * 1024
GOODBYE_SECONDS = 1.0                # for the last errors to clients whose requests are cut short
# Open besides connections: 28 pipes, sockets to the engine and logs, the reserve for another engine, and refused connections.
OTHER_FILES = 30 + spare_files.COUNT + LINGERING + PROBES_BEYOND
NO_FILES_SECONDS = 10.0              # between two log lines about file descriptors
EXIT_SECONDS = 1.5                   # beyond the drain time and the goodbyes, after which the process ends whatever still runs
SWITCH_SECONDS = 0.001               # a thread that reads a long request gives way to the event loop after this
DEAD_SECONDS = 2.0                   # how long /health answers 503 after the engine's death, before the server exits


def bind(options: ServerOptions) -> socket.socket:
    """The listening socket, taken before anything is loaded; ConfigError when it cannot be had."""
    host, port = options.host, options.port
    if port > 65535:                                     # some libraries would take it modulo 65536
        raise ConfigError(f"port must be between 0 and 65535, got {port}")
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):                          # of systems without it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SYSTEM_UNSENT)     # connections inherit it
        listener.bind(address)
        listener.listen(BACKLOG)
    except UnicodeError as error:                        # a part of the name is empty, or longer than 63 letters
        raise ConfigError(f"host {host} is no name of a host: {error.__cause__ or error}") from None
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "is in use; choose another with --port" if taken else f"cannot be used: {error.strerror}"
        raise ConfigError(f"port {port} on {host} {reason}") from None
    listener.setblocking(False)
    return listener


def http_config(app: Any, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_protocol(options),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=options.ssl_certfile or None,
        ssl_keyfile=options.ssl_keyfile or None,
    )


class ListeningServer(uvicorn.Server):
    """uvicorn, with connections accepted by server/http/accepting."""

    def __init__(self, config: uvicorn.Config, most_connections: int) -> None:
        super().__init__(config)
        self.most_connections = most_connections + LINGERING

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.servers = [self._accepting(listener) for listener in sockets or []]     # type: ignore[misc]

    def _accepting(self, listener: socket.socket) -> Acceptor:
        config, state = self.config, self.server_state

        def make_protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(         # type: ignore[assignment, call-arg]
                config=config, server_state=state, app_state=self.lifespan.state,
            )
            return made

        listener.setblocking(False)
        connections = state.connections
        return Acceptor(
            listener, make_protocol, config.ssl, lambda: self.most_connections - len(connections), lambda: make_room(connections),
            PROBES_BEYOND, refusal(503, all_in_use(self.most_connections - LINGERING)),
        )


class HttpServer(ListeningServer):
    """uvicorn with a graceful shutdown: let running requests finish for a while, then fail them and end the engine."""

    def __init__(self, service: Service) -> None:
        guarded = HostGuard(HealthChecks(make_app(service), service), service.options, len(service.keys) > 0)
        app = RootPath(Gate(guarded, service.options, service.keys), service.options.root_path)
        super().__init__(http_config(app, service.options), service.options.max_connections)
        self._service = service
        self.last_exit: LastExit | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.stopping = True                    # first of all: load balancers see it in /health and look elsewhere
        if self.last_exit is not None:
            drain = 0 if self.should_exit else self._service.options.drain_timeout
            self.last_exit.within(drain + GOODBYE_SECONDS + EXIT_SECONDS)
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stopping = True
        drained = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        await drained

    async def _drain(self) -> None:
        service, deadline = self._service, time.monotonic() + self._service.options.drain_timeout
        if service.num_open and service.llm.is_alive:
            logger.info("waiting for %d answers to finish; Ctrl-C again stops at once", service.num_open)
            while service.num_open and service.llm.is_alive and time.monotonic() < deadline and not self.force_exit:
                await asyncio.sleep(0.05)
        await service.llm.shutdown()                     # fails the requests that are still open
        deadline = time.monotonic() + GOODBYE_SECONDS
        while service.slots.taken and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):
            connection.transport.abort()                 # a client that does not even read its error


def end_signals() -> list[signal.Signals]:
    """Those that end a server in order: SIGHUP too, the end of its terminal, unless it was started with nohup."""
    hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


async def serve(
    service: Service,
    listener: socket.socket,
    on_loading: Callable[[int, int], None],
    on_ready: Callable[[Service, str], None],
) -> None:
    """Serve on `listener` until a signal stops it; 503 until the engine is ready. Raises the reason if it cannot go on."""
    llm, server = service.llm, HttpServer(service)
    keeper: asyncio.Task[None] | None = None
    server.last_exit = LastExit()
    asyncio.get_running_loop().set_exception_handler(NoFiles())
    for number in end_signals():
        # Until the process ends. uvicorn sets the same handler while it serves, restores the old one afterwards, and raises
        # again only the signals that its own handle_exit (replaced here) has noted.
        signal.signal(number, server.handle_exit)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(llm.start(on_loading))
    try:
        await asyncio.wait({http, starting}, return_when=asyncio.FIRST_COMPLETED)
        if http.done() or server.should_exit:            # stopped while loading
            return await http
        starting.result()
        service.open()
        collect_rarely()
        keeper = asyncio.create_task(MemoryKeeper(lambda: not service.num_open, num_done).watch())
        on_ready(service, address_of(listener, "https" if service.options.ssl_certfile else "http"))
        died = asyncio.create_task(llm.died())
        await asyncio.wait({http, died}, return_when=asyncio.FIRST_COMPLETED)
        if http.done() or server.should_exit:            # stopped, and the engine with it
            return await http
        logger.error("%s", died.result())
        await asyncio.sleep(DEAD_SECONDS)
        raise died.result()
    finally:
        server.should_exit = True
        starting.cancel()
        if keeper is not None:
            keeper.cancel()
        await asyncio.wait({http, starting})
        await llm.shutdown()


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
    options = replace(options, max_connections=raise_file_limit(options.max_connections))
    spare_files.keep()
    give_back_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    service = Service(llm, options, name, keys or Keys(), tracing=tracing)
    service.reader = LongBodies(RESULTS, lambda: settings_of(service), service.stored)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(admin.beside(llm, options.admin_socket, serve(service, listener, on_loading, on_ready)))
    finally:
        service.reader.close()
        tracing.close()


def raise_file_limit(connections: int, each: int = 1, others: int = 0) -> int:
    """Raise the limit on file descriptors, of which a connection needs `each`. How many connections there may be."""
    wanted = (each + 1) * connections + 256 + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fits = min(connections, (soft - OTHER_FILES - others) // each)
    if fits < 1:
        needed = OTHER_FILES + others + each
        raise ConfigError(f"this process may have {soft} files open (ulimit -n); the server needs at least {needed}")
    if fits < connections:
        logger.warning(
            "at most %d connections instead of %d: this process may have %d files open (ulimit -n)", fits, connections, soft
        )
    return fits


class NoFiles:
    """asyncio's handler of unawaited errors, with one log line every few seconds when file descriptors run out: asyncio would log
    each of two thousand failed accepts with a traceback, and try again a second later."""

    def __init__(self) -> None:
        self._logged = -NO_FILES_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept() out of system resource"):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged >= NO_FILES_SECONDS:
            self._logged = time.monotonic()
            logger.warning("out of file descriptors: new connections wait until one closes (raise `ulimit -n`)")

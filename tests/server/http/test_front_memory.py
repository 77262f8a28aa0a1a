"""Memory of the front end: what requests leave behind, and what waits in line."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_server import ScriptedServer, connect, post
from served_model import wait_until, write_model
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.engine.client.long_work import num_done
from ridgeline.server.api.openai.embeddings import Embedding, EmbeddingReply, EmbeddingUsage
from ridgeline.server.api.vllm.tokenize import DetokenizeReply, TokenizeReply
from ridgeline.server.endpoints import Question, encoded, num_items
from ridgeline.server.http import admission, connection_limits, pipelining
from ridgeline.server.http.connection_limits import LimitedProtocol, limited_protocol
from ridgeline.server.http.pipelining import MAX_IN_LINE, TURNS_AT_ONCE, Turns
from ridgeline.server.options import ServerOptions

LONG = "x" * 100_000                 # longer than what is parsed on the event loop
TURN = [{"role": "user", "content": "a"}]
NAME = "tiny"

# Of every endpoint with a body: answered and refused, streamed and whole.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": TURN, "metadata": {"a": LONG}}),
    ("chat/completions", {"messages": TURN, "metadata": {"a": LONG}, "stream": True}),
    ("chat/completions", {"messages": TURN, "chat_template_kwargs": {"a": LONG}, "stream": True}),
    ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ("chat/completions", {"messages": TURN, LONG: 1}),
    ("completions", {"prompt": "a", "user": LONG, "stream": True}),
    ("completions", {"prompt": "a", "user": LONG, "temperature": -1}),
    ("messages", {"model": NAME, "max_tokens": 3, "messages": TURN, "metadata": {"a": LONG}, "stream": True}),
    ("messages", {"model": NAME, "max_tokens": 3, "messages": [{"role": "user", "content": LONG}]}),
    ("messages/count_tokens", {"model": NAME, "messages": [{"role": "user", "content": LONG}]}),
    ("responses", {"input": "a", "user": LONG}),
    ("responses", {"input": "a", "user": LONG, "stream": True}),
    ("responses", {"input": "a", "instructions": LONG}),
    ("responses/input_tokens", {"input": LONG}),
    ("embeddings", {"input": "a", "dimensions": 8, "user": LONG}),
    ("score", {"text_1": LONG, "text_2": "a"}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    ("/detokenize", {"tokens": [1] * 40_000}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / NAME)
    with ScriptedServer(model, lambda prompt: "yes, it is") as made:
        yield made


# -- cycles ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cycles(server: ScriptedServer) -> Iterator[Any]:
    """Without the collector: the types of objects of this package or of the HTTP server that only it would free."""

    def found() -> list[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            kinds = [type(each) for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        own = ("ridgeline.", "uvicorn.", "asyncio", "_asyncio", "starlette.")
        # asyncio's transports refer to their own methods; they are small, and hold nothing once they are closed.
        names = {kind.__qualname__ for kind in kinds if kind.__module__.startswith(own)}
        return sorted(names - {"_SelectorSocketTransport", "TransportSocket"})

    gc.collect()
    gc.freeze()                          # what was there before the request is not looked at again
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


def settled(server: ScriptedServer) -> None:
    """Nothing of a request or a connection runs any more."""
    wait_until(lambda: not server.service.slots.taken and not server._server.server_state.connections)
    wait_until(lambda: not server._server.server_state.tasks)
    server.run_what_is_due()


@pytest.mark.reliability("H-01c")
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda given: given if isinstance(given, str) else "")
def test_a_request_leaves_no_cycle(server: ScriptedServer, cycles: Any, path: str, body: dict[str, Any]) -> None:
    request = post(path, body)
    with connect(server) as connection:
        connection.sendall(request.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost", 1))
        assert connection.recv(65536).startswith(b"HTTP/1.1 ")
        while connection.recv(65536):
            pass
    settled(server)
    assert cycles() == []


@pytest.mark.reliability("H-01c")
@pytest.mark.parametrize("sent", [0.5, 1.0], ids=["half of the body", "before the answer"])
@pytest.mark.parametrize("place", [1, 3, 11], ids=["chat", "template", "responses"])
def test_a_client_that_leaves_leaves_no_cycle(server: ScriptedServer, cycles: Any, place: int, sent: float) -> None:
    request = post(*REQUESTS[place])
    with connect(server) as connection:
        connection.sendall(request[: int(len(request) * sent)])
        time.sleep(0.02)
    settled(server)
    assert cycles() == []


@pytest.mark.reliability("H-01c")
@pytest.mark.parametrize(
    "request_", [b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n",
                 b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"],
    ids=["in line", "HTTP/1.0", "upgrade"],
)
def test_unread_requests_in_line_leave_no_cycle(server: ScriptedServer, cycles: Any, request_: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request_ * 50)
        time.sleep(0.02)
    settled(server)
    assert cycles() == []


# -- requests in line --------------------------------------------------------------------------------------------------


CONNECTED = socket.socketpair()


class Transport:
    """A connection as far as the protocol looks at it."""

    def __init__(self) -> None:
        self.reads = True
        self.written = b""
        self.is_aborted = False
        self.max_size = 0                # as asyncio's transports: bytes that are read at once

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return CONNECTED[0] if name == "socket" else default

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True

    def set_write_buffer_limits(self, high: int) -> None: ...


class Begun:
    def add_done_callback(self, callback: Any) -> None: ...


class Tasks:
    """An event loop that begins nothing; it only counts what would begin."""

    def time(self) -> float:
        return 0.0

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.soon: list[Any] = []

    def create_task(self, coroutine: Any) -> Any:
        self.begun.append(coroutine)
        return Begun()

    def call_later(self, seconds: float, callback: Any, *args: Any) -> Any:
        return SimpleNamespace(cancel=lambda: None)

    def call_soon(self, callback: Any, *args: Any) -> None:
        self.soon.append((callback, args))

    def run_soon(self) -> None:
        while self.soon:
            callback, args = self.soon.pop(0)
            callback(*args)

    def close(self) -> None:
        for coroutine in self.begun:
            coroutine.close()


def protocol_of(loop: Tasks) -> LimitedProtocol:
    config = SimpleNamespace(
        loaded=True, loaded_app=None, ws_protocol_class=None, root_path="", asgi_version="3.0", limit_concurrency=None,
        timeout_keep_alive=5, reset_contextvars=False,
    )
    state = SimpleNamespace(connections=set(), tasks=set(), default_headers=[], total_requests=0)
    made = limited_protocol(ServerOptions())(config, state, {}, loop)                # type: ignore[arg-type]
    made.connection_made(Transport())                    # type: ignore[arg-type]
    return made


GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.reliability("H-01d")
@pytest.mark.parametrize("request_", [GET, POST, CHUNKED], ids=["GET", "POST", "chunked"])
@pytest.mark.parametrize("size", [1, 7, 1000, 65536], ids=lambda size: f"pieces of {size}")
def test_few_requests_wait_in_line_and_all_begin_in_order(request_: bytes, size: int) -> None:
    count = 40
    data = b"".join(request_.replace(b"/x", b"/%d" % number) for number in range(count))
    loop = Tasks()
    made = protocol_of(loop)
    transport: Any = made.transport
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    most = 0
    paths: list[str] = []
    while len(paths) < count:
        while pieces and transport.reads:
            made.data_received(pieces.pop(0))
            most = max(most, len(made.pipeline))
            loop.run_soon()
        coroutine = loop.begun.pop(0)
        cycle = coroutine.cr_frame.f_locals["self"]
        coroutine.close()
        paths.append(cycle.scope["path"])
        cycle.response_complete = True
        made.on_response_complete()
        loop.run_soon()
    # A chunked body has no length: what follows its end in the same piece is parsed with it.
    assert most <= (MAX_IN_LINE if request_ != CHUNKED else 2 * MAX_IN_LINE + pipelining.PIECE // len(CHUNKED))
    assert paths == [f"/{number}" for number in range(count)]
    assert not pieces and transport.written == b""


@pytest.mark.reliability("H-01d")
def test_a_lost_connection_frees_its_line() -> None:
    loop = Tasks()
    made = protocol_of(loop)
    made.data_received(GET * 100)
    assert len(made.pipeline) == MAX_IN_LINE and len(made._unread) > 80 * len(GET)
    waiting = weakref.ref(made.pipeline[0][0])
    gone = weakref.ref(made)
    gc.disable()
    try:
        made.connection_lost(None)
        loop.close()
        loop.begun.clear()
        assert waiting() is None
        del made
        assert gone() is None
    finally:
        gc.enable()


def test_a_few_connections_leave_their_lines_per_turn_of_the_loop() -> None:
    """So a thousand connections with long lines do not hold up a request that just came."""
    loop, turns = Tasks(), Turns()
    begun: list[int] = []
    for number in range(3 * TURNS_AT_ONCE):
        turns.wait(partial(begun.append, number), loop)  # type: ignore[arg-type]
    assert len(loop.soon) == 1
    callback, args = loop.soon.pop()
    callback(*args)
    assert begun == list(range(TURNS_AT_ONCE)) and len(loop.soon) == 1 and len(turns) == 2 * TURNS_AT_ONCE


def test_a_body_of_tiny_chunks_is_refused(server: ScriptedServer) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"1\r\n \r\n" * 3000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    with connect(server) as connection:
        connection.sendall(head + b"40\r\n" + b" " * 64 + b"\r\n" + b'e\r\n{"prompt":"a"}\r\n' + b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


# -- bodies on their way ------------------------------------------------------------------------------------------------

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.reliability("H-01c")
@pytest.mark.parametrize("answered", [False, True])
def test_a_body_whose_client_has_left_is_read_no_further(monkeypatch: pytest.MonkeyPatch, answered: bool) -> None:
    """The system holds the rest of it, and of a thousand others. But a client that closed its sending side may read a refusal."""
    made = protocol_of(loop := Tasks())
    transport: Any = made.transport
    monkeypatch.setattr(connection_limits, "has_left", lambda transport: True)
    made.data_received(HEAD + bytes(3000))
    assert not transport.is_aborted
    made.cycle.response_started = answered
    made.data_received(bytes(3000))
    assert transport.is_aborted == (not answered) and made._arriving.body_bytes == 3000 * (1 + answered)
    loop.close()


@pytest.mark.parametrize("length", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"], ids=["declared", "chunked"])
def test_a_body_is_read_in_large_parts_while_there_is_room_for_it(length: bytes) -> None:
    """A gigabyte in parts of 16 KiB took the event loop longer than its clients, and all of their bodies waited in memory."""
    made = protocol_of(loop := Tasks())
    transport: Any = made.transport
    chunked = b"chunked" in length
    made.data_received(b"POST /x HTTP/1.1\r\nHost: a\r\n" + length + b"\r\n\r\n" + (b"f4240\r\n" if chunked else b""))
    assert transport.max_size == connection_limits.READ_BYTES
    direct: Any = cast(Any, made.cycle.scope)[connection_limits.DIRECT]
    direct.read_much()                                   # it has leave
    assert transport.max_size == connection_limits.BODY_READ_BYTES
    made.data_received(bytes(1_000_000) + (b"\r\n0\r\n\r\n" if chunked else b""))
    loop.run_soon()
    assert not made.cycle.more_body and transport.max_size == connection_limits.READ_BYTES
    direct.read_much()
    assert transport.max_size == connection_limits.READ_BYTES        # it is here already
    loop.close()


def test_a_body_has_leave_before_more_than_its_first_bytes_are_read(server: ScriptedServer) -> None:
    """The first 64 KiB of each of three thousand bodies that waited were 400 MB."""
    held, request = server.service.bodies, post("/tokenize", {"prompt": "x" * 300_000})
    with connect(server) as long, connect(server) as short:
        short.sendall(post("/tokenize", {"prompt": "x" * 60_000})[:1000])
        long.sendall(request[:1000])
        wait_until(lambda: held.num_bytes > 0)
        assert 300_000 < held.num_bytes < 300_100 and [body.size < 1000 for body in held.arriving] == [True]
    wait_until(lambda: not held.num_bytes)


@pytest.mark.parametrize("line", [b"1\r\na\r\n", b"4\r\n\r\n\r\n\r\n"], ids=["bytes", "empty lines"])
def test_a_large_part_of_small_chunks_is_parsed_in_turns(line: bytes) -> None:
    """Eight bodies with a large chunk first and 160,000 small ones behind it held /health up for a second."""
    made = protocol_of(loop := Tasks())
    made.data_received(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    count = connection_limits.BODY_READ_BYTES // len(line)
    for data in (b"a00000\r\n" + bytes(0xA00000) + b"\r\n", line * count, b"0\r\n\r\n"):
        turns = [made._arriving.chunks]
        made.data_received(data)
        turns.append(made._arriving.chunks)
        while loop.soon:
            callback, args = loop.soon.pop(0)
            callback(*args)
            turns.append(made._arriving.chunks)
        assert max(after - before for before, after in pairwise(turns)) < 4000
    assert made._arriving.body_bytes == 0xA00000 + len(line[3:-2]) * count
    assert not made.cycle.more_body and not made._refused
    loop.close()


@pytest.mark.parametrize("line", [b"a", b"a\r\n\r\n"], ids=["text", "empty lines"])
def test_a_chunked_body_is_parsed_in_few_parts(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    """It ends with an empty line, so a part without one has one request at most."""
    parts: list[bytes] = []
    parse = HttpToolsProtocol.data_received

    def counted(protocol: HttpToolsProtocol, data: bytes) -> None:
        parts.append(data)
        parse(protocol, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", counted)
    made = protocol_of(loop := Tasks())
    data = (line * 16_384)[:16_384]
    sent = CHUNKED.partition(b"3\r\n")[0] + (b"4000\r\n" + data + b"\r\n") * 4 + b"0\r\n\r\n" + GET
    for place in range(0, len(sent), connection_limits.READ_BYTES):
        made.data_received(sent[place : place + connection_limits.READ_BYTES])
        loop.run_soon()
    assert b"".join(parts) == sent and bytes(made._answered.body) == 4 * data            # type: ignore[union-attr]
    assert len(parts) <= (8 if line == b"a" else len(sent) / pipelining.PIECE + 8) and len(made.pipeline) == 1
    loop.close()


# -- bodies held ---------------------------------------------------------------------------------------------------------


def test_an_endpoint_lets_go_of_the_body_before_the_engine_is_asked(server: ScriptedServer) -> None:
    """An embedding may wait for minutes, and the bodies of others count against the same limit."""
    held: list[int] = []

    async def read(service: Any, caller: Any, body: bytes) -> bytes:
        held.append(service.bodies.num_bytes)
        return b"{}"

    async def then(service: Any, caller: Any, read: bytes) -> bytes:
        held.append(service.bodies.num_bytes)
        return read

    async def receive() -> dict[str, Any]:
        if not held:
            return {"type": "http.request", "body": LONG.encode()}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        pass

    scope = {"headers": [(b"content-type", b"application/json")], "path": "/x"}
    asyncio.run(Question(server.service, read, then=then)(scope, receive, send))         # type: ignore[arg-type]
    assert held == [len(LONG), 0]


def test_a_long_answer_is_encoded_away_from_the_event_loop() -> None:
    few, many = [0.5] * 8, [0.5] * 4096
    for numbers, away in ((few, 0), (many, 1)):
        reply = EmbeddingReply([Embedding(0, numbers)] * 4, "tiny", EmbeddingUsage(1, 1))
        before = num_done()
        assert len(json.loads(asyncio.run(encoded(reply)))["data"][3]["embedding"]) == len(numbers)
        assert num_done() - before == away
    assert num_items(DetokenizeReply("x" * 70_000, "")) == 70_000
    assert num_items(TokenizeReply(3, 9, [1, 2, 3], ["ab", "c", "d"])) == 3 + 6
    assert asyncio.run(encoded(b"{}")) == b"{}"


def left_behind(kind: str) -> int:
    """Objects of this class that only a garbage collection would free, or that are in use."""
    return sum(type(each).__name__ == kind for each in gc.get_objects())


@pytest.mark.parametrize("sent", [b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(server: ScriptedServer, sent: bytes) -> None:
    """asyncio's transports refer to themselves: 3,000 clients that leave would be a collection of 0.1 s."""
    gc.collect()
    gc.disable()
    try:
        before = left_behind("_SelectorSocketTransport")
        for _ in range(10):
            with connect(server) as connection:
                connection.sendall(sent)
                if sent.endswith(b"\n"):
                    connection.recv(1000)
        wait_until(lambda: left_behind("_SelectorSocketTransport") <= before)
    finally:
        gc.enable()


def test_a_body_whose_client_leaves_while_it_waits_leaves_nothing_to_the_garbage_collector(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.01)
    held, request = server.service.bodies, post("/v1/chat/completions", {"messages": TURN, "user": "x" * 300_000})
    monkeypatch.setattr(held, "most", 0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            with connect(server) as connection:
                connection.sendall(request[:200_000])
                wait_until(lambda: held.num_waiting > 0)
        wait_until(lambda: not held.num_waiting and not left_behind("_Waiter") and not left_behind("Body"))
    finally:
        gc.enable()

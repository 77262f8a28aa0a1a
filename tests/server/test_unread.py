"""Answers that their clients do not read: what waits over all connections, and who is closed."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from served_model import wait_until

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.server import unread
from ridgeline.server.answer_writes import CountedAnswer
from ridgeline.server.api import docs_page, first_contact, openapi
from ridgeline.server.app import _pages
from ridgeline.server.http.connection_limits import limited_protocol
from ridgeline.server.http.stream import EventStream, send_json
from ridgeline.server.lifecycle import SYSTEM_UNSENT, bind
from ridgeline.server.options import ServerOptions
from ridgeline.server.unread import BEHIND, PACE, SPARE_SECONDS, WRITE_SECONDS, Unread, Waiting

KIB, MIB = 2**10, 2**20


class Transport:
    def __init__(self) -> None:
        self.buffered = 0
        self.closed = False

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def abort(self) -> None:
        self.closed = True


class Account:
    """An Unread with a clock of its own; `wait` lets a second go by as its watch would."""

    def __init__(self, patient: int = MIB, most: int = 100 * MIB) -> None:
        self.now = 0.0
        self.unread = Unread(patient, most, lambda: self.now)
        self.unread._is_watched = True                   # the tests look themselves

    def add(self, buffered: int, behind: int = 0) -> tuple[Transport, Waiting]:
        transport = Transport()
        waiting = Waiting(transport)                     # type: ignore[arg-type]
        transport.buffered = buffered
        waiting.behind = lambda: behind
        self.unread.begin(waiting)
        return transport, waiting

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        self.unread.look()


def test_little_may_wait_for_as_long_as_any_client_may_pause() -> None:
    account = Account()
    transport, _ = account.add(16 * KIB, 1000 * KIB)
    account.pass_(WRITE_SECONDS)
    assert not transport.closed
    account.pass_(0.1)
    assert transport.closed and account.unread.num_bytes == 0


def test_when_much_waits_those_that_pause_are_closed_the_largest_first_until_little_does() -> None:
    account = Account()
    small = [account.add(16 * KIB)[0] for _ in range(8)]
    large = [account.add(0, size * MIB)[0] for size in (2, 3)]
    account.pass_(SPARE_SECONDS)
    late, _ = account.add(0, 512 * KIB)                  # it has its own seconds
    assert not any(each.closed for each in large)
    account.pass_(SPARE_SECONDS / 2)
    assert all(each.closed for each in large) and not late.closed and not any(each.closed for each in small)


def test_above_the_bound_a_client_that_reads_fast_keeps_its_long_answer() -> None:
    """Whatever their pace, the largest was closed first: a client that would have had it in a second, beside others that made
    all wait for a minute."""
    account = Account()
    slow = [account.add(64 * KIB, 20 * MIB)[0] for _ in range(2)]
    fast, waiting = account.add(64 * KIB, 50 * MIB)
    for _ in range(10):                                  # 60 MiB in a second
        account.now += 0.1
        account.unread.end(waiting)
        waiting.sent = 64 * KIB + 6 * MIB
        account.unread.begin(waiting)
    last = account.add(64 * KIB, 20 * MIB)[0]
    assert [each.closed for each in (*slow, fast, last)] == [True, True, False, False]


def test_many_small_answers_are_as_much_as_a_large_one() -> None:
    account = Account()
    transports = [account.add(64 * KIB)[0] for _ in range(100)]
    account.pass_(SPARE_SECONDS + 1)
    assert sum(each.closed for each in transports) == 100 - MIB // (64 * KIB)
    assert account.unread.num_bytes == MIB


def test_what_grows_while_its_client_does_not_read_is_counted_anew() -> None:
    account = Account()
    transport, waiting = account.add(0)
    waiting.behind = lambda: 2 * MIB
    account.pass_(SPARE_SECONDS + 1)
    assert transport.closed


@pytest.mark.parametrize(("pace", "is_closed"), [(PACE * 2, False), (PACE // 2, True)])
def test_a_client_that_reads_in_drops_is_closed_and_one_that_reads_steadily_is_not(pace: int, is_closed: bool) -> None:
    account = Account()
    account.add(0, 50 * MIB)[0].abort = lambda: None     # type: ignore[method-assign]
    transport, waiting = account.add(64 * KIB, 4 * MIB)
    for _ in range(200):                                 # the buffer is full again as soon as it is empty
        account.pass_(64 * KIB / pace)
        if transport.closed:
            break
        transport.buffered = 0
        account.unread.end(waiting)
        transport.buffered = 64 * KIB
        account.unread.begin(waiting)
        account.add(0, 2 * MIB)                          # others keep the account full
    assert transport.closed == is_closed


@pytest.mark.parametrize(("pace", "is_closed"), [(PACE * 5 // 4, False), (PACE // 2, True)])
def test_bytes_that_the_system_takes_at_once_are_read_too(
    pace: int, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it has room again it takes several pieces, and only the last one waits. Only that one was counted: of steady clients
    that read a megabyte a second many were closed."""
    account = Account()
    transport = Transport()
    waiting = Waiting(transport)                         # type: ignore[arg-type]
    room = 0

    class Flow:
        write_paused = False

    class Cycle:
        disconnected, flow = False, Flow()

    async def write(self: Any, message: Any) -> None:
        nonlocal room
        taken = min(room, len(message["body"]))
        room -= taken
        transport.buffered = len(message["body"]) - taken
        if transport.buffered:
            account.unread.begin(waiting)

    async def sent() -> None:
        nonlocal room
        cycle: Any = Cycle()
        counted = CountedAnswer(cycle, waiting)
        for _ in range(400):
            piece = {"type": "http.response.body", "body": bytes(64 * KIB), "more_body": True, BEHIND: lambda: 4 * MIB}
            await counted(piece)
            if transport.buffered:
                account.pass_(256 * KIB / pace)
                transport.buffered, room = 0, 192 * KIB
                account.unread.end(waiting)

    monkeypatch.setattr(uvicorn.protocols.http.httptools_impl.RequestResponseCycle, "send", write)
    asyncio.run(sent())
    assert transport.closed == is_closed


def test_the_system_takes_little_that_it_cannot_send() -> None:
    """It took megabytes, and the next when a third of them was read: clients seemed to pause for seconds between them."""
    with bind(ServerOptions(port=0)) as listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as made:
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == SYSTEM_UNSENT <= 2 * LONG_BYTES


def test_beyond_the_bound_some_are_closed_at_once() -> None:
    account = Account(most=10 * MIB)
    transports = []
    for _ in range(50):
        transports.append(account.add(0, MIB)[0])
        account.now += 0.001
        assert account.unread.num_bytes <= 10 * MIB
    assert sum(not each.closed for each in transports) >= 8


def test_an_answer_counts_with_all_that_is_held_of_it_until_it_is_written() -> None:
    class Flow:
        write_paused = False

    class Cycle:
        disconnected, flow = False, Flow()

    waiting, sizes = Waiting(Transport()), []            # type: ignore[arg-type]
    cycle: Any = Cycle()

    async def write(self: Any, message: Any) -> None:
        sizes.append(waiting.size())

    async def check(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(uvicorn.protocols.http.httptools_impl.RequestResponseCycle, "send", write)
        counted = CountedAnswer(cycle, waiting)
        await send_json(counted, 200, bytes(200 * KIB))
        assert sizes == [200 * KIB] * 4 + [0] and waiting.behind is None      # the last piece goes into the buffer
        sizes.clear()
        stream = EventStream(counted, [], behind=lambda: 7_000)
        await stream.write([bytes(992)])
        assert sizes == [7_000, 8_000]                   # with "data: " and the line ends
        await stream.end()
        assert waiting.behind is None

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(check(monkeypatch))


# -- pages -------------------------------------------------------------------------------------------------------------


async def messages_of(path: str) -> list[Any]:
    service: Any = SimpleNamespace(options=ServerOptions(), llm=AsyncLLM(), name="tiny", state="ok", quality="")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    route = next(each for each in [*_pages(service), *first_contact.routes(service)] if each.path == path)
    await route(scope, receive, send)
    return sent


@pytest.mark.parametrize("path", ["/dashboard", "/docs", "/openapi.json", "/metrics", "/roofline", "/fleet"])
def test_a_page_is_sent_in_pieces_and_counts_while_it_waits(path: str) -> None:
    """4,096 connections that asked for the dashboard and did not read it held 300 MB."""
    start, *parts = asyncio.run(messages_of(path))
    length = int(dict(start["headers"])[b"content-length"])
    assert start["status"] == 200 and sum(len(each["body"]) for each in parts) == length > 0
    assert all(len(each["body"]) <= LONG_BYTES and each[BEHIND]() == length for each in parts)
    assert start[BEHIND]() == length


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_document_is_made_beside_the_event_loop_and_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stopped the event loop for a third of a second."""
    threads: list[str] = []
    made = openapi.document

    def noted(root_path: str = "") -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return made(root_path)

    monkeypatch.setattr(openapi, "_made", {})
    monkeypatch.setattr(openapi, "document", noted)
    monkeypatch.setattr(docs_page, "document", noted)
    for _ in range(2):
        asyncio.run(messages_of(path))
    assert len(threads) == 1 and threads != [threading.main_thread().name]


# -- on real connections -----------------------------------------------------------------------------------------------


class Server:
    """An application that answers every request with 60 KiB, or with as many as the path says."""

    def __init__(self) -> None:
        self.protocol = limited_protocol(ServerOptions())
        self.held = 0                                    # answers that are being sent
        config = uvicorn.Config(self.answer, http=self.protocol, ws="none", lifespan="off", interface="asgi3", log_config=None)
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)     # connections inherit it
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.held += 1
        try:
            await send_json(send, 200, json.dumps("x" * int(scope["path"][1:])).encode())
        finally:
            self.held -= 1

    def connect(self) -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.settimeout(60)
        made.connect(self.address)
        return made

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(60)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(unread, "LOOK_SECONDS", 0.02)
    made = Server()
    made.protocol.unread = Unread(patient=MIB, most=8 * MIB)
    try:
        yield made
    finally:
        made.stop()


def asked(server: Server, size: int) -> socket.socket:
    client = server.connect()
    client.sendall(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % size)
    return client


def test_many_clients_that_do_not_read_small_answers_hold_little(server: Server) -> None:
    clients = [asked(server, 60_000) for _ in range(60)]
    account = server.protocol.unread
    wait_until(lambda: account.num_closed > 0 and account.num_bytes <= MIB)
    assert 60 - account.num_closed >= 10                 # those that fit may take their time
    for client in clients:
        client.close()
    wait_until(lambda: account.num_bytes == 0 and not account._waiting)


def test_the_tasks_of_closed_connections_end(server: Server) -> None:
    clients = [asked(server, 3_000_000) for _ in range(6)]
    account = server.protocol.unread
    wait_until(lambda: server.held == 0 and account.num_closed > 0)
    assert account.num_bytes == 0
    for client in clients:
        client.close()


def test_a_client_that_reads_gets_all_of_its_answer_while_others_do_not(server: Server) -> None:
    others = [asked(server, 60_000) for _ in range(60)]
    with asked(server, 3_000_000) as client, client.makefile("rb") as reply:
        head = reply.readline()
        while line := reply.readline().strip():
            if line.startswith(b"content-length"):
                length = int(line.split(b":")[1])
        assert head.startswith(b"HTTP/1.1 200") and len(reply.read(length)) == length == 3_000_002
    for each in others:
        each.close()



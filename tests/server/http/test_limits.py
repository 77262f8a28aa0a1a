"""What one connection may cost, checked on the real protocol with raw sockets and an application that does nothing; and
which names the server answers to."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from served_model import wait_until

from ridgeline.errors import BadRequest, ConfigError, NotNow, Overloaded
from ridgeline.server import unread
from ridgeline.server.http import connection_limits, hosts
from ridgeline.server.http.admission import Slots
from ridgeline.server.http.connection_limits import limited_protocol
from ridgeline.server.http.hosts import HostGuard
from ridgeline.server.http.pipelining import LineFlow
from ridgeline.server.lifecycle import OTHER_FILES, ListeningServer, NoFiles, http_config, raise_file_limit
from ridgeline.server.options import ServerOptions

MAX_BODY = 200_000
MAX_CONNECTIONS = 5
LONGER_THAN_ANY_UPTIME = 1e9          # seconds: the clock begins when the machine starts


class App:
    """Reads the body and says how long it was; under /stream it sends without end, under /wait nothing until it may. Counts
    clients that left."""

    def __init__(self) -> None:
        self.gone = 0
        self.may_answer = threading.Event()
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        self.headers = scope["headers"]
        if scope["path"] == "/wait":
            left = asyncio.ensure_future(receive())
            while not self.may_answer.is_set():
                if left.done():
                    self.gone += 1
                    return
                await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            self.gone += 1
        await send({"type": "http.response.body", "body": str(size).encode()})


class Server:
    def __init__(self) -> None:
        self.app = App()
        options = ServerOptions(max_body_bytes=MAX_BODY, max_connections=MAX_CONNECTIONS)
        self.protocol = limited_protocol(options)
        config = uvicorn.Config(
            self.app, http=self.protocol, ws="none", lifespan="off", log_config=None, access_log=False
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_limits, "LINGER_SECONDS", 0.3)
        made = Server()
        yield made
        made.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's limits of time are short. Only where they are what is tested: a busy machine exceeds them, too."""
    for name in ("HEAD_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(connection_limits, name, 0.3)
    monkeypatch.setattr(unread, "WRITE_SECONDS", 0.3)


def talk(server: Server, *pieces: bytes) -> bytes:
    """Everything the server says until it closes the connection."""
    with server.connect() as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:
            pass                                         # it had heard enough
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.reliability("H-01", "B-01")
@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([HEAD + b"x: " + b"a" * 20_000 + b"\r\n\r\n"], 431),
        ([HEAD, b"x: ", *[b"a" * 65536] * 100], 431),
        ([HEAD + b"".join(b"x%d: y\r\n" % n for n in range(200)) + b"\r\n"], 431),
        ([HEAD + b"".join(b"x%d: %s\r\n" % (n, b"a" * 10_000) for n in range(10)) + b"\r\n"], 431),
        ([b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n"], 414),
        ([HEAD + b"content-length: 200001\r\n\r\n"], 413),
        ([CHUNKED, *[b"10000\r\n" + b"a" * 65536 + b"\r\n"] * 20], 413),
        ([CHUNKED, b"1;", *[b"a" * 65536] * 20], 431),
        ([CHUNKED, b"0\r\nx: ", *[b"a" * 65536] * 20], 431),
        ([HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], 400),
        ([HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\naaaaaa"], 400),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60)], 400),
        ([b"nonsense\r\n\r\n"], 400),
    ],
    ids=["header", "endless header", "many headers", "all headers", "url", "length", "chunks", "chunk extension",
         "trailer", "two lengths", "unequal lengths", "tls", "nonsense"],
)
def test_a_request_that_is_too_much_is_told_so_and_cut_off(server: Server, pieces: list[bytes], status: int) -> None:
    told_and_cut_off(server, pieces, status)


@pytest.mark.reliability("H-01", "B-01")
@pytest.mark.parametrize(
    "pieces", [[HEAD], [HEAD + b"content-length: 5\r\n\r\nab"], [CHUNKED, b"5\r\nab"]],
    ids=["half a head", "half a body", "half a chunk"],
)
@pytest.mark.usefixtures("impatient")
def test_a_request_that_does_not_end_is_told_so_and_cut_off(server: Server, pieces: list[bytes]) -> None:
    told_and_cut_off(server, pieces, 408)


def told_and_cut_off(server: Server, pieces: list[bytes], status: int) -> None:
    reply = talk(server, *pieces)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), reply[:200]
    assert json.loads(body)["error"]["message"] and b"connection: close" in head


@pytest.mark.reliability("H-02")
@pytest.mark.parametrize("sent", [b"", b"\r\n", b"\r\n\r\n\r\n"], ids=["nothing", "a line", "lines"])
@pytest.mark.usefixtures("impatient")
def test_a_silent_connection_is_closed(server: Server, sent: bytes) -> None:
    assert talk(server, sent) == b""


def test_requests_within_the_limits_pass_on_one_connection(server: Server) -> None:
    with server.connect() as connection:
        for size in (0, 10, MAX_BODY):
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % size + b"a" * size)
            reply = b""
            while not reply.endswith(b"0\r\n\r\n"):
                reply += connection.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200 ") and b"\r\n%d\r\n" % size in reply


@pytest.mark.usefixtures("impatient")
def test_a_refused_body_is_a_lost_client_to_the_application(server: Server) -> None:
    before = server.app.gone
    assert talk(server, HEAD + b"content-length: 5\r\n\r\nab").startswith(b"HTTP/1.1 408")
    wait_until(lambda: server.app.gone == before + 1)


@pytest.mark.reliability("H-06", "B-10")
@pytest.mark.usefixtures("impatient")
def test_a_client_that_does_not_read_is_dropped(server: Server) -> None:
    before = server.app.gone
    with server.connect() as connection:
        connection.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: server.app.gone > before)


# -- requests in line --------------------------------------------------------------------------------------------------

NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.reliability("H-08e")
@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (b"nonsense\r\n\r\n", 400), (HEAD + b"x: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (HEAD + b"content-length: 200001\r\n\r\n", 413), (CHUNKED + 1_100 * b"1\r\na\r\n", 400),
    ],
    ids=["nonsense", "header", "length", "chunks"],
)
@pytest.mark.parametrize("between", [0, 1, 3])
def test_an_error_waits_for_the_answers_to_the_requests_before_it(
    server: Server, refused: bytes, status: int, between: int
) -> None:
    """Answers come in the order of the requests: an error before them would be taken for the answer to the first."""
    server.app.may_answer.clear()
    with server.connect() as connection:
        connection.sendall(WAIT + between * NEXT + refused)
        wait_until(lambda: any(each._refused for each in list(server._server.server_state.connections)))
        server.app.may_answer.set()
        reply = read_all(connection)
    statuses = [int(each[:3]) for each in reply.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200] * (1 + between) + [status]


@pytest.mark.reliability("H-08e")
def test_an_error_between_two_answers_waits_for_the_second(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for half a head ends when the first request has its answer and the second has not begun."""
    made = server._server.server_state.connections
    turns = server.protocol.turns
    wait = turns.wait

    def late(work: Any, loop: Any) -> None:
        work.__self__._too_slow(1.0, 0.0)
        wait(work, loop)

    server.app.may_answer.clear()
    with server.connect() as connection:
        connection.sendall(WAIT + NEXT + HEAD)
        wait_until(lambda: any(each.pipeline and each.url == b"/" for each in list(made)))
        monkeypatch.setattr(turns, "wait", late)
        server.app.may_answer.set()
        reply = read_all(connection)
    assert [int(each[:3]) for each in reply.split(b"HTTP/1.1 ")[1:]] == [200, 200, 408]


@pytest.mark.reliability("H-08e")
def test_a_request_that_has_its_answer_gets_no_second_one(server: Server) -> None:
    """An application may answer before it has read the body: what is wrong with the rest then only closes the connection."""
    with server.connect() as connection:
        connection.sendall(b"GET /next HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for made in wait_for_cycle(server):
            made.cycle.response_started = made.cycle.response_complete = True        # as `send` leaves it
        connection.sendall(b"nonsense\r\n")
        assert read_all(connection) == b""


def wait_for_cycle(server: Server) -> list[Any]:
    connections = server._server.server_state.connections
    wait_until(lambda: any(each.cycle is not None for each in list(connections)))
    return [each for each in list(connections) if each.cycle is not None]


@pytest.mark.reliability("R-01")
@pytest.mark.parametrize("path", [b"/wait", b"/stream"])
@pytest.mark.parametrize(
    "behind", [b"", NEXT, 3 * NEXT, 20 * NEXT, b"nonsense\r\n\r\n", HEAD + b"content-length: 200001\r\n\r\n"],
    ids=["nothing", "1", "3", "20", "nonsense", "length"],
)
def test_a_client_that_leaves_ends_its_request_whatever_is_in_line_behind_it(
    server: Server, path: bytes, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.app.gone
    server.app.may_answer.clear()
    with server.connect() as connection:
        connection.sendall(WAIT.replace(b"/wait", path) + behind)
        wait_for_cycle(server)
        if path == b"/stream":
            connection.recv(1)
    wait_until(lambda: server.app.gone > before)
    wait_until(lambda: not server._server.server_state.connections)
    assert "socket.send() raised exception" not in caplog.text


@pytest.mark.reliability("R-01")
def test_a_client_that_closes_its_sending_side_has_left(server: Server) -> None:
    """docs/server.md says so: a client that is gone altogether looks the same, and its answer would be computed for no one."""
    before = server.app.gone
    server.app.may_answer.clear()
    with server.connect() as connection:
        connection.sendall(WAIT)
        wait_for_cycle(server)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    wait_until(lambda: server.app.gone > before)


def test_trailers_are_no_headers(server: Server) -> None:
    """A proxy in front has checked the headers, and has not seen these."""
    body = b"3\r\nabc\r\n0\r\nauthorization: Bearer k\r\nx-api-key: k\r\n\r\n"
    reply = talk(server, CHUNKED.replace(b"host: x", b"host: x\r\nconnection: close") + body)
    assert reply.startswith(b"HTTP/1.1 200") and b"\r\n3\r\n" in reply
    assert [name for name, _ in server.app.headers] == [b"host", b"connection", b"transfer-encoding"]


@pytest.mark.reliability("B-07")
def test_connections_are_counted(server: Server) -> None:
    """With all of them at work, further ones are refused, and health checks are answered."""
    connections = server._server.server_state.connections
    wait_until(lambda: not connections)
    server.app.may_answer.clear()
    open_ones = [server.connect() for _ in range(MAX_CONNECTIONS)]
    try:
        for each in open_ones:
            each.sendall(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: sum(each.cycle is not None for each in list(connections)) == MAX_CONNECTIONS)
        reply = talk(server, ASKED)
        assert reply.startswith(b"HTTP/1.1 503") and b"retry-after: 1\r\n" in reply
        assert talk(server) == b""                       # it said nothing for a while
        assert talk(server, ASKED.replace(b" / ", b" /health/live ")).startswith(b"HTTP/1.1 200")
    finally:
        for connection in open_ones:
            connection.close()
    wait_until(lambda: not connections)
    assert talk(server, ASKED).startswith(b"HTTP/1.1 200")


ASKED = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


HALF = HEAD + b"content-length: 10\r\n\r\nhalf"


@pytest.mark.reliability("B-07")
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nx: ", HALF, ASKED.replace(b"connection: close\r\n", b"")])
def test_connections_without_a_request_give_way_the_oldest_first(
    server: Server, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that says nothing, a part of a head or of a body, or nothing more, on all connections shuts out no other."""
    monkeypatch.setattr(connection_limits, "SILENT_SECONDS", 0.0)
    connections = server._server.server_state.connections
    wait_until(lambda: not connections)
    server.app.may_answer.clear()
    working = server.connect()
    working.sendall(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    idle = []
    for number in range(1, MAX_CONNECTIONS):
        idle.append(server.connect())
        idle[-1].sendall(said)
        if said.endswith(b"\r\n\r\n"):
            assert b"200 OK" in idle[-1].recv(4096, socket.MSG_PEEK)
        wait_until(lambda: sum(each.idle_since is not None for each in list(connections)) == number)     # noqa: B023
    assert talk(server, ASKED).startswith(b"HTTP/1.1 200")
    read_all(idle[0])                                    # the oldest was closed, and no other
    assert len(connections) >= MAX_CONNECTIONS - 1
    server.app.may_answer.set()
    assert working.recv(4096).startswith(b"HTTP/1.1 200")
    for connection in (working, *idle):
        connection.close()
    wait_until(lambda: not connections)


@pytest.mark.parametrize("body", [b"", b"half"])
def test_a_body_that_has_just_stopped_does_not_give_way(server: Server, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "SILENT_SECONDS", LONGER_THAN_ANY_UPTIME)
    connections = server._server.server_state.connections
    wait_until(lambda: not connections)
    with server.connect() as client:
        client.sendall(HALF.removesuffix(b"half") + body)
        wait_until(lambda: [each._arriving.body_bytes for each in list(connections) if each._arriving.in_body] == [len(body)])
        (connection,) = connections
        assert connection.idle_since is None
        connection._arriving.heard -= LONGER_THAN_ANY_UPTIME
        assert connection.idle_since == connection._arriving.heard
    wait_until(lambda: not connections)


def half_arrived(server: Server, client: socket.socket) -> Any:
    """The connection of a client that has sent half a body."""
    connections = server._server.server_state.connections
    client.sendall(HALF)
    wait_until(lambda: any(each.client == client.getsockname() for each in list(connections)))
    (connection,) = [each for each in list(connections) if each.client == client.getsockname()]
    wait_until(lambda: connection._arriving.body_bytes)
    return connection


def in_loop(connection: Any, work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return work()

    return asyncio.run_coroutine_threadsafe(run(), connection.loop).result(60)


def stop_reading(connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As uvicorn does while the application, which asks for more here, does not."""
    def stop() -> None:
        monkeypatch.setattr(connection.flow, "resume_reading", lambda: None)
        connection.flow.pause_reading()

    in_loop(connection, stop)


def go_on_reading(connection: Any) -> None:
    in_loop(connection, lambda: LineFlow.resume_reading(connection.flow))


def test_a_body_that_this_server_does_not_read_is_not_late(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is paused while a long body waits for memory (admission.py)."""
    with server.connect() as client:
        connection = half_arrived(server, client)
        stop_reading(connection, monkeypatch)
        before = connection._deadline
        in_loop(connection, lambda: connection._too_slow(28.0, 0.0))
        assert connection._deadline is not before and before.cancelled() and not connection._refused
        client.sendall(b" whole")
        go_on_reading(connection)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("paused", "status"), [(5000.0, b"200"), (0.0, b"408")])
def test_the_time_in_which_this_server_did_not_read_is_not_the_clients(
    server: Server, monkeypatch: pytest.MonkeyPatch, paused: float, status: bytes
) -> None:
    with server.connect() as client:
        connection = half_arrived(server, client)
        before, clock = connection._deadline, connection._arriving.heard
        monkeypatch.setattr(connection.flow, "_now", lambda: clock)
        stop_reading(connection, monkeypatch)
        clock += paused
        go_on_reading(connection)
        in_loop(connection, lambda: connection._too_slow(28.0, 0.0))
        assert connection._refused == (status == b"408")
        if paused:
            assert connection._deadline.when() > before.when() + paused / 2
            assert connection.idle_since is None         # a moment ago it could not be heard
            client.sendall(b" whole")
        assert client.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_a_client_that_leaves_while_its_body_is_not_read_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "LEFT_SECONDS", 0.01)
    monkeypatch.setattr(connection_limits, "BODY_SECONDS", 10_000.0)         # not by this
    connections = server._server.server_state.connections
    wait_until(lambda: not connections)
    before = server.app.gone
    with server.connect() as client:
        connection = half_arrived(server, client)
        stop_reading(connection, monkeypatch)
        client.sendall(b"more")
        in_loop(connection, lambda: connection.on_body(b""))
    wait_until(lambda: not connections and server.app.gone > before)


def test_slots_are_given_back() -> None:
    slots = Slots()
    slots.limit = 4
    with slots.taking(1), slots.taking(4, already=1):
        assert slots.taken == 4
        with pytest.raises(Overloaded), slots.taking(1):
            pass
    with pytest.raises(BadRequest), slots.taking(5):
        pass
    assert slots.taken == 0


def test_a_request_for_many_answers_is_refused_alone() -> None:
    """Behind a router, each refusal sent all requests away from the server, though there was room for them."""
    slots = Slots()
    slots.limit = 20
    for taken, count, alone in ((1, 20, True), (10, 11, True), (18, 3, True), (19, 2, False), (20, 20, False), (20, 1, False)):
        slots.taken = taken
        with pytest.raises(Overloaded) as caught:
            slots.check_free(count)
        assert isinstance(caught.value, NotNow) is alone, (taken, count)


# -- names -------------------------------------------------------------------------------------------------------------


def status_for(options: ServerOptions, *hosts: bytes, has_keys: bool = False) -> int:
    """What a request with these Host headers gets."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/", "headers": [(b"accept", b"*/*"), *((b"host", host) for host in hosts)]}
    asyncio.run(HostGuard(app, options, has_keys)(scope, None, send))    # type: ignore[arg-type]
    if sent[0]["status"] != 200:
        assert json.loads(sent[1]["body"])["error"]["message"]
    return int(sent[0]["status"])


def test_a_host_that_was_seen_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses take longest, and a flood of health checks names the same one."""
    assert hosts.host_name(b"127.0.0.1:4321") == "127.0.0.1"
    monkeypatch.setattr(hosts, "_is_address", lambda name: pytest.fail(f"{name} was read again"))
    assert hosts.host_name(b"127.0.0.1:4321") == "127.0.0.1"


@pytest.mark.reliability("S-04b")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"LocalHost.:8000", 200),
        (b"127.0.0.1", 200),
        (b"127.0.0.1:1", 200),
        (b"127.0.0.1:65535", 200),
        (b"[::1]", 200),
        (b"[::1]:8000", 200),
        (b"[0:0:0:0:0:0:0:1]:8000", 200),
        (b"evil.example", 421),
        (b"evil.example:8000", 421),
        (b"localhost.evil.example", 421),
        (b"127.0.0.1.evil.example:8000", 421),
        (b"127.1", 421),
        (b"127.0.0.2", 421),
        (b"192.168.0.7:8000", 421),
        (b"[::2]", 421),
        (b"", 400),
        (b"x?", 400),
        (b"localhost/", 400),
        (b"me@localhost", 400),
        (b"localhost:", 400),
        (b"localhost:65536", 400),
        (b"localhost:80:80", 400),
        (b"localhost:8o", 400),
        (b"localhost, evil.example", 400),
        (b"::1", 400),
        (b"[::1", 400),
        (b"[::1]x", 400),
        (b"[1]", 400),
        (b"[localhost]", 400),
        ("localhost\u0661".encode(), 400),
        (b"\xff", 400),
    ],
)
def test_names_the_server_answers_to(host: bytes, status: int) -> None:
    assert status_for(ServerOptions(), host) == status


def test_a_request_names_one_host() -> None:
    assert status_for(ServerOptions()) == 400
    assert status_for(ServerOptions(), b"localhost", b"localhost") == 400


@pytest.mark.parametrize(
    ("options", "known", "unknown"),
    [
        ({"host": "192.168.0.7"}, [b"192.168.0.7:8000", b"localhost"], [b"192.168.0.8", b"box"]),
        ({"host": "Box.local"}, [b"box.local:8000"], [b"box", b"192.168.0.7"]),
        ({"host": "fe80::0:1"}, [b"[fe80::1]:8000"], [b"[fe80::2]"]),
        ({"host": "0.0.0.0"}, [b"192.168.0.7", b"10.0.0.1:8000", b"[fe80::1]", b"0.0.0.0"], [b"box", b"evil.example"]),
        ({"host": "::"}, [b"[fe80::1]:8000", b"192.168.0.7", b"[::]"], [b"box"]),
        ({"allowed_host": "box, API.example.com,fe80::1,[fe80::2]"},
         [b"box", b"api.example.com:443", b"[fe80::1]", b"[fe80::2]:8000"], [b"example.com", b"a.box", b"192.168.0.7"]),
    ],
    ids=["address", "name", "IPv6 address", "every address", "every IPv6 address", "allowed"],
)
def test_names_that_options_add(options: dict[str, str], known: list[bytes], unknown: list[bytes]) -> None:
    assert [status_for(ServerOptions(**options), host) for host in known] == [200] * len(known)
    assert [status_for(ServerOptions(**options), host) for host in unknown] == [421] * len(unknown)


@pytest.mark.parametrize("names", ["http://box", "box:8000/", "a b", "*.box", "box,?"])
def test_names_that_cannot_be_allowed(names: str) -> None:
    with pytest.raises(ConfigError, match="allowed_host must list host names"):
        status_for(ServerOptions(allowed_host=names), b"localhost")


def test_every_name_will_do_where_a_key_is_needed_or_all_are_allowed() -> None:
    named = b"ridgeline:8000"
    assert status_for(ServerOptions(), named) == 421
    assert status_for(ServerOptions(), named, has_keys=True) == 200
    assert status_for(ServerOptions(allowed_host="gpu-box, *"), named) == 200
    assert status_for(ServerOptions(allowed_host="*"), b"not a name") == 400
    assert status_for(ServerOptions(), b"not a name", has_keys=True) == 400


def test_files_that_run_out_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio tells of every attempt to take a connection, two thousand at a time; uvloop of none."""
    told: list[dict[str, Any]] = []
    loop: Any = SimpleNamespace(default_exception_handler=told.append)
    handler = NoFiles()
    with caplog.at_level(logging.WARNING, logger="ridgeline"):
        for _ in range(2000):
            handler(loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")})
        handler(loop, {"message": "Task exception was never retrieved"})
    says = "out of file descriptors: new connections wait until one closes (raise `ulimit -n`)"
    assert [record.getMessage() for record in caplog.records] == [says]
    assert told == [{"message": "Task exception was never retrieved"}]


def test_there_are_no_more_connections_than_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits = [(64, 64)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    with caplog.at_level(logging.WARNING, logger="ridgeline"):
        assert raise_file_limit(4096) == 64 - OTHER_FILES > 8
        assert f"{64 - OTHER_FILES} connections instead of 4096" in caplog.text
        caplog.clear()
        limits.append((24, 24))
        with pytest.raises(ConfigError, match="ulimit -n"):
            raise_file_limit(4096)
        limits.append((1024, 100_000))
        assert raise_file_limit(4096) == 4096 and limits[-1] == (2 * 4096 + 256, 100_000) and not caplog.text
        limits.append((OTHER_FILES + 20, OTHER_FILES + 20))
        assert raise_file_limit(4096, 3, 5) == 5 and "5 connections instead of 4096" in caplog.text


@pytest.mark.parametrize(("most", "busy", "path", "answers"), [
    (8, 8, b"/health", ["200"] * 2),                     # beyond the limit, both at once
    (20, 18, b"/stream", ["200"] * 2 + ["503"] * 4),     # two places are left
])
def test_connections_that_come_together_do_not_close_each_other(most: int, busy: int, path: bytes, answers: list[str]) -> None:
    """A connection that has just begun waits for nothing: its request is here, and is read in a moment."""
    async def status(connection: socket.socket) -> str:
        answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 4096), 20)
        return answer.split()[1].decode() if answer else "none"

    async def meet() -> list[str]:
        hold = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == "/stream":
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await hold.wait()
            await send({"type": "http.response.body", "body": b"ok"})

        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        listener.setblocking(False)
        running = ListeningServer(http_config(app, ServerOptions(max_connections=most)), most)
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        asking, clients = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n", []
        for _ in range(busy):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(asking % b"/stream")
            await reader.readline()
            clients.append(writer)
        together = []
        for _ in answers:                                # the loop does not run meanwhile
            together.append(socket.create_connection(listener.getsockname()))
            together[-1].sendall(asking % path)
            together[-1].setblocking(False)
        found = await asyncio.gather(*map(status, together))
        hold.set()
        running.should_exit = running.force_exit = True
        await serving
        for each in together:
            each.close()
        return sorted(found)

    assert asyncio.run(meet()) == answers

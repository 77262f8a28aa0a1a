"""Which connections begin first, how many at once, and what happens when there is no room or no file descriptor."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.server.event_loop import FrontEndLoop
from ridgeline.server.http import accepting
from ridgeline.server.http.accepting import BEGUN_AT_ONCE, PROBE_BYTES, READ_BYTES, Acceptor, TlsConnection
from ridgeline.server.http.connection_limits import BODY_READ_BYTES, LimitedProtocol
from ridgeline.server.lifecycle import ListeningServer, http_config
from ridgeline.server.options import ServerOptions

CHECK = b"GET /health HTTP/1.1\r\n\r\n"


class Seen(asyncio.Protocol):
    """Notes the first bytes of each connection, in the order in which they begin."""

    begun: list[bytes]

    def data_received(self, data: bytes) -> None:
        self.begun.append(data)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as made:
        made.setblocking(False)
        yield made


def connect(listener: socket.socket, count: int, text: bytes) -> list[socket.socket]:
    made = [socket.create_connection(listener.getsockname(), timeout=120) for _ in range(count)]
    for each in made:
        each.sendall(text)
    return made


def accepted(
    listener: socket.socket, until: Callable[[list[bytes], Acceptor], bool], room: int = 10**6, refusal: bytes = b"",
) -> list[bytes]:
    """The first bytes of the connections that began before `until`."""
    begun: list[bytes] = []

    async def run() -> None:
        kind = type("Seen", (Seen,), {"begun": begun})
        acceptor = Acceptor(listener, kind, None, lambda: room - len(begun), refusal=refusal)
        try:
            async with asyncio.timeout(120):
                while not until(begun, acceptor):
                    await asyncio.sleep(0.001)
        finally:
            acceptor.close()
            acceptor.close()                             # again: no error

    asyncio.run(run())
    return begun


def test_a_health_check_does_not_wait_for_those_before_it(listener: socket.socket) -> None:
    others, probe = connect(listener, 5 * BEGUN_AT_ONCE, b"GET /x HTTP/1.1"), connect(listener, 1, CHECK)
    begun = accepted(listener, lambda begun, _: len(begun) == 5 * BEGUN_AT_ONCE + 1)
    assert CHECK in begun[:BEGUN_AT_ONCE]
    for each in others + probe:
        each.close()


def test_what_only_begins_like_a_health_check_waits_with_the_others(listener: socket.socket) -> None:
    """With headers that never end, or that go on beyond what is looked at, it can be sent in thousands."""
    heads = [CHECK[:-2], CHECK[:11], CHECK[:-2] + b"a: %b\r\n\r\n" % (b"x" * PROBE_BYTES)]
    others, probe = connect(listener, 2 * BEGUN_AT_ONCE, heads[0]), connect(listener, 1, CHECK)
    others += connect(listener, 1, heads[1]) + connect(listener, 1, heads[2])
    begun = accepted(listener, lambda begun, _: len(begun) == 2 * BEGUN_AT_ONCE + 3)
    assert CHECK in begun[:BEGUN_AT_ONCE] and begun[-2:] == heads[1:]
    for each in others + probe:
        each.close()


def test_health_checks_leave_a_place_to_the_others_and_keep_their_order(listener: socket.socket) -> None:
    checks = [b"GET /health?%02d HTTP/1.1\r\n\r\n" % number for number in range(5 * BEGUN_AT_ONCE)]
    clients = [connect(listener, 1, check)[0] for check in checks] + connect(listener, 2, b"GET /x HTTP/1.1")
    begun = accepted(listener, lambda begun, _: len(begun) == len(clients))
    assert [data for data in begun if data in checks] == checks
    assert b"GET /x HTTP/1.1" in begun[:BEGUN_AT_ONCE] and b"GET /x HTTP/1.1" in begun[BEGUN_AT_ONCE : 2 * BEGUN_AT_ONCE]
    for each in clients:
        each.close()


def test_a_connection_begins_with_its_first_bytes(listener: socket.socket) -> None:
    """Behind silent ones that came before it, none waits."""
    silent = [socket.create_connection(listener.getsockname(), timeout=120) for _ in range(5 * BEGUN_AT_ONCE)]
    seen: list[int] = []

    def told(begun: list[bytes], acceptor: Acceptor) -> bool:
        seen.append(len(acceptor))
        if seen[-1] == len(silent) and not begun:
            silent[-1].sendall(b"late")
        return b"late" in begun

    assert accepted(listener, told) == [b"late"]
    assert max(seen) == len(silent) and seen[-1] == len(silent) - 1
    for each in silent:
        assert each is silent[-1] or _is_closed(each)    # with the server
        each.close()


def test_a_silent_connection_is_closed_in_the_end_and_first_where_there_is_no_room(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = [socket.create_connection(listener.getsockname(), timeout=120) for _ in range(2)]
    clients: list[socket.socket] = []

    def told(begun: list[bytes], acceptor: Acceptor) -> bool:
        if len(acceptor) == 2 and not clients:
            clients.extend(connect(listener, 1, b"a"))
        return begun == [b"a"] and _is_closed(silent[0])

    accepted(listener, told, room=2)
    monkeypatch.setattr(accepting, "SILENT_SECONDS", 0.01)
    silent.append(socket.create_connection(listener.getsockname(), timeout=120))
    assert accepted(listener, lambda _, acceptor: _is_closed(silent[2])) == []
    for each in clients + silent:
        each.close()


def test_without_room_a_connection_is_closed(listener: socket.socket) -> None:
    clients = connect(listener, 4, b"a")
    begun = accepted(listener, lambda begun, _: len(begun) == 2 and all(_is_closed(each) for each in clients[2:]), room=2)
    assert begun == [b"a", b"a"]


@pytest.mark.parametrize("text", [b"POST / HTTP/1.1\r\n" + b"x" * 5000, b""], ids=["spoken", "silent"])
def test_who_finds_no_room_is_told_so(listener: socket.socket, text: bytes) -> None:
    """Closed with its bytes unread, a connection was reset: small requests to a full server got no 503."""
    clients = connect(listener, 3, text)
    accepted(listener, lambda *_: all(map(_has_bytes, clients)), room=0, refusal=b"no room")
    for each in clients:
        assert each.recv(100) == b"no room" and each.recv(100) == b""


def _has_bytes(client: socket.socket) -> bool:
    return bool(select.select([client], [], [], 0)[0])


@pytest.mark.parametrize("loop", [FrontEndLoop, asyncio.SelectorEventLoop])
def test_the_oldest_unfinished_handshakes_give_way(
    listener: socket.socket, loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)        # no certificate: none of them will end

    async def run() -> None:
        acceptor = Acceptor(listener, asyncio.Protocol, tls, lambda: 2)
        clients: list[socket.socket] = []
        async with asyncio.timeout(120):
            for number in range(1, 4):
                clients += connect(listener, 1, b"\x16")
                while len(acceptor._beginning) < min(number, 2) or (number == 3 and not _is_closed(clients[0])):
                    await asyncio.sleep(0.001)
        assert not _is_closed(clients[1]) and not _is_closed(clients[2]) and len(acceptor) == 2
        acceptor.close()
        for each in clients:
            each.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


class Held(asyncio.Protocol):
    """Notes its transport and what comes."""

    transport: Any = None

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(len(data))


def _certified(folder: Path) -> ssl.SSLContext:
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
                    "-subj", "/CN=localhost"], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    return tls


def test_a_connection_over_tls_has_small_buffers(listener: socket.socket, tmp_path: Path) -> None:
    """Also while its protocol does not read; and what waited then comes to the last byte."""
    tls, trusting, sent, made = _certified(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), 16 * 2**20, Held()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

    async def run() -> None:
        acceptor = Acceptor(listener, lambda: made, tls, lambda: 10**6)
        async with asyncio.timeout(120):
            _, writer = await asyncio.open_connection(*listener.getsockname(), ssl=trusting)
            while made.transport is None:
                await asyncio.sleep(0.001)
            over_tls: Any = made.transport._ssl_protocol
            assert isinstance(made.transport._ssl_protocol, TlsConnection) and not len(acceptor)
            assert len(over_tls._ssl_buffer) == READ_BYTES
            made.transport.pause_reading()
            writer.write(bytes(sent))
            while not over_tls._ssl_reading_paused:
                await asyncio.sleep(0.001)
            assert not made.pieces and over_tls._incoming.pending < 6 * READ_BYTES
            made.transport.resume_reading()
            limited: Any = SimpleNamespace(transport=made.transport)
            while sum(made.pieces) < sent // 2:
                await asyncio.sleep(0.001)
            LimitedProtocol._read_at_once(limited, BODY_READ_BYTES)
            while sum(made.pieces) < sent:
                await asyncio.sleep(0.001)
            assert len(over_tls._ssl_buffer) == BODY_READ_BYTES
            LimitedProtocol._read_at_once(limited, READ_BYTES)
            assert len(over_tls._ssl_buffer) == READ_BYTES
            writer.transport.abort()
        acceptor.close()

    with asyncio.Runner(loop_factory=FrontEndLoop) as runner:
        runner.run(run())
    assert sum(made.pieces) == sent


def test_a_client_that_speaks_no_tls_is_closed_without_a_word(
    listener: socket.socket, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    tls = _certified(tmp_path)

    async def run() -> None:
        acceptor = Acceptor(listener, Held, tls, lambda: 10**6)
        client, = connect(listener, 1, CHECK)
        async with asyncio.timeout(120):
            while not _is_closed(client):
                await asyncio.sleep(0.001)
        client.close()
        assert not len(acceptor)
        acceptor.close()

    with asyncio.Runner(loop_factory=FrontEndLoop) as runner:
        runner.run(run())
    assert not caplog.records


def test_idle_connections_give_way_and_health_checks_need_no_room(listener: socket.socket) -> None:
    begun: list[bytes] = []
    asked: list[int] = []
    room = [0]

    def make_room() -> int:
        asked.append(len(begun))
        room[0] += len(asked) == 2                       # at the first time nothing was idle
        return len(asked) - 1

    async def run() -> None:
        acceptor = Acceptor(listener, type("Seen", (Seen,), {"begun": begun}), None, lambda: room[0], make_room, 1)
        async with asyncio.timeout(120):
            shut_out = connect(listener, 1, b"a")
            while not _is_closed(shut_out[0]):
                await asyncio.sleep(0.001)
            for text in (b"b", CHECK):
                clients = connect(listener, 1, text)
                while begun[-1:] != [text]:
                    await asyncio.sleep(0.001)
                clients[0].close()
                room[0] = 0
        acceptor.close()

    asyncio.run(run())
    assert begun == [b"b", CHECK] and asked[:2] == [0, 0]


@pytest.mark.parametrize("text", [b"", b"GET /x HTTP/1.1"], ids=["silent", "waiting"])
def test_a_health_check_finds_room_among_those_that_came_with_it(listener: socket.socket, text: bytes) -> None:
    """All are accepted in one turn: those before it have taken all the room, and that of health checks too."""
    others, probe = connect(listener, 12, text), connect(listener, 1, CHECK)
    begun = accepted(listener, lambda begun, _: CHECK in begun or _is_closed(probe[0]), room=8)
    assert CHECK in begun
    for each in others + probe:
        each.close()


@pytest.mark.parametrize("together", [False, True], ids=["before", "in the same turn"])
def test_one_that_speaks_finds_room_among_silent_ones_that_came_before(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """These have taken the room of health checks, too: to close one of them is not enough."""
    silent, clients = connect(listener, 12, b""), connect(listener, int(together), b"GET /x HTTP/1.1")

    def until(begun: list[bytes], acceptor: Acceptor) -> bool:
        if not clients and len(acceptor) >= 10:          # they were accepted, as far as there was room
            clients.extend(connect(listener, 1, b"GET /x HTTP/1.1"))
        return bool(begun) or (bool(clients) and _is_closed(clients[0]))

    monkeypatch.setattr(accepting.Acceptor, "__init__", partialmethod(accepting.Acceptor.__init__, probes_beyond=2))
    assert accepted(listener, until, room=8) == [b"GET /x HTTP/1.1"]
    for each in silent + clients:
        each.close()


def _is_closed(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_without_file_descriptors_it_is_told_and_tried_again(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words that the server's handler of such errors looks for."""
    monkeypatch.setattr(accepting, "RETRY_SECONDS", 0.01)
    told: list[str] = []

    class Scarce:
        """A listener that fails twice."""

        left = 2

        def fileno(self) -> int:
            return listener.fileno()

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "too many files")
            return listener.accept()

    client = connect(listener, 1, b"hello")
    begun: list[bytes] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        acceptor = Acceptor(Scarce(), type("Seen", (Seen,), {"begun": begun}), None, lambda: 9)      # type: ignore[arg-type]
        async with asyncio.timeout(120):
            while not begun:
                await asyncio.sleep(0.001)
        acceptor.close()

    asyncio.run(run())
    assert told == ["socket.accept() out of system resource"] * 2 and begun == [b"hello"]
    client[0].close()


def test_those_that_wait_are_closed_with_the_server(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acceptor, "_begin", lambda acceptor: None)
    clients = connect(listener, 3, b"a")
    assert accepted(listener, lambda _, acceptor: len(acceptor) == 3) == []
    for client in clients:
        client.settimeout(20)
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass


def test_a_server_stops_in_order(listener: socket.socket) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> bytes:
        server = ListeningServer(http_config(app, ServerOptions()), 4096)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        status = await reader.readline()
        writer.close()
        server.should_exit = True
        await serving
        return status

    assert b"204" in asyncio.run(run())
    assert listener.fileno() == -1                       # and the address is free


def test_an_error_of_one_connection_holds_up_no_other(listener: socket.socket) -> None:
    """accept() may fail for a connection that was reset: those before it in the same turn begin all the same."""
    told: list[str] = []

    class Flaw:
        """Its second connection is broken."""

        count = 0

        def fileno(self) -> int:
            return listener.fileno()

        def accept(self) -> Any:
            self.count += 1
            if self.count == 2:
                raise OSError(errno.EPROTO, "protocol error")
            return listener.accept()

    clients = connect(listener, 3, b"hello")
    begun: list[bytes] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        acceptor = Acceptor(Flaw(), type("Seen", (Seen,), {"begun": begun}), None, lambda: 9)        # type: ignore[arg-type]
        async with asyncio.timeout(120):
            while len(begun) < 3:
                await asyncio.sleep(0.001)
        acceptor.close()

    asyncio.run(run())
    assert told == ["a connection could not be accepted"]
    for each in clients:
        each.close()

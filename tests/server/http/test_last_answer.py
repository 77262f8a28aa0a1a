"""The last answer of a connection, to a request that is still arriving: all of it is written before the connection ends."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from ridgeline.server.http import connection_limits
from ridgeline.server.http.connection_limits import LimitedProtocol, limited_protocol
from ridgeline.server.options import ServerOptions

HALF = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100\r\n\r\nbegun"
LONG, LAST = b"x" * 2**24, b"the end"                    # more than the system's buffers hold


async def reply_of(made: type[LimitedProtocol], first: bytes) -> bytes:
    """All that comes to half a request until the connection ends, of an answer in two parts."""
    async def answers_early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"%d" % len(first + LAST))]})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        await send({"type": "http.response.body", "body": LAST})

    loop = asyncio.get_running_loop()
    config = Config(answers_early, log_config=None)
    config.load()
    here, there = socket.socketpair()
    with there:
        there.setblocking(False)
        await loop.connect_accepted_socket(lambda: made(config, ServerState(), {}, loop), here)
        await loop.sock_sendall(there, HALF)
        for _ in range(10):                              # the answer waits for its client to read
            await asyncio.sleep(0)
        reply = bytearray()
        while part := await loop.sock_recv(there, 2**20):
            reply += part
        return bytes(reply)


def test_an_answer_that_waits_for_its_client_to_read_is_written_to_its_end() -> None:
    reply = asyncio.run(asyncio.wait_for(reply_of(limited_protocol(ServerOptions()), LONG), 60))
    assert reply.startswith(b"HTTP/1.1 404") and reply.endswith(LONG + LAST)


def test_a_connection_whose_end_cannot_be_sent_closes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "LINGER_SECONDS", 0.01)
    tried: list[bool] = []

    class CannotEnd(limited_protocol(ServerOptions())):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.write_eof = self.write_eof

        def write_eof(self) -> None:
            tried.append(True)
            raise OSError(errno.ENOTCONN, "not connected")

    assert asyncio.run(asyncio.wait_for(reply_of(CannotEnd, b"short"), 60)).endswith(LAST)
    assert tried == [True]

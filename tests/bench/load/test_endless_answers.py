"""What `bench serve` measures may be no such server: an answer without end is a failure, not all of the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ridgeline.bench.load import http_client
from ridgeline.bench.load.http_client import EventStream, HttpClient, HttpFailure
from ridgeline.errors import ConfigError

MOST = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(("part", "sink", "why"), [
    (b"x" * 65_536, None, "more than 1 MiB"),
    (b"x" * 65_536, lambda: EventStream(lambda *_: None), "an event of more than 1 MiB"),
    (b"data: {}\n\n" * 5_000, lambda: EventStream(lambda *_: None), "more than 20,000 events"),
    (b": still here\n\n" * 5_000, lambda: EventStream(lambda *_: None), "more than 20,000 events"),
])
def test_an_answer_without_end_fails(
    part: bytes, sink: Callable[[], EventStream] | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_MOST_BYTES", MOST)
    monkeypatch.setattr(http_client, "_MOST_EVENTS", 20_000)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        sent = 0
        while sent < 64 * MOST and not writer.is_closing():          # an end, for the client that reads it all
            writer.write(part)
            sent += len(part)
            try:
                await writer.drain()
            except ConnectionError:
                break
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            with pytest.raises(HttpFailure, match=why):
                await client.post("/", b"", sink() if sink is not None else None)
        finally:
            client.close()
            server.close()

    asyncio.run(ask())


@pytest.mark.parametrize(("value", "says"), [("a\r\nb", "line breaks"), ("5\u20ac", "beyond Latin-1")])
def test_a_header_that_cannot_be_sent_is_refused_before_the_first_request(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        HttpClient("http://127.0.0.1:9", {"x-price": value})

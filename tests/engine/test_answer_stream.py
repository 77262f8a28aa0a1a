"""How readers get their deltas: by batches, or at once through a sink; in order, whatever their client does."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.client.answer_stream import UNREAD, AnswerStream, Batch
from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.errors import RequestError
from ridgeline.server.answer_writes import DirectWrites
from ridgeline.server.http.stream import EventStream


class State:
    """As much of a RequestState as a stream looks at."""

    def __init__(self) -> None:
        self.output = RequestOutput("0", None, [1], [CompletionOutput(0)])


def opened(abort: Any = None) -> AnswerStream:
    stream = AnswerStream(abort or (lambda wire_id: None))
    stream.add("wire", State())                          # type: ignore[arg-type]
    return stream


def delta(number: int) -> AnswerDelta:
    return AnswerDelta(0, f"{number} ", [number])


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Client:
    """A connection whose reader keeps up or does not; `send` waits for it as uvicorn's does, Direct does not wait."""

    is_gone = False

    def __init__(self) -> None:
        self.got = b""
        self.free = asyncio.Event()
        self.free.set()
        self.begun = False
        self.directly = 0

    @property
    def is_free(self) -> bool:
        return self.begun and self.free.is_set()

    def write(self, body: bytes) -> None:
        assert self.is_free
        self.directly += 1
        self.got += body

    async def send(self, message: Any) -> None:
        await self.free.wait()
        self.begun = True
        self.got += message.get("body", b"")


async def serve(stream: AnswerStream, client: Client) -> None:
    """What an endpoint does."""
    events = EventStream(client.send, [], framed=True, direct=client)

    def written(batch: Batch) -> list[bytes]:
        return [each.text.encode() for _, each in batch]

    def deliver(batch: Batch) -> bool:
        if not events.is_free:
            return False
        events.write_now(written(batch))
        return True

    stream.deliver_to(deliver)
    async for batch in stream:
        await events.write(written(batch))


@pytest.mark.reliability("H-06")
@given(st.lists(st.sampled_from(["push", "push", "stop", "go", "turn"]), max_size=60))
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_or_overtaken(actions: list[str]) -> None:
    async def scene() -> None:
        stream, client, pushed = opened(), Client(), 0
        serving = asyncio.ensure_future(serve(stream, client))
        for action in actions:
            if action == "push":
                stream.push(0, delta(pushed))
                pushed += 1
            elif action == "turn":
                await turns(1)
            else:
                client.free.set() if action == "go" else client.free.clear()
        stream.finish("wire")
        client.free.set()
        await serving
        assert client.got == "".join(f"{number} " for number in range(pushed)).encode()

    asyncio.run(scene())


def test_a_token_wakes_nobody() -> None:
    """Once an answer has begun, its tokens are written while they are pushed; a slow client's wait, joined at last."""

    async def scene() -> None:
        stream, client = opened(), Client()
        serving = asyncio.ensure_future(serve(stream, client))
        await turns()
        stream.push(0, delta(0))
        assert not client.got                            # headers need the task
        await turns()
        for number in range(1, 5):
            stream.push(0, delta(number))
            assert client.got.endswith(b"%d " % number) and client.directly == number
        client.free.clear()
        for number in range(5, 5 + 4 * UNREAD):
            stream.push(0, delta(number))
        await turns()
        assert client.directly == 4 and len(stream._new) <= UNREAD + 1
        client.free.set()
        await turns()
        stream.push(0, delta(9_999))
        assert client.directly == 5                      # it keeps up again
        stream.finish("wire")
        await serving
        assert client.got.split() == [b"%d" % number for number in (*range(5 + 4 * UNREAD), 9_999)]

    asyncio.run(scene())


def test_more_answers_than_a_slow_reader_is_handed_one_by_one_are_joined_too() -> None:
    async def scene() -> None:
        stream = opened()
        for number in range(1000):
            stream.push(0, AnswerDelta(number % (2 * UNREAD), f"{number} ", [number]))
        batch = await stream.__anext__()
        assert len(batch) == 2 * UNREAD
        assert [each.token_ids for _, each in batch] == [[*range(first, 1000, 2 * UNREAD)] for first in range(2 * UNREAD)]
        stream.push(0, AnswerDelta(0, "new", [1]))       # what was handed out does not grow
        assert [each.token_ids for _, each in await stream.__anext__()] == [[1]] and batch[0][1].token_ids[-1] != 1

    asyncio.run(scene())


def test_a_reader_that_fails_fails_alone() -> None:
    async def scene() -> None:
        aborted: list[str] = []
        stream = opened(aborted.append)

        def deliver(batch: Batch) -> bool:
            raise RequestError("it cannot be written")

        stream.deliver_to(deliver)
        reading = asyncio.ensure_future(stream.__anext__())
        await turns()
        stream.push(0, delta(0))                         # raises nothing here
        with pytest.raises(RequestError, match="cannot be written"):
            await reading
        assert aborted == ["wire"]

    asyncio.run(scene())


class Cycle:
    """uvicorn's RequestResponseCycle, the part that DirectWrites reads."""

    def __init__(self) -> None:
        self.response_started, self.response_complete, self.disconnected, self.chunked_encoding = True, False, False, True
        self.flow, self.transport, self.wrote = self, self, b""
        self.write_paused = self.closing = False

    def write(self, data: bytes) -> None:
        self.wrote += data

    def is_closing(self) -> bool:
        return self.closing


def test_direct_writes_are_chunks_of_the_same_body() -> None:
    cycle = Cycle()
    direct = DirectWrites(cycle, cycle.is_closing)       # type: ignore[arg-type]
    assert direct.is_free
    direct.write(b"data: x\n\n")
    cycle.chunked_encoding = False                       # HTTP/1.0: the body ends with the connection
    direct.write(b"data: y\n\n")
    cycle.closing = True                                 # the client has left; the protocol learns of it in a later turn
    direct.write(b"data: z\n\n")                         # asyncio would log every such write
    cycle.closing, cycle.disconnected = False, True
    direct.write(b"data: z\n\n")
    assert cycle.wrote == b"9\r\ndata: x\n\n\r\ndata: y\n\n" and direct.bytes_out == 18
    for name, value in (("write_paused", True), ("response_complete", True), ("response_started", False)):
        cycle = Cycle()
        setattr(cycle, name, value)
        assert not DirectWrites(cycle, cycle.is_closing).is_free         # type: ignore[arg-type]


def test_a_closed_stream_is_freed_without_the_garbage_collector() -> None:
    """A sink refers to its stream, and to all of the request that it writes the answer of."""

    async def check() -> weakref.ref[AnswerStream]:
        stream = opened()
        stream.deliver_to(lambda batch: bool(stream.outputs and batch))
        stream.end_at(time.monotonic() + 600)
        stream.close()
        return weakref.ref(stream)

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(check())() is None
    finally:
        gc.enable()

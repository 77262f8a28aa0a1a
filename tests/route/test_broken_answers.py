"""Replicas whose HTTP is broken: each is told from a whole answer, counts as its replica's failure, and another one answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading

import pytest
from fake_replica import Behaviour, FakeReplica, Router
from test_delivery import CHAT, GREEDY, SAID, routed

from ridgeline.route import answer_events, upstream

ASKED = CHAT | {"stream": False}
OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"content-type: application/json\r\n"
EVENTS = OK + b"content-type: text/event-stream\r\n"
SAYS = json.dumps({"choices": [{"message": {"role": "assistant", "content": "hi"}}]}).encode()
LONG = b'{"a":"' + b"x" * (2 * answer_events.MOST_READ) + b'"}'
WORD = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"one "}}]}\n\n'
MESSAGE = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'


def sized(body: bytes, size: int | None = None) -> bytes:
    return b"content-length: %d\r\n\r\n" % (len(body) if size is None else size) + body


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class Broken(FakeReplica):
    """Sends these bytes to each request, and closes the connection or leaves it open."""

    def __init__(self, answer: bytes, closes: bool = True, reads: bool = True) -> None:
        super().__init__()
        self.answer, self.closes, self.reads = answer, closes, reads

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if self.reads:
                    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0))
                writer.write(self.answer)
                await writer.drain()
                if self.closes:
                    writer.close()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()


NO_ANSWERS: dict[str, tuple[bytes, bool]] = {
    "nothing": (b"", True),
    "garbage": (b"\x00\xff not http at all\r\n\r\n", True),
    "garbage, open": (b"SSH-2.0-OpenSSH_9.6\r\n", False),
    "status without a number": (b"HTTP/1.1 OK fine\r\n" + sized(SAYS), True),
    "status of one digit": (b"HTTP/1.1 2 OK\r\n" + sized(SAYS), True),
    "another protocol": (b"HTTP/2.0 200 OK\r\n" + sized(SAYS), True),
    "half a status line": (b"HTTP/1.1 20", True),
    "half a head": (JSON + b"content-len", True),
    "a head without an end": (JSON + b"x-a: b\r\n" * (upstream.MOST_HEAD // 8), False),
    "a header without an end": (JSON + b"x-a: " + b"b" * 2 * upstream.MOST_HEAD, False),
    "a zero in a header": (JSON + b"x-a: \x00\r\n" + sized(SAYS), True),
    "a header without a name": (JSON + b": b\r\n" + sized(SAYS), True),
    "a flood of 100": (b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, False),
    "a flood of 103": (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 20_000, False),
    "100 and an end": (b"HTTP/1.1 100 Continue\r\n\r\n", True),
    "length: too long": (JSON + sized(SAYS, len(SAYS) + 1), True),
    "length: too short": (JSON + sized(SAYS, 20), False),
    "length: negative": (JSON + sized(SAYS, -1), True),
    "length: no number": (JSON + b"content-length: many\r\n\r\n" + SAYS, True),
    "length: 10^30": (JSON + sized(SAYS, 10**30), True),
    "length: two": (JSON + b"content-length: 5\r\n" + sized(SAYS), True),
    "length and chunks": (JSON + b"transfer-encoding: chunked\r\n" + sized(chunk(SAYS) + b"0\r\n\r\n"), True),
    "chunks: cut in one": (JSON + CHUNKED + chunk(SAYS)[:-9], True),
    "chunks: no last one": (JSON + CHUNKED + chunk(SAYS), True),
    "chunks: size is no number": (JSON + CHUNKED + b"zz\r\n" + SAYS + b"\r\n0\r\n\r\n", True),
    "chunks: size is too large": (JSON + CHUNKED + b"f" * 17 + b"\r\n" + SAYS, True),
    "chunks: an extension without an end": (JSON + CHUNKED + b"1;" + b"a" * 2 * upstream.MOST_HEAD, False),
    "chunks: trailers without an end": (JSON + CHUNKED + b"0\r\n" + b"x-a: b\r\n" * (upstream.MOST_HEAD // 8), False),
    "chunks in another coding": (JSON + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk(SAYS) + b"0\r\n\r\n", False),
    "a coding that is none": (JSON + b"transfer-encoding: xchunked\r\n\r\n" + SAYS, True),
    "a body for 204": (b"HTTP/1.1 204 No Content\r\n\r\n" + SAYS, False),
    "a body for 304": (b"HTTP/1.1 304 Not Modified\r\n" + sized(SAYS), False),
    "a page for browsers": (OK + b"content-type: text/html; charset=utf-8\r\n" + sized(b"<html>sign in</html>"), False),
    "compressed": (JSON + b"content-encoding: gzip\r\n" + sized(gzip.compress(SAYS)), False),
    "compressed, it says": (JSON + b"content-encoding: GZIP\r\n" + sized(SAYS), False),
    "compressed twice": (JSON + b"content-encoding: identity, zstd\r\n" + sized(SAYS), False),
    "a compressed stream": (EVENTS + b"content-encoding: br\r\n" + sized(b"\x1b\x03"), False),
    "an end in the middle, no length": (JSON + b"\r\n" + SAYS[:-5], True),
    "a stream without an event": (EVENTS + CHUNKED + b"0\r\n\r\n", True),
    "a stream without an event, no length": (EVENTS + b"\r\n", True),
}


@pytest.mark.reliability("H-03b")
@pytest.mark.parametrize("name", NO_ANSWERS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_no_answer_is_a_failure_and_another_replica_answers(name: str, stream: bool) -> None:
    answer, closes = NO_ANSWERS[name]

    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad, good = router.fleet.replicas
        good.busy_until = 1e9
        alone = await router.ask(CHAT | {"stream": stream})
        assert alone.status == 502 and alone.is_complete and bad.failed == 1 and bad.load.pending == 0
        assert json.loads(alone.body)["error"]["code"] == "replica_failed" and alone.headers["retry-after"]
        good.busy_until = 0.0
        router.fleet.choice._turn = 1                    # the bad one is next
        call = await router.ask(CHAT | {"stream": stream})
        assert call.status == 200 and call.is_complete and bad.failed == 2 and not good.failed
        assert call.text == SAID if stream else b"one two three four" in call.body

    routed(test, Broken(answer, closes), FakeReplica())


@pytest.mark.parametrize("ending", [
    b"", chunk(b"data: {"), chunk(WORD)[:-4], b"zz\r\n", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
], ids=["closed", "in an event", "in a chunk", "no chunk", "its own end", "another answer"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_stream_that_breaks_never_looks_whole(ending: bytes, exact: bool) -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        router.fleet.choice._turn = 1
        call = await router.ask(GREEDY if exact else CHAT)
        assert call.status == 200 and router.fleet.replicas[0].failed == 1
        if exact:
            assert call.text == SAID and call.events[-1] == "[DONE]"
        else:
            assert call.events[-1]["error"]["code"] == "replica_failed"

    routed(test, Broken(EVENTS + CHUNKED + chunk(WORD) + ending), FakeReplica())


@pytest.mark.parametrize("head", [b"", CHUNKED], ids=["no length", "chunks"])
def test_an_anthropic_stream_that_breaks_never_looks_whole(head: bytes) -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(CHAT, "/v1/messages")
        assert call.status == 200 and router.fleet.replicas[0].failed == 1
        assert call.body.startswith(MESSAGE) and b"event: error\ndata: {" in call.body

    routed(test, Broken(EVENTS + (head + chunk(MESSAGE) if head else b"\r\n" + MESSAGE)))


@pytest.mark.parametrize("coding", [b"none", b"identity", b"utf-8", b""])
def test_an_answer_that_names_no_compression_passes(coding: bytes) -> None:
    """Some servers say "none", to keep proxies from compressing a stream: such a replica went down."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(CHAT | {"stream": False})
        assert call.status == 200 and call.body == SAYS and not router.fleet.replicas[0].failed

    routed(test, Broken(JSON + b"content-encoding: " + coding + b"\r\n" + sized(SAYS), False))


def test_answers_without_a_length_pass_if_they_are_whole() -> None:
    """Servers of HTTP/1.0 end an answer with its connection."""
    async def test(router: Router, *replicas: Broken) -> None:
        call = await router.ask(ASKED)
        assert call.status == 200 and call.body == SAYS and call.is_complete
        stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        replicas[0].answer = EVENTS + b"\r\n" + MESSAGE + stop
        messages = await router.ask(CHAT, "/v1/messages")
        assert messages.body == MESSAGE + stop and messages.is_complete
        replicas[0].answer = EVENTS + b"\r\n" + WORD + b"data: [DONE]\n\n"
        stream = await router.ask(CHAT)
        assert stream.text == "one " and stream.events[-1] == "[DONE]" and not router.fleet.replicas[0].failed
        replicas[0].answer = JSON + b"\r\n" + LONG
        assert (await router.ask(ASKED)).status == 502

    routed(test, Broken(JSON.replace(b"1.1", b"1.0") + b"\r\n" + SAYS))


@pytest.mark.parametrize("head", [b"content-length: %d\r\n\r\n" % (len(LONG) + 1), CHUNKED + b"%x\r\n" % (len(LONG) + 1)])
def test_a_long_answer_that_breaks_ends_with_its_connection(head: bytes) -> None:
    """Its beginning was sent: what the client's parser sees is an answer that is not complete."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        router.fleet.choice._turn = 1
        call = await router.ask(ASKED)
        assert call.status == 200 and LONG.startswith(call.body) and not call.is_complete
        assert router.fleet.replicas[0].failed == 1 and router.fleet.counts["broken_streams"] == 1
        assert not replicas[1].seen and answer_events.HELD.num_bytes == 0

    routed(test, Broken(JSON + head + LONG), FakeReplica())


def test_an_answer_without_a_body_has_no_length() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(None, "/v1/models")
        assert call.status == 204 and "content-length" not in call.headers and call.body == b"" and call.is_complete

    routed(test, Broken(b"HTTP/1.1 204 No Content\r\n\r\n"))


def test_chunks_of_one_byte_are_passed_on_together() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(ASKED)
        assert call.status == 200 and call.body == LONG and len(call.parts) < len(LONG) // 1000

    first, middle, last = LONG[:20_000], LONG[20_000:-20_000], LONG[-20_000:]            # where it begins, and where it is long
    single = [b"".join(chunk(each[place : place + 1]) for place in range(len(each))) for each in (first, last)]
    routed(test, Broken(JSON + CHUNKED + single[0] + chunk(middle) + single[1] + b"0\r\n\r\n"))


def test_a_replica_that_refuses_a_body_before_its_end_and_closes_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next write fails. It looked like a failure, and any client could take all replicas down by bodies that they refuse."""
    listener = socket.create_server(("127.0.0.1", 0))
    has_closed = threading.Event()

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 413 X\r\n" + sized(b"no"))
        connection.close()                               # with bytes unread: the system resets the connection
        has_closed.set()

    async def wait(event: asyncio.Event) -> bool:
        assert has_closed.wait(60)
        return True

    monkeypatch.setattr(upstream.asyncio.Event, "wait", wait)

    async def test() -> None:
        connection = upstream.Answer()
        port = listener.getsockname()[1]
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port)
        await connection.send(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % 2**24, [b"x" * 2**24])
        for _ in range(10):
            await asyncio.sleep(0)
        assert connection.status == 413 and await connection.body(100) == b"no" and not connection.reusable

    thread = threading.Thread(target=refuse)
    thread.start()
    with listener:
        asyncio.run(test())
        thread.join()


def test_an_answer_before_its_request_goes_to_no_request() -> None:
    class Eager(FakeReplica):
        async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(JSON + sized(SAYS))
            await reader.read(1)
            await reader.read()
            writer.close()

    async def test(router: Router, *replicas: FakeReplica) -> None:
        async with asyncio.timeout(60):
            await router.ask(ASKED | {"user": "x" * 2**20})      # whichever comes first, nothing waits

    routed(test, Eager(Behaviour()))


def test_a_connection_whose_answer_was_not_read_gets_no_other_request() -> None:
    """The last bytes of a long answer stop the reading, its client leaves: the next request on it waited for ever."""
    async def run() -> None:
        async with Broken(JSON + sized(bytes(upstream.HIGH_WATER + 1)), closes=False) as replica:
            asked = upstream.Upstream(replica.url)
            async with asked.ask("GET", "/v1/models") as left:
                while not left.complete:
                    await asyncio.sleep(0)
            async with asyncio.timeout(60), asked.ask("GET", "/v1/models") as answer:
                assert answer is not left and sum([len(piece) async for piece in answer.pieces()]) == upstream.HIGH_WATER + 1
            async with asked.ask("GET", "/v1/models") as again:
                assert again is answer                   # read to its end
            asked.close()

    asyncio.run(run())

"""Long bodies and answers through the router: nothing of them is done on its event loop at once, and little is kept twice."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fake_replica import Behaviour, Call, FakeReplica, Router

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.engine.replicas.prefix_tree import CHUNK, MOST_BYTES, MOST_CHAIN, prompt_chain
from ridgeline.errors import Overloaded, TimedOut
from ridgeline.route import body_facts, delivery, route_app
from ridgeline.route.answer_events import HELD, MOST_READ, AnswerEvents
from ridgeline.route.delivery import EVENTS_PER_TURN
from ridgeline.route.forwarded_request import ForwardedRequest, forwarded
from ridgeline.route.prompt_text import prompt_of, with_answer
from ridgeline.route.route_process import FACTS_PROCESS
from ridgeline.route.upstream import HIGH_WATER, PIECE, Answer, Upstream
from ridgeline.server.api.openai.responses_store import ResponseStore
from ridgeline.server.http.admission import Body
from ridgeline.server.http.connection_limits import READ_BYTES
from ridgeline.server.long_bodies import MANY_BYTES, BodyReader, LongBodies
from ridgeline.server.unread import BEHIND

BODY = b"x" * (160 * PIECE)


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def test_a_long_body_and_a_long_answer_are_decoded_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = {}

    def noting(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def noted(*given: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return whole(*given)

        monkeypatch.setattr(module, name, noted)

    noting(body_facts, "facts_of")
    noting(route_app, "forwarded")
    noting(delivery, "_read")

    async def test() -> None:
        async with FakeReplica(Behaviour(text="x" * 3 * LONG_BYTES)) as replica:
            router = Router(replica)
            call = await asyncio.wait_for(router.ask(chat("a" * 2 * LONG_BYTES)), 120)
            assert call.status == 200 and call.body.count(b"x") == 3 * LONG_BYTES
            assert replica.seen[0].body == chat("a" * 2 * LONG_BYTES)
            assert max(map(len, call.parts)) <= LONG_BYTES       # as fast as its client reads
            router.fleet.close()

    asyncio.run(test())
    assert threads == {"facts_of": {"long-work"}, "forwarded": {"long-work"}, "_read": {"long-work"}}


HUGE = "x" * (MANY_BYTES + 1)
HUGE_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(HUGE)),
    ("/v1/chat/completions", chat(HUGE) | {"stream": True, "temperature": 0, "cache_salt": "own"}),
    ("/v1/chat/completions", chat("a") | {"stream": True, "stream_options": {"x": HUGE}, "cache_salt": "é" + HUGE}),
    ("/v1/completions", {"model": HUGE, "prompt": ["a", "b"], "max_tokens": 2**70, "n": 2, "seed": 5}),
    ("/v1/embeddings", {"input": [1] * MANY_BYTES}),
]


@pytest.mark.parametrize(("path", "body"), HUGE_BODIES, ids=["chat", "stream", "options", "completion", "ids"])
def test_a_huge_body_is_read_in_another_process_as_in_this_one(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of 16 MB at once held up health checks and streams for 0.3 s, those with many escapes for half a second: whatever
    looked at them held Python's lock for up to 70 ms at a time. Nor are their parts joined here."""
    def never(*_: object) -> None:
        raise AssertionError("a huge body was read in the router's process")

    made: list[list[ForwardedRequest]] = []

    async def ask(reader: BodyReader | None) -> None:
        async with FakeReplica() as replica:
            router = Router(replica, keys=("k",), reader=reader)
            call = await router.ask(body, path, authorization="Bearer k", x_request_id="r")
            assert call.status == 200 and len(replica.seen) == 1
            router.fleet.close()

    def noted(*given: Any) -> ForwardedRequest:
        made[-1].append(forwarded(*given))
        return made[-1][-1]

    monkeypatch.setattr(route_app, "forwarded", noted)
    monkeypatch.setattr("secrets.token_hex", lambda size: "00")          # both have one name
    made.append([])
    asyncio.run(ask(None))
    monkeypatch.setattr(body_facts, "facts_of", never)
    monkeypatch.setattr(Body, "data", property(never))
    reader = LongBodies(body_facts.RESULTS, bytes, ResponseStore(0, 0), FACTS_PROCESS)
    made.append([])
    try:
        asyncio.run(ask(reader))
    finally:
        reader.close()
    (here,), (there,) = made
    assert replace(here, parts=[b"".join(here.parts)]) == replace(there, parts=[b"".join(there.parts)])


def test_replicas_are_chosen_for_few_long_prompts_per_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte has 8,192 nodes, which take 20 ms. Eight prompts that were read one after the other began in the same turn."""
    chosen, turn, prompt = list[int](), 0, {"prompt": "a" * 3 * CHUNK}
    monkeypatch.setattr(route_app, "NODES_PER_TURN", 5)

    async def test() -> None:
        nonlocal turn
        async with FakeReplica() as replica:
            router = Router(replica)
            choose = router.fleet.choose
            monkeypatch.setattr(router.fleet, "choose", lambda *given: chosen.append(turn) or choose(*given))
            calls = [router.start(prompt, "/v1/completions") for _ in range(8)]
            while not all(call.task.done() for call in calls):
                await asyncio.sleep(0)
                turn += 1
            assert [call.status for call in calls] == [200] * 8
            router.fleet.close()

    asyncio.run(asyncio.wait_for(test(), 120))
    assert len(chosen) == len(set(chosen)) == 8


def test_a_huge_body_that_is_no_request_is_refused_by_the_other_process() -> None:
    async def test() -> None:
        async with FakeReplica() as replica:
            reader = LongBodies(body_facts.RESULTS, bytes, ResponseStore(0, 0), FACTS_PROCESS)
            router = Router(replica, reader=reader)
            call = await router.ask({"prompt": [[]] * MANY_BYTES}, "/v1/completions")
            assert call.status == 400 and b"strings, lists and objects" in call.body and not replica.seen
            reader.close()
            router.fleet.close()

    asyncio.run(test())


@pytest.mark.parametrize("error", [Overloaded("busy"), TimedOut("slow")])
def test_an_answer_is_sent_while_the_threads_that_read_it_are_busy(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(num_bytes: int, work: Any) -> Any:
        raise error

    monkeypatch.setattr(delivery, "away_if_long", busy)

    async def test() -> None:
        async with FakeReplica(Behaviour(text="said")) as replica:
            router = Router(replica)
            call = await asyncio.wait_for(router.ask(chat("hello")), 120)
            assert call.status == 200 and b"said" in call.body and len(replica.seen) == 1
            assert router.fleet.replicas[0].load.pending == 0
            router.fleet.close()

    asyncio.run(test())


@pytest.mark.parametrize("size", [MOST_READ // 2, 2 * MOST_READ])
def test_an_answer_of_megabytes_is_passed_on_and_not_read(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder keeps Python's lock until it has made all objects, also in a thread: the event loop waits for it."""
    read: list[int] = []
    whole = delivery._read

    def noted(body: bytes) -> Any:
        read.append(len(body))
        return whole(body)

    monkeypatch.setattr(delivery, "_read", noted)

    async def test() -> None:
        async with FakeReplica(Behaviour(text="x" * size)) as replica:
            router = Router(replica)
            call = await asyncio.wait_for(router.ask(chat("hello")), 120)
            assert call.status == 200 and call.body.count(b"x") == size and len(read) == (size < MOST_READ)
            assert router.fleet.replicas[0].counts["answers"] == 1 and router.fleet.replicas[0].load.pending == 0
            router.fleet.close()

    asyncio.run(test())


def test_a_stream_of_a_thousand_events_at_once_leaves_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen replicas without an end held up health checks for 0.2 s. Nor is much read of a replica at once."""
    turn, taken, read = 0, Counter[int](), list[int]()
    take, received = AnswerEvents.take, Answer.data_received

    def noted(self: AnswerEvents, data: bytes) -> bytes:
        taken[turn] += 1
        return take(self, data)

    monkeypatch.setattr(AnswerEvents, "take", noted)
    monkeypatch.setattr(Answer, "data_received", lambda self, data: read.append(len(data)) or received(self, data))

    async def test() -> None:
        nonlocal turn
        async with FakeReplica(Behaviour(text="a " * 1000)) as replica:
            router = Router(replica)
            call = router.start(chat("hello") | {"stream": True})
            while not call.task.done():
                await asyncio.sleep(0)
                turn += 1
            assert call.status == 200 and call.text == "a " * 1000
            router.fleet.close()

    asyncio.run(asyncio.wait_for(test(), 120))
    assert sum(taken.values()) > 1000 and max(taken.values()) <= EVENTS_PER_TURN and max(read) <= READ_BYTES


def test_an_answer_that_is_too_deep_to_read_is_passed_on() -> None:
    assert delivery._read(b"[" * 50_000) == (None, "") == delivery._read(b'{"choices": "\xff"}')


@pytest.mark.parametrize("stream", [True, False])
def test_what_waits_for_a_slow_client_is_counted_with_what_it_holds_here(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams held several times the bytes that were counted for them."""
    async def test() -> None:
        said = Behaviour(text="x" * 3 * HIGH_WATER, pieces=["x" * 1000] * (3 * HIGH_WATER // 1000))
        async with FakeReplica(said) as replica:
            router, send, counted, full = Router(replica), Call._send, list[int](), asyncio.Event()
            receive = Answer.data_received

            def received(self: Answer, data: bytes) -> None:
                receive(self, data)
                if self._waiting > HIGH_WATER:
                    full.set()

            async def slowly(self: Call, message: Any) -> None:
                if message["type"] == "http.response.body" and not counted:
                    await asyncio.wait_for(full.wait(), 60)
                    counted.append(message[BEHIND]() - len(message["body"]))
                await send(self, message)

            monkeypatch.setattr(Answer, "data_received", received)
            monkeypatch.setattr(Call, "_send", slowly)
            monkeypatch.setattr(HELD, "most", 0)
            call = await router.ask(chat("hi") | {"stream": stream})
            assert call.status == 200 and counted[0] >= HIGH_WATER
            router.fleet.close()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_a_connection_that_waits_for_more_is_read() -> None:
    """Bytes of no body stop the reading, too, while much of what came before waits."""
    class Transport(asyncio.Transport):
        is_read = True

        def pause_reading(self) -> None:
            self.is_read = False

        def resume_reading(self) -> None:
            self.is_read = True

        def write(self, data: Any) -> None:
            pass

    async def test() -> None:
        transport, answer, body = Transport(), Answer(), b"x" * 2 * HIGH_WATER
        transport.is_closing = lambda: False                 # type: ignore[method-assign]
        answer.connection_made(transport)
        await answer.send(b"", [])
        answer.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b" % (len(body), body))
        assert not transport.is_read
        pieces, read = answer.pieces(), 0
        while read < len(body):
            read += len(await anext(pieces))
            if read == LONG_BYTES:
                assert transport.is_read
                answer.data_received(b"\r\n")
                assert not transport.is_read
        waiting = asyncio.ensure_future(anext(pieces, None))
        while not transport.is_read:
            await asyncio.sleep(0)
        answer.data_received(b"0\r\n\r\n")
        assert await waiting is None and answer.complete

    asyncio.run(asyncio.wait_for(test(), 60))


def test_the_text_of_a_long_prompt_is_not_kept() -> None:
    text = "0123456789abcdef" * (MOST_BYTES // 8)
    prompt = prompt_of(chat(text))
    assert len(prompt.text) == MOST_BYTES and prompt.num_bytes > 2 * MOST_BYTES
    assert prompt.chain == prompt_chain(prompt.text, prompt.root) == with_answer(prompt, "an answer")
    assert len(prompt.chain) == MOST_CHAIN < 2_000       # each is noted on the event loop


class Still(asyncio.Protocol):
    """A replica that reads nothing, or answers before it has read all."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.received = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if not self.answer:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.answer:
            self.transport.write(self.answer)
            self.transport.pause_reading()
            self.answer = b""


def with_still_replica(answer: bytes, test: Any) -> None:
    async def run() -> None:
        replica = Still(answer)
        server = await asyncio.get_running_loop().create_server(lambda: replica, "127.0.0.1", 0)
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await asyncio.wait_for(test(upstream), 120)
        upstream.close()
        replica.transport.abort()
        server.close()

    asyncio.run(run())


def test_a_body_is_written_as_fast_as_the_replica_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    connect = asyncio.BaseEventLoop.create_connection

    async def counting(self: Any, *given: Any, **named: Any) -> Any:
        transport, protocol = await connect(self, *given, **named)
        whole = transport.write

        def write(data: bytes) -> None:
            written.append(len(data))
            whole(data)

        monkeypatch.setattr(transport, "write", write)
        return transport, protocol

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", counting)

    async def test(upstream: Upstream) -> None:
        asked = asyncio.ensure_future(upstream.ask("POST", "/v1/completions", [], [BODY]).__aenter__())
        while not written:
            await asyncio.sleep(0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert max(written) <= PIECE + 1000 and sum(written) < len(BODY)     # the rest waits for the replica
        asked.cancel()
        await asyncio.wait((asked,))

    with_still_replica(b"", test)


def test_a_body_leaves_others_their_turn_though_the_replica_reads_all_at_once() -> None:
    turn, written = 0, list[int]()

    class Reads(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            written.append(turn)

    async def test() -> None:
        nonlocal turn
        connection = Answer()
        connection.connection_made(Reads())
        sending = asyncio.ensure_future(connection.send(b"POST", [b"x" * 3 * PIECE, b"y"]))
        while not sending.done():
            await asyncio.sleep(0)
            turn += 1

    asyncio.run(test())
    assert len(written) == len(set(written)) == 4


def test_a_replica_that_refuses_a_body_before_its_end_gets_no_more_of_it() -> None:
    async def test(upstream: Upstream) -> None:
        async with upstream.ask("POST", "/v1/completions", [], [BODY]) as answer:
            assert answer.status == 413 and await answer.body(100) == b"no"
            assert not answer.reusable                       # the next request would be read as the rest of this body
        assert not upstream._idle

    with_still_replica(b"HTTP/1.1 413 X\r\ncontent-length: 2\r\n\r\nno", test)

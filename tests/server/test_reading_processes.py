"""Which bodies are read in which process, how many at once, and what happens while a process cannot be started or hangs."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.engine.client.long_work import LONG_BYTES, LongWork
from ridgeline.engine.client.request_context import LOCAL, Caller
from ridgeline.errors import BadRequest, Overloaded, PromptTooLong, TryAgain
from ridgeline.server import long_bodies
from ridgeline.server.api import prepare
from ridgeline.server.api.openai.responses_store import NeedsStored, ResponseStore
from ridgeline.server.body_process import LentResponses
from ridgeline.server.body_work import RESULTS
from ridgeline.server.http.admission import Body, HeldBodies
from ridgeline.server.long_bodies import (
    MANY_BYTES,
    MANY_PARTS,
    MANY_TEXT,
    PARTS_PER_TURN,
    BodyReader,
    CannotStart,
    FewPerTurn,
    LongBodies,
    Made,
    ReadingProcess,
    Recalled,
    Wanted,
    error_of,
    failure_of,
    is_long,
)
from ridgeline.server.options import ServerOptions
from ridgeline.server.server_errors import ModelNotFound


def test_what_counts_as_long() -> None:
    def judged(body: bytes) -> bool:
        return is_long([body[:1000], body[1000:]], len(body))

    assert judged(b"x" * (MANY_BYTES + 1))
    assert not judged(b"x" * MANY_BYTES)
    assert judged(b"[],".ljust(4) * (MANY_PARTS + 1))    # of any size: 100 clients may send one each
    assert not judged(b"[],".ljust(4) * MANY_PARTS)
    assert judged(b'{"role":"user","content":"a"},' * (MANY_PARTS // 5 + 1))
    assert not judged(b"1," * 4 * MANY_PARTS) and judged(b"1," * 4 * (MANY_PARTS + 1))       # numbers take less
    assert is_long([b"x" * (MANY_TEXT + 1)], MANY_TEXT + 1, answers=True)
    assert not is_long([b"x" * MANY_TEXT], MANY_TEXT, answers=True)


def test_a_body_of_many_parts_is_read_here_only_if_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor beside a process that runs: it costs nothing to ask it."""
    reply = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))
    child = FakeChild([b"", reply, reply])
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: child)
    go_on = asyncio.Event()

    async def waits(service: object, caller: object, data: bytes) -> bytes:
        await go_on.wait()
        return b"here"

    reader = LongBodies({long_bodies.name_of(waits): bytes}, lambda: b"settings", ResponseStore(1, 1))
    body = long_body(b"[]," * (MANY_PARTS + 1))

    async def run() -> list[object]:
        reading = [asyncio.ensure_future(reader.read(waits, None, LOCAL, body)) for _ in range(2)]
        await reading[1]
        go_on.set()
        return [await reading[0], await reading[1], await reader.read(waits, None, LOCAL, body)]

    assert asyncio.run(run()) == [b"here", b"{}", b"{}"]
    assert reader.other._child is child and reader.huge._child is None


@pytest.mark.parametrize("can_start", [True, False])
def test_of_a_crowd_of_long_bodies_one_per_turn_is_read_here(monkeypatch: pytest.MonkeyPatch, can_start: bool) -> None:
    """By a function that ends without a pause; with a process it is one of all, without one all in their turns."""
    turn, began = 0, []

    async def reads_at_once(service: object, caller: object, data: bytes) -> bytes:
        began.append(turn)
        return b"here"

    async def ask(self: ReadingProcess, *_: object) -> Made:
        if not can_start:
            raise CannotStart
        return Made(b"there", True, 0.0)

    monkeypatch.setattr(ReadingProcess, "ask", ask)
    reader = LongBodies({long_bodies.name_of(reads_at_once): bytes}, lambda: b"settings", ResponseStore(1, 1))
    body = long_body(b"[]," * (MANY_PARTS + 1))

    async def run() -> None:
        nonlocal turn
        reading = [asyncio.ensure_future(reader.read(reads_at_once, None, LOCAL, body)) for _ in range(50)]
        while not all(each.done() for each in reading):
            await asyncio.sleep(0)
            turn += 1

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(began) == (1 if can_start else 50) and len(set(began)) == len(began)


def test_long_bodies_do_not_wait_behind_huge_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))
    children: list[FakeChild] = []
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: children.append(FakeChild([b"", reply])) or children[-1])
    reader = LongBodies({long_bodies.name_of(reads_here): bytes}, lambda: b"settings", ResponseStore(1, 1))
    for size in (MANY_BYTES + 1, LONG_BYTES + 1):
        assert asyncio.run(reader.read(reads_here, None, LOCAL, long_body(b"[" * size))) == b"{}"
    assert [len(each.asked[1]) > MANY_BYTES for each in children] == [True, False]
    reader.close()
    assert [each.ended for each in children] == [1, 1]


@pytest.mark.parametrize("is_short", [True, False])
def test_a_body_that_recalls_a_long_conversation_is_read_as_a_huge_one(monkeypatch: pytest.MonkeyPatch, is_short: bool) -> None:
    """Whether it was found here or in the process; what it recalls counts as work that waits."""
    store, work = ResponseStore(10, 2**24), LongWork(threads=1)
    store.put("resp_1", LOCAL.key, b"x" * (MANY_BYTES + 1), b"[]", b"[]")
    done = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))
    wanted = long_bodies.msgspec.msgpack.encode(Wanted("resp_1", []))
    children: list[FakeChild] = [FakeChild([b"", done])] if is_short else [FakeChild([b"", wanted]), FakeChild([b"", done])]
    starts = iter(children)
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: next(starts))
    counted: list[int] = []
    run = work.run
    monkeypatch.setattr(work, "run", lambda do, num_bytes: counted.append(num_bytes) or run(do, num_bytes))

    async def recalls(service: object, caller: Caller, data: bytes) -> bytes:
        store.size_of("resp_1", [], caller.key)
        return b"here"

    monkeypatch.setattr(long_bodies, "HUGE_WORK", work)
    reader = LongBodies({long_bodies.name_of(recalls): Made}, lambda: b"settings", store)
    body = long_body(b"{}" if is_short else b"[" * (LONG_BYTES + 1))
    assert asyncio.run(reader.read(recalls, None, LOCAL, body)) == b"{}"
    assert reader.huge._child is children[-1] and (reader.other._child is None) is is_short
    assert len(counted) == 1 and counted[0] > MANY_BYTES
    reader.close()


def test_bodies_are_read_a_few_per_turn_of_the_loop() -> None:
    """Whatever arrives at once, on however many connections."""
    turn, began = 0, []

    async def work(service: object, caller: object, data: bytes) -> None:
        began.append(turn)

    async def run() -> None:
        nonlocal turn
        reader = BodyReader()
        body = long_body(b"[]," * 900)                   # 1,000 parts with what a request takes besides
        reading = [asyncio.ensure_future(reader.read(work, None, LOCAL, body)) for _ in range(10)]
        reading[7].cancel()                              # its client has left
        while not all(each.done() for each in reading):
            await asyncio.sleep(0)
            turn += 1

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(began) == 9 and max(map(began.count, began)) == PARTS_PER_TURN // 1000


def test_a_body_of_more_parts_than_a_turn_has_takes_one_of_its_own() -> None:
    async def run() -> None:
        turns = FewPerTurn(10)
        for _ in range(3):
            await turns.turn(1000)
        await asyncio.gather(*(turns.turn(each) for each in (3, 1000, 3, 8)))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_turns_go_on_in_the_next_loop() -> None:
    """The last one has ended in the middle of a turn, with a body that waited."""
    turns, last = FewPerTurn(10), asyncio.new_event_loop()
    left = [last.create_task(turns.turn(10)) for _ in range(2)]
    last.call_soon(last.stop)
    last.run_forever()
    assert [each.done() for each in left] == [True, False]

    async def run() -> list[bool]:
        reading = [asyncio.ensure_future(turns.turn(10)) for _ in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        return [each.done() for each in reading]

    assert asyncio.run(run()) == [True] * 3
    left[1].cancel()
    last.run_until_complete(asyncio.wait(left))
    last.close()


@pytest.mark.parametrize("error", [
    BadRequest("bad", field="messages[0].content"), PromptTooLong("long", field="prompt"), ModelNotFound("other", field="model"),
    Overloaded("full", 3.5), TryAgain("broken", 1.0),
])
def test_errors_arrive_as_they_were_raised(error: Any) -> None:
    again = error_of(failure_of(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert vars(again) == vars(error)


def test_an_error_that_one_endpoint_knows_arrives_as_what_it_extends() -> None:
    class Special(BadRequest):
        pass

    assert type(error_of(failure_of(Special("no", field="x")))) is BadRequest


def test_stored_responses_are_asked_for_once() -> None:
    store = LentResponses(ServerOptions(), None)
    with pytest.raises(NeedsStored) as needs:
        store.size_of("resp_1", ["msg_1"], 3)
    assert (needs.value.name, needs.value.items) == ("resp_1", ["msg_1"])
    lent = LentResponses(ServerOptions(), [Recalled("resp_1", 3, b"{}", b"[]", b"[]", ("msg_1",))])
    assert lent.size_of("resp_1", ["msg_1"], 3) > 0
    assert lent.size_of("resp_2", [], 3) == 0            # it is stored nowhere
    assert LentResponses(ServerOptions(max_stored_responses=0), None).size_of("resp_1", [], 3) == 0


class FakeChild:
    """Answers in place of the process."""

    alive = True
    ended = 0

    def __init__(self, replies: list[Any]) -> None:
        self.replies = replies
        self.asked: list[Any] = []

    def ask(self, parts: Any, seconds: float) -> bytes:
        self.asked.append(b"".join(parts))
        return self.replies.pop(0)  # type: ignore[no-any-return]

    def end(self) -> None:
        self.ended += 1


def test_the_process_ends_when_no_long_body_comes(monkeypatch: pytest.MonkeyPatch, all_long: None) -> None:
    made = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.25))
    child = FakeChild([b"", made, made])
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: child)
    monkeypatch.setattr(long_bodies, "IDLE_SECONDS", 0.01)
    reader = LongBodies(RESULTS, lambda: b"settings", ResponseStore(1, 1))
    body = Body(HeldBodies())
    body.parts, body.size = [b"ab", b"cd"], 4

    async def twice() -> None:
        assert await reader.read(prepare.tokenize, None, LOCAL, body) == b"{}"
        assert await reader.read(prepare.tokenize, None, LOCAL, body) == b"{}"
        while not child.ended:
            await asyncio.sleep(0.01)

    asyncio.run(twice())
    assert child.asked[0] == b"settings" and child.asked[1] == child.asked[2] and child.asked[1].endswith(b"abcd")
    assert child.ended == 1 and reader.other._child is None


def long_body(data: bytes = b'{"prompt": "a"}') -> Body:
    body = Body(HeldBodies())
    body.parts, body.size = [data[:11], data[11:]], len(data)
    return body


async def reads_here(service: object, caller: object, data: bytes) -> bytes:
    return data


def test_without_a_process_bodies_are_read_here_and_starts_are_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, all_long: None
) -> None:
    """Whether it cannot be started, ends at once or never answers; the first that starts has the next body."""
    now, starts = 1000.0, []
    made = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))
    failures: list[BaseException] = [OSError(12, "no memory"), EOFError(), TimeoutError(), OSError(24, "no files")]

    def start(*_: object, **__: object) -> FakeChild:
        starts.append(now)
        child = FakeChild([b"", made])
        if failures:
            error = failures.pop(0)
            if isinstance(error, OSError) and error.errno:
                raise error
            monkeypatch.setattr(child, "ask", lambda *_: (_ for _ in ()).throw(error))
        return child

    monkeypatch.setattr(long_bodies, "FramedChild", start)
    monkeypatch.setattr(long_bodies, "time", SimpleNamespace(monotonic=lambda: now))
    store = ResponseStore(1, 1)
    reader = LongBodies({long_bodies.name_of(reads_here): bytes}, lambda: b"settings", store)

    async def read() -> object:
        return await reader.read(reads_here, None, LOCAL, long_body())

    async def run() -> None:
        nonlocal now
        for _ in range(160):
            answer = await read()
            assert answer == (b"{}" if reader.other._child else b'{"prompt": "a"}')
            assert store.most_recalled == (MANY_BYTES if reader.other._child else float("inf"))
            if reader.other._child:
                break
            now += 0.1

    asyncio.run(run())
    assert [round(after - before, 1) for before, after in itertools.pairwise(starts)] == [1.0, 2.0, 4.0, 8.0]


def test_a_long_conversation_goes_on_while_only_the_process_of_huge_bodies_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    made = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))
    starts: list[Any] = [OSError(12, "no memory"), FakeChild([b"", made])]

    def start(*_: object, **__: object) -> FakeChild:
        child = starts.pop(0)
        if isinstance(child, OSError):
            raise child
        return child  # type: ignore[no-any-return]

    monkeypatch.setattr(long_bodies, "FramedChild", start)
    monkeypatch.setattr(long_bodies, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    store = ResponseStore(10, 2**24)
    store.put("resp_1", LOCAL.key, b"x" * (MANY_BYTES + 1), b"[]", b"[]")

    async def recalls(service: object, caller: Caller, data: bytes) -> bytes:
        store.size_of("resp_1", [], caller.key)
        return b"here"

    reader = LongBodies({long_bodies.name_of(recalls): Made}, lambda: b"settings", store)
    sizes = (MANY_BYTES + 1, LONG_BYTES + 1, 9)
    answers = [asyncio.run(reader.read(recalls, None, LOCAL, long_body(b"[" * size))) for size in sizes]
    assert answers == [b"here", b"{}", b"here"] and reader.other._child is not None
    reader.close()


def test_a_child_that_a_thread_still_asks_keeps_its_pipes(monkeypatch: pytest.MonkeyPatch, all_long: None) -> None:
    """The client of a hung body has left: neither the idle timer nor the server's end may close what the thread reads from."""
    asked, go_on = threading.Event(), threading.Event()
    killed: list[bool] = []
    made = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))

    class Hung(FakeChild):
        process = SimpleNamespace(kill=lambda: killed.append(True))

        def ask(self, parts: Any, seconds: float) -> bytes:
            if len(self.replies) == 1:
                asked.set()
                assert go_on.wait(120)
                assert not self.ended
            return super().ask(parts, seconds)

    child = Hung([b"", made])
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: child)
    monkeypatch.setattr(long_bodies, "IDLE_SECONDS", 0.001)
    reader = LongBodies({long_bodies.name_of(reads_here): bytes}, lambda: b"settings", ResponseStore(1, 1))

    async def run() -> None:
        reading = asyncio.ensure_future(reader.read(reads_here, None, LOCAL, long_body()))
        assert await asyncio.to_thread(asked.wait, 120)
        reading.cancel()
        await asyncio.wait([reading])
        await asyncio.sleep(0.05)                        # the timer looks several times
        assert not child.ended
        reader.close()
        assert killed and not child.ended
        go_on.set()
        while not child.ended:                           # the timer ends it once the thread has left
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 200))
    assert child.ended == 1 and reader.other._child is None


def test_a_body_that_takes_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch, all_long: None) -> None:
    child = FakeChild([b""])
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: child)
    reader = LongBodies({long_bodies.name_of(reads_here): bytes}, lambda: b"settings", ResponseStore(1, 1))

    def never(parts: Any, seconds: float) -> bytes:
        if parts == [b"settings"]:
            return b""
        raise TimeoutError

    monkeypatch.setattr(child, "ask", never)
    with pytest.raises(TryAgain, match="was not read within 60 s"):
        asyncio.run(reader.read(reads_here, None, LOCAL, long_body()))


def test_a_function_that_is_not_listed_runs_here(monkeypatch: pytest.MonkeyPatch, all_long: None) -> None:
    reader = LongBodies(RESULTS, lambda: b"", ResponseStore(1, 1))
    body = Body(HeldBodies())
    body.parts = [b"a", b"b"]

    async def own(service: object, caller: object, data: bytes) -> bytes:
        return data

    assert asyncio.run(reader.read(own, None, LOCAL, body)) == b"ab"
    assert asyncio.run(BodyReader().read(own, None, LOCAL, body)) == b"ab"


def test_the_parts_of_a_huge_body_are_not_counted_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count those of 16 MB takes 55 ms. It has a turn of its own, whatever they are: where no process can be started, and for
    an endpoint that refuses every body."""
    body = Body(HeldBodies())
    body.parts, body.size = [b"a"], long_bodies.MANY_BYTES + 1
    monkeypatch.setattr(long_bodies, "num_parts", lambda parts: pytest.fail("counted"))

    async def own(service: object, caller: object, data: bytes) -> bytes:
        return data

    assert asyncio.run(BodyReader().read(own, None, LOCAL, body)) == b"a"

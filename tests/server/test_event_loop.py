"""Turns of the event loop are short: few clients at once, health checks and the engine's messages first."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ridgeline.server import event_loop
from ridgeline.server.event_loop import (
    CALLBACKS,
    MOST_CALLBACKS,
    OF_CROWD,
    OF_PROBES,
    CrowdSelector,
    FrontEndLoop,
    ReadyQueue,
    new_event_loop,
)
from ridgeline.server.http.accepting import Acceptor

CLIENTS = 5 * OF_CROWD + 3
CHECK = b"GET /health HTTP/1.1\r\n\r\n"     # a whole one: what only begins like it waits with the others


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(CLIENTS)]
        for pair in made:
            for each in pair:
                each.setblocking(False)
                stack.enter_context(each)
        yield made


@pytest.fixture
def selector() -> Iterator[CrowdSelector]:
    made = CrowdSelector()
    yield made
    made.close()


def numbers(found: list[tuple[selectors.SelectorKey, int]]) -> list[int]:
    return [key.fd for key, _ in found]


def test_a_turn_takes_few_of_the_crowd_and_all_others(
    selector: CrowdSelector, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    selector.lanes.update((here.fileno(), selector.crowd) for here, _ in pairs[1:])
    for here, there in pairs:
        selector.register(here.fileno(), selectors.EVENT_READ)
        there.send(b"x")
    seen: set[int] = set()
    for _ in range(-(-len(pairs) // OF_CROWD)):
        found = numbers(selector.select(0))
        assert found[0] == pairs[0][0].fileno() and len(found) <= OF_CROWD + 1
        seen.update(found)
    assert len(seen) == len(pairs)                       # each in its turn, though none was read


def test_connections_that_began_with_a_health_check_have_few_events_per_turn(
    selector: CrowdSelector, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    """Any client can begin with one and then send something else."""
    kinds = {here.fileno(): selector.crowd if place % 2 else selector.probes for place, (here, _) in enumerate(pairs)}
    selector.lanes.update(kinds)
    for here, there in pairs:
        selector.register(here.fileno(), selectors.EVENT_READ)
        there.send(b"x")
    found = [kinds[number] for number in numbers(selector.select(0))]
    assert found == [selector.probes] * OF_PROBES + [selector.crowd] * (len(found) - OF_PROBES) and len(found) > OF_PROBES


def test_while_callbacks_wait_a_turn_takes_fewer_of_the_crowd(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    selector = CrowdSelector(lambda: 10 * CALLBACKS)
    selector.lanes.update((here.fileno(), selector.crowd) for here, _ in pairs)
    for here, there in pairs:
        selector.register(here.fileno(), selectors.EVENT_READ)
        there.send(b"x")
    assert len({*numbers(selector.select(0)), *numbers(selector.select(0))}) == 2 * (OF_CROWD // 2)
    selector.close()


def test_a_turn_waits_for_the_crowd_as_for_others(
    selector: CrowdSelector, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    here, there = pairs[0]
    selector.lanes[here.fileno()] = selector.crowd
    selector.register(here.fileno(), selectors.EVENT_READ | selectors.EVENT_WRITE, "both")
    assert [(key.data, mask) for key, mask in selector.select(None)] == [("both", selectors.EVENT_WRITE)]
    selector.modify(here.fileno(), selectors.EVENT_READ, "read")
    assert selector.select(0.001) == []
    there.close()                                        # an end is read
    assert [(key.data, mask) for key, mask in selector.select(None)] == [("read", selectors.EVENT_READ)]
    assert selector.get_key(here).events == selectors.EVENT_READ and len(selector.get_map()) == 1
    with pytest.raises(KeyError):
        selector.register(here, selectors.EVENT_READ)
    selector.unregister(here.fileno())
    assert selector.select(0) == [] and not selector.get_map()
    with pytest.raises(KeyError):
        selector.get_key(here)


def test_keys_are_found_by_file_object_and_by_number(
    selector: CrowdSelector, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    here, there = pairs[0]
    key = selector.register(here, selectors.EVENT_READ)
    found = selector.get_map()
    assert found.get(here) is key and found.get(here.fileno()) is key and here in found
    assert found.get(there) is None and list(found) == [here.fileno()]


def test_a_file_that_was_closed_before_can_be_unregistered(selector: CrowdSelector) -> None:
    reader, writer = os.pipe()
    selector.register(reader, selectors.EVENT_READ)
    os.close(reader)
    os.close(writer)
    selector.unregister(reader)
    assert not selector.get_map()


def test_a_number_that_a_connection_had_is_not_of_the_crowd_for_ever() -> None:
    loop = FrontEndLoop()
    here, there = socket.socketpair()
    with here, there:
        lanes = loop.selector.lanes
        lanes[here.fileno()] = loop.selector.crowd
        loop.add_reader(here, print)
        assert not lanes
        loop.remove_reader(here)
    loop.close()


class Answers(asyncio.Protocol):
    """Notes what comes, in order."""

    def __init__(self, read: list[bytes]) -> None:
        self._read = read

    def data_received(self, data: bytes) -> None:
        self._read.append(data)


def test_a_health_check_overtakes_a_crowd_that_sends() -> None:
    """Connections that have begun all send at once, and then a health check comes: it is read before most of what was there."""
    read: list[bytes] = []

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener, ExitStack() as stack:
            listener.setblocking(False)
            acceptor = Acceptor(listener, lambda: Answers(read), None, lambda: 10**6)
            clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(CLIENTS)]
            for client in clients:
                client.send(b"POST /v1/x")
            while len(read) < CLIENTS:                   # all have begun
                await asyncio.sleep(0.001)
            for client in clients:
                client.send(b"more")
            health = stack.enter_context(socket.create_connection(listener.getsockname()))
            health.send(CHECK)
            while len(read) <= 2 * CLIENTS:
                await asyncio.sleep(0)
            acceptor.close()

    with asyncio.Runner(loop_factory=FrontEndLoop) as runner:
        runner.run(asyncio.wait_for(run(), 60))
    assert read.index(CHECK) <= CLIENTS + 2 * OF_CROWD      # it is accepted in one turn and read in the next


class Busy:
    """Callbacks that are always ready, as those of a thousand requests are: each adds itself again. Counts them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int = 1000) -> None:
        self.ran = 0
        self._loop = loop
        for _ in range(count):
            loop.call_soon(self._run)

    def _run(self) -> None:
        self.ran += 1
        self._loop.call_soon(self._run)


def test_an_urgent_event_does_not_wait_for_callbacks_that_are_ready() -> None:
    """asyncio's own loop would run all thousand of them first, and a second thousand for what the event's callback adds."""
    loop = FrontEndLoop()
    here, there = socket.socketpair()
    busy = Busy(loop)
    seen: list[int] = []

    def reads() -> None:
        here.recv(1)
        seen.append(busy.ran)
        loop.ahead(loop.call_soon, lambda: (seen.append(busy.ran), loop.stop()))

    with here, there:
        loop.add_reader(here, reads)
        there.send(b"x")
        loop.run_forever()
        loop.remove_reader(here)
    loop.close()
    assert seen == [0, 0]


def test_callbacks_of_a_thread_run_in_order_whatever_goes_ahead() -> None:
    """Its second came while the loop did work ahead: it ran before the first, and what was ahead ran in another order."""
    loop, ran = FrontEndLoop(), []

    def work() -> None:
        loop.call_soon(ran.append, "ahead 1")
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(ran.append, "thread 2"))
        thread.start()
        thread.join()
        loop.call_soon(ran.append, "ahead 2")

    def begin() -> None:
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(ran.append, "thread 1"))
        thread.start()
        thread.join()
        loop.call_soon(ran.append, "waits")
        loop.ahead(work)
        loop.call_later(0.01, loop.stop)

    loop.call_soon(begin)
    loop.run_forever()
    loop.close()
    assert ran == ["ahead 1", "ahead 2", "waits", "thread 1", "thread 2"]


def test_what_was_added_ahead_of_an_error_still_runs() -> None:
    loop, ran = FrontEndLoop(), []

    def work() -> None:
        loop.call_soon(ran.append, "ahead")
        raise OSError

    loop.call_soon(ran.append, "waits")
    with pytest.raises(OSError):
        loop.ahead(work)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert ran == ["ahead", "waits"]


def test_a_number_whose_callback_waits_may_be_given_to_another_connection(
    selector: CrowdSelector, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    here, there = pairs[0]
    there.send(b"x")
    selector.register(here.fileno(), selectors.EVENT_READ)
    selector.waiting.add(here.fileno())
    assert numbers(selector.select(0)) == []
    selector.unregister(here.fileno())
    selector.register(here.fileno(), selectors.EVENT_READ)
    assert numbers(selector.select(0)) == [here.fileno()]


def test_an_event_is_not_taken_again_while_its_callback_waits() -> None:
    """Behind a thousand callbacks it waits for sixty turns. Each took it again: up to half of all callbacks read nothing."""
    loop, read = FrontEndLoop(), []
    here, there = socket.socketpair()

    def reads() -> None:
        read.append(here.recv(100))
        if len(read) > 1:
            loop.stop()
        else:
            loop.call_soon(there.send, b"again")

    with here, there:
        here.setblocking(False)
        loop.selector.lanes[here.fileno()] = loop.selector.crowd
        loop._add_reader(here, reads)                    # type: ignore[attr-defined]  # as transports do
        there.send(b"x")
        for _ in range(3 * MOST_CALLBACKS):
            loop.call_soon(int)
        loop.set_exception_handler(lambda loop, context: (read.append(context["exception"]), loop.stop()))
        loop.run_forever()
        loop.remove_reader(here)
    loop.close()
    assert read == [b"x", b"again"]


def test_a_turn_has_as_many_callbacks_as_take_a_few_milliseconds() -> None:
    """Quick ones run in long turns. One turn of slow ones is enough for short turns; long ones then come back slowly."""
    queue = ReadyQueue()
    loop = FrontEndLoop()
    queue.extend(asyncio.Handle(int, (), loop) for _ in range(1000))
    loop.close()
    now, lengths = 0.0, []
    for each in [10e-6] * 100 + [2e-3] + [10e-6] * 100:
        queue.begin_turn(now)
        lengths.append(len(queue))
        now += each * len(queue)
        queue.end_turn(now)
    assert lengths[0] == CALLBACKS and max(lengths) == MOST_CALLBACKS == lengths[100]
    assert lengths[101] == lengths[102] == CALLBACKS and lengths[-1] == MOST_CALLBACKS


class Application(asyncio.Protocol):
    """Answers in a task, as an application does. Notes how many of the other callbacks had run by then."""

    def __init__(self, busy: Busy, answered: list[int]) -> None:
        self._busy = busy
        self._answered = answered

    def data_received(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FrontEndLoop)
        loop.ahead(loop.create_task, self._answer())

    async def _answer(self) -> None:
        self._answered.append(self._busy.ran)


def answered_beside(callbacks: int, clients: int) -> list[int]:
    """How many other callbacks had run when each of `clients` was answered, since all of them came."""
    answered: list[int] = []

    async def run() -> int:
        with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener, ExitStack() as stack:
            listener.setblocking(False)
            busy = Busy(asyncio.get_running_loop(), callbacks)
            acceptor = Acceptor(listener, lambda: Application(busy, answered), None, lambda: 10**6)
            for _ in range(clients):
                stack.enter_context(socket.create_connection(listener.getsockname())).send(CHECK)
            came = busy.ran
            while len(answered) < clients:
                await asyncio.sleep(0)
            acceptor.close()
            return came

    with asyncio.Runner(loop_factory=FrontEndLoop) as runner:
        came = runner.run(asyncio.wait_for(run(), 60))
    return [each - came for each in answered]


def test_a_health_check_is_answered_before_most_callbacks_that_are_ready() -> None:
    """From its connection to its answer: accepted, begun, given a transport, watched, read and answered."""
    assert answered_beside(10 * MOST_CALLBACKS, 1)[0] <= 3 * MOST_CALLBACKS


def test_a_flood_of_health_checks_leaves_turns_to_others() -> None:
    flood = answered_beside(10, CLIENTS)
    assert flood[-1] > CLIENTS


def test_a_front_end_has_this_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "uvloop", None)
    loop = new_event_loop()
    assert isinstance(loop, FrontEndLoop) and OF_CROWD > OF_PROBES
    loop.close()

"""Turns of the event loop are short: few clients at once, health checks and the engine's messages first."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ridgeline.server import event_loop
from ridgeline.server.event_loop import OF_CROWD, OTHERS, CrowdSelector, FrontEndLoop, new_event_loop
from ridgeline.server.http.accepting import Acceptor

CLIENTS = 5 * OF_CROWD + 3


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
    selector.crowd.update(here.fileno() for here, _ in pairs[1:])
    for here, there in pairs:
        selector.register(here.fileno(), selectors.EVENT_READ)
        there.send(b"x")
    seen: set[int] = set()
    for _ in range(-(-len(pairs) // OF_CROWD)):
        found = numbers(selector.select(0))
        assert pairs[0][0].fileno() in found and len(found) <= OF_CROWD + 1
        seen.update(found)
    assert len(seen) == len(pairs)                       # each in its turn, though none was read


def test_a_turn_waits_for_the_crowd_as_for_others(
    selector: CrowdSelector, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    here, there = pairs[0]
    selector.crowd.add(here.fileno())
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
        loop.crowd.add(here.fileno())
        loop.add_reader(here, print)
        assert not loop.crowd
        loop.remove_reader(here)
        loop.add_crowd_reader(here.fileno(), print)
        assert loop.crowd == {here.fileno()}
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
            health.send(b"GET /health")
            while len(read) <= 2 * CLIENTS:
                await asyncio.sleep(0)
            acceptor.close()

    with asyncio.Runner(loop_factory=FrontEndLoop) as runner:
        runner.run(asyncio.wait_for(run(), 60))
    # It is accepted, begun, given a transport and watched, a turn each; in the fifth it is read before the crowd.
    assert read.index(b"GET /health") <= CLIENTS + 4 * OF_CROWD


def test_a_front_end_has_this_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "uvloop", None)
    loop = new_event_loop()
    assert isinstance(loop, FrontEndLoop) and OTHERS > OF_CROWD
    loop.close()

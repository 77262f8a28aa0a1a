"""Sockets between machines: what has the engine's key gets through, and what has not does not."""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from ridgeline.engine.ranks.rank_wire import FarWire, break_connections, connect, interface_of


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def wire(context: zmq.Context) -> Iterator[FarWire]:
    made = FarWire(context, "127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def socket(context: zmq.Context, wire: FarWire) -> Iterator[Callable[[int], zmq.Socket]]:
    """Sockets that are closed before the wire is: it decides on connections that are still being made."""
    made: list[zmq.Socket] = []

    def new(kind: int) -> zmq.Socket:
        made.append(context.socket(kind))
        return made[-1]

    yield new
    for each in made:
        each.close(linger=0)


def test_a_rank_with_the_key_is_heard(socket: Callable[[int], zmq.Socket], wire: FarWire) -> None:
    here = socket(zmq.PULL)
    address = wire.bind(here, "reports")
    assert address.startswith("tcp://127.0.0.1:") and wire.store.startswith("tcp://127.0.0.1:")
    rank = socket(zmq.PUSH)
    connect(rank, address, wire.keys)
    rank.send(b"started")
    assert here.poll(60_000) and here.recv() == b"started"


@pytest.mark.parametrize("known", ["nothing", "the server's key", "another engine's keys"])
def test_others_are_not(socket: Callable[[int], zmq.Socket], wire: FarWire, known: str) -> None:
    """A rank's message arrives although it was sent later, and theirs does not."""
    here = socket(zmq.PULL)
    address = wire.bind(here, "reports")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = {
        "nothing": {}, "the server's key": {"server": wire.keys["server"], "public": public, "secret": secret},
        "another engine's keys": {"server": public, "public": wire.keys["public"], "secret": wire.keys["secret"]},
    }[known]
    stranger = socket(zmq.PUSH)
    connect(stranger, address, keys)
    with contextlib.suppress(zmq.Again):                 # where it was refused already, nothing takes the message
        stranger.send(b"plan this", zmq.NOBLOCK)
    rank = socket(zmq.PUSH)
    connect(rank, address, wire.keys)
    rank.send(b"started")
    assert here.poll(60_000) and here.recv() == b"started"
    assert not here.poll(300)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.7") == ""


def test_a_connection_to_a_lost_machine_is_broken_from_another_thread() -> None:
    """And no other: what waits for it notices at once."""
    with sockets.create_server(("127.0.0.77", 0)) as lost, sockets.create_server(("127.0.0.1", 0)) as fine:
        waiting, talking = (sockets.create_connection(each.getsockname()) for each in (lost, fine))
        ends = [each.accept()[0] for each in (lost, fine)]
        threading.Timer(0.05, break_connections, ("127.0.0.77",)).start()
        waiting.settimeout(60)
        assert waiting.recv(1) == b""
        ends[1].send(b"x")
        talking.settimeout(60)
        assert talking.recv(1) == b"x"
        for each in (waiting, talking, *ends):
            each.close()

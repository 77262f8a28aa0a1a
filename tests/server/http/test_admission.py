"""What a request holds before it is answered: bodies that stop on their way hold no slot, and no memory that others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, connect, post
from served_model import wait_until, write_model

from ridgeline.errors import Overloaded
from ridgeline.server.http import admission, connection_limits
from ridgeline.server.http.admission import SILENT_LOOKS, WAIT_LOOKS, Body, HeldBodies
from ridgeline.server.http.stream import ClientGone

PIECE = 50_000                       # bytes: two of them make a body long


class Client:
    """Sends a body in pieces, as it is told to: the other side of `receive`."""

    def __init__(self, held: HeldBodies, length: int, declared: bool = True) -> None:
        self.body = Body(held)
        self.is_gone = self.is_free = self.is_read_in_large_parts = False        # as a Direct
        self.headers = [(b"content-length", str(length).encode())] if declared else [(b"transfer-encoding", b"chunked")]
        self._left = length
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.reading = asyncio.ensure_future(self.body.read(self._receive, self.headers, self))

    async def send(self, num_bytes: int) -> None:
        while num_bytes > 0:
            self._pieces.put_nowait(bytes(min(PIECE, num_bytes)))
            num_bytes -= PIECE
        await turns()

    def write(self, body: bytes) -> None:
        raise AssertionError("a request without its body has no answer")

    def read_much(self) -> None:
        self.is_read_in_large_parts = True

    async def _receive(self) -> dict[str, Any]:
        piece = await self._pieces.get()
        self._left -= len(piece)
        return {"type": "http.request", "body": piece, "more_body": self._left > 0}


async def turns() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def running(test: Callable[[HeldBodies], Awaitable[None]]) -> None:
    """With room for 1,000,000 bytes. `_look` is called by the test, not by the clock."""
    async def run() -> None:
        held = HeldBodies(most=1_000_000, longest=1_000_000)
        held._is_looking = True
        await test(held)
        assert held.num_bytes == 0 and not held.arriving and not held.num_waiting

    asyncio.run(run())


async def look(held: HeldBodies, times: int = 1) -> None:
    for _ in range(times):
        held._look()
        held._is_looking = True
        await turns()


def test_a_body_waits_for_room_and_is_not_refused() -> None:
    """A thousand honest clients at once, each with a tenth of all the room there is."""
    async def test(held: HeldBodies) -> None:
        clients = [Client(held, 100_000) for _ in range(1000)]
        for each in clients:
            each._pieces.put_nowait(bytes(70_000))
        most = 0
        for _ in range(300):
            done = [each for each in clients if each.reading.done()]
            for each in done:
                assert each.reading.exception() is None and each.body.size == 100_000
                each.body.release()
                clients.remove(each)
            for each in clients:
                if each.body.leave:
                    each._pieces.put_nowait(bytes(30_000))
            await turns()
            most = max(most, held.num_bytes)
            assert all(each.is_read_in_large_parts == (each.body.leave > 0) for each in clients)
        assert not clients and 900_000 <= most <= 1_000_000

    running(test)


@pytest.mark.reliability("H-02c")
def test_a_silent_body_gives_way_the_longest_silent_first() -> None:
    async def test(held: HeldBodies) -> None:
        first, second = Client(held, 400_000), Client(held, 400_000)
        await first.send(100_000)
        await second.send(100_000)
        await look(held)                                 # both were heard
        await look(held)
        await second.send(50_000)
        await look(held, SILENT_LOOKS)
        waits = Client(held, 300_000)
        assert not first.reading.done()                  # no other waits
        await waits.send(100_000)
        with pytest.raises(Overloaded):
            await first.reading
        assert not second.reading.done() and waits.body.leave == 300_000
        await second.send(250_000)
        await waits.send(200_000)
        assert second.reading.done() and waits.reading.done()
        for each in (first, second, waits):
            each.body.release()

    running(test)


@pytest.mark.reliability("H-02c")
def test_a_body_that_arrives_never_gives_way() -> None:
    async def test(held: HeldBodies) -> None:
        arrives, waits = Client(held, 900_000), Client(held, 200_000)
        await arrives.send(100_000)
        await waits.send(100_000)
        for _ in range(30):
            await arrives.send(15_000)
            await look(held)
        assert not arrives.reading.done() and not waits.body.leave
        await arrives.send(350_000)
        assert arrives.reading.done() and arrives.reading.exception() is None
        arrives.body.release()
        await waits.send(100_000)
        assert waits.reading.done()
        waits.body.release()

    running(test)


def test_a_trickle_that_cannot_end_in_time_is_silence() -> None:
    async def test(held: HeldBodies) -> None:
        trickles, waits = Client(held, 900_000), Client(held, 200_000)
        await trickles.send(100_000)
        await waits.send(100_000)
        for _ in range(SILENT_LOOKS + 1):
            await trickles.send(10)
            await look(held)
        with pytest.raises(Overloaded):
            await trickles.reading
        await waits.send(100_000)
        assert waits.reading.done()
        trickles.body.release()
        waits.body.release()

    running(test)


def test_without_a_declared_length_a_body_needs_room_for_the_longest_when_it_outgrows_its_first_leave(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "FIRST_LEAVE", 200_000)

    async def test(held: HeldBodies) -> None:
        chunked, other, late = Client(held, 300_000, declared=False), Client(held, 150_000), Client(held, 150_000)
        await chunked.send(100_000)
        await other.send(100_000)
        assert chunked.body.leave == 200_000 and other.body.leave == 150_000
        await other.send(50_000)
        other.body.release()
        await chunked.send(150_000)
        await late.send(100_000)
        assert chunked.body.leave == 1_000_000 and not late.body.leave
        await chunked.send(50_000)
        assert chunked.reading.done() and chunked.body.leave == 300_000 and late.body.leave == 150_000
        await late.send(50_000)
        for each in (chunked, late):
            each.body.release()

    running(test)


def test_bodies_that_outgrow_their_first_leave_do_not_wait_for_each_other_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first leaves take all the room. One at a time goes on beyond it, whatever waits before it."""
    monkeypatch.setattr(admission, "FIRST_LEAVE", 200_000)

    async def test(held: HeldBodies) -> None:
        chunked, small = [Client(held, 300_000, declared=False) for _ in range(5)], Client(held, 90_000)
        for each in chunked:
            await each.send(150_000)
        await small.send(80_000)
        for each in chunked:
            await each.send(100_000)
        assert [each.body.leave for each in chunked] == [1_000_000, *[200_000] * 4] and not small.body.leave
        assert held.num_bytes == 1_800_000
        for each in chunked:
            assert each.body.leave == 1_000_000
            await each.send(50_000)
            each.body.release()
            assert held.num_bytes <= 1_800_000
        assert small.body.leave
        await small.send(10_000)
        small.body.release()

    running(test)


def test_a_trickle_is_measured_by_what_is_reserved_for_it() -> None:
    async def test(held: HeldBodies) -> None:
        trickles, waits = Client(held, 900_000, declared=False), Client(held, 200_000)
        await trickles.send(100_000)
        await waits.send(100_000)
        await look(held)
        for _ in range(SILENT_LOOKS):
            assert not trickles.reading.done()
            await trickles.send(10_000)                  # of 1,000,000
            await look(held)
        with pytest.raises(Overloaded):
            await trickles.reading
        await waits.send(100_000)
        for each in (trickles, waits):
            each.body.release()

    running(test)


def test_a_client_that_leaves_while_its_body_waits_holds_up_no_other() -> None:
    async def test(held: HeldBodies) -> None:
        holds, leaves, waits = Client(held, 900_000), Client(held, 400_000), Client(held, 400_000)
        await holds.send(100_000)
        await leaves.send(100_000)
        await waits.send(100_000)
        assert held.num_waiting == 2
        leaves.is_gone = True
        await holds.send(800_000)
        holds.body.release()
        await turns()
        assert waits.body.leave == 400_000 and not leaves.body.leave
        with pytest.raises(ClientGone):
            await leaves.reading
        last = Client(held, 900_000)
        await last.send(100_000)
        assert held.num_waiting == 1
        last.is_gone = True
        await look(held)                                 # nothing else happens
        assert held.num_waiting == 0
        with pytest.raises(ClientGone):
            await last.reading
        await waits.send(300_000)
        for each in (holds, leaves, waits, last):
            each.body.release()

    running(test)


def test_for_a_request_that_has_ended_no_body_gives_way() -> None:
    async def test(held: HeldBodies) -> None:
        silent, waits = Client(held, 900_000), Client(held, 400_000)
        await silent.send(100_000)
        await waits.send(100_000)
        waits.reading.cancel()
        await turns()
        await look(held, SILENT_LOOKS + 2)
        assert not silent.reading.done()
        await silent.send(800_000)
        assert silent.reading.done() and silent.reading.exception() is None
        for each in (silent, waits):
            each.body.release()

    running(test)


def test_a_body_that_gives_way_while_its_next_part_comes_does_not_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Body] = []

    async def ask(body: Body, num_bytes: int) -> None:
        asked.append(body)

    async def test(held: HeldBodies) -> None:
        silent, waits = Client(held, 900_000), Client(held, 400_000)
        await silent.send(100_000)
        await waits.send(100_000)
        await look(held, SILENT_LOOKS)
        monkeypatch.setattr(held, "leave", ask)
        silent._pieces.put_nowait(bytes(PIECE))          # here before the loop's next turn
        held._look()
        await turns()
        with pytest.raises(Overloaded):
            await silent.reading
        assert waits.body.leave == 400_000 and not asked
        await waits.send(300_000)
        for each in (silent, waits):
            each.body.release()

    running(test)


def test_many_silent_bodies_give_way_a_few_per_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is answered: a thousand at once would hold up health checks."""
    async def test(held: HeldBodies) -> None:
        silent = [Client(held, 100_000) for _ in range(10)]
        waits = [Client(held, 100_000) for _ in range(10)]
        for each in (*silent, *waits):
            await each.send(70_000)
        await look(held, SILENT_LOOKS)                   # one more than the bodies have been silent for, in the last one
        monkeypatch.setattr(admission, "GIVE_WAY_AT_ONCE", 3)
        held._look()
        assert [each.body._gave_way for each in silent] == [True] * 3 + [False] * 7, "those that had leave first"
        await turns()
        assert all(each.body._gave_way for each in silent) and all(each.body.leave for each in waits)
        for each in waits:
            await each.send(30_000)
        for each in (*silent, *waits):
            each.body.release()
        assert all(isinstance(each.reading.exception(), Overloaded) for each in silent)

    running(test)


def test_each_waits_for_leave_for_a_limited_time() -> None:
    """Although others get theirs."""
    async def test(held: HeldBodies) -> None:
        holds, waits = Client(held, 950_000), Client(held, 900_000)
        await holds.send(950_000)
        await waits.send(100_000)
        await look(held, WAIT_LOOKS - 1)
        late = Client(held, 900_000)
        await late.send(100_000)
        small = Client(held, 100_000)
        held.most = 1_100_000
        await small.send(70_000)
        assert small.body.leave
        await look(held, 2)
        with pytest.raises(Overloaded):
            await waits.reading
        assert not late.reading.done()
        holds.body.release()
        await small.send(30_000)
        await late.send(800_000)
        assert late.reading.done() and late.reading.exception() is None
        for each in (waits, late, small):
            each.body.release()

    running(test)


def test_small_bodies_go_first_and_large_ones_are_not_overtaken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(held: HeldBodies) -> None:
        clock = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock)
        holds, large, small = Client(held, 900_000), Client(held, 950_000), Client(held, 110_000)
        await holds.send(100_000)
        await large.send(100_000)
        await small.send(100_000)
        clock = 10.0
        soon = Client(held, 110_000)
        await soon.send(100_000)
        clock = 100.0
        late = Client(held, 110_000)
        await late.send(100_000)
        await holds.send(800_000)
        holds.body.release()
        assert small.body.leave and soon.body.leave and not large.body.leave and not late.body.leave
        for each in (small, soon):
            await each.send(10_000)
            each.body.release()
        assert large.body.leave and not late.body.leave
        await large.send(850_000)
        large.body.release()
        await late.send(10_000)
        late.body.release()

    running(test)


def test_those_that_wait_are_refused_when_nothing_moves() -> None:
    """A router keeps bodies until their answers are complete."""
    async def test(held: HeldBodies) -> None:
        whole, waits = Client(held, 950_000), Client(held, 200_000)
        await whole.send(950_000)
        await waits.send(100_000)
        await look(held, WAIT_LOOKS)
        assert not waits.reading.done()
        await look(held)
        with pytest.raises(Overloaded):
            await waits.reading
        whole.body.release()
        waits.body.release()

    running(test)


# -- a server ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with ScriptedServer(model, lambda prompt: "yes, it is") as made:
        yield made


TURN = [{"role": "user", "content": "a"}]
NAME = "tiny"


@pytest.mark.reliability("H-02c")
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": TURN, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/messages", {"model": NAME, "max_tokens": 1, "messages": TURN}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}),             # refused: this engine has no vectors
    ("/api/chat", {"model": NAME, "messages": TURN}),
    ("/completion", {"prompt": "a", "n_predict": 1}),
    ("/tokenize", {"prompt": "a"}),
])
def test_half_sent_bodies_hold_no_slot(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(server.service.slots, "limit", 2)
    request = post(path, body)
    connections = server._server.server_state.connections
    halves = [connect(server) for _ in range(6)]
    try:
        for each in halves:
            each.sendall(request[:-5])
        wait_until(lambda: sum(each.cycle is not None for each in list(connections)) == len(halves))
        assert server.service.slots.taken == 0
        with connect(server) as whole:
            whole.sendall(request)
            reply = whole.recv(65536)
            assert reply.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), reply[:200]
        halves[0].sendall(request[-5:])
        assert halves[0].recv(65536).startswith(reply[:12])
    finally:
        for each in halves:
            each.close()
    wait_until(lambda: not connections)


def test_a_silent_body_makes_room_for_one_that_waits(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    held = server.service.bodies
    monkeypatch.setattr(held, "most", 150_000)
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.02)
    request = post("/tokenize", {"prompt": "x" * 100_000})
    with connect(server) as silent, connect(server) as waits:
        silent.sendall(request[:-10])
        wait_until(lambda: held.num_bytes > 90_000)
        waits.sendall(request)
        reply = silent.recv(65536)
        assert reply.startswith(b"HTTP/1.1 429") and b"retry-after:" in reply.lower()
        assert waits.recv(65536).startswith(b"HTTP/1.1 400")                 # too long for this model's context
    wait_until(lambda: not held.num_bytes)


def test_a_client_that_leaves_while_its_body_waits_is_forgotten(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is not read while it waits, so its end is looked for."""
    held = server.service.bodies
    monkeypatch.setattr(held, "most", 500_000)
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(admission, "SILENT_LOOKS", 10**9)
    monkeypatch.setattr(admission, "WAIT_LOOKS", 10**9)
    monkeypatch.setattr(connection_limits, "LEFT_SECONDS", 0.02)
    request = post("/tokenize", {"prompt": "x" * 400_000})
    with connect(server) as holds, connect(server) as waits:
        holds.sendall(request[:-10])
        wait_until(lambda: held.num_bytes > 400_000)
        with connect(server) as leaves:
            leaves.sendall(request[:180_000])            # more than is read before it has leave
            wait_until(lambda: held.num_waiting == 1)
        wait_until(lambda: held.num_waiting == 0)
        assert held.num_bytes < 500_000 and held.num_reading == 1
        waits.sendall(request[:180_000])
        wait_until(lambda: held.num_waiting == 1)
        holds.close()
        waits.sendall(request[180_000:])
        assert waits.recv(65536).startswith(b"HTTP/1.1 400")                 # too long for this model's context
    wait_until(lambda: not held.num_bytes and not held.num_reading)


def test_a_request_whose_body_arrives_while_the_server_drains_is_answered(tmp_path: Path) -> None:
    request = post("/v1/chat/completions", {"messages": TURN, "max_tokens": 1})
    with ScriptedServer(write_model(tmp_path / "tiny"), lambda prompt: "yes, it is") as server:
        with connect(server) as begun:
            begun.sendall(request[:-5])
            wait_until(lambda: server.service.bodies.num_reading == 1)
            server._server.should_exit = True
            wait_until(lambda: server.service.stopping)
            server.run_what_is_due()                     # the drain has begun
            begun.sendall(request[-5:])
            assert begun.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.service.num_open == 0

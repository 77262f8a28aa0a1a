"""The router's process: it starts, answers, and on SIGTERM finishes its streams; and its keys from the environment."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from typing import Any

import pytest
from fake_replica import Behaviour, Call, FakeReplica, Router
from test_delivery import CHAT, held, routed

from ridgeline.engine.replicas.prefix_tree import MOST_NODES
from ridgeline.errors import ConfigError
from ridgeline.route.fleet import Fleet, replica_keys
from ridgeline.route.route_options import RouteOptions
from ridgeline.route.route_process import RouteServer
from ridgeline.route.upstream import MOST_IDLE, Upstream
from ridgeline.server.http.admission import Body
from ridgeline.server.http.keys import Keys
from ridgeline.server.long_bodies import BodyReader

BODY = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


def test_sigterm_lets_a_stream_finish_and_a_second_one_ends_the_others() -> None:
    async def test() -> None:
        hold = asyncio.Event()
        async with FakeReplica(Behaviour(hold=hold), Behaviour(hold=asyncio.Event())) as replica:
            environment = os.environ | {"RIDGELINE_ROUTE_KEY": "secret"}
            router = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ridgeline", "route", replica.url, "--port", "0", stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=environment,
            )
            assert router.stdout is not None and router.stderr is not None
            port = 0
            while not port:
                line = (await router.stdout.readline()).decode()
                assert line, (await router.stderr.read()).decode()
                if found := re.search(r"ready: http://127\.0\.0\.1:(\d+)", line):
                    port = int(found[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST % (len(BODY), BODY))
            read = await reader.readuntil(b"one ")
            assert b" 200 " in read and replica.seen[0].headers["authorization"] == "Bearer secret"
            other, other_writer = await asyncio.open_connection("127.0.0.1", port)
            other_writer.write(POST % (len(BODY), BODY))
            await other.readuntil(b"one ")
            router.send_signal(signal.SIGTERM)
            while True:                                      # until it takes no more connections
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                except OSError:
                    break
                await asyncio.sleep(0.02)
            hold.set()
            rest = await reader.read()
            assert b"four " in rest and b"[DONE]" in rest
            router.send_signal(signal.SIGTERM)
            rest = await other.read()
            assert b"this router stopped" in rest and rest.endswith(b"\r\n0\r\n\r\n")
            writer.close()
            other_writer.close()
            assert await router.wait() == 0 and b"Traceback" not in await router.stderr.read()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_the_drain_waits_for_a_body_that_arrives() -> None:
    async def test() -> None:
        fleet, rest = Fleet(["http://127.0.0.1:1"], RouteOptions()), asyncio.Event()

        async def receive() -> dict[str, Any]:
            await rest.wait()
            return {"type": "http.request", "body": b"{}"}

        reading = asyncio.create_task(Body(fleet.bodies).read(receive))
        await asyncio.sleep(0)
        drained = asyncio.create_task(RouteServer(fleet, Keys(), BodyReader())._drain())
        for _ in range(10):
            await asyncio.sleep(0)
        assert fleet.num_open == 1 and not drained.done()
        rest.set()
        await reading
        await drained
        fleet.close()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_what_has_not_ended_when_the_drain_is_over_ends_with_an_error() -> None:
    """Connections were cut, and after a second Ctrl-C each request was logged with a traceback."""
    async def test(router: Router, replica: FakeReplica) -> None:
        _, stream = await held(router, replica)
        mute = asyncio.Event()
        replica.behaviours = [Behaviour(mute=mute)]
        piece = router.start(CHAT | {"stream": False})
        while len(replica.seen) < 2:
            await asyncio.sleep(0)
        router.fleet.stopping = True
        router.fleet.end_all()
        await asyncio.gather(stream.task, piece.task)
        assert stream.is_complete and stream.events[-1]["error"]["code"] == "try_again" and b"stopped" in stream.body
        assert piece.status == 503 and piece.headers["retry-after"] and b"stopping" in piece.body
        assert not router.fleet.deadlines

    routed(test, FakeReplica())


def test_the_drain_ends_beside_a_stream_that_was_too_late_and_whose_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline is over already: to end it again was a RuntimeError, and no other request got its error."""
    reads, is_told, send = asyncio.Event(), asyncio.Event(), Call._send

    async def slow(self: Call, message: Any) -> None:
        if b"request_timeout" in message.get("body", b""):
            is_told.set()
            await reads.wait()
        await send(self, message)

    async def test(router: Router, replica: FakeReplica) -> None:
        monkeypatch.setattr(Call, "_send", slow)
        _, late = await held(router, replica)
        next(iter(router.fleet.deadlines)).reschedule(0.0)
        await is_told.wait()
        _, stream = await held(router, replica)
        router.fleet.end_all()
        await stream.task
        reads.set()
        await late.task
        assert [each.events[-1]["error"]["code"] for each in (late, stream)] == ["request_timeout", "try_again"]

    routed(test, FakeReplica())


def test_keys_for_replicas_come_from_the_environment_and_leave_it() -> None:
    environment = {"RIDGELINE_ROUTE_KEY": "all", "RIDGELINE_ROUTE_KEY_2": "second", "OTHER": "x"}
    assert replica_keys(3, environment) == ["all", "second", "all"]
    assert environment == {"OTHER": "x"}
    with pytest.raises(ConfigError, match="RIDGELINE_ROUTE_KEY"):
        replica_keys(1, {"RIDGELINE_ROUTE_KEY": "a\r\nb: c"})


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:99999", "http://u:p@a", "http://a/?x=1", "http://\u20ac",
                                 "http://a b"])
def test_addresses_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError):
        Upstream(url)


def test_addresses() -> None:
    assert Upstream("http://a:8000/v1/").url == "http://a:8000" and Upstream("http://a/llm").url == "http://a/llm"
    with pytest.raises(ConfigError, match="same address"):
        Fleet(["http://a:1", "http://a:1/"], RouteOptions())


def test_idle_connections_leave_files_for_the_others() -> None:
    """A burst at some replicas, then one at others: the router had no file left, and took all replicas down for it."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        router.fleet.limit_connections(4)
        assert router.fleet.options.max_connections == 4
        for _ in range(3):
            await asyncio.gather(*(router.ask(CHAT) for _ in range(9)))
        assert [len(each.upstream._idle) for each in router.fleet.replicas] == [2, 2]
        router.fleet.limit_connections(1)
        assert router.fleet.replicas[0].upstream.most_idle == 0
        router.fleet.limit_connections(4096)
        assert router.fleet.replicas[0].upstream.most_idle == MOST_IDLE

    routed(test, FakeReplica(), FakeReplica())


def test_the_prefix_trees_of_many_replicas_are_bounded_together() -> None:
    """Those of fifty replicas took 1.5 GB."""
    for count, most in ((1, MOST_NODES), (20, MOST_NODES), (50, 80_000)):
        fleet = Fleet([f"http://10.0.0.{number}:8000" for number in range(count)], RouteOptions())
        assert {each.load.tree.limit for each in fleet.replicas} == {most}

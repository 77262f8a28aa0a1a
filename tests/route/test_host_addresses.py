"""Names of replicas whose lookup hangs or fails: other replicas, health checks and the end of the process do not wait for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_replica import FakeReplica, Router
from test_delivery import CHAT, SAID

from ridgeline.route import host_addresses, upstream
from ridgeline.route.host_addresses import HostAddresses
from ridgeline.route.upstream import ReplicaFailure, Upstream

NUM_HANGING = 40                     # more than asyncio has threads


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What each name is looked up as: addresses, an error, or an event to wait for."""
    known: dict[str, Any] = {}
    whole = socket.getaddrinfo
    hanging: list[threading.Event] = []

    def look_up(host: Any, port: Any, *given: Any, **named: Any) -> Any:
        found = known.get(host)
        if found is None:
            return whole(host, port, *given, **named)
        if isinstance(found, threading.Event):
            hanging.append(found)
            found.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "gave up")
        if isinstance(found, Exception):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield known
    for each in hanging:
        each.set()


def test_names_that_hang_keep_no_other_replica_waiting(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names["good.test"] = ["127.0.0.1"]
    names |= {f"hangs-{number}.test": threading.Event() for number in range(NUM_HANGING)}

    async def test() -> None:
        async with FakeReplica() as replica:
            bad = [FakeReplica() for _ in range(NUM_HANGING)]
            for number, each in enumerate(bad):
                each.url = f"http://hangs-{number}.test:80"
            replica.url = replica.url.replace("127.0.0.1", "good.test")
            router = Router(*bad, replica)
            checks = [asyncio.ensure_future(each.check(60.0)) for each in router.fleet.replicas]
            await asyncio.wait_for(checks[-1], 60)
            assert router.fleet.replicas[-1].failed == 0 and not any(each.done() for each in checks[:-1])
            for each in router.fleet.replicas[:-1]:
                each.up = False
            call = await router.ask(CHAT)
            assert call.text == SAID and (await router.ask(None, "/health")).status == 200
            for check in checks:
                check.cancel()
            router.fleet.close()

    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 600.0)
    asyncio.run(test())                                  # and the loop's end waits for none of their threads


def test_a_name_that_hangs_has_a_deadline_and_one_thread(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names["hangs.test"] = threading.Event()
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 0.05)

    async def test() -> None:
        replica = Upstream("http://hangs.test:80")
        for _ in range(3):
            with pytest.raises(ReplicaFailure, match="no connection within"):
                await asyncio.wait_for(replica.ask("GET", "/health").__aenter__(), 60)
        assert len(lookups() - before) == 1

    def lookups() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "lookup"}

    before = lookups()                                   # of tests before; they may end meanwhile
    asyncio.run(test())


@pytest.mark.parametrize("then", [threading.Event(), socket.gaierror(socket.EAI_FAIL, "no answer")], ids=["hangs", "fails"])
def test_addresses_that_were_found_are_used_while_the_name_is_not(
    then: Any, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_addresses, "PATIENCE", 0.01)
    names["good.test"] = ["127.0.0.9", "127.0.0.9", "127.0.0.1"]

    async def test() -> None:
        addresses = HostAddresses("good.test", 80)
        assert await addresses.find() == ["127.0.0.9", "127.0.0.1"]
        names["good.test"] = then
        assert await addresses.find() == ["127.0.0.9", "127.0.0.1"]
        names["other.test"] = socket.gaierror(socket.EAI_NONAME, "unknown")
        with pytest.raises(OSError, match="unknown"):
            await HostAddresses("other.test", 80).find()

    asyncio.run(test())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%lo"])
def test_an_address_is_not_looked_up(host: str) -> None:
    assert asyncio.run(HostAddresses(host, 80).find()) == [host]


def test_the_next_address_is_tried(names: dict[str, Any]) -> None:
    async def test() -> None:
        async with FakeReplica() as replica:
            port = int(replica.url.rpartition(":")[2])
            names["good.test"] = ["127.0.0.77", "127.0.0.1"]     # nothing listens on the first
            asked = Upstream(f"http://good.test:{port}")
            async with asked.ask("GET", "/health") as answer:
                assert answer.status == 200
                await answer.body(1000)
            names["bad.test"] = ["127.0.0.77", "127.0.0.78"]
            with pytest.raises(ReplicaFailure, match="no connection: "):
                await Upstream(f"http://bad.test:{port}").ask("GET", "/health").__aenter__()
            names["label.test"] = UnicodeError("label too long")
            with pytest.raises(ReplicaFailure, match="no connection: label too long"):
                await Upstream(f"http://label.test:{port}").ask("GET", "/health").__aenter__()
            asked.close()

    asyncio.run(test())

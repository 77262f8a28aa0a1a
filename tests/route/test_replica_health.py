"""Health checks: which replicas are given requests, and how soon one that was restarted is."""

from __future__ import annotations

import asyncio

import pytest
from fake_replica import Behaviour, FakeReplica, Router
from test_delivery import CHAT, GREEDY, SAID, first_of, routed

from ridgeline.engine.replicas.doubts import DOUBT_SECONDS, IN_A_ROW
from ridgeline.route.replica import keep_checking


def test_health_checks_take_a_replica_down_and_back() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        one = router.fleet.replicas[0]
        replica.health = 500
        for up in (True, True, False, False):
            await one.check(60.0)
            assert one.up == up
        replica.health = 200
        await one.check(60.0)
        assert one.up
        replica.health = 503                                 # it loads or stops, and says so
        for _ in range(4):
            await one.check(60.0)
            assert not one.up
        replica.health = 404                                 # a server without /health
        await one.check(60.0)
        assert one.up

    routed(test, FakeReplica())


def test_a_replica_that_is_down_is_checked_as_often_as_others() -> None:
    """Its checks became rarer, up to 30 s apart: a restarted replica waited that long, and what it had asked for before."""
    pauses: list[float] = []

    async def test(router: Router, replica: FakeReplica) -> None:
        one = router.fleet.replicas[0]
        replica.health = 500
        one.asked_to_wait(b"60")

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            assert one.up == (len(pauses) < 3)
            if len(pauses) == 9:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await keep_checking(one, 5.0, (), sleep)
        assert pauses == [5.0] * 9 and not router.fleet.usable()
        replica.health = 200
        await one.check(60.0)
        assert router.fleet.usable() == [0]

    routed(test, FakeReplica())


def test_a_rolling_restart_fails_no_request() -> None:
    """One after the other stops: it refuses what is new, finishes what it has, ends, loads, and is back."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        async def clients(how_many: int = 3) -> None:
            bodies = [CHAT, GREEDY, CHAT | {"stream": False}] * how_many
            calls = await asyncio.gather(*(router.ask(body) for body in bodies))
            assert [each.status for each in calls] == [200] * len(calls)
            assert all(each.text == SAID for each, body in zip(calls, bodies, strict=True) if body["stream"])

        for number, replica in enumerate(replicas):
            one = router.fleet.replicas[number]
            hold = asyncio.Event()
            while first_of(router) != number:
                router.fleet.choice._turn += 1
            replica.behaviours = [Behaviour(hold=hold), Behaviour(status=503, headers={"retry-after": "5"})]
            open_stream = router.start(CHAT)
            while open_stream.text != "one ":
                open_stream.news.clear()
                await open_stream.news.wait()
            await clients()                                  # SIGTERM: it says so to requests, and in /health
            replica.health = 503
            await one.check(60.0)
            await clients()
            hold.set()
            await open_stream.task
            assert open_stream.text == SAID and not one.up
            await replica.stop()
            await clients()
            await one.check(60.0)
            await replica.start_again()                      # it loads …
            await one.check(60.0)
            await clients()
            replica.health, replica.behaviours = 200, [Behaviour()]      # … and is back; the next stops before a check
            router.seconds += 1.0
        assert not router.fleet.counts["refused"] and not router.fleet.counts["broken_streams"]

    routed(test, FakeReplica(), FakeReplica())


def test_requests_do_not_wait_again_and_again_for_a_replica_that_does_not_even_refuse() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        (one,) = router.fleet.replicas
        one.up, looks = False, list[float]()

        async def slow() -> None:
            looks.append(router.seconds)
            router.seconds += 1.0

        one.look_again = slow                                # type: ignore[method-assign]
        for _ in range(16):
            assert (await router.ask(CHAT)).status == 503
            router.seconds += 0.5
        assert looks == [0.0, 6.0]

    routed(test, FakeReplica())


def test_replicas_that_are_killed_under_load_fail_no_stream_that_can_be_continued() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        for number, replica in enumerate(replicas):
            hold = asyncio.Event()
            for each in replicas:
                each.behaviours = [Behaviour(hold=hold)] * 4 + [Behaviour()]
            calls = [router.start(GREEDY) for _ in range(8)]
            while not all(call.text for call in calls):
                await asyncio.sleep(0)
            await replica.stop()
            while sum(call.task.done() for call in calls) < 4:
                await asyncio.sleep(0)
            hold.set()
            await asyncio.gather(*(call.task for call in calls))
            assert all(call.text == SAID and call.events[-1] == "[DONE]" for call in calls)
            assert router.fleet.counts["resumed_streams"] == 4 * (number + 1)
            await replica.start_again()
            await router.fleet.replicas[number].check(60.0)

    routed(test, FakeReplica(), FakeReplica())


@pytest.mark.parametrize("stopped", [False, True])
def test_the_last_replica_that_has_time_is_found(stopped: bool) -> None:
    """Those that cannot be reached, or have no time, are idle: three of them were all that a request was sent to."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        for each in replicas[:-1] if stopped else ():
            await each.stop()
        for _ in range(3):
            assert (await router.ask(CHAT)).text == SAID
            router.seconds += 10.0

    busy = Behaviour(status=503, headers={"retry-after": "9"})
    routed(test, *(FakeReplica(busy) for _ in range(6)), FakeReplica(), policy="least-pending")


def test_replicas_that_fail_at_once_do_not_take_every_try() -> None:
    """Six of seven were started with another model: they were idle, so each request went to three of them and failed."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        failed = [(await router.ask(CHAT)).status for _ in range(6 * IN_A_ROW)].count(404)
        assert failed < 6
        for _ in range(6):
            router.seconds += DOUBT_SECONDS
            assert (await router.ask(CHAT)).text == SAID
        assert [(await router.ask(None, "/v1/models")).status for _ in range(6 * IN_A_ROW)].count(404) < 6
        for each in replicas[:-1]:
            each.behaviours = [Behaviour()]
        assert (await router.ask(CHAT | {"model": "other"})).text == SAID
        assert sum(each.seen[-1].body.get("model") == "other" for each in replicas[:-1]) == 1
        for each in replicas[:-1]:
            each.behaviours = [*([Behaviour(status=404)] * IN_A_ROW), Behaviour()]
        for _ in range(6 * IN_A_ROW):                        # a server may have no such page, and answer all else
            await router.ask({"model": "other", "prompt": "hello"}, "/tokenize")
        for _ in replicas:
            assert (await router.ask(CHAT | {"model": "other"})).text == SAID
        assert [each.seen[-1].path for each in replicas] == ["/v1/chat/completions"] * len(replicas)

    routed(test, *(FakeReplica(Behaviour(status=404)) for _ in range(6)), FakeReplica(), policy="least-pending")


def test_one_request_tries_a_replica_that_has_failed() -> None:
    """All that came before its answer went there, as it is idle."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        mute, bad = asyncio.Event(), replicas[0]
        bad.behaviours = [*[Behaviour(status=500)] * IN_A_ROW, Behaviour(mute=mute)]
        for _ in range(3 * IN_A_ROW):
            assert (await router.ask(CHAT)).text == SAID
        router.seconds += DOUBT_SECONDS
        calls = [router.start(CHAT) for _ in range(8)]
        while sum(len(each.seen) for each in replicas) < 4 * IN_A_ROW + len(calls):
            await asyncio.sleep(0)
        assert len(bad.seen) == IN_A_ROW + 1
        mute.set()
        await asyncio.gather(*(each.task for each in calls))

    routed(test, FakeReplica(), FakeReplica())


def test_a_replica_that_was_restarted_is_used_at_once() -> None:
    """For half a minute others were chosen first: requests had not reached it while it was down."""
    async def test(router: Router, first: FakeReplica, other: FakeReplica) -> None:
        await first.stop()
        for _ in range(3 * IN_A_ROW):
            assert (await router.ask(CHAT)).text == SAID
        assert not router.fleet.replicas[0].up
        await first.start_again()
        await router.fleet.replicas[0].check(60.0)
        for _ in range(2):
            assert (await router.ask(CHAT)).text == SAID
        assert len(first.seen) == 1

    routed(test, FakeReplica(), FakeReplica())

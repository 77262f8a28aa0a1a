"""Health checks: which replicas are given requests, and how soon one that was restarted is."""

from __future__ import annotations

import asyncio

import pytest
from fake_replica import FakeReplica, Router
from test_delivery import routed

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

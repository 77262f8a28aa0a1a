"""GET /fleet and /dashboard of a router: what its replicas say of themselves, and what it has learned of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fake_replica import FakeReplica, Router

from ridgeline.route.replica import MOST_SAMPLES, read_metrics

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 3
vllm:num_requests_running{model_name="m",engine="1"} 4
vllm:num_requests_waiting{model_name="m",engine="0"} 1
vllm:generation_tokens_total{model_name="m",engine="0"} %d
vllm:prefix_cache_hits_total 90
vllm:prefix_cache_queries_total 100
ridgeline:mfu{model_name="m",engine="0"} 0.2
ridgeline:mfu{model_name="m",engine="1"} 0.4
vllm:kv_cache_usage_perc odd
ridgeline:mbu NaN
vllm:num_requests_waiting +Inf
"""


def test_numbers_are_read_and_those_of_several_engines_joined() -> None:
    found = read_metrics((PAGE % 50).encode())
    assert found["vllm:num_requests_running"] == 7 and found["vllm:generation_tokens_total"] == 50
    assert abs(found["ridgeline:mfu"] - 0.3) < 1e-9 and "vllm:kv_cache_usage_perc" not in found
    assert found["vllm:num_requests_waiting"] == 1 and "ridgeline:mbu" not in found and read_metrics(b"") == {}


def test_numbers_that_cannot_be_are_left_out() -> None:
    """Two of 1e308 are more than any number: the page of all replicas failed."""
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total"):
        assert read_metrics(f"{name} 1e308\n{name} 1e308\n{name} -5\n{name} -inf\n".encode()) == {}
        assert read_metrics(f"{name} 1e308\n{name} 2\n".encode()) == {name: 2}


def test_the_fleet_of_a_router() -> None:
    async def test() -> None:
        async with FakeReplica() as one, FakeReplica() as other:
            one.metrics = PAGE % 50
            router = Router(one, other)
            router.fleet.replicas[1].up = False

            async def fleet() -> dict[str, Any]:
                return dict(json.loads((await router.ask(None, "/fleet")).body))

            first = await fleet()
            assert first["kind"] == "servers" and [each["state"] for each in first["rows"]] == ["ok", "down"]
            assert first["rows"][0] | {"running": 7, "waiting": 1, "hit_rate": 0.9, "tokens_s": None} == first["rows"][0]
            assert first["rows"][1]["hit_rate"] is None and first["notes"] == [f"{other.url} gets no requests: down"]
            one.metrics, router.seconds = PAGE % 250, 4.0
            assert (await fleet())["rows"][0]["tokens_s"] == 50.0
            page = await router.ask(None, "/dashboard")
            assert page.status == 200 and b"fleetCells" in page.body and "nonce" in page.headers["content-security-policy"]
            router.fleet.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_page_of_many_engines_is_read() -> None:
    """Of a server with seventeen engines, the page was too long, and nothing of it was shown."""
    async def test() -> None:
        async with FakeReplica() as replica:
            engine = "".join(f'vllm:e2e_request_latency_seconds_bucket{{engine="9",le="{each}"}} 0.0\n' for each in range(1000))
            replica.metrics = (engine + PAGE % 50) * 32
            router = Router(replica)
            assert len(replica.metrics) > 3 * 2**19
            assert (await router.fleet.replicas[0].numbers())["vllm:num_requests_running"] == 7 * 32
            router.fleet.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_replicas_are_asked_once_for_all_who_look_at_the_fleet() -> None:
    """Fifty pages that were open asked each of fifty replicas, and read megabytes of each answer."""
    async def test() -> None:
        async with FakeReplica() as replica:
            router, asked = Router(replica), list[str]()
            ask = router.fleet.replicas[0].upstream.ask

            def counted(method: str, path: str) -> Any:
                asked.append(path)
                return ask(method, path)

            router.fleet.replicas[0].upstream.ask = counted  # type: ignore[method-assign, assignment]
            calls = [router.start(None, "/fleet") for _ in range(9)]
            calls[0].leave()
            await asyncio.gather(*(each.task for each in calls))
            assert asked == ["/metrics"] and {each.status for each in calls[1:]} == {200}
            await router.ask(None, "/fleet")
            assert asked == ["/metrics"] * 2
            router.fleet.close()

    asyncio.run(test())


def test_a_page_of_metrics_without_an_end_is_read_in_a_bounded_time() -> None:
    name = b"vllm:num_requests_running"
    assert read_metrics(b"\n".join([name + b" 1"] * 2 * MOST_SAMPLES)) == {name.decode(): MOST_SAMPLES}
    page = b"\n" * 9 + name + b"_max 3\n" + name + b"\n" + name + b'{a="} b"} 4\n'
    assert read_metrics(page) == {name.decode(): 4}

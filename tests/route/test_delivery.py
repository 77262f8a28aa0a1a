"""Requests through the router to scripted replicas: streams, retries, death in mid-answer, keys, drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fake_replica import Behaviour, FakeReplica, Router

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.engine.replicas.doubts import DOUBT_SECONDS, IN_A_ROW
from ridgeline.errors import NotNow, Overloaded
from ridgeline.route import answer_events, delivery, upstream
from ridgeline.server.http.failures import describe

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
GREEDY = CHAT | {"temperature": 0}
SAID = "one two three four "


def routed(
    test: Callable[..., Awaitable[None]], *replicas: FakeReplica, **options: Any
) -> None:
    """Run a test's coroutine with a router in front of these replicas."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for each in replicas:
                await stack.enter_async_context(each)
            router = Router(*replicas, **({"policy": "round-robin"} | options))
            await asyncio.wait_for(test(router, *replicas), 120)
            router.fleet.close()
            assert router.fleet.slots.taken == 0 and all(each.load.pending == 0 for each in router.fleet.replicas)

    asyncio.run(run())


async def held(router: Router, replica: FakeReplica) -> tuple[asyncio.Event, Any]:
    """A stream that stops after its first word, and what lets it go on."""
    hold = asyncio.Event()
    replica.behaviours = [Behaviour(hold=hold)]
    call = router.start(CHAT)
    while call.text != "one ":
        call.news.clear()
        await call.news.wait()
    return hold, call


def first_of(router: Router) -> int:
    """The replica that round robin will take next."""
    return (router.fleet.choice._turn + 1) % len(router.fleet.replicas)


def test_a_stream_passes_and_its_usage_is_read_and_hidden() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(CHAT, x_request_id="abc-1")
        assert call.status == 200 and call.text == SAID and call.events[-1] == "[DONE]"
        assert not any("usage" in each for each in call.events[:-1])
        assert call.headers["x-request-id"] == "abc-1" == replica.seen[0].headers["x-request-id"]
        assert replica.seen[0].body == CHAT | {"stream_options": {"include_usage": True}}
        counts = router.fleet.replicas[0].counts
        assert (counts["prompt_tokens"], counts["cached_tokens"], counts["generation_tokens"]) == (10, 7, 4)
        asked = await router.ask(CHAT | {"stream_options": {"include_usage": True}})
        assert asked.events[-2]["usage"]["prompt_tokens"] == 10

    routed(test, FakeReplica(Behaviour(cached=7)))


def test_a_last_event_without_an_empty_line_is_not_lost() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(CHAT)
        assert call.text == SAID and call.events[-1] == "[DONE]"

    routed(test, FakeReplica(Behaviour(last=b"data: [DONE]\r\n")))


def test_events_are_passed_on_as_they_come() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        hold, call = await held(router, replica)
        load = router.fleet.replicas[0].load
        assert not call.task.done() and len(load.running) == 1 and not load.waiting
        hold.set()
        await call.task
        assert call.text == SAID

    routed(test, FakeReplica())


def test_an_answer_in_one_piece() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(CHAT | {"stream": False})
        assert call.status == 200 and json.loads(call.body)["usage"]["prompt_tokens"] == 10
        assert int(call.headers["content-length"]) == len(call.body)
        models = await router.ask(None, "/v1/models")
        assert json.loads(models.body) == {"data": [{"id": "fake"}]}

    routed(test, FakeReplica())


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_refused_request_goes_to_another_replica(status: int) -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad = first_of(router)
        replicas[bad].behaviours = [Behaviour(status=status, headers={"retry-after": "7"})]
        call = await router.ask(CHAT)
        assert call.text == SAID and len(replicas[bad].seen) == 1 and router.fleet.counts["retries"] == 1
        if status != 502:                                    # its wish is respected …
            assert router.fleet.usable() == [1 - bad]
            router.seconds += 7.1
        assert router.fleet.usable() == [0, 1]               # … and one failure does not take it down

    routed(test, FakeReplica(), FakeReplica())


@pytest.mark.parametrize("status", [401, 403, 404, 500, 302, 405, 421, 520])
def test_what_one_replica_cannot_answer_another_may(status: int) -> None:
    """One with another model or key, a broken engine, or a proxy in front of it that redirects is healthy and idle: it was given
    half of all requests, failing them."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad = first_of(router)
        replicas[bad].behaviours = [Behaviour(status=status)]
        for _ in range(8):                                   # a retry takes a turn, too: it is asked first every time
            assert (await router.ask(CHAT)).text == SAID
        assert len(replicas[bad].seen) == IN_A_ROW == router.fleet.counts["retries"]
        router.seconds += DOUBT_SECONDS
        for _ in range(8):
            assert (await router.ask(CHAT)).text == SAID
        assert len(replicas[bad].seen) == IN_A_ROW + 1       # tried again, and once
        assert router.fleet.usable() == [0, 1]               # no client can take it down
        replicas[1 - bad].behaviours = [Behaviour(status=status)]
        call = await router.ask(CHAT)                        # it was the request's mistake: the replicas' own words
        assert call.status == status and json.loads(call.body) == {"error": {"message": "as scripted"}}
        assert not router.fleet.counts["refused"] and router.fleet.usable() == [0, 1]
        replicas[1 - bad].behaviours = [Behaviour(status=429)]
        assert (await router.ask(CHAT)).status == 429        # the other one does not say that it has no such model

    routed(test, FakeReplica(), FakeReplica())


def test_when_all_are_busy_the_client_learns_when_to_return() -> None:
    busy = Behaviour(status=429, headers={"retry-after": "9"})

    async def test(router: Router, *replicas: FakeReplica) -> None:
        first = await router.ask(CHAT)
        assert first.status == 429 and first.headers["retry-after"] == "9"           # the replica's own words
        second = await router.ask(CHAT)
        assert second.status == 429 and 9 <= int(second.headers["retry-after"]) <= 12
        assert json.loads(second.body)["error"]["code"] == "overloaded"
        assert sum(len(each.seen) for each in replicas) == 2                         # none is asked again before that

    routed(test, FakeReplica(busy), FakeReplica(busy))


def test_a_request_with_its_own_deadline_makes_no_replica_busy() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(CHAT, x_ttft_deadline_ms="5")
        assert call.status == 429 and router.fleet.usable() == [0]

    routed(test, FakeReplica(Behaviour(status=429)))


def test_a_refusal_that_concerns_one_request_makes_no_replica_busy() -> None:
    """A client with costly grammars kept all others from every replica, for seconds each time."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(CHAT)
        assert call.status == 429 and sum(len(each.seen) for each in replicas) == 2
        assert router.fleet.usable() == [0, 1]

    headers = {name.decode(): value.decode() for name, value in describe(NotNow("no time"))[2]}
    refused = Behaviour(status=429, headers=headers)
    routed(test, FakeReplica(refused), FakeReplica(refused))


def test_an_error_of_the_request_is_not_retried() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(CHAT)
        assert call.status == 400 and sum(len(each.seen) for each in replicas) == 1
        assert all(each.up and not each.failed for each in router.fleet.replicas)
        for body in (b"{", b"[1]", b'"x"'):
            bad = router.start({})
            bad._body = body
            await bad.task
            assert bad.status == 400

    routed(test, FakeReplica(Behaviour(status=400)), FakeReplica(Behaviour(status=400)))


@pytest.mark.parametrize("size", [3 * 2**20, 40_000])
def test_a_long_answer_in_one_piece_passes_as_it_comes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept until its end, up to 64 MiB, and refused above."""
    kept: list[int] = []
    monkeypatch.setattr(answer_events.HELD, "most", 0 if size < LONG_BYTES else answer_events.MOST_HELD)
    add = answer_events.Beginning.add

    def noted(self: Any, piece: bytes) -> bool:
        goes_on = add(self, piece)
        kept.append(len(self._kept))
        return goes_on

    monkeypatch.setattr(answer_events.Beginning, "add", noted)

    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(CHAT | {"stream": False})
        assert call.status == 200 and call.body.count(b"x") == size and int(call.headers["content-length"]) == len(call.body)
        assert max(kept) <= answer_events.MOST_READ + 4 * upstream.HIGH_WATER and answer_events.HELD.num_bytes == 0
        assert router.fleet.replicas[0].counts["answers"] == 1 and (len(call.parts) > 2) == (size > LONG_BYTES)

    routed(test, FakeReplica(Behaviour(text="x" * size)))


def test_a_long_event_of_a_stream_passes_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """To keep it until its end, and to read it, took the memory of all others and held up the event loop."""
    read: list[int] = []
    take = answer_events.AnswerEvents.take

    def noted(self: Any, event: bytes) -> bytes:
        read.append(len(event))
        return take(self, event)

    monkeypatch.setattr(answer_events.AnswerEvents, "take", noted)
    long = ["one ", "x" * 5 * answer_events.MOST_READ, " two"]

    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(GREEDY)
        assert call.text == "".join(long) and call.events[-1] == "[DONE]"
        assert len(call.events) == 6 and max(read) < 1_000               # the usage is hidden
        assert router.fleet.replicas[0].counts["answers"] == 1 and answer_events.HELD.num_bytes == 0

    routed(test, FakeReplica(Behaviour(pieces=long)))


def test_a_stream_that_breaks_in_a_long_event_ends_with_an_error_of_its_own() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad = first_of(router)
        replicas[bad].behaviours = [Behaviour(pieces=["one ", "x" * 2 * answer_events.MOST_READ], breaks_in=2)]
        call = await router.ask(GREEDY)
        assert json.loads(call.body.split(b"data: ")[-1])["error"]["code"] == "replica_failed"
        assert b"xx\n\ndata: {" in call.body and not replicas[1 - bad].seen
        assert router.fleet.counts["broken_streams"] == 1 and answer_events.HELD.num_bytes == 0

    routed(test, FakeReplica(), FakeReplica())


def test_an_event_that_the_threads_have_no_time_for_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read on the event loop, while all other streams waited."""
    read: list[int] = []
    take = answer_events.AnswerEvents.take

    def noted(self: Any, event: bytes) -> bytes:
        read.append(len(event))
        return take(self, event)

    async def busy(num_bytes: int, work: Callable[[], bytes]) -> bytes:
        raise Overloaded("busy")

    monkeypatch.setattr(answer_events.AnswerEvents, "take", noted)
    monkeypatch.setattr(delivery, "away_if_long", busy)
    long = ["one ", "x" * 2 * LONG_BYTES, " two"]

    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(GREEDY)
        assert call.text == "".join(long) and len(read) == 6

    routed(test, FakeReplica(Behaviour(pieces=long)))


def test_a_head_without_an_end_is_not_kept() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        call = await router.ask(CHAT | {"stream": False})
        assert call.status == 502 and router.fleet.replicas[0].failed

    routed(test, FakeReplica(Behaviour(headers={"x-long": "y" * 2 * upstream.MOST_HEAD})))


def test_without_a_replica_the_router_says_so() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        replica._server.close()
        for _ in range(3):
            call = await router.ask(CHAT)
            assert call.status == 502 and "retry-after" in call.headers
            assert json.loads(call.body)["error"]["code"] == "replica_failed"
        assert not router.fleet.replicas[0].up
        call = await router.ask(CHAT)
        assert call.status == 503 and "retry-after" in call.headers
        assert (await router.ask(None, "/health")).status == 503

    routed(test, FakeReplica())


@pytest.mark.parametrize("stream", [True, False])
def test_before_anything_is_sent_any_request_may_be_sent_again(stream: bool) -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        replicas[first_of(router)].behaviours = [Behaviour(dies_after=0)]
        call = await router.ask(CHAT | {"stream": stream, "temperature": 1.0})
        assert call.status == 200 and (call.text == SAID if stream else b"four" in call.body)
        assert router.fleet.counts["retries"] == 1

    routed(test, FakeReplica(), FakeReplica())


@pytest.mark.parametrize("how", [{"dies_after": 3}, {"error_after": 3}, {"dies_after": 1}, {"ends": False}])
@pytest.mark.parametrize("exact", [{"temperature": 0}, {"seed": 5}])
def test_an_exact_stream_goes_on_elsewhere(how: dict[str, Any], exact: dict[str, Any]) -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        replicas[first_of(router)].behaviours = [Behaviour(**how)]
        call = await router.ask(CHAT | exact | {"stream_options": {"include_usage": True}})
        assert call.text == SAID and call.events[-1] == "[DONE]"
        chunks = [each for each in call.events if isinstance(each, dict)]
        assert len({each["id"] for each in chunks} - {"end"}) == 1               # one answer for the client
        assert sum("role" in each["choices"][0]["delta"] for each in chunks if each["choices"]) == 1
        assert sum(bool(each["choices"][0].get("finish_reason")) for each in chunks if each["choices"]) == 1
        assert chunks[-1]["usage"]["completion_tokens"] == 4
        assert router.fleet.counts["resumed_streams"] == 1 and not router.fleet.counts["broken_streams"]

    routed(test, FakeReplica(), FakeReplica())


def test_words_are_cut_where_the_first_replica_stopped() -> None:
    """The second replica's events may have other borders."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad = first_of(router)
        replicas[bad].behaviours = [Behaviour(pieces=["one t", "wo th", "ree"], dies_after=3)]
        replicas[1 - bad].behaviours = [Behaviour(pieces=["one", " two", " three", " four"])]
        call = await router.ask(GREEDY)
        assert [each["choices"][0]["delta"].get("content") for each in call.events[1:-2]] == ["one t", "wo th", "ree", " four"]

    routed(test, FakeReplica(), FakeReplica())


@pytest.mark.parametrize("body", [CHAT, GREEDY | {"logprobs": True}, GREEDY | {"n": 2}])
def test_a_stream_that_cannot_be_continued_ends_with_an_error(body: dict[str, Any]) -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad = first_of(router)
        replicas[bad].behaviours = [Behaviour(dies_after=3)]
        call = await router.ask(body)
        assert call.status == 200 and call.text == "one two " and call.events[-1]["error"]["code"] == "replica_failed"
        assert not replicas[1 - bad].seen and router.fleet.counts["broken_streams"] == 1
        assert not router.fleet.replicas[bad].counts["moved"]

    routed(test, FakeReplica(), FakeReplica())


def test_another_answer_is_not_passed_off_as_the_same() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad = first_of(router)
        replicas[bad].behaviours = [Behaviour(dies_after=3)]
        for other in ("one TWO three", "one"):
            replicas[1 - bad].behaviours = [Behaviour(other)]
            router.fleet.choice._turn = bad - 1
            call = await router.ask(GREEDY)
            assert call.text == "one two " and "error" in call.events[-1]
            assert router.fleet.replicas[1 - bad].failed == 0

    routed(test, FakeReplica(), FakeReplica(), health_failures=9)


def test_a_complete_answer_only_gets_its_end() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        bad = first_of(router)
        replicas[bad].behaviours = [Behaviour(ends=False)]
        call = await router.ask(CHAT)
        assert call.text == SAID and call.events[-1] == "[DONE]" and not replicas[1 - bad].seen

    routed(test, FakeReplica(), FakeReplica())


def test_retries_are_limited() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(CHAT)
        assert call.status == 502 and sum(len(each.seen) for each in replicas) == 2
        assert sum(each.counts["moved"] for each in router.fleet.replicas) == 1              # the last goes nowhere

    routed(test, *(FakeReplica(Behaviour(dies_after=0)) for _ in range(4)), retries=1)


def test_a_client_that_leaves_cancels_its_request() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        replica.behaviours = [Behaviour(hold=asyncio.Event())]
        call = router.start(CHAT)
        while call.text != "one ":
            call.news.clear()
            await call.news.wait()
        call.leave()
        await call.task
        await asyncio.wait_for(replica.seen[0].gone.wait(), 60)
        assert router.fleet.replicas[0].up and not router.fleet.replicas[0].failed

    routed(test, FakeReplica())


def test_while_it_drains_open_streams_finish_and_new_requests_are_refused() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        hold, call = await held(router, replica)
        router.fleet.stopping = True
        refused = await router.ask(CHAT)
        assert refused.status == 503 and "retry-after" in refused.headers
        health = await router.ask(None, "/health")
        assert health.status == 503 and json.loads(health.body)["status"] == "stopping"
        hold.set()
        await call.task
        assert call.text == SAID and call.events[-1] == "[DONE]"

    routed(test, FakeReplica())


def test_keys() -> None:
    async def test(router: Router, one: FakeReplica, other: FakeReplica) -> None:
        assert (await router.ask(CHAT)).status == 401
        assert (await router.ask(None, "/replicas")).status == (await router.ask(None, "/metrics")).status == 401
        assert (await router.ask(None, "/health")).status == 200
        for _ in range(2):
            call = await router.ask(CHAT, authorization="Bearer front-1")
            assert call.status == 200
        other_key = await router.ask(CHAT | {"cache_salt": "mine"}, x_api_key="front-2")
        assert other_key.status == 200
        seen = [*one.seen, *other.seen]
        assert {each.headers["authorization"] for each in one.seen} == {"Bearer back-1"}
        assert {each.headers["authorization"] for each in other.seen} == {"Bearer back-2"}
        assert not any("front" in json.dumps([each.headers, each.body]) for each in seen)
        salts = {each.body["cache_salt"] for each in seen}   # keys share no cache, whatever salt they send
        assert len(salts) == 2 and sum(salt.endswith(":mine") for salt in salts) == 1

    routed(test, FakeReplica(), FakeReplica(), keys=("front-1", "front-2"), replica_keys=("back-1", "back-2"))


def test_without_keys_of_its_own_the_clients_key_is_passed_on() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        await router.ask(CHAT, authorization="Bearer mine", cookie="a=b", x_forwarded_for="1.2.3.4")
        headers = replica.seen[0].headers
        assert headers["authorization"] == "Bearer mine" and "cookie" not in headers and "x-forwarded-for" not in headers

    routed(test, FakeReplica())


def test_conversations_return_to_their_replica() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        homes = {}
        for turn in range(3):
            for name in "abcdef":
                messages = [{"role": "user", "content": name * (3000 + 500 * turn)}]
                router.seconds += 1.0
                before = [len(each.seen) for each in replicas]
                await router.ask(CHAT | {"messages": messages})
                after = [len(each.seen) for each in replicas]
                home = next(number for number in range(3) if after[number] > before[number])
                assert homes.setdefault(name, home) == home
        assert len(set(homes.values())) == 3

    routed(test, *(FakeReplica(Behaviour(prompt_tokens=800)) for _ in range(3)), policy="predicted")


def test_pages_and_paths() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        await router.ask(CHAT)
        metrics = (await router.ask(None, "/metrics")).body.decode()
        label = f'{{policy="round-robin",replica="{replica.url}"}}'
        assert f"ridgeline:route_answers_total{label} 1" in metrics and f"ridgeline:route_replica_up{label} 1" in metrics
        assert 'ridgeline:route_first_token_seconds_count{policy="round-robin"} 1' in metrics
        assert json.loads((await router.ask(None, "/replicas")).body)["replicas"][0]["answers"] == 1
        for path, says in (("/v1/responses", b"docs/router.md"), ("/chat/completions", b"did you mean /v1/chat/completions?")):
            missing = await router.ask(CHAT, path)
            assert missing.status == 404 and says in missing.body
        page, told = await router.ask(None, "/", accept="text/html,*/*"), await router.ask(None, "/v1")
        assert page.status == 307 and page.headers["location"] == "/dashboard"
        assert json.loads(told.body)["openai_base_url"] == "/v1"
        assert (await router.ask(None, "/v1/chat/completions")).status == 405
        assert (await router.ask(None, "/roofline")).status == 404
        assert (await router.ask(CHAT, content_type="text/plain")).status == 415
        assert len(replica.seen) == 1

    routed(test, FakeReplica())


def test_head_is_answered_as_get_is_and_options_as_by_a_server() -> None:
    """Load balancers check with HEAD: the router said 405 to all of them."""
    async def test(router: Router, replica: FakeReplica) -> None:
        for path in ("/health", "/ping", "/v1/models", "/", "/metrics"):
            head, got = await router.look("HEAD", path), await router.look("GET", path)
            names = [sorted(each.headers) for each in (head, got)]
            assert head.status == got.status == 200 and names[0] == names[1]
        assert [each.path for each in replica.seen] == ["/v1/models"] * 2
        for method, path, allowed in (
            ("OPTIONS", "/v1/chat/completions", "POST"), ("HEAD", "/v1/embeddings", "POST"), ("DELETE", "/fleet", "GET, HEAD"),
        ):
            refused = await router.look(method, path)
            assert refused.status == 405 and refused.headers["allow"] == allowed
        asked = {"origin": "http://a.example", "access_control_request_method": "POST"}
        preflight = await router.look("OPTIONS", "/v1/chat/completions", **asked)
        assert preflight.status == 204 and preflight.headers["access-control-allow-origin"] == "http://a.example"

    routed(test, FakeReplica(), allowed_origins="http://a.example")

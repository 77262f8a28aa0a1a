"""Replicas that lie, or that are silent: bytes that are no answer, two answers for one request, counts that cannot be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_replica import Behaviour, FakeReplica, Router
from test_delivery import CHAT, GREEDY, SAID, first_of, routed

from ridgeline.route import delivery
from ridgeline.route.replica import keep_checking

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
LINE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


class Scripted(FakeReplica):
    """A replica that sends these bytes to each request, and reads on."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__()
        self.answers = list(answers)                     # the last one stays
        self.requests = 0

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0))
                self.requests += 1
                writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()


def answer(content: object, head: bytes = LINE) -> bytes:
    body = json.dumps(content).encode()
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def said(usage: object = None) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}], "usage": usage}


@pytest.mark.parametrize(("sent", "reason"), [
    (answer(said(), LINE.replace(b"200", b"999")), "status 999"), (answer(said(), LINE.replace(b"200", b"600")), "status 600"),
    (answer(said(), LINE.replace(b"200", b"099")), "status 99"), (answer(said(), LINE.replace(b"200", b"000")), "status 0"),
    (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n....", "not HTTP"),
    (answer(said(), LINE + b"".join(b"x-%d: y\r\n" % number for number in range(101))), "more than 100 headers"),
], ids=["999", "600", "099", "000", "101", "headers"])
def test_what_no_client_could_read_is_a_failure_of_its_replica(
    sent: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(ASKED)
        assert call.status == 502 and call.headers["retry-after"]
        assert router.fleet.replicas[0].failed == 1 and reason in caplog.text and "Traceback" not in caplog.text

    routed(test, Scripted(sent))


@pytest.mark.reliability("H-03b")
def test_of_two_answers_to_one_request_the_client_gets_the_first() -> None:
    async def test(router: Router, *replicas: FakeReplica) -> None:
        first = await router.ask(ASKED)
        assert first.status == 200 and json.loads(first.body) == said()
        second = await router.ask(ASKED)                 # on another connection
        assert second.status == 200 and json.loads(second.body) == said("mine")

    routed(test, Scripted(answer(said()) + answer({"not": "asked for"}, LINE.replace(b"200", b"404")), answer(said("mine"))))


@pytest.mark.parametrize("count", [-5, True, 10**400, 2**64, 1e308, "7"], ids=["-5", "True", "10^400", "2^64", "1e308", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_counts_that_cannot_be_are_not_believed(count: object, stream: bool) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
    sent = answer(said(usage))
    if stream:
        events = {"choices": [{"index": 0, "delta": {"content": "hi"}}]}, {"choices": [], "usage": usage}
        body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n"
        sent = LINE.replace(b"application/json", b"text/event-stream") + b"content-length: %d\r\n\r\n" % len(body) + body

    async def test(router: Router, *replicas: FakeReplica) -> None:
        assert (await router.ask(ASKED | {"stream": stream})).status == 200
        counts, habits = router.fleet.replicas[0].counts, router.fleet.replicas[0].load.habits
        assert (counts["prompt_tokens"], counts["cached_tokens"], counts["generation_tokens"]) == (9, 0, 0)
        assert 1 <= habits.output_tokens <= 1000
        assert (await router.ask(None, "/metrics")).status == 200

    routed(test, Scripted(sent))


@pytest.mark.parametrize(("given", "told"), [("nan", "1"), ("-5", "1"), ("Wed, 21 Oct 2099 07:28:00 GMT", "1"), ("9", "9")])
def test_a_wait_that_is_no_number_of_seconds_is_not_passed_on(given: str, told: str) -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        assert (await router.ask(CHAT)).headers["retry-after"] == told

    routed(test, FakeReplica(Behaviour(status=429, headers={"retry-after": given})))


def test_a_long_refusal_is_no_failure_of_its_replica() -> None:
    """Some repeat the name of a model that they do not have: three requests with a long name took all of them down."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        for _ in range(3):
            call = await router.ask(CHAT | {"model": "m" * 100_000})
            assert call.status == 404 and json.loads(call.body)["error"]["type"] == "invalid_request_error"
        assert all(each.up and not each.failed for each in router.fleet.replicas)

    refusal = answer({"error": {"message": "m" * 100_000}}, LINE.replace(b"200", b"404"))
    routed(test, Scripted(refusal), Scripted(refusal))


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_without_its_reason_is_a_refusal(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head was here, and its body never came: the request waited for it as long as its client did."""
    monkeypatch.setattr(delivery, "REFUSAL_SECONDS", 0.0)

    async def test(router: Router, *replicas: FakeReplica) -> None:
        router.fleet.choice._turn = 1                    # the one that hangs is next
        call = await router.ask(ASKED | {"stream": stream})
        assert call.status == 200 and b"three" in call.body
        assert router.fleet.usable() == [1] and not router.fleet.replicas[0].failed
        router.seconds += 8.0
        router.fleet.replicas[1].busy_until = 1e9
        alone = await router.ask(ASKED | {"stream": stream})
        assert (alone.status, alone.headers["retry-after"]) == (503, "7") and json.loads(alone.body)["error"]["message"]

    head = b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 90\r\n\r\n{"
    routed(test, Scripted(head), FakeReplica())


def test_half_an_error_is_a_failure_of_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "REFUSAL_SECONDS", 0.0)

    async def test(router: Router, *replicas: FakeReplica) -> None:
        router.fleet.choice._turn = 1
        call = await router.ask(ASKED)
        assert call.status == 200 and router.fleet.replicas[0].failed == 1

    routed(test, Scripted(b"HTTP/1.1 400 Bad\r\ncontent-length: 90\r\n\r\n{"), FakeReplica())


def test_headers_of_the_connection_to_a_replica_stay_there() -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        headers = (await router.ask(ASKED)).headers
        assert "x-hop" not in headers and headers["x-kept"] == "2"

    routed(test, FakeReplica(Behaviour(headers={"connection": "keep-alive, X-Hop", "x-hop": "1", "x-kept": "2"})))


def test_a_trailer_is_no_header() -> None:
    """It came after the headers, and the client got it among them."""
    sent = LINE + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nlocation: /there\r\ncontent-encoding: gzip\r\n\r\n"

    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(ASKED)
        assert call.status == 200 and call.body == b"{}"
        assert not {"location", "content-encoding"} & set(call.headers)

    routed(test, Scripted(sent))


def test_a_media_type_has_no_case() -> None:
    """As an answer in one piece a stream came all at once, at its end."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        call = await router.ask(CHAT)
        assert call.text == "hi" and not any("usage" in each for each in call.events[:-1])

    head = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream ; Charset=UTF-8\r\n"
    choice = {"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}
    events = {"choices": [choice]}, {"choices": [], "usage": {"prompt_tokens": 1}}
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n"
    routed(test, Scripted(head + b"content-length: %d\r\n\r\n" % len(body) + body))


# -- silence -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers_once", [False, True])
def test_a_stream_goes_on_when_its_replica_has_become_silent(answers_once: bool) -> None:
    """A machine without power closes no connection: only checks without an answer tell of it."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        number = first_of(router)
        hold = asyncio.Event()
        replicas[number].behaviours = [Behaviour(hold=hold)]
        call = router.start(GREEDY)
        while call.text != "one ":
            call.news.clear()
            await call.news.wait()
        silent = router.fleet.replicas[number]
        await silent.check(0.0)
        await silent.check(0.0)
        if answers_once:
            await silent.check(60.0)
            await silent.check(0.0)
            await silent.check(0.0)
            silent.up = False                            # as failed requests may make it
            silent.give_up_silent()
            hold.set()
        else:
            await silent.check(0.0)
            assert not silent.up
            silent.give_up_silent()
        await asyncio.wait_for(call.task, 60)
        assert call.text == SAID and call.events[-1] == "[DONE]"
        assert router.fleet.counts["resumed_streams"] == (not answers_once)

    routed(test, FakeReplica(), FakeReplica())


def test_a_request_that_is_given_up_does_not_go_to_the_same_replica_again() -> None:
    """On a connection that had been idle it looked as if only the connection had ended."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        await router.ask(ASKED)
        await router.ask(ASKED)                              # each has an idle connection now
        number = first_of(router)
        mute = asyncio.Event()
        replicas[number].behaviours = [Behaviour(mute=mute)]
        call = router.start(ASKED)
        while len(replicas[number].seen) < 2:
            await asyncio.sleep(0)
        silent = router.fleet.replicas[number]
        for _ in range(3):
            await silent.check(0.0)
        silent.give_up_silent()
        await asyncio.wait_for(call.task, 60)
        assert call.status == 200 and [len(each.seen) for each in replicas] == [2, 2]

    routed(test, FakeReplica(), FakeReplica())


@pytest.mark.parametrize("other_is_up", [False, True])
def test_requests_of_a_silent_replica_wait_where_no_other_is_up(other_is_up: bool) -> None:
    class Enough(Exception):
        pass

    def sleep(seconds: float) -> object:
        raise Enough

    async def test(router: Router, *replicas: FakeReplica) -> None:
        silent, other = router.fleet.replicas
        other.up = other_is_up
        given_up = list[bool]()
        silent.give_up_silent = lambda: given_up.append(True)    # type: ignore[method-assign]
        with pytest.raises(Enough):
            await keep_checking(silent, 60.0, router.fleet.replicas, sleep)
        assert bool(given_up) is other_is_up

    routed(test, FakeReplica(), FakeReplica())

"""Replicas that take requests and do not answer them: they are chosen last, and what they hold goes elsewhere. All clocks are the
tests'."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_replica import Behaviour, Call, FakeReplica, Router
from test_delivery import CHAT, GREEDY, SAID, first_of, routed

from ridgeline.engine.replicas.silence import MORE, SILENT_SECONDS, Patience, Silence

LATE = SILENT_SECONDS + 1
STILL = 120


async def asked(router: Router, replica: FakeReplica, said: Behaviour, body: dict[str, Any] = CHAT) -> Call:
    """A request to this replica, which has it."""
    number = len(replica.seen)
    replica.behaviours = [said, Behaviour()]
    while first_of(router) != [each.url for each in router.fleet.replicas].index(replica.url):
        router.fleet.choice._turn += 1
    call = router.start(body)
    while len(replica.seen) == number:
        await asyncio.sleep(0)
    return call


async def unanswered(router: Router, replica: FakeReplica, body: dict[str, Any] = CHAT) -> tuple[asyncio.Event, Call]:
    """A request to this replica, which does not answer it before the event."""
    mute = asyncio.Event()
    return mute, await asked(router, replica, Behaviour(mute=mute), body)


def test_a_silent_replica_is_chosen_last_until_it_answers() -> None:
    """It takes requests and answers its checks: half of all requests went there, and waited as long as their clients did."""
    async def test(router: Router, silent: FakeReplica, other: FakeReplica) -> None:
        mute, call = await unanswered(router, silent)
        router.seconds += LATE
        for _ in range(6):
            assert (await router.ask(CHAT)).text == SAID
        assert len(silent.seen) == 1 and len(other.seen) == 6
        router.fleet.replicas[1].busy_until = 1e9            # where no other is left, it gets them all the same
        assert (await router.ask(CHAT)).text == SAID and len(silent.seen) == 2
        router.fleet.replicas[1].busy_until = 0.0
        mute.set()
        await call.task
        for _ in range(6):
            await router.ask(CHAT)
        assert len(silent.seen) == 5 and len(other.seen) == 9

    routed(test, FakeReplica(), FakeReplica())


def test_a_stream_that_is_far_too_late_goes_elsewhere_and_an_answer_in_one_piece_waits() -> None:
    async def test(router: Router, silent: FakeReplica, other: FakeReplica) -> None:
        one = router.fleet.replicas[0]
        stream, piece = (await unanswered(router, silent))[1], (await unanswered(router, silent, CHAT | {"stream": False}))[1]
        router.seconds += LATE
        one.move_late()
        await asyncio.sleep(0)
        assert not stream.task.done() and not other.seen     # it is late, not far too late
        router.seconds += LATE
        one.move_late()
        await asyncio.wait_for(stream.task, 60)
        assert stream.status == 200 and stream.text == SAID and len(other.seen) == 1
        assert one.up and not one.failed and (one.counts["moved_late"], one.counts["moved"]) == (1, 1)
        await asyncio.wait_for(silent.seen[0].gone.wait(), 60)           # it need not compute that any more
        assert not piece.task.done()
        piece.leave()
        await piece.task

    routed(test, FakeReplica(), FakeReplica())


def test_a_stream_goes_elsewhere_once_and_not_when_something_of_it_has_come() -> None:
    """Where all are slow, it would never be answered."""
    async def test(router: Router, first: FakeReplica, other: FakeReplica) -> None:
        call = (await unanswered(router, first))[1]
        mute, hold = asyncio.Event(), asyncio.Event()
        other.behaviours = [Behaviour(mute=mute, hold=hold)]
        for _ in range(2):
            router.seconds += 4 * LATE
            for each in router.fleet.replicas:
                each.move_late()
            while not other.seen:
                await asyncio.sleep(0)
        mute.set()
        while call.text != "one ":
            call.news.clear()
            await call.news.wait()
        router.seconds += 4 * LATE
        router.fleet.replicas[1].move_late()
        hold.set()
        await asyncio.wait_for(call.task, 60)
        assert call.text == SAID and (len(first.seen), len(other.seen)) == (1, 1)

    routed(test, FakeReplica(), FakeReplica())


@pytest.mark.parametrize("exact", [False, True])
def test_streams_of_a_replica_that_stands_still_end_or_go_on_elsewhere(exact: bool) -> None:
    """Its engine hung behind a /health that works: what had begun waited for as long as its clients did."""
    async def test(router: Router, first: FakeReplica, other: FakeReplica) -> None:
        hold, one = asyncio.Event(), router.fleet.replicas[0]
        call = await asked(router, first, Behaviour(hold=hold), GREEDY if exact else CHAT)
        while call.text != "one ":
            call.news.clear()
            await call.news.wait()
        router.seconds += STILL - 1
        one.give_up_standing()
        mute, prompt = await unanswered(router, first, CHAT)
        router.seconds += 2.0
        one.give_up_standing()                               # perhaps it computes this prompt
        mute.set()
        await prompt.task
        _, piece = await unanswered(router, first, CHAT | {"stream": False})
        router.seconds += STILL - 1
        one.give_up_standing()                               # it has answered another one
        for _ in range(9):
            await asyncio.sleep(0)
        assert not call.task.done() and not piece.task.done() and not one.failed
        router.seconds += 2.0
        one.move_late()                                      # no stream has shown yet that the answer in one piece is not long
        one.give_up_standing()
        await asyncio.wait_for(call.task, 60)
        assert not piece.task.done()
        one.move_late()
        await asyncio.wait_for(piece.task, 60)
        assert piece.status == 200
        assert call.text == SAID if exact else call.events[-1]["error"]["code"] == "replica_failed"
        assert one.failed == 1 and one.is_silent(router.seconds) and len(other.seen) == 1 + exact

    routed(test, FakeReplica(), FakeReplica(), stall_timeout=STILL)


def test_a_stream_whose_client_does_not_read_is_no_stream_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, send = asyncio.Event(), Call._send

    async def late(self: Call, message: Any) -> None:
        if message.get("body"):
            await reads.wait()
        await send(self, message)

    async def test(router: Router, replica: FakeReplica) -> None:
        monkeypatch.setattr(Call, "_send", late)
        hold, one = asyncio.Event(), router.fleet.replicas[0]
        call = await asked(router, replica, Behaviour(hold=hold))
        while not call.status:
            await asyncio.sleep(0)
        hold.set()
        while all(each.is_read for each in one.upstream._open):
            await asyncio.sleep(0)
        router.seconds += STILL + 1
        one.give_up_standing()
        assert not one.is_silent(router.seconds)             # it has said all of it
        reads.set()
        await asyncio.wait_for(call.task, 60)
        assert call.text == SAID and not one.failed

    routed(test, FakeReplica(), stall_timeout=STILL)


def test_a_late_request_comes_back_when_the_others_fail() -> None:
    async def test(router: Router, silent: FakeReplica, other: FakeReplica) -> None:
        call = (await unanswered(router, silent, GREEDY))[1]
        other.behaviours = [Behaviour(dies_after=0)]
        router.seconds += 3 * LATE
        router.fleet.replicas[0].move_late()
        await asyncio.wait_for(call.task, 60)
        assert call.text == SAID and (len(silent.seen), len(other.seen)) == (2, 1)

    routed(test, FakeReplica(), FakeReplica())


def test_a_check_without_an_answer_makes_a_replica_the_last_choice() -> None:
    """A process that stands still is down after three of them, half a minute later."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        one = router.fleet.replicas[0]
        holds = asyncio.Event(), asyncio.Event()
        running = [await asked(router, replicas[0], Behaviour(hold=each)) for each in holds]
        await one.check(0.0)
        assert one.up and router.fleet.usable() == [0, 1]
        for _ in range(4):
            await router.ask(CHAT)
        assert len(replicas[0].seen) == 2
        holds[0].set()
        await running[0].task
        router.seconds += 1.0
        await one.check(60.0)
        holds[1].set()
        await running[1].task
        assert not one.load.times.decode.weight              # of what was there meanwhile no times are learned
        router.seconds += 1.0
        for _ in range(4):
            await router.ask(CHAT)
        assert len(replicas[0].seen) == 4 and one.load.times.decode.weight

    routed(test, FakeReplica(), FakeReplica())


def test_a_silence_that_is_over_does_not_make_a_replica_slow() -> None:
    """By the times of the requests that had waited in it, the replica was taken to be slow, and others got all requests."""
    async def test(router: Router, silent: FakeReplica, other: FakeReplica) -> None:
        for _ in range(6):
            await router.ask(CHAT)
        hold = asyncio.Event()
        running = await asked(router, silent, Behaviour(hold=hold))
        while running.text != "one ":
            await asyncio.sleep(0)
        late = await asked(router, silent, Behaviour(mute=hold))
        router.seconds += LATE
        hold.set()
        await asyncio.gather(running.task, late.task)
        assert running.text == late.text == SAID
        times = router.fleet.replicas[0].load.times
        assert times.prefill.weight > 1 and times.prefill.fitted() == times.decode.fitted() == (0.0, 0.0)
        router.seconds += 1.0
        usual = await asked(router, silent, Behaviour(mute=(soon := asyncio.Event())))
        router.seconds += 2.0
        soon.set()
        await usual.task
        assert times.prefill.fitted() > (0.0, 0.0)           # what comes later counts again

    routed(test, FakeReplica(), FakeReplica())


def test_a_client_that_reads_slowly_does_not_make_its_replica_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Call._send

    async def test(router: Router, replica: FakeReplica) -> None:
        waits = [0.0]

        async def slowly(self: Call, message: Any) -> None:
            router.seconds += waits[0]
            await send(self, message)

        monkeypatch.setattr(Call, "_send", slowly)
        times = router.fleet.replicas[0].load.times
        for waits[0], num_learned in ((0.0, 1), (9.0, 1), (0.0, 2)):
            assert (await router.ask(CHAT)).text == SAID
            assert round(times.decode.weight) == num_learned and times.decode.fitted() == (0.0, 0.0)

    routed(test, FakeReplica())


def test_a_tool_call_is_an_answer() -> None:
    """It has no text: a replica that wrote long ones was taken to be silent, the more so when they were complete, and to compute
    their prompts still."""
    async def test(router: Router, replica: FakeReplica) -> None:
        call = await asked(router, replica, Behaviour(tool=True, hold=(hold := asyncio.Event())))
        while b"one" not in call.body:
            call.news.clear()
            await call.news.wait()
        router.seconds += LATE
        one = router.fleet.replicas[0]
        assert not one.is_silent(router.seconds) and (len(one.load.waiting), len(one.load.running)) == (0, 1)
        hold.set()
        await call.task
        router.seconds += LATE
        assert call.is_complete and not one.is_silent(router.seconds)
        assert not one.load.times.prefill.weight             # a call may be held back until its name is known

    routed(test, FakeReplica())


def test_pages_and_log_tell_of_a_silent_replica(caplog: pytest.LogCaptureFixture) -> None:
    async def test(router: Router, silent: FakeReplica, other: FakeReplica) -> None:
        one = router.fleet.replicas[0]
        mute, call = await unanswered(router, silent)
        one.tell_silence()
        router.seconds += LATE
        for _ in range(3):
            one.tell_silence()
        rows = json.loads((await router.ask(None, "/fleet")).body)
        assert [each["state"] for each in rows["rows"]] == ["silent", "ok"]
        assert rows["notes"] == [f"{silent.url} takes requests and does not answer them: others are chosen first"]
        replicas = json.loads((await router.ask(None, "/replicas")).body)["replicas"]
        assert [(each["silent"], each["late"]) for each in replicas] == [(True, 1), (False, 0)]
        label = f'{{policy="round-robin",replica="{silent.url}"}}'
        metrics = (await router.ask(None, "/metrics")).body.decode()
        assert f"ridgeline:route_replica_silent{label} 1" in metrics and f"ridgeline:route_requests_late{label} 1" in metrics
        assert f"ridgeline:route_moved_late_total{label} 0" in metrics
        mute.set()
        await call.task
        one.tell_silence()
        said = [each.getMessage() for each in caplog.records if "silent" in each.getMessage()]
        assert [each.removeprefix(f"{silent.url} is ") for each in said] == [
            "silent (late requests: 1): others are chosen first", "not silent any more",
        ]

    routed(test, FakeReplica(), FakeReplica())


# -- the rule, without sockets -----------------------------------------------------------------------------------------


def test_patience_is_learned_and_no_request_is_late_that_was_predicted_to_take_as_long() -> None:
    patience = Patience()
    assert patience.seconds(True, 0.1) == SILENT_SECONDS and patience.seconds(True, 100.0) == MORE * 100.0
    silence = Silence(patience)
    silence.sent(1, True, 0.0, 0.1)
    silence.heard(1, 90.0)                                   # once it took as long, and may again
    silence.sent(2, True, 90.0, 0.1)
    silence.sent(3, False, 90.0, 0.1)                        # answers in one piece are other habits
    assert silence.is_silent(90.0 + LATE)
    silence.left(3, 91.0)
    assert not silence.is_silent(90.0 + MORE * 90.0) and silence.is_silent(91.0 + MORE * 90.0)
    for _ in range(1000):
        patience.observe(True, 0.1)
    assert patience.seconds(True, 0.1) == SILENT_SECONDS     # and it is forgotten


def test_one_late_request_is_no_silence_while_others_are_answered() -> None:
    silence = Silence(Patience())
    silence.sent(1, False, 0.0, 1.0)
    silence.sent(2, True, 0.0, 1.0)
    for second in range(200):
        silence.heard(2, float(second))
        assert not silence.is_silent(float(second))
    assert len(silence.late(199.0)) == 1 and silence.is_silent(199.0 + LATE)


def test_clients_that_are_less_patient_than_the_router_show_a_silence_together() -> None:
    """Where all of them left after 20 s, no request was ever late, and a replica that hung kept getting its half of them."""
    silence = Silence(Patience())
    for number in range(4):                                  # two at a time: the seconds count once
        silence.sent(number, True, 10.0 * number, 1.0)
        if number > 1:
            silence.left(number - 2, 10.0 * number)
    assert not silence.is_silent(30.0)
    silence.left(2, 40.0)
    assert silence.is_silent(40.0)
    silence.sent(4, True, 41.0, 1.0)
    silence.heard(3, 45.0)
    silence.left(4, 65.0)                                    # after an answer it begins anew: 20 s
    silence.sent(5, True, 80.0, 1.0)
    assert not silence.is_silent(80.0)
    silence.left(5, 91.0)
    assert silence.is_silent(91.0) and not silence.is_silent(91.0 + SILENT_SECONDS)


def test_what_waits_at_a_replica_that_answers_others_keeps_its_place() -> None:
    """After a burst all replicas were full, and exchanged what had waited for a minute: it began to wait again."""
    moved: list[int] = []
    silence = Silence(Patience())
    for number in range(100):
        silence.sent(number, True, 0.0, 1.0, lambda number=number: moved.append(number))     # type: ignore[misc]
    for number in range(98):
        silence.heard(number, 2.0 * number)
        silence.move_late(2.0 * number)
    assert not moved
    silence.move_late(194.0 + LATE)                          # now it stands still
    assert moved == [98, 99]


def test_a_replica_that_late_requests_have_left_is_tried_with_one_at_a_time() -> None:
    silence = Silence(Patience())
    silence.sent(1, True, 0.0, 1.0)
    silence.left(1, 10.0)
    assert not silence.is_silent(20.0)                       # its client was impatient, or it failed: it was not late
    silence.sent(2, True, 20.0, 1.0)
    silence.left(2, 20.0 + LATE)
    assert silence.is_silent(20.0 + LATE) and silence.is_silent(19.0 + LATE + SILENT_SECONDS)
    now = 21.0 + LATE + SILENT_SECONDS
    assert not silence.is_silent(now)
    silence.sent(3, True, now, 1.0)
    assert silence.is_silent(now) and silence.is_silent(now + SILENT_SECONDS - 1)
    silence.heard(3, now + 1.0)
    assert not silence.is_silent(now + 2.0)


@pytest.mark.parametrize("streams", [False, True])
def test_only_a_stream_shows_that_long_answers_in_one_piece_will_not_come(streams: bool) -> None:
    """A client that left its own long one was enough: the others were computed again from the start elsewhere."""
    silence, moved = Silence(Patience()), list[int]()
    silence.sent(1, False, 0.0, 5.0, lambda: moved.append(1))
    silence.sent(2, streams, 1.0, 5.0)
    silence.left(2, LATE + 2)
    assert silence.is_silent(STILL + 5) and silence.move_late(STILL + 5, STILL) == len(moved) == streams


def test_an_engine_that_makes_tokens_again_does_not_stand_still() -> None:
    """One that compiled for two minutes had its later long answers taken away, too."""
    silence, moved = Silence(Patience()), list[int]()
    for number, sent in enumerate((0.0, 100.0)):
        silence.sent(number, False, sent, 5.0, lambda number=number: moved.append(number))
    for now in (LATE, LATE + STILL):
        silence.note_tokens(now, 7.0, STILL)
    silence.move_late(LATE + STILL, STILL)
    assert moved == [0]
    silence.left(0, LATE + STILL)
    silence.note_tokens(LATE + STILL + 5, 8.0, STILL)
    silence.move_late(LATE + 2 * STILL, STILL)
    assert moved == [0] and silence.is_silent(LATE + 2 * STILL)


class Comments(FakeReplica):
    """Streams comments, as a proxy does to keep a connection open, or half a head and half a word of JSON, and nothing more."""

    def __init__(self, said: bytes) -> None:
        super().__init__()
        self.said = said

    async def _answer(self, said: Behaviour, seen: Any, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> bool:
        writer.write(self.said)
        return await super()._answer(said, seen, writer, reader)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize("said", [STREAM + b": ping\n\n", STREAM + b"data: {", STREAM, STREAM[:20]])
def test_comments_and_half_an_event_are_no_answer(said: bytes) -> None:
    """Its engine hung, and a proxy before it wrote comments: the stream waited for as long as its client did."""
    async def test(router: Router, silent: FakeReplica, other: FakeReplica) -> None:
        call = (await unanswered(router, silent))[1]
        (answer,) = router.fleet.replicas[0].upstream._open
        while said.startswith(STREAM) and not answer.status:
            await asyncio.sleep(0)
        for _ in range(9):                                   # what has come is read
            await asyncio.sleep(0)
        router.seconds += 3 * LATE
        router.fleet.replicas[0].move_late()
        await asyncio.wait_for(call.task, 60)
        assert call.text == SAID and len(other.seen) == 1 and call.events[-1] == "[DONE]"

    routed(test, Comments(said), FakeReplica())


@pytest.mark.parametrize(("step", "page"), [
    (0, "vllm:generation_tokens_total %d\n"), (0, "vllm:generation_tokens_total 7\nvllm:prompt_tokens_total %d\n"),
    (1, "vllm:generation_tokens_total %d\n"), (1, "vllm:generation_tokens_total 7\nvllm:prompt_tokens_total %d\n"),
    (1, "vllm:generation_tokens_total 7\nvllm:prompt_tokens_total 7\nvllm:iteration_tokens_total_count{engine=\"0\"} %d\n"),
    (0, "%d"), (0, "vllm:num_requests_running %d\n"),
])
@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"])
def test_an_answer_in_one_piece_goes_elsewhere_if_its_engine_makes_no_tokens(step: int, page: str, head: bytes) -> None:
    """Where there were no streams, nothing told an engine that hangs from a long answer: each waited for request_timeout. A long
    prompt is no hang: its tokens are counted at its end, and its steps before."""
    async def test(router: Router, silent: FakeReplica, other: FakeReplica) -> None:
        one = router.fleet.replicas[0]
        call = (await unanswered(router, silent, CHAT | {"stream": False}))[1]
        moves = not step and "generation" in page
        for look in range(2 + STILL // 20):
            silent.metrics = page % (step * look)
            assert not call.task.done()
            router.seconds += 20.0
            await one.look_at_tokens()
            one.move_late()
            await asyncio.sleep(0)
        if moves:
            await asyncio.wait_for(call.task, 60)
            assert call.status == 200 and len(other.seen) == 1 and one.counts["moved_late"] == 1
        else:
            for _ in range(9):                               # it would have left by now
                await asyncio.sleep(0)
            assert not call.task.done() and not one.counts["moved_late"]
            call.leave()
            await call.task

    routed(test, Comments(head), FakeReplica(), stall_timeout=STILL)

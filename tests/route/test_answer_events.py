"""Events of streamed answers: cut out of any pieces, read, and skipped when another replica repeats them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.route import answer_events
from ridgeline.route.answer_events import (
    MOST_READ,
    AnswerEvents,
    Differs,
    EventCutter,
    Held,
    Part,
    ReplicaGaveUp,
    data_of,
    usage_of,
)


def chunk(text: str, field: str = "content", end: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {field: text}, "finish_reason": end}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_events_are_whole_however_the_pieces_fall(size: int, line: bytes) -> None:
    events = [b'data: {"a": 1}', b": a comment", b"event: x\ndata: 2", b"data: [DONE]"]
    stream = b"".join(event.replace(b"\n", line) + line * 2 for event in events)
    cutter, found = EventCutter(), list[Part]()
    for start in range(0, len(stream), size):
        found += cutter.cut(stream[start : start + size])
    assert found == [Part(event.replace(b"\n", line) + line * 2, is_whole=True) for event in events] and cutter.last() == []


def test_the_line_ends_of_an_event_that_has_begun_are_kept() -> None:
    """The second event's CR LF was made LF with the first one's; then its end was LF CR LF, which was none."""
    cutter = EventCutter()
    assert cutter.cut(b"data: 1\r\n\r\ndata: 2\r\n") == [Part(b"data: 1\r\n\r\n", is_whole=True)]
    assert cutter.cut(b"\r\n") == [Part(b"data: 2\r\n\r\n", is_whole=True)]
    assert cutter.cut(b"data: 3\r\n") == [] and cutter.last() == [Part(b"data: 3\r\n", is_whole=True)]
    assert cutter.last() == []


@pytest.mark.parametrize("size", [100, 4096, 10**7])
def test_a_long_event_is_given_out_in_parts_and_not_kept(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_events, "MOST_READ", 10_000)
    long = b"data: " + b"x\r\ndata: y" * 5_000 + b"\r\n\r\n"
    stream, held = b"data: 1\n\n" + long + b"data: 2\n\n" + long + b"data: 3\n", Held()
    cutter, found = EventCutter(held), list[Part]()
    for start in range(0, len(stream), size):
        found += cutter.cut(stream[start : start + size])
        assert held.num_bytes == len(cutter._rest) <= 10_000
    found += cutter.last()
    assert b"".join(part.data for part in found) == stream and held.num_bytes == 0
    assert [part.data for part in found if part.is_whole] == [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n"]


def test_the_begun_events_of_all_streams_have_one_bound() -> None:
    held = Held(3 * MOST_READ)
    cutters = [EventCutter(held) for _ in range(100)]
    for _ in range(MOST_READ // 2**15):
        for cutter in cutters:
            cutter.cut(b"x" * 2**15)
    assert held.num_bytes == sum(len(each._rest) for each in cutters) <= held.most + 100 * (LONG_BYTES + 2**15)
    for cutter in cutters:
        cutter.close()
    assert held.num_bytes == 0
    assert EventCutter(held).cut(b"y" * (MOST_READ // 2)) == []        # others may have long events again


def test_what_was_not_read_cannot_be_continued() -> None:
    events = AnswerEvents(resumable=True)
    assert events.pass_on(b"data: {") == b"data: {" and events.shown and events.began and not events.resumable
    events.restart()
    with pytest.raises(Differs):
        events.pass_on(b"data: {")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n", b""])
def test_the_data_of_an_event_does_not_depend_on_its_line_ends(end: bytes) -> None:
    assert data_of(b"data: {}" + end) == data_of(b"data:{} " + end) == b"{}"
    assert data_of(b"id: 1\ndata: {" + end[: len(end) // 2] + b"\ndata: }" + end) == b"{\n}"
    assert data_of(b": data: x" + end) == b"" and data_of(b"data: [\rdata: ]" + end) == b"[\n]"


def test_what_was_sent_is_skipped_by_field() -> None:
    events = AnswerEvents(resumable=True)
    for part in (chunk("thought ", "reasoning_content"), chunk("one ")):
        assert events.take(part) == part
    events.restart()
    assert events.take(chunk("thou", "reasoning_content")) == b"" == events.take(chunk("ght ", "reasoning_content"))
    rest = json.loads(events.take(chunk("one two"))[6:])
    assert rest["choices"][0]["delta"] == {"content": "two"} and events.text == "one two"


def test_a_repetition_that_ends_early_or_differs_is_noticed() -> None:
    for second in ([chunk("onE ")], [chunk("on"), chunk("", end="stop")], [b"data: [DONE]\n\n"]):
        events = AnswerEvents(resumable=True)
        events.take(chunk("one "))
        events.restart()
        with pytest.raises(Differs):
            for part in second:
                events.take(part)


@pytest.mark.parametrize("delta", [
    {"tool_calls": [{"index": 0}]}, {"function_call": {"name": "f"}}, {"role": "assistant", "refusal": "I"},
    {"audio": {"data": "a"}},
])
def test_calls_and_what_the_router_does_not_know_cannot_be_continued(delta: dict[str, object]) -> None:
    """A stream with a call of the older kind could go elsewhere after its client had got half of the call."""
    events = AnswerEvents(resumable=True)
    events.take(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
    assert events.shown and not events.resumable


def test_a_beginning_is_no_answer() -> None:
    events = AnswerEvents(resumable=True)
    delta = {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "function_call": None, "audio": {}}
    events.take(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
    assert not events.shown and events.resumable


@pytest.mark.parametrize("error", [{"code": "engine_not_available"}, {"code": 503}, {"type": "service_unavailable_error"}])
def test_an_engine_that_gives_up_is_told_from_an_error_of_the_request(error: dict[str, object]) -> None:
    with pytest.raises(ReplicaGaveUp):
        AnswerEvents().take(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    other = b'data: {"error": {"code": ["odd"], "message": "too long"}}\n\n'
    assert AnswerEvents().take(other) == other


@pytest.mark.parametrize("data", [
    b"5", b"no", b"[]", b'{"choices": {}}', b'{"choices": [3]}', b'{"choices": [{"delta": 4}]}', b"[" * 50_000, b'{"a": "\xff"}',
])
def test_events_that_cannot_be_read_pass(data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    assert AnswerEvents(resumable=True).take(event) == event


@pytest.mark.parametrize("content", [{}, {"usage": None}, {"usage": {"prompt_tokens": "x"}}, [], "x"])
def test_a_usage_that_is_none(content: object) -> None:
    assert usage_of(content) is None


def test_an_event_of_megabytes_takes_time_for_its_bytes() -> None:
    """Each of its pieces was added to a copy of all before it: 9 MB of a prompt's log-probabilities took six seconds."""
    cutter = EventCutter()
    assert cutter.cut(b"data: ") == []
    kept = cutter._rest
    for _ in range(200):
        assert cutter.cut(b"x" * 1000) == []
        assert cutter._rest is kept                      # nothing is copied before an event ends
    assert cutter.cut(b"\n") == [] and cutter.cut(b"\nda") == [Part(b"data: " + b"x" * 200_000 + b"\n\n", is_whole=True)]
    assert cutter.cut(b"ta: 1\n\n") == [Part(b"data: 1\n\n", is_whole=True)]


def test_a_long_event_without_choices_has_its_usage_read_and_hidden() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 6}
    content = {"choices": None, "usage": usage, "prompt_logprobs": "x" * LONG_BYTES}
    event, events = b"data: " + json.dumps(content).encode() + b"\n\n", AnswerEvents(hide_usage=True, resumable=True)
    assert events.take(event) == b"" and events.usage == usage_of({"usage": usage}) and events.resumable


def test_of_a_long_event_only_what_the_router_needs_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [{str(token): {"logprob": -1.0} for token in range(20)} for _ in range(500)]
    choice = {"index": 0, "delta": {"content": "one "}, "prompt_logprobs": prompt, "finish_reason": None}
    event = b"data: " + json.dumps({"id": "a", "choices": [choice], "prompt_logprobs": prompt}).encode() + b"\n\n"
    assert len(event) > LONG_BYTES
    read: list[int] = []
    decode = answer_events._decode

    def noted(data: bytes) -> Any:
        read.append(len(bytes(data)))
        return decode(data)

    monkeypatch.setattr(answer_events, "_decode", noted)
    events = AnswerEvents(resumable=True)
    assert events.take(event) == event and events.text == "one " and events.resumable and events.shown
    assert max(read) < 100
    events.restart()                                     # the same event of another replica is written again: all of it
    again = json.loads(events.take(event.replace(b'"one "', b'"one two"').replace(b'"a"', b'"b"'))[6:])
    assert again["id"] == "a" and again["choices"][0]["prompt_logprobs"] == prompt
    assert again["choices"][0]["delta"] == {"content": "two"}

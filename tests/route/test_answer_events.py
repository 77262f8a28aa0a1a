"""Events of streamed answers: cut out of any pieces, read, and skipped when another replica repeats them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.route import answer_events
from ridgeline.route.answer_events import AnswerEvents, Differs, EventCutter, ReplicaGaveUp, usage_of


def chunk(text: str, field: str = "content", end: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {field: text}, "finish_reason": end}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_events_are_whole_however_the_pieces_fall(size: int, line: bytes) -> None:
    events = [b'data: {"a": 1}', b": a comment", b"event: x\ndata: 2", b"data: [DONE]"]
    stream = b"".join(event.replace(b"\n", line) + line * 2 for event in events)
    cutter, found = EventCutter(), []
    for start in range(0, len(stream), size):
        found += cutter.cut(stream[start : start + size])
    assert found == [event + b"\n\n" for event in events]


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


def test_tool_calls_cannot_be_continued() -> None:
    events = AnswerEvents(resumable=True)
    part = {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}
    events.take(b"data: " + json.dumps(part).encode() + b"\n\n")
    assert events.shown and not events.resumable


@pytest.mark.parametrize("error", [{"code": "engine_not_available"}, {"code": 503}, {"type": "service_unavailable_error"}])
def test_an_engine_that_gives_up_is_told_from_an_error_of_the_request(error: dict[str, object]) -> None:
    with pytest.raises(ReplicaGaveUp):
        AnswerEvents().take(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    other = b'data: {"error": {"code": ["odd"], "message": "too long"}}\n\n'
    assert AnswerEvents().take(other) == other


@pytest.mark.parametrize("data", [b"5", b"no", b"[]", b'{"choices": {}}', b'{"choices": [3]}', b'{"choices": [{"delta": 4}]}'])
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
    assert cutter.cut(b"\n") == [] and cutter.cut(b"\nda") == [b"data: " + b"x" * 200_000 + b"\n\n"]
    assert cutter.cut(b"ta: 1\n\n") == [b"data: 1\n\n"]


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

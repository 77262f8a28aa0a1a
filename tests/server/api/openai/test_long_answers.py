"""Long answers whose text is parsed for calls and reasoning: a few microseconds a character, which is not for the event loop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import write_model

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.openai.chat import BYTES_PER_PARSED, ChatMessage, ChatRequest, ChatWriter
from ridgeline.server.endpoints import size_of, size_of_new
from ridgeline.server.http.stream import EventStream
from ridgeline.server.parse.reasoning import MessageParser
from ridgeline.server.parse.tools import Reading

LONG = LONG_BYTES // BYTES_PER_PARSED + 1                # characters
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": [' + "1, " * 20 + "2]}}</tool_call>"


@pytest.mark.parametrize(("reading", "is_long"), [
    (Reading(), False), (Reading(reasoning="think"), True), (Reading(format="hermes", schemas={"f": {}}), True),
])
def test_a_text_that_is_parsed_takes_longer_than_its_json(reading: Reading, is_long: bool) -> None:
    """128 answers of 8,000 numbers took six seconds of the event loop."""
    request = ChatRequest(messages=[ChatMessage(role="user", content="a")])
    writer = ChatWriter(request, SamplingParams(), "id", "tiny", None, reading)
    few = RequestOutput("1", "a", [7], [CompletionOutput(0, "#" * (LONG // 2))])
    many = RequestOutput("1", "a", [7], [CompletionOutput(index, "#" * (LONG // 2)) for index in range(3)])
    assert size_of(writer, [few]) <= LONG_BYTES
    assert (size_of(writer, [many]) > LONG_BYTES) is is_long
    waiting = AnswerDelta(0, "#" * LONG, [7])            # tokens of a client that did not read for a while
    assert (size_of_new(writer, [few], [(0, waiting)]) > LONG_BYTES) is is_long


def test_the_ids_of_an_answer_that_has_them_count() -> None:
    request = ChatRequest(messages=[ChatMessage(role="user", content="a")], return_token_ids=True)
    writer = ChatWriter(request, SamplingParams(), "id", "tiny", None)
    assert size_of(writer, [RequestOutput("1", "a", [7], [CompletionOutput(0, "", [7] * LONG_BYTES)])]) > LONG_BYTES


@pytest.mark.parametrize(("path", "stream"), [
    ("/v1/chat/completions", False), ("/v1/chat/completions", True), ("/v1/messages", False), ("/v1/responses", False),
    ("/api/chat", False),
])
def test_a_long_text_is_parsed_away_from_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    threads: list[str] = []
    feed = MessageParser.feed

    def noted(self: MessageParser, text: str) -> Any:
        if text:
            threads.append(threading.current_thread().name)
        return feed(self, text)

    monkeypatch.setattr(MessageParser, "feed", noted)
    monkeypatch.setattr(EventStream, "is_free", False)   # as if a client did not keep up
    tool: dict[str, Any] = TOOL
    if path == "/v1/messages":
        tool = {"name": "f", "input_schema": {"type": "object"}}
    elif path == "/v1/responses":
        tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    asked = {"model": "tiny", "tools": [tool], "stream": stream}
    given = {"input": "a"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "a"}]}
    asked |= given | ({"max_tokens": 400} if path == "/v1/messages" else {})
    model = write_model(tmp_path / "tiny")
    with ScriptedServer(model, lambda prompt: CALL, chat_template=TOOL_TEMPLATE) as server:
        loop = server._thread.name
        assert httpx.post(f"{server.url}{path}", json=asked, timeout=60).status_code == 200
        assert set(threads) == {loop}
        threads.clear()
        monkeypatch.setattr("ridgeline.server.api.openai.chat.BYTES_PER_PARSED", LONG_BYTES + 1)
        httpx.post(f"{server.url}{path}", json=asked, timeout=60)
        assert threads and loop not in threads

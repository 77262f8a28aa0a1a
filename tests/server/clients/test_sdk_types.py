"""Every answer, whole and streamed, is what the clients' own types say it is. The clients themselves do not check: they take
what comes, and code that reads a missing field fails far from here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import TypeAdapter
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import write_model

NAME = "tiny"
TEXT = "Good day to you"
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call>'
SAID = f"<think>Where?</think>I look.{CALL}{CALL}"
MESSAGES = [{"role": "user", "content": "Hello"}]
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION = {"name": "weather", "description": "The weather in a place", "parameters": PLACE}
ONE = {"type": "function", "function": {"name": "weather"}}
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / NAME)
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TOOL_TEMPLATE)
    with ScriptedServer(model, lambda prompt: TEXT, chat_template=str(template)) as made:
        yield made


CHAT: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (TEXT, {}),
    "cut": (TEXT, {"max_tokens": 4}),
    "log-probabilities": (TEXT, {"logprobs": True, "top_logprobs": 1}),
    "calls": (SAID, {"tools": [TOOL], "logprobs": True}),
    "a call that is cut": (SAID, {"tools": [TOOL], "max_tokens": len(SAID) - 20}),
    "one function": ('{"place": "Bern"}', {"tools": [TOOL], "tool_choice": ONE}),
    "older names": ('{"place": "Bern"}', {"functions": [FUNCTION], "function_call": {"name": "weather"}}),
}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": PLACE}
MESSAGES_API: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (TEXT, {}),
    "cut": (TEXT, {"max_tokens": 4}),
    "stopped": (TEXT, {"stop_sequences": ["day"]}),
    "calls": (SAID, {"tools": [ANTHROPIC_TOOL]}),
    "a call that is cut": (SAID, {"tools": [ANTHROPIC_TOOL], "max_tokens": len(SAID) - 20}),
}
RESPONSES_TOOL = {"type": "function", **FUNCTION, "strict": False}
NAMED = {"type": "function", "name": "weather"}
SOME = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
RESPONSES_API: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (TEXT, {"instructions": "Be brief", "metadata": {"a": "b"}, "temperature": 0.5}),
    "nothing": ("", {}),
    "cut": (TEXT, {"max_output_tokens": 4}),
    "log-probabilities": (TEXT, {"top_logprobs": 1}),
    "calls": (SAID, {"tools": [RESPONSES_TOOL], "top_logprobs": 1, "reasoning": {"effort": "low"}}),
    "a call that is cut": (SAID, {"tools": [RESPONSES_TOOL], "max_output_tokens": len(SAID) - 20}),
    "a call that a stop string ends": (SAID, {"tools": [RESPONSES_TOOL], "stop": "Bern"}),
    "one function": ('{"place": "Bern"}', {"tools": [RESPONSES_TOOL], "tool_choice": NAMED}),
    "some functions": (SAID, {"tools": [RESPONSES_TOOL], "tool_choice": SOME}),
    "a schema": ('{"place": "Bern"}', {"text": {"format": FORMAT, "verbosity": "low"}}),
}
CASES = [
    *(("chat/completions", {"messages": MESSAGES, "max_tokens": 400}, name, *case) for name, case in CHAT.items()),
    *(("messages", {"model": NAME, "messages": MESSAGES, "max_tokens": 400}, name, *case) for name, case in MESSAGES_API.items()),
    *(("responses", {"input": "Hello", "max_output_tokens": 400}, name, *case) for name, case in RESPONSES_API.items()),
]


@cache
def types_of(path: str) -> tuple[Any, TypeAdapter[Any]]:
    """Of a whole answer and of an event. Not when this file is read: to import them takes seconds of every worker."""
    whole, event = {
        "chat/completions": (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
        "messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
        "responses": (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
    }[path]
    return whole, TypeAdapter(event)


@pytest.mark.parametrize(("path", "body", "case", "said", "more"), CASES, ids=[f"{path} {name}" for path, _, name, _, _ in CASES])
def test_answers_are_of_the_clients_types(
    server: ScriptedServer, path: str, body: dict[str, Any], case: str, said: str, more: dict[str, Any]
) -> None:
    server.llm.script = lambda prompt: said
    reply = httpx.post(f"{server.url}/v1/{path}", json=body | more)
    assert reply.status_code == 200, reply.text
    whole, event_type = types_of(path)
    whole.model_validate(reply.json())
    streamed = {"stream": True} | ({"stream_options": {"include_usage": True}} if path == "chat/completions" else {})
    told = httpx.post(f"{server.url}/v1/{path}", json=body | more | streamed).text
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    assert len(events) > 2
    for event in (event for event in events if event.get("type") != "ping"):     # which Anthropic's client skips, too
        event_type.validate_python(event)
    if path == "responses":
        kept = f"{server.url}/v1/responses/{reply.json()['id']}"
        openai.types.responses.Response.model_validate(httpx.get(kept).json())
        openai.types.responses.ResponseItemList.model_validate(httpx.get(f"{kept}/input_items").json())


def test_the_others_too(server: ScriptedServer) -> None:
    server.llm.script = lambda prompt: TEXT
    made = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "logprobs": 1}).json()
    openai.types.Completion.model_validate(made)
    openai.types.Model.model_validate(httpx.get(f"{server.url}/v1/models/{NAME}").json())
    theirs = httpx.get(f"{server.url}/v1/models/{NAME}", headers={"anthropic-version": "2023-06-01"}).json()
    anthropic.types.ModelInfo.model_validate(theirs)
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json={"model": NAME, "messages": MESSAGES}).json()
    anthropic.types.MessageTokensCount.model_validate(counted)
    for body, kind in (({}, "invalid_request_error"), ({"model": "x", "messages": MESSAGES, "max_tokens": 1}, "not_found_error")):
        told = httpx.post(f"{server.url}/v1/messages", json=body).json()
        assert anthropic.types.shared.ErrorResponse.model_validate(told).error.type == kind

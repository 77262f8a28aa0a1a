"""A streamed token without text (half a character, a special token) is a sign in every dialect, as it is with vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import write_model

HI = [{"role": "user", "content": "hi"}]
SAID = "a漢字!"                       # eight tokens of a byte each, four of them complete a character
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model: Path = write_model(tmp_path_factory.mktemp("signs") / "tiny")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TOOL_TEMPLATE}))
    with ScriptedServer(model, lambda prompt: SAID) as made:
        yield made


def streamed(server: ScriptedServer, path: str, **body: Any) -> list[str]:
    reply = httpx.post(f"{server.url}{path}", json={"stream": True} | body)
    assert reply.status_code == 200, reply.text
    return [event for event in reply.text.split("\n" if path.startswith("/api") else "\n\n") if event]


def data(events: list[str]) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]


def test_completions_have_an_event_for_each_token(server: ScriptedServer) -> None:
    texts = [event["choices"][0]["text"] for event in data(streamed(server, "/v1/completions", prompt="x", max_tokens=20))]
    assert texts == ["a", "", "", "漢", "", "", "字", "!", ""]
    held = [event["choices"][0]["text"] for event in data(streamed(server, "/v1/completions", prompt="x", stop=["!?"]))]
    assert held == ["a", "", "", "漢", "", "", "字", "", "!"]     # what may begin a stop string is held, and told


def test_chat_has_the_role_first_and_then_an_event_for_each_token(server: ScriptedServer) -> None:
    """A parser holds text back too; its signs are empty deltas, which open no part of a message."""
    deltas = [event["choices"][0]["delta"] for event in data(streamed(server, "/v1/chat/completions", messages=HI))]
    assert deltas[0] == {"role": "assistant"} and deltas[1] == {"content": "a"}
    assert deltas[2:4] == [{}, {}] and deltas[4] == {"content": "漢"} and len(deltas) == 10


def test_chat_without_a_parser_has_empty_contents(tmp_path: Path) -> None:
    with ScriptedServer(write_model(tmp_path / "tiny"), lambda prompt: "漢") as plain:
        deltas = [event["choices"][0]["delta"] for event in data(streamed(plain, "/v1/chat/completions", messages=HI))]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": ""}, {"content": "漢"}, {}]


def test_other_dialects_have_signs_of_their_own(server: ScriptedServer) -> None:
    events = streamed(server, "/v1/messages", model="tiny", max_tokens=20, messages=HI)
    assert sum("event: ping" in event for event in events) == 4
    events = streamed(server, "/v1/responses", input="hi")
    assert [event for event in events if event.startswith(":")] == [": "] * 4
    assert sum("response.output_text.delta" in event for event in events) == 4
    lines = [json.loads(line) for line in streamed(server, "/api/chat", model="tiny", messages=HI)]
    assert [line["message"]["content"] for line in lines] == ["a", "", "", "漢", "", "", "字", "!", ""]


def test_a_token_for_token_client_sees_every_gap(server: ScriptedServer) -> None:
    """Events carry the tokens where they are asked for, one each, with or without text."""
    events = data(streamed(server, "/v1/completions", prompt="x", return_token_ids=True, max_tokens=20))
    assert [len(event["choices"][0]["token_ids"]) for event in events] == [1] * 9

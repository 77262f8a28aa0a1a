"""The clients and the embedded model, nothing scripted: openai's and anthropic's packages, httpx and curl, whole and streamed,
with tools, schemas, log-probabilities and several answers. All of them must read the same. [H-08]"""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from served_model import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.real_model]
NAME = "SmolLM2-135M-Instruct"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of Germany?"}]
ANSWER = "The capital of Germany is Berlin."
SCHEMA: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["capital", "sure"],
    "properties": {"capital": {"enum": ["Berlin", "Paris", "Rome"]}, "sure": {"type": "boolean"}},
}
FUNCTION = {"name": "tell", "description": "Tell the capital of a country", "parameters": SCHEMA}
CHOICE = {"type": "function", "function": {"name": "tell"}}
FORMAT = {"name": "tell", "schema": SCHEMA, "strict": True}
CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": CHOICE},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n": {"n": 3, "temperature": 0.8, "seed": 5},
}


@pytest.fixture(scope="module")
def url(embedded_model: Path) -> Iterator[str]:
    with ServerProcess() as server:
        yield server.url


def body_of(case: str, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "temperature": 0} | CASES[case] | more


# -- the four ways to ask: each gives JSON, of the answer or of its events ---------------------------------------------


def by_openai(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    made: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120).chat.completions.create(**body)
    return [each.to_dict() for each in (made if body.get("stream") else [made])]


def by_httpx(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return parts_of(reply.text)


def by_curl(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    given = ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command = ["curl", "-sSN", "--fail", f"{url}/v1/chat/completions", *given]
    return parts_of(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def parts_of(text: str) -> list[dict[str, Any]]:
    if not text.startswith("data: "):
        return [json.loads(text)]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


Client = Callable[[str, dict[str, Any]], list[dict[str, Any]]]
CLIENTS: dict[str, Client] = {"openai": by_openai, "httpx": by_httpx, "curl": by_curl}


def said(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers, in order, whichever way they came: what a client has of them."""
    found: dict[int, dict[str, Any]] = {}
    for part in parts:
        for choice in part["choices"]:
            answer = found.setdefault(choice["index"], {"text": "", "name": "", "arguments": "", "tokens": [], "finish": None})
            message = choice.get("message") or choice.get("delta") or {}
            answer["text"] += message.get("content") or ""
            for call in message.get("tool_calls") or []:
                answer["name"] += call["function"].get("name") or ""
                answer["arguments"] += call["function"].get("arguments") or ""
            answer["tokens"] += [(each["token"], len(each["top_logprobs"]))
                                 for each in (choice.get("logprobs") or {}).get("content") or []]
            answer["finish"] = choice.get("finish_reason") or answer["finish"]
    return [found[index] for index in sorted(found)]


def check(case: str, answers: list[dict[str, Any]]) -> None:
    """Of any client: that it is what was asked for."""
    assert len(answers) == (3 if case == "n" else 1)
    if case == "tools":
        assert answers[0]["name"] == "tell" and answers[0]["text"] == ""
        jsonschema.validate(json.loads(answers[0]["arguments"]), SCHEMA)
    elif case == "json_schema":
        jsonschema.validate(json.loads(answers[0]["text"]), SCHEMA)
    elif case == "n":
        assert len({answer["text"] for answer in answers}) > 1 and all(answer["text"] for answer in answers)
    else:
        assert answers[0]["text"] == ANSWER
    if case == "logprobs":
        told = answers[0]["tokens"]
        assert "".join(token for token, _ in told).startswith(ANSWER) and {count for _, count in told} == {2}
    assert {answer["finish"] for answer in answers} <= {"stop", "tool_calls", "length"}


@pytest.mark.reliability("H-08c")
@pytest.mark.parametrize("case", CASES)
def test_all_clients_read_the_same(url: str, case: str) -> None:
    whole = {name: said(ask(url, body_of(case))) for name, ask in CLIENTS.items()}
    check(case, whole["openai"])
    assert whole["httpx"] == whole["curl"] == whole["openai"]
    for name, ask in CLIENTS.items():
        parts = ask(url, body_of(case, stream=True))
        assert len(parts) > 3, "this is no stream"
        assert said(parts) == whole["openai"], name


@pytest.mark.reliability("H-08c")
def test_the_other_endpoints_of_openai(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    how: dict[str, Any] = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**how).choices[0]
    assert "Paris" in whole.text and whole.logprobs is not None and len(whole.logprobs.tokens or []) == 8
    assert "".join(part.choices[0].text for part in client.completions.create(stream=True, **how) if part.choices) == whole.text
    asked: dict[str, Any] = {"model": NAME, "input": MESSAGES[0]["content"], "max_output_tokens": 20, "temperature": 0}
    assert client.responses.create(**asked).output_text == ANSWER
    events = list(client.responses.create(stream=True, **asked))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    form = {"format": {"type": "json_schema", **FORMAT}}
    jsonschema.validate(json.loads(client.responses.create(**asked | {"max_output_tokens": 40}, text=form).output_text), SCHEMA)


@pytest.mark.reliability("H-08c")
def test_anthropics_client(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["text"] and whole.content[0].text == ANSWER       # type: ignore[union-attr]
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == ANSWER
    tools = {"tools": [{"name": "tell", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "tell"}}
    called = client.messages.create(**asked, **tools)
    assert called.stop_reason == "tool_use" and called.content[-1].type == "tool_use"
    jsonschema.validate(called.content[-1].input, SCHEMA)
    with client.messages.stream(**asked, **tools) as stream:
        final = stream.get_final_message()
    assert final.content[-1].type == "tool_use" and final.content[-1].input == called.content[-1].input


@pytest.mark.reliability("H-08c")
@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_a_client_that_is_refused_comes_back_when_it_was_told_to(embedded_model: Path, package: str) -> None:
    """One slot, which another request has until the first refusal."""
    seen: list[tuple[float, int, str | None]] = []
    with ServerProcess("--max-queued-requests", "1") as server:
        long = {"model": NAME, "prompt": "Once", "max_tokens": 4_000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=120) as other:
            holding = other.send(other.build_request("POST", f"{server.url}/v1/completions", json=long), stream=True)
            assert holding.status_code == 200

            def hook(response: Any) -> None:
                seen.append((time.monotonic(), response.status_code, response.headers.get("retry-after")))
                if not holding.is_closed:
                    holding.close()

            if package == "openai":
                plain = openai.DefaultHttpxClient(event_hooks={"response": [hook]})
                asking = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3, timeout=120, http_client=plain)
                told = asking.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=20, temperature=0)
                assert told.choices[0].message.content == ANSWER
            else:
                bare = anthropic.DefaultHttpxClient(event_hooks={"response": [hook]})
                client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=3, timeout=120, http_client=bare)
                made = client.messages.create(model=NAME, messages=MESSAGES, max_tokens=20, extra_body={"temperature": 0})
                assert made.content[0].text == ANSWER    # type: ignore[union-attr]
    assert len(seen) >= 2 and [status for _, status, _ in seen[:-1]] == [429] * (len(seen) - 1) and seen[-1][1] == 200
    for (at, _, wait), (later, _, _) in itertools.pairwise(seen):
        assert wait is not None and 1 <= int(wait) <= 60
        assert int(wait) <= later - at < int(wait) + 10, seen

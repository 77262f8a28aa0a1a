"""Anthropic's own client against the server: answers, streams, tools and errors, on a scripted engine and a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import anthropic
import httpx
import jiter
import pytest
from counted_work import is_linear
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import ServerProcess, wait_until, write_model

from ridgeline.errors import RequestError
from ridgeline.server.api.anthropic.messages_api import CountRequest, Message
from ridgeline.server.http.keys import Keys
from ridgeline.server.options import ServerOptions
from ridgeline.server.parse.partial_json import completed

NAME = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / NAME)
    with ScriptedServer(model, lambda prompt: "Good day to you") as made:
        yield made


@cache
def client_of(url: str) -> anthropic.Anthropic:
    """Making one takes as long as a dozen requests."""
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(server: ScriptedServer) -> anthropic.Anthropic:
    server.llm.script = lambda prompt: "Good day to you"
    return client_of(server.url)


def prompt_of(server: ScriptedServer) -> str:
    return server.llm.prompts[-1]


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_message(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=NAME, max_tokens=50, messages=MESSAGES)
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", "Good day to you")]
    assert (message.role, message.type, message.model) == ("assistant", "message", NAME)
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.id.startswith("msg_") and message._request_id == message.id
    # <|im_start|>user Hello<|im_end|><|im_start|>assistant, of which the script has 3 tokens cached; the end token counts
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (23 - 3, 3)
    assert message.usage.output_tokens == len("Good day to you") + 1


def test_the_prompt_is_the_conversation(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    client.messages.create(
        model=NAME, max_tokens=9,
        system=[{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},    # two turns in a row are one
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
    )
    turns = [("system", "Be\nbrief"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in turns) + "<|im_start|>assistant\n"
    assert prompt_of(server) == expected


def test_an_answer_that_has_begun_is_continued(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    begun: list[Any] = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    client.messages.create(model=NAME, max_tokens=9, messages=begun)
    assert prompt_of(server).endswith("<|im_start|>assistant\nOnce upon")


def test_why_it_stopped(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model=NAME, max_tokens=4, messages=MESSAGES)
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("max_tokens", None, "Good")  # type: ignore[union-attr]
    assert cut.usage.output_tokens == 4
    stopped = client.messages.create(model=NAME, max_tokens=40, messages=MESSAGES, stop_sequences=["never", " to"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " to")
    assert stopped.content[0].text == "Good day"  # type: ignore[union-attr]


def test_sampling_reaches_the_engine(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    client.messages.create(
        model=NAME, max_tokens=7, messages=MESSAGES, metadata={"user_id": "me"},
        extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 3},
    )
    params = server.llm.params[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.25, 0.5, 3)


@pytest.mark.reliability("C-12")
def test_a_stream(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=NAME, max_tokens=50, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == "Good day to you"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 16 and final.usage.input_tokens == 20
    events = list(client.messages.create(model=NAME, max_tokens=50, messages=MESSAGES, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas == len("Good day to you")
    assert kinds == ["message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
                     "message_delta", "message_stop"]
    stopped = list(client.messages.create(model=NAME, max_tokens=50, messages=MESSAGES, stream=True, stop_sequences=["y"]))
    assert stopped[-2].delta.stop_reason == "stop_sequence" and stopped[-2].delta.stop_sequence == "y"  # type: ignore[union-attr]


def test_events_have_names(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    body = {"model": NAME, "max_tokens": 2, "messages": MESSAGES, "stream": True}
    lines = httpx.post(f"{server.url}/v1/messages", json=body).text.split("\n\n")
    assert lines[-1] == ""
    for frame in lines[:-1]:
        name, data = frame.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_an_empty_answer(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    server.llm.script = lambda prompt: ""
    assert client.messages.create(model=NAME, max_tokens=5, messages=MESSAGES).content == []
    events = [event.type for event in client.messages.create(model=NAME, max_tokens=5, messages=MESSAGES, stream=True)]
    assert events == ["message_start", "message_delta", "message_stop"]


def test_count_tokens(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=NAME, max_tokens=1, messages=MESSAGES, system="Be brief")
    counted = client.messages.count_tokens(model=NAME, messages=MESSAGES, system="Be brief")
    assert counted.input_tokens == message.usage.input_tokens + 3 == len("<system\nBe brief>" "<user\nHello>" "<assistant\n")


@pytest.mark.parametrize("choice", [{"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}])
def test_a_choice_that_requires_nothing_needs_no_tools(client: anthropic.Anthropic, choice: Any) -> None:
    """LiteLLM sends it for parallel_tool_calls, with or without tools."""
    assert client.messages.create(model=NAME, max_tokens=1, messages=MESSAGES, tool_choice=choice).usage.output_tokens == 1


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "kind", "words"), [
    ({"max_tokens": 0}, "BadRequestError", "max_tokens must be an integer at least 1"),
    ({"max_tokens": "many"}, "BadRequestError", "max_tokens: expected int"),
    ({"max_tokens": 5, "top_kk": 1}, "BadRequestError", "unknown field 'top_kk'; did you mean 'top_k'?"),
    ({"max_tokens": 5, "stop_sequences": [""]}, "BadRequestError", "stop_sequences must hold non-empty strings"),
    ({"max_tokens": 5, "messages": []}, "BadRequestError", "messages must be a list with at least one message"),
    ({"max_tokens": 5, "model": "other"}, "NotFoundError", "'tiny' is"),
    ({"max_tokens": 5, "container": "x"}, "BadRequestError", "container is not supported"),
    ({"max_tokens": 5, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError",
     "tools[0].type 'web_search_20250305'"),
    ({"max_tokens": 5, "tools": [WEATHER], "tool_choice": {"type": "tool"}}, "BadRequestError", "tool_choice.name"),
    ({"max_tokens": 5, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather", "bogus": 1}},
     "BadRequestError", "unknown field 'bogus' in tool_choice"),
    ({"max_tokens": 5, "tool_choice": {"type": "any"}}, "BadRequestError", "tool_choice needs tools"),
    ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     "BadRequestError", "messages[0].content[0]: only text"),
    ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
     "BadRequestError", "messages[0].content[0]: a block of type 'thinking'"),
    ({"max_tokens": 5, "messages": [{"role": "user", "content": []}]}, "BadRequestError",
     "messages[0].content must have at least one block"),
    ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "BadRequestError",
     "messages[0].content[0].type: invalid value 'poem'"),
])
def test_errors_in_anthropics_shape(
    client: anthropic.Anthropic, body: dict[str, Any], kind: str, words: str
) -> None:
    with pytest.raises(getattr(anthropic, kind)) as caught:
        client.post("/v1/messages", cast_to=object, body={"model": NAME, "messages": MESSAGES} | body)
    told = caught.value.body
    assert isinstance(told, dict) and told["type"] == "error" and told["error"].keys() == {"type", "message"}
    expected = "not_found_error" if kind == "NotFoundError" else "invalid_request_error"
    assert told["error"]["type"] == expected and words in told["error"]["message"], told


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server with a key, small bodies and one place in its queue."""
    model = write_model(tmp_path_factory.mktemp("strict") / NAME)
    options = ServerOptions(port=0, max_body_bytes=2_000, max_queued_requests=1)
    with ScriptedServer(model, lambda prompt: "yes", server=options, keys=Keys(["sesame"])) as made:
        yield made


BEFORE_THE_ROUTE: dict[str, tuple[dict[str, Any], str, str]] = {
    "key": ({"key": "wrong"}, "AuthenticationError", "authentication_error"),
    "path": ({"path": "/v1/messages/batches"}, "NotFoundError", "not_found_error"),
    "method": ({"method": "get"}, "APIStatusError", "invalid_request_error"),
    "body": ({"body": {"x": "y" * 3_000}}, "RequestTooLargeError", "request_too_large"),
    "media type": ({"headers": {"content-type": "text/plain"}}, "APIStatusError", "invalid_request_error"),
    "host": ({"headers": {"host": "else/where"}}, "BadRequestError", "invalid_request_error"),
    "header": ({"headers": {"x-long": "y" * 20_000}}, "APIStatusError", "invalid_request_error"),
    "deadline": ({"headers": {"x-ttft-deadline-ms": "soon"}}, "BadRequestError", "invalid_request_error"),
    "count": ({"path": "/v1/messages/count_tokens", "key": "wrong"}, "AuthenticationError",
              "authentication_error"),
    "queue": ({}, "RateLimitError", "rate_limit_error"),
}
STATUSES = {"method": 405, "media type": 415, "header": 431}


@pytest.mark.reliability("H-08")
@pytest.mark.parametrize("case", BEFORE_THE_ROUTE)
def test_what_is_refused_before_the_endpoint_has_anthropics_shape(strict: ScriptedServer, case: str) -> None:
    asked, kind, name = BEFORE_THE_ROUTE[case]
    client = anthropic.Anthropic(base_url=strict.url, api_key=asked.get("key", "sesame"), max_retries=0, timeout=60)
    body = asked.get("body", {"model": NAME, "max_tokens": 3, "messages": MESSAGES})
    path, options = asked.get("path", "/v1/messages"), {"headers": asked.get("headers", {})}
    full = strict.service.slots.taking(1) if case == "queue" else nullcontext()
    with full, pytest.raises(getattr(anthropic, kind)) as caught:
        if asked.get("method") == "get":
            client.get(path, cast_to=object, options=options)
        else:
            client.post(path, cast_to=object, body=body, options=options)
    told, error = caught.value.body, caught.value
    assert isinstance(told, dict) and told["type"] == "error" and told["error"].keys() == {"type", "message"}
    assert told["error"]["type"] == name and told["error"]["message"], told
    assert error.status_code == STATUSES.get(case, error.status_code)
    if case not in ("body", "header"):                   # those are refused while they arrive
        assert error.request_id and error.request_id == error.response.headers["x-request-id"]
    if case == "queue":
        assert 1 <= int(error.response.headers["retry-after"]) <= 60


def test_the_same_refusals_keep_openais_shape_elsewhere(strict: ScriptedServer) -> None:
    for path in ("/v1/chat/completions", "/v1/messagesx", "/v1/models"):
        reply = httpx.get(f"{strict.url}{path}", headers={"x-api-key": "wrong"})
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert "request-id" not in reply.headers


def test_another_servers_name_where_no_key_is_needed(with_tools: ScriptedServer) -> None:
    reply = httpx.post(f"{with_tools.url}/v1/messages", json={}, headers={"host": "elsewhere"})
    assert reply.status_code == 421 and reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "invalid_request_error" and "'elsewhere'" in reply.json()["error"]["message"]


def test_max_tokens_is_required(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="missing required field max_tokens"):
        client.post("/v1/messages", cast_to=object, body={"model": NAME, "messages": MESSAGES})


@pytest.mark.parametrize("value", ["1" + "0" * 30, "[" * 300 + "]" * 300, "[" * 5000 + "]" * 5000, "1e999"])
def test_what_json_can_say_and_we_cannot(server: ScriptedServer, client: anthropic.Anthropic, value: str) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"place": "VALUE"}}
    turns = [*MESSAGES, {"role": "assistant", "content": [call]}, *MESSAGES]
    body = json.dumps({"model": NAME, "max_tokens": 3, "messages": turns}).replace('"VALUE"', value)
    reply = httpx.post(f"{server.url}/v1/messages", content=body, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400), reply.text


@pytest.mark.reliability("C-14")
def test_a_failure_before_and_in_a_stream(server: ScriptedServer, client: anthropic.Anthropic) -> None:
    server.llm.script = lambda prompt: ("", RequestError("NaN logits"))
    with pytest.raises(anthropic.InternalServerError, match="NaN logits"):
        client.messages.create(model=NAME, max_tokens=5, messages=MESSAGES)
    server.llm.script = lambda prompt: ("Good", RequestError("NaN logits"))
    with pytest.raises(anthropic.APIStatusError, match="NaN logits"):
        list(client.messages.create(model=NAME, max_tokens=9, messages=MESSAGES, stream=True))


# -- tools and thoughts ------------------------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call>'


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("tools") / NAME)
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TOOL_TEMPLATE)
    with ScriptedServer(model, lambda prompt: "", chat_template=str(template)) as made:
        yield made


@pytest.fixture
def tool_client(with_tools: ScriptedServer) -> anthropic.Anthropic:
    return client_of(with_tools.url)


def parts(message: anthropic.types.Message) -> list[dict[str, Any]]:
    return [block.model_dump(include={"type", "text", "thinking", "name", "input"}) for block in message.content]


@pytest.mark.reliability("H-08")
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls(with_tools: ScriptedServer, tool_client: anthropic.Anthropic, stream: bool) -> None:
    second = CALL.replace("Bern", "Basel")
    with_tools.llm.script = lambda prompt: f"<think>Where?</think>I look.{CALL}{second}"
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 400, "messages": MESSAGES, "tools": [WEATHER]}
    if stream:
        with tool_client.messages.stream(**asked) as events:
            kinds = [event.type for event in events if event.type.startswith(("content_block_st", "message_"))]
            message = events.get_final_message()
        blocks = ["content_block_start", "content_block_stop"] * 4
        assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    else:
        message = tool_client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    assert [part["type"] for part in parts(message)] == ["thinking", "text", "tool_use", "tool_use"]
    assert parts(message)[0]["thinking"] == "Where?" and parts(message)[1]["text"] == "I look."
    assert [(part["name"], part["input"]) for part in parts(message)[2:]] == [
        ("weather", {"place": "Bern"}), ("weather", {"place": "Basel"})
    ]
    calls = [block.id for block in message.content if block.type == "tool_use"]
    assert len(set(calls)) == 2 and all(calls)
    assert "<|im_start|>tools\nweather <|im_end|>" in prompt_of(with_tools)


def test_a_calls_result_goes_back(with_tools: ScriptedServer, tool_client: anthropic.Anthropic) -> None:
    with_tools.llm.script = lambda prompt: f"<think>Where?</think>I look.{CALL}"
    first = tool_client.messages.create(model=NAME, max_tokens=400, messages=MESSAGES, tools=[WEATHER])
    call = next(block for block in first.content if block.type == "tool_use")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": call.id, "content": "no data", "is_error": True},
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "tool_reference", "tool_name": "weather"}]},
        {"type": "text", "text": "And?"},
    ]
    turns: list[Any] = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    with_tools.llm.script = lambda prompt: "It rains."
    second = tool_client.messages.create(model=NAME, max_tokens=400, messages=turns, tools=[WEATHER])
    assert second.stop_reason == "end_turn" and second.content[0].text == "It rains."  # type: ignore[union-attr]
    prompt = prompt_of(with_tools)
    assert "<think>Where?</think>I look.<tool_call>" in prompt and "Bern" in prompt
    turns = [("tool", "rain"), ("tool", "Error: no data"), ("tool", "weather"), ("user", "And?")]
    ending = "".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in turns)
    assert prompt.endswith(f"{ending}<|im_start|>assistant\n")


def test_tool_choice(with_tools: ScriptedServer, tool_client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 400, "messages": MESSAGES, "tools": [WEATHER]}
    with_tools.llm.script = lambda prompt: '{"place": "Bern"}'
    named = tool_client.messages.create(**asked, tool_choice={"type": "tool", "name": "weather"})
    assert named.stop_reason == "tool_use" and parts(named) == [
        {"type": "tool_use", "name": "weather", "input": {"place": "Bern"}}
    ]
    assert with_tools.llm.params[-1].structured_outputs is not None
    with_tools.llm.script = lambda prompt: '[{"name": "weather", "parameters": {"place": "Bern"}}]'
    chosen = tool_client.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert parts(chosen) == parts(named)
    assert "maxItems" in repr(with_tools.llm.params[-1].structured_outputs)          # one call and no more
    none = tool_client.messages.create(**asked, tool_choice={"type": "none"})
    assert none.stop_reason == "end_turn" and none.content[0].type == "text"
    cut = tool_client.messages.create(**asked | {"max_tokens": 12}, tool_choice={"type": "tool", "name": "weather"})
    assert cut.stop_reason == "max_tokens"


@pytest.mark.parametrize(("most", "given"), [(1, {}), (15, {}), (16, {"place": "Bern"}), (26, {"place": "Bern"}),
                                             (30, {"place": "Bern", "days": [1]}), (34, {"place": "Bern", "days": [1, 2]})])
def test_a_call_that_is_cut_is_the_same_whole_and_streamed(
    with_tools: ScriptedServer, tool_client: anthropic.Anthropic, most: int, given: dict[str, Any]
) -> None:
    """Whatever of its input is complete; and so with a stop sequence inside it."""
    with_tools.llm.script = lambda prompt: '{"place": "Bern", "days": [1, 2]}'
    asked: dict[str, Any] = {
        "model": NAME, "max_tokens": most, "messages": MESSAGES, "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    whole = tool_client.messages.create(**asked)
    with tool_client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert parts(whole) == parts(streamed) == [{"type": "tool_use", "name": "weather", "input": given}]
    assert whole.stop_reason == streamed.stop_reason == ("max_tokens" if most < 34 else "tool_use")
    if most == 34:
        stopped = tool_client.messages.create(**asked, stop_sequences=["days"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "days")
        assert parts(stopped)[0]["input"] == {"place": "Bern"}


def test_what_is_complete_of_an_object_is_what_clients_read() -> None:
    document = {"a": "P\"a\\ris", "b": [1, -2.5e3, {"c": None, "d": [[], {}]}, "x"], "e": True, "f": {"g": "\u00e9\u0000"}}
    for text in (json.dumps(document), json.dumps(document, indent=2, ensure_ascii=False)):
        for end in range(1, len(text) + 1):
            assert completed(text[:end]) == jiter.from_json(text[:end].encode(), partial_mode=True), text[:end]
    assert completed("") == completed("x") == completed("[1") == completed('{"a":' * 100_000) == {}
    completed('{"a":["b",' * 100_000)                     # deeper than Python's stack
    for text in ('{"a":["b",', '\\"'):
        good, few, many = is_linear(lambda count, text=text: completed('{"a":"b","c":' + text * count), 100)    # type: ignore[misc]
        assert good, (text, few, many)


def test_thinking_can_be_switched_off(with_tools: ScriptedServer, tool_client: anthropic.Anthropic) -> None:
    with_tools.llm.script = lambda prompt: "Yes."
    tool_client.messages.create(model=NAME, max_tokens=50, messages=MESSAGES, thinking={"type": "disabled"})
    assert prompt_of(with_tools).endswith("assistant\n<think></think>")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    tool_client.messages.create(model=NAME, max_tokens=50, messages=MESSAGES, thinking=thinking)
    assert prompt_of(with_tools).endswith("assistant\n")


def test_a_schema_for_the_answer(with_tools: ScriptedServer, tool_client: anthropic.Anthropic) -> None:
    with_tools.llm.script = lambda prompt: '{"place": "Bern"}'
    config: Any = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}, "effort": "low"}
    reply = tool_client.messages.create(model=NAME, max_tokens=50, messages=MESSAGES, output_config=config)
    assert parts(reply) == [{"type": "text", "text": '{"place": "Bern"}'}]
    assert "place" in repr(with_tools.llm.params[-1].structured_outputs)


def test_tools_count(tool_client: anthropic.Anthropic) -> None:
    without = tool_client.messages.count_tokens(model=NAME, messages=MESSAGES).input_tokens
    assert tool_client.messages.count_tokens(model=NAME, messages=MESSAGES, tools=[WEATHER]).input_tokens > without


# -- a real engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_model(tmp_path_factory.mktemp("model") / NAME)
    options = ("--load-format", "dummy", "--num-gpu-blocks-override", "200", "--max-num-seqs", "4", "--api-key", "sesame")
    with ServerProcess(str(model), *options) as server:
        yield server.url


def test_a_real_engine_behind_a_key(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="sesame", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 30, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert parts(streamed) == parts(whole) and streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    assert (whole.usage.cache_read_input_tokens, streamed.usage.cache_read_input_tokens) == (0, 16)
    counted = client.messages.count_tokens(model=NAME, messages=MESSAGES).input_tokens
    assert counted == whole.usage.input_tokens == streamed.usage.input_tokens + 16
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**asked)


def test_whoever_stops_reading_frees_the_engine(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="sesame", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 8000, "messages": MESSAGES, "stream": True}
    with client.messages.create(**asked) as stream:
        assert next(iter(stream)).type == "message_start"

    def idle() -> bool:
        health = httpx.get(f"{url}/health").json()
        return bool(health["requests"] == 0 and health["free_blocks"] == health["num_blocks"])

    wait_until(idle)


def test_the_list_of_models_has_anthropics_shape_and_so_have_its_refusals(strict: ScriptedServer) -> None:
    client = anthropic.Anthropic(base_url=strict.url, api_key="wrong", max_retries=0, timeout=60)
    for ask in (lambda: client.models.list(), lambda: client.models.retrieve(NAME), lambda: client.get("/v1/x", cast_to=object)):
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask()
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]
    client = anthropic.Anthropic(base_url=strict.url, api_key="sesame", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list()] == [NAME]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.get("/v1/files", cast_to=object)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_an_answer_may_be_asked_to_be_longer_than_there_is_room_for(
    server: ScriptedServer, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who must name a length knows nothing of the prompt's; that the context was the limit is told."""
    monkeypatch.setattr(server.llm, "script", lambda prompt: "so " * 400)
    for most, reason in ((32_000, "model_context_window_exceeded"), (100, "max_tokens")):
        whole = client.messages.create(model=NAME, max_tokens=most, messages=MESSAGES)
        with client.messages.stream(model=NAME, max_tokens=most, messages=MESSAGES) as stream:
            streamed = stream.get_final_message()
        assert whole.stop_reason == streamed.stop_reason == reason
        assert whole.usage.output_tokens == streamed.usage.output_tokens == min(most, 512 - 23)


@pytest.mark.reliability("R-20")
def test_turns_in_a_row_are_joined_in_linear_time() -> None:
    """Counted as lines and bytes: 8 times as much if it is linear, 64 times if each turn copies those before."""
    turn, answer = Message(role="user", content="x" * 300), Message(role="assistant", content="y")

    def join(count: int) -> None:
        plain = CountRequest(model=NAME, messages=[*[turn] * count, answer, *[turn] * count]).chat()["messages"]
        assert [each.keys() for each in plain] == [{"role", "content"}] * 3
        assert plain[0]["content"] == plain[2]["content"] == "\n".join(["x" * 300] * count)

    good, few, many = is_linear(join, 60)
    assert good, (few, many)

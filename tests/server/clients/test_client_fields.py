"""Fields that client libraries add on their own, to requests and to the messages that they send back: taken as what they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import ServerProcess, write_model

from ridgeline.errors import BadRequest, Unsupported
from ridgeline.server.api.anthropic.messages_api import MessagesRequest
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.openai.embeddings import EmbeddingRequest
from ridgeline.server.api.openai.responses_request import ResponsesRequest
from ridgeline.server.http.body import parse_body

NAME = "tiny"
THOUGHT = "<think>It may rain.</think>"
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    path = write_model(tmp_path_factory.mktemp("fields") / NAME)
    template = path / "chat.jinja"
    template.write_text(TOOL_TEMPLATE)
    with ScriptedServer(path, lambda prompt: THOUGHT + "Take an umbrella.", chat_template=str(template)) as server:
        yield server


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def parsed(kind: type[Any], **fields: Any) -> Any:
    needed = {
        ChatRequest: {"messages": [USER]}, CompletionRequest: {"prompt": "Hi"}, EmbeddingRequest: {"input": "Hi"},
        ResponsesRequest: {"input": "Hi"}, MessagesRequest: {"model": NAME, "max_tokens": 4, "messages": [USER]},
    }
    return parse_body(kind, json.dumps(needed[kind] | fields).encode())


@pytest.mark.parametrize("extra", [
    {"parsed": None}, {"parsed": {"a": 1}}, {"provider_specific_fields": {"refusal": None}}, {"reasoning_details": [{}]},
    {"thinking_blocks": []}, {"cache_control": {"type": "ephemeral"}}, {"metadata": {}}, {"is_error": False},
    {"images": []}, {"something_new": None},
])
def test_a_message_comes_back_with_notes_of_its_client(extra: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "content": "Hello", "refusal": None} | extra, USER]
    plain = [USER, {"role": "assistant", "content": "Hello"}, USER]
    assert parsed(ChatRequest, messages=messages).conversation() == parsed(ChatRequest, messages=plain).conversation()


def test_what_is_not_known_in_a_message_and_says_something_is_still_an_error() -> None:
    with pytest.raises(BadRequest, match=r"unknown field 'tool_call_ids' in messages\[0\]"):
        body = {"messages": [USER | {"tool_call_ids": "x", "something_new": None}]}
        parse_body(ChatRequest, json.dumps(body).encode(), strict=True)
    with pytest.raises(Unsupported, match="images is not supported"):
        parsed(ChatRequest, messages=[USER | {"images": ["x"]}]).conversation()
    with pytest.raises(BadRequest, match="unknown field 'dropParams'"):
        parsed(ChatRequest, dropParams=[], something_new=None)


def test_only_fields_that_nobody_knows_are_dropped_for_being_null() -> None:
    """Whatever made the body be read again."""
    documents = [{"title": None, "text": "b"}]
    for more in ({}, {"max_tokens": 16.0}, {"something_new": None}, {"stream": True, "stream_options": {"x": None}}):
        asked = parsed(ChatRequest, documents=documents, **more)
        assert asked.template()["chat_template_kwargs"]["documents"] == documents
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}, "new": None}}
    assert "null" in str(parsed(ChatRequest, response_format={"type": "text"}, structured_outputs={"json": {"const": None}},
                                something_new=None).structured().json)
    with pytest.raises(BadRequest, match="unknown field 'new'"):
        parsed(ChatRequest, response_format=schema).structured()


def test_too_many_texts_are_refused() -> None:
    assert len(parsed(EmbeddingRequest, input=["a"] * 2048).prompts()) == 2048
    with pytest.raises(BadRequest, match="input has 2049 texts; at most 2048"):
        parsed(EmbeddingRequest, input=["a"] * 2049).prompts()


def test_thoughts_by_any_of_their_names() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        asked = parsed(ChatRequest, messages=[USER, {"role": "assistant", "content": "Hello", name: "Hm."}, USER])
        assert asked.conversation()[1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(("kind", "fields"), [
    (ChatRequest, {"request_id": "a", "session_id": "b", "stream_interval": 4, "mm_processor_kwargs": {}, "media_io_kwargs": {}}),
    (ChatRequest, {"kv_transfer_params": None, "vllm_xargs": {}, "truncation_side": "left"}),
    (ChatRequest, {"prediction": {"type": "content", "content": "x"}, "speculative": False}),
    (CompletionRequest, {"request_id": "a", "something_new": None}),
    (ChatRequest, {"tools": [TOOL | {"cache_control": {}, "defer_loading": True, "strict": True}]}),
    (ResponsesRequest, {"truncation": "auto", "include": ["web_search_call.action.sources"], "access_programs": []}),
    (ResponsesRequest, {"reasoning": {"effort": "low", "generate_summary": "auto", "context": "x", "mode": "y"}}),
    (MessagesRequest, {"output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 9}}}),
    (MessagesRequest, {"thinking": {"type": "adaptive", "display": "updates"}}),
    (EmbeddingRequest, {"truncate_prompt_tokens": -1, "add_special_tokens": True, "normalize": True}),
])
def test_known_fields_that_ask_for_nothing_else(kind: type[Any], fields: dict[str, Any]) -> None:
    parsed(kind, **fields)


def test_a_tool_with_more_than_its_schema() -> None:
    function = TOOL["function"] | {"return": {"type": "string"}}                         # type: ignore[operator]
    (tool,) = parsed(ChatRequest, tools=[{"type": "function", "strict": True, "function": function}]).tool_use().tools
    assert tool["function"]["strict"] is True and tool["function"]["name"] == "f" and tool["function"]["return"]
    noted = TOOL["function"] | {"strict": None, "cache_control": {}, "defer_loading": True}                # type: ignore[operator]
    (tool,) = parsed(ChatRequest, tools=[{"type": "function", "strict": True, "function": noted}]).tool_use().tools
    assert tool["function"] == TOOL["function"] | {"strict": True}                       # type: ignore[operator]
    with pytest.raises(BadRequest, match="unknown field 'bogus'"):
        parsed(ChatRequest, tools=[TOOL | {"bogus": 1}]).tool_use()


def test_templates_get_documents_and_whole_objects() -> None:
    documents = [{"title": "a", "text": "b"}]
    asked = parsed(ChatRequest, documents=documents, chat_template_kwargs={"builtin_tools": ["search"], "nested": {"a": [1]}})
    assert asked.template()["chat_template_kwargs"] == {
        "documents": documents, "builtin_tools": ["search"], "nested": {"a": [1]},
    }


def test_a_schema_beside_json_object() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    ours = parsed(ChatRequest, response_format={"type": "json_object", "schema": SCHEMA}).structured()
    assert ours is not None and ours.kind == "json" and ours == parsed(ChatRequest, response_format=named).structured()
    with pytest.raises(BadRequest, match="unknown field 'shema'"):
        parsed(ChatRequest, response_format={"type": "json_object", "shema": SCHEMA}).structured()


@pytest.mark.parametrize(("form", "meant"), [
    ({"type": "json_object", "value": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),   # huggingface_hub
    ({"type": "json", "value": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),          # TGI
    ({"type": "json_schema", "schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),  # Together
])
def test_a_schema_as_clients_of_other_servers_send_it(form: dict[str, Any], meant: dict[str, Any]) -> None:
    asked = parsed(ChatRequest, response_format=form).structured()
    assert asked is not None and asked.kind == "json" and asked == parsed(ChatRequest, response_format=meant).structured()


@pytest.mark.parametrize("name", ["value", "pattern"])                   # TGI's and Together's
def test_a_regular_expression_as_a_response_format(name: str) -> None:
    form = {"type": "regex", name: "[0-9]{3}"}
    assert parsed(ChatRequest, response_format=form).structured() == parsed(ChatRequest, guided_regex="[0-9]{3}").structured()


@pytest.mark.parametrize(("form", "reason"), [
    ({"type": "regex"}, "needs a pattern"),
    ({"type": "regex", "pattern": 3}, "needs a pattern"),
    ({"type": "regex", "pattern": "a", "value": "b"}, "unknown field 'value'"),
    ({"type": "json_object", "value": "a"}, "unknown field 'value'"),
    ({"type": "json_object", "pattern": "a"}, "unknown field 'pattern'"),
    ({"type": "json_object", "schema": SCHEMA, "json_schema": {"schema": {}}}, "unknown field 'schema'"),
    ({"type": "json"}, "type must be text, json_object, json_schema or regex"),
])
def test_a_response_format_that_says_too_little_or_two_things(form: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as failed:
        parsed(ChatRequest, response_format=form).structured()
    assert failed.value.field.startswith("response_format")


def test_one_grammar_under_its_old_and_its_new_name() -> None:
    """As guidance's client for vLLM sends it."""
    grammar = 'start: "a" | "b"'
    alone = parsed(ChatRequest, structured_outputs={"grammar": grammar}).structured()
    assert alone is not None
    assert parsed(ChatRequest, structured_outputs={"grammar": grammar}, guided_grammar=grammar).structured() == alone
    with pytest.raises(BadRequest, match="give one"):
        parsed(ChatRequest, structured_outputs={"grammar": grammar}, guided_grammar='start: "c"').structured()


def test_anthropics_older_name_of_a_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    older = parsed(MessagesRequest, output_format={"type": "json_schema", "schema": schema})
    newer = parsed(MessagesRequest, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert older.chat()["response_format"] == newer.chat()["response_format"]


# -- over a socket -----------------------------------------------------------------------------------------------------


def test_thoughts_are_told_by_both_names(server: ScriptedServer) -> None:
    body = {"model": NAME, "messages": [USER], "max_tokens": 64}
    message = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "It may rain."
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        deltas = [
            chunk.choices[0].delta
            for chunk in client.chat.completions.create(model=NAME, messages=[USER], max_tokens=64, stream=True)     # type: ignore[call-overload]
            if chunk.choices
        ]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "It may rain."


def test_anthropic_thoughts_may_be_omitted(server: ScriptedServer) -> None:
    body = {"model": NAME, "messages": [USER], "max_tokens": 64, "thinking": {"type": "enabled", "display": "omitted"}}
    content = httpx.post(f"{server.url}/v1/messages", json=body).json()["content"]
    assert content[0] == {"type": "thinking", "thinking": "", "signature": ""} and content[1]["text"] == "Take an umbrella."
    streamed = httpx.post(f"{server.url}/v1/messages", json=body | {"stream": True}).text
    assert '"type":"thinking"' in streamed and "thinking_delta" not in streamed


def test_the_models_card_is_what_vllms_clients_read(server: ScriptedServer) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert card["id"] == NAME and card["root"].endswith(NAME) and card["parent"] is None and card["permission"] == []
    for model in (card["root"], ""):
        body = {"model": model, "messages": [USER], "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    body = {"model": "/models/other", "messages": [USER], "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 404


def test_many_texts_are_embedded_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """More than may be queued: the client has sent one request, and gets all of it."""
    path = write_model(tmp_path_factory.mktemp("many") / NAME)
    with ServerProcess(str(path), "--load-format", "dummy", "--max-queued-requests", "10") as server:
        url = server.url
        texts = [f"text {number}" for number in range(37)]
        whole = httpx.post(f"{url}/v1/embeddings", json={"input": texts}, timeout=60).json()
        alone = [httpx.post(f"{url}/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"] for text in texts[::9]]
        assert [each["index"] for each in whole["data"]] == list(range(37))
        for ours, theirs in zip(whole["data"][::9], alone, strict=True):
            assert ours["embedding"] == pytest.approx(theirs, abs=1e-5)
        plain = httpx.post(f"{url}/v1/embeddings", json={"input": "a b", "normalize": False}).json()["data"][0]["embedding"]
        unit = httpx.post(f"{url}/v1/embeddings", json={"input": "a b"}).json()["data"][0]["embedding"]
        length = sum(value * value for value in plain) ** 0.5
        assert length != pytest.approx(1.0, abs=1e-3) and [value / length for value in plain] == pytest.approx(unit, abs=1e-5)

"""OpenAI's own client against /v1/responses, on a scripted engine."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import write_model

from ridgeline.engine.client.long_work import LONG_BYTES, LONG_WORK
from ridgeline.engine.client.outputs import CompletionOutput, RequestOutput
from ridgeline.errors import RequestError
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.openai.chat import ChatMessage, ChatRequest
from ridgeline.server.api.openai.responses_answer import ResponsesRequest, ResponsesWriter
from ridgeline.server.api.openai.responses_store import KEPT_SECONDS, ResponseStore
from ridgeline.server.http.keys import Keys
from ridgeline.server.options import ServerOptions
from ridgeline.server.parse.text_tokens import TextTokens

NAME = "tiny"
TEXT = "Good day to you"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / NAME)
    with ScriptedServer(model, lambda prompt: TEXT) as made:
        yield made


@cache
def client_of(url: str) -> openai.OpenAI:
    """Making one takes as long as a dozen requests."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(server: ScriptedServer) -> openai.OpenAI:
    server.llm.script = lambda prompt: TEXT
    return client_of(server.url)


@pytest.mark.reliability("C-13")
def test_a_response(server: ScriptedServer, client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model=NAME, input="Hello", instructions="Be brief", temperature=0.5, metadata={"a": "b"}, store=False
    )
    assert reply.output_text == TEXT and reply.status == "completed" and reply.error is None
    assert (reply.object, reply.model, reply.temperature, reply.metadata) == ("response", NAME, 0.5, {"a": "b"})
    assert [item.type for item in reply.output] == ["message"] and reply.id.startswith("resp_")
    assert reply.usage is not None and reply.usage.output_tokens == len(TEXT) + 1
    assert reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.model_dump()["store"] is False
    turns = "<|im_start|>system\nBe brief<|im_end|><|im_start|>user\nHello<|im_end|><|im_start|>assistant\n"
    assert server.llm.prompts[-1] == turns


def test_a_response_says_when_it_was_complete_and_its_penalties(client: openai.OpenAI) -> None:
    """OpenRouter's SDK refuses a response without these fields."""
    whole = client.responses.create(model=NAME, input="Hello", extra_body={"presence_penalty": 0.5}).model_dump()
    assert whole["completed_at"] >= whole["created_at"]
    assert (whole["frequency_penalty"], whole["presence_penalty"]) == (0.0, 0.5)
    cut = client.responses.create(model=NAME, input="Hello", max_output_tokens=4).model_dump()
    assert cut["status"] == "incomplete" and "completed_at" in cut and cut["completed_at"] is None


def test_a_conversation_as_items(server: ScriptedServer, client: openai.OpenAI) -> None:
    first = client.responses.create(model=NAME, input=[{"role": "user", "content": "a"}])
    items: list[Any] = [
        {"role": "developer", "content": "s"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        *[item.model_dump() for item in first.output],                       # sent back as it came
        {"role": "user", "content": "b"},
    ]
    client.responses.create(model=NAME, input=items)
    turns = [("system", "s"), ("user", "a"), ("assistant", TEXT), ("user", "b")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in turns) + "<|im_start|>assistant\n"
    assert server.llm.prompts[-1] == expected


def test_a_response_that_is_cut_short(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=NAME, input="Hello", max_output_tokens=4)
    assert reply.status == "incomplete" and reply.output_text == "Good"
    assert reply.incomplete_details is not None and reply.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model=NAME, input="Hello", max_output_tokens=4, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "Good"


@pytest.mark.reliability("H-08", "C-06")
def test_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=NAME, input="Hello", stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]
    assert deltas == len(TEXT)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    added, done, last = events[2], events[-2], events[-1]
    assert added.type == "response.output_item.added" and added.item.type == "message" and added.item.content == []
    assert done.type == "response.output_item.done" and last.type == "response.completed"
    assert last.response.output == [done.item] and last.response.output_text == TEXT
    assert last.response.usage is not None and last.response.usage.output_tokens == len(TEXT) + 1
    with client.responses.stream(model=NAME, input="Hello") as stream:       # the client's own accumulation
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == TEXT


def test_an_empty_answer(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.llm.script = lambda prompt: ""
    whole = client.responses.create(model=NAME, input="Hello")
    last = list(client.responses.create(model=NAME, input="Hello", stream=True))[-1]
    assert last.type == "response.completed"
    assert whole.output_text == last.response.output_text == "" and len(whole.output) == len(last.response.output) == 1


@pytest.mark.parametrize(("body", "words"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id: no response 'resp_1' is stored here, or no longer; send"),
    ({"conversation": "conv_1"}, "conversation is not supported"),
    ({"background": True, "store": False}, "background can only be used when `store` is true"),
    ({"truncation": "middle"}, "truncation: invalid enum value 'middle'; one of auto, disabled works"),
    ({"include": ["nothing.at.all"]}, "include: 'nothing.at.all' is not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type 'web_search' is not supported"),
    ({"tools": [{"type": "function", "nam": "f"}]}, "tools[0]: Object contains unknown field nam"),
    ({"tool_choice": {"type": "function", "name": "f", "bogus": 1}}, "unknown field 'bogus' in tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", "x": 1}]}},
     "unknown field 'x' in tool_choice.tools[0]"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "f"}]}},
     "tool_choice.tools[0].type: invalid value 'mcp'"),
    ({"input": []}, "input must be a text or a list with at least one item"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0] is of type 'input_image'; only text"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id is missing"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id is missing"),
    ({"input": [{"type": "item_reference", "id": "x", "content": "y"}]}, "input[0] is an item_reference, which may have an id"),
    ({"input": [{"role": "user", "content": "x", "id": 7}]}, "input[0].id: expected str | null, got int"),
    ({"input": [{"role": "user", "content": "x", "id": {}}]}, "input[0].id: expected str | null, got object"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "image_url": "y"}]}]},
     "input[0].content[0].image_url is not supported"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema belongs to the type json_schema"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort: invalid enum value 'huge'; one of none, minimal, low, medium,"),
    ({"text": {"verbosity": "huge"}}, "text.verbosity: invalid enum value 'huge'; one of low, medium, high works"),
    ({"max_output_tokens": 0}, "max_output_tokens must be an integer at least 1"),
    ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
])
def test_what_is_refused(client: openai.OpenAI, body: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", cast_to=object, body={"model": NAME, "input": "x"} | body)
    assert words in caught.value.message and caught.value.type == "invalid_request_error"


def test_another_models_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        client.responses.create(model="other", input="x")


# -- stored responses --------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_an_earlier_response(server: ScriptedServer, client: openai.OpenAI) -> None:
    """Each turn sends what is new; the prompt is the whole conversation, without the instructions of earlier turns."""
    server.llm.script = lambda prompt: "One."
    first = client.responses.create(model=NAME, input="Count.", instructions="Be brief")
    assert first.store is True and first.previous_response_id is None  # type: ignore[attr-defined]
    server.llm.script = lambda prompt: "Two."
    with client.responses.stream(model=NAME, input="On.", previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    server.llm.script = lambda prompt: "Three."
    items: list[Any] = [{"role": "user", "content": "And on."}]
    third = client.responses.create(model=NAME, input=items, previous_response_id=second.id, store=False)
    turns = ["user\nCount.", "assistant\nOne.", "user\nOn.", "assistant\nTwo.", "user\nAnd on."]
    assert server.llm.prompts[-1] == "".join(f"<|im_start|>{turn}<|im_end|>" for turn in turns) + "<|im_start|>assistant\n"
    assert third.previous_response_id == second.id and third.model_dump()["store"] is False
    counted = client.responses.input_tokens.count(model=NAME, input=items, previous_response_id=second.id)
    assert third.usage is not None and counted.input_tokens == third.usage.input_tokens
    # Two answers to one response are two conversations.
    client.responses.create(model=NAME, input="Stop.", previous_response_id=first.id)
    assert "Two" not in server.llm.prompts[-1] and "One." in server.llm.prompts[-1]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=NAME, input="x", previous_response_id=third.id)    # which was not to be stored
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_call_and_its_output_in_two_responses(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.llm.script = lambda prompt: '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
    first = client.responses.create(model=NAME, input="Weather?", tools=tools)
    call = first.output[-1]
    assert call.type == "function_call"
    server.llm.script = lambda prompt: "Sunny."
    output: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    client.responses.create(model=NAME, input=output, tools=tools, previous_response_id=first.id)
    assert '"city": "Rome"' in server.llm.prompts[-1] and "<tool_response>\nsun" in server.llm.prompts[-1]


def test_a_response_is_fetched_listed_and_deleted(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.llm.script = lambda prompt: TEXT
    made = client.responses.create(model=NAME, input=[{"role": "user", "content": each} for each in "abc"])
    assert client.responses.retrieve(made.id) == made
    newest, *rest = client.responses.input_items.list(made.id, limit=2)
    texts = [item.content[0].text for item in (newest, *rest)]                           # type: ignore[union-attr,index]
    assert texts == ["c", "b", "a"]
    oldest = next(iter(client.responses.input_items.list(made.id, order="asc")))
    assert oldest.content[0].text == "a" and oldest.id                                   # type: ignore[union-attr,index]
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(made.id)
        assert caught.value.code == "response_not_found"
    for query in ("stream=true", "include=nothing.at.all", "starting_after=3"):
        assert httpx.get(f"{server.url}/v1/responses/{made.id}?{query}").status_code == 400
    kept = client.responses.create(model=NAME, input="x").id
    for query in ("limit=0", "limit=1000", "limit=000000001111", "limit=x", "order=up", "after=msg_1", "before=x"):
        refused = httpx.get(f"{server.url}/v1/responses/{kept}/input_items?{query}")
        assert refused.status_code == 400, query
        assert refused.json()["error"]["param"] in (query.partition("=")[0], None)
        assert (refused.json()["error"]["param"] is None) == (query == "before=x")
    for query in ("bogus=1", "stream=false"):
        assert httpx.delete(f"{server.url}/v1/responses/{kept}?{query}").status_code == 400
    assert client.responses.retrieve(kept).id == kept


def test_input_items_are_what_clients_read(server: ScriptedServer, client: openai.OpenAI) -> None:
    """Contents are parts, every item has its type's fields: OpenAI's client writes them down again without a warning."""
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s" * 9_999}], "content": [
            {"type": "reasoning_text", "text": "e"}], "encrypted_content": "x" * 9_999},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s" * 9_999}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "g"},
    ]
    made = client.responses.create(model=NAME, input=items)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        listed = client.responses.input_items.list(made.id, order="asc").data
        told: list[dict[str, Any]] = [item.model_dump() for item in listed]
    assert [item["type"] for item in told] == ["message"] * 3 + ["reasoning", "function_call", "function_call_output"]
    parts = [[(part["type"], part["text"]) for part in item["content"]] for item in told[:4]]
    assert parts == [
        [("input_text", "a")], [("output_text", "b")], [("input_text", "c"), ("input_text", "d")], [("reasoning_text", "e")]
    ]
    assert len(httpx.get(f"{server.url}/v1/responses/{made.id}/input_items").content) < 5_000   # no prompt has the rest


def test_items_are_named_by_their_ids(server: ScriptedServer, client: openai.OpenAI) -> None:
    """As Vercel's AI SDK sends a conversation whose responses are stored."""
    server.llm.script = lambda prompt: "One."
    first = client.responses.create(model=NAME, input=[{"role": "user", "content": "Count.", "id": "mine"}])
    server.llm.script = lambda prompt: "Two."
    answer = first.output[0].id
    items: list[Any] = [
        {"role": "user", "content": "Count."}, {"type": "item_reference", "id": answer}, {"role": "user", "content": "On."}
    ]
    second = client.responses.create(model=NAME, input=items)
    turns = "".join(f"<|im_start|>{turn}<|im_end|>" for turn in ("user\nCount.", "assistant\nOne.", "user\nOn."))
    assert server.llm.prompts[-1] == turns + "<|im_start|>assistant\n"
    items = [{"id": "mine"}, {"type": "item_reference", "id": answer}, {"role": "user", "content": "On."}]
    client.responses.create(model=NAME, input=items, store=False)
    assert server.llm.prompts[-1] == turns + "<|im_start|>assistant\n"
    # The second has it among its input: it is there as long as one of the two is.
    client.responses.delete(second.id)
    client.responses.create(model=NAME, input=[{"type": "item_reference", "id": answer}], store=False)
    with pytest.raises(openai.BadRequestError, match="named twice"):
        client.responses.create(model=NAME, input=[items[1]] * 2)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=NAME, input=items[1:])
    assert f"Item with id '{answer}' not found" in caught.value.message
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input")


def test_a_short_request_behind_a_long_conversation_does_not_hold_up_others(
    server: ScriptedServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * (LONG_BYTES + 1)
    long = client.responses.create(model=NAME, input=[{"type": "reasoning", "summary": [], "content": [
        {"type": "reasoning_text", "text": text}]}, {"role": "user", "content": "a", "id": "long"}])
    short = client.responses.create(model=NAME, input="a")
    away: list[Any] = []
    run = LONG_WORK.run

    async def watched(work: Any, *given: Any) -> Any:
        away.append(getattr(work, "__qualname__", ""))
        return await run(work, *given)

    monkeypatch.setattr(LONG_WORK, "run", watched)
    reading = "response_chat.<locals>.work"
    client.responses.create(model=NAME, input="b", previous_response_id=short.id)
    assert reading not in away
    client.responses.create(model=NAME, input="b", previous_response_id=long.id)
    assert away.count(reading) == 1
    client.responses.create(model=NAME, input=[{"type": "item_reference", "id": "long"}])
    assert away.count(reading) == 2
    client.responses.input_items.list(short.id)
    assert not any("items" in name for name in away)
    client.responses.input_items.list(long.id)
    assert any("items" in name for name in away)


@pytest.mark.reliability("S-06c")
def test_a_response_belongs_to_its_key(tmp_path: Path) -> None:
    with ScriptedServer(write_model(tmp_path / NAME), lambda prompt: TEXT, keys=Keys(["one", "two"])) as server:
        one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        made = one.responses.create(model=NAME, input="Hello")
        assert one.responses.retrieve(made.id).output_text == TEXT
        for ask in (two.responses.retrieve, two.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError, match=r"no response .* is stored here"):
            two.responses.create(model=NAME, input="x", previous_response_id=made.id)
        one.responses.delete(made.id)


def test_nothing_is_stored_where_that_is_switched_off(tmp_path: Path) -> None:
    options = ServerOptions(port=0, max_stored_responses=0)
    with ScriptedServer(write_model(tmp_path / NAME), lambda prompt: TEXT, server=options) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        made = client.responses.create(model=NAME, input="Hello", store=True)
        assert made.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="this server stores no responses"):
            client.responses.create(model=NAME, input="x", previous_response_id=made.id)


def test_an_answer_says_whether_it_was_kept(tmp_path: Path) -> None:
    options = ServerOptions(port=0, max_stored_bytes=4_000)
    with ScriptedServer(write_model(tmp_path / NAME), lambda prompt: TEXT, server=options) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def asked(text: str) -> list[Any]:
            whole = client.responses.create(model=NAME, input=text)
            *_, last = client.responses.create(model=NAME, input=text, stream=True)
            assert last.type == "response.completed"
            return [whole, last.response]

        for made in asked("Hello"):
            assert made.store is True
        assert client.responses.retrieve(made.id).id == made.id
        for text in ("x" * 1_500, "x" * 5_000):          # too long with its answer, and without
            for made in asked(text):
                assert made.store is False
                with pytest.raises(openai.NotFoundError):
                    client.responses.retrieve(made.id)


def test_who_holds_most_makes_room() -> None:
    store = ResponseStore(10, 100_000)
    assert store.put("quiet", 1, b"x" * 100, b"[]", b"[]", ["a"])
    for number in range(100):
        assert store.put(f"many {number}", 2, b"x" * 20_000, b"[]", b"[]", ["a", "b", "b"])
    assert store.get("quiet", 1) is not None and store.with_item("a", 1) == "quiet"
    assert store.get("many 95", 2) is None and store.with_item("a", 2) == store.with_item("b", 2) == "many 99"
    for number in range(100):
        assert store.put(f"small {number}", 3, b"", b"[]", b"[]")
    assert len(store) == 10 and store.get("quiet", 1) is not None and store.get("many 99", 2) is not None
    assert store.with_item("b", 1) is None and store.with_item("a", 4) is None
    assert not store.put("all", 4, b"x" * 90_000, b"[]", b"[]")          # others would have to go for it
    assert store.get("quiet", 1) is not None
    assert store.delete("quiet", 1) and store.with_item("a", 1) is None


def test_what_runs_is_neither_dropped_nor_expires() -> None:
    now = [0.0]
    store = ResponseStore(4, 100_000, lambda: now[0])
    assert store.put("runs", 1, b"x" * 60_000, b"[]", b"[]", ["a"], runs=True)
    for number in range(20):
        assert store.put(f"done {number}", 1, b"x" * 10_000, b"[]", b"[]")
    assert store.get("runs", 1) is not None and store.with_item("a", 1) == "runs" and store.num_bytes <= 100_000
    now[0] = 2 * KEPT_SECONDS
    assert store.get("done 19", 1) is None and store.get("runs", 1) is not None and len(store) == 1
    assert not store.put("second", 2, b"x" * 60_000, b"[]", b"[]", runs=True)        # no room beside it
    assert store.delete("runs", 1) and len(store) == store.num_bytes == store.num_running == 0
    for number in range(4):
        assert store.put(f"runs {number}", number, b"", b"[]", b"[]", runs=True)
    assert not store.put("fifth", 9, b"", b"[]", b"[]") and len(store) == 4


@pytest.mark.reliability("S-06c")
def test_what_is_stored_is_bounded_in_number_bytes_and_time() -> None:
    now = [0.0]
    store = ResponseStore(10, 100_000, lambda: now[0])
    for number in range(1_000):
        store.put(str(number), 0, b"x" * (number % 37), b"[]", b"[]")
        assert len(store) <= 10
    assert store.get("999", 0) is not None and store.get("989", 0) is None
    store.put("large", 0, b"x" * 95_000, b"[]", b"[]")
    assert len(store) < 10 and store.num_bytes <= 100_000 and store.get("large", 0) is not None
    store.put("too large", 0, b"x" * 100_000, b"[]", b"[]")
    assert store.get("too large", 0) is None and store.get("large", 0) is not None
    assert store.get("large", 1) is None and not store.delete("large", 1)
    now[0] = KEPT_SECONDS / 2
    store.put("later", 3, b"", b"[]", b"[]")
    now[0] = KEPT_SECONDS
    assert store.get("large", 0) is None and store.get("later", 3) is not None and len(store) == 1
    assert store.delete("later", 3) and not store.delete("later", 3)
    assert len(store) == store.num_bytes == 0
    off = ResponseStore(0, 100)
    off.put("a", 0, b"", b"[]", b"[]")
    assert not off.is_on and not len(off)


@pytest.mark.reliability("C-14")
def test_a_failure_before_and_in_a_stream(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.llm.script = lambda prompt: ("", RequestError("NaN logits"))
    with pytest.raises(openai.InternalServerError, match="NaN logits"):
        client.responses.create(model=NAME, input="x", stream=True)
    server.llm.script = lambda prompt: ("Good", RequestError("NaN logits"))
    error, failed = list(client.responses.create(model=NAME, input="x", stream=True))[-2:]
    assert error.type == "error" and "NaN logits" in error.message
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert failed.response.error is not None and "NaN logits" in failed.response.error.message


# -- tools and thoughts ------------------------------------------------------------------------------------------------

TOOLS: list[Any] = [{
    "type": "function", "name": "weather", "description": "The weather in a place", "strict": True,
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}]
SAID = '<think>Where?</think>I look.<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call>'
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("tools") / NAME)
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TOOL_TEMPLATE)
    with ScriptedServer(model, lambda prompt: SAID, chat_template=str(template)) as made:
        yield made


@pytest.fixture
def tool_client(with_tools: ScriptedServer) -> openai.OpenAI:
    with_tools.llm.script = lambda prompt: SAID
    return client_of(with_tools.url)


@pytest.mark.reliability("C-13")
def test_thoughts_text_and_calls(with_tools: ScriptedServer, tool_client: openai.OpenAI) -> None:
    whole = tool_client.responses.create(model=NAME, input="Hello", tools=TOOLS)
    events = list(tool_client.responses.create(model=NAME, input="Hello", tools=TOOLS, stream=True))
    assert events[-1].type == "response.completed"
    for reply in (whole, events[-1].response):
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
        thought, message, call = reply.output
        assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "Where?"
        assert message.type == "message" and reply.output_text == "I look."
        assert call.type == "function_call" and (call.name, call.status) == ("weather", "completed")
        assert json.loads(call.arguments) == {"place": "Bern"} and call.call_id
        assert reply.usage is not None and reply.usage.output_tokens_details.reasoning_tokens > 0
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert json.loads(deltas) == {"place": "Bern"} and done.arguments == deltas
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thoughts == "Where?" and kinds.count("response.reasoning_text.done") == 1
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_calls_result_goes_back(with_tools: ScriptedServer, tool_client: openai.OpenAI) -> None:
    first = tool_client.responses.create(model=NAME, input="Hello", tools=TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    with_tools.llm.script = lambda prompt: "It rains."
    items: list[Any] = [
        {"role": "user", "content": "Hello"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert tool_client.responses.create(model=NAME, input=items, tools=TOOLS).output_text == "It rains."
    assert with_tools.llm.prompts[-1].endswith("<|im_start|>tool\nrain<|im_end|><|im_start|>assistant\n")
    turns = with_tools.llm.prompts[-1].split("<|im_start|>")
    assert turns[3].startswith("assistant\n<think>Where?</think>I look.<tool_call>"), turns


@pytest.mark.reliability("C-06")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("said", "cut", "reason", "statuses"), [
    (f"{SAID}{CALL}", {"max_output_tokens": len(f"{SAID}{CALL}") - 20}, "max_output_tokens", ["completed"] * 3 + ["incomplete"]),
    (f"{SAID}{CALL}", {"max_output_tokens": len(SAID) + 3}, "max_output_tokens", ["completed"] * 3),      # behind a whole call
    ("<think>Where?</think>I look", {"max_output_tokens": 23}, "max_output_tokens", ["completed", "incomplete"]),
    ("<think>Where?</think>I look", {"max_output_tokens": 10}, "max_output_tokens", ["incomplete"]),
    (f"{SAID}{CALL}", {"stop": "Oslo"}, "a stop string", ["completed"] * 3 + ["incomplete"]),
    (f"{SAID}{CALL}", {"stop": "</tool_call>"}, None, ["completed"] * 3),
    (SAID, {"stop": "look"}, None, ["completed"] * 2),
    (SAID, {}, None, ["completed"] * 3),
])
def test_only_the_part_that_was_cut_is_incomplete(
    with_tools: ScriptedServer, tool_client: openai.OpenAI, stream: bool, said: str, cut: dict[str, Any], reason: str | None,
    statuses: list[str],
) -> None:
    with_tools.llm.script = lambda prompt: said
    asked: dict[str, Any] = {"model": NAME, "input": "Hello", "tools": TOOLS}
    reply = tool_client.responses.create(**asked, extra_body=cut, stream=stream)
    if stream:
        events = list(reply)
        reply = events[-1].response
        assert events[-1].type == ("response.incomplete" if reason else "response.completed")
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == reply.output                      # each says of itself what the whole says of it
        assert [event.sequence_number for event in events] == list(range(len(events)))
    assert reply.status == ("incomplete" if reason else "completed")
    word = None if reason == "a stop string" else reason                     # of which the client's types know nothing
    assert (reply.incomplete_details and reply.incomplete_details.reason) == word
    assert [item.status for item in reply.output] == statuses
    if statuses[-1] == "incomplete":                     # a conversation can go on from it
        with_tools.llm.script = lambda prompt: "Well."
        again = tool_client.responses.create(model=NAME, input="Go on", tools=TOOLS, previous_response_id=reply.id)
        assert again.status == "completed"


THOUGHT = "<think>Where?</think>"


@pytest.mark.parametrize(("said", "how", "texts"), [
    ("I löök. 😀", {}, ["I löök. 😀"]),
    ("I look.", {"stop": "ok"}, ["I lo"]),
    ("I look.", {"max_output_tokens": 4}, ["I lo"]),
    ("", {}, [""]),
    ("<think>", {}, [""]),
    (f"{THOUGHT}\n\nI look.\n{CALL}", {}, ["I look."]),
    (f"<think></think>I look.{CALL}", {}, ["I look."]),
    (f"{THOUGHT}{CALL}\n{CALL} ", {}, []),
    (f"{THOUGHT}One 1 < 2.\n{CALL}\nTwo <tool_cal{CALL}", {}, ["One 1 < 2.", "Two <tool_cal"]),
    (f"{THOUGHT}<tool_call>no</tool_call>", {}, ["<tool_call>no</tool_call>"]),
])
def test_log_probabilities_are_the_texts(
    with_tools: ScriptedServer, tool_client: openai.OpenAI, said: str, how: dict[str, Any], texts: list[str]
) -> None:
    """The tokens of a text join to it: none of a thought, of a call, of the marks of either, or of the answer's end is there."""
    with_tools.llm.script = lambda prompt: said
    asked: dict[str, Any] = {"model": NAME, "input": "Hello", "tools": TOOLS, "top_logprobs": 1, "extra_body": how}
    whole = tool_client.responses.create(**asked)
    events = list(tool_client.responses.create(**asked, stream=True))
    for reply in (whole, events[-1].response):
        parts = [item.content[0] for item in reply.output if item.type == "message"]
        assert [part.text for part in parts] == texts
        assert [joined(part.logprobs) for part in parts] == texts
        assert all(json.loads(item.arguments) for item in reply.output if item.type == "function_call")
    assert [item.type for item in whole.output] == [item.type for item in events[-1].response.output]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [joined(event.logprobs) for event in deltas] == [event.delta for event in deltas]


def joined(entries: list[Any]) -> str:
    return b"".join(bytes(entry.model_dump()["bytes"]) for entry in entries).decode()


def test_a_token_of_the_text_and_of_a_mark_is_the_texts() -> None:
    """`<think>a</think>I look.` and a call, in tokens that end where marks do not; and a text between two calls."""
    tokens: TextTokens[str] = TextTokens()
    tokens.add([(0, "<think>a</"), (10, "think>I"), (17, " lo"), (20, "ok.<tool"), (28, "_call>")])
    assert tokens.take(3, [(16, 19)]) == ["think>I", " lo"]
    assert tokens.take(4, [(16, 23)]) == ["ok.<tool"]
    tokens.add([(34, "{}"), (36, " ö"), (38, "ö"), (38, "ö"), (39, "</s>")])
    spans = [(16, 23), (37, 39)]
    assert tokens.take(1, spans) == [" ö"]
    assert tokens.take(1, spans) == ["ö", "ö"]


def test_an_answer_without_tokens() -> None:
    """It may be aborted before its first."""
    chat = ChatRequest(messages=[ChatMessage(role="user", content="x")])
    for logprobs in (None, []):
        params = SamplingParams(logprobs=None if logprobs is None else 1)
        writer = ResponsesWriter(ResponsesRequest(input="x"), None, chat, params, "resp_1", NAME, None)
        answer = CompletionOutput(0, logprobs=logprobs, finish_reason="abort")
        told = json.loads(writer.body([RequestOutput("1", None, [1], [answer])]))
        assert told["status"] == "completed" and told["output"][0]["content"][0] == {
            "type": "output_text", "text": "", "annotations": [], "logprobs": []
        }


def test_tool_choice_and_formats(with_tools: ScriptedServer, tool_client: openai.OpenAI) -> None:
    with_tools.llm.script = lambda prompt: '{"place": "Bern"}'
    named: Any = {"type": "function", "name": "weather"}
    reply = tool_client.responses.create(model=NAME, input="Hello", tools=TOOLS, tool_choice=named)
    assert [item.type for item in reply.output] == ["function_call"]
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    reply = tool_client.responses.create(model=NAME, input="Hello", text=form)
    assert "place" in repr(with_tools.llm.params[-1].structured_outputs) and reply.output_text == '{"place": "Bern"}'


@pytest.mark.parametrize(
    "metadata", [{str(number): "" for number in range(17)}, {"a" * 65: ""}, {"a": "b" * 513}], ids=["entries", "key", "value"]
)
def test_metadata_is_limited_as_by_openai(client: openai.OpenAI, metadata: dict[str, str]) -> None:
    """It is repeated in every event, and stored."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=NAME, input="a", metadata=metadata)
    assert caught.value.param == "metadata"
    most = {f"{number:064}": "b" * 512 for number in range(16)}
    assert client.responses.create(model=NAME, input="a", metadata=most).metadata == most

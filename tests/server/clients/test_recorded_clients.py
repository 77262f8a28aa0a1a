"""Third-party clients: requests recorded from them are accepted, and their tool loops work.

`golden/client_requests.jsonl` has the bodies as the clients sent them, with long texts cut; docs/clients.md says what was
tried with each. Real HTTP, tokenizer and parsers; the model's words are scripted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import write_model

from ridgeline.engine.ipc import Ready
from ridgeline.server.options import ServerOptions

LINES = (Path(__file__).parents[2] / "golden" / "client_requests.jsonl").read_text(encoding="utf-8").splitlines()
RECORDED: list[dict[str, Any]] = [json.loads(line) for line in LINES]
CONTEXT = 1 << 16
CALL = 'I look.\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@contextmanager
def serving(folder: Path, script: Callable[[str], str], template: str | None = TOOL_TEMPLATE, **options: Any) -> Iterator[Any]:
    model = write_model(folder / "tiny")
    if template is not None:
        settings = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    server = ScriptedServer(model, script, server=ServerOptions(port=0, **options))
    server.llm.ready = Ready(
        model="scripted", max_model_len=CONTEXT, max_num_seqs=8, vocab_size=260, dtype="float32", device="cpu", num_blocks=64,
        block_size=16, seconds=0.0,
    )
    with server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a model whose template shows tools."""
    with serving(tmp_path_factory.mktemp("model"), lambda _: "Hello.") as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a model whose template has no word for tools, like the embedded one's."""
    with serving(tmp_path_factory.mktemp("model"), lambda _: "Hello.", template=None) as server:
        yield server


def recorded(client: str) -> list[dict[str, Any]]:
    return [each for each in RECORDED if each["client"].startswith(client)]


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("asked", RECORDED, ids=[f"{place}-{each['client']}" for place, each in enumerate(RECORDED)])
def test_a_recorded_request_is_answered(server: Any, asked: dict[str, Any]) -> None:
    replay(server, asked)


def test_recorded_tools_are_taken_without_a_template_for_them(plain: Any) -> None:
    for asked in RECORDED:
        if asked["body"].get("tools"):
            replay(plain, asked)
            tool = asked["body"]["tools"][0]
            named = tool.get("function", tool)["name"] in plain.llm.prompts[-1]
            assert named or asked["body"].get("tool_choice") in ("none", {"type": "none"})


def replay(server: Any, asked: dict[str, Any]) -> None:
    reply = httpx.post(server.url + asked["path"], json=asked["body"], timeout=60)
    assert reply.status_code == 200, reply.text
    if asked["body"].get("stream"):
        ends = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}
        end = ends.get(asked["path"].partition("?")[0])
        assert events(reply)[-1].get("type") == end and (end or reply.text.endswith("data: [DONE]\n\n"))


# -- agents that run a tool and come back --------------------------------------------------------------------------------


@pytest.mark.reliability("C-15")
def test_claude_code_runs_its_shell(tmp_path: Path) -> None:
    first, second = recorded("claude-code")

    def script(prompt: str) -> str:
        if "forty-two" in prompt:
            return "It is 42."
        return CALL.format(name="Bash", arguments='{"command": "echo forty-two"}')

    with serving(tmp_path, script) as server:
        told = events(httpx.post(server.url + first["path"], json=first["body"], timeout=60))
        starts = [event["content_block"] for event in told if event["type"] == "content_block_start"]
        assert [block["type"] for block in starts] == ["text", "tool_use"] and starts[1]["name"] == "Bash"
        last = next(event for event in told if event["type"] == "message_delta")
        assert last["delta"]["stop_reason"] == "tool_use"
        assert last["context_management"] == {"applied_edits": []}       # it asked for an edit, and none was made
        told = events(httpx.post(server.url + second["path"], json=second["body"], timeout=60))
        assert "".join(event["delta"].get("text", "") for event in told if event["type"] == "content_block_delta") == "It is 42."


def test_codex_runs_its_shell_and_calls_a_function_of_a_namespace(tmp_path: Path) -> None:
    first, second = recorded("codex-cli")
    said: list[str] = [CALL.format(name="multi_agent_v1.close_agent", arguments='{"target": "a"}'), "It is 42."]
    with serving(tmp_path, lambda _: said.pop(0)) as server:
        told = events(httpx.post(server.url + first["path"], json=first["body"], timeout=60))
        item = next(e["item"] for e in told if e["type"] == "response.output_item.done" and e["item"]["type"] == "function_call")
        assert (item["namespace"], item["name"], item["arguments"]) == ("multi_agent_v1", "close_agent", '{"target": "a"}')
        back = [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "closed"}]
        again = second["body"] | {"input": second["body"]["input"] + back}
        told = events(httpx.post(server.url + second["path"], json=again, timeout=60))
        assert told[-1]["response"]["output"][0]["content"][0]["text"] == "It is 42."
        assert '"multi_agent_v1.close_agent"' in server.llm.prompts[-1] and "closed" in server.llm.prompts[-1]
        assert "web_search" not in server.llm.prompts[-1]


def test_codex_with_a_search_that_reaches_the_web_is_refused_by_name(server: Any) -> None:
    body = recorded("codex-cli")[0]["body"]
    tools = [tool | {"external_web_access": True} if tool["type"] == "web_search" else tool for tool in body["tools"]]
    reply = httpx.post(server.url + "/v1/responses", json=body | {"tools": tools})
    assert reply.status_code == 400 and ".type 'web_search' is not supported" in reply.json()["error"]["message"]


def test_anthropics_tool_runner_goes_on_without_a_thread(tmp_path: Path) -> None:
    ran: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        ran.append(city)
        return "sunny"

    def script(prompt: str) -> str:
        return "It is sunny." if "sunny" in prompt else CALL.format(name="weather", arguments='{"city": "Rome"}')

    with serving(tmp_path, script) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        asked: Any = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "Weather?"}]}
        runner = client.beta.messages.tool_runner(**asked, tools=[weather])
        assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"] and ran == ["Rome"]
        refused = httpx.post(server.url + "/v1/messages", json=asked | {"thread": {"type": "create"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


# -- models whose template has no word for tools -------------------------------------------------------------------------

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}


def test_tools_are_told_in_words_where_the_template_has_none(tmp_path: Path) -> None:
    """As a LangChain or llama-index agent asks the embedded model: tools, no tool_choice."""
    said = [CALL.format(name="weather", arguments='{"city": "Rome"}'), "Sunny."]
    with serving(tmp_path, lambda _: said.pop(0), template=None) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Weather?"}]
        tools: Any = [WEATHER]
        first = client.chat.completions.create(model="tiny", messages=messages, tools=tools).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.tool_calls is not None
        call: Any = first.message.tool_calls[0]
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome"}
        prompt = server.llm.prompts[-1]
        assert prompt.startswith("<|im_start|>system\nBe short.\n\nYou can call functions.") and '"weather"' in prompt
        result = {"role": "tool", "tool_call_id": call.id, "content": "22 °C"}
        more = {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "dry"}]}
        and_now = {"role": "user", "content": "And now?"}
        messages += [first.message.model_dump(exclude_none=True), result, more, and_now]
        client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        prompt = server.llm.prompts[-1]
        call_text = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        assert f"<|im_start|>assistant\n{call_text}<|im_end|>" in prompt
        one, two = (f"<tool_response>\n{text}\n</tool_response>" for text in ("22 °C", "dry"))
        assert f"<|im_start|>user\n{one}\n{two}\nAnd now?<|im_end|>" in prompt       # results and a question are one turn
        counted = httpx.post(f"{server.url}/tokenize", json={"messages": messages[:2], "tools": tools}).json()
        first_prompt = server.llm.prompts[0]
        assert counted["count"] == len(first_prompt.encode()) - sum(len(mark) - 1 for mark in marks(first_prompt))
        image = [*messages[:2], {"role": "tool", "tool_call_id": "x", "content": [{"type": "image_url"}]}]
        with pytest.raises(openai.BadRequestError, match="only text parts are supported"):
            client.chat.completions.create(model="tiny", messages=image, tools=tools)


def marks(prompt: str) -> list[str]:
    """The special tokens in a prompt, whose other tokens are its bytes."""
    return [mark for mark in ("<|im_start|>", "<|im_end|>") for _ in range(prompt.count(mark))]


@pytest.mark.parametrize("says", ["System role not supported", "Only user and assistant roles are supported!"])
def test_a_template_without_a_system_role_gets_the_tools_in_the_first_question(tmp_path: Path, says: str) -> None:
    template = (
        f"{{% if messages[0].role == 'system' %}}{{{{ raise_exception('{says}') }}}}{{% endif %}}"
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    with serving(tmp_path, lambda _: "Hi.", template=template) as server:
        body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
        assert server.llm.prompts[-1].startswith("[user] You can call functions.")
        assert server.llm.prompts[-1].endswith("\n\nWeather?\n")


def test_no_tools_without_a_known_format_if_the_option_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, lambda _: "Hi.", template=None, tool_call_parser="none") as server:
        body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert reply.status_code == 400 and "--tool-call-parser" in reply.json()["error"]["message"]


# -- what clients go by --------------------------------------------------------------------------------------------------


def test_lm_evals_remote_tokenizer(server: Any) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert "messages" in info["chat_template"] and info["max_model_len"] == CONTEXT
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "</s>", "add_special_tokens": False}).json()["tokens"]
    assert len(tokens) == 1


def test_a_response_says_whether_it_is_stored(server: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    made = client.responses.create(model="tiny", input="Hi", store=False)
    assert made.output_text == "Hello." and getattr(made, "store", None) is False
    assert getattr(client.responses.create(model="tiny", input="Hi"), "store", None) is True
    counted = httpx.post(f"{server.url}/v1/responses/input_tokens", json={"model": "tiny", "input": "Hi"}).json()
    assert made.usage is not None and counted == {"object": "response.input_tokens", "input_tokens": made.usage.input_tokens}


def test_a_choice_among_allowed_tools_of_responses(server: Any) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    body = {"model": "tiny", "input": "Hi", "tools": tools, "tool_choice": choice}
    reply = httpx.post(f"{server.url}/v1/responses", json=body)
    assert reply.status_code == 200 and reply.json()["tool_choice"] == choice
    wrong = choice | {"tools": [{"type": "function", "name": "h"}]}
    reply = httpx.post(f"{server.url}/v1/responses", json=body | {"tool_choice": wrong})
    assert reply.status_code == 400 and "'h', which is not among the tools" in reply.json()["error"]["message"]


def test_the_model_by_each_of_its_names(tmp_path: Path) -> None:
    with serving(tmp_path, lambda _: "Hi.", served_model_name="tiny, gpt-4o,claude-haiku") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        names = ["tiny", "gpt-4o", "claude-haiku"]
        assert [model.id for model in client.models.list()] == names
        assert client.models.retrieve("gpt-4o").id == "gpt-4o"
        made = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "Hi"}])
        assert made.model == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])
        theirs = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        listed = theirs.models.list()
        assert [(model.id, model.display_name, model.type) for model in listed] == [(name, name, "model") for name in names]
        assert listed.data[0].created_at.year >= 2025 and not listed.has_more
        assert theirs.models.retrieve("claude-haiku").id == "claude-haiku"
        with pytest.raises(anthropic.NotFoundError) as refused:
            theirs.models.retrieve("gpt-4")
        told = refused.value.body
        assert isinstance(told, dict) and (told["type"], told["error"]["type"]) == ("error", "not_found_error")


def test_a_name_may_stand_for_all_that_begin_like_it(tmp_path: Path) -> None:
    with serving(tmp_path, lambda _: "Hi.", served_model_name="gpt-*,tiny,claude-*") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]      # no client is offered a pattern
        for name in ("gpt-4o", "gpt-", "claude-opus-5-5"):
            made = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
            assert made.model == "tiny" and client.models.retrieve(name).id == name
        for name in ("gp", "o3", "x-gpt-4o", "*"):
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
    with serving(tmp_path / "2", lambda _: "Hi.", served_model_name="*") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        made = client.chat.completions.create(model="anything", messages=[{"role": "user", "content": "Hi"}])
        assert made.model == client.models.list().data[0].id != "*"


def test_a_compressed_body_is_refused_by_its_header(server: Any) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    reply = httpx.post(f"{server.url}/v1/chat/completions", content=b"\x1f\x8b", headers=headers)
    assert reply.status_code == 415 and "Content-Encoding" in reply.json()["error"]["message"]


def test_an_unknown_field_in_camel_case_is_named_whole(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "dropParams": []}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "dropParams" and "'dropParams'" in error["message"]


@pytest.mark.parametrize(("path", "body", "param"), [
    ("responses", {"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"input": "Hi", "truncation": "middle"}, "truncation"),
    ("responses", {"input": "Hi", "max_output_tokens": -1}, "max_output_tokens"),
    ("responses/input_tokens", {"input": "Hi", "max_output_tokens": -1}, "max_output_tokens"),
    ("responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ("embeddings", {"input": "Hi", "encoding_format": "hex"}, "encoding_format"),
])
def test_an_error_names_the_field_by_the_name_it_was_sent_with(server: Any, path: str, body: Any, param: str) -> None:
    reply = httpx.post(f"{server.url}/v1/{path}", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.reliability("C-07")
@pytest.mark.parametrize(("arguments", "told"), [
    ('{"value": ', "{}"), ('{"a": 1, "b": [2, 3', '{"a": 1, "b": [2, 3]}'), ('"Bern"', "{}"), ("not JSON", "{}"), ("", "{}"),
    ('{"path": "x", "text": "He said "so" and left"}', '{"path": "x", "text": "He said "}'),
])
def test_a_conversation_does_not_end_at_a_call_that_was_cut_or_badly_written(server: Any, arguments: str, told: str) -> None:
    """Its client sends it back at every turn."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "not run"}]
    items = [{"role": "user", "content": "Hi"}, {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments},
             {"type": "function_call_output", "call_id": "1", "output": "not run"}]
    for path, body in (("chat/completions", {"messages": chat}), ("responses", {"input": items})):
        reply = httpx.post(f"{server.url}/v1/{path}", json=body)
        assert reply.status_code == 200, reply.text
        assert f'"arguments": {told}' in server.llm.prompts[-1]


def test_calls_and_tools_without_bottom_are_no_accident_of_the_server(server: Any, plain: Any) -> None:
    """A model that repeats itself writes arguments like these, and clients send them back."""
    function = {"name": "f", "arguments": "[" * 100_000}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    body = {"messages": [{"role": "user", "content": "Hi"}, call, {"role": "tool", "tool_call_id": "1", "content": "2"}]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    assert '"arguments": {}' in server.llm.prompts[-1]   # a template that reads them gets what is complete of them
    told = httpx.post(f"{plain.url}/tokenize", json=body)
    assert told.status_code == 200 and told.json()["count"] > 100_000        # as it was written
    for depth in range(960, 990, 2):                     # about as deep as a body may be
        deep = '{"a":' * depth + "1" + "}" * depth
        tools = '[{"type": "function", "function": {"name": "f", "parameters": ' + deep + "}}]"
        text = '{"messages": [{"role": "user", "content": "' + "x" * 70_000 + '"}], "tools": ' + tools + "}"
        reply = httpx.post(f"{plain.url}/tokenize", content=text, headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400)

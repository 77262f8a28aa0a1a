"""The OpenAI protocol through OpenAI's own client: tools, reasoning, structured output and every field of a request.

Two servers: one whose engine says what the test scripts, and one with a tiny real engine for what an engine must do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from msgspec import UNSET
from scripted_server import ScriptedServer
from served_model import ServerProcess, write_model

from ridgeline.engine.client.request_context import LOCAL
from ridgeline.errors import BadRequest, Unsupported
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.openai.chat import ChatRequest, ChatWriter
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.prepare import prepare_completion
from ridgeline.server.http.admission import Slots
from ridgeline.server.http.body import parse_body
from ridgeline.server.http.failures import param_of
from ridgeline.server.options import ServerOptions
from ridgeline.server.parse.incremental import Content, Reasoning
from ridgeline.server.parse.tools import Reading

TEMPLATE = (
    "{# <tool_call> </think> #}"
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %}={{ m.name }}{% endif %}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }}{% endif %}"
    "{% if verbosity is defined %}verbosity={{ verbosity }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if think %}<think>\n{% endif %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
CALLS = (
    "Let me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"ZH\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def write_templated(path: Path) -> Path:
    write_model(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return path
NAMED = {"type": "function", "function": {"name": "weather"}}


class Says:
    """What the scripted engine answers, whatever it is asked."""

    text = ""

    def __call__(self, prompt: str) -> str:
        return self.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_templated(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def scripted(model: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model, Says()) as server:
        yield server


class Client:
    """Asks the scripted server, whole and streamed, and checks that both say the same."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, says: str, **settings: Any) -> Any:
        self.server.llm.script.text = says               # type: ignore[attr-defined]
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES} | settings
        whole = self.sdk.chat.completions.create(**asked).choices[0]
        chunks = list(self.sdk.chat.completions.create(stream=True, **asked))
        assert added_up(chunks) == plain(whole), chunks
        return whole

    @property
    def prompt(self) -> str:
        return self.server.llm.prompts[-1]

    @property
    def params(self) -> SamplingParams:
        return self.server.llm.params[-1]


def plain(choice: Any) -> dict[str, Any]:
    """A choice without what is random."""
    message = choice.message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", []):
        assert call.pop("id")
    message.pop("refusal", None)
    return {"message": message, "finish_reason": choice.finish_reason}


def added_up(chunks: list[Any]) -> dict[str, Any]:
    """As clients do it: ids, types and names come once, texts in pieces."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finish[:-1] == [None] * (len(finish) - 1)
    for chunk in chunks:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        for part in delta.pop("tool_calls", []):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["name"]
                calls.append({"type": "function", "function": {"name": part["function"]["name"], "arguments": ""}})
            else:
                assert part["index"] == len(calls) - 1 and part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += part["function"].get("arguments", "")
        for name, value in delta.items():
            if name == "function_call":
                call = message.setdefault(name, {"name": "", "arguments": ""})
                for key, text in value.items():
                    call[key] += text
            else:
                message[name] = message.get(name, "") + value
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": finish[-1]}


@pytest.fixture
def client(scripted: ScriptedServer) -> Client:
    return Client(scripted)


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.reliability("H-08")
def test_tool_calls(client: Client) -> None:
    choice = client.ask(CALLS, tools=TOOLS)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"city": 'Zürich "ZH"'})
    assert (second.function.name, second.function.arguments) == ("time", "{}")
    assert first.id != second.id and first.type == "function"
    assert client.prompt.startswith("[weather time ]") and client.params.structured_outputs is None


@pytest.mark.reliability("C-04")
def test_arguments_are_streamed_in_pieces(client: Client) -> None:
    client.ask(CALLS, tools=TOOLS)
    chunks = client.sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=True)
    pieces = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or [] if part.index == 0]
    assert len(pieces) > 10 and [bool(part.id) for part in pieces] == [True] + [False] * (len(pieces) - 1)


def test_the_sdks_own_accumulator(client: Client) -> None:
    client.ask(CALLS, tools=TOOLS)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    with client.sdk.chat.completions.stream(model="tiny", messages=MESSAGES, tools=strict) as stream:   # type: ignore[arg-type]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None and [call.function.name for call in calls] == ["weather", "time"]
    assert calls[0].function.parsed_arguments == {"city": 'Zürich "ZH"'}


def test_no_tools_no_calls(client: Client) -> None:
    assert client.ask(CALLS).message.content == CALLS
    choice = client.ask(CALLS, tools=TOOLS, tool_choice="none")
    assert choice.message.content == CALLS and choice.finish_reason == "stop" and "[" not in client.prompt


@pytest.mark.reliability("C-02")
def test_a_malformed_call_is_content(client: Client) -> None:
    text = '<tool_call>{"name": "weather", arguments}</tool_call>'
    choice = client.ask(text, tools=TOOLS)
    assert choice.message.content == text and choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_one_call_where_they_may_not_be_parallel(client: Client) -> None:
    choice = client.ask(CALLS, tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


@pytest.mark.reliability("C-01")
def test_a_call_cut_short_says_so(client: Client) -> None:
    """And nothing of it is content, wherever it was cut."""
    choice = client.ask(CALLS, tools=TOOLS, max_tokens=70)
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.arguments.startswith('{"city"')
    for most in range(1, 70, 3):
        choice = client.ask(CALLS, tools=TOOLS, max_tokens=most)
        assert choice.finish_reason == "length" and "{" not in (choice.message.content or ""), choice
        assert "tool_c" not in (choice.message.content or "")


def test_a_stop_string_inside_a_call_cuts_it_short(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As max_tokens does: nothing of the call is content, and it counts as no call that can be made."""
    monkeypatch.setattr(client.server.service, "options", ServerOptions(reasoning_parser="none"))
    text = '[{"name": "weather", "parameters": {"city": "Paris"}}]'
    for stop, calls in {
        "Paris": [("weather", '{"city": "')], "name": [], "[": [], "weather": [], '"parameters': [("weather", "")],
    }.items():
        choice = client.ask(text, tools=TOOLS, tool_choice="required", stop=[stop])
        made = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert (choice.finish_reason, choice.message.content, made) == ("stop", None, calls), stop
    whole = client.ask(text, tools=TOOLS, tool_choice="required", stop=["}]"])
    assert whole.finish_reason == "tool_calls"           # behind the arguments
    assert whole.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    cut = client.ask('{"city": "Paris"}', tools=TOOLS, tool_choice=NAMED, stop=["Paris"])
    assert (cut.finish_reason, cut.message.content) == ("stop", None)
    assert cut.message.tool_calls[0].function.arguments == '{"city": "'
    free = client.ask(CALLS, tools=TOOLS, stop=["arguments"])
    assert free.finish_reason == "stop" and "{" not in (free.message.content or "")
    assert client.ask(CALLS, tools=TOOLS, stop=["</tool_call>"]).finish_reason == "tool_calls"
    functions = [tool["function"] for tool in TOOLS]
    older = client.ask('{"city": "Paris"}', functions=functions, function_call={"name": "weather"}, stop=["Paris"])
    assert older.finish_reason == "stop" and older.message.function_call.arguments == '{"city": "'


@pytest.mark.parametrize(("form", "text", "arguments"), [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', ['{"city": "Par']),
    ("hermes", CALLS + '<tool_call>{"name": "time", "arguments": {"a": 1', [None, None, '{"a": 1']),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>' + CALLS, ['{"city": ', None, None]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPar", ['{"city": "Par']),
])
def test_a_model_that_ends_inside_a_call_made_no_calls(
    client: Client, monkeypatch: pytest.MonkeyPatch, form: str, text: str, arguments: list[str | None]
) -> None:
    """A client that trusts `tool_calls` would parse arguments that are open, or run half of a call."""
    monkeypatch.setattr(client.server.service, "options", ServerOptions(reasoning_parser="none", tool_call_parser=form))
    choice = client.ask(text, tools=TOOLS)
    assert choice.finish_reason == "stop"
    for call, expected in zip(choice.message.tool_calls, arguments, strict=True):
        if expected is None:
            assert isinstance(json.loads(call.function.arguments), dict)
        else:
            assert call.function.arguments == expected


def test_required_and_named_calls_are_held_to_a_schema(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.server.service, "options", ServerOptions(reasoning_parser="none"))
    choice = client.ask('[{"name": "time", "parameters": {"a": 1}}]', tools=TOOLS, tool_choice="required")
    assert choice.message.tool_calls[0].function.name == "time" and choice.finish_reason == "tool_calls"
    assert client.params.structured_outputs is not None
    schema = json.loads(str(client.params.structured_outputs.json))
    assert schema["minItems"] == 1 and schema["$defs"]["tool0"] == CITY | {"additionalProperties": False}
    named = {"type": "function", "function": {"name": "weather"}}
    choice = client.ask('{"city": "Bern"}', tools=TOOLS, tool_choice=named)
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Bern"}' and choice.message.content is None
    assert json.loads(str(client.params.structured_outputs.json)) == CITY | {"additionalProperties": False}
    assert client.prompt.startswith("[weather ]")


def test_tools_and_a_response_format(client: Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY, "strict": True}}
    answer = client.ask('{"city": "Bern"}', tools=TOOLS, response_format=form)
    assert answer.message.content == '{"city": "Bern"}' and answer.finish_reason == "stop"
    call = client.ask('[{"name": "time", "parameters": {}}]', tools=TOOLS, response_format=form)
    assert call.message.tool_calls[0].function.name == "time"


def test_functions_the_older_name(client: Client) -> None:
    functions = [tool["function"] for tool in TOOLS]
    choice = client.ask(CALLS, functions=functions)
    assert choice.finish_reason == "function_call" and choice.message.function_call.name == "weather"
    choice = client.ask('{"city": "Bern"}', functions=functions, function_call={"name": "weather"})
    assert choice.message.function_call.arguments == '{"city": "Bern"}'


def test_calls_and_their_results_reach_the_template(client: Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "function_call": {"name": "time", "arguments": "{}"}},
        {"role": "function", "name": "time", "content": "noon"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "So?"},
    ]
    assert client.ask("Sunny.", messages=messages, tools=TOOLS).message.content == "Sunny."
    assert client.prompt == (
        "[weather time ]<|im_start|>system:Be brief<|im_end|><|im_start|>user=ann:Hi\nyou<|im_end|>"
        '<|im_start|>assistant:!weather{"city": "Bern"}<|im_end|><|im_start|>tool:sunny<|im_end|>'
        "<|im_start|>assistant:!time{}<|im_end|><|im_start|>tool=time:noon<|im_end|><|im_start|>assistant:No.<|im_end|>"
        "<|im_start|>user:So?<|im_end|><|im_start|>assistant\n"
    )


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_reasoning(client: Client) -> None:
    choice = client.ask("<think>\nLet me think.\n</think>\n\nYes.")
    assert choice.message.content == "Yes." and choice.message.reasoning_content == "Let me think."
    begun = client.ask("Hm.\n</think>\n\nYes.", extra_body={"chat_template_kwargs": {"think": True}})
    assert (begun.message.content, begun.message.reasoning_content) == ("Yes.", "Hm.")
    cut = client.ask("<think>\nLet me think.", max_tokens=12)
    assert (cut.message.content, cut.message.reasoning_content, cut.finish_reason) == (None, "Let", "length")
    hidden = client.ask("<think>x</think>Yes.", extra_body={"include_reasoning": False})
    assert hidden.message.content == "Yes." and getattr(hidden.message, "reasoning_content", None) is None


def test_reasoning_before_calls(client: Client) -> None:
    choice = client.ask(f"<think>Where?</think>\n{CALLS}", tools=TOOLS)
    assert choice.message.reasoning_content == "Where?" and len(choice.message.tool_calls) == 2


def test_reasoning_before_an_answer_that_has_a_schema(client: Client) -> None:
    think = {"chat_template_kwargs": {"think": True}}
    choice = client.ask('Hm.</think>\n{"a": 1}', response_format={"type": "json_object"}, extra_body=think)
    assert (choice.message.content, choice.message.reasoning_content) == ('{"a": 1}', "Hm.")
    assert client.params.structured_outputs is not None and client.params.structured_outputs.kind == "grammar"
    named = {"type": "function", "function": {"name": "weather"}}
    choice = client.ask('<think>Hm.</think>\n{"city": "Bern"}', tools=TOOLS, tool_choice=named)
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Bern"}' and choice.message.reasoning_content == "Hm."
    choice = client.ask("aaa", extra_body=think | {"structured_outputs": {"regex": "a+"}})
    assert choice.message.content == "aaa" and client.params.structured_outputs.kind == "regex"


def test_reasoning_effort_and_verbosity_reach_the_template(client: Client) -> None:
    client.ask("x", reasoning_effort="high", verbosity="low")
    assert "effort=highverbosity=low" in client.prompt
    client.ask("x", reasoning_effort="none")
    assert "effort=nonethinking=False" in client.prompt
    client.ask("x", reasoning_effort="none", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert "thinking=True" in client.prompt


def test_usage_counts_reasoning(client: Client) -> None:
    client.ask("<think>ab</think>Yes.")
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}
    whole = client.sdk.chat.completions.create(**asked).usage
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.sdk.chat.completions.create(stream=True, stream_options=options, **asked))
    assert whole is not None and whole.completion_tokens_details is not None and whole.prompt_tokens_details is not None
    assert whole.completion_tokens == len("<think>ab</think>Yes.") + 1
    assert whole.completion_tokens_details.reasoning_tokens == len("<think>ab</think>")
    assert whole.prompt_tokens_details.cached_tokens == 3
    assert chunks[-1].choices == [] and chunks[-1].usage == whole
    running = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(running) == len(chunks) and running == sorted(running) and running[0] < running[-1]


# -- other fields ------------------------------------------------------------------------------------------------------


def test_echo_repeats_the_message_that_is_continued(client: Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once"}]
    body = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    assert client.ask(" upon", messages=messages, extra_body=body).message.content == "Once upon"
    assert client.prompt.endswith("assistant:Once")


def test_padded_events(client: Client) -> None:
    client.ask("Hello")
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_obfuscation": True}}
    reply = httpx.post(f"{client.server.url}/v1/chat/completions", json=body)
    events = [line for line in reply.text.splitlines() if line and line != "data: [DONE]"]
    assert {len(line.removeprefix("data: ").encode()) % 64 for line in events} == {0}


def test_prompts_are_cut_where_asked(client: Client) -> None:
    for cut, tokens in ((5, 5), (-1, 512 - 10)):
        long = [{"role": "user", "content": "x" * 600}]
        client.ask("y", messages=long, max_tokens=10, extra_body={"truncate_prompt_tokens": cut})
        assert len(client.prompt.replace("<|im_start|>", "*").replace("<|im_end|>", "*")) == tokens


def test_the_deadline_for_the_first_token_in_the_body(client: Client) -> None:
    """Of the header's and the body's the shorter counts."""
    for header, field, seconds in (("", 1500, 1.5), ("900", 1500, 0.9), ("2000", 0.5, 0.0005), ("700", None, 0.7)):
        headers = {"x-ttft-deadline-ms": header} if header else {}
        client.sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=3,
            extra_headers=headers, extra_body={"ttft_deadline_ms": field},
        )
        assert client.server.llm.callers[-1].ttft_deadline == seconds
    for field in (0, -1, 3_600_001, "soon"):
        with pytest.raises(openai.BadRequestError, match="ttft_deadline_ms: expected"):
            client.sdk.completions.create(model="tiny", prompt="a", extra_body={"ttft_deadline_ms": field})


def test_structured_output_by_every_name(client: Client) -> None:
    def language(**body: Any) -> tuple[str, Any]:
        client.sdk.completions.create(model="tiny", prompt="a", extra_body=body)
        made = client.params.structured_outputs
        assert made is not None
        return made.kind, getattr(made, made.kind)

    assert language(response_format={"type": "json_object"}) == ("json_object", True)
    schema = json.dumps(CITY, separators=(",", ":"))
    closed = json.dumps(CITY | {"additionalProperties": False}, separators=(",", ":"))
    assert language(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}) == ("json", closed)
    for kind, value in (("json", CITY), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'start: "a"')):
        kept = schema if kind == "json" else value
        assert language(structured_outputs={kind: value}) == language(**{f"guided_{kind}": value}) == (kind, kept)


BAD: list[tuple[type[Any], dict[str, Any], str | None, str]] = [
    (ChatRequest, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "a schema"),
    (ChatRequest, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "give one"),
    (ChatRequest, {"structured_outputs": {}}, "structured_outputs", "exactly one"),
    (ChatRequest, {"structured_outputs": {"xml": "a"}}, "structured_outputs", "no field 'xml'"),
    (ChatRequest, {"guided_regex": " "}, "guided_regex", "guided_regex must"),
    (ChatRequest, {"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "tool_choice"),
    (ChatRequest, {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"json": {}}}, "structured_outputs",
     "tool_choice"),
    (ChatRequest, {"tools": TOOLS, "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "structured_outputs",
     "tool_choice"),
    (ChatRequest, {"tools": TOOLS, "tool_choice": NAMED, "guided_json": {}}, "guided_json", "tool_choice"),
    (ChatRequest, {"tools": TOOLS, "tool_choice": "required", "guided_choice": ["a"], "response_format": {"type": "text"}},
     "guided_choice", "tool_choice"),
    (ChatRequest, {"tools": TOOLS, "functions": [{"name": "f"}]}, "tools", "give one"),
    (ChatRequest, {"functions": [{"name": "f"}], "function_call": 1}, "function_call", "must be"),
    (ChatRequest, {"function_call": {"name": "f"}}, "function_call", "needs functions"),
    (ChatRequest, {"audio": {"voice": "x"}}, "audio", "not supported"),
    (ChatRequest, {"modalities": ["text", "audio"]}, "modalities", "not supported"),
    (ChatRequest, {"images": ["x"]}, "images", "unknown field"),
    (ChatRequest, {"truncation_side": "middle"}, "truncation_side", "invalid enum value"),
    (ChatRequest, {"thinking_token_budget": 5}, "thinking_token_budget", "not supported"),
    (ChatRequest, {"web_search_options": {}}, "web_search_options", "not supported"),
    (ChatRequest, {"lora_request": {"name": "x"}}, "lora_request", "not supported"),
    (ChatRequest, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    (ChatRequest, {"verbosity": "huge"}, "verbosity", "huge"),
    (ChatRequest, {"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "must be one of"),
    (CompletionRequest, {"best_of": 1, "n": 2}, "best_of", "at least n"),
    (CompletionRequest, {"best_of": 129}, "best_of", "best_of must be an integer between 1 and 128"),
    (CompletionRequest, {"best_of": 3, "n": 2, "stream": True}, "best_of", "cannot be streamed"),
    (CompletionRequest, {"suffix": 3}, "suffix", "expected str"),
    (CompletionRequest, {"echo": False, "max_tokens": 0}, "max_tokens", "at least 1"),
]


@pytest.mark.parametrize(("kind", "body", "param", "says"), BAD, ids=range(len(BAD)))
def test_what_is_refused(kind: type[Any], body: dict[str, Any], param: str, says: str) -> None:
    given = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "a"}
    with pytest.raises((BadRequest, Unsupported)) as caught:
        parse_body(kind, json.dumps(given | body).encode()).params({})
    assert says in str(caught.value) and param_of(caught.value) == param


@pytest.mark.parametrize(("message", "says"), [
    ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "role assistant"),
    ({"role": "user", "content": "x", "tool_call_id": "1"}, "role tool"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "a name and arguments"),
    ({"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f", "arguments": ""}}]}, "'function'"),
    ({"role": "assistant", "audio": {"id": "x"}}, "audio is not supported"),
])
def test_messages_that_are_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises((BadRequest, Unsupported), match=f"^messages\\[0\\].*{says}"):
        parse_body(ChatRequest, json.dumps({"messages": [message]}).encode()).conversation()


# -- a real engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    options = ("--load-format", "dummy", "--num-gpu-blocks-override", "600", "--max-num-seqs", "8")
    with ServerProcess(str(model), *options, "--max-model-len", "1024", "--reasoning-parser", "none") as server:
        yield server.url


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{url}/v1/{path}", json={"ignore_eos": True, "temperature": 0} | body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_token_ids_in_the_answer(url: str) -> None:
    whole = post(url, "completions", prompt=[64, 65], max_tokens=5, return_token_ids=True)["choices"][0]
    assert whole["prompt_token_ids"] == [64, 65] and len(whole["token_ids"]) == 5
    chunks = [event["choices"][0] for event in
              post(url, "completions", prompt=[64, 65], max_tokens=5, return_token_ids=True, stream=True)]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[64, 65]] + [None] * (len(chunks) - 1)
    assert post(url, "completions", prompt=[64, 65])["choices"][0]["token_ids"] is None

    chat = post(url, "chat/completions", messages=MESSAGES, max_tokens=5, return_token_ids=True)
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"] and len(chat["choices"][0]["token_ids"]) == 5
    events = post(url, "chat/completions", messages=MESSAGES, max_tokens=5, return_token_ids=True, stream=True)
    assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"] and "prompt_token_ids" not in events[1]
    got = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert got == chat["choices"][0]["token_ids"]


def test_prompt_logprobs_streamed(url: str) -> None:
    for path, given in (("completions", {"prompt": [64, 65, 66]}), ("chat/completions", {"messages": MESSAGES})):
        whole = post(url, path, max_tokens=2, prompt_logprobs=1, **given)["choices"][0]["prompt_logprobs"]
        events = post(url, path, max_tokens=2, prompt_logprobs=1, stream=True, **given)
        told = [event["choices"][0]["prompt_logprobs"] for event in events if "prompt_logprobs" in event["choices"][0]]
        assert told == [whole] and whole[0] is None and len(whole) > 2


def test_log_likelihoods_of_a_prompt_alone(url: str) -> None:
    asked: dict[str, Any] = {"prompt": "hello", "echo": True, "logprobs": 1}
    reply = post(url, "completions", max_tokens=0, **asked)
    choice = reply["choices"][0]
    assert choice["text"] == "hello" and choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0 and reply["usage"]["total_tokens"] == 5
    longer = post(url, "completions", max_tokens=1, **asked)["choices"][0]["logprobs"]
    assert choice["logprobs"]["token_logprobs"] == longer["token_logprobs"][:5] and len(longer["tokens"]) == 6
    (event,) = post(url, "completions", max_tokens=0, stream=True, **asked)
    assert event["choices"][0] == choice


def test_several_answers_with_parsers_of_their_own(url: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 12, "tools": TOOLS}
    whole = post(url, "chat/completions", **asked)
    texts = dict.fromkeys(range(3), "")
    for event in post(url, "chat/completions", stream=True, **asked):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert [choice["message"]["content"] for choice in whole["choices"]] == list(texts.values())
    assert post(url, "completions", prompt="ab", n=2, best_of=2)["choices"][1]["index"] == 1


def test_special_tokens_are_added_where_asked(url: str, model: Path) -> None:
    counts = [
        post(url, "completions", prompt="ab", add_special_tokens=each, max_tokens=1)["usage"]["prompt_tokens"]
        for each in (True, False, None)
    ]
    assert counts[1] == 2 and counts[0] == counts[2]
    chat = [post(url, "chat/completions", messages=MESSAGES, max_tokens=1, **more)["usage"]["prompt_tokens"]
            for more in ({}, {"add_special_tokens": False})]
    assert chat[0] == chat[1]


LIGHT = {"type": "object", "additionalProperties": False, "required": ["on", "colour"],
         "properties": {"on": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}}}


@pytest.mark.reliability("C-02")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "light"}}], ids=["required", "named"])
def test_demanded_calls_are_always_valid(url: str, choice: Any, seed: int) -> None:
    """The model is noise: whatever it says, the grammar makes it a call."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    tools: Any = [{"type": "function", "function": {"name": "light", "parameters": LIGHT}}]
    asked: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": seed, "max_tokens": 200,
        "parallel_tool_calls": False, "temperature": 0.2,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert added_up(list(client.chat.completions.create(stream=True, **asked))) == plain(whole)
    (call,) = whole.message.tool_calls or []
    arguments = json.loads(call.function.arguments)      # type: ignore[union-attr]
    assert arguments.keys() == {"on", "colour"} and arguments["colour"] in ("red", "green") and arguments["on"] in (True, False)


@pytest.mark.parametrize(("asked", "param"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}], "tool_choice": "required"},
     "tools"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
])
def test_a_grammar_that_does_not_compile_is_told_by_the_name_it_was_sent_with(url: str, asked: Any, param: str) -> None:
    error = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, **asked}, timeout=60).json()["error"]
    assert error["param"] == param and error["message"].startswith(param) and "cannot be used" in error["message"]


@pytest.mark.parametrize("value", [
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    {"type": "string", "format": "cuid", "pattern": "^c[0-9]{6}$"},
])
def test_schemas_as_zod_writes_them_are_enforced(url: str, value: dict[str, Any]) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {"value": value},
              "required": ["value"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "response", "strict": True, "schema": schema}}
    post(url, "chat/completions", messages=MESSAGES, max_tokens=8, response_format=response_format)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for choice in ("auto", "required"):
        post(url, "chat/completions", messages=MESSAGES, max_tokens=8, tools=[tool], tool_choice=choice)


@pytest.mark.parametrize(("path", "body", "param"), [
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages"),
    ("completions", {"max_tokens": 3}, "prompt"),
    ("responses", {"model": "tiny"}, "input"),
    ("embeddings", {"model": "tiny"}, "input"),
])
def test_a_field_that_is_missing_is_named(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError, match="missing required field") as caught:
        client.sdk.post(f"/{path}", body=body, cast_to=object)
    assert caught.value.param == param


def test_an_answer_that_cannot_fit_is_refused_with_both_numbers(client: Client) -> None:
    """As vLLM does; without a number of its own the answer may be as long as there is room for."""
    prompt = client.sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage.prompt_tokens
    for name, path, body in (
        ("max_tokens", "chat/completions", {"messages": MESSAGES}),
        ("max_completion_tokens", "chat/completions", {"messages": MESSAGES}),
        ("max_tokens", "completions", {"prompt": list(range(1, prompt + 1))}),
        ("max_output_tokens", "responses", {"input": MESSAGES}),
    ):
        room = 512 - prompt
        client.server.llm.script.text = "x" * 600        # type: ignore[attr-defined]
        client.sdk.post(f"/{path}", body={"model": "tiny", name: room} | body, cast_to=object)
        with pytest.raises(openai.BadRequestError) as caught:
            client.sdk.post(f"/{path}", body={"model": "tiny", name: room + 1} | body, cast_to=object)
        assert (caught.value.param, caught.value.code) == (name, "context_length_exceeded")
        assert caught.value.message.find(f"{name} is too large: {room + 1} tokens beside the {prompt} of the prompt") > 0
        assert "maximum context length is 512 tokens" in caught.value.message


def test_a_gap_is_filled_by_models_that_can(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    vocabulary = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    vocabulary.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    vocabulary.save(str(model / "tokenizer.json"))
    with ScriptedServer(model, lambda prompt: "x):") as server:
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        made = sdk.completions.create(model="tiny", prompt=["def f(", "g"], suffix=" return x", echo=True)
        assert [choice.text for choice in made.choices] == ["def f(x):", "gx):"]
        assert server.llm.prompts[-2] == "<fim_prefix>def f(<fim_suffix> return x<fim_middle>"
        with pytest.raises(openai.BadRequestError, match="suffix needs a prompt of text"):
            sdk.completions.create(model="tiny", prompt=[1, 2], suffix="x")


def test_too_many_prompts_are_refused_before_any_is_tokenised() -> None:
    def tokenised(*_: object) -> None:
        raise AssertionError

    slots = Slots()
    slots.limit = 8
    llm = SimpleNamespace(text_tokens=tokenised, get_tokenizer=tokenised, sampling_defaults={})
    service = SimpleNamespace(
        llm=llm, slots=slots, name="tiny", tokenizer=None, check=lambda request: None, options=ServerOptions(),
    )
    for more in ({"suffix": "b"}, {"add_special_tokens": False}):
        body = json.dumps({"prompt": ["a"] * 9, **more}).encode()
        with pytest.raises(BadRequest, match="9 answers at once"):
            asyncio.run(prepare_completion(service, LOCAL, body))    # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_hints_are_not_kept_while_the_answer_is_made(kind: Any) -> None:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if kind is ChatRequest else {"prompt": "a"}
    hints = dict.fromkeys(kind.HINTS, "x")
    request = parse_body(kind, json.dumps({**prompt, **hints}).encode())
    assert all(getattr(request, name) is None for name in kind.HINTS)


# -- names of llama.cpp and SGLang -------------------------------------------------------------------------------------


def chat_of(**more: Any) -> ChatRequest:
    return parse_body(ChatRequest, json.dumps({"messages": [{"role": "user", "content": "a"}], **more}).encode())


def test_names_of_llama_cpp_are_ours() -> None:
    params = chat_of(n_predict=5, repeat_penalty=1.5, repeat_last_n=64, grammar='root ::= "a"').params({})
    assert (params.max_tokens, params.repetition_penalty) == (5, 1.5)
    assert params.structured_outputs is not None and params.structured_outputs.grammar == 'root ::= "a"'
    schema = chat_of(json_schema={"const": 4}).params({}).structured_outputs
    assert schema is not None and json.loads(str(schema.json)) == {"const": 4}
    assert chat_of(n_predict=-1).params({}).max_tokens is None
    assert chat_of(repeat_penalty=1.5, repeat_last_n=0).params({}).repetition_penalty == 1.0
    assert chat_of(repeat_penalty=1.5, repetition_penalty=1.2).params({}).repetition_penalty == 1.2
    with pytest.raises(BadRequest, match="two names of the same field"):
        chat_of(n_predict=5, max_tokens=6)
    with pytest.raises(BadRequest, match="each say what the answer must look like"):
        chat_of(grammar="root ::= [a-z]", guided_regex="a").params({})


def test_names_of_mistral_are_ours() -> None:
    assert chat_of(random_seed=4, safe_prompt=False).params({}).seed == 4
    assert chat_of(random_seed=4, seed=5).params({}).seed == 5
    with pytest.raises(Unsupported, match="safe_prompt"):
        chat_of(safe_prompt=True)


def test_the_routers_of_sglang_and_vllm_may_stand_in_front() -> None:
    """Both write a request anew, with these fields."""
    chat_of(no_stop_trim=False, ignore_eos=False, continue_final_message=False, skip_special_tokens=True, separate_reasoning=True,
            stream_reasoning=True, return_hidden_states=False, include_reasoning=True, logprobs=False)
    for name in ("no_stop_trim", "return_hidden_states"):
        with pytest.raises(Unsupported, match=name):
            chat_of(**{name: True})


def test_samplers_of_llama_cpp_may_be_off() -> None:
    chat_of(mirostat=0, dry_multiplier=0.0, xtc_probability=0, dynatemp_range=0, top_n_sigma=-1, samplers=["top_k"])
    for name in ("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_n_sigma"):
        with pytest.raises(Unsupported, match=f"{name} is not supported"):
            chat_of(**{name: 2})


def test_an_error_names_the_field_that_set_the_grammar() -> None:
    request = chat_of(grammar="x")
    with pytest.raises(BadRequest) as error, request.naming_its_grammar():
        raise BadRequest("structured_outputs.grammar is wrong", field="structured_outputs.grammar")
    assert error.value.field == "grammar" and str(error.value) == "grammar is wrong"
    request.params({})
    request.forget_params()
    assert request.grammar == "" and request.guided_regex is None


def test_what_the_parameters_hold_is_not_kept_twice() -> None:
    request = chat_of(stop=["a"], bad_words=["b"], allowed_token_ids=[3, 3, 2, 3], logit_bias={"5": 1.0})
    params = request.params({})
    request.forget_params()
    assert (params.stop, params.bad_words, params.allowed_token_ids, params.logit_bias) == (["a"], ["b"], [3, 2], {5: 1.0})
    assert request.stop is request.bad_words is request.allowed_token_ids is request.logit_bias is None


@pytest.mark.parametrize("more", [
    {"separate_reasoning": False}, {"reasoning_format": "none"}, {}, {"reasoning_format": "auto"},
    {"reasoning_format": "raw"}, {"reasoning_format": "parsed"},                                         # Groq's
])
def test_reasoning_may_be_part_of_the_content(more: dict[str, Any]) -> None:
    request = chat_of(**more)
    writer = ChatWriter(request, request.params({}), "id", "tiny", None, Reading(reasoning=True))
    events: list[Any] = [Reasoning("so "), Content("yes")]
    joined = more.get("separate_reasoning") is False or more.get("reasoning_format") in ("none", "raw")
    message = writer._message(events)
    assert message.content == ("so yes" if joined else "yes")
    assert message.reasoning_content == (UNSET if joined else "so ")
    assert [delta.content for delta in writer._deltas(events)] == (["so ", "yes"] if joined else [None, "yes"])


@pytest.mark.parametrize("more", [{"include_reasoning": False}, {"reasoning_format": "hidden"}])
def test_reasoning_may_be_left_out(more: dict[str, Any]) -> None:
    request = chat_of(**more)
    message = ChatWriter(request, request.params({}), "id", "tiny", None, Reading(reasoning=True))._message(
        [Reasoning("so "), Content("yes")]
    )
    assert (message.content, message.reasoning_content) == ("yes", UNSET)


def test_thinking_is_switched_by_a_field_of_its_own() -> None:
    assert chat_of(enable_thinking=False).template()["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(("given", "on"), [
    ({"type": "enabled"}, True), ({"type": "disabled"}, False), ({"type": "enabled", "budget_tokens": 1024}, True),
    ({"type": "adaptive"}, True), ({"type": "enabled", "clear_thinking": False}, True),
])
def test_thinking_is_switched_as_clients_of_deepseek_do(given: dict[str, Any], on: bool) -> None:
    """Templates know it by one of two names."""
    both = {"enable_thinking": on, "thinking": on}
    assert chat_of(thinking=given).template()["chat_template_kwargs"] == both
    asked = chat_of(thinking=given, chat_template_kwargs={"enable_thinking": not on})
    assert asked.template()["chat_template_kwargs"] == both | {"enable_thinking": not on}
    with pytest.raises(BadRequest, match="unknown field 'effort' in thinking"):
        chat_of(thinking=given | {"effort": 1})

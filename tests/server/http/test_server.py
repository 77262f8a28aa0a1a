"""The HTTP server as its clients meet it: a real process on a tiny model, OpenAI's own client, and raw sockets."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
import warm_start
from served_model import CONTEXT, ServerProcess, one_thread, wait_until, write_model

from ridgeline.errors import ConfigError, EngineDead
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.http.body import parse_body
from ridgeline.server.http.failures import describe
from ridgeline.server.lifecycle import end_signals
from ridgeline.server.options import ServerOptions
from ridgeline.server.server_errors import Unavailable
from ridgeline.server.service import Service

QUEUE = 16
OPTIONS = ("--load-format", "dummy", "--num-gpu-blocks-override", "2600", "--max-num-seqs", "8",
           "--max-queued-requests", str(QUEUE), "--max-body-bytes", "200000", "--allowed-host", "box.example")
NAME = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(model), *OPTIONS) as made:
        yield made


def test_a_requests_fields_come_before_the_models_defaults() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 50}
    chat: dict[str, Any] = {"model": NAME, "messages": MESSAGES}
    own = parse_body(ChatRequest, json.dumps(chat | {"temperature": 0, "max_tokens": 9}).encode()).params(defaults)
    assert (own.temperature, own.top_k, own.max_tokens) == (0.0, 20, 9)
    silent = parse_body(ChatRequest, json.dumps(chat).encode())
    assert (silent.params(defaults).temperature, silent.params(defaults).max_tokens) == (0.6, 50)
    assert (silent.params({}).temperature, silent.params({}).max_tokens) == (1.0, None)
    completion = parse_body(CompletionRequest, json.dumps({"model": NAME, "prompt": "x"}).encode())
    assert (completion.params(defaults).max_tokens, completion.params({}).max_tokens) == (50, 16)


@pytest.fixture
def url(server: ServerProcess) -> Iterator[str]:
    """The address; afterwards no request and no block may be left in the engine."""
    yield server.url
    wait_until(lambda: is_idle(server.url))


def is_idle(url: str) -> bool:
    health = httpx.get(f"{url}/health").json()
    return bool(health["requests"] == health["running"] == 0 and health["free_blocks"] == health["num_blocks"])


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def post(url: str, path: str, body: Any, **settings: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=60, **settings)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.reliability("H-08", "P-05")
def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=40, **GREEDY)
    chunks: list[Any] = []
    while len(chunks) <= 5:                              # beside other work a late reader gets many tokens at once
        chunks = list(client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}, **GREEDY
        ))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1]) and chunks[-1].choices == []
    assert whole.usage is not None and chunks[-1].usage is not None
    # <|im_start|>user Hello<|im_end|><|im_start|>assistant, with a newline after each role: a token per byte and special
    assert whole.usage.prompt_tokens == 1 + 5 + 5 + 1 + 1 + 10
    assert whole.usage.completion_tokens == 40 and whole.usage.total_tokens == 63
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16        # the one full block, from the first time


def test_prompts_as_text_and_as_token_ids(client: openai.OpenAI) -> None:
    ids = [[64, 65], [66, 67, 68]]                       # the byte alphabet in its own order
    by_ids = client.completions.create(model=NAME, prompt=ids, max_tokens=12, **GREEDY)
    one_by_one = [client.completions.create(model=NAME, prompt=each, max_tokens=12, **GREEDY) for each in ids]
    assert [choice.text for choice in by_ids.choices] == [each.choices[0].text for each in one_by_one]
    assert [choice.index for choice in by_ids.choices] == [0, 1]
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == 5 and by_ids.usage.completion_tokens == 24

    echoed = client.completions.create(model=NAME, prompt=ids, max_tokens=12, echo=True, **GREEDY)
    texts = [choice.text[: -len(by_ids.choices[place].text)] for place, choice in enumerate(echoed.choices)]
    by_text = client.completions.create(model=NAME, prompt=texts, max_tokens=12, **GREEDY)
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]


def test_several_answers_streamed_and_whole(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": NAME, "prompt": ["ab", "cd"], "n": 2, "seed": 7, "max_tokens": 10, "logprobs": 0}
    whole = client.completions.create(**settings)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(stream=True, **settings):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == list(texts.values())
    assert texts[0] != texts[1]                          # the seed gives each answer noise of its own


def test_max_tokens_defaults_as_openai_has_them(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=NAME, prompt="ab", **GREEDY)
    assert completion.usage is not None and completion.usage.completion_tokens == 16
    long = [{"role": "user", "content": "x" * (CONTEXT - 60)}]               # a chat may fill the context
    chat = client.chat.completions.create(model=NAME, messages=long, **GREEDY)     # type: ignore[arg-type]
    assert chat.usage is not None and chat.usage.total_tokens == CONTEXT and chat.choices[0].finish_reason == "length"
    few = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=3, **GREEDY)
    assert few.usage is not None and few.usage.completion_tokens == 3


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=NAME, prompt="ab", max_tokens=40, **GREEDY).choices[0].text
    stop = whole[6:9]
    for stream in (False, True):
        body = {"ignore_eos": True, "include_stop_str_in_output": stream}
        answer = client.completions.create(
            model=NAME, prompt="ab", max_tokens=40, temperature=0, stop=[stop], stream=stream, extra_body=body
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        end = whole.index(stop) + (len(stop) if stream else 0)
        assert "".join(choice.text for choice in choices) == whole[:end]
        assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop


def test_chat_logprobs(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**settings, **GREEDY).choices[0]
    chunks = list(client.chat.completions.create(stream=True, **settings, **GREEDY))
    assert whole.logprobs is not None and whole.logprobs.content is not None
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []]
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in whole.logprobs.content]
    assert len(streamed) == 8
    for entry in streamed:
        assert entry.top_logprobs[0].token == entry.token                    # greedy takes the likeliest
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] == entry.logprob < 0
    joined = bytes(byte for entry in streamed for byte in entry.bytes or []).decode("utf-8", "replace")
    assert joined == whole.message.content


def test_completion_logprobs_with_the_prompts_own(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": NAME, "prompt": "héy", "max_tokens": 6, "logprobs": 2, "echo": True}
    whole = client.completions.create(**settings, **GREEDY).choices[0]
    assert whole.text.startswith("héy") and whole.logprobs is not None
    logprobs = whole.logprobs
    assert logprobs.tokens is not None and logprobs.token_logprobs is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4 + 6
    assert logprobs.token_logprobs[0] is None and all(value < 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[:5] == [0, 1, 1, 2, 3]                       # é is two tokens, one character
    chunks = list(client.completions.create(stream=True, **settings, **GREEDY))
    tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens or []]
    assert tokens == logprobs.tokens and "".join(chunk.choices[0].text for chunk in chunks) == whole.text


@pytest.mark.reliability("C-08")
@pytest.mark.parametrize("prompt", ["ab cd", [97, 98, 32, 99]], ids=["text", "ids"])
def test_an_echo_with_logprobs_is_the_same_streamed(client: openai.OpenAI, prompt: Any) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1, "echo": True}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        told = [entry for chunk in chunks if chunk.logprobs is not None for entry in getattr(chunk.logprobs, name)]
        assert told == getattr(whole.logprobs, name), name


def test_prompt_logprobs(url: str) -> None:
    reply = post(url, "completions", {"prompt": [64, 65, 66], "max_tokens": 1, "prompt_logprobs": 2}).json()
    first, *rest = reply["choices"][0]["prompt_logprobs"]
    assert first is None and [str(token) in at for token, at in zip((65, 66), rest, strict=True)] == [True, True]


def test_sampling_parameters_reach_the_sampler(url: str) -> None:
    body = {"prompt": "ab", "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def text(**more: Any) -> str:
        reply = post(url, "completions", body | more)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    plain = text()
    assert text(allowed_token_ids=[65]) == text(logit_bias={"65": 1000.0}) == "b" * 12
    assert "b" not in text(allowed_token_ids=[65, 66], bad_words=["b"])
    for neutral in ({"top_k": 1}, {"top_p": 1e-9}, {"seed": 3, "min_p": 1.0}, {"typical_p": 1.0}, {"priority": 0}):
        assert text(**neutral) == plain
    for harmless in ({"user": "me"}, {"metadata": {"a": 1}}, {"store": False}, {"response_format": {"type": "text"}}):
        assert text(**harmless) == plain
    assert text(temperature=1.0, top_k=1) == plain
    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)
    assert text(repetition_penalty=2.0) != plain and text(presence_penalty=2.0, frequency_penalty=2.0) != plain
    stopped = post(url, "completions", body | {"allowed_token_ids": [65, 66], "stop_token_ids": [65, 66]}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop" and stopped["choices"][0]["stop_reason"] in (65, 66)
    assert stopped["usage"]["completion_tokens"] == 1


@pytest.mark.reliability("S-06")
def test_cache_salt_keeps_prefixes_apart(url: str) -> None:
    def cached(salt: str) -> int:
        body = {"prompt": "the same forty characters, again and again", "max_tokens": 1, "cache_salt": salt}
        return int(post(url, "completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("one"), cached("two"), cached("two")] == [0, 32, 0, 32]


def test_a_continued_message(url: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once", "refusal": None, "tool_calls": None}]
    body = {"messages": messages, "max_tokens": 1, "add_generation_prompt": False, "continue_final_message": True}
    reply = post(url, "chat/completions", body).json()
    # ... <|im_start|>assistant\nOnce, and no end of turn
    assert reply["usage"]["prompt_tokens"] == 1 + 5 + 5 + 1 + 1 + 10 + 4


def test_text_parts_and_the_developer_role(url: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tokens = [
        post(url, "chat/completions", {"messages": [{"role": role, "content": content}], "max_tokens": 1}).json()["usage"]
        for role, content in (("developer", parts), ("system", "a\nb"))
    ]
    assert tokens[0]["prompt_tokens"] == tokens[1]["prompt_tokens"]


def test_models_version_and_health(client: openai.OpenAI, url: str) -> None:
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).max_model_len == CONTEXT                     # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{url}/version").json().keys() == {"version"}
    health = httpx.get(f"{url}/health")
    assert health.status_code == 200 and health.json()["status"] == "ok"


# -- errors ------------------------------------------------------------------------------------------------------------

CHAT = {"messages": MESSAGES}
BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("completions", {"prompt": ""}, "prompt", "empty"),
    ("completions", {"prompt": []}, "prompt", "prompt"),
    ("completions", {"prompt": [[]]}, "prompt", "empty"),
    ("completions", {"prompt": ["a", 1]}, "prompt", "list"),
    ("completions", {"prompt": [99999]}, "prompt", "prompt holds token id 99999"),
    ("completions", {"prompt": [-1]}, "prompt", "-1"),
    ("completions", {"prompt": [10**23]}, "prompt", "9223372036854775807"),
    ("completions", {"prompt": [[1], [10**23]]}, "prompt", "9223372036854775807"),
    ("completions", {"prompt": [2**63 - 1]}, "prompt", "token ids"),
    ("completions", {"prompt": "a", "stop_token_ids": [10**23]}, "stop_token_ids", "9223372036854775807"),
    ("completions", {"prompt": "a", "allowed_token_ids": [-(10**23)]}, "allowed_token_ids", "-9223372036854775808"),
    ("completions", {"prompt": "a", "logit_bias": {str(10**23): 1}}, "logit_bias", "9223372036854775807"),
    ("completions", {"prompt": "a", "priority": 10**23}, "priority", "9223372036854775807"),
    ("completions", {"prompt": "a", "priority": -(2**63)}, "priority", "--scheduling-policy"),
    ("completions", {"prompt": "a", "max_tokens": 10**23}, "max_tokens", "max_tokens"),
    ("completions", {"prompt": "a", "n": 10**23}, "n", "n must"),
    ("completions", {"prompt": "a", "stop": ["x" * 1025]}, "stop", "1024"),
    ("completions", {"prompt": "x" * CONTEXT}, "prompt", "max_model_len"),
    ("completions", {"prompt": "x" * (12 * CONTEXT + 1)}, "prompt", "bytes of text"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * (12 * CONTEXT + 1)}]}, "messages", "bytes of text"),
    ("responses", {"input": "x" * (12 * CONTEXT + 1)}, "input", "bytes of text"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens"),
    ("completions", {"prompt": "a", "temperature": -0.1}, "temperature", "temperature"),
    ("completions", {"prompt": "a", "temperature": "hot"}, "temperature", "float"),
    ("completions", {"prompt": "a", "top_p": -0.1}, "top_p", "top_p"),
    ("completions", {"prompt": "a", "top_p": 1.1}, "top_p", "top_p"),
    ("completions", {"prompt": "a", "n": 0}, "n", "n must"),
    ("completions", {"prompt": "a", "n": 129}, "n", "128"),
    ("completions", {"prompt": "a", "n": QUEUE + 1}, None, str(QUEUE)),
    ("completions", {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
    ("completions", {"prompt": "a", "stop": [""]}, "stop", "non-empty"),
    ("completions", {"prompt": "a", "stop": ["x"] * 33}, "stop", "32"),
    ("completions", {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
    ("completions", {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ("completions", {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens"),
    ("completions", {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "best_of"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
    ("completions", {"prompt": "a", "priority": 1}, "priority", "--scheduling-policy"),
    ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ("completions", {"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "usage", "stream_options"),
    ("completions", {"prompt": "a", "tempereture": 1}, "tempereture", "did you mean 'temperature'"),
    ("completions", {"prompt": "a", "messages": []}, "messages", "unknown field 'messages'; /v1/chat/completions takes it"),
    ("chat/completions", {"prompt": "a"}, "prompt", "unknown field 'prompt'; /v1/completions takes it"),
    ("chat/completions", {"input": "a"}, "input", "unknown field 'input'; /v1/responses and /v1/embeddings take it"),
    ("completions", {}, "prompt", "missing required field prompt"),
    ("completions", {"prompt": "ab", "max_tokens": CONTEXT - 1}, "max_tokens", f"{CONTEXT - 1} tokens beside the 2 of the"),
    ("completions", {"prompt": "a", "seed": 2**63}, "seed", "seed"),
    ("chat/completions", {"messages": []}, "messages", "at least one"),
    ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, "messages", "system, developer"),
    ("chat/completions", {"messages": [{"content": "a"}]}, "messages", "role"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "tool_calls"),
    ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools", "tools[0] must be an object"),
    ("chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice", "needs tools"),
    ("chat/completions", CHAT | {"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ("chat/completions", CHAT | {"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format",
     "response_format.json_schema belongs to the type json_schema; this one is text"),
    ("chat/completions", CHAT | {"response_format": {"type": "json_object", "bogus": 1}}, "response_format", "field 'bogus'"),
    ("chat/completions", CHAT | {"response_format": "json"}, "response_format", "must be text, json_object, json_schema or"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x", "image_url": {}}]}]},
     "messages", "'image_url'; only text"),
    ("chat/completions", CHAT | {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be an"),
    ("chat/completions", CHAT | {"max_completion_tokens": 10**30}, "max_completion_tokens", "between 1 and 2147483647"),
    ("completions", {"prompt": "a", "max_tokens": 10**30}, "max_tokens", "between 1 and 2147483647"),
    ("chat/completions", CHAT | {"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
     "guided_regex", "guided_regex leaves no room for tools"),
    ("chat/completions", CHAT | {"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
    ("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ("chat/completions", CHAT | {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "differ"),
    ("chat/completions", CHAT | {"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"tokenize": True}}, None, "'tokenize' is reserved"),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"messages": "x"}}, None, "'messages' is reserved"),
    ("chat/completions", CHAT | {"prompt": "a"}, "prompt", "unknown field"),
]


@pytest.mark.reliability("B-02", "B-03")
@pytest.mark.parametrize(("path", "body", "param", "says"), BAD, ids=range(len(BAD)))
def test_bad_requests(url: str, path: str, body: dict[str, Any], param: str | None, says: str) -> None:
    reply = post(url, path, body)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert says in error["message"] and "\n" not in error["message"]


@pytest.mark.reliability("B-25")
def test_what_is_refused_here_leaves_nothing_open(url: str) -> None:
    for body in ({"prompt": [10**23]}, {"prompt": "a", "priority": 10**23}, {"prompt": "a", "logit_bias": {str(10**23): 1}}):
        assert post(url, "completions", body).status_code == 400
    assert httpx.get(f"{url}/health").json()["requests"] == 0


@pytest.mark.reliability("S-04b")
@pytest.mark.parametrize(("host", "status"), [("evil.example", 421), ("evil.example:80", 421), ("x?", 400), (None, 400)])
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
def test_only_requests_for_this_server_are_answered(url: str, path: str, host: str | None, status: int) -> None:
    """A page whose name was pointed at this machine sends that name."""
    address, port = url.removeprefix("http://").split(":")
    head = f"GET {path} HTTP/1.1\r\nconnection: close\r\n" + (f"host: {host}\r\n" if host else "")
    with closing(socket.create_connection((address, int(port)), timeout=60)) as connection:
        connection.sendall(head.encode() + b"\r\n")
        reply = b""
        while data := connection.recv(65536):
            reply += data
    assert reply.startswith(b"HTTP/1.1 %d " % status) and b"tiny" not in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_other_names_of_this_server(url: str) -> None:
    port = url.rsplit(":", 1)[1]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:1", "box.example"):
        reply = httpx.get(f"{url}/v1/models", headers={"host": host})
        assert reply.status_code == 200, host


def test_a_wrong_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here; 'tiny' is") as caught:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


@pytest.mark.reliability("H-01")
@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": 1e999}', "application/json", 400),
        (b'{"prompt": "a", "x": ' + b"[" * 50_000, "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", 415),
    ],
    ids=["cut", "empty", "list", "not utf-8", "surrogate", "infinite", "deep", "text", "form"],
)
def test_bodies_that_are_no_request(url: str, body: bytes, kind: str, status: int) -> None:
    reply = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": kind})
    assert reply.status_code == status and reply.json()["error"]["message"], reply.text


@pytest.mark.reliability("S-11")
def test_why_an_engine_died_is_not_told_to_clients() -> None:
    for error in (EngineDead("RuntimeError: in /home/me/model, after 'my secret prompt'"), ConfigError("/home/me")):
        status, body, headers = describe(error)
        assert status == 503 and json.loads(body)["error"]["message"] == "the engine has stopped"
        assert [name for name, _ in headers] == [b"retry-after"]


def test_requests_wait_for_the_whole_start() -> None:
    """An engine that is up is not enough: the queue must be open too."""
    llm: Any = SimpleNamespace(state="ok", ready=SimpleNamespace(max_num_seqs=2), predicted_wait=None)
    service = Service(llm, ServerOptions(), "m")
    assert service.state == "loading"
    with pytest.raises(Unavailable, match="the engine is not ready"):
        service.require_ready()
    service.open()
    service.require_ready()
    assert service.state == "ok" and service.slots.limit == 8
    llm.state = "dead"
    assert service.state == "dead"
    service.stopping = True
    with pytest.raises(Unavailable, match="the server is stopping"):
        service.require_ready()


@pytest.mark.reliability("B-01")
def test_a_body_over_the_limit(url: str) -> None:
    reply = post(url, "completions", {"prompt": "a" * 200_000})
    assert reply.status_code == 413 and "200000 bytes" in reply.json()["error"]["message"]


def test_a_stream_for_http_1_0_ends_with_its_connection(url: str) -> None:
    """Its tokens are written to the connection directly, and there without chunks too."""
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = post(url, "chat/completions", body).json()["choices"][0]["message"]["content"]
    written = json.dumps(body | {"stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(written)}\r\n\r\n".encode() + written)
        got = b"".join(iter(lambda: connection.recv(65536), b""))
    answer, _, content = got.partition(b"\r\n\r\n")
    assert b"chunked" not in answer and content.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in content.decode().split("\n\n") if event.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405),
                                                        ("GET", "/health/", 404), ("POST", "/health", 405)])
def test_paths_that_are_not_there(url: str, method: str, path: str, status: int) -> None:
    reply = httpx.request(method, url + path)
    code = "not_found" if status == 404 else "method_not_allowed"
    assert reply.status_code == status and reply.json()["error"]["code"] == code


@pytest.mark.reliability("H-07", "B-05")
def test_a_full_queue_refuses_at_once(url: str) -> None:
    endless = {"prompt": "ab", "n": QUEUE, "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as stream:
        lines = stream.iter_lines()                      # held: without it the client would hang up
        assert next(lines).startswith("data: ")
        reply = post(url, "completions", {"prompt": "a"})
        assert reply.status_code == 429 and reply.json()["error"]["type"] == "overloaded_error"
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert httpx.get(f"{url}/health").json()["running"]              # nobody had to end before it was refused
    wait_until(lambda: is_idle(url))
    assert post(url, "completions", {"prompt": "a"}).status_code == 200


# -- clients that leave ------------------------------------------------------------------------------------------------


def computed(url: str) -> float:
    """Tokens of all steps that the engine has reported."""
    return float(re.findall(r"^vllm:iteration_tokens_total_sum\S* (\S+)$", httpx.get(f"{url}/metrics").text, re.M)[0])


@pytest.mark.reliability("B-09", "C-11", "R-01")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_has_its_request_aborted(url: str, stream: bool, n: int) -> None:
    body = {"prompt": "ab", "n": n, "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": stream}
    before = computed(url)
    with closing(send(url, "/v1/completions", json.dumps(body).encode())):
        wait_until(lambda: httpx.get(f"{url}/health").json()["running"] == n)
    wait_until(lambda: is_idle(url))
    assert computed(url) - before < n * (CONTEXT - 100)                 # it was not made to its end


def send(url: str, path: str, body: bytes) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_many_clients_at_once(url: str) -> None:
    def ask(number: int) -> str:
        body = {"prompt": f"client {number}", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        return str(post(url, "completions", body).json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == [ask(number) for number in range(8)]


# -- isolation ---------------------------------------------------------------------------------------------------------


@pytest.mark.reliability("B-10")
def test_an_unread_stream_does_not_hold_up_others(url: str) -> None:
    body = {"prompt": "ab", "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": True}
    with closing(send(url, "/v1/completions", json.dumps(body).encode())):
        wait_until(lambda: httpx.get(f"{url}/health").json()["running"] == 1)
        assert post(url, "completions", {"prompt": "a"}).status_code == 200


@pytest.mark.reliability("S-03", "B-22")
def test_the_server_listens_on_one_local_port_only(server: ServerProcess, url: str) -> None:
    main = psutil.Process(server.process.pid)
    family = [main, *main.children(recursive=True)]
    listening = [each for process in family for each in process.net_connections("inet") if each.status == "LISTEN"]
    assert [each.laddr.ip for each in listening] == ["127.0.0.1"]
    folders = {Path(each.laddr).parent for each in main.net_connections("unix") if "ridgeline" in str(each.laddr)}
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700]


# -- start and end -----------------------------------------------------------------------------------------------------


def run_server(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", "serve", *options]
    return warm_start.run(command, 200, env=one_thread())


@pytest.mark.reliability("R-09")
def test_a_port_in_use_is_told_before_anything_loads(server: ServerProcess, model: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    done = run_server(str(model), *OPTIONS, "--port", port)
    assert done.returncode == 2 and done.stdout == ""    # and nothing of loading in its log
    assert done.stderr == f"ridgeline: error: port {port} on 127.0.0.1 is in use; choose another with --port\n"


@pytest.mark.reliability("R-09")
def test_an_engine_that_cannot_start_is_one_line(model: Path) -> None:
    done = run_server(str(model), *OPTIONS, "--port", "0", "--max-model-len", str(CONTEXT + 1))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("ridgeline: error: max_model_len") and done.stderr.count("\n") == 1


def family_of(server: ServerProcess) -> list[psutil.Process]:
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


def socket_folders(family: list[psutil.Process]) -> set[Path]:
    unix = [each.laddr for each in family[0].net_connections("unix")]
    return {Path(place).parent for place in unix if "ridgeline-" in str(place)}


def assert_gone(family: list[psutil.Process], folders: set[Path]) -> None:
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family))
    assert folders and not any(folder.exists() for folder in folders)


def events_of(url: str, got: list[str], begun: threading.Event) -> None:
    body = {"prompt": "ab", "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            got.append(line)
            begun.set()


@pytest.mark.reliability("B-13")
def test_a_killed_engine_is_told_to_clients_and_to_health(model: Path) -> None:
    server = ServerProcess(str(model), *OPTIONS, "--max-engine-restarts", "0")
    url = server.wait_ready()
    family = family_of(server)
    folders = socket_folders(family)
    got: list[str] = []
    begun = threading.Event()
    reader = threading.Thread(target=events_of, args=(url, got, begun))
    reader.start()
    assert begun.wait(60)
    engine = next(each for each in family if "ridgeline.engine.core.engine_process" in each.cmdline())
    engine.kill()
    reader.join(60)
    last = [line for line in got if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == "the engine has stopped" and error["code"] == "engine_not_available"
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503 and health.json()["status"] == "dead"
    refused = post(url, "completions", {"prompt": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["message"] == "the engine has stopped"
    assert refused.headers["retry-after"]
    assert server.process.wait(60) == 1
    assert server.process.stderr is not None
    assert server.process.stderr.read().splitlines()[-1] == "ridgeline: error: the engine's process was killed by SIGKILL"
    assert_gone(family, folders)


@pytest.mark.reliability("B-12", "R-05")
@pytest.mark.parametrize(("first", "drain"), [(signal.SIGTERM, 0), (signal.SIGTERM, 200), (signal.SIGHUP, 0)],
                         ids=["at once", "drain", "its terminal has closed"])
def test_a_signal_under_load_ends_everything_in_order(model: Path, first: signal.Signals, drain: int) -> None:
    server = ServerProcess(str(model), *OPTIONS, "--drain-timeout", str(drain))
    url = server.wait_ready()
    family = family_of(server)
    folders = socket_folders(family)
    got: list[str] = []
    begun = threading.Event()
    reader = threading.Thread(target=events_of, args=(url, got, begun))
    reader.start()
    assert begun.wait(60)
    server.process.send_signal(first)
    if drain:
        wait_until(lambda: not accepts(url))
        assert server.process.poll() is None             # the stream goes on ...
        server.process.send_signal(signal.SIGINT)        # ... until a second signal
    assert server.process.wait(60) == 0
    reader.join(60)
    last = [line for line in got if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the engine has stopped"
    assert_gone(family, folders)


def test_a_closed_terminal_ends_no_server_that_was_started_with_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    for handler, count in ((signal.SIG_DFL, 3), (signal.SIG_IGN, 2)):
        monkeypatch.setattr(signal, "getsignal", lambda number, handler=handler: handler)
        assert len(end_signals()) == count


def accepts(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.reliability("B-12", "R-05")
def test_a_signal_while_loading_ends_everything_in_order(model: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    server = ServerProcess(str(model), *OPTIONS, "--port", str(port), cold=True)      # forked, it would not load for long
    url = f"http://127.0.0.1:{port}"

    def status() -> int:
        try:
            return httpx.get(f"{url}/health").status_code
        except httpx.HTTPError:
            return 0

    wait_until(lambda: status() == 503)                  # it answers before the engine is ready
    family = family_of(server)
    refused = post(url, "completions", {"prompt": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["message"] == "the engine is not ready"
    assert server.stop(signal.SIGINT) == 0
    assert server.process.stderr is not None
    said = [line for line in server.process.stderr.read().splitlines() if not line.startswith("loading ")]
    assert said == ["stopped"]
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family))


@pytest.mark.real_model
def test_the_embedded_model_answers(embedded_model: Path) -> None:
    with ServerProcess() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
        name = "SmolLM2-135M-Instruct"
        messages: list[Any] = [{"role": "user", "content": "What is the capital of Germany?"}]
        whole = client.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0)
        chunks = client.chat.completions.create(
            model=name, messages=messages, max_tokens=12, temperature=0, stream=True
        )
        assert whole.choices[0].message.content == "The capital of Germany is Berlin."
        assert whole.choices[0].finish_reason == "stop"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content

"""Bodies read in a process of their own: the same answers, errors and stored conversations as in the server's process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer, connect, post
from served_model import wait_until, write_model

from ridgeline.engine.client import long_work
from ridgeline.engine.client.long_work import LongWork
from ridgeline.errors import BadRequest
from ridgeline.process import framed_child
from ridgeline.process.framed_child import FramedChild
from ridgeline.server import long_bodies
from ridgeline.server.api import prepare
from ridgeline.server.body_process import settings_of
from ridgeline.server.body_work import RESULTS
from ridgeline.server.http import admission
from ridgeline.server.http.admission import Body
from ridgeline.server.long_bodies import (
    MANY_BYTES,
    LongBodies,
    Made,
    ReadingProcess,
    Wanted,
    failure_of,
)
from ridgeline.server.options import ServerOptions
from ridgeline.text.tokenizer import Tokenizer

TURN = [{"role": "user", "content": "a"}]
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TOOL = {"type": "function", "function": LOOK}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

# Of every endpoint that reads a body: answered and refused.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TURN}),
    ("/v1/chat/completions", {"messages": TURN, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": TURN, "tools": [TOOL], "logit_bias": {"5": 1.5}, "seed": 7, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": TURN, "functions": [LOOK], "function_call": {"name": "look"}}),
    ("/v1/chat/completions", {"messages": TURN, "response_format": FORM}),
    ("/v1/chat/completions", {"messages": [*TURN, {"role": "assistant", "content": "so"}], "echo": True,
                              "add_generation_prompt": False, "continue_final_message": True}),
    ("/v1/chat/completions", {"messages": TURN, "temprature": 1}),
    ("/v1/chat/completions", {"messages": TURN, "model": "other"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 5000}]}),
    ("/v1/chat/completions", {"messages": TURN, "chat_template_kwargs": {"x": 2**70}}),
    ("/v1/chat/completions", {"messages": TURN, "guided_regex": "("}),
    ("/v1/chat/completions/batch", {"messages": [TURN, TURN]}),
    ("/v1/completions", {"prompt": "some text", "echo": True, "max_tokens": 4, "logprobs": 1}),
    ("/v1/completions", {"prompt": ["one", "two"], "n": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "stream": True}),
    ("/v1/completions", {"prompt": "many words of text", "truncate_prompt_tokens": 3, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": ["a"] * 40}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": TURN, "system": "short"}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": TURN, "thread": "x"}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": TURN}),
    ("/v1/responses", {"input": "a", "instructions": "short", "metadata": {"a": "b"}, "store": False}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "stream": True}),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_none"}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_none"}]}),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b"] * 40}),
    ("/v1/embeddings", {"input": "a", "pooling": "first"}),
    ("/invocations", {"messages": TURN}),
    ("/invocations", {"nothing": 1}),
    ("/tokenize", {"prompt": "some text", "return_token_strs": True}),
    ("/tokenize", {"messages": TURN}),
    ("/detokenize", {"tokens": [70, 71]}),
    ("/detokenize", {"tokens": [10**6]}),
    ("/api/chat", {"model": "tiny", "messages": TURN, "stream": False}),
    ("/api/chat", {"model": "tiny", "messages": []}),
    ("/api/generate", {"model": "tiny", "prompt": "a", "stream": False, "raw": True}),
    ("/api/generate", {"model": "tiny", "prompt": "a", "stream": False}),
    ("/api/embed", {"model": "tiny", "input": []}),
    ("/completion", {"prompt": ["a", [5, 6]], "n_predict": 3, "logit_bias": [["b", 1.0]]}),
    ("/completion", {"prompt": "a", "mirostat": 2}),
    ("/completions", {"prompt": "a", "model": "tiny"}),
    ("/apply-template", {"messages": TURN}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with ScriptedServer(model, lambda prompt: '{"x": "yes"}') as made:
        made.service.reader = LongBodies(RESULTS, lambda: settings_of(made.service), made.service.stored)
        yield made
        made.service.reader.close()


def child_of(server: ScriptedServer) -> Any:
    reader = server.service.reader
    assert isinstance(reader, LongBodies)
    return reader.other._child


_VARYING = re.compile(
    r'(_|-|"id": ?")[0-9a-f]{24}|"(created|created_at|completed_at|[a-z_]*duration|[a-z_]*_ms)": ?[^,}]*|"timings":\{[^}]*\}'
)


def said(server: ScriptedServer, path: str, body: dict[str, Any]) -> tuple[int, str, list[Any]]:
    """(status, text without what differs from call to call, what the engine got)."""
    before = len(server.llm.prompts)
    answer = httpx.post(server.url + path, json=body, timeout=120)
    text = _VARYING.sub("", answer.text)
    return answer.status_code, text, [*zip(server.llm.prompts[before:], map(str, server.llm.params[before:]), strict=True)]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda each: each if isinstance(each, str) else json.dumps(each)[:40])
def test_a_body_is_read_alike_in_both_processes(
    server: ScriptedServer, path: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    here = said(server, path, body)
    request.getfixturevalue("all_long")
    assert said(server, path, body) == here


def test_the_server_does_not_decode_a_long_body(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it join its parts: both would hold Python's lock for longer than a stream may wait."""
    def never(*_: object) -> None:
        raise AssertionError("a long body was read in the server's process")

    monkeypatch.setattr(prepare, "parse_body", never)
    monkeypatch.setattr(Body, "data", property(never))
    body = {"messages": TURN, "metadata": {"a": "x" * (MANY_BYTES + 1)}}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).status_code == 200


def test_a_conversation_goes_on_in_the_process(server: ScriptedServer, all_long: None) -> None:
    def ask(**body: Any) -> Any:
        return httpx.post(f"{server.url}/v1/responses", json=body, timeout=120).json()

    first = ask(input="one")
    second = ask(input="two", previous_response_id=first["id"])
    ask(input=[{"type": "item_reference", "id": second["output"][0]["id"]}, {"role": "user", "content": "three"}])
    assert all(word in server.llm.prompts[-2] for word in ("one", "yes", "two"))
    assert all(word in server.llm.prompts[-1] for word in ("yes", "three")) and "two" not in server.llm.prompts[-1]


def test_a_short_body_that_recalls_a_long_conversation_is_read_in_the_process(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = httpx.post(f"{server.url}/v1/responses", json={"input": "long before"}, timeout=120).json()
    monkeypatch.setattr(server.service.stored, "most_recalled", 100)
    monkeypatch.setattr(prepare, "as_chat", None)        # in this process; the other one has its own
    body = {"input": "next", "previous_response_id": first["id"]}
    assert httpx.post(f"{server.url}/v1/responses", json=body, timeout=120).status_code == 200
    assert "long before" in server.llm.prompts[-1]


@pytest.mark.reliability("R-13")
def test_another_process_reads_the_body_of_one_that_was_stopped(
    server: ScriptedServer, all_long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.01)
    ask = {"messages": TURN}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120).status_code == 200
    old = child_of(server)
    os.kill(old.process.pid, signal.SIGSTOP)
    assert httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120).status_code == 200
    assert child_of(server) is not old and old.process.poll() == -signal.SIGKILL


@pytest.mark.reliability("R-13")
def test_processes_that_are_all_stopped_are_the_servers_failure(
    server: ScriptedServer, all_long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.01)
    start, ask = ReadingProcess._started, {"messages": TURN}

    def stopped(self: ReadingProcess) -> FramedChild:
        child = start(self)
        child.process.send_signal(signal.SIGSTOP)
        return child

    assert httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120).status_code == 200
    child_of(server).process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(ReadingProcess, "_started", stopped)
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert "was stopped by a signal; try again later" in answer.json()["error"]["message"]
    assert httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120).status_code == 200


def test_a_killed_process_is_the_servers_failure_and_is_replaced(
    server: ScriptedServer, all_long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 1e6)       # it is stopped only to be killed with a question under way
    ask = {"messages": TURN}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120).status_code == 200
    old = child_of(server)
    os.kill(old.process.pid, signal.SIGSTOP)
    with httpx.Client(timeout=120) as client:
        request = client.build_request("POST", f"{server.url}/v1/chat/completions", json=ask)
        task = asyncio.new_event_loop()
        answered = task.run_in_executor(None, client.send, request)
        wait_until(lambda: old._owed == 1)               # the question is under way
        os.kill(old.process.pid, signal.SIGKILL)
        answer = task.run_until_complete(answered)
        task.close()
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120).status_code == 200
    assert child_of(server) is not old


def test_the_process_knows_no_keys(server: ScriptedServer) -> None:
    service = server.service
    options, service.options = service.options, ServerOptions(api_key="secret", ssl_keyfile="/private", api_key_file="/keys")
    try:
        told = settings_of(service)
    finally:
        service.options = options
    assert b"secret" not in told and b"/private" not in told and b"/keys" not in told


def test_replies_travel(server: ScriptedServer) -> None:
    for reply in (Wanted("a", ["b"]), Made(b"x", False, 1.0), failure_of(BadRequest("no"))):
        assert long_bodies.TO_REPLY.decode(long_bodies.msgspec.msgpack.encode(reply)) == reply


def test_texts_for_a_slow_tokenizer_are_never_read_on_the_event_loop(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, *given: Any, **more: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, *given, **more)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    monkeypatch.setattr(server.llm.get_tokenizer()._cost, "is_slow", True)
    for body in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        assert httpx.post(f"{server.url}/tokenize", json=body, timeout=60).status_code == 200
    assert threads and server._thread.name not in threads


@pytest.mark.parametrize("place", ["for memory", "for a thread"])
def test_a_request_timeout_ends_the_wait_of_a_long_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(admission, "SILENT_LOOKS", 10**9)
    monkeypatch.setattr(admission, "WAIT_LOOKS", 10**9)
    busy = LongWork(threads=0)                           # it takes work, and begins none
    monkeypatch.setattr(long_work, "LONG_WORK", busy)
    request = post("/tokenize", {"prompt": "x" * 100_000})
    options = ServerOptions(port=0, request_timeout=1)
    with ScriptedServer(write_model(tmp_path / "tiny"), lambda prompt: "", server=options) as server:
        held = server.service.bodies
        if place == "for memory":
            held.most = held.num_bytes = 150_000         # of others
        with connect(server) as waits:
            waits.sendall(request)
            reply = b""
            while b"}}" not in reply and (part := waits.recv(65536)):        # its head may come before its body
                reply += part
            assert reply.startswith(b"HTTP/1.1 504") and b'"request_timeout"' in reply
        wait_until(lambda: held.num_bytes == (150_000 if place == "for memory" else 0))
        assert not held.num_waiting and not busy.waiting

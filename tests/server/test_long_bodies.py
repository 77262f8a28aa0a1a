"""Bodies read in a process of their own: the same answers, errors and stored conversations as in the server's process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer, connect, post
from served_model import wait_until, write_model

from ridgeline.engine.client import long_work
from ridgeline.engine.client.long_work import LONG_BYTES, LongWork
from ridgeline.engine.client.request_context import LOCAL
from ridgeline.errors import BadRequest, Overloaded, PromptTooLong, TryAgain
from ridgeline.process import framed_child
from ridgeline.process.framed_child import FramedChild
from ridgeline.server import long_bodies
from ridgeline.server.api import prepare
from ridgeline.server.api.openai.responses_store import NeedsStored, ResponseStore
from ridgeline.server.body_process import LentResponses, settings_of
from ridgeline.server.body_work import RESULTS
from ridgeline.server.http import admission
from ridgeline.server.http.admission import Body, HeldBodies
from ridgeline.server.long_bodies import (
    MANY_BYTES,
    MANY_PARTS,
    BodyReader,
    LongBodies,
    Made,
    Recalled,
    Wanted,
    error_of,
    failure_of,
    is_long,
)
from ridgeline.server.options import ServerOptions
from ridgeline.server.server_errors import ModelNotFound
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


@pytest.fixture
def all_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_bodies, "is_long", lambda *_: True)


def child_of(server: ScriptedServer) -> Any:
    reader = server.service.reader
    assert isinstance(reader, LongBodies)
    return reader._child


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
    server: ScriptedServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = said(server, path, body)
    monkeypatch.setattr(long_bodies, "is_long", lambda *_: True)
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
    start, ask = LongBodies._started, {"messages": TURN}

    def stopped(self: LongBodies) -> FramedChild:
        child = start(self)
        child.process.send_signal(signal.SIGSTOP)
        return child

    assert httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=120).status_code == 200
    child_of(server).process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(LongBodies, "_started", stopped)
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


# -- without a process -------------------------------------------------------------------------------------------------


def test_what_counts_as_long() -> None:
    def judged(body: bytes) -> bool:
        return is_long([body[:1000], body[1000:]], len(body))

    assert judged(b"x" * (MANY_BYTES + 1))
    assert not judged(b"x" * MANY_BYTES)
    assert not judged(b"[" * LONG_BYTES)                 # few enough to be decoded at once
    assert judged(b"[],".ljust(4) * (MANY_PARTS + 1))
    assert not judged(b"[],".ljust(4) * (MANY_PARTS - 1))
    assert is_long([b"x" * (LONG_BYTES + 1)], LONG_BYTES + 1, answers=True)
    assert not is_long([b"x" * LONG_BYTES], LONG_BYTES, answers=True)


@pytest.mark.parametrize("error", [
    BadRequest("bad", field="messages[0].content"), PromptTooLong("long", field="prompt"), ModelNotFound("other", field="model"),
    Overloaded("full", 3.5), TryAgain("broken", 1.0),
])
def test_errors_arrive_as_they_were_raised(error: Any) -> None:
    again = error_of(failure_of(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert vars(again) == vars(error)


def test_an_error_that_one_endpoint_knows_arrives_as_what_it_extends() -> None:
    class Special(BadRequest):
        pass

    assert type(error_of(failure_of(Special("no", field="x")))) is BadRequest


def test_stored_responses_are_asked_for_once() -> None:
    store = LentResponses(ServerOptions(), None)
    with pytest.raises(NeedsStored) as needs:
        store.size_of("resp_1", ["msg_1"], 3)
    assert (needs.value.name, needs.value.items) == ("resp_1", ["msg_1"])
    lent = LentResponses(ServerOptions(), [Recalled("resp_1", 3, b"{}", b"[]", b"[]", ("msg_1",))])
    assert lent.size_of("resp_1", ["msg_1"], 3) > 0
    assert lent.size_of("resp_2", [], 3) == 0            # it is stored nowhere
    assert LentResponses(ServerOptions(max_stored_responses=0), None).size_of("resp_1", [], 3) == 0


class FakeChild:
    """Answers in place of the process."""

    alive = True
    ended = 0

    def __init__(self, replies: list[Any]) -> None:
        self.replies = replies
        self.asked: list[Any] = []

    def ask(self, parts: Any, seconds: float) -> bytes:
        self.asked.append(b"".join(parts))
        return self.replies.pop(0)  # type: ignore[no-any-return]

    def end(self) -> None:
        self.ended += 1


def test_the_process_ends_when_no_long_body_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.25))
    child = FakeChild([b"", made, made])
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: child)
    monkeypatch.setattr(long_bodies, "is_long", lambda *_: True)
    monkeypatch.setattr(long_bodies, "IDLE_SECONDS", 0.01)
    reader = LongBodies(RESULTS, lambda: b"settings", ResponseStore(1, 1))
    body = Body(HeldBodies())
    body.parts, body.size = [b"ab", b"cd"], 4

    async def twice() -> None:
        assert await reader.read(prepare.tokenize, None, LOCAL, body) == b"{}"
        assert await reader.read(prepare.tokenize, None, LOCAL, body) == b"{}"
        while not child.ended:
            await asyncio.sleep(0.01)

    asyncio.run(twice())
    assert child.asked[0] == b"settings" and child.asked[1] == child.asked[2] and child.asked[1].endswith(b"abcd")
    assert child.ended == 1 and reader._child is None


def long_body() -> Body:
    body = Body(HeldBodies())
    body.parts, body.size = [b'{"prompt": ', b'"a"}'], 15
    return body


async def reads_here(service: object, caller: object, data: bytes) -> bytes:
    return data


def test_without_a_process_bodies_are_read_here_and_starts_are_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it cannot be started, ends at once or never answers; the first that starts has the next body."""
    now, starts = 1000.0, []
    made = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))
    failures: list[BaseException] = [OSError(12, "no memory"), EOFError(), TimeoutError(), OSError(24, "no files")]

    def start(*_: object, **__: object) -> FakeChild:
        starts.append(now)
        child = FakeChild([b"", made])
        if failures:
            error = failures.pop(0)
            if isinstance(error, OSError) and error.errno:
                raise error
            monkeypatch.setattr(child, "ask", lambda *_: (_ for _ in ()).throw(error))
        return child

    monkeypatch.setattr(long_bodies, "FramedChild", start)
    monkeypatch.setattr(long_bodies, "is_long", lambda *_: True)
    monkeypatch.setattr(long_bodies, "time", SimpleNamespace(monotonic=lambda: now))
    store = ResponseStore(1, 1)
    reader = LongBodies({long_bodies.name_of(reads_here): bytes}, lambda: b"settings", store)

    async def read() -> object:
        return await reader.read(reads_here, None, LOCAL, long_body())

    async def run() -> None:
        nonlocal now
        for _ in range(160):
            answer = await read()
            assert answer == (b"{}" if reader._child else b'{"prompt": "a"}')
            assert store.most_recalled == (MANY_BYTES if reader._child else float("inf"))
            if reader._child:
                break
            now += 0.1

    asyncio.run(run())
    assert [round(after - before, 1) for before, after in itertools.pairwise(starts)] == [1.0, 2.0, 4.0, 8.0]


def test_a_child_that_a_thread_still_asks_keeps_its_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of a hung body has left: neither the idle timer nor the server's end may close what the thread reads from."""
    asked, go_on = threading.Event(), threading.Event()
    killed: list[bool] = []
    made = long_bodies.msgspec.msgpack.encode(Made(b"{}", True, 0.0))

    class Hung(FakeChild):
        process = SimpleNamespace(kill=lambda: killed.append(True))

        def ask(self, parts: Any, seconds: float) -> bytes:
            if len(self.replies) == 1:
                asked.set()
                assert go_on.wait(120)
                assert not self.ended
            return super().ask(parts, seconds)

    child = Hung([b"", made])
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: child)
    monkeypatch.setattr(long_bodies, "is_long", lambda *_: True)
    monkeypatch.setattr(long_bodies, "IDLE_SECONDS", 0.001)
    reader = LongBodies({long_bodies.name_of(reads_here): bytes}, lambda: b"settings", ResponseStore(1, 1))

    async def run() -> None:
        reading = asyncio.ensure_future(reader.read(reads_here, None, LOCAL, long_body()))
        assert await asyncio.to_thread(asked.wait, 120)
        reading.cancel()
        await asyncio.wait([reading])
        await asyncio.sleep(0.05)                        # the timer looks several times
        assert not child.ended
        reader.close()
        assert killed and not child.ended
        go_on.set()
        while not child.ended:                           # the timer ends it once the thread has left
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 200))
    assert child.ended == 1 and reader._child is None


def test_a_body_that_takes_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    child = FakeChild([b""])
    monkeypatch.setattr(long_bodies, "FramedChild", lambda *_, **__: child)
    monkeypatch.setattr(long_bodies, "is_long", lambda *_: True)
    reader = LongBodies({long_bodies.name_of(reads_here): bytes}, lambda: b"settings", ResponseStore(1, 1))

    def never(parts: Any, seconds: float) -> bytes:
        if parts == [b"settings"]:
            return b""
        raise TimeoutError

    monkeypatch.setattr(child, "ask", never)
    with pytest.raises(TryAgain, match="was not read within 60 s"):
        asyncio.run(reader.read(reads_here, None, LOCAL, long_body()))


def test_a_function_that_is_not_listed_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_bodies, "is_long", lambda *_: True)
    reader = LongBodies(RESULTS, lambda: b"", ResponseStore(1, 1))
    body = Body(HeldBodies())
    body.parts = [b"a", b"b"]

    async def own(service: object, caller: object, data: bytes) -> bytes:
        return data

    assert asyncio.run(reader.read(own, None, LOCAL, body)) == b"ab"
    assert asyncio.run(BodyReader().read(own, None, LOCAL, body)) == b"ab"


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

"""Responses in the background: stored before they begin, fetched while they run, cancelled, and stored again at their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted_server import ScriptedServer
from served_model import wait_until, write_model

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.errors import RequestError
from ridgeline.server import background_responses
from ridgeline.server.api.openai.responses_answer import ResponsesWriter
from ridgeline.server.api.openai.responses_continued import Keeper, Kept
from ridgeline.server.api.openai.responses_store import ResponseStore
from ridgeline.server.http.stream import JsonText
from ridgeline.server.options import ServerOptions


class Script:
    """Answers when `go` is set; the event loop goes on meanwhile."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.fails = False

    def __call__(self, prompt: str) -> Any:
        return ("", RequestError("it broke")) if self.fails else "done"


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Iterator[ScriptedServer]:
    with ScriptedServer(write_model(tmp_path_factory.mktemp("background") / "tiny"), script) as made:
        hold(made, script)
        yield made


def hold(server: ScriptedServer, script: Script) -> None:
    """Streams of this server begin when the script may go."""
    begin: Callable[..., Any] = server.llm.stream

    async def stream(*args: Any, **settings: Any) -> Any:
        while not script.go.is_set():
            await asyncio.sleep(0.005)
        return await begin(*args, **settings)

    server.llm.stream = stream  # type: ignore[method-assign]


@pytest.fixture
def client(server: ScriptedServer, script: Script) -> Iterator[openai.OpenAI]:
    script.go.clear()
    script.fails = False
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    script.go.set()
    wait_until(lambda: server.service.slots.taken == 0)


def test_it_is_queued_then_completed(client: openai.OpenAI, server: ScriptedServer, script: Script) -> None:
    response = client.responses.create(model="tiny", input="Hello", background=True)
    assert response.status == "queued" and response.background and response.output == [] and server.service.slots.taken == 1
    assert client.responses.retrieve(response.id).status == "queued"
    with pytest.raises(openai.BadRequestError, match="still queued"):
        client.responses.create(model="tiny", input="and?", previous_response_id=response.id)
    script.go.set()
    wait_until(lambda: client.responses.retrieve(response.id).status == "completed")
    assert client.responses.retrieve(response.id).output_text == "done" and server.service.slots.taken == 0
    client.responses.create(model="tiny", input="and?", previous_response_id=response.id)
    assert "Hello" in server.llm.prompts[-1] and "done" in server.llm.prompts[-1]
    assert client.responses.cancel(response.id).status == "completed"        # too late, and no error


def test_it_can_be_cancelled(client: openai.OpenAI, server: ScriptedServer, script: Script) -> None:
    response = client.responses.create(model="tiny", input="Hello", background=True)
    assert client.responses.cancel(response.id).status == "cancelled" and server.service.slots.taken == 0
    script.go.set()
    assert client.responses.retrieve(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"


def test_one_that_is_deleted_does_not_come_back(client: openai.OpenAI, server: ScriptedServer, script: Script) -> None:
    response = client.responses.create(model="tiny", input="Hello", background=True)
    client.responses.delete(response.id)
    script.go.set()
    wait_until(lambda: server.service.slots.taken == 0)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found\."):
        client.responses.retrieve(response.id)


def test_one_that_is_deleted_ends_at_once(client: openai.OpenAI, server: ScriptedServer) -> None:
    """No client could fetch it any more, or cancel it: it would hold its place until its last token."""
    response = client.responses.create(model="tiny", input="Hello", background=True)
    client.responses.delete(response.id)
    assert server.service.slots.taken == 0               # the script has not gone on: it was not finished
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_thread_that_writes_the_end_does_not_undo_what_its_client_was_told(
    how: str, client: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread went on after `cancelled` or `deleted` was answered, and stored the response as completed."""
    begun, may_go_on, written = threading.Event(), threading.Event(), threading.Event()
    whole = ResponsesWriter.body

    def body(writer: ResponsesWriter, outputs: list[Any]) -> bytes:
        begun.set()
        may_go_on.wait(60)
        made = whole(writer, outputs)
        written.set()
        return made

    monkeypatch.setattr(ResponsesWriter, "body", body)
    monkeypatch.setattr(background_responses, "size_of", lambda writer, outputs: LONG_BYTES + 1)
    script.go.set()
    response = client.responses.create(model="tiny", input="Hello", background=True)
    assert begun.wait(60)
    if how == "cancel":
        assert client.responses.cancel(response.id).status == "cancelled"
    else:
        client.responses.delete(response.id)
    may_go_on.set()
    assert written.wait(60)
    if how == "cancel":
        assert client.responses.retrieve(response.id).status == "cancelled"
    else:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)


def test_only_what_is_stored_is_replaced() -> None:
    store = ResponseStore(10, 100_000)
    keep = Keeper(store, Kept(1, b"[]", b"[]", [], again=True))
    assert keep("a", b"queued", [], True) and keep("a", b"in progress", [{"id": "x"}], True)
    assert store.get("a", 1).response == b"in progress" and len(store) == 1 and store.with_item("x", 1) == "a"  # type: ignore[union-attr]
    assert not store.replace("a", 2, b"of another key", b"[]", b"[]") and store.delete("a", 1)
    assert not keep("a", b"completed", [], False) and len(store) == store.num_bytes == 0
    assert store.put("b", 1, b"short", b"[]", b"[]") and not store.replace("b", 1, b"x" * 100_000, b"[]", b"[]")
    assert len(store) == store.num_bytes == 0            # the old one is not what its client waits for


def test_one_that_runs_is_not_dropped_for_room(
    client: openai.OpenAI, server: ScriptedServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be neither fetched nor cancelled, and its tokens would be computed for no client."""
    monkeypatch.setattr(server.service, "stored", ResponseStore(2, 100_000))
    running = [client.responses.create(model="tiny", input="Hello", background=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="full of responses that run"):
        client.responses.create(model="tiny", input="Hello", background=True)
    client.responses.cancel(running[1].id)
    script.go.set()
    for _ in range(3):
        client.responses.create(model="tiny", input="Hello")
    wait_until(lambda: server.service.slots.taken == 0)
    script.go.clear()
    late = client.responses.create(model="tiny", input="Hello", background=True)
    server.service.stored.put("other", 0, b"", b"[]", b"[]")
    server.service.stored.put("another", 0, b"", b"[]", b"[]")
    assert client.responses.retrieve(late.id).status == "queued"
    script.go.set()
    wait_until(lambda: client.responses.retrieve(late.id).status == "completed")


def test_a_failure_is_stored(client: openai.OpenAI, script: Script) -> None:
    script.fails = True
    script.go.set()
    response = client.responses.create(model="tiny", input="Hello", background=True)
    wait_until(lambda: client.responses.retrieve(response.id).status == "failed")
    assert client.responses.retrieve(response.id).error.message == "it broke"  # type: ignore[union-attr]


def test_one_place_in_the_queue_is_enough(
    client: openai.OpenAI, server: ScriptedServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.slots, "limit", 1)
    response = client.responses.create(model="tiny", input="Hello", background=True)
    wait_until(lambda: server.service.slots.taken == 1)
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="tiny", input="Hello", background=True)
    script.go.set()
    wait_until(lambda: client.responses.retrieve(response.id).status == "completed")


def test_what_cannot_run_in_the_background(client: openai.OpenAI, script: Script, server: ScriptedServer) -> None:
    script.go.set()
    for more in ({"store": False}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(model="tiny", input="Hello", background=True, **more)  # type: ignore[call-overload]
    here = client.responses.create(model="tiny", input="Hello")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(here.id)
    assert httpx.post(f"{server.url}/v1/responses/resp_0/cancel").status_code == 404


def test_without_a_store_there_is_no_background(tmp_path: Any) -> None:
    options = ServerOptions(port=0, max_stored_responses=0)
    with ScriptedServer(write_model(tmp_path / "tiny"), lambda prompt: "x", server=options) as server:
        reply = httpx.post(f"{server.url}/v1/responses", json={"input": "a", "background": True})
        assert reply.status_code == 400 and "background needs" in reply.json()["error"]["message"]
        assert server.service.slots.taken == 0


def test_log_probabilities_are_written_again_away_from_the_event_loop(
    client: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response's last events have its items four times: those of 1,000 tokens with 20 each held the loop for 230 ms."""
    threads: list[str] = []
    written = ResponsesWriter.last_events

    def last_events(writer: ResponsesWriter, outputs: list[Any]) -> Iterator[bytes]:
        for event in written(writer, outputs):
            threads.append(threading.current_thread().name)
            yield event

    monkeypatch.setattr(ResponsesWriter, "last_events", last_events)
    script.go.set()
    seen = []
    for size in (LONG_BYTES, LONG_BYTES + 1):
        threads.clear()
        monkeypatch.setattr(ResponsesWriter, "last_bytes", lambda self, outputs, size=size: size)
        events = list(client.responses.create(model="tiny", input="Hello", stream=True))
        assert events[-1].type == "response.completed"
        seen.append(set(threads))
    loop, away = seen
    assert len(loop) == 1 and not loop & away            # every one of them


def test_long_tools_are_written_in_a_thread_and_sent_in_pieces(
    client: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools that the prompt leaves out may be 15 MB, and every event about the response has them. The event loop encoded all of
    them, 180 ms for three clients, and the answer to a cancellation was sent at once."""
    written: list[tuple[str, int, bool]] = []            # (thread, number of tools, whether they are the last events)
    for name in ("events", "last_events"):
        usual = getattr(ResponsesWriter, name)

        def noted(writer: ResponsesWriter, *args: Any, name: str = name, usual: Any = usual) -> list[bytes]:
            thread = threading.current_thread().name
            written.append((thread, len(writer._asked.tools or []), name == "last_events" or not writer._number))
            made: list[bytes] = usual(writer, *args)
            return made

        def noted_one_by_one(writer: ResponsesWriter, *args: Any) -> Iterator[bytes]:
            yield from noted(writer, *args)              # in the thread that asks for the first of them

        monkeypatch.setattr(ResponsesWriter, name, noted if name == "events" else noted_one_by_one)
    sent: list[int] = []
    send = JsonText.__call__

    async def call(self: JsonText, *args: Any) -> None:
        sent.append(len(self.body))
        await send(self, *args)

    monkeypatch.setattr(JsonText, "__call__", call)
    tool: Any = {"type": "function", "name": "f", "description": "x" * 2 * LONG_BYTES, "parameters": {"type": "object"}}
    script.go.set()
    for tools in ([], [tool]):
        given: Any = {"model": "tiny", "input": "Hello", "tools": tools, "tool_choice": "none"}
        events = list(client.responses.create(**given, stream=True))
        assert [len(event.response.tools) for event in events if hasattr(event, "response")] == [len(tools)] * 3
    loop = {thread for thread, tools, _ in written if not tools}
    assert len(loop) == 1
    assert [thread in loop for thread, tools, with_tools in written if tools and with_tools] == [False, False]
    script.go.clear()
    response = client.responses.create(model="tiny", input="Hello", tools=[tool], tool_choice="none", background=True)
    assert len(client.responses.cancel(response.id).tools) == 1
    assert sent and sent[-1] > LONG_BYTES

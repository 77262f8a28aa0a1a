"""A client that leaves, counted in steps: the server tells the engine before another step, and the engine computes at most what
was under way. How long that takes over a real connection is in test_server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, ScriptedStream
from served_model import wait_until, write_model
from test_out_of_memory import core_of

from ridgeline import SamplingParams
from ridgeline.engine.core.loop import EngineLoop
from ridgeline.engine.ipc import Abort, Add, Shutdown
from ridgeline.messages import Request


class Gated(ScriptedStream):
    """Each step happens when it is let; `steps` have."""

    last: Gated

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.allowed, self.steps, self.closed = 3, 0, threading.Event()
        Gated.last = self

    async def __anext__(self) -> list[Any]:
        while self.steps >= self.allowed:
            await asyncio.sleep(0.005)
        self.steps += 1
        return await super().__anext__()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with pytest.MonkeyPatch.context() as patch, ScriptedServer(model, lambda prompt: "a long answer " * 20) as made:
        patch.setattr("scripted_server.ScriptedStream", Gated)
        yield made


@pytest.mark.reliability("B-09", "R-01b")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages"])
def test_the_engine_hears_of_it_before_another_step(server: ScriptedServer, path: str, stream: bool) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "stream": stream, "model": "tiny"}
    asked |= {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps(asked).encode()
    host, port = server.url.removeprefix("http://").split(":")
    before = getattr(Gated, "last", None)
    with closing(socket.create_connection((host, int(port)), timeout=60)) as connection:
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: getattr(Gated, "last", None) is not before and Gated.last.steps == 3)
        assert not Gated.last.closed.wait(0.1)
    assert Gated.last.closed.wait(60) and Gated.last.steps == 3           # no step was let meanwhile


@pytest.mark.reliability("R-01b")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_engine_computes_what_was_under_way_and_no_more(tmp_path: Path, async_scheduling: bool) -> None:
    core, runner = core_of(tmp_path, async_scheduling=async_scheduling)
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    told: list[tuple[int, list[Any]]] = []               # how many steps had been begun by then, and what of

    class Link:
        """The front end: an Abort once eleven steps have been begun, and an end once nothing is left."""

        aborted_at = 0
        begun = 0

        def check(self) -> None:
            pass

        def send(self, message: Any) -> None:
            told.append((self.begun, [delta.request_id for delta in getattr(message, "deltas", [])]))

        def receive(self, wait: bool, most_ms: int = 500) -> list[Any]:
            if not self.begun:
                return [Add(Request("left", list(range(5, 25)), params)), Add(Request("stays", list(range(7, 30)), params))]
            if not self.aborted_at and self.begun > 10:
                self.aborted_at = self.begun
                return [Abort("left")]
            return [Shutdown()] if not core.has_work else []

    link, submit = Link(), runner.submit

    def counted(*given: Any, **options: Any) -> Any:
        link.begun += 1
        return submit(*given, **options)

    runner.submit = counted                              # type: ignore[method-assign]
    EngineLoop(core, link).run()                         # type: ignore[arg-type]
    after = [names for begun, names in told if begun > link.aborted_at]
    assert sum("left" in names for names in after) <= 1, after           # the step that was under way, or none
    assert sum("stays" in names for names in after) > 100                # it had far to go: the others do
    assert core.scheduler.num_running == 0

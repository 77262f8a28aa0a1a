"""What the engine's loop does without a request, counted in calls: graphs are captured, and old garbage is looked at, once it has
been quiet. A request that comes at once waits for neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_out_of_memory import core_of

from ridgeline import SamplingParams
from ridgeline.engine.core import loop
from ridgeline.engine.core.loop import EngineLoop
from ridgeline.engine.ipc import Add, Shutdown
from ridgeline.messages import Request


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In order."""
    found: list[str] = []
    monkeypatch.setattr(loop, "collect_old", lambda: found.append("garbage"))
    return found


class Link:
    """A front end whose client asks again as soon as it has an answer, `asks` times, and then is silent for some looks."""

    def __init__(self, core: Any, done: list[str], asks: int, silent: int) -> None:
        self._core, self._done, self._asks, self._silent = core, done, asks, silent

    def check(self) -> None:
        pass

    def send(self, message: Any) -> None:
        pass

    def receive(self, wait: bool, most_ms: int = 500) -> list[Any]:
        if self._core.has_work:
            return []
        if self._asks:
            self._asks -= 1
            self._done.append("asked")
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            return [Add(Request(str(self._asks), [5, 6, 7], params))]
        self._silent -= 1
        self._done.append(f"silent {most_ms}" if wait else "looked")
        return [Shutdown()] if self._silent < 0 else []


def test_requests_that_come_at_once_meet_no_capture_and_no_collection(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = core_of(tmp_path)
    left = [True, True, False, False]
    monkeypatch.setattr(core, "prepare", lambda: (done.append("prepared"), left.pop(0))[1])
    EngineLoop(core, Link(core, done, 5, 4)).run()       # type: ignore[arg-type]
    assert done == [
        *["asked"] * 5, f"silent {loop._QUIET_MS}", "prepared", "looked", "prepared", "looked",
        "prepared", "silent 500", "garbage", "prepared", "silent 500",
    ]
    core.close()


def test_the_thread_that_samples_gpus_ends_with_the_loop(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the loop fails: an engine that is made again in the same process would have two."""
    core, _ = core_of(tmp_path)
    monkeypatch.setattr(core, "prepare", lambda: False)
    monkeypatch.setattr(loop.StatsKeeper, "close", lambda self: done.append("closed"))
    EngineLoop(core, Link(core, done, 1, 1)).run()       # type: ignore[arg-type]
    assert done[-1] == "closed"
    failing = Link(core, done, 0, 1)
    monkeypatch.setattr(failing, "check", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        EngineLoop(core, failing).run()                  # type: ignore[arg-type]
    assert done.count("closed") == 2
    core.close()

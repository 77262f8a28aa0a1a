"""How much an engine takes in between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.engine.core import frontend_socket
from ridgeline.engine.core.frontend_socket import FrontEndLink
from ridgeline.engine.ipc import TO_ENGINE, Abort


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FrontEndLink:
    """With 40 messages that are there, each of which takes 4 ms to read."""
    clock, waiting = [100.0], [TO_ENGINE.encode(Abort(str(number))) for number in range(40)]

    def receive() -> bytes:
        clock[0] += 0.004
        return waiting.pop(0)

    made: Any = FrontEndLink.__new__(FrontEndLink)
    made.bad_frames, made._from_front = 0, SimpleNamespace(poll=lambda timeout: len(waiting), recv=receive)
    monkeypatch.setattr(frontend_socket, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return made  # type: ignore[no-any-return]


def test_requests_that_take_long_to_read_come_in_over_several_steps(link: FrontEndLink) -> None:
    """400 with a bias for each of 1,024 tokens kept the running ones from their next step for 2.8 s."""
    taken = [link.receive(wait=False) for _ in range(14)]
    assert [len(messages) for messages in taken] == [3] * 13 + [1]
    assert [message.request_id for messages in taken for message in messages] == [str(number) for number in range(40)]  # type: ignore[union-attr]
    assert link.receive(wait=False) == []


def test_an_idle_engine_takes_all_at_once(link: FrontEndLink) -> None:
    """Nothing runs that would wait, and which prompts come first is decided among all of them."""
    assert len(link.receive(wait=True)) == 40


def test_one_message_is_taken_however_long_it_takes(link: FrontEndLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_socket, "_SECONDS_PER_STEP", 0.0)
    assert [len(link.receive(wait=False)) for _ in range(41)] == [1] * 40 + [0]

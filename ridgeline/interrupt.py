"""Ctrl-C while the modules of a command are imported: one line and exit code 130 at once, as afterwards.

Imported before everything else, and it imports next to nothing itself: until then a Ctrl-C is a traceback. A program that imports
the package keeps its own handler, and so do child processes. What Python does before the first line of the package is out of
reach.
"""

from __future__ import annotations

import os
import signal
import sys
from types import ModuleType


def _stop(number: int, frame: object) -> None:
    """Not an exception: Python and libraries wrap one that arises in an import into others."""
    os.write(2, b"stopped\n")
    os._exit(130)


def is_command(arguments: list[str]) -> bool:
    """Whether a process that was started with these words is `ridgeline ...` or `python -m ridgeline ...`."""
    if "-m" in arguments[:-1]:
        return arguments[arguments.index("-m") + 1] in ("ridgeline", "ridgeline.__main__")
    return any(os.path.basename(word) == "ridgeline" for word in arguments[:2])


def guard_imports() -> None:
    if is_command(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def end_guard() -> None:
    """From here on a Ctrl-C is a KeyboardInterrupt: there may be something to clean up."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def import_module(name: str) -> ModuleType:
    """Imports a module that brings torch, which takes seconds, while nothing needs to be cleaned up. torch takes an exception
    that Ctrl-C raises in there for a numpy that is not installed: it goes on, and fails much later. In a directory that was
    removed, one of its libraries ends the process; here that is an error as any other."""
    os.getcwd()
    guard_imports()
    try:
        import importlib

        return importlib.import_module(name)
    finally:
        end_guard()


def was_interrupted(error: BaseException | None) -> bool:
    """Whether a Ctrl-C is behind an error: imports of libraries say that something could not be imported."""
    for _ in range(20):
        if error is None or isinstance(error, KeyboardInterrupt):
            break
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)

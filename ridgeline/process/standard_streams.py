"""Standard input, output and error that a program can rely on, also where it was started without them (`2>&-`).

A closed descriptor would be given to the next socket, which libraries would then write their messages into.
"""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Give the null device to those that are closed. Before anything else is opened."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def say(text: str) -> bool:
    """Print a line at once. False: standard output takes nothing (a full disk, a closed pipe); from now on it goes nowhere."""
    try:
        print(text, flush=True)
    except OSError:
        discard_output()
        return False
    return True


def discard_output() -> None:
    """What is buffered is lost; else Python would try to write it once more when it ends, and fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)

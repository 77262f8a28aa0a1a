"""Ends a child process soon after its parent is gone, whatever the child is doing.

Loading a model or one long step would keep an orphan alive for many seconds, with all its memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.2                   # between two looks
GRACE_SECONDS = 0.4                  # for the child to notice by itself and to end in order


def end_with_parent(parent: int, clean_up: Callable[[], None] = lambda: None) -> None:
    """Start a thread that ends this process when its parent is not `parent` any more."""
    threading.Thread(target=_watch, args=(parent, clean_up), name="parent", daemon=True).start()


def _watch(parent: int, clean_up: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    try:
        clean_up()
    finally:
        os._exit(0)

"""The engine core in a process of its own: `python -m ridgeline.engine.core.engine_process SETTINGS`.

It begins before its imports (ridgeline/process/head_start.py); the rest is engine/core/loop.py. When the front end is gone,
this process ends too, and removes the directory of their sockets.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from ridgeline.errors import one_line
from ridgeline.process import head_start
from ridgeline.process.cold import cold_start
from ridgeline.process.memory_kills import OUT_OF_MEMORY, OUT_OF_THREADS, is_out_of_threads
from ridgeline.process.orphans import end_at_once, end_with_parent
from ridgeline.process.standard_streams import open_missing


def main(settings: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # Ctrl-C is the front end's to handle
    open_missing()
    faulthandler.enable()
    given = json.loads(settings)
    end_at_once()
    end_with_parent(given["parent"], lambda: shutil.rmtree(given["folder"], ignore_errors=True))
    unusable = ""
    try:
        gpu = given["options"].get("device") != "cpu"
        cold_start.begin(gpu)
        head_start.begin(gpu)
        from ridgeline.engine.core.loop import run
    except Exception as error:                           # a broken installation, or no memory for its libraries
        unusable = f"the engine's libraries cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    from ridgeline.engine.core.frontend_socket import FrontEndGone, FrontEndLink
    from ridgeline.engine.ipc import SHOW_STACKS, Failed
    from ridgeline.sampling_params import take_params_as_checked

    link = FrontEndLink(Path(given["folder"]), given["parent"])
    if unusable:
        link.send(Failed(unusable, config=True))
        link.close()
        return 2
    head_start.imported()
    # Works in the middle of a kernel or a lock, too. Its end tells the front end that all stacks are written.
    faulthandler.register(SHOW_STACKS, all_threads=True, chain=True)
    take_params_as_checked()                            # by the front end, which had to make text of them
    try:
        code = run(given["options"], link, given.get("sizes"))
    except FrontEndGone:
        link.abandon()
        return 0
    link.close()
    return code


def _without_memory(error: BaseException) -> bool:
    if isinstance(error, ImportError):                   # a library that could not be mapped
        return "failed to map" in str(error) or "cannot allocate memory" in str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except (MemoryError, OSError, ImportError, RuntimeError) as error:
        if not _without_memory(error) and not is_out_of_threads(error):
            raise
        with suppress(MemoryError, OSError):
            os.write(2, f"{one_line(error)}\n".encode()) # what it was that found none
        os._exit(OUT_OF_THREADS if is_out_of_threads(error) else OUT_OF_MEMORY)      # the front end has the words for it

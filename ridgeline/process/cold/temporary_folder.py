"""A temporary folder that goes with its process, however that ends: `os._exit`, SIGTERM and SIGKILL run no clean-up of Python's.

A shell waits for the end of a pipe whose other end only this process holds, and its forks, and removes the folder then.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

# In the background, so that it is no child that this process would have to wait for, in a session of its own, where no Ctrl-C
# reaches it. A shell gives what it starts in the background no standard input, so that is kept under another number.
_WAIT_AND_REMOVE = 'exec 3<&0; { read -r _ <&3; rm -rf -- "$1"; } >/dev/null 2>&1 &'


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:             # no fork of it
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder(prefix: str) -> Path:
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(_remove, folder, os.getpid())                # at once, where Python ends in order
    reader, _never_closed = os.pipe()
    try:
        with suppress(OSError):          # no shell, or no room for a process: what ends in order still leaves nothing
            command = ["/bin/sh", "-c", _WAIT_AND_REMOVE, "sh", folder]
            subprocess.run(command, stdin=reader, check=False, start_new_session=True, cwd="/")
    finally:
        os.close(reader)
    return Path(folder)

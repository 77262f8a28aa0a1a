"""Takes a secret out of this process's environment for good.

Linux shows the environment that a process was started with in /proc/PID/environ, to programs of the same user. Removing a
variable leaves its text there; only overwriting the text helps.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path


def erase_variable(name: str) -> None:
    """Overwrite its value in the memory where the kernel put it. Elsewhere than on Linux nothing happens."""
    with suppress(OSError, ValueError, IndexError):
        # Fields 50 and 51 of the line: where that text begins and ends. A program's name, field 2, may hold blanks.
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(numbers[47]), int(numbers[48])
        text = Path("/proc/self/environ").read_bytes()
        if 0 < start < end and len(text) <= end - start:
            for found in re.finditer(rb"(?:\A|\0)" + re.escape(os.fsencode(name)) + rb"=([^\0]*)", text):
                ctypes.memset(start + found.start(1), 0, len(found[1]))

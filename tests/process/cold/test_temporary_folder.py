"""A temporary folder goes with its process, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os, sys
from ridgeline.process.cold.temporary_folder import temporary_folder
folder = temporary_folder("ridgeline-ends-")
(folder / "part").mkdir()
if os.fork() == 0:
    sys.exit()                                           # a fork that ends in order takes nothing along
os.wait()
assert folder.is_dir()
print(folder, flush=True)
{end}
"""


@pytest.mark.parametrize(("end", "number"), [
    ("sys.exit()", None),
    ("os._exit(1)", None),
    ("sys.stdin.read()", signal.SIGTERM),
    ("sys.stdin.read()", signal.SIGKILL),
    ("sys.stdin.read()", signal.SIGINT),
], ids=["in order", "os._exit", "SIGTERM", "SIGKILL", "Ctrl-C"])
def test_nothing_is_left(end: str, number: signal.Signals | None, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, text=True, start_new_session=True, env=environment, **pipes) as child:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        assert folder.parent == tmp_path
        if number is not None:
            assert (folder / "part").is_dir() and not psutil.Process(child.pid).children()
            os.killpg(child.pid, number)                 # as a terminal does: with all of its group
        child.wait(60)
    for _ in range(6000):                                # of a busy machine's minutes
        if not folder.exists():
            break
        time.sleep(0.01)
    assert not folder.exists()

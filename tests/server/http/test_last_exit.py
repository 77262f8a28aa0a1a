"""The end of the process at a deadline, whatever still runs in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from served_model import wait_until

from ridgeline.server import last_exit
from ridgeline.server.last_exit import LastExit, own_children

# A thread that Python would wait for, and a child that ignores everything.
STUCK = """
import subprocess, sys, threading, time
from ridgeline.server.last_exit import LastExit
endless = "import signal, time; signal.signal(15, 1); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE)
child.stdout.readline()
threading.Thread(target=time.sleep, args=(600,)).start()
LastExit().within(0.2)
print(child.pid, flush=True)
"""


@pytest.mark.reliability("R-05")
def test_a_stuck_thread_does_not_hold_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "did not end in time" in done.stderr
    child = int(done.stdout)

    def is_gone() -> bool:                               # killed with it; init may take a while to notice
        try:
            os.kill(child, 0)
            with open(f"/proc/{child}/stat", encoding="ascii") as file:
                return file.read().split()[2] == "Z"
        except (ProcessLookupError, FileNotFoundError):
            return True

    wait_until(is_gone)


def test_a_second_signal_only_shortens_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_exit, "own_children", list)     # those of this process are needed by the tests after this one
    left = threading.Event()
    exit_ = LastExit(lambda code: left.set())
    exit_.within(2**62)                                  # more than select() takes: its thread must live on
    assert not left.wait(0.05)
    exit_.within(0.01)
    exit_.within(600)
    assert left.wait(60)


def test_own_children_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        try:
            assert child.pid in own_children()
        finally:
            child.send_signal(signal.SIGKILL)

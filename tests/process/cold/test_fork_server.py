"""Workers that are copies of one process: they answer, die alone, and end with their server, which ends with this process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served_model import one_thread

from ridgeline.process import framed_child
from ridgeline.process.children import child_environment
from ridgeline.process.cold import fork_server
from ridgeline.process.cold.fork_server import ForkServer, Worker
from ridgeline.process.framed_child import Stopped

LONGEST = 60.0                       # seconds to wait for what must come

MODULE = """
import os, sys, threading, time
from ridgeline.process.cold.fork_server import serve

def prepare():
    {prepare}

def answer(asked):
    if asked == b"die":
        os._exit(3)
    if asked == b"sleep":
        time.sleep(1000)
    if asked == b"child":
        return str(__import__("subprocess").Popen(["sleep", "1000"]).pid).encode()
    return b"%d " % os.getpid() + asked

chore = lambda: None
if __name__ == "__main__":
    serve([int(number) for number in sys.argv[1:]], prepare, answer, lambda: chore())
"""


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Servers]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    Servers.folder, Servers.started = tmp_path, []
    yield Servers
    for each in Servers.started:
        each.end()


class Servers:
    folder: Path
    started: list[ForkServer]

    @classmethod
    def start(cls, workers: int, prepare: str = "pass") -> ForkServer:
        name = f"forks_{len(cls.started)}"
        (cls.folder / f"{name}.py").write_text(MODULE.format(prepare=prepare))
        cls.started.append(ForkServer(name, workers, child_environment()))
        return cls.started[-1]


def until(holds: Callable[[], bool]) -> bool:
    for _ in range(6000):
        if holds():
            return True
        time.sleep(0.01)
    return False


def is_gone(pid: int) -> bool:
    """Or only waits for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def taken(server: ForkServer) -> Worker:
    worker = server.worker()
    assert worker is not None and until(worker.ready)
    return worker


def test_each_worker_answers_on_its_own(servers: type[Servers]) -> None:
    server = servers.start(3)
    workers = [taken(server) for _ in range(3)]
    assert server.worker() is None
    answers = [each.ask(b"x" * 100_000, LONGEST).split() for each in (*workers, *workers)]
    numbers = [int(pid) for pid, _ in answers]
    assert numbers == [each.process.pid for each in workers] * 2 and len({*numbers, server.process.pid}) == 4
    assert all(text == b"x" * 100_000 for _, text in answers)
    server.end()
    assert all(until(lambda pid=pid: is_gone(pid)) for pid in numbers)
    assert not any(each.alive for each in workers)
    assert server.worker() is None


def test_a_worker_that_dies_or_hangs_leaves_the_others(servers: type[Servers]) -> None:
    server = servers.start(3)
    dying, hanging, third = (taken(server) for _ in range(3))
    pids = [dying.process.pid, hanging.process.pid]
    with pytest.raises(EOFError):
        dying.ask(b"die", LONGEST)
    with pytest.raises(TimeoutError):
        hanging.ask(b"sleep", 0.05)
    assert all(until(lambda pid=pid: is_gone(pid)) for pid in pids)
    assert not dying.alive and not dying.ready() and not hanging.alive
    assert third.alive and third.ask(b"a", LONGEST).endswith(b" a")


def test_a_worker_that_was_stopped_is_ended(servers: type[Servers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.02)
    worker = taken(servers.start(1))
    pid = worker.process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Stopped):
        worker.ask(b"a", LONGEST)
    assert until(lambda: is_gone(pid)) and not worker.alive


def test_what_a_worker_has_started_ends_with_the_server(servers: type[Servers]) -> None:
    server = servers.start(1)
    pid = int(taken(server).ask(b"child", LONGEST))
    server.end()
    assert until(lambda: is_gone(pid))


@pytest.mark.parametrize(("prepare", "reason"), [
    ("raise ImportError('no torch')", "ImportError: no torch"),
    ("os._exit(1)", ""),
    ("threading.Thread(target=time.sleep, args=(1000,)).start()", "it has 1 threads besides its first"),
    ("def refused(): raise OSError('no more')\n    os.fork = refused", "OSError: no more"),
])
def test_a_server_that_cannot_copy_itself_says_so(
    servers: type[Servers], monkeypatch: pytest.MonkeyPatch, prepare: str, reason: str
) -> None:
    """With a second thread it must not: that thread's locks would stay locked in the copies."""
    told: list[str] = []
    monkeypatch.setattr(fork_server.logger, "info", lambda text, *values: told.append(text % values))
    server = servers.start(2, prepare)
    workers = [server.worker(), server.worker()]
    for each in workers:
        assert each is not None and until(lambda each=each: not (each.ready() or each.alive))
    assert [line for line in told if reason in line] == told and len(told) == bool(reason)


def test_a_server_waits_for_a_thread_that_is_ending(servers: type[Servers]) -> None:
    """Python's join() returns before the system has taken the thread off its list."""
    assert taken(servers.start(1, "threading.Thread(target=time.sleep, args=(0.3,)).start()")).ask(b"a", LONGEST).endswith(b" a")


def test_a_chore_is_the_last_workers(servers: type[Servers]) -> None:
    done = Servers.folder / "done"
    server = servers.start(3, f"global chore\n    chore = lambda: open({str(done)!r}, 'w')")
    workers = [taken(server) for _ in range(3)]
    assert done.exists() and len(workers) == 3


def test_it_is_told_when_there_are_no_more_files(servers: type[Servers]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
    try:
        with pytest.raises(OSError):
            servers.start(16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
from ridgeline.process.children import child_environment
from ridgeline.process.cold.fork_server import ForkServer
server = ForkServer("forks_0", 2, child_environment())
workers = [server.worker(), server.worker()]
while {waits} and not all(each.ready() for each in workers):
    time.sleep(0.01)
print(server.process.pid, *(each.process.pid for each in workers if each.process.pid), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("waits", [True, False])
def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path, waits: bool) -> None:
    """Whether it has its workers already, or is importing."""
    (tmp_path / "forks_0.py").write_text(MODULE.format(prepare="pass" if waits else "time.sleep(1000)"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(folder=str(tmp_path), waits=waits)], stdout=subprocess.PIPE, env=one_thread()
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == (3 if waits else 1)
    parent.kill()
    parent.wait()
    assert all(until(lambda pid=pid: is_gone(pid)) for pid in pids)

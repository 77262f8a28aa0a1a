"""Engine processes that start with torch and the engine imported: the tests start dozens, and imports are three seconds of each.

One process per pytest worker imports everything and waits (`_serve`). What `start_child` would start is forked from it, with the
arguments, environment and streams of the call, as a child of the pytest worker: `Popen` waits for it and signals it as any other.
A call that a fork could not serve faithfully starts a cold process: another environment for libraries, another system, limits on
memory or files. So do tests of the start itself, by the fixture `cold_start`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

IMPORTED = ("torch", "ridgeline.engine.core.loop", "ridgeline.engine.core.frontend_socket", "ridgeline.engine.core.executor")
WARM = ("ridgeline.engine.core.engine_process", "ridgeline.engine.ranks.rank", "threaded_engine", "slow_engine", "faulty_engine")
# Libraries have read these when they were imported.
_READ_AT_IMPORT = tuple("OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ MALLOC_ CUDA_ TORCH_ PYTORCH_ TRITON_ LD_ PYTHON".split())
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
_CLONE_PARENT = 0x00008000           # the new process is a child of this process's parent
_MOST_BYTES = 100_000                # of a call


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(each) for each in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)]


class _Zygote:
    """The process that has imported everything, as the pytest worker holds it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}
        self.limits = _limits()
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), "-" * 2000]      # room for `_show`
        options: Any = {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
        self._process = subprocess.Popen(command, env=environment, **options)
        theirs.close()
        self.usable = True
        self.num_forked = 0
        self._is_ready = False

    def serves(self, environment: dict[str, str]) -> bool:
        wanted = {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}
        return self.usable and self.pid == os.getpid() and self.environment == wanted and self.limits == _limits()

    def fork(self, call: bytes, streams: list[int]) -> int:
        """The number of the new process; 0: there is none."""
        with self._lock:
            try:
                if not self._is_ready and self._socket.recv(100) != b"ready":
                    raise ValueError
                self._is_ready = True
                socket.send_fds(self._socket, [call], streams)
                pid = int(self._socket.recv(100))
                self.num_forked += pid > 0
                return pid
            except (OSError, ValueError):
                self.usable = False
                return 0


_zygote: _Zygote | None = None


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Popen asks `_execute_child` for the process. It is private, so `begin` names the versions of Python it was read in; every
    call that is not ours goes to Popen's own."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,  # type: ignore
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any) -> None:
        pipes, (session, group) = rest[:6], rest[-2:]
        is_ours = args[:3] == [sys.executable, "-P", "-m"] and args[3] in WARM
        is_plain = session and group == -1 and not preexec_fn and not pass_fds
        if is_ours and is_plain and _zygote is not None and _zygote.serves(env):
            call = json.dumps({"words": args[3:], "cwd": cwd or os.getcwd(), "env": env}).encode()
            streams = [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
            if len(call) < _MOST_BYTES and (pid := _zygote.fork(call, streams)):
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(  # type: ignore[misc]
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
        )


def begin() -> None:
    """Start the process that imports. In the main thread, before any test: the kernel ends an engine with the thread that its
    process descends from, and tests look for processes that others have left."""
    global _zygote
    if _CLONE is None or sys.version_info >= (3, 14):
        return
    from ridgeline.process import children

    environment = {**children.child_environment(), **children.byte_code_environment()}
    _zygote = _Zygote({**environment, "PYTHONPATH": os.pathsep.join(children.module_path())})
    children.subprocess = SimpleNamespace(Popen=WarmPopen, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


# -- in the process that waits -----------------------------------------------------------------------------------------


def _serve(link: socket.socket) -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with suppress(BrokenPipeError, ConnectionResetError):        # the pytest worker has ended
        # A fork copies one thread: locks that another one held would stay locked.
        link.send(b"ready" if len(os.listdir("/proc/self/task")) == 1 else b"unusable")
        while True:
            call, streams, *_ = socket.recv_fds(link, _MOST_BYTES, 3)
            if not call:
                return
            pid = _fork_of_the_parent()
            if pid == 0:
                link.close()
                _become(json.loads(call), streams)
            for each in streams:
                os.close(each)
            link.send(str(max(pid, 0)).encode())


def _fork_of_the_parent() -> int:
    """os.fork, but that the new process is this one's sibling."""
    system, python = ctypes.PyDLL(None), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = system.syscall(_CLONE, ctypes.c_ulong(_CLONE_PARENT | signal.SIGCHLD), None, None, None, None)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return int(pid)


def _become(call: dict[str, Any], streams: list[int]) -> None:
    """`python -P -m words…` in this new process."""
    code = 1
    try:
        os.setsid()
        for number, given in enumerate(streams):
            os.dup2(given, number)
        os.closerange(3, 256)
        os.chdir(call["cwd"])
        os.environ.clear()
        os.environ.update(call["env"])
        module, *arguments = call["words"]
        _show(["python", "-P", "-m", module, *arguments])
        sys.path[:0] = [each for each in call["env"].get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
        sys.argv = [module, *arguments]
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        atexit._clear()
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def _show(words: list[str]) -> None:
    """The words of the command in /proc/PID/cmdline, as far as there is room: tests and people look for processes by them."""
    with suppress(OSError, ValueError, IndexError):
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(numbers[45]), int(numbers[46])
        text = b"\0".join(word.encode() for word in words)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))

"""Processes that start with torch, the engine and the server imported: the tests start dozens, and imports are most of a start.

One process per pytest worker imports everything and waits (`_serve`). What `start_child` would start is forked from it, with the
arguments, environment and streams of the call, as a child of the pytest worker: `Popen` waits for it and signals it as any other.
So are the commands of `ridgeline` and the scripts that a test starts by `WarmPopen` or `run`. A command starts engines in turn:
it is forked together with a copy of the waiting process, from which its own engines come.
A call that a fork could not serve faithfully starts a cold process: another environment for libraries, another system, limits on
memory or files. So do tests of the start itself, by the fixture `cold_start`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import json
import logging
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import quick_interpreter

IMPORTED = (
    "torch", "ridgeline.engine.core.loop", "ridgeline.engine.core.frontend_socket", "ridgeline.engine.core.executor",
    "ridgeline.cli.cmd_serve", "ridgeline.server.app", "uvicorn.protocols.http.httptools_impl",
    "ridgeline.grammar.compile_worker", "llguidance", "ridgeline.text.chat_template",
)
INTERPRETED = ("torch", "triton", "pytest", "hypothesis", "ridgeline.models.decoder", "ridgeline.runner.sampler")
COMMAND = ("ridgeline", "ridgeline.__main__")
PYTEST = "pytest"                    # with the interpreter, which a process chooses when it imports Triton
ON_TERMINAL = ["setsid", "--ctty", "--wait"]     # before a command: its standard input is the terminal of a session of its own
WARM = (
    *COMMAND, "ridgeline.engine.core.engine_process", "ridgeline.engine.ranks.rank", "ridgeline.distributed.time_collectives",
    "ridgeline.server.body_process", "ridgeline.grammar.compile_worker", "threaded_engine", "slow_engine", "faulty_engine",
    "test_executor", "ridgeline.text.chat_template",
)
BARE = ("ridgeline.text.chat_template",)         # has next to no environment, and nothing that reads it
# Libraries have read these when they were imported.
_READ_AT_IMPORT = tuple("OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ MALLOC_ CUDA_ TORCH_ PYTORCH_ TRITON_ LD_ PYTHON".split())
_READ_LATER = ("TRITON_CACHE_DIR", "TRITON_DEFAULT_FP_FUSION")                     # when a kernel is compiled
_OF_MODULES = ("PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")     # where they lie, and their byte code
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
_CLONE_PARENT = 0x00008000           # the new process is a child of this process's parent
_MOST_BYTES = 100_000                # of a call


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(each) for each in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)]


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER}


class _Zygote:
    """The process that has imported everything, as the one that starts others holds it."""

    def __init__(self, environment: Mapping[str, str], link: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.environment = _read_at_import(environment)
        self.command_path = os.environ.get("PYTHONPATH", "")
        self.limits = _limits()
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._socket, self._process = link, process
        self.usable = True
        self.num_forked = 0
        self._is_ready = False

    def serves(self, module: str, environment: Mapping[str, str]) -> bool:
        own, wanted = self.environment, self.environment if module in BARE else _read_at_import(environment)
        if module in (*COMMAND, PYTEST) or _is_script(module):       # with its user's variables, not those of `start_child`
            if module in COMMAND and wanted.get("PYTHONPATH", "") not in (self.command_path, own["PYTHONPATH"]):
                return False
            own, wanted = ({name: text for name, text in each.items() if name not in _OF_MODULES} for each in (own, wanted))
        return self.usable and self.pid == os.getpid() and own == wanted and self.limits == _limits()

    @property
    def was_ended(self) -> bool:
        """By a signal, or once it was ready; one that could not import everything ends by itself."""
        code = None if self._process is None or self.pid != os.getpid() else self._process.poll()
        return code is not None and (code < 0 or self._is_ready)

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
_interpreter: _Zygote | None = None      # the same, with Triton's interpreter


def ended() -> set[_Zygote]:
    """Those of this pytest worker that something has ended: from then on its processes start cold."""
    return {each for each in (_zygote, _interpreter) if each is not None and each.was_ended}


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Popen asks `_execute_child` for the process. It is private, so `begin` names the versions of Python it was read in; every
    call that is not ours goes to Popen's own."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any) -> None:
        pipes, (session, group) = rest[:6], rest[-2:]
        words = _words_of(args)
        is_ours = bool(words) and (words[0] in (*COMMAND, PYTEST) or _is_script(words[0]) or (words[0] in WARM and session))
        is_plain = group == -1 and not preexec_fn and not pass_fds and not shell
        variables = dict(os.environ) if env is None else env
        zygote = _interpreter if variables.get("TRITON_INTERPRET") == "1" else _zygote
        if is_ours and is_plain and zygote is not None and zygote.serves(words[0], variables):
            place, on_terminal = os.fspath(cwd or os.getcwd()), args[: len(ON_TERMINAL)] == ON_TERMINAL
            call = json.dumps({"words": words, "cwd": place, "env": variables, "on_terminal": on_terminal}).encode()
            streams = [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
            if len(call) < _MOST_BYTES and (pid := zygote.fork(call, streams)):
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(  # type: ignore[misc]
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
        )


def _words_of(command: Any) -> list[str]:
    """The module and its arguments, of `python -m module …`; the script and its own, of `python script.py …`."""
    if isinstance(command, list) and command[:1] == [sys.executable] and _is_script("".join(map(str, command[1:2]))):
        return command[1:]
    for start in ([sys.executable, "-P", "-m"], [sys.executable, "-m"], [*ON_TERMINAL, sys.executable, "-m"]):
        if isinstance(command, list) and command[: len(start)] == start:
            return command[len(start) :]
    return []


def _is_script(word: str) -> bool:
    return word.endswith(".py")


def run(command: list[str], timeout: float, input: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run with text captured, of a process that may be forked."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            said, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def _environment() -> dict[str, str]:
    """As `start_child` makes it for an engine."""
    from ridgeline.process import children

    made = {**children.child_environment(), **children.byte_code_environment()}
    return {**made, "PYTHONPATH": os.pathsep.join(children.module_path())}


def _start_children_by(zygote: _Zygote) -> None:
    global _zygote
    from ridgeline.process import children

    _zygote = zygote
    children.subprocess = SimpleNamespace(Popen=WarmPopen, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


def begin_interpreter() -> None:
    """The same for `python -m pytest` and scripts with TRITON_INTERPRET=1, when the first test wants one."""
    global _interpreter
    if _interpreter is None and os.environ.get("TRITON_INTERPRET") != "1":
        _interpreter = _start(_environment() | {"TRITON_INTERPRET": "1"})


def begin() -> None:
    """Start the process that imports. In the main thread, before any test: the kernel ends an engine with the thread that its
    process descends from, and tests look for processes that others have left."""
    if zygote := _start(_environment()):
        _start_children_by(zygote)


def _start(environment: dict[str, str]) -> _Zygote | None:
    if _CLONE is None or sys.version_info >= (3, 14):
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", __file__, str(theirs.fileno()), "-" * 2000]      # room for `_show`
    options: Any = {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(command, env=environment, **options)
    theirs.close()
    return _Zygote(environment, ours, process)


# -- in the process that waits -----------------------------------------------------------------------------------------


def _serve(link: socket.socket) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for module in INTERPRETED if interpreted else IMPORTED:
        importlib.import_module(module)
    if interpreted:
        quick_interpreter.install()
    gc.collect()
    gc.freeze()
    _wait_for_calls(link)


def _wait_for_calls(link: socket.socket) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):        # the process that starts others has ended
        # A fork copies one thread: locks that another one held would stay locked.
        link.send(b"ready" if len(os.listdir("/proc/self/task")) == 1 else b"unusable")
        while True:
            call, streams, *_ = socket.recv_fds(link, _MOST_BYTES, 3)
            if not call:
                return
            if _is_script(json.loads(call)["words"][0]):
                _know_triton()
            pid = _fork_of_the_parent()
            if pid == 0:
                link.close()
                _become(json.loads(call), streams)
            for each in streams:
                os.close(each)
            link.send(str(max(pid, 0)).encode())


@functools.cache
def _know_triton() -> None:
    """Scripts compile kernels."""
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("triton.experimental.gluon")
        name_triton()
        gc.collect()
        gc.freeze()


def name_triton() -> None:
    """Part of every name in Triton's cache is a hash of its library: 400 MB, in every process that compiles, up to 1.4 s. For
    tests the size and time of that file tell one Triton from another."""
    if cache := sys.modules.get("triton.runtime.cache"):
        (library,) = Path(cache.__file__ or "").parents[1].glob("_C/libtriton.*")
        found = library.stat()
        cache.triton_key = lambda: f"tests-{found.st_size}-{found.st_mtime_ns}"  # type: ignore[attr-defined]


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
        if call["on_terminal"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.closerange(3, 256)
        os.chdir(call["cwd"])
        os.environ.clear()
        os.environ.update(call["env"])
        module, *arguments = call["words"]
        if module in COMMAND:
            _stay_ready()
        words = [*([] if _is_script(module) else ["-P", "-m"]), module, *arguments]
        _show(["python", *words])
        sys.orig_argv = [sys.executable, *words]         # what a program that starts itself again reads (process/platform)
        sys.path[:0] = [each for each in call["env"].get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
        sys.argv = [module, *arguments]
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        atexit._clear()
        try:
            logging.getLogger("ridgeline").handlers.clear()
            importlib.import_module("ridgeline.process.log").get_logger("start")     # with the level of this environment
            if _is_script(module):
                sys.path.insert(0, os.path.dirname(module))
                runpy.run_path(module, run_name="__main__")
            else:
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


def _stay_ready() -> None:
    """Leave a copy of this process, its child, for the processes that it will start: they are forked while it has one thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.setsid()                      # a signal for the command's group is not for this process
        empty = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(empty, number)       # who reads the command's output sees its end
        with suppress(BaseException):
            _wait_for_calls(theirs)
        os._exit(0)
    theirs.close()
    _start_children_by(_Zygote(_environment(), ours, None))


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

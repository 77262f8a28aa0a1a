"""Starts and children without what they are used to: no standard streams, a full disk, little memory, no parent."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from served_model import wait_until

from ridgeline import __main__ as command
from ridgeline.engine.core import loop
from ridgeline.engine.ipc import Failed
from ridgeline.errors import ConfigError
from ridgeline.process import platform, standard_streams
from ridgeline.process.memory_kills import OUT_OF_MEMORY, OUT_OF_THREADS, OutOfMemoryKills


def python(source: str, redirect: str = "", before: str = ":") -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'{before}; "$0" -c "$1" {redirect}', sys.executable, source]
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


STREAMS = """
import os, sys
from ridgeline.process.standard_streams import open_missing
open_missing()
print("out"); print("err", file=sys.stderr); sys.stdout.flush(); sys.stderr.flush()
assert os.open("/dev/null", os.O_RDONLY) > 2
import faulthandler; faulthandler.enable()
import subprocess; subprocess.run([sys.executable, "-c", "import os; [os.fstat(n) for n in (0, 1, 2)]"], check=True)
"""


@pytest.mark.reliability("R-14")
@pytest.mark.parametrize("redirect", ["", "2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_opened(redirect: str) -> None:
    done = python(STREAMS, redirect)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if ">&-" in redirect.replace("2>&-", "") else "out\n")


@pytest.mark.reliability("R-14")
def test_a_greeting_that_does_not_fit_ends_nothing() -> None:
    source = "from ridgeline.process.standard_streams import say\nassert not say('hi')\nassert say('more')"
    done = python(source, ">/dev/full")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.reliability("R-14")
def test_output_on_a_full_disk_is_one_line_and_code_2() -> None:
    done = python("import sys; from ridgeline.__main__ import main; sys.exit(main(['--help']))", ">/dev/full")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no space" in done.stderr


@pytest.mark.reliability("R-14")
@pytest.mark.parametrize("how", ["print('a', file=sys.stderr)", "get_logger('a').error('b')", "sys.stderr.write('a')"])
def test_a_full_standard_error_ends_nothing(how: str) -> None:
    source = "import sys\nfrom ridgeline.process.standard_streams import open_missing\nopen_missing()\n"
    source += f"from ridgeline.process.log import get_logger\n{how}\nprint('out')"
    done = python(source, "2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "out\n")


def test_a_pipe_that_does_not_block_gets_all_that_its_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_streams, "FULL_MILLISECONDS", 60_000)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    written, read = 300_000, bytearray()

    def take() -> None:
        while len(read) < written:
            read.extend(os.read(ours, 65536))

    reader = threading.Thread(target=take)
    reader.start()
    with standard_streams._Lossy(theirs, "w", closefd=True) as stream:
        assert stream.write(bytes(written)) == written
    reader.join(60)
    os.close(ours)
    assert len(read) == written


def test_a_pipe_that_does_not_block_and_is_not_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_streams, "FULL_MILLISECONDS", 0)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with standard_streams._Lossy(theirs, "w", closefd=True) as stream:
        assert stream.write(bytes(300_000)) == 300_000
    os.close(ours)


def test_standard_error_is_not_buffered_where_python_is_told_so() -> None:
    source = "import os, sys; from ridgeline.process.standard_streams import open_missing; open_missing(); "
    source += "sys.stderr.write('half a line'); os._exit(0)"
    done = subprocess.run([sys.executable, "-u", "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "half a line"


@pytest.mark.parametrize("error", ["MemoryError: no room for it", "ImportError: zmq.so: failed to map segment"])
def test_an_engine_without_memory_says_what_found_none(error: str) -> None:
    kind, _, words = error.partition(": ")
    source = f"import json, runpy, sys\ndef no(text): raise {kind}('{words}')\njson.loads = no\n"
    source += "sys.argv = ['engine', '{}']\nrunpy.run_module('ridgeline.engine.core.engine_process', run_name='__main__')"
    done = python(source)
    assert (done.returncode, done.stderr) == (OUT_OF_MEMORY, f"{error}\n")


def test_an_engine_without_threads_says_so() -> None:
    """Before its imports by its exit code, later in words."""
    source = "import runpy, sys, threading\ndef no(self): raise RuntimeError(\"can't start new thread\")\n"
    source += "threading.Thread.start = no\nsys.argv = ['engine', '{\"parent\": 1, \"folder\": \"/nowhere\"}']\n"
    source += "runpy.run_module('ridgeline.engine.core.engine_process', run_name='__main__')"
    done = python(source)
    assert (done.returncode, done.stderr) == (OUT_OF_THREADS, "RuntimeError: can't start new thread\n")
    assert "ulimit -u" in OutOfMemoryKills(()).how_it_ended(OUT_OF_THREADS)


def test_an_engine_that_gets_no_threads_while_it_loads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: object) -> None:
        raise RuntimeError("can't start new thread")

    sent: list[Failed] = []
    monkeypatch.setattr(loop, "load", load)
    link: Any = SimpleNamespace(send=sent.append)
    assert loop.run({}, link) == 2
    assert sent[0].config and "ulimit -u" in sent[0].reason


COMMAND = "import sys; from ridgeline.__main__ import main; sys.exit(main())"
STACK = "import resource, sys; from ridgeline.process.platform import enlarge_stack; enlarge_stack(); " \
    "print(resource.getrlimit(resource.RLIMIT_STACK)[0] >> 10)"


@pytest.mark.reliability("R-14")
@pytest.mark.parametrize(("limit", "kib"), [("ulimit -Ss 256", 8192), ("ulimit -s 2000", 2000), ("ulimit -Ss 1024", 8192)])
def test_a_small_stack_is_raised(limit: str, kib: int) -> None:
    """By another start: threads of libraries have the size that was set when the program started."""
    assert python(STACK, before=limit).stdout == f"{kib}\n"


@pytest.mark.parametrize("executable", ["", "/no/such/python"])
def test_a_program_that_cannot_be_started_again_goes_on_with_its_stack(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    soft = 2 << 20
    monkeypatch.setattr(platform.resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(platform.resource, "setrlimit", lambda which, limits: None)
    monkeypatch.setattr(sys, "executable", executable)
    platform.enlarge_stack()
    soft = 512 << 10
    with pytest.raises(ConfigError, match="512 KiB here"):
        platform.enlarge_stack()


@pytest.mark.reliability("R-14")
def test_a_stack_that_must_stay_small_is_one_line_and_code_2() -> None:
    done = python(COMMAND, before="ulimit -s 512")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "ulimit -s" in done.stderr, done.stderr


@pytest.mark.reliability("R-14")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"), (OSError(24, "Too many open files"), "ulimit -n"),
        (OSError(28, "full"), "no space"),
        (OSError(12, "Cannot allocate memory"), "not enough memory"), (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_what_has_run_out_is_one_line_and_code_2(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "discard_output", lambda: None)
    assert command.main(["serve"]) == 2
    said = capfd.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_reason_of_any_length_is_a_line_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise ConfigError(f"a tensor has shape {[1] * 100_000}; what to do")

    monkeypatch.setattr(command, "run", run)
    assert command.main(["serve"]) == 2
    said = capfd.readouterr().err
    assert len(said) < 2100 and "a tensor has" in said and said.endswith("; what to do\n")


@pytest.mark.reliability("R-14")
def test_a_current_directory_that_was_removed_is_one_line_and_code_2(tmp_path: Path) -> None:
    """torch asks for it when it is imported."""
    (tmp_path / "gone").mkdir()
    asks = "import os; import ridgeline.__main__ as it; it.run = lambda argv: os.getcwd(); raise SystemExit(it.main(['eval']))"
    done = python(asks, before=f"cd {tmp_path}/gone; rmdir {tmp_path}/gone")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "current directory" in done.stderr, done.stderr


@pytest.mark.reliability("R-14")
def test_no_library_ends_a_command_whose_current_directory_was_removed(tmp_path: Path) -> None:
    """One of torch's did when it was imported, with words about itself."""
    (tmp_path / "gone").mkdir()
    imports = "import ridgeline.__main__ as it; from ridgeline.interrupt import import_module; " \
        "it.run = lambda argv: import_module('no_such_module'); raise SystemExit(it.main(['eval']))"
    done = python(imports, before=f"cd {tmp_path}/gone; rmdir {tmp_path}/gone")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "current directory" in done.stderr, done.stderr


@pytest.mark.reliability("R-14")
def test_a_file_that_may_not_grow_is_one_line_and_code_2(tmp_path: Path) -> None:
    writes = "import pathlib, ridgeline.__main__ as it; it.run = lambda argv: pathlib.Path(argv[0]).write_text('a' * 4096); " \
        f"raise SystemExit(it.main(['{tmp_path}/answers']))"
    done = python(writes, before="ulimit -f 1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "ulimit -f" in done.stderr, done.stderr


@pytest.mark.reliability("R-14")
@pytest.mark.parametrize("limit", ["unlimited", "8000000"])
def test_an_engine_with_a_limit_on_addresses_reserves_few(limit: str) -> None:
    """torch's allocator on ARM reserves 1 GiB: with `ulimit -v 2000000` nothing was left for the engine, with less it started."""
    begun = "import os; from ridgeline.process import head_start; head_start.begin(gpu=False); " \
        "print(os.environ.get('MIMALLOC_ARENA_RESERVE'))"
    done = python(begun, before=f"ulimit -v {limit}; unset MIMALLOC_ARENA_RESERVE")
    assert done.stdout.split() == ["None" if limit == "unlimited" else "64M"], done.stderr


def test_a_limit_on_addresses_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = (2 << 40, resource.RLIM_INFINITY)
    before = platform.available_memory()
    monkeypatch.setattr(platform.resource, "getrlimit", lambda which: limit)
    assert platform.available_memory() <= max(before * 2, before + 2**30)        # such a limit leaves what there is
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = (mapped + (64 << 20), resource.RLIM_INFINITY)
    assert platform.available_memory() <= 64 << 20
    limit = (1, resource.RLIM_INFINITY)
    assert platform.available_memory() == 0


def test_a_limit_on_data_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: data + (64 << 20)}
    monkeypatch.setattr(platform.resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    assert 0 < platform.available_memory() <= 80 << 20


@pytest.mark.reliability("R-12")
def test_a_kill_for_memory_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, other = tmp_path / "vmstat", tmp_path / "memory.events"
    counter.write_text("nr_free_pages 7\noom_kill 3\n")
    kills = OutOfMemoryKills((counter, other))
    assert kills.how_it_ended(-signal.SIGKILL) == "was killed by SIGKILL"
    other.write_text("low 0\noom 1\noom_kill 1\n")
    assert "ran out of memory" in kills.how_it_ended(-signal.SIGKILL)
    assert "ran out of memory" in kills.how_it_ended(OUT_OF_MEMORY)
    monkeypatch.setattr(platform.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert kills.how_it_ended(-signal.SIGSEGV) == "was killed by SIGSEGV"
    monkeypatch.setattr(platform.resource, "getrlimit", lambda which: (2**30, 2**30))
    assert "ulimit -v" in kills.how_it_ended(-signal.SIGABRT)
    assert "such as the model's, became shorter" in kills.how_it_ended(-signal.SIGBUS)
    assert "ulimit -t" in kills.how_it_ended(-signal.SIGXCPU)
    assert kills.how_it_ended(-40) == "was killed by signal 40" and kills.how_it_ended(3) == "ended with code 3"


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from pathlib import Path
from ridgeline.process.orphans import end_at_once, end_with_parent, may_clean_up
end_at_once()
end_with_parent(os.getppid(), lambda: Path(sys.argv[1]).unlink())
if sys.argv[2] == "loaded":
    may_clean_up()
print(os.getpid(), flush=True)
while True:
    sum(range(1000000))              # busy, and never looks
''', *sys.argv[1:]])
time.sleep(600)
"""


@pytest.mark.reliability("R-12")
@pytest.mark.parametrize("phase", ["loads", "loaded"])
def test_an_orphan_ends_whatever_it_does(phase: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(mark), phase], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)
    assert mark.exists() == (phase == "loads")           # the kernel leaves no time to clean up

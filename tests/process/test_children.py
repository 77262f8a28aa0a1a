"""Child processes import nothing from the current directory, and are told no secrets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_start
from served_model import one_thread
from tiny_models import save_checkpoint

from ridgeline.process import children
from ridgeline.process.children import child_environment, module_path, start_child

PACKAGE = Path(__file__).parents[2]
TRAP = "import os, pathlib; pathlib.Path(__file__).with_suffix('.imported').touch()\nraise ImportError('from the wrong place')\n"


def traps(folder: Path) -> None:
    for module in ("jinja2", "torch", "zmq", "numpy", "json"):
        (folder / f"{module}.py").write_text(TRAP)


def caught(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.imported"))


PROGRAM = """
import os, sys
sys.path.remove("")                                      # what this process imports is its own affair …
from ridgeline import LLM
from ridgeline.text import chat_template
sys.path.insert(0, "")                                   # … but a child would search there, too
chat_template.ChatTemplate({{"default": "hello"}}, {{}}).render([{{"role": "user", "content": ""}}])
if {parallel}:
    llm = LLM({model!r}, tensor_parallel_size=2, skip_tokenizer_init=True, num_gpu_blocks_override=20)
    llm.close()
else:
    import asyncio
    from ridgeline import AsyncLLM
    async def main():
        async with AsyncLLM({model!r}, skip_tokenizer_init=True, num_gpu_blocks_override=20):
            pass
    asyncio.run(main())
print("done")
"""


@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_is_imported_from_the_current_directory(tmp_path: Path, parallel: bool) -> None:
    model = save_checkpoint("llama", tmp_path / "model")
    folder = tmp_path / "here"
    folder.mkdir()
    traps(folder)
    program = PROGRAM.format(model=str(model), parallel=parallel)
    run = subprocess.run([sys.executable, "-c", program], cwd=folder, env=one_thread(), capture_output=True, text=True,
                         timeout=120)
    assert caught(folder) == [] and run.returncode == 0, run.stderr[-2000:]


def test_the_package_is_found_in_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that is not installed: its directory comes last, where it hides nothing."""
    monkeypatch.chdir(PACKAGE)
    monkeypatch.setattr(sys, "path", ["", str(PACKAGE), *sys.path])
    assert module_path()[-1] == str(PACKAGE) and "" not in module_path()
    assert module_path().count(str(PACKAGE)) == 1


@pytest.mark.reliability("R-12")
def test_a_child_starts_where_the_current_directory_was_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "release-1"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", "lib", *sys.path])
    gone.rmdir()
    assert module_path()[-1] == str(PACKAGE) and not {"", "lib"} & set(module_path())
    (tmp_path / "where.py").write_text("import os; print(os.getcwd())")      # as torch does when it is imported
    sys.path.append(str(tmp_path))
    child = start_child("where", stdout=subprocess.PIPE)
    assert child.communicate()[0] == b"/\n" and child.returncode == 0


def test_a_child_is_told_settings_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"OMP_NUM_THREADS": "3", "RIDGELINE_LOG": "WARNING", "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C",
            "RAY_USE_TLS": "1", "RAY_TLS_SERVER_KEY": "/key.pem"}
    kept = {"HF_TOKEN": "a", "RIDGELINE_API_KEY": "b", "AWS_SECRET_ACCESS_KEY": "c", "OPENAI_API_KEY": "d", "PYTHONPATH": "/e",
            "PYTHONSTARTUP": "/f"}
    for name, value in (told | kept).items():
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert told.items() <= environment.items() and not kept.keys() & environment.keys()


def test_a_child_finds_models_where_its_parent_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """`HF_HOME=… ridgeline serve Qwen/Qwen3-8B`: the engine looks the name up as well."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setenv(name, "/models")
        assert child_environment()[name] == "/models"


def test_the_child_has_its_own_session_and_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([os.getsid(0), os.getpid(), sys.argv[1:], sys.stdin.read(), sorted(os.environ)]))\n"
    )
    sys.path.append(str(tmp_path))
    try:
        child = start_child("probe", "x", environment={"A": "1"}, stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout as out:
            session, pid, arguments, given, names = json.loads(out.read())
        assert child.wait() == 0
    finally:
        sys.path.remove(str(tmp_path))
    assert session == pid == child.pid != os.getsid(0) and (arguments, given) == (["x"], "")
    assert set(names) - {"LC_CTYPE"} == {"A", "PYTHONPATH"}


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The process that forks, or where the tests have none one for this test alone."""
    if warm_start._zygote is not None:
        yield warm_start._zygote
        return
    monkeypatch.setattr(children, "subprocess", children.subprocess)     # `begin` replaces both
    monkeypatch.setattr(warm_start, "_zygote", None)
    warm_start.begin()
    own: Any = warm_start._zygote
    if own is None:
        pytest.skip("another system: all processes start cold")
    yield own
    own._socket.close()
    own._process.wait(60)


def test_a_forked_process_of_the_tests_is_like_one_that_was_started(warm: Any) -> None:
    """tests/helpers/cases/warm_start.py: it is this process's child, with its own words, streams and exit status."""
    before = warm.num_forked
    child = start_child("ridgeline.engine.ranks.rank", "{}", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    parent = psutil.Process(child.pid).ppid()
    _, said = child.communicate(timeout=200)
    if not warm.usable:
        pytest.skip("the imports started threads: all processes start cold")
    assert warm.num_forked == before + 1 and parent == os.getpid()
    assert child.returncode == 1 and said.splitlines()[-1] == b"KeyError: 'parent'"


def test_a_forked_command_says_and_returns_what_a_started_one_does(warm: Any) -> None:
    before, command = warm.num_forked, [sys.executable, "-m", "ridgeline", "serve", "--no-such-option"]
    forked = warm_start.run(command, 200, env=one_thread())
    if not warm.usable:
        pytest.skip("the imports started threads: all processes start cold")
    started = subprocess.run(command, capture_output=True, text=True, env=one_thread(), timeout=200)
    assert warm.num_forked == before + 1 and started.returncode == 2 and "--no-such-option" in started.stderr
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_a_forked_script_knows_how_it_would_be_started_again(warm: Any, tmp_path: Path) -> None:
    script = tmp_path / "words.py"
    script.write_text("import sys; print(sys.orig_argv)")
    command = [sys.executable, str(script), "a"]
    assert warm_start.run(command, 200, env=one_thread()).stdout == f"{command}\n"


def test_a_command_with_variables_that_libraries_read_is_started_cold(warm: Any) -> None:
    before = warm.num_forked
    done = warm_start.run([sys.executable, "-m", "ridgeline", "--version"], 200, env=one_thread() | {"OMP_NUM_THREADS": "3"})
    assert done.returncode == 0 and warm.num_forked == before


def test_the_end_of_a_process_that_forks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/conftest.py looks after every test, and fails where it is gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, subprocess.Popen(["sleep", "600"]) as process:
        waiting = warm_start._Zygote({}, ours, process)
        monkeypatch.setattr(warm_start, "_interpreter", waiting)
        assert waiting not in warm_start.ended()
        process.kill()
        process.wait(60)
        assert waiting in warm_start.ended()
    refused = warm_start._Zygote({}, ours, subprocess.Popen(["false"]))
    refused._process.wait(60)                            # its imports failed: no test has done that
    assert not refused.was_ended


STACKS = """
import faulthandler, signal, threading, time
def sleep_for_ever():
    while True:
        time.sleep(0.2)
faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
for _ in range(8):
    threading.Thread(target=sleep_for_ever, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def test_a_stopped_process_writes_its_stacks_from_its_main_thread() -> None:
    """Of nine threads that wake together, any could take a signal that is sent to the process."""
    with subprocess.Popen([sys.executable, "-c", STACKS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == b"ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        children.signal_main_thread(child, signal.SIGUSR1)
        os.kill(child.pid, signal.SIGCONT)
        stacks = child.stderr.read().decode().split("\n\n")
    (current,) = [each for each in stacks if each.startswith("Current thread")]
    assert "in <module>" in current and "in sleep_for_ever" not in current


def test_a_signal_to_a_process_that_has_ended_is_dropped() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        children.signal_main_thread(child, signal.SIGUSR1)

"""What a start begins beside its imports: nothing where the caches are filled, and nothing that it could not do without."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served_model import one_thread, wait_until

from ridgeline.errors import ConfigError
from ridgeline.process import head_start, platform
from ridgeline.process.cold import cold_start

ROOT = Path(__file__).parents[3]


class Begun:
    """What was started, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.error: OSError | None = None

    def child(self, module: str, *arguments: str, **options: Any) -> Any:
        return self.add("byte code")

    def server(self, count: int) -> Any:
        return self.add(count)

    def add(self, what: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.names.append(what)
        return SimpleNamespace(wait=lambda: 0)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begun]:
    """On a machine with a GPU, eight cores, Triton, and empty caches."""
    found = Begun()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / name / "__init__.py")))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path / "bytecode"))
    monkeypatch.setattr(platform, "cpu_count", lambda: 8)
    monkeypatch.setattr(platform, "available_memory", lambda: 2**40)
    monkeypatch.setattr(head_start, "has_driver", lambda: True)
    monkeypatch.setattr(cold_start, "start_child", found.child)
    monkeypatch.setattr(cold_start, "compilers", found.server)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    yield found
    cold_start.take_compilers()


def fill(folder: Path, entries: int = cold_start.A_WARM_CACHE) -> None:
    for number in range(entries):
        (folder / str(number)).mkdir(parents=True)


def test_a_cold_start_begins_both_and_gives_the_server_away_once(begun: Begun) -> None:
    cold_start.begin(gpu=True)
    assert begun.names == ["byte code", 8]
    assert cold_start.take_compilers() is not None and cold_start.take_compilers() is None


@pytest.mark.parametrize("entries", [0, 1, cold_start.A_WARM_CACHE - 1])
def test_a_cache_with_few_kernels_is_empty(begun: Begun, tmp_path: Path, entries: int) -> None:
    """The driver's library may be in it, or what a start left that was broken off."""
    fill(tmp_path / "triton", entries)
    cold_start.begin(gpu=True)
    assert begun.names == ["byte code", 8]


def test_a_warm_start_begins_nothing(begun: Begun, tmp_path: Path) -> None:
    fill(tmp_path / "triton")
    cached = Path(importlib.util.cache_from_source(str(tmp_path / "torch" / "__init__.py")))
    cached.parent.mkdir(parents=True)
    cached.touch()
    cold_start.begin(gpu=True)
    assert begun.names == []


def test_no_byte_code_where_python_may_write_none(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    cold_start.begin(gpu=True)
    assert begun.names == [8]


def test_no_byte_code_where_its_folder_cannot_be_written(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes would compile everything at each start, and throw it away."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    cold_start.begin(gpu=True)
    assert begun.names == [8]


def test_engines_that_start_at_once_share_the_cores(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(platform.ENGINES_HERE, "4")
    cold_start.begin(gpu=True)
    assert begun.names == ["byte code", 2]


@pytest.mark.parametrize(("limit", "expected"), [
    ("max 100000", ["byte code", 8]), ("200000 100000", []), ("550000 100000", ["byte code", 5]),
])
def test_the_cores_are_those_of_the_container(
    begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: list[Any]
) -> None:
    """Its limit of CPU time: it sees all cores of the machine."""
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(platform, "_CGROUP", tmp_path)
    cold_start.begin(gpu=True)
    assert begun.names == expected


def test_no_thread_for_the_end_of_the_byte_code(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    cold_start.begin(gpu=True)                           # a start goes on


def test_the_kernels_of_the_cache_directory_are_looked_at(
    begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    assert not cold_start.has_kernels()
    fill(tmp_path / "cache" / "triton")
    assert cold_start.has_kernels()

    def unusable() -> Path:
        raise ConfigError("no home")

    monkeypatch.setattr(platform, "cache_dir", unusable)
    assert cold_start.has_kernels()                      # the engine will say what is wrong


@pytest.mark.parametrize(("owner", "name", "answer", "expected"), [
    (head_start, "has_driver", False, ["byte code"]),
    (platform, "cpu_count", 4, ["byte code", 4]),
    (platform, "cpu_count", 3, []),
    (platform, "cpu_count", 64, ["byte code", 16]),
    (platform, "available_memory", 3_500_000_000, ["byte code", 3]),
    (platform, "available_memory", 900_000_000, ["byte code"]),
])
def test_no_more_than_the_machine_has_room_for(
    begun: Begun, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, answer: Any, expected: list[Any]
) -> None:
    monkeypatch.setattr(owner, name, lambda: answer)
    cold_start.begin(gpu=True)
    assert begun.names == expected


def test_an_engine_on_a_cpu_compiles_no_kernels(begun: Begun) -> None:
    cold_start.begin(gpu=False)
    assert begun.names == ["byte code"]


def test_a_start_goes_on_where_no_process_can_be_started(begun: Begun) -> None:
    begun.error = OSError("no more processes")
    cold_start.begin(gpu=True)
    assert begun.names == [] and cold_start.take_compilers() is None


def test_compilers_see_no_gpu_and_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second thread they could not be copied."""
    told: list[Any] = []
    monkeypatch.setattr(cold_start, "ForkServer", lambda *given: told.append(given))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kernels")
    cold_start.compilers(3)
    module, count, environment = told[0]
    assert importlib.util.find_spec(module) is not None and count == 3
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["TRITON_CACHE_DIR"] == "/kernels"
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


REAL = """
import os, sys, time
from ridgeline.process import head_start, platform
from ridgeline.process.cold import cold_start
platform.cpu_count, head_start.has_driver = lambda: 8, lambda: True
cold_start.has_byte_code = lambda: False
start, begun = cold_start.start_child, []
def start_child(*arguments, **options):
    begun.append(start(*arguments, **options))
    return begun[-1]
cold_start.start_child = start_child
cold_start.begin(gpu=True)
print(begun[0].pid, cold_start._compilers.process.pid, flush=True)
{then}
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("then", [
    "", "raise SystemExit(2)", "os._exit(1)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)",
])
def test_what_was_begun_ends_with_a_start_that_fails(tmp_path: Path, then: str) -> None:
    """However it ends, and while both are at work. Each is in a session of its own, so its number is that of a group."""
    told = {**one_thread(), "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPYCACHEPREFIX": str(tmp_path / "kept")}
    told["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", REAL.format(then=then)], env=told, stdout=subprocess.PIPE, timeout=120)
    groups = [int(word) for word in done.stdout.split()]
    assert len(groups) == 2
    wait_until(lambda: not any(map(has_processes, groups)))


WAITED_FOR = """
import os, time
from ridgeline.process import platform
from ridgeline.process.cold import cold_start
platform.cpu_count, cold_start.has_byte_code = lambda: 8, lambda: False
start, begun = cold_start.start_child, []
cold_start.start_child = lambda *arguments, **options: begun.append(start(*arguments, "json", **options)) or begun[0]
cold_start.begin(gpu=False)
while os.path.exists(f"/proc/{begun[0].pid}"):
    time.sleep(0.02)
"""


def test_the_process_that_compiles_is_waited_for(tmp_path: Path) -> None:
    """It would stay in the table of processes for as long as the engine lives."""
    told = {**one_thread(), "PYTHONPYCACHEPREFIX": str(tmp_path / "kept"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", WAITED_FOR], env=told, timeout=60, check=True)


def has_processes(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state not in "ZX":
                return True
    return False

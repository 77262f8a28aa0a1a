"""The supervisor when an engine's process cannot be started, with a child that is no process."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ridgeline.config import EngineConfig
from ridgeline.engine import ipc
from ridgeline.engine.client import engine_child, supervisor
from ridgeline.engine.client.engine_child import EngineChild
from ridgeline.engine.client.supervisor import Listener, Supervisor
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.core import loop
from ridgeline.engine.ipc import Ready
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.model_files import ServedFiles
from ridgeline.process import spare_files
from ridgeline.server.lifecycle import GOODBYE_SECONDS

RULES = Supervision(max_restarts=3, backoff=0.001, silence=0.0)
READY = Ready("m", 16, 4, 10, "float32", "cpu", 8, 16, 0.1)


class Child:
    """An engine that is ready at once. `errors` are raised by the next starts."""

    errors: list[Exception] = []     # noqa: RUF012 - each test sets its own

    def __init__(
        self, module: str, config: EngineConfig, on_message: Any, on_lost: Callable[[], None], sizes: Any, environment: Any
    ) -> None:
        if self.errors:
            raise self.errors.pop(0)
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.lost: asyncio.Future[Any] = loop.create_future()
        self.ready.set_result(READY)
        self.sizes = dict(sizes)

    async def stop(self, gently: bool = False, at_once: bool = False) -> None:
        pass


def make(monkeypatch: pytest.MonkeyPatch, replay: Callable[[bool], None] = lambda last: None) -> Supervisor:
    monkeypatch.setattr(supervisor, "EngineChild", Child)
    listener = Listener(lambda m: None, lambda r: None, lambda: None, replay, lambda e: None, lambda: 0)
    return Supervisor("module", EngineConfig.of(), RULES, listener)


async def nothing() -> None:
    pass


async def lose(engine: Supervisor) -> None:
    assert engine.process is not None
    engine.process.lost.set_result(EngineDead("it was killed"))
    await asyncio.sleep(0)


@pytest.mark.reliability("R-12")
@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), OSError(24, "Too many files"), RuntimeError("thread")])
def test_a_launch_that_fails_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        engine = make(monkeypatch)
        await engine.start(nothing)
        monkeypatch.setattr(Child, "errors", [error, error])
        await lose(engine)
        async with asyncio.timeout(60):
            while not (engine.is_up and engine.num_restarts):
                await asyncio.sleep(0.001)
        assert engine.state == "ok"
        await engine.shutdown()

    said: list[str] = []
    monkeypatch.setattr(supervisor.logger, "error", lambda text, *given: said.append(text % given))
    asyncio.run(scene())
    failed = [line for line in said if "cannot be started" in line]
    assert len(failed) == 2 and all("\n" not in line for line in failed)


@pytest.mark.reliability("R-12")
def test_the_next_engine_is_asked_for_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> list[Any]:
        engine = make(monkeypatch)
        monkeypatch.setattr(READY, "sizes", {"num_gpu_blocks_override": 77})
        await engine.start(nothing)
        seen = [engine.process.sizes]                    # type: ignore[union-attr]
        await lose(engine)
        async with asyncio.timeout(60):
            while not (engine.is_up and engine.num_restarts):
                await asyncio.sleep(0.001)
        seen.append(engine.process.sizes)                # type: ignore[union-attr]
        await engine.shutdown()
        return seen

    assert asyncio.run(scene()) == [{}, {"num_gpu_blocks_override": 77}]


@pytest.mark.reliability("R-12")
def test_no_engine_goes_on_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that was replaced while its model was served: a half of an answer would come from each."""
    async def scene() -> None:
        engine = make(monkeypatch)
        changed = [""]
        await engine.start(nothing, lambda: changed[0])
        first = engine.process
        await lose(engine)
        async with asyncio.timeout(60):
            while not (engine.is_up and engine.num_restarts):
                await asyncio.sleep(0.001)
        second = engine.process
        assert second is not first
        changed[0] = "the model's files in M were changed"
        await lose(engine)
        assert str(await engine.died()) == "it was killed; the model's files in M were changed" and engine.process is second
        await engine.shutdown()

    asyncio.run(scene())


@pytest.mark.reliability("R-12")
def test_files_that_do_not_answer_do_not_stop_the_supervision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network's file system: the server stayed `restarting`, and its requests waited, until it answered."""
    answers, asked = threading.Event(), list[int]()

    def changed() -> str:
        asked.append(1)
        answers.wait()
        return ""

    async def scene() -> None:
        engine = make(monkeypatch)
        monkeypatch.setattr(supervisor, "loading_limit", lambda first: 0.01)
        try:
            await engine.start(nothing, changed)
            await lose(engine)
            async with asyncio.timeout(60):
                died = await engine.died()
            assert str(died) == "the model's files could not be looked at within 0 s, after 3 restarts"
            assert len(asked) == RULES.max_restarts
        finally:
            answers.set()
            await engine.shutdown()

    asyncio.run(scene())


def test_a_revision_with_the_same_files_is_the_same_model(tmp_path: Path) -> None:
    """As the Hugging Face cache has them: a new page of the repository is a new folder of links."""
    def snapshot(name: str, weights: str) -> Path:
        folder = tmp_path / "snapshots" / name
        folder.mkdir(parents=True)
        for file, blob in (("config.json", "settings"), ("model.safetensors", weights)):
            (tmp_path / "blobs").mkdir(exist_ok=True)
            (tmp_path / "blobs" / blob).write_text(blob)
            os.utime(tmp_path / "blobs" / blob, ns=(1, 1))
            (folder / file).symlink_to(f"../../blobs/{blob}")
        return folder

    found = [snapshot("one", "w1")]
    files = ServedFiles(lambda: found[0])
    found[0] = snapshot("two", "w1")
    assert files.changed() == ""
    found[0] = snapshot("three", "w2")                   # as long, and as old
    assert str(found[0]) in files.changed()
    (found[0] / "config.json").unlink()
    (found[0] / "config.json").symlink_to("config.json")
    assert files.changed() == ""                         # an engine would say so itself


def test_files_of_a_model_that_were_changed(tmp_path: Path) -> None:
    config, weights, other = (tmp_path / name for name in ("config.json", "model.safetensors", "README.md"))
    config.write_text("{}")
    weights.write_bytes(b"one")
    found = [tmp_path]
    files = ServedFiles(lambda: found[0])
    assert files.changed() == ""
    other.write_text("a page")
    assert files.changed() == ""
    status = weights.stat()
    weights.write_bytes(b"two")                          # as long as before
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert str(tmp_path) in files.changed()
    weights.write_bytes(b"one")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files.changed() == ""
    found[0] = weights                                   # such as another revision of the same name
    assert files.changed()
    found[0] = tmp_path
    config.unlink()
    assert files.changed() == ""                         # an engine would say so itself


@pytest.mark.reliability("R-12")
@pytest.mark.parametrize("fits", [True, False])
def test_an_engine_has_the_sizes_of_the_one_before_if_they_fit(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def start(options: EngineConfig, progress: Any, pieces: Any) -> str:
        asked.append(options.cache.num_gpu_blocks_override)
        if options.cache.num_gpu_blocks_override and not fits:
            raise ConfigError("too much")
        return "a core"

    monkeypatch.setattr(loop.EngineCore, "start", start)
    assert loop._started({"kv_cache_memory_bytes": 10**6}, {"num_gpu_blocks_override": 9}, lambda *_: None) == "a core"
    assert asked == ([9] if fits else [9, None])


@pytest.mark.reliability("R-12")
def test_launches_that_keep_failing_are_the_end_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> str:
        engine = make(monkeypatch)
        await engine.start(nothing)
        monkeypatch.setattr(Child, "errors", [OSError(errno.EMFILE, "Too many open files")] * 50)
        await lose(engine)
        reason = await asyncio.wait_for(engine.died(), 60)
        assert engine.state == "dead"
        await engine.shutdown()
        return str(reason)

    reason = asyncio.run(scene())
    assert "cannot be started" in reason and "after 3 restarts" in reason and "ulimit -n" in reason


@pytest.mark.reliability("R-12")
def test_supervision_that_fails_itself_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(last: bool) -> None:
        raise ValueError("a fault of ours")

    async def scene() -> str:
        engine = make(monkeypatch, replay=faulty)
        await engine.start(nothing)
        await lose(engine)
        return str(await asyncio.wait_for(engine.died(), 60))

    assert "a fault of ours" in asyncio.run(scene())


def test_a_first_launch_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        engine = make(monkeypatch)
        monkeypatch.setattr(Child, "errors", [OSError(errno.EMFILE, "Too many open files")])
        with pytest.raises(ConfigError, match="ulimit -n"):
            await engine.start(nothing)

    asyncio.run(scene())


@pytest.mark.parametrize("site", ["start_child", "pidfd_open", "thread"])
def test_a_child_that_cannot_be_made_leaves_nothing(site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    start_child = engine_child.start_child

    def sleeper(module: str, *given: str, **options: Any) -> Any:
        if site == "start_child":
            raise OSError(errno.EAGAIN, "no process left")
        started.append(start_child("this", *given))
        return started[0]

    class NoThread:
        def __init__(self, **options: Any) -> None:
            raise RuntimeError("can't start new thread")

    def no_descriptor(pid: int) -> int:
        raise OSError(errno.ENOSYS if site == "thread" else errno.EMFILE, site)

    monkeypatch.setattr(engine_child, "start_child", sleeper)
    monkeypatch.setattr(engine_child.os, "pidfd_open", no_descriptor, raising=False)
    monkeypatch.setattr(engine_child.threading, "Thread", NoThread)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scene() -> None:
        before = psutil.Process().num_fds()
        with pytest.raises((OSError, RuntimeError)):
            EngineChild("ridgeline.no.such.module", EngineConfig.of(), lambda m: None, lambda: None)
        assert psutil.Process().num_fds() == before

    asyncio.run(scene())
    assert not list(tmp_path.iterdir()) and all(child.poll() is not None for child in started)


@pytest.mark.reliability("R-12")
@pytest.mark.parametrize("has_descriptors", ["yes", "not the kernel", "not Python"])
def test_the_end_of_an_engine_is_noticed_without_a_thread_where_the_kernel_can(
    monkeypatch: pytest.MonkeyPatch, has_descriptors: str
) -> None:
    """Thread.start() never returns if memory is too short for the thread's first line: the event loop would stand still."""
    def no_descriptor(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    def hang(self: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    if has_descriptors == "yes":
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (OSError, AttributeError):
            pytest.skip("this kernel or Python has no descriptors of processes")
        monkeypatch.setattr(threading.Thread, "start", hang)
    elif has_descriptors == "not Python":
        monkeypatch.delattr(engine_child.os, "pidfd_open", raising=False)
    else:
        monkeypatch.setattr(engine_child.os, "pidfd_open", no_descriptor, raising=False)
    monkeypatch.setattr(engine_child, "start_child", lambda module, *given, **options: subprocess.Popen(["sleep", "600"]))

    async def scene() -> str:
        gc.collect()                                     # what earlier tests have left open
        before = psutil.Process().num_fds()
        child = EngineChild("module", EngineConfig.of(), lambda m: None, lambda: None)
        os.kill(child.pid, signal.SIGKILL)
        lost = await asyncio.wait_for(asyncio.shield(child.lost), 60)
        await asyncio.wait_for(child.stop(), 60)
        assert psutil.Process().num_fds() == before
        return str(lost)

    assert "SIGKILL" in asyncio.run(scene())


@pytest.mark.reliability("R-05")
def test_a_stopped_engine_is_gone_within_three_seconds_of_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(engine_child._STOP_SECONDS) + GOODBYE_SECONDS < 3

    def sleeper(module: str, *given: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"])

    monkeypatch.setattr(engine_child, "start_child", sleeper)

    async def scene() -> int | None:
        child = EngineChild("module", EngineConfig.of(), lambda m: None, lambda: None)
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.wait_for(child.stop(gently=True), 60)
        return child._child.returncode

    assert asyncio.run(scene()) == -signal.SIGKILL


@pytest.mark.reliability("R-12")
def test_without_the_temporary_folder_another_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone, other = tmp_path / "gone", tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    monkeypatch.setattr(ipc, "_OTHER_FOLDERS", (str(other),))
    monkeypatch.setattr(ipc, "_LONGEST_FOLDER", 500)
    sockets = ipc.SocketDir()
    assert sockets.path.parent == other
    sockets.close()


def test_spare_files_are_free_while_they_are_lent() -> None:
    def held() -> int:
        return len([os.fstat(kept) for kept in spare_files._kept])       # an error, if one were not open

    spare_files.keep(5)
    try:
        assert held() == 5
        given = list(spare_files._kept)
        with spare_files.lent():
            assert held() == 0
            with pytest.raises(OSError):
                for kept in given:                       # others may have taken some of the numbers meanwhile, not all of them
                    os.fstat(kept)
            with spare_files.lent():
                pass
            assert held() == 0                           # the inner one has not taken them back
        assert held() == 5
    finally:
        spare_files.keep(0)
    assert held() == 0

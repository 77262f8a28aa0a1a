"""Fixtures shared by the tests."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import quick_interpreter
import warm_start
from hypothesis import HealthCheck, settings
from reliability_rows import EVERY_COMMIT

from ridgeline.process import children, embedded, platform

# A shell without a terminal starts background processes with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# With nohup they inherit that of SIGHUP. A handler is not inherited: the tests go on, and their servers can be hung up.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# An example may take as long as it does on a busy machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Workers divide the files of a fresh clone: to rewrite the assertions of all takes 20 s of processor time, and each finds in
    the cache what another has written."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers == 1 or sys.dont_write_bytecode:
        return
    number = int(config.workerinput["workerid"].removeprefix("gw"))  # type: ignore[attr-defined]
    folders = {(config.invocation_params.dir / each).absolute() for each in config.args}
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    for file in files[number::workers]:
        with suppress(Exception):                        # in another pytest, without rewriting, or in a file that is no Python
            _rewrite(file, config)


def _rewrite(file: Path, config: pytest.Config) -> None:
    from _pytest.assertion import rewrite

    kept = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
    if rewrite.try_makedirs(kept.parent) and rewrite._read_pyc(file, kept) is None:
        made = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], made[1], made[0], kept)


@pytest.hookimpl(optionalhook=True)      # of pytest-xdist, which a GPU machine may not have
def pytest_xdist_auto_num_workers() -> int:
    """Three workers on two cores: tests wait a sixth of their time, for processes that they have started, sockets or a clock."""
    cores = platform.cpu_count()
    return cores + min(cores // 2, 4)


class _ReadWhenUsed(ModuleType):
    """What `import` gives for a package until a test looks into it, in the worker that runs that test."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")) and name != "__path__":      # pytest and `inspect` ask everything for these
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: looking for garbage in it takes a second of every worker. The clients' packages
    take three seconds of each."""
    for name in ("anthropic", "openai"):
        if importlib.util.find_spec(name) is not None:
            sys.modules.setdefault(name, _ReadWhenUsed(name))
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)      # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests of the rows that every commit must pass get the marker that `make test-reliability` selects."""
    for item in items:
        rows = {promise[:4] for mark in item.iter_markers("reliability") for promise in mark.args}
        if rows & EVERY_COMMIT and item.get_closest_marker("slow") is None:
            item.add_marker("every_commit")


def pytest_collection_finish() -> None:
    """Work that tests would repeat thousands of times.

    Modules and test items stay to the end, so no garbage collection needs to look at them: engines and benchmarks start many
    collections, of half a second each. For the same reason a benchmark must not take them out of the frozen set again.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    if transports := sys.modules.get("httpx._transports.default"):
        # Every httpx.get and httpx.post reads all certificates of the machine anew: 50 ms, and tests send thousands.
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)
        for name in ("connect", "read", "write", "pool"):                # a busy machine may take longer than the usual 5 s
            setattr(sys.modules["httpx._config"].DEFAULT_TIMEOUT_CONFIG, name, 60.0)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        # pytest adds two handlers to every logger that passes nothing on, and removes them, three times a test. torch has 40.
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    if comparison := sys.modules.get("torch.testing._comparison"):
        # No test compares tensors of this kind; to ask for it, torch imports 0.8 s of modules in every process that compares any.
        comparison._HAS_DTENSOR = False  # type: ignore[attr-defined]
    warm_start.name_triton()
    if os.environ.get("TRITON_INTERPRET") == "1":
        quick_interpreter.install()
    elif {"ridgeline.engine.client.engine_child", "ridgeline.engine.ranks.rank_processes", "served_model"} & sys.modules.keys():
        warm_start.begin()
    if grammar_check := sys.modules.get("ridgeline.engine.client.grammar_check"):
        # So may a grammar: its limit of CPU time stays, and those of wall-clock time that a test makes short.
        _wait_for_grammars(grammar_check)


def _wait_for_grammars(grammar_check: Any) -> None:
    compile_within = grammar_check.GrammarChecker._compile

    def patiently(self: Any, asked: Any, seconds: float, try_seconds: float = 0.0) -> Any:
        return compile_within(self, asked, 60.0 if seconds > 0.5 else seconds, try_seconds)

    grammar_check.GrammarChecker._compile = patiently


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """SmolLM2-135M-Instruct; `make install` has fetched it."""
    return embedded.require()


@pytest.fixture
def run_script() -> Any:
    """`warm_start.run`, for files that start themselves as scripts: without the tests' paths they could not import it."""
    return warm_start.run


@pytest.fixture
def run_interpreted() -> Any:
    """The same with Triton's interpreter."""
    warm_start.begin_interpreter()

    def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        return warm_start.run(command, timeout=800, env={**os.environ, "TRITON_INTERPRET": "1", **variables})

    return run


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start as users start them, with all imports."""
    monkeypatch.setattr(children, "subprocess", subprocess)


@pytest.fixture
def all_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bodies are read in a process: each is long, and none is read in the server's because it is the only one."""
    monkeypatch.setattr("ridgeline.server.long_bodies.is_long", lambda *_: True)
    monkeypatch.setattr("ridgeline.server.long_bodies.LONG_BYTES", 0)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """The next test starts as if it were alone. An engine with kernels=reference switches them for the whole process. A command
    makes its log quiet, also in the environment, for its child processes. A script that a test imports puts folders on the path,
    and a benchmark raises the limit on files: with either changed, every later process of this worker would start cold
    (warm_start.py). So it would without the process that others are forked from."""
    path, files, ended = sys.path[:], resource.getrlimit(resource.RLIMIT_NOFILE), warm_start.ended()
    log, variables = logging.getLogger("ridgeline"), _variables()
    level = log.level
    yield
    log.setLevel(level)
    if (now := _variables()) != variables:
        os.environ.update(variables)
        for name in now.keys() - variables.keys():
            del os.environ[name]
    sys.path[:] = path
    if resource.getrlimit(resource.RLIMIT_NOFILE) != files:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    if registry := sys.modules.get("ridgeline.ops.registry"):
        registry.set_kernels("auto")
    # A signal takes a moment to end a process, so it may have been the test before.
    assert warm_start.ended() <= ended, "this test, or the one before, has ended the process that others are forked from"

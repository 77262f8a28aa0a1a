"""Tensor parallel executors when things go wrong: the reason is one line, in seconds, and nothing is left behind."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.distributed.meet import meet
from ridgeline.engine.core import executor as executor_module
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.ipc import PLAN, PREPARE, RUN, STOP
from ridgeline.engine.ranks import rank as rank_module
from ridgeline.engine.ranks import rank_processes as ranks_module
from ridgeline.engine.ranks import rank_watch
from ridgeline.engine.ranks.rank import run_plans
from ridgeline.errors import EngineDead
from ridgeline.messages import Request, StepPlan
from ridgeline.models.decoder import Decoder
from ridgeline.process import children
from ridgeline.resolve import ResolvedConfig
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("executor"))


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("exact"), dtype=torch.float64, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And no test waits for the network to give up: its limit is longer than a test may take."""
    monkeypatch.setattr(meet, "__defaults__", ("gloo", 3600.0, False, False))
    folder = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))        # short: a socket's path has 107 characters
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before, "a rank is left"
    assert not list(folder.glob("ridgeline-*")), "the sockets' directory is left"
    shutil.rmtree(folder)
    assert not dist.is_initialized()


def start(model: Path, **mesh: int) -> EngineCore:
    return EngineCore.start(EngineConfig.of(
        model=str(model), max_num_seqs=2, num_gpu_blocks_override=20, device="cpu", **mesh or {"tensor_parallel_size": 2}
    ))


def ask(core: EngineCore, name: str) -> None:
    core.add(Request(name, [5, 6, 7], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)))


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "ridgeline.engine.ranks.rank" in child.cmdline()]


def test_graphs_go_before_the_ranks_and_their_communicator() -> None:
    """NCCL's communicator would wait for them without end, on every rank."""
    calls: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.release = self.close = lambda: calls.append(name)

    executor = executor_module.RankedExecutor.__new__(executor_module.RankedExecutor)
    executor._forward, executor._comm = Part("graphs"), Part("communicator")         # type: ignore[assignment]
    executor.runner = SimpleNamespace(drafter=Part("draft model's graphs"))          # type: ignore[assignment]
    executor._end = lambda: calls.append("ranks")                                    # type: ignore[assignment]
    executor.close()
    assert calls == ["graphs", "draft model's graphs", "ranks", "communicator"]


class Steps:
    """A runner that only notes what it is asked to do, and has two graphs to capture."""

    def __init__(self, depth: int = 1) -> None:
        self.calls: list[str] = []
        self.left, self.rows = 2, SimpleNamespace(depth=depth)
        self.submit = lambda plan: self.calls.append("submit")
        self.sample = lambda masks=None: self.calls.append("sample")
        self.collect = lambda: self.calls.append("collect")

    def prepare(self) -> bool:
        self.calls.append("prepare")
        self.left -= 1
        return self.left >= 0


def test_a_rank_prepares_when_it_is_told_to() -> None:
    """It collects as late as rank 0, so steps may be left that rank 0 has collected long ago."""
    none = np.zeros(0, np.int32)
    plan = PLAN.encode(StepPlan(0, none, [], none.reshape(0, 4), none, none, none.astype(np.int8)))
    frames = iter([(RUN, plan), (PREPARE, b""), (RUN, plan), (STOP, b"")])
    runner = Steps()
    run_plans(runner, SimpleNamespace(receive=lambda: next(frames), steps=0), Communicator())        # type: ignore[arg-type]
    assert runner.calls == ["submit", "sample", "collect", "prepare", "submit", "sample"]


def test_all_ranks_prepare_until_nothing_is_left() -> None:
    sent: list[bytes] = []
    executor = executor_module.RankedExecutor.__new__(executor_module.RankedExecutor)
    executor.runner, executor._graphs, executor._prepared = Steps(), True, False     # type: ignore[assignment]
    executor._ranks = SimpleNamespace(check=lambda: None, send=lambda *frames: sent.append(frames[0]), named=nullcontext)
    assert [executor.prepare() for _ in range(5)] == [True, True, False, False, False]
    assert sent == [PREPARE] * 3, "ranks are not woken for nothing"
    executor._graphs = False
    assert not executor.prepare() and len(sent) == 3


def test_a_rank_that_is_killed_ends_the_engine(model: Path) -> None:
    core = start(model)
    ask(core, "a")
    for _ in range(3):
        core.step()
    (rank,) = ranks()
    assert os.getsid(rank.pid) == rank.pid, "Ctrl-C would reach the rank"
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1 ended with code -9"):
        while True:
            core.step()
    for act in (core.step, lambda: ask(core, "b")):
        with pytest.raises(EngineDead, match="the engine has stopped: rank 1 ended with code -9"):
            act()
    core.close()
    core.close()


def test_a_rank_that_dies_in_a_collective_is_named(model: Path) -> None:
    """It is stopped, so that rank 0 waits for it in the middle of a step, and then killed."""
    core = start(model)
    ask(core, "a")
    core.step()
    (rank,) = ranks()
    rank.suspend()
    if (child := os.fork()) == 0:
        time.sleep(0.5)
        os.kill(rank.pid, signal.SIGKILL)
        os._exit(0)
    with pytest.raises(EngineDead, match="rank 1 ended with code -9"):
        while True:
            core.step()
    os.waitpid(child, 0)
    core.close()


def test_a_rank_that_hangs_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped and nothing ends it, so that rank 0 would wait for it for as long as the network lets it: an hour here."""
    monkeypatch.setattr(rank_watch, "SILENT_SECONDS", 2.5)
    core = start(model)
    ask(core, "a")
    core.step()
    ranks()[0].suspend()
    with pytest.raises(EngineDead, match="rank 1 gave no sign of life for 2 s and was ended"):
        while True:
            core.step()
    core.close()


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stage_that_dies_is_named(model: Path, stages: int) -> None:
    """The first one, which is the last rank. With three, the one between them loses its connection and says so, too."""
    core = start(model, pipeline_parallel_size=stages)
    ask(core, "a")
    ask(core, "b")
    for _ in range(4):
        core.step()
    first = next(each for each in ranks() if f'"rank": {stages - 1}' in " ".join(each.cmdline()))
    first.kill()
    with pytest.raises(EngineDead, match=f"rank {stages - 1} ended with code -9"):
        while True:
            core.step()
    core.close()


@pytest.mark.parametrize(("waited", "slow"), [
    ({0: 18.0, 1: 0.5}, 1), ({0: 0.3, 1: 17.0, 2: 16.0}, 0),     # the others wait for it …
    ({0: 18.0, 1: 3.0}, 1),                                      # … which waits, too, on a busy machine
    ({0: 9.0, 1: 9.0}, None), ({0: 0.0, 1: 0.0}, None),          # they keep step; they are idle
    ({0: 0.5, 1: 19.0, 2: 1.0, 3: 1.0}, None), ({0: 1.0}, None), # most do not wait; there is only one
])
def test_the_rank_that_others_wait_for(waited: dict[int, float], slow: int | None) -> None:
    assert rank_watch.straggler(waited, 20.0) == slow


def test_a_slow_rank_is_named_within_seconds_and_then_once_a_minute() -> None:
    """One pause is not enough. Here rank 1 pauses once, in the third window, and is slow from the fifth on."""
    slow, waited, named = rank_watch.SlowRanks(), {0: 0.0, 1: 0.0}, []
    for window in range(30):
        now = 5.0 * window
        waited[0] += 4.5 if window == 3 or window >= 5 else 0.2
        waited[1] += 0.2
        if (rank := slow.look(waited, now)) is not None:
            named.append((rank, now))
        assert slow.look(waited, now + 1.0) is None          # a window has not passed
    assert named == [(1, 30.0), (1, 90.0)]


@pytest.mark.slow
def test_a_slow_rank_of_a_real_engine_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_watch, "_WINDOW_SECONDS", 1.5)
    monkeypatch.setattr(ranks_module, "start_child", children_with({"1": {"every": "slow"}}))
    monkeypatch.setattr(logging.getLogger("ridgeline"), "propagate", True)
    core = start(model)
    asked = 0
    while "is slow" not in caplog.text and asked < 9:        # of 6 s each
        ask(core, str(asked := asked + 1))
        while core.has_work:
            core.step()
    core.close()
    assert "rank 1 is slow: the others wait for it most of the time" in caplog.text


def test_a_rank_that_does_not_leave_is_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_LEAVE_SECONDS", 0.5)
    core = start(model)
    (rank,) = ranks()
    rank.suspend()
    core.close()
    assert not rank.is_running()


@pytest.mark.parametrize(("wrong", "reason"), [
    ({"model": "/nowhere"}, "rank 1 failed: model /nowhere does not exist"),
    pytest.param({"max_num_seqs": 0}, "rank 1 failed: max_num_seqs must be at least 1", marks=pytest.mark.slow),
])
def test_a_rank_that_cannot_start(model: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], reason: str) -> None:
    class Pinned:
        def __init__(self, config: ResolvedConfig) -> None:
            self.options = pinned(config).flat() | wrong

        def flat(self) -> dict[str, Any]:
            return self.options

    pinned = ResolvedConfig.pinned
    monkeypatch.setattr(ResolvedConfig, "pinned", lambda config: Pinned(config))
    with pytest.raises(EngineDead, match=reason):
        start(model)


def test_a_rank_that_dies_while_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed once it has joined: rank 0 loads to the end, and then does not wait for it."""
    made = executor_module.make_runner

    def kill_first(*args: Any) -> Any:
        ranks()[0].kill()
        time.sleep(0.2)
        return made(*args)

    monkeypatch.setattr(executor_module, "make_runner", kill_first)
    with pytest.raises(EngineDead, match="rank 1 ended with code -9"):
        start(model)


def test_rank_zero_that_fails_takes_the_others_along(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no memory here")

    monkeypatch.setattr(executor_module, "make_runner", fail)
    monkeypatch.setattr(ranks_module, "_LEAVE_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="no memory here"):
        start(model)


def children_with(faults: dict[str, dict[str, str]]) -> Callable[..., Any]:
    """What starts ranks with these faults, by rank."""
    def start_child(module: str, given: str, environment: dict[str, str]) -> Any:
        assert module == "ridgeline.engine.ranks.rank"
        return children.start_child("test_executor", given, json.dumps(faults), environment=environment)

    return start_child


def plant(steps: dict[str, str]) -> None:
    """In this process: the n-th step that is submitted has no memory at this place: before its first collective, between two of
    them, or behind the last. Or every step is slow."""
    seen, where = [0], [""]
    submit, sample, logits_here = Runner.submit, Runner.sample, Decoder.logits_here

    def fail(place: str) -> None:
        if where[0] == place:
            where[0] = ""
            raise MemoryError(f"planted at {place}")

    def submitting(self: Runner, plan: Any) -> None:
        seen[0] += 1
        where[0] = steps.get(str(seen[0]), "")
        if steps.get("every") == "slow":
            time.sleep(0.2)
        fail("begin")
        submit(self, plan)

    def heading(self: Decoder, rows: Any) -> Any:
        fail("middle")
        return logits_here(self, rows)

    def sampling(self: Runner, masks: Any = None) -> None:
        sample(self, masks)
        fail("end")

    Runner.submit, Runner.sample, Decoder.logits_here = submitting, sampling, heading    # type: ignore[method-assign]


def answers_of(core: EngineCore) -> dict[str, list[int]]:
    """Of requests of several kinds, two at a time, to their end."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 5}, {"temperature": 1.0, "presence_penalty": 0.5},
    )
    for number, kind in enumerate(kinds):
        core.add(Request(str(number), [5 + number, 6, 7], SamplingParams(seed=number, max_tokens=14, ignore_eos=True, **kind)))
    found: dict[str, list[int]] = {}
    while core.has_work:
        for delta in core.step():
            assert not delta.error
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found


@pytest.mark.reliability("R-08")
@pytest.mark.parametrize(("ranks", "faults"), [
    (2, {"1": {"3": "middle", "8": "begin", "13": "end"}}),
    pytest.param(2, {"0": {"3": "begin", "8": "end"}, "1": {"5": "end"}}, marks=pytest.mark.slow),
    pytest.param(4, {"2": {"4": "middle"}, "3": {"4": "middle", "9": "end"}, "0": {"12": "begin"}}, marks=pytest.mark.slow),
])
def test_all_ranks_drop_the_step_that_one_has_no_memory_for(
    ranks: int, faults: dict[str, dict[str, str]], exact_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its begin, between two collectives, or behind the last: the engine goes on, and every answer is the same."""
    options = {"model": str(exact_model), "dtype": "float64", "max_num_seqs": 2, "num_gpu_blocks_override": 20, "device": "cpu"}
    alone = EngineCore.start(EngineConfig.of(**options))
    expected = answers_of(alone)
    alone.close()

    for owner, name in ((Runner, "submit"), (Runner, "sample"), (Decoder, "logits_here")):
        monkeypatch.setattr(owner, name, getattr(owner, name))       # back to these afterwards
    monkeypatch.setattr(ranks_module, "start_child", children_with(faults))
    core = EngineCore.start(EngineConfig.of(**options, tensor_parallel_size=ranks))
    plant(faults.get("0", {}))
    assert answers_of(core) == expected
    failures = {int(step) for each in faults.values() for step in each}
    assert core.scheduler.counters.out_of_memory == len(failures)
    core.close()


if __name__ == "__main__":                           # a rank with faults of its own
    faults_here = json.loads(sys.argv[2]).get(str(json.loads(sys.argv[1])["rank"]), {})
    plant(faults_here)
    sys.exit(rank_module.main(sys.argv[1]))

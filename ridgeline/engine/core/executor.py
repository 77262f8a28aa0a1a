"""Executors carry out plans: in this process, or in this one and others that share every layer.

submit() launches a plan's forward pass, sample() its sampling, collect() brings the oldest result. Rank 0 is always
here; with tensor parallelism each plan is sent to the other ranks first, and they run it in step.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import zmq

from ridgeline.distributed.comm import Communicator, ProcessGroup
from ridgeline.engine.ipc import PLAN, SocketDir
from ridgeline.errors import EngineDead
from ridgeline.messages import StepPlan, StepResult
from ridgeline.process.children import child_environment, start_child
from ridgeline.resolve import ResolvedConfig
from ridgeline.runner.worker import make_runner

Progress = Callable[[int, int], None]
STOP = b""                           # the frame that ends a rank
_POLL_MS = 100                       # how often ranks are looked at while one waits for them
_SEND_SECONDS = 10.0                 # a rank that takes no plan for so long is lost
_LEAVE_SECONDS = 5.0                 # what ranks get to end by themselves


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> None: ...

    def sample(self, masks: Any = None) -> None: ...

    def collect(self) -> StepResult: ...

    def prepare(self) -> bool: ...

    def start_over(self) -> bool:
        """Forget all rows and the step that could not be launched. False: that cannot be done here."""

    def close(self) -> None: ...


class LocalExecutor:
    """Everything in this process."""

    def __init__(self, config: ResolvedConfig, progress: Progress | None = None) -> None:
        self.runner = make_runner(config, Communicator(), progress)
        self.submit = self.runner.submit
        self.sample = self.runner.sample
        self.collect = self.runner.collect
        self.prepare = self.runner.prepare
        self.start_over = self.runner.start_over

    def close(self) -> None:
        """Nothing outlives the process."""


class Ranks:
    """The processes of the ranks above 0, and the sockets to them. No call here waits for a rank that has ended."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.size = config.options.parallel.tensor_parallel_size
        self._sockets = SocketDir()
        self.store = self._sockets.path / "store"
        self._context = zmq.Context()
        self._links: list[zmq.Socket[bytes]] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._reached: dict[int, str] = {}               # rank -> the last thing it said it had done
        try:
            self._start(config)
        except BaseException:
            self.end()
            raise

    def _start(self, config: ResolvedConfig) -> None:
        self._reports = self._context.socket(zmq.PULL)
        self._reports.bind(self._sockets.address("reports"))
        environment = {"OMP_NUM_THREADS": "1"} | child_environment()
        for rank in range(1, self.size):
            link = self._context.socket(zmq.PUSH)
            link.bind(self._sockets.address(f"rank-{rank}"))
            self._links.append(link)
            settings = {
                "options": config.pinned().flat(), "rank": rank, "size": self.size, "store": str(self.store),
                "address": self._sockets.address(f"rank-{rank}"), "reports": self._sockets.address("reports"),
                "parent": os.getpid(),
            }
            self._children.append(start_child("ridgeline.engine.core.rank", json.dumps(settings), environment=environment))

    def check(self) -> None:
        """EngineDead when a rank has ended, with its own last words if it had any."""
        while self._reports.poll(0):
            rank, reached, reason = json.loads(self._reports.recv())
            if reason:
                raise EngineDead(f"rank {rank} failed: {reason}")
            self._reached[rank] = reached
        for number, process in enumerate(self._children, 1):
            if process.poll() is not None:
                if self._reports.poll(_POLL_MS):
                    return self.check()                  # what it said as it ended says more
                raise EngineDead(f"rank {number} ended with code {process.returncode}")

    def wait(self, reached: str) -> None:
        """Until every rank has said so. A rank may take as long as it needs, but not die."""
        while True:
            self.check()
            if sum(said == reached for said in self._reached.values()) == len(self._children):
                return
            self._reports.poll(_POLL_MS)

    def send(self, frame: bytes) -> None:
        deadline = time.monotonic() + _SEND_SECONDS
        for number, link in enumerate(self._links, 1):
            while not _sent(link, frame):
                self.check()
                if time.monotonic() > deadline:
                    raise EngineDead(f"rank {number} takes no more plans")
                link.poll(_POLL_MS, zmq.POLLOUT)

    @contextmanager
    def named(self) -> Iterator[None]:
        """A collective fails when a rank is gone: then say which, not what the network thinks of it."""
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + 1.0            # the connection may break a moment before the process is gone
            while time.monotonic() < deadline:
                try:
                    self.check()
                except EngineDead as reason:
                    raise reason from error
                time.sleep(_POLL_MS / 1000)
            raise

    def end(self) -> None:
        """However things stand: no process, socket or file is left, within seconds. A second call does nothing."""
        for link in self._links:
            _sent(link, STOP)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._children:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        self._links, self._children = [], []
        self._context.destroy(linger=0)
        self._sockets.close()


def _sent(link: zmq.Socket[bytes], frame: bytes) -> bool:
    try:
        link.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


class TensorParallelExecutor:
    """Rank 0 here, the others in processes of their own, all fed the same plans."""

    def __init__(self, config: ResolvedConfig, progress: Progress | None = None) -> None:
        self._ranks = ranks = Ranks(config)
        self._comm: ProcessGroup | None = None
        self._end = weakref.finalize(self, ranks.end)    # also without close(): at exit at the latest

        def watched(done: int, total: int) -> None:
            ranks.check()
            if progress is not None:
                progress(done, total)

        try:
            ranks.wait("started")                        # a missing rank would be waited for without end
            with ranks.named():
                backend = "gloo" if config.device == "cpu" else "nccl"
                self._comm = ProcessGroup(0, ranks.size, ranks.store, backend)
                self.runner = make_runner(config, self._comm, watched)
            ranks.wait("loaded")
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> None:
        self._ranks.check()
        self._ranks.send(PLAN.encode(plan))
        with self._ranks.named():
            self.runner.submit(plan)

    def sample(self, masks: Any = None) -> None:
        with self._ranks.named():
            self.runner.sample(masks)

    def collect(self) -> StepResult:
        with self._ranks.named():
            return self.runner.collect()

    def prepare(self) -> bool:
        return False                                     # every rank would have to, in step

    def start_over(self) -> bool:
        return False                                     # the others wait for this one, in the middle of a layer

    def close(self) -> None:
        self._end()
        if self._comm is not None:
            self._comm.close()
            self._comm = None


def make_executor(config: ResolvedConfig, progress: Progress | None = None) -> Executor:
    parallel = config.options.parallel.tensor_parallel_size > 1
    return TensorParallelExecutor(config, progress) if parallel else LocalExecutor(config, progress)

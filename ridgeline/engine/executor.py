"""Executors: where plans are carried out. In this process, or in this one and others that share every layer.

submit() launches a plan's forward pass, sample() its sampling, collect() brings the oldest result. Rank 0 is always
here; with tensor parallelism each plan is sent to the other ranks first, and they obey it in step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from ridgeline.distributed.comm import Communicator, ProcessGroup
from ridgeline.engine.ipc import PLAN, SocketDir
from ridgeline.errors import EngineDead
from ridgeline.messages import StepPlan, StepResult
from ridgeline.resolve import ResolvedConfig
from ridgeline.runner.worker import make_runner

Progress = Callable[[int, int], None]
_STOP = b""                          # the frame that ends a rank


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> None: ...

    def sample(self, masks: Any = None) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


class LocalExecutor:
    """Everything in this process."""

    def __init__(self, config: ResolvedConfig, progress: Progress | None = None) -> None:
        self._runner = make_runner(config, Communicator(), progress)
        self.submit = self._runner.submit
        self.sample = self._runner.sample
        self.collect = self._runner.collect

    def close(self) -> None:
        """Nothing outlives the process."""


class TensorParallelExecutor:
    """Rank 0 here, the others in processes of their own, all fed the same plans."""

    def __init__(self, config: ResolvedConfig, progress: Progress | None = None) -> None:
        size = config.options.parallel.tensor_parallel_size
        self._sockets = SocketDir()
        self._context = zmq.Context()
        self._links: list[zmq.Socket[bytes]] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        store = self._sockets.path / "store"
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        for rank in range(1, size):
            link = self._context.socket(zmq.PUSH)
            link.bind(self._sockets.address(f"rank-{rank}"))
            self._links.append(link)
            settings = {
                "options": config.pinned().flat(), "rank": rank, "size": size, "store": str(store),
                "address": self._sockets.address(f"rank-{rank}"),
            }  # fmt: skip
            command = [sys.executable, "-m", "ridgeline.engine.rank", json.dumps(settings)]
            self._ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment))
        backend = "gloo" if config.device == "cpu" else "nccl"
        self._comm = ProcessGroup(0, size, store, backend)
        self._runner = make_runner(config, self._comm, progress)
        self.sample = self._runner.sample
        self.collect = self._runner.collect

    def submit(self, plan: StepPlan) -> None:
        for number, process in enumerate(self._ranks, 1):
            if process.poll() is not None:
                raise EngineDead(f"rank {number} ended with code {process.returncode}")
        frame = PLAN.encode(plan)
        for link in self._links:
            link.send(frame)
        self._runner.submit(plan)

    def close(self) -> None:
        for link in self._links:
            link.send(_STOP)
        for process in self._ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._comm.close()
        self._context.destroy(linger=0)
        self._sockets.close()


def make_executor(config: ResolvedConfig, progress: Progress | None = None) -> Executor:
    parallel = config.options.parallel.tensor_parallel_size > 1
    return TensorParallelExecutor(config, progress) if parallel else LocalExecutor(config, progress)

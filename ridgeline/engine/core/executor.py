"""Executors carry out plans: in this process, or in this one and others that divide the model.

submit() launches a plan's forward pass, sample() its sampling, collect() brings the oldest result. Rank 0 is always here, with
the last layers and the sampler. Each plan is sent to the other ranks first, and they run it in step.

In a pipeline several steps are under way at once, each on another stage. What rows have sampled comes back to the first stage
with `said`; the scheduler plans such a row again only after its step was collected.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ridgeline.distributed.comm import Communicator
from ridgeline.distributed.meet import ProcessMesh, meet
from ridgeline.engine.ipc import PLAN, PREPARE, RUN, SAID, SAID_TOKENS, Said
from ridgeline.engine.ranks.rank_processes import Ranks
from ridgeline.engine.ranks.rank_wire import interface_of
from ridgeline.messages import StepPlan, StepResult
from ridgeline.resolve import ResolvedConfig
from ridgeline.runner.forward import Forward
from ridgeline.runner.worker import make_runner

Progress = Callable[[int, int], None]


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


class RankedExecutor:
    """Rank 0 here, the others in processes of their own, all fed the same plans."""

    def __init__(self, config: ResolvedConfig, progress: Progress | None = None) -> None:
        self._ranks = ranks = Ranks(config)
        self._comm: ProcessMesh | None = None
        self._forward: Forward | None = None
        self._graphs, self._prepared = config.graphs, False      # is nothing left to prepare since the last step?
        self._starts = 0                                 # how often all have started over
        self._end = weakref.finalize(self, ranks.end)    # also without close(): at exit at the latest

        def watched(done: int, total: int) -> None:
            ranks.check()
            if progress is not None:
                progress(done, total)

        try:
            ranks.wait("started")                        # a missing rank would be waited for without end
            with ranks.named():
                self._comm = join(config, 0, ranks.joining)
                self.runner = make_runner(config, self._comm, watched)
                self._forward = self.runner.forward
            ranks.wait("loaded")
            ranks.watch(self._comm)
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> None:
        self._prepared = False
        self._ranks.check()
        self._ranks.require_memory()
        self._ranks.send(RUN, PLAN.encode(plan))
        with self._ranks.named():
            self.runner.submit(plan)

    def sample(self, masks: Any = None) -> None:
        with self._ranks.named():
            self.runner.sample(masks)

    def collect(self) -> StepResult:
        with self._ranks.named():
            result = self.runner.collect()
        self._ranks.require()                            # what a step brings that was given up is nothing
        return result

    def prepare(self) -> bool:
        """Ranks have had the same plans, so each has the same left to do. Captures alone would not have to be in step; the steps
        that are rehearsed have collectives."""
        if not self._graphs or self._prepared:
            return False
        self._ranks.check()
        self._ranks.send(PREPARE)
        with self._ranks.named():
            more = self.runner.prepare()
        self._prepared = not more
        return more

    def start_over(self) -> bool:
        """Ranks wait for each other in the middle of a layer: all leave the mesh, and meet again."""
        if self._comm is None or not self._comm.can_rejoin:
            return False
        self._starts += 1
        name = f"again-{self._starts}"
        self._comm.leave()
        self.runner.start_over()
        self._ranks.start_over(name)
        with self._ranks.named():
            self._comm.rejoin(name)
        return True

    def close(self) -> None:
        if self._forward is not None:
            self._forward.release()                      # before anything that waits for a communicator's end
            self.runner.drafter.release()
        self._end()
        if self._comm is not None:
            self._comm.close()
            self._comm = None


class PipelineExecutor(RankedExecutor):
    """The last stage is here. On a CPU a step occupies this process while it runs, and while it waits for the stages before: so
    it runs here only when its result is asked for, and the stages before have the next plans meanwhile."""

    def __init__(self, config: ResolvedConfig, progress: Progress | None = None) -> None:
        super().__init__(config, progress)
        self._late = config.device == "cpu"
        self._flights: deque[StepPlan] = deque()
        self._masks: deque[Any] = deque()                # of those that run late
        self.most_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        self._flights.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self._flights))
        if self._late:
            self._ranks.check()
            self._ranks.send(RUN, PLAN.encode(plan))
        else:
            super().submit(plan)

    def sample(self, masks: Any = None) -> None:
        if self._late:
            self._masks.append(masks)
        else:
            super().sample(masks)

    def collect(self) -> StepResult:
        plan = self._flights.popleft()
        if self._late:
            self._ranks.check()
            with self._ranks.named():
                self.runner.submit(plan)
                self.runner.sample(self._masks.popleft())
        result = super().collect()
        self._say(plan, result)
        return result

    def _say(self, plan: StepPlan, result: StepResult) -> None:
        """The first stage goes on from sampled tokens. With drafts all stages want to know how many were accepted. Rows that a
        later plan has given to other sequences are left out."""
        taken = [added.row for later in self._flights for added in later.added]
        new = np.flatnonzero((result.num_new > 0) & ~np.isin(plan.rows, taken))
        if not len(new):
            return
        shape = self._ranks.shape
        said = Said(plan.rows[new], result.tokens[new, result.num_new[new] - 1], result.lengths[new])
        stages = range(1 if plan.width is None else shape.pipeline - 1)
        self._ranks.send(SAID, SAID_TOKENS.encode(said), to=[rank for stage in stages for rank in shape.of_stage(stage)])


def join(config: ResolvedConfig, rank: int, given: Mapping[str, Any]) -> ProcessMesh:
    """The mesh of this engine's ranks, once all have come. `given`: where they meet, and what this one has there."""
    parallel = config.options.parallel
    backend = "gloo" if config.device == "cpu" else "nccl"
    if given.get("own_address"):                         # several machines: gloo would look up the host's name instead
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(given["own_address"]))
    mesh = meet(
        parallel.mesh, rank, given["store"], backend, divide_experts=parallel.enable_expert_parallel,
        divide_context=parallel.decode_context_parallel_size > 1,
    )
    mesh.device_index = given.get("device_index")
    return mesh


def make_executor(config: ResolvedConfig, progress: Progress | None = None) -> Executor:
    parallel = config.options.parallel
    if parallel.pipeline_parallel_size > 1:
        return PipelineExecutor(config, progress)
    return RankedExecutor(config, progress) if parallel.num_ranks > 1 else LocalExecutor(config, progress)

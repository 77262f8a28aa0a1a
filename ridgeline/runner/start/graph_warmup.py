"""Captures CUDA graphs for common batch shapes while idle, so that no request waits for a capture.

A graph is captured when its shape comes for the second time (cuda_graphs.py), and a server's first busy minute brings all of
them: of 1,000 requests that arrived at once on an H200, the first run took 20.2 s and the second 18.6.

Decodes of every size and single prompts, sampled and greedy, the smallest first: a request that comes meanwhile is probably
alone. Shapes that have been used are left out. An idle scheduler has no rows, so the runner's rows are free. They write to
block 0, which no sequence owns: the blocks of the sequences that had these rows before may be in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.process.log import get_logger
from ridgeline.runner.cuda_graphs import GraphForward
from ridgeline.runner.memory_errors import is_out_of_memory
from ridgeline.runner.runner import Runner
from ridgeline.runner.start.kernel_steps import KernelStep, run_step
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import GraphShapes

logger = get_logger("graphs")


class Rehearsal:
    def __init__(
        self, runner: Runner, forward: GraphForward, num_groups: int, max_rows: int, max_step_tokens: int, max_model_len: int
    ) -> None:
        self._runner, self._forward, self._num_groups = runner, forward, num_groups
        self._shapes = GraphShapes(max_rows, max_step_tokens)
        decodes = [[1] * size for size in self._shapes.decodes if size <= max_step_tokens]
        prompts = [[size] for size in self._shapes.prompt_tokens if size < max_model_len]
        self._steps = self._unknown([decodes[0], *prompts, *decodes[1:]])

    def go_on(self) -> bool:
        """One step; the forward pass will capture it in the next idle moment. False: nothing is left."""
        step = next(self._steps, None)
        if step is None:
            return False
        rows = np.arange(len(step.counts))
        self._runner.remove(rows)                        # their sequences have ended, as the next plan will say
        try:
            run_step(self._runner, self._num_groups, step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("no memory to capture CUDA graphs of %d rows ahead of requests", len(rows))
            self._runner.start_over()
            self._steps = iter(())
            return False
        self._runner.remove(rows)
        return True

    def _unknown(self, counts: list[list[int]]) -> Iterator[KernelStep]:
        for tokens in counts:
            prompts = int(tokens[0] > 1)
            shape = self._shapes.fit(len(tokens) * (1 - prompts), prompts, tokens[0] * prompts)
            for greedy in (False, True):
                if shape is not None and self._forward.is_new(shape, greedy):
                    yield KernelStep(tokens, params=SamplingParams(temperature=0.0 if greedy else 1.0), used=True)

"""Captures CUDA graphs for common batch shapes before the first request, and what is left while idle.

Launched kernel by kernel, a decode step of an 8B model on an H200 takes the host longer than the device, and a capture takes as
long again: after a deploy, every user would meet the shapes of the first busy minute like that.

Decodes of every size and single prompts, greedy and sampled, and decodes with drafts; of prompts beside decodes, and of decodes
behind a shared prefix, only some sizes, which stand in for all others. Likely ones come first, the smallest before larger ones:
a request that comes meanwhile is probably alone. Of decodes with drafts those come first that stand in for most others. With
many rows there are more of the rest than graphs are kept: all numbers of decodes, which drafts are measured against, come
before it. Last come prompts beside decodes for which a larger graph stood in. Shapes that have been used are left out. An idle
scheduler has no rows, so the runner's rows are free. They write to block 0, which no sequence owns: the blocks of the sequences
that had these rows before may be in the prefix cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np

from ridgeline.distributed.comm import Communicator
from ridgeline.process.log import get_logger
from ridgeline.runner.cuda_graphs import MOST_PADDING, GraphForward
from ridgeline.runner.memory_errors import is_out_of_memory
from ridgeline.runner.runner import Runner
from ridgeline.runner.shared_prefix import FEWEST_ROWS, NoSharedPrefixes
from ridgeline.runner.start.kernel_steps import KernelStep, run_step, shared_past
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import USUAL_PROMPT, GraphShapes, Shape

logger = get_logger("graphs")

COMMON = {1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512} # tokens of the steps that are captured first, and those of `covering`

SHARED = {32, 128, 512}                              # numbers of decodes that are captured behind a shared prefix, too


def covering(sizes: list[int]) -> set[int]:
    """As few of these numbers of decodes as hold every other one with little padding (cuda_graphs.py lets them stand in)."""
    found: set[int] = set()
    for size in sorted(sizes):
        if not any(size <= each <= MOST_PADDING * size for each in found):
            found.add(max(each for each in sizes if each <= MOST_PADDING * size))
    return found


class Rehearsal:
    def __init__(
        self, runner: Runner, forward: GraphForward, num_groups: int, max_rows: int, max_step_tokens: int, max_model_len: int,
        comm: Communicator | None = None, most_verified: int = 0, most_prompt: int = USUAL_PROMPT,
    ) -> None:
        """`comm`: of several ranks, which capture the same steps at the same time."""
        self._comm = comm or Communicator()
        self._runner, self._forward, self._num_groups = runner, forward, num_groups
        self._max_rows, self._longest = max_rows, max_model_len - 1
        self._tried: set[tuple[Shape, bool]] = set()     # of those that larger graphs stood in for
        self._full = False                               # no memory is left
        self._shapes = GraphShapes(max_rows, max_step_tokens, most_verified, most_prompt)
        decodes = [[1] * size for size in self._shapes.decodes if size <= max_step_tokens]
        prompts = [[size] for size in self._shapes.prompt_tokens if size < max_model_len]
        common = COMMON | covering([len(step) for step in decodes])
        likely = [step for step in (*prompts, *decodes[1:]) if (len(step) if step[0] == 1 else step[0]) in common]
        more_decodes, more_prompts = ([step for step in steps if step not in likely] for steps in (decodes[1:], prompts))
        self._steps: Iterator[KernelStep] = itertools.chain(
            self._unknown([decodes[0]]), self._shared(max_model_len, True), self._unknown(likely),
            self._drafted(self._shapes.wide(), True), self._mixed(True), self._mixed(False), self._shared(max_model_len, False),
            self._drafted(self._shapes.wide(), False), self._unknown(more_decodes), self._drafted(self._shapes.drafted(), True),
            self._drafted(self._shapes.drafted(), False), self._unknown(more_prompts),
        )

    def before_ready(self, seconds: float) -> int:
        """Captures for that long; returns how many."""
        began, count = time.monotonic(), 0
        while self._comm.agree(time.monotonic() - began < seconds) and self.go_on():
            count += 1
        return count

    def go_on(self) -> bool:
        """One step, captured. False: nothing is left."""
        step = next(self._steps, None)
        if step is None:
            self._steps = self._wanted()                 # by what has run since
            step = next(self._steps, None)
        if step is None:
            return False
        rows = np.arange(len(step.counts))
        self._runner.remove(rows)                        # their sequences have ended, as the next plan will say
        try:
            with self._forward.at_first_use():
                run_step(self._runner, self._num_groups, step)
        except Exception as error:
            if not is_out_of_memory(error) or self._comm.size > 1:   # other ranks wait for this one, in the middle of a step
                raise
            logger.warning("no memory to capture CUDA graphs of %d rows ahead of requests", len(rows))
            self._runner.start_over()
            self._steps, self._full = iter(()), True
            return False
        self._runner.remove(rows)
        return True

    def _unknown(self, counts: list[list[int]]) -> Iterator[KernelStep]:
        for tokens in counts:
            prompts = int(tokens[0] > 1)
            shape = self._shapes.fit(len(tokens) * (1 - prompts), prompts, tokens[0] * prompts)
            for greedy in (True, False):
                if shape is not None and self._forward.is_new(shape, greedy):
                    yield KernelStep(tokens, params=_sampled(greedy), used=True)

    def _shared(self, max_model_len: int, greedy: bool) -> Iterator[KernelStep]:
        """Decodes behind one prefix: of the most rows, and of SHARED."""
        if all(isinstance(prefixes, NoSharedPrefixes) for prefixes in self._runner.rows.prefixes):
            return
        params = _sampled(greedy)
        for size in reversed(self._shapes.decodes):
            wanted = size >= FEWEST_ROWS and (size in SHARED or size == self._shapes.decodes[-1])
            if wanted and shared_past(size) < max_model_len - 1 and self._forward.is_new(Shape(size), greedy, shares_prefix=True):
                yield KernelStep([1] * size, shared_past(size), params=params, used=True)

    def _drafted(self, shapes: list[Shape], greedy: bool) -> Iterator[KernelStep]:
        """Of each shape with drafts a step that fills it."""
        for shape in shapes:
            if shape.decodes <= self._max_rows and shape.queries <= self._longest and self._forward.is_new(shape, greedy):
                yield KernelStep([1] * shape.decodes, params=_sampled(greedy), used=True, widths=_filling(shape))

    def _mixed(self, greedy: bool) -> Iterator[KernelStep]:
        """Prompts beside decodes. Not with several ranks: there no graph stands in for others."""
        if self._comm.size > 1:
            return
        for shape in self._shapes.mixed(self._forward.launch_bound):
            yield from self._beside(shape, greedy)

    def _wanted(self) -> Iterator[KernelStep]:
        """Each once, whatever came of it."""
        for found in self._forward.wanted():
            if not self._full and found not in self._tried:
                self._tried.add(found)
                yield from self._beside(*found)

    def _beside(self, shape: Shape, greedy: bool) -> Iterator[KernelStep]:
        """A step of that shape, or of the largest that prompts of this model can fill."""
        tokens = min(shape.prompt_tokens, shape.prompts * self._longest)
        each, more = divmod(tokens, shape.prompts)
        own = self._shapes.fit(shape.decodes, shape.prompts, tokens)
        if each > 1 and own is not None and self._forward.is_new(own, greedy):
            prompts = [each + 1] * more + [each] * (shape.prompts - more)
            yield KernelStep([1] * shape.decodes + prompts, params=_sampled(greedy), used=True)


def _sampled(greedy: bool) -> SamplingParams:
    return SamplingParams(temperature=0.0 if greedy else 1.0)


def _filling(shape: Shape) -> tuple[int, ...]:
    """Drafts of each row, which are all of the shape's tokens: the first has the most that one may have."""
    widths, left = [], shape.draft_tokens - shape.decodes
    for row in range(shape.decodes):
        own = min(left, shape.queries - 1) if row == 0 else min(-(-left // (shape.decodes - row)), shape.queries - 1)
        widths.append(own)
        left -= own
    return tuple(widths)

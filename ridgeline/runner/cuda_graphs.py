"""Steps as CUDA graphs: one launch instead of hundreds.

Decodes always gain from a graph; prompts do while launching takes longer than computing. A graph is captured for a shape
(numbers of rows and tokens; smaller steps are padded to it) and for its output: the greedy tokens, or the logits. Everything
a graph reads has a fixed address: weights, KV pages, block tables, and the step's integers, which staging puts at the same
place for the same shape. True lengths are read from there.

Likely shapes are captured before the engine is ready, as many as there is time for, and the rest while it is idle
(graph_warmup.py). A capture takes the host about as long as launching the step kernel by kernel, and that is several times what a
device computes on few tokens. So a larger graph stands in for a shape that has none yet (`StandIns`). Where none can, a shape of
few tokens is captured at its first use. With more, launches hide behind what the device computes: such a shape is launched at
first, and captured when it comes again, or while the engine is idle, the shape used last first. All graphs share one memory pool,
for they never run at once. Their memory is taken with the first of them (memory_pools.py).
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.layers.batch import Batch
from ridgeline.messages import StepPlan
from ridgeline.metrics import HAPPENED
from ridgeline.process.log import get_logger
from ridgeline.runner.device_rows import EVERY_HIDDEN, leading_decodes
from ridgeline.runner.forward import Computed, EagerForward
from ridgeline.runner.memory_errors import is_out_of_memory
from ridgeline.runner.start import memory_pools
from ridgeline.sizes.graph_shapes import USUAL_PROMPT, GraphShapes, Shape

logger = get_logger("graphs")

USES = 1                             # before a shape is captured …
AT_ONCE = 256                        # … with more tokens of prompts than this; others are at their first use
STAND_INS = 8                        # uses of a larger graph, before a shape has its own …
SPACING = 512                        # … and, up to AT_ONCE tokens, steps since the last capture: seconds for some 25 ms
MOST_PADDING = 1.5                   # of steps whose own shape is not captured yet …
PASSING_USES, PASSING_PADDING = 2, 4     # … of decodes at first: a shape may not come again
FEW_PADDING = 2.0                    # … with drafts, and of prompts up to AT_ONCE tokens
FEW_TOKENS, FEW_MIXED = 64, 384      # … or up to this many tokens with drafts, or with prompts: weights bind them
MOST_GRAPHS = 256                    # the one unused for longest makes room; the driver keeps 1 MiB for each (8B)


@contextmanager
def without_collection() -> Iterator[None]:
    """The garbage of an earlier engine may hold memory and graphs of the device: to free them breaks a capture off."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    computed: Computed


@dataclass(slots=True)
class _Seen:
    batch: Batch
    uses: int = 0                    # that were launched
    no_memory: bool = False          # a capture had none: it is tried at every second use, and not while the engine is idle
    rests: bool = False              # not at the next one


_Key = tuple[Shape, bool, tuple[bool, ...]]              # shape, greedy, groups with a shared prefix
_Form = tuple[Shape, bool, bool]                         # shape, greedy, any group with a shared prefix


def _form(key: _Key) -> _Form:
    shape, greedy, prefixes = key
    return shape, greedy, any(prefixes)


class StandIns:
    """Which graph runs a step: its own, or a larger one that is captured while its own is not.

    Padding costs less than a capture, for which all running requests would wait. A shape of few tokens, which is bound by the
    weights it reads, has its own captured in a step only if none was for long. With more tokens padding costs more.
    """

    def __init__(self, launch_bound: int = USUAL_PROMPT) -> None:
        """`launch_bound`: beyond as many tokens a step with prompts computes for longer than its kernels take to launch."""
        self.launch_bound = launch_bound
        self.forms: Counter[_Form] = Counter()           # captured graphs
        self.uses: Counter[tuple[Shape, bool]] = Counter()       # of larger ones, by the shape that had none and greedy
        self._steps = self._captured_at = 0

    def choose(self, shape: Shape, greedy: bool, shares: bool) -> Shape:
        """`shares`: will rows share a prefix?"""
        self._steps += 1
        # Decodes behind a shared prefix alone: rows that shared one in a step without a graph may go on here.
        if self._has(shape, greedy, shares) or (not shape.prompts and self._has(shape, greedy, True)):
            return shape
        larger = None if self._is_due(shape, greedy) else self._larger(shape, greedy, shares)
        if larger is None:
            return shape
        self.uses[shape, greedy] += 1
        return larger

    def captured(self, form: _Form) -> None:
        self.forms[form] += 1
        self._captured_at = self._steps
        del self.uses[form[:2]]

    def came_often(self, shape: Shape, greedy: bool) -> bool:
        return self.uses[shape, greedy] >= STAND_INS

    def _is_due(self, shape: Shape, greedy: bool) -> bool:
        return self.came_often(shape, greedy) and (shape.tokens > AT_ONCE or self._steps - self._captured_at >= SPACING)

    def _has(self, shape: Shape, greedy: bool, shares: bool) -> bool:
        """For rows that are all greedy. Others may still turn out to be, with the rows that this step adds: for both. With drafts
        no row is added."""
        if shape.draft_tokens:
            return self.forms[shape, greedy, False] > 0
        return bool(self.forms[shape, True, shares] and (greedy or self.forms[shape, False, shares]))

    def _larger(self, shape: Shape, greedy: bool, shares: bool) -> Shape | None:
        most = self._most_tokens(shape, greedy)
        found = {each for each, *_ in self.forms if each.tokens <= most and each.holds(shape) and self._has(each, greedy, shares)}
        return min(found, key=lambda each: (each.tokens, each.queries, each.decodes), default=None)

    def _most_tokens(self, shape: Shape, greedy: bool) -> float:
        if shape.draft_tokens:
            return max(FEW_TOKENS, FEW_PADDING * shape.tokens)
        if shape.prompts:
            many = shape.prompt_tokens > AT_ONCE
            most = MOST_PADDING * shape.tokens + FEW_TOKENS if many else max(FEW_MIXED, FEW_PADDING * shape.tokens)
            return min(most, self.launch_bound)
        return shape.tokens * (PASSING_PADDING if self.uses[shape, greedy] < PASSING_USES else MOST_PADDING)


class GraphForward:
    def __init__(
        self, eager: EagerForward, max_rows: int, max_step_tokens: int, vocab_size: int, dtype: torch.dtype,
        device: torch.device, num_bytes: int = 0, most_verified: int = 0, stand_ins: bool = True,
        beside: GraphForward | None = None, most_prompt: int = USUAL_PROMPT, launch_bound: int = USUAL_PROMPT,
    ) -> None:
        """`num_bytes`: what the largest graphs take. `most_verified`: tokens of decodes with drafts in a graph. `stand_ins`:
        may a step use a larger graph than its own? Not where other ranks, with other graphs, must have the same shape.
        `beside`: the graphs of another model, whose memory pool these share. `most_prompt`: tokens of prompts in a graph.
        `launch_bound`: see StandIns."""
        self._stand_ins = stand_ins
        self.eager = eager
        self._shapes = GraphShapes(max_rows, max_step_tokens, most_verified, most_prompt)
        self._shape: Shape | None = None                 # of the step that is about to run
        self._waiting: OrderedDict[_Key, _Seen] = OrderedDict()      # used, not captured yet; the last use last
        self._captured: OrderedDict[_Key, _Captured] = OrderedDict()
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside._pool
        self._memory = device, num_bytes if beside is None else 0
        num_logits = max(max_rows, most_verified)
        self._logits = torch.empty((num_logits, vocab_size), dtype=dtype, device=device)     # of the graph that ran last
        self._choice = StandIns(launch_bound)
        self._uses = USES
        self.replays = 0
        self.stood_in = False                            # does a larger graph than its own run the newest step? …
        self.passing = False                             # … and has that been so for few steps? See Forward

    @contextmanager
    def at_first_use(self) -> Iterator[None]:
        """Shapes that come meanwhile are captured at once: no request is waiting."""
        self._uses = 0
        try:
            yield
        finally:
            self._uses = USES

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        own = self._own_shape(plan)
        self._shape, self.stood_in, self.passing = own, False, False
        if own is not None and self._stand_ins and self._uses:
            self._shape = self._choice.choose(own, greedy, self._shares_prefix())
            self.stood_in = self._shape != own
            self.passing = self.stood_in and not self._choice.came_often(own, greedy)
        return self._shape

    def _own_shape(self, plan: StepPlan) -> Shape | None:
        if (plan.want & EVERY_HIDDEN).any():
            return None
        decodes = leading_decodes(plan)
        if plan.width is None:
            return self._shapes.fit(decodes, len(plan.rows) - decodes, plan.total_tokens - decodes)
        if decodes < len(plan.rows):                     # drafts beside a prompt are launched kernel by kernel
            return None
        return self._shapes.fit_drafts(decodes, plan.total_tokens, 1 + int(plan.width.max()))

    def _shares_prefix(self) -> bool:
        """Did the rows of the graph that ran last share a prefix? Most of them decode again: so will those of the next step. This
        may be wrong behind a step that was launched kernel by kernel."""
        return any(next(reversed(self._captured))[2]) if self._captured else False

    def run(self, batch: Batch, greedy: bool) -> Computed:
        if self._shape is None:
            return self.eager.run(batch, greedy)
        key = (self._shape, greedy, tuple(group.prefix is not None for group in batch.groups))
        captured = self._captured.get(key)
        if captured is None:
            seen = self._waiting.setdefault(key, _Seen(batch))
            if seen.rests or seen.uses < self._uses_before(self._shape, greedy):
                seen.uses, seen.rests = seen.uses + 1, False
                self._waiting.move_to_end(key)
                return self.eager.run(batch, greedy)
            captured = self._capture_shape(key, batch, seen)
            if captured is None:
                return self.eager.run(batch, greedy)
        self._captured.move_to_end(key)
        captured.graph.replay()
        self.replays += 1
        return captured.computed

    def _uses_before(self, shape: Shape, greedy: bool) -> int:
        """A shape is captured, at once if a larger one has stood in for it often. Where another has to go for it, and the device
        is waited for, it must come more often. With several ranks it is launched once before: a capture that failed on one of
        them alone has never been tried."""
        if self._choice.came_often(shape, greedy):
            return 0
        if self._uses and len(self._captured) >= MOST_GRAPHS:
            return STAND_INS
        return self._uses if shape.prompt_tokens > AT_ONCE or not self._stand_ins else 0

    def prepare(self) -> bool:
        """Capture the shape that was used last, while there is room; only run() replaces older graphs."""
        found = next(((key, seen) for key, seen in reversed(self._waiting.items()) if not seen.no_memory), None)
        if found is None or len(self._captured) >= MOST_GRAPHS:
            return False
        with torch.inference_mode():
            self._capture_shape(found[0], found[1].batch, found[1])
        return True

    def release(self) -> None:
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
        self._waiting.clear()
        self._choice = StandIns(self.launch_bound)

    @property
    def launch_bound(self) -> int:
        return self._choice.launch_bound

    def wanted(self) -> list[tuple[Shape, bool]]:
        """Shapes with prompts, and whether greedy, that larger ones have stood in for, most often first. Others are captured
        ahead by their sizes (graph_warmup.py)."""
        return [each for each, _ in self._choice.uses.most_common() if each[0].prompts]

    def is_new(self, shape: Shape, greedy: bool, shares_prefix: bool = False) -> bool:
        """Is it worth capturing before its first use? Room must be left for shapes that will be used."""
        form = (shape, greedy, shares_prefix)
        known = any(_form(key) == form for keys in (self._captured, self._waiting) for key in keys)
        return not known and len(self._captured) < MOST_GRAPHS * 7 // 8

    def _capture_shape(self, key: _Key, batch: Batch, seen: _Seen) -> _Captured | None:
        """Capture the step instead of running it. The values in the batch do not matter.

        None: it has to run eagerly. There is too little memory, or it has never run, and what loads a kernel for the first time
        (a library's, too) may not be captured.
        """
        shape, greedy, *_ = key
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._waiting.pop(key, None)
        try:
            with torch.cuda.stream(self._stream), without_collection():
                computed = self._capture(graph, batch, greedy)
        except Exception as error:
            if not is_out_of_memory(error):
                if seen.uses:
                    raise
                seen.uses += 1
                self._waiting[key] = seen
                logger.info("%s is captured once it has run: %s", shape, error)
                return None
            if not seen.no_memory:
                logger.warning("no memory to capture a CUDA graph for %s; such steps are launched kernel by kernel", shape)
            seen.no_memory = seen.rests = True
            self._waiting[key] = seen
            return None
        if len(self._captured) == MOST_GRAPHS:
            torch.cuda.synchronize()                     # it may be running
            oldest, _ = self._captured.popitem(last=False)
            self._choice.forms[_form(oldest)] -= 1
        self._captured[key] = _Captured(graph, computed)
        self._choice.captured(_form(key))
        HAPPENED["graph_recording"] += 1
        logger.debug("captured %s, %s", shape, "greedy" if greedy else "logits")
        return self._captured[key]

    def _capture(self, graph: torch.cuda.CUDAGraph, batch: Batch, greedy: bool) -> Computed:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            if not self._captured and self._memory[1]:   # a pool begins with its first graph
                memory_pools.take(*self._memory)
            computed = self.eager.run(batch, greedy)
            if computed.logits is not None:              # its memory is the pool's: the next capture reuses it
                computed.logits = self._logits[: len(batch.logits_index)].copy_(computed.logits)
            computed.hidden = None
        except BaseException:
            self._break_off(graph)                       # the error above says more than that the capture was broken off
            raise
        graph.capture_end()                              # makes it ready to run, which takes memory of the driver
        return computed

    def _break_off(self, graph: torch.cuda.CUDAGraph) -> None:
        """Where CUDA has broken the capture off, torch's capture_end() raises before it closes the pool (until 2.12), and no
        graph could be captured in it any more."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):                 # closed already
                torch._C._cuda_endAllocateToPool(self._logits.device.index or 0, self._pool)

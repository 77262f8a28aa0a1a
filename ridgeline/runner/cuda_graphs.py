"""Steps as recorded CUDA graphs: one launch instead of hundreds.

Decodes are always worth it, and prompts while they are so short that launching takes longer than computing. A graph is
recorded for a shape (numbers of rows and tokens; smaller steps are padded to it) and for what is wanted of it: the greedy
tokens, or the logits. Everything a graph reads has a fixed address: weights, KV pages, block tables, and the step's
integers, which staging puts at the same place for the same shape. True lengths are read from there.

Nothing but the largest shapes is recorded at start-up. Any other runs eagerly at first, which also loads its kernels. It
is recorded when it comes again, or when there is nothing else to do: so what is used most is there first. Then come shapes
that nobody has used yet (graph_warmup.py). Decodes beside prompts come in so many shapes that recording, which takes as long as
several such steps, has to be earned more often.
All graphs share one memory pool, for they never run at once. Their memory is taken with the first of them (memory_pools.py).
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import torch

from ridgeline.layers.batch import Batch
from ridgeline.messages import StepPlan
from ridgeline.metrics import HAPPENED
from ridgeline.process.log import get_logger
from ridgeline.runner.device_rows import EVERY_HIDDEN, leading_ones
from ridgeline.runner.forward import Computed, EagerForward
from ridgeline.runner.memory_errors import is_out_of_memory
from ridgeline.runner.start import memory_pools
from ridgeline.sizes.graph_shapes import GraphShapes, Shape

logger = get_logger("graphs")

USES = 1                             # before a shape is recorded …
MIXED_USES = 8                       # … and one of decodes beside prompts
MOST_GRAPHS = 256                    # the one unused for longest makes room; the driver keeps 1 MiB for each (8B)


@dataclass(slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    computed: Computed


@dataclass(slots=True)
class _Seen:
    batch: Batch
    uses: int = 0


_Key = tuple[Shape, bool, tuple[bool, ...]]              # shape, greedy, groups with a shared prefix


class GraphForward:
    def __init__(
        self, eager: EagerForward, max_rows: int, max_step_tokens: int, vocab_size: int, dtype: torch.dtype,
        device: torch.device, num_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`num_bytes`: what the largest graphs take."""
        self._eager = eager
        self._shapes = GraphShapes(max_rows, max_step_tokens)
        self._shape: Shape | None = None                 # of the step that is about to run
        self._waiting: OrderedDict[_Key, _Seen] = OrderedDict()      # used, not recorded yet; the last use last
        self._recorded: OrderedDict[_Key, _Recorded] = OrderedDict()
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._device, self._num_bytes = device, num_bytes
        self._logits = torch.empty((max_rows, vocab_size), dtype=dtype, device=device)       # of whichever ran last
        self.replays = 0

    def shape(self, plan: StepPlan) -> Shape | None:
        self._shape = None
        if not (plan.want & EVERY_HIDDEN).any():
            decodes = leading_ones(plan.num_tokens)
            self._shape = self._shapes.fit(decodes, len(plan.rows) - decodes, plan.total_tokens - decodes)
        return self._shape

    def run(self, batch: Batch, greedy: bool) -> Computed:
        if self._shape is None:
            return self._eager.run(batch, greedy)
        key = (self._shape, greedy, tuple(group.prefix is not None for group in batch.groups))
        recorded = self._recorded.get(key)
        if recorded is None:
            seen = self._waiting.setdefault(key, _Seen(batch))
            if seen.uses < (MIXED_USES if self._shape.decodes and self._shape.prompts else USES):
                seen.uses += 1
                self._waiting.move_to_end(key)
                return self._eager.run(batch, greedy)
            recorded = self._record(key, batch)
            if recorded is None:
                return self._eager.run(batch, greedy)
        self._recorded.move_to_end(key)
        recorded.graph.replay()
        self.replays += 1
        return recorded.computed

    def prepare(self) -> bool:
        """Record what was used last, while there is room: what makes room on its own accord is what is used now."""
        if not self._waiting or len(self._recorded) >= MOST_GRAPHS:
            return False
        key, seen = next(reversed(self._waiting.items()))
        with torch.inference_mode():
            self._record(key, seen.batch)
        return True

    def is_new(self, shape: Shape, greedy: bool) -> bool:
        """Is it worth recording although it has not been used? There has to be room for what will be."""
        known = any(key[:2] == (shape, greedy) for keys in (self._recorded, self._waiting) for key in keys)
        return not known and len(self._recorded) < MOST_GRAPHS * 3 // 4

    def _record(self, key: _Key, batch: Batch) -> _Recorded | None:
        """Launch the step into a graph instead of onto the device. The values in the batch do not matter.

        None: the memory does not suffice, and the step has to run as it is.
        """
        shape, greedy, *_ = key
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        del self._waiting[key]
        try:
            with torch.cuda.stream(self._stream):
                computed = self._capture(graph, batch, greedy)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("no memory to record %s; such steps are launched kernel by kernel", shape)
            return None
        if len(self._recorded) == MOST_GRAPHS:
            torch.cuda.synchronize()                     # it may be running
            self._recorded.popitem(last=False)
        self._recorded[key] = _Recorded(graph, computed)
        HAPPENED["graph_recording"] += 1
        logger.debug("recorded %s, %s", shape, "greedy" if greedy else "logits")
        return self._recorded[key]

    def _capture(self, graph: torch.cuda.CUDAGraph, batch: Batch, greedy: bool) -> Computed:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            if not self._recorded:                       # a pool begins with its first graph
                memory_pools.take(self._device, self._num_bytes)
            computed = self._eager.run(batch, greedy)
            if computed.logits is not None:              # its memory is the pool's: the next recording reuses it
                computed.logits = self._logits[: len(batch.logits_index)].copy_(computed.logits)
            computed.hidden = None
        except BaseException:
            with suppress(RuntimeError):                 # that a recording broke off says less than why it did
                graph.capture_end()
            raise
        graph.capture_end()                              # makes it ready to run, which takes memory of the driver
        return computed

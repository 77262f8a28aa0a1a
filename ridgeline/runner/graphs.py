"""Decode steps as recorded CUDA graphs: one launch instead of hundreds.

A graph is recorded for a number of rows (a bucket; smaller batches are padded to it) and for what is wanted of it: the
greedy tokens, or the logits. Everything a graph reads has a fixed address: weights, KV pages, block tables, and the
step's integers, which staging puts at the same place for the same bucket. True lengths are read from there.

Nothing is recorded at start-up. A bucket runs eagerly the first time, which also compiles its kernels, and is recorded
when it comes again: so what is used most is there first. All graphs share one memory pool, for they never run at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.layers.batch import Batch
from ridgeline.log import get_logger
from ridgeline.messages import StepPlan, Want
from ridgeline.runner.forward import Computed, EagerForward

logger = get_logger("graphs")


def buckets(max_rows: int) -> list[int]:
    """Batch sizes that are recorded. Padding costs at most an eighth beyond 32 rows."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, *range(40, 129, 8), *range(144, 257, 16), *range(288, 513, 32)]
    sizes += range(576, max_rows + 64, 64)
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    computed: Computed


class GraphForward:
    def __init__(self, eager: EagerForward, max_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device):
        self._eager = eager
        self._sizes = buckets(max_rows)
        self._bucket = torch.bucketize(torch.arange(max_rows + 1), torch.tensor(self._sizes)).tolist()
        self._max_rows = max_rows
        self._seen: set[tuple[int, bool, bool]] = set()
        self._recorded: dict[tuple[int, bool, bool], _Recorded] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._logits = torch.empty((max_rows, vocab_size), dtype=dtype, device=device)       # of whichever ran last
        self.replays = 0

    def padded(self, plan: StepPlan) -> int:
        one_each = plan.total_tokens == len(plan.rows) <= self._max_rows
        if not one_each or ((plan.want & ~np.int8(Want.LOGPROBS)) != np.int8(Want.TOKEN)).any():
            return 0
        return self._sizes[self._bucket[len(plan.rows)]]

    def run(self, batch: Batch, greedy: bool) -> Computed:
        work = batch.work
        assert work is not None
        if work.longest_query or batch.logits_index.shape != batch.tokens.shape:
            return self._eager.run(batch, greedy)
        key = (work.num_decodes, greedy, any(group.prefix is not None for group in batch.groups))
        recorded = self._recorded.get(key)
        if recorded is None:
            if key not in self._seen:
                self._seen.add(key)
                return self._eager.run(batch, greedy)
            recorded = self._recorded[key] = self._record(batch, greedy)
            logger.debug("recorded a graph of %d rows (%s)", key[0], "greedy" if greedy else "logits")
        recorded.graph.replay()
        self.replays += 1
        return dataclasses.replace(recorded.computed)

    def _record(self, batch: Batch, greedy: bool) -> _Recorded:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                computed = self._eager.run(batch, greedy)
                if computed.logits is not None:          # its memory is the pool's: the next recording reuses it
                    computed.logits = self._logits[: len(batch.tokens)].copy_(computed.logits)
                computed.hidden = None
            finally:
                graph.capture_end()
        return _Recorded(graph, computed)

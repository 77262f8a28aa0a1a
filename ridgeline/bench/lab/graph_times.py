"""Times work on a GPU from a CUDA graph: without the host's launches. For the scripts under benchmarks/studies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def graph_microseconds(work: Callable[[int], Any], copies: int, warm_ups: int, runs: int) -> float:
    """Median microseconds of work(number), from a graph of work(0), work(1) … for all copies."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for number in range(copies):
            work(number)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(copies):
                work(number)
    for _ in range(warm_ups):
        graph.replay()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / copies * 1e3)
    return statistics.median(times)

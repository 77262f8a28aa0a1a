"""Memory as a ledger: each part predicted from config.json before anything loads, and measured once everything has.

Knows sizes and no tensors. resolve.py counts what each part holds; the worker measures what it took.
"""

from __future__ import annotations

from collections.abc import Mapping

GIB = 2**30

WEIGHTS = "weights"
KV = "KV cache"
ROWS = "rows"                        # block tables, sampling state, staged integers, kept logits
STEPS = "steps"                      # activations and logits of the largest step; the graphs' own pool
RUNTIME = "runtime"                  # the driver's context, libraries, loaded kernels
PARTS = (WEIGHTS, KV, ROWS, STEPS, RUNTIME)

# Beside large tensors, both pools of steps, of those that are launched and of graphs, hold (runner/start/memory_pools.py): small
# tensors, of which ten or so are there at once, and cuBLAS's workspace on a GPU like the H200.
SMALL_BLOCK, SMALL_BLOCKS = 2**20, 16
LIBRARY_BYTES = 32 * 2**20


def error(predicted: Mapping[str, int], measured: Mapping[str, int]) -> float:
    """How far the predicted total is from the measured one, as a share of the latter."""
    total = sum(measured.values())
    return (sum(predicted.values()) - total) / total


def table(predicted: Mapping[str, int], measured: Mapping[str, int]) -> str:
    """Both columns in GiB, the sum last."""
    lines = [f"{'memory, GiB':<12}{'predicted':>10}{'measured':>10}"]
    for part in (*PARTS, "total"):
        columns = [sum(each.values()) if part == "total" else each.get(part, 0) for each in (predicted, measured)]
        lines.append(f"{part:<12}" + "".join(f"{value / GIB:>10.2f}" for value in columns))
    return "\n".join(lines) + f"\nprediction off by {error(predicted, measured):+.1%}"

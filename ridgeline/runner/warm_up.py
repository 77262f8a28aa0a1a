"""The largest steps there can be, run once before the first request: afterwards nothing is allocated.

Rows without blocks write to block 0, which belongs to nobody, so this needs no room in the KV cache. First the largest
step of all, with every row sampling, and the largest whose MLP writes gate and up, which take more than all else. Then the
largest decode and the largest prompt that are recorded as graphs, each twice, because the second time they are. Later
graphs fit into the memory of these. Last, random sampling and log-probabilities, whose kernels greedy steps do not need.

What this is for is memory: kernels have been compiled before, those of all other steps with them (kernel_steps.py).
"""

from __future__ import annotations

import numpy as np

from ridgeline.graph_shapes import GraphShapes
from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.ops import gated_gemm
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import SamplingParams

_NONE = np.zeros(0, np.int32)


def warm_up(runner: Runner, num_groups: int, max_rows: int, max_step_tokens: int, max_model_len: int) -> None:
    num_rows = min(max_rows, max_step_tokens)
    most_tokens = min(max_step_tokens, num_rows * (max_model_len - 1))
    largest = _spread(most_tokens, num_rows)
    widest = [_spread(gated_gemm.FEWEST_ROWS - 1, num_rows)] if most_tokens >= gated_gemm.FEWEST_ROWS > num_rows else []
    prompts = [size for size in GraphShapes(max_rows, max_step_tokens).prompt_tokens if size < max_model_len]
    longest = np.array([max(prompts, default=1)], np.int32)
    ones = np.ones(num_rows, np.int32)
    greedy = SamplingParams(temperature=0)
    for counts, params in [
        *((counts, greedy) for counts in (largest, *widest, ones, ones, longest, longest)),
        (ones, SamplingParams(temperature=1.0, top_k=50, top_p=0.9, logprobs=1)),
        (ones, SamplingParams(temperature=1.0)),
    ]:  # fmt: skip
        _run(runner, num_groups, counts, params)
    runner.remove(np.arange(num_rows))


def _spread(tokens: int, num_rows: int) -> np.ndarray:
    counts = np.full(num_rows, tokens // num_rows, np.int32)
    counts[: tokens % num_rows] += 1
    return counts


def _run(runner: Runner, num_groups: int, counts: np.ndarray, params: SamplingParams) -> None:
    """A step of new rows with so many tokens each."""
    rows = np.arange(len(counts), dtype=np.int32)
    added = [
        RowAdded(row, np.zeros(tokens, np.int32), tokens, 0, [_NONE] * num_groups, params, 0)
        for row, tokens in enumerate(counts.tolist())
    ]
    want = Want.TOKEN if params.logprobs is None else Want.TOKEN | Want.LOGPROBS
    runner.submit(StepPlan(0, rows, added, _NONE.reshape(0, 4), rows, counts, np.full(len(rows), want, np.int8)))
    runner.sample()
    runner.collect()

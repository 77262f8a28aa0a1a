"""The largest steps there can be, run once before the first request: afterwards nothing is loaded or allocated.

Rows without blocks write to block 0, which belongs to nobody, so this needs no room in the KV cache. First the largest
step of all, with every row sampling, then the largest decode and the largest prompt that are recorded as graphs, each
twice, because the second time they are. Later graphs fit into the memory of these.
"""

from __future__ import annotations

import numpy as np

from ridgeline.graph_shapes import GraphShapes
from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import SamplingParams

_NONE = np.zeros(0, np.int32)


def warm_up(runner: Runner, num_groups: int, max_rows: int, max_step_tokens: int, max_model_len: int) -> None:
    num_rows = min(max_rows, max_step_tokens)
    each = min(max_step_tokens // num_rows, max_model_len - 1)
    prompts = [size for size in GraphShapes(max_rows, max_step_tokens).prompt_tokens if size < max_model_len]
    longest = max(prompts, default=1)
    for rows, tokens in [(num_rows, each), (num_rows, 1), (num_rows, 1), (1, longest), (1, longest)]:
        _run(runner, num_groups, rows, tokens)
    runner.remove(np.arange(num_rows))


def _run(runner: Runner, num_groups: int, num_rows: int, tokens: int) -> None:
    """A step of new rows with so many tokens each."""
    rows = np.arange(num_rows, dtype=np.int32)
    params, prompt = SamplingParams(temperature=0), np.zeros(tokens, np.int32)
    added = [RowAdded(row, prompt, tokens, 0, [_NONE] * num_groups, params, 0) for row in rows.tolist()]
    counts, wanted = np.full(num_rows, tokens, np.int32), np.full(num_rows, Want.TOKEN, np.int8)
    runner.submit(StepPlan(0, rows, added, _NONE.reshape(0, 4), rows, counts, wanted))
    runner.sample()
    runner.collect()

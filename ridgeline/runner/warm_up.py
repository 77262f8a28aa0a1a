"""The largest steps there can be, run once before the first request: afterwards nothing is loaded or allocated.

Rows without blocks write to block 0, which belongs to nobody, so this needs no room in the KV cache. It runs the largest
prompt step with every row sampling, then a full decode step twice, because the second time it is recorded as a graph.
"""

from __future__ import annotations

import numpy as np

from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import SamplingParams

DECODES = 2


def warm_up(runner: Runner, num_groups: int, max_rows: int, max_step_tokens: int, max_model_len: int) -> None:
    num_rows = min(max_rows, max_step_tokens)
    tokens = min(max_step_tokens // num_rows, max_model_len - DECODES)
    rows = np.arange(num_rows, dtype=np.int32)
    none = np.zeros(0, np.int32)
    params = SamplingParams(temperature=0)
    prompt, blocks = np.zeros(tokens, np.int32), [none] * num_groups
    added = [RowAdded(row, prompt, tokens, 0, blocks, params, 0) for row in rows.tolist()]
    wanted = np.full(num_rows, Want.TOKEN, np.int8)
    for step in range(1 + DECODES):
        counts = np.full(num_rows, 1 if step else tokens, np.int32)
        runner.submit(StepPlan(0, none, [] if step else added, none.reshape(0, 4), rows, counts, wanted))
        runner.sample()
        runner.collect()
    runner.remove(rows)

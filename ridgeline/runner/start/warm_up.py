"""Runs the largest steps once before the first request: afterwards nothing is allocated.

Rows without blocks write to block 0, which no sequence owns, so this needs no room in the KV cache. First the largest step of
all, with every row sampling in the way that takes most memory and with one prompt's log-probabilities, and the largest whose
MLP writes gate and up, which take more than all else. Then the largest decode and the largest prompt that are captured as
graphs, each twice, because the second run captures. Last, decodes that are one fewer than a graph has places for: their logits
are copied out of the graph's, and copied once more for rows that want log-probabilities.

Later steps fit into the memory of these (memory_pools.py). Kernels have been compiled before (kernel_steps.py).
"""

from __future__ import annotations

import numpy as np

from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.ops.kernel_table import GATED_ROWS
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from ridgeline.sizes.graph_shapes import USUAL_PROMPT, GraphShapes
from ridgeline.sizes.sampling_costs import PROMPT_LOGPROB_ROWS

_NONE = np.zeros(0, np.int32)
_GREEDY, _DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=1.0)
# A grammar's mask makes a row's logits be copied and changed, and then filters and log-probabilities are wanted of them.
_COSTLY = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS,
    structured_outputs=StructuredOutputs(regex="a"),
)


def warm_up(
    runner: Runner, num_groups: int, max_rows: int, max_step_tokens: int, max_model_len: int, most_prompt: int = USUAL_PROMPT
) -> None:
    """`most_prompt`: tokens of prompts in the largest CUDA graph."""
    num_rows = min(max_rows, max_step_tokens)
    most_tokens = min(max_step_tokens, num_rows * (max_model_len - 1))
    largest = _spread(most_tokens, num_rows)
    scored = min(PROMPT_LOGPROB_ROWS + 1, max_model_len - 1, most_tokens - num_rows + 1)     # tokens of the last row, at least
    if largest[-1] < scored:
        largest = np.append(_spread(most_tokens - scored, num_rows - 1), np.int32(scored))
    wide = GATED_ROWS - 1
    widest = [_spread(wide, min(wide, num_rows))] if most_tokens > wide else []
    shapes = GraphShapes(max_rows, max_step_tokens, most_prompt=most_prompt)
    prompts = [size for size in shapes.prompt_tokens if size < max_model_len]
    longest = np.array([max(prompts, default=1)], np.int32)
    ones = np.ones(num_rows, np.int32)
    padded = ones[: next((rows for rows in range(num_rows - 1, 0, -1) if rows not in shapes.decodes), num_rows)]
    for counts, params in [
        (largest, _COSTLY),
        *((counts, _GREEDY) for counts in (*widest, ones, ones, longest, longest)),
        (padded, _COSTLY), (padded, _DRAWN),
    ]:
        _run(runner, num_groups, counts, params)
    runner.remove(np.arange(num_rows))


def _spread(tokens: int, num_rows: int) -> np.ndarray:
    counts = np.full(num_rows, tokens // num_rows, np.int32)
    counts[: tokens % num_rows] += 1
    return counts


def _run(runner: Runner, num_groups: int, counts: np.ndarray, params: SamplingParams) -> None:
    """A step of new rows with `counts` tokens."""
    rows = np.arange(len(counts), dtype=np.int32)
    added = [
        RowAdded(row, np.zeros(tokens, np.int32), tokens, 0, [_NONE] * num_groups, params, 0)
        for row, tokens in enumerate(counts.tolist())
    ]
    want = np.full(len(rows), Want.TOKEN if params.logprobs is None else Want.TOKEN | Want.LOGPROBS, np.int8)
    if params.prompt_logprobs is not None and counts[-1] > 1:
        want[-1] |= np.int8(Want.PROMPT_LOGPROBS)        # of one: they are made for one row after the other
    runner.submit(StepPlan(0, rows, added, _NONE.reshape(0, 4), rows, counts, want))
    words = -(-runner.model.config.vocab_size // 32)
    runner.sample(None if params.structured_outputs is None else np.full((len(rows), words), -1, np.int32))
    runner.collect()

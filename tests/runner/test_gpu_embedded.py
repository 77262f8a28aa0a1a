"""Real weights on a GPU: the embedded model must say there what it says on the CPU. Skipped without a GPU or without the model.

The CPU's side is the definition of every op in plain torch and float32.
"""

from __future__ import annotations

import pydoc_data.topics as topics
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.process import embedded

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(embedded.find() is None, reason="needs the embedded model: ridgeline pull"),
]

TEXTS = [text[:600] for _, text in sorted(topics.topics.items())[::8]]
ANSWER = 48
# In bf16 a log-probability is off by what 30 layers of rounding to 8 bits leave: on average, and for the worst of all tokens.
MEAN_ERROR, WORST_ERROR = 0.06, 0.7


def said(model: Path, device: str, dtype: str, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """(greedy answers, the log-probability of every token of every prompt)."""
    options |= {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 512 << 20}
    llm = LLM(str(model), device=device, dtype=dtype, **options)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    likely = [
        next(iter(each.values())).logprob
        for output in outputs for each in output.prompt_logprobs or () if each
    ]
    return [list(output.outputs[0].token_ids) for output in outputs], torch.tensor(likely)


@pytest.fixture(scope="module")
def on_the_cpu() -> tuple[list[list[int]], torch.Tensor]:
    return said(embedded.require(), "cpu", "float32", kernels="reference")


def test_greedy_answers_in_float32_are_the_cpus(on_the_cpu: tuple[list[list[int]], torch.Tensor]) -> None:
    answers, likely = said(embedded.require(), "cuda", "float32")
    assert answers == on_the_cpu[0]
    torch.testing.assert_close(likely, on_the_cpu[1], rtol=0, atol=2e-3)


def test_logits_in_bf16_are_close(on_the_cpu: tuple[list[list[int]], torch.Tensor]) -> None:
    _, likely = said(embedded.require(), "cuda", "bfloat16")
    error = (likely - on_the_cpu[1]).abs()
    assert float(error.mean()) < MEAN_ERROR and float(error.max()) < WORST_ERROR, (float(error.mean()), float(error.max()))

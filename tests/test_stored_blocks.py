"""Weights that stay packed as their GGUF file stores them give the model that the expanded ones give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_writer import write_gguf

from ridgeline.engine.executor import LocalExecutor
from ridgeline.models.gguf import GGUFFile
from ridgeline.ops import native
from ridgeline.ops.block_linear import block_linear_native, expanded
from ridgeline.quant.scheme import StoredBlocks
from ridgeline.runner.runner import Runner


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_expanded_as_the_reader_expands(kind: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    with GGUFFile(write_gguf(tmp_path / "w.gguf", {"general.architecture": "llama"}, {"w": (weight, kind)})) as file:
        stored, packed = file.read("w"), file.raw("w").copy()
    assert np.array_equal(expanded(torch.from_numpy(packed), kind).numpy(), stored)


def test_a_row_gives_the_same_in_any_company() -> None:
    assert native.library() is not None
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (10, 3, 20), generator=generator, dtype=torch.uint8)
    blocks[..., :4] = torch.randn(10, 3, 2, generator=generator).half().view(torch.uint8)
    blocks = blocks.flatten(1)
    x = torch.randn(15, 96, generator=generator)
    alone = torch.cat([block_linear_native(row[None], blocks, "Q4_1") for row in x])
    for count in range(1, 16):
        assert torch.equal(block_linear_native(x[:count], blocks, "Q4_1"), alone[:count])


@pytest.mark.real_model
def test_the_embedded_model_says_the_same(embedded_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline import LLM, SamplingParams

    prompts = ["The capital of France is", "def fib(n):", "One, two, three,"]
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0)

    def answers() -> tuple[list[list[int]], list[float], Runner]:
        llm = LLM(embedded_model, max_model_len=128, num_gpu_blocks_override=64)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        sums = [output.cumulative_logprob or 0.0 for output in outputs]
        assert isinstance(llm.core.executor, LocalExecutor)
        return [output.token_ids for output in outputs], sums, llm.core.executor.runner

    packed, packed_sums, runner = answers()
    linears = [module for module in runner.model.modules() if getattr(module, "blocks", None) is not None]
    assert len(linears) == 4 * 30 + 1, "not every linear kept its blocks"
    monkeypatch.setattr(StoredBlocks, "MOST_ROWS", 0)
    plain, plain_sums, _ = answers()
    assert packed == plain
    assert packed_sums == pytest.approx(plain_sums, abs=2e-3)        # P-06's bound on logits, over 16 tokens

"""Weights that stay packed as their GGUF file stores them give the model that the expanded ones give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_writer import write_gguf

from ridgeline.distributed.comm import Communicator
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.models.decoder import Decoder
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config, weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.cpu import native
from ridgeline.ops.linear.gguf_blocks import KINDS, block_linear_native, expanded
from ridgeline.quant.layout import STORED_KINDS
from ridgeline.quant.scheme import StoredBlocks
from ridgeline.runner.runner import Runner

WIDTHS = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64, "ffn_gate": 96, "ffn_up": 96, "ffn_down": 64}


def small_gguf(path: Path, kind: str, others: dict[str, str] | None = None, tied: bool = True) -> Path:
    """A llama of two layers whose matrices are all packed as `kind`, but for `others` by name."""
    random, kinds = np.random.default_rng(1), others or {}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }.items()}
    shapes = {f"blk.{layer}.{name}": (rows, 96 if name == "ffn_down" else 64)
              for layer in range(2) for name, rows in WIDTHS.items()}
    shapes |= {"token_embd": (40, 64)} | ({} if tied else {"output": (40, 64)})
    tensors = {
        f"{name}.weight": (random.normal(size=shape).astype(np.float32), kinds.get(name, kind))
        for name, shape in shapes.items()
    }
    norms = ["output_norm", *(f"blk.{layer}.{name}_norm" for layer in range(2) for name in ("attn", "ffn"))]
    return write_gguf(path, metadata, tensors | {f"{name}.weight": (np.ones(64, np.float32), "F32") for name in norms})


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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "others"), [
    ("Q8_0", {}),
    ("Q4_1", {}),
    ("Q4_0", {}),                                                        # no kernel multiplies these as they are
    ("Q4_1", {"blk.1.attn_k": "Q8_0"}),                                  # parts of one linear must be packed alike
    ("Q4_1", {"blk.0.attn_output": "Q8_0", "blk.1.ffn_down": "F16", "token_embd": "F32"}),
])
def test_predicted_bytes_are_the_bytes(kind: str, others: dict[str, str], tied: bool, tmp_path: Path) -> None:
    assert native.library() is not None and set(KINDS) == STORED_KINDS
    path = small_gguf(tmp_path / "m.gguf", kind, others, tied)
    config = load_model_config(path)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
    load_weights(model, path, config)
    assert model.weight_bytes == weight_bytes(config, "float32", "cpu")
    assert bool(config.stored_block_bytes) == (kind in STORED_KINDS)


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
    assert runner.model.weight_bytes == weight_bytes(load_model_config(embedded_model), "float32", "cpu")
    monkeypatch.setattr(StoredBlocks, "MOST_ROWS", 0)
    plain, plain_sums, _ = answers()
    assert packed == plain
    assert packed_sums == pytest.approx(plain_sums, abs=2e-3)        # P-06's bound on logits, over 16 tokens

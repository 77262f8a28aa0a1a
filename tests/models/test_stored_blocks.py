"""Weights that stay packed as their GGUF file stores them give the model that the expanded ones give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_writer import Packed, write_gguf

from ridgeline.distributed.comm import Communicator
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.errors import ModelError
from ridgeline.models.decoder import Decoder
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config, weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.cpu import native
from ridgeline.ops.cpu.matrix import BLOCKS, KINDS, NUMBERS, Matrix, Part
from ridgeline.ops.linear.gguf_blocks import block_linear_native, block_linear_reference, random_blocks, random_part
from ridgeline.quant.layout import STORED_KINDS, matrix_bytes
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


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_the_numbers_are_those_of_the_reader(kind: str, tmp_path: Path) -> None:
    """Bit for bit, for the outputs of two groups, in any order."""
    blocks = random_blocks(torch.Generator().manual_seed(0), kind, 21, 512)
    tensor = Packed((21, 512), kind, blocks.numpy().tobytes())
    with GGUFFile(write_gguf(tmp_path / "w.gguf", {"general.architecture": "llama"}, {"w": tensor})) as file:
        stored, packed = file.read("w"), torch.from_numpy(file.raw("w").copy())
    first, second = Part(kind, 4, 512), Part(kind, 17, 512)
    first.put_blocks(packed[:4])
    second.put_blocks(packed[4:])
    matrix = Matrix([first, second])
    assert matrix.nbytes == matrix_bytes(kind, 4, 512) + matrix_bytes(kind, 17, 512)
    assert np.array_equal(matrix.numbers().numpy(), stored)
    some = torch.tensor([20, 0, 3, 4, 3])
    assert np.array_equal(matrix.rows(some, 2.0).numpy(), 2 * stored[some])


def test_numbers_and_groups_are_kept_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype, kind in NUMBERS.items():
        values = torch.randn(19, 45, generator=generator).to(dtype)
        part = Part(kind, 19, 45)
        part.put_numbers(values)
        assert torch.equal(Matrix([part]).numbers(), values.float())
    codes = torch.randint(16, (19, 256), generator=generator, dtype=torch.uint8)
    scale, offset = torch.rand(19, 2, generator=generator), torch.randn(19, 2, generator=generator)
    part = Part("INT4", 19, 256, span=4)
    part.put_codes(codes, scale, offset)
    expected = codes.float() * scale.repeat_interleave(128, 1) + offset.repeat_interleave(128, 1)
    assert torch.equal(Matrix([part]).numbers(), expected)
    part = Part("INT8", 19, 256, span=8)                 # one scale for a row
    part.put_codes(codes.view(torch.int8) - 8, scale[:, :1])
    assert torch.equal(Matrix([part]).numbers(), (codes.float() - 8) * scale[:, :1])


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gives_the_same_in_any_company(kind: str, integers: bool) -> None:
    """Any number of rows from 1 to 70, any number of threads, parts of other kinds beside it."""
    generator = torch.Generator().manual_seed(0)
    parts = [random_part(generator, kind, 19, 512), random_part(generator, "Q8_0", 7, 512)]
    matrix, bias = Matrix(parts), torch.randn(26, generator=generator)
    x = torch.randn(70, 512, generator=generator)
    alone = torch.cat([block_linear_native(row[None], matrix, bias, integers) for row in x])
    expected = block_linear_reference(x.double(), matrix, bias.double(), integers)
    torch.testing.assert_close(alone.double(), expected, rtol=1e-6, atol=1e-5)
    threads = torch.get_num_threads()
    try:
        for count in range(1, 71):
            torch.set_num_threads(count % 3 + 1)
            assert torch.equal(block_linear_native(x[:count], matrix, bias, integers), alone[:count])
    finally:
        torch.set_num_threads(threads)


def test_a_broken_row_shows_and_stays_alone() -> None:
    matrix = Matrix([random_part(torch.Generator().manual_seed(0), "Q4_1", 20, 96)])
    x = torch.randn(5, 96)
    healthy = block_linear_native(x, matrix, None, True)
    x[1, 40], x[3, 2] = torch.nan, torch.inf
    broken = block_linear_native(x, matrix, None, True)
    assert broken[1].isnan().all() and not broken[3].isfinite().any()
    assert torch.equal(broken[[0, 2, 4]], healthy[[0, 2, 4]])


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf", "Q4_1")
    with GGUFFile(path) as file:
        place = file.tensors["blk.1.ffn_down.weight"].offset
    data = bytearray(path.read_bytes())
    data[place : place + 2] = b"\x00\x7c"                # infinity
    path.write_bytes(data)
    config = load_model_config(path)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight holds values that are not finite"):
        load_weights(Decoder(config, Communicator(), torch.float32, "cpu", 32), path, config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "others"), [
    ("Q8_0", {}),
    ("Q4_1", {}),
    ("Q4_0", {}),
    ("F16", {}),                                                         # nothing is packed
    ("Q4_1", {"blk.1.attn_k": "Q8_0"}),                                  # parts of one linear, packed in two ways
    ("Q4_1", {"blk.1.attn_k": "F16"}),
    ("Q4_1", {"blk.0.attn_output": "Q8_0", "blk.1.ffn_down": "F16", "token_embd": "F32"}),
])
def test_predicted_bytes_are_the_bytes(kind: str, others: dict[str, str], tied: bool, tmp_path: Path) -> None:
    assert native.library() is not None and BLOCKS == STORED_KINDS
    path = small_gguf(tmp_path / "m.gguf", kind, others, tied)
    config = load_model_config(path)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
    load_weights(model, path, config)
    assert model.weight_bytes == weight_bytes(config, "float32", "cpu")
    assert bool(config.packed) == (kind in STORED_KINDS)
    if kind in STORED_KINDS and not others:
        weights = {name for name, _ in model.named_parameters() if "norm" not in name}
        assert not weights, "numbers are kept beside the packed weights"


@pytest.mark.real_model
def test_the_embedded_model_says_the_same(embedded_model: Path) -> None:
    """Packed weights with float32 activations are the same model; only packed weights are in memory."""
    from ridgeline import LLM, SamplingParams

    prompts = ["The capital of France is", "def fib(n):", "One, two, three,"]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)

    def answers(**options: str) -> tuple[list[list[int]], list[float], Runner]:
        llm = LLM(embedded_model, max_model_len=128, num_gpu_blocks_override=64, **options)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        sums = [output.cumulative_logprob or 0.0 for output in outputs]
        assert isinstance(llm.core.executor, LocalExecutor)
        return [output.token_ids for output in outputs], sums, llm.core.executor.runner

    packed, packed_sums, runner = answers(cpu_activations="float32")
    model = runner.model
    linears = [module for module in model.modules() if getattr(module, "matrix", None) is not None]
    assert len(linears) == 4 * 30 + 2, "not every matrix stayed packed"
    assert model.weight_bytes == weight_bytes(load_model_config(embedded_model), "float32", "cpu")
    assert model.weight_bytes < 1.01 * embedded_model.stat().st_size
    plain, plain_sums, _ = answers(kernels="reference")
    assert packed == plain
    assert packed_sums == pytest.approx(plain_sums, abs=2e-3)        # P-06's bound on logits, over 6 tokens

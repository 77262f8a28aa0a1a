"""Weights that stay packed as their GGUF file stores them give the model that the expanded ones give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_writer import Packed, write_gguf
from quantised_models import save_quantised
from tiny_models import save_checkpoint

from ridgeline.distributed.comm import Communicator
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.errors import ModelError
from ridgeline.layers.linear import Linear
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.cpu import native
from ridgeline.ops.cpu.matrix import BLOCKS, KINDS, NUMBERS, Matrix, Part
from ridgeline.ops.linear.gguf_blocks import block_linear_native, block_linear_reference, random_blocks, random_part
from ridgeline.ops.quantised.expand import QuantisedWeight, expand
from ridgeline.ops.quantised.quantised_linear import quantised_linear
from ridgeline.ops.registry import set_kernels
from ridgeline.quant.choose import schemes
from ridgeline.quant.cpu_packed import CpuPacked, plain_scheme
from ridgeline.quant.layout import STORED_KINDS, matrix_bytes, tile_kind
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gives_the_same_among_hundreds_and_with_many_inputs(kind: str) -> None:
    """More inputs than a panel has, and more rows than a block."""
    generator = torch.Generator().manual_seed(3)
    matrix = Matrix([random_part(generator, kind, 19, 2304)])
    x = torch.randn(263, 2304, generator=generator)
    alone = torch.cat([block_linear_native(row[None], matrix, None, True) for row in x])
    for count in (2, 5, 8, 33, 153, 263):
        assert torch.equal(block_linear_native(x[:count], matrix, None, True), alone[:count])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_a_large_activation_spoils_few_others(kind: str) -> None:
    """Activations in 8 bits have a scale for each 16: those beside an outlier vanish, the other half of its tile stays exact."""
    generator = torch.Generator().manual_seed(2)
    matrix = Matrix([random_part(generator, kind, 32, 256)])
    x = torch.zeros(2, 256)
    x[:, 16:32] = torch.randint(-126, 127, (16,), generator=generator)
    x[:, 16] = 127                                       # the scale of this half is 1: its numbers are codes
    x[0, 8] = 1e6
    found = block_linear_native(x, matrix, None, True)
    without = found[0].double() - 1e6 * matrix.numbers()[:, 8].double()
    assert torch.allclose(without, found[1].double(), atol=1e6 * 2**-20 * matrix.numbers().abs().max().item())


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
    ("F16", {}),
    ("F32", {}),                                                         # numbers in a second layout, where that pays
    ("Q4_1", {"blk.1.attn_k": "Q8_0"}),                                  # parts of one linear, packed in two ways
    ("Q4_1", {"blk.1.attn_k": "F16"}),
    ("Q4_1", {"blk.0.attn_output": "Q8_0", "blk.1.ffn_down": "F16", "token_embd": "F32"}),
])
def test_predicted_bytes_are_the_bytes(kind: str, others: dict[str, str], tied: bool, tmp_path: Path) -> None:
    assert native.library() is not None and BLOCKS == STORED_KINDS       # the rules without torch know what the kernels do
    path = small_gguf(tmp_path / "m.gguf", kind, others, tied)
    config = load_model_config(path)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
    load_weights(model, path, config)
    assert model.weight_bytes == weight_bytes(config, "float32", "cpu")
    if kind != "F32" and not others:
        weights = {name for name, _ in model.named_parameters() if "norm" not in name}
        assert not weights, "numbers are kept beside the packed weights"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-bias", "gemma3", "phi3", "qwen2_moe"])
def test_16_bit_numbers_of_a_checkpoint_stay_16_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """No float32 copy: the bytes are those of the checkpoint, and as predicted; the numbers are the same."""
    path = save_checkpoint(name, tmp_path, dtype=dtype)
    config = load_model_config(path)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32)
    load_weights(model, path, config)
    assert model.weight_bytes == weight_bytes(config, "float32", "cpu")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    kinds = {part.kind for linear in linears.values() for part in linear.matrix.parts}
    assert kinds == {NUMBERS[dtype]} and all(linear.weight is None for linear in linears.values())
    set_kernels("reference")
    try:
        plain = Decoder(config, Communicator(), torch.float32, "cpu", 32)
        load_weights(plain, path, config)
    finally:
        set_kernels("auto")
    expected = plain.numbers()
    for found, numbers in model.numbers().items():
        assert torch.equal(numbers, expected[found]), found


def _codes(grid: str, group: int, zero: str | None, outer: bool, reordered: bool, rows: int = 1) -> QuantisedWeight:
    (_, weight, _), _ = quantised_linear.inputs(
        torch.Generator().manual_seed(3), torch.float32, "cpu", tokens=1, inputs=256, outputs=37, bias=False, grid=grid,
        block=(rows, group), zero=zero, outer=outer, reordered=reordered,
    )
    return weight


@pytest.mark.parametrize(("grid", "group", "zero", "outer", "reordered"), [
    ("int8", 0, None, False, False), ("int8", 32, None, False, False), ("int8", 128, None, True, False),
    ("uint4", 128, None, False, False), ("uint4", 64, "code", False, False), ("uint4", 32, "offset", True, False),
    ("uint4", 128, "code", False, True), ("ternary", 64, None, False, False), ("uint4", 0, None, False, False),
    ("e4m3", 0, None, False, False), ("e4m3", 128, None, False, False), ("e2m1", 32, None, False, False),
    ("nf4", 64, None, True, False),
])
def test_codes_with_scales_go_into_tiles(grid: str, group: int, zero: str | None, outer: bool, reordered: bool) -> None:
    """The product is that of the numbers that the codes stand for, the memory that of the codes."""
    weight = _codes(grid, group, zero, outer, reordered)
    linear = torch.nn.Module()
    linear.bias, linear.shares = None, False
    if weight.order is not None:
        linear.order = weight.order
    scheme = CpuPacked(1, integers=False)
    assert scheme.take_codes(linear, weight) and linear.weight is None
    numbers = expand(weight, torch.float32)
    torch.testing.assert_close(scheme.numbers(linear), numbers, rtol=1e-5, atol=1e-6)
    for rows in (5, 37):                                 # few, and more than share an unpacked tile
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(scheme.apply(linear, x, None), x @ numbers.T, rtol=1e-4, atol=1e-4)
    kind, span = tile_kind(grid, (1, group), 256) or ("", 0)
    bits = 8 if grid in ("int8", "e4m3") else 6
    assert scheme.extra_bytes(linear) == matrix_bytes(kind, 37, 256, span) <= bits / 8 * 48 * 256 * 1.13


def test_scales_of_blocks_are_those_of_their_outputs() -> None:
    """e4m3 with a scale for 16 by 128 weights: a tile has one for each output. Its NaN has no place in a tile."""
    weight = _codes("e4m3", 128, None, False, False, rows=16)
    linear, scheme = torch.nn.Module(), CpuPacked(1, integers=True)
    assert scheme.take_codes(linear, weight)
    torch.testing.assert_close(scheme.numbers(linear), expand(weight, torch.float32), rtol=0, atol=0)
    weight.weight.view(torch.uint8)[3, 5] = 255
    assert not scheme.take_codes(linear, weight)


@pytest.mark.parametrize(("grid", "group", "zero"), [
    ("int8", 128, "offset"), ("uint4", 16, None), ("e2m1", 16, None), ("q6", 32, None),
])
def test_other_codes_are_left_to_be_expanded(grid: str, group: int, zero: str | None) -> None:
    linear = torch.nn.Module()
    assert not CpuPacked(1, integers=True).take_codes(linear, _codes(grid, group, zero, False, False))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "fp8-block", "mxfp4"])
def test_codes_made_while_loading_stay_codes(quantization: str, tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path, dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
    config = load_model_config(path)
    plain = plain_scheme(torch.device("cpu"), torch.float32, stored=config.dtype)
    formats = LinearFormats(config, quantization, "cpu", dtype="float32")
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32, schemes(formats, plain))
    load_weights(model, path, config)
    assert model.weight_bytes == weight_bytes(config, "float32", "cpu", 1, quantization)
    found = model.layers[1].mlp.gate_up.matrix
    kinds = {"int8": "INT8", "int4": "INT4", "fp8": "E4M3", "fp8-block": "E4M3", "mxfp4": "E2M1"}
    assert found.parts[0].kind == kinds[quantization]


@pytest.mark.parametrize(("dialect", "kind"), [("ct-w8a8", "INT8"), ("awq", "INT4"), ("gptq-desc-act", "INT4")])
def test_the_codes_of_a_checkpoint_stay_codes(dialect: str, kind: str, tmp_path: Path) -> None:
    """With the numbers of the plain checkpoint, and the bytes that were predicted."""
    path, plain_path = save_quantised(dialect, tmp_path)
    config = load_model_config(path)
    plain = plain_scheme(torch.device("cpu"), torch.float32, stored=config.dtype)
    formats = LinearFormats(config, "none", "cpu", dtype="float32")
    model = Decoder(config, Communicator(), torch.float32, "cpu", 32, schemes(formats, plain))
    load_weights(model, path, config)
    down = model.layers[1].mlp.down
    assert {part.kind for part in down.matrix.parts} == {kind}
    assert model.weight_bytes == weight_bytes(config, "float32", "cpu")
    expected = Decoder(load_model_config(plain_path), Communicator(), torch.float64, "cpu", 32)
    load_weights(expected, plain_path, expected.config)
    found = down.scheme.numbers(down)
    torch.testing.assert_close(found.double(), expected.layers[1].mlp.down.weight.data, rtol=1e-5, atol=1e-6)


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

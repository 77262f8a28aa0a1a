"""fp8 weights: what loading makes of a checkpoint, the law that the engine computes with exactly those numbers, and memory.

The kernels themselves are checked by tests/ops/test_ops.py (small shapes) and, on a GPU, below with the shapes that have rules.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_laws import PLAIN, requests, run
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import ALONE, Communicator
from ridgeline.distributed.sharding import Shard, whole
from ridgeline.errors import ConfigError
from ridgeline.layers.linear import Linear, Placement
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.activation import gated_activation_reference
from ridgeline.ops.hopper import device_facts
from ridgeline.ops.kernel_table import H200, choose
from ridgeline.ops.linear.fp8_linear import (
    PAIRED_ROWS,
    _has_units,
    expanded,
    fp8_linear_gpu,
    fp8_linear_reference,
    gated_linear,
    gated_one_row,
    multiplied_row,
    normed_fp8_linear_gpu,
    normed_fp8_linear_reference,
)
from ridgeline.ops.linear.fp8_rows import (
    CODES,
    FINER,
    LARGEST,
    fp8_groups,
    fp8_rows_reference,
    normed_fp8_rows_reference,
)
from ridgeline.ops.linear.select import fp8_ring_gemm_plan, one_row_plan
from ridgeline.ops.linear.select_wide import WidePlan, fp8_wide_plan
from ridgeline.quant.format import FP8_BLOCK, FP8_ROW, INT8_ROW, WeightFormat
from ridgeline.quant.fp8 import Fp8
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Unquantised
from ridgeline.resolve import DeviceFacts, resolve

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


# -- rows ---------------------------------------------------------------------------------------------------------------


def test_the_largest_number_becomes_the_largest_code_and_zeros_stay() -> None:
    x = torch.tensor([[0.0, -3.0, 1.5], [0.0, 0.0, 0.0], [1e-30, 0, 0]])
    codes, scale = fp8_rows_reference(x)
    assert codes.float()[0].tolist() == [0.0, -LARGEST, LARGEST / 2] and codes.float()[1].tolist() == [0.0] * 3
    assert torch.isfinite(scale).all() and (scale > 0).all()
    torch.testing.assert_close(codes.float() * scale[:, None], x, rtol=2**-4, atol=0)


def test_coarse_and_fine_codes_hold_what_bf16_numbers_hold() -> None:
    x = torch.randn(7, 512, dtype=torch.bfloat16)
    codes, scale = fp8_rows_reference(x, paired=True)
    again = (codes.double() * scale[:, None].double()).view(7, 2, 512).sum(1)
    error = (again - x.double()).norm() / x.double().norm()
    alone, alone_scale = fp8_rows_reference(x)
    coarse = ((alone.double() * alone_scale[:, None].double()) - x.double()).norm() / x.double().norm()
    assert error < 2**-9 < 0.02 < coarse
    assert torch.equal(scale[1::2] * FINER[CODES], scale[::2])


# -- loading ------------------------------------------------------------------------------------------------------------


def decoder(path: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    """As on a GPU: codes are kept."""
    config = load_model_config(path)
    plain = Unquantised()
    made = Decoder(config, Communicator(), dtype, "cpu", 64, lambda place: plain if place == "head" else Kept(plain))
    load_weights(made, path, config)
    return made


class Kept(Fp8):
    def finish(self, linear: torch.nn.Module) -> None:
        pass


def test_every_output_has_its_own_scale_whatever_it_is_fused_with(tmp_path: Path) -> None:
    """Fused q, k and v, gate and up: a large part leaves the others' rounding alone."""
    path = save_checkpoint("qwen2", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name] * 1000
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    qkv = decoder(path).layers[0].attention.qkv
    assert qkv.weight.dtype == CODES and qkv.scale.shape == (qkv.weight.shape[0],) and qkv.bias.dtype == torch.float64
    stored = torch.cat([tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    codes, scale = fp8_rows_reference(stored)
    assert torch.equal(qkv.weight.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(qkv.scale, scale)


def test_large_weights_are_quantised_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint("llama", tmp_path / "model")
    at_once = decoder(path).numbers()
    monkeypatch.setattr("ridgeline.quant.quantised.ROWS_AT_ONCE", 100)
    assert all(torch.equal(value, at_once[name]) for name, value in decoder(path).numbers().items())


def test_the_head_the_embedding_and_the_norms_keep_their_numbers(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model", tie_word_embeddings=False)
    made = decoder(path)
    kept = {name for name, parameter in made.named_parameters() if parameter.dtype != CODES and not name.endswith(".scale")}
    assert {"embed.weight", "head.weight", "norm.weight"} <= kept and not any("qkv.weight" in name for name in kept)
    assert made.bytes_per_weight(1) < 5                    # float64 in the head alone


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"up_proj\.weight holds values that are not finite"):
        decoder(path)


# -- the law ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))])
def test_the_engine_computes_with_the_expanded_weights(name: str, tmp_path: Path) -> None:
    """Greedy tokens of `quantization=fp8` equal those of a checkpoint that holds the expanded weights; and they differ from the
    original's somewhere, or the law would say nothing."""
    model = save_checkpoint(name, tmp_path / "model", tie_word_embeddings=False)
    made, tensors = decoder(model), load_file(model / "model.safetensors")
    for key, value in tensors.items():
        if value.dim() == 2 and "layers." in key:
            codes, scale = fp8_rows_reference(value)
            tensors[key] = expanded(codes, scale, torch.float64)
    other = save_checkpoint(name, tmp_path / "expanded", tie_word_embeddings=False)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    options = PLAIN | {"device": "cpu", "dtype": "float64", "kernels": "reference"}
    asked = requests()
    quantised = run(model, options | {"quantization": "fp8"}, asked)
    assert quantised.answers == run(other, options, asked).answers
    assert quantised.answers != run(model, options, asked).answers
    down = made.numbers()["layers.0.mlp.down.weight"]
    assert torch.equal(down, tensors["model.layers.0.mlp.down_proj.weight"])         # what a record's quality check compares with


# -- options and memory -------------------------------------------------------------------------------------------------


def facts(kind: str) -> DeviceFacts:
    return DeviceFacts(kind, 2**34, ("bfloat16", "float32") if kind == "cuda" else ("float32",))


def test_memory_counts_codes_and_scales_on_a_gpu(tmp_path: Path) -> None:
    model = load_model_config(save_checkpoint("llama", tmp_path / "model", tie_word_embeddings=False))
    plain, fp8 = (weight_bytes(model, "bfloat16", "cuda", 1, each) for each in ("none", "fp8"))
    linears = [(count, outputs, inputs) for count, outputs, inputs in model.matrices[:-1]]
    assert plain - fp8 == sum(count * (outputs * inputs - 4 * outputs) for count, outputs, inputs in linears)
    assert weight_bytes(model, "float32", "cpu", 1, "fp8") < weight_bytes(model, "float32", "cpu", 1)


def test_what_does_not_go_with_it_is_refused_before_loading(tmp_path: Path) -> None:
    model = str(save_checkpoint("llama", tmp_path / "model"))

    def resolved(kind: str, **options: Any) -> Any:
        return resolve(EngineConfig.of(model=model, quantization="fp8", **options), facts(kind))

    assert resolved("cuda").memory and "kept as e4m3-row, and multiplied as stored" in resolved("cpu").reasons["quantization"]
    with pytest.raises(ConfigError, match="deterministic has no kernels for fp8 weights"):
        resolved("cuda", deterministic=True)
    with pytest.raises(ConfigError, match="quantization fp8 has no kernels for float16; use dtype bfloat16"):
        resolved("cuda", dtype="float16")
    assert "steps of several rows may be slower" in resolved("cuda").reasons["quantization"]        # a tiny model


def test_a_rank_that_holds_padding_alone_stores_nothing() -> None:
    place = Placement(ALONE, lambda path: Fp8(Unquantised()), torch.bfloat16, torch.device("cpu"))
    linear = Linear({"": whole(16)}, Shard(16, 16, 16, 8), False, place)
    store = linear.pieces()["weight:"].store
    assert store is not None
    store(torch.empty(16, 0))
    assert not linear.weight.float().any() and (linear.scale == 1).all()


def test_a_shard_that_ends_inside_a_block_keeps_its_numbers() -> None:
    """Its scales are those of smaller blocks, which the kernels for blocks of 128 do not read."""
    place = Placement(ALONE, lambda path: Fp8(Unquantised(), True, FP8_BLOCK), torch.float32, torch.device("cpu"))
    linear = Linear({"": whole(256)}, Shard(384, 0, 192, 192), False, place)
    assert linear.format.scales.block == (128, 64)
    weight = torch.randn(256, 192, generator=torch.Generator().manual_seed(3))
    store = linear.pieces()["weight:"].store
    assert store is not None
    store(weight)
    linear.scheme.finish(linear)
    assert not isinstance(linear.scheme, Fp8) and linear.weight is not None
    torch.testing.assert_close(linear.weight.data, weight, rtol=2**-4, atol=2**-9)


@pytest.mark.parametrize("format", [FP8_ROW, FP8_BLOCK, INT8_ROW], ids=lambda format: format.name)
def test_a_gpu_without_units_for_the_codes_keeps_them(format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory is counted: eight bits a weight, and the product expands them."""
    monkeypatch.setattr("ridgeline.quant.fp8.Quantised", functools.partial(Quantised, keeps=True))       # as on a GPU
    place = Placement(ALONE, lambda path: Fp8(Unquantised(), True, format), torch.float32, torch.device("cpu"))
    linear = Linear({"": whole(128)}, whole(256), False, place)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(3))
    store = linear.pieces()["weight:"].store
    assert store is not None
    store(weight)
    numbers = linear.scheme.numbers(linear)
    linear.scheme.finish(linear)
    assert not isinstance(linear.scheme, Fp8) and linear.weight is not None and linear.weight.nbytes == weight.numel()
    x = torch.eye(256)
    torch.testing.assert_close(linear.scheme.apply(linear, x, None), numbers.t(), rtol=0, atol=0)


def test_int8_products_need_no_fp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, found in (((7, 5), [False, False]), ((8, 0), [True, False]), ((8, 9), [True, True])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert [_has_units.__wrapped__(torch.device("cuda"), codes) for codes in (torch.int8, CODES)] == found


# -- kernels ------------------------------------------------------------------------------------------------------------

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


@pytest.mark.parametrize("name", SHAPES)
def test_rules_cover_an_8b_model_up_to_128_rows(name: str) -> None:
    for rows in (1, 2, 8, 33, 64):
        plan = fp8_ring_gemm_plan(rows, *SHAPES[name])
        assert plan is not None and SHAPES[name][1] % plan.block_inputs == 0 and plan.shared_bytes(False, 1) < 232_000
    for rows in (65, 128):
        wide = fp8_wide_plan(rows, *SHAPES[name])
        assert wide is not None and fp8_ring_gemm_plan(rows, *SHAPES[name]) is None
        assert wide.splits == 1 or -(-SHAPES[name][0] // 128) * wide.splits <= 132
    assert fp8_wide_plan(129, *SHAPES[name]) is None


def eight_bit_weight(kind: str, outputs: int, inputs: int, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randn(outputs, inputs, device=device, generator=torch.Generator(device).manual_seed(seed)) * inputs**-0.5
    if kind != "block":
        return fp8_rows_reference(numbers, codes=torch.int8 if kind == "int8" else CODES)
    scale = torch.rand(-(-outputs // 128), -(-inputs // 128), device=device) * 0.5 + 0.25
    return (numbers * inputs**0.5 * 100).clamp(-448, 448).to(CODES), scale * inputs**-0.5 / 100


@GPU
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16, 40, 64, 65, 128, 129, 700])
@pytest.mark.parametrize("kind", ["row", "block", "int8"])
def test_gpu_kernels_compute_the_definition(kind: str, rows: int, bias: bool) -> None:
    """Against the quantised rows in float64, where the rows are quantised: what remains is rounding to bf16."""
    generator = torch.Generator("cuda").manual_seed(rows)
    for outputs, inputs in ((4096, 4096), (2592, 3072), (48, 112)):
        weight, scale = eight_bit_weight(kind, outputs, inputs, "cuda", rows)
        x = torch.randn(rows, inputs, device="cuda", generator=generator).bfloat16()
        added = torch.randn(outputs, device="cuda", generator=generator).bfloat16() if bias else None
        out = fp8_linear_gpu(x, weight, scale, added).double()
        ring = fp8_ring_gemm_plan(2 * rows, outputs, inputs)
        codes, x_scale = fp8_rows_reference(x, codes=weight.dtype)
        whole = rows <= PAIRED_ROWS and ring is not None
        known = x.double() if whole else codes.double() * x_scale[:, None].double()
        if kind == "block":
            kernel = choose("fp8-block", rows, outputs, inputs, False, device_facts(x.device)).kernel
            if kernel == "expand":                       # x stays as it is
                known = x.double()
            elif kernel == "scaled_mm_blocks":
                codes, x_scale = fp8_groups(x)
                known = (codes.double().unflatten(1, (-1, 128)) * x_scale.double()[..., None]).flatten(1)[:rows]
        exact = fp8_linear_reference(known, weight, scale, None if added is None else added.double())
        assert (out - exact).norm() / exact.norm() < 0.004


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("codes", [CODES, torch.int8])
def test_rows_are_their_codes_times_their_scales(codes: torch.dtype, paired: bool) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1e5])[:, None]
    made, scale = fp8_rows_reference(x, paired, codes)
    numbers = made.double() * scale[:, None].double()
    if paired:
        numbers = numbers[::2] + numbers[1::2]
    error, largest = (numbers - x.double()).abs(), x.abs().amax(1, keepdim=True).double()
    step = largest / 127 if codes == torch.int8 else x.abs().double() / 8 + largest / 448 / 512
    assert made.dtype == codes and (error <= step * (0.51 / FINER[codes] if paired else 0.51)).all()


@GPU
@pytest.mark.parametrize("rows", [1, 8, 64, 128, 256])
def test_gpu_sums_of_many_equal_terms_are_right(rows: int) -> None:
    """Tensor cores truncate sums of e4m3 products: 14,336 equal ones come out too small unless float32 adds partial sums."""
    x = torch.ones(rows, 14336, device="cuda", dtype=torch.bfloat16)
    weight = torch.full((4096, 14336), 1.125, device="cuda").to(CODES)
    out = fp8_linear_gpu(x, weight, torch.ones(4096, device="cuda"))
    torch.testing.assert_close(out.float(), torch.full_like(out, 14336 * 1.125, dtype=torch.float32), rtol=2**-8, atol=0)


@GPU
@pytest.mark.parametrize("kind", ["row", "block", "int8"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(4096, 14336), (8192, 8192), (2560, 3072)])
@pytest.mark.parametrize(("residual", "bias", "gate"), [(True, False, "silu"), (False, True, "gelu_tanh")])
def test_one_row_is_normed_quantised_and_gated_by_the_kernels_that_multiply_it(
    kind: str, hidden: int, intermediate: int, residual: bool, bias: bool, gate: str
) -> None:
    """Several times in a row, and a row of zeros: split-K leaves its counters at zero, and no scale is 0."""
    generator = torch.Generator("cuda").manual_seed(hidden)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    up, up_scale = eight_bit_weight(kind, 2 * intermediate, hidden, "cuda", 1)
    down, down_scale = eight_bit_weight(kind, hidden, intermediate, "cuda", 2)
    norm, up_bias, down_bias = random(hidden), random(2 * intermediate) if bias else None, random(hidden) if bias else None
    for size in (1.0, 30.0, 0.0):
        x, added = size * random(1, hidden), size * random(1, hidden) if residual else None
        whole, whole_stream = normed_fp8_linear_gpu(x, added, norm, 1e-5, up, up_scale, up_bias, norm_offset=0.5)
        known, stream = normed_fp8_linear_reference(
            x.double(), None if added is None else added.double(), norm.double(), 1e-5, up, up_scale,
            None if up_bias is None else up_bias.double(), norm_offset=0.5,
        )
        assert close(whole, known) and close(whole_stream, stream)
        made = gated_one_row(
            x, added, norm, 1e-5, up, up_scale, up_bias, gate, (down, down_scale), norm_offset=0.5
        )
        assert made is not None and close(made[1], stream)
        act = gated_activation_reference(known, gate)
        assert close(made[0].x, act) and made[0].peaks.max() == made[0].x.abs().max()
        out = multiplied_row(made[0], down, down_scale, down_bias)
        assert close(out, fp8_linear_reference(act, down, down_scale, None if down_bias is None else down_bias.double()))


@GPU
@pytest.mark.parametrize("kind", ["row", "int8"])
@pytest.mark.parametrize("rows", [65, 100, 128])
@pytest.mark.parametrize(("residual", "bias", "gate"), [(True, False, "silu"), (False, True, "gelu_tanh")])
def test_gate_and_up_of_many_rows_are_one_gemm(kind: str, rows: int, residual: bool, bias: bool, gate: str) -> None:
    """Pairs that do not fill the last tile, and inputs that do not fill the last block."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    for pairs, hidden in ((14336, 4096), (13008, 2064)):
        weight, scale = eight_bit_weight(kind, 2 * pairs, hidden, "cuda", 1)
        x, added, norm = random(rows, hidden), random(rows, hidden) if residual else None, random(hidden)
        shift = random(2 * pairs) if bias else None
        made = gated_linear(x, added, norm, 1e-5, weight, scale, shift, gate, norm_offset=0.5)
        assert made is not None
        codes, x_scale, stream = normed_fp8_rows_reference(x, added, norm, 1e-5, norm_offset=0.5, codes=weight.dtype)
        known = fp8_linear_reference(
            codes.double() * x_scale[:, None].double(), weight, scale, None if shift is None else shift.double()
        )
        exact = gated_activation_reference(known, gate)
        assert (made[0].double() - exact).norm() <= 0.008 * exact.norm() and close(made[1], stream)
        again = gated_linear(x, added, norm, 1e-5, weight, scale, shift, gate, norm_offset=0.5)
        assert again is not None and torch.equal(again[0], made[0])


def test_gate_and_up_of_many_rows_have_a_plan() -> None:
    """Not with scales of blocks, nor where a tile would have few pairs."""
    plan = WidePlan(256, 224, 1, 4, 5)
    for format in ("fp8-row", "int8-row"):
        assert choose(format, 128, 14336, 4096, True, H200) == ("gated_wide_gemm", plan, False)
        assert choose(format, 128, 28672, 8192, True, H200) == ("gated_wide_gemm", plan, False)
        assert choose(format, 64, 14336, 4096, True, H200).kernel == "ring_gemm"
        assert choose(format, 128, 8192, 2048, True, H200).kernel == "wide_gemm"
    assert choose("fp8-block", 128, 14336, 4096, True, H200).kernel == "wide_gemm"


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found.double() - exact).norm() <= 0.006 * exact.norm())


def test_one_row_has_a_plan_where_its_codes_and_its_rings_fit() -> None:
    """Shapes of 8B and 70B models on an H200; the last row is too long to hold its codes beside the weights."""
    names = {
        (outputs, inputs, gated): choose("fp8-row", 1, outputs, inputs, gated, H200).kernel
        for outputs, inputs, gated in [
            (6144, 4096, False), (14336, 4096, True), (4096, 14336, False), (28672, 8192, True), (1024, 1024, False),
            (8192, 28672, False),
        ]
    }
    assert list(names.values()) == ["one_row_gemm"] * 4 + ["codes_gemv", "ring_gemm"]
    assert not one_row_plan(4096, 14336, False, H200.shared - 1280).whole      # type: ignore[union-attr]
    assert choose("fp8-row", 2, 6144, 4096, False, H200).kernel == "ring_gemm"

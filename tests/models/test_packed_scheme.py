"""4-bit weights in the layout of their kernels: the same numbers as stored, alone and behind a norm; and what stays as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantised_models import BLOCK_FORMATS, SIZES, random_blocks, random_stored
from safetensors.torch import load_file, save_file
from tiny_models import save_checkpoint

from ridgeline.bench.workload.shapes import write_shape
from ridgeline.distributed.comm import Communicator
from ridgeline.layers import expert_weights
from ridgeline.models.checkpoints.gguf_formats import FORMATS
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.checkpoints.quantisation_check import quantised_memory
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.packed.block_weight import packed_numbers
from ridgeline.ops.packed.expand_room import ExpandRoom
from ridgeline.ops.quantised.expand import expand
from ridgeline.ops.rms_norm import rms_norm_reference
from ridgeline.quant.choose import schemes
from ridgeline.quant.format import Scales, WeightFormat, common, made_format, uint4
from ridgeline.quant.four_bits import FourBits, four_bits
from ridgeline.quant.packed import Packed, _holds, _in_place, stayed
from ridgeline.quant.quantised import Quantised, quantised_weight
from ridgeline.quant.scheme import Scheme, Unquantised

NVFP4 = WeightFormat("e2m1", Scales((1, 16), "float8_e4m3fn", outer=Scales((1, 0))))


def decoder(path: Path, quantization: str, kind: Callable[..., Quantised], dtype: torch.dtype = torch.float64) -> Decoder:
    """As on a GPU: codes are kept."""
    config, plain = load_model_config(path), Unquantised()
    formats = LinearFormats(config, quantization, "cuda")

    def scheme(place: str) -> Scheme:
        chosen = formats(place).format
        return plain if chosen is None else kind(chosen, plain, made=True, keeps=True)

    made = Decoder(config, Communicator(), dtype, "cpu", 64, scheme)
    load_weights(made, path, config)
    return made


def linears(made: Decoder) -> list[Any]:
    return [
        each for layer in made.layers
        for each in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    ]


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_packing_keeps_every_number(name: str, tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model", **SIZES)
    packed, stored = linears(decoder(path, name, Packed)), linears(decoder(path, name, Quantised))
    for one, other in zip(packed, stored, strict=True):
        assert one.packed is not None and not hasattr(other, "packed")
        assert one.packed.gated == (set(one.rows) == {"gate", "up"})
        assert torch.equal(one.scheme.numbers(one), other.scheme.numbers(other))
        assert one.scheme.read_bytes(one, 1) == one.packed.nbytes


def test_products_are_those_of_the_numbers(tmp_path: Path) -> None:
    made = decoder(save_checkpoint("llama", tmp_path / "model", **SIZES), "int4", Packed)
    mlp, norm = made.layers[0].mlp, made.layers[0].mlp_norm
    weight = mlp.gate_up.scheme.numbers(mlp.gate_up)
    x = torch.randn(3, weight.shape[1], dtype=torch.float64)
    torch.testing.assert_close(mlp.gate_up.scheme.apply(mlp.gate_up, x, None), F.linear(x, weight))
    out, stream = mlp.gate_up.scheme.apply_normed(mlp.gate_up, x, x, norm, None, "silu")
    left, right = F.linear(rms_norm_reference(2 * x, norm.weight, norm.eps), weight).chunk(2, 1)
    torch.testing.assert_close(out, F.silu(left) * right)
    assert torch.equal(stream, 2 * x)


def test_what_the_layout_would_round_is_left_alone() -> None:
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    scale = torch.ones(32, 2)
    assert _holds(FourBits("uint4", codes, scale, None, None, None), True)
    assert _holds(FourBits("uint4", codes, scale, scale * 7, None, None), False)
    assert not _holds(FourBits("uint4", codes, scale + 2**-20, None, None, None), False)
    assert not _holds(FourBits("uint4", codes, scale, scale * 7.5, None, None), False)
    assert not _holds(FourBits("uint4", codes, torch.ones(32, 3), None, None, None), False)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_gguf_formats_are_packed_as_they_are(name: str) -> None:
    linear, weight = torch.nn.Module(), random_blocks(name, 32, 512)
    format = common(FORMATS[each] for each in name.split(" and "))
    assert format is not None
    scheme, linear.format = Packed(format, Unquantised()), format
    linear.quantised, linear.weight, linear.rows, linear.is_loaded = weight, weight.weight, {"gate": 16, "up": 16}, True
    linear.packed, linear.dtype = None, torch.float64
    linear.packed = scheme._packed(linear, weight)
    assert linear.packed is not None and linear.packed.gated
    assert torch.equal(scheme.numbers(linear), expand(weight, torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_the_ledger_counts_the_place_that_the_linears_ask_for(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path, room = save_checkpoint("llama", tmp_path / "model", **SIZES), ExpandRoom()
    made = decoder(path, name, functools.partial(Packed, room=room), dtype)
    numbers = max(each.packed.outputs * each.packed.inputs for each in linears(made))
    assert room.needed == (2 * numbers if dtype == torch.bfloat16 else 0)        # others are expanded by the definition
    assert quantised_memory(made.config, name, "cuda", 1).room == numbers
    assert all((each.packed.room is room) == (dtype == torch.bfloat16) for each in linears(made))


@pytest.mark.parametrize(("dtype", "names"), [(torch.float16, ["layers.0.mlp.down"]), (torch.bfloat16, [])])
def test_memory_is_counted_for_a_linear_whose_scales_decide_that_it_stays_as_stored(
    dtype: torch.dtype, names: list[str], tmp_path: Path
) -> None:
    """One output with small weights alone: float16 would lose its scales. Nothing tells before the weights are read."""
    path = save_checkpoint("llama", tmp_path / "model", **SIZES)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][5] *= 1e-7
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    made = decoder(path, "int4", Packed, dtype)
    assert stayed(made) == names
    name = str(dtype).removeprefix("torch.")
    assert made.weight_bytes <= weight_bytes(made.config, name, "cuda", quantization="int4", kernels=H200)
    expands = max((each.weight.shape[0] * each.columns.size for each in linears(made) if each.packed is None), default=0)
    counted = quantised_memory(made.config, "int4", "cuda", 1, dtype=name)
    assert counted.scratch >= expands and (counted.scratch > 0) == bool(names) and counted.room > 0


@pytest.mark.parametrize(("format", "in_place"), [
    (made_format("int4", 512, 512), True), (made_format("mxfp4", 512, 512), True), (FORMATS["Q8_0"], True), (NVFP4, True),
    (FORMATS["Q4_K"], False),                            # scales and offsets lie in words together: no old tensor has that size
])
def test_packing_leaves_its_tensors_in_the_memory_of_the_stored_ones(format: WeightFormat, in_place: bool) -> None:
    """What packing takes beside them is free as a whole afterwards. A tensor in it would keep its segment."""
    weight = random_stored(format, 64, 512, "cpu")
    old = {each.untyped_storage().data_ptr() for each in weight if isinstance(each, torch.Tensor)}
    linear = torch.nn.Module()
    linear.format, linear.weight, linear.rows, linear.is_loaded = format, weight.weight, {"gate": 32, "up": 32}, True
    linear.dtype = torch.bfloat16
    packed = Packed(format, Unquantised())._packed(linear, weight)
    assert packed is not None
    wanted, bytes_before = packed_numbers(packed, torch.float64), packed.nbytes
    found = _in_place(packed, weight)
    tensors = [each for each in (found.codes, found.high, found.scale, found.zero, found.blocks, found.outer) if each is not None]
    assert all((each.untyped_storage().data_ptr() in old) == in_place for each in tensors)
    assert torch.equal(packed_numbers(found, torch.float64), wanted) and found.nbytes == bytes_before
    assert all(each.data_ptr() % 16 == 0 for each in tensors)


@pytest.mark.parametrize("format", [made_format("int4", 512, 512), FORMATS["Q8_0"], FORMATS["Q4_K"], FORMATS["Q6_K"], NVFP4])
@pytest.mark.parametrize("parts", [("gate", "up"), ("",)])
def test_kernels_are_collected_without_a_packed_copy_of_the_weight(
    format: WeightFormat, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lie among what loading takes meanwhile, and keep its segments. Kernels see the same shapes and dtypes."""

    class OnGpu:
        """Codes of a linear on a GPU that is not there."""

        device = torch.device("cuda", 0)

        def __len__(self) -> int:
            return 1024

    monkeypatch.setattr("ridgeline.quant.packed.device_facts", lambda device: H200)
    weight, linear = random_stored(format, 1024, 512, "cpu"), torch.nn.Module()
    linear.format, linear.quantised, linear.weight, linear.packed = format, weight, OnGpu(), None
    linear.is_loaded, linear.was_tried, linear.dtype = False, False, torch.bfloat16
    linear.rows, linear.columns = {part: 1024 // len(parts) for part in parts}, SimpleNamespace(size=512)
    scheme, old = Packed(format, Unquantised()), {each.untyped_storage().data_ptr() for each in weight if torch.is_tensor(each)}
    assert scheme._is_packed(linear) and scheme._is_packed(linear)
    whole = scheme._packed(linear, weight)
    assert whole is not None
    for field in dataclasses.fields(whole):
        one, other = getattr(linear.packed, field.name), getattr(whole, field.name)
        if not isinstance(other, torch.Tensor):
            assert one == other or field.name == "room"
            continue
        assert one.shape == other.shape and one.dtype == other.dtype
        shared = one.untyped_storage().data_ptr() in old             # NVFP4's outer scales
        assert shared or one.untyped_storage().nbytes() <= other.untyped_storage().nbytes() // 64


@pytest.mark.parametrize("zero", [None, "code"])
def test_dummy_weights_of_four_bits_have_a_mean_of_zero(zero: str | None) -> None:
    """Else every token of a deep model has the same hidden state in the end, and a mixture's tokens the same experts."""
    scheme = Quantised(uint4(128, "float16", zero), Unquantised())
    made = {
        spec.name: scheme.dummy(spec, 512, torch.device("cpu"))(torch.Generator().manual_seed(1), spec.shape(64, 512))
        for spec in scheme.format.tensors()
    }
    numbers = expand(quantised_weight(scheme.format, 512, made), torch.float32)
    assert abs(float(numbers.mean())) < 0.02 * float(numbers.std())      # 0.1 with codes of all values


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K"])
def test_dummy_weights_with_offsets_are_kept_as_those_of_files_are(name: str) -> None:
    """Offsets of zero would be packed as zeros, and a benchmark would time other kernels than a file's."""
    scheme = Packed(FORMATS[name], Unquantised())
    tensors = {
        spec.name: scheme.dummy(spec, 512, torch.device("cpu"))(torch.Generator(), spec.shape(32, 512))
        for spec in FORMATS[name].tensors()
    }
    weight = quantised_weight(FORMATS[name], 512, tensors)
    four = four_bits(weight)
    assert four is not None and not _holds(four, False)
    assert expand(weight, torch.float32).mean().abs() < 0.2 * expand(weight, torch.float32).std()


def test_experts_of_a_layer_are_packed_into_the_memory_of_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,880 inputs are 3,072 of a packed matrix: memory for these is taken before loading, and nothing is left behind."""
    monkeypatch.setattr(expert_weights, "packs_experts", lambda *shapes: True)
    path = write_shape(
        "gpt-oss-20b", 1, hidden_size=64, intermediate_size=96, num_local_experts=5, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, vocab_size=64,
    )
    config = load_model_config(path)
    formats = LinearFormats(config, "none", "cuda", 1)
    model = Decoder(config, Communicator(), torch.float32, "cpu", 64, schemes(formats, Unquantised(), ExpandRoom()))
    load_weights(model, path, config, "dummy", finish=False)
    layer = next(module for module in model.modules() if isinstance(module, expert_weights.ExpertWeights))
    names = ("gate_up", "gate_up_scale", "down", "down_scale")
    before = {name: getattr(layer, name) for name in names}
    packed, layer.packed = layer.packed, {}
    numbers = layer.numbers()                            # of the codes as stored
    layer.packed = packed
    layer.finish()
    for name in names:
        after = getattr(layer, name)
        assert after.data_ptr() == before[name].data_ptr() and after.nbytes > before[name].nbytes
        assert after.untyped_storage().nbytes() == after.nbytes
    assert all(torch.equal(layer.numbers()[name], numbers[name]) for name in numbers)

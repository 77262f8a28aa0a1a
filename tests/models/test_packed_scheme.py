"""4-bit weights in the layout of their kernels: the same numbers as stored, alone and behind a norm; and what stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantised_models import BLOCK_FORMATS, SIZES, random_blocks
from tiny_models import save_checkpoint

from ridgeline.distributed.comm import Communicator
from ridgeline.models.checkpoints.gguf_formats import FORMATS
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.weights import load_weights
from ridgeline.ops.quantised.expand import expand
from ridgeline.ops.rms_norm import rms_norm_reference
from ridgeline.quant.format import common
from ridgeline.quant.four_bits import FourBits, four_bits
from ridgeline.quant.packed import Packed, _holds
from ridgeline.quant.quantised import Quantised, quantised_weight
from ridgeline.quant.scheme import Scheme, Unquantised


def decoder(path: Path, quantization: str, kind: type[Quantised]) -> Decoder:
    """As on a GPU: codes are kept."""
    config, plain = load_model_config(path), Unquantised()
    formats = LinearFormats(config, quantization, "cuda")

    def scheme(place: str) -> Scheme:
        chosen = formats(place).format
        return plain if chosen is None else kind(chosen, plain, made=True, keeps=True)

    made = Decoder(config, Communicator(), torch.float64, "cpu", 64, scheme)
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
    scheme._pack(linear)
    assert linear.packed is not None and linear.packed.gated
    assert torch.equal(scheme.numbers(linear), expand(weight, torch.float64))


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

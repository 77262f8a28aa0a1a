"""A linear's scheme: the layouts of one weight give one product, and their bytes are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import load, save_checkpoint

from ridgeline.distributed.comm import ALONE, Communicator
from ridgeline.distributed.sharding import whole
from ridgeline.layers.linear import GateUpLinear, Linear, Placement
from ridgeline.layers.norm import RMSNorm
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.cpu import native
from ridgeline.ops.registry import set_kernels
from ridgeline.quant.cpu_packed import CpuPacked, plain_scheme
from ridgeline.quant.layout import fewest_outputs
from ridgeline.quant.scheme import Fused, PackedFloat32, Scheme, Unquantised

CPU = torch.device("cpu")


def plain_linear(inputs: int, outputs: int, bias: bool, fewest: int) -> Linear:
    place = Placement(ALONE, lambda path: PackedFloat32(fewest), torch.float32, CPU)
    return Linear({"": whole(outputs)}, whole(inputs), bias, place)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 80), (33, 7), (576, 131)])
def test_both_layouts_give_the_same_product(inputs: int, outputs: int, bias: bool) -> None:
    if not PackedFloat32.available():
        pytest.skip("this torch has no oneDNN")
    linear = plain_linear(inputs, outputs, bias, 1)
    for parameter in linear.parameters():
        parameter.normal_()
    linear.finish()
    for rows in (0, 1, 2, 3, 4, 17, 64):
        x = torch.randn(rows, inputs)
        exact = torch.nn.functional.linear(
            x.double(), linear.weight.double(), linear.bias.double() if linear.bias is not None else None
        )
        with torch.inference_mode():
            out = linear(x, None)
        assert out.shape == (rows, outputs) and out.dtype == torch.float32
        # A sum of n products is off by at most n epsilon times the sum of their sizes, in whatever order it is taken.
        bound = (x.abs().double() @ linear.weight.abs().double().T + 4) * (inputs + 2) * torch.finfo(torch.float32).eps
        assert bool(((out - exact).abs() <= bound).all())


def test_rows_decide_the_layout() -> None:
    if not PackedFloat32.available():
        pytest.skip("this torch has no oneDNN")
    linear = plain_linear(16, 8, False, 1)
    linear.weight.fill_(1.0)
    linear.finish()
    linear.weight.fill_(2.0)         # now the two layouts can be told apart
    sums = [float(linear(torch.ones(rows, 16), None)[0, 0]) for rows in (1, 3, 4, 40)]
    assert sums == [32.0, 32.0, 16.0, 16.0]


def test_only_float32_on_the_cpu_is_packed() -> None:
    kinds = {dtype: type(plain_scheme(CPU, dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)}
    packed = (CpuPacked if native.library() else PackedFloat32) if PackedFloat32.available() else Unquantised
    assert kinds == {torch.float32: packed, torch.float64: Unquantised, torch.bfloat16: Unquantised}
    assert type(plain_scheme(torch.device("cuda"), torch.float32)) is Fused
    set_kernels("reference")         # every op by its definition: the weights are float32
    try:
        assert type(plain_scheme(CPU, torch.float32)) is not CpuPacked
    finally:
        set_kernels("auto")


def test_linears_with_few_outputs_stay_plain_on_x86() -> None:
    assert (fewest_outputs("x86_64"), fewest_outputs("aarch64")) == (2048, 1)
    linear = plain_linear(16, 8, False, 9)
    linear.finish()
    assert linear.packed is None and linear.scheme.extra_bytes(linear) == 0
    assert linear(torch.ones(40, 16), None).shape == (40, 8)


@pytest.mark.parametrize("scheme", [Unquantised(), Fused(), PackedFloat32(1)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("first", [True, False])
def test_a_product_with_its_neighbours_is_the_same_in_every_scheme(scheme: Scheme, first: bool) -> None:
    if isinstance(scheme, PackedFloat32) and not PackedFloat32.available():
        pytest.skip("this torch has no oneDNN")
    place = Placement(ALONE, lambda path: scheme, torch.float32, CPU)
    generator = torch.Generator().manual_seed(3)
    norm = RMSNorm(24, 1e-5, 1.0, torch.float32, CPU)
    plain, gated = Linear({"": whole(10)}, whole(24), True, place), GateUpLinear(24, 9, False, place)
    for parameter in (*norm.parameters(), *plain.parameters(), *gated.parameters()):
        parameter.data.normal_(generator=generator)
    plain.finish()
    gated.finish()
    for rows in (1, 3, 20):
        x = torch.randn(rows, 24, generator=generator)
        residual = None if first else torch.randn(rows, 24, generator=generator)
        total = x if residual is None else x + residual
        normed = norm(total)
        with torch.inference_mode():
            out, stream = plain.normed(x, residual, norm, None)
            torch.testing.assert_close(out, F.linear(normed, plain.weight, plain.bias), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(stream, total, rtol=0, atol=0)
            out, stream = gated.normed_gated(x, residual, norm, "silu", None, gated)
            gate, up = F.linear(normed, gated.weight).chunk(2, dim=-1)
            torch.testing.assert_close(out, F.silu(gate) * up, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(stream, total, rtol=0, atol=0)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", ["llama", "llama-bias", "gemma3", "qwen3", "smollm2"])
def test_predicted_bytes_are_the_bytes(name: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    path = save_checkpoint(name, tmp_path, intermediate_size=1030)       # gate and up together have 2,060 outputs
    config = load_model_config(path)
    assert load(path, torch.float64).weight_bytes == weight_bytes(config, "float64", "cpu")
    plain = Decoder(config, Communicator(), torch.float32, "cpu", 32, lambda path: Unquantised())
    load_weights(plain, path, config)
    assert plain.weight_bytes == weight_bytes(config, "float32", "cuda") == 4 * config.num_parameters
    if PackedFloat32.available():
        packed = load(path).weight_bytes
        assert packed == weight_bytes(config, "float32", "cpu") > plain.weight_bytes

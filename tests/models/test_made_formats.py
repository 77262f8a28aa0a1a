"""`quantization=`: what loading makes of a 16-bit checkpoint, in every format; and the law that the engine computes with exactly
those numbers, made while loading or stored in a quantised checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import SIZES, save_quantised
from safetensors.torch import load_file, save_file
from test_laws import PLAIN, requests, run
from tiny_models import save_checkpoint
from torch import Tensor

from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.checkpoints.quantisation_check import check_quantization, quantised_memory
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.kernel_table import DeviceFacts as KernelFacts
from ridgeline.ops.packed.packed_sizes import MOST_EXPANDED
from ridgeline.ops.quantised.expand import expand
from ridgeline.quant.choose import schemes
from ridgeline.quant.format import MADE, WeightFormat, made_format, quantization_rules
from ridgeline.quant.quantise import e2m1_codes, quantised
from ridgeline.quant.quantised import Quantised, quantised_weight
from ridgeline.quant.scheme import Scheme, Unquantised
from ridgeline.resolve import DeviceFacts, resolve

OPTIONS = PLAIN | {"device": "cpu", "dtype": "float64", "kernels": "reference"}
LARGEST_ERROR = {"fp8": 2**-4, "fp8-block": 2**-4, "int8": 1 / 127, "int4": 1 / 7, "mxfp4": 0.5}


def rounded(weight: Tensor, name: str) -> Tensor:
    """What the format keeps of a weight."""
    format = made_format(name, weight.shape[1], weight.shape[1])
    return weight.double() if format is None else rounded_as(weight, format)


def rounded_as(weight: Tensor, format: WeightFormat) -> Tensor:
    return expand(quantised_weight(format, weight.shape[1], quantised(weight, format)), torch.float64)


def decoder(path: Path, quantization: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """As on a GPU: codes are kept."""
    config, plain = load_model_config(path), Unquantised()
    formats = LinearFormats(config, quantization, "cuda")

    def scheme(place: str) -> Scheme:
        chosen = formats(place).format
        return plain if chosen is None else Quantised(chosen, plain, made=True, keeps=True)

    made = Decoder(config, Communicator(), dtype, "cpu", 64, scheme)
    load_weights(made, path, config)
    return made


@pytest.mark.parametrize("name", MADE)
def test_numbers_are_near_and_the_largest_is_kept(name: str) -> None:
    weight = torch.randn(80, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 80)[:, None]
    found = rounded(weight, name)
    tops = weight.abs().amax(1)
    assert ((found - weight).abs().amax(1) <= LARGEST_ERROR[name] * tops).all() or name == "fp8-block"
    error = (found - weight).norm() / weight.norm()
    assert error < {"fp8": 0.03, "fp8-block": 0.03, "int8": 0.01, "int4": 0.13, "mxfp4": 0.15}[name]
    assert not rounded(torch.zeros(16, 128), name).any()                 # zeros stay zeros, and their scale is finite


def test_e2m1_rounds_ties_to_even_codes() -> None:
    values = torch.tensor([0.0, 0.25, 0.2501, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100.0, -0.25, -0.3, -6.0])
    assert e2m1_codes(values).tolist() == [0, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 0, 9, 15]


@pytest.mark.parametrize("name", MADE)
def test_a_checkpoint_becomes_its_rounded_weights(name: str, tmp_path: Path) -> None:
    """Fused parts on their own; the head keeps its numbers; memory is as predicted."""
    path = save_checkpoint("llama", tmp_path / "model", **SIZES)
    made, tensors = decoder(path, name), load_file(path / "model.safetensors")
    for layer in range(2):
        qkv, down = made.layers[layer].attention.qkv, made.layers[layer].mlp.down
        parts = [tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(qkv.scheme.numbers(qkv), torch.cat([rounded_as(each, qkv.format) for each in parts]))
        stored = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert torch.equal(down.scheme.numbers(down), rounded_as(stored, down.format))
        assert qkv.format.grid == down.format.grid == MADE[name].grid
    assert torch.equal(made.numbers()["head.weight"], tensors["lm_head.weight"].double())
    assert decoder(path, name, torch.float32).weight_bytes == weight_bytes(
        load_model_config(path), "float32", "cuda", 1, name, H200._replace(hopper=False))


def test_patterns_choose_formats_and_the_first_counts(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model", **SIZES)
    config = load_model_config(path)

    def names(quantization: str) -> list[str | None]:
        formats = LinearFormats(config, quantization, "cuda")
        found = [formats(place).format for place in ("layers.0.attention.qkv", "layers.0.mlp.down", "layers.1.mlp.down", "head")]
        return [None if format is None else format.name for format in found]

    assert names("int4") == ["uint4-64", "uint4-128", "uint4-128", None]
    assert names("layers.1=none,mlp=int4,attention=fp8") == ["e4m3-row", "uint4-128", None, None]
    assert names("head=int8,=mxfp4") == ["e2m1-32", "e2m1-32", "e2m1-32", "int8-row"]
    assert dict(quantization_rules(EngineConfig.of(quantization={"mlp": "int4"}).model.quantization)) == {"mlp": "int4"}
    for wrong in ("awq", "mlp=int3", '{"mlp": 4}', "(=fp8"):
        with pytest.raises(ConfigError, match="quantization"):
            names(wrong)


@pytest.mark.parametrize(("quantization", "tied", "says"), [
    ("down_proj=int4", False, "'down_proj' is in no path of a linear; paths are layers.N.NAME with the names attention.output, "
                              "attention.qkv, head, mlp.down, mlp.gate_up"),
    ("layers.7.=none,=int4", False, "'layers.7.' is in no path of a linear"),
    ("=int4,head=fp8", True, "'head' is the head, which shares its weight with the embedding"),
])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pattern_that_changes_nothing_is_refused(
    quantization: str, tied: bool, says: str, device: str, tmp_path: Path
) -> None:
    """A name of the checkpoint's own modules, a layer that is not there: without an error it looked as if it were quantised."""
    model = load_model_config(save_checkpoint("llama", tmp_path, **SIZES | {"tie_word_embeddings": tied}))
    dtype = "float32" if device == "cpu" else "bfloat16"
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_quantization(model, quantization, device, dtype, 1, False, {})
    check_quantization(model, "layers.1.mlp=int4,attention=fp8,=none", device, dtype, 1, False, {})


@pytest.mark.parametrize("quantization", [pytest.param("int4", marks=pytest.mark.slow), "mlp=mxfp4,attention=int8"])
def test_the_engine_computes_with_the_rounded_weights(quantization: str, tmp_path: Path) -> None:
    model = save_checkpoint("llama", tmp_path / "model", **SIZES)
    other = save_checkpoint("llama", tmp_path / "other", **SIZES)
    tensors = load_file(model / "model.safetensors")
    for key, value in tensors.items():
        if "proj" in key:
            name = "int4" if quantization == "int4" else "mxfp4" if "mlp" in key else "int8"
            tensors[key] = rounded(value, name)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    asked = requests()
    found = run(model, OPTIONS | {"quantization": quantization}, asked)
    assert found.answers == run(other, OPTIONS, asked).answers
    assert found.answers != run(model, OPTIONS, asked).answers


@pytest.mark.parametrize("dialect", ["ct-w4a16-asymmetric", pytest.param("fp8-uneven-block", marks=pytest.mark.slow),
                                     pytest.param("ct-nvfp4", marks=pytest.mark.slow),
                                     pytest.param("gptq-desc-act", marks=pytest.mark.slow)])
def test_the_engine_computes_with_a_checkpoints_numbers(dialect: str, tmp_path: Path) -> None:
    quantised_path, plain = save_quantised(dialect, tmp_path)
    asked = requests()
    assert run(quantised_path, OPTIONS, asked).answers == run(plain, OPTIONS, asked).answers


# -- what resolve says --------------------------------------------------------------------------------------------------


def resolved(model: Path, kind: str = "cuda", **options: Any) -> Any:
    facts = DeviceFacts(kind, 2**34, ("bfloat16", "float32") if kind == "cuda" else ("float32",))
    return resolve(EngineConfig.of(model=str(model), **options), facts)


def test_reasons_and_refusals(tmp_path: Path) -> None:
    awq, _ = save_quantised("awq", tmp_path / "awq")
    fp8, _ = save_quantised("ct-fp8-tensor", tmp_path / "fp8")
    assert "awq checkpoint: kept as uint4-32, and multiplied as stored" in resolved(awq, "cpu").reasons["quantization"]
    nf4, _ = save_quantised("bnb-nf4", tmp_path / "nf4")
    assert "bitsandbytes checkpoint: kept as nf4-64, and multiplied as stored" in resolved(nf4, "cpu").reasons["quantization"]
    nvfp4, _ = save_quantised("ct-nvfp4", tmp_path / "nvfp4")
    assert "a CPU expands the weights to float32" in resolved(nvfp4, "cpu").reasons["quantization"]
    packed = "bitsandbytes checkpoint: kept packed as nf4-64, which saves memory; this GPU has no kernels of their own"
    assert packed in resolved(nf4).reasons["quantization"]
    assert resolved(awq, quantization="awq").memory == resolved(awq).memory
    assert resolved(fp8).dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"quantization 'gptq' is not known; .*use the checkpoint's own format, awq"):
        resolved(awq, quantization="gptq")
    with pytest.raises(ConfigError, match="deterministic has no kernels for awq weights; use a checkpoint that is not quantised"):
        resolved(awq, deterministic=True)
    with pytest.raises(ConfigError, match="deterministic has no kernels for mxfp4 weights"):     # only its experts are quantised
        check_quantization(load_model_config(write_shape("gpt-oss-20b")), "none", "cuda", "bfloat16", 1, True, {})
    with pytest.raises(ConfigError, match="fp8 has no kernels for float16; use dtype bfloat16"):
        resolved(fp8, dtype="float16")


def test_what_meets_activations_of_16_bits_is_said(tmp_path: Path) -> None:
    """Weights alone in fp8 have general kernels; 4-bit weights that were made for 8-bit activations have fast ones of 16 bits."""
    alone, _ = save_quantised("ct-fp8-channel", tmp_path / "alone")
    said = resolved(alone).reasons["quantization"]
    assert "kept packed as e4m3-row" in said and "no kernels of their own" in said and "activations" not in said
    w4a8, _ = save_quantised("ct-w4a8", tmp_path / "w4a8")
    assert "activations stay in bfloat16, though the checkpoint was made for int8 ones" in resolved(w4a8).reasons["quantization"]
    for dialect in ("ct-fp8-tensor", "ct-w8a8", "awq"):
        path, _ = save_quantised(dialect, tmp_path / dialect)
        assert "activations stay" not in resolved(path).reasons.get("quantization", "")


AMPERE = H200._replace(hopper=False, fp8=False)


@pytest.mark.parametrize(("quantization", "facts", "expanded", "packed"), [
    ("fp8", H200, 0, 0), ("fp8-block", H200, 0, 0), ("int8", H200, 0, 0),
    ("fp8", AMPERE, 28672 * 4096, 0), ("fp8-block", AMPERE, 28672 * 4096, 0), ("int8", AMPERE, 28672 * 4096, 0),
    ("fp8-block", H200._replace(block_scales=False), 28672 * 4096, 0),
    ("int4", H200, 0, 28672 * 4096), ("mxfp4", H200, 0, 28672 * 4096), ("int4", AMPERE, 28672 * 4096, 0),
])
def test_memory_of_expanded_weights_is_that_of_the_kernels_here(
    quantization: str, facts: KernelFacts, expanded: int, packed: int
) -> None:
    """An H200 multiplies by 8-bit codes whatever the rows are; an A100 has no tensor cores for e4m3, and every product of fp8
    weights expands one. Packed weights are expanded in one place for all steps."""
    model = load_model_config(write_shape("llama-3.1-8b"))
    found = quantised_memory(model, quantization, "cuda", 1, facts)
    assert (found.scratch, found.room) == (expanded, packed)


@pytest.mark.parametrize(("shape", "quantization", "numbers"), [
    ("llama-3.1-8b-nvfp4", "none", 28672 * 4096),
    ("llama-3.1-8b-q8_0", "none", 64256 * 4096), ("llama-3.1-8b-q4_k_m", "none", 64256 * 4096),      # the head, in two parts
    ("llama-3.1-70b", "int4", 28672 * 8192),             # gate and up in two parts; down is as large
])
def test_the_place_of_expanded_weights_is_bounded(shape: str, quantization: str, numbers: int) -> None:
    found = quantised_memory(load_model_config(write_shape(shape)), quantization, "cuda", 1)
    assert (found.scratch, found.room) == (0, numbers) and numbers <= MOST_EXPANDED


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_launched_steps_and_graphs_share_the_place_of_expanded_weights(dtype: str) -> None:
    """In float32 the definition expands weights, in the memory of the step."""
    given = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 64, "dtype": dtype}
    plain, int4 = (
        resolve(EngineConfig.of(model=str(write_shape("llama-3.1-70b")), quantization=quantization, max_model_len=784, **given),
                DeviceFacts("cuda", 2**39, ("bfloat16", "float32")))
        for quantization in ("none", "int4")
    )
    more, numbers = int4.memory["steps"] - plain.memory["steps"], 28672 * 8192
    assert more == (2 * numbers if dtype == "bfloat16" else 2 * 4 * numbers)
    assert (int4.step_bytes == plain.step_bytes) == (dtype == "bfloat16")


def test_memory_counts_packed_weights_and_the_largest_expanded_one(tmp_path: Path) -> None:
    awq, plain = save_quantised("awq", tmp_path)
    packed, wide = resolved(awq), resolved(plain, dtype="bfloat16")
    linears = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128)             # two layers
    saved = wide.memory["weights"] - packed.memory["weights"]
    held = 2 * (128 + 64 + 256 + 64) * 512               # inputs are padded on a Hopper GPU
    assert saved == 2 * linears - (held // 2 + 2 * 2 * held // 32)       # codes, and a scale and a zero for 32 of them
    assert packed.memory["steps"] - wide.memory["steps"] == 2 * 256 * 64 and packed.step_bytes == wide.step_bytes
    scheme = schemes(LinearFormats(packed.model, "none", "cuda"), Unquantised())
    assert scheme("layers.0.mlp.down") is scheme("layers.1.mlp.down")    # one object for one format

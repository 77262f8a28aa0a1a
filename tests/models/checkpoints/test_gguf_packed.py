"""GGUF files kept packed, as on a GPU: canonical codes and scales give the numbers of the reader, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_writer import write_gguf
from test_gguf import random_packed
from test_stored_blocks import small_gguf

from ridgeline.distributed.comm import Communicator
from ridgeline.models.checkpoints.gguf_formats import FORMATS, RECIPES
from ridgeline.models.checkpoints.gguf_packed import packed_gguf
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.quantised.expand import expand
from ridgeline.quant.choose import schemes
from ridgeline.quant.quantised import Quantised, quantised_weight
from ridgeline.quant.scheme import Scheme, Unquantised


@pytest.mark.parametrize("type_name", FORMATS)
def test_the_same_numbers_in_another_order(type_name: str, tmp_path: Path) -> None:
    shape = (6, 512)
    path = write_gguf(tmp_path / "w.gguf", {"general.architecture": "llama"}, {"w": random_packed(type_name, shape)})
    with GGUFFile(path) as file:
        expected, data = torch.from_numpy(file.read("w")), torch.from_numpy(file.raw("w").copy())
    found = packed_gguf(RECIPES[type_name], data)
    format = FORMATS[type_name]
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        spec.name: spec.shape(*shape) for spec in format.tensors()
    }
    assert torch.equal(expand(quantised_weight(format, shape[1], found), torch.float32), expected)
    stored = sum(tensor.nbytes for tensor in found.values())
    assert stored == format.nbytes(*shape) <= 1.25 * data.nbytes or type_name == "TQ1_0"     # 1.6 bits become 2


def packed_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = load_model_config(path)
    formats, plain = LinearFormats(config, "none", "cuda"), Unquantised()

    def scheme(place: str) -> Scheme:
        chosen = schemes(formats, plain)(place)
        if isinstance(chosen, Quantised):
            chosen.keeps = True
        return chosen

    made = Decoder(config, Communicator(), dtype, "cpu", 32, scheme)
    if dtype == torch.float32:                           # as stored: the layout of a Hopper GPU is made after loading
        assert made.weight_bytes == weight_bytes(config, "float32", "cuda", kernels=H200._replace(hopper=False))
    load_weights(made, path, config)
    if dtype == torch.float32:
        assert made.weight_bytes == weight_bytes(config, "float32", "cuda", kernels=H200)
    return made


@pytest.mark.parametrize(("kind", "others", "kept"), [
    ("Q4_0", {}, "uint4-32"),
    ("Q4_1", {}, "uint4-32"),
    ("Q8_0", {"token_embd": "F16"}, "int8-32"),
    ("Q4_0", {"blk.0.attn_v": "Q8_0", "blk.1.attn_v": "Q8_0"}, "int8-32"),       # mixed parts: the widest grid holds both
    ("Q4_1", {"blk.0.attn_v": "F16", "blk.1.attn_v": "F16"}, None),
])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_kept_packed_is_the_same_model(
    kind: str, others: dict[str, str], kept: str | None, tied: bool, tmp_path: Path
) -> None:
    path = small_gguf(tmp_path / "m.gguf", kind, others, tied)
    config = load_model_config(path)
    plain = Decoder(config, Communicator(), torch.float32, "cpu", 32, lambda place: Unquantised())
    load_weights(plain, path, config)
    packed = packed_decoder(path)
    for name, value in packed.numbers().items():
        assert torch.equal(value, plain.numbers()[name]), name
    format = LinearFormats(config, "none", "cuda")("layers.0.attention.qkv").format
    assert (None if format is None else format.name) == kept
    assert isinstance(packed.head.scheme, Quantised) != tied


def test_types_of_two_levels_are_widened_exactly(tmp_path: Path) -> None:
    """A Q4_K_M file stores v as Q6_K and q, k as Q4_K: one linear holds them as q6 with offsets."""
    random = np.random.default_rng(0)
    tensors = {
        f"blk.0.{name}.weight": random_packed(kind, (256, 256), seed)
        for seed, (name, kind) in enumerate({"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K",
                                             "ffn_gate": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K"}.items())
    }
    norms = {f"{name}.weight": np.ones(256, np.float32) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in {
        "block_count": 1, "context_length": 128, "embedding_length": 256, "feed_forward_length": 256,
        "attention.head_count": 2, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }.items()}
    embedding = {"token_embd.weight": random.normal(size=(40, 256)).astype(np.float32)}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors | norms | embedding)
    config = load_model_config(path)
    plain = Decoder(config, Communicator(), torch.float32, "cpu", 32, lambda place: Unquantised())
    load_weights(plain, path, config)
    packed = packed_decoder(path)
    assert packed.layers[0].attention.qkv.format.name == "q6-16"
    assert {packed.layers[0].attention.output.format.grid, packed.layers[0].mlp.down.format.grid} == {"q5", "q6"}
    for name, value in packed.numbers().items():
        assert torch.equal(value, plain.numbers()[name]), name

"""GGUF files in `plan` on a GPU: counted and computed as the engine would have them there."""

from __future__ import annotations

import math
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import write_gguf
from test_gguf import random_packed

from ridgeline.__main__ import main
from ridgeline.cli.cmd_plan import _setup, add_arguments
from ridgeline.config import EngineConfig
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.model_config import load_model_config
from ridgeline.ops.kernel_table import H200
from ridgeline.plan.capacity import Capacity, kernel_facts
from ridgeline.plan.operation import Traffic, compute_limited_batch, layouts
from ridgeline.plan.prediction import Setup
from ridgeline.plan.public_models import find_model
from ridgeline.plan.search import candidates, missing
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.sizes import ledger
from ridgeline.sizes.hardware import DEVICES

HIDDEN, WIDE, EXPERTS, CONTEXT = 512, 1024, 4, 128


def written(path: Path, kind: str, experts: bool = False, embedding: str = "F16", wide: int = WIDE) -> Path:
    """Two layers whose matrices are packed as `kind`: a llama, or a mixture."""
    shapes: dict[str, tuple[int, ...]] = {f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    mlp: dict[str, tuple[int, ...]] = {"gate": (wide, HIDDEN), "up": (wide, HIDDEN), "down": (HIDDEN, wide)}
    shapes |= {f"ffn_{name}_exps": (EXPERTS, *shape) for name, shape in mlp.items()} if experts else {
        f"ffn_{name}": shape for name, shape in mlp.items()}
    tensors: dict[str, Any] = {
        f"blk.{layer}.{name}.weight": random_packed(kind, shape) for layer in range(2) for name, shape in shapes.items()
    }
    norms = {"output_norm": HIDDEN} | {f"blk.{layer}.{name}_norm": HIDDEN for layer in range(2) for name in ("attn", "ffn")}
    if experts:
        norms |= {f"blk.{layer}.attn_{name}_norm": HIDDEN // 4 for layer in range(2) for name in "qk"}
        tensors |= {f"blk.{layer}.ffn_gate_inp.weight": np.ones((EXPERTS, HIDDEN), np.float32) for layer in range(2)}
    tensors |= {f"{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    tensors["token_embd.weight"] = (np.zeros((64, HIDDEN), np.float32), embedding)
    tensors["output.weight"] = random_packed(kind, (64, HIDDEN))
    name = "qwen3moe" if experts else "llama"
    numbers = {
        "block_count": 2, "context_length": CONTEXT, "embedding_length": HIDDEN, "feed_forward_length": wide,
        "attention.head_count": 4, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5,
    } | ({"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": wide} if experts else {})
    return write_gguf(path, {"general.architecture": name} | {f"{name}.{key}": value for key, value in numbers.items()}, tensors)


def planned(path: Path, *words: str, gpu: str = "H200") -> Setup:
    parser = ArgumentParser()
    add_arguments(parser)
    return _setup(parser.parse_args([str(path), "--gpu", gpu, *words]), find_model(str(path)), DEVICES[gpu])


def engine_bytes(path: Path, gpu: str = "H200", **options: Any) -> tuple[str, int]:
    """The dtype and the weights that the engine chooses and counts."""
    sheet = DEVICES[gpu]
    device = DeviceFacts("cuda", sheet.usable, (sheet.wide,), 0, kernels=kernel_facts(sheet))
    resolved = resolve(EngineConfig.of(model=str(path), max_model_len=CONTEXT, max_num_seqs=4, **options), device)
    return resolved.dtype, resolved.memory[ledger.WEIGHTS]


def weights_of(setup: Setup) -> int:
    return Capacity.of(setup, CONTEXT).parts(4)[ledger.WEIGHTS]


@pytest.mark.parametrize(("embedding", "dtype"), [("F16", "float16"), ("Q8_0", "float16"), ("F32", "bfloat16")])
def test_a_mixture_is_planned_in_the_dtype_that_the_engine_chooses(embedding: str, dtype: str, tmp_path: Path) -> None:
    """On which it depends whether experts are kept as codes."""
    path = written(tmp_path / "m.gguf", "Q4_0", experts=True, embedding=embedding)
    made = planned(path)
    assert (made.dtype, weights_of(made)) == engine_bytes(path) and made.dtype == dtype
    asked = planned(path, "--dtype", "bfloat16")
    assert ("bfloat16", weights_of(asked)) == engine_bytes(path, dtype="bfloat16")
    assert planned(path, gpu="T4").dtype == "float16"


@pytest.mark.parametrize(("kind", "format"), [("Q4_K", "int4"), ("Q8_0", "int8")])
def test_the_codes_of_a_file_are_in_this_engine(
    kind: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "m.gguf", kind)
    assert main(["plan", str(path), "--gpu", "H200", "--input", "64", "--output", "32", "--most", "1"]) == 0
    told = capsys.readouterr().out
    assert "not in this engine yet" not in told and f"weights in {format}, KV in" in told        # and nothing of experts
    made = planned(path)
    assert not missing(made)
    found = {point.setup.weights for point in candidates(made, Traffic(64, 32), 1, any_engine=False)}
    assert found == {format}
    assert {"fp8", "int4", format} == {point.setup.weights for point in candidates(made, Traffic(64, 32), 1)}


@pytest.mark.parametrize(("kind", "format", "each"), [
    ("MXFP4", "mxfp4", 4.25 / 8), ("TQ1_0", "int4", 2 / 8 + 2 / 256), ("TQ2_0", "int4", 2 / 8 + 2 / 256),
    ("Q4_0", "int4", 4.5 / 8), ("Q6_K", "int8", 6.5625 / 8), ("Q8_0", "int8", 8.5 / 8), ("Q2_K", "float16", 2.0),
])
def test_what_a_gpu_keeps_is_planned_as_codes(kind: str, format: str, each: float, tmp_path: Path) -> None:
    """Whatever a CPU does with the type."""
    path = written(tmp_path / "m.gguf", kind)
    made = planned(path, gpu="A100")
    assert (made.dtype, weights_of(made)) == engine_bytes(path, "A100")
    assert made.weights == format and made.shape.weight_bytes == pytest.approx(each)
    assert made.shape.head_bytes == made.shape.weight_bytes and not missing(made)


@pytest.mark.parametrize(("kind", "format"), [("MXFP4", "mxfp4"), ("Q4_0", "int4"), ("Q8_0", "bfloat16")])
@pytest.mark.parametrize("gpu", ["H200", "A100"])
def test_experts_have_the_name_and_the_bytes_of_their_layout(kind: str, format: str, gpu: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", kind, experts=True)
    made = planned(path, "--dtype", "bfloat16", gpu=gpu)
    assert made.expert_weights == format and made.kept is not None
    total = made.kept.experts * 2 * EXPERTS * 3 * HIDDEN * WIDE
    config, facts = made.model.config, kernel_facts(made.device)
    found = LinearFormats(config, "none", "cuda", 1, "bfloat16").experts()
    held = sum(shape.count * shape.nbytes(stored, facts) for shape, stored in found)
    assert total == pytest.approx(held or 2 * 2 * EXPERTS * 3 * HIDDEN * WIDE)
    if gpu == "H200" and kind == "MXFP4":
        assert made.kept.experts == 4.25 / 8            # scales stay bytes


def test_a_search_counts_the_shards_of_each_number_of_ranks(tmp_path: Path) -> None:
    """1024 inputs in four shards are 256, padded to 512."""
    path = written(tmp_path / "m.gguf", "Q4_K")
    made = planned(path)
    for divided in layouts(made, 4):
        asked = planned(path, "--tp", str(divided.ranks))
        assert divided.kept == asked.kept and divided.weights == asked.weights
    one, _, four = layouts(made, 4)
    assert four.shape.weight_bytes > 1.2 * one.shape.weight_bytes


@pytest.mark.parametrize("experts", [False, True])
def test_the_batch_that_computes_depends_on_the_bytes_that_are_read(experts: bool, tmp_path: Path) -> None:
    """2 · rows FLOPs a weight, in float16, against the bytes of Q8_0: 8.5 bits."""
    made = planned(written(tmp_path / "m.gguf", "Q8_0", experts), gpu="A100")
    each = 2 if experts else 8.5 / 8                     # experts in float16 are expanded, each for half of the rows
    rows = made.device.rate("float16") / made.device.bandwidth * each / 2 * (2 if experts else 1)
    assert compute_limited_batch(made) == math.ceil(rows)


def test_without_gluon_weights_lie_as_they_are_stored(tmp_path: Path) -> None:
    """Their kernels need it. The packed layout pads 1056 inputs; 512 are as many bytes."""
    config = load_model_config(written(tmp_path / "m.gguf", "MXFP4", experts=True, wide=1056))
    formats = LinearFormats(config, "none", "cuda", 1, "bfloat16")
    without = H200._replace(gluon=False)
    assert all(shape.nbytes(format, without) == shape.nbytes(format, H200) for shape, format in formats.shapes())
    experts = list(formats.experts())
    assert len(experts) == 4
    for shape, format in experts:
        assert shape.nbytes(format, without) == format.nbytes(shape.outputs, shape.share)
        assert (shape.nbytes(format, without) < shape.nbytes(format, H200)) == (shape.share == 1056)
    assert sum(shape.share == 1056 for shape, _ in experts) == 2

"""Uploads of checkpoints to a GPU, the check for values that are not finite, and noise written as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.bench.workload import written_weights
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.bench.workload.written_weights import write_weights
from ridgeline.distributed.comm import Communicator
from ridgeline.models.checkpoints import upload
from ridgeline.models.checkpoints.upload import FiniteChecks, Upload
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.weights import load_weights


def test_on_a_cpu_a_copy_is_a_copy() -> None:
    target, values = torch.zeros(5, 3), torch.arange(15.0).view(5, 3)
    with Upload(torch.device("cpu")) as copies:
        copies.copy(target, values)
        assert torch.equal(target, values) and copies.fetched(values) is values


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(3,), (1000, 7), (4096, 4096), (10_000, 5, 16)])
def test_on_a_gpu_every_value_arrives(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(upload, "CHUNK", 2**18)
    values = torch.randn(shape).to(torch.bfloat16)
    target = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    half = torch.zeros(shape, dtype=torch.float16, device="cuda")
    with Upload(target.device) as copies:
        copies.copy(target, values)
        copies.copy(half, values)                        # another dtype
        fetched = copies.fetched(values[1:])
        copies.finish()
        assert torch.equal(target.cpu(), values) and torch.equal(half.cpu(), values.half())
        assert torch.equal(fetched.cpu(), values[1:])


@pytest.mark.parametrize(("values", "good"), [
    (torch.ones(4), True), (torch.tensor([1.0, torch.nan]), False), (torch.tensor([1.0, -torch.inf]), False),
    (torch.ones(3, dtype=torch.int8), True), (torch.empty(0), True),
    (torch.tensor([448.0, -1.0]).to(torch.float8_e4m3fn), True),
    (torch.tensor([0, 255], dtype=torch.uint8).view(torch.float8_e4m3fn), False),
])
def test_what_is_finite(values: torch.Tensor, good: bool) -> None:
    failed: list[str] = []
    checks = FiniteChecks(lambda name, file, dtype: failed.append(f"{file} {name}"))
    checks.add(torch.ones(2), "first", "a")
    checks.add(values, "second", "b")
    checks.finish()
    assert failed == ([] if good else ["b second"])


def test_written_noise_is_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_weights, "FILE_BYTES", 60_000)
    monkeypatch.setattr(written_weights, "_NOISE", 1000)
    path: Path = write_shape(
        "llama-3.1-8b", 2, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        vocab_size=300,
    )
    written = write_weights(path)
    config = load_model_config(path)
    model = Decoder(config, Communicator(), torch.bfloat16, torch.device("cpu"), 64)
    load_weights(model, path, config)
    assert written == sum(parameter.nbytes for parameter in model.parameters())
    assert len(list(path.glob("*.safetensors"))) > 1

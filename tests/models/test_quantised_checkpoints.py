"""Quantised checkpoints through the loader: every dialect gives the model of the numbers that its tensors mean, kept packed or
expanded, whole or in shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantised_models import DIALECTS, save_quantised
from tiny_models import random_tokens, teacher_forced_logits
from torch import Tensor

from ridgeline.distributed.comm import Communicator
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config, weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Scheme, Unquantised

TOKENS = random_tokens(24)


def decoder(path: Path, packed: bool, dtype: torch.dtype = torch.float64, comm: Communicator | None = None) -> Decoder:
    """On the CPU; `packed`: codes are kept, as on a GPU."""
    comm = comm or Communicator()
    config = load_model_config(path)
    formats = LinearFormats(config, "none", "cuda" if packed else "cpu", comm.size)
    plain = Unquantised()

    def scheme(place: str) -> Scheme:
        chosen = formats(place).format
        return plain if chosen is None else Quantised(chosen, plain, keeps=True)

    made = Decoder(config, comm, dtype, "cpu", 64, scheme)
    load_weights(made, path, config)
    return made


def logits(model: Decoder) -> Tensor:
    return teacher_forced_logits(model, TOKENS, 20)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_the_model_of_its_numbers(dialect: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(dialect, tmp_path)
    expected, expanded, packed = decoder(plain, False), decoder(quantised, False), decoder(quantised, True)
    for name, value in expected.state_dict().items():
        assert torch.equal(expanded.state_dict()[name], value), name
    for name, value in packed.numbers().items():
        assert torch.equal(value, expected.numbers()[name]), name
    torch.testing.assert_close(logits(packed), logits(expected), rtol=0, atol=1e-12)
    kept = [module for module in packed.modules() if isinstance(getattr(module, "scheme", None), Quantised)]
    assert len(kept) == (0 if dialect == "2:4" else 8)   # four linears in each of two layers


@pytest.mark.parametrize("dialect", DIALECTS)
def test_predicted_bytes_are_the_bytes(dialect: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(dialect, tmp_path)
    packed = decoder(quantised, True, torch.float32)
    assert packed.weight_bytes == weight_bytes(load_model_config(quantised), "float32", "cuda")

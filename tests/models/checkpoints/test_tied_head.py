"""A head beside a tied embedding: a copy is left out, another one is refused, as transformers 5 would use it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.errors import ModelError

TOKENS = random_tokens(8)
EMBEDDING = "model.embed_tokens.weight"


def logits_with(path: Path, head: Tensor | None, dtype: torch.dtype = torch.float32, inside: str = "") -> Tensor:
    save_checkpoint("smollm2", path)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / "model.safetensors").items()}
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file({inside + name: tensor for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return teacher_forced_logits(load(path), TOKENS, 6)


def embedding(path: Path) -> Tensor:
    return load_file(save_checkpoint("smollm2", path) / "model.safetensors")[EMBEDDING]


@pytest.mark.parametrize("inside", ["", "language_model."])
def test_another_head_beside_a_tied_embedding_is_refused(inside: str, tmp_path: Path) -> None:
    """It was left out without a word."""
    another = embedding(tmp_path / "plain") * 1.01
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding, but tie_word_embeddings .* set it to false"):
        logits_with(tmp_path / "m", another, inside=inside)


def test_a_copy_of_the_embedding_is_left_out(tmp_path: Path) -> None:
    copy = embedding(tmp_path / "plain").clone()
    assert torch.equal(logits_with(tmp_path / "copied", copy), logits_with(tmp_path / "alone", None))


def test_a_copy_may_be_stored_in_another_dtype(tmp_path: Path) -> None:
    wide = embedding(tmp_path / "plain").clone()
    narrow = logits_with(tmp_path / "copied", wide, torch.bfloat16)
    assert torch.equal(narrow, logits_with(tmp_path / "alone", None, torch.bfloat16))


def test_a_place_holder_of_the_head_is_left_out(tmp_path: Path) -> None:
    """As training in shards leaves it."""
    assert torch.equal(logits_with(tmp_path / "empty", torch.zeros(0)), logits_with(tmp_path / "alone", None))

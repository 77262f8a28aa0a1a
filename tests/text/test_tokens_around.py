"""What a tokenizer puts before and behind a text, whatever its vocabulary can write."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, processors

from ridgeline.text.tokenizer import Tokenizer


def saved(model: models.BPE, around: str, path: Path) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(around, special_tokens=[("<s>", 0), ("</s>", 1)])
    core.save(str(path / "tokenizer.json"))
    return core


@pytest.mark.parametrize("unknown", [None, "<s>"])       # "a" is no token, or the one that begins a text
def test_a_vocabulary_without_an_a_has_its_tokens_on_their_sides(unknown: str | None, tmp_path: Path) -> None:
    """The token that begins a text went behind it."""
    model = models.BPE(vocab={"<s>": 0, "</s>": 1, "C": 2, "G": 3}, merges=[], unk_token=unknown)
    core = saved(model, "<s> $A </s>", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ([0], [1])
    assert tokenizer.encode("CGG") == core.encode("CGG").ids == [0, 2, 3, 3, 1]


def test_a_vocabulary_that_writes_no_text_begins_it(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0}, merges=[]))
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("a") == [0]

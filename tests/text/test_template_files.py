"""Chat templates in files of their own, as transformers saves them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from served_model import write_model

from ridgeline.errors import ModelError
from ridgeline.text.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": ""}]


def test_named_templates_lie_in_a_folder(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    (path / "chat_template.jinja").write_text("plain")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer = Tokenizer.load(path)
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(QUESTION, tools=[{}], tokenize=False) == "with tools"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read: 'utf-8' codec can't decode byte 0xff"):
        Tokenizer.load(path)


def test_named_templates_are_read_up_to_a_size_of_them_all(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    (path / "chat_template.jinja").write_text("plain")
    (path / "additional_chat_templates").mkdir()
    for name in "ab":
        (path / "additional_chat_templates" / f"{name}.jinja").touch()
        os.truncate(path / "additional_chat_templates" / f"{name}.jinja", 40 << 20)
    with pytest.raises(ModelError, match=r"additional_chat_templates has 83,886,080 bytes; at most 67,108,864"):
        Tokenizer.load(path)


def test_tokenizers_of_other_libraries_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    (path / "tokenizer.json").rename(path / "tekken.json")
    with pytest.raises(ModelError, match=r"no tokenizer\.json \(a tekken\.json alone cannot be read\); save the model's fast"):
        Tokenizer.load(path)

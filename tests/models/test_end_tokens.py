"""The engine stops at exactly the tokens that the tokenizer takes for the end of an answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_model_config import LLAMA

from ridgeline.errors import ModelError
from ridgeline.model_files import MOST_BYTES, read_json, read_settings
from ridgeline.models.end_tokens import directory_eos_token, gguf_end_tokens, hf_end_tokens
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import load_model_config
from ridgeline.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TURN = {"gemma-like-small": "<end_of_turn>", "llama-bpe-small": "<|eot_id|>", "phi-3-small": "<|end|>",
        "qwen2-small": "<|im_end|>", "llama-spm-small": "</s>"}


@pytest.mark.parametrize("name", TURN)
def test_golden_files(name: str) -> None:
    path = GOLDEN / f"{name}.gguf"
    tokenizer = Tokenizer.load(path)
    with GGUFFile(path) as file:
        ends = gguf_end_tokens(file.metadata)
    assert set(ends) == tokenizer.eos_token_ids
    assert tokenizer.token_id(TURN[name]) in ends


def test_embedded_model(embedded_model: Path) -> None:
    ends = load_model_config(embedded_model).eos_token_ids
    assert set(ends) == Tokenizer.load(embedded_model).eos_token_ids == {0, 2}


def tokens(**types: int) -> dict[str, Any]:
    return {"tokenizer.ggml.tokens": list(types), "tokenizer.ggml.token_type": list(types.values())}


@pytest.mark.parametrize(("metadata", "ends"), [
    ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eom_token_id": 4}, (2, 4)),
    (tokens(**{"a": 1, "<|im_end|>": 1, "</s>": 1}) | {"tokenizer.ggml.eos_token_id": 0}, (0, 1)),
    (tokens(**{"a": 1, "</s>": 3}) | {"tokenizer.ggml.eos_token_id": 9}, (1,)),
    (tokens(a=1, b=1, c=1) | {"tokenizer.ggml.model": "llama"}, (2,)),
    ({"tokenizer.ggml.tokens": ["</s>", "<eos>"], "tokenizer.ggml.eot_token_id": True}, (1,)),
])
def test_rule_for_gguf(metadata: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert gguf_end_tokens(metadata) == ends


@pytest.mark.parametrize(("metadata", "ends"), [
    ({"tokenizer.ggml.eos_token_id": 2**31 - 1, "tokenizer.ggml.eot_token_id": 2}, (2,)),
    ({"tokenizer.ggml.eos_token_id": 3}, ()),
    (tokens(a=1, b=1, c=1, d=1, **{"<|im_end|>": 3}) | {"tokenizer.ggml.eos_token_id": 3}, ()),
    ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "llama"}, ()),
])
def test_ids_beyond_the_embedding_of_a_gguf_end_nothing(metadata: dict[str, Any], ends: tuple[int, ...]) -> None:
    """Also where the file lists no tokens, or more of them: a table by id would take gigabytes."""
    assert gguf_end_tokens(metadata, 3) == ends


@pytest.mark.parametrize(("config", "ends"), [
    ({"eos_token_id": [2, 2**31 - 1], "vocab_size": 300}, (2, 7)),
    ({"eos_token_id": 300, "vocab_size": 400, "text_config": {"eos_token_id": 299, "vocab_size": 300}}, (299, 7)),
    ({"eos_token_id": 300}, (300, 7)),
])
def test_ids_beyond_the_vocabulary_end_nothing(config: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert hf_end_tokens(config, {"eos_token_id": 7}, None) == ends


def directory(path: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


VOCABULARY = {"model": {"type": "BPE", "vocab": {"a": 0, "<end>": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
              "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
              "added_tokens": [{"id": 4, "content": "<|turn|>", "single_word": False, "lstrip": False, "rstrip": False,
                                "normalized": False, "special": True}]}


@pytest.mark.parametrize(("settings", "place"), [
    ({"eos_token": "<|turn|>"}, 4),
    ({"eos_token": {"content": "<|turn|>"}}, 4),
    ({"eos_token": "<end>"}, 1),
    ({"eos_token": "<late>", "added_tokens_decoder": {"5": {"content": "<late>"}}}, 5),
    ({"eos_token": "<nowhere>"}, None),
    ({}, None),
])
def test_directory(tmp_path: Path, settings: dict[str, Any], place: int | None) -> None:
    config = LLAMA | {"text_config": {"eos_token_id": 8}}
    path = directory(tmp_path, config=config, generation_config={"eos_token_id": [7, 2]}, tokenizer_config=settings,
                     tokenizer=VOCABULARY)
    assert directory_eos_token(path) == place
    ends = {2, 7, 8} | ({place} if place is not None else set())
    assert set(load_model_config(path).eos_token_ids) == Tokenizer.load(path).eos_token_ids == ends


READERS = [
    (Tokenizer.load, "config"), (Tokenizer.load, "generation_config"), (Tokenizer.load, "tokenizer"),
    (load_model_config, "tokenizer_config"), (load_model_config, "tokenizer"),
]


@pytest.mark.parametrize(("load", "name"), [*READERS, (load_model_config, "config"), (load_model_config, "generation_config")])
def test_a_large_file_is_not_read(tmp_path: Path, load: Callable[[Path], object], name: str) -> None:
    """It would be in memory twice, and its values thirty times."""
    path = directory(tmp_path, config=LLAMA, generation_config={}, tokenizer_config={"eos_token": "<end>"}, tokenizer=VOCABULARY)
    os.truncate(path / f"{name}.json", MOST_BYTES + 1)       # without blocks on the disk
    with pytest.raises(ModelError, match=rf"/{name}\.json: 67,108,865 bytes are more than such a file may have"):
        load(path)


@pytest.mark.parametrize(("load", "name"), READERS)
def test_a_pipe_is_no_file_of_a_model(tmp_path: Path, load: Callable[[Path], object], name: str) -> None:
    """Reading it would wait until something writes to it."""
    path = directory(tmp_path, config=LLAMA, generation_config={}, tokenizer_config={"eos_token": "<end>"}, tokenizer=VOCABULARY)
    (path / f"{name}.json").unlink()
    os.mkfifo(path / f"{name}.json")
    with pytest.raises(ModelError, match=rf"/{name}\.json: not a regular file"):
        load(path)


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        directory_eos_token(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"])
def test_half_a_surrogate_pair_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    """The tokenizer's library raises UnicodeEncodeError for it, which was a traceback on the terminal."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": text}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON: .*surrogates not allowed"):
        read_settings(tmp_path / "tokenizer_config.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "🙂"}))      # both halves
    assert read_settings(tmp_path / "tokenizer_config.json") == {"eos_token": "🙂"}


@pytest.mark.parametrize("content", [b'{"a": "\xed\xa0\x80"}', '{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-16-le")])
def test_settings_that_are_not_utf_8_are_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    """Half a pair as bytes passed json, and the tokenizer's library raised; UTF-16 is read by no other tool."""
    for name, read in (("tokenizer_config.json", read_settings), ("config.json", read_json)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=rf"{name}.*JSON: ") as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf{}")                # a mark at the beginning is harmless
        assert read(tmp_path / name) == {}


@pytest.mark.parametrize("config", [True, False])
def test_a_list_of_ends_without_end_is_refused(config: bool) -> None:
    """64 MiB of them took minutes, three times in a start."""
    many = {"eos_token_id": [1] * 20_000}
    file = "config.json" if config else "generation_config.json"
    with pytest.raises(ModelError, match=f"^{file}: eos_token_id lists 20,000 tokens; at most 10,000 are read$"):
        hf_end_tokens(many if config else {}, {} if config else many, None)


def test_values_are_counted_before_they_are_made(tmp_path: Path) -> None:
    """20 million empty lists in 64 MiB took a start a minute and 1.7 GB."""
    (tmp_path / "config.json").write_text('{"x":[' + "[]," * 4_500_000 + "[]]}")
    with pytest.raises(ModelError, match=r"config\.json: more than 8,388,608 values$"):
        read_json(tmp_path / "config.json")

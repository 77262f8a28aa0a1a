"""Tokenizer files and texts that would cost too much: refused before the library begins, in one line."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from served_model import write_model
from tokenizers import Regex, models, pre_tokenizers

from ridgeline.config import ModelOptions
from ridgeline.engine.client.processor import Processor
from ridgeline.errors import BadRequest, ModelError
from ridgeline.models.model_config import load_model_config
from ridgeline.text import tokenizer as text_tokenizer
from ridgeline.text import tokenizer_limits
from ridgeline.text.gguf_patterns import PRE_TOKENIZERS
from ridgeline.text.tokenizer import Tokenizer


def changed(path: Path, **parts: Any) -> Path:
    """A model directory whose tokenizer.json has other parts."""
    model = write_model(path / "tiny")
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return model


def added(first: int, contents: list[str], **flags: Any) -> list[dict[str, Any]]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} | flags
    return [{"id": first + n, "content": content, **usual} for n, content in enumerate(contents)]


def replace(content: str, pattern: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def charsmap(longest: int) -> dict[str, Any]:
    data = struct.pack("<I", 4) + b"trie" + b"x" * longest + b"\0y\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def unigram(pieces: list[str]) -> dict[str, Any]:
    """The library takes 350 bytes for each byte of a piece, and frees a piece of megabytes by recursion until it crashes."""
    return {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([piece, -1.0] for piece in pieces)]}


def template(pieces: int, ids: int) -> dict[str, Any]:
    """A post-processor that puts `pieces` times `ids` tokens before a text."""
    known = {"a": {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}}
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}] * pieces + [{"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}


@pytest.mark.reliability("S-10d")
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 250_000_000}, "merges": []}}, "250,000,00.; the model has 260 tokens"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 9}, "merges": []}}, "4,294,967,2..; the model has 260 tokens"),
        ({"added_tokens": added(256, [f"{n}" + "x" * 270 for n in range(8_000)])}, "bytes of text; at most"),
        ({"added_tokens": added(256, ["x" * 5_000])}, "one of its added tokens has 5,000 bytes of text; at most 4,096"),
        ({"added_tokens": added(256, ["x"] * 90_000)}, "90,000 added tokens; at most 80,000"),
        ({"model": unigram(["a" * 4_000_000])}, "one of its model's tokens has 4,000,000 bytes"),
        ({"model": unigram([f"{n:04}" * 900 for n in range(2_000)])}, "its model's tokens have 7,200,005 bytes of text"),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace("a" * 1000)] * 3}}, "characters of one; at most 128"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}] * 20_000}}, "normalizer has 20,001 steps"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [{"type": "NFD"}] * 99}] * 9}},
         "normalizer has 901 steps"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 256}}, "pre_tokenizer has 257 steps"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 300}}, "decoder has 301 steps"),
        ({"normalizer": replace("b" * 200, {"Regex": ""})}, "makes up to 201 characters of one"),
        ({"normalizer": charsmap(5_000)}, "makes up to 5,000 characters"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}}, "characters of one"),
        ({"decoder": {"type": "Sequence", "decoders": [replace("a" * 1000)] * 3}}, "its decoder makes up to 1,000,000,000 ch"),
        ({"post_processor": {"type": "Sequence", "processors": [template(2_000, 500)] * 2}}, "adds 2,000,000 tokens to every"),
    ],
    ids=["id", "largest id", "added tokens", "a long token", "many tokens", "a long piece", "long pieces",
         "three times a thousand", "normalizers", "nested normalizers",
         "pre-tokenizers", "decoders", "nothing replaced", "table", "byte levels", "decoder", "tokens around a text"],
)
def test_files_that_would_cost_too_much_are_refused(parts: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as refusal:
        Tokenizer.load(changed(tmp_path, **parts))
    assert "\n" not in str(refusal.value) and "tokenizer.json" in str(refusal.value)


def test_a_token_that_the_vocabulary_lacks_is_a_refusal_of_the_text(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "lost"}
    gone = {"decoder": None, "pre_tokenizer": None, "post_processor": None, "added_tokens": []}
    tokenizer = Tokenizer.load(changed(tmp_path, model=model, **gone))
    assert tokenizer.encode("a", add_special_tokens=False) == [0]
    with pytest.raises(BadRequest, match="cannot cut this text"):
        tokenizer.encode("c", add_special_tokens=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_files_nested_too_deep_are_refused(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    (model / name).write_text("[" * 100_000)
    with pytest.raises(ModelError, match=name):
        load_model_config(model)
        Processor.load(ModelOptions(), model)


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "NFKC"}, {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "NFC"}, replace("▁", {"String": " "})]},
        {"type": "Prepend", "prepend": "▁"},
    ],
)
def test_usual_normalizers_are_taken(normalizer: dict[str, Any], tmp_path: Path) -> None:
    Tokenizer.load(changed(tmp_path, normalizer=normalizer))


def test_added_tokens_of_the_other_file_are_counted_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    listed = {str(260 + n): {"content": f"{n}" + "x" * 300} for n in range(8_000)}
    (model / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(ModelError, match="bytes of text; at most"):
        Tokenizer.load(model)


@pytest.fixture
def backtracking(tmp_path: Path) -> Path:
    """A pattern that goes back exponentially often."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return changed(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})


@pytest.mark.reliability("S-10d")
def test_a_text_that_makes_the_library_panic_is_refused(backtracking: Path) -> None:
    tokenizer = Tokenizer.load(backtracking)
    text = "a" * 40 + "!"
    with pytest.raises(BadRequest, match="cannot cut this text"):
        tokenizer.encode(text)
    with pytest.raises(BadRequest, match="cannot cut this text"):
        tokenizer.encode_batch([text, "b"])
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_a_file_that_makes_the_library_panic_is_refused(backtracking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*given: Any) -> Any:
        raise type("PanicException", (BaseException,), {})("boom\nboom")

    monkeypatch.setattr("ridgeline.text.tokenizer.directory_vocabulary", panics)
    with pytest.raises(ModelError, match="cannot be used: boom boom"):
        Tokenizer.load(backtracking)


@pytest.mark.reliability("S-10d")
@pytest.mark.parametrize(
    ("parts", "what"),
    [({}, "encoder"), ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder")],
)
def test_a_vocabulary_whose_own_texts_take_long_is_refused(
    parts: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text stays below the limits; thousands of them, with a pattern that goes back and forth, took minutes."""
    monkeypatch.setattr(tokenizer_limits, "MAX_VOCABULARY_SECONDS", -1.0)
    with pytest.raises(ModelError, match=f"tiny: its {what} takes more than -1 s of CPU time"):
        Tokenizer.load(changed(tmp_path, **parts))


def test_long_texts_and_slow_tokenizers_leave_pythons_lock_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps it in `encode`: the event loop would wait for a thread."""
    tokenizer, calls = Tokenizer.load(write_model(tmp_path / "tiny")), list[str]()
    core = tokenizer._core

    class Core:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(core, name)

    tokenizer._core = Core()                             # type: ignore[assignment]
    assert len(tokenizer.encode("abc")) == 3 and len(tokenizer.encode("a" * 2_000)) == 2_000 and not tokenizer.is_slow
    monkeypatch.setattr(text_tokenizer, "_SLOW_SECONDS", -1.0)
    assert len(tokenizer.encode("abc")) == 3 and tokenizer.is_slow and len(tokenizer.encode("abcd")) == 4
    assert calls == ["encode", "encode_batch_fast", "encode", "encode_batch_fast"]


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|ab|b){3,24}(?<!a|b)", "((a|b))*c", "(?:x[)]|y)+"])
@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_no_text_is_read_on_the_event_loop_with_a_pattern_that_repeats_alternatives(
    tmp_path: Path, part: str, pattern: str
) -> None:
    """200 letters took 20 s, and no health check was answered: the first short text came before the tokenizer counted as slow."""
    regex = {"Regex": pattern}
    cut = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    step = replace("", regex) if part == "normalizer" else cut
    assert Tokenizer.load(changed(tmp_path, **{part: {"type": "Sequence", f"{part}s".replace("_", ""): [step]}})).is_slow


def test_patterns_of_known_models_are_read_at_once() -> None:
    patterns = [pattern for pre in PRE_TOKENIZERS.values() for pattern in pre.patterns]
    assert patterns and not tokenizer_limits.may_go_back(json.dumps([{"Regex": pattern} for pattern in patterns]).encode())


@pytest.mark.reliability("S-10d")
def test_long_runs_of_blanks_are_refused_without_work(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path / "tiny"))
    for text in (" " * 11_000_000, "word " + "\t\n \u3000" * 300_000 + "word", "x" * 999_999 + " " * 1_000_000):
        with pytest.raises(BadRequest, match="blanks in a row"):
            tokenizer.encode(text)
        with pytest.raises(BadRequest, match="blanks in a row"):
            tokenizer.encode_batch(["a", text])
    assert len(tokenizer.encode(" " * 400_000 + "a" + " " * 400_000)) == 800_001


CUTS = {tuple(pre.patterns): name for name, pre in PRE_TOKENIZERS.items()}       # many vocabularies share theirs


@pytest.mark.slow
@pytest.mark.parametrize("patterns", CUTS, ids=CUTS.values())
def test_the_longest_runs_that_are_taken_make_no_pattern_panic(patterns: tuple[str, ...]) -> None:
    """Every pattern of the GGUF vocabularies, on twice the limit: what no check stops."""
    blanks = " " * (2 * tokenizer_limits.MAX_BLANKS - 1)
    core = tokenizers.Tokenizer(models.WordLevel({"x": 0}, "x"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
    for text in (blanks, blanks + "a", "a" + blanks + "1"):
        assert core.encode(text).ids


@pytest.mark.reliability("S-10d")
def test_texts_that_a_normalizer_makes_huge_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(changed(tmp_path, normalizer=replace("a" * 100)))
    with pytest.raises(BadRequest, match="takes at most 640,000 at once"):
        tokenizer.encode("a" * 700_000)
    assert len(tokenizer.encode("a" * 50)) == 5_000

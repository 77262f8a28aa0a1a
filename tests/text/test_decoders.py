"""Every decoder that a tokenizer.json can have: whole and token by token, the text is that of `tokenizers`' own decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from ridgeline.engine.client.processor import Processor
from ridgeline.errors import Unsupported
from ridgeline.sampling_params import SamplingParams, StructuredOutputs
from ridgeline.text.decoders import KEPT, LONGEST
from ridgeline.text.detokenizer import TextStream
from ridgeline.text.tokenizer import Tokenizer

WORDS = [
    "hello", "world", "##ing", "##s", "##", "▁the", "▁", "a", "ab", "b", "_c", "it</w>", "is</w>", "<pad>", "|", "n't", "'s", ".",
    ",", "do", "not", "<0xE4>", "<0xBD>", "<0xA0>", "<0x41>", "é", "漢", "  x ", "Ġw", "ä½", "ł", "", "<unk>", "ß x",
    "\ufffd",
]
SPECIAL = ["<s>", "</s>"]
BYTES = decoders.ByteFallback()
# name -> (decoder, whether each token has a text of its own)
CASES: dict[str, tuple[Any, bool]] = {
    "none": (None, True),
    "fused": (decoders.Fuse(), True),                    # marks of SentencePiece stay marks
    "byte level": (decoders.ByteLevel(), True),          # tokens beyond its alphabet are written as they are
    "wordpiece": (decoders.WordPiece(prefix="##", cleanup=True), True),
    "wordpiece without clean-up": (decoders.WordPiece(prefix="##", cleanup=False), True),
    "replacement in tokens": (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), True),
    "regular expression in tokens": (decoders.Replace(Regex("[aeiou]"), "*"), True),
    "strip in tokens": (decoders.Sequence([decoders.Strip(" ", 1, 1), decoders.Strip("a", 1, 0)]), True),
    "replacement and metaspace": (decoders.Sequence([decoders.Replace("##", "+"), decoders.Metaspace()]), True),
    "metaspace with its own mark": (decoders.Metaspace(replacement="_", prepend_scheme="always"), True),
    "suffixes": (decoders.BPEDecoder(suffix="</w>"), False),
    "ctc": (decoders.CTC(pad_token="<pad>", word_delimiter_token="|"), False),
    "ctc without clean-up": (decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False), False),
    "replacement in the text": (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "C"), decoders.Fuse()]), False),
    "expression in the text": (decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("l+o?"), "L")]), False),
    "strip of the text": (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 1)]), False),
    "bytes after a replacement": (decoders.Sequence([decoders.Replace("_", " "), BYTES, decoders.Fuse()]), False),
    "bytes and strip": (decoders.Sequence([BYTES, decoders.Fuse(), decoders.Strip(" ", 2, 0)]), False),
    "byte level after a replacement": (decoders.Sequence([decoders.Replace("_", "Ġ"), decoders.ByteLevel()]), False),
}


def write(path: Path, decoder: Any) -> Tokenizer:
    path.mkdir(parents=True, exist_ok=True)
    core = tokenizers.Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    if decoder is not None:
        core.decoder = decoder
    core.add_special_tokens(SPECIAL)
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    made = {}
    for name, (decoder, _) in CASES.items():
        path = tmp_path_factory.mktemp("decoder")
        made[name] = write(path, decoder), tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return made


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool, chunk: int) -> str:
    stream = TextStream(tokenizer, skip_special_tokens=skip, at_start=True)
    parts = [stream.feed(ids[begin : begin + chunk]) for begin in range(0, len(ids), chunk)]
    parts.append(stream.finish())
    assert "".join(parts) == stream.text and len(stream.text_offsets) == len(ids)
    return stream.text


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, len(WORDS) + len(SPECIAL) - 1), max_size=80), skip=st.booleans(), chunk=st.integers(1, 5),
)
def test_the_text_is_that_of_the_library(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], name: str, ids: list[int], skip: bool, chunk: int
) -> None:
    tokenizer, library = loaded[name]
    if "strip" in name:                                  # the library panics where a Strip meets an empty text
        ids = [0, *(token for token in ids if token != WORDS.index(""))]
    known = library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == known
    assert streamed(tokenizer, ids, skip, chunk) == known


@pytest.mark.parametrize("word", ["", "a", "\ufffd", "ä½"])
@pytest.mark.parametrize("name", CASES)
def test_windows_stay_short(loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], name: str, word: str) -> None:
    """A long answer takes time in proportion to its length, and its text comes while it grows; also where it is one `word` again
    and again, whose end may always change."""
    tokenizer, library = loaded[name]
    assert tokenizer.decodes_alone is CASES[name][1]
    ids = [WORDS.index(word) if word else place % 20 for place in range(400)]
    if tokenizer.decodes_alone or (word and "ctc" in name):          # which writes a token that comes again once
        return
    window = tokenizer.window(True)
    parts, longest = [], 0
    for token in ids:
        parts.append(window.push(token))
        longest = max(longest, len(window._ids))
    assert "".join([*parts, window.finish()]) == library.decode(ids)
    if "expression" not in name:                         # what a regular expression changes is known only at the end
        assert longest <= LONGEST + KEPT and sum(map(bool, parts)) > 100


def test_a_panic_of_the_library_is_no_text(loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]) -> None:
    for name in ("strip in tokens", "strip of the text"):
        assert loaded[name][0].decode([WORDS.index("")]) == ""


def test_tokens_behind_others_keep_their_blanks(loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]) -> None:
    """An answer continues a prompt, so its first word has the blank before it."""
    tokenizer, _ = loaded["wordpiece"]
    words = [WORDS.index(word) for word in ("hello", "##ing", "world", ".")]
    assert tokenizer.decode(words) == "helloing world." and tokenizer.decode(words, at_start=False) == " helloing world."
    assert tokenizer.token_bytes(words[1]) == b"ing" and tokenizer.token_bytes(words[2]) == b" world"


def test_grammars_need_tokens_with_a_text_of_their_own(loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]) -> None:
    grammar = SamplingParams(structured_outputs=StructuredOutputs(choice=["a"]))
    with pytest.raises(Unsupported, match="tokens with a text of their own") as caught:
        Processor(loaded["ctc"][0]).request("a", grammar)
    assert caught.value.field == "structured_outputs"

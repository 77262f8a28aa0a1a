"""Limits on what a tokenizer's files and a client's text may cost: checked before the `tokenizers` library begins.

That library can neither be interrupted nor limited: a file with 16 MB of added tokens takes it a minute and gigabytes, and
three rules that write a thousand letters for one make 10^9 of each. Its panics are no ordinary exceptions of Python.
"""

from __future__ import annotations

import base64
import binascii
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ridgeline.errors import BadRequest, ModelError
from ridgeline.model_files import repeats_ways

MAX_ADDED_BYTES = 2 << 20            # of the texts of added tokens: 2 s and 200 MB; Gemma has 6,400 tokens of 70 kB
MAX_TOKEN_LENGTH = 4_096             # bytes of one: some libraries' cost grows with its square; Gemma's longest has 93
MAX_ADDED_TOKENS = 80_000            # 10 s of CPU time; models of speech have 65,800
MAX_UNIGRAM_BYTES = 6 << 20          # of the texts of a Unigram model's tokens, 350 times that in memory; 250,000 words have 2 MB
MAX_TEMPLATE_BYTES = 64 << 20        # of all chat templates of a folder
MAX_MERGE_BYTES = 32 << 20           # of the pairs that make a token of SentencePiece, and 16 for each; Gemma's have 13 MB
MAX_VOCABULARY_SECONDS = 20.0        # of CPU time for the texts of all tokens; those of real models take two
MAX_ID = 1 << 24                     # where the model does not say how many tokens it has
SPARE_IDS = 1 << 20                  # that a tokenizer may have beyond those of the model
MAX_GROWTH = 128.0                   # characters that a normalizer may make of one; the longest of Unicode's own has 18
MAX_NORMALIZED = 64_000_000          # characters of one text after it
MAX_AROUND = 1_024                   # tokens that every text gets before and behind it; models have up to three
MAX_BLANKS = 500_000                 # in a row; patterns go back over them, and the library panics at 10,000,000 steps back
MAX_STEPS = 256                      # of each kind; models have up to ten, and 256 take 0.1 s for a text of 3,000 letters
Text = TypeVar("Text")
_UNICODE_GROWTH = 18.0
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")      # the steps of a Sequence, by its kind


class SlowVocabulary(ModelError):
    """Without the model's path, which `Tokenizer.load` knows."""


@dataclass(slots=True)
class TextCost:
    """What a model's texts cost its tokenizer."""

    growth: float                    # characters that its normalizer makes of one
    is_slow: bool = False            # a short text took long, by a pattern that goes back and forth


def may_go_back(part: bytes) -> bool:
    """Whether a normalizer or pre-tokenizer, as JSON, has a pattern that repeats a group with repeats or alternatives: it may try
    very many ways to match a short text, and take minutes. No known model has one."""
    left = [msgspec.json.decode(part)]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if isinstance(pattern := each.get("Regex"), str) and repeats_ways(pattern):
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


class _Facts(msgspec.Struct):
    """The parts of tokenizer.json that are looked at; all others are skipped."""

    added_tokens: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None
    model: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class _Model(msgspec.Struct):
    """`vocab` is an object of megabytes, of which nothing is made here; a Unigram model's is a list."""

    vocab: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


def read_tokenizer(file: Path) -> tuple[str, float]:
    """(text, growth) of a tokenizer.json whose cost is bounded. `growth`: the characters that its normalizer makes of one."""
    try:
        content = file.read_bytes()
        facts = msgspec.json.decode(content, type=_Facts)
        pieces = _unigram_pieces(facts.model)
        text = content.decode()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{file}: not a tokenizer: {' '.join(str(error).split())[:200]}") from None
    listed = facts.added_tokens if isinstance(facts.added_tokens, list) else []
    require_few_added((str(each.get("content", "")) for each in listed if isinstance(each, dict)), str(file))
    require_short(pieces, "its model's tokens", MAX_UNIGRAM_BYTES, str(file))
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        if (steps := _num_steps(getattr(facts, name))) > MAX_STEPS:
            raise ModelError(f"{file}: its {name} has {steps:,} steps; at most {MAX_STEPS} are allowed")
    for name, step in (("decoder", facts.decoder), ("normalizer", facts.normalizer)):
        growth = _growth(step)
        if growth > MAX_GROWTH:
            words = f"its {name} makes up to {growth:,.0f} characters of one"
            raise ModelError(f"{file}: {words}; at most {MAX_GROWTH:.0f} are allowed")
    around = _tokens_around(facts.post_processor)
    if around > MAX_AROUND:
        raise ModelError(f"{file}: its post_processor adds {around:,} tokens to every text; at most {MAX_AROUND:,} are allowed")
    return text, growth


def _num_steps(part: Any) -> int:
    """Of a Sequence, and of those inside it."""
    count, left = 0, [part]
    while left:
        count += 1
        step = left.pop()
        for inner in (step.get(name) for name in _LISTS) if isinstance(step, dict) else ():
            left += inner if isinstance(inner, list) else []
    return count


def _tokens_around(processor: Any) -> int:
    """The tokens that a template adds to every text. Wrong types are left to the library, which refuses them."""
    if not isinstance(processor, dict):
        return 0
    if isinstance(several := processor.get("processors"), list):
        return sum(map(_tokens_around, several))
    pieces, known = processor.get("single"), processor.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(known, dict):
        return 0
    ids = {name: each.get("ids") for name, each in known.items() if isinstance(each, dict)}
    sizes = {name: len(each) for name, each in ids.items() if isinstance(each, list)}
    named = [piece.get("SpecialToken") for piece in pieces if isinstance(piece, dict)]
    return sum(sizes.get(str(each.get("id")), 1) for each in named if isinstance(each, dict))


def _unigram_pieces(model: msgspec.Raw) -> list[str]:
    """The tokens' texts of a Unigram model: the library makes a tree of them, a node for each byte, and frees it by recursion."""
    if not bytes(model).startswith(b"{"):
        return []
    vocabulary = msgspec.json.decode(model, type=_Model).vocab
    if not bytes(vocabulary).startswith(b"["):
        return []
    return [str(each[0]) for each in msgspec.json.decode(vocabulary) if isinstance(each, list) and each]


def require_few_added(contents: Iterable[str], where: str) -> None:
    listed = list(contents)
    if len(listed) > MAX_ADDED_TOKENS:
        raise ModelError(f"{where}: {len(listed):,} added tokens; at most {MAX_ADDED_TOKENS:,} are allowed")
    require_short(listed, "its added tokens", MAX_ADDED_BYTES, where)


def require_short(texts: Iterable[str], what: str, most: int, where: str) -> None:
    """`most`: bytes of all together."""
    sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    total, longest = sum(sizes), max(sizes, default=0)
    if longest > MAX_TOKEN_LENGTH:
        raise ModelError(f"{where}: one of {what} has {longest:,} bytes of text; at most {MAX_TOKEN_LENGTH:,} are allowed")
    if total > most:
        raise ModelError(f"{where}: {what} have {total:,} bytes of text; at most {most:,} are allowed")


def require_ids(highest: int, vocab_size: Any, where: str) -> None:
    """`vocab_size` is what config.json says, of any type."""
    known = isinstance(vocab_size, int) and 0 < vocab_size <= MAX_ID
    most = vocab_size + SPARE_IDS if known else MAX_ID
    if highest >= most:
        words = f"the model has {vocab_size:,} tokens" if known else f"at most {MAX_ID:,} are allowed"
        raise ModelError(f"{where}: a token has the id {highest:,}; {words}")


def in_time(texts: Iterable[Text], what: str) -> Iterator[Text]:
    """The same, as long as what is done with them does not take this thread too long. Each is short, but there may be a million,
    and a pattern that goes back and forth takes a second for each."""
    ends = time.thread_time() + MAX_VOCABULARY_SECONDS
    for each in texts:
        yield each
        if time.thread_time() > ends:
            raise SlowVocabulary(f"its {what} takes more than {MAX_VOCABULARY_SECONDS:g} s of CPU time for the tokens' own texts")


def _growth(normalizer: Any) -> float:
    """The most characters that one becomes. Of unknown kinds the library itself refuses the file."""
    if not isinstance(normalizer, dict):
        return 1.0
    kind = normalizer.get("type")
    if kind == "Sequence":
        steps = normalizer.get("normalizers", normalizer.get("decoders"))
        return _product(steps if isinstance(steps, list) else [])
    if kind in ("NFD", "NFKD", "NFC", "NFKC", "Nmt", "BertNormalizer"):
        return _UNICODE_GROWTH
    if kind == "ByteLevel":
        return 2.0
    if kind == "Precompiled":
        return _charsmap_growth(normalizer.get("precompiled_charsmap"))
    if kind == "Prepend":
        return 1.0 + len(str(normalizer.get("prepend", "")))             # at most: of a text of one character
    if kind == "Replace":
        pattern, content = normalizer.get("pattern"), len(str(normalizer.get("content", "")))
        fixed = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1.0, content / len(fixed)) if isinstance(fixed, str) and fixed else 1.0 + content
    return 1.0


def _product(steps: list[Any]) -> float:
    """Unicode's normal forms count once: applied again, they change little."""
    growth, is_normal = 1.0, False
    for step in steps:
        each = _growth(step)
        if each == _UNICODE_GROWTH and not isinstance(step.get("normalizers"), list):
            each, is_normal = (1.0 if is_normal else each), True
        growth = min(growth * each, 1e18)
    return growth


def _charsmap_growth(coded: Any) -> float:
    """SentencePiece's table of replacements: the size of a trie, the trie, then texts that end with a zero byte."""
    try:
        data = base64.b64decode(coded)
        (size,) = struct.unpack_from("<I", data)
        return max(_UNICODE_GROWTH, *(float(len(text)) for text in data[4 + size :].split(b"\0")))
    except (TypeError, ValueError, binascii.Error, struct.error):
        return _UNICODE_GROWTH


def check_text(text: str, growth: float) -> None:
    """BadRequest for a text that would take the library too long. Costs nothing for a short one."""
    if len(text) * growth > MAX_NORMALIZED and growth > 1:
        most = int(MAX_NORMALIZED / growth)
        raise BadRequest(f"the text has {len(text):,} characters; this model's tokenizer takes at most {most:,} at once")
    # A run of twice the limit covers one of these places from end to end; isspace() stops at the first other character.
    for start in range(0, len(text) - MAX_BLANKS + 1, MAX_BLANKS):
        if text[start : start + MAX_BLANKS].isspace():
            raise BadRequest(f"the text has more than {MAX_BLANKS:,} blanks in a row")


def is_panic(error: BaseException) -> bool:
    """Whether the library gave up: it panicked, which raises a class of its own that is no Exception and that no module exports,
    or it raised an error of its own, which is a plain Exception."""
    return type(error).__name__ == "PanicException" or type(error) is Exception

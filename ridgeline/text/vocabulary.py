"""The parts of a tokenizer, independent of the file they come from, and how vocabularies write tokens.

Made by text/vocabulary_hf (tokenizer.json) and text/vocabulary_gguf (GGUF metadata); used by text/tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

SPACE_MARK = "▁"                     # how SentencePiece writes a space inside a token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    core: tokenizers.Tokenizer       # turns text into ids, without the special tokens around it
    pieces: list[bytes]              # by id: the bytes a token stands for
    special_ids: frozenset[int]      # shown only with skip_special_tokens=False
    bos_token_id: int | None
    eos_token_ids: frozenset[int]    # any of them ends an answer
    prefix_ids: list[int]            # what add_special_tokens puts before a text …
    suffix_ids: list[int]            # … and behind it
    has_prefix_space: bool           # encoding puts a space before a text, decoding takes it off again
    special_tokens: dict[str, str]   # bos_token, eos_token … as chat templates see them
    chat_templates: dict[str, str]   # by name; the usual one is called "default"
    first_pieces: list[bytes] | None = None      # by id: the bytes at the start of a text, where they differ
    decodes_alone: bool = True       # False: a token's text depends on those around it, and `pieces` are only near it
    growth: float = 1.0              # characters that normalizing may make of one (text/tokenizer_limits)


REPLACEMENT = "\ufffd"


def _byte_alphabet() -> dict[int, str]:
    """How byte-level BPE writes bytes as printable characters; here from the character to chr(byte)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    foreign = dict.fromkeys(others, REPLACEMENT)     # not of the alphabet: a token with one is no run of bytes
    return {**foreign, **{byte: chr(byte) for byte in printable}, **{256 + n: chr(byte) for n, byte in enumerate(others)}}


_BYTE_ALPHABET = _byte_alphabet()


def byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:       # not written in the alphabet: a token added as plain text
        return token.encode()


def sentencepiece_piece(token: str) -> bytes:
    return token.replace(SPACE_MARK, " ").encode()


def byte_of(token: str) -> bytes | None:
    """The byte that a byte-fallback token such as <0x0A> stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None

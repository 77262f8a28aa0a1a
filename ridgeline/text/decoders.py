"""What the decoder of a tokenizer.json does with tokens, for every kind of decoder that the `tokenizers` library has.

Byte-level BPE and SentencePiece are read by text/vocabulary_hf itself. Of the others, some write each token by itself (WordLevel,
WordPiece, replacements in single tokens): the text of a token is then what it adds behind another one. The rest (CTC, BPE with
suffixes, replacements in the joined text) depend on the tokens around: a window of tokens is decoded again for each new one, and
the part of the text that can no longer change is emitted. The reference is `tokenizers`' own decode.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from ridgeline.text.tokenizer_limits import in_time, is_panic
from ridgeline.text.vocabulary import SPACE_MARK, byte_of

SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
BY_TOKEN = {"WordPiece", "Metaspace", "Replace", "Strip"}        # steps that write each token by itself
KEPT = 12                            # tokens of context that a window begins with …
LONGEST = 24                         # … and its length at which it is cut to these again
MARGIN = 8                           # characters that the context must have: what happens to a text's start happens in there
LONGEST_EMPTY = 512                  # tokens without text that a window may have
BROKEN = "\ufffd"
MOST_BROKEN = 3                      # of them at the end may still become a character: it has four bytes at most

Step = dict[str, Any]


def steps_of(core: tokenizers.Tokenizer) -> list[Step]:
    """The steps of the decoder, in order; empty: tokens are joined by blanks."""
    if core.decoder is None:
        return []
    decoder: Step = json.loads(core.decoder.__getstate__())
    return list(_flat(decoder))


def _flat(decoder: Step) -> list[Step]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for each in decoder["decoders"] for step in _flat(each)]


def is_sentencepiece(steps: list[Step]) -> bool:
    """Whether a token's text is its own, with blanks for the marks, and only a blank before the whole text is removed."""
    if not steps or not {step["type"] for step in steps} <= SENTENCEPIECE_STEPS:
        return False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "} if mark == SPACE_MARK:
                pass
            case {"type": "Metaspace", "replacement": mark} if mark == SPACE_MARK:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                pass
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                return False
    names = [step["type"] for step in steps]
    strips = any(step["type"] == "Strip" and step["start"] for step in steps)
    return not strips or names.index("Strip") > (names.index("Fuse") if "Fuse" in names else len(names))


def writes_by_token(steps: list[Step]) -> bool:
    """Whether the text is that of each token by itself, one after the other."""
    names = [step["type"] for step in steps]
    if names and names[-1] == "Fuse":
        names = names[:-1]
    return set(names) <= BY_TOKEN


def pieces_by_token(core: tokenizers.Tokenizer, size: int) -> tuple[list[bytes], list[bytes]]:
    """(the text of each token behind another one, and at the start of a text)."""
    first = [_decoded(core, [token]) for token in in_time(range(size), "decoder")]
    before = next((token for token in range(size) if first[token]), 0)
    length = len(first[before])
    behind = [_decoded(core, [before, token])[length:] for token in in_time(range(size), "decoder")]
    return [text.encode() for text in behind], [text.encode() for text in first]


def _decoded(core: tokenizers.Tokenizer, ids: list[int]) -> str:
    try:
        text: str = core.decode(ids, skip_special_tokens=False)
    except BaseException as error:
        # For one, a Strip at the end panics on an empty text.
        if not is_panic(error):
            raise
        return ""
    return text


class WindowDecoder:
    """Text from tokens that come one by one, where a token's text depends on those around it."""

    __slots__ = ("_core", "_emitted", "_ids", "_patterns", "_runs", "_skipped", "_waits")

    def __init__(self, core: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._core = core
        self._skipped = skipped
        self._ids: list[int] = []
        self._emitted = ""                               # of the window's text
        steps = steps_of(core)
        names = [step["type"] for step in steps]
        joined = steps[names.index("Fuse") :] if "Fuse" in names else []
        replaced = [step["pattern"] for step in joined if step["type"] == "Replace"]
        self._patterns = [pattern["String"] for pattern in replaced if "String" in pattern]
        self._waits = any("Regex" in pattern for pattern in replaced)        # for the end: anything may still change
        self._runs = "ByteFallback" in names             # a run of bytes is decoded as a whole, or not at all

    def push(self, token: int) -> str:
        """The text that is certain now."""
        name = self._core.id_to_token(token)
        if name is None or token in self._skipped:
            return ""
        self._ids.append(token)
        if self._waits or (self._runs and byte_of(name) is not None):
            return ""
        text = _decoded(self._core, self._ids)
        certain = self._certain(text)
        if not certain.startswith(self._emitted):
            return ""                                    # what was emitted may come back with the next token
        new = certain[len(self._emitted) :]
        self._emitted += new
        if len(self._ids) > LONGEST:
            self._shorten(text[len(certain) :])
        return new

    def finish(self) -> str:
        text = _decoded(self._core, self._ids)
        rest = text[len(self._emitted) :]
        self._emitted = text
        return rest

    def _certain(self, text: str) -> str:
        """Without a character that is not complete, and without the beginning of something that would be replaced."""
        certain = text[: max(len(text.rstrip(BROKEN)), len(text) - MOST_BROKEN)]
        for pattern in self._patterns:
            held = next((count for count in range(len(pattern) - 1, 0, -1) if certain.endswith(pattern[:count])), 0)
            certain = certain[: len(certain) - held]
        return certain

    def _shorten(self, held: str) -> None:
        """`held`: the end of the text, which may still change. There may always be one: a model can write it for ever."""
        context = self._ids[-KEPT:]
        text = _decoded(self._core, context)
        emitted = len(text) - len(held)
        if text.endswith(held) and (emitted >= MARGIN or len(self._ids) > LONGEST_EMPTY):
            self._ids, self._emitted = context, text[:emitted]

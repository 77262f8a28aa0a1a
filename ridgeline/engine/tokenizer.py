"""Text to token ids and token ids to bytes, from a Hugging Face directory or from the metadata of a GGUF file.

The `tokenizers` library does the encoding. A GGUF file carries only a vocabulary, so its tokenizer is built here; the
reference for its ids is llama.cpp. Decoding is ours: every token is a run of bytes, and a text is those bytes decoded.
This file knows neither requests nor streams (engine/text), nor how a chat template is rendered (engine/chat_template).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from ridgeline.engine.chat_template import ChatTemplate
from ridgeline.errors import BadRequest, ModelError
from ridgeline.models.gguf import GGUFFile

SPACE_MARK = "▁"                     # how SentencePiece writes a space inside a token


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        pieces: list[bytes],
        special_ids: Iterable[int],
        *,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        prefix_ids: Sequence[int],
        suffix_ids: Sequence[int],
        has_prefix_space: bool,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
    ) -> None:
        self.special_ids = frozenset(special_ids)            # shown only with skip_special_tokens=False
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)        # any of them ends an answer
        self.has_prefix_space = has_prefix_space             # encoding puts a space before a text, decoding takes it off
        self.special_tokens = dict(special_tokens)           # bos_token, eos_token … as chat templates see them
        self.chat_templates = dict(chat_templates)           # by name; the one called "default" is the usual one
        self._core = core
        self._plain_core: tokenizers.Tokenizer | None = None
        self._pieces = pieces
        self._shown_pieces = [b"" if place in self.special_ids else piece for place, piece in enumerate(pieces)]
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a directory with tokenizer.json, or from a .gguf file."""
        path = Path(path)
        if path.is_dir():
            return _from_directory(path)
        with GGUFFile(path) as file:
            return cls.from_gguf_metadata(file.metadata, path.name)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any], file_name: str) -> Tokenizer:
        return _GGUFVocabulary(metadata, file_name).tokenizer()

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows. The model's own vocabulary may be padded beyond it."""
        return len(self._pieces)

    # --- text to ids ---

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """`parse_special=False` reads the text of control tokens, such as <|im_end|>, as ordinary characters."""
        try:
            ids: list[int] = self._encoder(parse_special).encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise _not_text(text) from None
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Many texts at once, on all cores."""
        try:
            encodings = self._encoder(parse_special).encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            return [self.encode(text, add_special_tokens, parse_special) for text in texts]    # names the bad one
        if not add_special_tokens:
            return [encoding.ids for encoding in encodings]
        return [[*self._prefix_ids, *encoding.ids, *self._suffix_ids] for encoding in encodings]

    def _encoder(self, parse_special: bool) -> tokenizers.Tokenizer:
        if parse_special:
            return self._core
        if self._plain_core is None:
            # The switch belongs to the whole object, so the rare other setting gets a copy, made when first asked for.
            plain_core = tokenizers.Tokenizer.from_str(self._core.to_str())
            plain_core.encode_special_tokens = True
            self._plain_core = plain_core
        return self._plain_core

    # --- ids to text ---

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False, *, at_start: bool = True) -> str:
        """`at_start=False`: the tokens continue a text, so a SentencePiece prefix space stays."""
        pieces = self.token_pieces(skip_special_tokens)
        count = len(pieces)
        text = b"".join([pieces[token] for token in token_ids if 0 <= token < count]).decode("utf-8", "replace")
        return text.removeprefix(" ") if at_start and self.has_prefix_space else text

    def token_pieces(self, skip_special_tokens: bool = False) -> list[bytes]:
        """The bytes of every token, by id; not to be changed. Skipped tokens are empty."""
        return self._shown_pieces if skip_special_tokens else self._pieces

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; none for an id that only pads the model's vocabulary."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def token_text(self, token_id: int) -> str:
        """One token alone, as shown beside its log-probability. Part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token written exactly so in the vocabulary, such as "<|im_end|>"."""
        token: int | None = self._core.token_to_id(text)
        return token

    # --- chat ---

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @chat_template.setter
    def chat_template(self, source: str) -> None:
        self.chat_templates = {"default": source}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> list[int] | str:
        """The prompt of a conversation. The template writes its own special tokens, so none are added."""
        text = ChatTemplate(self.chat_templates, self.special_tokens).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _not_text(text: Any) -> BadRequest:
    if not isinstance(text, str):
        return BadRequest(f"a prompt must be a string, got {type(text).__name__}")
    place = next(place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    return BadRequest(f"a prompt must be valid Unicode: character {place} is a lone surrogate, U+{ord(text[place]):04X}")


def _byte_alphabet() -> dict[int, str]:
    """How byte-level BPE writes bytes as printable characters; here from the character to chr(byte)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{256 + n: chr(byte) for n, byte in enumerate(others)}}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:       # not written in the alphabet: a token added as plain text
        return token.encode()


def _sentencepiece_piece(token: str) -> bytes:
    return token.replace(SPACE_MARK, " ").encode()


def _byte_of(token: str) -> bytes | None:
    """The byte a byte-fallback token such as <0x0A> stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face directories
# ---------------------------------------------------------------------------------------------------------------------


def _from_directory(path: Path) -> Tokenizer:
    core = _read_tokenizer_json(path)
    settings = _read_json(path / "tokenizer_config.json")
    model_config = _read_json(path / "config.json")
    generation_config = _read_json(path / "generation_config.json")
    special_tokens = {
        name: text
        for name, value in {**_read_json(path / "special_tokens_map.json"), **settings}.items()
        if name.endswith("_token") and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
    }
    _add_missing_tokens(core, settings, path)

    bos = core.token_to_id(special_tokens.get("bos_token", ""))
    eos = core.token_to_id(special_tokens.get("eos_token", ""))
    eos_token_ids = {*_ids(generation_config.get("eos_token_id")), *_ids(model_config.get("eos_token_id"))}
    if eos is not None:
        eos_token_ids.add(eos)

    if isinstance(settings.get("add_bos_token"), bool) or isinstance(settings.get("add_eos_token"), bool):
        prefix_ids = [bos] if settings.get("add_bos_token") and bos is not None else []
        suffix_ids = [eos] if settings.get("add_eos_token") and eos is not None else []
    else:
        prefix_ids, suffix_ids = _added_around(core)

    pieces, has_prefix_space = _pieces_of(core, path)
    return Tokenizer(
        core,
        pieces,
        [token for token, added in core.get_added_tokens_decoder().items() if added.special],
        bos_token_id=bos if bos is not None else next(iter(_ids(model_config.get("bos_token_id"))), None),
        eos_token_ids=eos_token_ids,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        has_prefix_space=has_prefix_space,
        special_tokens=special_tokens,
        chat_templates=_chat_templates_of(path, settings),
    )


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        other = " (a tokenizer.model alone cannot be read)" if (path / "tokenizer.model").is_file() else ""
        raise ModelError(f"{path}: no tokenizer.json{other}; save the model's fast tokenizer there")
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:       # the library raises plain Exception whatever is wrong
        raise ModelError(f"{file}: not a tokenizer: {' '.join(str(error).split())[:200]}") from None
    core.no_truncation()
    core.no_padding()
    return core


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must hold a JSON object, not {type(value).__name__}")
    return value


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _add_missing_tokens(core: tokenizers.Tokenizer, settings: Mapping[str, Any], path: Path) -> None:
    """Tokens that only tokenizer_config.json names. The library numbers new ones from the end, so it must come out so."""
    listed = settings.get("added_tokens_decoder")
    for text_id, fields in sorted((listed or {}).items(), key=lambda item: int(item[0])):
        if core.token_to_id(fields["content"]) is None:
            flags = {name: bool(fields.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            core.add_tokens([AddedToken(fields["content"], **flags)])
            if core.token_to_id(fields["content"]) != int(text_id):
                raise ModelError(
                    f"{path}: tokenizer_config.json gives the token {fields['content']!r} the id {text_id}, "
                    f"but tokenizer.json leaves {core.token_to_id(fields['content'])} for it"
                )


def _added_around(core: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor of tokenizer.json puts before and after a text."""
    inner = core.encode("a", add_special_tokens=False).ids
    outer = core.encode("a", add_special_tokens=True).ids
    for start in range(len(outer) - len(inner) + 1):
        if outer[start : start + len(inner)] == inner:
            return outer[:start], outer[start + len(inner) :]
    return [], []


def _pieces_of(core: tokenizers.Tokenizer, path: Path) -> tuple[list[bytes], bool]:
    """The bytes of every token, and whether texts carry a prefix space, read off the decoder of tokenizer.json."""
    decoder = json.loads(core.decoder.__getstate__()) if core.decoder is not None else {"type": None}
    steps = {step["type"]: step for step in (decoder["decoders"] if decoder["type"] == "Sequence" else [decoder])}
    byte_level = set(steps) == {"ByteLevel"}
    if not byte_level and not (steps and set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}):
        found = ", ".join(str(name) for name in steps)
        raise ModelError(
            f"{path / 'tokenizer.json'}: its decoder ({found}) is not supported; "
            "byte-level BPE (ByteLevel) and SentencePiece (Metaspace, or Replace, ByteFallback, Fuse, Strip) are"
        )
    piece_of = _byte_level_piece if byte_level else _sentencepiece_piece
    added = core.get_added_tokens_decoder()
    vocabulary = core.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        byte = _byte_of(text) if "ByteFallback" in steps else None
        pieces[token] = text.encode() if token in added else byte if byte is not None else piece_of(text)
    metaspace = steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return pieces, metaspace or steps.get("Strip", {}).get("start", 0) > 0


def _chat_templates_of(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own wins over chat_template.json (processors), which wins over tokenizer_config.json."""
    alone = path / "chat_template.jinja"
    if alone.is_file():
        return {"default": alone.read_text(encoding="utf-8")}
    listed = _read_json(path / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(listed, str):
        return {"default": listed}
    return {entry["name"]: entry["template"] for entry in listed or []}


# ---------------------------------------------------------------------------------------------------------------------
# GGUF metadata
# ---------------------------------------------------------------------------------------------------------------------


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Characters assigned after Unicode 15.1, whose tables llama.cpp has. The regular expressions of `tokenizers` follow
# newer tables: without this the ids would change with the version of that library.
_NEWER_CHARACTERS = "".join(
    "\\x{%s}-\\x{%s}" % tuple(bounds.split("-"))
    for bounds in """
        0897-0897 1B4E-1B4F 1B7F-1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D8F
        10EC2-10EFC 11380-113E2 116D0-116E3 11BC0-11BF9 11F5A-11F5A 13460-143FA 16100-16139 16D40-16D79 18CFF-18CFF
        1CC00-1CEB3 1E5D0-1E5FF 1F8B2-1F8C1 1FA89-1FA8F 1FABE-1FABE 1FAC6-1FAC6 1FADC-1FADF 1FAE9-1FAE9 1FBCB-1FBEF
    """.split()
)
_LETTER, _NUMBER, _PUNCTUATION, _SYMBOL, _MARK = (
    rf"[\p{{{category}}}&&[^{_NEWER_CHARACTERS}]]" for category in ("L", "N", "P", "S", "M")
)
_NOT_LOWER, _NOT_UPPER = f"[{_LETTER}&&[^a-z]]", f"[{_LETTER}&&[^A-Z]]"
_CONTRACTION = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?{_NUMBER}+| ?[^\s{_LETTER}{_NUMBER}]+|\s+(?!\S)|\s+"


_DEEPSEEK = (
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n{_LETTER}{_PUNCTUATION}{_SYMBOL}]?[{_LETTER}{_MARK}]+"
    rf"| ?[{_PUNCTUATION}{_SYMBOL}]+[\r\n]*|{_BLANKS}"
)


def _word_pattern(number: str, marks: str = "") -> str:
    """A contraction, a word with one character before it, a number, other signs, or blanks: the pattern since Llama 3."""
    word = rf"[^\r\n{_LETTER}{_NUMBER}]?[{_LETTER}{marks}]+"
    return rf"{_CONTRACTION}|{word}|{number}| ?[^\s{_LETTER}{marks}{_NUMBER}]+[\r\n]*|{_BLANKS}"


def _cased_pattern(suffix: str, number: str) -> str:
    """The same, but a word also ends where small letters turn to capitals."""
    start = rf"[^\r\n{_LETTER}{_NUMBER}]?"
    words = f"{start}{_NOT_LOWER}*{_NOT_UPPER}+{suffix}|{start}{_NOT_LOWER}+{_NOT_UPPER}*{suffix}"
    return rf"{words}|{number}| ?[^\s{_LETTER}{_NUMBER}]+[\r\n/]*|{_BLANKS}"


class _PreTokenizer(NamedTuple):
    """How a text is cut before merging: by each pattern in turn, every match and every gap a piece of its own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False      # a piece that is a token is taken whole, however its merges would go
    add_bos: bool = False            # where the file does not say


_DIGITS_THEN_GPT2 = _PreTokenizer((_NUMBER, _GPT2))
_LLAMA3 = _PreTokenizer((_word_pattern(f"{_NUMBER}{{1,3}}"),), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((_word_pattern(_NUMBER),))

# By the value of tokenizer.ggml.pre. Each of them is checked against llama.cpp by scripts/make_tokenizer_golden.py.
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((rf"[{_PUNCTUATION}$+<=>^~|]+", _GPT2, f"{_NUMBER}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "phi-2": _PreTokenizer((_GPT2,)),
    "olmo": _PreTokenizer((_GPT2,)),
    "mpt": _PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "qwen35": _PreTokenizer((_word_pattern(_NUMBER, marks=_MARK),)),
    "smaug-bpe": _PreTokenizer(_LLAMA3.patterns),
    "dbrx": _PreTokenizer(_LLAMA3.patterns),
    "deepseek-v3": _PreTokenizer((f"{_NUMBER}{{1,3}}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK)),
    "tekken": _PreTokenizer((_cased_pattern("", _NUMBER),), ignore_merges=True, add_bos=True),
    "gpt-4o": _PreTokenizer((_cased_pattern(f"(?:{_CONTRACTION})?", f"{_NUMBER}{{1,3}}"),)),
    "llama4": _PreTokenizer((_cased_pattern(f"(?:{_CONTRACTION})?", f"{_NUMBER}{{1,3}}"),)),
}

# Chat models end a turn with one of these, whatever the file calls its end-of-sequence token.
_END_OF_TURN = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <|eom_id|> </s> <eos> "
    "<｜end▁of▁sentence｜>".split()
)


class _GGUFVocabulary:
    """The tokenizer.* part of a GGUF file's metadata, checked, and the tokenizer built from it."""

    def __init__(self, metadata: Mapping[str, Any], file_name: str) -> None:
        self.metadata = metadata
        self.file_name = file_name
        self.model = self._text("tokenizer.ggml.model", "")
        if self.model not in ("gpt2", "llama"):
            raise self._error(
                f"tokenizer.ggml.model is {self.model!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
            )
        self.tokens = self._array("tokenizer.ggml.tokens", str)
        if not self.tokens:
            raise self._error("it has no vocabulary (tokenizer.ggml.tokens)")
        self.tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(self.tokens)]
        self.ids = {token: place for place, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for place, token in enumerate(self.tokens) if self.ids[token] != place)
            raise self._error(f"tokenizer.ggml.tokens holds {twice!r} twice")
        self.types = self._array("tokenizer.ggml.token_type", int) or [int(_TokenType.NORMAL)] * len(self.tokens)
        self._same_length("tokenizer.ggml.token_type", self.types)
        # Converters often leave them as ordinary tokens. Not so </s>: where that is ordinary, it is a piece of HTML.
        self.ends = {self.ids[token] for token in _END_OF_TURN & self.ids.keys()}
        self.ends -= {place for place in self.ends if self.tokens[place] == "</s>" and self.types[place] == _TokenType.NORMAL}
        for place in self.ends:
            self.types[place] = _TokenType.CONTROL

    # --- reading ---

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self.file_name}: {reason}")

    def _text(self, key: str, default: str) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._error(f"{key} must be a string, not {type(value).__name__}")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._error(f"{key} must be a boolean, not {type(value).__name__}")
        return value

    def _array(self, key: str, kind: type) -> list[Any]:
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._error(f"{key} must be an array of {kind.__name__}")
        return list(value)

    def _id(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def _same_length(self, key: str, values: Sequence[Any]) -> None:
        if len(values) != len(self.tokens):
            raise self._error(f"{key} has {len(values):,} entries for {len(self.tokens):,} tokens")

    # --- building ---

    def tokenizer(self) -> Tokenizer:
        core, pieces, add_bos = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        self._add_special_tokens(core)
        bos, eos = self._id("bos_token_id"), self._id("eos_token_id")
        if self.model == "llama":        # older files leave out what every SentencePiece model of their time had
            bos, eos = (1 if bos is None else bos), (2 if eos is None else eos)
        ends = {eos, self._id("eot_token_id"), self._id("eom_token_id")} - {None}
        named = {"bos_token": bos, "eos_token": eos, "unk_token": self._id("unknown_token_id"),
                 "pad_token": self._id("padding_token_id")}  # fmt: skip
        return Tokenizer(
            core,
            pieces,
            [place for place, kind in enumerate(self.types) if kind not in _SHOWN_TYPES],
            bos_token_id=bos,
            eos_token_ids={*ends, *self.ends},
            prefix_ids=[bos] if self._flag("tokenizer.ggml.add_bos_token", add_bos) and bos is not None else [],
            suffix_ids=[eos] if self._flag("tokenizer.ggml.add_eos_token", False) and eos is not None else [],
            has_prefix_space=self.model == "llama" and self._flag("tokenizer.ggml.add_space_prefix", True),
            special_tokens={name: self.tokens[place] for name, place in named.items() if place is not None},
            chat_templates=self._chat_templates(),
        )

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, list[bytes], bool]:
        name = self._text("tokenizer.ggml.pre", "default")
        if name not in _PRE_TOKENIZERS:
            raise self._error(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(_PRE_TOKENIZERS))}")
        pre = _PRE_TOKENIZERS[name]
        merges = [tuple(merge.split(" ", 1)) for merge in self._array("tokenizer.ggml.merges", str)]
        if not merges:
            raise self._error("it has no merges (tokenizer.ggml.merges)")
        core = tokenizers.Tokenizer(self._bpe(merges, ignore_merges=pre.ignore_merges))
        core.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
        pieces = [
            _byte_level_piece(token) if kind == _TokenType.NORMAL else token.encode()
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]
        return core, pieces, pre.add_bos

    def _sentencepiece(self) -> tuple[tokenizers.Tokenizer, list[bytes], bool]:
        unknown = self._id("unknown_token_id") or 0
        core = tokenizers.Tokenizer(
            self._bpe(self._merges_from_scores(), byte_fallback=True, unk_token=self.tokens[unknown])
        )
        spaces = [normalizers.Replace(" ", SPACE_MARK)]
        if self._flag("tokenizer.ggml.add_space_prefix", True):
            spaces.insert(0, normalizers.Prepend(SPACE_MARK))
        core.normalizer = normalizers.Sequence(spaces)
        pieces = []
        for token, kind in zip(self.tokens, self.types, strict=True):
            byte = _byte_of(token) if kind == _TokenType.BYTE else None
            normal = kind == _TokenType.NORMAL
            pieces.append(byte if byte is not None else _sentencepiece_piece(token) if normal else token.encode())
        return core, pieces, True

    def _bpe(self, merges: list[tuple[str, ...]], **options: Any) -> models.BPE:
        try:
            return models.BPE(vocab=self.ids, merges=merges, **options)
        except Exception as error:       # the library raises plain Exception whatever is wrong
            raise self._error(f"its merges do not fit its vocabulary: {error}") from None

    def _merges_from_scores(self) -> list[tuple[str, ...]]:
        """SentencePiece joins whichever neighbours make the best-scored token: every way to cut a token is a merge."""
        scores = self._array("tokenizer.ggml.scores", (int, float))
        self._same_length("tokenizer.ggml.scores", scores)
        ids = self.ids
        merges: list[tuple[str, ...]] = []
        for place in sorted(range(len(scores)), key=lambda place: -scores[place]):
            token = self.tokens[place]
            if self.types[place] in _MERGED_TYPES:
                merges += [
                    (token[:cut], token[cut:])
                    for cut in range(1, len(token))
                    if token[:cut] in ids and token[cut:] in ids
                ]
        return merges

    def _add_special_tokens(self, core: tokenizers.Tokenizer) -> None:
        """Tokens found in the text before anything else is done to it."""
        model_name = str(self.metadata.get("general.name", "")).lower()
        strips = "phi-3" in model_name or "phi3" in model_name     # Phi-3 swallows the blanks behind its special tokens
        special, plain = [], []
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN, _TokenType.USER_DEFINED):
                rstrip = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
                added = AddedToken(token, rstrip=rstrip, normalized=False, special=kind != _TokenType.USER_DEFINED)
                (plain if kind == _TokenType.USER_DEFINED else special).append(added)
        core.add_special_tokens(special)
        core.add_tokens(plain)

    def _chat_templates(self) -> dict[str, str]:
        """tokenizer.chat_template, and tokenizer.chat_template.NAME for those of another name."""
        prefix = "tokenizer.chat_template"
        found = {key: self._text(key, "") for key in self.metadata if key == prefix or key.startswith(prefix + ".")}
        return {key[len(prefix) + 1 :] or "default": template for key, template in found.items()}


_SHOWN_TYPES = (_TokenType.NORMAL, _TokenType.USER_DEFINED, _TokenType.BYTE)
_MERGED_TYPES = (_TokenType.NORMAL, _TokenType.USER_DEFINED, _TokenType.UNUSED)

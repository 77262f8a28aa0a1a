"""The vocabulary of a Hugging Face directory: tokenizer.json, and what the configuration files beside it add.

transformers is the reference: the same ids, the same special tokens around a text, the same chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ridgeline.errors import ModelError, shown
from ridgeline.model_files import read_settings, require_file
from ridgeline.models.end_tokens import hf_end_tokens, language_model
from ridgeline.text.decoders import is_sentencepiece, pieces_by_token, steps_of, writes_by_token
from ridgeline.text.tokenizer_limits import MAX_TEMPLATE_BYTES, in_time, read_tokenizer, require_few_added, require_ids
from ridgeline.text.vocabulary import Vocabulary, byte_level_piece, byte_of, sentencepiece_piece

PROBES = 100                         # tokens that are read, if need be, to see what is put around a text
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")      # of other libraries


def directory_vocabulary(path: Path) -> Vocabulary:
    core, growth = _read_core(path)
    settings = read_settings(path / "tokenizer_config.json")
    model_config = read_settings(path / "config.json")
    generation_config = read_settings(path / "generation_config.json")
    special_tokens = _special_tokens({**read_settings(path / "special_tokens_map.json"), **settings})
    _add_missing_tokens(core, settings, path)

    bos: int | None = core.token_to_id(special_tokens.get("bos_token", ""))
    eos: int | None = core.token_to_id(special_tokens.get("eos_token", ""))
    prefix_ids, suffix_ids = _added_around(core)
    highest = max(core.get_vocab(with_added_tokens=True).values(), default=-1)
    require_ids(highest, _vocab_size(model_config), str(path / "tokenizer.json"))
    pieces = _pieces(core)
    return Vocabulary(
        core=core,
        pieces=pieces.behind,
        special_ids=frozenset(token for token, added in core.get_added_tokens_decoder().items() if added.special),
        bos_token_id=bos if bos is not None else next(iter(_ids(model_config.get("bos_token_id"))), None),
        eos_token_ids=frozenset(hf_end_tokens(model_config, generation_config, eos)),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        has_prefix_space=pieces.has_prefix_space,
        special_tokens=special_tokens,
        chat_templates=_chat_templates(path, settings),
        first_pieces=pieces.first,
        decodes_alone=pieces.alone,
        growth=growth,
    )


def _vocab_size(model_config: Mapping[str, Any]) -> Any:
    return (language_model(model_config) or {}).get("vocab_size", model_config.get("vocab_size"))


def _read_core(path: Path) -> tuple[tokenizers.Tokenizer, float]:
    """The library's object, and how much its normalizer may make of a character."""
    file = path / "tokenizer.json"
    require_file(file)
    if not file.is_file():
        there = next((name for name in OTHER_TOKENIZERS if (path / name).is_file()), None)
        other = f" (a {there} alone cannot be read)" if there else ""
        raise ModelError(f"{path}: no tokenizer.json{other}; save the model's fast tokenizer there: "
                         f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(path)!r})")
    text, growth = read_tokenizer(file)
    try:
        core = tokenizers.Tokenizer.from_str(text)
    except Exception as error:       # the library raises plain Exception whatever is wrong
        raise ModelError(f"{file}: not a tokenizer: {_one_line(error)}") from None
    core.no_truncation()
    core.no_padding()
    return core, growth


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _ids(value: Any) -> list[int]:
    """Token ids are given as a number, as a list, or not at all."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token … each a string, or an object with its content."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _add_missing_tokens(core: tokenizers.Tokenizer, settings: Mapping[str, Any], path: Path) -> None:
    """Tokens that only tokenizer_config.json names. The library numbers new tokens itself, so the ids are checked."""
    file = path / "tokenizer_config.json"
    try:
        listed = {int(token): dict(fields) for token, fields in (settings.get("added_tokens_decoder") or {}).items()}
        contents = {token: str(fields["content"]) for token, fields in listed.items()}
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ModelError(f"{file}: added_tokens_decoder must map token ids to objects with a content") from None
    missing: dict[str, int] = {}
    for token in sorted(listed):
        if core.token_to_id(contents[token]) is None:
            missing.setdefault(contents[token], token)
    require_few_added(missing, str(file))
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    # All at once: the library prepares its search for them anew after each call.
    core.add_tokens([
        AddedToken(content, **{name: bool(listed[token].get(name)) for name in flags}) for content, token in missing.items()
    ])
    for content, token in missing.items():
        if core.token_to_id(content) != token:
            raise ModelError(
                f"{file}: gives the token {shown(content)} the id {token}, "
                f"but tokenizer.json leaves {core.token_to_id(content)} for it"
            )


def _added_around(core: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the post-processor of tokenizer.json puts before and after a text. It decides, not add_bos_token."""
    for text in in_time(_probes(core), "encoder"):
        encoding = core.encode(text, add_special_tokens=True)
        own = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
        if own:                      # a vocabulary without unknown tokens leaves out what it cannot write
            return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]
    return core.encode("", add_special_tokens=True).ids, []


def _probes(core: tokenizers.Tokenizer) -> Iterator[str]:
    yield "a"
    yield from islice(core.get_vocab(with_added_tokens=True), PROBES)


@dataclass(frozen=True, slots=True)
class Pieces:
    """How tokens are written; see Vocabulary."""

    behind: list[bytes]
    has_prefix_space: bool = False
    first: list[bytes] | None = None
    alone: bool = True


def _pieces(core: tokenizers.Tokenizer) -> Pieces:
    """The bytes of every token, read off the decoder of tokenizer.json."""
    listed = steps_of(core)
    vocabulary = core.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    byte_level = [step["type"] for step in listed] == ["ByteLevel"]
    if not byte_level and not is_sentencepiece(listed):
        behind, first = pieces_by_token(core, size)
        return Pieces(behind, first=first, alone=writes_by_token(listed))
    steps = {step["type"]: step for step in listed}
    piece_of = byte_level_piece if byte_level else sentencepiece_piece if {"Replace", "Metaspace"} & steps.keys() else str.encode
    literal = core.get_added_tokens_decoder() if byte_level else {}      # SentencePiece's are decoded: Gemma's "▁▁" is two blanks
    pieces = [b""] * size
    for text, token in vocabulary.items():
        byte = byte_of(text) if "ByteFallback" in steps else None
        pieces[token] = text.encode() if token in literal else byte if byte is not None else piece_of(text)
    metaspace = steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return Pieces(pieces, metaspace or int(steps.get("Strip", {}).get("start", 0)) > 0)


def _template(file: Path) -> str:
    require_file(file)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {_one_line(error)}") from None


def _chat_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own wins over chat_template.json, which wins over tokenizer_config.json. Files in a folder have names."""
    alone = path / "chat_template.jinja"
    if alone.is_file():
        named = sorted((path / "additional_chat_templates").glob("*.jinja"))
        total = sum(file.stat().st_size for file in named if file.exists())
        if total > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path}: additional_chat_templates has {total:,} bytes; at most {MAX_TEMPLATE_BYTES:,} are read")
        return {file.stem: _template(file) for file in named} | {"default": _template(alone)}
    listed = read_settings(path / "chat_template.json").get("chat_template") or settings.get("chat_template") or []
    if isinstance(listed, str):
        return {"default": listed}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in listed}
    except (TypeError, KeyError):
        raise ModelError(f"{path}: chat_template must be a string or a list of named templates") from None

"""Which tokens end an answer: one rule for the engine, which stops at them, and for the tokenizer, which hides them.

A model's own end-of-sequence id is not enough: chat models end a turn with a token of another name, and the files of one
model disagree about it. This file reads metadata and small JSON files; it needs neither torch nor a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ridgeline.errors import ModelError
from ridgeline.model_files import read_settings

# GGUF files seldom declare the end of a turn: tokens with these names end it, whatever the file's end-of-sequence id is.
END_OF_TURN = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <|eom_id|> </s> <eos> "
    "<｜end▁of▁sentence｜>".split()
)
MAX_END_TOKENS = 10_000              # that a config lists; models have up to ten, and 64 MiB of them take minutes
_NORMAL = 1                          # GGUF's type of an ordinary token
_SENTENCEPIECE_EOS = 2               # where a file is too old to say


def gguf_ends_of_turn(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of tokens that end a turn by their name. An ordinary </s> is a piece of HTML."""
    tokens, types = _list(metadata, "tokenizer.ggml.tokens"), _list(metadata, "tokenizer.ggml.token_type")
    return [
        place
        for place, token in enumerate(tokens)
        if token in END_OF_TURN and (token != "</s>" or types[place : place + 1] not in ([], [_NORMAL]))
    ]


def gguf_end_tokens(metadata: Mapping[str, Any], vocab_size: int | None = None) -> tuple[int, ...]:
    """Every id that ends an answer. Ids beyond the file's tokens, if it lists any, or beyond `vocab_size`, the rows of its
    embedding, are ignored: the scheduler has a table by id."""
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    limit = min((size for size in (len(tokens) or None, vocab_size) if size is not None), default=None)
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    valid = [each if _is_id(each) and (limit is None or each < limit) else None for each in named]
    if valid[0] is None and metadata.get("tokenizer.ggml.model") == "llama":
        valid[0] = _SENTENCEPIECE_EOS
    listed = [*(each for each in valid if each is not None), *gguf_ends_of_turn(metadata)]
    return _unique([each for each in listed if limit is None or each < limit])


def language_model(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the language model in a checkpoint's config, wherever that keeps it."""
    inner = raw.get("thinker_config")
    found = inner.get("text_config") if isinstance(inner, dict) else raw.get("text_config") or raw.get("llm_config")
    return found if isinstance(found, dict) else None


def hf_end_tokens(config: Mapping[str, Any], generation: Mapping[str, Any], eos_token: int | None) -> tuple[int, ...]:
    """All ids from config.json, generation_config.json and the tokenizer's eos_token. Ids beyond the vocabulary are ignored: the
    scheduler has a table by id."""
    inner = language_model(config) or {}
    size = inner.get("vocab_size", config.get("vocab_size"))
    own = [] if eos_token is None else [eos_token]
    listed = [*_ids(config, "config.json"), *_ids(inner, "config.json"), *_ids(generation, "generation_config.json"), *own]
    return _unique([each for each in listed if not _is_id(size) or each < size])


def directory_eos_token(directory: Path) -> int | None:
    """The id of the eos_token that a directory's tokenizer names, without building the tokenizer."""
    settings = read_settings(directory / "tokenizer_config.json")
    named = {**read_settings(directory / "special_tokens_map.json"), **settings}.get("eos_token")
    name = named.get("content") if isinstance(named, dict) else named
    if not isinstance(name, str):
        return None
    added = settings.get("added_tokens_decoder")
    for place, token in (added.items() if isinstance(added, dict) else ()):
        if isinstance(token, dict) and token.get("content") == name and str(place).isdecimal() and len(str(place)) < 19:
            return int(place)
    whole = read_settings(directory / "tokenizer.json")          # megabytes: only where the small file does not say
    for token in _list(whole, "added_tokens"):
        if isinstance(token, dict) and token.get("content") == name and _is_id(token.get("id")):
            return int(token["id"])
    model = whole.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    place = vocabulary.get(name) if isinstance(vocabulary, dict) else None
    return place if _is_id(place) else None


def _ids(fields: Mapping[str, Any], file: str) -> list[int]:
    value = fields.get("eos_token_id")
    if isinstance(value, list) and len(value) > MAX_END_TOKENS:
        raise ModelError(f"{file}: eos_token_id lists {len(value):,} tokens; at most {MAX_END_TOKENS:,} are read")
    return [each for each in (value if isinstance(value, list) else [value]) if _is_id(each)]


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unique(ids: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    return value if isinstance(value, list) else []

"""The vocabulary of a GGUF file, built from its metadata with the `tokenizers` library.

A GGUF file carries tokens, their types, and merges or scores, but only the name of the pre-tokenizer.
llama.cpp is the reference for the ids; scripts/make_tokenizer_golden.py compares with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from ridgeline.errors import ModelError, shown
from ridgeline.models.end_tokens import gguf_end_tokens, gguf_ends_of_turn
from ridgeline.models.gguf import MAX_STRING_BYTES
from ridgeline.text.gguf_patterns import PRE_TOKENIZERS
from ridgeline.text.tokenizer_limits import MAX_MERGE_BYTES, in_time, require_few_added, require_short
from ridgeline.text.vocabulary import SPACE_MARK, Vocabulary, byte_level_piece, byte_of, sentencepiece_piece


def gguf_vocabulary(metadata: Mapping[str, Any], file_name: str) -> Vocabulary:
    return _VocabularyBuilder(metadata, file_name).vocabulary()


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SHOWN_TYPES = (_TokenType.NORMAL, _TokenType.USER_DEFINED, _TokenType.BYTE)
_PARSED_TYPES = (_TokenType.CONTROL, _TokenType.UNKNOWN, _TokenType.USER_DEFINED)      # looked for in the text first
# What merging may make. Control tokens are left out: text that must not be parsed for them can never become one.
_MERGED_TYPES = (_TokenType.NORMAL, _TokenType.USER_DEFINED, _TokenType.UNUSED)


class _VocabularyBuilder:
    """The tokenizer.* part of a GGUF file's metadata, checked, and what is built from it."""

    def __init__(self, metadata: Mapping[str, Any], file_name: str) -> None:
        self.metadata = metadata
        self.file_name = file_name
        self.model = self._text("tokenizer.ggml.model", "")
        if self.model not in ("gpt2", "llama"):
            raise self._error(
                f"tokenizer.ggml.model is {shown(self.model)}; "
                "supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
            )
        listed = self._array("tokenizer.ggml.tokens", str)
        if not listed:
            raise self._error("it has no vocabulary (tokenizer.ggml.tokens)")
        self.tokens: list[str] = [token or f"[EMPTY_{place}]" for place, token in enumerate(listed)]
        self.ids = {token: place for place, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for place, token in enumerate(self.tokens) if self.ids[token] != place)
            raise self._error(f"tokenizer.ggml.tokens holds {shown(twice)} twice")
        self.types: list[int] = self._per_token("tokenizer.ggml.token_type", int, default=int(_TokenType.NORMAL))
        for place in gguf_ends_of_turn(metadata):
            self.types[place] = _TokenType.CONTROL       # converters often forget to say so

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

    def _array(self, key: str, *kinds: type) -> list[Any]:
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not set(map(type, value)) <= set(kinds):
            raise self._error(f"{key} must be an array of {' or '.join(kind.__name__ for kind in kinds)}")
        return list(value)

    def _per_token(self, key: str, *kinds: type, default: Any) -> list[Any]:
        values = self._array(key, *kinds) if key in self.metadata else [default] * len(self.tokens)
        if len(values) < len(self.tokens):
            raise self._error(f"{key} has {len(values):,} entries for {len(self.tokens):,} tokens")
        return values[: len(self.tokens)]

    def _id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    # --- building ---

    def vocabulary(self) -> Vocabulary:
        core, pieces, add_bos = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        self._add_parsed_tokens(core)
        bos, eos = self._id("bos"), self._id("eos")
        if self.model == "llama":        # older files leave out what every SentencePiece model of their time had
            bos, eos = (usual if given is None and usual < len(self.tokens) else given for given, usual in ((bos, 1), (eos, 2)))
        named = {"bos_token": bos, "eos_token": eos, "unk_token": self._id("unknown"), "pad_token": self._id("padding")}
        return Vocabulary(
            core=core,
            pieces=pieces,
            special_ids=frozenset(place for place, kind in enumerate(self.types) if kind not in _SHOWN_TYPES),
            bos_token_id=bos,
            eos_token_ids=frozenset(gguf_end_tokens(self.metadata)),
            prefix_ids=[bos] if self._flag("tokenizer.ggml.add_bos_token", add_bos) and bos is not None else [],
            suffix_ids=[eos] if self._flag("tokenizer.ggml.add_eos_token", False) and eos is not None else [],
            has_prefix_space=self.model == "llama" and self._flag("tokenizer.ggml.add_space_prefix", True),
            special_tokens={name: self.tokens[place] for name, place in named.items() if place is not None},
            chat_templates=self._chat_templates(),
        )

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, list[bytes], bool]:
        name = self._text("tokenizer.ggml.pre", "default")
        if name not in PRE_TOKENIZERS:
            raise self._error(f"tokenizer.ggml.pre is {shown(name)}; supported are {', '.join(sorted(PRE_TOKENIZERS))}")
        pre = PRE_TOKENIZERS[name]
        merges = [merge.partition(" ")[::2] for merge in self._array("tokenizer.ggml.merges", str)]
        if not merges:
            raise self._error("it has no merges (tokenizer.ggml.merges)")
        core = tokenizers.Tokenizer(self._bpe(merges, ignore_merges=pre.ignore_merges))
        core.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
        normal = int(_TokenType.NORMAL)
        pieces = [
            byte_level_piece(token) if kind == normal else token.encode()
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]
        return core, pieces, pre.add_bos

    def _sentencepiece(self) -> tuple[tokenizers.Tokenizer, list[bytes], bool]:
        unknown = self.tokens[self._id("unknown") or 0]
        core = tokenizers.Tokenizer(self._bpe(self._merges_from_scores(), byte_fallback=True, unk_token=unknown))
        steps: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
        if self._flag("tokenizer.ggml.add_space_prefix", True):
            steps.insert(0, normalizers.Prepend(SPACE_MARK))
        core.normalizer = normalizers.Sequence(steps)
        pieces = [
            self._sentencepiece_piece(token, kind) for token, kind in zip(self.tokens, self.types, strict=True)
        ]
        return core, pieces, True

    def _sentencepiece_piece(self, token: str, kind: int) -> bytes:
        if kind == _TokenType.BYTE:
            byte = byte_of(token)
            if byte is None:
                raise self._error(f"the byte token {shown(token)} is not written like <0x0A>")
            return byte
        return sentencepiece_piece(token) if kind == _TokenType.NORMAL else token.encode()

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
        try:
            return models.BPE(vocab=self.ids, merges=merges, **options)
        except Exception as error:       # the library raises plain Exception whatever is wrong
            raise self._error(f"its merges do not fit its vocabulary: {error}") from None

    def _merges_from_scores(self) -> list[tuple[str, str]]:
        """SentencePiece merges the neighbours that make the best-scored token: every way to cut a token is a merge.

        Among equal scores the leftmost pair is merged first, which a list of merges cannot express. Real vocabularies have
        equal scores only for runs of spaces, and there (with every length present) the order of ids gives the same tokens.
        """
        scores = self._per_token("tokenizer.ggml.scores", float, int, default=0.0)
        ids = self.ids
        merges: list[tuple[str, str]] = []
        merged = [place for place in range(len(scores)) if self.types[place] in _MERGED_TYPES]
        require_short((self.tokens[place] for place in merged), "its tokens", MAX_STRING_BYTES, self.file_name)
        size = 0
        for place in in_time(sorted(merged, key=lambda place: -scores[place]), "vocabulary"):
            token, before = self.tokens[place], len(merges)
            if size <= MAX_MERGE_BYTES:
                merges += [
                    (token[:cut], token[cut:])
                    for cut in range(1, len(token))
                    if token[:cut] in ids and token[cut:] in ids
                ]
            size += (len(merges) - before) * (len(token) + 16)
        if size > MAX_MERGE_BYTES:
            raise self._error(f"the pairs of its tokens that make another have more than {MAX_MERGE_BYTES:,} bytes")
        return merges

    def _add_parsed_tokens(self, core: tokenizers.Tokenizer) -> None:
        """Tokens that are matched in a text before pre-tokenization."""
        model_name = str(self.metadata.get("general.name", "")).lower()
        strips = "phi-3" in model_name or "phi3" in model_name     # Phi-3 swallows the blanks behind its special tokens
        control: list[AddedToken] = []
        user_defined: list[AddedToken] = []
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in _PARSED_TYPES:
                rstrip = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
                group = user_defined if kind == _TokenType.USER_DEFINED else control
                group.append(AddedToken(token, rstrip=rstrip, normalized=False, special=group is control))
        require_few_added((token.content for token in (*control, *user_defined)), self.file_name)
        core.add_special_tokens(control)
        core.add_tokens(user_defined)

    def _chat_templates(self) -> dict[str, str]:
        """tokenizer.chat_template, and tokenizer.chat_template.NAME for those of another name."""
        prefix = "tokenizer.chat_template"
        found = {key: self._text(key, "") for key in self.metadata if key == prefix or key.startswith(prefix + ".")}
        return {key[len(prefix) + 1 :] or "default": template for key, template in found.items()}

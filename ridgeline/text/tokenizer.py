"""Text to token ids and token ids to text, from a Hugging Face directory or a GGUF file.

The `tokenizers` library encodes. Decoding is ours: every token is a run of bytes, and a text is those bytes decoded, so that
it can be done token by token. Spaces stay as the model wrote them: no clean-up. Vocabularies whose tokens have no bytes of their
own (text/decoders) are decoded by the library.
This file knows neither requests nor streams (text/detokenizer), nor how a chat template is rendered (text/chat_template).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from ridgeline.errors import BadRequest, ModelError
from ridgeline.metrics import SPENT
from ridgeline.models.gguf import GGUFFile
from ridgeline.process.log import get_logger
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.decoders import WindowDecoder
from ridgeline.text.quoting import Quoted, Special
from ridgeline.text.tokenizer_limits import SlowVocabulary, TextCost, check_text, in_time, is_panic, may_go_back
from ridgeline.text.vocabulary import Vocabulary
from ridgeline.text.vocabulary_gguf import gguf_vocabulary
from ridgeline.text.vocabulary_hf import directory_vocabulary

logger = get_logger("text")

_LONG_TEXT = 2_000                   # characters; such texts are read in threads, and the library must not keep Python's lock
_SLOW_SECONDS = 0.05                 # of CPU time for a shorter text, which usually takes a millisecond


def _full_collections() -> int:
    """Of garbage, so far: one in a thread takes as long as a slow text."""
    return int(gc.get_stats()[2]["collections"])


class Encoded(dict[str, Any]):
    """The result of calling a tokenizer: `input_ids` and `attention_mask`, as entries and as attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads. Public names follow transformers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special_ids = vocabulary.special_ids            # shown only with skip_special_tokens=False
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids        # any of them ends an answer
        self.has_prefix_space = vocabulary.has_prefix_space
        self._core = vocabulary.core
        steps = (vocabulary.core.normalizer, vocabulary.core.pre_tokenizer)
        self._cost = TextCost(vocabulary.growth, any(may_go_back(step.__getstate__()) for step in steps if step is not None))
        self._plain_core: tokenizers.Tokenizer | None = None
        self._pieces = vocabulary.pieces
        self._shown_pieces = list(vocabulary.pieces)
        for token in self.special_ids:
            self._shown_pieces[token] = b""
        self._first_pieces = vocabulary.first_pieces
        self.decodes_alone = vocabulary.decodes_alone        # False: a token's text depends on those around it
        self._around = vocabulary.prefix_ids, vocabulary.suffix_ids
        self._chat = ChatTemplate(vocabulary.chat_templates, vocabulary.special_tokens)
        added = vocabulary.core.get_added_tokens_decoder().values()
        self._special = Special(token.content for token in added if token.special)
        self._spelt_out = self._as_text(self._special.texts)

    def _as_text(self, texts: list[str]) -> dict[str, list[int]]:
        """The ids of each text as ordinary characters. Here, where no other thread uses the tokenizer: a copy of it that reads
        special tokens as text takes seconds to make, and chats would wait for the first that needs it."""
        self._core.encode_special_tokens = True
        try:
            return {text: self._core.encode(text, add_special_tokens=False).ids for text in in_time(texts, "encoder")}
        finally:
            self._core.encode_special_tokens = False

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a directory with tokenizer.json, or from a .gguf file."""
        path = Path(path)
        try:
            if path.is_dir():
                return cls(directory_vocabulary(path))
            with GGUFFile(path) as file:
                return cls(gguf_vocabulary(file.metadata, path.name))
        except SlowVocabulary as error:
            raise ModelError(f"{path}: {error}") from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise ModelError(f"{path}: its tokenizer cannot be used: {' '.join(str(error).split())[:200]}") from None

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows. The model's own vocabulary may be padded beyond it."""
        return len(self._pieces)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def prefix_ids(self) -> list[int]:
        """What add_special_tokens puts before a text."""
        return self._around[0]

    @property
    def suffix_ids(self) -> list[int]:
        return self._around[1]

    @property
    def is_slow(self) -> bool:
        """Whether a short text took long: others may, too, and are to be read in threads."""
        return self._cost.is_slow

    @property
    def bos_token(self) -> str | None:
        return self._chat.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._chat.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`; `eos_token_ids` are all that end an answer."""
        named = self.token_id(self.eos_token) if self.eos_token is not None else None
        return named if named is not None else min(self.eos_token_ids, default=None)

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        return vocabulary

    # --- text to ids ---

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """`parse_special=False` reads the text of control tokens, such as <|im_end|>, as ordinary characters."""
        core = self._encoder(parse_special or not self._special.are_in(text))
        began, collections = time.thread_time(), _full_collections()
        try:
            if len(text) < _LONG_TEXT and not self.is_slow:
                ids: list[int] = core.encode(text, add_special_tokens=False).ids
            else:
                check_text(text, self._cost.growth)
                # This call leaves Python's lock to other threads. Without the place of each token in the text: half the time,
                # and memory that grows no faster than the text.
                ids = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise _not_text(text) from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _not_cut(error) from None
        finally:
            spent = time.thread_time() - began
            SPENT["tokenising"] += spent
            if spent > _SLOW_SECONDS and len(text) < _LONG_TEXT and not self.is_slow and collections == _full_collections():
                self._cost.is_slow = True
                logger.warning("the tokenizer took %.2f s for %d characters: from now on texts are tokenised in threads",
                               spent, len(text))
        return [*self._around[0], *ids, *self._around[1]] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Many texts at once, on all cores."""
        try:
            for text in texts:
                if len(text) >= _LONG_TEXT:
                    check_text(text, self._cost.growth)
            encodings = self._encoder(parse_special).encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            return [self.encode(text, add_special_tokens, parse_special) for text in texts]    # names the bad one
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _not_cut(error) from None
        if not add_special_tokens:
            return [encoding.ids for encoding in encodings]
        return [[*self._around[0], *encoding.ids, *self._around[1]] for encoding in encodings]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        """One text or several, as transformers' tokenizers take and give them; lists, no padding."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        batch = self.encode_batch(text, add_special_tokens)
        return Encoded(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of each token as the vocabulary writes it; for an unknown one unk_token's id, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        known = self.token_id(tokens)
        return known if known is not None else self.token_id(self._chat.special_tokens.get("unk_token", ""))

    def _encoder(self, parse_special: bool) -> tokenizers.Tokenizer:
        if parse_special:
            return self._core
        if self._plain_core is None:
            # The switch belongs to the whole object, so the rare other setting gets a copy, made on first use.
            plain_core = tokenizers.Tokenizer.from_str(self._core.to_str())
            plain_core.encode_special_tokens = True
            self._plain_core = plain_core
        return self._plain_core

    # --- ids to text ---

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, *, at_start: bool = True) -> str:
        """`at_start=False`: the tokens continue a text, so a SentencePiece prefix space stays."""
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        pieces = self.token_pieces(skip_special_tokens)
        count = len(pieces)
        known = [token for token in token_ids if 0 <= token < count]
        if not self.decodes_alone:
            window = self.window(skip_special_tokens)
            return "".join([*map(window.push, known), window.finish()])
        if at_start and self._first_pieces is not None:
            return b"".join(self._from_start(known, skip_special_tokens)).decode("utf-8", "replace")
        text = b"".join([pieces[token] for token in known]).decode("utf-8", "replace")
        return text.removeprefix(" ") if at_start and self.has_prefix_space else text

    def _from_start(self, known: list[int], skip_special_tokens: bool) -> Iterator[bytes]:
        """The bytes of tokens at the start of a text."""
        pieces, begun = self.token_pieces(skip_special_tokens), False
        for token in known:
            first = None if begun else self.first_piece(token, skip_special_tokens)
            begun = begun or first is not None
            yield pieces[token] if first is None else first

    def first_piece(self, token_id: int, skip_special_tokens: bool) -> bytes | None:
        """The bytes of a token that begins a text. None: it is no token, or skipped, and the next one begins the text."""
        skipped = skip_special_tokens and token_id in self.special_ids
        known = 0 <= token_id < self.vocab_size and self._core.id_to_token(token_id) is not None
        return None if self._first_pieces is None or skipped or not known else self._first_pieces[token_id]

    @property
    def has_first_pieces(self) -> bool:
        """Whether a text's first token is written in another way than the ones behind it."""
        return self._first_pieces is not None

    def window(self, skip_special_tokens: bool) -> WindowDecoder:
        """Decodes tokens as they come, where a token's text depends on those around it."""
        return WindowDecoder(self._core, self.special_ids if skip_special_tokens else frozenset())

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """Each token as the vocabulary writes it; None for an unknown id."""
        if not isinstance(ids, int):
            return [self.convert_ids_to_tokens(token) for token in ids]
        return self._core.id_to_token(ids) if 0 <= ids < self.vocab_size else None

    def token_pieces(self, skip_special_tokens: bool = False) -> list[bytes]:
        """The bytes of every token, by id; not to be changed. Skipped tokens are empty."""
        return self._shown_pieces if skip_special_tokens else self._pieces

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that only pads the model's vocabulary."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def token_text(self, token_id: int) -> str:
        """One token alone, as shown beside its log-probability. Part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text in the vocabulary, such as "<|im_end|>"."""
        token: int | None = self._core.token_to_id(text)
        return token

    # --- chat ---

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All of them by name; most models have a "default" only."""
        return self._chat.templates

    @property
    def chat_template(self) -> str | None:
        return self._chat.templates.get("default")

    @chat_template.setter
    def chat_template(self, source: str) -> None:
        self._chat = ChatTemplate({"default": source}, self._chat.special_tokens)

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[True] = True, **kwargs: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], **kwargs: Any
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        check: Callable[[str], None] | None = None,
        may_wait: bool = True,
        **kwargs: Any,
    ) -> list[int] | str:
        """The prompt of a conversation. The template writes its own special tokens, so none are added unless asked for. Text in
        messages, tools and variables that is spelt like one stays ordinary text (text/quoting).

        Variables of the template come as keywords, or, where a client chose their names, as `chat_template_kwargs`.
        `chat_template` is the text of one to use instead of the model's own. `check` may refuse the text before it is
        tokenised. Without `may_wait`, RendererBusy if the template could not be rendered at once.
        """
        variables = {**(chat_template_kwargs or {}), **kwargs}
        flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        text, quoted = self._rendered(messages, tools, variables, chat_template, may_wait=may_wait, **flags)
        if check is not None:
            check(text)
        if not tokenize:
            return text if quoted is None else quoted.shown(text)
        if quoted is None:
            return self.encode(text, add_special_tokens)
        return self._unquoted(text, quoted, add_special_tokens)

    def chat_prompts(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None, **flags: bool,
    ) -> list[list[int]]:
        """apply_chat_template() of each, tokenised at once, on all cores."""
        made = [self._rendered(each, tools, dict(chat_template_kwargs or {}), chat_template, **flags) for each in conversations]
        plain = iter(self.encode_batch([text for text, quoted in made if quoted is None], add_special_tokens=False))
        return [next(plain) if quoted is None else self._unquoted(text, quoted, False) for text, quoted in made]

    def _rendered(
        self, messages: Any, tools: Any, variables: dict[str, Any], chat_template: str | None, **how: bool
    ) -> tuple[str, Quoted | None]:
        """The text of a conversation; not None: what is spelt like special tokens in it is hidden."""
        chat = self._chat
        if chat_template is not None:
            chat = ChatTemplate({"default": chat_template}, chat.special_tokens)
        quoted: Quoted | None = None
        if self._special.are_in([messages, tools, variables]):
            quoted = self._special.quoted()
            messages, tools, variables = quoted.hide(messages), quoted.hide(tools), quoted.hide(variables)
        return chat.render(messages, tools=tools, variables=variables, **how), quoted

    def _unquoted(self, text: str, quoted: Quoted, add_special_tokens: bool) -> list[int]:
        parts = list(quoted.parts(text))
        # At once: the library gives other threads a turn in each call, and takes milliseconds to get its own back.
        rest = iter(self.encode_batch([part for part, plain in parts if not plain], False))
        ids = [id for part, plain in parts for id in (self._spelt_out[part] if plain else next(rest))]
        return [*self._around[0], *ids, *self._around[1]] if add_special_tokens else ids


def _not_text(text: Any) -> BadRequest:
    if not isinstance(text, str):
        return BadRequest(f"a prompt must be a string, got {type(text).__name__}")
    place = next(place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    surrogate = f"U+{ord(text[place]):04X}"
    return BadRequest(f"a prompt must be valid Unicode, but character {place} is the lone surrogate {surrogate}")


def _not_cut(error: BaseException) -> BadRequest:
    """The library gave up on this text, mostly because a pattern of the model's file went back over it too often."""
    logger.warning("the tokenizer panicked: %s", " ".join(str(error).split())[:200])
    return BadRequest("the model's tokenizer cannot cut this text into tokens; change it, for example long repetitions in it")

"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with vLLM's names: a prompt as token ids, and back.

Types, and the work on a tokenizer. The caller limits the length of a text before it is tokenised.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.errors import BadRequest
from ridgeline.sampling_params import plain_token_ids
from ridgeline.text.tokenizer import Tokenizer

MAX_DETOKENIZED = 2**18              # ids at once: each may be a hundred bytes of text


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None               # for a prompt; a chat template writes its own
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    # llama.cpp's names: a text, and how it is tokenised. The answer then has its shape.
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    def check(self) -> None:
        if self.content is not None and self.prompt is None and self.messages is None:
            return
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("prompt or messages must be given, and not both", field="prompt")
        for name in ("content", "add_special", "parse_special", "with_pieces"):
            if getattr(self, name) is not None:
                message = f"{name} belongs to llama.cpp's form of this request, with content instead of a prompt"
                raise BadRequest(message, field=name)
        for_chat = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
        if self.messages is None:
            misplaced = next((name for name in for_chat if getattr(self, name) is not None), None)
            if misplaced is not None:
                raise BadRequest(f"{misplaced} needs messages; a prompt is tokenised as it is", field=misplaced)
        elif self.add_special_tokens:
            message = "add_special_tokens must be false with messages: the chat template writes its own"
            raise BadRequest(message, field="add_special_tokens")

    def chat(self) -> dict[str, Any]:
        """The same request in chat's form, as plain data."""
        names = ("model", "messages", "chat_template_kwargs", "tools")
        chat = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.continue_final_message:
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.add_generation_prompt is not None:
            chat["add_generation_prompt"] = self.add_generation_prompt
        return chat


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None

    @classmethod
    def of(cls, tokens: list[int], max_model_len: int, tokenizer: Tokenizer, with_strings: bool) -> TokenizeReply:
        strings = [tokenizer.convert_ids_to_tokens(token) or "" for token in tokens] if with_strings else None
        return cls(len(tokens), max_model_len, tokens, strings)


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None

    def check(self) -> None:
        self.tokens = plain_token_ids("tokens", self.tokens, MAX_DETOKENIZED)


class PlainTokens(msgspec.Struct):
    """llama.cpp's answer."""

    tokens: list[Any]

    @classmethod
    def of(cls, tokens: list[int], tokenizer: Tokenizer, with_pieces: bool) -> PlainTokens:
        if not with_pieces:
            return cls(tokens)
        return cls([{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in tokens])


def _piece(piece: bytes) -> str | list[int]:
    """A text, or the bytes of a part of one."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


class DetokenizeReply(msgspec.Struct):
    prompt: str
    content: str                         # the same, by llama.cpp's name

    @classmethod
    def of(cls, tokens: list[int], tokenizer: Tokenizer) -> DetokenizeReply:
        """BadRequest for an id outside the vocabulary; the tokenizer would drop it silently."""
        unknown = next((token for token in tokens if token >= tokenizer.vocab_size), None)
        if unknown is not None:
            raise BadRequest(f"tokens holds {unknown}; the vocabulary ends at {tokenizer.vocab_size - 1}", field="tokens")
        text = tokenizer.decode(tokens)
        return cls(text, text)


class TokenizerInfo(msgspec.Struct):
    """For clients without a tokenizer of their own."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    vocab_size: int
    max_model_len: int
    pad_token: None = None               # nothing is padded here
    tokenizer_class: str = "ridgeline"

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_model_len: int) -> TokenizerInfo:
        template = tokenizer.chat_templates.get("default")
        return cls(template, tokenizer.bos_token, tokenizer.eos_token, tokenizer.vocab_size, max_model_len)

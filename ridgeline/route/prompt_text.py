"""A request's prompt as bytes: what two requests have in common at their beginning, a replica computes once.

Chat templates put tools before messages and messages in order, so the bytes do, too. Nothing is rendered: only equal beginnings
matter. The model and the cache salt come first, because they separate what a prefix cache shares.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from ridgeline.engine.replicas.prefix_tree import MOST_BYTES, prompt_chain
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt

_MESSAGE = b"\x1e"                   # before a message
_FIELD = b"\x1f"                     # between its parts
_encode = msgspec.json.Encoder(order="deterministic").encode


def with_answer(prompt: RoutedPrompt, answer: str) -> list[int]:
    """The nodes of the prompt and its answer, as the conversation's next request has them."""
    if prompt.num_unkept:                                # the answer comes after all that is hashed
        return prompt.chain
    between = _MESSAGE + b"assistant" + _FIELD if prompt.is_chat else b""
    return prompt.followed_by(between + answer.encode(errors="surrogatepass"))


class PromptText(msgspec.Struct):
    """What a body says of its prompt, wherever the body is read: Python hashes texts differently in every process."""

    text: bytes                      # as far as a prefix tree goes; a request may be open for minutes
    num_unkept: int                  # bytes behind it
    model: bytes                     # a digest of its name
    most_output: int | None
    is_chat: bool
    streams: bool

    def routed(self, salt: str) -> RoutedPrompt:
        root = hash((self.model, salt))
        chain = prompt_chain(self.text, root)
        return RoutedPrompt(self.text, root, chain, self.most_output, self.is_chat, self.streams, self.num_unkept, self.model)


def prompt_of(request: Mapping[str, Any], salt: str = "") -> RoutedPrompt:
    return read_prompt(request).routed(salt)


def read_prompt(request: Mapping[str, Any]) -> PromptText:
    """Of a decoded body, in any dialect. What is malformed gets some text, too: the replica will refuse it."""
    messages = request.get("messages")
    if isinstance(messages, list):
        system = request.get("system")                   # Anthropic's
        text = b"".join([
            *([_encode(request["tools"])] if request.get("tools") else []),
            *([_MESSAGE, b"system", _FIELD, _content(system)] if system else []),
            *(_message(message) for message in messages),
        ])
    else:
        given = request.get("prompt", request.get("input", request.get("text_1")))
        text = _content(given)
    name = str(request.get("model")).encode(errors="surrogatepass")
    most = request.get("max_completion_tokens") or request.get("max_tokens")
    limit = most if type(most) is int and 0 < most < 2**63 else None
    model = hashlib.blake2b(name, digest_size=16).digest()
    kept = text[:MOST_BYTES]
    return PromptText(kept, len(text) - len(kept), model, limit, isinstance(messages, list), request.get("stream") is True)


def _message(message: Any) -> bytes:
    if not isinstance(message, dict):
        return _MESSAGE + _encode(message)
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    head = _MESSAGE + str(message.get("role")).encode(errors="surrogatepass") + _FIELD + _content(message.get("content"))
    return head + _encode(rest) if rest else head


def _content(content: Any) -> bytes:
    """Text, parts with text or others, or token ids (4 bytes each, which is also about what a token of text has)."""
    if isinstance(content, str):
        return content.encode(errors="surrogatepass")
    if not isinstance(content, list):
        return b"" if content is None else _encode(content)
    if content and all(type(each) is int and 0 <= each < 2**32 for each in content):
        return struct.pack(f"<{len(content)}I", *content)
    return b"".join(_part(part) for part in content)


def _part(part: Any) -> bytes:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return bytes(part["text"].encode(errors="surrogatepass"))
    return part.encode(errors="surrogatepass") if isinstance(part, str) else _encode(part)

"""The OpenAI API as types: what may be asked, and how answers are written.

A field that is not declared is refused by name; so is one that is known but would need something this server does not
do. Hints that cannot change an answer are taken and left alone. Chat's and completions' own types are in server/api/chat and
server/api/completions, what they share in server/api/generation; here is what turns a body into one of them.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ridgeline.server.api.chat import ChatChoice, ChatMessage, ChatRequest, ChatWriter
from ridgeline.server.api.completions import CompletionChoice, CompletionRequest, CompletionWriter
from ridgeline.server.api.generation import GenerationRequest, Reply, Usage, Writer
from ridgeline.server.http.body import parse_body

__all__ = [
    "ChatChoice", "ChatMessage", "ChatRequest", "ChatWriter", "CompletionChoice", "CompletionRequest", "CompletionWriter",
    "GenerationRequest", "ModelCard", "Reply", "Usage", "Writer", "parse",
]  # fmt: skip

T = TypeVar("T", bound=GenerationRequest)


def parse(kind: type[T], body: bytes) -> T:
    """The request, checked; BadRequest or Unsupported in words that name the field."""
    return parse_body(kind, body)


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str                            # what the server was started with: clients load their tokenizer from it
    object: str = "model"
    owned_by: str = "ridgeline"
    parent: None = None
    permission: tuple[()] = ()

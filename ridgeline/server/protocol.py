"""The OpenAI API as types: what may be asked, and how answers are written.

A field that is not declared is refused by name; so is one that is known but would need something this server does not
do. Hints that cannot change an answer are taken and left alone. Chat's and completions' own types are in server/api/chat and
server/api/completions, what they share in server/api/generation; here is what turns a body into one of them.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from ridgeline.server.api.chat import ChatChoice, ChatMessage, ChatRequest, ChatWriter
from ridgeline.server.api.completions import CompletionChoice, CompletionRequest, CompletionWriter
from ridgeline.server.api.embeddings import EmbeddingRequest
from ridgeline.server.api.generation import GenerationRequest, Reply, Usage, Writer
from ridgeline.server.api.responses_request import ResponsesRequest
from ridgeline.server.http.body import parse_body

__all__ = [
    "ChatChoice", "ChatMessage", "ChatRequest", "ChatWriter", "CompletionChoice", "CompletionRequest", "CompletionWriter",
    "GenerationRequest", "ModelCard", "Reply", "Usage", "Writer", "param_of", "parse",
]  # fmt: skip

T = TypeVar("T", bound=GenerationRequest)


def parse(kind: type[T], body: bytes) -> T:
    """The request, checked; BadRequest or Unsupported in words that name the field."""
    return parse_body(kind, body)


def param_of(message: str) -> str | None:
    """The field an error is about, for `error.param`: our messages begin with it, or with what is wrong with a field as such."""
    named = re.match(r"unknown field '([^']+)'|missing required field (\w+)", message)
    if named is not None:
        return named.group(1) or named.group(2)
    first = re.match(r"[a-z_]+[12]?", message)
    return _FIELDS.get(first.group()) if first is not None else None


_FIELDS = {
    name: name
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest) for name in kind.__struct_fields__
}  # fmt: skip
_FIELDS |= {name: name for name in ("text_1", "text_2", "limit", "order", "after")}


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str                            # what the server was started with: clients load their tokenizer from it
    object: str = "model"
    owned_by: str = "ridgeline"
    parent: None = None
    permission: tuple[()] = ()

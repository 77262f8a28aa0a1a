"""The OpenAPI document of all endpoints, from the types that parse requests and write answers.

A table of paths and the types of their requests and answers. Knows nothing of how an endpoint works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import msgspec

from ridgeline.engine.client.long_work import LONG_BYTES, away
from ridgeline.server.api.anthropic import messages_api as anthropic
from ridgeline.server.api.generation import Reply
from ridgeline.server.api.llamacpp.llama_answers import LlamaReply
from ridgeline.server.api.llamacpp.llama_requests import LlamaRequest, Slot, TemplateReply
from ridgeline.server.api.model_cards import ModelCard
from ridgeline.server.api.ollama import ollama_models
from ridgeline.server.api.ollama.ollama_answers import OllamaChatReply, OllamaGenerateReply
from ridgeline.server.api.ollama.ollama_prepare import EmbedReply, OldEmbedReply
from ridgeline.server.api.ollama.ollama_requests import (
    EmbedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from ridgeline.server.api.openai import responses_answer
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.chat_answers import ChatChoice
from ridgeline.server.api.openai.completions import CompletionChoice, CompletionRequest
from ridgeline.server.api.openai.embeddings import EmbeddingReply, EmbeddingRequest
from ridgeline.server.api.openai.responses_continued import MOST_ITEMS, DeletedResponse, InputItems
from ridgeline.server.api.openai.responses_request import KNOWN_INCLUDES
from ridgeline.server.api.vllm.batch_chat import BatchChatRequest
from ridgeline.server.api.vllm.score import ScoreReply, ScoreRequest
from ridgeline.server.api.vllm.tokenize import (
    DetokenizeReply,
    DetokenizeRequest,
    PlainTokens,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
)
from ridgeline.server.http.error_bodies import AnthropicError
from ridgeline.server.http.gate import OPEN_PATHS
from ridgeline.server.http.stream import LINES
from ridgeline.server.observe.prometheus import Load
from ridgeline.server.observe.roofline_endpoint import RooflineReply
from ridgeline.version import __version__

T = TypeVar("T")

JSON, EVENTS = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{name}"
ERRORS = {
    400: "A field is wrong, missing, unknown or not supported; the message names it",
    401: "The server has API keys, and the request has none of them",
    404: "An unknown model, a response or an item that is not stored here, or a path that does not exist",
    413: "The body is larger than --max-body-bytes",
    415: "The body is not declared as JSON",
    429: "The queue is full; Retry-After says when to try again",
    500: "This request failed",
    503: "The engine is loading, stopping or dead",
}

QUERY: dict[str, dict[str, Any]] = {
    "include": {"type": "array", "items": {"enum": list(KNOWN_INCLUDES)}},
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(msgspec.Struct):
    error: ErrorDetail


class OllamaError(msgspec.Struct):
    error: str


class ChatReply(Reply):
    choices: list[ChatChoice]


class CompletionReply(Reply):
    choices: list[CompletionChoice]


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


class Version(msgspec.Struct):
    version: str


class Health(msgspec.Struct):
    """A server that is ready also reports its load."""

    status: str


class Index(msgspec.Struct):
    """Where to go from here. A browser is sent to the dashboard instead."""

    name: str
    version: str
    openai_base_url: str
    docs: str
    openapi: str
    dashboard: str
    health: str


@dataclass(frozen=True, slots=True)
class Operation:
    path: str
    summary: str
    takes: type[Any] | None = None       # of the body; without one it is a GET
    gives: type[Any] | None = None       # None: the answer's body is text or empty
    error: type[Any] = Error
    streams: bool = False                # with `stream: true` the answer is server-sent events
    deletes: type[Any] | None = None     # what a DELETE of the same path gives, where there is one
    query: tuple[str, ...] = ()          # names from QUERY that its GET takes
    posts: bool = False                  # a POST without a body
    or_gives: type[Any] | None = None    # another form of the answer, for another form of the request
    bytes: bool = False                  # the answer may be bytes, where the request asks for them


OPERATIONS = (
    Operation("/v1/chat/completions", "A conversation", ChatRequest, ChatReply, streams=True),
    Operation("/v1/chat/completions/batch", "Several conversations, one choice each", BatchChatRequest, ChatReply),
    Operation("/invocations", "Any of the others, by its fields, for SageMaker", dict[str, Any], dict[str, Any], streams=True),
    Operation("/v1/completions", "A text to continue", CompletionRequest, CompletionReply, streams=True),
    Operation("/v1/responses", "A conversation, for clients of the Responses API", responses_answer.ResponsesRequest,
              responses_answer.ResponseReply, streams=True),
    Operation("/v1/responses/input_tokens", "How many tokens its prompt has", responses_answer.ResponsesRequest,
              responses_answer.InputTokens),
    Operation("/v1/responses/{id}", "One that is kept, fetched or deleted", gives=responses_answer.ResponseReply,
              deletes=DeletedResponse, query=("include",)),
    Operation("/v1/responses/{id}/cancel", "End one in the background", gives=responses_answer.ResponseReply, posts=True),
    Operation("/v1/responses/{id}/input_items", "What was sent with it", gives=InputItems,
              query=("include", "limit", "order", "after")),
    Operation("/v1/messages", "A conversation, for Anthropic's clients", anthropic.MessagesRequest,
              anthropic.MessageReply, AnthropicError, streams=True),
    Operation("/v1/messages/count_tokens", "How many tokens its prompt has", anthropic.CountRequest,
              anthropic.TokenCount, AnthropicError),
    Operation("/v1/embeddings", "Texts as vectors", EmbeddingRequest, EmbeddingReply, bytes=True),
    Operation("/v1/score", "The likelihood of one text after another", ScoreRequest, ScoreReply),
    Operation("/tokenize", "A prompt or a conversation as token ids", TokenizeRequest, TokenizeReply, or_gives=PlainTokens),
    Operation("/detokenize", "Token ids as text", DetokenizeRequest, DetokenizeReply),
    Operation("/tokenizer_info", "Its special tokens and chat template", gives=TokenizerInfo),
    Operation("/v1/models", "The one model that is served", gives=ModelList),
    Operation("/v1/models/{name}", "The same by its name", gives=ModelCard),
    Operation("/api/chat", "A conversation, for Ollama's clients", OllamaChatRequest, OllamaChatReply, OllamaError, streams=True),
    Operation("/api/generate", "A text to continue, for Ollama's clients", OllamaGenerateRequest, OllamaGenerateReply,
              OllamaError, streams=True),
    Operation("/api/embed", "Texts as vectors", EmbedRequest, EmbedReply, OllamaError),
    Operation("/api/embeddings", "A text as a vector; /api/embed replaces it", OldEmbedRequest, OldEmbedReply, OllamaError),
    Operation("/api/show", "What is known of the model", ShowRequest, ollama_models.Shown, OllamaError),
    Operation("/api/tags", "The one model that is served", gives=ollama_models.ListedModels, error=OllamaError),
    Operation("/api/ps", "The same, as loaded", gives=ollama_models.RunningModels, error=OllamaError),
    Operation("/api/version", "Of Ollama's API that this follows", gives=ollama_models.OllamaVersion, error=OllamaError),
    Operation("/completion", "A text to continue, for llama.cpp's clients", LlamaRequest, LlamaReply, streams=True,
              or_gives=list[LlamaReply]),
    Operation("/completions", "The same, where the request names no model", LlamaRequest, LlamaReply, streams=True,
              or_gives=list[LlamaReply]),
    Operation("/apply-template", "A conversation as the prompt it becomes", ChatRequest, TemplateReply),
    Operation("/infill", "Refused: use /v1/completions with a suffix", LlamaRequest),
    Operation("/props", "Settings, for llama.cpp's clients", gives=dict[str, Any]),
    Operation("/slots", "Rows of the running batch", gives=list[Slot]),
    Operation("/health", "Whether requests are taken", gives=Health),
    Operation("/health/ready", "The same", gives=Health),
    Operation("/health/live", "Whether this process answers", gives=Health),
    Operation("/ping", "As /health, without a body"),
    Operation("/version", "The server's version", gives=Version),
    Operation("/metrics", "Figures for Prometheus"),
    Operation("/load", "How much there is to do", gives=Load),
    Operation("/roofline", "Which resource binds, and how far it is to the roof", gives=RooflineReply),
    Operation("/fleet", "Load, hits and step times of every engine behind this address"),
    Operation("/dashboard", "A page that shows it, for a browser"),
    Operation("/dashboard/", "The same"),
    Operation("/docs", "This document as a page"),
    Operation("/", "Where to go from here; for a browser, the dashboard", gives=Index),
    Operation("/v1", "The same", gives=Index),
    Operation("/v1/", "The same", gives=Index),
)


_made: dict[tuple[Callable[[str], Any], str], Any] = {}


async def made_once(make: Callable[[str], T], root_path: str) -> T:
    """A form of the document. The first one is made in a thread: it takes a third of a second."""
    key = make, root_path
    if key not in _made:
        _made[key] = await away(LONG_BYTES + 1, lambda: make(root_path))
    made: T = _made[key]
    return made


def as_json(root_path: str) -> bytes:
    return msgspec.json.encode(document(root_path))


@cache
def document(root_path: str = "") -> dict[str, Any]:
    """OpenAPI 3.1: its schemas are JSON Schema 2020-12, which msgspec writes."""
    types = {
        kind for each in OPERATIONS
        for kind in (each.takes, each.gives, each.or_gives, each.error, each.deletes) if kind is not None
    }
    ordered = sorted(types, key=lambda kind: (kind.__module__, kind.__name__))
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REFERENCE)
    for schema in components.values():
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = {"type": "null"}        # as if it were not there (server/http/body)
    by_type = dict(zip(ordered, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ridgeline", "version": __version__},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": {each.path: _methods(each, by_type) for each in OPERATIONS},
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],                # keys are asked for only where the server was given some
    }


def _methods(operation: Operation, schemas: dict[type[Any], dict[str, Any]]) -> dict[str, Any]:
    methods = {"get" if operation.takes is None and not operation.posts else "post": _written(operation, schemas)}
    if operation.deletes is not None:
        methods["delete"] = _written(replace(operation, gives=operation.deletes, query=()), schemas)
    return methods


def _written(operation: Operation, schemas: dict[type[Any], dict[str, Any]]) -> dict[str, Any]:
    answer = {JSON: {"schema": schemas[operation.gives]}} if operation.gives is not None else {}
    if operation.or_gives is not None:
        answer[JSON] = {"schema": {"anyOf": [answer[JSON]["schema"], schemas[operation.or_gives]]}}
    if operation.streams and operation.error is OllamaError:
        answer[LINES.decode()] = {"schema": schemas[operation.gives]} if operation.gives is not None else {}
    elif operation.streams:
        text = {"type": "string"}                        # an event's data is JSON, but for the last of chat: [DONE]
        event = {"type": "object", "properties": {"event": text, "data": text}, "required": ["data"]}
        answer[EVENTS] = {"schema": event}
    if operation.bytes:
        answer["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    written: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": operation.summary} | ({"content": answer} if answer else {})},
    }
    if operation.takes is not None:
        written["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[operation.takes]}}}
    names = re.findall(r"{(\w+)}", operation.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [{"name": name, "in": "query", "required": False, "schema": QUERY[name]} for name in operation.query]
    if parameters:
        written["parameters"] = parameters
    content = {JSON: {"schema": schemas[operation.error]}}
    written["responses"] |= {
        str(status): {"description": ERRORS[status], "content": content} for status in _statuses(operation)
    }
    if operation.path.startswith("/health") or operation.path == "/ping":
        written["responses"]["503"] = {"description": ERRORS[503]}       # the same body as with 200
    return written


def _statuses(operation: Operation) -> Iterable[int]:
    if operation.takes is not None:
        return ERRORS
    return (400, 404, 503) if operation.path in OPEN_PATHS else (400, 401, 404, 503)

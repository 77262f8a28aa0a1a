"""The bodies of errors: OpenAI's shape; Anthropic's and Ollama's on the paths of their APIs.

A request may be refused before it reaches an endpoint (connection_limits, gate, hosts, routes); `body_for` then picks the shape
by path and headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

_encode = msgspec.json.Encoder().encode

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
VERSION = b"anthropic-version"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 414: "invalid_request_error",
    415: "invalid_request_error", 421: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error",
    431: "invalid_request_error", 503: "overloaded_error", 504: "timeout_error",
}


class AnthropicDetail(msgspec.Struct):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET          # for programs, where the message is not enough


class AnthropicError(msgspec.Struct):
    error: AnthropicDetail
    type: str = "error"


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None, details: Mapping[str, Any] | None = None
) -> bytes:
    """In OpenAI's shape."""
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return _encode({"error": error | ({"details": details} if details else {})})


def anthropic_body(status: int, openai_body: bytes) -> bytes:
    """The same error in Anthropic's shape."""
    error = msgspec.json.decode(openai_body)["error"]
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return _encode(AnthropicError(AnthropicDetail(kind, error["message"], error.get("details", UNSET))))


def ollama_body(openai_body: bytes) -> bytes:
    """The same error in Ollama's shape."""
    return _encode({"error": msgspec.json.decode(openai_body)["error"]["message"]})


def is_anthropic(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Paths that both kinds of clients use are told apart by a header that all of Anthropic's clients send."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/") or any(name == VERSION for name, _ in headers)


def body_for(path: str, headers: Iterable[tuple[bytes, bytes]], status: int, openai_body: bytes) -> bytes:
    """An error in OpenAI's shape, in the shape for a request to `path` with these headers."""
    if path.startswith(OLLAMA_PATH):
        return ollama_body(openai_body)
    return anthropic_body(status, openai_body) if is_anthropic(path, headers) else openai_body


def refusal(status: int, message: str, path: str = "", headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """All of an answer to a request that no application sees."""
    kind = "overloaded_error" if status == 503 else "invalid_request_error"
    body = body_for(path, headers, status, error_body(message, kind))
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    return first + (b"retry-after: 1\r\n" if status == 503 else b"") + head + body


def all_in_use(most: int) -> str:
    return f"all {most} connections of this server are in use; try again later"

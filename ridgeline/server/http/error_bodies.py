"""Errors as clients expect them: OpenAI's shape, and Anthropic's on the paths of Anthropic's API.

Whoever refuses a request before an endpoint has it (the protocol, the gate, the guard of names, the routes) knows its path
and its headers: `body_for` picks the shape by those. Knows statuses and words; what went wrong is for others to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

_encode = msgspec.json.Encoder().encode

ANTHROPIC_PATH = "/v1/messages"
VERSION = b"anthropic-version"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 414: "invalid_request_error",
    415: "invalid_request_error", 421: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error",
    431: "invalid_request_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class AnthropicDetail(msgspec.Struct):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET          # what a client goes by, where there is more than words


class AnthropicError(msgspec.Struct):
    error: AnthropicDetail
    type: str = "error"


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None, details: Mapping[str, Any] | None = None
) -> bytes:
    """As OpenAI's clients expect it."""
    told: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return _encode({"error": told | ({"details": details} if details else {})})


def anthropic_body(status: int, openai_body: bytes) -> bytes:
    """The same error, for Anthropic's clients."""
    error = msgspec.json.decode(openai_body)["error"]
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return _encode(AnthropicError(AnthropicDetail(kind, error["message"], error.get("details", UNSET))))


def is_anthropic(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Paths that OpenAI's and Anthropic's clients both ask are told apart by a header: only the latter send it, and always."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/") or any(name == VERSION for name, _ in headers)


def body_for(path: str, headers: Iterable[tuple[bytes, bytes]], status: int, openai_body: bytes) -> bytes:
    """An error that was written for OpenAI's clients, for whoever asks on `path` with these headers."""
    return anthropic_body(status, openai_body) if is_anthropic(path, headers) else openai_body

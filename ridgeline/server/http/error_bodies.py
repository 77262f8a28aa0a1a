"""Errors as clients expect them: OpenAI's shape, and Anthropic's on the paths of Anthropic's API.

Whoever refuses a request before an endpoint has it (the protocol, the gate, the guard of names, the routes) knows its path
and its headers: `body_for` picks the shape by those. Knows statuses and words; what went wrong is for others to say.
"""

from __future__ import annotations

import re
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


# Fields that have other names there than in chat; our messages begin with the name.
_ANTHROPIC_NAMES = {
    "stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "output_config.effort",
}  # fmt: skip
_RESPONSES_NAMES = {
    "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "logprobs": "top_logprobs",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
}  # fmt: skip
_NAME = re.compile(r"([a-z_]+)(?:\.json_schema)?")


def _renamed(message: str, names: Mapping[str, str]) -> tuple[str, str | None]:
    """(the message, the name that now stands in it)."""
    first = _NAME.match(message)
    name = names.get(first.group(1)) if first is not None else None
    return (message, None) if first is None or name is None else (name + message[first.end() :], name)


def responses_body(openai_body: bytes) -> bytes:
    """The same error, for clients of the Responses API."""
    told = msgspec.json.decode(openai_body)["error"]
    told["message"], name = _renamed(told["message"], _RESPONSES_NAMES)
    return openai_body if name is None else _encode({"error": told | {"param": name.partition(".")[0]}})


def anthropic_body(status: int, openai_body: bytes) -> bytes:
    """The same error, for Anthropic's clients."""
    told = msgspec.json.decode(openai_body)["error"]
    message, _ = _renamed(told["message"], _ANTHROPIC_NAMES)
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return _encode(AnthropicError(AnthropicDetail(kind, message, told.get("details", UNSET))))


def is_anthropic(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Paths that OpenAI's and Anthropic's clients both ask are told apart by a header: only the latter send it, and always."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/") or any(name == VERSION for name, _ in headers)


def body_for(path: str, headers: Iterable[tuple[bytes, bytes]], status: int, openai_body: bytes) -> bytes:
    """An error that was written for OpenAI's clients, for whoever asks on `path` with these headers."""
    return anthropic_body(status, openai_body) if is_anthropic(path, headers) else openai_body

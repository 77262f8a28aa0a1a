"""A client's request as it goes to a replica: which headers, and which two fields the router adds to the body."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.engine.replicas.routed_prompt import RoutedPrompt
from ridgeline.errors import BadRequest
from ridgeline.route.prompt_text import prompt_of
from ridgeline.server.http.body import json_fault
from ridgeline.server.http.gate import TTFT_HEADER, caller_of, request_id
from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.json_size import check_size

COUNTED_PATHS = ("/v1/chat/completions", "/v1/completions")      # whose streams the router understands
# Others of a client's headers stay here: cookies, forwarding headers, and the key, which is the router's.
_PASSED = frozenset({
    b"content-type", b"accept", b"user-agent", b"anthropic-version", b"anthropic-beta", b"traceparent", b"tracestate",
    b"x-ridgeline-timings", TTFT_HEADER,
})
_SALTED = (*COUNTED_PATHS, "/v1/embeddings", "/v1/score")       # Anthropic's API has no such field
_KEYS = frozenset({b"authorization", b"x-api-key"})
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    key_headers: list[tuple[bytes, bytes]]       # the client's, for replicas without a key of the router's
    body: bytes
    request_id: bytes
    prompt: RoutedPrompt
    is_counted: bool = False
    hide_usage: bool = False                     # the router asked for the usage, not the client
    is_exact: bool = False                       # sent again, it gives the same answer
    one_choice: bool = True
    has_deadline: bool = False                   # a replica may refuse it for its own deadline


def forwarded(scope: Scope, body: bytes, has_keys: bool) -> ForwardedRequest:
    """Raises BadRequest if a POST's body is not a JSON object."""
    given: list[tuple[bytes, bytes]] = scope["headers"]
    number = request_id(given) or secrets.token_hex(12).encode()
    headers = [each for each in given if each[0] in _PASSED]
    headers.append((b"x-request-id", number))
    keys = [] if has_keys else [each for each in given if each[0] in _KEYS]
    deadline = any(name == TTFT_HEADER for name, _ in given)
    path = scope["path"]
    if scope["method"] == "GET":
        return ForwardedRequest("GET", path, headers, keys, b"", number, RoutedPrompt(b"", 0, []))
    check_size(body)
    try:
        request = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {json_fault(error, body)[:200]}") from None
    if not isinstance(request, dict):
        raise BadRequest("the body must be a JSON object")
    counted = path in COUNTED_PATHS
    added, hide = _additions(request, caller_of(scope).cache_salt if path in _SALTED else "", counted)
    prompt = prompt_of(request, str(added.get("cache_salt", request.get("cache_salt") or "")))
    return ForwardedRequest(
        "POST", path, headers, keys, _with(body, request, added), number, prompt, counted, hide,
        counted and is_exact(request), has_one_choice(request), deadline,
    )


def is_exact(request: dict[str, Any]) -> bool:
    """Greedy or seeded, one answer, and nothing but its text."""
    temperature, seed = request.get("temperature"), request.get("seed")
    certain = (isinstance(temperature, int | float) and temperature == 0) or isinstance(seed, int)
    return certain and has_one_choice(request) and not request.get("logprobs") and not request.get("return_token_ids")


def has_one_choice(request: dict[str, Any]) -> bool:
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return (request.get("n") or 1) == 1 and not several


def _additions(request: dict[str, Any], salt: str, counted: bool) -> tuple[dict[str, Any], bool]:
    """Fields to add or replace, and whether the usage must be hidden from the client."""
    added: dict[str, Any] = {}
    if salt:                                             # keys of the router share no cache: a hit's speed reveals prompts
        own = request.get("cache_salt")
        added["cache_salt"] = f"{salt}:{own}" if isinstance(own, str) and own else salt
    options = request.get("stream_options")
    hide = False
    if counted and request.get("stream") is True and (options is None or isinstance(options, dict)):
        hide = not (options or {}).get("include_usage")
        if hide:
            added["stream_options"] = (options or {}) | {"include_usage": True}
    return added, hide


def _with(body: bytes, request: dict[str, Any], added: dict[str, Any]) -> bytes:
    """The body with these fields. New ones are appended, so that the rest keeps its bytes."""
    if not added:
        return body
    if not request or added.keys() & request.keys():
        return _encode(request | added)
    return body.rstrip()[:-1] + b"," + _encode(added)[1:]

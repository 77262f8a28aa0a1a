"""A client's request as it goes to a replica: which headers, and which two fields the router adds to the body."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.engine.replicas.routed_prompt import RoutedPrompt
from ridgeline.route.body_fields import fields_of, last_values, with_fields
from ridgeline.route.prompt_text import prompt_of
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
_ROUTED = frozenset({                                            # fields of a body that are read; all others are only passed on
    "cache_salt", "input", "logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "n", "prompt",
    "return_token_ids", "seed", "stream", "stream_options", "system", "temperature", "text_1", "tools",
})
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
    fields = fields_of(body)
    values = last_values(body, fields, _ROUTED)
    request = {name: _read(name, value) for name, value in values.items()}
    counted = path in COUNTED_PATHS
    added, hide = _additions(request, values, caller_of(scope).cache_salt if path in _SALTED else "", counted)
    prompt = prompt_of(request, str(request.get("cache_salt") or ""))
    return ForwardedRequest(
        "POST", path, headers, keys, with_fields(body, fields, added) if added else body, number, prompt, counted, hide,
        counted and is_exact(request), has_one_choice(request), deadline,
    )


def _read(name: str, value: bytes) -> Any:
    """A value that the router looks at. One that is no strict JSON, such as a text cut inside an emoji, goes on as it is: its
    bytes still tell a prompt from others."""
    try:
        return _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = value.decode("latin-1")
        return [text] if name == "messages" else text


def is_exact(request: dict[str, Any]) -> bool:
    """Greedy or seeded, one answer, and nothing but its text."""
    temperature, seed = request.get("temperature"), request.get("seed")
    certain = (isinstance(temperature, int | float) and temperature == 0) or isinstance(seed, int)
    return certain and has_one_choice(request) and not request.get("logprobs") and not request.get("return_token_ids")


def has_one_choice(request: dict[str, Any]) -> bool:
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return (request.get("n") or 1) == 1 and not several


def _additions(
    request: dict[str, Any], values: dict[str, bytes], salt: str, counted: bool
) -> tuple[dict[str, bytes], bool]:
    """Fields to add or replace, and whether the usage must be hidden from the client. The request gets its salt."""
    added: dict[str, bytes] = {}
    if salt:                                             # keys of the router share no cache: a hit's speed reveals prompts
        own = request.get("cache_salt")
        request["cache_salt"] = f"{salt}:{own}" if isinstance(own, str) and own else salt
        added["cache_salt"] = _encode(request["cache_salt"])
    options = request.get("stream_options")
    hide = False
    if counted and request.get("stream") is True and (options is None or isinstance(options, dict)):
        hide = not (options or {}).get("include_usage")
        if hide:
            asked = b"{}" if options is None else values["stream_options"]
            added["stream_options"] = with_fields(asked, fields_of(asked), {"include_usage": b"true"})
    return added, hide

"""A client's request as it goes to a replica: which headers, and which two fields the router adds to the body."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt
from ridgeline.route.body_facts import OPTIONS, SALT, BodyFacts
from ridgeline.route.body_fields import changed, changes
from ridgeline.server.http.gate import TTFT_HEADER, caller_of, request_id
from ridgeline.server.http.hosts import Scope

COUNTED_PATHS = ("/v1/chat/completions", "/v1/completions")      # whose streams the router understands
VIA = b"via"                         # the proxies that a request came through, each adds its name
# Others of a client's headers stay here: cookies, forwarding headers, and the key, which is the router's.
_PASSED = frozenset({
    b"content-type", b"accept", b"user-agent", b"anthropic-version", b"anthropic-beta", b"traceparent", b"tracestate",
    b"x-ridgeline-timings", TTFT_HEADER,
})
_SALTED = (*COUNTED_PATHS, "/v1/embeddings", "/v1/score")       # Anthropic's API has no such field
_NOT_COMPUTED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")        # a server answers without its engine
_KEYS = frozenset({b"authorization", b"x-api-key"})
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    key_headers: list[tuple[bytes, bytes]]       # the client's, for replicas without a key of the router's
    parts: list[bytes]                           # of the body
    request_id: bytes
    prompt: RoutedPrompt
    is_counted: bool = False
    is_computed: bool = False                    # by an engine
    hide_usage: bool = False                     # the router asked for the usage, not the client
    is_exact: bool = False                       # sent again, it gives the same answer
    one_choice: bool = True
    has_deadline: bool = False                   # a replica may refuse it for its own deadline


def forwarded(scope: Scope, parts: Sequence[bytes], facts: BodyFacts | None, has_keys: bool, router: bytes) -> ForwardedRequest:
    """`facts`: None if it has no body, and asks for none. `router`: this one's own name."""
    given: list[tuple[bytes, bytes]] = scope["headers"]
    number = request_id(given) or secrets.token_hex(12).encode()
    headers = _headers(given, number, router)
    keys = [] if has_keys else [each for each in given if each[0] in _KEYS]
    deadline = any(name == TTFT_HEADER for name, _ in given)
    path = scope["path"]
    if facts is None:
        return ForwardedRequest("GET", path, headers, keys, [], number, RoutedPrompt(b"", 0, []))
    counted, added = path in COUNTED_PATHS, dict[str, bytes]()
    salt = caller_of(scope).cache_salt if path in _SALTED else ""
    salt = f"{salt}:{facts.own_salt}" if salt and facts.own_salt else salt or facts.own_salt
    if salt != facts.own_salt:                           # keys of the router share no cache: a hit's speed reveals prompts
        added[SALT] = _encode(salt)
    hide = counted and bool(facts.with_usage)
    if hide:
        added[OPTIONS] = facts.with_usage
    body = changed(parts, changes(facts.places, added))
    if sum(map(len, body)) <= LONG_BYTES:
        body = [b"".join(body)]                          # one write
    return ForwardedRequest(
        "POST", path, headers, keys, body, number, facts.prompt.routed(salt), counted, path not in _NOT_COMPUTED, hide,
        counted and facts.is_exact, facts.one_choice, deadline,
    )


def _headers(given: list[tuple[bytes, bytes]], number: bytes, router: bytes) -> list[tuple[bytes, bytes]]:
    via = b", ".join([*(value for name, value in given if name == VIA), b"1.1 " + router])
    passed = [each for each in given if each[0] in _PASSED]
    return [*passed, (b"x-request-id", number), (VIA, via), (b"accept-encoding", b"identity")]

"""What applies to every request: request id, API key, CORS, deadlines, access log.

An ASGI application around another. It reads headers and paths, never bodies. It makes the request's Caller; endpoints add their
entries for the access log to `scope[LOG]`.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from io import FileIO
from typing import Any

import msgspec

from ridgeline.engine.client.request_context import LOCAL, MAX_TTFT_MS, Caller
from ridgeline.errors import ConfigError
from ridgeline.process.log import get_logger
from ridgeline.server.http.error_bodies import body_for, error_body, is_anthropic
from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.keys import Keys
from ridgeline.server.http.stream import DIRECT, Headers, Message, Receive, Send, send_json
from ridgeline.server.options import ServerOptions

logger = get_logger("server")

# For load balancers; and pages without data: the dashboard's data needs a key.
OPEN_PATHS = frozenset({
    "/", "/v1", "/v1/", "/docs", "/health", "/health/live", "/health/ready", "/ping", "/dashboard", "/dashboard/",
})
LOG = "ridgeline.log"                # in the scope: what the access log will say of this request
CALLER = "ridgeline.caller"          # in the scope: the request's Caller
TTFT_HEADER = b"x-ttft-deadline-ms"

_REQUEST_ID = re.compile(rb"[0-9A-Za-z._:-]{1,128}")
# A list of header names, as in a browser's preflight request.
_HEADER_NAMES = re.compile(rb"[0-9A-Za-z!#$%&'*+.^_`|~-]{1,64}(?:[ \t]*,[ \t]*[0-9A-Za-z!#$%&'*+.^_`|~-]{1,64}){0,63}")
_OWN_HEADERS = b"authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta, " + TTFT_HEADER
# Origins of web pages, desktop apps and browser extensions.
_ORIGIN = re.compile(
    r"\*|(?:https?|app|capacitor|ionic|tauri|vscode-webview|(?:chrome|moz|safari-web)-extension)://[0-9a-z._\-\[\]:]+"
)
_encode = msgspec.json.Encoder().encode


def caller_of(scope: Scope) -> Caller:
    """The Caller that the gate made of a request's headers; without a gate, one without key and deadlines."""
    caller: Caller = scope.get(CALLER, LOCAL)
    return caller


class Gate:
    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], options: ServerOptions, keys: Keys) -> None:
        self._app = app
        self._keys = keys
        self._timeout = options.request_timeout
        self._origins = _listed(options.allowed_origins)
        self._log = AccessLog(options.access_log) if options.access_log else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        answer = _Answer(send, request_id(headers), self._cors(headers), is_anthropic(scope["path"], headers))
        scope[LOG] = noted = dict[str, Any]()
        try:
            await self._pass(scope, headers, receive, answer.send)
        finally:
            if self._log is not None:
                self._log.write(scope, answer, noted)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if self._origins and scope["method"] == "OPTIONS" and _value(headers, b"access-control-request-method"):
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        salt, number = "", None
        # By the same path that the router uses, and no other form of it.
        if len(self._keys) and scope["path"] not in OPEN_PATHS:
            number = self._keys.number_of(headers)
            if number is None:
                # OpenAI's words: by them LiteLLM tells a wrong key from other errors of this type.
                message = "Incorrect API key provided, or none: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
                body = error_body(message, "invalid_request_error", code="invalid_api_key")
                await send_json(send, 401, body_for(scope["path"], headers, 401, body), [(b"www-authenticate", b"Bearer")])
                return
            scope[LOG]["key"] = number
            salt = self._keys.salt_of(number)
        deadline = _value(headers, TTFT_HEADER)
        seconds = None
        if deadline:
            seconds = _seconds(deadline)
            if seconds is None:
                message = f"{TTFT_HEADER.decode()} must be milliseconds, a number above 0 and at most {MAX_TTFT_MS:.0f}"
                body = error_body(message, "invalid_request_error", TTFT_HEADER.decode())
                await send_json(send, 400, body_for(scope["path"], headers, 400, body))
                return
        ends = time.monotonic() + self._timeout if self._timeout else None
        scope[CALLER] = Caller(ttft_deadline=seconds, ends=ends, cache_salt=salt, key=number or 0)
        await self._app(scope, receive, send)

    def _cors(self, headers: Headers) -> Headers:
        """Headers that let pages of allowed origins read the answer; never with cookies."""
        origin = _value(headers, b"origin").decode("latin-1")
        if not origin or not ("*" in self._origins or origin.lower() in self._origins):
            return []
        allowed = b"*" if "*" in self._origins else origin.encode("latin-1")
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", _headers_to_send(headers)),
            (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
            (b"access-control-max-age", b"600"),
            (b"vary", b"origin"),
        ]


class _Answer:
    """The answer's `send`: adds headers, and notes what the access log needs."""

    __slots__ = ("_headers", "_id_names", "_send", "began", "bytes_out", "first", "given_id", "request_id", "status")

    def __init__(self, send: Send, given_id: bytes, headers: Headers, anthropic: bool) -> None:
        self._send = send
        self._headers = headers
        self._id_names = (b"x-request-id", b"request-id")[: 1 + anthropic]   # Anthropic's clients read the second
        self.given_id = given_id
        self.request_id = given_id
        self.began = time.monotonic()
        self.first = 0.0                                 # seconds to the first byte
        self.status = 0
        self.bytes_out = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.first = time.monotonic() - self.began
            self.status = message["status"]
            headers = message["headers"]
            own = _value(headers, b"x-request-id")
            self.request_id = self.given_id or own or secrets.token_hex(12).encode()
            rest = [each for each in headers if each[0] != b"x-request-id"]
            ids = [(name, self.request_id) for name in self._id_names]
            message = {**message, "headers": [*rest, *ids, *self._headers]}
        else:
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)


class AccessLog:
    """A line of JSON for each request, answered or not. No bodies, no queries, no keys. A full disk must not fail requests: lines
    are lost until there is room, and the server's log says so, once at its begin and once at its end."""

    def __init__(self, place: str) -> None:
        self._file: FileIO | None = None                 # None: stderr
        self._lost = 0                                   # lines, since the last one that was written
        self._is_torn = False                            # the last line is in the file only in part
        if place != "-":
            try:
                self._file = FileIO(os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a")
            except OSError as error:
                raise ConfigError(f"access_log {place} cannot be written: {error.strerror}") from None

    def write(self, scope: Scope, answer: _Answer, noted: dict[str, Any]) -> None:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": answer.request_id.decode("latin-1"),
            "client": (scope.get("client") or [""])[0],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": answer.status,                     # 0: the client left before it
            "seconds": round(time.monotonic() - answer.began, 6),
            "first_byte_seconds": round(answer.first, 6),
            "bytes_out": answer.bytes_out + getattr(scope.get(DIRECT), "bytes_out", 0),
            **noted,
        }
        self._put(_encode(line) + b"\n")

    def _put(self, line: bytes) -> None:
        try:
            if self._file is None:
                sys.stderr.write(line.decode())
            elif (written := self._file.write(b"\n" * self._is_torn + line)) != len(line) + self._is_torn:
                self._is_torn |= bool(written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._lost:
                logger.warning("the access log cannot be written (%s); requests are answered without it", error.strerror)
            self._lost += 1
            return
        if self._lost:
            logger.warning("the access log is written again; %d lines are missing", self._lost)
        self._lost, self._is_torn = 0, False


def _value(headers: Headers, wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")


def _headers_to_send(headers: Headers) -> bytes:
    """The headers that pages may send: those they ask for. Clients have headers of their own, and only keys grant anything."""
    asked = _value(headers, b"access-control-request-headers").strip()
    return asked if _HEADER_NAMES.fullmatch(asked) else _OWN_HEADERS


def request_id(headers: Headers) -> bytes:
    """The client's id, if it is safe in a header and in a log."""
    given = _value(headers, b"x-request-id").strip(b" \t")       # the parser leaves blanks at the end, which are no part of it
    return given if _REQUEST_ID.fullmatch(given) else b""


def _seconds(milliseconds: bytes) -> float | None:
    try:
        value = float(milliseconds)
    except ValueError:
        return None
    return value / 1000 if math.isfinite(value) and 0 < value <= MAX_TTFT_MS else None


def _listed(origins: str) -> frozenset[str]:
    listed = [each.strip().lower().removesuffix("/") for each in origins.split(",") if each.strip()]
    for origin in listed:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"allowed_origins must list origins such as https://example.com, or *; got {origin!r}")
    return frozenset(listed)

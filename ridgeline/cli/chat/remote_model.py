"""A model behind an OpenAI-compatible server, ours or another one."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from ridgeline.bench.load.http_client import bearer
from ridgeline.cli.chat.talk import Message, Reply
from ridgeline.errors import ConfigError, RequestError

_SECONDS = 600.0                     # of silence
_MOST_LINE = 64 * 2**20              # bytes of an event, or of a list of models
_MOST_TOKENS = 2**31                 # a larger count is not believed
_KEYS = ("RIDGELINE_API_KEY", "OPENAI_API_KEY")


class RemoteModel:
    """`model` is the server's name for it; empty: the first that the server lists."""

    def __init__(self, url: str, model: str = "") -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:                               # half an IPv6 address, or a port that is none
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") or path.count("/") > 1 else f"{path}/v1"
        self._address = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.name = model or self._first_model()

    def describe(self) -> str:
        return f"{self.name} at {self._address}"

    def reply(self, messages: list[Message], settings: dict[str, Any], write: Callable[[str], None]) -> Reply:
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}} | settings
        asked = time.monotonic()
        chunks, tokens, first, last, finish = 0, 0, asked, asked, None
        for event in self._events(body):
            if "error" in event:
                raise RequestError(_message(event))
            tokens = _tokens(event) or tokens
            for text, reason in _choices(event):
                finish = reason or finish
                if text:
                    last = time.monotonic()
                    first = first if chunks else last
                    chunks += 1
                    write(text.encode(errors="replace").decode())        # half a surrogate pair cannot be printed
        return Reply(tokens or chunks, finish, first - asked, last - asked, settings.get("max_tokens"))

    def _first_model(self) -> str:
        connection, answer = self._ask("GET", "/models", None)
        try:
            listed = _json(answer.read(_MOST_LINE)).get("data") or []
            return str(listed[0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"no server answers at {self._address}: {_reason(error)}") from None
        except (ValueError, AttributeError, LookupError, TypeError):
            raise ConfigError(f"{self._address}/models lists no model; name it: ridgeline chat MODEL --url …") from None
        finally:
            connection.close()

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection, answer = self._ask("POST", "/chat/completions", body)
        try:
            for line in iter(lambda: answer.readline(_MOST_LINE), b""):
                if len(line) == _MOST_LINE:
                    raise ValueError(f"an event has {_MOST_LINE >> 20} MiB or more")
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = _json(data)
                if isinstance(event, dict):
                    yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"the answer broke off: {_reason(error)}") from None
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_SECONDS)
        key = next((os.environ[name].split(",")[0] for name in _KEYS if os.environ.get(name)), "")
        headers = {"Content-Type": "application/json"} | bearer(key)
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body).encode(), headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException, UnicodeError) as error:     # the last: no name of a host
            connection.close()
            raise ConfigError(f"no server answers at {self._address}: {_reason(error)}") from None
        if answer.status == 200:
            return connection, answer
        try:
            if answer.status in (401, 403):
                raise ConfigError(f"{self._address} needs an API key: set {_KEYS[0]}")
            raise RequestError(_message(_json(answer.read(65536))))
        except (OSError, http.client.HTTPException, ValueError):
            raise RequestError(f"{self._address}{path} answered with status {answer.status}") from None
        finally:
            connection.close()


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:                               # of the C code: the stack is free again
        raise ValueError("its JSON is too deep") from None


def _tokens(event: dict[str, Any]) -> int:
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int and 0 < count < _MOST_TOKENS else 0


def _choices(event: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(new text, finish reason) of each. Another server may send anything."""
    try:
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            yield thought + (delta.get("content") or ""), choice.get("finish_reason")
    except (AttributeError, TypeError):
        raise RequestError("the server sent an event that is no part of a chat") from None


def _message(said: Any) -> str:
    error = said.get("error", said) if isinstance(said, dict) else said
    return " ".join(str(error.get("message", error) if isinstance(error, dict) else error).split())[:500]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

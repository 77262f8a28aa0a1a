"""`--root-path`: the server below a prefix of a reverse proxy, whether the proxy takes the prefix off or not."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from ridgeline.errors import ConfigError
from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.stream import Receive, Send

_PREFIX = re.compile(r"(?:/[0-9A-Za-z._~-]+)+")


def plain_prefix(given: str) -> str:
    """The prefix without a slash at its end; empty for none."""
    prefix = given.strip().rstrip("/")
    if prefix and not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"root_path must be a path such as /llm, got {given!r}")
    return prefix


class RootPath:
    """An ASGI application around another, which never sees the prefix: keys and routes go by one form of a path."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], prefix: str) -> None:
        self._app = app
        self._prefix = plain_prefix(prefix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = self._prefix
        if prefix and (scope["path"] == prefix or scope["path"].startswith(f"{prefix}/")):
            scope["path"] = scope["path"][len(prefix) :] or "/"
        await self._app(scope, receive, send)

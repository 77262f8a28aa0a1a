"""Checks the Host header, against DNS rebinding.

A web page can point its own name at 127.0.0.1, so that the browser takes this server for a part of that page. The browser still
sends the page's name as Host. So an unknown Host is refused first of all. A server with API keys accepts any Host: no page has
a key. This is not authentication: clients other than browsers can send any Host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.server.http.error_bodies import body_for, error_body
from ridgeline.server.http.stream import Receive, Send, send_json
from ridgeline.server.options import ServerOptions

Scope = MutableMapping[str, Any]

ANY = "*"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::([0-9]{1,5}))?", re.ASCII)


class HostGuard:
    """An ASGI application around another."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], options: ServerOptions, has_keys: bool = False
    ) -> None:
        self._app = app
        listed = _listed(options.allowed_host)
        self._any = has_keys or ANY in listed
        self._known = {_plain(name) for name in (*_LOCAL, options.host, *listed)}
        # Listening on every address accepts every address as Host. A rebound name is a name, never an address.
        self._any_address = _plain(options.host) in ("0.0.0.0", "::")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        host = host_name(given[0]) if len(given) == 1 else None
        if host is None:
            message = "the request needs one Host header with the name or address of this server"
            body = error_body(message, "invalid_request_error")
            await send_json(send, 400, body_for(scope["path"], scope["headers"], 400, body))
        elif self._any or host in self._known or (self._any_address and _is_address(host)):
            await self._app(scope, receive, send)
        else:
            message = (
                f"this server does not answer to {host[:200]!r}; --allowed-host adds a name to it, and a server with an API key "
                "answers to all"
            )
            body = error_body(message, "invalid_request_error", code="unknown_host")
            await send_json(send, 421, body_for(scope["path"], scope["headers"], 421, body))


@lru_cache(maxsize=64)                                   # clients send the same few, and to read an address takes long
def host_name(header: bytes) -> str | None:
    """The name or address in a Host header, without its port; None when it holds something else."""
    match = _HOST.fullmatch(header.decode("latin-1").strip())
    if match is None or int(match[2] or 0) > 65535:
        return None
    name = _plain(match[1])
    return name if _is_address(name) or not match[1].startswith("[") else None


def _listed(names: str) -> list[str]:
    """The names of --allowed-host."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed:
        if name != ANY and host_name(f"[{name}]".encode() if ":" in name and not name.startswith("[") else name.encode()) is None:
            raise ConfigError(f"allowed_host must list host names or addresses, got {name!r}")
    return listed


def _plain(name: str) -> str:
    """One spelling for each host: lower case, no brackets, no dot at the end, addresses in their short form."""
    name = name.removeprefix("[").removesuffix("]").removesuffix(".").lower()
    return str(ipaddress.ip_address(name)) if _is_address(name) else name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

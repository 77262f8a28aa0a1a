"""Health checks: /health, /ping and their relatives, answered ahead of all routes.

Anyone may send them in any number. The application's middleware and the search through its routes would be more than half of
what one costs the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.routing import Route

from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.stream import Receive, Send, send_json, send_whole
from ridgeline.server.service import NOT_READY, Service

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LIVE = msgspec.json.encode({"status": "ok"})            # of this process; /health reports the engine
_LOOKS = ("GET", "HEAD")


class HealthChecks:
    """An ASGI application around another. The other has the same paths as routes: they say which methods there are."""

    def __init__(self, app: App, service: Service) -> None:
        self._app = app
        self._pages = _pages(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = self._pages.get(scope["path"]) if scope["method"] in _LOOKS else None
        await (page or self._app)(scope, receive, send)


def routes(service: Service) -> list[Route]:
    return [Route(path, _Page(page), methods=["GET", "POST"] if path == "/ping" else ["GET"])
            for path, page in _pages(service).items()]


class _Page:
    """An object: a function would be called with a request."""

    def __init__(self, page: App) -> None:
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._page(scope, receive, send)


def _pages(service: Service) -> dict[str, App]:
    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, *_health(service))

    async def live(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, _LIVE)

    async def ping(scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, 200 if service.state == "ok" else 503, [(b"content-length", b"0")], b"")

    return {"/health": health, "/health/ready": health, "/health/live": live, "/ping": ping}


def _health(service: Service) -> tuple[int, bytes]:
    llm = service.llm
    blocks = llm.ready.num_blocks if llm.ready else 0
    content: dict[str, Any] = {
        "status": service.state, "requests": llm.num_open, "running": llm.running, "free_blocks": llm.free_blocks,
        "num_blocks": blocks,
    }
    if len(llm.engines) > 1:
        content["engines"] = [each.state for each in llm.engines]
    if service.state != "ok":                            # the error as llama.cpp has it
        content["error"] = {"code": 503, "message": NOT_READY[service.state], "type": "unavailable_error"}
    return 200 if service.state == "ok" else 503, msgspec.json.encode(content)

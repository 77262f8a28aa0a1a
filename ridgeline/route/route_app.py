"""The router's paths, as one ASGI application: what goes to a replica, and the few pages of its own.

Paths that are not listed do not exist here. Answers that a replica stores (/v1/responses) would be lost at the next request.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import RedirectResponse

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.errors import TimedOut, TryAgain
from ridgeline.route.body_facts import read_facts
from ridgeline.route.delivery import AnswerCut, Delivery
from ridgeline.route.fleet import Fleet
from ridgeline.route.forwarded_request import VIA, forwarded
from ridgeline.route.replica_pages import fleet_reply
from ridgeline.server.endpoints import check_media_type
from ridgeline.server.http.admission import Body
from ridgeline.server.http.error_bodies import body_for, error_body
from ridgeline.server.http.failures import describe
from ridgeline.server.http.gate import LOG, caller_of
from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.near_paths import suggestion
from ridgeline.server.http.stream import (
    DIRECT,
    ClientGone,
    Headers,
    Receive,
    Send,
    in_time,
    send_json,
    send_whole,
    while_connected,
)
from ridgeline.server.long_bodies import BodyReader, FewPerTurn
from ridgeline.server.observe.dashboard import fleet_page
from ridgeline.server.observe.prometheus import TEXT
from ridgeline.version import __version__

FORWARDED = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score",
    "/v1/rerank", "/tokenize", "/detokenize",
})
MODELS = "/v1/models"
NODES_PER_TURN = 2_000               # of prompts for which a replica is chosen: each is looked up and noted, in 2 microseconds
_TIMEOUT = "the request took longer than request_timeout allows"
_STOPPING = "this router is stopping; try again elsewhere"
# What a stream ends with; the status is what the answer would have had before its beginning.
_LATE = 504, _TIMEOUT, "timeout_error", "request_timeout"
_STOPPED = 503, "this router stopped before the answer was complete", "service_unavailable_error", "try_again"


class RouteApp:
    def __init__(self, fleet: Fleet, has_keys: bool, reader: BodyReader | None = None) -> None:
        self._fleet = fleet
        self._has_keys = has_keys
        self._reader = reader or BodyReader()
        self._turns = FewPerTurn(NODES_PER_TURN)
        self._name = f"ridgeline-{secrets.token_hex(8)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        # Above /v1/models a replica has pages that are not for clients.
        is_models = path == MODELS or (path.startswith(MODELS + "/") and not {".", ".."} & set(path.split("/")))
        methods = ("POST",) if path in FORWARDED else _METHODS if is_models else _OWN.get(path)
        if methods is None:
            near = suggestion(path, _KNOWN) if path not in _NOT_FORWARDED else ""
            message = f"{method} {path[:200]} does not exist here; {near or 'docs/router.md lists what a router forwards'}"
            await _refuse(scope, send, 404, message, "not_found")
        elif method not in methods:
            works = f"{' and '.join(methods)} {'works' if len(methods) == 1 else 'work'}"
            allowed = [(b"allow", ", ".join(methods).encode())]
            await _refuse(scope, send, 405, f"{path[:200]} does not take {method}; {works}", "method_not_allowed", allowed)
        elif path in FORWARDED or is_models:
            await self._forward(scope, receive, send)
        else:
            await self._show(path, scope, receive, send)

    async def _show(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """A page of the router's own."""
        if path == "/fleet":
            await send_json(send, 200, msgspec.json.encode(await fleet_reply(self._fleet)))
        elif path == "/dashboard":
            await fleet_page()(scope, receive, send)
        elif path in _INDEX:
            await _index(scope, receive, send)
        elif path == "/metrics":
            body = self._fleet.metrics().encode()
            headers = [(b"content-type", TEXT.encode()), (b"content-length", str(len(body)).encode())]
            await send_whole(send, 200, headers, body)
        else:
            status, content = _PAGES[path](self._fleet)
            await send_json(send, status, msgspec.json.encode(content))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == VIA and self._name in value for name, value in scope["headers"]):
            # Each of its rounds would take a connection and a place, until none is left.
            known = "this request was here before: the address of a replica leads back to this router"
            return await _refuse(scope, send, 508, known, "loop")
        fleet, body, deliveries = self._fleet, Body(self._fleet.bodies), list[Delivery]()
        try:
            if fleet.stopping:
                raise TryAgain(_STOPPING, 1.0)
            fleet.slots.check_free()
            if scope["method"] == "POST":
                check_media_type(scope)                  # a foreign page's form must not reach a replica
            async with in_time(caller_of(scope).ends):
                await body.read(receive, scope["headers"], scope.get(DIRECT))
            with fleet.slots.taking(1):                  # a body that does not come holds none
                await while_connected(receive, self._deliver(scope, body, send, deliveries))
        except (ClientGone, AnswerCut):
            pass
        except Exception as error:
            if deliveries and deliveries[0].started:
                raise                                    # the connection ends, so that the client does not take it for whole
            status, says, headers = describe(error)
            await send_json(send, status, body_for(scope["path"], scope["headers"], status, says), headers)
        finally:
            body.release()                               # not before: it may be sent to another replica

    async def _deliver(self, scope: Scope, body: Body, send: Send, deliveries: list[Delivery]) -> None:
        """`deliveries` gets the one that is made."""
        caller, facts = caller_of(scope), None
        async with in_time(caller.ends):
            if scope["method"] == "POST":
                facts = await self._reader.read(read_facts, None, caller, body)
            hashed = len(facts.prompt.text) if facts is not None else 0
            request = await away_if_long(hashed, lambda: forwarded(scope, body.parts, facts, self._has_keys, self._name))
            await self._turns.turn(len(request.prompt.chain))
        body.parts = request.parts                       # one copy, in case that it is sent again
        deliveries.append(Delivery(self._fleet, request, scope["headers"], send))
        await self._within(scope, deliveries[0])

    async def _within(self, scope: Scope, delivery: Delivery) -> None:
        """The whole delivery, inside its deadline."""
        fleet, ends = self._fleet, caller_of(scope).ends
        limit = asyncio.timeout(None if ends is None else max(0.0, ends - time.monotonic()))
        try:
            async with limit:
                fleet.deadlines.add(limit)
                await delivery.run()
        except TimeoutError:
            if not delivery.started:
                raise (TryAgain(_STOPPING, 1.0) if fleet.has_ended else TimedOut(_TIMEOUT)) from None
            status, *error = _STOPPED if fleet.has_ended else _LATE
            await delivery.end_with_error(status, *error)
        finally:
            fleet.deadlines.discard(limit)
            scope.get(LOG, {})["replica"] = delivery.replica


async def _refuse(scope: Scope, send: Send, status: int, message: str, code: str, headers: Headers | None = None) -> None:
    body = error_body(message, "invalid_request_error", code=code)
    await send_json(send, status, body_for(scope["path"], scope["headers"], status, body), headers or ())


def _health(fleet: Fleet) -> tuple[int, Mapping[str, Any]]:
    up = sum(each.up for each in fleet.replicas)
    counts = {"replicas": len(fleet.replicas), "up": up, "requests": fleet.slots.taken}
    return (200 if fleet.state == "ok" else 503), {"status": fleet.state, **counts}


async def _index(scope: Scope, receive: Receive, send: Send) -> None:
    """A person's browser is led to the dashboard; a program is told what there is."""
    if any(name == b"accept" and b"text/html" in value for name, value in scope["headers"]):
        await RedirectResponse("/dashboard", 307)(scope, receive, send)
    else:
        about = {"name": "Ridgeline router", "version": __version__, "openai_base_url": "/v1", "dashboard": "/dashboard"}
        await send_json(send, 200, msgspec.json.encode(about))


_INDEX = ("/", "/v1", "/v1/", "/dashboard/")
_METHODS = ("GET", "HEAD")           # whose answer is that of GET: the protocol leaves its body out
_NOT_FORWARDED = ("/v1/responses", "/v1/chat/completions/batch", "/invocations")     # of servers, and no spelling mistakes
_PAGES = {
    "/health": _health,
    "/health/ready": _health,
    "/ping": _health,
    "/health/live": lambda fleet: (200, {"status": "ok"}),
    "/version": lambda fleet: (200, {"version": __version__}),
    "/replicas": lambda fleet: (200, {"policy": fleet.options.policy, "replicas": fleet.described()}),
}
_OWN = dict.fromkeys((*_PAGES, "/metrics", "/fleet", "/dashboard", *_INDEX), _METHODS) | {"/ping": (*_METHODS, "POST")}
_KNOWN = frozenset({*FORWARDED, MODELS, *_OWN})

"""Earlier responses: how a conversation goes on from one, and `/v1/responses/{id}`, where they are fetched, listed and deleted.

How they are kept is server/response_store's to know, what they are server/responses'.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.engine.caller import CALLER
from ridgeline.errors import BadRequest, Unsupported
from ridgeline.server.response_store import ResponseStore, Stored
from ridgeline.server.responses_request import KNOWN_INCLUDES, InputItem, ResponsesRequest
from ridgeline.server.service import NotStored, PreviousNotStored, Service

MOST_ITEMS = 100                     # of an input in one answer


class Continued:
    """A request of the Responses API behind the conversation that it goes on from."""

    def __init__(self, asked: ResponsesRequest, store: ResponseStore, key: int) -> None:
        self.asked = asked
        self._store = store
        self._key = key
        self._given = self._before = b"[]"
        self._earlier: list[InputItem] = []
        if asked.previous_response_id is not None:
            self._before = self._recalled(asked.previous_response_id)
            self._earlier = msgspec.json.decode(self._before, type=list[InputItem])
        self.keep: Callable[[str, bytes], None] | None = None
        if store.is_on and asked.store is not False:
            self._given = msgspec.json.encode(with_ids(asked.items()))
            self.keep = self._kept

    def chat(self) -> dict[str, Any]:
        return self.asked.chat(self._earlier)

    def _recalled(self, name: str) -> bytes:
        """The items of a conversation up to the end of an earlier response."""
        if not self._store.is_on:
            raise Unsupported("previous_response_id: no response is stored here; send the whole conversation as input")
        entry = self._store.get(name, self._key)
        if entry is None:
            raise PreviousNotStored(
                f"previous_response_id: there is no response {name[:100]!r} here, or no longer; send the whole conversation"
            )
        output = msgspec.json.decode(entry.response)["output"]
        for part in (part for item in output for part in item.get("content") or []):
            part.pop("logprobs", None)                   # which no prompt has
        parts = (entry.before, entry.input, msgspec.json.encode(output))
        return b"[" + b",".join(part[1:-1] for part in parts if part != b"[]") + b"]"

    def _kept(self, name: str, response: bytes) -> None:
        self._store.put(name, self._key, response, self._given, self._before)


class DeletedResponse(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def found(service: Service, name: str) -> Stored:
    entry = service.stored.get(name, CALLER.get().key)
    if entry is None:
        raise NotStored(f"there is no response {name[:100]!r} here: it has expired, was deleted, or was never stored")
    return entry


def routes(service: Service) -> list[Route]:
    async def one(request: Request) -> Response:
        name = request.path_params["id"]
        if request.method == "DELETE":
            found(service, name)
            service.stored.delete(name, CALLER.get().key)
            return _json(msgspec.json.encode(DeletedResponse(name)))
        check_query(request, "include")
        return _json(found(service, name).response)

    async def items(request: Request) -> Response:
        check_query(request, "include", "limit", "order", "after")
        listed = msgspec.json.decode(found(service, request.path_params["id"]).input)
        return _json(msgspec.json.encode(page(listed, dict(request.query_params))))

    return [
        Route("/v1/responses/{id}", one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", items),
    ]


def check_query(request: Request, *known: str) -> None:
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name == "include" and value not in KNOWN_INCLUDES:
            raise Unsupported(f"include: {value[:60]!r} is not supported by this server")
        if name in ("stream", "include_obfuscation") and value.lower() in ("false", "0"):
            continue
        if name not in known:
            raise Unsupported(f"{name[:60]} is not supported by this server; leave it out")


def page(items: list[dict[str, Any]], query: dict[str, str]) -> InputItems:
    """The newest first, unless `order` is asc; at most `limit` of them, behind the one called `after`."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order must be asc or desc; got {order[:20]!r}")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST_ITEMS:
        raise BadRequest(f"limit must be between 1 and {MOST_ITEMS}; got {limit[:20]!r}")
    listed = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise BadRequest(f"after: this input has no item {after[:100]!r}")
        listed = listed[places[0] + 1 :]
    shown = listed[: int(limit)]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return InputItems(shown, first, last, has_more=len(listed) > len(shown))


def with_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every item has a name of its own; clients seldom give one."""
    return [{**item, "id": item.get("id") or f"{_PREFIX.get(item['type'], 'item')}_{secrets.token_hex(12)}"} for item in items]


_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")

"""Stored responses: how a conversation continues from one, and `/v1/responses/{id}` to fetch, list and delete them.

server/api/openai/responses_store keeps them; server/api/openai/responses_answer writes them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.server.api.openai.responses_request import KNOWN_INCLUDES, InputItem, ResponsesRequest
from ridgeline.server.api.openai.responses_store import ResponseStore, Stored
from ridgeline.server.http.gate import caller_of
from ridgeline.server.http.stream import JsonText
from ridgeline.server.server_errors import ItemNotStored, NotStored, PreviousNotStored
from ridgeline.server.service import Service

MOST_ITEMS = 100                     # per page


class Output(msgspec.Struct):
    """The part of a stored response that a prompt uses."""

    output: list[dict[str, Any]]
    status: str = "completed"


class Kept(msgspec.Struct):
    """What is stored with a response: not the request, only its items."""

    key: int                         # the number of its API key
    given: bytes                     # the input's items …
    before: bytes                    # … and those of the conversation before them
    ids: list[str]                   # of the input's items
    again: bool = False              # it runs in the background: it is stored before its end, too


@dataclass(slots=True)
class Keeper:
    """Stores one response when it is complete. A thread may write its end while its client cancels it: the first end stays."""

    store: ResponseStore
    kept: Kept
    is_stored: bool = False
    has_ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, name: str, response: bytes, output: list[dict[str, Any]], runs: bool) -> bool:
        kept = self.kept
        with self.lock:
            if self.has_ended:
                return False
            self.has_ended = not runs
            store = self.store.replace if self.is_stored else self.store.put     # not if it was deleted before its end
            self.is_stored = kept.again
            ids = [*kept.ids, *(item["id"] for item in output)]
            return store(name, kept.key, response, kept.given, kept.before, ids, runs)


class Continued:
    """A request of the Responses API with the conversation that it continues, and with its item references resolved."""

    def __init__(self, asked: ResponsesRequest, store: ResponseStore, key: int) -> None:
        self.asked = asked
        self._store = store
        self._key = key
        self._before = b"[]"
        self._earlier: list[InputItem] = []
        self.kept: Kept | None = None
        if asked.previous_response_id is not None:
            self._before = self._recalled(asked.previous_response_id)
            self._earlier = msgspec.json.decode(self._before, type=list[InputItem])
        if isinstance(asked.input, list):
            asked.input = self._resolved(asked.input)

    def chat(self) -> dict[str, Any]:
        chat = self.asked.chat(self._earlier)
        if self._store.is_on and self.asked.store is not False:
            items = [kept_item(item) for item in self.asked.items() if in_prompt(item)]  # valid: they have become messages
            given = msgspec.json.encode(items)
            if self._store.could_keep(len(given) + len(self._before)):
                ids, again = [item["id"] for item in items], bool(self.asked.background)
                self.kept = Kept(self._key, given, self._before, ids, again)
        return chat

    def _recalled(self, name: str) -> bytes:
        """The items of a conversation up to the end of an earlier response."""
        if not self._store.is_on:
            message = "previous_response_id: this server stores no responses; send the whole conversation as input"
            raise Unsupported(message, field="previous_response_id")
        entry = self._store.get(name, self._key)
        if entry is None:
            raise PreviousNotStored(
                f"previous_response_id: no response {shown(name)} is stored here, or no longer; send the whole conversation",
                field="previous_response_id",
            )
        parts = (entry.before, entry.input, msgspec.json.encode(_output(entry)))
        return b"[" + b",".join(part[1:-1] for part in parts if part != b"[]") + b"]"

    def _resolved(self, items: list[InputItem]) -> list[InputItem]:
        """The items, with references replaced by their items. Each may be named once: a short body must not become endless."""
        known: dict[str, dict[str, Any]] = {}            # by id, the items of every response read so far
        seen: set[str] = set()
        made = []
        for place, item in enumerate(items):
            if not item.refers:
                made.append(item)
                continue
            item.require(f"input[{place}]", "id")
            if any(getattr(item, name) is not None for name in _BESIDE):
                message = f"input[{place}] is an item_reference, which may have an id and nothing else"
                raise BadRequest(message, field=f"input[{place}]")
            name = item.id or ""
            if name in seen:
                message = f"input[{place}].id {shown(name)} is named twice; name each item once"
                raise BadRequest(message, field=f"input[{place}].id")
            seen.add(name)
            if name not in known:
                entry = self._holding(name)
                if entry is None:
                    raise ItemNotStored(
                        f"input[{place}]: Item with id {shown(name)} not found: its response has expired, was deleted or was "
                        "not stored (store: false); send the item itself",
                        field=f"input[{place}]",
                    )
                known |= {each["id"]: each for each in (*msgspec.json.decode(entry.input), *_output(entry))}
            made.append(msgspec.convert(known[name], InputItem))
        return made

    def _holding(self, item: str) -> Stored | None:
        name = self._store.with_item(item, self._key)
        return None if name is None else self._store.get(name, self._key)


_BESIDE = ("role", "content", "call_id", "name", "namespace", "arguments", "output", "summary", "encrypted_content")


def recalled_bytes(asked: ResponsesRequest, store: ResponseStore, key: int) -> int:
    """The bytes of stored responses that this request refers to. NeedsStored if another process has them, or should read them."""
    items = asked.input if isinstance(asked.input, list) else []
    return store.size_of(asked.previous_response_id, [item.id for item in items if item.refers and item.id is not None], key)


def _output(entry: Stored) -> list[dict[str, Any]]:
    stored = msgspec.json.decode(entry.response, type=Output)
    if stored.status in ("queued", "in_progress"):
        raise BadRequest(f"the response is still {stored.status}: wait for its end, or cancel it", field="previous_response_id")
    output = stored.output
    for part in (part for item in output for part in item.get("content") or []):
        part.pop("logprobs", None)                       # not part of prompts
    return output


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


def found(service: Service, name: str, key: int) -> Stored:
    entry = service.stored.get(name, key)
    if entry is None:
        raise NotStored(f"Response with id {shown(name)} not found. It has expired, was deleted, or was never stored")
    return entry


def routes(service: Service, stop: Callable[[str], Awaitable[bool]]) -> list[Route]:
    """`stop`: ends the work on a response that runs in the background."""
    async def one(request: Request) -> Response:
        name, key = request.path_params["id"], caller_of(request.scope).key
        if request.method == "DELETE":
            check_query(request)
            found(service, name, key)
            await stop(name)                             # no client could fetch or cancel it any more
            service.stored.delete(name, key)
            return JsonText(msgspec.json.encode(DeletedResponse(name)))
        check_query(request, "include")
        return JsonText(found(service, name, key).response)

    async def items(request: Request) -> Response:
        check_query(request, "include", "limit", "order", "after")
        given = found(service, request.path_params["id"], caller_of(request.scope).key).input
        query = dict(request.query_params)

        def listed() -> bytes:
            return msgspec.json.encode(page(msgspec.json.decode(given), query))

        return JsonText(await away_if_long(len(given), listed))

    return [
        Route("/v1/responses/{id}", one, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", items),
    ]


_NAMES = frozenset({*ResponsesRequest.__struct_fields__, "limit", "order", "after"})     # that `error.param` may have


def check_query(request: Request, *known: str) -> None:
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name == "include" and value not in KNOWN_INCLUDES:
            raise Unsupported(f"include: {shown(value)} is not supported by this server", field="include")
        if known and name in ("stream", "include_obfuscation") and value.lower() in ("false", "0"):
            continue
        if name not in known:
            field = name if name in _NAMES else ""
            raise Unsupported(f"{name[:60]} is not supported by this server; leave it out", field=field)


def page(items: list[dict[str, Any]], query: dict[str, str]) -> InputItems:
    """The newest first, unless `order` is asc; at most `limit` of them, after the item with the id `after`."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order must be asc or desc; got {shown(order)}", field="order")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= MOST_ITEMS:
        raise BadRequest(f"limit must be between 1 and {MOST_ITEMS}; got {shown(limit)}", field="limit")
    listed = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise BadRequest(f"after: this input has no item {shown(after)}", field="after")
        listed = listed[places[0] + 1 :]
    listing = listed[: int(limit)]
    first, last = (listing[0]["id"], listing[-1]["id"]) if listing else (None, None)
    return InputItems(listing, first, last, has_more=len(listed) > len(listing))


def in_prompt(item: dict[str, Any]) -> bool:
    """False for reasoning without its text (summaries, encrypted): a prompt cannot use it."""
    return item["type"] != "reasoning" or bool(item.get("content"))


def kept_item(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is listed: with an id, which clients seldom send, and its content as parts. What prompts do not use is not
    stored: summaries and encrypted forms of reasoning, annotations."""
    kind = item["type"]
    made = {name: value for name, value in item.items() if name in _KEPT}
    made["id"] = item.get("id") or f"{_PREFIX.get(kind, 'item')}_{secrets.token_hex(12)}"
    if kind == "reasoning":
        made["summary"] = []
    if kind != "message" or item.get("role") == "assistant":
        made["status"] = item["status"] if item.get("status") in ("in_progress", "incomplete") else "completed"
    if item.get("content") is not None:
        part = "reasoning_text" if kind == "reasoning" else "output_text" if item.get("role") == "assistant" else "input_text"
        made["content"] = _parts(item["content"], part)
    if isinstance(item.get("output"), list):
        made["output"] = _parts(item["output"], "input_text")
    return made


def _parts(content: str | list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    more = {"annotations": list[Any]()} if kind == "output_text" else {}
    return [{"type": kind, "text": text} | more for text in texts]


_KEPT = ("type", "role", "call_id", "name", "namespace", "arguments", "output")
_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

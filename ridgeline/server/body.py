"""A JSON body as a struct, or one line that names the field and what it should hold; long ones away from the event loop.

Knows msgspec's words, no endpoint.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec

from ridgeline.errors import BadRequest

MAX_MESSAGE = 500                    # characters
LONG_BODY = 64 * 1024                # bytes; what is longer is parsed and checked away from the event loop

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]{0,200})`")
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")


class Checked(Protocol):
    def check(self) -> None:
        """Refuse what the types alone let through."""


T = TypeVar("T", bound=Checked)
Made = TypeVar("Made")


async def away_if_long(num_bytes: int, work: Callable[[], Made]) -> Made:
    """Do `work`, which reads so many bytes; many of them away from the event loop."""
    return await asyncio.to_thread(work) if num_bytes > LONG_BODY else work()


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse_body(kind: type[T], body: bytes) -> T:
    """The request, checked; BadRequest or Unsupported in words that name the field."""
    try:
        request: T = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(readable(str(error), kind)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    request.check()
    return request


def readable(message: str, kind: Any) -> str:
    """msgspec's words, with the field first: `temperature: expected ..., got ...`. They may quote as much as was sent."""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …"
    place = _PLACE.search(message)
    where = place.group(1) if place else ""
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        name = unknown.group(1)
        close = difflib.get_close_matches(name, kind.__struct_fields__, 1) if not where else []
        inside = f" in {where}" if where else ""
        return f"unknown field {name!r}{inside}" + (f"; did you mean {close[0]!r}?" if close else "")
    words = _PLACE.sub("", message).replace("`", "").replace("Object missing", "missing")
    return f"{where}: {words[0].lower()}{words[1:]}" if where else words

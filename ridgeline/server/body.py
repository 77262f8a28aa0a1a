"""A JSON body as a struct, or one line that names the field and what it should hold; long ones away from the event loop.

Knows msgspec's words, no endpoint.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from ridgeline.errors import BadRequest

MAX_MESSAGE = 500                    # characters
LONG_BODY = 64 * 1024                # bytes; what is longer is parsed and checked away from the event loop

EXACT = 2**53                        # whole numbers up to here are the same as floats

_FLOAT_FOR_INT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
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
        request = _with_whole_numbers(kind, body, error)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    request.check()
    return request


def _with_whole_numbers(kind: type[T], body: bytes, error: msgspec.ValidationError) -> T:
    """JSON has one kind of number, and some clients write 16 as 16.0. Only of fields themselves: what is further inside may be
    as large as a body."""
    if _FLOAT_FOR_INT.match(str(error)):
        try:
            plain = msgspec.json.decode(body)
            return msgspec.convert({name: _whole(value) for name, value in plain.items()}, kind)
        except msgspec.ValidationError as second:
            error = second
    raise BadRequest(readable(str(error), kind)) from None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT else value


def _choices(kind: Any, field: str) -> str:
    """What may stand in a field that has a few words to choose from."""
    found = _words(get_type_hints(kind).get(field))
    return f"; one of {', '.join(found)} works" if found else ""


def _words(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    return [word for each in get_args(hint) for word in _words(each)]


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
    if "nvalid enum value" in words and where in kind.__struct_fields__:
        words += _choices(kind, where)
    return f"{where}: {words[0].lower()}{words[1:]}" if where else words

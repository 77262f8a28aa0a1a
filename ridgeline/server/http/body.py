"""Parses a JSON body into a struct; errors name the field and what it should hold.

Knows msgspec's messages, no endpoints. Long bodies are parsed in a thread, by engine/client/long_work.away_if_long.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec.inspect import DictType, FloatType, IntType, ListType, NoneType, StructType, Type, UnionType, type_info

from ridgeline.engine.client.long_work import LONG_BYTES, away_if_long, checkpoint, is_away
from ridgeline.errors import BadRequest, UnknownField
from ridgeline.server.http.json_size import check_size

MAX_MESSAGE = 500                    # characters
# Fields that say which endpoint was meant; their nearest spelling here would mislead.
MEANT_FOR = {
    "messages": "/v1/chat/completions takes it",
    "prompt": "/v1/completions takes it",
    "input": "/v1/responses and /v1/embeddings take it",
}
EXACT = 2**53                        # integers up to here are exact as floats

_DECODING = threading.Lock()         # one long body at a time: a decoder keeps Python's lock, and the event loop waits for each

_FLOAT_FOR_INT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]{0,200})`")
_MISSING_FIELD = re.compile(r"Object missing required field `([^`]*)`")
_HIGH_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")


class Checked(Protocol):
    def check(self) -> None:
        """Refuse what the types alone cannot."""


T = TypeVar("T", bound=Checked)


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse_body(kind: type[T], body: bytes, strict: bool = False) -> T:
    """The request, checked. BadRequest or Unsupported name the field. Unless `strict`, unknown fields are dropped inside the
    fields that the type lists as TOLERANT: clients add notes of their own to messages."""
    if len(body) > LONG_BYTES:
        check_size(body)
        checkpoint()
    with _DECODING if len(body) > LONG_BYTES and is_away() else nullcontext():       # the event loop never waits for a thread
        request = _decoded(kind, body, strict)
    request.check()
    return request


def _decoded(kind: type[T], body: bytes, strict: bool) -> T:
    try:
        try:
            request: T = _decoder(kind).decode(body)
        except msgspec.ValidationError as error:
            if not _FLOAT_FOR_INT.match(str(error)) and not _UNKNOWN_FIELD.search(str(error)):
                raise
            # Parse all of it again: the rest after the float may be invalid JSON.
            tolerant = () if strict else getattr(kind, "TOLERANT", ())
            mended = _without_nulls(_mend(kind)(msgspec.json.decode(body)), _type(kind), tolerant)
            request = msgspec.convert(mended, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise refusal(str(error), kind) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {json_fault(error, body)}") from None
    return request


def json_fault(error: Exception, body: bytes) -> str:
    """What is wrong with it. Clients in JavaScript cut texts inside an emoji; at the end the decoder calls that truncated."""
    said = str(error)
    if "surrogate" in said or (said == "Input data was truncated" and body.rstrip().endswith(b"}") and _HIGH_HALF.search(body)):
        return "a text has half of a character, such as \\ud83d without its other half: it was cut inside an emoji or the like"
    return said


async def field_names(service: object, caller: object, body: bytes) -> list[str]:
    """The names of a body's own fields."""
    def work() -> list[str]:
        if len(body) > LONG_BYTES:
            check_size(body)
        try:
            return list(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is not a JSON object: {json_fault(error, body)}") from None

    return await away_if_long(len(body), work)


@cache
def _type(kind: Any) -> Type:
    return type_info(kind)


def _without_nulls(value: Any, kind: Type, tolerant: Collection[str] = (), drop: bool = False) -> Any:
    """A null counts as a missing field, so unknown fields that are null are dropped. Data without a struct keeps its nulls.

    `drop`: all unknown fields are dropped; so they are below fields named in `tolerant`."""
    kinds = _kinds(kind)
    if isinstance(value, list):
        item = _item(kinds)
        return value if item is None else [_without_nulls(each, item, tolerant, drop) for each in value]
    structs = [each for each in kinds if isinstance(each, StructType)]
    if not isinstance(value, dict) or not structs:
        return value
    known = {field.encode_name: field.type for each in structs for field in each.fields}
    known |= {each.tag_field: NoneType() for each in structs if each.tag_field}
    return {
        name: _without_nulls(each, known[name], (), drop or name in tolerant) if name in known else each
        for name, each in value.items() if name in known or (each is not None and not drop)
    }


def _item(kinds: tuple[Type, ...]) -> Type | None:
    """The type of a list's items, if one of the types is a list with structs in it: other lists may have millions of items."""
    items = [each.item_type for each in kinds if isinstance(each, ListType)]
    return next((item for item in items if _item(_kinds(item)) or {*map(type, _kinds(item))} & {StructType}), None)


# JSON has one kind of number, and some clients write 16 as 16.0. The function that turns it into 16 is made once per type of
# body, and is None for types without integers: most of a body is never visited, and a 1.0 inside a client's JSON schema stays.
Mend = Callable[[Any], Any]


@cache
def _mend(kind: type[Any]) -> Mend:
    return _mend_of(type_info(kind), ()) or (lambda value: value)


def _mend_of(kind: Type, around: tuple[type[Any], ...]) -> Mend | None:
    """`around`: the structs that this type is inside of. Recursive ones (blocks of a message) are visited once."""
    kinds = _kinds(kind)
    integer = _is_integer(kind)
    item = next((each.item_type for each in kinds if isinstance(each, ListType)), None)
    items = item and _mend_of(item, around)
    integers = item is not None and _is_integer(item)
    values = next((_mend_of(each.value_type, around) for each in kinds if isinstance(each, DictType)), None)
    # Tagged unions are merged: no name is an integer in one struct and something else in another.
    structs = [each for each in kinds if isinstance(each, StructType) and each.cls not in around]
    fields = [(field.encode_name, _mend_of(field.type, (*around, each.cls))) for each in structs for field in each.fields]
    named = {name: mend for name, mend in fields if mend is not None}
    if not (integer or items or values or named):
        return None

    def mend(value: Any) -> Any:
        if isinstance(value, float):
            return int(value) if integer and value.is_integer() and abs(value) < EXACT else value
        if isinstance(value, list) and items:
            return (integers and _whole(value)) or list(map(items, value))
        if isinstance(value, dict) and (values or named):
            return {name: its(each) if (its := named.get(name, values)) else each for name, each in value.items()}
        return value

    return mend


def _kinds(kind: Type) -> tuple[Type, ...]:
    return kind.types if isinstance(kind, UnionType) else (kind,)


def _is_integer(kind: Type) -> bool:
    kinds = {type(each) for each in _kinds(kind)}
    return IntType in kinds and FloatType not in kinds


def _whole(values: list[Any]) -> list[int] | None:
    """A list of only whole floats as integers. A prompt may have millions: none of these loops runs in Python."""
    if set(map(type, values)) != {float} or max(values) >= EXACT or min(values) <= -EXACT:
        return None
    made = list(map(int, values))
    return made if made == values else None


def _choices(kind: Any, field: str) -> str:
    """The choices of a field with a fixed set of words."""
    found = _words(get_type_hints(kind).get(field))
    return f"; one of {', '.join(found)} works" if found else ""


def _words(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    return [word for each in get_args(hint) for word in _words(each)]


def cut(message: str) -> str:
    """msgspec's words, which may quote as much as was sent."""
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …"


def refusal(message: str, kind: Any) -> BadRequest:
    """msgspec's words, with the field first: `temperature: expected ..., got ...`.

    Only here is text parsed for a field's name: msgspec gives it in no other form.
    """
    message = cut(message)
    place = _PLACE.search(message)
    where = place.group(1) if place else ""
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        name = unknown.group(1)
        inside, hint = f" in {where}" if where else "", ""
        if not where and name in MEANT_FOR:
            hint = f"; {MEANT_FOR[name]}"
        elif not where and (close := difflib.get_close_matches(name, kind.__struct_fields__, 1)):
            hint = f"; did you mean {close[0]!r}?"
        return UnknownField(f"unknown field {name!r}{inside}{hint}", field=name)
    words = _PLACE.sub("", message).replace("`", "").replace("Object missing", "missing")
    if "nvalid enum value" in words and where in kind.__struct_fields__:
        words += _choices(kind, where)
    missing = _MISSING_FIELD.search(message)
    field = where or (missing.group(1) if missing else "")
    return BadRequest(f"{where}: {words[0].lower()}{words[1:]}" if where else words, field=field)

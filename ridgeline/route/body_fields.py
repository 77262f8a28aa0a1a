"""Where the fields of a request's body lie in its bytes. All other bytes go to the replica as they came.

A JSON parser that writes again what it has read changes what others can read: of a field that is given twice one is lost, NaN, a
cut emoji or a number with a thousand digits is refused or becomes another. So only the outermost names are read here, and a field
is set by writing its value over the old one. What is not valid JSON inside of a value is the replica's to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from ridgeline.errors import BadRequest
from ridgeline.server.http.body import json_fault
from ridgeline.server.http.json_size import PIECE

_BLANKS = re.compile(rb"[ \t\n\r]*+")
_LETTERS = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)                  # of a string
_BARE = re.compile(rb"[-+.\w]*+", re.ASCII)
_AT_ONCE = 5                         # levels of lists and objects that one match skips: a tool's schema has hundreds of them


def _inside(levels: int) -> re.Pattern[bytes]:
    """What may stand in a list or an object, with what is nested in it up to `levels` deep."""
    plain = inner = rb'[^"\[\]{}]++|"' + _LETTERS.pattern + rb'"'
    for _ in range(levels):
        inner = rb"%b|[\[{](?:%b)*+[\]}]" % (plain, inner)
    return re.compile(rb"(?:%b)*+" % inner, re.DOTALL)


_INSIDE = _inside(_AT_ONCE)


class Field(NamedTuple):
    name: str
    start: int                       # of its value
    end: int


class Places(NamedTuple):
    """Where fields of a body may be set."""

    given: list[Field]               # those that are there already
    end: int                         # where others may be added
    is_first: bool                   # there is no other field


Change = tuple[int, int, bytes]      # from where, to where, what is there afterwards


class _NoObject(Exception):
    pass


def fields_of(body: bytes) -> list[Field]:
    """In their order; a name may be there twice. BadRequest if the body is no JSON object."""
    try:
        return _fields(body)
    except _NoObject:
        raise BadRequest(_fault(body)) from None


def last_values(body: bytes, fields: list[Field], names: Collection[str]) -> dict[str, bytes]:
    """The values of these names; of one that is given twice the last, as decoders take it."""
    return {field.name: body[field.start : field.end] for field in fields if field.name in names}


def places_of(body: bytes, fields: list[Field], names: Collection[str]) -> Places:
    return Places([field for field in fields if field.name in names], body.rindex(b"}"), not fields)


def changes(places: Places, values: Mapping[str, bytes]) -> list[Change]:
    """These values, wherever their names are given; names that are not there come at the end."""
    made = [(field.start, field.end, values[field.name]) for field in places.given if field.name in values]
    found = {field.name for field in places.given}
    new = b",".join(msgspec.json.encode(name) + b":" + value for name, value in values.items() if name not in found)
    return [*made, (places.end, places.end, new if places.is_first else b"," + new)] if new else made


def changed(parts: Iterable[bytes], changes: Iterable[Change]) -> list[bytes]:
    """The body with its changes, in parts as it came: no byte of the others is copied together."""
    made, before, left = list[bytes](), 0, list(changes)
    for part in parts:
        place, end = 0, before + len(part)
        while left and left[0][0] < end:
            first, last, value = left[0]
            if first >= before:                          # it begins in this part; it may end in another
                made += part[place : first - before], value
            place = min(last, end) - before
            if last > end:
                break
            del left[0]
        made.append(part[place:] if place else part)
        before = end
    return [part for part in made if part]


def _fields(body: bytes) -> list[Field]:
    place = _past(body, 0, b"{")
    fields: list[Field] = []
    while fields or body[place : place + 1] != b"}":
        name_end = _string_end(body, place)
        start = _past(body, _skip(body, name_end), b":")
        end = _value_end(body, start)
        fields.append(Field(_name(body[place:name_end]), start, end))
        place = _skip(body, end)
        if body[place : place + 1] == b"}":
            break
        place = _past(body, place, b",")
    if _skip(body, place + 1) != len(body):
        raise _NoObject
    return fields


def _skip(body: bytes, place: int) -> int:
    return _run_end(_BLANKS, body, place)


def _run_end(run: re.Pattern[bytes], body: bytes, place: int) -> int:
    """Behind all that `run` takes. In pieces: no other thread runs while a pattern is matched, and 16 MB take a second."""
    while True:
        found = run.match(body, place, place + PIECE)
        assert found is not None                         # it may be empty
        short = found.end() < place + PIECE - 1          # by one: a backslash waits for what it escapes
        place = found.end()
        if short:
            return place


def _string_end(body: bytes, start: int) -> int:
    if body[start : start + 1] != b'"':
        raise _NoObject
    quote = body.find(b'"', start + 1)
    if quote > 0 and body.find(b"\\", start + 1, quote) < 0:
        return quote + 1                                 # nothing is escaped
    end = _run_end(_LETTERS, body, start + 1)
    if body[end : end + 1] != b'"':
        raise _NoObject
    return end + 1


def _past(body: bytes, place: int, mark: bytes) -> int:
    """Behind `mark` and the blanks around it."""
    place = _skip(body, place)
    if body[place : place + 1] != mark:
        raise _NoObject
    return _skip(body, place + 1)


def _value_end(body: bytes, start: int) -> int:
    first = body[start : start + 1]
    if first == b'"':
        return _string_end(body, start)
    if first not in (b"{", b"["):
        end = _run_end(_BARE, body, start)
        if end == start:
            raise _NoObject
        return end
    place, depth = start + 1, 1
    while depth:
        place = _run_end(_INSIDE, body, place)
        mark = body[place : place + 1]
        if mark == b'"':
            place = _string_end(body, place)
            continue
        if not mark:
            raise _NoObject
        depth += 1 if mark in (b"{", b"[") else -1
        place += 1
    return place


def _name(text: bytes) -> str:
    """As the replica reads it: letters may be escaped."""
    try:
        return str(json.loads(text)) if b"\\" in text else text[1:-1].decode()
    except ValueError:
        return ""                                        # of none that the router looks at


def _fault(body: bytes) -> str:
    """What is wrong with a body that has no fields."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"the body is not JSON: {json_fault(error, body)[:200]}"
    return "the body must be a JSON object"

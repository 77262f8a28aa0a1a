"""How many values a JSON text has, counted before it is decoded. A decoder cannot be interrupted: while it makes millions of
objects, no other thread of this process runs, and no health check is answered.

Bytes of text are cheap, structure is not: 16 MB are one prompt, or five million empty lists that take a second and a gigabyte.
The counts are of the text as it stands; whether it is valid JSON is the decoder's to say. Knows bytes.
"""

from __future__ import annotations

import re

from ridgeline.errors import BadRequest

MAX_PARTS = 100_000                  # strings (also keys), lists and objects: 65 ms to decode; 20,000 messages have this many
MAX_VALUES = 400_000                 # all values: 35 ms for token ids
PIECE = 2**17                        # bytes that are looked at before another thread may run

_ESCAPED_BACKSLASH, _ESCAPED_QUOTE = rb"\\", rb"\""
_STRINGS = re.compile(rb'"[^"]*"?')
_OTHERS = bytes(sorted(set(range(256)) - set(b'"[{,')))  # that do not matter here


def check_size(body: bytes) -> None:
    """BadRequest for a text with more structure than a request may have."""
    # Every quote, bracket and comma, also those inside of strings: no fewer than there are, and enough for nearly all bodies.
    parts = _count(body, b'"') // 2 + _count(body, b"[") + _count(body, b"{")
    if parts <= MAX_PARTS and parts + _count(body, b",") <= MAX_VALUES:
        return
    parts, values = counted(body)
    if parts > MAX_PARTS:
        raise BadRequest(f"the body has more than {MAX_PARTS:,} strings, lists and objects; send less in one request")
    if values > MAX_VALUES:
        raise BadRequest(f"the body has more than {MAX_VALUES:,} values; send less in one request")


def counted(body: bytes) -> tuple[int, int]:
    """(strings, lists and objects; these and commas) outside of strings. Ends early when there are too many."""
    parts = values = place = quotes = lists = commas = 0
    while place < len(body) and parts <= MAX_PARTS and values <= MAX_VALUES:
        piece = body[place : place + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # a backslash and what it escapes stay together
            piece = body[place : place + PIECE + 1]
        place += len(piece)
        plain = piece.replace(_ESCAPED_BACKSLASH, b"").replace(_ESCAPED_QUOTE, b"").translate(None, _OTHERS)
        outside = _STRINGS.sub(b"", b'"' + plain if quotes % 2 else plain)
        quotes += plain.count(b'"')
        lists += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        parts = (quotes + 1) // 2 + lists
        values = parts + commas
    return parts, values


def _count(body: bytes, what: bytes) -> int:
    return sum(body.count(what, place, place + PIECE) for place in range(0, len(body), PIECE))

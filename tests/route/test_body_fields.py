"""What of a request the router needs not understand stays bytes: it sets two fields, and all others arrive as they were sent."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.errors import BadRequest
from ridgeline.route import body_fields, forwarded_request
from ridgeline.route.body_facts import facts_of
from ridgeline.route.body_fields import changed, changes, fields_of, last_values, places_of
from ridgeline.route.forwarded_request import ForwardedRequest
from ridgeline.server.http.json_size import PIECE

SAID = b'"messages":[{"role":"user","content":"hello"}]'
STREAM = b'"stream":true,'
ASKED = b'"stream_options":{"include_usage":true}'


def sent(body: bytes, monkeypatch: pytest.MonkeyPatch, salt: str = "") -> ForwardedRequest:
    monkeypatch.setattr(forwarded_request, "caller_of", lambda scope: SimpleNamespace(cache_salt=salt))
    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    return forwarded_request.forwarded(scope, [body], facts_of(body), True, b"router")


@pytest.mark.parametrize("odd", [
    b'"logit_bias":{"1":1,"1":2},"logit_bias":{}', b'"metadata":{"a":' + b"9" * 5000 + b"}", b'"x":NaN,"y":-Infinity,"z":1e999',
    b'"user":"cut \\ud83d","stop":["\\udc00"]', b'"z":1,"a":{"z":1.0e+0,"a":-0}', b'"s\\u0061me":1, "same" :\t2 ',
    b'"x":"\\"},{\\\\","y":[{"a":"]"},[],{}]', b'"u":"\xc3\xa9\xf0\x9f\x98\x80"', b'"x":' + b"[" * 3000 + b"]" * 3000,
], ids=["twice", "digits", "nan", "surrogates", "order", "escaped names", "brackets", "utf8", "deep"])
@pytest.mark.parametrize("stream", [b"", STREAM])
def test_all_that_is_not_routed_by_keeps_its_bytes(odd: bytes, stream: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b" {" + stream + odd + b"," + SAID + b"}\n"
    request = sent(body, monkeypatch)
    assert request.parts == [body[:-2] + b"," + ASKED + b"}\n" if stream else body]
    assert request.prompt.is_chat and request.prompt.text == b"\x1euser\x1fhello" and request.hide_usage == bool(stream)


@pytest.mark.parametrize(("given", "made"), [
    (b'"stream_options": {"x": 1.50, "include_usage" : false, "x":1 }',
     b'"stream_options": {"x": 1.50, "include_usage" : true, "x":1 }'),
    (b'"stream_options":null,"top_k":1e0', ASKED + b',"top_k":1e0'),
    (b'"stream_options":{},"a":"\\ud83d","stream_options":{}', ASKED + b',"a":"\\ud83d",' + ASKED),
    (b'"stream\\u005foptions":{}', b'"stream\\u005foptions":{"include_usage":true}'),
], ids=["merged", "null", "twice", "escaped"])
def test_a_field_that_the_client_gave_is_set_where_it_is(
    given: bytes, made: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = sent(b"{" + STREAM + given + b"," + SAID + b"}", monkeypatch)
    assert request.parts == [b"{" + STREAM + made + b"," + SAID + b"}"] and request.hide_usage


def test_no_second_name_and_no_spelling_escapes_the_salt_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stayed would tell a client what others have in the cache."""
    body = b'{"cache_salt":"theirs","x":NaN,"cache\\u005fsalt":null,' + SAID + b',"c\\u0061che_salt":"\\ud83d"}'
    (made,) = sent(body, monkeypatch, "S").parts
    values = [value for name, value in json.loads(made, object_pairs_hook=list) if name == "cache_salt"]
    assert len(values) == 3 and all(value.startswith("S:") for value in values)


def test_what_is_no_strict_json_still_tells_prompts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = b'{"role":"user","content":"' + b"word " * 60 + b'\\ud83d"}'
    first = sent(b'{"messages":[' + turn + b"]}", monkeypatch).prompt
    second = sent(b'{"messages":[' + turn + b',{"role":"user","content":"more"}]}', monkeypatch).prompt
    assert first.is_chat and len(first.chain) >= 2 and second.chain[: len(first.chain)] == first.chain


@pytest.mark.parametrize("body", [
    b"", b" ", b"{", b"[1]", b'"x"', b"1", b"{]", b'{"a"}', b'{"a":}', b'{"a":1,}', b'{"a":1}x', b'{"a":[1}', b'{"a":"x}',
    b'{"a":["x]}', b"{a:1}", b'{"a":1 "b":2}', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16"), b"{'a':1}", b'{"a":1}{}',
    b'{,"a":1}',
])
def test_what_is_no_object_is_refused_here(body: bytes) -> None:
    with pytest.raises(BadRequest, match="JSON"):
        fields_of(body)


@pytest.mark.parametrize("body", [b"{}", b' { } ', b'{"a":1}', b'{ "a" : [ ] , "b":"x" }', b'{"a":1,"a":2}'])
def test_fields_are_set_or_added(body: bytes) -> None:
    fields = fields_of(body)
    expected = json.loads(body)
    assert {name: json.loads(value) for name, value in last_values(body, fields, expected).items()} == expected
    made = changes(places_of(body, fields, "ac"), {"a": b"[7]", "c": b"null"})
    assert json.loads(b"".join(changed([body], made))) == expected | {"a": [7], "c": None}


def test_a_body_is_changed_in_its_parts_wherever_they_end() -> None:
    body = b'{"a":1,"b":"xyz","a":[2,3]}'
    made = changes(places_of(body, fields_of(body), "ac"), {"a": b"[7]", "c": b"null"})
    for size in range(1, len(body) + 1):
        parts = [body[place : place + size] for place in range(0, len(body), size)]
        assert b"".join(changed(parts, made)) == b'{"a":[7],"b":"xyz","a":[7],"c":null}'
        assert all(new is old for new, old in zip(changed(parts, []), parts, strict=True))


@pytest.mark.parametrize("depth", range(1, 3 * body_fields._AT_ONCE))
def test_values_of_any_depth_end_where_they_end(depth: int) -> None:
    value = b'[{"a":"]}","b":[' * depth + b'1,"[",2' + b']},"}"]' * depth
    body = b'{"x":%b,"y":2}' % value
    assert [body[field.start : field.end] for field in fields_of(body)] == [value, b"2"]


def test_tools_are_skipped_by_few_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty tools took 2.3 ms of the router's event loop: a match for each of their names and texts."""
    inside, count = body_fields._INSIDE, 0

    class Counting:
        def match(self, *place: Any) -> re.Match[bytes] | None:
            nonlocal count
            count += 1
            return inside.match(*place)

    monkeypatch.setattr(body_fields, "_INSIDE", Counting())
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdef"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}} for _ in range(20)]
    assert [field.name for field in fields_of(json.dumps({"tools": tools, "model": "m"}).encode())] == ["tools", "model"]
    assert count <= 20


@pytest.mark.parametrize("long", [
    b'{"a":"' + b"x" * 2**20 + b'"}', b'{"a":"' + b"\\n" * 2**19 + b'"}',
    b'{"' + b"\\n" * 2**19 + b'":1}', b'{"a":[' + b" " * 2**20 + b"]}",
    b'{"a":' + b"9" * 2**20 + b"}", b"{" + b" " * 2**20 + b'"a":1}', b'{"a":["' + b'\\"' * 2**19 + b'"]}',
], ids=["text", "escapes", "name", "blanks", "digits", "blanks before", "inside a list"])
def test_long_values_are_matched_in_pieces_between_which_other_threads_run(long: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    class Watched:
        def __init__(self, pattern: re.Pattern[bytes]) -> None:
            self._pattern = pattern

        def match(self, *place: Any) -> re.Match[bytes] | None:
            nonlocal longest
            found = self._pattern.match(*place)
            longest = max(longest, found.end() - found.start() if found else 0)
            return found

    for name, value in vars(body_fields).copy().items():
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(body_fields, name, Watched(value))
    (field,) = fields_of(long)
    assert long[field.end :] == b"}"
    assert longest <= PIECE


@pytest.mark.parametrize("piece", range(2, 12))
def test_pieces_end_anywhere_and_the_fields_are_the_same(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b' { "a\\\\" : "\\\\\\"x\\\\" , "b":[ 1, "]\\"" ,{"c\\"":"}\\\\"}], "\\u0064" :-1.25e+10 ,"":true}  '
    fields = fields_of(body)
    assert {field.name: json.loads(body[field.start : field.end]) for field in fields} == json.loads(body)
    monkeypatch.setattr(body_fields, "PIECE", piece)
    assert fields_of(body) == fields
    for end in range(len(body) - 3):
        with pytest.raises(BadRequest):
            fields_of(body[:end])

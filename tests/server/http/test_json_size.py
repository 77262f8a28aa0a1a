"""Values of a JSON text are counted before it is decoded, and never fewer than there are."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.client.long_work import LONG_BYTES, LongWork
from ridgeline.errors import BadRequest
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.vllm.tokenize import DetokenizeRequest
from ridgeline.server.http import body as bodies
from ridgeline.server.http import json_size
from ridgeline.server.http.body import parse_body
from ridgeline.server.http.json_size import MAX_PARTS, MAX_VALUES, check_size, counted

ODD = st.text(st.sampled_from('"\\,[]{}:ax é\n\x00'), max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | ODD,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(ODD, inner, max_size=5),
    max_leaves=30,
)


def expected(value: Any) -> tuple[int, int]:
    """(strings, lists and objects; these and commas)."""
    if isinstance(value, str):
        return 1, 1
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    found = [expected(each) for each in inner]
    parts = 1 + sum(each for each, _ in found)
    return parts, 1 + sum(each for _, each in found) + max(0, len(value) - 1)


@pytest.mark.reliability("H-01e")
@settings(deadline=None)
@given(VALUES, st.integers(1, 40), st.booleans())
def test_counts_are_exact(value: Any, piece: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "PIECE", piece)
        assert counted(text) == expected(value)


MANY = {
    "lists": b'{"messages":[' + b"[]," * MAX_PARTS + b"[]]}",
    "objects": b'{"messages":[' + b"{}," * MAX_PARTS + b"{}]}",
    "strings": b'{"prompt":[' + b'"a",' * MAX_PARTS + b'"a"]}',
    "keys": b'{"metadata":{' + b",".join(b'"%d":0' % number for number in range(MAX_PARTS)) + b"}}",
    "numbers": b'{"prompt":[' + b"1," * MAX_VALUES + b"1]}",
    "unfinished": b'{"prompt":[' + b"[" * MAX_PARTS,
    "after a text with escapes": b'{"x":"' + b'\\\\\\"' * 1000 + b'","y":[' + b"[]," * MAX_PARTS,
}


@pytest.mark.reliability("H-01e")
@pytest.mark.parametrize("text", MANY.values(), ids=MANY.keys())
def test_a_body_with_too_many_values_is_not_decoded(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_decoder", None)
    with pytest.raises(BadRequest, match="send less in one request"):
        parse_body(ChatRequest, text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt":"' + b'Hello, \\"[{world}]\\", ' * 100_000 + b'"}',
        b'{"prompt":"' + b"," * (2 * MAX_VALUES) + b'"}',
        b'{"prompt":"' + b"\\\\" * (4 * MAX_PARTS) + b'"}',
        b'{"prompt":[' + b"12345," * (MAX_VALUES - 10) + b"1]}",
    ],
    ids=["prose", "commas", "backslashes", "token ids"],
)
def test_long_texts_and_prompts_of_token_ids_pass(text: bytes) -> None:
    check_size(text)
    assert parse_body(CompletionRequest, text).prompt


def test_what_long_conversations_have_passes() -> None:
    """10,000 messages; a prompt of 131,072 token ids; 1,000 tools with ten parameters."""
    turn = {"role": "user", "content": "x" * 400}
    check_size(json.dumps({"messages": [turn] * 10_000}).encode())
    check_size(json.dumps({"prompt": [1234] * 131_072}).encode())
    properties = {f"p{number}": {"type": "string", "description": "what it is"} for number in range(10)}
    function = {"name": "f", "description": "does it", "parameters": {"type": "object", "properties": properties}}
    check_size(json.dumps({"tools": [{"type": "function", "function": function}] * 1_000}).encode())


def test_short_bodies_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "check_size", None)
    text = json.dumps({"tokens": [1] * 1000}).encode()
    assert len(text) <= LONG_BYTES and parse_body(DetokenizeRequest, text).tokens


def test_the_number_of_ids_to_detokenize_is_limited() -> None:
    with pytest.raises(BadRequest, match="tokens has 300000 entries"):
        parse_body(DetokenizeRequest, json.dumps({"tokens": [1] * 300_000}).encode())


def test_the_event_loop_does_not_wait_for_a_thread_that_decodes() -> None:
    """A short request in another dialect may become a long one in chat's."""
    text = json.dumps({"prompt": "x" * (LONG_BYTES + 1)}).encode()
    with bodies._DECODING:
        done = threading.Thread(target=parse_body, args=(CompletionRequest, text), daemon=True)      # as the event loop would
        done.start()
        done.join(20)
        assert not done.is_alive()
        work = LongWork().run(partial(parse_body, CompletionRequest, text))
        away = threading.Thread(target=asyncio.run, args=(work,), daemon=True)
        away.start()
        away.join(0.2)
        assert away.is_alive()                           # one long body at a time
    away.join(20)
    assert not away.is_alive()

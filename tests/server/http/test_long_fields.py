"""A client's long field in an error message: cut where it is shown, and never formatted whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from scripted_server import ScriptedServer
from served_model import write_model

from ridgeline.errors import MOST_SAID, MOST_SHOWN, BadRequest, shown
from ridgeline.server.api.anthropic.messages_api import MessagesRequest
from ridgeline.server.api.llamacpp.llama_requests import LlamaRequest
from ridgeline.server.api.ollama.ollama_requests import OllamaChatRequest, OllamaGenerateRequest
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.openai.embeddings import EmbeddingRequest
from ridgeline.server.api.openai.responses_request import ResponsesRequest
from ridgeline.server.api.vllm.score import ScoreRequest
from ridgeline.server.api.vllm.tokenize import TokenizeRequest
from ridgeline.server.http.body import parse_body

MUCH = 200_000
LONG = "\u00e9" * 20_000


class Counted:
    """Counts how often it is formatted."""

    def __init__(self) -> None:
        self.times = 0

    def __repr__(self) -> str:
        self.times += 1
        return "x"


@pytest.mark.parametrize("wrap", [
    lambda each: [each] * MUCH, lambda each: (each,) * MUCH, lambda each: [[each] * MUCH] * 3,
    lambda each: dict.fromkeys(range(MUCH), each), lambda each: {"a": {"b": [each] * MUCH}},
])
def test_only_what_is_shown_is_formatted(wrap: Any) -> None:
    counted = Counted()
    assert len(shown(wrap(counted))) == MOST_SHOWN
    assert counted.times <= MOST_SHOWN


@pytest.mark.parametrize("value", [
    None, 1, -2.5, True, "text", "it's", b"bytes", [], (), {}, [1], (1,), (1, 2), [[1, "a"], {"b": None}], {"a": [1], 2: ()},
])
def test_a_short_value_is_shown_as_it_is(value: Any) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize(("kind", "body"), [
    (ChatRequest, {"messages": []}), (CompletionRequest, {"prompt": "a"}), (ResponsesRequest, {"input": "a"}),
    (EmbeddingRequest, {"input": "a"}), (ScoreRequest, {"text_1": "a", "text_2": "b"}),
])
def test_a_long_salt_is_refused_where_it_is_read_and_hints_are_dropped(kind: Any, body: dict[str, Any]) -> None:
    """Later, it waited in memory for its turn."""
    with pytest.raises(BadRequest, match="cache_salt must be a text of at most 1024 characters"):
        parse_body(kind, json.dumps(body | {"cache_salt": "s" * 1025}).encode())
    read = parse_body(kind, json.dumps(body | {"cache_salt": "s" * 1024, "user": LONG}).encode())
    assert read.cache_salt == "s" * 1024 and read.user is None


def test_a_long_value_is_cut_at_its_end() -> None:
    assert shown("a" * 100) == "'" + "a" * 76 + "..."
    assert shown("a" + " " * 100 + "b") == "'a '..."    # what was cut is said, although the rest is short on one line
    assert shown(["a", " " * 70, "b", "c"]) == "['a', ' ', 'b'..."
    assert shown("a" + " " * 78 + "b") == "'a b'"
    assert shown(10**5000) == "a value of type int"
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "[" * 77 + "..."
    while nested:                                        # freed level by level, not by recursion
        nested = nested[0]


def test_the_words_of_a_library_are_cut() -> None:
    error = BadRequest("a" * MUCH, field="b" * MUCH)
    assert len(str(error)) == MOST_SAID + 2 and len(error.field) == MOST_SAID


# -- a server ----------------------------------------------------------------------------------------------------------

TURN = [{"role": "user", "content": "a"}]
ENDPOINTS: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, {"messages": TURN, "max_tokens": 1}),
    ("/v1/completions", CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    ("/v1/messages", MessagesRequest, {"model": "tiny", "max_tokens": 1, "messages": TURN}),
    ("/tokenize", TokenizeRequest, {"prompt": "a"}),
    ("/v1/responses", ResponsesRequest, {"input": "a"}),
    ("/v1/embeddings", EmbeddingRequest, {"input": "a", "dimensions": 0}),
    ("/api/chat", OllamaChatRequest, {"model": "tiny", "messages": TURN}),
    ("/api/generate", OllamaGenerateRequest, {"model": "tiny", "prompt": "a"}),
    ("/completion", LlamaRequest, {"prompt": "a", "n_predict": 1}),
]
VALUES: dict[str, list[Any]] = {"plain": [LONG, {LONG: 1}, [{"type": LONG}]], "others": [[LONG], {"type": LONG}, [{LONG: 1}]]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as made:
        yield made


@pytest.mark.parametrize("values", ["plain", pytest.param("others", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("path", "kind", "body"), ENDPOINTS, ids=lambda given: given if isinstance(given, str) else "")
def test_no_error_quotes_a_long_field_whole(
    server: ScriptedServer, path: str, kind: type[msgspec.Struct], body: dict[str, Any], values: str
) -> None:
    names = [each.encode_name for each in msgspec.structs.fields(kind)]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        bodies = [{**body, name: value} for name in names for value in VALUES[values]] + [{**body, LONG: 1}]
        for each in bodies:
            reply = client.post(path, content=json.dumps(each, ensure_ascii=False).encode(),
                                headers={"content-type": "application/json"})
            assert reply.status_code < 500, reply.text
            assert reply.status_code == 200 or len(reply.content) < 3 * MOST_SAID, (each.keys(), len(reply.content))

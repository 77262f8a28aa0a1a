"""The small endpoints, and the OpenAPI document: that it tells the truth, read by a tool that knows nothing else of us."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import HealthCheck, Phase, given, settings
from scripted_server import ScriptedServer
from served_model import ServerProcess, write_model
from starlette.routing import Route
from tokenizers.processors import TemplateProcessing

from ridgeline.server.api.openapi import OPERATIONS, document
from ridgeline.server.app import make_app
from ridgeline.server.http.gate import OPEN_PATHS
from ridgeline.version import __version__

NAME = "tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model, lambda prompt: "yes") as made:
        yield made


def post(server: ScriptedServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body)


def refused(reply: httpx.Response) -> str:
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokenize_a_prompt_and_back(server: ScriptedServer) -> None:
    reply = post(server, "/tokenize", prompt="héy").json()
    assert reply["count"] == len(reply["tokens"]) == 4 and reply["max_model_len"] == 512 and reply["token_strs"] is None
    assert post(server, "/detokenize", tokens=reply["tokens"], model=NAME).json() == {"prompt": "héy", "content": "héy"}
    strings = post(server, "/tokenize", prompt="a b", return_token_strs=True, add_special_tokens=False).json()["token_strs"]
    assert strings == ["a", "Ġ", "b"]
    special = post(server, "/tokenize", prompt="<|im_end|>").json()["tokens"]
    assert special == [259] and post(server, "/detokenize", tokens=special).json()["prompt"] == "<|im_end|>"
    assert post(server, "/tokenize", prompt="").json()["tokens"] == []
    assert post(server, "/detokenize", tokens=[]).json()["prompt"] == ""


def test_tokenize_adds_the_special_tokens_of_the_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / NAME)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(model / "tokenizer.json"))
    with ScriptedServer(model, lambda prompt: "") as server:
        assert post(server, "/tokenize", prompt="a").json()["count"] == 2
        assert post(server, "/tokenize", prompt="a", add_special_tokens=False).json()["count"] == 1


def test_tokenize_a_conversation(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = post(server, "/tokenize", messages=messages).json()["tokens"]
    text = post(server, "/detokenize", tokens=tokens).json()["prompt"]
    assert text == "<|im_start|>user\nHello<|im_end|><|im_start|>assistant\n"
    without = post(server, "/tokenize", messages=messages, add_generation_prompt=False).json()["count"]
    assert without == len(tokens) - 11
    continued = [*messages, {"role": "assistant", "content": "Yes"}]
    tokens = post(server, "/tokenize", messages=continued, continue_final_message=True).json()["tokens"]
    assert post(server, "/detokenize", tokens=tokens).json()["prompt"].endswith("assistant\nYes")


def test_what_tokenize_refuses(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert refused(post(server, "/tokenize")) == "prompt or messages must be given, and not both"
    assert refused(post(server, "/tokenize", prompt="a", messages=messages)).startswith("prompt or messages")
    assert refused(post(server, "/tokenize", prompt="a", tools=[])).startswith("tools needs messages")
    assert "add_special_tokens must be false" in refused(post(server, "/tokenize", messages=messages, add_special_tokens=True))
    assert "which cannot fit" in refused(post(server, "/tokenize", prompt="x" * 100_000))
    assert "did you mean 'prompt'" in refused(post(server, "/tokenize", promt="x"))
    assert refused(post(server, "/detokenize", tokens=[-1])).startswith("tokens must hold token ids")
    assert refused(post(server, "/detokenize", tokens=[260])) == "tokens holds 260; the vocabulary ends at 259"
    assert post(server, "/tokenize", prompt="x", model="other").status_code == 404
    assert httpx.post(f"{server.url}/tokenize", content="{}").status_code == 415
    assert httpx.get(f"{server.url}/tokenize").status_code == 405


# -- health ------------------------------------------------------------------------------------------------------------


def test_health_and_version(server: ScriptedServer) -> None:
    for path in ("/health", "/health/ready", "/health/live", "/ping", "/version", "/v1/models", "/openapi.json"):
        got, head = httpx.get(f"{server.url}{path}"), httpx.head(f"{server.url}{path}")
        assert got.status_code == head.status_code == 200, path
        assert head.content == b"" and head.headers["content-length"] == str(len(got.content)), path
    assert httpx.post(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}


@pytest.mark.reliability("B-13")
def test_a_server_that_is_not_ready_is_alive(server: ScriptedServer) -> None:
    limit, server.service.slots.limit = server.service.slots.limit, 0
    try:
        codes = {path: httpx.get(server.url + path).status_code for path in ("/health", "/health/ready", "/ping", "/health/live")}
        refused = post(server, "/tokenize", prompt="x")
    finally:
        server.service.slots.limit = limit
    assert codes == {"/health": 503, "/health/ready": 503, "/ping": 503, "/health/live": 200}
    assert refused.status_code == 503 and "retry-after" in refused.headers


def test_a_health_check_passes_no_routes(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of what a check would cost, and anyone may send a flood of checks."""
    tried: list[str] = []
    matches = Route.matches

    def watched(route: Route, scope: Any) -> Any:
        tried.append(scope["path"])
        return matches(route, scope)

    monkeypatch.setattr(Route, "matches", watched)
    for path in ("/health", "/health/ready", "/health/live", "/ping"):
        got, head = httpx.get(f"{server.url}{path}"), httpx.head(f"{server.url}{path}")
        assert got.status_code == head.status_code == 200 and not head.content
        assert (got.headers.get("content-type") == "application/json") is bool(got.content)
    assert httpx.get(f"{server.url}/health").json() == {
        "status": "ok", "requests": 0, "running": 0, "free_blocks": 0, "num_blocks": 64,
    }
    assert not tried
    assert httpx.get(f"{server.url}/health", headers={"Host": "page.example"}).status_code == 421
    assert httpx.post(f"{server.url}/health").status_code == 405 and tried


# -- the document ------------------------------------------------------------------------------------------------------


def test_every_route_is_in_the_document_and_the_other_way_round(server: ScriptedServer) -> None:
    routes = {re.sub(r":path", "", route.path) for route in make_app(server.service).routes}     # type: ignore[attr-defined]
    assert routes - {"/openapi.json", "/v1/models/"} == {each.path for each in OPERATIONS}
    assert httpx.get(f"{server.url}/openapi.json").json() == json.loads(json.dumps(document()))


def test_every_reference_in_the_document_is_there() -> None:
    text = json.dumps(document())
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names and names <= document()["components"]["schemas"].keys()


def test_the_document_has_queries_and_says_who_needs_a_key() -> None:
    paths = document()["paths"]
    told = {each["name"]: each["schema"] for each in paths["/v1/responses/{id}/input_items"]["get"]["parameters"]}
    assert told.keys() == {"id", "include", "limit", "order", "after"} and told["limit"]["maximum"] == 100
    assert {each["name"] for each in paths["/v1/responses/{id}"]["get"]["parameters"]} == {"id", "include"}
    assert {each["name"] for each in paths["/v1/responses/{id}"]["delete"]["parameters"]} == {"id"}
    without = {path for path, methods in paths.items() if all("401" not in each["responses"] for each in methods.values())}
    assert without == OPEN_PATHS


INTEGERS = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"), (1, 9)), "n": (1, 2),
    "top_k": (0, 50), "logprobs": (0, 5), "seed": (0, 99),
}
KEPT = {
    "stream", "system", "instructions", "user", "metadata", "add_special_tokens", "return_token_strs", "encoding_format",
    "pooling", "ignore_eos", "return_token_ids", "skip_special_tokens", "thinking", "text", "stop_sequences", "store",
}


def sensible(document: dict[str, Any]) -> dict[str, Any]:
    """The document with narrower types for some fields and without others, so that most of what it allows can be done."""
    schemas = document["components"]["schemas"]
    posts = [each["post"] for each in document["paths"].values() if "post" in each]
    bodies = [each["requestBody"]["content"] for each in posts if "requestBody" in each]
    for reference in {each["application/json"]["schema"].get("$ref") for each in bodies} - {None}:       # or one of several
        schema = schemas[reference.rsplit("/", 1)[1]]
        names = [*schema["required"], *(name for name in schema["properties"] if name in KEPT | INTEGERS.keys())]
        schema["properties"] = {"model": {"enum": [NAME]}} | {name: schema["properties"][name] for name in names}
        for name, (low, high) in INTEGERS.items():
            if name in schema["properties"]:
                schema["properties"][name] = {"type": "integer", "minimum": low, "maximum": high}
        schema["properties"]["model"] = {"enum": [NAME]}
    text = {"type": "string", "minLength": 1, "maxLength": 9}
    message = {"type": "object", "properties": {"role": {"const": "user"}, "content": text}, "additionalProperties": False}
    message["required"] = ["role", "content"]
    schemas["ChatMessage"] = schemas["Message"] = schemas["InputItem"] = message
    schemas["ChatRequest"]["properties"].pop("logprobs", None)               # a boolean there
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"] = {"type": "integer", "minimum": 0, "maximum": 259}
    return document


@pytest.mark.reliability("S-12")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["positive", "sensible", "negative"])
def test_the_server_keeps_to_its_document(model: Path, mode: str) -> None:
    """Whatever the document allows or forbids: no 5xx, no undocumented status, no body that is not as described."""
    # Imported here, since it takes a second, and only this test needs it.
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    generation = GenerationMode.NEGATIVE if mode == "negative" else GenerationMode.POSITIVE
    if mode == "negative":
        checks.append(negative_data_rejection)
    limits = settings(
        max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    answers: Counter[int] = Counter()

    def check(case: Any) -> None:
        answers[case.call_and_validate(checks=checks, timeout=60).status_code] += 1

    options = ("--load-format", "dummy", "--num-gpu-blocks-override", "200", "--max-num-seqs", "8", "--max-model-len", "128")
    with ServerProcess(str(model), *options) as server:
        told = httpx.get(f"{server.url}/openapi.json").json()
        schema = schemathesis.openapi.from_dict(sensible(told) if mode == "sensible" else told)
        schema.config.update(base_url=server.url)
        for result in schema.get_all_operations():
            operation = result.ok()
            takes_body = "requestBody" in told["paths"][operation.path][operation.method]
            if mode != "negative" or takes_body:                        # else there is nothing that could be wrong
                limits(given(case=operation.as_strategy(generation_mode=generation))(check))()
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert answers[200 if mode == "sensible" else 400] > 480, answers        # it has tried what it is meant to try

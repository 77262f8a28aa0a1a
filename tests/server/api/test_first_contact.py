"""What a person finds first: `/` and the printed address, `/docs`, a path without its /v1, a server below a prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from scripted_server import ScriptedServer
from served_model import write_model

from ridgeline.errors import ConfigError
from ridgeline.server.api.openapi import OPERATIONS
from ridgeline.server.http.keys import Keys
from ridgeline.server.http.near_paths import suggestion
from ridgeline.server.http.root_path import plain_prefix
from ridgeline.server.options import ServerOptions

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(write_model(tmp_path_factory.mktemp("first") / "tiny"), lambda prompt: "yes", keys=Keys(["k"])) as made:
        yield made


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/"])
def test_the_printed_address_leads_somewhere(server: ScriptedServer, path: str) -> None:
    seen = httpx.get(server.url + path, headers=BROWSER, follow_redirects=True)
    assert seen.status_code == 200 and seen.url.path == "/dashboard" and "<html" in seen.text
    told = httpx.get(server.url + path).json()
    assert told["openai_base_url"] == "/v1" and told["docs"] == "/docs" and told["name"] == "Ridgeline"
    assert httpx.head(server.url + path).status_code == 200


def test_the_dashboard_may_have_a_slash(server: ScriptedServer) -> None:
    """Its data is fetched relative to it, so the page itself cannot be served there."""
    reply = httpx.get(f"{server.url}/dashboard/")
    assert reply.status_code == 307 and reply.headers["location"] == "/dashboard"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        self.found += [value or "" for name, value in attributes if name in ("src", "href")]


def test_docs_is_one_page_without_scripts_or_foreign_bytes(server: ScriptedServer) -> None:
    reply = httpx.get(f"{server.url}/docs")
    links = _Links()
    links.feed(reply.text)
    assert reply.status_code == 200 and set(links.found) == {"/openapi.json", "/dashboard"}
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    nonce = re.search(r'<style nonce="([^"]+)"', reply.text)
    assert nonce and f"'nonce-{nonce[1]}'" in reply.headers["content-security-policy"]
    for operation in OPERATIONS:
        assert f'class="path">{operation.path}</span>' in reply.text
    assert "<code>temperature</code>" in reply.text and httpx.get(f"{server.url}/docs").text != reply.text


@pytest.mark.parametrize(("path", "meant"), [
    ("/chat/completions", "/v1/chat/completions"), ("/models", "/v1/models"), ("/v1/v1/models", "/v1/models"),
    ("/openai/v1/chat/completions", "/v1/chat/completions"), ("/v1/chat/completions/", "/v1/chat/completions"),
    ("/openai/chat/completions", "/v1/chat/completions"), ("/v1/chat/completion", "/v1/chat/completions"),
    ("/model", "/v1/models"), ("/model/", "/v1/models"),
    ("/v1/tokenize", "/tokenize"), ("/embeddings", "/v1/embeddings"), ("/v1/completion", "/v1/completions"),
])
def test_a_near_path_is_named(server: ScriptedServer, path: str, meant: str) -> None:
    reply = httpx.post(server.url + path, json={}, headers={"authorization": "Bearer k"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == f"POST {path} does not exist here; did you mean {meant}?"


def test_the_list_of_models_may_have_a_slash(server: ScriptedServer) -> None:
    """It is no model with an empty name."""
    key = {"authorization": "Bearer k"}
    seen = httpx.get(f"{server.url}/v1/models/", headers=key)
    assert seen.status_code == 200 and seen.json() == httpx.get(f"{server.url}/v1/models", headers=key).json()


@pytest.mark.parametrize(("method", "path", "words"), [
    ("GET", "/v1/chat/completions/chatcmpl-1", "chat completions are not stored; /v1/responses stores its answers"),
    ("POST", "/v1/responses/compact", "conversations are not shortened here"),
    ("POST", "/v1/threads/t1/runs", "previous_response_id"), ("POST", "/v1/conversations", "previous_response_id"),
    ("POST", "/v1/files", "ridgeline generate"), ("POST", "/v1/messages/batches", "ridgeline generate"),
    ("POST", "/v1/moderations", "only generates text"), ("GET", "/v1/vector_stores", "no files are kept"),
    ("POST", "/v1/containers", "tools as functions"), ("POST", "/v1/fine_tuning/jobs", "does not train"),
    ("POST", "/v1/evals", "ridgeline eval"),
    ("POST", "/v1/audio/speech", "only generates text"),
    ("POST", "/openai/deployments/tiny/chat/completions?api-version=2024-10-21", "base URL that ends with /v1"),
])
def test_parts_of_openais_api_that_are_not_here_are_told_so(server: ScriptedServer, method: str, path: str, words: str) -> None:
    reply = httpx.request(method, server.url + path, headers={"authorization": "Bearer k"})
    error = reply.json()["error"]
    assert reply.status_code == 404 and "does not exist here; " in error["message"]
    assert error.get("code") == "not_found" or error["type"] == "not_found_error"        # OpenAI's form, Anthropic's
    assert words in error["message"] and "did you mean" not in error["message"]


@pytest.mark.parametrize(("path", "words"), [
    ("/v1beta/models/tiny:generateContent", "this is Gemini's API; the server answers clients of OpenAI"),
    ("/v1/models/tiny:generateContent", "this is Gemini's API"),         # not a model's name
    ("/v2/chat", "this is Cohere's API"), ("/v1/embed", "this is Cohere's API"),
    ("/generate", "the own API of TGI and SGLang; /v1/completions"), ("/generate_stream", "the own API of TGI and SGLang"),
    ("/get_model_info", "/v1/models and /health"), ("/v1/fim/completions", "/v1/completions with `suffix`"),
    ("/model/tiny/converse", "this is Bedrock's API"), ("/v1/engines/tiny/completions", "these paths are old"),
])
def test_paths_of_other_apis_are_known(server: ScriptedServer, path: str, words: str) -> None:
    reply = httpx.post(server.url + path, json={}, headers={"authorization": "Bearer k"})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 404 and words in message and "did you mean" not in message


def test_other_paths_are_not_guessed() -> None:
    assert suggestion("/favicon.ico", {"/v1/models", "/health"}) == "" and suggestion("/x" * 5000, {"/health"}) == ""
    assert suggestion("/favicon.ico", {"/", "/v1", "/v1/", "/health"}) == ""             # not "/"
    assert "merge them into the model" in suggestion("/lora-adapters/", {"/v1/completions"})


def test_completions_without_v1_are_told_so_where_they_are_openais(server: ScriptedServer) -> None:
    """llama.cpp has that path, too. OpenAI's clients always name a model."""
    key = {"authorization": "Bearer k"}
    told = httpx.post(f"{server.url}/completions", json={"model": "tiny", "prompt": "a"}, headers=key)
    assert told.status_code == 404 and "did you mean /v1/completions" in told.json()["error"]["message"]
    assert httpx.post(f"{server.url}/completions", json={"prompt": "a"}, headers=key).json()["content"] == "yes"


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_server_below_a_prefix(tmp_path: Path, prefix: str) -> None:
    """With a proxy that takes the prefix off, and with one that does not."""
    options = ServerOptions(port=0, root_path="/llm/")
    with ScriptedServer(write_model(tmp_path / "tiny"), lambda prompt: "", server=options) as made:
        url = made.url + prefix
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        assert httpx.get(f"{url}/", headers=BROWSER).headers["location"] == "/llm/dashboard"
        assert httpx.get(f"{url}/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert httpx.get(f"{made.url}/llmx/v1/models").status_code == 404
        assert 'href="/llm/openapi.json"' in httpx.get(f"{url}/docs").text


def test_a_prefix_cannot_go_round_the_keys(tmp_path: Path) -> None:
    options = ServerOptions(port=0, root_path="/llm")
    with ScriptedServer(write_model(tmp_path / "tiny"), lambda prompt: "", server=options, keys=Keys(["k"])) as made:
        codes = [httpx.get(made.url + path).status_code for path in ("/llm/v1/models", "/v1/models", "/llm/llm/v1/models")]
        assert codes == [401, 401, 401] and httpx.get(f"{made.url}/llm/health").status_code == 200


@pytest.mark.parametrize("given", ["llm", "/a b", "/a//b", "http://x/"])
def test_a_bad_prefix_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="root_path must be a path"):
        plain_prefix(given)

"""The hostile side of HTTP, per commit: requests that could be read in two ways, ways around the key, what errors tell, and
clocks that jump. Names in brackets are rows of docs/reliability.md."""

from __future__ import annotations

import ast
import gc
import json
import re
import socket
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import wait_until, write_model

from ridgeline.server.app import make_app
from ridgeline.server.http import connection_limits
from ridgeline.server.http.gate import OPEN_PATHS
from ridgeline.server.http.keys import Keys
from ridgeline.server.observe import prometheus

KEY = "sk-sesame"
SECRET = "purple-elephant-17"            # stands in every prompt: no error may tell it
PACKAGE = Path(__file__).parents[2] / "ridgeline"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TOOL_TEMPLATE}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_limits, "LINGER_SECONDS", 0.02)    # a refused client gets a second to read why
        with ScriptedServer(model, lambda prompt: "yes", keys=Keys([KEY])) as made:
            yield made


def talk(server: ScriptedServer, data: bytes) -> bytes:
    """Everything that comes back until the server closes, or for as long as it may keep a connection open."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except TimeoutError:
            received += b"<still open>"
        return received


# -- smuggling [H-03] --------------------------------------------------------------------------------------------------

BODY = b'{"prompt": "a", "max_tokens": 1}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
START = b"POST /v1/completions HTTP/1.1\r\n"
REST = b"host: localhost\r\nauthorization: Bearer %b\r\ncontent-type: application/json\r\n" % KEY.encode()
GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n" % KEY.encode()


def with_head(more: bytes, body: bytes = BODY) -> bytes:
    return START + REST + more + b"\r\n" + body


SMUGGLING: dict[str, bytes] = {
    "length and chunks": with_head(LENGTH + b"transfer-encoding: chunked\r\n", CHUNKS),
    "chunks and length": with_head(b"transfer-encoding: chunked\r\n" + LENGTH, CHUNKS),
    "two lengths": with_head(LENGTH + b"content-length: 5\r\n"),
    "two equal lengths": with_head(LENGTH + LENGTH),
    "lengths in a list": with_head(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY))),
    "a negative length": with_head(b"content-length: -1\r\n"),
    "a signed length": with_head(b"content-length: +%d\r\n" % len(BODY)),
    "a hexadecimal length": with_head(b"content-length: 0x20\r\n"),
    "a length with a fraction": with_head(b"content-length: 32.0\r\n"),
    "an empty length": with_head(b"content-length: \r\n"),
    "a length of letters": with_head(b"content-length: abc\r\n"),
    "a length beyond 64 bits": with_head(b"content-length: 99999999999999999999999\r\n"),
    "a blank before the colon": with_head(b"content-length : %d\r\n" % len(BODY)),
    "a tab before the colon": with_head(b"transfer-encoding\t: chunked\r\n", CHUNKS),
    "a blank before the name": with_head(b" content-length: %d\r\n" % len(BODY)),
    "a folded header": with_head(b"x-a: b\r\n c\r\n" + LENGTH),
    "a folded coding": with_head(b"transfer-encoding:\r\n chunked\r\n", CHUNKS),
    "an unknown coding": with_head(b"transfer-encoding: xchunked\r\n", CHUNKS),
    "identity": with_head(b"transfer-encoding: identity\r\n" + LENGTH),
    "chunked, not last": with_head(b"transfer-encoding: chunked, gzip\r\n", CHUNKS),
    "another coding first": with_head(b"transfer-encoding: gzip, chunked\r\n", CHUNKS),
    "chunked, chunked": with_head(b"transfer-encoding: chunked, chunked\r\n", CHUNKS),
    "chunked twice": with_head(b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", CHUNKS),
    "a coding in quotes": with_head(b'transfer-encoding: "chunked"\r\n', CHUNKS),
    "a coding with a NUL": with_head(b"transfer-encoding: chunked\x00\r\n", CHUNKS),
    "a coding with a vertical tab": with_head(b"transfer-encoding: \x0bchunked\r\n", CHUNKS),
    "no value for the coding": with_head(b"transfer-encoding:\r\n", CHUNKS),
    "a NUL in a name": with_head(b"x\x00y: a\r\n" + LENGTH),
    "a NUL in a value": with_head(b"x-a: b\x00c\r\n" + LENGTH),
    "a bare carriage return": with_head(b"x-a: b\rcontent-length: 0\r\n" + LENGTH),
    "a name without a colon": with_head(b"x-nothing\r\n" + LENGTH),
    "an empty name": with_head(b": a\r\n" + LENGTH),
    "a bracket in a name": with_head(b"x[a]: b\r\n" + LENGTH),
    "lines without carriage return": (START + REST + LENGTH).replace(b"\r\n", b"\n") + b"\n" + BODY,
    "one line without carriage return": with_head(b"x-a: b\n" + LENGTH),
    "a chunk's size in the wrong base": with_head(b"transfer-encoding: chunked\r\n", b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk's size with a sign": with_head(b"transfer-encoding: chunked\r\n", b"+5\r\nhello\r\n0\r\n\r\n"),
    "a chunk's size beyond 64 bits": with_head(b"transfer-encoding: chunked\r\n", b"f" * 17 + b"\r\nhello\r\n0\r\n\r\n"),
    "a chunk longer than its size": with_head(b"transfer-encoding: chunked\r\n", b"3\r\nhello\r\n0\r\n\r\n"),
    "a chunk ended by a line feed": with_head(b"transfer-encoding: chunked\r\n", b"5\nhello\n0\n\n"),
    "chunks in HTTP/1.0": with_head(b"transfer-encoding: chunked\r\n", CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "another version": with_head(LENGTH).replace(b"HTTP/1.1", b"HTTP/3.7"),
    "no version": with_head(LENGTH).replace(b" HTTP/1.1", b""),
    "a method of its own": with_head(LENGTH).replace(b"POST ", b"P@ST "),
    "two hosts": with_head(b"host: elsewhere\r\n" + LENGTH),
    "a body where none may be": GET + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
}


@pytest.mark.reliability("H-03")
@pytest.mark.parametrize("case", SMUGGLING)
def test_what_could_be_read_in_two_ways_is_refused(server: ScriptedServer, case: str) -> None:
    """And the connection closed: a second request behind it is never answered."""
    reply = talk(server, SMUGGLING[case] + GET + b"\r\n")
    assert reply.startswith(b"HTTP/1.1 400 "), reply[:300]
    assert reply.count(b"HTTP/1.1 ") == 1 and b"<still open>" not in reply


def test_the_same_requests_without_the_trick_are_answered(server: ScriptedServer) -> None:
    for head, body in ((LENGTH, BODY), (b"transfer-encoding: chunked\r\n", CHUNKS)):
        reply = talk(server, with_head(head + b"connection: close\r\n", body))
        assert reply.startswith(b"HTTP/1.1 200 "), reply[:300]


# -- ways around the key [S-04] ----------------------------------------------------------------------------------------


def variants(path: str, method: str) -> Iterator[tuple[str, bytes, set[int]]]:
    """(what it tries, the request, the statuses that are right) for one route, all without a valid key."""
    if method == "POST":
        body = b"{}"
        more = b"content-type: application/json\r\ncontent-length: 2\r\n"
    else:
        body, more = b"", b""

    def request(target: str, host: str = "localhost", headers: bytes = b"") -> bytes:
        line = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n".encode("latin-1")
        return line + headers + more + b"\r\n" + body

    no = {401}
    yield "no key", request(path), no
    yield "a wrong key", request(path, headers=b"authorization: Bearer wrong\r\n"), no
    yield "the key in the query", request(f"{path}?api_key={KEY}&key={KEY}&access_token={KEY}"), no
    yield "the key in a cookie", request(path, headers=f"cookie: key={KEY}\r\n".encode()), no
    yield "basic", request(path, headers=f"authorization: Basic {KEY}\r\n".encode()), no
    # The Host is looked at first; what it says must never make another path of this one.
    for host in ("x?", "x/health", "localhost/health?", "localhost#", "a@b/health"):
        yield f"host {host}", request(path, host), {400, 401}
    yield "two hosts", request(path, headers=b"host: localhost\r\n"), {400, 401}
    yield "two slashes", request("/" + path), {401, 404}
    yield "an encoded slash", request("/%2f" + path[1:]), {401, 404}
    yield "an absolute URI", request(f"http://localhost/health{path}"), {401, 404}
    yield "an absolute URI of another", request(f"http://elsewhere{path}"), {400, 401, 421}
    yield "dots", request(f"/health/..{path}"), {401, 404}
    yield "encoded dots", request(f"/health/%2e%2e{path}"), {401, 404}
    yield "health as a prefix", request(f"/health{path}"), {401, 404}
    yield "a fragment", request(f"{path}#/health"), {400, 401, 404}
    yield "a parameter", request(f"{path};/health"), {401, 404}
    for name in (b"x-original-url", b"x-rewrite-url", b"x-forwarded-uri", b"x-forwarded-prefix"):
        yield name.decode(), request(path, headers=name + b": /health\r\n"), no


@pytest.mark.reliability("S-04")
def test_there_is_no_way_around_the_key(server: ScriptedServer) -> None:
    routes = [(getattr(route, "path", ""), route) for route in make_app(server.service).routes]
    tried = 0
    for path, route in routes:
        if path in OPEN_PATHS:
            continue
        method = "POST" if "POST" in getattr(route, "methods", ()) else "GET"
        for name, request, allowed in variants(path.replace("{name:path}", "tiny"), method):
            reply = talk(server, request)
            status = int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 0
            assert status in allowed, (path, name, reply[:200])
            tried += 1
    assert tried > 250


# -- what errors tell [S-11] -------------------------------------------------------------------------------------------

WRONG: list[Any] = [None, True, -1, 0, 10**30, 1.5, "text", "", [], [None], {}, {"a": 1}, ["x"] * 2000, "\x00", "\ud800"]
LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|/(?:usr|home|root|tmp|work|lib|opt)/|\.py\b|site-packages|object at ")


def provoked() -> Iterator[tuple[str, Any]]:
    chat, text = {"messages": [{"role": "user", "content": SECRET}]}, {"prompt": SECRET}
    message = {"model": "tiny", "max_tokens": 3} | chat
    for field in ("temperature", "max_tokens", "n", "stop", "logit_bias", "top_k", "seed", "response_format", "stream_options",
                  "structured_outputs", "bad_words", "ttft_deadline_ms", "techniques", "echo", SECRET):
        for value in WRONG:
            yield "/v1/completions", text | {field: value}
    for field in ("messages", "tools", "tool_choice", "chat_template_kwargs", "functions", "modalities", "reasoning_effort"):
        for value in WRONG:
            yield "/v1/chat/completions", chat | {field: value}
            yield "/v1/messages", message | {field: value}
            yield "/v1/responses", {"input": SECRET, field: value}
    for value in WRONG:
        yield "/v1/embeddings", {"input": SECRET, "dimensions": value or -8, "pooling": value}
        yield "/tokenize", {"prompt": SECRET, "messages": value}
        yield "/detokenize", {"tokens": value}
        yield "/v1/completions", text | {"model": value}


@pytest.mark.reliability("S-11", "B-23")
def test_errors_tell_nothing_of_the_server_or_of_prompts(server: ScriptedServer) -> None:
    wrong: set[str] = set()
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        for path, body in provoked():
            data = json.dumps(body)
            reply = client.post(f"{server.url}{path}", content=data, headers={"content-type": "application/json"})
            assert reply.status_code < 500, (path, data[:200], reply.text)
            if reply.status_code == 200:
                continue
            message = reply.json()["error"]["message"]
            wrong.add(re.sub(r"\d+", "#", message))
            assert not LEAKS.search(reply.text), (path, data[:200], reply.text)
            if SECRET not in body:                       # as a field's name it is told: that is the error
                assert SECRET not in reply.text, (path, data[:200], reply.text)
            assert len(message) < 1500, message
    assert len(wrong) > 100                              # different errors


@pytest.mark.reliability("S-11")
def test_what_fails_inside_is_a_number_for_clients(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{SECRET} at 0x7f0011223344 in /opt/secrets.py")

    monkeypatch.setattr(server.llm, "chat_tokens", broken)
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": SECRET}]}
        reply = httpx.post(f"{server.url}{path}", json=body, headers={"x-api-key": KEY})
        assert reply.status_code == 500 and not LEAKS.search(reply.text) and SECRET not in reply.text
        number = re.search(r"internal error ([0-9a-f]{8})", reply.text)
        assert number and number[1] in caplog.text


@pytest.mark.reliability("S-11")
def test_what_fails_inside_a_page_is_a_number_for_clients(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError(f"{SECRET} at 0x7f0011223344 in /opt/secrets.py")

    monkeypatch.setattr(prometheus, "load", broken)
    reply = httpx.get(f"{server.url}/load", headers={"x-api-key": KEY})
    assert reply.status_code == 500 and not LEAKS.search(reply.text) and SECRET not in reply.text
    number = re.search(r"internal error ([0-9a-f]{8})", reply.json()["error"]["message"])
    assert number and number[1] in caplog.text


# -- memory [H-01] -----------------------------------------------------------------------------------------------------


@pytest.mark.reliability("H-01c")
def test_what_was_refused_is_freed_without_the_garbage_collector(server: ScriptedServer) -> None:
    """The server looks for garbage rarely: a body must not wait for that."""
    size, count = 1_000_000, 6
    refused = [
        ("/v1/completions", {"prompt": "a", "x" * size: 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * size}]}),
        ("/v1/messages", {"model": "tiny", "messages": "x" * size}),
        ("/v1/responses", {"input": "a", "tools": ["x" * size]}),
        ("/v1/embeddings", {"input": "x" * size, "dimensions": -8}),
        ("/tokenize", {"prompt": "x" * size}),
    ]
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        for path, body in refused:
            data = json.dumps(body).encode()

            def ask(path: str = path, data: bytes = data) -> None:
                reply = client.post(f"{server.url}{path}", content=data, headers={"content-type": "application/json"})
                assert reply.status_code == 400 and len(reply.content) < 2_000, path

            ask()
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                for _ in range(count):
                    ask()
                wait_until(lambda: tracemalloc.get_traced_memory()[0] < 2 * size, 5)
            finally:
                tracemalloc.stop()
                gc.enable()


# -- clocks [R-11] -----------------------------------------------------------------------------------------------------

# What is told to people or stored has the time of day; nothing is ever waited for or measured by it.
TIME_OF_DAY = {
    "server/service.py", "server/api/generation.py", "server/http/gate.py", "server/api/openai/responses_answer.py",
    "server/api/vllm/score.py", "server/api/openai/embeddings.py", "server/api/ollama/ollama_answers.py",
    "text/chat_template.py",
}
SPANS = {"server/observe/tracing.py"}            # a trace's times are of the day: what was measured, shifted when it is told
WATCHED = ("engine", "server", "text", "process", "scheduler", "cache", "runner", "grammar")


@pytest.mark.reliability("R-11")
def test_nothing_is_timed_by_the_time_of_day() -> None:
    """A clock that is set, or leaps, must not end a request."""
    users = set()
    for folder in WATCHED:
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if not re.search(r"\b(time\.time|datetime\.now)", text):         # parsing takes a hundred times as long
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns", "now"):
                    if ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now"):
                        users.add(file.relative_to(PACKAGE).as_posix())
    assert users <= TIME_OF_DAY | SPANS, users - TIME_OF_DAY
    for name in sorted(users - SPANS):
        for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.BinOp, ast.Compare)):
                assert not re.search(r"time\.time|datetime\.now", ast.unparse(node)), f"{name}:{node.lineno}"

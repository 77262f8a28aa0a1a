"""Requests that are odd and legal, or wrong in ways that clients have been seen to be wrong: what HTTP and JSON allow, nulls,
whole numbers written as floats, and errors that name the field as it was sent. On a scripted engine, over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest
from scripted_server import ScriptedServer, connect
from served_model import write_model

from ridgeline.errors import BadRequest
from ridgeline.sampling_params import ONLY_THE_LIKELIEST
from ridgeline.server.api.anthropic.messages_api import CountRequest, MessagesRequest
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.openai.embeddings import EmbeddingRequest
from ridgeline.server.api.openai.responses_request import ResponsesRequest
from ridgeline.server.api.vllm.score import ScoreRequest
from ridgeline.server.api.vllm.tokenize import DetokenizeRequest, TokenizeRequest
from ridgeline.server.http.body import parse_body

NAME = "tiny"
TEXT = "Good day to you"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES}
REQUIRED: dict[type[Any], dict[str, Any]] = {
    ChatRequest: CHAT, CompletionRequest: {"prompt": "Hi"}, MessagesRequest: {"model": NAME, "max_tokens": 4} | CHAT,
    CountRequest: {"model": NAME} | CHAT, ResponsesRequest: {"input": "Hi"}, EmbeddingRequest: {"input": "Hi"},
    ScoreRequest: {"text_1": "a", "text_2": "b"}, TokenizeRequest: {"prompt": "Hi"}, DetokenizeRequest: {"tokens": [1]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / NAME)
    with ScriptedServer(model, lambda prompt: TEXT) as made:
        yield made


def post(server: ScriptedServer, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, **options)


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.reliability("H-08e", "C-10")
@pytest.mark.parametrize("kind", REQUIRED, ids=lambda kind: kind.__name__)
def test_null_is_the_same_as_leaving_a_field_out(kind: type[Any]) -> None:
    plain = REQUIRED[kind]
    nulls = dict.fromkeys(kind.__struct_fields__) | plain
    assert len(nulls) > len(plain)
    assert parse_body(kind, json.dumps(nulls).encode()) == parse_body(kind, json.dumps(plain).encode())
    if kind is ChatRequest:
        assert parse_body(ChatRequest, json.dumps(nulls).encode()).template()["add_generation_prompt"] is True


@pytest.mark.reliability("H-08e")
def test_a_whole_number_may_be_written_as_a_float() -> None:
    asked = parse_body(ChatRequest, b'{"messages": [], "max_tokens": 16.0, "n": 2e0, "temperature": 1.0}')
    assert (asked.max_tokens, asked.n, asked.temperature) == (16, 2, 1.0)
    assert isinstance(asked.max_tokens, int) and isinstance(asked.temperature, float)
    wrong = {"1.5": "got float", "1e30": "got float", "[16.0]": "got array",
             '"16"': "got str", '16.0, "n": 1.5': "n: expected int"}
    for value, words in wrong.items():
        with pytest.raises(BadRequest, match=words):
            parse_body(ChatRequest, b'{"messages": [], "max_tokens": %b}' % value.encode())
    with pytest.raises(BadRequest, match="unknown field 'foo'"):             # told although another field made it read twice
        parse_body(ChatRequest, b'{"max_tokens": 16.0, "messages": [], "foo": 1}')


SCHEMA = {"json": {"const": 1.0}}
INTEGERS: dict[type[Any], list[dict[str, Any]]] = {      # wherever a body may have some
    ChatRequest: [{"max_tokens": 16, "stop_token_ids": [2, 3], "allowed_token_ids": [1], "structured_outputs": SCHEMA},
                  {"n": 2, "logit_bias": {"5": 1}, "chat_template_kwargs": {"a": 1.0}}],
    CompletionRequest: [{"prompt": [1, 2], "logit_bias": {"5": -1}}, {"prompt": [[1, 2], [3]]}, {"max_tokens": 4, "prompt": ""},
                        {"prompt": ["a"], "n": 3, "guided_json": {"minimum": 1.0}}],
    MessagesRequest: [{"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 4}, "top_k": 2}],
    CountRequest: [{"thinking": {"type": "enabled", "budget_tokens": 4}}],
    ResponsesRequest: [{"max_output_tokens": 5, "chat_template_kwargs": {"a": 1.0}}],
    EmbeddingRequest: [{"input": [1]}, {"input": [[1], [2, 3]]}, {"truncate_prompt_tokens": 2}],
    ScoreRequest: [{"priority": 1}],
    TokenizeRequest: [],
    DetokenizeRequest: [{"tokens": [1, 2]}],
}


def as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_floats(each) for name, each in value.items()}
    return [as_floats(each) for each in value] if isinstance(value, list) else float(value) if type(value) is int else value


@pytest.mark.parametrize("kind", REQUIRED, ids=lambda kind: kind.__name__)
def test_whole_numbers_may_be_floats_everywhere(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside others, and in fields that are lists or objects; what is of any type, a schema above all, stays as it is."""
    bodies = [REQUIRED[kind] | more for more in INTEGERS[kind]]
    assert bodies or "IntType" not in repr(msgspec.inspect.type_info(kind)).partition("chat_template_kwargs")[0]
    floats = [parse_body(kind, json.dumps(as_floats(body)).encode()) for body in bodies]
    monkeypatch.setattr("ridgeline.server.http.body._mend", None)                 # as usual bodies are read, once
    integers = [parse_body(kind, json.dumps(body).encode()) for body in bodies]
    assert list(map(repr, floats)) == list(map(repr, integers))              # 1 == 1.0, but they do not read alike


FLOAT_FIRST: dict[str, bytes] = {                        # the beginning of a body with a float for an integer
    "/v1/chat/completions": b'{"max_tokens": 16.0, "user": ', "/v1/completions": b'{"max_tokens": 16.0, "user": ',
    "/v1/messages": b'{"max_tokens": 16.0, "metadata": ', "/v1/responses": b'{"max_output_tokens": 16.0, "user": ',
    "/v1/messages/count_tokens": b'{"thinking": {"type": "enabled", "budget_tokens": 16.0}, "cache_control": ',
    "/v1/responses/input_tokens": b'{"max_output_tokens": 16.0, "user": ', "/v1/embeddings": b'{"priority": 1.0, "user": ',
    "/v1/score": b'{"priority": 1.0, "user": ', "/detokenize": b'{"tokens": [1.0], "model": ',
    "/tokenize": b'{"prompt": 1.0, "tools": ', "/v1/chat/completions/batch": b'{"max_tokens": 16.0, "user": ',
    "/api/chat": b'{"top_logprobs": 1.0, "keep_alive": ', "/api/generate": b'{"top_logprobs": 1.0, "keep_alive": ',
    "/api/embed": b'{"dimensions": 1.0, "keep_alive": ', "/api/embeddings": b'{"prompt": 1.0, "keep_alive": ',
    "/api/show": b'{"model": 1.0, "system": ', "/completion": b'{"n_predict": 16.0, "id_slot": ',
    "/completions": b'{"n_predict": 16.0, "id_slot": ', "/infill": b'{"n_predict": 1.0, "lora": ',
    "/apply-template": b'{"max_tokens": 16.0, "user": ', "/invocations": b'{"prompt": "a", "max_tokens": 16.0, "user": ',
}
BODILESS = "/v1/responses/{id}/cancel"


REST = {
    "half": b"", "no text": b'"\xff"}', "deep": b"[" * 100_000, "more": b'"a"} x', "surrogate": b'"\\ud800"}', "no word": b"nul}",
    "long number": b"1" * 5_000 + b"}", "huge number": b"1e999}",
}


@pytest.mark.parametrize("rest", REST.values(), ids=list(REST))
def test_a_body_that_is_malformed_after_a_float_is_a_bad_request(server: ScriptedServer, rest: bytes) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} - {BODILESS} == FLOAT_FIRST.keys()
    for path, start in FLOAT_FIRST.items():
        reply = httpx.post(server.url + path, content=start + rest, headers={"content-type": "application/json"})
        assert reply.status_code == 400, (path, reply.text)
        error = reply.json()["error"]
        said = {"type": "invalid_request_error", "message": error} if path.startswith("/api/") else error
        assert said["type"] == "invalid_request_error" and "\n" not in said["message"]


@pytest.mark.parametrize("kind", REQUIRED, ids=lambda kind: kind.__name__)
def test_a_word_that_is_none_of_a_few_is_told_which_there_are(kind: type[Any]) -> None:
    chosen = {name: hint for name, hint in get_type_hints(kind).items() if "Literal" in str(hint)}
    for name in chosen:
        if name in ("messages", "input", "tool_choice", "thinking", "output_config", "text"):
            continue                                     # which have them further inside
        with pytest.raises(BadRequest) as caught:
            parse_body(kind, json.dumps(REQUIRED[kind] | {name: "huge"}).encode())
        assert f"{name}: invalid enum value 'huge'; one of " in str(caught.value)


@pytest.mark.parametrize(("path", "body", "param", "words"), [
    ("embeddings", {"input": [[-1]]}, "input", "input must hold token ids (integers from 0 to 2147483647), got -1"),
    ("completions", {"prompt": [-1]}, "prompt", "prompt must hold token ids (integers from 0 to 2147483647), got -1"),
    ("completions", {"prompt": ""}, "prompt", "the prompt is empty"),
    ("embeddings", {"input": ""}, "input", "the prompt is empty"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages",
     "messages[0].content[0].text must be a text"),
    ("chat/completions", CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}, "bogus": 1},
                                 "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice",
     "tool_choice has the unknown field 'bogus'"),
    ("chat/completions", CHAT | {"function_call": {"name": "f", "x": 1}, "functions": [{"name": "f"}]}, "function_call",
     "function_call has the unknown field 'x'"),
])
def test_an_error_names_the_field_as_it_was_sent(server: ScriptedServer, path: str, body: Any, param: str, words: str) -> None:
    reply = post(server, path, body)
    told = reply.json()["error"]
    assert reply.status_code == 400 and told["param"] == param and words in told["message"], told


def test_a_top_p_of_zero_leaves_the_likeliest_token(server: ScriptedServer) -> None:
    """OpenAI's range begins at 0, and clients that want no chance in it send that."""
    assert post(server, "chat/completions", CHAT | {"top_p": 0}).status_code == 200
    assert server.llm.params[-1].top_p == ONLY_THE_LIKELIEST
    assert post(server, "responses", {"input": "Hi", "top_p": 0}).json()["top_p"] == 0
    assert post(server, "chat/completions", CHAT | {"top_p": -1e-9}).status_code == 400


def test_a_path_says_which_methods_it_takes(server: ScriptedServer) -> None:
    reply = httpx.get(f"{server.url}/v1/chat/completions")
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == "/v1/chat/completions does not take GET; POST works"
    assert reply.json()["error"]["code"] == "method_not_allowed"
    assert "does not take PUT; GET and HEAD work" in httpx.put(f"{server.url}/v1/models").json()["error"]["message"]
    assert "does not take GET; POST works" in httpx.get(f"{server.url}/v1/messages").json()["error"]["message"]


@pytest.mark.reliability("C-03")
@pytest.mark.parametrize("beside", [{}, {"logprobs": True, "return_token_ids": True}], ids=["text", "tokens"])
@pytest.mark.parametrize("how", [{}, {"max_tokens": 4}, {"stop": "day"}], ids=["end", "cut", "stop"])
def test_the_chunk_with_the_reason_has_nothing_else(server: ScriptedServer, how: dict[str, Any], beside: dict[str, Any]) -> None:
    """A loop that ends at the first reason it sees, as many are written, has all of the text by then, and all of its tokens."""
    how = how | beside
    told = post(server, "chat/completions", CHAT | how | {"stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in told.splitlines() if line.startswith("data: {")]
    (whole,) = post(server, "chat/completions", CHAT | how).json()["choices"]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
    assert chunks[-1]["delta"] == {} and chunks[-1]["logprobs"] is None and not chunks[-1].get("token_ids")
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks[:-1]) == whole["message"]["content"]
    if beside:
        entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert entries == whole["logprobs"]["content"]
        assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == whole["token_ids"]


def test_the_chunk_with_the_reason_of_a_completion_may_have_text(server: ScriptedServer) -> None:
    """As docs/server.md says: there the last token's text and the reason come together."""
    told = post(server, "completions", {"prompt": "Hi", "max_tokens": 4, "stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in told.splitlines() if line.startswith("data: {")]
    assert [(chunk["text"], chunk["finish_reason"]) for chunk in chunks][-2:] == [("o", None), ("d", "length")]


# -- HTTP --------------------------------------------------------------------------------------------------------------


def exchange(server: ScriptedServer, sent: bytes, more: bytes = b"") -> bytes:
    """All that comes back until the server closes; `more` is sent once something has come."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        got = [connection.recv(65536)]
        if more:
            connection.sendall(more)
        while part := connection.recv(65536):
            got.append(part)
    return b"".join(got)


def request(body: Any, version: str = "1.1", *headers: str) -> tuple[bytes, bytes]:
    """(head, body)."""
    written = json.dumps(body).encode()
    lines = [f"POST /v1/chat/completions HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    length = () if "Transfer-Encoding: chunked" in headers else (f"Content-Length: {len(written)}",)
    return "\r\n".join([*lines, *length, "", ""]).encode(), written


@pytest.mark.reliability("H-08e")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_http_1_0_has_no_chunks(server: ScriptedServer, stream: bool) -> None:
    """Some proxies ask in HTTP/1.0 unless told otherwise."""
    head, body = request(CHAT | {"stream": stream}, "1.0", "Connection: keep-alive")
    answer, _, content = exchange(server, head + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer.lower() and b"connection: close" in answer.lower()
    if not stream:
        assert json.loads(content)["choices"][0]["message"]["content"] == TEXT
        return
    lines = [line for line in content.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines) and lines[-1] == b"data: [DONE]"
    events = [msgspec.json.decode(line[6:]) for line in lines[:-1]]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == TEXT


@pytest.mark.reliability("H-08e")
def test_a_body_that_waits_for_leave_gets_it(server: ScriptedServer) -> None:
    head, body = request(CHAT, "1.1", "Expect: 100-continue", "Connection: close")
    answer = exchange(server, head, more=body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK") and TEXT.encode() in answer


@pytest.mark.parametrize("text", [rb"a\ud83d", rb"\ud83d and more text", rb"\udc00", rb"\ud83d\u0041", rb"a\ud83d\n"])
def test_a_text_that_was_cut_inside_a_character_is_told_so(text: bytes) -> None:
    """"Input data was truncated" sent its reader to look for a fault of the network."""
    with pytest.raises(BadRequest, match=r"not valid JSON: a text has half of a character"):
        parse_body(ChatRequest, b'{"messages": [{"role": "user", "content": "%b"}]}' % text)
    with pytest.raises(BadRequest, match="truncated"):
        parse_body(ChatRequest, b'{"messages": [{"role": "user", "content": "Hi"')


@pytest.mark.reliability("H-08e")
def test_http_1_0_has_no_leave_to_give(server: ScriptedServer) -> None:
    """A client of that time takes the first head for the answer's."""
    head, body = request(CHAT, "1.0", "Expect: 100-continue")
    answer = exchange(server, head + body)
    assert answer.startswith(b"HTTP/1.1 200 OK") and TEXT.encode() in answer


@pytest.mark.reliability("H-08e")
def test_a_body_in_chunks_of_a_byte(server: ScriptedServer) -> None:
    head, body = request(CHAT, "1.1", "Transfer-Encoding: chunked", "Connection: close")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = exchange(server, head + chunks)
    assert answer.startswith(b"HTTP/1.1 200 OK") and TEXT.encode() in answer


@pytest.mark.reliability("H-08e")
@pytest.mark.parametrize("headers", [
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAA"),
    ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"), ("Upgrade: TLS/1.3",),
    ("Transfer-Encoding: chunked", "Connection: upgrade", "Upgrade: h2c"),
], ids=["HTTP/2", "websocket", "not asked for", "chunks"])
def test_an_offer_of_another_protocol_is_ignored(server: ScriptedServer, headers: tuple[str, ...]) -> None:
    """The body is the request's, and no second request. Java's client offers HTTP/2 with the first request of a connection."""
    head, body = request(CHAT, "1.1", *headers)
    if "Transfer-Encoding: chunked" in headers:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    third = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    answer = exchange(server, head + body + b"".join(request(CHAT)) + third)
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b"HTTP/1.1 ") == 3 and answer.count(TEXT.encode()) == 2


@pytest.mark.reliability("H-08e")
@pytest.mark.parametrize("last", [1, 2, 3, 4], ids=lambda last: f"{last} bytes of its end come with the body")
def test_the_head_of_an_offer_may_end_in_another_packet(server: ScriptedServer, last: int) -> None:
    """The parser stops at the end of the head, and does not say where that was: the body that came with it must not be lost."""
    head, body = request(CHAT, "1.1", "Connection: Upgrade", "Upgrade: h2c")
    third = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + head[:-last])
        answer = connection.recv(65536)                  # the first part has been read
        connection.sendall(head[-last:] + body + third)
        while part := connection.recv(65536):
            answer += part
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b"HTTP/1.1 ") == 3 and answer.count(TEXT.encode()) == 1


@pytest.mark.reliability("H-08e")
@pytest.mark.parametrize("wrong", [
    "Content-Length: 0\r\nContent-Length: 44", "Content-Length: 0\r\nTransfer-Encoding: chunked", "X: a\r\n Content-Length: 44",
    "X: a\r\nNo colon\r\nContent-Length: 44", "Content-Length : 44", "X: a\nContent-Length: 44",
], ids=["two lengths", "a length and chunks", "a folded line", "no colon", "a space", "a bare line feed"])
def test_an_offer_with_a_wrong_head_is_refused(server: ScriptedServer, wrong: str) -> None:
    """Without the lines from the wrong one on it would be valid, and its body the next request."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n{wrong}\r\n\r\n"
    answer = exchange(server, head.encode() + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.reliability("H-08e")
@pytest.mark.parametrize("offer", ["", "Upgrade: h2c\r\n"], ids=["alone", "with an offer"])
@pytest.mark.parametrize("url", ["/health", "http://localhost/health", "localhost:80"])
def test_the_body_of_a_connect_is_no_request(server: ScriptedServer, url: str, offer: str) -> None:
    inner = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"CONNECT {url} HTTP/1.1\r\nHost: localhost\r\n{offer}Content-Length: {len(inner)}\r\n\r\n"
    answer = exchange(server, head.encode() + inner)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.reliability("H-08e")
def test_requests_that_do_not_wait_for_answers_are_answered_in_order(server: ScriptedServer) -> None:
    first, second = b"".join(request(CHAT | {"n": 1})), b"".join(request(CHAT | {"stream": True}))
    third = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(server, first + second + third)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b'"chat.completion"') < answer.index(b"[DONE]") < answer.index(b'"version"')


# -- the last answer of a connection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("path", "kind", "status"), [
    ("/v1/rerank", "application/json", b"404"), ("/v1/models", "application/json", b"405"),
    ("/v1/chat/completions", "text/plain", b"415"),
])
def test_an_answer_before_the_end_of_its_request_is_not_lost_with_the_connection(
    server: ScriptedServer, path: str, kind: str, status: bytes, version: str
) -> None:
    """The client has asked to close: proxies that speak HTTP/1.0 always do. A reset would take the reason with it."""
    size = 2_000_000
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    head += f"Content-Length: {size}\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head.encode() + b"x" * 100_000)
        reply = b""
        while part := connection.recv(65536):            # an end, not a reset
            reply += part
        connection.sendall(b"x" * 100_000)               # it is read, and dropped
    assert reply.split(b" ", 2)[1] == status and b"connection: close" in reply.lower() and reply.endswith(b"}")


def test_a_connection_closes_after_a_whole_request_that_asked_for_it(server: ScriptedServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = b""
        while part := connection.recv(65536):
            reply += part
    assert reply.startswith(b"HTTP/1.1 200") and reply.count(b"HTTP/1.1") == 1

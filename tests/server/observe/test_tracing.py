"""Traces: spans of requests as a collector gets them, and what happens where traces are not wanted or not possible."""

from __future__ import annotations

import builtins
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_model import ServerProcess, wait_until, write_model

from ridgeline.engine.client.outputs import CompletionOutput, RequestOutput
from ridgeline.errors import BadRequest, ConfigError
from ridgeline.metrics import RequestTimes
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.observe.tracing import MAX_SPANS, NoTracing, Tracing, described, phases, start_tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector:
    """A place that takes spans, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.paths: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                collector.paths.append(self.path)
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append({each.key: each.value.string_value for each in group.resource.attributes})
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def requests(self) -> list[Any]:
        return sorted((span for span in self.spans if span.name == "llm_request"), key=lambda span: span.start_time_unix_nano)

    def below(self, span: Any) -> list[Any]:
        return [each for each in self.spans if each.parent_span_id == span.span_id]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)


def values(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


# -- a server and its collector ----------------------------------------------------------------------------------------


def test_spans_of_a_server(collector: Collector, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    options = ["--load-format", "dummy", "--num-gpu-blocks-override", "200", "--otlp-traces-endpoint", collector.address]
    with ServerProcess(str(model), *options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        asked = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9}
        before = time.time_ns()
        client.post("/v1/completions", json=asked, headers={"traceparent": TRACEPARENT}).raise_for_status()
        after = time.time_ns()
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True, "n": 2, "stream": True}
        client.post("/v1/chat/completions", json=chat).raise_for_status()
        assert client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": -1}).status_code == 400
        with client.stream("POST", "/v1/completions", json=asked | {"max_tokens": 3000, "stream": True}) as reply:
            next(reply.iter_lines())                     # and gone
        wait_until(lambda: not client.get("/health").json()["requests"])
        client.post("/tokenize", json={"prompt": "Hello"}).raise_for_status()
    one, several, bad, left = collector.requests()       # the server sent the last of them as it ended
    assert set(collector.paths) == {"/v1/traces"} and collector.resources[0]["service.name"] == "ridgeline"

    assert one.trace_id.hex() == TRACE and one.parent_span_id.hex() == PARENT
    assert one.kind == 2 and one.status.code == 0        # a server's, and nothing was wrong
    assert before <= one.start_time_unix_nano <= after   # its end may come later: the client has its answer before
    assert one.start_time_unix_nano <= one.end_time_unix_nano <= time.time_ns()
    said = values(one)
    assert said["gen_ai.response.model"] == "tiny" and said["url.path"] == "/v1/completions"
    assert said["gen_ai.request.id"].startswith("cmpl-")
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.top_p"], said["gen_ai.request.max_tokens"]) == (0.5, 0.9, 5)
    assert (said["gen_ai.usage.prompt_tokens"], said["gen_ai.usage.completion_tokens"], said["gen_ai.request.n"]) == (5, 5, 1)
    assert 0 < said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]
    phases = {each.name: each for each in collector.below(one)}
    assert list(phases) == ["queue", "prefill", "decode"]
    assert phases["queue"].end_time_unix_nano == pytest.approx(phases["prefill"].start_time_unix_nano, abs=2)
    assert phases["prefill"].end_time_unix_nano == pytest.approx(phases["decode"].start_time_unix_nano, abs=2)
    assert one.start_time_unix_nano <= phases["queue"].start_time_unix_nano
    assert phases["decode"].end_time_unix_nano <= one.end_time_unix_nano
    assert values(phases["decode"])["gen_ai.usage.completion_tokens"] == 5

    assert not several.parent_span_id and several.trace_id != one.trace_id
    assert [each.name for each in collector.below(several)] == ["queue", "prefill", "decode", "decode"]
    assert bad.status.code == 2 and "max_tokens" in bad.status.message and not collector.below(bad)
    assert left.status.code == 2 and left.status.message == "the client has gone"
    assert 0 < values(left)["gen_ai.usage.completion_tokens"] < 3000
    assert not any("Hello" in str(span) for span in collector.spans), "prompts must not be sent"


# -- without one -------------------------------------------------------------------------------------------------------


def output(times: RequestTimes | None, *lengths: int) -> RequestOutput:
    answers = [CompletionOutput(index, token_ids=[1] * length, finish_reason="stop") for index, length in enumerate(lengths)]
    return RequestOutput("id", "", [1, 2, 3], answers, metrics=times)


def timed(started: float = 2.0, first: float = 3.0, last: float = 7.0, answers: int = 1) -> RequestTimes:
    times = RequestTimes(1.0, 1.5, 3, answers)
    times.started, times.first, times.last, times.first_seen = started, [first] * answers, [last] * answers, first
    times.tokens = [4] * answers
    return times


def test_attributes_are_those_of_vllm() -> None:
    found = described(SamplingParams(max_tokens=8), [output(timed(), 4)])
    assert found["gen_ai.latency.time_in_queue"] == 0.5 and found["gen_ai.latency.time_to_first_token"] == 2.0
    assert found["gen_ai.latency.time_in_model_prefill"] == 1.0 and found["gen_ai.latency.time_in_model_decode"] == 4.0
    assert found["gen_ai.latency.time_in_model_inference"] == 5.0 and found["gen_ai.latency.e2e"] == 6.0
    assert found["gen_ai.response.finish_reasons"] == ["stop"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (None, []),
        (timed(0.0, 0.0, 0.0), []),
        (timed(2.0, 0.0, 0.0), ["queue"]),
        (timed(), ["queue", "prefill", "decode"]),
        (timed(answers=3), ["queue", "prefill", "decode", "decode", "decode"]),
    ],
)
def test_what_has_not_happened_is_no_span(times: RequestTimes | None, expected: list[str]) -> None:
    assert [name for name, _, _, _ in phases([output(times, 4)])] == expected
    described(SamplingParams(), [output(times, 4)])


def test_spans_below_a_request_are_limited_and_errors_named() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "m")
    with tracing.request():
        tracing.ran("r", SamplingParams(), [output(timed(answers=500), 4)])
    with pytest.raises(BadRequest), tracing.request():
        raise BadRequest("n must be at least 1")
    with pytest.raises(ValueError), tracing.request():
        raise ValueError("the prompt was 'Hello'")
    tracing.ran("r", SamplingParams(), [output(timed(), 4)])     # outside of any request
    tracing.close()
    spans = exporter.get_finished_spans()
    assert len(spans) == MAX_SPANS + 3
    assert [span.status.description for span in spans[-2:]] == ["n must be at least 1", "ValueError"]


def test_a_bad_traceparent_begins_a_trace_of_its_own() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "m")
    for given in (b"", b"nonsense", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"\xff" * 60):
        tracing.note({"headers": [(b"traceparent", given)], "path": "/v1/completions"})
        with tracing.request():
            pass
    tracing.close()
    spans = exporter.get_finished_spans()
    assert len(spans) == 4 and all(span.parent is None for span in spans)


def test_a_collector_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter

    asked, answers, ended = threading.Event(), threading.Event(), threading.Event()

    class Silent(SpanExporter):
        def export(self, spans: Any) -> Any:
            asked.set()
            answers.wait(60)
            ended.set()

    monkeypatch.setattr("ridgeline.server.observe.tracing._FLUSH_SECONDS", 0.05)
    tracing = Tracing(Silent(), "m")
    with tracing.request():
        tracing.ran("r", SamplingParams(), [output(timed(), 4)])
    tracing.close()
    assert not ended.is_set() and asked.wait(60)
    answers.set()


def test_an_endless_answer_of_a_collector_is_not_read() -> None:
    """The exporter's library reads an answer to its end: what listens at the endpoint could fill the memory."""
    most, sent, ended = 64 << 20, [0], threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while sent[0] < most:
                connection.sendall(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
                sent[0] += 65_536
        ended.set()

    threading.Thread(target=answer, daemon=True).start()
    tracing = start_tracing(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
    with tracing.request():
        tracing.ran("r", SamplingParams(), [output(timed(), 4)])
    tracing.close()
    assert ended.wait(60) and sent[0] < most
    listener.close()


# -- on or off ---------------------------------------------------------------------------------------------------------


def test_off_is_the_default_and_needs_no_packages() -> None:
    assert type(start_tracing("", "m")) is NoTracing
    code = "import sys; from ridgeline.server import app; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_variables_switch_it_on(name: str, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, collector.address)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = start_tracing("", "m")
    with tracing.request():
        pass
    tracing.close()
    assert len(collector.requests()) == 1 and collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "mine"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert type(start_tracing("", "m")) is NoTracing


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4317", "http://", "/v1/traces"])
def test_an_endpoint_that_cannot_be_used(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:4318/v1/traces"):
        start_tracing(endpoint, "m")


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"http/protobuf.*not 'grpc'"):
        start_tracing("http://localhost:4317", "m")


def test_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'ridgeline\[otel\]'"):
        start_tracing("http://localhost:4318/v1/traces", "m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    assert type(start_tracing("", "m")) is NoTracing     # only a machine-wide variable asks for it: a warning is enough

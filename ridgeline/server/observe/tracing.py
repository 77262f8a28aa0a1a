"""OpenTelemetry traces: a span for each request that generates, with its wait, its prefill and its decode below it.

    llm_request ┬ queue      handed to the engine ─ first step begins
                ├ prefill    … ─ the step that sampled the first token ends
                └ decode     … ─ the step that sampled the last one ends        one for each answer

A request whose client sends a `traceparent` becomes part of that trace. Names and attributes are vLLM's; prompts and answers
are never sent. Spans are made when a request has ended, from the times that the metrics take anyway. Tracing is off by default:
then an object that does nothing stands in, and the packages need not be installed.
"""

from __future__ import annotations

import io
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.errors import ConfigError, RequestError
from ridgeline.metrics import RequestTimes
from ridgeline.process.log import get_logger
from ridgeline.sampling_params import SamplingParams
from ridgeline.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = get_logger("server")

HEADERS = (b"traceparent", b"tracestate")
MAX_SPANS = 64                       # per request: hundreds of answers need no span each
_PATH = "/v1/traces"                 # where collectors listen, by the specification
_MOST_ANSWER = 65_536                # bytes of a collector's answer
_OWN_SESSION = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"           # the operator's own connections
_FLUSH_SECONDS = 3.0                 # how long a collector that does not answer may delay the end
_MISSING = "traces need the OpenTelemetry packages, which are not installed: pip install 'ridgeline[otel]'"


class NoTracing:
    """Off."""

    def note(self, scope: Mapping[str, Any]) -> None:
        """Note the headers of the request that has just arrived."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around all work for the request noted last."""
        yield

    def ran(self, request_id: str, params: SamplingParams, outputs: Sequence[RequestOutput]) -> None:
        """The request's parameters and its answers, complete or not."""

    def close(self) -> None:
        """Send the remaining spans."""


class Tracing(NoTracing):
    """On. Spans are handed to `exporter` by a thread, in batches; more than it can take are dropped."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "ridgeline"}
        self._trace = trace
        self._model = model
        self._provider = TracerProvider(resource=Resource.create(named))       # plus OTEL_RESOURCE_ATTRIBUTES
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ridgeline", __version__)
        self._read = TraceContextTextMapPropagator().extract
        self._scope: ContextVar[Mapping[str, Any] | None] = ContextVar("scope", default=None)
        self._span: ContextVar[Span | None] = ContextVar("span", default=None)

    def note(self, scope: Mapping[str, Any]) -> None:
        self._scope.set(scope)

    @contextmanager
    def request(self) -> Iterator[None]:
        scope = self._scope.get() or {}
        given = {name.decode(): value.decode("latin-1") for name, value in scope.get("headers", []) if name in HEADERS}
        attributes = {"gen_ai.response.model": self._model, "url.path": scope.get("path", "")}
        span = self._tracer.start_span(
            "llm_request", self._read(given), self._trace.SpanKind.SERVER, attributes, start_time=time.time_ns()
        )
        token = self._span.set(span)
        try:
            yield
        except Exception as error:
            # A request error has words of our own; any other may quote a client's text, so only its type is sent.
            words = str(error) if isinstance(error, RequestError) else ""
            span.set_status(self._trace.StatusCode.ERROR, words or type(error).__name__)
            span.set_attribute("error.type", type(error).__name__)
            raise
        except BaseException:                            # cancelled: its client left
            span.set_status(self._trace.StatusCode.ERROR, "the client has gone")
            span.set_attribute("error.type", "aborted")
            raise
        finally:
            self._span.reset(token)
            span.end()

    def ran(self, request_id: str, params: SamplingParams, outputs: Sequence[RequestOutput]) -> None:
        span = self._span.get()
        if span is None or not span.is_recording():
            return
        span.set_attributes({"gen_ai.request.id": request_id} | described(params, outputs))
        wall = time.time_ns() - time.monotonic_ns()
        parent = self._trace.set_span_in_context(span)
        for name, begin, end, attributes in phases(outputs)[:MAX_SPANS]:
            child = self._tracer.start_span(name, parent, attributes=attributes, start_time=wall + int(begin * 1e9))
            child.end(wall + int(end * 1e9))

    def close(self) -> None:
        # In a thread: the exporter retries while a collector does not answer.
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)


def described(params: SamplingParams, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """A request's attributes. With several prompts or answers the longest times, as they ran in parallel."""
    answers = [answer for output in outputs for answer in output.outputs]
    found: dict[str, Any] = {
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "gen_ai.usage.completion_tokens": sum(len(answer.token_ids) for answer in answers),
        "gen_ai.response.finish_reasons": [answer.finish_reason or "abort" for answer in answers][:MAX_SPANS],
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    return found | _latencies(outputs)


def _latencies(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    times = [(each, index) for each in _times(outputs) for index, first in enumerate(each.first) if first]
    if not times:
        return {}
    return {
        "gen_ai.latency.time_in_queue": max(each.queue for each, _ in times),
        "gen_ai.latency.time_to_first_token": min(each.first_seen - each.arrived for each, _ in times),
        "gen_ai.latency.time_in_model_prefill": max(each.prefill(index) for each, index in times),
        "gen_ai.latency.time_in_model_decode": max(each.decode(index) for each, index in times),
        "gen_ai.latency.time_in_model_inference": max(each.prefill(index) + each.decode(index) for each, index in times),
        "gen_ai.latency.e2e": max(each.last[index] - each.arrived for each, index in times),
    }


def phases(outputs: Sequence[RequestOutput]) -> list[tuple[str, float, float, dict[str, Any]]]:
    """(name, begin, end, attributes) of each phase that has happened, by time.monotonic()."""
    found: list[tuple[str, float, float, dict[str, Any]]] = []
    for times in _times(outputs):
        if not times.started:
            continue
        found.append(("queue", times.sent, times.started, {}))
        firsts = [first for first in times.first if first]
        if firsts:
            found.append(("prefill", times.started, min(firsts), {"gen_ai.usage.prompt_tokens": times.num_prompt}))
        for index, first in enumerate(times.first):
            if first:
                said = {"gen_ai.usage.completion_tokens": times.tokens[index], "ridgeline.answer": index}
                found.append(("decode", first, times.last[index], said))
    return found


def _times(outputs: Sequence[RequestOutput]) -> list[RequestTimes]:
    return [output.metrics for output in outputs if output.metrics is not None]


# -- on or off ---------------------------------------------------------------------------------------------------------


def start_tracing(endpoint: str, model: str) -> NoTracing:
    """On if an endpoint is given, here or by the OTEL variables; ConfigError if it cannot be used."""
    given = endpoint or _from_environment()
    if not given or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return NoTracing()
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    try:
        place = urllib.parse.urlsplit(given)
    except ValueError:                                   # half an IPv6 address
        place = urllib.parse.urlsplit("")
    if place.scheme not in ("http", "https") or not place.hostname or protocol not in ("", "http/protobuf"):
        raise ConfigError(
            f"traces are sent as http/protobuf: give otlp_traces_endpoint as http://HOST:4318{_PATH}, not {protocol or given!r}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        if endpoint:
            raise ConfigError(_MISSING) from None
        logger.warning("%s", _MISSING)                   # a machine-wide variable must not keep the server from starting
        return NoTracing()
    path = place.path if place.path.strip("/") else _PATH
    session = None if _OWN_SESSION in os.environ else _frugal_session()
    return Tracing(OTLPSpanExporter(endpoint=place._replace(path=path).geturl(), session=session), model)


def _frugal_session() -> Any:
    """A session that reads no long answers: the exporter reads them whole and uses none, so that a collector (or what else
    listens there) could fill this process's memory."""
    import requests
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def send(self, *args: Any, **settings: Any) -> Any:
            answer = super().send(*args, **settings)
            stream, said = answer.raw, answer.headers.get("Content-Length", "")
            body = stream.read(_MOST_ANSWER) if said.isdigit() and len(said) < 6 and int(said) <= _MOST_ANSWER else None
            if body is None:
                stream.close()                           # the rest is not waited for
            else:
                stream.release_conn()
            answer.raw = io.BytesIO(body or b"")
            return answer

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    return session


def _from_environment() -> str:
    """The variables of the specification; the general one is the base of all signals, with traces at a path below it."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or (general and general.rstrip("/") + _PATH)

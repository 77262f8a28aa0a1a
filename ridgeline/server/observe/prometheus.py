"""`/metrics` and `/load`: the numbers of ridgeline.metrics under vLLM's names, and a request's own times.

The text is written here rather than by prometheus-client: importing that costs the server 90 ms at its start, and
observing through it 3.5 µs, several times what a token may cost. Every sample has the labels model_name and engine, whose
values are the server's: no text from a client becomes a label.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.draft_options import MOST_DRAFTS, draft_options
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest
from ridgeline.gpus.clocks import POWER, TEMPERATURE, Clocks
from ridgeline.metrics import SLOW_CAUSES, WASTE_CAUSES, Histogram, RequestTimes, ServingMetrics
from ridgeline.roofline.verdict import TERMS
from ridgeline.server.http.gate import LOG
from ridgeline.server.http.stream import InPieces
from ridgeline.server.observe import roofline_endpoint
from ridgeline.version import __version__

TEXT = "text/plain; version=0.0.4; charset=utf-8"
TIMINGS_HEADER = b"x-ridgeline-timings"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Labels = Mapping[str, str]


@dataclass(slots=True)
class Family:
    """A metric: its name without suffixes such as _total, and its samples with their further labels."""

    name: str
    kind: str                        # gauge, counter or histogram
    help: str
    samples: list[tuple[Labels, float | Histogram]] = field(default_factory=list)


class Families:
    """Families in the making, in the order of docs/metrics.md."""

    def __init__(self) -> None:
        self.made: list[Family] = []

    def add(self, kind: str, name: str, text: str, *samples: float | Histogram | tuple[Labels, float]) -> None:
        labelled = [each if isinstance(each, tuple) else ({}, each) for each in samples]
        self.made.append(Family(name, kind, text, labelled))


def by(label: str, values: Iterable[tuple[str, float]]) -> list[tuple[Labels, float]]:
    """Samples that differ in one label."""
    return [({label: name}, value) for name, value in values]


def families(llm: AsyncLLM) -> list[Family]:
    """All metrics of one engine with their present values."""
    found = Families()
    _add_vllm_metrics(llm, found.add)
    _add_engine_metrics(llm, found.add)
    _add_roofline_metrics(llm, found.add)
    return found.made


def of_all_engines(llm: AsyncLLM) -> list[Family]:
    """Each sample has the number of its engine in the label `engine`. No sums: those of Prometheus would count twice."""
    made = [families(engine) for engine in llm.engines]
    for number, each in enumerate(made):
        for family in each:
            family.samples = [({"engine": str(number), **labels}, value) for labels, value in family.samples]
    for joined, *others in zip(*made, strict=True):      # every engine has the same families
        for family in others:
            joined.samples += family.samples
    return made[0]


def _add_vllm_metrics(llm: AsyncLLM, add: Callable[..., None]) -> None:
    """Those that vLLM has too, under its names."""
    metrics, engine, ready = llm.metrics, llm.metrics.engine, llm.ready
    num_blocks = ready.num_blocks if ready else 0
    waiting = engine.waiting if llm.state == "ok" else llm.load.open_answers      # without an engine, all requests wait
    full = 1 - llm.free_blocks / num_blocks if num_blocks else 0.0
    add("gauge", "vllm:num_requests_running", "Sequences in the running batch.", llm.running)
    add("gauge", "vllm:num_requests_waiting", "Sequences that wait for a place in the batch.", waiting)
    add("gauge", "vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences hold, from 0 to 1.", full)
    add("counter", "vllm:num_preemptions", "Sequences preempted: others got their KV blocks.", metrics.counter("preemptions"))
    add("counter", "vllm:prompt_tokens", "Prompt tokens of requests that began to answer.", metrics.prompt_tokens)
    add("counter", "vllm:generation_tokens", "Tokens of answers.", metrics.generation_tokens)
    add("counter", "vllm:request_success", "Finished answers, by reason.", *by("finished_reason", metrics.finished.items()))
    add("counter", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", metrics.counter("prefix_queries"))
    add("counter", "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", metrics.counter("prefix_hits"))
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From a request's arrival to its first token, in the front end.", metrics.first_token),
        ("inter_token_latency_seconds", "Between two tokens of an answer, in the engine.", metrics.inter_token),
        ("request_time_per_output_token_seconds", "Mean time between an answer's tokens.", metrics.per_output_token),
        ("e2e_request_latency_seconds", "From a request's arrival to its answer's end, in the front end.", metrics.e2e),
        ("request_queue_time_seconds", "From handing a request to the engine to its first step.", metrics.queue),
        ("request_prefill_time_seconds", "From its first step to the end of the one with its first token.", metrics.prefill),
        ("request_decode_time_seconds", "From an answer's first token to its last.", metrics.decode),
        ("request_inference_time_seconds", "Prefill and decode.", metrics.inference),
        ("request_prompt_tokens", "Prompt tokens of a finished request.", metrics.request_prompt_tokens),
        ("request_generation_tokens", "Tokens of a finished answer.", metrics.request_generation_tokens),
        ("iteration_tokens_total", "Tokens computed by a step.", metrics.step_tokens),
    ):
        add("histogram", f"vllm:{name}", text, histogram)
    cache = llm.config.cache
    info = {
        "block_size": str(cache.block_size),
        "cache_dtype": ready.kv_dtype if ready else str(cache.kv_cache_dtype),
        "enable_prefix_caching": str("prefix caching" in ready.techniques if ready else cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        "num_gpu_blocks": str(num_blocks),
    }
    add("gauge", "vllm:cache_config_info", "The KV cache's settings, in the labels.", (info, 1))
    if draft_options(llm.config.execution.speculative_config).on:
        _add_speculation(metrics, add)


def _add_speculation(metrics: ServingMetrics, add: Callable[..., None]) -> None:
    """As vLLM, only where speculation is on. A draft is a row's drafts in one step."""
    prefix, count = "vllm:spec_decode_num", metrics.counter
    add("counter", f"{prefix}_drafts", "Rows of steps that had drafts.", count("drafts"))
    add("counter", f"{prefix}_draft_tokens", "Drafts verified.", count("draft_tokens"))
    add("counter", f"{prefix}_accepted_tokens", "Drafts accepted.", count("accepted_tokens"))
    places = by("position", [(str(place), count(f"accepted_at_{place}")) for place in range(MOST_DRAFTS)])
    add("counter", f"{prefix}_accepted_tokens_per_pos", "Drafts accepted, by position.", *places)
    add("counter", "ridgeline:draft_probes", "Steps that had drafts only to learn whether they pay.", count("draft_probes"))


def _add_engine_metrics(llm: AsyncLLM, add: Callable[..., None]) -> None:
    metrics, wait = llm.metrics, llm.predicted_wait() or 0.0
    add("histogram", "ridgeline:step_seconds", "Time of a step, including the work between steps.", metrics.step_seconds)
    slow = by("cause", [(cause, metrics.slow_steps(cause)) for cause in SLOW_CAUSES])
    add("counter", "ridgeline:slow_steps", "Steps that took over three times the median, by cause.", *slow)
    wasted = by("cause", [(cause, metrics.counter(cause)) for cause in WASTE_CAUSES])
    add("counter", "ridgeline:wasted_tokens", "Tokens computed in vain, by cause.", *wasted)
    add("counter", "ridgeline:useful_tokens", "Tokens computed for the first time.", metrics.counter("useful"))
    add("counter", "ridgeline:steps", "Steps planned.", metrics.counter("steps"))
    misfits = metrics.counter("out_of_memory")
    add("counter", "ridgeline:steps_out_of_memory", "Steps that did not fit into memory and were tried again.", misfits)
    add("counter", "ridgeline:kv_slots_held", "KV slots that sequences held, summed over steps.", metrics.counter("held_slots"))
    add("counter", "ridgeline:kv_slots_used", "KV slots that held a token, summed over steps.", metrics.counter("used_slots"))
    add("counter", "ridgeline:kv_blocks_evicted", "Cached blocks reused for others.", metrics.counter("evicted_blocks"))
    add("counter", "ridgeline:slow_masks", "Grammar masks filled while steps went on.", metrics.counter("slow_masks"))
    add("counter", "ridgeline:rows_left_out", "Rows that ran again: no mask in time.", metrics.counter("left_out"))
    add("counter", "ridgeline:graph_replays", "Steps that replayed a captured CUDA graph.", metrics.counter("graph_replays"))
    captures = metrics.counter("graph_captures")
    add("counter", "ridgeline:graph_captures", "CUDA graphs captured, in a step or while idle.", captures)
    add("counter", "ridgeline:graph_recordings", "The old name of ridgeline:graph_captures.", captures)
    compiles = metrics.counter("kernel_compiles")
    add("counter", "ridgeline:kernel_compiles", "Kernels compiled because the cache had none.", compiles)
    add("counter", "ridgeline:requests_aborted", "Requests aborted, by a client that left or by the server.", metrics.aborted)
    add("counter", "ridgeline:engine_restarts", "Engines restarted after a death or a hang.", llm.num_restarts)
    add("counter", "ridgeline:requests_moved", "Requests that went on in another engine when this one was lost.", llm.num_moved)
    add("gauge", "ridgeline:engine_up", "1 while the engine accepts requests.", int(llm.is_alive))
    add("gauge", "ridgeline:queued_prompt_tokens", "Prompt tokens that wait to start.", llm.load.waiting_tokens)
    add("gauge", "ridgeline:predicted_wait_seconds", "Predicted wait of a request sent now; also 0 while unknown.", wait)


def _add_roofline_metrics(llm: AsyncLLM, add: Callable[..., None]) -> None:
    live = roofline_endpoint.look(llm)
    used = live.total
    add("gauge", "ridgeline:mfu", "Useful FLOPs divided by the measured peak, while busy; last 10 s.", used.mfu)
    add("gauge", "ridgeline:hfu", "The same, counting FLOPs computed in vain.", used.hfu)
    add("gauge", "ridgeline:mbu", "Bytes of weights and KV divided by the measured bandwidth, while busy; last 10 s.", used.mbu)
    gap = [("padding", used.padding), ("recomputation", used.recomputation), ("rejected", used.rejected)]
    add("gauge", "ridgeline:wasted_flops_share", "Share of the FLOPs computed in vain, by cause.", *by("cause", gap))
    bound = [(term, int(term == live.verdict.term)) for term in TERMS]
    add("gauge", "ridgeline:bound", "1 for the resource that limits the engine, 0 for the others.", *by("term", bound))
    add("gauge", "ridgeline:roof_headroom", "Speed-up if every op reached its roof.", live.verdict.headroom)
    parts = by("part", live.split.items())
    share = "Shares of the busy time: compute, memory, kernels below their roof, overhead, other programs."
    add("gauge", "ridgeline:step_time_share", share, *parts)
    rates = llm.roofline.rates
    add("gauge", "ridgeline:peak_read_bytes_per_second", "Measured bandwidth; 0 while not measured.", rates.read_bytes_s)
    add("gauge", "ridgeline:peak_flops_per_second", "Measured matrix rate; 0 while not measured.", rates.flops_s)
    _add_clocks(live.window.clocks, add)
    add("gauge", "ridgeline:build_info", "The version, in the label.", ({"version": __version__}, 1))


def _add_clocks(clocks: Clocks | None, add: Callable[..., None]) -> None:
    """0 where nothing ran, and where the driver does not tell."""
    gauges = {
        "power_watts": ("Power of the GPU, while busy; last 10 s.", clocks and clocks.watts),
        "power_limit_watts": ("Enforced power limit of the GPU.", clocks and clocks.limit_w),
        "sm_clock_hertz": ("SM clock of the GPU, while busy; last 10 s.", clocks and clocks.sm_mhz * 1e6),
        "max_sm_clock_hertz": ("Highest SM clock of the GPU.", clocks and clocks.max_sm_mhz * 1e6),
        "temperature_celsius": ("Temperature of the GPU, while busy; last 10 s.", clocks and clocks.temperature_c),
    }
    for name, (text, value) in gauges.items():
        add("gauge", f"ridgeline:gpu_{name}", text, value or 0.0)
    shares = [(POWER, clocks.power_capped if clocks else 0.0), (TEMPERATURE, clocks.heat_capped if clocks else 0.0)]
    text = "Share of the time, while busy, in which a reason lowered the SM clock; last 10 s."
    add("gauge", "ridgeline:gpu_clock_limited_share", text, *by("reason", shares))


# -- text --------------------------------------------------------------------------------------------------------------


def written(made: list[Family], common: Labels, openmetrics: bool = False) -> str:
    """The families as Prometheus reads them, or as OpenMetrics, where a counter's family has no _total in its name."""
    lines: list[str] = []
    for family in made:
        total = "_total" if family.kind == "counter" else ""
        name = family.name if openmetrics else family.name + total
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for labels, value in family.samples:
            own = ",".join(f'{label}="{_escaped(text)}"' for label, text in (*common.items(), *labels.items()))
            if isinstance(value, Histogram):
                lines += _buckets(family.name, own, value)
            else:
                lines.append(f"{family.name}{total}{{{own}}} {_number(value)}")
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _buckets(name: str, labels: str, histogram: Histogram) -> list[str]:
    lines, below = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        lines.append(f'{name}_bucket{{{labels},le="{_bound(bound)}"}} {below}')
    return [*lines, f"{name}_count{{{labels}}} {below}", f"{name}_sum{{{labels}}} {_number(histogram.sum)}"]


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(float(value))


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def metrics_response(llm: AsyncLLM, model: str, request: Request) -> Response:
    """GET /metrics. Answers without an engine too: earlier counts stay true."""
    openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
    text = written(of_all_engines(llm), {"model_name": model}, openmetrics)
    return InPieces(text, headers={"content-type": OPENMETRICS if openmetrics else TEXT})


# -- load --------------------------------------------------------------------------------------------------------------


class Load(msgspec.Struct):
    server_load: int                 # vLLM's name: open requests
    running: int
    waiting: int                     # answers without a first token
    queued_tokens: int               # of the prompts of those
    predicted_wait: float | None     # seconds before a request sent now would begin; None: not known yet


def load(llm: AsyncLLM) -> Load:
    wait = llm.predicted_wait()
    predicted = None if wait is None else round(wait, 3)
    return Load(llm.num_open, llm.running, llm.load.waiting_answers, llm.load.waiting_tokens, predicted)


# -- one request's times -----------------------------------------------------------------------------------------------


class Timings(msgspec.Struct):
    """Seconds. With several prompts or answers the longest time counts, as they ran in parallel; counts are sums."""

    queue: float
    prefill: float
    first_token: float
    decode: float
    total: float                     # from the arrival to the last step's end
    tokens_per_second: float | None  # of all answers, while they decoded
    cached_tokens: int
    techniques: list[str]


def timings(llm: AsyncLLM, outputs: list[RequestOutput]) -> Timings:
    """The times of these answers; call it when they are complete."""
    known = [output.metrics for output in outputs if output.metrics is not None]
    techniques = _techniques_used(llm, known)
    cached = sum(output.num_cached_tokens for output in outputs)
    answers = [(times, index) for times in known for index, first in enumerate(times.first) if first]
    if not answers:
        return Timings(0.0, 0.0, 0.0, 0.0, 0.0, None, cached, techniques)
    began = min(times.first[index] for times, index in answers)
    ended = max(times.last[index] for times, index in answers)
    more = sum(times.tokens[index] - 1 for times, index in answers)
    return Timings(
        queue=_round(max(times.queue for times, _ in answers)),
        prefill=_round(max(times.prefill(index) for times, index in answers)),
        first_token=_round(min(times.first_seen - times.arrived for times, _ in answers)),
        decode=_round(ended - began),
        total=_round(max(times.last[index] - times.arrived for times, index in answers)),
        tokens_per_second=round(more / (ended - began), 2) if ended > began else None,
        cached_tokens=cached,
        techniques=techniques,
    )


def _techniques_used(llm: AsyncLLM, requests: list[RequestTimes]) -> list[str]:
    off = {name for times in requests for name in times.off}
    return [name for name in (llm.ready.techniques if llm.ready else []) if name not in off]


def _round(seconds: float) -> float:
    return round(seconds, 6)


# -- what a request asks for -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    arrived: float = 0.0
    timings: bool = False
    log: dict[str, Any] | None = None    # the request's entry in the access log


_ASKED: ContextVar[_Asked] = ContextVar("asked", default=_Asked())  # noqa: B039 (it cannot change)


def note_arrival(scope: Mapping[str, Any]) -> None:
    """The body has arrived: the client's wait begins now. Kept for the task that answers."""
    given = next((value for name, value in scope["headers"] if name == TIMINGS_HEADER), b"")
    _ASKED.set(_Asked(time.monotonic(), given.strip().lower() in (b"1", b"true"), scope.get(LOG)))


def arrived() -> float:
    return _ASKED.get().arrived


def wants_timings(asked: bool | None) -> bool:
    """The body's `return_timings` decides; without it the header, in every dialect."""
    return _ASKED.get().timings if asked is None else asked


def with_timings(body: bytes, llm: AsyncLLM, outputs: list[RequestOutput]) -> bytes:
    """A JSON object with one more member, in any dialect: clients ignore members they do not know."""
    return body[:-1] + b',"timings":' + msgspec.json.encode(timings(llm, outputs)) + b"}"


def note_in_log(llm: AsyncLLM, outputs: list[RequestOutput]) -> None:
    """Tokens, finish reasons and times for the access log, also of unfinished answers."""
    log = _ASKED.get().log
    if log is not None:
        answers = [answer for output in outputs for answer in output.outputs]
        log["prompt_tokens"] = sum(len(output.prompt_token_ids) for output in outputs)
        log["completion_tokens"] = sum(len(answer.token_ids) for answer in answers)
        log["finish_reasons"] = sorted({answer.finish_reason or "abort" for answer in answers})
        log["timings"] = timings(llm, outputs)


def switched(llm: AsyncLLM, caller: Caller, techniques: Mapping[str, bool] | None) -> Caller:
    """The caller, with techniques off that this request wants off. BadRequest for one that a request cannot switch."""
    for name, wanted in (techniques or {}).items():
        if name != "prefix_caching":
            raise BadRequest(f"techniques.{name[:40]} cannot be switched by a request; prefix_caching can", field="techniques")
        if wanted and not (llm.ready and "prefix caching" in llm.ready.techniques):
            raise BadRequest("techniques.prefix_caching cannot be true: this server runs without it", field="techniques")
        caller = replace(caller, prefix_caching=wanted)
    return caller

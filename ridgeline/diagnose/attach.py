"""Diagnoses a running server from outside, from its counters over some seconds and its own roofline.

Reads `GET /metrics` before and after, and `GET /roofline` in between and at the end; sends no generation requests. Latencies
come from histograms, so percentiles are interpolated within a bucket, and the share of requests that met all objectives at
once is known only as a range. Kernels are not visible from outside: with the admin socket, the engine profiles some of its
steps (`take_profile`).
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.bench.load.http_client import bearer
from ridgeline.bench.load.latency import Slo
from ridgeline.errors import ConfigError, one_line
from ridgeline.gpus.clocks import Clocks, shown
from ridgeline.roofline import drill
from ridgeline.roofline.facts import PartFacts, facts_of
from ridgeline.roofline.patterns import find_patterns
from ridgeline.roofline.remedies import ranked
from ridgeline.roofline.slow import StepTimes
from ridgeline.roofline.trace import read_trace
from ridgeline.roofline.verdict import Change, Verdict

LONGEST_SECONDS = 120.0              # a server keeps its steps for this long
_LOOK_SECONDS = 2.0                  # between two reads: the server returns its newest 512 steps
_MOST_BYTES = 64 << 20               # of an answer
_TIMEOUT = 10.0
_REMEMBERED = 512                    # steps in one answer
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(slots=True)
class Attached:
    tree: dict[str, Any]
    points: list[dict[str, Any]]     # steps, for a trace and for plots
    model: str
    verdict: Verdict

    def take_profile(self, document: Mapping[str, Any], costs: Mapping[str, PartFacts], overhead: float) -> float:
        """Adds the engine's own profile of some steps to the tree; returns the seconds that the profiler cost."""
        machine, batch = self.tree["machine"], self.tree["batch"]
        trace = read_trace(document)
        steps = trace.steps
        spent = sum(step.end - step.start for step in steps) * 1e-6 * max(0.0, overhead) / (1 + max(0.0, overhead))
        facts = facts_of(
            [trace], costs, spent, flops_s=machine["flops_s"] or 0.0,
            read_bytes_s=machine["read_bytes_s"] or 0.0, preemptions=self.tree["application"]["preemptions"],
            recomputed=self.tree["utilisation"].get("wasted", {}).get("recomputation", 0.0), rows=batch.get("running", 0),
            clocks=Clocks.read(self.tree["gpu"]),
        )
        findings = find_patterns(facts)
        self.tree |= {
            "ops": drill.ops_section(facts), "patterns": drill.patterns_section(findings),
            "profiler": {"steps": len(steps), "overhead": overhead},
            "remedies": drill.remedies_section(ranked(self.verdict, findings)),
        }
        return spent


def attach(
    url: str, seconds: float, slo: Slo | None, key: str = "", progress: Callable[[str], None] = lambda text: None
) -> Attached:
    if not 1 <= seconds <= LONGEST_SECONDS:
        raise ConfigError(f"--seconds must be from 1 to {LONGEST_SECONDS:.0f}, got {seconds:g}")
    url = url.rstrip("/").removesuffix("/v1")
    try:
        return _attach(url, seconds, slo, key, progress)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:        # what it sent is something else
        raise ConfigError(f"{url} does not answer as a Ridgeline server does ({one_line(error)})") from None


def _attach(url: str, seconds: float, slo: Slo | None, key: str, progress: Callable[[str], None]) -> Attached:
    before, start = read_samples(_get(url, "/metrics", key).decode()), time.monotonic()
    progress(f"watching for {seconds:.0f} s")
    looks: list[list[dict[str, Any]]] = []
    while True:
        left = seconds - (time.monotonic() - start)
        time.sleep(max(0.0, min(left, _LOOK_SECONDS)))
        watched = time.monotonic() - start
        document = json.loads(_get(url, f"/roofline?seconds={min(max(watched, 1.0), LONGEST_SECONDS):.1f}", key))
        placed = [point | {"start": watched - point.pop("ago") - point["seconds"]} for point in _points(document)]
        looks.append([point for point in placed if point["start"] >= 0])
        if watched >= seconds:
            break
    after = read_samples(_get(url, "/metrics", key).decode())
    gone = time.monotonic() - start
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    points = all_steps(looks)
    verdict = _verdict(document["verdict"])
    tree = {
        "application": application(grown, gone, slo),
        "steps": _steps_section(points, grown, document),
        "verdict": drill.verdict_section(verdict),
        "remedies": drill.remedies_section(ranked(verdict)),
        "machine": {name: document["machine"].get(name) for name in ("device", "read_bytes_s", "flops_s")},
        "utilisation": document["utilisation"], "batch": document["batch"], "seconds": gone,
        "gpu": shown(Clocks.read(document.get("gpu") or {})),
    }
    return Attached(tree, points, document["model"], verdict)


def _get(url: str, path: str, key: str) -> bytes:
    headers = bearer(key)
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=_TIMEOUT) as answer:
            content = bytes(answer.read(_MOST_BYTES + 1))
            if len(content) > _MOST_BYTES:
                raise ConfigError(f"{url}{path} answers with more than {_MOST_BYTES >> 20} MiB: is it a Ridgeline server?")
            return content
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(f"{url} requires an API key: give --api-key") from None
        if error.code == 404:
            raise ConfigError(f"{url} has no {path.split('?')[0]}, so it is not a Ridgeline server; `ridgeline bench serve` "
                              "measures any server") from None
        raise ConfigError(f"{url}{path} answers {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"no server answers at {url}: {getattr(error, 'reason', error)}") from None


# ── counters ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_samples(text: str) -> Samples:
    """Parses Prometheus's text format; drops the labels that every sample has."""
    found: Samples = {}
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.match(line)):
            name, labels, value = match.groups()
            own = frozenset(pair for pair in _LABEL.findall(labels or "") if pair[0] not in ("model_name", "engine"))
            found[name, own] = float(value)
    return found


def histogram(samples: Samples, name: str) -> list[tuple[float, float]]:
    """(upper bound, count at or below it), in order."""
    bounds = [
        (float(dict(labels)["le"]), count) for (each, labels), count in samples.items()
        if each == f"{name}_bucket" and "le" in dict(labels)
    ]
    return sorted(bounds)


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Linear within its bucket; beyond the last bound, that bound."""
    if not buckets or not buckets[-1][1]:
        return None
    wanted, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound if bound != float("inf") else low, count
    return low


def part_below(buckets: Sequence[tuple[float, float]], limit: float) -> float | None:
    if not buckets or not buckets[-1][1]:
        return None
    low, below, whole = 0.0, 0.0, buckets[-1][1]
    for bound, count in buckets:
        if limit <= bound:
            inside = 0.0 if bound == float("inf") else (limit - low) / (bound - low)
            return (below + (count - below) * inside) / whole
        low, below = bound, count
    return 1.0


_HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds", "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds", "e2el": "vllm:e2e_request_latency_seconds",
}


def application(grown: Samples, seconds: float, slo: Slo | None) -> dict[str, Any]:
    def count(name: str) -> float:
        return sum(value for (each, _), value in grown.items() if each == name)

    def spread(name: str) -> dict[str, float]:
        buckets = histogram(grown, _HISTOGRAMS[name])
        found = {f"p{share}": quantile(buckets, share / 100) for share in (50, 90, 95, 99)}
        return {key: value * 1e3 for key, value in found.items() if value is not None}

    completed = count("vllm:request_success_total")
    found: dict[str, Any] = {
        "duration_s": seconds, "completed": int(completed), "request_throughput": completed / seconds,
        "output_throughput": count("vllm:generation_tokens_total") / seconds,
        "input_throughput": count("vllm:prompt_tokens_total") / seconds,
        **{f"{name}_ms": spread(name) for name in _HISTOGRAMS},
        "preemptions": int(count("vllm:num_preemptions_total")), "slo": str(slo) if slo else None,
    }
    if slo is not None:
        met = [part_below(histogram(grown, _HISTOGRAMS[name]), limit) for name, limit in slo.limits]
        known = [each for each in met if each is not None]
        if known:                                        # whether the same requests missed both, histograms cannot say
            low, high = max(0.0, 1 - sum(1 - each for each in known)), min(known)
            found["slo_attainment_range"] = [low, high]
            found["request_goodput_range"] = [low * completed / seconds, high * completed / seconds]
    return found


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _points(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    points = document["points"]
    fields, phases = points["fields"], points["phases"]
    found = []
    for values in points["values"]:
        point = dict(zip(fields, values, strict=True))
        found.append({"ago": point.pop("at")} | point | {"phase": phases[int(point["phase"])]})
    return found


def all_steps(looks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every step once. Two reads report the same step at slightly different times, because the answers took time."""
    kept: list[dict[str, Any]] = []
    for look in looks:
        known = {(point["seconds"], point["device"], point["tokens"]) for point in kept[-_REMEMBERED:]}
        kept += [point for point in look if (point["seconds"], point["device"], point["tokens"]) not in known]
    return sorted(kept, key=lambda point: point["start"])


def _steps_section(points: Sequence[Mapping[str, Any]], grown: Samples, document: Mapping[str, Any]) -> dict[str, Any]:
    steps = [
        StepTimes(point["start"] + point["seconds"], point["seconds"], point["device"], point["phase"], int(point["tokens"]),
                  int(point["rows"]), prompt_tokens=int(point["tokens"] > point["rows"]))
        for point in points
    ]
    found = drill.steps_section(steps)
    slow = {
        dict(labels)["cause"]: int(value) for (name, labels), value in grown.items()
        if name == "ridgeline:slow_steps_total" and value
    }
    found["slow_by_cause"] = slow                        # counted by the engine: over three times the median
    for phase, used in document["phases"].items():
        if phase in found["phases"]:
            found["phases"][phase] |= {name: used[name] for name in ("mfu", "hfu", "mbu")}
    return found


def _verdict(said: Mapping[str, Any]) -> Verdict:
    changes = tuple(Change(each["what"], each["gain"], each["trade_off"]) for each in said["changes"])
    return Verdict(said["term"], said["share"], said["headroom"], said["why"], changes, said["parts"])

"""A plan as plain data and as text, with the same numbers; `plan_page.py` plots them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.plan.capacity import Capacity, textbook
from ridgeline.plan.division import all_reduce_seconds, all_to_all_seconds, expert_loads
from ridgeline.plan.operation import (
    MOST_LOAD,
    Answer,
    Point,
    Slo,
    Traffic,
    best_point,
    by_ranks,
    compute_limited_batch,
    devices_for,
    saturation_batch,
    table,
)
from ridgeline.plan.precision import WEIGHT_FORMATS, support
from ridgeline.plan.prediction import MOST_ROWS, Setup, proposal_seconds, stage_bubble, step_parts
from ridgeline.plan.search import (
    BY_DATA_SHEET,
    MEMORY,
    NOT_TIMED,
    NOT_YET,
    OBJECTIVES,
    UNKNOWN,
    YES,
    Objective,
    advised,
    best,
    candidates,
    effects,
    gain,
    helps,
    losses,
    lost_said,
    measured_loss,
    missing,
    options,
    pareto,
    quality,
    untimed,
    untimed_formats,
    weight_formats,
)
from ridgeline.plan.workload_steps import count_rows, decode_rows, gather
from ridgeline.sizes import ledger
from ridgeline.sizes.ledger import GIB

TAKEN = 0.1                          # of the cores: more and a CPU is called busy


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a plan."""

    setup: Setup
    traffic: Traffic
    most_ranks: int = 8
    utilization: float = 0.9
    price: float | None = None       # dollars per device and hour
    slo: Slo | None = None
    rate: float | None = None        # requests/s
    parameters: float | None = None  # rounded, for the textbook estimate
    hit_rate: float = 0.5            # of the technique "prefix hits" …
    drafts: int = 4                  # … and of "drafts"
    acceptance: float = 0.7
    objective: Objective | None = None
    given: tuple[int | None, int | None] = (None, None)  # tokens in and out that were asked for; None: an objective's own
    kl: dict[str, float] | None = None                   # measured by `ridgeline eval`, by format; "kv-fp8" is the cache's
    any_engine: bool = False         # recommend also what this engine cannot do yet
    own_format: bool = False         # the weights' format is the checkpoint's, not an option's
    published: str = ""              # of a model by name, a sentence on the format that it is published in


def answer(question: Question) -> dict[str, Any]:
    """Everything, as JSON can hold it. Seconds and bytes."""
    setup, traffic = question.setup, question.traffic
    capacity = Capacity.of(setup, traffic.context, question.utilization)
    largest = min(capacity.largest_batch(MOST_ROWS), MOST_ROWS)
    book = textbook(setup, traffic.context, question.parameters)
    told: dict[str, Any] = {
        "model": setup.model.name, "parameters": setup.model.parameters, "active_parameters": setup.model.active_parameters,
        "device": setup.device.name, "kind": setup.device.kind, "ranks": setup.ranks, "devices": setup.devices,
        "stages": setup.stages, "nodes": setup.nodes, "division": _division(setup, traffic),
        "kv_heads": setup.model.config.num_kv_heads,
        "weights": setup.weights, "stored_weights": _stored(setup),
        "kv": setup.kv, "kv_dtype": setup.kv_dtype, "dtype": setup.dtype, "sparse": setup.sparse,
        "derate": setup.derate,
        "tokens_in": traffic.tokens_in, "tokens_out": traffic.tokens_out, "hit_rate": traffic.hit_rate,
        "formats": support(setup.device), "missing_formats": _missing_formats(setup),
        "memory_formats": [name for name, faster in weight_formats(setup).items() if not faster],
        "untimed_formats": untimed_formats(setup),
        "published": question.published, "lossy": setup.lossy, "missing": sorted(missing(setup)), "taken": setup.device.taken,
        "fits": capacity.fits, "ledger": capacity.parts(largest or 1), "usable": capacity.memory.room,
        "kv_bytes_per_token": capacity.kv_bytes_per_token, "largest_batch": capacity.largest_batch(),
        "longest_context": capacity.longest_context(), "compute_limited_batch": compute_limited_batch(setup),
        "textbook": {"weights": book.weights, "kv_per_request": book.kv_per_request, "batch": book.batch,
                     "tok_s": book.tok_s, "parameters": question.parameters or setup.model.parameters},
    }
    if capacity.fits:
        points = table(setup, traffic, largest)
        told["batches"] = [_point(point, question.price) for point in points]
        told["saturation_batch"] = saturation_batch(points)
        told["helps"] = helps(points[:: max(1, len(points) - 1)], traffic, question.own_format)
        told["step_parts"] = {str(batch): _parts(setup, batch, traffic) for batch in dict.fromkeys((1, largest))}
    told["by_ranks"] = [
        {"ranks": one.setup.ranks, "stages": one.setup.stages, "experts": one.setup.expert_parallel,
         "one": _point(one, question.price), "many": _point(many, question.price)}
        for one, many in by_ranks(setup, traffic, question.most_ranks, question.utilization)
    ]
    told["techniques"] = [
        {"technique": effect.technique, "here": effect.here == YES, "in_this_engine": effect.here, "exact": effect.exact,
         "tpot": _finite(effect.tpot), "tok_s": _finite(effect.tok_s), "ttft": _finite(effect.ttft),
         "largest_batch": effect.batch}
        for effect in effects(
            setup, traffic, hit_rate=question.hit_rate, drafts=question.drafts, acceptance=question.acceptance,
            draft_model=setup.draft_model, utilization=question.utilization,
        )
    ]
    if question.slo is not None and question.slo != Slo():
        point = best_point(setup, traffic, question.slo, question.utilization)
        told["slo"] = {name: limit for name in ("ttft", "tpot") if (limit := getattr(question.slo, name)) < math.inf}
        told["within_slo"] = _point(point, question.price) if point is not None else None
    if question.rate is not None:
        answers = devices_for(
            setup, traffic, question.slo or Slo(), question.rate, question.most_ranks, question.utilization,
            question.any_engine,
        )
        told["deployments"] = [_answer(each, question.price) for each in answers]
    return told


def objectives(question: Question) -> dict[str, Any]:
    """The best setup for each objective, or for the one that was asked for."""
    asked = [question.objective] if question.objective else list(OBJECTIVES.values())
    found: dict[str, Any] = {}
    known: dict[tuple[Traffic, bool], list[Point]] = {}  # objectives may differ in what they look for alone
    for objective in asked:
        (given_in, given_out), own = question.given, objective.traffic
        traffic = Traffic(given_in or own.tokens_in, given_out or own.tokens_out, question.traffic.hit_rate)
        if (key := (traffic, objective.lossy)) not in known:
            known[key] = candidates(
                question.setup, traffic, question.most_ranks, objective.lossy, question.utilization, question.any_engine
            )
        point = best(known[key], objective)
        found[objective.name] = {
            "what": objective.what, "tokens_in": traffic.tokens_in, "tokens_out": traffic.tokens_out,
            "hit_rate": traffic.hit_rate, "best": _point(point, question.price) if point else None,
        }
        if point is not None:
            found[objective.name] |= {
                "options": options(point.setup, point.batch, question.own_format, question.utilization),
                "losses": losses(point.setup, question.own_format), "gain": gain(known[key], objective, point, question.setup),
                "untimed": not question.own_format and untimed(point.setup, point.setup.weights),
            }
    return found


def fronts(question: Question) -> dict[str, Any]:
    """Every candidate, and which are Pareto-optimal in latency and in quality."""
    setup, traffic = question.setup, question.traffic
    points = candidates(setup, traffic, question.most_ranks, True, question.utilization, question.any_engine)
    losses: dict[int, float | None] = {
        id(point): -quality(point.setup) if question.kl is None else measured_loss(point.setup, question.kl)
        for point in points
    }
    latency = {id(point) for point in pareto(points, lambda point: point.tpot)}
    judged = [point for point in points if losses[id(point)] is not None]
    lossless = {id(point) for point in pareto(judged, lambda point: losses[id(point)] or 0.0)}
    return {
        "quality_is": "KL" if question.kl is not None else "dB",
        "points": [
            _point(point, question.price) | {
                "quality": None if (lost := losses[id(point)]) is None else lost if question.kl is not None else -lost,
                "best_latency": id(point) in latency, "best_quality": id(point) in lossless,
            }
            for point in points
        ],
    }


def _stored(setup: Setup) -> str:
    """What the weights are kept in: a CPU that computes in float32 leaves 16-bit numbers as they are."""
    narrow = setup.weights == setup.dtype and setup.shape.weight_bytes < WEIGHT_FORMATS[setup.dtype].bytes
    if narrow and not setup.sparse:
        return f"{setup.model.config.dtype}, computed in {setup.dtype}"
    wide_rows = setup.kept is not None and not setup.kept.narrow_rows and not setup.has_blocks and setup.device.kind == "cuda"
    if setup.device.kind == "cpu" and setup.kept is not None and setup.kept.linears >= 2:
        return f"{setup.weights}, expanded to {setup.dtype} when they are loaded"
    if wide_rows and setup.weights in ("fp8", "fp8-block", "int8"):
        untimed = "" if setup.weights == "int8" else ", by kernels of which several rows were not timed"
        return f"{setup.weights}, multiplied in {setup.dtype}{untimed}"
    differ = setup.model.config.experts is not None and setup.expert_weights != setup.weights
    return setup.weights + (f", of experts in {setup.expert_weights}" if differ else "")


def _missing_formats(setup: Setup) -> list[str]:
    """Narrow formats of weights that this engine cannot use on this device."""
    plain = replace(setup, ranks=1, kv="auto", sparse=False, drafts=0)
    narrow = [name for name, found in WEIGHT_FORMATS.items() if found.bits < 16]
    return [name for name in narrow if missing(replace(plain, weights=name))]


def _point(point: Point, price: float | None) -> dict[str, Any]:
    return {
        "label": point.setup.label, "ranks": point.setup.ranks, "weights": point.setup.weights, "kv": point.setup.kv,
        "batch": point.batch, "ttft": point.ttft, "tpot": point.tpot, "prefill": point.prefill, "prompt": point.prompt,
        "tok_s": point.tok_s,
        "tok_s_device": point.tok_s_device, "requests_s": point.requests_s, "lossy": point.setup.lossy,
        "missing": sorted(missing(point.setup)),
        "dollars_per_million": point.dollars_per_million(price) if price is not None else None,
    }


def _answer(found: Answer, price: float | None) -> dict[str, Any]:
    return {
        "devices": found.devices, "replicas": found.replicas, "rate": found.rate, "load": found.load,
        "point": _point(found.point, price),
        "dollars_per_hour": price * found.devices if price is not None else None,
    }


def _parts(setup: Setup, batch: int, traffic: Traffic) -> dict[str, float]:
    """Of a decode step, seconds by part; with drafts, of their verification and of proposing them."""
    rows = decode_rows(batch, traffic.mean_context, setup.drafts)
    steps = gather(setup.shape, [count_rows(setup.shape, rows)], setup.model)
    found = {name: float(seconds[0]) / setup.derate for name, seconds in step_parts(setup, steps).items()}
    return found | {"proposals": proposal_seconds(setup, batch, traffic.mean_context)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def text(told: dict[str, Any]) -> str:
    lines = [
        *summary(told),
        "",
        f"{told['model']}, {told['parameters'] / 1e9:.2f} G parameters{_active(told)}, on {told['devices']} × {told['device']}: "
        f"weights in {told['stored_weights']}{', 2:4 sparse' if told['sparse'] else ''}, KV in "
        f"{told['kv_dtype'] if told['kv'] == 'auto' else told['kv']}"
        + (f", derated to {told['derate']:.0%}" if told["derate"] < 1 else ""),
        f"requests of {told['tokens_in']:,} tokens in and {told['tokens_out']:,} out"
        + (f", {told['hit_rate']:.0%} of the prompt cached" if told["hit_rate"] else ""),
        *_uneven(told),
        *told["division"],
        *([f"not in this engine yet: {', '.join(told['missing'])}"] * bool(told["missing"])),
        *([f"this machine is busy: other programs had {told['taken']:.0%} of its cores while it was measured, so it may "
           "be faster when quiet"] * (told["taken"] > TAKEN)),
        "",
        *_memory(told),
        "",
    ]
    if "batches" in told:
        lines += [*_batches(told["batches"]), "", *_step(told["step_parts"]), ""]
    lines += [*_ranks(told["by_ranks"]), "", *_techniques(told["techniques"])]
    if "within_slo" in told:
        within = told["within_slo"]
        most = "SLO not met: even one request alone is too slow, or does not fit" if within is None else (
            f"within the SLO: {within['requests_s']:.2f} requests/s with {_one_line(within)}"
        )
        lines += ["", most]
    if "deployments" in told:
        lines += ["", *_deployments(told["deployments"])]
    for name, found in told.get("objectives", {}).items():
        lengths = f"({found['tokens_in']:,} tokens in, {found['tokens_out']:,} out)"
        lines += ["", f"{name}: {found['what']} {lengths}", f"  {_one_line(found['best'])}", *advised(found)]
    if told.get("objectives") and not any(found["best"] for found in told["objectives"].values()):
        lines += ["", "`--any-engine` also considers what this engine cannot do yet"]
    emulated = [f"{name} ({how})" for name, how in told["formats"].items() if how != "native"]
    native = [name for name, how in told["formats"].items() if how == "native"]
    lacks = f"; not in this engine here: {', '.join(told['missing_formats'])}" if told["missing_formats"] else ""
    lines += ["", f"native on {told['device']}: {', '.join(native)}; {'; '.join(emulated)}{lacks}"]
    return "\n".join(lines)


def summary(told: dict[str, Any]) -> list[str]:
    """The lines that answer most questions: does it fit, how fast is it, what limits it, what helps."""
    context = told["tokens_in"] + told["tokens_out"]
    if "batches" not in told:
        need = sum(told["ledger"].values())
        return [f"DOES NOT FIT: it needs {need / GIB:.1f} GiB with one request of {context:,} tokens, and "
                f"{told['usable'] / GIB:.1f} are usable", *_fitting(told), *([told["published"]] * bool(told["published"]))]
    one, many = told["batches"][0], told["batches"][-1]
    weights = told["ledger"][ledger.WEIGHTS]
    lines = [
        f"fits: {weights / GIB:.1f} GiB of weights in {told['usable'] / GIB:.1f} GiB, with room for "
        f"{_requests(told['largest_batch'])} of {context:,} tokens",
        f"how fast: one user waits {_duration(one['ttft'], 0)} for the first token, then {_duration(one['tpot'], 1)} for each "
        f"({_rate(1 / one['tpot'])} tok/s); {_requests(many['batch'])} at once: {_rate(many['tok_s'])} tok/s, "
        f"{_duration(many['tpot'], 1)} each",
    ]
    bound = {
        point["batch"]: _binds(told["step_parts"][str(point["batch"])], point, told["compute_limited_batch"], told["stages"])
        for point in (one, many)
    }
    lines.append("what binds: " + "; ".join(f"at batch {batch} {what}" for batch, what in bound.items()))
    lines += [told["published"]] * bool(told["published"])
    helping = [f"at batch {each['batch']} {each['options']}, {each['gain']:.2f} × the tokens" for each in told["helps"]]
    helping += [BY_DATA_SHEET] * any(each["untimed"] for each in told["helps"])
    lost = {name: kl for each in told["helps"] for name, kl in each["losses"].items()}
    return [*lines, *([f"what helps: {'; '.join(helping)} ({lost_said(lost)})"] * bool(helping))]


def _fitting(told: dict[str, Any]) -> list[str]:
    """What makes it fit, of what this engine has."""
    narrow = [
        row["technique"] + {MEMORY: " (general kernels, not timed)", NOT_TIMED: " (not timed)"}.get(row["in_this_engine"], "")
        for row in told["techniques"] if row["tok_s"] is None and row["in_this_engine"] != NOT_YET
    ]
    more = min((row["ranks"] * row["stages"] for row in told["by_ranks"]), default=0)
    ways = narrow + [f"{more} × {told['device']}"] * (more > told["devices"])
    return [f"it fits with {' or with '.join(ways)}" if ways else "nothing that this engine has makes it fit"]


def _binds(parts: dict[str, float], point: dict[str, Any], compute_limited: int, stages: int) -> str:
    batch = point["batch"] / stages                              # rows of a step; each stage has its own at a time
    prompts = point["requests_s"] * point["prompt"] / stages     # of the time; decodes take the rest
    if prompts > 0.5:
        return f"computing prompts ({prompts:.0%} of the time)"
    name = max(parts, key=lambda each: parts[each])
    what = {
        "linears": "reading the weights" if batch < compute_limited else "computing the linears", "head": "the head",
        "attention": "attention over the KV cache", "small": "small ops and launches",
        "communication": "ranks that wait for each other",
        "step": "sampling and the host", "proposals": "proposing drafts",
    }[name]
    return f"{what} ({parts[name] / sum(parts.values()):.0%} of a decode step)"


def _uneven(told: dict[str, Any]) -> list[str]:
    heads, ranks = told["kv_heads"], told["ranks"]
    if ranks >= heads or heads % ranks == 0:
        return []
    even = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
    return [f"{heads} KV heads do not divide evenly among {ranks} ranks: one has up to {-(-heads // ranks)}, the others wait "
            f"for it, and speed is below the plan; {even} ranks divide them evenly"]


def _requests(count: int) -> str:
    return f"{count:,} request{'s' if count != 1 else ''}"


def _duration(seconds: float, digits: int) -> str:
    """In ms with this number of digits behind the point; in s where ms would be hard to read."""
    if seconds < 9.9995:
        return f"{seconds * 1e3:,.{digits}f} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _rate(tok_s: float) -> str:
    """Tokens per second; slow ones with their digits."""
    return f"{tok_s:,.0f}" if tok_s >= 10 else f"{tok_s:.2g}"


def _active(told: dict[str, Any]) -> str:
    active = told["active_parameters"]
    return f" ({active / 1e9:.2f} G active per token)" if active != told["parameters"] else ""


def _memory(told: dict[str, Any]) -> list[str]:
    head = "fits" if told["fits"] else "DOES NOT FIT"
    rows = _requests(min(told["largest_batch"], MOST_ROWS) or 1)
    lines = [f"{head}: GiB of one device with {rows}, {told['usable'] / GIB:.1f} of them usable"]
    parts = [part for part in (*ledger.PARTS, *told["ledger"]) if part in told["ledger"]]
    for part in dict.fromkeys(parts):
        lines.append(f"  {part:<12}{told['ledger'][part] / GIB:>9.2f}")
    lines.append(f"  {'left':<12}{(told['usable'] - sum(told['ledger'].values())) / GIB:>9.2f}")
    book, context = told["textbook"], told["tokens_in"] + told["tokens_out"]
    lines += [
        f"KV {told['kv_bytes_per_token'] / 1024:,.1f} KiB per token; room for {_requests(told['largest_batch'])} of {context:,} "
        f"tokens, or one of {told['longest_context']:,}",
        f"batch limited by memory at {told['largest_batch']:,}, by compute (ridge) at {told['compute_limited_batch']:,}"
        + (f"; 90 % of the throughput at {told['saturation_batch']:,}" if "saturation_batch" in told else ""),
        f"textbook (weights and KV alone, {book['parameters'] / 1e9:.4g} G parameters): {_rate(book['tok_s'])} tok/s at batch 1 "
        f"by bandwidth, {_requests(book['batch'])} by memory",
    ]
    return lines


def _batches(points: Sequence[dict[str, Any]]) -> list[str]:
    priced = points[0]["dollars_per_million"] is not None
    alone = f"a prompt alone takes {points[0]['prefill'] * 1e3:,.1f} ms"
    head = f"{'batch':>6}{'TTFT ms':>10}{'TPOT ms':>10}{'tok/s':>11}{'per device':>12}{'requests/s':>12}"
    lines = [alone, head + (f"{'$/M tokens':>12}" if priced else "")]
    for point in points:
        line = f"{point['batch']:>6}{point['ttft'] * 1e3:>10.1f}{point['tpot'] * 1e3:>10.2f}{_rate(point['tok_s']):>11}"
        line += f"{_rate(point['tok_s_device']):>12}{point['requests_s']:>12.2f}"
        lines.append(line + (f"{point['dollars_per_million']:>12.3f}" if priced else ""))
    return lines


def _step(parts: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for batch, found in parts.items():
        total = sum(found.values())
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in found.items() if seconds > 0.005 * total)
        lines.append(f"decode step at batch {batch}: {total * 1e3:.2f} ms: {shares}")
    return lines


def _ranks(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["it does not fit on any number of devices considered"]
    lines = [f"{'ranks':>6}{'stages':>8}{'TPOT ms at 1':>14}{'largest batch':>14}{'tok/s':>11}{'per device':>12}"]
    for row in rows:
        one, many = row["one"], row["many"]
        lines.append(f"{row['ranks']:>6}{row['stages']:>8}{one['tpot'] * 1e3:>14.2f}{many['batch']:>14,}"
                     f"{_rate(many['tok_s']):>11}{_rate(many['tok_s_device']):>12}{'  whole experts' if row['experts'] else ''}")
    fastest = min(rows, key=lambda row: row["one"]["tpot"])
    cheapest = max(rows, key=lambda row: row["many"]["tok_s_device"])
    return [*lines, f"best for latency: {divided(fastest)}; for throughput per device: {divided(cheapest)}"]


def divided(row: Mapping[str, Any]) -> str:
    words = [f"{row['ranks']} ranks" if row["ranks"] > 1 else "one rank"]
    words += [f"{row['stages']} stages"] if row["stages"] > 1 else []
    return " × ".join(words) + (" with whole experts" if row["experts"] else "")


def _division(setup: Setup, traffic: Traffic) -> list[str]:
    """What is to be known of a plan for several devices."""
    if setup.devices == 1:
        return []
    lines = [] if setup.device.kind == "cpu" else [
        "several devices: links as their data sheets have them or as `bench comm` measured them; no speed of this engine on "
        "several GPUs is measured"
    ]
    if setup.context_parallel:
        lines.append("divided contexts: memory is right, time is not: attention over a part of a context has no kernel yet")
    experts = setup.model.experts
    if experts is not None and setup.expert_parallel:
        rows, element = 64, WEIGHT_FORMATS[setup.dtype].bytes
        computed, read = expert_loads(experts, setup.ranks, np.array([float(rows)]))
        size = rows * setup.model.config.hidden_size * element
        told = [seconds * 1e6 for seconds in (
            all_reduce_seconds(setup.device.link, setup.ranks, size),
            2 * all_to_all_seconds(setup.device.link, setup.ranks, size * experts.used / setup.ranks),
        )]
        lines.append(f"whole experts: with {rows} rows the fullest rank computes {computed[0]:.2f} × and reads {read[0]:.2f} × "
                     f"an even share; an all-reduce of {told[0]:.0f} µs a layer adds the parts up (ranks with requests of "
                     f"their own would need two all-to-alls, {told[1]:.0f} µs: not in this engine)")
    if setup.stages > 1:
        part = math.ceil(64 / setup.stages)
        lost = stage_bubble(setup, part, traffic.mean_context) - 1
        lines.append(f"stages: with 64 rows they wait {lost:.0%} of the time for the slowest, mostly the one with the head")
    return lines


def _techniques(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no single technique makes it fit"]
    lines = [f"{'technique':<20}{'TTFT':>7}{'TPOT':>7}{'tok/s':>7}{'batch':>8}  exact  in this engine"]
    for row in rows:
        known = row["in_this_engine"] not in UNKNOWN
        factors = "".join(
            f"{'fits':>7}" if row[name] is None else f"{row[name]:>6.2f}×" if known else f"{'?':>7}"
            for name in ("ttft", "tpot", "tok_s")
        )
        lines.append(f"{row['technique']:<20}{factors}{row['largest_batch']:>8,}  {'yes' if row['exact'] else 'no':<5}  "
                     f"{row['in_this_engine']}")
    seen = {row["in_this_engine"] for row in rows}
    return lines + [f"{name}: {why}" for name, why in UNKNOWN.items() if name in seen]


def _deployments(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no number of devices meets the SLO: even one request alone takes longer; try narrower formats or a faster "
                "device"]
    lines = []
    for row in rows:
        point, price = row["point"], row["dollars_per_hour"]
        devices = f"{row['devices']} device{'s' if row['devices'] > 1 else ''}"
        lines.append(f"{row['rate']:g} requests/s need {devices}: {row['replicas']} × {point['label']}, at most "
                     f"{_requests(point['batch'])} each, TTFT {point['ttft'] * 1e3:.0f} ms, TPOT {point['tpot'] * 1e3:.1f} ms; "
                     f"load {row['load']:.0%} of capacity (limit {MOST_LOAD:.0%})"
                     + (f", ${price:,.2f} an hour" if price is not None else ""))
    return lines


def _one_line(point: dict[str, Any] | None) -> str:
    if point is None:
        return "no setup meets it"
    cost = f", ${point['dollars_per_million']:.3f} per million tokens" if point["dollars_per_million"] is not None else ""
    marked = f" (not in this engine yet: {', '.join(point['missing'])})" if point["missing"] else ""
    return (f"{point['label']}, batch {point['batch']}: {_rate(point['tok_s_device'])} tok/s per device, "
            f"TTFT {point['ttft'] * 1e3:.0f} ms, TPOT {point['tpot'] * 1e3:.1f} ms{cost}{marked}")

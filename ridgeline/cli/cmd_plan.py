"""`ridgeline plan MODEL --gpu H100`: does a model fit, how fast will it be, what does a million tokens cost. See docs/plan.md.

    ridgeline plan MODEL --gpu NAME [options]       a plan
    ridgeline plan --check RECORD.json …            predicted against measured; exit code 3 beyond 15 %
    ridgeline plan MODEL --gpu NAME --check SERVE.json      the same for a record of `bench serve`
    ridgeline plan --fit RECORD.json … --host HOST.json --ops OPS.json      device constants from records
    ridgeline plan --check RECORD.json … --into docs/plan.md        update the table in that page
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ridgeline.bench.lab.sweep import middle
from ridgeline.bench.workload.shapes import CODED, GGUF_SHAPES, write_shape
from ridgeline.bench.workload.workloads import GPU_PRESETS, TIMED
from ridgeline.distributed.sharding import head_shards
from ridgeline.errors import ConfigError
from ridgeline.models.model_config import checkpoint_dtype
from ridgeline.plan import check, plan_report
from ridgeline.plan.capacity import kernel_facts
from ridgeline.plan.fit import fit, host_constants, launch_constants, narrow_constants, one_kind, write_fit
from ridgeline.plan.operation import Slo, Traffic
from ridgeline.plan.own_cpu import best_known
from ridgeline.plan.plan_page import page
from ridgeline.plan.precision import KV_FORMATS, WEIGHT_FORMATS
from ridgeline.plan.prediction import FITTED, Setup
from ridgeline.plan.public_models import (
    CONFIGS,
    PlannedModel,
    cpu_weights,
    find_model,
    gpu_weights,
    is_same_model,
    packed_format,
    published_format,
)
from ridgeline.plan.records import NotPredicted, read_link, read_record, record_id, record_name, record_order
from ridgeline.plan.search import OBJECTIVES
from ridgeline.plan.workload_steps import Lengths
from ridgeline.quant.quality_card import CARD
from ridgeline.quantize.card import PlannedCard, planned_card
from ridgeline.report.columns import fitted
from ridgeline.sizes.hardware import DEVICES, Device, Link, described, find_device
from ridgeline.sizes.mesh_shape import stage_layers
from ridgeline.user_files import read_json, read_text

BEYOND_BAR = 3                       # exit code
STEADY_SECONDS = 30                  # of requests that come at a rate, at least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ways = ("MODEL --gpu NAME [options]", "--check RECORD.json ...", "--fit RECORD.json ...")
    parser.usage = "\n       ".join(f"%(prog)s {each}" for each in ways)
    parser.add_argument("model", nargs="?", default="", metavar="MODEL",
                        help=f"config.json, directory, .gguf file, or a name: {', '.join(CONFIGS)}")
    _add_machine(parser.add_argument_group("machine"))
    load = parser.add_argument_group("requests")
    load.add_argument("--input", type=int, default=None, metavar="TOKENS", help="prompt length (default: 1024)")
    load.add_argument("--output", type=int, default=None, metavar="TOKENS", help="answer length (default: 256)")
    load.add_argument("--hit-rate", type=float, default=0.0, metavar="SHARE",
                      help="share of prompt tokens found in the prefix cache (default: 0)")
    load.add_argument("--slo", default="", metavar="ttft:MS,tpot:MS", help="latency limits to meet")
    load.add_argument("--rate", type=float, metavar="PER_SECOND",
                      help="requests per second: adds the number of devices they need")
    load.add_argument("--objective", choices=sorted(OBJECTIVES),
                      help="a named use case: sets lengths, SLO and what to optimise")
    numbers = parser.add_argument_group("formats and speculation")
    numbers.add_argument("--dtype", choices=["bfloat16", "float16", "float32"],
                         help="dtype of activations (default: a GGUF file's own; otherwise bfloat16, or what the device has)")
    numbers.add_argument("--weights", choices=list(WEIGHT_FORMATS), help="weight format (default: as the model is published or "
                         "stored)")
    numbers.add_argument("--kv-cache-dtype", default="auto", choices=KV_FORMATS,
                         help="KV cache format (default: auto, the dtype)")
    numbers.add_argument("--any-engine", action="store_true",
                         help="recommend also what this engine cannot do yet; it is marked")
    numbers.add_argument("--sparse", action="store_true", help="2:4 sparsity in the layers' linears")
    numbers.add_argument("--drafts", type=int, default=0, metavar="K",
                         help="speculative decoding: tokens proposed per step (default: 0)")
    numbers.add_argument("--acceptance", type=float, default=0.7, metavar="ALPHA",
                         help="probability that a draft token is accepted (default: 0.7)")
    numbers.add_argument("--draft-model", default="", metavar="MODEL",
                         help="model that proposes drafts (default: n-grams, at no cost)")
    numbers.add_argument("--parameters", type=float, metavar="N", help="parameter count for the textbook estimate, such as 70e9")
    numbers.add_argument("--kl", default="", metavar="FORMAT:NATS,…",
                         help="measured KL divergences for the plot: int4:0.03,kv-fp8:0.0005, or models or cards of "
                              "ridgeline quantize")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print everything as JSON")
    out.add_argument("--html", metavar="FILE", help="write Pareto plots and tables as one HTML page")
    out.add_argument("--check", nargs="+", metavar="RECORD",
                     help="compare predictions with records of `bench offline`, `bench idle` or `bench serve`")
    out.add_argument("--served-as", default="", metavar="NAME",
                     help="with --check of a server's record: the model name in the record, if it differs from MODEL")
    out.add_argument("--markdown", action="store_true", help="with --check: print the table as Markdown")
    out.add_argument("--into", metavar="FILE", help="with --check: replace the table in this page")
    out.add_argument("--fit", nargs="+", metavar="RECORD", help="fit the device constants on these records")
    out.add_argument("--host", nargs="+", default=[], metavar="RECORD", help="with --fit: records of `bench host`")
    out.add_argument("--ops", metavar="RECORD", help="with --fit: a record of `bench ops` for attention over an fp8 KV cache")
    out.add_argument("--out", metavar="FILE", help="with --fit: file for the constants (default: the package's own)")


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument("--gpu", default="", metavar="NAME", help=f"{', '.join(DEVICES)}; or cpu: this machine, measured")
    machine.add_argument("--bandwidth", type=float, metavar="GB/S", help="memory bandwidth, for a card that --gpu does not list")
    machine.add_argument("--memory", type=float, metavar="GB", help="memory of such a card")
    machine.add_argument("--tflops", type=float, metavar="N", help="its dense matrix rate in 16 bits, without sparsity")
    machine.add_argument("--fp8-tflops", type=float, metavar="N", help="its matrix rate in fp8, if it has fp8")
    machine.add_argument("--count", "--tensor-parallel-size", "--tp", dest="count", type=int, default=1, metavar="N",
                         help="tensor parallelism: devices that share every layer (default: 1)")
    machine.add_argument("--pipeline-parallel-size", "--pp", dest="stages", type=int, default=1, metavar="N",
                         help="stages of a pipeline, each with that many devices (default: 1)")
    machine.add_argument("--enable-expert-parallel", "--ep", dest="expert_parallel", action="store_true",
                         help="expert parallelism: each of the devices that share a layer has whole experts")
    machine.add_argument("--decode-context-parallel-size", "--dcp", dest="context", type=int, default=1, metavar="N",
                         help="context parallelism: devices that divide the KV cache by positions; 1 or as --count (default: 1)")
    machine.add_argument("--nodes", type=int, default=1, metavar="N",
                         help="machines, each with whole stages of the pipeline (default: 1)")
    machine.add_argument("--comm", metavar="RECORD", help="record of `bench comm`: the link between devices, instead of --gpu's")
    machine.add_argument("--stage-comm", metavar="RECORD",
                         help="record of `bench comm`: the link between machines (default: InfiniBand of 400 Gbit/s)")
    machine.add_argument("--most", type=int, default=8, metavar="N",
                         help="largest number of devices of a machine to consider (default: 8)")
    machine.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
                         help="share of a device's memory to use (default: 0.9)")
    machine.add_argument("--price", type=float, metavar="DOLLARS", help="price of one device per hour")
    machine.add_argument("--derate", type=float, default=1.0, metavar="SHARE",
                         help="multiply predicted speeds by this factor (default: 1)")


def run(args: argparse.Namespace) -> int:
    if args.fit:
        return _fit(args)
    if args.check:
        return _check(args)
    question = _question(args)
    told = plan_report.answer(question)
    told["objectives"] = plan_report.objectives(question)
    if args.html:
        told |= plan_report.fronts(question)
        told["cards"] = [asdict(card) for word in (args.kl or "").split(",") if word and (card := _card(word)) is not None]
        _write(args.html, page(told))
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print(json.dumps(told))
    else:
        print(fitted(plan_report.text(told)))
    return 0


def _question(args: argparse.Namespace) -> plan_report.Question:
    name, device = _required(args), _device(args)
    model = _model(name, args.weights, device)
    objective = OBJECTIVES[args.objective] if args.objective else None
    default = objective.traffic if objective else Traffic(1024, 256)
    tokens_in = default.tokens_in if args.input is None else args.input
    tokens_out = default.tokens_out if args.output is None else args.output
    traffic = Traffic(tokens_in, tokens_out, args.hit_rate)
    longest = model.config.max_position_embeddings
    if traffic.context > longest:
        raise ConfigError(f"{tokens_in} tokens in and {tokens_out} out are more than {model.name}'s context of {longest}; "
                          "ask for fewer with --input and --output")
    setup = _setup(args, model, device)
    most = max(args.most, args.count) * setup.nodes if device.link.latency else args.count
    slo = parse_slo(args.slo) if args.slo else objective.slo if objective else None
    if args.slo and objective:
        objective = replace(objective, slo=parse_slo(args.slo))
    return plan_report.Question(
        setup, traffic, most, args.gpu_memory_utilization, args.price, slo, args.rate, args.parameters,
        args.hit_rate or 0.5, args.drafts or 4, args.acceptance, objective, (args.input, args.output),
        parse_kl(args.kl) if args.kl else None, args.any_engine, not args.weights and setup.weights != setup.dtype,
        _published(name, args.weights, setup.dtype),
    )


def _model(name: str, asked: str | None, device: Device) -> PlannedModel:
    """With the formats of its checkpoint, unless others are asked for."""
    found = find_model(name, as_stored=not asked and device.kind in ("cpu", "cuda"))
    return replace(found, expert_format="") if asked else found


def _published(name: str, asked: str | None, dtype: str) -> str:
    """For a model by name whose checkpoint is quantised: which weights the plan has, and how to have others."""
    published = published_format(name)
    if published is None or published == asked:
        return ""
    what = f"experts in {published}" if published == "mxfp4" else published
    return f"which weights: {asked}, as asked; published are {what}" if asked else (
        f"which weights: {what}, as published; --weights {dtype} plans others")


def _required(args: argparse.Namespace) -> str:
    if not args.model or not (args.gpu or args.bandwidth or args.memory or args.tflops):
        raise ConfigError("plan needs a MODEL and a --gpu, such as: ridgeline plan llama-3.1-8b --gpu H100; or a card described "
                          "by --bandwidth GB/s --memory GB --tflops N")
    return str(args.model)


def _device(args: argparse.Namespace) -> Device:
    own = (args.bandwidth, args.memory, args.tflops, args.fp8_tflops)
    known = find_device(args.gpu) if args.gpu else None
    if known is not None and known.kind == "cpu":
        known = best_known(known)
    found = known if known is not None and own == (None,) * 4 else described(known, *own)
    return replace(found, link=read_link(args.comm, "all_reduce")) if args.comm else found


def _check_division(args: argparse.Namespace, model: PlannedModel, device: Device) -> None:
    if min(args.count, args.most, args.stages, args.nodes) < 1:
        raise ConfigError(
            f"--count, --pipeline-parallel-size, --most and --nodes must be at least 1, got {args.count}, {args.stages}, "
            f"{args.most} and {args.nodes}"
        )
    if args.context not in (1, args.count):
        raise ConfigError(f"--decode-context-parallel-size must be 1 or --count, {args.count}, got {args.context}")
    if args.expert_parallel and (model.experts is None or args.count == 1):
        raise ConfigError("--enable-expert-parallel needs a model with experts and a --count of at least 2")
    if args.count * max(args.stages, args.nodes) > 1 and not device.link.latency:
        raise ConfigError(f"no interconnect is known for {device.name}: --count must be 1, got {args.count}")


def _check_rest(args: argparse.Namespace) -> None:
    if args.draft_model and not args.drafts:
        raise ConfigError("--draft-model needs --drafts K, the number of tokens that it proposes")
    if args.price is not None and not 0 <= args.price < float("inf"):
        raise ConfigError(f"--price must be at least 0, got {args.price}")


def _setup(args: argparse.Namespace, model: PlannedModel, device: Device) -> Setup:
    _check_division(args, model, device)
    _check_rest(args)
    stages = args.nodes if args.stages == 1 else args.stages             # ranks of a stage stay on one machine
    dtype = args.dtype or _usual_dtype(model, device)
    stored, kept = packed_format(args.model), None
    if device.kind == "cuda" and not args.weights:
        kept = gpu_weights(model, dtype, args.count, kernel_facts(device))
    elif device.kind == "cpu" and stored and not args.weights:
        kept = cpu_weights(model, stored)
    whole = None if model.expert_format else stored      # MXFP4 is of experts alone
    weights = args.weights or (kept.format if kept is not None else whole) or dtype
    head_shards(model.config.num_heads, model.config.num_kv_heads, 0, args.count)        # both refuse what cannot be divided
    stage_layers(model.config.num_layers, 0, stages)
    return Setup(
        model=model, device=device, ranks=args.count, stages=stages, dtype=dtype, weights=weights, stored=kept,
        kv=args.kv_cache_dtype, sparse=args.sparse, drafts=args.drafts, acceptance=args.acceptance if args.drafts else 0.0,
        draft_model=find_model(args.draft_model) if args.draft_model else None, derate=args.derate,
        stage_link=_stage_link(args), expert_parallel=args.expert_parallel, context_parallel=args.context > 1, nodes=args.nodes,
        node_link=read_link(args.stage_comm, "send") if args.stage_comm and args.nodes > 1 else None,
    )


def _usual_dtype(model: PlannedModel, device: Device) -> str:
    """Of a GGUF file on a GPU, the engine's own choice: experts are kept as codes only in bfloat16."""
    if device.kind == "cpu":
        return "float32"
    found = checkpoint_dtype(model.config) if device.kind == "cuda" and model.config.packed else device.wide
    return found if found in device.flops else device.wide


def _stage_link(args: argparse.Namespace) -> Link | None:
    measured = (args.stage_comm if args.nodes == 1 else None) or args.comm
    return read_link(measured, "send") if measured else None


def parse_slo(words: str) -> Slo:
    """From words like ttft:500,tpot:50, in milliseconds."""
    limits = {}
    for word in words.split(","):
        name, colon, number = word.strip().partition(":")
        try:
            limits[name] = float(number) / 1e3
        except ValueError:
            colon = ""
        if not colon or name not in ("ttft", "tpot") or not limits[name] > 0:
            raise ConfigError(f"{word!r} is not a limit; write ttft:500,tpot:50, in milliseconds")
    return Slo(**limits)


def _card(word: str) -> PlannedCard | None:
    """Of a file, or of a model's directory; None: the word is something else."""
    path = Path(word.strip())
    if path.suffix != ".json" and not (path / CARD).is_file():
        return None
    return planned_card(path / CARD if path.is_dir() else path)


def parse_kl(words: str) -> dict[str, float]:
    """From words like int4:0.03,kv-fp8:0.0005, and from cards of `ridgeline quantize` (a file, or the model's directory)."""
    known = {*WEIGHT_FORMATS, *(f"kv-{name}" for name in KV_FORMATS), "2:4"}
    found = {}
    for word in words.split(","):
        if (card := _card(word)) is not None:
            found[card.format] = card.kl
            continue
        name, colon, number = word.strip().rpartition(":")
        if not colon or name not in known:
            raise ConfigError(f"{word!r} is not FORMAT:NATS, with one of {', '.join(sorted(known))}")
        try:
            found[name] = float(number)
        except ValueError:
            raise ConfigError(f"{word!r} is not FORMAT:NATS: {number!r} is no number") from None
    return found


@functools.cache
def preset_lengths() -> Mapping[str, Lengths]:
    """Of every request of the GPU presets, which the records were measured with. Kept: many ids are drawn to find it."""
    return {name: preset.lengths(TIMED) for name, preset in GPU_PRESETS.items()}


def shape_file(name: str) -> str:
    """Of a benchmark's shape that has codes, its file or directory; other names stay."""
    return str(write_shape(name)) if name in GGUF_SHAPES or name in CODED else name


def _check(args: argparse.Namespace) -> int:
    lengths = preset_lengths()
    fitted_on = [name for file in FITTED.values() for name in json.loads(file.read_text())["fitted_on"]]
    found = []
    for path in sorted(args.check, key=record_order):
        if (served := _served(path)) is not None:        # such a record does not know the server's device or formats
            model, points = served
            setup = _question(args).setup
            if model and not is_same_model(setup.model, model, args.served_as):
                raise ConfigError(f"{path} was measured on a server of {model!r}, and the plan is of {setup.model.name}: give "
                                  f"the model that was served, or --served-as {model} if that is its name there")
            found += check.check_serve(record_name(path), points, setup)
            continue
        try:
            record = replace(read_record(path, lengths, shape_file), name=record_name(path))
        except NotPredicted as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        found += check.check(record, record_id(path) in fitted_on)
    if not found:
        raise ConfigError("no figure of these records can be predicted: it needs answers of several tokens and counted prompts")
    if args.json:
        print(json.dumps([
            {"record": each.record, "workload": each.workload, "figure": each.figure, "measured": each.measured,
             "predicted": each.predicted, "error": each.error, "fitted": each.fitted} for each in found
        ]))
    else:
        print(check.text(found, args.markdown))
    if args.into:
        _write(args.into, check.put_into(read_text(args.into), found))
        print(f"wrote the table of {args.into}", file=sys.stderr)
    return 0 if check.worst(found) <= check.BAR else BEYOND_BAR


def _served(path: str) -> tuple[str, list[tuple[str, Any, int]]] | None:
    """The server's name for its model, and the points with their users, of a record of `bench serve`; None for another one."""
    raw = read_json(path, "a record")
    if not isinstance(raw, dict) or raw.get("benchmark") != "serve":
        return None
    try:
        return _served_points(path, raw)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a record of `ridgeline bench serve` ({type(error).__name__}: {error})") from None


def _served_points(path: str, raw: dict[str, Any]) -> tuple[str, list[tuple[str, Any, int]]]:
    unsteady = [point for point in raw["figures"]["points"] if not _is_steady(point)]
    if unsteady:
        print(f"left out: {len(unsteady)} of {path}: requests sent all at once, or for less than {STEADY_SECONDS} s, "
              "are not a steady load", file=sys.stderr)
    points = [
        (" ".join(f"{name} {value:g}" for name, value in point["setting"].items() if isinstance(value, int | float)) or "load",
         middle(point["figures"]),
         point["setting"]["max_concurrency"] if point.get("process") == "closed loop" else 0)
        for point in raw["figures"]["points"] if point not in unsteady
    ]
    return str(raw.get("workload", {}).get("model") or ""), points


def _is_steady(point: dict[str, Any]) -> bool:
    """Without users that wait for their answers, a server fills up and runs empty, and the record has no single lengths."""
    short = middle(point["figures"]).get("duration_s", STEADY_SECONDS) < STEADY_SECONDS
    return point.get("process") == "closed loop" or (point.get("process") != "all at once" and not short)


def _fit(args: argparse.Namespace) -> int:
    records = [read_record(path, preset_lengths(), shape_file) for path in args.fit]
    constants, errors = fit(records, host_constants(*args.host) if args.host else None, args.ops)
    if args.ops:
        measured = narrow_constants(args.ops, constants.attention_call_s) | launch_constants(args.ops)
        constants = replace(constants, **measured)
    for name, value in constants.values().items():
        print(f"{name:<20}{value:.4g}")
    for each in errors:
        print(f"{each['record']:<24}{each['figure']:<30}{each['measured'] * 1e3:>10.3f} ms, predicted "
              f"{each['predicted'] * 1e3:>10.3f} ms{each['error']:>+8.1%}")
    target = Path(args.out) if args.out else FITTED[one_kind(records)]
    try:
        write_fit(target, constants, errors, [record_id(each) for each in [*args.fit, *args.host, *filter(None, [args.ops])]])
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from None
    print(f"wrote {target}")
    return 0


def _write(path: str, content: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

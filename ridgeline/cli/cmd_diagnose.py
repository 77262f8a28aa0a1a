"""`ridgeline diagnose`: where the time goes, what the bottleneck is, and what to change next. See docs/diagnose.md.

    ridgeline diagnose [MODEL] [options]                run a workload in this process, measure and profile it
    ridgeline diagnose http://host:port --seconds 20    watch a running server from outside
    ridgeline diagnose --from-trace FILE …              read traces of torch's profiler, one per rank
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline import interrupt
from ridgeline.bench.lab.record import record, write
from ridgeline.bench.load.latency import Slo, parse_slo
from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.cli.cmd_admin import profile
from ridgeline.cli.config_options import add_engine_options, engine_config
from ridgeline.cli.terminal import require_model
from ridgeline.config import EngineConfig
from ridgeline.diagnose.as_page import diagnosis_page
from ridgeline.diagnose.as_text import text
from ridgeline.diagnose.attach import Attached, attach
from ridgeline.early_check import checked_model
from ridgeline.errors import ConfigError
from ridgeline.report.columns import fitted
from ridgeline.roofline import drill
from ridgeline.roofline.facts import PartFacts, facts_of
from ridgeline.roofline.patterns import find_patterns
from ridgeline.roofline.remedies import ranked
from ridgeline.roofline.trace import KNOWN, read_trace, trace_of_steps
from ridgeline.user_files import read_json

_COUNTERS = {"rows": "rows", "tokens": "tokens"}         # counter tracks below the steps in a trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL | URL] [options]"
    parser.add_argument("model", nargs="?", default="", metavar="MODEL | URL",
                        help="name in the HF cache, directory or .gguf file (default: the embedded model), or the address of a "
                             "server, http://host:port")
    load = parser.add_argument_group("workload, without a server")
    load.add_argument("--num-prompts", type=int, default=8, metavar="N", help="number of requests (default: 8)")
    load.add_argument("--input-len", type=int, default=128, metavar="TOKENS", help="prompt length (default: 128)")
    load.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="answer length (default: 64)")
    load.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS",
                      help="length of a prefix common to all prompts (default: 0)")
    load.add_argument("--shortest-output", type=int, default=0, metavar="TOKENS",
                      help="vary answer lengths from this to --output-len (default: all equal)")
    load.add_argument("--max-concurrency", type=int, default=0, metavar="N", help="requests in flight at once (default: all)")
    load.add_argument("--shape", metavar="NAME", help="use a public model's shapes with dummy weights, instead of MODEL")
    load.add_argument("--layers", type=int, metavar="N", help="with --shape: number of layers (default: the model's)")
    server = parser.add_argument_group("a running server")
    server.add_argument("--seconds", type=float, default=20.0, metavar="N", help="how long to watch (default: 20)")
    server.add_argument("--api-key", default="", metavar="KEY", help="the server's API key")
    server.add_argument("--admin-socket", default="", metavar="PATH",
                        help="the server's --admin-socket: also profile its kernels")
    server.add_argument("--profile-steps", type=int, default=64, metavar="N",
                        help="with --admin-socket: number of steps to profile (default: 64)")
    out = parser.add_argument_group("input and output")
    out.add_argument("--slo", nargs="+", default=[], metavar="ttft:MS,tpot:MS", help="latency objectives, for goodput")
    out.add_argument("--from-trace", nargs="+", default=[], metavar="FILE", help="diagnose existing Chrome traces, one per rank")
    out.add_argument("--json", action="store_true", help="print the record as JSON instead of text")
    out.add_argument("--out", metavar="FILE", help="also write the record to this file")
    out.add_argument("--trace", metavar="FILE", help="write a Chrome trace (chrome://tracing, Perfetto)")
    out.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> None:
    slo = parse_slo(args.slo)
    for name in ("trace", "html", "out"):
        path = getattr(args, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such directory")
    if args.from_trace:
        if args.html or args.trace:
            raise ConfigError("--html and --trace need a workload or a server: a trace alone contains no requests and no verdict")
        _show(args, _from_traces(args.from_trace), {"traces": args.from_trace})
    elif args.model.startswith(("http://", "https://")):
        _watch(args, slo)
    else:
        _run_workload(args, slo)


def _run_workload(args: argparse.Namespace, slo: Slo | None) -> None:
    sizes = {"--num-prompts": args.num_prompts, "--input-len": args.input_len, "--output-len": args.output_len}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 <= args.shared_prefix < args.input_len:
        raise ConfigError(f"--shared-prefix must be below --input-len {args.input_len}, got {args.shared_prefix}")
    if not 0 <= args.shortest_output <= args.output_len or args.max_concurrency < 0:
        raise ConfigError("--shortest-output must be at most --output-len, and --max-concurrency at least 0")
    if args.shape and args.model:
        raise ConfigError("--shape names a model: leave MODEL out")
    options = _workload_options(args)
    # These import torch, which watching a server does not need.
    engines, peaks, watched, diagnosis, device_log = (
        interrupt.import_module(f"ridgeline.{name}")
        for name in (
            "bench.workload.bench_engine", "runner.start.measure_peaks", "diagnose.driven_run", "diagnose.diagnosis",
            "bench.lab.device_log",
        )
    )
    model = options.pop("model", "")
    load = watched.Load(
        args.num_prompts, args.input_len, args.output_len, args.shared_prefix, args.shortest_output, args.max_concurrency
    )
    with Console(stderr=True).status("measuring the machine") as status:
        peaks.machine_peaks(device_log.device_kind(options))  # before the engine takes the memory; the result is cached
        status.update("loading")
        engine = engines.Engine(model, **{"enable_prefix_caching": True} | options)
        found = diagnosis.diagnose(engine, load, slo, status.update)
    workload = diagnosis.workload_of(engine, load)
    quality = workload.pop("quality")
    engine.close()
    if args.trace:
        Path(args.trace).write_text(json.dumps(found.trace))
    gpu = device_log.gpu_facts() if workload["device"] == "cuda" else None
    _show(args, found.tree, workload, quality, page=(workload["model"], found.outcomes, found.points), gpu=gpu)


def _workload_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options, checked as far as that is possible without torch."""
    options = engine_config(args).flat()
    if max(options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")) > 1:
        raise ConfigError("a workload is diagnosed in one process: leave parallel sizes out, or diagnose a server's URL")
    if args.shape:
        if args.shape not in SHAPES:
            raise ConfigError(f"unknown shape {args.shape!r}; the shapes are {', '.join(sorted(SHAPES))}")
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        options["model"] = str(write_shape(args.shape, args.layers))
    else:
        require_model(engine_config(args))
    options.setdefault("max_model_len", max(64, args.input_len + args.output_len + 1))
    checked_model(EngineConfig.of(**options))
    return options


def _watch(args: argparse.Namespace, slo: Slo | None) -> None:
    with Console(stderr=True).status("asking the server") as status:
        found = attach(args.model, args.seconds, slo, args.api_key, status.update)
        if args.admin_socket:
            status.update(f"profiling {args.profile_steps} steps")
            document = _profile_server(args.admin_socket, args.profile_steps, found)
        else:
            document = trace_of_steps(found.points, _COUNTERS)
    if args.trace:
        Path(args.trace).write_text(json.dumps(document))
    workload = {"url": args.model, "model": found.model, "seconds": args.seconds}
    _show(args, found.tree, workload, "as the server runs", page=(found.model, [], found.points))


def _profile_server(admin_socket: str, steps: int, found: Attached) -> dict[str, Any]:
    """Kernel times, which only the engine can see. Runs after the figures are taken, because profiling costs time."""
    answer = profile(admin_socket, steps)
    path = Path(answer["trace"])
    document: dict[str, Any] = json.loads(path.read_text())
    shutil.rmtree(path.parent, ignore_errors=True)
    costs = {part: PartFacts(**numbers) for part, numbers in answer["costs"].items()}
    spent = found.take_profile(document, costs, answer["overhead"])
    return document | {KNOWN: {"profiler_s": spent, "gpu": found.tree["gpu"]}}


def _from_traces(paths: list[str]) -> dict[str, Any]:
    traces = []
    for path in paths:
        try:
            traces.append(read_trace(read_json(path, "a Chrome trace of torch's profiler")))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{path} is not a Chrome trace of torch's profiler") from None
    spent = sum(trace.profiler for trace in traces) / len(traces)
    slowest = max((trace.clocks for trace in traces if trace.clocks), key=lambda clocks: clocks.lost, default=None)
    facts = facts_of(traces, profiler=spent, kept=traces[0].kept if len(traces) == 1 else (), clocks=slowest)
    if not facts.seconds:
        raise ConfigError("the traces hold no device kernels and no marked ops")
    findings = find_patterns(facts)
    return {
        "ops": drill.ops_section(facts), "patterns": drill.patterns_section(findings),
        "remedies": drill.remedies_section(ranked(None, findings)),
    }


def _show(
    args: argparse.Namespace, tree: dict[str, Any], workload: dict[str, Any], quality: str = "exact",
    page: tuple[str, Any, Any] | None = None, gpu: dict[str, Any] | None = None,
) -> None:
    made = record("diagnose", workload, tree, quality, gpu)
    if args.out:
        write(made, Path(args.out))
    if args.html and page is not None:
        name, outcomes, points = page
        Path(args.html).write_text(diagnosis_page(tree, f"{name}, diagnosed", workload, outcomes, points))
    print(json.dumps(made) if args.json else fitted(text(tree)))
    for name in ("trace", "html", "out"):
        if getattr(args, name):
            print(f"wrote {getattr(args, name)}", file=sys.stderr)

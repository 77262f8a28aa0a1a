"""`ridgeline bench offline`: speed of the engine without a server, against the memory bandwidth and against a peer.

    decode tok/s = requests × (out − 1) / (time of the run − time of a run with one token each)

The same formula is applied to the peer in the same run, alternating, so that noise of the machine affects both alike.
`--workload` has the small workloads for a CPU; --requests, --input-len and --output-len make others; `--preset` has those for
a GPU (`presets.py`). Options may be lists: every combination is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ridgeline.bench.lab import price, sustain, table
from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.machine_log import Watch, limited
from ridgeline.bench.lab.record import record, write
from ridgeline.bench.lab.sweep import check_runs, cross, figure, parse_options, settings
from ridgeline.bench.options.offline_options import NAMED
from ridgeline.bench.peers import first_tokens
from ridgeline.bench.peers.peer_llama_cpp import LlamaCppPeer
from ridgeline.bench.peers.peer_transformers import TransformersPeer
from ridgeline.bench.workload import presets
from ridgeline.bench.workload.bench_engine import Engine, quality_of
from ridgeline.bench.workload.workloads import PRESETS, Workload
from ridgeline.errors import ConfigError
from ridgeline.models.model_config import ModelConfig
from ridgeline.report.columns import fitted
from ridgeline.resolve import ResolvedConfig
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.step_cost import step_cost
from ridgeline.runner.start.gpu_names import gpu_names
from ridgeline.runner.start.measure_peaks import machine_peaks, read_bandwidth


class Contender(Protocol):
    name: str

    def bytes_per_weight(self, requests: int) -> float:
        """What a decode step with that many requests reads of each weight."""

    def run(self, prompts: list[list[int]], tokens_out: int) -> list[float]:
        """Answer all prompts; seconds from the start to each request's first token, and last the total."""


def run(args: argparse.Namespace) -> None:
    args.repeats = args.repeats if args.repeats is not None else 2 if args.preset else 3
    check_runs(args.repeats, warm_ups=1)
    sustain.check(args.sustain)
    price.check(args.price)
    if args.preset:
        presets.run(args)
        return
    _check_options(args)
    workloads = asked_workloads(args)
    figures: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    combinations = cross({"dtype": args.dtype, "words": [tuple(words) for words in settings(args.set)]})
    facts: dict[str, Any] = {}
    with Watch(gpu_names()) as watch:
        for chosen in combinations:
            named = named_settings(args, chosen) if len(combinations) > 1 else {}
            config = _measure_all(args, chosen, named, workloads, watch, figures, rows, facts, len(combinations) > 1)
    setting = {
        "model": config.model_path.name, "dtype": config.dtype if len(args.dtype) == 1 else args.dtype,
        "threads": torch.get_num_threads(), "repeats": args.repeats, "warm_ups": 1,
        "workloads": [workload.name for workload in workloads], "options": args.set, **facts,
    }
    made = record("offline", setting, figures, quality_of(config), gpu_facts() or None)
    if args.out:
        write(made, Path(args.out))
    _print_report(args, rows, made)


def _measure_all(
    args: argparse.Namespace, chosen: dict[str, Any], named: dict[str, str], workloads: list[Workload], watch: Watch,
    figures: dict[str, Any], rows: list[dict[str, Any]], facts: dict[str, Any], close: bool,
) -> ResolvedConfig:
    """All workloads with one setting of the engine, into `figures` and `rows`; what is to be said of a peer, into `facts`."""
    options = {"dtype": chosen["dtype"], "load_format": args.load_format} | parse_options(chosen["words"])
    engine = Engine(args.model, **options)
    config = engine.config
    contenders: list[Contender] = [engine, *([peer(args.against, config)] if args.against else [])]
    bandwidth = read_bandwidth()
    figures["read_bandwidth_gb_s"] = bandwidth / 1e9
    if config.device == "cpu":
        figures["peak_flops_s"] = machine_peaks("cpu").flops_s
    for workload in workloads:
        begin = time.time()
        row = measure(workload, contenders, config, bandwidth, args.repeats)
        _extend(args, engine, workload, row, watch, begin)
        figures[", ".join([workload.name, *(f"{name}={value}" for name, value in named.items())])] = row
        rows += table_rows(workload, named, row)
        if args.format == "md":
            print(fitted(_line(workload, row)), flush=True)
    if isinstance(contenders[-1], LlamaCppPeer):
        facts["peer"] = contenders[-1].facts()
        figures["start"] = first_tokens.compare(config.model_path, torch.get_num_threads(), args.repeats)
        print(first_tokens.line(figures["start"]), flush=True, file=sys.stderr)
    if close:
        engine.close()
    return config


def _print_report(args: argparse.Namespace, rows: list[dict[str, Any]], made: dict[str, Any]) -> None:
    if args.format != "md":
        print(table.rendered(rows, args.format, made))
        return
    print(f"\n{table.as_markdown(rows)}\n")
    if args.out:
        print(f"wrote {args.out}", file=sys.stderr)


def _check_options(args: argparse.Namespace) -> None:
    if args.shape:
        raise ConfigError("--shape needs a --preset")
    if args.requests and args.workload:
        raise ConfigError("--requests replaces the named workloads: leave --workload out")
    if args.against and args.load_format == "dummy":
        raise ConfigError("--against needs real weights: leave --load-format dummy out")


def peer(name: str, config: ResolvedConfig) -> Contender:
    if name == "transformers":
        return TransformersPeer(config.model_path, config.dtype)
    return LlamaCppPeer(config.model_path, torch.get_num_threads())


def _extend(
    args: argparse.Namespace, engine: Engine, workload: Workload, row: dict[str, Any], watch: Watch, begin: float
) -> None:
    """Adds the GPU's power and clocks, and the figures of --price and --sustain."""
    # With a peer in the same run they cannot be attributed.
    log = watch.gpu((begin, time.time())) if not args.against else {}
    if log:
        row[engine.name]["device_log"] = log
    if args.price is not None:
        watts = watch.watts(begin, time.time()) if not args.against else None
        row[engine.name]["cost"] = cost(workload, args.price, row[engine.name], watts)
    if args.sustain is not None:
        row[engine.name]["sustain"] = sustained(engine, workload, args.sustain, watch)


def asked_workloads(args: argparse.Namespace) -> list[Workload]:
    """The named ones, or every combination of the sizes."""
    if not args.requests:
        return [workload for name in args.workload or sorted(PRESETS) for workload in NAMED[name]]
    lists = {"requests": args.requests, "tokens_in": args.input_len, "tokens_out": args.output_len}
    if any(value < 1 for values in lists.values() for value in values):
        raise ConfigError("--requests, --input-len and --output-len must be above 0")
    return [Workload("{requests}x{tokens_in}+{tokens_out}".format(**sizes), **sizes) for sizes in cross(lists)]


def named_settings(args: argparse.Namespace, chosen: dict[str, Any]) -> dict[str, str]:
    """The values that distinguish this combination from the others."""
    words = [word.partition("=") for word in chosen["words"]]
    several = [name for name, _, _ in (word.partition("=") for word in args.set)]
    found = {name: value for name, _, value in words if several.count(name) > 1}
    return ({"dtype": chosen["dtype"]} if len(args.dtype) > 1 else {}) | found


def sustained(engine: Engine, workload: Workload, minutes: float, watch: Watch) -> dict[str, Any]:
    """The same workload over and over, with other prompts each time."""
    seeds = iter(range(10**9))

    def once() -> dict[str, float]:
        prompts = workload.prompts(engine.config.model.vocab_size, next(seeds))
        *first, total = engine.run(prompts, workload.tokens_out)
        return {"output_tok_s": workload.requests * workload.tokens_out / total, "ttft_ms": 1e3 * sum(first) / len(first)}

    return sustain.repeat(once, minutes, watch)


def cost(workload: Workload, usd: float, figures: dict[str, Any], watts: float | None) -> dict[str, Any]:
    """Of a run as long as the median one."""
    tokens_in, tokens_out = workload.requests * workload.tokens_in, workload.requests * workload.tokens_out
    seconds = (
        tokens_out / figures["output_tok_s"]["median"] if "output_tok_s" in figures
        else tokens_in / figures["prefill_tok_s"]["median"]
    )
    return price.cost(usd, seconds, tokens_in, tokens_out, None if watts is None else watts * seconds)


def table_rows(workload: Workload, named: dict[str, str], row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, found in row.items():
        if not isinstance(found, dict):
            continue
        cells: dict[str, Any] = {"workload": workload.name, **named, "engine": name}
        titles = {"prefill_tok_s": "prefill tok/s", "ttft_ms": "TTFT ms", "decode_tok_s": "decode tok/s", "tpot_ms": "TPOT ms",
                  "output_tok_s": "output tok/s", "share_of_bandwidth": "of bandwidth"}
        cells |= {title: found.get(key) for key, title in titles.items()}
        if "device_log" in found:
            cells["clock limited by"] = found["device_log"].get("limited_by", "")
        if "cost" in found:
            cells["$/M output"] = found["cost"]["usd_per_m_output_tokens"]
        yield cells


def measure(
    workload: Workload, contenders: list[Contender], config: ResolvedConfig, bandwidth: float, repeats: int
) -> dict[str, Any]:
    """Every contender's figures for one workload, and ours over the peer's."""
    vocab = config.model.vocab_size
    times: dict[str, list[tuple[float, float, float]]] = {contender.name: [] for contender in contenders}
    for repeat in range(-1, repeats):                    # the first is warm-up
        prompts = workload.prompts(vocab, repeat)
        for contender in contenders:
            one = contender.run(prompts, 1)
            *first, total = contender.run(prompts, workload.tokens_out) if workload.tokens_out > 1 else one
            if repeat >= 0:
                times[contender.name].append((one[-1], total, sum(first) / len(first)))
    row: dict[str, Any] = {name: _figures(workload, runs) for name, runs in times.items()}
    if workload.tokens_out > 1:
        for contender in contenders:
            figures = row[contender.name]
            bytes_per_weight = contender.bytes_per_weight(workload.requests)
            moved = decode_bytes(config.model, config.dtype, workload, bytes_per_weight)
            decode_seconds = workload.requests * (workload.tokens_out - 1) / figures["decode_tok_s"]["median"]
            figures["bytes_per_weight"] = bytes_per_weight
            figures["share_of_bandwidth"] = moved / decode_seconds / bandwidth
    if len(contenders) > 1:
        ours, theirs = (row[contender.name] for contender in contenders[:2])
        key = "decode_tok_s" if workload.tokens_out > 1 else "prefill_tok_s"
        row["ratio"] = ours[key]["median"] / theirs[key]["median"]
        row["ratio_of_best"] = _best(workload, ours) / _best(workload, theirs)   # what a busy machine disturbs least
    return row


def _figures(workload: Workload, runs: list[tuple[float, float, float]]) -> dict[str, Any]:
    tokens_in, tokens_out = workload.requests * workload.tokens_in, workload.requests * workload.tokens_out
    figures: dict[str, Any] = {
        "runs": [{"one_token_s": one, "all_tokens_s": total} for one, total, _ in runs],
        "prefill_tok_s": _spread([tokens_in / one for one, _, _ in runs]),
        "ttft_ms": _spread([first * 1e3 for _, _, first in runs]),
    }
    if workload.tokens_out > 1:
        decoded = tokens_out - workload.requests
        figures["decode_tok_s"] = _spread([decoded / (total - one) for one, total, _ in runs])
        figures["tpot_ms"] = _spread(
            [(total - one) * 1e3 / (workload.tokens_out - 1) for one, total, _ in runs]
        )
        figures["output_tok_s"] = _spread([tokens_out / total for _, total, _ in runs])
    return figures


def _best(workload: Workload, figures: dict[str, Any]) -> float:
    """Decode steps per second, or prompts per second, with the shortest times of all runs."""
    one = min(run["one_token_s"] for run in figures["runs"])
    if workload.tokens_out == 1:
        return 1 / one
    return float(1 / (min(run["all_tokens_s"] for run in figures["runs"]) - one))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return figure(values, warm_ups=1)


def decode_bytes(model: ModelConfig, dtype: str, workload: Workload, bytes_per_weight: float) -> float:
    """Bytes that the decode steps of a workload must move."""
    shape = decoder_shape(model, dtype, bytes_per_weight)
    contexts = range(workload.tokens_in + 1, workload.tokens_in + workload.tokens_out)
    return float(sum(step_cost(shape, [(1, context)] * workload.requests).bytes for context in contexts))


def _line(workload: Workload, row: dict[str, Any]) -> str:
    parts = [f"{workload.name:9s}"]
    for name, figures in row.items():
        if not isinstance(figures, dict):
            parts.append(f"{name.replace('_', ' ')} {figures:.2f}")
            continue
        text = f"{name}: prefill {figures['prefill_tok_s']['median']:.0f} tok/s"
        text += f", TTFT {figures['ttft_ms']['median']:.0f} ms"
        if "decode_tok_s" in figures:
            text += (
                f", decode {figures['decode_tok_s']['median']:.1f} tok/s, TPOT {figures['tpot_ms']['median']:.1f} ms, "
                f"{figures['share_of_bandwidth']:.0%} of read bandwidth"
            )
        parts.append(text)
        if limit := limited(figures.get("device_log", {})):
            parts.append(limit)
        if "cost" in figures:
            parts.append(price.line(figures["cost"]))
        if "sustain" in figures:
            parts.append(figures["sustain"]["verdict"])
    return "  |  ".join(parts)

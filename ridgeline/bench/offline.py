"""`ridgeline bench offline`: speed of the engine without a server, against the machine's memory and against a peer.

    decode tok/s = requests × (out − 1) / (time of the run − time of a run with one token each)

The same formula is applied to the peer in the same run, alternating, so that a noisy machine is unfair to nobody.
`--workload` has the small workloads for a CPU; `--preset` those for a GPU (`presets.py`).
"""

from __future__ import annotations

import argparse
from typing import Any, Protocol

import torch

from ridgeline.bench import presets
from ridgeline.bench.engine import Engine
from ridgeline.bench.floors import decoder_shape
from ridgeline.bench.peaks import read_bandwidth
from ridgeline.bench.peer_transformers import TransformersPeer
from ridgeline.bench.record import finish, percentiles, record
from ridgeline.bench.workloads import PRESETS, Workload
from ridgeline.costs import decoder_step
from ridgeline.errors import ConfigError
from ridgeline.models.config import ModelConfig
from ridgeline.resolve import ResolvedConfig


class Contender(Protocol):
    name: str

    def bytes_per_weight(self, requests: int) -> float:
        """What a decode step with that many requests reads of each weight."""

    def run(self, prompts: list[list[int]], tokens_out: int) -> list[float]:
        """Answer all prompts; seconds from the start to each request's first token, and last the total."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="HF directory or .gguf file; default: the embedded model")
    parser.add_argument("--workload", nargs="+", choices=sorted(PRESETS), default=sorted(PRESETS))
    parser.add_argument("--against", choices=["transformers"], help="measure a peer in the same run")
    parser.add_argument("--repeats", type=int, help="timed runs of each workload; the median counts (3; of a preset 2)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--out", help="also write the record to this file")
    presets.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if args.preset:
        args.repeats = args.repeats or 2
        presets.run(args)
        return
    if args.shape or args.set:
        raise ConfigError("--shape and --set belong to a --preset")
    args.repeats = args.repeats or 3
    if args.against and args.load_format == "dummy":
        raise ConfigError("--against needs real weights: leave --load-format dummy out")
    engine = Engine(args.model, dtype=args.dtype, load_format=args.load_format)
    contenders: list[Contender] = [engine]
    if args.against:
        contenders.append(TransformersPeer(engine.config.model_path, engine.config.dtype))
    bandwidth = read_bandwidth()
    workloads = [workload for name in args.workload for workload in PRESETS[name]]
    figures: dict[str, Any] = {"read_bandwidth_gb_s": bandwidth / 1e9}
    for workload in workloads:
        figures[workload.name] = row = measure(workload, contenders, engine.config, bandwidth, args.repeats)
        print(_line(workload, row), flush=True)
    setting = {
        "model": engine.config.model_path.name, "dtype": engine.config.dtype, "threads": torch.get_num_threads(),
        "repeats": args.repeats, "workloads": [workload.name for workload in workloads],
    }  # fmt: skip
    finish(record("offline", setting, figures), args.out)


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
    row = {name: _figures(workload, runs) for name, runs in times.items()}
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
    return row


def _figures(workload: Workload, runs: list[tuple[float, float, float]]) -> dict[str, Any]:
    tokens_in, tokens_out = workload.requests * workload.tokens_in, workload.requests * workload.tokens_out
    figures: dict[str, Any] = {
        "prefill_tok_s": percentiles([tokens_in / one for one, _, _ in runs]),
        "ttft_ms": percentiles([first * 1e3 for _, _, first in runs]),
    }
    if workload.tokens_out > 1:
        decoded = tokens_out - workload.requests
        figures["decode_tok_s"] = percentiles([decoded / (total - one) for one, total, _ in runs])
        figures["tpot_ms"] = percentiles(
            [(total - one) * 1e3 / (workload.tokens_out - 1) for one, total, _ in runs]
        )
        figures["output_tok_s"] = percentiles([tokens_out / total for _, total, _ in runs])
    return figures


def decode_bytes(model: ModelConfig, dtype: str, workload: Workload, bytes_per_weight: float) -> float:
    """Bytes that the decode steps of a workload must move."""
    shape = decoder_shape(model, dtype, bytes_per_weight)
    contexts = range(workload.tokens_in + 1, workload.tokens_in + workload.tokens_out)
    return float(sum(decoder_step(shape, [(1, context)] * workload.requests).bytes for context in contexts))


def _line(workload: Workload, row: dict[str, Any]) -> str:
    parts = [f"{workload.name:9s}"]
    for name, figures in row.items():
        if name == "ratio":
            parts.append(f"ratio {figures:.2f}")
            continue
        text = f"{name}: prefill {figures['prefill_tok_s']['median']:.0f} tok/s"
        text += f", TTFT {figures['ttft_ms']['median']:.0f} ms"
        if "decode_tok_s" in figures:
            text += (
                f", decode {figures['decode_tok_s']['median']:.1f} tok/s, TPOT {figures['tpot_ms']['median']:.1f} ms, "
                f"{figures['share_of_bandwidth']:.0%} of read bandwidth"
            )
        parts.append(text)
    return "  |  ".join(parts)

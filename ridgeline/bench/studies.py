"""`ridgeline bench studies`: measures the gain of techniques, each against its off version on the same requests.

- batching: continuous against static, with answers of very different lengths
- paging: paged blocks against contiguous reservations at the same KV memory: waste, and concurrent requests
- cliff: latency and waste as the KV budget shrinks, across the point where preemption begins
- cascade: attention with a shared prefix read once, against once per row; needs a GPU, not in the default (cascade.py)
- long-prompt: the effect of a long prompt on decoding requests, with and without the step-time limit; not in the default
  (long_prompt.py)
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import finish, percentiles, record
from ridgeline.bench.lab.sweep import parse_options
from ridgeline.bench.options.studies_options import CASCADE, LONG_PROMPT
from ridgeline.bench.workload.cascade import cascade
from ridgeline.bench.workload.long_prompt import Sizes, long_prompt
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.errors import ConfigError
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams


def run(args: argparse.Namespace) -> None:
    if CASCADE in args.study and not torch.cuda.is_available():
        raise ConfigError("the cascade study times GPU kernels, and torch finds no GPU here; choose another --study")
    figures: dict[str, Any] = {}
    for name in args.study:
        if name == CASCADE:
            figures[name] = cascade("cuda")
        elif name == LONG_PROMPT:
            figures[name] = _long_prompt(args)
        else:
            figures[name] = {"batching": batching, "paging": paging, "cliff": cliff}[name](args.model, args.requests)
    workload = {"model": args.shape or args.model or "embedded", "requests": args.requests}
    gpu = gpu_facts() if torch.cuda.is_available() else None
    finish(record("studies", workload, figures, gpu=gpu), args)


def _long_prompt(args: argparse.Namespace) -> dict[str, Any]:
    options = parse_options(args.set)
    if args.shape:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    model = str(write_shape(args.shape)) if args.shape else args.model
    return long_prompt(model, Sizes(decodes=args.decodes, prompt=args.prompt), **options)


def batching(model: str, requests: int) -> dict[str, Any]:
    """Answers of 4 to 96 tokens, 8 rows."""
    asked = _requests(requests, tokens_in=16, tokens_out=(4, 96))
    found = {
        kind: _serve(model, asked, max_num_seqs=8, batching=kind, max_model_len=256)
        for kind in ("static", "continuous")
    }
    gain = found["continuous"]["output_tok_s"] / found["static"]["output_tok_s"]
    _show("batching", found, f"continuous is {gain:.2f}x static")
    return found | {"gain": gain}


def paging(model: str, requests: int) -> dict[str, Any]:
    """The KV memory of four reservations of 1,024 tokens; requests use about 80."""
    asked = _requests(requests, tokens_in=48, tokens_out=(32, 32))
    options = {"max_num_seqs": 32, "max_model_len": 1024, "num_gpu_blocks_override": 4 * 64 + 1}
    found = {kind: _serve(model, asked, kv_layout=kind, **options) for kind in ("contiguous", "paged")}
    gain = found["paged"]["output_tok_s"] / found["contiguous"]["output_tok_s"]
    _show("paging", found, f"paged is {gain:.2f}x contiguous")
    return found | {"gain": gain}


def cliff(model: str, requests: int) -> dict[str, Any]:
    """The same load with ever fewer KV blocks: 16 rows of up to 112 tokens want 112 blocks."""
    asked = _requests(requests, tokens_in=48, tokens_out=(64, 64))
    found = {
        str(blocks): _serve(model, asked, max_num_seqs=16, max_model_len=112, num_gpu_blocks_override=blocks + 1)
        for blocks in (112, 80, 56, 40, 28, 16, 8)
    }
    _show("cliff", found, "KV blocks, from plenty to hardly any")
    return found


def _requests(count: int, tokens_in: int, tokens_out: tuple[int, int]) -> list[Request]:
    rng = random.Random(1)
    made = []
    for number in range(count):
        prompt = [rng.randrange(1000) for _ in range(tokens_in)]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(*tokens_out), ignore_eos=True)
        made.append(Request(str(number), prompt, params))
    return made


def _serve(model: str, asked: list[Request], **options: Any) -> dict[str, Any]:
    """All requests at once through a fresh engine."""
    config = EngineConfig.of(model=model, enable_prefix_caching=False, **options)
    core = EngineCore.start(config.for_one_engine())
    _warm_up(core)
    first, last, tokens, most = dict[str, float](), dict[str, float](), 0, 0
    before = core.scheduler.counters.held_slots, core.scheduler.counters.used_slots
    start = time.perf_counter()
    for request in asked:
        core.add(request)
    while core.has_work:
        deltas = core.step()
        most = max(most, core.scheduler.num_running)
        now = time.perf_counter() - start
        for delta in deltas:
            tokens += len(delta.token_ids)
            first.setdefault(delta.request_id, now)
            last[delta.request_id] = now
    seconds = time.perf_counter() - start
    counters = core.scheduler.counters
    core.close()
    return {
        "seconds": seconds,
        "output_tok_s": tokens / seconds,
        "ttft_s": percentiles(list(first.values())),
        "latency_s": percentiles(list(last.values())),
        "most_running": most,
        "kv_use": (counters.used_slots - before[1]) / (counters.held_slots - before[0]),
        "preemptions": counters.preemptions,
        "wasted_tokens": counters.wasted_tokens,
        "steps": counters.steps,
    }


def _warm_up(core: EngineCore) -> None:
    core.add(Request("warm", [1] * 8, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
    while core.has_work:
        core.step()


def _show(title: str, found: dict[str, dict[str, Any]], verdict: str) -> None:
    print(f"{title}: {verdict}")
    for name, row in found.items():
        print(
            f"  {name:>10s}: {row['output_tok_s']:7.1f} tok/s  latency P50 {row['latency_s']['median']:6.2f} s  "
            f"running ≤ {row['most_running']:3d}  KV in use {row['kv_use']:4.0%}  "
            f"preemptions {row['preemptions']:3d}  recomputed {row['wasted_tokens']:5d}",
            flush=True,
        )

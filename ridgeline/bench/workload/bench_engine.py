"""The engine core in this process, fed with token ids: how benchmarks run an engine, without text, sockets or server."""

from __future__ import annotations

import dataclasses
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.bench.workload.workloads import Asked
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.engine.core.gc_policy import collect_old, freeze_loaded
from ridgeline.messages import Request
from ridgeline.metrics import HAPPENED
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.quant.format import quantises_rows
from ridgeline.quant.quality_card import find_card, with_card
from ridgeline.resolve import ResolvedConfig, model_path, resolve
from ridgeline.runner.runner import Runner
from ridgeline.runner.worker import device_facts
from ridgeline.sampling_params import SamplingParams
from ridgeline.techniques import TECHNIQUES

EXACT = "exact"                      # the quality of a record in which nothing was on that may change answers


@dataclass(slots=True)
class Run:
    """What came of some requests that were submitted together."""

    seconds: float                   # until the last token was on the host
    first: list[float]               # until each request's first token
    answers: list[list[int]]
    cached: int                      # prompt tokens that the prefix cache had
    steps: int
    longest_step: float              # seconds between two steps' results, at most: what held a run up shows here
    events: dict[str, int]           # kernels compiled and graphs captured meanwhile, which delay steps
    level: int | None                # rows that ran at once, where not all of them did (sizes/batch_levelling.py)

    @property
    def tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)


class Engine:
    """Ridgeline's core, driven directly. The prefix cache is off unless asked for: repeated prompts would measure it."""

    name = "ridgeline"

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig.of(**{"enable_prefix_caching": False, "step_time_ms": 0.0} | options | {"model": model})
        _free_memory()
        resolved = resolve(config.for_one_engine(), device_facts(config))
        executor = LocalExecutor(resolved)
        self.core = EngineCore(resolved, executor)
        self.runner: Runner = executor.runner
        self.model: Decoder = executor.runner.model
        self.memory = executor.runner.memory             # measured, by part of the ledger; empty without a GPU
        self._count = 0
        self._thresholds = gc.get_threshold()
        freeze_loaded()                                  # as the engine's own process does once it is ready; LLM does not

    def bytes_per_weight(self, requests: int) -> float:
        return self.model.bytes_per_weight(requests)

    @property
    def config(self) -> ResolvedConfig:
        return self.core.config

    def run(self, prompts: list[list[int]], tokens_out: int) -> list[float]:
        """Answer all prompts; seconds from the start to each request's first token, and last the total."""
        run = self.serve([(prompt, tokens_out) for prompt in prompts])
        return [*run.first, run.seconds]

    def serve(self, asked: Asked, salt: str = "", **params: Any) -> Run:
        """Submit all at once, as LLM.generate does, and wait for all. Runs with different salts share no cached prefix."""
        core, steps, cached, happened = self.core, 0, 0, HAPPENED.copy()
        first: dict[str, float] = {}
        longest, start = 0.0, time.perf_counter()
        answers: dict[str, list[int]] = {self.submit(prompt, tokens_out, salt, **params): [] for prompt, tokens_out in asked}
        core.scheduler.begin_with_longest()
        before = time.perf_counter()
        while core.has_work:
            deltas = core.step()
            steps += 1
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
            for delta in deltas:
                if delta.error:
                    raise AssertionError(f"a request of the benchmark failed: {delta.error}")
                if delta.request_id not in first:
                    first[delta.request_id] = time.perf_counter() - start
                    cached += delta.num_cached_tokens
                answers[delta.request_id] += delta.token_ids
        seconds = time.perf_counter() - start
        events = dict(HAPPENED - happened)
        return Run(seconds, list(first.values()), list(answers.values()), cached, steps, longest, events, core.scheduler.level)

    def submit(self, prompt: list[int], tokens_out: int, salt: str = "", **params: Any) -> str:
        """Queue one greedy request that answers with exactly this number of tokens."""
        self._count += 1
        request_id = str(self._count)
        params = {"temperature": 0, "max_tokens": tokens_out, "ignore_eos": True} | params
        self.core.add(Request(request_id, prompt, SamplingParams(**params), cache_salt=salt))
        return request_id

    def settle(self) -> None:
        """Do now what a server does in a quiet moment: record the graphs that the last requests would have had use for, and look
        for garbage.

        Skips the capture of unused graphs (runner/start/graph_warmup.py), which would take longer than some benchmarks.
        """
        while self.runner.forward.prepare():
            pass
        collect_old()

    def close(self) -> None:
        """End it and give its memory back, so that another engine finds the device empty."""
        self.core.close()
        del self.core, self.runner, self.model
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)
        _free_memory()


def _free_memory() -> None:
    """What earlier work has left in torch's hands would count as the next engine's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def quality_of(config: ResolvedConfig | EngineConfig) -> str:
    """"exact", or the techniques that are on and may change answers; with the card's line of quantised weights."""
    groups = dataclasses.asdict(config if isinstance(config, EngineConfig) else config.options)
    options = {name: value for group in groups.values() for name, value in group.items()}
    lossy = [technique.name for technique in TECHNIQUES if not technique.exact and technique.is_on(options)]
    if isinstance(config, ResolvedConfig) and _rounds_rows(config):
        lossy.append("activations in 8 bits")
    said = ", ".join(_kv_quality(options) if name == "quantised KV" else name for name in lossy) or EXACT
    given = config if isinstance(config, EngineConfig) else config.options
    found = find_card(model_path(given)) if given.model.model else None
    return with_card(said, found.line if found is not None and found.matches else "")


def _rounds_rows(config: ResolvedConfig) -> bool:
    """Whether a checkpoint's own format means rows of x in 8 bits, and kernels take them so."""
    if config.device != "cuda" or config.model.quantisation is None:
        return False
    return any(quantises_rows(format) for _, format in LinearFormats(config.model, "none", "cuda").shapes())


def _kv_quality(options: dict[str, Any]) -> str:
    skipped = options["kv_cache_dtype_skip_layers"].replace(" ", "")
    return f"{options['kv_cache_dtype']} KV" + (f" (not layers {skipped})" if skipped else "")

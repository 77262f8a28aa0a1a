"""`bench host`: the host's work for a decode step with drafts, in processor time, without a model.

The engine's core, scheduler, controller, packing and verification are the real ones. Only the forward pass is a stand-in: it
finds each draft right with a fixed chance. On a CPU the engine behaves as beside a GPU: one step is in flight while the next is
planned, and only the "device" knows how many drafts were accepted. What a device would compute is timed apart, as `device`; so
are the launches of a GPU, which are not part of these figures. `tell`, beside them, is the message to the front end.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.bench.lab.record import percentiles
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.ipc import FROM_ENGINE, Deltas
from ridgeline.layers.batch import Batch
from ridgeline.messages import Request, StepPlan, StepResult
from ridgeline.ops.cpu import native
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.runner.device_rows import DeviceRows, leading_decodes
from ridgeline.runner.forward import Computed, best_tokens
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.to_host import greedy_bytes
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafting import NoDrafter
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import EVIDENCE, Paths
from ridgeline.scheduler.drafts.shape_times import Pace, ShapeTimes
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, GraphShapes, Shape

PROMPT = 100
RIGHT = 0.8                          # chance of a draft
STEP_SECONDS = 1.0                   # of every step, whatever its size, and longer than the host ever takes: drafts always pay
_WARM_STEPS = 20                     # that do not count
CALLS = ("plan", "pack", "sample", "collect", "update", "record")


class Dial:
    """A proposer that always has as many drafts as it is asked for."""

    name = "ngram"

    def propose_all(self, sequences: list[Sequence], most: np.ndarray) -> Paths | None:
        count = len(sequences)
        tokens = np.full((count, int(most.max())), 7, np.int32)
        return Paths(np.arange(count), tokens, most, np.full(count, EVIDENCE - 1))

    def ended(self, sequence: Sequence) -> None:
        """It knows no sequence."""


class _Chance:
    """A forward pass that computes nothing: each draft is right with the same chance."""

    replays, stood_in, passing = 0, False, False

    def __init__(self, rows: DeviceRows, max_step_tokens: int) -> None:
        self._rows = rows
        self._shapes = GraphShapes(rows.max_rows, max_step_tokens, MOST_VERIFIED)
        self._room = torch.zeros(greedy_bytes(rows.max_rows + 1), dtype=torch.uint8, device=rows.device)

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        decodes = leading_decodes(plan)
        if decodes < len(plan.rows):
            return None
        if plan.width is not None:
            return self._shapes.fit_drafts(decodes, plan.total_tokens, 1 + int(plan.width.max()))
        return self._shapes.fit(decodes, 0, 0)

    def run(self, batch: Batch, greedy: bool) -> Computed:
        def choose(tokens: Tensor, failed: Tensor, sample_rows: Tensor | None) -> None:
            behind = batch.tokens[(batch.logits_index + 1).clamp(max=len(batch.tokens) - 1)]
            tokens.copy_(behind + (torch.rand(len(tokens), device=tokens.device) >= RIGHT))
            failed.zero_()

        room, rows = self._room, self._rows
        return Computed(None, None, best_tokens(choose, batch, room, rows.last_token, rows.late.surplus))


class _Executor:
    """A real runner around that forward pass. Of each call, milliseconds; what is the device's work counts as `device`."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        size, vocab = config.max_num_seqs, config.model.vocab_size
        self.spent: dict[str, float] = {}
        rows = DeviceRows(
            config.groups, size, config.max_model_len, config.max_num_batched_tokens, config.depth, device,
            config.model.num_heads, drafts=True,
        )
        forward, nothing = _Chance(rows, config.max_num_batched_tokens), SimpleNamespace(run=lambda ops: None)
        sampler = Sampler(size, vocab, set(), device, torch.bfloat16, MOST_VERIFIED)
        model: Any = SimpleNamespace(expert_reads=None, stage=SimpleNamespace(last=True, count=1), weight_reads=None)
        self.runner = Runner(model, forward, rows, sampler, nothing, Communicator())     # type: ignore[arg-type]
        self.runner.knows_at_once = False
        forward.run = self.timed("device", forward.run)                                  # type: ignore[method-assign]
        if device.type == "cpu":                         # on a GPU it is one launch
            rows.late.correct = self.timed("device", rows.late.correct)                  # type: ignore[method-assign]
        self.submit = self.timed("pack", self.runner.submit)
        self.sample = self.timed("sample", self.runner.sample)

    def collect(self) -> StepResult:
        result: StepResult = self._collect()
        result.device_seconds, result.typical = STEP_SECONDS, True
        return result

    @functools.cached_property
    def _collect(self) -> Callable[[], StepResult]:
        return self.timed("collect", self.runner.collect)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            began = time.thread_time()
            value = call(*args)
            self.spent[name] = self.spent.get(name, 0.0) + (time.thread_time() - began) * 1e3
            return value

        return measured

    def prepare(self) -> bool:
        return False

    def start_over(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to close."""


def drafted_steps(running: int, width: int, steps: int, device: str = "cpu") -> dict[str, Any]:
    """Milliseconds of processor time of a decode step with that many rows, and that many drafts of each."""
    answer = (steps + 2 * _WARM_STEPS) * (1 + width)
    options = EngineConfig.of(
        model=str(write_shape("llama-3.1-8b")), skip_tokenizer_init=True, max_model_len=PROMPT + answer + 2 * MOST_DRAFTS,
        max_num_seqs=running, max_num_batched_tokens=max(2048, running * (1 + width)), step_time_ms=0.0,
    )
    config = replace(resolve(options, DeviceFacts("cuda", 10**12, ("bfloat16",))), depth=1)
    executor = _Executor(config, torch.device(device))
    core = EngineCore(config, executor)
    core.scheduler.schedule = executor.timed("plan", core.scheduler.schedule)            # type: ignore[method-assign]
    core.scheduler.update = executor.timed("update", core.scheduler.update)              # type: ignore[method-assign]
    core.recorder.took = executor.timed("record", core.recorder.took)                    # type: ignore[method-assign]
    graphs = GraphShapes(running, config.max_num_batched_tokens, MOST_VERIFIED)
    times = ShapeTimes(lambda tokens, keys: STEP_SECONDS, graphs)
    core.scheduler.drafter = Controller([Dial()], Pace(times), width, native=native.if_built()) if width else NoDrafter()
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    for number in range(running):                        # different lengths: block borders do not fall on the same step for all
        core.add(Request(str(number), [rng.randrange(1000) for _ in range(PROMPT - number % 16)], params))
    found = _steps(core, executor, running * (1 + width), steps)
    core.close()
    spent = {name: [each[name] for each in found] for name in found[0]}
    # The least, too: beside other processes a step finds its memory gone from the caches, and takes longer.
    return {name: percentiles(values) | {"least": min(values)} for name, values in spent.items()} | {"steps": len(found)}


def _steps(core: EngineCore, executor: _Executor, tokens: int, steps: int) -> list[dict[str, float]]:
    """Of the steps with that many tokens. Packing and sampling leave out what counts as the device's."""
    found: list[dict[str, float]] = []
    spent, counters = executor.spent, core.scheduler.counters
    while len(found) < _WARM_STEPS + steps and core.has_work:
        spent.clear()
        before, began = counters.computed_tokens, time.thread_time()
        deltas = core.step()
        whole = (time.thread_time() - began) * 1e3
        began = time.thread_time()
        FROM_ENGINE.encode(Deltas(deltas, running=0, free_blocks=0))
        tell = (time.thread_time() - began) * 1e3
        if counters.computed_tokens - before == tokens and spent.keys() >= set(CALLS):
            device = spent.get("device", 0.0)
            each = {f"{name}_ms": spent[name] for name in CALLS}
            each |= {"device_ms": device, "host_ms": whole - device, "tell_ms": tell}
            each["pack_ms"] -= device
            found.append(each)
    return found[_WARM_STEPS:]

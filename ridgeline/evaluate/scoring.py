"""Scores given sequences with the engine: the logits of every position, teacher-forced.

The sequences run as prompts: scheduled, batched, through the paged KV cache and the kernels and schemes in use. So a quantised
linear or KV cache is evaluated as it serves. With `max_num_batched_tokens=1` every token is a step of its own, which evaluates
the decode kernels.

Logits exist for a few hundred positions at a time; perplexity, divergence and choices keep only figures of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.errors import BadRequest, ConfigError
from ridgeline.evaluate.rounded_inputs import round_inputs
from ridgeline.layers.batch import Batch
from ridgeline.messages import Request, StepPlan
from ridgeline.models.model_config import kv_groups, load_model_config
from ridgeline.ops.registry import set_kernels
from ridgeline.process.progress import progress_bar
from ridgeline.quant.format import Activation
from ridgeline.resolve import model_path
from ridgeline.runner.forward import Computed, Forward
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import Shape
from ridgeline.sizes.kv_spec import blocks_for
from ridgeline.text.tokenizer import Tokenizer

LOGITS_ROWS = 256                    # positions whose logits exist at once
ROWS = 8                             # sequences that are computed together
STEP_TOKENS = {"cpu": 512, "cuda": 4096}

# (which sequence, position p of the first row, logits [n, vocabulary]): row k predicts token p + k + 1.
Take = Callable[[int, int, Tensor], None]
Tick = Callable[[int, int], None]


class Scores(Protocol):
    """A source of logits: an engine, or a file that an engine wrote."""

    @property
    def vocab_size(self) -> int: ...

    def score(self, sequences: Sequence[Sequence[int]], take: Take, tick: Tick | None = None) -> None: ...


class Scorer:
    """An engine for evaluation. Options are the engine's own; sizes that are not given are chosen to fit the task."""

    def __init__(self, options: dict[str, Any], longest: int, show: bool = True) -> None:
        """`longest`: tokens of the longest sequence."""
        if max(options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")) > 1:
            raise ConfigError("evaluation reads logits in one process: use tensor_parallel_size 1 and pipeline_parallel_size 1")
        config = _sized(EngineConfig.of(**options).for_one_engine(), longest)
        self.path = model_path(config)
        with progress_bar(f"loading {self.path.name}", in_bytes=True, wanted=show) as tick:
            self.core = EngineCore.start(config, progress=tick)
        given = config.model.tokenizer
        self.tokenizer = None if config.model.skip_tokenizer_init else Tokenizer.load(given or self.path)
        executor = self.core.executor
        assert isinstance(executor, LocalExecutor)       # one rank
        self._tap = _Tap(executor.runner)
        self._count = 0

    @property
    def vocab_size(self) -> int:
        return self.core.config.model.vocab_size

    def round_inputs(self, activations: Mapping[str, Activation]) -> int:
        """From now on, of linears by path. Returns how many linears that concerns (rounded_inputs.py)."""
        count = round_inputs(self._tap.model, activations)
        if count:
            self._tap.forget_recorded()
        return count

    def score(self, sequences: Sequence[Sequence[int]], take: Take, tick: Tick | None = None) -> None:
        """Call `take` with the logits of every position that has a token after it. Equal sequences are computed once."""
        places: dict[bytes, list[int]] = {}
        for place, sequence in enumerate(sequences):
            if len(sequence) < 2:
                raise BadRequest(f"sequence {place} has {len(sequence)} tokens; a token is judged by those before it")
            places.setdefault(np.asarray(sequence, np.int32).tobytes(), []).append(place)
        self._tap.take, self._tap.places = take, places
        try:
            for number, tokens in enumerate(places):
                params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
                self._add(np.frombuffer(tokens, np.int32).tolist(), params, f"score-{number}")
            self._finish(tick)
        finally:
            self._tap.take = None

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, tick: Tick | None = None, ignore_eos: bool = False,
        seed: int | None = None,
    ) -> list[list[int]]:
        """Greedy answers of at most `tokens` tokens; with a seed they are drawn at temperature 1."""
        answers: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            drawn = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed + number}
            params = SamplingParams(max_tokens=tokens, ignore_eos=ignore_eos, **drawn)   # type: ignore[arg-type]
            answers[self._add(list(prompt), params, "answer")] = []
        self._finish(tick, answers)
        return list(answers.values())

    def _add(self, tokens: list[int], params: SamplingParams, name: str) -> str:
        self._count += 1
        request_id = f"{name}-{self._count}"
        self.core.add(Request(request_id, tokens, params, prefix_caching=False))
        return request_id

    def _finish(self, tick: Tick | None, answers: dict[str, list[int]] | None = None) -> None:
        set_kernels(self.core.config.options.model.kernels)          # one setting for the process, and two engines in it
        done, total = 0, self.core.scheduler.num_waiting
        while self.core.has_work:
            for delta in self.core.step():
                if delta.error:
                    raise BadRequest(f"a sequence could not be computed: {delta.error}")
                if answers is not None:
                    answers[delta.request_id] += delta.token_ids
                done += delta.finish_reason is not None
                if tick is not None:
                    tick(done, total)

    def close(self) -> None:
        """Close the engine and free its memory."""
        self.core.close()
        set_kernels("auto")
        del self.core, self._tap
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _sized(config: EngineConfig, longest: int) -> EngineConfig:
    """Room for a few rows of the task's length, unless options say otherwise: two models must fit side by side."""
    model = load_model_config(model_path(config))
    context = config.model.max_model_len or min(longest + 16, model.max_position_embeddings)
    if longest + 1 > context:
        raise ConfigError(
            f"sequences of {longest} tokens do not fit: with a max_model_len of {context} they have at most {context - 1} "
            "(--context, --needle, --choices)"
        )
    kind = config.model.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    budget = config.scheduler.max_num_batched_tokens or STEP_TOKENS[kind]
    rows = config.scheduler.max_num_seqs or ROWS
    sizes: dict[str, Any] = {"max_model_len": context, "max_num_batched_tokens": budget, "max_num_seqs": rows}
    if config.cache.num_gpu_blocks_override is None and config.cache.kv_cache_memory_bytes is None:
        groups = kv_groups(model, config.cache.block_size)
        sizes["num_gpu_blocks_override"] = rows * blocks_for(groups, context, budget) + 1
    return EngineConfig.of(**{"step_time_ms": 0.0} | config.flat() | sizes)


class _Tap:
    """Wraps the runner's forward pass and passes the logits of prompt positions to `take`."""

    def __init__(self, runner: Runner) -> None:
        self.take: Take | None = None
        self.places: dict[bytes, list[int]] = {}         # tokens -> which of the asked sequences they are
        self._runner = runner
        self._inner: Forward = runner.forward
        self._plan: StepPlan | None = None
        self.replays, self.stood_in = 0, False
        runner.forward = self

    @property
    def model(self) -> torch.nn.Module:
        return self._runner.model

    @property
    def eager(self) -> Forward:
        return self._inner.eager

    @property
    def passing(self) -> bool:
        return self._inner.passing

    def forget_recorded(self) -> None:
        """The model computes something else from now on: recorded steps would replay what it was."""
        self._inner.release()
        self._inner = self._inner.eager

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        self._plan = plan
        return self._inner.shape(plan, greedy)

    def prepare(self) -> bool:
        return self._inner.prepare()

    def release(self) -> None:
        self._inner.release()

    def run(self, batch: Batch, greedy: bool) -> Computed:
        computed = self._inner.run(batch, greedy)
        self.replays, self.stood_in = self._inner.replays, self._inner.stood_in
        if self.take is not None and computed.hidden is not None and self._plan is not None:
            self._show(self._plan, computed.hidden, self.take)
        return computed

    def _show(self, plan: StepPlan, hidden: Tensor, take: Take) -> None:
        rows = self._runner.rows
        first = 0
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            start = int(rows.length[row]) - count        # packing has counted this step's tokens already
            states = hidden[first : first + min(count, int(rows.num_prompt[row]) - 1 - start)]
            first += count
            for place in self.places.get(rows.given[row].tobytes(), ()) if len(states) else ():
                for offset in range(0, len(states), LOGITS_ROWS):
                    take(place, start + offset, self._runner.model.logits(states[offset : offset + LOGITS_ROWS]))


def log_probabilities(logits: Tensor) -> Tensor:
    """Of every id, in float32 or better; sums are float64, so that large vocabularies lose no precision."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True, dtype=torch.float64).log().to(shifted.dtype)

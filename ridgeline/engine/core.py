"""The engine's core: one step at a time, and `_step` below is the whole engine in a few lines.

It knows requests as token ids. Text, streams, HTTP and processes are outside; tensors are below the executor.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ridgeline.cache.manager import KVManager
from ridgeline.config import EngineConfig
from ridgeline.diagnose.cost import decoder_shape
from ridgeline.diagnose.steps import StepRecorder
from ridgeline.engine.executor import Executor, make_executor
from ridgeline.engine.grammar_check import vocabulary_of
from ridgeline.engine.grammars import Grammars
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, EngineDead, one_line
from ridgeline.grammar.vocabulary import GrammarVocabulary
from ridgeline.log import get_logger
from ridgeline.messages import Request, TokenDelta
from ridgeline.resolve import ResolvedConfig, resolve
from ridgeline.runner.fetch import pinned_array
from ridgeline.runner.worker import device_facts
from ridgeline.scheduler.policy import ContinuousBatching, StaticBatching
from ridgeline.scheduler.scheduler import Scheduler, SchedulerLimits
from ridgeline.scheduler.step_time import MeasuredStepTime, NoTimeModel

logger = get_logger("engine")

_GRAMMAR_SECONDS = 0.005             # how long a step without work waits for a grammar before others get a turn


class EngineCore:
    def __init__(self, config: ResolvedConfig, executor: Executor) -> None:
        self.config = config
        self.executor = executor
        self.scheduler = make_scheduler(config)
        self.grammars = make_grammars(config)
        self.recorder = make_recorder(config, executor)
        self._dead = ""                                  # why, once a step has failed

    @classmethod
    def start(cls, options: EngineConfig, progress: Callable[[int, int], None] | None = None) -> EngineCore:
        """Resolve, load, and be ready."""
        config = resolve(options, device_facts(options))
        for name, reason in config.reasons.items():
            logger.debug("%s: %s", name, reason)
        return cls(config, make_executor(config, progress))

    def add(self, request: Request) -> None:
        """Queue a request; BadRequest when it cannot run here."""
        self._check_alive()
        check_token_ids(request, self.config.model.vocab_size)
        self.scheduler.add(request)
        if request.params.structured_outputs is not None:
            self.grammars.prepare(request)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Forget a request, or one of its answers. Unknown ids are no error: it may have finished meanwhile."""
        found = self.scheduler.abort(request_id, index)
        if index is None:
            self.grammars.forget(request_id)
        return found

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenDelta]:
        """One step. When it fails, scheduler and device no longer agree: the engine is dead, and says so from then on.

        Garbage is collected between steps, never inside one: there it would stand between two launches.
        """
        self._check_alive()
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._step()
        except BaseException as error:
            self._dead = one_line(error)
            raise
        finally:
            if collects:
                gc.enable()

    def _step(self) -> list[TokenDelta]:
        """Plan and launch the next step; take in the oldest once more than `depth` are in flight."""
        deltas = self._take_grammars() if self.grammars.num_pending else []
        plan = self.scheduler.schedule()
        if len(plan.rows):
            self.recorder.planned(plan)
            self.executor.submit(plan)
            if self.scheduler.num_constrained:
                deltas += self._sample_constrained()
            else:
                self.executor.sample()
            if self.scheduler.num_in_flight <= self.config.depth:
                return deltas
        elif not self.scheduler.num_in_flight:
            return deltas + self._take_grammars(_GRAMMAR_SECONDS)
        return deltas + self._take_in()

    def _take_in(self) -> list[TokenDelta]:
        """The oldest step in flight."""
        result = self.executor.collect()
        deltas = self.scheduler.update(result)
        self.recorder.took(result, self.scheduler.num_waiting, self.scheduler.has_work)
        return deltas

    def _sample_constrained(self) -> list[TokenDelta]:
        """Sample the newest step, some of whose rows have a grammar: what they may say depends on what they said last.

        So the steps before it are taken in first, and masks are filled while its forward pass runs.
        """
        deltas: list[TokenDelta] = []
        while self.scheduler.num_in_flight > 1:
            deltas += self._take_in()
        wanted, num_sampled = self.scheduler.constrained()
        self.executor.sample(self.grammars.masks.fill(wanted, num_sampled) if wanted else None)
        return deltas + self.scheduler.fail_constrained()

    def _take_grammars(self, wait_seconds: float = 0.0) -> list[TokenDelta]:
        """Requests whose grammar is compiled may run from now on; those whose is none end here."""
        deltas: list[TokenDelta] = []
        for request, matchers, error in self.grammars.take(wait_seconds):
            if error:
                deltas += self.scheduler.fail_request(request, error)
            else:
                self.scheduler.set_matchers(request, matchers)
        return deltas

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster. False: nothing is left to do."""
        return not self._dead and self.executor.prepare()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead(f"the engine has stopped: {self._dead}")

    def close(self) -> None:
        self.grammars.close()
        self.executor.close()


def make_scheduler(config: ResolvedConfig) -> Scheduler:
    options = config.options
    manager = KVManager(
        config.groups,
        config.num_blocks,
        prefix_caching=config.prefix_caching,
        contiguous_tokens=config.max_model_len if config.contiguous else None,
    )
    limits = SchedulerLimits(
        max_rows=config.max_num_seqs,
        max_step_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        chunked_prefill=options.scheduler.enable_chunked_prefill,
    )
    static = options.scheduler.batching == "static"
    return Scheduler(
        limits,
        manager,
        frozenset(config.model.eos_token_ids),
        admission=StaticBatching() if static else ContinuousBatching(),
        time_model=MeasuredStepTime(config.step_seconds) if config.step_seconds else NoTimeModel(),
        use_priorities=options.scheduler.scheduling_policy == "priority",
        seed=options.model.seed,
    )


def make_recorder(config: ResolvedConfig, executor: Executor) -> StepRecorder:
    """Counts what one rank computes and moves; what its products read of a weight, the runner knows."""
    ranks = config.options.parallel.tensor_parallel_size
    shape = decoder_shape(config.model, config.dtype, kv_dtype=config.kv_dtype, block_size=config.groups[0].block_size)
    model = getattr(getattr(executor, "runner", None), "model", None)
    reads = getattr(model, "weight_reads", None)
    return StepRecorder(shape.shard(ranks) if ranks > 1 else shape, config.dtype, reads)


def make_grammars(config: ResolvedConfig, vocabulary: GrammarVocabulary | None = None) -> Grammars:
    """For the tokenizer's vocabulary, unless another is given."""
    on_gpu = config.device == "cuda"
    return Grammars(
        lambda: vocabulary or grammar_vocabulary(config),
        config.options.model.structured_outputs_backend,
        room=lambda shape, _: pinned_array(shape, on_gpu),
    )


def grammar_vocabulary(config: ResolvedConfig) -> GrammarVocabulary:
    """Loads the tokenizer, which takes a moment: asked for in a thread, when the first grammar arrives."""
    given = config.options.model.tokenizer
    tokenizer = Tokenizer.load(Path(given) if given else config.model_path)
    return vocabulary_of(tokenizer, config.model.vocab_size, frozenset(config.model.eos_token_ids))


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Every id that enters the model is checked: on the device a wrong one reads somebody else's memory."""
    params = request.params
    lists = {
        "prompt_token_ids": request.prompt_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or [],
        "logit_bias": list(params.logit_bias or {}),
        "bad_words": [token for word in request.bad_words_token_ids for token in word],
        "resumed": [token for produced in (request.resumed or {}).values() for token in produced],
    }
    for name, tokens in lists.items():
        if tokens and not _all_below(vocab_size, tokens):
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise BadRequest(f"{name} holds token id {wrong}; this model's ids go from 0 to {vocab_size - 1}")


def _all_below(bound: int, tokens: list[int]) -> bool:
    """As 0 <= min(tokens) and max(tokens) < bound, in half the time, which is on the way to the first token."""
    try:
        return int(np.frombuffer(array("I", tokens), np.uint32).max()) < bound
    except OverflowError:                                # negative, or of more than 32 bits
        return False

"""The engine core runs one step at a time: schedule, submit, sample, collect, update (see `_step`).

It handles token ids only. Text and HTTP belong to engine/client and server/, tensors to the executor.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ridgeline.cache.manager import KVManager
from ridgeline.config import EngineConfig
from ridgeline.engine.core.drafters import make_drafter
from ridgeline.engine.core.executor import Executor, make_executor
from ridgeline.engine.core.grammars import Grammars
from ridgeline.engine.core.oom_backoff import StepLimit
from ridgeline.engine.core.slow_answers import SlowAnswers
from ridgeline.engine.ipc import Vocabulary
from ridgeline.errors import BadRequest, EngineDead, one_line
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.messages import Request, TokenDeltas
from ridgeline.models.checkpoints.linear_formats import expert_bytes
from ridgeline.models.stages import stage_config
from ridgeline.ops.cpu import native
from ridgeline.process import platform
from ridgeline.process.log import get_logger
from ridgeline.process.thread_clock import ThreadClock
from ridgeline.resolve import ResolvedConfig, resolve
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.steps import StepRecorder
from ridgeline.runner.memory_errors import is_out_of_memory
from ridgeline.runner.to_host import pinned_array
from ridgeline.runner.worker import device_facts
from ridgeline.scheduler.policy import ContinuousBatching, StaticBatching
from ridgeline.scheduler.scheduler import Scheduler, SchedulerLimits
from ridgeline.scheduler.step_time import FEWEST, MeasuredStepTime, NoTimeModel, StepTimeModel, keys_like_a_token
from ridgeline.sizes.hardware import data_sheet
from ridgeline.sizes.kv_spec import common_block_size
from ridgeline.sizes.mesh_shape import stage_layers
from ridgeline.sizes.op_costs import DTYPE_BYTES

logger = get_logger("engine")

_GRAMMAR_SECONDS = 0.005             # how long a step without work waits for a grammar or a mask before others get a turn
_LONG_STEP = 2048                    # tokens: the device takes longer for them than the collector for young objects
_BEYOND_RIDGE = 1.2                  # see _enough_rows
_STEP_SECONDS = 1e-3                 # of any step: launches, kernels' own times, sampling, the host
# Options whose resolved values are logged: they may be smaller than the user expects.
_LOGGED = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "quantization")
_NO_MEMORY = "the device has no memory for this request, not even in the smallest steps"


class EngineCore:
    def __init__(self, config: ResolvedConfig, executor: Executor, grammars: Grammars | None = None) -> None:
        self.config = config
        self.executor = executor
        self.scheduler = make_scheduler(config)
        self.use_grammars(grammars or make_grammars(config))
        self.recorder = make_recorder(config, executor)
        self._dead = ""                                  # why, once a step has failed
        self._launching = False                          # a step is being launched
        self._unsampled = False                          # the newest step waits for its masks
        self._heard = 0.0                                # when the last result came; 0: there was no work since
        self._collects = True                            # is Python's garbage collector on in this process?
        self._step_limit: StepLimit | None = None        # while steps are smaller because memory ran out
        # On a CPU a step has run when it is launched, so its accepted drafts are known when the next one is packed. Of a GPU the
        # host knows them with the result; until then the device keeps the lengths (runner/row_tables.py).
        # In a pipeline the host knows them before it plans the row again.
        self._device_knows_first = config.device != "cpu" and config.options.parallel.pipeline_parallel_size == 1

    @classmethod
    def start(
        cls, options: EngineConfig, progress: Callable[[int, int], None] | None = None,
        pieces: Callable[[], Vocabulary] | None = None,
    ) -> EngineCore:
        """Resolve the options and load the model. `pieces` gives the tokenizer's vocabulary, which a thread prepares for grammars
        while the weights load; it may block."""
        config = resolve(options, device_facts(options))
        for name, reason in config.reasons.items():
            logger.log(logging.INFO if name in _LOGGED else logging.DEBUG, "%s: %s", name, reason)
        ranks = options.parallel.num_ranks
        if config.device == "cpu" and ranks > platform.cpu_count():
            logger.warning("%d ranks share %d cores and wait for each other: slower than one rank", ranks, platform.cpu_count())
        if pieces is None:
            return cls(config, make_executor(config, progress))
        grammars = make_grammars(config, pieces=pieces)
        grammars.load_early()
        try:
            return cls(config, make_executor(config, progress), grammars)
        except BaseException:
            grammars.close()
            raise

    def use_grammars(self, grammars: Grammars) -> None:
        """From now on; no request has one yet."""
        self.grammars = grammars
        self.slow = SlowAnswers(self.scheduler, grammars)

    def add(self, request: Request) -> None:
        """Queue a request; BadRequest when it cannot run here."""
        self._check_alive()
        check_token_ids(request, self.config.model.vocab_size)
        if self.config.model.headless:
            check_asks_for_a_vector(request)
        self.scheduler.add(request)
        if request.params.structured_outputs is not None:
            self.grammars.prepare(request)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Forget a request, or one of its answers. Unknown ids are no error: it may have finished meanwhile."""
        found = self.scheduler.abort(request_id, index)
        self.slow.forget_ended()
        if index is None:
            self.grammars.forget(request_id)
        return found

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> TokenDeltas:
        """Run one step. If it fails, scheduler and device no longer agree: the engine is dead, and every later call says so.
        Exception: a step that runs out of memory is dropped by both and repeated with fewer tokens.

        Garbage is collected between steps or while a long one runs, never between two launches, where the GPU would wait.
        """
        deltas = self._guarded(self._step)
        if not self.has_work:
            self.slow.forget_ended()
        return deltas

    def _guarded(self, work: Callable[[TokenDeltas], None]) -> TokenDeltas:
        self._check_alive()
        self._collects = gc.isenabled()
        gc.disable()
        deltas = TokenDeltas()
        try:
            try:
                work(deltas)
                return deltas
            except Exception as error:
                if not (self._launching and is_out_of_memory(error)):
                    raise
                reason = one_line(error)                 # the error's traceback keeps the step's tensors alive
            self._start_over(reason, deltas)
            return deltas
        except BaseException as error:
            self._dead = one_line(error)
            raise
        finally:
            if self._collects:
                gc.enable()

    def _step(self, deltas: TokenDeltas) -> None:
        """Plan and launch the next step; take in the oldest once more than `depth` are in flight."""
        if self._unsampled:
            self.sample_masked(deltas)
            if self._step_limit is not None:
                self._apply_step_limit(self._step_limit)
        if self.grammars.num_pending:
            self._take_grammars(deltas)
        while self._device_knows_first and self.scheduler.waits_for_drafts:
            begins = self.scheduler.begins_answers
            deltas += self._take_in()
            if begins:                                   # first tokens do not wait for the plan and launch of the next step
                return
        deltas += self.slow.look_after()
        plan = self.scheduler.schedule()
        if len(plan.rows):
            self.recorder.planned(plan)
            self._launching = True
            self._begin_masks()
            self.executor.submit(plan)
            if self.scheduler.num_constrained:
                self._sample_constrained(deltas)
            else:
                self.executor.sample()
            self._launching = False
            if self._collects and plan.total_tokens >= _LONG_STEP:
                gc.collect(1)                            # or a short step would collect what prompts leave
            if self._step_limit is not None and not self._unsampled:
                self._apply_step_limit(self._step_limit)
            if self.scheduler.num_in_flight <= self.config.depth:
                return
        elif not self.scheduler.num_in_flight:
            self._take_grammars(deltas, _GRAMMAR_SECONDS)
            if self._step_limit is not None:
                self._step_limit.forget()                # a prompt that is computed whole may have no room in small steps
                self._apply_step_limit(self._step_limit)
            return
        deltas += self._take_in()

    def _start_over(self, reason: str, deltas: TokenDeltas) -> None:
        """The newest step did not fit into memory. Running requests start again, from what the prefix cache holds, in smaller
        steps; answers are the same. Requests that do not fit into the smallest step, twice, fail."""
        self._launching = False
        if self.grammars.has_masks:
            self.grammars.masks.forget()
        while self.scheduler.num_in_flight > 1:
            deltas += self._take_in()
        if not self.executor.start_over():
            raise EngineDead(reason)
        plan = self.recorder.dropped()
        sequences = self.scheduler.start_over()
        if self._step_limit is None:
            self._step_limit = StepLimit(self.scheduler.limits.max_step_tokens)
        least = 1 if self.scheduler.limits.chunked_prefill else int(plan.num_tokens.max())
        if self._step_limit.ran_out(plan.total_tokens, least):
            deltas += [self.scheduler.fail(each, _NO_MEMORY) for each in sequences]
        self.scheduler.step_tokens = most = self._step_limit.tokens
        logger.warning("out of memory in a step of %d tokens; trying steps of at most %d: %s", plan.total_tokens, most, reason)

    def _apply_step_limit(self, limit: StepLimit) -> None:
        """A step fitted: the next ones may be larger."""
        if limit.went_well():
            self._step_limit = None
        self.scheduler.step_tokens = limit.tokens

    def _take_in(self, masks: bool = False) -> TokenDeltas:
        """Collect the oldest step in flight and update the scheduler. `masks`: the newest step needs its masks next."""
        result = self.executor.collect()
        now = time.monotonic()
        result.wall_seconds = now - self._heard if self._heard else 0.0
        if self.grammars.has_masks:
            wanted, num_sampled, guesses = self.scheduler.constrained() if masks else ([], 0, {})
            if guesses:                                  # masks along drafts are filled once their matchers have been copied
                wanted = [each for each in wanted if each[0] not in guesses]
            self.grammars.masks.advance(self.scheduler.said(result), wanted, num_sampled)
        deltas = self.scheduler.update(result)
        # The time of a step that captured a graph is not typical, nor is the host's time before the next one.
        self._heard = now if result.typical and self.scheduler.has_work else 0.0
        self.recorder.took(result, self.scheduler.num_waiting, self.scheduler.has_work)
        return deltas

    def _begin_masks(self) -> None:
        """Begin to fill the masks of the step that was just planned, if all tokens before it are known. Not without overlap: on a
        CPU the launch is the whole step, and needs all cores."""
        if self.config.depth and self.scheduler.num_constrained and self.scheduler.num_in_flight == 1:
            self.grammars.masks.begin(*self.scheduler.constrained())

    def _sample_constrained(self, deltas: TokenDeltas) -> None:
        """Sample the newest step, some of whose rows have a grammar: the allowed tokens depend on the last one.

        So the steps before it are taken in first. Other threads fill the masks while its forward pass runs, and while this thread
        takes in the last of those steps. A step that need not be collected now is sampled in the next call, so that the deltas
        leave first.
        """
        self._launching = False
        while (num_in_flight := self.scheduler.num_in_flight) > 1:
            deltas += self._take_in(masks=num_in_flight == 2)
        self._unsampled = True
        if not self.grammars.masks.busy or not self.config.depth:
            self.sample_masked(deltas)

    def sample_masked(self, deltas: TokenDeltas) -> None:
        """Sample the newest step, once its masks are filled."""
        self._unsampled = False
        filling = self.grammars.masks
        masks = filling.fill(*self.scheduler.constrained())
        self._launching = True
        self.executor.sample(masks)
        self._launching = False
        deltas += self.scheduler.masked(filling.left_out)

    def drain(self) -> TokenDeltas:
        """Take in all steps in flight."""
        return self._guarded(self._drain)

    def _drain(self, deltas: TokenDeltas) -> None:
        if self._unsampled:
            self.sample_masked(deltas)
        while self.scheduler.num_in_flight:
            deltas += self._take_in()

    def _take_grammars(self, deltas: TokenDeltas, wait_seconds: float = 0.0) -> None:
        """Requests whose grammar is compiled may run from now on; those whose grammar is invalid end here. With `wait_seconds`,
        wait for one, or for a slow mask."""
        if wait_seconds and self.slow.wait(wait_seconds):
            wait_seconds = 0.0
        for request, matchers, error in self.grammars.take(wait_seconds):
            if error:
                deltas += self.scheduler.fail_request(request, error)
            else:
                self.scheduler.set_matchers(request, matchers)

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster. False: nothing is left to do."""
        return not self._dead and self.executor.prepare()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead(f"the engine has stopped: {self._dead}")

    def close(self) -> None:
        if self._unsampled and not self._dead:
            # Other ranks wait for its tokens, and would not receive the message that ends them.
            with contextlib.suppress(Exception):
                self.executor.sample()
        try:
            self.slow.close()
            self.grammars.close()
        finally:
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
        enough_rows=_enough_rows(config),
        stages=options.parallel.pipeline_parallel_size,
    )
    static = options.scheduler.batching == "static"
    return Scheduler(
        limits,
        manager,
        frozenset(config.model.eos_token_ids),
        admission=StaticBatching() if static else ContinuousBatching(),
        time_model=_time_model(config),
        use_priorities=options.scheduler.scheduling_policy == "priority",
        seed=options.model.seed,
        drafter=make_drafter(config),
        native=native.if_built(),
    )


def _enough_rows(config: ResolvedConfig) -> int | None:
    """Batch size beyond which a row gets no cheaper: GEMMs are compute-bound (1.2 × the ridge point) and longer than a step's
    fixed cost, which counts in small models."""
    sheet = data_sheet(config.device_name)
    if sheet is None or config.dtype not in sheet.flops:
        return None
    weights = sum(count * outputs * inputs for count, outputs, inputs in config.model.token_matrices)
    flops = 2 * weights / config.options.parallel.tensor_parallel_size
    ridge = sheet.ridge(config.dtype) * DTYPE_BYTES[config.dtype] / 2
    if config.model.experts is not None:                 # an expert gets only its share of the rows
        ridge *= config.model.experts.count / config.model.experts.used
    return math.ceil(max(_BEYOND_RIDGE * ridge, _STEP_SECONDS * sheet.rate(config.dtype) / flops))


def _time_model(config: ResolvedConfig) -> StepTimeModel:
    if not config.step_seconds:
        return NoTimeModel()
    model = config.model
    alike = keys_like_a_token(model.token_matrices, model.windows.count(None), model.num_heads, model.head_dim)
    return MeasuredStepTime(config.step_seconds, alike, FEWEST[config.device])


def make_recorder(config: ResolvedConfig, executor: Executor) -> StepRecorder:
    """Counts what one rank of the last stage computes and moves. Its model knows how many bytes GEMMs read of a weight; without
    one, as when steps are only planned, it is the size of the weight."""
    ranks = config.options.parallel.tensor_parallel_size
    stages = config.options.parallel.pipeline_parallel_size
    layers = stage_layers(config.model.num_layers, stages - 1, stages)
    model, stored = stage_config(config.model, layers), config.kv_format.of_stage(layers)
    shape = decoder_shape(
        model, config.dtype, kv=stored, block_size=common_block_size(config.groups),
        expert_bytes=expert_bytes(config.model, config.options.model.quantization, config.device, ranks, config.dtype),
    )
    runner = getattr(executor, "runner", None)
    reads = runner.model.weight_reads if runner is not None else None
    here = shape.shard(ranks) if ranks > 1 else shape
    return StepRecorder(here, config.dtype, reads, config.linear_dtype, ThreadClock().waiting)


def make_grammars(
    config: ResolvedConfig, vocabulary: GrammarVocabulary | None = None, pieces: Callable[[], Vocabulary] | None = None
) -> Grammars:
    """Grammars over `vocabulary`, over `pieces`, or over the vocabulary of the tokenizer, which is then loaded here."""
    on_gpu = config.device == "cuda"

    def of_pieces(given: Vocabulary) -> GrammarVocabulary:
        ends = frozenset(config.model.eos_token_ids)
        return GrammarVocabulary.of(given.pieces, frozenset(given.special_ids), ends, config.model.vocab_size)

    return Grammars(
        lambda: vocabulary or (grammar_vocabulary(config) if pieces is None else of_pieces(pieces())),
        config.options.model.structured_outputs_backend,
        room=lambda shape, _: pinned_array(shape, on_gpu),
    )


def grammar_vocabulary(config: ResolvedConfig) -> GrammarVocabulary:
    """Loads the tokenizer. This takes a moment, so a thread does it when the first grammar arrives; its code is imported only
    then, so that a start need not wait for the import."""
    grammar_check = importlib.import_module("ridgeline.engine.client.grammar_check")
    given = config.options.model.tokenizer
    tokenizer = grammar_check.Tokenizer.load(Path(given) if given else config.model_path)
    found: GrammarVocabulary = grammar_check.vocabulary_of(
        tokenizer, config.model.vocab_size, frozenset(config.model.eos_token_ids)
    )
    return found


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Every id that enters the model is checked: on the device a wrong one reads memory out of bounds."""
    params = request.params
    lists = {
        "prompt_token_ids": request.prompt_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or [],
        "logprob_token_ids": params.logprob_token_ids or [],
        "logit_bias": list(params.logit_bias or {}),
        "bad_words": [token for word in request.bad_words_token_ids for token in word],
        "prediction": request.predicted_token_ids,
        "resumed": [token for produced in (request.resumed or {}).values() for token in produced],
    }
    for name, tokens in lists.items():
        if tokens and not _all_below(vocab_size, tokens):
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            message = f"{name} holds token id {wrong}; this model's ids go from 0 to {vocab_size - 1}"
            raise BadRequest(message, field=name)


def check_asks_for_a_vector(request: Request) -> None:
    """Of a model without a head, whose logits mean nothing."""
    params = request.params
    if params.pooling is None or params.logprobs is not None or params.prompt_logprobs is not None:
        raise BadRequest("this model has no head of a language model: it gives vectors (/v1/embeddings, LLM.embed), not text")


def _all_below(bound: int, tokens: list[int]) -> bool:
    """As 0 <= min(tokens) and max(tokens) < bound, in half the time, which is on the way to the first token."""
    try:
        return int(np.frombuffer(array("I", tokens), np.uint32).max()) < bound
    except OverflowError:                                # negative, or of more than 32 bits
        return False

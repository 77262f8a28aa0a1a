"""A recorded run can be saved and replayed: plans, results and snapshots go through bytes and do the same again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_cases import RecordedStep, Snapshot, snapshot_of
from served_model import wait_until
from test_laws import MODELS, USUAL, requests
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.engine.core.core import EngineCore, make_grammars
from ridgeline.engine.ipc import Codec
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.messages import StepPlan, StepResult
from ridgeline.runner.runner import Runner
from ridgeline.runner.worker import make_runner
from ridgeline.sampling_params import SamplingParams, StructuredOutputs

STEPS: Codec[list[RecordedStep]] = Codec(list[RecordedStep])
RESULTS: Codec[list[StepResult]] = Codec(list[StepResult])
SNAPSHOT: Codec[Snapshot] = Codec(Snapshot)


class Recorder:
    """An executor that remembers what it was told and what it answered."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps: list[RecordedStep] = []
        self.results: list[StepResult] = []
        self.close = inner.close

    def submit(self, plan: StepPlan) -> None:
        self.steps.append(RecordedStep(plan))
        self.inner.submit(plan)

    def sample(self, masks: np.ndarray | None = None) -> None:
        self.steps[-1].masks = None if masks is None else masks.copy()   # the next step's are filled into the same place
        self.inner.sample(masks)

    def collect(self) -> StepResult:
        self.results.append(self.inner.collect())
        return self.results[-1]


def record(
    model: Path, snapshot_at: int | None = None, grammar: bool = False, **options: Any
) -> tuple[EngineCore, Recorder, Snapshot | None]:
    """A run with sampling, log-probabilities, penalties and preemptions; the snapshot is taken after so many steps. With a
    grammar, every third answer has one."""
    core = EngineCore.start(EngineConfig.of(model=str(model), **USUAL | options))
    if grammar:
        vocab_size = core.config.model.vocab_size
        pieces, ends = [bytes([97 + token % 26]) for token in range(vocab_size - 1)] + [b"</s>"], frozenset({vocab_size - 1})
        core.use_grammars(make_grammars(core.config, GrammarVocabulary.of(pieces, ends, ends, vocab_size)))
    recorder = Recorder(core.executor)
    core.executor = recorder
    for number, request in enumerate(requests()):
        request.params = SamplingParams(
            temperature=0.8 * (number % 2), seed=number, max_tokens=12 + number, logprobs=number % 3 or None, ignore_eos=True,
            prompt_logprobs=1 if number == 4 else None, repetition_penalty=1.2 if number % 5 == 0 else 1.0,
            logit_bias={7: 1.5} if number == 2 else None, n=1 + (number == 3),
            structured_outputs=StructuredOutputs(regex="(abc|defg|xyz)*") if grammar and number % 3 == 0 else None,
        )
        core.add(request)
    core.grammars.begin()
    wait_until(lambda: core.grammars.num_pending == core.grammars._outcomes.qsize(), 60)     # or the others are done by then
    snapshot = None
    while core.has_work:
        if snapshot_at is not None and len(recorder.results) == snapshot_at:
            snapshot = snapshot or snapshot_of(core.scheduler)
        core.step()
    return core, recorder, snapshot


def fresh(core: EngineCore) -> Runner:
    return make_runner(core.config, Communicator())


def replay(runner: Runner, steps: list[RecordedStep]) -> list[StepResult]:
    results = []
    for step in steps:
        runner.submit(step.plan)
        runner.sample(None if step.masks is None else step.masks.copy())     # what was decoded cannot be written to
        results.append(runner.collect())
    return results


def same(one: StepResult, other: StepResult, close: float = 0.0) -> None:
    for name in ("tokens", "num_new", "lengths"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.step, one.failed, one.useful, one.recomputed) == (other.step, other.failed, other.useful, other.recomputed)
    for name in ("logprobs", "prompt_logprobs"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.keys() == second.keys()
        for place, value in first.items():
            np.testing.assert_array_equal(value.top_ids, second[place].top_ids)
            np.testing.assert_array_equal(value.ranks, second[place].ranks)
            np.testing.assert_allclose(value.logprobs, second[place].logprobs, rtol=close, atol=0)
            np.testing.assert_allclose(value.top_logprobs, second[place].top_logprobs, rtol=close, atol=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("replay")
    return {name: save_checkpoint(name, folder / name, tie_word_embeddings=False, num_hidden_layers=2) for name in MODELS}


@pytest.mark.parametrize(("name", "grammar"), [
    ("gemma2", False), ("llama", True),
    *(pytest.param(name, False, marks=pytest.mark.slow) for name in MODELS if name != "gemma2"),
])
def test_a_recorded_run_does_the_same_again(name: str, grammar: bool, models: dict[str, Path]) -> None:
    """From the first plan on, with everything switched on, on a runner of its own: the same bits."""
    options = {"num_gpu_blocks_override": 34 if name != "llama" else 33, "max_model_len": 72, "max_num_batched_tokens": 16,
               "tensor_parallel_size": 1, "speculative_config": ""}          # drafts are settled in the order of their steps
    core, recorder, _ = record(models[name], grammar=grammar, **options)
    counters = core.scheduler.counters
    assert counters.chunks and core.scheduler.manager.counters.hit_tokens
    assert counters.preemptions or name in ("mistral", "gemma2"), "with windows 34 blocks are enough"
    steps = STEPS.decode(STEPS.encode(recorder.steps))
    results = RESULTS.decode(RESULTS.encode(recorder.results))
    assert len(steps) == len(results) == counters.steps
    assert any(step.masks is not None for step in steps) is grammar
    assert any(result.logprobs for result in results) and any(result.prompt_logprobs for result in results)
    assert sum(result.recomputed for result in results) == counters.wasted_tokens
    for again, before in zip(replay(fresh(core), steps), results, strict=True):
        same(again, before)
    if grammar:                                          # and it is the masks that make it so
        free = replay(fresh(core), [RecordedStep(step.plan) for step in steps])
        assert any((one.tokens != other.tokens).any() for one, other in zip(free, results, strict=True))


def recomputing_plan(snapshot: Snapshot, num_blocks: int) -> StepPlan:
    """The snapshot's rows on a runner without KV: as many tokens as each had, in blocks also where a window had freed them."""
    held = {int(block) for row in snapshot.rows for table in row.block_ids for block in table}
    spare = iter(sorted(set(range(1, num_blocks)) - held))
    rows = [row for row in snapshot.rows if row.num_computed]
    added = []
    for row in snapshot.rows:
        tables = [np.array([block or next(spare) for block in table.tolist()], np.int32) for table in row.block_ids]
        added.append(replace(row, num_computed=0, block_ids=tables))
    none = np.zeros(0, np.int32)
    return StepPlan(
        snapshot.step, none, added, none.reshape(0, 4), np.array([row.row for row in rows], np.int32),
        np.array([row.num_computed for row in rows], np.int32), np.zeros(len(rows), np.int8),
    )


@pytest.mark.parametrize(("name", "moment"), [
    # Every model and every moment on every commit, all pairs of them in the slow tests.
    pytest.param(name, moment, marks=() if MODELS.index(name) % 3 == place else pytest.mark.slow)
    for name in MODELS for place, moment in enumerate((2, 9, 20))
])
def test_a_snapshot_and_what_followed(name: str, moment: int, models: dict[str, Path]) -> None:
    """A bug report: the rows at one moment, the plans and results since. Windows had freed blocks by then."""
    options = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_batched_tokens": 512}
    core, recorder, taken = record(models[name], snapshot_at=moment, **options)
    assert taken is not None
    snapshot = SNAPSHOT.decode(SNAPSHOT.encode(taken))
    assert len(snapshot.rows) > 3
    freed = any((table == 0).any() for row in snapshot.rows for table in row.block_ids)
    assert freed or name in ("llama", "qwen3") or moment < 9
    first = next(place for place, step in enumerate(recorder.steps) if step.plan.step > snapshot.step)
    runner = fresh(core)
    replay(runner, [RecordedStep(recomputing_plan(snapshot, core.config.num_blocks))])
    after = STEPS.decode(STEPS.encode(recorder.steps[first:]))
    # Float64: the order of sums differs between a prompt in one piece and a decode, far below what float32 can show.
    for again, before in zip(replay(runner, after), recorder.results[first:], strict=True):
        same(again, before, close=1e-6)

"""A step that does not fit into memory: it is forgotten and tried again, smaller; nobody's answer changes. Only who does not fit
into the smallest step fails, alone. [R-08]"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runner import FakeRunner, expected_answer
from served_model import write_model
from test_end_tokens import directory
from test_model_config import LLAMA

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.oom_backoff import CALM_STEPS, MOST_FAILURES, StepLimit
from ridgeline.errors import EngineDead
from ridgeline.messages import Request, StepPlan
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.runner.memory_errors import is_out_of_memory
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import StructuredOutputs

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Cramped(FakeRunner):
    """A device without arithmetic that has no memory for some steps: `refuses` says for which, and at which call."""

    # "before" or "after" the plan is applied, or "sample"
    refuses: Callable[[StepPlan], str] = staticmethod(lambda plan: "")
    refused = 0

    def submit(self, plan: StepPlan) -> None:
        self._where = self.refuses(plan)
        self.refused += bool(self._where)
        if self._where == "before":
            raise NO_MEMORY
        super().submit(plan)
        if self._where == "after":
            raise NO_MEMORY

    def sample(self, masks: None = None) -> None:
        if self._where == "sample":
            raise NO_MEMORY
        super().sample(masks)

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        pass


def core_of(folder: Path, **options: Any) -> tuple[EngineCore, Cramped]:
    options = {"num_gpu_blocks_override": 60, "max_num_seqs": 8, **options}
    given = EngineConfig.of(model=str(directory(folder, config=LLAMA)), **options)
    config = resolve(given, DeviceFacts("cpu", 2**28, ("float32",)))
    runner = Cramped(config.groups, config.num_blocks)
    return EngineCore(config, runner), runner


def run(core: EngineCore, steps: int = 10_000) -> tuple[dict[str, list[int]], dict[str, str]]:
    """(tokens, errors) of the requests, once nothing is left to do."""
    answers: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    for _ in range(steps):
        if not core.has_work:
            break
        for delta in core.step():
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason == "error":
                errors[delta.request_id] = delta.error
    assert not core.has_work, "it does not come to an end"
    core.scheduler.manager.pool.check()
    assert core.scheduler.num_running == core.scheduler.num_waiting == 0
    return answers, errors


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    source = random.Random(3)
    shared = [source.randrange(64) for _ in range(longest)]
    return [
        shared[: source.randrange(longest)] + [source.randrange(64) for _ in range(source.randrange(1, longest))]
        for _ in range(count)
    ]


def answer_to(prompt: list[int], limit: int, core: EngineCore) -> list[int]:
    return expected_answer(prompt, limit, frozenset(core.config.model.eos_token_ids))


@pytest.mark.reliability("R-08")
@pytest.mark.parametrize(("where", "overlap", "steps"), [
    ("before", True, 500), ("after", False, 500), ("sample", True, 500),
    *(pytest.param(where, overlap, 2_000, marks=pytest.mark.slow)
      for where in ("before", "after", "sample") for overlap in (False, True)),
])
def test_out_of_memory_every_fifty_steps_costs_no_answer(where: str, overlap: bool, steps: int, tmp_path: Path) -> None:
    """The pool is too small for all, so that preemptions mix in; every KV slot that is read is checked."""
    core, runner = core_of(tmp_path, max_num_batched_tokens=64, num_gpu_blocks_override=40, async_scheduling=overlap)
    seen = [0]

    def refuses(plan: StepPlan) -> str:
        seen[0] += 1
        return where if seen[0] % 50 == 0 else ""

    runner.refuses = refuses
    asked = prompts(620 * steps // 2_000)
    source, answers, errors = random.Random(4), {}, {}
    waiting = list(enumerate(asked))
    while waiting or core.has_work:
        if waiting and (not core.has_work or source.random() < 0.3):
            number, prompt = waiting.pop()
            core.add(Request(str(number), prompt, SamplingParams(max_tokens=12, temperature=0)))
        for delta in core.step():
            answers.setdefault(int(delta.request_id), []).extend(delta.token_ids)
            if delta.finish_reason == "error":
                errors[delta.request_id] = delta.error
    assert seen[0] >= steps and runner.refused >= steps // 50 and not errors
    assert core.scheduler.counters.out_of_memory == runner.refused
    for number, prompt in enumerate(asked):
        assert answers[number] == answer_to(prompt, 12, core), number
    core.scheduler.manager.pool.check()
    assert core.scheduler.num_running == core.scheduler.num_in_flight == 0


def test_steps_shrink_until_they_fit_and_grow_again(tmp_path: Path) -> None:
    core, runner = core_of(tmp_path, max_num_batched_tokens=64)
    most = [20]
    sizes: list[int] = []

    def refuses(plan: StepPlan) -> str:
        if plan.total_tokens > most[0]:
            return "before"
        sizes.append(plan.total_tokens)
        return ""

    runner.refuses = refuses
    asked = [[each + 1, *range(30)] for each in range(6)]
    for number, prompt in enumerate(asked):
        core.add(Request(str(number), prompt, SamplingParams(max_tokens=9, ignore_eos=True)))
    answers, errors = run(core)
    assert not errors and [answers[str(number)] for number in range(6)] == [expected_answer(each, 9) for each in asked]
    assert max(sizes) == 16 and core.scheduler.step_tokens < 64
    most[0] = 64
    core.add(Request("long", [1, 2], SamplingParams(max_tokens=100, ignore_eos=True)))
    run(core)
    assert core.scheduler.step_tokens == 64
    core.add(Request("late", list(range(64)), SamplingParams(max_tokens=2, ignore_eos=True)))
    run(core)
    assert max(sizes) == 64


@pytest.mark.reliability("R-08b")
@pytest.mark.parametrize("chunked", [True, False])
def test_who_fits_into_no_step_fails_alone(chunked: bool, tmp_path: Path) -> None:
    core, runner = core_of(tmp_path, max_num_batched_tokens=256, enable_chunked_prefill=chunked, max_model_len=256)
    asked = [[each + 1, *range(30 + 15 * each)] for each in range(6)]

    def refuses(plan: StepPlan) -> str:
        """One of the prompts is poison, in steps of any size."""
        rows = {added.row: added.token_ids.tolist()[0] for added in plan.added}
        here.update(rows)
        for row in plan.removed.tolist():
            if row not in rows:
                here.pop(row, None)
        return "after" if any(here.get(row) == 4 for row in plan.rows.tolist()) else ""

    here: dict[int, int] = {}
    runner.refuses = refuses
    for number, prompt in enumerate(asked):
        core.add(Request(str(number), prompt, SamplingParams(max_tokens=9, ignore_eos=True)))
    answers, errors = run(core)
    assert list(errors) == ["3"] and "no memory" in errors["3"]
    for number, prompt in enumerate(asked):
        assert number == 3 or answers[str(number)] == expected_answer(prompt, 9)


@pytest.mark.reliability("R-08b")
def test_when_there_is_no_memory_at_all_everybody_is_told_and_the_engine_lives(tmp_path: Path) -> None:
    core, runner = core_of(tmp_path)
    runner.refuses = lambda plan: "before"
    for number in range(5):
        core.add(Request(str(number), list(range(20)), SamplingParams(max_tokens=9)))
    _, errors = run(core, steps=200)
    assert len(errors) == 5
    runner.refuses = lambda plan: ""
    core.add(Request("next", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)))
    assert run(core)[0]["next"] == expected_answer([1, 2, 3], 5)


def test_where_ranks_share_a_step_the_engine_ends(tmp_path: Path) -> None:
    """Others wait in the middle of a layer; a new engine is the way back."""
    core, runner = core_of(tmp_path)
    runner.refuses = lambda plan: "before"
    runner.start_over = lambda: False                    # type: ignore[method-assign]
    core.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=5)))
    with pytest.raises(EngineDead, match="CUDA out of memory"):
        core.step()
    with pytest.raises(EngineDead):
        core.step()


@pytest.mark.parametrize(("error", "is_memory"), [
    (NO_MEMORY, True),
    (MemoryError(), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried"), True),
    (RuntimeError("std::bad_alloc"), True),
    (RuntimeError("CUDA error: out of memory"), True),
    (RuntimeError("Triton Error [CUDA]: out of memory"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    (ValueError("CUDA error: out of memory"), False),
])
def test_which_errors_are_of_memory(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_what_this_torch_says_without_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_steps_shrink_and_grow_again() -> None:
    limit = StepLimit(100)
    assert not limit.ran_out(90) and limit.tokens == 45
    assert not limit.ran_out(3) and limit.tokens == 1
    assert not limit.ran_out(1) and limit.ran_out(1)   # once more, then it is hopeless
    assert not limit.ran_out(1)                         # which was another one's
    assert not limit.ran_out(80, least=70) and limit.tokens == 70
    assert not any(limit.went_well() for _ in range(CALM_STEPS - 1))
    assert limit.went_well() and limit.tokens == 100
    assert not any(limit.ran_out(100) for _ in range(MOST_FAILURES)) and limit.ran_out(100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("memory") / "tiny")


@pytest.mark.reliability("R-08")
@pytest.mark.parametrize("method", [pytest.param("submit", marks=pytest.mark.slow), "sample"])
def test_a_real_engine_goes_on(method: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, seeded, with penalties, log-probabilities, several answers, a grammar: all as without the fault."""
    asked = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=1, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, bad_words=["a"]),
        SamplingParams(seed=2, n=3, max_tokens=9, ignore_eos=True, min_tokens=4),
        SamplingParams(seed=3, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-f]{10}")),
        SamplingParams(seed=4, max_tokens=12, n=2, structured_outputs=StructuredOutputs(regex="[0-4]{4}[5-9]{4}")),
    ]
    options: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 400, "max_num_seqs": 8, "dtype": "float32"}

    def answers(llm: LLM) -> list[Any]:
        made = llm.generate([f"question {place} " * 9 for place in range(5)], asked, use_tqdm=False)
        found.append([[output.prompt_logprobs, *(each.logprobs for each in output.outputs)] for output in made])
        return [[(each.token_ids, each.text, each.finish_reason) for each in output.outputs] for output in made]

    def same_logprobs(some: Any, others: Any) -> bool:
        """The same tokens at the same ranks, with log-probabilities that differ by rounding at most: what is computed again is
        computed in other batches."""
        if some is None or others is None:
            return some is others
        if isinstance(some, Sequence):
            return len(some) == len(others) and all(map(same_logprobs, some, others))
        return some.keys() == others.keys() and all(
            (some[token].rank, some[token].decoded_token) == (others[token].rank, others[token].decoded_token)
            and math.isclose(some[token].logprob, others[token].logprob, rel_tol=1e-5, abs_tol=1e-5)
            for token in some
        )

    found: list[Any] = []                                # the log-probabilities of each of these
    whole, calls, refused = getattr(Runner, method), [0], [lambda number: False]

    def cramped(*args: Any) -> Any:
        calls[0] += 1
        if refused[0](calls[0]):
            raise MemoryError
        return whole(*args)

    monkeypatch.setattr(Runner, method, cramped)
    llm = LLM(model, **options)
    expected = answers(llm)
    refused[0] = lambda number: number in (2, 8, 9, 24)
    calls[0] = 0
    assert answers(llm) == expected and calls[0] > 24
    assert len(found[0][0][0]) > 9 and len(found[0][0][1]) == 12     # of the first prompt, and of its answer
    assert same_logprobs(found[0], found[1])
    refused[0] = lambda number: number % 4 == 0          # nobody gets anywhere: that has an end, too
    answers(llm)
    refused[0] = lambda number: True
    assert {finish for output in answers(llm) for _, _, finish in output} == {"error"}
    refused[0] = lambda number: False
    assert answers(llm) == expected and same_logprobs(found[0], found[-1])
    llm.close()

"""Steps before anybody asks for them: all that are recorded, and nobody's answer is another for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.messages import Request, StepPlan
from ridgeline.runner.cuda_graphs import MOST_PADDING, PASSING_PADDING
from ridgeline.runner.runner import Runner
from ridgeline.runner.shared_prefix import FEWEST_SAVED, NoSharedPrefixes, SharedPrefixes
from ridgeline.runner.start import graph_warmup
from ridgeline.runner.start.graph_warmup import Rehearsal
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import GraphShapes, Shape, decode_sizes

ROWS, TOKENS, LONGEST = 20, 256, 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("rehearsal"), max_position_embeddings=256)


class Seen:
    """In the place of CUDA graphs: what ran, and with what."""

    launch_bound = 2048

    def __init__(self, runner: Runner, known: set[tuple[Shape, bool]]) -> None:
        self.known, self.plans = known, list[StepPlan]()
        self.at_once, self.stood_in = 0, list[tuple[Shape, bool]]()
        submit = runner.submit
        runner.submit = lambda plan: (self.plans.append(plan), submit(plan))[1]      # type: ignore[method-assign]

    def is_new(self, shape: Shape, greedy: bool, shares_prefix: bool = False) -> bool:
        return (shape, greedy) not in self.known and not any(self._is_of(plan, shape, greedy) for plan in self.plans)

    @staticmethod
    def _is_of(plan: StepPlan, shape: Shape, greedy: bool) -> bool:
        """Was it captured before, with drafts?"""
        if plan.width is None or (plan.added[0].params.temperature == 0.0) != greedy:
            return False
        return GraphShapes(ROWS, TOKENS, 64).fit_drafts(len(plan.rows), plan.total_tokens, 1 + int(plan.width.max())) == shape

    def wanted(self) -> list[tuple[Shape, bool]]:
        return self.stood_in

    @contextmanager
    def at_first_use(self) -> Iterator[None]:
        self.at_once += 1
        yield


def start(
    model: Path, known: set[tuple[Shape, bool]] | None = None, most_verified: int = 0
) -> tuple[EngineCore, Rehearsal, Seen]:
    core = EngineCore.start(EngineConfig.of(
        model=str(model), device="cpu", dtype="float32", max_num_seqs=ROWS, max_num_batched_tokens=TOKENS,
        max_model_len=LONGEST, num_gpu_blocks_override=200, speculative_config="ngram" if most_verified else None,
    ))
    assert isinstance(core.executor, LocalExecutor)
    runner = core.executor.runner
    seen = Seen(runner, known or set())
    rehearsal = Rehearsal(runner, seen, len(core.config.groups), ROWS, TOKENS, LONGEST, most_verified=most_verified)   # type: ignore[arg-type]
    return core, rehearsal, seen


def answer(core: EngineCore, **params: Any) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    for number in range(6):
        said = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": number, "logprobs": 2} | params)
        core.add(Request(str(number), [5 + number, *range(3, 20 + 5 * number)], said))
        answers[str(number)] = []
    while core.has_work:
        for delta in core.step():
            assert not delta.error
            answers[delta.request_id] += delta.token_ids
    return answers


def test_every_decode_and_every_single_prompt_comes_once(model: Path) -> None:
    core, rehearsal, seen = start(model)
    while rehearsal.go_on():
        pass
    shapes = GraphShapes(ROWS, TOKENS)
    assert shapes.decodes == [1, 2, 4, 8, 12, 16, 20] and shapes.prompt_tokens == [64, 128, 192, 256]
    # Likely sizes first; a prompt of 256 is too long.
    wanted = [[1], [64], [128], *([1] * size for size in (2, 4, 8, 12, 16, 20)), [192]]
    alone = [plan for plan in seen.plans if len(plan.rows) == 1 or plan.num_tokens.max() == 1]
    assert [plan.num_tokens.tolist() for plan in alone] == [counts for counts in wanted for _ in range(2)]
    kinds = [plan.added[0].params.temperature for plan in alone]
    assert kinds == [0.0, 1.0] * len(wanted), "greedy, then sampled"
    assert seen.at_once == len(seen.plans), "each is captured at once"
    assert not rehearsal.go_on()
    core.close()


def test_every_shape_with_drafts_comes_too(model: Path) -> None:
    """Greedy and sampled. Each step fills its shape; one that has come by itself is left out."""
    known = Shape(1, draft_tokens=8, queries=16)
    core, rehearsal, seen = start(model, {(known, False)}, most_verified=64)
    expected = answer(core, temperature=0.0)
    while rehearsal.go_on():
        pass
    shapes = GraphShapes(ROWS, TOKENS, 64)
    drafted = [plan for plan in seen.plans if plan.width is not None and plan.step == 0]
    found = [
        (shapes.fit_drafts(len(plan.rows), plan.total_tokens, 1 + int(plan.width.max())), plan.added[0].params.temperature)
        for plan in drafted
    ]
    wanted = [(shape, kind) for kind in (0.0, 1.0) for shape in shapes.drafted() if (shape, kind) != (known, 1.0)]
    wide = [(shape, kind) for kind in (0.0, 1.0) for shape in shapes.wide()]
    assert wide and found == wide + [each for each in wanted if each not in wide], "those first that stand in for most others"
    wanted = found
    assert [plan.total_tokens for plan in drafted] == [shape.draft_tokens for shape, _ in wanted]
    assert answer(core, temperature=0.0) == expected
    core.close()


def test_every_number_of_decodes_comes_before_all_shapes_with_drafts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of these than graphs are kept, and whether drafts pay is measured against decodes."""
    monkeypatch.setattr(graph_warmup, "COMMON", {1, 64})
    monkeypatch.setattr(graph_warmup, "covering", lambda sizes: {20})
    core, rehearsal, seen = start(model, most_verified=64)
    while rehearsal.go_on():
        pass
    kinds = [plan.width is not None for plan in seen.plans]
    wide = 2 * len(GraphShapes(ROWS, TOKENS, 64).wide())
    last = max(place for place, plan in enumerate(seen.plans) if plan.width is None and plan.num_tokens.max() == 1)
    assert sum(kinds[:last]) == wide < sum(kinds)
    core.close()


def test_prompts_beside_decodes_come_too(model: Path) -> None:
    """Some, which stand in for all others (tests/runner/test_graph_padding.py), and later those that they stood in for, once."""
    known = Shape(12, 8, 192)
    core, rehearsal, seen = start(model, {(known, True)})
    expected = answer(core, temperature=0.0)

    def mixed() -> list[tuple[Shape | None, bool]]:
        found = []
        for plan in seen.plans:
            if (prompts := int((plan.num_tokens > 1).sum())) and prompts < len(plan.rows):
                decodes = len(plan.rows) - prompts
                shape = shapes.fit(decodes, prompts, plan.total_tokens - decodes)
                found.append((shape, plan.added[0].params.temperature == 0.0))
        return found

    shapes = GraphShapes(ROWS, TOKENS)
    seen.plans.clear()
    while rehearsal.go_on():
        pass
    wanted = [(shape, greedy) for greedy in (True, False) for shape in shapes.mixed(2048)]
    assert mixed() == [each for each in wanted if each != (known, True)] and len(wanted) == 16 and (known, True) in wanted
    seen.plans.clear()
    seen.stood_in = [(Shape(4, 2, 128), True), (known, True)]
    assert rehearsal.go_on() and not rehearsal.go_on()
    assert mixed() == [(Shape(4, 2, 128), True)], "what a larger graph stood in for; the other is captured"
    assert answer(core, temperature=0.0) == expected
    core.close()


def test_where_a_prompt_cannot_fill_a_shape_it_has_the_largest_that_it_can(model: Path) -> None:
    """A prompt of a short context beside decodes found no graph, and waited for its own to be captured."""
    core, rehearsal, seen = start(model)
    rehearsal._longest = 77
    seen.plans.clear()
    while rehearsal.go_on():
        pass
    counts = [plan.num_tokens.tolist() for plan in seen.plans]
    assert [1] * (ROWS - 1) + [77] in counts and [1] * (ROWS - 2) + [77, 77] in counts
    core.close()


def test_some_sizes_of_decodes_behind_a_shared_prefix_stand_in_for_all(model: Path) -> None:
    core, rehearsal, _ = start(model)
    rehearsal._shapes = GraphShapes(512, 2048)
    assert not list(rehearsal._shared(4096, True))       # a CPU reads every prefix for each row
    rehearsal._runner.rows.schedule.prefixes = [NoSharedPrefixes(), SharedPrefixes(16, 4)]
    steps = list(rehearsal._shared(4096, True))
    sizes = [len(step.counts) for step in steps]
    assert all(size * step.past > FEWEST_SAVED and step.used for size, step in zip(sizes, steps, strict=True))
    for rows in range(8, 513):                           # fewer rows need a longer prefix than this model takes
        fitting = GraphShapes(512, 2048).fit(rows, 0, 0)
        assert fitting is not None and any(fitting.decodes <= size <= PASSING_PADDING * fitting.decodes for size in sizes)
    assert [len(step.counts) for step in rehearsal._shared(200, True)] == [512]          # others need longer prefixes
    for most, sizes in ((700, [700, 512, 128, 32]), (6, [6]), (5, []), (1, [])):         # fewer than six rows share nothing
        rehearsal._shapes = GraphShapes(most, 2048)
        assert [len(step.counts) for step in rehearsal._shared(100_000, True)] == sizes
    core.close()


def test_what_has_come_by_itself_is_left_out(model: Path) -> None:
    core, rehearsal, seen = start(model, {(Shape(1), False), (Shape(0, 1, 64), True)})
    for _ in range(2):
        rehearsal.go_on()
    seen.known |= {(Shape(0, 1, 128), True), (Shape(0, 1, 128), False)}                  # meanwhile
    rehearsal.go_on()
    assert [(plan.num_tokens.tolist(), plan.added[0].params.temperature) for plan in seen.plans] == [
        ([1], 0.0), ([64], 1.0), ([1, 1], 0.0),
    ]
    core.close()


@pytest.mark.parametrize("rows", [1, 7, 20, 256, 300, 1024, 2000])
def test_every_number_of_decodes_has_a_graph_of_little_more_at_the_start(rows: int) -> None:
    sizes = decode_sizes(rows)
    chosen = graph_warmup.covering(sizes)
    assert chosen <= set(sizes) and len(chosen) <= 16
    assert all(any(size <= each <= MOST_PADDING * size for each in chosen) for size in sizes)


def test_before_ready_it_ends_when_the_time_is_over_and_goes_on_when_idle(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, rehearsal, seen = start(model)
    clock = iter(range(100))
    monkeypatch.setattr(graph_warmup.time, "monotonic", lambda: float(next(clock)))
    assert rehearsal.before_ready(4.0) == 3              # a second each, and one to begin with
    assert rehearsal.go_on() and len(seen.plans) == 4
    core.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_before_between_and_after_are_the_same(model: Path, temperature: float) -> None:
    """With the prefix cache on: what is kept for later requests is not written over."""
    plain, *_ = start(model)
    expected = answer(plain, temperature=temperature)
    plain.close()
    core, rehearsal, _ = start(model)
    assert answer(core, temperature=temperature) == expected
    for _ in range(3):
        for _ in range(7):
            rehearsal.go_on()
        assert answer(core, temperature=temperature) == expected
    assert core.scheduler.manager.counters.hit_tokens > 0
    core.close()


def test_rows_are_free_afterwards(model: Path) -> None:
    """A row that ended with wishes of its own lends nothing of them, and gets nothing."""
    core, rehearsal, _ = start(model)
    answer(core, temperature=1.0, logit_bias={7: 50.0}, prompt_logprobs=1)
    while rehearsal.go_on():
        pass
    assert isinstance(core.executor, LocalExecutor)
    runner = core.executor.runner
    assert not runner._num_logprobs and not runner._num_prompt_logprobs
    assert runner._sampler.all_greedy(np.arange(0)) and not runner._steps
    core.close()


def test_without_memory_it_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, rehearsal, _ = start(model)
    assert isinstance(core.executor, LocalExecutor)
    runner = core.executor.runner

    def submit(plan: StepPlan) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "submit", submit)
        assert not rehearsal.go_on()
    assert not rehearsal.go_on()
    assert len(answer(core, temperature=0.0)) == 6
    core.close()

"""The engine on a GPU: what only a device can show. Skipped where there is none; `make test-gpu` runs it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import VOCAB
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.messages import Request
from ridgeline.metrics import HAPPENED
from ridgeline.ops.attention import kernel_prefill_hopper
from ridgeline.runner import shared_prefix
from ridgeline.runner.cuda_graphs import GraphForward
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import GraphShapes, Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("gpu"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for the kernels of few rows."""
    return save_checkpoint(
        "llama", tmp_path_factory.mktemp("wide"), tie_word_embeddings=False, hidden_size=512, intermediate_size=1024,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    )


def start(model: Path, **options: Any) -> EngineCore:
    sizes = {"max_num_seqs": 16, "num_gpu_blocks_override": 400, "device": "cuda", "dtype": "bfloat16"}
    return EngineCore.start(EngineConfig.of(model=str(model), **sizes | options))


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    return [
        shared[: rng.choice([0, 17, 40])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]
        for _ in range(count)
    ]


def answer(core: EngineCore, asked: list[list[int]], tokens: int = 24, logprobs: int | None = None, **params: Any) -> Answers:
    answers: Answers = {}
    said = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": logprobs} | params)
    for number, prompt in enumerate(asked):
        core.add(Request(str(number), prompt, said))
        answers[str(number)] = []
    while core.has_work:
        for delta in core.step():
            assert not delta.error
            answers[delta.request_id] += delta.token_ids
    return answers


def test_no_kernel_is_compiled_after_ready(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full batches, mixed steps, every way to choose a token, log-probabilities: all were compiled before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))        # empty: what was missed would be compiled now
    core = start(wide)
    before = HAPPENED["kernel_compile"]
    answer(core, prompts(1))
    answer(core, prompts(40))
    for params in ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "repetition_penalty": 1.1}):
        answer(core, prompts(3), tokens=4, **params)
        answer(core, prompts(16), tokens=4, logprobs=3, **params)
    answer(core, prompts(4), tokens=4, prompt_logprobs=2)
    assert HAPPENED["kernel_compile"] == before
    core.close()


def test_nothing_is_allocated_after_ready(model: Path) -> None:
    """Full batches, mixed steps, recorded and replayed graphs, sampling and log-probabilities."""
    core = start(model)
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        answer(core, prompts(40))
        answer(core, prompts(16), logprobs=3)
        answer(core, prompts(16), temperature=0.8, top_p=0.9, top_k=20, seed=1)
    while core.prepare():
        pass
    answer(core, prompts(40))
    assert torch.cuda.memory_reserved() == before
    core.close()


def test_quiet_moments_record_what_will_come(model: Path) -> None:
    """Decodes of every size, drawn and greedy, and the prefix cache keeps what it has."""
    core = start(model, dtype="float32")
    asked = prompts(16)
    expected = answer(core, asked)
    while core.prepare():
        pass
    assert isinstance(core.executor, LocalExecutor)
    forward = core.executor.runner.forward
    assert isinstance(forward, GraphForward)
    recorded = {key[:2] for key in forward._captured}
    sizes = GraphShapes(16, core.config.max_num_batched_tokens).decodes
    assert {(Shape(size), greedy) for size in sizes for greedy in (False, True)} <= recorded
    assert answer(core, asked) == expected and core.scheduler.manager.counters.hit_tokens > 0
    core.close()


def test_prompts_beside_decodes_run_in_larger_graphs_from_the_first_step_on(model: Path) -> None:
    """Answers of many lengths: prompts begin one after the other beside rows that decode. All shapes are new, and few are
    captured while requests wait. Without a target time of steps, which would cut prompts by what steps took."""
    asked, answers = prompts(60), []
    for options in ({}, {"enforce_eager": True}):
        core = start(
            model, dtype="float32", enable_prefix_caching=False, shared_prefix_attention=False, step_time_ms=0, **options
        )
        while core.prepare():
            pass
        before, said = HAPPENED["graph_recording"], {str(number): list[int]() for number in range(len(asked))}
        for number, prompt in enumerate(asked):
            params = SamplingParams(temperature=0, max_tokens=5 + number * 7 % 23, ignore_eos=True)
            core.add(Request(str(number), prompt, params))
        while core.has_work:
            for delta in core.step():
                assert not delta.error
                said[delta.request_id] += delta.token_ids
        assert HAPPENED["graph_recording"] - before <= 2
        answers.append(said)
        core.close()
    assert answers[0] == answers[1]


def test_deterministic_answers_do_not_depend_on_the_batch(model: Path) -> None:
    asked = prompts(24)
    core = start(model, deterministic=True)
    together = answer(core, asked)
    alone = {str(number): answer(core, [prompt])["0"] for number, prompt in enumerate(asked)}
    core.close()
    assert together == alone


def test_deterministic_prompts_do_not_depend_on_what_others_want(model: Path) -> None:
    """Beside somebody who wants log-probabilities of its prompt, whose last layer has to compute all of it."""
    core = start(model, deterministic=True, enable_prefix_caching=False)
    (mine, theirs), said = prompts(2, longest=20), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)

    def logprobs(*others: SamplingParams) -> list[float]:
        core.add(Request("mine", mine, said))
        for number, params in enumerate(others):
            core.add(Request(str(number), theirs, params))
        found: list[float] = []
        while core.has_work:
            for delta in core.step():
                if delta.request_id == "mine":
                    found += [float(value) for each in delta.logprobs for value in each.top_logprobs.ravel()]
        return found

    alone = logprobs()
    assert len(alone) == 18
    assert logprobs(SamplingParams(max_tokens=2, prompt_logprobs=1)) == alone == logprobs(said)
    core.close()


def test_graphs_and_shared_prefixes_change_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 1)
    monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 2)
    asked = prompts(24)
    plain = start(model, dtype="float32", enforce_eager=True, shared_prefix_attention=False, async_scheduling=False)
    expected = answer(plain, asked)
    plain.close()
    core = start(model, dtype="float32")
    for _ in range(3):                                   # eager, recorded, replayed
        assert answer(core, asked) == expected
    assert isinstance(core.executor, LocalExecutor)
    assert core.executor.runner.forward.replays > 0
    core.close()


@pytest.mark.parametrize("own", [True, False])
def test_a_draft_model_changes_nothing(model: Path, wide: Path, own: bool) -> None:
    """The model itself, all of whose drafts are right, and another one; launched, captured and replayed."""
    asked, given = prompts(12), {"method": "draft_model", "model": str(model if own else wide), "adaptive": False}
    plain = start(model, dtype="float32")
    expected = [answer(plain, asked), answer(plain, asked, temperature=0.9, seed=5)]
    plain.close()
    core = start(model, dtype="float32", speculative_config=json.dumps(given | {"num_speculative_tokens": 4}))
    for _ in range(3):
        assert [answer(core, asked), answer(core, asked, temperature=0.9, seed=5)] == expected
    counters = core.scheduler.drafter.counters           # type: ignore[attr-defined]
    assert counters.draft_tokens > 0
    if own:                                              # other rows in a step may round otherwise
        assert counters.accepted_tokens >= 0.98 * counters.draft_tokens
    core.close()


def test_blocks_of_one_token_change_nothing(model: Path) -> None:
    """A block is full as soon as it is written: what a step publishes must have been written by an earlier kernel."""
    asked = prompts(24)
    found = []
    for size in (16, 1):
        core = start(model, dtype="float32", block_size=size, num_gpu_blocks_override=6400 // size)
        found.append([answer(core, asked) for _ in range(3)])
        core.close()
    assert found[0] == found[1]


def test_graphs_give_what_eager_steps_give(wide: Path) -> None:
    """The same kernels on the same rows: the same bits, in bf16 too. One request is one row in both."""
    asked = prompts(6)
    eager, core = start(wide, enforce_eager=True), start(wide)
    for prompt in asked:
        expected = answer(eager, [prompt])
        for _ in range(3):
            assert answer(core, [prompt]) == expected
    eager.close()
    core.close()


def test_prompts_fetched_page_by_page_change_nothing(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks over a context, and chunks beside decodes; recorded and not. In bf16 a tie may fall otherwise."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    asked = prompts(24, longest=50)
    launched: list[object] = []
    launch = kernel_prefill_hopper.prompt_attention
    monkeypatch.setattr(kernel_prefill_hopper, "prompt_attention", lambda *args: launched.append(launch(*args)))
    core = start(wide, max_num_batched_tokens=64)
    found = [answer(core, asked, 4) for _ in range(3)]
    core.close()
    assert launched
    monkeypatch.setattr(kernel_prefill_hopper, "wants_tiles", lambda *model: False)
    count = len(launched)
    core = start(wide, max_num_batched_tokens=64)
    expected = answer(core, asked, 4)
    core.close()
    assert len(launched) == count
    for answers in found:
        same = sum(answers[key] == expected[key] for key in expected)
        assert same >= 0.8 * len(asked)


@pytest.mark.parametrize("stored", ["fp8", "int8", "k=int8,v=fp8", "k=auto,v=int8"])
def test_quantised_kv_stays_close(stored: str, model: Path) -> None:
    """A random model is no judge of quality, but most of its tokens survive if scales and pages are right."""
    asked = prompts(24)
    exact, narrow = start(model, dtype="float32"), start(model, dtype="float32", kv_cache_dtype=stored)
    expected, found = answer(exact, asked, 4), answer(narrow, asked, 4)
    same = sum(a == b for key in expected for a, b in zip(expected[key], found[key], strict=True))
    assert same >= 0.6 * 4 * len(asked)
    exact.close()
    narrow.close()

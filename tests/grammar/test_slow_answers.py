"""Answers whose masks take too long for a step: no other row waits for them, and their tokens are the same.

Which masks are slow is said by the tests, never measured: limits are set so that all of them are, or the thread that fills them
waits until the test lets it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grammar_schemas import OPTIONS, SCHEMA
from served_model import write_model

from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.engine.core.slow_answers import SlowAnswers
from ridgeline.grammar import llguidance_backend, masks
from ridgeline.grammar.matcher import Matcher
from ridgeline.messages import Request
from ridgeline.sampling_params import StructuredOutputs

PROMPTS = [f"Hello {name}, what is it?" for name in ("Ann", "Bob", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hal")]
HARD = {"step_lexer_fuel": 40}       # some masks of SCHEMA need more


def constrained(seed: int, **more: Any) -> SamplingParams:
    asked = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    return SamplingParams(seed=seed, temperature=1.0, max_tokens=120, structured_outputs=asked, **more)


def free(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=1.0, max_tokens=40, ignore_eos=True, **more)


MIXED = [constrained(seed) if seed % 3 else free(seed) for seed in range(8)]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (answer.token_ids, answer.finish_reason, [] if answer.logprobs is None else [
            {token: round(said.logprob, 9) for token, said in each.items()} for each in answer.logprobs
        ])
        for output in outputs for answer in output.outputs
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("slow") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    made = LLM(model, **OPTIONS)
    yield made
    made.close()


CASES: dict[str, tuple[dict[str, Any], list[SamplingParams]]] = {
    "plain": ({}, MIXED),
    "overlap": ({"async_scheduling": True}, MIXED),
    "drafts": ({"async_scheduling": True, "speculative_config": "auto"}, MIXED),
    "few blocks": ({"num_gpu_blocks_override": 60, "max_model_len": 180, "enable_prefix_caching": False}, MIXED),
    "several answers": ({}, [constrained(seed, n=2) for seed in range(4)]),
    "log-probabilities": ({"async_scheduling": True}, [constrained(seed, logprobs=2) for seed in range(4)]),
    "least tokens": ({}, [constrained(seed, min_tokens=20, ignore_eos=True) for seed in range(4)]),
}
WAYS = ("slow", "too hard", "too hard at once", "left out")


def make_slow(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "slow":
        monkeypatch.setattr(masks, "LONG_SECONDS", -1.0)
    elif way == "too hard":
        monkeypatch.setattr(llguidance_backend, "_IN_STEP", HARD)
    elif way == "too hard at once":
        monkeypatch.setattr(llguidance_backend, "_IN_STEP", {"initial_lexer_fuel": 1})
    else:
        monkeypatch.setattr(masks, "_allowed", lambda wanted, along: 1e-9)
        monkeypatch.setattr(masks.Masks, "_warn", lambda *given: False)


@pytest.mark.reliability("S-09h")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_same_however_masks_are_filled(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    """The law of masks that no step waits for."""
    options, params = CASES[name]
    prompts = PROMPTS[: len(params)]
    expected = answers(llm.generate(prompts, params, use_tqdm=False))
    make_slow(way, monkeypatch)
    other = LLM(model, **OPTIONS | options)
    found = answers(other.generate(prompts, params, use_tqdm=False))
    filled, counters = other.core.slow.filled, other.core.scheduler.counters
    other.core.scheduler.manager.pool.check()
    other.close()
    assert found == expected
    assert bool(counters.left_out) == (way in ("too hard", "left out"))
    assert filled > 50 or way == "left out"
    assert counters.preemptions > 0 or name != "few blocks"


def test_masks_that_fail_in_the_librarys_threads_are_left_out(model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With threads, and a step in flight: masks of all rows are filled in one call."""
    monkeypatch.setattr(masks, "num_threads", lambda: 3)
    expected = answers(llm.generate(PROMPTS, MIXED, use_tqdm=False))
    make_slow("too hard", monkeypatch)
    for overlap in (False, True):
        other = LLM(model, **OPTIONS | {"async_scheduling": overlap})
        assert answers(other.generate(PROMPTS, MIXED, use_tqdm=False)) == expected
        assert other.core.scheduler.counters.left_out > 0 and other.core.slow.filled > 50
        other.close()


class Held:
    """Masks of slow answers wait for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.asked = threading.Semaphore(0), threading.Semaphore(0)
        self.fill = SlowAnswers._fill
        monkeypatch.setattr(SlowAnswers, "_fill", staticmethod(self.wait_and_fill))

    def wait_and_fill(self, matcher: Matcher, mask: np.ndarray) -> tuple[Matcher, np.ndarray]:
        self.asked.release()
        assert self.allowed.acquire(timeout=600)
        return self.fill(matcher, mask)


def start(llm: LLM, **asked: SamplingParams) -> None:
    prompt = llm.get_tokenizer().encode("Hello")
    for name, params in asked.items():
        llm.core.add(Request(name, prompt, params))


def step_until(llm: LLM, tokens: dict[str, list[int]], ended: Any) -> int:
    steps = 0
    while not ended():
        steps += 1
        for delta in llm.core.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            tokens.setdefault(f"{delta.request_id} ended", []).extend([1] * (delta.finish_reason is not None))
    return steps


@pytest.mark.reliability("S-09h")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slow", [1, 4])
def test_a_stream_beside_slow_masks_has_a_token_in_every_step(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, overlap: bool, slow: int
) -> None:
    """The masks of the others are not filled before it has ended."""
    expected = answers(llm.generate(["Hello"] * 2, [free(3), constrained(1)], use_tqdm=False))
    make_slow("too hard", monkeypatch)
    made = LLM(model, **OPTIONS | {"async_scheduling": overlap})
    held, tokens = Held(monkeypatch), dict[str, list[int]]()
    start(made, **{f"slow {number}": constrained(1) for number in range(slow)})
    step_until(made, tokens, lambda: held.asked.acquire(blocking=False))
    start(made, free=free(3))
    steps = step_until(made, tokens, lambda: tokens.get("free ended"))
    assert tokens["free"] == expected[0][0] and steps <= len(tokens["free"]) + 2 + overlap
    held.allowed.release(10**6)
    step_until(made, tokens, lambda: not made.core.has_work)
    assert all(tokens[f"slow {number}"] == expected[1][0] for number in range(slow))
    made.close()


@pytest.mark.parametrize("end", ["abort", "close"])
def test_an_answer_that_ends_while_its_mask_is_filled_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    made = LLM(model, **OPTIONS)
    make_slow("slow", monkeypatch)
    held, tokens = Held(monkeypatch), dict[str, list[int]]()
    start(made, one=constrained(1), two=constrained(2))
    step_until(made, tokens, lambda: held.asked.acquire(blocking=False))
    if end == "abort":
        made.core.abort("one"), made.core.abort("two")
        assert not made.core.has_work
        start(made, free=free(3))
        step_until(made, tokens, lambda: not made.core.has_work)
        assert len(tokens["free"]) == 40 and not made.core.slow._calls
        made.core.scheduler.manager.pool.check()
    made.close()                                         # does not wait for the thread
    held.allowed.release(10**6)


def test_an_answer_whose_grammar_fails_again_ends_alone(model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limits of steps there are others, and the first mask beyond them."""
    expected = answers(llm.generate(PROMPTS, MIXED, use_tqdm=False))
    make_slow("too hard", monkeypatch)

    def fails(library: Any, mask: np.ndarray) -> str:
        return "Too many items (limit 50000; mask)"

    monkeypatch.setattr(masks.Masks, "fill_one", staticmethod(fails))
    other = LLM(model, **OPTIONS)
    outputs = other.generate(PROMPTS, MIXED, use_tqdm=False)
    failed = [output.outputs[0].finish_reason == "error" for output in outputs]
    assert sum(failed) > 1 and [answers([output]) for output, fails in zip(outputs, failed, strict=True) if not fails] == [
        [each] for each, fails in zip(expected, failed, strict=True) if not fails
    ]
    assert all("Too many items" in str(output.outputs[0].stop_reason) for output, bad in zip(outputs, failed, strict=True) if bad)
    other.core.scheduler.manager.pool.check()
    other.close()


@pytest.mark.parametrize("way", ["slow", "too hard"])
def test_a_step_that_has_no_memory_to_sample_forgets_no_slow_answer(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its masks had been filled, and some answers had outgrown their matchers with them."""
    expected = answers(llm.generate(["Hello"] * 8, MIXED, use_tqdm=False))
    make_slow(way, monkeypatch)
    made = LLM(model, **OPTIONS)
    sample, failed = made.core.executor.sample, list[bool]()

    def failing(given: Any = None) -> None:
        alive = [each for _, each in made.core.scheduler.constrained().matchers]
        if not failed and any(each.outgrown for each in alive):
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        sample(given)

    monkeypatch.setattr(made.core.executor, "sample", failing)
    start(made, **{f"{number}": params for number, params in enumerate(MIXED)})
    tokens, core, before = dict[str, list[int]](), made.core, [-1] * 20

    def ended_or_stuck() -> bool:
        """Stuck: in as many steps nothing was computed, and no mask is to be filled."""
        before.append(-1 if any(core.slow._calls.values()) else core.scheduler.counters.steps)
        return not core.has_work or (before[-1] >= 0 and len({*before[-20:]}) == 1)

    step_until(made, tokens, ended_or_stuck)
    assert failed and not core.has_work
    assert [tokens[str(number)] for number in range(8)] == [each for each, *_ in expected]
    assert core.slow.filled > 50
    made.close()


def test_nothing_is_kept_of_slow_answers_once_there_is_no_work(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a grammar of its own, which may be large, and there may be no other step for a long time."""
    make_slow("slow", monkeypatch)
    made, tokens = LLM(model, **OPTIONS), dict[str, list[int]]()
    start(made, one=constrained(1), two=constrained(2))
    step_until(made, tokens, lambda: not made.core.has_work)
    assert made.core.slow.filled > 20 and not made.core.slow._calls
    held = Held(monkeypatch)
    start(made, one=constrained(1), two=constrained(2))
    step_until(made, tokens, lambda: held.asked.acquire(blocking=False))
    made.core.abort("one", 0), made.core.abort("two")
    assert not made.core.has_work and not made.core.slow._calls
    held.allowed.release(10**6)
    made.close()


def test_a_mask_that_fails_by_our_own_fault_is_not_the_clients(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_slow("slow", monkeypatch)

    def fails(matcher: Matcher, mask: np.ndarray) -> Any:
        raise MemoryError("no memory for a mask")

    monkeypatch.setattr(SlowAnswers, "_fill", staticmethod(fails))
    made, ended = LLM(model, **OPTIONS), []
    start(made, one=constrained(1))
    while made.core.has_work:
        ended += [delta for delta in made.core.step() if delta.finish_reason]
    (delta,) = ended
    assert delta.finish_reason == "error" and "no memory" in delta.error and not delta.bad_request
    made.close()

"""Decode steps as recorded programs: the same tokens as op by op, for every family, and no program where an op is not native."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_laws import USUAL, Outcome, requests, run
from tiny_models import save_checkpoint

from ridgeline.messages import Request
from ridgeline.ops.activation import gated_activation
from ridgeline.ops.cpu import native
from ridgeline.runner import step_programs
from ridgeline.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = USUAL | {"dtype": "float32", "device": "cpu", "max_num_seqs": 1, "enforce_eager": False}


@pytest.fixture(autouse=True)
def built() -> None:
    assert native.library() is not None, "make install builds the kernels"


def replays(outcome: Outcome) -> int:
    return int(outcome.core.executor.runner.forward.replays)


@pytest.mark.parametrize(("name", "temperature"), [
    # Every model and both ways to sample on every commit, all pairs of them in the slow tests.
    pytest.param(name, temperature, marks=() if place % 2 == temperature else pytest.mark.slow)
    for place, name in enumerate(("mistral", "gemma2", "gemma3", "qwen3-window")) for temperature in (0.0, 1.0)
])
def test_the_same_tokens_as_op_by_op(name: str, temperature: float, tmp_path: Path) -> None:
    model = save_checkpoint(name, tmp_path, tie_word_embeddings=False)
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=5, ignore_eos=True)
    asked = [Request(each.request_id, each.prompt_token_ids, params) for each in requests()[:4]]
    recorded = run(model, OPTIONS, asked)
    plain = run(model, OPTIONS | {"enforce_eager": True}, asked)
    assert recorded.answers == plain.answers
    assert replays(recorded) > 20 and replays(plain) == 0


@pytest.mark.parametrize(("name", "temperature"), [("mistral", 0.0), ("gemma3", 0.0), ("gemma2", 1.0)])
def test_steps_with_drafts_have_the_same_tokens_in_float32(name: str, temperature: float, tmp_path: Path) -> None:
    model = save_checkpoint(name, tmp_path, tie_word_embeddings=False)
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5, ignore_eos=True)
    asked = [Request(f"{number}", [5, 6, 7, 8 + number] * 6, params) for number in range(3)]
    options = OPTIONS | {"max_num_seqs": 2}
    drafting = run(model, options | {"speculative_config": '{"method": "ngram", "adaptive": false}'}, asked)
    assert drafting.answers == run(model, options, asked).answers
    assert drafting.core.scheduler.drafter.counters.draft_tokens > 20


def test_an_op_that_is_not_native_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_checkpoint("mistral", tmp_path, tie_word_embeddings=False)
    expected = run(model, OPTIONS, requests()).answers
    said: list[str] = []
    monkeypatch.setattr(step_programs.logger, "info", lambda text, *words: said.append(text % words))
    monkeypatch.setattr(gated_activation, "implementations", gated_activation.implementations[-1:])
    refused = run(model, OPTIONS, requests())
    assert replays(refused) == 0 and refused.answers == expected
    assert len(said) == 1 and "silu.default is not native here" in said[0]


def test_few_programs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_programs, "MOST_PROGRAMS", 1)
    model = save_checkpoint("mistral", tmp_path, tie_word_embeddings=False)
    asked = [
        Request(f"{number}", [5, 6, 7], SamplingParams(temperature=number % 2, max_tokens=9, seed=1, ignore_eos=True))
        for number in range(4)
    ]
    outcome = run(model, OPTIONS, asked)
    forward = outcome.core.executor.runner.forward
    assert len(forward._recorded) == 1 and replays(outcome) > 4

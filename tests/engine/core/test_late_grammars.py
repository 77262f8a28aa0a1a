"""Grammars and drafts with overlap, as on a GPU: a step is launched behind drafts whose result is not known yet, and its masks
are made once it is. Answers are those without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_model import write_model
from test_late_lengths import corrected

from ridgeline import LLM, SamplingParams
from ridgeline.grammar import masks as masks_module
from ridgeline.grammar.masks import Masks
from ridgeline.messages import Request
from ridgeline.ops.sampling.sample import CHOICE, sample_reference
from ridgeline.runner import sampler as sampler_module
from ridgeline.runner.sampler import Sampler
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.scheduler.drafts.controller import Controller

__all__ = ["corrected"]              # a fixture
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["identifier", "description", "colour"],
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 9999}, "description": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green", "blue"]},
    },
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 512, "num_gpu_blocks_override": 600, "block_size": 4, "max_num_seqs": 6,
    "dtype": "float64", "device": "cpu",
}
METHODS = (["prediction", "ngram"], ["grammar", "prediction"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("late grammars") / "tiny")


def asked(temperature: float, penalised: bool = False) -> list[SamplingParams]:
    """Three in four with a grammar. The prediction is wrong from somewhere on."""
    prediction = '{"identifier": 12, "description": "x", "colour": "red"}'
    common: dict[str, Any] = {"temperature": temperature, "max_tokens": 60, "prediction": prediction}
    schema = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    return [
        *(SamplingParams(seed=seed, structured_outputs=schema, **common) for seed in range(4)),
        SamplingParams(seed=5, structured_outputs=StructuredOutputs(regex=r"(GET|PUT) /index\.html\?q=[0-9]{2}"), **common),
        SamplingParams(seed=6, ignore_eos=True, logprobs=1, **common), SamplingParams(seed=7, **common),
        SamplingParams(seed=8, structured_outputs=schema, **common),
        *[SamplingParams(seed=9, structured_outputs=schema, presence_penalty=0.5, max_tokens=60)] * penalised,
    ]


Said = list[Any]
Expected = dict[tuple[float, bool], Said]                 # by temperature, and whether one more has a penalty


def said(llm: LLM, params: list[SamplingParams]) -> Said:
    outputs = llm.generate(["Hello"] * len(params), params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].finish_reason, str(each.outputs[0].logprobs)) for each in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    """What an engine without drafts says. No fixture of a single test has changed it: those are set up later."""
    off = LLM(model, **OPTIONS)
    found = {kind: said(off, asked(*kind)) for kind in ((0.0, False), (1.0, False), (1.0, True))}
    off.close()
    return found


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device whose kernels sample; the list has the positions of each step with drafts."""
    def draw(
        logits: torch.Tensor, choices: Any, tokens: torch.Tensor, failed: torch.Tensor, rows: torch.Tensor | None = None,
        last_token: torch.Tensor | None = None, mask: torch.Tensor | None = None,
    ) -> None:
        found, broken = sample_reference(logits, np.zeros(len(logits), CHOICE) if choices is None else choices.how, mask)
        tokens.copy_(found), failed.copy_(broken)
        if rows is not None and last_token is not None:
            last_token.index_copy_(0, rows, found)

    def counted(self: Sampler, logits: torch.Tensor, *others: Any) -> bool:
        positions.append(len(logits))
        return draw_ahead(self, logits, *others)

    positions, draw_ahead = list[int](), Sampler.draw_ahead
    monkeypatch.setattr(sampler_module, "draw", draw)
    monkeypatch.setattr(sampler_module, "has_kernels", lambda *site: True)
    monkeypatch.setattr(sampler_module, "takes_masks", lambda *given: True)
    monkeypatch.setattr(sampler_module, "send_choices", lambda how, *site: _Sent(how) if how["temperature"].any() else None)
    monkeypatch.setattr(Sampler, "draw_ahead", counted)
    return positions


class _Sent:
    """How rows choose, as the device has it: the numbers of what rows have said may change there."""

    def __init__(self, how: np.ndarray) -> None:
        self._how = how.copy()
        self.integers = torch.zeros((2, len(how)), dtype=torch.int64)
        self.integers[1] = torch.from_numpy(how["index"].astype(np.int64))

    @property
    def how(self) -> np.ndarray:
        self._how["index"] = self.integers[1].numpy()
        return self._how


# Both tests together have every pair of the way that tokens are chosen, a temperature and a list of methods.
@pytest.mark.parametrize(("temperature", "methods"), zip([0.0, 1.0], METHODS, strict=True))
def test_answers_are_those_without_drafts(
    model: Path, expected: Expected, temperature: float, methods: list[str], corrected: list[bool]
) -> None:
    _compare(model, expected, temperature, methods, corrected)


@pytest.mark.parametrize(("temperature", "methods"), zip([1.0, 0.0], METHODS, strict=True))
def test_kernels_that_verify_alone_give_the_same_answers(
    model: Path, expected: Expected, temperature: float, methods: list[str], corrected: list[bool], straight: list[int]
) -> None:
    _compare(model, expected, temperature, methods, corrected)
    assert max(straight) > 8


def _compare(model: Path, expected: Expected, temperature: float, methods: list[str], corrected: list[bool]) -> None:
    """With "grammar", steps wait for the newest tokens, and without they are launched behind drafts in flight."""
    given = json.dumps({"method": methods, "num_speculative_tokens": 8, "adaptive": False})
    on = LLM(model, speculative_config=given, async_scheduling=True, **OPTIONS)
    drafter = on.core.scheduler.drafter
    assert said(on, asked(temperature)) == expected[temperature, False]
    assert isinstance(drafter, Controller) and drafter.counters.draft_tokens > drafter.counters.accepted_tokens > 40
    assert len(corrected) > 20                           # steps behind drafts in flight
    on.close()


def _asked_of_core(llm: LLM, aborted: str) -> tuple[dict[str, list[int]], int]:
    """What a core says of these requests, one of which is aborted as soon as the masks of a step are begun, and how many were."""
    core, steps, begun = llm.core, 0, 0
    for number, params in enumerate(each for each in asked(1.0) if each.structured_outputs):
        core.add(Request(str(number), [5, 6, 7], params))
    said: dict[str, list[int]] = {}
    while core.has_work and (steps := steps + 1) < 2000:
        for delta in core.step():
            assert not delta.error
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
        if core._unsampled and core.grammars.masks._begun is not None:
            begun += 1
            core.abort(aborted)
    said.pop(aborted, None)
    return said, begun


def test_first_tokens_do_not_wait_for_the_next_launch(model: Path, corrected: list[bool]) -> None:
    """Where a step waits for what a grammar forces, nothing is in flight when the first token is told."""
    on = LLM(model, speculative_config='{"method": "grammar"}', async_scheduling=True, **OPTIONS)
    on.core.add(Request("0", [5, 6, 7], asked(0.0)[0]))
    told: list[tuple[int, int]] = []
    while on.core.has_work:
        deltas = on.core.step()
        told += [(len(each.token_ids), on.core.scheduler.num_in_flight) for each in deltas if each.token_ids]
    assert told[0] == (1, 0) and len(told) > 2 and told[1][1] == 1
    on.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_are_begun_before_a_launch_and_survive_an_abort(
    model: Path, overlap: bool, corrected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not without overlap: there the launch is the whole step, and threads that fill masks would take its cores."""
    started: list[int] = []
    begin = Masks.begin

    def counted(self: Masks, wanted: Any, num_rows: int, guesses: Any) -> None:
        begin(self, wanted, num_rows, guesses)
        started.extend([num_rows] * self.busy)

    monkeypatch.setattr(masks_module, "num_threads", lambda: 2)
    options = OPTIONS | {"max_num_seqs": 2}              # few rows, so that steps wait for grammars
    off = LLM(model, **options)
    expected, _ = _asked_of_core(off, "0")
    off.close()
    monkeypatch.setattr(Masks, "begin", counted)
    given = json.dumps({"method": "grammar", "num_speculative_tokens": 8, "adaptive": False})
    on = LLM(model, speculative_config=given, async_scheduling=overlap, **options)
    answers, begun = _asked_of_core(on, "0")
    on.close()
    assert answers == expected and len(answers) == 5
    assert bool(started) == overlap and (begun > 0) == overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_verify_drafts_under_grammars(model: Path, expected: Expected, overlap: bool) -> None:
    """Only the first rank has masks. The others must broadcast as often, and as much: else they wait for ever, or die."""
    given = json.dumps({"method": ["grammar", "prediction", "ngram"], "num_speculative_tokens": 8, "adaptive": False})
    on = LLM(model, tensor_parallel_size=2, speculative_config=given, async_scheduling=overlap, **OPTIONS)
    drafter = on.core.scheduler.drafter
    try:
        answers = said(on, asked(1.0, penalised=True))
    finally:
        on.close()
    assert [each[:2] for each in answers] == [each[:2] for each in expected[1.0, True]]
    assert isinstance(drafter, Controller) and drafter.counters.draft_tokens > drafter.counters.accepted_tokens > 40

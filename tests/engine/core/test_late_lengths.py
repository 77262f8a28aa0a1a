"""Drafts with overlap, as on a GPU: a step is packed before the host knows how long its rows are, and the device corrects it.

Here the device is a CPU whose results the runner does not look at before they are collected, and steps are padded as for graphs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dial_drafter import DialDrafter
from test_laws import PLAIN, USUAL
from test_verification import Run, knows, requests
from tiny_configs import VOCAB
from tiny_models import save_checkpoint

from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request, StepPlan
from ridgeline.runner.device_rows import EVERY_HIDDEN, leading_decodes
from ridgeline.runner.forward import EagerForward
from ridgeline.runner.row_tables import LateLengths
from ridgeline.runner.runner import Runner
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.graph_shapes import GraphShapes, Shape

ROWS = 6
CPU = {"device": "cpu", "dtype": "float64", "pipeline_parallel_size": 1, "tensor_parallel_size": 1}
FEW_BLOCKS = {"num_gpu_blocks_override": 44, "max_model_len": 60, "max_num_seqs": ROWS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("gemma2", tmp_path_factory.mktemp("late"), tie_word_embeddings=False, num_hidden_layers=2)


@pytest.fixture
def corrected(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An engine as on a GPU. The list has an entry for each step packed behind drafts in flight: had it drafts itself?"""
    shapes, found = GraphShapes(ROWS, 24, 24), list[bool]()
    runner, core, correct = Runner.__init__, EngineCore.__init__, LateLengths.correct

    def knows_late(self: Runner, *args: Any) -> None:
        runner(self, *args)
        self.knows_at_once = False

    def goes_on(self: EngineCore, *args: Any) -> None:
        core(self, *args)
        self._device_knows_first = True

    def shape(self: EagerForward, plan: StepPlan, greedy: bool) -> Shape | None:
        decodes = leading_decodes(plan)
        if (plan.want & EVERY_HIDDEN).any() or decodes < len(plan.rows):
            return None
        if plan.width is not None:
            return shapes.fit_drafts(decodes, plan.total_tokens, 1 + int(plan.width.max()))
        return shapes.fit(decodes, 0, 0)

    def counted(self: LateLengths, sent: list[Any], *args: Any) -> None:
        found.append(len(sent) > 1)
        correct(self, sent, *args)

    monkeypatch.setattr(Runner, "__init__", knows_late)
    monkeypatch.setattr(EngineCore, "__init__", goes_on)
    monkeypatch.setattr(EagerForward, "shape", shape)
    monkeypatch.setattr(LateLengths, "correct", counted)
    return found


def plain_requests() -> list[Request]:
    asked = requests()
    for number, request in enumerate(asked):
        request.params = SamplingParams(temperature=0, max_tokens=26 - number, ignore_eos=True, logprobs=number % 3 or None)
        request.bad_words_token_ids = []
    return asked


@pytest.fixture(scope="module")
def off(model: Path) -> Run:
    return Run(model, PLAIN | CPU).finish(plain_requests())


@pytest.mark.parametrize(("alpha", "caching"), [(0.9, True), pytest.param(0.3, False, marks=pytest.mark.slow)])
def test_rows_go_on_before_the_host_knows_their_length(
    alpha: float, caching: bool, model: Path, off: Run, corrected: list[bool]
) -> None:
    """With so few blocks that rows change hands while their drafts are in flight."""
    drafter = DialDrafter(knows(off.answers), VOCAB, alpha, widest=7, seed=2)
    options = USUAL | CPU | FEW_BLOCKS | {"async_scheduling": True, "max_num_batched_tokens": 24}
    options |= {"enable_prefix_caching": caching}
    on = Run(model, options, drafter).finish(plain_requests())
    assert on.told() == off.told()
    assert drafter.proposed > 100 and corrected.count(True) > 10 and corrected.count(False) > 2
    assert on.core.scheduler.counters.preemptions > 0


def test_a_draft_model_waits_for_what_rows_say(model: Path, off: Run, corrected: list[bool]) -> None:
    """It is the model itself, so it must be right: the step before is heard, and only then does it propose."""
    given = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "adaptive": False})
    options = USUAL | CPU | FEW_BLOCKS | {"async_scheduling": True, "max_num_batched_tokens": 24, "speculative_config": given}
    on = Run(model, options).finish(plain_requests())
    assert on.told() == off.told()
    counters = on.core.scheduler.drafter.counters
    assert counters.accepted_tokens == counters.draft_tokens > 30
    assert set(corrected) == {False}                     # steps were packed behind drafts in flight, none of them with drafts


def test_rows_with_a_temperature_go_on_as_well(model: Path, corrected: list[bool]) -> None:
    """Their noise depends on how much they have said, which the device knows. Filters and greedy rows are among them."""
    def asked() -> list[Request]:
        made = plain_requests()
        for number, request in enumerate(made):
            chosen = {"temperature": 0.9 * (number % 4 > 0), "top_p": 0.8 if number % 4 == 2 else 1.0, "seed": number}
            request.params = replace(request.params, **chosen)
        return made

    off = Run(model, PLAIN | CPU).finish(asked())
    drafter = DialDrafter(knows(off.answers), VOCAB, 0.7, widest=5, seed=4)
    options = USUAL | CPU | {"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": ROWS}
    on = Run(model, options, drafter).finish(asked())
    assert on.told() == off.told()
    assert drafter.accepted > 30 and corrected.count(True) > 10


@pytest.mark.parametrize("drafted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_that_look_at_what_they_said_are_waited_for(drafted: bool, model: Path, corrected: list[bool]) -> None:
    """With drafts of their own, and without, beside rows that have some."""
    def asked() -> list[Request]:
        made = requests()
        for request in made if not drafted else []:
            speculative = None if request.params.temperature == 0 else 0
            request.params = replace(request.params, speculative=speculative)
        return made

    off = Run(model, PLAIN | CPU).finish(asked())
    drafter = DialDrafter(knows(off.answers), VOCAB, 0.8, widest=7, seed=3)
    options = USUAL | CPU | {"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": ROWS}
    on = Run(model, options, drafter).finish(asked())
    assert on.told() == off.told()
    assert drafter.accepted > 30

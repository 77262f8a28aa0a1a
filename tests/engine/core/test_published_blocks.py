"""Prefix hits with drafts are those without, to the token, however an answer ends.

The last token of an answer has no KV without drafts. A step with drafts may compute it, if it was guessed, and tokens behind it:
no prefix hit may tell that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dial_drafter import DialDrafter
from test_verification import OPTIONS, Answers, Run, knows, with_grammars
from tiny_configs import VOCAB
from tiny_models import save_checkpoint

from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams, StructuredOutputs

BLOCK = OPTIONS["block_size"]
MODELS = {"with windows": ("gemma2", {"num_hidden_layers": 2}), "without windows": ("llama", {"num_hidden_layers": 2})}
Asked = dict[str, tuple[list[int], dict[str, Any]]]      # by name: prompt and params


def endings() -> Asked:
    """Prompts that share nothing, and answers that their grammar ends, or their length. The others are whole: see stopped()."""
    found: Asked = {}
    for number in range(BLOCK * BLOCK):
        length = 1 + number % BLOCK
        found[f"grammar {number}"] = [20 + number] * length, {"structured_outputs": StructuredOutputs(regex="[a-z]{9}")}
        found[f"length {number}"] = [40 + number] * length, {"max_tokens": 9}
        found[f"stop {number}"] = [60 + number] * length, {}
    return found


def stopped(asked: Asked, whole: Answers) -> Asked:
    """Whole answers get a stop token: of each length of the prompt, they end at all distances from the end of a block, as far as
    they say new tokens there. Tokens behind the stop would be accepted."""
    found = dict(asked)
    for number in range(BLOCK * BLOCK):
        prompt, params = asked[f"stop {number}"]
        said = whole[f"stop {number}", 0]
        places = [place for place in range(3, 14) if said[place] not in said[:place]]
        distances = [(len(prompt) + place + 1 - number // BLOCK) % BLOCK for place in places]
        last = places[distances.index(min(distances))]
        found[f"stop {number}"] = prompt, params | {"stop_token_ids": [said[last]]}
    return found


def requests(asked: Asked, logprobs: int | None) -> list[Request]:
    usual = {"temperature": 1.0, "seed": 3, "max_tokens": 22, "ignore_eos": True, "logprobs": logprobs}
    return [Request(name, prompt, SamplingParams(**usual | params)) for name, (prompt, params) in asked.items()]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, options = MODELS[request.param]
    return save_checkpoint(name, tmp_path_factory.mktemp("published"), **options)


def run(model: Path, overlap: bool, drafter: DialDrafter | None = None) -> Run:
    made = with_grammars(Run(model, OPTIONS | {"async_scheduling": overlap, "num_gpu_blocks_override": 2000}, drafter))
    made.core.close = lambda: None                               # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def whole(model: Path) -> Answers:
    return run(model, False).finish(requests(endings(), None)).answers


# With log-probabilities results are taken in by the scheduler's own code, without them by native code. Four of the eight cases
# have every pair.
@pytest.mark.parametrize(("model", "overlap", "logprobs"), [
    ("with windows", False, None), ("with windows", True, 1), ("without windows", False, 1), ("without windows", True, None),
], indirect=["model"])
def test_what_an_ended_answer_leaves_behind(overlap: bool, logprobs: int | None, model: Path, whole: Answers) -> None:
    asked = stopped(endings(), whole)
    for alpha in (None, 0.7, 1.0):
        drafter = None if alpha is None else DialDrafter(knows(whole), VOCAB, alpha, width=5)
        first = run(model, overlap, drafter).finish(requests(asked, logprobs))
        answers = first.answers
        assert drafter is None or drafter.accepted > 100
        again = [
            Request(f"again {name}", prompt + whole[name, 0] + [3], SamplingParams(temperature=0, max_tokens=1))
            for name, (prompt, _) in asked.items()
        ]
        first.finish(again)
        found = {name: first.deltas[f"again {name}", 0][-1].num_cached_tokens for name in asked}
        totals = {name: len(prompt) + len(answers[name, 0]) for name, (prompt, _) in asked.items()}
        for ended in ("grammar", "length", "stop"):
            assert any(total % BLOCK == 0 for name, total in totals.items() if name.startswith(ended))
        assert found == {name: (total - 1) // BLOCK * BLOCK for name, total in totals.items()}, alpha

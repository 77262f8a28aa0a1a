"""Random requests, most with a grammar, beside each other: with overlap and with drafts the answers are those without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from dial_drafter import DialDrafter
from test_laws import PLAIN
from test_verification import Run, knows, with_grammars
from tiny_configs import VOCAB
from tiny_models import save_checkpoint

from ridgeline.grammar import masks
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams, StructuredOutputs

GRAMMARS = (
    {"regex": "(abc|defg|xyz)*"}, {"regex": "(ab){1,3}"}, {"regex": "[a-f]{2,6}"}, {"regex": "a{5}b{5}"},
    {"choice": ["abc", "abd", "xyz"]}, {"json": {"type": "string"}},
)


def requests(seed: int) -> list[Request]:
    """In half of the runs all grammars are the same, so that answers end together."""
    rng, made = random.Random(seed), []
    known = [rng.choice(GRAMMARS)] if rng.random() < 0.5 else GRAMMARS
    for number in range(rng.randint(10, 26)):
        params = SamplingParams(
            temperature=rng.choice([0, 0.9]), seed=number, max_tokens=rng.randint(1, 14), ignore_eos=rng.random() < 0.5,
            structured_outputs=StructuredOutputs(**rng.choice(known)) if rng.random() < 0.7 else None,      # type: ignore[arg-type]
            n=rng.randint(2, 6) if rng.random() < 0.2 else 1, logprobs=1 if rng.random() < 0.2 else None,
            presence_penalty=0.5 if rng.random() < 0.2 else 0.0,
        )
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))]
        made.append(Request(f"r{number}", prompt, params))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_overlap_and_drafts_change_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are filled by several threads, some of them a step ahead, as on a machine with many cores."""
    monkeypatch.setattr(masks, "num_threads", lambda: 3)
    model = save_checkpoint("qwen3", tmp_path, tie_word_embeddings=False)
    rng = random.Random(1000 + seed)
    options = PLAIN | {"max_num_seqs": rng.choice([4, 9, 16]), "enable_prefix_caching": True,
                       "num_gpu_blocks_override": rng.choice([400, 60])}
    at_once = rng.choice([3, 8, 20])
    plain = with_grammars(Run(model, options | {"async_scheduling": False})).finish(requests(seed), at_once)
    overlapped = with_grammars(Run(model, options | {"async_scheduling": True})).finish(requests(seed), at_once)
    assert overlapped.told() == plain.told()
    drafter = DialDrafter(knows(plain.answers), VOCAB, 0.7, width=4, seed=seed)
    drafted = with_grammars(Run(model, options | {"async_scheduling": True}, drafter)).finish(requests(seed), at_once)
    assert drafted.told() == plain.told() and drafter.accepted > 0

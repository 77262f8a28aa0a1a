"""The law of speculation: with drafts the answers are those without, to the token, whatever the drafter says.

Requests of every kind (seeded, penalised, constrained, with log-probabilities, several answers) run without drafts first; their
tokens turn the dial of a drafter that guesses right with a given probability. All in float64 on tiny random models.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dial_drafter import DialDrafter
from test_laws import CROWD, PLAIN, STOPS, USUAL
from tiny_configs import VOCAB
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore, make_grammars
from ridgeline.engine.ipc import PLAN
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.messages import Request, StepPlan, StepResult, TokenDelta
from ridgeline.sampling_params import SamplingParams, StructuredOutputs
from ridgeline.scheduler.sequence import Sequence

DEPTHS = {"one step at a time": False, "overlap": True}
Answers = dict[tuple[str, int], list[int]]

# What can change the next token, or what is told of it.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    {"temperature": 1.0, "min_p": 0.02, "seed": 6, "n": 2},
    {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 7},
    {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.6},
    {"temperature": 0, "min_tokens": 9, "stop_token_ids": STOPS},
    {"temperature": 0.7, "logprobs": 2, "seed": 8},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0, "logit_bias": {4: 1.5, 9: -2.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(3, 40)), "seed": 9},
    {"temperature": 0, "stop_token_ids": STOPS},
)


def requests() -> list[Request]:
    rng = random.Random(11)
    shared = [rng.randrange(3, VOCAB) for _ in range(18)]
    made = []
    for number, kind in enumerate(KINDS):
        prompt = shared[: rng.choice([0, 8, 18])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(**{"max_tokens": 22, "ignore_eos": True} | kind)
        words = [[5], [7, 8], [9, 10, 11]] if number % 3 == 0 else []
        made.append(Request(f"r{number}", prompt, params, bad_words_token_ids=words))
    return made


class Run:
    def __init__(self, model: Path, options: dict[str, Any], drafter: DialDrafter | None = None) -> None:
        self.core = EngineCore.start(EngineConfig.of(model=str(model), **options))
        if drafter is not None:
            self.core.scheduler.drafter = drafter
        self.deltas: dict[tuple[str, int], list[TokenDelta]] = {}
        self.steps = 0

    def finish(self, asked: list[Request], at_once: int = 3, abort_at: dict[int, str] | None = None) -> Run:
        waiting = list(asked)
        while waiting or self.core.has_work:
            for request in waiting[:at_once]:
                self.core.add(request)
            waiting = waiting[at_once:]
            if abort_at and self.steps in abort_at:
                self.core.abort(abort_at[self.steps])
            for delta in self.core.step():
                self.deltas.setdefault((delta.request_id, delta.index), []).append(delta)
            self.steps += 1
            assert self.steps < 3000, "the engine does not come to an end"
        self.core.scheduler.manager.pool.check()
        assert self.core.scheduler.manager.pool.num_releasing == 0
        self.core.close()
        return self

    @property
    def answers(self) -> Answers:
        return {key: [token for delta in deltas for token in delta.token_ids] for key, deltas in self.deltas.items()}

    def told(self) -> dict[Any, Any]:
        """Everything a client sees, however it was cut into deltas."""
        found: dict[Any, Any] = {}
        for key, deltas in self.deltas.items():
            logprobs = [each for delta in deltas for each in delta.logprobs]
            prompts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
            found[key] = (
                [token for delta in deltas for token in delta.token_ids], deltas[-1].finish_reason, deltas[-1].stop_reason,
                [(each.token_ids.tolist(), each.ranks.tolist(), each.top_ids.tolist()) for each in logprobs],
                [np.round(each.logprobs.astype(np.float64), 4).tolist() for each in logprobs],
                [each.token_ids.tolist() for each in prompts],
            )
        return found


def knows(answers: Answers) -> Callable[[Sequence, int], list[int]]:
    def answer(sequence: Sequence, count: int) -> list[int]:
        said = answers.get((sequence.request.request_id, sequence.index), [])
        return said[len(sequence.tokens) - sequence.num_prompt :][:count]

    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every other layer has a window, and scores have a soft cap."""
    return save_checkpoint("gemma2", tmp_path_factory.mktemp("verification"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def off(model: Path) -> Run:
    return Run(model, PLAIN | CROWD).finish(requests())


OPTIONS = USUAL | {"device": "cpu", "dtype": "float64"}


@pytest.mark.parametrize("overlap", DEPTHS.values(), ids=DEPTHS.keys())
@pytest.mark.parametrize("alpha", [0.7, *(pytest.param(alpha, marks=pytest.mark.slow) for alpha in (0.0, 1.0))])
def test_tokens_are_those_without_drafts(alpha: float, overlap: bool, model: Path, off: Run) -> None:
    """Chunks of prompts, the prefix cache and paging beside it."""
    drafter = DialDrafter(knows(off.answers), VOCAB, alpha, widest=7, seed=3)
    options = OPTIONS | {"async_scheduling": overlap, "max_num_batched_tokens": 24}
    on = Run(model, options, drafter).finish(requests())
    assert on.told() == off.told()
    assert drafter.proposed > 100
    assert drafter.accepted == (0 if alpha == 0 else drafter.accepted) and (drafter.accepted > 50 or alpha == 0)
    counters = on.core.scheduler.counters
    assert counters.rejected_tokens == drafter.proposed - drafter.accepted
    assert counters.useful_tokens + counters.wasted_tokens + counters.rejected_tokens == counters.computed_tokens


def test_right_guesses_save_steps(model: Path, off: Run) -> None:
    drafter = DialDrafter(knows(off.answers), VOCAB, 1.0, width=6)
    on = Run(model, OPTIONS | {"max_num_seqs": 16}, drafter).finish(requests(), at_once=20)
    assert on.told() == off.told()
    assert on.steps <= 2 + -(-22 // 7) + 1 and drafter.accepted > 0.9 * drafter.proposed


@pytest.mark.parametrize("overlap", DEPTHS.values(), ids=DEPTHS.keys())
def test_preemption_and_aborts(overlap: bool, model: Path, off: Run) -> None:
    drafter = DialDrafter(knows(off.answers), VOCAB, 0.8, seed=1)
    options = OPTIONS | {
        "async_scheduling": overlap, "num_gpu_blocks_override": 34, "max_model_len": 60, "max_num_batched_tokens": 16,
    }
    on = Run(model, options, drafter).finish(requests(), abort_at={9: "r1"})
    assert on.core.scheduler.counters.preemptions > 0 and drafter.accepted
    told, expected = on.told(), off.told()
    assert {key: each for key, each in told.items() if key[0] != "r1"} == {
        key: each for key, each in expected.items() if key[0] != "r1"
    }


def test_prefix_hits_are_those_without_drafts(model: Path, off: Run) -> None:
    """A second turn of a chat finds the blocks of the first, which drafts filled."""
    hits = []
    for alpha in (None, 0.6):
        drafter = None if alpha is None else DialDrafter(knows(off.answers), VOCAB, alpha, width=5)
        core_run = Run(model, OPTIONS, drafter)
        core_run.core.close = lambda: None                       # type: ignore[method-assign]
        core_run.finish(requests())
        before = core_run.core.scheduler.manager.counters.hit_tokens
        again = [
            Request(f"again-{request.request_id}", request.prompt_token_ids + core_run.answers[request.request_id, 0] + [3],
                    SamplingParams(temperature=0, max_tokens=1))
            for request in requests()
        ]
        core_run.finish(again)
        hits.append(core_run.core.scheduler.manager.counters.hit_tokens - before)
    assert hits[0] == hits[1] > 0


WORDS = "(abc|defg|xyz)*"


def with_grammars(run: Run) -> Run:
    """Ids spell letters, and every answer has a grammar."""
    size = run.core.config.model.vocab_size
    pieces, ends = [bytes([97 + token % 26]) for token in range(size - 1)] + [b"</s>"], frozenset({size - 1})
    run.core.use_grammars(make_grammars(run.core.config, GrammarVocabulary.of(pieces, ends, ends, size)))
    return run


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_grammars(alpha: float, model: Path) -> None:
    """Guesses that the grammar refuses are rejected, and so is what it does not allow behind them."""
    def asked() -> list[Request]:
        made = requests()[:6]
        for number, request in enumerate(made):
            request.bad_words_token_ids = []
            request.params = SamplingParams(
                temperature=0.9 * (number % 2), seed=number, max_tokens=14, logprobs=1 if number == 2 else None,
                structured_outputs=StructuredOutputs(regex=WORDS) if number < 4 else None, ignore_eos=True,
            )
        return made

    plain = with_grammars(Run(model, OPTIONS)).finish(asked())
    drafter = DialDrafter(knows(plain.answers), VOCAB, alpha, width=4, seed=2)
    on = with_grammars(Run(model, OPTIONS, drafter)).finish(asked())
    assert on.told() == plain.told()
    assert drafter.accepted > 20 and (alpha < 1 or drafter.accepted == drafter.proposed)
    letters = "".join(chr(97 + token % 26) for token in on.answers["r0", 0])
    assert set(letters) <= set("abcdefgxyz") and len(letters) == 14


def test_plans_with_drafts_can_be_replayed(model: Path, off: Run) -> None:
    """Saved as bytes and obeyed by a fresh runner, they give the same tokens again."""
    drafter = DialDrafter(knows(off.answers), VOCAB, 0.7, width=4)
    first = Run(model, OPTIONS | {"async_scheduling": False}, drafter)
    frames: list[bytes] = []
    results: list[StepResult] = []
    submit, collect = first.core.executor.submit, first.core.executor.collect

    def submitted(plan: StepPlan) -> None:
        frames.append(PLAN.encode(plan))
        submit(plan)

    def collected() -> StepResult:
        results.append(collect())
        return results[-1]

    first.core.executor.submit = submitted               # type: ignore[method-assign]
    first.core.executor.collect = collected              # type: ignore[method-assign]
    first.finish(requests())
    again = EngineCore.start(EngineConfig.of(model=str(model), **OPTIONS | {"async_scheduling": False})).executor
    assert any(PLAN.decode(frame).width is not None for frame in frames)
    for frame, expected in zip(frames, results, strict=True):
        again.submit(PLAN.decode(frame))
        again.sample()
        found = again.collect()
        assert np.array_equal(found.tokens, expected.tokens) and np.array_equal(found.num_new, expected.num_new)


def test_a_wrong_drafter_is_harmless(model: Path, off: Run) -> None:
    """Guesses of any id, none at all, and of the wrong length."""

    class Wild(DialDrafter):
        def _turned(self, token: int) -> int:
            return self._random.choice([-1, 0, VOCAB - 1, token])

    drafter = Wild(lambda sequence, count: [0] * max(0, count - 2), VOCAB, 0.0)
    on = Run(model, OPTIONS | {"async_scheduling": True}, drafter).finish(requests())
    assert on.told() == off.told() and drafter.proposed

"""Every proposer beside every technique: with drafts the tokens, the log-probabilities' ids and the ends are those without.

The rows ask for all that depends on single tokens: seeds, penalties, several answers, bad words, log-probabilities, stops in the
middle of what a prediction would go on with. A row is aborted while drafts are in flight. `adaptive` is off: each draft that is
offered is verified. One quick test for each technique has all proposers; each proposer alone is slow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from served_model import write_model
from test_drafters import OPTIONS, SMALL, config
from tiny_models import random_tokens, save_checkpoint

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.draft_options import DRAFT_MODEL
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.scheduler.drafts.controller import Controller

SHARED = random_tokens(24, seed=99)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "n": 2}, {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.5}, {"temperature": 0.0},
    {"temperature": 0.9, "seed": 8, "logit_bias": {7: 2.0}, "min_tokens": 4, "stop_token_ids": list(range(0, 131, 5)),
     "ignore_eos": False},
)
ABORTED = "r7"


@dataclass(frozen=True)
class Beside:
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    happened: Callable[[EngineCore], bool] = lambda core: True
    draft_model: bool = True         # does it work with one?


BESIDE: dict[str, Beside] = {
    "prefix cache": Beside("gemma2", {}, lambda core: core.scheduler.manager.counters.hit_tokens > 0),
    "windows": Beside("mistral", {}, lambda core: core.scheduler.manager.counters.window_freed > 0, draft_model=False),
    "int8 KV": Beside("gemma2", {"kv_cache_dtype": "int8"}, lambda core: core.config.kv_format.quantised),
    "fp8 KV": Beside("llama", {"kv_cache_dtype": "fp8"}, lambda core: core.config.kv_format.quantised),
    "fp8 weights": Beside("llama", {"quantization": "fp8"}),
    "experts": Beside("qwen3_moe"),
    "latents": Beside("deepseek_v2"),
    "chunks": Beside("llama", {"max_num_batched_tokens": 16}, lambda core: core.scheduler.counters.chunks > 0),
    "preemption": Beside("llama", {              # on a busy machine prompts would come in smaller chunks
        "num_gpu_blocks_override": 34, "enable_prefix_caching": False, "step_time_ms": 0.0,
    }, lambda core: core.scheduler.counters.preemptions > 0),
    "overlap": Beside("gemma2", {"async_scheduling": True}),
    "deterministic": Beside("llama", {"deterministic": True}),
    "two ranks": Beside("llama", {"tensor_parallel_size": 2}),
    "two stages": Beside("llama", {"pipeline_parallel_size": 2}, draft_model=False),
}
TOGETHER = ("ngram", "suffix", "prediction")


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)         # ids of its log-probabilities, those of its prompt first
    end: tuple[str | None, Any] = None, None


Said = dict[tuple[str, int], Answer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts beside")
    names = {beside.model for beside in BESIDE.values()}
    return {name: save_checkpoint(name, folder / name, **SMALL) for name in names}


def asked(known: Said | None) -> list[Request]:
    """`known`: what is said without drafts. Predictions leave it in the middle, and go on where it ends."""
    made = []
    for number, kind in enumerate((*KINDS, *KINDS[:2])):
        prompt = SHARED[: 24 if number % 4 else 8] + 2 * random_tokens(5 + number, seed=number)
        params = SamplingParams(**{"max_tokens": 14 + number, "ignore_eos": True} | kind)
        made.append(Request(f"r{number}", prompt, params, bad_words_token_ids=[] if number else [[5], [7, 8]]))
        if known is not None and f"r{number}" != ABORTED:
            text = known[f"r{number}", 0].tokens
            middle = (len(text) - 1) // 2
            edited = [*text[:middle], (text[middle] + 1) % 100, *text[middle + 1 :]]
            made[-1].predicted_token_ids = edited + random_tokens(6, seed=number)
    return made


def said_by(core: EngineCore, known: Said | None = None) -> Said:
    """One row is aborted after a few steps, and left out."""
    said: Said = {}
    for request in asked(known):
        core.add(request)
    steps = 0
    while core.has_work:
        steps += 1
        assert steps < 1000
        if steps == 4:
            core.abort(ABORTED)
        for delta in core.step():
            own = said.setdefault((delta.request_id, delta.index), Answer())
            own.tokens += delta.token_ids
            tops = [delta.prompt_logprobs, *delta.logprobs]
            own.top += [each.top_ids.tolist() for each in tops if each is not None]
            own.end = delta.finish_reason or own.end[0], delta.stop_reason or own.end[1]
    core.scheduler.manager.pool.check()
    return {key: answer for key, answer in said.items() if key[0] != ABORTED}


class Plain(dict[str, Said]):
    """What is said beside each technique without drafts, found when it is first asked for."""

    def __init__(self, models: dict[str, Path]) -> None:
        self.models = models

    def __missing__(self, name: str) -> Said:
        core = started(self.models, name, "")
        found = self[name] = said_by(core)
        core.close()
        assert "stop" in {answer.end[0] for answer in found.values()} and any(answer.top for answer in found.values())
        return found


def started(models: dict[str, Path], beside: str, drafts: str) -> EngineCore:
    of = BESIDE[beside]
    options = OPTIONS | {"max_num_seqs": 6} | of.options
    return EngineCore.start(EngineConfig.of(model=str(models[of.model]), speculative_config=drafts, **options))


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Plain:
    return Plain(models)


SLOW = pytest.mark.slow
CELLS = [
    pytest.param(beside, TOGETHER, id=f"{beside}, together", marks=SLOW if beside.startswith("two ") else ()) for beside in BESIDE
] + [
    pytest.param(beside, (method,), id=f"{beside}, {method}", marks=SLOW) for beside, of in BESIDE.items()
    for method in (*TOGETHER, *([DRAFT_MODEL] if of.draft_model else []))
]


@pytest.mark.parametrize(("beside", "methods"), CELLS)
def test_answers_are_those_without_drafts(
    beside: str, methods: tuple[str, ...], models: dict[str, Path], plain: Plain
) -> None:
    more: dict[str, Any] = {"prompt_lookup_min": 1}      # noise says a pair twice rarely, a token often
    if DRAFT_MODEL in methods:
        more["model"] = str(models["llama"])
    known = plain[beside]                                # first: ranks have one process group at a time
    core = started(models, beside, config(list(methods), **more))
    for _ in range(2):                                   # the second time earlier answers are known, too
        assert said_by(core, known) == known
    drafter = core.scheduler.drafter
    assert isinstance(drafter, Controller)
    assert drafter.counters.draft_tokens > 10
    if methods not in (("ngram",), (DRAFT_MODEL,)):      # these are mostly wrong
        assert drafter.counters.accepted_tokens > 10
    assert BESIDE[beside].happened(core), f"{beside} was never active"
    core.close()


# -- grammars, which need text -----------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["identifier", "colour"],
    "properties": {"identifier": {"type": "integer", "minimum": 0, "maximum": 99}, "colour": {"enum": ["red", "green", "blue"]}},
}
TEXT: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False}, "chunks": {"max_num_batched_tokens": 8},
    "int8 KV": {"kv_cache_dtype": "int8"}, "fp8 weights": {"quantization": "fp8"},
    "preemption": {"num_gpu_blocks_override": 18, "max_model_len": 64},
    "two stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("grammars beside") / "tiny")


@pytest.mark.parametrize("beside", ["preemption", "int8 KV", *(pytest.param(each, marks=SLOW) for each in TEXT if each not in (
    "preemption", "int8 KV"
))])
def test_what_grammars_force_beside_other_techniques(beside: str, text_model: Path) -> None:
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": 256, "num_gpu_blocks_override": 300, "block_size": 4, "max_num_seqs": 4,
        "dtype": "float64", "device": "cpu",
    }
    schema = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    common: dict[str, Any] = {"temperature": 1.0, "max_tokens": 55, "structured_outputs": schema}
    params = [SamplingParams(seed=seed, n=1 + seed % 2, **common) for seed in range(4)]
    params += [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=40, stop=["a"], seed=4)]
    said = []
    for drafts in ("", json.dumps({"method": "grammar", "num_speculative_tokens": 8, "adaptive": False})):
        llm = LLM(text_model, speculative_config=drafts, **options | TEXT[beside])
        outputs = llm.generate(["Hello"] * len(params), params, use_tqdm=False)
        said.append([(own.token_ids, own.finish_reason, own.stop_reason) for each in outputs for own in each.outputs])
        if beside == "preemption":
            assert llm.core.scheduler.counters.preemptions > 0
        if drafts:
            assert isinstance(llm.core.scheduler.drafter, Controller)
            assert llm.core.scheduler.drafter.counters.accepted_tokens > 20
        llm.close()
    assert said[0] == said[1]

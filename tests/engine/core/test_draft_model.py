"""A draft model in a real engine: answers have the tokens that they have without it, and its KV is right whatever happened.

Tiny models in float64. The model as its own draft model must have every draft accepted, where rows choose from the model's own
logits. Another model must propose what it would say itself after the row's tokens: its drafts depend on nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_cases import RecordedStep
from test_drafters import BESIDE, SMALL, WAYS, Served, plain_answers, requests
from test_replay import fresh, recomputing_plan, record, replay, same
from tiny_models import save_checkpoint

from ridgeline import LLM
from ridgeline.config import EngineConfig
from ridgeline.engine.core.live_switches import Switches
from ridgeline.errors import ConfigError, ModelError
from ridgeline.messages import Request
from ridgeline.process import embedded
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.runner.proposers import draft_model
from ridgeline.runner.proposers.draft_model import DraftModel
from ridgeline.sampling_params import SamplingParams

NAMES = {"llama": "llama", "other": "qwen3", "windows": "gemma2", "latent": "deepseek_v3-halves", "mistral": "mistral"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("draft models")
    made = {name: save_checkpoint(kind, folder / name, **SMALL) for name, kind in NAMES.items()}
    made["short"] = save_checkpoint("qwen3", folder / "short", max_position_embeddings=40, **SMALL)
    made["more ids"] = save_checkpoint("qwen3", folder / "more ids", vocab_size=140, **SMALL)
    return made


def drafts_of(model: Path, most: int = 5, **more: Any) -> dict[str, Any]:
    given = {"method": "draft_model", "model": str(model), "num_speculative_tokens": most, "adaptive": False} | more
    return {"speculative_config": json.dumps(given)}


class Proposals:
    """What a draft model proposed behind which tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        propose = DraftModel._propose

        def watched(draft: DraftModel, rows: np.ndarray, width: np.ndarray) -> np.ndarray:
            found = propose(draft, rows, width)
            for row, own, most in zip(rows.tolist(), found.tolist(), width.tolist(), strict=True):
                self.made.add((tuple(draft._tokens[row, : draft._known[row]].tolist()), tuple(own[:most])))
            return found

        monkeypatch.setattr(DraftModel, "_propose", watched)

    def check(self, draft: Path) -> None:
        """Against the draft model's own greedy answers."""
        assert len(self.made) > 10
        made = sorted(self.made)
        made = made[:: len(made) // 40 + 1]              # hundreds: some of them, from all over
        asked = [
            Request(f"p{number}", list(known), SamplingParams(temperature=0, max_tokens=len(drafts), ignore_eos=True))
            for number, (known, drafts) in enumerate(made)
        ]
        alone = Served(draft, max_model_len=96, num_gpu_blocks_override=800).run(asked)
        for number, (_, drafts) in enumerate(made):
            assert alone[f"p{number}", 0] == list(drafts)


# -- the same tokens ---------------------------------------------------------------------------------------------------


def some_slow(names: Iterable[str], quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("way", some_slow(WAYS, ("greedy", "penalties")))
def test_a_model_accepts_what_it_proposes_itself(models: dict[str, Path], way: str) -> None:
    plain = plain_answers(models["llama"], **WAYS[way])
    served = Served(models["llama"], **drafts_of(models["llama"]))
    assert served.run(requests(**WAYS[way])) == plain
    counters = served.drafts.counters
    assert counters.accepted_tokens > 30
    if way not in ("penalties", "min_tokens", "logit_bias"):             # it does not know these
        assert counters.accepted_tokens == counters.draft_tokens


@pytest.mark.parametrize(("draft", "way"), [
    ("windows", "seeds"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("other", "greedy"), ("other", "penalties"), ("windows", "n"), ("latent", "greedy"),
    )),
])
def test_tokens_are_the_same_with_another_model(models: dict[str, Path], draft: str, way: str) -> None:
    plain = plain_answers(models["llama"], **WAYS[way])
    served = Served(models["llama"], **drafts_of(models[draft]))
    for _ in range(2):                                   # the second time prefixes are found
        assert served.run(requests(**WAYS[way])) == plain
    counters = served.drafts.counters
    assert 0 <= counters.accepted_tokens < counters.draft_tokens / 2


@pytest.mark.parametrize("target", some_slow(("windows", "latent"), ("windows",)))
def test_models_with_several_groups_and_latents_have_draft_models(models: dict[str, Path], target: str) -> None:
    plain = plain_answers(models[target])
    served = Served(models[target], **drafts_of(models[target]))
    assert served.run(requests()) == plain
    assert served.drafts.counters.accepted_tokens == served.drafts.counters.draft_tokens > 30


def test_beside_the_other_proposers(models: dict[str, Path]) -> None:
    """Some rows of a step have drafts of the host, others of the device."""
    plain = plain_answers(models["llama"])
    served = Served(models["llama"], **drafts_of(models["other"], method="auto"))
    for _ in range(2):
        assert served.run(requests(predicted=plain)) == plain
    counted = served.drafts.acceptance._counts
    assert {source.name for source in counted} >= {"draft_model", "prediction"}
    assert served.drafts.counters.accepted_tokens > 30


# -- its KV ------------------------------------------------------------------------------------------------------------

HAPPENS = BESIDE | {"few tokens a step": {"max_num_batched_tokens": 7}, "forks": {}}


@pytest.mark.parametrize("beside", some_slow(HAPPENS, ("preemption", "forks")))
def test_drafts_depend_on_the_tokens_alone(models: dict[str, Path], beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"n": 2 if beside == "forks" else 1}
    plain = plain_answers(models["llama"], **asked)
    proposals = Proposals(monkeypatch)
    served = Served(models["llama"], **drafts_of(models["other"], 4) | HAPPENS[beside])
    for _ in range(2):
        assert served.run(requests(**asked)) == plain
    counters = served.core.scheduler.manager.counters
    if beside == "preemption":
        assert served.core.scheduler.counters.preemptions > 0
    if beside == "forks":
        assert counters.hit_tokens > 0 and counters.copied_blocks > 0
    proposals.check(models["other"])


def test_it_catches_up_after_steps_without_drafts(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_answers(models["llama"])
    proposals = Proposals(monkeypatch)
    served = Served(models["llama"], **drafts_of(models["other"], 3))
    switches, caught_up = Switches(served.core), []
    watch_results(served, lambda result: caught_up.append(result.caught_up))
    for asked in requests():
        served.core.add(asked)
    said: dict[tuple[str, int], list[int]] = {}
    step = 0
    while served.core.has_work:
        switches.set("speculation", step // 6 % 2 == 1)
        for delta in served.core.step():
            said.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        step += 1
    assert said == plain
    assert sum(count > 0 for count in caught_up) >= 2    # prompts, and again what was said without drafts
    proposals.check(models["other"])


def watch_results(served: Served, told: Any) -> None:
    collect = served.core.executor.collect

    def watched() -> Any:
        result = collect()
        told(result)
        return result

    served.core.executor.collect = watched               # type: ignore[method-assign]


def test_a_prefix_keeps_its_draft_kv(models: dict[str, Path]) -> None:
    """It is found again with the blocks, and n answers compute the KV of their prompt once."""
    served = Served(models["llama"], **drafts_of(models["other"]))
    totals = [0, 0]
    runs = 0

    def told(result: Any) -> None:
        totals[runs] += result.caught_up

    watch_results(served, told)
    prompt = requests(1)[0].prompt_token_ids * 3
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=4)
    served.run([Request("first", prompt, params)])
    assert len(prompt) - 4 <= totals[0] < len(prompt) + 8
    runs = 1
    served.run([Request("second", prompt, params)])
    assert totals[1] <= 2 * params.n                     # what is not in whole blocks


def test_rows_beyond_its_longest_context_have_no_drafts(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_answers(models["llama"])
    proposals = Proposals(monkeypatch)
    served = Served(models["llama"], **drafts_of(models["short"]))
    assert served.run(requests()) == plain
    assert 30 < max(len(known) + len(drafts) for known, drafts in proposals.made) <= 40


@pytest.mark.parametrize(("target", "draft"), [("llama", "more ids"), pytest.param("more ids", "llama", marks=pytest.mark.slow)])
def test_embeddings_may_be_padded_differently(
    models: dict[str, Path], target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both then have a tokenizer, which says that the tokens are the same. Ids that one of them lacks are never proposed."""
    asked = {"temperature": 1.0, "seed": 2, "top_k": 135}
    for name in ("llama", "more ids"):
        vocabulary = {"model": {"vocab": {f"t{number}": number for number in range(131)}}}
        (models[name] / "tokenizer.json").write_text(json.dumps(vocabulary))
    plain = plain_answers(models[target], **asked)
    proposals = Proposals(monkeypatch)
    served = Served(models[target], **drafts_of(models[draft]))
    assert served.run(requests(**asked)) == plain
    assert max(token for _, drafts in proposals.made for token in drafts) < 131


@pytest.mark.parametrize("moment", [pytest.param(None, marks=pytest.mark.slow), 6])
def test_recorded_steps_do_the_same_again(models: dict[str, Path], moment: int | None) -> None:
    """Plans say how many drafts there are, and not which."""
    options = drafts_of(models["other"], 3) | {"tensor_parallel_size": 1, "async_scheduling": False}
    options |= {"enable_prefix_caching": moment is None, "max_num_batched_tokens": 512}
    core, recorder, snapshot = record(models["llama"], snapshot_at=moment, **options)
    assert any(step.plan.width is not None and step.plan.drafts is None for step in recorder.steps)
    assert any((result.num_new > 1).any() for result in recorder.results)
    runner, first = fresh(core), 0
    if moment is not None:
        assert snapshot is not None
        first = next(place for place, step in enumerate(recorder.steps) if step.plan.step > snapshot.step)
        replay(runner, [RecordedStep(recomputing_plan(snapshot, core.config.num_blocks))])
    for again, before in zip(replay(runner, recorder.steps[first:]), recorder.results[first:], strict=True):
        same(again, before, close=1e-6)


def test_a_warm_start_leaves_nothing_behind(models: dict[str, Path]) -> None:
    """Before the first request, as on a GPU."""
    plain = plain_answers(models["llama"])
    served = Served(models["llama"], **drafts_of(models["llama"]))
    with torch.inference_mode():
        served.core.executor.runner.drafter.warm_up()    # type: ignore[attr-defined]
    assert served.run(requests()) == plain
    assert served.drafts.counters.accepted_tokens == served.drafts.counters.draft_tokens > 30


def test_its_steps_grow_again_after_memory_ran_out(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CALM_PROPOSALS", 4)
    plain = plain_answers(models["llama"])
    served = Served(models["llama"], max_num_batched_tokens=64, max_num_seqs=8, **drafts_of(models["llama"], 1))
    draft: DraftModel = served.core.executor.runner.drafter    # type: ignore[attr-defined]
    draft.start_over()
    assert draft._budget.tokens == 32
    assert served.run(requests()) == plain
    assert draft._budget.tokens == 64


@pytest.mark.slow
def test_ranks_divide_the_draft_model_too(models: dict[str, Path]) -> None:
    plain = plain_answers(models["llama"], temperature=0.7, seed=3)
    served = Served(models["llama"], tensor_parallel_size=2, **drafts_of(models["llama"]))
    assert served.run(requests(temperature=0.7, seed=3)) == plain
    served.core.close()
    counters = served.drafts.counters
    assert counters.accepted_tokens == counters.draft_tokens > 30


@pytest.mark.slow
@pytest.mark.real_model
def test_the_embedded_model_accepts_nearly_all_of_its_own_drafts() -> None:
    """Not that its answers are the same: in float32 a step of several tokens rounds differently than one of a single token."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    given = {"method": "draft_model", "model": str(embedded.require()), "num_speculative_tokens": 4, "adaptive": False}
    options: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "device": "cpu"}
    llm = LLM(speculative_config=given, **options)
    llm.generate(["The capital of France", "def add("], params, use_tqdm=False)
    counters = getattr(llm.core.scheduler.drafter, "counters", None)
    llm.close()
    assert counters is not None and counters.accepted_tokens > 0.95 * counters.draft_tokens > 40


# -- before weights are read -------------------------------------------------------------------------------------------


def resolved(model: Path, kind: str = "cpu", memory: int = 2**28, **options: Any) -> ResolvedConfig:
    dtype = "float32" if kind == "cpu" else "bfloat16"
    return resolve(EngineConfig.of(model=str(model), **{"dtype": dtype} | options), DeviceFacts(kind, memory, (dtype,)))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_its_weights_and_kv_are_in_the_ledger(models: dict[str, Path], kind: str) -> None:
    options = {"max_num_seqs": 8, "kv_cache_memory_bytes": 2**17, "max_num_batched_tokens": 64}
    memory = 2**28 if kind == "cpu" else 2**33
    off = resolved(models["llama"], kind, memory, speculative_config="ngram", **options)
    on = resolved(models["llama"], kind, memory, **drafts_of(models["llama"]), **options)
    assert on.memory["weights"] == 2 * off.memory["weights"]
    assert on.num_blocks * 2 in (off.num_blocks, off.num_blocks - 1)     # a block has the KV of both
    assert on.memory["rows"] > off.memory["rows"] or kind == "cpu"
    pinned = on.pinned().flat()
    assert resolved(pinned.pop("model"), kind, memory, **pinned).num_blocks == on.num_blocks     # as other ranks do it


def test_a_block_has_room_for_every_layer_of_it(models: dict[str, Path]) -> None:
    """Also where its layers have windows, and are in several groups of their own."""
    draft = resolved(models["llama"], **drafts_of(models["windows"])).draft
    assert draft is not None and len(draft.groups) > 1
    heads, dim, layers = 2, 16, 2
    assert draft.block_bytes == draft.pages.block_size * 2 * heads * dim * layers * 2     # float16


@pytest.mark.parametrize(("options", "says"), [
    ({"pipeline_parallel_size": 2}, "does not work with pipeline_parallel_size 2"),
    ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "does not work with decode_context_parallel_size 2"),
    ({"model": "mistral"}, "all its layers have a window"),
    ({"draft": "more ids"}, "has 140 ids, the model has 131"),
    ({"draft": "nothing"}, "nothing"),
    ({"deterministic": True, "kind": "cuda", "memory": 2**33}, "does not work with deterministic on a GPU"),
])
def test_what_does_not_work_is_refused_before_weights_are_read(
    models: dict[str, Path], options: dict[str, Any], says: str
) -> None:
    for path in (models["llama"], models["more ids"]):
        (path / "tokenizer.json").unlink(missing_ok=True)
    asked = dict(options)
    model, draft = models[asked.pop("model", "llama")], models["llama"].parent / asked.pop("draft", "other")
    with pytest.raises((ConfigError, ModelError), match=says):
        resolved(model, asked.pop("kind", "cpu"), asked.pop("memory", 2**28), **drafts_of(draft), **asked)


def test_other_tokens_are_refused(models: dict[str, Path]) -> None:
    vocabularies = {"llama": "a", "other": "b"}
    for name, letter in vocabularies.items():
        content = {"model": {"vocab": {f"{letter}{number}": number for number in range(131)}}}
        (models[name] / "tokenizer.json").write_text(json.dumps(content))
    try:
        with pytest.raises(ConfigError, match="differs from the model in 131 of 131 tokens"):
            resolved(models["llama"], **drafts_of(models["other"]))
    finally:
        for name in vocabularies:
            (models[name] / "tokenizer.json").unlink()

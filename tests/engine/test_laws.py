"""The laws: every technique gives the same greedy tokens as its off version, alone and in pairs.

Requests run on tiny random checkpoints in float64, so that rounding cannot change an argmax; where there is a GPU, there
and in float32, which is the widest its kernels compute in. The reference is everything
off: one request at a time, contiguous KV, whole prompts, nothing cached. Each law also asserts that its technique was
active: a law about something that never happened proves nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import MAX_POSITION, VOCAB
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.executor import PipelineExecutor, RankedExecutor
from ridgeline.layers import attention
from ridgeline.messages import Request
from ridgeline.ops.attention.attention_arguments import AttentionWork
from ridgeline.runner import shared_prefix
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.sampling_params import SamplingParams
from ridgeline.techniques import TECHNIQUES, Technique

MODELS = ("llama", "mistral", "gemma2", "qwen3")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = TECHNIQUES
# Those that can be active here and promise equal tokens. Quantised KV promises a bound, quantised weights those of the expanded
# weights (tests/models/test_fp8.py): they have laws of their own. So have divided experts and contexts
# (tests/models/test_mesh.py).
OWN_LAWS = ("quantised KV", "quantised weights", "expert parallelism", "context parallelism")
TECHNIQUES = tuple(each for each in ALL if each.device in ("", DEVICE) and each.name not in OWN_LAWS)
if DEVICE == "cuda" and torch.cuda.device_count() < 2:   # two ranks on one GPU: tests/runner/test_gpu_ranks.py
    TECHNIQUES = tuple(each for each in TECHNIQUES if each.name not in ("tensor parallelism", "pipeline parallelism"))
# Stages of divided layers are four processes: too slow for every law. Pipelines have their laws alone and in pairs.
APART = {"pipeline parallelism"}
TOGETHER = tuple(technique for technique in TECHNIQUES if technique.name not in APART)
OFF: dict[str, Any] = {name: value for technique in ALL for name, value in technique.off.items()}
PLAIN = OFF | {
    "max_num_seqs": 1, "block_size": 4, "num_gpu_blocks_override": 400, "device": DEVICE,
    "dtype": "float64" if DEVICE == "cpu" else "float32",
}
CROWD = {"max_num_seqs": 6}          # several rows at once, where a technique needs company
STOPS = list(range(5, VOCAB, 17))


def requests(n: int = 1, long: bool = False) -> list[Request]:
    """Prompts that begin alike, of all lengths around block borders, answers of all lengths, some ended by a stop.

    `long` answers outgrow a small cache: nobody could know that when they were admitted.
    """
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB) for _ in range(30)]
    made = []
    for number in range(12):
        prompt = shared[: rng.choice([0, 7, 8, 9, 21, 30])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 14))]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 28), stop_token_ids=STOPS, n=n)
        if long:
            prompt, params = prompt[-12:], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        made.append(Request(f"r{number}", prompt, params))
    return made[:7] if long else made                    # seven fill a small cache several times


@dataclass
class Outcome:
    answers: dict[tuple[str, int], list[int]]
    core: EngineCore


def run(model: Path, options: dict[str, Any], asked: list[Request], abort_at: dict[int, str] | None = None) -> Outcome:
    """All requests through one engine, two arriving per step; `abort_at`: request ids to abort, by step."""
    core = EngineCore.start(EngineConfig.of(model=str(model), **options))
    answers: dict[tuple[str, int], list[int]] = {}
    waiting, step = list(asked), 0
    while waiting or core.has_work:
        for request in waiting[:2]:
            core.add(request)
        waiting = waiting[2:]
        if abort_at and step in abort_at:
            core.abort(abort_at[step])
        for delta in core.step():
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        step += 1
        assert step < 5000, "the engine does not come to an end"
    core.scheduler.manager.pool.check()
    assert core.scheduler.num_running == core.scheduler.num_waiting == 0
    core.close()
    return Outcome(answers, core)


@pytest.fixture(autouse=True)
def any_saving_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 1)
    monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("laws")
    # A head of its own: with the embedding as head a random model repeats its last token, and hides what it reads.
    return {name: save_checkpoint(name, folder / name, tie_word_embeddings=False) for name in MODELS}


class References(dict[str, dict[tuple[str, int], list[int]]]):
    """What each model says with every technique off, found when it is first asked for."""

    def __init__(self, models: dict[str, Path], long: bool) -> None:
        self.models, self.long = models, long

    def __missing__(self, name: str) -> dict[tuple[str, int], list[int]]:
        answers = self[name] = run(self.models[name], PLAIN, requests(long=self.long)).answers
        said = [token for tokens in answers.values() for token in tokens]
        assert self.long or len(set(said)) > len(said) / 4, f"{name} says too little of interest: {sorted(set(said))}"
        return answers


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> References:
    return References(models, long=False)


# -- the declared techniques ------------------------------------------------------------------------------------------

ACTIVE: dict[str, Callable[[EngineCore], bool]] = {
    "paged KV": lambda core: core.scheduler.manager.grows
    and core.scheduler.counters.used_slots > 0.6 * core.scheduler.counters.held_slots,
    "continuous batching": lambda core: core.scheduler.counters.joins > 0,
    "chunked prefill": lambda core: core.scheduler.counters.chunks > 0,
    "prefix caching": lambda core: core.scheduler.manager.counters.hit_tokens > 0,
    "overlap": lambda core: core.scheduler.counters.late_tokens > 0,
    "CUDA graphs": lambda core: core.executor.runner.forward.replays > 0,
    # Layers with a window forget a prefix, so that a model of such layers alone must not share one.
    "shared-prefix attention": lambda core: any(each.steps for each in core.executor.runner.rows.prefixes)
    != all(group.window is not None for group in core.config.groups),
    "speculation": lambda core: core.scheduler.drafter.counters.draft_tokens > 0,
    "quantised weights": lambda core: core.config.options.model.quantization == "fp8",
    "quantised KV": lambda core: core.config.kv_format.quantised,
    "tensor parallelism": lambda core: isinstance(core.executor, RankedExecutor),
    "pipeline parallelism": lambda core: isinstance(core.executor, PipelineExecutor) and core.executor.most_in_flight == 2,
    "expert parallelism": lambda core: core.executor.runner.model.experts_here is not None,
    "context parallelism": lambda core: core.config.groups[0].ranks > 1,
}
# What a technique needs to have something to do.
OCCASION: dict[str, dict[str, Any]] = {
    "continuous batching": CROWD,
    "chunked prefill": {"max_num_batched_tokens": 8},
    "overlap": CROWD,
    "CUDA graphs": CROWD,
    "pipeline parallelism": CROWD,
    "shared-prefix attention": CROWD,
    # Every draft is verified: with times of this machine the controller might choose none.
    "speculation": {"speculative_config": '{"method": "auto", "num_speculative_tokens": 4, "adaptive": false}'},
}


def switched_on(*techniques: Technique) -> dict[str, Any]:
    options = dict(PLAIN)
    for technique in techniques:
        needed = switched_on(*(other for other in TECHNIQUES if other.name in technique.requires))
        options |= {name: value for name, value in needed.items() if PLAIN.get(name) != value}
    for technique in techniques:
        options |= technique.on | OCCASION.get(technique.name, {})
    return options


def test_every_declared_technique_has_a_law() -> None:
    assert set(ACTIVE) == {technique.name for technique in ALL}
    assert all((Path(__file__).parents[2] / "ridgeline" / technique.module).is_file() for technique in ALL)


slow = [pytest.mark.slow] if DEVICE == "cpu" else []     # `make test-gpu` has them all


def others_slow(model: str) -> list[Any]:
    """Every model, all but this one in the slow tests. `test_batch_size` has every model on every commit."""
    return [name if name == model else pytest.param(name, marks=slow) for name in MODELS]


@pytest.mark.reliability("P-07")
@pytest.mark.parametrize("name", others_slow("gemma2"))
@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_technique_alone(technique: Technique, name: str, models: dict[str, Path], reference: dict[str, Any]) -> None:
    outcome = run(models[name], switched_on(technique), requests())
    assert outcome.answers == reference[name]
    assert ACTIVE[technique.name](outcome.core), f"{technique.name} was never active"


@pytest.mark.reliability("P-07")
@pytest.mark.parametrize("pair", [
    pytest.param(pair, marks=[] if {each.name for each in pair} == {"speculation", "pipeline parallelism"} else slow,
                 id=" + ".join(each.name for each in pair)) for pair in itertools.combinations(TECHNIQUES, 2)
    if pair[0].name not in pair[1].excludes and pair[1].name not in pair[0].excludes
])
def test_techniques_in_pairs(pair: tuple[Technique, Technique], models: dict[str, Path], reference: dict[str, Any]) -> None:
    """Each technique alone, and all of them together, are held to on every commit."""
    outcome = run(models["gemma2"], switched_on(*pair), requests())
    assert outcome.answers == reference["gemma2"]
    for technique, other in (pair, pair[::-1]):
        active = other.name not in technique.adds_nothing_to
        assert ACTIVE[technique.name](outcome.core) == active, f"{technique.name} was {'never ' * active}active"


def test_all_techniques_together(models: dict[str, Path], reference: dict[str, Any]) -> None:
    options = switched_on(*TOGETHER) | {"max_num_batched_tokens": 16}      # drafts take what prompts leave
    outcome = run(models["gemma2"], options, requests())
    assert outcome.answers == reference["gemma2"]
    assert all(ACTIVE[technique.name](outcome.core) for technique in TOGETHER)


# -- settings that must not matter -------------------------------------------------------------------------------------

ALL_ON = {name: value for technique in TOGETHER if technique.exact for name, value in technique.on.items()}
USUAL = PLAIN | ALL_ON | CROWD


@pytest.mark.reliability("P-07")
@pytest.mark.parametrize("stored", [
    {"kv_cache_dtype": "k=int8,v=fp8", "kv_cache_dtype_skip_layers": "sliding_window"},
    *(pytest.param({"kv_cache_dtype": name}, marks=slow) for name in ("int8", "fp8", "k=auto,v=int8")),
], ids=lambda stored: "-".join(stored.values()))
def test_a_quantised_cache_holds_the_same_whatever_else_is_on(stored: dict[str, Any], models: dict[str, Path]) -> None:
    """Scales are of one token each, so a token's codes do not depend on batches, chunks, prefixes or drafts."""
    asked = requests()[:6]
    expected = run(models["gemma2"], PLAIN | stored, asked).answers
    outcome = run(models["gemma2"], USUAL | stored | {"max_num_batched_tokens": 16}, asked)
    assert outcome.answers == expected
    assert ACTIVE["quantised KV"](outcome.core)


@pytest.mark.reliability("P-08")
@pytest.mark.parametrize(("rows", "name"), [
    *((5, name) for name in MODELS), (2, "gemma2"), (12, "gemma2"),
    *(pytest.param(rows, name, marks=slow) for rows in (2, 12) for name in MODELS if name != "gemma2"),
])
def test_batch_size(rows: int, name: str, models: dict[str, Path], reference: dict[str, Any]) -> None:
    assert run(models[name], USUAL | {"max_num_seqs": rows}, requests()).answers == reference[name]


@pytest.mark.reliability("P-07")
@pytest.mark.parametrize("budget", [1, 3, 7, 256])
def test_chunk_size(budget: int, models: dict[str, Path], reference: dict[str, Any]) -> None:
    outcome = run(models["gemma2"], USUAL | {"max_num_batched_tokens": budget}, requests())
    assert outcome.answers == reference["gemma2"]
    assert (outcome.core.scheduler.counters.chunks > 0) == (budget < 256)


@pytest.mark.reliability("P-07")
@pytest.mark.parametrize("name", ["gemma2", pytest.param("llama", marks=slow)])
@pytest.mark.parametrize("size", [1, 2, 8, 16, 5])
def test_block_size(size: int, name: str, models: dict[str, Path], reference: dict[str, Any]) -> None:
    assert run(models[name], USUAL | {"block_size": size}, requests()).answers == reference[name]


@pytest.fixture(scope="module")
def long_reference(models: dict[str, Path]) -> References:
    return References(models, long=True)


@pytest.mark.reliability("P-07")
@pytest.mark.parametrize(("caching", "overlap"), [
    (True, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, False), (False, True), (True, False))),
])
@pytest.mark.parametrize("name", [each for each in others_slow("gemma2") if "mistral" not in str(each)])
def test_preemption(name: str, caching: bool, overlap: bool, models: dict[str, Path], long_reference: Any) -> None:
    """So few blocks that running requests must give theirs up. Not mistral: with windows alone none outgrows its room."""
    blocks = {"llama": 20, "qwen3": 20, "gemma2": 30}[name]
    options = USUAL | {
        "num_gpu_blocks_override": blocks, "max_model_len": 60, "enable_prefix_caching": caching,
        "async_scheduling": overlap, "max_num_batched_tokens": 16,
    }
    outcome = run(models[name], options, requests(long=True))
    assert outcome.answers == long_reference[name]
    assert outcome.core.scheduler.counters.preemptions > 0
    assert outcome.core.scheduler.counters.wasted_tokens > 0


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_free_blocks(name: str, models: dict[str, Path], reference: dict[str, Any]) -> None:
    outcome = run(models[name], USUAL, requests())
    assert outcome.answers == reference[name]
    assert outcome.core.scheduler.manager.counters.window_freed > 0


@pytest.mark.parametrize("caching", [False, True])
def test_n_answers(caching: bool, models: dict[str, Path], reference: dict[str, Any]) -> None:
    """Greedy answers of one request are all the same, and the prompt's blocks are computed once."""
    outcome = run(models["gemma2"], USUAL | {"enable_prefix_caching": caching, "max_num_seqs": 12}, requests(n=3))
    expected = {(request, index): tokens for (request, _), tokens in reference["gemma2"].items() for index in range(3)}
    assert outcome.answers == expected
    counters = outcome.core.scheduler.manager.counters
    assert counters.forked_blocks > 0 or (caching and counters.hit_tokens > 0)


@pytest.mark.parametrize("graphs", [False, True] if DEVICE == "cuda" else [False])
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
@pytest.mark.parametrize("name", others_slow("gemma2"))
def test_sampled_rows_beside_prompts_are_filled_up(
    name: str, temperature: float, graphs: bool, models: dict[str, Path], reference: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where everybody's hidden states are wanted: some ask for the log-probabilities of their prompts."""
    made, launched, filled = DeviceRows.__init__, DeviceRows._launched, 0

    def pads(self: DeviceRows, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self._pads, self._sizes = True, [self.max_rows]  # on the CPU, too, and always

    def counted(self: DeviceRows, *args: Any) -> Any:
        nonlocal filled
        layout = launched(self, *args)
        filled += len(layout.picks) < len(layout.sampled)
        return layout

    monkeypatch.setattr(DeviceRows, "__init__", pads)
    monkeypatch.setattr(DeviceRows, "_launched", counted)
    asked = requests()
    for number, request in enumerate(asked):
        request.params = replace(request.params, temperature=temperature, prompt_logprobs=1 if number in (2, 11) else None)
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 9}       # fewer tokens than rows
    options = {"max_num_seqs": 12, "batching": "continuous", "enforce_eager": not graphs} | chunks
    outcome = run(models[name], PLAIN | options, asked)
    assert outcome.answers == reference[name] and filled > 2


@pytest.mark.reliability("P-09")
def test_seeded_noise(models: dict[str, Path]) -> None:
    """A seeded request says the same alone, in a crowd, after preemption, and whatever its n-th neighbours do."""
    asked = requests()[:6]
    for number, request in enumerate(asked):
        request.params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, seed=100 + number, n=2)
    alone = run(models["llama"], PLAIN, asked).answers
    crowded = run(models["llama"], USUAL | {"num_gpu_blocks_override": 20, "max_model_len": 72}, asked)
    assert crowded.answers == alone
    assert crowded.core.scheduler.counters.preemptions > 0
    assert any(alone[f"r{n}", 0] != alone[f"r{n}", 1] for n in range(6))


def test_abort_of_neighbours(models: dict[str, Path], reference: dict[str, Any]) -> None:
    asked = requests()
    gone = {3: "r1", 6: "r4", 9: "r8", 14: "r11"}
    outcome = run(models["gemma2"], USUAL, asked, abort_at=gone)
    kept = {key: tokens for key, tokens in reference["gemma2"].items() if key[0] not in gone.values()}
    assert {key: tokens for key, tokens in outcome.answers.items() if key in kept} == kept
    cut = [key for key in outcome.answers if key not in kept and outcome.answers[key] != reference["gemma2"][key]]
    assert cut, "every abort came too late to matter"


def test_static_batches_wait_for_the_longest(models: dict[str, Path], reference: dict[str, Any]) -> None:
    static = run(models["llama"], USUAL | {"batching": "static"}, requests())
    continuous = run(models["llama"], USUAL, requests())
    assert static.answers == continuous.answers == reference["llama"]
    assert static.core.scheduler.counters.joins == 0
    assert static.core.scheduler.counters.steps > continuous.core.scheduler.counters.steps


def test_contiguous_reservations_waste_memory(models: dict[str, Path], reference: dict[str, Any]) -> None:
    options = USUAL | {"kv_layout": "contiguous", "max_model_len": MAX_POSITION}
    contiguous = run(models["llama"], options, requests()).core.scheduler.counters
    paged = run(models["llama"], USUAL, requests()).core.scheduler.counters
    assert contiguous.used_slots / contiguous.held_slots < 0.5 * paged.used_slots / paged.held_slots


def test_reference_kernels(models: dict[str, Path], reference: dict[str, Any]) -> None:
    assert run(models["gemma2"], USUAL | {"kernels": "reference"}, requests()).answers == reference["gemma2"]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU every law does it")
@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_steps_of_decodes_alone_take_one_op(
    name: str, models: dict[str, Path], reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the projection on; steps of two or three rows, steps with prompts, and deterministic ones take two."""
    pack, attend, calls = DeviceRows.pack, attention.decode_attention, 0

    def packed(self: DeviceRows, *args: Any) -> Any:
        batch = pack(self, *args)
        tokens = len(batch.tokens)
        decodes = tokens == len(batch.kv_len)
        batch.work = AttentionWork(tokens if decodes else 0, 0 if decodes else tokens, deterministic=tokens == 5)
        return batch

    def counted(qkv: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert len(qkv) in (1, 4, 6)
        return attend(qkv, *args, **options)

    monkeypatch.setattr(DeviceRows, "pack", packed)
    monkeypatch.setattr(attention, "decode_attention", counted)
    assert run(models[name], USUAL, requests()).answers == reference[name]
    assert calls > 10

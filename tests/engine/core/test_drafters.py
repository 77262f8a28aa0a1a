"""Speculation in a real engine: with every proposer, answers have the tokens that they have without drafts.

Tiny models in float64, so that rounding cannot change a token. Every test also asserts that drafts were verified, and, where the
proposer can be right, that some were accepted. `adaptive` is off: each draft that is offered is verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served_model import write_model
from tiny_models import random_tokens, save_checkpoint

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.draft_options import AUTO, METHODS, draft_options
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.drafters import _key_bytes, step_model
from ridgeline.engine.core.live_switches import Switches
from ridgeline.errors import BadRequest, ConfigError
from ridgeline.messages import Request, TokenDelta, TokenDeltas
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.scheduler.drafting import NoDrafter
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.shape_times import ShapeTimes
from ridgeline.sizes.graph_shapes import GraphShapes

OPTIONS: dict[str, Any] = {
    "dtype": "float64", "device": "cpu", "max_num_seqs": 6, "block_size": 4, "num_gpu_blocks_override": 200,
    "max_model_len": 90,
}
SMALL: dict[str, Any] = {"tie_word_embeddings": False, "num_hidden_layers": 2}
Answers = dict[tuple[str, int], list[int]]


def config(methods: list[str], most: int = 5, **more: Any) -> str:
    return json.dumps({"method": methods, "num_speculative_tokens": most, "adaptive": False} | more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("drafts") / "model", **SMALL)


def test_what_keys_take_is_not_overstated_on_a_gpu_without_a_data_sheet(model: Path) -> None:
    """It was told as of a CPU, and added to measured times: steps seemed to take five to fifteen times as long as they did."""
    known = resolve(EngineConfig.of(model=str(model), **OPTIONS), DeviceFacts("cpu", 2**28, ("float32",)))
    config = replace(known, device="cuda", dtype="bfloat16", device_name="NVIDIA without a data sheet")
    times = ShapeTimes(step_model(config, 131_072), GraphShapes(64, 8192, 16))
    times.observe(32, 32, 1, 20_000, 0.010)
    for keys, seconds in ((20_000, 0.010), (17_000, 0.010 - 3000 * 131_072 / 1e12)):         # a card with 1 TB/s
        assert times.seconds(32, keys) == pytest.approx(seconds, rel=0.05)


def test_ranks_that_keep_the_same_kv_head_read_all_of_its_keys(model: Path) -> None:
    """Of two KV heads each of four ranks was taken to have a half."""
    facts, options = DeviceFacts("cpu", 2**28, ("float32",)), OPTIONS | {"dtype": "float32", "model": str(model)}
    of_ranks = [_key_bytes(resolve(EngineConfig.of(**options, tensor_parallel_size=ranks), facts)) for ranks in (1, 2, 4)]
    assert of_ranks == [2 * of_ranks[1], of_ranks[1], of_ranks[1]] and of_ranks[0] > 0


class Served:
    """An engine core and what its requests said."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.core = EngineCore.start(EngineConfig.of(model=str(model), **OPTIONS | options))
        self.deltas: list[TokenDelta] = []

    def run(self, requests: list[Request]) -> Answers:
        said: Answers = {}
        for request in requests:
            self.core.add(request)
        while self.core.has_work:
            for delta in self.core.step():
                said.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
                self.deltas.append(delta)
        self.core.scheduler.manager.pool.check()
        return said

    @property
    def drafts(self) -> Controller:
        assert isinstance(self.core.scheduler.drafter, Controller)
        return self.core.scheduler.drafter


def requests(count: int = 5, length: int = 16, predicted: Answers | None = None, **params: Any) -> list[Request]:
    """Half of each prompt is said twice, so that n-grams match."""
    made = []
    for number in range(count):
        prompt = random_tokens(9 + number, seed=number)
        asked = SamplingParams(**{"temperature": 0.0, "max_tokens": length + number, "ignore_eos": True} | params)
        made.append(Request(f"r{number}", prompt + prompt, asked))
        if predicted is not None:
            text = list(predicted[f"r{number}", 0])
            middle = len(text) // 2
            text[middle] = (text[middle] + 1) % 100      # an edit: the prediction is left, and found again
            made[-1].predicted_token_ids = text
    return made


_PLAIN: dict[str, Answers] = {}


def plain_answers(model: Path, **params: Any) -> Answers:
    """Without drafts, once for all tests that ask for the same."""
    key = json.dumps([str(model), params])
    if key not in _PLAIN:
        _PLAIN[key] = Served(model).run(requests(**params))
    return _PLAIN[key]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeds": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "n": {"temperature": 1.0, "seed": 5, "n": 3},
    "min_tokens": {"temperature": 1.0, "seed": 2, "min_tokens": 6, "ignore_eos": False, "stop_token_ids": list(range(0, 131, 5))},
    "logit_bias": {"temperature": 0.5, "seed": 2, "logit_bias": {7: 3.0, 9: 3.0}, "top_k": 12},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("way", [
    way if way in ("greedy", "penalties", "n") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS
])
def test_tokens_are_the_same_with_all_proposers(model: Path, way: str) -> None:
    plain = plain_answers(model, **WAYS[way])
    served = Served(model, speculative_config=config(["ngram", "suffix", "prediction"]))
    assert served.run(requests(predicted=plain, **WAYS[way])) == plain
    assert served.drafts.counters.accepted_tokens > 0
    assert served.run(requests(predicted=plain, **WAYS[way])) == plain         # now earlier answers are known, too


@pytest.mark.parametrize("method", ["ngram", "prediction", "suffix"])
def test_tokens_are_the_same_with_each_proposer(model: Path, method: str) -> None:
    plain = plain_answers(model)
    served = Served(model, speculative_config=config([method]))
    for _ in range(2):                                   # the suffix proposer knows nothing at first
        assert served.run(requests(predicted=plain)) == plain
    assert served.drafts.counters.draft_tokens > 0
    if method != "ngram":                                # noise repeats itself rarely, and these know the answer
        assert served.drafts.counters.accepted_tokens > 20


BESIDE: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 12},
    "preemption": {"num_gpu_blocks_override": 30, "enable_prefix_caching": False},
    "overlap": {"async_scheduling": True},
    "contiguous": {"kv_layout": "contiguous", "enable_prefix_caching": False},
}


@pytest.mark.parametrize("beside", BESIDE)
def test_beside_other_techniques(model: Path, beside: str) -> None:
    plain = plain_answers(model, temperature=0.8, seed=4)
    served = Served(model, speculative_config=config(["ngram", "suffix", "prediction"]), **BESIDE[beside])
    assert served.run(requests(predicted=plain, temperature=0.8, seed=4)) == plain
    assert served.drafts.counters.draft_tokens > 0
    if beside == "preemption":
        assert served.core.scheduler.counters.preemptions > 0


def test_the_prefix_cache_finds_as_much_as_without_drafts(model: Path) -> None:
    plain = Served(model)
    said = plain.run(requests())
    plain.run(requests())
    served = Served(model, speculative_config=config(["ngram", "suffix", "prediction"]))
    served.run(requests(predicted=said))
    served.run(requests(predicted=said))
    asked, found = served.core.scheduler.manager.counters, plain.core.scheduler.manager.counters
    assert asked.hit_tokens == found.hit_tokens > 0
    assert served.drafts.counters.accepted_tokens > 0


def test_drafts_save_steps(model: Path) -> None:
    plain = Served(model)
    said = plain.run(requests())
    served = Served(model, speculative_config=config(["prediction"]))
    served.run(requests(predicted=said))
    assert served.core.scheduler.counters.steps < 0.6 * plain.core.scheduler.counters.steps


def test_the_adaptive_controller_gives_the_same_tokens(model: Path) -> None:
    plain = plain_answers(model, temperature=0.9, seed=1)
    served = Served(model, speculative_config="auto")
    for _ in range(2):
        assert served.run(requests(predicted=plain, temperature=0.9, seed=1)) == plain
    assert served.drafts.counters.draft_tokens > 0


def test_usage_counts_the_prediction(model: Path) -> None:
    plain = plain_answers(model)
    served = Served(model, speculative_config=config(["prediction"]))
    served.run(requests(predicted=plain))
    last = {delta.request_id: delta.predicted for delta in served.deltas}
    assert all(accepted > 5 for accepted, _ in last.values()) and any(rejected for _, rejected in last.values())
    counters = served.drafts.counters
    assert sum(accepted for accepted, _ in last.values()) == counters.accepted_tokens
    assert sum(map(sum, last.values())) == counters.draft_tokens


@pytest.mark.parametrize("stop", [[], ["never said"]])
def test_a_prediction_is_counted_with_the_last_token_unless_a_stop_string_may_end_it(model: Path, stop: list[str]) -> None:
    plain = plain_answers(model)
    served = Served(model, speculative_config=config(["prediction"]))
    arrays: list[tuple[str, int, int]] = []
    step = served.core.step

    def watched() -> TokenDeltas:
        deltas = step()
        arrays.extend(deltas.answers)
        return deltas

    served.core.step = watched                                               # type: ignore[method-assign]
    assert served.run(requests(predicted=plain, stop=stop)) == plain
    told = {each.request_id: each.predicted for each in served.deltas if each.finish_reason}
    assert sum(accepted for accepted, _ in told.values()) == served.drafts.counters.accepted_tokens > 0
    assert bool(arrays) is not bool(stop)                # else an object was made for the tokens of each step


def test_a_request_can_bound_its_drafts(model: Path) -> None:
    plain = plain_answers(model)
    served = Served(model, speculative_config=config(["prediction"]))
    assert served.run(requests(predicted=plain, speculative=False)) == plain
    assert served.drafts.counters.draft_tokens == 0
    assert served.run(requests(predicted=plain, speculative=2)) == plain
    assert served.drafts.counters.accepted_per_position[1] > 0
    assert served.drafts.counters.accepted_per_position[2] == 0


def test_it_can_be_switched_while_it_runs(model: Path) -> None:
    served = Served(model, speculative_config=config(["ngram", "suffix", "prediction"]))
    switches = Switches(served.core)
    assert "speculation" in switches.active
    switches.set("speculation", False)
    plain = served.run(requests())
    assert served.drafts.counters.draft_tokens == 0
    switches.set("speculation", True)
    assert served.run(requests(predicted=plain)) == plain
    assert served.drafts.counters.draft_tokens > 0


def test_predicted_token_ids_are_checked(model: Path) -> None:
    served = Served(model, speculative_config=config(["prediction"]))
    asked = requests(1)[0]
    asked.predicted_token_ids = [5, 10**6]
    with pytest.raises(BadRequest, match="prediction holds token id 1000000"):
        served.core.add(asked)


def test_off_is_the_default(model: Path) -> None:
    assert isinstance(Served(model).core.scheduler.drafter, NoDrafter)
    assert isinstance(Served(model, speculative_config="none").core.scheduler.drafter, NoDrafter)


# -- grammars ----------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["identifier", "description", "colour"],
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 9999}, "description": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green", "blue"]},
    },
}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("drafted grammar") / "tiny")


@pytest.fixture(scope="module", params=["grammar", "auto"])
def pair(text_model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """Without drafts, and with them."""
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": 512, "num_gpu_blocks_override": 600, "block_size": 4, "max_num_seqs": 8,
        "dtype": "float64",
    }
    methods = list(AUTO) if request.param == "auto" else [request.param]
    made = LLM(text_model, **options), LLM(text_model, speculative_config=config(methods, 8), **options)
    yield made
    for each in made:
        each.close()


def structured(seed: int, **given: Any) -> SamplingParams:
    return SamplingParams(
        seed=seed, temperature=1.0, max_tokens=120, structured_outputs=StructuredOutputs(**given),
        prediction='{"identifier": 12, "description": "x", "colour": "red"}',
    )


def test_structured_answers_are_the_same_and_take_fewer_steps(pair: tuple[LLM, LLM]) -> None:
    drafted = pair[1]
    params = [
        *(structured(seed, json=SCHEMA, disable_any_whitespace=True) for seed in range(4)),
        *(structured(seed, regex=r"(GET|PUT) /index\.html\?q=[0-9]{2}") for seed in range(4)),
    ]
    steps = [each.core.scheduler.counters.steps for each in pair]
    outputs = [each.generate(["Hello"] * len(params), params, use_tqdm=False) for each in pair]
    said, again = ([(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in each] for each in outputs)
    assert said == again
    assert isinstance(drafted.core.scheduler.drafter, Controller)
    assert drafted.core.scheduler.drafter.counters.accepted_tokens > 20
    took = [each.core.scheduler.counters.steps - before for each, before in zip(pair, steps, strict=True)]
    assert took[1] < took[0]


# -- the option --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "methods"), [
    ("auto", AUTO), ("ngram", ("ngram",)), ('{"method": "suffix"}', ("suffix",)), ('{"model": "[ngram]"}', ("ngram",)),
    ('{"method": ["prediction", "ngram"], "num_speculative_tokens": 4}', ("prediction", "ngram")),
    ("", ()), ("off", ()), ('{"method": "ngram", "num_speculative_tokens": 0}', ()),
    ('{"method": "ngram", "disable_by_batch_size": 4}', ("ngram",)),
    ("./x", ("draft_model",)), ("x.gguf", ("draft_model",)), ("[ngram]", ("ngram",)), ('{"model": "x"}', ("draft_model",)),
    ('{"method": "auto", "model": "x"}', METHODS),
])
def test_methods(given: str, methods: tuple[str, ...]) -> None:
    assert draft_options(given).methods == methods


def test_bounds_as_in_vllm() -> None:
    made = draft_options('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}')
    assert (made.num_speculative_tokens, made.prompt_lookup_min, made.prompt_lookup_max) == (4, 3, 3)


@pytest.mark.parametrize(("given", "says"), [
    ("eagle", "needs a trained head"), ("draft_model", 'needs "model"'), ('{"method": "ngram", "model": "x"}', "uses no model"),
    ('{"method": "draft_model", "model": 3}', "must be a path"),
    ('{"method": "ngramm"}', "did you mean 'ngram'"), ('{"num_speculative_tokens": 3}', "needs a method"),
    ('{"method": "ngram", "num_speculative_token": 3}', "did you mean 'num_speculative_tokens'"),
    ('{"method": "ngram", "num_speculative_tokens": 99}', "between 0 and 15"), ("{", "must be a JSON object"),
    ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}', "must not be greater"),
    ('{"method": 5}', "method must be a name"), ('{"method": {}}', "method must be a name"), ('{"method": []}', "needs a method"),
    ('{"method": [["ngram"]]}', "method must be a name"), ('{"method": ' + "[" * 100_000, "must be a JSON object"),
])
def test_what_it_cannot_mean(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        draft_options(given)


def test_an_object_is_accepted_in_python() -> None:
    made = EngineConfig.of(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert draft_options(made.execution.speculative_config).num_speculative_tokens == 3

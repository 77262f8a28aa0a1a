"""Structured output through the whole engine: answers are in their language, and other answers do not change.

The model is a tiny one of noise, so nothing but the grammar makes an answer valid. Validity is judged by jsonschema and
`re`, which share nothing with the matcher.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import threaded_engine
import torch
from grammar_schemas import OPTIONS, SCHEMA, WRITTEN, drawn
from llguidance import LLExecutor
from served_model import wait_until, write_model

from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.engine_child import EngineChild
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.core import core as core_module
from ridgeline.engine.core import grammars
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.live_switches import Switches
from ridgeline.engine.core.loop import load
from ridgeline.engine.ipc import TO_ENGINE, Loading, Ready, Vocabulary
from ridgeline.errors import BadRequest, ConfigError, RequestError
from ridgeline.grammar.fill_thread import FillThread
from ridgeline.grammar.masks import Masks
from ridgeline.grammar.matcher import Matcher
from ridgeline.messages import Request, StepResult, TokenDelta
from ridgeline.ops.sampling.sample import CHOICE, sample_reference
from ridgeline.runner import sampler as sampler_module
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Prepared, Sampler
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.scheduler.bookkeeping import InFlight
from ridgeline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("grammar") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    made = LLM(model, **OPTIONS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(model: Path) -> Iterator[LLM]:
    """The same, with the other library."""
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    made = LLM(model, structured_outputs_backend="xgrammar", **OPTIONS)
    yield made
    made.close()


def asks(seed: int | None = 1, temperature: float = 1.0, max_tokens: int = 400, **given: Any) -> SamplingParams:
    more = {name: given.pop(name) for name in list(given) if name not in StructuredOutputs.__dataclass_fields__}
    return SamplingParams(
        seed=seed, temperature=temperature, max_tokens=max_tokens, structured_outputs=StructuredOutputs(**given), **more
    )


def answers(outputs: list[RequestOutput]) -> list[tuple[list[int], str | None]]:
    return [(answer.token_ids, answer.finish_reason) for output in outputs for answer in output.outputs]


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return bool(checker.is_valid(json.loads(text)))


# -- answers are valid -------------------------------------------------------------------------------------------------


@pytest.mark.reliability("P-11")
def test_answers_to_many_schemas_are_valid(llm: LLM) -> None:
    schemas = [*WRITTEN, *(drawn(seed) for seed in range(60))]
    params = [asks(seed, json=schema, disable_any_whitespace=True) for seed, schema in enumerate(schemas)]
    outputs = llm.generate(["Hello"] * len(schemas), params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop" and answer.stop_reason is None, (schema, answer)
        assert is_valid(answer.text, schema), (schema, answer.text)
    assert len({output.outputs[0].text for output in outputs}) > 50
    masks = llm.core.grammars.masks
    print(f"{masks.filled} masks, {1e6 * masks.seconds / masks.filled:.0f} µs each")


def test_regex_choice_json_object_and_blanks(llm: LLM) -> None:
    texts = [output.outputs[0].text for output in llm.generate(["Hi"] * 40, [
        *(asks(seed, regex=r"(GET|PUT) /[a-z]{1,8}(\?q=[0-9]{2})?") for seed in range(10)),
        *(asks(seed, choice=["yes", "no", "perhaps", "nö"]) for seed in range(10)),
        *(asks(seed, json=SCHEMA) for seed in range(10)),
        *(asks(seed, grammar='start: "<" NAME ">"\nNAME: /[a-c]{1,4}/') for seed in range(10)),
    ], use_tqdm=False)]
    assert all(re.fullmatch(r"(GET|PUT) /[a-z]{1,8}(\?q=[0-9]{2})?", text) for text in texts[:10])
    assert {*texts[10:20]} <= {"yes", "no", "perhaps", "nö"} and len({*texts[10:20]}) > 1
    assert all(is_valid(text, SCHEMA) for text in texts[20:30])
    assert all(re.fullmatch("<[a-c]{1,4}>", text) for text in texts[30:])
    begun = llm.generate(["Hi"] * 8, [asks(seed, max_tokens=40, json_object=True) for seed in range(8)], use_tqdm=False)
    assert all(output.outputs[0].text.startswith("{") for output in begun)


def chosen_by_definition(
    logits: torch.Tensor, choices: np.ndarray | None, tokens: torch.Tensor, failed: torch.Tensor, rows: torch.Tensor,
    last_token: torch.Tensor, mask: torch.Tensor | None,
) -> None:
    """In the place of the GPU's kernels: what they choose, where they write it."""
    how = np.zeros(len(logits), CHOICE) if choices is None else choices
    found, broken = sample_reference(logits, how, mask)
    tokens.copy_(found), failed.copy_(broken), last_token.index_copy_(0, rows, found)


def test_kernels_that_choose_alone_give_the_same_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: tokens come back as greedy ones do, beside rows without a grammar and with log-probabilities."""
    params = [
        asks(1, 0.0, json=SCHEMA), asks(2, 1.0, json=SCHEMA), asks(3, 0.0, regex="[a-z]{30}", logprobs=2),
        asks(4, 1.0, choice=["yes", "no"]), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1, seed=7, max_tokens=50, ignore_eos=True, logprobs=1),
    ]

    def said() -> list[Any]:
        outputs = llm.generate(["Hello"] * len(params), params, use_tqdm=False) + llm.generate("Hi", params[0], use_tqdm=False)
        return [(answer.token_ids, answer.finish_reason, str(answer.logprobs)) for each in outputs for answer in each.outputs]

    expected, used = said(), list[bool]()

    def choose(self: Sampler, logits: torch.Tensor, ready: Prepared, *others: Any) -> None:
        used.append(ready.lasting)
        sample_into(self, logits, ready, *others)

    sample_into = Sampler.sample_into
    monkeypatch.setattr(Sampler, "sample_into", choose)
    monkeypatch.setattr(sampler_module, "has_kernels", lambda *site: True)
    monkeypatch.setattr(sampler_module, "send_choices", lambda how, *site: how if how["temperature"].any() else None)
    monkeypatch.setattr(sampler_module, "draw", chosen_by_definition)
    assert said() == expected and {*used} == {True, False}


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("native", [True, False])
def test_tokens_that_a_grammar_goes_on_behind_are_taken_in_together(
    llm: LLM, rows: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row, and with so many that threads follow them; only an answer's end is looked at by itself."""
    params = [asks(seed, json=SCHEMA, disable_any_whitespace=True) for seed in range(rows)]
    ended = llm.generate(["Hello"] * rows, params, use_tqdm=False)       # also: grammars are compiled
    scheduler, one_by_one = llm.core.scheduler, list[int]()
    outcome = scheduler.answers._outcome

    def counted(flight: InFlight, result: StepResult, place: int) -> list[TokenDelta]:
        one_by_one.append(place)
        return outcome(flight, result, place)

    monkeypatch.setattr(llm.core.grammars.masks, "_threads", 2)
    monkeypatch.setattr(scheduler.answers, "_outcome", counted)
    if not native:
        monkeypatch.setattr(scheduler._decodes, "native", None)
    assert answers(llm.generate(["Hello"] * rows, params, use_tqdm=False)) == answers(ended)
    tokens = sum(len(output.outputs[0].token_ids) for output in ended)
    assert len(one_by_one) <= 4 * rows < tokens / 3      # a token beyond the end may be in flight, and others' ends look like one


@pytest.mark.parametrize("on", [True, False])
def test_deltas_leave_while_the_next_masks_are_filled(model: Path, on: bool) -> None:
    """With steps in flight beside the one that is planned. Where overlap is switched off meanwhile, nothing is lost."""
    llm = LLM(model, async_scheduling=True, **OPTIONS)
    params = [asks(seed, json=SCHEMA, disable_any_whitespace=True) for seed in range(9)]
    outputs = llm.generate(["Hello"] * 9, params, use_tqdm=False)
    core, switches, left, said = llm.core, Switches(llm.core), 0, dict[str, list[int]]()
    core.grammars.masks._threads = 2
    for number, each in enumerate(params):
        core.add(Request(str(number), outputs[0].prompt_token_ids, each))
    while core.has_work:
        deltas = core.step()
        left += core._unsampled
        if left == 5 and not on and "overlap" in switches.active:
            deltas += switches.set("overlap", False)
            assert not core.scheduler.num_in_flight
        for delta in deltas:
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert [said[str(number)] for number in range(9)] == [tokens for tokens, _ in answers(outputs)]
    assert left > 20 if on else left == 5
    llm.close()


def unsampled(model: Path) -> tuple[LLM, list[list[int]], dict[str, list[int]]]:
    """An engine whose newest step is not sampled yet, the answers of its requests, and what it has said of them so far."""
    llm = LLM(model, async_scheduling=True, **OPTIONS)
    params = [asks(seed, json=SCHEMA, disable_any_whitespace=True) for seed in range(9)]
    outputs = llm.generate(["Hello"] * 9, params, use_tqdm=False)
    llm.core.grammars.masks._threads = 2
    for number, each in enumerate(params):
        llm.core.add(Request(str(number), outputs[0].prompt_token_ids, each))
    said: dict[str, list[int]] = {str(number): [] for number in range(9)}
    while not llm.core._unsampled:
        take(llm.core.step(), said)
    return llm, [tokens for tokens, _ in answers(outputs)], said


def take(deltas: Any, said: dict[str, list[int]]) -> None:
    for delta in deltas:
        said[delta.request_id].extend(delta.token_ids)


def test_a_switch_that_runs_out_of_memory_loses_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap is switched off while a step waits to be sampled, and there is no memory to sample it."""
    llm, wanted, said = unsampled(model)
    core, sample, failed = llm.core, llm.core.executor.sample, []

    def failing(masks: Any = None) -> None:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        sample(masks)

    monkeypatch.setattr(core.executor, "sample", failing)
    take(Switches(core).set("overlap", False), said)
    assert failed and not core.scheduler.num_in_flight
    while core.has_work:
        take(core.step(), said)
    assert list(said.values()) == wanted
    llm.close()


def test_an_engine_that_ends_samples_what_it_has_launched(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait for these tokens. A grammar library that fails at the end is not in the way."""
    llm, *_ = unsampled(model)
    executor, done = llm.core.executor, list[str]()
    monkeypatch.setattr(executor, "sample", lambda masks=None: done.append("sampled"))
    close, finish = executor.close, llm.core.grammars.close
    monkeypatch.setattr(executor, "close", lambda: (done.append("closed"), close()))

    def failing() -> None:
        finish()
        raise RuntimeError("a library's panic")

    monkeypatch.setattr(llm.core.grammars, "close", failing)
    with pytest.raises(RuntimeError, match="panic"):
        llm.core.close()
    assert done == ["sampled", "closed"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_of_n_has_its_own_matcher(llm: LLM, temperature: float) -> None:
    params = asks(3, temperature, json=SCHEMA, disable_any_whitespace=True, n=5, logprobs=2)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert all(is_valid(answer.text, SCHEMA) for answer in output.outputs)
    assert len({answer.text for answer in output.outputs}) == (1 if temperature == 0 else 5)
    for answer in output.outputs:
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        assert all(token in at for token, at in zip(answer.token_ids, answer.logprobs, strict=True))


def test_the_other_library_keeps_answers_in_their_language(other: LLM) -> None:
    schema = json.loads(json.dumps(SCHEMA))
    schema["properties"]["name"] = {"type": "string", "pattern": "^[a-z]{1,8}$"}     # with a length it lets through "\x01"
    kinds = [
        {"json": schema, "disable_any_whitespace": True}, {"regex": "[a-f]{3,9}!"}, {"choice": ["yes", "no", "maybe"]},
        {"grammar": 'root ::= "x" [0-9]+ "y"'}, {"grammar": "%llguidance {}\nstart: /[0-9]{2,4}/"},
    ]
    params = [asks(seed, max_tokens=200, **kind) for seed in range(2) for kind in kinds]
    outputs = [output.outputs[0] for output in other.generate(["Hello"] * len(params), params, use_tqdm=False)]
    assert other.core.grammars._name == "xgrammar" and all(answer.finish_reason == "stop" for answer in outputs)
    for place in range(0, len(outputs), len(kinds)):
        text, regex, choice, gbnf, lark = (answer.text for answer in outputs[place : place + len(kinds)])
        assert is_valid(text, schema) and re.fullmatch("[a-f]{3,9}!", regex) and choice in kinds[2]["choice"]
        assert re.fullmatch("x[0-9]+y", gbnf) and re.fullmatch("[0-9]{2,4}", lark)
    with pytest.raises(BadRequest, match=r"regex cannot be used: Regex parsing error.*not closed"):
        other.generate("Hello", asks(regex="(a"), use_tqdm=False)


def test_many_answers_to_one_grammar_compile_it_often_enough_for_threads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.grammar.masks.num_threads", lambda: 3)
    monkeypatch.setattr("ridgeline.engine.core.grammars.num_threads", lambda: 3)
    monkeypatch.setattr(llm.core.grammars, "_masks", None)
    regex = "[a-z]{40,60}Z"                              # new to the engine
    outputs = llm.generate(["Hello"] * 20, [asks(seed, regex=regex) for seed in range(20)], use_tqdm=False)
    assert all(re.fullmatch(regex, output.outputs[0].text) for output in outputs)
    compiled = llm.core.grammars.cache.get(StructuredOutputs(regex=regex).key)
    assert compiled is not None and len(compiled) == 5   # once for four answers
    assert len({id(prototype) for prototype in compiled._prototypes}) == 5
    alone = llm.generate("Hello", asks(7, regex=regex), use_tqdm=False)
    assert answers(alone) == answers(outputs[7:8])
    monkeypatch.setattr("ridgeline.engine.core.grammars.COPIES_PER_THREAD", 1)
    for threads, copies in ((3, 3), (1, 1)):             # not more often than threads have use for, nor for one of them
        monkeypatch.setattr("ridgeline.grammar.masks.num_threads", lambda threads=threads: threads)
        monkeypatch.setattr("ridgeline.engine.core.grammars.num_threads", lambda threads=threads: threads)
        again = regex + "Y" * threads
        llm.generate(["Hello"] * 20, [asks(seed, regex=again, max_tokens=1) for seed in range(20)], use_tqdm=False)
        compiled = llm.core.grammars.cache.get(StructuredOutputs(regex=again).key)
        assert compiled is not None and len(compiled) == copies


# -- how an answer ends ------------------------------------------------------------------------------------------------


def test_a_complete_grammar_ends_the_answer_with_its_last_token(llm: LLM) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 30}):
        (output,) = llm.generate("Hi", asks(choice=["abc"], **more), use_tqdm=False)
        answer = output.outputs[0]
        assert (answer.text, len(answer.token_ids), answer.finish_reason, answer.stop_reason) == ("abc", 3, "stop", None)


def test_ends_wait_for_min_tokens_and_are_ignored_on_demand(llm: LLM) -> None:
    bias = {257: 100.0}                                  # the end token, as soon as it is allowed
    for more, length in (({}, 1), ({"min_tokens": 4}, 4), ({"ignore_eos": True}, 6), ({"max_tokens": 2, "ignore_eos": True}, 2)):
        (output,) = llm.generate("Hi", asks(regex="[ab]{1,6}", logit_bias=bias, **more), use_tqdm=False)
        answer = output.outputs[0]
        assert len(answer.text) == length and answer.finish_reason == ("length" if length == 2 else "stop"), more


def test_stops_cut_an_answer_as_they_do_any_other(llm: LLM) -> None:
    b = llm.get_tokenizer().encode("b")[0]
    always = {"regex": "aab*c", "logit_bias": {b: 50.0}}
    (by_text,) = llm.generate("Hi", asks(stop=["bb"], **always), use_tqdm=False)
    assert (by_text.outputs[0].text, by_text.outputs[0].stop_reason) == ("aa", "bb")
    (by_id,) = llm.generate("Hi", asks(stop_token_ids=[b], **always), use_tqdm=False)
    assert (by_id.outputs[0].text, by_id.outputs[0].stop_reason) == ("aa", b)
    (by_length,) = llm.generate("Hi", asks(max_tokens=5, **always), use_tqdm=False)
    assert (by_length.outputs[0].text, by_length.outputs[0].finish_reason) == ("aabbb", "length")


# -- laws --------------------------------------------------------------------------------------------------------------


def mixed() -> list[SamplingParams]:
    free = [SamplingParams(temperature=t, seed=7, max_tokens=30, ignore_eos=True, repetition_penalty=p)
            for t, p in ((0, 1.0), (1, 1.0), (0, 1.3), (0.7, 1.1))]
    bound = [asks(seed, t, json=SCHEMA, disable_any_whitespace=True) for seed, t in ((1, 0.0), (2, 1.0), (3, 0.8), (4, 1.0))]
    return [each for pair in zip(free, bound, strict=True) for each in pair]


PROMPTS = ["Hello there, this begins alike " + tail * 3 for tail in "abcdefgh"]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[list[int], str | None]]:
    """One at a time, nothing switched on."""
    plain = LLM(model, **OPTIONS | {
        "async_scheduling": False, "enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_seqs": 1,
    })
    found = answers(plain.generate(PROMPTS, mixed(), use_tqdm=False))
    plain.close()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 32}, {"num_gpu_blocks_override": 66, "async_scheduling": False},
        *(pytest.param(each, marks=pytest.mark.slow) for each in (
            {}, {"batching": "static"}, {"async_scheduling": False}, {"enable_prefix_caching": False},
            {"num_gpu_blocks_override": 66},
        )),
    ],
)
def test_techniques_change_no_constrained_answer(
    model: Path, options: dict[str, Any], expected: list[tuple[list[int], str | None]]
) -> None:
    made = LLM(model, **OPTIONS | {"max_num_seqs": 8, "max_model_len": 200} | options)
    assert answers(made.generate(PROMPTS, mixed(), use_tqdm=False)) == expected
    again = answers(made.generate(PROMPTS, mixed(), use_tqdm=False))     # now with everything in the prefix cache
    assert again == expected
    counters = made.core.scheduler.counters
    if "num_gpu_blocks_override" in options:
        assert counters.preemptions > 0
    if "max_num_batched_tokens" in options:
        assert counters.chunks > 0
    assert made.core.grammars.cache.hits > 0 and made.core.grammars.num_pending == 0
    made.core.scheduler.manager.pool.check()
    made.close()


def test_constrained_rows_leave_the_others_alone(llm: LLM) -> None:
    params = mixed()
    free = [place for place, each in enumerate(params) if each.structured_outputs is None]
    alone = answers(llm.generate([PROMPTS[place] for place in free], [params[place] for place in free], use_tqdm=False))
    beside = answers(llm.generate(PROMPTS, params, use_tqdm=False))
    assert [beside[place] for place in free] == alone


def test_a_step_with_masks_is_sampled_from_its_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows alone take a short cut without logits; a grammar must keep the step from it. And masks are filled between
    submit and sample, from the token before."""
    greedy: list[bool] = []
    masks: list[np.ndarray | None] = []
    is_greedy, sample = Runner._is_greedy, Runner.sample
    monkeypatch.setattr(Runner, "_is_greedy", lambda *given: greedy.append(is_greedy(*given)) or greedy[-1])
    executor: Any = llm.core.executor
    monkeypatch.setattr(executor, "sample", lambda given=None: masks.append(given) or sample(executor.runner, given))
    llm.generate(["Hi"], asks(temperature=0, choice=["abcd"]), use_tqdm=False)
    assert not any(greedy) and masks[0] is not None and masks[0].shape == (1, 9)
    greedy.clear()
    llm.generate(["Hi"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert all(greedy) and masks[-1] is None


def test_answers_do_not_depend_on_how_many_threads_follow_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [asks(seed, json=SCHEMA, disable_any_whitespace=True) if seed % 4 else SamplingParams(seed=seed, max_tokens=9)
              for seed in range(16)]
    prompts = ["Hello"] * 16
    expected = answers(llm.generate(prompts, params, use_tqdm=False))
    masks, done = Masks(llm.core.config.model.vocab_size, 3), {"said": 0, "rows": 0}

    class Counted:
        pool = LLExecutor(3)

        def consume_token_par(self, listed: list[Any]) -> list[bool]:
            done["said"] += len(listed)
            return self.pool.consume_token_par(listed)

        def unsafe_compute_mask_ptr(self, listed: list[Any], *given: int) -> None:
            done["rows"] += len(listed)
            self.pool.unsafe_compute_mask_ptr(listed, *given)

    monkeypatch.setattr(masks, "_pool", Counted())
    monkeypatch.setattr(llm.core.grammars, "_masks", masks)
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert done["said"] > 50 and done["rows"] > 50
    llm.core.grammars.masks.close()


@pytest.mark.parametrize("drafts", ["", "auto"])
def test_answers_are_the_same_where_masks_are_filled_while_results_are_taken_in(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, drafts: str
) -> None:
    """With a step in flight, as beside a GPU: answers end, and matchers are copied behind drafts after threads had them."""
    params = [asks(seed, json=SCHEMA, disable_any_whitespace=True) if seed % 4 else SamplingParams(seed=seed, max_tokens=9)
              for seed in range(16)]
    prompts = ["Hello"] * 16
    expected = answers(llm.generate(prompts, params, use_tqdm=False))
    overlapped = LLM(model, **OPTIONS | {"async_scheduling": True, "speculative_config": drafts or None})
    started: list[Callable[[], object]] = []
    start = FillThread.start
    monkeypatch.setattr(FillThread, "start", lambda self, call: (started.append(call), start(self, call))[1])
    monkeypatch.setattr("ridgeline.grammar.masks.num_threads", lambda: 3)
    monkeypatch.setattr("ridgeline.grammar.masks.STEP_SECONDS", float("inf"))          # a busy machine is not a slow grammar
    assert answers(overlapped.generate(prompts, params, use_tqdm=False)) == expected
    assert len(started) > (0 if drafts else 20)
    overlapped.close()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_bad_grammar_fails_the_call_before_the_engine_hears_of_it(llm: LLM) -> None:
    with pytest.raises(BadRequest, match=r"^structured_outputs\.regex cannot be used"):
        llm.generate(["Hi", "Ho"], [SamplingParams(), asks(regex="(a")], use_tqdm=False)
    assert not llm.core.has_work


@pytest.mark.reliability("B-19", "R-07")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("where", ["accept", "mask"])
def test_a_matcher_that_fails_ends_its_own_answer(llm: LLM, where: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or not even that, where a matcher with other limits does not fail again."""
    params = [asks(seed, json=SCHEMA, disable_any_whitespace=True) for seed in range(6)]
    expected = answers(llm.generate(["Hello"] * 6, params, use_tqdm=False))
    calls = {"accept": 0, "mask": 0}
    accept, held = Matcher.accept, Matcher.held

    def poisoned(self: Matcher, what: str) -> None:
        if self._matcher is poison:
            calls[what] += 1
            if what == where and calls[what] == 5:
                self._matcher.consume_token(258)         # no text at all: the library goes into its error state

    def spoiled_accept(self: Matcher, token: int) -> bool:
        poisoned(self, "accept")
        return accept(self, token)

    def spoiled_mask(self: Matcher, later: int = 0) -> list[tuple[int, int]]:
        poisoned(self, "mask")
        return held(self, later)

    made: list[Any] = []
    set_matchers = llm.core.scheduler.set_matchers

    def noticed(request: Request, matchers: Any) -> None:
        nonlocal poison
        made.append(matchers)
        if len(made) == 3:
            poison = matchers[0]._matcher
        set_matchers(request, matchers)

    poison: Any = None
    monkeypatch.setattr(Matcher, "accept", spoiled_accept)
    monkeypatch.setattr(Matcher, "held", spoiled_mask)
    grown = grammars.Grammars.grown

    def spoiled(self: grammars.Grammars, params: SamplingParams, tokens: list[int]) -> Matcher:
        made = grown(self, params, tokens)
        made._matcher.consume_token(258)
        return made

    monkeypatch.setattr(llm.core.scheduler, "set_matchers", noticed)
    if again:
        monkeypatch.setattr(grammars.Grammars, "grown", spoiled)
    outputs = llm.generate(["Hello"] * 6, params, use_tqdm=False)
    if not again:
        assert answers(outputs) == expected
        return
    failed = outputs[2].outputs[0]
    assert failed.finish_reason == "error" and str(failed.stop_reason).startswith("the grammar of structured_outputs failed")
    assert answers(outputs)[:2] + answers(outputs)[3:] == expected[:2] + expected[3:]
    assert not llm.core.has_work
    llm.core.scheduler.manager.pool.check()


@pytest.mark.reliability("S-09c")
def test_answers_of_a_heavy_grammar_leave_others_short_steps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them, whose masks take a tenth of a second each, beside two that go on as if they were alone. No step waits."""
    now, started = [1000.0], Matcher.__init__

    class Clock:
        thread_time = process_time = perf_counter = monotonic = staticmethod(lambda: now[0])

    class Heavy:
        def __init__(self, matcher: Any) -> None:
            self.matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

        def unsafe_compute_mask_ptr(self, *given: int) -> None:
            now[0] += 0.1 * (threading.current_thread() is threading.main_thread())
            self.matcher.unsafe_compute_mask_ptr(*given)

    def start(self: Matcher, compiled: Any, params: SamplingParams, *others: Any) -> None:
        started(self, compiled, params, *others)
        if params.structured_outputs == heavy.structured_outputs:
            self._matcher, self._guided = Heavy(self._matcher), False    # type: ignore[assignment]

    made = LLM(model, **OPTIONS | {"max_num_seqs": 80})
    heavy, light = asks(1, regex="heavy[a-z]{9}", n=64), asks(2, regex="[a-z]{60}")
    free = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    alone = answers(made.generate(["Hello"] * 2, [light, free], use_tqdm=False))
    monkeypatch.setattr("ridgeline.grammar.masks.time", Clock)
    monkeypatch.setattr(Matcher, "__init__", start)
    core, prompt, spent = made.core, made.get_tokenizer().encode("Hello"), list[float]()
    for name, params in (("light", light), ("free", free), ("heavy", heavy)):
        core.add(Request(name, prompt, params))
    tokens = dict[str, list[int]]()
    ended = list[str | None]()
    while core.has_work:
        began = now[0]
        for delta in core.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            ended += [delta.finish_reason] * (delta.request_id == "heavy" and delta.finish_reason is not None)
        spent.append(now[0] - began)
    assert [tokens["light"], tokens["free"]] == [each for each, _ in alone]
    assert ended == ["stop"] * 64 and core.slow.filled > 64 * 9
    assert max(spent) < 0.3 and sum(spent) < 1.0         # a few steps; 6.4 s a step without a limit
    core.scheduler.manager.pool.check()
    made.close()


def test_a_grammar_that_only_the_engine_refuses_fails_alone(llm: LLM) -> None:
    """The front end and the engine compile alike; should they ever differ, one request fails and says why."""
    core = llm.core
    core.add(Request("bad", [1, 2], asks(regex="(a")))
    core.add(Request("good", [1, 2], asks(regex="abc")))
    deltas = []
    while core.has_work:
        deltas += core.step()
    (bad,) = [delta for delta in deltas if delta.request_id == "bad"]
    assert bad.finish_reason == "error" and "regex cannot be used" in bad.error
    assert sum(len(delta.token_ids) for delta in deltas if delta.request_id == "good") == 3


def test_a_request_may_go_while_its_grammar_is_compiled(llm: LLM) -> None:
    core: EngineCore = llm.core
    core.add(Request("same", [1, 2], asks(regex="first[0-9]{400}")))
    assert core.abort("same") and not core.has_work
    core.add(Request("same", [1, 2], asks(regex="abc")))                 # not to be given the other's matcher
    tokens: list[int] = []
    while core.has_work:
        tokens += [token for delta in core.step() for token in delta.token_ids]
    assert llm.get_tokenizer().decode(tokens) == "abc"


@pytest.mark.reliability("S-09b")
def test_a_grammar_without_a_waiting_client_is_not_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core: EngineCore = llm.core
    compiled, may_go_on = list[str](), threading.Event()
    matchers = core.grammars._matchers

    def slowly(request: Request) -> Any:
        compiled.append(request.request_id)
        may_go_on.wait(60)
        return matchers(request)

    monkeypatch.setattr(core.grammars, "_matchers", slowly)
    for name in ("gone", "begun", "left", "stays"):
        core.add(Request(name, [1, 2], asks(regex=f"{name}[0-9]")))
    core.abort("gone")                                   # before there was a step: it came and left with one reading
    assert len(core.grammars._arrived) == 3
    assert not core.step()
    wait_until(lambda: compiled == ["begun"])
    core.abort("begun")
    core.abort("left")
    core.add(Request("left", [1, 2], asks(regex="another[0-9]")))        # not taken for the one that has left
    may_go_on.set()
    texts = dict[str, list[int]]()
    while core.has_work:
        for delta in core.step():
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert compiled == ["begun", "stays", "left"] and list(texts) == ["stays", "left"]
    assert llm.get_tokenizer().decode(texts["left"]).startswith("another")
    assert core.grammars.num_pending == 0 and not core.grammars._waiting


def test_an_answer_that_another_engine_began_goes_on_in_its_grammar(llm: LLM) -> None:
    core, tokenizer = llm.core, llm.get_tokenizer()
    params = asks(9, json=SCHEMA, disable_any_whitespace=True)
    prompt = tokenizer.encode("Hello")
    (whole,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens = whole.outputs[0].token_ids
    for known in (1, 7, len(tokens) - 1):
        core.add(Request("again", prompt, params, resumed={0: tokens[:known]}))
        more: list[int] = []
        while core.has_work:
            more += [token for delta in core.step() for token in delta.token_ids]
        assert tokens[:known] + more == tokens


def made_backends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each vocabulary that is prepared from now on."""
    made: list[str] = []
    make_backend = grammars.make_backend
    monkeypatch.setattr(grammars, "make_backend", lambda *given: made.append("once") or make_backend(*given))
    return made


class HandingLink:
    """A front end that sends the vocabulary when the engine has looked for it in vain, or at the end of its loading."""

    def __init__(self, sent: list[Any]) -> None:
        self.told: list[Any] = []
        self._sent = sent
        self._looked = 0

    def check(self) -> None:
        pass

    def send(self, message: Any) -> None:
        self.told.append(message)

    def receive(self, wait: bool, most_ms: int = 500) -> list[Any]:
        self._looked += 1
        return self._sent if wait and self._looked > 2 else []


@pytest.mark.parametrize("at_start", [True, False])
def test_an_engine_that_is_ready_has_prepared_the_vocabulary(
    model: Path, at_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps Python's lock for seconds: running requests would get no token while the first grammar waits."""
    made = made_backends(monkeypatch)
    tokenizer = Tokenizer.load(model)
    link = HandingLink([Vocabulary(tokenizer.token_pieces(), sorted(tokenizer.special_ids))])
    options = {"model": str(model), "grammars_at_start": at_start, **OPTIONS}
    core = load(options, link)                           # type: ignore[arg-type]
    assert [type(message) for message in link.told if not isinstance(message, Loading)] == [Ready]
    assert made == ["once"] * at_start
    core.add(Request("a", [5, 6, 7], asks(5, regex="[ab]{4}")))
    said: list[int] = []
    while core.has_work:
        said += [token for delta in core.step() for token in delta.token_ids]
    assert set(tokenizer.decode(said, skip_special_tokens=True)) <= set("ab") and len(said) > 1
    assert made == ["once"], "the first grammar prepares nothing again"
    core.close()


def test_an_engine_that_cannot_load_waits_for_no_vocabulary(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits for all threads before a process ends."""
    ended = threading.Event()
    of_process = grammars.Grammars._load

    def watched(self: grammars.Grammars) -> Any:
        try:
            return of_process(self)
        finally:
            ended.set()

    def fail(*_: Any) -> Any:
        raise ConfigError("no memory")

    monkeypatch.setattr(grammars.Grammars, "_load", watched)
    monkeypatch.setattr(core_module, "make_executor", fail)
    with pytest.raises(ConfigError, match="no memory"):
        load({"model": str(model), **OPTIONS}, HandingLink([]))              # type: ignore[arg-type]
    assert ended.wait(60)


def test_a_vocabulary_that_comes_twice_is_taken_once(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    vocabulary = Vocabulary(tokenizer.token_pieces(), sorted(tokenizer.special_ids))
    link = HandingLink([vocabulary, vocabulary])
    core = load({"model": str(model), **OPTIONS}, link)                      # type: ignore[arg-type]
    assert [type(message) for message in link.told if not isinstance(message, Loading)] == [Ready]
    core.close()


def test_an_engine_that_starts_with_other_sizes_prepares_the_vocabulary_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ended = made_backends(monkeypatch), threading.Semaphore(0)
    of_process, make_executor = grammars.Grammars._load, core_module.make_executor
    tries: list[str] = []

    def watched(self: grammars.Grammars) -> Any:
        try:
            return of_process(self)
        finally:
            ended.release()

    def fail_at_first(*given: Any) -> Any:
        tries.append("once")
        if len(tries) == 1:
            raise ConfigError("no memory")
        return make_executor(*given)

    monkeypatch.setattr(grammars.Grammars, "_load", watched)
    monkeypatch.setattr(core_module, "make_executor", fail_at_first)
    tokenizer = Tokenizer.load(model)
    link = HandingLink([Vocabulary(tokenizer.token_pieces(), sorted(tokenizer.special_ids))])
    core = load({"model": str(model), **OPTIONS}, link, {"num_gpu_blocks_override": 1600})       # type: ignore[arg-type]
    assert ended.acquire(timeout=60) and ended.acquire(timeout=60)           # the thread of the first try, too
    assert len(tries) == 2 and made == ["once"]
    core.close()


@pytest.mark.parametrize("at_start", [True, False])
def test_a_front_end_sends_the_vocabulary_to_each_engine(
    model: Path, at_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to one that replaces another."""
    sent: list[Any] = []
    greet = EngineChild.greet
    monkeypatch.setattr(EngineChild, "greet", lambda self, frame: (sent.append(TO_ENGINE.decode(frame)), greet(self, frame)))

    async def ask() -> None:
        async with AsyncLLM(model, supervision=Supervision(max_restarts=1), grammars_at_start=at_start, **OPTIONS) as made:
            for engines in (1, 2):
                texts = [output.outputs[0].text async for output in made.generate([5, 6, 7], asks(5, regex="[ab]{4}"))]
                assert set(texts[-1]) <= set("ab")
                if engines == 1:
                    assert made._engine.process is not None
                    os.kill(made._engine.process.pid, signal.SIGKILL)

    asyncio.run(ask())
    tokenizer = Tokenizer.load(model)
    assert {type(each) for each in sent} == ({Vocabulary} if at_start else set())
    assert all(each.pieces == tokenizer.token_pieces() and set(each.special_ids) == tokenizer.special_ids for each in sent)
    assert bool(sent) == at_start


def test_the_engine_keeps_so_many_bytes_of_grammars(model: Path) -> None:
    made = LLM(model, **OPTIONS)
    cache = made.core.grammars.cache
    cache.capacity = 300_000
    texts = [output.outputs[0].text for output in made.generate(
        ["Hi"] * 12, [asks(choice=[f"{'word' * 20}{n}"]) for n in range(12)], use_tqdm=False
    )]
    assert texts == [f"{'word' * 20}{n}" for n in range(12)]
    assert 0 < len(cache) < 12 and cache.num_bytes <= 300_000
    made.close()


def test_without_a_tokenizer_there_are_no_grammars(model: Path) -> None:
    made = LLM(model, skip_tokenizer_init=True, **OPTIONS)
    with pytest.raises(BadRequest, match="structured_outputs needs a tokenizer"):
        made.generate({"prompt_token_ids": [1]}, asks(regex="a"), use_tqdm=False)
    made.close()


# -- across processes --------------------------------------------------------------------------------------------------


def test_async_answers_are_the_same_and_bad_grammars_are_refused(model: Path, llm: LLM) -> None:
    params = [asks(seed, json=SCHEMA) for seed in range(4)]
    expected = answers(llm.generate(["Hello"] * 4, params, use_tqdm=False))

    async def run() -> list[tuple[list[int], str | None]]:
        async with AsyncLLM(model, **OPTIONS) as engine:
            async def one(each: SamplingParams) -> RequestOutput:
                async for output in engine.generate("Hello", each):
                    last = output
                return last

            with pytest.raises(RequestError, match="json cannot be used"):
                await one(asks(json={"type": "nonsense"}))
            outputs = await asyncio.gather(*map(one, params))
            assert all(is_valid(output.outputs[0].text, SCHEMA) for output in outputs)
            return answers(list(outputs))

    assert asyncio.run(run()) == expected


class ThreadedLLM(AsyncLLM):
    engine_module = "threaded_engine"


def test_async_answers_are_the_same_where_threads_fill_their_masks(
    model: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, and three threads in the engine's, whatever this machine has."""
    params = [asks(seed, json=SCHEMA, disable_any_whitespace=True) if seed % 4 else SamplingParams(seed=seed, max_tokens=9)
              for seed in range(9)]                       # six of one grammar: more than are filled without threads
    params.append(asks(20, json=SCHEMA, n=3))
    expected = answers(llm.generate(["Hello"] * 10, params, use_tqdm=False))
    monkeypatch.setenv(threaded_engine.VARIABLE, str(tmp_path / "pool"))

    async def run() -> list[RequestOutput]:
        async with ThreadedLLM(model, **OPTIONS) as engine:
            streams = await asyncio.gather(*(engine.stream(["Hello"], each) for each in params))
            return [(await stream.complete())[0] for stream in streams]

    outputs = asyncio.run(asyncio.wait_for(run(), 120))
    assert answers(outputs) == expected
    assert all(is_valid(answer.text, SCHEMA) for output in (outputs[1], outputs[-1]) for answer in output.outputs)
    threads, told, filled = map(int, (tmp_path / "pool").read_text().split())
    assert threads == 3 and told > 100 and filled > 100


@pytest.mark.slow
def test_ranks_agree_on_constrained_answers(model: Path, expected: list[tuple[list[int], str | None]]) -> None:
    made = LLM(model, **OPTIONS | {"tensor_parallel_size": 2, "max_num_seqs": 8, "max_model_len": 200})
    assert answers(made.generate(PROMPTS, mixed(), use_tqdm=False)) == expected
    made.close()


# -- a real vocabulary -------------------------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_answers_in_a_hundred_schemas(embedded_model: Path) -> None:
    made = LLM(embedded_model, max_model_len=1024, max_num_seqs=16)
    schemas = [*WRITTEN, *(drawn(seed) for seed in range(1000, 1080))]
    params = [asks(seed, json=schema, max_tokens=300) for seed, schema in enumerate(schemas)]
    outputs = made.generate(["Write JSON: "] * len(schemas), params, use_tqdm=False)
    ended = [(schema, output.outputs[0]) for schema, output in zip(schemas, outputs, strict=True)]
    assert all(is_valid(answer.text, schema) for schema, answer in ended if answer.finish_reason == "stop")
    assert sum(answer.finish_reason == "stop" for _, answer in ended) >= 0.95 * len(ended)
    masks = made.core.grammars.masks
    print(f"{masks.filled} masks, {1e6 * masks.seconds / masks.filled:.0f} µs each")


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_answers_in_its_schema(embedded_model: Path) -> None:
    made = LLM(embedded_model, max_model_len=256, num_gpu_blocks_override=64)
    outputs = made.generate(["A person: "] * 2, [asks(temperature=0, json=SCHEMA), asks(choice=["red", "blue"])], use_tqdm=False)
    assert is_valid(outputs[0].outputs[0].text, SCHEMA) and outputs[1].outputs[0].text in ("red", "blue")
    made.close()

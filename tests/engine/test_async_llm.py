"""AsyncLLM: the engine in its own process, seen from the front end. Every test runs on a real engine process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from served_model import CONTEXT, one_thread, wait_until, write_model

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.cache.block_pool import BlockPool
from ridgeline.cache.manager import CacheCounters
from ridgeline.engine import ipc
from ridgeline.engine.client import async_llm, prompt_limits
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.supervisor import Supervisor
from ridgeline.engine.core import loop
from ridgeline.errors import BadRequest, ConfigError, EngineDead, ModelError
from ridgeline.known_options.python_names import ASYNC_METHODS
from ridgeline.messages import Request
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.steps import StepRecorder
from ridgeline.sampling_params import RequestOutputKind, StructuredOutputs
from ridgeline.scheduler.drafting import NoDrafter
from ridgeline.scheduler.scheduler import SchedulerCounters

OPTIONS: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 600, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True)

def doubling(times: int) -> str:
    """A grammar of 2^times letters: it compiles, and has too many items once an answer has begun."""
    return "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(times)), f'a{times}: "a"'])


Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def llm(model: Path, runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        made = AsyncLLM(model, **OPTIONS)
        loading: list[tuple[int, int]] = []
        runner.run(made.start(lambda done, total: loading.append((done, total))))
    assert loading and loading[-1][0] == loading[-1][1]
    yield made
    runner.run(made.shutdown())


@pytest.fixture
def run(llm: AsyncLLM, runner: asyncio.Runner) -> Iterator[Run]:
    """Runs a coroutine; afterwards nothing may be left in the engine."""
    yield lambda work: runner.run(asyncio.wait_for(work, 200))
    runner.run(all_free(llm))


async def all_free(llm: AsyncLLM) -> None:
    assert llm.ready is not None
    async with asyncio.timeout(60):
        while llm.num_open or llm.running or llm.free_blocks != llm.ready.num_blocks:
            await asyncio.sleep(0.01)


async def final(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> Any:
    return [output async for output in llm.generate(prompt, params)][-1]


@pytest.mark.reliability("P-05")
def test_answers_equal_those_of_the_offline_class(llm: AsyncLLM, run: Run, model: Path) -> None:
    prompts = ["abc", "a longer prompt, with more in it", [1, 2, 3]]
    offline = LLM(model, **OPTIONS).generate(prompts, GREEDY, use_tqdm=False)

    async def together() -> list[Any]:
        return await asyncio.gather(*(final(llm, prompt) for prompt in prompts))

    for mine, theirs in zip(run(together()), offline, strict=True):
        assert mine.outputs == theirs.outputs and mine.prompt_token_ids == theirs.prompt_token_ids
        assert mine.finished and len(mine.outputs[0].token_ids) == 20


def test_outputs_grow_and_do_not_change_later(llm: AsyncLLM, run: Run) -> None:
    """A reader that is late gets many tokens at once, so the answer is long and ended after some outputs."""

    async def collect() -> list[Any]:
        outputs = []
        async for output in llm.generate("abc", ENDLESS, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 5:
                await llm.abort("mine")
        return outputs

    outputs = run(collect())
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths[:5] == sorted(set(lengths[:5])) and lengths == sorted(lengths) and len(lengths) > 5
    assert all(later.outputs[0].text.startswith(now.outputs[0].text) for now, later in itertools.pairwise(outputs))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_reset_prefix_cache(llm: AsyncLLM, run: Run) -> None:
    prompt = list(range(100, 140))

    async def cached() -> int:
        return int((await final(llm, prompt)).num_cached_tokens)

    async def twice() -> list[int]:
        return [await cached(), await cached()]

    async def while_running() -> bool:
        answers = llm.generate(prompt, ENDLESS)
        await anext(answers)
        done = await llm.reset_prefix_cache()
        await answers.aclose()
        return done

    assert run(twice()) == [0, 32]
    assert not run(while_running())
    run(all_free(llm))
    assert run(llm.reset_prefix_cache())
    assert run(twice()) == [0, 32]


def test_without_params_the_models_own_defaults_count(
    model: Path, runner: asyncio.Runner, llm: AsyncLLM, tmp_path: Path
) -> None:
    assert llm.get_default_sampling_params() == SamplingParams() and not llm.sampling_defaults
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 1, "max_new_tokens": 3}))

    async def answers() -> list[int]:
        async with AsyncLLM(copy, **OPTIONS) as own:
            assert own.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=1, max_tokens=3)
            outputs = [[output async for output in own.generate("abc", params)][-1] for params in (None, GREEDY)]
            return [len(output.outputs[0].token_ids) for output in outputs]

    assert runner.run(asyncio.wait_for(answers(), 200)) == [3, 20]


def test_several_prompts_and_answers_in_one_stream(llm: AsyncLLM, run: Run) -> None:
    async def read() -> tuple[Any, dict[tuple[int, int], str]]:
        texts: dict[tuple[int, int], str] = {}
        stream = await llm.stream(["abc", "xyz"], SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True))
        async for batch in stream:
            for place, delta in batch:
                texts[place, delta.index] = texts.get((place, delta.index), "") + delta.text
        return stream.outputs, texts

    outputs, texts = run(read())
    assert len(texts) == 4
    for (place, index), text in texts.items():
        assert outputs[place].outputs[index].text == text


def test_a_stop_string_found_here_ends_the_answer_there(llm: AsyncLLM, run: Run) -> None:
    whole = run(final(llm, "abc")).outputs[0].text
    stop = whole[4:7]
    answer = run(final(llm, "abc", SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True, stop=[stop]))).outputs[0]
    assert answer.text == whole[: whole.index(stop)] and answer.finish_reason == "stop" and answer.stop_reason == stop


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_early_frees_everything(llm: AsyncLLM, run: Run, how: str, n: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True, n=n)

    async def leave() -> None:
        if how == "close":
            async for _ in llm.generate("abc", params):
                break
        elif how == "cancel":
            task = asyncio.ensure_future(final(llm, "abc", params))
            while not llm.running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            outputs = []
            async for output in llm.generate("abc", params, request_id="mine"):
                outputs.append(output)
                await llm.abort("mine")
            assert outputs[-1].finished and [answer.finish_reason for answer in outputs[-1].outputs] == ["abort"] * n

    run(leave())                                         # and its fixture waits until everything is free


def test_aborting_what_is_not_there_is_no_error(llm: AsyncLLM, run: Run) -> None:
    async def abort_others() -> None:
        await llm.abort("unknown")
        stream = await llm.stream(["abc"], GREEDY, request_id="mine")
        for wire_id in list(llm._open.by_wire_id):
            await llm.abort(wire_id)                     # a name inside, which no caller knows it by
        assert (await stream.complete())[0].outputs[0].finish_reason == "length"

    run(abort_others())


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_aborting_one_prompt_of_several_leaves_the_others(llm: AsyncLLM, run: Run, aborted: int) -> None:
    prompts = ["abc", "xyz", "a third"]
    alone = [run(final(llm, prompt)).outputs[0] for prompt in prompts]

    async def read() -> tuple[list[Any], list[Any]]:
        stream = await llm.stream(prompts, GREEDY, request_id="mine")
        texts, deltas = [""] * 3, []
        await llm.abort("mine" if not aborted else f"mine-{aborted}")
        async for batch in stream:
            for place, delta in batch:
                texts[place] += delta.text
                deltas.append((place, delta.finish_reason))
        assert [output.outputs[0].text for output in stream.outputs] == texts
        return stream.outputs, deltas

    outputs, deltas = run(read())
    assert all(output.finished for output in outputs) and deltas.count((aborted, "abort")) == 1
    for place, output in enumerate(outputs):
        if place == aborted:
            assert output.outputs[0].finish_reason == "abort"
        else:
            assert output.outputs[0] == alone[place]


def test_parameters_that_were_changed_are_checked_again(llm: AsyncLLM, run: Run) -> None:
    """The engine's process takes them as checked."""
    changed = SamplingParams(max_tokens=2)
    changed.top_p = 2.0
    for asking in (final(llm, "abc", changed), llm.stream(["abc"], changed)):
        with pytest.raises(BadRequest, match=r"^top_p "):
            run(asking)


def test_what_a_user_of_vllm_types_is_told_what_to_use(llm: AsyncLLM, run: Run) -> None:
    with pytest.raises(BadRequest, match=r"^sampling_params must be SamplingParams, got "):
        run(final(llm, "abc", {"temperature": 0}))       # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"^AsyncLLM has no check_health: require_alive\(\)"):
        llm.check_health()
    with pytest.raises(AttributeError, match=r"^AsyncLLM has no frobnicate$"):
        llm.frobnicate()
    assert not set(ASYNC_METHODS) & set(dir(llm))
    assert {"LLM", "AsyncLLM", "SamplingParams"} <= set(dir(ridgeline)) and "Any" not in dir(ridgeline)


def test_a_stream_of_no_prompts_ends_at_once(llm: AsyncLLM, run: Run) -> None:
    async def read() -> tuple[list[Any], list[Any]]:
        stream = await llm.stream([], GREEDY)
        return [batch async for batch in stream], await stream.complete()

    assert run(read()) == ([], [])


def test_outputs_of_the_kind_that_was_asked_for(llm: AsyncLLM, run: Run) -> None:
    async def collect(kind: RequestOutputKind) -> list[Any]:
        params = SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True, logprobs=0, output_kind=kind)
        return [output async for output in llm.generate("abc", params)]

    whole = run(collect(RequestOutputKind.CUMULATIVE))[-1]
    only = run(collect(RequestOutputKind.FINAL_ONLY))
    assert len(only) == 1 and only[0].outputs == whole.outputs and only[0].finished
    news: list[Any] = []
    while len(news) < 2:                                 # beside other work a late reader gets all at once
        news = run(collect(RequestOutputKind.DELTA))
    assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]
    for index, answer in enumerate(whole.outputs):
        parts = [each for output in news for each in output.outputs if each.index == index]
        assert "".join(part.text for part in parts) == answer.text
        for name in ("token_ids", "logprobs", "text_offsets"):
            assert [value for part in parts for value in getattr(part, name)] == getattr(answer, name)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert parts[-1].cumulative_logprob == answer.cumulative_logprob


@pytest.mark.reliability("B-19")
@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 2, 9999], "token id 9999"),
        ([-1], "got -1"),
        ([10**23], "prompt_token_ids"),
        ([1] * CONTEXT, "max_model_len"),
        ([1, "a"], "integers"),
        (["a", "b"], "one text, got a list of texts"),
        ([{"role": "user", "content": "a"}], "got a conversation; LLM.chat and AsyncLLM.chat_tokens"),
    ],
    ids=["no text", "no tokens", "high id", "low id", "beyond 64 bits", "too long", "not integers", "texts", "messages"],
)
def test_a_bad_request_fails_alone(llm: AsyncLLM, run: Run, prompt: Any, says: str) -> None:
    async def beside_a_good_one() -> Any:
        good = asyncio.ensure_future(final(llm, "abc"))
        with pytest.raises(BadRequest, match=says):
            await final(llm, prompt)
        return await good

    assert len(run(beside_a_good_one()).outputs[0].token_ids) == 20


@pytest.mark.reliability("R-07")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"allowed_token_ids": [1, 2, 3], "structured_outputs": StructuredOutputs(regex="a+")}, "leaves no token to choose"),
        ({"allowed_token_ids": [65], "bad_words": ["b"], "logit_bias": {65: 1.0}}, "leaves no token to choose"),
        ({"structured_outputs": StructuredOutputs(grammar=doubling(28))}, "the grammar of structured_outputs failed"),
    ],
    ids=["ids and a grammar", "ids and bad words", "a grammar that grows"],
)
def test_constraints_that_cannot_be_kept_are_the_clients_mistake(
    llm: AsyncLLM, run: Run, settings: dict[str, Any], words: str
) -> None:
    async def scene() -> None:
        stream = await llm.stream(["a"], SamplingParams(max_tokens=8, **settings))
        await stream.complete()

    with pytest.raises(BadRequest, match=words):
        run(scene())


def test_a_request_id_is_used_once_at_a_time(llm: AsyncLLM, run: Run) -> None:
    async def twice() -> None:
        stream = await llm.stream(["abc"], ENDLESS, request_id="mine")
        with pytest.raises(BadRequest, match="'mine' is already running"):
            await llm.stream(["abc"], GREEDY, request_id="mine")
        stream.close()
        again = await llm.stream(["abc"], GREEDY, request_id="mine")     # at once, while the old one's news may come
        assert len((await again.complete())[0].outputs[0].token_ids) == 20

    run(twice())


@pytest.mark.parametrize(
    ("first", "second"),
    [(("mine", 2), ("mine-1", 1)), (("mine-1", 1), ("mine", 2))],
    ids=["derived first", "derived second"],
)
def test_derived_request_ids_are_used_once_too(
    llm: AsyncLLM, run: Run, first: tuple[str, int], second: tuple[str, int]
) -> None:
    async def both() -> None:
        stream = await llm.stream(["abc"] * first[1], GREEDY, request_id=first[0])
        before = llm.num_open
        with pytest.raises(BadRequest, match="'mine-1' is already running"):
            await llm.stream(["abc"] * second[1], GREEDY, request_id=second[0])
        assert llm.num_open == before
        await stream.complete()

    run(both())


def test_of_two_long_prompts_with_one_id_only_one_runs(llm: AsyncLLM, run: Run) -> None:
    """Both are tokenised in a thread at the same time, so both pass any check that comes before it."""

    async def both() -> list[Any]:
        calls = [llm.stream(["long " * 600], GREEDY, request_id="mine") for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    streams = run(both())
    assert sorted(type(each).__name__ for each in streams) == ["AnswerStream", "BadRequest"]
    kept = next(each for each in streams if not isinstance(each, BadRequest))
    assert len(run(kept.complete())[0].outputs[0].token_ids) == 20


def test_an_id_of_the_callers_is_not_mistaken_for_one_of_ours(llm: AsyncLLM, run: Run) -> None:
    async def clash() -> None:
        ours = await llm.stream(["abc"], ENDLESS)
        name = ours.outputs[0].request_id
        theirs = await llm.stream(["abc"], ENDLESS, request_id=name)
        await llm.abort(name)
        assert (await theirs.complete())[0].outputs[0].finish_reason == "abort"
        await llm.abort(name)
        assert (await ours.complete())[0].outputs[0].finish_reason == "abort"

    run(clash())


def test_what_cannot_be_sent_leaves_nothing_behind(llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=5)
    params.stop_token_ids = [10**23]

    async def refused() -> None:
        with monkeypatch.context() as patch, pytest.raises(BadRequest, match="cannot be sent to the engine"):
            patch.setattr(SamplingParams, "clone", lambda self: self)        # past the checks
            await llm.stream(["abc", "xyz"], params)
        assert llm.num_open == 0
        assert llm._engine.process is not None
        sent: list[bytes] = []

        def send(frame: bytes) -> None:
            sent.append(frame)
            if len(sent) == 2:
                raise MemoryError                        # in the middle of a stream

        with monkeypatch.context() as patch:
            patch.setattr(llm._engine.process, "send", send)
            with pytest.raises(MemoryError):
                await llm.stream(["abc", "xyz"], GREEDY, request_id="mine")
        assert llm.num_open == 0 and not llm._open.wire_ids
        assert {type(ipc.TO_ENGINE.decode(frame)) for frame in sent[2:]} == {ipc.Abort}

    run(refused())


def test_garbage_on_the_wire_is_dropped(llm: AsyncLLM, run: Run) -> None:
    assert llm._engine.process is not None
    for frame in (b"", b"garbage", b"\xdd\xff\xff\xff\xff", os.urandom(100)):
        llm._engine.process._to_engine.send(frame)
    assert len(run(final(llm, "abc")).outputs[0].token_ids) == 20


def test_long_texts_are_tokenised_away_from_the_event_loop(
    llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Any] = []
    tokenizer = llm.get_tokenizer()
    encode = tokenizer.encode

    def watched(text: str, *args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text, *args)

    async def answer(prompt: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "encode", watched)
            await final(llm, prompt)
        threads.append(threading.current_thread())

    run(answer("short"))
    assert threads[0] is threads[1]
    threads.clear()
    run(answer("long " * 600))
    assert threads[0] is not threads[1]


@pytest.mark.parametrize(
    ("prompts", "params", "is_long"),
    [
        (["short"], {"n": 8, "stop": ["a"] * 8}, False),
        (["x" * 2000], {}, True),
        ([{"prompt": "x" * 2000}], {}, True),
        ([[1] * 2000], {}, True),
        ([{"prompt_token_ids": [1] * 2000}], {}, True),
        (["a"], {"stop": ["x" * 1000] * 2}, True),
        (["a"], {"bad_words": ["x" * 200] * 10}, True),
        (["a"] * 10, {"stop": ["x" * 200]}, True),
        (["a"] * 4, {"n": 128, "stop": ["x"] * 32}, True),
        (["a"] * 100, {"n": 20}, True),
    ],
)
def test_what_counts_as_work_for_a_thread(prompts: list[Any], params: dict[str, Any], is_long: bool) -> None:
    assert (prompt_limits.amount_of_work(prompts, SamplingParams(**params)) >= prompt_limits.LONG_WORK) is is_long


@pytest.mark.reliability("B-03")
@pytest.mark.parametrize(("tokens", "params", "refused"), [
    (7500, {"prompt_logprobs": 20}, ""),
    (7500, {"prompt_logprobs": 20, "n": 128, "max_tokens": 1}, "prompt_logprobs"),       # every answer repeats them
    (10, {"logprobs": 20, "max_tokens": None}, ""),                                      # one answer of any length
    (10, {"logprobs": 20, "n": 128, "max_tokens": None}, "logprobs"),
    (10, {"logprobs": 20, "n": 128, "max_tokens": 1000}, ""),
    (10, {"n": 128}, ""),
    ([4000] * 24, {"prompt_logprobs": 20}, ""),
    ([4000] * 256, {"prompt_logprobs": 1}, ""),                                          # evaluations
    ([4000] * 256, {"prompt_logprobs": 20}, "prompt_logprobs"),
    ([10] * 256, {"logprobs": 20, "max_tokens": 1000}, "logprobs"),
    (10, {"logprobs": 1, "n": 128, "max_tokens": 1000, "logprob_token_ids": [*range(128)]}, "logprobs"),      # listed ones
])
def test_log_probabilities_of_one_request_are_limited(tokens: int | list[int], params: dict[str, Any], refused: str) -> None:
    limits, prompts = prompt_limits.PromptLimits(8192, 12), [tokens] if isinstance(tokens, int) else tokens
    if not refused:
        limits.check_logprobs(prompts, SamplingParams(**params))
        return
    with pytest.raises(BadRequest, match="at most 3,000,000 can be; send fewer prompts, or ask for fewer answers") as error:
        limits.check_logprobs(prompts, SamplingParams(**params))
    assert error.value.field == refused


@pytest.mark.reliability("B-02")
def test_text_that_cannot_fit_is_not_tokenised(llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.get_tokenizer()
    assert llm.ready is not None
    most = llm.ready.max_model_len * len("<|im_start|>")         # the longest token of this vocabulary
    inside, over = "<|im_start|>" * (llm.ready.max_model_len - 1), "é" * (most // 2 + 1)

    async def ask(prompt: Any, **more: Any) -> Any:
        return await (await llm.stream([prompt], SamplingParams(max_tokens=1, **more))).complete()

    assert len(run(ask(inside))[0].prompt_token_ids) == llm.ready.max_model_len - 1
    assert len(run(ask(over, truncate_prompt_tokens=3))[0].prompt_token_ids) == 3
    monkeypatch.setattr(tokenizer, "encode", None)
    for prompt in (over, {"prompt": over}, "x" * (most + 1)):
        with pytest.raises(BadRequest, match=f"more than {most} bytes of text, which cannot fit; this model"):
            run(ask(prompt))
    with pytest.raises(BadRequest, match=f"more than {most} bytes of text"):
        run(llm.chat_tokens([{"role": "user", "content": over}]))


def test_nobody_is_told_it_is_ready_before_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says Ready while the tokenizer still loads. It does not wait for the vocabulary here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine_spoke, go_on = threading.Event(), threading.Event()
    load = async_llm.Processor.load

    def slow_load(*args: Any) -> Any:
        assert go_on.wait(60)
        return load(*args)

    monkeypatch.setattr(async_llm.Processor, "load", slow_load)
    take = Supervisor._take

    def watched_take(self: Supervisor, message: Any) -> Any:
        work = take(self, message)
        if isinstance(message, ipc.Ready):
            engine_spoke.set()
        return work

    monkeypatch.setattr(Supervisor, "_take", watched_take)

    async def scene() -> None:
        llm = AsyncLLM(model, grammars_at_start=False, **OPTIONS)
        starting = asyncio.ensure_future(llm.start())
        assert await asyncio.to_thread(engine_spoke.wait, 60)
        assert not llm.is_alive and llm.ready is None and not starting.done()
        go_on.set()
        await starting
        assert llm.is_alive and llm.ready is not None and llm.free_blocks == llm.ready.num_blocks
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(scene(), 200))


def test_the_tokenizer_is_loaded_once_and_without_an_engine(model: Path) -> None:
    async def scene() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        await llm.load_tokenizer()
        tokenizer = llm.get_tokenizer()
        assert llm._engine.process is None and not llm.is_alive
        await llm.load_tokenizer()
        assert llm.get_tokenizer() is tokenizer

    asyncio.run(scene())


def test_callers_that_load_the_tokenizer_together_load_it_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is sent one vocabulary."""
    greeted: list[bytes] = []
    monkeypatch.setattr(Supervisor, "greet", lambda self, frame: greeted.append(frame))

    async def scene() -> None:
        llm = AsyncLLM(model, grammars_at_start=True, **OPTIONS)
        await asyncio.gather(*(llm.load_tokenizer() for _ in range(3)))

    asyncio.run(scene())
    assert len(greeted) == 1


@pytest.mark.reliability("B-18")
def test_the_engine_dies_and_every_request_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def scene() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        await llm.start()
        assert llm._engine.process is not None
        folder = llm._engine.process._sockets.path
        streams = [await llm.stream(["abc"], ENDLESS) for _ in range(3)]
        await streams[0].__anext__()
        os.kill(llm._engine.process.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match="was killed by SIGKILL"):
                await stream.complete()
        assert not llm.is_alive and llm.num_open == 0
        with pytest.raises(EngineDead, match="SIGKILL"):
            await llm.stream(["abc"], GREEDY)
        await llm.shutdown()
        await llm.shutdown()
        assert not folder.exists()

    asyncio.run(asyncio.wait_for(scene(), 200))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_model_len": CONTEXT + 1}, ConfigError, "max_model_len"),          # found by the engine's process
        ({"load_format": "auto"}, (ConfigError, ModelError), "safetensors"),
        ({"tokenizer": "/nowhere"}, ModelError, "/nowhere"),                     # found here
    ],
    ids=["option", "weights", "tokenizer"],
)
def test_what_cannot_start_says_why_and_leaves_nothing(
    model: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    before = engine_processes()

    async def scene() -> None:
        llm = AsyncLLM(model, **OPTIONS | options)
        with pytest.raises(error, match=says) as caught:
            await llm.start()
        assert "\n" not in str(caught.value)

    asyncio.run(asyncio.wait_for(scene(), 200))
    assert engine_processes() == before


def engine_processes() -> set[int]:
    return {child.pid for child in psutil.Process().children() if "ridgeline.engine.core.engine_process" in child.cmdline()}


def test_a_missing_model_is_told_before_a_process_starts() -> None:
    with pytest.raises(ModelError, match="/nowhere"):
        asyncio.run(AsyncLLM("/nowhere").start())


# -- the engine's side, without an engine ------------------------------------------------------------------------------


class FakeLink:
    """The front end as the engine's loop sees it: a script of messages, and what was said back."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.sent: list[Any] = []

    def check(self) -> None:
        pass

    def receive(self, wait: bool, most_ms: int = 500) -> list[Any]:
        return [self.script.pop(0)] if self.script else []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class FaultyCore:
    """Fails where it is told to."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.has_work = self.closed = False
        manager = SimpleNamespace(num_free=5, counters=CacheCounters(), pool=BlockPool(6, lambda block: None))
        counts = {"num_running": 0, "num_arrived": 0, "num_waiting": 0}
        self.scheduler = SimpleNamespace(**counts, counters=SchedulerCounters(), manager=manager, drafter=NoDrafter())
        self.config = SimpleNamespace(device="cpu", narrower=())
        self.executor, self.slow = SimpleNamespace(), SimpleNamespace(filled=0)
        self.recorder = StepRecorder(DecoderShape(8, 8, 1, 1, 8, 1, 8), "float32")

    def add(self, request: Request) -> None:
        if self.fault == "add":
            raise ZeroDivisionError("in add")
        if self.fault == "refuse":
            raise BadRequest("not this one")
        self.has_work = True

    def abort(self, request_id: str, index: int | None) -> bool:
        return False

    def prepare(self) -> bool:
        return False

    def step(self) -> list[Any]:
        if self.fault == "dead":
            raise EngineDead("rank 1 ended with code 1")
        raise RuntimeError("in\nstep")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("fault", "code", "sent"),
    [
        ("step", 1, [ipc.Failed("RuntimeError: in step")]),
        ("dead", 1, [ipc.Failed("rank 1 ended with code 1")]),
        ("add", 0, [ipc.Refused("1", "the engine could not take this request")]),
        ("refuse", 0, [ipc.Refused("1", "not this one")]),
    ],
)
def test_faults_inside_the_engines_process(
    fault: str, code: int, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FaultyCore(fault)
    link = FakeLink(ipc.Abort("unknown"), ipc.Add(Request("1", [1], GREEDY)), ipc.Shutdown())
    monkeypatch.setattr(loop, "load", lambda options, link, sizes: core)
    assert loop.run({}, link) == code                    # type: ignore[arg-type]
    assert [each for each in link.sent if not isinstance(each, ipc.Stats)] == sent and core.closed


SCRIPT = """
import asyncio, json, sys
from ridgeline.engine.client.async_llm import AsyncLLM

async def main():
    llm = AsyncLLM(sys.argv[1], **json.loads(sys.argv[2]))
    await llm.start()
    assert "torch" not in sys.modules
    print(llm._engine.process.pid, llm._engine.process._sockets.path, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_engine_goes_when_its_front_end_is_killed(model: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(OPTIONS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread()) as front:
        assert front.stdout is not None
        pid, folder = front.stdout.readline().split()
        assert psutil.pid_exists(int(pid)) and Path(folder).exists()
        front.kill()
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)


def test_the_front_end_imports_neither_torch_nor_pydantic() -> None:
    modules = "ridgeline.server.app, ridgeline.cli.cmd_serve, ridgeline.cli.chat.cmd_chat, ridgeline.__main__"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""LLM as its users write it: names, shapes and fields of vLLM's offline API, and what it survives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_model import TEMPLATE, write_model

from ridgeline import LLM, CompletionOutput, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from ridgeline.engine.core.core import EngineCore
from ridgeline.errors import BadRequest, EngineDead, ModelError, RidgelineError, Unsupported
from ridgeline.messages import Request, TokenDelta, TokenDeltas
from ridgeline.sampling_params import MAX_TOKEN_ID, RequestOutputKind

OPTIONS: dict[str, Any] = {"load_format": "dummy", "max_model_len": 256, "num_gpu_blocks_override": 200, "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, **OPTIONS)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Every test leaves Ctrl-C as it found it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def ids(output: RequestOutput) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


# -- documented use ----------------------------------------------------------------------------------------------------


def test_text_and_token_prompts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    out = llm.generate(["Hello", {"prompt_token_ids": [1, 2, 3]}], GREEDY)
    assert [output.prompt for output in out] == ["Hello", None] and all(output.finished for output in out)
    assert [output.prompt_token_ids for output in out] == [tokenizer.encode("Hello"), [1, 2, 3]]
    answer = out[0].outputs[0]
    assert isinstance(answer, CompletionOutput) and isinstance(out[0], RequestOutput)
    assert (answer.index, len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (0, 8, "length", None)
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert answer.logprobs is None and answer.cumulative_logprob is None and out[0].prompt_logprobs is None
    assert (out[0].metrics, out[0].lora_request, answer.lora_request) == (None, None, None)


def test_every_way_to_write_the_same_prompt(llm: LLM) -> None:
    text, tokens = "Hi", llm.get_tokenizer().encode("Hi")
    ways: list[Any] = [
        text, [text], {"prompt": text}, TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=tokens), [tokens], tokens,
        np.array(tokens), np.array([tokens]), {"prompt": text, "prompt_token_ids": tokens, "multi_modal_data": None},
        tuple(tokens), (each for each in [text]),
    ]
    answers = [ids(*llm.generate(way, GREEDY)) for way in ways]
    assert all(answer == answers[0] for answer in answers)


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 5)]
    assert [len(ids(output)[0]) for output in llm.generate(["a", "b"], params)] == [2, 5]


def test_the_longest_answers_begin_first_and_come_back_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    step = llm.core.step

    def noted() -> Any:
        deltas = step()
        begun.extend(delta.request_id for delta in deltas if delta.request_id not in begun)
        return deltas

    monkeypatch.setattr(llm.core, "step", noted)
    monkeypatch.setattr(llm.core.scheduler, "limits", replace(llm.core.scheduler.limits, max_step_tokens=4))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 8, 3, 5)]
    outputs = llm.generate([[1, 2, 3], [3, 4, 5], [5, 6, 7], [7, 8, 9]], params, use_tqdm=False)
    assert [begun.index(output.request_id) for output in outputs] == [2, 0, 3, 1]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 8, 3, 5]
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], [3, 4, 5], [5, 6, 7], [7, 8, 9]]


def test_what_is_drawn_does_not_hang_on_the_length_of_others(model: Path) -> None:
    drawn = []
    for longest in (4, 9):
        alone = LLM(model, seed=0, **OPTIONS)
        params = [SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True) for count in (6, longest)]
        drawn.append(alone.generate([[1, 2], [3, 4]], params, use_tqdm=False)[0].outputs[0].token_ids)
        alone.close()
    assert drawn[0] == drawn[1]


def test_n_answers_and_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    first, again = llm.generate("Hello", params)[0], llm.generate(["Hello"], params)[0]
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert ids(first) == ids(again) and len({tuple(answer) for answer in ids(first)}) == 3
    other = llm.generate("Hello", SamplingParams(n=3, seed=8, max_tokens=8, ignore_eos=True))[0]
    assert ids(other) != ids(first)


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    whole = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].outputs[0]
    place = next(place for place in range(5, len(whole.text)) if whole.text[place].isascii())
    stop = whole.text[place : place + 2]
    cut = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop))[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    token = whole.token_ids[5]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[token])
    cut = llm.generate("Hello", params)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", token)
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    output = llm.generate([[5, 6, 7]], params)[0]
    answer = output.outputs[0]
    assert isinstance(answer.logprobs, list) and len(answer.logprobs) == 4 and isinstance(output.prompt_logprobs, list)
    assert json.loads(json.dumps(asdict(answer)))["logprobs"][0][str(answer.token_ids[0])]["rank"] == 1
    for token, at in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(at) == 3 and at[token].rank == 1 and at[token].logprob == max(each.logprob for each in at.values())
        assert at[token].decoded_token == llm.get_tokenizer().token_text(token)
    assert answer.cumulative_logprob == pytest.approx(
        sum(at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [token in at for token, at in zip([6, 7], output.prompt_logprobs[1:], strict=True) if at] == [True, True]


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    for asked, expected in ((1, [None]), (None, None)):
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=asked)
        assert llm.generate([[5]], params)[0].prompt_logprobs == expected


def test_cached_tokens_are_the_first_answers(llm: LLM) -> None:
    """The other answers always find the prompt in the cache; that says nothing about the request."""
    prompt = list(range(90, 130))
    params = SamplingParams(n=4, seed=1, max_tokens=3)
    assert llm.generate([prompt], params)[0].num_cached_tokens == 0
    assert llm.generate([prompt], params)[0].num_cached_tokens >= 36


def test_truncated_prompts_keep_their_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=3)
    long, short = llm.generate([list(range(40)), [38]], params)
    assert long.prompt_token_ids == [37, 38, 39] and short.prompt_token_ids == [38]
    assert ids(long) == ids(*llm.generate([[37, 38, 39]], SamplingParams(temperature=0, max_tokens=4)))


def test_output_kind_does_not_change_whole_answers(llm: LLM) -> None:
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=kind)
        assert ids(*llm.generate("Hello", params)) == ids(*llm.generate("Hello", GREEDY))


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, GREEDY)[0]
    expected = llm.get_tokenizer().encode("<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n")
    assert output.prompt_token_ids == expected
    assert ids(output) == ids(*llm.generate([expected], GREEDY))
    several = llm.chat([messages, messages], GREEDY, False)
    assert [each.prompt_token_ids for each in several] == [expected, expected]
    template = TEMPLATE.replace("user", "you").replace("{{ m.content }}", "{{ m.content | upper }}")
    own = llm.chat(messages, GREEDY, False, chat_template=template)[0]
    assert "HI<|im_end|><|im_start|>assistant" in llm.get_tokenizer().decode(own.prompt_token_ids)
    goes_on = llm.chat([*messages, {"role": "assistant", "content": "Well"}], GREEDY, continue_final_message=True)[0]
    assert llm.get_tokenizer().decode(goes_on.prompt_token_ids).endswith("assistant\nWell")


def test_a_config_alone_is_enough_for_dummy_weights(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, **OPTIONS)
    output = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].text == ""
    for ask in (llm.get_tokenizer, lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(BadRequest, match="skip_tokenizer_init"):
            ask()  # type: ignore[operator]


def test_max_model_len(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = llm.generate([[1] * 250], params)[0].outputs[0]
    assert output.finish_reason == "length" and 250 + len(output.token_ids) == 256
    with pytest.raises(BadRequest, match="max_model_len"):
        llm.generate([[1] * 256])


def test_two_ranks_answer_like_one(model: Path, llm: LLM) -> None:
    both = LLM(model, tensor_parallel_size=2, **OPTIONS)
    try:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        prompts = ["Hello", "What a day"]
        assert [ids(each) for each in both.generate(prompts, params)] == [ids(each) for each in llm.generate(prompts, params)]
    finally:
        both.close()


def test_default_params_are_the_models(model: Path, tmp_path: Path, llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    copy = shutil.copytree(model, tmp_path / "model")
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 3, "min_p": None}
    (copy / "generation_config.json").write_text(json.dumps(wanted | {"do_sample": True, "eos_token_id": 257}))
    own = LLM(copy, **OPTIONS)
    params = own.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=3)
    params.max_tokens = 9                                # a copy: it does not change what others get
    assert len(ids(*own.generate("Hello"))[0]) <= 3
    assert len(ids(*own.generate("Hello", GREEDY))[0]) == 8
    (copy / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature must be"):
        LLM(copy, **OPTIONS)


def test_reset_prefix_cache(model: Path) -> None:
    llm = LLM(model, **OPTIONS)
    prompt = {"prompt_token_ids": list(range(40))}

    def cached() -> int | None:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 36]
    llm.core.add(Request("running", list(range(40)), GREEDY))
    llm.core.step()
    assert not llm.reset_prefix_cache()                  # a request holds blocks: nothing is forgotten
    while llm.core.has_work:
        llm.core.step()
    assert cached() == 36
    assert llm.reset_prefix_cache() and llm.reset_prefix_cache()
    llm.core.scheduler.manager.pool.check()
    assert len(llm.core.scheduler.manager.cache) == 0
    assert [cached(), cached()] == [0, 36]
    off = LLM(model, enable_prefix_caching=False, **OPTIONS)
    assert off.reset_prefix_cache()


def test_options_of_vllm(model: Path) -> None:
    llm = LLM(
        model=str(model), tokenizer=None, dtype="float", enforce_eager=True, trust_remote_code=False, swap_space=4,
        quantization=None, revision=None, tensor_parallel_size=1, seed=None, use_tqdm_on_load=False, **OPTIONS,
    )
    assert llm.core.config.dtype == "float32"


@pytest.mark.reliability("P-06")
@pytest.mark.real_model
def test_the_embedded_model(embedded_model: Path) -> None:
    llm = LLM(max_model_len=128, kv_cache_memory_bytes=64 << 20)
    out = llm.generate(["The capital of France is", {"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0, max_tokens=6))
    assert "Paris" in out[0].outputs[0].text and len(out[1].outputs[0].token_ids) <= 6
    reply = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(temperature=0, max_tokens=12))
    assert "4" in reply[0].outputs[0].text


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (None, None, "prompts must be"),
        (5, None, "prompts must be"),
        ([None], None, "a prompt must be"),
        ([b"bytes"], None, "a prompt must be"),
        ([{"prompt_token_ids": 5}], None, "a prompt must be"),
        ([{"prompt_token_ids": "abc"}], None, "a prompt must be"),
        ([{"prompt": 5}], None, "prompt must be a text"),
        ([{"prompt": 5, "prompt_token_ids": [1]}], None, "prompt must be a text"),
        ([{"prompt": None}], None, "a prompt as a dict"),
        ([{"prompt": "a", "multi_modal_data": {"image": 1}}], None, "a prompt as a dict .*multi_modal_data"),
        ([{1: 2, "a": 3}], None, "a prompt as a dict"),
        ([{"prompt": "a", "cache_salt": 5}], None, "cache_salt must be"),
        ([{"prompt": "a", "cache_salt": "s" * 1025}], None, "cache_salt must be"),
        ([{"prompt": "a", "cache_salt": "\ud800"}], None, "cache_salt must be"),
        (["\ud800"], None, "valid Unicode"),
        ([""], None, "empty"),
        ([[1, "a"]], None, "prompt_token_ids must hold"),
        ([[1.0]], None, "prompt_token_ids must hold"),
        ([[True]], None, "prompt_token_ids must hold"),
        ([[1, MAX_TOKEN_ID + 1]], None, f"prompt_token_ids must hold .* {MAX_TOKEN_ID}"),
        ([[2**80]], None, "prompt_token_ids must hold"),
        (["a"], {"temperature": 0}, "sampling_params must be SamplingParams"),
        (["a"], [{"temperature": 0}], "sampling_params must be SamplingParams"),
        (["a"], SamplingParams, "sampling_params must be SamplingParams"),
        (["a"], [], "sampling_params has 0 entries for 1 prompts"),
        (["a", "b"], [SamplingParams()], "sampling_params has 1 entries for 2 prompts"),
    ],
)
def test_misuse_is_one_line(llm: LLM, prompts: Any, params: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        llm.generate(prompts, params)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert not llm.core.has_work


def test_more_misuse(llm: LLM) -> None:
    for priority in ([1, 2], ["high"], [2**40], [True], "1"):
        with pytest.raises(BadRequest, match=r"^priority"):
            llm.generate(["a"], priority=priority)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="lora_request"):
        llm.generate(["a"], lora_request=object())  # type: ignore[arg-type]
    for messages in ("Hi", [], ["Hi"], [[]], [{"content": "x"}], None):
        with pytest.raises(BadRequest, match="messages"):
            llm.chat(messages)  # type: ignore[arg-type]


def test_a_model_without_tokenizer_is_told_before_its_weights_are_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine was started before the tokenizer was there")

    monkeypatch.setattr(EngineCore, "start", start)
    shutil.copy(model / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(tmp_path, **OPTIONS)
    with pytest.raises(RidgelineError, match="nothing"):
        LLM(model, chat_template=str(tmp_path / "nothing"), **OPTIONS)
    with pytest.raises(RidgelineError, match="chat_template /dev/zero cannot be read: it has more than 1 MiB"):
        LLM(model, chat_template="/dev/zero", **OPTIONS)
    with pytest.raises(ModelError, match="does not exist"):
        LLM(tmp_path / "nowhere", **OPTIONS)
    with pytest.raises(ModelError, match="model some/name is not on this machine: fetch it with `ridgeline pull some/name`"):
        LLM("some/name", **OPTIONS)


# -- what it survives --------------------------------------------------------------------------------------------------


class Spoiled:
    """The core, with something that happens inside one of its steps."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int, happens: Callable[[], None]) -> None:
        self.steps = 0
        collect = llm.core.executor.collect

        def spoiled() -> Any:
            self.steps += 1
            if self.steps == at:
                happens()
            return collect()

        monkeypatch.setattr(llm.core.executor, "collect", spoiled)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_inside_a_step_waits_for_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [ids(each) for each in llm.generate(["Hello", "there"], GREEDY)]
    spoiled = Spoiled(llm, monkeypatch, at=3, happens=ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "there"], GREEDY)
    assert spoiled.steps == 3 and not llm.core.has_work
    llm.core.scheduler.manager.pool.check()
    assert [ids(each) for each in llm.generate(["Hello", "there"], GREEDY)] == expected


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_a_call_runs(llm: LLM) -> None:
    """From outside, at a moment nobody chose."""
    expected = ids(*llm.generate("Hello", GREEDY))
    timer = threading.Timer(0.2, ctrl_c)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            llm.generate(["Hello"] * 20, SamplingParams(max_tokens=200, ignore_eos=True))
    timer.join()
    assert not llm.core.has_work
    assert ids(*llm.generate("Hello", GREEDY)) == expected


@pytest.mark.usefixtures("interrupts")
def test_an_own_handler_of_ctrl_c_is_called_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        Spoiled(llm, monkeypatch, at=2, happens=ctrl_c)
        assert len(ids(*llm.generate("Hello", GREEDY))[0]) == 8
        assert called == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_signals_are_left_alone(llm: LLM) -> None:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(ids(*llm.generate("Hello", GREEDY))))
    thread.start()
    thread.join()
    assert answers == ids(*llm.generate("Hello", GREEDY))


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("twice", [False, True], ids=["fault", "second ctrl-c"])
def test_after_a_broken_step_the_engine_says_that_it_is_dead(
    model: Path, monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    llm = LLM(model, **OPTIONS)

    def happens() -> None:
        if not twice:
            raise RuntimeError("planted")
        ctrl_c()
        ctrl_c()

    Spoiled(llm, monkeypatch, at=2, happens=happens)
    with pytest.raises(KeyboardInterrupt if twice else RuntimeError):
        llm.generate("Hello", GREEDY)
    with pytest.raises(EngineDead) as caught:
        llm.generate("Hello", GREEDY)
    assert "\n" not in str(caught.value)


@pytest.mark.reliability("R-07")
def test_an_answer_that_fails_does_not_take_the_others_along(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [ids(each) for each in llm.generate(["one", "two"], GREEDY)]
    step, failed = llm.core.step, []

    def one_fails() -> TokenDeltas:
        deltas = list(step())
        for place, delta in enumerate(deltas):
            if not failed:
                failed.append(delta.request_id)
                llm.core.abort(delta.request_id)
                deltas[place] = TokenDelta(delta.request_id, delta.index, [], finish_reason="error", error="planted")
        return TokenDeltas(others=deltas)

    monkeypatch.setattr(llm.core, "step", one_fails)
    first, second = llm.generate(["one", "two"], GREEDY)
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("error", "planted") and first.finished
    assert second.outputs[0].finish_reason == "length" and ids(second) == expected[1]


def test_several_prompts_are_tokenised_at_once_and_as_each_would_be_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and conversations; one says what is spelt like a special token, and stays ordinary text."""
    texts = ["one", "", "and another, longer one", [1, 2, 3], {"prompt": "three"}]
    asked = [[{"role": "user", "content": each}] for each in ("Hello", "<|im_end|>", "Good evening")]
    processor, tokenizer = llm._processor, llm.get_tokenizer()
    alone = [processor.prompt_tokens(each) for each in texts if each]
    chats = [processor.chat_tokens(each) for each in asked]
    batches, encode_batch = [], tokenizer.encode_batch

    def noted(given: Any, *more: Any, **named: Any) -> list[list[int]]:
        batches.append(len(given))
        return encode_batch(given, *more, **named)

    monkeypatch.setattr(tokenizer, "encode_batch", noted)
    made = processor.requests([each for each in texts if each], [GREEDY] * 4, [0] * 4)
    assert [(state.output.prompt, request.prompt_token_ids) for request, state in made] == alone and batches[0] == 2
    with pytest.raises(BadRequest, match="the prompt is empty"):
        processor.requests(texts, [GREEDY] * 5, [0] * 5)
    batches.clear()
    assert processor.chat_prompts(asked, add_generation_prompt=True) == chats and batches[0] == 2


def test_predictions_of_several_requests_are_tokenised_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(prediction=given) for given in ("some text", None, [7, 8], "", "and more")]
    processor = llm._processor
    monkeypatch.setattr(processor, "predicts", True)
    alone = [processor.request([1], each)[0] for each in params]
    monkeypatch.setattr(processor, "_predicted", lambda each: [] if isinstance(each.prediction, str) else each.prediction or [])
    together = [request for request, _ in processor.requests([[1]] * 5, params, [0] * 5)]
    assert [each.predicted_token_ids for each in together] == [each.predicted_token_ids for each in alone]
    assert together[0].predicted_token_ids and together[0].params.prediction is None

"""What all prompts of a request share: made into tokens once, and bounded, since each prompt is sent with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_server import ScriptedLLM
from served_model import write_model

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.prompt_limits import LONG_WORK, MOST_REPEATED, PromptLimits, amount_of_work
from ridgeline.errors import PROMPT, BadRequest
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams


class Unsent(ScriptedLLM):
    """Requests are made as usual, and kept instead of sent."""

    stream = AsyncLLM.stream                             # type: ignore[assignment]

    def _submit(self, made: list[Any], *_: Any) -> Any:
        return [request for request, _, _ in made]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Unsent:
    return Unsent(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes")


def made(llm: Unsent, prompts: int, **params: Any) -> list[Request]:
    async def make() -> Any:
        return await llm.stream(["a"] * prompts, SamplingParams(max_tokens=1, **params))

    requests: list[Request] = asyncio.run(make())
    return requests


@pytest.mark.reliability("B-02")
def test_bad_words_and_predictions_are_tokenised_once_for_all_prompts(llm: Unsent, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 long words with 200 prompts, 32 KB, took half a minute of a thread, and 150 MB that were not given back."""
    made(llm, 1)
    assert llm._processor is not None
    monkeypatch.setattr(llm._processor, "predicts", True)
    words, tokenizer = {"bad_words": ["bad", "word"], "prediction": "some text"}, llm.get_tokenizer()
    alone, texts, encode = made(llm, 1, **words)[0], [], tokenizer.encode

    def noted(text: str, *more: Any, **named: Any) -> list[int]:
        texts.append(text)
        return encode(text, *more, **named)

    monkeypatch.setattr(tokenizer, "encode", noted)
    requests = made(llm, 5, **words)
    assert sorted(texts) == sorted(["bad", " bad", "word", " word", "some text"] + ["a"] * 5)
    assert all(each.bad_words_token_ids == alone.bad_words_token_ids != [] for each in requests)
    assert all(each.predicted_token_ids == alone.predicted_token_ids != [] for each in requests)
    texts.clear()
    params = SamplingParams(max_tokens=1, **words)
    offline = [request for request, _ in llm._processor.requests([[1]] * 5, [params] * 5, [0] * 5)]
    assert [each.bad_words_token_ids for each in offline] == [alone.bad_words_token_ids] * 5
    assert sorted(texts) == sorted(["bad", " bad", "word", " word"])


@pytest.mark.reliability("B-02")
def test_what_prompts_repeat_is_bounded_before_it_is_made(llm: Unsent, monkeypatch: pytest.MonkeyPatch) -> None:
    """390,000 allowed ids with 500 prompts, 3 MB, stopped the event loop for 2.7 s: 1.3 GB there, and 6 GB in the engine."""
    many = list(range(260, 100_000))
    assert len(made(llm, 3, allowed_token_ids=many)) == 3 and len(made(llm, 500, allowed_token_ids=many[:50])) == 500
    begun, request = [], llm._processor.request          # type: ignore[union-attr]
    monkeypatch.setattr(llm._processor, "request", lambda *given, **named: (begun.append(1), request(*given, **named))[1])
    with pytest.raises(BadRequest, match="500 prompts would repeat") as error:
        made(llm, 500, allowed_token_ids=many)
    assert error.value.field == PROMPT and len(begun) == 1


@pytest.mark.reliability("B-02")
def test_prompts_are_made_until_they_have_too_many_tokens_together(llm: Unsent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm._processor is not None and llm.ready is not None
    texts, request = [], llm._processor.request

    def noted(prompt: Any, *more: Any, **named: Any) -> Any:
        texts.append(prompt)
        return request(prompt, *more, **named)

    monkeypatch.setattr(llm._processor, "request", noted)
    monkeypatch.setattr("ridgeline.engine.client.prompt_limits.MOST_TOKENS", llm.ready.max_model_len)
    text = "a" * (llm.ready.max_model_len // 2 - 8)              # a token each
    with pytest.raises(BadRequest, match="the first 3 prompts have") as error:
        asyncio.run(llm.stream([text] * 100, SamplingParams(max_tokens=1)))
    assert len(texts) == 3 and error.value.field == PROMPT


def test_one_prompt_may_have_any_parameters_and_prompts_any_length() -> None:
    limits = PromptLimits(8192, 12)
    limits.check_repeated(MOST_REPEATED * 2, 10, 1)
    limits.check_repeated(5 * 8000 + 100, 8000, 1000)
    with pytest.raises(BadRequest, match="2 prompts would repeat"):
        limits.check_repeated(MOST_REPEATED, 10, 2)


@pytest.mark.parametrize(("prompts", "params", "is_long"), [
    (1, {"allowed_token_ids": [*range(1000)]}, False), (50, {"allowed_token_ids": [*range(1000)]}, True),
    (1, {"logit_bias": dict.fromkeys(range(1000), 1.0)}, False), (50, {"logit_bias": dict.fromkeys(range(1000), 1.0)}, True),
    (1, {"structured_outputs": {"regex": "a" * 2000}}, False), (50, {"structured_outputs": {"regex": "a" * 2000}}, True),
])
def test_parameters_that_are_sent_with_many_prompts_are_work_for_a_thread(
    prompts: int, params: dict[str, Any], is_long: bool
) -> None:
    assert (amount_of_work([[1]] * prompts, SamplingParams(**params)) >= LONG_WORK) is is_long

"""Clients that were written for vLLM: its own fields through `extra_body`, its older names, and an evaluation harness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from served_model import ServerProcess, write_model

NAME = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model: Path = write_model(tmp_path_factory.mktemp("model") / NAME)
    options = ("--load-format", "dummy", "--num-gpu-blocks-override", "400", "--max-num-seqs", "8", "--dtype", "float32")
    with ServerProcess(str(model), *options) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0, timeout=60)


def complete(url: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/completions", json={"model": NAME} | body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


# -- lm-eval's local-completions ---------------------------------------------------------------------------------------


def loglikelihoods(url: str, prompts: list[Any], contexts: list[int], max_tokens: int) -> list[tuple[float, bool]]:
    """The request as the harness sends it, and the way in which it reads the answer: the sum over a continuation, and
    whether each of its tokens was the likeliest. The last token is the model's own and does not count."""
    asked = {"prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    choices = sorted(complete(url, **asked)["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    found = []
    for choice, context in zip(choices, contexts, strict=True):
        end = -1 if max_tokens else None
        values = choice["logprobs"]["token_logprobs"][context:end]
        tops = choice["logprobs"]["top_logprobs"][context:end]
        found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return found


@pytest.mark.reliability("H-08f")
def test_an_evaluation_harness_gets_log_likelihoods(url: str) -> None:
    texts = ["The sky is blue", "The sky is green", "a", "Zürich 3 €"]
    tokens = [httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    contexts = [11, 11, 1, 7]
    by_ids = loglikelihoods(url, tokens, contexts, 1)
    by_text = loglikelihoods(url, texts, contexts, 1)
    without = loglikelihoods(url, tokens, contexts, 0)
    for one, same, other, ids, context in zip(by_ids, by_text, without, tokens, contexts, strict=True):
        told = complete(url, prompt=ids, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
        expected = sum(at[str(token)]["logprob"] for at, token in zip(told[context:], ids[context:], strict=True))
        for value, greedy in (one, same, other):
            assert math.isclose(value, expected, abs_tol=1e-4) and greedy == one[1]
    assert by_ids[2] == (0, True)                        # an empty continuation
    assert by_ids[0][0] < 0


def test_scores_are_the_log_likelihoods(url: str) -> None:
    """The same figures as an evaluation harness adds up from echoed completions."""
    first, second = "The sky is", [" blue", " green and wide", " Zürich 3 €"]
    tokens = [httpx.post(f"{url}/tokenize", json={"prompt": first + each}).json()["tokens"] for each in second]
    context = httpx.post(f"{url}/tokenize", json={"prompt": first}).json()["count"]
    expected = loglikelihoods(url, tokens, [context] * 3, 0)
    for body in ({"text_1": first, "text_2": second}, {"text_1": [first] * 3, "text_2": second}):
        reply = httpx.post(f"{url}/v1/score", json={"model": NAME} | body, timeout=60).json()
        assert reply["object"] == "list" and reply["usage"]["prompt_tokens"] == sum(map(len, tokens))
        for place, (entry, (total, greedy)) in enumerate(zip(reply["data"], expected, strict=True)):
            assert (entry["index"], entry["object"], entry["greedy"]) == (place, "score", greedy)
            assert entry["score"] == pytest.approx(total, abs=1e-3) and entry["tokens"] == len(tokens[place]) - context


@pytest.mark.parametrize(("body", "says", "param"), [
    ({"text_1": ["a", "b"], "text_2": "c"}, "equally many texts", "text_1"),
    ({"text_1": "a", "text_2": []}, "equally many texts", "text_1"),
    ({"text_1": "a", "text_2": ""}, "at least one token", "text_1"),
    ({"text_1": "a"}, "missing required field text_2", "text_2"),
    ({"text_1": "a", "text_2": ["b"] * 1_000}, "asks for 1000 answers at once", None),
    ({"text_1": "a " * 20_000, "text_2": "b"}, "the prompt is too long", None),
])
def test_scores_that_cannot_be(url: str, body: dict[str, Any], says: str, param: str | None) -> None:
    reply = httpx.post(f"{url}/v1/score", json=body, timeout=60)
    assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["param"] == param


def test_the_best_of_several(url: str) -> None:
    asked: dict[str, Any] = {"prompt": ["One", "Two"], "max_tokens": 8, "seed": 5, "temperature": 1, "ignore_eos": True}
    every = complete(url, **asked, n=5, logprobs=0)
    best = complete(url, **asked, n=2, best_of=5)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    for prompt in (0, 1):
        ranked = sorted(every["choices"][5 * prompt : 5 * prompt + 5], key=lambda each: -sum(each["logprobs"]["token_logprobs"]))
        assert [each["text"] for each in best["choices"][2 * prompt : 2 * prompt + 2]] == [each["text"] for each in ranked[:2]]
    assert best["choices"][0]["logprobs"] is None and best["usage"]["completion_tokens"] == 2 * 5 * 8


def test_a_greedy_continuation_is_seen_as_one(url: str) -> None:
    prompt = [72, 101, 108]
    answer = complete(url, prompt=prompt, max_tokens=5, temperature=0, return_token_ids=True, ignore_eos=True)
    greedy = answer["choices"][0]["token_ids"]
    other = [*greedy[:-1], (greedy[-1] + 1) % 200]
    found = loglikelihoods(url, [prompt + greedy, prompt + other], [3, 3], 1)
    assert [is_greedy for _, is_greedy in found] == [True, False] and found[0][0] > found[1][0]


def test_an_evaluation_harness_generates(url: str) -> None:
    asked = {"prompt": [[72, 105], [66, 121, 101]], "max_tokens": 12, "temperature": 0, "stop": ["\n\n", "</s>"], "seed": 1234}
    choices = complete(url, **asked)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1] and all(isinstance(choice["text"], str) for choice in choices)


# -- vLLM's own fields -------------------------------------------------------------------------------------------------


@pytest.mark.reliability("H-08f")
def test_extra_fields_through_the_sdk(client: openai.OpenAI) -> None:
    extra = {
        "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 4,
        "skip_special_tokens": False, "spaces_between_special_tokens": True, "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 8, "add_special_tokens": False, "allowed_token_ids": list(range(65, 91)),
        "bad_words": ["ZZ"], "cache_salt": "tenant", "prompt_logprobs": 0, "return_token_ids": True,
        "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1,
        "guided_decoding_backend": "xgrammar",
    }
    made = client.completions.create(model=NAME, prompt="Hello there", max_tokens=6, seed=3, extra_body=extra)
    text = made.choices[0].text
    assert len(text) == 6 and text.isascii() and made.usage is not None and made.usage.prompt_tokens == 8
    asked = {name: value for name, value in extra.items() if name != "best_of"}
    asked |= {"continue_final_message": False, "add_generation_prompt": True, "chat_template_kwargs": {"x": 1}, "echo": False}
    chat = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=6, extra_body=asked)
    assert len(chat.choices[0].message.content or "") == 6


def test_usage_in_every_event(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 5, "stream": True, "stream_options": options}
    asked["extra_body"] = {"allowed_token_ids": list(range(65, 91)), "ignore_eos": True}
    for chunks in (
        list(client.chat.completions.create(messages=MESSAGES, **asked)),
        list(client.completions.create(prompt="Hello", **asked)),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == 5
        assert counts.count(1) >= 1 and not chunks[-1].choices
        assert all(chunk.usage.total_tokens == chunk.usage.prompt_tokens + count
                   for chunk, count in zip(chunks, counts, strict=True) if chunk.usage)


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


@pytest.mark.parametrize(
    "extra",
    [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_regex": "(yes|no)"},
     {"guided_grammar": 'root ::= "yes" | "no"'}, {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
     {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}],
    ids=lambda extra: next(iter(extra)),
)
def test_older_names_of_structured_outputs(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    body = extra | {"guided_decoding_backend": "outlines"}
    chat = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=30, seed=5, extra_body=body)
    text = chat.choices[0].message.content or ""
    if "json" in str(extra):
        assert isinstance(json.loads(text)["ok"], bool)
    else:
        assert text in ("yes", "no")


def test_tokens_by_their_ids(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    made: Any = client.completions.create(model=NAME, prompt="Hi", max_tokens=3, logprobs=2, temperature=0, extra_body=extra)
    choice = made.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [("use_beam_search", True, "use_beam_search is not supported"), ("length_penalty", 0.8, "length_penalty is not supported"),
     ("early_stopping", True, "early_stopping is not supported"), ("lora_request", {}, "lora_request is not supported"),
     ("guided_whitespace_pattern", " *", "guided_whitespace_pattern is not supported"),
     ("suffix", "x", "tokens for filling in the middle"), ("logits_processors", [], "unknown field 'logits_processors'"),
     ("prompt_embeds", "AAAA", "unknown field 'prompt_embeds'"), ("top_kk", 3, "did you mean 'top_k'?")],
)
def test_what_is_not_done_is_refused_by_name(client: openai.OpenAI, field: str, value: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="Hi", max_tokens=3, extra_body={field: value})
    assert says in str(caught.value) and caught.value.param == field


def test_a_prompt_that_is_too_long_is_told_as_clients_expect_it(client: openai.OpenAI, url: str) -> None:
    """LangChain and LiteLLM know it by OpenAI's code and words, Claude Code and langchain-anthropic by Anthropic's."""
    context = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
    long: Any = [{"role": "user", "content": "x" * context}]
    for ask in (
        lambda: client.chat.completions.create(model=NAME, messages=long),
        lambda: client.responses.create(model=NAME, input=long[0]["content"]),
        lambda: client.completions.create(model=NAME, prompt=[65] * context),
        lambda: client.completions.create(model=NAME, prompt="x" * (context * 20)),
    ):
        with pytest.raises(openai.BadRequestError, match=f"this model's maximum context length is {context} tokens") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {context - 1} maximum"):
        theirs.messages.create(model=NAME, max_tokens=5, messages=long)

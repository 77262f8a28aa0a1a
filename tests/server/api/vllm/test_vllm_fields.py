"""What vLLM's clients send beyond OpenAI's API: listed log-probabilities, batches, invocations, notes inside messages, usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from scripted_server import ScriptedServer
from served_model import write_model

from ridgeline import LLM, SamplingParams
from ridgeline.engine.token_logprobs import Logprob
from ridgeline.errors import BadRequest, UnknownField
from ridgeline.server.api.anthropic.messages_api import MessagesRequest
from ridgeline.server.api.generation import ranked
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.openai.responses_request import ResponsesRequest
from ridgeline.server.api.vllm.batch_chat import BatchChatRequest
from ridgeline.server.http.body import parse_body
from ridgeline.server.options import ServerOptions

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vllm") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model, lambda prompt: f"said {prompt[-16:-11]}") as made:
        yield made


def post(server: ScriptedServer, path: str, status: int = 200, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


# -- log-probabilities of listed tokens --------------------------------------------------------------------------------


def test_listed_tokens_have_their_log_probabilities(model: Path) -> None:
    """The same numbers as among the most likely tokens, whatever their rank; other rows of the batch are not concerned."""
    llm = LLM(model, load_format="dummy", num_gpu_blocks_override=40, max_num_seqs=4, max_model_len=64)
    settings: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    known = llm.generate([[7, 8, 9]], SamplingParams(**settings, logprobs=20))[0].outputs[0]
    assert known.logprobs is not None
    wanted = [sorted(known.logprobs[0], key=lambda token: -known.logprobs[0][token].logprob)[place] for place in (19, 3)]
    listed = SamplingParams(**settings, logprobs=5, logprob_token_ids=[*wanted, 5, wanted[0]])
    found, beside = (each.outputs[0] for each in llm.generate([[7, 8, 9]] * 2, [listed, SamplingParams(**settings, logprobs=2)]))
    assert found.logprobs is not None and beside.logprobs is not None and found.token_ids == known.token_ids
    assert set(found.logprobs[0]) == {*wanted, 5, found.token_ids[0]}
    for token in wanted:
        assert found.logprobs[0][token].logprob == pytest.approx(known.logprobs[0][token].logprob, abs=1e-5)
    assert len(beside.logprobs[1]) in (2, 3) and all(each.rank is not None for each in beside.logprobs[1].values())
    with pytest.raises(BadRequest, match="logprob_token_ids holds token id 260"):
        llm.generate([[7]], SamplingParams(max_tokens=1, logprobs=1, logprob_token_ids=[260]))


def test_listed_tokens_are_shown_with_the_sampled_one() -> None:
    at = {5: Logprob(-9.0), 7: Logprob(-2.0), 3: Logprob(-0.5, 1)}
    assert ranked(at, 0) == [(3, -0.5), (7, -2.0), (5, -9.0)]


@pytest.mark.parametrize(("kind", "body", "said"), [
    (ChatRequest, {"messages": HI, "logprob_token_ids": [1]}, "logprob_token_ids needs logprobs"),
    (CompletionRequest, {"prompt": "a", "logprob_token_ids": [1]}, "logprob_token_ids needs logprobs"),
    (CompletionRequest, {"prompt": "a", "logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0}, "tokens is 0"),
    (ChatRequest, {"messages": HI, "logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids must hold token ids"),
    (ChatRequest, {"messages": HI, "logprobs": True, "logprob_token_ids": [1] * 129}, "at most 128"),
])
def test_when_tokens_cannot_be_listed(kind: Any, body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parse_body(kind, json.dumps(body).encode()).params({})


# -- batches and invocations -------------------------------------------------------------------------------------------


def test_a_batch_of_conversations(server: ScriptedServer) -> None:
    talks = [[{"role": "user", "content": name}] for name in ("first", "other")]
    reply = post(server, "/v1/chat/completions/batch", messages=talks, max_tokens=40)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1] and reply["object"] == "chat.completion"
    assert [server.llm.prompts[place].count("user\n") for place in (-2, -1)] == [1, 1]
    assert ["first" in server.llm.prompts[-2], "other" in server.llm.prompts[-1]] == [True, True]
    assert reply["usage"]["prompt_tokens"] == 2 * 23


@pytest.mark.parametrize("body", [
    {"stream": True}, {"n": 2}, {"messages": []}, {"messages": [[]]}, {"messages": HI},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
])
def test_what_a_batch_cannot(server: ScriptedServer, body: dict[str, Any]) -> None:
    said = post(server, "/v1/chat/completions/batch", 400, **{"messages": [HI]} | body)["error"]["message"]
    assert next(iter(body)) in said


@pytest.mark.parametrize("name", ["chat_template_kwargs", "documents"])
def test_what_a_batch_repeats_is_bounded(name: str) -> None:
    """270 KB of template variables took a reading process 0.13 s for each conversation, 16 s for 128; 512 are possible."""
    def asked(value: Any, count: int) -> BatchChatRequest:
        given = {"x": value} if name == "chat_template_kwargs" else [{"x": value}]
        return msgspec.convert({"messages": [HI] * count, name: given}, BatchChatRequest)

    for value, most in ((["a"] * 1000, 99), ("x" * 2**20, 63)):
        asked(value, most).check()
        with pytest.raises(BadRequest, match=f"{name} is too large to be repeated for {most + 1} conversations"):
            asked(value, most + 1).check()
    asked({"enable_thinking": False}, 512).check()


def test_invocations_go_by_their_field(server: ScriptedServer) -> None:
    assert post(server, "/invocations", messages=HI)["object"] == "chat.completion"
    assert post(server, "/invocations", prompt="a" * 20)["object"] == "text_completion"
    assert "text_2" in post(server, "/invocations", 400, text_1="a")["error"]["message"]
    assert "needs one of messages, prompt, input, text_1" in post(server, "/invocations", 400, x=1)["error"]["message"]
    assert httpx.post(f"{server.url}/invocations", content="[1]", headers={"content-type": "application/json"}).status_code == 400


def test_an_error_of_an_invocation_names_the_field_that_was_sent(server: ScriptedServer) -> None:
    for field, value in (("messages", [{"role": "user", "content": "a" * 60_000}]), ("prompt", ""), ("input", "")):
        assert post(server, "/invocations", 400, **{field: value})["error"]["param"] == field


def test_fields_that_vllms_clients_read_are_null(server: ScriptedServer) -> None:
    chat, text = post(server, "/v1/chat/completions", messages=HI), post(server, "/v1/completions", prompt="a" * 20)
    assert chat["prompt_token_ids"] is chat["prompt_logprobs"] is chat["choices"][0]["token_ids"] is None
    assert all(text["choices"][0][name] is None for name in ("prompt_token_ids", "prompt_logprobs", "token_ids"))
    asked = post(server, "/v1/completions", prompt="a" * 20, return_token_ids=True)["choices"][0]
    assert len(asked["prompt_token_ids"]) == 20 and asked["token_ids"]


def test_a_prompt_is_cut_on_either_side(server: ScriptedServer) -> None:
    for side, kept in ((None, "cdefg"), ("left", "cdefg"), ("right", "abcde")):
        post(server, "/v1/completions", prompt="abcdefg", truncate_prompt_tokens=5, truncation_side=side)
        assert server.llm.prompts[-1] == kept


# -- unknown fields inside messages ------------------------------------------------------------------------------------

NOTED: list[tuple[Any, dict[str, Any]]] = [
    (ChatRequest, {"messages": [{"role": "user", "content": "hi", "note": 1}]}),
    (ResponsesRequest, {"input": [{"role": "user", "content": "hi", "note": {"a": 1}}]}),
    (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi", "note": []}]}),
    (MessagesRequest, {
        "model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "note": 1}]}],
    }),
]


@pytest.mark.parametrize(("kind", "body"), NOTED)
def test_notes_in_messages_are_ignored_unless_strict(kind: Any, body: dict[str, Any]) -> None:
    sent = json.dumps(body).encode()
    assert parse_body(kind, sent)
    with pytest.raises(UnknownField, match="unknown field 'note' in"):
        parse_body(kind, sent, strict=True)
    with pytest.raises(UnknownField, match="unknown field 'note'"):
        parse_body(kind, json.dumps(body | {"note": 1}).encode())


def test_the_switch(model: Path, server: ScriptedServer) -> None:
    part = [{"role": "user", "content": [{"type": "text", "text": "hi", "source_lang": "en"}]}]
    for messages in (NOTED[0][1]["messages"], part):
        post(server, "/v1/chat/completions", messages=messages)
    with ScriptedServer(model, lambda prompt: "", server=ServerOptions(port=0, strict_messages=True)) as strict:
        assert "note" in post(strict, "/v1/chat/completions", 400, messages=NOTED[0][1]["messages"])["error"]["message"]
        assert "source_lang" in post(strict, "/v1/chat/completions", 400, messages=part)["error"]["message"]


def test_usage_by_force(model: Path) -> None:
    options = ServerOptions(port=0, enable_force_include_usage=True)
    with ScriptedServer(model, lambda prompt: "yes", server=options) as forced:
        for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
            text = httpx.post(f"{forced.url}{path}", json=body | {"stream": True}).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts) and counts[-1] == 4 and events[-1]["choices"] == []
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": False}}
        assert '"usage":{' not in httpx.post(f"{forced.url}/v1/chat/completions", json=body).text

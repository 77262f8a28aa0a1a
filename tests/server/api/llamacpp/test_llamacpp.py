"""llama.cpp's own endpoints on the wire: /completion with its prompts, events and times, and the small ones beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from scripted_server import ScriptedServer
from served_model import write_model

from ridgeline.errors import RequestError
from ridgeline.server.api.llamacpp.llama_requests import prompts


def script(prompt: str) -> Any:
    return ("half", RequestError("it broke")) if "fail" in prompt else "one\ntwö"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(write_model(tmp_path_factory.mktemp("llama") / "tiny"), script) as made:
        yield made


def post(server: ScriptedServer, path: str = "/completion", status: int = 200, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def events(server: ScriptedServer, **body: Any) -> list[dict[str, Any]]:
    reply = httpx.post(f"{server.url}/completion", json={"stream": True} | body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.removeprefix("data: ")) for event in reply.text.split("\n\n") if event]


# -- /completion -------------------------------------------------------------------------------------------------------


def test_a_whole_answer(server: ScriptedServer) -> None:
    reply = post(server, prompt="say", n_predict=32, seed=7)
    assert (reply["content"], reply["stop"], reply["stop_type"], reply["stopping_word"]) == ("one\ntwö", True, "eos", "")
    assert reply["tokens"] == [] and reply["has_new_line"] and not reply["truncated"] and reply["prompt"] == "say"
    assert reply["tokens_predicted"] == 9 and reply["tokens_evaluated"] == 3 and reply["model"] == "tiny"
    assert reply["timings"]["predicted_n"] == 9 and reply["timings"]["prompt_n"] + reply["timings"]["cache_n"] == 3
    assert reply["generation_settings"]["n_predict"] == 32 and reply["generation_settings"]["seed"] == 7
    assert len(post(server, prompt="say", return_tokens=True)["tokens"]) == 9


@pytest.mark.parametrize(("body", "kind", "word", "text"), [
    ({"n_predict": 3}, "limit", "", "one"), ({"stop": ["tw"]}, "word", "tw", "one\n"), ({"n_predict": -1}, "eos", "", "one\ntwö"),
    ({"n_predict": 0}, "limit", "", ""), ({"max_tokens": 2}, "limit", "", "on"),
])
def test_how_it_ended(server: ScriptedServer, body: dict[str, Any], kind: str, word: str, text: str) -> None:
    reply = post(server, prompt="say", **body)
    assert (reply["stop_type"], reply["stopping_word"], reply["content"]) == (kind, word, text)
    *_, last = events(server, prompt="say", **body)
    assert (last["stop_type"], last["stopping_word"], last["stop"]) == (kind, word, True)


def test_events_have_text_until_the_last_that_has_the_rest(server: ScriptedServer) -> None:
    *parts, last = events(server, prompt="say")
    assert "".join(part["content"] for part in parts) == "one\ntwö" and not any(part["stop"] for part in parts)
    assert all(len(part["tokens"]) == 1 for part in parts) and "timings" not in parts[0]
    assert last["content"] == "" and last["timings"]["predicted_n"] == 9 and "generation_settings" in last
    assert all("timings" in part for part in events(server, prompt="say", timings_per_token=True))
    assert events(server, prompt="fail")[-1]["error"]["message"] == "it broke"


def test_prompts_of_every_shape(server: ScriptedServer) -> None:
    ids = post(server, "/tokenize", content="say")["tokens"]
    for prompt in ("say", ids, [*ids[:1], "ay"], {"prompt_string": "say"}, ["say"]):
        post(server, prompt=prompt)
        assert server.llm.prompts[-1] == "say", prompt
    for several in (["say", "say"], [ids, "say"], [[*ids[:1], "ay"], {"prompt_string": "say"}]):
        first, second = post(server, prompt=several)
        assert (first["index"], second["index"]) == (0, 1) and first["content"] == second["content"]
    assert {event["index"] for event in events(server, prompt=["a", "b"])} == {0, 1}
    assert prompts([1, 2]) == [[1, 2]] and prompts([]) == [[]]


def test_sampling_parameters(server: ScriptedServer) -> None:
    token = post(server, "/tokenize", content="x")["tokens"][0]
    post(server, prompt="say", temperature=0.5, top_k=-1, min_p=0.1, repeat_penalty=1.5, ignore_eos=False, mirostat=0,
         logit_bias=[[token, 1.5], ["y", False]], json_schema={"type": "object"}, samplers=["top_k"], unknown=1, n_keep=4)
    params = server.llm.params[-1]
    assert (params.temperature, params.top_k, params.min_p, params.repetition_penalty) == (0.5, 0, 0.1, 1.5)
    assert params.logit_bias == {token: 1.5, token + 1: -100.0}
    assert params.structured_outputs is not None and params.structured_outputs.kind == "json"
    post(server, prompt="say", repeat_penalty=1.5, repeat_last_n=0, grammar='root ::= "a"', logit_bias={str(token): 1})
    assert server.llm.params[-1].repetition_penalty == 1.0 and server.llm.params[-1].logit_bias == {token: 1.0}
    post(server, prompt="say", cache_prompt=False, json_schema={})
    assert not server.llm.callers[-1].prefix_caching and server.llm.params[-1].max_tokens is None


def test_probabilities_and_chosen_fields(server: ScriptedServer) -> None:
    reply = post(server, prompt="say", n_probs=1, n_predict=2)
    first, _ = reply["completion_probabilities"]
    assert first["token"] == "o" and first["bytes"] == [111] and first["logprob"] == 0
    assert first["top_logprobs"][0]["id"] == first["id"]
    assert len(events(server, prompt="say", n_probs=1)[0]["completion_probabilities"]) == 1
    chosen = post(server, prompt="say", n_predict=2, response_fields=["content", "generation_settings/n_predict", "no/such"])
    assert chosen == {"content": "on", "generation_settings/n_predict": 2}


@pytest.mark.parametrize("fields", [None, ["content"], ["no/such"]])
def test_an_answer_is_as_the_document_says_whatever_was_chosen_of_it(server: ScriptedServer, fields: list[str] | None) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    described = document["paths"]["/completion"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    for prompt in ("say", ["say", "more"]):
        jsonschema.validate(post(server, prompt=prompt, n_predict=2, response_fields=fields), document | described)


@pytest.mark.parametrize(("body", "said"), [
    ({"response_fields": [f"a/{n}" for n in range(129)]}, "response_fields may have at most 128"),
    ({"response_fields": ["a/" * 100]}, "names of at most 128 characters"),
    ({"mirostat": 2}, "mirostat is not supported"), ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
    ({"n_predict": 2**40}, "n_predict must be"), ({"prompt": {"multimodal_data": ["a"]}}, "multimodal_data"),
    ({"logit_bias": [1]}, "logit_bias must hold pairs"), ({"grammar": "a", "json_schema": {}}, "grammar and json_schema"),
    ({"prompt": [True]}, "prompt must be a text"), ({"n_probs": 99}, "n_probs must be"), ({"temperature": "x"}, "temperature"),
])
def test_refused_by_its_own_name(server: ScriptedServer, body: dict[str, Any], said: str) -> None:
    assert said in post(server, status=400, **{"prompt": "x"} | body)["error"]["message"]


# -- beside it ---------------------------------------------------------------------------------------------------------


def test_tokens_in_llama_cpps_form(server: ScriptedServer) -> None:
    assert post(server, "/tokenize", content="<|im_end|>") == {"tokens": [259]}
    assert len(post(server, "/tokenize", content="<|im_end|>", parse_special=False)["tokens"]) == 10
    pieces = post(server, "/tokenize", content="aö", with_pieces=True)["tokens"]
    assert [each["piece"] for each in pieces] == ["a", [0xC3], [0xB6]] and pieces[0]["id"] == 64
    assert post(server, "/detokenize", tokens=[64])["content"] == "a"
    assert "llama.cpp's form" in post(server, "/tokenize", status=400, prompt="a", with_pieces=True)["error"]["message"]


def test_props_slots_template_and_infill(server: ScriptedServer) -> None:
    props = httpx.get(f"{server.url}/props").json()
    defaults = props["default_generation_settings"]
    assert props["total_slots"] == 8 and defaults["n_ctx"] == 512 and "im_start" in props["chat_template"]
    assert defaults["params"]["n_predict"] == -1 and props["modalities"] == {"vision": False, "audio": False}
    slots = httpx.get(f"{server.url}/slots").json()
    assert len(slots) == 8 and slots[0] == {"id": 0, "n_ctx": 512, "is_processing": False, "id_task": -1, "speculative": False}
    made = post(server, "/apply-template", messages=[{"role": "user", "content": "hi"}])
    assert made == {"prompt": "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"}
    assert "/v1/completions" in post(server, "/infill", status=400, input_prefix="a", prompt="")["error"]["message"]


def test_health_while_loading(server: ScriptedServer) -> None:
    limit, server.service.slots.limit = server.service.slots.limit, 0
    try:
        reply = httpx.get(f"{server.url}/health")
    finally:
        server.service.slots.limit = limit
    assert reply.status_code == 503 and reply.json()["error"] == {
        "code": 503, "message": "the engine is not ready", "type": "unavailable_error",
    }
    assert "error" not in httpx.get(f"{server.url}/health").json()

"""Ollama's API on the wire: chat, generate, vectors and the lists of models; and, where it is installed, its Python client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import TOOL_TEMPLATE, ScriptedServer
from served_model import write_model

from ridgeline.errors import RequestError
from ridgeline.server.api.ollama.ollama_models import _QUANTIZATION, model_files
from ridgeline.server.api.ollama.ollama_requests import chat_options, response_format
from ridgeline.server.http.keys import Keys
from ridgeline.version import __version__

CALL = '<think>hm</think>Sure <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}
HI = [{"role": "user", "content": "hi"}]
MODEL = "tiny"


def script(prompt: str) -> Any:
    if "fail" in prompt:
        return "half", RequestError("it broke")
    return CALL if "weather" in prompt else "Hello wörld"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("ollama") / MODEL)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TOOL_TEMPLATE}))
    with ScriptedServer(model, script) as made:
        yield made


def post(server: ScriptedServer, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}{path}", json={"model": MODEL, "stream": False} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def lines(server: ScriptedServer, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = httpx.post(f"{server.url}{path}", json={"model": MODEL} | body)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def refused(server: ScriptedServer, path: str, status: int = 400, **body: Any) -> str:
    reply = httpx.post(f"{server.url}{path}", json={"model": MODEL} | body)
    assert reply.status_code == status and list(reply.json()) == ["error"]
    return str(reply.json()["error"])


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_whole_answer_has_counts_and_nanoseconds(server: ScriptedServer) -> None:
    reply = post(server, "/api/chat", messages=HI, model="tiny:latest")
    assert reply["model"] == "tiny:latest" and reply["message"] == {"role": "assistant", "content": "Hello wörld"}
    assert reply["done"] is True and reply["done_reason"] == "stop" and reply["created_at"].endswith("Z")
    assert reply["eval_count"] == 13 and reply["prompt_eval_count"] == 20
    assert isinstance(reply["total_duration"], int) and reply["total_duration"] > 1_000
    assert {"load_duration", "prompt_eval_duration", "eval_duration"} <= reply.keys()


def test_an_answer_streams_unless_it_may_not(server: ScriptedServer) -> None:
    *parts, last = lines(server, "/api/chat", messages=HI)
    assert "".join(part["message"]["content"] for part in parts) == "Hello wörld" and not any(part["done"] for part in parts)
    assert last["done"] and last["message"]["content"] == "" and last["done_reason"] == "stop" and last["eval_count"] == 13
    cut = lines(server, "/api/chat", messages=HI, options={"num_predict": 3})
    assert cut[-1]["done_reason"] == "length" and "".join(part["message"]["content"] for part in cut) == "Hel"


def test_calls_come_whole_and_thoughts_apart(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "weather?"}]
    whole = post(server, "/api/chat", messages=messages, tools=[WEATHER], think=True)["message"]
    assert whole["thinking"] == "hm" and whole["content"] == "Sure"
    call, = whole["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}} and call["id"]
    streamed = [line["message"] for line in lines(server, "/api/chat", messages=messages, tools=[WEATHER])]
    assert [m["tool_calls"][0]["function"]["arguments"] for m in streamed if "tool_calls" in m] == [{"city": "Paris"}]
    assert "".join(m.get("thinking", "") for m in streamed) == "hm"
    answered = [*messages, whole, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    post(server, "/api/chat", messages=answered, tools=[WEATHER])
    prompt = server.llm.prompts[-1]
    assert '<think>hm</think>Sure<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}' in prompt and "sunny" in prompt


def test_think_reaches_the_template_and_hides_thoughts(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "weather?"}]
    reply = post(server, "/api/chat", messages=messages, tools=[WEATHER], think=False)
    assert server.llm.prompts[-1].endswith("<think></think>") and "thinking" not in reply["message"]
    post(server, "/api/chat", messages=HI, think="high")
    assert not server.llm.prompts[-1].endswith("</think>")


def test_options_and_formats_become_sampling_parameters(server: ScriptedServer) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["x"], "num_ctx": 99,
        "repeat_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_thread": 4, "no_such_option": 1,
    }
    post(server, "/api/chat", messages=HI, options=options, format="json")
    params = server.llm.params[-1]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (7, 0.5, 5, 0.5, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (3, ["x"], 1.25)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert params.structured_outputs is not None and params.structured_outputs.grammar         # thoughts may come first
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    post(server, "/api/chat", messages=HI, format=schema)
    grammar = server.llm.params[-1].structured_outputs
    assert grammar is not None and '"required": ["a"]' in (grammar.grammar or "").replace('":[', '": [')


def test_no_limit_no_penalty_no_format() -> None:
    assert chat_options({"num_predict": -1, "top_k": -1, "repeat_penalty": 1.5, "repeat_last_n": 0}) == {"top_k": 0}
    assert chat_options({"num_predict": -2, "seed": None}) == {} and response_format("") is None


def test_what_is_refused_and_how(server: ScriptedServer) -> None:
    image = [{"role": "user", "content": "see", "images": ["AAAA"]}]
    assert refused(server, "/api/chat", messages=image).startswith("messages[0].images")
    assert refused(server, "/api/chat", 404, messages=HI, model="other").startswith("the model 'other' is not served here")
    assert refused(server, "/api/chat", messages=HI, options={"mirostat": 2}).startswith("options.mirostat is not supported")
    assert refused(server, "/api/chat", messages=HI, options={"temperature": "hot"}).startswith("options.temperature:")
    assert refused(server, "/api/chat", messages=HI, options={"num_predict": 2**40}).startswith("options.num_predict must be")
    assert refused(server, "/api/chat", messages=HI, format="xml").startswith('format must be "json"')
    assert "template is not supported" in refused(server, "/api/generate", prompt="x", template="{{ .Prompt }}")
    assert "ridgeline serve" in refused(server, "/api/pull", 404)


def test_an_error_ends_a_stream_as_a_line(server: ScriptedServer) -> None:
    *_, last = lines(server, "/api/chat", messages=[{"role": "user", "content": "fail"}])
    assert last == {"error": "it broke"}


def test_a_body_may_come_without_its_type_but_not_from_a_page(server: ScriptedServer) -> None:
    """As curl -d sends it, and as Ollama's documentation writes it."""
    body = json.dumps({"model": MODEL, "messages": HI, "stream": False, "field_of_tomorrow": 1})
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert httpx.post(f"{server.url}/api/chat", content=body, headers=form).status_code == 200
    for header in ("origin", "referer", "sec-fetch-site"):
        reply = httpx.post(f"{server.url}/api/chat", content=body, headers=form | {header: "http://evil.example"})
        assert reply.status_code == 415 and "Content-Type" in reply.json()["error"]
    assert httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=form).status_code == 415


def test_an_empty_request_loads_the_model(server: ScriptedServer) -> None:
    reply = post(server, "/api/chat")
    assert reply["done"] and reply["done_reason"] == "load" and reply["message"]["content"] == ""
    assert post(server, "/api/generate", keep_alive=0)["done_reason"] == "unload"
    assert "not served" in refused(server, "/api/generate", 404, model="other")


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate_uses_the_chat_template_unless_raw(server: ScriptedServer) -> None:
    reply = post(server, "/api/generate", prompt="hi", system="be kind")
    assert reply["response"] == "Hello wörld" and reply["done_reason"] == "stop" and reply["eval_count"] == 13
    assert server.llm.prompts[-1] == "<|im_start|>system\nbe kind<|im_end|><|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert len(reply["context"]) == reply["prompt_eval_count"] + reply["eval_count"]
    post(server, "/api/generate", prompt="more", context=reply["context"])
    assert server.llm.prompts[-1].startswith("<|im_start|>system\nbe kind") and "Hello wörld" in server.llm.prompts[-1]
    post(server, "/api/generate", prompt="as it is", raw=True)
    assert server.llm.prompts[-1] == "as it is"
    streamed = lines(server, "/api/generate", prompt="hi")
    assert "".join(line["response"] for line in streamed) == "Hello wörld" and streamed[-1]["done"]


def test_generate_gives_log_probabilities(server: ScriptedServer) -> None:
    reply = post(server, "/api/generate", prompt="hi", logprobs=True, top_logprobs=1)
    assert [each["token"] for each in reply["logprobs"]][:2] == ["H", "e"] and reply["logprobs"][0]["top_logprobs"]
    assert "suffix needs a model" in refused(server, "/api/generate", prompt="x", suffix="y")


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_is_listed_shown_and_loaded(server: ScriptedServer) -> None:
    listed, = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "tiny:latest" and listed["size"] > 0 and len(listed["digest"]) == 64
    running, = httpx.get(f"{server.url}/api/ps").json()["models"]
    assert running["context_length"] == 512 and running["size_vram"] == 0
    shown = post(server, "/api/show", stream=None)
    assert shown["details"]["family"] == "llama" and shown["model_info"]["llama.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and "im_start" in shown["template"]
    version = httpx.get(f"{server.url}/api/version").json()
    assert version["ridgeline"] == __version__ and version["version"].count(".") == 2
    assert "not served" in refused(server, "/api/show", 404, model="other")


@pytest.mark.parametrize(("name", "level"), [
    ("SmolLM2-135M-Instruct.Q4_1", "Q4_1"), ("qwen2.5-coder-1.5b-instruct-q4_k_m", "q4_k_m"), ("m-IQ3_XS", "IQ3_XS"),
    ("m-bf16", "bf16"), ("m-Q8_0-00001-of-00002", "Q8_0"),
])
def test_the_quantization_in_a_files_name(name: str, level: str) -> None:
    found = _QUANTIZATION.search(name)
    assert found and found[1] == level and not _QUANTIZATION.search("Qwen3-8B")


def test_errors_of_the_gate_have_ollamas_shape(tmp_path: Path) -> None:
    with ScriptedServer(write_model(tmp_path / MODEL), script, keys=Keys(["secret"])) as server:
        assert list(httpx.get(f"{server.url}/api/tags").json()) == ["error"]
        key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/api/tags", headers=key).status_code == 200


def test_with_ollamas_own_client(server: ScriptedServer) -> None:
    ollama = pytest.importorskip("ollama")
    if not hasattr(ollama, "Client"):                    # this folder, which has the same name
        pytest.skip("the package ollama is not installed")
    client = ollama.Client(host=server.url)
    assert client.list().models[0].model == "tiny:latest" and client.show(MODEL).capabilities
    assert client.chat(MODEL, HI).message.content == "Hello wörld"
    assert "".join(part.response for part in client.generate(MODEL, "hi", stream=True)) == "Hello wörld"
    called = client.chat(MODEL, [{"role": "user", "content": "weather?"}], tools=[WEATHER]).message
    assert called.tool_calls[0].function.arguments == {"city": "Paris"}
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.chat("other", HI)


def test_a_split_file_is_as_large_as_its_parts(tmp_path: Path) -> None:
    names = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"]
    for name in (*names, "m-Q8_0.gguf"):
        (tmp_path / name).touch()
    assert model_files(tmp_path / names[0]) == [tmp_path / name for name in names]
    assert model_files(tmp_path / "m-Q8_0.gguf") == [tmp_path / "m-Q8_0.gguf"]

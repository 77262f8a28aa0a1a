"""The examples of the openai and anthropic packages, as they are written: those of the READMEs that the installed packages
carry, and, slow, the examples/ folders of their source distributions, which pip fetches.

Only the address, a key and the model's names come from outside. A model of a few lines answers: what is asked to be of a
schema is, and a tool that is offered is called once. Every example stands below, with what it prints, or what it asks for and
leaves behind where it prints nothing, or how it is refused, or why it is left out; one that does not stand here fails the test.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.metadata
import inspect
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from scripted_server import ScriptedServer
from served_model import write_model

from ridgeline.engine.ipc import Ready
from ridgeline.server.options import ServerOptions

ANSWER = "Arr, this be a test."
CONTEXT = 65_536
Refusal = tuple[str, str]           # the name of its exception, and what it says
Left = Callable[[dict[str, Any], list[str]], bool]       # of its names as it leaves them, and of the prompts that came of it
Expected = str | Refusal | Left


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    options = ServerOptions(port=0, served_model_name="tiny,gpt-*,claude-*")
    made = ScriptedServer(model, lambda prompt: said(made, prompt), server=options)
    made.llm.ready = Ready(
        model="scripted", max_model_len=CONTEXT, max_num_seqs=8, vocab_size=260, dtype="float32", device="cpu", num_blocks=64,
        block_size=16, seconds=0.0,
    )
    with made:
        yield made


@pytest.fixture
def around(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the examples find around them."""
    for name, value in {
        "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{server.url}/v1", "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": server.url,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/image.png").write_bytes(b"\x89PNG")
    (tmp_path / "input.jsonl").write_text("{}\n")
    monkeypatch.setattr("builtins.input", lambda *question: "y")


def said(server: ScriptedServer, prompt: str) -> str:
    asked = server.llm.params[-1].structured_outputs
    if asked is not None and asked.kind == "json":
        schema = json.loads(str(asked.json))
        return json.dumps(instance(schema, schema))
    if asked is not None and asked.kind == "json_object":
        return "{}"
    _, told, tools = prompt.partition("<tools>\n")
    if told and "<tool_response>\n" not in tools:
        function = json.loads(tools.splitlines()[0])
        arguments = instance(function["parameters"], function["parameters"])
        return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"
    return ANSWER


def instance(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """A small value of that schema."""
    if "$ref" in schema:
        found: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return instance(found, root)
    for words in ("anyOf", "oneOf"):
        if words in schema:
            return instance(schema[words][0], root)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: instance(each, root) for name, each in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema["items"], root)]
        case "string":
            return "a"
        case "boolean" | "null" as kind:
            return True if kind == "boolean" else None
    return 1


# -- the READMEs -------------------------------------------------------------------------------------------------------

# By words that stand in no other example; where the same words stand in several, these are the same to us.
README_RUNS: dict[str, str | Left] = {
    'instructions="You are a coding assistant': ANSWER,
    '"Talk like a pirate."': ANSWER,
    "disestablishmentarianism": ANSWER,
    "story about a unicorn": "ResponseCompletedEvent(",
    "How much ?": lambda left, prompts: left["response"].output_text == "{}" and "How much ?" in prompts[0],
    "print(response._request_id)": "resp_",
    "print(exc.request_id)": lambda left, prompts: left["completion"].choices[0].message.content == ANSWER,
    "with_options(max_retries=5)": lambda left, prompts: len(prompts) == 1 and "current day in JavaScript?" in prompts[0],
    "with_options(timeout=5.0)": lambda left, prompts: len(prompts) == 1 and "files in a directory using Python?" in prompts[0],
    "with_raw_response": "ChatCompletion(",
    "with_streaming_response": "chat.completion",
    "with OpenAI() as client": lambda left, prompts: bool(left["client"].is_closed()) and prompts == [],
    "async with AsyncOpenAI() as client": ANSWER,
    "client.fine_tuning.jobs.create(": "Another non-200-range status code was received\n404",
    "print(openai.__version__)": importlib.metadata.version("openai"),
    "Hello, Claude": "TextBlock(",
}
NO_SUCH_PATH = "does not exist here"
README_REFUSED: dict[str, Refusal] = {
    'f"{img_url}"': ("BadRequestError", "input[0].content[1] is of type 'input_image'; only text is supported here"),
    "b64_image": ("BadRequestError", "input[0].content[1] is of type 'input_image'; only text is supported here"),
    "client.fine_tuning.jobs.list(": ("NotFoundError", f"GET /v1/fine_tuning/jobs {NO_SUCH_PATH}"),
    "client.files.create(": ("NotFoundError", f"POST /v1/files {NO_SUCH_PATH}"),
    "client.audio.transcriptions": ("NotFoundError", f"POST /v1/audio/transcriptions {NO_SUCH_PATH}"),
    '"/foo"': ("NotFoundError", f"POST /v1/foo {NO_SUCH_PATH}"),
}
README_LEFT_OUT = {
    "workload_identity=": "signs in at OpenAI, by a cloud's identity",
    "https://mtls.api.openai.com": "signs in with a certificate that OpenAI knows",
    "DefaultAioHttpClient()": "needs the extra openai[aiohttp]",
    "client.realtime.connect(": "OpenAI's Realtime API, over WebSockets",
    "from flask import": "receives webhooks, which OpenAI sends",
    "response.my_field": "part of an example, about the client's own objects",
    "my.test.server.example.com": "names a server and a proxy that do not exist",
    "DefaultHttpx2Client(...)": "part of an example",
    "= AzureOpenAI(": "Azure's addresses",
    "provider=bedrock(": "Amazon's sign-in",
    "BedrockOpenAI(": "Amazon's sign-in",
}


def readme_examples(package: str) -> list[str]:
    text = importlib.metadata.metadata(package).get_payload()
    assert isinstance(text, str)
    return re.findall(r"^```(?:python|py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


EXAMPLES = {f"{name}-{place}": text for name in ("openai", "anthropic") for place, text in enumerate(readme_examples(name))}


@pytest.mark.reliability("H-08b")
def test_every_example_of_the_readmes_stands_here() -> None:
    known = [*README_RUNS, *README_REFUSED, *README_LEFT_OUT]
    found = {place: [words for words in known if words in text] for place, text in EXAMPLES.items()}
    assert {place: words for place, words in found.items() if len(words) != 1} == {}
    assert set(known) == {words[0] for words in found.values()}
    assert all([*README_RUNS.values(), *FILES.values()])                     # "" would be in whatever is printed
    assert len(EXAMPLES) > 40 and sum(words[0] in README_RUNS for words in found.values()) >= len(README_RUNS)


@pytest.mark.reliability("H-08b")
@pytest.mark.usefixtures("around")
@pytest.mark.parametrize("place", [
    place for place, text in EXAMPLES.items() if not any(words in text for words in README_LEFT_OUT)
])
def test_an_example_of_a_readme(server: ScriptedServer, place: str) -> None:
    text = EXAMPLES[place]
    known: dict[str, Expected] = {**README_RUNS, **README_REFUSED}
    check(server, text, place, next(told for words, told in known.items() if words in text))


def check(server: ScriptedServer, text: str, name: str, expected: Expected, path: Path | None = None) -> None:
    if isinstance(expected, str):
        assert expected in run(text, name, path)[0]
        return
    if not isinstance(expected, tuple):
        before = len(server.llm.prompts)
        printed, left = run(text, name, path)
        assert printed == "" and expected(left, server.llm.prompts[before:])
        return
    refused, told = expected
    with pytest.raises(getattr(anthropic if "anthropic" in name else openai, refused)) as caught:
        run(text, name, path)
    assert told in str(caught.value)


def run(text: str, name: str, path: Path | None = None) -> tuple[str, dict[str, Any]]:
    """What it prints, and its names as it leaves them. Examples that are parts of one find the client that the text before them
    had made."""
    code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    awaits = bool(code.co_flags & inspect.CO_COROUTINE)
    package: Any = anthropic if "anthropic" in name else openai
    found: dict[str, Any] = {"__name__": "__main__", "__file__": str(path), "openai": openai, "audio_bytes": b""}
    if "client = " not in text:
        kind = "OpenAI" if package is openai else "Anthropic"
        found["client"] = getattr(package, f"Async{kind}" if awaits else kind)()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if awaits:
            asyncio.run(eval(code, found))
        else:
            exec(code, found)
    return printed.getvalue(), found


# -- the folders of examples -------------------------------------------------------------------------------------------

NO_BACKGROUND = ("BadRequestError", "background with stream is not supported by this server")
NO_ENVIRONMENT = ("NotFoundError", f"POST /v1/environments {NO_SUCH_PATH}")
FILES: dict[str, Expected] = {
    "openai/async_demo.py": ANSWER,
    "openai/demo.py": "chatcmpl-",
    "openai/httpx2_client.py": ANSWER,
    "openai/parsing.py": "answer:  a",
    "openai/parsing_stream.py": "answer: a",
    "openai/parsing_tools.py": "Table.orders",
    "openai/parsing_tools_stream.py": "get_weather",
    "openai/responses_input_tokens.py": "input tokens: ",
    "openai/streaming.py": "got response data: ",
    "openai/responses/streaming.py": "ParsedResponseOutputMessage",
    "openai/responses/streaming_tools.py": "ResponseFunctionCallArgumentsDoneEvent",
    "openai/responses/structured_outputs.py": "answer:  a",
    "openai/responses/structured_outputs_tools.py": "table name: Table.orders",
    "openai/responses/background.py": NO_BACKGROUND,
    "openai/responses/background_async.py": NO_BACKGROUND,
    "openai/responses/background_streaming.py": NO_BACKGROUND,
    "openai/responses/background_streaming_async.py": NO_BACKGROUND,
    "openai/responses/multi_agent_streaming.py": ("BadRequestError", "unknown field 'multi_agent'"),
    "openai/audio.py": ("NotFoundError", f"POST /v1/audio/speech {NO_SUCH_PATH}"),
    "openai/image_stream.py": f"POST /v1/images/generations {NO_SUCH_PATH}",         # which it tells itself
    "openai/picture.py": ("NotFoundError", f"POST /v1/images/generations {NO_SUCH_PATH}"),
    "openai/text_to_speech.py": ("NotFoundError", f"POST /v1/audio/speech {NO_SUCH_PATH}"),
    "openai/video.py": ("NotFoundError", f"POST /v1/videos {NO_SUCH_PATH}"),
    "anthropic/messages.py": "TextBlock(",
    "anthropic/messages_stream.py": "accumulated message: ",
    "anthropic/structured_outputs.py": "product_name='a'",
    "anthropic/structured_outputs_streaming.py": "Final parsed order: product_name='a'",
    "anthropic/thinking.py": ANSWER,
    "anthropic/thinking_stream.py": ANSWER,
    "anthropic/tools.py": "Final response: ",
    "anthropic/tools_runner.py": "Fetching weather for a in c",
    "anthropic/tools_runner_deferred_streaming.py": ANSWER,
    "anthropic/tools_runner_search_tool.py": "Fetching weather for a in c",
    "anthropic/tools_stream.py": "snapshot: {'location': 'a'",
    "anthropic/fallbacks.py": "non-streaming: tiny",
    "anthropic/message_threads.py": ("BadRequestError", "thread: conversations are not stored here"),
    "anthropic/images.py": ("BadRequestError", "only text is supported by this server, not images or documents"),
    "anthropic/web_search.py": ("BadRequestError", "is one of Anthropic's own; only custom tools work here"),
    "anthropic/web_search_stream.py": ("BadRequestError", "is one of Anthropic's own; only custom tools work here"),
    "anthropic/agents.py": NO_ENVIRONMENT,
    "anthropic/agents_with_files.py": NO_ENVIRONMENT,
}
FILES_LEFT_OUT = {                   # by how their names begin
    "openai/azure": "Azure's addresses and sign-in",
    "openai/bedrock": "Amazon's sign-in",
    "openai/browser": "drive a browser, for OpenAI's computer tool",
    "openai/computer-desktop/": "drive a desktop, for OpenAI's computer tool",
    "openai/live/": "OpenAI's Realtime API, over WebSockets",
    "openai/module_client.py": "holds an address of its own, which is none",
    "openai/mtls_": "sign in with a certificate that OpenAI knows",
    "openai/responses/__init__.py": "is empty",
    "openai/realtime/": "OpenAI's Realtime API, over WebSockets",
    "openai/responses/multi_agent_websocket.py": "responses over WebSockets",
    "openai/responses/websocket.py": "responses over WebSockets",
    "openai/responses_websocket.py": "responses over WebSockets",
    "openai/speech_to_text.py": "needs a microphone",
    "openai/uploads.py": "files, which need an argument",
    "openai/x509_": "sign in with a certificate that OpenAI knows",
    "anthropic/agents_comprehensive.py": "Anthropic's agents, and GitHub",
    "anthropic/azure.py": "Azure's sign-in",
    "anthropic/batch_results.py": "batches, and needs an argument",
    "anthropic/bedrock.py": "Amazon's sign-in",
    "anthropic/google_cloud.py": "Google's sign-in",
    "anthropic/managed-agents": "Anthropic's agents",
    "anthropic/mcp_tool_runner.py": "needs the package mcp and a server for it",
    "anthropic/memory/": "Anthropic's memory tool",
    "anthropic/vertex.py": "Google's sign-in",
    "anthropic/workload_identity.py": "signs in at Anthropic, by a cloud's identity",
}


@pytest.mark.reliability("H-08d")
@pytest.mark.slow
@pytest.mark.usefixtures("around")
def test_the_examples_of_the_source_distributions(server: ScriptedServer, tmp_path: Path) -> None:
    texts = {}
    for package in ("openai", "anthropic"):
        for path in fetched(package, tmp_path):
            name = f"{package}/{path.as_posix().partition('/examples/')[2]}"
            texts[name] = path
    unknown = [name for name in texts if name not in FILES and not name.startswith(tuple(FILES_LEFT_OUT))]
    assert unknown == [] and FILES.keys() <= texts.keys()
    assert [start for start in FILES_LEFT_OUT if not any(name.startswith(start) for name in texts)] == []
    failed = {}
    for name, expected in FILES.items():
        try:
            check(server, texts[name].read_text(), name, expected, texts[name])
        except BaseException as error:                   # some end with SystemExit
            failed[name] = repr(error)[:300]
    assert failed == {}


def fetched(package: str, folder: Path) -> list[Path]:
    """The examples of the version that is installed."""
    wanted = f"{package}=={importlib.metadata.version(package)}"
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if made.returncode:
        pytest.fail(f"pip cannot fetch {wanted}, so nothing is known of its examples: {made.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(next(folder.glob(f"{package}-*.tar.gz"))) as archive:
        archive.extractall(folder / package, filter="data")
    return sorted((folder / package).glob("*/examples/**/*.py"))

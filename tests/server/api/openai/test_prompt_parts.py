"""What every choice repeats of its prompt: written once, and not on the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from scripted_server import ScriptedServer
from served_model import write_model

from ridgeline.engine.client.answer_stream import AnswerStream
from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.engine.token_logprobs import LogprobsAt, PromptLogprobs, TokenLogprobs
from ridgeline.messages import Logprobs
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.dialects import CHAT
from ridgeline.server.api.generation import Writer
from ridgeline.server.api.llamacpp.llama_answers import LlamaWriter
from ridgeline.server.api.llamacpp.llama_requests import LlamaRequest
from ridgeline.server.api.openai.chat import ChatMessage, ChatRequest, ChatWriter
from ridgeline.server.api.openai.completions import CompletionRequest, CompletionWriter
from ridgeline.server.endpoints import EVENTS_AT_ONCE, Generation, size_of
from ridgeline.server.http.stream import EventStream

NUM_TOKENS, NUM_ANSWERS = 50, 16


def answered(read: list[int], number: int = 0) -> RequestOutput:
    """Sixteen answers of a token each; `read` gets the positions of the prompt whose log-probabilities are read."""
    class Read(PromptLogprobs):
        def _made(self, place: int) -> LogprobsAt | None:
            read.extend([place - 1] * (place > 0))
            return super()._made(place)

    logprobs = TokenLogprobs(str)
    logprobs.add(known([9], []), 1)
    answers = [CompletionOutput(each, " a", [9], -0.5, logprobs, "length", text_offsets=[0]) for each in range(NUM_ANSWERS)]
    output = RequestOutput(str(number), "a prompt", [7] * NUM_TOKENS, answers, finished=True)
    output.prompt_logprobs = Read(known([7] * (NUM_TOKENS - 1), [7, 8]), str)
    return output


def known(tokens: list[int], tops: list[int]) -> Logprobs:
    numbers = np.full(len(tokens), -0.5, np.float32), np.ones(len(tokens), np.int32)
    values = [-0.5 - each for each in range(len(tops))]
    of_top = np.array([tops] * len(tokens), np.int32), np.array([values] * len(tokens), np.float32)
    return Logprobs(np.array(tokens, np.int32), *numbers, *of_top)


def writer_of(kind: str, **fields: Any) -> Writer:
    params = SamplingParams(n=NUM_ANSWERS, max_tokens=1, logprobs=1)
    about = (params, "id", "tiny", None)
    if kind == "chat":
        request = ChatRequest(messages=[ChatMessage(role="user", content="a")], n=NUM_ANSWERS, prompt_logprobs=1, **fields)
        return ChatWriter(request, *about)
    wants: dict[str, Any] = {"echo": True, "logprobs": 1} if kind == "echo" else {"prompt_logprobs": 1}
    return CompletionWriter(CompletionRequest(prompt="a prompt", n=NUM_ANSWERS, **wants, **fields), *about)


def deltas(output: RequestOutput, prompt: int = 0) -> list[tuple[int, AnswerDelta]]:
    made = [AnswerDelta(each.index, each.text, each.token_ids, each.logprobs, "length", None, [0]) for each in output.outputs]
    return [(prompt, each) for each in made]


@pytest.mark.parametrize("kind", ["chat", "echo", "prompt_logprobs"])
def test_a_prompts_log_probabilities_are_read_once_for_all_its_choices(kind: str) -> None:
    """128 choices with those of 8,000 tokens took the event loop 36 s: each was made anew."""
    for stream in (False, True):
        read: list[int] = []
        outputs = [answered(read, each) for each in range(1 if kind == "chat" else 2)]
        writer = writer_of(kind)
        if stream:
            written = [event for place, each in enumerate(outputs) for event in writer.events(outputs, deltas(each, place))]
        else:
            written = [writer.body(outputs)]
        size = writer.prompt_bytes(outputs[0])           # it looks at the first position
        assert size > 0
        usual = [place for place in read if place]
        assert sorted(usual) == sorted([*range(1, NUM_TOKENS - 1)] * len(outputs))
        choices = [choice for each in written for choice in json.loads(each)["choices"]]
        told = [each for each in choices if "prompt_logprobs" in each or each.get("logprobs")]
        firsts = {each["index"]: each for each in reversed(told)}
        assert len(firsts) == len(outputs) * NUM_ANSWERS
        for each in firsts.values():
            if kind == "echo":
                assert each["text"] == "a prompt a"
                assert each["logprobs"]["token_logprobs"] == [None, *[-0.5] * NUM_TOKENS]
                assert each["logprobs"]["tokens"] == ["token_id:7"] * NUM_TOKENS + ["token_id:9"]
                assert each["logprobs"]["top_logprobs"][1:] == [{"token_id:7": -0.5}] * (NUM_TOKENS - 1) + [{"token_id:9": -0.5}]
                assert len(each["logprobs"]["text_offset"]) == NUM_TOKENS + 1
            else:
                first, *others = each["prompt_logprobs"]
                seven = {"logprob": -0.5, "rank": 1, "decoded_token": "7"}
                assert first is None and len(others) == NUM_TOKENS - 1
                assert others[-1] == {"7": seven, "8": {"logprob": -1.5, "rank": 2, "decoded_token": "8"}}


@pytest.mark.parametrize("kind", ["chat", "completion", "llama.cpp"])
def test_a_repeated_prompt_is_known_to_be_long(kind: str) -> None:
    """128 answers of llama.cpp's endpoint, or of a chat with echo, held the event loop 175 ms for a prompt of 640 KB."""
    text = "#" * (LONG_BYTES + 1)
    output = answered([])
    output.prompt, output.prompt_logprobs = text, None
    about = (SamplingParams(n=NUM_ANSWERS, max_tokens=1), "id", "tiny", None)
    writer: Writer
    if kind == "chat":
        continued = ChatMessage(role="assistant", content=text)
        writer = ChatWriter(ChatRequest(messages=[continued], echo=True, continue_final_message=True, n=NUM_ANSWERS), *about)
    elif kind == "completion":
        writer = CompletionWriter(CompletionRequest(prompt=text, echo=True, n=NUM_ANSWERS), *about)
    else:
        writer = LlamaWriter(LlamaRequest(prompt=text, n_cmpl=NUM_ANSWERS), 8192, CompletionRequest(prompt=text), *about)
    for answer in output.outputs:
        answer.logprobs = None
    assert size_of(writer, [output]) > LONG_BYTES
    assert writer.bytes_of_prompts([output], deltas(output)) > LONG_BYTES
    assert writer.body([output]).decode().count(text) == NUM_ANSWERS
    for number, delta in enumerate(deltas(output)):      # each of these alone is not for the event loop
        assert writer.bytes_of_prompts([output], [delta]) > LONG_BYTES
        assert b"".join(writer.events([output], [delta])).decode().count(text) == 1, number


def test_of_llama_cpps_events_only_the_last_has_the_prompt() -> None:
    output = answered([])
    about = (SamplingParams(n=NUM_ANSWERS, max_tokens=1, stop=["x" * 1024]), "id", "tiny", None)
    writer = LlamaWriter(LlamaRequest(prompt="a"), 8192, CompletionRequest(prompt="a"), *about)
    last = deltas(output)[0]
    first = (0, AnswerDelta(0, " a", [9]))
    assert writer.bytes_of_prompts([output], [first]) == 0 < 1024 < writer.bytes_of_prompts([output], [first, last])


def test_choices_that_repeat_too_much_are_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 answers with a prompt of ten megabytes would be an answer of 1.3 GB, and up to 4 GB while it is written."""
    monkeypatch.setattr("ridgeline.server.endpoints.MOST_REPEATED", 400)
    asked = {"prompt": "a" * 50, "max_tokens": 2, "n": 4, "echo": True}
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as server:
        assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).status_code == 200
        refused = httpx.post(f"{server.url}/v1/completions", json=asked | {"n": 9}, timeout=60)
        complete(server, asked | {"n": 9, "stream": True})
        own = {"prompt": "a" * 50, "n_predict": 2, "n_cmpl": 9}
        named = httpx.post(f"{server.url}/completion", json=own, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    assert "9 answers would repeat 450 bytes of their prompts, and at most 400 can be" in refused.json()["error"]["message"]
    assert named.status_code == 400 and "n_cmpl" in named.text


def test_only_the_first_event_of_a_choice_has_its_prompt() -> None:
    output = answered([])
    writer = writer_of("echo")
    first, second = deltas(output)[:2]
    assert writer.bytes_of_prompts([output], [first, second]) == writer.prompt_bytes(output) > 0
    writer.events([output], [first])
    assert writer.bytes_of_prompts([output], [first]) == 0
    assert writer.bytes_of_prompts([output], [first, second]) == writer.prompt_bytes(output)


def complete(server: ScriptedServer, asked: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")


def test_prompts_of_long_choices_are_not_written_on_the_event_loop(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: those after the first were."""
    threads: list[str] = []
    chunks = CompletionWriter._chunks

    def noted(self: CompletionWriter, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        threads.append(threading.current_thread().name)
        return chunks(self, output, index, delta)

    monkeypatch.setattr(CompletionWriter, "_chunks", noted)
    asked = {"prompt": ["a"] * 6, "max_tokens": 2, "stream": True, "echo": True}
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as server:
        complete(server, asked)
        short = set(threads)
        threads.clear()
        monkeypatch.setattr(CompletionWriter, "prompt_bytes", lambda self, output: LONG_BYTES + 1)
        complete(server, asked)
    loop, = short
    assert sum(each != loop for each in threads) >= 6


def test_a_stream_keeps_no_log_probabilities_that_it_has_sent(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were kept to the end of the answer: 3.5 KB for each token, 15 GB for 512 streams of 8,000."""
    streams: list[Any] = []
    end = Generation._end

    def noted(self: Generation, job: Any, stream: Any) -> None:
        streams.append(stream)
        end(self, job, stream)

    monkeypatch.setattr(Generation, "_end", noted)
    asked = {"prompt": ["a", "b"], "max_tokens": 3, "stream": True, "logprobs": 1}
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as server:
        complete(server, asked)
        response = httpx.post(f"{server.url}/v1/completions", json=asked | {"stream": False}, timeout=60).json()
    streamed, whole = ([answer.logprobs for output in stream.outputs for answer in output.outputs] for stream in streams)
    assert streamed == [[], []]
    assert all(whole) and all(choice["logprobs"]["token_logprobs"] for choice in response["choices"])


def test_a_streamed_response_keeps_its_log_probabilities_as_text(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last events have them again. Sixteen streams of 1,500 tokens with twenty alternatives took 630 MB, and 166 ms of the
    event loop at their ends."""
    ended: list[tuple[Any, Any]] = []
    end = Generation._end

    def noted(self: Generation, job: Any, stream: Any) -> None:
        ended.append((job.writer, [answer.logprobs for output in stream.outputs for answer in output.outputs]))
        end(self, job, stream)

    monkeypatch.setattr(Generation, "_end", noted)
    asked = {"input": "a", "max_output_tokens": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as server:
        streamed = httpx.post(f"{server.url}/v1/responses", json=asked | {"stream": True}, timeout=60).text
        whole = httpx.post(f"{server.url}/v1/responses", json=asked, timeout=60).json()
    (writer, kept), (other, _) = ended
    assert kept == [[]]
    entries = [entry for each in (writer, other) for entry in each._items[0]["content"][0]["logprobs"]]
    assert entries and all(isinstance(entry, msgspec.Raw) for entry in entries)
    said = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")]
    parts = [said[-1]["response"]["output"][0]["content"][0], whole["output"][0]["content"][0]]
    assert parts[0]["logprobs"] == parts[1]["logprobs"]
    assert all(entry["top_logprobs"] and entry["token"] for part in parts for entry in part["logprobs"])


def test_what_a_streamed_response_keeps_for_its_end_counts_as_held(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.8 KB for each token with twenty alternatives, in the events that were sent and will be sent again."""
    held: list[int] = []
    end = EventStream.end

    async def noted(self: EventStream) -> None:
        assert self._behind is not None
        held.append(self._behind())
        await end(self)

    monkeypatch.setattr(EventStream, "end", noted)
    asked = {"input": "a", "max_output_tokens": 3, "stream": True}
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as server:
        for more in ({}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}):
            httpx.post(f"{server.url}/v1/responses", json=asked | more, timeout=60)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}, timeout=60)
    plain, told, other = held
    assert told > plain > other == 0


def test_log_probabilities_that_wait_for_a_slow_client_are_written_away_from_the_event_loop(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 answers of 400 tokens with twenty each were written in one turn of 2.6 s when their client had left."""
    threads: list[tuple[str, bool]] = []
    chunks = CompletionWriter._chunks

    def noted(self: CompletionWriter, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        threads.append((threading.current_thread().name, bool(delta.logprobs)))
        return chunks(self, output, index, delta)

    monkeypatch.setattr(CompletionWriter, "_chunks", noted)
    monkeypatch.setattr(EventStream, "is_free", False)   # as if a client did not keep up
    asked = {"prompt": ["a"] * 6, "max_tokens": 2, "stream": True, "logprobs": 1}
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as server:
        complete(server, asked)
        loop, = {name for name, _ in threads}
        threads.clear()
        monkeypatch.setattr("ridgeline.server.endpoints.BYTES_PER_VALUE", LONG_BYTES + 1)
        complete(server, asked)
    told = [name for name, has_some in threads if has_some]
    assert len(told) >= 6 and loop not in told


def test_what_waits_for_a_slow_client_is_not_written_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """51,200 tokens of 128 answers waited for a client that left: all of them were written before the event loop did anything
    else."""
    turns, seen = [0], list[int]()
    events = CompletionWriter.events

    def noted(self: CompletionWriter, *given: Any) -> list[bytes]:
        seen.append(turns[0])
        return events(self, *given)

    monkeypatch.setattr(CompletionWriter, "events", noted)

    class Left:
        """A client that has left: nothing waits for it."""

        started = True
        is_free = False

        async def write(self, new: list[bytes]) -> None: ...

        async def end(self) -> None: ...

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def send() -> None:
        stream = AnswerStream(lambda name: None)
        stream.outputs.append(answered([]))
        for place, delta in deltas(stream.outputs[0]):
            stream.push(place, delta)
        stream.end()
        about = SimpleNamespace(return_timings=None), SimpleNamespace(logprobs=None), writer_of("completion")
        job = SimpleNamespace(**dict(zip(("request", "params", "writer"), about, strict=True)))
        task = asyncio.create_task(others())
        generation = object.__new__(Generation)
        generation._dialect = CHAT
        await asyncio.wait_for(generation._send_events(stream, job, Left()), 30)     # type: ignore[arg-type]
        task.cancel()

    asyncio.run(send())
    assert len(seen) == len(set(seen)) == NUM_ANSWERS / EVENTS_AT_ONCE

"""AsyncLLM: the engine in its own process, seen from the front end. Every test runs on a real engine process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
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

from ridgeline import LLM, SamplingParams
from ridgeline.engine import ipc, process
from ridgeline.engine.async_llm import AsyncLLM
from ridgeline.errors import BadRequest, ConfigError, EngineDead, ModelError
from ridgeline.messages import Request

OPTIONS: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 600, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True)

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
    yield lambda work: runner.run(asyncio.wait_for(work, 60))
    runner.run(all_free(llm))


async def all_free(llm: AsyncLLM) -> None:
    assert llm.ready is not None
    async with asyncio.timeout(10):
        while llm.num_open or llm.running or llm.free_blocks != llm.ready.num_blocks:
            await asyncio.sleep(0.01)


async def final(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> Any:
    return [output async for output in llm.generate(prompt, params)][-1]


def test_answers_equal_those_of_the_offline_class(llm: AsyncLLM, run: Run, model: Path) -> None:
    prompts = ["abc", "a longer prompt, with more in it", [1, 2, 3]]
    offline = LLM(model, **OPTIONS).generate(prompts, GREEDY, use_tqdm=False)

    async def together() -> list[Any]:
        return await asyncio.gather(*(final(llm, prompt) for prompt in prompts))

    for mine, theirs in zip(run(together()), offline, strict=True):
        assert mine.outputs == theirs.outputs and mine.prompt_token_ids == theirs.prompt_token_ids
        assert mine.finished and len(mine.outputs[0].token_ids) == 20


def test_outputs_grow_and_do_not_change_later(llm: AsyncLLM, run: Run) -> None:
    async def collect() -> list[Any]:
        return [output async for output in llm.generate("abc", GREEDY)]

    outputs = run(collect())
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 20 and len(lengths) > 1
    assert all(later.outputs[0].text.startswith(now.outputs[0].text) for now, later in itertools.pairwise(outputs))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


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
            assert all(answer.finish_reason == "abort" for answer in outputs[-1].outputs) or len(outputs) == 1

    run(leave())                                         # and its fixture waits until everything is free


def test_aborting_what_is_not_there_is_no_error(llm: AsyncLLM, run: Run) -> None:
    run(llm.abort("nobody"))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 2, 9999], "token id 9999"),
        ([-1], "token id -1"),
        ([1] * CONTEXT, "max_model_len"),
        ([1, "a"], "integers"),
    ],
    ids=["no text", "no tokens", "high id", "low id", "too long", "not integers"],
)
def test_a_bad_request_fails_alone(llm: AsyncLLM, run: Run, prompt: Any, says: str) -> None:
    async def beside_a_good_one() -> Any:
        good = asyncio.ensure_future(final(llm, "abc"))
        with pytest.raises(BadRequest, match=says):
            await final(llm, prompt)
        return await good

    assert len(run(beside_a_good_one()).outputs[0].token_ids) == 20


def test_a_request_id_is_used_once_at_a_time(llm: AsyncLLM, run: Run) -> None:
    async def twice() -> None:
        stream = await llm.stream(["abc"], ENDLESS, request_id="mine")
        with pytest.raises(BadRequest, match="'mine' is already running"):
            await llm.stream(["abc"], GREEDY, request_id="mine")
        stream.close()
        again = await llm.stream(["abc"], GREEDY, request_id="mine")     # at once, while the old one's news may come
        assert len((await again.complete())[0].outputs[0].token_ids) == 20

    run(twice())


def test_garbage_on_the_wire_is_dropped(llm: AsyncLLM, run: Run) -> None:
    assert llm._process is not None
    for frame in (b"", b"garbage", b"\xdd\xff\xff\xff\xff", os.urandom(100)):
        llm._process._to_engine.send(frame)
    assert len(run(final(llm, "abc")).outputs[0].token_ids) == 20


def test_long_texts_are_tokenised_away_from_the_event_loop(llm: AsyncLLM, run: Run) -> None:
    threads: list[Any] = []
    tokenizer = llm.get_tokenizer()
    encode = tokenizer.encode

    async def answer(prompt: str) -> None:
        tokenizer.encode = lambda text, *args: threads.append(threading.current_thread()) or encode(text, *args)  # type: ignore
        await final(llm, prompt)
        tokenizer.encode = encode  # type: ignore[method-assign]
        threads.append(threading.current_thread())

    run(answer("short"))
    assert threads[0] is threads[1]
    threads.clear()
    run(answer("long " * 600))
    assert threads[0] is not threads[1]


def test_the_engine_dies_and_every_request_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def scene() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        await llm.start()
        assert llm._process is not None
        folder = llm._process._sockets.path
        streams = [await llm.stream(["abc"], ENDLESS) for _ in range(3)]
        await streams[0].__anext__()
        os.kill(llm._process.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match="was killed by SIGKILL"):
                await stream.complete()
        assert not llm.is_alive and llm.num_open == 0
        with pytest.raises(EngineDead, match="SIGKILL"):
            await llm.stream(["abc"], GREEDY)
        await llm.shutdown()
        await llm.shutdown()
        assert not folder.exists()

    asyncio.run(asyncio.wait_for(scene(), 60))


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

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert engine_processes() == before


def engine_processes() -> set[int]:
    return {child.pid for child in psutil.Process().children() if "ridgeline.engine.process" in child.cmdline()}


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

    def receive(self, wait: bool) -> list[Any]:
        return [self.script.pop(0)] if self.script else []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class FaultyCore:
    """Fails where it is told to."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.has_work = self.closed = False
        self.scheduler = SimpleNamespace(num_running=0, manager=SimpleNamespace(num_free=5))

    def add(self, request: Request) -> None:
        if self.fault == "add":
            raise ZeroDivisionError("in add")
        if self.fault == "refuse":
            raise BadRequest("not this one")
        self.has_work = True

    def abort(self, request_id: str, index: int | None) -> bool:
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
    link = FakeLink(ipc.Abort("nobody"), ipc.Add(Request("1", [1], GREEDY)), ipc.Shutdown())
    monkeypatch.setattr(process, "load", lambda options, link: core)
    assert process.run({}, link) == code                 # type: ignore[arg-type]
    assert link.sent == sent and core.closed


SCRIPT = """
import asyncio, json, sys
from ridgeline.engine.async_llm import AsyncLLM

async def main():
    llm = AsyncLLM(sys.argv[1], **json.loads(sys.argv[2]))
    await llm.start()
    assert "torch" not in sys.modules
    print(llm._process.pid, llm._process._sockets.path, flush=True)
    await asyncio.sleep(60)

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
    modules = "ridgeline.server.app, ridgeline.cli.serve, ridgeline.cli.chat, ridgeline.__main__"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

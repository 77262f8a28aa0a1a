"""A fault at every site of a request's way, once each: at the first call there, at the tenth, and somewhere later. Only the
request that it hits may fail; an engine that cannot go on is replaced, and what is open goes on exactly. [R-06] And at their
bars: the storm of clients that leave [R-01], an engine that is busy for a minute [R-04], processors that others use and
processes that stand still [R-11]."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faulty_engine
import httpx
import psutil
import pytest
from served_model import CONTEXT, ServerProcess, write_model

from ridgeline import SamplingParams
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.metrics import ServingMetrics
from ridgeline.process.children import start_child
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.text.detokenizer import TextStream
from ridgeline.text.tokenizer import Tokenizer

OPTIONS: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 400, "max_num_seqs": 4, "dtype": "float32"}
RULES = Supervision(max_restarts=3, backoff=0.01, silence=20.0)
# Sites of the front end, patched in this process.
HERE: dict[str, tuple[type[Any], str]] = {
    "tokenise": (Tokenizer, "encode"),
    "detokenise": (TextStream, "feed"),
    "front-end metrics": (ServingMetrics, "took"),
    "log": (logging.StreamHandler, "flush"),
}
WHEN = {"first": 1, "tenth": 10, "later": 10 + random.Random(7).randrange(5, 40)}
SELDOM = {"first": 1, "tenth": 3, "later": 5}            # where a call is made once or twice for a request
SELDOM_SITES = {"free", "tokenise", "alloc"}
ONCE = {"grammar", "log"}


class FaultyLLM(AsyncLLM):
    engine_module = "faulty_engine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=30, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=35, ignore_eos=True, logprobs=1),
    SamplingParams(seed=5, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-z]{18}")),
    SamplingParams(temperature=0, max_tokens=40, stop=["\x00never"]),
]


async def ask(llm: AsyncLLM, number: int) -> Any:
    """The answers' tokens; or the error."""
    try:
        stream = await llm.stream([f"request {number} " * 3], PARAMS[number])
        return [answer.token_ids for answer in (await stream.complete())[0].outputs]
    except Exception as error:
        return error


async def ask_all(llm: AsyncLLM) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*(ask(llm, number) for number in range(len(PARAMS)))), 60)


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[Any]]:
    async def scene() -> list[Any]:
        async with AsyncLLM(model, supervision=RULES, **OPTIONS) as llm:
            return await ask_all(llm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield asyncio.run(scene())


@pytest.mark.reliability("R-06")
@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("site", [*faulty_engine.SITES, *HERE])
def test_a_fault_costs_one_request_or_one_engine(
    site: str, when: str, model: Path, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if site in ONCE and when != "first":
        pytest.skip("it is called once")
    number = (SELDOM if site in SELDOM_SITES else WHEN)[when]
    assert not any(isinstance(each, Exception) for each in expected)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    happened = tmp_path / "happened"

    def plant_here() -> None:
        kind, name = HERE[site]
        whole, calls = getattr(kind, name), [0]

        def faulty(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                happened.touch()
                raise RuntimeError(f"planted at {site}")
            return whole(*args, **options)

        monkeypatch.setattr(kind, name, faulty)

    async def scene() -> None:
        async with FaultyLLM(model, supervision=RULES, **OPTIONS) as llm:
            if site in HERE:
                plant_here()
                if site == "log":
                    logging.getLogger("ridgeline").warning("something to write down")
            answers = await ask_all(llm)
            assert happened.exists(), "the fault was not reached"
            failed = [number for number, each in enumerate(answers) if isinstance(each, Exception)]
            assert len(failed) <= 1, [answers[number] for number in failed]
            assert [answers[each] for each in range(len(PARAMS)) if each not in failed] == [
                expected[each] for each in range(len(PARAMS)) if each not in failed
            ]
            assert llm.num_restarts <= 1
            if site == "memory":
                assert llm.num_restarts == 0 and not failed
            assert await ask_all(llm) == expected        # and all is well afterwards
            assert llm.ready is not None
            async with asyncio.timeout(10):
                while llm.num_open or llm.free_blocks != llm.ready.num_blocks:
                    await asyncio.sleep(0.01)

    if site not in HERE:
        monkeypatch.setenv(faulty_engine.VARIABLE, f"{site}|{number}|{happened}")
    asyncio.run(asyncio.wait_for(scene(), 120))


@pytest.mark.reliability("R-01c")
@pytest.mark.slow
def test_clients_that_leave_at_any_point_leave_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 streams, 200 that wait for a whole answer, 50 with four answers each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = random.Random(5)

    async def leave(llm: AsyncLLM, n: int, streams: bool) -> None:
        params = SamplingParams(max_tokens=CONTEXT, ignore_eos=True, n=n)
        stream = await llm.stream([f"client {source.random()}"], params)
        tokens, deadline = source.choice((0, 1, 2, 7)), time.monotonic() + 20 * source.random() ** 3
        while streams and tokens and time.monotonic() < deadline:
            try:
                tokens -= len(await asyncio.wait_for(stream.__anext__(), deadline - time.monotonic()))
            except TimeoutError:
                break
            tokens = max(0, tokens)
        if not streams:
            await asyncio.sleep(0.02 * source.random())
        stream.close()

    async def scene() -> None:
        options = OPTIONS | {"max_num_seqs": 16, "num_gpu_blocks_override": 3_000}
        async with AsyncLLM(model, **options) as llm:
            kinds = [(1, True)] * 500 + [(1, False)] * 200 + [(4, True)] * 50
            source.shuffle(kinds)
            waiting = asyncio.Semaphore(64)

            async def client(n: int, streams: bool) -> None:
                async with waiting:
                    await leave(llm, n, streams)

            await asyncio.gather(*(client(*kind) for kind in kinds))
            assert llm.ready is not None and llm.num_open == 0 and not llm._open.wire_ids
            async with asyncio.timeout(5):
                while llm.running or llm.free_blocks != llm.ready.num_blocks:
                    await asyncio.sleep(0.005)
            assert llm.num_aborted == len(kinds)
            stream = await llm.stream(["still well"], SamplingParams(max_tokens=5, ignore_eos=True))
            assert len((await stream.complete())[0].outputs[0].token_ids) == 5

    asyncio.run(asyncio.wait_for(scene(), 200))


# -- [R-04] ------------------------------------------------------------------------------------------------------------


class Probes:
    """Asks every second whether the server is ready, beside whatever else goes on."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, str]] = []
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        while not self._over.wait(1.0):
            told = httpx.get(f"{self._url}/health/ready", timeout=60)
            self.answers.append((told.status_code, told.json()["status"]))

    def __enter__(self) -> Probes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)


def engines_of(pid: int, module: str) -> list[int]:
    return [each.pid for each in psutil.Process(pid).children() if module in each.cmdline()]


@pytest.mark.reliability("R-04b")
@pytest.mark.slow
def test_a_minute_of_long_prompts_is_no_hung_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 8,000 tokens, one after another, in steps of a tenth of a second: some seconds each without a token."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source, took = random.Random(8), list[float]()
    options = OPTIONS | {"num_gpu_blocks_override": 1_200, "max_num_batched_tokens": 128}
    settings = {"model": str(model), "silence": 2.0, "options": options}
    server = start_child("slow_engine", "front", json.dumps(settings), stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        engines = engines_of(server.pid, "slow_engine")
        assert len(engines) == 1
        began = time.monotonic()
        with Probes(url) as probes:
            while time.monotonic() < began + 60:
                asked = {"prompt": [source.randrange(250) for _ in range(8_000)], "max_tokens": 4, "ignore_eos": True}
                at = time.monotonic()
                told = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
                assert told.status_code == 200 and told.json()["usage"]["completion_tokens"] == 4, told.text
                took.append(time.monotonic() - at)
        assert len(took) >= 3 and min(took) > 6.0        # 63 steps
        assert len(probes.answers) >= 50 and set(probes.answers) == {(200, "ok")}, probes.answers
        assert engines_of(server.pid, "slow_engine") == engines
    finally:
        server.terminate()
        server.wait(30)


# -- [R-11] ------------------------------------------------------------------------------------------------------------


@contextmanager
def stolen_processors() -> Iterator[None]:
    """A process for each processor that does nothing but use it."""
    thieves = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for each in thieves:
            each.kill()
            each.wait()


@pytest.mark.reliability("R-11b")
@pytest.mark.slow
def test_stolen_processors_and_standstills_time_no_request_out(model: Path) -> None:
    """A minute beside others that use every processor. Both processes stand still now and then, as one does that collects
    garbage or is swapped out: the front end for longer than an engine may be silent, the engine for less."""
    given = ("--load-format", "dummy", "--num-gpu-blocks-override", "600", "--max-num-seqs", "8", "--dtype", "float32")
    limits = ("--engine-timeout", "4", "--request-timeout", "30", "--max-engine-restarts", "3")
    with ServerProcess(str(model), *given, *limits) as server, stolen_processors(), ThreadPoolExecutor(4) as pool:
        front = psutil.Process(server.process.pid)
        engines = engines_of(front.pid, "ridgeline.engine.core.engine_process")
        assert len(engines) == 1
        end = time.monotonic() + 60

        def client(number: int) -> int:
            asked, count = {"prompt": f"client {number}", "max_tokens": 50, "ignore_eos": True, "stream": number % 2 == 0}, 0
            while time.monotonic() < end:
                told = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
                assert told.status_code == 200 and "error" not in told.text, told.text
                count += 1
            return count

        with Probes(server.url) as probes:
            clients = [pool.submit(client, number) for number in range(4)]
            while time.monotonic() < end - 8:
                for process, seconds in ((front, 5.0), (psutil.Process(engines[0]), 1.5)):
                    time.sleep(3.0)
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(seconds)
                    process.send_signal(signal.SIGCONT)
            assert all(each.result() > 0 for each in clients)
        assert len(probes.answers) >= 15 and set(probes.answers) == {(200, "ok")}, probes.answers
        assert engines_of(front.pid, "ridgeline.engine.core.engine_process") == engines
